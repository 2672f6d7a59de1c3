"""The one home of adapter weights: training adapters and published versions of one base model, on one device.

``adapter_bytes`` bounds what training takes on the device; beyond it adapters are offloaded, and loaded again when
a row is asked for (``residency``). What is pinned (an open request) stays, whatever the bound.

Views are handed out detached from the pool's autograd version counter (all views of one tensor share it: a write to one
adapter's row would break another's backward). No row is made under ``inference_mode``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from descant.adapters import peft
from descant.adapters.layout import Layout, Layouts, LoraSite, rank_bucket_of
from descant.adapters.offload import CopyStream, SpillDirectory
from descant.adapters.pool import Pool
from descant.adapters.residency import Residency
from descant.adapters.slots import GradientSlot, RowMemory, RowRef, memory_of
from descant.adapters.training import Adapter, TrainingAdapters
from descant.adapters.versions import PublishedVersions
from descant.errors import NotFound, ServerError, UserError
from descant.types import Lora, Version

ADAPTER_SHARE = 0.5
"""Of the device's free memory (on CPU: of the machine's), for training, by default."""


class AdapterBank:
    """An ``AdapterStore``, which says what its methods do; here stands what only the rank's own code calls."""

    def __init__(
        self,
        sites: Sequence[LoraSite],
        *,
        device: torch.device,
        dtype: torch.dtype,
        adapter_bytes: int | None = None,
        version_bytes: int = 2 << 30,
        host_bytes: int = 4 << 30,
        spill: SpillDirectory | None = None,
        memory: RowMemory | None = None,
        copies: CopyStream | None = None,
        version_copies: CopyStream | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """``adapter_bytes``: what training adapters in use take on the device (None: half of what is free there);
        beyond it the least recently used unpinned ones are offloaded to host memory. ``version_bytes``: published
        versions kept as rows; beyond it the coldest unpinned go to host memory. Beyond ``host_bytes`` the coldest
        of both go to files of ``spill``, which is this bank's alone. Everything comes back when it is asked for. What
        is pinned stays, whatever the limits; without ``spill`` so does what is in host memory. ``memory``, ``copies``,
        ``version_copies``: how rows come by memory, and those of adapters and of versions are copied (None: as is right
        for the device). ``clock``: seconds, for ``stats``."""
        self.device = device
        self.dtype = dtype
        self._layouts = Layouts(sites)
        copies = CopyStream(device) if copies is None else copies
        self._pool = Pool(
            self._layouts, dtype=dtype, device=device, memory=memory_of(device) if memory is None else memory
        )
        self.residency = Residency(host_bytes=host_bytes, spill=spill, copies=copies)
        self._training = TrainingAdapters(
            self._pool,
            self._layouts,
            residency=self.residency,
            copies=copies,
            max_bytes=_share_of_memory(device) if adapter_bytes is None else adapter_bytes,
            clock=clock,
        )
        self._versions = PublishedVersions(
            residency=self.residency,
            training=self._training,
            copies=CopyStream(device) if version_copies is None else version_copies,
            max_bytes=version_bytes,
            clock=clock,
        )

    @property
    def sites(self) -> tuple[LoraSite, ...]:
        return self._layouts.sites

    @property
    def adapter_bytes(self) -> int:
        """Limit of the training adapters on the device. May change; what is loaded or unpinned next keeps to it."""
        return self._training.budget.max_bytes

    @adapter_bytes.setter
    def adapter_bytes(self, max_bytes: int) -> None:
        self._training.budget.max_bytes = max_bytes

    @property
    def version_bytes(self) -> int:
        """Limit of the published versions on the device. May change, likewise."""
        return self._versions.budget.max_bytes

    @version_bytes.setter
    def version_bytes(self, max_bytes: int) -> None:
        self._versions.budget.max_bytes = max_bytes

    @property
    def generation(self) -> int:
        """Another number each time rows of training adapters were moved, or were found to have been moved beside the
        computation."""
        return self._training.generation

    # ---- training adapters
    def create(self, model_id: str, lora: Lora, *, zero_init: bool = False) -> Adapter:
        """Takes no time either: at rank 32 a 135M model's numbers take 30 ms to draw (``initialise``)."""
        if self._training.get(model_id) is not None:
            raise ServerError(f"model {model_id} has an adapter already")
        rank_bucket_of(lora.rank)
        if not any(self.trained(lora)):
            raise UserError(
                f"lora_config trains nothing on this base model: train_attn={lora.train_attn}, "
                f"train_mlp={lora.train_mlp}, train_unembed={lora.train_unembed}, and the base has only "
                f"{', '.join(sorted({site.group for site in self.sites})) or 'no'} layers"
            )
        return self._training.add(model_id, lora, zero_init=zero_init)

    def delete(self, model_id: str) -> None:
        self._training.remove(model_id)

    def __getitem__(self, model_id: str) -> Adapter:
        adapter = self._training.get(model_id)
        if adapter is None:
            raise NotFound(f"model {model_id} is not here")
        return adapter

    def row(self, model_id: str) -> RowRef:
        adapter = self[model_id]
        return RowRef(rank_bucket=adapter.rank_bucket, slot=adapter.compute_slot)

    def state(self, model_id: str) -> torch.Tensor:
        return self._training.load(self[model_id]).state.data

    def weights(self, model_id: str) -> torch.Tensor:
        return self.state(model_id)[0]

    def gradient(self, model_id: str) -> torch.Tensor:
        adapter = self[model_id]
        return self.gradient_row(adapter.rank_bucket, adapter.gradient_slot)

    def moments(self, model_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        _, moment1, moment2 = self.state(model_id).unbind()
        return moment1, moment2

    def refresh_compute(self, *model_ids: str) -> None:
        adapters = [self[model_id] for model_id in model_ids]
        rows = [self._training.load(adapter) for adapter in adapters]
        slabs = {rank_bucket: self.compute_slab(rank_bucket) for rank_bucket in {a.rank_bucket for a in adapters}}
        compute = [slabs[adapter.rank_bucket][own.compute] for adapter, own in zip(adapters, rows)]
        torch._foreach_copy_(compute, [own.state.data[0] for own in rows])

    # ---- residency of training adapters
    def pin_adapter(self, model_id: str) -> Adapter:
        adapter = self[model_id]
        self._training.pin(adapter)
        return adapter

    def unpin_adapter(self, model_id: str) -> None:
        adapter = self._training.get(model_id)
        if adapter is not None:
            self._training.unpin(adapter)

    @contextmanager
    def pinned_adapter(self, model_id: str) -> Iterator[Adapter]:
        adapter = self.pin_adapter(model_id)
        try:
            yield adapter
        finally:
            self.unpin_adapter(model_id)

    def is_resident(self, model_id: str) -> bool:
        """Whether it is in rows. False for one that is not here."""
        adapter = self._training.get(model_id)
        return adapter is not None and adapter.is_resident

    def bytes_in_use(self, model_id: str) -> tuple[int, int]:
        """What training this adapter takes of ``adapter_bytes`` with one request open, and with each one more.
        Zeros for one that is not here."""
        adapter = self._training.get(model_id)
        if adapter is None:
            return 0, 0
        gradient = adapter.bucket.gradient.row_bytes
        scratch = 0 if adapter.gradient_free else gradient
        return adapter.bucket.bytes_per_adapter + scratch, gradient

    def room_for(self, rank: int) -> int:
        """How many adapters of this rank ``adapter_bytes`` holds at once, with one request open of each."""
        return int(self.adapter_bytes // self._pool.bucket(rank_bucket_of(rank)).bytes_per_adapter)

    def load(self, model_id: str) -> None:
        """Into rows, as every row accessor does."""
        self._training.load(self[model_id])

    def prefetch(self, model_ids: Sequence[str], *, keep: Collection[str]) -> None:
        """``model_ids`` will be needed, in this order, once the turn about ``keep`` has run (which of them may go on
        then). Loads what it can beside that turn, within the limits, displacing neither those nor ``keep``: on CUDA
        into rows, everywhere from files into host memory; and writes what that will have to give up to files. Until the
        next call, rows that others displace are those needed last by it. Never fails: what goes wrong is raised when
        the rows are asked for."""
        self._training.prefetch(model_ids, keep=keep)

    # ---- gradient rows
    def allocate_scratch(self, rank_bucket: int) -> GradientSlot:
        return self._training.allocate_scratch(self._pool.bucket(rank_bucket))

    def free_scratch(self, rank_bucket: int, slot: GradientSlot) -> None:
        self._pool.bucket(rank_bucket).gradient.free(slot)

    def gradient_row(self, rank_bucket: int, slot: GradientSlot) -> torch.Tensor:
        return self.gradient_slab(rank_bucket)[slot]

    # ---- slabs, for the products
    def layout(self, rank_bucket: int) -> Layout:
        return self._layouts.of_bucket(rank_bucket)

    def compute_slab(self, rank_bucket: int) -> torch.Tensor:
        return self._pool.bucket(rank_bucket).compute.tensor

    def gradient_slab(self, rank_bucket: int) -> torch.Tensor:
        return self._pool.bucket(rank_bucket).gradient.tensor

    def lora(self, row: RowRef) -> Lora:
        return self._pool.lora(row)

    def row_generation(self, row: RowRef) -> int:
        """Another number each time the row is allocated. As long as it stays, so do a pinned version's weights. Raises
        ``ServerError`` for a free row."""
        return self._pool.generation(row)

    def trained(self, lora: Lora) -> tuple[bool, ...]:
        return self._layouts.trained(lora)

    # ---- published versions
    def publish(self, model_id: str, version: Version) -> None:
        adapter = self[model_id]
        if self._versions.is_known(version):
            return
        with self.pinned_adapter(model_id):
            row = self._versions.add(version, adapter.lora, adapter.bucket)
            row.copy_(adapter.bucket.compute.tensor[adapter.compute_slot])
        self._versions.make_room()

    def publish_tensors(self, version: Version, lora: Lora, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._versions.is_known(version):
            return
        layout = self._layouts.of(lora)
        weights = torch.zeros(layout.row, device=self.device)
        self.import_row(tensors, lora, weights)
        self._versions.add(version, lora, self._pool.bucket(layout.rank_bucket)).copy_(weights)
        self._versions.make_room()

    def has_version(self, version: Version) -> bool:
        return self._versions.has(version)

    def pin_version(self, version: Version) -> RowRef:
        return self._versions.pin(version)

    def unpin_version(self, version: Version) -> None:
        self._versions.unpin(version)

    def release(self, version: Version) -> None:
        self._versions.release(version)

    # ---- to and from PEFT's names
    def export(self, row: torch.Tensor, lora: Lora) -> dict[str, torch.Tensor]:
        return peft.export_row(row, self._layouts, lora)

    def views(self, row: torch.Tensor, lora: Lora) -> dict[str, torch.Tensor]:
        return peft.views(row, self._layouts, lora)

    def import_row(self, tensors: Mapping[str, torch.Tensor], lora: Lora, out: torch.Tensor) -> None:
        peft.import_row(tensors, self._layouts, lora, out)

    def stats(self) -> dict[str, float]:
        """Counts and bytes of now: training adapters and published versions in rows, on the host, on disk (an
        unused adapter is ``new``). Of ever: how many were offloaded, loaded (of adapters, ahead of need), and the
        seconds of waiting for that. What ``Residency.stats`` says."""
        training, adapters, versions = self._training, self._training.all, self._versions
        resident = sum(a.is_resident for a in adapters)
        host = [a.host.num_bytes for a in adapters if a.host is not None]
        disk = sum(a.file is not None and a.host is None for a in adapters)
        away = [version for version in versions.all if not version.is_resident]
        versions_host = [version.host.num_bytes for version in away if version.host is not None]
        versions_disk = [version.row_bytes for version in away if version.host is None]
        return {
            "adapters": len(adapters),
            "adapters_new": len(adapters) - resident - len(host) - disk,
            "adapters_resident": resident,
            "adapters_host": len(host),
            "adapters_disk": disk,
            "adapters_pinned": sum(a.pins > 0 for a in adapters),
            "adapters_resident_bytes": self._pool.training_bytes(),
            "adapters_host_bytes": sum(host),
            "adapters_limit_bytes": self.adapter_bytes,
            "adapter_offloads": training.num_offloads,
            "adapter_loads": training.num_loads,
            "adapter_prefetches": training.num_prefetches,
            "adapter_load_wait_seconds": training.load_wait_seconds,
            "compute_rows": sum(len(bucket.compute.taken) for bucket in self._pool.buckets),
            "compute_bytes": sum(bucket.compute.committed_bytes for bucket in self._pool.buckets),
            "scratch_rows": sum(len(bucket.gradient.taken) for bucket in self._pool.buckets) - resident,
            "versions_resident": len(versions.all) - len(away),
            "versions_pinned": sum(version.pins > 0 for version in versions.all),
            "versions_host": len(versions_host),
            "versions_disk": len(versions_disk),
            "versions_resident_bytes": versions.resident_bytes(),
            "versions_host_bytes": sum(versions_host),
            "versions_disk_bytes": sum(versions_disk),
            "versions_limit_bytes": versions.budget.max_bytes,
            "version_offloads": versions.num_offloads,
            "version_loads": versions.num_loads,
            "version_load_wait_seconds": versions.load_wait_seconds,
            **self.residency.stats(),
        }


def _share_of_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(ADAPTER_SHARE * free)
    return int(ADAPTER_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
