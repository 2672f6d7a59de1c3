"""What every ``FutureStore`` must do, and a small one in memory that does it.

    class TestMine(FutureStoreSuite):
        @pytest.fixture
        async def storage(self, tmp_path):
            storage = MyStorage(tmp_path)      # has a ``clock`` and ``await open()``
            yield storage
            await storage.close()

``open`` called again is a restart: a new store over what the last one has written.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import pytest

from descant.errors import NotFound
from descant.ports import FutureStore
from descant.testing.clock import FakeClock, settle
from descant.types import CommandRecord, Encoded, FutureKey, FutureState


@dataclass(slots=True)
class _Row:
    state: FutureState
    finished_at: float | None = None
    command: CommandRecord | None = None


@dataclass(slots=True)
class FakeFutureDisk:
    """What survives a restart of a ``FakeFutureStore``."""

    rows: dict[str, _Row] = field(default_factory=dict)
    ids: dict[tuple[FutureKey, str], str] = field(default_factory=dict)


class FakeFutureStore:
    """``FutureStore`` in memory."""

    def __init__(self, clock: FakeClock, disk: FakeFutureDisk | None = None):
        self._clock = clock
        self._disk = disk or FakeFutureDisk()
        self._ended: dict[str, asyncio.Event] = {}

    async def put(
        self, *, key: FutureKey, owner: str, base: str, operation: str, command: CommandRecord | None = None
    ) -> tuple[str, bool]:
        request_id = self._disk.ids.get((key, owner))
        if request_id is not None:
            return request_id, False
        request_id = secrets.token_hex(16)
        state = FutureState(
            request_id=request_id, owner=owner, base=base, key=key, operation=operation, encoded=None, failed=False
        )
        self._disk.ids[key, owner] = request_id
        self._disk.rows[request_id] = _Row(state, command=command)
        return request_id, True

    async def resolve(
        self, request_id: str, encoded: Encoded, *, failed: bool = False, loss: float | None = None
    ) -> None:
        row = self._row(request_id)
        if row.finished_at is None:
            row.state = replace(row.state, encoded=encoded, failed=failed)
            row.finished_at = self._clock.now()
            self._event(request_id).set()

    async def get(self, request_id: str, *, timeout_s: float = 0.0) -> FutureState:
        row = self._row(request_id)
        if row.finished_at is None and timeout_s > 0:
            tasks = [
                asyncio.ensure_future(self._event(request_id).wait()),
                asyncio.ensure_future(self._clock.sleep(timeout_s)),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        return row.state

    async def pending(self) -> Sequence[FutureState]:
        return [row.state for row in self._disk.rows.values() if row.finished_at is None]

    async def prune(
        self, *, finished_before: float, fetched: Collection[str] = (), max_owner_bytes: int | None = None
    ) -> int:
        ended = [row for row in self._disk.rows.values() if row.finished_at is not None]
        old, kept = [], Counter[str]()
        for row in sorted(ended, key=lambda row: row.finished_at or 0.0, reverse=True):
            if (row.finished_at or 0.0) < finished_before or row.state.request_id in fetched:
                old.append(row)
                continue
            kept[row.state.owner] += 0 if row.state.encoded is None else len(row.state.encoded.body)
            if max_owner_bytes is not None and kept[row.state.owner] > max_owner_bytes:
                old.append(row)
        for row in old:
            del self._disk.rows[row.state.request_id]
            del self._disk.ids[row.state.key, row.state.owner]
            self._ended.pop(row.state.request_id, None)
        return len(old)

    def _row(self, request_id: str) -> _Row:
        if request_id not in self._disk.rows:
            raise NotFound(f"no request {request_id!r}: it never was, or its answer is no longer kept")
        return self._disk.rows[request_id]

    def _event(self, request_id: str) -> asyncio.Event:
        return self._ended.setdefault(request_id, asyncio.Event())


class FutureStorage(Protocol):
    """Where stores are opened, one after the other, over the same data."""

    clock: FakeClock

    async def open(self) -> FutureStore: ...


def _answer(text: str = "{}") -> Encoded:
    return Encoded(content_type="application/json", body=text.encode())


async def _put(store: FutureStore, seq_id: int = 1, *, owner: str = "alice", scope: str = "m") -> tuple[str, bool]:
    key = FutureKey(kind="train", scope=scope, seq_id=seq_id)
    return await store.put(key=key, owner=owner, base="tiny", operation="optim_step")


class FutureStoreSuite:
    patience_s = 10.0
    """Real seconds after which something that should end by itself is called a hang."""

    @pytest.fixture
    def storage(self) -> FutureStorage:
        raise NotImplementedError("a subclass says where its stores are opened")

    async def test_a_future_is_pending_with_what_was_put(self, storage: FutureStorage) -> None:
        store = await storage.open()
        key = FutureKey(kind="create", scope="session", seq_id=0)
        request_id, new = await store.put(key=key, owner="alice", base="tiny", operation="create_model")
        assert new
        assert await store.get(request_id) == FutureState(
            request_id=request_id, owner="alice", base="tiny", key=key, operation="create_model", encoded=None
        )

    async def test_the_same_submission_gets_the_same_id(self, storage: FutureStorage) -> None:
        store = await storage.open()
        first, _ = await _put(store)
        assert await _put(store) == (first, False)
        await store.resolve(first, _answer())
        assert await _put(store) == (first, False), "also after it has ended"

    async def test_the_same_submission_at_once_is_new_to_one_caller(self, storage: FutureStorage) -> None:
        store = await storage.open()
        puts = await asyncio.gather(*(_put(store) for _ in range(20)))
        assert len({request_id for request_id, _ in puts}) == 1
        assert [new for _, new in puts].count(True) == 1

    async def test_keys_differ_by_kind_scope_seq_id_and_owner(self, storage: FutureStorage) -> None:
        store = await storage.open()
        keys = [
            FutureKey(kind=kind, scope=scope, seq_id=seq_id)
            for kind in ("train", "create", "sampler", "sample", "custom_loss")
            for scope in ("a", "b")
            for seq_id in (0, 1, 10**18)
        ]
        puts = [
            await store.put(key=key, owner=owner, base="tiny", operation="x")
            for key in keys
            for owner in ("alice", "bob")
        ]
        assert all(new for _, new in puts)
        assert len({request_id for request_id, _ in puts}) == 2 * len(keys)

    async def test_ids_are_random(self, storage: FutureStorage) -> None:
        store = await storage.open()
        ids = [(await _put(store, seq_id))[0] for seq_id in range(8)]
        assert all(len(request_id) >= 20 for request_id in ids)
        assert len({request_id[:8] for request_id in ids}) == 8, "no common beginning"

    async def test_get_returns_the_answer_byte_for_byte(self, storage: FutureStorage) -> None:
        store = await storage.open()
        request_id, _ = await _put(store)
        encoded = Encoded(content_type="application/x-protobuf", body=bytes(range(256)))
        await store.resolve(request_id, encoded, failed=True)
        state = await store.get(request_id)
        assert state.encoded == encoded
        assert state.failed

    async def test_the_first_answer_stands(self, storage: FutureStorage) -> None:
        store = await storage.open()
        request_id, _ = await _put(store)
        await asyncio.gather(
            store.resolve(request_id, _answer("1")), store.resolve(request_id, _answer("2"), failed=True)
        )
        await store.resolve(request_id, _answer("3"), failed=True)
        state = await store.get(request_id)
        assert state.encoded == _answer("1")
        assert not state.failed

    async def test_unknown_ids_are_not_found(self, storage: FutureStorage) -> None:
        store = await storage.open()
        with pytest.raises(NotFound):
            await store.get("nobody")
        with pytest.raises(NotFound):
            await store.resolve("nobody", _answer())

    async def test_get_without_a_timeout_does_not_wait(self, storage: FutureStorage) -> None:
        store = await storage.open()
        request_id, _ = await _put(store)
        state = await asyncio.wait_for(store.get(request_id), self.patience_s)
        assert state.encoded is None

    async def test_resolve_wakes_all_who_wait_without_time_passing(self, storage: FutureStorage) -> None:
        store = await storage.open()
        request_id, _ = await _put(store)
        other_id, _ = await _put(store, 2)
        waiters = [asyncio.create_task(store.get(request_id, timeout_s=25.0)) for _ in range(10)]
        other = asyncio.create_task(store.get(other_id, timeout_s=25.0))
        await settle()
        await store.resolve(request_id, _answer())
        states = await asyncio.wait_for(asyncio.gather(*waiters), self.patience_s)
        assert all(state.encoded == _answer() for state in states)
        assert not other.done()
        other.cancel()

    async def test_a_wait_ends_at_its_timeout(self, storage: FutureStorage) -> None:
        store = await storage.open()
        request_id, _ = await _put(store)
        waiter = asyncio.create_task(store.get(request_id, timeout_s=25.0))
        await settle()
        await storage.clock.advance(24.0)
        assert not waiter.done()
        await storage.clock.advance(1.0)
        state = await asyncio.wait_for(waiter, self.patience_s)
        assert state.encoded is None

    async def test_one_who_stops_waiting_takes_nobody_along(self, storage: FutureStorage) -> None:
        store = await storage.open()
        request_id, _ = await _put(store)
        leaves, stays = (asyncio.create_task(store.get(request_id, timeout_s=25.0)) for _ in range(2))
        await settle()
        leaves.cancel()
        await settle()
        await store.resolve(request_id, _answer())
        assert (await asyncio.wait_for(stays, self.patience_s)).encoded == _answer()

    async def test_pending_are_the_unfinished_oldest_first(self, storage: FutureStorage) -> None:
        store = await storage.open()
        ids = [(await _put(store, seq_id))[0] for seq_id in (5, 3, 9, 1)]
        await store.resolve(ids[1], _answer())
        assert [state.request_id for state in await store.pending()] == [ids[0], ids[2], ids[3]]

    async def test_prune_forgets_what_ended_before_and_nothing_else(self, storage: FutureStorage) -> None:
        store = await storage.open()
        old, recent, unfinished = [(await _put(store, seq_id))[0] for seq_id in range(3)]
        await store.resolve(old, _answer())
        await storage.clock.advance(100.0)
        between = storage.clock.now()
        await storage.clock.advance(100.0)
        await store.resolve(recent, _answer())
        assert await store.prune(finished_before=between) == 1
        with pytest.raises(NotFound):
            await store.get(old)
        assert (await store.get(recent)).encoded == _answer()
        assert (await store.get(unfinished)).encoded is None
        assert await store.prune(finished_before=between) == 0

    async def test_prune_forgets_what_was_fetched_and_has_ended(self, storage: FutureStorage) -> None:
        store = await storage.open()
        fetched, other, pending = [(await _put(store, seq_id))[0] for seq_id in range(3)]
        for request_id in (fetched, other):
            await store.resolve(request_id, _answer())
        assert await store.prune(finished_before=0.0, fetched={fetched, pending, "nobody"}) == 1
        with pytest.raises(NotFound):
            await store.get(fetched)
        assert (await store.get(other)).encoded == _answer()
        assert (await store.get(pending)).encoded is None

    async def test_prune_forgets_the_oldest_of_an_owner_who_has_too_much(self, storage: FutureStorage) -> None:
        store = await storage.open()
        ids: dict[str, list[str]] = {"alice": [], "bob": []}
        for opening in range(2):
            for seq_id in range(5):
                for owner, text in (("alice", "x" * 100), ("bob", "x" * 10)):
                    ids[owner].append((await _put(store, 5 * opening + seq_id, owner=owner))[0])
                    await store.resolve(ids[owner][-1], _answer(text))
                await storage.clock.advance(1.0)
            assert await store.prune(finished_before=0.0, max_owner_bytes=1000) == 0
            store = await storage.open()
        pending, _ = await _put(store, 99)
        assert await store.prune(finished_before=0.0, max_owner_bytes=350) == 7
        assert await store.prune(finished_before=0.0, max_owner_bytes=350) == 0
        for request_id in ids["alice"][:7]:
            with pytest.raises(NotFound):
                await store.get(request_id)
        for request_id in [*ids["alice"][7:], *ids["bob"]]:
            assert (await store.get(request_id)).encoded is not None
        assert (await store.get(pending)).encoded is None
        late, _ = await _put(store, 100)
        await store.resolve(late, _answer("x" * 100))
        assert await store.prune(finished_before=0.0, max_owner_bytes=350) == 1
        assert (await store.get(late)).encoded is not None

    async def test_everything_survives_a_restart(self, storage: FutureStorage) -> None:
        store = await storage.open()
        finished, _ = await _put(store, 1)
        unfinished, _ = await _put(store, 2)
        await store.resolve(finished, _answer("result"), failed=True)
        store = await storage.open()
        state = await store.get(finished)
        assert state.encoded == _answer("result")
        assert state.failed
        assert await _put(store, 1) == (finished, False)
        assert await _put(store, 2) == (unfinished, False)
        assert [state.request_id for state in await store.pending()] == [unfinished]

    async def test_what_was_pending_at_a_restart_can_be_waited_for_and_ended(self, storage: FutureStorage) -> None:
        request_id, _ = await _put(await storage.open())
        store = await storage.open()
        waiter = asyncio.create_task(store.get(request_id, timeout_s=25.0))
        await settle()
        await store.resolve(request_id, _answer(), failed=True)
        state = await asyncio.wait_for(waiter, self.patience_s)
        assert state.encoded == _answer()
        assert state.failed
        assert await store.get(request_id) == state
        assert not await store.pending()
