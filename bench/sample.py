"""Sampling speed on models of real shapes: tokens per second, the fraction of the decode floor, adapters mixed, and
``transformers.generate`` on the same batch.

    python bench/sample.py --shape qwen3-0.6b [--prompts 256] [--prompt-tokens 128] [--tokens 256] [--adapters 8 64]
                           [--generate] [--json FILE]

A decode step cannot be faster than reading what it needs once: the weights, the keys and values of every sequence's
context, the distinct adapters; over the bandwidth of a large copy, measured in the same process:
``floor = max((W + Σ context · kv + Σ adapter) / B, 2 · P · batch / F)``.
``mismatch``: mean absolute difference between the sampler's log-probabilities of what it sampled and the trainer's, in
nats; ``mismatch without``: the same with the trainer on the base alone, to see that adapters count.
``decode fraction`` is over the steps in which all sequences decode; ``run fraction`` over the whole run, its prefill
included (whose own floor is ``2 · P · T / F``).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from descant.adapters.slots import RowRef
from descant.bench import alternate, medians
from descant.model.base import BaseModel
from descant.model.flops import measure_peak_flops
from descant.model.forward_batch import ForwardBatch, Segment
from descant.model.load import ModelSource, load_model
from descant.sample.pages import pages_for
from descant.sample.plan import SampleLimits
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.testing.shapes import SHAPES, shaped_model
from descant.types import EncodedText, Lora, SampleRequest, SamplingParams, Version


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: torch.device) -> float:
    """Bytes/s read plus written by a large copy."""
    source = torch.randn((1 << 30) if device.type == "cuda" else (1 << 26), device=device)
    target = torch.empty_like(source)
    seconds = alternate({"copy": lambda: target.copy_(source)}, device, rounds=7, warm_up=2)
    return 2 * source.nbytes / medians(seconds)["copy"]


class Facts:
    """What the floor is made of."""

    def __init__(self, model: BaseModel, rate: float, bandwidth: float, rank: int):
        item = model.dtype.itemsize
        self.linear = sum(site.in_features * site.out_features for site in model.bank.sites)
        self.weight_bytes = self.linear * item
        self.kv_bytes_per_token = model.kv_bytes_per_token()
        self.bytes_per_adapter = item * sum(rank * (site.in_features + site.out_features) for site in model.bank.sites)
        self.rate, self.bandwidth = rate, bandwidth

    def step(self, batch: int, context: float, adapters: int) -> float:
        read = self.weight_bytes + batch * context * self.kv_bytes_per_token + adapters * self.bytes_per_adapter
        return max(read / self.bandwidth, 2 * self.linear * batch / self.rate)

    def prefill(self, tokens: int) -> float:
        return 2 * self.linear * tokens / self.rate


@dataclass(slots=True, kw_only=True)
class Sampled:
    version: Version | None
    prompt: np.ndarray
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0))


def run(
    model: BaseModel,
    sampler: Sampler,
    options: argparse.Namespace,
    versions: list[Version],
    num_pages: int,
    temperature: float,
) -> tuple[dict[str, float], list[Sampled]]:
    scheduler = Scheduler(
        SampleLimits(
            max_num_seqs=options.prompts,
            num_pages=num_pages,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_queued_requests=10 * options.prompts,
            max_context_length=model.facts.max_context_length,
            vocab_size=model.facts.vocab_size,
            eos_token_ids=(),
        ),
        decode_text=lambda tokens: "",
        fresh_seed=lambda: 0,
    )
    random = np.random.default_rng(0)
    samples: dict[str, Sampled] = {}
    for number in range(options.prompts):
        version = versions[number % len(versions)] if versions else None
        sampler.pin(version)
        prompt = random.integers(0, model.facts.vocab_size, options.prompt_tokens).astype(np.int32)
        samples[f"r{number}"] = Sampled(version=version, prompt=prompt)
        scheduler.add(
            SampleRequest(
                request_id=f"r{number}",
                version=version,
                prompt=(EncodedText(tokens=prompt),),
                num_samples=1,
                sampling_params=SamplingParams(
                    max_tokens=options.tokens, seed=number, temperature=temperature, stop=()
                ),
            )
        )
    decode: list[tuple[float, float, float]] = []
    wait(model.device)
    began = time.perf_counter()
    prefill = 0.0
    while True:
        start = time.perf_counter()
        plan = scheduler.plan()
        if plan is None:
            break
        planned = time.perf_counter()
        outputs = sampler.step(plan)
        stepped = time.perf_counter()
        deltas = scheduler.apply(plan, outputs)
        end = time.perf_counter()
        for delta in deltas:
            samples[delta.request_id].tokens, samples[delta.request_id].logprobs = delta.tokens, delta.logprobs
        if any(output.error for output in outputs):
            raise RuntimeError(next(output.error for output in outputs if output.error))
        if plan.num_tokens == len(plan.sequences) == options.prompts:
            decode.append((end - start, planned - start, end - stepped))
        elif max(len(s.tokens) for s in plan.sequences) > 1:
            prefill += end - start
    seconds = time.perf_counter() - began
    for number in range(options.prompts):
        sampler.unpin(versions[number % len(versions)] if versions else None)
    steps = decode[2:] or decode or [(seconds, 0.0, 0.0)]
    figures = {
        "seconds": seconds,
        "tokens_per_s": options.prompts * options.tokens / seconds,
        "prefill_s": prefill,
        "step_ms": 1e3 * statistics.median(d[0] for d in steps),
        "plan_ms": 1e3 * statistics.median(d[1] for d in steps),
        "apply_ms": 1e3 * statistics.median(d[2] for d in steps),
    }
    return figures, list(samples.values())


@torch.no_grad()
def mismatch(model: BaseModel, samples: Sequence[Sampled], *, adapters: bool) -> float:
    rows = [None if s.version is None or not adapters else model.bank.pin_version(s.version) for s in samples]
    order = sorted(range(len(samples)), key=lambda i: rows[i] or RowRef(rank_bucket=0, slot=0))
    lengths: list[int] = []
    wanted: list[int] = []
    segments, tokens, targets = [], [], []
    for i in order:
        sample, row, start = samples[i], rows[i], sum(lengths)
        whole = np.concatenate([sample.prompt, sample.tokens])
        lengths.append(len(whole) - 1)
        if row is not None:
            segments.append(Segment(start=start, end=start + lengths[-1], row=row))
        tokens.append(whole[:-1])
        targets.append(whole[1:])
        wanted += range(start + len(sample.prompt) - 1, start + lengths[-1])
    tokens_T, targets_T = (torch.tensor(np.concatenate(x), device=model.device).long() for x in (tokens, targets))
    positions_T = torch.cat([torch.arange(n, device=model.device) for n in lengths])
    hidden_TD, lora = model.decoder_forward(
        tokens_T, positions_T, ForwardBatch(seq_lens=tuple(lengths), segments=tuple(segments))
    )
    trained_T = model.lm_head.logprobs(hidden_TD, targets_T[:, None], lora).logprobs_PK[:, 0].cpu().numpy()
    for i, row in enumerate(rows):
        if row is not None:
            model.bank.unpin_version(samples[i].version)  # type: ignore[arg-type]
    return float(np.abs(trained_T[wanted] - np.concatenate([samples[i].logprobs for i in order])).mean())


def generate(shape: str, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """transformers' own generate, greedy, sdpa, its dynamic cache."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        path = shaped_model(shape, Path(directory), device=device)
        network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").to(
            device
        )
    network.eval()
    ids = torch.randint(0, SHAPES[shape]["vocab_size"], (options.prompts, options.prompt_tokens), device=device)
    arguments = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    network.generate(ids, max_new_tokens=4, min_new_tokens=4, **arguments)
    wait(device)
    start = time.perf_counter()
    network.generate(ids, max_new_tokens=options.tokens, min_new_tokens=options.tokens, **arguments)
    wait(device)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens_per_s": options.prompts * options.tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, object]] = []
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if options.generate:
        rows.append({"what": "transformers.generate", **generate(options.shape, options, device)})
        print(rows[-1], flush=True)
    with tempfile.TemporaryDirectory() as directory:
        source = ModelSource(name=options.shape, directory=shaped_model(options.shape, Path(directory), device=device))
        model = load_model(source, device=device, version_bytes=32 << 30, check=False, compile=False)
    facts = Facts(model, measure_peak_flops(device, model.dtype), bandwidth(device), options.rank)
    print(
        f"{card}, torch {torch.__version__}, {model.dtype}: {facts.rate / 1e12:.1f} TFLOP/s, "
        f"{facts.bandwidth / 1e9:.0f} GB/s",
        flush=True,
    )
    num_pages = options.prompts * pages_for(options.prompt_tokens + options.tokens)
    start = time.perf_counter()
    sampler = Sampler(
        model,
        num_pages=num_pages,
        max_rows=options.prompts,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    sampler.warm_up()
    print(f"compiled and captured in {time.perf_counter() - start:.1f} s", flush=True)
    gc.collect()
    gc.freeze()  # as a rank does
    temperature = 0.0 if options.greedy else 1.0
    base = 0.0
    for count in (0, *options.adapters):
        versions = []
        for number in range(count):
            name = f"n{count}-{number}"
            model.bank.create(name, Lora(rank=options.rank, seed=number))
            model.bank.weights(name).normal_(std=0.01)
            model.bank.refresh_compute(name)
            versions.append(Version(model_id=name, number=1))
            model.bank.publish(name, versions[-1])
            model.bank.delete(name)
        start = time.perf_counter()
        short = argparse.Namespace(**{**vars(options), "tokens": 12})
        _, samples = run(model, sampler, short, versions, num_pages, temperature)  # captures
        warm_up = time.perf_counter() - start
        found, _ = run(model, sampler, options, versions, num_pages, temperature)
        floor = facts.step(options.prompts, options.prompt_tokens + options.tokens / 2, count)
        whole = options.tokens * floor + facts.prefill(options.prompts * options.prompt_tokens)
        base = base or found["tokens_per_s"]
        row = {
            "what": f"{count} adapters",
            **found,
            "floor_ms": 1e3 * floor,
            "decode_fraction": 1e3 * floor / found["step_ms"],
            "run_fraction": whole / found["seconds"],
            "to_base_only": found["tokens_per_s"] / base,
            "warm_up_s": warm_up,
            "mismatch": mismatch(model, samples[:32], adapters=True),
            "mismatch_without": mismatch(model, samples[:32], adapters=False),
        }
        if options.generate:
            row["to_generate"] = found["tokens_per_s"] / float(rows[0]["tokens_per_s"])  # type: ignore[arg-type]
        rows.append(row)
        print({k: (round(v, 4) if isinstance(v, float) else v) for k, v in row.items()}, flush=True)
        if options.profile:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                short = argparse.Namespace(**{**vars(options), "tokens": 12})
                run(model, sampler, short, versions, num_pages, temperature)
            table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=70)
            options.profile.with_suffix(f".{count}.txt").write_text(table)
            events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
            for event in sorted(events, key=lambda e: -e.self_device_time_total)[:22]:
                micros = event.self_device_time_total
                print(f"{micros / 1e3:9.2f} ms {event.count:6d} x {micros / event.count:8.1f} us  {event.key[:90]}")
        for version in versions:
            model.bank.release(version)
    if options.json:
        options.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
