"""What runs next: ``decide``, a pure function from what waits to one ``Choice``. The only place that chooses.

The turn loop makes of a choice a ``Turn``, a plain record; every rank of a replica executes the same turns in the same
order, and one process is a replica of one rank. No rank, thread or stream chooses for itself. Which rank computes which
datum is in the turn as well (``split``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from descant.ranks.placement import is_worth_it
from descant.sample.scheduler import StepPlan
from descant.train.step import Part, RequestKey
from descant.types import Command, ForwardBackward, SnapshotRef, Version

# --------------------------------------------------------------------------------------------------------------------
# Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Datums that are computed together. ``opens``: requests whose first datum is in it; ``closes``: whose last is.

    ``shares[rank]``: its passes, as many for each rank, some of them empty (``split``). ``backward``: whether any of
    its requests is more than evaluated. ``sampling``: somebody samples meanwhile, and is to wait for this alone: it is
    over when the turn is."""

    opens: tuple[ForwardBackward, ...]
    shares: tuple[tuple[tuple[Part, ...], ...], ...]
    closes: tuple[RequestKey, ...]
    backward: bool = True
    sampling: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for passes in self.shares for parts in passes for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStep:
    """``plans[rank]``: None where that rank has nothing to sample."""

    plans: tuple[StepPlan | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Commands that move or change whole rows (create, optimiser step, snapshot, load, delete, refused), in order.
    ``loaded``: what was read for those that have a source (opaque tensors), or the error."""

    commands: tuple[Command, ...]
    loaded: Mapping[RequestKey, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Before a turn about ``keep``: these models are asked for next, in this order."""

    model_ids: tuple[str, ...]
    keep: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The turn that this command was in broke: forget what is open, and remember a lost gradient."""

    key: RequestKey
    command: Command
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """``loaded``: its tensors, where they come from a checkpoint."""

    ref: SnapshotRef
    loaded: Any | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """A published version is released."""

    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """What a snapshot holds for a save is freed."""

    ref: SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """As many requests as ``count`` begin to sample this version, or move to it."""

    version: Version
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin:
    """They have ended, or moved to another."""

    version: Version
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """No more turns."""


Turn = Microbatch | SampleStep | Rows | Prefetch | Fail | Publication | Withdrawal | Drop | Pin | Unpin | Leave

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

    ``resident``: its rows are on the device, others would have to be brought. ``passed_over``: how many passes have run
    without it since it has waited for one.
    """

    model_id: str
    rows: tuple[Command, ...] = ()
    data: tuple[WaitingDatum, ...] = ()
    served: int = 0
    adapter_bytes: int = 0
    request_bytes: int = 0
    open_requests: int = 0
    resident: bool = True
    passed_over: int = 0

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
    """``data`` for a microbatch, ``commands`` for rows; "idle": nothing waits."""

    kind: Kind
    data: tuple[WaitingDatum, ...] = ()
    commands: tuple[Command, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(datum.part for datum in self.data)


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
        data = _fill(waiting.models, microbatch_tokens if packable else 0, max_adapter_bytes)
        return Choice(kind="microbatch", data=data)
    return Choice(kind="idle")


PATIENCE = 2
"""Passes, for each model that waits for one, until one that has not had its turn goes first, whatever it has had."""

_Place = tuple[int, int, int]
_OVERDUE, _IN_LINE, _OUT = range(3)


def _places(models: Sequence[WaitingModel]) -> list[_Place]:
    """Where each stands in line for a pass: the least served first. Before the others go those that have waited longer
    than anybody should. Behind them, but for one pass only, those whose rows are out: while they are brought, those
    that are here would have had to go."""
    patience = PATIENCE * sum(bool(model.data) for model in models)

    def place(model: WaitingModel) -> _Place:
        if model.passed_over >= patience:
            return (_OVERDUE, -model.passed_over, model.served)
        return (_IN_LINE if model.resident or model.passed_over else _OUT, 0, model.served)

    return [place(model) for model in models]


def in_line(models: Sequence[WaitingModel], now: Collection[str]) -> list[str]:
    """The models in the order in which their rows will be asked for after a turn about ``now``, as far as that can be
    told."""
    line = sorted(zip(models, _places(models)), key=lambda at: (at[0].model_id in now or not at[0].rows, at[1]))
    return [model.model_id for model, _ in line]


def _fill(models: Sequence[WaitingModel], room: int, max_adapter_bytes: float) -> tuple[WaitingDatum, ...]:
    """Datum by datum from the first in line, so that a small tenant is never behind a large one's queue. A model
    whose next datum does not fit waits for the next pass (its order stays, and it is then the least served); the first
    datum is always taken, so that one larger than the budget runs alone. A request that would need more adapter memory
    than there is waits until others have ended: those that are open always go on, so that they do end. Once it has
    waited longer than anybody should, no other begins before it."""
    line = [(place, index, 0) for index, (model, place) in enumerate(zip(models, _places(models))) if model.data]
    heapq.heapify(line)
    in_use = sum(model.open_bytes for model in models)
    begun: dict[int, set[RequestKey]] = {}
    data: list[WaitingDatum] = []
    closed = False
    while line and (room > 0 or not data):
        (rank, _, served), index, at = heapq.heappop(line)
        model = models[index]
        datum, requests = model.data[at], begun.setdefault(index, set())
        cost = datum.added_tokens if at else datum.tokens
        if data and cost > room:
            continue
        if datum.part.datum == 0 and datum.part.request not in requests:
            more = model.request_bytes if requests or model.open_requests else model.adapter_bytes
            if in_use and (closed or in_use + more > max_adapter_bytes):
                closed = closed or rank == _OVERDUE
                continue
            in_use += more
            requests.add(datum.part.request)
        data.append(datum)
        room -= cost
        if at + 1 < len(model.data):
            heapq.heappush(line, ((_IN_LINE, 0, served + datum.tokens), index, at + 1))
    return tuple(data)


def split(
    data: Sequence[WaitingDatum], num_ranks: int, *, pass_tokens: int
) -> tuple[tuple[tuple[Part, ...], ...], ...]:
    """``Microbatch.shares`` of a choice: each datum on one rank, ranks even in tokens, as many passes for each.

    Datums that share a prefix stay together, unless together they are much more than one rank's even share and than the
    prefix: then that is computed once more on the next rank. A rank's passes have ``pass_tokens`` at most (a datum
    larger than that has one of its own); alone, a rank has one pass, whatever is in it."""
    if num_ranks == 1:
        return ((tuple(datum.part for datum in data),),)
    groups = _sharing(data, num_ranks)
    loads = [0] * num_ranks
    taken: list[list[int]] = [[] for _ in range(num_ranks)]
    for cost, indices in sorted(groups, key=lambda group: (-group[0], group[1][0])):
        rank = loads.index(min(loads))
        loads[rank] += cost
        taken[rank] += indices
    passes = [_passes([data[index] for index in sorted(indices)], pass_tokens) for indices in taken]
    most = max(map(len, passes))
    return tuple((*own, *((),) * (most - len(own))) for own in passes)


def _costs(data: Sequence[WaitingDatum]) -> list[int]:
    """Of each datum in a pass of all of them."""
    last: dict[RequestKey, WaitingDatum] = {}
    costs = []
    for datum in data:
        before = last.get(datum.part.request)
        costs.append(datum.added_tokens if before is not None and _follows(before, datum) else datum.tokens)
        last[datum.part.request] = datum
    return costs


def _follows(before: WaitingDatum, datum: WaitingDatum) -> bool:
    return datum.shared > 0 and (before.part.request, before.part.datum + 1) == (datum.part.request, datum.part.datum)


def _sharing(data: Sequence[WaitingDatum], num_ranks: int) -> list[tuple[int, list[int]]]:
    """(tokens, indices) of datums that stay together."""
    chains: list[list[int]] = []
    last: dict[RequestKey, list[int]] = {}
    for index, datum in enumerate(data):
        chain = last.get(datum.part.request)
        if chain is None or not _follows(data[chain[-1]], datum):
            chain = []
            chains.append(chain)
        chain.append(index)
        last[datum.part.request] = chain
    even_share = sum(_costs(data)) / num_ranks
    return [piece for chain in chains for piece in _cut(data, chain, even_share)]


def _cut(data: Sequence[WaitingDatum], chain: Sequence[int], even_share: float) -> list[tuple[int, list[int]]]:
    first, *rest = (data[index] for index in chain)
    total = first.tokens + sum(datum.added_tokens for datum in rest)
    num_pieces = 1 if total <= max(1.25 * even_share, 2 * first.tokens) else math.ceil(total / even_share)
    pieces: list[tuple[int, list[int]]] = []
    done, number = 0, -1
    for index in chain:
        datum = data[index]
        if (piece := int(num_pieces * done / total)) > number:
            number = piece
            pieces.append((datum.tokens, [index]))
        else:
            tokens, indices = pieces[-1]
            pieces[-1] = (tokens + datum.added_tokens, [*indices, index])
        done += datum.added_tokens if index != chain[0] else datum.tokens
    return pieces


def _passes(data: Sequence[WaitingDatum], pass_tokens: int) -> tuple[tuple[Part, ...], ...]:
    passes: list[list[Part]] = [[]]
    room = pass_tokens
    for datum, cost in zip(data, _costs(data), strict=True):
        if passes[-1] and cost > room:
            passes.append([])
            cost, room = datum.tokens, pass_tokens
        passes[-1].append(datum.part)
        room -= cost
    return tuple(map(tuple, passes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRank:
    """A rank, as one request meets it. ``sequences``: its samplers', running or waiting; ``kept_tokens``: of the
    request's prompt, that need not be computed there."""

    sequences: int
    kept_tokens: int


def sampling_rank(ranks: Sequence[SamplingRank], *, max_running: int) -> int:
    """The rank that a request samples on: of those that it may be given to, the one where most of its prompt is kept,
    of these the one with the fewest sequences, of these the first.

    A rank where much is kept may be busier than others, as far as that is worth it."""
    fewest = min(rank.sequences for rank in ranks)

    def worth(number: int) -> tuple[int, int, int]:
        rank = ranks[number]
        stays = is_worth_it(rank.kept_tokens, rank.sequences, fewest, max_running=max_running)
        return (-rank.kept_tokens if stays else 0, rank.sequences, number)

    return min(range(len(ranks)), key=worth)


def credit_after(credit: float, kind: Kind, *, steps_per_microbatch: float) -> float:
    """The sampler's credit after a turn: a microbatch earns it its share, a step spends one. Bounded on both sides, so
    that neither an idle sampler nor an idle trainer saves up."""
    if kind == "microbatch":
        return min(credit + steps_per_microbatch, max(1.0, steps_per_microbatch))
    if kind == "sample":
        return max(0.0, credit - 1)
    return credit


def served_on_arrival(served: int, others: Iterable[int], last: int = 0) -> int:
    """``served`` of a model that had nothing waiting and now has: at least what the least served of the others has
    had, or, where nobody waits just then, what the least served of the ``last`` pass had before it. So a newcomer goes
    first once, not until it has caught up with everybody's past."""
    return max(served, min(others, default=last))
