"""The base's product and each segment's low-rank one, in one tensor.

``y[s] = x[s] Wᵀ + (32 / r_s) · (x[s] A_sᵀ) B_sᵀ`` for every segment s of the pass, the sum rounded once. The backward
needs x and the rank-wide intermediates only, and adds dA and dB straight into the segments' fp32 gradient rows.

``choose`` says how the segments' products are computed: a loop of plain products over views of the slab, one grouped
product over all adapters of a run, or on CUDA a kernel of our own (``lora.kernels``), for all adapters whose rank is
narrow enough and for tokens without one. The loop is as fast on CPU up to some 16 segments (measured in bf16,
576 → 1536, rank 32: 16 segments of 16 tokens 617 µs against 575), on CUDA it costs four launches a segment and is for
what the grouped product does not take.
Nothing here multiplies one adapter's numbers by zero for another's tokens: 0·NaN would carry one tenant's NaN to all.

In bf16 on CPU a row of every product has the same bits for any number of rows beside it (tried up to 300 rows, 1 and
2 threads), but alone it takes another path, where one output in 10,000 (from some 1,500 input features on; of an
adapter's second product one in 100,000) is rounded the other way. So it is in float32, whose products are oneDNN's
(``prepacked.is_onednn``; in MKL fewer than 4 rows differ by 1e-6). So few rows are filled up with zeros.

Legend: T tokens, I in, O out, R rank bucket, G adapters of a run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from descant.model.cpu import prepacked
from descant.model.forward_batch import filled_up
from descant.model.lora import batched, grouped, loop
from descant.model.lora.batch import LoraBatch
from descant.model.lora.segments import LoraSegment, Products, SegmentRun

WITH_SHARED_MEMORY = frozenset({(8, 0), (9, 0), (10, 0)})
"""Capabilities of devices on which the kernels for narrow ranks find the 160 KiB that they need at most."""


@cache
def has_kernels(device: torch.device) -> bool:
    """Of our own, for narrow ranks."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) in WITH_SHARED_MEMORY


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
        y_TO = prepacked.product(filled_up(x_TI), weight_OI, bias_O, prepacked_weight)[: len(x_TI)]
        if begins_with_base:
            saved = _add_adapters(x_TI, y_TO, sites, widths, lora, start, want_saved)
        return y_TO, saved
    if run is not None:
        saved = [grouped.shrink(x_TI, sites, widths, run)]
        addition_TO = grouped.additions(saved[0], sites, widths, run)
    elif is_onednn and (whole := _whole_segment(x_TI, widths, sites, lora, start)) is not None:
        saved = [loop.shrink(x_TI, sites[0], whole)]
        addition_TO = loop.addition(saved[0], widths[0], sites[0], whole)
    else:
        addition_TO = x_TI.new_zeros(len(x_TI), sum(widths))
        saved = _add_adapters(x_TI, addition_TO, sites, widths, lora, start, want_saved)
    filled_TI, filled_TO = filled_up(x_TI), filled_up(addition_TO)
    y_TO = prepacked.add_product(filled_TO, filled_TI, weight_OI, prepacked_weight)[: len(x_TI)]
    if bias_O is not None:
        # Not before: beside a large bias, the same at every token, the adapters' part would be rounded away.
        y_TO.add_(bias_O)
        for first, end in () if is_onednn else lora.base_only(start, len(x_TI), sites):
            alone_TO = F.linear(filled_up(x_TI[first:end]), weight_OI, bias_O)
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
    dh_TR = grouped.backward(x_TI, dy_TO, saved[0], sites, widths, run)
    if not want_dx:
        return None
    return grouped.dx(dh_TR, x_TI.shape[1], sites, widths, run).addmm_(dy_TO, weight_OI)


def _whole_segment(
    x_TI: torch.Tensor, widths: Sequence[int], sites: Sequence[int], lora: LoraBatch, start: int
) -> LoraSegment | None:
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
            additions_TO = grouped.additions(next(intermediates), sites, widths, run)
            for y_TO, addition_TO in zip(ys, additions_TO.split(widths, dim=1)):
                y_TO[run.start : run.end].add_(addition_TO)
            continue
        for site, y_TO in zip(sites, ys):
            for segment in run.segments:
                if segment.trained[site]:
                    loop.expand(next(intermediates), y_TO, site, segment)
    return saved


def lora_add(
    x_TI: torch.Tensor, ys: Sequence[torch.Tensor], sites: Sequence[int], lora: LoraBatch, *, start: int = 0
) -> None:
    """``lora_forward`` without a backward, batched where that has the same bits."""
    runs = _runs(x_TI, [y.shape[1] for y in ys], sites, lora, start)
    if not all(batched.takes(lora, run, x_TI, sites) for run in runs):
        lora_forward(x_TI, ys, sites, lora, start=start)
        return
    for run in runs:
        batched.add(x_TI, ys, sites, run)


def lora_intermediates(
    x_TI: torch.Tensor, widths: Sequence[int], sites: Sequence[int], lora: LoraBatch, *, start: int = 0
) -> list[torch.Tensor]:
    """The first half of ``lora_forward``, and what it returns (a backward over fewer tokens computes it again)."""
    saved: list[torch.Tensor] = []
    for run in _runs(x_TI, widths, sites, lora, start):
        if run.products != "loop":
            saved.append(grouped.shrink(x_TI, sites, widths, run))
            continue
        for site in sites:
            trained = [segment for segment in run.segments if segment.trained[site]]
            saved.extend(loop.shrink(x_TI, site, segment) for segment in trained)
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
            dh_TR = grouped.backward(x_TI[tokens], dy_TO, next(intermediates), sites, widths, run)
            if dx_TI is not None:
                dx_TI[tokens].add_(grouped.dx(dh_TR, x_TI.shape[1], sites, widths, run))
            continue
        for site, dy_TO in zip(sites, dys):
            for segment in run.segments:
                if segment.trained[site]:
                    loop.backward(x_TI, dy_TO, next(intermediates), site, segment, dx_TI)


def choose(x_TI: torch.Tensor, widths: Sequence[int], lora: LoraBatch) -> Products:
    """How these sites' products are computed, unless the batch says it."""
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
    from descant.model.lora.kernels import MAX_SITES

    return "kernels" if len(widths) <= MAX_SITES else "grouped"


def _runs(
    x_TI: torch.Tensor, widths: Sequence[int], sites: Sequence[int], lora: LoraBatch, start: int
) -> list[SegmentRun]:
    """Of the stream's tokens ``start:start+T``, where there is anything to compute."""
    runs = lora.runs(start, len(x_TI), choose(x_TI, widths, lora))
    return [run for run in runs if run.trained(sites)]


def _single_run(
    x_TI: torch.Tensor, widths: Sequence[int], sites: Sequence[int], lora: LoraBatch, start: int
) -> SegmentRun | None:
    """The one run that is all of these tokens, if it is not computed in a loop."""
    runs = _runs(x_TI, widths, sites, lora, start)
    if len(runs) == 1 and runs[0].products != "loop" and (runs[0].start, runs[0].end) == (0, len(x_TI)):
        return runs[0]
    return None
