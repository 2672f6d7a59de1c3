"""The one attention function: training, scoring, prefill, decode and verification.

Registered in transformers' attention interface under ``NAME``; every family calls it with its own queries, keys and
values and hands our ``ForwardBatch`` through as one keyword. Keys are added in fixed float32 blocks of ``PAGE_TOKENS``
over at least 8 query rows, so that a token's output does not depend on what else is in the pass, on how the sequence
was cut into passes, or on whether its keys came from the pass or from the KV pages: the sampler's log-probabilities
equal the trainer's bit for bit. Cost grows with the sum of squared sequence lengths, not with the square of their sum.

What holds it together: a row's maximum is exact in any order; a block's products are matrix products of one inner size
(``D`` for the scores, ``PAGE_TOKENS`` for the values) whose rows do not depend on one another; blocks are added in the
order of the sequence; and a block that a row does not see adds exactly 0 to it, so it does not matter that a batch
neighbour made it part of the product. The backward pass need not have equal bits and uses PyTorch's own kernel.

On CUDA, training and scoring in half precision go through PyTorch's packed flash kernels, or cuDNN's where all the
sequences have one length (``_one_length``); the pages always through ``paged_attention``, which never reads a page's
tail. In a compiled layer attention is an operator that knows its pass by a number (``Handles``): whatever else the
graph saw of the pass would make another graph for the next.

Legend: T tokens of the pass, S sequences of a tile, R query rows of a tile, N keys of a tile (a multiple of
``PAGE_TOKENS``), H query heads, K key heads, G = H / K, D head size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from descant.errors import ServerError, UserError
from descant.model.forward_batch import FORWARD_BATCHES, MIN_ROWS, PAGE_TOKENS, ForwardBatch, stream_rows, to_device
from descant.model.paged_batch import PagedBatch

NAME = "descant"

HARMLESS_KEYWORDS = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"})
"""What travels along and says nothing about attention: positions are applied already, and no cache is used. Any
other keyword that is not None is refused by name (gpt-oss's ``s_aux``, ignored, is silently off by 0.23)."""

KV_SHAPES = "kv_shapes"
"""With this key in ``ForwardBatch.cache`` (an empty dict), each layer notes ``layer_idx → (K, D of keys, D of
values)``."""

RULES = "rules"
"""Likewise, each layer notes ``layer_idx → Rule``."""

CAPTURED = "captured"
"""With this key in ``ForwardBatch.cache``, all that is known of the sequences is on the device."""

DENSE_LENGTHS = 64
"""Sequences of one length, a multiple of this, are a batch for cuDNN's kernels, which are made for Hopper: 0.15 and
0.67 ms (forward, backward) a call of 16 × 1,024 tokens where the packed ones take 0.32 and 1.05 (H100, 16 heads of
128). Of other lengths each would need a cuDNN plan of its own first: 100 ms, more than it saves."""

MIN_DENSE_LENGTH = 256

DECODE_ROWS = 16
"""Sequences of the KV pages with at most so many query tokens are computed together; longer ones each alone."""

TILE_SCORES = 1 << 18
"""Scores of a tile, if 64 rows keep below: 1 MiB of float32 stays in a core's cache over the sweeps of a softmax (four
times as many cost 1,024 tokens a fifth more), and rows skip the blocks behind their tile."""

TILE_KEYS = 1 << 23
"""Numbers of gathered keys of a decode tile, at most (32 MiB of float32, and as much for the values)."""


def register() -> None:
    """Idempotent."""
    AttentionInterface.register(NAME, attention)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    batch: ForwardBatch | PagedBatch,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` [1, H, T, D], ``key``/``value`` [1, K, T, D] (rotated, not repeated, maybe not contiguous) →
    ``[1, T, H, D]`` contiguous. Tokens behind the pass's own only fill up its rows: 0 comes out for them.
    Raises ``UserError`` for what it cannot honour: nothing is ignored in silence."""
    for name, given in keywords.items():
        if given is not None and name not in HARMLESS_KEYWORDS:
            raise UserError(f"attention keyword {name!r} is not supported")
    if attention_mask is not None:
        raise UserError("attention masks of the model's own are not supported")
    if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UserError("attention that is not causal is not supported")
    if dropout:
        raise UserError("attention dropout is not supported: the model must be in eval mode")
    rule = Rule(scaling=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, softcap=softcap)
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    if isinstance(batch, PagedBatch):
        return _of_paged_batch(module, rule, query_THD, key_TKD, value_TKD, batch).unsqueeze(0), None
    compiled = torch.compiler.is_compiling()  # then batch's handle is all that may be read of it, and no layer's index
    if not compiled:
        layer = cast(int, module.layer_idx)
        if (shapes := batch.cache.get(KV_SHAPES)) is not None:
            cast(dict[int, tuple[int, int, int]], shapes)[layer] = (key.shape[1], key.shape[3], value.shape[3])
        if (rules := batch.cache.get(RULES)) is not None:
            cast(dict[int, Rule], rules)[layer] = rule
        if query.shape[2] < batch.num_tokens:
            raise UserError(f"attention got {query.shape[2]} tokens, expected the pass's {batch.num_tokens}")
        if batch.kv is not None:
            with torch.no_grad():
                return _over_pages(batch, rule, layer, query_THD, key_TKD, value_TKD).unsqueeze(0), None
    if compiled or query.is_cuda:
        query_THD, key_TKD, value_TKD = (x.contiguous() for x in (query_THD, key_TKD, value_TKD))
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out_THD = _Attention.apply(query_THD, key_TKD, value_TKD, batch.handle, rule.scaling, rule.window, rule.softcap)
    elif compiled:
        out_THD, _ = torch.ops.descant.attention(
            query_THD, key_TKD, value_TKD, batch.handle, rule.scaling, rule.window, rule.softcap
        )
    else:
        out_THD, _ = _forward(batch, rule, query_THD, key_TKD, value_TKD, want_logsumexp=False)
    return out_THD.unsqueeze(0), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How scores become weights: ``scaling``; only the last ``window`` keys; ``cap · tanh(score / cap)``."""

    scaling: float
    window: int | None
    softcap: float | None


# --------------------------------------------------------------------------------------------------------------------
# Which rows meet which keys


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
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
class _QuerySpan:
    """Query tokens ``start:start+length`` of the pass, the first of them at position ``context`` of its sequence."""

    sequence: int
    start: int
    length: int
    context: int

    @property
    def num_blocks(self) -> int:
        return math.ceil((self.context + self.length) / PAGE_TOKENS)


def _spans(batch: ForwardBatch) -> list[_QuerySpan]:
    spans, start = [], 0
    for sequence, length in enumerate(batch.seq_lens):
        context = batch.kv.context_lens[sequence] if batch.kv is not None else 0
        if batch.prefixes and (prefix := batch.prefixes[sequence]) is not None:
            context = prefix.length
        if length:
            spans.append(_QuerySpan(sequence=sequence, start=start, length=length, context=context))
        start += length
    return spans


def _groups(spans: list[_QuerySpan], *, paged: bool, num_heads: int, key_numbers: int) -> Iterator[list[_QuerySpan]]:
    """Spans that are computed together. In training: those with the same number of blocks, of queries and of keys. Over
    pages: those with few query tokens and less than twice the blocks of the shortest, while the gathered keys fit."""
    groups: dict[tuple[int, int], list[_QuerySpan]] = defaultdict(list)
    decode: list[_QuerySpan] = []
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


def _tiles(batch: ForwardBatch, window: int | None, query_THD: torch.Tensor, key_TKD: torch.Tensor) -> list[_Tile]:
    """Built once per pass and window, shared by all layers."""
    num_heads, num_key_heads, head_size = query_THD.shape[1], key_TKD.shape[1], key_TKD.shape[2]
    cache_key = f"tiles/{window}/{num_heads}/{num_key_heads}/{head_size}"
    if cache_key not in batch.cache:
        groups = _groups(
            _spans(batch), paged=batch.kv is not None, num_heads=num_heads, key_numbers=num_key_heads * head_size
        )
        batch.cache[cache_key] = [
            tile
            for group in groups
            for tile in _tiles_of(
                batch, group, window, num_heads, math.ceil(MIN_ROWS * num_key_heads / num_heads), query_THD.device
            )
        ]
    return cast("list[_Tile]", batch.cache[cache_key])


def _tiles_of(
    batch: ForwardBatch,
    group: list[_QuerySpan],
    window: int | None,
    num_heads: int,
    min_rows: int,
    device: torch.device,
) -> Iterator[_Tile]:
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
            rows_of = _sequence_rows(batch)
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
        yield _Tile(
            num_sequences=len(group),
            num_rows=end_row - first_row,
            num_keys=len(key_positions_N),
            rows=rows.to(device),
            run=_run(rows),
            keys=keys.flatten().to(device),
            key_run=_run(keys.flatten()) if batch.kv is None else None,
            bias=bias[:, None, None].to(device),
            masked_from=masked_from,
        )


def _sequence_rows(batch: ForwardBatch) -> list[torch.Tensor]:
    """``stream_rows`` of the pass, on the host."""
    if "sequence_rows" not in batch.cache:
        prefixes = batch.prefixes or (None,) * len(batch.seq_lens)
        batch.cache["sequence_rows"] = [torch.from_numpy(rows) for rows in stream_rows(batch.seq_lens, prefixes)]
    return cast("list[torch.Tensor]", batch.cache["sequence_rows"])


def _run(indices: torch.Tensor) -> slice | None:
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if bool((indices.diff() == 1).all()) else None


# --------------------------------------------------------------------------------------------------------------------
# Forward


def _forward(
    batch: ForwardBatch,
    rule: Rule,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    *,
    want_logsumexp: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out as many rows as queries, and the logarithm of each row's sum float32 [H, T]: 0 behind the pass's own."""
    num_tokens = batch.num_tokens
    own = tuple(x[:num_tokens] for x in (query_THD, key_TKD, value_TKD))
    logsumexp_HT: torch.Tensor | None
    if _has_varlen(rule, query_THD, value_TKD):
        length = _one_length(batch, rule, query_THD)
        out_THD, logsumexp_HT = _varlen(batch, rule, *own) if length is None else _dense(rule, length, *own)
    elif CAPTURED in batch.cache:
        raise ServerError("attention with a soft cap, or with values of another size than keys, cannot be captured")
    else:
        out_THD, logsumexp_TH = _blocked(batch, rule, *own, want_logsumexp=want_logsumexp)
        logsumexp_HT = None if logsumexp_TH is None else logsumexp_TH.t()
    if num_padding := len(query_THD) - num_tokens:
        out_THD = F.pad(out_THD, (0, 0, 0, 0, 0, num_padding))
        logsumexp_HT = None if logsumexp_HT is None else F.pad(logsumexp_HT, (0, num_padding))
    return out_THD, logsumexp_HT


def _over_pages(
    batch: ForwardBatch, rule: Rule, layer: int, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor
) -> torch.Tensor:
    kv, num_tokens = batch.kv, batch.num_tokens
    assert kv is not None
    pages = kv.pool.keys[layer], kv.pool.values[layer]
    if query_THD.is_cuda:
        from descant.model.paged_attention import paged_attention

        return paged_attention(
            query_THD, key_TKD, value_TKD, *pages, batch, scaling=rule.scaling, window=rule.window, softcap=rule.softcap
        )
    own = tuple(x[:num_tokens] for x in (query_THD, key_TKD, value_TKD))
    _write_pages(batch, layer, own[1], own[2])
    out_THD, _ = _blocked(batch, rule, *own, pages=pages)
    num_padding = len(query_THD) - num_tokens
    return F.pad(out_THD, (0, 0, 0, 0, 0, num_padding)) if num_padding else out_THD


def _blocked(
    batch: ForwardBatch,
    rule: Rule,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    *,
    pages: tuple[torch.Tensor, torch.Tensor] | None = None,
    want_logsumexp: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out [T, H, D] in the query's dtype, and the logarithm of each row's sum float32 [T, H]."""
    num_tokens, num_heads, _ = query_THD.shape
    num_key_heads = key_TKD.shape[1]
    out_THD = query_THD.new_empty(num_tokens, num_heads, value_TKD.shape[2])
    logsumexp_TH = query_THD.new_empty(num_tokens, num_heads, dtype=torch.float32) if want_logsumexp else None
    for tile in _tiles(batch, rule.window, query_THD, key_TKD):
        S, R, N = tile.num_sequences, tile.num_rows, tile.num_keys
        query = _rows(query_THD, tile.rows, tile.run).view(S, R, num_key_heads, -1, query_THD.shape[2])
        query = _packed_float(query.permute(0, 2, 3, 1, 4)).view(S * num_key_heads, -1, query_THD.shape[2])
        if pages is None:
            key, value = (
                _rows(x, tile.keys, tile.key_run).view(S, N, num_key_heads, -1).transpose(1, 2)
                for x in (key_TKD, value_TKD)
            )
        else:
            key, value = (
                x.index_select(0, tile.keys).view(S, -1, num_key_heads, PAGE_TOKENS, x.shape[3]).transpose(1, 2)
                for x in pages
            )
        out, logsumexp = _attend(
            query,
            _packed_float(key).view(S * num_key_heads, N, -1),
            _packed_float(value).view(S * num_key_heads, N, -1),
            tile,
            rule,
            want_logsumexp,
        )
        out = out.view(S, num_heads, R, -1).transpose(1, 2)  # [S, R, H, D]
        if tile.run is not None:
            out_THD[tile.run].view(S, R, num_heads, -1).copy_(out)
        else:
            out_THD[tile.rows] = out.reshape(S * R, num_heads, -1).to(out_THD.dtype)
        if logsumexp_TH is not None and logsumexp is not None:
            logsumexp_TH[tile.rows] = logsumexp.view(S, num_heads, R).transpose(1, 2).reshape(S * R, num_heads)
    return out_THD, logsumexp_TH


def _rows(x_TKD: torch.Tensor, indices: torch.Tensor, run: slice | None) -> torch.Tensor:
    return x_TKD[run] if run is not None else x_TKD.index_select(0, indices)


def _packed_float(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: _Tile, rule: Rule, want_logsumexp: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float32 [S · K, G · R, D] against [S · K, N, D] → out of the same shape, logsumexp [S · K, G · R].

    The order of every sum is fixed here; see the module's docstring before changing a line.
    """
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(rule.scaling)
    num_products, num_rows, num_keys = scores.shape
    if rule.softcap is not None:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if tile.masked_from < num_keys:
        by_row = scores.view(tile.num_sequences, num_products // tile.num_sequences, -1, tile.num_rows, num_keys)
        by_row[..., tile.masked_from :].add_(tile.bias)
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    num_blocks = num_keys // PAGE_TOKENS
    total = weights.view(num_products, num_rows, num_blocks, PAGE_TOKENS).sum(-1).cumsum(-1)[..., -1:]
    out = torch.bmm(weights[..., :PAGE_TOKENS], value[:, :PAGE_TOKENS])
    for start in range(PAGE_TOKENS, num_keys, PAGE_TOKENS):
        block = slice(start, start + PAGE_TOKENS)
        out.baddbmm_(weights[..., block], value[:, block])
    out.div_(total)
    return out, highest.add_(total.log_()).squeeze(-1) if want_logsumexp else None


def _write_pages(batch: ForwardBatch, layer: int, key_TKD: torch.Tensor, value_TKD: torch.Tensor) -> None:
    """This pass's keys and values behind each sequence's context. A page that is begun is zeroed first: what an earlier
    owner left in its tail is multiplied by a weight of 0, and 0 · NaN would carry its NaN over."""
    kv = batch.kv
    assert kv is not None
    if "cells" not in batch.cache:
        device = key_TKD.device
        sequence = torch.repeat_interleave(torch.arange(len(batch.seq_lens)), torch.tensor(batch.seq_lens))
        position = torch.cat(
            [torch.arange(c, c + n) for c, n in zip(kv.context_lens, batch.seq_lens)] or [torch.zeros(0).long()]
        )
        page = kv.page_table.cpu()[sequence, position // PAGE_TOKENS]
        begun = page[position % PAGE_TOKENS == 0]
        batch.cache["cells"] = (page.to(device), (position % PAGE_TOKENS).to(device), begun.to(device))
    page, cell, begun = cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", batch.cache["cells"])
    for pool, x_TKD in ((kv.pool.keys[layer], key_TKD), (kv.pool.values[layer], value_TKD)):
        if len(begun):
            pool.index_fill_(0, begun, 0)
        pool[page, :, cell] = x_TKD.to(pool.dtype)


# --------------------------------------------------------------------------------------------------------------------
# Backward


class _Attention(torch.autograd.Function):
    """In a compiled layer its two halves are operators, which see nothing of the pass but its handle."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        handle: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            out, logsumexp = torch.ops.descant.attention(query, key, value, handle, scaling, window, softcap)
        else:
            batch = ctx.batch = FORWARD_BATCHES[handle]
            rule = Rule(scaling=scaling, window=window, softcap=softcap)
            out, logsumexp = _forward(batch, rule, query, key, value, want_logsumexp=True)
        ctx.save_for_backward(query, key, value, out, logsumexp, handle)
        ctx.rule = (scaling, window, softcap)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsumexp, handle = ctx.saved_tensors
        scaling, window, softcap = ctx.rule
        backward = torch.ops.descant.attention_backward if torch.compiler.is_compiling() else _backward_op
        grads = backward(grad_outputs[0], query, key, value, out, logsumexp, handle, scaling, window, softcap)
        return (*grads, None, None, None, None)


def _forward_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rule = Rule(scaling=scaling, window=window, softcap=softcap)
    out, logsumexp = _forward(FORWARD_BATCHES[handle], rule, query, key, value, want_logsumexp=True)
    assert logsumexp is not None
    return out, logsumexp.contiguous()


def _backward_op(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    handle: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, rule = FORWARD_BATCHES[handle], Rule(scaling=scaling, window=window, softcap=softcap)
    num_tokens, num_padding = batch.num_tokens, len(query) - batch.num_tokens
    do, q, k, v, o = (x[:num_tokens] for x in (grad_out, query, key, value, out))
    if not _has_varlen(rule, query, value):
        grads = _blocked_backward(batch, rule, do, q, k, v, o, logsumexp[:, :num_tokens])
    elif (length := _one_length(batch, rule, query)) is None:
        grads = _varlen_backward(batch, rule, do, q, k, v, o, logsumexp[:, :num_tokens])
    else:
        grads = _dense_backward(rule, length, do, q, k, v, o, logsumexp)
    if num_padding:
        grads = tuple(F.pad(grad, (0, 0, 0, 0, 0, num_padding)) for grad in grads)
    dq, dk, dv = grads
    return dq, dk, dv


_RULE_SCHEMA = "Tensor handle, float scaling, int? window, float? softcap"
_LIBRARY = torch.library.Library("descant", "FRAGMENT")
_LIBRARY.define(f"attention(Tensor query, Tensor key, Tensor value, {_RULE_SCHEMA}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"{_RULE_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("attention", _forward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", _backward_op, "CompositeExplicitAutograd")


@torch.library.register_fake("descant::attention", lib=_LIBRARY)
def _forward_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rule: object
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty(num_tokens, num_heads, value.shape[2])
    return out, query.new_empty(num_heads, num_tokens, dtype=torch.float32)


@torch.library.register_fake("descant::attention_backward", lib=_LIBRARY)
def _backward_shapes(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _blocked_backward(
    batch: ForwardBatch,
    rule: Rule,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp_HT: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    logsumexp = logsumexp_HT.t().contiguous()
    has_kernel = query.device.type == "cpu" and rule.softcap is None and query.shape[-1] == value.shape[-1]
    # Keys of a prefix get a part from each sequence that reads them: summed in float32, and rounded once.
    summed = torch.float32 if batch.prefixes else key.dtype
    dq = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    dk, dv = (torch.empty(x.shape, dtype=summed, device=x.device) for x in (key, value))
    if batch.prefixes:
        dk.zero_()
        dv.zero_()
    for group in _equal_lengths(batch):
        size, rows, keys = len(group.rows), group.rows.flatten(), group.keys.flatten()
        run = _run(rows)
        key_run = run if group.context == 0 else None
        rows, keys = rows.to(query.device), keys.to(query.device)

        def of_queries(
            x: torch.Tensor, rows: torch.Tensor = rows, run: slice | None = run, size: int = size
        ) -> torch.Tensor:
            return _rows(x, rows, run).view(size, -1, *x.shape[1:]).transpose(1, 2)

        k, v = (_rows(x, keys, key_run).view(size, -1, *x.shape[1:]).transpose(1, 2) for x in (key, value))
        q, do = of_queries(query), of_queries(grad_out)
        if has_kernel:
            softmax = of_queries(out), of_queries(logsumexp.unsqueeze(2)).squeeze(3)
            parts = _kernel_backward(rule, group.context, q, k, v, do, *softmax)
        else:
            parts = _plain_backward(rule, group.context, q, k, v, do)
        q_part, *key_parts = (part.transpose(1, 2).flatten(0, 1) for part in parts)
        if run is not None:
            dq[run] = q_part
        else:
            dq[rows] = q_part.to(dq.dtype)
        for grad, part in zip((dk, dv), key_parts):
            if batch.prefixes:
                grad.index_add_(0, keys, part.to(grad.dtype))
            elif key_run is not None:
                grad[key_run] = part
            else:
                grad[keys] = part.to(grad.dtype)
    return dq, dk.to(key.dtype), dv.to(value.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Equal:
    """Sequences of one length behind prefixes of one length: ``rows`` int64 [B, L] and ``keys`` [B, context + L]."""

    context: int
    rows: torch.Tensor
    keys: torch.Tensor


def _equal_lengths(batch: ForwardBatch) -> list[_Equal]:
    if "equal_lengths" not in batch.cache:
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for span in _spans(batch):
            groups[span.context, span.length].append(span.sequence)
        rows_of = _sequence_rows(batch)
        keys = {key: torch.stack([rows_of[sequence] for sequence in members]) for key, members in groups.items()}
        batch.cache["equal_lengths"] = [
            _Equal(context=context, rows=keys_BN[:, context:], keys=keys_BN) for (context, _), keys_BN in keys.items()
        ]
    return cast("list[_Equal]", batch.cache["equal_lengths"])


def _unseen(length: int, window: int | None, device: torch.device, context: int = 0) -> torch.Tensor:
    """bool [length, context + length]: queries behind a context of keys."""
    behind = torch.arange(context, context + length, device=device).unsqueeze(1) - torch.arange(
        context + length, device=device
    )
    return (behind < 0) if window is None else (behind < 0) | (behind >= window)


def _kernel_backward(
    rule: Rule,
    context: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """[B, H or K, L (keys: context + L), D]. PyTorch's flash kernel takes our out and logsumexp as if they were its
    own."""
    num_key_heads, length = k.shape[1], q.shape[2]
    group = q.shape[1] // num_key_heads
    mask = None
    if context or (rule.window is not None and rule.window < length):
        unseen = _unseen(length, rule.window, q.device, context)
        mask = torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, -torch.inf)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out,
        q,
        k.repeat_interleave(group, 1),
        v.repeat_interleave(group, 1),
        out,
        logsumexp,
        0.0,
        mask is None,
        attn_mask=mask,
        scale=rule.scaling,
    )
    return dq, *(d.unflatten(1, (num_key_heads, group)).sum(2) for d in (dk, dv))


def _plain_backward(
    rule: Rule, context: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """[B, H or K, L (keys: context + L), D]. By autograd over the formula, in float32 (a soft cap, values of another
    size, CUDA)."""
    group = q.shape[1] // k.shape[1]
    with torch.enable_grad():
        q32, k32, v32 = leaves = tuple(x.detach().float().requires_grad_() for x in (q, k, v))
        scores = q32 @ k32.repeat_interleave(group, 1).transpose(2, 3) * rule.scaling
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        scores = scores.masked_fill(_unseen(q.shape[2], rule.window, q.device, context), -torch.inf)
        out = scores.softmax(-1) @ v32.repeat_interleave(group, 1)
        return torch.autograd.grad(out, leaves, grad_out.float())


# --------------------------------------------------------------------------------------------------------------------
# CUDA


def _has_varlen(rule: Rule, query: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.is_cuda
        and rule.softcap is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1]
    )


def _one_length(batch: ForwardBatch, rule: Rule, query: torch.Tensor) -> int | None:
    """The length of all sequences, where a batch of them is what computes fastest."""
    if "one_length" not in batch.cache:
        lengths = {length for length in batch.seq_lens if length}
        only = lengths.pop() if len(lengths) == 1 and not batch.prefixes else 0
        batch.cache["one_length"] = only if only >= MIN_DENSE_LENGTH and only % DENSE_LENGTHS == 0 else None
    length = cast("int | None", batch.cache["one_length"])
    fits = length is not None and (rule.window is None or rule.window >= length) and query.shape[-1] in (64, 128)
    return length if fits and torch.cuda.get_device_capability(query.device) == (9, 0) else None


def _dense(
    rule: Rule, length: int, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logsumexp comes in the kernel's own order, [B, H, length] within [H, T]."""
    q, k, v = (_batch(x, length) for x in (query_THD, key_TKD, value_TKD))
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=rule.scaling
    )
    return _stream(out), logsumexp.view(query_THD.shape[1], -1)


def _dense_backward(
    rule: Rule,
    length: int,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp_HT: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    do, q, k, v, o = (_batch(x, length) for x in (grad_out.contiguous(), query, key, value, out))
    unused = torch.empty(0, dtype=torch.int64, device=query.device)  # the random state of a dropout, the ends of none
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, logsumexp_HT.reshape(*q.shape[:3], 1), unused, unused, None, None, None,
        length, length, 0.0, True, scale=rule.scaling,
    )  # fmt: skip
    return tuple(_stream(grad) for grad in grads)


def _batch(x_THD: torch.Tensor, length: int) -> torch.Tensor:
    """[B, H, length, D], a view."""
    return x_THD.view(-1, length, *x_THD.shape[1:]).transpose(1, 2)


def _stream(x_BHLD: torch.Tensor) -> torch.Tensor:
    """[T, H, D], a view where it was made from one."""
    return x_BHLD.transpose(1, 2).flatten(0, 1).contiguous()


def _varlen_options(batch: ForwardBatch, rule: Rule, device: torch.device) -> tuple[PackedLengths, dict[str, Any]]:
    """And the rule as both kernels take it."""
    if "cu_seqlens" not in batch.cache:
        batch.cache["cu_seqlens"] = _cumulative_lengths(batch, device)
    window = {} if rule.window is None else {"window_size_left": rule.window - 1, "window_size_right": 0}
    return cast("PackedLengths", batch.cache["cu_seqlens"]), {"scale": rule.scaling, **window}


def captured_cache(lengths: PackedLengths) -> dict[str, object]:
    """``ForwardBatch.cache`` of a pass that is captured once and computed with other lengths each time: what
    ``lengths``, on the device, hold by then. Attention that would need them on the host raises ``ServerError``."""
    return {"cu_seqlens": lengths, "one_length": None, CAPTURED: True}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLengths:
    """Where the sequences' queries and their keys end, int32 [B + 1], and the longest of each. ``key_rows`` int64: the
    tokens of the stream that the keys are; None: the stream as it is, and as many keys as queries. With more keys than
    queries the kernel's causal mask is aligned at the end of both, as a prefix wants it."""

    query_ends: torch.Tensor
    key_ends: torch.Tensor
    longest_query: int
    longest_key: int
    key_rows: torch.Tensor | None


def _cumulative_lengths(batch: ForwardBatch, device: torch.device) -> PackedLengths:
    spans = _spans(batch)
    lengths = [span.length for span in spans]
    key_lengths = [span.context + span.length for span in spans]
    ends, key_ends = (
        to_device(torch.tensor((0, *sizes), dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
        for sizes in (lengths, key_lengths)
    )
    key_rows = None
    if batch.prefixes:
        rows_of = _sequence_rows(batch)
        key_rows = to_device(torch.cat([rows_of[span.sequence] for span in spans]), device)
    return PackedLengths(
        query_ends=ends,
        key_ends=key_ends,
        longest_query=max(lengths),
        longest_key=max(key_lengths),
        key_rows=key_rows,
    )


def _varlen(
    batch: ForwardBatch, rule: Rule, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels under PyTorch's own packed attention (``torch.nn.attention.varlen``), which has no way to be called
    from an operator and be differentiated there. They take fewer key heads than query heads."""
    lengths, options = _varlen_options(batch, rule, query_THD.device)
    if lengths.key_rows is not None:
        key_TKD, value_TKD = (x.index_select(0, lengths.key_rows) for x in (key_TKD, value_TKD))
    out, logsumexp_HT, *_ = torch.ops.aten._flash_attention_forward(
        query_THD,
        key_TKD,
        value_TKD,
        lengths.query_ends,
        lengths.key_ends,
        lengths.longest_query,
        lengths.longest_key,
        0.0,
        rule.window is None,
        False,
        **options,
    )
    return out, logsumexp_HT


def _varlen_backward(
    batch: ForwardBatch,
    rule: Rule,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp_HT: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    lengths, options = _varlen_options(batch, rule, query.device)
    rows = lengths.key_rows
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the random state of a dropout
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out.contiguous(),
        query,
        key if rows is None else key.index_select(0, rows),
        value if rows is None else value.index_select(0, rows),
        out,
        logsumexp_HT.contiguous(),
        lengths.query_ends,
        lengths.key_ends,
        lengths.longest_query,
        lengths.longest_key,
        0.0,
        rule.window is None,
        unused,
        unused,
        **options,
    )
    if rows is not None:  # a key of a prefix gets a part from each sequence that reads it: summed in float32
        dk, dv = (
            torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, rows, part.float()).to(x.dtype)
            for x, part in ((key, dk), (value, dv))
        )
    return dq, dk, dv


def _of_paged_batch(
    module: nn.Module,
    rule: Rule,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    batch: PagedBatch,
) -> torch.Tensor:
    """Also traced by the compiler, so nothing here may read what differs between layers but the tensors bound to
    ``module``."""
    from descant.model.paged_attention import paged_batch_attention

    return paged_batch_attention(
        query_THD,
        key_TKD,
        value_TKD,
        cast(torch.Tensor, module.page_keys),
        cast(torch.Tensor, module.page_values),
        batch.handle,
        scaling=rule.scaling,
        window=rule.window,
        softcap=rule.softcap,
    )
