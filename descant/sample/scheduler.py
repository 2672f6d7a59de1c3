"""Which sequence gets which tokens next. Pure Python over plain numbers: every rank of a replica decides alike.

Owns requests, sequences and the page allocator; knows no tensor. A request's samples share the full pages of their
prompt (computed once). ``plan`` makes a ``StepPlan`` for the sampler to run; ``apply`` takes what it sampled.

    waiting → running (prefill in chunks, then one token a step) → ended          preempted → waiting (recompute)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from descant.errors import DescantError
from descant.types import SampleDelta, SampleRequest, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimits:
    max_running: int
    """Sequences decoding at once."""
    num_pages: int
    step_tokens: int
    """Prompt tokens prefilled in one step at most, so that a step stays short."""
    max_waiting: int
    """Requests queued; one more is ``Overloaded``."""
    max_context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_samples: int = 1024
    max_topk: int = 20
    """Alternatives a prompt position, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """One sequence's part of a step.

    ``tokens``: its next input tokens (a prompt's chunk, or the token sampled last), whose first has position
    ``context``; ``pages``: its page ids, enough for ``context + len(tokens)``. ``sample``: draw the next token from the
    last position's logits. ``score_from``: prompt log-probabilities wanted for the targets of these tokens; -1: not.
    """

    sequence: int
    version: Version | None
    tokens: tuple[int, ...]
    context: int
    pages: tuple[int, ...]
    sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    draw: int
    """How many tokens this sequence has drawn before: with ``seed`` it fixes this draw, whatever the batch."""
    score_targets: tuple[int, ...] | None = None
    """The token after each of ``tokens`` that has one: their log-probabilities are wanted."""
    topk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    sequences: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """``token`` None when nothing was drawn. ``scores`` float list per scored token; ``topk`` its (ids, logprobs).

    ``error``: what went wrong with this sequence alone (logits that are not finite); its request fails, no other.
    """

    sequence: int
    token: int | None
    logprob: float
    scores: tuple[float, ...] = ()
    topk: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()
    error: str | None = None


class Scheduler:
    def __init__(
        self, limits: SampleLimits, *, decode_text: Callable[[Sequence[int]], str], fresh_seed: Callable[[], int]
    ):
        """``decode_text`` (the tokenizer's) serves stop strings; ``fresh_seed`` requests without a seed."""
        raise NotImplementedError

    def add(self, request: SampleRequest) -> None:
        """Raises ``UserError`` naming the field (prompt empty, token out of range, prompt or prompt + max_tokens over
        the context, …) or ``Overloaded``."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        raise NotImplementedError

    def has_work(self) -> bool:
        raise NotImplementedError

    def plan(self) -> StepPlan | None:
        """The next step: all running sequences' next tokens first, then prompt chunks within ``step_tokens``.
        Full pages: the youngest sequence is preempted and recomputed later; never an error."""
        raise NotImplementedError

    def apply(self, plan: StepPlan, outputs: Sequence[SequenceOutput]) -> list[SampleDelta]:
        """Takes a step's outcome: appends, detects stops, frees ended sequences, makes the deltas that are due."""
        raise NotImplementedError

    def fail(self, plan: StepPlan) -> list[str]:
        """A step raised: ends its requests, frees what they held; the request ids."""
        raise NotImplementedError

    def take_failures(self) -> list[tuple[str, DescantError]]:
        """Requests (by id) that ``apply`` ended because their own computation failed, each told once. The loop calls
        it after every ``apply``: such a request gets no further delta."""
        raise NotImplementedError

    def versions(self) -> set[Version]:
        """Versions that waiting or running requests use."""
        raise NotImplementedError

    def stats(self) -> dict[str, int]:
        """waiting, running, free_pages, used_pages, preemptions."""
        raise NotImplementedError
