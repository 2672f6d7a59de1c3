"""The composition root: settings → ranks → stores → service → HTTP, started in that order and stopped in the other.

``run`` is what a process does. ``serving`` is the part of it that needs no rank: a service over given backends,
answering on a bound socket.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvloop
from starlette.applications import Starlette

from descant.ckpt.object_store import ObjectCheckpointStore
from descant.ckpt.remote import Remote
from descant.ckpt.store import DirCheckpointStore
from descant.config import Settings
from descant.doctor import FAILURE_FILE, LastFailure, ReplicaReport, ServerReport
from descant.errors import ServerError, UserError
from descant.pools.supervisor import ReplicaSpec, Supervisor
from descant.pools.transfer import TRANSFER
from descant.ports import CheckpointStore, Clock
from descant.ranks.health import Death, Health, TurnReport
from descant.ranks.launch import Launcher, Link, Receive, start_processes
from descant.ranks.placement import rank_specs, share_gpus
from descant.ranks.ray_cluster import RayCluster
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec
from descant.server.app import HttpServer, Report, bind, create_app, nothing_to_report
from descant.server.auth import Keys
from descant.service.backends import Backend
from descant.service.clock import SystemClock
from descant.service.database import Database, check_database
from descant.service.future_store import SqlFutureStore
from descant.service.journal import Journal
from descant.service.registry import Registry
from descant.service.service import Service
from descant.storage import PRIVATE, RESERVE, DataDirectory, private_directory
from descant.types import ForwardBackward, RequestBody
from descant.wire.decode import decode_forward_backward
from descant.wire.encode import encode

log = logging.getLogger(__name__)

DATABASE, CHECKPOINTS, JOURNAL, SNAPSHOTS, SPILL, LOCK = (
    "descant.db",
    "checkpoints",
    "journal",
    "snapshots",
    "spill",
    "lock",
)
OWN = (
    DATABASE,
    f"{DATABASE}-wal",
    f"{DATABASE}-shm",
    CHECKPOINTS,
    JOURNAL,
    SNAPSHOTS,
    SPILL,
    LOCK,
    RESERVE,
    FAILURE_FILE,
)
"""What lies in ``data_dir``."""

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
        _remove_spilled(settings.data_dir)
        listener = stack.enter_context(listen(settings.server.host, settings.server.port))
        data_dir = settings.data_dir
        await asyncio.to_thread(check_database, data_dir / DATABASE, data_dir / CHECKPOINTS)  # models take long to load
        clock = SystemClock()
        machines = await _unless(stop, _machines(settings))
        if machines is None:
            return
        stack.push_async_callback(machines.close)
        specs = await machines.specs([base_spec(model, settings) for model in settings.models])
        failures = Failures(settings.data_dir, clock)
        supervisors = [
            Supervisor(
                [replica_spec(spec, launch=machines.start) for spec in of_base],
                clock=clock,
                rebalance_interval_s=settings.parallel.rebalance_interval_s,
                record=failures.record,
                scratch=settings.data_dir,
            )
            for of_base in specs
        ]
        for supervisor in supervisors:
            stack.push_async_callback(supervisor.close)
            if await _unless(stop, supervisor.start()) is None:
                return
        service = await stack.enter_async_context(
            serving(
                settings,
                [backend_of(supervisor) for supervisor in supervisors],
                listener,
                ready=lambda: _awaited(supervisors),
                missing=lambda: _missing(supervisors),
                report=lambda: _report(supervisors, failures, settings),
            )
        )
        for supervisor in supervisors:
            supervisor.watch(partial(service.backend_restarted, supervisor.trainer.facts.name))
        gc.collect()
        gc.freeze()  # what has been imported stays: no collection that falls into a request walks through it
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
        model=model, settings=settings.replica, losses=settings.losses, spill_dir=str(settings.data_dir / SPILL)
    )


def replica_spec(spec: RankSpec, *, launch: Launcher = start_processes) -> ReplicaSpec:
    """A replica whose ranks ``launch`` starts."""
    return ReplicaSpec(
        name=spec.label or spec.model,
        roles=spec.roles,
        start=lambda on_phase, on_death: Replica.start(spec, launch=launch, on_phase=on_phase, on_death=on_death),
    )


def backend_of(supervisor: Supervisor) -> Backend:
    """Of one that has started."""
    return Backend(facts=supervisor.trainer.facts, trainer=supervisor.trainer, engine=supervisor.engine)


def _remove_spilled(data_dir: Path) -> None:
    """What ranks of an earlier server have left, also of bases and replicas that there are no more. Ranks that are
    started again remove their own."""
    for left in (data_dir / SPILL).iterdir():
        shutil.rmtree(left, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------------
# What happened to them


class Failures:
    """The last failure of each replica: for ``descant doctor``, the last of all also when there is no server any
    more."""

    def __init__(self, data_dir: Path, clock: Clock):
        self._file = data_dir / FAILURE_FILE
        self._clock = clock
        self._last: dict[str, LastFailure] = {}

    async def record(self, name: str, death: Death) -> None:
        failure = self._last[name] = LastFailure(at=self._clock.now(), who=name, death=death)
        try:
            await asyncio.to_thread(failure.write, self._file)
        except OSError as error:
            log.warning("the last failure could not be written to %s: %s", self._file, error)

    def report(self, name: str, health: Health, turns: TurnReport | None) -> ReplicaReport:
        """Any key may read it, so what ranks have printed is not in it: that may be about any owner's
        requests."""
        last_failure = self._last.get(name)
        return ReplicaReport(name=name, health=health, turns=turns, last_failure=last_failure).without_last_lines()


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


def _awaited(supervisors: Sequence[Supervisor]) -> str | None:
    """Why not everything that is served can be asked for."""
    return next((supervisor.missing for supervisor in supervisors if not supervisor.serving), None)


def _missing(supervisors: Sequence[Supervisor]) -> str | None:
    """What is slower or fuller than it should be."""
    return "; ".join(supervisor.missing for supervisor in supervisors if supervisor.missing is not None) or None


async def _report(supervisors: Sequence[Supervisor], failures: Failures, settings: Settings) -> Mapping[str, Any]:
    """What ``descant doctor`` reads."""
    of_bases = await asyncio.gather(*(supervisor.health() for supervisor in supervisors))
    replicas = [failures.report(*replica) for of_base in of_bases for replica in of_base]
    return ServerReport(turn_timeout_s=settings.rank.turn_timeout_s, replicas=replicas).to_json()


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
    report: Report = nothing_to_report,
) -> AsyncIterator[Service]:
    """Answers on ``listener`` inside the block. At its end open long polls are answered, requests that work have
    ``server.graceful_stop_s``, and the stores are closed. ``ready``: what is awaited, or None; ``missing``: what is
    missing though requests can be served, or None; ``report``: for ``descant doctor``."""
    settings.data_dir.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    clock = SystemClock()
    storage = DataDirectory(settings.data_dir)
    await asyncio.to_thread(storage.look)
    async with AsyncExitStack() as stack:
        database = await Database.open(settings.data_dir / DATABASE, storage)
        stack.push_async_callback(database.close)
        futures = SqlFutureStore(database, clock)
        service = Service(
            backends=backends,
            futures=futures,
            checkpoints=await checkpoint_store(settings),
            registry=Registry(database),
            journal=await Journal.open(database, settings.data_dir / JOURNAL),
            snapshots=await asyncio.to_thread(DirCheckpointStore, settings.data_dir / SNAPSHOTS),
            clock=clock,
            encode=encode,
            decode=_decode,
            settings=settings.service,
            quotas=settings.quota.of_disk(shutil.disk_usage(settings.data_dir).total),
            trouble=lambda: storage.trouble,
        )
        await service.start()
        stack.push_async_callback(service.close)
        watch = asyncio.create_task(_watch_storage(storage, database, futures, clock), name="watch of data_dir")
        stack.push_async_callback(_end, watch)

        async def report_of_server() -> Mapping[str, Any]:
            differ = service.recovery.num_differing
            return {**await report(), "storage": storage.trouble, "replayed_losses_differ": differ}

        app = create_app(
            service,
            auth=Keys(settings.owners_by_key()),
            ready=lambda: ready() or storage.trouble,
            missing=missing,
            report=report_of_server,
            settings=settings.http,
        )
        server = _Server(app, graceful_stop_s=settings.server.graceful_stop_s)
        task = asyncio.create_task(server.serve([listener]), name="http")
        stack.push_async_callback(_stop, server, task)
        await asyncio.wait([task, asyncio.ensure_future(server.answering.wait())], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            raise ServerError("the HTTP server ended before it answered")
        yield service


def _decode(body: RequestBody) -> ForwardBackward:
    """One that was decoded before; limits of that time may have been others."""
    return decode_forward_backward(body.data, body.encoding, max_bytes=MAX_REPEATED_BYTES)


MAX_REPEATED_BYTES = 1 << 31


async def checkpoint_store(settings: Settings) -> CheckpointStore:
    """Where ``checkpoints.url`` says. Raises ``UserError``, and ``ServerError`` for a store that cannot be used."""
    directory = settings.data_dir / CHECKPOINTS
    if settings.checkpoints.url is None:
        return await asyncio.to_thread(DirCheckpointStore, directory)
    copies = shutil.disk_usage(settings.data_dir).total // LOCAL_COPIES_SHARE
    store = ObjectCheckpointStore(Remote(settings.checkpoints.url), directory / OBJECT_STORE, max_local_bytes=copies)
    await store.start()
    return store


LOCAL_COPIES_SHARE = 4
"""Local copies of checkpoints in an object store take one part in so many of the disk."""
OBJECT_STORE = "object-store"
LOOK_INTERVAL_S = 1.0


async def _watch_storage(storage: DataDirectory, database: Database, futures: SqlFutureStore, clock: Clock) -> None:
    """For ever: sees whether there is room, and where something could not be written, tries again."""
    while True:
        await clock.sleep(LOOK_INTERVAL_S)
        try:
            await asyncio.to_thread(storage.look)
            if futures.has_unsaved:
                await futures.save_unsaved()
            elif storage.unwritten:
                await database.probe()
        except Exception:
            log.exception("the data directory could not be looked at")


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


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
    """A bound socket, held from before the models load, so that no other process takes the port meanwhile."""
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
    """Makes the directory, closes it to others, and locks it: two servers on one would answer each other's ids. The
    system unlocks when a process dies. Transfers that earlier processes left are removed."""
    try:
        left = list(data_dir.glob(f"{TRANSFER}*"))
        private_directory(data_dir, {*OWN, *(path.name for path in left)})
        private_directory(data_dir / CHECKPOINTS)
        private_directory(data_dir / JOURNAL)
        private_directory(data_dir / SNAPSHOTS)
        private_directory(data_dir / SPILL)
        for file in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", FAILURE_FILE):
            if (data_dir / file).exists():
                (data_dir / file).chmod(0o600)
        lock = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"cannot use {data_dir} as data_dir: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another server uses {data_dir}; stop it, or choose another directory with --set data_dir=DIR"
            ) from None
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        yield
    finally:
        os.close(lock)
