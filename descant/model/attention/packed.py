"""Attention of training and scoring in half precision on CUDA: PyTorch's packed flash kernels, or cuDNN's where all the
sequences have one length (``one_length``).

Legend: T tokens of the pass, B sequences, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from descant.model.attention.rule import CAPTURED, Rule
from descant.model.attention.tiles import sequence_rows, spans_of
from descant.model.forward_batch import ForwardBatch, to_device

DENSE_LENGTHS = 64
"""Sequences of one length, a multiple of this, are a batch for cuDNN's kernels, which are made for Hopper: 0.15 and
0.67 ms (forward, backward) a call of 16 × 1,024 tokens where the packed ones take 0.32 and 1.05 (H100, 16 heads of
128). Of other lengths each would need a cuDNN plan of its own first: 100 ms, more than it saves."""

MIN_DENSE_LENGTH = 256


def serves(rule: Rule, query: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.is_cuda
        and rule.softcap is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1]
    )


def one_length(batch: ForwardBatch, rule: Rule, query: torch.Tensor) -> int | None:
    """The length of all sequences, where a batch of them is what computes fastest."""
    if "one_length" not in batch.cache:
        lengths = {length for length in batch.seq_lens if length}
        only = lengths.pop() if len(lengths) == 1 and not batch.prefixes else 0
        batch.cache["one_length"] = only if only >= MIN_DENSE_LENGTH and only % DENSE_LENGTHS == 0 else None
    length = cast("int | None", batch.cache["one_length"])
    fits = length is not None and (rule.window is None or rule.window >= length) and query.shape[-1] in (64, 128)
    return length if fits and torch.cuda.get_device_capability(query.device) == (9, 0) else None


def dense(
    rule: Rule, length: int, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logsumexp comes in the kernel's own order, [B, H, length] within [H, T]."""
    q, k, v = (_batch(x, length) for x in (query_THD, key_TKD, value_TKD))
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=rule.scaling
    )
    return _stream(out), logsumexp.view(query_THD.shape[1], -1)


def dense_backward(
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
    spans = spans_of(batch)
    lengths = [span.length for span in spans]
    key_lengths = [span.context + span.length for span in spans]
    ends, key_ends = (
        to_device(torch.tensor((0, *sizes), dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
        for sizes in (lengths, key_lengths)
    )
    key_rows = None
    if batch.prefixes:
        rows_of = sequence_rows(batch)
        key_rows = to_device(torch.cat([rows_of[span.sequence] for span in spans]), device)
    return PackedLengths(
        query_ends=ends,
        key_ends=key_ends,
        longest_query=max(lengths),
        longest_key=max(key_lengths),
        key_rows=key_rows,
    )


def varlen(
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


def varlen_backward(
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
