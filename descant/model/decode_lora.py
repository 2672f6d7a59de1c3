"""Adapters in a decode step on CUDA: two Triton kernels a product, whatever the number of adapters.

Rows are sorted by adapter and cut into tiles of at most ``TILE_ROWS`` rows of one adapter. ``_shrink`` makes the
rank-wide intermediates of a tile in parts of the input features, ``_expand`` adds the parts and their product with B in
place. No program ever reads another adapter's weights for a row, so nothing of one tenant (a NaN) reaches another.

Legend: N rows, I in, O out, R rank class, C tiles, P parts, S sites that share the input (at most 3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from descant.model.decode import TILE_ROWS

PART_FEATURES = 512
MAX_SITES = 3
ALIGN = tl.constexpr(64)
"""The bank's own: offsets are multiples of it, which lets loads be wide."""


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]
    x,
    slab,
    offsets,
    tiles,
    h,
    num_rows,
    num_parts,
    row,
    x_stride,
    IN: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    IEEE: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    site = tl.program_id(2)
    start = tl.load(tiles + tile * 4)
    end = tl.load(tiles + tile * 4 + 1)
    if start >= end:
        return
    slot = tl.load(tiles + tile * 4 + 2).to(tl.int64)
    a = slab + slot * row + tl.multiple_of(tl.load(offsets + site * 2), ALIGN)
    n = start + tl.arange(0, ROWS)
    r = tl.arange(0, BLOCK_R)
    sums = tl.zeros([ROWS, BLOCK_R], tl.float32)
    for step in range(0, PART, BLOCK_I):
        i = part * PART + step + tl.arange(0, BLOCK_I)
        xs = tl.load(x + n[:, None] * x_stride + i[None, :], mask=(n < end)[:, None] & (i < IN)[None, :], other=0.0)
        weights = tl.load(a + r[None, :] * IN + i[:, None], mask=(r < R)[None, :] & (i < IN)[:, None], other=0.0)
        if IEEE:
            sums += tl.dot(xs, weights, input_precision="ieee")
        else:
            sums += tl.dot(xs, weights)
    at = h + ((site * num_parts + part) * num_rows + n)[:, None] * R + r[None, :]
    tl.store(at, sums, mask=(n < end)[:, None] & (r < R)[None, :])


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    h,
    slab,
    offsets,
    tiles,
    y,
    num_rows,
    row,
    y_stride,
    O0: tl.constexpr,
    O1: tl.constexpr,
    O2: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    IEEE: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    start = tl.load(tiles + tile * 4)
    end = tl.load(tiles + tile * 4 + 1)
    if start >= end:
        return
    slot = tl.load(tiles + tile * 4 + 2).to(tl.int64)
    scale = tl.load(tiles + tile * 4 + 3).to(tl.float32, bitcast=True)
    # Which site's features: block numbers run through the sites.
    B0: tl.constexpr = (O0 + BLOCK_O - 1) // BLOCK_O
    B1: tl.constexpr = (O1 + BLOCK_O - 1) // BLOCK_O
    site = (block >= B0).to(tl.int32) + (block >= B0 + B1).to(tl.int32)
    own = tl.where(site == 0, block, tl.where(site == 1, block - B0, block - B0 - B1))
    features = tl.where(site == 0, O0, tl.where(site == 1, O1, O2))
    first = tl.where(site == 0, 0, tl.where(site == 1, O0, O0 + O1))
    b = slab + slot * row + tl.multiple_of(tl.load(offsets + site * 2 + 1), ALIGN)
    n = start + tl.arange(0, ROWS)
    r = tl.arange(0, BLOCK_R)
    o = own * BLOCK_O + tl.arange(0, BLOCK_O)
    weights = tl.load(b + o[None, :] * R + r[:, None], mask=(o < features)[None, :] & (r < R)[:, None], other=0.0)
    mask = (n < end)[:, None] & (o < features)[None, :]
    at = y + n[:, None].to(tl.int64) * y_stride + (first + o)[None, :]
    base = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, BLOCK_R], tl.float32)
    for part in tl.static_range(PARTS):
        at_h = h + ((site * PARTS + part) * num_rows + n)[:, None] * R + r[None, :]
        sums += tl.load(at_h, mask=(n < end)[:, None] & (r < R)[None, :], other=0.0)
    # The trainer rounds the intermediate to the base's dtype too.
    if IEEE:
        delta = tl.dot(sums.to(weights.dtype), weights, input_precision="ieee")
    else:
        delta = tl.dot(sums.to(weights.dtype), weights)
    tl.store(at, (base + scale * delta).to(y.dtype.element_ty), mask=mask)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slabs: list[torch.Tensor],
    offsets: torch.Tensor,
    tiles: list[torch.Tensor],
    ranks: list[int],
    rows: list[int],
    outs: list[int],
) -> torch.Tensor:
    y = F.linear(x, weight, bias)
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, num_in, num_sites = len(x), x.shape[1], len(outs)
    ieee = x.dtype == torch.float32
    o0, o1, o2 = (*outs, *[0] * (MAX_SITES - num_sites))
    parts = triton.cdiv(num_in, PART_FEATURES)
    for slab, class_offsets, class_tiles, rank, row in zip(slabs, offsets, tiles, ranks, rows, strict=True):
        block_r = max(16, rank)
        h = x.new_empty(num_sites, parts, num_rows, rank, dtype=torch.float32)
        _shrink[(len(class_tiles), parts, num_sites)](
            x,
            slab,
            class_offsets,
            class_tiles,
            h,
            num_rows,
            parts,
            row,
            x.stride(0),
            IN=num_in,
            R=rank,
            BLOCK_R=block_r,
            BLOCK_I=128 if block_r <= 32 else max(16, 4096 // block_r),
            PART=PART_FEATURES,
            ROWS=TILE_ROWS,
            IEEE=ieee,
            num_warps=4,
            num_stages=3,
        )
        block_o = 128 if block_r <= 64 else 64
        _expand[(len(class_tiles), sum(triton.cdiv(out, block_o) for out in outs))](
            h,
            slab,
            class_offsets,
            class_tiles,
            y,
            num_rows,
            row,
            y.stride(0),
            O0=o0,
            O1=o1,
            O2=o2,
            R=rank,
            BLOCK_R=block_r,
            BLOCK_O=block_o,
            PARTS=parts,
            ROWS=TILE_ROWS,
            IEEE=ieee,
            num_warps=4,
            num_stages=1,
        )
    return y


_LIBRARY = torch.library.Library("descant_decode", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor[] slabs, Tensor offsets, Tensor[] tiles, int[] ranks, "
    "int[] rows, int[] outs) -> Tensor"
)
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")


@torch.library.register_fake("descant_decode::linear", lib=_LIBRARY)
def _shape(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def linear(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    slabs: list[torch.Tensor],
    offsets_KS2: torch.Tensor,
    tiles: list[torch.Tensor],
    ranks: list[int],
    rows: list[int],
    outs: list[int],
) -> torch.Tensor:
    """See ``decode.linear``. One operator, so that a compiled layer sees its shapes and nothing else."""
    y: torch.Tensor = torch.ops.descant_decode.linear(
        x_NI, weight_OI, bias_O, slabs, offsets_KS2, tiles, ranks, rows, outs
    )
    return y
