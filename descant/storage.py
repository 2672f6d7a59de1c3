"""The data directory: whether it takes more, and the last blocks that are kept for what was accepted.

A full disk must neither silence the server nor lose what it has promised, so room is given out by need:

* **spill files and checkpoints** are written only where as much as the reserve stays free (``check_room``);
* **new** sessions, models and saves are refused while less than the reserve is free (``DataDirectory.trouble``);
* **the database** has a reserve of its own, a file that is removed when a write finds no room: what was accepted ends,
  and training and sampling go on, for as long as that lasts. It is taken back when there is room for it twice.

Standard library only: server, ranks and the command line use it alike.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from descant.errors import CannotStore

log = logging.getLogger(__name__)

RESERVE_BYTES = 32 << 20
RESERVE_SHARE = 16
"""The reserve is this much, or on a small file system one part in so many of it."""

RESERVE = "reserve"

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

PRIVATE = 0o700
"""Of directories: what is in them is the clients' own."""


def free_bytes(directory: Path) -> int:
    """What its file system has for us. Raises ``OSError``."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def reserve_bytes(directory: Path) -> int:
    """What is kept of its file system. Raises ``OSError``."""
    stat = os.statvfs(directory)
    return min(RESERVE_BYTES, stat.f_blocks * stat.f_frsize // RESERVE_SHARE)


def private_directory(path: Path, own: Collection[str] | None = None) -> None:
    """Makes ``path``, for its owner alone, or closes one that is there to others: if it is ours and nothing but ``own``
    lies in it (None: whatever does is), for somebody may have chosen a directory that others use too. ``OSError``."""
    path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o7777
    if not mode & 0o077:
        return
    foreign = [entry.name for entry in path.iterdir() if own is not None and entry.name not in own]
    if foreign or path.stat().st_uid != os.geteuid():
        why = f"others' {foreign[0]} is in it" if foreign else "it is another user's"
        log.warning(
            "others may enter %s (mode %o), which stays so, since %s; what is ours in it is closed", path, mode, why
        )
        return
    path.chmod(PRIVATE)
    log.info("%s was open to others (mode %o) and is not any more", path, mode)


def cannot_store(error: OSError | int | None) -> CannotStore:
    """In a sentence without a path: clients read it. ``error``: its number is enough."""
    number = error.errno if isinstance(error, OSError) else error
    if number in FULL:
        return CannotStore("the data directory is full")
    why = {
        errno.EROFS: "it is read-only",
        errno.EACCES: "the server has no permission",
        errno.EPERM: "the server has no permission",
        errno.EIO: "its disk reports an error",
        None: "its disk reports an error",
    }.get(number)
    return CannotStore(f"the data directory cannot be written: {why or os.strerror(number or 0)}")


def check_room(directory: Path, num_bytes: int, *, free: Callable[[Path], int] = free_bytes) -> None:
    """Raises ``CannotStore`` where a file of this size would leave less than the reserve. Any thread; another process
    may still be faster. ``free``: what is free, in bytes."""
    try:
        left = free(directory) - num_bytes
        wanted = reserve_bytes(directory)
    except OSError as error:
        raise cannot_store(error) from None
    if left < wanted:
        raise cannot_store(errno.ENOSPC)


class DataDirectory:
    """Of one server. ``look`` and ``release_reserve`` touch the disk, the rest is memory. Any thread."""

    def __init__(self, path: Path, *, free: Callable[[Path], int] = free_bytes, reserve: int | None = None):
        """``free`` and ``reserve``: what is free, and what is kept of it, in bytes."""
        self.path = path
        self._file = path / RESERVE
        self._free = free
        self._reserve = reserve
        self._lock = threading.Lock()
        self._kept = False
        self._failed: CannotStore | None = None
        self._low: str | None = None

    @property
    def trouble(self) -> str | None:
        """Why nothing new is taken, in a sentence; None: all is well."""
        if self._failed is not None:
            return f"{self._failed}; what was accepted ends, nothing else is taken until it can be written again"
        return self._low

    @property
    def unwritten(self) -> bool:
        """Whether the last write of the database failed."""
        return self._failed is not None

    def look(self) -> None:
        """Takes the reserve (back), if there is room for it, and sees how much is free."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        before = self._low
        try:
            wanted = reserve_bytes(self.path) if self._reserve is None else self._reserve
            self._kept = self._kept and self._file.exists()
            if not self._kept and self._free(self.path) >= 2 * wanted:
                self._take_reserve(wanted)
            free = self._free(self.path)
        except OSError as error:
            self._low = str(cannot_store(error))
        else:
            self._low = None
            if free < wanted or not self._kept:
                self._low = (
                    f"the data directory is full ({free >> 20} MiB are free): nothing new is made or saved; "
                    "training and sampling go on as long as there is room for their results"
                )
        if (before is None) != (self._low is None):
            log.warning("%s", self._low or "the data directory has room again")

    def release_reserve(self) -> bool:
        """A write found no room: whether there is some now."""
        with self._lock:
            if not self._kept:
                return False
            self._kept = False
            try:
                self._file.unlink()
            except OSError:
                return False
        log.warning("the data directory is full: what was kept for results is being used")
        self._low = "the data directory is full: nothing new is made or saved; training and sampling go on for a while"
        return True

    def failed(self, error: CannotStore) -> None:
        """The database could not be written."""
        if self._failed is None:
            log.error("%s; it is tried again all the time", error)
        self._failed = error

    def written(self) -> None:
        """The database was written."""
        if self._failed is not None:
            log.warning("the data directory is written again")
        self._failed = None

    def _take_reserve(self, num_bytes: int) -> None:
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            while num_bytes > 0:  # written, and not only promised: not every file system keeps such a promise
                num_bytes -= os.write(file, bytes(min(num_bytes, 1 << 20)))
            self._kept = True
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.unlink()
            if error.errno not in FULL:
                raise
        finally:
            os.close(file)
