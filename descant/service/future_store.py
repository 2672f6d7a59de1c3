"""The futures that clients were given, in the service's database.

Pending futures wait in memory (an ``asyncio.Future`` each, shared by all who wait) and stand in the database; a
finished one is in the database alone. Nobody polls.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from descant.errors import CannotStore, NotFound
from descant.ports import Clock
from descant.service.database import Database
from descant.service.journal import end_command, insert_command
from descant.service.schema import futures
from descant.types import CommandRecord, Encoded, FutureKey, FutureState

log = logging.getLogger(__name__)

MAX_UNSAVED_BYTES = 64 << 20
"""Of answers that could not be written. Beyond it nothing new is promised: they are these, and those of what runs."""

PRUNE_CHUNK = 500
"""Futures forgotten in one write, so that other writes do not wait long behind it."""


# Built once: building one takes longer than executing it.
_FIND = select(futures.c.request_id).where(
    *(futures.c[name] == bindparam(name) for name in ("owner", "kind", "scope", "seq_id"))
)
_INSERT = insert(futures)
_FINISH = update(futures).where(futures.c.request_id == bindparam("of"), futures.c.finished_at.is_(None))
_GET = select(futures).where(futures.c.request_id == bindparam("of"))


class _PendingFuture:
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

    def __init__(self, database: Database, clock: Clock, *, max_unsaved_bytes: int = MAX_UNSAVED_BYTES):
        self._database = database
        self._max_unsaved_bytes = max_unsaved_bytes
        self._clock = clock
        self._entries: dict[str, _PendingFuture] = {}
        self._unsaved: dict[str, FutureState] = {}
        """Answers whose write failed: given from here, and written again at the next chance."""
        self._unsaved_bytes = 0
        self._bytes_of_owner: Counter[str] | None = None
        """Of the bodies that are kept. None: not counted yet."""

    async def put(
        self, *, key: FutureKey, owner: str, base: str, operation: str, command: CommandRecord | None = None
    ) -> tuple[str, bool]:
        """As the port says. Raises ``CannotStore`` while the disk does not take it, or too many answers wait for it."""
        if self._unsaved_bytes > self._max_unsaved_bytes:
            raise CannotStore("the data directory is full, and what waits for room in it takes all the memory it may")
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
                if command is not None:
                    insert_command(connection, command, owner=owner, base=base, request_id=request_id)
            return found or request_id

        self._entries[request_id] = _PendingFuture(state)  # before the row can be seen, so that no waiter can miss it
        stands = ""
        try:
            stands = await self._database.write(insert_once)
        except IntegrityError:  # another process wrote between our select and our insert
            stands = await self._database.write(insert_once)
        finally:
            if stands != request_id:
                del self._entries[request_id]
        return stands, stands == request_id

    async def resolve(
        self, request_id: str, encoded: Encoded, *, failed: bool = False, loss: float | None = None
    ) -> None:
        """As the port says; on return it is durable. Who waits is answered from memory at once, not a disk's time
        later, and also when the write fails, which is then tried again whenever another future ends and by
        ``save_unsaved``. Only a process that ends before one of these succeeds loses the answer: the future is then
        pending at the next start, and its command is done again."""
        entry = await self._find(request_id)
        if isinstance(entry, FutureState):
            return
        if entry.answer is not None:  # the first answer stands; return when it does
            await entry.saved.wait()
            return
        answer = entry.answer = replace(entry.state, encoded=encoded, failed=failed)
        entry.done.set_result(answer)
        try:
            await self._save(answer, loss)
        except BaseException as error:
            self._keep(answer)
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, CannotStore):  # which the database has logged
                log.exception("the answer of request %s could not be written and is kept in memory", request_id)
        else:
            await self.save_unsaved()
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

    async def prune(
        self, *, finished_before: float, fetched: Collection[str] = (), max_owner_bytes: int | None = None
    ) -> int:
        await self.save_unsaved()
        if self._bytes_of_owner is None:
            await self._count_bytes()
        num_pruned = await self._forget(futures.c.finished_at < finished_before)
        num_pruned += await self._forget_interrupted(finished_before)
        ids = list(fetched)
        for start in range(0, len(ids), PRUNE_CHUNK):
            some = futures.c.request_id.in_(ids[start : start + PRUNE_CHUNK])
            num_pruned += await self._forget(some & futures.c.finished_at.is_not(None))
        if max_owner_bytes is not None and self._bytes_of_owner is not None:
            for owner, num_bytes in list(self._bytes_of_owner.items()):
                if num_bytes > max_owner_bytes:
                    num_pruned += await self._forget_oldest(owner, num_bytes - max_owner_bytes)
        return num_pruned

    async def _count_bytes(self) -> None:
        """What is written meanwhile is counted by who writes it, or twice: that is put right by the next process."""
        counts: Counter[str] = Counter()
        self._bytes_of_owner = counts
        size = func.sum(func.length(futures.c.body)).label("size")
        ended = futures.c.finished_at.is_not(None)
        for row in await self._database.read(select(futures.c.owner, size).where(ended).group_by(futures.c.owner)):
            counts[row.owner] += row.size or 0

    async def _forget(self, which: ColumnElement[bool]) -> int:
        num_forgotten = 0
        while found := await self._database.write(partial(_delete, which=which)):
            self._count_out(found)
            num_forgotten += len(found)
            if len(found) < PRUNE_CHUNK:
                break
        return num_forgotten

    async def _forget_interrupted(self, created_before: float) -> int:
        """Sampling requests of earlier servers: they never end here, and their clients have sent them again."""
        old = (futures.c.kind == "sample") & futures.c.finished_at.is_(None) & (futures.c.created_at < created_before)
        ids = [row.request_id for row in await self._database.read(select(futures.c.request_id).where(old))]
        ids = [request_id for request_id in ids if request_id not in self._entries][:PRUNE_CHUNK]
        return await self._forget(futures.c.request_id.in_(ids)) if ids else 0

    async def _forget_oldest(self, owner: str, excess: int) -> int:
        num_forgotten = 0
        of_owner = (futures.c.owner == owner) & futures.c.finished_at.is_not(None)
        while excess > 0 and (found := await self._database.write(partial(_delete, which=of_owner, excess=excess))):
            self._count_out(found)
            num_forgotten += len(found)
            excess -= sum(size for _, size in found)
        log.warning("%d results were forgotten: their owner had not fetched them, and has too many", num_forgotten)
        return num_forgotten

    def _count_out(self, found: Sequence[tuple[str, int]]) -> None:
        if self._bytes_of_owner is not None:
            for owner, size in found:
                self._bytes_of_owner[owner] -= size
                if self._bytes_of_owner[owner] <= 0:
                    del self._bytes_of_owner[owner]

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    async def save_unsaved(self) -> None:
        """Writes the answers that could not be written yet, as many as can be now."""
        for request_id, answer in list(self._unsaved.items()):
            if request_id not in self._unsaved:
                continue
            try:
                await self._save(answer)
            except Exception as error:
                if not isinstance(error, CannotStore):
                    log.exception("the answer of request %s could still not be written", request_id)
                return
            if self._unsaved.pop(request_id, None) is not None:
                self._unsaved_bytes -= _num_bytes(answer)

    # ----------------------------------------------------------------------------------------------------------------

    def _keep(self, answer: FutureState) -> None:
        self._unsaved[answer.request_id] = answer
        self._unsaved_bytes += _num_bytes(answer)

    async def _find(self, request_id: str) -> _PendingFuture | FutureState:
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
            entry = self._entries.setdefault(request_id, _PendingFuture(state))
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

    async def _save(self, answer: FutureState, loss: float | None = None) -> None:
        assert answer.encoded is not None
        values = {
            "of": answer.request_id,
            "finished_at": self._clock.now(),
            "failed": answer.failed,
            "content_type": answer.encoded.content_type,
            "body": answer.encoded.body,
        }

        def finish(connection: Connection) -> int:
            count = connection.execute(_FINISH, values).rowcount
            if count and answer.key.kind in ("train", "create"):
                end_command(connection, answer.request_id, failed=answer.failed, loss=loss)
            return count

        if await self._database.write(finish) and self._bytes_of_owner is not None:
            self._bytes_of_owner[answer.owner] += len(answer.encoded.body)


def _num_bytes(answer: FutureState) -> int:
    return 0 if answer.encoded is None else len(answer.encoded.body)


def _delete(
    connection: Connection, *, which: ColumnElement[bool], excess: int | None = None
) -> Sequence[tuple[str, int]]:
    """The owners and sizes of what is forgotten: some of ``which``, the oldest first, with ``excess`` as many as have
    so many bytes."""
    size = func.coalesce(func.length(futures.c.body), 0).label("size")
    some = select(futures.c.id, futures.c.owner, size).where(which).order_by(futures.c.finished_at).limit(PRUNE_CHUNK)
    found = []
    for row in connection.execute(some):
        if excess is not None and excess <= 0:
            break
        found.append(row)
        excess = None if excess is None else excess - row.size
    connection.execute(delete(futures).where(futures.c.id.in_([row.id for row in found])))
    return [(row.owner, row.size) for row in found]


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
