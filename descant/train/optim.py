"""AdamW over adapters' rows, all or nothing for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from descant.errors import UserError
from descant.model.forward_batch import to_device
from descant.types import AdamParams

NORM_BLOCK = 64

SAFE_NORMS = (1e-12, 1e18)
"""Between these a norm summed in float32 lost nothing: no square that counts is below its range or above it."""
MAX_RATE = 1e30
MARGIN = 4.0
"""What a bound keeps from a limit, for the rounding of the step itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """An adapter and the step it is to take, ``step`` counting from 1. Tensors are float32 [row], ``gradient`` is used
    up."""

    weights: torch.Tensor
    gradient: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor
    step: int
    params: AdamParams

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.weights, self.moment1, self.moment2


Measure = Callable[[Sequence[StepRow]], list[tuple[float, list[float]]]]
"""By row: its gradient's norm, and the largest magnitude of each of ``state``; NaN where one is NaN. One wait."""


def measure_rows(rows: Sequence[StepRow]) -> list[tuple[float, list[float]]]:
    """``Measure`` on the rows' own device."""
    gradients = [row.gradient for row in rows]
    extremes = largest([tensor for row in rows for tensor in row.state]).view(-1, 3)
    measured = torch.cat([_norms(gradients)[:, None], extremes.double()], dim=1).tolist()
    for gradient, numbers in zip(gradients, measured, strict=True):
        if not (gradient.is_cuda or SAFE_NORMS[0] <= numbers[0] <= SAFE_NORMS[1]):
            # in float64 a finite gradient has a finite norm: the squares of 1e20 are beyond float32
            numbers[0] = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    return [(norm, extremes) for norm, *extremes in measured]


@torch.no_grad()
def adamw(
    rows: Sequence[StepRow],
    *,
    limit: float,
    gradients_ready: torch.cuda.Event | None = None,
    measure: Measure = measure_rows,
) -> list[float | Exception]:
    """One step of each, in place. By row its gradient's norm before clipping, or why it did not step.

    Loshchilov and Hutter 2019, as ``torch.optim.AdamW``: decay is decoupled, both moments are corrected for their
    start at zero; clipping scales by min(1, grad_clip_norm / (|g| + 1e-6)), as ``torch.nn.utils.clip_grad_norm_``.
    ``limit``: the largest magnitude a weight may take (the working dtype's). ``UserError`` when a weight would exceed
    it or a moment would not be finite; weights and moments are as before then.

    All rows are measured before the first steps: the device is waited for once, however many there are.
    ``gradients_ready``: on CUDA, when all had their numbers; what the stream got after that (a decode step) is not
    waited for. Three copies of a row, to roll back to, cost more than ten times the step itself (a row of 45 MB on CPU:
    115 ms against 6). They are made only when the extremes of the row do not already exclude an overflow
    (``_is_safe``). ``measure`` is called once, with all rows.
    """
    with _side_stream(gradients_ready):
        measured = measure(rows)
    scales = [_clipping(row.params, norm) for row, (norm, _) in zip(rows, measured, strict=True)]
    clipped = [(row.gradient, scale) for row, scale in zip(rows, scales, strict=True) if scale != 1.0]
    if clipped:
        torch._foreach_mul_([gradient for gradient, _ in clipped], [scale for _, scale in clipped])

    outcomes: list[float | Exception] = [norm for norm, _ in measured]
    safe: dict[AdamParams, list[StepRow]] = {}
    for number, (row, (norm, extremes)) in enumerate(zip(rows, measured, strict=True)):
        if _is_safe(norm, extremes, row.step, row.params, limit):
            safe.setdefault(row.params, []).append(row)
            continue
        try:
            _step_or_roll_back(row, norm, limit)
        except Exception as error:  # no memory for the copies is no reason for the others not to step
            outcomes[number] = error
    for together in safe.values():
        _step(together)
    return outcomes


@contextmanager
def _side_stream(gradients_ready: torch.cuda.Event | None) -> Iterator[None]:
    """On a stream of its own, from ``gradients_ready`` on. On exit what it computed has been waited for: what that
    reads may change then."""
    if gradients_ready is None:
        yield
        return
    stream = _stream(torch.cuda.current_device())
    stream.wait_event(gradients_ready)
    with torch.cuda.stream(stream):
        yield


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # its work is short, and waited for


def largest(rows: list[torch.Tensor]) -> torch.Tensor:
    """float32 [len(rows)]: the largest magnitude of each, NaN where there is one. Waits for nothing."""
    if rows[0].is_cuda:
        return torch.stack(torch._foreach_norm(rows, torch.inf))
    # A norm takes seven times as long here (11 million numbers on one thread: 36 ms against 5).
    return torch.stack([torch.stack(torch.aminmax(row)) for row in rows]).abs().amax(dim=1)


def _norms(rows: list[torch.Tensor]) -> torch.Tensor:
    """float64 [len(rows)]; summed in float64 on CUDA, where that takes no longer."""
    if rows[0].is_cuda:
        return torch.stack(torch._foreach_norm(rows, 2, dtype=torch.float64))
    return torch.cat([_norm(row) for row in rows])


def _norm(row: torch.Tensor) -> torch.Tensor:
    """float64 [1]. Summed in float32 in blocks, and those in float64: over a row of 11 million one float32 sum is off
    by 4e-4, and one in float64 takes 43 ms instead of 2."""
    num_whole = len(row) - len(row) % NORM_BLOCK
    blocks = torch.linalg.vector_norm(row[:num_whole].view(-1, NORM_BLOCK), dim=1)
    rest = torch.linalg.vector_norm(row[num_whole:]).reshape(1)
    return torch.linalg.vector_norm(torch.cat([blocks, rest]), dtype=torch.float64).reshape(1)


def _clipping(params: AdamParams, norm: float) -> float:
    return min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0


def _step(rows: Sequence[StepRow]) -> None:
    """All of them with the same parameters."""
    params, device = rows[0].params, rows[0].weights.device
    torch._fused_adamw_(
        [row.weights for row in rows],
        [row.gradient for row in rows],
        [row.moment1 for row in rows],
        [row.moment2 for row in rows],
        [],
        list(to_device(torch.tensor([float(row.step) for row in rows]), device).unbind()),
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        amsgrad=False,
        maximize=False,
    )


def _step_or_roll_back(row: StepRow, norm: float, limit: float) -> None:
    before = [tensor.clone() for tensor in row.state]
    _step([row])
    if _within(row.state, limit):
        return
    for tensor, saved in zip(row.state, before, strict=True):
        tensor.copy_(saved)
    raise UserError(
        f"a step with learning_rate {row.params.learning_rate:g} on a gradient of norm {norm:g} would make a weight or "
        "a moment not finite, expected finite ones; weights are unchanged"
    )


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
