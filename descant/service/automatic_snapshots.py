"""Automatic snapshots: what a recovery begins with, so that it repeats about a minute of a model's work at most.

    snapshots.consider(model, seq_id)        # whenever a model has no pending gradient, right behind that command
    start = snapshots.start_of(model)        # the last command that a recovery need not repeat

They are checkpoints (weights, optimiser state, step) in a store of their own, which no client can name: they count for
nobody's quota, there are two of a model at most, and they go with it. The second is kept while something before the
first is still needed: a save that has not ended, or weights saved for sampling without a name that are in use.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from descant.errors import DescantError, NotFound
from descant.ports import CheckpointStore, Clock
from descant.service.command_queue import Work, result_of
from descant.service.jobs import Jobs
from descant.service.journal import Journal
from descant.service.models import LiveModel
from descant.service.saves import drop
from descant.service.settings import ServiceSettings
from descant.types import CheckpointName, CheckpointSource, Result, Snapshot, SnapshotRef, Trainable

log = logging.getLogger(__name__)

NUMBERS = 1 << 40
"""Added to the seq_id behind which a snapshot is taken: above every client's, so that it has no version of theirs."""

AT_ONCE = 2
"""Of one base that are being written: each holds a copy of its model meanwhile."""

RETRY_S = 30.0
"""After one that failed, until that model's next."""


def snapshot_name(model_id: str, seq_id: int) -> CheckpointName:
    return CheckpointName(model_id=model_id, type="weights", name=str(seq_id))


class AutomaticSnapshots:
    def __init__(
        self,
        *,
        store: CheckpointStore,
        journal: Journal,
        jobs: Jobs,
        clock: Clock,
        settings: ServiceSettings,
        in_use: Callable[[str], Collection[int]],
        trouble: Callable[[], str | None],
    ):
        """``in_use``: the numbers of a model's unnamed versions that are. ``trouble``: why the data directory takes
        nothing new, or None."""
        self._store = store
        self._journal = journal
        self._jobs = jobs
        self._clock = clock
        self._settings = settings
        self._in_use = in_use
        self._trouble = trouble
        self._running: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}
        """By model, whose last one failed."""
        self._taking: set[str] = set()
        self.num_taken: Counter[str] = Counter()
        """By base."""

    # ------------------------------------------------------------------------------------------------ taking
    def consider(self, model: LiveModel, seq_id: int) -> None:
        """The trainer has the command ``seq_id``, and no gradient is pending when it is done."""
        model_id, base = model.record.model_id, model.record.base
        if model_id in self._taking or model.lost or not self._is_due(model):
            return
        if self._running[base] >= AT_ONCE or self._clock.monotonic() < self._not_before.get(model_id, 0.0):
            return
        if self._trouble() is not None or min(model.queue.open_seq_ids, default=seq_id) <= self._starts(model)[-1]:
            return  # a third would be needed
        self._taking.add(model_id)
        self._running[base] += 1
        work, model.queue.work = model.queue.work, Work()
        number = NUMBERS + seq_id
        outcome = model.backend.trainer.submit(Snapshot(model_id=model_id, seq_id=number, kind="training"))
        self._jobs.spawn(self._take(model, seq_id, outcome, work))

    def _is_due(self, model: LiveModel) -> bool:
        work, settings = model.queue.work, self._settings
        if not work.commands:
            return False
        age_s = 0.0 if work.since is None else self._clock.monotonic() - work.since
        return (
            work.seconds >= settings.snapshot_work_s
            or work.commands >= settings.snapshot_commands
            or work.num_bytes >= settings.snapshot_bytes
            or age_s >= settings.snapshot_age_s
            or (model.loads and not model.snapshots)
        )

    async def _take(self, model: LiveModel, seq_id: int, outcome: asyncio.Future[Result], work: Work) -> None:
        model_id = model.record.model_id
        taken = False
        try:
            ref = await result_of(outcome, SnapshotRef)
            try:
                taken = not ref.has_pending_gradient and await self._write(model, seq_id, ref)
            finally:
                await drop(model.backend.trainer, ref)
            if taken:
                self._not_before.pop(model_id, None)
                self.num_taken[model.record.base] += 1
                model.snapshots.append(seq_id)
                await self.prune(model)
        except (DescantError, OSError) as error:
            log.warning("an automatic snapshot could not be taken, and is tried again: %s", error)
        except Exception:
            log.exception("an automatic snapshot could not be taken")
        finally:
            self._taking.discard(model_id)
            self._running[model.record.base] -= 1
            if not taken:
                model.queue.work.add(work)
                self._not_before[model_id] = self._clock.monotonic() + RETRY_S

    async def _write(self, model: LiveModel, seq_id: int, ref: SnapshotRef) -> bool:
        record, name = model.record, snapshot_name(model.record.model_id, seq_id)
        attempt = await self._store.attempt(name)
        committed = False
        try:
            manifest = await model.backend.trainer.save(ref, attempt)
            manifest = replace(manifest, owner=record.owner, base=record.base, applied_seq_id=seq_id)
            if model.lost:
                return False
            await self._store.commit(name, attempt, manifest)
            committed = True
        finally:
            if not committed:
                await self._store.abandon(attempt)
        await self._journal.snapshot_taken(
            record.model_id,
            seq_id,
            owner=record.owner,
            base=record.base,
            created_at=self._clock.now(),
            num_bytes=manifest.size_bytes,
        )
        if model.lost:  # it went meanwhile, with all that there was of it
            await self.forget([record.model_id])
            return False
        return True

    # ------------------------------------------------------------------------------------------------ keeping
    def _starts(self, model: LiveModel) -> list[int]:
        """Where a recovery could begin, rising: behind these commands. Two at most."""
        return sorted({seq_id for seq_id in (0, *model.snapshots) if seq_id >= model.oldest})[-2:]

    def start_of(self, model: LiveModel) -> int:
        """Where a recovery begins: at the newest snapshot before everything that is still needed, or at the older of
        two."""
        starts = self._starts(model)
        needed = [*model.queue.open_seq_ids, *self._in_use(model.record.model_id)]
        first = min((seq_id for seq_id in needed if seq_id > starts[0]), default=None)
        return starts[-1] if first is None or first > starts[-1] else starts[0]

    def can_repeat(self, model: LiveModel, seq_id: int) -> bool:
        """Whether a recovery could come to the state behind this command again."""
        return seq_id > self._starts(model)[0]

    async def prune(self, model: LiveModel) -> None:
        """Forgets what no recovery needs."""
        start, model_id = self.start_of(model), model.record.model_id
        if start <= model.oldest:
            return
        model.oldest = start
        model.queue.forget(up_to=start)
        await self._journal.prune(model_id, keep_after=start)
        for seq_id in [seq_id for seq_id in model.snapshots if seq_id < start]:
            model.snapshots.remove(seq_id)
            await self._delete(snapshot_name(model_id, seq_id))

    async def source(self, model: LiveModel, seq_id: int) -> tuple[CheckpointSource, Trainable]:
        """The snapshot behind this command. Raises ``NotFound`` and ``Damaged``."""
        checkpoint = await self._store.open(snapshot_name(model.record.model_id, seq_id))
        uri = f"the snapshot of {model.record.model_id} behind seq_id {seq_id}"
        source = CheckpointSource(uri=uri, directory=checkpoint.directory, optimizer=True)
        return source, checkpoint.manifest.trainable

    async def forget(self, model_ids: Collection[str]) -> None:
        """These models are over, with all that is kept for their recovery."""
        await self._journal.forget(model_ids)
        for model_id in model_ids:
            self._not_before.pop(model_id, None)
            for checkpoint in await self._store.list(model_id):
                await self._delete(checkpoint.name)

    async def remove_orphans(self, kept: Collection[CheckpointName]) -> None:
        """At a start: snapshots that no model knows of."""
        for checkpoint in await self._store.list():
            if checkpoint.name not in kept:
                await self._delete(checkpoint.name)

    async def _delete(self, name: CheckpointName) -> None:
        try:
            await self._store.delete(name)
        except NotFound:
            pass
        except DescantError as error:
            log.warning("an old snapshot could not be removed: %s", error)
