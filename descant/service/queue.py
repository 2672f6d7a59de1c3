"""One model's requests, from any order of arrival into its trainer in the one order that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from descant.errors import UserError
from descant.ports import Clock, Trainer
from descant.service.jobs import Job, Jobs
from descant.service.order import Event, Fail, Missing, Run, Sequencer
from descant.types import Answer, Command, CreateModel, DeleteModel, ForwardBackward, OptimStep, Refused, Result

Finish = Callable[[asyncio.Future[Result]], Awaitable[Answer]]
"""From the trainer's result to the client's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queued:
    """``job`` None: an id that is consumed and answered already; ``command`` takes its place."""

    job: Job | None
    command: Command
    finish: Finish | None


class ModelQueue:
    def __init__(self, *, model_id: str, trainer: Trainer, jobs: Jobs, clock: Clock, hole_timeout_s: float):
        self._model_id = model_id
        self._trainer = trainer
        self._jobs = jobs
        self._clock = clock
        self._sequencer: Sequencer[_Queued] = Sequencer(first_seq_id=1, hole_timeout_s=hole_timeout_s)

    def submit(self, command: Command, *, job: Job, finish: Finish) -> None:
        """Goes to the trainer when its turn comes; ``finish`` makes the job's answer of what the trainer returns."""
        self._offer(_Queued(job=job, command=command, finish=finish))

    def consume(self, seq_id: int, message: str) -> None:
        """An id whose request was refused at once, so that what comes after it does not wait for it."""
        if seq_id >= self._sequencer.next_seq_id and self._sequencer.waits_for(seq_id) is None:
            command = Refused(model_id=self._model_id, seq_id=seq_id, message=message, loses_gradient=False)
            self._offer(_Queued(job=None, command=command, finish=None))

    def expire(self) -> None:
        self._act(self._sequencer.expire(now=self._clock.monotonic()))

    def end(self, reason: str) -> None:
        """The model is going: all that waits behind a hole fails, and so does whatever still comes."""
        for event in self._sequencer.end(reason):
            if isinstance(event, Fail) and event.item.job is not None:
                self._jobs.fail(event.item.job, UserError(event.message))

    def create(self, command: CreateModel) -> asyncio.Future[Result]:
        """The first command, before any other."""
        return self._to_trainer(command)

    def delete(self) -> None:
        """The last command, after ``end``."""
        self._to_trainer(DeleteModel(model_id=self._model_id, seq_id=self._sequencer.next_seq_id))

    def reason(self, job: Job) -> str | None:
        """Which hole ``job`` waits behind; None if it does not wait for one."""
        missing = self._sequencer.waits_for(job.seq_id)
        deadline = self._sequencer.deadline
        if job.submitted or missing is None or deadline is None:
            return None
        seconds = max(0.0, deadline - self._clock.monotonic())
        return (
            f"{job.operation} (seq_id {job.seq_id}) waits for seq_id {missing} of the same model, which has not "
            f"arrived; it is given up in {seconds:.0f} s"
        )

    # ----------------------------------------------------------------------------------------------------------------

    def _offer(self, queued: _Queued) -> None:
        self._act(self._sequencer.offer(queued.command.seq_id, queued, now=self._clock.monotonic()))

    def _act(self, events: tuple[Event[_Queued], ...]) -> None:
        gradient_is_lost = False
        for event in events:
            match event:
                case Run():
                    self._run(event.item)
                case Missing():
                    # It may have been a backward, so the next step would step half a batch.
                    self._refuse(event.first, event.message, loses_gradient=True)
                    gradient_is_lost = True
                case Fail():
                    if event.in_place:
                        gradient_is_lost = self._fail_in_place(event, gradient_is_lost)
                    if event.item.job is not None:
                        self._jobs.fail(event.item.job, UserError(event.message))

    def _run(self, queued: _Queued) -> None:
        outcome = self._to_trainer(queued.command)
        if queued.job is not None and queued.finish is not None:
            self._jobs.start(queued.job, queued.finish(outcome))

    def _fail_in_place(self, event: Fail[_Queued], gradient_is_lost: bool) -> bool:
        """Leaves the trainer as if each of these had reached it and failed there; whether a gradient is lost now.

        The step that waited is the step that must fail: the trainer gets it, refuses it because of what was lost, and
        clears the gradient, so that a fresh backward and step work. A second step, with nothing lost since, would
        really step, so it is not sent.
        """
        command = event.item.command
        if isinstance(command, OptimStep) and gradient_is_lost:
            self._to_trainer(command)
            return False
        loses = isinstance(command, ForwardBackward) and not command.forward_only
        loses = loses or (isinstance(command, Refused) and command.loses_gradient)
        self._refuse(event.seq_id, event.message, loses_gradient=loses)
        return gradient_is_lost or loses

    def _refuse(self, seq_id: int, message: str, *, loses_gradient: bool) -> None:
        self._to_trainer(
            Refused(model_id=self._model_id, seq_id=seq_id, message=message, loses_gradient=loses_gradient)
        )

    def _to_trainer(self, command: Command) -> asyncio.Future[Result]:
        outcome = self._trainer.submit(command)
        outcome.add_done_callback(_look_at_it)
        return outcome


def _look_at_it(outcome: asyncio.Future[Result]) -> None:
    """Not everybody awaits an outcome, and asyncio complains of errors that nobody looked at."""
    if not outcome.cancelled():
        outcome.exception()
