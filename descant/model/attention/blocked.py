"""Attention in blocks of keys, on CPU and for what CUDA's kernels do not take: forward and backward.

A row's output does not depend on its pass: a row's maximum is exact in any order; a block's products are matrix
products of one inner size (``D`` for the scores, ``PAGE_TOKENS`` for the values) whose rows do not depend on one
another; blocks are added in the order of the sequence; and a block that a row does not see adds exactly 0 to it, so it
does not matter that a batch neighbour made it part of the product. The backward pass need not have equal bits and uses
PyTorch's own kernel.

Legend: T tokens of the pass, S sequences of a tile, R query rows of a tile, N keys of a tile (a multiple of
``PAGE_TOKENS``), B sequences of one length, L their length, H query heads, K key heads, G = H / K, D head size.
"""

from __future__ import annotations

from typing import cast

import torch

from descant.model.attention.rule import Rule
from descant.model.attention.tiles import Tile, equal_lengths, run_of, tiles_of_pass
from descant.model.forward_batch import PAGE_TOKENS, ForwardBatch

FLOAT_KEYS = 256
"""Sequences of fewer keys go backward in float32: PyTorch's kernel takes 0.35 instead of 1.9 ms for 4 of 23 tokens
then, 1.4 instead of 4.3 for 4 of 64 and 4.6 instead of 5.3 for 2 of 192, and from here on more (9 heads of 64, bfloat16
in hardware, one thread)."""


def forward(
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
    for tile in tiles_of_pass(batch, rule.window, query_THD, key_TKD):
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: Tile, rule: Rule, want_logsumexp: bool
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


def write_pages(batch: ForwardBatch, layer: int, key_TKD: torch.Tensor, value_TKD: torch.Tensor) -> None:
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


def backward(
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
    for group in equal_lengths(batch):
        size, rows, keys = len(group.rows), group.rows.flatten(), group.keys.flatten()
        run = run_of(rows)
        key_run = run if group.context == 0 else None
        rows, keys = rows.to(query.device), keys.to(query.device)

        def of_queries(
            x: torch.Tensor, rows: torch.Tensor = rows, run: slice | None = run, size: int = size
        ) -> torch.Tensor:
            return _rows(x, rows, run).view(size, -1, *x.shape[1:]).transpose(1, 2)

        k, v = (_rows(x, keys, key_run).view(size, -1, *x.shape[1:]).transpose(1, 2) for x in (key, value))
        q, do = of_queries(query), of_queries(grad_out)
        if has_kernel:
            o, own_logsumexp = of_queries(out), of_queries(logsumexp.unsqueeze(2)).squeeze(3)
            if k.shape[2] < FLOAT_KEYS:
                q, k, v, do, o = (x.float() for x in (q, k, v, do, o))
            parts = _kernel_backward(rule, group.context, q, k, v, do, o, own_logsumexp)
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
