"""Hand-derived derivatives against autograd on the formulas as documented, in float64; and the edges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.train.check import LOSS_FN_CONFIG
from descant.train.loss import LossInputs, loss_mask, sequence_ratio, token_loss

CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}

Documented = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, float]], torch.Tensor]
"""(p, q, A, config) → loss per token, written as the documentation writes it."""


def clip(ratio: torch.Tensor, config: Mapping[str, float]) -> torch.Tensor:
    return torch.clamp(ratio, config["clip_low_threshold"], config["clip_high_threshold"])


DOCUMENTED: Mapping[str, Documented] = {
    "importance_sampling": lambda p, q, a, c: -torch.exp(p - q) * a,
    "ppo": lambda p, q, a, c: -torch.minimum(torch.exp(p - q) * a, clip(torch.exp(p - q), c) * a),
    "cispo": lambda p, q, a, c: -clip(torch.exp(p - q), c).detach() * p * a,
    "dro": lambda p, q, a, c: -(p * a - 0.5 * c["beta"] * (p - q) ** 2),
}


def inputs(q: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor | None = None) -> LossInputs:
    return LossInputs(
        weights_CK=torch.zeros(len(q), 1, dtype=q.dtype) if weights is None else weights,
        logprobs_C=q,
        advantages_C=advantages,
        sequence_ratio_mask_C=torch.zeros_like(q),
    )


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        ("importance_sampling", {}),
        ("ppo", LOSS_FN_CONFIG["ppo"]),
        ("ppo", CLIP),
        ("cispo", LOSS_FN_CONFIG["cispo"]),
        ("cispo", CLIP),
        ("dro", LOSS_FN_CONFIG["dro"]),
        ("dro", {"beta": 2.0}),
        ("dro", {"beta": 0.0}),
    ],
)
@pytest.mark.parametrize("num_targets", [1, 3])
def test_derivative_is_autograds(loss_fn: str, config: Mapping[str, float], num_targets: int) -> None:
    generator = torch.Generator().manual_seed(0)
    p = -torch.rand(200, num_targets, dtype=torch.float64, generator=generator) * 3
    q = -torch.rand(200, dtype=torch.float64, generator=generator) * 3
    advantages = torch.randn(200, dtype=torch.float64, generator=generator)  # ratios within, below and above the clip
    advantages[::10] = 0
    p.requires_grad_()
    expected = DOCUMENTED[loss_fn](p[:, 0], q, advantages, config)
    expected.sum().backward()
    got = token_loss(loss_fn, config, p.detach(), inputs(q, advantages))
    torch.testing.assert_close(got.loss_C, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(got.dlogprobs_CK, p.grad, rtol=1e-12, atol=0)


def test_cross_entropy_sums_targets() -> None:
    p = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[0.25, -1.5], [0.0, 2.0]], dtype=torch.float64)
    expected = -(p * weights).sum(1)
    expected.sum().backward()
    zeros = torch.zeros(2, dtype=torch.float64)
    got = token_loss("cross_entropy", {}, p.detach(), inputs(zeros, zeros, weights))
    assert torch.equal(got.loss_C, expected.detach())
    assert torch.equal(got.dlogprobs_CK, p.grad)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_no_advantage_is_nothing_however_far_the_policies_are(loss_fn: str) -> None:
    p, q = torch.tensor([[-1.0]]), torch.tensor([-1e38])  # exp(p - q) is inf
    got = token_loss(loss_fn, LOSS_FN_CONFIG[loss_fn], p, inputs(q, torch.zeros(1)))
    assert got.loss_C.tolist() == [0.0]
    assert got.dlogprobs_CK.tolist() == [[0.0]]


def test_no_weight_is_nothing() -> None:
    p = torch.tensor([[-torch.inf], [torch.nan]])
    got = token_loss("cross_entropy", {}, p, inputs(torch.zeros(2), torch.zeros(2), torch.zeros(2, 1)))
    assert got.loss_C.tolist() == [0.0, 0.0]
    assert got.dlogprobs_CK.tolist() == [[0.0], [0.0]]


def test_clipping_bounds_what_importance_sampling_does_not() -> None:
    p, q = torch.tensor([[-1.0]]), torch.tensor([-1e38])
    gain = inputs(q, torch.ones(1))
    assert token_loss("importance_sampling", {}, p, gain).loss_C.item() == -torch.inf
    clipped = token_loss("ppo", LOSS_FN_CONFIG["ppo"], p, gain)
    assert clipped.loss_C.item() == pytest.approx(-1.2)
    assert clipped.dlogprobs_CK.item() == 0.0
    loses = token_loss("ppo", LOSS_FN_CONFIG["ppo"], p, inputs(q, -torch.ones(1)))
    assert loses.loss_C.item() == torch.inf  # pessimistic, as documented
    cispo = token_loss("cispo", LOSS_FN_CONFIG["cispo"], p, gain)
    assert cispo.dlogprobs_CK.item() == pytest.approx(-1.2)


SMALL = st.floats(-30, 0, width=32)
ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)
RARE = st.one_of(st.just(0.0), ANY)


@pytest.mark.parametrize("loss_fn", LOSS_FN_CONFIG)
@settings(max_examples=200)
@given(st.data())
def test_where_a_loss_wants_nothing_its_derivative_is_0(loss_fn: str, data: st.DataObject) -> None:
    """Whatever the learner's log-probabilities are, those of a token that cannot be among them."""
    num_targets = data.draw(st.integers(1, 3)) if loss_fn == "cross_entropy" else 1
    length = data.draw(st.integers(1, 6))

    def draw(elements: st.SearchStrategy[float], width: int = 1) -> np.ndarray:
        size = length * width
        values = data.draw(st.lists(elements, min_size=size, max_size=size))
        return np.array(values, np.float32).reshape((length, width)[: 1 + (width > 1)])

    p = torch.from_numpy(draw(st.one_of(SMALL, ANY, st.just(-math.inf)), num_targets).reshape(length, -1))
    arrays = {"weights": draw(RARE, num_targets), "logprobs": draw(st.one_of(SMALL, ANY)), "advantages": draw(RARE)}
    arrays["sequence_ratio_mask"] = draw(st.sampled_from([0.0, 1.0]))
    q, advantages, mask = (torch.from_numpy(arrays[name]) for name in ("logprobs", "advantages", "sequence_ratio_mask"))
    given_inputs = LossInputs(
        weights_CK=torch.from_numpy(arrays["weights"]).reshape(length, -1),
        logprobs_C=q,
        advantages_C=advantages,
        sequence_ratio_mask_C=mask,
        sequence_ratio_C=sequence_ratio(p[:, 0], q, mask, torch.zeros(length, dtype=torch.int64), 1),
    )
    config = {name: data.draw(st.floats(0, 2)) for name in LOSS_FN_CONFIG[loss_fn]}
    if "clip_low_threshold" in config:
        config["clip_high_threshold"] += config["clip_low_threshold"]
    got = token_loss(loss_fn, config, p, given_inputs)
    assert (got.dlogprobs_CK[~torch.from_numpy(loss_mask(loss_fn, arrays))] == 0).all()


@pytest.mark.parametrize("loss_fn", LOSS_FN_CONFIG)
def test_where_a_loss_wants_something_it_has_a_derivative(loss_fn: str) -> None:
    """At a ratio of 1, which nothing clips."""
    arrays = {
        "weights": np.array([0, 1, -2, 0], np.float32),
        "logprobs": np.full(4, -1, np.float32),
        "advantages": np.array([0, 1, -2, 0], np.float32),
        "sequence_ratio_mask": np.array([1, 1, 0, 0], np.float32),
    }
    given_inputs = LossInputs(
        weights_CK=torch.from_numpy(arrays["weights"])[:, None],
        logprobs_C=torch.from_numpy(arrays["logprobs"]),
        advantages_C=torch.from_numpy(arrays["advantages"]),
        sequence_ratio_mask_C=torch.from_numpy(arrays["sequence_ratio_mask"]),
        sequence_ratio_C=torch.ones(4),
    )
    p = torch.full((4, 1), -2.0 if loss_fn == "dro" else -1.0)
    got = token_loss(loss_fn, LOSS_FN_CONFIG[loss_fn], p, given_inputs)
    assert (got.dlogprobs_CK[:, 0] != 0).tolist() == loss_mask(loss_fn, arrays).tolist()


@pytest.mark.parametrize("config", [LOSS_FN_CONFIG["gspo"], CLIP])
@pytest.mark.parametrize("num_targets", [1, 3])
def test_gspo_is_its_formula_over_each_datum(config: Mapping[str, float], num_targets: int) -> None:
    """Five datums, in no order, one advantage each; autograd through the ratio itself. The last has nothing masked."""
    generator = torch.Generator().manual_seed(1)
    sequence = torch.arange(200) % 5
    p = -torch.rand(200, num_targets, dtype=torch.float64, generator=generator) * 3
    mask = (torch.rand(200, generator=generator, dtype=torch.float64) < 0.6).double() * (sequence != 4)
    shift = torch.tensor([-0.9, 1e-4, 0.5, -1e-4, 0.0])[sequence]
    q = p[:, 0] + shift + 0.3 * torch.randn(200, generator=generator, dtype=torch.float64)
    means = [(p[:, 0] - q)[(sequence == s) & (mask == 1)].mean() for s in range(4)]
    q += torch.stack([*means, torch.tensor(0.0)])[sequence] + shift  # now the mean drift is -shift
    q[mask == 0] = -1e30  # of no consequence
    advantages = torch.tensor([1.5, -0.5, -2.0, 1.0, 3.0], dtype=torch.float64)[sequence]
    p.requires_grad_()
    losses = []
    for s in range(5):
        m = (sequence == s) & (mask == 1)
        if m.any():
            ratio = torch.exp((p[m, 0] - q[m]).mean())
            assert ratio.item() == pytest.approx(torch.exp(-shift[s]).item())
            a = advantages[s]
            losses.append(-torch.minimum(ratio * a, clip(ratio, config) * a) * m.sum())
    torch.stack(losses).sum().backward()

    ratio_P = sequence_ratio(p[:, 0].detach(), q, mask, sequence, 5)
    given = LossInputs(
        weights_CK=torch.zeros(200, 1),
        logprobs_C=q,
        advantages_C=advantages,
        sequence_ratio_mask_C=mask,
        sequence_ratio_C=ratio_P,
    )
    got = token_loss("gspo", config, p.detach(), given)
    for s, loss in enumerate(losses):
        torch.testing.assert_close(got.loss_C[sequence == s].sum(), loss.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(got.dlogprobs_CK, p.grad, rtol=1e-10, atol=0)
    assert (ratio_P[sequence == 4] == 1).all()
    assert got.loss_C[mask == 0].count_nonzero() == 0
    clipped = [bool((got.dlogprobs_CK[(sequence == s) & (mask == 1), 0] == 0).all()) for s in range(4)]
    assert clipped == [True, False, True, False]
    assert all(losses)


def test_gspo_beyond_float32_is_not_finite_where_it_counts() -> None:
    ratio, mask = torch.full((3,), torch.inf), torch.tensor([1.0, 0.0, 1.0])
    given = LossInputs(
        weights_CK=torch.zeros(3, 1),
        logprobs_C=torch.zeros(3),
        advantages_C=torch.tensor([-1.0, -1.0, 0.0]),
        sequence_ratio_mask_C=mask,
        sequence_ratio_C=ratio,
    )
    got = token_loss("gspo", LOSS_FN_CONFIG["gspo"], torch.zeros(3, 1), given)
    assert got.loss_C.tolist() == [torch.inf, 0.0, 0.0]
    assert got.dlogprobs_CK.flatten().tolist() == [torch.inf, 0.0, 0.0]
