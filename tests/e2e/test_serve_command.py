"""``descant serve`` as a process: what it prints, a rank that dies under it, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from descant.testing.server import END_S, START_S, Server, serve
from descant.testing.tiny import tiny_model

pytestmark = pytest.mark.crashes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # at exit the SDK would wait for a server that is gone


def batch() -> list[types.Datum]:
    tokens = np.arange(10, 20)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(tokens[1:].astype(np.int64)),
                "weights": types.TensorData.from_numpy(np.ones(9, np.float32)),
            },
        )
    ]


def create(url: str, model: Path) -> tuple[tinker.ServiceClient, tinker.TrainingClient]:
    service_client = tinker.ServiceClient(base_url=url, api_key="tml-test-key-1")
    return service_client, service_client.create_lora_training_client(str(model), rank=4, seed=0).result()


def step(client: tinker.TrainingClient) -> None:
    backward = client.forward_backward(batch(), "cross_entropy")
    update = client.optim_step(types.AdamParams(learning_rate=1e-2))
    backward.result(timeout=END_S)
    update.result(timeout=END_S)


def loss(client: tinker.TrainingClient) -> float:
    return client.forward(batch(), "cross_entropy").result(timeout=END_S).metrics["loss:sum"]


def rank_pids(server: Server) -> list[int]:
    """Children of the server that run a rank."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_four_kills_in_a_row_are_four_pauses(model: Path, tmp_path: Path):
    """What is in flight gets its answer, what begins then waits for the next rank, and checkpoints load."""
    data_dir = tmp_path / "data"
    with serve(model, data_dir) as server:
        assert f"data in {data_dir}" in server.printed
        service_client, client = create(server.url, model)
        base = service_client.create_sampling_client(base_model=str(model)).result(timeout=END_S)
        prompt, greedy = types.ModelInput.from_ints([10, 11, 12]), types.SamplingParams(max_tokens=5, temperature=0.0)
        seen = set()
        for number in range(4):
            step(client)
            path = client.save_state(f"before-{number}").result(timeout=END_S).path
            expected = loss(client)
            [pid] = rank_pids(server)
            seen.add(pid)
            in_flight = [client.forward(batch(), "cross_entropy") for _ in range(4)]
            os.kill(pid, signal.SIGKILL)
            sampled = base.sample(prompt, 1, greedy)
            for future in in_flight:
                assert future.result(timeout=END_S).metrics["loss:sum"] == expected
            assert loss(client) == expected
            resumed = service_client.create_training_client_from_state_with_optimizer(path).result(timeout=START_S)
            assert loss(resumed) == expected
            assert len(sampled.result(timeout=END_S).sequences) == 1
        assert len(seen) == 4
        log = (tmp_path / "server.log").read_text()
        assert log.count("serves again") == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_server_and_rank_and_a_checkpoint_goes_on(model: Path, tmp_path: Path, number: int):
    with serve(model, tmp_path / "data") as server:
        _, client = create(server.url, model)
        step(client)
        path = client.save_state("before").result(timeout=END_S).path
        expected = loss(client)
        [pid] = rank_pids(server)
        server.process.send_signal(number)
        assert server.process.wait(END_S) == 0
        assert not Path(f"/proc/{pid}").exists()
    with serve(model, tmp_path / "data") as server:
        service_client = tinker.ServiceClient(base_url=server.url, api_key="tml-test-key-1")
        resumed = service_client.create_training_client_from_state_with_optimizer(path).result(timeout=END_S)
        assert loss(resumed) == expected


def test_what_survives_when_every_process_is_killed(model: Path, tmp_path: Path):
    """The client lives on through the restart, on the same port: its session, its results, its checkpoints, its model
    and its samplers are there."""
    key = {"X-API-Key": "tml-test-key-1"}
    with serve(model, tmp_path / "data") as server:
        _, client = create(server.url, model)
        step(client)
        path = client.save_state("before").result(timeout=END_S).path
        named = client.save_weights_for_sampler("named").result(timeout=END_S).path
        sampler = client.create_sampling_client(named).result(timeout=END_S)
        ephemeral = client.save_weights_and_get_sampling_client().result(timeout=END_S)
        prompt, greedy = types.ModelInput.from_ints([10, 11, 12]), types.SamplingParams(max_tokens=5, temperature=0.0)
        expected = sampler.sample(prompt, 1, greedy).result(timeout=END_S).sequences[0].tokens
        expected_loss = loss(client)
        body = {"model_id": client.model_id, "path": "before", "seq_id": 3}  # sent again, to learn its request id
        request_id = httpx.post(f"{server.url}/api/v1/save_weights", json=body, headers=key).json()["request_id"]
        result = retrieve(server.url, request_id, key)
        assert result["path"] == path
        [pid] = rank_pids(server)
        server.process.kill()
        server.process.wait(END_S)
    port = int(server.url.rsplit(":", 1)[1])
    with serve(model, tmp_path / "data", f"server.port={port}") as server:
        assert not Path(f"/proc/{pid}").exists()
        assert retrieve(server.url, request_id, key) == result
        session = client.model_id.partition(":")[0]
        beat = httpx.post(f"{server.url}/api/v1/session_heartbeat", json={"session_id": session}, headers=key)
        assert beat.status_code == 200
        assert loss(client) == expected_loss
        assert ephemeral.sample(prompt, 1, greedy).result(timeout=END_S).sequences[0].tokens == expected
        assert sampler.sample(prompt, 1, greedy).result(timeout=END_S).sequences[0].tokens == expected
        service_client = tinker.ServiceClient(base_url=server.url, api_key="tml-test-key-1")
        resumed = service_client.create_training_client_from_state_with_optimizer(path).result(timeout=END_S)
        step(resumed)


def retrieve(url: str, request_id: str, key: dict[str, str]) -> dict[str, str]:
    answer = httpx.post(
        f"{url}/api/v1/retrieve_future", json={"request_id": request_id}, headers=key, timeout=END_S
    ).json()
    assert isinstance(answer, dict)
    return answer


def test_a_model_that_cannot_be_served_is_a_sentence_and_code_2(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "descant.cli", "serve", str(tmp_path / "empty"), "--port", "0"]
    done = subprocess.run(
        [*command, "--set", f"data_dir={tmp_path / 'data'}"], capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("descant: ")
