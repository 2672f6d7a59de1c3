"""Slots of a slab [slots, row]: which are free, and how rows come by memory.

Three ways; a device has one for compute copies and one for gradients, chosen when a bank is made (``memory_of``):

    AddressRange   CPU              addresses for more rows than ever needed; a row takes memory when it is first
                                    written, and gives it back page by page: no row ever moves (4 to 8 adapters of 45 MB
                                    took seconds)
    MappedRange    CUDA, compute    addresses for as many rows as the device could hold; memory is mapped to them as
                                    slots are taken. The slab never moves and its shape never changes, so what was
                                    captured or compiled with it stays good
    Reallocation   CUDA, gradients  a slab takes memory for all its rows; to grow or to shrink, it becomes another
                                    tensor, and rows beyond the new end must move first

A slot of one slab says nothing about another, so each slab has a type of its own.
"""

from __future__ import annotations

import heapq
import logging
import mmap
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, NewType, Protocol, TypeVar

import numpy as np
import torch

from descant.adapters import cuda_memory
from descant.adapters.offload import CopyEvent

logger = logging.getLogger(__name__)

ComputeSlot = NewType("ComputeSlot", int)
"""A row of a compute slab: the copy that trainer and sampler multiply with."""
GradientSlot = NewType("GradientSlot", int)
"""A row of a gradient slab."""

Slot = TypeVar("Slot", bound=int)

ALIGN_BYTES = 128

FIRST_SLOTS = 4
MAX_FIRST_BYTES = 256 << 20
MAX_GROWTH_BYTES = 1 << 30
"""A slab that is reallocated starts with up to this many rows and bytes (one row at least: at rank 256 a row of a 135M
model is 365 MB), and doubles, by at most 1 GiB at a time."""

MAX_LEAVING = 8
"""Slots whose rows are still being copied out, while others are taken instead of them."""

MAP_BYTES = 64 << 20
"""Of a mapped range, at least so much takes memory at once."""

RESERVED_BYTES = 16 << 30
SLOTS_AT_ONCE = 32
"""Of a range of addresses, and how many of its slots are made visible when the last ones are taken."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RowRef:
    """A compute copy: the slab of this rank bucket (8, 16, 32 … 256), this slot."""

    rank_bucket: int
    slot: ComputeSlot


class Slots(ABC, Generic[Slot]):
    """Slots of one tensor [slots, row]: which are free, what they take. ``name`` makes a slot of a number."""

    def __init__(self, name: Callable[[int], Slot], row: int, dtype: torch.dtype):
        self._name, self._row, self._dtype = name, row, dtype
        self.row_bytes = row * dtype.itemsize
        self._end = 0
        self._free: list[Slot] = []
        self._dirty: set[Slot] = set()
        self._leaving: deque[tuple[CopyEvent, Slot]] = deque()
        self.taken: set[Slot] = set()
        """Those that were freed and are still being read (``free``) among them."""

    @property
    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """[slots, row], detached."""

    @property
    @abstractmethod
    def committed_bytes(self) -> int:
        """What it takes of the device."""

    @abstractmethod
    def growth_bytes(self) -> int:
        """What one more slot adds to that, at least."""

    @abstractmethod
    def pack(self, movable: Collection[Slot], *, keep: int = 0) -> dict[Slot, Slot]:
        """So that ``trim`` can give more back: moves what is in the last of these slots to the lowest free ones. Where
        to."""

    @abstractmethod
    def trim(self, keep: int = 0) -> int:
        """Gives memory of free slots back to the system, but for the ``keep`` lowest. Bytes."""

    @abstractmethod
    def _grow(self, most: int | None) -> None:
        """More free slots, one at least; ``most`` at most, where they take memory at once."""

    def reserve(self, most: int | None = None) -> None:
        """At least one free slot. ``most``: see ``_grow``. Raises ``MemoryError`` or torch's ``OutOfMemoryError``."""
        while self._leaving and self._leaving[0][0].query():
            self._release()
        if not self._free and len(self._leaving) >= MAX_LEAVING:
            self._leaving[0][0].wait()  # the device waits for about one copy, and the thread for nothing
            self._release()
        if self._free:
            return
        try:
            self._grow(most)
        except (MemoryError, torch.OutOfMemoryError):
            if not self._leaving:
                raise
            self._leaving[0][0].wait()
            self._release()

    def _release(self) -> None:
        _, slot = self._leaving.popleft()
        self.free(slot)

    def allocate(self, *, zero: bool) -> Slot:
        """A free slot, the lowest. Raises as ``reserve`` does."""
        self.reserve()
        slot = heapq.heappop(self._free)
        self.taken.add(slot)
        if zero and slot in self._dirty:
            self.tensor[slot].zero_()
        self._dirty.add(slot)
        return slot

    def free(self, slot: Slot, *, clean: bool = False, after: CopyEvent | None = None) -> None:
        """``clean``: it is all zero. ``after``: until that has passed the row is still being read, and the slot is not
        free; such events pass in the order in which they come."""
        if after is not None and not after.query():
            self._leaving.append((after, slot))
            return
        self.taken.remove(slot)
        if clean:
            self._dirty.discard(slot)
        heapq.heappush(self._free, slot)

    def _extend(self, end: int) -> None:
        """Slots up to ``end`` are free."""
        self._free.extend(map(self._name, range(self._end, end)))
        heapq.heapify(self._free)
        self._end = end


class RowMemory(Protocol):
    """How rows come by memory. Chosen once for a bank; everything in it is made of rows by it."""

    @property
    def relocates(self) -> bool:
        """Whether free rows give their memory back only by a wait for the device, or by moving others."""
        ...

    def slots(
        self, name: Callable[[int], Slot], row: int, dtype: torch.dtype, device: torch.device, *, fixed: bool
    ) -> Slots[Slot]:
        """``fixed``: others know where the slab lies; it should not move."""
        ...

    def zeros(self, rows: int, row: int, device: torch.device) -> torch.Tensor:
        """float32 [rows, row], zero, a tensor of its own. Raises ``MemoryError`` or torch's ``OutOfMemoryError``."""
        ...


def memory_of(device: torch.device) -> RowMemory:
    if device.type == "cpu":
        return AddressRange()
    try:
        return MappedRange(driver=cuda_memory.Driver(device))
    except OSError as error:
        logger.warning("slabs of weights move when they grow, and decode steps are captured anew then: %s", error)
        return Reallocation()


# ---- a range of addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRange:
    relocates = False

    def slots(
        self, name: Callable[[int], Slot], row: int, dtype: torch.dtype, device: torch.device, *, fixed: bool
    ) -> AddressRangeSlots[Slot]:
        return AddressRangeSlots(name, row, dtype)

    def zeros(self, rows: int, row: int, device: torch.device) -> torch.Tensor:
        # torch.zeros writes its zeros; numpy asks the system for pages that are zero when they are first touched.
        num_bytes = 4 * rows * row
        raw = np.zeros(num_bytes + ALIGN_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGN_BYTES
        with torch.inference_mode(False):
            return torch.from_numpy(raw[start : start + num_bytes]).view(torch.float32).view(rows, row)


class AddressRangeSlots(Slots[Slot]):
    """What was written takes memory."""

    def __init__(self, name: Callable[[int], Slot], row: int, dtype: torch.dtype):
        super().__init__(name, row, dtype)
        self._touched: set[Slot] = set()
        self._tensor, self._memory = self._range(RESERVED_BYTES)
        self._grow(None)

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor.data[: self._end]

    @property
    def committed_bytes(self) -> int:
        return self.row_bytes * len(self._touched)

    def growth_bytes(self) -> int:
        return 0 if self._free and self._free[0] in self._touched else self.row_bytes

    def allocate(self, *, zero: bool) -> Slot:
        slot = super().allocate(zero=zero)
        self._touched.add(slot)
        return slot

    def pack(self, movable: Collection[Slot], *, keep: int = 0) -> dict[Slot, Slot]:
        return {}  # any row's memory can go back, wherever it lies

    def trim(self, keep: int = 0) -> int:
        before = self.committed_bytes
        kept = heapq.nsmallest(keep, self._free)
        for slot in self._touched & set(self._free).difference(kept):
            start, end = slot * self.row_bytes, (slot + 1) * self.row_bytes
            start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start and hasattr(mmap, "MADV_DONTNEED"):
                self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)
            self._touched.remove(slot)
        return before - self.committed_bytes

    def _grow(self, most: int | None) -> None:
        if self._end == len(self._tensor):
            tensor, memory = self._range(2 * self._end * self.row_bytes)
            for slot in self.taken:
                tensor.data[slot].copy_(self._tensor.data[slot])
            self._tensor, self._memory = tensor, memory
            self._dirty &= self.taken
            self._touched &= self.taken
        self._extend(min(len(self._tensor), self._end + SLOTS_AT_ONCE))

    def _range(self, size: int) -> tuple[torch.Tensor, mmap.mmap]:
        """Addresses for so many bytes, or as many as there are; for one more row at least."""
        size = max(size, self.row_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)  # MAP_NORESERVE
        while True:
            slots = size // self.row_bytes
            try:
                memory = mmap.mmap(-1, slots * self.row_bytes, flags=flags)
                break
            except OSError:  # a system that promises no more than it has
                size //= 2
                if size < (self._end + 1) * self.row_bytes:
                    raise MemoryError(f"no addresses for {self._end + 1} rows of {self.row_bytes} bytes") from None
        # A tensor made under inference_mode could never be saved for a backward or written outside of it.
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=self._dtype).view(slots, self._row), memory


# ---- reallocation


class NewZeros(Protocol):
    """``torch.zeros``, or what says in a test that there is no memory."""

    def __call__(self, size: Sequence[int], /, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Reallocation:
    new_zeros: NewZeros = torch.zeros
    relocates = True

    def slots(
        self, name: Callable[[int], Slot], row: int, dtype: torch.dtype, device: torch.device, *, fixed: bool
    ) -> Slots[Slot]:
        return ReallocatedSlots(name, row, dtype, device, new_zeros=self.new_zeros)

    def zeros(self, rows: int, row: int, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):
            return self.new_zeros((rows, row), dtype=torch.float32, device=device)


class ReallocatedSlots(Slots[Slot]):
    """All slots there are take memory. Take views of ``tensor`` anew whenever a slot may have been allocated or
    freed."""

    def __init__(
        self,
        name: Callable[[int], Slot],
        row: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        new_zeros: NewZeros = torch.zeros,
    ):
        super().__init__(name, row, dtype)
        self._device, self._new_zeros = device, new_zeros
        self._tensor = torch.empty(0, row, dtype=dtype, device=device)

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor.data

    @property
    def committed_bytes(self) -> int:
        return self.row_bytes * len(self._tensor)

    def growth_bytes(self) -> int:
        return 0 if self._free else self.row_bytes

    def pack(self, movable: Collection[Slot], *, keep: int = 0) -> dict[Slot, Slot]:
        size = self._least(self.taken.difference(movable), keep)
        moved = {}
        for old in sorted(slot for slot in movable if slot >= size):
            new = self.allocate(zero=False)
            self._tensor.data[new].copy_(self._tensor.data[old])
            self.free(old)
            moved[old] = new
        return moved

    def trim(self, keep: int = 0) -> int:
        """Of slots beyond the last one taken."""
        before = self.committed_bytes
        size = self._least(self.taken, keep)
        if size < self._end:
            # Both tensors are there for a moment, and there may be no memory for that: then it stays as it is.
            with suppress(MemoryError, torch.OutOfMemoryError):
                self._reallocate(size)
                self._end = size
                self._free = sorted({self._name(slot) for slot in range(size)} - self.taken)
        return before - self.committed_bytes

    def _least(self, fixed: Collection[Slot], keep: int) -> int:
        """How many slots hold all that is taken and ``keep`` free ones, if only those of ``fixed`` stay in place."""
        return min(self._end, max(max(fixed, default=-1) + 1, len(self.taken) + keep))

    def _grow(self, most: int | None) -> None:
        first = min(FIRST_SLOTS, MAX_FIRST_BYTES // self.row_bytes)
        more = min(self._end or first, MAX_GROWTH_BYTES // self.row_bytes)
        end = self._end + max(1, more if most is None else min(more, most))
        self._reallocate(end)
        self._extend(end)

    def _reallocate(self, slots: int) -> None:
        with torch.inference_mode(False):  # as for addresses
            tensor = self._new_zeros((slots, self._row), dtype=self._dtype, device=self._device)
        for slot in self.taken:
            tensor.data[slot].copy_(self._tensor.data[slot])
        self._tensor = tensor
        self._dirty &= self.taken


# ---- mapped memory


class MappedAddresses(Protocol):
    """Addresses of a device, of which a part from the start on is mapped to memory (``cuda_memory.Range``)."""

    @property
    def tensor(self) -> torch.Tensor:
        """uint8, of all addresses, once the first are mapped. What is not must not be touched."""
        ...

    def map(self, start: int, end: int) -> None:
        """Bytes ``start:end``, multiples of ``Driver.granularity``, take memory. Raises torch's
        ``OutOfMemoryError``."""
        ...

    def unmap(self, start: int, end: int) -> None:
        """As they were mapped. Waits for the device."""
        ...


class MappingDriver(Protocol):
    """What a ``MappedRange`` is made with (``cuda_memory.Driver``)."""

    @property
    def granularity(self) -> int:
        """Bytes: what is mapped begins and ends at multiples."""
        ...

    @property
    def device_bytes(self) -> int:
        """Of its memory, whoever has it."""
        ...

    def reserve(self, num_bytes: int) -> MappedAddresses:
        """A multiple of ``granularity``, none of it mapped."""
        ...


@dataclass(frozen=True, kw_only=True)
class MappedRange(Reallocation):
    """What is fixed; all else as in ``Reallocation``."""

    driver: MappingDriver

    def slots(
        self, name: Callable[[int], Slot], row: int, dtype: torch.dtype, device: torch.device, *, fixed: bool
    ) -> Slots[Slot]:
        if fixed:
            return MappedSlots(name, row, dtype, self.driver)
        return super().slots(name, row, dtype, device, fixed=fixed)


class MappedSlots(Slots[Slot]):
    """What is mapped takes memory: all up to the last slot ever taken, until no slot is."""

    def __init__(self, name: Callable[[int], Slot], row: int, dtype: torch.dtype, driver: MappingDriver):
        super().__init__(name, row, dtype)
        self._unit = driver.granularity
        self._parts: list[tuple[int, int]] = []
        """Start and end, in bytes, of what was mapped at once."""
        self._most = max(1, driver.device_bytes // self.row_bytes)
        self._range = driver.reserve(self._whole(self._most * self.row_bytes))
        self._tensor = torch.empty(0, row, dtype=dtype)

    @property
    def tensor(self) -> torch.Tensor:
        """Once a slot was taken, always of all that there are addresses for. Those that were not must not be
        touched."""
        return self._tensor.data

    @property
    def committed_bytes(self) -> int:
        return self._parts[-1][1] if self._parts else 0

    def growth_bytes(self) -> int:
        return 0 if self._free else self.row_bytes

    def pack(self, movable: Collection[Slot], *, keep: int = 0) -> dict[Slot, Slot]:
        return {}

    def trim(self, keep: int = 0) -> int:
        """All or nothing: whatever is in a slot stays where it is."""
        before = self.committed_bytes
        if not self.taken and not keep:
            self._free.clear()
            self._end = 0
            while self._parts:
                self._range.unmap(*self._parts.pop())
        return before - self.committed_bytes

    def _grow(self, most: int | None) -> None:
        if self._end == self._most:
            raise MemoryError(f"no addresses for {self._end + 1} rows of {self.row_bytes} bytes")
        start, limit = self.committed_bytes, self._most * self.row_bytes
        end = self._whole(min(max((self._end + 1) * self.row_bytes, start + MAP_BYTES), limit))
        self._range.map(start, end)
        self._parts.append((start, end))
        if not len(self._tensor):
            with torch.inference_mode(False):  # as for addresses
                self._tensor = self._range.tensor[:limit].view(self._dtype).view(self._most, self._row)
        new = min(end, limit) // self.row_bytes
        self._dirty.update(map(self._name, range(self._end, new)))  # nobody has zeroed them
        self._extend(new)

    def _whole(self, num_bytes: int) -> int:
        return -(-num_bytes // self._unit) * self._unit
