"""Aggregate speed of many tenants on one replica and on several: adapters placed, nothing shared but the base's files.

    python bench/scaling.py [--shape qwen3-0.6b] [--layers N] [--replicas 2] [--tenants 8 64] [--json FILE]

On GPUs each replica has one; on a CPU each has one thread, so that two have twice what one has. Both sets of ranks stay
up, and rounds alternate between them; every figure is a median, the ratio that of the medians. Each tenant trains its
own adapter, ``--steps`` times ``--length`` tokens and an optimiser step, submitted at once as a pipelining client does,
and then samples its own weights. ``placed`` says how many tenants each replica had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from descant.app import visible_gpus
from descant.ranks.placement import rank_specs
from descant.ranks.replica_set import ReplicaSet
from descant.ranks.settings import RankSettings, RankSpec
from descant.testing.shapes import SHAPES, shaped_model
from descant.types import (
    AdamParams,
    CreateModel,
    Datum,
    DeleteModel,
    EncodedText,
    ForwardBackward,
    LoraConfig,
    OptimStep,
    SampleRequest,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    Version,
)


@dataclass
class Tenant:
    """One adapter, and the number of its last command."""

    model_id: str
    data: tuple[Datum, ...]
    seq_id: int = 0

    def next(self) -> int:
        self.seq_id += 1
        return self.seq_id


class Load:
    """``count`` tenants of a set of replicas."""

    def __init__(self, replicas: ReplicaSet, count: int, options: argparse.Namespace):
        self.replicas, self.options = replicas, options
        random = np.random.default_rng(0)
        self.tenants = [Tenant(f"t{count}-{number}", (self._datum(random),)) for number in range(count)]
        self.versions: list[Version] = []
        self.num_requests = 0

    def _datum(self, random: np.random.Generator) -> Datum:
        stream = random.integers(0, self.replicas.facts.vocab_size, self.options.length + 1)
        return Datum(
            model_input=(EncodedText(tokens=stream[:-1].astype(np.int32)),),
            loss_fn_inputs={"target_tokens": stream[1:].astype(np.int64)},
        )

    async def create(self) -> None:
        lora = LoraConfig(rank=self.options.rank, seed=0)
        await asyncio.gather(*(self.replicas.submit(CreateModel(model_id=t.model_id, lora=lora)) for t in self.tenants))

    async def train(self) -> int:
        """Tokens trained."""
        adam, pending = AdamParams(learning_rate=1e-4), []
        for _ in range(self.options.steps):
            for t in self.tenants:
                backward = ForwardBackward(model_id=t.model_id, seq_id=t.next(), data=t.data, loss_fn="cross_entropy")
                pending.append(self.replicas.submit(backward))
                pending.append(self.replicas.submit(OptimStep(model_id=t.model_id, seq_id=t.next(), adam_params=adam)))
        await asyncio.gather(*pending)
        return self.options.steps * self.options.length * len(self.tenants)

    async def publish(self) -> None:
        for t in self.tenants:
            command = Snapshot(model_id=t.model_id, seq_id=t.next(), kind="sampler", for_disk=False)
            ref = await self.replicas.submit(command)
            assert isinstance(ref, SnapshotRef)
            await self.replicas.publish(ref)
            self.versions.append(ref.version)

    async def sample(self) -> int:
        """Tokens sampled."""
        return sum(await asyncio.gather(*map(self._sample, self.versions)))

    async def _sample(self, version: Version) -> int:
        self.num_requests += 1
        wanted = SampleRequest(
            request_id=f"{version.model_id}-{self.num_requests}",
            version=version,
            prompt=(EncodedText(tokens=np.arange(3, 35, dtype=np.int32)),),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=self.options.sampled, stop=(), seed=0),
        )
        return sum([len(delta.tokens) async for delta in self.replicas.sample(wanted)])

    async def delete(self) -> None:
        await asyncio.gather(*map(self.replicas.release, self.versions))
        await asyncio.gather(
            *(self.replicas.submit(DeleteModel(model_id=t.model_id, seq_id=t.next())) for t in self.tenants)
        )

    def placed(self) -> Sequence[int]:
        homes = Counter(self.replicas.home(t.model_id) for t in self.tenants)
        return [homes[index] for index in range(len(self.replicas))]


async def rates(work: Sequence[Callable[[], Awaitable[int]]], rounds: int) -> list[float]:
    """Tokens a second of each, alternated; the first round is not counted."""
    found: list[list[float]] = [[] for _ in work]
    for number in range(rounds + 1):
        for run, values in zip(work, found):
            start = time.perf_counter()
            tokens = await run()
            if number > 0:
                values.append(tokens / (time.perf_counter() - start))
    return [statistics.median(values) for values in found]


async def measure(options: argparse.Namespace, model: Path, gpus: Sequence[str]) -> list[dict[str, object]]:
    settings = RankSettings(
        device="auto" if gpus else "cpu",
        num_threads=None if gpus else 1,
        microbatch_tokens=options.microbatch_tokens,
        max_running=max(options.tenants),
        rebalance_interval_s=1e9,
    )
    rows: list[dict[str, object]] = []
    async with AsyncExitStack() as stack:
        sets = []
        for count in (1, options.replicas):
            spec = RankSpec(model=str(model), settings=replace(settings, replicas=count))
            specs = rank_specs(spec, gpus=gpus, num_cores=count)
            replicas = await ReplicaSet.start(specs, on_phase=lambda i, text: print(f"  rank {i}: {text}", flush=True))
            stack.push_async_callback(replicas.close)
            sets.append(replicas)
        for tenants in options.tenants:
            loads = [Load(replicas, tenants, options) for replicas in sets]
            for load in loads:
                await load.create()
            placed = loads[1].placed()
            rows.append(
                row("train", tenants, await rates([load.train for load in loads], options.rounds), placed, options)
            )
            for load in loads:
                await load.publish()
            rows.append(
                row("sample", tenants, await rates([load.sample for load in loads], options.rounds), placed, options)
            )
            for load in loads:
                await load.delete()
    return rows


def row(
    what: str, tenants: int, found: Sequence[float], placed: Sequence[int], options: argparse.Namespace
) -> dict[str, object]:
    one, several = found
    made: dict[str, object] = {
        "what": what,
        "tenants": tenants,
        "replicas": options.replicas,
        "placed": placed,
        "tokens_per_s": round(several, 1),
        "baseline": round(one, 1),
        "ratio": round(several / one, 3),
        "limit": options.replicas,
        "fraction_of_limit": round(several / one / options.replicas, 3),
    }
    print(made, flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), help="default: qwen3-0.6b on GPUs, smollm2-135m on a CPU")
    parser.add_argument("--layers", type=int, help="cut the shape to so many; default: all on GPUs, 4 on a CPU")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tenants", type=int, nargs="+", help="default: 8 64 on GPUs, 8 on a CPU")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, help="tokens of a tenant's step; default: 1024 on GPUs, 64 on a CPU")
    parser.add_argument("--steps", type=int, help="of each tenant in a round; default: 8 on GPUs, 2 on a CPU")
    parser.add_argument("--sampled", type=int, help="tokens each tenant samples; default: 128 on GPUs, 16 on a CPU")
    parser.add_argument("--microbatch-tokens", type=int, help="default: 16384 on GPUs, 256 on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    gpus = visible_gpus("auto")
    if gpus and len(gpus) < options.replicas:
        sys.exit(f"--replicas is {options.replicas}, expected at most {len(gpus)}, the number of GPUs")
    on_gpus = {
        "shape": "qwen3-0.6b", "tenants": [8, 64], "length": 1024, "steps": 8, "sampled": 128,
        "microbatch_tokens": 16384,
    }  # fmt: skip
    on_cpu = {
        "shape": "smollm2-135m", "layers": 4, "tenants": [8], "length": 64, "steps": 2, "sampled": 16,
        "microbatch_tokens": 256,
    }  # fmt: skip
    for name, value in (on_gpus if gpus else on_cpu).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    card = torch.cuda.get_device_name() if gpus else "cpu"
    with tempfile.TemporaryDirectory() as directory:
        device = torch.device("cuda" if gpus else "cpu")
        overrides = {} if options.layers is None else {"num_hidden_layers": options.layers}
        model = shaped_model(options.shape, Path(directory), device=device, **overrides)
        if gpus:
            torch.cuda.empty_cache()
        print(f"{options.replicas} replicas, {card}, torch {torch.__version__}, {options.shape}", flush=True)
        rows = asyncio.run(measure(options, model, gpus))
    if options.json:
        options.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
