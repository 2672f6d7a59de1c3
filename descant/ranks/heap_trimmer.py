"""Returns a CPU rank's free heap memory to the system (``malloc_trim``).

The C library keeps freed memory for later allocations: after one pass over a long datum a rank of a 135M model stayed
at 5.6 GB. Trimming takes milliseconds, but passes that need the memory again fault it in page by page, which costs them
some tenths of a second. So it is done now and then, less often while they do.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable

from descant.pauses import paused

log = logging.getLogger(__name__)

INTERVAL_S = 5.0, 160.0
"""At least, and at most: twice as long each time that the memory was needed again, and half as long when it was not."""

MARGIN_BYTES = 256 << 20
"""Less than this is not worth a trim."""


def resident_bytes() -> int:
    """The process's resident set size; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def trim() -> None:
    """Returns what the C library keeps; only GNU's has the call, and only it keeps so much."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    trim(0)


class HeapTrimmer:
    """One thread. ``maybe_trim`` costs microseconds where there is nothing to do, so it may be called after every
    turn."""

    def __init__(
        self,
        *,
        margin_bytes: int = MARGIN_BYTES,
        seconds: Callable[[], float] = time.monotonic,
        resident: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] = trim,
    ):
        self._margin_bytes, self._seconds, self._resident, self._trim = margin_bytes, seconds, resident, trim
        self._least = resident()
        """Since the last trim."""
        self._interval_s = INTERVAL_S[0]
        self._next_s = seconds() + self._interval_s

    def maybe_trim(self) -> None:
        """Trims what has been added since the last time, if it is much and the interval is over."""
        now = self._seconds()
        if now < self._next_s:
            return
        before = self._resident()
        if before <= self._least + self._margin_bytes:
            self._least = min(self._least, before)
            self._interval_s = max(self._interval_s / 2, INTERVAL_S[0])
        else:
            with paused("trim"):
                self._trim()
            self._least = self._resident()
            self._interval_s = min(self._interval_s * 2, INTERVAL_S[1])
            log.info("returned %d MiB to the system", (before - self._least) >> 20)
        self._next_s = now + self._interval_s
