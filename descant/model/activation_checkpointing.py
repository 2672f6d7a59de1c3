"""Activation checkpointing: of as many layers as memory demands, a pass recomputes the activations in its backward.

A recomputed layer keeps its input alone and runs again, with everything it keeps, when the backward reaches it.
That costs a third of a layer's time, so no more layers are than must be: none, some of the first, or all.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from descant.errors import ServerError

if TYPE_CHECKING:
    from descant.model.lora.linear import ForwardContext

MARGIN = 0.92
"""Of the free memory: the rest is lost between blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """What a pass keeps, in bytes: a layer's, for each token (``layer``) and of it the layer's input alone (``input``);
    ``fixed``: whatever the number of tokens (the head's chunks)."""

    num_layers: int
    layer: float
    input: float
    fixed: float

    def needed(self, num_tokens: int, recomputed: int) -> float:
        """By a pass at its fullest, when the backward begins. One layer's gradients come to as much as its activations;
        layers that are computed again are the first, whose turn comes when the others' activations are gone."""
        again = recomputed == self.num_layers  # then one has its activations while all others' inputs are kept
        kept = (self.num_layers - recomputed + again) * self.layer + recomputed * self.input
        return num_tokens * (kept + self.layer + 4 * self.input) + self.fixed

    def recomputed_layers(self, num_tokens: int, free_bytes: float) -> int:
        """The fewest that make the pass fit; all, if none do."""
        room = free_bytes * MARGIN
        fitting = (layers for layers in range(self.num_layers) if self.needed(num_tokens, layers) <= room)
        return next(fitting, self.num_layers)

    def tokens_that_fit(self, free_bytes: float, choices: Sequence[int]) -> int:
        """The largest of ``choices`` (rising) that fits with nothing recomputed; the smallest, if none does."""
        fitting = [tokens for tokens in choices if self.needed(tokens, 0) <= free_bytes * MARGIN]
        return fitting[-1] if fitting else choices[0]


def attach(layers: Sequence[nn.Module], forward_context: ForwardContext) -> None:
    """From now on the forward context says of each pass how many of ``layers`` are recomputed."""
    for index, layer in enumerate(layers):
        layer.__class__ = _recomputable(type(layer))  # type: ignore[arg-type]
        layer._recompute = (index, forward_context)  # type: ignore[assignment]


@cache
def _recomputable(cls: type[Any]) -> type[Any]:
    def call(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        index, forward_context = self._recompute
        if index >= forward_context.num_recomputed or not torch.is_grad_enabled():
            return cls.__call__(self, hidden, *args, **kwargs)
        # The first layer's input may need no gradient, but what is inside adds to gradient rows all the same.
        grad_anchor = torch.zeros((), requires_grad=True)
        return _RecomputedLayer.apply(hidden, grad_anchor, self, cls.__call__, forward_context, args, kwargs)

    return type(cls.__name__, (cls,), {"__call__": call})


class _RecomputedLayer(torch.autograd.Function):
    """[.., T, D] → [.., T, D] of one layer."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        grad_anchor: torch.Tensor,
        layer: nn.Module,
        call: Any,
        forward_context: ForwardContext,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.again = (layer, call, forward_context, forward_context.current, args, kwargs)
        out = call(layer, hidden.detach(), *args, **kwargs)  # as in a pass without backward, whose graph it takes
        if not isinstance(out, torch.Tensor):
            raise ServerError(
                f"a layer gave {type(out).__name__}, expected hidden states alone: it cannot be recomputed"
            )
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        layer, call, forward_context, lora, args, kwargs = ctx.again
        before, forward_context.current = forward_context.current, lora
        try:
            with torch.enable_grad():
                leaf = hidden.detach().requires_grad_()
                (dhidden,) = torch.autograd.grad(call(layer, leaf, *args, **kwargs), leaf, grad_outputs[0])
        finally:
            forward_context.current, forward_context.joined_outputs = before, None
        return dhidden, None, None, None, None, None, None
