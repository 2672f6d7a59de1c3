"""A rank's status page: its position, in shared memory that outlives it.

A rank writes its position at every scope, sync point and collective (about 2 µs); the coordinator of the same machine
maps the same memory. So the position of a rank that was killed, is stopped or holds the interpreter is exact, without a
message. Ranks of other machines send the same text in their heartbeats.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from descant.distributed.frames import quote

SIZE = 8192
_HEADER = struct.Struct("<II")  # length, crc32: a reader sees a whole text or none

PositionKind = Literal["in", "at", "past", "call"]


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of one group. ``digest`` chains all identities up to this one, ``count`` numbers it from 1."""

    group: str
    count: int
    digest: str
    identity: str


@dataclass(slots=True)
class Position:
    """``kind``: in a scope, waiting at a sync point, past one, or waiting in a collective. ``since``: monotonic
    seconds.

    ``calls``: the last collectives, oldest first; for kind "call" the last one is the one it waits in.
    """

    kind: PositionKind
    where: str
    since: float
    calls: tuple[Call, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.where}"


class StatusPage:
    """The rank's end, written by the thread that joined."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("descant-status", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, SIZE)
        self._memory = mmap.mmap(self.descriptor, SIZE)
        self._calls: deque[str] = deque(maxlen=8)
        self._calls_text = ""
        self.text = ""

    def write(self, kind: PositionKind, where: str) -> None:
        self.text = f'["{kind}",{quote(where[:512])},{time.monotonic()},[{self._calls_text}]]'
        body = self.text.encode()
        if len(body) > SIZE - 8:  # many long names, all of them escapes
            body = f'["{kind}","",{time.monotonic()},[]]'.encode()
        self._memory[: 8 + len(body)] = _HEADER.pack(len(body), zlib.crc32(body)) + body

    def call(self, call: Call) -> None:
        """Enter a collective."""
        self._calls.append(json.dumps([call.group[:64], call.count, call.digest, call.identity[:256]]))
        self._calls_text = ",".join(self._calls)
        self.write("call", call.identity)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


class StatusPageReader:
    """The coordinator's end. Raises OSError if the rank's memory cannot be mapped (another user's, another
    machine's)."""

    def __init__(self, pid: int, descriptor: int):
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not os.readlink(f"/proc/self/fd/{opened}").startswith("/memfd:descant-status"):
                raise OSError(f"descriptor {descriptor} of process {pid} is no status page")
            self._memory = mmap.mmap(opened, SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(opened)

    def read(self) -> Position | None:
        for _ in range(3):  # a write may be under way; a rank that died in the middle of one leaves it so
            length, checksum = _HEADER.unpack_from(self._memory)
            body = self._memory[8 : 8 + min(length, SIZE - 8)]
            if length and zlib.crc32(body) == checksum:
                return parse_position(body.decode())
        return None

    def close(self) -> None:
        self._memory.close()


def parse_position(text: str, offset: float = 0.0) -> Position | None:
    """``offset`` is added to its time: the reader's clock minus the writer's. None where the text is no position."""
    with contextlib.suppress(ValueError, TypeError):
        value: list[Any] = json.loads(text)
        kind, where, since, calls = value
        return Position(kind, where, since + offset, tuple(Call(*call) for call in calls))
    return None
