"""Connections: what a client may do to one before a key has come on it, and how many there may be.

An unauthenticated connection is one on which no request with a key has come yet, or never will. It costs a file and
some memory, so there is an end to it: in time (``header_timeout_s``), in bytes (the headers' size), and in number:
where there are too many, the one that was opened first is closed for the newest, which may have a key.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from descant.errors import Overloaded, UserError

CONNECTION = "descant.connection"
"""Under which a request's ``scope`` holds its ``Connection``."""

LOOPBACK = ("127.0.0.0/8", "::1/128")

MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 * 1024
"""Of the request line and all headers of a request. The SDK sends some twenty, of a kilobyte together."""
MAX_WAITING_REQUESTS = 8
"""Sent on one connection before the one that is being answered has its answer. No client in use does so at all."""
WRITE_TIMEOUT_S = 60.0
"""How long a client may take no byte of an answer."""
LINGER_S = 2.0
"""How long what a refused client still sends is read, so that it reads why: a reset would take it the answer."""
RESERVED_FILES = 256
"""For everything that is no connection: the database, checkpoints, ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """As ``http.*`` says, and as the process may."""

    header_timeout_s: float
    idle_timeout_s: float
    max_connections: int
    max_unauthenticated_per_address: int
    uncounted: tuple[str, ...] = LOOPBACK
    """Addresses and networks of which ``max_unauthenticated_per_address`` does not hold."""


def raise_open_files() -> int:
    """As many open files as this process may have, from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # a system that says more than it lets
            pass
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def networks(addresses: Sequence[str]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Raises ``UserError`` naming the one that is none."""
    found = []
    for address in addresses:
        try:
            found.append(ipaddress.ip_network(address, strict=False))
        except ValueError:
            raise UserError(
                f"{address!r} is no address and no network, expected one like 10.0.0.7 or 10.0.0.0/8"
            ) from None
    return found


class Connections:
    """All that are open. Not thread-safe: of one event loop."""

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self._uncounted = networks(limits.uncounted)
        self._open: set[Connection] = set()
        self._unauthenticated: dict[Connection, None] = {}  # in the order in which they were opened
        self._by_address: dict[str, dict[Connection, None]] = {}  # unauthenticated ones that are counted, so too
        self._by_owner: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """It may be closed by this, if all others have a key."""
        self._open.add(connection)
        self._unauthenticated[connection] = None
        address = connection.client[0] if connection.client else ""
        if address and not self._is_uncounted(address):
            connection.address = address
            of_address = self._by_address.setdefault(address, {})
            of_address[connection] = None
            if len(of_address) > self.limits.max_unauthenticated_per_address:
                self._close(next(iter(of_address)))
        if len(self._open) > self.limits.max_connections:
            self._close(next(iter(self._unauthenticated)))

    def authenticated(self, connection: Connection, owner: str) -> None:
        """A request with a key has come on it. Raises ``Overloaded``."""
        if connection.owner == owner or connection not in self._open:
            return
        if self._by_owner[owner] >= max(1, self.limits.max_connections // 2):
            raise Overloaded(
                f"you have {self._by_owner[owner]} connections, half of what this server has (http.max_connections); "
                "close some"
            )
        self._forget(connection)
        self._open.add(connection)
        self._by_owner[owner] += 1
        connection.owner = owner

    def lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._forget(connection)

    def sweep(self, now: float) -> None:
        """Closes those whose time is up."""
        for connection in [connection for connection in self._open if connection.is_overdue(now)]:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        self.lost(connection)
        connection.transport.abort()

    def _forget(self, connection: Connection) -> None:
        self._unauthenticated.pop(connection, None)
        if (of_address := self._by_address.get(connection.address)) is not None:
            of_address.pop(connection, None)
            if not of_address:
                del self._by_address[connection.address]
        if connection.owner is not None:
            self._by_owner[connection.owner] -= 1
            if not self._by_owner[connection.owner]:
                del self._by_owner[connection.owner]
            connection.owner = None

    def _is_uncounted(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._uncounted)


class _Refused(Exception):
    """Raised while bytes are parsed, which ends it."""


class Connection(HttpToolsProtocol):
    """One connection. ``deadline`` is when what it waits for must have come: the headers of a request, the rest of a
    body that is not read any more, the next request."""

    def __init__(self, connections: Connections, **arguments: Any):
        super().__init__(**arguments)
        self._connections = connections
        self._limits = connections.limits
        self._in_headers = True
        self._num_headers = 0
        self._num_header_bytes = 0  # of those that are parsed
        self._num_unparsed_bytes = 0
        self._refusal: tuple[int, str] | None = None
        self._is_draining = False
        self._num_unsent_bytes = 0
        self._unsent_since = 0.0
        self.deadline = math.inf
        self.owner: str | None = None
        self.address = ""

    def authenticated(self, owner: str) -> None:
        """Raises ``Overloaded``."""
        self._connections.authenticated(self, owner)

    def is_overdue(self, now: float) -> bool:
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._num_unsent_bytes:
            self._num_unsent_bytes, self._unsent_since = unsent, now
        return now > self.deadline or now > self._unsent_since + WRITE_TIMEOUT_S

    # ------------------------------------------------------------------------------------------- asyncio's callbacks
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._unsent_since = self.loop.time()
        self._wait(self._limits.header_timeout_s)
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.lost(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_draining:
            return
        self._unset_keepalive_if_required()
        was_in_headers, request = self._in_headers, self.cycle
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to nothing: the request is answered as it is
        except httptools.HttpParserError:
            self._refuse(*(self._refusal or (400, "this is no HTTP/1.1 request")))
            return
        if was_in_headers and self._in_headers and self.cycle is request:
            self._num_unparsed_bytes += len(data)
            if self._num_unparsed_bytes > MAX_HEADER_BYTES:
                self._refuse(431, _TOO_MUCH)
        else:
            self._num_unparsed_bytes = 0

    # ---------------------------------------------------------------------------------------- the parser's callbacks
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._in_headers = True
        self._num_headers = self._num_header_bytes = 0
        self._wait(self._limits.header_timeout_s)
        if len(self.pipeline) >= MAX_WAITING_REQUESTS:
            self._raise(400, f"more than {MAX_WAITING_REQUESTS} requests wait on this connection")

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_headers = False
        self.deadline = math.inf

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        if self.cycle.response_complete:  # and the rest of an unwanted body has come
            self._wait(self._idle_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and self.cycle.response_complete:
            self._wait(self._idle_s if self._in_headers else self._limits.header_timeout_s)

    @property
    def _idle_s(self) -> float:
        return self._limits.header_timeout_s if self.owner is None else self._limits.idle_timeout_s

    def _wait(self, seconds: float) -> None:
        self.deadline = self.loop.time() + seconds

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS:
            self._raise(431, _TOO_MUCH)

    def _raise(self, status: int, sentence: str) -> None:
        self._refusal = (status, sentence)
        raise _Refused

    def _refuse(self, status: int, sentence: str) -> None:
        """Answers, unless another answer is on its way, and closes."""
        self._is_draining = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        body = json.dumps({"detail": sentence, "category": "user"}).encode()
        lines = [STATUS_LINE[status], b"content-type: application/json\r\n", b"connection: close\r\n"]
        self.transport.write(b"".join([*lines, b"content-length: %d\r\n\r\n" % len(body), body]))
        self.transport.write_eof()
        self._wait(LINGER_S)


_TOO_MUCH = f"the request line and headers have more than {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} lines"
