"""What holds a process up beside its work, in seconds so far: garbage collection, heap trims, compiling and capturing.

They are the process's and not an object's: Python collects for all threads at once, the heap is one, and a graph is
captured deep inside a pass. So a process has one set of counters, and who wonders why something took long reads them
before and after.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

Pause = Literal["gc", "trim", "build"]
"""build: a program is compiled, or a graph captured."""

KINDS: tuple[Pause, ...] = ("gc", "trim", "build")

_spent_s: dict[Pause, float] = dict.fromkeys(KINDS, 0.0)
_since_s: dict[Pause, float] = {}
_depth: dict[Pause, int] = dict.fromkeys(KINDS, 0)


def spent_s() -> Mapping[Pause, float]:
    """Seconds since the process began, by kind; a view that goes on counting. Of collections and of what the compiler
    does, since they are watched."""
    return _spent_s


@contextmanager
def paused(kind: Pause) -> Iterator[None]:
    """What is inside counts as a pause of this kind, once where it is nested."""
    _begin(kind)
    try:
        yield
    finally:
        _end(kind)


def watch_collections() -> None:
    """Idempotent."""
    if _on_collection not in gc.callbacks:
        gc.callbacks.append(_on_collection)


def watch_compiler() -> None:
    """Of torch, which is loaded then. Idempotent."""
    from torch._dynamo.callback import callback_handler

    if _on_compile_start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_on_compile_start)
        callback_handler.register_end_callback(_on_compile_end)


def _begin(kind: Pause) -> None:
    if _depth[kind] == 0:
        _since_s[kind] = time.perf_counter()
    _depth[kind] += 1


def _end(kind: Pause) -> None:
    _depth[kind] -= 1
    if _depth[kind] == 0:
        _spent_s[kind] += time.perf_counter() - _since_s[kind]


def _on_collection(phase: str, info: Mapping[str, Any]) -> None:
    if phase == "start":
        _begin("gc")
    elif _depth["gc"]:  # not one that had begun when it was first watched
        _end("gc")


def _on_compile_start(args: object) -> None:
    _begin("build")


def _on_compile_end(args: object) -> None:
    _end("build")
