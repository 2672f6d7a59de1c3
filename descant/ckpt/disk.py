"""What checkpoints need of a disk, and no more: so that a test can be the disk, and be cut off after any operation.

A POSIX disk promises little. What was written to a file is on it after ``DiskFile.fsync``; that a name is in a
directory, or is not any more, after ``fsync_directory`` of that directory. Before that a power cut may leave any of it.
Everything raises ``OSError``. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat as modes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

PathLike = str | Path


class DiskFile(Protocol):
    """A new file that one writer writes from its beginning to its end."""

    def write(self, data: memoryview | bytes) -> None:
        """All of ``data``, behind what is there."""
        ...

    def fsync(self) -> None:
        """On return the disk has what was written. After an error it is unknown what it has: give the file up."""
        ...

    def close(self) -> None:
        """Idempotent. Without ``fsync`` before it nothing is promised."""
        ...


@dataclass(frozen=True, slots=True)
class Stat:
    size_bytes: int
    modified_ns: int
    """When its content last changed, by the disk's clock."""
    is_directory: bool


class Disk(Protocol):
    """Files and directories of one file system. Any thread."""

    def create(self, path: PathLike) -> DiskFile:
        """A new empty file. Raises ``FileExistsError``."""
        ...

    def open(self, path: PathLike) -> BinaryIO:
        """To be read; it stays readable when it is unlinked or replaced meanwhile."""
        ...

    def read(self, path: PathLike) -> bytes: ...

    def stat(self, path: PathLike) -> Stat: ...

    def listdir(self, path: PathLike) -> list[str]:
        """Names, in no order."""
        ...

    def mkdir(self, path: PathLike) -> None:
        """For its owner alone. Raises ``FileExistsError``."""
        ...

    def rename(self, source: PathLike, target: PathLike) -> None:
        """In one step. A file at ``target`` is replaced; a directory only if it is empty."""
        ...

    def exchange(self, one: PathLike, other: PathLike) -> bool:
        """Both names change places in one step. False where the file system cannot; nothing has changed then."""
        ...

    def unlink(self, path: PathLike) -> None: ...

    def rmdir(self, path: PathLike) -> None: ...

    def fsync_directory(self, path: PathLike) -> None:
        """On return the disk has the directory's names as they are. Not what is in the files: see ``DiskFile``."""
        ...


class RealDiskFile:
    def __init__(self, path: PathLike):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, data: memoryview | bytes) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(self._fd, left) :]

    def fsync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class RealDisk:
    """The operating system's."""

    def create(self, path: PathLike) -> DiskFile:
        return RealDiskFile(path)

    def open(self, path: PathLike) -> BinaryIO:
        return open(path, "rb")

    def read(self, path: PathLike) -> bytes:
        return Path(path).read_bytes()

    def stat(self, path: PathLike) -> Stat:
        found = os.stat(path, follow_symlinks=False)
        return Stat(found.st_size, found.st_mtime_ns, modes.S_ISDIR(found.st_mode))

    def listdir(self, path: PathLike) -> list[str]:
        return os.listdir(path)

    def mkdir(self, path: PathLike) -> None:
        os.mkdir(path, 0o700)

    def rename(self, source: PathLike, target: PathLike) -> None:
        os.rename(source, target)

    def exchange(self, one: PathLike, other: PathLike) -> bool:
        if sys.platform != "linux" or not hasattr(_libc, "renameat2"):
            return False
        at_fdcwd, rename_exchange = -100, 2
        if _libc.renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS):
            return False
        raise OSError(code, os.strerror(code))

    def unlink(self, path: PathLike) -> None:
        os.unlink(path)

    def rmdir(self, path: PathLike) -> None:
        os.rmdir(path)

    def fsync_directory(self, path: PathLike) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


_libc = ctypes.CDLL(None, use_errno=True)

REAL: Disk = RealDisk()


def exists(disk: Disk, path: PathLike) -> bool:
    try:
        disk.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_directory(disk: Disk, path: Path) -> None:
    """Where none is yet; with its parent fsynced in either case, for who made it may have died before that."""
    try:
        disk.mkdir(path)
    except FileExistsError:
        if not disk.stat(path).is_directory:
            raise
    disk.fsync_directory(path.parent)


def remove_tree(disk: Disk, path: PathLike) -> None:
    """A directory with all that is in it, or a file. What is not there is removed already; what else goes wrong is
    left: whoever removes it owes nobody that it is gone, and the next start tries again."""
    try:
        is_directory = disk.stat(path).is_directory
        for name in disk.listdir(path) if is_directory else ():
            remove_tree(disk, os.path.join(path, name))
        (disk.rmdir if is_directory else disk.unlink)(path)
    except OSError:
        pass
