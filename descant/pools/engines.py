"""Several engines of one base as one ``Engine``: each version is published on one of them, or on more.

    engine = EnginePool(source=trainer, traffic=traffic)
    engine.add(0, replica)
    await engine.publish(ref)                   # where its row is, or from files that ``source`` writes
    …
    lost = engine.on_replica_death(0)           # versions that are nowhere else and cannot be had again
    engine.on_replica_restart(0)

A request goes where its version is published, the base's wherever least is running (``pools.router``). A version that
more is asked of than its engines can run at once is copied to an idle one. One that a dead engine alone had is
published again, if its weights are still to be had; requests for it wait.

Must be used on one event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from descant.ckpt.manifest import read_manifest
from descant.errors import DescantError, NotFound, RankDied, ServerError
from descant.pools.members import EngineMember, running_of, stats_of
from descant.pools.router import Router, copy_target
from descant.pools.traffic import Traffic
from descant.ports import SnapshotWeights, WeightSource
from descant.types import EngineCapabilities, SampleDelta, SampleRequest, SnapshotRef, Version, input_length

log = logging.getLogger(__name__)

Outcomes = Mapping[int, Exception | None]
"""Of one publication, by replica. None: it is published there."""


@dataclass(slots=True, eq=False)
class VersionLocations:
    """Where a version is published, and where its weights come from."""

    ref: SnapshotRef
    """What it was published by."""
    weights: SnapshotWeights | None
    published: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)
    """Replicas that a copy was begun for."""
    transfer: asyncio.Task[None] | None = None
    """A copy, or a publication in place of those that died. Requests wait for it."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request. ``replica`` None: it waits for a transfer."""

    request: SampleRequest
    replica: int | None = None
    cancelled: bool = False


class EnginePool:
    """``Engine``, ``Progress`` and ``Measured``."""

    def __init__(
        self,
        members: Mapping[int, EngineMember] | None = None,
        *,
        source: WeightSource,
        traffic: Traffic | None = None,
        on_lost: Callable[[Version], None] | None = None,
    ):
        """``members``: by replica, for ``add``. ``on_lost`` is called for a version that ``on_replica_death`` had not
        lost, and that could not be published again."""
        self._source = source
        self._traffic = traffic or Traffic()
        self._on_lost = on_lost
        self._members: dict[int, EngineMember] = {}
        self._router = Router(self._members, self._traffic)
        self._versions: dict[Version, VersionLocations] = {}
        self._of_model: dict[str, set[Version]] = {}
        self._running: dict[str, _Running] = {}
        self._restarted = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        for replica, member in (members or {}).items():
            self.add(replica, member)

    # ------------------------------------------------------------------------------------------------ members
    def add(self, replica: int, member: EngineMember) -> None:
        """One that has started, of the capabilities of the others."""
        self._members[replica] = member

    @property
    def capabilities(self) -> EngineCapabilities:
        first = next(iter(self._members.values()))
        shares_rows = all(replica in self._members for replica in self._source.replicas)
        return replace(first.capabilities, shares_rows=shares_rows)

    @property
    def serving(self) -> bool:
        """Whether any member is."""
        return any(member.serving for member in self._members.values())

    def replicas_of(self, version: Version) -> frozenset[int]:
        """Those that it is published on."""
        locations = self._versions.get(version)
        return frozenset() if locations is None else frozenset(locations.published)

    def on_replica_death(self, replica: int) -> frozenset[Version]:
        """Forgets what was published there: the versions that are lost, since they are nowhere else and their weights
        are to be had no more. To be called after ``source`` knows of the death."""
        lost = set()
        for version, locations in list(self._versions.items()):
            locations.tried.discard(replica)
            if replica not in locations.published:
                continue
            locations.published.discard(replica)
            if locations.published:
                continue
            # A file of its own is found again by who asks for it: it may be another's by then.
            weights = locations.weights
            if locations.ref.directory is None and weights is not None and weights.available:
                if locations.transfer is None:  # else a copy is under way
                    self._begin(locations, self._republish(locations, weights))
            else:
                self._forget(version)
                lost.add(version)
        return frozenset(lost)

    def on_replica_restart(self, replica: int) -> None:
        """Once it serves again, holding nothing."""
        self._restarted.set()

    async def close(self) -> None:
        """Ends what it does by itself; members are their owner's to close. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ Engine
    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        if request.request_id in self._running:
            raise ServerError(f"request {request.request_id!r} runs already")
        running = self._running[request.request_id] = _Running(request)
        try:
            await self._room_for(self._newest(request).version)
            if running.cancelled:
                return
            request = self._newest(request)
            replica = running.replica = self._replica_for(request)
            self._count(replica, request.version, input_length(request.prompt))
            self._router.begin(replica, request.num_samples)
            try:
                async with aclosing(self._members[replica].sample(request)) as deltas:  # type: ignore[type-var]
                    async for delta in deltas:
                        self._count(replica, request.version, len(delta.tokens))
                        yield delta
            finally:
                self._router.end(replica, request.num_samples)
        finally:
            del self._running[request.request_id]

    async def publish(self, ref: SnapshotRef) -> None:
        locations = self._versions.get(ref.version)
        weights = self._source.weights(ref.version) or (locations.weights if locations is not None else None)
        published = self.replicas_of(ref.version)
        row = None if weights is None or weights.replica not in self._members else weights.replica
        if ref.directory is not None:
            holders = [replica for replica in (row, *sorted(published)) if replica is not None]
            serving = [replica for replica in holders if self._members[replica].serving]
            targets = self._targets(ref.version, first=serving[0] if serving else None)
        elif row is not None:
            targets = [row]
        elif published:
            return
        elif weights is not None:
            await self._publish_files(ref, weights)
            return
        else:
            raise NotFound(f"there is no snapshot {ref.version.number} of model {ref.version.model_id} to publish")
        self._record(ref, weights, await self._publish_on(targets, ref))

    async def release(self, version: Version) -> None:
        locations = self._versions.get(version)
        if locations is not None and locations.transfer is not None:
            if not locations.published:  # it may be waited for until a replica has started again
                locations.transfer.cancel()
            await asyncio.wait([locations.transfer])  # and others that waited for it have gone on before us
        if self._versions.get(version) is not locations:
            return
        holders = set() if locations is None else set(locations.published)
        weights = self._source.weights(version)
        if weights is not None and weights.replica in self._members:  # a row that was not published yet
            holders.add(weights.replica)
        self._forget(version)
        releases = (self._members[replica].release(version) for replica in holders)
        for outcome in await asyncio.gather(*releases, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, RankDied):  # which holds nothing
                raise outcome

    async def cancel(self, request_id: str) -> None:
        if (running := self._running.get(request_id)) is not None:
            running.cancelled = True
            if running.replica is not None:
                await self._members[running.replica].cancel(request_id)

    # ------------------------------------------------------------------------------------------------ Measured
    async def stats(self) -> Mapping[str, float]:
        """The sum of those that serve."""
        return await stats_of([member for member in self._members.values() if member.serving])

    # ------------------------------------------------------------------------------------------------ Progress
    def running(self) -> str:
        return running_of(self._members)

    # ------------------------------------------------------------------------------------------------ publishing
    def _targets(self, version: Version, *, first: int | None = None) -> list[int]:
        """For weights in files: ``first``, else the idlest; and wherever a request runs that goes on with its model's
        newest."""
        first = self._router.idlest(self._members) if first is None else first
        following = {
            running.replica
            for running in self._running.values()
            if running.replica is not None
            and running.request.inflight
            and running.request.version is not None
            and running.request.version.model_id == version.model_id
            and self._members[running.replica].serving
        }
        return [first, *sorted(following - {first})]

    async def _publish_on(self, replicas: Collection[int], ref: SnapshotRef) -> Outcomes:
        async def on(replica: int) -> Exception | None:
            try:
                await self._members[replica].publish(ref)
            except (DescantError, OSError) as error:
                return error
            return None

        outcomes = await asyncio.gather(*(on(replica) for replica in replicas))
        return dict(zip(replicas, outcomes, strict=True))

    async def _publish_files(self, ref: SnapshotRef, weights: SnapshotWeights) -> None:
        """From a directory that lasts as long as this. An engine that dies on the way takes nothing of the model's with
        it: once more, and if that one dies too, it is no ``RankDied``, which would say that the model is lost."""
        for is_last in (False, True):
            async with weights.files() as directory:
                outcomes = await self._publish_on(self._targets(ref.version), replace(ref, directory=directory))
            if not is_last and all(isinstance(outcome, RankDied) for outcome in outcomes.values()):
                continue
            try:
                self._record(ref, weights, outcomes)
            except RankDied as died:
                raise ServerError(f"the weights could not be published: {died}") from None
            return

    def _record(self, ref: SnapshotRef, weights: SnapshotWeights | None, outcomes: Outcomes) -> None:
        """Raises the first replica's error if no replica has it."""
        published = {replica for replica, error in outcomes.items() if error is None}
        failed = [error for error in outcomes.values() if error is not None]
        if not published:
            raise failed[0]
        for error in failed:
            log.warning("a version could not be published where requests follow its model: %s", error)
        locations = self._versions.setdefault(ref.version, VersionLocations(ref, weights))
        locations.ref, locations.weights = ref, weights
        locations.published |= published
        self._of_model.setdefault(ref.version.model_id, set()).add(ref.version)

    def _forget(self, version: Version) -> None:
        if self._versions.pop(version, None) is not None:
            versions = self._of_model[version.model_id]
            versions.remove(version)
            if not versions:
                del self._of_model[version.model_id]

    # ------------------------------------------------------------------------------------------------ transfers
    def _begin(self, locations: VersionLocations, work: Coroutine[Any, Any, None]) -> None:
        task = locations.transfer = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _copy(self, locations: VersionLocations, target: int) -> None:
        """Publishes a version on one more replica; if that is not possible, nothing has changed."""
        version, there, copied = locations.ref.version, self._members[target], False
        try:
            copied = await self._copied_from_file(locations.ref, there) or await self._copied_from_source(
                locations, there
            )
        except (DescantError, OSError) as error:
            log.warning("a version could not be copied to replica %d: %s", target, error)
        locations.transfer = None
        if copied and self._versions.get(version) is locations:
            locations.published.add(target)
            log.info("a version that is sampled much was copied to replica %d", target)
            return
        self._lose_if_nowhere(locations)
        if there.serving:
            await there.release(version)

    @staticmethod
    async def _copied_from_file(ref: SnapshotRef, there: EngineMember) -> bool:
        if ref.directory is None:
            return False
        await there.publish(ref)
        # It may have been replaced under the same name by the time it was read. A number never comes back.
        return (await asyncio.to_thread(read_manifest, ref.directory)).applied_seq_id == ref.version.number

    @staticmethod
    async def _copied_from_source(locations: VersionLocations, there: EngineMember) -> bool:
        if locations.weights is None or not locations.weights.available:
            return False
        async with locations.weights.files() as directory:
            await there.publish(replace(locations.ref, directory=directory))
        return True

    async def _republish(self, locations: VersionLocations, weights: SnapshotWeights) -> None:
        """After the death of all that had it: as soon as any replica serves."""
        try:
            while not self.serving:
                self._restarted.clear()
                await self._restarted.wait()
            await self._publish_files(locations.ref, weights)
        except (DescantError, OSError) as error:
            log.warning("a version could not be published again: %s", error)
        finally:
            locations.transfer = None
        self._lose_if_nowhere(locations)

    def _lose_if_nowhere(self, locations: VersionLocations) -> None:
        version = locations.ref.version
        if not locations.published and self._versions.get(version) is locations:
            self._forget(version)
            if self._on_lost is not None:
                self._on_lost(version)

    # ------------------------------------------------------------------------------------------------ who
    def _anybody(self) -> int:
        """One that serves, or is about to, if any is."""
        return max(self._members, key=lambda r: (self._members[r].serving, self._members[r].alive, -r))

    def _newest(self, request: SampleRequest) -> SampleRequest:
        """As it begins, if it follows its model: an engine knows only what is published there."""
        if not request.inflight or request.version is None:
            return request
        published = self._of_model.get(request.version.model_id, ())
        newest = max((request.version, *published), key=lambda version: version.number)
        return request if newest == request.version else replace(request, version=newest)

    def _replica_for(self, request: SampleRequest) -> int:
        among: Collection[int] = self._members
        if request.version is not None:
            among = self.replicas_of(request.version)
            if not among:
                return self._anybody()  # which says that it is not published
        return self._router.choose(request, among, max_num_seqs=self.capabilities.max_num_seqs)

    async def _room_for(self, version: Version | None) -> None:
        """Where a version is published, requests would only queue while another replica idles: the first begins a
        copy, and all wait for it. They start in the order in which they came."""
        locations = None if version is None else self._versions.get(version)
        if locations is None:
            return
        if locations.published:
            full = self.capabilities.max_num_seqs
            target = copy_target(self._router.in_flight, locations.published, full=full)
            if target is None:
                return
            if locations.transfer is None and target not in locations.tried:
                locations.tried.add(target)
                self._begin(locations, self._copy(locations, target))
        if locations.transfer is not None:
            await asyncio.wait([locations.transfer])

    def _count(self, replica: int, version: Version | None, num_tokens: int) -> None:
        self._traffic.sampled(replica, None if version is None else version.model_id, num_tokens)
