"""Client liveness: which signs that a client is gone count, how long each is waited for, and what is done then.

A client is the process that made a session, or a process with a copy of one of its sampling clients (it numbers its
requests from a billion up). Callers report what they see of it and act on a ``Lapse``; all else is in here.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from descant.ports import Clock
from descant.service.names import session_id_of
from descant.types import FutureKey

CLONE_IDS = 10**9
"""A copy of a sampling client numbers its requests from a multiple of this."""

HEARTBEAT_S = 10.0
"""The SDK's interval."""
MISSED_HEARTBEATS = 6

DISCONNECT_GRACE_S = 0.5
"""A killed process is known to be gone so soon: its system closes its connections."""
RECONNECT_GRACE_S = 3.0
"""Where a session has come back, something between cuts its connections: a proxy, a bad line. The SDK polls again a
second after a cut."""

ORPHAN_GRACE_S = 5.0
"""The SDK polls for a request as soon as it has the id. Not shorter: a client that is far and opens a connection for
its first poll, or whose event loop is busy, takes a second."""

WEIGHTS_SHARE = 6
"""Weights saved without a name are released after one part in so many of the session's timeout."""

SESSIONS_AT_ONCE = 256
"""Looked at by a sweep before others have their turn on the event loop: some 3 ms."""


class Signal(Enum):
    DISCONNECTED = "its side closed every connection on which it waited"
    DISCONNECTED_AGAIN = "likewise, after the session came back once"
    ORPHANED = "no client polls for a request"
    SILENT = "no long poll, request or heartbeat"


class Action(Enum):
    ABANDON_REQUESTS = "sampling requests end, training requests run on"
    RELEASE_WEIGHTS = "weights saved without a name are released"
    END_SESSION = "the session ends, with its models"


@dataclass(frozen=True, slots=True, kw_only=True)
class VanishRule:
    signal: Signal
    grace_s: float
    action: Action


def policy(session_timeout_s: float) -> tuple[VanishRule, ...]:
    """The table that ``Liveness`` shows."""
    return (
        VanishRule(signal=Signal.DISCONNECTED, grace_s=DISCONNECT_GRACE_S, action=Action.ABANDON_REQUESTS),
        VanishRule(signal=Signal.DISCONNECTED_AGAIN, grace_s=RECONNECT_GRACE_S, action=Action.ABANDON_REQUESTS),
        VanishRule(signal=Signal.ORPHANED, grace_s=ORPHAN_GRACE_S, action=Action.ABANDON_REQUESTS),
        VanishRule(
            signal=Signal.SILENT,
            grace_s=min(MISSED_HEARTBEATS * HEARTBEAT_S, session_timeout_s),
            action=Action.ABANDON_REQUESTS,
        ),
        VanishRule(signal=Signal.SILENT, grace_s=session_timeout_s / WEIGHTS_SHARE, action=Action.RELEASE_WEIGHTS),
        VanishRule(signal=Signal.SILENT, grace_s=session_timeout_s, action=Action.END_SESSION),
    )


@dataclass(frozen=True, slots=True)
class Client:
    """``copy``: which sampling client's copy it has, "" for the process that made the session."""

    session_id: str
    copy: str = ""


def client_of(key: FutureKey) -> Client:
    """Whose request this is."""
    session_id = session_id_of(key.scope)
    if key.kind == "sample" and key.seq_id >= CLONE_IDS:
        return Client(session_id, f"{key.scope}#{key.seq_id // CLONE_IDS}")
    return Client(session_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lapse:
    """A grace that is over, and what is to be done about it.

    ``request_ids``: the sampling requests that it is about, for ``ABANDON_REQUESTS``; ``why``: the reason, for their
    error. ``silent_s``: how long nothing has been heard of the session, in seconds.
    """

    action: Action
    session_id: str
    request_ids: tuple[str, ...] = ()
    why: str = ""
    silent_s: float = 0.0


@dataclass(slots=True, eq=False)
class _InFlight:
    """A sampling request in flight. ``sent_at``: when it was sent last. ``polls_at_once``: its client polls for it as
    soon as it has the id, or never. ``polled``: it has."""

    request_id: str
    client: Client
    sent_at: float
    polls_at_once: bool
    polled: bool = False


@dataclass(slots=True, eq=False)
class _Session:
    """``num_lapsed``: of the rules about silence, how many have been acted on. ``timer``: the number of its entry in
    the heap; any other entry of it is out of date. ``came_back``: a client of it polled for an abandoned request."""

    session_id: str
    heard_at: float
    came_back: bool = False
    num_lapsed: int = 0
    timer: int = -1


class Liveness:
    """Owns every sign of life, and the one policy for clients that vanish:

    ============  ===========================================  ===========================  ===========================
    signal        seen as                                      grace                        action
    ============  ===========================================  ===========================  ===========================
    DISCONNECTED  its side closed its last long poll; or the   0.5 s                        this client's sampling
                  connection on which it sent a request that                                requests are abandoned
                  it polls for at once, with no poll open
    DISCONNECTED  likewise, after a client of the session      3 s                          likewise
    _AGAIN        polled for an abandoned request
    ORPHANED      no poll has come for a sampling request      5 s after it was sent last   this request is abandoned
                  whose client polls at once (the SDK says
                  so by a header), or closed the connection
                  before it had the id
    SILENT        of the whole session no poll is open, and    60 s: 6 heartbeats           the session's sampling
                  no poll, request or heartbeat came                                        requests are abandoned
    SILENT        likewise                                     ``session_timeout_s`` / 6,   its weights saved without a
                                                               10 min                       name are released
    SILENT        likewise                                     ``session_timeout_s``, 1 h   the session ends
    ============  ===========================================  ===========================  ===========================

    A sign of life within the grace (a poll, a request, a heartbeat) withdraws the signal. The SDK opens a broken poll
    again after a second; if its requests were abandoned by then it gets HTTP 410, and sends them again by itself.

    What a client says needs no grace, and no bookkeeping here: it finishes its session, or cancels a future. Training
    requests are never abandoned, since what they do counts.

    One grace is a setting, ``session_timeout_s``: how long a model is kept for a client that may come back, at the cost
    of memory, only the operator knows. The others follow from it and from what the SDK does. A proxy that
    cuts long polls looks like a killed process; that it is none is seen when the client comes back, so it costs each
    session its sampling requests in flight once.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        rules: Sequence[VanishRule],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        act: Callable[[Lapse], Awaitable[None]],
        max_pause_s: float,
    ):
        """``act`` does what a lapse says. ``max_pause_s``: after a longer time without a sweep the process was paused,
        and polls that came meanwhile may not have been read yet."""
        self._clock = clock
        by_signal = {rule.signal: rule for rule in rules}
        self._disconnected = by_signal[Signal.DISCONNECTED]
        self._disconnected_again = by_signal[Signal.DISCONNECTED_AGAIN]
        self._orphaned = by_signal[Signal.ORPHANED]
        self._silent = sorted((rule for rule in rules if rule.signal is Signal.SILENT), key=lambda rule: rule.grace_s)
        self._spawn = spawn
        self._act = act
        self._max_pause_s = max_pause_s
        self._last_sweep = clock.monotonic()
        self._polls: Counter[Client] = Counter()
        self._polls_of_session: Counter[str] = Counter()
        self._leaving: dict[Client, asyncio.Task[None]] = {}
        """Clients that have disconnected, until their grace is over."""
        self._requests: dict[str, _InFlight] = {}
        self._of_session: dict[str, dict[str, _InFlight]] = {}
        self._unpolled: dict[str, _InFlight] = {}
        """Requests whose clients poll at once and have not yet, the longest sent first."""
        self._sessions: dict[str, _Session] = {}
        self._timers: list[tuple[float, int, _Session]] = []
        """A heap of when to look at which session. One that was heard of meanwhile is looked at again later: hearing
        costs nothing, and a sweep costs those that are due."""
        self._numbers = itertools.count()

    # ------------------------------------------------------------------------------------------------ signs of life
    def heard(self, session_id: str) -> None:
        """Somebody used this session: any request that names it."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.heard_at = self._clock.monotonic()
            if session.num_lapsed:
                session.num_lapsed = 0
                self._set_timer(session)

    def heard_from(self, client: Client) -> None:
        """This client sent something itself."""
        leaving = self._leaving.pop(client, None)
        if leaving is not None:
            leaving.cancel()
        self.heard(client.session_id)

    @contextmanager
    def polling(self, client: Client, request_id: str) -> Iterator[None]:
        """While a long poll of this client for this request is open."""
        self.heard_from(client)
        request = self._requests.get(request_id)
        if request is not None:
            request.polled = True
            self._unpolled.pop(request_id, None)
        self._polls[client] += 1
        self._polls_of_session[client.session_id] += 1
        try:
            yield
        finally:
            self._polls[client] -= 1
            if not self._polls[client]:
                del self._polls[client]
            self._polls_of_session[client.session_id] -= 1
            if not self._polls_of_session[client.session_id]:
                del self._polls_of_session[client.session_id]
            self.heard(client.session_id)

    def came_back(self, session_id: str) -> None:
        """One of its clients polled for a request that was abandoned, so it had not vanished."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.came_back = True

    # ------------------------------------------------------------------------------------------------ disconnects
    def poll_disconnected(self, client: Client) -> None:
        """Its side closed the connection of a long poll, which is over."""
        if client not in self._polls and client not in self._leaving:
            self._leaving[client] = self._spawn(self._leave(client))

    def submission_disconnected(self, request_id: str) -> None:
        """Its side closed the connection on which it had sent this request, before the answer: it has no id to poll
        for. It may send the request again, as the SDK does a second later where the line was cut, and poll then. A
        client that polls at once would have a poll open if it waited for anything, so without one it has left."""
        request = self._requests.get(request_id)
        if request is not None:
            if request.polls_at_once:
                self.poll_disconnected(request.client)
            request.polls_at_once = True
            self.sent_again(request_id)

    async def _leave(self, client: Client) -> None:
        session = self._sessions.get(client.session_id)
        rule = self._disconnected_again if session is not None and session.came_back else self._disconnected
        await self._clock.sleep(rule.grace_s)
        del self._leaving[client]
        requests = self._of_session.get(client.session_id, {}).values()
        await self._act(
            Lapse(
                action=rule.action,
                session_id=client.session_id,
                request_ids=tuple(request.request_id for request in requests if request.client == client),
                why="its client closed all its connections",
            )
        )

    # ------------------------------------------------------------------------------------------------ requests
    def began(self, request_id: str, client: Client, *, polls_at_once: bool) -> None:
        """A sampling request was accepted."""
        request = _InFlight(
            request_id=request_id, client=client, sent_at=self._clock.monotonic(), polls_at_once=polls_at_once
        )
        self._requests[request_id] = request
        self._of_session.setdefault(client.session_id, {})[request_id] = request
        self._expect_poll(request)

    def sent_again(self, request_id: str) -> None:
        """Its client has sent it once more. Unknown ones are ignored, also by ``ended``."""
        request = self._requests.get(request_id)
        if request is not None:
            request.sent_at = self._clock.monotonic()
            self._expect_poll(request)

    def ended(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._unpolled.pop(request_id, None)
            session_id = request.client.session_id
            del self._of_session[session_id][request_id]
            if not self._of_session[session_id]:
                del self._of_session[session_id]

    def _expect_poll(self, request: _InFlight) -> None:
        self._unpolled.pop(request.request_id, None)
        if request.polls_at_once and not request.polled:
            self._unpolled[request.request_id] = request

    # ------------------------------------------------------------------------------------------------ sessions
    def opened(self, session_id: str) -> None:
        """A session is open from now on; its silence counts from here."""
        session = self._sessions[session_id] = _Session(session_id=session_id, heard_at=self._clock.monotonic())
        self._set_timer(session)

    def closed(self, session_id: str) -> None:
        """A session is over. Its requests that are still in flight may lapse all the same."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.timer = -1

    # ------------------------------------------------------------------------------------------------ the sweep
    async def sweep(self) -> None:
        """Acts on every grace of a request or a session that is over. To be called every second or so."""
        now = self._clock.monotonic()
        if now - self._last_sweep <= self._max_pause_s:
            await self._lapse_orphans(now)
        self._last_sweep = now
        num_looked = 0
        while self._timers and self._timers[0][0] < now:
            _, timer, session = heapq.heappop(self._timers)
            if session.timer != timer:
                continue
            num_looked += 1
            if num_looked % SESSIONS_AT_ONCE == 0:  # all may have fallen silent together
                await asyncio.sleep(0)
            await self._look_at(session, now)

    async def _lapse_orphans(self, now: float) -> None:
        rule, orphans = self._orphaned, dict[str, list[str]]()
        while self._unpolled and (request := next(iter(self._unpolled.values()))).sent_at < now - rule.grace_s:
            del self._unpolled[request.request_id]
            orphans.setdefault(request.client.session_id, []).append(request.request_id)
        why = f"no client polled for the answer within {rule.grace_s:g} s"
        for session_id, request_ids in orphans.items():
            await self._act(Lapse(action=rule.action, session_id=session_id, request_ids=tuple(request_ids), why=why))

    async def _look_at(self, session: _Session, now: float) -> None:
        """Acts on each rule whose grace is over, unless its client is heard of on the way."""
        if session.session_id in self._polls_of_session:
            session.heard_at, session.num_lapsed = now, 0
        while session.num_lapsed < len(self._silent) and self._due_at(session) < now:
            rule = self._silent[session.num_lapsed]
            session.num_lapsed += 1
            silent_s = now - session.heard_at
            await self._act(
                Lapse(
                    action=rule.action,
                    session_id=session.session_id,
                    request_ids=tuple(self._of_session.get(session.session_id, ())),
                    why=f"nothing was heard of its client for {silent_s:.0f} s",
                    silent_s=silent_s,
                )
            )
        if session.num_lapsed < len(self._silent) and self._sessions.get(session.session_id) is session:
            self._set_timer(session)

    def _due_at(self, session: _Session) -> float:
        return session.heard_at + self._silent[session.num_lapsed].grace_s

    def _set_timer(self, session: _Session) -> None:
        session.timer = next(self._numbers)
        heapq.heappush(self._timers, (self._due_at(session), session.timer, session))
