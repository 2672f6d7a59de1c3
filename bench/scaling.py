"""Speed on one GPU and on several: many tenants placed on replicas, or one large tenant on a replica of several ranks.

    python bench/scaling.py [--replicas 1 2] [--ranks 1 2] [--shape qwen3-0.6b] [--layers N] [--json FILE]

``--replicas``: each tenant trains its own adapter, ``--steps`` times ``--length`` tokens and an optimiser step,
submitted at once as a pipelining client does, and then samples its own weights; nothing is shared but the base's files.
``placed`` says how many tenants each replica had. ``--ranks``: one tenant trains ``--batch-tokens`` tokens a step, and
then samples ``--samples`` sequences; ranks share datums and sequences, and add gradients up. ``--shard`` spreads the
base over them as well.

On GPUs each rank has one; on a CPU each has one thread, so that two have twice what one has. All of what is compared
stays up, and rounds alternate; every figure is a median, the ratio that of the medians, to the first of the list.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from descant.app import replica_spec, visible_gpus
from descant.pools.supervisor import Supervisor
from descant.ranks.placement import rank_specs
from descant.ranks.settings import (
    ParallelSettings,
    RankSettings,
    RankSpec,
    ReplicaSettings,
    SampleSettings,
    TrainSettings,
)
from descant.service.clock import SystemClock
from descant.testing.shapes import SHAPES, shaped_model
from descant.types import (
    AdamParams,
    CreateModel,
    Datum,
    DeleteModel,
    EncodedText,
    ForwardBackward,
    Lora,
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

    def __init__(
        self, replicas: Supervisor, count: int, options: argparse.Namespace, *, num_data: int = 1, num_samples: int = 1
    ):
        """``num_data``: datums of a tenant's step; ``num_samples``: requests that it has sampled at once."""
        self.replicas, self.options = replicas, options
        self.trainer, self.engine = replicas.trainer, replicas.engine
        random = np.random.default_rng(0)
        self.tenants = [
            Tenant(f"t{count}-{number}", tuple(self._datum(random) for _ in range(num_data))) for number in range(count)
        ]
        self.num_data, self.num_samples = num_data, num_samples
        self.versions: list[Version] = []
        self.num_requests = 0

    def _datum(self, random: np.random.Generator) -> Datum:
        stream = random.integers(0, self.trainer.facts.vocab_size, self.options.length + 1)
        return Datum(
            model_input=(EncodedText(tokens=stream[:-1].astype(np.int32)),),
            loss_fn_inputs={"target_tokens": stream[1:].astype(np.int64)},
        )

    async def create(self) -> None:
        lora = Lora(rank=self.options.rank, seed=0)
        await asyncio.gather(
            *(self.trainer.submit(CreateModel(model_id=t.model_id, trainable=lora)) for t in self.tenants)
        )

    async def train(self) -> int:
        """Tokens trained."""
        adam, pending = AdamParams(learning_rate=1e-4), []
        for _ in range(self.options.steps):
            for t in self.tenants:
                backward = ForwardBackward(model_id=t.model_id, seq_id=t.next(), data=t.data, loss_fn="cross_entropy")
                pending.append(self.trainer.submit(backward))
                pending.append(self.trainer.submit(OptimStep(model_id=t.model_id, seq_id=t.next(), adam_params=adam)))
        await asyncio.gather(*pending)
        return self.options.steps * self.options.length * self.num_data * len(self.tenants)

    async def publish(self) -> None:
        for t in self.tenants:
            command = Snapshot(model_id=t.model_id, seq_id=t.next(), kind="sampler", for_disk=False)
            ref = await self.trainer.submit(command)
            assert isinstance(ref, SnapshotRef)
            await self.engine.publish(ref)
            self.versions.append(ref.version)

    async def sample(self) -> int:
        """Tokens sampled."""
        wanted = [version for version in self.versions for _ in range(self.num_samples)]
        return sum(await asyncio.gather(*map(self._sample, wanted)))

    async def _sample(self, version: Version) -> int:
        self.num_requests += 1
        wanted = SampleRequest(
            request_id=f"{version.model_id}-{self.num_requests}",
            version=version,
            prompt=(EncodedText(tokens=np.arange(3, 35, dtype=np.int32)),),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=self.options.sampled, stop=(), seed=self.num_requests),
        )
        return sum([len(delta.tokens) async for delta in self.engine.sample(wanted)])

    async def delete(self) -> None:
        await asyncio.gather(*map(self.engine.release, self.versions))
        await asyncio.gather(
            *(self.trainer.submit(DeleteModel(model_id=t.model_id, seq_id=t.next())) for t in self.tenants)
        )

    def placed(self) -> Sequence[int]:
        homes = Counter(self.trainer.replica_of(t.model_id) for t in self.tenants)
        return [homes[index] for index in self.replicas.members]


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
    rows: list[dict[str, object]] = []
    if options.replicas:
        counts = options.replicas
        async with started(model, gpus, [settings_of(options, gpus, replicas=count) for count in counts]) as sets:
            for tenants in options.tenants:
                loads = [Load(replicas, tenants, options) for replicas in sets]
                rows += await compare("replicas", counts, loads, options)
    if options.ranks:
        counts, num_data = options.ranks, max(1, options.batch_tokens // options.length)
        wanted = [
            settings_of(options, gpus, replicas=1, data_parallel_size=count, fsdp=count > 1 if options.shard else None)
            for count in counts
        ]
        async with started(model, gpus, wanted) as sets:
            loads = [Load(each, 1, options, num_data=num_data, num_samples=options.samples) for each in sets]
            rows += await compare("ranks", counts, loads, options)
    return rows


def settings_of(options: argparse.Namespace, gpus: Sequence[str], **parallel: Any) -> ReplicaSettings:
    return ReplicaSettings(
        rank=RankSettings(device="auto" if gpus else "cpu", num_threads=None if gpus else 1),
        parallel=ParallelSettings(rebalance_interval_s=1e9, **parallel),
        train=TrainSettings(microbatch_tokens=options.microbatch_tokens),
        sample=SampleSettings(max_num_seqs=max(*options.tenants, options.samples)),
    )


@asynccontextmanager
async def started(
    model: Path, gpus: Sequence[str], wanted: Sequence[ReplicaSettings]
) -> AsyncIterator[Sequence[Supervisor]]:
    async with AsyncExitStack() as stack:
        sets = []
        for settings in wanted:
            specs = rank_specs(RankSpec(model=str(model), settings=settings), gpus=gpus, num_cores=len(wanted))
            replicas = Supervisor(
                [replica_spec(spec) for spec in specs],
                clock=SystemClock(),
                rebalance_interval_s=settings.parallel.rebalance_interval_s,
                on_phase=lambda name, text: print(f"  {name}: {text}", flush=True),
            )
            await replicas.start()
            stack.push_async_callback(replicas.close)
            sets.append(replicas)
        yield sets


async def compare(
    what: str, counts: Sequence[int], loads: Sequence[Load], options: argparse.Namespace
) -> list[dict[str, object]]:
    for load in loads:
        await load.create()
    rows = table(what, "train", counts, loads, await rates([load.train for load in loads], options.rounds))
    for load in loads:
        await load.publish()
    rows += table(what, "sample", counts, loads, await rates([load.sample for load in loads], options.rounds))
    for load in loads:
        await load.delete()
    return rows


def table(
    what: str, work: str, counts: Sequence[int], loads: Sequence[Load], found: Sequence[float]
) -> list[dict[str, object]]:
    """A row for each of ``counts`` but the first, which is the baseline."""
    rows: list[dict[str, object]] = []
    for count, load, rate in list(zip(counts, loads, found, strict=True))[1:]:
        ratio, ideal = rate / found[0], count / counts[0]
        rows.append(
            {
                "what": work,
                "tenants": len(load.tenants),
                what: count,
                "placed": load.placed(),
                "tokens_per_s": round(rate, 1),
                "baseline": round(found[0], 1),
                "ratio": round(ratio, 3),
                "ideal": ideal,
                "efficiency": round(ratio / ideal, 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), help="default: qwen3-0.6b on GPUs, smollm2-135m on a CPU")
    parser.add_argument("--layers", type=int, help="cut the shape to so many; default: all on GPUs, 4 on a CPU")
    parser.add_argument("--replicas", type=int, nargs="+", help="default: 1 2, if --ranks is not given")
    parser.add_argument("--ranks", type=int, nargs="+", help="of one replica, with one large tenant")
    parser.add_argument("--shard", action="store_true", help="spread the base over the ranks, where there are several")
    parser.add_argument("--tenants", type=int, nargs="+", help="of replicas; default: 8 64 on GPUs, 8 on a CPU")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--length", type=int, help="tokens of a datum; default: 1024 on GPUs, 64 on a CPU")
    parser.add_argument("--batch-tokens", type=int, help="of the large tenant; default: 65536 on GPUs, 512 on a CPU")
    parser.add_argument("--steps", type=int, help="of each tenant in a round; default: 8 on GPUs, 2 on a CPU")
    parser.add_argument("--sampled", type=int, help="tokens of each sequence; default: 128 on GPUs, 16 on a CPU")
    parser.add_argument("--samples", type=int, help="of the large tenant; default: 128 on GPUs, 8 on a CPU")
    parser.add_argument("--microbatch-tokens", type=int, help="of each rank; default: 16384 on GPUs, 256 on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    gpus = visible_gpus("auto")
    if options.replicas is None and options.ranks is None:
        options.replicas = [1, 2]
    for name in ("replicas", "ranks"):
        most = max(getattr(options, name) or [1])
        if gpus and len(gpus) < most:
            sys.exit(f"--{name} has {most}, expected at most {len(gpus)}, the number of GPUs")
    on_gpus = {
        "shape": "qwen3-0.6b", "tenants": [8, 64], "length": 1024, "batch_tokens": 65536, "steps": 8, "sampled": 128,
        "samples": 128, "microbatch_tokens": 16384,
    }  # fmt: skip
    on_cpu = {
        "shape": "smollm2-135m", "layers": 4, "tenants": [8], "length": 64, "batch_tokens": 512, "steps": 2,
        "sampled": 16, "samples": 8, "microbatch_tokens": 256,
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
        print(f"{card}, torch {torch.__version__}, {options.shape}", flush=True)
        rows = asyncio.run(measure(options, model, gpus))
    if options.json:
        options.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
