"""Tokens trained and sampled lately, by model and by replica: what placing, routing and rebalancing call load."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

HALF_LIFE_S = 60.0
"""How fast tokens stop being recent."""


@dataclass(slots=True)
class _Recent:
    """A count that forgets half of itself every ``HALF_LIFE_S``."""

    value: float = 0.0
    at: float = 0.0

    def add(self, count: float, now: float) -> None:
        self.value, self.at = self.read(now) + count, now

    def read(self, now: float) -> float:
        return float(self.value * 0.5 ** ((now - self.at) / HALF_LIFE_S))


class Traffic:
    """Shared by the pools of a base. What is sampled of a model where it lives counts as the model's, and moves with
    it; all else that is sampled counts as the replica's own."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._models: dict[str, _Recent] = {}
        self._homes: dict[str, int] = {}
        self._replicas: dict[int, _Recent] = {}

    def place(self, model_id: str, replica: int) -> None:
        """A new model, which begins with nothing."""
        self._models[model_id], self._homes[model_id] = _Recent(), replica

    def move(self, model_id: str, replica: int) -> None:
        self._homes[model_id] = replica

    def remove(self, model_id: str) -> None:
        self._models.pop(model_id, None)
        self._homes.pop(model_id, None)

    def trained(self, model_id: str, num_tokens: int) -> None:
        if model_id in self._models:
            self._models[model_id].add(num_tokens, self._now())

    def sampled(self, replica: int, model_id: str | None, num_tokens: int) -> None:
        """``model_id`` None: the base."""
        if model_id is not None and self._homes.get(model_id) == replica:
            self._models[model_id].add(num_tokens, self._now())
        else:
            self._replicas.setdefault(replica, _Recent()).add(num_tokens, self._now())

    def of_model(self, model_id: str) -> float:
        recent = self._models.get(model_id)
        return 0.0 if recent is None else recent.read(self._now())

    def of_replica(self, replica: int) -> float:
        """Without the models that live there."""
        recent = self._replicas.get(replica)
        return 0.0 if recent is None else recent.read(self._now())
