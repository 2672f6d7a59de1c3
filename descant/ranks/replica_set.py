"""Several replicas of one base as one ``Trainer`` and ``Engine``: each adapter lives on one of them.

    replicas = await ReplicaSet.start(rank_specs(spec, gpus=("0", "1"), num_cores=8), on_death=...)
    future = replicas.submit(command)          # to the replica where the model lives; a new one to the least loaded
    …
    lost = replicas.bury(index)                # after a death: what was there and nowhere else; the others go on
    await replicas.restart(index)
    await replicas.rebalance()                 # now and then

A model's commands go to its replica, in order. A snapshot is saved where it was taken, a version is sampled where it is
published, the base model wherever least is running. Two things move, both through files and the messages that saves
and publications use anyway: a version that more is asked of than its replica can run at once is copied to an idle one,
and an adapter at rest is moved from a busy replica to an idle one (its commands wait meanwhile).

Must be used on one event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from descant.ckpt.manifest import MANIFEST, encode_manifest, read_manifest, write_durable
from descant.errors import DescantError, RankDied, ServerError
from descant.ports import Engine, Measured, Progress, Trainer
from descant.ranks.health import Death, Health
from descant.ranks.launch import Launcher, Phase, start_processes
from descant.ranks.placement import Load, PlacedModel, Prefixes, copy_target, is_worth_it, place, rebalance, size_of
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec
from descant.sample.pages import PAGE_TOKENS, page_keys
from descant.types import (
    CheckpointSource,
    Command,
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadState,
    Manifest,
    ModelCreated,
    OptimStep,
    Refused,
    Result,
    SampleDelta,
    SampleRequest,
    Snapshot,
    SnapshotKind,
    SnapshotRef,
    Version,
    input_length,
    input_tokens,
)

log = logging.getLogger(__name__)

HALF_LIFE_S = 60.0
"""How fast tokens stop being recent."""


class Member(Trainer, Engine, Progress, Measured, Protocol):
    """What a set needs of each of its replicas (``Replica``)."""

    @property
    def health(self) -> Health: ...
    @property
    def death(self) -> Death | None:
        """The last."""
        ...

    @property
    def alive(self) -> bool: ...
    @property
    def serving(self) -> bool:
        """Alive, and past its start."""
        ...

    async def restart(self, *, on_phase: Phase | None = None) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWithReplica:
    """What a dead replica held and no other does."""

    models: frozenset[str]
    versions: frozenset[Version]


@dataclass(slots=True)
class _Recent:
    """A count that forgets half of itself every ``HALF_LIFE_S``."""

    value: float = 0.0
    at: float = 0.0

    def add(self, count: float, now: float) -> None:
        self.value, self.at = self.read(now) + count, now

    def read(self, now: float) -> float:
        return float(self.value * 0.5 ** ((now - self.at) / HALF_LIFE_S))


@dataclass(slots=True, eq=False)
class _Home:
    """Where a model lives, and what was asked of it."""

    model_id: str
    replica: int
    size: float
    tokens: _Recent = field(default_factory=_Recent)
    exists: bool = False
    num_commands: int = 0
    num_open: int = 0
    gradient_since: int | None = None
    """Number of the last command that left a gradient, whole or lost."""
    changed: int = 0
    """Number of the last command that may have changed the weights."""
    held: list[tuple[Command, asyncio.Future[Result]]] | None = None
    """While it moves: what was submitted meanwhile, in order."""

    @property
    def at_rest(self) -> bool:
        return self.exists and self.num_open == 0 and self.gradient_since is None and self.held is None


@dataclass(slots=True, eq=False)
class _Places:
    """Where a version's weights are."""

    taken_on: int | None = None
    """The replica that holds the snapshot, until it is dropped."""
    row_on: int | None = None
    """The replica that keeps the row of an ephemeral snapshot, until the version is released."""
    published: set[int] = field(default_factory=set)
    on_file: SnapshotRef | None = None
    """What it was published by, if that named a directory."""
    source: tuple[_Home, int] | None = None
    """The model, and the number of its last change, that the weights are of."""
    tried: set[int] = field(default_factory=set)
    """Replicas that a copy was begun for."""
    copying: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> set[int]:
        return {*self.published, *({self.row_on} if self.row_on is not None else ())}


@dataclass(slots=True, eq=False)
class _Sampling:
    """A request. ``replica`` None: it waits for a copy of its version."""

    replica: int | None = None
    cancelled: bool = False


class ReplicaSet:
    """``Trainer``, ``Engine`` and ``Progress``. Made by ``start``, or over members that have started."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        scratch: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        """``scratch``: a directory for what is on its way from one replica to another, readable by all; None: the
        system's."""
        self._members = list(members)
        self._scratch = scratch
        self._now = now
        self.facts = members[0].facts
        self.capabilities = members[0].capabilities
        self._homes: dict[str, _Home] = {}
        self._places: dict[Version, _Places] = {}
        self._sampling: dict[str, _Sampling] = {}
        self._in_flight = [0] * len(members)
        self._prefixes = Prefixes()
        self._sampled = [_Recent() for _ in members]
        self._num_own = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------------ life
    @classmethod
    async def start(
        cls,
        specs: Sequence[RankSpec],
        *,
        launch: Launcher = start_processes,
        on_phase: Callable[[int, str], None] | None = None,
        on_death: Callable[[int], None] | None = None,
    ) -> ReplicaSet:
        """Starts a replica for each spec and waits until all serve. Raises what ``Replica.start`` raises, having ended
        the others. ``on_phase`` is told each step of a replica's start, ``on_death`` the number of one that died,
        after all that was pending on it failed."""

        def died(index: int, _: RankDied) -> None:
            if on_death is not None:
                on_death(index)

        starting = [
            asyncio.ensure_future(
                Replica.start(
                    spec,
                    launch=launch,
                    on_phase=None if on_phase is None else partial(on_phase, index),
                    on_death=partial(died, index),
                )
            )
            for index, spec in enumerate(specs)
        ]
        try:
            replicas = await asyncio.gather(*starting)
        except BaseException:
            for start in starting:
                start.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(outcome, Replica):
                    await outcome.close()
            raise
        spill_dir = specs[0].spill_dir
        return cls(replicas, scratch=None if spill_dir is None else Path(spill_dir).parent)

    async def close(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.close() for member in self._members))

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> Sequence[Member]:
        return tuple(self._members)

    @property
    def serving(self) -> bool:
        """Whether any replica is."""
        return any(member.serving for member in self._members)

    @property
    def missing(self) -> Sequence[int]:
        """Replicas that do not serve now."""
        return [index for index, member in enumerate(self._members) if not member.serving]

    def home(self, model_id: str) -> int | None:
        """The replica that a model lives on."""
        home = self._homes.get(model_id)
        return None if home is None else home.replica

    def bury(self, index: int) -> LostWithReplica:
        """Once a replica has died: forgets what it held, and says what of it is nowhere else. An adapter that was being
        moved away from it is among that, however far the move has come. Until then requests for what it held fail with
        ``RankDied``, afterwards with ``NotFound``."""
        models = {model_id for model_id, home in self._homes.items() if home.replica == index}
        for model_id in models:
            del self._homes[model_id]
        versions = set()
        for version, places in list(self._places.items()):
            was_served = bool(places.replicas)
            places.published.discard(index)
            places.tried.discard(index)
            places.taken_on = None if places.taken_on == index else places.taken_on
            places.row_on = None if places.row_on == index else places.row_on
            self._forget_if_nowhere(version)
            if was_served and not places.replicas:
                versions.add(version)
        return LostWithReplica(models=frozenset(models), versions=frozenset(versions))

    async def restart(self, index: int, *, on_phase: Phase | None = None) -> None:
        """A new rank for one that died, holding nothing. Raises ``ServerError`` if it does not come to serve."""
        self.bury(index)
        await self._members[index].restart(on_phase=on_phase)

    # ------------------------------------------------------------------------------------------------ Trainer
    def submit(self, command: Command) -> asyncio.Future[Result]:
        home = self._homes.get(command.model_id)
        if isinstance(command, CreateModel) and (home is None or not self._members[home.replica].alive):
            home = self._homes[command.model_id] = self._place(command)
        if home is None:
            return self._anybody().submit(command)  # which says that there is no such model
        if home.held is None:
            return self._forward(home, command)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        home.held.append((command, future))
        return future

    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        return await self._holder(ref.version).save(ref, dest)

    async def drop(self, ref: SnapshotRef) -> None:
        places = self._places.get(ref.version)
        if places is None or places.taken_on is None:
            return
        member, places.taken_on = self._members[places.taken_on], None
        self._forget_if_nowhere(ref.version)
        await member.drop(ref)

    # ------------------------------------------------------------------------------------------------ Engine
    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        if request.request_id in self._sampling:
            raise ServerError(f"request {request.request_id!r} runs already")
        sampling = self._sampling[request.request_id] = _Sampling()
        try:
            await self._room_for(request.version)
            if sampling.cancelled:
                return
            index = sampling.replica = self._sampler_of(request)
            self._count(index, request.version, input_length(request.prompt))
            self._in_flight[index] += request.num_samples
            try:
                async with aclosing(self._members[index].sample(request)) as deltas:  # type: ignore[type-var]
                    async for delta in deltas:
                        self._count(index, request.version, len(delta.tokens))
                        yield delta
            finally:
                self._in_flight[index] -= request.num_samples
        finally:
            del self._sampling[request.request_id]

    async def publish(self, ref: SnapshotRef) -> None:
        places = self._places.get(ref.version)
        index = self._publisher_of(ref, places)
        await self._members[index].publish(ref)
        places = self._places.setdefault(ref.version, _Places())
        places.published.add(index)
        places.on_file = None if ref.directory is None else ref

    async def release(self, version: Version) -> None:
        places = self._places.get(version)
        if places is not None and places.copying is not None:
            await asyncio.wait([places.copying])  # and whoever waited for the copy has gone on before us
        if places is None or self._places.get(version) is not places:
            return
        holders = places.replicas
        places.published, places.row_on = set(), None
        self._forget_if_nowhere(version)
        releases = (self._members[index].release(version) for index in holders)
        for outcome in await asyncio.gather(*releases, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, RankDied):  # which holds nothing
                raise outcome

    async def cancel(self, request_id: str) -> None:
        if (sampling := self._sampling.get(request_id)) is not None:
            sampling.cancelled = True
            if sampling.replica is not None:
                await self._members[sampling.replica].cancel(request_id)

    # ------------------------------------------------------------------------------------------------ Measured
    async def stats(self) -> Mapping[str, float]:
        """The sum of those that serve."""
        members = [member for member in self._members if member.serving]
        total: Counter[str] = Counter()
        for outcome in await asyncio.gather(*(member.stats() for member in members), return_exceptions=True):
            if isinstance(outcome, BaseException):
                if not isinstance(outcome, RankDied):
                    raise outcome
            else:
                total.update(outcome)
        return {**total, "replicas_serving": len(members)}

    # ------------------------------------------------------------------------------------------------ Progress
    def running(self) -> str:
        texts = [member.running() for member in self._members]
        if len(texts) == 1:
            return texts[0]
        return "; ".join(f"{text} (replica {index})" for index, text in enumerate(texts) if text)

    # ------------------------------------------------------------------------------------------------ balance
    async def rebalance(self) -> int:
        """Moves adapters that are at rest where that evens the load out; how many. Their commands wait meanwhile."""
        now, num_moved = self._now(), 0
        placed = [
            PlacedModel(model_id=home.model_id, replica=home.replica, load=self._load(home, now), movable=home.at_rest)
            for home in self._homes.values()
        ]
        background = {
            index: Load(recent_tokens=self._sampled[index].read(now))
            for index, member in enumerate(self._members)
            if member.serving
        }
        for move in rebalance(placed, background):
            home = self._homes.get(move.model_id)
            if home is not None and home.at_rest and home.replica == move.source:
                num_moved += await self._move(home, move.target)
        return num_moved

    async def _move(self, home: _Home, target: int) -> bool:
        """Whether it has moved. If not, it is where it was and as it was."""
        source, home.held = home.replica, []
        there = self._members[target]
        try:
            async with self._written(home, "training") as (ref, directory):
                origin = CheckpointSource(uri=f"a move of {home.model_id}", directory=directory, optimizer=True)
                await there.submit(CreateModel(model_id=home.model_id, lora=ref.lora, source=origin))
                # From here to the end of the block nothing is awaited: it lives in one place, whoever asks.
                if not there.serving:
                    return False
                if self._homes.get(home.model_id) is not home:  # it died with the replica that it was to leave
                    _look_at(there.submit(self._deletion(home)))
                    return False
                home.replica = target
                _look_at(self._members[source].submit(self._deletion(home)))
        except (DescantError, OSError) as error:
            log.warning("a model could not be moved from replica %d to replica %d: %s", source, target, error)
            return False
        else:
            log.info("a model moved from replica %d to replica %d", source, target)
            return True
        finally:
            held, home.held = home.held, None
            for command, future in held:
                _chain(self.submit(command), future)

    def _deletion(self, home: _Home) -> DeleteModel:
        return DeleteModel(model_id=home.model_id, seq_id=self._own_seq_id())

    async def _copy(self, version: Version, places: _Places, target: int) -> None:
        """Publishes a version on one more replica; if that is not possible, nothing has changed."""
        there, copied = self._members[target], False
        try:
            copied = await self._published_from_file(version, places, there) or await self._published_from_model(
                version, places, there
            )
        except (DescantError, OSError) as error:
            log.warning("a version could not be copied to replica %d: %s", target, error)
        places.copying = None
        if copied and self._places.get(version) is places:
            places.published.add(target)
            log.info("a version that is sampled much was copied to replica %d", target)
        elif there.serving:
            await there.release(version)

    @staticmethod
    async def _published_from_file(version: Version, places: _Places, there: Member) -> bool:
        ref = places.on_file
        if ref is None or ref.directory is None:
            return False
        await there.publish(ref)
        # It may have been replaced under the same name by the time it was read. A number never comes back.
        return (await asyncio.to_thread(read_manifest, ref.directory)).applied_seq_id == version.number

    async def _published_from_model(self, version: Version, places: _Places, there: Member) -> bool:
        """A rank does not hand out a row, but the model may still be what it was when it was published."""
        if places.source is None or places.source[0].changed != places.source[1]:
            return False
        async with self._written(places.source[0], "sampler") as (ref, directory):
            await there.publish(replace(ref, version=version, directory=directory))
        return True

    @asynccontextmanager
    async def _written(self, home: _Home, kind: SnapshotKind) -> AsyncIterator[tuple[SnapshotRef, str]]:
        """The model as it is now, in a directory of its own for as long as the block lasts."""
        directory = await asyncio.to_thread(tempfile.mkdtemp, dir=self._scratch, prefix="on-its-way-")
        try:
            # Forwarded, not submitted: while the model moves, its clients' commands are held and this one is not.
            taken = await self._forward(home, Snapshot(model_id=home.model_id, seq_id=self._own_seq_id(), kind=kind))
            assert isinstance(taken, SnapshotRef)
            try:
                manifest = await self.save(taken, directory)
            finally:
                await self.drop(taken)
            await asyncio.to_thread(write_durable, Path(directory) / MANIFEST, encode_manifest(manifest))
            yield taken, directory
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------ who
    def _own_seq_id(self) -> int:
        """Of commands that no client sent: below every client's, so that no snapshot has another's version."""
        self._num_own += 1
        return -self._num_own

    def _place(self, command: CreateModel) -> _Home:
        loads = self._loads()
        index = place(loads) if loads else 0  # which says how it died
        return _Home(model_id=command.model_id, replica=index, size=size_of(command.lora))

    def _loads(self) -> dict[int, Load]:
        now = self._now()
        loads = {
            index: Load(recent_tokens=self._sampled[index].read(now))
            for index, member in enumerate(self._members)
            if member.serving
        }
        for home in self._homes.values():
            if home.replica in loads:
                loads[home.replica] += self._load(home, now)
        return loads

    @staticmethod
    def _load(home: _Home, now: float) -> Load:
        return Load(size=home.size, recent_tokens=home.tokens.read(now))

    def _anybody(self) -> Member:
        return next((member for member in self._members if member.serving), self._members[0])

    def _holder(self, version: Version) -> Member:
        """Where a snapshot was taken; for one that nobody holds, somebody who says so."""
        places, home = self._places.get(version), self._homes.get(version.model_id)
        if places is not None and places.taken_on is not None:
            return self._members[places.taken_on]
        return self._anybody() if home is None else self._members[home.replica]

    def _publisher_of(self, ref: SnapshotRef, places: _Places | None) -> int:
        if places is not None:
            for index in (places.row_on, places.taken_on, *sorted(places.published)):
                if index is not None and (self._members[index].serving or ref.directory is None):
                    return index
        if ref.directory is not None:
            return self._idlest(range(len(self._members)))
        home = self._homes.get(ref.version.model_id)
        return self._members.index(self._anybody()) if home is None else home.replica

    def _sampler_of(self, request: SampleRequest) -> int:
        """The replica that has most of its prompt, if that is worth it, else the idlest."""
        among: Sequence[int] = range(len(self._members))
        if request.version is not None:
            places = self._places.get(request.version)
            if places is None or not places.replicas:
                return self._members.index(self._anybody())  # which says that it is not published
            among = sorted(places.replicas)
        index = self._idlest(among)
        if len(self._members) == 1:
            return index
        keys = list(page_keys(request.version, input_tokens(request.prompt)))
        (kept_on, num_pages), in_flight = self._prefixes.find(keys), self._in_flight
        if (
            num_pages > 0
            and kept_on in among
            and self._members[kept_on].serving
            and is_worth_it(
                num_pages * PAGE_TOKENS,
                in_flight[kept_on],
                in_flight[index],
                max_running=self.capabilities.max_running,
            )
        ):
            index = kept_on
        self._prefixes.note(keys, index)
        return index

    async def _room_for(self, version: Version | None) -> None:
        """Where a version is published, requests would only queue while another replica idles: the first begins a
        copy, and all wait for it. They start in the order in which they came."""
        places = None if version is None else self._places.get(version)
        if version is None or places is None:
            return
        in_flight = {index: self._in_flight[index] for index, m in enumerate(self._members) if m.serving}
        target = copy_target(in_flight, places.replicas, full=self.capabilities.max_running)
        if target is None:
            return
        if places.copying is None and target not in places.tried:
            places.tried.add(target)
            places.copying = asyncio.create_task(self._copy(version, places, target))
            self._tasks.add(places.copying)
            places.copying.add_done_callback(self._tasks.discard)
        if places.copying is not None:
            await asyncio.wait([places.copying])

    def _idlest(self, among: Sequence[int]) -> int:
        """With the fewest sequences in flight, of those that serve, if any does."""
        now = self._now()
        return min(
            among, key=lambda i: (not self._members[i].serving, self._in_flight[i], self._sampled[i].read(now), i)
        )

    # ------------------------------------------------------------------------------------------------ what happened
    def _forward(self, home: _Home, command: Command) -> asyncio.Future[Result]:
        home.num_commands += 1
        home.num_open += 1
        number = home.num_commands
        match command:
            case ForwardBackward():
                home.tokens.add(sum(input_length(datum.model_input) for datum in command.data), self._now())
                if not command.forward_only:
                    home.gradient_since = number
            case Refused(loses_gradient=True):
                home.gradient_since = number
            case CreateModel() | OptimStep() | LoadState() | DeleteModel():
                home.changed = number
        future = self._members[home.replica].submit(command)
        future.add_done_callback(partial(self._ended, home, command, number, home.changed, home.replica))
        return future

    def _ended(
        self,
        home: _Home,
        command: Command,
        number: int,
        changed: int,
        replica: int,
        future: asyncio.Future[Result],
    ) -> None:
        """Called before whoever awaits the future goes on."""
        home.num_open -= 1
        if not future.cancelled() and future.exception() is None:
            match command:
                case CreateModel():
                    created, home.exists = future.result(), True
                    if isinstance(created, ModelCreated):  # from a checkpoint, with the checkpoint's shape
                        home.size = size_of(created.lora)
                case DeleteModel():
                    home.exists = False
                case OptimStep() | LoadState():
                    if home.gradient_since is not None and home.gradient_since < number:
                        home.gradient_since = None
                case Snapshot():
                    version = Version(model_id=command.model_id, number=command.seq_id)
                    places = self._places.setdefault(version, _Places(source=(home, changed)))
                    places.taken_on = replica
                    if not command.for_disk:
                        places.row_on = replica
        gone = not home.exists and home.num_open == 0 and home.held is None
        if gone and self._homes.get(home.model_id) is home and self._members[home.replica].alive:
            del self._homes[home.model_id]

    def _forget_if_nowhere(self, version: Version) -> None:
        places = self._places.get(version)
        if places is not None and places.taken_on is None and not places.replicas:
            del self._places[version]

    def _count(self, index: int, version: Version | None, num_tokens: int) -> None:
        home = None if version is None else self._homes.get(version.model_id)
        recent = self._sampled[index] if home is None or home.replica != index else home.tokens
        recent.add(num_tokens, self._now())


def _look_at(future: asyncio.Future[Result]) -> None:
    """Nobody awaits it; asyncio complains of errors that nobody looked at."""
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
