"""A row ⇄ tensors under PEFT's names, of the adapter's true rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from descant.adapters.layout import Layouts
from descant.errors import ServerError, UserError
from descant.types import Lora


def export_row(row: torch.Tensor, layouts: Layouts, lora: Lora) -> dict[str, torch.Tensor]:
    """A row [row] of the bucket of ``lora.rank`` → ``base_model.model.{site}.lora_A.weight`` [r, in] and
    ``….lora_B.weight`` [out, r], of the true rank, trained groups only; contiguous copies. Works for weights and for
    moments alike."""
    return {name: part.clone(memory_format=torch.contiguous_format) for name, part in views(row, layouts, lora).items()}


def views(row: torch.Tensor, layouts: Layouts, lora: Lora) -> dict[str, torch.Tensor]:
    """What ``export_row`` copies, as it lies in ``row``."""
    return dict(_parts(row, layouts, lora))


def import_row(tensors: Mapping[str, torch.Tensor], layouts: Layouts, lora: Lora, out: torch.Tensor) -> None:
    """The reverse, into ``out`` [row] (zero elsewhere). Missing, unexpected or misshapen names: ``UserError``, and
    ``out`` is as it was."""
    parts = dict(_parts(out, layouts, lora))
    if missing := sorted(parts.keys() - tensors.keys()):
        raise UserError(f"the checkpoint lacks {_some(missing)}, which an adapter of rank {lora.rank} has here")
    if unexpected := sorted(tensors.keys() - parts.keys()):
        raise UserError(f"the checkpoint has {_some(unexpected)}, which this base model or this adapter has not")
    for name, part in parts.items():
        if tensors[name].shape != part.shape:
            raise UserError(
                f"the checkpoint's {name} has shape {tuple(tensors[name].shape)}, expected {tuple(part.shape)}"
            )
    out.zero_()
    for name, part in parts.items():
        part.copy_(tensors[name])


def _parts(row: torch.Tensor, layouts: Layouts, lora: Lora) -> list[tuple[str, torch.Tensor]]:
    """Views of ``row`` of the adapter's true rank, under PEFT's names."""
    layout = layouts.of(lora)
    rank_bucket = layout.rank_bucket
    if row.shape != (layout.row,):
        raise ServerError(f"a row of rank bucket {rank_bucket} has shape ({layout.row},), got {tuple(row.shape)}")
    parts, start = [], row.storage_offset()
    for site, a, b, trains in zip(layouts.sites, layout.a_offset, layout.b_offset, layouts.trained(lora), strict=True):
        if not trains:
            continue
        prefix = f"base_model.model.{site.name}"
        # Of A [R, in] the first rows, of B [out, R] the first columns.
        a_rI = row.as_strided((lora.rank, site.in_features), (site.in_features, 1), start + a)
        b_Or = row.as_strided((site.out_features, lora.rank), (rank_bucket, 1), start + b)
        parts.append((f"{prefix}.lora_A.weight", a_rI))
        parts.append((f"{prefix}.lora_B.weight", b_Or))
    return parts


def _some(names: Collection[str]) -> str:
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
