"""Where numbers go when they leave their rows, and the stream that copies them.

    rows of the pool  ⇄  HostCopy (host memory, pinned on CUDA)  ⇄  a file of the bank's own directory

On CUDA all copies of training adapters are on one side stream, so that they are in order among themselves and run
beside the computation:

    with copies.copying():      # after everything the computation has been given so far
        host.copy_(row); row.copy_(other)
    copies.join()               # what is computed from here on sees the rows copied
    copies.synchronize()        # the host may read what was copied to it

On CPU these do nothing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from descant.errors import ServerError
from descant.storage import PRIVATE, cannot_store, check_room, free_bytes

logger = logging.getLogger(__name__)

VERSION_SUFFIX = ".version"
ADAPTER_SUFFIX = ".adapter"
WHOLE, PARTIAL = ".safetensors", ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """Numbers on the host, exact. ``tensors``: by name, as a file has them. ``adoptable``: the tensor of which
    ``tensors["state"]`` is a part, where it can be in use again as it is, without a copy."""

    tensors: Mapping[str, torch.Tensor]
    adoptable: torch.Tensor | None = None
    num_bytes: int = field(init=False)
    """Counted once: every copy's is added up whenever something is offloaded."""

    def __post_init__(self) -> None:
        held = dict(self.tensors) if self.adoptable is None else {**self.tensors, "state": self.adoptable}
        object.__setattr__(self, "num_bytes", sum(tensor.nbytes for tensor in held.values()))


class SpillDirectory:
    """One bank's own files. They mean nothing to another process: those that an earlier one left are removed."""

    def __init__(self, directory: Path, *, free: Callable[[Path], int] = free_bytes):
        """``free``: what the file system of a directory has left, in bytes."""
        self._directory, self._free = directory, free
        self._executor: ThreadPoolExecutor | None = None
        """One thread: what is written ahead and read ahead is so in the order in which it was asked for."""
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        for suffix in (VERSION_SUFFIX, ADAPTER_SUFFIX):
            for left in [*directory.glob("*" + suffix + WHOLE), *directory.glob("*" + suffix + PARTIAL)]:
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
            logger.warning("cannot write %s: %s", file, error)
            raise cannot_store(error if isinstance(error, OSError) else _errno(error)) from None
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

    def write_ahead(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Future[Path]:
        """``write`` on a thread of its own. The tensors must not change meanwhile."""
        return self._thread().submit(self.write, name, tensors)

    def read_ahead(self, file: Path, what: str) -> Future[dict[str, torch.Tensor]]:
        return self._thread().submit(self.read, file, what)

    def _thread(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="descant-spill")
        return self._executor

    def remove(self, file: Path) -> None:
        with suppress(OSError):
            file.unlink(missing_ok=True)


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

    def record(self) -> torch.cuda.Event | None:
        """Inside ``copying``: when what was copied so far is there."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def join(self) -> None:
        if self._stream is not None and self._unjoined:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._unjoined = False

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def host(self, *shape: int) -> torch.Tensor:
        """float32, uninitialised."""
        return torch.empty(*shape, dtype=torch.float32, pin_memory=self._stream is not None)
