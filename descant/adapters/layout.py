"""Where the matrices of an adapter lie in a row.

An adapter of rank r lives in the smallest rank bucket ≥ r, its tail exactly zero. A row of a bucket holds A and B of
every site. The row stride is a multiple of 128 bytes (a stride off 16 bytes kills the CUDA context in grouped
products).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from descant.errors import ServerError, UserError
from descant.types import MAX_RANK, Lora

RANK_BUCKETS = (8, 16, 32, 64, 128, 256)

ALIGN_FEATURES = 8
"""Every A and B in a row begins after a multiple of so many features: of 64 elements in the smallest bucket, which are
128 bytes in bf16, 256 in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSite:
    """One linear layer that adapters may change. ``name`` as transformers has it (``model.layers.0.mlp.up_proj``)."""

    name: str
    group: Literal["attn", "mlp", "unembed"]
    in_features: int
    out_features: int


def rank_bucket_of(rank: int) -> int:
    """The smallest bucket that holds ``rank``. Raises ``UserError``."""
    if not 1 <= rank <= MAX_RANK:
        raise UserError(f"lora_config.rank is {rank}, expected 1 to {MAX_RANK}")
    return next(rank_bucket for rank_bucket in RANK_BUCKETS if rank <= rank_bucket)


def trains(lora: Lora, site: LoraSite) -> bool:
    match site.group:
        case "attn":
            return lora.train_attn
        case "mlp":
            return lora.train_mlp
        case "unembed":
            return lora.train_unembed


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each site's A [R, in] and B [out, R] (PEFT's orientation) lie in a row of rank bucket R, in elements: R
    times the features that lie before it, which are as many in all buckets."""

    rank_bucket: int
    a_offset: tuple[int, ...]
    b_offset: tuple[int, ...]
    row: int

    @staticmethod
    def of(sites: Sequence[LoraSite], rank_bucket: int) -> Layout:
        a_offset, b_offset, features = [], [], 0
        for site in sites:
            a_offset.append(rank_bucket * features)
            features += _aligned(site.in_features)
            b_offset.append(rank_bucket * features)
            features += _aligned(site.out_features)
        return Layout(
            rank_bucket=rank_bucket, a_offset=tuple(a_offset), b_offset=tuple(b_offset), row=rank_bucket * features
        )


class Layouts:
    """The layouts of one base model's rows, and what of them an adapter trains."""

    def __init__(self, sites: Sequence[LoraSite]):
        self.sites: tuple[LoraSite, ...] = tuple(sites)
        self._layouts: dict[int, Layout] = {}
        self._trained: dict[tuple[bool, bool, bool], tuple[bool, ...]] = {}

    def of_bucket(self, rank_bucket: int) -> Layout:
        layout = self._layouts.get(rank_bucket)
        if layout is None:
            if rank_bucket not in RANK_BUCKETS:
                raise ServerError(f"rank bucket {rank_bucket} is none of {RANK_BUCKETS}")
            layout = self._layouts[rank_bucket] = Layout.of(self.sites, rank_bucket)
        return layout

    def of(self, lora: Lora) -> Layout:
        return self.of_bucket(rank_bucket_of(lora.rank))

    def trained(self, lora: Lora) -> tuple[bool, ...]:
        """Which sites such an adapter trains; at the others its A and B are zero."""
        flags = (lora.train_attn, lora.train_mlp, lora.train_unembed)
        if flags not in self._trained:
            self._trained[flags] = tuple(trains(lora, site) for site in self.sites)
        return self._trained[flags]


def _aligned(features: int) -> int:
    return -(-features // ALIGN_FEATURES) * ALIGN_FEATURES
