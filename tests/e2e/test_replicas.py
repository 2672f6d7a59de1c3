"""``descant serve`` with two replicas: one is killed, only its own models notice, and they a pause."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from descant.testing.server import END_S, START_S, Server, serve
from descant.testing.tiny import tiny_model

pytestmark = pytest.mark.crashes

ADAM = types.AdamParams(learning_rate=1e-2)
GREEDY = types.SamplingParams(max_tokens=5, temperature=0.0)
PROMPT = types.ModelInput.from_ints([10, 11, 12])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # at exit the SDK would wait for a server that is gone


def batch() -> list[types.Datum]:
    tokens = np.arange(10, 20)
    inputs = {
        "target_tokens": types.TensorData.from_numpy(tokens[1:].astype(np.int64)),
        "weights": types.TensorData.from_numpy(np.ones(9, np.float32)),
    }
    return [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)]


def train(client: tinker.TrainingClient, num_steps: int) -> list[Any]:
    """Submitted, not awaited: futures of each backward."""
    backwards = []
    for _ in range(num_steps):
        backwards.append(client.forward_backward(batch(), "cross_entropy"))
        client.optim_step(ADAM)
    return backwards


def losses(backwards: list[Any]) -> list[float]:
    return [one.result(timeout=END_S).metrics["loss:sum"] for one in backwards]


def ready(server: Server) -> tuple[int, dict[str, str]]:
    try:
        with urllib.request.urlopen(f"{server.url}/readyz", timeout=END_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def until_ready(server: Server, *, missing: str, status: int = 200) -> None:
    """``missing``: what is named until then, with this status."""
    deadline = time.monotonic() + START_S
    while (answer := ready(server)) != (200, {"status": "ready"}):
        assert answer[0] == status
        assert missing in str(answer[1])
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ranks(server: Server) -> list[int]:
    """In the order in which they were started: replica 0 first."""
    children = psutil.Process(server.process.pid).children()
    return sorted(child.pid for child in children if any("rank_main" in word for word in child.cmdline()))


def test_one_replica_of_two_is_killed(model: Path, tmp_path: Path):
    with serve(model, tmp_path / "data", "parallel.replicas=2") as server:
        service_client = tinker.ServiceClient(base_url=server.url, api_key="tml-test-key-1")

        def create() -> tinker.TrainingClient:
            return service_client.create_lora_training_client(str(model), rank=4, seed=0).result(timeout=END_S)

        victim, survivor, undisturbed = create(), create(), create()
        expected = losses(train(undisturbed, 12))
        assert ready(server) == (200, {"status": "ready"})
        assert len(ranks(server)) == 2
        losses(train(victim, 1))
        path = victim.save_state("before").result(timeout=END_S).path
        sampler = survivor.save_weights_and_get_sampling_client().result(timeout=END_S)
        before = sampler.sample(PROMPT, 1, GREEDY).result(timeout=END_S).sequences[0].tokens

        going_on = train(survivor, 6)
        os.kill(ranks(server)[0], signal.SIGKILL)
        going_on += train(survivor, 6)
        assert losses(going_on) == expected, "not bit-equal to an undisturbed training"
        newcomer = create()  # at once
        assert losses(train(newcomer, 12)) == expected
        assert sampler.sample(PROMPT, 1, GREEDY).result(timeout=END_S).sequences[0].tokens == before
        assert losses(train(victim, 11)) == expected[1:], "not bit-equal to an undisturbed training"

        until_ready(server, missing="replica 0")
        assert len(ranks(server)) == 2
        resumed = service_client.create_training_client_from_state_with_optimizer(path).result(timeout=END_S)
        assert losses(train(resumed, 2)) == expected[1:3]
        pids = ranks(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_either_of_two_that_share_nothing_is_killed(model: Path, tmp_path: Path):
    """What the other holds stays: models without their sampler, and published weights without their trainer."""
    with serve(model, tmp_path / "data", "parallel.train_replicas=1", "parallel.sample_replicas=1") as server:
        service_client = tinker.ServiceClient(base_url=server.url, api_key="tml-test-key-1")
        client = service_client.create_lora_training_client(str(model), rank=4, seed=0).result(timeout=END_S)

        def sampled(sampler: tinker.SamplingClient) -> list[int]:
            return sampler.sample(PROMPT, 1, GREEDY).result(timeout=END_S).sequences[0].tokens

        trainer, engine = ranks(server)
        losses(train(client, 3))
        old = client.save_weights_and_get_sampling_client().result(timeout=END_S)
        before_training = sampled(old)
        path = client.save_state("before").result(timeout=END_S).path
        named = client.save_weights_for_sampler("named").result(timeout=END_S).path
        from_file = service_client.create_sampling_client(model_path=named).result(timeout=END_S)
        losses(train(client, 3))
        new = client.save_weights_and_get_sampling_client().result(timeout=END_S)
        before = [sampled(new), sampled(from_file)]

        os.kill(engine, signal.SIGKILL)
        assert [sampled(new), sampled(from_file)] == before, "its model is what it was, and its file is there"
        assert sampled(old) == before_training, "its model is made again to publish it"
        until_ready(server, missing="replica 1", status=503)
        losses(train(client, 1))

        assert ranks(server)[0] == trainer
        os.kill(trainer, signal.SIGKILL)
        assert [sampled(new), sampled(from_file)] == before, "nothing of it was lost"
        going_on = losses(train(client, 2))
        until_ready(server, missing="replica 0", status=503)
        resumed = service_client.create_training_client_from_state_with_optimizer(path).result(timeout=END_S)
        assert losses(train(resumed, 6))[-2:] == going_on, "not bit-equal to an undisturbed training"
        sampled(resumed.save_weights_and_get_sampling_client().result(timeout=END_S))
