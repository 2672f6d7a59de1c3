"""The server's side of a replica: ``Trainer``, ``Engine`` and ``Progress`` over a channel to the rank that works.

    replica = await Replica.start(RankSpec(model="smollm2", settings=RankSettings()), on_death=...)
    future = replica.submit(command)
    …
    await replica.restart()      # after a death: a new rank under the same object; its models and versions are gone
    await replica.close()

The rank is a process of its own, so that a crash of torch never takes the server down; no torch is imported here. Its
death is noticed at once (the channel closes); a rank that hangs in a turn is ended after ``turn_timeout_s``. Either way
everything pending fails with ``RankDied``, which names the rank, how it ended and what it ran.

Must be used on one event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from descant.errors import DescantError, RankDied, ServerError
from descant.ranks.channel import LENGTH, Board, encode
from descant.ranks.messages import (
    Cancel,
    Drop,
    Failed,
    Finished,
    FromRank,
    Publish,
    Ready,
    Release,
    Sample,
    Sampled,
    SampleEnded,
    Save,
    StartFailed,
    Starting,
    Stop,
    Submit,
    ToRank,
)
from descant.ranks.rank_main import rank_command, rank_environment
from descant.ranks.settings import RankSettings, RankSpec
from descant.types import (
    Command,
    EngineCapabilities,
    Manifest,
    ModelFacts,
    Result,
    SampleDelta,
    SampleRequest,
    SnapshotRef,
    Version,
)

if TYPE_CHECKING:
    from descant.ranks.loop import Executor

__all__ = ["RankSettings", "RankSpec", "Replica"]

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
WATCH_INTERVAL_S = 1.0
KEPT_LINES = 40

Phase = Callable[[str], None]


class Running(Protocol):
    """A rank's board as the server reads it (``channel.Board``)."""

    def read(self) -> tuple[int, str]: ...


class Link(Protocol):
    """A started rank, whatever it runs in."""

    pid: int | None
    """Its process, on ``node``; None for a rank in this one."""
    node: str
    """The machine it runs on, as people call it; "" for this one."""

    @property
    def board(self) -> Running: ...

    def send(self, message: ToRank) -> None: ...
    def kill(self) -> None: ...
    async def ended(self) -> str:
        """Waits until the rank has ended; how, in words ("exited with code 1")."""
        ...

    def last_lines(self) -> str: ...
    def is_stopped(self) -> bool:
        """Whether a signal holds it (SIGSTOP), so that it will answer nothing."""
        ...

    def close(self) -> None:
        """Lets go of what outlives the rank."""
        ...


Launch = Callable[[RankSpec, Callable[[FromRank], None]], Awaitable[Link]]
"""Starts a rank, whose messages are then given to the callable, on the event loop's thread. Raises ``DescantError``
naming what is missing if it cannot be started; nothing is left then."""


class Replica:
    """Made by ``start`` or ``in_process``."""

    def __init__(self, name: str, launch: Callable[[Replica], Any], settings: RankSettings, on_death: OnDeath | None):
        self.name = name
        self.facts: ModelFacts
        self.capabilities: EngineCapabilities
        self._launch = launch
        self._settings = settings
        self._on_death = on_death
        self._link: Link | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._phase = "starting the process"
        self._died: RankDied | None = None
        self._closing = False
        self._num_calls = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._samples: dict[str, asyncio.Queue[SampleDelta | SampleEnded]] = {}

    # ------------------------------------------------------------------------------------------------ life
    @classmethod
    async def start(
        cls,
        spec: RankSpec,
        *,
        launch: Launch | None = None,
        on_phase: Phase | None = None,
        on_death: OnDeath | None = None,
    ) -> Replica:
        """Starts a rank (in a process of this machine, unless ``launch`` does otherwise) and waits until it serves.
        Raises the rank's own ``UserError`` for a model that cannot be served, ``ServerError`` naming the phase when it
        died or was not ready in ``start_timeout_s``.

        ``on_phase`` is told each step of the start. ``on_death`` is called once per death, after all that was pending
        has failed; it may schedule ``restart``."""
        start = launch or start_process
        replica = cls(spec.label or spec.model, lambda self: start(spec, self._receive), spec.settings, on_death)
        await replica._start(on_phase)
        return replica

    @classmethod
    async def in_process(
        cls,
        build: Callable[[Phase], Executor],
        settings: RankSettings | None = None,
        *,
        on_death: OnDeath | None = None,
    ) -> Replica:
        """The same turn loop in a thread of this process, for tests and debugging. ``build`` runs in that thread."""
        settings = settings or RankSettings()
        replica = cls("in process", lambda self: _Thread.start(build, settings, self._receive), settings, on_death)
        await replica._start(None)
        return replica

    async def restart(self, *, on_phase: Phase | None = None) -> None:
        """A new rank after a death. Models, snapshots and published versions of the old one are gone."""
        if self._link is not None:
            raise ServerError(f"the rank of {self.name} is running, there is nothing to restart")
        await self._start(on_phase)

    async def close(self) -> None:
        """Ends the rank within seconds; what is pending fails. Idempotent."""
        self._closing = True
        link, watch = self._link, self._watch
        if link is None or watch is None:
            return
        with contextlib.suppress(OSError):
            link.send(Stop())
        _, pending = await asyncio.wait([watch], timeout=CLOSE_TIMEOUT_S)
        if pending:
            link.kill()
            await asyncio.wait([watch], timeout=CLOSE_TIMEOUT_S)

    @property
    def alive(self) -> bool:
        return self._link is not None and self._died is None

    @property
    def serving(self) -> bool:
        """Alive, and past its start."""
        return self.alive and self._ready is not None and self._ready.done()

    @property
    def pid(self) -> int | None:
        """The rank's process; None in process, or when there is none."""
        return None if self._link is None else self._link.pid

    async def _start(self, on_phase: Phase | None) -> None:
        loop = asyncio.get_running_loop()
        self._on_phase = on_phase
        self._ready = loop.create_future()
        self._phase = "starting the process"
        self._link = await self._launch(self)
        self._died = None
        self._watch = asyncio.create_task(self._watch_link(self._link))
        try:
            ready = await asyncio.wait_for(asyncio.shield(self._ready), self._settings.start_timeout_s)
        except TimeoutError:
            phase = self._phase
            await self._give_up()
            raise ServerError(
                f"the rank of {self.name} was not ready after {self._settings.start_timeout_s:g} s: it was {phase}"
            ) from None
        except BaseException:
            await self._give_up()
            raise
        self.facts, self.capabilities = ready.facts, ready.capabilities

    async def _give_up(self) -> None:
        if self._link is not None and self._watch is not None:
            self._link.kill()
            await asyncio.wait([self._watch], timeout=CLOSE_TIMEOUT_S)

    async def _watch_link(self, link: Link) -> None:
        """Until the rank has ended; then everything pending fails. Ends a rank that hangs in a turn."""
        ended = asyncio.create_task(link.ended())
        turn, since, stopped, how = -1, 0.0, 0, ""
        now = asyncio.get_running_loop().time
        while not ended.done():
            await asyncio.wait([ended], timeout=WATCH_INTERVAL_S)
            number, runs = link.board.read()
            if number != turn or not (runs or self._calls or self._samples):
                turn, since = number, now()
            stopped = stopped + 1 if link.is_stopped() else 0
            if how or ended.done():
                continue
            if now() - since > self._settings.turn_timeout_s:
                how = f"was ended, having been silent for {self._settings.turn_timeout_s:g} s"
                link.kill()
            elif stopped > 1:
                how = "was ended, having been stopped by a signal"
                link.kill()
        how = how or ended.result()
        _, runs = link.board.read()
        if self._ready is not None and not self._ready.done():
            runs = self._phase
        self._bury(link, how, runs)

    def _bury(self, link: Link, how: str, runs: str) -> None:
        served = self._ready is not None and self._ready.done() and self._ready.exception() is None
        message = f"the rank of {self.name} {how}" + (f" while it ran: {runs}" if runs else ", idle")
        died = self._died = RankDied(message)
        self._link = None
        link.close()
        if self._ready is not None and not self._ready.done():
            lines = link.last_lines()
            self._ready.set_exception(ServerError(message + (f"; its last lines:\n{lines}" if lines else "")))
            self._ready.exception()  # whoever waited may have given up
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(RankDied(message))
        for request_id, deltas in self._samples.items():
            deltas.put_nowait(SampleEnded(request_id=request_id, error=RankDied(message)))
        if self._closing:
            return
        log.error("%s; its last lines:\n%s", message, link.last_lines())
        if self._on_death is not None and served:
            self._on_death(died)

    # ------------------------------------------------------------------------------------------------ messages
    def _send(self, message: ToRank) -> None:
        if self._link is None or self._died is not None:
            raise RankDied(str(self._died or f"the rank of {self.name} is not running"))
        self._link.send(message)

    def _call(self, make: Callable[[int], ToRank], what: str) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._num_calls += 1
        call = self._num_calls
        try:
            self._send(make(call))
        except DescantError as error:
            future.set_exception(error)
        except Exception as error:
            log.exception("a message could not be sent")
            future.set_exception(ServerError(f"{what} could not be sent to the rank: {type(error).__name__}"))
        else:
            self._calls[call] = future
        return future

    def _receive(self, message: FromRank) -> None:
        match message:
            case Finished(call=call, result=result):
                if (future := self._calls.pop(call, None)) is not None and not future.done():
                    future.set_result(result)
            case Failed(call=call, error=error):
                if (future := self._calls.pop(call, None)) is not None and not future.done():
                    future.set_exception(error)
            case Sampled(delta=delta):
                if (deltas := self._samples.get(delta.request_id)) is not None:
                    deltas.put_nowait(delta)
            case SampleEnded(request_id=request_id):
                if (deltas := self._samples.get(request_id)) is not None:
                    deltas.put_nowait(message)
            case Starting(phase=phase):
                self._phase = phase
                if self._on_phase is not None:
                    self._on_phase(phase)
            case Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case StartFailed(error=error):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_exception(error)

    # ------------------------------------------------------------------------------------------------ Trainer
    def submit(self, command: Command) -> asyncio.Future[Result]:
        return self._call(lambda call: Submit(call=call, command=command), type(command).__name__)

    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        return cast(Manifest, await self._call(lambda call: Save(call=call, ref=ref, dest=dest), "a save"))

    async def drop(self, ref: SnapshotRef) -> None:
        if self.alive:  # a dead rank holds nothing
            await self._call(lambda call: Drop(call=call, ref=ref), "a drop")

    # ------------------------------------------------------------------------------------------------ Engine
    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        if request.request_id in self._samples:
            raise ServerError(f"request {request.request_id!r} runs already")
        deltas: asyncio.Queue[SampleDelta | SampleEnded] = asyncio.Queue()
        self._samples[request.request_id] = deltas
        ended = False
        try:
            self._send(Sample(request=request))
            while True:
                message = await deltas.get()  # ends with the rank at the latest, and that within ``turn_timeout_s``
                if isinstance(message, SampleEnded):
                    ended = True
                    if message.error is not None:
                        raise message.error
                    return
                yield message
        finally:
            del self._samples[request.request_id]
            if not ended and self.alive:
                self._send(Cancel(request_id=request.request_id))

    async def publish(self, ref: SnapshotRef) -> None:
        await self._call(lambda call: Publish(call=call, ref=ref), "a publication")

    async def release(self, version: Version) -> None:
        if self.alive:
            await self._call(lambda call: Release(call=call, version=version), "a release")

    async def cancel(self, request_id: str) -> None:
        if self.alive and request_id in self._samples:
            self._send(Cancel(request_id=request_id))

    # ------------------------------------------------------------------------------------------------ Progress
    def running(self) -> str:
        return "" if self._link is None else self._link.board.read()[1]


OnDeath = Callable[[RankDied], None]


# --------------------------------------------------------------------------------------------------------------------
# A rank in a process


class _Process:
    def __init__(self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter, board: Board):
        self.process = process
        self.board = board
        self.pid: int | None = process.pid
        self.node = ""
        self._writer = writer
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._channel: asyncio.Task[None]
        self._output: asyncio.Task[None]

    @classmethod
    async def start(cls, spec: RankSpec, receive: Callable[[FromRank], None]) -> _Process:
        ours, theirs = socket.socketpair()
        board = Board()
        try:
            process = await asyncio.create_subprocess_exec(
                *rank_command(theirs.fileno(), board.fd),
                pass_fds=(theirs.fileno(), board.fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=rank_environment(spec.env),
            )
        except BaseException:
            ours.close()
            board.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        link = cls(process, writer, board)
        writer.write(encode(spec))
        link._channel = asyncio.create_task(read_channel(reader, receive))
        link._output = asyncio.create_task(link._keep_output())
        return link

    def send(self, message: ToRank) -> None:
        self._writer.write(encode(message))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def ended(self) -> str:
        exit_ = asyncio.create_task(self.process.wait())
        await asyncio.wait([exit_, self._channel], return_when=asyncio.FIRST_COMPLETED)
        # Whichever came first, the other follows; a process without its channel is of no use.
        _, alive = await asyncio.wait([exit_], timeout=WATCH_INTERVAL_S)
        if alive:
            self.kill()
        code = await exit_
        await asyncio.wait([self._channel, self._output], timeout=WATCH_INTERVAL_S)
        for task in (self._channel, self._output):
            task.cancel()
        self._writer.close()
        return f"(process {self.pid}) {how_it_ended(code)}"

    def last_lines(self) -> str:
        return "\n".join(self._lines)

    def is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:  # not Linux, or just ended
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def close(self) -> None:
        self.board.close()

    async def _keep_output(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        while chunk := await self.process.stdout.read(1 << 14):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in [*lines, *([rest] if len(rest) > 1 << 14 else [])]:
                self._keep(line)
            rest = rest if len(rest) <= 1 << 14 else b""
        if rest:
            self._keep(rest)

    def _keep(self, line: bytes) -> None:
        keep_line(self._lines, line.decode(errors="replace").rstrip())


async def read_channel(reader: asyncio.StreamReader, receive: Callable[[FromRank], None]) -> None:
    """Until the rank's end of the channel is closed."""
    try:
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            receive(pickle.loads(await reader.readexactly(length)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    except Exception:
        log.exception("the rank's channel broke")


def how_it_ended(code: int) -> str:
    """A process's return code in words; below 0 it is the signal that killed it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def keep_line(lines: deque[str], line: str) -> None:
    """A line that a rank has printed: into the log, and kept for the message of its death."""
    lines.append(line)
    logging.getLogger("descant.rank").info("%s", line)


async def start_process(spec: RankSpec, receive: Callable[[FromRank], None]) -> Link:
    """The default ``Launch``: a process of this machine."""
    return await _Process.start(spec, receive)


# --------------------------------------------------------------------------------------------------------------------
# A rank in a thread


class _Thread:
    def __init__(self, settings: RankSettings, receive: Callable[[FromRank], None]):
        self.board = Board()
        self.pid: int | None = None
        self.node = ""
        self._settings = settings
        self._receive = receive
        self._event_loop = asyncio.get_running_loop()
        self._done: asyncio.Future[str] = self._event_loop.create_future()
        self._turn_loop: Any = None

    @classmethod
    async def start(
        cls, build: Callable[[Phase], Executor], settings: RankSettings, receive: Callable[[FromRank], None]
    ) -> _Thread:
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
                board=self.board,
                microbatch_tokens=self._settings.microbatch_tokens,
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

    async def ended(self) -> str:
        return await asyncio.shield(self._done)

    def last_lines(self) -> str:
        return ""

    def is_stopped(self) -> bool:
        return False

    def close(self) -> None:
        """The thread may still write on its board."""
