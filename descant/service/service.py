"""What a request means: owners, sessions, order, futures, versions, checkpoints, restart.

The server decodes a request, calls one method of ``Service`` or of a part of it with the caller's ``principal``, and
encodes what comes back. Nothing here knows HTTP or torch. Every method that takes a ``principal`` sees only what that
principal owns: another owner's id raises the same ``NotFound`` as an id that never was.

Methods that return ``Submitted`` are the protocol's futures: what goes wrong after the request's place in order is
known goes through the future, never as an exception (a half-sent batch must not be stepped). What they raise is for
requests that have no place: unknown session or model, a malformed name.

The parts: ``creation`` makes models, ``training`` trains them, ``sampling`` has the sampling sessions, ``futures`` the
futures that all of these end in.
``Service`` itself does what spans them: start and stop, sessions, what is lost with a process, what is over its time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from descant.errors import CannotStore, DescantError, Gone, ServerError
from descant.ports import CheckpointStore, Clock, FutureStore, Progress
from descant.service.automatic_snapshots import AutomaticSnapshots
from descant.service.backends import Backend, Backends
from descant.service.command_queue import result_of
from descant.service.futures import FutureService
from descant.service.jobs import Job, Jobs
from descant.service.journal import Journal
from descant.service.liveness import Action, Client, Lapse, Liveness, policy
from descant.service.model_creation import ModelCreation
from descant.service.models import LiveModel, Models
from descant.service.quotas import Quotas, check_labels, check_metadata
from descant.service.recovery import Recovery
from descant.service.registry import Registry, SessionRecord
from descant.service.restart import Restart
from descant.service.resume import Resume
from descant.service.sampling import Sampling
from descant.service.saves import Saves
from descant.service.sessions import Session, Sessions
from descant.service.settings import QuotaSettings, ServiceSettings
from descant.service.training import Training
from descant.types import (
    Answer,
    CheckpointName,
    Encoded,
    ForwardBackward,
    ModelFacts,
    RequestBody,
    Snapshot,
    SnapshotRef,
    Version,
)

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
"""A rank answers between two turns; one in a long turn is left out."""


SILENT_NAME = "when-silent"
"""Of the checkpoint that a model of a client that went silent leaves."""


class Service:
    """All state that counts is in the futures and the registry; what is in memory is what a trainer or an engine
    holds for us, and is gone when they are."""

    def __init__(
        self,
        *,
        backends: Sequence[Backend],
        futures: FutureStore,
        checkpoints: CheckpointStore,
        registry: Registry,
        journal: Journal,
        snapshots: CheckpointStore,
        clock: Clock,
        encode: Callable[[Answer | Exception], Encoded],
        decode: Callable[[RequestBody], ForwardBackward],
        settings: ServiceSettings | None = None,
        quotas: QuotaSettings | None = None,
        trouble: Callable[[], str | None] = lambda: None,
        stats_timeout_s: float = STATS_TIMEOUT_S,
    ):
        """``snapshots``: for what models are made from again after a death; no client can name what is in it.
        ``decode``: a forward or backward from a body that was decoded before. ``trouble``: why the data directory
        takes nothing new, or None (``DataDirectory.trouble``)."""
        self._trouble = trouble
        self._stats_timeout_s = stats_timeout_s
        self._backends = Backends(backends)
        self._future_store = futures
        self._registry = registry
        self._clock = clock
        self._settings = settings = settings or ServiceSettings()
        self._quotas = checks = Quotas(quotas or QuotaSettings())
        self._jobs = jobs = Jobs(futures=futures, clock=clock, encode=encode)
        self._resume = resume = Resume(registry=registry, checkpoints=checkpoints)
        self._saves = saves = Saves(
            checkpoints=checkpoints, registry=registry, clock=clock, quotas=checks, trouble=trouble
        )
        self._liveness = liveness = Liveness(
            clock=clock,
            rules=policy(settings.session_timeout_s),
            spawn=jobs.spawn,
            act=self._act_on,
            max_pause_s=2 * settings.sweep_interval_s,
        )
        self._sessions = sessions = Sessions(registry=registry, clock=clock, liveness=liveness, quotas=checks)
        self.futures = FutureService(store=futures, jobs=jobs, liveness=liveness, clock=clock, reason=self._reason)
        self.sampling = Sampling(
            backends=self._backends,
            sessions=sessions,
            futures=self.futures,
            jobs=jobs,
            liveness=liveness,
            saves=saves,
            resume=resume,
            checkpoints=checkpoints,
            registry=registry,
            clock=clock,
            settings=settings,
            quotas=checks,
        )
        self._models = models = Models(backends=self._backends, registry=registry, quotas=checks)
        self._journal = journal
        self._snapshots = automatic = AutomaticSnapshots(
            store=snapshots,
            journal=journal,
            jobs=jobs,
            clock=clock,
            settings=settings,
            in_use=self.sampling.in_use,
            trouble=trouble,
        )
        self.recovery = recovery = Recovery(
            backends=self._backends,
            models=models,
            journal=journal,
            snapshots=automatic,
            jobs=jobs,
            clock=clock,
            lose=self._lose_model,
            lose_versions=self._lose_versions,
        )
        self.creation = ModelCreation(
            backends=self._backends,
            sessions=sessions,
            models=models,
            futures=self.futures,
            jobs=jobs,
            saves=saves,
            registry=registry,
            journal=journal,
            watcher=recovery,
            clock=clock,
            settings=settings,
        )
        self.training = Training(
            backends=self._backends,
            models=models,
            futures=self.futures,
            jobs=jobs,
            saves=saves,
            resume=resume,
            sampling=self.sampling,
            journal=journal,
            quotas=checks,
            decode=decode,
            settings=settings,
        )
        recovery.training, recovery.creation, recovery.sampling = self.training, self.creation, self.sampling
        self._restart = Restart(
            backends=self._backends,
            sessions=sessions,
            models=models,
            registry=registry,
            journal=journal,
            snapshots=automatic,
            recovery=recovery,
            sampling=self.sampling,
            jobs=jobs,
            clock=clock,
            settings=settings,
        )
        self._unwritten: list[tuple[Callable[[], Awaitable[None]], Sequence[LiveModel]]] = []
        """Losses that the registry does not know of yet, and the models, which stay in memory so long."""
        self._sweeper: asyncio.Task[None] | None = None
        self._sweeping = asyncio.Lock()
        self._last_prune = clock.monotonic()
        self._last_stats: dict[str, tuple[float, Mapping[str, float]]] = {}
        """By base: its trainer's and engine's numbers, added up, and when they reported them."""

    # ------------------------------------------------------------------------------------------------ life
    async def start(self) -> None:
        """Goes on where an earlier server has ended: its models are made again in the background, and what has no
        answer gets it then. Sampling requests are sent again by their clients. What cannot go on fails."""
        await self._sessions.recover()
        await self._saves.recover()
        pending = {state.request_id: state for state in await self._future_store.pending()}
        going_on = await self._restart.run(pending.keys())
        samples = {request_id for request_id, state in pending.items() if state.key.kind == "sample"}
        self.futures.interrupted(samples)
        rest = [state for request_id, state in pending.items() if request_id not in going_on | samples]
        errors = await self._resume.interrupted(rest)
        await asyncio.gather(*(self._jobs.resolve(request_id, error) for request_id, error in errors.items()))
        self._sweeper = asyncio.create_task(self._sweep_for_ever(), name="service sweeper")

    async def close(self) -> None:
        """Stops. Accepted requests that have not ended stay pending and go on at the next start. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._jobs.close()

    async def backend_restarted(
        self, base: str, *, models: Collection[str] | None = None, versions: Collection[Version] | None = None
    ) -> None:
        """To be called when a base's process has died, before or after another takes its place: what lived in it is
        made again. Its models' requests wait for that.

        ``models`` None: it was the base's only process. Else the base has several, and gone are these models and the
        published ``versions``; other requests go on."""
        base = self._backends.served(base)
        gone = [
            model
            for model in (*self._models.of_base(base), *self._models.ending.values())
            if model.record.base == base and not model.lost and (models is None or model.record.model_id in models)
        ]
        if versions is None:
            versions = self.sampling.published(base) if models is None else ()
        gone += self._with_versions(gone, versions)
        for model in gone:
            model.queue.hold()
        lost = self._interrupt_versions(base, gone, versions)
        for model in gone:
            self.recovery.interrupted(model)
        await self._lose_versions(base, lost)

    def _with_versions(self, gone: Sequence[LiveModel], versions: Collection[Version]) -> list[LiveModel]:
        """Models that are there, and of which unnamed versions in use are not: to publish these again a model is made
        again too."""
        known = {model.record.model_id for model in gone}
        unnamed = [version for version in versions if self.sampling.is_unnamed(version)]
        found = {version.model_id: self._models.get(version.model_id) for version in unnamed}
        return [
            model
            for model_id, model in found.items()
            if model is not None
            and not model.lost
            and model_id not in known
            and any(self._snapshots.can_repeat(model, v.number) for v in unnamed if v.model_id == model_id)
        ]

    def _interrupt_versions(
        self, base: str, models: Sequence[LiveModel], versions: Collection[Version]
    ) -> list[Version]:
        """Which of these are lost: the others are published again by the recovery of their models, or when they are
        asked for, from a file."""
        recovering = {model.record.model_id: model for model in models}
        lost = []
        for version in versions:
            model = recovering.get(version.model_id)
            if (
                model is not None
                and self.sampling.is_unnamed(version)
                and self._snapshots.can_repeat(model, version.number)
            ):
                self.sampling.interrupt(base, version)
            else:
                lost.append(version)
        return lost

    def capabilities(self) -> Sequence[ModelFacts]:
        return [self._backends[base].facts for base in self._backends]

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """By base: what is open and in flight, and what its trainer and engine count: the last that they reported, if
        one is busy now."""
        numbers: dict[str, dict[str, float]] = {}
        for base in self._backends:
            measured = self._backends[base].measured
            num_unnamed, unnamed_bytes = self.sampling.num_unnamed(base)
            numbers[base] = {
                "requests_in_flight": self._jobs.num_of_base(base),
                "samples_in_flight": self.sampling.admission[base].held.requests,
                "models": self._models.num_of_base(base),
                "training_bytes": self.training.admission[base].num_bytes,
                "training_waiting_bytes": self.training.admission[base].waiting_bytes,
                "unnamed_versions": num_unnamed,
                "unnamed_version_bytes": unnamed_bytes,
                "journal_bytes": self._journal.num_bytes_of_base(base),
                "snapshots_taken": self._snapshots.num_taken[base],
                **self.recovery.stats(base),
            }
            if measured:
                try:
                    pending = asyncio.gather(*(part.stats() for part in measured))
                    total: Counter[str] = Counter()
                    for one in await asyncio.wait_for(pending, self._stats_timeout_s):
                        total.update(one)
                    self._last_stats[base] = self._clock.monotonic(), total
                except TimeoutError:
                    log.info("%s does not report its numbers: it is busy", base)
                except DescantError as error:
                    log.info("%s does not report its numbers: %s", base, error)
                    self._last_stats.pop(base, None)
                if base in self._last_stats:
                    at, last = self._last_stats[base]
                    numbers[base] |= {**last, "stats_age_seconds": self._clock.monotonic() - at}
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
        """A session id that cannot be guessed; the same one for a repeated ``idempotency_key``. Raises ``UserError``
        for what is longer than it may be, and ``QuotaExceeded``."""
        check_metadata(tags=list(tags), user_metadata=user_metadata)
        check_labels(
            sdk_version=sdk_version, project_id=project_id, display_name=display_name, idempotency_key=idempotency_key
        )
        self._saves.check_room()
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
        self._liveness.heard_from(Client(session_id))

    async def finish_session(self, principal: str, session_id: str, *, reason: str, detail: str | None) -> None:
        """Its models are deleted, its ephemeral weights released. Finishing twice is finishing once."""
        check_labels(**{"reason.type": reason, "detail": detail})
        try:
            session = await self._sessions.find(principal, session_id)
        except Gone:
            return
        await self._end_session(session, f"its client finished ({reason})")

    # ================================================================================================ losing

    async def _lose_versions(self, base: str, versions: Collection[Version]) -> None:
        """They are published no more, and those without a file are lost."""
        if not versions:
            return
        self.sampling.forget(base, versions)
        await self._write_loss([], versions, "the process that held it ended")

    async def _lose_model(self, model: LiveModel, reason: str) -> None:
        await self._lose([model], reason)

    async def _lose(self, lost: Sequence[LiveModel], reason: str, error: Exception | None = None) -> None:
        """These models are lost. ``error``: what their pending requests fail with instead of a sentence per model."""
        for model in lost:
            model.lost = True
        ids = [model.record.model_id for model in lost]
        jobs = [job for model_id in ids for job in self._jobs.of_model(model_id)]
        versions = [version for model_id in ids for version in self.sampling.give_up(model_id)]
        await self._write_loss(lost, versions, reason)
        errors = {model_id: await self._resume.model(model_id) for model_id in ids}
        for job in jobs:
            self._jobs.fail(job, error or errors[job.model_id or ""])
        for model in lost:
            model.queue.end(reason)
            model.queue.delete()  # the trainer may have it, or yet come to itself
        await _logged(self.recovery.forget(lost))

    async def _give_up(self, base: str, why: str) -> None:
        """A base that ends nothing: with its models' requests its samples fail."""
        samples = [job for job in self._jobs.of_base(base) if job.model_id is None]
        self.sampling.forget(base, None)
        await self._lose(self._models.of_base(base), why, ServerError(why))
        for job in samples:
            self._jobs.fail(job, ServerError(why))

    async def _write_loss(self, lost: Sequence[LiveModel], versions: Collection[Version], reason: str) -> None:
        ids = [model.record.model_id for model in lost]
        loss = partial(self._registry.lose, models=ids, versions=versions, reason=reason)
        try:
            await loss()
        except CannotStore:  # those that wait get their answers all the same
            self._unwritten.append((loss, lost))
        else:
            for model in lost:
                self._models.remove(model)

    async def _write_losses(self) -> None:
        """Those that could not be written down when they came about."""
        while self._unwritten:
            loss, lost = self._unwritten[0]
            try:
                await loss()
            except CannotStore:
                return
            del self._unwritten[0]
            for model in lost:
                self._models.remove(model)

    # ================================================================================================ in time

    async def _end_session(self, session: Session, reason: str, *, keep: bool = False) -> None:
        """``keep``: what its models have learnt, in checkpoints for a while."""
        if session.over is not None:
            return
        session.over = reason
        models = self._models.of_session(session.record.session_id)
        for model in models:
            model.queue.end(f"its session ended: {reason}")
        try:
            await self._sessions.end(session, reason)
        finally:
            for model in models:
                self._models.remove(model)
                self._models.ending[model.record.model_id] = model
            self.sampling.end(session)
            self._jobs.spawn(self._clean_up(session, models, keep=keep))

    async def _clean_up(self, session: Session, models: Sequence[LiveModel], *, keep: bool) -> None:
        """When what they were asked before has ended (a save is still being written), models and versions go."""
        jobs = [job for model in models for job in self._jobs.of_model(model.record.model_id)]
        tasks = [job.task for job in jobs if job.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        if keep and session.over is not None:
            await asyncio.gather(*(_logged(self._keep(model, session.over)) for model in models))
        for model in models:
            self._models.ending.pop(model.record.model_id, None)
            if not model.lost:
                model.queue.delete()
        await self.recovery.forget(models)
        await self.sampling.release(session)

    async def _keep(self, model: LiveModel, reason: str) -> None:
        """What a model has learnt, as a checkpoint of its owner's that ends by itself. Its calls name it."""
        record, seq_id, keep_s = model.record, model.queue.next_seq_id, int(self._settings.keep_silent_s)
        if seq_id == 1 or not keep_s:  # nothing was asked of it
            return
        await self.recovery.ended(model, timeout_s=self._settings.stall_timeout_s)
        if model.lost:
            return
        command = Snapshot(model_id=record.model_id, seq_id=seq_id, kind="training")
        ref = await result_of(model.backend.trainer.submit(command), SnapshotRef)
        checkpoint = await self._saves.save(
            ref,
            CheckpointName(model_id=record.model_id, type="weights", name=SILENT_NAME),
            trainer=model.backend.trainer,
            owner=record.owner,
            base=record.base,
            overwrite=True,
            ttl_seconds=keep_s,
        )
        days = keep_s / 86400
        kept = f"its weights and optimiser state are kept for {days:g} days as {checkpoint.name.uri}"
        await self._registry.set_ended_reason(record.model_id, f"{reason}; {kept}")

    async def _sweep_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self._settings.sweep_interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Ends whatever is over its time. Called by itself all the time; one part's failure stops no other."""
        async with self._sweeping:
            await self._sweep()

    async def _sweep(self) -> None:
        now = self._clock.monotonic()
        await _logged(self._write_losses())
        self._models.expire()
        await _logged(self._liveness.sweep())
        await _logged(self.sampling.release_outdated())
        for base in self._backends:
            idle_s = self._jobs.idle_s(base)
            if idle_s > self._settings.stall_timeout_s:
                why = f"{base} has ended no request in {idle_s:.0f} s and was abandoned"
                await _logged(self._give_up(base, why))
        if now - self._last_prune >= self._settings.prune_interval_s:
            self._last_prune = now
            await _logged(self._saves.delete_expired())
            await _logged(self._prune())

    async def _act_on(self, lapse: Lapse) -> None:
        """A client has vanished, or did not come for a request."""
        session = self._sessions.get(lapse.session_id)
        match lapse.action:
            case Action.ABANDON_REQUESTS:
                self.futures.abandon(lapse.request_ids, lapse.why)
            case Action.RELEASE_WEIGHTS if session is not None:
                await _logged(self.sampling.release_unnamed(session, lapse.silent_s))
            case Action.END_SESSION if session is not None:
                why = f"nothing was heard of it for {lapse.silent_s:.0f} s"
                await _logged(self._end_session(session, why, keep=True))

    async def _prune(self) -> None:
        """Forgets what need not be remembered any more, and gives the room back."""
        settings, quotas, now = self._settings, self._quotas.settings, self._clock.now()
        await self._future_store.prune(
            finished_before=now - settings.keep_finished_s,
            fetched=self.futures.fetched_before(self._clock.monotonic() - settings.keep_fetched_s),
            max_owner_bytes=quotas.result_bytes,
        )
        await self._registry.prune_released(released_before=now - settings.keep_finished_s)
        await self._registry.prune_ended(ended_before=now - settings.keep_ended_s, most=quotas.sessions)
        await self._registry.shrink()

    def _reason(self, job: Job) -> str:
        trouble = self._trouble()
        return self._waits_for(job) + (f"; {trouble}" if trouble is not None else "")

    def _waits_for(self, job: Job) -> str:
        model_id = job.model_id or self.sampling.waiting.get(job.request_id)
        recovery = None if model_id is None else self.recovery.reason(model_id)
        if recovery is not None:
            return f"{job.operation} (seq_id {job.seq_id}) waits: {recovery}"
        model = self._models.get(job.model_id) if job.model_id is not None else None
        waits_for_id = model.queue.reason(job) if model is not None else None
        if waits_for_id is not None:
            return waits_for_id
        backend = self._backends[job.base]
        samples = job.operation == "sample" and isinstance(backend.engine, Progress)
        asked: object = backend.engine if samples else backend.trainer
        running = asked.running() if isinstance(asked, Progress) else ""
        return self._jobs.reason(job) + (f"; now runs {running}" if running else "")


# --------------------------------------------------------------------------------------------------------------------


async def _logged(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:
        log.exception("a part of the service's sweep failed")
