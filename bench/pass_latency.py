"""What a training pass takes the host and the device, captured and not.

    python bench/pass_latency.py [--shape smollm2-135m] [--tokens 512 2048 8192] [--tenants 8] [--json FILE]

Median milliseconds of forward and backward, alternated in one process: ``pass`` until the device is done, ``host``
until the host has launched it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from workload import Tenants, device_name, load_shape

from descant.bench import medians
from descant.testing.shapes import SHAPES
from descant.train.passes import TorchPassRunner
from descant.train.requests import Learner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_shape(options.shape, device)
    print(f"{options.shape}, {device_name(device)}, torch {torch.__version__}", flush=True)
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        lengths = [[tokens // options.tenants // 4] * 4] * options.tenants
        kinds = {"captured": Tenants(model, lengths), "not captured": Tenants(model, lengths)}
        kinds["not captured"].learner = Learner(TorchPassRunner(model, decoder_forward=model.decoder_forward))
        found: dict[str, list[float]] = {f"{kind}, {part}": [] for kind in kinds for part in ("pass", "host")}
        for number in range(options.rounds + 3):
            for kind, tenants in kinds.items():
                took = measured(tenants, device)
                if number >= 3:  # the first compiles, the second captures
                    for part, milliseconds in took.items():
                        found[f"{kind}, {part}"].append(milliseconds)
        for tenants in kinds.values():
            tenants.delete()
        row = {"shape": options.shape, "tokens": tokens, **{k: round(v, 2) for k, v in medians(found).items()}}
        rows.append(row)
        print(row, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows))


def measured(tenants: Tenants, device: torch.device) -> dict[str, float]:
    tenants.clear()
    if device.type == "cuda":
        torch.cuda.synchronize()
    launch, launched = tenants.learner.runner.launch, 0.0
    start = time.perf_counter()

    def timed(*args: Any, **options: Any) -> Any:
        nonlocal launched
        outcome = launch(*args, **options)
        launched = time.perf_counter() - start
        return outcome

    tenants.learner.runner.launch = timed
    try:
        tenants.packed()
    finally:
        del tenants.learner.runner.launch
    return {"pass": 1e3 * (time.perf_counter() - start), "host": 1e3 * launched}


if __name__ == "__main__":
    main()
