"""What a request means: owners, sessions, order, futures, versions, checkpoints, restart.

The server decodes a request, calls one method of ``Service`` or of a part of it with the caller's ``principal``, and
encodes what comes back. Nothing here knows HTTP or torch. Every method that takes a ``principal`` sees only what that
principal owns: another owner's id raises the same ``NotFound`` as an id that never was.

Methods that return ``Submitted`` are the protocol's futures: what goes wrong after the request's place in order is
known goes through the future, never as an exception (a half-sent batch must not be stepped). What they raise is for
requests that have no place: unknown session or model, a malformed name.

The parts: ``training`` has the models, ``sampling`` the sampling sessions, ``promises`` the futures that both end in.
``Service`` itself does what spans them: start and stop, sessions, what is lost with a process, what is over its time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from descant.errors import DescantError, Gone, Lost, ServerError
from descant.ports import CheckpointStore, Clock, FutureStore, Measured, Progress
from descant.service.backends import Backend, Backends
from descant.service.catalogue import Catalogue, SessionRecord
from descant.service.jobs import Job, Jobs
from descant.service.presence import Client
from descant.service.promises import Promises
from descant.service.resume import Resume
from descant.service.sampling import Sampling
from descant.service.saves import Saves
from descant.service.sessions import Session, Sessions
from descant.service.settings import ServiceSettings
from descant.service.training import Model, Training
from descant.types import Answer, Encoded, ModelFacts, Version

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
"""A rank answers between two turns; one in a long turn is left out."""


class Service:
    """All state that counts is in the futures and the catalogue; what is in memory is what a trainer or an engine
    holds for us, and is gone when they are."""

    def __init__(
        self,
        *,
        backends: Sequence[Backend],
        futures: FutureStore,
        checkpoints: CheckpointStore,
        catalogue: Catalogue,
        clock: Clock,
        encode: Callable[[Answer | Exception], Encoded],
        settings: ServiceSettings | None = None,
    ):
        self._backends = Backends(backends)
        self._futures = futures
        self._catalogue = catalogue
        self._clock = clock
        self._settings = settings = settings or ServiceSettings()
        self._jobs = jobs = Jobs(futures=futures, clock=clock, encode=encode)
        self._resume = resume = Resume(catalogue=catalogue, checkpoints=checkpoints)
        self._saves = saves = Saves(checkpoints=checkpoints, catalogue=catalogue, clock=clock)
        self._sessions = sessions = Sessions(catalogue=catalogue, clock=clock)
        self.promises = Promises(
            futures=futures,
            jobs=jobs,
            sessions=sessions,
            clock=clock,
            vanish_grace_s=settings.vanish_grace_s,
            reason=self._reason,
        )
        self.sampling = Sampling(
            backends=self._backends,
            sessions=sessions,
            promises=self.promises,
            jobs=jobs,
            saves=saves,
            resume=resume,
            checkpoints=checkpoints,
            catalogue=catalogue,
            clock=clock,
            settings=settings,
        )
        self.training = Training(
            backends=self._backends,
            sessions=sessions,
            promises=self.promises,
            jobs=jobs,
            saves=saves,
            resume=resume,
            sampling=self.sampling,
            catalogue=catalogue,
            clock=clock,
            settings=settings,
        )
        self._sweeper: asyncio.Task[None] | None = None
        self._last_prune = self._last_sweep = clock.monotonic()
        self._told: dict[str, tuple[float, Mapping[str, float]]] = {}
        """By base: its engine's numbers, and when it told them."""

    # ------------------------------------------------------------------------------------------------ life
    async def start(self) -> None:
        """Recovers: models that were live become lost, futures that were pending fail naming where to resume."""
        await self._sessions.recover()
        await self._catalogue.lose(base=None, reason="the server was restarted")
        pending = await self._futures.pending()
        errors = await self._resume.interrupted(pending)
        await asyncio.gather(*(self._jobs.resolve(request_id, error) for request_id, error in errors.items()))
        if pending:
            log.info("%d requests were pending when the server ended; they have failed", len(pending))
        self._sweeper = asyncio.create_task(self._sweep_for_ever(), name="service sweeper")

    async def close(self) -> None:
        """Stops. Accepted requests that have not ended stay pending and fail at the next start. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._jobs.close()

    async def backend_restarted(
        self, base: str, *, models: Collection[str] | None = None, versions: Collection[Version] = ()
    ) -> None:
        """To be called when a base's process has died, before or after another takes its place: whatever lived in it
        is lost. Its models' pending requests fail, and so does every later one, naming where to resume.

        ``models`` None: it was the base's only process. Else the base has several, and lost are these models and the
        published ``versions``; nobody else notices."""
        reason = "the process that held it ended and was started again"
        await self._lose(self._backends.served(base), reason, models=models, versions=versions)

    def capabilities(self) -> Sequence[ModelFacts]:
        return [self._backends[base].facts for base in self._backends]

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """By base: what is open and in flight, and what its engine counts: the last that it told, if it is busy now."""
        numbers: dict[str, dict[str, float]] = {}
        for base in self._backends:
            engine = self._backends[base].engine
            numbers[base] = {
                "requests_in_flight": sum(job.base == base for job in self._jobs),
                "samples_in_flight": self.sampling.in_flight[base],
                "models": sum(model.record.base == base for model in self.training.models()),
            }
            if isinstance(engine, Measured):
                try:
                    told = await asyncio.wait_for(engine.stats(), STATS_TIMEOUT_S)
                    self._told[base] = self._clock.monotonic(), told
                except TimeoutError:
                    log.info("%s does not tell its numbers: it is busy", base)
                except DescantError as error:
                    log.info("%s does not tell its numbers: %s", base, error)
                    self._told.pop(base, None)
                if base in self._told:
                    at, told = self._told[base]
                    numbers[base] |= {**told, "told_ago_s": self._clock.monotonic() - at}
        return numbers

    # ------------------------------------------------------------------------------------------------ sessions
    async def create_session(
        self,
        principal: str,
        *,
        tags: Sequence[str],
        user_metadata: Mapping[str, Any] | None,
        sdk_version: str,
        project_id: str | None,
        display_name: str | None,
        idempotency_key: str | None,
    ) -> str:
        """A session id nobody can guess; the same one for a repeated ``idempotency_key``."""
        record = SessionRecord(
            session_id=secrets.token_hex(16),
            owner=principal,
            created_at=self._clock.now(),
            tags=tuple(tags),
            user_metadata=user_metadata,
            sdk_version=sdk_version,
            project_id=project_id,
            display_name=display_name,
        )
        return await self._sessions.add(record, idempotency_key=idempotency_key)

    async def heartbeat(self, principal: str, session_id: str) -> None:
        """Raises ``Gone`` for a session that is over, ``NotFound`` for one that never was."""
        await self._sessions.find(principal, session_id)
        self.promises.presence.sign(Client(session_id))

    async def finish_session(self, principal: str, session_id: str, *, reason: str, detail: str | None) -> None:
        """Its models are deleted, its ephemeral weights released. Finishing twice is finishing once."""
        try:
            session = await self._sessions.find(principal, session_id)
        except Gone:
            return
        await self._end_session(session, f"its client finished ({reason})")

    # ================================================================================================ losing

    async def _lose(
        self,
        base: str,
        reason: str,
        error: Exception | None = None,
        *,
        models: Collection[str] | None = None,
        versions: Collection[Version] = (),
    ) -> None:
        """What lived on this base is lost; with ``models`` only those and ``versions``. ``error``: what its pending
        requests fail with instead of a sentence per model; then its samples fail too (an engine that ended has failed
        them itself)."""
        lost = [
            model
            for model in self.training.models()
            if model.record.base == base and (models is None or model.record.model_id in models)
        ]
        for model in lost:
            model.lost = True
        jobs = self._jobs.where(
            lambda job: (
                job.base == base
                and (job.model_id is not None or error is not None)
                and (models is None or job.model_id in models)
            )
        )
        self.sampling.forget(base, None if models is None else versions)
        await self._catalogue.lose(base=base, reason=reason, models=models, versions=versions)
        errors = {model.record.model_id: await self._resume.model(model.record.model_id) for model in lost}
        for job in jobs:
            self._jobs.fail(job, error or errors.get(job.model_id or "") or Lost(reason))
        for model in lost:
            self.training.remove(model)
            model.queue.end(reason)
            if error is not None:  # the trainer is still there, and may yet come to itself
                model.queue.delete()

    # ================================================================================================ in time

    async def _end_session(self, session: Session, reason: str) -> None:
        if session.over is not None:
            return
        session.over = reason
        models = [model for model in self.training.models() if model.record.session_id == session.record.session_id]
        for model in models:
            model.queue.end(f"its session ended: {reason}")
        try:
            await self._sessions.end(session, reason)
        finally:
            for model in models:
                self.training.remove(model)
            self.sampling.end(session)
            self._jobs.spawn(self._clean_up(session, models))

    async def _clean_up(self, session: Session, models: Sequence[Model]) -> None:
        """When what they were asked before has ended (a save is still being written), models and versions go."""
        ids = {model.record.model_id for model in models}
        tasks = [job.task for job in self._jobs.where(lambda job: job.model_id in ids) if job.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        for model in models:
            if not model.lost:
                model.queue.delete()
        await self.sampling.release(session)

    async def _sweep_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self._settings.sweep_interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Ends whatever is over its time. Called by itself all the time; one part's failure stops no other."""
        now = self._clock.monotonic()
        self.training.expire()
        # After a pause of the process, who has come for them may not have been heard yet.
        if now - self._last_sweep <= 2 * self._settings.sweep_interval_s:
            self.promises.give_up_unclaimed(self._settings.unclaimed_timeout_s)
        self._last_sweep = now
        for session in self._sessions:
            session_id = session.record.session_id
            if self.promises.presence.polls(session_id):
                session.last_seen = now
            idle_s = now - session.last_seen
            if idle_s > self._settings.vanish_timeout_s:
                self.promises.give_up(session_id, f"nothing was heard of its client for {idle_s:.0f} s")
            if idle_s > self._settings.session_timeout_s:
                await _logged(self._end_session(session, f"nothing was heard of it for {idle_s:.0f} s"))
        for base in self._backends:
            idle_s = self._jobs.idle_s(base)
            if idle_s > self._settings.stall_timeout_s:
                why = f"{base} has ended no request in {idle_s:.0f} s and was given up"
                await _logged(self._lose(base, why, ServerError(why)))
        if now - self._last_prune >= self._settings.prune_interval_s:
            self._last_prune = now
            await _logged(self._futures.prune(finished_before=self._clock.now() - self._settings.keep_finished_s))
            await _logged(self._saves.delete_expired())

    def _reason(self, job: Job) -> str:
        model = self.training.get(job.model_id) if job.model_id is not None else None
        waits_for_id = model.queue.reason(job) if model is not None else None
        if waits_for_id is not None:
            return waits_for_id
        trainer = self._backends[job.base].trainer
        running = trainer.running() if isinstance(trainer, Progress) else ""
        return self._jobs.reason(job) + (f"; now runs {running}" if running else "")


# --------------------------------------------------------------------------------------------------------------------


async def _logged(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:
        log.exception("a part of the service's sweep failed")
