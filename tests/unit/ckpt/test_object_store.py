"""Checkpoints in an object store that refuses, is slow, loses answers, changes bytes, and is used by two servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import obstore
import pytest

from descant.ckpt.local_copies import READ_WITHIN_S
from descant.ckpt.manifest import encode_manifest, read_verified, seal
from descant.ckpt.object_store import LEFT_ALONE, ObjectCheckpointStore
from descant.ckpt.remote import ObjectInfo, Remote, check_url, public_name
from descant.errors import CannotStore, Damaged, NotFound, ServerError, UserError
from descant.testing.checkpoint_store import NAME, body_of, committed, written
from descant.testing.s3_server import BUCKET, ENVIRONMENT, Proxy, s3_server
from descant.types import Checkpoint, CheckpointName

FILE = "adapter_model.safetensors"
TIMEOUT_S = 1.0
T = TypeVar("T")
OTHER = CheckpointName(model_id=NAME.model_id, type="weights", name="b")


@pytest.fixture
def remote() -> Remote:
    return Remote("memory:///")


async def started(
    remote: Remote, local: Path, *, max_local_bytes: int = 1 << 20, left_alone: timedelta = LEFT_ALONE
) -> ObjectCheckpointStore:
    store = ObjectCheckpointStore(remote, local, max_local_bytes=max_local_bytes, left_alone=left_alone)
    await store.start()
    return store


@pytest.fixture
async def store(remote: Remote, tmp_path: Path) -> AsyncIterator[ObjectCheckpointStore]:
    return await started(remote, tmp_path / "local")


def paths(remote: Remote) -> list[str]:
    return sorted(info["path"] for page in obstore.list(remote.store) for info in page)


def attempts(remote: Remote) -> set[str]:
    return {path.split("/")[1] for path in paths(remote) if path.startswith("files/")}


def is_there(checkpoint: Checkpoint) -> bool:
    """Its local copy."""
    return Path(checkpoint.directory).exists()


async def test_where_a_checkpoint_lies(remote: Remote, tmp_path: Path) -> None:
    checkpoint = await committed(await started(remote, tmp_path), NAME, b"one")
    attempt = Path(checkpoint.directory).name
    assert attempt.startswith("1-")
    assert paths(remote) == ["epoch", f"files/{attempt}/{FILE}", "names/session=3Atrain=3A0/weights/a"]


async def test_another_server_fetches_what_one_has_saved(remote: Remote, tmp_path: Path) -> None:
    one = await committed(await started(remote, tmp_path / "one"), NAME, b"one" * 1000)
    other = await started(remote, tmp_path / "other")
    found = await other.open(NAME)
    assert found.directory != one.directory
    assert found.manifest == one.manifest
    assert read_verified(found.directory, FILE, found.manifest) == b"one" * 1000
    again = await asyncio.gather(*(other.open(NAME) for _ in range(5)))
    assert {checkpoint.directory for checkpoint in again} == {found.directory}


async def test_a_replacement_removes_what_it_replaces(store: ObjectCheckpointStore, remote: Remote) -> None:
    one = await committed(store, NAME, b"one")
    other = await committed(store, NAME, b"other")
    assert attempts(remote) == {Path(other.directory).name}
    assert not is_there(one)
    await store.delete(NAME)
    assert paths(remote) == ["epoch"]


async def test_a_server_whose_time_is_over_commits_nothing(remote: Remote, tmp_path: Path) -> None:
    old = await started(remote, tmp_path / "old")
    attempt, manifest = await written(old, NAME, b"old")
    new = await started(remote, tmp_path / "new")
    with pytest.raises(CannotStore, match="another server has begun epoch 2 of memory:///, and this one's was 1"):
        await old.commit(NAME, attempt, manifest)
    with pytest.raises(ServerError, match="was written under epoch 1"):
        await new.commit(NAME, attempt, manifest)
    with pytest.raises(NotFound):
        await new.open(NAME)
    assert paths(remote) == ["epoch"]


class Meeting(Remote):
    """Two who look a name up see the same."""

    def __init__(self) -> None:
        super().__init__("memory:///")
        self.both = asyncio.Barrier(2)
        self.left = 2

    async def get(self, path: str) -> tuple[bytes, ObjectInfo]:
        try:
            return await super().get(path)
        finally:
            if path.startswith("names/") and self.left > 0:
                self.left -= 1
                await self.both.wait()


@pytest.mark.parametrize("is_replacement", [False, True], ids=["the first", "a replacement"])
async def test_of_two_commits_of_one_name_one_is_kept(tmp_path: Path, is_replacement: bool) -> None:
    """Each is put only in place of what it found there."""
    remote = Meeting()
    store = await started(remote, tmp_path)
    if is_replacement:
        remote.left = 0
        await committed(store, NAME, b"zero")
        remote.left = 2
    both = [await written(store, NAME, body) for body in (b"one", b"other")]
    results = await asyncio.gather(*(store.commit(NAME, *attempt) for attempt in both), return_exceptions=True)
    [refused] = [result for result in results if isinstance(result, BaseException)]
    assert "was saved or deleted by another server meanwhile" in str(refused)
    assert body_of(await store.open(NAME)) in (b"one", b"other")
    assert len(attempts(remote)) == 1


AT_ONCE = timedelta(days=-1)


async def test_a_start_removes_what_nobody_names_once_it_is_old(remote: Remote, tmp_path: Path) -> None:
    kept = await committed(await started(remote, tmp_path / "one"), NAME, b"kept")
    obstore.put(remote.store, f"files/1-dead/{FILE}", b"left by a server that died")
    await started(remote, tmp_path / "two")
    assert attempts(remote) == {Path(kept.directory).name, "1-dead"}
    store = await started(remote, tmp_path / "three", left_alone=AT_ONCE)
    assert attempts(remote) == {Path(kept.directory).name}
    assert body_of(await store.open(NAME)) == b"kept"


class Interrupted(Remote):
    """Something happens before a part of a file is fetched."""

    def __init__(self, then: Callable[[], Awaitable[object]]):
        super().__init__("memory:///")
        self.then: Callable[[], Awaitable[object]] | None = then

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        then, self.then = self.then, None
        if then is not None:
            await then()
        return await super().get_range(path, start, end)


@pytest.mark.parametrize("what", ["deleted", "replaced"])
async def test_what_is_deleted_or_replaced_while_it_is_fetched_is_said_to_be(tmp_path: Path, what: str) -> None:
    async def change() -> None:
        await (one.delete(NAME) if what == "deleted" else committed(one, NAME, b"two"))

    remote = Interrupted(change)
    other = await started(remote, tmp_path / "other")
    one = await started(remote, tmp_path / "one")
    await committed(one, NAME, b"one")
    expected = (NotFound, "there is no checkpoint") if what == "deleted" else (UserError, "open it again")
    with pytest.raises(expected[0], match=expected[1]):
        await other.open(NAME)
    if what == "replaced":
        assert body_of(await other.open(NAME)) == b"two"


class Killed(BaseException):
    pass


class Dying(Remote):
    """The process dies at its ``nth`` request, before or after it was done; from then on nothing of it is done."""

    def __init__(self, nth: int, *, after: bool):
        super().__init__("memory:///")
        self.left = nth
        self.after = after

    async def _ask(self, request: Callable[[], Awaitable[T]], *, writes: bool = False, in_parts: bool = False) -> T:
        self.left -= 1
        if self.left < 0 or (self.left == 0 and not self.after):
            raise Killed
        result = await super()._ask(request, writes=writes, in_parts=in_parts)
        if self.left == 0:
            raise Killed
        return result


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_server_that_dies_at_any_request_leaves_whole_checkpoints(tmp_path: Path, after: bool) -> None:
    """What was acknowledged is there, what is there is whole, and nothing else stays."""
    for nth in range(1, 1000):
        remote = Dying(nth, after=after)
        there: dict[CheckpointName, set[bytes | None]] = {NAME: {None}, OTHER: {None}}
        try:
            store = await started(remote, tmp_path / f"{nth}")
            for name, body in ((NAME, b"one"), (NAME, b"two"), (OTHER, b"three"), (OTHER, None), (NAME, b"four")):
                there[name].add(body)
                await (store.delete(name) if body is None else committed(store, name, body))
                there[name] = {body}
            break
        except Killed:
            remote.left = 10**6
        again = await started(remote, tmp_path / f"{nth} again", left_alone=AT_ONCE)
        listed = {checkpoint.name: checkpoint for checkpoint in await again.list()}
        for name, bodies in there.items():
            if name not in listed:
                assert None in bodies
                with pytest.raises(NotFound):
                    await again.open(name)
                continue
            found = await again.open(name)
            assert read_verified(found.directory, FILE, found.manifest) in bodies
        assert attempts(remote) == {Path(checkpoint.directory).name for checkpoint in listed.values()}
    assert nth > 30


@pytest.mark.parametrize("body", [b"two", b"on", b"ones"], ids=["other bytes", "shorter", "longer"])
async def test_what_was_changed_there_is_not_opened(remote: Remote, tmp_path: Path, body: bytes) -> None:
    one = await committed(await started(remote, tmp_path / "one"), NAME, b"one")
    obstore.put(remote.store, f"files/{Path(one.directory).name}/{FILE}", body)
    other = await started(remote, tmp_path / "other")
    with pytest.raises(Damaged, match=FILE):
        await other.open(NAME)
    assert list((tmp_path / "other" / "fetched").iterdir()) == list((tmp_path / "other" / "attempts").iterdir()) == []


@pytest.mark.parametrize(
    ("attempt", "file", "says"),
    [
        ("1-0123456789abcdef", "../../x", "'../../x' of the manifest is not a plain file name"),
        ("../../x", FILE, "'../../x', which is no attempt"),
    ],
)
async def test_what_is_there_leads_nowhere_else(
    remote: Remote, tmp_path: Path, attempt: str, file: str, says: str
) -> None:
    store = await started(remote, tmp_path)
    _, manifest = await written(store, NAME, b"one")
    manifest = replace(manifest, files={file: manifest.files[FILE]})
    fields = {"attempt": attempt, "order": [1, 1], "manifest": encode_manifest(manifest).decode()}
    obstore.put(remote.store, "names/session=3Atrain=3A0/weights/a", seal(fields))
    with pytest.raises(Damaged, match=says):
        await store.open(NAME)


async def test_the_least_recently_opened_copies_go(remote: Remote, tmp_path: Path) -> None:
    now = [0.0]
    store = ObjectCheckpointStore(remote, tmp_path, max_local_bytes=250, monotonic=lambda: now[0])
    await store.start()
    a, b = await committed(store, NAME, bytes(100)), await committed(store, OTHER, bytes(100))
    now[0] += READ_WITHIN_S
    await store.open(NAME)
    c = await committed(store, CheckpointName(model_id="m", type="weights", name="c"), bytes(100))
    assert [is_there(checkpoint) for checkpoint in (a, b, c)] == [True, False, True]
    assert body_of(await store.open(OTHER)) == bytes(100), "it is fetched again"
    assert is_there(a), "it was opened a moment ago"


async def test_copies_of_an_earlier_process_are_not_trusted(remote: Remote, tmp_path: Path) -> None:
    one = await committed(await started(remote, tmp_path), NAME, b"one")
    (Path(one.directory) / FILE).write_bytes(b"two")
    assert body_of(await (await started(remote, tmp_path)).open(NAME)) == b"one"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://bucket", "checkpoints.url is 'ftp://bucket', expected s3://BUCKET/PREFIX"),
        ("s3:///prefix", "expected s3://BUCKET/PREFIX"),
        ("/a/directory", "or nothing, for the data directory"),
        ("https://key:secret@host/bucket?sig=secret", "'https://host/bucket'"),
        ("s3://key:secret@bucket", "has a user or a query, expected neither: credentials are found in the environment"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        check_url(url)
    assert "secret" not in str(raised.value)


def test_a_store_is_named_without_secrets() -> None:
    assert public_name("s3://key:secret@bucket/prefix?x=secret#secret") == "s3://bucket/prefix"


# ------------------------------------------------------------------------------------------------------ S3, and trouble


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(s3) as proxy:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
async def s3_store(proxy: Proxy, tmp_path: Path) -> ObjectCheckpointStore:
    remote = Remote(f"s3://{BUCKET}/{tmp_path.name}", timeout_s=TIMEOUT_S)
    return await started(remote, tmp_path / "local")


@pytest.mark.parametrize("trouble", ["503", "503 to writes", "silence", "no permission"])
async def test_a_save_that_the_store_refuses_fails_and_the_next_works(
    s3_store: ObjectCheckpointStore, proxy: Proxy, trouble: str
) -> None:
    attempt, manifest = await written(s3_store, NAME, b"one")
    match trouble:
        case "503":
            proxy.answers(503)
        case "503 to writes":
            proxy.answers(503, "PUT")
        case "silence":
            proxy.is_silent()
        case "no permission":
            proxy.answers(403)
    why = {"silence": "did not answer in time", "no permission": "does not let the server in"}
    with pytest.raises(CannotStore, match=why.get(trouble, "answered HTTP 503")) as raised:
        await s3_store.commit(NAME, attempt, manifest)
    said = str(raised.value)
    assert s3_store.remote.name in said
    assert not any(secret in said for secret in (*ENVIRONMENT.values(), proxy.url, str(s3_store.remote.store)))
    await s3_store.abandon(attempt)
    proxy.sends_on()
    assert await s3_store.list() == []
    assert body_of(await committed(s3_store, NAME, b"two")) == b"two"
    assert body_of(await s3_store.open(NAME)) == b"two"


async def test_a_store_that_is_in_trouble_while_one_reads_is_named(
    s3_store: ObjectCheckpointStore, proxy: Proxy
) -> None:
    await committed(s3_store, NAME, b"one")
    proxy.answers(500)
    with pytest.raises(ServerError, match=f"the object store {s3_store.remote.name} answered HTTP 500"):
        await s3_store.open(NAME)
    proxy.sends_on()
    assert body_of(await s3_store.open(NAME)) == b"one"


async def test_a_commit_whose_answer_is_lost_is_whole_whatever_was_said(
    s3_store: ObjectCheckpointStore, proxy: Proxy
) -> None:
    """The name was put, the store says 503, and says so for ever: it is asked, and knows."""
    attempt, manifest = await written(s3_store, NAME, b"one")
    proxy.loses_answer("PUT", "/names/")
    await s3_store.commit(NAME, attempt, manifest)
    proxy.sends_on()
    assert body_of(await s3_store.open(NAME)) == b"one"
    assert [checkpoint.name for checkpoint in await s3_store.list()] == [NAME]


async def test_a_bucket_that_is_not_there_is_named(proxy: Proxy, tmp_path: Path) -> None:
    store = ObjectCheckpointStore(Remote("s3://nowhere/x", timeout_s=TIMEOUT_S), tmp_path, max_local_bytes=1)
    with pytest.raises(ServerError, match="the object store s3://nowhere/x has no such bucket"):
        await store.start()


async def test_a_server_that_is_not_there_is_named(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = ObjectCheckpointStore(Remote("s3://nowhere/x", timeout_s=TIMEOUT_S), tmp_path, max_local_bytes=1)
    with pytest.raises(ServerError, match="the object store s3://nowhere/x cannot be reached"):
        await store.start()


async def test_a_large_file_travels_in_parts(s3_store: ObjectCheckpointStore, proxy: Proxy, tmp_path: Path) -> None:
    body = bytes(range(256)) * (80 << 10)  # 20 MiB
    await committed(s3_store, NAME, body)
    assert sum("uploadId" in request for request in proxy.requests) > 3
    other = await started(s3_store.remote, tmp_path / "other", max_local_bytes=1)
    assert body_of(await other.open(NAME)) == body
