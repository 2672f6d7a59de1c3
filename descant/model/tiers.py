"""Where an adapter's numbers are when they are not in rows: host memory, then files; and how they move.

    rows of the bank  ⇄  Parked (host memory, pinned on CUDA)  ⇄  a file of the bank's own directory

On CUDA all moves are on one side stream, so that they are in order among themselves and beside the computation:

    with mover.moving():        # after everything the computation has been given so far
        host.copy_(row); row.copy_(other)
    mover.settle()              # what is computed from here on sees the rows moved
    mover.finish()              # the host may read what was moved to it

On CPU these do nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from descant.errors import ServerError

logger = logging.getLogger(__name__)

VERSION_SUFFIX = ".version"
ADAPTER_SUFFIX = ".adapter"
WHOLE, PARTIAL = ".safetensors", ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """An adapter on the host, exact. ``state`` float32 [1, n] (weights; the moments are zero) or [3, n] (weights and
    both moments); ``gradient`` float32 [n], None when it holds nothing. n is the row, or less: the numbers of the true
    rank alone. ``adoptable``: ``state`` can be an adapter's in rows as it is, without a copy."""

    state: torch.Tensor
    gradient: torch.Tensor | None = None
    adoptable: bool = False

    @property
    def num_bytes(self) -> int:
        return self.state.nbytes + (0 if self.gradient is None else self.gradient.nbytes)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"state": self.state} | ({} if self.gradient is None else {"gradient": self.gradient})


class SpillDirectory:
    """One bank's own files. They mean nothing to another process: those that an earlier one left are removed."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._beside: ThreadPoolExecutor | None = None
        """One thread: what is written ahead and read ahead is so in the order in which it was asked for."""
        directory.mkdir(parents=True, exist_ok=True)
        for suffix in (VERSION_SUFFIX, ADAPTER_SUFFIX):
            for left in [*directory.glob("*" + suffix + WHOLE), *directory.glob("*" + suffix + PARTIAL)]:
                left.unlink(missing_ok=True)

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Path:
        """``name`` ends in one of the suffixes. Whole, or not at all. Raises ``ServerError`` naming the file. Not
        fsynced: it need not outlive us."""
        file, partial = self._directory / (name + WHOLE), self._directory / (name + PARTIAL)
        try:
            save_file(dict(tensors), partial)
            os.replace(partial, file)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise ServerError(f"cannot write {file}: {error}") from None
        return file

    def read(self, file: Path, what: str) -> dict[str, torch.Tensor]:
        """Any thread. Raises ``ServerError`` that begins with ``what``."""
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise ServerError(f"{what} cannot be read back from {file}: {error}") from error

    def write_ahead(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Future[Path]:
        """``write`` on a thread of its own. The tensors must not change meanwhile."""
        return self._executor().submit(self.write, name, tensors)

    def read_ahead(self, file: Path, what: str) -> Future[dict[str, torch.Tensor]]:
        return self._executor().submit(self.read, file, what)

    def _executor(self) -> ThreadPoolExecutor:
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, thread_name_prefix="descant-spill")
        return self._beside

    def remove(self, file: Path) -> None:
        with suppress(OSError):
            file.unlink(missing_ok=True)


class Mover:
    """The side stream of a device, and host memory that it can reach."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._unsettled = False

    @property
    def beside(self) -> bool:
        """Whether moves run beside the computation."""
        return self._stream is not None

    @contextmanager
    def moving(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._unsettled = True
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Inside ``moving``: when what was moved so far is there."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def settle(self) -> None:
        if self._stream is not None and self._unsettled:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._unsettled = False

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def host(self, *shape: int) -> torch.Tensor:
        """float32, uninitialised."""
        return torch.empty(*shape, dtype=torch.float32, pin_memory=self._stream is not None)
