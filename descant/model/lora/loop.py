"""A loop of products over views of the slab: scales go into the accumulating product, so nothing is rounded twice."""

from __future__ import annotations

import torch

from descant.model.cpu import prepacked
from descant.model.forward_batch import MIN_ROWS, filled_up
from descant.model.lora.segments import LoraSegment


def _view(slab_SP: torch.Tensor, slot: int, offset: int, rows: int, columns: int) -> torch.Tensor:
    return slab_SP.as_strided((rows, columns), (columns, 1), slot * slab_SP.shape[1] + offset)


def shrink(x_TI: torch.Tensor, site_index: int, segment: LoraSegment) -> torch.Tensor:
    layout = segment.slabs.layout
    a_RI = _view(
        segment.slabs.compute_SP, segment.compute, layout.a_offset[site_index], layout.rank_bucket, x_TI.shape[1]
    )
    x = x_TI[segment.start : segment.end]
    return prepacked.product(x if x.is_cuda else filled_up(x), a_RI, None, None)[: len(x)]


def _b(out_features: int, site_index: int, segment: LoraSegment) -> torch.Tensor:
    layout = segment.slabs.layout
    return _view(
        segment.slabs.compute_SP, segment.compute, layout.b_offset[site_index], out_features, layout.rank_bucket
    )


def addition(h_TR: torch.Tensor, out_features: int, site_index: int, segment: LoraSegment) -> torch.Tensor:
    """What the segment adds to its rows, by oneDNN."""
    h_TR = filled_up(h_TR) * segment.scale
    return prepacked.linear(h_TR, _b(out_features, site_index, segment), None)[: segment.end - segment.start]


def expand(h_TR: torch.Tensor, y_TO: torch.Tensor, site_index: int, segment: LoraSegment) -> None:
    y = y_TO[segment.start : segment.end]
    if prepacked.is_onednn(h_TR):
        y.add_(addition(h_TR, y.shape[1], site_index, segment))
        return
    b_OR = _b(y.shape[1], site_index, segment)
    if len(y) >= MIN_ROWS or y.is_cuda:
        y.addmm_(h_TR, b_OR.t(), alpha=segment.scale)
    else:
        y.copy_(torch.addmm(filled_up(y), filled_up(h_TR), b_OR.t(), alpha=segment.scale)[: len(y)])


def backward(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    h_TR: torch.Tensor,
    site_index: int,
    segment: LoraSegment,
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
