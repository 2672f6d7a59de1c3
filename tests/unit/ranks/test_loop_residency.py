"""More tenants than fit the device, through a real replica: what they get equals what they get with room for all."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from descant.ckpt.peft import ADAPTER, OPTIMIZER
from descant.errors import NotFound, ServerError
from descant.model.load import ModelSource, load_model
from descant.ranks.ops import Microbatch, Operation, Stats
from descant.ranks.replica import Replica
from descant.ranks.roles.train import MicrobatchReport, TrainRole
from descant.ranks.worker import Worker
from descant.testing.engine import frozen, near, request, sampled
from descant.testing.executor import Around
from descant.testing.ranks import SETTINGS, changed
from descant.testing.tiny import tiny_model
from descant.testing.trainer import DATA, OTHER_DATA, Model, close, datum, error, output, result, saved
from descant.types import DeleteModel, LoadState, Lora, SnapshotRef

NUM_TENANTS = 6
LORAS = [Lora(rank=rank, seed=number) for number, rank in enumerate((4, 8, 3, 8, 1, 8))]
HOST_BYTES = {"host": 4 << 30, "disk": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


class Seen(Around):
    """Notes how many adapters each microbatch names and how many were held beside it."""

    def __init__(self, worker: Worker):
        super().__init__(worker)
        self.worker, self.bank = worker, worker.model.bank
        self.passes: list[int] = []
        self.held: list[float] = []

    def execute(self, op: Operation[Any]) -> Any:
        if not isinstance(op, Microbatch):
            return super().execute(op)
        self.passes.append(len({part.request[0] for part in op.parts}))
        outcomes = super().execute(op)
        self.held.append(self.stats()["adapters_pinned"])
        return outcomes

    def stats(self) -> Mapping[str, float]:
        return self.inner.execute(Stats())


@asynccontextmanager
async def replica_of(
    tiny: Path,
    spill: Path,
    *,
    num_adapters: float | None,
    host_bytes: int = 4 << 30,
    tokens: int = 16,
    train: type[TrainRole] = TrainRole,
) -> AsyncIterator[tuple[Replica, Seen]]:
    """``num_adapters``: of rank bucket 8, what the device has room for; None: for all."""
    made: list[Seen] = []

    def build(phase: Callable[[str], None]) -> Seen:
        source = ModelSource(name="tiny", directory=tiny)
        model = load_model(
            source,
            device=torch.device("cpu"),
            dtype=torch.float32,
            check=False,
            spill_dir=spill,
            host_bytes=host_bytes,
        )
        settings = SETTINGS
        if num_adapters is not None:
            model.bank.create("probe", Lora(rank=8))
            room, _ = model.bank.bytes_in_use("probe")
            model.bank.delete("probe")
            settings = changed(SETTINGS, offload={"adapter_bytes": int(num_adapters * room)})
        made.append(Seen(Worker(model, settings, train=train)))
        return made[0]

    replica = await Replica.in_process(build, changed(SETTINGS, train={"microbatch_tokens": tokens}))
    try:
        yield replica, made[0]
    finally:
        await replica.close()


async def tenants_of(replica: Replica) -> list[Model]:
    models = [Model(replica, f"m{number}") for number in range(NUM_TENANTS)]
    await asyncio.gather(*(result(model.create(lora)) for model, lora in zip(models, LORAS)))
    return models


async def weights_of(replica: Replica, models: list[Model], directory: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for model in models:
        place = directory.with_name(f"{directory.name}-{model.model_id}")
        ref = cast(SnapshotRef, await result(model.snapshot()))
        await saved(replica, ref, place)
        await replica.drop(ref)
        found.append({**load_file(place / ADAPTER), **load_file(place / OPTIMIZER)})
    return found


async def one_after_the_other(models: list[Model]) -> list[float]:
    """Everybody's gradient is pending while everybody else works; some have two parts of it."""
    losses = []
    for turn in range(3):
        for number, model in enumerate(models):
            losses.append((await output(model.backward())).metrics["loss:sum"])
            if number % 2:
                await result(model.backward(OTHER_DATA))
        for model in reversed(models) if turn % 2 else models:
            await result(model.step())
    return losses


@pytest.mark.parametrize("tier", HOST_BYTES)
async def test_equals_the_undisturbed_run_bit_for_bit(tier: str, tiny: Path, tmp_path: Path) -> None:
    losses, weights = [], []
    for name, room in (("all", None), ("two", 2.0)):
        async with replica_of(
            tiny, tmp_path / name, num_adapters=room, host_bytes=HOST_BYTES[tier] if room else 4 << 30
        ) as (replica, worker):
            models = await tenants_of(replica)
            losses.append(await one_after_the_other(models))
            weights.append(await weights_of(replica, models, tmp_path / f"{name}-weights"))
            worker.bank.residency.settle()
            stats = worker.stats()
            assert (stats["adapter_offloads"] > 20) == (room is not None)
            if room is not None:
                assert stats["adapters_resident"] <= 3
                assert stats["adapters_disk"] == (4 if tier == "disk" else 0)
                assert stats["adapter_load_wait_seconds"] > 0
    assert losses[0] == losses[1]
    for undisturbed, disturbed in zip(*weights):
        assert undisturbed.keys() == disturbed.keys()
        assert all(torch.equal(undisturbed[name], disturbed[name]) for name in undisturbed)


@pytest.mark.parametrize("tier", HOST_BYTES)
async def test_all_at_once_with_requests_of_many_passes(tier: str, tiny: Path, tmp_path: Path) -> None:
    """Nobody waits for an answer: requests span several passes, and no more are open than fit."""
    data = (*DATA, *OTHER_DATA, datum(list(range(1, 11))), *DATA)
    losses = []
    for name, room in (("all", None), ("two", 2.0)):
        async with replica_of(
            tiny, tmp_path / name, num_adapters=room, host_bytes=HOST_BYTES[tier] if room else 4 << 30
        ) as (replica, worker):
            models = await tenants_of(replica)
            futures = []
            for _ in range(3):
                for model in models:
                    futures += [model.backward(data), model.step()]
            await asyncio.gather(*map(result, futures))
            losses.append([await model.loss() for model in models])
            if room is not None:
                assert max(worker.passes) == 2
                assert max(worker.held) <= 2
                assert worker.stats()["adapters_pinned"] == 0
            else:
                assert max(worker.passes) > 2
    assert all(map(close, *losses)), losses


@pytest.mark.parametrize("tokens", [16, 64], ids=["several passes", "one pass"])
async def test_one_more_than_fit_is_one_load_a_step(tokens: int, tiny: Path, tmp_path: Path) -> None:
    """Six step at once and five fit: the five that are here first, passes and optimiser steps, and then the sixth."""
    async with replica_of(tiny, tmp_path, num_adapters=NUM_TENANTS - 1, tokens=tokens) as (replica, worker):
        models = await tenants_of(replica)
        loads = []
        for _ in range(8):
            await asyncio.gather(*(result(future) for model in models for future in (model.backward(), model.step())))
            loads.append(worker.stats()["adapter_loads"])
        assert loads[-1] - loads[1] == 6


async def test_one_adapter_larger_than_the_limit_still_trains(tiny: Path, tmp_path: Path) -> None:
    async with replica_of(tiny, tmp_path, num_adapters=0.5) as (replica, worker):
        models = await tenants_of(replica)
        before = [await model.loss() for model in models]
        await asyncio.gather(*(model.train(2) for model in models))
        after = [await model.loss() for model in models]
        assert all(a < b for a, b in zip(after, before))
        assert set(worker.passes) == {1}


@pytest.mark.parametrize("tier", HOST_BYTES)
async def test_snapshot_publish_load_and_delete_of_a_parked_adapter(tier: str, tiny: Path, tmp_path: Path) -> None:
    async with replica_of(tiny, tmp_path / "spill", num_adapters=1, host_bytes=HOST_BYTES[tier]) as (
        replica,
        worker,
    ):
        bank = worker.bank
        model, other = Model(replica, "model"), Model(replica, "other")
        await asyncio.gather(result(model.create(LORAS[0])), result(other.create(LORAS[1])))

        async def park() -> None:
            await other.train(1)
            assert not bank.is_resident("model")

        await model.train(2)
        loss = await model.loss()
        here = await frozen(model, for_disk=False)
        await park()
        parked = await frozen(model, for_disk=False)
        scores = []
        for ref in (here, parked):
            await replica.publish(ref)
            scores.append((await sampled(replica, request(ref.version, prompt_logprobs=True))).prompt_logprobs)
        assert near(*scores)
        await park()
        source = await saved(replica, cast(SnapshotRef, await result(model.snapshot())), tmp_path / "a")
        await model.train(2)
        await park()
        await result(model.send(LoadState, source=source))
        assert await model.loss() == loss
        await park()
        again = Model(replica, "again")
        await result(again.create(source=source))
        assert await again.loss() == loss
        await model.backward()
        await park()
        await result(model.send(DeleteModel))
        await error(model.forward(), NotFound)
        assert worker.stats()["adapters_pinned"] == 0
        bank.residency.settle()
        assert len(list((tmp_path / "spill").glob("*.adapter.*"))) == (1 if tier == "disk" else 0)


async def test_beside_a_full_disk_whoever_is_here_goes_on(tiny: Path, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    async with replica_of(tiny, spill, num_adapters=1, host_bytes=0) as (replica, worker):
        one, other = Model(replica, "one"), Model(replica, "other")
        await asyncio.gather(result(one.create(LORAS[0])), result(other.create(LORAS[1])))
        await one.train(1)
        await result(one.backward())
        shutil.rmtree(spill)
        spill.write_text("not a directory")
        before = await other.loss()
        await other.train(2)
        assert await other.loss() < before
        await result(one.step())
        spill.unlink()
        spill.mkdir()
        before = await other.loss()
        await other.train(2)
        assert await other.loss() < before
        await one.train(1)
        assert worker.stats()["adapters_pinned"] == 0


class Breaking(TrainRole):
    breaks = False

    def begin(self, op: Microbatch) -> MicrobatchReport:
        if not self.breaks:
            return super().begin(op)
        for command in op.opens:
            self.open(command)
        raise RuntimeError("secret detail")


async def test_a_broken_pass_lets_go_of_its_adapters(tiny: Path, tmp_path: Path) -> None:
    async with replica_of(tiny, tmp_path, num_adapters=2, train=Breaking) as (replica, worker):
        models = await tenants_of(replica)
        breaking = cast(Breaking, worker.worker.train)
        breaking.breaks = True
        await asyncio.gather(*(error(model.backward(), ServerError) for model in models))
        breaking.breaks = False
        assert worker.stats()["adapters_pinned"] == 0
        steps: list[Awaitable[object]] = [error(model.step()) for model in models]
        await asyncio.gather(*steps)
        await asyncio.gather(*(model.train(1) for model in models))
