"""The same request gives the same bits in any batch, and the scheduler's part in it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from descant.adapters.slots import RowRef
from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.prefix import PAGE_TOKENS
from descant.sample.cuda_graphs import CudaGraphs
from descant.sample.runner import PASS_CHUNKS, Sampler
from descant.testing.batch_invariance import in_every_batch, publish, requests, sampled
from descant.testing.fake_graphs import FakeCudaGraphs
from descant.testing.paged_sampler import Finished, PagedFake, request, scheduler
from descant.testing.tiny import tiny_model

CHUNK = 2 * PAGE_TOKENS


@pytest.mark.parametrize(
    ("arch", "dtype"), [("llama", torch.float32), ("gemma2", torch.float32), ("qwen3", torch.bfloat16)]
)
def test_the_same_bits_in_any_batch(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    source = ModelSource(name="tiny", directory=tiny_model(arch, tmp_path / arch))
    model = load_model(source, device=torch.device("cpu"), dtype=dtype, check=False)
    # bf16 needs nothing done for it: there it is tried as it is served by default.
    sampler = Sampler(model, num_pages=64, batch_invariant=dtype == torch.float32)
    found = in_every_batch(model, sampler)
    alone = found.pop("alone")
    for batch, samples in found.items():
        for name in alone:
            assert samples[name] == alone[name], (batch, name)


def test_the_same_bits_where_graphs_decode(tmp_path: Path) -> None:
    """The rules of a CUDA device, with a fake of its graphs: prompts in chunks, prefills and decode steps always
    full, output tokens computed again one by one, also where the device is a step ahead."""
    model, sampler, graphs = with_graphs(tmp_path)
    found = in_every_batch(model, sampler)
    assert {key.rows for key in graphs.steps} == {graphs.max_rows}
    assert {key.tokens for key in graphs.prefills} == {PASS_CHUNKS * PAGE_TOKENS}
    assert graphs.ahead > 100
    alone = found.pop("alone")
    for batch, samples in found.items():
        for name in alone:
            assert samples[name] == alone[name], (batch, name)


def test_what_is_computed_again_is_not_sampled_again_ahead(tmp_path: Path) -> None:
    """Requests that a device samples for by itself: it goes ahead until one of them is preempted, and after."""
    model, sampler, _ = with_graphs(tmp_path)
    wanted = [
        replace(
            entry,
            sampling_params=replace(entry.sampling_params, temperature=1.0, top_k=-1, top_p=1.0, max_tokens=100),
            topk_sample_logprobs=0,
            prompt_logprobs=False,
        )
        for entry in requests(publish(model), model.facts.vocab_size)
        if len(entry.prompt[0].tokens) < PAGE_TOKENS
    ]
    together, stats = sampled(model, sampler, wanted, num_pages=8, max_num_batched_tokens=4096)
    assert stats["preemptions"] > 0
    for entry in wanted:
        alone, _ = sampled(model, sampler, [entry], num_pages=8, max_num_batched_tokens=4096)
        key = entry.request_id, 0
        assert (alone.tokens[key], alone.logprobs[key]) == (together.tokens[key], together.logprobs[key])


def with_graphs(tmp_path: Path) -> tuple[BaseModel, Sampler, FakeCudaGraphs]:
    model = load_model(
        ModelSource(name="tiny", directory=tiny_model("llama", tmp_path)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        check=False,
    )
    sampler = Sampler(model, num_pages=64, batch_invariant=True)
    sampler.chunk_tokens = PAGE_TOKENS
    return model, sampler, FakeCudaGraphs.install(sampler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapters_tiles_do_not_depend_on_the_others(tmp_path: Path, dtype: torch.dtype) -> None:
    """In prefill: large ranks need smaller tiles, which add their sums in another order."""
    source = ModelSource(name="tiny", directory=tiny_model("llama", tmp_path))
    model = load_model(source, device=torch.device("cpu"), dtype=dtype, check=False)
    narrow, wide = (model.bank.pin_version(version) for name, version in publish(model).items() if name in "ce")
    assert (narrow.rank_bucket, wide.rank_bucket) == (16, 128)
    graphs = CudaGraphs(model, model.make_kv_pool(1), dummy_page=0, table_width=1, max_tokens=384, batch_invariant=True)

    def tiles(*given: tuple[int, int, RowRef]) -> dict[int, list[list[int]]]:
        stage, key = graphs._prefill_stages[0], graphs._prefill_key(384, 8, given)
        graphs._fill_prefill_adapters(stage, key, given, [])
        fields = {max_rank: stage.numpy[f"adapters{max_rank}"][:, :2] for max_rank in key.max_ranks}
        return {bucket: [tile for tile in field.tolist() if tile != [0, 0]] for bucket, field in fields.items()}

    own, other = (128, 384, narrow), (0, 128, wide)
    assert tiles(own)[16] == tiles(other, own)[16]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_computed_together_is_the_same_in_any_batch(seed: int) -> None:
    """Chunks of prompts begin where pages or chunks do and end where chunks or the prompt do; output tokens come
    singly, and their pages are kept for nobody."""
    rng = random.Random(seed)
    num_pages = rng.choice([5, 8, 30])
    max_num_batched_tokens = CHUNK * rng.choice([1, 2, 5]) + rng.choice([0, 30])
    limits = {"num_pages": num_pages, "max_num_batched_tokens": max_num_batched_tokens, "chunk_tokens": CHUNK}
    s, fake = scheduler(**limits), PagedFake(num_pages)
    shared = [rng.randrange(90) for _ in range(200)]
    entries = [
        request(
            f"r{n}",
            prompt=shared[: rng.choice([3, 64, 65, 128, 129, 200])],
            num_samples=rng.choice([1, 2]),
            max_tokens=rng.choice([2, 30, 100]),
            seed=seed + n,
            prompt_logprobs=rng.random() < 0.3,
        )
        for n in range(8)
    ]
    lengths = {}
    finished = Finished()
    for entry in entries:
        for sample in range(entry.num_samples):
            lengths[len(lengths)] = len(entry.prompt[0].tokens), entry.sampling_params.max_tokens, sample
        s.add(entry)
    while (plan := s.plan()) is not None:
        ends: dict[int, int] = {}
        room = max_num_batched_tokens // CHUNK - sum(not step.is_output for step in plan.sequences)
        assert room >= 0
        for step in plan.sequences:
            num_prompt, _, _ = lengths[step.sequence]
            end = step.context + len(step.tokens)
            assert ends.get(step.sequence, step.context) == step.context
            ends[step.sequence] = end
            if step.is_output:
                assert step.context >= num_prompt
                assert len(step.tokens) == 1
            else:
                assert end <= num_prompt
                assert step.context % PAGE_TOKENS == 0
                assert end == min((step.context // CHUNK + 1) * CHUNK, num_prompt)
        assert room == 0 or all(end >= lengths[number][0] for number, end in ends.items()), "it could do more"
        finished.take(s.apply(plan, fake.step(plan)))
    assert s.stats()["used_pages"] == 0
    # Computed again or not, the tokens are those of a scheduler without rules.
    free, other = scheduler(num_pages=64), PagedFake(64)
    expected = Finished()
    for entry in entries:
        free.add(entry)
    while (plan := free.plan()) is not None:
        expected.take(free.apply(plan, other.step(plan)))
    assert finished.tokens == expected.tokens
    # What one has sampled serves no other, though its tokens are the same.
    first = entries[0]
    output = finished.tokens["r0", 0]
    longer = [*first.prompt[0].tokens.tolist(), *output]
    hits = s.stats()["hit_tokens"]
    s.add(request("longer", prompt=longer, max_tokens=1))
    plan = s.plan()
    assert plan is not None
    assert s.stats()["hit_tokens"] - hits <= 200
