"""A decode step as the layers see it: one token a sequence, everything that varies in tensors that stay where they are.

So a step can be captured once and replayed: ``DecodePass`` stands where a ``Pass`` would, ``DecodeAdapters`` where a
``LoraPass`` would. What belongs to one layer (its pages, its parts of the bank's slabs) hangs on its modules (``bind``),
so that all layers of a kind are one program to the compiler.

Legend: N sequences (rows), I in, O out, R rank class, W width of the page table, C tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from descant.model.bank import AdapterBank
from descant.model.passes import KVPool

TILE_ROWS = 16
"""Rows of one adapter that are computed together."""


@dataclass(slots=True, kw_only=True)
class DecodePass:
    """``table_NW`` int32; ``tiles_N4`` int32, one a sequence (see ``paged_attention``)."""

    table_NW: torch.Tensor
    tiles_N4: torch.Tensor
    splits: int


@dataclass(slots=True, kw_only=True)
class DecodeClass:
    """The rows of one rank class. ``tiles_C4`` int32: first row, end row, slot, scale (the bits of a float32); a tile
    without rows does nothing. ``row``: elements between two slots of the slab."""

    rank_class: int
    row: int
    tiles_C4: torch.Tensor


@dataclass(slots=True, kw_only=True)
class DecodeAdapters:
    """What ``LoraChannel.current`` is during a decode step with adapters. Rows in no tile use the base alone."""

    classes: tuple[DecodeClass, ...]


def bind(network: nn.Module, pool: KVPool) -> None:
    """Gives each attention module its layer's pages."""
    for module in network.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(pool.keys) and hasattr(module, "config"):
            module.decode_keys, module.decode_values = pool.keys[layer], pool.values[layer]


def slab_views(
    bank: AdapterBank, classes: Sequence[DecodeClass], site_index: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of each class the site's A and B of slot 0, flat; slot s lies ``s · row`` elements further."""
    site = bank.sites[site_index]
    a, b = [], []
    for entry in classes:
        layout = bank.layout(entry.rank_class)
        flat = bank.work_slab(entry.rank_class).view(-1)
        start = layout.a_offset[site_index]
        a.append(flat[start : start + entry.rank_class * site.in_features])
        start = layout.b_offset[site_index]
        b.append(flat[start : start + entry.rank_class * site.out_features])
    return a, b


def linear(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    views: tuple[list[torch.Tensor], list[torch.Tensor]],
    adapters: DecodeAdapters,
) -> torch.Tensor:
    """[N, O]: the base's product and, in place, each tile's ``scale · (x Aᵀ) Bᵀ``."""
    from descant.model import decode_lora  # Triton: only where it is used

    return decode_lora.linear(
        x_NI,
        weight_OI,
        bias_O,
        views[0],
        views[1],
        [entry.tiles_C4 for entry in adapters.classes],
        [entry.rank_class for entry in adapters.classes],
        [entry.row for entry in adapters.classes],
    )
