"""All ranks of a replica as one ``Executor``, on rank 0; and what the others do: hear each turn, and do the same.

    loop → Team.turn → tell → [every rank] begin → gather → finish        the worst outcome is everybody's

Rank 0 decides and tells; nobody else decides anything. Turns without an outcome (a pin that ends, a snapshot that is
dropped) are done at once on rank 0 and told with the next one that has an outcome, so that each rank does all of them
in one order. Checkpoints are read by rank 0, and their tensors go along in the turn: whatever the others' disks hold,
all ranks have the same numbers, and one of them asks the file system.

What one rank alone cannot do although the others have done it, and what cannot be undone, ends the replica: its rows
are not the same any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, assert_never

from descant.dist.failure import DistributedFailure
from descant.errors import DescantError
from descant.ranks.channel import Board
from descant.ranks.loop import Outcome, as_descant
from descant.ranks.peers import Peers
from descant.ranks.turns import (
    Drop,
    Fail,
    Leave,
    Microbatch,
    Pin,
    Prefetch,
    Publication,
    Rows,
    SampleStep,
    Turn,
    Unpin,
    Withdrawal,
)
from descant.ranks.worker import Worker
from descant.sample.scheduler import Scheduler, SequenceOutput
from descant.train.step import RequestKey
from descant.types import CheckpointSource, Command, Manifest, SnapshotRef, Version

log = logging.getLogger(__name__)

IDLE_S = 1.0
"""How often rank 0 says that there is nothing to do, and looks whether the others are well."""


class Team:
    """``Executor``. Used on the thread that joined, but for ``read`` and what ``save`` returns."""

    idle_s: float | None = IDLE_S

    def __init__(self, worker: Worker, peers: Peers):
        self.facts, self.capabilities = worker.facts, worker.capabilities
        self.num_ranks = peers.num_ranks
        self.microbatch_tokens = worker.microbatch_tokens
        self._worker, self._peers = worker, peers
        self._untold: list[Turn] = []
        self._number = 0

    def _tell(self, turn: Turn | None, do: Callable[[], Any]) -> Any:
        """Tells what is untold and ``turn``, and runs rank 0's part of it."""
        turns, self._untold = (*self._untold, *([] if turn is None else [turn])), []
        self._number += 1
        with self._peers.turn("turn", self._number):
            self._peers.tell(turns)
        with self._peers.turn(_kind(turns), self._number):
            return do()

    def _do(self, turn: Turn) -> None:
        """One without an outcome."""
        self._untold.append(turn)
        _silently(self._worker, self._peers, turn)

    # ------------------------------------------------------------------------------------------------ turns
    def idle(self) -> None:
        self._tell(None, self._peers.check)

    def leave(self) -> None:
        """No more turns: the others leave."""
        self._tell(Leave(), lambda: None)

    def microbatch(self, turn: Microbatch) -> list[Outcome]:
        outcomes: list[Outcome] = self._tell(turn, lambda: _microbatch(self._worker, self._peers, turn))
        return outcomes

    def sample_step(self, turn: SampleStep) -> list[Sequence[SequenceOutput] | DescantError | None]:
        outputs: list[Any] = self._tell(turn, lambda: _sample_step(self._worker, self._peers, turn))
        return outputs

    def rows(self, turn: Rows) -> list[Outcome]:
        ordered = Rows(commands=self._worker.in_order(turn.commands), loaded=turn.loaded)
        outcomes: list[Outcome] = self._tell(ordered, lambda: _rows(self._worker, self._peers, ordered))
        return outcomes

    def publish(self, ref: SnapshotRef, loaded: Any | None) -> None:
        turn = Publication(ref=ref, loaded=loaded)
        self._tell(turn, lambda: _publish(self._worker, self._peers, turn))

    def acquire(self, version: Version | None, count: int = 1) -> None:
        if version is not None:
            turn = Pin(version=version, count=count)
            self._tell(turn, lambda: _pin(self._worker, self._peers, turn))

    def prefetch(self, model_ids: Sequence[str], *, keep: Collection[str]) -> None:
        self._do(Prefetch(model_ids=tuple(model_ids), keep=tuple(sorted(keep))))

    def fail(self, key: RequestKey, command: Command, why: str) -> None:
        self._do(Fail(key=key, command=command, why=why))

    def drop(self, ref: SnapshotRef) -> None:
        self._do(Drop(ref=ref))

    def release_version(self, version: Version) -> None:
        self._do(Withdrawal(version=version))

    def free(self, version: Version | None, count: int = 1) -> None:
        if version is not None:
            self._do(Unpin(version=version, count=count))

    # ------------------------------------------------------------------------------------------------ rank 0's own
    def make_scheduler(self) -> Scheduler:
        return self._worker.make_scheduler()

    def stats(self) -> Mapping[str, float]:
        return self._worker.stats()

    def adapter_bytes(self, model_id: str) -> tuple[int, int]:
        return self._worker.adapter_bytes(model_id)

    def is_resident(self, model_id: str) -> bool:
        return self._worker.is_resident(model_id)

    def max_adapter_bytes(self) -> float:
        return self._worker.max_adapter_bytes()

    def read(self, source: CheckpointSource) -> Any:
        return self._worker.read(source)

    def save(self, ref: SnapshotRef, dest: str) -> Callable[[], Manifest]:
        return self._worker.save(ref, dest)

    def is_published(self, version: Version) -> bool:
        return self._worker.is_published(version)


def follow(worker: Worker, peers: Peers, board: Board) -> None:
    """What every rank but rank 0 does, until it is told to leave. Raises ``DistributedFailure``."""
    number = 0
    while True:
        number += 1
        with peers.turn("turn", number):
            turns: tuple[Turn, ...] = peers.hear()
        kind = _kind(turns)
        board.write(number, kind)
        with peers.turn(kind, number):
            for turn in turns:
                if isinstance(turn, Leave):
                    return
                _execute(worker, peers, turn)
            if not turns:
                peers.check()
        board.write(number, "")


def _kind(turns: Sequence[Turn]) -> str:
    return type(turns[-1]).__name__ if turns else "Idle"


def _execute(worker: Worker, peers: Peers, turn: Turn) -> None:
    try:
        match turn:
            case Microbatch():
                _microbatch(worker, peers, turn)
            case SampleStep():
                _sample_step(worker, peers, turn)
            case Rows():
                _rows(worker, peers, turn)
            case Publication():
                _publish(worker, peers, turn)
            case Pin():
                _pin(worker, peers, turn)
            case _:
                _silently(worker, peers, turn)
    except DistributedFailure:
        raise
    except DescantError:  # everybody's outcome; rank 0 tells whom it concerns
        pass


# --------------------------------------------------------------------------------------------------------------------
# What each rank does in a turn


def _microbatch(worker: Worker, peers: Peers, turn: Microbatch) -> list[Outcome]:
    reports = _attempt(peers, "reports", lambda: worker.begin_microbatch(turn))
    for report in reports:
        if isinstance(report, DescantError):  # outside any request: what was in the turn is given up, on all ranks
            raise report
    try:
        return worker.finish_microbatch(turn, reports)
    except Exception as error:  # others have committed
        raise peers.over("a commit", error) from error


def _sample_step(
    worker: Worker, peers: Peers, turn: SampleStep
) -> list[Sequence[SequenceOutput] | DescantError | None]:
    return _attempt(peers, "outputs", lambda: worker.sample(turn.plans[peers.rank]))


def _rows(worker: Worker, peers: Peers, turn: Rows) -> list[Outcome]:
    outcomes = worker.run_rows(turn)
    errors = [outcome.result if isinstance(outcome.result, DescantError) else None for outcome in outcomes]
    for command, said in zip(turn.commands, zip(*peers.gather("outcomes", errors), strict=True), strict=True):
        _must_agree(f"{type(command).__name__} of model {command.model_id}", said)
    peers.check()
    return outcomes


def _publish(worker: Worker, peers: Peers, turn: Publication) -> None:
    was_there = worker.is_published(turn.ref.version)

    def undo() -> None:
        if not was_there:
            worker.release_version(turn.ref.version)

    _all_or_none(peers, lambda: worker.publish(turn.ref, turn.loaded), undo)


def _pin(worker: Worker, peers: Peers, turn: Pin) -> None:
    def undo() -> None:
        worker.free(turn.version, turn.count)

    _all_or_none(peers, lambda: worker.acquire(turn.version, turn.count), undo)


def _silently(worker: Worker, peers: Peers, turn: Turn) -> None:
    """A turn that cannot fail."""
    try:
        _do_silently(worker, turn)
    except Exception as error:
        raise peers.over(type(turn).__name__, error) from error


def _do_silently(worker: Worker, turn: Turn) -> None:
    match turn:
        case Prefetch():
            worker.prefetch(turn.model_ids, keep=turn.keep)
        case Fail():
            worker.fail(turn.key, turn.command, turn.why)
        case Drop():
            worker.drop(turn.ref)
        case Withdrawal():
            worker.release_version(turn.version)
        case Unpin():
            worker.free(turn.version, turn.count)
        case Leave():
            pass
        case Microbatch() | SampleStep() | Rows() | Publication() | Pin():
            raise AssertionError(f"{type(turn).__name__} has an outcome")
        case _:
            assert_never(turn)


def _attempt(peers: Peers, what: str, do: Callable[[], Any]) -> list[Any]:
    """What every rank's ``do`` gave, or its error, by rank."""
    mine: Any
    try:
        mine = do()
    except Exception as error:
        if peers.sharded:  # it left a pass that the others are in
            raise
        mine = as_descant(error)
    return peers.gather(what, mine)


def _all_or_none(peers: Peers, do: Callable[[], None], undo: Callable[[], None]) -> None:
    said = _attempt(peers, "outcome", do)
    first = next((error for error in said if error is not None), None)
    if first is None:
        return
    if said[peers.rank] is None:
        with suppress(DescantError):
            undo()
    raise first


def _must_agree(what: str, said: Sequence[DescantError | None]) -> None:
    failed = [rank for rank, error in enumerate(said) if error is not None]
    if failed and len(failed) < len(said):
        cause = f"{what} failed there alone: {said[failed[0]]}"
        raise DistributedFailure(culprits=failed, where=what, cause=cause)
