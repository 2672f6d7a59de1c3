"""Models made again after a death, of their rank or of the server: from their newest snapshot, by the journal.

    recovery.interrupted(model)                          # its trainer lost it: it is made again in the background
    await recovery.restore(model, entries, pending)      # at the server's start: what one was asked before

A model is created from its snapshot, or as it was created first. Its commands since then are done again in order. One
that has no answer yet gets it from that; what was answered stays as it was answered, and it is counted where the
loss comes out otherwise. Then the queue goes on with what has come meanwhile. Clients see a pause.

A command that failed counts as failed: a backward poisons the gradient again. Saves that were answered are not made
again. Weights saved for sampling without a name are published again where they are still in use.

A command may be what ranks die of. One that ran at two deaths runs alone among such commands of its base; after a third
it fails, and the recovery ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial

from descant.errors import CannotStore, DescantError, Lost, RankDied, ServerError
from descant.ports import Clock
from descant.service.automatic_snapshots import AutomaticSnapshots
from descant.service.backends import Backends
from descant.service.command_queue import QueuedCommand, is_death, result_of
from descant.service.jobs import Job, Jobs
from descant.service.journal import Journal, JournalEntry
from descant.service.model_creation import ModelCreation
from descant.service.models import LiveModel, Models, RecoveryProgress
from descant.service.repetition import MAX_DEATHS, Counts, Repetition
from descant.service.sampling import Sampling
from descant.service.training import Training, rejection
from descant.types import (
    CommandRecord,
    CreateModel,
    DeleteModel,
    ModelCreated,
    Rejected,
    Result,
    Version,
)

log = logging.getLogger(__name__)

DEATH_PAUSE_S = 0.2
"""After a rank's death, until it is known what was lost with it."""

DISK_PAUSE_S = 5.0
"""Until a disk that could not be read is tried again."""


class Recovery:
    """``QueueWatcher`` of all models."""

    def __init__(
        self,
        *,
        backends: Backends,
        models: Models,
        journal: Journal,
        snapshots: AutomaticSnapshots,
        jobs: Jobs,
        clock: Clock,
        lose: Callable[[LiveModel, str], Awaitable[None]],
        lose_versions: Callable[[str, Collection[Version]], Awaitable[None]],
    ):
        """``lose``: a model that cannot be made again, and why. ``lose_versions``: unnamed versions that are not
        published again."""
        self._backends = backends
        self._models = models
        self._journal = journal
        self._snapshots = snapshots
        self._jobs = jobs
        self._clock = clock
        self._lose = lose
        self._lose_versions = lose_versions
        self.training: Training
        self.creation: ModelCreation
        self.sampling: Sampling
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._consuming: dict[str, set[asyncio.Task[None]]] = {}
        """Closed gaps that are being written down, by model."""
        self._creating: dict[str, asyncio.Future[Result] | None] = {}
        """Models under recovery that no trainer has yet, as far as we know, and what one says once it is asked."""
        self._suspects = {base: asyncio.Lock() for base in backends}
        self.num_recovered: Counter[str] = Counter()
        self.counts = {base: Counts() for base in backends}
        """Both by base."""

    # ------------------------------------------------------------------------------------------------ QueueWatcher
    def gap_closed(self, model_id: str, first: int, last: int, message: str) -> None:
        model = self._models.find_ending(model_id)
        if model is None:
            return
        command = Rejected(model_id=model_id, seq_id=first, message=message, poisons_gradient=True)
        record = rejection(command, "gap", last=last)
        task = self._jobs.spawn(self._consume(model, record))
        self._consuming.setdefault(model_id, set()).add(task)
        task.add_done_callback(partial(self._has_consumed, model_id))

    def _has_consumed(self, model_id: str, task: asyncio.Task[None]) -> None:
        self._consuming[model_id].discard(task)
        if not self._consuming[model_id]:
            del self._consuming[model_id]

    async def _consume(self, model: LiveModel, record: CommandRecord) -> None:
        try:
            await self._journal.consume(record, owner=model.record.owner, base=model.record.base)
        except DescantError as error:  # a later server would wait for these ids once more
            log.warning("a closed gap could not be written down: %s", error)

    def sent(self, model_id: str, seq_id: int) -> None:
        model = self._models.get(model_id)
        if model is not None and model.recovering is None:
            self._snapshots.consider(model, seq_id)

    def died(self, model_id: str) -> None:
        """Mostly ``interrupted`` follows at once; it does not for a model that was only being created."""
        self._jobs.spawn(self._look_soon(model_id))

    async def _look_soon(self, model_id: str) -> None:
        await self._clock.sleep(DEATH_PAUSE_S)
        model = self._models.find_ending(model_id)
        if model is not None and model.queue.held and model_id not in self._tasks:
            self.interrupted(model)

    # ------------------------------------------------------------------------------------------------ when
    def interrupted(self, model: LiveModel) -> None:
        """Its trainer has lost it."""
        model_id, queue = model.record.model_id, model.queue
        queue.hold()
        self._count_death(model)
        if model.lost or self._is_being_made(model_id):
            return
        if (task := self._tasks.pop(model_id, None)) is not None:
            task.cancel()
        model.recovering = RecoveryProgress()
        task = self._tasks[model_id] = self._jobs.spawn(self._recover(model))
        task.add_done_callback(partial(self._forget_task, model_id))

    def _is_being_made(self, model_id: str) -> bool:
        """Then its death is that of no trainer, or its recovery knows of it."""
        if model_id not in self._creating:
            return False
        made = self._creating[model_id]
        return made is None or not made.done() or is_death(made)

    @staticmethod
    def _count_death(model: LiveModel) -> None:
        if (first := model.queue.first_died()) is not None:
            model.deaths[first] += 1

    def _forget_task(self, model_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(model_id) is task:
            del self._tasks[model_id]

    async def forget(self, models: Sequence[LiveModel]) -> None:
        """They are over or lost: what is kept for their recovery goes, and nothing is repeated any more."""
        for model in models:
            model.lost = True
            task = self._tasks.pop(model.record.model_id, None)
            if task is not None and task is not asyncio.current_task():  # which ends by itself
                task.cancel()
                self._creating.pop(model.record.model_id, None)
            model.recovering = None
            self.sampling.give_up(model.record.model_id)
        await self._snapshots.forget([model.record.model_id for model in models])

    async def ended(self, model: LiveModel, *, timeout_s: float) -> None:
        """Waits until its recovery has come to its end, if there is one; for so long."""
        if (task := self._tasks.get(model.record.model_id)) is not None:
            await asyncio.wait([task], timeout=timeout_s)

    def reason(self, model_id: str) -> str | None:
        """Where the recovery of a model is; None if there is none."""
        model = self._models.get(model_id)
        if model is None or model.recovering is None:
            return None
        progress = model.recovering
        return f"recovering model {model_id!r}: {progress.done} of {progress.total} commands replayed"

    @property
    def num_differing(self) -> int:
        """Commands that came out otherwise when they were repeated, since the start."""
        return sum(counts.differing for counts in self.counts.values())

    def stats(self, base: str) -> Mapping[str, float]:
        return {
            "models_recovering": sum(model.recovering is not None for model in self._models.of_base(base)),
            "models_recovered": self.num_recovered[base],
            "commands_replayed": self.counts[base].repeated,
            "replayed_losses_differ": self.counts[base].differing,
        }

    # ------------------------------------------------------------------------------------------------ one model
    async def _recover(self, model: LiveModel) -> None:
        model_id, began = model.record.model_id, self._clock.monotonic()
        try:
            while True:
                try:
                    await self._repeat(model)
                    break
                except RankDied as died:
                    log.warning("a model's recovery begins anew: %s", died)
                    self._count_death(model)
                    await self._clock.sleep(DEATH_PAUSE_S)
                except CannotStore as error:  # which comes to itself, or has the operator look after it
                    log.warning("a model's recovery begins anew: %s", error)
                    await self._clock.sleep(DISK_PAUSE_S)
        except DescantError as error:
            log.error("a model could not be recovered: %s", error)
            await self._lose(model, f"it could not be recovered: {error}")
            return
        except Exception:
            log.exception("a model could not be recovered")
            await self._lose(model, "it could not be recovered: an internal error")
            return
        finally:
            self._creating.pop(model_id, None)
        total = 0 if model.recovering is None else model.recovering.total
        model.recovering = None
        self.num_recovered[model.record.base] += 1
        log.info("a model was recovered: %d commands in %.1f s", total, self._clock.monotonic() - began)
        if lost := self.sampling.give_up(model_id, but=model.queue.open_seq_ids):
            await self._lose_versions(model.record.base, lost)

    async def _repeat(self, model: LiveModel) -> None:
        """Makes it, does again what it did, and has its queue go on. Raises ``RankDied`` where that has to begin
        anew, and what else keeps it from being done."""
        model_id, queue = model.record.model_id, model.queue
        queue.begin_life()
        model.recovering = progress = RecoveryProgress()
        self._creating[model_id] = None
        if model_id in self._consuming:
            await asyncio.wait(self._consuming[model_id])
        position = self._snapshots.start_of(model)
        creation = await self._creation(model, position)
        await self._remove(model)
        is_first = queue.entry(0) is not None
        if is_first and model.deaths[0] >= MAX_DEATHS:
            raise ServerError(f"its creation ran when the rank died {MAX_DEATHS} times, the last time alone")
        alone = self._suspects[model.record.base] if is_first and model.deaths[0] == MAX_DEATHS - 1 else nullcontext()
        async with alone:
            made = self._creating[model_id] = queue.send_again(0, creation)
            await result_of(made, ModelCreated)
        self._creating.pop(model_id, None)
        repetition = Repetition(
            model,
            journal=self._journal,
            training=self.training,
            sampling=self.sampling,
            alone=self._suspects[model.record.base],
            counts=self.counts[model.record.base],
        )
        while entries := [
            entry for entry in await self._journal.entries(model_id, after=position) if entry.seq_id < queue.next_seq_id
        ]:
            progress.total += len(entries)
            for entry in entries:
                await repetition.repeat(entry)
                position = entry.seq_id
            await repetition.drain()
        # Nothing is awaited since it was seen that no other command had its turn: what comes is sent from here.
        queue.resume(after=position)

    async def _creation(self, model: LiveModel, start: int) -> CreateModel:
        if start in model.snapshots:
            source, trainable = await self._snapshots.source(model, start)
            return CreateModel(model_id=model.record.model_id, trainable=trainable, source=source)
        entries = await self._journal.entries(model.record.model_id)
        if not entries or entries[0].seq_id != 0:
            raise Lost("the journal does not say how it was made")
        return await self.creation.command(model.record, entries[0].record)

    async def _remove(self, model: LiveModel) -> None:
        """What a trainer may still have of it: not every death takes all."""
        command = DeleteModel(model_id=model.record.model_id, seq_id=model.queue.next_seq_id)
        with suppress(DescantError):
            await asyncio.shield(model.backend.trainer.submit(command))

    # ------------------------------------------------------------------------------------------------ at the start
    async def restore(self, model: LiveModel, entries: Sequence[JournalEntry], pending: Collection[str]) -> set[str]:
        """A model of an earlier server, held: its queue gets what was taken and has no answer. Returns which of the
        ``pending`` requests go on here."""
        record, queue, found = model.record, model.queue, set[str]()
        for entry in entries:
            request_id, written = entry.request_id, entry.record
            waits = entry.seq_id >= queue.next_seq_id
            goes_on = request_id is not None and request_id in pending
            if goes_on and request_id is not None:
                found.add(request_id)
            if entry.seq_id == 0:
                if goes_on and request_id is not None:
                    job = self._jobs.add(
                        Job(
                            request_id=request_id,
                            operation=written.operation,
                            base=record.base,
                            owner=record.owner,
                            model_id=record.model_id,
                        )
                    )
                    finish = self.creation.finish(model, written.operation)
                    queue.reopen(QueuedCommand(seq_id=0, command=None, job=job, finish=finish))
                continue
            made = QueuedCommand(seq_id=entry.seq_id, command=None, num_bytes=written.num_bytes)
            if goes_on and request_id is not None:
                made.job = self.training.job(record, written, request_id)
                made.finish = self.training.finish(record, written)
            if waits:
                made.command = await self.training.command(record, await self._journal.read(entry))
                queue.waits_again(made)
            elif goes_on:
                queue.reopen(made)
        self._models.waits(model)
        return found

    @staticmethod
    def next_seq_id(entries: Sequence[JournalEntry], *, after: int) -> int:
        """The first id behind ``after`` whose turn has not come: all before it are in the journal, or closed there."""
        expected = after + 1
        for entry in entries:
            if entry.seq_id == expected:
                expected = entry.record.arguments.get("last", entry.seq_id) + 1
        return expected
