"""What the last turns took and on what, so that a slow one says why.

    trace.turn_began()          …  trace.mark("take")  …  trace.mark("decide")  …  trace.turn_ended(kind)

Each mark says what the time since the last one was spent on; all of the loop's time is some turn's, or idle. A turn is
one record in a ring of ``NUM_TURNS``, which costs 3 to 4 µs (two busy cores). ``report`` says what is worth looking at.

A gap is what sequences that could go on waited for a sampling turn: since the last one's end, or since the first turn
that ran although they were there.
"""

from __future__ import annotations

import struct
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from descant import pauses
from descant.ranks.decide import IDLE, ROWS, SAMPLE, TRAIN, Kind
from descant.ranks.health import Gap, SlowTurn, TurnReport

Phase = Literal["wait", "take", "decide", "prefetch", "plan", "run", "answer"]
"""Before a turn begins: wait (for the inbox, with nothing to do), take (requests out of the inbox, and operations that
are no turns: a save's rows are copied, a version is published), decide. In it: prefetch (of adapters), plan (what the
executor gets), run (what it does), answer."""

PHASES: tuple[Phase, ...] = ("wait", "take", "decide", "prefetch", "plan", "run", "answer")
KINDS: tuple[Kind, ...] = (TRAIN, ROWS, SAMPLE)

NUM_TURNS = 4096
NUM_REPORTED = 5
"""Gaps and turns in a report, the longest first."""

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the histograms' buckets; one more has the rest."""

_RECORD = struct.Struct(f"<dd{len(PHASES)}f{len(pauses.KINDS)}fffIIB")
_DTYPE = np.dtype(
    [
        ("start", "<f8"),
        ("end", "<f8"),
        *((phase, "<f4") for phase in PHASES),
        *((kind, "<f4") for kind in pauses.KINDS),
        ("cpu", "<f4"),
        ("gap", "<f4"),
        ("sequences", "<u4"),
        ("tokens", "<u4"),
        ("kind", "u1"),
    ]
)
assert _DTYPE.itemsize == _RECORD.size
_GAP_ROUNDING_S = 1e-4
"""Of what is kept in 4 bytes."""


class TurnTrace:
    """Used on the turn loop's thread."""

    def __init__(
        self,
        seconds: Callable[[], float],
        *,
        cpu_seconds: Callable[[], float] = time.thread_time,
        num_turns: int = NUM_TURNS,
    ):
        """``cpu_seconds``: for which the loop's thread had a core. One that others take makes a turn slow too."""
        self._seconds, self._cpu_seconds = seconds, cpu_seconds
        self._pauses = pauses.spent_s()
        self._ring = bytearray(_RECORD.size * num_turns)
        self._num_turns = num_turns
        self._count = 0
        """Turns so far."""
        self._spent = dict.fromkeys(PHASES, 0.0)
        """Of the turn that comes or runs."""
        self._paused = tuple(self._pauses.values())
        self._last_s = self._start_s = self._start_cpu_s = 0.0
        """When the last mark was, and when the turn began to run."""
        self._sequences = self._tokens = 0
        self._waiting_since_s: float | None = None
        """Since when sequences that can go on wait for a sampling turn."""
        self._gap_s = -1.0
        """Before the turn that runs; -1 where it is none of sampling, or nothing has waited for it."""
        self._by_kind = dict.fromkeys((*KINDS, IDLE), 0.0)
        self._turns = {kind: [0] * (len(BOUNDS_S) + 1) for kind in KINDS}
        self._turns_s = dict.fromkeys(KINDS, 0.0)
        self._gaps = [0] * (len(BOUNDS_S) + 1)
        self._gaps_s = 0.0

    def begin(self) -> None:
        """The loop does: nothing has been spent."""
        self._last_s = self._seconds()

    def mark(self, phase: Phase) -> None:
        """The time since the last mark was spent on this."""
        now_s = self._seconds()
        self._spent[phase] += now_s - self._last_s
        self._last_s = now_s

    def idle(self) -> None:
        """The loop has waited for requests, since the last mark."""
        before_s = self._last_s
        self.mark("wait")
        self._by_kind[IDLE] += self._last_s - before_s

    def turn_began(self, kind: Kind, *, sampling_waits: bool) -> None:
        """It was chosen now. ``sampling_waits``: something can be sampled."""
        self._start_s = now_s = self._seconds()
        self._start_cpu_s = self._cpu_seconds()
        self._gap_s = -1.0
        if kind == SAMPLE and self._waiting_since_s is not None:
            self._gap_s = now_s - self._waiting_since_s
            self._gaps[bisect_left(BOUNDS_S, self._gap_s)] += 1
            self._gaps_s += self._gap_s
        elif sampling_waits and self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def holds(self, sequences: int, tokens: int) -> None:
        """The turn that runs: sequences or datums, row commands; and their tokens."""
        self._sequences, self._tokens = sequences, tokens

    def turn_ended(self, kind: Kind, *, sampling_waits: bool) -> float:
        """What it took since it began, in seconds."""
        self.mark("answer")
        end_s, spent, paused = self._last_s, self._spent, tuple(self._pauses.values())
        took_s = end_s - self._start_s
        self._by_kind[kind] += sum(spent.values()) - spent["wait"]
        self._turns[kind][bisect_left(BOUNDS_S, took_s)] += 1
        self._turns_s[kind] += took_s
        if kind == SAMPLE:
            self._waiting_since_s = end_s if sampling_waits else None
        elif not sampling_waits:
            self._waiting_since_s = None
        _RECORD.pack_into(
            self._ring,
            self._count % self._num_turns * _RECORD.size,
            self._start_s,
            end_s,
            *spent.values(),
            *[now - before for now, before in zip(paused, self._paused)],
            self._cpu_seconds() - self._start_cpu_s,
            self._gap_s,
            self._sequences,
            self._tokens,
            KINDS.index(kind),
        )
        self._count += 1
        self._paused = paused
        self._sequences = self._tokens = 0
        for phase in PHASES:
            spent[phase] = 0.0
        return took_s

    # ------------------------------------------------------------------------------------------------ reading
    def stats(self) -> Mapping[str, float]:
        """Seconds of the loop by kind, and two histograms: ``…_bucket/`` their upper end, ``…_sum``, ``…_count``."""
        found = {f"loop_{kind}_seconds": spent for kind, spent in self._by_kind.items()}
        found |= {f"pause_{kind}_seconds": spent for kind, spent in self._pauses.items()}
        for kind in KINDS:
            found |= _histogram(f"{kind}_turn_seconds", self._turns[kind], self._turns_s[kind])
        return found | _histogram("sampling_gap_seconds", self._gaps, self._gaps_s)

    def report(self) -> TurnReport:
        """Of the turns in the ring."""
        turns = np.frombuffer(self._ring, _DTYPE)
        num, first = min(self._count, self._num_turns), self._count % self._num_turns
        turns = turns[:num] if self._count <= self._num_turns else np.concatenate([turns[first:], turns[:first]])
        now_s = self._seconds()
        sampled = np.flatnonzero(turns["gap"] >= 0)
        gaps = turns["gap"][sampled]
        took = turns["end"] - turns["start"]
        p50, p99, p99_9 = np.quantile(gaps, (0.5, 0.99, 0.999), method="higher").tolist() if len(gaps) else (0.0,) * 3
        return TurnReport(
            num_turns=num,
            seconds=float(now_s - turns["start"][0]) if num else 0.0,
            num_gaps=len(gaps),
            gap_p50_s=p50,
            gap_p99_s=p99,
            gap_p99_9_s=p99_9,
            gaps=[_gap(turns, int(sampled[i]), now_s) for i in np.argsort(-gaps, kind="stable")[:NUM_REPORTED]],
            slowest=[_slow(turns[i], now_s) for i in np.argsort(-took, kind="stable")[:NUM_REPORTED]],
        )


def _histogram(name: str, counts: Sequence[int], total: float) -> dict[str, float]:
    """Buckets have what the smaller ones have, as Prometheus wants it."""
    found, so_far = dict[str, float](), 0
    for bound, count in zip((*BOUNDS_S, "+Inf"), counts, strict=True):
        so_far += count
        found[f"{name}_bucket/{bound}"] = so_far
    return {**found, f"{name}_sum": total, f"{name}_count": so_far}


def _gap(turns: np.ndarray, index: int, now_s: float) -> Gap:
    """Before the sampling turn ``index``, and which turns were in it."""
    turn = turns[index]
    since_s = turn["start"] - turn["gap"] - _GAP_ROUNDING_S
    first = index
    while first > 0 and turns["start"][first - 1] >= since_s:
        first -= 1
    return Gap(
        seconds=float(turn["gap"]),
        ago_s=float(now_s - turn["start"]),
        turns=[_slow(other, now_s) for other in turns[first:index]],
        before={phase: float(turn[phase]) for phase in PHASES[:3]},
    )


def _slow(turn: np.void, now_s: float) -> SlowTurn:
    return SlowTurn(
        kind=KINDS[turn["kind"]],
        seconds=float(turn["end"] - turn["start"]),
        cpu_s=float(turn["cpu"]),
        ago_s=float(now_s - turn["end"]),
        sequences=int(turn["sequences"]),
        tokens=int(turn["tokens"]),
        phases={phase: float(turn[phase]) for phase in PHASES},
        pauses={kind: float(turn[kind]) for kind in pauses.KINDS},
    )
