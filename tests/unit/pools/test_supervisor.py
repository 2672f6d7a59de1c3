"""A rank that dies is started again: when, and what its owner is told before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from descant.app import backend_of
from descant.errors import ServerError
from descant.pools.supervisor import ReplicaSpec, Supervisor, keep_alive
from descant.ranks.health import Death
from descant.testing.clock import FakeClock, settle
from descant.testing.engine import ephemeral, trained
from descant.testing.pools import BOTH, SAMPLES, TRAINS, FakeReplica, spec_of
from descant.testing.trainer import Model, result
from descant.types import Role, Version


class Rank:
    """Told to die, it is lost and comes back after as many failed starts as it is told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.died = asyncio.Event()
        self.failures = 0
        self.served = False
        self.error: Exception = ServerError("it did not come up")
        self.alive = True
        self.told: list[tuple[str, float]] = []
        self._began = self.clock.now()

    async def lose(self) -> None:
        self.told.append(("lost", self.clock.now() - self._began))
        if self.failures < 0:
            raise RuntimeError("the database is gone")

    async def restart(self) -> None:
        self.told.append(("start", self.clock.now() - self._began))
        if self.failures > 0:
            self.failures -= 1
            raise self.error
        self.alive = True

    async def kill(self, *, failures: int = 0) -> None:
        assert self.alive
        self.alive, self.failures, self.told, self._began = False, failures, [], self.clock.now()
        self.died.set()
        await settle()


@pytest.fixture
async def rank() -> AsyncIterator[Rank]:
    rank = Rank()
    keeping = asyncio.create_task(
        keep_alive(
            rank.died,
            lose=rank.lose,
            restart=rank.restart,
            has_served=lambda: rank.served,
            name="the rank",
            clock=rank.clock,
        )
    )
    await settle()
    yield rank
    keeping.cancel()
    await asyncio.wait([keeping])


async def test_after_a_long_life_it_is_started_at_once(rank: Rank) -> None:
    await rank.clock.advance(61)
    await rank.kill()
    assert rank.told == [("lost", 0), ("start", 0)]


@pytest.mark.parametrize(
    ("failures", "starts"),
    [
        pytest.param(0, [0], id="no failure"),
        pytest.param(3, [0, 1, 3, 7], id="three failures"),
        pytest.param(9, [0, 1, 3, 7, 15, 31, 63, 123, 183, 243], id="never more than a minute"),
    ],
)
async def test_pauses_grow_from_one_failed_start_to_the_next(rank: Rank, failures: int, starts: Sequence[int]) -> None:
    await rank.clock.advance(61)
    await rank.kill(failures=failures)
    await rank.clock.advance(1000)
    assert rank.told == [("lost", 0), *(("start", at) for at in starts)]
    assert rank.alive


async def test_pauses_grow_from_one_early_death_to_the_next_and_are_forgotten(rank: Rank) -> None:
    for pause in (1, 2, 4):
        await rank.kill()
        assert rank.told == [("lost", 0)]
        await rank.clock.advance(5)
        assert rank.told == [("lost", 0), ("start", pause)]
    await rank.clock.advance(61)
    await rank.kill()
    assert rank.told == [("lost", 0), ("start", 0)]


async def test_after_a_rank_that_served_the_next_is_started_at_once_and_pauses_begin_anew(rank: Rank) -> None:
    for _ in range(4):
        rank.served = True
        await rank.kill()
        assert rank.told == [("lost", 0), ("start", 0)]
    rank.served = False
    for pause in (1, 2):
        await rank.kill()
        await rank.clock.advance(5)
        assert rank.told == [("lost", 0), ("start", pause)]
    rank.served = True
    await rank.kill()
    assert rank.told == [("lost", 0), ("start", 0)]


@pytest.mark.parametrize("error", [ServerError("it did not come up"), OSError(28, "No space left on device")])
async def test_whatever_stops_a_start_it_is_tried_again(rank: Rank, error: Exception) -> None:
    rank.error = error
    await rank.kill(failures=1)
    await rank.clock.advance(100)
    assert rank.alive


async def test_it_is_started_even_if_nobody_could_be_told(rank: Rank) -> None:
    await rank.clock.advance(61)
    await rank.kill(failures=-1)
    assert rank.alive


# ---------------------------------------------------------------------------------------------------- of fakes


@dataclass
class Kept:
    """Fake replicas under a supervisor, and what it told."""

    clock: FakeClock
    small: list[FakeReplica]
    supervisor: Supervisor
    lost: list[tuple[set[str], set[Version]]] = field(default_factory=list)
    recorded: list[tuple[str, str]] = field(default_factory=list)
    phases: list[tuple[str, str]] = field(default_factory=list)

    async def on_lost(self, *, models: Collection[str], versions: Collection[Version]) -> None:
        self.lost.append((set(models), set(versions)))

    async def record(self, name: str, death: Death) -> None:
        self.recorded.append((name, death.message))


@asynccontextmanager
async def kept(*roles: frozenset[Role]) -> AsyncIterator[Kept]:
    clock, small = FakeClock(), [FakeReplica() for _ in roles]
    specs = [spec_of(replica, f"replica {n} of m", own) for n, (replica, own) in enumerate(zip(small, roles))]
    async with asyncio.timeout(30):
        supervisor = Supervisor(
            specs,
            clock=clock,
            rebalance_interval_s=30,
            record=lambda name, death: told.record(name, death),
            on_phase=lambda name, phase: told.phases.append((name, phase)),
        )
        told = Kept(clock, small, supervisor)
        await supervisor.start()
        supervisor.watch(told.on_lost)
        await settle()
        yield told
        await supervisor.close()


def test_what_is_missing_is_named() -> None:
    specs = [spec_of(FakeReplica(), f"replica {number} of m") for number in range(2)]
    supervisor = Supervisor(specs, clock=FakeClock(), rebalance_interval_s=30)
    assert not supervisor.serving
    assert supervisor.missing == "the rank of replica 0 of m and the rank of replica 1 of m are being started again"


async def test_a_start_that_fails_ends_the_others() -> None:
    other = FakeReplica()

    async def fails(on_phase: object, on_death: object) -> FakeReplica:
        raise ServerError("it did not come up")

    failing = ReplicaSpec(name="failing", roles=BOTH, start=fails)
    with pytest.raises(ServerError, match="did not come up"):
        await Supervisor([spec_of(other, "other"), failing], clock=FakeClock(), rebalance_interval_s=30).start()
    assert not other.alive


async def test_a_death_is_told_recorded_and_undone() -> None:
    async with kept(BOTH, BOTH) as told:
        backend = backend_of(told.supervisor)
        model = await trained(backend)
        ref = await ephemeral(backend, model)
        await backend.engine.publish(ref)
        replica = told.supervisor.trainer.replica_of("model")
        assert replica == 0
        told.small[0].failing_starts = 1
        told.small[0].die()
        await settle()
        assert told.lost == [({"model"}, {ref.version})]
        assert told.supervisor.missing == "the rank of replica 0 of m is being started again"
        assert told.supervisor.serving
        assert [name for name, _ in told.recorded] == ["replica 0 of m"]
        await told.clock.advance(100)
        assert told.supervisor.missing is None
        assert [message for _, message in told.recorded] == [
            "the rank was killed",
            "it could not be started again, and is tried again",
        ]
        assert [health.state for _, health, _ in await told.supervisor.health()] == ["serving", "serving"]


async def test_models_are_evened_out_now_and_then() -> None:
    async with kept(BOTH, BOTH) as told:
        told.small[1].die()
        for number in range(4):
            await result(Model(told.supervisor.trainer, f"m{number}").create())
        await told.clock.advance(5)
        assert len(told.small[0].world.adapters) == 4
        await told.clock.advance(30)
        async with asyncio.timeout(10):
            while len(told.small[1].world.adapters) < 2:  # noqa: ASYNC110 - files are written
                await asyncio.sleep(0.01)
        await settle()


async def test_a_replica_is_added_while_others_serve() -> None:
    async with kept(BOTH) as told:
        supervisor = told.supervisor
        late = FakeReplica()
        assert await supervisor.add(spec_of(late, "late")) == 1
        assert ("late", "starting") in told.phases
        for number in range(2):
            await result(Model(supervisor.trainer, f"m{number}").create())
        assert len(late.world.adapters) == 1
        late.die()
        await settle()
        assert [models for models, _ in told.lost] == [{"m1"}]
        await told.clock.advance(100)
        assert supervisor.missing is None
        await result(Model(supervisor.trainer, "again").create())
        assert len(late.world.adapters) == 1


async def test_an_engine_that_is_added_takes_what_overflows() -> None:
    """And its number is no trainer's: what it samples comes through files."""
    async with kept(BOTH) as told:
        late = FakeReplica()
        await told.supervisor.add(spec_of(late, "late", SAMPLES))
        assert told.supervisor.engine.capabilities.shares_rows
        assert list(told.supervisor.trainer.replicas) == [0]
        await result(Model(told.supervisor.trainer, "m").create())
        assert late.world.adapters == {}
        await told.supervisor.add(spec_of(FakeReplica(), "later", TRAINS))
        assert not told.supervisor.engine.capabilities.shares_rows


async def test_without_an_engine_nothing_is_ready() -> None:
    async with kept(TRAINS, SAMPLES) as told:
        assert told.supervisor.serving
        told.small[1].failing_starts = 1
        told.small[1].die()
        await settle()
        assert not told.supervisor.serving
        await told.clock.advance(100)
        assert told.supervisor.serving
