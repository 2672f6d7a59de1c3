"""The seam between the rules of training requests (``train.requests``) and what computes: ``PassRunner``. No torch.

    launched = runner.launch(items, complete=[gradient], backward=False)   # a PassFailure is returned, not raised
    result = launched.wait()                                               # losses and log-probabilities, on the host
    runner.keep_gradient(model_id)                                         # the request is committed: it counts
    [taken] = runner.step([(model_id, params)])
    runner.clear([model_id])

A gradient is named by a ``Gradient``, never handed over: where it lies, whole or cut over ranks, is the runner's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from descant.types import AdamParams, Datum, ModelFacts

if TYPE_CHECKING:
    import torch

RequestKey = tuple[str, int]
"""(model_id, seq_id)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One datum of an open request: what microbatches are made of."""

    request: RequestKey
    datum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What passes add a request's gradient to: the model's own, or (``scratch``, a number of the runner's) another of
    the same shape that belongs to one request."""

    model_id: str
    scratch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassItem:
    """One datum of a pass, which has passed ``train.check``. ``config`` is complete; ``gradient`` None: forward
    only."""

    part: Part
    datum: Datum
    loss_fn: str
    config: Mapping[str, float]
    gradient: Gradient | None

    @property
    def model_id(self) -> str:
        return self.part.request[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumResult:
    """``entropy``: in nats, the sum over the positions where the loss can have a derivative, and their number.
    ``logprobs``: float32, in the shape of its ``target_tokens``. ``tokens``: those that were computed for it; what
    datums of a pass begin with in common counts for one of them. ``not_finite_at``: the first position whose loss, or
    its derivative, is not finite; nothing was added to the gradient there."""

    part: Part
    loss: float
    entropy: tuple[float, int]
    logprobs: np.ndarray
    tokens: int
    not_finite_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """``magnitudes``: of the gradients that ``launch`` got as ``complete``, as ``PassRunner.magnitudes``.
    ``seconds`` count from the launch or the end of the pass before, whichever is later. ``tokens``, ``adapters`` and
    ``flops`` (what the model needs, not what was computed again) are of the whole pass. ``memory_bytes``: what the rank
    has taken of its device at most."""

    datums: Sequence[DatumResult]
    magnitudes: Sequence[float]
    seconds: float
    tokens: int
    adapters: int
    flops: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFailure:
    """``why`` may be shown to clients: "ran out of memory". ``wrote_gradients``: the gradients of its items may hold a
    part of what it computed."""

    why: str
    wrote_gradients: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """``step``: optimiser steps that it has taken. ``has_gradient``: its own gradient holds something that counts."""

    step: int
    has_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """``grad_norm``: before clipping, over the whole gradient. ``step``: counting this one."""

    grad_norm: float
    step: int


class LaunchedPass(Protocol):
    def wait(self) -> PassResult:
        """Until the device has computed it. Called once, and in the order of the launches."""


class PassRunner(Protocol):
    """A base model that computes passes for many adapters, and keeps their gradients, weights and moments. Used on one
    thread, by one ``Learner``; ``testing.pass_runner`` is its suite.

    A runner whose ranks share the work of one datum (tensor or pipeline parallel: Megatron) keeps all of this to
    itself, on every rank of the group alike:

    * it is ``lockstep``: the ranks launch the same items in the same order, and what fails is raised;
    * results are the same on each of them (the last pipeline stage, which alone has losses, broadcasts them), or the
      data-parallel rank speaks through one of them;
    * ``magnitudes`` and the norm of a step are those of whole gradients, each part counted once;
    * which tokens are whose goes with each microbatch, never with a module: several are in flight, and recomputation
      reads it again. A schedule that divides losses by the number of its microbatches is multiplied by it again.
    """

    @property
    def facts(self) -> ModelFacts:
        """``packable`` False: datums must not share a pass."""

    @property
    def lockstep(self) -> bool:
        """Several ranks run their layers together: all make as many passes, ``empty_pass`` where one has no items, and
        a pass that fails raises, since the others wait in the middle of theirs."""

    @property
    def asynchronous(self) -> bool:
        """``launch`` returns before the device is done: a pass is waited for once the next has been launched."""

    # ---- passes
    def launch(
        self, items: Sequence[PassItem], *, complete: Sequence[Gradient], backward: bool = False
    ) -> LaunchedPass | PassFailure:
        """One forward pass over at least one item, and a backward if any has a gradient, which its derivative is added
        to. A datum whose loss is not finite adds nothing and changes no bit of the others'. ``complete``: gradients
        that lack nothing once this pass is done. ``backward``: the layers' backward runs even if no item has a
        gradient.

        A failure is returned, not raised: a traceback would hold the pass's activations. ``lockstep``: it is raised."""

    def empty_pass(self, *, backward: bool) -> None:
        """What a rank without items does while others of its ``lockstep`` make a pass."""

    def recover(self) -> None:
        """After a failure, when no pass is under way: gives back what the failed one leaves behind."""

    # ---- models
    def state(self, model_id: str) -> ModelState:
        """Raises ``NotFound``."""

    def keep_gradient(self, model_id: str) -> None:
        """What its own gradient holds counts, until ``clear``."""

    def step(
        self, steps: Sequence[tuple[str, AdamParams]], *, gradients_ready: torch.cuda.Event | None = None
    ) -> list[StepTaken | Exception]:
        """AdamW over these models, at least one, all different, with gradients and checked parameters; each clipped by
        its global norm. Uses their gradients up, ``clear`` follows. One that would get a weight or a moment that is not
        finite stays as it is: its outcome is a ``UserError``, and the others step. ``gradients_ready``: on CUDA, when
        the gradients had their numbers; what the stream got since is not waited for."""

    def clear(self, model_ids: Sequence[str]) -> None:
        """Empties their own gradients, which then hold nothing that counts."""

    # ---- gradients
    def allocate(self, model_id: str) -> Gradient:
        """A scratch gradient of zeros. Raises ``ServerError`` when there is no memory for it."""

    def free(self, gradient: Gradient) -> None:
        """Gives a scratch back; empties a model's own, if the model is still there."""

    def zero(self, gradient: Gradient) -> None:
        """Empties it; it stays the request's."""

    def add_own(self, scratch: Gradient) -> None:
        """Adds the model's own gradient, which stays, to this one."""

    def swap_own(self, scratch: Gradient) -> None:
        """Exchanges what the model's own gradient and this one hold."""

    def move_to_own(self, scratch: Gradient) -> None:
        """The model's own gradient becomes what this one holds, which is freed."""

    def magnitudes(self, gradients: Sequence[Gradient]) -> list[float]:
        """The largest magnitude in each of them, at least one; NaN where there is one. Waits for the device."""
