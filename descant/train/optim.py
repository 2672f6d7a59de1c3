"""AdamW over one adapter's row, all or nothing."""

from __future__ import annotations

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
    norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    if params.grad_clip_norm > 0:
        gradient.mul_(min(1.0, params.grad_clip_norm / (norm + 1e-6)))

    state = (weights, moment1, moment2)
    before = [tensor.clone() for tensor in state]
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
    if not _within(state, (limit, torch.finfo(moment1.dtype).max, torch.finfo(moment2.dtype).max)):
        for tensor, saved in zip(state, before, strict=True):
            tensor.copy_(saved)
        raise UserError(
            f"a step with learning_rate {params.learning_rate:g} on a gradient of norm {norm:g} would make a weight or "
            "a moment not finite, expected finite ones; weights are unchanged"
        )
    return norm


def _within(tensors: tuple[torch.Tensor, ...], limits: tuple[float, ...]) -> bool:
    """One wait for the device. NaN is not within anything (aminmax hands it on)."""
    extremes = torch.stack([torch.stack(torch.aminmax(tensor)) for tensor in tensors]).double()
    bounds = torch.tensor(limits, dtype=torch.float64, device=extremes.device)[:, None]
    return bool((extremes.abs() <= bounds).all())
