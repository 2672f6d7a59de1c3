"""Clients' checkpoints: from a snapshot to a committed one while training goes on, opened, deleted in time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

from descant.errors import NotFound, UserError
from descant.ports import CheckpointStore, Clock, Trainer
from descant.service.catalogue import Catalogue
from descant.service.locks import KeyedLocks
from descant.service.names import parse_path
from descant.types import Checkpoint, CheckpointName, SnapshotRef

log = logging.getLogger(__name__)

MIN_TTL_S = 3600
MAX_TTL_S = 10 * 366 * 24 * 3600


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise UserError(f"ttl_seconds is {ttl_seconds}, expected {MIN_TTL_S} (an hour) to {MAX_TTL_S} (ten years)")
    return ttl_seconds


class Saves:
    def __init__(self, *, checkpoints: CheckpointStore, catalogue: Catalogue, clock: Clock):
        self._checkpoints = checkpoints
        self._catalogue = catalogue
        self._clock = clock
        self._locks = KeyedLocks()

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
        name is taken and ``overwrite`` is false.
        """
        try:
            async with self._locks.hold(name):
                if not overwrite and await self._exists(name):
                    raise UserError(f"{name.uri} exists already; choose another name or set overwrite")
                attempt = await self._checkpoints.attempt(name)
                committed = False
                try:
                    manifest = await trainer.save(ref, attempt)
                    # The version's number is the save's seq_id, and is found again from the manifest alone.
                    manifest = replace(manifest, owner=owner, base=base, applied_seq_id=ref.version.number)
                    checkpoint = await self._checkpoints.commit(name, attempt, manifest)
                    committed = True
                finally:
                    if not committed:
                        with _best_effort(f"abandon a failed attempt of {name.uri}"):
                            await self._checkpoints.abandon(attempt)
                now = self._clock.now()
                expires_at = None if ttl_seconds is None else now + ttl_seconds
                await self._catalogue.set_checkpoint_expiry(
                    name, owner=owner, base=base, created_at=now, expires_at=expires_at
                )
                return checkpoint
        finally:
            await drop(trainer, ref)

    async def open(self, principal: str, path: str) -> Checkpoint:
        """Raises ``NotFound`` for a path that is not there or is somebody else's, ``UserError`` for what is no path."""
        name = parse_path(path)
        missing = NotFound(f"no checkpoint {path}")
        try:
            checkpoint = await self._checkpoints.open(name)
        except NotFound:
            raise missing from None
        if checkpoint.manifest.owner != principal:
            raise missing
        return checkpoint

    async def delete_expired(self) -> None:
        for uri in await self._catalogue.expired_checkpoints(self._clock.now()):
            name = parse_path(uri)
            async with self._locks.hold(name):
                if uri not in await self._catalogue.expired_checkpoints(self._clock.now()):
                    continue  # saved anew in between
                with contextlib.suppress(NotFound):
                    await self._checkpoints.delete(name)
                await self._catalogue.forget_checkpoint(uri)

    async def _exists(self, name: CheckpointName) -> bool:
        try:
            await self._checkpoints.open(name)
        except NotFound:
            return False
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
