"""Snapshots that are held for saves are bounded by bytes: the next one waits in its model's queue, and no longer than a
save may take."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from descant.errors import ServerError
from descant.ranks import loop as loop_module
from descant.ranks.loop import TurnLoop
from descant.ranks.ops import Rows
from descant.ranks.peers import Peers
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec
from descant.ranks.snapshot_room import SHARE, SnapshotRoom
from descant.ranks.worker import Worker
from descant.testing.executor import Around
from descant.testing.ranks import SETTINGS, build_tiny, changed, written
from descant.testing.trainer import Model, error, result, saved
from descant.types import Snapshot, SnapshotRef


class Memory:
    adapter_bytes = SHARE * 100

    def bytes_in_use(self, model_id: str) -> tuple[int, int]:
        return int(model_id), 0

    def is_resident(self, model_id: str) -> bool:
        return True


def snapshot(num_bytes: int, seq_id: int = 1, *, for_disk: bool = True) -> Snapshot:
    return Snapshot(model_id=str(num_bytes), seq_id=seq_id, kind="training", for_disk=for_disk)


def key(num_bytes: int, seq_id: int = 1) -> tuple[str, int]:
    return str(num_bytes), seq_id


def test_as_many_as_fit_and_the_rest_in_order() -> None:
    room = SnapshotRoom(Memory())
    assert room.ask(snapshot(60), 0) is None
    assert room.ask(snapshot(40), 0) is None
    assert room.ask(snapshot(50, for_disk=False), 0) is None, "of an ephemeral one nothing is held"
    large, small = room.ask(snapshot(90), 0), room.ask(snapshot(1), 0)
    assert large is not None
    assert small is not None
    assert room.free(key(40)) == [], "the small one comes after the large one"
    assert room.free(key(60)) == [key(90), key(1)]
    assert large.done()
    assert small.done()
    assert room.free(key(60)) == [], "it has been freed"


def test_one_is_always_held_however_large() -> None:
    room = SnapshotRoom(Memory())
    assert room.ask(snapshot(1000), 0) is None
    assert room.ask(snapshot(1), 0) is not None
    assert room.free(key(1000)) == [key(1)]


def test_one_that_waits_for_too_long_has_an_error() -> None:
    room = SnapshotRoom(Memory(), wait_s=10)
    assert math.isinf(room.expires_s)
    room.ask(snapshot(100), 0)
    early, late = room.ask(snapshot(50), 1), room.ask(snapshot(60), 2)
    assert early is not None
    assert late is not None
    assert room.expires_s == 11
    assert room.expire(10.9) == []
    assert room.expire(11) == [key(50)]
    with pytest.raises(ServerError, match="no room for one more snapshot in 10 s: 1 are held"):
        early.result(0)
    assert room.expires_s == 12
    assert room.free(key(50)) == []
    assert room.free(key(100)) == [key(60)]


# ------------------------------------------------------------------------------------------------ in the loop


@pytest.fixture
async def rank(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Replica, Worker]]:
    made: list[Worker] = []

    def build(phase: Any) -> Worker:
        made.append(build_tiny(RankSpec(model=str(written(tmp_path_factory)), settings=SETTINGS), phase, Peers()))
        return made[0]

    replica = await Replica.in_process(build, SETTINGS)
    yield replica, made[0]
    await replica.close()


async def test_a_save_waits_for_room_and_others_train_on(rank: tuple[Replica, Worker], tmp_path: Path) -> None:
    replica, worker = rank
    one, other = Model(replica, "one"), Model(replica, "other")
    await asyncio.gather(result(one.create()), result(other.create()))
    await asyncio.gather(one.train(1), other.train(1))
    worker.memory.adapter_bytes = SHARE * worker.memory.bytes_in_use("one")[0]  # room for one
    first = cast(SnapshotRef, await result(one.snapshot()))
    loss = await other.loss()
    waits, behind = other.snapshot(), other.backward()
    again = one.snapshot()
    await result(Model(replica, "third").create())
    assert not waits.done()
    assert not behind.done(), "it keeps its place in its model's order"
    assert (await replica.stats())["snapshots_held"] == 1
    await saved(replica, first, tmp_path / "first")
    await replica.drop(first)
    second = cast(SnapshotRef, await result(waits))
    await result(behind)
    assert not again.done(), "it came later"
    source = await saved(replica, second, tmp_path / "second")
    await replica.drop(second)
    await replica.drop(cast(SnapshotRef, await result(again)))
    restored = Model(replica, "restored")
    await result(restored.create(source=source))
    assert await restored.loss() == loss
    assert (await replica.stats())["snapshots_held"] == 0


class Breaks(Around):
    """The next turn about rows does, if told so."""

    breaks = False

    def execute(self, op: Any) -> Any:
        if isinstance(op, Rows) and self.breaks:
            self.breaks = False
            raise RuntimeError("it broke")
        return super().execute(op)


async def test_one_that_failed_takes_no_room(tmp_path_factory: pytest.TempPathFactory) -> None:
    made: list[Breaks] = []

    def build(phase: Any) -> Breaks:
        spec = RankSpec(model=str(written(tmp_path_factory)), settings=SETTINGS)
        made.append(Breaks(build_tiny(spec, phase, Peers())))
        return made[0]

    replica = await Replica.in_process(build, SETTINGS)
    try:
        model = Model(replica)
        await result(model.create())
        await model.train(1)
        made[0].memory.adapter_bytes = 0
        made[0].breaks = True
        await error(model.snapshot(), ServerError)
        ref = cast(SnapshotRef, await result(model.snapshot()))
        await replica.drop(ref)
        await replica.drop(ref)
        await result(model.snapshot())
    finally:
        await replica.close()


async def test_one_that_is_never_dropped_costs_others_their_save_and_no_more(
    rank: tuple[Replica, Worker],
) -> None:
    replica, worker = rank
    loop = cast(TurnLoop, cast(Any, replica._link)._turn_loop)
    loop._snapshot_room._wait_s = 0.05
    model = Model(replica)
    await result(model.create())
    await model.train(1)
    worker.memory.adapter_bytes = SHARE * worker.memory.bytes_in_use("model")[0]
    await result(model.snapshot())
    failed = await error(model.snapshot(), ServerError)
    assert "there was no room for one more snapshot" in failed.message
    await model.train(1)


async def test_a_rank_that_does_nothing_but_save_is_not_taken_for_a_dead_one(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot waits, and another is written, for longer than a turn may take."""
    monkeypatch.setattr(loop_module, "SAVING_S", 0.1)
    settings = changed(SETTINGS, rank={"turn_timeout_s": 1.0})
    made: list[Worker] = []

    def build(phase: Any) -> Worker:
        made.append(build_tiny(RankSpec(model=str(written(tmp_path_factory)), settings=settings), phase, Peers()))
        made[0].writer.start()
        return made[0]

    replica = await Replica.in_process(build, settings)
    try:
        model, worker = Model(replica), made[0]
        await result(model.create())
        worker.memory.adapter_bytes = 0
        first = cast(SnapshotRef, await result(model.snapshot()))
        second = model.snapshot()
        assert worker.writer.pid is not None
        os.kill(worker.writer.pid, signal.SIGSTOP)
        save = asyncio.ensure_future(saved(replica, first, tmp_path / "a"))
        await asyncio.wait([save], timeout=3.0)
        assert not save.done()
        os.kill(worker.writer.pid, signal.SIGCONT)
        await save
        await asyncio.wait([second], timeout=3.0)
        assert not second.done()
        await replica.drop(first)
        await result(second)
    finally:
        await replica.close()
