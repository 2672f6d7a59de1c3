"""Replicas on tiny models, in this process: the real turn loop, learner and sampler, in milliseconds.

``build_*`` can also be named in ``RankSpec.build`` ("descant.testing.ranks:build_tiny"): then ``model`` is the
directory of a tiny model, and the rank is a process of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from descant.distributed.process_table import process_status
from descant.errors import DescantError, RankDied, ServerError, UserError
from descant.model.load import ModelSource, load_model
from descant.ranks import rank_main
from descant.ranks.channel import RankChannel, ServerChannel, TurnStatus
from descant.ranks.launch import EXIT_TIMEOUT_S, Link, Receive, exit_in_words, start_ranks
from descant.ranks.ops import Microbatch, RankRequest
from descant.ranks.peers import Peers
from descant.ranks.replica import Replica
from descant.ranks.roles.sample import SampleRole
from descant.ranks.roles.train import MicrobatchReport, TrainRole
from descant.ranks.settings import (
    RankAssignment,
    RankSettings,
    RankSpec,
    ReplicaSettings,
    SampleSettings,
    TrainSettings,
)
from descant.ranks.worker import Worker, build
from descant.sample.plan import SequenceOutput, StepPlan
from descant.testing.tiny import tiny_model
from descant.types import ROLES, Command, ForwardBackward, Result, Role, Version

SETTINGS = ReplicaSettings(
    rank=RankSettings(
        dtype="float32",
        device="cpu",
        num_threads=1,
        start_timeout_s=120.0,
        turn_timeout_s=120.0,
        stopped_grace_s=1.0,
    ),
    train=TrainSettings(microbatch_tokens=16),
    sample=SampleSettings(max_num_seqs=4, max_num_batched_tokens=32, max_queued_requests=4, kv_cache_bytes=1 << 20),
)
"""Small limits, so that passes are shared and split, queues fill, and prompts come in chunks; nothing waits for
longer than a test should."""


def changed(settings: ReplicaSettings, **groups: Mapping[str, object]) -> ReplicaSettings:
    """``changed(SETTINGS, train={"microbatch_tokens": 40})``: ``settings`` with some fields of some groups replaced."""
    return replace(settings, **{name: replace(getattr(settings, name), **of) for name, of in groups.items()})


def build_tiny(
    spec: RankSpec,
    phase: Callable[[str], None],
    peers: Peers,
    *,
    train: type[TrainRole] = TrainRole,
    sample: type[SampleRole] = SampleRole,
) -> Worker:
    torch.set_num_threads(1)
    phase("loading a tiny model")
    source = ModelSource(name="tiny", directory=Path(spec.model))
    shard = peers.shard if spec.settings.parallel.fsdp else None
    with peers.staggered("loading", at_once=1):
        model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False, shard=shard)
    return Worker(model, spec.settings, spec.losses, peers, roles=spec.roles, train=train, sample=sample)


def build_limited(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> Worker:
    """On a GPU of which each rank may have ``DEVICE_BYTES``."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(int(os.environ["DEVICE_BYTES"]) / total)
    return build(spec, phase, peers)


def build_slow(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> Worker:
    """A training pass lasts until the test has ended the rank."""
    return build_tiny(spec, phase, peers, train=_Slow)


class _Slow(TrainRole):
    def begin(self, op: Microbatch) -> NoReturn:
        time.sleep(3600)
        raise AssertionError


def build_odd(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> Worker:
    """The last rank of several goes wrong where a model's id says so, or requests are to move together, and the others
    do not."""
    if peers.rank < peers.num_ranks - 1:
        return build_tiny(spec, phase, peers)
    return build_tiny(spec, phase, peers, train=_OddTrain, sample=_OddSample)


def build_odd_from_the_start(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> Worker:
    """The last rank cannot serve the model, the others can."""
    if peers.rank == peers.num_ranks - 1:
        raise UserError(f"{spec.model} cannot be served here")
    return build_tiny(spec, phase, peers)


class _OddTrain(TrainRole):
    def pin(self, model_id: str) -> None:
        if model_id == "cannot come back":
            raise ServerError("its file cannot be read here")
        super().pin(model_id)

    def begin(self, op: Microbatch) -> MicrobatchReport:
        models = {part.request[0] for part in op.parts}
        if "sleeps" in models:
            time.sleep(3600)
        if "breaks" in models:
            raise RuntimeError("secret detail")
        return super().begin(op)

    def open(self, command: ForwardBackward) -> None:
        if command.model_id == "has no room":
            raise ServerError("there is no room here")
        super().open(command)

    def row(self, command: Command, loaded: Any) -> Result:
        if command.model_id == "is alone":
            raise ServerError("there is no disk here")
        return super().row(command, loaded)


class _OddSample(SampleRole):
    def pin_version(self, version: Version, count: int) -> None:
        if version.model_id == "is not pinned" or count > 1:
            raise ServerError("its file cannot be read here")
        super().pin_version(version, count)

    def sample(self, plan: StepPlan | None) -> Sequence[SequenceOutput] | DescantError | None:
        if plan is not None and any(len(step.tokens) == 13 for step in plan.sequences):
            return ServerError("this rank does not sample 13 tokens")
        return super().sample(plan)


class _ForkedRank:
    """``RankHandle`` of a process that was forked off one which has loaded torch: it begins in milliseconds."""

    def __init__(self, process: Any, channel: ServerChannel, turn_status: TurnStatus):
        self.pid: int = process.pid
        self.node = ""
        self.turn_status = turn_status
        self._process, self._channel = process, channel
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(process.sentinel)
            self._ended.set()

        loop.add_reader(process.sentinel, ended)

    @classmethod
    async def start(cls, assignment: RankAssignment, receive: Receive) -> _ForkedRank:
        ours, theirs = socket.socketpair()
        turn_status = TurnStatus()
        process = _FORKS.Process(target=_run_forked, args=(theirs, DupFd(turn_status.fd), assignment), daemon=True)
        await asyncio.to_thread(process.start)
        theirs.close()
        return cls(process, await ServerChannel.open(ours, receive), turn_status)

    def send(self, request: RankRequest) -> None:
        self._channel.send(request)

    def kill(self) -> None:
        self._process.kill()

    async def exited(self) -> str:
        await self._ended.wait()
        self._process.join()
        await asyncio.wait([self._channel.closed], timeout=EXIT_TIMEOUT_S)
        self._channel.close()
        return exit_in_words(self.pid, self._process.exitcode)

    def last_lines(self) -> str:
        return ""

    def is_stopped(self) -> bool:
        status = process_status(self.pid)
        return status is not None and status.stopped

    def close(self) -> None:
        self.turn_status.close()


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["descant.ranks.rank_main", "descant.ranks.spmd", "transformers.models.llama.modeling_llama", __name__]
)


def _run_forked(channel: socket.socket, turn_status: Any, assignment: RankAssignment) -> None:
    code = rank_main.run(
        assignment.spec,
        RankChannel(channel),
        TurnStatus(turn_status.detach()),
        rank=assignment.rank,
        rendezvous=assignment.rendezvous,
    )
    os._exit(code)


async def start_forked(spec: RankSpec, receive: Receive) -> Link:
    """A ``Launcher`` for tests: the ranks are real processes, with a coordinator, and begin quickly. They print
    to where the first of them did."""
    return await start_ranks(spec, receive, _ForkedRank.start)


@asynccontextmanager
async def tiny_replica(
    directories: pytest.TempPathFactory,
    *,
    settings: ReplicaSettings = SETTINGS,
    arch: str = "llama",
    roles: frozenset[Role] = ROLES,
) -> AsyncIterator[Replica]:
    """A replica in process, closed at the end; the model is written once a session."""
    spec = RankSpec(model=str(written(directories, arch)), settings=settings, roles=roles)
    replica = await Replica.in_process(lambda phase: build_tiny(spec, phase, Peers()), settings)
    try:
        yield replica
    finally:
        await replica.close()


def written(directories: pytest.TempPathFactory, arch: str = "llama") -> Path:
    directory = directories.getbasetemp() / f"tiny-{arch}"
    if not directory.exists():
        tiny_model(arch, directory)
    return directory


@asynccontextmanager
async def tiny_ranks(
    directories: pytest.TempPathFactory,
    num_ranks: int = 2,
    *,
    settings: ReplicaSettings = SETTINGS,
    build: str = "build_tiny",
    on_death: Callable[[RankDied], None] | None = None,
) -> AsyncIterator[Replica]:
    """A replica of several ranks, each a process of its own, joined by gloo."""
    spec = RankSpec(
        model=str(written(directories)),
        settings=changed(settings, parallel={"data_parallel_size": num_ranks}),
        build=f"descant.testing.ranks:{build}",
    )
    replica = await Replica.start(spec, launch=start_forked, on_death=on_death)
    try:
        yield replica
    finally:
        await replica.close()
