"""Conformance of ``CheckpointStore``. Give a fixture ``store`` and inherit."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from descant.ckpt.manifest import MANIFEST, encode_manifest, write_durable
from descant.errors import Damaged, NotFound, ServerError
from descant.ports import CheckpointStore
from descant.types import Checkpoint, CheckpointName, Full, Lora, Manifest, Trainable

NAME = CheckpointName(model_id="session:train:0", type="weights", name="a")


LORA = Lora(rank=4, seed=0, train_mlp=False)


async def written(
    store: CheckpointStore, name: CheckpointName, body: bytes, trainable: Trainable = LORA
) -> tuple[str, Manifest]:
    """An attempt with one file, and its manifest."""
    attempt = await store.attempt(name)
    files = {"adapter_model.safetensors": write_durable(Path(attempt) / "adapter_model.safetensors", body)}
    manifest = Manifest(
        base="base",
        owner="owner",
        trainable=trainable,
        step=len(body),
        applied_seq_id=7,
        has_optimizer=False,
        files=files,
    )
    return attempt, manifest


async def tick() -> None:
    """A file system's clock ticks in milliseconds, and a commit may be faster."""
    await asyncio.sleep(0.02)


async def committed(store: CheckpointStore, name: CheckpointName, body: bytes) -> Checkpoint:
    attempt, manifest = await written(store, name, body)
    return await store.commit(name, attempt, manifest)


def body_of(checkpoint: Checkpoint) -> bytes:
    return (Path(checkpoint.directory) / "adapter_model.safetensors").read_bytes()


def _exists(path: str) -> bool:
    return os.path.exists(path)


class CheckpointStoreSuite:
    async def damage(self, store: CheckpointStore, checkpoint: Checkpoint, file: str, body: bytes | None) -> None:
        """Puts ``body`` in place of a file of a checkpoint (its manifest too), None: nothing, as a broken disk would.
        A store that keeps them elsewhere than in ``directory`` overrides it."""
        path = Path(checkpoint.directory) / file
        path.unlink() if body is None else path.write_bytes(body)

    async def test_is_a_store(self, store: CheckpointStore) -> None:
        assert isinstance(store, CheckpointStore)

    async def test_attempts_are_fresh_and_empty(self, store: CheckpointStore) -> None:
        one, other = await store.attempt(NAME), await store.attempt(NAME)
        assert one != other
        assert os.listdir(one) == os.listdir(other) == []

    async def test_absent_until_committed(self, store: CheckpointStore) -> None:
        attempt, manifest = await written(store, NAME, b"one")
        with pytest.raises(NotFound):
            await store.open(NAME)
        assert await store.list() == []
        checkpoint = await store.commit(NAME, attempt, manifest)
        assert checkpoint == await store.open(NAME)
        assert (checkpoint.name, checkpoint.manifest, body_of(checkpoint)) == (NAME, manifest, b"one")

    @pytest.mark.parametrize("trainable", [LORA, Full()], ids=["lora", "full"])
    async def test_a_checkpoint_is_of_the_kind_that_was_written(
        self, store: CheckpointStore, trainable: Trainable
    ) -> None:
        attempt, manifest = await written(store, NAME, b"one", trainable)
        await store.commit(NAME, attempt, manifest)
        assert (await store.open(NAME)).manifest == manifest
        assert [checkpoint.manifest.trainable for checkpoint in await store.list()] == [trainable]

    @pytest.mark.parametrize("damage", ["missing", "shorter"])
    async def test_an_attempt_that_is_not_whole_is_refused(self, store: CheckpointStore, damage: str) -> None:
        attempt, manifest = await written(store, NAME, b"one")
        path = Path(attempt) / "adapter_model.safetensors"
        path.unlink() if damage == "missing" else path.write_bytes(b"on")
        with pytest.raises(ServerError, match="adapter_model"):
            await store.commit(NAME, attempt, manifest)
        with pytest.raises(NotFound):
            await store.open(NAME)

    @pytest.mark.parametrize("damage", ["a file is missing", "a file is shorter", "the manifest is cut", "none"])
    async def test_a_damaged_one_is_not_opened_and_can_be_deleted(self, store: CheckpointStore, damage: str) -> None:
        checkpoint = await committed(store, NAME, b"one")
        weights, manifest = "adapter_model.safetensors", encode_manifest(checkpoint.manifest)
        match damage:
            case "a file is missing":
                await self.damage(store, checkpoint, weights, None)
            case "a file is shorter":
                await self.damage(store, checkpoint, weights, b"on")
            case "the manifest is cut":
                await self.damage(store, checkpoint, MANIFEST, manifest[:-20])
        if damage == "none":
            assert (await store.open(NAME)).name == NAME
        else:
            with pytest.raises(Damaged, match=NAME.uri) as raised:
                await store.open(NAME)
            assert checkpoint.directory not in str(raised.value)
        await store.delete(NAME)
        with pytest.raises(NotFound):
            await store.open(NAME)

    async def test_a_commit_replaces_an_older_one(self, store: CheckpointStore) -> None:
        await committed(store, NAME, b"one")
        assert body_of(await committed(store, NAME, b"other")) == b"other"
        assert body_of(await store.open(NAME)) == b"other"
        assert [checkpoint.name for checkpoint in await store.list()] == [NAME]

    async def test_a_failed_replacement_leaves_the_older_one(self, store: CheckpointStore) -> None:
        await committed(store, NAME, b"one")
        attempt, manifest = await written(store, NAME, b"other")
        (Path(attempt) / "adapter_model.safetensors").unlink()
        with pytest.raises(ServerError):
            await store.commit(NAME, attempt, manifest)
        await store.abandon(attempt)
        assert body_of(await store.open(NAME)) == b"one"

    async def test_abandon_removes_an_attempt_and_nothing_else(self, store: CheckpointStore) -> None:
        attempt, _ = await written(store, NAME, b"one")
        await store.abandon(attempt)
        assert not _exists(attempt)
        await store.abandon(attempt)
        kept, manifest = await written(store, NAME, b"two")
        await store.commit(NAME, kept, manifest)
        await store.abandon(kept)
        assert body_of(await store.open(NAME)) == b"two"

    async def test_the_type_is_part_of_the_name(self, store: CheckpointStore) -> None:
        sampler = CheckpointName(model_id=NAME.model_id, type="sampler_weights", name=NAME.name)
        await committed(store, NAME, b"training")
        await committed(store, sampler, b"sampler")
        assert body_of(await store.open(NAME)) == b"training"
        assert body_of(await store.open(sampler)) == b"sampler"

    async def test_list_is_newest_first_and_by_model(self, store: CheckpointStore) -> None:
        names = [CheckpointName(model_id=f"s:train:{i % 2}", type="weights", name=f"n{i}") for i in range(4)]
        for name in names:
            await committed(store, name, b"x")
            await tick()
        assert [checkpoint.name for checkpoint in await store.list()] == names[::-1]
        assert [checkpoint.name for checkpoint in await store.list("s:train:1")] == [names[3], names[1]]
        assert await store.list("s:train:2") == []

    async def test_a_replaced_one_is_the_newest(self, store: CheckpointStore) -> None:
        other = CheckpointName(model_id=NAME.model_id, type="weights", name="b")
        for name in (NAME, other, NAME):
            await committed(store, name, b"x")
            await tick()
        assert [checkpoint.name for checkpoint in await store.list()] == [NAME, other]

    async def test_delete(self, store: CheckpointStore) -> None:
        checkpoint = await committed(store, NAME, b"one")
        await store.delete(NAME)
        assert not _exists(checkpoint.directory)
        for gone in (store.open, store.delete):
            with pytest.raises(NotFound):
                await gone(NAME)
        assert await store.list() == []
        await committed(store, NAME, b"again")

    @pytest.mark.parametrize("odd", ["a b", "ümläut", "..", ".hidden", "%41", "a:b", "x" * 128])
    async def test_odd_names_come_back_as_they_were(self, store: CheckpointStore, odd: str) -> None:
        name = CheckpointName(model_id=f"{odd}:train:0", type="weights", name=odd)
        await committed(store, name, b"one")
        assert (await store.open(name)).name == name
        assert [checkpoint.name for checkpoint in await store.list(name.model_id)] == [name]
        assert [checkpoint.name for checkpoint in await store.list()] == [name]
