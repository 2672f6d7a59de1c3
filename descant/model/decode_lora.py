"""Adapters in a decode step on CUDA: two Triton kernels a layer, whatever the number of adapters.

Rows are sorted by adapter and cut into tiles of at most ``TILE_ROWS`` rows of one adapter. ``_shrink`` makes the
rank-wide intermediates of a tile in parts of the input features, ``_expand`` adds the parts and their product with B in
place. No program ever reads another adapter's weights for a row, so nothing of one tenant (a NaN) reaches another.

Legend: N rows, I in, O out, R rank class, C tiles, P parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from descant.model.decode import TILE_ROWS

PART_FEATURES = 512


@triton.jit
def _shrink(
    x,
    a,
    tiles,
    h,
    num_rows,
    row,
    x_stride,
    I: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    IEEE: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    start = tl.load(tiles + tile * 4)
    end = tl.load(tiles + tile * 4 + 1)
    if start >= end:
        return
    slot = tl.load(tiles + tile * 4 + 2).to(tl.int64)
    n = start + tl.arange(0, ROWS)
    r = tl.arange(0, BLOCK_R)
    sums = tl.zeros([ROWS, BLOCK_R], tl.float32)
    for step in range(0, PART, BLOCK_I):
        i = part * PART + step + tl.arange(0, BLOCK_I)
        xs = tl.load(x + n[:, None] * x_stride + i[None, :], mask=(n < end)[:, None] & (i < I)[None, :], other=0.0)
        weights = tl.load(
            a + slot * row + r[None, :] * I + i[:, None], mask=(r < R)[None, :] & (i < I)[:, None], other=0.0
        )
        if IEEE:
            sums += tl.dot(xs, weights, input_precision="ieee")
        else:
            sums += tl.dot(xs, weights)
    tl.store(h + (part * num_rows + n)[:, None] * R + r[None, :], sums, mask=(n < end)[:, None] & (r < R)[None, :])


@triton.jit
def _expand(
    h,
    b,
    tiles,
    y,
    num_rows,
    row,
    y_stride,
    O: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    IEEE: tl.constexpr,
):
    tile = tl.program_id(0)
    start = tl.load(tiles + tile * 4)
    end = tl.load(tiles + tile * 4 + 1)
    if start >= end:
        return
    slot = tl.load(tiles + tile * 4 + 2).to(tl.int64)
    scale = tl.load(tiles + tile * 4 + 3).to(tl.float32, bitcast=True)
    n = start + tl.arange(0, ROWS)
    r = tl.arange(0, BLOCK_R)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    weights = tl.load(b + slot * row + o[None, :] * R + r[:, None], mask=(o < O)[None, :] & (r < R)[:, None], other=0.0)
    mask = (n < end)[:, None] & (o < O)[None, :]
    at = y + n[:, None] * y_stride + o[None, :]
    base = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, BLOCK_R], tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(
            h + (part * num_rows + n)[:, None] * R + r[None, :], mask=(n < end)[:, None] & (r < R)[None, :], other=0.0
        )
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
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    tiles: list[torch.Tensor],
    ranks: list[int],
    rows: list[int],
) -> torch.Tensor:
    y = F.linear(x, weight, bias)
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, num_in, num_out = len(x), x.shape[1], y.shape[1]
    ieee = x.dtype == torch.float32
    for a_class, b_class, tiles_class, rank, row in zip(a, b, tiles, ranks, rows, strict=True):
        block_r = max(16, rank)
        part = PART_FEATURES
        parts = triton.cdiv(num_in, part)
        h = x.new_empty(parts, num_rows, rank, dtype=torch.float32)
        _shrink[(len(tiles_class), parts)](
            x,
            a_class,
            tiles_class,
            h,
            num_rows,
            row,
            x.stride(0),
            I=num_in,
            R=rank,
            BLOCK_R=block_r,
            BLOCK_I=max(16, 4096 // block_r) if block_r > 32 else 128,
            PART=part,
            ROWS=TILE_ROWS,
            IEEE=ieee,
            num_warps=4,
            num_stages=3,
        )
        block_o = 128 if block_r <= 64 else 64
        _expand[(len(tiles_class), triton.cdiv(num_out, block_o))](
            h,
            b_class,
            tiles_class,
            y,
            num_rows,
            row,
            y.stride(0),
            O=num_out,
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
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor[] a, Tensor[] b, Tensor[] tiles, int[] ranks, int[] rows) "
    "-> Tensor"
)
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")


@torch.library.register_fake("descant_decode::linear", lib=_LIBRARY)
def _shape(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def linear(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    tiles: list[torch.Tensor],
    ranks: list[int],
    rows: list[int],
) -> torch.Tensor:
    """See ``decode.linear``. One operator, so that a compiled layer sees its shapes and nothing else."""
    y: torch.Tensor = torch.ops.descant_decode.linear(x_NI, weight_OI, bias_O, a, b, tiles, ranks, rows)
    return y
