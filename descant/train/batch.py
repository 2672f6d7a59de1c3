"""Datums of many requests into one flat stream, and its log-probabilities back to each datum.

Nothing is padded but the targets' K. The stream is sorted by rank class, then working row, then request, so that every
adapter's tokens are one run; within a request datums keep the order they were given in.

Legend: T tokens of the stream, L tokens of a datum, K targets a position (the widest datum's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from descant.model.passes import RowRef, Segment
from descant.train.check import dense_inputs
from descant.train.loss import LossInputs
from descant.types import Datum, input_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One datum and what it is computed with. ``config`` is complete; ``gradient`` None: forward only."""

    request: tuple[str, int]
    index: int
    datum: Datum
    loss_fn: str
    config: Mapping[str, float]
    row: RowRef
    gradient: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpan:
    """Stream tokens ``start:end`` take one loss with one config (neighbouring requests that agree are one span).

    ``backward`` False: they are only evaluated.
    """

    start: int
    end: int
    backward: bool
    loss_fn: str
    config: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A microbatch as tensors. ``items[i]`` owns ``seq_lens[i]`` tokens of the stream, in order.

    tokens_T, positions_T  int64 [T]     positions restart in each datum
    targets_TK             int64 [T, K]  0 where a datum has fewer targets
    weights_TK             float32       0 there, and all of it for losses that take none
    logprobs_T             float32 [T]   the given ones; 0 for losses that take none
    advantages_T           float32 [T]   likewise
    """

    items: tuple[Item, ...]
    seq_lens: tuple[int, ...]
    segments: tuple[Segment, ...]
    loss_spans: tuple[LossSpan, ...]
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    targets_TK: torch.Tensor
    weights_TK: torch.Tensor
    logprobs_T: torch.Tensor
    advantages_T: torch.Tensor

    def loss_inputs(self, tokens: slice) -> LossInputs:
        return LossInputs(
            weights_CK=self.weights_TK[tokens],
            logprobs_C=self.logprobs_T[tokens],
            advantages_C=self.advantages_T[tokens],
        )


def pack(items: Sequence[Item], device: torch.device) -> Packed:
    """Checked datums, at least one."""
    ordered = sorted(items, key=lambda item: (item.row, item.request))
    dense = [dense_inputs(item.datum, item.loss_fn) for item in ordered]
    seq_lens = tuple(len(arrays["target_tokens"]) for arrays in dense)
    ends = np.cumsum(seq_lens).tolist()
    starts = [0, *ends[:-1]]

    num_tokens = ends[-1]
    num_targets = max(arrays["target_tokens"].size // length for arrays, length in zip(dense, seq_lens, strict=True))
    targets_TK = np.zeros((num_tokens, num_targets), np.int64)
    weights_TK = np.zeros((num_tokens, num_targets), np.float32)
    given = {name: np.zeros(num_tokens, np.float32) for name in ("logprobs", "advantages")}
    for start, end, arrays in zip(starts, ends, dense, strict=True):
        width = arrays["target_tokens"].size // (end - start)
        targets_TK[start:end, :width] = arrays["target_tokens"].reshape(-1, width)
        if "weights" in arrays:
            weights_TK[start:end, :width] = arrays["weights"].reshape(-1, width)
        for name, stream_T in given.items():
            if name in arrays:
                stream_T[start:end] = arrays[name]

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    tokens_T = np.concatenate([input_tokens(item.datum.model_input) for item in ordered]).astype(np.int64)
    positions_T = np.arange(num_tokens) - np.repeat(starts, seq_lens)
    return Packed(
        items=tuple(ordered),
        seq_lens=seq_lens,
        segments=_segments(ordered, starts, ends),
        loss_spans=_loss_spans(ordered, starts, ends),
        tokens_T=to_device(tokens_T),
        positions_T=to_device(positions_T),
        targets_TK=to_device(targets_TK),
        weights_TK=to_device(weights_TK),
        logprobs_T=to_device(given["logprobs"]),
        advantages_T=to_device(given["advantages"]),
    )


def unpack(packed: Packed, logprobs_TK: np.ndarray) -> list[np.ndarray]:
    """The stream's log-probabilities per item, float32 in the shape of its ``target_tokens``; copies, so that an
    output that is kept does not keep the stream."""
    outputs = []
    start = 0
    for item, length in zip(packed.items, packed.seq_lens, strict=True):
        shape = np.shape(item.datum.loss_fn_inputs["target_tokens"])
        width = shape[1] if len(shape) == 2 else 1
        outputs.append(logprobs_TK[start : start + length, :width].reshape(shape).astype(np.float32))
        start += length
    return outputs


def _segments(items: Sequence[Item], starts: Sequence[int], ends: Sequence[int]) -> tuple[Segment, ...]:
    segments = []
    for (row, gradient), run in groupby(range(len(items)), key=lambda i: (items[i].row, items[i].gradient)):
        indices = list(run)
        segments.append(Segment(start=starts[indices[0]], end=ends[indices[-1]], row=row, gradient=gradient))
    return tuple(segments)


def _loss_spans(items: Sequence[Item], starts: Sequence[int], ends: Sequence[int]) -> tuple[LossSpan, ...]:
    spans = []

    def computation(i: int) -> tuple[str, dict[str, float], bool]:
        return items[i].loss_fn, dict(items[i].config), items[i].gradient is not None

    for (loss_fn, config, backward), run in groupby(range(len(items)), key=computation):
        indices = list(run)
        start, end = starts[indices[0]], ends[indices[-1]]
        spans.append(LossSpan(start=start, end=end, backward=backward, loss_fn=loss_fn, config=config))
    return tuple(spans)
