"""Attention over the KV pages on CUDA, of decode (one new token a sequence), as Triton kernels.

A program takes one KV split of a sequence (flash-decoding) and one key head, with all query heads of its group: it
reads each key and value once. The sequence's last split also writes the new token's key and value, and counts them from
registers. Where a sequence's keys end does not move its other splits, so its output does not depend on the rest of the
batch. A second kernel combines the partial outputs of several splits, in their order.

Cells beyond a sequence's end are never read (a masked load gives 0), so what an earlier owner left in a page's tail
reaches no other sequence.

Legend: N sequences, H query heads, K key heads, G = H / K, D head size, C KV splits, W width of the page table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from descant.model.attention.head_shape import HeadShape
from descant.model.forward_batch import PAGE_TOKENS
from descant.model.paged_batch import DecodeMetadata


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    keys,
    values,
    table,
    splits,
    out,
    partials,
    logsumexp,
    scaling,
    softcap,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
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
    head = tl.program_id(0)
    split = splits + tl.program_id(1) * 5
    row = tl.load(split)
    begin = tl.load(split + 1)
    end = tl.load(split + 2)
    position = tl.load(split + 3)
    partial = tl.load(split + 4)
    if row < 0:
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, PAGE)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    query_head = head * G + m
    q = tl.load(
        query + row * query_stride_t + query_head[:, None] * query_stride_h + d[None, :],
        mask=(m < G)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    # The last split begins with the new token itself.
    own = end == position
    own_key = tl.load(key + row * key_stride_t + head * key_stride_h + d, mask=d < D, other=0.0)
    own_value = tl.load(value + row * value_stride_t + head * value_stride_h + dv, mask=dv < DV, other=0.0)
    own_page = tl.load(table + row * table_stride + position // PAGE).to(tl.int64)
    own_cell = (own_page * K + head) * PAGE + position % PAGE
    tl.store(keys + own_cell * D + d, own_key, mask=(d < D) & own)
    tl.store(values + own_cell * DV + dv, own_value, mask=(dv < DV) & own)
    own_scores = tl.sum(q.to(tl.float32) * own_key.to(tl.float32)[None, :], 1) * scaling
    if SOFTCAP:
        own_scores = softcap * (2.0 * tl.sigmoid(2.0 * own_scores / softcap) - 1.0)
    highest = tl.where(own, own_scores, float("-inf"))
    total = tl.where(own, tl.full([BLOCK_M], 1.0, tl.float32), 0.0)
    sums = tl.where(own, own_value.to(tl.float32)[None, :] + tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), 0.0)

    first = begin
    if WINDOW > 0:
        first = tl.maximum(begin, position - WINDOW + 1)
    for at in range(first // PAGE * PAGE, end, PAGE):
        page = tl.load(table + row * table_stride + at // PAGE).to(tl.int64)
        cell = (page * K + head) * PAGE + n
        seen = at + n < end
        k = tl.load(keys + cell[None, :] * D + d[:, None], mask=seen[None, :] & (d < D)[:, None], other=0.0)
        if IEEE:
            scores = tl.dot(q, k, input_precision="ieee") * scaling
        else:
            scores = tl.dot(q, k) * scaling
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if WINDOW > 0:
            scores = tl.where((seen & (at + n > position - WINDOW))[None, :], scores, float("-inf"))
        else:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        fade = tl.exp(highest - base)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(values + cell[:, None] * DV + dv[None, :], mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
        if IEEE:
            sums = sums * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
        else:
            sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = higher

    mask = (m < G)[:, None] & (dv < DV)[None, :]
    # A split that is out of the window wholly has no total, and weighs nothing.
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if partial < 0:
        at_out = (row * (K * G) + query_head)[:, None] * DV + dv[None, :]
        tl.store(out + at_out, sums.to(out.dtype.element_ty), mask=mask)
    else:
        at_partial = partial * (K * G) + query_head
        tl.store(partials + at_partial[:, None] * DV + dv[None, :], sums, mask=mask)
        tl.store(logsumexp + at_partial, tl.log(total) + highest, mask=m < G)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    partials,
    logsumexp,
    out,
    ranges,
    H: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(ranges + row * 2)
    count = tl.load(ranges + row * 2 + 1)
    if count == 0:
        return
    p = tl.arange(0, BLOCK_P)
    dv = tl.arange(0, BLOCK_DV)
    highest = float("-inf")
    total = 0.0
    sums = tl.zeros([BLOCK_DV], tl.float32)
    for block in range(0, count, BLOCK_P):
        live = block + p < count
        at = (first + block + p) * H + head
        lse = tl.load(logsumexp + at, mask=live, other=float("-inf"))
        partial = tl.load(partials + at[:, None] * DV + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        higher = tl.maximum(highest, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(lse - base)
        fade = tl.exp(highest - base)
        total = total * fade + tl.sum(weights, 0)
        sums = sums * fade + tl.sum(weights[:, None] * partial, 0)
        highest = higher
    tl.store(out + (row * H + head) * DV + dv, (sums / total).to(out.dtype.element_ty), mask=dv < DV)


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: DecodeMetadata,
    *,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """As ``prefill_attention``, of one new token a sequence. Rows without a split stay undefined."""
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    shape = HeadShape.of(query, key, value)
    num_heads = query.shape[1]
    out = query.new_empty(len(query), num_heads, shape.value_size)
    partials, logsumexp = out, out
    if batch.num_partials:
        partials = query.new_empty(batch.num_partials, num_heads, shape.value_size, dtype=torch.float32)
        logsumexp = query.new_empty(batch.num_partials, num_heads, dtype=torch.float32)
    wide = query.dtype == torch.float32
    _decode[(shape.heads, batch.num_splits)](
        query,
        key,
        value,
        keys,
        values,
        batch.table_NW,
        batch.splits_C5,
        out,
        partials,
        logsumexp,
        scaling,
        softcap,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        batch.table_NW.stride(0),
        K=shape.heads,
        G=shape.group,
        D=shape.size,
        DV=shape.value_size,
        BLOCK_D=shape.block_d,
        BLOCK_DV=shape.block_dv,
        BLOCK_M=max(16, triton.next_power_of_2(shape.group)),
        PAGE=PAGE_TOKENS,
        WINDOW=window,
        SOFTCAP=softcap > 0,
        IEEE=wide,
        num_warps=4,
        num_stages=1 if wide else (3 if max(shape.size, shape.value_size) <= 128 else 2),
    )
    if batch.num_partials:
        _combine[(len(query), num_heads)](
            partials,
            logsumexp,
            out,
            batch.partials_N2,
            H=num_heads,
            DV=shape.value_size,
            BLOCK_DV=shape.block_dv,
            BLOCK_P=8,
            num_warps=1,
        )
    return out
