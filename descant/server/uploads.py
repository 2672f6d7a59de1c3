"""How many bytes of bodies may lie in memory at once, of all requests together and of one owner."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from descant.errors import Overloaded

MIN_BYTES_PER_S = 32 * 1024
GRACE_S = 10.0
"""A body has this long, and a second more for every ``MIN_BYTES_PER_S`` of it that have come."""


class Uploads:
    """Counts what has arrived, not what was announced. One body alone may always arrive, and one of each owner: an
    owner that got HTTP 429 must be able to succeed later."""

    def __init__(self, *, max_bytes: int):
        """An owner may have half of ``max_bytes``."""
        self._max_bytes = max_bytes
        self._open: dict[Upload, None] = {}  # in the order in which they began
        self._by_owner: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._by_owner.total()

    def begin(self, owner: str, *, timeout_s: float) -> Upload:
        """``timeout_s``: how long the body may take at most."""
        return Upload(self, owner, timeout_s)

    def _grow(self, upload: Upload, num_bytes: int) -> None:
        upload.num_bytes += num_bytes
        self._by_owner[upload.owner] += num_bytes
        if self._by_owner[upload.owner] > self._max_bytes // 2 and self._num_open(upload.owner) > 1:
            raise self._overloaded("your")
        if self.num_bytes > self._max_bytes and len(self._open) > 1:
            greedy, _ = self._by_owner.most_common(1)[0]
            last = next(
                (other for other in reversed(self._open) if other.owner == greedy and other.is_arriving), upload
            )
            if last is upload:
                raise self._overloaded("all")
            last.abort(self._overloaded("all"))
            self._forget(last)

    def _num_open(self, owner: str) -> int:
        return sum(upload.owner == owner for upload in self._open)

    def _forget(self, upload: Upload) -> None:
        if upload in self._open:
            del self._open[upload]
            self._by_owner[upload.owner] -= upload.num_bytes
            if self._by_owner[upload.owner] <= 0:
                del self._by_owner[upload.owner]

    def _overloaded(self, whose: str) -> Overloaded:
        return Overloaded(
            f"the bodies of {whose} requests that are arriving have more bytes than http.max_bodies_bytes = "
            f"{self._max_bytes} allows{' one owner' if whose == 'your' else ''}; send this one again"
        )


class Upload:
    """One body's bytes, from the first that arrives until nothing holds them any more: a context manager."""

    def __init__(self, uploads: Uploads, owner: str, timeout_s: float):
        self._uploads = uploads
        self._timeout_s = timeout_s
        self._refusal: Overloaded | None = None
        self._began = 0.0
        self._timeout: asyncio.Timeout | None = None
        self.owner = owner
        self.num_bytes = 0

    @property
    def is_arriving(self) -> bool:
        return self._timeout is not None and self._refusal is None

    async def receive(self, parts: AsyncIterator[bytes], keep: Callable[[bytes], None]) -> None:
        """Gives ``keep`` each part as it comes. Raises ``Overloaded``, ``TimeoutError`` for a body that takes too long,
        and what ``parts`` and ``keep`` raise."""
        self._began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(min(self._timeout_s, GRACE_S)) as self._timeout:
                async for part in parts:
                    self._uploads._grow(self, len(part))
                    self._may_take(min(self._timeout_s, GRACE_S + self.num_bytes / MIN_BYTES_PER_S))
                    keep(part)
        except TimeoutError:
            if self._refusal is not None:
                raise self._refusal from None
            raise
        finally:
            self._timeout = None

    def _may_take(self, seconds: float) -> None:
        assert self._timeout is not None
        when = self._timeout.when()
        if when is not None and self._began + seconds > when + 0.5:
            self._timeout.reschedule(self._began + seconds)

    def abort(self, refusal: Overloaded) -> None:
        """Ends ``receive``, which raises ``refusal``."""
        assert self._timeout is not None
        self._refusal = refusal
        self._timeout.reschedule(self._began)

    def __enter__(self) -> Upload:
        self._uploads._open[self] = None
        return self

    def __exit__(self, *error: object) -> None:
        self._uploads._forget(self)
