"""One database, one writer. Writes that arrive together share one commit.

SQLite lets one connection write at a time and makes the others wait or fail ("database is locked"). Here all writes
go through one connection and one task, so they never meet; reads have connections of their own and, in WAL mode, see
the last commit without waiting. A write costs one commit (an fsync: ``synchronous=FULL``) when it comes alone, and a
part of one when many come at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Executable, Row, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from descant.errors import ServerError
from descant.service.schema import migrate

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]

MAX_GROUP = 256
"""Writes in one commit: bounds how long the first of them waits for the last."""


class Database:
    """``await Database.open(path)``, then ``write`` and ``read`` until ``close``."""

    def __init__(self, engine: AsyncEngine, writer: AsyncConnection):
        self._engine = engine
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
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"timeout": 30.0})
        event.listen(engine.sync_engine, "connect", _set_up_connection)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(migrate)
            writer = await engine.connect()
        except BaseException:
            await engine.dispose()
            raise
        return cls(engine, writer)

    async def write(self, work: Work[T]) -> T:
        """Runs ``work`` on the writing connection; on return it is committed.

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

    async def read(self, statement: Executable) -> Sequence[Row[Any]]:
        async with self._engine.connect() as connection:
            return (await connection.execute(statement)).all()

    async def close(self) -> None:
        """Finishes the writes that were asked for, then closes. Idempotent."""
        self._closing = True
        self._wake.set()
        await self._task
        await self._writer.close()
        await self._engine.dispose()

    # ----------------------------------------------------------------------------------------------------------------

    async def _write_groups(self) -> None:
        while self._queue or not self._closing:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                group, self._queue = self._queue[:MAX_GROUP], self._queue[MAX_GROUP:]
                await self._write_group(group)

    async def _write_group(self, group: Sequence[tuple[Work[Any], asyncio.Future[Any]]]) -> None:
        try:
            async with self._writer.begin():
                results = [await work(self._writer) for work, _ in group]
            self.num_commits += 1
        except Exception as error:
            with contextlib.suppress(Exception):
                await self._writer.rollback()
            if len(group) == 1:
                if not group[0][1].done():
                    group[0][1].set_exception(error)
                return
            for alone in group:  # one of them is at fault; the others must not suffer for it
                await self._write_group([alone])
        else:
            for (_, done), result in zip(group, results):
                if not done.done():
                    done.set_result(result)


def _set_up_connection(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
