"""Training adapters: what each is, and how its numbers come into rows and leave them.

In rows an adapter has a compute copy, a gradient row and a state (``pool``). One that is not in use needs none of them:
it is offloaded, and loaded again, bit for bit, when a row of it is asked for. A new one is nothing but its seed
until then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch

from descant.adapters.initialise import initialise
from descant.adapters.layout import Layouts
from descant.adapters.offload import ADAPTER_SUFFIX, CopyStream, HostCopy
from descant.adapters.packing import Packing
from descant.adapters.pool import AdapterRows, Bucket, Pool
from descant.adapters.residency import READ_AHEAD, DeviceBudget, Offloadable, Residency
from descant.adapters.slots import ComputeSlot, GradientSlot
from descant.errors import NotFound, ServerError
from descant.types import Lora

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class Adapter(Offloadable):
    """A training adapter. ``step`` counts optimiser steps; both moments are zero while it is 0. ``gradient_free``: its
    gradient row holds nothing. ``zero_init``: a new one is all zero, whatever its seed."""

    mutable: ClassVar[bool] = True

    owner: TrainingAdapters = field(repr=False)
    bucket: Bucket = field(repr=False)
    model_id: str
    lora: Lora
    step: int = 0
    gradient_free: bool = True
    zero_init: bool = False
    rows: AdapterRows | None = field(default=None, repr=False)

    @property
    def rank_bucket(self) -> int:
        return self.bucket.layout.rank_bucket

    @property
    def compute_slot(self) -> ComputeSlot:
        """Loads it; so does ``gradient_slot``. Raises as ``TrainingAdapters.load`` does."""
        return self.owner.load(self).compute

    @property
    def gradient_slot(self) -> GradientSlot:
        return self.owner.load(self).gradient

    @property
    def label(self) -> str:
        return f"the adapter of model {self.model_id}"

    @property
    def file_name(self) -> str:
        return digest(self.model_id) + ADAPTER_SUFFIX

    @property
    def is_resident(self) -> bool:
        return self.rows is not None

    def copy_out(self) -> HostCopy:
        return self.owner.copy_out(self)

    def free_rows(self) -> None:
        self.owner.free_rows(self)

    def mismatch(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        num_elements = self.owner.packing.num_elements(self.lora)
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        expected: dict[str, object] = {"state": (torch.float32, (3 if self.step else 1, num_elements))}
        if not self.gradient_free:
            expected["gradient"] = (torch.float32, (num_elements,))
        return None if shapes == expected else f"it holds {shapes}, expected {expected}"


class TrainingAdapters:
    """All of one bank."""

    def __init__(
        self,
        pool: Pool,
        layouts: Layouts,
        *,
        residency: Residency,
        copies: CopyStream,
        max_bytes: int,
        clock: Callable[[], float],
    ):
        self._pool, self._layouts, self._residency, self._copies = pool, layouts, residency, copies
        self._adapters: dict[str, Adapter] = {}
        self._seconds = clock
        self.packing = Packing(layouts, copies)
        self.budget = DeviceBudget(max_bytes=max_bytes, used_bytes=pool.training_bytes, items=self._adapters.values)
        self.generation = 0
        """Another number each time rows were moved, or were found to have been moved beside the computation."""
        self.num_offloads = self.num_loads = self.num_prefetches = 0
        self.load_wait_seconds = 0.0

    @property
    def all(self) -> Collection[Adapter]:
        return self._adapters.values()

    def get(self, model_id: str) -> Adapter | None:
        return self._adapters.get(model_id)

    def add(self, model_id: str, lora: Lora, *, zero_init: bool) -> Adapter:
        """Raises ``CannotStore`` where it would need a disk that has no room: existing adapters take the device and the
        host, and so will the unused ones."""
        bucket = self._pool.bucket(self._layouts.of(lora).rank_bucket)
        adapter = Adapter(
            owner=self, bucket=bucket, model_id=model_id, expected_as=model_id, lora=lora, zero_init=zero_init
        )
        adapters = [*self._adapters.values(), adapter]
        if sum(a.bucket.bytes_per_adapter for a in adapters) > self.budget.max_bytes:
            unused = [a for a in adapters if not a.is_resident and a.host is None and a.file is None]
            self._residency.check_disk(sum(3 * 4 * self.packing.num_elements(a.lora) for a in unused))
        self._adapters[model_id] = adapter
        return adapter

    def remove(self, model_id: str) -> None:
        adapter = self._adapters.pop(model_id, None)
        if adapter is None:
            return
        if adapter.rows is not None:
            self._copies.join()
            self._free(adapter, adapter.rows, clean=False)
            adapter.bucket.free_state(adapter.rows.state)
            adapter.rows = None
        self._residency.forget(adapter)

    # ---- loading
    def load(self, adapter: Adapter) -> AdapterRows:
        """Into rows, if it is not there, and the most recently used. Raises ``NotFound`` for one that was removed,
        ``ServerError`` when there is no memory for it or its file cannot be read."""
        rows = adapter.rows
        if rows is None:
            if self._adapters.get(adapter.model_id) is not adapter:
                raise NotFound(f"model {adapter.model_id} is not here")
            start = self._seconds()
            rows = self._load_now(adapter)
            self.load_wait_seconds += self._seconds() - start
        elif rows.ready is not None:
            rows.ready.wait()
            rows.ready = None
            self.generation += 1
        self._residency.touch(adapter)
        return rows

    def prefetch(self, model_ids: Sequence[str], *, keep: Collection[str]) -> None:
        """See ``AdapterBank.prefetch``."""
        self._residency.expect(model_ids, keep=keep)
        num_reading = 0
        for model_id in model_ids:
            adapter = self._adapters.get(model_id)
            if adapter is None or adapter.is_resident:
                continue
            if adapter.file is not None:
                num_reading += 1
                if num_reading <= READ_AHEAD:
                    self._residency.read_ahead(adapter)
            elif adapter.host is not None and self._copies.overlaps and not self._prefetch_now(adapter, keep):
                return

    def _load_now(self, adapter: Adapter) -> AdapterRows:
        self._residency.load(
            adapter,
            make_room=lambda: self.make_room(adapter.bucket.load_bytes, bucket=adapter.bucket, newcomer=adapter),
            fill=lambda copy: self.allocate(
                lambda: self._fill(adapter, copy), adapter.bucket, f"the rows of {adapter.label}", newcomer=adapter
            ),
        )
        assert adapter.rows is not None
        return adapter.rows

    def _prefetch_now(self, adapter: Adapter, keep: Collection[str]) -> bool:
        """Into rows that are free or that a colder adapter of its bucket gives up, beside the computation. False: no
        room."""
        bucket, copy = adapter.bucket, adapter.host
        assert copy is not None
        if not self._has_room(bucket):
            candidates = [a for a in self._adapters.values() if a.bucket is bucket and a.model_id not in keep]
            victim = self._residency.victim(candidates, lambda item: not self._residency.is_expected(item))
            if victim is None:
                return False
            assert isinstance(victim, Adapter)
            if self._residency.host_excess(self._packed_bytes(victim) - copy.num_bytes) > 0:
                return False
            self._residency.offload(victim, fits_host=True)
            if not self._has_room(bucket):
                return False
        with self._copies.copying():
            rows = self._fill(adapter, copy)
            rows.ready = self._copies.record()
        self._residency.loaded(adapter)
        self.num_prefetches += 1
        return True

    def _has_room(self, bucket: Bucket) -> bool:
        return bucket.has_room and bucket.load_bytes() <= self._bytes_left()

    def _bytes_left(self) -> int:
        return self.budget.max_bytes - self._pool.training_bytes()

    def _packed_bytes(self, adapter: Adapter) -> int:
        """On the host, as a copy."""
        num_rows = (3 if adapter.step else 1) + (0 if adapter.gradient_free else 1)
        return 4 * self.packing.num_elements(adapter.lora) * num_rows

    def _fill(self, adapter: Adapter, copy: HostCopy | None) -> AdapterRows:
        """Allocates rows and fills them; from its seed without ``copy``. There must be room."""
        self.generation += 1
        bucket = adapter.bucket
        # All that can run out of memory comes first.
        bucket.reserve_gradient(self._bytes_left() - bucket.load_bytes())
        bucket.compute.reserve()
        if copy is not None and copy.adoptable is not None:
            state, used = bucket.adopt_state(copy.adoptable), False
        else:
            state, used = bucket.allocate_state()
        gradient = bucket.gradient.allocate(zero=copy is None or "gradient" not in copy.tensors)
        compute = bucket.allocate_compute(adapter.lora)
        rows = AdapterRows(compute=compute, gradient=gradient, state=state)
        if copy is None:
            if used:
                state.zero_()
            if not adapter.zero_init:
                initialise(state.data[0], self._layouts, adapter.lora, adapter.model_id)
        else:
            if copy.adoptable is None:
                packed = copy.tensors["state"]
                for row, numbers in zip(state.data, packed):
                    self.packing.unpack(numbers, adapter.lora, row)
                if used:
                    state.data[len(packed) :].zero_()
            if "gradient" in copy.tensors:
                self.packing.unpack(copy.tensors["gradient"], adapter.lora, bucket.gradient.tensor[gradient])
            self.num_loads += 1
        bucket.compute.tensor[compute].copy_(state.data[0])
        bucket.num_adapters += 1
        adapter.rows = rows
        return rows

    # ---- offloading
    def copy_out(self, adapter: Adapter) -> HostCopy:
        """With its gradient if that holds anything."""
        rows, tensors = adapter.rows, {}
        assert rows is not None
        self.generation += 1
        adoptable = self.packing.is_dense(adapter.lora) and not self._copies.overlaps  # it is host memory already
        used = rows.state.data[: 3 if adapter.step else 1]  # moments that are zero are not kept
        with self._copies.copying():
            if not adapter.gradient_free:
                row = adapter.bucket.gradient.tensor[rows.gradient]
                tensors["gradient"] = self.packing.pack([row], adapter.lora)[0]
            tensors["state"] = used if adoptable else self.packing.pack(list(used), adapter.lora)
            ready = self._copies.record()
        return HostCopy(tensors=tensors, adoptable=rows.state if adoptable else None, ready=ready)

    def free_rows(self, adapter: Adapter) -> None:
        rows = adapter.rows
        assert rows is not None
        if adapter.host is None or adapter.host.adoptable is None:
            adapter.bucket.free_state(rows.state)
        self._free(adapter, rows, clean=adapter.gradient_free)
        adapter.rows = None
        self.num_offloads += 1

    def _free(self, adapter: Adapter, rows: AdapterRows, *, clean: bool) -> None:
        """Its compute copy and gradient row (``clean``: the latter is zero). The state is the caller's."""
        adapter.bucket.free_compute(rows.compute)
        adapter.bucket.gradient.free(rows.gradient, clean=clean)
        adapter.bucket.num_adapters -= 1

    # ---- room
    def make_room(
        self, needed: Callable[[], int], *, bucket: Bucket | None = None, newcomer: Adapter | None = None
    ) -> None:
        """Until ``needed()`` more bytes of ``bucket`` fit the budget: what is free goes first, but for what
        ``needed`` counts on, then adapters."""

        def reclaim() -> bool:
            self._copies.join()  # what is given back may be used at once
            self.generation += 1
            if self._trim_others(bucket):
                return True
            return bucket is not None and self._trim(bucket, rows=1, states=0 if newcomer is None else 1) > 0

        self._residency.make_room(self.budget, needed, reclaim=reclaim, newcomer=newcomer)

    def allocate(self, take: Callable[[], T], bucket: Bucket, what: str, *, newcomer: Adapter | None = None) -> T:
        """``take``s rows of ``bucket``; where there is no memory, that of unpinned adapters. Raises
        ``ServerError``."""
        return self._residency.allocate(
            take, what, budget=self.budget, reclaim=lambda: self._trim_others(bucket), newcomer=newcomer
        )

    def allocate_scratch(self, bucket: Bucket) -> GradientSlot:
        """A zeroed gradient row that belongs to no adapter."""
        self.make_room(bucket.gradient.growth_bytes, bucket=bucket)

        def take() -> GradientSlot:
            bucket.reserve_gradient(self._bytes_left() - bucket.gradient.growth_bytes())
            return bucket.gradient.allocate(zero=True)

        return self.allocate(take, bucket, "a gradient row")

    def _trim_others(self, bucket: Bucket | None) -> bool:
        """Of all buckets but this one. Whether any bytes were given back."""
        return any([self._trim(other) > 0 for other in self._pool.buckets if other is not bucket])

    def _trim(self, bucket: Bucket, *, rows: int = 0, states: int = 0) -> int:
        idle = [a.rows for a in self._adapters.values() if a.rows is not None and a.pins == 0 and a.bucket is bucket]
        return bucket.trim(idle, rows=rows, states=states)

    # ---- pins
    def pin(self, adapter: Adapter) -> None:
        self.load(adapter)
        adapter.pins += 1

    def unpin(self, adapter: Adapter) -> None:
        """It counts as used until now, on whichever rank (several move the same adapters, and each has computed other
        datums)."""
        if adapter.pins == 0:
            raise ServerError(f"model {adapter.model_id} is unpinned but was not pinned")
        adapter.pins -= 1
        self._residency.touch(adapter)
        if adapter.pins == 0:
            self.make_room(lambda: 0)


def digest(model_id: str) -> str:
    return hashlib.sha256(model_id.encode()).hexdigest()[:24]
