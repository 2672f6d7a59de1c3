"""The turn loop: per-model queues and the samplers', one decision at a time, executed on one thread.

    inbox → queues → decide → Turn → Executor → answers

All torch work of a rank happens in ``run``'s thread. Where a replica has several ranks, rank 0 alone has the loop, and
its executor makes all of them do each turn (``team``). Files are read and written by two threads of their own, which
hand plain host tensors over and compute nothing. An exception in a turn fails what was in that turn and no more.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, assert_never

from descant.dist.failure import DistributedFailure
from descant.errors import DescantError, ServerError, UserError
from descant.ranks.channel import Board
from descant.ranks.messages import (
    Cancel,
    Count,
    Drop,
    Failed,
    Finished,
    FromRank,
    Publish,
    Release,
    Sample,
    Sampled,
    SampleEnded,
    Save,
    Stop,
    Submit,
    ToRank,
)
from descant.ranks.turns import (
    Choice,
    Kind,
    Microbatch,
    Rows,
    SampleStep,
    SamplingRank,
    Waiting,
    WaitingDatum,
    WaitingModel,
    credit_after,
    decide,
    in_line,
    sampling_rank,
    served_on_arrival,
    split,
)
from descant.sample.scheduler import Scheduler, SequenceOutput, StepPlan
from descant.train.batch import MIN_SHARED_TOKENS, common_prefix
from descant.train.step import Part, RequestKey
from descant.types import (
    CheckpointSource,
    Command,
    CreateModel,
    DeleteModel,
    EngineCapabilities,
    ForwardBackward,
    ForwardBackwardOutput,
    LoadState,
    Manifest,
    ModelFacts,
    Result,
    SampleDelta,
    SampleRequest,
    Snapshot,
    SnapshotRef,
    Version,
    input_length,
    input_tokens,
)

log = logging.getLogger(__name__)

QUIET_S = 0.0005
"""A rank with nothing to do waits until nothing more has come for so long …"""
BURST_S = 0.004
"""… but no longer than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended: with a result, or with an error."""

    key: RequestKey
    result: Result | DescantError


class Executor(Protocol):
    """What a rank can do. Everything but ``read`` and the callable that ``save`` returns runs on the loop's thread.

    Tensors are opaque to the loop: what ``read`` made, ``rows`` and ``publish`` take. A ``DistributedFailure`` is the
    end of the replica, and nobody's outcome: it leaves ``run``.
    """

    facts: ModelFacts
    capabilities: EngineCapabilities
    num_ranks: int
    microbatch_tokens: int
    """Of one rank's part of a training pass."""
    idle_s: float | None
    """How often ``idle`` is called while there is nothing to do; None: never."""

    def idle(self) -> None: ...

    def stats(self) -> Mapping[str, float]: ...
    def make_scheduler(self) -> Scheduler:
        """Called once for each rank; the same limits hold for all."""
        ...

    def adapter_bytes(self, model_id: str) -> tuple[int, int]:
        """What a model takes on the device with one request open, and with each one more. Zeros if it is not here."""
        ...

    def max_adapter_bytes(self) -> float:
        """What the models of one microbatch, and those with open requests, may take together."""
        ...

    def is_resident(self, model_id: str) -> bool:
        """Whether its rows are on the device."""
        ...

    def prefetch(self, model_ids: Sequence[str], *, keep: Collection[str]) -> None:
        """Before a turn about ``keep``: these are asked for after it, in this order. Never raises."""
        ...

    def microbatch(self, turn: Microbatch) -> list[Outcome]:
        """Outcomes of all ``closes``, and of requests that were refused when opened."""
        ...

    def sample_step(self, turn: SampleStep) -> Sequence[Sequence[SequenceOutput] | DescantError | None]:
        """By rank: what its plan gave, or how it failed; None where there was no plan."""
        ...

    def rows(self, turn: Rows) -> list[Outcome]:
        """One outcome a command."""
        ...

    def fail(self, key: RequestKey, command: Command, why: str) -> None:
        """The turn that this command was in broke: forget what is open, and remember a lost gradient."""
        ...

    def read(self, source: CheckpointSource) -> Any:
        """A checkpoint's tensors on the host. Any thread."""
        ...

    def save(self, ref: SnapshotRef, dest: str) -> Callable[[], Manifest]:
        """Raises ``NotFound`` now, or writes when called (any thread)."""
        ...

    def drop(self, ref: SnapshotRef) -> None: ...
    def publish(self, ref: SnapshotRef, loaded: Any | None) -> None: ...
    def is_published(self, version: Version) -> bool: ...
    def release_version(self, version: Version) -> None: ...
    def acquire(self, version: Version | None, count: int = 1) -> None:
        """For as many requests as ``count``, or for none of them. Raises ``NotFound``, or ``ServerError`` where its
        weights cannot be had."""
        ...

    def free(self, version: Version | None, count: int = 1) -> None:
        """Undoes it for so many."""
        ...


@dataclass(slots=True)
class Entry:
    """A command in its model's queue since ``arrived_s``. ``waited_s``: until its first microbatch. ``reading``: its
    checkpoint is on the way from disk."""

    call: int
    command: Command
    arrived_s: float
    waited_s: float = 0.0
    next_datum: int = 0
    reading: Future[Any] | None = None
    _data: list[WaitingDatum] = field(default_factory=list)

    @property
    def key(self) -> RequestKey:
        return self.command.model_id, self.command.seq_id

    def waiting(self, index: int) -> WaitingDatum:
        """Datum ``index``, looked at once: what waits is told anew before every turn."""
        assert isinstance(self.command, ForwardBackward)
        while len(self._data) <= index:
            number = len(self._data)
            tokens, shared = input_tokens(self.command.data[number].model_input), 0
            if number > 0:
                shared = common_prefix(input_tokens(self.command.data[number - 1].model_input), tokens)
            datum = WaitingDatum(
                part=Part(request=self.key, datum=number),
                tokens=max(1, len(tokens)),
                shared=shared if shared >= MIN_SHARED_TOKENS else 0,
            )
            self._data.append(datum)
        return self._data[index]


@dataclass(slots=True)
class ModelQueue:
    entries: deque[Entry] = field(default_factory=deque)
    served: int = 0
    passed_over: int = 0


@dataclass(slots=True, kw_only=True)
class _Sampled:
    """A request that is sampled. ``version``: what it has acquired. ``left``: samples that have not ended."""

    version: Version | None
    scheduler: Scheduler
    left: set[int]


@dataclass(frozen=True, slots=True)
class _Posted:
    """A file thread has something for the loop's thread to do."""

    run: Callable[[], None]


class TurnLoop:
    def __init__(
        self,
        executor: Executor,
        *,
        emit: Callable[[FromRank], None],
        board: Board,
        steps_per_microbatch: float,
        seconds: Callable[[], float] = time.monotonic,
    ):
        """``emit`` is called by the loop's and the file threads. ``executor`` is used from ``run``'s thread on.
        ``seconds`` measures how long requests wait."""
        self._executor = executor
        self._emit = emit
        self._board = board
        self._microbatch_tokens = executor.microbatch_tokens
        self._steps_per_microbatch = steps_per_microbatch
        self._seconds = seconds
        self._inbox: queue.SimpleQueue[ToRank | _Posted] = queue.SimpleQueue()
        # Models with something waiting, in order of arrival; ``_served`` remembers the others.
        self._models: OrderedDict[str, ModelQueue] = OrderedDict()
        self._served: dict[str, int] = {}
        self._served_last = 0
        """By the least served model of the last pass, before it."""
        self._schedulers = [executor.make_scheduler() for _ in range(executor.num_ranks)]
        self._samples: dict[str, _Sampled] = {}
        self._newest: dict[str, Version] = {}
        """Of each model the newest version that is published."""
        self._turn = 0
        self._last: Kind = "idle"
        self._credit = 1.0
        self._stopped = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="descant-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="descant-write")

    def post(self, message: ToRank) -> None:
        """Any thread."""
        self._inbox.put(message)

    def run(self) -> None:
        """Until ``Stop``. Work that is not done then is simply not answered."""
        try:
            while not self._stopped:
                self._take_messages()
                models = tuple(self._waiting(model_id, waiting) for model_id, waiting in self._models.items())
                choice = self._decide(models)
                if choice.kind == "idle":
                    if not self._stopped:
                        self._wait()
                    continue
                self._turn += 1
                self._execute(choice, models)
                self._board.write(self._turn, "")
                self._last = choice.kind
                self._credit = credit_after(self._credit, choice.kind, steps_per_microbatch=self._steps_per_microbatch)
        finally:
            self._reader.shutdown(wait=False, cancel_futures=True)
            self._writer.shutdown(wait=False, cancel_futures=True)

    def _wait(self) -> None:
        try:
            message = self._inbox.get(timeout=self._executor.idle_s)
        except queue.Empty:
            self._executor.idle()
            return
        self._take(message)
        # Requests come in bursts. A pass of the first alone would keep all others waiting for as long as one of all.
        until = self._seconds() + BURST_S
        with contextlib.suppress(queue.Empty):
            while not self._stopped and self._seconds() < until:
                self._take(self._inbox.get(timeout=QUIET_S))

    # ------------------------------------------------------------------------------------------------ messages
    def _take_messages(self) -> None:
        while not self._stopped:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._take(message)

    def _take(self, message: ToRank | _Posted) -> None:
        match message:
            case Submit():
                self._enqueue(message)
            case Sample():
                self._start_sample(message)
            case Cancel():
                if (sampled := self._samples.get(message.request_id)) is not None:
                    sampled.scheduler.cancel(message.request_id)
                    self._end_sample(message.request_id, None)
            case Publish():
                self._publish(message)
            case Release():
                self._answer(message.call, lambda: self._release(message.version))
            case Count():
                self._count(message.call)
            case Drop():
                self._answer(message.call, lambda: self._executor.drop(message.ref))
            case Save():
                self._save(message)
            case _Posted():
                message.run()
            case Stop():
                self._stopped = True
            case _:
                assert_never(message)

    def _answer(self, call: int, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._emit(Failed(call=call, error=as_descant(error)))
        else:
            self._emit(Finished(call=call, result=None))

    def _count(self, call: int) -> None:
        stats: dict[str, float] = dict(self._executor.stats())
        for scheduler in self._schedulers:
            for name, value in scheduler.stats().items():
                stats[f"sample_{name}"] = stats.get(f"sample_{name}", 0) + value
        self._emit(Finished(call=call, result=stats))

    def _enqueue(self, message: Submit) -> None:
        command = message.command
        entry = Entry(message.call, command, self._seconds())
        if isinstance(command, CreateModel | LoadState) and command.source is not None:
            # Read while the model's earlier commands run; the loop is woken when it is there.
            entry.reading = self._reader.submit(self._executor.read, command.source)
            entry.reading.add_done_callback(lambda _: self._inbox.put(_Posted(lambda: None)))
        waiting = self._models.get(command.model_id)
        if waiting is None:
            others = (model.served for model in self._models.values())
            served = served_on_arrival(self._served.get(command.model_id, 0), others, self._served_last)
            waiting = ModelQueue(served=served)
            self._models[command.model_id] = waiting
        waiting.entries.append(entry)

    def _publish(self, message: Publish) -> None:
        ref, executor = message.ref, self._executor
        if ref.directory is None or executor.is_published(ref.version):
            self._answer(message.call, lambda: self._make_newest(ref, None))
            return
        source = CheckpointSource(uri=ref.directory, directory=ref.directory, optimizer=False)
        reading = self._reader.submit(executor.read, source)
        finish = _Posted(lambda: self._answer(message.call, lambda: self._make_newest(ref, reading.result())))
        reading.add_done_callback(lambda _: self._inbox.put(finish))

    def _make_newest(self, ref: SnapshotRef, loaded: Any | None) -> None:
        """Publishes; then, between two steps, what follows its model moves to it."""
        version = ref.version
        if not self._executor.is_published(version):
            self._executor.publish(ref, loaded)
        newest = self._newest.get(version.model_id)
        if newest is None or newest.number < version.number:
            self._newest[version.model_id] = version
        followers = {scheduler: scheduler.followers(version) for scheduler in self._schedulers}
        if not (count := sum(map(len, followers.values()))):
            return
        try:
            self._executor.acquire(version, count)
        except Exception as error:  # they go on with what they have
            log.warning("requests stay with their weights, newer ones could not be had: %s", as_descant(error))
            return
        before: Counter[Version | None] = Counter()
        for scheduler, request_ids in followers.items():
            scheduler.move(request_ids, version)
            for request_id in request_ids:
                sampled = self._samples[request_id]
                before[sampled.version] += 1
                sampled.version = version
        for left, count in before.items():
            self._executor.free(left, count)

    def _release(self, version: Version) -> None:
        self._executor.release_version(version)
        for scheduler in self._schedulers:
            scheduler.release(version)
        if self._newest.get(version.model_id) == version:
            del self._newest[version.model_id]

    def _save(self, message: Save) -> None:
        try:
            write = self._executor.save(message.ref, message.dest)
        except Exception as error:
            self._emit(Failed(call=message.call, error=as_descant(error)))
            return

        def done(writing: Future[Manifest]) -> None:
            error = writing.exception()
            if error is not None:
                self._emit(Failed(call=message.call, error=as_descant(error)))
            else:
                self._emit(Finished(call=message.call, result=writing.result()))

        self._writer.submit(write).add_done_callback(done)

    # ------------------------------------------------------------------------------------------------ the decision
    def _decide(self, models: tuple[WaitingModel, ...]) -> Choice:
        return decide(
            Waiting(
                models=models,
                sampling=any(scheduler.has_work() for scheduler in self._schedulers),
                last=self._last,
                sample_credit=self._credit,
            ),
            microbatch_tokens=self._executor.num_ranks * self._microbatch_tokens,
            packable=self._executor.facts.packable,
            max_adapter_bytes=self._executor.max_adapter_bytes(),
        )

    def _waiting(self, model_id: str, waiting: ModelQueue) -> WaitingModel:
        rows: list[Command] = []
        data: list[WaitingDatum] = []
        room = self._executor.num_ranks * self._microbatch_tokens
        for entry in waiting.entries:
            command = entry.command
            if isinstance(command, ForwardBackward) and command.data:
                if rows or room <= 0:
                    break
                for index in range(entry.next_datum, len(command.data)):
                    datum = entry.waiting(index)
                    room -= datum.added_tokens if data else datum.tokens
                    data.append(datum)
                    if room <= 0:
                        break
            else:  # a backward without data is refused like a row command: nothing of it joins a pass
                if data or (entry.reading is not None and not entry.reading.done()):
                    break
                rows.append(command)
        adapter_bytes, request_bytes = self._executor.adapter_bytes(model_id) if data else (0, 0)
        return WaitingModel(
            model_id=model_id,
            rows=tuple(rows),
            data=tuple(data),
            served=waiting.served,
            adapter_bytes=adapter_bytes,
            request_bytes=request_bytes,
            open_requests=sum(entry.next_datum > 0 for entry in waiting.entries),
            resident=self._executor.is_resident(model_id),
            passed_over=waiting.passed_over,
        )

    # ------------------------------------------------------------------------------------------------ turns
    def _execute(self, choice: Choice, models: Sequence[WaitingModel]) -> None:
        keys = {part.request for part in choice.parts} | {(c.model_id, c.seq_id) for c in choice.commands}
        now = {model_id for model_id, _ in keys}
        soon = [m for m in in_line(models, now) if any(entry.key not in keys for entry in self._models[m].entries)]
        self._executor.prefetch(soon, keep=now)
        match choice.kind:
            case "microbatch":
                for model in models:
                    over = bool(model.data) and model.model_id not in now
                    self._models[model.model_id].passed_over = model.passed_over + 1 if over else 0
                self._run_microbatch(choice.data)
            case "rows":
                self._run_rows(choice.commands)
            case "sample":
                self._run_sample_step()

    def _run_microbatch(self, data: Sequence[WaitingDatum]) -> None:
        self._served_last = min(self._models[datum.part.request[0]].served for datum in data)
        entries: dict[RequestKey, Entry] = {}
        opens: list[ForwardBackward] = []
        tokens, backward = 0, False
        for datum in data:
            part = datum.part
            entry = entries.get(part.request)
            if entry is None:
                entry = entries[part.request] = self._entry(part.request)
            assert isinstance(entry.command, ForwardBackward)
            backward = backward or not entry.command.forward_only
            if part.datum == 0:
                opens.append(entry.command)
                entry.waited_s = self._seconds() - entry.arrived_s
            entry.next_datum = part.datum + 1
            length = input_length(entry.command.data[part.datum].model_input)
            tokens += length
            self._models[part.request[0]].served += length
        closes = tuple(key for key, entry in entries.items() if entry.next_datum == len(entry.command.data))  # type: ignore[union-attr]
        shares = split(data, self._executor.num_ranks, pass_tokens=self._microbatch_tokens)
        turn = Microbatch(
            opens=tuple(opens), shares=shares, closes=closes, backward=backward, sampling=bool(self._samples)
        )
        num_models = len({key[0] for key in entries})
        self._board.write(
            self._turn, f"a training pass of {len(data)} datums, {tokens} tokens, for {num_models} models"
        )
        try:
            outcomes = self._executor.microbatch(turn)
        except Exception as error:
            outcomes = self._broken(error, [(key, entry.command) for key, entry in entries.items()])
        self._settle(outcomes)

    def _run_rows(self, commands: Sequence[Command]) -> None:
        names = ", ".join(sorted({type(command).__name__ for command in commands}))
        self._board.write(self._turn, f"{len(commands)} row commands ({names})")
        loaded: dict[RequestKey, Any] = {}
        for command in commands:
            entry = self._entry((command.model_id, command.seq_id))
            if entry.reading is not None:
                error = entry.reading.exception()
                loaded[entry.key] = entry.reading.result() if error is None else as_descant(error)
        try:
            outcomes = self._executor.rows(Rows(commands=tuple(commands), loaded=loaded))
        except Exception as error:
            outcomes = self._broken(error, [((c.model_id, c.seq_id), c) for c in commands])
        self._settle(outcomes)
        to_publish = {(c.model_id, c.seq_id) for c in commands if isinstance(c, Snapshot) and c.to_publish}
        for outcome in outcomes:
            if outcome.key in to_publish and isinstance(outcome.result, SnapshotRef):
                self._publish_now(outcome.result)

    def _publish_now(self, ref: SnapshotRef) -> None:
        """Asked for when whoever wants it has the snapshot's answer, some 0.2 ms later by way of another process, it
        would come a step of the old weights later."""
        try:
            self._make_newest(ref, None)
        except Exception as error:  # whoever asks for it yet learns why
            version, failure = ref.version, as_descant(error)
            log.warning("version %d of model %s waits to be asked for: %s", version.number, version.model_id, failure)

    def _broken(self, error: Exception, commands: Sequence[tuple[RequestKey, Command]]) -> list[Outcome]:
        failure = as_descant(error)
        for key, command in commands:
            self._executor.fail(key, command, failure.message)
        return [Outcome(key=key, result=failure) for key, _ in commands]

    def _entry(self, key: RequestKey) -> Entry:
        return next(entry for entry in self._models[key[0]].entries if entry.command.seq_id == key[1])

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            model_id, _ = outcome.key
            entry = self._entry(outcome.key)
            waiting = self._models[model_id]
            waiting.entries.remove(entry)
            if not waiting.entries:
                del self._models[model_id]
                self._served[model_id] = waiting.served
            if isinstance(entry.command, DeleteModel):
                self._served.pop(model_id, None)
            if isinstance(outcome.result, DescantError):
                self._emit(Failed(call=entry.call, error=outcome.result))
            else:
                result = outcome.result
                if isinstance(result, ForwardBackwardOutput):
                    result = replace(result, metrics={**result.metrics, "wait_ms:max": 1000 * entry.waited_s})
                self._emit(Finished(call=entry.call, result=result))

    # ------------------------------------------------------------------------------------------------ sampling
    def _start_sample(self, message: Sample) -> None:
        request = message.request
        acquired = False
        if request.inflight and request.version is not None:
            newest = self._newest.get(request.version.model_id, request.version)
            if newest.number > request.version.number:
                request = replace(request, version=newest)
        try:
            if request.request_id in self._samples:
                raise UserError(f"request {request.request_id!r} runs already")
            self._executor.acquire(request.version)
            acquired = True
            scheduler = self._scheduler_for(request)
            scheduler.add(request)
        except Exception as error:
            failure = as_descant(error)
            if acquired:
                self._executor.free(request.version)
            self._emit(SampleEnded(request_id=request.request_id, error=failure))
            return
        left = set(range(request.num_samples))
        self._samples[request.request_id] = _Sampled(version=request.version, scheduler=scheduler, left=left)

    def _scheduler_for(self, request: SampleRequest) -> Scheduler:
        if len(self._schedulers) == 1:
            return self._schedulers[0]
        ranks = [
            SamplingRank(sequences=_num_sequences(scheduler), kept_tokens=scheduler.kept_tokens(request))
            for scheduler in self._schedulers
        ]
        return self._schedulers[sampling_rank(ranks, max_running=self._executor.capabilities.max_running)]

    def _end_sample(self, request_id: str, error: DescantError | None) -> None:
        self._executor.free(self._samples.pop(request_id).version)
        self._emit(SampleEnded(request_id=request_id, error=error))

    def _run_sample_step(self) -> None:
        plans = tuple(scheduler.plan() for scheduler in self._schedulers)
        planned = [plan for plan in plans if plan is not None]
        if not planned:
            return
        num_sequences, num_tokens = sum(len(p.sequences) for p in planned), sum(p.num_tokens for p in planned)
        self._board.write(self._turn, f"a sampling step of {num_sequences} sequences, {num_tokens} tokens")
        outputs: Sequence[Sequence[SequenceOutput] | DescantError | None]
        try:
            outputs = self._executor.sample_step(SampleStep(plans=plans))
        except Exception as error:
            outputs = [as_descant(error)] * len(plans)
        for scheduler, plan, output in zip(self._schedulers, plans, outputs, strict=True):
            if plan is not None and output is not None:
                self._apply(scheduler, plan, output)

    def _apply(self, scheduler: Scheduler, plan: StepPlan, outputs: Sequence[SequenceOutput] | DescantError) -> None:
        try:
            if isinstance(outputs, DescantError):
                raise outputs
            deltas = scheduler.apply(plan, outputs)
        except Exception as error:
            failure = as_descant(error)
            for request_id in scheduler.fail(plan):
                if request_id in self._samples:
                    self._end_sample(request_id, failure)
            return
        for delta in deltas:
            self._deliver(delta)
        for request_id, failed in scheduler.take_failures():
            if request_id in self._samples:
                self._end_sample(request_id, failed)

    def _deliver(self, delta: SampleDelta) -> None:
        if delta.request_id not in self._samples:
            return
        self._emit(Sampled(delta=delta))
        if delta.stop_reason is not None:
            left = self._samples[delta.request_id].left
            left.discard(delta.sample)
            if not left:
                self._end_sample(delta.request_id, None)


def _num_sequences(scheduler: Scheduler) -> int:
    stats = scheduler.stats()
    return stats["waiting"] + stats["running"]


def as_descant(error: BaseException) -> DescantError:
    """What leaves the rank. Anything outside the tree is our fault: clients learn its kind, the rank's log the rest.
    Raises a ``DistributedFailure``: the replica is at its end, and whoever waits hears that from its launcher."""
    if isinstance(error, DistributedFailure):
        raise error
    if isinstance(error, DescantError):
        return error
    log.error("failed in the rank", exc_info=error)
    return ServerError(f"failed with {type(error).__name__} in the rank (its log says more)")
