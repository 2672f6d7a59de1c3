"""A decode step as the layers see it: one token a sequence, everything that varies in tensors that stay where they are.

So a step can be captured once and replayed: ``DecodePass`` stands where a ``Pass`` would, ``DecodeAdapters`` where a
``LoraPass`` would. What belongs to one layer (its pages, where its parts lie in the bank's slabs) hangs on its modules
as tensors (``bind``), so that all layers of a kind are one program to the compiler.

Layers that read the same input (query, key and value; gate and up) are one product: the first of them computes for all,
the others take their part.

Legend: N sequences (rows), I in, O out, R rank class, W width of the page table, C tiles, K rank classes, S sites.
"""

from __future__ import annotations

from collections.abc import Sequence
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

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that most families give one input. Only a hint: each checks that its input is the one computed."""


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
    """What ``LoraChannel.current`` is during a decode step. Rows in no tile use the base alone. ``computed``: an input
    and what the layers that share it made of it."""

    classes: tuple[DecodeClass, ...]
    computed: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(slots=True, kw_only=True)
class DecodeSite:
    """What a linear layer needs in a decode step. ``outs``: features of all layers computed with it (itself first);
    ``offsets_KS2`` int64: where their A and B begin in a row of each class. Of a layer that another computes for,
    ``first`` is where its features begin there."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    outs: tuple[int, ...]
    offsets_KS2: torch.Tensor
    first: int = 0
    last: bool = False


def groups(network: nn.Module) -> list[list[MultiLoraLinear]]:
    """The network's linear layers, those that (by name) share their input together."""
    from descant.model.lora import MultiLoraLinear

    found: list[list[MultiLoraLinear]] = []
    for parent in network.modules():
        children = {name: child for name, child in parent.named_children() if isinstance(child, MultiLoraLinear)}
        for names in SAME_INPUT:
            group = [children[name] for name in names if name in children]
            if len(group) == len(names) and _is_one_product(group):
                found.append(group)
                for name in names:
                    del children[name]
        found += [[child] for child in children.values()]
    return found


def _is_one_product(group: Sequence[MultiLoraLinear]) -> bool:
    first = group[0].base
    return all(
        isinstance(layer.base, nn.Linear)
        and layer.base.weight.shape[1] == first.weight.shape[1]
        and layer.base.weight.dtype == first.weight.dtype
        and (layer.base.bias is None) == (first.bias is None)
        for layer in group
    )


@torch.no_grad()
def join_weights(group: Sequence[MultiLoraLinear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The group's weights as one; the layers' own become views of it, so nothing lies there twice."""
    if len(group) == 1:
        return group[0].weight_OI, group[0].bias
    weight_OI = _join([layer.base.weight for layer in group])
    return weight_OI, None if group[0].bias is None else _join([layer.base.bias for layer in group])


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole


def bind(
    network: nn.Module,
    pool: KVPool,
    products: Sequence[tuple[Sequence[MultiLoraLinear], torch.Tensor, torch.Tensor | None]],
    offsets: Sequence[torch.Tensor],
) -> None:
    """Gives each attention module its layer's pages and each linear layer its ``DecodeSite``. ``products``: groups with
    their joined weight and bias; ``offsets``: of each group int64 [K, S, 2], which a captured step needs as long as it
    lives."""
    for module in network.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(pool.keys) and hasattr(module, "config"):
            module.decode_keys, module.decode_values = pool.keys[layer], pool.values[layer]
    for (group, weight_OI, bias_O), offsets_KS2 in zip(products, offsets, strict=True):
        first, outs = 0, tuple(layer.site.out_features for layer in group)
        for layer in group:
            layer.decode_site = DecodeSite(
                weight_OI=weight_OI,
                bias_O=bias_O,
                outs=outs,
                offsets_KS2=offsets_KS2,
                first=first,
                last=layer is group[-1],
            )
            first += layer.site.out_features


def site_offsets(
    bank: AdapterBank, rank_classes: Sequence[int], sites: Sequence[int], device: torch.device
) -> torch.Tensor:
    layouts = [bank.layout(rank_class) for rank_class in rank_classes]
    offsets = [[(layout.a_offset[site], layout.b_offset[site]) for site in sites] for layout in layouts]
    return torch.tensor(offsets, dtype=torch.int64).view(-1, len(sites), 2).to(device)


def forward(layer: MultiLoraLinear, x: torch.Tensor, adapters: DecodeAdapters) -> torch.Tensor:
    """``MultiLoraLinear.forward`` in a decode step: [..., I] → [..., O]."""
    site, num_out = layer.decode_site, layer.site.out_features
    assert site is not None
    computed = adapters.computed
    if site.first == 0 or computed is None or computed[0] is not x:
        y_NO = linear(x.reshape(-1, x.shape[-1]), site, adapters)
        if len(site.outs) > 1:
            computed = adapters.computed = (x, y_NO)
    else:
        y_NO = computed[1]
    if site.last:
        adapters.computed = None
    if len(site.outs) > 1:
        y_NO = y_NO[:, site.first : site.first + num_out]
    return y_NO.unflatten(0, x.shape[:-1])


def linear(x_NI: torch.Tensor, site: DecodeSite, adapters: DecodeAdapters) -> torch.Tensor:
    """[N, ΣO]: the base's product and, in place, each tile's ``scale · (x Aᵀ) Bᵀ``."""
    if not adapters.classes:
        return nn.functional.linear(x_NI, site.weight_OI, site.bias_O)
    from descant.model import decode_lora  # Triton: only where it is used

    return decode_lora.linear(
        x_NI,
        site.weight_OI,
        site.bias_O,
        [entry.slab for entry in adapters.classes],
        site.offsets_KS2,
        [entry.tiles_C4 for entry in adapters.classes],
        [entry.rank_class for entry in adapters.classes],
        [entry.row for entry in adapters.classes],
        list(site.outs),
    )
