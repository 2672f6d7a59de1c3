"""What the process table of this machine says of a process. A stopped process is told from a busy one here."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """``state`` as in ``/proc/<pid>/stat``: R, S, D run or wait; T is stopped; Z, X are dead. ``started`` in ticks.

    ``exit_code`` as ``waitpid`` gives it; known from the moment a process ends until it is reaped.
    """

    state: str
    started: int
    exit_code: int

    @property
    def stopped(self) -> bool:
        """By a signal. Stopped by a debugger (t) is no failure."""
        return self.state == "T"

    @property
    def dead(self) -> bool:
        return self.state in "ZXx"


def process_status(pid: int) -> ProcessStatus | None:
    """None: no such process. 17 µs."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(descriptor, 4096)
    except OSError:  # it ended between the two calls
        return None
    finally:
        os.close(descriptor)
    fields = text[text.rindex(b")") + 2 :].split()  # the name may hold spaces and parentheses
    return ProcessStatus(state=fields[0].decode(), started=int(fields[19]), exit_code=int(fields[49]))


def node_id() -> str:
    """The same for processes that can see each other in one process table. Empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def describe_exit(exit_code: int) -> str:
    """``was killed by SIGKILL``, ``ended with exit code 3``."""
    if os.WIFSIGNALED(exit_code):
        number = os.WTERMSIG(exit_code)
        try:
            return f"was killed by {signal.Signals(number).name}"
        except ValueError:
            return f"was killed by signal {number}"
    return f"ended with exit code {os.waitstatus_to_exitcode(exit_code)}"
