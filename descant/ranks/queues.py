"""A queue of commands for each model, and the choice of what runs next."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from descant.ranks.decide import ROWS, TRAIN, Choice, Kind, PassTokens, Shares
from descant.ranks.executor import AdapterMemory
from descant.ranks.fair_queue import (
    FairQueue,
    RuntimeQueue,
    UsualTime,
    WaitingModel,
    expected_tokens,
    runtime_on_arrival,
)
from descant.ranks.partition import WaitingDatum, computed_tokens, cut_into_pieces, piece_at
from descant.train.pack import MIN_SHARED_TOKENS, common_prefix
from descant.train.runner import Part, RequestKey
from descant.types import Command, DeleteModel, ForwardBackward, Int32, input_length, input_tokens


@dataclass(slots=True)
class Entry:
    """A command in its model's queue since ``arrived_s``. ``waited_s``: until its first microbatch. ``reading``: its
    checkpoint is on the way from disk, or there is no room for its snapshot yet."""

    id: int
    command: Command
    arrived_s: float
    waited_s: float = 0.0
    taken: int = 0
    """How many of its datums have been in a turn."""
    reading: Future[Any] | None = None
    _data: tuple[WaitingDatum, ...] | None = None

    @property
    def key(self) -> RequestKey:
        return self.command.model_id, self.command.seq_id

    @property
    def trains(self) -> bool:
        """Its datums join a pass. A backward without data is refused as a row command is: nothing of it does."""
        return isinstance(self.command, ForwardBackward) and len(self.command.data) > 0

    @property
    def is_taken(self) -> bool:
        """All of its datums have been in a turn."""
        return isinstance(self.command, ForwardBackward) and self.taken == len(self.command.data)

    @property
    def is_blocked(self) -> bool:
        return self.reading is not None and not self.reading.done()

    def data(self, num_ranks: int, piece_tokens: int | None) -> tuple[WaitingDatum, ...]:
        """Its datums in the order in which they run, computed once."""
        if self._data is None:
            assert isinstance(self.command, ForwardBackward)
            data: list[WaitingDatum] = []
            before: Int32 | None = None
            for number, datum in enumerate(self.command.data):
                tokens = input_tokens(datum.model_input)
                shared = 0 if before is None else common_prefix(before, tokens)
                waiting = WaitingDatum(
                    part=Part(request=self.key, datum=number),
                    tokens=max(1, len(tokens)),
                    shared=shared if shared >= MIN_SHARED_TOKENS else 0,
                )
                data.append(waiting)
                before = tokens
            self._data = (
                tuple(data) if piece_tokens is None else cut_into_pieces(data, num_ranks, piece_tokens=piece_tokens)
            )
        return self._data


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The requests that a microbatch has datums of. ``opens``: those that begin with it; ``closes``: those that have
    no more. ``tokens``: of its datums; ``backward``: whether any request is more than evaluated."""

    entries: Mapping[RequestKey, Entry]
    opens: tuple[ForwardBackward, ...]
    closes: tuple[RequestKey, ...]
    tokens: int
    backward: bool


@dataclass(slots=True, eq=False, kw_only=True)
class _ModelQueue(WaitingModel):
    num_ranks: int
    piece_tokens: int | None
    entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    """By seq_id, in order of arrival."""
    place: FairQueue[_ModelQueue] | RuntimeQueue[_ModelQueue] | None = None
    """Where it waits, by what is at its head. None: all datums at its head run."""

    def pieces(self) -> Iterator[Sequence[WaitingDatum]]:
        for entry in self.entries.values():
            if not entry.trains:
                return
            data, at = entry.data(self.num_ranks, self.piece_tokens), entry.taken
            while at < len(data):
                piece = piece_at(data, at)
                yield piece
                at += len(piece)

    def rows(self) -> Iterator[Command]:
        """The row commands at its head, in order, that may run."""
        for entry in self.entries.values():
            if entry.trains or entry.is_blocked:
                return
            yield entry.command


class Queues:
    """One turn after the other: ``choose``; before it runs ``prefetch_order`` and, for a training turn, ``take``; then
    ``end`` for each command that has its outcome, and ``ran``. One thread.

    A model waits in one of three places, by the head of its queue: for a training turn, with row commands that may run,
    or blocked: for a checkpoint that is being read, for room. No turn looks at more of them than it takes, but for
    ``prefetch_order``."""

    def __init__(
        self,
        memory: AdapterMemory,
        *,
        num_ranks: int,
        microbatch_tokens: int,
        piece_tokens: int | None,
        packable: bool,
        shares: Mapping[Kind, float],
        max_pass_s: float,
    ):
        """``microbatch_tokens``: of one rank's part of a training turn. ``piece_tokens``: see ``ReplicaInfo``. Not
        packable: one piece a training turn. ``shares``: see ``Shares``. ``max_pass_s``: of a training turn while other
        kinds of work have something to run, as far as ``PassTokens`` can tell."""
        self._num_ranks = num_ranks
        self._turn_tokens = num_ranks * microbatch_tokens if packable else 0
        self._piece_tokens = piece_tokens
        self._shares = Shares(shares)
        self._pass_tokens = PassTokens(max_pass_s)
        self._measured_tokens = 0
        """Of the turn that runs, if it says how long passes take."""
        self._usual_time = UsualTime()
        self._charged: dict[str, int] = {}
        """What each model was expected to cost in the turn that runs, if it says how long turns take."""
        self._others_wait = False
        """Other kinds of work had something to run at the last choice."""
        self._weights: Mapping[Kind, float] = {}
        """How much a second of other kinds of work counts, since the last choice."""
        self._models: dict[str, _ModelQueue] = {}
        """With something waiting; ``_runtimes`` remembers the others."""
        self._training: FairQueue[_ModelQueue] = FairQueue(memory)
        self._with_rows: RuntimeQueue[_ModelQueue] = RuntimeQueue()
        self._blocked: RuntimeQueue[_ModelQueue] = RuntimeQueue()
        self._runtimes: dict[str, int] = {}
        self._last_runtime = 0
        """The least of the models in the last pass, before it."""
        self._arrivals = 0
        self._idle_order: tuple[str, ...] | None = None
        """``prefetch_order`` beside a turn about no model; None: to be computed again."""

    def add(self, entry: Entry) -> None:
        """At the end of its model's queue."""
        model_id = entry.command.model_id
        model = self._models.get(model_id)
        if model is not None:
            model.entries[entry.command.seq_id] = entry
            return
        self._arrivals += 1
        model = self._models[model_id] = _ModelQueue(
            model_id=model_id,
            arrival=self._arrivals,
            virtual_runtime=runtime_on_arrival(self._runtimes.get(model_id, 0), self._least_runtime()),
            num_ranks=self._num_ranks,
            piece_tokens=self._piece_tokens,
        )
        model.entries[entry.command.seq_id] = entry
        self._put(model)

    def block(self, key: RequestKey, reading: Future[Any]) -> None:
        """A row command that waits is not to run before ``reading`` is done, of which ``read`` tells."""
        model = self._models[key[0]]
        self._remove(model)
        self.entry(key).reading = reading
        self._put(model)

    def read(self, model_id: str) -> None:
        """What a command of this model waited for is there: its checkpoint has been read, or the like."""
        if (model := self._models.get(model_id)) is not None and model.place is self._blocked:
            self._remove(model)
            self._put(model)

    def entry(self, key: RequestKey) -> Entry:
        model_id, seq_id = key
        return self._models[model_id].entries[seq_id]

    def choose(self, ready: Mapping[Kind, int]) -> Choice:
        """The next turn. ``ready``: the other kinds of work that have something to run, and for how many models. Where
        more models wait to be trained, a second of that work counts for more, by so much: each model is to have an even
        share, and a step of few costs nearly what one of many does, so that they rather wait for the others."""
        waiting = [kind for kind, place in ((ROWS, self._with_rows), (TRAIN, self._training)) if len(place)]
        kind = self._shares.next({*waiting, *ready})
        self._others_wait = bool(ready)
        self._weights = {other: max(1.0, len(self._training) / models) for other, models in ready.items()}
        if kind == ROWS:
            models = sorted(self._with_rows, key=lambda model: model.arrival)
            return Choice(kind=kind, commands=tuple(command for model in models for command in model.rows()))
        if kind == TRAIN:
            limit = self._pass_tokens.limit if self._others_wait else math.inf
            return Choice(kind=kind, data=self._training.fill(int(min(self._turn_tokens, limit))))
        return Choice(kind=kind)

    def prefetch_order(self, choice: Choice) -> tuple[str, ...]:
        """The models with anything waiting beside ``choice``, in the order in which their adapters will be needed after
        it, as far as known: row commands, passes, what waits for a checkpoint.

        All of them: the adapter that is needed last is evicted. The order is that among the resident and among the
        offloaded; the prefetch does not depend on how these two mix, so no residency is looked up that would not change
        it. Turns about no model get the same list until anything here changes: they move adapters only by it."""
        keys = choice.keys
        if not keys:
            if self._idle_order is None:
                self._idle_order = self._order(self._with_rows.order(), ())
            return self._idle_order
        now = {model_id for model_id, _ in keys}
        left = {m for m in now if any((m, seq_id) not in keys for seq_id in self._models[m].entries)}
        if choice.kind == ROWS:  # which are all that have some
            order = self._order((), [self._models[model_id] for model_id in left])
        else:
            order = self._order(self._with_rows.order(), ())
        return tuple(model_id for model_id in order if model_id not in now or model_id in left)

    def take(self, choice: Choice, now_s: float) -> Taken:
        """The datums of a training turn begin to run."""
        models = [self._models[model_id] for model_id in choice.model_ids]
        self._last_runtime = min(model.virtual_runtime for model in models)
        self._training.skip_others(models)
        entries: dict[RequestKey, Entry] = {}
        opens: list[ForwardBackward] = []
        charged: dict[str, int] = {}
        tokens, backward = 0, False
        for datum in choice.data:
            part = datum.part
            model = self._models[part.request[0]]
            entry = entries.get(part.request)
            if entry is None:
                entry = entries[part.request] = self.entry(part.request)
            assert isinstance(entry.command, ForwardBackward)
            backward = backward or not entry.command.forward_only
            if entry.taken == 0:
                opens.append(entry.command)
                model.open_requests += 1
                entry.waited_s = now_s - entry.arrived_s
            entry.taken += 1
            tokens += input_length(entry.command.data[part.datum].model_input)
            computed = datum.added_tokens if model.model_id in charged else datum.tokens
            cost = expected_tokens(computed, forward_only=entry.command.forward_only)
            charged[model.model_id] = charged.get(model.model_id, 0) + cost
            model.virtual_runtime += cost
        # On a GPU a turn that nobody waits for may end before the device has done it.
        self._charged = charged if self._others_wait or self._piece_tokens is not None else {}
        for model in models:
            self._put(model)
        closes = tuple(key for key, entry in entries.items() if entry.is_taken)
        # An evaluation is faster.
        self._measured_tokens = computed_tokens(choice.data) if backward and self._others_wait else 0
        return Taken(entries=entries, opens=tuple(opens), closes=closes, tokens=tokens, backward=backward)

    def end(self, key: RequestKey) -> Entry:
        """It has its outcome."""
        model_id, seq_id = key
        model = self._models[model_id]
        self._remove(model)
        entry = model.entries.pop(seq_id)
        model.open_requests -= entry.taken > 0
        if model.entries:
            self._put(model)
        else:
            del self._models[model_id]
            self._runtimes[model_id] = model.virtual_runtime
        if isinstance(entry.command, DeleteModel):
            self._runtimes.pop(model_id, None)
        return entry

    def ran(self, kind: Kind, seconds: float, *, done_s: float | None = None) -> None:
        """A turn is over that took so long. ``done_s``: after how long the device had done it, where another turn was
        inside."""
        self._shares.ran(kind, seconds * self._weights.get(kind, 1.0))
        took_s = seconds if done_s is None else done_s
        if self._measured_tokens:
            self._pass_tokens.ran(self._measured_tokens, took_s)
            self._measured_tokens = 0
        if kind == TRAIN and self._charged and took_s > 0:
            self._settle(self._usual_time.ratio(sum(self._charged.values()), took_s))
            self._charged = {}

    def _settle(self, ratio: float) -> None:
        """The last turn took so much longer than expected: its models had that much more of the device."""
        for model_id, cost in self._charged.items():
            more = round(cost * (ratio - 1))
            model = self._models.get(model_id)
            if model is not None:
                self._remove(model)
                model.virtual_runtime += more
                self._put(model)
            elif model_id in self._runtimes:
                self._runtimes[model_id] += more

    def _order(self, with_rows: Iterable[str], newcomers: Iterable[_ModelQueue]) -> tuple[str, ...]:
        return (*with_rows, *self._training.order(newcomers), *self._blocked.order())

    def _least_runtime(self) -> int:
        waiting = (place.min_runtime() for place in (self._training, self._with_rows, self._blocked))
        return min((runtime for runtime in waiting if runtime is not None), default=self._last_runtime)

    def _put(self, model: _ModelQueue) -> None:
        """Where the head of its queue belongs."""
        self._idle_order = None
        head = next(iter(model.entries.values()))
        if head.is_taken and head.trains:
            model.place = None
            return
        model.place = self._training if head.trains else self._blocked if head.is_blocked else self._with_rows
        model.place.add(model)

    def _remove(self, model: _ModelQueue) -> None:
        self._idle_order = None
        if model.place is not None:
            model.place.remove(model)
            model.place = None
