"""One database, one writer. Writes that arrive together share one commit.

SQLite lets one connection write at a time and makes the others wait or fail ("database is locked"). Here all writes
go through one connection on one thread, so they never meet; reads have connections of their own and, in WAL mode, see
the last commit without waiting. A write costs one commit (an fsync: ``synchronous=FULL``) when it comes alone, and a
part of one when many come at once. Statements run on the thread as they are, a whole group for one hand-over from the
event loop: with an asynchronous driver each statement would be handed over several times, at several times the cost.

A write for which the disk has no room is made once more after the reserve of the data directory was released. What the
disk is at fault for is ``CannotStore``, a sentence; the next write tries again, so nothing need be done when there is
room.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Executable, Row, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError

from descant.errors import CannotStore, ServerError
from descant.service.schema import metadata, migrate
from descant.storage import DataDirectory, cannot_store, free_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[Connection], T]

MAX_GROUP = 256
"""Writes in one commit: bounds how long the first of them waits for the last."""

NUM_READERS = 2

MAX_LOG_BYTES = 64 << 20
"""What the write-ahead log keeps of the disk once it has been written back."""

INCREMENTAL = 2
"""SQLite's number of the mode in which a file shrinks on command."""

SHRINK_PAGES = 1024
"""Pages (4 KiB) given back in one write."""

APPLICATION_ID = 0x44736374
"""In the file's header ("Dsct"): whose it is. Files from before it was written have 0."""


class Database:
    """``await Database.open(path)``, then ``write`` and ``read`` until ``close``."""

    def __init__(
        self,
        engine: Engine,
        writing: ThreadPoolExecutor,
        writer: Connection,
        *,
        directory: Path,
        storage: DataDirectory | None,
    ):
        self._engine = engine
        self._directory = directory
        self._storage = storage
        self._writing = writing
        self._reading = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="database reader")
        self._writer = writer
        self._queue: list[tuple[Work[Any], asyncio.Future[Any]]] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._task = asyncio.create_task(self._write_groups(), name="database writer")
        self.num_commits = 0

    @classmethod
    async def open(cls, path: str | Path, storage: DataDirectory | None = None) -> Database:
        """Opens or creates the SQLite file at ``path``, readable by its owner alone, and brings its tables up to date.
        ``storage``: the directory it is in; it gets whether writes succeed, and releases its reserve where they do not.

        Raises ``ServerError`` for a database written by a newer Descant, for one that is damaged, and for one that
        cannot be opened: in a sentence that says what to do.
        """
        path = Path(path)
        engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 30.0})
        event.listen(engine, "connect", _set_up_connection)
        writing = ThreadPoolExecutor(1, thread_name_prefix="database writer")

        def connect() -> Connection:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's own follow its mode
            with engine.begin() as connection:
                migrate(connection)
                missing = metadata.tables.keys() - set(inspect(connection).get_table_names())
                connection.execute(text(f"PRAGMA application_id = {APPLICATION_ID}"))
            if missing:
                raise _damaged(path, f"it lacks the tables {', '.join(sorted(missing))}")
            writer = engine.connect()
            _make_shrinkable(writer)
            return writer

        try:
            writer = await asyncio.get_running_loop().run_in_executor(writing, connect)
            return cls(engine, writing, writer, directory=path.parent, storage=storage)
        except OSError as error:
            raise ServerError(f"the database {path} cannot be opened: {error.strerror}") from None
        except DBAPIError as error:
            raise _cannot_open(path, error) from None
        except BaseException:
            writing.shutdown(wait=False)
            engine.dispose()
            raise

    async def write(self, work: Work[T]) -> T:
        """Runs ``work`` on the writing connection, on its thread; on return it is committed.

        ``work`` may run twice (again by itself, if another of its group failed), so it must do nothing but talk to
        the connection. What it raises is raised here, and nothing of it is kept; ``CannotStore`` where the disk is at
        fault. If the caller is cancelled the write may still happen.
        """
        if self._closing:
            raise ServerError("the database is closed")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append((work, done))
        self._wake.set()
        return await done

    async def read(self, statement: Executable, values: Mapping[str, Any] | None = None) -> Sequence[Row[Any]]:
        """Raises ``CannotStore`` where the disk is at fault."""

        def fetch() -> Sequence[Row[Any]]:
            try:
                with self._engine.connect() as connection:
                    return connection.execute(statement, values).all()
            except DBAPIError as error:
                raise _at_fault(error, self._directory) or error from None

        return await asyncio.get_running_loop().run_in_executor(self._reading, fetch)

    async def shrink(self) -> None:
        """Gives pages that hold nothing any more back to the file system; writes go on in between."""
        loop = asyncio.get_running_loop()
        with suppress(sqlite3.Error):  # a disk that takes nothing; the next write reports it
            while not self._closing and await loop.run_in_executor(self._writing, _give_back, self._writer):
                pass

    async def probe(self) -> bool:
        """Whether it can be written, tried by writing."""
        try:
            await self.write(_touch)
        except CannotStore:
            return False
        return True

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
            try:
                results = self._commit(works)
            except DBAPIError as error:
                if not _is_full(error) or self._storage is None or not self._storage.release_reserve():
                    raise
                results = self._commit(works)
            if self._storage is not None:
                self._storage.written()
            return results
        except DBAPIError as error:
            if len(works) == 1:
                fault = _at_fault(error, self._directory)
                if fault is not None and self._storage is not None:
                    self._storage.failed(fault)
                return [_Raised(fault or error)]
        except Exception as error:
            if len(works) == 1:
                return [_Raised(error)]
        # One of them is at fault; the others must not suffer for it.
        return [outcome for work in works for outcome in self._write_group([work])]

    def _commit(self, works: Sequence[Work[Any]]) -> list[Any]:
        with self._writer.begin():
            results = [work(self._writer) for work in works]
        self.num_commits += 1
        return results


def check_database(path: Path, checkpoints: Path) -> None:
    """Before a server starts on what lies at ``path``; ``checkpoints``: where it keeps them. Reads all of the file.
    Raises ``ServerError`` that says what is wrong and what to do."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        if any(checkpoints.glob("models/*/*/*")):
            log.warning("there is no database %s, though there are checkpoints: it begins with an empty one", path)
        return
    except OSError as error:
        raise ServerError(f"the database {path} cannot be read: {error.strerror}") from None
    if size == 0:
        if any(checkpoints.glob("models/*/*/*")):
            raise _damaged(path, "it is empty, though there are checkpoints beside it")
        return
    try:
        # Not read-only: what a killed server has left in the log beside the file belongs to it.
        connection = sqlite3.connect(path, timeout=30.0)
        try:
            [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
            [application] = connection.execute("PRAGMA application_id").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise _cannot_open(path, error) from None
    if found != "ok":
        raise _damaged(path, str(found).strip().replace("\n", " "))
    if application not in (0, APPLICATION_ID):
        raise ServerError(
            f"{path} is another program's database (application id {application:#x}, expected {APPLICATION_ID:#x}); "
            "choose another directory with --set data_dir=DIR"
        )


def _damaged(path: Path, what: str) -> ServerError:
    return ServerError(
        f"the database {path} is damaged: {what}. Put a backup of it in its place, or move it away with its -wal and "
        "-shm: the server then begins with an empty one. Checkpoints keep their paths; sessions, results that nobody "
        "has fetched, and the times at which checkpoints expire are lost"
    )


def _cannot_open(path: Path, error: DBAPIError | sqlite3.Error) -> ServerError:
    code = _code(error)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damaged(path, str(_original(error)))
    if _is_full(error):
        return ServerError(f"the database {path} cannot be opened: the disk is full; make room and start again")
    return ServerError(f"the database {path} cannot be opened: {_original(error)}")


def _original(error: DBAPIError | sqlite3.Error) -> BaseException:
    return error if isinstance(error, sqlite3.Error) else error.orig or error


def _code(error: DBAPIError | sqlite3.Error) -> int | None:
    """SQLite's own, without what it extends it by."""
    code = getattr(_original(error), "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _is_full(error: DBAPIError | sqlite3.Error) -> bool:
    """Or may be: SQLite says "disk I/O error" where the file of the log's index cannot grow."""
    return _code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _at_fault(error: DBAPIError, directory: Path) -> CannotStore | None:
    """For what the disk is at fault; None: something else is."""
    match _code(error):
        case sqlite3.SQLITE_FULL:
            return cannot_store(errno.ENOSPC)
        case sqlite3.SQLITE_READONLY:
            return cannot_store(errno.EROFS)
        case sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
            return cannot_store(errno.EACCES)
        case sqlite3.SQLITE_IOERR:
            return cannot_store(errno.ENOSPC if _is_out_of_room(directory) else errno.EIO)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return CannotStore("the server's database is damaged: whoever runs it has to look after it")
    return None


def _is_out_of_room(directory: Path) -> bool:
    try:
        return free_bytes(directory) < 1 << 16
    except OSError:
        return False


def _touch(connection: Connection) -> None:
    connection.execute(text("UPDATE schema_version SET version = version"))


class _Raised:
    def __init__(self, error: Exception):
        self.error = error


def _make_shrinkable(writer: Connection) -> None:
    """A file of an older version is written anew, once, so that it can become smaller; where it cannot, it stays as it
    is: what is freed in it is used again."""
    raw = _raw(writer)
    (mode,) = raw.execute("PRAGMA auto_vacuum").fetchone()
    if mode == INCREMENTAL:
        return
    try:
        raw.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
        raw.execute("VACUUM")
    except sqlite3.Error as error:
        log.warning("the database could not be written anew, so its file will not become smaller: %s", error)


def _give_back(writer: Connection) -> bool:
    """On the writer's thread, outside of its transactions: some pages. Whether there are more."""
    raw = _raw(writer)
    (free,) = raw.execute("PRAGMA freelist_count").fetchone()
    # ``execute`` would give one page back: it takes one step of what is a statement without rows.
    raw.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")
    (left,) = raw.execute("PRAGMA freelist_count").fetchone()
    return bool(0 < left < free)


def _raw(writer: Connection) -> sqlite3.Connection:
    raw = writer.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    return raw


def _set_up_connection(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")  # of a file that is empty; before anything is written to it
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA journal_size_limit={MAX_LOG_BYTES}")
    cursor.execute("PRAGMA temp_store=MEMORY")  # what a statement needs by the way must not need another disk
    cursor.close()
