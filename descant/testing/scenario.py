"""What several tenants do to a replica, and what they see: the same whatever its ranks are, and wherever they run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file

from descant.ckpt.peft import OPTIMIZER
from descant.ranks.replica import Replica
from descant.testing.engine import frozen, request, sampled
from descant.testing.tiny import VOCAB_SIZE
from descant.testing.trainer import Model, datum, output, result, saved
from descant.types import Datum, DeleteModel, Lora, SnapshotRef


def stream(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCAB_SIZE, length).tolist()  # type: ignore[no-any-return]


def data(*lengths: int, seed: int = 0) -> tuple[Datum, ...]:
    return tuple(datum(stream(seed + index, length)) for index, length in enumerate(lengths))


def scored(*lengths: int, seed: int = 0) -> tuple[Datum, ...]:
    """For ``gspo``: with log-probabilities, advantages and a mask."""
    random = np.random.default_rng(seed)
    return tuple(
        datum(
            stream(seed + index, length),
            logprobs=random.normal(-3, 0.5, length),
            advantages=random.normal(0, 1, length),
            sequence_ratio_mask=(np.arange(length) > 1).astype(np.float32),
        )
        for index, length in enumerate(lengths)
    )


@dataclass
class Observations:
    """What a client sees of the scenario."""

    losses: list[float] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: list[list[int]] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)

    async def backward(self, model: Model, given: tuple[Datum, ...], loss_fn: str = "cross_entropy") -> None:
        self.take(await output(model.backward(given, loss_fn)))

    def take(self, out: Any) -> None:
        self.losses.append(out.metrics["loss:sum"])
        self.logprobs += [one["logprobs"] for one in out.loss_fn_outputs]

    async def step(self, model: Model) -> None:
        self.norms.append(cast(Any, await result(model.step())).metrics["grad_norm:mean"])


async def run_scenario(replica: Replica, directory: Path) -> Observations:
    """Several tenants: more and fewer datums than ranks, odd numbers, a loss over sequences, accumulation, a forward,
    a checkpoint that is loaded into another model, sampling of several versions."""
    record = Observations()
    small, large = Model(replica, "small"), Model(replica, "large")
    await result(small.create(Lora(rank=4, seed=1)))
    await result(large.create(Lora(rank=16, seed=2)))
    for lengths in ((9,), (5, 8), (3, 30, 4), (7, 1, 2, 6, 12), (40, 2, 2, 2, 2, 2, 2)):
        together = [small.backward(data(*lengths)), large.backward(data(*lengths, seed=9))]
        for future in together:
            record.take(await output(future))
        await record.step(small)
    await record.backward(large, scored(6, 4, 9, 5, 3), "gspo")
    record.take(await output(large.forward(data(8, 9))))
    await record.step(large)
    await asyncio.to_thread(directory.mkdir, exist_ok=True)
    ref = cast(SnapshotRef, await result(large.snapshot()))
    source = await saved(replica, ref, directory / "large")
    await replica.drop(ref)
    record.gradients = load_file(directory / "large" / OPTIMIZER)  # the first moment is a tenth of the first gradient
    copy = Model(replica, "copy")
    await result(copy.create(Lora(rank=16), source=source))
    await record.backward(copy, data(300, 200, 310, 100, seed=3))
    await record.step(copy)
    for model, for_disk in ((small, False), (copy, True), (large, False)):
        version = await frozen(model, for_disk=for_disk)
        await replica.publish(version)
        wanted = [
            request(version.version, prompt=datum(stream(seed, 5 + seed)).model_input, temperature=0.0, max_tokens=9)
            for seed in range(3)
        ]
        for one in await asyncio.gather(*(sampled(replica, each) for each in wanted)):
            record.tokens.append(one.tokens())
            record.sampled += one.logprobs()
        await replica.release(version.version)
        if for_disk:
            await replica.drop(version)
    await result(small.send(DeleteModel))
    return record


def assert_alike(several: Observations, alone: Observations, *, logprobs: float = 1e-4) -> None:
    """To 1e-4 of the largest, in float32; greedy samples have the same tokens. ``logprobs``: the bound for
    log-probabilities. The first steps move a weight by its gradient's sign, however small the gradient is, so that
    what other kernels round otherwise comes back larger."""
    assert several.losses == pytest.approx(alone.losses, rel=1e-4)
    assert several.norms == pytest.approx(alone.norms, rel=1e-4)
    apart = _furthest(several.logprobs, alone.logprobs)
    assert apart < logprobs, f"log-probabilities are {apart:.1e} apart"
    assert several.gradients.keys() == alone.gradients.keys()
    largest = max(float(np.abs(gradient).max()) for gradient in alone.gradients.values())
    apart = _furthest(*(list(one.gradients.values()) for one in (several, alone)))
    assert apart < 1e-4 * largest, f"gradients are {apart:.1e} apart, the largest is {largest:.1e}"
    assert several.tokens == alone.tokens
    assert several.sampled == pytest.approx(alone.sampled, abs=1e-3)


def _furthest(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    assert [a.shape for a in some] == [b.shape for b in others]
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others))
