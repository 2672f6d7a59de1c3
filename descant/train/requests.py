"""The rules of training requests: whose gradient counts, when, and whose fault a failed pass is. No torch.

A request (one ``ForwardBackward``) is opened, its datums run in any number of microbatches beside other requests'
datums, and it is closed: either its whole gradient counts, or none of it.

    learner = Learner(runner)                 # any PassRunner: train.passes has the one on torch
    request = learner.open(command)           # checked; its gradient goes into the model's own, or into scratch
    learner.run([Part(request=request, datum=0), …])   # one pass; several requests, several adapters
    output = learner.close(request)           # commits, or raises and leaves nothing behind
    learner.optim_step(model_id, params)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from descant.errors import DescantError, NotFound, ServerError, UserError
from descant.train.check import check_adam, check_forward_backward, loss_fn_config
from descant.train.results import Contribution, Passes, assemble
from descant.train.runner import (
    DatumResult,
    Gradient,
    LaunchedPass,
    Part,
    PassFailure,
    PassItem,
    PassRunner,
    RequestKey,
)
from descant.types import AdamParams, ForwardBackward, ForwardBackwardOutput, OptimStepOutput

if TYPE_CHECKING:
    import torch

SAFE_SUM = 1e38
"""Sums that are smaller are finite in float32, rounding and all."""


@dataclass(slots=True, kw_only=True)
class _Request:
    """``gradient``: where passes add it up; None: forward only."""

    command: ForwardBackward
    computed_as: str | None
    """The loss that is computed, where another was asked for."""
    config: Mapping[str, float]
    gradient: Gradient | None
    passes: Passes = field(default_factory=Passes)
    done: list[tuple[int, ...]] = field(default_factory=list)
    """The datums of each pass that is in its gradient."""
    launched: set[int] = field(default_factory=set)
    """The datums that have been in a pass, which the device may still be busy with."""
    losses: dict[int, float] = field(default_factory=dict)
    entropies: dict[int, tuple[float, int]] = field(default_factory=dict)
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    largest: float | None = None
    """The largest magnitude in its gradient, as its last pass found; None: not measured."""
    error: DescantError | None = None

    def __str__(self) -> str:
        return f"forward_backward with seq_id {self.command.seq_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingPass:
    """A pass that was launched and not waited for. ``opened``: the requests in it, closed meanwhile or not.
    ``complete``: those whose gradients lack nothing once it is done, in the order of its ``magnitudes``."""

    launched: LaunchedPass
    opened: Mapping[RequestKey, _Request]
    complete: Sequence[RequestKey]


class Learner:
    def __init__(
        self, runner: PassRunner, *, computed_as: Mapping[str, str] | None = None, peak_flops: float | None = None
    ):
        """``computed_as``: losses that are computed as another. ``peak_flops``: FLOP/s of large products on this
        device; None: no ``mfu`` among the metrics."""
        self.runner = runner
        self._computed_as = computed_as or {}
        self._peak_flops = peak_flops
        self._open: dict[RequestKey, _Request] = {}
        self._pending: _PendingPass | None = None
        self._bounds: dict[str, float] = {}
        """No number of a model's gradient, as far as it counts, is larger than this; not there: unknown."""
        self._poisoned: dict[str, str] = {}
        """Why a model's gradient is not whole: the first reason since its last step."""

    # ------------------------------------------------------------------------------------------------ requests
    def open(self, command: ForwardBackward) -> RequestKey:
        """Checks everything that can be checked before a pass (``train.check``) and says where the gradient goes: the
        model's own while that holds nothing (and no other open request has it), otherwise scratch. Raises ``UserError``
        or ``NotFound`` and has changed nothing then, except that a failed backward is remembered."""
        key = (command.model_id, command.seq_id)
        state = self.runner.state(command.model_id)
        if (computed_as := self._computed_as.get(command.loss_fn)) is not None:
            command = replace(command, loss_fn=computed_as)
        try:
            check_forward_backward(command, self.runner.facts)
            if key in self._open:
                raise ServerError(f"forward_backward with seq_id {command.seq_id} is open already")
            gradient = None
            if not command.forward_only:
                gradient = Gradient(model_id=command.model_id)
                if state.has_gradient or self._holder_of_own(command.model_id) is not None:
                    gradient = self.runner.allocate(command.model_id)
        except DescantError as error:
            if not command.forward_only:
                self.poison(command.model_id, f"forward_backward with seq_id {command.seq_id} failed: {error}")
            if computed_as is not None and isinstance(error, UserError):
                raise UserError(
                    f"{error} (this server computes the loss_fn of the request as {computed_as!r})"
                ) from None
            raise
        self._open[key] = _Request(
            command=command, computed_as=computed_as, config=loss_fn_config(command), gradient=gradient
        )
        return key

    def run(self, parts: Sequence[Part], *, backward: bool = False) -> None:
        """One forward (and backward) pass over the datums of ``parts``. A datum whose loss is not finite marks its
        request as failed and adds nothing. After an exception (out of memory) the pass is run again in parts: what
        fails alone fails its request, whose ``close`` says so, and the others' gradients are whole (with the last bits
        of smaller passes).

        What a datum gives has the same bits again only in a pass of the same datums, with as many threads: on a CPU,
        callers make each pass of one request's (``ranks.partition.cut_into_pieces``), and it is first run again whole.

        Where the runner is asynchronous it returns when the pass is launched, and has then waited for the one before:
        what the host does for a pass, the device need not wait for. ``wait`` waits for it.

        In ``lockstep``, ``backward`` says whether any rank's pass goes backward now, a rank without datums makes an
        empty pass, and a failure is raised."""
        items = self._items(parts)
        if self.runner.lockstep:
            self._run_pass(items, backward=backward)
        elif self.runner.facts.packable:
            self._run_pass(items)
        else:
            for item in items:
                self._run_pass([item])

    def wait(self) -> None:
        """For the pending pass, if there is one, and takes its result."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        result = pending.launched.wait()
        magnitudes = dict(zip(pending.complete, result.magnitudes, strict=True))
        by_request: dict[RequestKey, list[DatumResult]] = {}
        for datum in result.datums:
            by_request.setdefault(datum.part.request, []).append(datum)
        for request, datums in by_request.items():
            opened = pending.opened[request]
            for datum in datums:
                index = datum.part.datum
                opened.losses[index], opened.entropies[index] = datum.loss, datum.entropy
                opened.logprobs[index] = datum.logprobs
                if opened.error is None and datum.not_finite_at is not None:
                    opened.error = _not_finite(opened.command, datum, datum.not_finite_at)
            opened.largest = magnitudes.get(request)
            opened.done.append(tuple(datum.part.datum for datum in datums))
            passes = opened.passes
            passes.count += 1
            passes.tokens += sum(datum.tokens for datum in datums)
            passes.seconds += result.seconds
            passes.all_tokens += result.tokens
            passes.all_flops += result.flops
            passes.adapters = max(passes.adapters, result.adapters)
            passes.memory_bytes = result.memory_bytes

    @property
    def has_launched_pass(self) -> bool:
        """Whether a pass was launched that ``wait`` has not waited for."""
        return self._pending is not None

    def contributions(self, requests: Sequence[RequestKey]) -> dict[RequestKey, Contribution]:
        """What this rank has of open requests, their gradients checked; changes nothing. Where several ranks share
        them, each is given all of theirs when it closes a request."""
        if requests:
            self.wait()
        self._measure([opened for request in requests if (opened := self._open[request]).largest is None])
        contributions = {}
        for request in requests:
            opened = self._open[request]
            if opened.error is None and opened.largest is not None:
                try:
                    _check_finite(opened.largest, "the gradient")
                except UserError as error:
                    opened.error = error
            contributions[request] = Contribution(
                losses=opened.losses,
                entropies=opened.entropies,
                logprobs=opened.logprobs,
                passes=opened.passes,
                error=opened.error,
            )
        return contributions

    def _measure(self, requests: Sequence[_Request]) -> None:
        """Waits for the device, if there is something to measure."""
        unknown = [
            (opened, opened.gradient) for opened in requests if opened.error is None and opened.gradient is not None
        ]
        if unknown:
            magnitudes = self.runner.magnitudes([gradient for _, gradient in unknown])
            for (opened, _), magnitude in zip(unknown, magnitudes, strict=True):
                opened.largest = magnitude

    def close(self, request: RequestKey, contributions: Sequence[Contribution] | None = None) -> ForwardBackwardOutput:
        """Commits: the gradient is finite as a whole, and joins the model's own. The result's metrics are those of
        ``results.assemble``. Raises the request's ``UserError`` (naming the datum) or ``ServerError`` after clearing
        its part; the model's next step will then fail.

        ``contributions``: every rank's, where several share the request; the first error among them is the
        request's."""
        if contributions is None:
            contributions = [self.contributions([request])[request]]
        opened = self._open.pop(request)
        try:
            for part in contributions:
                if part.error is not None:
                    raise part.error
            done = {index for part in contributions for index in part.losses}
            if len(done) != len(opened.command.data):
                raise ServerError(f"{opened} was closed after {len(done)} of its {len(opened.command.data)} datums")
            if opened.gradient is not None:
                self._commit(opened, opened.gradient, alone=len(contributions) == 1)
        except DescantError as error:
            self._discard(opened)
            if opened.gradient is not None:
                self.poison(opened.command.model_id, f"{opened} failed: {error}")
            raise
        return assemble(opened.command, contributions, computed_as=opened.computed_as, peak_flops=self._peak_flops)

    def refuse(self, command: ForwardBackward, why: DescantError) -> None:
        """Some rank could not open it: as if this one could not. The model is there."""
        opened = self._open.pop((command.model_id, command.seq_id), None)
        if opened is not None:
            self._discard(opened)
        if not command.forward_only:
            self.poison(command.model_id, f"forward_backward with seq_id {command.seq_id} failed: {why}")

    def abandon(self, request: RequestKey) -> None:
        """Drops an open request without a result (its caller is gone). Idempotent."""
        opened = self._open.pop(request, None)
        if opened is not None:
            self._discard(opened)
            if opened.gradient is not None:
                self.poison(opened.command.model_id, f"{opened} was abandoned")

    def poison(self, model_id: str, why: str) -> None:
        """A backward of this model was refused or lost: its gradient is not whole, and the next step must fail with
        ``why``, the first reason since the last step."""
        self._poisoned.setdefault(model_id, why)

    def forget(self, model_id: str) -> None:
        """The model was deleted or loaded anew: drops open requests and remembered failures."""
        for key in [key for key in self._open if key[0] == model_id]:
            self._discard(self._open.pop(key))
        self._poisoned.pop(model_id, None)
        self._bounds.pop(model_id, None)

    # ------------------------------------------------------------------------------------------------ optimiser steps
    def has_pending_gradient(self, model_id: str) -> bool:
        return self.runner.state(model_id).has_gradient

    def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput:
        """``optim_steps`` of one model, which need not be pinned. Raises what went wrong."""
        [outcome] = self.optim_steps([(model_id, params)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamParams]], *, gradients_ready: torch.cuda.Event | None = None
    ) -> list[OptimStepOutput | Exception]:
        """Steps of these models, all different and pinned (``PassRunner.step``, also for ``gradients_ready``); clears
        their gradients. What one of them is refused for is its own outcome, and the others step.

        Metrics have keys ``grad_norm:mean`` (before clipping, over the whole gradient) and ``step:max``. ``UserError``
        with weights and moments unchanged and the gradient cleared when a backward since the last step failed (naming
        its seq_id), when a parameter is out of range, or when the step would make a weight non-finite. Without any
        backward since the last step (or since it was made or loaded) a model stays as it is, moments and step count
        too, as torch leaves a parameter without ``grad``; ``skipped:max``, which is 1, says so. A gradient of zeros is
        one: AdamW moves the weights by its moments and decay."""
        outcomes: list[OptimStepOutput | Exception | None] = [None] * len(steps)
        opened = {key[0]: request for key, request in self._open.items() if request.gradient is not None}
        ready: list[int] = []
        used: list[str] = []
        for number, (model_id, params) in enumerate(steps):
            try:
                state = self.runner.state(model_id)
                if model_id in opened:
                    raise ServerError(f"optim_step came while {opened[model_id]} was open")
                if state.has_gradient:
                    used.append(model_id)
                if (why := self._poisoned.pop(model_id, None)) is not None:
                    raise UserError(
                        f"optim_step changed nothing and cleared the gradient, since a part of it is missing: {why}"
                    )
                check_adam(params)
            except DescantError as error:
                outcomes[number] = error
            else:
                if state.has_gradient:
                    ready.append(number)
                else:
                    metrics = {"grad_norm:mean": 0.0, "step:max": float(state.step), "skipped:max": 1.0}
                    outcomes[number] = OptimStepOutput(metrics=metrics)
        try:
            taken = (
                self.runner.step([steps[number] for number in ready], gradients_ready=gradients_ready) if ready else []
            )
        finally:
            self.runner.clear(used)
            for model_id in used:
                self._bounds.pop(model_id, None)
        for number, step in zip(ready, taken, strict=True):
            outcomes[number] = (
                step
                if isinstance(step, Exception)
                else OptimStepOutput(metrics={"grad_norm:mean": step.grad_norm, "step:max": float(step.step)})
            )
        return [outcome for outcome in outcomes if outcome is not None]

    # ------------------------------------------------------------------------------------------------ gradients
    def _holder_of_own(self, model_id: str) -> _Request | None:
        """The open request whose passes add to the model's own gradient."""
        own = Gradient(model_id=model_id)
        return next((opened for opened in self._open.values() if opened.gradient == own), None)

    def _commit(self, opened: _Request, gradient: Gradient, *, alone: bool) -> None:
        """Makes the request's gradient, which is finite, part of its model's. Raises ``UserError`` and has changed
        nothing then: when their sum is not. Not ``alone``, that is left to the optimiser step, since ranks would not
        agree on it before their gradients are added up."""
        runner, model_id = self.runner, opened.command.model_id
        runner.state(model_id)
        magnitude = math.inf if opened.largest is None else opened.largest
        if gradient.scratch is not None:
            holder = self._holder_of_own(model_id)
            if holder is not None:  # it may still fail: its part moves out of the way, into this one's scratch
                runner.swap_own(gradient)
                holder.gradient = gradient
            else:
                bound = magnitude + self._bounds.get(model_id, math.inf)
                runner.add_own(gradient)
                if alone and not bound < SAFE_SUM:  # otherwise there is no need to wait for the device
                    [bound] = runner.magnitudes([gradient])
                    _check_finite(bound, "the sum of this gradient and those before it")
                runner.move_to_own(gradient)
                magnitude = bound
        self._bounds[model_id] = magnitude
        runner.keep_gradient(model_id)

    def _discard(self, opened: _Request) -> None:
        if opened.gradient is not None:
            self.runner.free(opened.gradient)

    # ------------------------------------------------------------------------------------------------ passes
    def _runs(self, request: RequestKey) -> bool:
        """Not for a request that was abandoned since the turn was chosen, or that has failed already."""
        return request in self._open and self._open[request].error is None

    def _items(self, parts: Sequence[Part]) -> list[PassItem]:
        items = []
        there: set[RequestKey] = set()
        for part in parts:
            if not self._runs(part.request):
                continue
            opened = self._open[part.request]
            if part.request not in there:
                try:
                    self.runner.state(opened.command.model_id)
                except NotFound as error:
                    opened.error = error
                    continue
                there.add(part.request)
            item = PassItem(
                part=part,
                datum=opened.command.data[part.datum],
                loss_fn=opened.command.loss_fn,
                config=opened.config,
                gradient=opened.gradient,
            )
            items.append(item)
        return items

    def _run_pass(self, items: Sequence[PassItem], *, backward: bool = False, again: bool = False) -> None:
        """One pass, or after a failure as many as it takes to find whose fault it was: first each request by itself,
        then each datum of the one that fails ``again``. What fails alone fails its request; the others end as if it
        had never been there."""
        items = [item for item in items if self._runs(item.part.request)]
        if not items:
            if self.runner.lockstep:
                self.runner.empty_pass(backward=backward)
            return
        failure = self._launch(items, backward=backward)
        if failure is None:
            return
        self.wait()
        self.runner.recover()
        if again and len(items) == 1:
            [item] = items
            why = f"data[{item.part.datum}], alone in its pass, {failure.why}"
            self._open[item.part.request].error = ServerError(why)
            return
        requests = {item.part.request: self._open[item.part.request] for item in items}
        for request, opened in requests.items():
            own = [item for item in items if item.part.request == request]
            for datums in self._undo(opened) if failure.wrote_gradients else []:
                self._run_pass(self._items([Part(request=request, datum=datum) for datum in datums]))
            for group in [[item] for item in own] if again else [own]:
                self._run_pass(group, again=True)

    def _launch(self, items: Sequence[PassItem], *, backward: bool) -> PassFailure | None:
        """One pass. What went wrong, if something did: then it counts for none of its requests. Raises it in
        ``lockstep``."""
        opened = {item.part.request: self._open[item.part.request] for item in items}
        complete = self._complete_with(items)
        launched = self.runner.launch(items, complete=list(complete.values()), backward=backward)
        if isinstance(launched, PassFailure):
            return launched
        for item in items:
            opened[item.part.request].launched.add(item.part.datum)
        self.wait()
        self._pending = _PendingPass(launched=launched, opened=opened, complete=tuple(complete))
        if not self.runner.asynchronous:
            self.wait()
        return None

    def _complete_with(self, items: Sequence[PassItem]) -> dict[RequestKey, Gradient]:
        """The gradients of requests of whose datums none is missing when these are done."""
        done: dict[RequestKey, set[int]] = {}
        for item in items:
            done.setdefault(item.part.request, set()).add(item.part.datum)
        complete = {}
        for request, datums in done.items():
            opened = self._open[request]
            if opened.gradient is not None and len(datums | opened.launched) == len(opened.command.data):
                complete[request] = opened.gradient
        return complete

    def _undo(self, opened: _Request) -> list[tuple[int, ...]]:
        """A failed pass may have left a part of its gradient in the request's: empties it, and returns the passes that
        were in it, to be run again."""
        if opened.gradient is None:
            return []
        self.runner.zero(opened.gradient)
        done, opened.done = opened.done, []
        return done


def _not_finite(command: ForwardBackward, result: DatumResult, position: int) -> UserError:
    inputs = command.data[result.part.datum].loss_fn_inputs
    given = "".join(
        f", {name} {float(inputs[name][position]):g}" for name in ("logprobs", "advantages") if name in inputs
    )
    return UserError(
        f"data[{result.part.datum}] has a loss that is not finite at position {position}: loss_fn "
        f"{command.loss_fn!r} of log-probability {np.array2string(result.logprobs[position], precision=4)}{given}"
    )


def _check_finite(magnitude: float, what: str) -> None:
    if not math.isfinite(magnitude):
        raise UserError(f"{what} is not finite, expected finite numbers, although the loss of every datum is")
