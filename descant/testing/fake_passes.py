"""``PassRunner`` on the fakes' model: numpy, no threads. For the rules of training requests without torch.

runner = FakePassRunner()
runner.create("a")
runner.fails = lambda items: any(item.part.datum == 1 for item in items)    # their passes run out of memory
learner = Learner(runner)
…
assert runner.log == ["launch a1.0 a1.1", "failed", …]
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from descant.errors import NotFound, ServerError
from descant.testing.fake_model import Array, Computed, FakeAdapter, compute, take_step
from descant.testing.fakes import FakeWorld
from descant.train.check import dense_inputs
from descant.train.runner import (
    DatumResult,
    Gradient,
    ModelState,
    Part,
    PassFailure,
    PassItem,
    PassResult,
    StepTaken,
)
from descant.types import AdamParams, Lora, ModelFacts

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class FakePassRunner:
    """``fails`` is asked before each pass. ``wrote_gradients``: a pass that fails has added the first of its datums by
    then. ``max_scratch``: how many there is memory for. By its clock every pass takes a second.

    ``log``: "launch PARTS", "failed", "wait PARTS", "empty", "recover", in this order as they happened; a part is
    ``a1.0``: datum 0 of the request with seq_id 1 of model a."""

    facts: ModelFacts = field(default_factory=lambda: FakeWorld().facts)
    asynchronous: bool = False
    lockstep: bool = False
    fails: Callable[[Sequence[PassItem]], bool] = lambda items: False
    wrote_gradients: bool = True
    max_scratch: int = 1024
    log: list[str] = field(default_factory=list)
    scratch: dict[Gradient, list[Array]] = field(default_factory=dict)
    _adapters: dict[str, FakeAdapter] = field(default_factory=dict)
    _num_scratch: int = 0
    _base_table: Array = field(init=False)

    def __post_init__(self) -> None:
        self._base_table = np.random.default_rng(0).normal(size=(self.facts.vocab_size, self.facts.vocab_size))

    # ---- what a worker does beside requests
    def create(self, model_id: str, rank: int = 4) -> None:
        """B is not left at zero: with it every dA would be zero."""
        seed = zlib.crc32(model_id.encode())
        adapter = FakeAdapter.fresh(Lora(rank=rank, seed=seed), self._base_table, seed)
        b = adapter.weights.arrays[1]
        b[:] = np.random.default_rng(seed).normal(size=b.shape) * 0.1
        self._adapters[model_id] = adapter

    def delete(self, model_id: str) -> None:
        del self._adapters[model_id]

    def gradient(self, model_id: str) -> Array:
        """The model's own, one row of numbers; a copy."""
        return np.concatenate([part.ravel() for part in self._adapter(model_id).gradient])

    # ---- passes
    def launch(
        self, items: Sequence[PassItem], *, complete: Sequence[Gradient], backward: bool = False
    ) -> FakePass | PassFailure:
        self.log.append(f"launch {_names([item.part for item in items])}")
        if failed := self.fails(items):
            self.log.append("failed")
            if self.lockstep:
                raise MemoryError
        wrote = any(item.gradient is not None for item in items) and self.wrote_gradients
        results = []
        for item in items[: int(wrote)] if failed else items:
            adapter = self._adapter(item.model_id)
            computed = compute(self._base_table, adapter.weights, item.datum, item.loss_fn, item.config)
            if item.gradient is not None:
                for total, part in zip(self._arrays(item.gradient), computed.gradient):
                    total += part
            results.append(_result(item, computed))
        if failed:
            return PassFailure(why="ran out of memory", wrote_gradients=wrote)
        result = PassResult(
            datums=results,
            magnitudes=self.magnitudes(complete),
            seconds=1.0,
            tokens=sum(datum.tokens for datum in results),
            adapters=len({item.model_id for item in items}),
            flops=2.0 * self.facts.num_params * sum(datum.tokens for datum in results),
            memory_bytes=1 << 20,
        )
        return FakePass(result=result, log=self.log)

    def empty_pass(self, *, backward: bool) -> None:
        self.log.append("empty")

    def recover(self) -> None:
        self.log.append("recover")

    # ---- models
    def state(self, model_id: str) -> ModelState:
        adapter = self._adapter(model_id)
        return ModelState(step=adapter.step, has_gradient=adapter.pending_gradient)

    def keep_gradient(self, model_id: str) -> None:
        self._adapter(model_id).pending_gradient = True

    def step(
        self, steps: Sequence[tuple[str, AdamParams]], *, gradients_ready: torch.cuda.Event | None = None
    ) -> list[StepTaken | Exception]:
        outcomes: list[StepTaken | Exception] = []
        for model_id, params in steps:
            adapter = self._adapter(model_id)
            try:
                norm = take_step(adapter, params)
            except Exception as error:
                outcomes.append(error)
            else:
                outcomes.append(StepTaken(grad_norm=norm, step=adapter.step))
        return outcomes

    def clear(self, model_ids: Sequence[str]) -> None:
        for model_id in model_ids:
            self._adapter(model_id).clear_gradient()

    # ---- gradients
    def allocate(self, model_id: str) -> Gradient:
        if len(self.scratch) >= self.max_scratch:
            raise ServerError("no room for another gradient: ran out of memory")
        self._num_scratch += 1
        gradient = Gradient(model_id=model_id, scratch=self._num_scratch)
        self.scratch[gradient] = [np.zeros_like(part) for part in self._adapter(model_id).gradient]
        return gradient

    def free(self, gradient: Gradient) -> None:
        if gradient.scratch is not None:
            del self.scratch[gradient]
        elif gradient.model_id in self._adapters:
            self.zero(gradient)

    def zero(self, gradient: Gradient) -> None:
        for part in self._arrays(gradient):
            part[:] = 0

    def add_own(self, scratch: Gradient) -> None:
        for part, own in zip(self._arrays(scratch), self._adapter(scratch.model_id).gradient):
            part += own

    def swap_own(self, scratch: Gradient) -> None:
        adapter = self._adapter(scratch.model_id)
        self.scratch[scratch], adapter.gradient = adapter.gradient, self.scratch[scratch]

    def move_to_own(self, scratch: Gradient) -> None:
        self._adapter(scratch.model_id).gradient = self.scratch.pop(scratch)

    def magnitudes(self, gradients: Sequence[Gradient]) -> list[float]:
        with np.errstate(over="ignore"):  # beyond float32 it is infinite, as where gradients are float32
            return [
                float(np.float32(max(np.abs(part).max() for part in self._arrays(gradient)))) for gradient in gradients
            ]

    def _adapter(self, model_id: str) -> FakeAdapter:
        if model_id not in self._adapters:
            raise NotFound(f"model {model_id} is not here")
        return self._adapters[model_id]

    def _arrays(self, gradient: Gradient) -> list[Array]:
        return self._adapter(gradient.model_id).gradient if gradient.scratch is None else self.scratch[gradient]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePass:
    result: PassResult
    log: list[str]

    def wait(self) -> PassResult:
        self.log.append(f"wait {_names([datum.part for datum in self.result.datums])}")
        return self.result


def _result(item: PassItem, computed: Computed) -> DatumResult:
    arrays = dense_inputs(item.datum, item.loss_fn)
    if item.loss_fn == "dro":
        trained_L = np.ones(len(computed.loss_L), np.bool_)
    else:
        given = arrays["weights" if item.loss_fn == "cross_entropy" else "advantages"]
        trained_L = np.any(given.reshape(len(given), -1) != 0, axis=1)
        if item.loss_fn == "gspo":
            trained_L = trained_L & (arrays["sequence_ratio_mask"] != 0)
    finite = bool(computed.finite_L.all())
    return DatumResult(
        part=item.part,
        loss=float(computed.loss_L.sum()) if finite else float("nan"),
        entropy=(float(computed.entropy_L[trained_L].sum()), int(trained_L.sum())),
        logprobs=computed.logprobs.astype(np.float32),
        tokens=len(computed.loss_L),
        not_finite_at=None if finite else int(np.argmin(computed.finite_L)),
    )


def _names(parts: Sequence[Part]) -> str:
    return " ".join(f"{part.request[0]}{part.request[1]}.{part.datum}" for part in parts)
