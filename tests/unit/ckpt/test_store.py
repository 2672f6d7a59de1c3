"""The store on a real disk: names, leftovers, damage, and a process killed at any moment."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from descant.ckpt.disk import DiskFile, PathLike, RealDisk
from descant.ckpt.manifest import (
    MANIFEST,
    decode_manifest,
    encode_manifest,
    read_manifest,
    read_verified,
    seal,
    write_durable,
)
from descant.ckpt.store import CheckpointDirectory, DirCheckpointStore
from descant.errors import CannotStore, Damaged, NotFound, ServerError, UserError
from descant.testing.checkpoint_store import NAME, body_of, committed, written
from descant.types import CheckpointName, FileEntry, Full, Lora, Manifest, Trainable


def tree(root: Path) -> list[str]:
    files = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return sorted(name for name in files if name != "epoch")


class WithoutExchange(RealDisk):
    def exchange(self, one: PathLike, other: PathLike) -> bool:
        return False


async def test_where_a_checkpoint_lies(tmp_path: Path) -> None:
    await committed(DirCheckpointStore(tmp_path), NAME, b"one")
    assert tree(tmp_path) == [
        "models/session%3Atrain%3A0/weights/a/adapter_model.safetensors",
        "models/session%3Atrain%3A0/weights/a/manifest.json",
    ]


@pytest.mark.parametrize(
    "name",
    [
        CheckpointName(model_id="m", type="weights", name="../../etc/passwd"),
        CheckpointName(model_id="../m", type="weights", name="a"),
        CheckpointName(model_id="m", type="weights", name=""),
        CheckpointName(model_id="m", type="weights", name="x" * 201),
        CheckpointName(model_id="m", type="weights", name="a\0b"),
        CheckpointName(model_id="m", type="../../x", name="a"),  # type: ignore[arg-type]
    ],
)
async def test_a_name_that_is_no_path_segment_is_refused(tmp_path: Path, name: CheckpointName) -> None:
    store = DirCheckpointStore(tmp_path)
    for call in (store.attempt, store.open, store.delete):
        with pytest.raises(UserError):
            await call(name)
    assert tree(tmp_path) == []


async def test_dots_stay_inside(tmp_path: Path) -> None:
    store = DirCheckpointStore(tmp_path / "root")
    for dots in (".", "..", "..."):
        await committed(store, CheckpointName(model_id=dots, type="weights", name=dots), b"x")
    assert os.listdir(tmp_path) == ["root"]
    assert len(await store.list()) == 3


async def test_a_restart_keeps_the_committed_and_removes_the_rest(tmp_path: Path) -> None:
    store = DirCheckpointStore(tmp_path)
    await committed(store, NAME, b"one")
    attempt, manifest = await written(store, NAME, b"half")
    again = DirCheckpointStore(tmp_path)
    assert body_of(await again.open(NAME)) == b"one"
    assert len(tree(tmp_path)) == 2
    with pytest.raises(ServerError, match="another server has begun epoch 2"):  # the old one comes back from the dead
        await store.commit(NAME, attempt, manifest)
    with pytest.raises(ServerError, match="was written under epoch 1 of the data directory, expected 2"):
        await again.commit(NAME, attempt, manifest)
    with pytest.raises(FileNotFoundError):  # and its writer too
        RealDisk().create(Path(attempt) / "late")
    assert body_of(await again.open(NAME)) == b"one"


async def test_a_damaged_checkpoint_is_not_opened(tmp_path: Path) -> None:
    store = DirCheckpointStore(tmp_path)
    checkpoint = await committed(store, NAME, b"one")
    other = CheckpointName(model_id="m", type="weights", name="other")
    await committed(store, other, b"two")
    (Path(checkpoint.directory) / "adapter_model.safetensors").write_bytes(b"o")
    with pytest.raises(Damaged, match="has 1 bytes, its manifest says 3"):
        await store.open(NAME)
    (Path(checkpoint.directory) / MANIFEST).write_bytes(b"{")
    with pytest.raises(Damaged, match="not a checkpoint manifest"):
        await store.open(NAME)
    assert [found.name for found in await store.list()] == [other]
    await store.delete(NAME)


async def test_without_an_exchange_an_interrupted_replacement_is_undone(tmp_path: Path) -> None:
    store = DirCheckpointStore(tmp_path, disk=WithoutExchange())
    await committed(store, NAME, b"one")
    checkpoint = await committed(store, NAME, b"two")
    assert body_of(await store.open(NAME)) == b"two"
    assert len(tree(tmp_path)) == 2
    final = Path(checkpoint.directory)
    os.rename(final, final.with_name(f".{final.name}.replaced"))  # as if killed between the two renames
    assert await store.list() == []
    assert body_of(await DirCheckpointStore(tmp_path).open(NAME)) == b"two"


@pytest.mark.parametrize("trainable", [Lora(rank=3, seed=None, train_unembed=False), Full()], ids=["lora", "full"])
def test_a_manifest_comes_back_as_it_was(trainable: Trainable) -> None:
    manifest = Manifest(
        base="b",
        owner="o",
        trainable=trainable,
        step=1,
        applied_seq_id=2,
        has_optimizer=True,
        files={"a": FileEntry(size_bytes=3, sha256="x")},
    )
    assert decode_manifest(encode_manifest(manifest), where="here") == manifest


def test_a_manifest_of_the_older_form_is_refused() -> None:
    with pytest.raises(Damaged, match="has manifest format 1, this version reads 3"):
        decode_manifest(b'{"format": 1, "base": "b", "owner": "o", "lora": {"rank": 4}}', where="here")


def test_a_manifest_of_the_format_before_is_read() -> None:
    """It had no digest of itself. One that says so and has one is damaged."""
    manifest = Manifest(
        base="b", owner="o", trainable=Lora(rank=4, seed=0), step=1, applied_seq_id=2, has_optimizer=True, files={}
    )
    fields = json.loads(encode_manifest(manifest))
    old = {name: value for name, value in fields.items() if name != "sha256"} | {"format": 2}
    assert decode_manifest(json.dumps(old).encode(), where="here") == manifest
    with pytest.raises(Damaged, match="another sha256"):
        decode_manifest(encode_manifest(manifest).replace(b'"format": 3', b'"format": 2'), where="here")


@pytest.mark.parametrize(
    ("trainable", "why"),
    [
        ('{"rank": 4}', "kind"),
        ('{"kind": "half"}', "kind is 'half', expected 'lora' or 'full'"),
        ('{"kind": "lora", "rang": 1}', "rang"),
        ('{"kind": "full", "rank": 1}', "rank"),
        ("[]", "list"),
    ],
)
def test_what_is_trained_is_said_in_full(trainable: str, why: str) -> None:
    body = seal({"format": 3, "base": "b", "owner": "o", "trainable": json.loads(trainable)})
    with pytest.raises(Damaged, match=f"here is not a checkpoint manifest: .*{why}"):
        decode_manifest(body, where="here")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 3}', b"\xff"])
def test_what_is_not_a_manifest_says_where(body: bytes) -> None:
    with pytest.raises(Damaged, match="here"):
        decode_manifest(body, where="here")


WRITER = """
import asyncio, sys
from descant.ckpt.disk import RealDisk
from descant.ckpt.store import DirCheckpointStore
from descant.testing.checkpoint_store import NAME, committed

async def main():
    store = DirCheckpointStore(sys.argv[1])
    print("started", flush=True)
    for number in range(int(sys.argv[2]), 10**9):
        await committed(store, NAME, str(number).encode() * 50_000)
        print(number, flush=True)

asyncio.run(main())
"""


WITHOUT_EXCHANGE = "RealDisk.exchange = lambda self, one, other: False"


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
async def test_a_kill_at_any_moment_leaves_the_last_good_checkpoint(tmp_path: Path, exchange: bool) -> None:
    """One writer replaces one name over and over and is killed 10 times; what it acknowledged, or newer, is there."""
    random.seed(1)
    code = WRITER if exchange else WRITER.replace("async def", f"{WITHOUT_EXCHANGE}\nasync def", 1)
    acknowledged = -1
    for _ in range(10):
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(tmp_path), str(acknowledged + 1), stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        await writer.stdout.readline()
        for _ in range(random.randrange(1, 6)):
            acknowledged = int(await writer.stdout.readline())
        await asyncio.sleep(random.uniform(0, 0.02))  # somewhere inside the next commit
        writer.send_signal(signal.SIGKILL)
        rest, _ = await writer.communicate()
        acknowledged = max([acknowledged, *map(int, rest.decode().split("\n")[:-1])])

        store = DirCheckpointStore(tmp_path)
        checkpoint = await store.open(NAME)
        number = checkpoint.manifest.step // 50_000  # digits of the number that was written
        body = body_of(checkpoint)
        assert body == body[: len(body) // 50_000] * 50_000, "a torn file"
        assert len(body) == checkpoint.manifest.files["adapter_model.safetensors"].size_bytes
        assert number == len(str(int(body[:number])))
        assert int(body[:number]) >= acknowledged
        assert len(await store.list()) == 1
        assert os.listdir(tmp_path / "attempts") == []


class FullDisk(RealDisk):
    full = False

    def create(self, path: PathLike) -> DiskFile:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().create(path)


async def test_a_full_disk_is_told_and_changes_nothing(tmp_path: Path) -> None:
    disk = FullDisk()
    store = DirCheckpointStore(tmp_path, disk=disk)
    await committed(store, NAME, b"one")
    attempt, manifest = await written(store, NAME, b"two")
    disk.full = True
    with pytest.raises(CannotStore, match="the data directory is full") as raised:
        await store.commit(NAME, attempt, manifest)
    assert str(tmp_path) not in str(raised.value)
    assert body_of(await store.open(NAME)) == b"one"
    with pytest.raises(NotFound):
        await store.open(CheckpointName(model_id="m", type="weights", name="a"))


async def test_who_reads_what_is_deleted_or_replaced_meanwhile_is_told_so(tmp_path: Path) -> None:
    """The reader has read the manifest; then the files go."""
    store = DirCheckpointStore(tmp_path)
    before = await committed(store, NAME, b"one")
    await committed(store, NAME, b"two")
    with pytest.raises(UserError, match="was replaced while it was read; load it again"):
        read_verified(before.directory, "adapter_model.safetensors", before.manifest)
    await store.delete(NAME)
    with pytest.raises(NotFound, match="there is no checkpoint"):
        read_verified(before.directory, "adapter_model.safetensors", before.manifest)


async def test_an_import_that_runs_outlives_a_start_and_a_dead_one_does_not(tmp_path: Path) -> None:
    importing = DirCheckpointStore(tmp_path, beside=True)
    live, manifest = await written(importing, NAME, b"imported")
    dead = await importing.attempt(NAME)
    os.utime(dead, (0, 0))
    store = DirCheckpointStore(tmp_path)
    assert [str(path) for path in (tmp_path / "attempts").iterdir()] == [live]
    await importing.commit(NAME, live, manifest)
    assert body_of(await store.open(NAME)) == b"imported"


async def test_an_epoch_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    DirCheckpointStore(tmp_path)
    (tmp_path / "epoch").write_text("two")
    with pytest.raises(ServerError, match="expected a number: how often a server has started here"):
        DirCheckpointStore(tmp_path)


def test_a_reader_gets_its_bytes_or_a_sentence_never_a_half(tmp_path: Path) -> None:
    """One thread saves, replaces and deletes; another opens, and reads file by file as a rank does."""
    store = CheckpointDirectory(tmp_path)
    files = ("adapter_model.safetensors", "optimizer.safetensors")
    ended = threading.Event()
    outcomes: Counter[str] = Counter()

    def read() -> None:
        while not ended.is_set():
            try:
                found = store.open(NAME)
                manifest = read_manifest(found.directory)
                bodies = {read_verified(found.directory, file, manifest) for file in files}
                outcomes["whole" if bodies == {b"%d" % manifest.step * 1000} else "half"] += 1
            except NotFound:
                outcomes["not there"] += 1
            except Damaged as error:
                outcomes[f"damaged: {error}"] += 1
            except UserError as error:
                outcomes[str(error)] += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(1, 100):
            attempt = store.attempt(NAME)
            body = b"%d" % step * 1000
            entries = {file: write_durable(Path(attempt) / file, body) for file in files}
            store.commit(NAME, attempt, replace(EMPTY, step=step, files=entries))
            if step % 3 == 0:
                store.delete(NAME)
    finally:
        ended.set()
        reader.join()
    assert outcomes["whole"] > 0
    assert outcomes.keys() <= {"whole", "not there", "the checkpoint was replaced while it was read; load it again"}


EMPTY = Manifest(
    base="b", owner="o", trainable=Lora(rank=4, seed=0), step=0, applied_seq_id=1, has_optimizer=True, files={}
)
