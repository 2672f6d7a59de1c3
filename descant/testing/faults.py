"""Ranks that go wrong as they start. To be named in ``RankSpec.build``; nothing slow is imported."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NoReturn

from descant.errors import UserError
from descant.ranks.settings import RankSpec


def build_crashing(spec: RankSpec, phase: Callable[[str], None]) -> NoReturn:
    phase("looking for trouble")
    print("about to crash", flush=True)
    os.abort()


def build_refusing(spec: RankSpec, phase: Callable[[str], None]) -> NoReturn:
    raise UserError(f"{spec.model} cannot be served")


def build_raising(spec: RankSpec, phase: Callable[[str], None]) -> NoReturn:
    phase("dividing")
    raise ZeroDivisionError("one by zero")


def build_hanging(spec: RankSpec, phase: Callable[[str], None]) -> NoReturn:
    phase("waiting for ever")
    threading.Event().wait()
    raise AssertionError("nobody sets the event")
