"""Addresses of a CUDA device, reserved at once and mapped to memory bit by bit: the driver's virtual memory management.

    range = Driver(device).reserve(num_bytes)    # takes no memory
    range.map(0, 2 << 20)                        # these bytes do
    range.tensor[: 2 << 20]                      # … and may be touched

torch's own allocator keeps what it has freed, so where there is no memory it is asked to give that back first.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from typing import Any

import torch

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY"""

NO_SUPPORT = "the driver maps no memory to addresses of this device"


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags"""

    _fields_ = [
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


PINNED, ON_DEVICE, READ_AND_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE"""

SUPPORTED = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"""


class Driver:
    """Of one device."""

    def __init__(self, device: torch.device):
        """Raises ``OSError`` where its driver cannot do it."""
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # the device's context is there from here on
            self.device_bytes = torch.cuda.get_device_properties(device).total_memory
            self.index = torch.cuda.current_device()
        self.device = torch.device("cuda", self.index)
        self._library = ctypes.CDLL("libcuda.so.1")
        supported = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(supported), SUPPORTED, self.ordinal())
        if not supported.value:
            raise OSError(NO_SUPPORT)
        self._location = _Location(ON_DEVICE, self.ordinal())
        self._properties = _AllocationProperties(type=PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.granularity = granularity.value

    def ordinal(self) -> int:
        """The device as the driver counts: as the runtime does, both see what ``CUDA_VISIBLE_DEVICES`` leaves."""
        found = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(found), self.index)
        return found.value

    def call(self, name: str, *arguments: Any) -> None:
        """Raises torch's ``OutOfMemoryError``, or ``OSError`` for anything else."""
        status = getattr(self._library, name)(*arguments)
        if status == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device has no memory left")
        if status != 0:
            raise OSError(f"{NO_SUPPORT}: {name} failed with CUDA error {status}")

    def reserve(self, num_bytes: int) -> Range:
        """``num_bytes``: a multiple of ``granularity``. Raises ``OSError``."""
        address = ctypes.c_uint64()
        self.call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(num_bytes),
            ctypes.c_size_t(0),
            _ulong(0),
            _ulong(0),
        )
        return Range(self, address.value, num_bytes)

    def map(self, address: int, num_bytes: int) -> None:
        """Raises torch's ``OutOfMemoryError``."""
        handle = ctypes.c_uint64()
        allocate = (
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(num_bytes),
            ctypes.byref(self._properties),
            _ulong(0),
        )
        try:
            self.call(*allocate)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.call(*allocate)
        try:
            self.call("cuMemMap", _ulong(address), ctypes.c_size_t(num_bytes), ctypes.c_size_t(0), handle, _ulong(0))
        finally:
            self.call("cuMemRelease", handle)  # what is mapped stays until it is unmapped
        access = _Access(self._location, READ_AND_WRITE)
        self.call(
            "cuMemSetAccess", _ulong(address), ctypes.c_size_t(num_bytes), ctypes.byref(access), ctypes.c_size_t(1)
        )

    def unmap(self, address: int, num_bytes: int) -> None:
        """Waits for the device, which may still be reading."""
        torch.cuda.synchronize(self.device)
        self.call("cuMemUnmap", _ulong(address), ctypes.c_size_t(num_bytes))

    def free(self, address: int, num_bytes: int) -> None:
        self.call("cuMemAddressFree", _ulong(address), ctypes.c_size_t(num_bytes))


class Range:
    """Reserved addresses. They are given back, and what is mapped with them, when no tensor of them is left."""

    def __init__(self, driver: Driver, address: int, num_bytes: int):
        self._memory = _Memory(driver, address, num_bytes)

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [num_bytes]. Needs the first bytes to be mapped: torch asks them which device's they are. What is not
        mapped must not be touched."""
        return torch.as_tensor(self._memory, device=self._memory.driver.device)

    def map(self, start: int, end: int) -> None:
        """Bytes ``start:end``, multiples of the driver's granularity, take memory. Raises torch's
        ``OutOfMemoryError``."""
        self._memory.driver.map(self._memory.address + start, end - start)
        self._memory.mapped.append((start, end))

    def unmap(self, start: int, end: int) -> None:
        """As they were mapped. Waits for the device."""
        self._memory.mapped.remove((start, end))
        self._memory.driver.unmap(self._memory.address + start, end - start)


class _Memory:
    """What tensors of a range hold on to."""

    def __init__(self, driver: Driver, address: int, num_bytes: int):
        self.driver, self.address, self.num_bytes = driver, address, num_bytes
        self.mapped: list[tuple[int, int]] = []

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 2}

    def __del__(self) -> None:
        if sys.is_finalizing():  # the process gives all back
            return
        with suppress(OSError, RuntimeError):
            for start, end in self.mapped:
                self.driver.unmap(self.address + start, end - start)
            self.driver.free(self.address, self.num_bytes)


def _ulong(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)
