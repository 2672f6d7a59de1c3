"""Pausing an engine so that it cannot be left paused.

    with paused(engines, holder="weight sync 17", lease_s=30) as keep:
        push_half(); keep(); push_rest()

Whoever pauses holds a lease. It is given back at the end of the block however that ends; it expires in the
engine when it is not renewed (the holder died or hangs); and engines that were paused before one of them
refused are resumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from descant.errors import ServerError


class Pausable(Protocol):
    def pause(self, holder: str, lease_s: float) -> bool:
        """Pause, or renew. True if the holder's lease has been running without a gap. Idempotent."""
        ...

    def resume(self, holder: str) -> bool:
        """Give the lease back. False if it had lapsed (or never was). Idempotent."""
        ...


class PauseGate:
    """The engine's end: ``held`` is what its loop asks before it starts work. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._leases: dict[str, float] = {}

    @property
    def held(self) -> bool:
        return any(until > self._clock() for until in self._leases.values())

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(holder for holder, until in self._leases.items() if until > self._clock())

    def pause(self, holder: str, lease_s: float) -> bool:
        if not 0 < lease_s < 3600:
            raise ValueError(f"lease_s is {lease_s}, expected more than 0 and less than 3600")
        running = self._leases.get(holder, float("-inf")) > self._clock()
        self._leases[holder] = self._clock() + lease_s
        return running

    def resume(self, holder: str) -> bool:
        return self._leases.pop(holder, float("-inf")) > self._clock()


@contextlib.contextmanager
def paused(engines: Sequence[Pausable], *, holder: str, lease_s: float = 30.0) -> Iterator[Callable[[], None]]:
    """All engines or none. Yields ``keep``, to be called between steps that together may outlast the lease.

    Raises ServerError when a lease lapsed inside the block: an engine worked while it was thought to rest. An engine
    that cannot be reached for resuming does not keep the others from it; its lease lapses.
    """
    taken: list[Pausable] = []

    def keep() -> None:
        lapsed = sum(not engine.pause(holder, lease_s) for engine in engines)
        if lapsed:
            raise ServerError(
                f"the pause '{holder}' of {lease_s:g} s lapsed on {lapsed} of {len(engines)} engines "
                "before it was renewed"
            )

    clean = False
    lapsed, unreachable = 0, []
    try:
        for engine in engines:
            taken.append(engine)  # before: a call that fails may have paused it
            engine.pause(holder, lease_s)
        yield keep
        clean = True
    finally:
        for engine in taken:
            try:
                lapsed += not engine.resume(holder)
            except Exception as error:
                unreachable.append(error)
        if clean and (lapsed or unreachable):
            raise ServerError(
                f"the pause '{holder}' ended badly: {lapsed} leases of {lease_s:g} s had lapsed, "
                f"{len(unreachable)} engines could not be resumed {unreachable}"
            )
