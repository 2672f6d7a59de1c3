"""Passes over the KV pages as the layers see them on CUDA: everything that varies lies behind one number.

``PagedStep`` stands where a ``Pass`` would for attention, and where a ``LoraPass`` would for the linear layers. What
belongs to one layer (its pages) hangs on its attention module as tensors (``bind``). So all layers of a kind are one
program to the compiler, and one program serves decode steps of any number of rows, adapters and pieces, and prefill.

A decode step is one token a sequence, everything that varies in tensors that stay where they are: it can be captured
once and replayed. Layers that are joined (``MultiLoraLinear.join``) are one product here too.

Legend: N sequences (rows), W width of the page table, C tiles or pieces, K rank classes, S sites, H spare rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from descant.model.bank import AdapterBank
from descant.model.passes import Handles, KVPool, Pass, RowRef
from descant.types import SCALE_NUMERATOR

TILE_ROWS = 16
"""Rows of one adapter that are computed together in a decode step,"""

PREFILL_TILE_ROWS = 64
"""and in prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePass:
    """``table_NW`` int32. ``pieces_C5`` and ``parts_N2`` int32: see ``pieces``; ``num_pieces`` of them are looked at
    (a row of -1: nothing), ``num_parts`` 0 if every sequence is one piece."""

    table_NW: torch.Tensor
    pieces_C5: torch.Tensor
    parts_N2: torch.Tensor
    num_pieces: int
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileClass:
    """The rows of one rank class. ``tiles_C5`` int32: first row, end row (at most ``tile_rows`` on), slot, scale (the
    bits of a float32), place among the spare rows (read in a step ``beside`` only); a tile without rows does nothing.
    ``slab``: the class's work rows, flat; ``row``: elements of one. ``offsets``: by the sites of a product, int64
    [S, 2], where their A and B begin in a row."""

    rank_class: int
    slab: torch.Tensor
    row: int
    tiles_C5: torch.Tensor
    tile_rows: int
    offsets: Mapping[tuple[int, ...], torch.Tensor]


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class PagedStep:
    """Layers read ``handle`` and nothing else of it; whoever runs the layers keeps it until they have run. Rows in no
    tile of ``adapters`` use the base alone. ``beside``: all their A lie in the spare rows (``model.spare``)."""

    attention: DecodePass | Pass
    adapters: tuple[TileClass, ...]
    beside: bool = False
    handle: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.handle = PAGED_STEPS.take(self)


PAGED_STEPS: Handles[PagedStep] = Handles()


def pieces(positions_N: NDArray[np.int64], piece_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys before each sequence's new token (at ``positions_N``), cut every ``piece_tokens``.

    [C, 5]: row, first key, end key, position of the new token, number of the part that the piece's outcome is (-1: it
    is all there is of the sequence). Longest first: programs begin in this order, and what is left for the end is
    small. A sequence's last piece ends at its position; it may be empty. [N, 2]: each row's first part and how many."""
    counts = np.maximum(1, -(-positions_N // piece_tokens))
    rows = np.repeat(np.arange(len(positions_N)), counts)
    begin = (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]) * piece_tokens
    end = np.minimum(begin + piece_tokens, positions_N[rows])
    parts = np.where(counts > 1, counts, 0)
    first_part = np.cumsum(parts) - parts
    part = np.where(parts[rows] > 0, first_part[rows] + begin // piece_tokens, -1)
    order = np.argsort(begin - end, kind="stable")
    return np.stack([rows, begin, end, positions_N[rows], part], axis=1)[order], np.stack([first_part, parts], axis=1)


def bind(network: nn.Module, pool: KVPool) -> None:
    """Gives each attention module its layer's pages."""
    for module in network.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(pool.keys) and hasattr(module, "config"):
            module.page_keys, module.page_values = pool.keys[layer], pool.values[layer]


def products(network: nn.Module) -> set[tuple[int, ...]]:
    """The sites of every product of the layers."""
    from descant.model.lora import MultiLoraLinear

    return {module.sites for module in network.modules() if isinstance(module, MultiLoraLinear)}


def site_offsets(
    bank: AdapterBank, rank_class: int, products: Iterable[tuple[int, ...]], device: torch.device
) -> dict[tuple[int, ...], torch.Tensor]:
    """``TileClass.offsets``"""
    layout = bank.layout(rank_class)
    return {
        sites: torch.tensor([(layout.a_offset[site], layout.b_offset[site]) for site in sites]).to(device)
        for sites in products
    }


def add_adapters(
    x_NI: torch.Tensor,
    y_NO: torch.Tensor,
    sites: tuple[int, ...],
    widths: Sequence[int],
    adapters: Iterable[TileClass],
    *,
    h_NH: torch.Tensor | None = None,
) -> None:
    """Adds to ``y_NO`` (the base's product), in place, each tile's ``scale · (x Aᵀ) Bᵀ`` at every site. ``h_NH``: x
    times all spare rows, with the row stride of ``y_NO``, in which every tile finds its x Aᵀ."""
    for entry in adapters:
        from descant.model import decode_lora  # Triton: only where it is used

        decode_lora.add(x_NI, y_NO, entry, entry.offsets[sites], widths, h_NH=h_NH)


def tiles(
    segments: Iterable[tuple[int, int, RowRef]],
    bank: AdapterBank,
    tile_rows: int,
    places: Mapping[RowRef, int] | None = None,
) -> dict[int, list[tuple[int, int, int, int, int]]]:
    """``TileClass.tiles_C5`` of each rank class, for rows ``start:end`` of one adapter each. ``places``: where they lie
    among the spare rows, if they do."""
    found: dict[int, list[tuple[int, int, int, int, int]]] = {}
    for start, end, row in segments:
        scale = int(np.float32(SCALE_NUMERATOR / bank.lora(row).rank).view(np.int32))
        place = 0 if places is None else places[row]
        found.setdefault(row.rank_class, []).extend(
            (first, min(first + tile_rows, end), row.slot, scale, place) for first in range(start, end, tile_rows)
        )
    return found
