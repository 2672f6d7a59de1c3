"""The one attention function: training, scoring, prefill, decode and verification.

Registered in transformers' attention interface under ``NAME``; every family calls it with its own queries, keys and
values and hands our ``ForwardBatch`` through as one keyword. Keys are added in fixed float32 blocks of ``PAGE_TOKENS``
over at least 8 query rows, so that a token's output does not depend on what else is in the pass, on how the sequence
was cut into passes, or on whether its keys came from the pass or from the KV pages: the sampler's log-probabilities
equal the trainer's bit for bit (``attention.blocked`` says how). Cost grows with the sum of squared sequence lengths,
not with the square of their sum.

On CUDA, training and scoring in half precision go through ``attention.packed``, the pages always through
``attention.paged``, which never reads a page's tail. In a compiled layer attention is an operator that knows
its pass by a number (``Handles``): whatever else the graph saw of the pass would make another graph for the next.

Legend: T tokens of the pass, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from descant.errors import ServerError, UserError
from descant.model.attention import blocked, packed
from descant.model.attention.rule import CAPTURED, KV_SHAPES, RULES, Rule
from descant.model.forward_batch import FORWARD_BATCHES, ForwardBatch
from descant.model.paged_batch import PagedBatch

NAME = "descant"

HARMLESS_KEYWORDS = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"})
"""What travels along and says nothing about attention: positions are applied already, and no cache is used. Any
other keyword that is not None is refused by name (gpt-oss's ``s_aux``, ignored, is silently off by 0.23)."""


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
    if packed.serves(rule, query_THD, value_TKD):
        length = packed.one_length(batch, rule, query_THD)
        out_THD, logsumexp_HT = packed.varlen(batch, rule, *own) if length is None else packed.dense(rule, length, *own)
    elif CAPTURED in batch.cache:
        raise ServerError("attention with a soft cap, or with values of another size than keys, cannot be captured")
    else:
        out_THD, logsumexp_TH = blocked.forward(batch, rule, *own, want_logsumexp=want_logsumexp)
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
        from descant.model.attention.prefill_kernels import paged_attention

        return paged_attention(
            query_THD, key_TKD, value_TKD, *pages, batch, scaling=rule.scaling, window=rule.window, softcap=rule.softcap
        )
    own = tuple(x[:num_tokens] for x in (query_THD, key_TKD, value_TKD))
    blocked.write_pages(batch, layer, own[1], own[2])
    out_THD, _ = blocked.forward(batch, rule, *own, pages=pages)
    num_padding = len(query_THD) - num_tokens
    return F.pad(out_THD, (0, 0, 0, 0, 0, num_padding)) if num_padding else out_THD


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
    if not packed.serves(rule, query, value):
        grads = blocked.backward(batch, rule, do, q, k, v, o, logsumexp[:, :num_tokens])
    elif (length := packed.one_length(batch, rule, query)) is None:
        grads = packed.varlen_backward(batch, rule, do, q, k, v, o, logsumexp[:, :num_tokens])
    else:
        grads = packed.dense_backward(rule, length, do, q, k, v, o, logsumexp)
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
    from descant.model.attention.paged import paged_batch_attention

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
