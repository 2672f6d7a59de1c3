"""Elementwise work of decoder layers in few passes over memory, on CUDA, whether layers are compiled or not.

Which module computes what is not read from its name: each is compared with the formula on random numbers (``fuse``),
and what differs stays as it is.

Legend: T tokens, I the width between the MLP's two halves.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from descant.model.lora.linear import MultiLoraLinear

TOLERANCE = 1e-5


def fuse(network: nn.Module) -> None:
    """RMS norms become PyTorch's own, one kernel instead of six. SwiGLU's product becomes one kernel a direction over
    the joined output of gate and up, which is thereby not cut, and its gradient not put together, by copies."""
    for module in network.modules():
        if _is_rms_norm(module):
            module.__class__ = _with_forward(type(module), _rms_norm)  # type: ignore[arg-type]
        elif importlib.util.find_spec("triton") is not None and _is_swiglu(module):
            module.__class__ = _with_forward(type(module), _swiglu)  # type: ignore[arg-type]


@cache
def _with_forward(cls: type[Any], forward: Callable[..., torch.Tensor]) -> type[Any]:
    """A class and no method of each instance: to the compiler all layers are one."""
    return type(cls.__name__, (cls,), {"forward": forward})


def _is_rms_norm(module: nn.Module) -> bool:
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return False
    exact = copy.deepcopy(module).float()
    x = _random(5, len(weight), weight.device)
    return _near(exact, x, F.rms_norm(x, x.shape[1:], weight.float(), epsilon))


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)


def _is_swiglu(module: nn.Module) -> bool:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, MultiLoraLinear) and isinstance(up, MultiLoraLinear) and isinstance(down, nn.Module)):
        return False
    if gate.sites != (gate.site_index, up.site_index) or gate.site.out_features % 8:
        return False
    act = getattr(module, "act_fn", None)
    x = _random(5, 64, gate.weight.device)
    if not isinstance(act, nn.Module) or not _near(act, x, F.silu(x)):
        return False
    x = _random(8, gate.site.in_features, gate.weight.device).to(gate.weight.dtype)
    return _near(module, x, down(F.silu(gate(x)) * up(x)), 2e-2)


def _swiglu(self: Any, x: torch.Tensor) -> torch.Tensor:
    joined = self.gate_proj.joined(x)
    if joined is None:
        plain: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return plain
    out_TI = _SwiGLU.apply(joined) if torch.is_grad_enabled() else torch.ops.descant.swiglu(joined)
    z: torch.Tensor = self.down_proj(out_TI.view(*x.shape[:-1], -1))
    return z


class _SwiGLU(torch.autograd.Function):
    """[T, 2 I] → [T, I]: silu of the first half times the second."""

    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(joined)
        out: torch.Tensor = torch.ops.descant.swiglu(joined)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        (joined,) = ctx.saved_tensors
        grad: torch.Tensor = torch.ops.descant.swiglu_backward(grad_outputs[0].contiguous(), joined)
        return grad


def _forward(joined: torch.Tensor) -> torch.Tensor:
    from descant.model.swiglu_kernel import swiglu

    return swiglu(joined)


def _backward(grad: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
    from descant.model.swiglu_kernel import swiglu_backward

    return swiglu_backward(grad, joined)


_LIBRARY = torch.library.Library("descant", "FRAGMENT")
_LIBRARY.define("swiglu(Tensor joined) -> Tensor")
_LIBRARY.define("swiglu_backward(Tensor grad, Tensor joined) -> Tensor")
_LIBRARY.impl("swiglu", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("swiglu_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("descant::swiglu", lib=_LIBRARY)
def _forward_shape(joined: torch.Tensor) -> torch.Tensor:
    return joined.new_empty(joined.shape[0], joined.shape[1] // 2)


@torch.library.register_fake("descant::swiglu_backward", lib=_LIBRARY)
def _backward_shape(grad: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
    return joined.new_empty(joined.shape)


def _random(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device)


@torch.no_grad()
def _near(module: nn.Module, x: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    got = module(x)
    return got.shape == want.shape and bool((got - want).float().norm() <= tolerance * want.float().norm())
