"""Where numbers go when they leave their rows, the stream that copies them, and the thread that writes files.

    rows of the pool  ⇄  HostCopy (host memory, pinned on CUDA)  ⇄  a file of the bank's own directory

On CUDA copies are on a side stream, in order among themselves, and run beside the computation:

    with copies.copying():      # after everything the computation has been given so far
        host.copy_(row); row.copy_(other)
        event = copies.record() # … is there, once this has passed
    copies.join()               # what is computed from here on sees all rows copied
    event.wait()                # … sees those

The host is never waited for: whoever reads a ``HostCopy`` waits for its ``ready``, the thread that writes files too. On
CPU these do nothing.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from descant.errors import ServerError
from descant.storage import PRIVATE, cannot_store, check_room, free_bytes

logger = logging.getLogger(__name__)

VERSION_SUFFIX = ".version"
ADAPTER_SUFFIX = ".adapter"
WHOLE, PARTIAL = ".safetensors", ".partial"
UNFINISHED = ".tmp??????"
"""What safetensors calls a file until it is whole."""

SPARE_HOST_ROWS = 4
"""Pinned rows that are there before they are needed: to pin 16 MiB takes milliseconds, and the device may wait."""


class CopyEvent(Protocol):
    """What a copy has come to; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether it has passed."""
        ...

    def wait(self) -> object:
        """Has what is computed from here on come after it. Returns at once."""
        ...

    def synchronize(self) -> object:
        """Blocks until it has passed. Any thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """Numbers on the host, exact. ``tensors``: by name, as a file has them. ``adoptable``: the tensor of which
    ``tensors["state"]`` is a part, where it can be in use again as it is, without a copy. ``ready``: when they are
    there (None: they are)."""

    tensors: Mapping[str, torch.Tensor]
    adoptable: torch.Tensor | None = None
    ready: CopyEvent | None = None
    num_bytes: int = field(init=False)
    """Counted once: every copy's is added up whenever something is offloaded."""

    def __post_init__(self) -> None:
        held = dict(self.tensors) if self.adoptable is None else {**self.tensors, "state": self.adoptable}
        object.__setattr__(self, "num_bytes", sum(tensor.nbytes for tensor in held.values()))


class SpillDirectory:
    """One bank's own files. They mean nothing to another process: those that an earlier one left are removed.

    One thread writes and removes, in the order in which it was asked to, so a name may be used again at once. Another
    reads ahead."""

    def __init__(self, directory: Path, *, free: Callable[[Path], int] = free_bytes):
        """``free``: what the file system of a directory has left, in bytes."""
        self._directory, self._free = directory, free
        self._writer: ThreadPoolExecutor | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._writes: list[Future[Path]] = []
        self.num_writes = self.written_bytes = 0
        self.write_seconds = 0.0
        """Of the writing thread, which alone changes these."""
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        for suffix in (VERSION_SUFFIX, ADAPTER_SUFFIX):
            for left in [*directory.glob("*" + suffix + WHOLE), *directory.glob("*" + suffix + PARTIAL)]:
                left.unlink(missing_ok=True)
        for left in directory.glob(UNFINISHED):
            left.unlink(missing_ok=True)

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Path:
        """``name`` ends in one of the suffixes. Whole, or not at all. Raises ``CannotStore``, also where it would leave
        less than the reserve of the disk free: that is for what clients were promised. Not fsynced: it need not outlive
        us."""
        self.check(sum(tensor.nbytes for tensor in tensors.values()))
        file, partial = self._directory / (name + WHOLE), self._directory / (name + PARTIAL)
        try:
            save_file(dict(tensors), partial)
            os.replace(partial, file)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise cannot_store(error if isinstance(error, OSError) else _errno(error)) from error
        return file

    def check(self, num_bytes: int) -> None:
        """Raises ``CannotStore`` where there is no room for so much."""
        check_room(self._directory, num_bytes, free=self._free)

    def read(self, file: Path, what: str) -> dict[str, torch.Tensor]:
        """Any thread. Raises ``ServerError`` that begins with ``what``, without the file's path: clients read it."""
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            logger.error("cannot read %s: %s", file, error)
            why = str(error).replace(str(file), "it")
            raise ServerError(f"{what} cannot be read back from its file: {why}") from error

    @property
    def unwritten(self) -> Sequence[Future[Path]]:
        """What was asked to be written and has not ended, whoever wants it still. The thread holds as many copies."""
        self._writes = [writing for writing in self._writes if not writing.done()]
        return self._writes

    def begin_write(self, name: str, copy: HostCopy) -> Future[Path]:
        """``write`` on the writing thread, once the copy is there. Its tensors must not change meanwhile."""

        def run() -> Path:
            if copy.ready is not None:
                copy.ready.synchronize()
            start = time.perf_counter()
            try:
                return self.write(name, copy.tensors)
            finally:
                self.num_writes += 1
                self.written_bytes += copy.num_bytes
                self.write_seconds += time.perf_counter() - start

        writing = self._writing_thread().submit(run)
        self._writes.append(writing)
        return writing

    def remove(self, name: str) -> None:
        """On the writing thread, after what was asked for before."""

        def run() -> None:
            with suppress(OSError):
                (self._directory / (name + WHOLE)).unlink(missing_ok=True)

        self._writing_thread().submit(run)

    def join(self) -> None:
        """Waits until all is done that was asked for."""
        self._writing_thread().submit(lambda: None).result()

    def read_ahead(self, file: Path, what: str) -> Future[dict[str, torch.Tensor]]:
        """``read`` on the reading thread."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="descant-unspill")
        return self._reader.submit(self.read, file, what)

    def _writing_thread(self) -> ThreadPoolExecutor:
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="descant-spill")
        return self._writer


def _errno(error: SafetensorError) -> int | None:
    """It is in the message alone."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else int(found[1])


class CopyStream:
    """The side stream of a device, and host memory that it can reach."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._unjoined = False
        self._pinner: ThreadPoolExecutor | None = None
        self._spare: defaultdict[tuple[torch.dtype, tuple[int, ...]], list[Future[torch.Tensor]]] = defaultdict(list)

    @property
    def overlaps(self) -> bool:
        """Whether copies run beside the computation."""
        return self._stream is not None

    @contextmanager
    def copying(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._unjoined = True
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> CopyEvent | None:
        """Inside ``copying``: when what was copied so far is there."""
        return None if self._stream is None else self._stream.record_event()

    def reads(self, tensor: torch.Tensor) -> None:
        """Inside ``copying``: memory of the device that may be given back before the copy is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        if self._stream is not None and self._unjoined:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._unjoined = False

    def host(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uninitialised."""
        return torch.empty(*shape, dtype=dtype, pin_memory=self._stream is not None)

    def spare_host(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """``host`` of a shape that is asked for again and again: there already, as a thread pins the next ones."""
        if self._stream is None:
            return self.host(*shape, dtype=dtype)
        if self._pinner is None:
            self._pinner = ThreadPoolExecutor(1, thread_name_prefix="descant-pin")
        spare = self._spare[dtype, shape]
        found = spare.pop(0).result() if spare and spare[0].done() else self.host(*shape, dtype=dtype)
        spare += [self._pinner.submit(self.host, *shape, dtype=dtype) for _ in range(SPARE_HOST_ROWS - len(spare))]
        return found
