"""A database that takes no more, by SQLite's own limit (``max_page_count``) in place of a disk's end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from service_harness import PATIENCE_S, Harness
from sqlalchemy import Connection, text

from descant.errors import CannotStore, DescantError, ServerError
from descant.service.database import Database
from descant.service.future_store import SqlFutureStore
from descant.storage import DataDirectory
from descant.testing.clock import FakeClock
from descant.types import CreateModel, Encoded, ForwardBackward, FutureKey


def limit(pages: int):  # type: ignore[no-untyped-def]
    """The database may have so many pages more; 2^30: no limit."""

    def work(connection: Connection) -> None:
        used = connection.execute(text("PRAGMA page_count")).scalar_one()
        connection.execute(text(f"PRAGMA max_page_count = {used + pages}"))

    return work


async def until_refused(call: Callable[[int], Awaitable[object]]) -> int:
    """How often it could be called until no page had room for a row. It is refused by a status that nobody retries."""
    for number in range(10_000):
        try:
            await call(number)
        except CannotStore as error:
            refused = error
            break
    assert "the data directory is full" in refused.message
    assert refused.http_status == 400
    return number


FILL = text(
    "INSERT INTO sessions (session_id, owner, created_at, ended_at, tags, sdk_version) VALUES (:id, '', 0, 0, '[]', :x)"
)


async def fill(database: Database) -> None:
    """No page more, and none free."""
    await database.write(limit(0))
    row = {"x": "x" * 3000}
    await until_refused(lambda n: database.write(lambda c: c.execute(FILL, {**row, "id": f"filler {n}"})))


async def test_new_work_is_refused_at_once_and_goes_on_when_there_is_room(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    sampler = await harness.service.sampling.create_sampling_session(
        "alice", session_id=session, sampling_session_seq_id=0, base_model="fake", model_path=None
    )
    await harness.result(await harness.fb(model, 1))
    await fill(harness.database)

    await until_refused(lambda _: harness.session())
    first = 2 + await until_refused(lambda number: harness.fb(model, 2 + number))
    for seq_id in (first + 1, first + 2):
        await until_refused(lambda _, seq_id=seq_id: harness.fb(model, seq_id))  # type: ignore[misc]
    await until_refused(lambda number: harness.sample(sampler, number))
    await harness.database.write(limit(1 << 20))
    # The ids of what was refused are over: nobody waits for them. What was lost with them, the next step says.
    step = await harness.step(model, first + 3)
    assert "is full" in (await harness.error(step)).message
    await harness.result(await harness.fb(model, first + 4))
    await harness.result(await harness.step(model, first + 5))
    assert await harness.session()


async def test_a_result_that_cannot_be_written_is_given_and_written_later(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "db")
    store = SqlFutureStore(database, FakeClock())
    ids = [
        (await store.put(key=FutureKey(kind="train", scope="m", seq_id=n), owner="a", base="b", operation="x"))[0]
        for n in range(3)
    ]
    await fill(database)
    answer = Encoded(content_type="x", body=b"x" * 100_000)
    for request_id in ids:
        await asyncio.wait_for(store.resolve(request_id, answer), PATIENCE_S)
        assert (await store.get(request_id)).encoded == answer
    assert store.has_unsaved
    await store.save_unsaved()
    assert store.has_unsaved
    await database.write(limit(1 << 20))
    await store.save_unsaved()
    assert not store.has_unsaved
    again = SqlFutureStore(database, FakeClock())
    for request_id in ids:
        assert (await again.get(request_id)).encoded == answer
    await database.close()


async def test_answers_that_wait_for_room_are_bounded(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "db")
    store = SqlFutureStore(database, FakeClock(), max_unsaved_bytes=150_000)

    async def put(number: int) -> str:
        key = FutureKey(kind="train", scope="m", seq_id=number)
        return (await store.put(key=key, owner="a", base="b", operation="x"))[0]

    await database.write(limit(20))  # an answer is larger, a promise is not
    for number in range(2):
        await store.resolve(await put(number), Encoded(content_type="x", body=b"x" * 100_000))
    with pytest.raises(CannotStore, match="memory"):
        await put(2)
    await database.write(limit(1 << 20))
    await store.save_unsaved()
    await put(2)
    await database.close()


async def test_the_reserve_is_given_up_for_what_was_accepted_and_taken_back(tmp_path: Path) -> None:
    """``DataDirectory`` over a disk of which the test says how much is free."""
    free = 1000
    storage = DataDirectory(tmp_path, free=lambda _: free, reserve=300)
    storage.look()
    reserve = tmp_path / "reserve"
    assert reserve.stat().st_size == 300
    assert storage.trouble is None
    database = await Database.open(tmp_path / "db", storage)
    raised: list[DescantError] = []
    full = True

    def write(connection: Connection) -> str:
        if full and reserve.exists():
            connection.execute(text("PRAGMA max_page_count = 1"))
            connection.execute(text("CREATE TABLE filler AS SELECT zeroblob(100000) AS x"))
        connection.execute(text("PRAGMA max_page_count = 1000000"))
        return "written"

    assert await database.write(write) == "written", "the second time, in what the reserve left"
    assert not reserve.exists()
    assert "is full" in (storage.trouble or "")
    full, free = False, 400
    storage.look()
    assert not reserve.exists(), "there must be room for it twice"
    assert "is full" in (storage.trouble or "")
    free = 700
    storage.look()
    assert reserve.exists()
    assert storage.trouble is None
    free = 200
    storage.look()
    assert "is full" in (storage.trouble or "")
    assert not raised
    await database.close()


async def test_trouble_refuses_what_is_new_and_is_the_reason_of_what_waits(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    block = asyncio.Event()

    async def hook(what: object) -> None:
        await block.wait()

    harness.hook = hook
    running = await harness.fb(model, 1)
    harness.trouble = "the data directory is full"
    assert harness.trouble in await harness.pending(running)
    for call in (harness.session(), harness.create(session, 1)):
        with pytest.raises(CannotStore):
            await call
    block.set()
    await harness.result(running)
    error = await harness.error(await harness.save(model, 2, "a"))
    assert isinstance(error, CannotStore)
    await harness.result(await harness.step(model, 3))
    harness.trouble = None
    await harness.result(await harness.save(model, 4, "a"))


async def test_a_loss_that_cannot_be_written_down_is_told_and_written_later(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    saved = await harness.result(await harness.save(model, 1))
    block = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, CreateModel):
            raise ServerError("it cannot be made again")
        if isinstance(what, ForwardBackward):
            await block.wait()

    harness.hook = hook
    running = await harness.fb(model, 2)
    await fill(harness.database)
    await harness.database.write(lambda c: c.execute(text("PRAGMA query_only = 1")))
    await harness.die()
    assert saved.path in (await harness.error(running)).message
    await harness.database.write(lambda c: c.execute(text("PRAGMA query_only = 0")))
    await harness.database.write(limit(1 << 20))
    assert saved.path in (await harness.error(await harness.fb(model, 3))).message
    await harness.service.sweep()
    assert saved.path in (await harness.error(await harness.fb(model, 4))).message
    await harness.restart()
    assert saved.path in (await harness.error(await harness.fb(model, 5))).message
    block.set()


async def test_a_full_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = DataDirectory(tmp_path, free=lambda _: 1 << 40, reserve=1)
    database = await Database.open(tmp_path / "db", storage)
    await database.write(lambda c: c.execute(text("PRAGMA query_only = 1")))
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert not await database.probe()
    assert len(caplog.records) == 1
    assert "read-only" in (storage.trouble or "")
    await database.write(lambda c: c.execute(text("PRAGMA query_only = 0")))
    assert await database.probe()
    assert storage.trouble is None
    await database.close()
