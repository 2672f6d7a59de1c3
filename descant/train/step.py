"""Microbatches, gradients that count only when all of them worked, and optimiser steps. Torch, one thread.

A request (one ``ForwardBackward``) is opened, its datums run in any number of microbatches beside other requests'
datums, and it is closed: either its whole gradient counts, or none of it.

    learner.open(request, command)            # checked; gradient goes straight into the row, or into scratch
    learner.run([Part(request, 0), …])        # one pass; several requests, several adapters
    output = learner.close(request)           # commits, or raises and leaves nothing behind
    learner.optim_step(model_id, params)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from descant.model.base import BaseModel
from descant.types import AdamParams, ForwardBackward, ForwardBackwardOutput, OptimStepOutput

RequestKey = tuple[str, int]
"""(model_id, seq_id)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One datum of an open request: what microbatches are made of."""

    request: RequestKey
    datum: int


class Learner:
    def __init__(self, model: BaseModel):
        raise NotImplementedError

    def open(self, command: ForwardBackward) -> RequestKey:
        """Checks everything that can be checked before a pass (``train.check``) and takes a gradient row: the
        adapter's own while that holds nothing (and no other open request has it), otherwise scratch. Raises
        ``UserError`` or ``NotFound`` and has changed nothing then, except that a failed backward is remembered."""
        raise NotImplementedError

    def run(self, parts: Sequence[Part]) -> None:
        """One forward (and backward) pass over the datums of ``parts``. A datum whose loss is not finite marks its
        request as failed and adds nothing. An exception from torch (out of memory) fails all requests of the pass:
        it is kept, and raised by each one's ``close``; the learner stays usable."""
        raise NotImplementedError

    def close(self, request: RequestKey) -> ForwardBackwardOutput:
        """Commits: the gradient is finite as a whole, and joins the row. Raises the request's ``UserError`` (naming
        the datum) or ``ServerError`` after clearing its part; the model's next step will then fail."""
        raise NotImplementedError

    def abandon(self, request: RequestKey) -> None:
        """Drops an open request without a result (its caller is gone). Idempotent."""
        raise NotImplementedError

    def lose_gradient(self, model_id: str, why: str) -> None:
        """A backward of this model was refused or lost before it got here: the next step must fail with ``why``."""
        raise NotImplementedError

    def has_pending_gradient(self, model_id: str) -> bool:
        raise NotImplementedError

    def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput:
        """AdamW over the row, clipped by global norm; refreshes the working row; clears the gradient.

        Metrics have keys ``grad_norm:mean`` (before clipping, over the whole row) and ``step:max``. Raises ``UserError``
        with weights and moments unchanged and the gradient cleared when a backward since the last step failed (naming
        its seq_id), when a parameter is out of range, or when the step would make a weight non-finite. A step
        without any gradient is an AdamW step on zeros."""
        raise NotImplementedError

    def forget(self, model_id: str) -> None:
        """The model was deleted or loaded anew: drops open requests and remembered failures."""
        raise NotImplementedError
