"""The process that writes checkpoints' files, so that no thread of a rank ever waits for a disk:

    python -m descant.ckpt.writer_main SOCKET_FD ARENA_FD PARENT_PID BEAT_S SILENCE_S

A socket pair carries one JSON list a line, the arena the files' bytes. Requests are answered in order, by their id:

    [id, "probe", directory]                       a small file is written, fsynced and removed
    [id, "create", directory, name, num_bytes]     a new file, if there is room for so much
    [id, "write", offset, num_bytes]               of the arena, behind what the file has
    [id, "finish"]                                 fsynced and closed → [id, "ok", num_bytes, sha256]

    [id, "ok", …]  or  [id, "error", kind, errno | null, sentence]       kind: a class of ``descant.errors``
    [0, "beat"]                                    both ways, every BEAT_S

After an error the file is given up: what comes up to the next "create" fails too. The process ends with its parent,
with the socket, and when the parent is silent for SILENCE_S. Standard library only, so that it is there in a moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from descant.ckpt.disk import REAL, Disk, DiskFile
from descant.errors import DescantError, ServerError
from descant.storage import cannot_store, check_room

PROBE = "writer-probe"
NICE = 5
"""The rank's own threads come first."""
DESCRIPTORS = 16
"""What this process ever has open, and some."""

Answer = list[Any]


class OpenFile:
    """A new file, from its beginning to its end: hashed as it is written, fsynced as it is finished."""

    def __init__(self, disk: Disk, directory: str, name: str, num_bytes: int):
        """Raises ``CannotStore``, also where a file of ``num_bytes`` would leave less than the reserve free."""
        check_room(Path(directory), num_bytes)
        try:
            self._file: DiskFile = disk.create(Path(directory) / name)
        except OSError as error:
            raise cannot_store(error) from error
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: memoryview | bytes) -> None:
        """Raises ``CannotStore``."""
        try:
            self._file.write(data)
        except OSError as error:
            raise cannot_store(error) from error
        self._sha256.update(data)
        self._num_bytes += len(data)

    def finish(self) -> tuple[int, str]:
        """How many bytes it has, and their sha256: once the disk has them. Raises ``CannotStore``."""
        try:
            self._file.fsync()
            self._file.close()
        except OSError as error:
            raise cannot_store(error) from error
        return self._num_bytes, self._sha256.hexdigest()

    def close(self) -> None:
        """It is given up."""
        with contextlib.suppress(OSError):
            self._file.close()


class _Writer:
    def __init__(self, arena: memoryview, disk: Disk):
        self._arena, self._disk = arena, disk
        self._file: OpenFile | None = None

    def answer(self, kind: str, *args: Any) -> Answer:
        try:
            return ["ok", *self._do(kind, *args)]
        except Exception as error:
            self._give_up()
            number = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
            if isinstance(error, DescantError):
                return ["error", type(error).__name__, number, error.message]
            return [
                "error",
                ServerError.__name__,
                number,
                f"{type(error).__name__} as a checkpoint was written: {error}",
            ]

    def _do(self, kind: str, *args: Any) -> Answer:
        match kind:
            case "probe":
                _probe(self._disk, args[0])
                return []
            case "create":
                self._give_up()
                self._file = OpenFile(self._disk, *args)
                return []
            case "write" if self._file is not None:
                offset, num_bytes = args
                self._file.write(self._arena[offset : offset + num_bytes])
                return []
            case "finish" if self._file is not None:
                finished = self._file.finish()
                self._file = None
                return list(finished)
            case "write" | "finish":
                raise ServerError("the file was given up after the error before")
        raise ServerError(f"the process that writes checkpoints was asked for {kind!r}, which it does not know")

    def _give_up(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _probe(disk: Disk, directory: str) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < DESCRIPTORS:
        raise ServerError(
            f"the process that writes checkpoints may open {soft} files, expected {DESCRIPTORS}: raise `ulimit -n`"
        )
    path = Path(directory) / f"{PROBE}-{os.getpid()}"
    try:
        file = disk.create(path)
        try:
            file.write(b"probe")
            file.fsync()
        finally:
            file.close()
            disk.unlink(path)
        disk.fsync_directory(directory)
    except OSError as error:
        raise cannot_store(error) from error


def main(socket_fd: int, arena_fd: int, parent_pid: int, beat_s: float, silence_s: float, *, disk: Disk = REAL) -> int:
    """Until the parent has closed the socket, is gone or silent; the exit code. ``disk``: what files are written to."""
    _die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # of a whole group: the rank decides when we end
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    sock = socket.socket(fileno=socket_fd)
    sock.settimeout(silence_s)
    arena = mmap.mmap(arena_fd, 0, prot=mmap.PROT_READ)
    os.close(arena_fd)
    writer, sending = _Writer(memoryview(arena), disk), threading.Lock()

    def send(message: Answer) -> None:
        body = json.dumps(message).encode() + b"\n"
        with sending:
            sock.sendall(body)

    send([0, "beat"])  # it is there
    threading.Thread(target=_beat, args=(send, parent_pid, beat_s), name="descant-beat", daemon=True).start()
    try:
        for line in sock.makefile("rb"):
            id, kind, *args = json.loads(line)
            if kind != "beat":
                send([id, *writer.answer(kind, *args)])
    except TimeoutError:
        print(f"the rank was silent for {silence_s:g} s: the writer ends", file=sys.stderr, flush=True)
    except OSError:
        pass  # the rank is gone
    return 0


def _beat(send: Callable[[Answer], None], parent_pid: int, beat_s: float) -> None:
    pause = threading.Event()
    while not pause.wait(beat_s):
        try:
            send([0, "beat"])
        except OSError:
            os._exit(0)
        if os.getppid() != parent_pid:
            os._exit(0)


def _die_with_parent(parent_pid: int) -> None:
    """The kernel ends us with the thread that started us (Linux); elsewhere the closed socket does."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(0)


def arguments(argv: list[str]) -> tuple[int, int, int, float, float]:
    socket_fd, arena_fd, parent_pid, beat_s, silence_s = argv
    return int(socket_fd), int(arena_fd), int(parent_pid), float(beat_s), float(silence_s)


if __name__ == "__main__":
    code = main(*arguments(sys.argv[1:]))
    os._exit(code)  # a write may hang in a dead file system
