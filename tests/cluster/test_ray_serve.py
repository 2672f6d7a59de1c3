"""``descant serve --ray``: two replicas on two nodes; one is killed, then the server is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from descant.testing.server import END_S, serve

GREEDY = types.SamplingParams(max_tokens=5, temperature=0.0)
PROMPT = types.ModelInput.from_ints([10, 11, 12])


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # at exit the SDK would wait for a server that is gone


def batch() -> list[types.Datum]:
    tokens = np.arange(10, 20)
    inputs = {"target_tokens": types.TensorData.from_numpy(tokens[1:].astype(np.int64))}
    return [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)]


def loss(client: tinker.TrainingClient) -> float:
    backward = client.forward_backward(batch(), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2))
    return float(backward.result(timeout=END_S).metrics["loss:sum"])


def ranks(two_nodes: Any) -> list[psutil.Process]:
    """The ranks' processes on each node, first node first."""
    found = []
    for node in two_nodes.list_all_nodes():
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in raylet.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if any("rank_main" in word for word in process.cmdline()):
                    found.append(process)
    return found


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + END_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_two_replicas_on_two_nodes(two_nodes: Any, tiny: Path, tmp_path: Path) -> None:
    wanted = f"ray.address={two_nodes.address}", "parallel.replicas=2", "rank.num_threads=2"
    with serve(tiny, tmp_path / "data", *wanted) as server:
        service_client = tinker.ServiceClient(base_url=server.url, api_key="tml-test-key-1")

        def create() -> tinker.TrainingClient:
            return service_client.create_lora_training_client(str(tiny), rank=4, seed=0).result(timeout=END_S)

        first, second = create(), create()
        assert loss(first) == loss(second), "the same model on another node"
        nodes = {process.parents()[1].pid for process in ranks(two_nodes)}
        assert len(nodes) == 2
        path = first.save_state("before").result(timeout=END_S).path
        sampler = second.save_weights_and_get_sampling_client().result(timeout=END_S)
        assert len(sampler.sample(PROMPT, 1, GREEDY).result(timeout=END_S).sequences[0].tokens) == 5

        victim = next(p for p in ranks(two_nodes) if p.pid == min(q.pid for q in ranks(two_nodes)))
        before = {process.pid for process in ranks(two_nodes)}
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: len(ranks(two_nodes)) == 2 and {p.pid for p in ranks(two_nodes)} != before, "no new rank")
        resumed = service_client.create_training_client_from_state_with_optimizer(path).result(timeout=END_S)
        assert loss(resumed) < loss(create())

        left = ranks(two_nodes)
        server.process.kill()
        server.process.wait(END_S)
        for process in left:
            process.wait(END_S)
