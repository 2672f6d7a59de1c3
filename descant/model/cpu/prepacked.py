"""oneDNN's products on CPU: of prepacked weights in bf16 and in float32, and in float32 of plain weights too.

A prepacked weight costs a second copy. In bf16 it takes half the time of the plain product at 8 rows (576 → 1536: 55
against 104 µs), and is used only where the bits are the plain product's, which is tried when a weight is prepacked:
sampler and trainer must agree.

In float32 torch's own products are MKL's: slower (by two thirds at 8 rows, a tenth at many), and with other bits for
other numbers of rows. oneDNN's have the same bits for a row beside any others, of prepacked and of plain weights, added
to something or not; so trainer and sampler both take them for every frozen layer and every adapter (``is_onednn``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

MIN_ROWS, MAX_ROWS = 8, 64
"""Passes of fewer are filled up anyway; in bf16, passes of more rows use the plain weights."""

MAX_BYTES = 2 << 30
"""Larger models are not doubled."""

TRIED_ROWS = (8, 16, 61)

PROBES = ((192, 576), (33, 65), (64, 2048), (160, 16))
"""Weights whose float32 products are tried in every process, once."""


@cache
def has_float32() -> bool:
    """oneDNN's float32 products are there and have one row's bits beside any others (with AVX alone they do not)."""
    if not torch.backends.mkldnn.is_available():
        return False
    with torch.no_grad():
        return all(_has_same_bits(*shape) for shape in PROBES)


def _has_same_bits(num_out: int, num_in: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight_OI, x, addition, bias_O = (
        torch.randn(shape, generator=generator)
        for shape in ((num_out, num_in), (300, num_in), (300, num_out), (num_out,))
    )
    y = linear(x, weight_OI, None)
    plain, strided, prepacked = weight_OI, weight_OI.t().contiguous().t(), reorder(weight_OI)
    return all(
        torch.equal(linear(x[:rows], weight, None), y[:rows])
        and torch.equal(linear(x[:rows], weight, bias_O), y[:rows] + bias_O)
        and torch.equal(linear_add(x[:rows], weight, addition[:rows]), y[:rows] + addition[:rows])
        for weight in (plain, strided, prepacked)
        for rows in (MIN_ROWS, 9, 31, 61, 65, 300)
    )


def is_onednn(x: torch.Tensor) -> bool:
    """Products of ``x`` are oneDNN's, of plain weights too. At least two rows: one alone has other bits."""
    return (
        x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and has_float32()
    )


def prepack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor | None:
    """None where the product of the prepacked weight is not to be had, or has other bits."""
    if not is_onednn(weight_OI) and not (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype == torch.bfloat16
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return None
    prepacked = reorder(weight_OI)
    generator = torch.Generator().manual_seed(0)
    for num_rows in TRIED_ROWS:
        x, addition = (
            torch.randn(num_rows, size, generator=generator).to(weight_OI.dtype) for size in weight_OI.shape[::-1]
        )
        addition[::2] = 0
        if not torch.equal(linear(x, prepacked, bias_O), product(x, weight_OI, bias_O, None)):
            return None
        if not torch.equal(linear_add(x, prepacked, addition), add_product(addition.clone(), x, weight_OI, None)):
            return None
    return prepacked


def reorder(weight_OI: torch.Tensor) -> torch.Tensor:
    """Of a bf16 or float32 weight on CPU, whether its products have the plain ones' bits or not."""
    prepacked: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), MIN_ROWS)
    return prepacked


def serves(prepacked: torch.Tensor | None, x: torch.Tensor) -> bool:
    if prepacked is None or torch.is_grad_enabled():
        return False
    num_rows = x[..., 0].numel()
    return num_rows >= MIN_ROWS and (num_rows <= MAX_ROWS or x.dtype == torch.float32)


def product(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, prepacked: torch.Tensor | None
) -> torch.Tensor:
    """``F.linear`` of a frozen weight, by the prepacked one where that serves."""
    if prepacked is not None and serves(prepacked, x):
        return linear(x, prepacked, bias_O)
    if not is_onednn(x):
        return F.linear(x, weight_OI, bias_O)
    if torch.is_grad_enabled() and x.requires_grad:
        y: torch.Tensor = _Product.apply(x, weight_OI, bias_O)
        return y
    return linear(x, weight_OI, bias_O)


def add_product(
    addition_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor, prepacked: torch.Tensor | None
) -> torch.Tensor:
    """``addition + F.linear(x, weight)``, rounded once. The addition is used up. Without a backward."""
    if prepacked is not None and serves(prepacked, x_TI):
        return linear_add(x_TI, prepacked, addition_TO)
    if is_onednn(x_TI):
        return linear_add(x_TI, weight_OI, addition_TO)
    return addition_TO.addmm_(x_TI, weight_OI.t())


def product_backward(dy_TO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """dX [T, I] of ``product``. Its bits may depend on T."""
    return linear(dy_TO, weight_OI.t(), None) if is_onednn(dy_TO) else torch.mm(dy_TO, weight_OI)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight_OI)
        return linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight_OI,) = ctx.saved_tensors
        (dy,) = grad_outputs
        dx_TI = product_backward(dy.reshape(-1, dy.shape[-1]), weight_OI)
        return dx_TI.view(*dy.shape[:-1], -1), None, None


def linear(x: torch.Tensor, weight: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` of a weight that was prepacked; in float32, of any."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias_O, "none", [], "")
    return y


def linear_add(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y + F.linear(x, weight)``, rounded once, as a new tensor. 2-D. Weights as for ``linear``."""
    sums: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, y, weight, None, "add")
    return sums
