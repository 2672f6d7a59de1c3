"""A frozen linear layer with many adapters: base product, then each segment's low-rank addition in place.

``y[s] = x[s] Wᵀ + (32 / r_s) · (x[s] A_sᵀ) B_sᵀ`` for every segment s of the pass. The hand-written autograd function
saves x and the rank-wide intermediate only, and adds dA and dB straight into the segment's fp32 gradient row.

``_is_grouped`` chooses, in one place, how the segments' products are computed: a loop of plain products over views of
the slab, or one grouped product over all adapters of a run. The loop is as fast on CPU up to some 16 segments (measured
in bf16, 576 → 1536, rank 32: 16 segments of 16 tokens 617 µs against 575), on CUDA it costs four launches a segment.
Nothing here multiplies one adapter's numbers by zero for another's tokens: 0·NaN would carry one tenant's NaN to all.

In bf16 on CPU a row of every product has the same bits for any number of rows beside it (tried from 1 to 300 rows, 1
and 2 threads); in fp32 the library takes another path below 4 rows, which differs by 1e-6.

Legend: T tokens, I in, O out, R rank class, G adapters of a run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from descant.errors import ServerError
from descant.model import decode, packed
from descant.model.bank import AdapterBank, Layout, LoraSite
from descant.model.passes import Pass
from descant.types import SCALE_NUMERATOR

MAX_GROUPS = 1023
"""The CUDA kernel takes fewer than 1024 groups a call."""

MAX_EVEN_TOKENS = 8
"""Longer segments gain nothing from being batched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Tokens ``start:end`` with work row ``work``; ``trained[site]`` False: A = B = 0 there, nothing to compute."""

    start: int
    end: int
    rank_class: int
    work: int
    gradient: int | None
    scale: float
    trained: tuple[bool, ...]


@dataclass(slots=True, kw_only=True)
class _Slabs:
    """One rank class: its tensors, and where each site lies in a row."""

    work_SP: torch.Tensor
    gradient_SP: torch.Tensor
    layout: Layout


class _Run:
    """Segments of one rank class with no token between them, relative to the tokens of one call."""

    def __init__(self, segments: Sequence[_Segment], slabs: _Slabs):
        self.segments = tuple(segments)
        self.slabs = slabs
        self.start, self.end = segments[0].start, segments[-1].end
        self._group_tensors: _GroupTensors | None = None
        self._is_even: bool | None = None

    def trained(self, site_index: int) -> bool:
        return any(segment.trained[site_index] for segment in self.segments)

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

    @property
    def groups(self) -> _GroupTensors:
        if self._group_tensors is None:
            self._group_tensors = _GroupTensors.of(self)
        return self._group_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupTensors:
    """What a grouped product needs, made on the host once a pass. ``offs_G`` int32, ``scale_T1`` float32.

    ``step``: the work slots are ``first, first + step, …`` and a view of the slab serves; None: they are gathered.
    ``learning``: indices of the groups that have a gradient slot, None for all.
    """

    offs_G: torch.Tensor
    scale_T1: torch.Tensor
    slots_G: torch.Tensor
    first: int
    step: int | None
    learning: torch.Tensor | None
    gradients_L: torch.Tensor

    @staticmethod
    def of(run: _Run) -> _GroupTensors:
        device, segments = run.slabs.work_SP.device, run.segments
        slots = [segment.work for segment in segments]
        steps = {after - before for before, after in pairwise(slots)}
        step = steps.pop() if len(steps) == 1 else None
        learning = [index for index, segment in enumerate(segments) if segment.gradient is not None]
        counts = torch.tensor([segment.end - segment.start for segment in segments])
        scale_T = torch.repeat_interleave(torch.tensor([segment.scale for segment in segments]), counts)
        return _GroupTensors(
            offs_G=counts.cumsum(0).to(device, torch.int32),
            scale_T1=scale_T[:, None].to(device),
            slots_G=torch.tensor(slots, device=device),
            first=slots[0],
            step=step if step is not None and step > 0 else None,
            learning=None if len(learning) == len(segments) else torch.tensor(learning, device=device),
            gradients_L=torch.tensor([segments[index].gradient for index in learning], device=device),
        )


@dataclass(slots=True, kw_only=True)
class LoraPass:
    """A pass's segments, resolved against the bank once, for all layers.

    It holds the slabs of that moment: rows may be written between its forward and its backward (each row is its own
    business), but the bank must not grow.
    """

    segments: tuple[_Segment, ...]
    slabs: dict[int, _Slabs]
    products: Literal["auto", "loop", "grouped"] = "auto"
    _ranges: dict[tuple[int, int], tuple[_Run, ...]] = field(default_factory=dict)

    @staticmethod
    def of(pass_: Pass, bank: AdapterBank, *, products: Literal["auto", "loop", "grouped"] = "auto") -> LoraPass | None:
        """None when no token of the pass has an adapter. ``products`` other than auto is for comparing the two."""
        segments: list[_Segment] = []
        end = 0
        for index, segment in enumerate(pass_.segments):
            if not end <= segment.start <= segment.end <= pass_.num_tokens:
                raise ServerError(
                    f"segments[{index}] is {segment.start}:{segment.end} after {end}, in a pass of {pass_.num_tokens}"
                )
            end = segment.end
            if segment.start == segment.end:
                continue
            lora = bank.lora(segment.row)
            segments.append(
                _Segment(
                    start=segment.start,
                    end=segment.end,
                    rank_class=segment.row.rank_class,
                    work=segment.row.slot,
                    gradient=segment.gradient,
                    scale=SCALE_NUMERATOR / lora.rank,
                    trained=bank.trained(lora),
                )
            )
        if not segments:
            return None
        slabs = {
            rank_class: _Slabs(
                work_SP=bank.work_slab(rank_class),
                gradient_SP=bank.gradient_slab(rank_class),
                layout=bank.layout(rank_class),
            )
            for rank_class in {segment.rank_class for segment in segments}
        }
        return LoraPass(segments=tuple(segments), slabs=slabs, products=products)

    def runs(self, start: int, num_tokens: int) -> tuple[_Run, ...]:
        """The segments cut to the stream's tokens ``start:start+num_tokens`` and counted from ``start``."""
        runs = self._ranges.get((start, num_tokens))
        if runs is None:
            cut = [
                _cut(segment, max(segment.start - start, 0), min(segment.end - start, num_tokens))
                for segment in self.segments
                if segment.end > start and segment.start < start + num_tokens
            ]
            runs = self._ranges[(start, num_tokens)] = tuple(
                _Run(group, self.slabs[group[0].rank_class]) for group in _adjacent(cut)
            )
        return runs

    def select(self, indices: Sequence[int]) -> LoraPass | None:
        """For a stream made of this one's tokens ``indices`` (rising): each keeps its adapter and its gradient."""
        segments = []
        for segment in self.segments:
            start, end = bisect_left(indices, segment.start), bisect_left(indices, segment.end)
            if start < end:
                segments.append(_cut(segment, start, end))
        return LoraPass(segments=tuple(segments), slabs=self.slabs, products=self.products) if segments else None

    def trained(self, site_index: int) -> bool:
        return any(segment.trained[site_index] for segment in self.segments)


def _cut(segment: _Segment, start: int, end: int) -> _Segment:
    return _Segment(
        start=start,
        end=end,
        rank_class=segment.rank_class,
        work=segment.work,
        gradient=segment.gradient,
        scale=segment.scale,
        trained=segment.trained,
    )


def _adjacent(segments: Sequence[_Segment]) -> list[list[_Segment]]:
    groups: list[list[_Segment]] = []
    for segment in segments:
        last = groups[-1] if groups else None
        if (
            last is not None
            and last[-1].end == segment.start
            and last[-1].rank_class == segment.rank_class
            and len(last) < MAX_GROUPS
        ):
            last.append(segment)
        else:
            groups.append([segment])
    return groups


class LoraChannel:
    """How the pass reaches the layers (transformers hands keywords to attention only). A plain attribute, read in
    forward and kept in the autograd context: on CUDA, backward runs in another thread, where no context variable is
    seen. One per base model; ``BaseModel.trunk`` sets it for the length of the call."""

    current: LoraPass | decode.DecodeAdapters | None = None


class MultiLoraLinear(nn.Module):
    """Stands where ``base`` (``nn.Linear``, or transformers' transposed ``Conv1D``) stood."""

    def __init__(self, base: nn.Module, site_index: int, site: LoraSite, channel: LoraChannel):
        super().__init__()
        if not isinstance(base, nn.Linear | Conv1D):
            raise ServerError(f"{site.name} is a {type(base).__name__}, expected Linear or Conv1D")
        self.base = base
        self.site_index = site_index
        self.site = site
        self.channel = channel
        self.decode_site: decode.DecodeSite | None = None
        self.packed: torch.Tensor | None = None
        # The first layer's input needs no gradient and gradient rows are no autograd leaves: without an input that
        # asks for a gradient, autograd would record no backward at all.
        self._recorded = torch.zeros((), requires_grad=True)
        if self.weight_OI.shape != (site.out_features, site.in_features):
            raise ServerError(
                f"{site.name} has a weight of shape {tuple(self.weight_OI.shape)}, "
                f"expected ({site.out_features}, {site.in_features})"
            )

    @property
    def weight(self) -> torch.Tensor:
        """The base's, as it lies there (some transformers code asks a layer for its weight's dtype)."""
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    @property
    def weight_OI(self) -> torch.Tensor:
        return self.base.weight.t() if isinstance(self.base, Conv1D) else self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out] in the base's dtype, leading dims flattened to the pass's T."""
        lora = self.channel.current
        if isinstance(lora, decode.DecodeAdapters):
            return decode.forward(self, x, lora)
        if lora is None or not lora.trained(self.site_index):
            return self._product(x)
        x_TI = x.reshape(-1, self.site.in_features)
        if torch.is_grad_enabled():
            y_TO = _LoraLinear.apply(x_TI, self._recorded, self, lora)
        else:
            y_TO = self._product(x_TI)
            lora_add(x_TI, y_TO, self.site_index, lora)
        return y_TO.view(*x.shape[:-1], self.site.out_features)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None and packed.serves(self.packed, x):
            return packed.linear(x, self.packed, self.bias)
        y: torch.Tensor = self.base(x)
        return y


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: torch.Tensor, recorded: torch.Tensor, layer: MultiLoraLinear, lora: LoraPass
    ) -> torch.Tensor:
        y_TO = layer.base(x_TI)
        ctx.save_for_backward(x_TI, *lora_forward(x_TI, y_TO, layer.site_index, lora))
        ctx.layer, ctx.lora = layer, lora
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        dy_TO = grad_outputs[0].contiguous()  # a sum's gradient comes with strides of 0
        layer: MultiLoraLinear = ctx.layer
        x_TI, *saved = ctx.saved_tensors
        dx_TI = torch.mm(dy_TO, layer.weight_OI) if ctx.needs_input_grad[0] else None
        lora_backward(x_TI, dy_TO, saved, layer.site_index, ctx.lora, dx_TI=dx_TI)
        return dx_TI, None, None, None


def lora_forward(
    x_TI: torch.Tensor, y_TO: torch.Tensor, site_index: int, lora: LoraPass, *, start: int = 0
) -> list[torch.Tensor]:
    """Adds the adapters' part to ``y`` in place for the stream's tokens ``start:start+T``; returns what
    ``lora_backward`` needs (the rank-wide intermediates)."""
    saved = lora_intermediates(x_TI, y_TO.shape[1], site_index, lora, start=start)
    intermediates = iter(saved)
    for run in lora.runs(start, len(x_TI)):
        if not run.trained(site_index):
            continue
        if _is_grouped(lora, run, x_TI, y_TO.shape[1]):
            _grouped_expand(next(intermediates), y_TO, site_index, run)
        else:
            for segment in run.segments:
                if segment.trained[site_index]:
                    _segment_expand(next(intermediates), y_TO, site_index, run.slabs, segment)
    return saved


def lora_add(x_TI: torch.Tensor, y_TO: torch.Tensor, site_index: int, lora: LoraPass) -> None:
    """``lora_forward`` when nothing will be pushed back. On CPU a decode step's segments of a row each are one batched
    product a side instead of two calls a segment (8 adapters, 576 → 1536, rank 16: 155 against 347 µs): in bf16 with
    the same bits (tried over 2,240 shapes, 1 and 2 threads), in fp32 not always, so there the loop stays."""
    runs = lora.runs(0, len(x_TI))
    if not all(_is_batched(lora, run, x_TI, site_index) for run in runs):
        lora_forward(x_TI, y_TO, site_index, lora)
        return
    for run in runs:
        layout, tokens, num_groups = run.slabs.layout, slice(run.start, run.end), len(run.segments)
        a_GRI = _stacked(run, layout.a_offset[site_index], layout.rank_class, x_TI.shape[1])
        b_GOR = _stacked(run, layout.b_offset[site_index], y_TO.shape[1], layout.rank_class)
        h_GLR = torch.bmm(x_TI[tokens].view(num_groups, -1, x_TI.shape[1]), a_GRI.transpose(1, 2))
        y_GLO = y_TO[tokens].view(num_groups, -1, y_TO.shape[1])
        y_GLO.baddbmm_(h_GLR, b_GOR.transpose(1, 2), alpha=run.segments[0].scale)


def _is_batched(lora: LoraPass, run: _Run, x_TI: torch.Tensor, site_index: int) -> bool:
    return (
        run.is_even
        and not x_TI.is_cuda
        and x_TI.dtype == torch.bfloat16
        and lora.products == "auto"
        and all(segment.trained[site_index] for segment in run.segments)
    )


def lora_intermediates(
    x_TI: torch.Tensor, out_features: int, site_index: int, lora: LoraPass, *, start: int = 0
) -> list[torch.Tensor]:
    """The first half of ``lora_forward``, and what it returns (a backward over fewer tokens computes it again)."""
    saved: list[torch.Tensor] = []
    for run in lora.runs(start, len(x_TI)):
        if not run.trained(site_index):
            continue
        if _is_grouped(lora, run, x_TI, out_features):
            saved.append(_grouped_shrink(x_TI, site_index, run))
        else:
            trained = [segment for segment in run.segments if segment.trained[site_index]]
            saved.extend(_segment_shrink(x_TI, site_index, run.slabs, segment) for segment in trained)
    return saved


def lora_backward(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    saved: list[torch.Tensor],
    site_index: int,
    lora: LoraPass,
    *,
    dx_TI: torch.Tensor | None,
    start: int = 0,
) -> None:
    """Adds the adapters' part of dX to ``dx_TI`` (None: not wanted), and dA, dB to the segments' gradient rows."""
    intermediates = iter(saved)
    for run in lora.runs(start, len(x_TI)):
        if not run.trained(site_index):
            continue
        if _is_grouped(lora, run, x_TI, dy_TO.shape[1]):
            _grouped_backward(x_TI, dy_TO, next(intermediates), site_index, run, dx_TI)
        else:
            for segment in run.segments:
                if segment.trained[site_index]:
                    _segment_backward(x_TI, dy_TO, next(intermediates), site_index, run.slabs, segment, dx_TI)


def _is_grouped(lora: LoraPass, run: _Run, x_TI: torch.Tensor, out_features: int) -> bool:
    if lora.products != "auto":
        return lora.products == "grouped"
    return (
        x_TI.is_cuda
        and len(run.segments) > 1
        and x_TI.dtype == torch.bfloat16  # others fall back to a loop that waits for the device
        and x_TI.shape[1] % 8 == 0  # strides of 16 bytes, or the CUDA context dies
        and out_features % 8 == 0
    )


# ---- a loop of products over views of the slab: scales go into the accumulating product, so nothing is rounded twice


def _view(slab_SP: torch.Tensor, slot: int, offset: int, rows: int, columns: int) -> torch.Tensor:
    return slab_SP.as_strided((rows, columns), (columns, 1), slot * slab_SP.shape[1] + offset)


def _segment_shrink(x_TI: torch.Tensor, site_index: int, slabs: _Slabs, segment: _Segment) -> torch.Tensor:
    layout = slabs.layout
    a_RI = _view(slabs.work_SP, segment.work, layout.a_offset[site_index], layout.rank_class, x_TI.shape[1])
    return torch.mm(x_TI[segment.start : segment.end], a_RI.t())


def _segment_expand(h_TR: torch.Tensor, y_TO: torch.Tensor, site_index: int, slabs: _Slabs, segment: _Segment) -> None:
    layout = slabs.layout
    b_OR = _view(slabs.work_SP, segment.work, layout.b_offset[site_index], y_TO.shape[1], layout.rank_class)
    y_TO[segment.start : segment.end].addmm_(h_TR, b_OR.t(), alpha=segment.scale)


def _segment_backward(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    h_TR: torch.Tensor,
    site_index: int,
    slabs: _Slabs,
    segment: _Segment,
    dx_TI: torch.Tensor | None,
) -> None:
    layout, rank_class = slabs.layout, slabs.layout.rank_class
    a, b = layout.a_offset[site_index], layout.b_offset[site_index]
    x, dy = x_TI[segment.start : segment.end], dy_TO[segment.start : segment.end]
    dh_TR = torch.mm(dy, _view(slabs.work_SP, segment.work, b, dy_TO.shape[1], rank_class))
    if dx_TI is not None:
        a_RI = _view(slabs.work_SP, segment.work, a, rank_class, x_TI.shape[1])
        dx_TI[segment.start : segment.end].addmm_(dh_TR, a_RI, alpha=segment.scale)
    if segment.gradient is None:
        return
    da_RI = _view(slabs.gradient_SP, segment.gradient, a, rank_class, x_TI.shape[1])
    db_OR = _view(slabs.gradient_SP, segment.gradient, b, dy_TO.shape[1], rank_class)
    if x.dtype == da_RI.dtype:
        da_RI.addmm_(dh_TR.t(), x, alpha=segment.scale)
        db_OR.addmm_(dy.t(), h_TR, alpha=segment.scale)
    else:
        da_RI.add_(torch.mm(dh_TR.t(), x), alpha=segment.scale)
        db_OR.add_(torch.mm(dy.t(), h_TR), alpha=segment.scale)


# ---- grouped products over all adapters of a run: the same number of launches for 2 adapters as for 1000


def _stacked(run: _Run, offset: int, rows: int, columns: int) -> torch.Tensor:
    """[G, rows, columns] of the run's adapters: a view of the slab where their slots are evenly spaced."""
    slab_SP, groups = run.slabs.work_SP, run.groups
    row = slab_SP.shape[1]
    if groups.step is not None:
        shape, strides = (len(run.segments), rows, columns), (groups.step * row, columns, 1)
        return slab_SP.as_strided(shape, strides, groups.first * row + offset)
    parts_SE = slab_SP[:, offset : offset + rows * columns]
    return parts_SE.index_select(0, groups.slots_G).view(-1, rows, columns)


def _grouped_shrink(x_TI: torch.Tensor, site_index: int, run: _Run) -> torch.Tensor:
    """Exactly the run's tokens go in: rows at and beyond the last offset would come out uninitialised."""
    layout, groups = run.slabs.layout, run.groups
    a_GRI = _stacked(run, layout.a_offset[site_index], layout.rank_class, x_TI.shape[1])
    h_TR = F.grouped_mm(x_TI[run.start : run.end], a_GRI.transpose(1, 2), offs=groups.offs_G)
    return h_TR.mul_(groups.scale_T1)


def _grouped_expand(h_TR: torch.Tensor, y_TO: torch.Tensor, site_index: int, run: _Run) -> None:
    layout = run.slabs.layout
    b_GOR = _stacked(run, layout.b_offset[site_index], y_TO.shape[1], layout.rank_class)
    y_TO[run.start : run.end].add_(F.grouped_mm(h_TR, b_GOR.transpose(1, 2), offs=run.groups.offs_G))


def _grouped_backward(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    h_TR: torch.Tensor,
    site_index: int,
    run: _Run,
    dx_TI: torch.Tensor | None,
) -> None:
    layout, groups, tokens = run.slabs.layout, run.groups, slice(run.start, run.end)
    a, b = layout.a_offset[site_index], layout.b_offset[site_index]
    dy = dy_TO[tokens]
    b_GOR = _stacked(run, b, dy_TO.shape[1], layout.rank_class)
    dh_TR = F.grouped_mm(dy, b_GOR, offs=groups.offs_G).mul_(groups.scale_T1)
    if dx_TI is not None:
        a_GRI = _stacked(run, a, layout.rank_class, x_TI.shape[1])
        dx_TI[tokens].add_(F.grouped_mm(dh_TR, a_GRI, offs=groups.offs_G))
    if len(groups.gradients_L) == 0:
        return
    _add_to_rows(run, a, F.grouped_mm(dh_TR.t(), x_TI[tokens], offs=groups.offs_G))
    _add_to_rows(run, b, F.grouped_mm(dy.t(), h_TR, offs=groups.offs_G))


def _add_to_rows(run: _Run, offset: int, parts_GMN: torch.Tensor) -> None:
    groups = run.groups
    parts_GE = parts_GMN.flatten(1)
    if groups.learning is not None:
        parts_GE = parts_GE.index_select(0, groups.learning)
    gradient_SE = run.slabs.gradient_SP[:, offset : offset + parts_GE.shape[1]]
    gradient_SE.index_add_(0, groups.gradients_L, parts_GE.to(gradient_SE.dtype))
