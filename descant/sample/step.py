"""Runs a ``StepPlan`` on the base model: one forward pass, then one draw a sequence. Torch, one thread."""

from __future__ import annotations

from descant.model.base import BaseModel
from descant.sample.scheduler import SequenceOutput, StepPlan
from descant.types import Version


class Sampler:
    def __init__(self, model: BaseModel, *, num_pages: int):
        """Allocates the KV pool."""
        raise NotImplementedError

    def step(self, plan: StepPlan) -> list[SequenceOutput]:
        """Sorts the sequences by adapter, prefills and decodes in one pass (one a pass where the model is not
        packable), computes wanted logits only, samples, and returns in the plan's order."""
        raise NotImplementedError

    def acquire(self, version: Version | None) -> None:
        """Pins a version's row for one request, before ``Scheduler.add``; ``NotFound`` if it was never published.
        Once per request, and ``release`` once when the request has ended (last delta, failure, cancel) or was refused.
        None, the base model, needs no row: both do nothing."""
        raise NotImplementedError

    def release(self, version: Version | None) -> None:
        """Undoes one ``acquire``."""
        raise NotImplementedError
