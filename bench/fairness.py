"""Small tenants beside a large one: what a step of theirs takes, with it and without.

    python bench/fairness.py [--budget TOKENS] [--shape smollm2-135m] [--layers N] [--steps 20] [--json FILE]

Seven light tenants step one after the other's answer, ``forward_backward`` of one sequence and ``optim_step``, first
among themselves and then beside one that always has a large request waiting. ``ratio`` is that of the 95th percentiles
of their steps' times; bar: ≤ 3. A light step waits for the pass that runs, so that the ratio follows ``--budget``, the
tokens of a pass (``train.microbatch_tokens``).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch
from workload import device_name, load_shape

from descant.model.base import BaseModel
from descant.ranks.replica import Replica
from descant.ranks.settings import ReplicaSettings, SampleSettings, TrainSettings
from descant.ranks.worker import Worker
from descant.testing.shapes import SHAPES
from descant.types import AdamParams, CreateModel, Datum, EncodedText, ForwardBackward, Lora, OptimStep

LIGHT = 7


class Tenant:
    def __init__(self, replica: Replica, model: BaseModel, name: str, sequences: int, length: int):
        self._replica, self.name, self._seq_ids = replica, name, itertools.count(1)
        random = np.random.default_rng(len(name))
        streams = random.integers(0, model.facts.vocab_size, (sequences, length + 1))
        self._data = tuple(
            Datum(
                model_input=(EncodedText(tokens=stream[:-1].astype(np.int32)),),
                loss_fn_inputs={"target_tokens": stream[1:].astype(np.int64)},
            )
            for stream in streams
        )

    async def create(self) -> None:
        await self._replica.submit(CreateModel(model_id=self.name, trainable=Lora(rank=16, seed=0)))

    async def step(self) -> float:
        """Milliseconds."""
        began = time.perf_counter()
        backward = self._replica.submit(
            ForwardBackward(model_id=self.name, seq_id=next(self._seq_ids), data=self._data, loss_fn="cross_entropy")
        )
        update = self._replica.submit(
            OptimStep(model_id=self.name, seq_id=next(self._seq_ids), adam_params=AdamParams(learning_rate=1e-5))
        )
        await asyncio.gather(backward, update)
        return 1000 * (time.perf_counter() - began)

    async def steps(self, count: int) -> list[float]:
        return [await self.step() for _ in range(count)]

    async def for_ever(self) -> None:
        """Two steps always wait."""
        await asyncio.gather(*(self._repeat() for _ in range(2)))

    async def _repeat(self) -> None:
        while True:
            await self.step()


async def measure(model: BaseModel, options: argparse.Namespace) -> dict[str, object]:
    on_gpu = model.device.type == "cuda"
    heavy_size, light_size = ((64, 2048), (1, 128)) if on_gpu else ((64, 256), (1, 64))
    settings = ReplicaSettings(
        train=TrainSettings(microbatch_tokens=options.budget or (16384 if on_gpu else 512)),
        sample=SampleSettings(max_num_seqs=1, kv_cache_bytes=1 << 20),
    )
    replica = await Replica.in_process(lambda phase: Worker(model, settings), settings)
    heavy = Tenant(replica, model, "heavy", *heavy_size)
    light = [Tenant(replica, model, f"light-{number}", *light_size) for number in range(LIGHT)]
    await asyncio.gather(*(tenant.create() for tenant in [heavy, *light]))
    await asyncio.gather(*(tenant.steps(2) for tenant in light))
    alone = await asyncio.gather(*(tenant.steps(options.steps) for tenant in light))
    burden = asyncio.create_task(heavy.for_ever())
    await asyncio.gather(*(tenant.steps(2) for tenant in light))
    beside = await asyncio.gather(*(tenant.steps(options.steps) for tenant in light))
    burden.cancel()
    await asyncio.gather(burden, return_exceptions=True)
    await replica.close()
    for tenant in [heavy, *light]:
        model.bank.delete(tenant.name)
    p95 = [float(np.percentile(taken, 95)) for taken in (alone, beside)]
    p50 = [float(np.percentile(taken, 50)) for taken in (alone, beside)]
    return {
        "id": "fairness",
        "what": f"{LIGHT} tenants of {light_size[0]} × {light_size[1]} tokens beside one of {heavy_size[0]} × "
        f"{heavy_size[1]}, passes of {settings.train.microbatch_tokens}",
        "alone_ms": {"p50": round(p50[0], 1), "p95": round(p95[0], 1)},
        "beside_ms": {"p50": round(p50[1], 1), "p95": round(p95[1], 1)},
        "ratio": round(p95[1] / p95[0], 2),
        "bar": "≤ 3",
        "device": device_name(model.device),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--budget", type=int, nargs="+", help="16384 on a GPU, 512 on a CPU; several: one row each")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = options.shape or ("qwen3-0.6b" if device.type == "cuda" else "smollm2-135m")
    model = load_shape(shape, device, layers=options.layers)
    rows = []
    for budget in options.budget or [None]:
        options.budget = budget
        rows.append({**asyncio.run(measure(model, options)), "shape": shape, "layers": len(model.kv_shapes)})
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
