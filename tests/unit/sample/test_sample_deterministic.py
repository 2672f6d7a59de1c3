"""The same request gives the same bits in any company, and the scheduler's part in it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.sample.pages import PAGE_TOKENS
from descant.sample.step import PASS_CHUNKS, Sampler
from descant.testing.company import in_every_company
from descant.testing.graphs import StandInGraphs
from descant.testing.paged_sampler import Finished, PagedFake, request, scheduler
from descant.testing.tiny import tiny_model

CHUNK = 2 * PAGE_TOKENS


@pytest.mark.parametrize(
    ("arch", "dtype"), [("llama", torch.float32), ("gemma2", torch.float32), ("qwen3", torch.bfloat16)]
)
def test_the_same_bits_in_any_company(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    source = ModelSource(name="tiny", directory=tiny_model(arch, tmp_path / arch))
    model = load_model(source, device=torch.device("cpu"), dtype=dtype, check=False)
    # bf16 needs nothing done for it: there it is tried as it is served by default.
    sampler = Sampler(model, num_pages=64, deterministic=dtype == torch.float32)
    found = in_every_company(model, sampler)
    alone = found.pop("alone")
    for company, drawn in found.items():
        for name in alone:
            assert drawn[name] == alone[name], (company, name)


def test_the_same_bits_where_graphs_decode(tmp_path: Path) -> None:
    """The rules of a CUDA device, with a stand-in for its graphs: prompts in chunks, prefills and decode steps always
    full, drawn tokens computed again one by one, also where the device is a step ahead."""
    model = load_model(
        ModelSource(name="tiny", directory=tiny_model("llama", tmp_path)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        check=False,
    )
    sampler = Sampler(model, num_pages=64, deterministic=True)
    sampler.chunk_tokens = PAGE_TOKENS
    graphs = StandInGraphs(sampler)
    sampler._decode = graphs  # type: ignore[assignment]
    found = in_every_company(model, sampler)
    assert set(graphs.rows) == {graphs.max_rows}
    assert set(graphs.prefills) == {PASS_CHUNKS * PAGE_TOKENS}
    assert graphs.ahead > 100
    alone = found.pop("alone")
    for company, drawn in found.items():
        for name in alone:
            assert drawn[name] == alone[name], (company, name)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_computed_together_is_the_same_in_any_company(seed: int) -> None:
    """Chunks of prompts begin where pages or chunks do and end where chunks or the prompt do; drawn tokens come singly,
    and their pages are kept for nobody."""
    chance = random.Random(seed)
    num_pages = chance.choice([5, 8, 30])
    limits = {"num_pages": num_pages, "step_tokens": CHUNK + chance.choice([0, 30]), "chunk_tokens": CHUNK}
    s, fake = scheduler(**limits), PagedFake(num_pages)
    shared = [chance.randrange(90) for _ in range(200)]
    entries = [
        request(
            f"r{n}",
            prompt=shared[: chance.choice([3, 64, 65, 128, 129, 200])],
            num_samples=chance.choice([1, 2]),
            max_tokens=chance.choice([2, 30, 100]),
            seed=seed + n,
            prompt_logprobs=chance.random() < 0.3,
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
        for step in plan.sequences:
            num_prompt, _, _ = lengths[step.sequence]
            end = step.context + len(step.tokens)
            if step.drawn:
                assert step.context >= num_prompt
                assert len(step.tokens) == 1
            else:
                assert end <= num_prompt
                assert step.context % PAGE_TOKENS == 0
                assert end == min((step.context // CHUNK + 1) * CHUNK, num_prompt)
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
    # What one has drawn serves no other, though its tokens are the same.
    first = entries[0]
    drawn = finished.tokens["r0", 0]
    longer = [*first.prompt[0].tokens.tolist(), *drawn]
    hits = s.stats()["hit_tokens"]
    s.add(request("longer", prompt=longer, max_tokens=1))
    plan = s.plan()
    assert plan is not None
    assert s.stats()["hit_tokens"] - hits <= 200
