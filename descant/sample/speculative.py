"""Speculative decoding: draft tokens, so that one step may emit several. No torch.

A step computes the draft tokens beside the last one, each in a row of its own, and samples from every row as it would
have without them (same logits, same random number). A draft token is accepted if it is what the row before it sampled,
so the tokens are those without a drafter, at any temperature. That is rejection sampling with a one-hot draft
distribution: x sampled from p equals the draft d with probability p(d), and given that it does not, it is distributed
as p without d.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LOOKBACK_TOKENS = 4096
"""How far back a repetition is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """A sequence that samples in this step: its tokens so far (do not keep them), and how many draft tokens it may
    get."""

    sequence: int
    prompt: Sequence[int]
    output_tokens: Sequence[int]
    limit: int


class Drafter(Protocol):
    """Asked once a step, by the scheduler. Every rank of a replica must propose the same."""

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[tuple[int, ...]]:
        """For each context at most ``limit`` tokens of the vocabulary; () where none is likely."""
        ...

    def accepted(self, sequence: int, drafted: int, accepted: int) -> None:
        """Of its last draft the first ``accepted`` tokens were sampled."""
        ...

    def ended(self, sequence: int) -> None:
        """It gets no more drafts."""
        ...


class NgramDrafter:
    """Prompt lookup: what came after the last occurrence of the sequence's own last few tokens. Good where
    text repeats (quotes, code, edits), silent where it does not. Remembers nothing."""

    def __init__(self, *, longest: int = 4, shortest: int = 2):
        """Tokens that must agree: ``longest`` first, then fewer."""
        self._sizes = range(longest, shortest - 1, -1)

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[tuple[int, ...]]:
        return [self._propose(context) for context in contexts]

    def accepted(self, sequence: int, drafted: int, accepted: int) -> None:
        pass

    def ended(self, sequence: int) -> None:
        pass

    def _propose(self, context: DraftContext) -> tuple[int, ...]:
        output = context.output_tokens[-LOOKBACK_TOKENS:]
        before = LOOKBACK_TOKENS - len(output)
        tokens = array("i", context.prompt[-before:] if before else ())
        tokens.extend(output)
        for size in self._sizes:
            if size < len(tokens) and (at := _last_match(tokens, size)) is not None:
                for _ in range(context.limit):  # a short cycle goes on in its own draft
                    tokens.append(tokens[at])
                    at += 1
                return tuple(tokens[-context.limit :])
        return ()


def _last_match(tokens: array[int], size: int) -> int | None:
    """Behind the last occurrence of the last ``size`` tokens but for that at the end."""
    text, width = tokens.tobytes(), tokens.itemsize
    wanted, end = text[-size * width :], len(text) - width
    while (at := text.rfind(wanted, 0, end)) >= 0:
        if at % width == 0:
            return at // width + size
        end = at + len(wanted) - 1
    return None
