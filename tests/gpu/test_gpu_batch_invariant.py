"""On a CUDA device: a batch-invariant sampler gives a request the same bits in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.sample.cuda_graphs import CudaGraphs, DecodeKey, PrefillKey
from descant.sample.runner import CHUNK_TOKENS, PASS_CHUNKS, Sampler
from descant.testing.batch_invariance import in_every_batch, publish, sampled
from descant.testing.tiny import VOCAB_SIZE, tiny_model
from descant.types import EncodedText, SampleRequest, SamplingParams, Version

NUM_PAGES = 128
LENGTHS = (1, 300, 64, 256, 257, 130, 500, 33, 90, 255, 12)
"""Of prompts: one chunk each or two, full or not; 14 in all, which are two passes."""

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_the_same_bits_in_any_batch(tmp_path: Path, arch: str, dtype: torch.dtype, compiled: bool) -> None:
    source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
    model = load_model(source, device=torch.device("cuda"), dtype=dtype, check=False)
    sampler = Sampler(model, num_pages=64, batch_invariant=True, compile_decode=compiled)
    found = in_every_batch(model, sampler)
    alone = found.pop("alone")
    for batch, samples in found.items():
        for name in alone:
            assert samples[name] == alone[name], (batch, name)
    assert sampler._graphs is not None
    steps = [key for key in sampler._graphs._graphs if isinstance(key, DecodeKey)]
    assert not any(key.lora_a_fused for key in steps), "whether they are would depend on the batch"
    assert len(steps) < len(sampler._graphs._graphs), "prefills are captured, too"


def ask(number: int, version: Version | None, length: int) -> SampleRequest:
    tokens = np.random.default_rng(length).integers(0, VOCAB_SIZE, length).astype(np.int32)
    return SampleRequest(
        request_id=f"r{number}",
        version=version,
        prompt=(EncodedText(tokens=tokens),),
        num_samples=1,
        sampling_params=SamplingParams(max_tokens=3, stop=(), seed=length, temperature=float(number % 3 > 0)),
        prompt_logprobs=True,
    )


Samples = tuple[list[int], list[float], list[float]]


def samples_of(model: BaseModel, sampler: Sampler, wanted: Sequence[SampleRequest]) -> dict[str, Samples]:
    """By request: tokens, their log-probabilities, the prompt's (without the first). Prompts begin in one step."""
    finished, _ = sampled(
        model, sampler, wanted, num_pages=NUM_PAGES, max_num_batched_tokens=2 * PASS_CHUNKS * CHUNK_TOKENS
    )
    found = {}
    for request in wanted:
        key, scores = (request.request_id, 0), finished.prompts[request.request_id].logprobs
        assert scores is not None
        found[request.request_id] = (finished.tokens[key], finished.logprobs[key], scores[1:].tolist())
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prompts_are_the_same_together_alone_and_in_another_order(
    tmp_path: Path, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the base and of adapters of three rank buckets, one of which has tiles of its own size."""
    model, sampler, versions = batch_invariant_sampler(tmp_path, dtype, compiled)
    owners = [None, versions["a"], versions["c"], versions["e"], versions["b"]]
    wanted = [ask(n, owners[n % len(owners)], length) for n, length in enumerate(LENGTHS)]
    rows: list[int] = []
    prefill_key = CudaGraphs._prefill_key

    def noted(self: CudaGraphs, *given: object) -> PrefillKey:
        key = prefill_key(self, *given)  # type: ignore[arg-type]
        rows.append(key.tokens)
        return key

    monkeypatch.setattr(CudaGraphs, "_prefill_key", noted)
    together = samples_of(model, sampler, wanted)
    assert rows == [PASS_CHUNKS * CHUNK_TOKENS] * 2
    assert samples_of(model, sampler, wanted[::-1]) == together
    assert samples_of(model, sampler, wanted[4:] + wanted[:4]) == together
    for request in wanted:
        assert samples_of(model, sampler, [request])[request.request_id] == together[request.request_id], (
            request.request_id
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_chunk_is_the_same_at_every_place_of_a_pass(tmp_path: Path, dtype: torch.dtype) -> None:
    model, sampler, versions = batch_invariant_sampler(tmp_path, dtype, compiled=True)
    for version in (None, versions["a"], versions["e"]):
        wanted = [ask(3 * n, version, 200) for n in range(PASS_CHUNKS)]
        found = list(samples_of(model, sampler, wanted).values())
        assert all(each == found[0] for each in found)


def batch_invariant_sampler(
    tmp_path: Path, dtype: torch.dtype, compiled: bool
) -> tuple[BaseModel, Sampler, dict[str, Version]]:
    source = ModelSource(name="qwen3", directory=tiny_model("qwen3", tmp_path / "qwen3"))
    model = load_model(source, device=torch.device("cuda"), dtype=dtype, check=False)
    sampler = Sampler(model, num_pages=NUM_PAGES, batch_invariant=True, compile_decode=compiled)
    return model, sampler, publish(model)
