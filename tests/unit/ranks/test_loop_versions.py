"""Versions come and go through a real replica: the loop waits for no disk, and nothing that was captured is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.slots import MappedRange, Reallocation, RowMemory
from descant.errors import CannotStore
from descant.model.load import ModelSource, load_model
from descant.ranks.ops import Stats
from descant.ranks.replica import Replica
from descant.ranks.worker import Worker
from descant.testing.engine import frozen, request, sampled
from descant.testing.fake_graphs import FakeCudaGraphs
from descant.testing.hanging_spill import HangingSpill
from descant.testing.mapped_memory import FakeDriver
from descant.testing.ranks import SETTINGS, changed
from descant.testing.tiny import tiny_model
from descant.testing.trainer import Model, error, result
from descant.types import Lora, Version

LORA = Lora(rank=8, seed=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@dataclass
class Desk:
    replica: Replica
    worker: Worker
    spill: HangingSpill

    @property
    def bank(self) -> AdapterBank:
        return self.worker.model.bank

    async def model(self, model_id: str) -> Model:
        model = Model(self.replica, model_id)
        await result(model.create(LORA))
        return model

    async def publish(self, model: Model) -> Version:
        await model.train(1)
        ref = await frozen(model, for_disk=False)
        await self.replica.publish(ref)
        return ref.version

    async def scores(self, version: Version) -> tuple[list[int], list[float]]:
        found = await sampled(self.replica, request(version, prompt_logprobs=True))
        return found.tokens(), [*found.prompt_logprobs[1:], *found.logprobs()]


def files(directory: Path) -> list[Path]:
    return list(directory.iterdir())


@asynccontextmanager
async def desk_of(
    tiny: Path, directory: Path, *, device: int, host: int, memory: RowMemory | None = None
) -> AsyncIterator[Desk]:
    """Room for so many versions."""
    made: list[Desk] = []

    def build(phase: Callable[[str], None]) -> Worker:
        source = ModelSource(name="tiny", directory=tiny)
        model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
        spill, bank = HangingSpill(directory), model.bank
        row_bytes = 4 * bank.layout(8).row
        bank.residency._spill, bank.residency.host_bytes = spill, host * row_bytes
        if memory is not None:
            bank._pool._memory = memory
        worker = Worker(model, changed(SETTINGS, offload={"version_bytes": device * row_bytes}))
        made.append(Desk(cast(Replica, None), worker, spill))
        return worker

    replica = await Replica.in_process(build, SETTINGS)
    made[0].replica = replica
    try:
        yield made[0]
    finally:
        made[0].spill.goes_on.set()
        await replica.close()


async def test_the_loop_goes_on_while_the_disk_hangs(tiny: Path, tmp_path: Path) -> None:
    """Older versions are on their way to files that do not come, and are sampled nevertheless: as before, bit for
    bit, and so they are once they have been in files."""
    async with desk_of(tiny, tmp_path, device=2, host=8) as desk:
        desk.spill.goes_on.clear()
        model, other = await desk.model("model"), await desk.model("other")
        expected = {}
        for _ in range(11):
            version = await desk.publish(model)
            expected[version] = await desk.scores(version)
        assert await asyncio.to_thread(desk.spill.begun.wait, 30)
        before = await other.loss()
        await other.train(2)
        assert await other.loss() < before
        for version in expected:
            assert await desk.scores(version) == expected[version]
        assert files(tmp_path) == []
        stats = await desk.replica.stats()
        assert stats["offload_wait_seconds"] == stats["versions_disk"] == 0
        assert stats["offload_writing_bytes"] > 0
        desk.spill.goes_on.set()
        desk.bank.residency.settle()
        assert files(tmp_path)
        for version in reversed(expected):
            assert await desk.scores(version) == expected[version]
        await asyncio.gather(*map(desk.replica.release, expected))
        desk.bank.residency.settle()
        assert files(tmp_path) == []
        stats = await desk.replica.stats()
        assert stats["versions_pinned"] == stats["versions_resident"] == stats["versions_host"] == 0


async def test_a_disk_that_fails_is_told_to_who_publishes_and_harms_nobody(tiny: Path, tmp_path: Path) -> None:
    async with desk_of(tiny, tmp_path, device=1, host=0) as desk:
        model, other = await desk.model("model"), await desk.model("other")
        there = [await desk.publish(other)]
        expected = [await desk.scores(there[0])]
        desk.spill.fails = True
        there.append(await desk.publish(model))
        expected.append(await desk.scores(there[1]))
        desk.bank.residency.settle()
        failure = await error(model.snapshot("sampler", for_disk=False), CannotStore)
        assert failure.message == "the data directory cannot be written: its disk reports an error"
        before = await other.loss()
        await other.train(2)
        assert await other.loss() < before
        assert [await desk.scores(version) for version in there] == expected
        desk.spill.fails = False
        there.append(await desk.publish(model))
        expected.append(await desk.scores(there[2]))
        desk.bank.residency.settle()
        assert (await desk.replica.stats())["versions_host"] == 0
        assert [await desk.scores(version) for version in there] == expected


@pytest.mark.parametrize("moves", [False, True], ids=["a mapped slab", "one that is reallocated"])
async def test_what_was_captured_stays_while_versions_come_and_go(tiny: Path, tmp_path: Path, moves: bool) -> None:
    memory = Reallocation() if moves else MappedRange(driver=FakeDriver(1 << 30))
    async with desk_of(tiny, tmp_path, device=12, host=4, memory=memory) as desk:
        assert desk.worker.sample is not None
        sampler = desk.worker.sample.sampler
        graphs = FakeCudaGraphs.install(sampler)
        models = [await desk.model(f"m{number}") for number in range(3)]
        first = await desk.publish(models[0])
        await desk.scores(first)
        assert graphs.captured
        versions = [first]
        for number in range(24):
            versions.append(await desk.publish(models[number % 3]))
            await desk.scores(versions[-1])
            if number % 4 == 3:
                await desk.replica.release(versions.pop(0))
            await desk.scores(versions[0])
        stats = desk.worker.execute(Stats())
        assert stats["version_loads"] > 0
        assert stats["version_offloads"] > 5
        assert len(graphs.captured) == len(set(graphs.captured))
