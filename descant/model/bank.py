"""The one home of adapter weights.

Per rank class (8, 16, 32, 64, 128, 256: an adapter of rank r lives in the smallest class ≥ r, its tail exactly zero)
there are separate tensors, one row an adapter:

    work      [slots, row]  base dtype  what trainer and sampler compute with; also one row a published version
    weights   [slots, row]  float32     the adapter's own
    moment1   [slots, row]  float32
    moment2   [slots, row]  float32
    gradient  [slots, row]  float32     plus scratch rows for requests that may still fail

``work`` slots and training slots are numbered apart: a published version has a work row only. The row stride is a
multiple of 128 bytes (a stride off 16 bytes kills the CUDA context in grouped products). ``Layout`` owns all offsets.
Views are handed out detached from the pool's autograd version counter (all views of one tensor share it: a write to
one adapter's slot would break another's backward). No row is made or written under ``inference_mode``.
Slabs grow by reallocation, only between passes: take views per pass, never keep them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from descant.model.passes import RowRef
from descant.types import LoraConfig, Version

RANK_CLASSES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSite:
    """One linear layer that adapters may change. ``name`` as in the transformers model (``model.layers.0.mlp.up_proj``)."""

    name: str
    group: Literal["attn", "mlp", "unembed"]
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each site's A [R, in] and B [out, R] (PEFT's orientation) lie in a row of rank class R, in elements."""

    rank_class: int
    a_offset: tuple[int, ...]
    b_offset: tuple[int, ...]
    row: int

    @staticmethod
    def of(sites: Sequence[LoraSite], rank_class: int) -> Layout:
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class Adapter:
    """A training adapter's entry. ``step`` counts optimiser steps. ``gradient_free``: its gradient row holds nothing."""

    model_id: str
    lora: LoraConfig
    rank_class: int
    work: int
    slot: int
    step: int = 0
    gradient_free: bool = True


class AdapterBank:
    def __init__(
        self,
        sites: Sequence[LoraSite],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_version_bytes: int = 2 << 30,
        max_host_bytes: int = 4 << 30,
        spill_dir: Path | None = None,
    ):
        """``max_version_bytes``: published versions kept as rows; beyond it the coldest unpinned go to host memory,
        beyond ``max_host_bytes`` to files under ``spill_dir``, and come back on ``pin``."""
        raise NotImplementedError

    sites: tuple[LoraSite, ...]

    # ---- training adapters
    def create(self, model_id: str, lora: LoraConfig) -> Adapter:
        """Zeroed row; A uniform in ±1/√in (Kaiming with a=√5, as PEFT) from ``lora.seed`` (None: from the model id),
        B zero; sites whose group is not trained keep A = B = 0 and so have a gradient of exactly 0."""
        raise NotImplementedError

    def delete(self, model_id: str) -> None:
        """Zeroes and frees. Idempotent. Published versions stay."""
        raise NotImplementedError

    def __getitem__(self, model_id: str) -> Adapter:
        """Raises ``NotFound``."""
        raise NotImplementedError

    def row(self, model_id: str) -> RowRef:
        """The adapter's working row."""
        raise NotImplementedError

    def weights(self, model_id: str) -> torch.Tensor:
        """float32 [row], a view; so are the next three."""
        raise NotImplementedError

    def gradient(self, model_id: str) -> torch.Tensor:
        raise NotImplementedError

    def moments(self, model_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def refresh_work(self, model_id: str) -> None:
        """Copies weights into the working row (after a step or a load)."""
        raise NotImplementedError

    # ---- gradient rows
    def take_scratch(self, rank_class: int) -> int:
        """A zeroed gradient slot that belongs to no adapter."""
        raise NotImplementedError

    def free_scratch(self, rank_class: int, slot: int) -> None:
        raise NotImplementedError

    def gradient_row(self, rank_class: int, slot: int) -> torch.Tensor:
        """float32 [row], a view."""
        raise NotImplementedError

    # ---- slabs, for the products
    def layout(self, rank_class: int) -> Layout:
        raise NotImplementedError

    def work_slab(self, rank_class: int) -> torch.Tensor:
        """[slots, row] in the base's dtype, detached."""
        raise NotImplementedError

    def gradient_slab(self, rank_class: int) -> torch.Tensor:
        """float32 [slots, row], detached."""
        raise NotImplementedError

    # ---- published versions
    def publish(self, model_id: str, version: Version) -> None:
        """Copies the adapter's working row into a row of the version's own. Idempotent."""
        raise NotImplementedError

    def publish_tensors(self, version: Version, lora: LoraConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        """Publishes from PEFT-named tensors (a checkpoint's ``adapter_model.safetensors``). Idempotent."""
        raise NotImplementedError

    def has_version(self, version: Version) -> bool:
        raise NotImplementedError

    def pin(self, version: Version) -> RowRef:
        """The version's row, resident until as many ``unpin``; brings it back from host or disk. ``NotFound``."""
        raise NotImplementedError

    def unpin(self, version: Version) -> None:
        raise NotImplementedError

    def release(self, version: Version) -> None:
        """Forgets it, once nobody has it pinned. Idempotent."""
        raise NotImplementedError

    # ---- to and from PEFT's names
    def export(self, row: torch.Tensor, lora: LoraConfig) -> dict[str, torch.Tensor]:
        """A row [row] of the class of ``lora.rank`` → ``base_model.model.{site}.lora_A.weight`` [r, in] and
        ``….lora_B.weight`` [out, r], of the true rank, trained groups only; contiguous copies. Works for weights and
        for moments alike."""
        raise NotImplementedError

    def import_row(self, tensors: Mapping[str, torch.Tensor], lora: LoraConfig, out: torch.Tensor) -> None:
        """The reverse, into ``out`` [row] (zero elsewhere). Missing, unexpected or misshapen names: ``UserError``."""
        raise NotImplementedError

    def stats(self) -> dict[str, int]:
        """Counts and bytes: adapters, work rows in use, scratch in use, versions resident / on host / on disk."""
        raise NotImplementedError
