"""Training speed on models of real shapes: many tenants against one, packed against one adapter a pass, and MFU.

    python bench/train.py --shape qwen3-0.6b [--tokens 16384] [--rank 16] [--tenants 1 8 64] [--json FILE]
        [--modes eager compiled] [--alone] [--profile DIRECTORY]

Every figure is the median of alternated rounds in one process. ``mfu`` is the model's own FLOPs
(4·P·T + 6·P_lora·T + 6·L·Hq·D·Σs²) over the rate of a large matmul measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from workload import Tenants, load_shape

from descant.bench import alternate, medians
from descant.model.base import BaseModel
from descant.model.flops import measure_peak_flops
from descant.testing.shapes import SHAPES

ROUNDS = 5


PASSES = 4
"""Of a large request."""


def tenants(model: BaseModel, count: int, options: argparse.Namespace, *, passes: int = 1) -> Tenants:
    """``count`` adapters, each with its share of the tokens of ``passes`` in sequences of ``--length``."""
    share = options.tokens // count
    lengths = [min(options.length, share - start) for start in range(0, share, options.length)]
    return Tenants(model, [lengths * passes] * count, ranks=[options.rank])


def set_mode(model: BaseModel, mode: str) -> None:
    model.compiled = mode == "compiled"


def profile(tenants: Tenants, file: Path) -> None:
    """What one pass spends its time on, by kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        tenants.packed()
        torch.cuda.synchronize()
    tenants.clear()
    averages = profiler.key_averages()
    tables = [
        averages.table(sort_by=order, row_limit=70, max_name_column_width=90, max_src_column_width=0)
        for order in ("self_cuda_time_total", "self_cpu_time_total")
    ]
    file.write_text("\n\n".join(tables))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tenants", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--modes", choices=["eager", "compiled"], nargs="+", default=["eager", "compiled"])
    parser.add_argument("--alone", action="store_true", help="also one adapter a pass (slow)")
    parser.add_argument("--profile", type=Path, help="a directory for tables of kernels")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    model = load_shape(options.shape, device, compile="compiled" in options.modes)
    print(f"made and loaded in {time.perf_counter() - start:.1f} s", flush=True)
    rate = measure_peak_flops(device, model.dtype)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{card}, torch {torch.__version__}, {model.dtype}, matmul rate {rate / 1e12:.1f} TFLOP/s", flush=True)

    rows = []
    one, large = tenants(model, 1, options), tenants(model, 1, options, passes=PASSES)
    for mode in options.modes:
        set_mode(model, mode)
        for count in options.tenants:
            many = tenants(model, count, options)
            rows += measure(one, large, many, options, mode, rate)
            many.delete()
    # Last: once the profiler has run, every launch of this process is slower.
    for mode in options.modes if options.profile else ():
        set_mode(model, mode)
        profile(one, options.profile / f"{options.shape}-{mode}-1.txt")
        for count in options.tenants:
            many = tenants(model, count, options)
            profile(many, options.profile / f"{options.shape}-{mode}-{count}.txt")
            many.delete()
    if options.json:
        options.json.write_text(
            json.dumps({"card": card, "torch": torch.__version__, "rate": rate, "rows": rows}, indent=1)
        )


def measure(
    one: Tenants, large: Tenants, many: Tenants, options: argparse.Namespace, mode: str, rate: float
) -> list[dict[str, Any]]:
    model, count = one.model, len(many.commands)
    work: dict[str, Callable[[], object]] = {
        "one tenant": lambda: (one.packed(), one.clear()),
        "one tenant, a request of several passes": lambda: (large.in_passes(options.tokens), large.clear()),
        "packed": lambda: (many.packed(), many.clear()),
    }
    if options.alone:
        work["one adapter a pass"] = lambda: (many.one_adapter_a_pass(), many.clear())
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = medians(alternate(work, model.device, rounds=ROUNDS, warm_up=2))
    rows: list[dict[str, Any]] = []
    for name, run in zip(work, (one, large, many)):
        mfu = run.flops() / seconds[name] / rate
        rows.append({"what": name, "tokens_per_s": run.tokens / seconds[name], "mfu": mfu})
    rows.append({"what": "tax against one tenant", "ratio": seconds["packed"] / seconds["one tenant"]})
    if options.alone:
        gain = seconds["one adapter a pass"] / seconds["packed"]
        rows.append({"what": "packed against one adapter a pass", "ratio": gain})
    peak = torch.cuda.max_memory_allocated() / 2**30 if model.device.type == "cuda" else 0.0
    rows = [{"mode": mode, "tenants": count, **row, "peak_gib": peak} for row in rows]
    for row in rows:
        print({k: (round(v, 4) if isinstance(v, float) else v) for k, v in row.items()}, flush=True)
    return rows


if __name__ == "__main__":
    main()
