"""Engines cannot be left paused. The clock is an argument."""

from __future__ import annotations

import pytest

from descant.distributed.lease import PauseGate, paused
from descant.errors import ServerError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Unreachable(PauseGate):
    """Takes the call to pause, and the answer is lost."""

    def pause(self, holder: str, lease_s: float) -> bool:
        super().pause(holder, lease_s)
        raise OSError("connection reset")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_resume_missing_after_a_failed_weight_sync(clock: Clock):
    """The sync fails between pause and resume: every engine goes on, at once."""
    engines = [PauseGate(clock) for _ in range(3)]

    def sync() -> None:
        with paused(engines, holder="sync"):
            assert all(engine.held for engine in engines)
            raise OSError("push")

    with pytest.raises(OSError, match="push"):
        sync()
    assert not any(engine.held for engine in engines)


def test_a_holder_that_vanishes_lets_the_lease_lapse(clock: Clock):
    engine = PauseGate(clock)
    block = paused([engine], holder="sync", lease_s=30)
    block.__enter__()
    clock.now = 29.9
    assert engine.held
    clock.now = 30.0
    assert not engine.held


def test_a_pause_that_reaches_only_some_engines_is_undone(clock: Clock):
    engines = [PauseGate(clock), Unreachable(clock), PauseGate(clock)]
    with pytest.raises(OSError, match="connection reset"), paused(engines, holder="sync"):
        pytest.fail("entered")
    assert [engine.held for engine in engines] == [False, False, False]


def test_renewed_it_lasts_and_lapsed_it_is_an_error(clock: Clock):
    engine = PauseGate(clock)
    with paused([engine], holder="sync", lease_s=10) as keep:
        for _ in range(5):
            clock.now += 9
            keep()
            assert engine.held

    def overstay(renew: bool) -> None:
        with paused([engine], holder="sync", lease_s=10) as keep:
            clock.now += 11
            if renew:
                keep()

    with pytest.raises(ServerError, match="ended badly: 1 leases of 10 s had lapsed"):
        overstay(renew=False)
    with pytest.raises(ServerError, match="lapsed on 1 of 1 engines before it was renewed"):
        overstay(renew=True)
    assert not engine.held


def test_holders_do_not_resume_each_other(clock: Clock):
    engine = PauseGate(clock)
    with paused([engine], holder="a"):
        with paused([engine], holder="b"):
            assert engine.holders == ("a", "b")
        assert engine.holders == ("a",)
    assert not engine.held


def test_an_engine_that_cannot_be_resumed_does_not_keep_the_others(clock: Clock):
    class Gone(PauseGate):
        def resume(self, holder: str) -> bool:
            raise OSError("no route")

    engines = [Gone(clock), PauseGate(clock)]
    with pytest.raises(ServerError, match="1 engines could not be resumed"), paused(engines, holder="sync"):
        pass
    assert not engines[1].held
