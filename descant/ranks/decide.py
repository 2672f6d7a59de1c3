"""Which kind of work the next turn does, in which order row commands run, and on which rank a request samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from descant.prefix import is_worth_it
from descant.ranks.partition import WaitingDatum
from descant.train.runner import Part, RequestKey
from descant.types import Command, OptimStep

# --------------------------------------------------------------------------------------------------------------------
# A turn

Kind = str
"""A kind of work. Those below are a rank's own; any other needs a name and a share (``Shares``)."""

TRAIN, ROWS, SAMPLE, IDLE = "train", "rows", "sample", "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``data`` for a training turn (a microbatch), ``commands`` for rows; ``IDLE``: nothing waits."""

    kind: Kind
    data: tuple[WaitingDatum, ...] = ()
    commands: tuple[Command, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(datum.part for datum in self.data)

    @property
    def keys(self) -> set[RequestKey]:
        """Of what it is about."""
        return {datum.part.request for datum in self.data} | {(c.model_id, c.seq_id) for c in self.commands}

    @property
    def model_ids(self) -> set[str]:
        return {model_id for model_id, _ in self.keys}


# --------------------------------------------------------------------------------------------------------------------
# Shares


class Shares:
    """Takes turns between kinds of work: weighted deficit round robin, where a round is one training turn.

    Row commands go first, all that wait at once: they are short and unblock the most tenants. But never twice in a
    row while anything else waits, so that a stream of them starves nothing. Every other kind has a share of turns for
    each training turn, and a credit: a training turn earns it its share, a turn of its own spends one. With a share of
    at least one a waiting token waits for one training turn at most, and training is never shut out.
    """

    def __init__(self, shares: Mapping[Kind, float]):
        """``shares``: turns for each training turn, of every kind but training and rows."""
        self._shares = dict(shares)
        self._credit = dict.fromkeys(shares, 1.0)
        self._last: Kind = IDLE

    def next(self, ready: Collection[Kind]) -> Kind:
        """The kind of the next turn, of those that have work; ``IDLE`` if none has."""
        others = [kind for kind in self._shares if kind in ready]
        if ROWS in ready and not (self._last == ROWS and (TRAIN in ready or others)):
            return ROWS
        if TRAIN not in ready and len(others) > 1:
            self._earn_without_training(others)
        if others:
            first = max(others, key=self._credit.__getitem__)
            if self._credit[first] >= 1 or TRAIN not in ready:
                return first
        return TRAIN if TRAIN in ready else IDLE

    def ran(self, kind: Kind) -> None:
        """A turn is over."""
        self._last = kind
        if kind == TRAIN:
            self._earn(self._shares, 1)
        elif kind in self._shares:
            self._credit[kind] = max(0.0, self._credit[kind] - 1)

    def _earn(self, kinds: Collection[Kind], num_rounds: int) -> None:
        """Bounded on both sides (``ran``), so that neither an idle trainer nor another idle kind saves up."""
        for kind in kinds:
            share = self._shares[kind]
            self._credit[kind] = min(self._credit[kind] + num_rounds * share, max(1.0, share))

    def _earn_without_training(self, kinds: Sequence[Kind]) -> None:
        """As many rounds as it takes until one of them is due, so that they keep their shares among themselves."""
        missing = [(1 - self._credit[kind]) / self._shares[kind] for kind in kinds if self._shares[kind] > 0]
        if missing and (num_rounds := math.ceil(min(missing))) > 0:
            self._earn(kinds, num_rounds)


# --------------------------------------------------------------------------------------------------------------------
# Inside a turn


def row_order(commands: Sequence[Command], is_resident: Callable[[str], bool]) -> tuple[Command, ...]:
    """Models whose adapters are resident first, before others evict them: the first command of each, then the second,
    optimiser steps together (``TrainRole.rows``). Then the offloaded ones, model by model, so that none is loaded
    twice. Each model's own order stays."""
    places: list[tuple[bool, int, int]] = []
    seen: Counter[str] = Counter()
    order: dict[str, int] = {}
    for command in commands:
        model_id = command.model_id
        nth, which = seen[model_id], order.setdefault(model_id, len(order))
        if is_resident(model_id):
            places.append((False, nth, not isinstance(command, OptimStep)))
        else:
            places.append((True, which, nth))
        seen[model_id] += 1
    return tuple(commands[index] for index in sorted(range(len(commands)), key=places.__getitem__))


# --------------------------------------------------------------------------------------------------------------------
# Where a request samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRank:
    """A rank, as one request meets it. ``sequences``: its samplers', running or waiting; ``cached_tokens``: of the
    request's prompt, that need not be computed there."""

    sequences: int
    cached_tokens: int


def sampling_rank(ranks: Sequence[SamplingRank], *, max_num_seqs: int) -> int:
    """The rank that a request samples on: of those that it may be given to, the one where most of its prompt is kept,
    of these the one with the fewest sequences, of these the first.

    A rank where much is kept may be busier than others, as far as that is worth it."""
    fewest = min(rank.sequences for rank in ranks)

    def worth(number: int) -> tuple[int, int, int]:
        rank = ranks[number]
        stays = is_worth_it(rank.cached_tokens, rank.sequences, fewest, max_num_seqs=max_num_seqs)
        return (-rank.cached_tokens if stays else 0, rank.sequences, number)

    return min(range(len(ranks)), key=worth)
