"""Shapes of queries, keys and values as the kernels over the KV pages take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """``heads`` of keys, ``group`` query heads of each."""

    heads: int
    group: int
    size: int
    value_size: int

    @staticmethod
    def of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> HeadShape:
        return HeadShape(
            heads=key.shape[1],
            group=query.shape[1] // key.shape[1],
            size=query.shape[2],
            value_size=value.shape[2],
        )

    @property
    def block_d(self) -> int:
        return max(16, int(triton.next_power_of_2(self.size)))

    @property
    def block_dv(self) -> int:
        return max(16, int(triton.next_power_of_2(self.value_size)))
