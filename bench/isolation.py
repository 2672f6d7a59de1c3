"""Whether a tenant's numbers depend on who else trains: alone against several sets of neighbours, on this CPU.

    python bench/isolation.py [--model smollm2 | --shape smollm2-135m [--layers 4]] [--dtypes float32 bfloat16]
        [--threads 1 2 16]

Three steps of two requests and an optimiser step each, through the turn loop. Printed is the largest difference of
any log-probability, and of any of the adapter's weights at the end; the exit status is 1 if one is not 0. With
``--shared`` requests share passes, as they do on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace

import torch
from workload import load_shape

from descant.model.load import load_model, resolve_model
from descant.ranks.settings import RankSettings, ReplicaSettings, SampleSettings, TrainSettings
from descant.ranks.worker import Worker
from descant.testing.isolation import alone_and_beside
from descant.testing.shapes import SHAPES

SETTINGS = ReplicaSettings(
    rank=RankSettings(device="cpu"),
    train=TrainSettings(microbatch_tokens=160),
    sample=SampleSettings(max_num_seqs=1, kv_cache_bytes=1 << 24),
)
"""So that the larger request has several pieces, and a turn those of several tenants."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name or a directory")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, 2, torch.get_num_threads()}))
    parser.add_argument("--shared", action="store_true")
    options = parser.parse_args()

    differs, cpu = False, torch.device("cpu")
    for name in options.dtypes:
        dtype = getattr(torch, name)
        if options.shape is None:
            model = load_model(resolve_model(options.model), device=cpu, dtype=dtype, check=False)
        else:
            model = load_shape(options.shape, cpu, dtype=dtype, layers=options.layers, compile=False)
        worker = Worker(model, replace(SETTINGS, rank=replace(SETTINGS.rank, dtype=name)))
        if options.shared:
            worker.info = replace(worker.info, piece_tokens=None)
        for num_threads in options.threads:
            seen = asyncio.run(alone_and_beside(worker, SETTINGS, num_threads=num_threads))
            alone = seen.pop("alone")
            for neighbours, beside in seen.items():
                logprobs, weights = beside.furthest(alone)
                differs = differs or not beside.equals(alone)
                apart = f"log-probabilities {logprobs:.1e}, weights {weights:.1e}"
                print(f"{name}, {num_threads} threads, {neighbours}: {apart}", flush=True)
    sys.exit(differs)


if __name__ == "__main__":
    main()
