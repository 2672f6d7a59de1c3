"""Weights in the layout that oneDNN multiplies fastest, for passes of a few rows on CPU in bf16.

Half the time of a linear layer at 8 rows (576 → 1536: 55 against 104 µs), for a second copy of the weights. Only where
the bits are those of the plain product, which is tried when a weight is packed: sampler and trainer must agree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIN_ROWS, MAX_ROWS = 8, 64
"""Passes of fewer are filled up anyway; passes of more rows use the plain weights."""

MAX_BYTES = 2 << 30
"""Larger models are not doubled."""

TRIED_ROWS = (8, 16, 61)


def pack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor | None:
    """None where the product of the packed weight is not to be had, or has other bits."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype != torch.bfloat16:
        return None
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed = reorder(weight_OI)
    generator = torch.Generator().manual_seed(0)
    for num_rows in TRIED_ROWS:
        x = torch.randn(num_rows, weight_OI.shape[1], generator=generator).to(weight_OI.dtype)
        if not torch.equal(linear(x, packed, bias_O), F.linear(x, weight_OI, bias_O)):
            return None
    return packed


def reorder(weight_OI: torch.Tensor) -> torch.Tensor:
    """Of a bf16 weight on CPU, whether its products have the plain ones' bits or not."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), MIN_ROWS)
    return packed


def serves(packed: torch.Tensor | None, x: torch.Tensor) -> bool:
    return packed is not None and not torch.is_grad_enabled() and MIN_ROWS <= x[..., 0].numel() <= MAX_ROWS


def product(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, packed: torch.Tensor | None
) -> torch.Tensor:
    """``F.linear``, by the packed weight where that serves."""
    return linear(x, packed, bias_O) if packed is not None and serves(packed, x) else F.linear(x, weight_OI, bias_O)


def linear(x: torch.Tensor, packed: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` of the weight that was packed."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias_O, "none", [], "")
    return y


def linear_add(x: torch.Tensor, packed: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y + F.linear(x, weight)``, rounded once, as a new tensor. 2-D."""
    sums: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, y, packed, None, "add")
    return sums
