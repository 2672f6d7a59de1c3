"""Drafters, and a scheduler that guesses: what is drawn is what is drawn without, whatever is guessed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from descant.sample.drafter import LOOKBACK_TOKENS, DraftContext, NgramDrafter
from descant.sample.pages import PAGE_TOKENS
from descant.testing.paged_sampler import EOS, VOCAB_SIZE, Finished, PagedFake, request, run, scheduler
from descant.types import SampleRequest


def guess(prompt: Sequence[int], drawn: Sequence[int] = (), limit: int = 4, **options: int) -> tuple[int, ...]:
    context = DraftContext(sequence=0, prompt=tuple(prompt), drawn=list(drawn), limit=limit)
    [found] = NgramDrafter(**options).propose([context])
    return found


# ---------------------------------------------------------------------------------------------------------- the n-gram
def test_what_came_after_the_same_tokens_is_guessed() -> None:
    assert guess([1, 2, 3, 4, 5, 6, 9, 1, 2], limit=3) == (3, 4, 5)
    assert guess([1, 2, 3, 4, 5, 6], [9, 1, 2], limit=1) == (3,), "the prompt counts, and so does what was drawn"
    assert guess([9, 1], [2, 3, 7, 8, 1, 2], limit=2) == (3, 7), "tokens may agree across the prompt's end"


def test_more_tokens_that_agree_are_better_and_then_the_last_place() -> None:
    assert guess([5, 1, 2, 7, 1, 2, 8, 5, 1, 2], limit=1) == (7,)
    assert guess([1, 2, 7, 1, 2, 8, 1, 2], limit=1) == (8,)


def test_a_cycle_goes_on() -> None:
    assert guess([4, 1, 2, 1, 2], limit=5) == (1, 2, 1, 2, 1)
    assert guess([3, 3, 3], limit=3) == (3, 3, 3)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4], [2, 1, 1, 2, 3, 1]])
def test_nothing_is_guessed_where_nothing_repeats(tokens: list[int]) -> None:
    assert guess(tokens) == ()


def test_bytes_of_neighbouring_tokens_are_no_token() -> None:
    """256 and 1 hold each other's bytes at odd places."""
    assert guess([256, 256, 7, 1, 1]) == ()
    assert guess([1 << 24, 0, 5, 7, 1, 0]) == ()


def test_only_the_end_of_a_long_sequence_is_looked_at() -> None:
    between = [7 + i for i in range(LOOKBACK_TOKENS)]
    assert guess([1, 2, 3, *between, 1, 2]) == ()
    assert guess([1, 2, 3, *between[:100]], [1, 2], limit=1) == (3,)


# ------------------------------------------------------------------------------------------------------- the scheduler
class Oracle:
    """Knows what will be drawn, and says something else now and then."""

    def __init__(self, truth: Finished, entries: Sequence[SampleRequest], *, right: float, seed: int = 0):
        self._known = {
            (tuple(entry.prompt[0].tokens.tolist()), tuple(truth.tokens[entry.request_id, sample])): None
            for entry in entries
            for sample in range(entry.num_samples)
        }
        self._chance = random.Random(seed)
        self._right = right
        self.told: list[tuple[int, int, int]] = []
        self.running: set[int] = set()

    def propose(self, contexts: Sequence[DraftContext]) -> list[tuple[int, ...]]:
        self.running |= {context.sequence for context in contexts}
        return [self._propose(context) for context in contexts]

    def _propose(self, context: DraftContext) -> tuple[int, ...]:
        place = len(context.drawn)
        for prompt, drawn in self._known:
            if prompt == context.prompt and drawn[:place] == tuple(context.drawn):
                ahead = drawn[place : place + context.limit]
                return tuple(t if self._chance.random() < self._right else (t + 1) % VOCAB_SIZE for t in ahead)
        raise AssertionError("a sequence has drawn what it would not have drawn alone")

    def accepted(self, sequence: int, drafted: int, accepted: int) -> None:
        self.told.append((sequence, drafted, accepted))

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
def test_what_is_drawn_does_not_depend_on_the_guesses(seed: int, right: float) -> None:
    """Stops inside an accepted run, few pages, streams, scores, alternatives: all as without a drafter."""
    chance = random.Random(seed)
    entries = [
        request(
            f"r{i}",
            prompt=[chance.randrange(90) for _ in range(chance.choice([2, 50, 63, 64, 65, 129]))],
            num_samples=chance.choice([1, 2]),
            max_tokens=chance.choice([1, 2, 5, 20, 70, 100]),
            stop=chance.choice([None, (), (7, 50), ("ab", "q")]),
            seed=seed,
            stream=chance.random() < 0.3,
            prompt_logprobs=chance.random() < 0.3,
            topk_sample_logprobs=chance.choice([0, 2]),
        )
        for i in range(8)
    ]
    limits = {"num_pages": chance.choice([5, 30]), "step_tokens": chance.choice([9, 70]), "draft_tokens": 5}
    expected, _ = together(entries, **limits)
    drafter = Oracle(expected, entries, right=right, seed=seed)
    finished, stats = together(entries, drafter, **limits)
    assert finished.tokens == expected.tokens
    assert finished.logprobs == expected.logprobs
    assert finished.reasons == expected.reasons
    assert finished.topk == expected.topk
    assert stats["used_pages"] == stats["running"] == 0
    assert not drafter.running, "all that ended was told"
    assert stats["drafted_steps"] == len(drafter.told) > 0
    assert stats["drafted_tokens"] == sum(drafted for _, drafted, _ in drafter.told)
    assert stats["accepted_tokens"] == sum(accepted for _, _, accepted in drafter.told)
    if right == 0:
        assert stats["accepted_tokens"] == 0
    if right == 1 and limits["num_pages"] == 30:
        assert stats["accepted_tokens"] > 0.9 * stats["drafted_tokens"], "but for samples that began alike"


def test_guesses_save_steps() -> None:
    entry = request(max_tokens=50)
    expected, _ = together([entry])
    s, fake = scheduler(drafter=Oracle(expected, [entry], right=1.0), draft_tokens=4), PagedFake(64)
    s.add(entry)
    steps = 0
    finished = Finished()
    while (plan := s.plan()) is not None:
        assert plan.num_tokens == sum(len(x.tokens) + len(x.draft) for x in plan.sequences)
        finished.take(s.apply(plan, fake.step(plan)))
        steps += 1
    assert finished.tokens == expected.tokens
    assert steps == 1 + 10, "a first one, then 4 guesses and one token more, nine times, and a last one of 4"


@pytest.mark.parametrize("length", [60, 63, 64])
def test_guesses_stay_within_the_pages_that_are_there(length: int) -> None:
    entry = request(prompt=[i % 90 for i in range(length)], max_tokens=20)
    expected, _ = together([entry], num_pages=2)
    s, fake = scheduler(drafter=Oracle(expected, [entry], right=1.0), num_pages=2, draft_tokens=8), PagedFake(2)
    s.add(entry)
    while (plan := s.plan()) is not None:
        for step in plan.sequences:
            assert step.context + len(step.tokens) + len(step.draft) <= len(step.pages) * PAGE_TOKENS
        s.apply(plan, fake.step(plan))


def test_a_stop_within_a_run_of_guesses_ends_it() -> None:
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
