"""One backend for a whole conformance suite: after each test, what the test made is deleted.

For backends that take seconds to start. The suites name their models and versions alike in every test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from descant.errors import DescantError
from descant.ranks.replica import Replica
from descant.types import (
    Command,
    CreateModel,
    DeleteModel,
    EngineCapabilities,
    Manifest,
    ModelFacts,
    Result,
    SampleDelta,
    SampleRequest,
    Snapshot,
    SnapshotRef,
    Version,
)

AFTER_ALL = 1 << 40
"""A seq_id that no test comes to."""


class SharedReplica:
    """``Trainer`` and ``Engine`` over a replica that outlives it."""

    def __init__(self, replica: Replica):
        self.facts: ModelFacts = replica.facts
        self.capabilities: EngineCapabilities = replica.capabilities
        self._replica = replica
        self._models: set[str] = set()
        self._taken: list[asyncio.Future[Result]] = []
        self._published: set[Version] = set()

    def submit(self, command: Command) -> asyncio.Future[Result]:
        future = self._replica.submit(command)
        match command:
            case CreateModel(model_id=model_id):
                self._models.add(model_id)
            case Snapshot():
                self._taken.append(future)
        return future

    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        return await self._replica.save(ref, dest)

    async def drop(self, ref: SnapshotRef) -> None:
        await self._replica.drop(ref)

    def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        return self._replica.sample(request)

    async def publish(self, ref: SnapshotRef) -> None:
        self._published.add(ref.version)
        await self._replica.publish(ref)

    async def release(self, version: Version) -> None:
        await self._replica.release(version)

    async def cancel(self, request_id: str) -> None:
        await self._replica.cancel(request_id)

    async def clean_up(self) -> None:
        """Waits for what is open, then deletes everything."""
        for outcome in await asyncio.gather(*self._taken, return_exceptions=True):
            if isinstance(outcome, SnapshotRef):
                self._published.add(outcome.version)
                await self._replica.drop(outcome)
        for version in self._published:
            await self._replica.release(version)
        deletions = [
            self._replica.submit(DeleteModel(model_id=model_id, seq_id=AFTER_ALL)) for model_id in self._models
        ]
        for outcome in await asyncio.gather(*deletions, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, DescantError):
                raise outcome
