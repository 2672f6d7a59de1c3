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


LAG_TURNS = 8
"""Usual turns: how far one kind may be ahead of another that waits, at most."""
_LEARNT = 1 / 8
"""What one turn counts in the mean that is usual."""
_FIRST_TURN_S = 2**-10
"""What is usual before any turn; too little, so that the first ones, which compile, do not count for what they took."""
_SHORTEST_TURN_S = 2**-20
"""What a turn counts at least, so that turns alternate under a clock that stands."""


class Shares:
    """Takes turns between kinds of work: weighted fair queueing by time.

    Row commands go first, all that wait at once: they are short and unblock the most tenants. But never twice in a
    row while anything else waits, so that a stream of them starves nothing. Their time counts for nobody. Every other
    kind has a virtual time, the seconds of its turns divided by its share, and of those that have work the least goes
    first; of equals training is the last.

    Nobody saves up: a kind without work is raised to the least of those that have some. Nor is anybody shut out for a
    single turn, however long: a kind that ran is ahead of the least of the others that wait by ``LAG_TURNS`` usual
    turns at most.

    Between two training turns every kind with a share of at least one has a turn if it waits, whatever the times say:
    what waits to be sampled waits for one training turn at most.
    """

    def __init__(self, shares: Mapping[Kind, float]):
        """``shares``: of every kind but rows, ``TRAIN`` among them; above 0."""
        self._shares = dict(shares)
        self._time = dict.fromkeys(shares, 0.0)
        """Virtual seconds, as below."""
        self._usual = dict.fromkeys(shares, _FIRST_TURN_S)
        self._waiting: Collection[Kind] = ()
        """Of those with a share, at the last choice."""
        self._before_training: set[Kind] = set()
        """Those that have a turn before the next of training, if they wait."""
        self._last: Kind = IDLE

    def next(self, ready: Collection[Kind]) -> Kind:
        """The kind of the next turn, of those that have work; ``IDLE`` if none has."""
        self._waiting = waiting = [kind for kind in self._shares if kind in ready]
        if ROWS in ready and not (self._last == ROWS and waiting):
            return ROWS
        if not waiting:
            return IDLE
        first = min(waiting, key=self._order)
        if first == TRAIN and (others := [kind for kind in waiting if kind in self._before_training]):
            return min(others, key=self._order)
        return first

    def ran(self, kind: Kind, seconds: float) -> None:
        """A turn is over that took so long."""
        self._last = kind
        if kind not in self._shares:
            return
        if kind == TRAIN:
            self._before_training = {other for other, share in self._shares.items() if share >= 1} - {TRAIN}
        else:
            self._before_training.discard(kind)
        turn, usual = max(seconds, _SHORTEST_TURN_S) / self._shares[kind], self._usual[kind]
        self._usual[kind] += (min(turn, LAG_TURNS * usual) - usual) * _LEARNT
        self._time[kind] += turn
        others = [self._time[other] for other in self._waiting if other != kind]
        if others:
            self._time[kind] = min(self._time[kind], min(others) + LAG_TURNS * max(self._usual.values()))
        least = min([self._time[kind], *others])
        for other, time in self._time.items():
            self._time[other] = max(time, least)

    def _order(self, kind: Kind) -> tuple[float, bool]:
        return self._time[kind], kind == TRAIN


class PassTokens:
    """How many tokens a training turn may have, so that it takes a given time at most: by the tokens a second of those
    that were measured.

    Shorter turns make fewer tokens a second than long ones. So one that takes no longer than it may says that more
    fits, never that less does. No single turn, such as one that compiles or one that is refused, does more than halve
    or double the limit."""

    def __init__(self, max_seconds: float):
        self._max_seconds = max_seconds
        self._tokens_per_s = math.inf

    @property
    def limit(self) -> float:
        """Infinite until a turn was measured."""
        return self._tokens_per_s * self._max_seconds

    def ran(self, tokens: int, seconds: float) -> None:
        """A turn of so many tokens is over, and the device has done it."""
        tokens_per_s = tokens / max(seconds, _SHORTEST_TURN_S)
        if math.isinf(self._tokens_per_s):
            self._tokens_per_s = tokens_per_s
        elif tokens_per_s > self._tokens_per_s or seconds > self._max_seconds:
            self._tokens_per_s = min((self._tokens_per_s + tokens_per_s) / 2, 2 * self._tokens_per_s)


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
