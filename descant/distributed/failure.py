"""The one error that all ranks of a run raise: which ranks failed, where, why, and what each rank was doing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from descant.errors import ServerError

COORDINATOR = -1
"""The coordinator among ``failed_ranks``: it is no rank."""

RankState = Literal["running", "stopped", "dead", "left", "absent", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank at the moment of the failure.

    ``where`` is its innermost scope or sync point, ``since_s`` the seconds it had been there, ``last`` its last
    operations, newest last. ``absent``: it never joined. ``unknown``: seen by a rank that could not ask the
    coordinator.
    """

    rank: int
    state: RankState
    where: str
    since_s: float
    last: tuple[str, ...] = ()


class DistributedFailure(ServerError):
    """The same on every rank that raises it.

    ``recoverable``: every rank of the group reached ``where`` and raises this there, so all are still in step and may
    go on (retry, skip). Otherwise the run is over: every later sync point and collective raises the same failure again.
    """

    def __init__(
        self,
        *,
        failed_ranks: Sequence[int],
        where: str,
        cause: str,
        table: Sequence[RankRow] = (),
        recoverable: bool = False,
    ):
        self.failed_ranks = tuple(failed_ranks)
        self.where = where
        self.cause = cause
        self.table = tuple(table)
        self.recoverable = recoverable
        super().__init__(f"{name_ranks(self.failed_ranks)} failed at {where}: {cause}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.to_json(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributedFailure) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.failed_ranks, self.where, self.cause))

    def to_json(self) -> dict[str, Any]:
        return {
            "failed_ranks": list(self.failed_ranks),
            "where": self.where,
            "cause": self.cause,
            "table": [{**asdict(row), "last": list(row.last)} for row in self.table],
            "recoverable": self.recoverable,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DistributedFailure:
        rows = [RankRow(**{**row, "last": tuple(row["last"])}) for row in value["table"]]
        return cls(**{**value, "failed_ranks": tuple(value["failed_ranks"]), "table": rows})

    def report(self) -> str:
        """The message and the table, as text."""
        lines = [str(self)]
        for row in self.table:
            lines.append(f"  rank {row.rank}: {row.state}, {row.where}, since {row.since_s:.1f} s")
            lines += [f"      {operation}" for operation in row.last]
        return "\n".join(lines)


def _rebuild(value: dict[str, Any]) -> DistributedFailure:
    return DistributedFailure.from_json(value)


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1, 3``, ``the coordinator``."""
    numbers = [str(rank) for rank in ranks if rank != COORDINATOR]
    names = [f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"] if numbers else []
    if COORDINATOR in ranks:
        names.append("the coordinator")
    return " and ".join(names) or "no rank"


def write_report(path: str, failure: DistributedFailure) -> None:
    """Durable before it returns: file and directory are fsynced. Raises OSError."""
    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(failure.to_json(), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_report(path: str) -> DistributedFailure:
    with open(path, encoding="utf-8") as file:
        return DistributedFailure.from_json(json.load(file))
