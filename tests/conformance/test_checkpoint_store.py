"""The checkpoint stores keep their promises, and the suite notices a store that does not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import obstore
import pytest

from descant.ckpt.manifest import MANIFEST
from descant.ckpt.object_store import ObjectCheckpointStore
from descant.ckpt.remote import Remote
from descant.ckpt.store import DirCheckpointStore
from descant.errors import DescantError, NotFound
from descant.ports import CheckpointStore
from descant.testing.checkpoint_store import CheckpointStoreSuite
from descant.testing.fakes import FakeCheckpointStore
from descant.testing.s3_server import BUCKET, ENVIRONMENT, s3_server
from descant.types import Checkpoint, CheckpointName, Manifest


class TestFakeCheckpointStore(CheckpointStoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FakeCheckpointStore:
        return FakeCheckpointStore(tmp_path)


class TestDirCheckpointStore(CheckpointStoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> DirCheckpointStore:
        return DirCheckpointStore(tmp_path)


class ObjectStoreSuite(CheckpointStoreSuite):
    async def damage(self, store: CheckpointStore, checkpoint: Checkpoint, file: str, body: bytes | None) -> None:
        """Of the objects; the local copy is gone."""
        assert isinstance(store, ObjectCheckpointStore)
        shutil.rmtree(checkpoint.directory)
        path = f"files/{Path(checkpoint.directory).name}/{file}"
        if file == MANIFEST:
            [info] = await store.remote.list("names/")
            path = info.path
        if body is None:
            await store.remote.delete([path])
        else:
            obstore.put(store.remote.store, path, body)


class TestObjectStoreInMemory(ObjectStoreSuite):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> ObjectCheckpointStore:
        store = ObjectCheckpointStore(Remote("memory:///"), tmp_path, max_local_bytes=1 << 20)
        await store.start()
        return store


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


class TestObjectStoreOnS3(ObjectStoreSuite):
    @pytest.fixture
    async def store(self, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectCheckpointStore:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": s3_url}).items():
            monkeypatch.setenv(name, value)
        store = ObjectCheckpointStore(Remote(f"s3://{BUCKET}/{tmp_path.name}"), tmp_path, max_local_bytes=1 << 20)
        await store.start()
        return store


# ---------------------------------------------------------------------------------- broken on purpose, once per clause


class OneAttempt(FakeCheckpointStore):
    async def attempt(self, name: CheckpointName) -> str:
        path = self.directory / "attempt"
        path.mkdir(exist_ok=True)
        return str(path)


class DirtyAttempt(FakeCheckpointStore):
    async def attempt(self, name: CheckpointName) -> str:
        path = await super().attempt(name)
        (Path(path) / "left").touch()
        return path


class VisibleEarly(FakeCheckpointStore):
    async def attempt(self, name: CheckpointName) -> str:
        path = await super().attempt(name)
        self._checkpoints.setdefault(name, Checkpoint(name=name, directory=path, manifest=None))  # type: ignore[arg-type]
        return path


class Unchecked(FakeCheckpointStore):
    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        checkpoint = Checkpoint(name=name, directory=attempt, manifest=manifest)
        self._checkpoints[name] = checkpoint
        return checkpoint


class OpensDamaged(FakeCheckpointStore):
    async def open(self, name: CheckpointName) -> Checkpoint:
        if name not in self._checkpoints:
            raise NotFound(name.uri)
        return self._checkpoints[name]


class DeletesWhole(FakeCheckpointStore):
    async def delete(self, name: CheckpointName) -> None:
        await self.open(name)
        await super().delete(name)


class KeepsOld(FakeCheckpointStore):
    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        return self._checkpoints.get(name) or await super().commit(name, attempt, manifest)


class RemovesOldFirst(FakeCheckpointStore):
    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        self._checkpoints.pop(name, None)
        return await super().commit(name, attempt, manifest)


class AbandonsAll(FakeCheckpointStore):
    async def abandon(self, attempt: str) -> None:
        shutil.rmtree(attempt, ignore_errors=True)


class AbandonsNothing(FakeCheckpointStore):
    async def abandon(self, attempt: str) -> None:
        pass


class AbandonsOnce(FakeCheckpointStore):
    async def abandon(self, attempt: str) -> None:
        os.stat(attempt)
        await super().abandon(attempt)


class Untyped(FakeCheckpointStore):
    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        return await super().commit(
            CheckpointName(model_id=name.model_id, type="weights", name=name.name), attempt, manifest
        )


class OldestFirst(FakeCheckpointStore):
    async def list(self, model_id: str | None = None) -> Sequence[Checkpoint]:
        return (await super().list(model_id))[::-1]


class ListsAll(FakeCheckpointStore):
    async def list(self, model_id: str | None = None) -> Sequence[Checkpoint]:
        return await super().list()


class KeepsItsPlace(FakeCheckpointStore):
    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        before = list(self._checkpoints)
        checkpoint = await super().commit(name, attempt, manifest)
        self._checkpoints = {n: self._checkpoints[n] for n in [*before, *(self._checkpoints.keys() - before)]}
        return checkpoint


class DeletesNothing(FakeCheckpointStore):
    async def delete(self, name: CheckpointName) -> None:
        await self.open(name)


class DeletesQuietly(FakeCheckpointStore):
    async def delete(self, name: CheckpointName) -> None:
        if name in self._checkpoints:
            await super().delete(name)


class Lowers(FakeCheckpointStore):
    async def open(self, name: CheckpointName) -> Checkpoint:
        found = await super().open(name)
        plain = CheckpointName(model_id=name.model_id, type=name.type, name=name.name.strip("."))
        return Checkpoint(name=plain, directory=found.directory, manifest=found.manifest)


@pytest.mark.parametrize(
    ("broken", "clause", "arguments"),
    [
        (OneAttempt, "test_attempts_are_fresh_and_empty", ()),
        (DirtyAttempt, "test_attempts_are_fresh_and_empty", ()),
        (VisibleEarly, "test_absent_until_committed", ()),
        (Unchecked, "test_an_attempt_that_is_not_whole_is_refused", ("missing",)),
        (Unchecked, "test_an_attempt_that_is_not_whole_is_refused", ("shorter",)),
        (OpensDamaged, "test_a_damaged_one_is_not_opened_and_can_be_deleted", ("a file is missing",)),
        (OpensDamaged, "test_a_damaged_one_is_not_opened_and_can_be_deleted", ("the manifest is cut",)),
        (DeletesWhole, "test_a_damaged_one_is_not_opened_and_can_be_deleted", ("a file is shorter",)),
        (KeepsOld, "test_a_commit_replaces_an_older_one", ()),
        (RemovesOldFirst, "test_a_failed_replacement_leaves_the_older_one", ()),
        (AbandonsAll, "test_abandon_removes_an_attempt_and_nothing_else", ()),
        (AbandonsNothing, "test_abandon_removes_an_attempt_and_nothing_else", ()),
        (AbandonsOnce, "test_abandon_removes_an_attempt_and_nothing_else", ()),
        (Untyped, "test_the_type_is_part_of_the_name", ()),
        (OldestFirst, "test_list_is_newest_first_and_by_model", ()),
        (ListsAll, "test_list_is_newest_first_and_by_model", ()),
        (KeepsItsPlace, "test_a_replaced_one_is_the_newest", ()),
        (DeletesNothing, "test_delete", ()),
        (DeletesQuietly, "test_delete", ()),
        (Lowers, "test_odd_names_come_back_as_they_were", (".hidden",)),
    ],
)
async def test_the_suite_sees_a_broken_store(
    broken: type[FakeCheckpointStore], clause: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, OSError, DescantError)):
        await getattr(CheckpointStoreSuite(), clause)(broken(tmp_path), *arguments)
