"""A fair queue of the models that wait for a training turn, and what the next pass takes of them.

Start-time fair queueing: each model has a virtual runtime, the device time that it has had, and the least goes first.
Its unit is a token that takes as long as usual: a turn counts by its tokens when it begins, and by what it took when it
has ended (``UsualTime``), divided among its models by their tokens. Kept up to date as models come, go and are trained,
so that a turn costs what it takes and not what waits.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, TypeVar

from descant.ranks.executor import AdapterMemory
from descant.ranks.partition import WaitingDatum


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingModel(ABC):
    """``arrival``: breaks ties; no two have the same. ``virtual_runtime``: in usual tokens, raised on its arrival
    (``runtime_on_arrival``). ``open_requests``: how many have begun and not ended; their rows cannot move. These change
    only while it is in no queue."""

    model_id: str
    arrival: int
    virtual_runtime: int = 0
    open_requests: int = 0

    # The queue's own.
    since: int = field(default=0, init=False)
    """The queue's number of passes when it began to wait."""
    open_bytes: int = field(default=0, init=False)
    first: Sequence[WaitingDatum] = field(default=(), init=False)
    """Its next piece."""
    first_tokens: int = field(default=0, init=False)

    @abstractmethod
    def pieces(self) -> Iterator[Sequence[WaitingDatum]]:
        """Of the requests that may run one after another now, in order."""


Model = TypeVar("Model", bound=WaitingModel)
_Item = tuple[int, int, Model]

STARVATION_BOUND = 2
"""Passes, for each model in the queue, until a skipped one goes first, whatever its runtime."""

_STARVED, _QUEUED, _OFFLOADED = range(3)


class RuntimeQueue(Generic[Model]):
    """Models by virtual runtime, the least first, then by arrival. O(log n), but for a move of pointers."""

    def __init__(self) -> None:
        self.items: list[_Item[Model]] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Model]:
        return (model for _, _, model in self.items)

    def order(self) -> list[str]:
        """The models' ids."""
        return _ids(self.items)

    def min_runtime(self) -> int | None:
        """None: it is empty."""
        return self.items[0][0] if self.items else None

    def add(self, model: Model) -> None:
        insort(self.items, _item(model))

    def remove(self, model: Model) -> None:
        del self.items[bisect_left(self.items, _item(model))]


class FairQueue(Generic[Model]):
    """Models skipped for longer than ``STARVATION_BOUND`` go first. Models whose adapters are offloaded are skipped for
    one pass, to avoid evicting resident ones."""

    def __init__(self, memory: AdapterMemory):
        self._memory = memory
        self._passes = 0
        self._fresh: RuntimeQueue[Model] = RuntimeQueue()
        """Not skipped yet: ``since`` is the current pass."""
        self._skipped: RuntimeQueue[Model] = RuntimeQueue()
        self._by_wait: list[tuple[int, _Item[Model]]] = []
        """The skipped ones, the longest first."""
        self._first_tokens: list[int] = []
        """Of each model's next piece, sorted."""
        self._open_bytes = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._skipped)

    def min_runtime(self) -> int | None:
        """None: it is empty."""
        least = (queue.min_runtime() for queue in (self._fresh, self._skipped))
        return min((runtime for runtime in least if runtime is not None), default=None)

    def add(self, model: Model) -> None:
        """It has pieces."""
        model.since = self._passes
        model.first = next(model.pieces())
        model.first_tokens = _tokens(model.first, shared=False)
        insort(self._first_tokens, model.first_tokens)
        if model.open_requests:
            own_bytes, request_bytes = self._memory.bytes_in_use(model.model_id)
            model.open_bytes = own_bytes + (model.open_requests - 1) * request_bytes
            self._open_bytes += model.open_bytes
        self._fresh.add(model)

    def remove(self, model: Model) -> None:
        if model.since == self._passes:
            self._fresh.remove(model)
        else:
            self._skipped.remove(model)
            del self._by_wait[bisect_left(self._by_wait, (model.since, _item(model)))]
        del self._first_tokens[bisect_left(self._first_tokens, model.first_tokens)]
        self._open_bytes -= model.open_bytes
        model.open_bytes = 0

    def skip_others(self, taken: Iterable[Model]) -> None:
        """A pass runs: the models ``taken`` into it leave the queue, the others are skipped."""
        for model in taken:
            self.remove(model)
        self._by_wait += ((self._passes, item) for item in self._fresh.items)  # sorted, and none has waited less
        for model in self._fresh:
            self._skipped.add(model)
        self._fresh = RuntimeQueue()
        self._passes += 1

    def order(self, newcomers: Iterable[Model] = ()) -> list[str]:
        """The ids of all, with ``newcomers`` as if they were in the queue, in the order in which passes take them."""
        resident, offloaded = list[_Item[Model]](), list[_Item[Model]]()
        for item in sorted([*self._fresh.items, *map(_item, newcomers)]):
            (resident if self._memory.is_resident(item[2].model_id) else offloaded).append(item)
        queued = sorted([*self._skipped.items, *resident]) if resident else self._skipped.items
        if starved := self._starved():
            late = set(starved)
            queued = [item for item in queued if item[2] not in late]
        return [*(model.model_id for model in starved), *_ids(queued), *_ids(offloaded)]

    def fill(self, room: int) -> tuple[WaitingDatum, ...]:
        """What a pass of ``room`` tokens takes, piece by piece in queue order, so that a small tenant never waits
        behind all of a large one's. A model whose next piece does not fit waits for the next turn; the first piece is
        always taken, so that one larger than the pass runs alone.

        The models of a pass, and those with a request that goes on after it, fit ``adapter_bytes`` together (one
        alone may pass it). A request that would need more waits until others have ended: those that are open always go
        on, so that they do end. Once it was skipped for longer than the bound, no other begins before it."""
        limit, in_use = self._memory.adapter_bytes, self._open_bytes
        walk = self._walk()
        queue: list[tuple[int, int, int, Model]] = []
        """The next of ``walk``, and those that had a piece and have more."""
        taking: dict[Model, _InPass] = {}
        data: list[WaitingDatum] = []
        peeked, closed = False, False
        while room > 0 or not data:
            if not peeked and (not data or room >= self._first_tokens[0]) and (candidate := next(walk, None)):
                heapq.heappush(queue, candidate)
                peeked = True
            if not queue:
                break
            rank, runtime, _, model = heapq.heappop(queue)
            if (of_model := taking.get(model)) is None:
                peeked = False
                piece, tokens, begun = model.first, model.first_tokens, model.open_requests
            else:
                piece, begun = of_model.piece, of_model.begun
                tokens = _tokens(piece, shared=True)
            if data and tokens > room:
                continue
            if piece[0].part.datum == 0:
                own_bytes, request_bytes = self._memory.bytes_in_use(model.model_id)
                more = request_bytes if begun else own_bytes
                if in_use and (closed or in_use + more > limit):
                    closed = closed or rank == _STARVED
                    continue
                in_use += more
                begun += 1
            data += piece
            room -= tokens
            if of_model is None:
                of_model = taking[model] = _InPass(pieces=model.pieces())
                next(of_model.pieces)
            if room > 0 and (following := next(of_model.pieces, None)) is not None:
                of_model.piece, of_model.begun = following, begun
                runtime += tokens
                heapq.heappush(queue, (_QUEUED, runtime, model.arrival, model))
        return tuple(data)

    def _starved(self) -> list[Model]:
        bound = STARVATION_BOUND * len(self)
        waited = takewhile(lambda entry: self._passes - entry[0] >= bound, self._by_wait)
        return [model for _, (_, _, model) in waited]

    def _walk(self) -> Iterator[tuple[int, int, int, Model]]:
        """All, in order, lazily."""
        starved = self._starved()
        late = set(starved)
        offloaded: list[_Item[Model]] = []

        def resident() -> Iterator[_Item[Model]]:
            for item in self._fresh.items:
                if self._memory.is_resident(item[2].model_id):
                    yield item
                else:
                    offloaded.append(item)

        yield from ((_STARVED, model.virtual_runtime, model.arrival, model) for model in starved)
        skipped = (item for item in self._skipped.items if item[2] not in late)
        yield from ((_QUEUED, *item) for item in heapq.merge(skipped, resident()))
        yield from ((_OFFLOADED, *item) for item in offloaded)


@dataclass(slots=True, kw_only=True)
class _InPass:
    """A model with a piece in the pass: ``piece`` is its next. ``begun``: requests, those that were open
    included."""

    pieces: Iterator[Sequence[WaitingDatum]]
    piece: Sequence[WaitingDatum] = ()
    begun: int = 0


MAX_RATIO = 8
"""Of a turn to what is usual: one that compiles, or that the machine held up, is not its models' fault."""
_LEARNT = 1 / 64
"""What one turn counts in the mean that is usual. Much more, and it would follow each model's turns: those of an
expensive one would count for more than they take, and the others' for less."""


class UsualTime:
    """How long a token of a training turn takes, as far as turns were measured."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def ratio(self, tokens: int, seconds: float) -> float:
        """A turn of so many tokens took ``seconds`` above 0: by how much longer that is than usual. 1 for the first."""
        one = seconds / tokens
        usual = one if self._seconds is None else self._seconds
        one = min(one, MAX_RATIO * usual)
        self._seconds = usual + (one - usual) * _LEARNT
        return one / usual


def expected_tokens(computed: int, *, forward_only: bool) -> int:
    """What a datum of which a pass computes so many tokens counts, before the turn is measured: an evaluation has half
    of the arithmetic, since the base's weights are frozen."""
    return (computed + 1) // 2 if forward_only else computed


def runtime_on_arrival(runtime: int, least: int) -> int:
    """The virtual runtime of a model that had nothing waiting and now has. ``least``: of the others, or, if none
    waits, of those in the last pass, before it. So a newcomer goes first once, not until it has caught up with the
    others' past."""
    return max(runtime, least)


def _item(model: Model) -> _Item[Model]:
    return (model.virtual_runtime, model.arrival, model)


def _ids(items: Iterable[_Item[Model]]) -> list[str]:
    return [model.model_id for _, _, model in items]


def _tokens(piece: Sequence[WaitingDatum], *, shared: bool) -> int:
    """What a piece adds to a pass. ``shared``: that has its model's datums before it."""
    first, *others = piece
    return (first.added_tokens if shared else first.tokens) + sum(datum.added_tokens for datum in others)
