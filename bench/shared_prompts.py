"""One adapter's samples of a few prompts: what they share computed once, against the same passes without sharing.

    python bench/shared_prompts.py [--prompts 8 --prompt-tokens 512 --samples 8 --sample-tokens 128]

Both sides cut the request into microbatches as the turn loop does, by the same budget (``--budget``): sharing fits more
datums into a pass. Medians of alternated rounds in one process. ``ideal`` is the ratio of the tokens given to those
computed, the speed-up if only tokens cost anything. Gradients of the two are compared as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from workload import device_name, load_shape

from descant.model.base import BaseModel
from descant.ranks.fair_queue import FairQueue, WaitingModel
from descant.ranks.partition import WaitingDatum
from descant.testing.shapes import SHAPES
from descant.train.pack import MIN_SHARED_TOKENS, common_prefix
from descant.train.passes import TorchPassRunner
from descant.train.requests import Learner
from descant.train.runner import Part
from descant.types import Datum, EncodedText, ForwardBackward, ForwardBackwardOutput, Lora, input_tokens

MODEL_ID = "bench"


def samples(vocab_size: int, prompts: int, prompt_tokens: int, count: int, sample_tokens: int) -> list[Datum]:
    """As a reinforcement learning loop sends them: the samples of a prompt one after another, advantage 0 on it."""
    random = np.random.default_rng(0)
    data = []
    for _ in range(prompts):
        prompt = random.integers(0, vocab_size, prompt_tokens)
        for _ in range(count):
            stream = np.concatenate([prompt, random.integers(0, vocab_size, sample_tokens + 1)])
            sampled = (np.arange(len(stream) - 1) >= prompt_tokens - 1).astype(np.float32)
            arrays = {
                "target_tokens": stream[1:],
                "logprobs": -np.float32(np.log(vocab_size)) * sampled,
                "advantages": np.float32(random.normal()) * sampled,
            }
            tokens = EncodedText(tokens=stream[:-1].astype(np.int32))
            data.append(Datum(model_input=(tokens,), loss_fn_inputs=arrays))
    return data


@dataclass(slots=True, eq=False, kw_only=True)
class Rest(WaitingModel):
    """What of the request has not run."""

    data: list[WaitingDatum]

    def pieces(self) -> Iterator[Sequence[WaitingDatum]]:
        return ([datum] for datum in self.data)


class Unlimited:
    adapter_bytes = 0

    def bytes_in_use(self, model_id: str) -> tuple[int, int]:
        return 0, 0

    def is_resident(self, model_id: str) -> bool:
        return True


def microbatches(data: list[Datum], budget: int, *, share: bool) -> list[list[int]]:
    tokens = [input_tokens(datum.model_input) for datum in data]
    waiting = []
    for index in range(len(data)):
        shared = common_prefix(tokens[index - 1], tokens[index]) if share and index else 0
        shared = shared if shared >= MIN_SHARED_TOKENS else 0
        part = Part(request=(MODEL_ID, 1), datum=index)
        waiting.append(WaitingDatum(part=part, tokens=len(tokens[index]), shared=shared))
    passes: list[list[int]] = []
    while waiting:
        queue = FairQueue[Rest](Unlimited())
        queue.add(Rest(model_id=MODEL_ID, arrival=0, data=waiting))
        passes.append([datum.part.datum for datum in queue.fill(budget)])
        waiting = waiting[len(passes[-1]) :]
    return passes


class Side:
    def __init__(self, model: BaseModel, data: list[Datum], budget: int, *, share: bool):
        self.model, self.learner = model, Learner(TorchPassRunner(model, share_prefixes=share))
        self.command = ForwardBackward(model_id=MODEL_ID, seq_id=1, data=tuple(data), loss_fn="importance_sampling")
        self.passes = microbatches(data, budget, share=share)

    def run(self) -> tuple[float, ForwardBackwardOutput, torch.Tensor]:
        began = time.perf_counter()
        request = self.learner.open(self.command)
        for datums in self.passes:
            self.learner.run([Part(request=request, datum=datum) for datum in datums])
        output = self.learner.close(request)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        gradient = self.model.bank.gradient(MODEL_ID).clone()
        self.model.bank.gradient(MODEL_ID).zero_()
        self.model.bank[MODEL_ID].gradient_free = True
        return seconds, output, gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sample-tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, help="tokens of a microbatch (2048 on CPU, 16384 on CUDA)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = options.budget or (16384 if device.type == "cuda" else 2048)
    dtype = getattr(torch, options.dtype)
    model = load_shape(options.shape, device, dtype=dtype, layers=options.layers)
    lora = Lora(rank=options.rank, seed=0)
    model.bank.create(MODEL_ID, lora)
    weights = model.bank.weights(MODEL_ID)
    torch.manual_seed(0)
    parts = {name: torch.randn_like(part) * 0.01 for name, part in model.bank.export(weights, lora).items()}
    model.bank.import_row(parts, lora, weights)
    model.bank.refresh_compute(MODEL_ID)

    data = samples(
        model.facts.vocab_size, options.prompts, options.prompt_tokens, options.samples, options.sample_tokens
    )
    sides = {name: Side(model, data, budget, share=name == "shared") for name in ("unshared", "shared")}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    last: dict[str, tuple[ForwardBackwardOutput, torch.Tensor]] = {}
    for number in range(options.rounds + 1):
        for name, side in sides.items():
            taken, output, gradient = side.run()
            last[name] = (output, gradient)
            if number:
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    (shared, gradient), (unshared, expected) = last["shared"], last["unshared"]
    given, computed = shared.metrics["tokens:sum"], shared.metrics["tokens_computed:sum"]
    logprobs = [
        float(np.abs(a["logprobs"] - b["logprobs"]).max())
        for a, b in zip(shared.loss_fn_outputs, unshared.loss_fn_outputs, strict=True)
    ]
    row = {
        "id": "shared_prompts",
        "what": f"{options.prompts} prompts of {options.prompt_tokens} tokens × {options.samples} samples of "
        f"{options.sample_tokens}, {options.shape} of {len(model.kv_shapes)} layers, rank {options.rank}, "
        f"passes of {budget} tokens",
        "value": given / medians["shared"],
        "unit": "tokens/s",
        "baseline": given / medians["unshared"],
        "ratio": medians["unshared"] / medians["shared"],
        "ideal": given / computed,
        "efficiency": medians["unshared"] / medians["shared"] * computed / given,
        "passes": {name: len(side.passes) for name, side in sides.items()},
        "tokens_computed": computed,
        "gradient_difference": float((gradient - expected).abs().max() / expected.abs().max()),
        "logprob_difference": max(logprobs),
        "device": device_name(device),
        "dtype": options.dtype,
        "torch": torch.__version__,
    }
    print(json.dumps(row, indent=2, ensure_ascii=False))
    if options.json is not None:
        options.json.write_text(json.dumps(row, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
