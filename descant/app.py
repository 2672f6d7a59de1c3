"""The composition root: settings → ranks → stores → service → HTTP, started in that order and stopped in the other.

``run`` is what a process does. ``serving`` is the part of it that needs no rank: a service over given backends,
answering on a bound socket.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from fastapi import FastAPI

from descant.ckpt.store import DirCheckpointStore
from descant.config import Settings
from descant.errors import DescantError, ServerError, UserError
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec
from descant.server.app import HttpServer, bind, create_app
from descant.server.auth import Keys
from descant.service.catalogue import Catalogue
from descant.service.clock import SystemClock
from descant.service.database import Database
from descant.service.futures import SqlFutureStore
from descant.service.service import Backend, Service
from descant.wire.encode import encode

log = logging.getLogger(__name__)
T = TypeVar("T")

Started = Callable[[str, tuple[str, ...], Settings], None]
"""Called once, when requests are served, with (URL, the models as they were asked for, settings)."""


def run(settings: Settings, *, started: Started) -> None:
    """Serves until SIGINT or SIGTERM. Raises ``DescantError`` for what cannot be served."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(settings, started))


async def _run(settings: Settings, started: Started) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        stack.enter_context(only_server_of(settings.data_dir))
        listener = stack.enter_context(listen(settings.server.host, settings.server.port))
        keepers = [Keeper(name, settings) for name in settings.models]
        for keeper in keepers:
            stack.push_async_callback(keeper.close)
            if await _unless(stop, keeper.start()) is None:
                return
        backends = [keeper.backend for keeper in keepers]
        service = await stack.enter_async_context(
            serving(settings, backends, listener, ready=lambda: _awaited(keepers))
        )
        for keeper in keepers:
            keeper.watch(service)
        started(url(listener), settings.models, settings)
        await stop.wait()


class Keeper:
    """One replica, kept alive: after its rank's death its models are lost, and a new rank is started, again and again
    with growing pauses until one serves."""

    MAX_PAUSE_S = 60.0

    def __init__(self, model: str, settings: Settings):
        self._model = model
        self._spec = RankSpec(
            model=model, settings=settings.rank, losses=settings.losses, spill_dir=str(settings.data_dir / "spill")
        )
        self._replica: Replica | None = None
        self._died = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Replica:
        self._replica = await Replica.start(self._spec, on_phase=self._say, on_death=lambda _: self._died.set())
        return self._replica

    @property
    def backend(self) -> Backend:
        assert self._replica is not None
        return Backend(facts=self._replica.facts, trainer=self._replica, engine=self._replica)

    @property
    def awaited(self) -> str | None:
        alive = self._replica is not None and self._replica.alive
        return None if alive else f"the rank of {self._model} is being started again"

    def watch(self, service: Service) -> None:
        self._task = asyncio.create_task(self._watch(service), name=f"keeper of {self._model}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._replica is not None:
            await self._replica.close()

    async def _watch(self, service: Service) -> None:
        assert self._replica is not None
        pause_s, served_since = 0.0, time.monotonic()
        while True:
            await self._died.wait()
            self._died.clear()
            # At once, not after the restart: whoever calls on a lost model meanwhile is told where to resume.
            await service.backend_restarted(self._replica.facts.name)
            served_long = time.monotonic() - served_since > self.MAX_PAUSE_S
            pause_s = 0.0 if served_long else self._longer(pause_s)
            while not await self._restarted(pause_s):
                pause_s = self._longer(pause_s)
            served_since = time.monotonic()

    def _longer(self, pause_s: float) -> float:
        return min(self.MAX_PAUSE_S, 2 * pause_s or 1.0)

    async def _restarted(self, pause_s: float) -> bool:
        assert self._replica is not None
        await asyncio.sleep(pause_s)
        try:
            await self._replica.restart(on_phase=self._say)
        except DescantError as error:
            log.error("%s; trying again", error)
            return False
        log.warning("the rank of %s serves again", self._model)
        return True

    def _say(self, phase: str) -> None:
        log.info("%s: %s", self._model, phase)


def _awaited(keepers: Sequence[Keeper]) -> str | None:
    return next((keeper.awaited for keeper in keepers if keeper.awaited is not None), None)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None (and ``work`` cancelled) if ``stop`` comes first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait([working])


# --------------------------------------------------------------------------------------------------------------------
# A service over backends


@asynccontextmanager
async def serving(
    settings: Settings,
    backends: Sequence[Backend],
    listener: socket.socket,
    *,
    ready: Callable[[], str | None] = lambda: None,
) -> AsyncIterator[Service]:
    """Answers on ``listener`` inside the block. At its end open long polls are answered, requests that work have
    ``server.graceful_stop_s``, and the stores are closed. ``ready``: what is awaited, or None."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        database = await Database.open(settings.data_dir / "descant.db")
        stack.push_async_callback(database.close)
        service = Service(
            backends=backends,
            futures=SqlFutureStore(database, clock),
            checkpoints=DirCheckpointStore(settings.data_dir / "checkpoints"),
            catalogue=Catalogue(database),
            clock=clock,
            encode=encode,
            settings=settings.service,
        )
        await service.start()
        stack.push_async_callback(service.close)
        app = create_app(service, auth=Keys(settings.owners_by_key()), ready=ready, settings=settings.http)
        server = _Server(app, graceful_stop_s=settings.server.graceful_stop_s)
        task = asyncio.create_task(server.serve([listener]), name="http")
        stack.push_async_callback(_stop, server, task)
        await asyncio.wait([task, asyncio.ensure_future(server.answering.wait())], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            raise ServerError("the HTTP server ended before it answered")
        yield service


class _Server(HttpServer):
    """Leaves signals to ``run``, and says when it answers."""

    def __init__(self, app: FastAPI, *, graceful_stop_s: int):
        super().__init__(app, graceful_stop_s=graceful_stop_s)
        self.answering = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()


async def _stop(server: HttpServer, task: asyncio.Task[None]) -> None:
    server.should_exit = True
    await task


# --------------------------------------------------------------------------------------------------------------------
# What only one process may have


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, held from before the models load, so that nobody else takes the port meanwhile."""
    try:
        listener = bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} on {host} is in use; choose another with --port, or 0 for any") from None
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    with listener:
        yield listener


def url(listener: socket.socket) -> str:
    """As a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def only_server_of(data_dir: Path) -> Iterator[None]:
    """Locks the directory: two servers on one would answer each other's ids. The system unlocks when a process dies."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"cannot use {data_dir} as data_dir: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another server uses {data_dir}; stop it, or choose another directory with --set data_dir=DIR"
            ) from None
        yield
    finally:
        os.close(lock)
