"""A pass's segments, and the runs in which their products are computed.

A segment is tokens of one adapter. A run is segments whose products are computed together: in a loop (``lora.loop``),
as one grouped product (``lora.grouped``), or by kernels of our own (``lora.kernels``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal

import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import Layout
from descant.adapters.slots import ComputeSlot, GradientSlot
from descant.model.forward_batch import to_device

if TYPE_CHECKING:
    from descant.model.lora.kernels import Sites, Tiles, TileSegment

MAX_GROUPS = 1023
"""The CUDA kernel takes fewer than 1024 groups a call."""

MAX_EVEN_TOKENS = 8
"""Longer segments gain nothing from being batched."""

Products = Literal["loop", "grouped", "kernels"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slabs:
    """One rank bucket: its tensors, and where each site lies in a row."""

    compute_SP: torch.Tensor
    gradient_SP: torch.Tensor
    layout: Layout

    @staticmethod
    def of(bank: AdapterBank, rank_bucket: int) -> Slabs:
        return Slabs(
            compute_SP=bank.compute_slab(rank_bucket),
            gradient_SP=bank.gradient_slab(rank_bucket),
            layout=bank.layout(rank_bucket),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSegment:
    """Tokens ``start:end`` with row ``compute`` of their rank bucket's ``slabs``; ``trained[site]`` False: A = B = 0
    there, nothing to compute."""

    start: int
    end: int
    slabs: Slabs
    compute: ComputeSlot
    gradient: GradientSlot | None
    scale: float
    trained: tuple[bool, ...]

    @property
    def rank_bucket(self) -> int:
        return self.slabs.layout.rank_bucket


class SegmentRun:
    """Segments relative to the tokens of one call, and how their products are computed. Through kernels of our own:
    segments of any classes that are narrow enough, with what lies between them. Else: of one class, with no token
    between them."""

    def __init__(self, segments: Sequence[LoraSegment], products: Products, start: int, end: int):
        self.segments = tuple(segments)
        self.products = products
        self.start, self.end = start, end
        self.slabs = segments[0].slabs
        """Of all segments, unless they go through our kernels."""
        self._group_tensors: _GroupTensors | None = None
        self._tiles: Tiles | None = None
        self._sites: dict[int, Sites] = {}
        self._is_even: bool | None = None

    def trained(self, sites: Sequence[int]) -> bool:
        return any(segment.trained[site] for segment in self.segments for site in sites)

    @property
    def requires_grad(self) -> bool:
        return any(segment.gradient is not None for segment in self.segments)

    @property
    def is_even(self) -> bool:
        """Several segments of the same few tokens and one scale, as a decode step has them."""
        if self._is_even is None:
            length = self.segments[0].end - self.segments[0].start
            self._is_even = (
                len(self.segments) > 1
                and length <= MAX_EVEN_TOKENS
                and all(s.end - s.start == length and s.scale == self.segments[0].scale for s in self.segments)
            )
        return self._is_even

    def kernel_sites(self, sites: Sequence[int], widths: Sequence[int]) -> Sites:
        """Where they lie, for our kernels. A layer's sites are always the same."""
        kernel_sites = self._sites.get(sites[0])
        if kernel_sites is None:
            from descant.model.lora.kernels import Sites

            layout = self.slabs.layout
            kernel_sites = self._sites[sites[0]] = Sites(
                a_begins=tuple(layout.a_offset[site] // layout.rank_bucket for site in sites),
                b_begins=tuple(layout.b_offset[site] // layout.rank_bucket for site in sites),
                widths=tuple(widths),
            )
        return kernel_sites

    @property
    def tiles(self) -> Tiles:
        if self._tiles is None:
            from descant.model.lora.kernels import make_tiles

            segments = tile_segments(self.segments, self.start)
            self._tiles = make_tiles(segments, self.end - self.start, self.slabs.compute_SP.device)
        return self._tiles

    @property
    def groups(self) -> _GroupTensors:
        if self._group_tensors is None:
            self._group_tensors = _GroupTensors.of(self)
        return self._group_tensors


class TiledRun(SegmentRun):
    """All tokens of a pass through our kernels, with tiles whose contents are filled in later: all that is asked of its
    segments is asked of the device then. A site that an adapter does not train has A = B = 0 there, which adds 0."""

    def __init__(self, tiles: Tiles, slabs: Slabs, num_tokens: int, *, requires_grad: bool):
        self.segments, self.products = (), "kernels"
        self.start, self.end = 0, num_tokens
        self.slabs = slabs
        self._tiles, self._sites = tiles, {}
        self._requires_grad = requires_grad

    def trained(self, sites: Sequence[int]) -> bool:
        return True

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupTensors:
    """What a grouped product needs, made on the host once a pass. ``offs_G`` int32, ``scale_T1`` float32.

    One group's products are plain ones. ``step``: the compute slots are ``first, first + step, …`` and a view of the
    slab serves; None: they are gathered. ``gradient_step`` likewise for the gradient slots, if every group has one.
    ``grad_groups``: indices of the groups that have a gradient slot, None for all.
    """

    offs_G: torch.Tensor
    scale_T1: torch.Tensor
    slots_G: torch.Tensor
    first: int
    step: int | None
    grad_groups: torch.Tensor | None
    gradients_L: torch.Tensor
    first_gradient: int
    gradient_step: int | None

    @staticmethod
    def of(run: SegmentRun) -> _GroupTensors:
        device, segments = run.slabs.compute_SP.device, run.segments
        slots = [segment.compute for segment in segments]
        gradients = [segment.gradient for segment in segments if segment.gradient is not None]
        grad_groups = [index for index, segment in enumerate(segments) if segment.gradient is not None]
        counts = torch.tensor([segment.end - segment.start for segment in segments])
        scale_T = torch.repeat_interleave(torch.tensor([segment.scale for segment in segments]), counts)
        return _GroupTensors(
            offs_G=to_device(counts.cumsum(0, dtype=torch.int32), device),
            scale_T1=to_device(scale_T[:, None], device),
            slots_G=to_device(torch.tensor(slots), device),
            first=slots[0],
            step=_step(slots),
            grad_groups=None if len(grad_groups) == len(segments) else to_device(torch.tensor(grad_groups), device),
            gradients_L=to_device(torch.tensor(gradients), device),
            first_gradient=gradients[0] if gradients else 0,
            gradient_step=_step(gradients) if len(gradients) == len(segments) else None,
        )


def tile_segments(segments: Sequence[LoraSegment], start: int = 0) -> list[TileSegment]:
    """Counted from token ``start``."""
    from descant.model.lora.kernels import TileSegment

    return [
        TileSegment(
            start=s.start - start,
            end=s.end - start,
            rank=s.rank_bucket,
            scale=s.scale,
            compute=_address(s.slabs.compute_SP, s.compute),
            gradient=None if s.gradient is None else _address(s.slabs.gradient_SP, s.gradient),
        )
        for s in segments
    ]


def _address(slab_SP: torch.Tensor, slot: int) -> int:
    return slab_SP.data_ptr() + slot * slab_SP.shape[1] * slab_SP.itemsize


def _step(slots: Sequence[int]) -> int | None:
    """By which the slots go up, if it is always the same."""
    steps = {after - before for before, after in pairwise(slots)} or {1}
    step = steps.pop()
    return step if not steps and step > 0 else None


def adjacent_runs(segments: Sequence[LoraSegment], products: Literal["loop", "grouped"]) -> list[SegmentRun]:
    groups: list[list[LoraSegment]] = []
    for segment in segments:
        last = groups[-1] if groups else None
        if (
            last is not None
            and last[-1].end == segment.start
            and last[-1].rank_bucket == segment.rank_bucket
            and len(last) < MAX_GROUPS
        ):
            last.append(segment)
        else:
            groups.append([segment])
    return [SegmentRun(group, products, group[0].start, group[-1].end) for group in groups]


def runs_by_width(segments: Sequence[LoraSegment], num_tokens: int) -> list[SegmentRun]:
    from descant.model.lora.kernels import MAX_RANK

    runs: list[SegmentRun] = []
    for is_narrow, group in groupby(segments, key=lambda segment: segment.rank_bucket <= MAX_RANK):
        own = list(group)
        if not is_narrow:
            runs += adjacent_runs(own, "grouped")
        elif len(own) == len(segments):
            runs.append(SegmentRun(own, "kernels", 0, num_tokens))
        else:
            runs.append(SegmentRun(own, "kernels", own[0].start, own[-1].end))
    return runs
