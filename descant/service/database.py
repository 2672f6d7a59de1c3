"""One database, one writer. Writes that arrive together share one commit.

SQLite lets one connection write at a time and makes the others wait or fail ("database is locked"). Here all writes
go through one connection on one thread, so they never meet; reads have connections of their own and, in WAL mode, see
the last commit without waiting. A write costs one commit (an fsync: ``synchronous=FULL``) when it comes alone, and a
part of one when many come at once. Statements run on the thread as they are, a whole group for one hand-over from the
event loop: with an asynchronous driver each statement would be handed over several times, at several times the cost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Executable, Row, create_engine, event

from descant.errors import ServerError
from descant.service.schema import migrate

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[Connection], T]

MAX_GROUP = 256
"""Writes in one commit: bounds how long the first of them waits for the last."""

NUM_READERS = 2


class Database:
    """``await Database.open(path)``, then ``write`` and ``read`` until ``close``."""

    def __init__(self, engine: Engine, writing: ThreadPoolExecutor, writer: Connection):
        self._engine = engine
        self._writing = writing
        self._reading = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="database reader")
        self._writer = writer
        self._queue: list[tuple[Work[Any], asyncio.Future[Any]]] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._task = asyncio.create_task(self._write_groups(), name="database writer")
        self.num_commits = 0

    @classmethod
    async def open(cls, path: str | Path) -> Database:
        """Opens or creates the SQLite file at ``path`` and brings its tables up to date.

        Raises ``ServerError`` for a database written by a newer Descant.
        """
        engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 30.0})
        event.listen(engine, "connect", _set_up_connection)
        writing = ThreadPoolExecutor(1, thread_name_prefix="database writer")

        def connect() -> Connection:
            with engine.begin() as connection:
                migrate(connection)
            return engine.connect()

        try:
            return cls(engine, writing, await asyncio.get_running_loop().run_in_executor(writing, connect))
        except BaseException:
            writing.shutdown(wait=False)
            engine.dispose()
            raise

    async def write(self, work: Work[T]) -> T:
        """Runs ``work`` on the writing connection, on its thread; on return it is committed.

        ``work`` may run twice (again by itself, if another of its group failed), so it must do nothing but talk to
        the connection. What it raises is raised here, and nothing of it is kept. If the caller is cancelled the write
        may still happen.
        """
        if self._closing:
            raise ServerError("the database is closed")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append((work, done))
        self._wake.set()
        return await done

    async def read(self, statement: Executable, values: Mapping[str, Any] | None = None) -> Sequence[Row[Any]]:
        def fetch() -> Sequence[Row[Any]]:
            with self._engine.connect() as connection:
                return connection.execute(statement, values).all()

        return await asyncio.get_running_loop().run_in_executor(self._reading, fetch)

    async def close(self) -> None:
        """Finishes the writes that were asked for, then closes. Idempotent."""
        self._closing = True
        self._wake.set()
        await self._task
        self._reading.shutdown()
        self._writing.shutdown()
        self._writer.close()
        self._engine.dispose()

    # ----------------------------------------------------------------------------------------------------------------

    async def _write_groups(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue or not self._closing:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                group, self._queue = self._queue[:MAX_GROUP], self._queue[MAX_GROUP:]
                outcomes = await loop.run_in_executor(self._writing, self._write_group, [work for work, _ in group])
                for (_, done), outcome in zip(group, outcomes):
                    if done.done():
                        continue
                    if isinstance(outcome, _Raised):
                        done.set_exception(outcome.error)
                    else:
                        done.set_result(outcome)

    def _write_group(self, works: Sequence[Work[Any]]) -> list[Any]:
        """On the writer's thread: what each work returned, or raised, after the commit."""
        try:
            with self._writer.begin():
                results = [work(self._writer) for work in works]
            self.num_commits += 1
            return results
        except Exception as error:
            if len(works) == 1:
                return [_Raised(error)]
        # One of them is at fault; the others must not suffer for it.
        return [outcome for work in works for outcome in self._write_group([work])]


class _Raised:
    def __init__(self, error: Exception):
        self.error = error


def _set_up_connection(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
