"""The server's side of a replica: ``Trainer``, ``Engine`` and ``Progress`` over a channel to the ranks that work.

    replica = await Replica.start(RankSpec(model="smollm2", settings=RankSettings()), on_death=...)
    future = replica.submit(command)
    …
    await replica.restart()      # after a death: a new rank under the same object; its models and versions are gone
    await replica.close()

Ranks are processes of their own, so that a crash of torch never takes the server down; no torch is imported here. A
death is noticed at once (the channel closes); a rank that hangs in a turn is ended after ``turn_timeout_s``. Either way
everything pending fails with ``RankDied``, which names the rank, how it ended and what it ran, and all ranks of the
replica are ended: what one of them held is of no use without the others.

Must be used on one event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from descant.errors import DescantError, RankDied, ServerError
from descant.ranks.health import Death, Health
from descant.ranks.launch import End, Launcher, Link, Phase, ThreadLink, start_processes
from descant.ranks.messages import (
    Cancel,
    Count,
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

__all__ = ["Phase", "RankSettings", "RankSpec", "Replica"]

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
WATCH_INTERVAL_S = 1.0
WATCH_GRACE_S = 5.0


class Replica:
    """Made by ``start`` or ``in_process``."""

    def __init__(
        self,
        name: str,
        launch: Callable[[Callable[[FromRank], None]], Awaitable[Link]],
        settings: RankSettings,
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
        self._ready: asyncio.Future[Ready] | None = None
        self._phase = "starting the process"
        self._died: RankDied | None = None
        self.death: Death | None = None
        """The last."""
        self._turn_since = 0.0
        """When what runs was first seen, by the loop's clock; now, while nothing is asked for."""
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
        launch: Launcher = start_processes,
        on_phase: Phase | None = None,
        on_death: OnDeath | None = None,
    ) -> Replica:
        """Starts the ranks and waits until they serve. Raises the ranks' own ``UserError`` for a model that cannot be
        served, ``ServerError`` naming the phase when one died or they were not ready in ``start_timeout_s``.

        ``on_phase`` is told each step of the start. ``on_death`` is called once per death, after all that was pending
        has failed; it may schedule ``restart``."""
        replica = cls(spec.label or spec.model, lambda receive: launch(spec, receive), spec.settings, on_death)
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
    def pids(self) -> Sequence[int]:
        """The processes of its ranks, by rank; none in process, or when there is none."""
        return () if self._link is None else tuple(self._link.pids)

    @property
    def health(self) -> Health:
        _, runs = (0, "") if self._link is None else self._link.board()
        return Health(
            state="serving" if self.serving else "starting" if self.alive else "down",
            pids=self.pids,
            nodes=() if self._link is None else tuple(self._link.nodes),
            device=self.facts.device,
            runs=runs,
            runs_s=asyncio.get_running_loop().time() - self._turn_since if runs else 0.0,
            num_commands=len(self._calls),
            num_samplings=len(self._samples),
        )

    async def _start(self, on_phase: Phase | None) -> None:
        loop = asyncio.get_running_loop()
        self._on_phase = on_phase
        self._ready = loop.create_future()
        self._phase = "starting the process"
        self._link = await self._launch(self._receive)
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
        """Until the ranks have ended; then everything pending fails. Ends them when one hangs in a turn."""
        ended = asyncio.create_task(link.ended())
        turn, stopped, how, rank = -1, 0, "", 0
        now = asyncio.get_running_loop().time
        self._turn_since = now()
        several = self._settings.ranks_per_replica > 1  # they have the same limit, and know who is late
        limit = self._settings.turn_timeout_s + (WATCH_GRACE_S if several else 0.0)
        while not ended.done():
            await asyncio.wait([ended], timeout=WATCH_INTERVAL_S)
            number, runs = link.board()
            if number != turn or not (runs or self._calls or self._samples):
                turn, self._turn_since = number, now()
            stopped = stopped + 1 if (held := link.stopped()) else 0
            if how or ended.done():
                continue
            if now() - self._turn_since > limit:
                how = f"was ended, having been silent for {self._settings.turn_timeout_s:g} s"
                link.kill()
            elif stopped > (3 if several else 1):  # several have a referee, which sees it sooner
                how, rank = "was ended, having been stopped by a signal", held[0]
                link.kill()
        end = ended.result()
        if how and end.verdict is None:
            end = replace(end, how=how, rank=rank if several else None)
        _, runs = link.board()
        if self._ready is not None and not self._ready.done():
            runs = self._phase
        self._bury(link, end, runs)

    def _bury(self, link: Link, end: End, runs: str) -> None:
        served = self._ready is not None and self._ready.done() and self._ready.exception() is None
        who = "the rank" if end.rank is None else f"rank {end.rank}"
        message = f"{who} of {self.name} {end.how}" + (f" while it ran: {runs}" if runs else ", idle")
        if end.verdict is not None:
            message += f"; {end.verdict}"
            log.error("%s", end.verdict.report())
        died = self._died = RankDied(message)
        self._link = None
        lines = link.last_lines()
        link.close()
        self.death = Death(message=message, last_lines=lines, verdict=end.verdict)
        if self._ready is not None and not self._ready.done():
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
        log.error("%s; its last lines:\n%s", message, lines)
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

    # ------------------------------------------------------------------------------------------------ Measured
    async def stats(self) -> Mapping[str, float]:
        return cast(Mapping[str, float], await self._call(lambda call: Count(call=call), "a count"))

    # ------------------------------------------------------------------------------------------------ Progress
    def running(self) -> str:
        return "" if self._link is None else self._link.board()[1]


OnDeath = Callable[[RankDied], None]
