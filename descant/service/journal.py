"""The journal: what each live model was asked for, so that it can be made again after a death.

    journal = await Journal.open(database, directory)
    record = await journal.with_file(record)            # a large body goes to a file of its own, durable on return
    insert_command(connection, record, …)               # in the commit of the command's future: durable with it
    end_command(connection, request_id, failed=False, loss=3.2)
    …
    for entry in await journal.entries(model_id, after=seq_id): record = await journal.read(entry)
    await journal.snapshot_taken(model_id, seq_id, …)   # what lies before it need not be repeated any more

A model is its newest snapshot and the commands since. Bodies are kept as they came, under the ``Content-Encoding`` that
they came with, so that an entry needs no encoding of its own and is decoded by what decodes requests. An entry has a
format; one of a newer Descant is not guessed at.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, insert, select, update

from descant.errors import Lost, ServerError
from descant.service.database import Database
from descant.service.schema import commands, snapshots
from descant.storage import PRIVATE, cannot_store
from descant.types import CommandRecord, RequestBody

log = logging.getLogger(__name__)

FORMAT = 1
"""Of an entry: what ``operation`` and ``arguments`` mean, and that bodies are as they came."""

MAX_INLINE_BYTES = 128 << 10
"""A body up to here lies in the database and costs no fsync of its own."""

MAX_SEQ_ID = 2**63 - 1

# Built once: building one takes longer than executing it.
_FIND = select(commands.c.seq_id).where(
    commands.c.model_id == bindparam("of"), commands.c.seq_id == bindparam("number")
)
_INSERT = insert(commands)
_END = update(commands).where(commands.c.request_id == bindparam("of"))
_DESCRIBED = [column for column in commands.c if column.name != "body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One command, its body left where it is. ``request_id`` None: its id was consumed without a future. ``failed``
    None: it has no answer yet. ``loss``: what its answer said."""

    record: CommandRecord
    request_id: str | None
    failed: bool | None
    loss: float | None

    @property
    def seq_id(self) -> int:
        return self.record.seq_id


def insert_command(
    connection: Connection, record: CommandRecord, *, owner: str, base: str, request_id: str | None
) -> None:
    """Does nothing for an id that is there: that command came first."""
    if connection.execute(_FIND, {"of": record.model_id, "number": record.seq_id}).first() is not None:
        return
    connection.execute(
        _INSERT,
        {
            "model_id": record.model_id,
            "seq_id": record.seq_id,
            "owner": owner,
            "base": base,
            "format": FORMAT,
            "operation": record.operation,
            "arguments": dict(record.arguments),
            "body": None if record.body is None else record.body.data,
            "encoding": None if record.body is None else record.body.encoding,
            "file": record.file,
            "num_bytes": record.num_bytes,
            "request_id": request_id,
        },
    )


def end_command(connection: Connection, request_id: str, *, failed: bool, loss: float | None) -> None:
    """It has its answer."""
    connection.execute(_END, {"of": request_id, "failed": failed, "loss": loss})


class Journal:
    def __init__(self, database: Database, directory: Path):
        """For ``open``."""
        self._database = database
        self._directory = directory
        self._bytes_of_owner: Counter[str] = Counter()
        self._bytes_of_base: Counter[str] = Counter()

    @classmethod
    async def open(cls, database: Database, directory: Path) -> Journal:
        """``directory``: for large bodies; files in it that no entry names are removed. Raises ``ServerError`` for
        entries that a newer Descant has written."""
        journal = cls(database, directory)
        newest = (await database.read(select(func.max(commands.c.format).label("format"))))[0].format
        if newest is not None and newest > FORMAT:
            raise ServerError(
                f"the journal has entries of format {newest}, expected at most {FORMAT}: they were written by a newer "
                "version of Descant; start that one, or choose another directory with --set data_dir=DIR"
            )
        named = {row.file for row in await database.read(select(commands.c.file).where(commands.c.file.is_not(None)))}
        await asyncio.to_thread(_prepare, directory, named)
        size = func.sum(commands.c.num_bytes).label("size")
        of = (commands.c.owner, commands.c.base)
        for row in await database.read(select(*of, size).group_by(*of)):
            journal._count(row.owner, row.base, row.size)
        return journal

    def num_bytes(self, owner: str) -> int:
        """Of the bodies of this owner's commands that would be repeated."""
        return self._bytes_of_owner[owner]

    def num_bytes_of_base(self, base: str) -> int:
        """Of all owners' commands on this base."""
        return self._bytes_of_base[base]

    # ------------------------------------------------------------------------------------------------ commands
    async def with_file(self, record: CommandRecord) -> CommandRecord:
        """The record with its body in a file, durable on return, if it is too large for the database. Raises
        ``CannotStore``."""
        if record.body is None or len(record.body.data) <= MAX_INLINE_BYTES:
            return record
        name = secrets.token_hex(16)
        try:
            await asyncio.to_thread(_write_durable, self._directory / name, record.body.data)
        except OSError as error:
            raise cannot_store(error) from None
        return replace(record, body=replace(record.body, data=b""), file=name)

    async def without_file(self, record: CommandRecord) -> None:
        """It did not come to be an entry."""
        if record.file is not None:
            await self._unlink([record.file])

    def count(self, record: CommandRecord, *, owner: str, base: str) -> None:
        """It has come to be one."""
        self._count(owner, base, record.num_bytes)

    def _count(self, owner: str, base: str, num_bytes: int) -> None:
        for counter, key in ((self._bytes_of_owner, owner), (self._bytes_of_base, base)):
            counter[key] += num_bytes
            if counter[key] <= 0:
                del counter[key]

    async def consume(self, record: CommandRecord, *, owner: str, base: str) -> None:
        """An entry without a future: an id that no command will take, or several (``arguments["last"]``). Durable on
        return. Raises ``CannotStore``."""
        await self._database.write(partial(insert_command, record=record, owner=owner, base=base, request_id=None))

    async def entries(self, model_id: str, *, after: int = -1, up_to: int = MAX_SEQ_ID) -> Sequence[JournalEntry]:
        """Those behind ``after`` up to ``up_to``, in seq_id order."""
        rows = await self._database.read(
            select(*_DESCRIBED)
            .where(commands.c.model_id == model_id, commands.c.seq_id.between(after + 1, up_to))
            .order_by(commands.c.seq_id)
        )
        return [
            JournalEntry(
                record=CommandRecord(
                    model_id=row.model_id,
                    seq_id=row.seq_id,
                    operation=row.operation,
                    arguments=row.arguments,
                    body=None if row.num_bytes == 0 else RequestBody(data=b"", encoding=row.encoding),
                    file=row.file,
                    num_bytes=row.num_bytes,
                ),
                request_id=row.request_id,
                failed=row.failed,
                loss=row.loss,
            )
            for row in rows
        ]

    async def read(self, entry: JournalEntry) -> CommandRecord:
        """The whole record. Raises ``Lost`` for one that is there no more."""
        record = entry.record
        if record.body is None:
            return record
        if record.file is not None:
            try:
                data = await asyncio.to_thread((self._directory / record.file).read_bytes)
            except OSError as error:
                raise Lost(f"the body of seq_id {record.seq_id} cannot be read: {error.strerror}") from None
        else:
            rows = await self._database.read(
                select(commands.c.body).where(
                    commands.c.model_id == record.model_id, commands.c.seq_id == record.seq_id
                )
            )
            data = rows[0].body if rows else b""
        if len(data) != record.num_bytes:
            raise Lost(f"the body of seq_id {record.seq_id} has {len(data)} bytes, expected {record.num_bytes}")
        return replace(record, body=replace(record.body, data=data))

    # ------------------------------------------------------------------------------------------------ snapshots
    async def snapshot_taken(
        self, model_id: str, seq_id: int, *, owner: str, base: str, created_at: float, num_bytes: int
    ) -> None:
        """A snapshot of the model is durable that holds every command up to ``seq_id``."""

        def add(connection: Connection) -> None:
            same = (snapshots.c.model_id == model_id) & (snapshots.c.seq_id == seq_id)
            connection.execute(delete(snapshots).where(same))
            connection.execute(
                insert(snapshots).values(
                    model_id=model_id,
                    seq_id=seq_id,
                    owner=owner,
                    base=base,
                    created_at=created_at,
                    num_bytes=num_bytes,
                )
            )

        await self._database.write(add)

    async def snapshots(self) -> Mapping[str, Sequence[int]]:
        """By model, rising."""
        found: dict[str, list[int]] = {}
        for row in await self._database.read(select(snapshots).order_by(snapshots.c.seq_id)):
            found.setdefault(row.model_id, []).append(row.seq_id)
        return found

    async def prune(self, model_id: str, *, keep_after: int) -> None:
        """A recovery of the model begins at ``keep_after`` at the earliest: forgets commands up to there, but for its
        creation, and snapshots before."""
        before = (commands.c.model_id == model_id) & (commands.c.seq_id <= keep_after) & (commands.c.seq_id > 0)
        older = (snapshots.c.model_id == model_id) & (snapshots.c.seq_id < keep_after)
        await self._forget(before, older)

    async def forget(self, model_ids: Collection[str]) -> None:
        """These models are over."""
        ids = list(model_ids)
        await self._forget(commands.c.model_id.in_(ids), snapshots.c.model_id.in_(ids))

    async def models(self) -> Collection[str]:
        """All that it knows."""
        return {row.model_id for row in await self._database.read(select(commands.c.model_id).distinct())}

    async def _forget(self, which: ColumnElement[bool], older: ColumnElement[bool]) -> None:
        described = select(commands.c.owner, commands.c.base, commands.c.num_bytes, commands.c.file)

        def remove(connection: Connection) -> Sequence[Any]:
            found = connection.execute(described.where(which)).all()
            connection.execute(delete(commands).where(which))
            connection.execute(delete(snapshots).where(older))
            return found

        found = await self._database.write(remove)
        for row in found:
            self._count(row.owner, row.base, -row.num_bytes)
        await self._unlink([row.file for row in found if row.file is not None])

    async def _unlink(self, names: Sequence[str]) -> None:
        def unlink() -> None:
            for name in names:
                with suppress(OSError):  # what is left is removed at the next start
                    (self._directory / name).unlink()

        if names:
            await asyncio.to_thread(unlink)


def _prepare(directory: Path, named: Collection[str]) -> None:
    directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.name not in named:
            path.unlink(missing_ok=True)


def _write_durable(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
