"""Published versions: adapters frozen for the sampler, each with a compute copy of its own that never changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from descant.adapters.offload import VERSION_SUFFIX, HostCopy
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
        """On the computation's own stream."""
        return HostCopy(tensors={"row": self.row.to("cpu", copy=True)})

    def free_rows(self) -> None:
        assert self.slot is not None
        self.bucket.free_compute(self.slot)
        self.slot = None

    def mismatch(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        row, expected = tensors.get("row"), (self.bucket.layout.row,)
        if row is not None and row.shape == expected and row.dtype == self.bucket.dtype:
            return None
        got = "no row" if row is None else f"{row.dtype} {tuple(row.shape)}"
        return f"it holds {got}, expected {self.bucket.dtype} {expected}"


class PublishedVersions:
    """All of one bank."""

    def __init__(self, *, residency: Residency, training: TrainingAdapters, max_bytes: int):
        """``training``: of which a version may take memory where there is none."""
        self._residency, self._training = residency, training
        self._published: dict[Version, Published] = {}
        self.budget = DeviceBudget(max_bytes=max_bytes, used_bytes=self.resident_bytes, items=self._published.values)

    @property
    def all(self) -> Collection[Published]:
        return self._published.values()

    def resident_bytes(self) -> int:
        return sum(published.row_bytes for published in self._published.values() if published.is_resident)

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
        published = Published(version=version, lora=lora, bucket=bucket)
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
            self._load(published)
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

    def _load(self, published: Published) -> None:
        def fill(copy: HostCopy | None) -> None:
            assert copy is not None
            self._allocate(published)
            published.row.copy_(copy.tensors["row"])

        self._residency.load(published, make_room=lambda: self.make_room(published.row_bytes), fill=fill)

    def _allocate(self, published: Published) -> None:
        bucket = published.bucket
        published.slot = self._training.allocate(
            lambda: bucket.allocate_compute(published.lora), bucket, published.label
        )

    def _remove(self, published: Published) -> None:
        del self._published[published.version]
        if published.is_resident:
            published.free_rows()
        self._residency.drop_file(published)


def _label(version: Version) -> str:
    return f"version {version.number} of model {version.model_id}"
