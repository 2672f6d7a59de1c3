"""The one home of adapter weights.

A training adapter that is in use has, in the rank class it belongs to (8, 16, 32, 64, 128, 256: an adapter of rank r
lives in the smallest class ≥ r, its tail exactly zero):

    work      [slots, row]  base dtype  a row of this: trainer and sampler compute with it; so do published versions
    gradient  [slots, row]  float32     a row of this, ``Adapter.slot``; scratch rows for requests that may still fail
    state     [3, row]      float32     weights and both moments; a tensor of its own, no product reads it

One that is not in use needs none of them: it is parked in host memory, then in a file, and comes back by itself, bit
for bit, when somebody asks for a row of it. A new one is nothing but its seed until then. ``max_adapter_bytes`` bounds
what training takes on the device; what is held (``hold``: an open request) stays, whatever the bound.

The row stride is a multiple of 128 bytes (a stride off 16 bytes kills the CUDA context in grouped products). ``Layout``
owns all offsets. Views are handed out detached from the pool's autograd version counter (all views of one tensor share
it: a write to one adapter's slot would break another's backward). No row is made under ``inference_mode``.
On CUDA slabs grow and shrink by reallocation, only between passes: take views per pass, never keep them. Any call that
may bring an adapter back, and the last ``let_go`` of one, may move another that is not held: do not keep a row of one
over a call about another.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch

from descant.errors import NotFound, ServerError, UserError
from descant.model.passes import RowRef
from descant.model.tiers import ADAPTER_SUFFIX, VERSION_SUFFIX, Mover, Parked, SpillDirectory
from descant.seeds import derive_seed
from descant.types import MAX_RANK, LoraConfig, Version

logger = logging.getLogger(__name__)

T = TypeVar("T")

RANK_CLASSES = (8, 16, 32, 64, 128, 256)

ALIGN_FEATURES = 8
"""Every A and B in a row begins after a multiple of so many features: of 64 elements in the smallest class, which are
128 bytes in bf16, 256 in fp32."""
ALIGN_BYTES = 128

FIRST_SLOTS = 4
MAX_FIRST_BYTES = 256 << 20
MAX_GROWTH_BYTES = 1 << 30
"""On CUDA a slab starts with up to this many rows and bytes (one row at least: at rank 256 a row of a 135M model is 365
MB), and doubles, by at most 1 GiB at a time."""

RESERVED_BYTES = 16 << 30
SLOTS_AT_ONCE = 32
"""On CPU a slab is a range of addresses: memory is taken when a row is first written, and given back page by page, so
that it never has to be copied to grow (4 to 8 adapters of 45 MB took seconds)."""

ADAPTER_SHARE = 0.5
"""Of the device's free memory (on CPU: of the machine's), for training, unless told otherwise."""

DENSE = 0.9
"""A parked row that the true rank fills to this share is kept whole: one copy instead of hundreds."""

READ_AHEAD = 2

WRITE_AHEAD = 8
"""One part in so many of the host's limit is kept free, or written already and free at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSite:
    """One linear layer that adapters may change. ``name`` as transformers has it (``model.layers.0.mlp.up_proj``)."""

    name: str
    group: Literal["attn", "mlp", "unembed"]
    in_features: int
    out_features: int


def rank_class_of(rank: int) -> int:
    """The smallest class that holds ``rank``. Raises ``UserError``."""
    if not 1 <= rank <= MAX_RANK:
        raise UserError(f"lora_config.rank is {rank}, expected 1 to {MAX_RANK}")
    return next(rank_class for rank_class in RANK_CLASSES if rank <= rank_class)


def trains(lora: LoraConfig, site: LoraSite) -> bool:
    match site.group:
        case "attn":
            return lora.train_attn
        case "mlp":
            return lora.train_mlp
        case "unembed":
            return lora.train_unembed


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each site's A [R, in] and B [out, R] (PEFT's orientation) lie in a row of rank class R, in elements: R
    times the features that lie before it, which are as many in all classes."""

    rank_class: int
    a_offset: tuple[int, ...]
    b_offset: tuple[int, ...]
    row: int

    @staticmethod
    def of(sites: Sequence[LoraSite], rank_class: int) -> Layout:
        a_offset, b_offset, features = [], [], 0
        for site in sites:
            a_offset.append(rank_class * features)
            features += _aligned(site.in_features)
            b_offset.append(rank_class * features)
            features += _aligned(site.out_features)
        return Layout(
            rank_class=rank_class, a_offset=tuple(a_offset), b_offset=tuple(b_offset), row=rank_class * features
        )


def _aligned(features: int) -> int:
    return -(-features // ALIGN_FEATURES) * ALIGN_FEATURES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """``lines`` of ``size`` elements, ``stride`` apart, from ``start`` of a row."""

    start: int
    lines: int
    size: int
    stride: int

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """[lines, size], a view."""
        return row.as_strided((self.lines, self.size), (self.stride, 1), row.storage_offset() + self.start)


@dataclass(slots=True, kw_only=True)
class _Place:
    """``moved``: on CUDA, when the rows are there, while nobody has waited for that."""

    work: int
    slot: int
    state: torch.Tensor
    moved: torch.cuda.Event | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Adapter:
    """A training adapter's entry. ``step`` counts optimiser steps; both moments are zero while it is 0.
    ``gradient_free``: its gradient row holds nothing.

    It is in one place: in rows (``place``), in host memory (``parked``), in a file, or, new, nowhere: its seed says
    what it is (``blank``: zeros instead). ``writing``: what is in host memory is being written, or was, to a file that
    counts once the memory is needed.
    """

    bank: AdapterBank = field(repr=False)
    model_id: str
    lora: LoraConfig
    rank_class: int
    step: int = 0
    gradient_free: bool = True
    place: _Place | None = field(default=None, repr=False)
    parked: Parked | None = field(default=None, repr=False)
    file: Path | None = None
    reading: Future[dict[str, torch.Tensor]] | None = field(default=None, repr=False)
    writing: Future[Path] | None = field(default=None, repr=False)
    blank: bool = False
    holds: int = 0
    used: int = 0

    @property
    def work(self) -> int:
        """Its row of the work slab. Brings it back; so does ``slot``."""
        return self.bank.bring(self).work

    @property
    def slot(self) -> int:
        """Its row of the gradient slab."""
        return self.bank.bring(self).slot


class _Rows:
    """Slots of one tensor [slots, row]: who is free, what they take."""

    def __init__(self, row: int, dtype: torch.dtype, device: torch.device):
        self._row, self._dtype, self._device = row, dtype, device
        self._lazy = _takes_memory_when_written(device)
        self.row_bytes = row * dtype.itemsize
        self._memory: mmap.mmap | None = None
        self._tensor = torch.empty(0, row, dtype=dtype, device=device)
        self._end = 0
        self._free: list[int] = []
        self._dirty: set[int] = set()
        self._touched: set[int] = set()
        self.taken: set[int] = set()
        if self._lazy:
            self._grow(0)

    @property
    def tensor(self) -> torch.Tensor:
        """[slots, row], detached."""
        return self._tensor.data[: self._end]

    @property
    def committed_bytes(self) -> int:
        """What it takes of the device: on CPU rows that were written, on CUDA all there are."""
        return self.row_bytes * (len(self._touched) if self._lazy else len(self._tensor))

    def growth_bytes(self) -> int:
        """What taking one more slot adds to that, at least."""
        if self._lazy:
            return 0 if self._free and self._free[0] in self._touched else self.row_bytes
        return 0 if self._free else self.row_bytes

    def reserve(self, most: int | None = None) -> None:
        """At least one free slot; where there is none, on CUDA at most ``most`` more."""
        if not self._free:
            self._grow(most)

    def take(self, *, zero: bool) -> int:
        """A free slot, the lowest."""
        self.reserve()
        slot = heapq.heappop(self._free)
        self.taken.add(slot)
        self._touched.add(slot)
        if zero and slot in self._dirty:
            self._tensor.data[slot].zero_()
        self._dirty.add(slot)
        return slot

    def give(self, slot: int, *, clean: bool = False) -> None:
        """``clean``: it is all zero."""
        self.taken.remove(slot)
        if clean:
            self._dirty.discard(slot)
        heapq.heappush(self._free, slot)

    def pack(self, movable: Collection[int], *, keep: int = 0) -> dict[int, int]:
        """On CUDA, so that ``trim`` can give more back: moves what is in the last of these slots to the lowest free
        ones. Where to."""
        if self._lazy:
            return {}
        size = self._least(self.taken.difference(movable), keep)
        moved = {}
        for old in sorted(slot for slot in movable if slot >= size):
            new = self.take(zero=False)
            self._tensor.data[new].copy_(self._tensor.data[old])
            self.give(old)
            moved[old] = new
        return moved

    def trim(self, keep: int = 0) -> int:
        """Gives memory of free slots back to the system, but for the ``keep`` lowest; on CUDA that of those beyond the
        last slot taken. Bytes."""
        before = self.committed_bytes
        if not self._lazy:
            size = self._least(self.taken, keep)
            if size < self._end:
                # Both tensors are there for a moment, and there may be no memory for that: then it stays as it is.
                with suppress(MemoryError, torch.OutOfMemoryError):
                    self._move(self._zeros(size))
                    self._end = size
                    self._free = sorted(set(range(size)) - self.taken)
            return before - self.committed_bytes
        kept = heapq.nsmallest(keep, self._free)
        for slot in self._touched & set(self._free).difference(kept):
            start, end = slot * self.row_bytes, (slot + 1) * self.row_bytes
            start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if self._memory is not None and end > start and hasattr(mmap, "MADV_DONTNEED"):
                self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)
            self._touched.remove(slot)
        return before - self.committed_bytes

    def _least(self, fixed: Collection[int], keep: int) -> int:
        """How many slots hold all that is taken and ``keep`` free ones, if only those of ``fixed`` stay in place."""
        return min(self._end, max(max(fixed, default=-1) + 1, len(self.taken) + keep))

    def _grow(self, most: int | None) -> None:
        old = self._end
        if old == len(self._tensor):
            self._move(self._reserve(old) if self._lazy else self._allocate(old, most))
        self._end = min(len(self._tensor), old + SLOTS_AT_ONCE) if self._lazy else len(self._tensor)
        self._free.extend(range(old, self._end))
        heapq.heapify(self._free)

    def _move(self, tensor: torch.Tensor) -> None:
        """To another tensor, which is zero."""
        for slot in self.taken:
            tensor.data[slot].copy_(self._tensor.data[slot])
        self._tensor = tensor
        self._dirty &= self.taken
        self._touched &= self.taken

    def _allocate(self, old: int, most: int | None) -> torch.Tensor:
        first = min(FIRST_SLOTS, MAX_FIRST_BYTES // self.row_bytes)
        more = min(old or first, MAX_GROWTH_BYTES // self.row_bytes)
        return self._zeros(old + max(1, more if most is None else min(more, most)))

    def _zeros(self, slots: int) -> torch.Tensor:
        # A tensor made under inference_mode could never be saved for a backward or written outside of it.
        with torch.inference_mode(False):
            return torch.zeros(slots, self._row, dtype=self._dtype, device=self._device)

    def _reserve(self, old: int) -> torch.Tensor:
        """Addresses for more slots than ever needed, or for twice as many as there are."""
        size = max(2 * old * self.row_bytes if old else RESERVED_BYTES, self.row_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)  # MAP_NORESERVE
        while True:
            slots = size // self.row_bytes
            try:
                self._memory = mmap.mmap(-1, slots * self.row_bytes, flags=flags)
                break
            except OSError:  # a system that promises no more than it has
                size //= 2
                if size < (old + 1) * self.row_bytes:
                    raise MemoryError(f"no addresses for {old + 1} rows of {self.row_bytes} bytes") from None
        with torch.inference_mode(False):
            return torch.frombuffer(self._memory, dtype=self._dtype).view(slots, self._row)


_STAMPS = itertools.count()


class _Slab:
    """All rows of one rank class, and the states of its adapters."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.work = _Rows(layout.row, dtype, device)
        self.gradient = _Rows(layout.row, torch.float32, device)
        self.state_bytes = 3 * 4 * layout.row
        self.num_placed = 0
        self.lora: dict[int, LoraConfig] = {}
        """Of every work row in use."""
        self.stamps: dict[int, int] = {}
        self._device = device
        self._spare: list[torch.Tensor] = []
        """States nobody uses, kept since memory touched for the first time costs ten times as much as used memory."""

    @property
    def training_bytes(self) -> int:
        states = self.num_placed + len(self._spare)
        return states * self.state_bytes + self.num_placed * self.work.row_bytes + self.gradient.committed_bytes

    @property
    def adapter_bytes(self) -> int:
        """Of one in use."""
        return self.state_bytes + self.work.row_bytes + self.gradient.row_bytes

    def placing_bytes(self) -> int:
        """What one more adapter adds to that."""
        state = 0 if self._spare else self.state_bytes
        return state + self.work.row_bytes + self.gradient.growth_bytes()

    @property
    def has_room(self) -> bool:
        """For one more adapter without taking memory."""
        return bool(self._spare) and not self.gradient.growth_bytes() and not self.work.growth_bytes()

    def take_state(self) -> tuple[torch.Tensor, bool]:
        """[3, row], and whether it may hold an earlier owner's numbers."""
        if self._spare:
            return self._spare.pop(), True
        with torch.inference_mode(False):
            if not _takes_memory_when_written(self._device):
                return torch.zeros(3, self.layout.row, device=self._device), False
            # torch.zeros writes its zeros; numpy asks the system for pages that are zero when they are first touched.
            raw = np.zeros(self.state_bytes + ALIGN_BYTES, np.uint8)
            start = -raw.ctypes.data % ALIGN_BYTES
            state = torch.from_numpy(raw[start : start + self.state_bytes]).view(torch.float32)
            return state.view(3, self.layout.row), False

    def adopt(self, state: torch.Tensor) -> torch.Tensor:
        """One that an adapter brings along takes the place of a spare one, if there is any."""
        if self._spare:
            self._spare.pop()
        return state

    def give_state(self, state: torch.Tensor) -> None:
        self._spare.append(state)

    def take_work(self, lora: LoraConfig) -> int:
        slot = self.work.take(zero=False)
        self.lora[slot] = lora
        self.stamps[slot] = next(_STAMPS)
        return slot

    def give_work(self, slot: int) -> None:
        del self.lora[slot], self.stamps[slot]
        self.work.give(slot)

    def reserve_gradient(self, spare_bytes: int) -> None:
        """A free gradient row, and with ``spare_bytes`` to be had besides one for each adapter that these will hold: a
        row more would take the room of one."""
        self.gradient.reserve(1 + max(0, spare_bytes) // self.adapter_bytes)

    def trim(self, idle: Sequence[_Place], *, rows: int = 0, states: int = 0) -> int:
        """Gives back what nobody uses, but for ``rows`` gradient rows and ``states``. Who is ``idle`` may move. Of
        what counts, bytes."""
        freed = max(0, len(self._spare) - states) * self.state_bytes
        del self._spare[states:]
        moved = self.gradient.pack([place.slot for place in idle], keep=rows)
        for place in idle:
            place.slot = moved.get(place.slot, place.slot)
        # Working rows do not count. Where they would have to move for it, they stay: captured steps know where they
        # lie, and all of those would be captured again.
        if not rows and (_takes_memory_when_written(self._device) or not self.work.taken):
            self.work.trim()
        return freed + self.gradient.trim(rows)


@dataclass(slots=True, kw_only=True)
class _Published:
    """A version is in at least one of three places: a work row, a host tensor [row], a file. None of them changes."""

    version: Version
    lora: LoraConfig
    rank_class: int
    slot: int | None = None
    host: torch.Tensor | None = None
    file: Path | None = None
    pins: int = 0
    released: bool = False
    used: int = 0


class AdapterBank:
    def __init__(
        self,
        sites: Sequence[LoraSite],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_adapter_bytes: int | None = None,
        max_version_bytes: int = 2 << 30,
        max_host_bytes: int = 4 << 30,
        spill_dir: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """``max_adapter_bytes``: what training adapters in use take on the device (None: half of what is free there);
        beyond it the longest unused that nobody holds are parked in host memory. ``max_version_bytes``: published
        versions kept as rows; beyond it the coldest unpinned go to host memory. Beyond ``max_host_bytes`` the coldest
        of both go to files under ``spill_dir``. Everything comes back when it is asked for. What is held or pinned
        stays, whatever the limits; without ``spill_dir`` so does what is in host memory. The directory is this bank's
        alone: files that an earlier process left there are removed. ``clock``: seconds, for ``stats``."""
        self.sites: tuple[LoraSite, ...] = tuple(sites)
        self.device = device
        self.dtype = dtype
        self.max_adapter_bytes = _share_of_memory(device) if max_adapter_bytes is None else max_adapter_bytes
        self._max_version_bytes = max_version_bytes
        self._max_host_bytes = max_host_bytes
        self._spill = None if spill_dir is None else SpillDirectory(spill_dir)
        self._mover = Mover(device)
        self._slabs: dict[int, _Slab] = {}
        self._adapters: dict[str, Adapter] = {}
        self._published: dict[Version, _Published] = {}
        self._trained: dict[tuple[bool, bool, bool], tuple[bool, ...]] = {}
        self._spans: dict[LoraConfig, tuple[_Span, ...]] = {}
        self._wanted: dict[str, int] = {}
        """Who will be asked for after the turn that runs, and when: 0 is first."""
        self._keep: frozenset[str] = frozenset()
        self._turn_began = 0
        """By ``_clock``."""
        self._clock = 0
        self._seconds = clock
        self.moves = 0
        """How often rows of training adapters were moved, or were found to have been moved beside the computation."""
        self._evictions = self._loads = self._read_ahead = 0
        self._wait_ms = 0.0

    # ---- training adapters
    def create(self, model_id: str, lora: LoraConfig, *, blank: bool = False) -> Adapter:
        """A uniform in ±1/√in (Kaiming with a=√5, as PEFT) from ``lora.seed`` (None: from the model id), B zero; sites
        whose group is not trained keep A = B = 0 and so have a gradient of exactly 0. ``blank``: all zero.

        Every site draws from a generator of its own, so neither the flags nor the rank class of an adapter move
        another site's numbers. Takes no memory until a row is asked for, nor time: at rank 32 a 135M model's numbers
        take 30 ms to draw. Raises ``UserError`` for a rank out of range or flags that train nothing."""
        if model_id in self._adapters:
            raise ServerError(f"model {model_id} has an adapter already")
        rank_class = rank_class_of(lora.rank)
        if not any(self.trained(lora)):
            raise UserError(
                f"lora_config trains nothing on this base model: train_attn={lora.train_attn}, "
                f"train_mlp={lora.train_mlp}, train_unembed={lora.train_unembed}, and the base has only "
                f"{', '.join(sorted({site.group for site in self.sites})) or 'no'} layers"
            )
        adapter = Adapter(bank=self, model_id=model_id, lora=lora, rank_class=rank_class, blank=blank)
        self._adapters[model_id] = adapter
        return adapter

    def delete(self, model_id: str) -> None:
        """Forgets it wherever it is. Idempotent. Published versions stay."""
        adapter = self._adapters.pop(model_id, None)
        if adapter is None:
            return
        if adapter.place is not None:
            self._mover.settle()
            self._leave(adapter, adapter.place, clean=False)
            self._slab(adapter.rank_class).give_state(adapter.place.state)
            adapter.place = None
        adapter.parked = None
        self._drop_file(adapter)

    def __getitem__(self, model_id: str) -> Adapter:
        """Raises ``NotFound``."""
        try:
            return self._adapters[model_id]
        except KeyError:
            raise NotFound(f"model {model_id} is not here") from None

    def row(self, model_id: str) -> RowRef:
        """The adapter's working row. Like all that hands out a row, it brings the adapter back: ``ServerError`` when
        neither host nor disk can take what it would displace, or when its file cannot be read."""
        adapter = self[model_id]
        return RowRef(rank_class=adapter.rank_class, slot=adapter.work)

    def state(self, model_id: str) -> torch.Tensor:
        """float32 [3, row]: weights and both moments, a view."""
        return self.bring(self[model_id]).state.data

    def weights(self, model_id: str) -> torch.Tensor:
        """float32 [row], a view; so are the next three."""
        return self.state(model_id)[0]

    def gradient(self, model_id: str) -> torch.Tensor:
        adapter = self[model_id]
        return self.gradient_row(adapter.rank_class, adapter.slot)

    def moments(self, model_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        _, moment1, moment2 = self.state(model_id).unbind()
        return moment1, moment2

    def refresh_work(self, *model_ids: str) -> None:
        """Copies weights into the working row (after a step or a load). Several are held."""
        adapters = [self[model_id] for model_id in model_ids]
        places = [self.bring(adapter) for adapter in adapters]
        slabs = {rank_class: self.work_slab(rank_class) for rank_class in {a.rank_class for a in adapters}}
        work = [slabs[adapter.rank_class][place.work] for adapter, place in zip(adapters, places)]
        torch._foreach_copy_(work, [place.state.data[0] for place in places])

    # ---- residency
    def hold(self, model_id: str) -> Adapter:
        """Brings it back, and its rows stay where they are until as many ``let_go``: for an open request, whose
        gradient row others know by number. Raises ``NotFound``, and ``ServerError`` as ``row`` does."""
        adapter = self[model_id]
        self.bring(adapter)
        adapter.holds += 1
        return adapter

    def let_go(self, model_id: str) -> None:
        """It was used until now, whoever computed with it meanwhile (several ranks move the same adapters, and each has
        computed other datums). Nothing for a model that was deleted meanwhile."""
        adapter = self._adapters.get(model_id)
        if adapter is None:
            return
        if adapter.holds == 0:
            raise ServerError(f"model {model_id} is let go but was not held")
        adapter.holds -= 1
        self._clock += 1
        adapter.used = self._clock
        if adapter.holds == 0:
            with suppress(ServerError):  # a full disk is told to who needs the room
                self._make_training_room(lambda: 0)

    @contextmanager
    def held(self, model_id: str) -> Iterator[Adapter]:
        adapter = self.hold(model_id)
        try:
            yield adapter
        finally:
            self.let_go(model_id)

    def is_resident(self, model_id: str) -> bool:
        """Whether it is in rows. False for one that is not here."""
        adapter = self._adapters.get(model_id)
        return adapter is not None and adapter.place is not None

    def bytes_in_use(self, model_id: str) -> tuple[int, int]:
        """What training this adapter takes of ``max_adapter_bytes`` with one request open, and with each one more.
        Zeros for one that is not here."""
        adapter = self._adapters.get(model_id)
        if adapter is None:
            return 0, 0
        slab = self._slab(adapter.rank_class)
        gradient = slab.gradient.row_bytes
        scratch = 0 if adapter.gradient_free else gradient
        return slab.adapter_bytes + scratch, gradient

    def room_for(self, rank: int) -> int:
        """How many adapters of this rank ``max_adapter_bytes`` holds at once, with one request open of each."""
        return int(self.max_adapter_bytes // self._slab(rank_class_of(rank)).adapter_bytes)

    def prefetch(self, model_ids: Sequence[str], *, keep: Collection[str]) -> None:
        """``model_ids`` will be asked for, in this order, once the turn about ``keep`` has run (which of them may go on
        then). Moves what it can beside that turn, within the limits, displacing neither those nor ``keep``: on CUDA
        rows, everywhere files into host memory; and what that will have to give up into files. Until the next call,
        rows that others displace are those needed last by it. Never fails: what goes wrong is told to who asks for the
        rows."""
        self._wanted = {model_id: place for place, model_id in enumerate(model_ids)}
        self._keep, self._turn_began = frozenset(keep), self._clock
        self._write_ahead()
        reading = 0
        for model_id in model_ids:
            adapter = self._adapters.get(model_id)
            if adapter is None or adapter.place is not None:
                continue
            if adapter.file is not None and self._spill is not None:
                reading += 1
                if adapter.reading is None and reading <= READ_AHEAD:
                    adapter.reading = self._spill.read_ahead(adapter.file, _name(adapter))
            elif adapter.parked is not None and self._mover.beside and not self._bring_beside(adapter, keep):
                return

    def bring(self, adapter: Adapter) -> _Place:
        """Into rows, if it is not there, and the most recently used. What ``Adapter`` and every row accessor call."""
        place = adapter.place
        if place is None:
            if self._adapters.get(adapter.model_id) is not adapter:
                raise NotFound(f"model {adapter.model_id} is not here")
            start = self._seconds()
            place = self._bring_now(adapter)
            self._wait_ms += 1000 * (self._seconds() - start)
        elif place.moved is not None:
            self._mover.wait(place.moved)
            place.moved = None
            self.moves += 1
        self._clock += 1
        adapter.used = self._clock
        return place

    # ---- gradient rows
    def take_scratch(self, rank_class: int) -> int:
        """A zeroed gradient slot that belongs to no adapter."""
        slab = self._slab(rank_class)
        self._make_training_room(slab.gradient.growth_bytes, slab=slab)

        def take() -> int:
            slab.reserve_gradient(self._training_left() - slab.gradient.growth_bytes())
            return slab.gradient.take(zero=True)

        return self._or_park(take, slab, "a gradient row")

    def free_scratch(self, rank_class: int, slot: int) -> None:
        self._slab(rank_class).gradient.give(slot)

    def gradient_row(self, rank_class: int, slot: int) -> torch.Tensor:
        """float32 [row], a view."""
        return self.gradient_slab(rank_class)[slot]

    # ---- slabs, for the products
    def layout(self, rank_class: int) -> Layout:
        return self._slab(rank_class).layout

    def work_slab(self, rank_class: int) -> torch.Tensor:
        """[slots, row] in the base's dtype, detached."""
        return self._slab(rank_class).work.tensor

    def gradient_slab(self, rank_class: int) -> torch.Tensor:
        """float32 [slots, row], detached."""
        return self._slab(rank_class).gradient.tensor

    def lora(self, row: RowRef) -> LoraConfig:
        """Of the adapter or version that computes with this working row. Raises ``ServerError`` for a free row."""
        slab = self._slabs.get(row.rank_class)
        if slab is None or row.slot not in slab.lora:
            raise ServerError(f"row {row.slot} of rank class {row.rank_class} holds no adapter")
        return slab.lora[row.slot]

    def stamp(self, row: RowRef) -> int:
        """Another number each time the row is given to somebody. As long as it stays, so do a pinned version's
        weights. Raises ``ServerError`` for a free row."""
        self.lora(row)
        return self._slabs[row.rank_class].stamps[row.slot]

    def trained(self, lora: LoraConfig) -> tuple[bool, ...]:
        """Which sites such an adapter trains; at the others its A and B are zero."""
        flags = (lora.train_attn, lora.train_mlp, lora.train_unembed)
        if flags not in self._trained:
            self._trained[flags] = tuple(trains(lora, site) for site in self.sites)
        return self._trained[flags]

    # ---- published versions
    def publish(self, model_id: str, version: Version) -> None:
        """Copies the adapter's working row into a row of the version's own. Idempotent."""
        adapter = self[model_id]
        if self._known(version):
            return
        with self.held(model_id):
            published = self._admit(version, adapter.lora)
            work = self.work_slab(adapter.rank_class)
            work[published.slot].copy_(work[adapter.work])
        self._make_room(0)

    def publish_tensors(self, version: Version, lora: LoraConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        """Publishes from PEFT-named tensors (a checkpoint's ``adapter_model.safetensors``). Idempotent."""
        if self._known(version):
            return
        rank_class = rank_class_of(lora.rank)
        weights = torch.zeros(self.layout(rank_class).row, device=self.device)
        self.import_row(tensors, lora, weights)
        published = self._admit(version, lora)
        self.work_slab(rank_class)[published.slot].copy_(weights)
        self._make_room(0)

    def has_version(self, version: Version) -> bool:
        published = self._published.get(version)
        return published is not None and not published.released

    def pin(self, version: Version) -> RowRef:
        """The version's row, resident until as many ``unpin``; brings it back from host or disk. ``NotFound``."""
        published = self._published.get(version)
        if published is None or published.released:
            raise NotFound(f"{_version_name(version)} is not published here")
        if published.slot is None:
            self._bring_back(published)
        published.pins += 1
        self._touch(published)
        self._make_room(0)
        assert published.slot is not None
        return RowRef(rank_class=published.rank_class, slot=published.slot)

    def unpin(self, version: Version) -> None:
        published = self._published.get(version)
        if published is None or published.pins == 0:
            raise ServerError(f"{_version_name(version)} is unpinned but was not pinned")
        published.pins -= 1
        if published.pins == 0:
            if published.released:
                self._forget(published)
            self._make_room(0)

    def release(self, version: Version) -> None:
        """Forgets it, once nobody has it pinned. Idempotent."""
        published = self._published.get(version)
        if published is None:
            return
        published.released = True
        if published.pins == 0:
            self._forget(published)

    # ---- to and from PEFT's names
    def export(self, row: torch.Tensor, lora: LoraConfig) -> dict[str, torch.Tensor]:
        """A row [row] of the class of ``lora.rank`` → ``base_model.model.{site}.lora_A.weight`` [r, in] and
        ``….lora_B.weight`` [out, r], of the true rank, trained groups only; contiguous copies. Works for weights and
        for moments alike."""
        return {name: part.clone(memory_format=torch.contiguous_format) for name, part in self._parts(row, lora)}

    def import_row(self, tensors: Mapping[str, torch.Tensor], lora: LoraConfig, out: torch.Tensor) -> None:
        """The reverse, into ``out`` [row] (zero elsewhere). Missing, unexpected or misshapen names: ``UserError``,
        and ``out`` is as it was."""
        parts = dict(self._parts(out, lora))
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

    def stats(self) -> dict[str, float]:
        """Counts and bytes of now: training adapters and published versions in rows, on the host, on disk (an adapter
        nobody has used yet is ``new``). Of ever: adapters parked, brought back (of these, ahead of need), and the
        milliseconds that somebody waited for that."""
        published, adapters = self._published.values(), self._adapters.values()
        slabs = self._slabs.values()
        resident = sum(a.place is not None for a in adapters)
        host, disk = sum(a.parked is not None for a in adapters), sum(a.file is not None for a in adapters)
        return {
            "adapters": len(adapters),
            "adapters_new": len(adapters) - resident - host - disk,
            "adapters_resident": resident,
            "adapters_host": host,
            "adapters_disk": disk,
            "adapters_held": sum(a.holds > 0 for a in adapters),
            "adapters_resident_bytes": self._training_bytes(),
            "adapters_host_bytes": sum(a.parked.num_bytes for a in adapters if a.parked is not None),
            "max_adapter_bytes": self.max_adapter_bytes,
            "evictions": self._evictions,
            "loads": self._loads,
            "loads_ahead": self._read_ahead,
            "load_wait_ms": self._wait_ms,
            "work_rows": sum(len(slab.work.taken) for slab in slabs),
            "scratch_rows": sum(len(slab.gradient.taken) for slab in slabs) - resident,
            "versions_resident": sum(p.slot is not None for p in published),
            "versions_pinned": sum(p.pins > 0 for p in published),
            "versions_host": sum(p.slot is None and p.host is not None for p in published),
            "versions_disk": sum(p.slot is None and p.host is None for p in published),
            "versions_resident_bytes": self._resident_bytes(),
            "versions_host_bytes": sum(self._row_bytes(p) for p in published if p.host is not None),
        }

    # ---- inside
    def _slab(self, rank_class: int) -> _Slab:
        slab = self._slabs.get(rank_class)
        if slab is None:
            if rank_class not in RANK_CLASSES:
                raise ServerError(f"rank class {rank_class} is none of {RANK_CLASSES}")
            slab = self._slabs[rank_class] = _Slab(Layout.of(self.sites, rank_class), self.dtype, self.device)
        return slab

    def _training_bytes(self) -> int:
        return sum(slab.training_bytes for slab in self._slabs.values())

    def _training_left(self) -> int:
        return self.max_adapter_bytes - self._training_bytes()

    def _make_training_room(
        self, needed: Callable[[], int], *, slab: _Slab | None = None, newcomer: Adapter | None = None
    ) -> None:
        """Until ``needed()`` more bytes of ``slab`` fit: what nobody uses goes first, but for what ``needed`` counts
        on, then adapters, the one that is needed last before the others (``_need``). What is held stays: then the limit
        is passed. Raises ``ServerError`` when host and disk are full, and has lost nothing."""
        while self._training_bytes() + needed() > self.max_adapter_bytes:
            self._mover.settle()  # what is given back may be used at once
            self.moves += 1
            if any([self._trim(other) for other in self._slabs.values() if other is not slab]):
                continue
            if slab is not None and self._trim(slab, rows=1, states=0 if newcomer is None else 1):
                continue
            victim = self._victim(lambda adapter: adapter is not newcomer)
            if victim is None:
                return
            self._park(victim)

    def _trim(self, slab: _Slab, *, rows: int = 0, states: int = 0) -> int:
        idle = [
            adapter.place
            for adapter in self._adapters.values()
            if adapter.place is not None and adapter.holds == 0 and adapter.rank_class == slab.layout.rank_class
        ]
        return slab.trim(idle, rows=rows, states=states)

    def _victim(self, where: Callable[[Adapter], bool]) -> Adapter | None:
        idle = (a for a in self._adapters.values() if a.place is not None and a.holds == 0 and where(a))
        return min(idle, key=self._need, default=None)

    def _need(self, adapter: Adapter) -> tuple[int, int]:
        """Sorts adapters by how soon they will be needed, the last first: the longest unused of those that nobody
        waits for, then who is asked for last, then those whose part of this turn is still to come."""
        if adapter.model_id in self._keep and adapter.used <= self._turn_began:
            return (2, adapter.used)
        place = self._wanted.get(adapter.model_id)
        return (0, adapter.used) if place is None else (1, -place)

    def _bring_now(self, adapter: Adapter) -> _Place:
        parked = self._fetch(adapter)
        slab = self._slab(adapter.rank_class)
        in_memory, adapter.parked = adapter.parked, None  # what it displaces may take its place on the host
        try:
            self._make_training_room(slab.placing_bytes, slab=slab, newcomer=adapter)
            return self._or_park(lambda: self._put(adapter, parked), slab, f"the rows of {_name(adapter)}", adapter)
        except Exception:
            adapter.parked = in_memory
            raise

    def _or_park(self, take: Callable[[], T], slab: _Slab, what: str, newcomer: Adapter | None = None) -> T:
        """``take``s rows of ``slab``. Where there is no memory, since others took what the limits promised us, adapters
        that nobody holds leave theirs until there is. Raises ``ServerError``."""
        while True:
            self._mover.settle()
            try:
                return take()
            except (MemoryError, torch.OutOfMemoryError):
                victim = self._victim(lambda adapter: adapter is not newcomer)
                if victim is None:
                    raise ServerError(f"no memory for {what}") from None
                self._park(victim)
                for other in self._slabs.values():
                    if other is not slab:
                        self._trim(other)

    def _bring_beside(self, adapter: Adapter, keep: Collection[str]) -> bool:
        """Into rows that are free or that a colder adapter of its class gives up, beside the computation. False: no
        room."""
        slab, parked = self._slab(adapter.rank_class), adapter.parked
        assert parked is not None
        if not self._has_room(slab):
            victim = self._victim(
                lambda a: (
                    a.rank_class == adapter.rank_class and a.model_id not in keep and a.model_id not in self._wanted
                )
            )
            if victim is None or self._host_excess(self._parked_bytes(victim) - parked.num_bytes) > 0:
                return False
            self._park(victim, beside=True)
            if not self._has_room(slab):
                return False
        with self._mover.moving():
            adapter.parked = None
            self._put(adapter, parked).moved = self._mover.mark()
        self._read_ahead += 1
        return True

    def _has_room(self, slab: _Slab) -> bool:
        return slab.has_room and slab.placing_bytes() <= self._training_left()

    def _put(self, adapter: Adapter, parked: Parked | None) -> _Place:
        """Takes rows and fills them; from its seed without ``parked``. There must be room."""
        self.moves += 1
        slab = self._slab(adapter.rank_class)
        # All that can run out of memory comes first.
        slab.reserve_gradient(self._training_left() - slab.placing_bytes())
        slab.work.reserve()
        if parked is not None and parked.adoptable:
            state, used = slab.adopt(parked.state), False
        else:
            state, used = slab.take_state()
        slot = slab.gradient.take(zero=parked is None or parked.gradient is None)
        work = slab.take_work(adapter.lora)
        place = _Place(work=work, slot=slot, state=state)
        if parked is None:
            if used:
                state.zero_()
            if not adapter.blank:
                self._initialise(state.data[0], adapter)
        else:
            if state is not parked.state:
                for row, numbers in zip(state.data, parked.state):
                    self._unpack(numbers, adapter.lora, row)
                if used:
                    state.data[len(parked.state) :].zero_()
            if parked.gradient is not None:
                self._unpack(parked.gradient, adapter.lora, self.gradient_slab(adapter.rank_class)[slot])
            self._loads += 1
        self.work_slab(adapter.rank_class)[work].copy_(state.data[0])
        slab.num_placed += 1
        adapter.place = place
        self._drop_file(adapter)
        return place

    def _park(self, adapter: Adapter, *, beside: bool = False) -> None:
        """From rows to host memory, with its gradient if that holds anything; to a file where the host has no room.
        ``beside``: the caller knows that it has. Raises ``ServerError``, and it is where it was."""
        place, slab = adapter.place, self._slab(adapter.rank_class)
        assert place is not None
        self.moves += 1
        adoptable = self._is_dense(adapter.lora) and not self._mover.beside  # the state is host memory already
        with self._mover.moving():
            gradient = None
            if not adapter.gradient_free:
                row = self.gradient_slab(adapter.rank_class)[place.slot]
                gradient = self._pack([row], adapter.lora)[0]
            rows = place.state.data[: 3 if adapter.step else 1]
            state = place.state if adoptable else self._pack(list(rows), adapter.lora)
        parked = Parked(state=state, gradient=gradient, adoptable=adoptable)
        if not beside and self._spill is not None and self._make_host_room(parked.num_bytes) > 0:
            self._mover.finish()
            adapter.file = self._write(adapter, parked, self._spill)
        else:
            adapter.parked = parked
        if adapter.parked is None or not adoptable:
            slab.give_state(place.state)
        self._leave(adapter, place, clean=adapter.gradient_free)
        adapter.place = None
        self._evictions += 1

    def _leave(self, adapter: Adapter, place: _Place, *, clean: bool) -> None:
        """Gives work and gradient rows up (``clean``: the latter is zero). The state is the caller's."""
        slab = self._slab(adapter.rank_class)
        slab.give_work(place.work)
        slab.gradient.give(place.slot, clean=clean)
        slab.num_placed -= 1

    def _fetch(self, adapter: Adapter) -> Parked | None:
        """From host memory or its file. None for a new adapter. Raises ``ServerError``."""
        if adapter.file is None or self._spill is None:
            return adapter.parked
        reading, adapter.reading = adapter.reading, None
        tensors = self._spill.read(adapter.file, _name(adapter)) if reading is None else reading.result()
        numbers = self._num_elements(adapter.lora)
        state, gradient = tensors.get("state"), tensors.get("gradient")
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        expected: dict[str, object] = {"state": (torch.float32, (3 if adapter.step else 1, numbers))}
        if not adapter.gradient_free:
            expected["gradient"] = (torch.float32, (numbers,))
        if state is None or shapes != expected:
            raise ServerError(
                f"{_name(adapter)} cannot be read back from {adapter.file}: it holds {shapes}, expected {expected}"
            )
        return Parked(state=state, gradient=gradient)

    def _drop_file(self, adapter: Adapter) -> None:
        """Before its numbers change."""
        adapter.reading = None
        writing, adapter.writing = adapter.writing, None
        if writing is not None and not writing.cancel():
            with suppress(ServerError):
                adapter.file = writing.result()
        if adapter.file is not None and self._spill is not None:
            self._spill.remove(adapter.file)
        adapter.file = None

    # ---- rows as they are parked
    def _lora_spans(self, lora: LoraConfig) -> tuple[_Span, ...]:
        """Where the numbers of the true rank lie in a row, trained groups only."""
        if lora not in self._spans:
            rank_class = rank_class_of(lora.rank)
            layout = self.layout(rank_class)
            spans = []
            for site, a, b in zip(self.sites, layout.a_offset, layout.b_offset, strict=True):
                if trains(lora, site):
                    size = lora.rank * site.in_features
                    spans += [
                        _Span(start=a, lines=1, size=size, stride=size),
                        _Span(start=b, lines=site.out_features, size=lora.rank, stride=rank_class),
                    ]
            self._spans[lora] = tuple(spans)
        return self._spans[lora]

    def _num_elements(self, lora: LoraConfig) -> int:
        """Of a parked row."""
        row = self.layout(rank_class_of(lora.rank)).row
        numbers = sum(span.lines * span.size for span in self._lora_spans(lora))
        return row if numbers >= DENSE * row else numbers

    def _is_dense(self, lora: LoraConfig) -> bool:
        return self._num_elements(lora) == self.layout(rank_class_of(lora.rank)).row

    def _parked_bytes(self, adapter: Adapter) -> int:
        """On the host, as a copy."""
        rows = (3 if adapter.step else 1) + (0 if adapter.gradient_free else 1)
        return 4 * self._num_elements(adapter.lora) * rows

    def _pack(self, rows: Sequence[torch.Tensor], lora: LoraConfig) -> torch.Tensor:
        """On the host, float32 [len(rows), n]."""
        host = self._mover.host(len(rows), self._num_elements(lora))
        for line, row in zip(host, rows):
            packed = row if self._is_dense(lora) else torch.cat([s.of(row).flatten() for s in self._lora_spans(lora)])
            line.copy_(packed, non_blocking=self._mover.beside)
        return host

    def _unpack(self, numbers: torch.Tensor, lora: LoraConfig, row: torch.Tensor) -> None:
        """The reverse: [n] into all of ``row``."""
        if self._is_dense(lora):
            row.copy_(numbers, non_blocking=self._mover.beside)
            return
        row.zero_()
        packed, end = numbers.to(self.device, non_blocking=self._mover.beside), 0
        for span in self._lora_spans(lora):
            start, end = end, end + span.lines * span.size
            span.of(row).copy_(packed[start:end].view(span.lines, span.size))

    def _initialise(self, row: torch.Tensor, adapter: Adapter) -> None:
        lora, layout = adapter.lora, self.layout(adapter.rank_class)
        place = {"model": adapter.model_id} if lora.seed is None else {}
        generator = torch.Generator()  # on the host: the same numbers on every device
        for site, offset in zip(self.sites, layout.a_offset, strict=True):
            if not trains(lora, site):
                continue
            generator.manual_seed(derive_seed(lora.seed or 0, "adapter", site=site.name, **place))
            bound = 1 / math.sqrt(site.in_features)
            a_RI = torch.empty(lora.rank, site.in_features).uniform_(-bound, bound, generator=generator)
            row[offset : offset + a_RI.numel()].copy_(a_RI.flatten())

    def _parts(self, row: torch.Tensor, lora: LoraConfig) -> list[tuple[str, torch.Tensor]]:
        """Views of ``row`` of the adapter's true rank, under PEFT's names."""
        rank_class = rank_class_of(lora.rank)
        layout = self.layout(rank_class)
        if row.shape != (layout.row,):
            raise ServerError(f"a row of rank class {rank_class} has shape ({layout.row},), got {tuple(row.shape)}")
        parts = []
        for index, site in enumerate(self.sites):
            if not trains(lora, site):
                continue
            prefix, a, b = f"base_model.model.{site.name}", layout.a_offset[index], layout.b_offset[index]
            a_RI = row[a : a + rank_class * site.in_features].view(rank_class, site.in_features)
            b_OR = row[b : b + rank_class * site.out_features].view(site.out_features, rank_class)
            parts.append((f"{prefix}.lora_A.weight", a_RI[: lora.rank]))
            parts.append((f"{prefix}.lora_B.weight", b_OR[:, : lora.rank]))
        return parts

    def _known(self, version: Version) -> bool:
        published = self._published.get(version)
        if published is not None:
            published.released = False  # a version's number never names other weights
        return published is not None

    def _admit(self, version: Version, lora: LoraConfig) -> _Published:
        """A new version with a row of its own, whose numbers are anybody's."""
        slab = self._slab(rank_class_of(lora.rank))
        self._make_room(slab.work.row_bytes)
        slot = self._or_park(lambda: slab.take_work(lora), slab, _version_name(version))
        published = _Published(version=version, lora=lora, rank_class=slab.layout.rank_class, slot=slot)
        self._published[version] = published
        self._touch(published)
        return published

    def _touch(self, published: _Published) -> None:
        self._clock += 1
        published.used = self._clock

    def _row_bytes(self, published: _Published) -> int:
        return self._slab(published.rank_class).work.row_bytes

    def _resident_bytes(self) -> int:
        return sum(self._row_bytes(p) for p in self._published.values() if p.slot is not None)

    def _host_excess(self, extra_bytes: int = 0) -> int:
        """Beyond the host's limit, with ``extra_bytes`` more to come."""
        versions = sum(self._row_bytes(p) for p in self._published.values() if p.host is not None)
        adapters = sum(a.parked.num_bytes for a in self._adapters.values() if a.parked is not None)
        return versions + adapters + extra_bytes - self._max_host_bytes

    def _make_room(self, extra_bytes: int) -> None:
        """Moves the coldest unpinned versions down until the limits hold, with ``extra_bytes`` more to come."""
        excess = self._resident_bytes() + extra_bytes - self._max_version_bytes
        for published in self._coldest(lambda p: p.slot is not None and p.pins == 0) if excess > 0 else ():
            if excess <= 0:
                break
            self._evict(published)
            excess -= self._row_bytes(published)
        try:
            self._make_host_room(0)
        except ServerError as error:  # a version that is already in host memory can stay there
            logger.warning("published versions stay in host memory beyond their limit: %s", error)

    def _make_host_room(self, extra_bytes: int) -> int:
        """Writes the coldest on the host to files until ``extra_bytes`` more fit; how many do not. Raises
        ``ServerError`` naming the file that cannot be written; whatever was on the host is there still."""
        excess = self._host_excess(extra_bytes)
        if self._spill is None or excess <= 0:
            return 0
        items: list[_Published | Adapter] = [p for p in self._published.values() if p.host is not None]
        items += [a for a in self._adapters.values() if a.parked is not None]
        self._mover.finish()
        for item in sorted(items, key=lambda item: item.used):
            if excess <= 0:
                break
            if isinstance(item, Adapter):
                assert item.parked is not None
                item.file, freed = self._write(item, item.parked, self._spill), item.parked.num_bytes
                item.parked = None
            else:
                assert item.host is not None
                name = f"{_digest(item.version.model_id)}-{item.version.number}{VERSION_SUFFIX}"
                item.file, item.host = self._spill.write(name, {"row": item.host}), None
                freed = self._row_bytes(item)
            excess -= freed
        return max(0, excess)

    def _write(self, adapter: Adapter, parked: Parked, spill: SpillDirectory) -> Path:
        writing, adapter.writing = adapter.writing, None
        if writing is not None and not writing.cancel():
            with suppress(ServerError):  # there may be room now
                return writing.result()
        return spill.write(_digest(adapter.model_id) + ADAPTER_SUFFIX, _written(adapter, parked))

    def _write_ahead(self) -> None:
        """Of the coldest on the host, one at a time, so that nobody waits for the disk when the memory is needed."""
        spare = self._max_host_bytes // WRITE_AHEAD
        if self._spill is None or self._host_excess(spare) <= 0:
            return
        parked = [a for a in self._adapters.values() if a.parked is not None and a.model_id not in self._wanted]
        begun = [adapter for adapter in parked if adapter.writing is not None]
        written = sum(a.parked.num_bytes for a in begun if a.parked is not None)
        if written >= spare or not all(a.writing is None or a.writing.done() for a in begun):
            return
        coldest = min((a for a in parked if a.writing is None), key=lambda adapter: adapter.used, default=None)
        if coldest is not None and coldest.parked is not None:
            self._mover.finish()
            name = _digest(coldest.model_id) + ADAPTER_SUFFIX
            coldest.writing = self._spill.write_ahead(name, _written(coldest, coldest.parked))

    def _coldest(self, where: Callable[[_Published], bool]) -> list[_Published]:
        return sorted(filter(where, self._published.values()), key=lambda p: p.used)

    def _evict(self, published: _Published) -> None:
        assert published.slot is not None
        slab = self._slab(published.rank_class)
        if published.file is None:
            published.host = self.work_slab(published.rank_class)[published.slot].to("cpu", copy=True)
        slab.give_work(published.slot)
        published.slot = None

    def _bring_back(self, published: _Published) -> None:
        slab = self._slab(published.rank_class)
        row = published.host if published.host is not None else self._read(published, slab.layout.row)
        self._make_room(slab.work.row_bytes)
        slot = self._or_park(lambda: slab.take_work(published.lora), slab, _version_name(published.version))
        self.work_slab(published.rank_class)[slot].copy_(row)
        published.slot, published.host = slot, None

    def _read(self, published: _Published, row: int) -> torch.Tensor:
        assert published.file is not None
        assert self._spill is not None
        what = _version_name(published.version)
        host = self._spill.read(published.file, what).get("row")
        if host is None or host.shape != (row,) or host.dtype != self.dtype:
            got = "no row" if host is None else f"{host.dtype} {tuple(host.shape)}"
            raise ServerError(
                f"{what} cannot be read back from {published.file}: it holds {got}, expected {self.dtype} ({row},)"
            )
        return host

    def _forget(self, published: _Published) -> None:
        del self._published[published.version]
        if published.slot is not None:
            self._slab(published.rank_class).give_work(published.slot)
        if published.file is not None and self._spill is not None:
            self._spill.remove(published.file)


def _takes_memory_when_written(device: torch.device) -> bool:
    return device.type == "cpu"


def _share_of_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(ADAPTER_SHARE * free)
    return int(ADAPTER_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _written(adapter: Adapter, parked: Parked) -> dict[str, torch.Tensor]:
    """Moments that are zero are not."""
    return Parked(state=parked.state[: 3 if adapter.step else 1], gradient=parked.gradient).tensors()


def _digest(model_id: str) -> str:
    return hashlib.sha256(model_id.encode()).hexdigest()[:24]


def _version_name(version: Version) -> str:
    return f"version {version.number} of model {version.model_id}"


def _name(adapter: Adapter) -> str:
    return f"the adapter of model {adapter.model_id}"


def _some(names: Collection[str]) -> str:
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
