"""The machine's clock, as the ``Clock`` port. Its double with virtual time is ``descant.testing.clock.FakeClock``."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
