"""One authenticated request: its body received within limits, counted, and decoded where it holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect, Request

from descant.errors import UserError
from descant.server.settings import HttpSettings
from descant.server.uploads import Uploads
from descant.types import RequestBody
from descant.wire import decode, requests

R = TypeVar("R", bound=requests.WireModel)
T = TypeVar("T")

DECODED_AT_ONCE_BYTES = 8 * 2**10
"""Bodies up to here are decoded on the event loop: milliseconds, whatever they hold. Others go to a thread."""

PART_BYTES = 64 * 2**10
"""Of a body that trickles in, parts are put together until they are so large: each is an object of its own."""


class Decoding:
    """Threads in which bodies become requests, one body of each owner at a time: no owner's flood is ahead of
    others."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="decode")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, owner: str, decode: Callable[..., T], *arguments: Any) -> T:
        """``decode(*arguments)``. Raises what it raises."""
        async with self._turns.setdefault(owner, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._threads, decode, *arguments)


class Parts:
    """The parts of a body, those that trickle in put together."""

    def __init__(self, *, limit: int, stop_at: int):
        """Raises ``BodyTooLarge`` (than ``limit``) when more than ``stop_at`` bytes have come."""
        self._limit, self._stop_at = limit, stop_at
        self._parts: list[bytes] = []
        self._tail = bytearray()
        self.num_bytes = 0

    def keep(self, part: bytes) -> None:
        self.num_bytes += len(part)
        if len(part) < PART_BYTES:
            self._tail += part
        if len(part) >= PART_BYTES or len(self._tail) >= PART_BYTES:
            self._parts += (bytes(self._tail), *([part] if len(part) >= PART_BYTES else []))
            self._tail.clear()
        if self.num_bytes > self._stop_at:
            raise BodyTooLarge(self._limit, self.joined()[: decode.PREFIX_BYTES])

    def joined(self) -> bytes:
        return b"".join([*self._parts, bytes(self._tail)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One authenticated request."""

    principal: str
    request: Request
    settings: HttpSettings
    uploads: Uploads
    decoding: Decoding

    @property
    def content_encoding(self) -> str | None:
        return self.request.headers.get("content-encoding")

    @asynccontextmanager
    async def _arriving(self, keep: Callable[[bytes], None]) -> AsyncIterator[None]:
        """Around the time in which the body, which is there at its begin, lies in memory. Raises ``Overloaded``, what
        ``keep`` raises, and ``UserError`` for a body that does not arrive whole."""
        with self.uploads.begin(self.principal, timeout_s=self.settings.body_timeout_s) as upload:
            try:
                await upload.receive(self.request.stream(), keep)
            except TimeoutError:
                raise BodyTooSlow(upload.num_bytes, self.settings.body_timeout_s) from None
            except ClientDisconnect:
                raise UserError("the connection was closed before the body had arrived") from None
            yield

    async def decoded_and_kept(self, limit: int, decoder: Callable[..., T], *arguments: Any) -> tuple[T, RequestBody]:
        """``decoded``, and the body as it came."""

        def decode(body: bytes) -> tuple[T, RequestBody]:
            return decoder(body, *arguments), RequestBody(data=body, encoding=self.content_encoding)

        return await self.decoded(limit, decode)

    async def decoded(self, limit: int, decoder: Callable[..., T], *arguments: Any) -> T:
        """``decoder(body, *arguments)``. Raises what it raises, ``BodyTooLarge``, and what ``_arriving`` raises."""
        declared = self.request.headers.get("content-length", "")
        too_large = declared.isdecimal() and (len(declared) > 19 or int(declared) > limit)
        parts = Parts(limit=limit, stop_at=min(decode.PREFIX_BYTES, limit) if too_large else limit)
        async with self._arriving(parts.keep):
            if parts.num_bytes <= DECODED_AT_ONCE_BYTES and self.content_encoding is None:
                return decoder(parts.joined(), *arguments)
            return await self.decoding.run(self.principal, lambda: decoder(parts.joined(), *arguments))

    async def drop_body(self, limit: int) -> None:
        """Waits for the body, and keeps nothing of it. Raises what ``decoded`` raises."""
        num_bytes = 0

        def keep(part: bytes) -> None:
            nonlocal num_bytes
            num_bytes += len(part)
            if num_bytes > limit:
                raise BodyTooLarge(limit, b"")

        async with self._arriving(keep):
            pass

    async def disconnected(self) -> None:
        """Ends when the client closes the connection before it has its answer. Only after the whole body was read."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def json(self, model: type[R]) -> R:
        """The body as ``model``. Raises what ``requests.parse`` and ``decoded`` raise."""
        try:
            return await self.decoded(requests.MAX_JSON_BYTES, _decode_json, model, self.content_encoding)
        except BodyTooLarge as error:
            raise requests.unread(model, error.prefix, error) from None


def _decode_json(body: bytes, model: type[R], content_encoding: str | None) -> R:
    return requests.parse(model, decode.decompress(body, content_encoding, max_bytes=requests.MAX_JSON_BYTES))


class BodyTooSlow(UserError):
    """Which a client may send again: 408."""

    http_status = 408

    def __init__(self, num_bytes: int, timeout_s: float):
        super().__init__(
            f"the body did not arrive in time: {num_bytes} bytes of it came; it may take {timeout_s:g} s at most, and "
            "less when it comes slowly"
        )


class BodyTooLarge(decode.TooLarge):
    """``prefix``: what had arrived first."""

    def __init__(self, limit: int, prefix: bytes):
        super().__init__(f"the body is larger than {limit} bytes")
        self.limit = limit
        self.prefix = prefix

    def __reduce__(self) -> tuple[type, tuple[int, bytes]]:
        return type(self), (self.limit, self.prefix)
