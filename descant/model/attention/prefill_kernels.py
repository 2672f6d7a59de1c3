"""Attention over the KV pages on CUDA, of chunked prefill and verification, as Triton kernels.

A program takes one tile of query rows of one sequence and one key head, and walks the sequence's pages with a running
maximum and float32 sums. A page of one head is one contiguous block ``[PAGE_TOKENS, D]``. Cells beyond a sequence's end
are never read (a masked load gives 0), so what an earlier owner left in a page's tail reaches no other sequence.

Legend: T tokens, B sequences, H query heads, K key heads, G = H / K, D head size, C tiles, W width of the page table.
"""

from __future__ import annotations

from itertools import accumulate
from typing import cast

import numpy as np
import torch
import triton
import triton.language as tl

from descant.model.attention.head_shape import HeadShape
from descant.model.forward_batch import PAGE_TOKENS, ForwardBatch, to_device
from descant.model.paged_batch import PrefillMetadata, prefill_tile_tokens, prefill_tiles


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    table,
    tiles,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    table_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAGE: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + tile * 4)
    if sequence < 0:
        return
    start = tl.load(tiles + tile * 4 + 1)
    rows = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    t = tl.arange(0, BLOCK_T)
    live = t < rows
    at = position + t
    page = tl.load(table + sequence * table_stride + at // PAGE, mask=live, other=0).to(tl.int64)
    cell = (page * K + head) * PAGE + at % PAGE
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < D)[None, :]
    x = tl.load(key + (start + t)[:, None] * key_stride_t + head * key_stride_h + d[None, :], mask=mask)
    tl.store(keys + cell[:, None] * D + d[None, :], x, mask=mask)
    d = tl.arange(0, BLOCK_DV)
    mask = live[:, None] & (d < DV)[None, :]
    x = tl.load(value + (start + t)[:, None] * value_stride_t + head * value_stride_h + d[None, :], mask=mask)
    tl.store(values + cell[:, None] * DV + d[None, :], x, mask=mask)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    table,
    tiles,
    out,
    scaling,
    softcap,
    query_stride_t,
    query_stride_h,
    table_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IEEE: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + tile * 4)
    start = tl.load(tiles + tile * 4 + 1)
    rows = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    m = tl.arange(0, BLOCK_M)
    t = m // G
    query_head = head * G + m % G
    live = t < rows
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    row = (start + t) * (K * G) + query_head
    mask_out = live[:, None] & (dv < DV)[None, :]
    if sequence < 0:  # tokens that fill the pass up, or none
        zeros = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * DV + dv[None, :], zeros, mask=mask_out)
        return
    n = tl.arange(0, PAGE)
    q = tl.load(
        query + (start + t)[:, None] * query_stride_t + query_head[:, None] * query_stride_h + d[None, :],
        mask=live[:, None] & (d < D)[None, :],
        other=0.0,
    )
    at = position + t
    last = position + rows - 1
    num_pages = last // PAGE + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // PAGE

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for number in range(first, num_pages):
        page = tl.load(table + sequence * table_stride + number).to(tl.int64)
        cell = (page * K + head) * PAGE + n
        key_at = number * PAGE + n
        inside = key_at <= last
        k = tl.load(keys + cell[None, :] * D + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        if IEEE:
            scores = tl.dot(q, k, input_precision="ieee") * scaling
        else:
            scores = tl.dot(q, k) * scaling
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = key_at[None, :] <= at[:, None]
        if WINDOW > 0:
            seen = seen & (key_at[None, :] > at[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        fade = tl.exp(highest - base)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(values + cell[:, None] * DV + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
        if IEEE:
            sums = sums * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
        else:
            sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = higher

    sums = sums / total[:, None]
    tl.store(out + row[:, None] * DV + dv[None, :], sums.to(out.dtype.element_ty), mask=mask_out)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """``prefill_attention`` of a ``ForwardBatch`` with ``kv``; 0 comes out for tokens behind its own."""
    group = query.shape[1] // key.shape[1]
    metadata = _metadata(batch, group, len(query), query.device)
    return prefill_attention(
        query, key, value, keys, values, metadata, scaling=scaling, window=window or 0, softcap=softcap or 0.0
    )


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: PrefillMetadata,
    *,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Writes the tokens' keys and values into their pages, then attends over all of the sequence. ``query`` [T, H, D],
    ``key`` and ``value`` [T, K, D], ``keys`` and ``values`` the layer's pages; [T, H, D] contiguous. 0: no window, no
    soft cap. For tokens of no sequence nothing is written, and 0 comes out. No length is known to the host: a launch
    depends on the shapes of the tensors alone."""
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    shape = HeadShape.of(query, key, value)
    tiles_C4, table_BW, tile_tokens = batch.tiles_C4, batch.table_BW, batch.tile_tokens
    _write[(len(tiles_C4), shape.heads)](
        key,
        value,
        keys,
        values,
        table_BW,
        tiles_C4,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        table_BW.stride(0),
        K=shape.heads,
        D=shape.size,
        DV=shape.value_size,
        BLOCK_D=shape.block_d,
        BLOCK_DV=shape.block_dv,
        BLOCK_T=triton.next_power_of_2(tile_tokens),
        PAGE=PAGE_TOKENS,
        num_warps=4,
    )
    out = query.new_empty(len(query), query.shape[1], shape.value_size)
    wide = query.dtype == torch.float32
    _attend[(len(tiles_C4), shape.heads)](
        query,
        keys,
        values,
        table_BW,
        tiles_C4,
        out,
        scaling,
        softcap,
        query.stride(0),
        query.stride(1),
        table_BW.stride(0),
        K=shape.heads,
        G=shape.group,
        D=shape.size,
        DV=shape.value_size,
        BLOCK_D=shape.block_d,
        BLOCK_DV=shape.block_dv,
        BLOCK_M=max(16, triton.next_power_of_2(tile_tokens * shape.group)),
        PAGE=PAGE_TOKENS,
        WINDOW=window,
        SOFTCAP=softcap > 0,
        IEEE=wide,
        num_warps=4,
        num_stages=1 if wide else (3 if max(shape.size, shape.value_size) <= 128 else 2),
    )
    return out


def _metadata(batch: ForwardBatch, group: int, num_tokens: int, device: torch.device) -> PrefillMetadata:
    """Made once a pass, and for each size of group."""
    kv, name = batch.kv, f"paged/{group}"
    assert kv is not None
    if name not in batch.cache:
        tile_tokens = prefill_tile_tokens(group) if max(batch.seq_lens, default=1) > 1 else 1
        starts = list(accumulate(batch.seq_lens[:-1], initial=0))
        tiles = prefill_tiles(starts, batch.seq_lens, kv.context_lens, num_tokens, tile_tokens)
        batch.cache[name] = PrefillMetadata(
            table_BW=kv.page_table.to(device, torch.int32),
            tiles_C4=to_device(torch.from_numpy(tiles.astype(np.int32)), device),
            tile_tokens=tile_tokens,
        )
    return cast(PrefillMetadata, batch.cache[name])
