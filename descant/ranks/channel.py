"""The connection of server and rank: frames on a socket pair, and a turn status in shared memory that says what runs.

A frame is its length (8 bytes, little endian) and a pickle (protocol 5). Both ends are our own processes and the pair
has no name, so no other process can write into it.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import pickle
import socket
import struct
import tempfile
import threading
from collections.abc import Callable

from descant.ranks.ops import RankRequest, RankResponse
from descant.ranks.settings import RankAssignment

log = logging.getLogger(__name__)

LENGTH = struct.Struct("<Q")


def encode(message: object) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return LENGTH.pack(len(body)) + body


class RankChannel:
    """The rank's end, blocking. ``send`` may be called by any thread."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._reader = sock.makefile("rb", buffering=1 << 16)
        self._lock = threading.Lock()

    def send(self, message: RankResponse) -> None:
        frame = encode(message)
        with self._lock:
            self._sock.sendall(frame)

    def receive(self) -> RankRequest | RankAssignment | None:
        """The next message; None when the server is gone."""
        head = self._reader.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        body = self._reader.read(length)
        if len(body) < length:
            return None
        message: RankRequest | RankAssignment = pickle.loads(body)
        return message


class ServerChannel:
    """The server's end, on its event loop. ``closed`` is done when nothing more comes."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self.closed: asyncio.Task[None]

    @classmethod
    async def open(cls, sock: socket.socket, receive: Callable[[RankResponse], None]) -> ServerChannel:
        """Over a connected socket, which it owns from now on; of this machine or to another."""
        opens = asyncio.open_unix_connection if sock.family == socket.AF_UNIX else asyncio.open_connection
        return cls.over(*await opens(sock=sock), receive)

    @classmethod
    def over(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receive: Callable[[RankResponse], None]
    ) -> ServerChannel:
        """Over a connection that is known to be a rank's."""
        channel = cls(writer)
        channel.closed = asyncio.create_task(channel._read(reader, receive))
        return channel

    def send(self, message: RankRequest | RankAssignment) -> None:
        """Does nothing once the rank has closed its side: whoever waits is told of its end a moment later."""
        if not self._writer.transport.is_closing():
            self._writer.write(encode(message))

    def close(self) -> None:
        self.closed.cancel()
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader, receive: Callable[[RankResponse], None]) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                receive(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except Exception:
            log.exception("the rank's channel broke")


class TurnStatus:
    """What the rank runs now, readable by the server at any time and after the rank's death: no message, no wake-up.

    Layout: number of the turn (8 bytes), then a sentence. A torn read may mix two sentences; it is for people.
    """

    SIZE = 512

    def __init__(self, fd: int | None = None):
        """Without ``fd``: a new one, whose ``fd`` a child may inherit."""
        self._file = None
        if fd is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the turn status
            self._file.write(bytes(self.SIZE))  # on a full disk this raises; a page without a place would be a SIGBUS
            self._file.flush()
            fd = self._file.fileno()
        self.fd = fd
        self._map = mmap.mmap(fd, self.SIZE)

    def write(self, turn: int, text: str) -> None:
        body = text.encode()[: self.SIZE - LENGTH.size]
        self._map[:] = (LENGTH.pack(turn) + body).ljust(self.SIZE, b"\0")

    def read(self) -> tuple[int, str]:
        """(turn, text); the text is empty while nothing runs."""
        body = self._map[:]
        (turn,) = LENGTH.unpack_from(body)
        return turn, body[LENGTH.size :].rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        self._map.close()
        if self._file is not None:
            self._file.close()
