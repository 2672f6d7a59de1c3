"""From hidden states to log-probabilities, a chunk of tokens at a time: never a [T, V] float32 tensor.

The head's weight is frozen (and may be tied to the embedding: the adapter's product is added beside it, the shared
weight stays as it is). In training, a chunk's dLogits are formed right where its logits are, so nothing is recomputed.

Trainer and sampler get their logits from one function, in the base's dtype and then float32, over at least 8 rows
(below 4 rows the fp32 library takes another path): a row's bits do not depend on how many rows are asked for.

Legend: T tokens, D hidden size, V vocabulary, K targets a position, C tokens of a chunk, N rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from descant.model import packed
from descant.model.lora import (
    LoraPass,
    lora_backward,
    lora_forward,
    lora_intermediates,
    lora_linear,
    lora_linear_backward,
)

MIN_ROWS = 8

CHUNK_TOKENS = {"cpu": 128, "cuda": 2048}
"""At 49k words a chunk's logits are 25 MB and 400 MB. On CPU larger buffers are new pages of the system in each chunk
(1024 tokens in bf16, one thread: 0.77 s at 128, 1.4 s at 1024); on CUDA a small chunk leaves the device idle."""

ChunkLoss = Callable[[slice, torch.Tensor], torch.Tensor | None]
"""``(tokens, logprobs_CK float32) -> dloss/dlogprobs_CK float32`` (None: nothing to push back for this chunk).

Called once per chunk, in stream order. It must return finite numbers only: what is not finite is put to 0 by ``where``
and reported by whoever owns the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutput:
    """``logprobs_TK`` float32 [T, K]; ``dhidden_TD`` in the base's dtype, None without a ``loss``."""

    logprobs_TK: torch.Tensor
    dhidden_TD: torch.Tensor | None


class Head:
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
        self.packed: torch.Tensor | None = None

    def logits(self, hidden_ND: torch.Tensor, lora: LoraPass | None, *, start: int = 0) -> torch.Tensor:
        """float32 [N, V] of the stream's tokens ``start:start+N`` (``start`` finds their adapters)."""
        with torch.no_grad():
            return self._logits(hidden_ND, lora, start)[0]

    def logits_at(self, hidden_TD: torch.Tensor, lora: LoraPass | None, indices: torch.Tensor) -> torch.Tensor:
        """float32 [N, V] of the stream's tokens ``indices`` int64 [N] (rising), each with its own adapter.
        Pads to at least 8 rows inside, so that a row's bits do not depend on how many are asked for."""
        if lora is not None:
            lora = lora.select(indices.tolist())
        return self.logits(hidden_TD.index_select(0, indices.to(hidden_TD.device)), lora)

    def logprobs(
        self,
        hidden_TD: torch.Tensor,
        targets_TK: torch.Tensor,
        lora: LoraPass | None,
        loss: ChunkLoss | None = None,
        chunk_tokens: int | None = None,
    ) -> HeadOutput:
        """Log-probabilities of ``targets_TK`` int64. With ``loss``, also dHidden, and dA, dB of the unembedding go into
        the gradient rows. ``hidden_TD`` is detached inside: the caller runs ``hidden.backward(dhidden)``.
        Chunks whose dloss/dlogprobs is None or all zero skip the backward half; so does every token whose dloss is
        zero, on CPU (on CUDA the host would wait for their number, so they are computed and come out as zero)."""
        if chunk_tokens is None:
            chunk_tokens = CHUNK_TOKENS["cpu" if hidden_TD.device.type == "cpu" else "cuda"]
        hidden_TD = hidden_TD.detach()
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TD.device)
        dhidden_TD = None if loss is None else torch.zeros_like(hidden_TD)
        with torch.no_grad():
            for start in range(0, len(hidden_TD), chunk_tokens):
                chunk = slice(start, min(start + chunk_tokens, len(hidden_TD)))
                targets_CK = targets_TK[chunk]
                if self.compiled and targets_TK.shape[1] == 1 and chunk.stop - chunk.start >= MIN_ROWS:
                    self._fused_chunk(chunk, hidden_TD, targets_TK, lora, loss, logprobs_TK, dhidden_TD)
                    continue
                logits_CV, saved = self._logits(hidden_TD[chunk], lora, start)
                normaliser_C1 = logits_CV.logsumexp(dim=1, keepdim=True)
                logprobs_TK[chunk] = logits_CV.gather(1, targets_CK) - normaliser_C1
                if loss is None or dhidden_TD is None:
                    continue
                dlogprobs_CK = loss(chunk, logprobs_TK[chunk])
                if dlogprobs_CK is None:
                    continue
                # dLogits take the place of the logits, which nobody needs any more.
                self._backward(
                    hidden_TD[chunk],
                    logits_CV,
                    normaliser_C1,
                    targets_CK,
                    dlogprobs_CK,
                    saved,
                    lora,
                    start,
                    dhidden_TD[chunk],
                )
        return HeadOutput(logprobs_TK=logprobs_TK, dhidden_TD=dhidden_TD)

    def _fused_chunk(
        self,
        chunk: slice,
        hidden_TD: torch.Tensor,
        targets_T1: torch.Tensor,
        lora: LoraPass | None,
        loss: ChunkLoss | None,
        logprobs_T1: torch.Tensor,
        dhidden_TD: torch.Tensor | None,
    ) -> None:
        """What ``logprobs`` does with a chunk, with logits and dLogits in the base's dtype."""
        hidden_CD, targets_C, start = hidden_TD[chunk], targets_T1[chunk, 0], chunk.start
        logits_CV, saved = self._raw_logits(hidden_CD, lora, start)
        _of_any_length(logits_CV, targets_C)
        logprobs_C, normaliser_C = _target_logprobs(logits_CV, targets_C, self.logit_scale, self.softcap)
        logprobs_T1[chunk, 0] = logprobs_C
        dlogprobs_C1 = None if loss is None else loss(chunk, logprobs_T1[chunk])
        if dlogprobs_C1 is None or dhidden_TD is None:
            return
        dlogprobs_C = dlogprobs_C1[:, 0].contiguous()
        _of_any_length(normaliser_C, dlogprobs_C)
        dy_CV = _dlogits(logits_CV, normaliser_C, targets_C, dlogprobs_C, self.logit_scale, self.softcap)
        if lora is None or self.site_index is None:
            torch.mm(dy_CV, self.weight_VD, out=dhidden_TD[chunk])
            return
        site, width = [self.site_index], [self.vocab_size]
        dh_CD = lora_linear_backward(
            hidden_CD, dy_CV, self.weight_VD, saved, site, width, lora, start=start, want_dx=True
        )
        assert dh_CD is not None
        dhidden_TD[chunk] = dh_CD

    def _logits(
        self, hidden_ND: torch.Tensor, lora: LoraPass | None, start: int
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
        self, hidden_ND: torch.Tensor, lora: LoraPass | None, start: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """In the base's dtype, before scaling and soft cap."""
        if lora is not None and self.site_index is not None and len(hidden_ND) >= MIN_ROWS:
            site, width = [self.site_index], [self.vocab_size]
            return lora_linear(
                hidden_ND, self.weight_VD, self.bias_V, site, width, lora, start=start, packed_weight=self.packed
            )
        num_rows: int = len(hidden_ND)
        saved: list[torch.Tensor] = []
        padded_ND = F.pad(hidden_ND, (0, 0, 0, MIN_ROWS - num_rows)) if num_rows < MIN_ROWS else hidden_ND
        logits_NV = packed.product(padded_ND, self.weight_VD, self.bias_V, self.packed)[:num_rows]
        if lora is not None and self.site_index is not None:
            saved = lora_forward(hidden_ND, [logits_NV], [self.site_index], lora, start=start)
        return logits_NV, saved

    def _backward(
        self,
        hidden_CD: torch.Tensor,
        logits_CV: torch.Tensor,
        normaliser_C1: torch.Tensor,
        targets_CK: torch.Tensor,
        dlogprobs_CK: torch.Tensor,
        saved: list[torch.Tensor],
        lora: LoraPass | None,
        start: int,
        dhidden_CD: torch.Tensor,
    ) -> None:
        """dHidden of a chunk into ``dhidden_CD``, dA and dB into the gradient rows; ``logits_CV`` is used up."""
        wanted_C = (dlogprobs_CK != 0).any(dim=1)
        kept: torch.Tensor | None = None
        if not hidden_CD.is_cuda:
            kept = wanted_C.nonzero().squeeze(1)
            if len(kept) == 0:
                return
            if len(kept) < len(hidden_CD):
                hidden_CD, logits_CV, normaliser_C1 = hidden_CD[kept], logits_CV[kept], normaliser_C1[kept]
                targets_CK, dlogprobs_CK = targets_CK[kept], dlogprobs_CK[kept]
                if lora is not None and self.site_index is not None:
                    lora, start = lora.select((kept + start).tolist()), 0
                    if lora is not None:
                        saved = lora_intermediates(hidden_CD, [self.vocab_size], [self.site_index], lora)

        slope_CV = None if self.softcap is None else 1 - (logits_CV / self.softcap).square()
        dlogits_CV = logits_CV.sub_(normaliser_C1).exp_().mul_(-dlogprobs_CK.sum(dim=1, keepdim=True))
        dlogits_CV.scatter_add_(1, targets_CK, dlogprobs_CK)
        if slope_CV is not None:
            dlogits_CV.mul_(slope_CV)
        if self.logit_scale != 1.0:
            dlogits_CV.mul_(self.logit_scale)
        if kept is None:
            # A token whose loss is not finite has dloss 0, but its logits may be NaN: 0·NaN must not come back.
            dlogits_CV.masked_fill_(~wanted_C[:, None], 0.0)

        dy_CV = dlogits_CV.to(self.weight_VD.dtype)
        dh_CD = torch.mm(dy_CV, self.weight_VD)
        if lora is not None and self.site_index is not None:
            lora_backward(hidden_CD, [dy_CV], saved, [self.site_index], lora, dx_TI=dh_CD, start=start)
        if kept is None:
            dhidden_CD.copy_(dh_CD)
        else:
            dhidden_CD[kept] = dh_CD


def _of_any_length(*tensors: torch.Tensor) -> None:
    """One graph for every chunk."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _scaled_logits(logits_CV: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    logits_CV = logits_CV.float() * scale
    return logits_CV if softcap is None else softcap * torch.tanh(logits_CV / softcap)


@torch.compile(dynamic=False)
def _target_logprobs(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [C] log-probabilities and normalisers."""
    logits_CV = _scaled_logits(logits_CV, scale, softcap)
    normaliser_C = logits_CV.logsumexp(1)
    return logits_CV.gather(1, targets_C[:, None])[:, 0] - normaliser_C, normaliser_C


@torch.compile(dynamic=False)
def _dlogits(
    logits_CV: torch.Tensor,
    normaliser_C: torch.Tensor,
    targets_C: torch.Tensor,
    dlogprobs_C: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """In the logits' dtype. A token with dloss 0 gets 0, whatever its logits are."""
    scaled_CV = _scaled_logits(logits_CV, scale, softcap)
    hot_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    probs_CV = (scaled_CV - normaliser_C[:, None]).exp()
    dlogits_CV = dlogprobs_C[:, None] * (hot_CV.float() - probs_CV) * scale
    if softcap is not None:
        dlogits_CV = dlogits_CV * (1 - (scaled_CV / softcap).square())
    return torch.where(dlogprobs_C[:, None] == 0, 0.0, dlogits_CV).to(logits_CV.dtype)
