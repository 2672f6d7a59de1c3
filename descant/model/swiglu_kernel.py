"""silu(gate) · up over a joined [gate | up], and its gradient, one Triton kernel each.

Computed in float32 and rounded once. Legend: T tokens, I width of a half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from descant.model.kernel_launch import Kernel

BLOCK = 1024


@triton.jit
def _swiglu(joined, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = i < WIDTH
    at = joined + token * (2 * WIDTH) + i
    gate = tl.load(at, mask=own).to(tl.float32)
    up = tl.load(at + WIDTH, mask=own).to(tl.float32)
    tl.store(out + token * WIDTH + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=own)


@triton.jit
def _swiglu_backward(grad, joined, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = i < WIDTH
    at = token * (2 * WIDTH) + i
    gate = tl.load(joined + at, mask=own).to(tl.float32)
    up = tl.load(joined + at + WIDTH, mask=own).to(tl.float32)
    dy = tl.load(grad + token * WIDTH + i, mask=own).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + at, dgate.to(out.dtype.element_ty), mask=own)
    tl.store(out + at + WIDTH, (dy * gate * sigmoid).to(out.dtype.element_ty), mask=own)


_SWIGLU = Kernel(_swiglu, num_warps=4, num_stages=3)
_SWIGLU_BACKWARD = Kernel(_swiglu_backward, num_warps=4, num_stages=3)


def swiglu(joined: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] → [T, I]"""
    num_tokens, width = len(joined), joined.shape[1] // 2
    out = joined.new_empty(num_tokens, width)
    _SWIGLU(_grid(num_tokens, width), (joined, out), (), (width, BLOCK))
    return out


def swiglu_backward(grad: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
    """[T, I], [T, 2 I] → [T, 2 I]"""
    num_tokens, width = grad.shape
    out = torch.empty_like(joined)
    _SWIGLU_BACKWARD(_grid(num_tokens, width), (grad, joined, out), (), (width, BLOCK))
    return out


def _grid(num_tokens: int, width: int) -> tuple[int, int]:
    return num_tokens, -(-width // BLOCK)
