"""Random numbers as a pure function: which request, which sample, which number of the stream. No torch.

A counter-based generator instead of a stateful one: a number needs no history, so that the same request gives the same
tokens whatever else is in the batch, after a preemption, and on every rank. The mixer is splitmix64's finaliser
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream_seed(seed: int, sample: int) -> int:
    """The stream of sample ``sample`` of a request with this seed (any int; its low 64 bits count), in 0..2^64-1."""
    return _mix(_mix(seed + _GOLDEN) + _GOLDEN * (sample + 1))


def uniform(seed: int, offset: int) -> float:
    """Number ``offset`` of a stream: a multiple of 2^-52 in [0, 1). At most 1 - 2^-52, so that ``u * total`` in
    float64 stays below ``total``."""
    return (_mix(_mix(seed) + _GOLDEN * (offset + 1)) >> 12) * 2.0**-52


def uniforms(seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """``uniform`` of many: uint64 [N], uint64 [N] → float64 [N], the same numbers."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    return (mix(mix(seeds) + np.uint64(_GOLDEN) * (offsets + np.uint64(1))) >> np.uint64(12)) * 2.0**-52
