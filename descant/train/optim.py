"""AdamW over one adapter's row, all or nothing."""

from __future__ import annotations

import torch

from descant.errors import UserError
from descant.types import AdamParams

NORM_BLOCK = 64

SAFE_NORMS = (1e-12, 1e18)
"""Between these a norm summed in float32 lost nothing: no square that counts is below its range or above it."""
MAX_RATE = 1e30
MARGIN = 4.0
"""What a bound keeps from a limit, for the rounding of the step itself."""


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

    Three copies of the row, to go back to, cost more than ten times the step itself (a row of 45 MB on CPU: 115 ms
    against 6). They are made only when the extremes of the row do not already exclude an overflow (``_is_safe``).
    """
    state = (weights, moment1, moment2)
    norm, extremes = _measure(gradient, state)
    if params.grad_clip_norm > 0:
        scale = min(1.0, params.grad_clip_norm / (norm + 1e-6))
        if scale != 1.0:  # NaN scales too: it stays NaN
            gradient.mul_(scale)

    before = None if _is_safe(norm, extremes, step, params, limit) else [tensor.clone() for tensor in state]
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
    if before is not None and not _within(state, limit):
        for tensor, saved in zip(state, before, strict=True):
            tensor.copy_(saved)
        raise UserError(
            f"a step with learning_rate {params.learning_rate:g} on a gradient of norm {norm:g} would make a weight or "
            "a moment not finite, expected finite ones; weights are unchanged"
        )
    return norm


def _measure(gradient: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[float, list[float]]:
    """The gradient's norm and the largest magnitude of each of ``state``; NaN where one is NaN. One wait."""
    extremes = [torch.stack(torch.aminmax(tensor)).abs().amax().reshape(1) for tensor in state]
    measured = torch.cat([_norm(gradient), *extremes]).tolist()
    if not SAFE_NORMS[0] <= measured[0] <= SAFE_NORMS[1]:
        # in float64 a finite gradient has a finite norm: the squares of 1e20 are beyond float32
        measured[0] = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    return measured[0], measured[1:]


def _norm(row: torch.Tensor) -> torch.Tensor:
    """float64 [1]. Summed in float32 in blocks, and those in float64: over a row of 11 million one float32 sum is off
    by 4e-4, and one in float64 takes 43 ms instead of 2."""
    num_whole = len(row) - len(row) % NORM_BLOCK
    blocks = torch.linalg.vector_norm(row[:num_whole].view(-1, NORM_BLOCK), dim=1)
    rest = torch.linalg.vector_norm(row[num_whole:]).reshape(1)
    return torch.linalg.vector_norm(torch.cat([blocks, rest]), dtype=torch.float64).reshape(1)


def _is_safe(norm: float, extremes: list[float], step: int, params: AdamParams, limit: float) -> bool:
    """Whether no number of this row can leave its range in this step. NaN is never safe: comparisons with it fail.

    |m1'| ≤ |m1| + |g| and m2' ≤ m2 + |g|², and a weight moves by at most rate · |m1'| / eps.
    """
    weight, moment1, moment2 = extremes
    most = torch.finfo(torch.float32).max / MARGIN
    rate = params.learning_rate / (1.0 - params.beta1**step)
    shrink = params.learning_rate * params.weight_decay
    if not (norm <= SAFE_NORMS[1] and rate <= MAX_RATE and shrink <= MAX_RATE):
        return False
    moved = rate * (moment1 + norm) / params.eps
    return (
        moment1 + norm <= most
        and (moment2 + norm * norm) / (1.0 - params.beta2**step) <= most
        and weight * (1.0 + shrink) + moved <= limit / MARGIN
    )


def _within(state: tuple[torch.Tensor, ...], limit: float) -> bool:
    """One wait for the device. NaN is not within anything (aminmax hands it on)."""
    largest = torch.finfo(torch.float32).max
    extremes = torch.stack([torch.stack(torch.aminmax(tensor)) for tensor in state]).double()
    bounds = torch.tensor([limit, largest, largest], dtype=torch.float64, device=extremes.device)[:, None]
    return bool((extremes.abs() <= bounds).all())
