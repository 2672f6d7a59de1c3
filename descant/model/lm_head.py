"""The LM head: hidden states to log-probabilities, a chunk of tokens at a time, never a [T, V] float32 tensor.

The head's weight is frozen (and may be tied to the embedding: the adapter's product is added beside it, the shared
weight stays as it is). In training, a chunk's dLogits are formed right where its logits are, so nothing is recomputed.

Trainer and sampler get their logits from one function, in the base's dtype and then float32, over at least 8 rows
(a row alone takes another path): a row's bits do not depend on how many rows are asked for.

A target position is one use of a token's logits: its targets and their loss. Usually each token has one; a token that
several sequences share has several, and its logits are still made once.

Legend: T tokens, P target positions, D hidden size, V vocabulary, K targets a position, C tokens of a chunk, N rows
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from descant.model.chunk_logits import (
    TargetPositions,
    dlogits_of,
    normaliser_and_entropy,
    of_any_length,
    target_cells,
    target_logprobs,
)
from descant.model.cpu import prepacked
from descant.model.forward_batch import MIN_ROWS, filled_up, to_device
from descant.model.lora.batch import LoraBatch
from descant.model.lora.products import lora_backward, lora_intermediates, lora_linear, lora_linear_backward

CHUNK_TOKENS = {"cpu": 128, "cuda": 2048}
"""At 49k words a chunk's logits are 25 MB and 400 MB. On CPU larger buffers are new pages of the system in each chunk
(1024 tokens in bf16, one thread: 0.77 s at 128, 1.4 s at 1024); on CUDA a small chunk leaves the device idle."""

ChunkLoss = Callable[[slice, torch.Tensor], torch.Tensor | None]
"""``(positions, logprobs float32) -> dloss/dlogprobs float32`` (None: no backward for this chunk).

Called once per chunk, in stream order, with the chunk's target positions and their K log-probabilities each. It must
return finite numbers only: what is not finite is put to 0 by ``where`` and reported by the owner of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LmHeadOutput:
    """``logprobs_PK`` float32 [P, K]; ``entropy_P`` float32 [P], in nats, of the whole distribution of each
    position's token, NaN where a logit is not finite; ``dhidden_TD`` in the base's dtype, None without a ``loss``."""

    logprobs_PK: torch.Tensor
    entropy_P: torch.Tensor
    dhidden_TD: torch.Tensor | None


class LmHead:
    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        site_index: int | None,
        softcap: float | None = None,
        logit_scale: float = 1.0,
    ):
        """``weight`` [V, D] and ``bias`` [V] in the base's dtype, used as they lie there. ``site_index``: the
        unembedding among the bank's sites, None if adapters cannot change it. Logits are
        ``softcap · tanh(logit_scale · (W h + b) / softcap)``, the tanh only with a ``softcap``."""
        self.weight_VD = weight.detach()
        self.bias_V = None if bias is None else bias.detach()
        self.site_index = site_index
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.vocab_size = len(weight)
        self.compiled = False
        """One target a position: the chunk's elementwise work is fused, and no float32 logits are written."""
        self.prepacked: torch.Tensor | None = None

    def chunk_bytes(self) -> int:
        """What ``logprobs`` takes for a moment, beside what it returns: logits and dLogits of a chunk, float32 unless
        they are fused."""
        itemsize = self.weight_VD.dtype.itemsize if self.compiled else 8
        return 2 * CHUNK_TOKENS[self.weight_VD.device.type] * self.vocab_size * itemsize

    def logits(self, hidden_ND: torch.Tensor, lora: LoraBatch | None, *, start: int = 0) -> torch.Tensor:
        """float32 [N, V] of the stream's tokens ``start:start+N`` (``start`` finds their adapters)."""
        with torch.no_grad():
            return self._logits(hidden_ND, lora, start)[0]

    def logits_at(self, hidden_TD: torch.Tensor, lora: LoraBatch | None, indices: torch.Tensor) -> torch.Tensor:
        """float32 [N, V] of the stream's tokens ``indices`` int64 [N] (rising), each with its own adapter.
        Pads to at least 8 rows inside, so that a row's bits do not depend on how many are asked for."""
        if lora is not None:
            lora = lora.select(indices.tolist())
        return self.logits(hidden_TD.index_select(0, indices.to(hidden_TD.device)), lora)

    def logprobs(
        self,
        hidden_TD: torch.Tensor,
        targets_PK: torch.Tensor,
        lora: LoraBatch | None,
        loss: ChunkLoss | None = None,
        chunk_tokens: int | None = None,
        tokens_P: torch.Tensor | None = None,
    ) -> LmHeadOutput:
        """Log-probabilities of ``targets_PK`` int64, and entropies. With ``loss``, also dHidden, and dA, dB of the
        unembedding go into the gradient rows. ``hidden_TD`` is detached inside: the caller runs
        ``hidden.backward(dhidden)``.
        ``tokens_P`` int64 on the host, never falling: the token of each target position; None: position i is token i.
        Chunks whose dloss/dlogprobs is None skip the backward half, on every device. On CPU, unless fused, so does
        every token whose dloss is zero; elsewhere they are computed and come out as zero."""
        device = hidden_TD.device
        if chunk_tokens is None:
            chunk_tokens = CHUNK_TOKENS["cpu" if device.type == "cpu" else "cuda"]
        one_each = tokens_P is None
        if tokens_P is None:
            tokens_P = torch.arange(len(hidden_TD))
        hidden_TD = hidden_TD.detach()
        logprobs_PK = torch.empty(targets_PK.shape, dtype=torch.float32, device=device)
        entropy_P = logprobs_PK.new_empty(len(targets_PK))
        dhidden_TD = None if loss is None else torch.zeros_like(hidden_TD)
        starts = list(range(0, len(hidden_TD), chunk_tokens))
        bounds = torch.searchsorted(tokens_P, torch.tensor([*starts, len(hidden_TD)])).tolist()
        tokens_P = to_device(tokens_P, device)
        with torch.no_grad():
            for start, positions in zip(starts, map(slice, bounds, bounds[1:])):
                chunk = slice(start, min(start + chunk_tokens, len(hidden_TD)))
                rows_P, targets = tokens_P[positions] - start, targets_PK[positions]
                if self.compiled and targets.shape[1] == 1 and chunk.stop - chunk.start >= MIN_ROWS:
                    shared_P = None if one_each else rows_P
                    self._fused_chunk(
                        chunk, positions, shared_P, hidden_TD, targets, lora, loss, logprobs_PK, entropy_P, dhidden_TD
                    )
                    continue
                logits_CV, saved = self._logits(hidden_TD[chunk], lora, start)
                normaliser_C, entropy_C = normaliser_and_entropy(logits_CV)
                normaliser_C1, entropy_P[positions] = normaliser_C[:, None], entropy_C[rows_P]
                chosen = logits_CV.view(-1)[target_cells(rows_P, targets, self.vocab_size)]
                logprobs_PK[positions] = chosen - normaliser_C1[rows_P]
                if loss is None or dhidden_TD is None:
                    continue
                dlogprobs = loss(positions, logprobs_PK[positions])
                if dlogprobs is None:
                    continue
                # dLogits overwrite the logits, which are not read again.
                self._backward(
                    hidden_TD[chunk],
                    logits_CV,
                    normaliser_C1,
                    rows_P,
                    targets,
                    dlogprobs,
                    saved,
                    lora,
                    start,
                    dhidden_TD[chunk],
                )
        return LmHeadOutput(logprobs_PK=logprobs_PK, entropy_P=entropy_P, dhidden_TD=dhidden_TD)

    def _fused_chunk(
        self,
        chunk: slice,
        positions: slice,
        rows_P: torch.Tensor | None,
        hidden_TD: torch.Tensor,
        targets_P1: torch.Tensor,
        lora: LoraBatch | None,
        loss: ChunkLoss | None,
        logprobs_P1: torch.Tensor,
        entropy_P: torch.Tensor,
        dhidden_TD: torch.Tensor | None,
    ) -> None:
        """What ``logprobs`` does with a chunk, with logits and dLogits in the base's dtype. ``rows_P`` None: one
        target position each."""
        hidden_CD, targets_P, start = hidden_TD[chunk], targets_P1[:, 0], chunk.start
        logits_CV, saved = self._raw_logits(hidden_CD, lora, start)
        extra = (
            None if rows_P is None else TargetPositions.of(rows_P, targets_P, logits_CV, self.logit_scale, self.softcap)
        )
        targets_C = targets_P if extra is None else extra.first_targets_C
        of_any_length(logits_CV, targets_C)
        logprobs_C, normaliser_C, entropy_C = target_logprobs(logits_CV, targets_C, self.logit_scale, self.softcap)
        entropy_P[positions] = entropy_C if extra is None else entropy_C[extra.rows_P]
        logprobs_P1[positions, 0] = logprobs_C if extra is None else extra.logits_P - normaliser_C[extra.rows_P]
        dlogprobs_P1 = None if loss is None else loss(positions, logprobs_P1[positions])
        if dlogprobs_P1 is None or dhidden_TD is None:
            return
        self._fused_backward(
            hidden_CD,
            logits_CV,
            normaliser_C,
            targets_C,
            dlogprobs_P1[:, 0].contiguous(),
            extra,
            saved,
            lora,
            start,
            dhidden_TD[chunk],
        )

    def _fused_backward(
        self,
        hidden_CD: torch.Tensor,
        logits_CV: torch.Tensor,
        normaliser_C: torch.Tensor,
        targets_C: torch.Tensor,
        dlogprobs_P: torch.Tensor,
        extra: TargetPositions | None,
        saved: list[torch.Tensor],
        lora: LoraBatch | None,
        start: int,
        dhidden_CD: torch.Tensor,
    ) -> None:
        """As ``_backward``. ``targets_C``: the first of each row, where ``extra`` has several."""
        dlogprobs_C = dlogprobs_P if extra is None else extra.sum_by_row(dlogprobs_P)
        of_any_length(normaliser_C, dlogprobs_C)
        dy_CV = dlogits_of(logits_CV, normaliser_C, targets_C, dlogprobs_C, self.logit_scale, self.softcap)
        if extra is not None:
            extra.move_to_targets(dy_CV, dlogprobs_P)
        if lora is None or self.site_index is None:
            torch.mm(dy_CV, self.weight_VD, out=dhidden_CD)
            return
        site, width = [self.site_index], [self.vocab_size]
        dh_CD = lora_linear_backward(
            hidden_CD, dy_CV, self.weight_VD, saved, site, width, lora, start=start, want_dx=True
        )
        assert dh_CD is not None
        dhidden_CD.copy_(dh_CD)

    def _logits(
        self, hidden_ND: torch.Tensor, lora: LoraBatch | None, start: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits_NV, saved = self._raw_logits(hidden_ND, lora, start)
        return self.scaled(logits_NV), saved

    def scaled(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """What comes after the product: float32, the scaling, the soft cap."""
        logits_NV = logits_NV.float()
        if self.logit_scale != 1.0:
            logits_NV.mul_(self.logit_scale)
        if self.softcap is not None:
            logits_NV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_NV

    def _raw_logits(
        self, hidden_ND: torch.Tensor, lora: LoraBatch | None, start: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """In the base's dtype, before scaling and soft cap."""
        if lora is not None and self.site_index is not None:
            site, width = [self.site_index], [self.vocab_size]
            return lora_linear(
                hidden_ND, self.weight_VD, self.bias_V, site, width, lora, start=start, prepacked_weight=self.prepacked
            )
        logits_NV = prepacked.product(filled_up(hidden_ND), self.weight_VD, self.bias_V, self.prepacked)
        return logits_NV[: len(hidden_ND)], []

    def _backward(
        self,
        hidden_CD: torch.Tensor,
        logits_CV: torch.Tensor,
        normaliser_C1: torch.Tensor,
        rows_P: torch.Tensor,
        targets_PK: torch.Tensor,
        dlogprobs_PK: torch.Tensor,
        saved: list[torch.Tensor],
        lora: LoraBatch | None,
        start: int,
        dhidden_CD: torch.Tensor,
    ) -> None:
        """dHidden of a chunk into ``dhidden_CD``, dA and dB into the gradient rows; ``logits_CV`` is used up.
        Target position p is at row ``rows_P[p]`` of the chunk."""
        loss_mask_P = (dlogprobs_PK != 0).any(dim=1)
        loss_mask_C = (
            torch.zeros(len(hidden_CD), device=hidden_CD.device).index_add_(0, rows_P, loss_mask_P.float()) > 0
        )
        kept: torch.Tensor | None = None
        if not hidden_CD.is_cuda:
            kept = loss_mask_C.nonzero().squeeze(1)
            if len(kept) == 0:
                return
            if len(kept) < len(hidden_CD):
                hidden_CD, logits_CV, normaliser_C1 = hidden_CD[kept], logits_CV[kept], normaliser_C1[kept]
                targets_PK, dlogprobs_PK = targets_PK[loss_mask_P], dlogprobs_PK[loss_mask_P]
                rows_P = (loss_mask_C.cumsum(0) - 1)[rows_P[loss_mask_P]]
                if lora is not None and self.site_index is not None:
                    lora, start = lora.select((kept + start).tolist()), 0
                    if lora is not None:
                        saved = lora_intermediates(hidden_CD, [self.vocab_size], [self.site_index], lora)

        slope_CV = None if self.softcap is None else 1 - (logits_CV / self.softcap).square()
        dlogprobs_C = normaliser_C1.new_zeros(len(hidden_CD)).index_add_(0, rows_P, dlogprobs_PK.sum(dim=1))
        dlogits_CV = logits_CV.sub_(normaliser_C1).exp_().mul_(-dlogprobs_C[:, None])
        cells = target_cells(rows_P, targets_PK, self.vocab_size)
        dlogits_CV.view(-1).scatter_add_(0, cells.view(-1), dlogprobs_PK.reshape(-1))
        if slope_CV is not None:
            dlogits_CV.mul_(slope_CV)
        if self.logit_scale != 1.0:
            dlogits_CV.mul_(self.logit_scale)
        if kept is None:
            # A token whose loss is not finite has dloss 0, but its logits may be NaN: 0·NaN must not come back.
            dlogits_CV.masked_fill_(~loss_mask_C[:, None], 0.0)

        dy_CV = dlogits_CV.to(self.weight_VD.dtype)
        dh_CD = prepacked.product_backward(dy_CV, self.weight_VD)
        if lora is not None and self.site_index is not None:
            lora_backward(hidden_CD, [dy_CV], saved, [self.site_index], lora, dx_TI=dh_CD, start=start)
        if kept is None:
            dhidden_CD.copy_(dh_CD)
        else:
            dhidden_CD[kept] = dh_CD
