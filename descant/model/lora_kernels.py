"""Adapters' products of a training pass on CUDA: one Triton kernel each, whatever the number of adapters.

They are bound by memory: a rank is narrow, so what counts is how often the wide tensors are read and written.
``shrink`` and ``pull`` read one once for all sites, ``expand`` and ``push`` write one, ``add_gradients`` reads both and
adds straight to the fp32 gradient rows. A run's tokens are cut into tiles of one adapter each: no program ever reads
another adapter's weights or tokens, so nothing of one tenant (a NaN) reaches another.

Legend: T tokens, I in, O out, R rank class, S sites that share the input (at most ``MAX_SITES``), C tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from descant.model.launch import Kernel
from descant.model.passes import to_device

MAX_SITES = 3
MAX_RANK = 64
"""Of larger classes the library's grouped products are as fast."""

MAX_FEATURES = 32768
"""Up to so many a program of ``pull`` runs through all of a site's. Over a vocabulary there would be too few programs:
each takes a part of ``PART_FEATURES``, and the parts are added up in float32."""

PART_FEATURES = 8192

TILE_TOKENS = 64
SPAN_TOKENS = 1024
"""Tokens a program of ``outer`` sums over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """``tiles_C4`` int32: first token, end, slot of the work row, bits of the float32 scale. ``spans_N4`` int32: first
    token, end, slot of the gradient row, of the segments that have one."""

    tiles_C4: torch.Tensor
    spans_N4: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """Where the sites' matrices lie in a row, and how wide their outputs are. ``rank``: of the class."""

    a_offsets: tuple[int, ...]
    b_offsets: tuple[int, ...]
    widths: tuple[int, ...]
    rank: int


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]
    x, slab, tiles, h, x_stride, row, a0, a1, a2,
    IN: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * 4
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
    scale = tl.load(tile + 3).to(tl.float32, bitcast=True)
    t, r, k = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    at_x = x + t[:, None].to(tl.int64) * x_stride + k[None, :]
    at_a = slab + slot * row + r[None, :] * IN + k[:, None]
    own, own_r = (t < end)[:, None], (r < R)[None, :]
    sum0 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    sum1 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    sum2 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for first in range(0, IN, BLOCK_K):
        inside = k < IN - first
        xs = tl.load(at_x + first, mask=own & inside[None, :], other=0.0)
        mask = own_r & inside[:, None]
        sum0 += tl.dot(xs, tl.load(at_a + a0 + first, mask=mask, other=0.0))
        if S > 1:
            sum1 += tl.dot(xs, tl.load(at_a + a1 + first, mask=mask, other=0.0))
        if S > 2:
            sum2 += tl.dot(xs, tl.load(at_a + a2 + first, mask=mask, other=0.0))
    at_h = h + t[:, None] * (S * R) + r[None, :]
    tl.store(at_h, (scale * sum0).to(h.dtype.element_ty), mask=own & own_r)
    if S > 1:
        tl.store(at_h + R, (scale * sum1).to(h.dtype.element_ty), mask=own & own_r)
    if S > 2:
        tl.store(at_h + 2 * R, (scale * sum2).to(h.dtype.element_ty), mask=own & own_r)


@triton.jit
def _pull(  # type: ignore[no-untyped-def]
    dy, slab, tiles, dh, dy_stride, row, b0, b1, b2,
    O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    tile, site, part = tiles + tl.program_id(0) * 4, tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
    scale = tl.load(tile + 3).to(tl.float32, bitcast=True)
    first = tl.where(site == 0, 0, tl.where(site == 1, O0, O0 + O1))
    features = tl.where(site == 0, O0, tl.where(site == 1, O1, O2))
    b = slab + slot * row + tl.multiple_of(tl.where(site == 0, b0, tl.where(site == 1, b1, b2)), 64)
    t, r, k = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    at_dy = dy + t[:, None].to(tl.int64) * dy_stride + tl.multiple_of(first, 8) + k[None, :]
    own, own_r = (t < end)[:, None], (r < R)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for done in range(part * PART, tl.minimum(features, part * PART + PART), BLOCK_K):
        inside = k < features - done
        dys = tl.load(at_dy + done, mask=own & inside[None, :], other=0.0)
        weights = tl.load(b + (done + k)[:, None] * R + r[None, :], mask=own_r & inside[:, None], other=0.0)
        total += tl.dot(dys, weights)
    at_dh = dh + t[:, None] * (S * R) + site * R + r[None, :]
    if PARTS > 1:
        tl.atomic_add(at_dh, scale * total, mask=own & own_r, sem="relaxed")
    else:
        tl.store(at_dh, (scale * total).to(dh.dtype.element_ty), mask=own & own_r)


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    h, slab, tiles, y, row, b0, b1, b2,
    O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
    N0: tl.constexpr = (O0 + BLOCK_O - 1) // BLOCK_O
    N1: tl.constexpr = (O1 + BLOCK_O - 1) // BLOCK_O
    site = (block >= N0).to(tl.int32) + (block >= N0 + N1).to(tl.int32)
    own_block = block - tl.where(site == 0, 0, tl.where(site == 1, N0, N0 + N1))
    first = tl.where(site == 0, 0, tl.where(site == 1, O0, O0 + O1))
    features = tl.where(site == 0, O0, tl.where(site == 1, O1, O2))
    b = slab + slot * row + tl.multiple_of(tl.where(site == 0, b0, tl.where(site == 1, b1, b2)), 64)
    t, r = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    o = own_block * BLOCK_O + tl.arange(0, BLOCK_O)
    hs = tl.load(
        h + t[:, None] * (S * R) + site * R + r[None, :], mask=(t < end)[:, None] & (r < R)[None, :], other=0.0
    )
    weights = tl.load(b + o[None, :] * R + r[:, None], mask=(r < R)[:, None] & (o < features)[None, :], other=0.0)
    at = y + t[:, None].to(tl.int64) * (O0 + O1 + O2) + tl.multiple_of(first, 8) + o[None, :]
    mask = (t < end)[:, None] & (o < features)[None, :]
    tl.store(at, tl.dot(hs, weights).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _push(  # type: ignore[no-untyped-def]
    dh, slab, tiles, dx, row, a0, a1, a2,
    IN: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * 4
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
    t, r = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    at_dh = dh + t[:, None] * (S * R) + r[None, :]
    at_a = slab + slot * row + r[:, None] * IN + i[None, :]
    mask_h, mask_a = (t < end)[:, None] & (r < R)[None, :], (r < R)[:, None] & (i < IN)[None, :]
    total = tl.dot(tl.load(at_dh, mask=mask_h, other=0.0), tl.load(at_a + a0, mask=mask_a, other=0.0))
    if S > 1:
        total += tl.dot(tl.load(at_dh + R, mask=mask_h, other=0.0), tl.load(at_a + a1, mask=mask_a, other=0.0))
    if S > 2:
        total += tl.dot(tl.load(at_dh + 2 * R, mask=mask_h, other=0.0), tl.load(at_a + a2, mask=mask_a, other=0.0))
    at = dx + t[:, None].to(tl.int64) * IN + i[None, :]
    tl.store(at, total.to(dx.dtype.element_ty), mask=(t < end)[:, None] & (i < IN)[None, :])


@triton.jit
def _outer(  # type: ignore[no-untyped-def]
    wide, narrow, gradients, spans, wide_stride, row, g0, g1, g2,
    F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """dA [R, I] of all sites (``SHARED``: one wide tensor x, narrow dh) or dB [O, R] of a block's site (wide dy, narrow
    h). Sums of spans meet in the gradient row by atomic additions."""
    block, span = tl.program_id(0), spans + tl.program_id(1) * 4
    start, end, slot = tl.load(span), tl.load(span + 1), tl.load(span + 2).to(tl.int64)
    f, r, t = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    site = 0
    first = 0
    features = F0
    if not SHARED:
        N0: tl.constexpr = (F0 + BLOCK_F - 1) // BLOCK_F
        N1: tl.constexpr = (F1 + BLOCK_F - 1) // BLOCK_F
        site = (block >= N0).to(tl.int32) + (block >= N0 + N1).to(tl.int32)
        block = block - tl.where(site == 0, 0, tl.where(site == 1, N0, N0 + N1))
        first = tl.where(site == 0, 0, tl.where(site == 1, F0, F0 + F1))
        features = tl.where(site == 0, F0, tl.where(site == 1, F1, F2))
    f = block * BLOCK_F + f
    own_f, own_r = f < features, r < R
    at_wide = wide + tl.multiple_of(first, 8) + f[:, None]
    at_narrow = narrow + site * R + r[None, :]
    sum0 = tl.zeros([BLOCK_F, BLOCK_R], tl.float32)
    sum1 = tl.zeros([BLOCK_F, BLOCK_R], tl.float32)
    sum2 = tl.zeros([BLOCK_F, BLOCK_R], tl.float32)
    for token in range(start, end, BLOCK_T):
        own_t = token + t < end
        rows = (token + t).to(tl.int64)
        wides = tl.load(at_wide + rows[None, :] * wide_stride, mask=own_f[:, None] & own_t[None, :], other=0.0)
        mask = own_t[:, None] & own_r[None, :]
        at = at_narrow + rows[:, None] * (S * R)
        sum0 += tl.dot(wides, tl.load(at, mask=mask, other=0.0))
        if SHARED and S > 1:
            sum1 += tl.dot(wides, tl.load(at + R, mask=mask, other=0.0))
        if SHARED and S > 2:
            sum2 += tl.dot(wides, tl.load(at + 2 * R, mask=mask, other=0.0))
    mask_g = own_f[:, None] & own_r[None, :]
    if SHARED:
        cells = gradients + slot * row + f[:, None] + r[None, :] * F0
        tl.atomic_add(cells + g0, sum0, mask=mask_g, sem="relaxed")
        if S > 1:
            tl.atomic_add(cells + g1, sum1, mask=mask_g, sem="relaxed")
        if S > 2:
            tl.atomic_add(cells + g2, sum2, mask=mask_g, sem="relaxed")
    else:
        own_g = tl.where(site == 0, g0, tl.where(site == 1, g1, g2))
        cells = gradients + slot * row + own_g + f[:, None] * R + r[None, :]
        tl.atomic_add(cells, sum0, mask=mask_g, sem="relaxed")


BLOCK = 128
BLOCK_K = 64

_SHRINK = Kernel(_shrink, num_warps=4, num_stages=4)
_PULL = Kernel(_pull, num_warps=4, num_stages=4)
_EXPAND = Kernel(_expand, num_warps=4, num_stages=1)
_PUSH = Kernel(_push, num_warps=4, num_stages=1)
_OUTER = Kernel(_outer, num_warps=4, num_stages=4)


def shrink(x_TI: torch.Tensor, slab_SP: torch.Tensor, tiles: Tiles, sites: Sites) -> torch.Tensor:
    """[T, S · R]: every token's scaled products with the A's of its adapter."""
    num_in, num_sites, rank = x_TI.shape[1], len(sites.widths), sites.rank
    h_TR = x_TI.new_empty(len(x_TI), num_sites * rank)
    _SHRINK(
        (len(tiles.tiles_C4), 1),
        (x_TI, slab_SP, tiles.tiles_C4, h_TR),
        (x_TI.stride(0), slab_SP.shape[1], *_three(sites.a_offsets)),
        (num_in, rank, max(16, rank), num_sites, TILE_TOKENS, BLOCK_K),
    )
    return h_TR


def expand(h_TR: torch.Tensor, slab_SP: torch.Tensor, tiles: Tiles, sites: Sites) -> torch.Tensor:
    """[T, sum of widths]"""
    y_TO = h_TR.new_empty(len(h_TR), sum(sites.widths))
    _EXPAND(
        (_blocks(sites.widths), len(tiles.tiles_C4)),
        (h_TR, slab_SP, tiles.tiles_C4, y_TO),
        (slab_SP.shape[1], *_three(sites.b_offsets)),
        (*_three(sites.widths), sites.rank, max(16, sites.rank), len(sites.widths), TILE_TOKENS, BLOCK),
    )
    return y_TO


def pull(dy_TO: torch.Tensor, slab_SP: torch.Tensor, tiles: Tiles, sites: Sites) -> torch.Tensor:
    """[T, S · R]: every token's scaled products with the B's of its adapter, transposed."""
    num_sites, rank, widest = len(sites.widths), sites.rank, max(sites.widths)
    parts = 1 if widest <= MAX_FEATURES else -(-widest // PART_FEATURES)
    shape = (len(dy_TO), num_sites * rank)
    dh_TR = dy_TO.new_empty(shape) if parts == 1 else dy_TO.new_zeros(shape, dtype=torch.float32)
    _PULL(
        (len(tiles.tiles_C4), num_sites * parts),
        (dy_TO, slab_SP, tiles.tiles_C4, dh_TR),
        (dy_TO.stride(0), slab_SP.shape[1], *_three(sites.b_offsets)),
        (
            *_three(sites.widths),
            rank,
            max(16, rank),
            num_sites,
            TILE_TOKENS,
            BLOCK_K,
            parts,
            PART_FEATURES if parts > 1 else widest,
        ),
    )
    return dh_TR.to(dy_TO.dtype)


def push(dh_TR: torch.Tensor, in_features: int, slab_SP: torch.Tensor, tiles: Tiles, sites: Sites) -> torch.Tensor:
    """[T, I]: dX of the adapters."""
    dx_TI = dh_TR.new_empty(len(dh_TR), in_features)
    _PUSH(
        (_blocks((in_features,)), len(tiles.tiles_C4)),
        (dh_TR, slab_SP, tiles.tiles_C4, dx_TI),
        (slab_SP.shape[1], *_three(sites.a_offsets)),
        (in_features, sites.rank, max(16, sites.rank), len(sites.widths), TILE_TOKENS, BLOCK),
    )
    return dx_TI


def add_gradients(
    x_TI: torch.Tensor,
    dy_TO: torch.Tensor,
    h_TR: torch.Tensor,
    dh_TR: torch.Tensor,
    gradient_SP: torch.Tensor,
    tiles: Tiles,
    sites: Sites,
) -> None:
    """dA and dB of every segment that has a gradient row, added to it in float32."""
    for wide, narrow, offsets, features, shared in (
        (x_TI, dh_TR, sites.a_offsets, (x_TI.shape[1],), True),
        (dy_TO, h_TR, sites.b_offsets, sites.widths, False),
    ):
        _OUTER(
            (_blocks(features), len(tiles.spans_N4)),
            (wide, narrow, gradient_SP, tiles.spans_N4),
            (wide.stride(0), gradient_SP.shape[1], *_three(offsets)),
            (*_three(features), sites.rank, max(16, sites.rank), len(sites.widths), shared, 64, BLOCK),
        )


def _three(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Of sites that are not there, 0."""
    return numbers + (0,) * (MAX_SITES - len(numbers))


def _blocks(widths: tuple[int, ...]) -> int:
    return sum(-(-width // BLOCK) for width in widths)


def make_tiles(segments: Sequence[tuple[int, int, int, float, int | None]], device: torch.device) -> Tiles:
    """Of segments (first token, end, work slot, scale, gradient slot), in one copy to the device."""
    tiles = [
        (*piece, slot, np.float32(scale).view(np.int32))
        for start, end, slot, scale, _ in segments
        for piece in _pieces(start, end, TILE_TOKENS)
    ]
    spans = [
        (*piece, gradient, 0)
        for start, end, _, _, gradient in segments
        if gradient is not None
        for piece in _pieces(start, end, SPAN_TOKENS)
    ]
    both = to_device(torch.tensor([*tiles, *spans], dtype=torch.int32), device)
    return Tiles(tiles_C4=both[: len(tiles)], spans_N4=both[len(tiles) :])


def _pieces(start: int, end: int, tokens: int) -> list[tuple[int, int]]:
    return [(first, min(first + tokens, end)) for first in range(start, end, tokens)]
