"""Thousands of adapters registered, a few in use: what the others cost, and what too many in use cost.

    python bench/residency.py [--shape smollm2-135m] [--layers N] [--rank 8] [--tokens 16] [--json FILE]

On a GPU qwen3-0.6b and 1,024 tokens a tenant, unless told otherwise: 16 are no step there, and two passes take twice
one whatever moves.

A step is ``forward_backward`` and ``optim_step`` of every active tenant, submitted at once to a replica in this
process; all the figures of a comparison are from rounds that alternate.

    registered   8 active beside 1, 10, 100, 1000 registered           bar: flat within 5 %
    cliff        active = 1.2 × what the limit holds, against all fit   bar: ≤ 2×, host and disk;
                 with the adapters that were brought back in such a step
    create       one more adapter, with room and without               bar: ≤ 20 ms
    first use    its numbers drawn and its rows written
    AdamW        one row
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import numpy as np
import torch

from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.ranks.replica import Replica
from descant.ranks.settings import ReplicaSettings, SampleSettings
from descant.ranks.worker import Worker
from descant.testing.shapes import SHAPES, shaped_model
from descant.train.optim import StepRow, adamw
from descant.types import (
    AdamParams,
    CreateModel,
    Datum,
    DeleteModel,
    EncodedText,
    ForwardBackward,
    Lora,
    OptimStep,
)

ACTIVE = 8
CLIFF = 10
REGISTERED = (1, 10, 100, 1000)


class Tenants:
    """Models ``first`` … ``first + count`` of a replica."""

    def __init__(self, replica: Replica, model: BaseModel, rank: int, tokens: int):
        self._replica, self._rank, self._tokens = replica, rank, tokens
        self._vocab = model.facts.vocab_size
        self._seq = itertools.count(1)
        self.names: list[str] = []

    async def create(self, count: int, prefix: str) -> list[float]:
        """Milliseconds of each."""
        taken = []
        for _ in range(count):
            name = f"{prefix}{len(self.names)}"
            start = time.perf_counter()
            await self._replica.submit(
                CreateModel(model_id=name, trainable=Lora(rank=self._rank, seed=len(self.names)))
            )
            taken.append(1000 * (time.perf_counter() - start))
            self.names.append(name)
        return taken

    async def step(self, names: list[str]) -> None:
        stream = np.random.default_rng(0).integers(0, self._vocab, self._tokens + 1)
        datum = Datum(
            model_input=(EncodedText(tokens=stream[:-1].astype(np.int32)),),
            loss_fn_inputs={"target_tokens": stream[1:].astype(np.int64)},
        )
        futures: list[Awaitable[object]] = []
        for name in names:
            seq_id = next(self._seq)
            futures.append(
                self._replica.submit(
                    ForwardBackward(model_id=name, seq_id=seq_id, data=(datum,), loss_fn="cross_entropy")
                )
            )
            seq_id = next(self._seq)
            futures.append(
                self._replica.submit(
                    OptimStep(model_id=name, seq_id=seq_id, adam_params=AdamParams(learning_rate=1e-5))
                )
            )
        await asyncio.gather(*futures)

    async def delete(self, *, keep: int = 0) -> None:
        gone = self.names[keep:]
        await asyncio.gather(
            *(self._replica.submit(DeleteModel(model_id=name, seq_id=next(self._seq))) for name in gone)
        )
        del self.names[keep:]


class Bench:
    def __init__(self, directory: Path, options: argparse.Namespace):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        overrides = {} if options.layers is None else {"num_hidden_layers": options.layers}
        source = shaped_model(options.shape, directory / "model", device=self.device, **overrides)
        self.options, self.directory = options, directory
        self.model = load_model(
            ModelSource(name=options.shape, directory=source),
            device=self.device,
            spill_dir=directory / "spill",
            check=False,
        )
        self.bank = self.model.bank
        self.unlimited = self.bank.adapter_bytes
        self.settings = ReplicaSettings(sample=SampleSettings(max_num_seqs=1, kv_cache_bytes=1 << 20))

    async def replica(self) -> Replica:
        return await Replica.in_process(lambda phase: Worker(self.model, self.settings), self.settings)

    def tenants(self, replica: Replica) -> Tenants:
        return Tenants(replica, self.model, self.options.rank, self.options.tokens)

    async def registered(self, count: int) -> list[dict[str, object]]:
        """In each round the same 8 step beside each number of others, some of which have been used."""
        replica = await self.replica()
        tenants = self.tenants(replica)
        await tenants.create(ACTIVE, "active")
        active = list(tenants.names)
        totals = [max(ACTIVE, total) for total in REGISTERED]
        taken: dict[int, list[float]] = {total: [] for total in totals}
        places: dict[int, dict[str, object]] = {}
        for number in range(count + 1):
            for total in totals if number % 2 else reversed(totals):
                await tenants.create(total - ACTIVE, "idle")
                for name in tenants.names[ACTIVE:][: self.options.used]:
                    self.bank.weights(name)
                await tenants.step(active)
                start = time.perf_counter()
                await tenants.step(active)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                if number:
                    taken[total].append(1000 * (time.perf_counter() - start))
                places[total] = self.places()
                await tenants.delete(keep=ACTIVE)
        rows = []
        for total in totals:
            ratio = statistics.median(one / base for one, base in zip(taken[total], taken[totals[0]]))
            step_ms = statistics.median(taken[total])
            rows.append({"what": f"8 active, {total} registered", "step_ms": step_ms, "ratio": ratio, **places[total]})
            print(_short(rows[-1]), flush=True)
        await tenants.delete()
        await replica.close()
        return rows

    async def cliff(self, count: int, *, disk: bool) -> dict[str, object]:
        """12 active, alternately with room for all and for 10."""
        replica = await self.replica()
        tenants = self.tenants(replica)
        num_active = round(1.2 * CLIFF)
        await tenants.create(num_active, "active")
        limit = CLIFF * self.bank.bytes_in_use(tenants.names[0])[0]
        host = self.bank.residency.host_bytes
        before = self.bank.stats()
        loads: list[float] = []

        async def roomy() -> None:
            self.bank.adapter_bytes = self.unlimited
            await tenants.step(tenants.names)

        async def settle() -> None:  # not timed: what left in the tight round comes back
            self.bank.adapter_bytes = self.unlimited
            for name in tenants.names:
                self.bank.weights(name)

        async def tight() -> None:
            self.bank.adapter_bytes = limit
            self.bank.residency.host_bytes = 0 if disk else host
            loaded = self.bank.stats()["adapter_loads"]
            await tenants.step(tenants.names)
            loads.append(self.bank.stats()["adapter_loads"] - loaded)

        taken: dict[str, list[float]] = {"roomy": [], "tight": []}
        for number in range(count + 2):
            for name, run, times in (("roomy", roomy, 1), ("tight", tight, 3)):
                if name == "roomy":
                    await settle()
                for repeat in range(times):  # the first tight step moves out what the roomy one left: the steady state
                    start = time.perf_counter()
                    await run()
                    if self.device.type == "cuda":
                        torch.cuda.synchronize()
                    if number >= 2 and repeat == times - 1:
                        taken[name].append(1000 * (time.perf_counter() - start))
        self.bank.adapter_bytes, self.bank.residency.host_bytes = self.unlimited, host
        after = self.bank.stats()
        ratios = [tight / roomy for roomy, tight in zip(taken["roomy"], taken["tight"])]
        row = {
            "what": f"{num_active} active, room for {CLIFF}, the rest on {'disk' if disk else 'host'}",
            "fit_ms": statistics.median(taken["roomy"]),
            "step_ms": statistics.median(taken["tight"]),
            "ratio": statistics.median(ratios),
            "loads_a_step": statistics.fmean(loads[2::3]),
            "adapter_loads": after["adapter_loads"] - before["adapter_loads"],
            "adapter_prefetches": after["adapter_prefetches"] - before["adapter_prefetches"],
            "wait_ms_a_load": 1000
            * (after["adapter_load_wait_seconds"] - before["adapter_load_wait_seconds"])
            / max(1, after["adapter_loads"] - before["adapter_loads"]),
        }
        print(_short(row), flush=True)
        await tenants.delete()
        await replica.close()
        return row

    async def create(self, rank: int) -> list[dict[str, object]]:
        replica = await self.replica()
        tenants = Tenants(replica, self.model, rank, self.options.tokens)
        rows: list[dict[str, object]] = []
        for what in ("with room", "with the budget full"):
            if what != "with room":
                self.bank.adapter_bytes = 3 * self.bank.bytes_in_use(tenants.names[0])[0]
            taken = await tenants.create(5, "new")
            first = []
            for name in tenants.names[-5:]:
                start = time.perf_counter()
                self.bank.weights(name)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                first.append(1000 * (time.perf_counter() - start))
            rows.append(
                {
                    "what": f"create, rank {rank}, {what}",
                    "create_ms": statistics.median(taken),
                    "first_use_ms": statistics.median(first),
                }
            )
            print(_short(rows[-1]), flush=True)
        self.bank.adapter_bytes = self.unlimited
        await tenants.delete()
        await replica.close()
        return rows

    def adamw(self, rank: int) -> dict[str, object]:
        self.bank.create("adamw", Lora(rank=rank, seed=0))
        weights, (moment1, moment2) = self.bank.weights("adamw"), self.bank.moments("adamw")
        noise = torch.randn(weights.shape, device=self.device)
        gradient = self.bank.gradient("adamw")
        taken = []
        for step in range(1, 13):
            gradient.copy_(noise)
            row = StepRow(
                weights=weights, gradient=gradient, moment1=moment1, moment2=moment2, step=step, params=AdamParams()
            )
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            adamw([row], limit=3e38)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(1000 * (time.perf_counter() - start))
        line = {"what": f"AdamW, one row of {weights.numel()}", "ms": statistics.median(taken[2:])}
        gradient.zero_()
        self.bank.delete("adamw")
        print(_short(line), flush=True)
        return line

    def places(self) -> dict[str, object]:
        stats = self.bank.stats()
        return {name: stats[f"adapters_{name}"] for name in ("new", "resident", "host", "disk")}


def _short(row: dict[str, object]) -> str:
    return "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{value}" for name, value in row.items())


async def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), options)
        card = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu, one thread"
        print(
            f"{card}, torch {torch.__version__}, {bench.model.dtype}, {options.shape}, rank {options.rank}", flush=True
        )
        rows: list[dict[str, object]] = [bench.adamw(32)]
        rows += await bench.create(32)
        rows += [await bench.cliff(options.rounds, disk=False), await bench.cliff(options.rounds, disk=True)]
        rows += await bench.registered(options.rounds)
    if options.json:
        options.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a quick look")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, help="of a tenant's step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--used", type=int, default=20, help="idle adapters that were used once, at each count")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    options.shape = options.shape or ("qwen3-0.6b" if on_gpu else "smollm2-135m")
    options.tokens = options.tokens or (1024 if on_gpu else 16)
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
