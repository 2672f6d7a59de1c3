"""Adapters on several replicas: where commands go, what a death takes with it, what moves and what is copied."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from descant.errors import NotFound, Overloaded, RankDied, ServerError, UserError
from descant.pools.traffic import Traffic
from descant.pools.trainers import TrainerPool
from descant.ports import Engine, Measured, Progress, Trainer, WeightSource
from descant.testing.clock import settle
from descant.testing.engine import Sampled, request, sampled
from descant.testing.fakes import FakeTrainer
from descant.testing.pools import FakeReplica, Pools, tiny_pools
from descant.testing.trainer import BAD_DATA, OTHER_DATA, Model, datum, error, output, result, saved
from descant.types import (
    AdamParams,
    Command,
    CreateModel,
    DeleteModel,
    EngineCapabilities,
    ForwardBackward,
    Lora,
    OptimStep,
    Rejected,
    Result,
    SampleRequest,
    Snapshot,
    SnapshotRef,
    Version,
)

FULL = 4


class Gate:
    """A hook: whatever ``holds`` says is held until ``open``."""

    def __init__(self, holds: Callable[[object], bool]):
        self._holds = holds
        self.entered, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, what: object) -> None:
        if self._holds(what):
            self.entered.set()
            await self.opened.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    models: frozenset[str]
    versions: frozenset[Version]


class Replicas(Pools):
    """Over fakes that train and sample, with time that stands."""

    def __init__(self, num_replicas: int, scratch: Path):
        self.small = [
            FakeReplica(max_context_length=512, capabilities=EngineCapabilities(max_num_seqs=FULL))
            for _ in range(num_replicas)
        ]
        super().__init__(self.small, scratch=scratch, traffic=Traffic(now=lambda: 0.0))

    def on_death(self, replica: int) -> Lost:
        """As the supervisor tells it."""
        models = self.trainer.on_replica_death(replica)
        return Lost(models=models, versions=self.engine.on_replica_death(replica))

    async def restart(self, replica: int) -> None:
        await self.small[replica].restart()
        self.trainer.on_replica_restart(replica)
        self.engine.on_replica_restart(replica)

    def where(self, model: Model) -> list[int]:
        return [index for index, small in enumerate(self.small) if model.model_id in small.world.adapters]

    def published(self, version: Version) -> list[int]:
        return [index for index, small in enumerate(self.small) if version in small.world.published]

    async def model(self, model_id: str, *, steps: int = 0, rank: int = 4) -> Model:
        model = Model(self.trainer, model_id)
        await result(model.create(Lora(rank=rank, seed=1)))
        await model.train(steps)
        return model


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Replicas]:
    (tmp_path / "scratch").mkdir()
    async with asyncio.timeout(30):
        replicas = Replicas(2, tmp_path / "scratch")
        yield replicas
        await replicas.engine.close()
    assert not list((tmp_path / "scratch").iterdir()), "something was left on its way"


async def ephemeral(model: Model) -> SnapshotRef:
    return cast(SnapshotRef, await result(model.snapshot("sampler", for_disk=False)))


async def published(two: Replicas, model: Model) -> Version:
    ref = await ephemeral(model)
    await two.engine.publish(ref)
    await two.trainer.drop(ref)
    await two.trainer.drop(ref)
    return ref.version


# ---------------------------------------------------------------------------------------------------- where things go


async def test_they_are_all_that_a_replica_is(two: Replicas) -> None:
    for pool, ports in ((two.trainer, (Trainer, WeightSource)), (two.engine, (Engine,))):
        for port in (*ports, Progress, Measured):
            assert isinstance(pool, port)


async def test_its_numbers_are_those_of_all_that_serve(two: Replicas) -> None:
    await asyncio.gather(*(two.model(f"m{i}") for i in range(3)))
    assert await two.engine.stats() == {"adapters": 3, "sample_running": 2, "replicas_serving": 2}
    two.small[0].die()
    left = len(two.small[1].world.adapters)
    assert await two.engine.stats() == {"adapters": left, "sample_running": 1, "replicas_serving": 1}
    two.small[0].serving = True  # its death has not been noticed yet
    assert (await two.engine.stats())["adapters"] == left


async def test_models_are_spread_and_their_commands_follow(two: Replicas) -> None:
    models = [Model(two.trainer, f"m{number}") for number in range(6)]
    await asyncio.gather(*(result(model.create()) for model in models))  # all at once, before any exists
    await asyncio.gather(*(model.train(2) for model in models))
    assert sorted(two.where(model) for model in models) == [[0]] * 3 + [[1]] * 3


async def test_a_model_that_was_deleted_makes_room_and_one_that_failed_takes_none(two: Replicas) -> None:
    one, other = await two.model("one"), await two.model("other")
    await result(other.send(DeleteModel))
    for number in range(3):
        await error(Model(two.trainer, f"impossible{number}").create(Lora(rank=0)))
    assert two.trainer.replica_of("other") is two.trainer.replica_of("impossible0") is None
    assert two.trainer.replica_of("one") == 0
    await error(other.backward(), NotFound)
    assert two.where(await two.model("third")) == [1]
    assert two.where(one) == [0]
    await error(one.create(), UserError)  # it exists, and is asked where it does


async def test_a_model_from_a_checkpoint_counts_with_the_checkpoints_shape(two: Replicas, tmp_path: Path) -> None:
    large = await two.model("large", rank=64)
    source = await saved(two.trainer, cast(SnapshotRef, await result(large.snapshot())), tmp_path / "a")
    await result(large.send(DeleteModel))
    assert two.where(await two.model("middle", rank=32)) == [0]
    resumed = Model(two.trainer, "resumed")
    await result(resumed.create(Lora(rank=1), source))
    assert two.where(resumed) == [1]
    assert two.where(await two.model("next")) == [0]


async def test_base_samples_go_where_least_runs(two: Replicas) -> None:
    gate = Gate(lambda what: isinstance(what, SampleRequest))
    for small in two.small:
        small.hook = gate
    streams = [asyncio.ensure_future(sampled(two.engine, request(num_samples=n))) for n in (3, 1, 1, 1, 2)]
    await settle()
    running = [len(small.engine._running) for small in two.small]
    assert running == [2, 3]  # 3 + 2 sequences here, 1 + 1 + 1 there
    gate.opened.set()
    assert all(len(one.tokens()) == 4 for one in await asyncio.gather(*streams))


async def test_a_conversation_stays_where_its_beginning_is(two: Replicas) -> None:
    went: list[int] = []

    def note(index: int) -> Callable[[object], Awaitable[None]]:
        async def hook(what: object) -> None:
            if isinstance(what, SampleRequest):
                went.append(index)

        return hook

    for index, small in enumerate(two.small):
        small.hook = note(index)
    turns = [datum([5 + turn] * 96).model_input for turn in range(3)]
    for prompt in (turns[0], turns[1], (*turns[1], *turns[2]), (*turns[0], *turns[2]), turns[1]):
        await sampled(two.engine, request(prompt=prompt))
    assert went == [0, 1, 1, 0, 1]
    await sampled(two.engine, request(prompt=turns[1], prefix_scope="another's"))
    assert went.pop() == 0, "where less was sampled lately: it has no beginning anywhere"
    two.engine._router.begin(1, 1)  # more than 96 tokens are worth
    await sampled(two.engine, request(prompt=(*turns[1], *turns[2])))
    two.engine._router.end(1, 1)
    assert went[5:] == [0]


async def test_a_request_is_cancelled_where_it_runs(two: Replicas) -> None:
    for small in two.small:
        small.hook = Gate(lambda what: isinstance(what, SampleRequest))
    wanted = [request(), request()]
    streams = [asyncio.ensure_future(sampled(two.engine, one)) for one in wanted]
    await settle()
    with pytest.raises(ServerError, match="runs already"):
        await sampled(two.engine, wanted[1])
    await two.engine.cancel(wanted[1].request_id)
    await two.engine.cancel("unknown")
    for small in two.small:
        cast(Gate, small.hook).opened.set()
    whole, cut = await asyncio.gather(*streams)
    assert (len(whole.tokens()), cut.deltas) == (4, [])
    assert (await sampled(two.engine, wanted[0])).tokens() == whole.tokens()


async def test_what_runs_is_told_of_each_replica(two: Replicas) -> None:
    model = await two.model("other" if two.where(await two.model("one")) == [0] else "never")
    gate = two.small[1].hook = Gate(lambda what: isinstance(what, ForwardBackward))
    pending = model.backward()
    await gate.entered.wait()
    assert two.trainer.running() == "ForwardBackward (replica 1)"
    assert TrainerPool({1: two.small[1]}).running() == "ForwardBackward"
    gate.opened.set()
    await result(pending)


# ---------------------------------------------------------------------------------------------------- a death


async def test_a_death_takes_its_own_and_nobody_elses(two: Replicas, tmp_path: Path) -> None:
    lost, stays = await two.model("lost", steps=1), await two.model("stays", steps=1)
    (of_lost, of_stays) = [await published(two, model) for model in (lost, stays)]
    await result(lost.snapshot())  # which nobody published
    gate = Gate(lambda what: isinstance(what, ForwardBackward))
    two.small[0].hook = two.small[1].hook = gate
    doomed, going_on = lost.backward(), stays.backward()
    await gate.entered.wait()
    two.small[0].die()
    gate.opened.set()
    await error(doomed, RankDied)
    await result(going_on)
    await result(stays.step())
    assert two.trainer.serving
    assert two.engine.serving

    await error(lost.backward(), RankDied)
    with pytest.raises(RankDied):
        await sampled(two.engine, request(of_lost))
    gone = two.on_death(0)
    assert (gone.models, gone.versions) == ({"lost"}, {of_lost})
    await error(lost.backward(), NotFound)
    with pytest.raises(NotFound):
        await sampled(two.engine, request(of_lost))
    for number in range(3):  # at once, on the one that is there
        assert two.where(await two.model(f"new{number}")) == [1]
    await sampled(two.engine, request())
    await sampled(two.engine, request(of_stays))

    two.on_death(0)
    await two.restart(0)
    assert two.where(await two.model("after")) == [0]
    await stays.train(1)
    two.small[0].die()
    gone = two.on_death(0)
    assert (gone.models, gone.versions) == ({"after"}, set())


async def test_a_replica_that_starts_gets_nothing(two: Replicas) -> None:
    two.small[0].die()
    two.small[0].alive = True  # a process is there again, and loads
    assert two.where(await two.model("one")) == [1]
    await sampled(two.engine, request())
    assert two.small[0].commands == []


async def test_without_any_replica_everything_says_so(two: Replicas) -> None:
    for small in two.small:
        small.die()
    assert not two.trainer.serving
    assert not two.engine.serving
    await error(Model(two.trainer, "one").create(), RankDied)
    with pytest.raises(RankDied):
        await sampled(two.engine, request())
    two.on_death(1)
    await two.restart(1)
    one = await two.model("one")
    assert two.where(one) == [1]
    two.small[1].die()
    two.on_death(1)
    await two.restart(1)
    await error(one.backward(), NotFound)
    assert two.trainer.replica_of("one") is None


async def test_weights_from_a_file_are_published_again_elsewhere(two: Replicas, tmp_path: Path) -> None:
    model = await two.model("one", steps=2)
    ref = cast(SnapshotRef, await result(model.snapshot("sampler")))
    source = await saved(two.trainer, ref, tmp_path / "a")
    await two.trainer.drop(ref)
    from_file = replace(ref, directory=source.directory)
    two.engine._router.begin(0, 1)  # so that it is published on the other
    await two.engine.publish(from_file)
    two.engine._router.end(0, 1)
    before = await sampled(two.engine, request(ref.version))
    assert two.published(ref.version) == [1]
    two.small[1].die()
    assert two.on_death(1).versions == {ref.version}
    await two.engine.publish(from_file)
    assert two.published(ref.version)[:1] == [0]
    assert (await sampled(two.engine, request(ref.version))).tokens() == before.tokens()


# ---------------------------------------------------------------------------------------------------- moving


async def crowded(two: Replicas, *, steps: int = 1) -> list[Model]:
    """Four models, all on replica 0."""
    two.small[1].die()
    models = [await two.model(f"m{number}", steps=steps) for number in range(4)]
    two.on_death(1)
    await two.restart(1)
    return models


async def test_adapters_at_rest_move_and_train_on_as_if_nothing_had_been(two: Replicas) -> None:
    models = await crowded(two)
    assert await two.trainer.rebalance() == 2
    assert sorted(two.where(model) for model in models) == [[0], [0], [1], [1]]
    assert await two.trainer.rebalance() == 0
    for model in models:
        await model.train(2)
    assert two.small[0].world.snapshots == {}
    losses = [await model.loss() for model in models]
    assert losses == [losses[0]] * 4  # the same seed, steps and data, wherever


@pytest.mark.parametrize(
    ("unrest", "moves_after"),
    [
        pytest.param(lambda m: m.backward(), lambda m: m.step(), id="a gradient"),
        pytest.param(lambda m: m.backward(BAD_DATA), lambda m: None, id="a failed backward"),
        pytest.param(
            lambda m: m.send(Rejected, message="half a batch", poisons_gradient=True),
            lambda m: None,
            id="a lost gradient",
        ),
    ],
)
async def test_what_has_a_gradient_stays(
    two: Replicas, unrest: Callable[[Model], asyncio.Future[Result]], moves_after: Callable[[Model], Any]
) -> None:
    models = await crowded(two)
    for model in models:
        await asyncio.wait([unrest(model)])
    assert await two.trainer.rebalance() == 0
    settling = [after for model in models if (after := moves_after(model)) is not None]
    await asyncio.gather(*map(result, settling))
    assert await two.trainer.rebalance() == (2 if settling else 0)


async def test_a_gradient_that_came_while_a_step_ran_counts(two: Replicas) -> None:
    models = await crowded(two)
    for model in models:
        pending = [model.backward(), model.step(), model.backward()]
        await asyncio.gather(*map(result, pending))
    assert await two.trainer.rebalance() == 0


async def test_what_is_busy_stays(two: Replicas) -> None:
    models = await crowded(two)
    gate = two.small[0].hook = Gate(lambda what: isinstance(what, ForwardBackward))
    pending = [model.forward() for model in models]
    await gate.entered.wait()
    assert await two.trainer.rebalance() == 0
    gate.opened.set()
    await asyncio.gather(*map(result, pending))
    assert await two.trainer.rebalance() == 2


async def test_commands_wait_while_their_model_moves_and_keep_their_order(two: Replicas) -> None:
    *models, undisturbed = await crowded(two)
    gate = two.small[1].hook = Gate(lambda what: isinstance(what, CreateModel))
    moving = asyncio.ensure_future(two.trainer.rebalance())
    await gate.entered.wait()
    pending = [future for model in models for future in (model.backward(), model.step(), model.backward())]
    await settle()
    at_work = [future for future in pending if not future.done()]
    assert len(at_work) == 3, "only the one that moves waits"
    gate.opened.set()
    await moving
    await asyncio.gather(*map(result, pending))
    await undisturbed.train(1)
    await result(undisturbed.backward())
    for model in (undisturbed, *models):
        await result(model.step())
    losses = [await model.loss() for model in (undisturbed, *models)]
    assert losses == [losses[0]] * 4


async def test_a_snapshot_is_saved_where_it_was_taken(two: Replicas, tmp_path: Path) -> None:
    models = await crowded(two, steps=0)  # so that the moves' own snapshots might be numbered as these
    refs = [cast(SnapshotRef, await result(model.snapshot())) for model in models]
    versions = [await published(two, model) for model in models]
    before = [await sampled(two.engine, request(version)) for version in versions]
    assert await two.trainer.rebalance() == 2
    for model, ref in zip(models, refs):
        await model.train(1)
        manifest = await two.trainer.save(ref, str(made(tmp_path / model.model_id)))
        assert manifest.step == 0
        await two.trainer.drop(ref)
        with pytest.raises(NotFound):
            await two.trainer.save(ref, str(made(tmp_path / f"{model.model_id} again")))
    after = [await sampled(two.engine, request(version)) for version in versions]
    assert [one.tokens() for one in after] == [one.tokens() for one in before]
    for version in versions:
        await two.engine.release(version)
        assert two.published(version) == []


def made(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("at", [Snapshot, SnapshotRef, CreateModel], ids=["the snapshot", "the save", "the creation"])
async def test_a_death_while_a_model_moves(two: Replicas, dies: int, at: type[object]) -> None:
    models = await crowded(two)
    gate = two.small[1 if at is CreateModel else 0].hook = Gate(lambda what: isinstance(what, at))
    moving = asyncio.ensure_future(two.trainer.rebalance())
    await gate.entered.wait()
    waits = [model.forward() for model in models]
    two.small[dies].die()
    gone = two.on_death(dies).models
    gate.opened.set()
    await moving
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert gone == ({model.model_id for model in models} if dies == 0 else set())
    if dies == 1:
        assert not [one for one in outcomes if isinstance(one, BaseException)], "they have stayed"
    else:
        assert all(isinstance(one, RankDied | NotFound) for one in outcomes)
    two.small[0].hook = two.small[1].hook = None
    two.on_death(dies)
    await two.restart(dies)
    await settle()
    for model in models:  # each is in one place, or lost
        assert len(two.where(model)) == dies
        if dies == 1:
            await model.train(1)


async def test_a_target_that_dies_with_its_answer(two: Replicas) -> None:
    """The model was created there, and its replica is dead before anybody hears of it."""
    models = await crowded(two)
    target = two.small[1]

    class DiesWithIt(FakeTrainer):
        def submit(self, command: Command) -> asyncio.Future[Result]:
            future = super().submit(command)
            if isinstance(command, CreateModel):
                future.add_done_callback(lambda _: target.die())
            return future

    target.trainer = DiesWithIt(target.world)
    assert await two.trainer.rebalance() == 0
    assert two.on_death(1).models == set()
    for model in models:
        await model.train(1)


async def test_a_replica_that_cannot_take_a_model_leaves_it_where_it_was(two: Replicas) -> None:
    models = await crowded(two)

    async def refuse(what: object) -> None:
        if isinstance(what, CreateModel):
            raise ServerError("no room")

    two.small[1].hook = refuse
    assert await two.trainer.rebalance() == 0
    assert [two.where(model) for model in models] == [[0]] * 4
    for model in models:
        await model.train(1)


# ---------------------------------------------------------------------------------------------------- copying


async def burst(two: Replicas, version: Version, count: int = 3 * FULL) -> tuple[list[Sampled], list[int]]:
    """Many requests at once, and how many ran on each replica."""
    gate = Gate(lambda what: isinstance(what, SampleRequest))
    hooks = [small.hook for small in two.small]
    for small in two.small:
        small.hook = gate
    streams = [asyncio.ensure_future(sampled(two.engine, request(version, seed=7))) for _ in range(count)]
    while sum(running := [len(s.engine._running) for s in two.small]) < count:  # noqa: ASYNC110 - no wait, it runs
        await asyncio.sleep(0)
    gate.opened.set()
    got = await asyncio.gather(*streams)
    for small, hook in zip(two.small, hooks):
        small.hook = hook
    return got, running


async def test_a_hot_version_is_sampled_on_both(two: Replicas) -> None:
    version = await published(two, await two.model("one", steps=3))
    _, running = await burst(two, version, FULL)
    assert running == [FULL, 0]
    got, running = await burst(two, version)
    assert running == [6, 6]
    assert len({tuple(one.tokens()) for one in got}) == 1
    assert two.published(version) == [0, 1]
    assert two.small[0].world.snapshots == {}, "what the copy was made of is dropped"
    two.small[0].die()
    assert two.on_death(0).versions == set(), "a copy is left"
    assert (await sampled(two.engine, request(version, seed=7))).tokens() == got[0].tokens()
    await two.engine.release(version)
    with pytest.raises(NotFound):
        await sampled(two.engine, request(version))


async def test_a_hot_version_is_copied_again_to_a_replica_that_came_back(two: Replicas) -> None:
    version = await published(two, await two.model("one", steps=3))
    await burst(two, version)
    two.small[1].die()
    assert two.on_death(1).versions == set()
    _, running = await burst(two, version)
    assert running == [12, 0]
    two.on_death(1)
    await two.restart(1)
    _, running = await burst(two, version)
    assert running == [6, 6]


async def test_a_copy_that_comes_after_the_loss_was_told_is_none(two: Replicas) -> None:
    version = await published(two, await two.model("one", steps=3))
    gate = two.small[1].hook = Gate(lambda what: isinstance(what, SnapshotRef))
    running = two.small[0].hook = Gate(lambda what: isinstance(what, SampleRequest))
    streams = [asyncio.ensure_future(sampled(two.engine, request(version))) for _ in range(FULL + 1)]
    await gate.entered.wait()
    two.small[0].die()
    running.opened.set()
    assert two.on_death(0).versions == {version}
    gate.opened.set()
    outcomes = await asyncio.gather(*streams, return_exceptions=True)
    assert [type(one) for one in outcomes] == [RankDied] * FULL + [NotFound]
    assert two.published(version)[1:] == []
    assert version not in two.small[1].world.published


async def test_a_version_that_its_model_has_left_behind_is_not_copied(two: Replicas) -> None:
    model = await two.model("one", steps=3)
    version = await published(two, model)
    await model.train(1)
    _, running = await burst(two, version)
    assert running == [12, 0]
    assert two.published(version) == [0]


async def test_a_version_on_file_is_copied_from_there(two: Replicas, tmp_path: Path) -> None:
    model = await two.model("one", steps=2)
    version = await in_file(two, model, tmp_path / "a")
    await model.train(2)
    got, running = await burst(two, version)
    assert running == [6, 6]
    assert len({tuple(one.tokens()) for one in got}) == 1


async def test_a_file_that_was_replaced_is_not_copied(two: Replicas, tmp_path: Path) -> None:
    model = await two.model("one", steps=2)
    version = await in_file(two, model, tmp_path / "a")
    await model.train(2)
    await in_file(two, model, tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "old")
    (tmp_path / "b").rename(tmp_path / "a")
    _, running = await burst(two, version)
    assert running == [12, 0]
    assert two.published(version) == [0]


async def in_file(two: Replicas, model: Model, directory: Path) -> Version:
    ref = cast(SnapshotRef, await result(model.snapshot("sampler")))
    source = await saved(two.trainer, ref, directory)
    await two.engine.publish(replace(ref, directory=source.directory))
    await two.trainer.drop(ref)
    return ref.version


async def test_requests_that_wait_for_a_copy_can_be_cancelled_and_outlive_a_release(two: Replicas) -> None:
    version = await published(two, await two.model("one", steps=2))
    copying = two.small[1].hook = Gate(lambda what: isinstance(what, SnapshotRef))
    running = two.small[0].hook = Gate(lambda what: isinstance(what, SampleRequest))
    wanted = [request(version) for _ in range(FULL + 2)]
    streams = [asyncio.ensure_future(sampled(two.engine, one)) for one in wanted]
    await copying.entered.wait()
    await two.engine.cancel(wanted[-1].request_id)
    release = asyncio.ensure_future(two.engine.release(version))
    copying.opened.set()
    running.opened.set()
    got = await asyncio.gather(*streams)
    await release
    assert [len(one.tokens()) for one in got] == [4] * (FULL + 1) + [0]
    assert two.published(version) == []


# ---------------------------------------------------------------------------------------------------- on real ranks


async def test_moved_and_copied_adapters_are_the_same_on_real_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    @asynccontextmanager
    async def replicas() -> AsyncIterator[Pools]:
        async with asyncio.timeout(120), tiny_pools(tmp_path_factory) as both:
            yield both

    async def life(both: Pools, *, moves: bool) -> tuple[list[float], list[int], list[float]]:
        models = [Model(both.trainer, f"m{number}") for number in range(3)]
        for model in models:
            await result(model.create())
            await model.train(2)
        if moves:
            replica = both.trainer.replica_of("m1")
            assert replica is not None
            assert await both.trainer.move("m1", 1 - replica)
        losses = []
        for _ in range(3):
            losses.append((await output(models[1].backward(OTHER_DATA))).metrics["loss:sum"])
            await result(models[1].step())
        ref = await ephemeral(models[1])
        await both.engine.publish(ref)
        count = 3 * both.engine.capabilities.max_num_seqs if moves else 1

        async def sample() -> Sampled:
            while True:  # as a client does
                try:
                    return await sampled(both.engine, request(ref.version, seed=3, prompt_logprobs=True))
                except Overloaded as error:
                    await asyncio.sleep(min(error.retry_after_s, 0.05))

        got = await asyncio.gather(*(sample() for _ in range(count)))
        if moves:
            assert both.engine.replicas_of(ref.version) == {0, 1}
        assert len({tuple(one.tokens()) for one in got}) == 1
        for one in got:  # a step of many sequences rounds differently from one of few
            np.testing.assert_allclose(one.prompt_logprobs[1:], got[0].prompt_logprobs[1:], rtol=1e-5)
        return losses, got[0].tokens(), got[0].prompt_logprobs[1:]

    async with replicas() as both:
        disturbed = await life(both, moves=True)
    async with replicas() as both:
        undisturbed = await life(both, moves=False)
    assert disturbed[:2] == undisturbed[:2]
    np.testing.assert_allclose(disturbed[2], undisturbed[2], rtol=1e-5)


async def test_an_optimiser_step_that_fails_leaves_its_model_where_it_is(two: Replicas) -> None:
    models = await crowded(two)
    for model in models:
        await result(model.backward())
        await error(model.step(AdamParams(learning_rate=float("nan"))))
    assert await two.trainer.rebalance() == 0
    assert not [c for small in two.small for c in small.commands if isinstance(c, OptimStep) and c.seq_id < 0]
