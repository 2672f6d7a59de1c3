"""AdamW over one adapter's row, all or nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from descant.errors import UserError
from descant.types import AdamParams


@torch.no_grad()
def adamw(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    *,
    step: int,
    params: AdamParams,
    limit: float,
) -> float:
    """One step in place; ``step`` counts from 1. All float32 [row]. Returns the gradient's norm before clipping.

    Loshchilov and Hutter 2019, as ``torch.optim.AdamW``: decay is decoupled, both moments are corrected for their
    start at zero; clipping scales by min(1, grad_clip_norm / (|g| + 1e-6)), as ``torch.nn.utils.clip_grad_norm_``.
    ``gradient`` is used up.
    ``limit``: the largest magnitude a weight may take (the working dtype's). Raises ``UserError`` when a weight would
    exceed it or a moment would not be finite; weights and moments are as before then.
    """
    # in float64 a finite gradient has a finite norm: the squares of 1e20 are beyond float32
    norm, *highest = _one_wait(
        torch.linalg.vector_norm(gradient, dtype=torch.float64),
        *(torch.stack(torch.aminmax(tensor)).abs().amax().double() for tensor in (weights, moment1, moment2)),
    )
    clipped = norm
    if params.grad_clip_norm > 0:
        factor = min(1.0, params.grad_clip_norm / (norm + 1e-6))
        gradient.mul_(factor)
        clipped = norm * factor

    state = (weights, moment1, moment2)
    limits = (limit, torch.finfo(moment1.dtype).max, torch.finfo(moment2.dtype).max)
    # Copies to go back to cost more than the step: they are made only where a bound does not exclude the need.
    bounds = _bounds(clipped, highest, step, params)
    is_safe = all(2 * bound <= most for bound, most in zip(bounds, limits))
    before = [] if is_safe else [tensor.clone() for tensor in state]
    torch._fused_adamw_(
        [weights],
        [gradient],
        [moment1],
        [moment2],
        [],
        [torch.tensor(float(step), device=weights.device)],
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        amsgrad=False,
        maximize=False,
    )
    if not is_safe and not _within(state, limits):
        for tensor, saved in zip(state, before, strict=True):
            tensor.copy_(saved)
        raise UserError(
            f"a step with learning_rate {params.learning_rate:g} on a gradient of norm {norm:g} would make a weight or "
            "a moment not finite, expected finite ones; weights are unchanged"
        )
    return norm


def _one_wait(*numbers: torch.Tensor) -> list[float]:
    values: list[float] = torch.stack(numbers).tolist()
    return values


def _bounds(norm: float, highest: Sequence[float], step: int, params: AdamParams) -> tuple[float, float, float]:
    """What no weight and no moment can exceed after the step, from the gradient's norm and the largest of each
    now. Infinite or NaN where nothing is known."""
    weight, moment1, moment2 = highest
    moment1 = params.beta1 * moment1 + (1 - params.beta1) * norm
    moment2 = params.beta2 * moment2 + (1 - params.beta2) * norm * norm
    correction = (1 - params.beta1**step) * params.eps  # the root of moment2 only makes the step smaller
    update = moment1 / correction if correction > 0 else math.inf
    rate = abs(params.learning_rate)
    return weight * (1 + rate * abs(params.weight_decay)) + rate * update, moment1, moment2


def _within(tensors: tuple[torch.Tensor, ...], limits: tuple[float, ...]) -> bool:
    """One wait for the device. NaN is not within anything (aminmax hands it on)."""
    extremes = torch.stack([torch.stack(torch.aminmax(tensor)) for tensor in tensors]).double()
    bounds = torch.tensor(limits, dtype=torch.float64, device=extremes.device)[:, None]
    return bool((extremes.abs() <= bounds).all())
