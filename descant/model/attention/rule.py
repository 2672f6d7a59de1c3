"""How scores become weights; and what a pass's cache may ask of the layers, or say to them."""

from __future__ import annotations

from dataclasses import dataclass

KV_SHAPES = "kv_shapes"
"""With this key in ``ForwardBatch.cache`` (an empty dict), each layer notes ``layer_idx → (K, D of keys, D of
values)``."""

RULES = "rules"
"""Likewise, each layer notes ``layer_idx → Rule``."""

CAPTURED = "captured"
"""With this key in ``ForwardBatch.cache``, all that is known of the sequences is on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How scores become weights: ``scaling``; only the last ``window`` keys; ``cap · tanh(score / cap)``."""

    scaling: float
    window: int | None
    softcap: float | None
