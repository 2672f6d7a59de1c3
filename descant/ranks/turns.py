"""What runs next: ``decide``, a pure function from what waits to one ``Choice``. The only place that chooses.

The turn loop makes of a choice a ``Turn``, a plain record; every rank of a replica executes the same turns in the same
order, and one process is a replica of one rank. No rank, thread or stream chooses for itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from descant.sample.scheduler import StepPlan
from descant.train.step import Part, RequestKey
from descant.types import Command, ForwardBackward

# --------------------------------------------------------------------------------------------------------------------
# Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One shared forward/backward pass. ``opens``: requests whose first datum is in it; ``closes``: whose last is."""

    opens: tuple[ForwardBackward, ...]
    parts: tuple[Part, ...]
    closes: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStep:
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Commands that move or change whole rows (create, optimiser step, snapshot, load, delete, refused), in order."""

    commands: tuple[Command, ...]


Turn = Microbatch | SampleStep | Rows

# --------------------------------------------------------------------------------------------------------------------
# What waits


MAX_SHARING = 8
"""A pass takes datums of at most so many times its budget, however much of them is shared: attention still reads all of
it for each of them, and each token of each has a loss of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingDatum:
    """``shared``: the tokens that it begins with as the datum before it does, which are computed once in a pass of
    both (0 unless they share)."""

    part: Part
    tokens: int
    shared: int = 0

    @property
    def added_tokens(self) -> int:
        """What it adds to a pass that has the datum before it."""
        return max(self.tokens - self.shared, self.tokens // MAX_SHARING)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingModel:
    """One model's queue as ``decide`` sees it: either row commands or datums stand at its head, never both.

    ``rows``: all row commands at the head, in order. ``data``: the datums, in order, of all ``ForwardBackward``s at
    the head (as many as a microbatch could take: more need not be told). ``served``: tokens this model has had, raised
    on its arrival (``served_on_arrival``).

    ``adapter_bytes``: what its rows take on the device while a request of it is open, ``request_bytes``: what each one
    more takes. ``open_requests``: how many have begun and not ended; their rows cannot move.
    """

    model_id: str
    rows: tuple[Command, ...] = ()
    data: tuple[WaitingDatum, ...] = ()
    served: int = 0
    adapter_bytes: int = 0
    request_bytes: int = 0
    open_requests: int = 0

    @property
    def open_bytes(self) -> int:
        return self.adapter_bytes + (self.open_requests - 1) * self.request_bytes if self.open_requests else 0


Kind = Literal["microbatch", "sample", "rows", "idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """``models`` in order of arrival (the tie-break). ``sampling``: the sampler has a step to run. ``sample_credit``:
    steps the sampler is owed (``credit_after``)."""

    models: tuple[WaitingModel, ...]
    sampling: bool
    last: Kind
    sample_credit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``parts`` for a microbatch, ``commands`` for rows; "idle": nothing waits."""

    kind: Kind
    parts: tuple[Part, ...] = ()
    commands: tuple[Command, ...] = ()


# --------------------------------------------------------------------------------------------------------------------
# The decision


def decide(
    waiting: Waiting, *, microbatch_tokens: int, packable: bool = True, max_adapter_bytes: float = math.inf
) -> Choice:
    """Row commands first, all that wait at once: they are short and let the most people go on. But never twice in a
    row while a pass waits, so that a stream of them starves nobody. Then training and sampling by credit: with a
    share of at least one step a microbatch, a waiting token waits for one microbatch at most, and training is never
    shut out. Not packable: one datum a microbatch. The models of a microbatch, and those with a request that goes on
    after it, fit ``max_adapter_bytes`` together (one alone may pass it)."""
    training = any(model.data for model in waiting.models)
    rows = tuple(command for model in waiting.models for command in model.rows)
    if rows and not (waiting.last == "rows" and (training or waiting.sampling)):
        return Choice(kind="rows", commands=rows)
    if waiting.sampling and (waiting.sample_credit >= 1 or not training):
        return Choice(kind="sample")
    if training:
        parts = _fill(waiting.models, microbatch_tokens if packable else 0, max_adapter_bytes)
        return Choice(kind="microbatch", parts=parts)
    return Choice(kind="idle")


def _fill(models: Sequence[WaitingModel], room: int, max_adapter_bytes: float) -> tuple[Part, ...]:
    """Datum by datum from the model least served, so that a small tenant is never behind a large one's queue. A model
    whose next datum does not fit waits for the next pass (its order stays, and it is then the least served); the first
    datum is always taken, so that one larger than the budget runs alone. A request that would need more adapter memory
    than there is waits until others have ended: those that are open always go on, so that they do end."""
    least_served = [(model.served, index, 0) for index, model in enumerate(models) if model.data]
    heapq.heapify(least_served)
    in_use = sum(model.open_bytes for model in models)
    begun: dict[int, set[RequestKey]] = {}
    parts: list[Part] = []
    while least_served and (room > 0 or not parts):
        served, index, at = heapq.heappop(least_served)
        model = models[index]
        datum, requests = model.data[at], begun.setdefault(index, set())
        cost = datum.added_tokens if at else datum.tokens
        if parts and cost > room:
            continue
        if datum.part.datum == 0 and datum.part.request not in requests:
            more = model.request_bytes if requests or model.open_requests else model.adapter_bytes
            if in_use and in_use + more > max_adapter_bytes:
                continue
            in_use += more
            requests.add(datum.part.request)
        parts.append(datum.part)
        room -= cost
        if at + 1 < len(model.data):
            heapq.heappush(least_served, (served + datum.tokens, index, at + 1))
    return tuple(parts)


def credit_after(credit: float, kind: Kind, *, steps_per_microbatch: float) -> float:
    """The sampler's credit after a turn: a microbatch earns it its share, a step spends one. Bounded on both sides, so
    that neither an idle sampler nor an idle trainer saves up."""
    if kind == "microbatch":
        return min(credit + steps_per_microbatch, max(1.0, steps_per_microbatch))
    if kind == "sample":
        return max(0.0, credit - 1)
    return credit


def served_on_arrival(served: int, others: Iterable[int]) -> int:
    """``served`` of a model that had nothing waiting and now has: at least what the least served of the others has
    had, so that a newcomer goes first once, not until it has caught up with everybody's past."""
    return max(served, min(others, default=served))
