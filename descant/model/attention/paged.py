"""Attention over the KV pages on CUDA: prefill or decode, as the pass's ``PagedBatch`` says."""

from __future__ import annotations

import torch

from descant.model.attention.decode_kernels import decode_attention
from descant.model.attention.prefill_kernels import prefill_attention
from descant.model.paged_batch import PAGED_BATCHES, PrefillMetadata


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    handle: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    batch = PAGED_BATCHES[handle].attention
    if isinstance(batch, PrefillMetadata):
        return prefill_attention(
            query, key, value, keys, values, batch, scaling=scaling, window=window, softcap=softcap
        )
    return decode_attention(query, key, value, keys, values, batch, scaling=scaling, window=window, softcap=softcap)


# The pages are written as well, but nothing else in a compiled layer reads them: declared as a mutation, they would
# have to pass through its graph.
_LIBRARY = torch.library.Library("descant", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor keys, Tensor values, Tensor handle, float scaling, "
    "int window, float softcap) -> Tensor"
)
_LIBRARY.impl("paged_attention", _attention, "CompositeExplicitAutograd")


@torch.library.register_fake("descant::paged_attention", lib=_LIBRARY)
def _paged_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def paged_batch_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    handle: torch.Tensor,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Either of them, as the ``PagedBatch`` of this ``handle`` says; [T, H, D] contiguous. One operator, so that a
    compiled layer sees T and nothing else that varies."""
    out: torch.Tensor = torch.ops.descant.paged_attention(
        query_THD, key_TKD, value_TKD, keys, values, handle, scaling, window or 0, softcap or 0.0
    )
    return out
