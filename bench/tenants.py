"""What sharing a pass buys, beside what one would do without it.

    python bench/tenants.py [NAME ...] [--shape smollm2-135m] [--layers N] [--rounds 7] [--json FILE]

    packed      many tenants in one pass against one adapter a pass, and against one tenant with all the tokens
    mixed       ranks 1 to 64, lengths halving, six losses against rank 16, equal lengths, one loss; the same tokens
    batch       one adapter, a batch of mixed lengths against transformers + peft, which pads it; with optimiser step
    set_adapter 8 adapters in one pass against transformers + peft with ``set_adapter`` in turn; with optimiser steps

On a GPU sizes are those of a GPU, and the shape is qwen3-0.6b unless told otherwise. Rounds alternate in one process;
``ratio`` is the median of the rounds' ratios. Adapters leave the unembedding alone beside peft, as its do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from workload import Tenants, device_name, load_shape

from descant.bench import alternate, median_ratio, medians
from descant.model.base import BaseModel
from descant.model.flops import measure_peak_flops
from descant.testing.shapes import SHAPES
from descant.types import LOSS_FN_INPUTS

RANKS = (64, 32, 16, 8, 4, 1)
"""The longest tenant has the highest rank, which is the dearer way round."""


class Bench:
    def __init__(self, model: BaseModel, directory: Path, rounds: int):
        self.model, self.device, self.directory, self.rounds = model, model.device, directory, rounds
        self.on_gpu = model.device.type == "cuda"
        self.rate = measure_peak_flops(model.device, model.dtype)

    def time(self, work: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        return alternate(work, self.device, rounds=self.rounds, warm_up=2)

    def row(
        self, what: str, tenants: Tenants, seconds: dict[str, list[float]], bar: str, **rest: Any
    ) -> dict[str, Any]:
        """``ours`` against ``theirs``."""
        typical = medians(seconds)
        return {
            "what": what,
            "tokens_per_s": round(tenants.tokens / typical["ours"], 1),
            "baseline": round(tenants.tokens / typical["theirs"], 1),
            "ratio": round(median_ratio(seconds["theirs"], seconds["ours"]), 3),
            "bar": bar,
            "mfu": round(tenants.flops() / typical["ours"] / self.rate, 3),
            **rest,
        }


def packed(bench: Bench) -> list[dict[str, Any]]:
    count, tokens, bar = (64, 256, "≥ 6") if bench.on_gpu else (8, 16, "≥ 1.5")
    many = Tenants(bench.model, [[tokens]] * count)
    one = Tenants(bench.model, [[tokens] * count])
    seconds = bench.time(
        {
            "theirs": lambda: (many.one_adapter_a_pass(), many.clear()),
            "ours": lambda: (many.packed(), many.clear()),
            "one tenant": lambda: (one.packed(), one.clear()),
        }
    )
    row = bench.row(
        f"{count} tenants × {tokens} tokens, rank 16: packed against one adapter a pass",
        many,
        seconds,
        bar,
        tax=round(median_ratio(seconds["ours"], seconds["one tenant"]), 3),
        ms={name: round(1000 * value, 1) for name, value in medians(seconds).items()},
    )
    many.delete()
    one.delete()
    return [row]


def mixed(bench: Bench) -> list[dict[str, Any]]:
    total, longest = (16384, 1024) if bench.on_gpu else (1024, 512)
    counts, left = [], total
    for _ in RANKS[:-1]:
        counts.append(left // 2)
        left -= left // 2
    counts.append(left)
    lengths = [_cut(count, longest) for count in counts]
    share = total // len(RANKS)
    even = [_cut(share, longest) for _ in RANKS[:-1]] + [_cut(total - share * (len(RANKS) - 1), longest)]
    various = Tenants(bench.model, lengths, ranks=RANKS, losses=tuple(LOSS_FN_INPUTS))
    one_loss = Tenants(bench.model, lengths, ranks=RANKS)
    uniform = Tenants(bench.model, even)
    seconds = bench.time(
        {
            "ours": lambda: (various.packed(), various.clear()),
            "one loss": lambda: (one_loss.packed(), one_loss.clear()),
            "theirs": lambda: (uniform.packed(), uniform.clear()),
        }
    )
    row = bench.row(
        f"{total} tokens of {len(RANKS)} tenants: mixed ranks, lengths and losses against uniform",
        various,
        seconds,
        "≤ 1.25 (cost)",
        cost=round(median_ratio(seconds["ours"], seconds["theirs"]), 3),
        cost_with_one_loss=round(median_ratio(seconds["one loss"], seconds["theirs"]), 3),
        flops_cost=round(various.flops() / uniform.flops(), 3),
    )
    for tenants in (various, one_loss, uniform):
        tenants.delete()
    return [row]


def _cut(tokens: int, longest: int) -> list[int]:
    return [min(longest, tokens - start) for start in range(0, tokens, longest)]


class Peft:
    """A plain loop: adapters in float32, padding with an attention mask, AdamW over the active adapter."""

    def __init__(self, bench: Bench, count: int, rank: int):
        self.device = bench.device
        plain: Any = transformers.AutoModelForCausalLM.from_pretrained(bench.directory, dtype=bench.model.dtype)
        config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0)
        self.model: Any = peft.get_peft_model(plain.to(bench.device).eval(), config, adapter_name="a0")
        for number in range(1, count):
            self.model.add_adapter(f"a{number}", config)
        self.optimizers = []
        for number in range(count):
            self.model.set_adapter(f"a{number}")
            parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizers.append(torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), eps=1e-12, weight_decay=0))
        self.count = count

    def batch(self, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        shape = (len(lengths), max(lengths))
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1000, (shape[0], shape[1] + 1)))
        mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
        targets = ids[:, 1:].masked_fill(~mask, -100)
        return tuple(t.to(self.device) for t in (ids[:, :-1].contiguous(), mask.long(), targets.contiguous()))

    def step(self, number: int, ids: torch.Tensor, mask: torch.Tensor | None, targets: torch.Tensor) -> None:
        if self.count > 1:
            self.model.set_adapter(f"a{number}")
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum").backward()
        self.optimizers[number].step()
        self.optimizers[number].zero_grad(set_to_none=True)


def batch(bench: Bench) -> list[dict[str, Any]]:
    lengths = [1024, 896, 768, 640, 512, 384, 256, 128] if bench.on_gpu else [256, 224, 192, 160, 128, 96, 64, 32]
    tenant, theirs = Tenants(bench.model, [lengths], train_unembed=False), Peft(bench, 1, 16)
    ids, mask, targets = theirs.batch(lengths)
    seconds = bench.time(
        {"theirs": lambda: theirs.step(0, ids, mask, targets), "ours": lambda: (tenant.packed(), tenant.step())}
    )
    row = bench.row(f"a batch of lengths {lengths}, rank 16: against transformers + peft", tenant, seconds, "≥ 1.3")
    tenant.delete()
    return [row]


def set_adapter(bench: Bench) -> list[dict[str, Any]]:
    count, tokens, bar = (8, 256, "≥ 3") if bench.on_gpu else (8, 16, "≥ 1.5")
    many, theirs = Tenants(bench.model, [[tokens]] * count, train_unembed=False), Peft(bench, count, 16)
    ids, _, targets = theirs.batch([tokens])

    def in_turn() -> None:
        for number in range(count):
            theirs.step(number, ids, None, targets)

    seconds = bench.time({"theirs": in_turn, "ours": lambda: (many.packed(), many.step())})
    row = bench.row(f"{count} adapters × {tokens} tokens, rank 16: against peft's set_adapter", many, seconds, bar)
    many.delete()
    return [row]


MEASUREMENTS = {"packed": packed, "mixed": mixed, "batch": batch, "set_adapter": set_adapter}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    shape = options.shape or ("qwen3-0.6b" if device.type == "cuda" else "smollm2-135m")
    with tempfile.TemporaryDirectory() as directory:
        model = load_shape(shape, device, layers=options.layers, keep=Path(directory))
        bench = Bench(model, Path(directory), options.rounds)
        head = {"shape": shape, "device": device_name(device), "torch": torch.__version__, "dtype": str(model.dtype)}
        print(json.dumps({**head, "tflops": round(bench.rate / 1e12, 3)}), flush=True)
        rows = []
        for name in options.names or MEASUREMENTS:
            for row in MEASUREMENTS[name](bench):
                rows.append({"id": name, **row, **head})
                print(json.dumps({"id": name, **row}, ensure_ascii=False), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
