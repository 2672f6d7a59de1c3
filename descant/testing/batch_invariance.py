"""Batch invariance: the same sampling requests alone, all at once, in another order, short of pages, beside others.

What ``in_every_batch`` returns must be equal, bit for bit, where a sampler is batch-invariant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from descant.model.base import BaseModel
from descant.sample.plan import SampleLimits
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.testing.learner import LearnerHarness
from descant.testing.paged_sampler import Finished, run
from descant.types import EncodedText, SampleRequest, SamplingParams, Version

RANKS = {"a": 4, "b": 8, "c": 16, "d": 8, "e": 128}
LENGTHS = (5, 64, 90, 300, 33)
"""Of prompts: less than a chunk, and more than one where that is 256 tokens."""
RequestSamples = tuple[list[int], list[float], object, list[float]]
Samples = Mapping[str, RequestSamples]
"""By request: tokens, their log-probabilities, the likeliest beside them, the prompt's (without the first)."""


def publish(model: BaseModel) -> dict[str, Version]:
    harness = LearnerHarness(model)
    versions = {}
    for number, (name, rank) in enumerate(RANKS.items()):
        harness.create(name, rank, seed=number, b_std=0.2)
        versions[name] = Version(model_id=name, number=1)
        model.bank.publish(name, versions[name])
    return versions


def requests(versions: Mapping[str, Version], vocab_size: int, *, first: int = 0) -> list[SampleRequest]:
    """Of the base and of every adapter: greedy, sampled, cut, with alternatives and without."""
    rng = np.random.default_rng(first)
    params = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "top_k": 30}]
    owners = [None, *versions.values()]
    return [
        SampleRequest(
            request_id=f"r{first + n}",
            version=owners[n % len(owners)],
            prompt=(EncodedText(tokens=rng.integers(0, vocab_size, LENGTHS[n % 5] + n // 5).astype(np.int32)),),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=30 + n, stop=(), seed=first + n, **params[n % 3]),  # type: ignore[arg-type]
            prompt_logprobs=True,
            topk_sample_logprobs=2 * (n % 4 == 0),
        )
        for n in range(10)
    ]


def sampled(
    model: BaseModel, sampler: Sampler, wanted: Sequence[SampleRequest], *, num_pages: int, max_num_batched_tokens: int
) -> tuple[Finished, Mapping[str, int]]:
    scheduler = Scheduler(
        SampleLimits(
            max_num_seqs=32,
            num_pages=num_pages,
            max_num_batched_tokens=max(max_num_batched_tokens, sampler.chunk_tokens or 1),
            max_queued_requests=100,
            max_context_length=model.facts.max_context_length,
            vocab_size=model.facts.vocab_size,
            eos_token_ids=(),
            chunk_tokens=sampler.chunk_tokens,
            copies_pages=sampler.copies_pages,
        ),
        decode_text=lambda tokens: "",
        fresh_seed=lambda: 0,
    )
    for request in wanted:
        sampler.pin(request.version)
        scheduler.add(request)
    finished = run(scheduler, sampler)  # type: ignore[arg-type]
    for request in wanted:
        sampler.unpin(request.version)
    return finished, scheduler.stats()


def in_every_batch(model: BaseModel, sampler: Sampler, *, num_pages: int = 64) -> dict[str, Samples]:
    """``sampler`` has at least ``num_pages`` pages. Adapters are made and published here."""
    versions = publish(model)
    mine = requests(versions, model.facts.vocab_size)
    others = requests(versions, model.facts.vocab_size, first=100)
    found: dict[str, Samples] = {}

    def samples_of(finished: Finished, of: Sequence[SampleRequest]) -> Samples:
        together: dict[str, RequestSamples] = {}
        for request in of:
            key, scores = (request.request_id, 0), finished.prompts[request.request_id].logprobs
            assert scores is not None
            likeliest = finished.topk.get(key)
            together[request.request_id] = (
                finished.tokens[key],
                finished.logprobs[key],
                likeliest,
                scores[1:].tolist(),
            )
        return together

    singly: dict[str, RequestSamples] = {}
    for request in mine:
        finished, _ = sampled(model, sampler, [request], num_pages=num_pages, max_num_batched_tokens=512)
        singly |= samples_of(finished, [request])
    found["alone"] = singly
    for name, wanted, pages, max_num_batched_tokens in (
        ("all at once", mine, num_pages, 4096),
        ("in another order, in small chunks", mine[::-1], num_pages, 23),
        ("beside others", [*others[:5], *mine, *others[5:]], num_pages, 100),
        ("on few pages", [*others[:3], *mine], 7, 4096),
    ):
        finished, stats = sampled(
            model, sampler, wanted, num_pages=pages, max_num_batched_tokens=max_num_batched_tokens
        )
        assert name != "on few pages" or stats["preemptions"] > 0
        found[name] = samples_of(finished, mine)
    return found
