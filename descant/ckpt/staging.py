"""The way of a file's bytes from wherever they are to the process that writes them: through the slots of an arena.

    tensors, on the device or the host  →  a slot of the arena  →  ``send``, whose answer frees the slot

The arena is one piece of memory that both processes have mapped (a memfd; pinned on CUDA, so that the device copies
into it by itself). So neither memory nor the number of descriptors depends on how much is written, or of how many
tensors.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from descant.adapters.offload import CopyEvent
from descant.errors import ServerError

log = logging.getLogger(__name__)

NUM_SLOTS, SLOT_BYTES = 8, 8 << 20
COPY_S = 60.0
"""For the device, to come to a snapshot and to copy a slot of it."""
POLL_S = 0.0002
"""How often it is asked whether it has: that takes some 0.3 ms."""

Content = bytes | torch.Tensor
Send = Callable[[int, int], Future[list[Any]]]
"""(offset in the arena, bytes) → the answer, which comes when these have been written."""


def num_bytes_of(contents: Sequence[Content]) -> int:
    return sum(len(content) if isinstance(content, bytes) else content.nbytes for content in contents)


class Arena:
    """uint8 [num_slots, slot_bytes] that another process can map by ``fd``. ``slot_bytes``: a multiple of 8."""

    def __init__(self, device: torch.device, *, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES):
        """Raises ``ServerError`` where there is no memory for it."""
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        try:
            self.fd = _anonymous_file()
            os.ftruncate(self.fd, num_slots * slot_bytes)
            self.memory = mmap.mmap(self.fd, num_slots * slot_bytes)
        except OSError as error:
            raise ServerError(f"there is no memory to write checkpoints through: {error.strerror}") from error
        self.slots = torch.frombuffer(self.memory, dtype=torch.uint8).view(num_slots, slot_bytes)
        if device.type == "cuda":
            _pin(self.slots)


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("descant-arena", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _pin(memory: torch.Tensor) -> None:
    """Registers host memory with the driver, for as long as the process lives."""
    portable = 1  # whichever device a thread has chosen
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)
    if int(code) != 0:  # slower, and right
        log.warning("the memory that checkpoints are written through cannot be pinned: CUDA error %s", code)


class Staging:
    """Fills slots, in order, and has them sent. One thread at a time."""

    def __init__(self, arena: Arena, device: torch.device):
        self.arena = arena
        self._patience_s = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free = deque(range(arena.num_slots))
        self._copying: deque[tuple[int, int, CopyEvent | None, Send]] = deque()
        """Full slots that are not sent yet: (slot, bytes, when the device has copied them, …)."""
        self._sent: deque[tuple[int, Future[list[Any]]]] = deque()
        self._slot: int | None = None
        """That is being filled, and up to where."""
        self._end = 0

    @contextmanager
    def use(self, ready: CopyEvent | None = None, *, patience_s: float) -> Iterator[None]:
        """For one or more ``stage``. ``ready``: when the tensors are there. ``patience_s``: for any answer. At its end
        nothing is copied any more, and all slots are free, however it ends."""
        self._patience_s = patience_s
        try:
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                if ready is not None:
                    ready.wait()
                yield
        finally:
            self._reset()

    def stage(self, contents: Sequence[Content], send: Send) -> None:
        """All of ``contents``, one behind the other, to the end: the last slot too is sent. Raises what ``send``'s
        answers raise, ``ServerError`` where the device does not copy."""
        for content in contents:
            if isinstance(content, bytes):
                self._stage_bytes(content, send)
            elif content.numel():
                self._stage_tensor(content, send)
        self._close_slot(send)
        while self._copying:
            self._send_first()

    # ------------------------------------------------------------------------------------------------ filling
    def _stage_bytes(self, data: bytes, send: Send) -> None:
        at = 0
        while at < len(data):
            slot, begin, room = self._room(send)
            length = min(room, len(data) - at)
            offset = slot * self.arena.slot_bytes + begin
            self.arena.memory[offset : offset + length] = data[at : at + length]
            self._end += length
            at += length

    def _stage_tensor(self, tensor: torch.Tensor, send: Send) -> None:
        """In C order: whole where there is room for it, else by as many rows as there is room for."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)
        num_rows = 1
        while num_rows:
            slot, begin, room = self._room(send)
            if tensor.nbytes <= room:
                _copy(self.arena, slot, begin, tensor)
                self._end += tensor.nbytes
                return
            if tensor.is_contiguous():
                tensor = tensor.view(-1)
            num_rows = tensor.shape[0]
            fit = room * num_rows // tensor.nbytes
            if fit:
                part = tensor[:fit]
                _copy(self.arena, slot, begin, part)
                self._end += part.nbytes
            else:
                fit = 1
                self._stage_tensor(tensor[0], send)
            tensor = tensor[fit:]
            num_rows -= fit

    def _room(self, send: Send) -> tuple[int, int, int]:
        """The slot that is being filled, up to where, and the bytes that it has room for: at least one."""
        if self._slot is not None and self._end == self.arena.slot_bytes:
            self._close_slot(send)
        if self._slot is None:
            self._slot, self._end = self._take_slot(), 0
        return self._slot, self._end, self.arena.slot_bytes - self._end

    def _close_slot(self, send: Send) -> None:
        if self._slot is None:
            return
        event = None if self._stream is None else self._stream.record_event()
        self._copying.append((self._slot, self._end, event, send))
        self._slot = None
        while self._copying and (len(self._copying) > 1 or event is None):  # the last one is copied meanwhile
            self._send_first()

    def _take_slot(self) -> int:
        while not self._free:
            if self._copying:
                self._send_first()
            slot, answer = self._sent.popleft()
            self._free.append(slot)
            answer.result(self._patience_s)
        return self._free.popleft()

    def _send_first(self) -> None:
        slot, length, event, send = self._copying.popleft()
        if event is not None:
            _wait_for(event)
        self._sent.append((slot, send(slot * self.arena.slot_bytes, length)))

    def _reset(self) -> None:
        if self._stream is not None and (self._copying or self._slot is not None):  # it was left by an exception
            _wait_for(self._stream.record_event())
        wait([answer for _, answer in self._sent], self._patience_s)
        self._free, self._slot = deque(range(self.arena.num_slots)), None
        self._copying.clear()
        self._sent.clear()


def _copy(arena: Arena, slot: int, begin: int, part: torch.Tensor) -> None:
    """``part`` into a slot, from ``begin`` on. On the host numpy copies: torch would have as many threads do it as it
    computes with, and these are busy."""
    if part.is_cuda:
        window = arena.slots[slot, begin : begin + part.nbytes]
        window.view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
        return
    numbers = part.numpy() if part.dtype == torch.float32 else part.detach().view(_INTEGERS[part.itemsize]).numpy()
    offset = slot * arena.slot_bytes + begin
    np.copyto(np.ndarray(numbers.shape, numbers.dtype, arena.memory, offset), numbers)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What numpy copies as: it has no bfloat16."""


def _wait_for(event: CopyEvent) -> None:
    until = time.monotonic() + COPY_S
    while not event.query():
        if time.monotonic() > until:
            raise ServerError(f"the device did not copy a part of a snapshot in {COPY_S:.0f} s")
        time.sleep(POLL_S)
