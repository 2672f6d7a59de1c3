"""A fake of the driver that maps memory to a CUDA device's addresses, of host memory: what is not mapped cannot be
touched here either, a process that does ends with SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)


class FakeDriver:
    """``room``: bytes that may be mapped at once, of all ranges together; None: as many as ``device_bytes``."""

    granularity = mmap.PAGESIZE

    def __init__(self, device_bytes: int, *, room: int | None = None):
        self.device_bytes = device_bytes
        self.room = device_bytes if room is None else room
        self.mapped_bytes = 0

    def reserve(self, num_bytes: int) -> FakeRange:
        return FakeRange(self, num_bytes)


class FakeRange:
    def __init__(self, driver: FakeDriver, num_bytes: int):
        assert num_bytes % driver.granularity == 0
        self._driver = driver
        self._memory = mmap.mmap(-1, num_bytes)
        self._all = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._protect(0, num_bytes, 0)

    @property
    def tensor(self) -> torch.Tensor:
        return self._all

    def map(self, start: int, end: int) -> None:
        if self._driver.mapped_bytes + end - start > self._driver.room:
            raise torch.OutOfMemoryError("the device has no memory left")
        self._driver.mapped_bytes += end - start
        self._protect(start, end, mmap.PROT_READ | mmap.PROT_WRITE)

    def unmap(self, start: int, end: int) -> None:
        self._driver.mapped_bytes -= end - start
        self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)
        self._protect(start, end, 0)

    def _protect(self, start: int, end: int, protection: int) -> None:
        address = ctypes.c_void_p(self._all.data_ptr() + start)
        if _libc.mprotect(address, ctypes.c_size_t(end - start), protection):
            raise OSError(ctypes.get_errno(), "mprotect")
