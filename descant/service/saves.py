"""Clients' checkpoints: from a snapshot to a committed one while training goes on, opened, deleted in time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from descant.errors import CannotStore, Damaged, NotFound, UserError
from descant.ports import CheckpointStore, Clock, Trainer
from descant.service.locks import KeyedLocks
from descant.service.names import parse_path
from descant.service.quotas import Quotas
from descant.service.registry import Registry
from descant.types import Checkpoint, CheckpointName, CheckpointSource, Manifest, SnapshotRef

log = logging.getLogger(__name__)

MIN_TTL_S = 3600
MAX_TTL_S = 10 * 366 * 24 * 3600


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise UserError(f"ttl_seconds is {ttl_seconds}, expected {MIN_TTL_S} (an hour) to {MAX_TTL_S} (ten years)")
    return ttl_seconds


def source_of(checkpoint: Checkpoint, optimizer: bool) -> CheckpointSource:
    """What a model is loaded from. Raises ``UserError`` where ``optimizer`` is asked of one that has none."""
    if optimizer and not checkpoint.manifest.has_optimizer:
        raise UserError(
            f"{checkpoint.name.uri} holds no optimiser state, expected to be loaded without it: "
            "create_training_client_from_state begins with a fresh one"
        )
    return CheckpointSource(uri=checkpoint.name.uri, directory=checkpoint.directory, optimizer=optimizer)


def digest_of(manifest: Manifest) -> str:
    """By which a checkpoint's contents are known again."""
    files = sorted((path, entry.sha256) for path, entry in manifest.files.items())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


class Saves:
    def __init__(
        self,
        *,
        checkpoints: CheckpointStore,
        registry: Registry,
        clock: Clock,
        quotas: Quotas,
        trouble: Callable[[], str | None] = lambda: None,
    ):
        """``trouble``: why the data directory takes nothing new, or None."""
        self._trouble = trouble
        self._checkpoints = checkpoints
        self._registry = registry
        self._clock = clock
        self._quotas = quotas
        self._locks = KeyedLocks()
        self._committing: dict[str, list[int]] = {}
        """By owner the bytes of those that are let in and that the registry does not have yet."""

    async def recover(self) -> None:
        """Makes the registry's list of checkpoints what there is: some may have been removed, or brought, while the
        server was down, and one that was committed as it ended is not listed yet."""
        listed = await self._registry.checkpoints()
        found = {checkpoint.name.uri: checkpoint for checkpoint in await self._checkpoints.list()}
        for uri in listed.keys() - found.keys():
            if not await self._exists(parse_path(uri)):  # a damaged one is there, and takes its room
                await self._registry.forget_checkpoint(uri)
        for uri, checkpoint in found.items():
            manifest = checkpoint.manifest
            if uri not in listed:
                await self._list(checkpoint, expires_at=None)
            elif listed[uri] != manifest.size_bytes:
                await self._registry.set_checkpoint_bytes(uri, manifest.size_bytes)

    def check_room(self) -> None:
        """Raises ``CannotStore`` while nothing new is made or saved, for want of room."""
        if (trouble := self._trouble()) is not None:
            raise CannotStore(trouble)

    async def save(
        self,
        ref: SnapshotRef,
        name: CheckpointName,
        *,
        trainer: Trainer,
        owner: str,
        base: str,
        overwrite: bool,
        ttl_seconds: int | None,
    ) -> Checkpoint:
        """Commits ``ref`` under ``name``, or changes nothing and raises. The snapshot is dropped either way.

        Two saves of one name go one after the other, so that the second sees the first. Raises ``UserError`` if the
        name is taken and ``overwrite`` is false, ``QuotaExceeded`` if its owner has as much as one may have,
        ``CannotStore`` for want of room.
        """
        try:
            self.check_room()
            async with self._locks.hold(name):
                if (committed_before := await self._same_save(ref, name)) is not None:
                    return committed_before
                existed = await self._exists(name)
                if existed and not overwrite:
                    other = " or pass overwrite=True" if name.type == "weights" else ""  # save_state alone takes it
                    raise UserError(f"{name.uri} exists already; choose another name{other}")
                await self._check(owner, name, 0)
                attempt = await self._checkpoints.attempt(name)
                committed = False
                try:
                    manifest = await trainer.save(ref, attempt)
                    # The version's number is the save's seq_id, and is found again from the manifest alone.
                    manifest = replace(manifest, owner=owner, base=base, applied_seq_id=ref.version.number)
                    await self._check(owner, name, manifest.size_bytes)
                    with self._counted(owner, manifest.size_bytes):
                        checkpoint = await self._checkpoints.commit(name, attempt, manifest)
                        committed = True
                        expires_at = None if ttl_seconds is None else self._clock.now() + ttl_seconds
                        try:
                            await self._list(checkpoint, expires_at=expires_at)
                        except Exception:
                            if not existed:  # no client knows of it yet; what it has replaced is gone
                                with _best_effort(f"delete {name.uri}, of which no record could be written"):
                                    await self._checkpoints.delete(name)
                            raise
                finally:
                    if not committed:
                        with _best_effort(f"abandon a failed attempt of {name.uri}"):
                            await self._checkpoints.abandon(attempt)
                return checkpoint
        finally:
            await drop(trainer, ref)

    async def open(self, principal: str, path: str) -> Checkpoint:
        """Raises ``NotFound`` for a path that is not there or is another owner's, ``UserError`` for what is no path."""
        name = parse_path(path)
        missing = NotFound(f"no checkpoint {path}")
        try:
            checkpoint = await self._checkpoints.open(name)
        except NotFound:
            raise missing from None
        if checkpoint.manifest.owner != principal:
            raise missing
        return checkpoint

    async def same(self, path: str, digest: str) -> Checkpoint:
        """The checkpoint that had this digest. Raises ``NotFound`` where another is there now, or none."""
        checkpoint = await self._checkpoints.open(parse_path(path))
        if digest_of(checkpoint.manifest) != digest:
            raise NotFound(f"{path} is another checkpoint than it was")
        return checkpoint

    async def _same_save(self, ref: SnapshotRef, name: CheckpointName) -> Checkpoint | None:
        """What this very save has committed already, before a death that kept its answer from being written."""
        try:
            checkpoint = await self._checkpoints.open(name)
        except (NotFound, Damaged):
            return None
        same = checkpoint.manifest.applied_seq_id == ref.version.number == ref.applied_seq_id
        return checkpoint if same and name.model_id == ref.version.model_id else None

    async def delete_expired(self) -> None:
        for uri in await self._registry.expired_checkpoints(self._clock.now()):
            name = parse_path(uri)
            async with self._locks.hold(name):
                if uri not in await self._registry.expired_checkpoints(self._clock.now()):
                    continue  # saved anew in between
                with contextlib.suppress(NotFound):
                    await self._checkpoints.delete(name)
                await self._registry.forget_checkpoint(uri)

    async def _check(self, owner: str, name: CheckpointName, num_bytes: int) -> None:
        """Whether there is room for it, instead of what it replaces."""
        have = await self._registry.checkpoint_usage(owner, without=name.uri)
        others = self._committing.get(owner, ())
        self._quotas.check_checkpoints(have.count + len(others), have.num_bytes + sum(others), num_bytes)

    @contextlib.contextmanager
    def _counted(self, owner: str, num_bytes: int) -> Iterator[None]:
        committing = self._committing.setdefault(owner, [])
        committing.append(num_bytes)
        try:
            yield
        finally:
            committing.remove(num_bytes)
            if not committing:
                del self._committing[owner]

    async def _list(self, checkpoint: Checkpoint, *, expires_at: float | None) -> None:
        manifest = checkpoint.manifest
        await self._registry.set_checkpoint(
            checkpoint.name,
            owner=manifest.owner,
            base=manifest.base,
            created_at=self._clock.now(),
            expires_at=expires_at,
            num_bytes=manifest.size_bytes,
        )

    async def _exists(self, name: CheckpointName) -> bool:
        try:
            await self._checkpoints.open(name)
        except NotFound:
            return False
        except Damaged:  # it takes up the name; who means to replace it says so
            return True
        return True


async def drop(trainer: Trainer, ref: SnapshotRef) -> None:
    """Frees a snapshot; a failure to do so is no reason to fail what it was taken for."""
    with _best_effort(f"drop the snapshot {ref.version}"):
        await trainer.drop(ref)


@contextlib.contextmanager
def _best_effort(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("could not %s", what)
