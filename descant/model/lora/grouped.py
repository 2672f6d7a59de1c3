"""Grouped products over all adapters of a run: the same number of launches for 2 adapters as for 1000. Where the run is
computed by kernels of our own (``lora.kernels``), theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from descant.model.lora.segments import SegmentRun


def stacked(run: SegmentRun, offset: int, rows: int, columns: int) -> torch.Tensor:
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


def _times(run: SegmentRun, x_TK: torch.Tensor, weights_GNK: torch.Tensor) -> torch.Tensor:
    """[T, N]: every group's rows by its own weight. Exactly the run's tokens go in: rows at and beyond the last offset
    would come out uninitialised."""
    if len(run.segments) == 1:
        return torch.mm(x_TK, weights_GNK[0].t())
    return F.grouped_mm(x_TK, weights_GNK.transpose(1, 2), offs=run.groups.offs_G)


def _outer(run: SegmentRun, a_TM: torch.Tensor, b_TN: torch.Tensor) -> torch.Tensor:
    """[G, M, N]: the sum over every group's rows. A single group's comes in float32 where the library can."""
    if len(run.segments) > 1:
        return F.grouped_mm(a_TM.t(), b_TN, offs=run.groups.offs_G)
    if a_TM.is_cuda and a_TM.dtype != torch.float32:
        return torch.mm(a_TM.t(), b_TN, out_dtype=torch.float32).unsqueeze(0)
    return torch.mm(a_TM.t(), b_TN).unsqueeze(0)


def _all_a(run: SegmentRun, sites: Sequence[int], in_features: int) -> torch.Tensor:
    """[G, sites · R, in]: the A's of all sites, one above the other."""
    layout = run.slabs.layout
    parts = [stacked(run, layout.a_offset[site], layout.rank_bucket, in_features) for site in sites]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _all_b(run: SegmentRun, sites: Sequence[int], widths: Sequence[int]) -> torch.Tensor:
    """[G, sum of widths, sites · R]: the B's of all sites along the diagonal. The zeros beside them cost arithmetic
    that a product so narrow has to spare; a product for each site would cost another pass over y."""
    layout, rank_bucket = run.slabs.layout, run.slabs.layout.rank_bucket
    parts = [stacked(run, layout.b_offset[site], width, rank_bucket) for site, width in zip(sites, widths)]
    if len(parts) == 1:
        return parts[0]
    all_GOR = parts[0].new_zeros(len(run.segments), sum(widths), len(sites) * rank_bucket)
    start = 0
    for index, (part_GOR, width) in enumerate(zip(parts, widths)):
        all_GOR[:, start : start + width, index * rank_bucket : (index + 1) * rank_bucket] = part_GOR
        start += width
    return all_GOR


def _scaled(h_TR: torch.Tensor, run: SegmentRun) -> torch.Tensor:
    return h_TR.mul_(run.segments[0].scale if len(run.segments) == 1 else run.groups.scale_T1)


def shrink(x_TI: torch.Tensor, sites: Sequence[int], widths: Sequence[int], run: SegmentRun) -> torch.Tensor:
    """Scaled, [run's tokens, sites · R]: one reading of x for all sites."""
    if run.products == "kernels":
        from descant.model.lora.kernels import shrink

        return shrink(x_TI[run.start : run.end], run.tiles, run.kernel_sites(sites, widths))
    return _scaled(_times(run, x_TI[run.start : run.end], _all_a(run, sites, x_TI.shape[1])), run)


def additions(h_TR: torch.Tensor, sites: Sequence[int], widths: Sequence[int], run: SegmentRun) -> torch.Tensor:
    """[run's tokens, sum of widths]"""
    if run.products == "kernels":
        from descant.model.lora.kernels import expand

        return expand(h_TR, run.tiles, run.kernel_sites(sites, widths))
    return _times(run, h_TR, _all_b(run, sites, widths))


def dx(
    dh_TR: torch.Tensor, in_features: int, sites: Sequence[int], widths: Sequence[int], run: SegmentRun
) -> torch.Tensor:
    """[run's tokens, in]"""
    if run.products == "kernels":
        from descant.model.lora.kernels import shrink_backward

        return shrink_backward(dh_TR, in_features, run.tiles, run.kernel_sites(sites, widths))
    return _times(run, dh_TR, _all_a(run, sites, in_features).transpose(1, 2))


def backward(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    h_TR: torch.Tensor,
    sites: Sequence[int],
    widths: Sequence[int],
    run: SegmentRun,
) -> torch.Tensor:
    """dA and dB of the run's tokens into the gradient rows; returns the scaled dh [run's tokens, sites · R]."""
    if run.products == "kernels":
        from descant.model.lora.kernels import add_gradients, expand_backward

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


def _add_to_rows(run: SegmentRun, offset: int, parts_GMN: torch.Tensor) -> None:
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
