"""The data directory: who may enter it, and how much of its disk is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from descant import app, storage
from descant.errors import CannotStore
from descant.storage import cannot_store, check_room, private_directory


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_a_data_directory_is_its_owners_alone(tmp_path: Path, umask: None) -> None:
    data_dir = tmp_path / "a" / "data"
    with app.only_server_of(data_dir):
        assert mode(data_dir) == mode(data_dir / "checkpoints") == mode(data_dir / "spill") == 0o700
        assert mode(data_dir / "lock") == 0o600


def test_one_that_was_open_is_closed_if_nothing_else_is_in_it(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    data_dir.chmod(0o755)
    (data_dir / "descant.db").touch()
    (data_dir / "descant.db").chmod(0o644)
    (data_dir / "transfer-x").mkdir()
    with app.only_server_of(data_dir):
        assert (mode(data_dir), mode(data_dir / "descant.db")) == (0o700, 0o600)
        assert not (data_dir / "transfer-x").exists(), "nobody reads it any more"


def test_one_that_others_use_stays_open_and_what_is_ours_in_it_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "somebody").mkdir()
    with app.only_server_of(tmp_path):
        assert mode(tmp_path) == 0o755
        assert mode(tmp_path / "checkpoints") == 0o700
    assert "others' somebody is in it" in caplog.text


def test_a_new_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    private_directory(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700


def test_room_is_what_leaves_the_reserve(tmp_path: Path) -> None:
    room = storage.reserve_bytes(tmp_path) + 10
    check_room(tmp_path, 10, free=lambda _: room)
    with pytest.raises(CannotStore, match="full"):
        check_room(tmp_path, 11, free=lambda _: room)
    with pytest.raises(CannotStore, match="cannot be written"):
        check_room(tmp_path / "nowhere", 0)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "the data directory is full"),
        (errno.EDQUOT, "the data directory is full"),
        (errno.EROFS, "the data directory cannot be written: it is read-only"),
        (errno.EACCES, "the data directory cannot be written: the server has no permission"),
        (errno.EIO, "the data directory cannot be written: its disk reports an error"),
        (errno.ENOTDIR, "the data directory cannot be written: Not a directory"),
    ],
)
def test_what_the_disk_is_at_fault_for_is_a_sentence_without_a_path(number: int, says: str) -> None:
    error = cannot_store(OSError(number, os.strerror(number), "/secret/path"))
    assert str(error) == says
    assert error.http_status == 400
