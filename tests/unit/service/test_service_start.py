"""What a server finds when it starts: a database that is damaged, empty, newer or another's."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from descant.errors import ServerError
from descant.service.database import APPLICATION_ID, Database, check_database


async def made(path: Path) -> None:
    database = await Database.open(path)
    await database.close()


def with_checkpoints(root: Path) -> Path:
    (root / "models" / "m" / "weights" / "a").mkdir(parents=True)
    return root


async def test_a_whole_one_is_ours_and_private(tmp_path: Path) -> None:
    path = tmp_path / "db"
    await made(path)
    check_database(path, with_checkpoints(tmp_path / "checkpoints"))
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    connection.close()
    assert path.stat().st_mode & 0o777 == 0o600
    await made(path)


def test_none_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_database(tmp_path / "db", tmp_path / "checkpoints")
    assert not caplog.records
    check_database(tmp_path / "db", with_checkpoints(tmp_path / "checkpoints"))
    assert "though there are checkpoints" in caplog.text


def test_an_empty_one_beside_checkpoints_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.touch()
    check_database(path, tmp_path / "checkpoints")
    with pytest.raises(ServerError, match=r"it is empty, though there are checkpoints.*move it away"):
        check_database(path, with_checkpoints(tmp_path / "checkpoints"))


@pytest.mark.parametrize("damage", ["rubbish", "a page", "cut", "a table"])
async def test_a_damaged_one_is_a_sentence(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "db"
    await made(path)
    body = path.read_bytes()
    match damage:
        case "rubbish":
            path.write_bytes(b"rubbish" * 5000)
        case "a page":
            path.write_bytes(body[:4096] + b"x" * 8192 + body[4096 + 8192 :])
        case "cut":
            path.write_bytes(body[: len(body) // 2])
        case "a table":
            connection = sqlite3.connect(path)
            connection.execute("DROP TABLE futures")
            connection.commit()
            connection.close()

    async def start() -> None:
        check_database(path, tmp_path / "checkpoints")
        await made(path)

    with pytest.raises(ServerError, match=r"is damaged: .*Put a backup of it in its place"):
        await start()


async def test_a_newer_one_and_anothers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "db"
    await made(path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE schema_version SET version = 1000")
    connection.commit()
    connection.close()
    with pytest.raises(ServerError, match=r"schema version 1000.*newer version of Descant; start that one"):
        await made(path)
    other = tmp_path / "other"
    connection = sqlite3.connect(other)
    connection.execute("PRAGMA application_id = 17")
    connection.execute("CREATE TABLE x (y)")
    connection.close()
    with pytest.raises(ServerError, match="another program's database"):
        check_database(other, tmp_path / "checkpoints")
