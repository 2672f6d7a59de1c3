"""What outlives a process: sessions, models, sampling sessions, and when checkpoints end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Executable, Row, Select, delete, func, insert, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from descant.service import schema
from descant.service.database import Database
from descant.types import CheckpointName, SamplerKind, Trainable, Version, trainable_from_json, trainable_to_json

ModelStatus = Literal["live", "lost", "deleted", "failed"]
"""lost: was live when its rank or the server ended. failed: was never created."""

SamplingStatus = Literal["live", "lost", "over", "released"]
"""released: its weights were, since a limit was reached. over: its session is."""

CHUNK = 500
"""Rows forgotten in one write, so that other writes do not wait long behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    session_id: str
    owner: str
    created_at: float
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    ended_at: float | None = None
    end_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUsage:
    """What one owner has of them."""

    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """``source_uri``: the checkpoint it was made from. ``status_reason``: why it is not live, for a sentence."""

    model_id: str
    session_id: str
    owner: str
    base: str
    created_at: float
    trainable: Trainable
    source_uri: str | None = None
    user_metadata: Mapping[str, str] | None = None
    status: ModelStatus = "live"
    status_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSessionRecord:
    """``version`` None samples the base. ``model_path`` None with a version: ephemeral, it has no file.
    ``kind``: of an ephemeral one. ``status_reason``: why it was released, for a sentence."""

    sampling_session_id: str
    session_id: str
    owner: str
    base: str
    created_at: float
    model_path: str | None = None
    version: Version | None = None
    kind: SamplerKind | None = None
    status: SamplingStatus = "live"
    status_reason: str | None = None

    @property
    def ephemeral(self) -> bool:
        return self.version is not None and self.model_path is None


class Registry:
    """The records, over a ``Database`` which stays its owner's to close. Ids are looked up without regard to owners:
    the caller compares."""

    def __init__(self, database: Database):
        self._database = database

    # ------------------------------------------------------------------------------------------------ sessions
    async def add_session(self, record: SessionRecord, *, idempotency_key: str | None) -> SessionRecord:
        """The record as it stands: for a key seen before the older one, unchanged."""
        table = schema.sessions
        values = asdict(record) | {"tags": list(record.tags), "idempotency_key": idempotency_key}
        same = select(table).where(table.c.owner == record.owner, table.c.idempotency_key == idempotency_key)

        def insert_once(connection: Connection) -> Row[Any] | None:
            if idempotency_key is not None and (found := connection.execute(same).one_or_none()) is not None:
                return found
            connection.execute(insert(table).values(values))
            return None

        older = await self._database.write(insert_once)
        return record if older is None else _session(older)

    async def session(self, session_id: str) -> SessionRecord | None:
        rows = await self._read(select(schema.sessions).where(schema.sessions.c.session_id == session_id))
        return _session(rows[0]) if rows else None

    async def session_of_key(self, owner: str, idempotency_key: str) -> SessionRecord | None:
        table = schema.sessions
        rows = await self._read(select(table).where(table.c.owner == owner, table.c.idempotency_key == idempotency_key))
        return _session(rows[0]) if rows else None

    async def open_sessions(self) -> Sequence[SessionRecord]:
        return [_session(row) for row in await self._read(select(schema.sessions).where(_SESSION_OPEN))]

    async def end_session(self, session_id: str, *, ended_at: float, reason: str) -> None:
        """Ends it with all that is live in it."""
        in_session = schema.models.c.session_id == session_id
        samplers = schema.sampling_sessions
        await self._write(
            update(schema.sessions)
            .where(schema.sessions.c.session_id == session_id, _SESSION_OPEN)
            .values(ended_at=ended_at, end_reason=reason),
            update(schema.models).where(in_session, _MODEL_LIVE).values(status="deleted", status_reason=reason),
            update(samplers)
            .where(samplers.c.session_id == session_id, samplers.c.status == "live")
            .values(status="over"),
        )

    async def prune_ended(self, *, ended_before: float, most: int) -> None:
        """Forgets sessions that ended before this time, with their models and samplers; of each owner all but the
        ``most`` that ended last."""
        table = schema.sessions
        while True:
            old = [row.session_id for row in await self._read(
                select(table.c.session_id).where(table.c.ended_at < ended_before).limit(CHUNK)
            )]  # fmt: skip
            if not old:
                old = await self._too_many_ended(most)
            if not old:
                return
            for of_session in (schema.sampling_sessions, schema.models, table):
                await self._delete_in_chunks(of_session, of_session.c.session_id.in_(old))

    async def _too_many_ended(self, most: int) -> list[str]:
        table = schema.sessions
        ended, count = table.c.ended_at.is_not(None), func.count()
        rows = await self._read(
            select(table.c.owner, count.label("num_ended")).where(ended).group_by(table.c.owner).having(count > most)
        )
        many: list[str] = []
        for row in rows:
            oldest = select(table.c.session_id).where(ended, table.c.owner == row.owner).order_by(table.c.ended_at)
            many += [found.session_id for found in await self._read(oldest.limit(min(CHUNK, row.num_ended - most)))]
        return many[:CHUNK]

    async def _delete_in_chunks(self, table: schema.Table, where: ColumnElement[bool]) -> None:
        (key,) = table.primary_key
        some = select(key).where(where).limit(CHUNK)

        def delete_some(connection: Connection) -> int:
            return connection.execute(delete(table).where(key.in_(some))).rowcount

        while await self._database.write(delete_some) == CHUNK:
            pass

    # ------------------------------------------------------------------------------------------------ models
    async def num_models(self, owner: str) -> int:
        """Of all that are remembered."""
        return await self._count(select(func.count()).where(schema.models.c.owner == owner))

    async def add_model(self, record: ModelRecord) -> ModelRecord:
        """The record as it stands: one that is there already is left as it is."""
        added = await self._add(schema.models, asdict(record) | {"trainable": trainable_to_json(record.trainable)})
        if added:
            return record
        older = await self.model(record.model_id)
        assert older is not None
        return older

    async def model(self, model_id: str) -> ModelRecord | None:
        rows = await self._read(select(schema.models).where(schema.models.c.model_id == model_id))
        return _model(rows[0]) if rows else None

    async def live_models(self) -> Sequence[ModelRecord]:
        return [_model(row) for row in await self._read(select(schema.models).where(_MODEL_LIVE))]

    async def set_model_status(self, model_id: str, status: ModelStatus, *, reason: str) -> None:
        await self._write(
            update(schema.models)
            .where(schema.models.c.model_id == model_id, _MODEL_LIVE)
            .values(status=status, status_reason=reason)
        )

    async def set_ended_reason(self, model_id: str, reason: str) -> None:
        """Of a model whose session is over."""
        of = (schema.models.c.model_id == model_id) & (schema.models.c.status == "deleted")
        await self._write(update(schema.models).where(of).values(status_reason=reason))

    async def lose(self, *, models: Collection[str], versions: Collection[Version], reason: str) -> None:
        """These models are lost, and the ephemeral samplers of these versions."""
        samplers = schema.sampling_sessions
        lost_models = update(schema.models).where(_MODEL_LIVE, schema.models.c.model_id.in_(models))
        named = tuple_(samplers.c.version_model_id, samplers.c.version_number)
        lost_samplers = update(samplers).where(
            samplers.c.status == "live",
            samplers.c.model_path.is_(None),
            named.in_([(version.model_id, version.number) for version in versions]),
        )
        await self._write(lost_models.values(status="lost", status_reason=reason), lost_samplers.values(status="lost"))

    # ------------------------------------------------------------------------------------------------ samplers
    async def add_sampling_session(self, record: SamplingSessionRecord) -> SamplingSessionRecord:
        """The record as it stands: one that is there already is left as it is."""
        values = asdict(record)
        del values["version"]
        values["version_model_id"] = record.version.model_id if record.version else None
        values["version_number"] = record.version.number if record.version else None
        if await self._add(schema.sampling_sessions, values):
            return record
        older = await self.sampling_session(record.sampling_session_id)
        assert older is not None
        return older

    async def sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord | None:
        table = schema.sampling_sessions
        rows = await self._read(select(table).where(table.c.sampling_session_id == sampling_session_id))
        return _sampling_session(rows[0]) if rows else None

    async def live_ephemeral(self) -> Sequence[SamplingSessionRecord]:
        """Those without a file that are live."""
        table = schema.sampling_sessions
        unnamed = table.c.model_path.is_(None) & table.c.version_number.is_not(None)
        rows = await self._read(select(table).where(table.c.status == "live", unnamed))
        return [_sampling_session(row) for row in rows]

    async def num_samplers(self, owner: str) -> int:
        """Live ones of the base or of files."""
        table = schema.sampling_sessions
        no_version = table.c.version_number.is_(None)
        return await self._count(
            select(func.count()).where(
                table.c.owner == owner, table.c.status == "live", table.c.model_path.is_not(None) | no_version
            )
        )

    async def release_samplers(self, sampling_session_ids: Collection[str], *, at: float, reason: str) -> None:
        table = schema.sampling_sessions
        await self._write(
            update(table)
            .where(table.c.sampling_session_id.in_(sampling_session_ids), table.c.status == "live")
            .values(status="released", status_reason=reason, released_at=at)
        )

    async def prune_released(self, *, released_before: float) -> None:
        """Forgets samplers whose weights were released before this time."""
        table = schema.sampling_sessions
        await self._delete_in_chunks(table, table.c.released_at < released_before)

    # ------------------------------------------------------------------------------------------------ checkpoints
    async def set_checkpoint(
        self,
        name: CheckpointName,
        *,
        owner: str,
        base: str,
        created_at: float,
        expires_at: float | None,
        num_bytes: int,
    ) -> None:
        """``expires_at`` None: never. Replaces what an older checkpoint of this name had."""
        table = schema.checkpoints
        await self._write(
            delete(table).where(table.c.uri == name.uri),
            insert(table).values(
                uri=name.uri,
                owner=owner,
                base=base,
                created_at=created_at,
                expires_at=expires_at,
                num_bytes=num_bytes,
            ),
        )

    async def checkpoints(self) -> Mapping[str, int]:
        """The bytes of each by its URI, as they are known."""
        table = schema.checkpoints
        return {row.uri: row.num_bytes for row in await self._read(select(table.c.uri, table.c.num_bytes))}

    async def set_checkpoint_bytes(self, uri: str, num_bytes: int) -> None:
        table = schema.checkpoints
        await self._write(update(table).where(table.c.uri == uri).values(num_bytes=num_bytes))

    async def checkpoint_usage(self, owner: str, *, without: str) -> CheckpointUsage:
        """``without``: the URI of one that does not count."""
        table = schema.checkpoints
        (row,) = await self._read(
            select(
                func.count().label("number"), func.coalesce(func.sum(table.c.num_bytes), 0).label("num_bytes")
            ).where(table.c.owner == owner, table.c.uri != without)
        )
        return CheckpointUsage(count=row.number, num_bytes=row.num_bytes)

    async def expired_checkpoints(self, now: float) -> Sequence[str]:
        """Their URIs."""
        table = schema.checkpoints
        return [row.uri for row in await self._read(select(table.c.uri).where(table.c.expires_at <= now))]

    async def forget_checkpoint(self, uri: str) -> None:
        await self._write(delete(schema.checkpoints).where(schema.checkpoints.c.uri == uri))

    async def shrink(self) -> None:
        """Gives what is not used any more back to the file system."""
        await self._database.shrink()

    # ----------------------------------------------------------------------------------------------------------------

    async def _read(self, statement: Executable) -> Sequence[Row[Any]]:
        return await self._database.read(statement)

    async def _count(self, statement: Select[int]) -> int:
        ((count,),) = await self._read(statement)
        return count

    async def _write(self, *statements: Executable) -> None:
        def execute(connection: Connection) -> None:
            for statement in statements:
                connection.execute(statement)

        await self._database.write(execute)

    async def _add(self, table: schema.Table, values: Mapping[str, Any]) -> bool:
        """False if its primary key is taken."""
        try:
            await self._write(insert(table).values(values))
        except IntegrityError:
            return False
        return True


_SESSION_OPEN = schema.sessions.c.ended_at.is_(None)
_MODEL_LIVE = schema.models.c.status == "live"


def _session(row: Row[Any]) -> SessionRecord:
    return SessionRecord(
        session_id=row.session_id,
        owner=row.owner,
        created_at=row.created_at,
        tags=tuple(row.tags),
        user_metadata=row.user_metadata,
        sdk_version=row.sdk_version,
        project_id=row.project_id,
        display_name=row.display_name,
        ended_at=row.ended_at,
        end_reason=row.end_reason,
    )


def _model(row: Row[Any]) -> ModelRecord:
    return ModelRecord(
        model_id=row.model_id,
        session_id=row.session_id,
        owner=row.owner,
        base=row.base,
        created_at=row.created_at,
        trainable=trainable_from_json(row.trainable),
        source_uri=row.source_uri,
        user_metadata=row.user_metadata,
        status=row.status,
        status_reason=row.status_reason,
    )


def _sampling_session(row: Row[Any]) -> SamplingSessionRecord:
    version = None
    if row.version_number is not None:
        version = Version(model_id=row.version_model_id, number=row.version_number)
    return SamplingSessionRecord(
        sampling_session_id=row.sampling_session_id,
        session_id=row.session_id,
        owner=row.owner,
        base=row.base,
        created_at=row.created_at,
        model_path=row.model_path,
        version=version,
        kind=row.kind,
        status=row.status,
        status_reason=row.status_reason,
    )
