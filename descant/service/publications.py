"""Which versions an engine holds because of us, and for which sampling sessions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from descant.errors import NotFound, UserError
from descant.ports import CheckpointStore, Engine
from descant.service.locks import KeyedLocks
from descant.service.names import parse_path
from descant.service.registry import SamplingSessionRecord
from descant.types import (
    Checkpoint,
    SamplerKind,
    SnapshotRef,
    Version,
)


def version_of(checkpoint: Checkpoint) -> Version:
    """A version's number is the seq_id of the save that made it, so the same model and number are the same weights,
    whether they come from a file or were published as they were saved."""
    return Version(model_id=checkpoint.name.model_id, number=checkpoint.manifest.applied_seq_id)


def snapshot_of(checkpoint: Checkpoint) -> SnapshotRef:
    return SnapshotRef(
        version=version_of(checkpoint),
        kind="sampler",
        trainable=checkpoint.manifest.trainable,
        step=checkpoint.manifest.step,
        applied_seq_id=checkpoint.manifest.applied_seq_id,
        has_pending_gradient=False,
        directory=checkpoint.directory,
    )


class Publications:
    """Of one engine.

    An inflight session is a user of its model's newest published version, whoever published that.
    """

    def __init__(self, *, engine: Engine, checkpoints: CheckpointStore, dropped: Callable[[Version], None]):
        """``dropped`` is called for each version that the engine holds no more, or will not in a moment."""
        self._engine = engine
        self._checkpoints = checkpoints
        self._dropped = dropped
        self._published: set[Version] = set()
        self._users: dict[Version, set[str]] = {}
        self._newest: dict[str, Version] = {}
        self._following: dict[str, str] = {}
        """Inflight sessions, and the model of each."""
        self._locks = KeyedLocks()

    async def publish(self, ref: SnapshotRef, sampling_session_id: str, kind: SamplerKind) -> None:
        """A fresh snapshot, for one ephemeral session."""
        version = ref.version
        await self._engine.publish(ref)
        self._users.setdefault(version, set()).add(sampling_session_id)
        if kind == "inflight":
            self._following[sampling_session_id] = version.model_id
        await self._has_published(version)

    async def _has_published(self, version: Version) -> None:
        """Whoever follows its model uses it from now on, and not what came before."""
        self._published.add(version)
        newest = self._newest.get(version.model_id)
        if newest is None or newest.number < version.number:
            self._newest[version.model_id] = newest = version
        followers = {session for session, model_id in self._following.items() if model_id == version.model_id}
        if not followers:
            return
        left = [
            other
            for other, users in self._users.items()
            if other.model_id == version.model_id and other != newest and users & followers
        ]
        for other in left:
            self._users[other] -= followers
        self._users.setdefault(newest, set()).update(followers)
        await self._release_unused(left)

    def version_for(self, sampler: SamplingSessionRecord) -> Version | None:
        """The version that a session's next request is to be sampled with."""
        if sampler.sampling_session_id in self._following and sampler.version is not None:
            return self._newest.get(sampler.version.model_id, sampler.version)
        return sampler.version

    def follows(self, sampler: SamplingSessionRecord) -> bool:
        """Whether it is inflight."""
        return sampler.sampling_session_id in self._following

    async def provide(self, sampler: SamplingSessionRecord) -> None:
        """Sees to it that the engine holds a session's version. A file is published at its first use.

        Raises ``UserError`` if the file is no longer the one that the session was made from.
        """
        version = self.version_for(sampler)
        if version is None:
            return
        self._users.setdefault(version, set()).add(sampler.sampling_session_id)
        if version in self._published or sampler.model_path is None:
            return
        async with self._locks.hold(version):
            if version in self._published:
                return
            try:
                checkpoint = await self._checkpoints.open(parse_path(sampler.model_path))
            except NotFound:
                raise UserError(
                    f"{sampler.model_path}, which this sampler was made from, does not exist any more"
                ) from None
            if version_of(checkpoint) != version:
                raise UserError(f"{sampler.model_path} was replaced after this sampler was made; make a new sampler")
            await self._engine.publish(snapshot_of(checkpoint))
            await self._has_published(version)

    async def publish_again(self, ref: SnapshotRef, samplers: Mapping[str, SamplerKind]) -> None:
        """After a death: for the sessions that it was held for, and their kinds."""
        version = ref.version
        await self._engine.publish(ref)
        self._users.setdefault(version, set()).update(samplers)
        for sampling_session_id, kind in samplers.items():
            if kind == "inflight":
                self._following[sampling_session_id] = version.model_id
        await self._has_published(version)

    def follow(self, sampling_session_id: str, version: Version) -> None:
        """An inflight session of an earlier server, whose model's newest is to be published again."""
        self._following[sampling_session_id] = version.model_id
        newest = self._newest.get(version.model_id)
        if newest is None or newest.number < version.number:
            self._newest[version.model_id] = version

    def kind_of(self, sampling_session_id: str) -> SamplerKind:
        return "inflight" if sampling_session_id in self._following else "snapshot"

    def interrupt(self, version: Version) -> None:
        """The engine holds it no more, and will again: who uses it is remembered."""
        self._published.discard(version)

    def holds(self, version: Version | None) -> bool:
        return version in self._published

    async def release(self, version: Version, sampling_session_id: str) -> None:
        """Undoes ``publish``: the session did not come about."""
        self._following.pop(sampling_session_id, None)
        left = [version, *(v for v in self._users if v.model_id == version.model_id and v != version)]
        left = [v for v in left if sampling_session_id in self._users.get(v, ())]
        for version in left:
            self._users[version].discard(sampling_session_id)
        await self._release_unused(left)

    async def leave(self, sampling_session_ids: Iterable[str]) -> None:
        """These sessions are over: versions that no other session samples are released."""
        leaving = set(sampling_session_ids)
        for sampling_session_id in leaving:
            self._following.pop(sampling_session_id, None)
        left = [version for version, users in self._users.items() if users & leaving]
        for version in left:
            self._users[version] -= leaving
        await self._release_unused(left)

    async def _release_unused(self, versions: Sequence[Version]) -> None:
        for version in versions:
            async with self._locks.hold(version):
                if not self._users.get(version):
                    self._users.pop(version, None)
                    self._drop(version)
                    await self._engine.release(version)

    async def retire(self, version: Version) -> None:
        """It is sampled no more, whatever sessions use it."""
        async with self._locks.hold(version):
            for sampling_session_id in self._users.pop(version, set()):
                self._following.pop(sampling_session_id, None)
            self._drop(version)
            await self._engine.release(version)

    @property
    def versions(self) -> Collection[Version]:
        """That it holds."""
        return frozenset(self._published)

    def users(self, version: Version) -> Collection[str]:
        """The sampling sessions that it is held for."""
        return frozenset(self._users.get(version, ()))

    def forget(self, versions: Collection[Version] | None = None) -> None:
        """The engine holds these no more; None: it began anew and holds nothing."""
        for version in list(self._users.keys() | self._published) if versions is None else versions:
            self._drop(version)
            self._users.pop(version, None)

    def _drop(self, version: Version) -> None:
        self._published.discard(version)
        self._dropped(version)
        if self._newest.get(version.model_id) == version:
            del self._newest[version.model_id]
