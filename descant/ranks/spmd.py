"""All ranks of a replica as one ``Executor``, on rank 0; and the followers' loop: receive each operation, and execute
it too.

    loop → SpmdExecutor.execute → broadcast → [every rank] Worker.execute → gather → commit     the worst outcome counts

Rank 0 alone decides. Operations that have no outcome (``Operation.runs``) are executed at once
on rank 0 and broadcast with the next one that has, so that each rank does all of them in one order. Checkpoints are
read by rank 0, and their tensors go along in the operation: whatever the others' disks hold, all ranks have the same
numbers, and one of them asks the file system.

What one rank alone cannot do although the others have done it, and what cannot be undone, ends the replica: its rows
are not the same any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from descant.distributed.failure import DistributedFailure
from descant.errors import DescantError
from descant.ranks.channel import TurnStatus
from descant.ranks.executor import Executor
from descant.ranks.ops import Operation, Stop
from descant.ranks.peers import Peers
from descant.sample.scheduler import Scheduler
from descant.types import CheckpointSource

R = TypeVar("R")

IDLE_S = 1.0
"""How often rank 0 broadcasts ``Idle`` while there is nothing to do, which checks that all ranks are well."""


class SpmdExecutor:
    """``Executor``. Used on the thread that joined, but for ``read`` and what goes on behind the turns."""

    def __init__(self, worker: Executor, peers: Peers):
        self.info = replace(worker.info, idle_s=IDLE_S)
        self.memory = worker.memory
        self._worker, self._peers = worker, peers
        self._deferred: list[Operation[Any]] = []
        self._number = 0

    def execute(self, op: Operation[R]) -> R:
        match op.runs:
            case "on rank 0":
                return self._worker.execute(op)
            case "on every rank, later":
                self._deferred.append(op)
                return _execute_deferred(self._worker, self._peers, op)
            case "on every rank":
                return self._on_every_rank(op)

    def _on_every_rank(self, op: Operation[R]) -> R:
        ops, self._deferred = (*self._deferred, op), []
        self._number += 1
        with self._peers.turn("turn", self._number):
            self._peers.broadcast(ops)
        with self._peers.turn(type(op).__name__, self._number):
            return self._worker.execute(op)

    def make_scheduler(self) -> Scheduler:
        return self._worker.make_scheduler()

    def read(self, source: CheckpointSource) -> Any:
        return self._worker.read(source)


def run_follower(worker: Executor, peers: Peers, turn_status: TurnStatus) -> None:
    """The loop of every rank but rank 0, until ``Stop``. Raises ``DistributedFailure``."""
    number = 0
    while True:
        number += 1
        with peers.turn("turn", number):
            ops: Sequence[Operation[Any]] = peers.receive()
        *before, op = ops
        turn_status.write(number, type(op).__name__)
        with peers.turn(type(op).__name__, number):
            for deferred in before:
                _execute_deferred(worker, peers, deferred)
            if isinstance(op, Stop):
                return
            try:
                worker.execute(op)
            except DistributedFailure:  # the end of the replica
                raise
            except DescantError:  # the outcome on all ranks; rank 0 answers with it
                pass
        turn_status.write(number, "")


def _execute_deferred(worker: Executor, peers: Peers, op: Operation[R]) -> R:
    try:
        return worker.execute(op)
    except Exception as error:
        raise peers.failed_here(type(op).__name__, error) from error
