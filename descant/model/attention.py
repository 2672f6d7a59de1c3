"""The one attention function: training, scoring, prefill, decode and verification.

Registered in transformers' attention interface under ``NAME``; every family calls it with its own queries, keys and
values and hands our ``Pass`` through as one keyword. Keys are added in fixed float32 blocks of ``PAGE_TOKENS`` over at
least 8 query rows, so that a token's output does not depend on what else is in the pass, on how the sequence was cut
into passes, or on whether its keys came from the pass or from the KV pages: the sampler's log-probabilities equal the
trainer's bit for bit. Cost grows with the sum of squared sequence lengths, not with the square of their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from descant.model.passes import Pass

NAME = "descant"

KNOWN_KEYWORDS = frozenset({"sliding_window", "softcap", "plan"})
"""What a family may hand the attention function besides the common arguments. Any other that is not None is refused by
name (gpt-oss's ``s_aux``, ignored, is silently off by 0.23)."""


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    plan: Pass,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` [1, Hq, T, D], ``key``/``value`` [1, Hkv, T, D] (rotated, not repeated, maybe not contiguous) →
    ``[1, T, Hq, D]`` contiguous."""
    raise NotImplementedError


def register() -> None:
    """Idempotent."""
    raise NotImplementedError
