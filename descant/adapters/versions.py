"""Published versions: adapters frozen for the sampler, each with a compute copy of its own that never changes.

On CUDA a version leaves its row on a side stream: neither the thread nor the computation waits for it. Its row is used
again once the copy is done (``Slots.free``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from descant.adapters.offload import VERSION_SUFFIX, CopyStream, HostCopy
from descant.adapters.pool import Bucket
from descant.adapters.residency import DeviceBudget, Offloadable, Residency
from descant.adapters.slots import ComputeSlot, RowRef
from descant.adapters.training import TrainingAdapters, digest
from descant.errors import NotFound, ServerError
from descant.types import Lora, Version


@dataclass(slots=True, kw_only=True, eq=False)
class Published(Offloadable):
    """``released``: no new pin; it goes with the last one."""

    mutable: ClassVar[bool] = False

    owner: PublishedVersions = field(repr=False)
    version: Version
    lora: Lora
    bucket: Bucket = field(repr=False)
    slot: ComputeSlot | None = None
    released: bool = False

    @property
    def row_bytes(self) -> int:
        return self.bucket.compute.row_bytes

    @property
    def row(self) -> torch.Tensor:
        """[row] of the compute slab, a view."""
        assert self.slot is not None
        return self.bucket.compute.tensor[self.slot]

    @property
    def label(self) -> str:
        return _label(self.version)

    @property
    def file_name(self) -> str:
        return f"{digest(self.version.model_id)}-{self.version.number}{VERSION_SUFFIX}"

    @property
    def is_resident(self) -> bool:
        return self.slot is not None

    def copy_out(self) -> HostCopy:
        return self.owner.copy_out(self)

    def free_rows(self) -> None:
        self.owner.free_rows(self)

    def mismatch(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        row, expected = tensors.get("row"), (self.bucket.layout.row,)
        if row is not None and row.shape == expected and row.dtype == self.bucket.dtype:
            return None
        got = "no row" if row is None else f"{row.dtype} {tuple(row.shape)}"
        return f"it holds {got}, expected {self.bucket.dtype} {expected}"


class PublishedVersions:
    """All of one bank."""

    def __init__(
        self,
        *,
        residency: Residency,
        training: TrainingAdapters,
        copies: CopyStream,
        max_bytes: int,
        clock: Callable[[], float],
    ):
        """``training``: of which a version may take memory where there is none. ``copies``: a stream of their own, so
        that training adapters that are loaded do not wait for versions that leave."""
        self._residency, self._training, self._copies, self._seconds = residency, training, copies, clock
        self._published: dict[Version, Published] = {}
        self._resident: dict[Published, None] = {}
        self._resident_bytes = 0
        self.budget = DeviceBudget(max_bytes=max_bytes, used_bytes=self.resident_bytes, items=self._resident.keys)
        self.num_offloads = self.num_loads = 0
        self.load_wait_seconds = 0.0

    @property
    def all(self) -> Collection[Published]:
        return self._published.values()

    def resident_bytes(self) -> int:
        return self._resident_bytes

    def is_known(self, version: Version) -> bool:
        """Also one that was released while pinned, which is then published again: a version's number never names other
        weights."""
        published = self._published.get(version)
        if published is not None:
            published.released = False
        return published is not None

    def has(self, version: Version) -> bool:
        published = self._published.get(version)
        return published is not None and not published.released

    def add(self, version: Version, lora: Lora, bucket: Bucket) -> torch.Tensor:
        """A new version. Its row, which holds an earlier owner's numbers until the caller has written it (and calls
        ``make_room``). Raises ``CannotStore`` where memory and disk are full."""
        published = Published(owner=self, version=version, lora=lora, bucket=bucket)
        if self.resident_bytes() + published.row_bytes > self.budget.max_bytes:
            self._residency.check_disk(published.row_bytes)
        self.make_room(published.row_bytes)
        self._allocate(published)
        self._published[version] = published
        self._residency.touch(published)
        return published.row

    def pin(self, version: Version) -> RowRef:
        published = self._published.get(version)
        if published is None or published.released:
            raise NotFound(f"{_label(version)} is not published here")
        if not published.is_resident:
            start = self._seconds()
            self._load(published)
            self.load_wait_seconds += self._seconds() - start
            self.num_loads += 1
        published.pins += 1
        self._residency.touch(published)
        self.make_room()
        assert published.slot is not None
        return RowRef(rank_bucket=published.bucket.layout.rank_bucket, slot=published.slot)

    def unpin(self, version: Version) -> None:
        published = self._published.get(version)
        if published is None or published.pins == 0:
            raise ServerError(f"{_label(version)} is unpinned but was not pinned")
        published.pins -= 1
        if published.pins == 0:
            if published.released:
                self._remove(published)
            self.make_room()

    def release(self, version: Version) -> None:
        published = self._published.get(version)
        if published is None:
            return
        published.released = True
        if published.pins == 0:
            self._remove(published)

    def make_room(self, extra_bytes: int = 0) -> None:
        """Offloads the coldest unpinned ones until the limits hold, with ``extra_bytes`` more to come."""
        self._residency.make_room(self.budget, lambda: extra_bytes)
        self._residency.trim_host()

    def copy_out(self, published: Published) -> HostCopy:
        row = published.row
        with self._copies.copying():
            host = self._copies.spare_host(len(row), dtype=row.dtype)
            host.copy_(row, non_blocking=self._copies.overlaps)
            self._copies.reads(row)
            ready = self._copies.record()
        return HostCopy(tensors={"row": host}, ready=ready)

    def free_rows(self, published: Published) -> None:
        self._free(published)
        self.num_offloads += 1

    def _free(self, published: Published) -> None:
        assert published.slot is not None
        published.bucket.free_compute(published.slot, after=None if published.host is None else published.host.ready)
        published.slot = None
        del self._resident[published]
        self._resident_bytes -= published.row_bytes

    def _load(self, published: Published) -> None:
        def fill(copy: HostCopy | None) -> None:
            assert copy is not None
            self._allocate(published)
            if copy.ready is not None:
                copy.ready.wait()
            published.row.copy_(copy.tensors["row"], non_blocking=self._copies.overlaps)

        def make_room() -> None:  # on the host the victim takes the place that this one leaves
            self._residency.make_room(self.budget, lambda: published.row_bytes)

        self._residency.load(published, make_room=make_room, fill=fill)

    def _allocate(self, published: Published) -> None:
        bucket = published.bucket
        published.slot = self._training.allocate(
            lambda: bucket.allocate_compute(published.lora), bucket, published.label
        )
        self._resident[published] = None
        self._resident_bytes += published.row_bytes

    def _remove(self, published: Published) -> None:
        del self._published[published.version]
        if published.is_resident:
            self._free(published)
        self._residency.forget(published)


def _label(version: Version) -> str:
    return f"version {version.number} of model {version.model_id}"
