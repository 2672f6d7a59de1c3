"""Training speed on models of real shapes: many tenants against one, packed against one adapter a pass, and the limit.

    python bench/train.py --shape qwen3-0.6b [--tokens 16384] [--rank 16] [--tenants 1 8 64] [--json FILE]

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tenants", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        source = ModelSource(name=options.shape, directory=shaped_model(options.shape, Path(directory), device=device))
        model = load_model(source, device=device)
        print(f"made and loaded in {time.perf_counter() - start:.1f} s", flush=True)
    rate = matrix_rate(device, model.dtype)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{card}, torch {torch.__version__}, {model.dtype}, matrix rate {rate / 1e12:.1f} TFLOP/s", flush=True)

    rows = []
    one = Tenants(model, 1, tokens=options.tokens, length=options.length, ranks=[options.rank])
    for count in options.tenants:
        many = Tenants(model, count, tokens=options.tokens, length=options.length, ranks=[options.rank])
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        work = {"one tenant": one.packed, "packed": many.packed, "one adapter a pass": many.one_adapter_a_pass}
        seconds = medians(work, device)
        share = options.tokens // count
        lens = {
            "one tenant": one._cut(options.tokens, options.length),
            "packed": many._cut(share, options.length) * count,
        }
        for name, lengths in lens.items():
            flops = model_flops(model, options.shape, lora_params(model, options.rank), lengths)
            rows.append(
                {
                    "tenants": count,
                    "what": name,
                    "tokens_per_s": options.tokens / seconds[name],
                    "fraction_of_limit": flops / seconds[name] / rate,
                }
            )
        rows.append(
            {
                "tenants": count,
                "what": "packed against one adapter a pass",
                "ratio": seconds["one adapter a pass"] / seconds["packed"],
            }
        )
        rows.append(
            {"tenants": count, "what": "tax against one tenant", "ratio": seconds["packed"] / seconds["one tenant"]}
        )
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        for row in rows[-4:]:
            row["peak_gib"] = peak
            print({k: (round(v, 4) if isinstance(v, float) else v) for k, v in row.items()}, flush=True)
        many.delete()
    if options.json:
        options.json.write_text(
            json.dumps({"card": card, "torch": torch.__version__, "rate": rate, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
