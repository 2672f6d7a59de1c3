"""The promises made to clients, in the service's database.

Pending futures wait in memory (an ``asyncio.Future`` each, shared by all who wait) and stand in the database; a
finished one is in the database alone. Nobody polls.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from descant.errors import NotFound
from descant.ports import Clock
from descant.service.database import Database
from descant.service.schema import futures
from descant.types import Encoded, FutureKey, FutureState

log = logging.getLogger(__name__)

PRUNE_CHUNK = 500
"""Futures forgotten in one write, so that nobody waits long behind it."""


# Built once: building one takes longer than executing it.
_FIND = select(futures.c.request_id).where(
    *(futures.c[name] == bindparam(name) for name in ("owner", "kind", "scope", "seq_id"))
)
_INSERT = insert(futures)
_FINISH = update(futures).where(futures.c.request_id == bindparam("of"), futures.c.finished_at.is_(None))
_GET = select(futures).where(futures.c.request_id == bindparam("of"))


class _Entry:
    """A future that has not ended, as far as the database knows. ``answer`` is set while it is being written; who waits
    has it then (``done``)."""

    __slots__ = ("answer", "done", "saved", "state")

    def __init__(self, state: FutureState):
        self.state = state
        self.answer: FutureState | None = None
        self.done: asyncio.Future[FutureState] = asyncio.get_running_loop().create_future()
        self.saved = asyncio.Event()


class SqlFutureStore:
    """``FutureStore`` over a ``Database``, which stays its owner's to close."""

    def __init__(self, database: Database, clock: Clock):
        self._database = database
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._unsaved: dict[str, FutureState] = {}
        """Answers whose write failed: given from here, and written again at the next chance."""

    async def put(self, *, key: FutureKey, owner: str, base: str, operation: str) -> tuple[str, bool]:
        request_id = secrets.token_hex(16)
        state = FutureState(
            request_id=request_id, owner=owner, base=base, key=key, operation=operation, encoded=None, failed=False
        )
        same = {"owner": owner, "kind": key.kind, "scope": key.scope, "seq_id": key.seq_id}
        new = {
            **same,
            "request_id": request_id,
            "base": base,
            "operation": operation,
            "created_at": self._clock.now(),
            "failed": False,
        }

        def insert_once(connection: Connection) -> str:
            found = connection.execute(_FIND, same).scalar_one_or_none()
            if found is None:
                connection.execute(_INSERT, new)
            return found or request_id

        self._entries[request_id] = _Entry(state)  # before the row can be seen, so that no waiter can miss it
        stands = ""
        try:
            stands = await self._database.write(insert_once)
        except IntegrityError:  # another process wrote between our select and our insert
            stands = await self._database.write(insert_once)
        finally:
            if stands != request_id:
                del self._entries[request_id]
        return stands, stands == request_id

    async def resolve(self, request_id: str, encoded: Encoded, *, failed: bool = False) -> None:
        """As the port says; on return it is durable. Who waits is answered from memory at once, not a disk's time
        later, and also when the write fails, which is then tried again whenever another future ends. Only a process
        that ends before one of these succeeds loses the answer: the future is then pending at the next start, and
        fails there, for a client that had not got its answer."""
        entry = await self._find(request_id)
        if isinstance(entry, FutureState):
            return
        if entry.answer is not None:  # the first answer stands; return when it does
            await entry.saved.wait()
            return
        answer = entry.answer = replace(entry.state, encoded=encoded, failed=failed)
        entry.done.set_result(answer)
        try:
            await self._save(answer)
        except BaseException as error:
            self._unsaved[request_id] = answer
            if not isinstance(error, Exception):
                raise
            log.exception("the answer of request %s could not be written and is kept in memory", request_id)
        else:
            await self._save_unsaved()
        finally:
            entry.saved.set()
            del self._entries[request_id]

    async def get(self, request_id: str, *, timeout_s: float = 0.0) -> FutureState:
        entry = await self._find(request_id)
        if isinstance(entry, FutureState):
            return entry
        if timeout_s > 0 and not entry.done.done():
            deadline = asyncio.ensure_future(self._clock.sleep(timeout_s))
            either: set[asyncio.Future[Any]] = {entry.done, deadline}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                deadline.cancel()
        return entry.done.result() if entry.done.done() else entry.state

    async def pending(self) -> Sequence[FutureState]:
        rows = await self._database.read(
            select(futures).where(futures.c.finished_at.is_(None)).order_by(futures.c.id.asc())
        )
        return [_state(row) for row in rows if row.request_id not in self._unsaved]

    async def prune(self, *, finished_before: float) -> int:
        await self._save_unsaved()
        old = select(futures.c.id).where(futures.c.finished_at < finished_before).limit(PRUNE_CHUNK)

        def delete_some(connection: Connection) -> int:
            return connection.execute(delete(futures).where(futures.c.id.in_(old))).rowcount

        num_pruned = 0
        while num_deleted := await self._database.write(delete_some):
            num_pruned += num_deleted
        return num_pruned

    # ----------------------------------------------------------------------------------------------------------------

    async def _find(self, request_id: str) -> _Entry | FutureState:
        """The entry of a future that has not ended, or the state of one that has. Raises ``NotFound``."""
        entry = self._entries.get(request_id)
        if entry is not None:
            return entry
        if request_id not in self._unsaved:
            state = await self._read(request_id)
            if state.encoded is not None:
                return state
            # Pending since before this store was opened. It may have ended while we read; whoever ends it from now on
            # finds the entry, so a second look settles it.
            entry = self._entries.setdefault(request_id, _Entry(state))
            state = await self._read(request_id)
            if state.encoded is None and request_id not in self._unsaved:
                return entry
            if entry.answer is None and self._entries.pop(request_id, None) is not None:
                entry.saved.set()
                entry.done.set_result(self._unsaved.get(request_id, state))
        return self._unsaved.get(request_id) or await self._read(request_id)

    async def _read(self, request_id: str) -> FutureState:
        rows = await self._database.read(_GET, {"of": request_id})
        if not rows:
            raise NotFound(f"no request {request_id!r}: it never was, or its answer is no longer kept")
        return _state(rows[0])

    async def _save(self, answer: FutureState) -> None:
        assert answer.encoded is not None
        values = {
            "of": answer.request_id,
            "finished_at": self._clock.now(),
            "failed": answer.failed,
            "content_type": answer.encoded.content_type,
            "body": answer.encoded.body,
        }

        def finish(connection: Connection) -> None:
            connection.execute(_FINISH, values)

        await self._database.write(finish)

    async def _save_unsaved(self) -> None:
        for request_id, answer in list(self._unsaved.items()):
            try:
                await self._save(answer)
            except Exception:
                log.exception("the answer of request %s could still not be written", request_id)
                return
            self._unsaved.pop(request_id, None)


def _state(row: Row[Any]) -> FutureState:
    encoded = None if row.finished_at is None else Encoded(content_type=row.content_type, body=row.body)
    return FutureState(
        request_id=row.request_id,
        owner=row.owner,
        base=row.base,
        key=FutureKey(kind=row.kind, scope=row.scope, seq_id=row.seq_id),
        operation=row.operation,
        encoded=encoded,
        failed=bool(row.failed),
    )
