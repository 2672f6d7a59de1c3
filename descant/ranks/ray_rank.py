"""The server's end of a rank on another machine: two connections that come in, the rank's channel and its host's.

    rank = RayRank(name=...)
    address = await rank.listen(host)       # and the actor is started with the address and ``rank.token``
    rank.set_host(run, end=...)
    await rank.connected(timeout_s=60)      # its process runs, and waits for its ``RankAssignment``
    rank.begin(assignment, receive)

A connection that does not begin with the token is closed, having been read no further than its first 4 KiB of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from descant.distributed.coordinator.process import Rendezvous
from descant.distributed.frames import BadFrame, Frames, pack, tune
from descant.errors import ServerError
from descant.ranks.channel import ServerChannel
from descant.ranks.launch import KEPT_LINES, Receive, exit_in_words, keep_line
from descant.ranks.ops import RankRequest
from descant.ranks.settings import RankAssignment

log = logging.getLogger(__name__)

HELLO_S = 5.0
MAX_HELLO_BYTES = 4096
KILL_S = 2.0
"""From the kill sent to a host until Ray is asked to end the host."""
UNREACHABLE_S = 8.0
"""From then until it is no longer waited for. Ray ends a stopped process after 5 s."""
REASON_S = 2.0
"""How long Ray may take to say why a host is gone, and a host to say why its rank is."""

_LENGTH = struct.Struct(">I")


class _LastTurnStatus:
    """The turn status of the last heartbeat."""

    def __init__(self) -> None:
        self.last = (0, "")

    def read(self) -> tuple[int, str]:
        return self.last


class RayRank:
    """``launch.RankHandle`` whose host is an actor."""

    def __init__(self, *, name: str):
        loop = asyncio.get_running_loop()
        self.turn_status = _LastTurnStatus()
        self.pid = 0
        self.node = ""
        self.node_id = ""
        """As ``distributed.process_table.node_id`` gives it there."""
        self.address = ""
        """Its machine, as this one reaches it."""
        self.token = secrets.token_hex(16)
        self._name = name
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._stopped = False
        self._listener: asyncio.Server | None = None
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._started: asyncio.Future[None] = loop.create_future()
        self._joined: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = loop.create_future()
        """The rank's connection."""
        self._channel: ServerChannel | None = None
        self._exit: asyncio.Future[str] = loop.create_future()
        """How the rank ended, in words."""
        self._run: asyncio.Future[Any] | None = None
        self._end_host: Callable[[], asyncio.Future[None]] | None = None
        self._killing: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------ start
    async def listen(self, host: str) -> tuple[str, int]:
        self._listener = await asyncio.start_server(self._accept, host, 0)
        return host, self._listener.sockets[0].getsockname()[1]

    def set_host(self, run: asyncio.Future[Any], *, end: Callable[[], asyncio.Future[None]]) -> None:
        """``run`` ends with the actor's work, with its exception; ``end`` ends the actor."""
        self._run, self._end_host = run, end
        run.add_done_callback(_retrieve_exception)

    async def connected(self, *, timeout_s: float) -> None:
        """Until host and rank are there. Raises ``ServerError`` saying why they are not."""
        assert self._run is not None
        parts: list[asyncio.Future[Any]] = [self._started, self._joined]
        both = asyncio.ensure_future(asyncio.wait(parts))
        try:
            ways: list[asyncio.Future[Any]] = [both, self._exit, self._run]
            await asyncio.wait(ways, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not both.done() and self._run.done():
                await asyncio.wait([self._exit], timeout=REASON_S)  # its last message may be on its way
            if not both.done():
                how = self._exit.result() if self._exit.done() else await self._why_silent(timeout_s)
                raise ServerError(f"{self._name} could not be started on the Ray cluster: {how}")
        finally:
            both.cancel()
            assert self._listener is not None
            self._listener.close()

    def begin(self, assignment: RankAssignment, receive: Receive) -> None:
        self._channel = ServerChannel.over(*self._joined.result(), receive)
        self._channel.send(assignment)

    def watch(self, rendezvous: Rendezvous) -> None:
        """Has the host report to the coordinator which processes of its machine are stopped or dead."""
        self._writers["host"].write(pack(["watch", rendezvous.to_json()]))

    async def _why_silent(self, timeout_s: float) -> str:
        assert self._run is not None
        if not self._run.done():
            return f"its host did not connect within {timeout_s:g} s"
        return first_sentence(self._run.exception())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, as long as it lasts."""
        try:
            async with asyncio.timeout(HELLO_S):
                role = await self._read_hello(reader)
            if role in self._writers:
                raise BadFrame(f"there is a {role} already")
        except (BadFrame, OSError, EOFError, TimeoutError) as error:
            log.warning("a connection to %s was closed: %s", self._name, error)
            writer.close()
            return
        self._writers[role] = writer
        tune(writer.get_extra_info("socket"))
        if role == "channel":
            self._joined.set_result((reader, writer))
        else:
            await self._read_messages(reader)

    async def _read_hello(self, reader: asyncio.StreamReader) -> str:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_HELLO_BYTES:
            raise BadFrame("it said something else than hello")
        try:
            hello = json.loads(await reader.readexactly(length))
        except ValueError:
            hello = None
        match hello:
            case ["hello", {"token": str(token), "role": "host" | "channel" as role}] if hmac.compare_digest(
                token.encode(), self.token.encode()
            ):
                return str(role)
        raise BadFrame("it did not show the token")

    # ------------------------------------------------------------------------------------------------ the host
    async def _read_messages(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        try:
            while data := await reader.read(1 << 16):
                for message in frames.feed(data):
                    self._handle(message)
        except (OSError, BadFrame) as error:
            log.warning("the host of %s was lost: %s", self._name, error)
        if not self._exit.done():
            if self._run is not None:
                await asyncio.wait([self._run], timeout=REASON_S)
            known = self._run is not None and self._run.done()
            reason = (
                first_sentence(self._run.exception()) if known and self._run is not None else "its connection ended"
            )
            self._set_exit(f"{self._who()} was lost with its host: {reason}")

    def _handle(self, message: object) -> None:
        match message:
            case ["started", int(pid), str(node), str(node_id), str(address)]:
                self.pid, self.node, self.node_id, self.address = pid, node, node_id, address
                self._started.set_result(None)
            case ["heartbeat", int(turn), str(text), bool(stopped)]:
                self.turn_status.last, self._stopped = (turn, text), stopped
            case ["line", str(line)]:
                keep_line(self._lines, line)
            case ["ended", int(code)]:
                self._set_exit(exit_in_words(self.pid, code, node=self.node))
            case ["failed", str(why)]:
                self._set_exit(why)
            case _:
                raise BadFrame(f"a message was not understood: {str(message)[:80]}")

    def _who(self) -> str:
        return "(not started)" if not self.pid else f"(process {self.pid} on {self.node})"

    def _set_exit(self, how: str) -> None:
        if not self._exit.done():
            self._exit.set_result(how)

    # ------------------------------------------------------------------------------------------------ RankHandle
    def send(self, request: RankRequest) -> None:
        assert self._channel is not None
        self._channel.send(request)

    def kill(self) -> None:
        if self._killing is None and not self._exit.done():
            if (host := self._writers.get("host")) is not None:
                host.write(pack(["kill"]))
            self._killing = asyncio.create_task(self._escalate_kill())

    async def _escalate_kill(self) -> None:
        await asyncio.wait([self._exit], timeout=KILL_S)
        if not self._exit.done() and self._end_host is not None:
            self._end_host().add_done_callback(_retrieve_exception)
            await asyncio.wait([self._exit], timeout=UNREACHABLE_S)
        self._set_exit(f"{self._who()} could not be reached")

    async def exited(self) -> str:
        assert self._channel is not None
        signs: list[asyncio.Future[Any]] = [self._exit, self._channel.closed]
        await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        # Whichever came first, the other follows; a process without its channel is of no use.
        await asyncio.wait([self._exit], timeout=REASON_S)
        self.kill()
        how = await asyncio.shield(self._exit)
        await asyncio.wait([self._channel.closed], timeout=REASON_S)  # its last messages
        return how

    def last_lines(self) -> str:
        return "\n".join(self._lines)

    def is_stopped(self) -> bool:
        return self._stopped

    def close(self) -> None:
        if self._killing is not None:
            self._killing.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._channel is not None:
            self._channel.close()
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()
        if self._end_host is not None:
            self._end_host().add_done_callback(_retrieve_exception)


def first_sentence(error: BaseException | None) -> str:
    """The sentence in one of Ray's errors, which are pages."""
    if error is None:
        return "its work was done"
    text = str(error)
    _, found, cause = text.partition("The actor is dead because ")
    cause = (cause if found else text).strip()
    return f"{type(error).__name__}: {cause.partition(' Some common causes')[0].splitlines()[0] if cause else ''}"


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Else asyncio logs that the exception was never retrieved."""
    if not future.cancelled():
        future.exception()
