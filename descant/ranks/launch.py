"""How a replica's ranks are started, and what the server holds of them once they run.

A ``Launcher`` starts all ranks of one replica and returns a ``Link`` to them. Rank 0 leads: its channel carries all
that is said while the replica serves; the others' carry their phases while they start, and nothing afterwards. Between
several ranks stands a referee (``descant.dist``), which says who was at fault when one of them dies, stops or is late.

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

from descant.dist.failure import DistributedFailure, read_report
from descant.dist.process import process_status
from descant.dist.referee import RefereeProcess
from descant.errors import DescantError
from descant.ranks.channel import Board, ServerChannel
from descant.ranks.messages import FromRank, Ready, StartFailed, Starting, Stop, ToRank
from descant.ranks.rank_main import rank_command, rank_environment
from descant.ranks.settings import RankSettings, RankSpec, Seat

if TYPE_CHECKING:
    from descant.ranks.loop import Executor

log = logging.getLogger(__name__)

KEPT_LINES = 40
EXIT_TIMEOUT_S = 1.0
"""How long the rest of a rank may take once a part of it has ended: its output, its channel, its process."""
STOP_TIMEOUT_S = 5.0
"""How long ranks may take to end one after another when they were told to."""
VERDICT_INTERVAL_S = 0.25
"""How often it is looked whether there is a verdict, though no rank has ended."""
VERDICT_TIMEOUT_S = 1.0
"""How long the referee may take to say why a rank has ended; it usually has before the rank is gone."""
LAST_WORDS_S = 0.2
"""What ranks have from a verdict on to tell their logs of it."""

Phase = Callable[[str], None]
Receive = Callable[[FromRank], None]
Launcher = Callable[[RankSpec, Receive], Awaitable["Link"]]
"""Starts every rank of a replica (``settings.ranks_per_replica``) and returns at once. What rank 0 says goes to the
second argument, in order, on the event loop's thread. Raises ``OSError`` or ``ServerError``, and has left nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a replica's ranks have ended, all of them. ``rank``: the one at fault, None where there is one only. ``how``
    completes "rank 1 of smollm2 …". ``verdict``: the referee's."""

    how: str
    rank: int | None = None
    verdict: DistributedFailure | None = None


class Link(Protocol):
    """The started ranks of one replica, whatever they run in."""

    pids: Sequence[int]
    """The ranks' processes, by rank; none where they are not processes."""
    nodes: Sequence[str]
    """The machine of each, as people call it; "" for this one."""

    def send(self, message: ToRank) -> None:
        """To rank 0."""
        ...

    def kill(self) -> None:
        """All ranks."""
        ...

    async def ended(self) -> End:
        """Waits until one rank has ended, ends the others, and returns when all of them are gone."""
        ...

    def board(self) -> tuple[int, str]:
        """What rank 0 runs now (``Board.read``); may be a moment old."""
        ...

    def last_lines(self) -> str:
        """The end of what the ranks printed, the one at fault first."""
        ...

    def stopped(self) -> Sequence[int]:
        """Ranks that a signal holds (SIGSTOP), so that they will answer nothing."""
        ...

    def close(self) -> None:
        """Lets go of what outlives the ranks."""
        ...


class RankHandle(Protocol):
    """One started rank, as ``Ranks`` needs it."""

    pid: int
    node: str
    """Its machine, as people call it; "" for this one."""

    @property
    def board(self) -> BoardReader: ...
    def send(self, message: ToRank) -> None: ...
    def kill(self) -> None: ...
    async def exited(self) -> str:
        """Waits until it has, and nothing more comes from it; how, in words ("(process 17) exited with code 1")."""
        ...

    def last_lines(self) -> str: ...
    def is_stopped(self) -> bool: ...
    def close(self) -> None:
        """Lets go of what outlives it."""
        ...


class BoardReader(Protocol):
    """The server's end of a ``channel.Board``."""

    def read(self) -> tuple[int, str]: ...


class Ranks:
    """``Link`` to ranks that have a handle each, and to their referee, if they have one. ``directory``: the referee's,
    removed at the end."""

    def __init__(
        self, ranks: Sequence[RankHandle], referee: RefereeProcess | None = None, directory: str | None = None
    ):
        self._ranks = ranks
        self._referee = referee
        self._directory = directory
        self._culprit = 0
        self._stopping = False
        self._killed = False
        self._verdict: DistributedFailure | None = None
        self.pids: Sequence[int] = [process.pid for process in ranks]
        self.nodes: Sequence[str] = [process.node for process in ranks]

    def send(self, message: ToRank) -> None:
        self._stopping = self._stopping or isinstance(message, Stop)
        self._ranks[0].send(message)

    def kill(self) -> None:
        self._verdict = self._verdict or self._read_verdict()  # what comes afterwards would blame whom we have killed
        self._killed = True
        for process in self._ranks:
            process.kill()

    async def ended(self) -> End:
        endings = [asyncio.create_task(process.exited()) for process in self._ranks]
        if self._referee is None:
            return End(how=await endings[0])
        done: set[asyncio.Task[str]] = set()
        while not done and self._read_verdict() is None:
            done, _ = await asyncio.wait(endings, timeout=VERDICT_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        if self._stopping:
            done, _ = await asyncio.wait(endings, timeout=STOP_TIMEOUT_S)
        limit = asyncio.get_running_loop().time() + VERDICT_TIMEOUT_S
        while not self._killed and asyncio.get_running_loop().time() < limit and len(done) < len(endings):
            if self._read_verdict() is not None:
                limit = min(limit, asyncio.get_running_loop().time() + LAST_WORDS_S)
            done, _ = await asyncio.wait(endings, timeout=0.02, return_when=asyncio.ALL_COMPLETED)
        by_themselves = [ending.done() for ending in endings]
        self.kill()
        await asyncio.wait(endings)
        await asyncio.to_thread(self._referee.close)
        # Without a referee each rank writes what it knows.
        self._verdict = self._verdict or self._read_verdict("failure.rank*.json")
        blamed = [rank for rank in self._verdict.culprits if rank >= 0] if self._verdict is not None else []
        self._culprit = (*blamed, *(rank for rank, ended in enumerate(by_themselves) if ended), 0)[0]
        how = endings[self._culprit].result()
        if not by_themselves[self._culprit]:
            how = f"(process {self.pids[self._culprit]}) was ended"
        return End(how=how, rank=self._culprit, verdict=self._verdict)

    def _read_verdict(self, name: str = "failure.json") -> DistributedFailure | None:
        """None until there is one."""
        if self._directory is None:
            return None
        found = sorted(Path(self._directory).glob(name))  # renamed into place, so it is whole
        if not found:
            return None
        try:
            return read_report(str(found[0]))
        except (OSError, ValueError, KeyError, TypeError):
            log.exception("the referee's report cannot be read")
            return None

    def board(self) -> tuple[int, str]:
        return self._ranks[0].board.read()

    def last_lines(self) -> str:
        if len(self._ranks) == 1:
            return self._ranks[0].last_lines()
        order = sorted(range(len(self._ranks)), key=lambda rank: rank != self._culprit)
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
    start: Callable[[Seat, Receive], Awaitable[RankHandle]],
    *,
    host: str = "127.0.0.1",
) -> Link:
    """Starts each rank by ``start``, with a referee where there are several, which listens on ``host``: an address of
    this machine that all ranks reach. Nothing is left when this raises."""
    num_ranks = spec.settings.ranks_per_replica
    if num_ranks == 1:
        return Ranks([await start(Seat(spec=spec), receive)])
    directory = tempfile.mkdtemp(prefix="descant-replica-")
    referee, ranks = None, []
    try:
        referee = await asyncio.to_thread(partial(RefereeProcess.start, num_ranks, directory, host=host))
        for rank in range(num_ranks):
            seat = Seat(spec=spec, rank=rank, invitation=referee.invitation)
            ranks.append(await start(seat, receive if rank == 0 else _starting_only(rank, receive)))
    except BaseException:
        for process in ranks:
            process.kill()
        for process in ranks:
            await process.exited()
            process.close()
        if referee is not None:
            await asyncio.to_thread(referee.close)
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return Ranks(ranks, referee, directory)


def _starting_only(rank: int, receive: Receive) -> Receive:
    """Of what a follower says, the phases of its start, and that it could not."""

    def listen(message: FromRank) -> None:
        match message:
            case Starting(phase=phase):
                receive(Starting(phase=f"{phase} (rank {rank})"))
            case StartFailed():
                receive(message)

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
    """One rank: its process, its end of the channel, its board and its output."""

    def __init__(self, process: asyncio.subprocess.Process, channel: ServerChannel, board: Board):
        self.pid = process.pid
        self.node = ""
        self.board = board
        self._process = process
        self._channel = channel
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._output = asyncio.create_task(self._keep_output())

    @classmethod
    async def start(cls, seat: Seat, receive: Receive) -> _RankProcess:
        ours, theirs = socket.socketpair()
        board = Board()
        spec = seat.spec
        visible = {"CUDA_VISIBLE_DEVICES": spec.gpus[seat.rank]} if spec.gpus else {}
        try:
            process = await asyncio.create_subprocess_exec(
                *rank_command(theirs.fileno(), board.fd),
                pass_fds=(theirs.fileno(), board.fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=rank_environment({**spec.env, **visible}),
            )
        except BaseException:
            ours.close()
            board.close()
            raise
        finally:
            theirs.close()
        rank = cls(process, await ServerChannel.open(ours, receive), board)
        rank._channel.send(seat)
        return rank

    def send(self, message: ToRank) -> None:
        self._channel.send(message)

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
        self.board.close()

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

    def __init__(self, settings: RankSettings, receive: Receive):
        self.pids: Sequence[int] = ()
        self.nodes: Sequence[str] = ()
        self._board = Board()
        self._settings = settings
        self._receive = receive
        self._event_loop = asyncio.get_running_loop()
        self._done: asyncio.Future[str] = self._event_loop.create_future()
        self._turn_loop: Any = None

    @classmethod
    async def start(cls, build: Callable[[Phase], Executor], settings: RankSettings, receive: Receive) -> ThreadLink:
        link = cls(settings, receive)
        threading.Thread(target=link._run, args=(build,), name="descant-rank", daemon=True).start()
        return link

    def _emit(self, message: FromRank) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens
            self._event_loop.call_soon_threadsafe(self._receive, message)

    def _run(self, build: Callable[[Phase], Executor]) -> None:
        from descant.ranks.loop import TurnLoop

        how = "ended"
        try:
            executor = build(lambda text: self._emit(Starting(phase=text)))
            self._turn_loop = TurnLoop(
                executor,
                emit=self._emit,
                board=self._board,
                steps_per_microbatch=self._settings.steps_per_microbatch,
            )
            self._emit(Ready(facts=executor.facts, capabilities=executor.capabilities))
            self._turn_loop.run()
        except DescantError as error:
            self._emit(StartFailed(error=error))
        except Exception as error:
            log.exception("the rank's thread broke")
            how = f"broke with {type(error).__name__}"
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(self._end, how)

    def _end(self, how: str) -> None:
        if not self._done.done():
            self._done.set_result(how)

    def send(self, message: ToRank) -> None:
        if self._turn_loop is not None:
            self._turn_loop.post(message)

    def kill(self) -> None:
        """A thread cannot be ended from outside; it is left behind, and ends with its turn."""
        self.send(Stop())
        self._end("was left behind")

    async def ended(self) -> End:
        return End(how=await asyncio.shield(self._done))

    def board(self) -> tuple[int, str]:
        return self._board.read()

    def last_lines(self) -> str:
        return ""

    def stopped(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        """The thread may still write on its board."""
