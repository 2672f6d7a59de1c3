"""From hidden states to log-probabilities, a chunk of tokens at a time: never a [T, V] float32 tensor.

The head's weight is frozen (and may be tied to the embedding: the adapter's product is added beside it, the shared
weight stays as it is). In training, a chunk's dLogits are formed right where its logits are, so nothing is recomputed.

Legend: T tokens, D hidden size, V vocabulary, K targets a position, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from descant.model.lora import LoraPass

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
    vocab_size: int

    def logits(self, hidden_ND: torch.Tensor, lora: LoraPass | None, *, start: int = 0) -> torch.Tensor:
        """float32 [N, V] of the stream's tokens ``start:start+N`` (``start`` finds their adapters)."""
        raise NotImplementedError

    def logits_at(self, hidden_TD: torch.Tensor, lora: LoraPass | None, indices: torch.Tensor) -> torch.Tensor:
        """float32 [N, V] of the stream's tokens ``indices`` int64 [N] (rising), each with its own adapter.
        Pads to at least 8 rows inside, so that a row's bits do not depend on how many are asked for."""
        raise NotImplementedError

    def logprobs(
        self,
        hidden_TD: torch.Tensor,
        targets_TK: torch.Tensor,
        lora: LoraPass | None,
        loss: ChunkLoss | None = None,
        chunk_tokens: int = 1024,
    ) -> HeadOutput:
        """Log-probabilities of ``targets_TK`` int64. With ``loss``, also dHidden, and dA, dB of the unembedding go into
        the gradient rows. ``hidden_TD`` is detached inside: the caller runs ``hidden.backward(dhidden)``.
        Chunks whose dloss/dlogprobs is None or all zero skip the backward half."""
        raise NotImplementedError
