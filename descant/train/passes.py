"""``PassRunner`` on torch: packs datums of many adapters into one pass, launches it, and brings its numbers back.

Legend: T tokens of the pass, P target positions (``train.pack``), C of a chunk, K targets a position, L of a datum.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from descant.adapters.slots import GradientSlot, RowRef
from descant.errors import DescantError, NotFound, ServerError
from descant.model.base import BaseModel
from descant.model.flops import FlopCounter, peak_bytes, squares
from descant.model.forward_batch import ForwardBatch, to_device
from descant.model.lm_head import ChunkLoss, LmHeadOutput
from descant.model.lora.batch import LoraBatch
from descant.model.pass_graphs import PassGraphs
from descant.train.loss import SEQUENCE_LOSSES, sequence_ratio, token_loss
from descant.train.optim import StepRow, adamw, largest
from descant.train.pack import Item, Packed, pack, unpack
from descant.train.runner import (
    DatumResult,
    Gradient,
    ModelState,
    PassFailure,
    PassItem,
    PassResult,
    StepTaken,
)
from descant.types import AdamParams, ModelFacts

logger = logging.getLogger(__name__)

DecoderForward = Callable[[torch.Tensor, torch.Tensor, ForwardBatch], tuple[torch.Tensor, LoraBatch | None]]
"""As ``BaseModel.decoder_forward``."""


class TorchPassRunner:
    """``PassRunner`` on a model whose adapters' rows lie in its bank."""

    def __init__(
        self,
        model: BaseModel,
        *,
        all_reduce: Callable[[torch.Tensor], None] | None = None,
        asynchronous: bool | None = None,
        seconds: Callable[[], float] = time.perf_counter,
        share_prefixes: bool = True,
        decoder_forward: DecoderForward | None = None,
        logprobs: Callable[..., LmHeadOutput] | None = None,
    ):
        """``all_reduce``: where several ranks share the datums of requests, makes of a gradient row the sum of theirs
        (the same calls on each rank, in the same order). ``asynchronous`` None: on CUDA. ``seconds`` measures how long
        passes take. ``share_prefixes`` False is for comparing the two. ``decoder_forward``, ``logprobs``: what computes
        hidden states, as ``BaseModel.decoder_forward``, and of them log-probabilities and derivatives, as
        ``LmHead.logprobs``; None: the model's own."""
        self.asynchronous = model.device.type == "cuda" if asynchronous is None else asynchronous
        self._model = model
        self._graphs = PassGraphs(model)
        self._decoder_forward = decoder_forward or self._graphs.decoder_forward
        self._logprobs = logprobs or model.lm_head.logprobs
        self._all_reduce = all_reduce
        self._seconds = seconds
        self._share_prefixes = share_prefixes
        self._flop_counter = FlopCounter.of(model)
        self._scratch: dict[Gradient, int] = {}
        """The rank bucket of each scratch, whose number is a slot there."""
        self._waited_at = -math.inf
        """When the last pass was found done."""
        self._short_of_memory = False
        """Whether the last pass that failed did so for memory."""
        self._wrote_gradients = False
        """Whether the pass that runs, or ran last, has begun to write into gradient rows."""

    def warm_up(self) -> None:
        """Compiles and captures ahead what every pass takes, where anything is captured."""
        self._graphs.warm_up()

    @property
    def facts(self) -> ModelFacts:
        return self._model.facts

    @property
    def lockstep(self) -> bool:
        return self._model.sharded

    # ------------------------------------------------------------------------------------------------ passes
    def launch(
        self, items: Sequence[PassItem], *, complete: Sequence[Gradient], backward: bool = False
    ) -> TorchPass | PassFailure:
        began = self._seconds()
        self._wrote_gradients = False
        try:
            packed = pack(self._resolve(items), self._model.device, share=self._share_prefixes)
            results, done = self._compute(packed, complete, backward=backward)
            flops = self._flops(packed)
        except Exception as error:
            # The exception itself is not kept: its traceback holds the activations of the pass.
            if self._model.sharded:
                raise
            logger.exception("a pass of %d datums failed", len(items))
            self._short_of_memory = isinstance(error, torch.OutOfMemoryError)
            return PassFailure(why=_what(error), wrote_gradients=self._wrote_gradients)
        return TorchPass(
            packed=packed, results=results, done=done, seconds=lambda: self._seconds_since(began), flops=flops
        )

    def empty_pass(self, *, backward: bool) -> None:
        self._model.empty_pass(backward=backward)

    def recover(self) -> None:
        # Out here nothing holds the activations of the pass any more, as the exception's traceback did.
        self._graphs.clear(short_of_memory=self._short_of_memory)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _resolve(self, items: Sequence[PassItem]) -> list[Item]:
        rows: dict[str, RowRef] = {}
        slots: dict[Gradient, GradientSlot] = {}
        resolved = []
        for item in items:
            if item.model_id not in rows:
                rows[item.model_id] = self._model.bank.row(item.model_id)
            if item.gradient is not None and item.gradient not in slots:
                slots[item.gradient] = self._slot(item.gradient)
            one = Item(
                part=item.part,
                datum=item.datum,
                loss_fn=item.loss_fn,
                config=item.config,
                row=rows[item.model_id],
                gradient=None if item.gradient is None else slots[item.gradient],
            )
            resolved.append(one)
        return resolved

    def _compute(
        self, packed: Packed, complete: Sequence[Gradient], *, backward: bool
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """``TorchPass.results`` and ``done``. Losses are NaN where they or their derivatives are not finite. Gradients
        go into the segments' rows. ``backward``: the layers' backward runs, even if no segment wants a gradient. The
        device is not waited for."""
        through_layers, backward = backward, backward or any(s.gradient is not None for s in packed.segments)
        loss_P = torch.zeros(len(packed.targets_PK), dtype=torch.float32, device=self._model.device)
        with torch.set_grad_enabled(backward):
            batch = ForwardBatch(seq_lens=packed.seq_lens, prefixes=packed.prefixes, segments=packed.segments)
            hidden_TD, lora = self._decoder_forward(packed.tokens_T, packed.positions_T, batch)

            def logprobs(loss: ChunkLoss | None) -> LmHeadOutput:
                return self._logprobs(hidden_TD, packed.targets_PK, lora, loss=loss, tokens_P=packed.token_index_P)

            if backward:
                logprobs_PK = self._logprobs_of_sequence_losses(packed, hidden_TD, lora)
                self._wrote_gradients = True
                head = logprobs(_chunk_loss(packed, loss_P, _sequence_ratio(packed, logprobs_PK)))
                if head.dhidden_TD is not None and hidden_TD.requires_grad:  # not with adapters on the unembedding only
                    hidden_TD.backward(head.dhidden_TD)
                elif through_layers:
                    hidden_TD.backward(torch.zeros_like(hidden_TD))
            else:
                head = logprobs(None)
                chunk_loss = _chunk_loss(packed, loss_P, _sequence_ratio(packed, head.logprobs_PK))
                chunk_loss(slice(0, len(loss_P)), head.logprobs_PK)
            rows = [self._row(gradient) for gradient in complete]
            magnitudes = [largest(rows)] if rows else []
            results, done = torch.cat([loss_P, head.entropy_P, head.logprobs_PK.flatten(), *magnitudes]), None
            if results.is_cuda:
                results = torch.empty(results.shape, pin_memory=True).copy_(results, non_blocking=True)
                done = torch.cuda.current_stream().record_event()
        return results, done

    def _logprobs_of_sequence_losses(
        self, packed: Packed, hidden_TD: torch.Tensor, lora: LoraBatch | None
    ) -> torch.Tensor:
        """float32 [P, K] where a loss needs all of a sequence's before its first derivative; 0 elsewhere, where no
        logits are made for it."""
        logprobs_PK = hidden_TD.new_zeros(packed.targets_PK.shape, dtype=torch.float32)
        whole = [number for number, loss in enumerate(packed.losses) if loss.loss_fn in SEQUENCE_LOSSES]
        if not whole:
            return logprobs_PK
        # A token's positions have one loss, so that theirs are all positions of these tokens.
        positions_P = np.flatnonzero(np.isin(packed.losses_P, whole))
        tokens_P = positions_P if packed.token_index_P is None else packed.token_index_P.numpy()[positions_P]
        tokens, rows_P = np.unique(tokens_P, return_inverse=True)
        tokens_N, positions = (to_device(torch.from_numpy(x), hidden_TD.device) for x in (tokens, positions_P))
        head = self._logprobs(
            hidden_TD.detach().index_select(0, tokens_N),
            packed.targets_PK.index_select(0, positions),
            None if lora is None else lora.select(tokens.tolist()),
            tokens_P=None if packed.token_index_P is None else torch.from_numpy(rows_P),
        )
        return logprobs_PK.index_copy_(0, positions, head.logprobs_PK)

    def _flops(self, packed: Packed) -> float:
        flops, flop_counter = 0.0, self._flop_counter
        for item, tokens, square in zip(packed.items, packed.seq_lens, squares(packed.seq_lens, packed.prefixes)):
            lora_params = flop_counter.lora_params(self._model.bank.lora(item.row))
            flops += flop_counter.flops(tokens, lora_params * tokens, square, backward=item.gradient is not None)
        return flops

    def _seconds_since(self, began: float) -> float:
        """Of a pass that is done, without what the one before it took of the same time."""
        now = self._seconds()
        seconds, self._waited_at = now - max(began, self._waited_at), now
        return seconds

    # ------------------------------------------------------------------------------------------------ models
    def state(self, model_id: str) -> ModelState:
        adapter = self._model.bank[model_id]
        return ModelState(step=adapter.step, has_gradient=not adapter.gradient_free)

    def keep_gradient(self, model_id: str) -> None:
        self._model.bank[model_id].gradient_free = False

    def step(
        self, steps: Sequence[tuple[str, AdamParams]], *, gradients_ready: torch.cuda.Event | None = None
    ) -> list[StepTaken | Exception]:
        """As ``PassRunner.step``; refreshes the compute copies. The device is waited for once, until
        ``gradients_ready`` if it is known when all rows had their numbers (``adamw``)."""
        bank = self._model.bank
        rows = []
        for model_id, params in steps:
            adapter, gradient = bank[model_id], bank.gradient(model_id)
            if self._all_reduce is not None:
                self._all_reduce(gradient)
                gradients_ready = None
            weights, moment1, moment2 = bank.state(model_id).unbind()
            row = StepRow(
                weights=weights,
                gradient=gradient,
                moment1=moment1,
                moment2=moment2,
                step=adapter.step + 1,
                params=params,
            )
            rows.append(row)
        outcomes: list[StepTaken | Exception] = []
        stepped = []
        norms = adamw(rows, limit=torch.finfo(self._model.dtype).max, gradients_ready=gradients_ready)
        for row, (model_id, _), norm in zip(rows, steps, norms, strict=True):
            if isinstance(norm, Exception):
                outcomes.append(norm)
                continue
            bank[model_id].step = row.step
            stepped.append(model_id)
            outcomes.append(StepTaken(grad_norm=norm, step=row.step))
        if stepped:
            bank.refresh_compute(*stepped)
        return outcomes

    def clear(self, model_ids: Sequence[str]) -> None:
        bank = self._model.bank
        if model_ids:
            torch._foreach_zero_([bank.gradient(model_id) for model_id in model_ids])
        for model_id in model_ids:
            bank[model_id].gradient_free = True

    # ------------------------------------------------------------------------------------------------ gradients
    def allocate(self, model_id: str) -> Gradient:
        rank_bucket = self._model.bank[model_id].rank_bucket
        try:
            slot = self._model.bank.allocate_scratch(rank_bucket)
        except Exception as error:
            logger.exception("no scratch gradient row")
            raise ServerError(
                f"no room for another gradient row of rank bucket {rank_bucket}: {_what(error)}"
            ) from None
        gradient = Gradient(model_id=model_id, scratch=slot)
        self._scratch[gradient] = rank_bucket
        return gradient

    def free(self, gradient: Gradient) -> None:
        if gradient.scratch is not None:
            self._model.bank.free_scratch(self._scratch.pop(gradient), GradientSlot(gradient.scratch))
            return
        with suppress(NotFound):  # deleted, and its row zeroed
            self.zero(gradient)

    def zero(self, gradient: Gradient) -> None:
        self._row(gradient).zero_()

    def add_own(self, scratch: Gradient) -> None:
        self._row(scratch).add_(self._own_row(scratch))

    def swap_own(self, scratch: Gradient) -> None:
        row, own = self._row(scratch), self._own_row(scratch)
        part = own.clone()
        own.copy_(row)
        row.copy_(part)

    def move_to_own(self, scratch: Gradient) -> None:
        self._own_row(scratch).copy_(self._row(scratch))
        self.free(scratch)

    def magnitudes(self, gradients: Sequence[Gradient]) -> list[float]:
        found: list[float] = largest([self._row(gradient) for gradient in gradients]).tolist()
        return found

    def _own_row(self, gradient: Gradient) -> torch.Tensor:
        return self._model.bank.gradient(gradient.model_id)

    def _row(self, gradient: Gradient) -> torch.Tensor:
        """float32 [row], a view."""
        if gradient.scratch is None:
            return self._own_row(gradient)
        return self._model.bank.gradient_row(self._scratch[gradient], GradientSlot(gradient.scratch))

    def _slot(self, gradient: Gradient) -> GradientSlot:
        if gradient.scratch is None:
            return self._model.bank[gradient.model_id].gradient_slot
        return GradientSlot(gradient.scratch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPass:
    """``LaunchedPass``. ``results``: on the host, float32, once ``done``: losses [P], entropies [P], log-probabilities
    [P, K], and the largest magnitudes in complete gradients. ``seconds``: what it took, asked when it is done."""

    packed: Packed
    results: torch.Tensor
    done: torch.cuda.Event | None
    seconds: Callable[[], float]
    flops: float

    def wait(self) -> PassResult:
        if self.done is not None:
            self.done.synchronize()
        packed, num_positions = self.packed, len(self.packed.targets_PK)
        sizes = [num_positions, num_positions, packed.targets_PK.numel()]
        loss_P, entropy_P, chosen, magnitudes = np.split(self.results.numpy(), np.cumsum(sizes))
        seconds = self.seconds()
        outputs = unpack(packed, chosen.reshape(packed.targets_PK.shape))
        datums = []
        for number, item in enumerate(packed.items):
            positions = packed.target_positions[number]
            loss_L, loss_mask_L = loss_P[positions], packed.loss_mask_P[positions]
            loss = float(loss_L.sum(dtype=np.float64))
            result = DatumResult(
                part=item.part,
                loss=loss,
                entropy=(float(entropy_P[positions][loss_mask_L].sum(dtype=np.float64)), int(loss_mask_L.sum())),
                logprobs=outputs[number],
                tokens=packed.seq_lens[number],
                not_finite_at=None if math.isfinite(loss) else int(np.argmax(~np.isfinite(loss_L))),
            )
            datums.append(result)
        return PassResult(
            datums=datums,
            magnitudes=magnitudes.tolist(),
            seconds=seconds,
            tokens=len(packed.tokens_T),
            adapters=len({item.row for item in packed.items}),
            flops=self.flops,
            memory_bytes=peak_bytes(packed.tokens_T.device),  # on CUDA torch takes a tenth of a millisecond to say
        )


def _sequence_ratio(packed: Packed, logprobs_PK: torch.Tensor) -> torch.Tensor | None:
    if packed.sequence_P is None:
        return None
    return sequence_ratio(
        logprobs_PK[:, 0], packed.logprobs_P, packed.sequence_ratio_mask_P, packed.sequence_P, len(packed.items)
    )


def _chunk_loss(
    packed: Packed, loss_P: torch.Tensor, sequence_ratio_P: torch.Tensor | None
) -> Callable[[slice, torch.Tensor], torch.Tensor | None]:
    """The head's ``ChunkLoss`` for this microbatch; writes each position's loss into ``loss_P``. A chunk none of whose
    positions can have a derivative, as the host knows, has no backward. Waits for nothing."""

    @torch.no_grad()
    def chunk_loss(positions: slice, logprobs_CK: torch.Tensor) -> torch.Tensor | None:
        inputs = packed.loss_inputs(positions, sequence_ratio_P)
        here = np.unique(packed.losses_P[positions]).tolist()
        with_backward = np.unique(packed.losses_P[positions][packed.loss_mask_P[positions]]).tolist()
        dlogprobs_CK: torch.Tensor | None = None
        for number in here:
            taken = packed.losses[number]
            loss = token_loss(taken.loss_fn, taken.config, logprobs_CK, inputs)
            finite_C = _all_finite(loss.loss_C, loss.dlogprobs_CK) & (logprobs_CK == logprobs_CK).all(1)
            loss_C = torch.where(finite_C, loss.loss_C, torch.nan)
            if packed.device_losses_P is None or len(here) == 1:
                trained_C = finite_C
            else:  # computed for all positions of the chunk: one loss after another, however many take it
                own_C = packed.device_losses_P[positions] == number
                loss_C, trained_C = torch.where(own_C, loss_C, loss_P[positions]), finite_C & own_C
            loss_P[positions] = loss_C
            if taken.backward and number in with_backward:
                others = 0.0 if dlogprobs_CK is None else dlogprobs_CK
                dlogprobs_CK = torch.where(trained_C[:, None], loss.dlogprobs_CK, others)
        return dlogprobs_CK

    return chunk_loss


def _all_finite(loss_C: torch.Tensor, dlogprobs_CK: torch.Tensor) -> torch.Tensor:
    """bool [C]. ``isfinite`` takes four kernels."""
    return (loss_C.abs() < torch.inf) & (dlogprobs_CK.abs() < torch.inf).all(1)


def _what(error: Exception) -> str:
    """What clients may read of an exception from below: its kind, never its text."""
    if isinstance(error, DescantError):
        return f"failed: {error}"
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
    return "ran out of memory" if out_of_memory else f"failed with {type(error).__name__}"
