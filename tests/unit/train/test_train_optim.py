"""The row's AdamW against torch.optim.AdamW, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from descant.errors import UserError
from descant.train import optim
from descant.types import AdamParams

LIMIT = torch.finfo(torch.float32).max


class Taker:
    """A row that takes steps."""

    def __init__(self, size: int = 1000, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(size, generator=self.generator)
        self.moment1, self.moment2 = torch.zeros(size), torch.zeros(size)
        self.step = 0

    def new_gradient(self) -> torch.Tensor:
        return torch.randn(self.weights.shape, generator=self.generator) * 0.1

    def take(self, gradient: torch.Tensor, params: AdamParams, limit: float = LIMIT) -> float:
        [outcome] = optim.adamw([self.next(gradient, params)], limit=limit)
        if isinstance(outcome, Exception):
            raise outcome
        self.step += 1
        return outcome

    def next(self, gradient: torch.Tensor, params: AdamParams) -> optim.StepRow:
        return optim.StepRow(
            weights=self.weights,
            gradient=gradient.clone(),
            moment1=self.moment1,
            moment2=self.moment2,
            step=self.step + 1,
            params=params,
        )

    @property
    def state(self) -> list[torch.Tensor]:
        return [self.weights, self.moment1, self.moment2]


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(),
        AdamParams(learning_rate=1e-2, beta1=0.5, beta2=0.999, eps=1e-8, weight_decay=0.1),
        AdamParams(learning_rate=1e-2, beta1=0.0),
        AdamParams(learning_rate=1e-2, beta2=0.0, eps=1e-3),
        AdamParams(learning_rate=1e-2, grad_clip_norm=0.5),
        AdamParams(learning_rate=1e-2, grad_clip_norm=1e6),
        AdamParams(learning_rate=0.0, weight_decay=0.5),
    ],
    ids=["defaults", "all set", "beta1 0", "beta2 0", "clipped", "clip out of reach", "lr 0"],
)
def test_equals_torch(params: AdamParams) -> None:
    row = Taker()
    start = row.weights.clone()
    reference = torch.nn.Parameter(row.weights.clone())
    optimizer = torch.optim.AdamW(
        [reference],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        foreach=False,
        fused=False,
    )
    for _ in range(5):
        gradient = row.new_gradient()
        reference.grad = gradient.clone()
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_([reference], params.grad_clip_norm)
        optimizer.step()
        assert row.take(gradient, params) == pytest.approx(gradient.norm().item(), rel=1e-6)
        assert (row.weights - reference.detach()).abs().max() <= 1e-6
    if params.learning_rate == 0:
        assert torch.equal(row.weights, start)
    else:
        assert not torch.equal(row.weights, start)


def test_zero_gradient_leaves_zero_weights_zero() -> None:
    row = Taker()
    row.weights.zero_()
    row.take(torch.zeros_like(row.weights), AdamParams())
    assert row.weights.count_nonzero() == 0


@pytest.mark.parametrize(
    ("params", "scale", "limit"),
    [
        (AdamParams(learning_rate=1e39), 1.0, LIMIT),
        (AdamParams(learning_rate=1e30), 1.0, 1e29),
        (AdamParams(), 1e25, LIMIT),
        (AdamParams(), float("nan"), LIMIT),
        (AdamParams(weight_decay=1e300), 1.0, LIMIT),
    ],
    ids=["infinite weights", "beyond the working dtype", "infinite second moment", "nan gradient", "decay"],
)
def test_refused_step_changes_nothing(params: AdamParams, scale: float, limit: float) -> None:
    row = Taker()
    row.take(row.new_gradient(), AdamParams())
    before = [tensor.clone() for tensor in (row.weights, row.moment1, row.moment2)]
    with pytest.raises(UserError, match="would make a weight or a moment not finite"):
        row.take(row.new_gradient() * scale, params, limit)
    for tensor, saved in zip((row.weights, row.moment1, row.moment2), before, strict=True):
        assert torch.equal(tensor, saved)
    row.take(row.new_gradient(), AdamParams())


def test_norm_of_a_large_gradient_is_finite() -> None:
    row = Taker()
    gradient = torch.full_like(row.weights, 1e18)
    assert row.take(gradient, AdamParams()) == pytest.approx(1e18 * 1000**0.5, rel=1e-6)


class Clones(TorchDispatchMode):
    """The number of elements of each tensor that is cloned meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("params", "scale", "copies"),
    [
        (AdamParams(), 1.0, False),
        (AdamParams(learning_rate=1.0, eps=1e-8), 1e12, False),
        (AdamParams(learning_rate=1e3, eps=1e-37), 1.0, True),
        (AdamParams(), 1e19, True),
        (AdamParams(learning_rate=1e25), 1.0, True),
    ],
    ids=["usual", "large but bounded", "tiny eps", "squares beyond float32", "wild rate"],
)
def test_rows_are_copied_only_when_the_step_might_have_to_be_undone(
    params: AdamParams, scale: float, copies: bool
) -> None:
    """Both ways give the same bits; a refused step is only ever one that was copied."""
    row, careful = Taker(), Taker()
    gradient = row.new_gradient() * scale
    with Clones() as clones:
        norm = row.take(gradient, params)
    # the gradient's is the taker's own
    assert clones.sizes == [1000] * (4 if copies else 1)
    optim._step_or_roll_back(careful.next(gradient, params), norm, LIMIT)
    for name in ("weights", "moment1", "moment2"):
        assert torch.equal(getattr(row, name), getattr(careful, name))


@pytest.mark.parametrize("value", [1e-25, 1e-15, 1.0, 1e15, 1e25])
def test_norms_of_any_size(value: float) -> None:
    gradient = torch.full((1000,), value)
    row = optim.StepRow(
        weights=gradient, gradient=gradient, moment1=gradient, moment2=gradient, step=1, params=AdamParams()
    )
    [(norm, _)] = optim.measure_rows([row])
    assert norm == pytest.approx(value * 1000**0.5, rel=1e-6)


@pytest.mark.parametrize("size", [1, 63, 64, 3_000_001])
def test_the_norm_of_a_long_row_is_exact(size: int) -> None:
    """A single float32 sum over millions is off by more than 1e-4."""
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0))
    want = float(torch.linalg.vector_norm(gradient.double()))
    norm = Taker(size).take(gradient, AdamParams())
    assert norm == pytest.approx(want, rel=1e-6)


def test_together_equals_one_by_one() -> None:
    """Rows of several lengths, parameters and steps, some clipped, one refused: to the bit, and measured at once."""
    decayed = AdamParams(learning_rate=1e-2, weight_decay=0.1)
    clipped = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
    cases = [(64, 0, decayed, 1.0), (1000, 2, decayed, 1.0), (1000, 0, clipped, 1.0), (64, 1, decayed, float("nan"))]
    cases += [(640, 0, clipped, 1e-3), (1000, 1, AdamParams(learning_rate=1e3, eps=1e-37), 1.0)]
    together, alone = ([Taker(size, seed) for seed, (size, *_) in enumerate(cases)] for _ in range(2))
    for takers in (together, alone):
        for taker, (_, steps, params, _) in zip(takers, cases):
            for _ in range(steps):
                taker.take(taker.new_gradient(), params)
    rows = [taker.next(taker.new_gradient() * scale, params) for taker, (*_, params, scale) in zip(together, cases)]
    measured: list[int] = []

    def measure(rows: Sequence[optim.StepRow]) -> list[tuple[float, list[float]]]:
        measured.append(len(rows))
        return optim.measure_rows(rows)

    outcomes = optim.adamw(rows, limit=LIMIT, measure=measure)
    assert measured == [len(cases)]
    for outcome, ours, taker, (*_, params, scale) in zip(outcomes, together, alone, cases):
        if scale != scale:
            assert isinstance(outcome, UserError)
        else:
            assert outcome == taker.take(taker.new_gradient() * scale, params)
        for mine, its in zip(ours.state, taker.state):
            assert torch.equal(mine, its)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -3.0])
def test_the_largest_magnitude_is_found_wherever_it_is(value: float) -> None:
    rows = [torch.ones(70000), torch.ones(64), torch.zeros(3)]
    rows[0][69000] = value
    got = optim.largest(rows).tolist()
    assert got[0] != got[0] if value != value else got[0] == abs(value)
    assert got[1:] == [1.0, 0.0]
