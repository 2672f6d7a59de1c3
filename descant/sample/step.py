"""Runs a ``StepPlan`` on the base model: one forward pass, then one draw a sequence. Torch, one thread."""

from __future__ import annotations

from descant.model.base import BaseModel
from descant.sample.scheduler import SequenceOutput, StepPlan


class Sampler:
    def __init__(self, model: BaseModel, *, num_pages: int):
        """Allocates the KV pool."""
        raise NotImplementedError

    def step(self, plan: StepPlan) -> list[SequenceOutput]:
        """Sorts the sequences by adapter, prefills and decodes in one pass (one a pass where the model is not
        packable), computes wanted logits only, samples, and returns in the plan's order."""
        raise NotImplementedError

    def acquire(self, version: object) -> None:
        """Pins a version's row for a request that will run; ``NotFound`` if it was never published."""
        raise NotImplementedError
