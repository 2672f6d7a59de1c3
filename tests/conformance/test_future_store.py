"""Every FutureStore runs the suite; and every clause of the suite is seen red, by a fake that breaks it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from descant.errors import NotFound
from descant.ports import FutureStore
from descant.service.database import Database
from descant.service.future_store import SqlFutureStore
from descant.testing.clock import FakeClock, settle
from descant.testing.future_store import FakeFutureDisk, FakeFutureStore, FutureStoreSuite
from descant.types import Encoded, FutureKey, FutureState


class FakeStorage:
    def __init__(self, make: type[FakeFutureStore] = FakeFutureStore) -> None:
        self.clock = FakeClock()
        self.disk = FakeFutureDisk()
        self.make = make

    async def open(self) -> FutureStore:
        return self.make(self.clock, self.disk)


class SqlStorage:
    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        self.path = path
        self.database: Database | None = None

    async def open(self) -> FutureStore:
        await self.close()
        self.database = await Database.open(self.path)
        return SqlFutureStore(self.database, self.clock)

    async def close(self) -> None:
        if self.database:
            await self.database.close()


class TestFake(FutureStoreSuite):
    @pytest.fixture
    def storage(self) -> FakeStorage:
        return FakeStorage()


class TestSql(FutureStoreSuite):
    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[SqlStorage]:
        storage = SqlStorage(tmp_path / "futures.sqlite")
        yield storage
        await storage.close()


# --------------------------------------------------------------------------------------------------------------------
# Fakes that each break one thing


class ForgetsTheOperation(FakeFutureStore):
    async def put(self, *, key: FutureKey, owner: str, base: str, operation: str) -> tuple[str, bool]:
        return await super().put(key=key, owner=owner, base=base, operation="")


class AlwaysNew(FakeFutureStore):
    async def put(self, *, key: FutureKey, owner: str, base: str, operation: str) -> tuple[str, bool]:
        self._disk.ids.pop((key, owner), None)
        return await super().put(key=key, owner=owner, base=base, operation=operation)


class LooksThenWrites(FakeFutureStore):
    async def put(self, *, key: FutureKey, owner: str, base: str, operation: str) -> tuple[str, bool]:
        if (key, owner) in self._disk.ids:
            return self._disk.ids[key, owner], False
        await asyncio.sleep(0)
        self._disk.ids.pop((key, owner), None)
        return await super().put(key=key, owner=owner, base=base, operation=operation)


class KeysWithoutKind(FakeFutureStore):
    async def put(self, *, key: FutureKey, owner: str, base: str, operation: str) -> tuple[str, bool]:
        key = FutureKey(kind="train", scope=key.scope, seq_id=key.seq_id)
        return await super().put(key=key, owner=owner, base=base, operation=operation)


class KeysWithoutOwner(FakeFutureStore):
    async def put(self, *, key: FutureKey, owner: str, base: str, operation: str) -> tuple[str, bool]:
        return await super().put(key=key, owner="", base=base, operation=operation)


class CountsIds(FakeFutureStore):
    async def put(self, *, key: FutureKey, owner: str, base: str, operation: str) -> tuple[str, bool]:
        request_id, new = await super().put(key=key, owner=owner, base=base, operation=operation)
        if new:
            row = self._disk.rows.pop(request_id)
            request_id = f"{len(self._disk.rows):032}"
            self._disk.ids[key, owner] = request_id
            self._disk.rows[request_id] = row
        return request_id, new


class ForgetsThatItFailed(FakeFutureStore):
    async def resolve(self, request_id: str, encoded: Encoded, *, failed: bool = False) -> None:
        await super().resolve(request_id, encoded)


class TheLastAnswerStands(FakeFutureStore):
    async def resolve(self, request_id: str, encoded: Encoded, *, failed: bool = False) -> None:
        self._row(request_id).finished_at = None
        await super().resolve(request_id, encoded, failed=failed)


class ResolvesAnything(FakeFutureStore):
    async def resolve(self, request_id: str, encoded: Encoded, *, failed: bool = False) -> None:
        try:
            await super().resolve(request_id, encoded, failed=failed)
        except NotFound:
            return


class AlwaysWaits(FakeFutureStore):
    async def get(self, request_id: str, *, timeout_s: float = 0.0) -> FutureState:
        return await super().get(request_id, timeout_s=timeout_s or 1.0)


class NeverWakes(FakeFutureStore):
    def _event(self, request_id: str) -> asyncio.Event:
        return asyncio.Event()


class WakesEverybody(FakeFutureStore):
    def _event(self, request_id: str) -> asyncio.Event:
        return self._ended.setdefault("", asyncio.Event())


class WaitsForEver(FakeFutureStore):
    async def get(self, request_id: str, *, timeout_s: float = 0.0) -> FutureState:
        return await super().get(request_id, timeout_s=timeout_s * 1000)


class CancelsTogether(FakeFutureStore):
    def __init__(self, clock: FakeClock, disk: FakeFutureDisk | None = None):
        super().__init__(clock, disk)
        self._wait: asyncio.Task[FutureState] | None = None

    async def get(self, request_id: str, *, timeout_s: float = 0.0) -> FutureState:
        if self._wait is None:
            self._wait = asyncio.create_task(super().get(request_id, timeout_s=timeout_s))
        return await self._wait


class PendingByName(FakeFutureStore):
    async def pending(self) -> list[FutureState]:
        return sorted(await super().pending(), key=lambda state: state.key.seq_id)


class PendingForEver(FakeFutureStore):
    async def pending(self) -> list[FutureState]:
        return [row.state for row in self._disk.rows.values()]


class PrunesUnfinished(FakeFutureStore):
    async def prune(self, **bounds: Any) -> int:
        for row in self._disk.rows.values():
            row.finished_at = row.finished_at or 1.0
        return await super().prune(**bounds)


class PrunesByNow(FakeFutureStore):
    async def prune(self, **bounds: Any) -> int:
        return await super().prune(**bounds | {"finished_before": self._clock.now() + 1})


class PrunesWhoeverIsLarge(FakeFutureStore):
    """All that an owner has who has too much."""

    async def prune(self, *, max_owner_bytes: int | None = None, **bounds: Any) -> int:
        sizes: Counter[str] = Counter()
        for row in self._disk.rows.values():
            sizes[row.state.owner] += len(row.state.encoded.body) if row.state.encoded else 0
        large = {owner for owner, size in sizes.items() if size > (max_owner_bytes or size)}
        theirs = {row.state.request_id for row in self._disk.rows.values() if row.state.owner in large}
        return await super().prune(**bounds | {"fetched": theirs})


class PrunesTheNewest(FakeFutureStore):
    async def prune(self, **bounds: Any) -> int:
        times = {id_: row.finished_at for id_, row in self._disk.rows.items()}
        for row in self._disk.rows.values():
            row.finished_at = row.finished_at and 1e18 - row.finished_at
        num_pruned = await super().prune(**bounds)
        for id_, row in self._disk.rows.items():
            row.finished_at = times[id_]
        return num_pruned


class ForgetsAtRestart(FakeFutureStore):
    def __init__(self, clock: FakeClock, disk: FakeFutureDisk | None = None):
        super().__init__(clock, FakeFutureDisk())


class ForgetsAnswersAtRestart(FakeFutureStore):
    def __init__(self, clock: FakeClock, disk: FakeFutureDisk | None = None):
        super().__init__(clock, disk)
        for row in self._disk.rows.values():
            row.finished_at = None


class EndsOnlyItsOwn(FakeFutureStore):
    def __init__(self, clock: FakeClock, disk: FakeFutureDisk | None = None):
        super().__init__(clock, disk)
        self._old = set(self._disk.rows)

    async def resolve(self, request_id: str, encoded: Encoded, *, failed: bool = False) -> None:
        if request_id not in self._old:
            await super().resolve(request_id, encoded, failed=failed)


class ImpatientSuite(FutureStoreSuite):
    patience_s = 0.05


@pytest.mark.parametrize(
    ("broken", "clause"),
    [
        (ForgetsTheOperation, "a_future_is_pending_with_what_was_put"),
        (AlwaysNew, "the_same_submission_gets_the_same_id"),
        (LooksThenWrites, "the_same_submission_at_once_is_new_to_one_caller"),
        (KeysWithoutKind, "keys_differ_by_kind_scope_seq_id_and_owner"),
        (KeysWithoutOwner, "keys_differ_by_kind_scope_seq_id_and_owner"),
        (CountsIds, "ids_are_random"),
        (ForgetsThatItFailed, "get_returns_the_answer_byte_for_byte"),
        (TheLastAnswerStands, "the_first_answer_stands"),
        (ResolvesAnything, "unknown_ids_are_not_found"),
        (AlwaysWaits, "get_without_a_timeout_does_not_wait"),
        (NeverWakes, "resolve_wakes_all_who_wait_without_time_passing"),
        (WakesEverybody, "resolve_wakes_all_who_wait_without_time_passing"),
        (WaitsForEver, "a_wait_ends_at_its_timeout"),
        (CancelsTogether, "one_who_stops_waiting_takes_nobody_along"),
        (PendingByName, "pending_are_the_unfinished_oldest_first"),
        (PendingForEver, "pending_are_the_unfinished_oldest_first"),
        (PrunesUnfinished, "prune_forgets_what_ended_before_and_nothing_else"),
        (PrunesByNow, "prune_forgets_what_ended_before_and_nothing_else"),
        (PrunesUnfinished, "prune_forgets_what_was_fetched_and_has_ended"),
        (PrunesByNow, "prune_forgets_what_was_fetched_and_has_ended"),
        (PrunesWhoeverIsLarge, "prune_forgets_the_oldest_of_an_owner_who_has_too_much"),
        (PrunesTheNewest, "prune_forgets_the_oldest_of_an_owner_who_has_too_much"),
        (ForgetsAtRestart, "everything_survives_a_restart"),
        (ForgetsAnswersAtRestart, "everything_survives_a_restart"),
        (EndsOnlyItsOwn, "what_was_pending_at_a_restart_can_be_waited_for_and_ended"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_the_suite_notices(broken: type[FakeFutureStore], clause: str) -> None:
    before = asyncio.all_tasks()
    with pytest.raises((AssertionError, TimeoutError, NotFound, asyncio.CancelledError, pytest.fail.Exception)):
        await getattr(ImpatientSuite(), f"test_{clause}")(FakeStorage(broken))
    for task in asyncio.all_tasks() - before:
        task.cancel()
    await settle()


def test_every_clause_is_seen_red() -> None:
    marks = test_the_suite_notices.pytestmark
    seen = {f"test_{clause}" for _, clause in marks[0].args[1]}
    assert seen == {name for name in dir(FutureStoreSuite) if name.startswith("test_")}
