"""How far the sampler's log-probabilities are from the trainer's, and what making them the same every time costs.

    python bench/mismatch.py [--shape qwen3-0.6b | --model smollm2] [--sequences 64] [--prompt-tokens 128] [--tokens 64]
                             [--adapters 8] [--rank 16] [--lone 8] [--dtype bfloat16] [--rounds 3] [--json FILE]

Sequences are sampled at temperature 1 and scored by a forward pass of training on the same weights. For each batch
(each alone, all of one adapter, adapters mixed, mixed again after a training step and a publish), by default and
batch-invariant: mean and largest difference of log-probabilities, the k3 estimate of KL(sampler || trainer), the share
of tokens whose ratio is outside [0.5, 2], tokens per second, and how many sequences came out bit for bit as they do
alone. The price of the batch-invariant mode is the median of the rounds' ratios; the modes alternate in one process,
after a run of each that is not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model, resolve_model
from descant.sample.pages import pages_for
from descant.sample.plan import SampleLimits
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.testing.learner import LearnerHarness
from descant.testing.shapes import SHAPES, shaped_model
from descant.types import Datum, EncodedText, SampleRequest, SamplingParams, Version

Samples = tuple[list[int], list[float]]


def requests(
    versions: Sequence[Version], options: argparse.Namespace, vocab_size: int, count: int
) -> list[SampleRequest]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(options.prompt_tokens // 2, options.prompt_tokens + 1, options.sequences)
    prompts = [rng.integers(0, vocab_size, length).astype(np.int32) for length in lengths]
    return [
        SampleRequest(
            request_id=f"r{n}",
            version=versions[n % len(versions)],
            prompt=(EncodedText(tokens=prompts[n]),),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=options.tokens, seed=n, stop=()),
        )
        for n in range(count)
    ]


def sample(
    model: BaseModel, sampler: Sampler, wanted: Sequence[SampleRequest], options: argparse.Namespace
) -> tuple[dict[str, Samples], float]:
    """By request, and the seconds."""
    scheduler = Scheduler(
        SampleLimits(
            max_num_seqs=options.sequences,
            num_pages=num_pages(options),
            max_num_batched_tokens=4096,
            max_queued_requests=options.sequences,
            max_context_length=model.facts.max_context_length,
            vocab_size=model.facts.vocab_size,
            eos_token_ids=(),
            chunk_tokens=sampler.chunk_tokens,
        ),
        decode_text=lambda tokens: "",
        fresh_seed=lambda: 0,
        prefix_caching=False,
    )
    for request in wanted:
        sampler.pin(request.version)
        scheduler.add(request)
    found: dict[str, Samples] = {}
    start = time.perf_counter()
    while (plan := scheduler.plan()) is not None:
        for delta in scheduler.apply(plan, sampler.step(plan)):
            found[delta.request_id] = (delta.tokens.tolist(), delta.logprobs.tolist())
    seconds = time.perf_counter() - start
    for request in wanted:
        sampler.unpin(request.version)
    return found, seconds


def num_pages(options: argparse.Namespace) -> int:
    return options.sequences * pages_for(options.prompt_tokens + options.tokens)


def trained(harness: LearnerHarness, wanted: Sequence[SampleRequest], found: dict[str, Samples]) -> np.ndarray:
    """Log-probabilities of all sampled tokens, in the requests' order, by forward passes of training."""
    scores: list[np.ndarray] = []
    for request in wanted:
        prompt = request.prompt[0].tokens
        whole = np.concatenate([prompt, np.array(found[request.request_id][0], np.int32)])
        data = Datum(
            model_input=(EncodedText(tokens=whole[:-1]),),
            loss_fn_inputs={"target_tokens": whole[1:].astype(np.int64)},
        )
        assert request.version is not None
        [output] = harness.run(harness.command(request.version.model_id, data, forward_only=True))
        scores.append(output.loss_fn_outputs[0]["logprobs"][len(prompt) - 1 :])
    return np.concatenate(scores).astype(np.float64)


def difference(sampled: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    delta = scores - sampled
    return {
        "mean": float(np.abs(delta).mean()),
        "max": float(np.abs(delta).max()),
        "k3": float((np.expm1(delta) - delta).mean()),
        "outside": float(((delta > np.log(2)) | (delta < -np.log(2))).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lone", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as directory:
        if options.model:
            source = resolve_model(options.model)
        else:
            path = shaped_model(options.shape, Path(directory), device=device)
            source = ModelSource(name=options.shape, directory=path)
        model = load_model(source, device=device, dtype=dtype, check=False, version_bytes=16 << 30)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{options.model or options.shape}, {options.dtype}, {card}, torch {torch.__version__}", flush=True)

    harness = LearnerHarness(model)
    versions = []
    for number in range(options.adapters):
        harness.create(f"m{number}", options.rank, seed=number, b_std=0.02)
        versions.append(Version(model_id=f"m{number}", number=1))
        model.bank.publish(f"m{number}", versions[-1])
    samplers = {
        mode: Sampler(model, num_pages=num_pages(options), batch_invariant=mode == "batch-invariant")
        for mode in ("default", "batch-invariant")
    }
    vocab_size = model.facts.vocab_size
    rows: list[dict[str, object]] = []
    prices: dict[str, float] = {}

    def run(batch: str, sampler: Sampler, wanted: Sequence[SampleRequest]) -> tuple[dict[str, Samples], float]:
        """What was sampled, and the seconds it took."""
        found, seconds = dict[str, Samples](), 0.0
        for group in [[request] for request in wanted] if batch == "alone" else [wanted]:
            samples, taken = sample(model, sampler, group, options)
            found |= samples
            seconds += taken
        return found, seconds

    def measure(batch: str, wanted: Sequence[SampleRequest], alone: dict[str, dict[str, Samples]]) -> None:
        found = {mode: run(batch, sampler, wanted)[0] for mode, sampler in samplers.items()}  # compiles and captures
        if batch == "alone":
            alone |= found
        taken: dict[str, list[float]] = {mode: [] for mode in samplers}
        for _ in range(options.rounds):
            for mode, sampler in samplers.items():
                found[mode], seconds = run(batch, sampler, wanted)
                taken[mode].append(seconds)
        for mode, samples in found.items():
            sampled = np.concatenate([samples[r.request_id][1] for r in wanted]).astype(np.float64)
            same = [name for name, one in alone.get(mode, {}).items() if samples.get(name) == one]
            row = {
                "mode": mode,
                "batch": batch,
                **difference(sampled, trained(harness, wanted, samples)),
                "tokens_per_s": len(wanted) * options.tokens / statistics.median(taken[mode]),
                "as_alone": f"{len(same)} of {len(alone.get(mode, {}))}",
            }
            rows.append(row)
            print({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        ratios = [slow / fast for fast, slow in zip(taken["default"], taken["batch-invariant"], strict=True)]
        prices[batch] = statistics.median(ratios)

    mixed = requests(versions, options, vocab_size, options.sequences)
    alone: dict[str, dict[str, Samples]] = {}
    measure("alone", mixed[: options.lone], alone)
    measure("mixed adapters", mixed, alone)
    measure("one adapter", requests(versions[:1], options, vocab_size, options.sequences), {})
    for number in range(options.adapters):
        stream = np.random.default_rng(number).integers(0, vocab_size, 65)
        item = Datum(
            model_input=(EncodedText(tokens=stream[:-1].astype(np.int32)),),
            loss_fn_inputs={"target_tokens": stream[1:].astype(np.int64)},
        )
        harness.run(harness.command(f"m{number}", item))
        harness.step(f"m{number}")
        versions[number] = Version(model_id=f"m{number}", number=2)
        model.bank.publish(f"m{number}", versions[number])
    measure("after a publish", requests(versions, options, vocab_size, options.sequences), {})
    for batch in ("alone", "one adapter", "mixed adapters"):
        print(f"{batch}: batch-invariant takes {prices[batch]:.2f}x as long", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"card": card, "torch": torch.__version__, "rows": rows, "prices": prices}, indent=1)
        )


if __name__ == "__main__":
    main()
