"""What measures and steps many rows at a time on CUDA, against the same row by row and in float64."""

from __future__ import annotations

import math

import pytest
import torch

from descant.errors import UserError
from descant.train.optim import StepRow, adamw, largest
from descant.types import AdamParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = (64, 3_000_064, 640, 100_032)


def rows(params: AdamParams, *, bad: int | None = None) -> list[StepRow]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = []
    for number, size in enumerate(SIZES):
        weights, gradient, moment1, moment2 = torch.randn(4, size, generator=generator, device="cuda")
        if number == bad:
            gradient[size - 3] = torch.nan
        made.append(
            StepRow(
                weights=weights,
                gradient=gradient,
                moment1=moment1,
                moment2=moment2.square(),
                step=number + 1,
                params=params,
            )
        )
    return made


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -30.0])
@pytest.mark.parametrize("at", [0, 65535, 65536, -1])
def test_the_largest_magnitude_is_found_wherever_it_is(value: float, at: int) -> None:
    tensors = [torch.randn(size, device="cuda").clamp(-9, 9) for size in SIZES]
    tensors[1][at] = value
    got, want = largest(tensors).tolist(), [float(tensor.abs().amax()) for tensor in tensors]
    assert [got[0], *got[2:]] == [want[0], *want[2:]]
    assert math.isnan(got[1]) if math.isnan(value) else got[1] == want[1]


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_together_equals_one_by_one(clip: float) -> None:
    params = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=clip)
    together, alone = rows(params, bad=2), rows(params, bad=2)
    norms = [float(torch.linalg.vector_norm(row.gradient, dtype=torch.float64)) for row in together]
    before = [tensor.clone() for tensor in together[2].state]
    outcomes = adamw(together, limit=1e38)
    for number, (ours, its, outcome) in enumerate(zip(together, alone, outcomes)):
        [want] = adamw([its], limit=1e38)
        if number == 2:
            assert isinstance(outcome, UserError)
            assert isinstance(want, UserError)
            assert all(torch.equal(tensor, saved) for tensor, saved in zip(ours.state, before))
        else:
            assert outcome == want == pytest.approx(norms[number], rel=1e-6)
            assert all(torch.equal(tensor, other) for tensor, other in zip(ours.state, its.state))
