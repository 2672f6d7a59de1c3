"""Guesses of what sequences will draw next, so that one step may draw several tokens. No torch.

A guess costs nothing but time: a step computes the guessed tokens beside the last one, each with a row of its own, and
draws from every row as it would have without (same logits, same number of chance). A guessed token stays if it is what
was drawn before it, and so the tokens are those without a drafter, at any temperature. That is rejection sampling for a
guess that is certain of itself: x drawn from p equals the guess with probability p(guess), and given that it does not,
it is distributed as p without it.
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
    """A sequence that will draw: its tokens so far (only lent), and how many more may be guessed."""

    sequence: int
    prompt: Sequence[int]
    drawn: Sequence[int]
    limit: int


class Drafter(Protocol):
    """Asked once a step, by the scheduler. Every rank of a replica must guess alike."""

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[tuple[int, ...]]:
        """For each context at most ``limit`` tokens of the vocabulary; () where there is no good guess."""
        ...

    def accepted(self, sequence: int, drafted: int, accepted: int) -> None:
        """Of the tokens last guessed for it, the first ``accepted`` were drawn."""
        ...

    def ended(self, sequence: int) -> None:
        """Nothing more will be asked of it."""
        ...


class NgramDrafter:
    """Prompt lookup: what came after the last place where the sequence's own last few tokens stood before. Good where
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
        drawn = context.drawn[-LOOKBACK_TOKENS:]
        before = LOOKBACK_TOKENS - len(drawn)
        tokens = array("i", context.prompt[-before:] if before else ())
        tokens.extend(drawn)
        for size in self._sizes:
            if size < len(tokens) and (place := _last_place(tokens, size)) is not None:
                for _ in range(context.limit):  # a short cycle goes on in its own guess
                    tokens.append(tokens[place])
                    place += 1
                return tuple(tokens[-context.limit :])
        return ()


def _last_place(tokens: array[int], size: int) -> int | None:
    """Behind the last occurrence of the last ``size`` tokens but for that at the end."""
    text, width = tokens.tobytes(), tokens.itemsize
    wanted, end = text[-size * width :], len(text) - width
    while (at := text.rfind(wanted, 0, end)) >= 0:
        if at % width == 0:
            return at // width + size
        end = at + len(wanted) - 1
    return None
