"""What trainer, sampler and checkpoints need of whatever keeps the adapters: ``AdapterBank`` here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from descant.adapters.layout import Layout
from descant.adapters.slots import GradientSlot, RowRef
from descant.adapters.training import Adapter
from descant.types import Lora, Version


class AdapterStore(Protocol):
    """Rows by model or by version. Whatever hands out a row of an adapter loads it: ``ServerError`` when there is no
    memory for it or its file cannot be read, ``NotFound`` for a model that is not here. Such a call, and the last
    ``unpin_adapter`` of a model, may move another that is not pinned: do not keep a row of one over a call about
    another. Views are taken anew in each pass: slabs may be reallocated between passes."""

    # ---- training adapters
    def create(self, model_id: str, lora: Lora, *, zero_init: bool = False) -> Adapter:
        """A new one: from its seed, or all zero. Takes no memory until a row is asked for. Raises ``UserError`` for a
        rank out of range or flags that train nothing, ``CannotStore`` where memory is full and so is the disk:
        existing adapters go on then."""
        ...

    def delete(self, model_id: str) -> None:
        """Forgets it wherever it is. Idempotent. Published versions stay."""
        ...

    def __getitem__(self, model_id: str) -> Adapter:
        """Raises ``NotFound``. Loads nothing."""
        ...

    def pin_adapter(self, model_id: str) -> Adapter:
        """Loads it, and its rows stay where they are until as many ``unpin_adapter``: for an open request, whose
        gradient row others know by number."""
        ...

    def unpin_adapter(self, model_id: str) -> None:
        """Nothing for a model that was deleted meanwhile."""
        ...

    def row(self, model_id: str) -> RowRef:
        """Of the adapter's compute copy."""
        ...

    def state(self, model_id: str) -> torch.Tensor:
        """float32 [3, row]: master weights and both moments, a view."""
        ...

    def weights(self, model_id: str) -> torch.Tensor:
        """float32 [row], a view; so are the next two."""
        ...

    def moments(self, model_id: str) -> tuple[torch.Tensor, torch.Tensor]: ...

    def gradient(self, model_id: str) -> torch.Tensor: ...

    def refresh_compute(self, *model_ids: str) -> None:
        """Copies master weights into the compute copy (after a step or a load). Several are pinned."""
        ...

    # ---- gradient rows
    def allocate_scratch(self, rank_bucket: int) -> GradientSlot:
        """A zeroed gradient row that belongs to no adapter."""
        ...

    def free_scratch(self, rank_bucket: int, slot: GradientSlot) -> None: ...

    def gradient_row(self, rank_bucket: int, slot: GradientSlot) -> torch.Tensor:
        """float32 [row], a view."""
        ...

    # ---- slabs, for the products
    def layout(self, rank_bucket: int) -> Layout: ...

    def compute_slab(self, rank_bucket: int) -> torch.Tensor:
        """[slots, row] in the base's dtype, detached. A slot is a ``ComputeSlot``."""
        ...

    def gradient_slab(self, rank_bucket: int) -> torch.Tensor:
        """float32 [slots, row], detached. A slot is a ``GradientSlot``."""
        ...

    def lora(self, row: RowRef) -> Lora:
        """Of the adapter or version that computes with this row. Raises ``ServerError`` for a free row."""
        ...

    def trained(self, lora: Lora) -> tuple[bool, ...]:
        """Which sites such an adapter trains; at the others its A and B are zero."""
        ...

    # ---- published versions
    def publish(self, model_id: str, version: Version) -> None:
        """Copies the adapter's compute copy into one of the version's own. Idempotent."""
        ...

    def publish_tensors(self, version: Version, lora: Lora, tensors: Mapping[str, torch.Tensor]) -> None:
        """Publishes from PEFT-named tensors (a checkpoint's ``adapter_model.safetensors``). Idempotent."""
        ...

    def has_version(self, version: Version) -> bool: ...

    def pin_version(self, version: Version) -> RowRef:
        """The version's row, resident until as many ``unpin_version``; loads it from host or disk. ``NotFound``."""
        ...

    def unpin_version(self, version: Version) -> None: ...

    def release(self, version: Version) -> None:
        """Forgets it, once it is unpinned. Idempotent."""
        ...

    # ---- to and from PEFT's names
    def export(self, row: torch.Tensor, lora: Lora) -> dict[str, torch.Tensor]:
        """``adapters.peft.export_row``."""
        ...

    def views(self, row: torch.Tensor, lora: Lora) -> dict[str, torch.Tensor]:
        """``adapters.peft.views``."""
        ...

    def import_row(self, tensors: Mapping[str, torch.Tensor], lora: Lora, out: torch.Tensor) -> None:
        """``adapters.peft.import_row``."""
        ...
