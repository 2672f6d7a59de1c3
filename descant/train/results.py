"""What becomes a request's result: what each rank has of it, put together with its metrics. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from descant.errors import DescantError
from descant.types import ForwardBackward, ForwardBackwardOutput, input_length


@dataclass(slots=True, kw_only=True)
class Passes:
    """What a request's passes were. ``tokens`` are those that were computed for it: shared ones once a pass.
    ``all_tokens`` and ``all_flops`` are the passes' own, all requests together. ``memory_bytes``: what the rank had
    taken at most when the last had run."""

    count: int = 0
    tokens: int = 0
    adapters: int = 0
    seconds: float = 0.0
    all_tokens: int = 0
    all_flops: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one rank has of a request: losses and log-probabilities of the datums that ran there, or why they failed.
    ``entropies``: of each of them, the sum over the positions where its loss can have a derivative, and their
    number."""

    losses: Mapping[int, float]
    entropies: Mapping[int, tuple[float, int]]
    logprobs: Mapping[int, np.ndarray]
    passes: Passes
    error: DescantError | None


def assemble(
    command: ForwardBackward,
    contributions: Sequence[Contribution],
    *,
    computed_as: str | None,
    peak_flops: float | None,
) -> ForwardBackwardOutput:
    """Of a request all of whose datums ran, each on one rank.

    Metrics besides ``loss:sum``: ``entropy:mean`` in nats over the positions where the loss can have a derivative
    (``train.loss.loss_mask``), not there without any; ``computed_as_LOSS:mean``, which is 1, where another loss is
    computed than was asked for; ``tokens:sum`` as given, ``tokens_computed:sum`` (what datums of a pass begin with in
    common is computed once), ``microbatches:sum``, ``compute_ms:sum`` of those passes, which others may have shared,
    and ``adapters_in_pass:max``. ``tokens_per_s:mean`` and ``mfu:mean`` (``model.flops``; ``peak_flops``
    in FLOP/s, None: unknown) are of these passes as a whole; ``memory_bytes:max`` is what a rank has taken of its
    device at most."""
    losses = {index: loss for part in contributions for index, loss in part.losses.items()}
    entropies = {index: entropy for part in contributions for index, entropy in part.entropies.items()}
    logprobs = {index: values for part in contributions for index, values in part.logprobs.items()}
    passes = [part.passes for part in contributions]
    return ForwardBackwardOutput(
        loss_fn_outputs=tuple({"logprobs": logprobs[index]} for index in range(len(command.data))),
        metrics={
            "loss:sum": math.fsum(losses.values()),
            **({} if computed_as is None else {f"computed_as_{computed_as}:mean": 1.0}),
            **_mean_entropy(entropies.values()),
            "tokens:sum": float(sum(input_length(datum.model_input) for datum in command.data)),
            "tokens_computed:sum": float(sum(part.tokens for part in passes)),
            "microbatches:sum": float(sum(part.count for part in passes)),
            "compute_ms:sum": 1000 * max(part.seconds for part in passes),
            "adapters_in_pass:max": float(max(part.adapters for part in passes)),
            **_speed(passes, peak_flops),
        },
    )


def _mean_entropy(entropies: Collection[tuple[float, int]]) -> dict[str, float]:
    num_positions = sum(count for _, count in entropies)
    return {"entropy:mean": math.fsum(total for total, _ in entropies) / num_positions} if num_positions else {}


def _speed(passes: Sequence[Passes], peak_flops: float | None) -> dict[str, float]:
    """Of one's passes, or of those that several ranks made of theirs at a time."""
    metrics = {"memory_bytes:max": float(max(part.memory_bytes for part in passes))}
    seconds = max(part.seconds for part in passes)
    if seconds > 0:
        metrics["tokens_per_s:mean"] = sum(part.all_tokens for part in passes) / seconds
        if peak_flops is not None:
            rate = sum(part.all_flops for part in passes) / seconds
            metrics["mfu:mean"] = rate / (len(passes) * peak_flops)
    return metrics
