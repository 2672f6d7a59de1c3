"""Triton kernels called without Triton's own look at every argument, which takes the host three times as long as the
launch: a training pass has hundreds of them, and where layers are small the device waits for the host."""

from __future__ import annotations

from typing import Any

import torch


class Kernel:
    """``function``: of ``triton.jit``, its compile-time constants behind all other parameters."""

    def __init__(self, function: Any, *, num_warps: int, num_stages: int):
        self._function = function
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, grid: tuple[int, int], args: tuple[torch.Tensor | int, ...], constants: tuple[Any, ...]) -> None:
        """On the current device and stream. The first call with arguments of a kind (their dtypes, and whether they are
        multiples of 16, which is what Triton makes another program for) goes through Triton."""
        kind = (
            constants,
            *[
                (arg % 16 == 0, arg == 1, arg >> 31) if isinstance(arg, int) else (arg.dtype, arg.data_ptr() % 16 == 0)
                for arg in args
            ],
        )
        compiled = self._compiled.get(kind)
        if compiled is not None:
            compiled[(*grid, 1)](*args, *constants)
            return
        compiled = self._function[grid](*args, *constants, **self._options)
        if compiled is not None:  # it is None of Triton's interpreter
            self._compiled[kind] = compiled
