"""A replica's health, its slow turns and its last death, as ``descant doctor`` shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowTurn:
    """``kind``: train, rows or sample. ``sequences``: or datums, or row commands. ``phases`` and ``pauses``: seconds by
    name (``ranks.turn_trace.Phase``, ``pauses.Pause``). ``cpu_s``: for which the loop's thread had a core; on a CPU the
    rest went to others, or to waiting for torch's threads that had none. ``ago_s``: since its end."""

    kind: str
    seconds: float
    cpu_s: float
    ago_s: float
    sequences: int
    tokens: int
    phases: Mapping[str, float]
    pauses: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Sequences waited so long for a sampling turn, while ``turns`` ran. ``before``: seconds by phase between the last
    of these and the sampling turn. ``ago_s``: since its end."""

    seconds: float
    ago_s: float
    turns: Sequence[SlowTurn]
    before: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """Of a replica's last ``num_turns`` turns, in the last ``seconds``: its gaps and its slowest turns, the longest
    first. The percentiles are those of all ``num_gaps`` gaps, 0 where there are none."""

    num_turns: int
    seconds: float
    num_gaps: int
    gap_p50_s: float
    gap_p99_s: float
    gap_p99_9_s: float
    gaps: Sequence[Gap]
    slowest: Sequence[SlowTurn]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TurnReport:
        """Of what ``dataclasses.asdict`` makes."""
        gaps = [Gap(**{**gap, "turns": [SlowTurn(**turn) for turn in gap["turns"]]}) for gap in value["gaps"]]
        return cls(**{**value, "gaps": gaps, "slowest": [SlowTurn(**turn) for turn in value["slowest"]]})
