"""The trace of turns, by a clock that is moved by hand."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from descant import pauses
from descant.ranks.health import TurnReport
from descant.ranks.turn_trace import NUM_REPORTED, TurnTrace


class Turns:
    """A trace, and turns of given times. The clock begins at 100."""

    def __init__(self, num_turns: int = 64):
        self.now = 100.0
        self.trace = TurnTrace(lambda: self.now, cpu_seconds=lambda: self.now / 4, num_turns=num_turns)
        self.trace.begin()

    def spend(self, phase: str, seconds: float) -> None:
        self.now += seconds
        self.trace.mark(phase)  # type: ignore[arg-type]

    def turn(
        self,
        kind: str,
        run: float,
        *,
        take: float = 0.0,
        answer: float = 0.0,
        sampling: tuple[bool, bool] = (True, True),
    ) -> float:
        """``sampling``: whether something can be sampled before and after it."""
        self.spend("take", take)
        self.trace.turn_began(kind, sampling_waits=sampling[0])
        self.trace.holds(3, 40)
        self.spend("run", run)
        self.now += answer
        return self.trace.turn_ended(kind, sampling_waits=sampling[1])


def test_a_turn_says_what_it_was_spent_on() -> None:
    turns = Turns()
    turns.now += 5.0
    turns.trace.idle()
    assert turns.turn("train", 2.0, take=0.5, answer=0.25) == 2.25
    [slow] = turns.trace.report().slowest
    assert (slow.kind, slow.sequences, slow.tokens) == ("train", 3, 40)
    assert (slow.seconds, slow.cpu_s, slow.ago_s) == (2.25, 2.25 / 4, 0.0)
    spent = {phase: seconds for phase, seconds in slow.phases.items() if seconds}
    assert spent == {"wait": 5.0, "take": 0.5, "run": 2.0, "answer": 0.25}
    turns.turn("rows", 1.0)
    assert turns.trace.report().slowest[1].phases["take"] == 0.0, "the next begins anew"
    stats = turns.trace.stats()
    spent_s = [stats[f"loop_{kind}_seconds"] for kind in ("idle", "train", "rows", "sample")]
    assert spent_s == [5.0, 2.75, 1.0, 0.0]


def test_a_gap_is_what_ran_between_two_sampling_turns() -> None:
    turns = Turns()
    turns.turn("sample", 0.1)
    turns.turn("train", 1.0)
    turns.turn("rows", 0.5)
    turns.turn("sample", 0.1, take=0.25)
    report = turns.trace.report()
    [gap] = report.gaps
    assert gap.seconds == pytest.approx(1.75)
    assert [(turn.kind, turn.seconds) for turn in gap.turns] == [("train", 1.0), ("rows", 0.5)]
    assert {phase: seconds for phase, seconds in gap.before.items() if seconds} == {"take": 0.25}
    assert report.num_gaps == 1
    assert report.gap_p50_s == report.gap_p99_9_s == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("events", "gaps"),
    [
        pytest.param([("sample", True, False), ("train", False, False), ("sample", True, True)], [], id="nothing"),
        pytest.param([("train", True, True), ("sample", True, True)], [1.0], id="came before a training turn"),
        pytest.param([("train", False, True), ("sample", True, True)], [], id="came during a training turn"),
        pytest.param([("sample", True, True), ("sample", True, True)], [0.0], id="one after the other"),
        pytest.param([("sample", True, True), ("train", True, False), ("sample", True, True)], [], id="cancelled"),
    ],
)
def test_only_what_could_go_on_waits(events: list[tuple[str, bool, bool]], gaps: list[float]) -> None:
    turns = Turns()
    for kind, before, after in events:
        turns.turn(kind, 1.0, sampling=(before, after))
    assert [gap.seconds for gap in turns.trace.report().gaps] == gaps
    assert turns.trace.stats()["sampling_gap_seconds_count"] == len(gaps)


def test_pauses_are_those_of_the_turn() -> None:
    turns = Turns()
    with pauses.paused("trim"):
        pass
    turns = Turns()
    turns.trace.turn_began("sample", sampling_waits=True)
    with pauses.paused("trim"):
        pass
    turns.trace.turn_ended("sample", sampling_waits=True)
    turns.turn("sample", 1.0)
    slow = turns.trace.report().slowest
    assert slow[0].pauses["trim"] == 0.0
    assert slow[1].pauses["trim"] > 0.0


def test_the_ring_keeps_the_last_turns_and_the_histograms_all() -> None:
    turns = Turns(num_turns=8)
    for number in range(20):
        turns.turn("train", 1.0 + number)
    report = turns.trace.report()
    assert report.num_turns == 8
    assert report.seconds == pytest.approx(sum(range(13, 21)))
    assert [turn.seconds for turn in report.slowest] == [20.0, 19.0, 18.0, 17.0, 16.0][:NUM_REPORTED]
    stats = turns.trace.stats()
    assert stats["train_turn_seconds_count"] == stats["train_turn_seconds_bucket/+Inf"] == 20
    assert stats["train_turn_seconds_sum"] == pytest.approx(sum(range(1, 21)))
    assert [stats[f"train_turn_seconds_bucket/{bound}"] for bound in ("0.5", "1.0", "5.0", "10.0")] == [0, 1, 5, 10]


def test_a_report_is_data() -> None:
    turns = Turns()
    assert turns.trace.report().num_turns == 0
    for kind in ("sample", "train", "sample"):
        turns.turn(kind, 1.0)
    report = turns.trace.report()
    assert TurnReport.from_json(json.loads(json.dumps(asdict(report)))) == report
