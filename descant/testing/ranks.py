"""Replicas on tiny models, in this process: the real turn loop, learner and sampler, in milliseconds.

``build_*`` can also be named in ``RankSpec.build`` ("descant.testing.ranks:build_tiny"): then ``model`` is the
directory of a tiny model, and the rank is a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.ranks.peers import Peers
from descant.ranks.replica import Replica
from descant.ranks.replica_set import ReplicaSet
from descant.ranks.settings import RankSettings, RankSpec
from descant.ranks.turns import Microbatch
from descant.ranks.worker import Worker
from descant.testing.tiny import tiny_model

SETTINGS = RankSettings(
    dtype="float32",
    device="cpu",
    num_threads=1,
    microbatch_tokens=16,
    kv_bytes=1 << 20,
    max_running=4,
    max_waiting=4,
    step_tokens=32,
)
"""Small limits, so that passes are shared and split, queues fill, and prompts come in chunks."""


def build_tiny(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> Worker:
    torch.set_num_threads(1)
    phase("loading a tiny model")
    source = ModelSource(name="tiny", directory=Path(spec.model))
    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
    return Worker(model, spec.settings, spec.losses, peers)


def build_slow(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> Worker:
    """A training pass lasts until the test has ended the rank."""
    worker = build_tiny(spec, phase, peers)

    def begin_microbatch(turn: Microbatch) -> NoReturn:
        time.sleep(3600)
        raise AssertionError

    worker.begin_microbatch = begin_microbatch  # type: ignore[method-assign]
    return worker


@asynccontextmanager
async def tiny_replica(
    directories: pytest.TempPathFactory, *, settings: RankSettings = SETTINGS, arch: str = "llama"
) -> AsyncIterator[Replica]:
    """A replica in process, closed at the end; the model is written once a session."""
    directory = directories.getbasetemp() / f"tiny-{arch}"
    if not directory.exists():
        tiny_model(arch, directory)
    spec = RankSpec(model=str(directory), settings=settings)
    replica = await Replica.in_process(lambda phase: build_tiny(spec, phase, Peers()), settings)
    try:
        yield replica
    finally:
        await replica.close()


@asynccontextmanager
async def tiny_replica_set(
    directories: pytest.TempPathFactory, num_replicas: int = 2, *, settings: RankSettings = SETTINGS
) -> AsyncIterator[ReplicaSet]:
    """As many replicas in process, as one."""
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(tiny_replica(directories, settings=settings)) for _ in range(num_replicas)
        ]
        yield ReplicaSet(replicas, full=settings.max_running)
