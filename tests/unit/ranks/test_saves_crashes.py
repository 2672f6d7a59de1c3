"""The process that writes is ended or stopped while a tenant trains: the save fails with a sentence, the training is
the same to the bit, and the next save works."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from descant.ckpt.peft import ADAPTER, OPTIMIZER
from descant.ckpt.writer import PROGRAM, CheckpointWriter, WriterLimits
from descant.errors import RankDied, ServerError
from descant.model.load import ModelSource, load_model
from descant.ranks.replica import Replica
from descant.ranks.worker import Worker
from descant.testing.ranks import SETTINGS, tiny_ranks, written
from descant.testing.trainer import Model, output, result, saved
from descant.testing.writer_faults import faulty
from descant.types import SnapshotRef

pytestmark = pytest.mark.crashes

STEPS = 5
LIMITS = WriterLimits(answer_s=3.0, bytes_per_s=float(32 << 20), beat_s=0.05)


@asynccontextmanager
async def replica_of(directory: Path, program: Sequence[str]) -> AsyncIterator[Replica]:
    def build(phase: Any) -> Worker:
        torch.set_num_threads(1)
        source = ModelSource(name="tiny", directory=directory)
        model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
        writer = CheckpointWriter(model.device, limits=LIMITS, program=program)
        writer.start()
        return Worker(model, SETTINGS, writer=writer)

    replica = await Replica.in_process(build, SETTINGS)
    try:
        yield replica
    finally:
        await replica.close()


async def step(model: Model) -> float:
    loss = (await output(model.backward())).metrics["loss:sum"]
    await result(model.step())
    return float(loss)


async def files(replica: Replica, model: Model, directory: Path) -> dict[str, bytes]:
    ref = cast(SnapshotRef, await result(model.snapshot()))
    await saved(replica, ref, directory)
    await replica.drop(ref)
    return {name: (directory / name).read_bytes() for name in (ADAPTER, OPTIMIZER)}


@pytest.fixture(scope="module")
async def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[float], dict[str, bytes]]:
    """The model's directory; the losses of a run without saves, and the files at its end."""
    directory = written(tmp_path_factory)
    async with replica_of(directory, PROGRAM) as replica:
        model = Model(replica)
        await result(model.create())
        losses = [await step(model) for _ in range(STEPS)]
        return directory, losses, await files(replica, model, tmp_path_factory.mktemp("undisturbed") / "a")


@pytest.mark.parametrize(
    ("harm", "point"),
    [
        ("kill", "before create"),
        ("kill", "within write"),
        ("kill", "after write"),
        ("kill", "before fsync"),
        ("stop", "within write"),
        ("EIO", "before fsync"),
    ],
)
async def test_training_does_not_notice(
    undisturbed: tuple[Path, list[float], dict[str, bytes]], tmp_path: Path, harm: Any, point: Any
) -> None:
    directory, expected, expected_files = undisturbed
    async with replica_of(directory, faulty(tmp_path / "flag", harm, point)) as replica:
        model = Model(replica)
        await result(model.create())
        losses, saves = [], []
        for number in range(STEPS):
            losses.append(await step(model))
            ref = cast(SnapshotRef, await result(model.snapshot()))
            saves.append(asyncio.ensure_future(saved(replica, ref, tmp_path / str(number))))
        first, *others = await asyncio.gather(*saves, return_exceptions=True)
        assert isinstance(first, ServerError)
        assert not isinstance(first, RankDied)
        says = {"kill": "ended by signal 9", "stop": "did not answer", "EIO": "its disk reports an error"}[harm]
        assert says in first.message
        assert not [other for other in others if isinstance(other, BaseException)]
        assert losses == expected
        assert await files(replica, model, tmp_path / "last") == expected_files
        stats = await replica.stats()
        assert (stats["saves_failed"], stats["saves_written"]) == (1, STEPS)
        assert stats["writer_restarts"] == (harm != "EIO")
        assert stats["writer_alive"] == 1


async def test_the_end_of_an_idle_writer_is_in_the_numbers_before_the_next_step_ends(
    undisturbed: tuple[Path, list[float], dict[str, bytes]], tmp_path: Path
) -> None:
    directory, expected, _ = undisturbed
    made: list[Worker] = []

    def build(phase: Any) -> Worker:
        model = load_model(
            ModelSource(name="tiny", directory=directory), device=torch.device("cpu"), dtype=torch.float32, check=False
        )
        made.append(Worker(model, SETTINGS))
        made[0].writer.start()
        return made[0]

    replica = await Replica.in_process(build, SETTINGS)
    try:
        model = Model(replica)
        await result(model.create())
        pid = made[0].writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        losses = [await step(model)]
        while (await replica.stats())["writer_alive"]:
            losses.append(await step(model))
        assert losses == expected[: len(losses)]
        assert len(losses) <= 2
        assert await files(replica, model, tmp_path / "a")
    finally:
        await replica.close()


async def test_of_several_ranks_one_writes_and_its_writers_end_is_nobodys(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    async with tiny_ranks(tmp_path_factory) as replica:
        model = Model(replica)
        await result(model.create())
        await step(model)
        first = await files(replica, model, tmp_path / "a")
        assert replica._link is not None
        writers = [int(pid) for rank in replica._link.pids for pid in _children(rank)]
        assert len(writers) == 1
        os.kill(writers[0], signal.SIGKILL)
        assert await files(replica, model, tmp_path / "b") == first
        await step(model)
        assert (await replica.stats())["writer_restarts"] == 1


def _children(pid: int) -> list[str]:
    """Those of any of its threads."""
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
