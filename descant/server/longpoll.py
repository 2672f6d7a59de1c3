"""Waits that clients hold open, which a stopping server must be able to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Disconnected(Exception):
    """The client closed the connection on which it waited."""


class LongPolls:
    def __init__(self) -> None:
        self._open: set[asyncio.Task[Any]] = set()
        self.closed = False

    async def wait(
        self, coroutine: Coroutine[Any, Any, T], *, deadline_s: float, disconnected: Coroutine[Any, Any, None]
    ) -> T | None:
        """The coroutine's result, or None if it was not there by the deadline or by ``close``.

        ``disconnected`` ends when the client does not wait any more: raises ``Disconnected`` then, the coroutine at its
        end. Raises what the coroutine raises. Cancelling the caller cancels the coroutine.
        """
        task, gone = asyncio.ensure_future(coroutine), asyncio.ensure_future(disconnected)
        self._open.add(task)
        if self.closed:
            task.cancel()
        try:
            await asyncio.wait([task, gone], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open.discard(task)
            gone.cancel()
            if not task.done():
                task.cancel()
        if not task.done() and gone.done():
            await asyncio.wait([task])
            raise Disconnected
        return task.result() if task.done() and not task.cancelled() else None

    def close(self) -> None:
        """Ends all waits at once, those that are still to come too."""
        self.closed = True
        for task in self._open:
            task.cancel()
