"""The model of the fakes: one table of logits by the last token, rank-r adapters on it, and tables of full models' own,
in float64.

``logits[prev] = base[prev] + (32 / r) · (B A)[prev]``, or ``own[prev]``. Losses, gradients and AdamW are real.

Legend: L tokens of a datum, K targets a position, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from descant.errors import UserError
from descant.train.check import dense_inputs
from descant.types import SCALE_NUMERATOR, AdamParams, Datum, Lora, Trainable, input_tokens

Array = NDArray[np.float64]


@dataclass(slots=True)
class Weights:
    """``arrays``: an adapter's A [r, V] and B [V, r], or a full model's own table [V, V]."""

    trainable: Trainable
    arrays: list[Array]

    def copy(self) -> Weights:
        return Weights(self.trainable, [array.copy() for array in self.arrays])

    @property
    def scale(self) -> float:
        """Of what the arrays add."""
        return SCALE_NUMERATOR / self.trainable.rank if isinstance(self.trainable, Lora) else 1.0

    def table(self, base_table: Array) -> Array:
        """The logits after each token, [V, V]."""
        if not isinstance(self.trainable, Lora):
            return self.arrays[0]
        a, b = self.arrays
        return base_table + self.scale * (b @ a)

    def gradient(self, dtable: Array) -> list[Array]:
        """Of ``arrays``, from that of the table times ``scale``."""
        if not isinstance(self.trainable, Lora):
            return [dtable]
        a, b = self.arrays
        return [b.T @ dtable, dtable @ a.T]


@dataclass(slots=True)
class FakeAdapter:
    """One model: its weights, gradient, AdamW moments, and what went wrong since the last step."""

    weights: Weights
    gradient: list[Array]
    moments1: list[Array]
    moments2: list[Array]
    step: int = 0
    applied_seq_id: int = 0
    pending_gradient: bool = False
    lost_gradient: str | None = None

    @staticmethod
    def fresh(trainable: Trainable, base_table: Array, seed: int) -> FakeAdapter:
        """One that gives the base's logits."""
        if isinstance(trainable, Lora):
            vocab_size = len(base_table)
            a = np.random.default_rng(seed).uniform(-1, 1, (trainable.rank, vocab_size)) / np.sqrt(vocab_size)
            arrays = [a, np.zeros((vocab_size, trainable.rank))]
        else:
            arrays = [base_table.copy()]
        gradient, moments1, moments2 = ([np.zeros_like(array) for array in arrays] for _ in range(3))
        return FakeAdapter(Weights(trainable, arrays), gradient, moments1, moments2)

    def clear_gradient(self) -> None:
        for gradient in self.gradient:
            gradient[:] = 0
        self.pending_gradient, self.lost_gradient = False, None


def logprobs(base_table: Array, weights: Weights | None, tokens: NDArray[np.int32], temperature: float = 1.0) -> Array:
    """[L, V]: after each of ``tokens``."""
    table = base_table if weights is None else weights.table(base_table)
    logits = table[tokens] / temperature
    logits = logits - logits.max(-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def _loss(loss_fn: str, config: Mapping[str, float], inputs: Mapping[str, np.ndarray], p: Array) -> tuple[Array, Array]:
    """Per-token loss and its derivative by p, both shaped like the targets."""
    if loss_fn == "cross_entropy":
        return -p * inputs["weights"], -inputs["weights"].astype(np.float64)
    q, advantages = inputs["logprobs"].astype(np.float64), inputs["advantages"].astype(np.float64)
    ratio = np.exp(p - q)
    if loss_fn == "gspo":
        mask = inputs["sequence_ratio_mask"] == 1
        ratio, advantages = np.exp(np.mean(p - q, where=mask) if mask.any() else 0.0), advantages * mask
    ratio = np.where(advantages == 0, 1.0, ratio)  # what has no advantage adds nothing, however large its ratio
    if loss_fn == "importance_sampling":
        return -ratio * advantages, -ratio * advantages
    if loss_fn == "dro":
        return -(p * advantages - config["beta"] / 2 * (p - q) ** 2), -(advantages - config["beta"] * (p - q))
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    if loss_fn == "cispo":
        return -clipped * p * advantages, -clipped * advantages
    chosen = np.minimum(ratio * advantages, clipped * advantages)
    return -chosen, np.where(ratio * advantages <= clipped * advantages, -ratio * advantages, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Of one datum: ``logprobs`` in the shape of its targets; ``loss_L`` and its derivative are 0 where they are not
    finite (``finite_L``). ``gradient``: of the weights' arrays."""

    logprobs: Array
    loss_L: Array
    finite_L: NDArray[np.bool_]
    entropy_L: Array
    gradient: list[Array]


def compute(base_table: Array, weights: Weights, datum: Datum, loss_fn: str, config: Mapping[str, float]) -> Computed:
    """A checked datum, ``config`` complete."""
    tokens, inputs = input_tokens(datum.model_input), dense_inputs(datum, loss_fn)
    targets = inputs["target_tokens"]
    logprobs_LV = logprobs(base_table, weights, tokens)
    targets_LK = targets.reshape(len(tokens), -1)
    p = np.take_along_axis(logprobs_LV, targets_LK, -1).reshape(targets.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        loss, dloss = _loss(loss_fn, config, inputs, p)
    loss_LK, dloss_LK = loss.reshape(len(tokens), -1), dloss.reshape(len(tokens), -1)
    finite_L = np.all(np.isfinite(loss_LK) & np.isfinite(dloss_LK), axis=1)
    loss_LK, dloss_LK = (np.where(finite_L[:, None], array, 0.0) for array in (loss_LK, dloss_LK))
    probs_LV = np.exp(logprobs_LV)
    dlogits = -probs_LV * dloss_LK.sum(-1, keepdims=True)
    for k in range(targets_LK.shape[1]):
        dlogits[np.arange(len(tokens)), targets_LK[:, k]] += dloss_LK[:, k]
    dtable = np.zeros_like(base_table)
    np.add.at(dtable, tokens, weights.scale * dlogits)
    return Computed(
        logprobs=p,
        loss_L=loss_LK.sum(-1),
        finite_L=finite_L,
        entropy_L=-(probs_LV * logprobs_LV).sum(-1),
        gradient=weights.gradient(dtable),
    )


def take_step(adapter: FakeAdapter, params: AdamParams) -> float:
    """AdamW, in place; the norm of the gradient, which stays. ``UserError``, and nothing has changed, when a weight
    would not be finite."""
    norm = float(np.sqrt(sum((gradient**2).sum() for gradient in adapter.gradient)))
    clip = min(1.0, params.grad_clip_norm / norm) if params.grad_clip_norm > 0 and norm > 0 else 1.0
    step = adapter.step + 1
    updates: list[tuple[Array, Array, Array]] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for i, old in enumerate(adapter.weights.arrays):
            gradient = adapter.gradient[i] * clip
            m = params.beta1 * adapter.moments1[i] + (1 - params.beta1) * gradient
            v = params.beta2 * adapter.moments2[i] + (1 - params.beta2) * gradient**2
            direction = m / (1 - params.beta1**step) / (np.sqrt(v / (1 - params.beta2**step)) + params.eps)
            new = old * (1 - params.learning_rate * params.weight_decay) - params.learning_rate * direction
            new = np.where((direction == 0) | np.isfinite(direction), new, np.nan)
            updates.append((new.astype(np.float32).astype(np.float64), m, v))
    if not all(np.isfinite(new).all() for new, _, _ in updates):
        raise UserError("the step was not taken: it would make a weight not finite")
    adapter.weights.arrays = [u[0] for u in updates]
    adapter.moments1, adapter.moments2 = [u[1] for u in updates], [u[2] for u in updates]
    adapter.step = step
    return norm
