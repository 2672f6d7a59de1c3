"""Prepacked oneDNN weights, for passes of a few rows on CPU in bf16.

Half the time of a linear layer at 8 rows (576 → 1536: 55 against 104 µs), for a second copy of the weights. Only where
the bits are those of the plain product, which is tried when a weight is prepacked: sampler and trainer must agree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIN_ROWS, MAX_ROWS = 8, 64
"""Passes of fewer are filled up anyway; passes of more rows use the plain weights."""

MAX_BYTES = 2 << 30
"""Larger models are not doubled."""

TRIED_ROWS = (8, 16, 61)


def prepack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor | None:
    """None where the product of the prepacked weight is not to be had, or has other bits."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype != torch.bfloat16:
        return None
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    prepacked = reorder(weight_OI)
    generator = torch.Generator().manual_seed(0)
    for num_rows in TRIED_ROWS:
        x, addition = (
            torch.randn(num_rows, size, generator=generator).to(weight_OI.dtype) for size in weight_OI.shape[::-1]
        )
        addition[::2] = 0
        if not torch.equal(linear(x, prepacked, bias_O), F.linear(x, weight_OI, bias_O)):
            return None
        if not torch.equal(linear_add(x, prepacked, addition), torch.addmm(addition, x, weight_OI.t())):
            return None
    return prepacked


def reorder(weight_OI: torch.Tensor) -> torch.Tensor:
    """Of a bf16 weight on CPU, whether its products have the plain ones' bits or not."""
    prepacked: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), MIN_ROWS)
    return prepacked


def serves(prepacked: torch.Tensor | None, x: torch.Tensor) -> bool:
    return prepacked is not None and not torch.is_grad_enabled() and MIN_ROWS <= x[..., 0].numel() <= MAX_ROWS


def product(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, prepacked: torch.Tensor | None
) -> torch.Tensor:
    """``F.linear``, by the prepacked weight where that serves."""
    return (
        linear(x, prepacked, bias_O)
        if prepacked is not None and serves(prepacked, x)
        else F.linear(x, weight_OI, bias_O)
    )


def add_product(
    addition_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor, prepacked: torch.Tensor | None
) -> torch.Tensor:
    """``addition + F.linear(x, weight)``, rounded once. The addition is used up."""
    if prepacked is not None and serves(prepacked, x_TI):
        return linear_add(x_TI, prepacked, addition_TO)
    return addition_TO.addmm_(x_TI, weight_OI.t())


def linear(x: torch.Tensor, prepacked: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` of the weight that was prepacked."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, prepacked, bias_O, "none", [], "")
    return y


def linear_add(x: torch.Tensor, prepacked: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y + F.linear(x, weight)``, rounded once, as a new tensor. 2-D."""
    sums: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, y, prepacked, None, "add")
    return sums
