"""Which replica a new adapter lives on, and which of them move. Pure: no clock, no process, no random numbers.

Replicas of one base are alike and know nothing of one another, so placing is a matter of load alone. A replica's load
is its share of all adapters' memory plus its share of the recent tokens. An adapter stays where it was placed; it is
moved only while nothing of it is under way, and only when that evens the load out noticeably.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from descant.errors import ServerError
from descant.types import Lora, ModelFacts, Trainable

QUIET_TOKENS = 10_000.0
"""Fewer recent tokens than this on all replicas together, and traffic counts for little: nothing is hot."""

NUM_CHOICES = 3
"""Kinds of layers that an adapter may have: of all of them it has ``ModelFacts.adapter_numbers_per_rank``."""

NOTICEABLE = 0.25
"""A move must lower the difference of two replicas' loads by this fraction of the mean load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of one adapter, or of all on a replica.

    ``size``: memory, in any unit that is proportional to bytes and the same for all adapters of a base.
    ``recent_tokens``: tokens trained and sampled lately, older ones counting less.
    """

    size: float = 0.0
    recent_tokens: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(size=self.size + other.size, recent_tokens=self.recent_tokens + other.recent_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """``movable``: it exists, no command of it is open, and it has no gradient, whole or lost."""

    model_id: str
    replica: int
    load: Load
    movable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    model_id: str
    source: int
    target: int


def size_of(trainable: Trainable, facts: ModelFacts) -> float:
    """A model's memory relative to others on the same base: rows are as long as their rank is large, and a full model
    is as large as an adapter of as many numbers."""
    if isinstance(trainable, Lora):
        chosen = trainable.train_attn + trainable.train_mlp + trainable.train_unembed
        return float(max(1, trainable.rank) * max(1, chosen))
    return NUM_CHOICES * facts.num_params / max(1, facts.adapter_numbers_per_rank)


def place(loads: Mapping[int, Load]) -> int:
    """The replica for a new adapter: the least loaded. ``loads``: what each live replica carries. Raises
    ``ServerError`` if there is none."""
    if not loads:
        raise ServerError("no replica is running")
    return _extremes(_weights(loads))[0]


def rebalance(models: Sequence[PlacedModel], background: Mapping[int, Load]) -> tuple[Move, ...]:
    """Moves that even the load out, in the order to make them; none when it is even enough.

    ``background``: every live replica, with the load that belongs to no adapter (sampling the base). Models on other
    replicas are lost, not moved. No model moves twice.
    """
    on_live = [model for model in models if model.replica in background]
    total = _total([*background.values(), *(model.load for model in on_live)])
    weights = {replica: _share(load, total) for replica, load in background.items()}
    for model in on_live:
        weights[model.replica] += _share(model.load, total)
    candidates = {model.model_id: model for model in on_live if model.movable}
    moves: list[Move] = []
    while len(weights) > 1:
        idlest, busiest = _extremes(weights)
        gap, mean = weights[busiest] - weights[idlest], sum(weights.values()) / len(weights)
        shares = {m.model_id: _share(m.load, total) for m in candidates.values() if m.replica == busiest}
        if not shares:
            break
        best = min(shares, key=lambda model_id: (abs(gap - 2 * shares[model_id]), model_id))
        if gap - abs(gap - 2 * shares[best]) < max(NOTICEABLE * mean, 1e-9):
            break
        weights[busiest] -= shares[best]
        weights[idlest] += shares[best]
        del candidates[best]
        moves.append(Move(model_id=best, source=busiest, target=idlest))
    return tuple(moves)


def _extremes(weights: Mapping[int, float]) -> tuple[int, int]:
    """(least, most) loaded; of several the lowest number."""
    return (
        min(weights, key=lambda replica: (weights[replica], replica)),
        min(weights, key=lambda replica: (-weights[replica], replica)),
    )


def _weights(loads: Mapping[int, Load]) -> dict[int, float]:
    total = _total(loads.values())
    return {replica: _share(load, total) for replica, load in loads.items()}


def _total(loads: Collection[Load]) -> Load:
    return sum(loads, Load())


def _share(load: Load, total: Load) -> float:
    of_size = load.size / total.size if total.size > 0 else 0.0
    return of_size + load.recent_tokens / max(total.recent_tokens, QUIET_TOKENS)
