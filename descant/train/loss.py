"""The losses: per-token value and its derivative by the log-probability, as documented and nothing else.

Every loss is a sum over tokens; nothing is normalised, and nothing is clipped where no clipping is documented. With p
the learner's log-probability of the target, q the given one, A the advantage and r = exp(p - q):

    cross_entropy        -p·w                                summed over K targets a position
    importance_sampling  -r·A
    ppo                  -min(r·A, clip(r, low, high)·A)     Schulman et al. 2017; low and high bound the ratio
    cispo                -stopgrad(clip(r, low, high))·p·A   MiniMax-M1, 2025
    dro                  -(p·A - ½·beta·(p - q)²)            Richemond et al. 2024, without its value function
    gspo                 -m·min(s·A, clip(s, low, high)·A)   Zheng et al. 2025 (GSPO-token), summed, not averaged

In gspo m is ``sequence_ratio_mask`` (1 on sampled tokens) and s = exp(mean of p - q over the datum's tokens of m = 1),
one ratio for the whole datum. Its derivative by each such token's p is -s·A, or 0 where the clipped side is smaller, as
the paper has it for advantages that differ by token; with one advantage for all it is the exact derivative of the sum.

A token whose weight or advantage is 0 adds exactly 0 (not 0·inf) to all but dro, whose penalty stays. Values may come
out infinite or NaN: the caller decides what that means.

Legend: C tokens, K targets a position, P all tokens of a microbatch's S datums, L those of one. All float32 (float64 in
tests).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

SEQUENCE_LOSSES = frozenset({"gspo"})
"""Those that need all log-probabilities of a datum before the first derivative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """``loss_C`` and ``dlogprobs_CK``, the derivative of its sum by the targets' log-probabilities."""

    loss_C: torch.Tensor
    dlogprobs_CK: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Per-token arrays by the SDK's names. ``logprobs_C`` are the given ones; each loss reads what it takes.

    ``sequence_ratio_C``: ``sequence_ratio`` of each token's datum, which gspo alone reads: None where there is no gspo.
    """

    weights_CK: torch.Tensor
    logprobs_C: torch.Tensor
    advantages_C: torch.Tensor
    sequence_ratio_mask_C: torch.Tensor
    sequence_ratio_C: torch.Tensor | None = None


def token_loss(
    loss_fn: str, config: Mapping[str, float], target_logprobs_CK: torch.Tensor, inputs: LossInputs
) -> TokenLoss:
    """``loss_fn`` and ``config`` (complete) have passed ``train.check``. Losses other than cross_entropy read target 0
    of each position; the others are padding and get derivative 0."""
    if loss_fn == "cross_entropy":
        return cross_entropy(target_logprobs_CK, inputs.weights_CK)
    p_C, q_C, advantages_C = target_logprobs_CK[:, 0], inputs.logprobs_C, inputs.advantages_C
    match loss_fn:
        case "importance_sampling":
            loss_C, dlogprobs_C = importance_sampling(p_C, q_C, advantages_C)
        case "ppo":
            loss_C, dlogprobs_C = ppo(
                p_C, q_C, advantages_C, config["clip_low_threshold"], config["clip_high_threshold"]
            )
        case "cispo":
            low, high = config["clip_low_threshold"], config["clip_high_threshold"]
            loss_C, dlogprobs_C = cispo(p_C, q_C, advantages_C, low, high)
        case "dro":
            loss_C, dlogprobs_C = dro(p_C, q_C, advantages_C, config["beta"])
        case "gspo" if inputs.sequence_ratio_C is not None:
            low, high = config["clip_low_threshold"], config["clip_high_threshold"]
            loss_C, dlogprobs_C = gspo(inputs.sequence_ratio_C, inputs.sequence_ratio_mask_C, advantages_C, low, high)
        case _:
            raise ValueError(f"loss_fn {loss_fn!r} was not checked")
    if target_logprobs_CK.shape[1] == 1:
        return TokenLoss(loss_C=loss_C, dlogprobs_CK=dlogprobs_C[:, None])
    dlogprobs_CK = torch.zeros_like(target_logprobs_CK)
    dlogprobs_CK[:, 0] = dlogprobs_C
    return TokenLoss(loss_C=loss_C, dlogprobs_CK=dlogprobs_CK)


def loss_mask(loss_fn: str, arrays: Mapping[str, np.ndarray]) -> NDArray[np.bool_]:
    """bool [L]: at which of a datum's tokens the loss can have a derivative that is not 0, whatever the learner's
    log-probabilities are. ``arrays`` as ``train.check.dense_inputs`` makes them."""
    match loss_fn:
        case "cross_entropy":
            weights = arrays["weights"]
            return (weights != 0).reshape(len(weights), -1).any(1)
        case "importance_sampling" | "ppo" | "cispo":
            return arrays["advantages"] != 0
        case "dro":  # the penalty pulls without an advantage, too
            return np.ones(len(arrays["advantages"]), np.bool_)
        case "gspo":  # the others' tokens are in the ratio, which has no derivative of its own
            return (arrays["advantages"] != 0) & (arrays["sequence_ratio_mask"] != 0)
        case _:
            raise ValueError(f"loss_fn {loss_fn!r} was not checked")


def cross_entropy(target_logprobs_CK: torch.Tensor, weights_CK: torch.Tensor) -> TokenLoss:
    loss_CK = torch.where(weights_CK == 0, 0.0, -target_logprobs_CK * weights_CK)
    return TokenLoss(loss_C=loss_CK.sum(1), dlogprobs_CK=-weights_CK)


def importance_sampling(
    target_logprobs_C: torch.Tensor, logprobs_C: torch.Tensor, advantages_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ratio_C = torch.exp(target_logprobs_C - logprobs_C)
    loss_C = torch.where(advantages_C == 0, 0.0, -ratio_C * advantages_C)
    return loss_C, loss_C


def ppo(
    target_logprobs_C: torch.Tensor, logprobs_C: torch.Tensor, advantages_C: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    ratio_C = torch.exp(target_logprobs_C - logprobs_C)
    return _pessimistic(ratio_C, advantages_C, low, high)


def _pessimistic(
    ratio_C: torch.Tensor, advantages_C: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    unclipped_C = torch.where(advantages_C == 0, 0.0, ratio_C * advantages_C)
    clipped_C = ratio_C.clamp(low, high) * advantages_C
    # min chooses the clipped side only where clipping changed the ratio, and there its derivative is 0
    return -torch.minimum(unclipped_C, clipped_C), torch.where(clipped_C < unclipped_C, 0.0, -unclipped_C)


def cispo(
    target_logprobs_C: torch.Tensor, logprobs_C: torch.Tensor, advantages_C: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    ratio_C = torch.exp(target_logprobs_C - logprobs_C).clamp(low, high)
    dlogprobs_C = -ratio_C * advantages_C
    return torch.where(advantages_C == 0, 0.0, dlogprobs_C * target_logprobs_C), dlogprobs_C


def dro(
    target_logprobs_C: torch.Tensor, logprobs_C: torch.Tensor, advantages_C: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    drift_C = target_logprobs_C - logprobs_C
    loss_C = -(target_logprobs_C * advantages_C - 0.5 * beta * drift_C**2)
    return loss_C, beta * drift_C - advantages_C


def gspo(
    sequence_ratio_C: torch.Tensor, mask_C: torch.Tensor, advantages_C: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _pessimistic(sequence_ratio_C, torch.where(mask_C == 0, 0.0, advantages_C), low, high)


def sequence_ratio(
    target_logprobs_P: torch.Tensor,
    logprobs_P: torch.Tensor,
    mask_P: torch.Tensor,
    sequence_P: torch.Tensor,
    num_sequences: int,
) -> torch.Tensor:
    """exp(mean of p - q) over the tokens of mask 1 of each token's datum ``sequence_P`` int64; 1 if it has none."""
    drift_P = torch.where(mask_P == 0, 0.0, target_logprobs_P - logprobs_P)
    drift_S, count_S = (x.new_zeros(num_sequences).index_add_(0, sequence_P, x) for x in (drift_P, mask_P))
    return torch.exp(drift_S / count_S.clamp(min=1))[sequence_P]
