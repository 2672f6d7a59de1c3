"""Triton kernels called without Triton's own look at every argument, which takes the host three times as long as the
launch: a training pass has hundreds of them, and where layers are small the device waits for the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from descant.pauses import paused

_compiles_only = False


@contextmanager
def compiling_kernels() -> Iterator[None]:
    """While it lasts, kernels are compiled instead of launched, many at once, and what they would have computed is not
    there. At its end all of them are there, for a next process too (Triton keeps them on disk), but for those that do
    not compile: who launches one of these gets the error, and nobody else."""
    global _compiles_only
    import triton  # here, since what computes on a CPU imports this module too

    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="descant-compile") as threads:
        _compiles_only = True
        try:
            with triton.AsyncCompileMode(threads, ignore_errors=True):
                yield
        finally:
            _compiles_only = False


class Kernel:
    """``function``: of ``triton.jit``. Its parameters are tensors, then whole numbers, then compile-time constants. The
    dtypes of all tensors follow from that of the first and from the constants. ``launch_pdl``: before the kernel in
    front of it has ended, which it waits for itself (programmatic dependent launch)."""

    def __init__(self, function: Any, *, num_warps: int, num_stages: int, launch_pdl: bool = False):
        self._function = function
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        if launch_pdl:
            self._options["launch_pdl"] = True
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int] | tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """On the current stream of the tensors' device, which is the current one. The first call of a kind goes through
        Triton, and so does every one with a tensor that does not begin at a multiple of 16 bytes: Triton makes other
        programs for those."""
        if _compiles_only:
            self._function.warmup(*tensors, *numbers, *constants, grid=grid, **self._options)
            return
        kind = (tensors[0].dtype, tuple(map(_kind, numbers)), constants)
        compiled = self._compiled.get(kind)
        if compiled is not None:
            addresses = [tensor.data_ptr() for tensor in tensors]
            if not any(address % 16 for address in addresses):
                stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
                compiled.run(
                    *grid, *(1,) * (3 - len(grid)), stream,
                    compiled.function, compiled.packed_metadata, None, None, None,
                    *addresses, *numbers, *constants,
                )  # fmt: skip
                return
        with paused("build"):
            compiled = self._function[grid](*tensors, *numbers, *constants, **self._options)
        # It is None of Triton's interpreter.
        if compiled is not None and not any(tensor.data_ptr() % 16 for tensor in tensors):
            self._compiled[kind] = compiled


def _kind(number: int) -> int:
    """What Triton makes programs of their own for: 1, multiples of 16, and what does not fit 32 bits."""
    return 1 if number == 1 else (16 if number % 16 == 0 else 0) + (32 if number >> 31 else 0)
