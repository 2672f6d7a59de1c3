"""Model FLOPs of a pass, and the FLOP/s of this device: numerator and denominator of MFU (model FLOPs utilisation).

    train    4·P·T + 6·P_lora·T + 6·L·Hq·D·Σs²      the base's products forward and for dX; the adapters' for dA, dB too
    forward  2·P·T + 2·P_lora·T + 2·L·Hq·D·Σs²

P are the parameters of the linear layers with the head (of a mixture of experts those that adapters know, so that its
MFU comes out low), P_lora those of the adapter that a token uses, s what each token sees. What is recomputed, or
padded, is not counted.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from descant.adapters.layout import LoraSite, trains
from descant.model.forward_batch import Prefix, context_lens
from descant.types import Lora

if TYPE_CHECKING:
    from descant.model.base import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCounter:
    """Of one base model. ``attention``: L·Hq·D, the query numbers of a token over all layers."""

    sites: tuple[LoraSite, ...]
    linear_params: int
    attention: int
    _lora_params: dict[Lora, int] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(model: BaseModel) -> FlopCounter:
        sites, config = model.bank.sites, model.network.config.get_text_config()  # type: ignore[union-attr, operator]
        head = 0 if model.lm_head.site_index is not None else model.lm_head.weight_VD.numel()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return FlopCounter(
            sites=sites,
            linear_params=sum(site.in_features * site.out_features for site in sites) + head,
            attention=len(model.kv_shapes) * heads * head_dim,
        )

    def lora_params(self, lora: Lora) -> int:
        if lora not in self._lora_params:
            widths = sum(site.in_features + site.out_features for site in self.sites if trains(lora, site))
            self._lora_params[lora] = lora.rank * widths
        return self._lora_params[lora]

    def flops(self, tokens: int, lora_params_tokens: int, square_sum: int, *, backward: bool) -> float:
        """``lora_params_tokens``: the parameters of each token's adapter, summed over tokens. ``square_sum``: Σs²."""
        base, rest = (4.0, 6.0) if backward else (2.0, 2.0)
        return base * self.linear_params * tokens + rest * (lora_params_tokens + self.attention * square_sum)


def squares(seq_lens: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[int]:
    """s² of each sequence of a pass; of one behind a shared prefix, that of the whole less the prefix's."""
    before = context_lens(seq_lens, prefixes)
    return [(shared + own) ** 2 - shared**2 for own, shared in zip(seq_lens, before, strict=True)]


def measure_peak_flops(
    device: torch.device, dtype: torch.dtype, *, rounds: int = 7, seconds: Callable[[], float] = time.perf_counter
) -> float:
    """FLOP/s of a large square matmul, the median of ``rounds``, after one that warms up. A round takes some 3 ms on a
    GPU and some 10 ms on two CPU cores."""
    size, repeats = (8192, 2) if device.type == "cuda" else (1024, 2)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    taken = []
    for _ in range(rounds + 1):
        began = seconds()
        for _ in range(repeats):
            torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(seconds() - began)
    return repeats * 2 * size**3 / statistics.median(taken[1:])


def peak_bytes(device: torch.device) -> int:
    """Most that this process has had: on CUDA of the device's memory, else of the machine's."""
    if device.type == "cuda":
        # Not by ``max_memory_allocated``, which sorts all that is counted: 0.4 ms.
        peak_allocated: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]
        return peak_allocated
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # there in bytes
