"""The server's side of a replica: ``Trainer``, ``Engine`` and ``Progress`` over a channel to the ranks that work.

    replica = await Replica.start(RankSpec(model="smollm2", settings=ReplicaSettings()), on_death=...)
    future = replica.submit(command)
    …
    await replica.restart()      # after a death: a new rank under the same object; its models and versions are gone
    await replica.close()

Ranks are processes of their own, so that a crash of torch never takes the server down; no torch is imported here. A
death is noticed at once (the channel closes); a rank that hangs in a turn is ended after ``turn_timeout_s``. Either way
everything pending fails with ``RankDied``, which names the rank, how it ended and what it ran, and all ranks of the
replica are ended: what one of them held is of no use without the others.

With ``on_death``, which starts the next rank, what needs nothing of the dead one is deferred until that serves: new
models and what follows on them, publications from files, sample requests to the base. It waits for ``start_timeout_s``,
over as many starts as it takes.

Must be used on one event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from descant.errors import DescantError, Overloaded, RankDied, ServerError
from descant.ranks.health import Death, Health, TurnReport
from descant.ranks.launch import Launcher, Link, Phase, RanksExit, ThreadLink, start_processes
from descant.ranks.ops import (
    START,
    Cancel,
    Drop,
    Operation,
    Publish,
    RankRequest,
    RankResponse,
    Release,
    ReplicaInfo,
    Sample,
    Save,
    Stats,
    Stop,
    Turns,
)
from descant.ranks.settings import RankSpec, ReplicaSettings
from descant.types import (
    Command,
    CreateModel,
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
    from descant.ranks.executor import Executor

__all__ = ["Phase", "RankSpec", "Replica", "ReplicaSettings"]

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
WATCH_INTERVAL_S = 1.0
WATCH_GRACE_S = 5.0
TURNS_TIMEOUT_S = 2.0
"""How long a turn may go on before its replica is reported without what its last turns took."""
RETRY_AFTER_S = 0.2
"""The ``Retry-After`` of what is not here yet while the rank starts."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """A request that is not answered to its end: ``future`` has its one response, or ``stream`` all of them.
    ``expiry``: while it is deferred until a rank serves, the timer that fails it."""

    request: RankRequest
    future: asyncio.Future[Any] | None = None
    stream: asyncio.Queue[RankResponse] | None = None
    expiry: asyncio.TimerHandle | None = None

    def take(self, response: RankResponse) -> None:
        if self.stream is not None:
            self.stream.put_nowait(response)
        elif self.future is not None and not self.future.done():
            if response.error is None:
                self.future.set_result(response.result)
            else:
                self.future.set_exception(response.error)

    def fail(self, error: DescantError) -> None:
        self.take(RankResponse(id=self.request.id, error=error))


class Replica:
    """Made by ``start`` or ``in_process``."""

    def __init__(
        self,
        name: str,
        launch: Callable[[Callable[[RankResponse], None]], Awaitable[Link]],
        settings: ReplicaSettings,
        on_death: OnDeath | None,
    ):
        self.name = name
        self.facts: ModelFacts
        self.capabilities: EngineCapabilities
        self._launch = launch
        self._settings = settings
        self._on_death = on_death
        self._link: Link | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[ReplicaInfo] | None = None
        self._phase = "starting the process"
        self._died: RankDied | None = None
        self.death: Death | None = None
        """The last."""
        self._turn_since = 0.0
        """When what runs was first seen, by the loop's clock; now, while nothing is asked for."""
        self._closing = False
        self._num_served = 0
        self._num_requests = START
        self._pending: dict[int, _Pending] = {}
        self._sampled: set[str] = set()
        """Ids of the sampling requests among them."""

    # ------------------------------------------------------------------------------------------------ life
    @classmethod
    async def start(
        cls,
        spec: RankSpec,
        *,
        launch: Launcher = start_processes,
        on_phase: Phase | None = None,
        on_death: OnDeath | None = None,
    ) -> Replica:
        """Starts the ranks and waits until they serve. Raises the ranks' own ``UserError`` for a model that cannot be
        served, ``ServerError`` naming the phase when one died or they were not ready in ``start_timeout_s``.

        ``on_phase`` is called with each step of the start. ``on_death`` is called once per death, after all that was
        pending has failed; it has to see to a ``restart``."""
        replica = cls(spec.label or spec.model, lambda receive: launch(spec, receive), spec.settings, on_death)
        await replica._start(on_phase)
        return replica

    @classmethod
    async def in_process(
        cls,
        build: Callable[[Phase], Executor],
        settings: ReplicaSettings | None = None,
        *,
        on_death: OnDeath | None = None,
    ) -> Replica:
        """The same turn loop in a thread of this process, for tests and debugging. ``build`` runs in that thread."""
        settings = settings or ReplicaSettings()
        replica = cls("in process", lambda receive: ThreadLink.start(build, settings, receive), settings, on_death)
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
        for deferred in self._deferred():
            self._fail_deferred(deferred, "the server stops")
        link, watch = self._link, self._watch
        if link is None or watch is None:
            return
        with contextlib.suppress(OSError):
            link.send(RankRequest(id=0, op=Stop()))
        _, pending = await asyncio.wait([watch], timeout=CLOSE_TIMEOUT_S)
        if pending:
            link.kill()
            await asyncio.wait([watch], timeout=CLOSE_TIMEOUT_S)

    @property
    def num_served(self) -> int:
        """Commands done and sample requests ended since the last start."""
        return self._num_served

    @property
    def alive(self) -> bool:
        return self._link is not None and self._died is None

    @property
    def serving(self) -> bool:
        """Alive, and past its start."""
        return self.alive and self._ready is not None and self._ready.done() and self._ready.exception() is None

    @property
    def pids(self) -> Sequence[int]:
        """The processes of its ranks, by rank; none in process, or when there is none."""
        return () if self._link is None else tuple(self._link.pids)

    @property
    def health(self) -> Health:
        _, runs = (0, "") if self._link is None else self._link.turn_status()
        stopped = self._link is not None and bool(self._link.stopped())
        return Health(
            state="stopped" if stopped else "serving" if self.serving else "starting" if self.alive else "down",
            pids=self.pids,
            nodes=() if self._link is None else tuple(self._link.nodes),
            device=self.facts.device,
            runs=runs,
            runs_s=asyncio.get_running_loop().time() - self._turn_since if runs else 0.0,
            num_commands=len(self._pending) - len(self._sampled),
            num_sample_requests=len(self._sampled),
        )

    async def _start(self, on_phase: Phase | None) -> None:
        loop = asyncio.get_running_loop()
        self._on_phase = on_phase
        self._ready = loop.create_future()
        self._phase = "starting the process"
        self._link = await self._launch(self._receive)
        self._num_served = 0
        self._died = None
        self._watch = asyncio.create_task(self._watch_link(self._link))
        try:
            info = await asyncio.wait_for(asyncio.shield(self._ready), self._settings.rank.start_timeout_s)
        except TimeoutError:
            phase = self._phase
            await self._abort_start()
            raise ServerError(
                f"the rank of {self.name} was not ready after {self._settings.rank.start_timeout_s:g} s: it was {phase}"
            ) from None
        except BaseException:
            await self._abort_start()
            raise
        self.facts, self.capabilities = info.facts, info.capabilities

    async def _abort_start(self) -> None:
        if self._link is not None and self._watch is not None:
            self._link.kill()
            await asyncio.wait([self._watch], timeout=CLOSE_TIMEOUT_S)

    async def _watch_link(self, link: Link) -> None:
        """Until the ranks have ended; then everything pending fails. Ends them when one hangs in a turn."""
        ended = asyncio.create_task(link.ended())
        turn, how, rank = -1, "", 0
        waited_since: float | None = None
        """For a rank that is stopped."""
        now = asyncio.get_running_loop().time
        self._turn_since = now()
        several = (
            self._settings.parallel.data_parallel_size > 1
        )  # they have the same limit, and report which rank is late
        limit = self._settings.rank.turn_timeout_s + (WATCH_GRACE_S if several else 0.0)
        grace = self._settings.rank.stopped_grace_s + (WATCH_GRACE_S if several else 0.0)
        while not ended.done():
            await asyncio.wait([ended], timeout=WATCH_INTERVAL_S)
            number, runs = link.turn_status()
            if number != turn or not self.serving or not (runs or self._pending):
                turn, self._turn_since = number, now()
            waits = several or not self.serving or self._pending
            stopped = link.stopped()
            waited_since = (waited_since or now()) if stopped and waits else None
            if how or ended.done():
                continue
            if now() - self._turn_since > limit:
                how = f"was ended, having been silent for {self._settings.rank.turn_timeout_s:g} s"
                link.kill()
            elif waited_since is not None and now() - waited_since > grace:
                how, rank = "was ended, having been stopped by a signal", stopped[0]
                link.kill()
        end = ended.result()
        if how and end.failure is None:
            end = replace(end, how=how, rank=rank if several else None)
        _, runs = link.turn_status()
        if self._ready is not None and not self._ready.done():
            runs = self._phase
        self._on_exit(link, end, runs)

    def _on_exit(self, link: Link, end: RanksExit, runs: str) -> None:
        served = self.serving
        who = "the rank" if end.rank is None else f"rank {end.rank}"
        message = f"{who} of {self.name} {end.how}" + (f" while it ran: {runs}" if runs else ", idle")
        if end.failure is not None:
            message += f"; {end.failure}"
            log.error("%s", end.failure.report())
        died = self._died = RankDied(message)
        self._link = None
        self._phase = "waiting to be started"
        lines = link.last_lines()
        link.close()
        self.death = Death(message=message, last_lines=lines, failure=end.failure)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(ServerError(message + (f"; its last lines:\n{lines}" if lines else "")))
            self._ready.exception()  # its waiter may be gone
        for pending in [pending for pending in self._pending.values() if pending.expiry is None]:
            del self._pending[pending.request.id]
            pending.fail(RankDied(message))
        if self._closing:
            return
        log.error("%s; its last lines:\n%s", message, lines)
        if self._on_death is not None and served:
            self._on_death(died)

    # ------------------------------------------------------------------------------------------------ requests
    def call(self, op: Command | Operation[Any]) -> asyncio.Future[Any]:
        """Of an operation that is answered once. The future ends by itself, with the rank at the latest."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._submit(_Pending(request=self._request(op), future=future))
        return future

    def _request(self, op: Command | Operation[Any]) -> RankRequest:
        self._num_requests += 1
        return RankRequest(id=self._num_requests, op=op)

    def _submit(self, pending: _Pending) -> None:
        """Sends it to the rank, defers it until one serves, or fails it."""
        request, op = pending.request, pending.request.op
        try:
            if self.serving:
                self._send(request)
            else:
                self._defer(pending)
        except DescantError as error:
            pending.fail(error)
        except Exception as error:
            log.exception("a request could not be sent")
            name = type(op).__name__
            pending.fail(ServerError(f"{name} could not be sent to the rank: {type(error).__name__}"))
        else:
            self._pending[request.id] = pending

    def _send(self, request: RankRequest) -> None:
        assert self._link is not None
        self._link.send(request)

    def _defer(self, pending: _Pending) -> None:
        if self._on_death is None or self._closing or not self._can_defer(pending.request.op):
            raise RankDied(str(self._died or f"the rank of {self.name} is not running"))
        limit = self._settings.rank.start_timeout_s
        why = f"it was waited for for {limit:g} s, and does not serve again"
        loop = asyncio.get_running_loop()
        pending.expiry = loop.call_later(limit, self._fail_deferred, pending, why)

    def _deferred(self) -> list[_Pending]:
        return [pending for pending in self._pending.values() if pending.expiry is not None]

    def _can_defer(self, op: Command | Operation[Any]) -> bool:
        """Whether it needs nothing of the rank that is gone. Raises ``Overloaded`` where that is only to be asked for
        again first: a version whose weights are in a file."""
        match op:
            case CreateModel():
                return True
            case Publish(ref=ref):
                return ref.directory is not None
            case Sample(request=request):
                if request.version is not None:
                    raise Overloaded(f"the rank of {self.name} is being started again", RETRY_AFTER_S)
                return True
            case Operation():
                return False
            case _:
                deferred = (pending.request.op for pending in self._deferred())
                return any(isinstance(c, CreateModel) and c.model_id == op.model_id for c in deferred)

    def _send_deferred(self) -> None:
        """To the rank that serves now, in order."""
        for deferred in self._deferred():
            if deferred.expiry is not None:
                deferred.expiry.cancel()
                deferred.expiry = None
            self._send(deferred.request)

    def _fail_deferred(self, pending: _Pending, why: str) -> None:
        if pending.expiry is not None:
            pending.expiry.cancel()
        self._pending.pop(pending.request.id, None)
        pending.fail(RankDied(f"{self._died or f'the rank of {self.name} has ended'}; {why}"))

    def _receive(self, response: RankResponse) -> None:
        if response.id == START:
            self._on_start_response(response)
            return
        pending = self._pending.get(response.id)
        if response.last:
            self._num_served += response.error is None or (pending is not None and pending.stream is not None)
            self._pending.pop(response.id, None)
        if pending is not None:
            pending.take(response)

    def _on_start_response(self, response: RankResponse) -> None:
        if not response.last:
            self._phase = response.result
            if self._on_phase is not None:
                self._on_phase(response.result)
        elif self._ready is not None and not self._ready.done():
            if response.error is not None:
                self._ready.set_exception(response.error)
            else:
                self._ready.set_result(response.result)
                self._send_deferred()

    # ------------------------------------------------------------------------------------------------ Trainer
    def submit(self, command: Command) -> asyncio.Future[Result]:
        return self.call(command)

    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        return cast(Manifest, await self.call(Save(ref=ref, dest=dest)))

    async def drop(self, ref: SnapshotRef) -> None:
        if self.serving:  # a dead rank holds nothing
            await self.call(Drop(ref=ref))

    # ------------------------------------------------------------------------------------------------ Engine
    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        if request.request_id in self._sampled:
            raise ServerError(f"request {request.request_id!r} runs already")
        responses: asyncio.Queue[RankResponse] = asyncio.Queue()
        pending = _Pending(request=self._request(Sample(request=request)), stream=responses)
        self._sampled.add(request.request_id)
        try:
            self._submit(pending)
            while True:
                response = await responses.get()  # ends with the rank at the latest, and that within a turn's limit
                if response.error is not None:
                    raise response.error
                if response.last:
                    return
                yield response.result
        finally:
            self._sampled.discard(request.request_id)
            if pending.expiry is not None:
                pending.expiry.cancel()
            if self._pending.pop(pending.request.id, None) is not None and self.serving:
                self._send(RankRequest(id=0, op=Cancel(request_id=request.request_id)))

    async def publish(self, ref: SnapshotRef) -> None:
        await self.call(Publish(ref=ref))

    async def release(self, version: Version) -> None:
        if self.serving:
            await self.call(Release(version=version))

    async def cancel(self, request_id: str) -> None:
        if self.serving and request_id in self._sampled:
            self._send(RankRequest(id=0, op=Cancel(request_id=request_id)))

    # ------------------------------------------------------------------------------------------------ Measured
    async def stats(self) -> Mapping[str, float]:
        return cast(Mapping[str, float], await self.call(Stats()))

    async def turns(self) -> TurnReport | None:
        """What its last turns took. None: it does not serve, or is too busy to say."""
        if not self.serving:
            return None
        try:
            async with asyncio.timeout(TURNS_TIMEOUT_S):
                return cast(TurnReport, await self.call(Turns()))
        except (TimeoutError, RankDied):
            return None

    # ------------------------------------------------------------------------------------------------ Progress
    def running(self) -> str:
        if self.serving:
            assert self._link is not None
            return self._link.turn_status()[1]
        return f"the start of a rank in place of one that ended: {self._phase}"


OnDeath = Callable[[RankDied], None]
