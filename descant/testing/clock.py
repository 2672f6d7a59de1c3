"""Virtual time: nothing waits, and a test says when it is later."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """A ``Clock`` whose time moves only by ``advance``. ``now`` and ``monotonic`` are the same number."""

    def __init__(self, now: float = 1_700_000_000.0):
        self._now = now
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), wake))
        await wake

    async def advance(self, seconds: float) -> None:
        """Moves on by ``seconds``, stopping at each sleeper's time on the way, so that a loop that sleeps for 1 s
        runs ten times in 10 s. After each stop every task that can run does, until it waits again."""
        until = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            self._now, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)
                await settle()
        self._now = until
        await settle()

    @property
    def num_sleeping(self) -> int:
        return sum(not wake.done() for _, _, wake in self._sleepers)


async def settle(rounds: int = 20) -> None:
    """Lets tasks that are ready run. What waits for a thread or a socket is not waited for."""
    for _ in range(rounds):
        await asyncio.sleep(0)
