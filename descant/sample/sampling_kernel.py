"""``sampling.sample_tokens`` of rows without top-k and top-p on CUDA: two Triton kernels that read the logits once and
one block again.

Likewise inverse CDF over the vocabulary in its order, sums in float64 over blocks first, then inside one block;
a row's outcome is a function of that row alone. The blocks are larger, so that a sum may differ in its last bits, and
a token where the uniform number falls between the two (some 1e-7 of tokens).

Legend: N rows, V vocabulary, B blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_TOKENS = 2048
_MIN_TEMPERATURE = tl.constexpr(1e-30)


@triton.jit
def _scaled(x, temperature, logit_scale, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    x = x.to(tl.float32) * logit_scale
    if SOFTCAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    divisor = tl.where(temperature == 0.0, 1.0, tl.maximum(temperature, _MIN_TEMPERATURE))
    return x / divisor


@triton.jit
def _summarise(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    highest,
    sums,
    places,
    logit_scale,
    softcap,
    num_blocks,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    x = _scaled(x, tl.load(temperatures + row), logit_scale, softcap, SOFTCAP)
    x = tl.where(v < V, x, float("-inf"))
    top = tl.max(x, 0)
    at = row * num_blocks + block
    tl.store(highest + at, top)
    tl.store(sums + at, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)).to(tl.float64), 0))
    tl.store(places + at, tl.argmax(x, 0) + block * BLOCK)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    uniforms,
    highest,
    sums,
    places,
    tokens,
    result,
    logit_scale,
    softcap,
    num_blocks,
    num_rows,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    temperature = tl.load(temperatures + row)
    tops = tl.load(highest + row * num_blocks + b, mask=b < num_blocks, other=float("-inf"))
    share = tl.load(sums + row * num_blocks + b, mask=b < num_blocks, other=0.0)
    top = tl.max(tops, 0)
    mass = share * tl.exp((tops - top).to(tl.float64))
    total = tl.sum(mass, 0)
    target = tl.load(uniforms + row) * total
    block = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    block = tl.minimum(block, tl.max(tl.where(mass > 0, b, 0), 0))
    before = tl.sum(tl.where(b < block, mass, 0.0), 0)

    t = tl.arange(0, BLOCK)
    v = block * BLOCK + t
    base = row.to(tl.int64) * V
    x = tl.load(logits + base + v, mask=v < V, other=float("-inf"))
    x = _scaled(x, temperature, logit_scale, softcap, SOFTCAP)
    probs = tl.where(v < V, tl.exp((x - top).to(tl.float32)), 0.0).to(tl.float64)
    place = tl.sum((tl.cumsum(probs, 0) <= target - before).to(tl.int32), 0)
    place = tl.minimum(place, tl.max(tl.where(probs > 0, t, 0), 0))
    sampled = block * BLOCK + place

    first = tl.min(tl.where(tops == top, b, BLOCKS), 0)
    likeliest = tl.load(places + row * num_blocks + tl.minimum(first, num_blocks - 1))
    token = tl.minimum(tl.where(temperature == 0.0, likeliest, sampled), V - 1)
    chosen = _scaled(tl.load(logits + base + token), temperature, logit_scale, softcap, SOFTCAP)
    logprob = chosen - (top + tl.log(total).to(tl.float32))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(result + row, token.to(tl.float64))
    tl.store(result + num_rows + row, logprob.to(tl.float64))


def sample_rows(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    uniform_N: torch.Tensor,
    *,
    logit_scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits_NV``: the head's product in the base's dtype, contiguous, before its scaling and soft cap.
    ``temperature_N`` float32 (0: the largest logit), ``uniform_N`` float64. Tokens int64 [N], and tokens and
    log-probabilities float64 [2, N] for one copy to the host. Not finite logits: a log-probability that is not."""
    num_rows, vocab_size = logits_NV.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_TOKENS)
    highest = logits_NV.new_empty(num_rows, num_blocks, dtype=torch.float32)
    sums = logits_NV.new_empty(num_rows, num_blocks, dtype=torch.float64)
    places = logits_NV.new_empty(num_rows, num_blocks, dtype=torch.int32)
    tokens_N = logits_NV.new_empty(num_rows, dtype=torch.int64)
    result_2N = logits_NV.new_empty(2, num_rows, dtype=torch.float64)
    options: dict[str, Any] = {"V": vocab_size, "BLOCK": BLOCK_TOKENS, "SOFTCAP": softcap is not None}
    scales = (logit_scale, softcap or 0.0, num_blocks)
    _summarise[(num_rows, num_blocks)](logits_NV, temperature_N, highest, sums, places, *scales, **options, num_warps=4)
    _choose[(num_rows,)](
        logits_NV,
        temperature_N,
        uniform_N,
        highest,
        sums,
        places,
        tokens_N,
        result_2N,
        *scales,
        num_rows,
        **options,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=8,
    )
    return tokens_N, result_2N
