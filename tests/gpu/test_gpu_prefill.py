"""On a CUDA device: prefill replayed from CUDA graphs gives what it gives launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.sample.cuda_graphs import CudaGraphs, PrefillKey
from descant.sample.plan import SampleLimits
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.sample.speculative import Drafter, NgramDrafter
from descant.testing.learner import LearnerHarness
from descant.testing.paged_sampler import Finished, run
from descant.testing.tiny import MAX_CONTEXT_LENGTH, VOCAB_SIZE, tiny_model
from descant.types import EncodedText, SampleRequest, SamplingParams, Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_PAGES = 128
RANKS = {"a": 4, "b": 8, "c": 16, "d": 64, "e": 256}
LENGTHS = (1, 130, 64, 99, 7, 300, 33, 65, 12, 250, 128, 20)

Load = Callable[..., tuple[BaseModel, dict[str, Version | None]]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def make(arch: str, dtype: torch.dtype = torch.float32) -> tuple[BaseModel, dict[str, Version | None]]:
        source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
        model = load_model(source, device=torch.device("cuda"), dtype=dtype, check=False)
        harness = LearnerHarness(model)
        versions: dict[str, Version | None] = {"": None}
        for number, (name, rank) in enumerate(RANKS.items()):
            harness.create(name, rank, seed=number, b_std=0.2)
            version = versions[name] = Version(model_id=name, number=1)
            model.bank.publish(name, version)
        return model, versions

    return make


def graphs_of(sampler: Sampler) -> CudaGraphs:
    assert sampler._graphs is not None
    return sampler._graphs


def captured(sampler: Sampler) -> list[PrefillKey]:
    return [key for key in graphs_of(sampler)._graphs if isinstance(key, PrefillKey)]


def uncaptured(model: BaseModel, *, compiled: bool = False) -> Sampler:
    sampler = Sampler(model, num_pages=NUM_PAGES, compile_decode=compiled)
    graphs_of(sampler)._captures_prefill = False
    return sampler


def ask(number: int, version: Version | None, length: int, **fields: object) -> SampleRequest:
    prompt = np.random.default_rng(length).integers(3, VOCAB_SIZE, length).astype(np.int32)
    if fields.pop("repeats", False):
        prompt = np.tile(prompt, 3)
    return SampleRequest(
        request_id=f"r{number}",
        version=version,
        prompt=(EncodedText(tokens=prompt),),
        num_samples=1,
        sampling_params=SamplingParams(max_tokens=12, stop=(), seed=number, temperature=float(number % 2)),
        **fields,  # type: ignore[arg-type]
    )


def sample(sampler: Sampler, *parts: Sequence[SampleRequest], drafter: Drafter | None = None) -> Finished:
    """One part after another: later ones find the earlier ones' prompts cached."""
    scheduler = Scheduler(
        SampleLimits(
            max_num_seqs=16,
            num_pages=NUM_PAGES,
            max_num_batched_tokens=200,
            max_queued_requests=100,
            max_context_length=MAX_CONTEXT_LENGTH,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
        ),
        decode_text=lambda tokens: "",
        fresh_seed=lambda: 0,
        drafter=drafter,
    )
    finished = Finished()
    for part in parts:
        for request in part:
            sampler.pin(request.version)
            scheduler.add(request)
        run(scheduler, sampler, finished)  # type: ignore[arg-type]
        for request in part:
            sampler.unpin(request.version)
    return finished


def assert_near(found: Finished, expected: Finished, atol: float = 1e-4) -> None:
    assert found.tokens == expected.tokens
    for key, logprobs in expected.logprobs.items():
        np.testing.assert_allclose(found.logprobs[key], logprobs, atol=atol)
    for name in expected.prompts:
        np.testing.assert_allclose(scores(found, name), scores(expected, name), atol=atol)


def scores(finished: Finished, name: str) -> np.ndarray:
    """Of a prompt, without its first token."""
    logprobs = finished.prompts[name].logprobs
    assert logprobs is not None
    return logprobs[1:]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "mistral", "gpt_neox"])
def test_replayed_equals_launched(load: Load, arch: str, compiled: bool) -> None:
    """Prompts of all adapters in chunks, beside sequences that decode, cached or not, scored or not."""
    model, versions = load(arch)
    owners = list(versions.values())
    wanted = [ask(n, owners[n % 6], length, prompt_logprobs=n in (1, 5)) for n, length in enumerate(LENGTHS)]
    again = [ask(40 + n, owners[n % 6], length) for n, length in enumerate(LENGTHS)]
    expected = sample(uncaptured(model), wanted, again)
    assert sum(expected.hit_tokens.values()) > 0
    sampler = Sampler(model, num_pages=NUM_PAGES, compile_decode=compiled)
    for _ in range(2):  # captured, then replayed alone
        assert_near(sample(sampler, wanted, again), expected)
    assert captured(sampler)
    assert graphs_of(sampler)._captures_prefill
    assert graphs_of(sampler)._compiled == compiled


def test_replayed_is_near_launched_in_bfloat16(load: Load) -> None:
    """Of prompts, since after a sampled token rounding may lead elsewhere."""
    model, versions = load("qwen3", torch.bfloat16)
    owners = list(versions.values())
    wanted = [ask(n, owners[n % 6], length, prompt_logprobs=True) for n, length in enumerate(LENGTHS)]
    expected, found = (sample(s, wanted) for s in (uncaptured(model), Sampler(model, num_pages=NUM_PAGES)))
    differences = [np.abs(scores(found, name) - scores(expected, name)) for name in expected.prompts]
    assert np.concatenate(differences).mean() <= 2e-2


def test_whose_prompts_come_together_makes_no_graph(load: Load) -> None:
    model, versions = load("llama")
    sampler = Sampler(model, num_pages=NUM_PAGES, compile_decode=False)
    sampler.warm_up()
    base = set(captured(sampler))
    sample(sampler, [ask(0, None, 20), ask(1, None, 130)])
    assert set(captured(sampler)) == base
    sample(sampler, [ask(n, version, 20) for n, version in enumerate(versions.values())])
    more = set(captured(sampler)) - base
    assert {key.max_ranks for key in more} == {(64, 256)}
    for name in ("a", "c", "e"):
        sample(sampler, [ask(0, versions[name], 120)])
    assert {key.max_ranks for key in captured(sampler)} == {(), (32,), (64, 256)}


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_drafts_are_replayed_and_change_no_token_in_float32(load: Load, arch: str) -> None:
    model, versions = load(arch)
    owners = [versions[name] for name in ("", "a", "c")]
    wanted = [ask(n, owners[n % 3], 12 + n, repeats=True) for n in range(9)]
    sampler = Sampler(model, num_pages=NUM_PAGES, compile_decode=False)
    expected = sample(sampler, wanted)
    assert_near(sample(sampler, wanted, drafter=NgramDrafter()), expected)
    assert graphs_of(sampler)._captures_prefill


def test_one_adapters_nan_reaches_no_other_prompt(load: Load) -> None:
    """Nor by what fills a pass up, nor by tiles that are not there."""
    model, versions = load("qwen3")
    sane = [ask(n, versions[name], 40 + n) for n, name in enumerate(("", "a", "b", "d", "e"))]
    sampler = Sampler(model, num_pages=NUM_PAGES, compile_decode=False)
    expected = sample(sampler, sane)
    row = model.bank.row("c")
    model.bank.compute_slab(row.rank_bucket)[row.slot].fill_(torch.nan)
    model.bank.publish("c", Version(model_id="c", number=2))
    broken = [ask(9, Version(model_id="c", number=2), 50)]
    for together in ([*broken, *sane], [*sane, *broken], sane):
        found = sample(sampler, together)
        for request in sane:
            key = (request.request_id, 0)
            assert found.tokens[key] == expected.tokens[key]
