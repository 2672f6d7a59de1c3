"""An object store by its URL: a few operations, each of which ends in time, and says in a sentence what went wrong.

``obstore`` (the extra ``object-store``) talks to S3, GCS and Azure; it finds credentials, region and endpoint in the
environment, under the names that their own tools use (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, …). What it reports
may have URLs with signatures in it, so that goes to the log without them, and clients read of it one clause.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from descant.errors import CannotStore, ServerError, UserError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

SCHEMES = ("s3", "gs", "az", "memory")
REQUEST_TIMEOUT_S = 30.0
"""Of one request; a large file is many."""
MAX_RETRIES = 3
MAX_REQUESTS = 16
"""At a time."""
DEADLINE_FACTOR = 4
"""An operation of one request has as long as so many of them: it may be repeated."""

T = TypeVar("T")


def check_url(url: str) -> None:
    """Raises ``UserError`` for what is no object store's."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not (parts.netloc or parts.scheme == "memory"):
        raise UserError(
            f"checkpoints.url is {public_name(url)!r}, expected "
            f"{', '.join(f'{scheme}://BUCKET/PREFIX' for scheme in SCHEMES[:-1])} or nothing, for the data directory"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UserError(
            f"checkpoints.url {public_name(url)} has a user or a query, expected neither: credentials are found in the "
            "environment"
        )


def public_name(url: str) -> str:
    """Without what may be a secret: a user, a password, a query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """``version``: what a conditional update of it names."""

    path: str
    size_bytes: int
    modified: datetime
    version: Mapping[str, str]


class Conflict(Exception):
    """A conditional write found another state than it was to replace: nothing was written."""


class Unknown(CannotStore):
    """A write that may have been done."""


class Remote:
    """Objects by path below the URL's prefix. Raises ``FileNotFoundError`` for an object that is not there, and
    ``ServerError``, of writes ``CannotStore``, where the store is at fault."""

    def __init__(self, url: str, *, timeout_s: float = REQUEST_TIMEOUT_S):
        """Nothing is asked of the store. Raises ``UserError``."""
        check_url(url)
        try:
            import obstore
            from obstore import exceptions, store
        except ImportError:
            raise UserError("checkpoints.url needs obstore: pip install 'descant[object-store]'") from None
        self.name = public_name(url)
        self._obstore = obstore
        self._errors = exceptions
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(MAX_REQUESTS)
        try:
            self.store: ObjectStore = store.from_url(
                url,
                client_options={
                    "timeout": timedelta(seconds=timeout_s),
                    "connect_timeout": timedelta(seconds=5),
                    # obstore's own variable for it, which it does not look at where it is given options.
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
                },
                retry_config={"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=timeout_s)},
            )
        except (exceptions.BaseError, ValueError) as error:
            log.error("%s: %s", self.name, _redacted(error))
            raise UserError(f"checkpoints.url {self.name} cannot be used: see the server's log") from None

    async def get(self, path: str) -> tuple[bytes, ObjectInfo]:
        """Of a small object."""

        async def read() -> tuple[bytes, ObjectInfo]:
            found = await self._obstore.get_async(self.store, path)
            return bytes(await found.bytes_async()), _info(found.meta)

        return await self._ask(read)

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        """Bytes ``start`` to ``end``."""
        found = await self._ask(lambda: self._obstore.get_range_async(self.store, path, start=start, end=end))
        return memoryview(found)

    async def put(self, path: str, body: bytes, *, replaces: ObjectInfo | None) -> None:
        """Of a small object, where there is none, or in place of exactly that one. Raises ``Conflict``, and ``Unknown``
        where the store has not said whether it was done."""
        mode = "create" if replaces is None else dict(replaces.version)
        try:
            await self._ask(
                lambda: self._obstore.put_async(self.store, path, body, mode=mode, use_multipart=False),  # type: ignore[arg-type]
                writes=True,
            )
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            raise Conflict from None

    async def put_file(self, path: str, file: Path) -> None:
        """In parts, each with a deadline of its own. Raises ``OSError`` for a file that cannot be read."""
        await self._ask(lambda: self._obstore.put_async(self.store, path, file), writes=True, in_parts=True)

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """All below ``prefix``, of which each page has the deadline of a request."""
        found: list[ObjectInfo] = []
        pages = self._obstore.list(self.store, prefix).__aiter__()

        async def page() -> Sequence[ObjectInfo] | None:
            try:
                return [_info(meta) for meta in await anext(pages)]
            except StopAsyncIteration:
                return None

        while (more := await self._ask(page)) is not None:
            found += more
        return found

    async def directories(self, prefix: str) -> Sequence[str]:
        found = await self._ask(lambda: self._obstore.list_with_delimiter_async(self.store, prefix))
        return found["common_prefixes"]

    async def delete(self, paths: Sequence[str]) -> None:
        """What is not there is deleted already."""
        if not paths:
            return
        try:
            await self._ask(lambda: self._obstore.delete_async(self.store, list(paths)), writes=True)
        except FileNotFoundError:
            for path in paths if len(paths) > 1 else ():
                await self.delete([path])

    async def _ask(self, request: Callable[[], Awaitable[T]], *, writes: bool = False, in_parts: bool = False) -> T:
        async with self._slots:
            try:
                async with asyncio.timeout(None if in_parts else DEADLINE_FACTOR * self._timeout_s):
                    return await request()
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                raise
            except FileNotFoundError as error:
                if "NoSuchBucket" not in str(error):
                    raise
                raise self._trouble(error, "has no such bucket", writes=writes) from None
            except TimeoutError as error:
                raise self._trouble(error, "did not answer in time", writes=writes) from None
            except self._errors.BaseError as error:
                raise self._trouble(error, self._reason(error), writes=writes) from None

    def _reason(self, error: Exception) -> str:
        said = str(error)
        if isinstance(error, (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError)):
            return "does not let the server in"
        if isinstance(error, self._errors.NotSupportedError):
            return "cannot do what was asked of it"
        if "NoSuchBucket" in said:
            return "has no such bucket"
        if status := re.search(r"status code: (\d{3})", said):
            return f"answered HTTP {status[1]}"
        if re.search(r"TimedOut|timed out|kind: Timeout", said):
            return "did not answer in time"
        if "kind: Connect" in said:
            return "cannot be reached"
        return "failed"

    def _trouble(self, error: Exception, why: str, *, writes: bool) -> ServerError:
        log.warning("the object store %s %s: %s", self.name, why, _redacted(error))
        sentence = f"the object store {self.name} {why}"
        return Unknown(sentence) if writes else ServerError(sentence)


def _info(meta: Mapping[str, object]) -> ObjectInfo:
    size, modified = meta["size"], meta["last_modified"]
    assert isinstance(size, int)
    assert isinstance(modified, datetime)
    version = {key: str(meta[key]) for key in ("e_tag", "version") if meta.get(key) is not None}
    return ObjectInfo(path=str(meta["path"]), size_bytes=size, modified=modified, version=version)


def _redacted(error: Exception) -> str:
    """Its first line, without queries: they may be signed."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"\?\S+", "?…", lines[0])
