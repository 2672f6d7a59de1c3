"""Microbatches, gradients that count only when all of them worked, and optimiser steps. Torch, one thread.

A request (one ``ForwardBackward``) is opened, its datums run in any number of microbatches beside other requests'
datums, and it is closed: either its whole gradient counts, or none of it.

    learner.open(request, command)            # checked; gradient goes straight into the row, or into scratch
    learner.run([Part(request, 0), …])        # one pass; several requests, several adapters
    output = learner.close(request)           # commits, or raises and leaves nothing behind
    learner.optim_step(model_id, params)

Legend: T tokens of the pass, P places (``train.batch``), C places of a chunk, K targets a place.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from descant.errors import DescantError, NotFound, ServerError, UserError
from descant.model.base import BaseModel
from descant.model.head import ChunkLoss, HeadOutput
from descant.model.limit import Arithmetic, peak_bytes, squares
from descant.model.lora import LoraPass
from descant.model.passes import Pass, RowRef, to_device
from descant.train.batch import Item, Packed, pack, unpack
from descant.train.check import check_adam, check_forward_backward, loss_fn_config
from descant.train.loss import SEQUENCE_LOSSES, sequence_ratio, token_loss
from descant.train.optim import Row, adamw, largest
from descant.types import AdamParams, ForwardBackward, ForwardBackwardOutput, OptimStepOutput, input_length

logger = logging.getLogger(__name__)

RequestKey = tuple[str, int]
"""(model_id, seq_id)"""

SAFE_SUM = 1e38
"""Sums that are smaller are finite in float32, rounding and all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One datum of an open request: what microbatches are made of."""

    request: RequestKey
    datum: int


@dataclass(slots=True, kw_only=True)
class Passes:
    """What a request's passes were. ``tokens`` are those that were computed for it: shared ones once a pass.
    ``all_tokens`` and ``all_flops`` are the passes' own, whoever they were for. ``memory_bytes``: what the rank had
    taken at most when the last had run."""

    count: int = 0
    tokens: int = 0
    adapters: int = 0
    seconds: float = 0.0
    all_tokens: int = 0
    all_flops: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one rank has of a request: losses and log-probabilities of the datums that ran there, or why they failed.
    ``entropies``: of each of them, the sum over the places where its loss can have a derivative, and their number."""

    losses: Mapping[int, float]
    entropies: Mapping[int, tuple[float, int]]
    logprobs: Mapping[int, np.ndarray]
    passes: Passes
    error: DescantError | None


@dataclass(slots=True, kw_only=True)
class _Request:
    """``gradient``: its slot, the adapter's own or (``scratch``) one of this request alone; None: forward only."""

    command: ForwardBackward
    config: Mapping[str, float]
    rank_class: int
    gradient: int | None
    scratch: bool
    passes: Passes = field(default_factory=Passes)
    done: list[tuple[int, ...]] = field(default_factory=list)
    """The datums of each pass that is in its gradient."""
    launched: set[int] = field(default_factory=set)
    """The datums that have been in a pass, which the device may still be busy with."""
    losses: dict[int, float] = field(default_factory=dict)
    entropies: dict[int, tuple[float, int]] = field(default_factory=dict)
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    largest: float | None = None
    """The largest magnitude in its gradient row, as its last pass found; None: nobody looked."""
    error: DescantError | None = None

    def __str__(self) -> str:
        return f"forward_backward with seq_id {self.command.seq_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A pass that the device may still be busy with. ``results``: on the host, float32: losses [P], entropies [P],
    log-probabilities [P, K], and the largest magnitudes in the gradients of ``complete``, once ``done``."""

    packed: Packed
    opened: Mapping[RequestKey, _Request]
    results: torch.Tensor
    done: torch.cuda.Event | None
    complete: tuple[RequestKey, ...]
    began: float
    flops: float


class Learner:
    def __init__(
        self,
        model: BaseModel,
        *,
        computed_as: Mapping[str, str] | None = None,
        add_up: Callable[[torch.Tensor], None] | None = None,
        seconds: Callable[[], float] = time.perf_counter,
        share_prefixes: bool = True,
        matrix_rate: float | None = None,
    ):
        """``computed_as``: losses that are computed as another. ``add_up``: where several ranks share the datums of
        requests, makes of a gradient row the sum of theirs (the same calls on each rank, in the same order).
        ``seconds`` measures how long passes take.
        ``matrix_rate``: FLOP/s of large products on this device; None: nobody is told the fraction of it.
        ``share_prefixes`` False is for comparing the two."""
        self._model = model
        self._computed_as = computed_as or {}
        self._add_up = add_up
        self._seconds = seconds
        self._share_prefixes = share_prefixes
        self._matrix_rate = matrix_rate
        self._arithmetic = Arithmetic.of(model)
        self._open: dict[RequestKey, _Request] = {}
        self._flies = model.device.type == "cuda"
        """Whether a pass is looked at only when the next has been launched, or somebody asks for it."""
        self._flight: _Flight | None = None
        self._landed_at = -math.inf
        self._gradients_touched = False
        """Whether the pass that runs, or ran last, has begun to write into gradient rows."""
        self._bounds: dict[str, float] = {}
        """No number of a model's gradient, as far as it counts, is larger than this; not there: nobody knows."""
        self._lost: dict[str, str] = {}
        """Why a model's gradient is not whole: the first reason since its last step."""

    def open(self, command: ForwardBackward) -> RequestKey:
        """Checks everything that can be checked before a pass (``train.check``) and takes a gradient row: the
        adapter's own while that holds nothing (and no other open request has it), otherwise scratch. Raises
        ``UserError`` or ``NotFound`` and has changed nothing then, except that a failed backward is remembered."""
        key = (command.model_id, command.seq_id)
        adapter = self._model.bank[command.model_id]
        if command.loss_fn in self._computed_as:
            command = replace(command, loss_fn=self._computed_as[command.loss_fn])
        try:
            check_forward_backward(command, self._model.facts)
            if key in self._open:
                raise ServerError(f"forward_backward with seq_id {command.seq_id} is open already")
            gradient, scratch = None, False
            if not command.forward_only:
                scratch = not adapter.gradient_free or self._own_row_holder(command.model_id) is not None
                gradient = self._take_scratch(adapter.rank_class) if scratch else adapter.slot
        except DescantError as error:
            if not command.forward_only:
                self.lose_gradient(command.model_id, f"forward_backward with seq_id {command.seq_id} failed: {error}")
            raise
        self._open[key] = _Request(
            command=command,
            config=loss_fn_config(command),
            rank_class=adapter.rank_class,
            gradient=gradient,
            scratch=scratch,
        )
        return key

    def run(self, parts: Sequence[Part], *, backward: bool = False) -> None:
        """One forward (and backward) pass over the datums of ``parts``. A datum whose loss is not finite marks its
        request as failed and adds nothing. After an exception from torch (out of memory) the pass is run again in
        parts: what fails alone fails its request, whose ``close`` says so, and the others' gradients are whole (with
        the last bits of smaller passes).

        On CUDA it returns when the pass is launched, and has then waited for the one before: what the host does for a
        pass, the device need not wait for. ``land`` waits for it.

        Where the base's layers are sharded, all ranks run all layers alike: ``backward`` says whether any rank's pass
        goes backward now, a rank without datums makes an empty pass, and an exception is raised, since the others wait
        in the middle of theirs."""
        items = self._items(parts)
        if self._model.sharded:
            self._run_pass(items, backward=backward)
        elif self._model.packable:
            self._run_pass(items)
        else:
            for item in items:
                self._run_pass([item])

    def contributions(self, requests: Sequence[RequestKey]) -> dict[RequestKey, Contribution]:
        """What this rank has of open requests, their gradients checked; changes nothing. Where several ranks share
        them, each is given all of theirs when it closes a request."""
        if requests:
            self.land()
        self._look_at([opened for request in requests if (opened := self._open[request]).largest is None])
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

    def _look_at(self, requests: Sequence[_Request]) -> None:
        """Waits for the device, if there is something to look at."""
        unknown = [opened for opened in requests if opened.error is None and opened.gradient is not None]
        if unknown:
            for opened, magnitude in zip(unknown, largest(self._gradient_rows(unknown)).tolist(), strict=True):
                opened.largest = magnitude

    def _gradient_rows(self, requests: Sequence[_Request]) -> list[torch.Tensor]:
        slabs = {
            rank_class: self._model.bank.gradient_slab(rank_class) for rank_class in {o.rank_class for o in requests}
        }
        return [slabs[o.rank_class][o.gradient] for o in requests if o.gradient is not None]

    def close(self, request: RequestKey, contributions: Sequence[Contribution] | None = None) -> ForwardBackwardOutput:
        """Commits: the gradient is finite as a whole, and joins the row. Raises the request's ``UserError`` (naming
        the datum) or ``ServerError`` after clearing its part; the model's next step will then fail.

        ``contributions``: every rank's, where several share the request; the first error among them is everybody's.

        Metrics besides ``loss:sum``: ``entropy:mean`` in nats over the places where the loss can have a derivative
        (``train.loss.wanted``), not there without any; ``tokens:sum`` as given, ``tokens_computed:sum`` (what datums of
        a pass begin with in common is computed once), ``microbatches:sum``, ``compute_ms:sum`` of those passes, which
        others may have shared, and ``adapters_in_pass:max``. ``tokens_per_s:mean`` and ``fraction_of_limit:mean``
        (``model.limit``) are of these passes as a whole; ``memory_bytes:max`` is what a rank has taken of its device at
        most."""
        if contributions is None:
            contributions = [self.contributions([request])[request]]
        opened = self._open.pop(request)
        data = opened.command.data
        losses = {index: loss for part in contributions for index, loss in part.losses.items()}
        entropies = {index: entropy for part in contributions for index, entropy in part.entropies.items()}
        logprobs = {index: values for part in contributions for index, values in part.logprobs.items()}
        passes = [part.passes for part in contributions]
        try:
            for part in contributions:
                if part.error is not None:
                    raise part.error
            if len(losses) != len(data):
                raise ServerError(f"{opened} was closed after {len(losses)} of its {len(data)} datums")
            if opened.gradient is not None:
                self._commit(opened, alone=len(contributions) == 1)
        except DescantError as error:
            self._discard(opened)
            if opened.gradient is not None:
                self.lose_gradient(opened.command.model_id, f"{opened} failed: {error}")
            raise
        return ForwardBackwardOutput(
            loss_fn_outputs=tuple({"logprobs": logprobs[index]} for index in range(len(data))),
            metrics={
                "loss:sum": math.fsum(losses.values()),
                **_mean_entropy(entropies.values()),
                "tokens:sum": float(sum(input_length(datum.model_input) for datum in data)),
                "tokens_computed:sum": float(sum(part.tokens for part in passes)),
                "microbatches:sum": float(sum(part.count for part in passes)),
                "compute_ms:sum": 1000 * max(part.seconds for part in passes),
                "adapters_in_pass:max": float(max(part.adapters for part in passes)),
                **self._speed(passes),
            },
        )

    def refuse(self, command: ForwardBackward, why: DescantError) -> None:
        """Some rank could not open it: as if this one could not. The model is there."""
        opened = self._open.pop((command.model_id, command.seq_id), None)
        if opened is not None:
            self._discard(opened)
        if not command.forward_only:
            self.lose_gradient(command.model_id, f"forward_backward with seq_id {command.seq_id} failed: {why}")

    def abandon(self, request: RequestKey) -> None:
        """Drops an open request without a result (its caller is gone). Idempotent."""
        opened = self._open.pop(request, None)
        if opened is not None:
            self._discard(opened)
            if opened.gradient is not None:
                self.lose_gradient(opened.command.model_id, f"{opened} was abandoned")

    def lose_gradient(self, model_id: str, why: str) -> None:
        """A backward of this model was refused or lost before it got here: the next step must fail with ``why``."""
        self._lost.setdefault(model_id, why)

    def has_pending_gradient(self, model_id: str) -> bool:
        return not self._model.bank[model_id].gradient_free

    def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput:
        """``optim_steps`` of one model, which nobody has to hold. Raises what went wrong."""
        [outcome] = self.optim_steps([(model_id, params)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamParams]], *, there: torch.cuda.Event | None = None
    ) -> list[OptimStepOutput | Exception]:
        """AdamW over the rows of these models, all different and held, each clipped by its global norm; refreshes the
        working rows; clears the gradients. The device is waited for once, until ``there`` if it is known when all rows
        had their numbers (``adamw``). What one of them is refused for is its own outcome, and the others step.

        Metrics have keys ``grad_norm:mean`` (before clipping, over the whole row) and ``step:max``. ``UserError``
        with weights and moments unchanged and the gradient cleared when a backward since the last step failed (naming
        its seq_id), when a parameter is out of range, or when the step would make a weight non-finite. A step
        without any gradient is an AdamW step on zeros."""
        bank = self._model.bank
        outcomes: list[OptimStepOutput | Exception | None] = [None] * len(steps)
        opened = {key[0]: request for key, request in self._open.items() if request.gradient is not None}
        ready: list[int] = []
        used: list[str] = []
        for number, (model_id, params) in enumerate(steps):
            try:
                adapter = bank[model_id]
                if model_id in opened:
                    raise ServerError(f"optim_step came while {opened[model_id]} was open")
                if not adapter.gradient_free:
                    used.append(model_id)
                if (why := self._lost.pop(model_id, None)) is not None:
                    raise UserError(
                        f"optim_step changed nothing and cleared the gradient, since a part of it is missing: {why}"
                    )
                check_adam(params)
            except DescantError as error:
                outcomes[number] = error
            else:
                ready.append(number)
        try:
            for number, outcome in zip(ready, self._adamw([steps[number] for number in ready], there), strict=True):
                outcomes[number] = outcome
        finally:
            self._clear(used)
        return [outcome for outcome in outcomes if outcome is not None]

    def _adamw(
        self, steps: Sequence[tuple[str, AdamParams]], there: torch.cuda.Event | None
    ) -> list[OptimStepOutput | Exception]:
        if not steps:
            return []
        bank = self._model.bank
        rows = []
        for model_id, params in steps:
            adapter, gradient = bank[model_id], bank.gradient(model_id)
            if self._add_up is not None and not adapter.gradient_free:
                self._add_up(gradient)
                there = None
            weights, moment1, moment2 = bank.state(model_id).unbind()
            row = Row(
                weights=weights,
                gradient=gradient,
                moment1=moment1,
                moment2=moment2,
                step=adapter.step + 1,
                params=params,
            )
            rows.append(row)
        outcomes: list[OptimStepOutput | Exception] = []
        stepped = []
        norms = adamw(rows, limit=torch.finfo(self._model.dtype).max, there=there)
        for row, (model_id, _), norm in zip(rows, steps, norms, strict=True):
            if isinstance(norm, Exception):
                outcomes.append(norm)
                continue
            bank[model_id].step = row.step
            stepped.append(model_id)
            outcomes.append(OptimStepOutput(metrics={"grad_norm:mean": norm, "step:max": float(row.step)}))
        if stepped:
            bank.refresh_work(*stepped)
        return outcomes

    def _clear(self, model_ids: Sequence[str]) -> None:
        bank = self._model.bank
        if model_ids:
            torch._foreach_zero_([bank.gradient(model_id) for model_id in model_ids])
        for model_id in model_ids:
            bank[model_id].gradient_free = True
            self._bounds.pop(model_id, None)

    def forget(self, model_id: str) -> None:
        """The model was deleted or loaded anew: drops open requests and remembered failures."""
        for key in [key for key in self._open if key[0] == model_id]:
            self._discard(self._open.pop(key))
        self._lost.pop(model_id, None)
        self._bounds.pop(model_id, None)

    def _speed(self, passes: Sequence[Passes]) -> dict[str, float]:
        """Of one's passes, or of those that several ranks made of theirs at a time."""
        metrics = {"memory_bytes:max": float(max(part.memory_bytes for part in passes))}
        seconds = max(part.seconds for part in passes)
        if seconds > 0:
            metrics["tokens_per_s:mean"] = sum(part.all_tokens for part in passes) / seconds
            if self._matrix_rate is not None:
                rate = sum(part.all_flops for part in passes) / seconds
                metrics["fraction_of_limit:mean"] = rate / (len(passes) * self._matrix_rate)
        return metrics

    # ---------------------------------------------------------------------------------------------- gradient rows
    def _own_row_holder(self, model_id: str) -> _Request | None:
        for key, opened in self._open.items():
            if key[0] == model_id and opened.gradient is not None and not opened.scratch:
                return opened
        return None

    def _take_scratch(self, rank_class: int) -> int:
        try:
            return self._model.bank.take_scratch(rank_class)
        except Exception as error:
            logger.exception("no scratch gradient row")
            raise ServerError(f"no room for another gradient row of rank class {rank_class}: {_what(error)}") from None

    def _commit(self, opened: _Request, *, alone: bool) -> None:
        """Makes the request's gradient, which is finite, part of its adapter's. Raises ``UserError`` and has changed
        nothing then: when their sum is not. Not ``alone``, that is left to the optimiser step, since ranks would not
        agree on it before their rows are added up."""
        bank = self._model.bank
        adapter = bank[opened.command.model_id]
        assert opened.gradient is not None
        row = bank.gradient_row(opened.rank_class, opened.gradient)
        model_id, magnitude = opened.command.model_id, math.inf if opened.largest is None else opened.largest
        if not opened.scratch:
            self._bounds[model_id] = magnitude
            adapter.gradient_free = False
            return
        own = bank.gradient(model_id)
        holder = self._own_row_holder(model_id)
        if holder is not None:  # it may still fail: its part moves out of the way, into this one's scratch row
            part = own.clone()
            own.copy_(row)
            row.copy_(part)
            holder.gradient, holder.scratch = opened.gradient, True
        else:
            bound = magnitude + self._bounds.get(model_id, math.inf)
            row.add_(own)
            if alone and not bound < SAFE_SUM:  # otherwise nobody has to wait for the device
                bound = float(largest([row]))
                _check_finite(bound, "the sum of this gradient and those before it")
            own.copy_(row)
            bank.free_scratch(opened.rank_class, opened.gradient)
            magnitude = bound
        self._bounds[model_id] = magnitude
        adapter.gradient_free = False

    def _discard(self, opened: _Request) -> None:
        bank = self._model.bank
        if opened.gradient is None:
            return
        if opened.scratch:
            bank.free_scratch(opened.rank_class, opened.gradient)
            return
        with contextlib.suppress(NotFound):  # deleted, and its row zeroed
            bank.gradient(opened.command.model_id).zero_()

    # ------------------------------------------------------------------------------------------------------ passes
    def _runs(self, request: RequestKey) -> bool:
        """Not for a request that was abandoned since the turn was chosen, or that has failed already."""
        return request in self._open and self._open[request].error is None

    def _items(self, parts: Sequence[Part]) -> list[Item]:
        items = []
        rows: dict[RequestKey, RowRef] = {}
        for part in parts:
            if not self._runs(part.request):
                continue
            opened = self._open[part.request]
            if part.request not in rows:
                try:
                    rows[part.request] = self._model.bank.row(opened.command.model_id)
                except NotFound as error:
                    opened.error = error
                    continue
            item = Item(
                request=part.request,
                index=part.datum,
                datum=opened.command.data[part.datum],
                loss_fn=opened.command.loss_fn,
                config=opened.config,
                row=rows[part.request],
                gradient=opened.gradient,
            )
            items.append(item)
        return items

    def _run_pass(self, items: Sequence[Item], *, backward: bool = False) -> None:
        """One pass, or after a failure as many as it takes to find whose fault it was: first each request by itself,
        then each datum of the one that fails. What fails alone fails its request; the others end as if it had never
        been there."""
        items = [item for item in items if self._runs(item.request)]
        if not items:
            if self._model.sharded:
                self._model.empty_pass(backward=backward)
            return
        self._gradients_touched = False
        failure = self._attempt(items, backward=backward)
        if failure is None:
            return
        self.land()
        # Out here nothing holds the activations of the pass any more, as the exception's traceback did.
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(items) == 1:
            [item] = items
            self._open[item.request].error = ServerError(f"data[{item.index}], alone in its pass, {failure}")
            return
        touched, requests = self._gradients_touched, {item.request: self._open[item.request] for item in items}
        for request, opened in requests.items():
            own = [item for item in items if item.request == request]
            again = self._undo(opened) if touched else []
            for datums in again:
                self._run_pass(self._items([Part(request=request, datum=datum) for datum in datums]))
            for group in [own] if len(requests) > 1 else [[item] for item in own]:
                self._run_pass(group)

    def _undo(self, opened: _Request) -> list[tuple[int, ...]]:
        """A failed pass may have left a part of its gradient in the request's row: empties it, and returns the passes
        that were in it, to be run again."""
        if opened.gradient is not None:
            self._model.bank.gradient_row(opened.rank_class, opened.gradient).zero_()
            done, opened.done = opened.done, []
            return done
        return []

    def _attempt(self, items: Sequence[Item], *, backward: bool) -> str | None:
        """One pass. What went wrong, if something did: then it counts for none of its requests. Raises it where the
        base's layers are sharded."""
        began = self._seconds()
        try:
            packed = pack(items, self._model.device, share=self._share_prefixes)
            flight = self._launch(packed, began, backward=backward)
        except Exception as error:
            # The exception itself is not kept: its traceback holds the activations of the pass.
            if self._model.sharded:
                raise
            logger.exception("a pass of %d datums failed", len(items))
            return _what(error)
        for item in packed.items:
            self._open[item.request].launched.add(item.index)
        self.land()
        self._flight = flight
        if not self._flies:
            self.land()
        return None

    def land(self) -> None:
        """Waits for the pass that was launched last, if nobody has, and takes what came of it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if flight.done is not None:
            flight.done.synchronize()
        packed, results, num_places = flight.packed, flight.results.numpy(), len(flight.packed.targets_PK)
        sizes = [num_places, num_places, packed.targets_PK.numel()]
        loss_P, entropy_P, chosen, rest = np.split(results, np.cumsum(sizes))
        magnitudes = dict(zip(flight.complete, rest.tolist(), strict=True))
        now = self._seconds()
        seconds, self._landed_at = now - max(flight.began, self._landed_at), now
        by_request: dict[RequestKey, list[int]] = {}
        for number, item in enumerate(packed.items):
            by_request.setdefault(item.request, []).append(number)
        adapters, flops = len({item.row for item in packed.items}), flight.flops
        memory_bytes = peak_bytes(self._model.device)  # on CUDA torch takes a tenth of a millisecond to say
        outputs = unpack(packed, chosen.reshape(packed.targets_PK.shape))
        for request, numbers in by_request.items():
            opened = flight.opened[request]
            for number in numbers:
                item, places = packed.items[number], packed.places[number]
                loss_L, wanted_L = loss_P[places], packed.wanted_P[places]
                opened.losses[item.index] = loss = float(loss_L.sum(dtype=np.float64))
                entropy = float(entropy_P[places][wanted_L].sum(dtype=np.float64))
                opened.entropies[item.index] = entropy, int(wanted_L.sum())
                opened.logprobs[item.index] = outputs[number]
                if opened.error is None and not math.isfinite(loss):
                    opened.error = _not_finite(item, loss_L, outputs[number])
            opened.largest = magnitudes.get(request)
            opened.done.append(tuple(packed.items[number].index for number in numbers))
            passes = opened.passes
            passes.count += 1
            passes.tokens += sum(packed.seq_lens[number] for number in numbers)
            passes.seconds += seconds
            passes.all_tokens += len(packed.tokens_T)
            passes.all_flops += flops
            passes.adapters = max(passes.adapters, adapters)
            passes.memory_bytes = memory_bytes

    def _flops(self, packed: Packed) -> float:
        flops, arithmetic = 0.0, self._arithmetic
        for item, tokens, square in zip(packed.items, packed.seq_lens, squares(packed.seq_lens, packed.prefixes)):
            lora_params = arithmetic.lora_params(self._model.bank.lora(item.row))
            flops += arithmetic.flops(tokens, lora_params * tokens, square, backward=item.gradient is not None)
        return flops

    def _launch(self, packed: Packed, began: float, *, backward: bool) -> _Flight:
        """Losses are NaN where they or their derivatives are not finite. Gradients go into the segments' rows.
        ``backward``: the layers' backward runs, even if no segment wants a gradient. The device is not waited for."""
        through_layers, backward = backward, backward or any(s.gradient is not None for s in packed.segments)
        loss_P = torch.zeros(len(packed.targets_PK), dtype=torch.float32, device=self._model.device)
        with torch.set_grad_enabled(backward):
            pass_ = Pass(seq_lens=packed.seq_lens, prefixes=packed.prefixes, segments=packed.segments)
            hidden_TD, lora = self._model.trunk(packed.tokens_T, packed.positions_T, pass_)

            def logprobs(loss: ChunkLoss | None) -> HeadOutput:
                return self._model.head.logprobs(
                    hidden_TD, packed.targets_PK, lora, loss=loss, tokens_P=packed.place_tokens_P
                )

            if backward:
                logprobs_PK = self._logprobs_of_sequence_losses(packed, hidden_TD, lora)
                self._gradients_touched = True
                head = logprobs(_chunk_loss(packed, loss_P, _sequence_ratio(packed, logprobs_PK)))
                if head.dhidden_TD is not None and hidden_TD.requires_grad:  # not with adapters on the unembedding only
                    hidden_TD.backward(head.dhidden_TD)
                elif through_layers:
                    hidden_TD.backward(torch.zeros_like(hidden_TD))
            else:
                head = logprobs(None)
                chunk_loss = _chunk_loss(packed, loss_P, _sequence_ratio(packed, head.logprobs_PK))
                chunk_loss(slice(0, len(loss_P)), head.logprobs_PK)
            complete = self._complete_with(packed.items)
            rows = self._gradient_rows(list(complete.values()))
            magnitudes = [largest(rows)] if rows else []
            results, done = torch.cat([loss_P, head.entropy_P, head.logprobs_PK.flatten(), *magnitudes]), None
            if results.is_cuda:
                results = torch.empty(results.shape, pin_memory=True).copy_(results, non_blocking=True)
                done = torch.cuda.current_stream().record_event()
        return _Flight(
            packed=packed,
            opened={item.request: self._open[item.request] for item in packed.items},
            results=results,
            done=done,
            complete=tuple(complete),
            began=began,
            flops=self._flops(packed),
        )

    def _complete_with(self, items: Sequence[Item]) -> dict[RequestKey, _Request]:
        """The requests with a gradient of whose datums none is missing when these are done."""
        done: dict[RequestKey, set[int]] = {}
        for item in items:
            done.setdefault(item.request, set()).add(item.index)
        opened = {request: self._open[request] for request in done}
        return {
            request: opened
            for request, opened in opened.items()
            if opened.gradient is not None and len(done[request] | opened.launched) == len(opened.command.data)
        }

    def _logprobs_of_sequence_losses(
        self, packed: Packed, hidden_TD: torch.Tensor, lora: LoraPass | None
    ) -> torch.Tensor:
        """float32 [P, K] where a loss needs all of a sequence's before its first derivative; 0 elsewhere, where no
        logits are made for it."""
        logprobs_PK = hidden_TD.new_zeros(packed.targets_PK.shape, dtype=torch.float32)
        whole = [number for number, loss in enumerate(packed.losses) if loss.loss_fn in SEQUENCE_LOSSES]
        if not whole:
            return logprobs_PK
        # A token's places have one loss, so that theirs are all places of these tokens.
        places_P = np.flatnonzero(np.isin(packed.losses_P, whole))
        tokens_P = places_P if packed.place_tokens_P is None else packed.place_tokens_P.numpy()[places_P]
        tokens, rows_P = np.unique(tokens_P, return_inverse=True)
        tokens_N, places = (to_device(torch.from_numpy(x), hidden_TD.device) for x in (tokens, places_P))
        head = self._model.head.logprobs(
            hidden_TD.detach().index_select(0, tokens_N),
            packed.targets_PK.index_select(0, places),
            None if lora is None else lora.select(tokens.tolist()),
            tokens_P=None if packed.place_tokens_P is None else torch.from_numpy(rows_P),
        )
        return logprobs_PK.index_copy_(0, places, head.logprobs_PK)


def _sequence_ratio(packed: Packed, logprobs_PK: torch.Tensor) -> torch.Tensor | None:
    if packed.sequence_P is None:
        return None
    return sequence_ratio(
        logprobs_PK[:, 0], packed.logprobs_P, packed.sequence_ratio_mask_P, packed.sequence_P, len(packed.items)
    )


def _chunk_loss(
    packed: Packed, loss_P: torch.Tensor, sequence_ratio_P: torch.Tensor | None
) -> Callable[[slice, torch.Tensor], torch.Tensor | None]:
    """The head's ``ChunkLoss`` for this microbatch; writes each place's loss into ``loss_P``. A chunk none of whose
    places can have a derivative, as the host knows, pushes nothing back. Waits for nothing."""

    @torch.no_grad()
    def chunk_loss(places: slice, logprobs_CK: torch.Tensor) -> torch.Tensor | None:
        inputs = packed.loss_inputs(places, sequence_ratio_P)
        here = np.unique(packed.losses_P[places]).tolist()
        pulled = np.unique(packed.losses_P[places][packed.wanted_P[places]]).tolist()
        dlogprobs_CK: torch.Tensor | None = None
        for number in here:
            taken = packed.losses[number]
            loss = token_loss(taken.loss_fn, taken.config, logprobs_CK, inputs)
            finite_C = _all_finite(loss.loss_C, loss.dlogprobs_CK) & (logprobs_CK == logprobs_CK).all(1)
            loss_C = torch.where(finite_C, loss.loss_C, torch.nan)
            if packed.device_losses_P is None or len(here) == 1:
                trained_C = finite_C
            else:  # computed for all places of the chunk: one loss after another, however many take it
                own_C = packed.device_losses_P[places] == number
                loss_C, trained_C = torch.where(own_C, loss_C, loss_P[places]), finite_C & own_C
            loss_P[places] = loss_C
            if taken.backward and number in pulled:
                others = 0.0 if dlogprobs_CK is None else dlogprobs_CK
                dlogprobs_CK = torch.where(trained_C[:, None], loss.dlogprobs_CK, others)
        return dlogprobs_CK

    return chunk_loss


def _mean_entropy(entropies: Collection[tuple[float, int]]) -> dict[str, float]:
    num_places = sum(count for _, count in entropies)
    return {"entropy:mean": math.fsum(total for total, _ in entropies) / num_places} if num_places else {}


def _all_finite(loss_C: torch.Tensor, dlogprobs_CK: torch.Tensor) -> torch.Tensor:
    """bool [C]. ``isfinite`` takes four kernels."""
    return (loss_C.abs() < torch.inf) & (dlogprobs_CK.abs() < torch.inf).all(1)


def _not_finite(item: Item, loss_L: np.ndarray, logprobs: np.ndarray) -> UserError:
    position = int(np.argmax(~np.isfinite(loss_L)))
    given = "".join(
        f", {name} {float(item.datum.loss_fn_inputs[name][position]):g}"
        for name in ("logprobs", "advantages")
        if name in item.datum.loss_fn_inputs
    )
    return UserError(
        f"data[{item.index}] has a loss that is not finite at position {position}: loss_fn {item.loss_fn!r} of "
        f"log-probability {np.array2string(logprobs[position], precision=4)}{given}"
    )


def _check_finite(magnitude: float, what: str) -> None:
    if not math.isfinite(magnitude):
        raise UserError(f"{what} is not finite, expected finite numbers, although the loss of every datum is")


def _what(error: Exception) -> str:
    """What may be told of an exception from below: its kind, never its text."""
    if isinstance(error, DescantError):
        return f"failed: {error}"
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
    return "ran out of memory" if out_of_memory else f"failed with {type(error).__name__}"
