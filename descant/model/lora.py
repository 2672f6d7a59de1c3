"""A frozen linear layer with many adapters: the base's product and each segment's low-rank one, in one tensor.

``y[s] = x[s] Wᵀ + (32 / r_s) · (x[s] A_sᵀ) B_sᵀ`` for every segment s of the pass, the sum rounded once. The
hand-written autograd function saves x and the rank-wide intermediate only, and adds dA and dB straight into the
segment's fp32 gradient row. In a compiled layer it is an operator that knows its pass by a number (``Handles``) and its
sites by a tensor, so that one graph serves all layers and all passes; the intermediates stay with the pass then.

``_products`` chooses how the segments' products are computed: a loop of plain products over views of the slab, one
grouped product over all adapters of a run, or on CUDA a kernel of our own (``lora_kernels``), for all adapters whose
rank is narrow enough and for tokens without one. The loop is as fast on CPU up to some 16 segments (measured in bf16,
576 → 1536, rank 32: 16 segments of 16 tokens 617 µs against 575), on CUDA it costs four launches a segment and is for
what the grouped product does not take.
Nothing here multiplies one adapter's numbers by zero for another's tokens: 0·NaN would carry one tenant's NaN to all.

In bf16 on CPU a row of every product has the same bits for any number of rows beside it (tried up to 300 rows, 1 and
2 threads), but alone it takes another path, where one output in 10,000 (from some 1,500 input features on; of an
adapter's second product one in 100,000) is rounded the other way. So it is in float32, whose products are oneDNN's
(``prepacked.is_onednn``; in MKL fewer than 4 rows differ by 1e-6). So few rows are filled up with zeros.

Legend: T tokens, I in, O out, W out and fused LoRA-A columns, R rank bucket, G adapters of a run.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import Layout, LoraSite
from descant.adapters.slots import ComputeSlot, GradientSlot
from descant.errors import ServerError
from descant.model import paged_batch, prepacked
from descant.model.forward_batch import MIN_ROWS, ForwardBatch, Handles, to_device
from descant.types import SCALE_NUMERATOR

if TYPE_CHECKING:
    from descant.model.lora_kernels import Sites, Tiles, TileSegment

MAX_GROUPS = 1023
"""The CUDA kernel takes fewer than 1024 groups a call."""

Products = Literal["loop", "grouped", "kernels"]

WITH_SHARED_MEMORY = frozenset({(8, 0), (9, 0), (10, 0)})
"""Capabilities of devices on which the kernels for narrow ranks find the 160 KiB that they need at most."""

MAX_EVEN_TOKENS = 8
"""Longer segments gain nothing from being batched."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slabs:
    """One rank bucket: its tensors, and where each site lies in a row."""

    compute_SP: torch.Tensor
    gradient_SP: torch.Tensor
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Tokens ``start:end`` with row ``compute`` of their rank bucket's ``slabs``; ``trained[site]`` False: A = B = 0
    there, nothing to compute."""

    start: int
    end: int
    slabs: _Slabs
    compute: ComputeSlot
    gradient: GradientSlot | None
    scale: float
    trained: tuple[bool, ...]

    @property
    def rank_bucket(self) -> int:
        return self.slabs.layout.rank_bucket


class _SegmentRun:
    """Segments relative to the tokens of one call, and how their products are computed. Through kernels of our own:
    segments of any classes that are narrow enough, with what lies between them. Else: of one class, with no token
    between them."""

    def __init__(self, segments: Sequence[_Segment], products: Products, start: int, end: int):
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
            from descant.model.lora_kernels import Sites

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
            from descant.model.lora_kernels import make_tiles

            segments = _tile_segments(self.segments, self.start)
            self._tiles = make_tiles(segments, self.end - self.start, self.slabs.compute_SP.device)
        return self._tiles

    @property
    def groups(self) -> _GroupTensors:
        if self._group_tensors is None:
            self._group_tensors = _GroupTensors.of(self)
        return self._group_tensors


class _TiledRun(_SegmentRun):
    """All tokens of a pass through our kernels, with tiles whose contents are filled in later: all that is asked of its
    segments is asked of the device then. A site that an adapter does not train has A = B = 0 there, which adds 0."""

    def __init__(self, tiles: Tiles, slabs: _Slabs, num_tokens: int, *, requires_grad: bool):
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
    def of(run: _SegmentRun) -> _GroupTensors:
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


def _tile_segments(segments: Sequence[_Segment], start: int = 0) -> list[TileSegment]:
    """Counted from token ``start``."""
    from descant.model.lora_kernels import TileSegment

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


@cache
def has_kernels(device: torch.device) -> bool:
    """Of our own, for narrow ranks."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) in WITH_SHARED_MEMORY


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class LoraBatch:
    """A pass's segments, resolved against the bank once, for all layers.

    It holds the slabs of that moment: rows may be written between its forward and its backward (each row is its own
    business), but the bank must not grow.
    """

    segments: tuple[_Segment, ...]
    products: Literal["auto", "loop", "grouped"] = "auto"
    handle: torch.Tensor = field(init=False, repr=False, compare=False)
    _tiled: _TiledRun | None = None
    """Instead of segments (``of_tiles``)."""
    _ranges: dict[tuple[int, int, Products], tuple[_SegmentRun, ...]] = field(default_factory=dict)
    _saved: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.handle = LORA_BATCHES.take(self)

    @staticmethod
    def of(
        batch: ForwardBatch, bank: AdapterBank, *, products: Literal["auto", "loop", "grouped"] = "auto"
    ) -> LoraBatch | None:
        """None when no token of the pass has an adapter. ``products`` other than auto is for comparing the two."""
        segments: list[_Segment] = []
        slabs: dict[int, _Slabs] = {}
        end = 0
        for index, segment in enumerate(batch.segments):
            if not end <= segment.start <= segment.end <= batch.num_tokens:
                raise ServerError(
                    f"segments[{index}] is {segment.start}:{segment.end} after {end}, in a pass of {batch.num_tokens}"
                )
            end = segment.end
            if segment.start == segment.end:
                continue
            lora, rank_bucket = bank.lora(segment.row), segment.row.rank_bucket
            if rank_bucket not in slabs:
                slabs[rank_bucket] = _Slabs(
                    compute_SP=bank.compute_slab(rank_bucket),
                    gradient_SP=bank.gradient_slab(rank_bucket),
                    layout=bank.layout(rank_bucket),
                )
            segments.append(
                _Segment(
                    start=segment.start,
                    end=segment.end,
                    slabs=slabs[rank_bucket],
                    compute=segment.row.slot,
                    gradient=segment.gradient,
                    scale=SCALE_NUMERATOR / lora.rank,
                    trained=bank.trained(lora),
                )
            )
        return LoraBatch(segments=tuple(segments), products=products) if segments else None

    @staticmethod
    def of_tiles(tiles: Tiles, bank: AdapterBank, num_tokens: int, *, requires_grad: bool) -> LoraBatch:
        """Of a pass that is captured once and computed with other adapters each time (``model.pass_graphs``): what
        ``tiles`` hold by then."""
        rank_bucket = tiles.rank
        slabs = _Slabs(
            compute_SP=bank.compute_slab(rank_bucket),
            gradient_SP=bank.gradient_slab(rank_bucket),
            layout=bank.layout(rank_bucket),
        )
        lora = LoraBatch(segments=())
        lora._tiled = _TiledRun(tiles, slabs, num_tokens, requires_grad=requires_grad)
        return lora

    def tile_segments(self) -> list[TileSegment]:
        return _tile_segments(self.segments)

    @property
    def widest(self) -> int:
        """The largest rank bucket among its segments."""
        return max(segment.rank_bucket for segment in self.segments)

    def runs(self, start: int, num_tokens: int, products: Products) -> tuple[_SegmentRun, ...]:
        """The segments cut to the stream's tokens ``start:start+num_tokens`` and counted from ``start``. Where our
        kernels take all of them, one run is all of these tokens."""
        if self._tiled is not None:
            if (start, num_tokens, products) != (0, self._tiled.end, "kernels"):
                raise ServerError(f"captured adapters: {products} over {num_tokens} tokens from {start}")
            return (self._tiled,)
        runs = self._ranges.get((start, num_tokens, products))
        if runs is None:
            cut = [
                replace(segment, start=max(segment.start - start, 0), end=min(segment.end - start, num_tokens))
                for segment in self.segments
                if segment.end > start and segment.start < start + num_tokens
            ]
            runs = tuple(_narrow_and_wide(cut, num_tokens) if products == "kernels" else _adjacent(cut, products))
            self._ranges[(start, num_tokens, products)] = runs
        return runs

    def select(self, indices: Sequence[int]) -> LoraBatch | None:
        """For a stream made of this one's tokens ``indices`` (rising): each keeps its adapter and its gradient."""
        segments = []
        for segment in self.segments:
            start, end = bisect_left(indices, segment.start), bisect_left(indices, segment.end)
            if start < end:
                segments.append(replace(segment, start=start, end=end))
        return LoraBatch(segments=tuple(segments), products=self.products) if segments else None

    def trained(self, site_index: int) -> bool:
        return self._tiled is not None or any(segment.trained[site_index] for segment in self.segments)

    def base_only(self, start: int, num_tokens: int, sites: Sequence[int]) -> list[tuple[int, int]]:
        """Of the stream's tokens ``start:start+num_tokens``, counted from ``start``: those that no adapter changes at
        ``sites``."""
        if self._tiled is not None:  # not known: what adapters add there is 0, and is rounded with the base's part
            return []
        found, end = [], 0
        for segment in self.segments:
            first, last = max(segment.start - start, 0), min(segment.end - start, num_tokens)
            if first < last and any(segment.trained[site] for site in sites):
                found.append((end, first))
                end = last
        return [(first, last) for first, last in [*found, (end, num_tokens)] if first < last]

    def save_for_backward(self, sites: list[int], saved: list[torch.Tensor]) -> None:
        """Of a compiled layer. One that runs twice is popped in reverse."""
        self._saved.setdefault(sites[0], []).append(saved)

    def pop_saved(self, sites: list[int]) -> list[torch.Tensor]:
        return self._saved[sites[0]].pop()


LORA_BATCHES: Handles[LoraBatch] = Handles()


def _adjacent(segments: Sequence[_Segment], products: Literal["loop", "grouped"]) -> list[_SegmentRun]:
    groups: list[list[_Segment]] = []
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
    return [_SegmentRun(group, products, group[0].start, group[-1].end) for group in groups]


def _narrow_and_wide(segments: Sequence[_Segment], num_tokens: int) -> list[_SegmentRun]:
    from descant.model.lora_kernels import MAX_RANK

    runs: list[_SegmentRun] = []
    for is_narrow, group in groupby(segments, key=lambda segment: segment.rank_bucket <= MAX_RANK):
        own = list(group)
        if not is_narrow:
            runs += _adjacent(own, "grouped")
        elif len(own) == len(segments):
            runs.append(_SegmentRun(own, "kernels", 0, num_tokens))
        else:
            runs.append(_SegmentRun(own, "kernels", own[0].start, own[-1].end))
    return runs


@dataclass(slots=True)
class ForwardContext:
    """How a forward batch's adapters reach the layers (transformers hands keywords to attention only). A plain
    attribute, read in forward and kept in the autograd context: on CUDA, backward runs in another thread, where no
    context variable is seen. One per base model; ``BaseModel.decoder_forward`` sets it for the length of the call.

    ``num_recomputed``: of the first decoder layers, which keep no activations (``model.activation_checkpointing``).
    ``joined_outputs``: an input that several layers share, and their outputs (see ``MultiLoraLinear``).
    """

    current: LoraBatch | paged_batch.PagedBatch | None = None
    num_recomputed: int = 0
    joined_outputs: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None


class MultiLoraLinear(nn.Module):
    """Stands where ``base`` (``nn.Linear``, or transformers' transposed ``Conv1D``) stood.

    Layers that are called one after another on the same tensor (q, k, v; gate and up) can be joined: their weights then
    lie one above the other and are one product, and so are the adapters' on the narrow side. The first to be called
    computes for all, the others find their outputs in the forward_context.
    """

    def __init__(self, base: nn.Module, site_index: int, site: LoraSite, forward_context: ForwardContext):
        super().__init__()
        if not isinstance(base, nn.Linear | Conv1D):
            raise ServerError(f"{site.name} is a {type(base).__name__}, expected Linear or Conv1D")
        self.base = base
        self.site_index = site_index
        self.site = site
        self.forward_context = forward_context
        self.sites: tuple[int, ...] = (site_index,)
        """Of all layers that are joined with this one, in order."""
        self.prepacked: torch.Tensor | None = None
        """None of a layer that is joined."""
        self.fused_WI: torch.Tensor | None = None
        """The joint weight with rows for LoRA A's behind it, which decode steps take (``model.fused_lora_a``)."""
        # The first layer's input needs no gradient and gradient rows are no autograd leaves: without an input that
        # asks for a gradient, autograd would record no backward at all.
        self._grad_anchor = torch.zeros((), requires_grad=True)
        self._position = 0
        self._widths: list[int] = [site.out_features]
        self._joint: tuple[torch.Tensor, torch.Tensor | None] | None = None
        # A number that differs from layer to layer would make a graph for each: the sites are a tensor's contents.
        self._sites = torch.tensor([site_index])
        if self.weight_OI.shape != (site.out_features, site.in_features):
            raise ServerError(
                f"{site.name} has a weight of shape {tuple(self.weight_OI.shape)}, "
                f"expected ({site.out_features}, {site.in_features})"
            )

    @staticmethod
    def join(layers: Sequence[MultiLoraLinear], *, fused_columns: int = 0) -> None:
        """They are called on one tensor, in this order. Their weights become parts of one tensor; nothing is joined
        where biases, kinds or dtypes differ.

        Behind them lie ``fused_columns`` of zeros for each layer, also for one that is alone. Not where there are
        biases: a product with one that leaves room in its rows is two kernels."""
        bases = [layer.base for layer in layers]
        if len({(type(base), base.weight.dtype, base.bias is None) for base in bases}) > 1 or not isinstance(
            bases[0], nn.Linear
        ):
            return
        bias_O = None if bases[0].bias is None else torch.cat([base.bias.data for base in bases])
        num_out = sum(layer.site.out_features for layer in layers)
        num_fused = fused_columns * len(layers) if bias_O is None else 0
        if len(layers) == 1 and num_fused == 0:
            return
        weight_WI = bases[0].weight.data.new_zeros(num_out + num_fused, layers[0].site.in_features)
        weight_OI = torch.cat([base.weight.data for base in bases], out=weight_WI[:num_out])
        for layer in layers:
            layer.fused_WI = weight_WI if num_fused else None
        if len(layers) == 1:
            bases[0].weight.data = weight_OI
            return
        start = 0
        for position, layer in enumerate(layers):
            end = start + layer.site.out_features
            layer.base.weight.data = weight_OI[start:end]
            if bias_O is not None:
                layer.base.bias.data = bias_O[start:end]
            layer._position, start = position, end
            layer._widths = [each.site.out_features for each in layers]
            layer.sites = tuple(each.site_index for each in layers)
            layer._sites = torch.tensor(layer.sites)
            layer._joint, layer.prepacked = (weight_OI, bias_O), None

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
        lora = self.forward_context.current
        if not isinstance(lora, paged_batch.PagedBatch) and (
            lora is None or not (torch.compiler.is_compiling() or lora.trained(self.site_index))
        ):
            return self._base_alone(x)
        if self._joint is None:
            y_TO = self._output(x, self.weight_OI, self.bias, lora)
        else:
            given = self.forward_context.joined_outputs
            if self._position > 0 and given is not None and given[0] is x:
                outputs = given[1]
            else:
                outputs = self._output(x, *self._joint, lora).split(self._widths, dim=1)
            self.forward_context.joined_outputs = (x, outputs) if self._position < len(self._widths) - 1 else None
            y_TO = outputs[self._position]
        return y_TO.view(*x.shape[:-1], self.site.out_features)

    def joined(self, x: torch.Tensor) -> torch.Tensor | None:
        """[T, sum of widths]: what this layer and those joined with it make of ``x``, uncut. None where they are not
        computed at once: nothing is joined behind this one, or the pass is none of training's."""
        lora = self.forward_context.current
        if self._joint is None or self._position > 0 or lora is None or isinstance(lora, paged_batch.PagedBatch):
            return None
        if not (torch.compiler.is_compiling() or any(lora.trained(site) for site in self.sites)):
            return None
        return self._output(x, *self._joint, lora)

    def _base_alone(self, x: torch.Tensor) -> torch.Tensor:
        if self.prepacked is not None and prepacked.serves(self.prepacked, x):
            return prepacked.linear(x, self.prepacked, self.bias)
        if prepacked.is_onednn(x):
            return prepacked.product(x, self.weight_OI, self.bias, None)
        y: torch.Tensor = self.base(x)
        return y

    def _output(
        self,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        lora: LoraBatch | paged_batch.PagedBatch,
    ) -> torch.Tensor:
        """Of all layers that are joined: [T, sum of widths]."""
        x_TI = x.reshape(-1, self.site.in_features)
        if isinstance(lora, paged_batch.PagedBatch):
            weight_WI = weight_OI if self.fused_WI is None else self.fused_WI
            paged: torch.Tensor = torch.ops.descant.paged_linear(
                x_TI, weight_WI, bias_O, lora.handle, self._sites, self._widths
            )
            return paged
        if torch.is_grad_enabled():
            recorded: torch.Tensor = _LoraLinear.apply(
                x_TI, self._grad_anchor, weight_OI, bias_O, lora.handle, self._sites, self._widths
            )
            return recorded
        if torch.compiler.is_compiling():
            scored: torch.Tensor = torch.ops.descant.lora_linear(
                x_TI, weight_OI, bias_O, lora.handle, self._sites, self._widths, False
            )
            return scored
        y_TO, _ = lora_linear(
            x_TI, weight_OI, bias_O, self.sites, self._widths, lora, prepacked_weight=self.prepacked, want_saved=False
        )
        return y_TO


class _LoraLinear(torch.autograd.Function):
    """In a compiled layer its two halves are operators, which know the pass by its number."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        grad_anchor: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        handle: torch.Tensor,
        sites: torch.Tensor,
        widths: list[int],
    ) -> torch.Tensor:
        ctx.widths = widths
        if torch.compiler.is_compiling():
            ctx.save_for_backward(x_TI, weight_OI, handle, sites)
            y_TO: torch.Tensor = torch.ops.descant.lora_linear(x_TI, weight_OI, bias_O, handle, sites, widths, True)
            return y_TO
        ctx.lora = LORA_BATCHES[handle]
        y_TO, saved = lora_linear(x_TI, weight_OI, bias_O, sites.tolist(), widths, ctx.lora)
        ctx.save_for_backward(x_TI, weight_OI, handle, sites, *saved)
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, weight_OI, handle, sites, *saved = ctx.saved_tensors
        dy_TO = grad_outputs[0].contiguous()  # a sum's gradient comes with strides of 0
        dx_TI: torch.Tensor | None
        if torch.compiler.is_compiling():
            dx_TI = torch.ops.descant.lora_linear_backward(x_TI, dy_TO, weight_OI, handle, sites, ctx.widths)
        else:
            want_dx = ctx.needs_input_grad[0]
            dx_TI = lora_linear_backward(
                x_TI, dy_TO, weight_OI, saved, sites.tolist(), ctx.widths, ctx.lora, want_dx=want_dx
            )
        return dx_TI, None, None, None, None, None, None


def _linear_op(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    handle: torch.Tensor,
    sites: torch.Tensor,
    widths: list[int],
    save_for_backward: bool,
) -> torch.Tensor:
    """``save_for_backward``: what it needs stays with the batch."""
    lora, indices = LORA_BATCHES[handle], sites.tolist()
    y_TO, saved = lora_linear(x_TI, weight_OI, bias_O, indices, widths, lora, want_saved=save_for_backward)
    if save_for_backward:
        lora.save_for_backward(indices, saved)
    return y_TO


def _linear_backward_op(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    weight_OI: torch.Tensor,
    handle: torch.Tensor,
    sites: torch.Tensor,
    widths: list[int],
) -> torch.Tensor:
    """dX. dA and dB are added to gradient rows, of which the graph knows nothing."""
    lora, indices = LORA_BATCHES[handle], sites.tolist()
    dx_TI = lora_linear_backward(x_TI, dy_TO, weight_OI, lora.pop_saved(indices), indices, widths, lora, want_dx=True)
    assert dx_TI is not None
    return dx_TI


def _paged_linear_op(
    x_TI: torch.Tensor,
    weight_WI: torch.Tensor,
    bias_O: torch.Tensor | None,
    handle: torch.Tensor,
    sites: torch.Tensor,
    widths: list[int],
) -> torch.Tensor:
    """[T, sum of widths], W apart: where the weight has rows for LoRA A's, a row of the outcome has their columns,
    whether or not this batch computes them. So prefill and decode steps of any kind are one program."""
    batch, num_out = paged_batch.PAGED_BATCHES[handle], sum(widths)
    h_TH: torch.Tensor | None = None
    if len(weight_WI) == num_out:
        y_TO = F.linear(x_TI, weight_WI, bias_O)
    else:
        y_TW = x_TI.new_empty(len(x_TI), len(weight_WI))
        end = len(weight_WI) if batch.lora_a_fused else num_out
        torch.mm(x_TI, weight_WI[:end].t(), out=y_TW[:, :end])
        y_TO = y_TW[:, :num_out]
        if batch.lora_a_fused:
            h_TH = y_TW[:, num_out:]
    paged_batch.add_adapters(x_TI, y_TO, tuple(sites.tolist()), widths, batch.adapters, h_NH=h_TH)
    return y_TO


_LIBRARY = torch.library.Library("descant", "FRAGMENT")
_LIBRARY.define(
    "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor handle, Tensor sites, SymInt[] widths, "
    "bool save_for_backward) -> Tensor"
)
_LIBRARY.define(
    "lora_linear_backward(Tensor x, Tensor dy, Tensor weight, Tensor handle, Tensor sites, SymInt[] widths) -> Tensor"
)
_LIBRARY.define(
    "paged_linear(Tensor x, Tensor weight, Tensor? bias, Tensor handle, Tensor sites, SymInt[] widths) -> Tensor"
)
_LIBRARY.impl("lora_linear", _linear_op, "CompositeExplicitAutograd")
_LIBRARY.impl("lora_linear_backward", _linear_backward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("paged_linear", _paged_linear_op, "CompositeExplicitAutograd")


@torch.library.register_fake("descant::paged_linear", lib=_LIBRARY)
def _paged_linear_shape(
    x_TI: torch.Tensor,
    weight_WI: torch.Tensor,
    bias_O: torch.Tensor | None,
    handle: torch.Tensor,
    sites: torch.Tensor,
    widths: list[int],
) -> torch.Tensor:
    return x_TI.new_empty_strided((x_TI.shape[0], sum(widths)), (weight_WI.shape[0], 1))


@torch.library.register_fake("descant::lora_linear", lib=_LIBRARY)
def _linear_shape(x_TI: torch.Tensor, weight_OI: torch.Tensor, *rest: object) -> torch.Tensor:
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])


@torch.library.register_fake("descant::lora_linear_backward", lib=_LIBRARY)
def _linear_backward_shape(x_TI: torch.Tensor, *rest: object) -> torch.Tensor:
    return x_TI.new_empty(x_TI.shape)


# ---- base and adapters together


def lora_linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    sites: Sequence[int],
    widths: Sequence[int],
    lora: LoraBatch,
    *,
    start: int = 0,
    prepacked_weight: torch.Tensor | None = None,
    want_saved: bool = True,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """[T, sum of widths] for the stream's tokens ``start:start+T``, and what the backward needs, where it is wanted.
    ``prepacked_weight``: the same weight as ``prepacked`` lays it out. Fewer than ``MIN_ROWS`` tokens are filled up.

    The adapters' part comes first, and the base's product is added to it before their sum is rounded. The other way
    round, what is less than half a step of bf16 beside the base's rounded product would be gone at every token, and
    with it half of what a small learning rate learns; so, it survives in the mean. In float32 nothing of that
    size is lost, and outside oneDNN (where both ways have the same bits) the sums of a product that is added to
    something would depend on how many rows it has."""
    run = _single_run(x_TI, widths, sites, lora, start)
    is_onednn = prepacked.is_onednn(x_TI)
    begins_with_base = run is None and x_TI.dtype == torch.float32 and not is_onednn
    saved: list[torch.Tensor] = []
    if begins_with_base or not _runs(x_TI, widths, sites, lora, start):
        y_TO = prepacked.product(_at_least_min(x_TI), weight_OI, bias_O, prepacked_weight)[: len(x_TI)]
        if begins_with_base:
            saved = _add_adapters(x_TI, y_TO, sites, widths, lora, start, want_saved)
        return y_TO, saved
    if run is not None:
        saved = [_grouped_shrink(x_TI, sites, widths, run)]
        addition_TO = _grouped_additions(saved[0], sites, widths, run)
    elif is_onednn and (whole := _whole_segment(x_TI, widths, sites, lora, start)) is not None:
        saved = [_segment_shrink(x_TI, sites[0], whole)]
        addition_TO = _segment_addition(saved[0], widths[0], sites[0], whole)
    else:
        addition_TO = x_TI.new_zeros(len(x_TI), sum(widths))
        saved = _add_adapters(x_TI, addition_TO, sites, widths, lora, start, want_saved)
    filled_TI, filled_TO = _at_least_min(x_TI), _at_least_min(addition_TO)
    y_TO = prepacked.add_product(filled_TO, filled_TI, weight_OI, prepacked_weight)[: len(x_TI)]
    if bias_O is not None:
        # Not before: beside a large bias, the same at every token, the adapters' part would be rounded away.
        y_TO.add_(bias_O)
        for first, end in () if is_onednn else lora.base_only(start, len(x_TI), sites):
            alone_TO = F.linear(_at_least_min(x_TI[first:end]), weight_OI, bias_O)
            y_TO[first:end] = alone_TO[: end - first]  # rounded once, as wherever there is no adapter
    return y_TO, saved


def lora_linear_backward(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    weight_OI: torch.Tensor,
    saved: Sequence[torch.Tensor],
    sites: Sequence[int],
    widths: Sequence[int],
    lora: LoraBatch,
    *,
    start: int = 0,
    want_dx: bool,
) -> torch.Tensor | None:
    """dX, where it is wanted; dA and dB go to the gradient rows."""
    run = _single_run(x_TI, widths, sites, lora, start)
    if run is None:
        dx_TI = prepacked.product_backward(dy_TO, weight_OI) if want_dx else None
        lora_backward(x_TI, dy_TO.split(list(widths), dim=1), saved, sites, lora, dx_TI=dx_TI, start=start)
        return dx_TI
    dh_TR = _grouped_backward(x_TI, dy_TO, saved[0], sites, widths, run)
    if not want_dx:
        return None
    return _grouped_dx(dh_TR, x_TI.shape[1], sites, widths, run).addmm_(dy_TO, weight_OI)


def _whole_segment(
    x_TI: torch.Tensor, widths: Sequence[int], sites: Sequence[int], lora: LoraBatch, start: int
) -> _Segment | None:
    """The segment of all these tokens, where it changes the one site."""
    if len(sites) > 1:
        return None
    segments = [segment for run in _runs(x_TI, widths, sites, lora, start) for segment in run.segments]
    if len(segments) > 1 or (segments[0].start, segments[0].end) != (0, len(x_TI)):
        return None
    return segments[0]


def _add_adapters(
    x_TI: torch.Tensor,
    y_TO: torch.Tensor,
    sites: Sequence[int],
    widths: Sequence[int],
    lora: LoraBatch,
    start: int,
    want_saved: bool,
) -> list[torch.Tensor]:
    ys = y_TO.split(list(widths), dim=1)
    if want_saved:
        return lora_forward(x_TI, ys, sites, lora, start=start)
    lora_add(x_TI, ys, sites, lora, start=start)
    return []


# ---- the adapters' part alone, run by run


def lora_forward(
    x_TI: torch.Tensor, ys: Sequence[torch.Tensor], sites: Sequence[int], lora: LoraBatch, *, start: int = 0
) -> list[torch.Tensor]:
    """Adds the adapters' part to each ``y`` [T, out] in place, for the stream's tokens ``start:start+T``; returns what
    ``lora_backward`` needs (the rank-wide intermediates)."""
    widths = [y.shape[1] for y in ys]
    saved = lora_intermediates(x_TI, widths, sites, lora, start=start)
    intermediates = iter(saved)
    for run in _runs(x_TI, widths, sites, lora, start):
        if run.products != "loop":
            additions_TO = _grouped_additions(next(intermediates), sites, widths, run)
            for y_TO, addition_TO in zip(ys, additions_TO.split(widths, dim=1)):
                y_TO[run.start : run.end].add_(addition_TO)
            continue
        for site, y_TO in zip(sites, ys):
            for segment in run.segments:
                if segment.trained[site]:
                    _segment_expand(next(intermediates), y_TO, site, segment)
    return saved


def lora_add(
    x_TI: torch.Tensor, ys: Sequence[torch.Tensor], sites: Sequence[int], lora: LoraBatch, *, start: int = 0
) -> None:
    """``lora_forward`` without a backward. On CPU a decode step's segments of a row each are one batched
    product a side instead of two calls a segment (8 adapters, 576 → 1536, rank 16: 155 against 347 µs): in bf16 with
    the same bits (tried over 2,240 shapes, 1 and 2 threads), in fp32 not always, so there the loop stays. (Most models'
    decode steps take ``stacked_adapters`` instead.)"""
    runs = _runs(x_TI, [y.shape[1] for y in ys], sites, lora, start)
    if not all(_is_batched(lora, run, x_TI, sites) for run in runs):
        lora_forward(x_TI, ys, sites, lora, start=start)
        return
    for run in runs:
        layout, tokens, num_groups = run.slabs.layout, slice(run.start, run.end), len(run.segments)
        for site, y_TO in zip(sites, ys):
            a_GRI = _stacked(run, layout.a_offset[site], layout.rank_bucket, x_TI.shape[1])
            b_GOR = _stacked(run, layout.b_offset[site], y_TO.shape[1], layout.rank_bucket)
            x_GLI = x_TI[tokens].view(num_groups, -1, x_TI.shape[1])
            y_GLO = y_TO[tokens].view(num_groups, -1, y_TO.shape[1])
            h_GLR = torch.bmm(_filled_up(x_GLI), a_GRI.transpose(1, 2))[:, : x_GLI.shape[1]]
            few_GLO = torch.baddbmm(
                _filled_up(y_GLO), _filled_up(h_GLR), b_GOR.transpose(1, 2), alpha=run.segments[0].scale
            )
            y_GLO.copy_(few_GLO[:, : x_GLI.shape[1]])


def _is_batched(lora: LoraBatch, run: _SegmentRun, x_TI: torch.Tensor, sites: Sequence[int]) -> bool:
    return (
        run.is_even
        and not x_TI.is_cuda
        and x_TI.dtype == torch.bfloat16
        and lora.products == "auto"
        and all(segment.trained[site] for segment in run.segments for site in sites)
    )


def lora_intermediates(
    x_TI: torch.Tensor, widths: Sequence[int], sites: Sequence[int], lora: LoraBatch, *, start: int = 0
) -> list[torch.Tensor]:
    """The first half of ``lora_forward``, and what it returns (a backward over fewer tokens computes it again)."""
    saved: list[torch.Tensor] = []
    for run in _runs(x_TI, widths, sites, lora, start):
        if run.products != "loop":
            saved.append(_grouped_shrink(x_TI, sites, widths, run))
            continue
        for site in sites:
            trained = [segment for segment in run.segments if segment.trained[site]]
            saved.extend(_segment_shrink(x_TI, site, segment) for segment in trained)
    return saved


def lora_backward(
    x_TI: torch.Tensor,
    dys: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    sites: Sequence[int],
    lora: LoraBatch,
    *,
    dx_TI: torch.Tensor | None,
    start: int = 0,
) -> None:
    """Adds the adapters' part of dX to ``dx_TI`` (None: not wanted), and dA, dB to the segments' gradient rows."""
    intermediates = iter(saved)
    widths = [dy.shape[1] for dy in dys]
    for run in _runs(x_TI, widths, sites, lora, start):
        if run.products != "loop":
            tokens = slice(run.start, run.end)
            dy_TO = dys[0][tokens] if len(dys) == 1 else torch.cat([dy[tokens] for dy in dys], dim=1)
            dh_TR = _grouped_backward(x_TI[tokens], dy_TO, next(intermediates), sites, widths, run)
            if dx_TI is not None:
                dx_TI[tokens].add_(_grouped_dx(dh_TR, x_TI.shape[1], sites, widths, run))
            continue
        for site, dy_TO in zip(sites, dys):
            for segment in run.segments:
                if segment.trained[site]:
                    _segment_backward(x_TI, dy_TO, next(intermediates), site, segment, dx_TI)


def _products(x_TI: torch.Tensor, widths: Sequence[int], lora: LoraBatch) -> Products:
    if lora.products != "auto":
        return lora.products
    if not (
        x_TI.is_cuda
        and x_TI.dtype == torch.bfloat16  # others fall back to a loop that waits for the device
        and x_TI.shape[1] % 8 == 0  # strides of 16 bytes, or the CUDA context dies
        and all(width % 8 == 0 for width in widths)
    ):
        return "loop"
    if not has_kernels(x_TI.device):
        return "grouped"
    from descant.model.lora_kernels import MAX_SITES

    return "kernels" if len(widths) <= MAX_SITES else "grouped"


def _runs(
    x_TI: torch.Tensor, widths: Sequence[int], sites: Sequence[int], lora: LoraBatch, start: int
) -> list[_SegmentRun]:
    """Of the stream's tokens ``start:start+T``, where there is anything to compute."""
    runs = lora.runs(start, len(x_TI), _products(x_TI, widths, lora))
    return [run for run in runs if run.trained(sites)]


def _single_run(
    x_TI: torch.Tensor, widths: Sequence[int], sites: Sequence[int], lora: LoraBatch, start: int
) -> _SegmentRun | None:
    """The one run that is all of these tokens, if it is not computed in a loop."""
    runs = _runs(x_TI, widths, sites, lora, start)
    if len(runs) == 1 and runs[0].products != "loop" and (runs[0].start, runs[0].end) == (0, len(x_TI)):
        return runs[0]
    return None


# ---- a loop of products over views of the slab: scales go into the accumulating product, so nothing is rounded twice


def _view(slab_SP: torch.Tensor, slot: int, offset: int, rows: int, columns: int) -> torch.Tensor:
    return slab_SP.as_strided((rows, columns), (columns, 1), slot * slab_SP.shape[1] + offset)


def _segment_shrink(x_TI: torch.Tensor, site_index: int, segment: _Segment) -> torch.Tensor:
    layout = segment.slabs.layout
    a_RI = _view(
        segment.slabs.compute_SP, segment.compute, layout.a_offset[site_index], layout.rank_bucket, x_TI.shape[1]
    )
    x = x_TI[segment.start : segment.end]
    return prepacked.product(_filled_up(x), a_RI, None, None)[: len(x)]


def _filled_up(x: torch.Tensor) -> torch.Tensor:
    """[..., L, I] with at least ``MIN_ROWS`` rows, on CPU."""
    missing = MIN_ROWS - x.shape[-2]
    return x if missing <= 0 or x.is_cuda else F.pad(x, (0, 0, 0, missing))


def _at_least_min(x: torch.Tensor) -> torch.Tensor:
    """[T, I] with at least ``MIN_ROWS`` rows, on any device."""
    missing = MIN_ROWS - len(x)
    return x if missing <= 0 else F.pad(x, (0, 0, 0, missing))


def _segment_b(out_features: int, site_index: int, segment: _Segment) -> torch.Tensor:
    layout = segment.slabs.layout
    return _view(
        segment.slabs.compute_SP, segment.compute, layout.b_offset[site_index], out_features, layout.rank_bucket
    )


def _segment_addition(h_TR: torch.Tensor, out_features: int, site_index: int, segment: _Segment) -> torch.Tensor:
    """What the segment adds to its rows, by oneDNN."""
    h_TR = _filled_up(h_TR) * segment.scale
    return prepacked.linear(h_TR, _segment_b(out_features, site_index, segment), None)[: segment.end - segment.start]


def _segment_expand(h_TR: torch.Tensor, y_TO: torch.Tensor, site_index: int, segment: _Segment) -> None:
    y = y_TO[segment.start : segment.end]
    if prepacked.is_onednn(h_TR):
        y.add_(_segment_addition(h_TR, y.shape[1], site_index, segment))
        return
    b_OR = _segment_b(y.shape[1], site_index, segment)
    if len(y) >= MIN_ROWS or y.is_cuda:
        y.addmm_(h_TR, b_OR.t(), alpha=segment.scale)
    else:
        y.copy_(torch.addmm(_filled_up(y), _filled_up(h_TR), b_OR.t(), alpha=segment.scale)[: len(y)])


def _segment_backward(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    h_TR: torch.Tensor,
    site_index: int,
    segment: _Segment,
    dx_TI: torch.Tensor | None,
) -> None:
    slabs, layout, rank_bucket = segment.slabs, segment.slabs.layout, segment.rank_bucket
    a, b = layout.a_offset[site_index], layout.b_offset[site_index]
    x, dy = x_TI[segment.start : segment.end], dy_TO[segment.start : segment.end]
    dh_TR = torch.mm(dy, _view(slabs.compute_SP, segment.compute, b, dy_TO.shape[1], rank_bucket))
    if dx_TI is not None:
        a_RI = _view(slabs.compute_SP, segment.compute, a, rank_bucket, x_TI.shape[1])
        dx_TI[segment.start : segment.end].addmm_(dh_TR, a_RI, alpha=segment.scale)
    if segment.gradient is None:
        return
    da_RI = _view(slabs.gradient_SP, segment.gradient, a, rank_bucket, x_TI.shape[1])
    db_OR = _view(slabs.gradient_SP, segment.gradient, b, dy_TO.shape[1], rank_bucket)
    if x.dtype == da_RI.dtype:
        da_RI.addmm_(dh_TR.t(), x, alpha=segment.scale)
        db_OR.addmm_(dy.t(), h_TR, alpha=segment.scale)
    else:
        da_RI.add_(torch.mm(dh_TR.t(), x), alpha=segment.scale)
        db_OR.add_(torch.mm(dy.t(), h_TR), alpha=segment.scale)


# ---- grouped products over all adapters of a run: the same number of launches for 2 adapters as for 1000


def _stacked(run: _SegmentRun, offset: int, rows: int, columns: int) -> torch.Tensor:
    """[G, rows, columns] of the run's adapters: a view of the slab where their slots are evenly spaced."""
    slab_SP, num_groups = run.slabs.compute_SP, len(run.segments)
    row = slab_SP.shape[1]
    if num_groups == 1:
        return slab_SP.as_strided((1, rows, columns), (row, columns, 1), run.segments[0].compute * row + offset)
    groups = run.groups
    if groups.step is not None:
        shape, strides = (num_groups, rows, columns), (groups.step * row, columns, 1)
        return slab_SP.as_strided(shape, strides, groups.first * row + offset)
    parts_SE = slab_SP[:, offset : offset + rows * columns]
    return parts_SE.index_select(0, groups.slots_G).view(-1, rows, columns)


def _times(run: _SegmentRun, x_TK: torch.Tensor, weights_GNK: torch.Tensor) -> torch.Tensor:
    """[T, N]: every group's rows by its own weight. Exactly the run's tokens go in: rows at and beyond the last offset
    would come out uninitialised."""
    if len(run.segments) == 1:
        return torch.mm(x_TK, weights_GNK[0].t())
    return F.grouped_mm(x_TK, weights_GNK.transpose(1, 2), offs=run.groups.offs_G)


def _outer(run: _SegmentRun, a_TM: torch.Tensor, b_TN: torch.Tensor) -> torch.Tensor:
    """[G, M, N]: the sum over every group's rows. A single group's comes in float32 where the library can."""
    if len(run.segments) > 1:
        return F.grouped_mm(a_TM.t(), b_TN, offs=run.groups.offs_G)
    if a_TM.is_cuda and a_TM.dtype != torch.float32:
        return torch.mm(a_TM.t(), b_TN, out_dtype=torch.float32).unsqueeze(0)
    return torch.mm(a_TM.t(), b_TN).unsqueeze(0)


def _all_a(run: _SegmentRun, sites: Sequence[int], in_features: int) -> torch.Tensor:
    """[G, sites · R, in]: the A's of all sites, one above the other."""
    layout = run.slabs.layout
    parts = [_stacked(run, layout.a_offset[site], layout.rank_bucket, in_features) for site in sites]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _all_b(run: _SegmentRun, sites: Sequence[int], widths: Sequence[int]) -> torch.Tensor:
    """[G, sum of widths, sites · R]: the B's of all sites along the diagonal. The zeros beside them cost arithmetic
    that a product so narrow has to spare; a product for each site would cost another pass over y."""
    layout, rank_bucket = run.slabs.layout, run.slabs.layout.rank_bucket
    parts = [_stacked(run, layout.b_offset[site], width, rank_bucket) for site, width in zip(sites, widths)]
    if len(parts) == 1:
        return parts[0]
    all_GOR = parts[0].new_zeros(len(run.segments), sum(widths), len(sites) * rank_bucket)
    start = 0
    for index, (part_GOR, width) in enumerate(zip(parts, widths)):
        all_GOR[:, start : start + width, index * rank_bucket : (index + 1) * rank_bucket] = part_GOR
        start += width
    return all_GOR


def _scaled(h_TR: torch.Tensor, run: _SegmentRun) -> torch.Tensor:
    return h_TR.mul_(run.segments[0].scale if len(run.segments) == 1 else run.groups.scale_T1)


def _grouped_shrink(x_TI: torch.Tensor, sites: Sequence[int], widths: Sequence[int], run: _SegmentRun) -> torch.Tensor:
    """Scaled, [run's tokens, sites · R]: one reading of x for all sites."""
    if run.products == "kernels":
        from descant.model.lora_kernels import shrink

        return shrink(x_TI[run.start : run.end], run.tiles, run.kernel_sites(sites, widths))
    return _scaled(_times(run, x_TI[run.start : run.end], _all_a(run, sites, x_TI.shape[1])), run)


def _grouped_additions(
    h_TR: torch.Tensor, sites: Sequence[int], widths: Sequence[int], run: _SegmentRun
) -> torch.Tensor:
    """[run's tokens, sum of widths]"""
    if run.products == "kernels":
        from descant.model.lora_kernels import expand

        return expand(h_TR, run.tiles, run.kernel_sites(sites, widths))
    return _times(run, h_TR, _all_b(run, sites, widths))


def _grouped_dx(
    dh_TR: torch.Tensor, in_features: int, sites: Sequence[int], widths: Sequence[int], run: _SegmentRun
) -> torch.Tensor:
    """[run's tokens, in]"""
    if run.products == "kernels":
        from descant.model.lora_kernels import shrink_backward

        return shrink_backward(dh_TR, in_features, run.tiles, run.kernel_sites(sites, widths))
    return _times(run, dh_TR, _all_a(run, sites, in_features).transpose(1, 2))


def _grouped_backward(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    h_TR: torch.Tensor,
    sites: Sequence[int],
    widths: Sequence[int],
    run: _SegmentRun,
) -> torch.Tensor:
    """dA and dB of the run's tokens into the gradient rows; returns the scaled dh [run's tokens, sites · R]."""
    if run.products == "kernels":
        from descant.model.lora_kernels import add_gradients, expand_backward

        kernel_sites = run.kernel_sites(sites, widths)
        dh_TR = expand_backward(dy_TO, run.tiles, kernel_sites)
        if run.requires_grad:
            add_gradients(x_TI, dy_TO, h_TR, dh_TR, run.tiles, kernel_sites)
        return dh_TR
    dh_TR = _scaled(_times(run, dy_TO, _all_b(run, sites, widths).transpose(1, 2)), run)
    if run.requires_grad:
        layout, rank_bucket = run.slabs.layout, run.slabs.layout.rank_bucket
        da_GRI, db_GOR = _outer(run, dh_TR, x_TI), _outer(run, dy_TO, h_TR)
        start = 0
        for index, (site, width) in enumerate(zip(sites, widths)):
            own = slice(index * rank_bucket, (index + 1) * rank_bucket)
            _add_to_rows(run, layout.a_offset[site], da_GRI[:, own])
            _add_to_rows(run, layout.b_offset[site], db_GOR[:, start : start + width, own])
            start += width
    return dh_TR


def _add_to_rows(run: _SegmentRun, offset: int, parts_GMN: torch.Tensor) -> None:
    _, rows, columns = parts_GMN.shape
    slab_SP = run.slabs.gradient_SP
    row = slab_SP.shape[1]
    if len(run.segments) == 1:
        (segment,) = run.segments
        assert segment.gradient is not None
        slab_SP.as_strided((rows, columns), (columns, 1), segment.gradient * row + offset).add_(parts_GMN[0])
        return
    groups = run.groups
    if groups.gradient_step is not None:
        shape, strides = (len(parts_GMN), rows, columns), (groups.gradient_step * row, columns, 1)
        slab_SP.as_strided(shape, strides, groups.first_gradient * row + offset).add_(parts_GMN)
        return
    if groups.grad_groups is not None:
        parts_GMN = parts_GMN.index_select(0, groups.grad_groups)
    gradient_SMN = slab_SP.as_strided((len(slab_SP), rows, columns), (row, columns, 1), offset)
    gradient_SMN.index_add_(0, groups.gradients_L, parts_GMN.to(slab_SP.dtype))
