"""How a replica's ranks are started, and what the server holds of them once they run.

A ``Launcher`` starts all ranks of one replica and returns a ``Link`` to them. Rank 0 leads: its channel carries all
messages while the replica serves; the others' carry their phases while they start, and nothing afterwards. Between
several ranks stands a coordinator (``descant.distributed``): it reports which rank failed when one dies, stops or is
late.

``start_processes`` is the launcher of this machine; ``run`` of ``descant.ranks.rank_main`` is what each rank does,
however it was started. No torch is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from descant.distributed.coordinator.process import CoordinatorProcess
from descant.distributed.failure import DistributedFailure, read_report
from descant.distributed.process_table import process_status
from descant.errors import DescantError
from descant.ranks.channel import ServerChannel, TurnStatus
from descant.ranks.ops import START, RankRequest, RankResponse, Stop
from descant.ranks.rank_main import rank_command, rank_environment
from descant.ranks.settings import RankAssignment, RankSpec, ReplicaSettings

if TYPE_CHECKING:
    from descant.ranks.executor import Executor

log = logging.getLogger(__name__)

KEPT_LINES = 40
EXIT_TIMEOUT_S = 1.0
"""How long the rest of a rank may take once a part of it has ended: its output, its channel, its process."""
STOP_TIMEOUT_S = 5.0
"""How long ranks may take to end one after another after ``Stop``."""
FAILURE_INTERVAL_S = 0.25
"""How often the coordinator's report is polled while no rank has ended."""
FAILURE_TIMEOUT_S = 1.0
"""How long the coordinator may take to report why a rank has ended; it usually has before the rank is gone."""
LOG_GRACE_S = 0.2
"""What ranks have from a failure on to log it."""

Phase = Callable[[str], None]
Receive = Callable[[RankResponse], None]
Launcher = Callable[[RankSpec, Receive], Awaitable["Link"]]
"""Starts every rank of a replica (``parallel.data_parallel_size``) and returns at once. What rank 0 says goes to the
second argument, in order, on the event loop's thread. Raises ``OSError`` or ``ServerError``, and has left nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksExit:
    """How a replica's ranks have ended, all of them. ``rank``: the one that failed, None where there is one only.
    ``how`` completes "rank 1 of smollm2 …". ``failure``: the coordinator's report."""

    how: str
    rank: int | None = None
    failure: DistributedFailure | None = None


class Link(Protocol):
    """The started ranks of one replica, whatever they run in."""

    pids: Sequence[int]
    """The ranks' processes, by rank; none where they are not processes."""
    nodes: Sequence[str]
    """The machine's name of each; "" for this one."""

    def send(self, request: RankRequest) -> None:
        """To rank 0."""
        ...

    def kill(self) -> None:
        """All ranks."""
        ...

    async def ended(self) -> RanksExit:
        """Waits until one rank has ended, ends the others, and returns when all of them are gone."""
        ...

    def turn_status(self) -> tuple[int, str]:
        """What rank 0 runs now (``TurnStatus.read``); may be a moment old."""
        ...

    def last_lines(self) -> str:
        """The end of what the ranks printed, the failed one first."""
        ...

    def stopped(self) -> Sequence[int]:
        """Ranks that are stopped by a signal (SIGSTOP)."""
        ...

    def close(self) -> None:
        """Frees what outlives the ranks."""
        ...


class RankHandle(Protocol):
    """One started rank, as ``Ranks`` needs it."""

    pid: int
    node: str
    """Its machine's name; "" for this one."""

    @property
    def turn_status(self) -> TurnStatusReader: ...
    def send(self, request: RankRequest) -> None: ...
    def kill(self) -> None: ...
    async def exited(self) -> str:
        """Waits until it has, and nothing more comes from it; how, in words ("(process 17) exited with code 1")."""
        ...

    def last_lines(self) -> str: ...
    def is_stopped(self) -> bool: ...
    def close(self) -> None:
        """Frees what outlives it."""
        ...


class TurnStatusReader(Protocol):
    """The server's end of a ``channel.TurnStatus``."""

    def read(self) -> tuple[int, str]: ...


class Ranks:
    """``Link`` to ranks that have a handle each, and to their coordinator, if they have one. ``directory``: the
    coordinator's, removed at the end."""

    def __init__(
        self, ranks: Sequence[RankHandle], coordinator: CoordinatorProcess | None = None, directory: str | None = None
    ):
        self._ranks = ranks
        self._coordinator = coordinator
        self._directory = directory
        self._failed_rank = 0
        self._stopping = False
        self._killed = False
        self._failure: DistributedFailure | None = None
        self.pids: Sequence[int] = [process.pid for process in ranks]
        self.nodes: Sequence[str] = [process.node for process in ranks]

    def send(self, request: RankRequest) -> None:
        self._stopping = self._stopping or isinstance(request.op, Stop)
        self._ranks[0].send(request)

    def kill(self) -> None:
        self._failure = self._failure or self._read_failure()  # a later report would name the ranks killed here
        self._killed = True
        for process in self._ranks:
            process.kill()

    async def ended(self) -> RanksExit:
        endings = [asyncio.create_task(process.exited()) for process in self._ranks]
        if self._coordinator is None:
            return RanksExit(how=await endings[0])
        done: set[asyncio.Task[str]] = set()
        while not done and self._read_failure() is None:
            done, _ = await asyncio.wait(endings, timeout=FAILURE_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        if self._stopping:
            done, _ = await asyncio.wait(endings, timeout=STOP_TIMEOUT_S)
        limit = asyncio.get_running_loop().time() + FAILURE_TIMEOUT_S
        while not self._killed and asyncio.get_running_loop().time() < limit and len(done) < len(endings):
            if self._read_failure() is not None:
                limit = min(limit, asyncio.get_running_loop().time() + LOG_GRACE_S)
            done, _ = await asyncio.wait(endings, timeout=0.02, return_when=asyncio.ALL_COMPLETED)
        by_themselves = [ending.done() for ending in endings]
        self.kill()
        await asyncio.wait(endings)
        await asyncio.to_thread(self._coordinator.close)
        # If the coordinator failed, each rank has written what it knows.
        self._failure = self._failure or self._read_failure("failure.rank*.json")
        failed = [rank for rank in self._failure.failed_ranks if rank >= 0] if self._failure is not None else []
        self._failed_rank = (*failed, *(rank for rank, ended in enumerate(by_themselves) if ended), 0)[0]
        how = endings[self._failed_rank].result()
        if not by_themselves[self._failed_rank]:
            how = f"(process {self.pids[self._failed_rank]}) was ended"
        return RanksExit(how=how, rank=self._failed_rank, failure=self._failure)

    def _read_failure(self, name: str = "failure.json") -> DistributedFailure | None:
        """None until there is one."""
        if self._directory is None:
            return None
        found = sorted(Path(self._directory).glob(name))  # renamed into place, so it is whole
        if not found:
            return None
        try:
            return read_report(str(found[0]))
        except (OSError, ValueError, KeyError, TypeError):
            log.exception("the coordinator's report cannot be read")
            return None

    def turn_status(self) -> tuple[int, str]:
        return self._ranks[0].turn_status.read()

    def last_lines(self) -> str:
        if len(self._ranks) == 1:
            return self._ranks[0].last_lines()
        order = sorted(range(len(self._ranks)), key=lambda rank: rank != self._failed_rank)
        return "\n".join(
            f"rank {rank}: {line}" for rank in order for line in self._ranks[rank].last_lines().splitlines()
        )

    def stopped(self) -> Sequence[int]:
        return [rank for rank, process in enumerate(self._ranks) if process.is_stopped()]

    def close(self) -> None:
        for process in self._ranks:
            process.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


async def start_ranks(
    spec: RankSpec,
    receive: Receive,
    start: Callable[[RankAssignment, Receive], Awaitable[RankHandle]],
    *,
    host: str = "127.0.0.1",
) -> Link:
    """Starts each rank by ``start``, with a coordinator where there are several, which listens on ``host``: an
    address of this machine that all ranks reach. Nothing is left when this raises."""
    num_ranks = spec.settings.parallel.data_parallel_size
    if num_ranks == 1:
        return Ranks([await start(RankAssignment(spec=spec), receive)])
    directory = tempfile.mkdtemp(prefix="descant-replica-")
    coordinator, ranks = None, []
    try:
        start_coordinator = partial(
            CoordinatorProcess.start, num_ranks, directory, host=host, stop_limit_s=spec.settings.rank.stopped_grace_s
        )
        coordinator = await asyncio.to_thread(start_coordinator)
        for rank in range(num_ranks):
            assignment = RankAssignment(spec=spec, rank=rank, rendezvous=coordinator.rendezvous)
            ranks.append(await start(assignment, receive if rank == 0 else _start_phases_only(rank, receive)))
    except BaseException:
        for process in ranks:
            process.kill()
        for process in ranks:
            await process.exited()
            process.close()
        if coordinator is not None:
            await asyncio.to_thread(coordinator.close)
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return Ranks(ranks, coordinator, directory)


def _start_phases_only(rank: int, receive: Receive) -> Receive:
    """Of a follower's messages, the phases of its start and its failure."""

    def listen(response: RankResponse) -> None:
        match response:
            case RankResponse(id=0, last=False, result=phase):
                receive(RankResponse(id=START, result=f"{phase} (rank {rank})", last=False))
            case RankResponse(id=0, error=DescantError()):
                receive(response)

    return listen


def exit_in_words(pid: int, code: int, *, node: str = "") -> str:
    """``code`` as ``subprocess`` gives it: below 0 a signal."""
    who = f"process {pid}" + (f" on {node}" if node else "")
    return f"({who}) was killed by {signal.Signals(-code).name}" if code < 0 else f"({who}) exited with code {code}"


# --------------------------------------------------------------------------------------------------------------------
# Ranks in processes of this machine


async def start_processes(spec: RankSpec, receive: Receive) -> Link:
    """The default ``Launcher``."""
    return await start_ranks(spec, receive, _RankProcess.start)


class _RankProcess:
    """One rank: its process, its end of the channel, its turn status and its output."""

    def __init__(self, process: asyncio.subprocess.Process, channel: ServerChannel, turn_status: TurnStatus):
        self.pid = process.pid
        self.node = ""
        self.turn_status = turn_status
        self._process = process
        self._channel = channel
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._output = asyncio.create_task(self._keep_output())

    @classmethod
    async def start(cls, assignment: RankAssignment, receive: Receive) -> _RankProcess:
        ours, theirs = socket.socketpair()
        turn_status = TurnStatus()
        spec = assignment.spec
        visible = {"CUDA_VISIBLE_DEVICES": spec.gpus[assignment.rank]} if spec.gpus else {}
        try:
            process = await asyncio.create_subprocess_exec(
                *rank_command(theirs.fileno(), turn_status.fd),
                pass_fds=(theirs.fileno(), turn_status.fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=rank_environment({**spec.env, **visible}),
            )
        except BaseException:
            ours.close()
            turn_status.close()
            raise
        finally:
            theirs.close()
        rank = cls(process, await ServerChannel.open(ours, receive), turn_status)
        rank._channel.send(assignment)
        return rank

    def send(self, request: RankRequest) -> None:
        self._channel.send(request)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def exited(self) -> str:
        exit_ = asyncio.create_task(self._process.wait())
        await asyncio.wait([exit_, self._channel.closed], return_when=asyncio.FIRST_COMPLETED)
        # Whichever came first, the other follows; a process without its channel is of no use.
        _, alive = await asyncio.wait([exit_], timeout=EXIT_TIMEOUT_S)
        if alive:
            self.kill()
        code = await exit_
        await asyncio.wait([self._channel.closed, self._output], timeout=EXIT_TIMEOUT_S)
        self._output.cancel()
        self._channel.close()
        return exit_in_words(self.pid, code)

    def last_lines(self) -> str:
        return "\n".join(self._lines)

    def is_stopped(self) -> bool:
        status = process_status(self.pid)
        return status is not None and status.stopped

    def close(self) -> None:
        self.turn_status.close()

    async def _keep_output(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(1 << 14):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in [*lines, *([rest] if len(rest) > 1 << 14 else [])]:
                self._keep(line)
            rest = rest if len(rest) <= 1 << 14 else b""
        if rest:
            self._keep(rest)

    def _keep(self, line: bytes) -> None:
        keep_line(self._lines, line.decode(errors="replace").rstrip())


def keep_line(lines: deque[str], line: str) -> None:
    """A line that a rank has printed: into the log, and kept for the message of its death."""
    lines.append(line)
    logging.getLogger("descant.rank").info("%s", line)


# --------------------------------------------------------------------------------------------------------------------
# A rank in a thread of this process


class ThreadLink:
    """``Link`` to a replica of one rank."""

    def __init__(self, settings: ReplicaSettings, receive: Receive):
        self.pids: Sequence[int] = ()
        self.nodes: Sequence[str] = ()
        self._turn_status = TurnStatus()
        self._settings = settings
        self._receive = receive
        self._event_loop = asyncio.get_running_loop()
        self._done: asyncio.Future[str] = self._event_loop.create_future()
        self._turn_loop: Any = None

    @classmethod
    async def start(cls, build: Callable[[Phase], Executor], settings: ReplicaSettings, receive: Receive) -> ThreadLink:
        link = cls(settings, receive)
        threading.Thread(target=link._run, args=(build,), name="descant-rank", daemon=True).start()
        return link

    def _respond(self, response: RankResponse) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._event_loop.call_soon_threadsafe(self._receive, response)

    def _run(self, build: Callable[[Phase], Executor]) -> None:
        from descant.ranks.loop import TurnLoop

        how = "ended"
        try:
            executor = build(lambda text: self._respond(RankResponse(id=START, result=text, last=False)))
            self._turn_loop = TurnLoop(
                executor,
                respond=self._respond,
                turn_status=self._turn_status,
                time_share=self._settings.sample.time_share,
                max_pass_s=self._settings.train.max_pass_ms / 1000,
            )
            self._respond(RankResponse(id=START, result=executor.info))
            self._turn_loop.run()
        except DescantError as error:
            self._respond(RankResponse(id=START, error=error))
        except Exception as error:
            log.exception("the rank's thread broke")
            how = f"broke with {type(error).__name__}"
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(self._end, how)

    def _end(self, how: str) -> None:
        if not self._done.done():
            self._done.set_result(how)

    def send(self, request: RankRequest) -> None:
        if self._turn_loop is not None:
            self._turn_loop.post(request)

    def kill(self) -> None:
        """A thread cannot be ended from outside; it is left behind, and ends with its turn."""
        self.send(RankRequest(id=0, op=Stop()))
        self._end("was left behind")

    async def ended(self) -> RanksExit:
        return RanksExit(how=await asyncio.shield(self._done))

    def turn_status(self) -> tuple[int, str]:
        return self._turn_status.read()

    def last_lines(self) -> str:
        return ""

    def stopped(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        """The thread may still write its turn status."""
