"""One model's requests, from any order of arrival into its trainer in the one order that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from descant.errors import ServerError, UserError
from descant.ports import Clock, Trainer
from descant.service.jobs import Job, Jobs
from descant.service.order import CloseGap, Deliver, Event, Reject, Sequencer
from descant.types import Answer, Command, CreateModel, DeleteModel, ForwardBackward, OptimStep, Rejected, Result

R = TypeVar("R")

MAX_CONSUMED = 4096
"""Rejected ids of one model that are kept while they wait for an earlier one."""

Finish = Callable[[asyncio.Future[Result]], Awaitable[Answer]]
"""From the trainer's result to the client's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queued:
    """``job`` None: an id that is consumed and answered already; ``command`` takes its place."""

    job: Job | None
    command: Command
    finish: Finish | None


async def result_of(outcome: asyncio.Future[Result], expected: type[R]) -> R:
    """The trainer's answer. Whoever stops waiting for it does not take it from the trainer."""
    result = await asyncio.shield(outcome)
    if not isinstance(result, expected):
        raise ServerError(f"the trainer answered with {type(result).__name__}, expected {expected.__name__}")
    return result


class CommandQueue:
    def __init__(self, *, model_id: str, trainer: Trainer, jobs: Jobs, clock: Clock, gap_timeout_s: float):
        self._model_id = model_id
        self._trainer = trainer
        self._jobs = jobs
        self._clock = clock
        self._sequencer: Sequencer[_Queued] = Sequencer(first_seq_id=1, gap_timeout_s=gap_timeout_s)

    def submit(self, command: Command, *, job: Job, finish: Finish) -> None:
        """Goes to the trainer when its turn comes; ``finish`` makes the job's answer of what the trainer returns."""
        self._offer(_Queued(job=job, command=command, finish=finish))

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

    def consume(self, seq_id: int, message: str, *, poisons_gradient: bool = False) -> None:
        """An id whose request was rejected at once, so that what comes after it does not wait for it. Of those that
        would wait themselves ``MAX_CONSUMED`` are kept: a client with more rejected ones is broken."""
        behind = seq_id > self.next_seq_id and self.num_waiting >= MAX_CONSUMED
        if not self.knows(seq_id) and not behind:
            command = Rejected(
                model_id=self._model_id, seq_id=seq_id, message=message, poisons_gradient=poisons_gradient
            )
            self._offer(_Queued(job=None, command=command, finish=None))

    def expire(self) -> None:
        self._act(self._sequencer.expire(now=self._clock.monotonic()))

    def end(self, reason: str) -> None:
        """The model is going: all that waits behind a gap fails, and so does whatever still comes."""
        for event in self._sequencer.end(reason):
            if isinstance(event, Reject) and event.item.job is not None:
                self._jobs.fail(event.item.job, UserError(event.message))

    def create(self, command: CreateModel) -> asyncio.Future[Result]:
        """The first command, before any other."""
        return self._to_trainer(command)

    def delete(self) -> None:
        """The last command, after ``end``."""
        self._to_trainer(DeleteModel(model_id=self._model_id, seq_id=self._sequencer.next_seq_id))

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

    # ----------------------------------------------------------------------------------------------------------------

    def _offer(self, queued: _Queued) -> None:
        self._act(self._sequencer.offer(queued.command.seq_id, queued, now=self._clock.monotonic()))

    def _act(self, events: tuple[Event[_Queued], ...]) -> None:
        gradient_is_poisoned = False
        for event in events:
            match event:
                case Deliver():
                    self._run(event.item)
                case CloseGap():
                    # It may have been a backward, so the next step would step half a batch.
                    self._reject(event.first, event.message, poisons_gradient=True)
                    gradient_is_poisoned = True
                case Reject():
                    if event.in_place:
                        gradient_is_poisoned = self._fail_in_place(event, gradient_is_poisoned)
                    if event.item.job is not None:
                        self._jobs.fail(event.item.job, UserError(event.message))

    def _run(self, queued: _Queued) -> None:
        outcome = self._to_trainer(queued.command)
        if queued.job is not None and queued.finish is not None:
            self._jobs.start(queued.job, queued.finish(outcome))

    def _fail_in_place(self, event: Reject[_Queued], gradient_is_poisoned: bool) -> bool:
        """Leaves the trainer as if each of these had reached it and failed there; whether a gradient is poisoned now.

        The step that waited is the step that must fail: the trainer gets it, rejects it because of what was lost, and
        clears the gradient, so that a fresh backward and step work. A second step, with nothing lost since, would
        be taken or skipped like any other, so it is not sent.
        """
        command = event.item.command
        if isinstance(command, OptimStep) and gradient_is_poisoned:
            self._to_trainer(command)
            return False
        poisons = isinstance(command, ForwardBackward) and not command.forward_only
        poisons = poisons or (isinstance(command, Rejected) and command.poisons_gradient)
        self._reject(event.seq_id, event.message, poisons_gradient=poisons)
        return gradient_is_poisoned or poisons

    def _reject(self, seq_id: int, message: str, *, poisons_gradient: bool) -> None:
        self._to_trainer(
            Rejected(model_id=self._model_id, seq_id=seq_id, message=message, poisons_gradient=poisons_gradient)
        )

    def _to_trainer(self, command: Command) -> asyncio.Future[Result]:
        outcome = self._trainer.submit(command)
        outcome.add_done_callback(_look_at_it)
        return outcome


def _look_at_it(outcome: asyncio.Future[Result]) -> None:
    """Not every outcome is awaited, and asyncio complains of errors that were not retrieved."""
    if not outcome.cancelled():
        outcome.exception()
