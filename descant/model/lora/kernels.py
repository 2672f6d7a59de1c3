"""Adapters' products of a training pass on CUDA: one Triton kernel each, whatever the adapters and their ranks.

They are bound by memory: a rank is narrow, so what counts is how often the wide tensors are read and written.
``shrink`` and ``expand_backward`` read one once for all sites, ``expand`` and ``shrink_backward`` write one,
``add_gradients`` reads both and adds straight to the fp32 gradient rows. A run's tokens are cut into tiles of one
adapter each, or of none: no program ever reads another adapter's weights or tokens, so nothing of one tenant (a NaN)
reaches another.

A tile says where its adapter's row lies in memory and what its rank bucket is; a site's matrices are found from there,
since they begin at the same number of features in a row of any bucket (``layout.Layout``). A program is as wide as the
widest bucket of the run; what lies beyond its tile's rank is masked, so it costs arithmetic and no memory's time.

Legend: T tokens, I in, O out, R widest rank bucket of the run, S sites that share the input (at most ``MAX_SITES``),
C tiles, N spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from descant.model.forward_batch import to_device
from descant.model.kernel_launch import Kernel

MAX_SITES = 3
MAX_RANK = 64
"""Of larger rank buckets the library's grouped products are as fast."""

MIN_RANK = 32
"""Columns of a token's intermediates at least: the SDK's default. Narrower adapters cost as much, and each number has
programs of its own."""

MAX_FEATURES = 32768
"""Up to so many a program of ``expand_backward`` runs through all of a site's. Over a vocabulary there would be too few
programs: each takes a split of ``SPLIT_FEATURES``, and the splits are added up in float32."""

SPLIT_FEATURES = 8192

TILE_TOKENS = 64
SPAN_TOKENS = 1024
"""Tokens a program of ``outer`` sums over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """``tiles_C4`` int64: first token, end, address of the compute copy, rank bucket and, in the upper half, the bits
    of the float32 scale. Those behind the first ``num_own`` are of tokens without an adapter, with rank 0.
    ``spans_N4``: the same with the address of the gradient row, of the segments that have one. ``rank``: the widest
    bucket.

    Its user holds the tensors that the rows are in."""

    tiles_C4: torch.Tensor
    spans_N4: torch.Tensor
    num_own: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """How many features lie before the sites' A and B in a row (the rank bucket times as many elements), and how wide
    their outputs are."""

    a_begins: tuple[int, ...]
    b_begins: tuple[int, ...]
    widths: tuple[int, ...]


@triton.jit
def _tile(tiles, index, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """First token, end, row, rank, scale. Rows lie at multiples of 128 bytes and ranks are multiples of 8, which the
    compiler must be told to read 16 bytes at a time."""
    at = tiles + index * 4
    start, end, kind = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32), tl.load(at + 3)
    row = tl.multiple_of(tl.load(at + 2).to(tl.pointer_type(dtype)), 128)
    rank, scale = tl.multiple_of(kind.to(tl.int32), 8), (kind >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return start, end, row, rank, scale


@triton.jit
def _offset(begin, rank):  # type: ignore[no-untyped-def]
    """Where a site's A or B begins in a row, which may have more than 2³¹ elements."""
    return tl.multiple_of(begin.to(tl.int64) * rank, 64)


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]
    x, tiles, h, x_stride, a0, a1, a2,
    IN: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    start, end, row, rank, scale = _tile(tiles, tl.program_id(0), x.dtype.element_ty)
    t, r, k = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    at_x = x + t[:, None].to(tl.int64) * x_stride + k[None, :]
    at_a = row + r[None, :] * IN + k[:, None]
    own, own_r = (t < end)[:, None], (r < rank)[None, :]
    sum0 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    sum1 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    sum2 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for first in range(0, IN, BLOCK_K):
        inside = k < IN - first
        xs = tl.load(at_x + first, mask=own & inside[None, :], other=0.0)
        mask = own_r & inside[:, None]
        sum0 += tl.dot(xs, tl.load(at_a + _offset(a0, rank) + first, mask=mask, other=0.0))
        if S > 1:
            sum1 += tl.dot(xs, tl.load(at_a + _offset(a1, rank) + first, mask=mask, other=0.0))
        if S > 2:
            sum2 += tl.dot(xs, tl.load(at_a + _offset(a2, rank) + first, mask=mask, other=0.0))
    at_h = h + t[:, None] * (S * R) + r[None, :]
    tl.store(at_h, (scale * sum0).to(h.dtype.element_ty), mask=own & own_r)
    if S > 1:
        tl.store(at_h + R, (scale * sum1).to(h.dtype.element_ty), mask=own & own_r)
    if S > 2:
        tl.store(at_h + 2 * R, (scale * sum2).to(h.dtype.element_ty), mask=own & own_r)


@triton.jit
def _expand_backward(  # type: ignore[no-untyped-def]
    dy, tiles, dh, dy_stride, b0, b1, b2,
    O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, FEATURES_PER_SPLIT: tl.constexpr,
):  # fmt: skip
    site, split = tl.program_id(1) // SPLIT_K, tl.program_id(1) % SPLIT_K
    start, end, row, rank, scale = _tile(tiles, tl.program_id(0), dy.dtype.element_ty)
    first = tl.where(site == 0, 0, tl.where(site == 1, O0, O0 + O1))
    features = tl.where(site == 0, O0, tl.where(site == 1, O1, O2))
    b = row + _offset(tl.where(site == 0, b0, tl.where(site == 1, b1, b2)), rank)
    t, r, k = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    at_dy = dy + t[:, None].to(tl.int64) * dy_stride + tl.multiple_of(first, 8) + k[None, :]
    own, own_r = (t < end)[:, None], (r < rank)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for done in range(
        split * FEATURES_PER_SPLIT, tl.minimum(features, split * FEATURES_PER_SPLIT + FEATURES_PER_SPLIT), BLOCK_K
    ):
        inside = k < features - done
        dys = tl.load(at_dy + done, mask=own & inside[None, :], other=0.0)
        weights = tl.load(b + (done + k)[:, None] * rank + r[None, :], mask=own_r & inside[:, None], other=0.0)
        total += tl.dot(dys, weights)
    at_dh = dh + t[:, None] * (S * R) + site * R + r[None, :]
    if SPLIT_K > 1:
        tl.atomic_add(at_dh, scale * total, mask=own & own_r, sem="relaxed")
    else:
        tl.store(at_dh, (scale * total).to(dh.dtype.element_ty), mask=own & own_r)


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    h, tiles, y, b0, b1, b2,
    O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    start, end, row, rank, _ = _tile(tiles, tl.program_id(1), h.dtype.element_ty)
    N0: tl.constexpr = (O0 + BLOCK_O - 1) // BLOCK_O
    N1: tl.constexpr = (O1 + BLOCK_O - 1) // BLOCK_O
    site = (block >= N0).to(tl.int32) + (block >= N0 + N1).to(tl.int32)
    own_block = block - tl.where(site == 0, 0, tl.where(site == 1, N0, N0 + N1))
    first = tl.where(site == 0, 0, tl.where(site == 1, O0, O0 + O1))
    features = tl.where(site == 0, O0, tl.where(site == 1, O1, O2))
    b = row + _offset(tl.where(site == 0, b0, tl.where(site == 1, b1, b2)), rank)
    t, r = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    o = own_block * BLOCK_O + tl.arange(0, BLOCK_O)
    own_r = r < rank
    at_h = h + t[:, None] * (S * R) + site * R + r[None, :]
    hs = tl.load(at_h, mask=(t < end)[:, None] & own_r[None, :], other=0.0)
    weights = tl.load(b + o[None, :] * rank + r[:, None], mask=own_r[:, None] & (o < features)[None, :], other=0.0)
    at = y + t[:, None].to(tl.int64) * (O0 + O1 + O2) + tl.multiple_of(first, 8) + o[None, :]
    mask = (t < end)[:, None] & (o < features)[None, :]
    tl.store(at, tl.dot(hs, weights).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _shrink_backward(  # type: ignore[no-untyped-def]
    dh, tiles, dx, a0, a1, a2,
    IN: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    start, end, row, rank, _ = _tile(tiles, tl.program_id(1), dh.dtype.element_ty)
    t, r = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    at_dh = dh + t[:, None] * (S * R) + r[None, :]
    at_a = row + r[:, None] * IN + i[None, :]
    mask_h, mask_a = (t < end)[:, None] & (r < rank)[None, :], (r < rank)[:, None] & (i < IN)[None, :]
    weights = tl.load(at_a + _offset(a0, rank), mask=mask_a, other=0.0)
    total = tl.dot(tl.load(at_dh, mask=mask_h, other=0.0), weights)
    if S > 1:
        weights = tl.load(at_a + _offset(a1, rank), mask=mask_a, other=0.0)
        total += tl.dot(tl.load(at_dh + R, mask=mask_h, other=0.0), weights)
    if S > 2:
        weights = tl.load(at_a + _offset(a2, rank), mask=mask_a, other=0.0)
        total += tl.dot(tl.load(at_dh + 2 * R, mask=mask_h, other=0.0), weights)
    at = dx + t[:, None].to(tl.int64) * IN + i[None, :]
    tl.store(at, total.to(dx.dtype.element_ty), mask=(t < end)[:, None] & (i < IN)[None, :])


@triton.jit
def _outer(  # type: ignore[no-untyped-def]
    wide, narrow, spans, wide_stride, g0, g1, g2,
    F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, S: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """dA [R, I] of all sites (``SHARED``: one wide tensor x, narrow dh) or dB [O, R] of a block's site (wide dy, narrow
    h). Sums of spans meet in the gradient row by atomic additions."""
    block = tl.program_id(0)
    start, end, row, rank, _ = _tile(spans, tl.program_id(1), tl.float32)
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
    own_f, own_r = f < features, r < rank
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
        cells = row + f[:, None] + r[None, :] * F0
        tl.atomic_add(cells + _offset(g0, rank), sum0, mask=mask_g, sem="relaxed")
        if S > 1:
            tl.atomic_add(cells + _offset(g1, rank), sum1, mask=mask_g, sem="relaxed")
        if S > 2:
            tl.atomic_add(cells + _offset(g2, rank), sum2, mask=mask_g, sem="relaxed")
    else:
        db = row + _offset(tl.where(site == 0, g0, tl.where(site == 1, g1, g2)), rank)
        tl.atomic_add(db + f[:, None] * rank + r[None, :], sum0, mask=mask_g, sem="relaxed")


BLOCK = 128
BLOCK_K = 64

_SHRINK = Kernel(_shrink, num_warps=4, num_stages=4)
_EXPAND_BACKWARD = Kernel(_expand_backward, num_warps=4, num_stages=4)
_EXPAND = Kernel(_expand, num_warps=4, num_stages=1)
_SHRINK_BACKWARD = Kernel(_shrink_backward, num_warps=4, num_stages=1)
_OUTER = Kernel(_outer, num_warps=4, num_stages=4)


def shrink(x_TI: torch.Tensor, tiles: Tiles, sites: Sites) -> torch.Tensor:
    """[T, S · R]: every token's scaled products with the A's of its adapter. Cells beyond its rank are not written."""
    num_in, num_sites = x_TI.shape[1], len(sites.widths)
    h_TR = x_TI.new_empty(len(x_TI), num_sites * tiles.rank)
    _SHRINK(
        (tiles.num_own, 1),
        (x_TI, tiles.tiles_C4, h_TR),
        (x_TI.stride(0), *_three(sites.a_begins)),
        (num_in, *_ranks(tiles), num_sites, TILE_TOKENS, BLOCK_K),
    )
    return h_TR


def expand(h_TR: torch.Tensor, tiles: Tiles, sites: Sites) -> torch.Tensor:
    """[T, sum of widths]: zeros of tokens without an adapter."""
    y_TO = h_TR.new_empty(len(h_TR), sum(sites.widths))
    _EXPAND(
        (_blocks(sites.widths), len(tiles.tiles_C4)),
        (h_TR, tiles.tiles_C4, y_TO),
        _three(sites.b_begins),
        (*_three(sites.widths), *_ranks(tiles), len(sites.widths), TILE_TOKENS, BLOCK),
    )
    return y_TO


def expand_backward(dy_TO: torch.Tensor, tiles: Tiles, sites: Sites) -> torch.Tensor:
    """[T, S · R]: every token's scaled products with the B's of its adapter, transposed. Cells beyond its rank say
    nothing."""
    num_sites, widest = len(sites.widths), max(sites.widths)
    split_k = 1 if widest <= MAX_FEATURES else -(-widest // SPLIT_FEATURES)
    split_features = SPLIT_FEATURES if split_k > 1 else widest
    shape = (len(dy_TO), num_sites * tiles.rank)
    dh_TR = dy_TO.new_empty(shape) if split_k == 1 else dy_TO.new_zeros(shape, dtype=torch.float32)
    _EXPAND_BACKWARD(
        (tiles.num_own, num_sites * split_k),
        (dy_TO, tiles.tiles_C4, dh_TR),
        (dy_TO.stride(0), *_three(sites.b_begins)),
        (*_three(sites.widths), *_ranks(tiles), num_sites, TILE_TOKENS, BLOCK_K, split_k, split_features),
    )
    return dh_TR.to(dy_TO.dtype)


def shrink_backward(dh_TR: torch.Tensor, in_features: int, tiles: Tiles, sites: Sites) -> torch.Tensor:
    """[T, I]: dX of the adapters, zeros of tokens without one."""
    dx_TI = dh_TR.new_empty(len(dh_TR), in_features)
    _SHRINK_BACKWARD(
        (_blocks((in_features,)), len(tiles.tiles_C4)),
        (dh_TR, tiles.tiles_C4, dx_TI),
        _three(sites.a_begins),
        (in_features, *_ranks(tiles), len(sites.widths), TILE_TOKENS, BLOCK),
    )
    return dx_TI


def add_gradients(
    x_TI: torch.Tensor, dy_TO: torch.Tensor, h_TR: torch.Tensor, dh_TR: torch.Tensor, tiles: Tiles, sites: Sites
) -> None:
    """dA and dB of every segment that has a gradient row, added to it in float32."""
    for wide, narrow, begins, features, shared in (
        (x_TI, dh_TR, sites.a_begins, (x_TI.shape[1],), True),
        (dy_TO, h_TR, sites.b_begins, sites.widths, False),
    ):
        _OUTER(
            (_blocks(features), len(tiles.spans_N4)),
            (wide, narrow, tiles.spans_N4),
            (wide.stride(0), *_three(begins)),
            (*_three(features), *_ranks(tiles), len(sites.widths), shared, TILE_TOKENS, BLOCK),
        )


def _three(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Of sites that are not there, 0."""
    return numbers + (0,) * (MAX_SITES - len(numbers))


def _blocks(widths: tuple[int, ...]) -> int:
    return sum(-(-width // BLOCK) for width in widths)


def _ranks(tiles: Tiles) -> tuple[int, int]:
    """Of a row of the intermediates, and of a program (the device's matrix unit takes no less than 16)."""
    return tiles.rank, max(16, tiles.rank)


TileRow = tuple[int, int, int, int]
"""Of ``Tiles.tiles_C4`` or ``spans_N4``."""


class TileSegment(NamedTuple):
    """Tokens ``start:end`` of one adapter, its rank bucket, and the addresses of its rows."""

    start: int
    end: int
    rank: int
    scale: float
    compute: int
    gradient: int | None


def make_tiles(segments: Sequence[TileSegment], num_tokens: int, device: torch.device) -> Tiles:
    """For all of ``num_tokens`` tokens, in one copy to the device."""
    own, base_only, spans = tile_rows(segments, num_tokens)
    tiles = [*own, *base_only]
    both = to_device(torch.tensor([*tiles, *spans], dtype=torch.int64), device)
    return Tiles(
        tiles_C4=both[: len(tiles)],
        spans_N4=both[len(tiles) :],
        num_own=len(own),
        rank=max(MIN_RANK, *(segment.rank for segment in segments)),
    )


def tile_rows(segments: Sequence[TileSegment], num_tokens: int) -> tuple[list[TileRow], list[TileRow], list[TileRow]]:
    """Of ``Tiles``: those of adapters, those of tokens without one, and spans."""
    own: list[TileRow] = []
    spans: list[TileRow] = []
    base_only: list[TileRow] = []
    end = 0
    for segment in segments:
        base_only += [(*bounds, 0, 0) for bounds in _cut(end, segment.start, TILE_TOKENS)]
        end = segment.end
        kind = segment.rank | int(np.float32(segment.scale).view(np.int32)) << 32
        own += [(*bounds, segment.compute, kind) for bounds in _cut(segment.start, end, TILE_TOKENS)]
        if segment.gradient is not None:
            spans += [(*bounds, segment.gradient, kind) for bounds in _cut(segment.start, end, SPAN_TOKENS)]
    base_only += [(*bounds, 0, 0) for bounds in _cut(end, num_tokens, TILE_TOKENS)]
    return own, base_only, spans


def _cut(start: int, end: int, tokens: int) -> list[tuple[int, int]]:
    return [(first, min(first + tokens, end)) for first in range(start, end, tokens)]
