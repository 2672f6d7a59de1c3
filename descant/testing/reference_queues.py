"""The decision as plain as it can be: before every turn it looks at all that waits. What ``ranks.queues`` keeps up
to date is held to it by tests, and compared with it by a benchmark."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from descant.ranks.decide import IDLE, LAG_TURNS, ROWS, SAMPLE, TRAIN, Choice, Kind
from descant.ranks.executor import AdapterMemory
from descant.ranks.fair_queue import MAX_RATIO, STARVATION_BOUND
from descant.ranks.partition import WaitingDatum, piece_at
from descant.ranks.queues import Entry, Taken
from descant.train.runner import RequestKey
from descant.types import Command, DeleteModel, ForwardBackward, input_length


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model's queue as ``decide`` sees it: either row commands or datums stand at its head, never both.

    ``rows``: all row commands at the head, in order. ``data``: the datums, in order, of all ``ForwardBackward``s at
    the head (as many whole pieces as a microbatch could take). ``virtual_runtime``: usual tokens this
    model has had, raised on its arrival (``runtime_on_arrival``).

    ``own_bytes``: what its rows take on the device while a request of it is open, ``request_bytes``: what each one
    more takes. ``open_requests``: how many have begun and not ended; their rows cannot move.

    ``resident``: its rows are on the device, else they would have to be loaded. ``skipped_passes``: how many passes
    have run without it since it has waited for one.
    """

    model_id: str
    rows: tuple[Command, ...] = ()
    data: tuple[WaitingDatum, ...] = ()
    virtual_runtime: int = 0
    own_bytes: int = 0
    request_bytes: int = 0
    open_requests: int = 0
    resident: bool = True
    skipped_passes: int = 0

    @property
    def open_bytes(self) -> int:
        return self.own_bytes + (self.open_requests - 1) * self.request_bytes if self.open_requests else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What the turns so far have left. ``lead_s``: seconds that the sampler has had more than its share, in seconds of
    training. ``step_is_due``: a training turn has run since its last step. ``usual_s``: of training turns and of steps,
    in seconds of training."""

    last: Kind = IDLE
    lead_s: float = 0.0
    step_is_due: bool = False
    usual_s: tuple[float, float] = (2**-10, 2**-10)

    def after(self, kind: Kind, seconds: float, *, time_share: float, both_wait: bool) -> Past:
        """A turn that took so long. ``both_wait``: training and sampling had work when it was chosen."""
        if kind not in (TRAIN, SAMPLE):
            return replace(self, last=kind)
        training, step = self.usual_s
        seconds = max(seconds, 2**-20)
        if kind == TRAIN:
            lead_s, training = self.lead_s - seconds, _mean(training, seconds)
        else:
            lead_s, step = self.lead_s + seconds / time_share, _mean(step, seconds / time_share)
        longest_s = LAG_TURNS * max(training, step) if both_wait else 0.0
        return Past(
            last=kind,
            lead_s=max(lead_s, -longest_s) if kind == TRAIN else min(lead_s, longest_s),
            step_is_due=kind == TRAIN and time_share >= 1,
            usual_s=(training, step),
        )


def _mean(usual: float, turn: float) -> float:
    return usual + (min(turn, LAG_TURNS * usual) - usual) / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """``models`` in order of arrival (the tie-break). ``sampling``: the sampler has a step to run."""

    models: tuple[ModelView, ...]
    sampling: bool
    past: Past = Past()


def decide(
    waiting: Waiting, *, microbatch_tokens: int, packable: bool = True, adapter_bytes: float = math.inf
) -> Choice:
    """Row commands first, all that wait at once: they are short and unblock the most tenants. But never twice in a
    row while a pass waits, so that a stream of them starves nothing. Then training or sampling, whichever has had less
    of its share of the time; with a share of at least one, a waiting token waits for one microbatch at most. Not
    packable: one datum a microbatch. The models of a microbatch, and those with a request that goes on after it, fit
    ``adapter_bytes`` together (one alone may pass it)."""
    training = any(model.data for model in waiting.models)
    rows = tuple(command for model in waiting.models for command in model.rows)
    if rows and not (waiting.past.last == ROWS and (training or waiting.sampling)):
        return Choice(kind=ROWS, commands=rows)
    if waiting.sampling and (waiting.past.step_is_due or waiting.past.lead_s <= 0 or not training):
        return Choice(kind=SAMPLE)
    if training:
        data = _fill(waiting.models, microbatch_tokens if packable else 0, adapter_bytes)
        return Choice(kind=TRAIN, data=data)
    return Choice(kind=IDLE)


_SortKey = tuple[int, int, int]
_STARVED, _QUEUED, _OFFLOADED = range(3)


def _sort_keys(models: Sequence[ModelView]) -> list[_SortKey]:
    """The order of the models for a pass: the least runtime first. Models skipped for longer than the starvation bound
    go before the others. Models whose adapters are offloaded are skipped for one pass, to avoid evicting resident
    ones."""
    bound = STARVATION_BOUND * sum(bool(model.data) for model in models)

    def sort_key(model: ModelView) -> _SortKey:
        if model.skipped_passes >= bound:
            return (_STARVED, -model.skipped_passes, model.virtual_runtime)
        return (_QUEUED if model.resident or model.skipped_passes else _OFFLOADED, 0, model.virtual_runtime)

    return [sort_key(model) for model in models]


def prefetch_order(models: Sequence[ModelView], now: Collection[str]) -> list[str]:
    """The models in the order in which their rows will be needed after a turn about ``now``, as far as known."""
    order = sorted(zip(models, _sort_keys(models)), key=lambda at: (at[0].model_id in now or not at[0].rows, at[1]))
    return [model.model_id for model, _ in order]


def _fill(models: Sequence[ModelView], room: int, adapter_bytes: float) -> tuple[WaitingDatum, ...]:
    """Piece by piece in queue order. A model whose next piece does not fit waits for the next turn; the first
    piece is always taken. A request that would need more adapter memory than there is waits until others have ended.
    Once it was skipped for longer than the bound, no other begins before it."""
    queue = [(key, index, 0) for index, (model, key) in enumerate(zip(models, _sort_keys(models))) if model.data]
    heapq.heapify(queue)
    in_use = sum(model.open_bytes for model in models)
    begun: dict[int, set[RequestKey]] = {}
    data: list[WaitingDatum] = []
    closed = False
    while queue and (room > 0 or not data):
        (rank, _, virtual_runtime), index, at = heapq.heappop(queue)
        model = models[index]
        piece, requests = piece_at(model.data, at), begun.setdefault(index, set())
        first, *others = piece
        cost = (first.added_tokens if at else first.tokens) + sum(datum.added_tokens for datum in others)
        if data and cost > room:
            continue
        if first.part.datum == 0 and first.part.request not in requests:
            more = model.request_bytes if requests or model.open_requests else model.own_bytes
            if in_use and (closed or in_use + more > adapter_bytes):
                closed = closed or rank == _STARVED
                continue
            in_use += more
            requests.add(first.part.request)
        data += piece
        room -= cost
        if (at := at + len(piece)) < len(model.data):
            virtual_runtime += cost
            heapq.heappush(queue, ((_QUEUED, 0, virtual_runtime), index, at))
    return tuple(data)


def pass_tokens(measured: Iterable[tuple[int, float]], max_pass_s: float) -> float:
    """The tokens of a turn that takes ``max_pass_s``, by all that were ``measured``: tokens and seconds of each."""
    rate = math.inf
    for tokens, seconds in measured:
        if rate == math.inf:
            rate = tokens / seconds
        elif tokens / seconds > rate or seconds > max_pass_s:
            rate = min((rate + tokens / seconds) / 2, 2 * rate)
    return rate * max_pass_s


def time_ratio(timed: Sequence[tuple[int, float]]) -> float:
    """By how much longer than usual the last of these turns took: expected tokens and seconds of each."""
    tokens, seconds = timed[0]
    usual, ratio = seconds / tokens, 1.0
    for tokens, seconds in timed:
        one = min(seconds / tokens, MAX_RATIO * usual)
        usual, ratio = usual + (one - usual) / 64, one / usual
    return ratio


def runtime_on_arrival(virtual_runtime: int, others: Iterable[int], last: int = 0) -> int:
    """Of a model that had nothing waiting and now has: at least the least of the others', or, if none waits, of
    those in the ``last`` pass, before it."""
    return max(virtual_runtime, min(others, default=last))


@dataclass(slots=True)
class ReferenceModelQueue:
    entries: deque[Entry] = field(default_factory=deque)
    virtual_runtime: int = 0
    skipped_passes: int = 0


class ReferenceQueues:
    """``Queues``, for training, rows and sampling."""

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
        self._memory = memory
        self._num_ranks = num_ranks
        self._turn_tokens = num_ranks * microbatch_tokens
        self._piece_tokens = piece_tokens
        self._packable = packable
        self._time_share = shares[SAMPLE]
        self._max_pass_s = max_pass_s
        self._measured: list[tuple[int, float]] = []
        """Tokens and seconds of each turn with a backward pass while sequences were sampled."""
        self._backward_tokens = 0
        self._timed: list[tuple[int, float]] = []
        """Expected tokens and seconds of each turn that was measured."""
        self._expected: dict[str, int] = {}
        """By model, of the last training turn."""
        self._both_wait = self._sampling = False
        self._weight = 1.0
        """Of a second of sampling."""
        # Models with something waiting, in order of arrival; ``_runtimes`` remembers the others.
        self._models: OrderedDict[str, ReferenceModelQueue] = OrderedDict()
        self._runtimes: dict[str, int] = {}
        self._last_runtime = 0
        """By the least virtual_runtime model of the last pass, before it."""
        self._past = Past()
        self.seen: tuple[ModelView, ...] = ()
        """What the last choice was made from."""

    def add(self, entry: Entry) -> None:
        model_id = entry.command.model_id
        waiting = self._models.get(model_id)
        if waiting is None:
            others = (model.virtual_runtime for model in self._models.values())
            virtual_runtime = runtime_on_arrival(self._runtimes.get(model_id, 0), others, self._last_runtime)
            waiting = self._models[model_id] = ReferenceModelQueue(virtual_runtime=virtual_runtime)
        waiting.entries.append(entry)

    def entry(self, key: RequestKey) -> Entry:
        model_id, seq_id = key
        return next(entry for entry in self._models[model_id].entries if entry.command.seq_id == seq_id)

    def choose(self, ready: Mapping[Kind, int]) -> Choice:
        self.seen = tuple(self._waiting(model_id, waiting) for model_id, waiting in self._models.items())
        self._sampling = SAMPLE in ready
        num_training = sum(bool(model.data) for model in self.seen)
        self._both_wait = self._sampling and num_training > 0
        self._weight = max(1.0, num_training / ready[SAMPLE]) if self._sampling else 1.0
        limit = pass_tokens(self._measured, self._max_pass_s) if self._sampling else math.inf
        return decide(
            Waiting(models=self.seen, sampling=self._sampling, past=self._past),
            microbatch_tokens=int(min(self._turn_tokens, limit)),
            packable=self._packable,
            adapter_bytes=self._memory.adapter_bytes,
        )

    def prefetch_order(self, choice: Choice) -> Sequence[str]:
        """The models with anything waiting beside ``choice``, in the order in which their rows will be needed after it,
        as far as known."""
        keys = choice.keys
        return [
            model_id
            for model_id in prefetch_order(self.seen, choice.model_ids)
            if any(entry.key not in keys for entry in self._models[model_id].entries)
        ]

    def take(self, choice: Choice, now_s: float) -> Taken:
        """The datums of a microbatch begin to run."""
        for model in self.seen:
            over = bool(model.data) and model.model_id not in choice.model_ids
            self._models[model.model_id].skipped_passes = model.skipped_passes + 1 if over else 0
        self._last_runtime = min(self._models[model_id].virtual_runtime for model_id in choice.model_ids)
        entries: dict[RequestKey, Entry] = {}
        opens: list[ForwardBackward] = []
        tokens, backward = 0, False
        for datum in choice.data:
            part = datum.part
            entry = entries.get(part.request)
            if entry is None:
                entry = entries[part.request] = self.entry(part.request)
            assert isinstance(entry.command, ForwardBackward)
            backward = backward or not entry.command.forward_only
            if entry.taken == 0:
                opens.append(entry.command)
                entry.waited_s = now_s - entry.arrived_s
            entry.taken += 1
            tokens += input_length(entry.command.data[part.datum].model_input)
        self._expected = {}
        for index, datum in enumerate(choice.data):
            model_id = datum.part.request[0]
            first = all(before.part.request[0] != model_id for before in choice.data[:index])
            cost = datum.tokens if first else datum.added_tokens
            if entries[datum.part.request].command.forward_only:  # type: ignore[union-attr]
                cost = math.ceil(cost / 2)
            self._expected[model_id] = self._expected.get(model_id, 0) + cost
        for model_id, cost in self._expected.items():
            self._models[model_id].virtual_runtime += cost
        closes = tuple(key for key, entry in entries.items() if entry.is_taken)
        self._backward_tokens = 0
        if backward:
            seen: set[str] = set()
            for datum in choice.data:
                self._backward_tokens += datum.added_tokens if datum.part.request[0] in seen else datum.tokens
                seen.add(datum.part.request[0])
        return Taken(entries=entries, opens=tuple(opens), closes=closes, tokens=tokens, backward=backward)

    def end(self, key: RequestKey) -> Entry:
        """It has its outcome."""
        model_id, _ = key
        entry, waiting = self.entry(key), self._models[model_id]
        waiting.entries.remove(entry)
        if not waiting.entries:
            del self._models[model_id]
            self._runtimes[model_id] = waiting.virtual_runtime
        if isinstance(entry.command, DeleteModel):
            self._runtimes.pop(model_id, None)
        return entry

    def ran(self, kind: Kind, seconds: float) -> None:
        """A turn is over."""
        weighed = seconds * self._weight if kind == SAMPLE else seconds
        self._past = self._past.after(kind, weighed, time_share=self._time_share, both_wait=self._both_wait)
        if kind == TRAIN and self._sampling and self._backward_tokens:
            self._measured.append((self._backward_tokens, seconds))
        if kind == TRAIN and (self._sampling or self._piece_tokens is not None):
            self._timed.append((sum(self._expected.values()), seconds))
            for model_id, cost in self._expected.items():
                more = round(cost * (time_ratio(self._timed) - 1))
                if model_id in self._models:
                    self._models[model_id].virtual_runtime += more
                elif model_id in self._runtimes:
                    self._runtimes[model_id] += more

    def _waiting(self, model_id: str, waiting: ReferenceModelQueue) -> ModelView:
        rows: list[Command] = []
        data: list[WaitingDatum] = []
        room = self._turn_tokens
        for entry in waiting.entries:
            command = entry.command
            if isinstance(command, ForwardBackward) and command.data:
                if rows or room <= 0:
                    break
                for datum in entry.data(self._num_ranks, self._piece_tokens)[entry.taken :]:
                    if room <= 0 and not datum.joins:
                        break
                    room -= datum.added_tokens if data else datum.tokens
                    data.append(datum)
            else:  # a backward without data is refused like a row command: nothing of it joins a pass
                if data or (entry.reading is not None and not entry.reading.done()):
                    break
                rows.append(command)
        own_bytes, request_bytes = self._memory.bytes_in_use(model_id) if data else (0, 0)
        return ModelView(
            model_id=model_id,
            rows=tuple(rows),
            data=tuple(data),
            virtual_runtime=waiting.virtual_runtime,
            own_bytes=own_bytes,
            request_bytes=request_bytes,
            open_requests=sum(entry.taken > 0 for entry in waiting.entries),
            resident=self._memory.is_resident(model_id),
            skipped_passes=waiting.skipped_passes,
        )
