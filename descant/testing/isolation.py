"""The same training requests alone and beside other tenants': that come first, lie between, are longer, fail.

What ``alone_and_beside`` returns must be equal, bit for bit, where each pass is of one request
(``ranks.partition.cut_into_pieces``).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from descant.errors import DescantError
from descant.ranks.replica import Replica
from descant.ranks.settings import ReplicaSettings
from descant.ranks.worker import Worker
from descant.types import (
    AdamParams,
    CreateModel,
    Datum,
    DeleteModel,
    EncodedText,
    ForwardBackward,
    ForwardBackwardOutput,
    Lora,
    OptimStep,
    OptimStepOutput,
)

STEPS = 3
ADAM = AdamParams(learning_rate=1e-3)

LENGTHS = ((50, 37, 44), (90, 3, 61, 20, 33))
"""Of the datums of a step's two requests."""

Neighbour = tuple[int, tuple[int, ...], str]
"""Its rank, its datums' lengths, its loss."""

NEIGHBOURS: dict[str, tuple[Neighbour, ...]] = {
    "alone": (),
    "behind one": ((32, (61, 30), "cross_entropy"),),
    "among several": (
        (8, (17,), "cross_entropy"),
        (32, (61, 30, 5), "importance_sampling"),
        (3, (128, 2), "ppo"),
        (64, (9, 9, 9), "cross_entropy"),
    ),
    "beside one that fails": ((32, (61, 30), "fails"), (32, (40,), "cross_entropy")),
}
"""By name. Half of them, or the only one, come before the tenant under test."""


@dataclass
class Seen:
    """Of one model: log-probabilities in the order in which they came, norms of gradients, weights at the end."""

    logprobs: list[np.ndarray] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: torch.Tensor | None = None

    def furthest(self, other: Seen) -> tuple[float, float]:
        """From another: in log-probabilities and in weights."""
        assert self.weights is not None
        assert other.weights is not None
        assert len(self.logprobs) == len(other.logprobs)
        logprobs = max(float(np.abs(a - b).max()) for a, b in zip(self.logprobs, other.logprobs))
        return logprobs, float((self.weights - other.weights).abs().max())

    def equals(self, other: Seen) -> bool:
        return self.furthest(other) == (0.0, 0.0) and self.norms == other.norms


async def alone_and_beside(worker: Worker, settings: ReplicaSettings, *, num_threads: int) -> dict[str, Seen]:
    """By name of the neighbours: with turn loops of their own, on one rank."""
    return {name: await _run(worker, settings, num_threads, of) for name, of in NEIGHBOURS.items()}


async def _run(worker: Worker, settings: ReplicaSettings, num_threads: int, neighbours: Sequence[Neighbour]) -> Seen:
    def build(phase: object) -> Worker:
        torch.set_num_threads(num_threads)  # of the thread that computes
        return worker

    replica = await Replica.in_process(build, settings)
    try:
        vocab_size = worker.info.facts.vocab_size
        others = [
            _Tenant(replica, f"neighbour {number}", rank, seed=10 + number)
            for number, (rank, _, _) in enumerate(neighbours)
        ]
        mine = _Tenant(replica, "mine", 16, seed=1)
        for tenant in (*others, mine):
            await tenant.done(tenant.create())
        seen = Seen()
        for step in range(STEPS):
            sent: list[tuple[_Tenant, Any]] = []
            for number, (tenant, (_, lengths, loss_fn)) in enumerate(zip(others, neighbours)):
                if number == (len(others) + 1) // 2:
                    sent += [(mine, one) for one in mine.step(step, LENGTHS, "cross_entropy", vocab_size)]
                sent += [(tenant, one) for one in tenant.step(step, (lengths,), loss_fn, vocab_size)]
            if len(others) < 2:
                sent += [(mine, one) for one in mine.step(step, LENGTHS, "cross_entropy", vocab_size)]
            for tenant, future in sent:
                outcome = await tenant.done(future)
                if tenant is mine:
                    _note(seen, outcome)
        _note(seen, await mine.done(mine.evaluate(LENGTHS[1], vocab_size)))
        seen.weights = worker.model.bank.weights("mine").clone()
        for tenant in (*others, mine):
            await tenant.done(tenant.delete())
        return seen
    finally:
        await replica.close()


def _note(seen: Seen, outcome: object) -> None:
    if isinstance(outcome, DescantError):
        raise outcome
    if isinstance(outcome, ForwardBackwardOutput):
        seen.logprobs += [one["logprobs"] for one in outcome.loss_fn_outputs]
    elif isinstance(outcome, OptimStepOutput):
        seen.norms.append(outcome.metrics["grad_norm:mean"])


class _Tenant:
    def __init__(self, replica: Replica, model_id: str, rank: int, *, seed: int):
        self._replica, self._model_id = replica, model_id
        self._lora, self._seed = Lora(rank=rank, seed=seed), seed
        self._seq_ids = itertools.count(1)

    async def done(self, future: Any) -> object:
        try:
            return await future
        except DescantError as error:
            return error

    def create(self) -> Any:
        return self._replica.submit(CreateModel(model_id=self._model_id, trainable=self._lora))

    def delete(self) -> Any:
        return self._submit(DeleteModel)

    def step(
        self, step: int, requests: Sequence[tuple[int, ...]], loss_fn: str, vocab_size: int
    ) -> list[asyncio.Future[Any]]:
        """A request for each of ``requests``, and an optimiser step."""
        futures = [
            self._submit(ForwardBackward, data=self._data(lengths, loss_fn, vocab_size, step, number), loss_fn=loss)
            for number, lengths in enumerate(requests)
            for loss in ("cross_entropy" if loss_fn == "fails" else loss_fn,)
        ]
        return [*futures, self._submit(OptimStep, adam_params=ADAM)]

    def evaluate(self, lengths: tuple[int, ...], vocab_size: int) -> Any:
        data = self._data(lengths, "cross_entropy", vocab_size, 0, 0)
        return self._submit(ForwardBackward, data=data, loss_fn="cross_entropy", forward_only=True)

    def _submit(self, command: type[Any], **fields: Any) -> Any:
        return self._replica.submit(command(model_id=self._model_id, seq_id=next(self._seq_ids), **fields))

    def _data(
        self, lengths: tuple[int, ...], loss_fn: str, vocab_size: int, step: int, number: int
    ) -> tuple[Datum, ...]:
        data = []
        for index, length in enumerate(lengths):
            random = np.random.default_rng([self._seed, step, number, index])
            stream = random.integers(0, vocab_size, length + 1)
            arrays: dict[str, np.ndarray] = {"target_tokens": stream[1:].astype(np.int64)}
            if loss_fn == "fails":
                arrays["weights"] = np.full(length, 3e38, np.float32)
            elif loss_fn != "cross_entropy":
                arrays["logprobs"] = random.normal(-np.log(vocab_size), 0.5, length).astype(np.float32)
                arrays["advantages"] = random.normal(0, 1, length).astype(np.float32)
            tokens = EncodedText(tokens=stream[:-1].astype(np.int32))
            data.append(Datum(model_input=(tokens,), loss_fn_inputs=arrays))
        return tuple(data)
