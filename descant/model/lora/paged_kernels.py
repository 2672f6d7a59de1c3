"""Adapters in steps over the KV pages on CUDA: one or two Triton kernels a product, whatever the number of adapters.

Rows are sorted by adapter and cut into tiles of one adapter (``AdapterTiles``), of any ranks up to the launch's.
``_shrink`` makes the rank-wide intermediates of a tile in splits of the input features (split-K), ``_expand`` adds them
and their product with B in place. Where the base's product has made the intermediates (``model.lora.fused_a``),
``_expand`` is all. No program ever reads another adapter's weights or intermediates for a row, so nothing of one tenant
(a NaN) reaches another.

Both take some microseconds, most of it waiting: for the launch, for the tile's numbers, for the weights. On Hopper each
begins while the kernel before it still runs, reads what that one does not write (tiles, weights), and only then
waits for it (programmatic dependent launch).

Legend: N rows, I in, O out, H fused LoRA-A columns, R columns for the widest adapter of a launch, C tiles, P splits, S
sites that share the input (at most 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from descant.model.kernel_launch import Kernel
from descant.model.paged_batch import TILE_ROWS, AdapterTiles

MAX_SITES = 3
MAX_SPLIT_K = 16
MAX_SPLIT_ELEMENTS = 512
"""Splits times rank: ``_expand`` has them all in registers at once."""

MANY_OUTPUTS = 4096
"""Beyond so many, adding up fewer splits saves more than computing them one after another costs."""

ALIGN = tl.constexpr(64)
"""The bank's own: what is in a row begins after a multiple of so many elements, which lets loads be wide,"""

ALIGN_RANK = tl.constexpr(8)
"""and the smallest rank bucket, which divides all others."""


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]
    x,
    origin,
    features,
    tiles,
    h,
    num_in,
    num_rows,
    x_stride,
    R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    FEATURES_PER_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    IEEE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    split = tl.program_id(0)
    site = tl.program_id(1)
    tile = tl.program_id(2)
    num_splits = tl.num_programs(0)
    start = tl.load(tiles + tile * 6).to(tl.int32)
    end = tl.load(tiles + tile * 6 + 1).to(tl.int32)
    at_row = tl.multiple_of(tl.load(tiles + tile * 6 + 2), ALIGN)
    rank = tl.multiple_of(tl.load(tiles + tile * 6 + 3), ALIGN_RANK)
    a = origin + at_row + tl.multiple_of(rank * tl.load(features + site * 2), ALIGN)
    if LAUNCH_PDL:
        gdc_launch_dependents()
    if start >= end:  # where a pass has room for more tiles
        if LAUNCH_PDL:
            gdc_wait()
        return
    n = start + tl.arange(0, ROWS)
    r = tl.arange(0, R)
    live = (n < end)[:, None]
    i = split * FEATURES_PER_SPLIT + tl.arange(0, BLOCK_I)
    inside = i < num_in
    # Weights are not written while a step runs: the first of them need not wait for what is before.
    weights = tl.load(a + r[None, :] * num_in + i[:, None], mask=(r < rank)[None, :] & inside[:, None], other=0.0)
    if LAUNCH_PDL:
        gdc_wait()
    xs = tl.load(x + n[:, None] * x_stride + i[None, :], mask=live & inside[None, :], other=0.0)
    if IEEE:
        sums = tl.dot(xs, weights, input_precision="ieee")
    else:
        sums = tl.dot(xs, weights)
    for step in range(BLOCK_I, FEATURES_PER_SPLIT, BLOCK_I):
        i = split * FEATURES_PER_SPLIT + step + tl.arange(0, BLOCK_I)
        inside = i < num_in
        xs = tl.load(x + n[:, None] * x_stride + i[None, :], mask=live & inside[None, :], other=0.0)
        weights = tl.load(a + r[None, :] * num_in + i[:, None], mask=(r < rank)[None, :] & inside[:, None], other=0.0)
        if IEEE:
            sums += tl.dot(xs, weights, input_precision="ieee")
        else:
            sums += tl.dot(xs, weights)
    at = h + ((site * num_splits + split) * num_rows + n)[:, None] * R + r[None, :]
    tl.store(at, sums, mask=live & (r < rank)[None, :])


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    h,
    origin,
    features,
    tiles,
    y,
    num_splits,
    num_rows,
    y_stride,
    out0,
    out1,
    out2,
    R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SITE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IEEE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    # SITE_COLUMNS 0: h is [S, P, N, R]. Else it is columns behind y's, so many a site, and the tile knows its column.
    block = tl.program_id(0)
    tile = tl.program_id(1)
    start = tl.load(tiles + tile * 6).to(tl.int32)
    end = tl.load(tiles + tile * 6 + 1).to(tl.int32)
    at_row = tl.multiple_of(tl.load(tiles + tile * 6 + 2), ALIGN)
    rank = tl.multiple_of(tl.load(tiles + tile * 6 + 3), ALIGN_RANK)
    scale = tl.load(tiles + tile * 6 + 4).to(tl.int32).to(tl.float32, bitcast=True)
    column = tl.load(tiles + tile * 6 + 5).to(tl.int32)
    if start >= end:
        if LAUNCH_PDL:
            gdc_launch_dependents()
            gdc_wait()
        return
    # Which site's features: block numbers run through the sites.
    blocks0 = (out0 + BLOCK_O - 1) // BLOCK_O
    blocks1 = (out1 + BLOCK_O - 1) // BLOCK_O
    site = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    own = tl.where(site == 0, block, tl.where(site == 1, block - blocks0, block - blocks0 - blocks1))
    outputs = tl.where(site == 0, out0, tl.where(site == 1, out1, out2))
    first = tl.where(site == 0, 0, tl.where(site == 1, out0, out0 + out1))
    b = origin + at_row + tl.multiple_of(rank * tl.load(features + site * 2 + 1), ALIGN)
    n = start + tl.arange(0, ROWS)
    r = tl.arange(0, R)
    o = own * BLOCK_O + tl.arange(0, BLOCK_O)
    live = (n < end)[:, None]
    filled = (r < rank)[None, :]
    within = (o < outputs)[None, :]
    weights = tl.load(b + o[None, :] * rank + r[:, None], mask=within & (r < rank)[:, None], other=0.0)
    if LAUNCH_PDL:
        gdc_launch_dependents()
        gdc_wait()
    mask = live & within
    at = y + n[:, None].to(tl.int64) * y_stride + (first + o)[None, :]
    base = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if SITE_COLUMNS > 0:
        first_column = tl.multiple_of(site * SITE_COLUMNS + column, 8)
        at_h = h + n[:, None].to(tl.int64) * y_stride + (first_column + r)[None, :]
        sums = tl.load(at_h, mask=live & filled, other=0.0)
    else:
        p = tl.arange(0, SPLIT_K)
        at_p = (site * num_splits + p)[:, None, None] * num_rows + n[None, :, None]
        narrow = (p < num_splits)[:, None, None] & live[None, :, :] & filled[None, :, :]
        sums = tl.sum(tl.load(h + at_p * R + r[None, None, :], mask=narrow, other=0.0), 0)
    # The trainer rounds the intermediate to the base's dtype too.
    if IEEE:
        delta = tl.dot(sums.to(weights.dtype), weights, input_precision="ieee")
    else:
        delta = tl.dot(sums.to(weights.dtype), weights)
    tl.store(at, (base + scale * delta).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _copy_a(  # type: ignore[no-untyped-def]
    slab,
    targets,
    adapters,
    row,
    rank,
    BLOCK: tl.constexpr,
):
    site = tl.program_id(0)
    adapter = tl.program_id(1)
    offset = tl.load(targets + site * 3)
    num_in = tl.load(targets + site * 3 + 2)
    slot = tl.load(adapters + adapter * 2)
    column = tl.load(adapters + adapter * 2 + 1)
    a = slab + slot * row + offset
    out = tl.load(targets + site * 3 + 1).to(tl.pointer_type(slab.dtype.element_ty)) + column * num_in
    cell = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < rank * num_in
    tl.store(out + cell, tl.load(a + cell, mask=inside), mask=inside)


def copy_a(
    slab_SP: torch.Tensor, rank_bucket: int, targets_S3: torch.Tensor, adapters_G2: torch.Tensor, *, most_in: int
) -> None:
    """Copies the A's of adapters of one rank bucket at every site. ``targets_S3`` int64: where the site's A begins in a
    row of the slab, the address of the first [in] that A's rows may be copied to, and in, which is ``most_in`` at most.
    ``adapters_G2`` int64: slot, and how many such rows come before its own."""
    block = 4096
    grid = (len(targets_S3), len(adapters_G2), triton.cdiv(rank_bucket * most_in, block))
    _copy(grid, (slab_SP, targets_S3, adapters_G2), (slab_SP.shape[1], rank_bucket), (block,))


_copy = Kernel(_copy_a, num_warps=8, num_stages=1)


@cache
def _supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def add(
    x_NI: torch.Tensor,
    y_NO: torch.Tensor,
    adapters: AdapterTiles,
    features_S2: torch.Tensor,
    widths: Sequence[int],
    *,
    h_NH: torch.Tensor | None,
) -> None:
    """One launch's rows of ``paged_batch.add_adapters``. ``features_S2``: of this product's sites."""
    num_sites, splits, site_columns = len(widths), 1, 0
    if h_NH is None:
        h = _intermediates(x_NI, sum(widths), adapters, features_S2)
        splits = h.shape[1]
    else:
        assert h_NH.stride() == y_NO.stride()
        h, site_columns = h_NH, h_NH.shape[1] // num_sites
    width = _width(adapters)
    block_o, num_warps = _expand_sizes(width, splits, adapters.tile_rows)
    pdl, ieee = _supports_pdl(x_NI.device), x_NI.dtype == torch.float32
    _kernel("expand", num_warps, pdl)(
        (sum(-(-outputs // block_o) for outputs in widths), len(adapters.tiles_C6)),
        (h, adapters.origin, features_S2, adapters.tiles_C6, y_NO),
        (splits, len(x_NI), y_NO.stride(0), *widths, *(0,) * (MAX_SITES - num_sites)),
        (width, block_o, triton.next_power_of_2(splits), site_columns, adapters.tile_rows, ieee, pdl),
    )


def _expand_sizes(rank: int, splits: int, tile_rows: int) -> tuple[int, int]:
    """Output features of a program, and its warps. Each program adds up the splits for itself, so where there are
    several it is to have many features: 52 → 30 µs for 64 adapters of rank 16 over 19,456 features on an H200 (and 24
    with half the splits)."""
    if splits > 1 and tile_rows == TILE_ROWS and rank <= 32:
        return (512 if rank <= 16 else 256), 8
    return (128 if rank <= 64 else 64), 4


def _intermediates(x_NI: torch.Tensor, num_out: int, adapters: AdapterTiles, features_S2: torch.Tensor) -> torch.Tensor:
    """float32 [S, P, N, R], for a product with so many outputs; rows in no tile hold anything."""
    if x_NI.stride(1) != 1:
        x_NI = x_NI.contiguous()
    num_rows, num_in, num_sites = len(x_NI), x_NI.shape[1], len(features_S2)
    rank = _width(adapters)
    # A few rows do not fill the device unless their input is computed in splits, which every program of ``_expand``
    # adds up: fewer where there are many of those.
    few = adapters.tile_rows == TILE_ROWS
    most = min(MAX_SPLIT_K if num_out <= MANY_OUTPUTS else MAX_SPLIT_K // 2, MAX_SPLIT_ELEMENTS // rank) if few else 1
    split_features = 128
    while -(-num_in // split_features) > most:
        split_features *= 2
    if x_NI.dtype == torch.float32:
        block_i = 128 if rank <= 32 else max(16, 4096 // rank)
    else:
        block_i = min(256, split_features) if rank <= 16 and few else 128 if rank <= 32 else 64
    splits = -(-num_in // split_features)
    h_SPNR = x_NI.new_empty(num_sites, splits, num_rows, rank, dtype=torch.float32)
    pdl, ieee = _supports_pdl(x_NI.device), x_NI.dtype == torch.float32
    _kernel("shrink", 4, pdl)(
        (splits, num_sites, len(adapters.tiles_C6)),
        (x_NI, adapters.origin, features_S2, adapters.tiles_C6, h_SPNR),
        (num_in, num_rows, x_NI.stride(0)),
        (rank, block_i, split_features, adapters.tile_rows, ieee, pdl),
    )
    return h_SPNR


def _width(adapters: AdapterTiles) -> int:
    """Columns of a tile's intermediates: the matrix unit takes no fewer than 16."""
    return max(16, adapters.max_rank)


@cache
def _kernel(name: str, num_warps: int, pdl: bool) -> Kernel:
    function, num_stages = (_shrink, 3) if name == "shrink" else (_expand, 1)
    return Kernel(function, num_warps=num_warps, num_stages=num_stages, launch_pdl=pdl)
