"""Which rows of a pass meet which keys, on CPU.

Legend: S sequences of a tile, R query rows of a tile, N keys of a tile (a multiple of ``PAGE_TOKENS``), K key heads,
D head size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from descant.model.forward_batch import MIN_ROWS, PAGE_TOKENS, ForwardBatch, stream_rows

DECODE_ROWS = 16
"""Sequences of the KV pages with at most so many query tokens are computed together; longer ones each alone."""

TILE_SCORES = 1 << 18
"""Scores of a tile, if 64 rows keep below: 1 MiB of float32 stays in a core's cache over the sweeps of a softmax (four
times as many cost 1,024 tokens a fifth more), and rows skip the blocks behind their tile."""

TILE_KEYS = 1 << 23
"""Numbers of gathered keys of a decode tile, at most (32 MiB of float32, and as much for the values)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """S sequences' rows against the same number of keys each.

    ``rows`` int64 [S · R]: tokens of the pass; a row that only fills up repeats its sequence's last token, and so
    computes, and writes, the same bits. ``run``: the slice of the pass, where the rows are one. ``keys``: tokens of the
    pass int64 [S · N], or pages int64 [S · N / PAGE_TOKENS] of the pool; cells beyond a sequence's end name one of its
    own, never another sequence's (whose NaN times 0 is NaN). ``bias`` float32 [S, 1, 1, R, N - masked_from]: 0 where a
    row sees a key, -inf where it does not; keys before ``masked_from`` are seen by all rows.
    """

    num_sequences: int
    num_rows: int
    num_keys: int
    rows: torch.Tensor
    run: slice | None
    keys: torch.Tensor
    key_run: slice | None
    bias: torch.Tensor
    masked_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySpan:
    """Query tokens ``start:start+length`` of the pass, the first of them at position ``context`` of its sequence."""

    sequence: int
    start: int
    length: int
    context: int

    @property
    def num_blocks(self) -> int:
        return math.ceil((self.context + self.length) / PAGE_TOKENS)


def spans_of(batch: ForwardBatch) -> list[QuerySpan]:
    spans, start = [], 0
    for sequence, length in enumerate(batch.seq_lens):
        context = batch.kv.context_lens[sequence] if batch.kv is not None else 0
        if batch.prefixes and (prefix := batch.prefixes[sequence]) is not None:
            context = prefix.length
        if length:
            spans.append(QuerySpan(sequence=sequence, start=start, length=length, context=context))
        start += length
    return spans


def _groups(spans: list[QuerySpan], *, paged: bool, num_heads: int, key_numbers: int) -> Iterator[list[QuerySpan]]:
    """Spans that are computed together. In training: those with the same number of blocks, of queries and of keys. Over
    pages: those with few query tokens and less than twice the blocks of the shortest, while the gathered keys fit."""
    groups: dict[tuple[int, int], list[QuerySpan]] = defaultdict(list)
    decode: list[QuerySpan] = []
    for span in spans:
        if not paged:
            groups[math.ceil(span.length / PAGE_TOKENS), span.num_blocks].append(span)
        elif span.length <= DECODE_ROWS:
            decode.append(span)
        else:
            yield [span]
    for (num_row_blocks, num_blocks), group in groups.items():
        scores = num_heads * num_row_blocks * num_blocks * PAGE_TOKENS**2
        together = max(1, TILE_SCORES // scores)
        for i in range(0, len(group), together):
            yield group[i : i + together]
    decode.sort(key=lambda span: -span.num_blocks)
    while decode:
        longest = decode[0].num_blocks
        together = max(1, TILE_KEYS // (longest * PAGE_TOKENS * key_numbers))
        size = 1
        while size < min(together, len(decode)) and decode[size].num_blocks * 2 >= longest:
            size += 1
        yield decode[:size]
        decode = decode[size:]


def tiles_of_pass(
    batch: ForwardBatch, window: int | None, query_THD: torch.Tensor, key_TKD: torch.Tensor
) -> list[Tile]:
    """Built once per pass and window, shared by all layers."""
    num_heads, num_key_heads, head_size = query_THD.shape[1], key_TKD.shape[1], key_TKD.shape[2]
    cache_key = f"tiles/{window}/{num_heads}/{num_key_heads}/{head_size}"
    if cache_key not in batch.cache:
        groups = _groups(
            spans_of(batch), paged=batch.kv is not None, num_heads=num_heads, key_numbers=num_key_heads * head_size
        )
        batch.cache[cache_key] = [
            tile
            for group in groups
            for tile in _tiles_of(
                batch, group, window, num_heads, math.ceil(MIN_ROWS * num_key_heads / num_heads), query_THD.device
            )
        ]
    return cast("list[Tile]", batch.cache[cache_key])


def _tiles_of(
    batch: ForwardBatch,
    group: list[QuerySpan],
    window: int | None,
    num_heads: int,
    min_rows: int,
    device: torch.device,
) -> Iterator[Tile]:
    num_rows = max(max(span.length for span in group), min_rows)
    num_blocks = max(span.num_blocks for span in group)
    start = torch.tensor([span.start for span in group]).unsqueeze(1)
    length = torch.tensor([span.length for span in group]).unsqueeze(1)
    context = torch.tensor([span.context for span in group]).unsqueeze(1)
    step = max(TILE_SCORES // (len(group) * num_heads * num_blocks * PAGE_TOKENS), PAGE_TOKENS, min_rows)
    for first_row in range(0, num_rows, step):
        end_row = min(first_row + step, num_rows)
        first_row = max(0, min(first_row, end_row - min_rows))  # a short last tile takes rows of the one before again
        rows_SR = torch.minimum(torch.arange(first_row, end_row), length - 1)
        positions_SR = context + rows_SR
        last_block = int(positions_SR.max()) // PAGE_TOKENS + 1
        first_block = 0
        if window is not None:
            first_block = max(0, int(positions_SR.min()) - window + 1) // PAGE_TOKENS
        blocks = torch.arange(first_block, last_block)
        key_positions_N = torch.arange(first_block * PAGE_TOKENS, last_block * PAGE_TOKENS)
        if batch.kv is None:
            rows_of = sequence_rows(batch)
            keys = torch.stack(
                [rows_of[span.sequence][key_positions_N.clamp(max=span.context + span.length - 1)] for span in group]
            )
        else:
            own_blocks = (context + length - 1) // PAGE_TOKENS
            table = batch.kv.page_table.cpu()[[span.sequence for span in group]]
            keys = table.gather(1, torch.minimum(blocks.expand(len(group), -1), own_blocks))
        seen_SRN = key_positions_N <= positions_SR.unsqueeze(2)
        if window is not None:
            seen_SRN &= key_positions_N > positions_SR.unsqueeze(2) - window
        unseen_N = (~seen_SRN).any(0).any(0).nonzero()
        masked_from = int(unseen_N[0]) // PAGE_TOKENS * PAGE_TOKENS if len(unseen_N) else len(key_positions_N)
        bias = torch.where(seen_SRN[:, :, masked_from:], 0.0, -torch.inf)
        rows = (start + rows_SR).flatten()
        yield Tile(
            num_sequences=len(group),
            num_rows=end_row - first_row,
            num_keys=len(key_positions_N),
            rows=rows.to(device),
            run=run_of(rows),
            keys=keys.flatten().to(device),
            key_run=run_of(keys.flatten()) if batch.kv is None else None,
            bias=bias[:, None, None].to(device),
            masked_from=masked_from,
        )


def sequence_rows(batch: ForwardBatch) -> list[torch.Tensor]:
    """``stream_rows`` of the pass, on the host."""
    if "sequence_rows" not in batch.cache:
        prefixes = batch.prefixes or (None,) * len(batch.seq_lens)
        batch.cache["sequence_rows"] = [torch.from_numpy(rows) for rows in stream_rows(batch.seq_lens, prefixes)]
    return cast("list[torch.Tensor]", batch.cache["sequence_rows"])


def run_of(indices: torch.Tensor) -> slice | None:
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if bool((indices.diff() == 1).all()) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualLengths:
    """Sequences of one length behind prefixes of one length: ``rows`` int64 [B, L] and ``keys`` [B, context + L]."""

    context: int
    rows: torch.Tensor
    keys: torch.Tensor


def equal_lengths(batch: ForwardBatch) -> list[EqualLengths]:
    if "equal_lengths" not in batch.cache:
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for span in spans_of(batch):
            groups[span.context, span.length].append(span.sequence)
        rows_of = sequence_rows(batch)
        keys = {key: torch.stack([rows_of[sequence] for sequence in members]) for key, members in groups.items()}
        batch.cache["equal_lengths"] = [
            EqualLengths(context=context, rows=keys_BN[:, context:], keys=keys_BN)
            for (context, _), keys_BN in keys.items()
        ]
    return cast("list[EqualLengths]", batch.cache["equal_lengths"])
