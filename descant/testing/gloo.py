"""Ranks for tests: forked processes with a coordinator of their own, every one of them ended and accounted for.

``run_ranks`` forks, so torch should be imported in the parent (once, a few seconds) but must not have computed there:
from a test suite use the ``Zygote``, a process that only imports and forks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from descant.distributed.coordinator.client import Member
from descant.distributed.coordinator.process import STOP_LIMIT_S, CoordinatorProcess, Rendezvous
from descant.distributed.failure import DistributedFailure, read_report
from descant.distributed.process_table import process_status

RANK_EXIT_S = 5.0
"""After the last outcome has come, or a failure: what still runs then is killed, and counts as left over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """How one rank ended. ``at`` is when it raised or returned (monotonic seconds), None if it never reported."""

    value: Any = None
    failure: DistributedFailure | None = None
    error: str | None = None
    exit_code: int | None = None
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``marks`` are what ranks reported by ``mark`` and when; ``leaked`` the processes that had to be killed although
    nothing had stopped them."""

    outcomes: tuple[RankOutcome, ...]
    marks: Mapping[str, float] = field(default_factory=dict)
    leaked: tuple[int, ...] = ()
    report: DistributedFailure | None = None
    ended: float = 0.0


class RankContext:
    """What a rank's program gets."""

    def __init__(self, rank: int, rendezvous: Rendezvous, launcher_pids: Mapping[str, int], pipe: int):
        self.rank = rank
        self.rendezvous = rendezvous
        self.pids = launcher_pids
        self._pipe = pipe

    @property
    def world(self) -> int:
        return self.rendezvous.world

    def join(self, **options: Any) -> Member:
        return Member.join(self.rendezvous, self.rank, **options)

    def mark(self, name: str) -> None:
        """Tell the launcher that this happens now. In the pipe before the next instruction."""
        self.send(("mark", name, time.monotonic()))

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        os.write(self._pipe, len(data).to_bytes(4, "big") + data)  # below PIPE_BUF in practice, so in one piece


def run_ranks(
    program: Callable[..., Any],
    world: int,
    *args: Any,
    limit_s: float = 60.0,
    stop_limit_s: float = STOP_LIMIT_S,
    directory: str | None = None,
) -> Run:
    """``program(context, *args)`` on ``world`` forked ranks. Returns when all have ended, by themselves or by force.

    Stopped ranks are killed once another rank has ended. Nothing is left running whatever happens.
    """
    own = directory or tempfile.mkdtemp(prefix="descant-ranks-")
    os.makedirs(own, exist_ok=True)
    report_path = os.path.join(own, "failure.json")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(report_path)
    pids: list[int] = []
    pipes: list[int] = []
    try:
        with CoordinatorProcess.start(world, own, stop_limit_s=stop_limit_s) as coordinator:
            for rank in range(world):
                read_end, write_end = os.pipe()
                pid = os.fork()
                if pid == 0:
                    for descriptor in (*pipes, read_end):
                        os.close(descriptor)
                    coordinator.close_in_child()
                    context = RankContext(
                        rank, coordinator.rendezvous, {"coordinator": coordinator.process.pid}, write_end
                    )
                    _run_rank(program, context, args)
                os.close(write_end)
                pids.append(pid)
                pipes.append(read_end)
            run = _attend(pids, pipes, time.monotonic() + limit_s)
        report = read_report(report_path) if os.path.exists(report_path) else None
        return Run(outcomes=run.outcomes, marks=run.marks, leaked=run.leaked, report=report, ended=time.monotonic())
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        for descriptor in pipes:
            os.close(descriptor)
        if directory is None:
            shutil.rmtree(own, ignore_errors=True)


def _run_rank(program: Callable[..., Any], context: RankContext, args: Sequence[Any]) -> None:
    code = 0
    try:
        value = program(context, *args)
        context.send(("end", RankOutcome(value=value, at=time.monotonic())))
    except DistributedFailure as failure:
        context.send(("end", RankOutcome(failure=failure, at=time.monotonic())))
        code = 1
    except BaseException:
        context.send(("end", RankOutcome(error=traceback.format_exc(), at=time.monotonic())))
        code = 1
    finally:
        os._exit(code)  # no interpreter exit in a fork: it would run the parent's


def _attend(pids: list[int], pipes: list[int], limit: float) -> Run:
    """Read what ranks report until all have ended."""
    buffers = {descriptor: b"" for descriptor in pipes}
    ranks = {descriptor: rank for rank, descriptor in enumerate(pipes)}
    outcomes: list[RankOutcome] = [RankOutcome() for _ in pids]
    codes: dict[int, int] = {}
    marks: dict[str, float] = {}
    open_pipes = set(pipes)
    leaked: list[int] = []
    first_end: float | None = None
    while open_pipes:
        ready, _, _ = select.select(list(open_pipes), [], [], 0.05)
        for descriptor in ready:
            data = os.read(descriptor, 65536)
            if not data:
                open_pipes.discard(descriptor)
                first_end = first_end or time.monotonic()
                continue
            buffer = buffers[descriptor] + data
            while len(buffer) >= 4 and len(buffer) >= (end := 4 + int.from_bytes(buffer[:4], "big")):
                message = pickle.loads(buffer[4:end])
                buffer = buffer[end:]
                if message[0] == "mark":
                    marks.setdefault(message[1], message[2])
                else:
                    outcomes[ranks[descriptor]] = message[1]
            buffers[descriptor] = buffer
        now = time.monotonic()
        if now >= limit or (first_end is not None and now - first_end >= RANK_EXIT_S):
            break
        if first_end is not None and _all_stopped([pids[ranks[descriptor]] for descriptor in open_pipes]):
            for descriptor in open_pipes:
                os.kill(pids[ranks[descriptor]], signal.SIGKILL)  # as a launcher does, once the failure is reported
    for descriptor in open_pipes:
        leaked.append(pids[ranks[descriptor]])
        os.kill(pids[ranks[descriptor]], signal.SIGKILL)
    for rank, pid in enumerate(pids):
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    pids.clear()
    return Run(
        outcomes=tuple(
            RankOutcome(value=o.value, failure=o.failure, error=o.error, at=o.at, exit_code=codes[rank])
            for rank, o in enumerate(outcomes)
        ),
        marks=marks,
        leaked=tuple(leaked),
    )


def _all_stopped(pids: Sequence[int]) -> bool:
    statuses = [process_status(pid) for pid in pids]
    return bool(statuses) and all(status is not None and status.stopped for status in statuses)


class Zygote:
    """A process that has imported torch, has never computed, and runs ``run_ranks`` in forks of itself on demand.

    Programs are named ``module:function``; arguments are JSON values.
    """

    def __init__(self, *modules: str):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "descant.testing.gloo", "torch", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def run(self, program: str, world: int, *args: Any, limit_s: float = 60.0) -> Run:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([program, world, args, limit_s]).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s + 60.0)  # the first waits for torch
        size = self._process.stdout.read(8) if ready else b""
        if len(size) < 8:
            raise RuntimeError(f"the zygote of gloo ranks is gone (exit code {self._process.poll()})")
        run: Run = pickle.loads(self._process.stdout.read(int.from_bytes(size, "big")))
        return run

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _zygote(modules: Sequence[str]) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what ranks print must not mix with answers
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin.buffer:
        name, world, args, limit_s = json.loads(line)
        module_name, _, function = name.partition(":")
        program = getattr(importlib.import_module(module_name), function)
        data = pickle.dumps(run_ranks(program, world, *args, limit_s=limit_s))
        with os.fdopen(os.dup(answers), "wb") as file:
            file.write(len(data).to_bytes(8, "big") + data)


if __name__ == "__main__":
    from descant.testing import gloo

    gloo._zygote(sys.argv[1:])  # by its real name, so that what it pickles can be read elsewhere
