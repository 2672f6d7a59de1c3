"""The process that writes checkpoints, which comes to harm at a named point, once:

    CheckpointWriter(device, program=faulty(flag, "kill", "before fsync"))

The harm is real: the process ends itself with SIGKILL, or stops itself with SIGSTOP, or the disk says ``EIO``. It comes
while the file ``flag`` is there, which goes first.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Literal, get_args

from descant.ckpt.disk import DiskFile, PathLike, RealDisk
from descant.ckpt.writer_main import arguments, main

Harm = Literal["kill", "stop", "EIO"]
Point = Literal["before create", "before write", "within write", "after write", "before fsync", "after fsync"]
POINTS: tuple[Point, ...] = get_args(Point)


def faulty(flag: Path, harm: Harm, point: Point) -> tuple[str, ...]:
    """What Python is started with."""
    flag.touch()
    return "-m", __name__, str(flag), harm, point


class FaultyDisk(RealDisk):
    def __init__(self, flag: Path, harm: str, point: str):
        self._flag, self._harm, self._point = flag, harm, point

    def at(self, point: Point) -> None:
        if point != self._point or not self._flag.exists():
            return
        self._flag.unlink()
        if self._harm == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self._harm])

    def create(self, path: PathLike) -> DiskFile:
        if "probe" in Path(path).name:
            return super().create(path)
        self.at("before create")
        return _FaultyFile(super().create(path), self)


class _FaultyFile:
    def __init__(self, file: DiskFile, disk: FaultyDisk):
        self._file, self._disk = file, disk

    def write(self, data: memoryview | bytes) -> None:
        self._disk.at("before write")
        self._file.write(data[: len(data) // 2])
        self._disk.at("within write")
        self._file.write(data[len(data) // 2 :])
        self._disk.at("after write")

    def fsync(self) -> None:
        self._disk.at("before fsync")
        self._file.fsync()
        self._disk.at("after fsync")

    def close(self) -> None:
        self._file.close()


if __name__ == "__main__":
    flag, harm, point, *rest = sys.argv[1:]
    code = main(*arguments(rest), disk=FaultyDisk(Path(flag), harm, point))
    os._exit(code)
