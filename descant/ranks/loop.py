"""The turn loop: what waits on rank 0, one decision at a time, executed on one thread.

    inbox → queues → decide → Operation → Executor → responses

All torch work of a rank happens in ``run``'s thread. Where a replica has several ranks, rank 0 alone has the loop, and
its executor makes all of them execute each operation (``spmd``). Files are read and written by two threads of their
own, which hand plain host tensors over and compute nothing. An exception in a turn fails what was in that turn and no
more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from descant.errors import DescantError, ServerError
from descant.pauses import watch_collections
from descant.ranks.channel import TurnStatus
from descant.ranks.decide import IDLE, ROWS, SAMPLE, TRAIN, Choice, Kind, row_order
from descant.ranks.executor import Executor, to_descant_error
from descant.ranks.ops import (
    Background,
    Cancel,
    Drop,
    Fail,
    Idle,
    Microbatch,
    Operation,
    Outcome,
    Prefetch,
    Publish,
    RankRequest,
    RankResponse,
    Release,
    Rows,
    Sample,
    Stats,
    Stop,
    Turns,
    source_of,
)
from descant.ranks.partition import balanced_shares, piece_shares
from descant.ranks.queues import Entry, Queues
from descant.ranks.sampling_dispatcher import SamplingDispatcher
from descant.ranks.snapshot_room import SnapshotRoom
from descant.ranks.turn_trace import TurnTrace
from descant.types import Command, ForwardBackwardOutput, Snapshot, SnapshotRef

if TYPE_CHECKING:
    from descant.train.runner import RequestKey

log = logging.getLogger(__name__)

QUIET_S = 0.0005
"""A rank with nothing to do waits until nothing more has come for so long …"""
BURST_S = 0.004
"""… but no longer than this."""

SAVING_S = 5.0
"""How often a rank that does nothing but save shows that it lives."""


@dataclass(frozen=True, slots=True)
class _Callback:
    """A call that a file thread posts to the loop's thread."""

    run: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A microbatch, and the requests that have datums in it and are not answered."""

    op: Microbatch
    commands: Mapping[RequestKey, Command]


class TurnLoop:
    def __init__(
        self,
        executor: Executor,
        *,
        respond: Callable[[RankResponse], None],
        turn_status: TurnStatus,
        time_share: float,
        max_pass_s: float,
        seconds: Callable[[], float] = time.monotonic,
    ):
        """``respond`` is called by the loop's and the file threads. ``executor`` is used from ``run``'s thread on.
        ``time_share``: seconds of sampling for each second of training while both wait. ``max_pass_s``: of a training
        turn while sequences are sampled. ``seconds`` measures how long requests wait and turns take."""
        self._executor = executor
        self._info = executor.info
        self._respond = respond
        self._turn_status = turn_status
        self._seconds = seconds
        self._inbox: queue.SimpleQueue[RankRequest | _Callback] = queue.SimpleQueue()
        self._queues = Queues(
            executor.memory,
            num_ranks=executor.info.num_ranks,
            microbatch_tokens=executor.info.microbatch_tokens,
            piece_tokens=executor.info.piece_tokens,
            packable=executor.info.facts.packable,
            shares={TRAIN: 1.0, SAMPLE: time_share},
            max_pass_s=max_pass_s,
        )
        self._sampling = SamplingDispatcher(executor, respond)
        self._snapshot_room = SnapshotRoom(executor.memory)
        self._turn = 0
        self._trace = TurnTrace(seconds)
        self._stopped = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="descant-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="descant-write")
        self._writes: list[Future[Any]] = []

    def post(self, request: RankRequest) -> None:
        """Any thread."""
        self._inbox.put(request)

    def run(self) -> None:
        """Until ``Stop``. Work that is not done then is not answered."""
        watch_collections()
        trace = self._trace
        trace.begin()
        try:
            while not self._stopped:
                self._take_requests()
                trace.mark("take")
                can_sample = self._sampling.has_work()
                choice = self._queues.choose({SAMPLE: self._sampling.num_models} if can_sample else {})
                trace.mark("decide")
                if choice.kind == IDLE:
                    if not self._stopped:
                        self._wait()
                    continue
                if choice.kind == TRAIN and can_sample and self._info.overlaps:
                    self._train_and_sample(choice)
                else:
                    seconds = self._timed(choice.kind, partial(self._execute, choice), sampling_waits=can_sample)
                    self._queues.ran(choice.kind, seconds)
            self._executor.execute(Stop())
        finally:
            self._reader.shutdown(wait=False, cancel_futures=True)
            self._writer.shutdown(wait=False, cancel_futures=True)

    def _wait(self) -> None:
        timeouts = [] if self._info.idle_s is None else [self._info.idle_s]
        if self._is_saving():
            timeouts += [SAVING_S, max(0.0, self._snapshot_room.expires_s - self._seconds())]
        try:
            request = self._inbox.get(timeout=min(timeouts, default=None))
        except queue.Empty:
            if self._is_saving():  # which ends by deadlines of its own: whoever watches is to see that we live
                self._turn += 1
                self._describe("")
            self._executor.execute(Idle())
            self._trace.idle()
            return
        trace = self._trace
        trace.idle()
        self._take(request)
        trace.mark("take")
        # Requests come in bursts. A pass of the first alone would keep all others waiting for as long as one of all.
        until = self._seconds() + BURST_S
        with contextlib.suppress(queue.Empty):
            while not self._stopped and self._seconds() < until:
                request = self._inbox.get(timeout=QUIET_S)
                trace.idle()
                self._take(request)
                trace.mark("take")
        trace.idle()

    def _is_saving(self) -> bool:
        """Whether anything is written behind the turns, or waits for that."""
        self._writes = [writing for writing in self._writes if not writing.done()]
        return bool(self._writes) or math.isfinite(self._snapshot_room.expires_s)

    def _stats(self) -> Mapping[str, float]:
        return {**self._executor.execute(Stats()), **self._sampling.stats(), **self._trace.stats()}

    def _describe(self, what: str) -> None:
        self._turn_status.write(self._turn, what)

    # ------------------------------------------------------------------------------------------------ requests
    def _take_requests(self) -> None:
        for model_id, _ in self._snapshot_room.expire(self._seconds()):
            self._queues.read(model_id)
        while not self._stopped:
            try:
                request = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._take(request)

    def _take(self, request: RankRequest | _Callback) -> None:
        if isinstance(request, _Callback):
            request.run()
            return
        id, op = request.id, request.op
        match op:
            case Stop():
                self._stopped = True
            case Sample():
                self._sampling.start(id, op.request)
            case Cancel():
                self._sampling.cancel(op.request_id)
            case Publish() if op.ref.directory is None or self._sampling.is_published(op.ref.version):
                self._answer(id, lambda: self._sampling.publish(op.ref, None))
            case Publish():
                self._read(op, lambda loaded: self._answer(id, lambda: self._sampling.publish(op.ref, loaded())))
            case Release():
                self._answer(id, lambda: self._sampling.release(op.version))
            case Stats():
                self._answer(id, self._stats)
            case Turns():
                self._answer(id, self._trace.report)
            case Drop():
                self._answer(id, lambda: self._executor.execute(op))
                self._free_snapshot((op.ref.version.model_id, op.ref.version.number))
            case Operation():
                self._answer(id, lambda: self._executor.execute(op))
            case _:
                self._enqueue(id, op)

    def _answer(self, id: int, do: Callable[[], Any]) -> None:
        """With what comes of it, or of what goes on behind the turns."""
        try:
            result = do()
        except Exception as error:
            self._respond(RankResponse(id=id, error=to_descant_error(error)))
            return
        if not isinstance(result, Background):
            self._respond(RankResponse(id=id, result=result))
            return

        def written(writing: Future[Any]) -> None:
            if (error := writing.exception()) is not None:
                self._respond(RankResponse(id=id, error=to_descant_error(error)))
            else:
                self._respond(RankResponse(id=id, result=writing.result()))

        writing = self._writer.submit(result.run)
        self._writes.append(writing)
        writing.add_done_callback(written)

    def _read(self, op: Command | Operation[Any], then: Callable[[Callable[[], Any]], None]) -> Future[Any] | None:
        """Begins to read what ``op`` needs, if it needs anything. When that is done ``then`` is called on the loop's
        thread, with a function that returns the tensors or raises the error."""
        if (source := source_of(op)) is None:
            return None
        reading = self._reader.submit(self._executor.read, source)
        reading.add_done_callback(lambda _: self._inbox.put(_Callback(lambda: then(reading.result))))
        return reading

    def _enqueue(self, id: int, command: Command) -> None:
        if "train" not in self._info.roles:
            error = ServerError(f"{type(command).__name__} came to ranks that only sample")
            self._respond(RankResponse(id=id, error=error))
            return
        entry = Entry(id, command, self._seconds())
        # Read while the model's earlier commands run; the loop is woken when it is there.
        entry.reading = self._read(command, lambda loaded: self._queues.read(command.model_id))
        self._queues.add(entry)

    # ------------------------------------------------------------------------------------------------ turns
    def _timed(self, kind: Kind, execute: Callable[[], None], *, sampling_waits: bool) -> float:
        """A turn, and what it took in seconds."""
        self._turn += 1
        self._trace.turn_began(kind, sampling_waits=sampling_waits)
        execute()
        self._describe("")
        return self._trace.turn_ended(kind, sampling_waits=self._sampling.has_work())

    def _execute(self, choice: Choice) -> None:
        self._prefetch(choice)
        if choice.kind == TRAIN:
            begun = self._microbatch(choice)
            self._end_microbatch(begun, begun.op)
        elif choice.kind == ROWS:
            if commands := self._with_room(choice.commands):
                self._run_rows(commands)
        else:
            self._sampling.step(self._describe, self._trace)

    def _train_and_sample(self, choice: Choice) -> None:
        """A training turn and a sampling turn inside it: while the device computes the pass the host plans the step
        that follows, so the device never waits for it. What a pass closes it closes when the device has done it."""
        begun: list[_Begun] = []

        def begin() -> None:
            self._prefetch(choice)
            begun.append(self._begin_microbatch(choice))

        began_s = self._timed(TRAIN, begin, sampling_waits=True)
        sampled_s = self._timed(SAMPLE, lambda: self._sampling.step(self._describe, self._trace), sampling_waits=True)
        [last] = begun
        closing = replace(last.op, opens=(), shares=tuple(() for _ in last.op.shares), sampling=True)
        closed_s = self._timed(TRAIN, lambda: self._end_microbatch(last, closing), sampling_waits=bool(self._sampling))
        self._queues.ran(TRAIN, began_s + closed_s, done_s=began_s + sampled_s + closed_s)
        self._queues.ran(SAMPLE, sampled_s)

    def _prefetch(self, choice: Choice) -> None:
        if "train" in self._info.roles:  # what is sampled is not prefetched
            soon, keep = self._queues.prefetch_order(choice), tuple(sorted(choice.model_ids))
            self._executor.execute(Prefetch(model_ids=soon, keep=keep))
            self._trace.mark("prefetch")

    def _begin_microbatch(self, choice: Choice) -> _Begun:
        """Launches it, and closes nothing yet. What could not be opened is answered, and left out of what is left."""
        begun = self._microbatch(choice)
        try:
            outcomes = self._executor.execute(replace(begun.op, closes=(), sampling=False))
        except Exception as error:
            outcomes = self._fail_turn(error, list(begun.commands.items()))
        self._trace.mark("run")
        self._respond_outcomes(outcomes)
        ended = {outcome.key for outcome in outcomes}
        return _Begun(
            op=replace(begun.op, closes=tuple(key for key in begun.op.closes if key not in ended)),
            commands={key: command for key, command in begun.commands.items() if key not in ended},
        )

    def _end_microbatch(self, begun: _Begun, op: Microbatch) -> None:
        """Executes ``op``, which is all of it or its end."""
        try:
            outcomes = self._executor.execute(op)
        except Exception as error:
            outcomes = self._fail_turn(error, list(begun.commands.items()))
        self._trace.mark("run")
        self._respond_outcomes(outcomes)

    def _microbatch(self, choice: Choice) -> _Begun:
        """Takes its datums out of the queues."""
        data, taken, info = choice.data, self._queues.take(choice, self._seconds()), self._info
        if info.piece_tokens is None:
            shares = balanced_shares(data, info.num_ranks, pass_tokens=info.microbatch_tokens)
        else:
            shares = piece_shares(data, info.num_ranks)
        op = Microbatch(
            opens=taken.opens,
            shares=shares,
            closes=taken.closes,
            backward=taken.backward,
            sampling=bool(self._sampling),
        )
        num_models = len(choice.model_ids)
        self._describe(f"a training pass of {len(data)} datums, {taken.tokens} tokens, for {num_models} models")
        self._trace.holds(len(data), taken.tokens)
        self._trace.mark("plan")
        return _Begun(op=op, commands={key: entry.command for key, entry in taken.entries.items()})

    def _with_room(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Without snapshots that there is no room for yet, and what comes after them in their models' queues."""
        runs: list[Command] = []
        blocked: set[str] = set()
        for command in commands:
            if command.model_id in blocked:
                continue
            key = command.model_id, command.seq_id
            # One that has waited already runs: there is room, or an error for it.
            if isinstance(command, Snapshot) and self._queues.entry(key).reading is None:
                granted = self._snapshot_room.ask(command, self._seconds())
                if granted is not None:
                    blocked.add(command.model_id)
                    self._queues.block(key, granted)
                    continue
            runs.append(command)
        return runs

    def _free_snapshot(self, key: RequestKey) -> None:
        for model_id, _ in self._snapshot_room.free(key):
            self._queues.read(model_id)

    def _run_rows(self, commands: Sequence[Command]) -> None:
        names = ", ".join(sorted({type(command).__name__ for command in commands}))
        self._describe(f"{len(commands)} row commands ({names})")
        loaded: dict[RequestKey, Any] = {}
        for command in commands:
            entry = self._queues.entry((command.model_id, command.seq_id))
            if entry.reading is not None:
                error = entry.reading.exception()
                loaded[entry.key] = entry.reading.result() if error is None else to_descant_error(error)
        op = Rows(commands=row_order(commands, self._executor.memory.is_resident), loaded=loaded)
        self._trace.holds(len(commands), 0)
        self._trace.mark("plan")
        try:
            outcomes = self._executor.execute(op)
        except Exception as error:
            outcomes = self._fail_turn(error, [((c.model_id, c.seq_id), c) for c in commands])
        self._trace.mark("run")
        self._respond_outcomes(outcomes)
        if "sample" not in self._info.roles:
            return
        to_publish = {(c.model_id, c.seq_id) for c in commands if isinstance(c, Snapshot) and c.to_publish}
        for outcome in outcomes:
            if outcome.key in to_publish and isinstance(outcome.result, SnapshotRef):
                self._publish_now(outcome.result)

    def _publish_now(self, ref: SnapshotRef) -> None:
        """In the turn that took the snapshot: by way of the server's request, some 0.2 ms later, it would come a step
        of the old weights later."""
        try:
            self._sampling.publish(ref, None)
        except Exception as error:  # the server's request gets the error
            version, failure = ref.version, to_descant_error(error)
            log.warning(
                "version %d of model %s could not be published early: %s", version.number, version.model_id, failure
            )

    def _fail_turn(self, error: Exception, commands: Sequence[tuple[RequestKey, Command]]) -> list[Outcome]:
        failure = to_descant_error(error)
        for key, command in commands:
            self._executor.execute(Fail(key=key, command=command, why=failure.message))
        return [Outcome(key=key, result=failure) for key, _ in commands]

    def _respond_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            entry = self._queues.end(outcome.key)
            if isinstance(outcome.result, DescantError):
                if isinstance(entry.command, Snapshot):  # it is not held
                    self._free_snapshot(entry.key)
                self._respond(RankResponse(id=entry.id, error=outcome.result))
            else:
                result = outcome.result
                if isinstance(result, ForwardBackwardOutput):
                    result = replace(result, metrics={**result.metrics, "wait_ms:max": 1000 * entry.waited_s})
                self._respond(RankResponse(id=entry.id, result=result))
