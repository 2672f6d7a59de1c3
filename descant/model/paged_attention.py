"""Attention over the KV pages on CUDA: one Triton kernel for decode, chunked prefill and verification.

Each program takes one tile of query rows of one sequence and one key head, and walks the sequence's pages with a
running maximum and float32 sums. A page of one head is one contiguous block ``[PAGE_TOKENS, D]``. A few sequences do
not fill the device: their keys are then split among ``splits`` programs, whose parts a second kernel adds.

Cells beyond a sequence's end are never read (a masked load gives 0), so what an earlier owner left in a page's tail
reaches nobody.

Legend: T tokens, B sequences, H query heads, K key heads, G = H / K, D head size, C tiles, W width of the page table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from descant.model.passes import PAGE_TOKENS

PREFILL_ROWS = 64
"""Query rows (tokens times G) of a prefill tile: one tile of the matrix unit."""


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
    logsumexp,
    num_tokens,
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
    SPLITS: tl.constexpr,
    IEEE: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
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
    share = (num_pages - first + SPLITS - 1) // SPLITS
    begin = first + split * share
    end = tl.minimum(begin + share, num_pages)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for number in range(begin, end):
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

    row = (split * num_tokens + start + t) * (K * G) + query_head
    mask = live[:, None] & (dv < DV)[None, :]
    if SPLITS == 1:
        sums = sums / total[:, None]
        tl.store(out + row[:, None] * DV + dv[None, :], sums.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + row[:, None] * DV + dv[None, :], sums / tl.where(total == 0.0, 1.0, total)[:, None], mask=mask)
        tl.store(logsumexp + row, tl.log(total) + highest, mask=live)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    parts,
    logsumexp,
    out,
    num_rows,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    dv = tl.arange(0, BLOCK_DV)
    share = tl.load(logsumexp + s * num_rows + row)
    weight = tl.exp(share - tl.max(share, 0))
    weight = weight / tl.sum(weight, 0)
    part = tl.load(parts + (s * num_rows + row)[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
    # A split without keys has weight 0 and wrote zeros; a NaN stays NaN.
    x = tl.sum(weight[:, None] * part, 0)
    tl.store(out + row * DV + dv, x.to(out.dtype.element_ty), mask=dv < DV)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    tiles: torch.Tensor,
    tile_tokens: int,
    splits: int,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    num_tokens, num_heads, size = query.shape
    num_key_heads, value_size = key.shape[1], value.shape[2]
    if query.stride(2) != 1:
        query = query.contiguous()
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    group = num_heads // num_key_heads
    block_d, block_dv = (max(16, triton.next_power_of_2(x)) for x in (size, value_size))
    _write[(len(tiles), num_key_heads)](
        key,
        value,
        keys,
        values,
        table,
        tiles,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        table.stride(0),
        K=num_key_heads,
        D=size,
        DV=value_size,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_T=triton.next_power_of_2(tile_tokens),
        PAGE=PAGE_TOKENS,
        num_warps=1 if tile_tokens == 1 else 4,
    )
    out = query.new_empty(num_tokens, num_heads, value_size)
    if splits == 1:
        parts, logsumexp = out, out
    else:
        parts = query.new_empty(splits, num_tokens, num_heads, value_size, dtype=torch.float32)
        logsumexp = query.new_empty(splits, num_tokens, num_heads, dtype=torch.float32)
    wide = query.dtype == torch.float32
    _attend[(len(tiles), num_key_heads, splits)](
        query,
        keys,
        values,
        table,
        tiles,
        parts,
        logsumexp,
        num_tokens,
        scaling,
        softcap,
        query.stride(0),
        query.stride(1),
        table.stride(0),
        K=num_key_heads,
        G=group,
        D=size,
        DV=value_size,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=max(16, triton.next_power_of_2(tile_tokens * group)),
        PAGE=PAGE_TOKENS,
        WINDOW=window,
        SOFTCAP=softcap > 0,
        SPLITS=splits,
        IEEE=wide,
        num_warps=4,
        num_stages=1 if wide else (3 if max(size, value_size) <= 128 else 2),
    )
    if splits > 1:
        _combine[(num_tokens * num_heads,)](
            parts,
            logsumexp,
            out,
            num_tokens * num_heads,
            DV=value_size,
            BLOCK_DV=block_dv,
            SPLITS=splits,
            num_warps=1,
        )
    return out


# The pages are written as well, but nothing else in a compiled layer reads them: told as a mutation, they would have to
# pass through its graph.
_LIBRARY = torch.library.Library("descant_decode", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor keys, Tensor values, Tensor table, Tensor tiles, "
    "int tile_tokens, int splits, float scaling, int window, float softcap) -> Tensor"
)
_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")


@torch.library.register_fake("descant_decode::attention", lib=_LIBRARY)
def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def paged_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table_BW: torch.Tensor,
    tiles_C4: torch.Tensor,
    *,
    tile_tokens: int,
    splits: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Writes the tokens' keys and values into their pages, then attends over all of the sequence; [T, H, D] contiguous.

    ``tiles_C4`` int32: row of ``table_BW`` (int32), first token of the stream, number of tokens (at most
    ``tile_tokens``; 0: nothing), position of the first. ``splits`` is a power of two. Rows in no tile stay undefined.
    """
    out: torch.Tensor = torch.ops.descant_decode.attention(
        query_THD,
        key_TKD,
        value_TKD,
        keys,
        values,
        table_BW,
        tiles_C4,
        tile_tokens,
        splits,
        scaling,
        window or 0,
        softcap or 0.0,
    )
    return out


def prefill_tiles(seq_lens: Sequence[int], context_lens: Sequence[int], group: int) -> tuple[torch.Tensor, int]:
    """Tiles int32 [C, 4] on the host, and the tokens of a tile."""
    tile_tokens = max(1, PREFILL_ROWS // group) if max(seq_lens, default=1) > 1 else 1
    tiles: list[tuple[int, int, int, int]] = []
    start = 0
    for sequence, (length, context) in enumerate(zip(seq_lens, context_lens, strict=True)):
        for row in range(0, length, tile_tokens):
            tiles.append((sequence, start + row, min(tile_tokens, length - row), context + row))
        start += length
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 4), tile_tokens
