"""The table of client liveness: each signal, its grace to either side, what is done, and what withdraws it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from descant.service.liveness import CLONE_IDS, Action, Client, Lapse, Liveness, Signal, client_of, policy
from descant.service.settings import ServiceSettings
from descant.testing.clock import FakeClock, settle
from descant.types import FutureKey

SESSION = "s"
CLIENT = Client(SESSION)
COPY = Client(SESSION, "s:sample:0#7")
MAX_PAUSE_S = 2.0


class World:
    """A session, whose lapses are noted with the time at which they came."""

    def __init__(self, session_timeout_s: float = 3600.0) -> None:
        self.clock = FakeClock()
        self.lapses: list[tuple[float, Action, tuple[str, ...]]] = []
        self.whys: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.liveness = Liveness(
            clock=self.clock,
            rules=policy(session_timeout_s),
            spawn=self._spawn,
            act=self._note,
            max_pause_s=MAX_PAUSE_S,
        )
        self.began_at = self.clock.monotonic()
        self.liveness.opened(SESSION)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _note(self, lapse: Lapse) -> None:
        assert lapse.session_id == SESSION
        self.lapses.append((round(self.clock.monotonic() - self.began_at, 3), lapse.action, lapse.request_ids))
        self.whys.append(lapse.why)

    async def later(self, seconds: float, *, step_s: float = 0.5) -> None:
        """Time passes, with a sweep every ``step_s``."""
        for _ in range(round(seconds / step_s)):
            await self.clock.advance(step_s)
            await self.liveness.sweep()


async def close_a_poll(world: World) -> None:
    with world.liveness.polling(CLIENT, "r"):
        pass
    world.liveness.poll_disconnected(CLIENT)


async def close_a_submission(world: World) -> None:
    world.liveness.submission_disconnected("r")


async def nothing(world: World) -> None:
    pass


ABANDONED = (Action.ABANDON_REQUESTS, ("r",))
NO_LONGER_HEARD_OF = [
    (60.5, *ABANDONED),
    (600.5, Action.RELEASE_WEIGHTS, ("r",)),
    (3600.5, Action.END_SESSION, ("r",)),
]


@pytest.mark.parametrize(
    ("see", "polls_at_once", "seconds", "expected"),
    [
        pytest.param(close_a_poll, False, 30, [(0.5, *ABANDONED)], id="its last poll closed by its side: 0.5 s"),
        pytest.param(close_a_submission, True, 3, [(0.5, *ABANDONED)], id="the SDK's submission closed: 0.5 s"),
        pytest.param(close_a_submission, False, 30, [(5.5, *ABANDONED)], id="another's submission closed: 5 s"),
        pytest.param(nothing, True, 5.5, [(5.5, *ABANDONED)], id="the SDK does not poll: 5 s"),
        pytest.param(nothing, False, 4000, NO_LONGER_HEARD_OF, id="silence: a minute, 10 minutes, an hour"),
    ],
)
async def test_each_signal_has_its_grace_and_its_action(
    see: Callable[[World], Coroutine[Any, Any, None]],
    polls_at_once: bool,
    seconds: float,
    expected: list[tuple[float, Action, tuple[str, ...]]],
) -> None:
    """Every sweep is half a second after the last; a grace that ends with one is over by the next."""
    world = World()
    world.liveness.began("r", CLIENT, polls_at_once=polls_at_once)
    await see(world)
    await world.later(seconds)
    assert world.lapses == expected


@pytest.mark.parametrize("comes_back", ["submits", "beats", "polls"])
async def test_a_sign_of_life_within_the_grace_withdraws_a_disconnect(comes_back: str) -> None:
    world = World()
    world.liveness.began("r", CLIENT, polls_at_once=False)
    world.liveness.poll_disconnected(CLIENT)
    await world.clock.advance(0.4)
    if comes_back == "polls":
        with world.liveness.polling(CLIENT, "r"):
            await world.later(1000)
            world.liveness.poll_disconnected(CLIENT), "another poll is open"
            await world.later(1000)
    else:
        world.liveness.heard_from(CLIENT)
    await world.later(50)
    assert world.lapses == []


async def test_silence_counts_from_the_end_of_the_last_poll() -> None:
    world = World()
    with world.liveness.polling(CLIENT, "r"):
        await world.later(50)
    await world.later(61)
    assert world.lapses == [(110.5, Action.ABANDON_REQUESTS, ())]


async def test_a_copy_is_a_client_of_its_own_but_keeps_its_session() -> None:
    world = World()
    world.liveness.began("own", CLIENT, polls_at_once=False)
    world.liveness.began("copied", COPY, polls_at_once=False)
    world.liveness.poll_disconnected(CLIENT)
    await world.clock.advance(0.4)
    world.liveness.heard_from(COPY)
    await world.later(1)
    assert world.lapses == [(0.5, Action.ABANDON_REQUESTS, ("own",))]
    assert world.whys == ["its client closed all its connections"]
    for _ in range(10):
        await world.later(50)
        world.liveness.heard_from(COPY)
    assert len(world.lapses) == 1


async def test_a_session_that_came_back_has_longer_from_then_on() -> None:
    """As behind a proxy that cuts long polls: the SDK polls again after a second."""
    world = World()
    world.liveness.began("r", CLIENT, polls_at_once=False)
    await close_a_poll(world)
    await world.later(1)
    assert world.lapses == [(0.5, *ABANDONED)]
    world.liveness.came_back(SESSION)
    for _ in range(20):
        await close_a_poll(world)
        await world.later(2.5)
    assert len(world.lapses) == 1
    await close_a_poll(world)
    await world.later(3.5)
    assert world.lapses[1:] == [(54.0, *ABANDONED)]
    world.liveness.came_back("a session that is over")


async def test_what_ended_or_was_polled_is_no_orphan_and_sending_again_begins_anew() -> None:
    world = World()
    for request_id in ("ended", "polled", "again", "orphan"):
        world.liveness.began(request_id, CLIENT, polls_at_once=True)
    world.liveness.ended("ended")
    with world.liveness.polling(CLIENT, "polled"):
        pass
    await world.later(4)
    world.liveness.sent_again("again")
    await world.later(3)
    assert world.lapses == [(5.5, Action.ABANDON_REQUESTS, ("orphan",))]
    world.liveness.ended("orphan")
    await world.later(3)
    assert world.lapses[1:] == [(9.5, Action.ABANDON_REQUESTS, ("again",))]
    for request_id in ("again", "polled", "never began"):
        world.liveness.ended(request_id)
    await world.later(100)
    assert world.lapses[2:] == [(60.5, Action.ABANDON_REQUESTS, ())]


def test_the_policy_of_the_default_settings() -> None:
    rules = policy(ServiceSettings().session_timeout_s)
    assert [(rule.signal, rule.grace_s, rule.action) for rule in rules] == [
        (Signal.DISCONNECTED, 0.5, Action.ABANDON_REQUESTS),
        (Signal.DISCONNECTED_AGAIN, 3.0, Action.ABANDON_REQUESTS),
        (Signal.ORPHANED, 5.0, Action.ABANDON_REQUESTS),
        (Signal.SILENT, 60.0, Action.ABANDON_REQUESTS),
        (Signal.SILENT, 600.0, Action.RELEASE_WEIGHTS),
        (Signal.SILENT, 3600.0, Action.END_SESSION),
    ]


async def test_after_a_pause_of_the_process_polls_are_read_first() -> None:
    world = World()
    world.liveness.began("r", CLIENT, polls_at_once=True)
    await world.clock.advance(100.0)
    await world.liveness.sweep()
    assert world.lapses == [(100, *ABANDONED)], "of silence: it had 60 s"
    world = World()
    world.liveness.began("r", CLIENT, polls_at_once=True)
    await world.clock.advance(10.0)
    await world.liveness.sweep()
    assert world.lapses == []
    with world.liveness.polling(CLIENT, "r"):
        pass
    await world.later(20)
    assert world.lapses == []


async def test_silences_that_are_over_together_come_in_order_and_hearing_begins_anew() -> None:
    world = World()
    await world.clock.advance(4000.0)
    await world.liveness.sweep()
    assert [action for _, action, _ in world.lapses] == list(Action)
    assert set(world.whys) == {"nothing was heard of its client for 4000 s"}
    world.liveness.heard(SESSION)
    await world.later(61)
    assert [action for _, action, _ in world.lapses[3:]] == [Action.ABANDON_REQUESTS]
    world.liveness.closed(SESSION)
    world.liveness.heard(SESSION)
    await world.later(1000)
    assert len(world.lapses) == 4


async def test_a_session_may_time_out_sooner_than_a_minute() -> None:
    world = World(session_timeout_s=12.0)
    await world.later(20)
    assert [(at, action) for at, action, _ in world.lapses] == [
        (2.5, Action.RELEASE_WEIGHTS),
        (12.5, Action.ABANDON_REQUESTS),
        (12.5, Action.END_SESSION),
    ]


async def test_nothing_is_left_behind() -> None:
    world, empty = World(), World()
    for request_id in ("a", "b"):
        world.liveness.began(request_id, CLIENT, polls_at_once=True)
        with world.liveness.polling(CLIENT, request_id):
            pass
        world.liveness.ended(request_id)
    world.liveness.poll_disconnected(CLIENT)
    await world.later(1)
    await settle()
    for each in (world, empty):
        each.liveness.closed(SESSION)
        await each.later(100)
    for name in ("_polls", "_polls_of_session", "_leaving", "_requests", "_of_session", "_unpolled", "_sessions"):
        assert getattr(world.liveness, name) == getattr(empty.liveness, name), name
    assert world.liveness._timers == []


def test_whose_a_request_is() -> None:
    assert client_of(FutureKey(kind="train", scope="s:train:0", seq_id=7 * CLONE_IDS)) == CLIENT
    assert client_of(FutureKey(kind="create", scope="s", seq_id=0)) == CLIENT
    assert client_of(FutureKey(kind="sample", scope="s:sample:0", seq_id=5)) == CLIENT
    assert client_of(FutureKey(kind="sample", scope="s:sample:0", seq_id=7 * CLONE_IDS + 5)) == COPY
