"""The layer's product for autograd and for the compiler.

A compiled layer's product is an operator that knows its pass by a number (``Handles``) and its sites by a tensor, so
that one graph serves all layers and all passes; what the backward needs stays with the pass then.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from descant.model import paged_batch
from descant.model.lora.batch import LORA_BATCHES
from descant.model.lora.products import lora_linear, lora_linear_backward


class LoraLinearFunction(torch.autograd.Function):
    """In a compiled layer its two halves are operators, which know the pass by its number."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        grad_anchor: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        handle: torch.Tensor,
        sites: torch.Tensor,
        widths: list[int],
    ) -> torch.Tensor:
        ctx.widths = widths
        if torch.compiler.is_compiling():
            ctx.save_for_backward(x_TI, weight_OI, handle, sites)
            y_TO: torch.Tensor = torch.ops.descant.lora_linear(x_TI, weight_OI, bias_O, handle, sites, widths, True)
            return y_TO
        ctx.lora = LORA_BATCHES[handle]
        y_TO, saved = lora_linear(x_TI, weight_OI, bias_O, sites.tolist(), widths, ctx.lora)
        ctx.save_for_backward(x_TI, weight_OI, handle, sites, *saved)
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, weight_OI, handle, sites, *saved = ctx.saved_tensors
        dy_TO = grad_outputs[0].contiguous()  # a sum's gradient comes with strides of 0
        dx_TI: torch.Tensor | None
        if torch.compiler.is_compiling():
            dx_TI = torch.ops.descant.lora_linear_backward(x_TI, dy_TO, weight_OI, handle, sites, ctx.widths)
        else:
            want_dx = ctx.needs_input_grad[0]
            dx_TI = lora_linear_backward(
                x_TI, dy_TO, weight_OI, saved, sites.tolist(), ctx.widths, ctx.lora, want_dx=want_dx
            )
        return dx_TI, None, None, None, None, None, None


def _linear_op(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    handle: torch.Tensor,
    sites: torch.Tensor,
    widths: list[int],
    save_for_backward: bool,
) -> torch.Tensor:
    """``save_for_backward``: what it needs stays with the batch."""
    lora, indices = LORA_BATCHES[handle], sites.tolist()
    y_TO, saved = lora_linear(x_TI, weight_OI, bias_O, indices, widths, lora, want_saved=save_for_backward)
    if save_for_backward:
        lora.save_for_backward(indices, saved)
    return y_TO


def _linear_backward_op(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    weight_OI: torch.Tensor,
    handle: torch.Tensor,
    sites: torch.Tensor,
    widths: list[int],
) -> torch.Tensor:
    """dX. dA and dB are added to gradient rows, of which the graph knows nothing."""
    lora, indices = LORA_BATCHES[handle], sites.tolist()
    dx_TI = lora_linear_backward(x_TI, dy_TO, weight_OI, lora.pop_saved(indices), indices, widths, lora, want_dx=True)
    assert dx_TI is not None
    return dx_TI


def _paged_linear_op(
    x_TI: torch.Tensor,
    weight_WI: torch.Tensor,
    bias_O: torch.Tensor | None,
    handle: torch.Tensor,
    sites: torch.Tensor,
    widths: list[int],
) -> torch.Tensor:
    """[T, sum of widths], W apart: where the weight has rows for LoRA A's, a row of the outcome has their columns,
    whether or not this batch computes them. So prefill and decode steps of any kind are one program."""
    batch, num_out = paged_batch.PAGED_BATCHES[handle], sum(widths)
    h_TH: torch.Tensor | None = None
    if len(weight_WI) == num_out:
        y_TO = F.linear(x_TI, weight_WI, bias_O)
    else:
        y_TW = x_TI.new_empty(len(x_TI), len(weight_WI))
        end = len(weight_WI) if batch.lora_a_fused else num_out
        torch.mm(x_TI, weight_WI[:end].t(), out=y_TW[:, :end])
        y_TO = y_TW[:, :num_out]
        if batch.lora_a_fused:
            h_TH = y_TW[:, num_out:]
    paged_batch.add_adapters(x_TI, y_TO, tuple(sites.tolist()), widths, batch.adapters, h_NH=h_TH)
    return y_TO


_LIBRARY = torch.library.Library("descant", "FRAGMENT")
_LIBRARY.define(
    "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor handle, Tensor sites, SymInt[] widths, "
    "bool save_for_backward) -> Tensor"
)
_LIBRARY.define(
    "lora_linear_backward(Tensor x, Tensor dy, Tensor weight, Tensor handle, Tensor sites, SymInt[] widths) -> Tensor"
)
_LIBRARY.define(
    "paged_linear(Tensor x, Tensor weight, Tensor? bias, Tensor handle, Tensor sites, SymInt[] widths) -> Tensor"
)
_LIBRARY.impl("lora_linear", _linear_op, "CompositeExplicitAutograd")
_LIBRARY.impl("lora_linear_backward", _linear_backward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("paged_linear", _paged_linear_op, "CompositeExplicitAutograd")


@torch.library.register_fake("descant::paged_linear", lib=_LIBRARY)
def _paged_linear_shape(
    x_TI: torch.Tensor,
    weight_WI: torch.Tensor,
    bias_O: torch.Tensor | None,
    handle: torch.Tensor,
    sites: torch.Tensor,
    widths: list[int],
) -> torch.Tensor:
    return x_TI.new_empty_strided((x_TI.shape[0], sum(widths)), (weight_WI.shape[0], 1))


@torch.library.register_fake("descant::lora_linear", lib=_LIBRARY)
def _linear_shape(x_TI: torch.Tensor, weight_OI: torch.Tensor, *rest: object) -> torch.Tensor:
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])


@torch.library.register_fake("descant::lora_linear_backward", lib=_LIBRARY)
def _linear_backward_shape(x_TI: torch.Tensor, *rest: object) -> torch.Tensor:
    return x_TI.new_empty(x_TI.shape)
