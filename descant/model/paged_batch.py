"""A batch over the KV pages as the layers see it on CUDA: everything that varies lies behind one number.

``PagedBatch`` stands where a ``ForwardBatch`` would for attention, and where a ``LoraBatch`` would for the linear
layers. What belongs to one layer (its pages) hangs on its attention module as tensors (``bind``). So all layers of a
kind are one program to the compiler, and one program serves decode steps of any number of rows, adapters and KV splits,
and prefill.

Everything that varies lies in tensors, which may stay where they are: a decode step (one token a sequence) and a
prefill can be captured once and replayed. Layers that are joined (``MultiLoraLinear.join``) are one product here too.

Legend: N sequences (rows) of a decode step, B of a prefill, W width of the page table, C tiles or KV splits, S sites, H
fused LoRA-A columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import RANK_BUCKETS
from descant.adapters.slots import RowRef
from descant.model.forward_batch import Handles, KVPool
from descant.types import SCALE_NUMERATOR

NARROW_RANK = 64
"""Adapters up to this rank bucket are computed in one launch, whatever their ranks: what is empty of a tile costs less
than a launch for each bucket. Wider ones would have the others' tiles no longer fit."""

TILE_ROWS = 16
"""Rows of one adapter that are computed together in a decode step,"""

PREFILL_TILE_ROWS = 64
"""and in prefill."""

ATTENTION_TILE_ROWS = 64
"""Query rows (tokens times heads of a group) of a prefill's attention tile: one tile of the matrix unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMetadata:
    """``table_NW`` int32. ``splits_C5`` and ``partials_N2`` int32: see ``kv_splits``; ``num_splits`` of them are looked
    at (a row of -1: nothing), ``num_partials`` 0 if every sequence is one split."""

    table_NW: torch.Tensor
    splits_C5: torch.Tensor
    partials_N2: torch.Tensor
    num_splits: int
    num_partials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillMetadata:
    """``table_BW`` int32. ``tiles_C4`` int32: see ``prefill_tiles``, of at most ``tile_tokens`` each; together they
    have every token of the pass, those that only fill it up included."""

    table_BW: torch.Tensor
    tiles_C4: torch.Tensor
    tile_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTiles:
    """Rows of adapters whose rank buckets are at most ``max_rank``, itself one: one launch for them all.

    ``tiles_C6`` int64: first row, end row (at most ``tile_rows`` on), where the adapter's row begins in elements from
    ``origin`` on, rank bucket, scale (the bits of a float32), first fused LoRA-A column (read where the batch is
    ``lora_a_fused``); a tile without rows does nothing. ``origin``: any tensor of the slabs' dtype that stays where it
    is; so slabs may move, and whoever replays a pass says anew where they are. ``features``: see ``site_features``."""

    max_rank: int
    origin: torch.Tensor
    tiles_C6: torch.Tensor
    tile_rows: int
    features: Mapping[tuple[int, ...], torch.Tensor]


Tile = tuple[int, int, int, int, int, int]


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class PagedBatch:
    """Layers read ``handle`` and nothing else of it; its maker keeps it until they have run. Rows in no
    tile of ``adapters`` use the base alone. ``lora_a_fused``: all their A's lie behind the weights
    (``model.lora.fused_a``)."""

    attention: DecodeMetadata | PrefillMetadata
    adapters: tuple[AdapterTiles, ...]
    lora_a_fused: bool = False
    handle: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.handle = PAGED_BATCHES.take(self)


PAGED_BATCHES: Handles[PagedBatch] = Handles()


def kv_splits(positions_N: NDArray[np.int64], split_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys before each sequence's new token (at ``positions_N``), cut every ``split_tokens``.

    [C, 5]: row, first key, end key, position of the new token, number of its partial output (-1: it is all there is of
    the sequence). Longest first: programs begin in this order, and what is left for the end is small. A sequence's last
    split ends at its position; it may be empty. [N, 2]: each row's first partial output and how many."""
    counts = np.maximum(1, -(-positions_N // split_tokens))
    rows = np.repeat(np.arange(len(positions_N)), counts)
    begin = (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]) * split_tokens
    end = np.minimum(begin + split_tokens, positions_N[rows])
    partials = np.where(counts > 1, counts, 0)
    first_partial = np.cumsum(partials) - partials
    partial = np.where(partials[rows] > 0, first_partial[rows] + begin // split_tokens, -1)
    order = np.argsort(begin - end, kind="stable")
    return np.stack([rows, begin, end, positions_N[rows], partial], axis=1)[order], np.stack(
        [first_partial, partials], axis=1
    )


def prefill_tile_tokens(group: int) -> int:
    """Tokens of an attention tile, where as many query heads share a key head."""
    return max(1, ATTENTION_TILE_ROWS // group)


def prefill_tiles(
    starts: Sequence[int], lengths: Sequence[int], context_lens: Sequence[int], num_tokens: int, tile_tokens: int
) -> NDArray[np.int64]:
    """The pass's tokens cut every ``tile_tokens``, in each sequence anew. ``starts``: each one's first token in the
    stream, rising; ``context_lens``: tokens before it that are in its pages.

    [C, 4]: row of the page table, first token of the stream, number of tokens, position of the first. Between the
    sequences and behind them tokens only fill the pass up: of no row, -1."""
    begin, count = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    end = begin + count
    gap_begin, gap_end = np.append(0, end), np.append(begin, num_tokens)
    first = np.concatenate([begin, gap_begin])
    size = np.concatenate([count, gap_end - gap_begin])
    row = np.concatenate([np.arange(len(begin)), np.full(len(gap_begin), -1)])
    position = np.concatenate([np.asarray(context_lens, np.int64), np.zeros(len(gap_begin), np.int64)])
    tiles = -(-size // tile_tokens)
    of = np.repeat(np.arange(len(size)), tiles)
    before = (np.arange(len(of)) - (np.cumsum(tiles) - tiles)[of]) * tile_tokens
    return np.stack([row[of], first[of] + before, np.minimum(tile_tokens, size[of] - before), position[of] + before], 1)


def bind(network: nn.Module, pool: KVPool) -> None:
    """Gives each attention module its layer's pages."""
    for module in network.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(pool.keys) and hasattr(module, "config"):
            module.page_keys, module.page_values = pool.keys[layer], pool.values[layer]


def products(network: nn.Module) -> set[tuple[int, ...]]:
    """The sites of every product of the layers."""
    from descant.model.lora.linear import MultiLoraLinear

    return {module.sites for module in network.modules() if isinstance(module, MultiLoraLinear)}


def site_features(
    bank: AdapterBank, products: Iterable[tuple[int, ...]], device: torch.device
) -> dict[tuple[int, ...], torch.Tensor]:
    """By the sites of a product, int64 [S, 2]: the features that lie before their A and B in an adapter's row. In a row
    of rank bucket R they begin after R times as many elements (``adapters.layout.Layout``)."""
    rank_bucket = RANK_BUCKETS[0]
    layout = bank.layout(rank_bucket)
    return {
        sites: torch.tensor(
            [(layout.a_offset[site] // rank_bucket, layout.b_offset[site] // rank_bucket) for site in sites]
        ).to(device)
        for sites in products
    }


def add_adapters(
    x_NI: torch.Tensor,
    y_NO: torch.Tensor,
    sites: tuple[int, ...],
    widths: Sequence[int],
    adapters: Iterable[AdapterTiles],
    *,
    h_NH: torch.Tensor | None = None,
) -> None:
    """Adds to ``y_NO`` (the base's product), in place, each tile's ``scale · (x Aᵀ) Bᵀ`` at every site, which has so
    many of the outputs (``widths``). ``h_NH``: the fused LoRA-A columns of the base's product, with the row stride of
    ``y_NO``: there every tile finds its x Aᵀ."""
    for entry in adapters:
        from descant.model.lora import paged_kernels  # Triton: only where it is used

        paged_kernels.add(x_NI, y_NO, entry, entry.features[sites], widths, h_NH=h_NH)


def tiles(
    segments: Iterable[tuple[int, int, RowRef]],
    bank: AdapterBank,
    origin: torch.Tensor,
    tile_rows: int,
    columns: Mapping[RowRef, int] | None = None,
) -> list[Tile]:
    """``AdapterTiles.tiles_C6`` for rows ``start:end`` of one adapter each. ``columns``: the first fused LoRA-A column
    of each, if they have any."""
    found: list[Tile] = []
    slabs: dict[int, tuple[int, int]] = {}
    for start, end, row in segments:
        if row.rank_bucket not in slabs:
            slab_SP = bank.compute_slab(row.rank_bucket)
            begin, rest = divmod(slab_SP.data_ptr() - origin.data_ptr(), origin.itemsize)
            assert rest == 0
            slabs[row.rank_bucket] = begin, slab_SP.stride(0)
        begin, stride = slabs[row.rank_bucket]
        at = begin + row.slot * stride
        scale = int(np.float32(SCALE_NUMERATOR / bank.lora(row).rank).view(np.int32))
        column = 0 if columns is None else columns[row]
        found += [
            (first, min(first + tile_rows, end), at, row.rank_bucket, scale, column)
            for first in range(start, end, tile_rows)
        ]
    return found
