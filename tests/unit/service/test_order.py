"""The sequencer alone: tables of arrivals, and a property over random ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descant.service.order import CloseGap, Deliver, Event, Reject, Sequencer

LIMIT_S = 330.0


def show(events: tuple[Event[str], ...]) -> list[str]:
    shown = []
    for event in events:
        match event:
            case Deliver():
                shown.append(f"run {event.seq_id}")
            case CloseGap():
                shown.append(f"missing {event.first}-{event.last}")
            case Reject():
                shown.append(f"{'fail' if event.in_place else 'late'} {event.seq_id}")
    return shown


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        pytest.param([1, 2, 3], ["run 1", "run 2", "run 3"], id="in order"),
        pytest.param([3, 2, 1], ["run 1", "run 2", "run 3"], id="backwards"),
        pytest.param([2, 1, 4, 3], ["run 1", "run 2", "run 3", "run 4"], id="pairs"),
        pytest.param([1, 3, 4], ["run 1"], id="waits behind a gap"),
        pytest.param([2, 3], [], id="waits for the first"),
        pytest.param([1, 1], ["run 1", "late 1"], id="twice, after it ran"),
        pytest.param([2, 2, 1], ["late 2", "run 1", "run 2"], id="twice, while it waits"),
        pytest.param([0], ["late 0"], id="below the first"),
        pytest.param([10**18, 1], ["run 1"], id="far away"),
    ],
)
def test_arrivals(arrivals: list[int], expected: list[str]) -> None:
    sequencer: Sequencer[str] = Sequencer(gap_timeout_s=LIMIT_S)
    assert [line for seq_id in arrivals for line in show(sequencer.offer(seq_id, "", now=0.0))] == expected


def test_a_gap_is_closed_at_its_time_and_not_before() -> None:
    sequencer: Sequencer[str] = Sequencer(gap_timeout_s=LIMIT_S)
    sequencer.offer(1, "", now=0.0)
    assert sequencer.deadline is None
    sequencer.offer(3, "", now=10.0)
    sequencer.offer(4, "", now=300.0)
    assert sequencer.deadline == 340.0
    assert sequencer.expire(now=339.9) == ()
    events = sequencer.expire(now=340.0)
    assert show(events) == ["missing 2-2", "fail 3", "fail 4"]
    for event in events:
        assert not isinstance(event, Deliver)
        assert "seq_id 2 did not arrive within 330 s" in event.message
    assert sequencer.deadline is None
    assert sequencer.expire(now=10**9) == ()
    assert show(sequencer.offer(5, "", now=341.0)) == ["run 5"], "order goes on"


def test_a_late_arrival_of_a_closed_id_gets_the_same_failure() -> None:
    sequencer: Sequencer[str] = Sequencer(gap_timeout_s=LIMIT_S)
    sequencer.offer(4, "", now=0.0)
    sequencer.offer(7, "", now=0.0)
    assert show(sequencer.expire(now=LIMIT_S)) == ["missing 1-3", "fail 4", "missing 5-6", "fail 7"]
    for seq_id in (1, 2, 3, 5, 6):
        (event,) = sequencer.offer(seq_id, "", now=LIMIT_S + 1)
        assert isinstance(event, Reject)
        assert not event.in_place
        assert "seq_id 1 did not arrive within 330 s" in event.message
    (again,) = sequencer.offer(4, "", now=LIMIT_S + 1)
    assert isinstance(again, Reject)
    assert "answered before" in again.message


def test_a_second_gap_behind_a_filled_one_has_its_full_time() -> None:
    sequencer: Sequencer[str] = Sequencer(gap_timeout_s=LIMIT_S)
    sequencer.offer(4, "", now=0.0)
    sequencer.offer(1, "", now=200.0)
    sequencer.offer(2, "", now=300.0)
    assert sequencer.deadline == 300.0 + LIMIT_S
    assert show(sequencer.expire(now=300.0 + LIMIT_S)) == ["missing 3-3", "fail 4"]


def test_ending_fails_what_waits_and_what_comes() -> None:
    sequencer: Sequencer[str] = Sequencer(gap_timeout_s=LIMIT_S)
    sequencer.offer(1, "", now=0.0)
    sequencer.offer(3, "", now=0.0)
    events = sequencer.end("its session ended")
    assert show(events) == ["missing 2-2", "fail 3"]
    assert isinstance(events[1], Reject)
    assert "seq_id 2 had not arrived when its session ended" in events[1].message
    (event,) = sequencer.offer(4, "", now=0.0)
    assert isinstance(event, Reject)
    assert "its session ended" in event.message


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[float, int]]:
    """Ids 1..n in any order, some twice, some never, with times that rise."""
    n = draw(st.integers(1, 12))
    ids = draw(st.permutations(range(1, n + 1)))
    kept = [seq_id for seq_id in ids if draw(st.integers(0, 4))]
    for seq_id in list(kept):
        if not draw(st.integers(0, 4)):
            kept.insert(draw(st.integers(0, len(kept))), seq_id)
    steps = draw(st.lists(st.sampled_from([0.0, 1.0, 100.0, 400.0]), min_size=len(kept), max_size=len(kept)))
    times, now = [], 0.0
    for step in steps:
        now += step
        times.append(now)
    return list(zip(times, kept))


@given(arrivals())
def test_any_arrivals_have_one_fate_each_in_order(arrivals: list[tuple[float, int]]) -> None:
    sequencer: Sequencer[int] = Sequencer(gap_timeout_s=LIMIT_S)
    in_place: list[Event[int]] = []
    late: list[Reject[int]] = []
    offers: dict[int, int] = {}
    arrived: set[int] = set()
    closed: set[int] = set()
    now = 0.0
    for number, (now, seq_id) in enumerate(arrivals):
        for events in (sequencer.expire(now=now), sequencer.offer(seq_id, number, now=now)):
            for event in events:
                if isinstance(event, Reject) and not event.in_place:
                    late.append(event)
                else:
                    in_place.append(event)
                if isinstance(event, CloseGap):
                    assert not arrived & set(range(event.first, event.last + 1)), "closed only what had not arrived"
                    closed |= set(range(event.first, event.last + 1))
        arrived.add(seq_id)
        offers[number] = seq_id
    in_place += sequencer.expire(now=now + LIMIT_S)

    covered = [
        seq_id
        for event in in_place
        for seq_id in (range(event.first, event.last + 1) if isinstance(event, CloseGap) else [event.seq_id])
    ]
    assert covered == list(range(1, len(covered) + 1)), "every id once, rising, none passed over"
    assert set(covered) >= arrived, "everything that arrived had its fate in the end"
    fates = [event.item for event in [*in_place, *late] if not isinstance(event, CloseGap)]
    assert sorted(fates) == sorted(offers), "every offer has exactly one"
    runs = [event.seq_id for event in in_place if isinstance(event, Deliver)]
    assert len(runs) == len(set(runs))
    assert not set(runs) & closed
    if sorted(offers.values()) == list(range(1, len(offers) + 1)) and now < LIMIT_S:
        assert len(runs) == len(offers), "without gaps everything runs"
