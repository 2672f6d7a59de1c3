"""Length-prefixed JSON over a stream: four bytes, big-endian, then that many of UTF-8."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

MAX_FRAME_BYTES = 4 << 20

_LENGTH = struct.Struct(">I")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().decode
quote = json.encoder.encode_basestring_ascii
"""A string as JSON, without the set-up of a whole encoder."""


class BadFrame(Exception):
    """The peer does not speak this protocol."""


def pack(message: Any) -> bytes:
    """Raises TypeError for what JSON cannot hold, ValueError for what is too large."""
    return pack_text(_encode(message))


def pack_text(text: str) -> bytes:
    """A message that is JSON already."""
    body = text.encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Collects bytes, gives whole messages."""

    __slots__ = ("_buffer", "limit")

    def __init__(self, limit: int = MAX_FRAME_BYTES):
        self._buffer = b""
        self.limit = limit

    def feed(self, data: bytes) -> Iterator[Any]:
        buffer = self._buffer + data if self._buffer else data
        start = 0
        try:
            while len(buffer) - start >= 4:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > self.limit:
                    raise BadFrame(f"a frame claims {length} bytes, the limit is {self.limit}")
                end = start + 4 + length
                if len(buffer) < end:
                    break
                try:
                    message = _decode(buffer[start + 4 : end].decode())
                except ValueError as error:
                    raise BadFrame(f"a frame is not JSON: {error}") from None
                start = end
                yield message
        finally:
            self._buffer = buffer[start:]


def tune(sock: socket.socket) -> None:
    """No Nagle; and the kernels, not the processes, find out within 5 s that a whole host is gone.

    A stopped or busy process's kernel still answers keepalives, so this never mistakes one for a lost host.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
