"""The order of one model's requests: by ``seq_id``, whatever the order of arrival, never past a gap.

Pure: time is an argument, nothing here waits. The caller offers what arrives and asks from time to time whether a
gap is too old; both answer with events to act upon, in order. Each id has exactly one fate: it runs, or it fails.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_CLOSED = 1024
"""Closed gaps of which it is remembered why; older ones are answered like any id whose place has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver(Generic[T]):
    """All smaller ids have had their fate: it is this one's turn."""

    seq_id: int
    item: T


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGap:
    """The ids ``first`` to ``last`` were closed: they never came. Takes their place in the order of events."""

    first: int
    last: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject(Generic[T]):
    """This one came, and cannot run: it waited behind a gap, or came after its own id was closed or over."""

    seq_id: int
    item: T
    message: str
    in_place: bool
    """True if it takes its place in the order of events (it waited); False if its place had passed (it came late)."""


Event = Deliver[T] | CloseGap | Reject[T]


class Sequencer(Generic[T]):
    def __init__(self, *, first_seq_id: int = 1, gap_timeout_s: float):
        self._next = first_seq_id
        self._gap_timeout_s = gap_timeout_s
        self._waiting: dict[int, T] = {}
        self._missing_since = 0.0
        """When the id ``_next`` was first known to be missing; means nothing while no request waits."""
        self._closed: list[tuple[int, int, str]] = []
        """Closed ids as (first, last, message), rising: a gap can be wide, so ranges and not ids."""
        self._over: str | None = None

    @property
    def next_seq_id(self) -> int:
        return self._next

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def deadline(self) -> float | None:
        """When the present gap is closed if nothing comes; None if no request waits."""
        return self._missing_since + self._gap_timeout_s if self._waiting else None

    def offer(self, seq_id: int, item: T, *, now: float) -> tuple[Event[T], ...]:
        """``item`` has arrived. A refused request is offered like any other: its id is consumed in its place."""
        if self._over is not None:
            return (Reject(seq_id=seq_id, item=item, message=self._over, in_place=False),)
        if seq_id < self._next:
            return (Reject(seq_id=seq_id, item=item, message=self._why_passed(seq_id), in_place=False),)
        if seq_id in self._waiting:
            message = f"seq_id {seq_id} was sent twice, as two different requests"
            return (Reject(seq_id=seq_id, item=item, message=message, in_place=False),)
        if not self._waiting:
            self._missing_since = now
        self._waiting[seq_id] = item
        return self._release(now)

    def expire(self, *, now: float) -> tuple[Event[T], ...]:
        """If the present gap is too old: closes every id that is missing so far and fails all that waited."""
        if not self._waiting or now < self._missing_since + self._gap_timeout_s:
            return ()
        return self._close(f"seq_id {self._next} did not arrive within {self._gap_timeout_s:g} s")

    def end(self, reason: str) -> tuple[Event[T], ...]:
        """The model is over: fails all that waits, naming what it waited for, and whatever may still come."""
        events = self._close(f"seq_id {self._next} had not arrived when {reason}") if self._waiting else ()
        self._over = f"nothing runs any more: {reason}"
        return events

    def waits_for(self, seq_id: int) -> int | None:
        """The missing id that ``seq_id`` waits behind; None if it does not wait."""
        return self._next if seq_id in self._waiting else None

    # ----------------------------------------------------------------------------------------------------------------

    def _release(self, now: float) -> tuple[Event[T], ...]:
        events: list[Event[T]] = []
        while self._next in self._waiting:
            events.append(Deliver(seq_id=self._next, item=self._waiting.pop(self._next)))
            self._next += 1
        if events:
            # Behind a filled gap may lie another. It is given its full time from here: a client that sends one
            # request after the other could not have sent it earlier.
            self._missing_since = now
        return tuple(events)

    def _close(self, why: str) -> tuple[Event[T], ...]:
        missing = f"{why}, so it was abandoned"
        behind = f"{why}, so what was sent after it cannot run"
        events: list[Event[T]] = []
        for seq_id in sorted(self._waiting):
            if seq_id > self._next:
                message = behind if events else missing
                self._closed.append((self._next, seq_id - 1, message))
                events.append(CloseGap(first=self._next, last=seq_id - 1, message=message))
            events.append(Reject(seq_id=seq_id, item=self._waiting[seq_id], message=behind, in_place=True))
            self._next = seq_id + 1
        self._waiting.clear()
        del self._closed[:-MAX_CLOSED]
        return tuple(events)

    def _why_passed(self, seq_id: int) -> str:
        at = bisect.bisect_right(self._closed, seq_id, key=lambda closed: closed[0]) - 1
        if at >= 0 and self._closed[at][0] <= seq_id <= self._closed[at][1]:
            return self._closed[at][2]
        return f"seq_id {seq_id} was answered before (the next one is {self._next}) and its answer is no longer kept"
