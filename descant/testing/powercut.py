"""Real power cuts: a file system that forgets what it was not made to keep, while a process writes to it.

    python -m descant.testing.powercut --cuts 1000 [--protocol full|no-directory-fsync]

An ext4 file system in a file is mounted. A process saves, replaces and deletes checkpoints through the real store, or
(every other cut) writes rows through the service's database, and acknowledges each over a pipe once that has returned.
Milliseconds later ext4 is shut down with all that it has not written, journal included, as a power cut would. It is
mounted anew, and what was acknowledged must be there, and what is there must be whole. The last line says
``cuts=… acknowledged=… lost=… invalid=…``; the exit code is 1 if something was lost or invalid.

It mounts, so it needs root on Linux; where that is not permitted it says so and exits with 77.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import errno
import fcntl
import os
import random
import select
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import safetensors.numpy
from sqlalchemy import Connection, text

from descant.ckpt.disk import Disk, PathLike, RealDisk
from descant.ckpt.manifest import verify, write_durable
from descant.ckpt.store import CheckpointDirectory
from descant.errors import Damaged, NotFound
from descant.service.database import Database
from descant.types import CheckpointName, Lora, Manifest

NOT_PERMITTED = 77
IMAGE_BYTES = 64 << 20
EXT4_IOC_SHUTDOWN, NOLOGFLUSH = 0x8004587D, 2
CUT_AFTER_S = (0.002, 0.030)
READY_TIMEOUT_S = 30.0
NAMES = [CheckpointName(model_id=f"s:train:{n % 2}", type="weights", name=f"n{n}") for n in range(4)]
FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors")
FILE_FLOATS = 4096
ROWS_AT_ONCE = 3
KEPT_ROWS = 1000


class WithoutDirectoryFsync(RealDisk):
    """For the test of the test."""

    def fsync_directory(self, path: PathLike) -> None:
        pass


PROTOCOLS: dict[str, type[RealDisk]] = {"full": RealDisk, "no-directory-fsync": WithoutDirectoryFsync}


class NotPermitted(Exception):
    """This machine does not let us mount, in a sentence."""


# --------------------------------------------------------------------------------------------------------------------
# A file system


class Volume:
    """An ext4 file system in a file, mounted at ``path``."""

    def __init__(self, path: Path, device: str):
        self.path = path
        self._device = device
        self.mount()

    def mount(self) -> None:
        """Its journal is replayed. Raises ``OSError``."""
        if _libc.mount(self._device.encode(), os.fsencode(self.path), b"ext4", 0, b"") != 0:
            raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")

    def unmount(self) -> None:
        """Waits a little for those that were killed in it. Raises ``OSError``."""
        deadline = time.monotonic() + 10.0
        while _libc.umount2(os.fsencode(self.path), 0) != 0:
            if ctypes.get_errno() != errno.EBUSY or time.monotonic() > deadline:
                raise OSError(ctypes.get_errno(), f"umount: {os.strerror(ctypes.get_errno())}")
            time.sleep(0.001)

    def cut(self) -> None:
        """From now on nothing is written any more, and what was not, never."""
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(directory, EXT4_IOC_SHUTDOWN, struct.pack("I", NOLOGFLUSH))
        finally:
            os.close(directory)


@contextmanager
def volume() -> Iterator[Volume]:
    """Raises ``NotPermitted``."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NotPermitted("power cuts need root on Linux: an ext4 file system is mounted from a file")
    memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="descant-powercut-", dir=memory if memory.is_dir() else None))
    device = ""
    try:
        image, path = directory / "image", directory / "mounted"
        path.mkdir()
        with open(image, "wb") as file:
            file.truncate(IMAGE_BYTES)
        try:
            _run("mkfs.ext4", "-q", "-F", str(image))
            device = _run("losetup", "--find", "--show", str(image)).strip()
            mounted = Volume(path, device)
        except (OSError, subprocess.CalledProcessError) as error:
            why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            raise NotPermitted(f"power cuts need ext4 mounted from a file, which this machine refuses: {why}") from None
        try:
            yield mounted
        finally:
            mounted.unmount()
    finally:
        if device:
            _run("losetup", "--detach", device)
        shutil.rmtree(directory)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


_libc = ctypes.CDLL(None, use_errno=True)


# --------------------------------------------------------------------------------------------------------------------
# Those that write


@dataclass
class Findings:
    cuts: int = 0
    acknowledged: int = 0
    lost: int = 0
    invalid: int = 0

    def __str__(self) -> str:
        return f"cuts={self.cuts} acknowledged={self.acknowledged} lost={self.lost} invalid={self.invalid}"


READY = "ready\n"
Say = Callable[[str], None]
"""Tells the parent a line: ``ready``, what begins (``begin …``), what is done (``done …``)."""


class Writer(Protocol):
    def write(self, say: Say) -> None:
        """In a process of its own, until it is killed."""
        ...

    def verify(self, lines: list[str], findings: Findings) -> None:
        """After a cut: ``lines`` is what the process said."""
        ...


@dataclass
class SavingWriter:
    """Saves, replaces and deletes. ``there``: the step of each checkpoint, None where there is none."""

    root: Path
    disk: Disk
    there: dict[CheckpointName, int | None] = field(default_factory=lambda: dict.fromkeys(NAMES))
    last_step: int = 0

    def write(self, say: Say) -> None:
        store = CheckpointDirectory(self.root, disk=self.disk)
        there = dict(self.there)
        say(READY.strip())
        for step in range(self.last_step + 1, sys.maxsize):
            index = step % len(NAMES)
            name = NAMES[index]
            if step % 7 == 0 and there[name] is not None:
                say(f"begin {index} delete")
                store.delete(name)
                there[name] = None
                say(f"done {index} delete")
                continue
            say(f"begin {index} {step}")
            attempt = store.attempt(name)
            store.commit(name, attempt, self._files(Path(attempt), step))
            there[name] = step
            say(f"done {index} {step}")

    def _files(self, attempt: Path, step: int) -> Manifest:
        body = safetensors.numpy.save({"w": np.full(FILE_FLOATS, step, dtype=np.float32)})
        files = {file: write_durable(attempt / file, body, disk=self.disk) for file in FILES}
        lora = Lora(rank=4, seed=0)
        return Manifest(
            base="b", owner="o", trainable=lora, step=step, applied_seq_id=1, has_optimizer=True, files=files
        )

    def verify(self, lines: list[str], findings: Findings) -> None:
        allowed: dict[CheckpointName, set[int | None]] = {name: {step} for name, step in self.there.items()}
        for line in lines:
            word, index, what = line.split()
            step = None if what == "delete" else int(what)
            self.last_step = max(self.last_step, step or 0)
            if word == "done":
                allowed[NAMES[int(index)]] = {step}
                findings.acknowledged += 1
            else:
                allowed[NAMES[int(index)]].add(step)
        store = CheckpointDirectory(self.root, disk=self.disk)
        for name, steps in allowed.items():
            self.there[name] = found = self._read(store, name, findings)
            if found not in steps:
                findings.lost += 1
                print(f"{name.uri} has step {found}, expected one of {steps}", flush=True)

    def _read(self, store: CheckpointDirectory, name: CheckpointName, findings: Findings) -> int | None:
        try:
            return verify(store.open(name).directory).step
        except NotFound:
            return None
        except Damaged as error:
            findings.invalid += 1
            print(error, flush=True)
            store.delete(name)
            return None


@dataclass
class RowWriter:
    """Writes numbered rows through the service's database, a few at a time."""

    path: Path
    acknowledged: set[int] = field(default_factory=set)
    last: int = 0

    def write(self, say: Say) -> None:
        asyncio.run(self._write(say))

    async def _write(self, say: Say) -> None:
        database = await Database.open(self.path)
        await database.write(lambda connection: connection.execute(text(CREATE)))
        say(READY.strip())

        async def insert(number: int) -> None:
            def work(connection: Connection) -> None:
                connection.execute(text("INSERT INTO rows_written VALUES (:number)"), {"number": number})

            await database.write(work)
            say(f"done {number}")

        for first in range(self.last + 1, sys.maxsize, ROWS_AT_ONCE):
            say(f"begin {first}")
            await asyncio.gather(*(insert(first + n) for n in range(ROWS_AT_ONCE)))

    def verify(self, lines: list[str], findings: Findings) -> None:
        for line in lines:
            word, number = line.split()
            self.last = max(self.last, int(number) + ROWS_AT_ONCE)
            if word == "done":
                self.acknowledged.add(int(number))
                findings.acknowledged += 1
        connection = sqlite3.connect(self.path)
        try:
            [state] = connection.execute("PRAGMA quick_check(1)").fetchone()
            connection.execute(CREATE)
            there = {number for (number,) in connection.execute("SELECT number FROM rows_written")}
            connection.execute("DELETE FROM rows_written WHERE number < ?", (self.last - KEPT_ROWS,))
            connection.commit()
        except sqlite3.DatabaseError as error:
            state, there = str(error), set()
        finally:
            connection.close()
        if state != "ok":
            findings.invalid += 1
            print(f"the database is damaged: {state}", flush=True)
        if missing := self.acknowledged - there:
            findings.lost += len(missing)
            print(f"{len(missing)} rows are lost, one of them {min(missing)}", flush=True)
            self.acknowledged -= missing
        self.acknowledged = {number for number in self.acknowledged if number >= self.last - KEPT_ROWS}


CREATE = "CREATE TABLE IF NOT EXISTS rows_written (number INTEGER PRIMARY KEY)"


# --------------------------------------------------------------------------------------------------------------------
# Cuts


def cut(mounted: Volume, writer: Writer, after_s: float, findings: Findings) -> None:
    """Lets ``writer`` write for so long, cuts its disk off, and looks. Raises ``RuntimeError`` for one that ends by
    itself, or does not begin."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        _write(writer, reading, writing)
    os.close(writing)
    try:
        try:
            _await_ready(reading)
            time.sleep(after_s)
            before = _read_all(reading)
            mounted.cut()
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        after = _read_all(reading)
    finally:
        os.close(reading)
    if error := next((line for line in before.splitlines() if line.startswith("error ")), None):
        raise RuntimeError(f"the writer ended before its disk was cut off: {error}")
    mounted.unmount()
    mounted.mount()
    # A sync that runs while ext4 is being shut down may return though nothing was written, as none does at a power
    # cut: what was not acknowledged by then may be there or not.
    said = before + after
    acknowledged = before.count("\n")
    lines = [line for line in said.splitlines() if not line.startswith("error ")]
    lines = [line if n < acknowledged else line.replace("done ", "begin ") for n, line in enumerate(lines)]
    writer.verify(lines, findings)
    findings.cuts += 1


def _await_ready(reading: int) -> None:
    readable, _, _ = select.select([reading], [], [], READY_TIMEOUT_S)
    said = os.read(reading, len(READY)).decode() if readable else "nothing"
    if said != READY:
        raise RuntimeError(f"the writer said {said!r}, expected {READY!r} within {READY_TIMEOUT_S:.0f} s")


def _read_all(reading: int) -> str:
    """What has been said up to now."""
    os.set_blocking(reading, False)
    said = b""
    with suppress(BlockingIOError):
        while part := os.read(reading, 1 << 16):
            said += part
    return said.decode()


def _write(writer: Writer, reading: int, writing: int) -> None:
    """The process that is killed."""
    try:
        os.close(reading)
        with suppress(BaseException):

            def say(line: str) -> None:
                os.write(writing, f"{line}\n".encode())

            try:
                writer.write(say)
            except BaseException as error:
                say(f"error {type(error).__name__}: {error}".replace("\n", " "))
    finally:
        os._exit(1)


def run(cuts: int, *, protocol: str = "full", seed: int = 0) -> Findings:
    """Raises ``NotPermitted``."""
    rng, findings = random.Random(seed), Findings()
    with volume() as mounted:
        writers: list[Writer] = [
            SavingWriter(mounted.path / "data" / "checkpoints", PROTOCOLS[protocol]()),
            RowWriter(mounted.path / "descant.db"),
        ]
        for number in range(cuts):
            cut(mounted, writers[number % len(writers)], rng.uniform(*CUT_AFTER_S), findings)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=1000, help="how many")
    parser.add_argument("--protocol", choices=sorted(PROTOCOLS), default="full", help="what the store does")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        findings = run(arguments.cuts, protocol=arguments.protocol, seed=arguments.seed)
    except NotPermitted as error:
        print(error, file=sys.stderr)
        return NOT_PERMITTED
    print(f"{time.monotonic() - started:.1f} s")
    print(findings)
    return 1 if findings.lost or findings.invalid else 0


if __name__ == "__main__":
    sys.exit(main())
