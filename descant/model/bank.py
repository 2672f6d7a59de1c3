"""The one home of adapter weights.

Per rank class (8, 16, 32, 64, 128, 256: an adapter of rank r lives in the smallest class ≥ r, its tail exactly zero)
there are separate tensors, one row an adapter:

    work      [slots, row]  base dtype  what trainer and sampler compute with; also one row a published version
    weights   [slots, row]  float32     the adapter's own
    moment1   [slots, row]  float32
    moment2   [slots, row]  float32
    gradient  [slots, row]  float32     plus scratch rows for requests that may still fail

``work`` slots and training slots are numbered apart: a published version has a work row only. ``Adapter.slot`` numbers
weights, moments and gradient alike; scratch rows share the gradient's numbering from its upper end. The row stride is a
multiple of 128 bytes (a stride off 16 bytes kills the CUDA context in grouped products). ``Layout`` owns all offsets.
Views are handed out detached from the pool's autograd version counter (all views of one tensor share it: a write to
one adapter's slot would break another's backward). No row is made under ``inference_mode``.
Slabs grow by reallocation, only between passes: take views per pass, never keep them. A free row of weights, moments
or gradient is all zero.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from descant.errors import NotFound, ServerError, UserError
from descant.model.passes import RowRef
from descant.types import MAX_RANK, LoraConfig, Version

logger = logging.getLogger(__name__)

RANK_CLASSES = (8, 16, 32, 64, 128, 256)

ALIGN_ELEMENTS = 64
"""Rows, and the start of every A and B in them, are multiples of this: 128 bytes in bf16, 256 in fp32."""
ALIGN_BYTES = 128

FIRST_SLOTS = {"cuda": 4, "cpu": 32}
MAX_FIRST_BYTES = {"cuda": 256 << 20, "cpu": 2 << 30}
MAX_GROWTH_BYTES = 1 << 30
"""A slab starts with up to this many rows and bytes (one row at least: at rank 256 a row of a 135M model is 365 MB),
and doubles, by at most 1 GiB at a time. On CPU memory is only taken when a row is first written, and growing copies
(4 to 8 adapters of 45 MB took seconds), so it starts larger."""

SPILL_SUFFIX = ".version.safetensors"
PARTIAL_SUFFIX = ".version.partial"


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
    """Where each site's A [R, in] and B [out, R] (PEFT's orientation) lie in a row of rank class R, in elements."""

    rank_class: int
    a_offset: tuple[int, ...]
    b_offset: tuple[int, ...]
    row: int

    @staticmethod
    def of(sites: Sequence[LoraSite], rank_class: int) -> Layout:
        a_offset, b_offset, end = [], [], 0
        for site in sites:
            a_offset.append(end)
            end = _aligned(end + rank_class * site.in_features)
            b_offset.append(end)
            end = _aligned(end + rank_class * site.out_features)
        return Layout(rank_class=rank_class, a_offset=tuple(a_offset), b_offset=tuple(b_offset), row=end)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


@dataclass(slots=True, kw_only=True)
class Adapter:
    """A training adapter's entry. ``step`` counts optimiser steps. ``gradient_free``: its gradient row holds nothing.

    ``work`` is a row of the work slab, ``slot`` one of weights, moments and gradient.
    """

    model_id: str
    lora: LoraConfig
    rank_class: int
    work: int
    slot: int
    step: int = 0
    gradient_free: bool = True


class _Rows:
    """Slots of one tensor [slots, row], or of several that are numbered together: who is free, and growth."""

    def __init__(self, row: int, dtype: torch.dtype, device: torch.device, num_tensors: int = 1):
        self._row, self._dtype, self._device = row, dtype, device
        self.row_bytes = row * dtype.itemsize
        self.tensors = [self._allocate(0) for _ in range(num_tensors)]
        self.free: set[int] = set()
        self.taken: set[int] = set()

    @property
    def capacity(self) -> int:
        return len(self.tensors[0])

    def reserve(self) -> None:
        if not self.free:
            self.grow(self.capacity + 1)

    def take(self, *, from_top: bool = False) -> int:
        self.reserve()
        slot = max(self.free) if from_top else min(self.free)
        self.take_slot(slot)
        return slot

    def take_slot(self, slot: int) -> None:
        self.grow(slot + 1)
        self.free.remove(slot)
        self.taken.add(slot)

    def give(self, slot: int) -> None:
        for tensor in self.tensors:
            row = tensor.data[slot]
            if self._device.type != "cpu" or row.any():  # on CPU a write would make pages of what was never written
                row.zero_()
        self.taken.remove(slot)
        self.free.add(slot)

    def grow(self, at_least: int) -> None:
        old = self.capacity
        if at_least <= old:
            return
        kind = "cpu" if self._device.type == "cpu" else "cuda"
        first = min(FIRST_SLOTS[kind], MAX_FIRST_BYTES[kind] // self.row_bytes)
        doubled = old + min(old, MAX_GROWTH_BYTES // self.row_bytes)
        capacity = max(at_least, doubled if old else first)
        for index, tensor in enumerate(self.tensors):
            grown = self._allocate(capacity)
            for slot in self.taken:  # rows never used stay untouched pages of the operating system
                grown.data[slot].copy_(tensor.data[slot])
            self.tensors[index] = grown
        self.free.update(range(old, capacity))

    def _allocate(self, capacity: int) -> torch.Tensor:
        # A tensor made under inference_mode could never be saved for a backward or written outside of it.
        with torch.inference_mode(False):
            if self._device.type != "cpu":
                return torch.zeros(capacity, self._row, dtype=self._dtype, device=self._device)
            # torch.zeros writes its zeros; numpy asks the system for pages that are zero when they are first touched.
            size = capacity * self.row_bytes
            raw = np.zeros(size + ALIGN_BYTES, np.uint8)
            start = -raw.ctypes.data % ALIGN_BYTES
            return torch.from_numpy(raw[start : start + size]).view(self._dtype).view(capacity, self._row)


class _Slab:
    """All rows of one rank class."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.work = _Rows(layout.row, dtype, device)
        self.state = _Rows(layout.row, torch.float32, device, num_tensors=3)
        self.gradient = _Rows(layout.row, torch.float32, device)
        self.lora: dict[int, LoraConfig] = {}
        """Of every work row in use."""

    def reserve_training(self) -> int:
        """The slot that the next adapter gets, and room for it everywhere."""
        self.work.reserve()
        self.gradient.reserve()
        slot = min(self.gradient.free)
        self.state.grow(slot + 1)
        return slot

    def take_work(self, lora: LoraConfig) -> int:
        slot = self.work.take()
        self.lora[slot] = lora
        return slot

    def give_work(self, slot: int) -> None:
        del self.lora[slot]
        self.work.give(slot)


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
        max_version_bytes: int = 2 << 30,
        max_host_bytes: int = 4 << 30,
        spill_dir: Path | None = None,
    ):
        """``max_version_bytes``: published versions kept as rows; beyond it the coldest unpinned go to host memory,
        beyond ``max_host_bytes`` to files under ``spill_dir``, and come back on ``pin``. What is pinned stays,
        whatever the limits; without ``spill_dir`` so does what is in host memory. The directory is this bank's alone:
        spilled versions that an earlier process left there are removed."""
        self.sites: tuple[LoraSite, ...] = tuple(sites)
        self.device = device
        self.dtype = dtype
        self._max_version_bytes = max_version_bytes
        self._max_host_bytes = max_host_bytes
        self._spill_dir = spill_dir
        self._slabs: dict[int, _Slab] = {}
        self._adapters: dict[str, Adapter] = {}
        self._published: dict[Version, _Published] = {}
        self._trained: dict[tuple[bool, bool, bool], tuple[bool, ...]] = {}
        self._clock = 0
        if spill_dir is not None:
            spill_dir.mkdir(parents=True, exist_ok=True)
            for left in [*spill_dir.glob("*" + SPILL_SUFFIX), *spill_dir.glob("*" + PARTIAL_SUFFIX)]:
                left.unlink(missing_ok=True)

    # ---- training adapters
    def create(self, model_id: str, lora: LoraConfig) -> Adapter:
        """Zeroed row; A uniform in ±1/√in (Kaiming with a=√5, as PEFT) from ``lora.seed`` (None: from the model id),
        B zero; sites whose group is not trained keep A = B = 0 and so have a gradient of exactly 0.

        Every site draws from a generator of its own, so neither the flags nor the rank class of an adapter move
        another site's numbers. Raises ``UserError`` for a rank out of range or flags that train nothing."""
        if model_id in self._adapters:
            raise ServerError(f"model {model_id} has an adapter already")
        rank_class = rank_class_of(lora.rank)
        if not any(self.trained(lora)):
            raise UserError(
                f"lora_config trains nothing on this base model: train_attn={lora.train_attn}, "
                f"train_mlp={lora.train_mlp}, train_unembed={lora.train_unembed}, and the base has only "
                f"{', '.join(sorted({site.group for site in self.sites})) or 'no'} layers"
            )
        slab = self._slab(rank_class)
        slot = slab.reserve_training()  # all that can run out of memory comes first
        slab.gradient.take_slot(slot)
        slab.state.take_slot(slot)
        adapter = Adapter(model_id=model_id, lora=lora, rank_class=rank_class, work=slab.take_work(lora), slot=slot)
        self._adapters[model_id] = adapter
        self._initialise(self.weights(model_id), adapter)
        self.refresh_work(model_id)
        return adapter

    def delete(self, model_id: str) -> None:
        """Zeroes and frees. Idempotent. Published versions stay."""
        adapter = self._adapters.pop(model_id, None)
        if adapter is None:
            return
        slab = self._slab(adapter.rank_class)
        slab.give_work(adapter.work)
        slab.state.give(adapter.slot)
        slab.gradient.give(adapter.slot)

    def __getitem__(self, model_id: str) -> Adapter:
        """Raises ``NotFound``."""
        try:
            return self._adapters[model_id]
        except KeyError:
            raise NotFound(f"model {model_id} is not here") from None

    def row(self, model_id: str) -> RowRef:
        """The adapter's working row."""
        adapter = self[model_id]
        return RowRef(rank_class=adapter.rank_class, slot=adapter.work)

    def weights(self, model_id: str) -> torch.Tensor:
        """float32 [row], a view; so are the next three."""
        adapter = self[model_id]
        return self._slab(adapter.rank_class).state.tensors[0].data[adapter.slot]

    def gradient(self, model_id: str) -> torch.Tensor:
        adapter = self[model_id]
        return self.gradient_row(adapter.rank_class, adapter.slot)

    def moments(self, model_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        adapter = self[model_id]
        _, moment1, moment2 = self._slab(adapter.rank_class).state.tensors
        return moment1.data[adapter.slot], moment2.data[adapter.slot]

    def refresh_work(self, model_id: str) -> None:
        """Copies weights into the working row (after a step or a load)."""
        adapter = self[model_id]
        self.work_slab(adapter.rank_class)[adapter.work].copy_(self.weights(model_id))

    # ---- gradient rows
    def take_scratch(self, rank_class: int) -> int:
        """A zeroed gradient slot that belongs to no adapter."""
        return self._slab(rank_class).gradient.take(from_top=True)

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
        return self._slab(rank_class).work.tensors[0].data

    def gradient_slab(self, rank_class: int) -> torch.Tensor:
        """float32 [slots, row], detached."""
        return self._slab(rank_class).gradient.tensors[0].data

    def lora(self, row: RowRef) -> LoraConfig:
        """Of the adapter or version that computes with this working row. Raises ``ServerError`` for a free row."""
        slab = self._slabs.get(row.rank_class)
        if slab is None or row.slot not in slab.lora:
            raise ServerError(f"row {row.slot} of rank class {row.rank_class} holds no adapter")
        return slab.lora[row.slot]

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
            raise NotFound(f"version {version.number} of model {version.model_id} is not published here")
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
            raise ServerError(f"version {version.number} of model {version.model_id} is unpinned but was not pinned")
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

    def stats(self) -> dict[str, int]:
        """Counts and bytes: adapters, work rows in use, scratch in use, versions resident / on host / on disk."""
        published = self._published.values()
        slabs = self._slabs.values()
        own = sum(len(slab.state.taken) for slab in slabs)
        return {
            "adapters": len(self._adapters),
            "work_rows": sum(len(slab.work.taken) for slab in slabs),
            "scratch_rows": sum(len(slab.gradient.taken) for slab in slabs) - own,
            "versions_resident": sum(p.slot is not None for p in published),
            "versions_pinned": sum(p.pins > 0 for p in published),
            "versions_host": sum(p.slot is None and p.host is not None for p in published),
            "versions_disk": sum(p.slot is None and p.host is None for p in published),
            "versions_resident_bytes": self._resident_bytes(),
            "versions_host_bytes": self._host_bytes(),
            "slab_bytes": sum(
                len(rows.tensors) * rows.capacity * rows.row_bytes
                for slab in slabs
                for rows in (slab.work, slab.state, slab.gradient)
            ),
        }

    # ---- inside
    def _slab(self, rank_class: int) -> _Slab:
        slab = self._slabs.get(rank_class)
        if slab is None:
            if rank_class not in RANK_CLASSES:
                raise ServerError(f"rank class {rank_class} is none of {RANK_CLASSES}")
            slab = self._slabs[rank_class] = _Slab(Layout.of(self.sites, rank_class), self.dtype, self.device)
        return slab

    def _initialise(self, row: torch.Tensor, adapter: Adapter) -> None:
        lora, layout = adapter.lora, self.layout(adapter.rank_class)
        origin = f"model {adapter.model_id}" if lora.seed is None else f"seed {lora.seed}"
        generator = torch.Generator()  # on the host: the same numbers on every device
        for site, offset in zip(self.sites, layout.a_offset, strict=True):
            if not trains(lora, site):
                continue
            digest = hashlib.sha256(f"{origin} site {site.name}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
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
        """A new version with an empty row."""
        slab = self._slab(rank_class_of(lora.rank))
        self._make_room(slab.work.row_bytes)
        published = _Published(version=version, lora=lora, rank_class=slab.layout.rank_class, slot=slab.take_work(lora))
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

    def _host_bytes(self) -> int:
        return sum(self._row_bytes(p) for p in self._published.values() if p.host is not None)

    def _make_room(self, extra_bytes: int) -> None:
        """Moves the coldest unpinned versions down until the limits hold, with ``extra_bytes`` more to come."""
        excess = self._resident_bytes() + extra_bytes - self._max_version_bytes
        for published in self._coldest(lambda p: p.slot is not None and p.pins == 0) if excess > 0 else ():
            if excess <= 0:
                break
            self._evict(published)
            excess -= self._row_bytes(published)
        excess = self._host_bytes() - self._max_host_bytes
        if excess <= 0 or self._spill_dir is None:
            return
        for published in self._coldest(lambda p: p.host is not None):
            if excess <= 0 or not self._spill(published, self._spill_dir):
                break
            excess -= self._row_bytes(published)

    def _coldest(self, where: Callable[[_Published], bool]) -> list[_Published]:
        return sorted(filter(where, self._published.values()), key=lambda p: p.used)

    def _evict(self, published: _Published) -> None:
        assert published.slot is not None
        slab = self._slab(published.rank_class)
        if published.file is None:
            published.host = self.work_slab(published.rank_class)[published.slot].to("cpu", copy=True)
        slab.give_work(published.slot)
        published.slot = None

    def _spill(self, published: _Published, directory: Path) -> bool:
        """From host memory to a file. False, and it stays where it is, if the file cannot be written."""
        assert published.host is not None
        model = hashlib.sha256(published.version.model_id.encode()).hexdigest()[:24]
        file = directory / f"{model}-{published.version.number}{SPILL_SUFFIX}"
        partial = file.with_name(file.name.removesuffix(SPILL_SUFFIX) + PARTIAL_SUFFIX)
        try:
            save_file({"row": published.host}, partial)
            os.replace(partial, file)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            logger.warning("published versions stay in host memory beyond their limit: %s: %s", file, error)
            return False
        published.file, published.host = file, None
        return True

    def _bring_back(self, published: _Published) -> None:
        slab = self._slab(published.rank_class)
        row = published.host if published.host is not None else self._read(published, slab.layout.row)
        self._make_room(slab.work.row_bytes)
        slot = slab.take_work(published.lora)
        self.work_slab(published.rank_class)[slot].copy_(row)
        published.slot, published.host = slot, None

    def _read(self, published: _Published, row: int) -> torch.Tensor:
        assert published.file is not None
        name = f"version {published.version.number} of model {published.version.model_id}"
        try:
            host = load_file(published.file)["row"]
        except (OSError, SafetensorError, KeyError) as error:
            raise ServerError(f"{name} cannot be read back from {published.file}: {error}") from error
        if host.shape != (row,) or host.dtype != self.dtype:
            raise ServerError(
                f"{name} cannot be read back from {published.file}: it holds {host.dtype} {tuple(host.shape)}, "
                f"expected {self.dtype} ({row},)"
            )
        return host

    def _forget(self, published: _Published) -> None:
        del self._published[published.version]
        if published.slot is not None:
            self._slab(published.rank_class).give_work(published.slot)
        if published.file is not None:
            with suppress(OSError):
                published.file.unlink(missing_ok=True)


def _some(names: Collection[str]) -> str:
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
