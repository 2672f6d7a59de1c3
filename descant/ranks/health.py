"""A replica's health and its last death, as ``descant doctor`` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from descant.distributed.failure import DistributedFailure

State = Literal["serving", "stopped", "starting", "down"]
"""stopped: by a signal, one of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """``pids`` and ``nodes`` by rank; a node is "" where it is the server's. ``runs``: a few words without tenants'
    ids, "" when idle, and ``runs_s`` the seconds since its turn began, to the second. ``num_commands`` and
    ``num_sample_requests``: open requests."""

    state: State
    pids: Sequence[int]
    nodes: Sequence[str]
    device: str
    runs: str
    runs_s: float
    num_commands: int
    num_sample_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a replica's ranks last ended without ``Stop``. ``failure``: the coordinator's, if they are several."""

    message: str
    last_lines: str = ""
    failure: DistributedFailure | None = None
