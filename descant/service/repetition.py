"""The commands of a model that is made again, repeated in order as the journal has them.

    repetition = Repetition(model, journal=…, training=…, sampling=…, alone=lock, counts=counts)
    for entry in entries: await repetition.repeat(entry)
    await repetition.drain()

Both raise ``RankDied`` where the model went once more: then it is made anew, and all is repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, replace

from descant.errors import DescantError, Lost, NotFound, RankDied
from descant.service.command_queue import QueuedCommand, result_of
from descant.service.journal import Journal, JournalEntry
from descant.service.models import LiveModel
from descant.service.sampling import Sampling
from descant.service.training import Training, is_rejection
from descant.types import Command, ForwardBackwardOutput, Rejected, Result, Snapshot, SnapshotRef, Version

log = logging.getLogger(__name__)

MAX_DEATHS = 3

AT_TRAINER = 32
"""Commands of one model that are with its trainer at a time while they are repeated."""
AT_TRAINER_BYTES = 8 << 20

SETTLE_S = 60.0
"""How long it is waited for that a save or a publication which needs nothing of the dead rank goes on by itself."""

TOLERANCE = 1e-3
"""By so much of itself a repeated loss may differ: the kernels of a GPU may add up in another order."""


@dataclass(slots=True)
class Counts:
    """Since the start, of one base."""

    repeated: int = 0
    differing: int = 0
    """Of these, those that came out otherwise."""


class Repetition:
    """One model's commands, one after the other, some of them on their way at a time."""

    def __init__(
        self,
        model: LiveModel,
        *,
        journal: Journal,
        training: Training,
        sampling: Sampling,
        alone: asyncio.Lock,
        counts: Counts,
    ):
        """``model`` is there again, as it was before the first. ``alone``: held by the one suspect that runs."""
        assert model.recovering is not None
        self._model = model
        self._journal = journal
        self._training = training
        self._sampling = sampling
        self._alone = alone
        self._counts = counts
        self._queue = model.queue
        self._progress = model.recovering
        self._sent: deque[tuple[JournalEntry, asyncio.Future[Result]]] = deque()
        self._sent_bytes = 0

    async def repeat(self, entry: JournalEntry) -> None:
        queue, model_id, seq_id = self._queue, self._model.record.model_id, entry.seq_id
        waiting = queue.entry(seq_id)
        if waiting is not None and (outcome := waiting.outcome) is not None and await queue.settled(waiting, SETTLE_S):
            entry, waiting = replace(entry, failed=outcome.exception() is not None), None
        elif waiting is None and entry.failed is None:  # it was answered since the entry was read, perhaps
            entry = await self._read_again(entry)
        command = waiting.command if waiting is not None else None
        if waiting is None and (rejected := queue.rejected(seq_id)) is not None:
            command, entry = rejected, replace(entry, failed=True)
        if waiting is None and not await self._is_needed(entry):
            self._progress.done += 1
            return
        if command is None:
            command = await self._training.command(self._model.record, await self._journal.read(entry))
        if waiting is None and entry.failed and entry.record.operation == "forward_backward":
            message = "it failed before"
            command = Rejected(model_id=model_id, seq_id=seq_id, message=message, poisons_gradient=True)
        if self._model.deaths[seq_id] >= MAX_DEATHS:
            command = self._give_up(entry, waiting, command)
        if self._model.deaths[seq_id] == MAX_DEATHS - 1:
            await self.drain()
            async with self._alone:
                sent = await self._send(entry, command)
                await self.drain()
        else:
            sent = await self._send(entry, command)
        if isinstance(command, Snapshot) and waiting is None:
            ref = await result_of(sent, SnapshotRef)
            await self._sampling.publish_again(self._model.record, ref)

    async def _read_again(self, entry: JournalEntry) -> JournalEntry:
        seq_id = entry.seq_id
        found = await self._journal.entries(entry.record.model_id, after=seq_id - 1, up_to=seq_id)
        return found[0] if found else entry

    async def _is_needed(self, entry: JournalEntry) -> bool:
        """Whether the model's state, or somebody who samples it, depends on a command that was answered."""
        record = entry.record
        if is_rejection(record):
            return bool(record.arguments["poisons_gradient"])
        match record.operation:
            case "forward" | "save_weights":
                return False
            case "load_weights":
                return not entry.failed
            case "save_weights_for_sampler":
                version = Version(model_id=record.model_id, number=record.seq_id)
                return not entry.failed and self._sampling.awaits(version)
        return True

    def _give_up(self, entry: JournalEntry, waiting: QueuedCommand | None, command: Command) -> Command:
        """Of a command that ranks die of. Raises ``Lost`` for one that was answered: without it the model is
        another."""
        why = (
            f"{entry.record.operation} with seq_id {entry.seq_id} ran when the rank died {MAX_DEATHS} times, the last "
            "time alone, and is not tried again"
        )
        if waiting is None or waiting.job is None:
            raise Lost(why)
        poisons = entry.record.operation == "forward_backward"
        return Rejected(model_id=command.model_id, seq_id=command.seq_id, message=why, poisons_gradient=poisons)

    async def _send(self, entry: JournalEntry, command: Command) -> asyncio.Future[Result]:
        while self._sent and (
            len(self._sent) >= AT_TRAINER or self._sent_bytes + entry.record.num_bytes > AT_TRAINER_BYTES
        ):
            await self._take_oldest()
        outcome = self._queue.send_again(entry.seq_id, command)
        self._sent.append((entry, outcome))
        self._sent_bytes += entry.record.num_bytes
        return outcome

    async def drain(self) -> None:
        """Until all have their results."""
        while self._sent:
            await self._take_oldest()

    async def _take_oldest(self) -> None:
        entry, outcome = self._sent.popleft()
        self._sent_bytes -= entry.record.num_bytes
        try:
            result = await asyncio.shield(outcome)
        except RankDied:
            raise
        except NotFound as error:  # it died between two of them
            raise RankDied(f"the model is not there any more: {error}") from None
        except DescantError as error:
            differs = entry.failed is False
            why: object = error
        else:
            loss = result.metrics["loss:sum"] if isinstance(result, ForwardBackwardOutput) else None
            was = entry.loss
            differs = loss is not None and was is not None and not abs(loss - was) <= TOLERANCE * max(1.0, abs(was))
            why = f"loss {loss}, it was {was}"
        if differs:
            self._counts.differing += 1
            log.error("%s with seq_id %d came out otherwise: %s", entry.record.operation, entry.seq_id, why)
        self._counts.repeated += 1
        self._progress.done += 1
