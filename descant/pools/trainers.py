"""Several trainers of one base as one ``Trainer``: each model lives on one of them, and moves at rest.

    trainer = TrainerPool(traffic=traffic)
    trainer.add(0, replica)
    future = trainer.submit(command)            # to the replica where the model lives; a new one to the least loaded
    …
    lost = trainer.on_replica_death(0)          # what lived there; the others go on
    trainer.on_replica_restart(0)
    await trainer.rebalance()                   # now and then

A model's commands go to its replica, in order. A snapshot is saved where it was taken. A model at rest is moved from a
busy replica to an idle one, through files and the messages that saves and creations use anyway; its commands are queued
meanwhile. Engines get weights from here (``WeightSource``).

Must be used on one event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from descant.errors import DescantError, NotFound
from descant.pools.members import TrainerMember, running_of, stats_of
from descant.pools.placement import Load, PlacedModel, place, rebalance, size_of
from descant.pools.traffic import Traffic
from descant.pools.transfer import transferred
from descant.types import (
    CheckpointSource,
    Command,
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadState,
    Manifest,
    ModelCreated,
    ModelFacts,
    OptimStep,
    Rejected,
    Result,
    Snapshot,
    SnapshotKind,
    SnapshotRef,
    Version,
    input_length,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ModelPlacement:
    """Where a model lives, and what was asked of it."""

    model_id: str
    replica: int
    size: float
    exists: bool = False
    num_commands: int = 0
    num_open: int = 0
    gradient_since: int | None = None
    """Number of the last command that left a gradient, whole or lost."""
    changed: int = 0
    """Number of the last command that may have changed the weights."""
    queued: list[tuple[Command, asyncio.Future[Result]]] | None = None
    """While it moves: what was submitted meanwhile, in order."""

    @property
    def at_rest(self) -> bool:
        return self.exists and self.num_open == 0 and self.gradient_since is None and self.queued is None


@dataclass(slots=True, eq=False)
class TakenSnapshot:
    """``SnapshotWeights``. From the snapshot while it is held and has bytes, else from its model while that is what it
    was: a row that an engine shares is not handed out."""

    pool: TrainerPool
    ref: SnapshotRef
    model: ModelPlacement
    changed: int
    """``model.changed`` as it was."""
    has_bytes: bool
    replica: int | None
    """None once it was dropped, or its replica died."""

    @property
    def available(self) -> bool:
        return (self.replica is not None and self.has_bytes) or (
            self.model.exists and self.model.changed == self.changed
        )

    @asynccontextmanager
    async def files(self) -> AsyncIterator[str]:
        async def save(directory: str) -> Manifest:
            if self.replica is not None and self.has_bytes:
                return await self.pool.save(self.ref, directory)
            if not self.available:
                version = self.ref.version
                raise NotFound(
                    f"the weights of version {version.number} of model {version.model_id} are to be had no more"
                )
            return await self.pool.save_now(self.model, "sampler", directory)

        async with transferred(save, scratch=self.pool.scratch) as (directory, _):
            yield directory


class TrainerPool:
    """``Trainer``, ``WeightSource``, ``Progress`` and ``Measured``."""

    def __init__(
        self,
        members: Mapping[int, TrainerMember] | None = None,
        *,
        traffic: Traffic | None = None,
        scratch: Path | None = None,
    ):
        """``members``: by replica, for ``add``. ``scratch``: a directory for what is moved from one replica to another,
        readable by all; None: the system's."""
        self.scratch = scratch
        self._traffic = traffic or Traffic()
        self._members: dict[int, TrainerMember] = {}
        self._measured: set[int] = set()
        self._models: dict[str, ModelPlacement] = {}
        self._snapshots: dict[Version, TakenSnapshot] = {}
        self._num_own = 0
        for replica, member in (members or {}).items():
            self.add(replica, member)

    # ------------------------------------------------------------------------------------------------ members
    def add(self, replica: int, member: TrainerMember, *, measured: bool = False) -> None:
        """One that has started. ``measured``: its numbers are counted here; else an engine on the same replica does."""
        self._members[replica] = member
        if measured:
            self._measured.add(replica)

    @property
    def replicas(self) -> Collection[int]:
        return self._members.keys()

    @property
    def facts(self) -> ModelFacts:
        return next(iter(self._members.values())).facts

    @property
    def serving(self) -> bool:
        """Whether any member is."""
        return any(member.serving for member in self._members.values())

    def replica_of(self, model_id: str) -> int | None:
        """The one that a model lives on."""
        model = self._models.get(model_id)
        return None if model is None else model.replica

    def on_replica_death(self, replica: int) -> frozenset[str]:
        """Forgets what lived there: the models that are lost. One that was being moved away is among them, however far
        that has come; one that was only being created is not, and waits for the next rank. Until this is called
        requests for the lost fail with ``RankDied``, afterwards with ``NotFound``."""
        lost = [model for model in self._models.values() if model.replica == replica and model.exists]
        for model in lost:
            model.exists = False
            self._forget(model)
        for version, snapshot in list(self._snapshots.items()):
            if snapshot.replica == replica:
                snapshot.replica = None
                del self._snapshots[version]
        return frozenset(model.model_id for model in lost)

    def on_replica_restart(self, replica: int) -> None:
        """Once it serves again, holding nothing."""
        for model in list(self._models.values()):
            if model.replica == replica and not model.exists and model.num_open == 0:  # abandoned meanwhile
                self._forget(model)

    # ------------------------------------------------------------------------------------------------ Trainer
    def submit(self, command: Command) -> asyncio.Future[Result]:
        model = self._models.get(command.model_id)
        if isinstance(command, CreateModel) and (model is None or not self._members[model.replica].alive):
            model = self._place(command)
        if model is None:
            return self._anybody().submit(command)  # which says that there is no such model
        if model.queued is None:
            return self._forward(model, command)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        model.queued.append((command, future))
        return future

    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        return await self._holder(ref.version).save(ref, dest)

    async def drop(self, ref: SnapshotRef) -> None:
        snapshot = self._snapshots.pop(ref.version, None)
        if snapshot is not None and snapshot.replica is not None:
            member, snapshot.replica = self._members[snapshot.replica], None
            await member.drop(ref)

    # ------------------------------------------------------------------------------------------------ WeightSource
    def weights(self, version: Version) -> TakenSnapshot | None:
        return self._snapshots.get(version)

    # ------------------------------------------------------------------------------------------------ Measured
    async def stats(self) -> Mapping[str, float]:
        """The sum of those that serve and are measured here."""
        members = [m for replica, m in self._members.items() if replica in self._measured and m.serving]
        return await stats_of(members)

    # ------------------------------------------------------------------------------------------------ Progress
    def running(self) -> str:
        return running_of(self._members)

    # ------------------------------------------------------------------------------------------------ moves
    async def rebalance(self) -> int:
        """Moves models that are at rest where that evens the load out; how many. Their commands wait meanwhile."""
        num_moved = 0
        placed = [
            PlacedModel(model_id=m.model_id, replica=m.replica, load=self._load(m), movable=m.at_rest)
            for m in self._models.values()
        ]
        for move in rebalance(placed, self._background()):
            model = self._models.get(move.model_id)
            if model is not None and model.at_rest and model.replica == move.source:
                num_moved += await self.move(model.model_id, move.target)
        return num_moved

    async def move(self, model_id: str, target: int) -> bool:
        """A model at rest to another replica. Whether it has moved; if not, it is where it was and as it was."""
        model = self._models[model_id]
        source, model.queued = model.replica, []
        there = self._members[target]
        save = partial(self.save_now, model, "training")
        try:
            async with transferred(save, scratch=self.scratch) as (directory, manifest):
                origin = CheckpointSource(uri=f"a move of {model_id}", directory=directory, optimizer=True)
                await there.submit(CreateModel(model_id=model_id, trainable=manifest.trainable, source=origin))
                # From here to the end of the block nothing is awaited: it lives in one place for every caller.
                if not there.serving:
                    return False
                if self._models.get(model_id) is not model:  # it died with the replica that it was to leave
                    _look_at(there.submit(self._deletion(model)))
                    return False
                model.replica = target
                self._traffic.move(model_id, target)
                _look_at(self._members[source].submit(self._deletion(model)))
        except (DescantError, OSError) as error:
            log.warning("a model could not be moved from replica %d to replica %d: %s", source, target, error)
            return False
        else:
            log.info("a model moved from replica %d to replica %d", source, target)
            return True
        finally:
            queued, model.queued = model.queued, None
            for command, future in queued:
                _chain(self.submit(command), future)

    async def save_now(self, model: ModelPlacement, kind: SnapshotKind, dest: str) -> Manifest:
        """The model as it is at this moment, into an empty directory."""
        # Forwarded, not submitted: while the model moves, its clients' commands are queued and this one is not.
        command = Snapshot(model_id=model.model_id, seq_id=self._own_seq_id(), kind=kind)
        taken = await self._forward(model, command)
        assert isinstance(taken, SnapshotRef)
        try:
            return await self.save(taken, dest)
        finally:
            await self.drop(taken)

    def _deletion(self, model: ModelPlacement) -> DeleteModel:
        return DeleteModel(model_id=model.model_id, seq_id=self._own_seq_id())

    def _own_seq_id(self) -> int:
        """Of commands that no client sent: below every client's, so that no snapshot has another's version."""
        self._num_own += 1
        return -self._num_own

    # ------------------------------------------------------------------------------------------------ who
    def _place(self, command: CreateModel) -> ModelPlacement:
        loads = self._background()
        for model in self._models.values():
            if model.replica in loads:
                loads[model.replica] += self._load(model)
        if loads:
            replica = place(loads)
        else:  # where it waits
            waits_on = self._anybody()
            replica = next(number for number, member in self._members.items() if member is waits_on)
        model = ModelPlacement(model_id=command.model_id, replica=replica, size=size_of(command.trainable, self.facts))
        self._models[command.model_id] = model
        self._traffic.place(command.model_id, replica)
        return model

    def _background(self) -> dict[int, Load]:
        """What each replica that serves carries besides its models."""
        return {
            replica: Load(recent_tokens=self._traffic.of_replica(replica))
            for replica, member in self._members.items()
            if member.serving
        }

    def _load(self, model: ModelPlacement) -> Load:
        return Load(size=model.size, recent_tokens=self._traffic.of_model(model.model_id))

    def _anybody(self) -> TrainerMember:
        """One that serves, or is about to, if any is."""
        return max(self._members.values(), key=lambda member: (member.serving, member.alive))

    def _holder(self, version: Version) -> TrainerMember:
        """Where a snapshot was taken; for one that is nowhere, a member that says so."""
        snapshot, model = self._snapshots.get(version), self._models.get(version.model_id)
        if snapshot is not None and snapshot.replica is not None:
            return self._members[snapshot.replica]
        return self._anybody() if model is None else self._members[model.replica]

    # ------------------------------------------------------------------------------------------------ what happened
    def _forward(self, model: ModelPlacement, command: Command) -> asyncio.Future[Result]:
        model.num_commands += 1
        model.num_open += 1
        number = model.num_commands
        match command:
            case ForwardBackward():
                num_tokens = sum(input_length(datum.model_input) for datum in command.data)
                self._traffic.trained(model.model_id, num_tokens)
                if not command.forward_only:
                    model.gradient_since = number
            case Rejected(poisons_gradient=True):
                model.gradient_since = number
            case CreateModel() | OptimStep() | LoadState() | DeleteModel():
                model.changed = number
        future = self._members[model.replica].submit(command)
        future.add_done_callback(partial(self._ended, model, command, number, model.changed, model.replica))
        return future

    def _ended(
        self,
        model: ModelPlacement,
        command: Command,
        number: int,
        changed: int,
        replica: int,
        future: asyncio.Future[Result],
    ) -> None:
        """Called before the future's awaiters go on."""
        model.num_open -= 1
        if not future.cancelled() and future.exception() is None:
            result = future.result()
            match command:
                case CreateModel():
                    model.exists = True
                    if isinstance(result, ModelCreated):  # from a checkpoint, with the checkpoint's shape
                        model.size = size_of(result.trainable, self.facts)
                case DeleteModel():
                    model.exists = False
                case OptimStep() | LoadState():
                    if model.gradient_since is not None and model.gradient_since < number:
                        model.gradient_since = None
                case Snapshot() if isinstance(result, SnapshotRef):
                    self._snapshots[result.version] = TakenSnapshot(
                        pool=self,
                        ref=result,
                        model=model,
                        changed=changed,
                        has_bytes=command.for_disk,
                        replica=replica,
                    )
        gone = not model.exists and model.num_open == 0 and model.queued is None
        if gone and self._models.get(model.model_id) is model and self._members[model.replica].alive:
            self._forget(model)

    def _forget(self, model: ModelPlacement) -> None:
        if self._models.get(model.model_id) is model:
            del self._models[model.model_id]
            self._traffic.remove(model.model_id)


def _look_at(future: asyncio.Future[Result]) -> None:
    """It is not awaited; asyncio complains of errors that were not retrieved."""
    future.add_done_callback(lambda done: None if done.cancelled() else done.exception())


def _chain(inner: asyncio.Future[Result], outer: asyncio.Future[Result]) -> None:
    def done(inner: asyncio.Future[Result]) -> None:
        if outer.done():
            return
        if inner.cancelled():
            outer.cancel()
        elif (error := inner.exception()) is not None:
            outer.set_exception(error)
        else:
            outer.set_result(inner.result())

    inner.add_done_callback(done)
