"""What a replica is like at a moment, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from descant.dist.failure import DistributedFailure

State = Literal["serving", "starting", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """``pids`` and ``nodes`` by rank; a node is "" where it is the server's. ``runs``: a few words without anybody's
    ids, "" when idle, and ``runs_s`` the seconds since its turn began, to the second. ``num_commands`` and
    ``num_samplings``: open requests."""

    state: State
    pids: Sequence[int]
    nodes: Sequence[str]
    device: str
    runs: str
    runs_s: float
    num_commands: int
    num_samplings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a replica's ranks last ended, untold. ``verdict``: their referee's, if they are several."""

    message: str
    last_lines: str = ""
    verdict: DistributedFailure | None = None
