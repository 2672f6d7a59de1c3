"""The seams. Each has a conformance suite in ``descant.testing`` which every implementation, the fake included, runs.

A port is two to five methods: what the service must be able to say, and no more. What an implementation may do besides
is a protocol of its own, never a ``hasattr``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from descant.types import (
    Checkpoint,
    CheckpointName,
    Command,
    CommandRecord,
    Encoded,
    EngineCapabilities,
    FutureKey,
    FutureState,
    Manifest,
    ModelFacts,
    Result,
    SampleDelta,
    SampleRequest,
    SnapshotRef,
    Version,
)


@runtime_checkable
class Trainer(Protocol):
    """Trains models on one base, of the kinds that ``facts.trains`` names.

    Commands of one model run in the order they were submitted, which must be rising ``seq_id`` (gaps are the
    service's business); commands of different models run in any order and share passes. One command's failure fails
    its own future only, with two exceptions that the protocol of training demands: after a backward that failed or
    was ``Rejected(poisons_gradient=True)`` the model's next ``OptimStep`` fails too and clears the gradient.
    """

    @property
    def facts(self) -> ModelFacts: ...

    def submit(self, command: Command) -> asyncio.Future[Result]:
        """Returns at once. The future ends by itself: with the result, or with a ``DescantError``.

        Raises nothing; a command the backend cannot do fails its future (``UserError``), and changes nothing: so a
        model of a kind that it does not train, and a checkpoint of another kind than the model's.
        A model that is not there: ``NotFound``. Must be called on the event loop's thread.
        """
        ...

    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        """Writes a snapshot's files into the empty directory ``dest``, each fsynced; training goes on meanwhile.

        Files of a LoRA model: ``adapter_model.safetensors`` and ``adapter_config.json`` as PEFT reads them, and for a
        training snapshot ``optimizer.safetensors``. The manifest's ``owner`` and ``base`` are left empty for the
        caller.
        Raises ``NotFound`` for a snapshot that was dropped or never taken with ``for_disk``, ``CannotStore`` where the
        disk takes no more.
        """
        ...

    async def drop(self, ref: SnapshotRef) -> None:
        """Frees what the snapshot holds for ``save``. Idempotent. Published versions stay until ``Engine.release``."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Samples any published version of any adapter, and the base model, on one base."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        """Yields until every one of ``num_samples`` has had a delta with a ``stop_reason``.

        Raises ``UserError`` naming the field, ``NotFound`` for a version that was never published or was released,
        ``Overloaded`` when its queue is full. Closing the iterator early cancels the request.
        """
        ...

    async def publish(self, ref: SnapshotRef) -> None:
        """After return, requests for ``ref.version`` are served; other requests go on. Idempotent.

        With ``ref.directory`` set the weights are read from there, now or at first use. Else they are what the trainer
        holds of ``ref``: with ``capabilities.shares_rows`` the rows that both compute with, else what the engine's
        ``WeightSource`` gives. Raises ``UserError`` for a kind of model that it does not sample
        (``capabilities.samples``).
        """
        ...

    async def release(self, version: Version) -> None:
        """No new request will name this version; requests that run finish undisturbed. Idempotent."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Ends a request; its iterator stops. Unknown ids are ignored."""
        ...


@runtime_checkable
class SnapshotWeights(Protocol):
    """One snapshot's weights, also once the snapshot has been dropped, for as long as
    its model is what it was then."""

    @property
    def replica(self) -> int | None:
        """The replica that holds the snapshot: an engine on the same one publishes its rows, and needs no files."""
        ...

    @property
    def available(self) -> bool:
        """Whether ``files`` has something to write, at this moment."""
        ...

    def files(self) -> AbstractAsyncContextManager[str]:
        """A private directory with PEFT files and their manifest, for as long as the block lasts.

        Raises ``NotFound`` where the weights are to be had no more, ``CannotStore`` where the disk takes no more.
        """
        ...


@runtime_checkable
class WeightSource(Protocol):
    """How an engine gets the weights of a trainer's snapshots."""

    @property
    def replicas(self) -> Collection[int]:
        """Those that models live on, by the numbers that engines have on the same replicas."""
        ...

    def weights(self, version: Version) -> SnapshotWeights | None:
        """Of a snapshot that was taken and not dropped."""
        ...


@runtime_checkable
class Progress(Protocol):
    """Optional for a ``Trainer`` and an ``Engine``: what it does at this moment, for those who wait."""

    def running(self) -> str:
        """A few words without ids of owners or models ("a training pass of 12 datums, 3400 tokens, for 3 models"); ""
        when idle. Costs no message and may be a moment old."""
        ...


@runtime_checkable
class Measured(Protocol):
    """Optional for a ``Trainer`` and an ``Engine``: numbers for those who watch it. What is both reports them once."""

    async def stats(self) -> Mapping[str, float]:
        """By name (lower case, underscores): of now, or since the start. Nobody's ids, tokens or texts."""
        ...


@runtime_checkable
class CheckpointStore(Protocol):
    """Whole checkpoints by name. A name is either absent or complete; a crash at any point leaves it one of the two."""

    async def attempt(self, name: CheckpointName) -> str:
        """A fresh empty directory that only this attempt writes into, on a file system that the ranks share."""
        ...

    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        """Makes the attempt visible under ``name``, durably, in one step. Replaces an older one of the same name
        atomically enough that at every moment one of the two can be opened.
        Raises ``ServerError`` if a file of the manifest is missing or has another size, or the attempt is another
        server's, ``CannotStore`` if the disk or the store takes no more; nothing is visible then."""
        ...

    async def abandon(self, attempt: str) -> None:
        """Removes a failed attempt. Idempotent."""
        ...

    async def open(self, name: CheckpointName) -> Checkpoint:
        """Its files are in ``directory``, to be read soon. Raises ``NotFound``, and ``Damaged`` for one whose manifest
        is not whole, or of whose files one is missing or has another size."""
        ...

    async def list(self, model_id: str | None = None) -> Sequence[Checkpoint]:
        """Newest first; a damaged one may be among them or not."""
        ...

    async def delete(self, name: CheckpointName) -> None:
        """Raises ``NotFound``."""
        ...


@runtime_checkable
class FutureStore(Protocol):
    """Promises made to clients. What was put is there after a restart; a finished one stays finished."""

    async def put(
        self, *, key: FutureKey, owner: str, base: str, operation: str, command: CommandRecord | None = None
    ) -> tuple[str, bool]:
        """The request id for this key, and whether it is new. Idempotent on ``(key, owner)``: the same submission
        sent twice, also at the same time, gets one id, and for exactly one caller it is new. The id is
        random. Durable on return, and with it ``command``, if it is new. Another owner's key is another key."""
        ...

    async def resolve(
        self, request_id: str, encoded: Encoded, *, failed: bool = False, loss: float | None = None
    ) -> None:
        """Ends a future and wakes who waits. A second resolve is ignored (the first answer stands). ``loss``: what a
        backward gave, to be kept with its command. Raises ``NotFound`` for an id never put."""
        ...

    async def get(self, request_id: str, *, timeout_s: float = 0.0) -> FutureState:
        """The state, waiting up to ``timeout_s`` for the end. Raises ``NotFound``. Waiting costs no polling."""
        ...

    async def pending(self) -> Sequence[FutureState]:
        """All unfinished ones, oldest first (for recovery)."""
        ...

    async def prune(
        self, *, finished_before: float, fetched: Collection[str] = (), max_owner_bytes: int | None = None
    ) -> int:
        """Forgets futures that ended before this time (seconds since the epoch, by the store's clock), of those that
        are ``fetched`` whatever has ended, and of each owner the oldest that ended until the bodies of the rest are at
        most ``max_owner_bytes``; how many. Ids that are not there are ignored."""
        ...


class Clock(Protocol):
    """Time as an argument. ``now``: seconds since the epoch, for records; ``monotonic``: for durations."""

    def now(self) -> float: ...
    def monotonic(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...
