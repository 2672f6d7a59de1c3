"""A frozen linear layer with many adapters: base product, then each segment's low-rank addition in place.

``y[s] = x[s] Wᵀ + (32 / r_s) · (x[s] A_sᵀ) B_sᵀ`` for every segment s of the pass. The hand-written autograd function
saves x and the rank-wide intermediate only, and adds dA and dB straight into the segment's fp32 gradient row.

``grouped_product`` chooses, in one place, how the segments' products are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from descant.model.bank import AdapterBank, LoraSite
from descant.model.passes import Pass


@dataclass(slots=True, kw_only=True)
class LoraPass:
    """A pass's segments, resolved against the bank once, for all layers."""

    # fields are the implementation's

    @staticmethod
    def of(pass_: Pass, bank: AdapterBank) -> LoraPass | None:
        """None when no token of the pass has an adapter."""
        raise NotImplementedError


class LoraChannel:
    """How the pass reaches the layers (transformers hands keywords to attention only). A plain attribute, read in
    forward and kept in the autograd context: on CUDA, backward runs in another thread, where no context variable is
    seen. One per base model; ``BaseModel.trunk`` sets it for the length of the call."""

    current: LoraPass | None = None


class MultiLoraLinear(nn.Module):
    """Stands where ``base`` (``nn.Linear``, or transformers' transposed ``Conv1D``) stood."""

    def __init__(self, base: nn.Module, site_index: int, site: LoraSite, channel: LoraChannel):
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out] in the base's dtype, leading dims flattened to the pass's T."""
        raise NotImplementedError


def lora_forward(
    x_TI: torch.Tensor, y_TO: torch.Tensor, site_index: int, lora: LoraPass, *, start: int = 0
) -> list[torch.Tensor]:
    """Adds the adapters' part to ``y`` in place for the stream's tokens ``start:start+T``; returns what
    ``lora_backward`` needs (the rank-wide intermediates)."""
    raise NotImplementedError


def lora_backward(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    saved: list[torch.Tensor],
    site_index: int,
    lora: LoraPass,
    *,
    dx_TI: torch.Tensor | None,
    start: int = 0,
) -> None:
    """Adds the adapters' part of dX to ``dx_TI`` (None: not wanted), and dA, dB to the segments' gradient rows."""
    raise NotImplementedError
