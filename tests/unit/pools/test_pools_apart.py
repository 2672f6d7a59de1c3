"""Trainers and engines that share nothing: weights go as files, and neither side's death takes the other's along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from descant.errors import NotFound, RankDied, ServerError
from descant.pools.traffic import Traffic
from descant.service.backends import Backend
from descant.testing.clock import settle
from descant.testing.engine import Sampled, ephemeral, request, sampled
from descant.testing.pools import SAMPLES, TRAINS, FakeReplica, Pools
from descant.testing.trainer import Model, result
from descant.types import EngineCapabilities, Role, SampleRequest, Snapshot, SnapshotRef, Version

FULL = 4


class Apart(Pools):
    def __init__(self, roles: tuple[frozenset[Role], ...], scratch: Path):
        capabilities = EngineCapabilities(max_num_seqs=FULL)
        self.small = [FakeReplica(capabilities=capabilities, step_s=0.005) for _ in roles]
        self.lost: list[Version] = []
        super().__init__(self.small, roles, scratch=scratch, traffic=Traffic(now=lambda: 0.0), on_lost=self.lost.append)

    def die(self, replica: int) -> tuple[frozenset[str], frozenset[Version]]:
        self.small[replica].die()
        return self.trainer.on_replica_death(replica), self.engine.on_replica_death(replica)

    async def restart(self, replica: int) -> None:
        await self.small[replica].restart()
        self.trainer.on_replica_restart(replica)
        self.engine.on_replica_restart(replica)

    async def model(self, model_id: str = "m") -> Model:
        model = Model(self.trainer, model_id)
        await result(model.create())
        await model.train(2)
        return model

    async def published(self, model: Model) -> Version:
        """As the service does it."""
        ref = await ephemeral(self.backend, model)
        await self.engine.publish(ref)
        await self.trainer.drop(ref)
        return ref.version


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "scratch"
    directory.mkdir()
    yield directory
    assert not list(directory.iterdir()), "a transfer was left"


@asynccontextmanager
async def apart(roles: tuple[frozenset[Role], ...], scratch: Path) -> AsyncIterator[Apart]:
    async with asyncio.timeout(30):
        pools = Apart(roles, scratch)
        yield pools
        await pools.engine.close()


@pytest.fixture
async def one(scratch: Path) -> AsyncIterator[Apart]:
    """Replica 0 trains, 1 samples."""
    async with apart((TRAINS, SAMPLES), scratch) as pools:
        yield pools


@pytest.fixture
async def two(scratch: Path) -> AsyncIterator[Apart]:
    """Replica 0 trains, 1 and 2 sample."""
    async with apart((TRAINS, SAMPLES, SAMPLES), scratch) as pools:
        yield pools


async def test_weights_come_as_files_that_are_gone_afterwards(one: Apart, scratch: Path) -> None:
    model = await one.model()
    version = await one.published(model)
    assert one.engine.replicas_of(version) == {1}
    assert len((await sampled(one.engine, request(version))).tokens()) == 4
    (ref,) = one.small[1].published
    assert ref.directory is not None
    assert ref.directory.startswith(str(scratch)), "and after this test nothing is there"
    assert one.small[0].world.snapshots == {}
    assert [c.for_disk for c in one.small[0].commands if isinstance(c, Snapshot)] == [True]
    stats = [await one.trainer.stats(), await one.engine.stats()]
    assert stats == [
        {"adapters": 1, "sample_running": 1, "replicas_serving": 1},
        {"adapters": 0, "sample_running": 1, "replicas_serving": 1},
    ]


async def test_a_dead_trainer_takes_its_models_and_no_version(one: Apart) -> None:
    model = await one.model()
    version = await one.published(model)
    before = await sampled(one.engine, request(version))
    assert one.die(0) == ({"m"}, set())
    assert (await sampled(one.engine, request(version))).tokens() == before.tokens()
    await one.restart(0)
    with pytest.raises(NotFound):
        await result(model.backward())


async def test_a_dead_engine_takes_no_model_and_what_is_to_be_had_comes_back(one: Apart) -> None:
    model, other = await one.model(), await one.model("other")
    old = await one.published(model)
    await model.train(1)
    new, of_other = await one.published(model), await one.published(other)
    before = await sampled(one.engine, request(new))
    assert one.die(1) == (set(), {old}), "its model has gone on"
    waiting = [asyncio.ensure_future(sampled(one.engine, request(version))) for version in (new, of_other)]
    await settle()
    await model.forward()
    await one.restart(1)
    got = await asyncio.gather(*waiting)
    assert got[0].tokens() == before.tokens()
    assert one.lost == []
    with pytest.raises(NotFound):
        await sampled(one.engine, request(old))


async def test_another_engine_takes_over_at_once(two: Apart) -> None:
    version = await two.published(await two.model())
    (replica,) = two.engine.replicas_of(version)
    before = await sampled(two.engine, request(version))
    assert two.die(replica) == (set(), set())
    assert (await sampled(two.engine, request(version))).tokens() == before.tokens()
    assert two.engine.replicas_of(version) == {3 - replica}


async def test_what_cannot_be_had_again_after_all_is_told(one: Apart) -> None:
    model = await one.model()
    version = await one.published(model)
    assert one.die(1) == (set(), set())
    waiting = asyncio.ensure_future(sampled(one.engine, request(version)))
    await model.train(1)
    await one.restart(1)
    with pytest.raises(NotFound):
        await waiting
    assert one.lost == [version]


async def test_a_release_does_not_wait_for_a_restart(one: Apart) -> None:
    version = await one.published(await one.model())
    one.die(1)
    waiting = asyncio.ensure_future(sampled(one.engine, request(version)))
    await settle()
    await asyncio.wait_for(one.engine.release(version), 5)
    with pytest.raises(RankDied):
        await waiting
    await one.restart(1)
    with pytest.raises(NotFound):
        await sampled(one.engine, request(version))
    assert one.lost == []


async def test_a_held_snapshot_is_enough_though_its_model_has_gone_on(one: Apart) -> None:
    model = await one.model()
    ref = await ephemeral(one.backend, model)
    await one.engine.publish(ref)
    before = await sampled(one.engine, request(ref.version))
    await model.train(1)
    assert one.die(1) == (set(), set())
    await one.restart(1)
    assert (await sampled(one.engine, request(ref.version))).tokens() == before.tokens()


async def test_an_engine_that_dies_on_the_way_is_asked_again_and_never_taken_for_the_trainer(one: Apart) -> None:
    ref = await ephemeral(one.backend, await one.model())
    deaths = 0

    async def die(what: object) -> None:
        nonlocal deaths
        if isinstance(what, SnapshotRef):
            deaths += 1
            one.small[1].die()
            if deaths == 1:
                await one.restart(1)
                raise RankDied("the rank was killed")

    one.small[1].hook = die
    with pytest.raises(ServerError, match="could not be published: the rank was killed") as caught:
        await one.engine.publish(ref)
    assert not isinstance(caught.value, RankDied), "the model would be called lost"
    assert deaths == 2
    one.small[1].hook = None
    await one.restart(1)
    await one.engine.publish(ref)
    await sampled(one.engine, request(ref.version))


async def test_a_trainer_that_dies_on_the_way_says_so(one: Apart) -> None:
    ref = await ephemeral(one.backend, await one.model())

    async def die(what: object) -> None:
        if isinstance(what, SnapshotRef):
            one.small[0].die()

    one.small[0].hook = die
    with pytest.raises(RankDied):
        await one.engine.publish(ref)
    assert one.engine.replicas_of(ref.version) == set()


# ---------------------------------------------------------------------------------------------------- several engines


async def test_versions_go_where_least_runs_and_who_follows_a_model_begins_with_its_newest(two: Apart) -> None:
    model = await two.model()
    old = await two.published(model)
    assert two.engine.replicas_of(old) == {1}
    two.engine._router.begin(1, 1)
    new = await two.published(model)
    assert two.engine.replicas_of(new) == {2}
    two.engine._router.end(1, 1)
    for inflight, version in ((True, new), (False, old)):
        got = await sampled(two.engine, request(old, inflight=inflight))
        assert {delta.version for delta in got.deltas} == {version}


async def hot(two: Apart, version: Version) -> list[asyncio.Task[Sampled]]:
    """So many requests that follow the model that both engines run some."""
    opened = asyncio.Event()

    async def hold(what: object) -> None:
        if isinstance(what, SampleRequest):
            await opened.wait()

    for small in two.small:
        small.hook = hold
    streams = [
        asyncio.create_task(sampled(two.engine, request(version, max_tokens=60, inflight=True)))
        for _ in range(2 * FULL)
    ]
    async with asyncio.timeout(10):
        while not all(small.engine._running for small in two.small[1:]):  # noqa: ASYNC110 - files are written
            await asyncio.sleep(0.01)
    opened.set()
    await settle()
    return streams


async def test_a_version_that_is_asked_for_much_is_copied_and_all_who_follow_its_model_move(two: Apart) -> None:
    model = await two.model()
    old = await two.published(model)
    streams = await hot(two, old)
    assert two.engine.replicas_of(old) == {1, 2}
    await model.train(1)
    new = await two.published(model)
    assert two.engine.replicas_of(new) == {1, 2}
    for got in await asyncio.gather(*streams):
        assert {delta.version for delta in got.deltas} == {old, new}


async def test_each_engine_has_an_outcome_of_its_own(two: Apart) -> None:
    model = await two.model()
    streams = await hot(two, await two.published(model))

    async def refuse(what: object) -> None:
        if isinstance(what, SnapshotRef):
            raise ServerError("no room")

    two.small[2].hook = refuse
    await model.train(1)
    new = await two.published(model)
    assert two.engine.replicas_of(new) == {1}
    await sampled(two.engine, request(new))
    two.small[1].hook = refuse
    ref = await ephemeral(two.backend, model)
    with pytest.raises(ServerError, match="no room"):
        await two.engine.publish(ref)
    assert two.engine.replicas_of(ref.version) == set()
    await asyncio.gather(*streams)


def test_a_backend_of_two_is_measured_in_both(one: Apart) -> None:
    assert one.backend.measured == [one.trainer, one.engine]
    both = FakeReplica()
    assert Backend(facts=both.facts, trainer=both, engine=both).measured == [both]
