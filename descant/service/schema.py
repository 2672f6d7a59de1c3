"""The service's tables, and how an older database becomes a newer one.

SQLAlchemy Core only, nothing of SQLite's own: the same tables will stand in PostgreSQL. ``owner`` is on every record
and ``base`` on every record that belongs to one base model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler

from descant.errors import ServerError

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("end_reason", String),
    Column("tags", JSON, nullable=False),
    Column("user_metadata", JSON),
    Column("sdk_version", String, nullable=False),
    Column("project_id", String),
    Column("display_name", String),
    Column("idempotency_key", String),
    # create_session has no sequence number: a client that retries it sends the same idempotency key. Sessions without
    # a key are all different (NULLs are).
    UniqueConstraint("owner", "idempotency_key", name="one_session_per_idempotency_key"),
    Index("sessions_of_owner_ended_at", "owner", "ended_at"),
    Index("sessions_ended_at", "ended_at"),
)

models = Table(
    "models",
    metadata,
    Column("model_id", String, primary_key=True),
    Column("session_id", String, nullable=False, index=True),
    Column("owner", String, nullable=False),
    Column("base", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("status", String, nullable=False),
    Column("status_reason", String),
    Column("trainable", JSON, nullable=False),
    Column("source_uri", String),
    Column("user_metadata", JSON),
    Index("models_of_owner", "owner"),
)

sampling_sessions = Table(
    "sampling_sessions",
    metadata,
    # {session_id}:sample:{seq}: the primary key is the protocol's pair, shared by create_sampling_session and by
    # ephemeral saves, so that neither can take a number that the other has.
    Column("sampling_session_id", String, primary_key=True),
    Column("session_id", String, nullable=False, index=True),
    Column("owner", String, nullable=False),
    Column("base", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("status", String, nullable=False),
    Column("status_reason", String),
    Column("released_at", Float),
    Column("model_path", String),
    Column("version_model_id", String),
    Column("version_number", BigInteger),
    # snapshot or inflight, of one without a file.
    Column("kind", String),
    Index("sampling_sessions_of_owner", "owner", "status"),
    Index("sampling_sessions_released_at", "released_at"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    # What a checkpoint is, its manifest says. This says when it ends, and what an owner has without reading them all.
    Column("uri", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("base", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, index=True),
    Column("num_bytes", BigInteger, nullable=False, server_default="0"),
    Index("checkpoints_of_owner", "owner"),
)

futures = Table(
    "futures",
    metadata,
    # Rising, so that "oldest first" needs no clock. BigInteger for PostgreSQL; SQLite counts by itself only INTEGER.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("request_id", String, nullable=False, unique=True),
    Column("owner", String, nullable=False),
    Column("base", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("scope", String, nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("operation", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("finished_at", Float),
    Column("failed", Boolean, nullable=False),
    Column("content_type", String),
    Column("body", LargeBinary),
    # A client that got no answer sends the same request again, perhaps while the first is still on its way: the
    # second insert must find the first. ``kind`` keeps a model's counter and its samplers' counters apart (two
    # samplers both start at 0), ``owner`` keeps one owner's guess from finding another's request.
    UniqueConstraint("owner", "kind", "scope", "seq_id", name="one_future_per_submission"),
    Index("futures_finished_at", "finished_at"),
    Index("futures_of_owner_finished_at", "owner", "finished_at"),
)

commands = Table(
    "commands",
    metadata,
    # What each live model was asked for since its oldest snapshot that is kept, written with the command's future.
    Column("model_id", String, primary_key=True),
    Column("seq_id", BigInteger, primary_key=True, autoincrement=False),
    Column("owner", String, nullable=False),
    Column("base", String, nullable=False),
    Column("format", Integer, nullable=False),
    Column("operation", String, nullable=False),
    Column("arguments", JSON, nullable=False),
    Column("body", LargeBinary),
    Column("encoding", String),
    Column("file", String),
    Column("num_bytes", BigInteger, nullable=False),
    # None for an id that was consumed, which has no future.
    Column("request_id", String, unique=True),
    # None: it has no answer yet.
    Column("failed", Boolean),
    Column("loss", Float),
    Index("commands_of_owner", "owner"),
)

snapshots = Table(
    "snapshots",
    metadata,
    # The server's own checkpoints of live models: what a recovery begins with. ``seq_id``: the last command in it.
    Column("model_id", String, primary_key=True),
    Column("seq_id", BigInteger, primary_key=True, autoincrement=False),
    Column("owner", String, nullable=False),
    Column("base", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
)


def create_first_tables(connection: Connection) -> None:
    """As they are now: what tables of that time lack, the later migrations add."""
    metadata.create_all(connection, tables=[sessions, models, sampling_sessions, checkpoints, futures])


def count_by_owner(connection: Connection) -> None:
    """What quotas are counted by, and why a sampling session is not live."""
    found = inspect(connection)
    for column in (sampling_sessions.c.status_reason, sampling_sessions.c.released_at, checkpoints.c.num_bytes):
        if column.name not in {have["name"] for have in found.get_columns(column.table.name)}:
            connection.execute(AddColumn(column))
    for table in (sessions, models, sampling_sessions, checkpoints, futures):
        for index in table.indexes:
            index.create(connection, checkfirst=True)


def rename_lora_to_trainable(connection: Connection) -> None:
    """``models.trainable``, of any kind, where ``models.lora`` was."""
    if models.c.trainable.name in {have["name"] for have in inspect(connection).get_columns(models.name)}:
        return
    connection.execute(text("ALTER TABLE models RENAME COLUMN lora TO trainable"))
    for model_id, lora in connection.execute(select(models.c.model_id, models.c.trainable)).all():
        trainable = {"kind": "lora", **lora}
        connection.execute(update(models).where(models.c.model_id == model_id).values(trainable=trainable))


def keep_commands(connection: Connection) -> None:
    """The journal. What lived in an older server's memory cannot be had again from it, and is lost once more."""
    for table in (commands, snapshots):
        table.create(connection, checkfirst=True)
    columns = {have["name"] for have in inspect(connection).get_columns(sampling_sessions.name)}
    if sampling_sessions.c.kind.name not in columns:
        connection.execute(AddColumn(sampling_sessions.c.kind))
    reason = "the server was restarted"
    connection.execute(update(models).where(models.c.status == "live").values(status="lost", status_reason=reason))
    connection.execute(
        update(sampling_sessions)
        .where(
            sampling_sessions.c.status == "live",
            sampling_sessions.c.model_path.is_(None),
            sampling_sessions.c.version_number.is_not(None),
        )
        .values(status="lost")
    )


class AddColumn(DDLElement):
    """SQLAlchemy Core has no word for it. The column may be null, or has a default."""

    def __init__(self, column: Column[Any]):
        self.column = column


@compiles(AddColumn)
def _add_column(element: AddColumn, compiler: DDLCompiler, **_: object) -> str:
    table = compiler.preparer.format_table(element.column.table)
    return f"ALTER TABLE {table} ADD COLUMN {compiler.get_column_specification(element.column)}"


MIGRATIONS: Sequence[Callable[[Connection], None]] = (
    create_first_tables,
    count_by_owner,
    rename_lora_to_trainable,
    keep_commands,
)
"""``MIGRATIONS[n]`` takes a database from version n to n + 1. Append only: what ran somewhere stays as it is (a
migration that needs the tables as they were then writes them out itself)."""


def migrate(connection: Connection, migrations: Sequence[Callable[[Connection], None]] = MIGRATIONS) -> int:
    """Brings the database to the newest version, all or nothing if run in one transaction; the version found.

    Raises ``ServerError`` for a database that a newer Descant has written.
    """
    if not inspect(connection).has_table(schema_version.name):
        schema_version.create(connection)
    found = connection.execute(select(schema_version.c.version)).scalar_one_or_none()
    if found is None:
        connection.execute(insert(schema_version).values(version=0))
    version = found or 0
    if version > len(migrations):
        raise ServerError(
            f"the database has schema version {version}, expected at most {len(migrations)}: "
            "it was written by a newer version of Descant; start that one, or choose another directory with "
            "--set data_dir=DIR"
        )
    for migration in migrations[version:]:
        migration(connection)
    connection.execute(update(schema_version).values(version=len(migrations)))
    return version
