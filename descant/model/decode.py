"""A decode step as the layers see it: one token a sequence, everything that varies in tensors that stay where they are.

So a step can be captured once and replayed: ``DecodePass`` stands where a ``Pass`` would, ``DecodeAdapters`` where a
``LoraPass`` would. What belongs to one layer (its pages, where its parts lie in the bank's slabs) hangs on its modules
as tensors (``bind``), so that all layers of a kind are one program to the compiler. Layers that are joined
(``MultiLoraLinear.join``) are one product here too.

Legend: N sequences (rows), I in, O out, R rank class, W width of the page table, C tiles, K rank classes, S sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from descant.model.bank import AdapterBank
from descant.model.passes import KVPool

if TYPE_CHECKING:
    from descant.model.lora import MultiLoraLinear

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
    without rows does nothing. ``slab``: the class's work rows, flat; ``row``: elements of one."""

    rank_class: int
    slab: torch.Tensor
    row: int
    tiles_C4: torch.Tensor


@dataclass(slots=True, kw_only=True)
class DecodeAdapters:
    """What ``LoraChannel.current`` is during a decode step. Rows in no tile use the base alone."""

    classes: tuple[DecodeClass, ...]


def linears(network: nn.Module) -> list[MultiLoraLinear]:
    from descant.model.lora import MultiLoraLinear

    return [module for module in network.modules() if isinstance(module, MultiLoraLinear)]


def bind(network: nn.Module, pool: KVPool, offsets: Mapping[tuple[int, ...], torch.Tensor]) -> None:
    """Gives each attention module its layer's pages and each linear layer the offsets of its sites: int64 [K, S, 2],
    which a captured step needs as long as it lives."""
    for module in network.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(pool.keys) and hasattr(module, "config"):
            module.decode_keys, module.decode_values = pool.keys[layer], pool.values[layer]
    for linear in linears(network):
        linear.decode_offsets = offsets[linear.sites]


def site_offsets(
    bank: AdapterBank, rank_classes: Sequence[int], sites: Sequence[int], device: torch.device
) -> torch.Tensor:
    layouts = [bank.layout(rank_class) for rank_class in rank_classes]
    offsets = [[(layout.a_offset[site], layout.b_offset[site]) for site in sites] for layout in layouts]
    return torch.tensor(offsets, dtype=torch.int64).view(-1, len(sites), 2).to(device)


def linear(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    widths: Sequence[int],
    offsets_KS2: torch.Tensor,
    adapters: DecodeAdapters,
) -> torch.Tensor:
    """[N, sum of widths]: the base's product and, in place, each tile's ``scale · (x Aᵀ) Bᵀ`` at every site."""
    if not adapters.classes:
        return nn.functional.linear(x_NI, weight_OI, bias_O)
    from descant.model import decode_lora  # Triton: only where it is used

    return decode_lora.linear(
        x_NI,
        weight_OI,
        bias_O,
        [entry.slab for entry in adapters.classes],
        offsets_KS2,
        [entry.tiles_C4 for entry in adapters.classes],
        [entry.rank_class for entry in adapters.classes],
        [entry.row for entry in adapters.classes],
        list(widths),
    )
