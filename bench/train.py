"""Training speed on models of real shapes: many tenants against one, packed against one adapter a pass, and the limit.

    python bench/train.py --shape qwen3-0.6b [--tokens 16384] [--rank 16] [--tenants 1 8 64] [--json FILE]
        [--modes eager compiled] [--alone] [--profile DIRECTORY]

Every figure is the median of alternated rounds in one process. ``of limit`` is the model's own arithmetic
(4·P·T + 6·P_lora·T + 6·L·Hq·D·Σs²) over the rate of a large matrix product measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.testing.shapes import SHAPES, shaped_model
from descant.train.step import Learner, Part
from descant.types import Datum, EncodedText, ForwardBackward, LoraConfig

ROUNDS = 5


class Tenants:
    """``count`` adapters, each with its share of the pass's tokens in sequences of ``length``."""

    def __init__(self, model: BaseModel, count: int, *, tokens: int, length: int, ranks: Sequence[int]):
        self.model, self.learner = model, Learner(model)
        random = np.random.default_rng(0)
        self.commands = []
        for number in range(count):
            name = f"t{count}-{number}"
            model.bank.create(name, LoraConfig(rank=ranks[number % len(ranks)], seed=number))
            share = tokens // count
            data = [self._datum(random, size) for size in self._cut(share, length)]
            self.commands.append(ForwardBackward(model_id=name, seq_id=1, data=tuple(data), loss_fn="cross_entropy"))

    def _cut(self, tokens: int, length: int) -> list[int]:
        return [min(length, tokens - start) for start in range(0, tokens, length)]

    def _datum(self, random: np.random.Generator, length: int) -> Datum:
        stream = random.integers(0, self.model.facts.vocab_size, length + 1)
        return Datum(
            model_input=(EncodedText(tokens=stream[:-1].astype(np.int32)),),
            loss_fn_inputs={"target_tokens": stream[1:].astype(np.int64)},
        )

    def packed(self) -> None:
        requests = [self.learner.open(command) for command in self.commands]
        self.learner.run(
            [Part(request=r, datum=i) for r, c in zip(requests, self.commands) for i in range(len(c.data))]
        )
        for request in requests:
            self.learner.close(request)
        self._clear()

    def one_adapter_a_pass(self) -> None:
        for command in self.commands:
            request = self.learner.open(command)
            self.learner.run([Part(request=request, datum=i) for i in range(len(command.data))])
            self.learner.close(request)
        self._clear()

    def _clear(self) -> None:
        for command in self.commands:
            self.model.bank.gradient(command.model_id).zero_()
            self.model.bank[command.model_id].gradient_free = True

    def delete(self) -> None:
        for command in self.commands:
            self.model.bank.delete(command.model_id)


def medians(work: dict[str, Callable[[], None]], device: torch.device) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for round_number in range(ROUNDS + 2):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if round_number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = medians({"mm": lambda: [torch.mm(a, b) for _ in range(10)] and None}, device)["mm"]
    return 10 * 2 * size**3 / seconds


def model_flops(model: BaseModel, shape: str, lora_params: int, seq_lens: Sequence[int]) -> float:
    fields = SHAPES[shape]
    head_dim = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    linear = sum(site.in_features * site.out_features for site in model.bank.sites)
    tokens = sum(seq_lens)
    attention = fields["num_hidden_layers"] * fields["num_attention_heads"] * head_dim * sum(s * s for s in seq_lens)
    return 4.0 * linear * tokens + 6.0 * lora_params * tokens + 6.0 * attention


def lora_params(model: BaseModel, rank: int) -> int:
    return sum(rank * (site.in_features + site.out_features) for site in model.bank.sites)


def set_mode(model: BaseModel, mode: str) -> None:
    model.compiled = mode == "compiled"


def profile(run: Callable[[], None], file: Path) -> None:
    """What one pass spends its time on, by kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
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
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        source = ModelSource(name=options.shape, directory=shaped_model(options.shape, Path(directory), device=device))
        made = time.perf_counter() - start
        model = load_model(source, device=device, compile="compiled" in options.modes)
        print(f"made in {made:.1f} s, loaded in {time.perf_counter() - start - made:.1f} s", flush=True)
    rate = matrix_rate(device, model.dtype)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{card}, torch {torch.__version__}, {model.dtype}, matrix rate {rate / 1e12:.1f} TFLOP/s", flush=True)

    rows = []
    one = Tenants(model, 1, tokens=options.tokens, length=options.length, ranks=[options.rank])
    for mode in options.modes:
        set_mode(model, mode)
        for count in options.tenants:
            many = Tenants(model, count, tokens=options.tokens, length=options.length, ranks=[options.rank])
            rows += measure(one, many, options, mode, rate)
            many.delete()
    # Last: once the profiler has run, every launch of this process is slower.
    for mode in options.modes if options.profile else ():
        set_mode(model, mode)
        profile(one.packed, options.profile / f"{options.shape}-{mode}-1.txt")
        for count in options.tenants:
            many = Tenants(model, count, tokens=options.tokens, length=options.length, ranks=[options.rank])
            profile(many.packed, options.profile / f"{options.shape}-{mode}-{count}.txt")
            many.delete()
    if options.json:
        options.json.write_text(
            json.dumps({"card": card, "torch": torch.__version__, "rate": rate, "rows": rows}, indent=1)
        )


def measure(one: Tenants, many: Tenants, options: argparse.Namespace, mode: str, rate: float) -> list[dict[str, Any]]:
    model, count, tokens = one.model, len(many.commands), options.tokens
    work = {"one tenant": one.packed, "packed": many.packed}
    if options.alone:
        work["one adapter a pass"] = many.one_adapter_a_pass
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = medians(work, model.device)
    lens = {
        "one tenant": one._cut(tokens, options.length),
        "packed": many._cut(tokens // count, options.length) * count,
    }
    rows: list[dict[str, Any]] = []
    for name, lengths in lens.items():
        flops = model_flops(model, options.shape, lora_params(model, options.rank), lengths)
        fraction = flops / seconds[name] / rate
        rows.append({"what": name, "tokens_per_s": tokens / seconds[name], "fraction_of_limit": fraction})
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
