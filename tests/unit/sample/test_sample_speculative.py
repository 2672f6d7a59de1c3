"""Drafters, and a scheduler with one: the output is that of a scheduler without, whatever the drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from descant.prefix import PAGE_TOKENS
from descant.sample.speculative import LOOKBACK_TOKENS, DraftContext, NgramDrafter
from descant.testing.paged_sampler import EOS, VOCAB_SIZE, Finished, PagedFake, request, run, scheduler
from descant.types import SampleRequest


def draft(prompt: Sequence[int], output: Sequence[int] = (), limit: int = 4, **options: int) -> tuple[int, ...]:
    context = DraftContext(sequence=0, prompt=tuple(prompt), output_tokens=list(output), limit=limit)
    [found] = NgramDrafter(**options).propose([context])
    return found


# ---------------------------------------------------------------------------------------------------------- the n-gram
def test_what_came_after_the_same_tokens_is_the_draft() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 9, 1, 2], limit=3) == (3, 4, 5)
    assert draft([1, 2, 3, 4, 5, 6], [9, 1, 2], limit=1) == (3,), "the prompt counts, and so do output tokens"
    assert draft([9, 1], [2, 3, 7, 8, 1, 2], limit=2) == (3, 7), "tokens may agree across the prompt's end"


def test_more_tokens_that_agree_are_better_and_then_the_last_match() -> None:
    assert draft([5, 1, 2, 7, 1, 2, 8, 5, 1, 2], limit=1) == (7,)
    assert draft([1, 2, 7, 1, 2, 8, 1, 2], limit=1) == (8,)


def test_a_cycle_goes_on() -> None:
    assert draft([4, 1, 2, 1, 2], limit=5) == (1, 2, 1, 2, 1)
    assert draft([3, 3, 3], limit=3) == (3, 3, 3)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4], [2, 1, 1, 2, 3, 1]])
def test_no_draft_where_nothing_repeats(tokens: list[int]) -> None:
    assert draft(tokens) == ()


def test_bytes_of_neighbouring_tokens_are_no_token() -> None:
    """256 and 1 hold each other's bytes at odd places."""
    assert draft([256, 256, 7, 1, 1]) == ()
    assert draft([1 << 24, 0, 5, 7, 1, 0]) == ()


def test_only_the_end_of_a_long_sequence_is_looked_at() -> None:
    between = [7 + i for i in range(LOOKBACK_TOKENS)]
    assert draft([1, 2, 3, *between, 1, 2]) == ()
    assert draft([1, 2, 3, *between[:100]], [1, 2], limit=1) == (3,)


# ------------------------------------------------------------------------------------------------------- the scheduler
class Oracle:
    """Knows what will be sampled, and says something else now and then."""

    def __init__(self, truth: Finished, entries: Sequence[SampleRequest], *, right: float, seed: int = 0):
        self._known = {
            (tuple(entry.prompt[0].tokens.tolist()), tuple(truth.tokens[entry.request_id, sample])): None
            for entry in entries
            for sample in range(entry.num_samples)
        }
        self._rng = random.Random(seed)
        self._right = right
        self.reported: list[tuple[int, int, int]] = []
        self.running: set[int] = set()

    def propose(self, contexts: Sequence[DraftContext]) -> list[tuple[int, ...]]:
        self.running |= {context.sequence for context in contexts}
        return [self._propose(context) for context in contexts]

    def _propose(self, context: DraftContext) -> tuple[int, ...]:
        place = len(context.output_tokens)
        for prompt, output in self._known:
            if prompt == context.prompt and output[:place] == tuple(context.output_tokens):
                ahead = output[place : place + context.limit]
                return tuple(t if self._rng.random() < self._right else (t + 1) % VOCAB_SIZE for t in ahead)
        raise AssertionError("a sequence has sampled what it would not have sampled alone")

    def accepted(self, sequence: int, drafted: int, accepted: int) -> None:
        self.reported.append((sequence, drafted, accepted))

    def ended(self, sequence: int) -> None:
        self.running.discard(sequence)


def together(entries: Sequence[SampleRequest], drafter: Oracle | None = None, **limits: Any) -> tuple[Finished, dict]:
    s, fake = scheduler(drafter=drafter, **limits), PagedFake(limits.get("num_pages", 64))
    for entry in entries:
        s.add(entry)
    finished = run(s, fake)
    return finished, s.stats()


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("seed", range(12))
def test_the_output_does_not_depend_on_the_drafts(seed: int, right: float) -> None:
    """Stops inside an accepted run, few pages, streams, scores, alternatives: all as without a drafter."""
    rng = random.Random(seed)
    entries = [
        request(
            f"r{i}",
            prompt=[rng.randrange(90) for _ in range(rng.choice([2, 50, 63, 64, 65, 129]))],
            num_samples=rng.choice([1, 2]),
            max_tokens=rng.choice([1, 2, 5, 20, 70, 100]),
            stop=rng.choice([None, (), (7, 50), ("ab", "q")]),
            seed=seed,
            stream=rng.random() < 0.3,
            prompt_logprobs=rng.random() < 0.3,
            topk_sample_logprobs=rng.choice([0, 2]),
        )
        for i in range(8)
    ]
    limits = {
        "num_pages": rng.choice([5, 30]),
        "max_num_batched_tokens": rng.choice([9, 70]),
        "num_speculative_tokens": 5,
    }
    expected, _ = together(entries, **limits)
    drafter = Oracle(expected, entries, right=right, seed=seed)
    finished, stats = together(entries, drafter, **limits)
    assert finished.tokens == expected.tokens
    assert finished.logprobs == expected.logprobs
    assert finished.reasons == expected.reasons
    assert finished.topk == expected.topk
    assert stats["used_pages"] == stats["running"] == 0
    assert not drafter.running, "all that ended was reported"
    assert stats["drafted_steps"] == len(drafter.reported) > 0
    assert stats["drafted_tokens"] == sum(drafted for _, drafted, _ in drafter.reported)
    assert stats["accepted_tokens"] == sum(accepted for _, _, accepted in drafter.reported)
    if right == 0:
        assert stats["accepted_tokens"] == 0
    if right == 1 and limits["num_pages"] == 30:
        assert stats["accepted_tokens"] > 0.9 * stats["drafted_tokens"], "but for samples that began alike"


def test_drafts_save_steps() -> None:
    entry = request(max_tokens=50)
    expected, _ = together([entry])
    s, fake = scheduler(drafter=Oracle(expected, [entry], right=1.0), num_speculative_tokens=4), PagedFake(64)
    s.add(entry)
    steps = 0
    finished = Finished()
    while (plan := s.plan()) is not None:
        assert plan.num_tokens == sum(len(x.tokens) + len(x.draft) for x in plan.sequences)
        finished.take(s.apply(plan, fake.step(plan)))
        steps += 1
    assert finished.tokens == expected.tokens
    assert steps == 1 + 10, "a first one, then 4 draft tokens and one token more, nine times, and a last one of 4"


@pytest.mark.parametrize("length", [60, 63, 64])
def test_drafts_stay_within_the_pages_that_are_there(length: int) -> None:
    entry = request(prompt=[i % 90 for i in range(length)], max_tokens=20)
    expected, _ = together([entry], num_pages=2)
    s, fake = (
        scheduler(drafter=Oracle(expected, [entry], right=1.0), num_pages=2, num_speculative_tokens=8),
        PagedFake(2),
    )
    s.add(entry)
    while (plan := s.plan()) is not None:
        for step in plan.sequences:
            assert step.context + len(step.tokens) + len(step.draft) <= len(step.pages) * PAGE_TOKENS
        s.apply(plan, fake.step(plan))


def test_a_stop_within_a_draft_ends_it() -> None:
    script = {0: [5, 6, EOS, 8, 9, 10]}
    entry = request(max_tokens=6, stop=None)
    truth = Finished()
    truth.tokens["r", 0] = script[0]
    s, fake = scheduler(drafter=Oracle(truth, [entry], right=1.0)), PagedFake(64, script)
    s.add(entry)
    finished = run(s, fake)
    assert finished.tokens["r", 0] == [5, 6, EOS]
    assert finished.reasons["r", 0] == "stop"
    assert len(finished.logprobs["r", 0]) == 3
