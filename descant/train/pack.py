"""Datums of many requests into one flat stream, and its log-probabilities back to each datum.

Nothing is padded but the targets' K. The stream is sorted by rank bucket, then compute copy, then request, so that
every adapter's tokens are one run; within a request datums keep the order they were given in.

Datums that begin alike (the samples of one prompt, the turns of one conversation) share what they have in common: it is
in the stream once, whatever each of them makes of it. They share only within one adapter, one gradient and one loss.

A target position is one token of one datum, and all that a datum says of it: its targets, weights, advantage. Target
positions lie in the order of their tokens in the stream, those of one token in the order of the datums; where nothing
is shared, position i is token i.

Legend: T tokens of the stream, P target positions, L tokens of a datum, K targets a position (the widest datum's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from descant.adapters.slots import GradientSlot, RowRef
from descant.model.forward_batch import Prefix, Segment, context_lens, stream_rows, to_device
from descant.train.check import dense_inputs
from descant.train.loss import SEQUENCE_LOSSES, LossInputs, loss_mask
from descant.train.runner import Part
from descant.types import Datum, Int32, input_tokens

MIN_SHARED_TOKENS = 16
"""Fewer are not worth the gathering of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One datum and what it is computed with. ``config`` is complete; ``gradient`` None: forward only."""

    part: Part
    datum: Datum
    loss_fn: str
    config: Mapping[str, float]
    row: RowRef
    gradient: GradientSlot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLoss:
    """One loss with one config, that some of the target positions take. ``backward`` False: they are only evaluated."""

    backward: bool
    loss_fn: str
    config: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A microbatch as tensors. ``items[i]`` has ``seq_lens[i]`` tokens of the stream of its own, in order, behind those
    of ``prefixes[i]`` (() where nothing is shared); its tokens' positions are ``target_positions[i]``.

    tokens_T, positions_T  int64 [T]     positions restart in each datum
    token_index_P          int64 [P]     on the host: the stream token of each position; None: position i is token i
    targets_PK             int64 [P, K]  0 where a datum has fewer targets
    weights_PK             float32       0 there, and all of it for losses that take none
    logprobs_P             float32 [P]   the given ones; 0 for losses that take none
    advantages_P, sequence_ratio_mask_P  likewise
    sequence_P             int64 [P]     each position's item; None without a loss over whole sequences
    losses_P               int64 [P]     on the host: which of ``losses`` each position takes
    device_losses_P        int64 [P]     the same; None where there is only one
    loss_mask_P            bool [P]      on the host: where the loss can have a derivative
                                         (``train.loss.loss_mask``), whether it is taken or not
    """

    items: tuple[Item, ...]
    seq_lens: tuple[int, ...]
    prefixes: tuple[Prefix | None, ...]
    target_positions: tuple[slice | NDArray[np.int64], ...]
    segments: tuple[Segment, ...]
    losses: tuple[PositionLoss, ...]
    losses_P: NDArray[np.int64]
    device_losses_P: torch.Tensor | None
    loss_mask_P: NDArray[np.bool_]
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    token_index_P: torch.Tensor | None
    targets_PK: torch.Tensor
    weights_PK: torch.Tensor
    logprobs_P: torch.Tensor
    advantages_P: torch.Tensor
    sequence_ratio_mask_P: torch.Tensor
    sequence_P: torch.Tensor | None

    def loss_inputs(self, positions: slice, sequence_ratio_P: torch.Tensor | None) -> LossInputs:
        return LossInputs(
            weights_CK=self.weights_PK[positions],
            logprobs_C=self.logprobs_P[positions],
            advantages_C=self.advantages_P[positions],
            sequence_ratio_mask_C=self.sequence_ratio_mask_P[positions],
            sequence_ratio_C=None if sequence_ratio_P is None else sequence_ratio_P[positions],
        )


def pack(items: Sequence[Item], device: torch.device, *, share: bool = True) -> Packed:
    """Checked datums, at least one. ``share`` False is for comparing the two."""
    ordered = sorted(items, key=lambda item: (item.row, item.part.request))
    dense = [dense_inputs(item.datum, item.loss_fn) for item in ordered]
    tokens = [input_tokens(item.datum.model_input) for item in ordered]
    prefixes = _prefixes(ordered, tokens) if share else (None,) * len(ordered)
    lengths = [len(arrays["target_tokens"]) for arrays in dense]
    shared = context_lens(lengths, prefixes)
    seq_lens = tuple(length - context for length, context in zip(lengths, shared, strict=True))
    bounds_P, bounds_T = ([0, *np.cumsum(sizes).tolist()] for sizes in (lengths, seq_lens))

    token_index_P = None
    positions: list[slice | NDArray[np.int64]] = [slice(start, end) for start, end in pairwise(bounds_P)]
    order: NDArray[np.int64] | slice = slice(None)
    if any(shared):
        by_item_P = np.concatenate(stream_rows(seq_lens, prefixes))
        order = np.argsort(by_item_P, kind="stable")
        token_index_P = torch.from_numpy(by_item_P[order])
        position_of_P = np.empty_like(order)
        position_of_P[order] = np.arange(len(order))
        positions = [position_of_P[item] for item in positions]

    num_positions = bounds_P[-1]
    num_targets = max(arrays["target_tokens"].size // length for arrays, length in zip(dense, lengths, strict=True))
    targets_PK = np.zeros((num_positions, num_targets), np.int64)
    weights_PK = np.zeros((num_positions, num_targets), np.float32)
    given = {name: np.zeros(num_positions, np.float32) for name in ("logprobs", "advantages", "sequence_ratio_mask")}
    for (start, end), arrays in zip(pairwise(bounds_P), dense, strict=True):
        width = arrays["target_tokens"].size // (end - start)
        targets_PK[start:end, :width] = arrays["target_tokens"].reshape(-1, width)
        if "weights" in arrays:
            weights_PK[start:end, :width] = arrays["weights"].reshape(-1, width)
        for name, stream_P in given.items():
            if name in arrays:
                stream_P[start:end] = arrays[name]

    def on_device(array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), device)

    tokens_T = np.concatenate([own[context:] for own, context in zip(tokens, shared, strict=True)]).astype(np.int64)
    positions_T = np.arange(len(tokens_T)) + np.repeat(np.subtract(shared, bounds_T[:-1]), seq_lens)
    losses, taken = _losses(ordered)
    losses_P = np.repeat(taken, lengths)[order]
    sequence_P = None
    if any(item.loss_fn in SEQUENCE_LOSSES for item in ordered):
        sequence_P = on_device(np.repeat(np.arange(len(ordered)), lengths)[order])
    return Packed(
        items=tuple(ordered),
        seq_lens=seq_lens,
        prefixes=prefixes if any(shared) else (),
        target_positions=tuple(positions),
        segments=_segments(ordered, bounds_T),
        losses=losses,
        losses_P=losses_P,
        device_losses_P=on_device(losses_P) if len(losses) > 1 else None,
        loss_mask_P=np.concatenate([loss_mask(item.loss_fn, arrays) for item, arrays in zip(ordered, dense)])[order],
        tokens_T=on_device(tokens_T),
        positions_T=on_device(positions_T),
        token_index_P=token_index_P,
        targets_PK=on_device(targets_PK[order]),
        weights_PK=on_device(weights_PK[order]),
        logprobs_P=on_device(given["logprobs"][order]),
        advantages_P=on_device(given["advantages"][order]),
        sequence_ratio_mask_P=on_device(given["sequence_ratio_mask"][order]),
        sequence_P=sequence_P,
    )


def unpack(packed: Packed, logprobs_PK: np.ndarray) -> list[np.ndarray]:
    """The target positions' log-probabilities per item, float32 in the shape of its ``target_tokens``; copies, so that
    an output that is kept does not keep all of them."""
    outputs = []
    for item, positions in zip(packed.items, packed.target_positions, strict=True):
        shape = np.shape(item.datum.loss_fn_inputs["target_tokens"])
        width = shape[1] if len(shape) == 2 else 1
        outputs.append(logprobs_PK[positions][:, :width].reshape(shape).astype(np.float32))
    return outputs


def common_prefix(a: Int32, b: Int32) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def _prefixes(items: Sequence[Item], tokens: Sequence[Int32]) -> tuple[Prefix | None, ...]:
    """For each datum, the earlier one of its group that it has the most tokens in common with."""
    prefixes: list[Prefix | None] = [None] * len(items)

    def group(i: int) -> tuple[RowRef, GradientSlot | None, str, dict[str, float]]:
        return items[i].row, items[i].gradient, items[i].loss_fn, dict(items[i].config)

    for _, run in groupby(range(len(items)), key=group):
        first, *others = run
        if not others:
            continue
        # In lexical order the longest common prefix is a neighbour's, and between two datums it is the shortest of
        # those on the way. From the last datum to the first: take a neighbour, which is earlier, and leave the order.
        by_text = sorted([first, *others], key=lambda i: tokens[i].astype(">i4").tobytes())
        right = dict(pairwise(by_text))
        left = {after: before for before, after in pairwise(by_text)}
        common = {after: common_prefix(tokens[before], tokens[after]) for before, after in pairwise(by_text)}
        for i in sorted(by_text, reverse=True):
            before, after = left.pop(i, None), right.pop(i, None)
            to_before, to_after = common.pop(i, 0), 0 if after is None else common[after]
            parent, length = (before, to_before) if to_before >= to_after else (after, to_after)
            if parent is not None and length >= MIN_SHARED_TOKENS:
                prefixes[i] = Prefix(parent=parent, length=length)
            if before is not None and after is not None:
                right[before], left[after], common[after] = after, before, min(to_before, to_after)
            elif before is not None:
                del right[before]
            elif after is not None:
                del left[after], common[after]
    return tuple(prefixes)


def _segments(items: Sequence[Item], bounds_T: Sequence[int]) -> tuple[Segment, ...]:
    segments = []
    for (row, gradient), run in groupby(range(len(items)), key=lambda i: (items[i].row, items[i].gradient)):
        indices = list(run)
        start, end = bounds_T[indices[0]], bounds_T[indices[-1] + 1]
        segments.append(Segment(start=start, end=end, row=row, gradient=gradient))
    return tuple(segments)


def _losses(items: Sequence[Item]) -> tuple[tuple[PositionLoss, ...], list[int]]:
    """The different ones, in the order of their first items, and which one each item takes."""
    numbers: dict[tuple[str, tuple[tuple[str, float], ...], bool], int] = {}
    losses: list[PositionLoss] = []
    taken = []
    for item in items:
        backward = item.gradient is not None
        key = (item.loss_fn, tuple(item.config.items()), backward)
        if key not in numbers:
            numbers[key] = len(losses)
            losses.append(PositionLoss(backward=backward, loss_fn=item.loss_fn, config=item.config))
        taken.append(numbers[key])
    return tuple(losses), taken
