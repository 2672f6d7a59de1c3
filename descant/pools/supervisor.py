"""A base's replicas, kept alive: started, started again after a death until one serves, and added while others serve.

    supervisor = Supervisor(specs, clock=clock, rebalance_interval_s=30)
    await supervisor.start()
    backend = Backend(facts=supervisor.trainer.facts, trainer=supervisor.trainer, engine=supervisor.engine)
    supervisor.watch(on_lost)
    …
    await supervisor.add(spec)
    await supervisor.close()

After a death ``on_lost`` gets at once what went with it, to be made again, on another replica or on this one; which is
started again, again and again until it serves. The others go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from descant.errors import DescantError, RankDied
from descant.pools.engines import EnginePool
from descant.pools.members import EngineMember, TrainerMember
from descant.pools.traffic import Traffic
from descant.pools.trainers import TrainerPool
from descant.ports import Clock
from descant.ranks.health import Death, Health, TurnReport
from descant.types import Role, Version

log = logging.getLogger(__name__)

MAX_PAUSE_S = 60.0


class Supervised(TrainerMember, EngineMember, Protocol):
    """A replica of whatever roles; what it has not, it is not asked for."""

    @property
    def health(self) -> Health: ...

    async def turns(self) -> TurnReport | None:
        """What its last turns took. Answers within seconds: None if it cannot say."""
        ...

    @property
    def death(self) -> Death | None:
        """The last."""
        ...

    @property
    def num_served(self) -> int:
        """Commands done and sample requests ended since its last start."""
        ...

    async def restart(self, *, on_phase: Callable[[str], None] | None = None) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """A replica to start. ``start`` gets two callbacks: for each step of it, and for each death, once all that was
    pending has failed; it returns when the replica serves, or raises ``DescantError``."""

    name: str
    roles: frozenset[Role]
    start: Callable[[Callable[[str], None], Callable[[RankDied], None]], Awaitable[Supervised]]


class OnLost(Protocol):
    async def __call__(self, *, models: Collection[str], versions: Collection[Version]) -> None: ...


Record = Callable[[str, Death], Awaitable[None]]
"""Keeps the last failure of the replica of this name. Raises nothing."""


async def _forgotten(name: str, death: Death) -> None:
    return None


@dataclass(slots=True, eq=False)
class _Replica:
    spec: ReplicaSpec
    died: asyncio.Event = field(default_factory=asyncio.Event)
    member: Supervised | None = None
    """None until it has started."""


class Supervisor:
    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        *,
        clock: Clock,
        rebalance_interval_s: float,
        record: Record = _forgotten,
        scratch: Path | None = None,
        on_phase: Callable[[str, str], None] | None = None,
    ):
        """``record`` is given each death and each failed start. ``scratch``: as of ``TrainerPool``. ``on_phase``: gets
        each step of a start, with the replica's name; None: it is logged."""
        self._clock = clock
        self._rebalance_interval_s = rebalance_interval_s
        self._record = record
        self._on_phase = on_phase or _log_phase
        self._on_lost: OnLost | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._replicas = {number: _Replica(spec) for number, spec in enumerate(specs)}
        self._num_replicas = len(specs)
        traffic = Traffic()
        self.trainer = TrainerPool(traffic=traffic, scratch=scratch)
        self.engine = EnginePool(source=self.trainer, traffic=traffic, on_lost=self._lose_version)

    async def start(self) -> Supervisor:
        """Itself, once all have started and serve. Raises what a start raises, having ended the others."""
        starting = [asyncio.ensure_future(self._start(replica)) for replica in self._replicas.values()]
        try:
            started = await asyncio.gather(*starting)
        except BaseException:
            for start in starting:
                start.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if not isinstance(outcome, BaseException):
                    await outcome.close()
            raise
        for number, member in enumerate(started):
            self._take(number, member)
        return self

    def watch(self, on_lost: OnLost) -> None:
        """Keeps them alive from now on."""
        self._on_lost = on_lost
        for number in self._replicas:
            self._spawn(self._keep(number))
        self._spawn(self._rebalance())

    async def add(self, spec: ReplicaSpec) -> int:
        """Starts one more and has it serve with the others; its number. Raises what its start raises."""
        number, replica = self._num_replicas, _Replica(spec)
        self._num_replicas += 1
        member = await self._start(replica)
        self._replicas[number] = replica
        self._take(number, member)
        if self._on_lost is not None:
            self._spawn(self._keep(number))
        return number

    async def close(self) -> None:
        """Ends all. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engine.close()
        await asyncio.gather(*(member.close() for member in self.members.values()))

    # ------------------------------------------------------------------------------------------------ how they are
    @property
    def members(self) -> Mapping[int, Supervised]:
        """Those that have started once."""
        return {number: replica.member for number, replica in self._replicas.items() if replica.member is not None}

    @property
    def serving(self) -> bool:
        """Whether a member trains and a member samples."""
        return self.trainer.serving and self.engine.serving

    @property
    def missing(self) -> str | None:
        """Which replicas do not serve, in a sentence."""
        names = [
            self._rank_of(number)
            for number, replica in self._replicas.items()
            if replica.member is None or not replica.member.serving
        ]
        verb = "is" if len(names) == 1 else "are"
        return f"{' and '.join(names)} {verb} being started again" if names else None

    async def health(self) -> Sequence[tuple[str, Health, TurnReport | None]]:
        """By name, of those that have started once."""
        members = dict(self.members)
        health = {number: member.health for number, member in members.items()}
        turns = await asyncio.gather(*(member.turns() for member in members.values()))
        return [(self._replicas[n].spec.name, health[n], own) for n, own in zip(members, turns, strict=True)]

    # ------------------------------------------------------------------------------------------------ doing
    async def _start(self, replica: _Replica) -> Supervised:
        return await replica.spec.start(partial(self._on_phase, replica.spec.name), lambda _: replica.died.set())

    def _take(self, number: int, member: Supervised) -> None:
        replica = self._replicas[number]
        replica.member = member
        roles = replica.spec.roles
        if "sample" in roles:
            self.engine.add(number, member)
        if "train" in roles:
            self.trainer.add(number, member, measured="sample" not in roles)

    async def _keep(self, number: int) -> None:
        replica = self._replicas[number]
        member = replica.member
        assert member is not None

        async def lose() -> None:
            death = member.death
            models, versions = self.trainer.on_replica_death(number), self.engine.on_replica_death(number)
            try:
                await self._lost(models=models, versions=versions)
            finally:
                if death is not None:
                    await self._record(replica.spec.name, death)

        async def restart() -> None:
            try:
                await member.restart(on_phase=partial(self._on_phase, replica.spec.name))
            except (DescantError, OSError) as error:
                # Why, is for the log and the directory: it may hold what ranks have printed, and paths.
                death = Death(message="it could not be started again, and is tried again", last_lines=str(error))
                await self._record(replica.spec.name, death)
                raise
            self.trainer.on_replica_restart(number)
            self.engine.on_replica_restart(number)

        await keep_alive(
            replica.died,
            lose=lose,
            restart=restart,
            has_served=lambda: member.num_served > 0,
            name=self._rank_of(number),
            clock=self._clock,
        )

    async def _lost(self, *, models: Collection[str], versions: Collection[Version]) -> None:
        assert self._on_lost is not None
        await self._on_lost(models=models, versions=versions)

    def _lose_version(self, version: Version) -> None:
        async def lose() -> None:
            try:
                await self._lost(models=(), versions={version})
            except Exception:
                log.exception("the loss of a version could not be written down")

        self._spawn(lose())

    async def _rebalance(self) -> None:
        while True:
            await self._clock.sleep(self._rebalance_interval_s)
            try:
                await self.trainer.rebalance()
            except Exception:
                log.exception("models could not be moved")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _rank_of(self, number: int) -> str:
        return f"the rank of {self._replicas[number].spec.name}"


def _log_phase(name: str, phase: str) -> None:
    log.info("the rank of %s: %s", name, phase)


async def keep_alive(
    died: asyncio.Event,
    *,
    lose: Callable[[], Awaitable[None]],
    restart: Callable[[], Awaitable[None]],
    has_served: Callable[[], bool],
    name: str,
    clock: Clock,
) -> None:
    """For ever: after each death ``lose`` at once, so that what was lost is known to be, then
    ``restart`` until it succeeds. Pauses double from 1 s to a minute, from one failure to the next and from one death
    to the next of ranks that served no request; after one that ``has_served``, or lived longer than a minute, there is
    none."""
    pause_s, served_since = 0.0, clock.monotonic()
    while True:
        await died.wait()
        died.clear()
        try:
            await lose()
        except Exception:
            log.exception("the loss of %s could not be written down", name)
        lived = has_served() or clock.monotonic() - served_since > MAX_PAUSE_S
        pause_s = 0.0 if lived else _longer(pause_s)
        while True:
            await clock.sleep(pause_s)
            try:
                await restart()
                break
            except (DescantError, OSError) as error:
                log.error("%s; trying again", error)
                pause_s = _longer(pause_s)
        log.warning("%s serves again", name)
        served_since = clock.monotonic()


def _longer(pause_s: float) -> float:
    return min(MAX_PAUSE_S, 2 * pause_s or 1.0)
