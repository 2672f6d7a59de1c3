from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from service_harness import Harness, encode
from sqlalchemy import func, select

from descant.errors import NotFound, ServerError
from descant.service import schema
from descant.service.database import Database
from descant.service.future_store import SqlFutureStore
from descant.service.futures import Pending
from descant.service.registry import ModelRecord, Registry
from descant.service.schema import MIGRATIONS, migrate
from descant.testing.clock import FakeClock
from descant.types import Answer, Encoded, ForwardBackward, Full, FutureKey, Lora


async def test_the_store_does_not_grow_for_ever(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    first = await harness.fb(model, 1)
    for seq_id in range(2, 40):
        await harness.result(await harness.step(model, seq_id, lr=0.0))
        await harness.advance(1800.0)
        await harness.service.heartbeat("alice", session)
    (row,) = await harness.database.read(select(func.count()).select_from(schema.futures))
    assert row[0] <= 14, "what ended in the last six hours"
    with pytest.raises(NotFound):
        await harness.service.futures.retrieve_future("alice", first.request_id, timeout_s=0)


async def test_a_long_poll_ends_with_a_reason(harness: Harness) -> None:
    session = await harness.session()
    model, other = await harness.model(session), await harness.model(session, model_seq_id=1)
    release = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, ForwardBackward):
            await release.wait()

    harness.hook = hook
    running = await harness.fb(other, 1)
    queued = [await harness.fb(model, 1), await harness.step(model, 2)]
    now = "; now runs ForwardBackward, ForwardBackward"  # both models' first, held by the hook
    assert await harness.pending(running) == f"forward_backward (seq_id 1) runs now on fake/bigram, 3 tokens{now}"
    reason = await harness.pending(queued[1])
    assert "ahead of it are 1 requests of this model (first forward_backward, seq_id 1) and 1 of other models" in reason
    assert f"6 tokens{now}" in reason
    assert other not in reason
    poll = asyncio.create_task(harness.service.futures.retrieve_future("alice", queued[1].request_id, timeout_s=25.0))
    await harness.advance(24.0)
    assert not poll.done()
    await harness.advance(2.0)
    assert isinstance(await poll, Pending)
    poll = asyncio.create_task(harness.service.futures.retrieve_future("alice", queued[1].request_id, timeout_s=25.0))
    await harness.advance(1.0)
    release.set()
    state = await asyncio.wait_for(poll, 60.0)
    assert not isinstance(state, Pending), "woken, with no time passing"


async def test_an_answer_that_cannot_be_encoded_is_still_an_answer(harness: Harness) -> None:
    def picky(answer: Answer | Exception) -> Encoded:
        if not isinstance(answer, Exception):
            raise ValueError("no")
        return encode(answer)

    harness.service._jobs._encode = picky
    error = await harness.error(await harness.create(await harness.session()))
    assert isinstance(error, ServerError)
    assert "internal error" in error.message


# --------------------------------------------------------------------------------------------------------------------
# The database under it


async def test_writes_that_come_together_share_a_commit(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d")
    store = SqlFutureStore(database, FakeClock())
    before = database.num_commits

    async def put(seq_id: int) -> str:
        key = FutureKey(kind="train", scope="m", seq_id=seq_id)
        return (await store.put(key=key, owner="alice", base="b", operation="x"))[0]

    ids = await asyncio.gather(*(put(seq_id) for seq_id in range(50)))
    await asyncio.gather(*(store.resolve(id_, Encoded(content_type="t", body=b"")) for id_ in ids))
    assert database.num_commits - before <= 4
    before = database.num_commits
    await put(100)
    assert database.num_commits - before == 1
    await asyncio.gather(*(put(101) for _ in range(20)))
    assert len(store._entries) == 2, "what was sent again leaves nothing behind"
    await database.close()


async def test_one_bad_write_does_not_harm_its_neighbours(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d")
    store = SqlFutureStore(database, FakeClock())

    def bad(_connection: object) -> None:
        raise ValueError("bad")

    async def put(seq_id: int) -> tuple[str, bool]:
        return await store.put(
            key=FutureKey(kind="train", scope="m", seq_id=seq_id), owner="a", base="b", operation="x"
        )

    results = await asyncio.gather(put(1), database.write(bad), put(2), put(1), return_exceptions=True)
    assert isinstance(results[1], ValueError)
    assert results[0][0] == results[3][0]  # type: ignore[index]
    assert len(await store.pending()) == 2
    await database.close()
    with pytest.raises(ServerError, match="closed"):
        await put(3)


async def test_an_answer_that_cannot_be_written_is_given_and_written_later(tmp_path: Path) -> None:
    class Failing(SqlFutureStore):
        broken = False

        async def _save(self, answer, loss=None) -> None:  # type: ignore[no-untyped-def]
            if self.broken:
                raise OSError("disk full")
            await super()._save(answer, loss)

    database = await Database.open(tmp_path / "d")
    store = Failing(database, FakeClock())
    ids = [
        (await store.put(key=FutureKey(kind="train", scope="m", seq_id=n), owner="a", base="b", operation="x"))[0]
        for n in range(3)
    ]
    waiter = asyncio.create_task(store.get(ids[0], timeout_s=25.0))
    await asyncio.sleep(0)
    store.broken = True
    answer = Encoded(content_type="t", body=b"1")
    await store.resolve(ids[0], answer)
    assert (await asyncio.wait_for(waiter, 10.0)).encoded == answer
    assert (await store.get(ids[0])).encoded == answer
    await store.resolve(ids[0], Encoded(content_type="t", body=b"2"), failed=True)
    await store.resolve(ids[1], answer)
    assert {state.request_id for state in await store.pending()} == {ids[2]}
    store.broken = False
    await store.resolve(ids[2], answer)
    again = SqlFutureStore(database, FakeClock())
    assert not await again.pending()
    assert (await again.get(ids[0])).encoded == answer
    await database.close()


async def test_migrations_run_once_and_in_order(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d")
    await database.close()
    database = await Database.open(tmp_path / "d")
    (version,) = await database.read(select(schema.schema_version))
    assert version[0] == len(MIGRATIONS)
    ran = []
    with database._engine.begin() as connection:
        newer = [*MIGRATIONS, lambda _: ran.append(1), lambda _: ran.append(2)]
        assert migrate(connection, newer) == len(MIGRATIONS)
    assert ran == [1, 2]
    await database.close()
    with pytest.raises(ServerError, match="newer version"):
        await Database.open(tmp_path / "d")


async def test_a_database_of_adapters_alone_is_read(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "d")
    record = ModelRecord(
        model_id="m", session_id="s", owner="o", base="b", created_at=1.0, trainable=Lora(rank=3, train_mlp=False)
    )
    await Registry(database).add_model(record)
    await database.close()
    lora = {"rank": 3, "seed": None, "train_attn": True, "train_mlp": False, "train_unembed": True}
    with closing(sqlite3.connect(tmp_path / "d")) as connection, connection:
        connection.execute("ALTER TABLE models RENAME COLUMN trainable TO lora")
        connection.execute("UPDATE models SET lora = ?", [json.dumps(lora)])
        connection.execute("UPDATE schema_version SET version = 2")
    lost = replace(record, status="lost", status_reason="the server was restarted")
    for _ in range(2):
        database = await Database.open(tmp_path / "d")
        assert await Registry(database).model("m") == lost, "that server had no journal to make it again by"
        full = replace(record, model_id="full", trainable=Full())
        assert await Registry(database).add_model(full) == full
        await database.close()


async def test_every_table_says_whose(tmp_path: Path) -> None:
    for table in schema.metadata.sorted_tables:
        if table is not schema.schema_version:
            assert "owner" in table.c
            assert "base" in table.c or table is schema.sessions, "a session belongs to no base yet"
