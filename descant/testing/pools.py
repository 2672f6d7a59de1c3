"""Replicas for tests of pools: in memory, with roles, that die on command; and pools over these or tiny ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from descant.errors import RankDied, ServerError
from descant.pools.engines import EnginePool
from descant.pools.members import EngineMember, TrainerMember
from descant.pools.supervisor import ReplicaSpec
from descant.pools.traffic import Traffic
from descant.pools.trainers import TrainerPool
from descant.ranks.health import Death, Health, TurnReport
from descant.ranks.settings import ReplicaSettings
from descant.service.backends import Backend
from descant.testing.fakes import FakeEngine, FakeTrainer, FakeWorld
from descant.testing.ranks import SETTINGS, tiny_replica
from descant.types import (
    ROLES,
    Command,
    EngineCapabilities,
    Manifest,
    ModelFacts,
    Result,
    Role,
    SampleDelta,
    SampleRequest,
    SnapshotRef,
    Version,
)

BOTH = ROLES
TRAINS: frozenset[Role] = frozenset(("train",))
SAMPLES: frozenset[Role] = frozenset(("sample",))

Hook = Callable[[object], Awaitable[None]]


class FakeReplica:
    """``Supervised`` in memory, a ``FakeWorld`` of its own. It dies on command, with all that is pending, and comes
    back empty, after ``failing_starts`` that fail. ``hook``: as ``FakeWorld``'s, over all lives."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 1024,
        max_context_length: int = 64,
        capabilities: EngineCapabilities | None = None,
        step_s: float = 0.0,
    ):
        """``max_num_seqs``: requests that it has room for. ``step_s``: as of ``FakeEngine``."""
        self.hook: Hook | None = None
        self.commands: list[Command] = []
        self.published: list[SnapshotRef] = []
        """What it was asked for, in all its lives."""
        self.death: Death | None = None
        self.num_served = 0
        self.failing_starts = 0
        self.on_death: Callable[[RankDied], None] | None = None
        self._max_num_seqs = max_num_seqs
        self._max_context_length = max_context_length
        self._capabilities = capabilities
        self._step_s = step_s
        self._pending: list[asyncio.Future[Result]] = []
        self._begin()

    def _begin(self) -> None:
        self.world = FakeWorld(hook=self._call_hook, max_context_length=self._max_context_length)
        self.trainer = FakeTrainer(self.world)
        self.engine = FakeEngine(
            self.world, max_num_seqs=self._max_num_seqs, capabilities=self._capabilities, step_s=self._step_s
        )
        self.alive = self.serving = True

    async def _call_hook(self, what: object) -> None:
        if self.hook is not None:
            await self.hook(what)

    @property
    def facts(self) -> ModelFacts:
        return self.world.facts

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.engine.capabilities

    # ------------------------------------------------------------------------------------------------ life
    def die(self) -> None:
        self.alive = self.serving = False
        self.death = Death(message="the rank was killed")
        for future in self._pending:
            if not future.done():
                future.set_exception(RankDied("the rank was killed"))
        if self.on_death is not None:
            self.on_death(RankDied("the rank was killed"))

    def _check(self) -> None:
        if not self.alive:
            raise RankDied("the rank was killed")

    async def restart(self, *, on_phase: Callable[[str], None] | None = None) -> None:
        self.alive = True
        await asyncio.sleep(0)
        if self.failing_starts > 0:
            self.failing_starts -= 1
            self.alive = False
            raise ServerError("it did not come up")
        self._begin()

    async def close(self) -> None:
        self.on_death = None
        self.die()

    @property
    def health(self) -> Health:
        return Health(
            state="serving" if self.serving else "down",
            pids=(),
            nodes=(),
            device="cpu",
            runs=self.running(),
            runs_s=0.0,
            num_commands=0,
            num_sample_requests=0,
        )

    async def turns(self) -> TurnReport | None:
        return None

    # ------------------------------------------------------------------------------------------------ Trainer
    def submit(self, command: Command) -> asyncio.Future[Result]:
        if not self.alive:
            future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
            future.set_exception(RankDied("the rank was killed"))
            return future
        self.commands.append(command)
        future = self.trainer.submit(command)
        self._pending.append(future)
        return future

    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        self._check()
        manifest = await self.trainer.save(ref, dest)
        self._check()
        return manifest

    async def drop(self, ref: SnapshotRef) -> None:
        await self.trainer.drop(ref)

    def running(self) -> str:
        return self.trainer.running()

    # ------------------------------------------------------------------------------------------------ Engine
    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        self._check()
        async for delta in self.engine.sample(request):
            self._check()
            yield delta

    async def publish(self, ref: SnapshotRef) -> None:
        self._check()
        self.published.append(ref)
        await self.engine.publish(ref)
        self._check()

    async def release(self, version: Version) -> None:
        await self.engine.release(version)

    async def cancel(self, request_id: str) -> None:
        await self.engine.cancel(request_id)

    async def stats(self) -> Mapping[str, float]:
        self._check()
        return {"adapters": len(self.world.adapters), "sample_running": 1}


def spec_of(replica: FakeReplica, name: str, roles: frozenset[Role] = BOTH) -> ReplicaSpec:
    """For a ``Supervisor``."""

    async def start(on_phase: Callable[[str], None], on_death: Callable[[RankDied], None]) -> FakeReplica:
        on_phase("starting")
        replica.on_death = on_death
        return replica

    return ReplicaSpec(name=name, roles=roles, start=start)


class Pools:
    """A trainer pool and an engine pool over the same replicas, each in those that its role names."""

    def __init__(
        self,
        members: Sequence[object],
        roles: Sequence[frozenset[Role]] | None = None,
        *,
        scratch: Path | None = None,
        traffic: Traffic | None = None,
        on_lost: Callable[[Version], None] | None = None,
    ):
        """``roles``: of each member; None: all do both."""
        self.roles = roles or [BOTH] * len(members)
        traffic = traffic or Traffic()
        self.trainer = TrainerPool(traffic=traffic, scratch=scratch)
        self.engine = EnginePool(source=self.trainer, traffic=traffic, on_lost=on_lost)
        for number, (member, own) in enumerate(zip(members, self.roles, strict=True)):
            if "sample" in own:
                self.engine.add(number, cast(EngineMember, member))
            if "train" in own:
                self.trainer.add(number, cast(TrainerMember, member), measured="sample" not in own)

    @property
    def backend(self) -> Backend:
        return Backend(facts=self.trainer.facts, trainer=self.trainer, engine=self.engine)


@asynccontextmanager
async def tiny_pools(
    directories: pytest.TempPathFactory,
    roles: Sequence[frozenset[Role]] = (BOTH, BOTH),
    *,
    settings: ReplicaSettings = SETTINGS,
) -> AsyncIterator[Pools]:
    """As many replicas in process, of these roles."""
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(tiny_replica(directories, settings=settings, roles=own)) for own in roles
        ]
        pools = Pools(replicas, roles)
        stack.push_async_callback(pools.engine.close)
        yield pools
