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
from descant.model.bank import AdapterBank, Layout, LoraSite
from descant.model.passes import Handles, Pass
from descant.types import SCALE_NUMERATOR

MAX_GROUPS = 1023
"""The CUDA kernel takes fewer than 1024 groups a call."""


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
    sites: tuple[LoraSite, ...]


class _Run:
    """Segments of one rank class with no token between them, relative to the tokens of one call."""

    def __init__(self, segments: Sequence[_Segment], slabs: _Slabs):
        self.segments = tuple(segments)
        self.slabs = slabs
        self.start, self.end = segments[0].start, segments[-1].end
        self._group_tensors: _GroupTensors | None = None

    def trained(self, sites: Sequence[int]) -> bool:
        return any(segment.trained[site] for segment in self.segments for site in sites)

    @property
    def learns(self) -> bool:
        return any(segment.gradient is not None for segment in self.segments)

    @property
    def groups(self) -> _GroupTensors:
        if self._group_tensors is None:
            self._group_tensors = _GroupTensors.of(self)
        return self._group_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupTensors:
    """What a grouped product needs, made on the host once a pass. ``offs_G`` int32, ``scale_T1`` float32.

    One group's products are plain ones. ``step``: the work slots are ``first, first + step, …`` and a view of the slab
    serves; None: they are gathered. ``learning``: indices of the groups that have a gradient slot, None for all.
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


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class LoraPass:
    """A pass's segments, resolved against the bank once, for all layers.

    It holds the slabs of that moment: rows may be written between its forward and its backward (each row is its own
    business), but the bank must not grow.
    """

    segments: tuple[_Segment, ...]
    slabs: dict[int, _Slabs]
    products: Literal["auto", "loop", "grouped"] = "auto"
    handle: torch.Tensor = field(init=False, repr=False, compare=False)
    _ranges: dict[tuple[int, int], tuple[_Run, ...]] = field(default_factory=dict)
    _kept: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.handle = LORA_PASSES.take(self)

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
                sites=bank.sites,
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

    def whole(self, num_tokens: int) -> _Run | None:
        """The run that is all of a stream of ``num_tokens``."""
        runs = self.runs(0, num_tokens)
        return runs[0] if len(runs) == 1 and (runs[0].start, runs[0].end) == (0, num_tokens) else None

    def keep(self, sites: list[int], saved: list[torch.Tensor]) -> None:
        """For the backward of a compiled layer. A layer that runs twice is backed out of in reverse."""
        self._kept.setdefault(sites[0], []).append(saved)

    def kept(self, sites: list[int]) -> list[torch.Tensor]:
        return self._kept[sites[0]].pop()


LORA_PASSES: Handles[LoraPass] = Handles()


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


@dataclass(slots=True)
class LoraChannel:
    """How the pass reaches the layers (transformers hands keywords to attention only). A plain attribute, read in
    forward and kept in the autograd context: on CUDA, backward runs in another thread, where no context variable is
    seen. One per base model; ``BaseModel.trunk`` sets it for the length of the call.

    ``given``: an input that several layers share, and the outputs that wait for them (see ``MultiLoraLinear``).
    """

    current: LoraPass | None = None
    given: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None


class MultiLoraLinear(nn.Module):
    """Stands where ``base`` (``nn.Linear``, or transformers' transposed ``Conv1D``) stood.

    Layers that are called one after another on the same tensor (q, k, v; gate and up) are one product on the adapters'
    narrow side: the first to be called computes for all of ``together``, the others find their outputs in the channel.
    """

    def __init__(self, base: nn.Module, site_index: int, site: LoraSite, channel: LoraChannel):
        super().__init__()
        if not isinstance(base, nn.Linear | Conv1D):
            raise ServerError(f"{site.name} is a {type(base).__name__}, expected Linear or Conv1D")
        self.base = base
        self.site_index = site_index
        self.site = site
        self.channel = channel
        # The first layer's input needs no gradient and gradient rows are no autograd leaves: without an input that
        # asks for a gradient, autograd would record no backward at all.
        self._recorded = torch.zeros((), requires_grad=True)
        self.position = 0
        self._together: tuple[MultiLoraLinear, ...] = (self,)
        # A number that differs from layer to layer would make a graph for each: the sites are a tensor's contents.
        self._sites = torch.tensor([site_index])
        if self.weight_OI.shape != (site.out_features, site.in_features):
            raise ServerError(
                f"{site.name} has a weight of shape {tuple(self.weight_OI.shape)}, "
                f"expected ({site.out_features}, {site.in_features})"
            )

    @staticmethod
    def join(layers: Sequence[MultiLoraLinear]) -> None:
        """These are called on one tensor, in this order."""
        for position, layer in enumerate(layers):
            layer.position = position
            layer._together = tuple(layers)
            layer._sites = torch.tensor([each.site_index for each in layers])

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
        if lora is None or not (torch.compiler.is_compiling() or lora.trained(self.site_index)):
            return self.base(x)
        given = self.channel.given
        if self.position > 0 and given is not None and given[0] is x:
            y_TO = given[1][self.position]
            if self.position == len(self._together) - 1:
                self.channel.given = None
        else:
            ys = self._outputs(x.reshape(-1, self.site.in_features), lora)
            y_TO = ys[self.position]
            if self.position == 0 and len(ys) > 1:
                self.channel.given = (x, ys)
        return y_TO.view(*x.shape[:-1], self.site.out_features)

    def _outputs(self, x_TI: torch.Tensor, lora: LoraPass) -> tuple[torch.Tensor, ...]:
        """Of all layers of ``together``."""
        parts: list[torch.Tensor | None] = []
        for layer in self._together:
            parts += [layer.weight_OI, layer.bias]
        if torch.is_grad_enabled():
            outputs: tuple[torch.Tensor, ...] = _LoraLinears.apply(
                x_TI, self._recorded, lora.handle, self._sites, *parts
            )
            return outputs
        ys, _ = _linears(x_TI, lora.handle, self._sites, parts)
        return tuple(ys)


def _linears(
    x_TI: torch.Tensor, handle: torch.Tensor, sites: torch.Tensor, parts: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs, and what ``lora_backward`` wants to have kept (in a compiled layer the pass keeps it). ``parts``:
    weight [O, I] and bias [O] or None of each site."""
    ys = [F.linear(x_TI, weight, bias) for weight, bias in zip(parts[::2], parts[1::2])]  # type: ignore[arg-type]
    if not torch.compiler.is_compiling():
        return ys, lora_forward(x_TI, ys, sites.tolist(), LORA_PASSES[handle])
    additions = torch.ops.descant.lora(x_TI, handle, sites, [y.shape[1] for y in ys])
    return [y + addition for y, addition in zip(ys, additions)], []


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        recorded: torch.Tensor,
        handle: torch.Tensor,
        sites: torch.Tensor,
        *parts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ys, saved = _linears(x_TI, handle, sites, parts)
        ctx.save_for_backward(x_TI, handle, sites, *parts[::2], *saved)
        ctx.num_sites = len(ys)
        if not torch.compiler.is_compiling():
            ctx.lora = LORA_PASSES[handle]
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, handle, sites, *rest = ctx.saved_tensors
        weights, saved = rest[: ctx.num_sites], rest[ctx.num_sites :]
        dys = [dy.contiguous() for dy in grad_outputs]  # a sum's gradient comes with strides of 0
        nothing = (None,) * (3 + 2 * ctx.num_sites)
        if torch.compiler.is_compiling():
            dx_TI = torch.ops.descant.lora_backward(x_TI, dys, handle, sites)
            for dy, weight in zip(dys, weights):
                dx_TI = dx_TI + torch.mm(dy, weight)
            return dx_TI, *nothing
        dx_TI = None
        if ctx.needs_input_grad[0]:
            dx_TI = torch.mm(dys[0], weights[0])
            for dy, weight in zip(dys[1:], weights[1:]):
                dx_TI.addmm_(dy, weight)
        lora_backward(x_TI, dys, saved, sites.tolist(), ctx.lora, dx_TI=dx_TI)
        return dx_TI, *nothing


# ---- the adapters' part of layers that share an input, run by run


def lora_forward(
    x_TI: torch.Tensor, ys: Sequence[torch.Tensor], sites: Sequence[int], lora: LoraPass, *, start: int = 0
) -> list[torch.Tensor]:
    """Adds the adapters' part to each ``y`` [T, out] in place, for the stream's tokens ``start:start+T``; returns what
    ``lora_backward`` needs (the rank-wide intermediates)."""
    saved = lora_intermediates(x_TI, [y.shape[1] for y in ys], sites, lora, start=start)
    intermediates = iter(saved)
    for run in lora.runs(start, len(x_TI)):
        if not run.trained(sites):
            continue
        if _is_grouped(lora, run, x_TI, [y.shape[1] for y in ys]):
            h_TR = next(intermediates)
            for index, y_TO in enumerate(ys):
                _grouped_expand(h_TR, y_TO, index, sites[index], run)
            continue
        for site, y_TO in zip(sites, ys):
            for segment in run.segments:
                if segment.trained[site]:
                    _segment_expand(next(intermediates), y_TO, site, run.slabs, segment)
    return saved


def lora_intermediates(
    x_TI: torch.Tensor, widths: Sequence[int], sites: Sequence[int], lora: LoraPass, *, start: int = 0
) -> list[torch.Tensor]:
    """The first half of ``lora_forward``, and what it returns (a backward over fewer tokens computes it again)."""
    saved: list[torch.Tensor] = []
    for run in lora.runs(start, len(x_TI)):
        if not run.trained(sites):
            continue
        if _is_grouped(lora, run, x_TI, widths):
            saved.append(_grouped_shrink(x_TI, sites, run))
            continue
        for site in sites:
            trained = [segment for segment in run.segments if segment.trained[site]]
            saved.extend(_segment_shrink(x_TI, site, run.slabs, segment) for segment in trained)
    return saved


def lora_backward(
    x_TI: torch.Tensor,
    dys: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    sites: Sequence[int],
    lora: LoraPass,
    *,
    dx_TI: torch.Tensor | None,
    start: int = 0,
) -> None:
    """Adds the adapters' part of dX to ``dx_TI`` (None: not wanted), and dA, dB to the segments' gradient rows."""
    intermediates = iter(saved)
    for run in lora.runs(start, len(x_TI)):
        if not run.trained(sites):
            continue
        if _is_grouped(lora, run, x_TI, [dy.shape[1] for dy in dys]):
            dh_TR = _grouped_backward(x_TI, dys, next(intermediates), sites, run)
            if dx_TI is not None:
                _grouped_dx(dh_TR, dx_TI, sites, run)
            continue
        for site, dy_TO in zip(sites, dys):
            for segment in run.segments:
                if segment.trained[site]:
                    _segment_backward(x_TI, dy_TO, next(intermediates), site, run.slabs, segment, dx_TI)


# ---- the same as operators of a compiled layer: what they return is added there, where a neighbour reads it anyway


def _lora_op(x_TI: torch.Tensor, handle: torch.Tensor, sites: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """The adapters' part of each output, to be added to the base's."""
    lora, indices = LORA_PASSES[handle], sites.tolist()
    run = lora.whole(len(x_TI))
    if run is not None and run.trained(indices) and _is_grouped(lora, run, x_TI, widths):
        h_TR = _grouped_shrink(x_TI, indices, run)
        lora.keep(indices, [h_TR])
        return [_grouped_addition(h_TR, width, i, site, run) for i, (site, width) in enumerate(zip(indices, widths))]
    ys = [x_TI.new_zeros(len(x_TI), width) for width in widths]
    lora.keep(indices, lora_forward(x_TI, ys, indices, lora))
    return ys


def _lora_backward_op(
    x_TI: torch.Tensor, dys: list[torch.Tensor], handle: torch.Tensor, sites: torch.Tensor
) -> torch.Tensor:
    """The adapters' part of dX. dA and dB are added to gradient rows, of which the graph knows nothing."""
    lora, indices = LORA_PASSES[handle], sites.tolist()
    saved = lora.kept(indices)
    run = lora.whole(len(x_TI))
    if run is not None and run.trained(indices) and _is_grouped(lora, run, x_TI, [dy.shape[1] for dy in dys]):
        return _grouped_dx(_grouped_backward(x_TI, dys, saved[0], indices, run), None, indices, run)
    dx_TI = torch.zeros_like(x_TI)
    lora_backward(x_TI, dys, saved, indices, lora, dx_TI=dx_TI)
    return dx_TI


_LIBRARY = torch.library.Library("descant", "FRAGMENT")
_LIBRARY.define("lora(Tensor x, Tensor handle, Tensor sites, SymInt[] widths) -> Tensor[]")
_LIBRARY.define("lora_backward(Tensor x, Tensor[] dys, Tensor handle, Tensor sites) -> Tensor")
_LIBRARY.impl("lora", _lora_op, "CompositeExplicitAutograd")
_LIBRARY.impl("lora_backward", _lora_backward_op, "CompositeExplicitAutograd")


@torch.library.register_fake("descant::lora", lib=_LIBRARY)
def _lora_shapes(
    x_TI: torch.Tensor, handle: torch.Tensor, sites: torch.Tensor, widths: list[int]
) -> list[torch.Tensor]:
    return [x_TI.new_empty(x_TI.shape[0], width) for width in widths]


@torch.library.register_fake("descant::lora_backward", lib=_LIBRARY)
def _lora_backward_shapes(x_TI: torch.Tensor, *rest: object) -> torch.Tensor:
    return x_TI.new_empty(x_TI.shape)


def _is_grouped(lora: LoraPass, run: _Run, x_TI: torch.Tensor, widths: Sequence[int]) -> bool:
    if lora.products != "auto":
        return lora.products == "grouped"
    return (
        x_TI.is_cuda
        and x_TI.dtype == torch.bfloat16  # others fall back to a loop that waits for the device
        and x_TI.shape[1] % 8 == 0  # strides of 16 bytes, or the CUDA context dies
        and all(width % 8 == 0 for width in widths)
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


def _times(run: _Run, x_TK: torch.Tensor, weights_GNK: torch.Tensor) -> torch.Tensor:
    """[T, N]: every group's rows by its own weight. Exactly the run's tokens go in: rows at and beyond the last offset
    would come out uninitialised."""
    if len(run.segments) == 1:
        return torch.mm(x_TK, weights_GNK[0].t())
    return F.grouped_mm(x_TK, weights_GNK.transpose(1, 2), offs=run.groups.offs_G)


def _outer(run: _Run, a_TM: torch.Tensor, b_TN: torch.Tensor) -> torch.Tensor:
    """[G, M, N]: the sum over every group's rows. A single group's comes in float32 where the library can."""
    if len(run.segments) > 1:
        return F.grouped_mm(a_TM.t(), b_TN, offs=run.groups.offs_G)
    if a_TM.is_cuda and a_TM.dtype != torch.float32:
        return torch.mm(a_TM.t(), b_TN, out_dtype=torch.float32).unsqueeze(0)
    return torch.mm(a_TM.t(), b_TN).unsqueeze(0)


def _all_a(run: _Run, sites: Sequence[int], in_features: int) -> torch.Tensor:
    """[G, sites · R, in]: the A's of all sites, one above the other."""
    layout = run.slabs.layout
    parts = [_stacked(run, layout.a_offset[site], layout.rank_class, in_features) for site in sites]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _b(run: _Run, site: int, out_features: int) -> torch.Tensor:
    """[G, out, R]"""
    return _stacked(run, run.slabs.layout.b_offset[site], out_features, run.slabs.layout.rank_class)


def _own_ranks(h_TR: torch.Tensor, index: int, run: _Run) -> torch.Tensor:
    rank_class = run.slabs.layout.rank_class
    return h_TR[:, index * rank_class : (index + 1) * rank_class]


def _scaled(h_TR: torch.Tensor, run: _Run) -> torch.Tensor:
    return h_TR.mul_(run.segments[0].scale if len(run.segments) == 1 else run.groups.scale_T1)


def _grouped_shrink(x_TI: torch.Tensor, sites: Sequence[int], run: _Run) -> torch.Tensor:
    """Scaled, [run's tokens, sites · R]: one reading of x for all sites."""
    return _scaled(_times(run, x_TI[run.start : run.end], _all_a(run, sites, x_TI.shape[1])), run)


def _grouped_addition(h_TR: torch.Tensor, out_features: int, index: int, site: int, run: _Run) -> torch.Tensor:
    return _times(run, _own_ranks(h_TR, index, run), _b(run, site, out_features))


def _grouped_expand(h_TR: torch.Tensor, y_TO: torch.Tensor, index: int, site: int, run: _Run) -> None:
    y_TO = y_TO[run.start : run.end]
    if len(run.segments) == 1:
        y_TO.addmm_(_own_ranks(h_TR, index, run), _b(run, site, y_TO.shape[1])[0].t())
    else:
        y_TO.add_(_grouped_addition(h_TR, y_TO.shape[1], index, site, run))


def _grouped_backward(
    x_TI: torch.Tensor, dys: Sequence[torch.Tensor], h_TR: torch.Tensor, sites: Sequence[int], run: _Run
) -> torch.Tensor:
    """dA and dB into the gradient rows; returns the scaled dh [run's tokens, sites · R]."""
    layout, tokens = run.slabs.layout, slice(run.start, run.end)
    dhs = [_times(run, dy[tokens], _b(run, site, dy.shape[1]).transpose(1, 2)) for site, dy in zip(sites, dys)]
    dh_TR = _scaled(dhs[0] if len(dhs) == 1 else torch.cat(dhs, dim=1), run)
    if run.learns:
        da_GRI = _outer(run, dh_TR, x_TI[tokens])
        for index, (site, dy) in enumerate(zip(sites, dys)):
            own = slice(index * layout.rank_class, (index + 1) * layout.rank_class)
            _add_to_rows(run, layout.a_offset[site], da_GRI[:, own])
            _add_to_rows(run, layout.b_offset[site], _outer(run, dy[tokens], _own_ranks(h_TR, index, run)))
    return dh_TR


def _grouped_dx(dh_TR: torch.Tensor, dx_TI: torch.Tensor | None, sites: Sequence[int], run: _Run) -> torch.Tensor:
    """The adapters' part of dX, added to ``dx_TI`` where one is given."""
    in_features = run.slabs.sites[sites[0]].in_features
    a_GIR = _all_a(run, sites, in_features).transpose(1, 2)
    if dx_TI is None:
        return _times(run, dh_TR, a_GIR)
    dx_TI = dx_TI[run.start : run.end]
    return dx_TI.addmm_(dh_TR, a_GIR[0].t()) if len(run.segments) == 1 else dx_TI.add_(_times(run, dh_TR, a_GIR))


def _add_to_rows(run: _Run, offset: int, parts_GMN: torch.Tensor) -> None:
    parts_GE = parts_GMN.flatten(1)
    gradient_SE = run.slabs.gradient_SP[:, offset : offset + parts_GE.shape[1]]
    if len(run.segments) == 1:
        gradient_SE[run.segments[0].gradient].add_(parts_GE[0])
        return
    groups = run.groups
    if groups.learning is not None:
        parts_GE = parts_GE.index_select(0, groups.learning)
    gradient_SE.index_add_(0, groups.gradients_L, parts_GE.to(gradient_SE.dtype))
