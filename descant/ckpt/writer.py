"""A rank's end of the process that writes checkpoints' files: started, watched, given up, replaced.

    writer = CheckpointWriter(device)
    writer.start(data_dir)                           # its faults are found now
    entries = writer.write(directory, {"adapter_model.safetensors": [header, *tensors]})

``write`` is for a thread that may wait. It waits for nothing without a deadline, which follows from the bytes. A
process that has died, or that does not answer, fails what was being written, and the next ``write`` begins with a new
one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from descant.adapters.offload import CopyEvent
from descant.ckpt.staging import SLOT_BYTES, Arena, Content, Staging, num_bytes_of
from descant.errors import CannotStore, DescantError, ServerError
from descant.storage import FULL, PRIVATE, cannot_store
from descant.types import FileEntry

log = logging.getLogger(__name__)

PROGRAM = ("-m", "descant.ckpt.writer_main")
EXIT_S = 2.0
"""How long a process that was killed, or asked to end, is waited for. One that hangs in a disk is left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    """When a process counts as one that does not answer."""

    start_s: float = 30.0
    answer_s: float = 30.0
    """For any request, and beyond it what the bytes take …"""
    bytes_per_s: float = float(1 << 20)
    """… on the slowest disk that counts as one."""
    beat_s: float = 1.0
    silence_s: float = 30.0
    """Without a sign of life, at either end."""

    def of(self, num_bytes: int) -> float:
        return self.answer_s + num_bytes / self.bytes_per_s

    def of_all(self, sizes: Sequence[int]) -> float:
        """For all requests about files of so many bytes."""
        return sum((4 + size // SLOT_BYTES) * self.answer_s + 2 * size / self.bytes_per_s for size in sizes)


@dataclass(slots=True, eq=False)
class _Asked:
    id: int
    what: str
    limit_s: float
    answer: Future[list[Any]] = field(default_factory=Future)


class WriterProcess:
    """One process and the thread that started it, hears it, and ends it. Used by any thread."""

    def __init__(self, arena: Arena, limits: WriterLimits, program: Sequence[str]):
        """Raises ``ServerError`` if it cannot be started."""
        self._limits = limits
        self._lock = threading.Lock()
        """Over what follows, and the sending end of the socket."""
        self._pending: deque[_Asked] = deque()
        self._since = 0.0
        """When the first of them became the first."""
        self._num_requests = 0
        self._error: ServerError | None = None
        self._closing = False
        try:
            self._sock, theirs = socket.socketpair()
        except OSError as error:
            raise _not_started(error) from error
        self._sock.settimeout(limits.answer_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._started: Future[None] = Future()
        """With the first that is heard of it."""
        self._thread = threading.Thread(
            target=self._run, args=(theirs, arena.fd, program), name="descant-writer", daemon=True
        )
        self._thread.start()
        try:
            self._started.result(limits.start_s)
        except TimeoutError:
            self.close()
            raise ServerError(f"the process that writes checkpoints was not there in {limits.start_s:g} s") from None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_there(self) -> bool:
        """Whether it is of use. One that has ended is not, also where its thread has not heard of it yet."""
        if self._error is not None:
            return False
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # its thread is about to say so
            return False
        return ended is None

    def ask(self, what: str, num_bytes: int, kind: str, *args: Any) -> Future[list[Any]]:
        """What it answers, or the ``DescantError`` it answers with, or how it came to its end. ``what``: in words;
        ``num_bytes``: that the disk has to take before the answer."""
        with self._lock:
            self._num_requests += 1
            request = _Asked(self._num_requests, what, self._limits.of(num_bytes))
            if self._error is not None:
                request.answer.set_exception(self._error)
                return request.answer
            if not self._pending:
                self._since = time.monotonic()
            self._pending.append(request)
            with contextlib.suppress(OSError):  # it is gone, as the thread finds out
                self._send([request.id, kind, *args])
        return request.answer

    def close(self) -> None:
        """It ends now, whatever it does. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * EXIT_S)

    # ------------------------------------------------------------------------------------------------ its thread
    def _run(self, theirs: socket.socket, arena_fd: int, program: Sequence[str]) -> None:
        numbers = (theirs.fileno(), arena_fd, os.getpid(), self._limits.beat_s, self._limits.silence_s)
        paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
        try:
            # From this thread: the kernel ends the process with the thread that started it.
            self._process = subprocess.Popen(
                [sys.executable, *program, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), arena_fd),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        except OSError as error:
            self._sock.close()
            self._started.set_exception(_not_started(error))
            return
        finally:
            theirs.close()
        why = "came to its end"
        try:
            why = self._listen()
        except Exception as error:
            log.exception("the thread that watches the process that writes checkpoints")
            why = f"could not be watched any more ({type(error).__name__})"
        finally:
            self._end(why)

    def _listen(self) -> str:
        """Until it is gone or of no use: what it did."""
        poll, rest, heard, beaten = select.poll(), b"", time.monotonic(), time.monotonic()
        poll.register(self._sock, select.POLLIN)
        while True:
            poll.poll(1000 * self._wait_s())
            while poll.poll(0):  # all of it, before the clock counts: this process itself may have stood still
                try:
                    data = self._sock.recv(1 << 16)
                except OSError:
                    data = b""
                if not data:
                    return "ended"
                heard = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
            now = time.monotonic()
            if now - heard > self._limits.silence_s:
                return f"gave no sign of life for {now - heard:.0f} s and was ended"
            with self._lock:
                if self._pending and now - self._since > self._pending[0].limit_s:
                    return f"did not answer for {now - self._since:.0f} s and was ended"
                if now - beaten > self._limits.beat_s:
                    beaten = now
                    with contextlib.suppress(OSError):
                        self._send([0, "beat"])

    def _wait_s(self) -> float:
        with self._lock:
            if not self._pending:
                return self._limits.beat_s
            left = self._pending[0].limit_s - (time.monotonic() - self._since)
        return max(0.001, min(self._limits.beat_s, left))

    def _take(self, message: list[Any]) -> None:
        id, kind, *args = message
        if not self._started.done():
            self._started.set_result(None)
        if kind == "beat":
            return
        with self._lock:
            request = self._pending.popleft() if self._pending and self._pending[0].id == id else None
            self._since = time.monotonic()
        if request is None:
            raise ServerError(f"the answer has the id {id}, which no request waits for")
        if kind == "ok":
            request.answer.set_result(args)
        else:
            request.answer.set_exception(_error(*args))

    def _send(self, message: list[Any]) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def _end(self, why: str) -> None:
        process = self._process
        assert process is not None
        code = None
        if why == "ended":  # by itself or by a signal: which?
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(EXIT_S)
        if code is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_S)
        if process.returncode is None:
            log.error("process %d, which wrote checkpoints, cannot be ended: it hangs in the disk", process.pid)
        if code is not None and code < 0:
            why = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        elif code:
            why = f"ended with exit code {code}"
        with self._lock:
            doing = f" while it was to {self._pending[0].what}" if self._pending else ""
            if not self._started.done():
                doing = " as it was started"
            self._error = ServerError(
                f"the process that writes checkpoints {why}{doing}: this save does not count, save again"
            )
            pending, self._pending = list(self._pending), deque()
            self._sock.close()
        if not self._closing:
            log.error("the process that writes checkpoints (%d) %s%s", process.pid, why, doing)
        for request in pending:
            request.answer.set_exception(self._error)
        if not self._started.done():
            self._started.set_exception(self._error)


def _not_started(error: OSError) -> ServerError:
    return ServerError(f"the process that writes checkpoints could not be started: {error.strerror}")


def _error(kind: str, number: int | None, sentence: str) -> DescantError:
    error = CannotStore(sentence) if kind == CannotStore.__name__ else ServerError(sentence)
    if number is not None:
        error.__cause__ = OSError(number, os.strerror(number))
    return error


class CheckpointWriter:
    """Files, written and fsynced by a process of their own. One thread at a time, but for ``stats`` and ``close``."""

    def __init__(
        self, device: torch.device, *, limits: WriterLimits = WriterLimits(), program: Sequence[str] = PROGRAM
    ):
        """``device``: where the tensors lie. ``program``: what Python is started with (for tests)."""
        self._device, self._limits, self._program = device, limits, program
        self._staging: Staging | None = None
        self._process: WriterProcess | None = None
        self._num_started = 0
        self._writing = threading.Lock()
        self._num_bytes = 0
        self._staged_seconds = self._written_seconds = 0.0

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        process = self._process
        return process.pid if process is not None and process.is_there() else None

    def start(self, probe: Path | None = None) -> None:
        """Starts the process, and has it write, fsync and remove a small file in ``probe``, a directory on the disk
        that checkpoints are written to. A full disk is no fault of it. Raises ``CannotStore``, ``ServerError``."""
        process, _ = self._started()
        if probe is None:
            return
        try:
            probe.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            asked = [process.ask("write a small file", 0, "probe", str(probe))]
            _settle(process, asked, self._limits.of_all([0]))
        except (OSError, CannotStore) as error:
            number = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
            if number not in FULL:
                raise error if isinstance(error, CannotStore) else cannot_store(error) from error
            log.warning("the data directory is full: nothing can be saved for now")

    def write(
        self,
        directory: str,
        files: Mapping[str, Sequence[Content]],
        *,
        ready: CopyEvent | None = None,
        staged: Callable[[], None] = lambda: None,
    ) -> dict[str, FileEntry]:
        """New files, each the bytes and tensors of its name, one behind the other. Fsynced; the directory is not.

        Tensors may be anywhere and of any strides, and must not change until ``staged`` is called. ``ready``: when they
        are there (None: they are). Raises ``CannotStore`` for what the disk says, ``ServerError`` where the process
        came to its end; what is in the directory then is nobody's."""
        if not self._writing.acquire(blocking=False):
            raise ServerError("files of a checkpoint are to be written while others are")
        began, staged_at = time.monotonic(), None
        asked: list[Future[list[Any]]] = []
        try:
            process, staging = self._started()

            def ask(what: str, num_bytes: int, kind: str, *args: Any) -> Future[list[Any]]:
                asked.append(process.ask(what, num_bytes, kind, *args))
                return asked[-1]

            patience_s = self._limits.of_all([num_bytes_of(contents) for contents in files.values()])
            finishing: dict[str, Future[list[Any]]] = {}
            try:
                with staging.use(ready, patience_s=patience_s):
                    for name, contents in files.items():
                        num_bytes = num_bytes_of(contents)
                        ask(f"create {name}", 0, "create", directory, name, num_bytes)
                        staging.stage(contents, partial(_write, ask, name))
                        finishing[name] = ask(f"have the disk take {name}", num_bytes, "finish")
                staged_at = time.monotonic()
                staged()
            except ServerError:
                _settle(process, asked, patience_s)  # the first that failed says why
                raise
            _settle(process, asked, patience_s)
            entries = {}
            for name, future in finishing.items():
                size_bytes, sha256 = future.result()
                entries[name] = FileEntry(size_bytes=size_bytes, sha256=sha256)
            self._num_bytes += sum(entry.size_bytes for entry in entries.values())
            return entries
        finally:
            now = time.monotonic()
            self._staged_seconds += (staged_at or now) - began
            self._written_seconds += now - began
            self._writing.release()

    def stats(self) -> dict[str, float]:
        """Bytes and seconds of ever: until all was staged, until the disk had it. ``writer_alive``: of now."""
        return {
            "save_bytes": self._num_bytes,
            "save_staged_seconds": self._staged_seconds,
            "save_written_seconds": self._written_seconds,
            "writer_alive": self.pid is not None,
            "writer_restarts": max(0, self._num_started - 1),
        }

    def close(self) -> None:
        """Ends the process; what it writes fails. Idempotent."""
        if self._process is not None:
            self._process.close()

    # ------------------------------------------------------------------------------------------------ inside
    def _started(self) -> tuple[WriterProcess, Staging]:
        if self._staging is None:
            self._staging = Staging(Arena(self._device), self._device)
        if self._process is None or not self._process.is_there():
            self._num_started += 1
            self._process = WriterProcess(self._staging.arena, self._limits, self._program)
        return self._process, self._staging


def _settle(process: WriterProcess, asked: Sequence[Future[list[Any]]], patience_s: float) -> None:
    """Waits for all answers, and raises the first error among them. The process's own thread keeps each one's deadline;
    ``patience_s``, more than all of these together, is for the case that it does not."""
    _, late = wait(asked, patience_s)
    if late:
        process.close()
        raise ServerError("the process that writes checkpoints was not watched any more: save again")
    for future in asked:
        future.result()


def _write(ask: Callable[..., Future[list[Any]]], name: str, offset: int, num_bytes: int) -> Future[list[Any]]:
    return ask(f"write {num_bytes} bytes of {name}", num_bytes, "write", offset, num_bytes)
