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
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvloop
from starlette.applications import Starlette

from descant.ckpt.store import DirCheckpointStore
from descant.config import Settings
from descant.doctor import FAILURE_FILE, LastFailure, ReplicaReport, Report
from descant.errors import DescantError, ServerError, UserError
from descant.ports import Clock
from descant.ranks.health import Death
from descant.ranks.launch import Launcher, Link, Receive, start_processes
from descant.ranks.placement import rank_specs, share_gpus
from descant.ranks.ray_cluster import RayCluster
from descant.ranks.replica_set import ReplicaSet
from descant.ranks.settings import RankSpec
from descant.server.app import HttpServer, bind, create_app
from descant.server.auth import Keys
from descant.service.backends import Backend
from descant.service.catalogue import Catalogue
from descant.service.clock import SystemClock
from descant.service.database import Database
from descant.service.futures import SqlFutureStore
from descant.service.service import Service
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
        clock = SystemClock()
        machines = await _unless(stop, _machines(settings))
        if machines is None:
            return
        stack.push_async_callback(machines.close)
        specs = await machines.specs([base_spec(model, settings) for model in settings.models])
        keepers = [Keeper(of_base, launch=machines.start, clock=clock, data_dir=settings.data_dir) for of_base in specs]
        for keeper in keepers:
            stack.push_async_callback(keeper.close)
            if await _unless(stop, keeper.start()) is None:
                return
        backends = [keeper.backend for keeper in keepers]
        service = await stack.enter_async_context(
            serving(
                settings,
                backends,
                listener,
                ready=lambda: _awaited(keepers),
                missing=lambda: _missing(keepers),
                report=lambda: _report(keepers, settings),
            )
        )
        for keeper in keepers:
            keeper.watch(service)
        started(url(listener), settings.models, settings)
        await stop.wait()


# --------------------------------------------------------------------------------------------------------------------
# Where ranks run


class Machines(Protocol):
    """What ranks run on."""

    async def specs(self, bases: Sequence[RankSpec]) -> Sequence[Sequence[RankSpec]]:
        """For each base one spec a replica. Raises ``UserError`` for replicas that cannot be."""
        ...

    async def start(self, spec: RankSpec, receive: Receive) -> Link:
        """``Launcher``."""
        ...

    async def close(self) -> None: ...


class ThisMachine:
    def __init__(self, gpus: Sequence[str]):
        """``gpus``: as ``visible_gpus`` gives them."""
        self._gpus = gpus

    async def specs(self, bases: Sequence[RankSpec]) -> Sequence[Sequence[RankSpec]]:
        shares = share_gpus(bases, gpus=self._gpus)
        return [rank_specs(base, gpus=share, num_cores=num_cores()) for base, share in zip(bases, shares)]

    async def start(self, spec: RankSpec, receive: Receive) -> Link:
        return await start_processes(spec, receive)

    async def close(self) -> None:
        pass


async def _machines(settings: Settings) -> Machines:
    if settings.ray.address is not None:
        return await RayCluster.connect(settings.ray, data_dir=settings.data_dir)
    return ThisMachine(await asyncio.to_thread(visible_gpus, settings.rank.device))


def base_spec(model: str, settings: Settings) -> RankSpec:
    """Of any rank of a base."""
    return RankSpec(
        model=model, settings=settings.rank, losses=settings.losses, spill_dir=str(settings.data_dir / "spill")
    )


# --------------------------------------------------------------------------------------------------------------------
# Ranks that are kept alive


class Keeper:
    """One base's replicas, kept alive: after a rank's death what it held is lost, and a new rank is started, again and
    again until one serves. The other replicas go on meanwhile."""

    def __init__(self, specs: Sequence[RankSpec], *, launch: Launcher, clock: Clock, data_dir: Path):
        """One spec a replica, and what starts their ranks. The last failure is kept in ``data_dir``."""
        self._specs = specs
        self._launch = launch
        self._failure_file = data_dir / FAILURE_FILE
        self._failures: dict[int, LastFailure] = {}
        self._clock = clock
        self._replicas: ReplicaSet | None = None
        self._died = [asyncio.Event() for _ in self._specs]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> ReplicaSet:
        self._replicas = await ReplicaSet.start(
            self._specs, launch=self._launch, on_phase=self._say, on_death=lambda index: self._died[index].set()
        )
        return self._replicas

    @property
    def backend(self) -> Backend:
        assert self._replicas is not None
        return Backend(facts=self._replicas.facts, trainer=self._replicas, engine=self._replicas)

    @property
    def serving(self) -> bool:
        """Whether any replica does."""
        return self._replicas is not None and self._replicas.serving

    @property
    def missing(self) -> str | None:
        """Which replicas do not serve, in a sentence."""
        missing = range(len(self._specs)) if self._replicas is None else self._replicas.missing
        names = " and ".join(self._name(index) for index in missing)
        return f"{names} {'is' if len(missing) == 1 else 'are'} being started again" if missing else None

    def watch(self, service: Service) -> None:
        assert self._replicas is not None
        self._tasks = [
            asyncio.create_task(self._watch(index, service), name=f"keeper of {self._name(index)}")
            for index in range(len(self._specs))
        ]
        if len(self._specs) > 1:
            self._tasks.append(asyncio.create_task(self._rebalance(self._replicas)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._replicas is not None:
            await self._replicas.close()

    async def _watch(self, index: int, service: Service) -> None:
        replicas = self._replicas
        assert replicas is not None

        async def lose() -> None:
            if (death := replicas.members[index].death) is not None:
                await self._record(index, death)
            lost = replicas.bury(index)
            await service.backend_restarted(replicas.facts.name, models=lost.models, versions=lost.versions)

        async def restart() -> None:
            try:
                await replicas.restart(index, on_phase=partial(self._say, index))
            except DescantError as error:
                await self._record(index, Death(message=f"it could not be started again: {error}"))
                raise

        await keep_alive(self._died[index], lose=lose, restart=restart, name=self._name(index), clock=self._clock)

    async def _record(self, index: int, death: Death) -> None:
        """For ``descant doctor``, also one that comes when there is no server any more."""
        failure = LastFailure(at=self._clock.now(), who=self._called(index), death=death)
        self._failures[index] = failure
        try:
            await asyncio.to_thread(failure.write, self._failure_file)
        except OSError as error:
            log.warning("the last failure could not be written to %s: %s", self._failure_file, error)

    def report(self) -> list[ReplicaReport]:
        """Of each replica, once they have started. Anybody with a key may read it, so what ranks have printed is not in
        it: that may be about anybody's requests."""
        assert self._replicas is not None
        return [
            ReplicaReport(
                name=self._called(index), health=member.health, last_failure=self._failures.get(index)
            ).without_last_lines()
            for index, member in enumerate(self._replicas.members)
        ]

    async def _rebalance(self, replicas: ReplicaSet) -> None:
        while True:
            await self._clock.sleep(self._specs[0].settings.rebalance_interval_s)
            try:
                await replicas.rebalance()
            except Exception:
                log.exception("adapters could not be moved")

    def _say(self, index: int, phase: str) -> None:
        log.info("%s: %s", self._name(index), phase)

    def _name(self, index: int) -> str:
        return f"the rank of {self._called(index)}"

    def _called(self, index: int) -> str:
        return self._specs[index].label or self._specs[index].model


MAX_PAUSE_S = 60.0


async def keep_alive(
    died: asyncio.Event,
    *,
    lose: Callable[[], Awaitable[None]],
    restart: Callable[[], Awaitable[None]],
    name: str,
    clock: Clock,
) -> None:
    """For ever: after each death ``lose`` at once, so that whoever calls on what was lost is told so meanwhile, then
    ``restart`` until it succeeds. Pauses double from 1 s to a minute, from one failure to the next and from one early
    death to the next; after a life longer than a minute there is none."""
    pause_s, served_since = 0.0, clock.monotonic()
    while True:
        await died.wait()
        died.clear()
        try:
            await lose()
        except Exception:
            log.exception("the loss of %s could not be written down", name)
        pause_s = 0.0 if clock.monotonic() - served_since > MAX_PAUSE_S else _longer(pause_s)
        while True:
            await clock.sleep(pause_s)
            try:
                await restart()
                break
            except DescantError as error:
                log.error("%s; trying again", error)
                pause_s = _longer(pause_s)
        log.warning("%s serves again", name)
        served_since = clock.monotonic()


def _longer(pause_s: float) -> float:
    return min(MAX_PAUSE_S, 2 * pause_s or 1.0)


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus(device: str) -> tuple[str, ...]:
    """What each GPU that torch can use is called in ``CUDA_VISIBLE_DEVICES``; none where ``rank.device`` is something
    else. Torch knows, and is not loaded into the server: it is asked in a process of its own, if there is a driver."""
    driver = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    if device not in ("auto", "cuda") or not driver:
        return ()
    program = "import torch; print(torch.cuda.device_count())"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        count = int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("torch could not tell how many GPUs there are (%s); there will be one replica", error)
        return ()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if chosen is None else (name.strip() for name in chosen.split(","))
    return tuple(names)[:count]


def _awaited(keepers: Sequence[Keeper]) -> str | None:
    """Why not everything that is served can be asked for."""
    return next((keeper.missing for keeper in keepers if not keeper.serving), None)


def _missing(keepers: Sequence[Keeper]) -> str | None:
    """What is slower or fuller than it should be."""
    return "; ".join(keeper.missing for keeper in keepers if keeper.missing is not None) or None


def _report(keepers: Sequence[Keeper], settings: Settings) -> Mapping[str, Any]:
    """What ``descant doctor`` reads."""
    replicas = [replica for keeper in keepers for replica in keeper.report()]
    return Report(turn_timeout_s=settings.rank.turn_timeout_s, replicas=replicas).to_json()


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
    missing: Callable[[], str | None] = lambda: None,
    report: Callable[[], Mapping[str, Any]] = dict,
) -> AsyncIterator[Service]:
    """Answers on ``listener`` inside the block. At its end open long polls are answered, requests that work have
    ``server.graceful_stop_s``, and the stores are closed. ``ready``: what is awaited, or None; ``missing``: what is
    missing though requests can be served, or None; ``report``: for ``descant doctor``."""
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
        app = create_app(
            service,
            auth=Keys(settings.owners_by_key()),
            ready=ready,
            missing=missing,
            report=report,
            settings=settings.http,
        )
        server = _Server(app, graceful_stop_s=settings.server.graceful_stop_s)
        task = asyncio.create_task(server.serve([listener]), name="http")
        stack.push_async_callback(_stop, server, task)
        await asyncio.wait([task, asyncio.ensure_future(server.answering.wait())], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            raise ServerError("the HTTP server ended before it answered")
        yield service


class _Server(HttpServer):
    """Leaves signals to ``run``, and says when it answers."""

    def __init__(self, app: Starlette, *, graceful_stop_s: int):
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
