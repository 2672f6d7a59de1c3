"""Which clients are there. A client that vanished must not hold a place that others wait for.

A client is the process that made a session, or one that was handed a sampling client of it (it numbers its requests
from a billion up). While anything it asked for is pending, the SDK keeps a long poll open for it, so its absence shows

* as **polls that its side closed**, when the last of them is closed and none is opened within ``grace_s``. That is what
  a killed process looks like, wherever it ran: its system closes its connections;
* as **a submission for whose answer nobody comes**, where its side closed the connection before it had the id, or had
  said that it comes at once: the SDK was cancelled on the way, and is there for all the rest. That ends this request
  alone, after some seconds (``Promises``);
* as **silence**, when its machine or the network went without a word: no poll open and neither poll, request nor
  heartbeat for long. The service's sweep looks at that, session by session.

The SDK opens a broken poll again after a second. If that is after its requests were given up, it is told that they are
gone (410), and sends them again by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from descant.ports import Clock
from descant.types import FutureKey

CLONE_IDS = 10**9
"""A copy of a sampling client numbers its requests from a multiple of this."""


@dataclass(frozen=True, slots=True)
class Client:
    """``copy``: which sampling client's copy it has, "" for the process that made the session."""

    session_id: str
    copy: str = ""


def client_of(key: FutureKey) -> Client:
    """Whose request this is."""
    session_id = key.scope.partition(":")[0]
    if key.kind == "sample" and key.seq_id >= CLONE_IDS:
        return Client(session_id, f"{key.scope}#{key.seq_id // CLONE_IDS}")
    return Client(session_id)


class Presence:
    def __init__(
        self,
        *,
        clock: Clock,
        grace_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        vanished: Callable[[Client], None],
    ):
        """``vanished`` is called for a client that broke off all its polls and did not come back."""
        self._clock = clock
        self._grace_s = grace_s
        self._spawn = spawn
        self._vanished = vanished
        self._polls: Counter[Client] = Counter()
        self._watches: dict[Client, asyncio.Task[None]] = {}

    def sign(self, client: Client) -> None:
        """It asked for something."""
        watch = self._watches.pop(client, None)
        if watch is not None:
            watch.cancel()

    @contextmanager
    def polling(self, client: Client) -> Iterator[None]:
        self.sign(client)
        self._polls[client] += 1
        try:
            yield
        finally:
            self._polls[client] -= 1
            if not self._polls[client]:
                del self._polls[client]

    def polls(self, session_id: str) -> bool:
        """Whether anybody of this session has a poll open."""
        return any(client.session_id == session_id for client in self._polls)

    def broken_off(self, client: Client) -> None:
        """Its side closed a poll of it, which is over."""
        if client not in self._polls and client not in self._watches:
            self._watches[client] = self._spawn(self._watch(client))

    async def _watch(self, client: Client) -> None:
        await self._clock.sleep(self._grace_s)
        del self._watches[client]
        self._vanished(client)
