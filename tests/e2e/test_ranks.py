"""``descant serve`` with a replica of two ranks: the death of one is found soon, and a client notices a pause."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import tinker

from descant.testing.server import END_S, START_S, Server, serve
from descant.testing.tiny import tiny_model
from tests.e2e.test_replicas import GREEDY, PROMPT, losses, ready, train

pytestmark = pytest.mark.crashes

NOTICED_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # at exit the SDK would wait for a server that is gone


def processes(server: Server, module: str) -> list[int]:
    """In the order in which they were started: rank 0 first."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sorted(child.pid for child in children if module in " ".join(child.cmdline()))


def until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while ready(server) != (200, {"status": "ready"}):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_replica_of_two_ranks(model: Path, tmp_path: Path):
    with serve(model, tmp_path / "data", "parallel.data_parallel_size=2", "rank.stopped_grace_s=1") as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-test-key-1")
        assert len(processes(server, "descant.ranks.rank_main")) == 2
        assert len(processes(server, "descant.distributed.coordinator.process")) == 1
        faults = ((1, signal.SIGKILL, "killed by SIGKILL"), (0, signal.SIGSTOP, "stopped by a signal"))
        seen = []
        for rank, number, says in faults:
            training = create(client, model)
            seen.append(losses(train(training, 6)))
            path = training.save_state(f"before-{rank}").result(timeout=END_S).path
            sampler = training.save_weights_and_get_sampling_client().result(timeout=END_S)
            assert len(sampler.sample(PROMPT, 3, GREEDY).result(timeout=END_S).sequences) == 3

            pids = processes(server, "descant.ranks.rank_main") + processes(
                server, "descant.distributed.coordinator.process"
            )
            began = time.monotonic()
            os.kill(pids[rank], number)
            while ready(server)[0] == 200:
                assert time.monotonic() - began < 2 * NOTICED_S
            seen[-1] += losses(train(training, 2))  # sent while there is no rank
            until_ready(server)
            assert not any(map(psutil.pid_exists, pids))
            log = (tmp_path / "server.log").read_text()
            assert f"rank {rank} of {model}" in log
            assert says in log
            assert len(sampler.sample(PROMPT, 3, GREEDY).result(timeout=END_S).sequences) == 3
            resumed = client.create_training_client_from_state_with_optimizer(path).result(timeout=END_S)
            assert losses(train(resumed, 2)) == seen[-1][-2:], "bit-equal to a training that was not disturbed"
        assert seen[0] == seen[1]
        assert seen[0][-1] < seen[0][0]
        pids = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
        assert len(pids) >= 3
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)


def create(client: tinker.ServiceClient, model: Path) -> tinker.TrainingClient:
    return client.create_lora_training_client(str(model), rank=4, seed=0).result(timeout=END_S)
