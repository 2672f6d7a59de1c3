"""Activations that a pass keeps for its backward, or computes again there: as many layers as memory demands.

A layer that is recomputed keeps its input alone and runs again, with everything it keeps, when the backward reaches it.
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
    from descant.model.lora import LoraChannel

MARGIN = 0.92
"""Of the free memory: the rest is lost between blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
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


def attach(layers: Sequence[nn.Module], channel: LoraChannel) -> None:
    """From now on the channel says of each pass how many of ``layers`` are recomputed."""
    for index, layer in enumerate(layers):
        layer.__class__ = _recomputable(type(layer))  # type: ignore[arg-type]
        layer._recompute = (index, channel)  # type: ignore[assignment]


@cache
def _recomputable(cls: type[Any]) -> type[Any]:
    def call(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        index, channel = self._recompute
        if index >= channel.recomputed or not torch.is_grad_enabled():
            return cls.__call__(self, hidden, *args, **kwargs)
        # The first layer's input may need no gradient, but what is inside adds to gradient rows all the same.
        recorded = torch.zeros((), requires_grad=True)
        return _Recomputed.apply(hidden, recorded, self, cls.__call__, channel, args, kwargs)

    return type(cls.__name__, (cls,), {"__call__": call})


class _Recomputed(torch.autograd.Function):
    """[.., T, D] → [.., T, D] of one layer."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        recorded: torch.Tensor,
        layer: nn.Module,
        call: Any,
        channel: LoraChannel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.again = (layer, call, channel, channel.current, args, kwargs)
        out = call(layer, hidden.detach(), *args, **kwargs)  # as in a pass without backward, whose graph it takes
        if not isinstance(out, torch.Tensor):
            raise ServerError(
                f"a layer gave {type(out).__name__}, expected hidden states alone: it cannot be recomputed"
            )
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        layer, call, channel, lora, args, kwargs = ctx.again
        before, channel.current = channel.current, lora
        try:
            with torch.enable_grad():
                leaf = hidden.detach().requires_grad_()
                (dhidden,) = torch.autograd.grad(call(layer, leaf, *args, **kwargs), leaf, grad_outputs[0])
        finally:
            channel.current, channel.given = before, None
        return dhidden, None, None, None, None, None, None
