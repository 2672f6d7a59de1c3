"""The rows of the device, by rank bucket: compute copies, gradients, and the states of training adapters.

compute   [slots, row]  base dtype  a row for each adapter in use and for each published version on the device
gradient  [slots, row]  float32     a row for each adapter in use; scratch rows for requests that may still fail
state     [3, row]      float32     master weights and both moments; a tensor of its own, no product reads it
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from descant.adapters.layout import Layout, Layouts
from descant.adapters.offload import CopyEvent
from descant.adapters.slots import ComputeSlot, GradientSlot, RowMemory, RowRef
from descant.errors import ServerError
from descant.types import Lora


@dataclass(slots=True, kw_only=True)
class AdapterRows:
    """What a training adapter in use has. ``ready``: on CUDA, when its numbers are there, until that has been
    waited for."""

    compute: ComputeSlot
    gradient: GradientSlot
    state: torch.Tensor
    ready: CopyEvent | None = None


class Bucket:
    """All rows of one rank bucket."""

    def __init__(
        self,
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: RowMemory,
        generations: Iterator[int],
    ):
        self.layout = layout
        self.dtype = dtype
        self.compute = memory.slots(ComputeSlot, layout.row, dtype, device, fixed=True)
        self.gradient = memory.slots(GradientSlot, layout.row, torch.float32, device, fixed=False)
        self.state_bytes = 3 * 4 * layout.row
        self.num_adapters = 0
        """In these rows. Set by the code that fills and frees them."""
        self.lora: dict[ComputeSlot, Lora] = {}
        """Of every compute copy."""
        self.generation: dict[ComputeSlot, int] = {}
        self._device, self._memory, self._generations = device, memory, generations
        self._free_states: list[torch.Tensor] = []
        """Free states, kept since memory touched for the first time costs ten times as much as used memory."""

    @property
    def num_free_states(self) -> int:
        return len(self._free_states)

    @property
    def training_bytes(self) -> int:
        states = self.num_adapters + len(self._free_states)
        return states * self.state_bytes + self.num_adapters * self.compute.row_bytes + self.gradient.committed_bytes

    @property
    def bytes_per_adapter(self) -> int:
        """Of one in use."""
        return self.state_bytes + self.compute.row_bytes + self.gradient.row_bytes

    def load_bytes(self) -> int:
        """What one more adapter adds to ``training_bytes``."""
        state = 0 if self._free_states else self.state_bytes
        return state + self.compute.row_bytes + self.gradient.growth_bytes()

    @property
    def has_room(self) -> bool:
        """For one more adapter without taking memory."""
        return bool(self._free_states) and not self.gradient.growth_bytes() and not self.compute.growth_bytes()

    def allocate_state(self) -> tuple[torch.Tensor, bool]:
        """[3, row], and whether it may hold an earlier owner's numbers."""
        if self._free_states:
            return self._free_states.pop(), True
        return self._memory.zeros(3, self.layout.row, self._device), False

    def adopt_state(self, state: torch.Tensor) -> torch.Tensor:
        """One that an adapter has on the host replaces a free one, if there is any."""
        if self._free_states:
            self._free_states.pop()
        return state

    def free_state(self, state: torch.Tensor) -> None:
        self._free_states.append(state)

    def allocate_compute(self, lora: Lora) -> ComputeSlot:
        slot = self.compute.allocate(zero=False)
        self.lora[slot] = lora
        self.generation[slot] = next(self._generations)
        return slot

    def free_compute(self, slot: ComputeSlot, *, after: CopyEvent | None = None) -> None:
        """``after``: see ``Slots.free``."""
        del self.lora[slot], self.generation[slot]
        self.compute.free(slot, after=after)

    def reserve_gradient(self, room_bytes: int) -> None:
        """A free gradient row, and with ``room_bytes`` left, one for each adapter that fits them: a row more would
        take the room of one."""
        self.gradient.reserve(1 + max(0, room_bytes) // self.bytes_per_adapter)

    def trim(self, idle: Sequence[AdapterRows], *, rows: int = 0, states: int = 0) -> int:
        """Gives back what is free, but for ``rows`` gradient rows and ``states``. The rows of ``idle`` adapters may
        move. Of what counts, bytes."""
        freed = max(0, len(self._free_states) - states) * self.state_bytes
        del self._free_states[states:]
        moved = self.gradient.pack([adapter.gradient for adapter in idle], keep=rows)
        for adapter in idle:
            adapter.gradient = moved.get(adapter.gradient, adapter.gradient)
        # Compute copies do not count. Where they would have to move for it, or the device be waited for, they stay:
        # captured steps know where they lie, and all of those would be captured again.
        if not rows and (not self._memory.relocates or not self.compute.taken):
            self.compute.trim()
        return freed + self.gradient.trim(rows)


class Pool:
    """The buckets of one bank; each is made when its first row is asked for."""

    def __init__(self, layouts: Layouts, *, dtype: torch.dtype, device: torch.device, memory: RowMemory):
        self._layouts, self._dtype, self._device, self._memory = layouts, dtype, device, memory
        self._buckets: dict[int, Bucket] = {}
        self._generations = count()

    def bucket(self, rank_bucket: int) -> Bucket:
        bucket = self._buckets.get(rank_bucket)
        if bucket is None:
            bucket = self._buckets[rank_bucket] = Bucket(
                self._layouts.of_bucket(rank_bucket),
                dtype=self._dtype,
                device=self._device,
                memory=self._memory,
                generations=self._generations,
            )
        return bucket

    @property
    def buckets(self) -> Collection[Bucket]:
        return self._buckets.values()

    def training_bytes(self) -> int:
        """What training adapters, scratch rows and what is kept for them take."""
        return sum(bucket.training_bytes for bucket in self._buckets.values())

    def lora(self, row: RowRef) -> Lora:
        """Of the adapter or version that computes with this row. Raises ``ServerError`` for a free row."""
        bucket = self._buckets.get(row.rank_bucket)
        if bucket is None or row.slot not in bucket.lora:
            raise ServerError(f"row {row.slot} of rank bucket {row.rank_bucket} holds no adapter")
        return bucket.lora[row.slot]

    def generation(self, row: RowRef) -> int:
        """Another number each time the row is allocated. As long as it stays, so do a pinned version's weights. Raises
        ``ServerError`` for a free row."""
        self.lora(row)
        return self._buckets[row.rank_bucket].generation[row.slot]
