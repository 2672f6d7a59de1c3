"""One model's requests, from any order of arrival into its trainer in the one order that counts, as often as it takes.

What the trainer does not answer because its rank died is not over: the queue holds what comes, ``service.recovery``
makes the model again and has the queue send again what has no answer yet, and then the queue goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from descant.errors import DescantError, NotFound, RankDied, ServerError, UserError
from descant.ports import Clock, Trainer
from descant.service.jobs import Job, Jobs
from descant.service.order import CloseGap, Deliver, Event, Reject, Sequencer
from descant.types import Answer, Command, DeleteModel, ForwardBackward, LoadState, OptimStep, Rejected, Result

R = TypeVar("R")

MAX_CONSUMED = 4096
"""Rejected ids of one model that are kept while they wait for an earlier one."""

Finish = Callable[[asyncio.Future[Result]], Awaitable[Answer]]
"""From the trainer's result to the client's answer."""


class QueueWatcher(Protocol):
    """Who has to know what becomes of models' commands. All are called on the way, and must return at once."""

    def gap_closed(self, model_id: str, first: int, last: int, message: str) -> None:
        """These ids never came, and what comes under them later is not kept."""
        ...

    def sent(self, model_id: str, seq_id: int) -> None:
        """The trainer has this command, and when it is done there is no gradient."""
        ...

    def died(self, model_id: str) -> None:
        """The rank has died with something of the model's. From here on its queue holds what comes."""
        ...


@dataclass(slots=True, eq=False)
class QueuedCommand:
    """A command whose turn has come. ``command`` None: it is to be read from the journal. ``job`` None: nobody waits
    for its answer. ``outcome``: of its latest delivery, None before the first and once that has died; ``life``: of the
    model, in which that was. ``sent``: there is an outcome. ``settled``: none is being waited for or followed up."""

    seq_id: int
    command: Command | None
    num_bytes: int = 0
    job: Job | None = None
    finish: Finish | None = None
    outcome: asyncio.Future[Result] | None = None
    life: int = 0
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Work:
    """What a recovery would repeat: since the newest snapshot. ``seconds``: how long the model's commands took, from
    one answer to the next. ``since``: when the first was sent, None before it."""

    commands: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    since: float | None = None

    def add(self, other: Work) -> None:
        self.commands += other.commands
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds
        self.since = min((at for at in (self.since, other.since) if at is not None), default=None)


async def result_of(outcome: asyncio.Future[Result], expected: type[R]) -> R:
    """The trainer's answer. Whoever stops waiting for it does not take it from the trainer."""
    result = await asyncio.shield(outcome)
    if not isinstance(result, expected):
        raise ServerError(f"the trainer answered with {type(result).__name__}, expected {expected.__name__}")
    return result


def poisons_gradient(command: Command) -> bool:
    """Whether the next optimiser step must fail if this one does."""
    if isinstance(command, Rejected):
        return command.poisons_gradient
    return isinstance(command, ForwardBackward) and not command.forward_only


class CommandQueue:
    def __init__(
        self,
        *,
        model_id: str,
        trainer: Trainer,
        jobs: Jobs,
        clock: Clock,
        gap_timeout_s: float,
        watcher: QueueWatcher,
        next_seq_id: int = 1,
    ):
        """``next_seq_id``: of the first command that has not had its turn; above 1 for a model of an earlier server,
        whose queue holds what comes until ``resume``."""
        self._model_id = model_id
        self._trainer = trainer
        self._jobs = jobs
        self._clock = clock
        self._watcher = watcher
        self._sequencer: Sequencer[QueuedCommand] = Sequencer(first_seq_id=next_seq_id, gap_timeout_s=gap_timeout_s)
        self._open: dict[int, QueuedCommand] = {}
        """Those whose turn has come and that have no answer yet, or none that is written down."""
        self._unsent: dict[int, QueuedCommand] = {}
        """While the queue holds: those whose turn has come meanwhile."""
        self._at_trainer: dict[int, asyncio.Future[Result]] = {}
        self._rejected: dict[int, Rejected] = {}
        """What took the place of others. The journal has it a moment later."""
        self._died: set[int] = set()
        self._life = 0
        self._has_gradient = False
        self._last_end = 0.0
        self.held = False
        self.work = Work()

    def submit(self, command: Command, *, job: Job, finish: Finish, num_bytes: int = 0) -> None:
        """Goes to the trainer when its turn comes; ``finish`` makes the job's answer of what the trainer returns, and
        is called again for each delivery after one that died. ``num_bytes``: of its body in the journal."""
        self._offer(QueuedCommand(seq_id=command.seq_id, command=command, num_bytes=num_bytes, job=job, finish=finish))

    @property
    def next_seq_id(self) -> int:
        """Of the request that would go to the trainer at once."""
        return self._sequencer.next_seq_id

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an earlier one."""
        return self._sequencer.num_waiting

    def knows(self, seq_id: int) -> bool:
        """Whether this id has come already, or its place has passed: what comes under it is not kept."""
        return seq_id < self.next_seq_id or self._sequencer.waits_for(seq_id) is not None

    def consumes(self, seq_id: int) -> bool:
        """Whether ``consume`` would keep this id."""
        behind = seq_id > self.next_seq_id and self.num_waiting >= MAX_CONSUMED
        return not self.knows(seq_id) and not behind

    def consume(self, seq_id: int, message: str, *, poisons_gradient: bool = False) -> None:
        """An id whose request was rejected at once, so that what comes after it does not wait for it. Of those that
        would wait themselves ``MAX_CONSUMED`` are kept: a client with more rejected ones is broken."""
        if self.consumes(seq_id):
            self._offer(QueuedCommand(seq_id=seq_id, command=self._rejection(seq_id, message, poisons_gradient)))

    def expire(self) -> None:
        self._act(self._sequencer.expire(now=self._clock.monotonic()))

    def end(self, reason: str) -> None:
        """The model is going: all that waits behind a gap fails, and so does whatever still comes."""
        for event in self._sequencer.end(reason):
            if isinstance(event, Reject) and event.item.job is not None:
                self._jobs.fail(event.item.job, UserError(event.message))

    def create(self, command: Command, *, job: Job, finish: Finish) -> None:
        """The first command, before any other."""
        self._deliver(QueuedCommand(seq_id=command.seq_id, command=command, job=job, finish=finish))

    def delete(self) -> None:
        """The last command, after ``end``."""
        _look_at(self._trainer.submit(DeleteModel(model_id=self._model_id, seq_id=self._sequencer.next_seq_id)))

    def reason(self, job: Job) -> str | None:
        """Which gap ``job`` waits behind; None if it does not wait for one."""
        missing = self._sequencer.waits_for(job.seq_id)
        deadline = self._sequencer.deadline
        if job.submitted_at is not None or missing is None or deadline is None:
            return None
        seconds = max(0.0, deadline - self._clock.monotonic())
        return (
            f"{job.operation} (seq_id {job.seq_id}) waits for seq_id {missing} of the same model, which has not "
            f"arrived; it is abandoned in {seconds:.0f} s"
        )

    # ------------------------------------------------------------------------------------------------ again
    @property
    def open_seq_ids(self) -> Collection[int]:
        """Of commands whose turn has come and that have no answer, or none that is written down."""
        return self._open.keys()

    def hold(self) -> None:
        """Sends nothing until ``resume``."""
        self.held = True

    def begin_life(self) -> None:
        """The model is made again: what comes of earlier deliveries is no answer any more, unless it is one."""
        self.hold()
        self._life += 1
        self._has_gradient = False
        self.work = Work()

    def first_died(self) -> int | None:
        """Which command the trainer ran when its rank died, if it ran any; asked once for each death."""
        for seq_id, outcome in list(self._at_trainer.items()):
            if outcome.done():  # its callback comes later
                self._note_end(seq_id, outcome)
        first = min(self._died, default=None)
        self._died.clear()
        return first

    def rejected(self, seq_id: int) -> Rejected | None:
        """What was done in the place of a command that waited behind a gap."""
        return self._rejected.get(seq_id)

    def forget(self, *, up_to: int) -> None:
        """No recovery goes back so far."""
        for seq_id in [seq_id for seq_id in self._rejected if seq_id <= up_to]:
            del self._rejected[seq_id]

    def reopen(self, entry: QueuedCommand) -> None:
        """A command that an earlier server had taken and not answered; to be sent by ``send_again``."""
        self._begin(entry)

    def waits_again(self, entry: QueuedCommand) -> None:
        """A command of an earlier server that waits for an earlier one."""
        self._offer(entry)

    def entry(self, seq_id: int) -> QueuedCommand | None:
        """Of a command whose turn has come: one without an answer, or one that came while the queue holds."""
        return self._open.get(seq_id) or self._unsent.get(seq_id)

    async def settled(self, entry: QueuedCommand, timeout_s: float) -> bool:
        """Whether what follows on an earlier delivery of it comes to its end: then that is waited for. The trainer had
        answered before its rank died, and a file is being committed, or weights are published elsewhere."""
        either = {asyncio.ensure_future(entry.settled.wait()), asyncio.ensure_future(self._clock.sleep(timeout_s))}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in either:
                task.cancel()
        return entry.seq_id not in self._open

    def send_again(self, seq_id: int, command: Command) -> asyncio.Future[Result]:
        """To the trainer, which has the model as it was before it; whoever waits for its answer gets this one."""
        self._unsent.pop(seq_id, None)
        entry = self._open.get(seq_id) or QueuedCommand(seq_id=seq_id, command=command)
        entry.command = command
        return self._send(entry)

    def resume(self, *, after: int) -> None:
        """The trainer has all up to ``after``: what is held goes there, and whatever comes from now on."""
        self.held = False
        unsent, self._unsent = self._unsent, {}
        for seq_id in sorted(unsent):
            if seq_id > after:
                self._send_if_not_held(unsent[seq_id])

    # ----------------------------------------------------------------------------------------------------------------

    def _offer(self, entry: QueuedCommand) -> None:
        self._act(self._sequencer.offer(entry.seq_id, entry, now=self._clock.monotonic()))

    def _act(self, events: tuple[Event[QueuedCommand], ...]) -> None:
        gradient_is_poisoned = False
        for event in events:
            match event:
                case Deliver():
                    self._deliver(event.item)
                case CloseGap():
                    # It may have been a backward, so the next step would step half a batch.
                    self._watcher.gap_closed(self._model_id, event.first, event.last, event.message)
                    self._reject(event.first, event.message, poisons_gradient=True)
                    gradient_is_poisoned = True
                case Reject():
                    if event.in_place:
                        gradient_is_poisoned = self._fail_in_place(event, gradient_is_poisoned)
                    if event.item.job is not None:
                        self._jobs.fail(event.item.job, UserError(event.message))

    def _deliver(self, entry: QueuedCommand) -> None:
        self._begin(entry)
        self._send_if_not_held(entry)

    def _begin(self, entry: QueuedCommand) -> None:
        if entry.job is not None and entry.finish is not None:
            self._open[entry.seq_id] = entry
            entry.job.on_stored = partial(self._close, entry)
            self._jobs.start(entry.job, self._answer(entry, entry.finish))

    def _close(self, entry: QueuedCommand) -> None:
        self._open.pop(entry.seq_id, None)
        entry.settled.set()

    async def _answer(self, entry: QueuedCommand, finish: Finish) -> Answer:
        while True:
            while (outcome := entry.outcome) is None:
                await entry.sent.wait()
            life = entry.life
            try:
                return await finish(outcome)
            except DescantError as error:
                # With the model, or with what of it was being saved.
                died = isinstance(error, RankDied) or (self.held and isinstance(error, NotFound))
                if not died and life == self._life:
                    raise
                if entry.outcome is outcome:
                    entry.outcome = None
                    entry.sent.clear()
                    entry.settled.set()
                if died and life == self._life:
                    self._has_died()

    def _fail_in_place(self, event: Reject[QueuedCommand], gradient_is_poisoned: bool) -> bool:
        """Leaves the trainer as if each of these had reached it and failed there; whether a gradient is poisoned now.

        The step that waited is the step that must fail: the trainer gets it, rejects it because of what was lost, and
        clears the gradient, so that a fresh backward and step work. A second step, with nothing lost since, would
        be taken or skipped like any other, so it is not sent.
        """
        command = event.item.command
        assert command is not None, "what waits has been read"
        if isinstance(command, OptimStep) and gradient_is_poisoned:
            self._deliver(QueuedCommand(seq_id=event.seq_id, command=command))
            return False
        poisons = poisons_gradient(command)
        self._reject(event.seq_id, event.message, poisons_gradient=poisons)
        return gradient_is_poisoned or poisons

    def _reject(self, seq_id: int, message: str, *, poisons_gradient: bool) -> None:
        command = self._rejected[seq_id] = self._rejection(seq_id, message, poisons_gradient)
        self._deliver(QueuedCommand(seq_id=seq_id, command=command))

    def _rejection(self, seq_id: int, message: str, poisons_gradient: bool) -> Rejected:
        return Rejected(model_id=self._model_id, seq_id=seq_id, message=message, poisons_gradient=poisons_gradient)

    def _send_if_not_held(self, entry: QueuedCommand) -> None:
        if self.held:
            self._unsent[entry.seq_id] = entry
            return
        self._send(entry)
        if not self._has_gradient and not self.held:
            self._watcher.sent(self._model_id, entry.seq_id)

    def _send(self, entry: QueuedCommand) -> asyncio.Future[Result]:
        command = entry.command
        assert command is not None, "what is sent has been read"
        if poisons_gradient(command):
            self._has_gradient = True
        elif isinstance(command, OptimStep | LoadState):
            self._has_gradient = False
        now = self._clock.monotonic()
        self.work.add(Work(commands=1, num_bytes=entry.num_bytes, since=now))
        entry.life = self._life
        entry.settled.clear()
        outcome = entry.outcome = self._at_trainer[entry.seq_id] = self._trainer.submit(command)
        entry.sent.set()
        outcome.add_done_callback(partial(self._ended, entry.seq_id, entry.life, now))
        return outcome

    def _ended(self, seq_id: int, life: int, sent_at: float, outcome: asyncio.Future[Result]) -> None:
        now = self._clock.monotonic()
        self.work.seconds += now - max(sent_at, self._last_end)
        self._last_end = now
        self._note_end(seq_id, outcome)
        if life == self._life and is_death(outcome):
            self._has_died()

    def _note_end(self, seq_id: int, outcome: asyncio.Future[Result]) -> None:
        if self._at_trainer.get(seq_id) is outcome:
            del self._at_trainer[seq_id]
            if is_death(outcome):
                self._died.add(seq_id)

    def _has_died(self) -> None:
        self.hold()
        self._watcher.died(self._model_id)


def is_death(outcome: asyncio.Future[Result]) -> bool:
    """Of one that is done."""
    return not outcome.cancelled() and isinstance(outcome.exception(), RankDied)


def _look_at(outcome: asyncio.Future[Result]) -> None:
    """Not every outcome is awaited, and asyncio complains of errors that were not retrieved."""
    outcome.add_done_callback(lambda done: None if done.cancelled() else done.exception())
