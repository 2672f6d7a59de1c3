"""Sampling sessions and sampling requests: which weights, admission, and the engine's whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from descant.errors import DescantError, Gone, NotFound, Overloaded, RankDied, UserError
from descant.ports import CheckpointStore, Clock
from descant.service.backends import Backends
from descant.service.ephemeral import EphemeralVersions, Limits
from descant.service.futures import FutureService, Submitted
from descant.service.jobs import Job, Jobs
from descant.service.liveness import WEIGHTS_SHARE, Liveness, client_of
from descant.service.names import sampling_session_id_of, session_id_of
from descant.service.publications import Publications, version_of
from descant.service.quotas import Quotas, version_bytes
from descant.service.registry import ModelRecord, Registry, SamplingSessionRecord
from descant.service.resume import Resume
from descant.service.sample_fold import sample_whole
from descant.service.sample_submission import SampleSubmission
from descant.service.sampling_admission import SamplingAdmission, SamplingLoad, load_of
from descant.service.saves import Saves, drop
from descant.service.sessions import Session, Sessions
from descant.service.settings import ServiceSettings
from descant.types import (
    FutureKey,
    SampleOutput,
    SamplerKind,
    SnapshotRef,
    Version,
)

DEATH_PAUSE_S = 0.2
"""After a rank's death, until it is known what was lost with it."""

MAX_DEATHS = 3
"""A request during which so many ranks died, the last time while none like it was running, is not tried again."""


@dataclass(slots=True, eq=False)
class _Awaited:
    """An unnamed version that the recovery of its model publishes again, or gives up: then ``done``."""

    base: str
    samplers: dict[str, SamplerKind]
    """The sessions that it is held for."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    sampling_session_id: str
    base_model: str
    model_path: str | None


class Sampling:
    """Owns what of the sampling sessions is in memory, the weights that engines hold for them, and what requests in
    flight take up."""

    def __init__(
        self,
        *,
        backends: Backends,
        sessions: Sessions,
        futures: FutureService,
        jobs: Jobs,
        liveness: Liveness,
        saves: Saves,
        resume: Resume,
        checkpoints: CheckpointStore,
        registry: Registry,
        clock: Clock,
        settings: ServiceSettings,
        quotas: Quotas,
    ):
        self._backends = backends
        self._sessions = sessions
        self._futures = futures
        self._jobs = jobs
        self._liveness = liveness
        self._saves = saves
        self._resume = resume
        self._registry = registry
        self._clock = clock
        self._settings = settings
        self._quotas = quotas
        self._ephemeral = EphemeralVersions(
            Limits(
                keep=settings.keep_versions,
                keep_sampled_s=settings.keep_sampled_s,
                max_owner_bytes=quotas.settings.version_bytes,
            )
        )
        self._publications = {
            base: Publications(engine=backends[base].engine, checkpoints=checkpoints, dropped=self._ephemeral.remove)
            for base in backends
        }
        self._awaited: dict[Version, _Awaited] = {}
        """Those that are to be published again."""
        self._suspects = {base: asyncio.Lock() for base in backends}
        """Held by the one request that runs of those that may be what ranks die of."""
        self._retiring: dict[Version, str] = {}
        """Those that are being released and why, until the registry says it."""
        self.waiting: dict[str, str] = {}
        """Requests that wait for the recovery of a model, and its id."""
        self._samplers: dict[str, SamplingSessionRecord] = {}
        """Those sampled since the start, of open sessions."""
        most = SamplingLoad(
            requests=settings.max_samples_in_flight,
            sequences=settings.max_sequences_in_flight,
            bytes=settings.max_sampling_bytes,
        )
        self.admission = {base: SamplingAdmission(base, most=most) for base in backends}

    async def create_sampling_session(
        self,
        principal: str,
        *,
        session_id: str,
        sampling_session_seq_id: int,
        base_model: str | None,
        model_path: str | None,
    ) -> str:
        """Id ``{session_id}:sample:{seq}``."""
        session = await self._sessions.find(principal, session_id)
        self._saves.check_room()
        if sampling_session_seq_id < 0:
            raise UserError(f"sampling_session_seq_id is {sampling_session_seq_id}, expected 0 or more")
        version = None
        if model_path is not None:
            checkpoint = await self._saves.open(principal, model_path)
            base = self._backends.served(checkpoint.manifest.base, of=model_path)
            if base_model is not None and self._backends.sampled(base_model) != base:
                raise UserError(f"{model_path} was trained on {base}, so it cannot be sampled on {base_model}")
            self._backends[base].check_samples(checkpoint.manifest.trainable, of=model_path)
            version = version_of(checkpoint)
        elif base_model is not None:
            base = self._backends.sampled(base_model)
        else:
            raise UserError("neither base_model nor model_path is given, expected one of them")
        sampling_session_id = sampling_session_id_of(session_id, sampling_session_seq_id)
        if sampling_session_id not in session.samplers:
            self._quotas.check_samplers(await self._registry.num_samplers(principal))
        record = SamplingSessionRecord(
            sampling_session_id=sampling_session_id,
            session_id=session_id,
            owner=principal,
            base=base,
            created_at=self._clock.now(),
            model_path=model_path,
            version=version,
        )
        stands = await self._registry.add_sampling_session(record)
        if (stands.base, stands.model_path, stands.ephemeral) != (base, model_path, False):
            raise UserError(_taken(record.sampling_session_id))
        session.samplers.add(record.sampling_session_id)
        return record.sampling_session_id

    async def get_sampler(self, principal: str, sampling_session_id: str) -> SamplerInfo:
        sampler = await self._sampler(principal, sampling_session_id)
        return SamplerInfo(
            sampling_session_id=sampling_session_id, base_model=sampler.base, model_path=sampler.model_path
        )

    async def sample(self, principal: str, submission: SampleSubmission) -> Submitted:
        """``sample_sequence_ids``: one ``{sampling_session_id}:{seq_id}:{i}`` per sample. Raises ``Overloaded``."""
        sampler = await self._sampler(principal, submission.sampling_session_id)
        session = await self._sessions.find(principal, sampler.session_id)
        base = self._backends.served(sampler.base)
        submission.check(base, self._backends[base].engine.capabilities)
        key = FutureKey(kind="sample", scope=submission.sampling_session_id, seq_id=submission.seq_id)
        admission = self.admission[base]
        load = load_of(submission.prompt, submission.num_samples, submission.target_prompt_logprobs)
        admission.admit(principal, load)

        def leave() -> None:
            admission.release(principal, load)

        def begin(request_id: str) -> None:
            def end() -> None:
                leave()
                self._liveness.ended(request_id)

            self._liveness.began(request_id, client_of(key), polls_at_once=submission.polls_at_once)
            job = Job(
                request_id=request_id,
                operation="sample",
                base=base,
                owner=principal,
                seq_id=submission.seq_id,
                on_end=end,
            )
            self._jobs.start(self._jobs.add(job), self._sample(request_id, sampler, session, submission))

        request_id = await self._futures.accept(
            key=key,
            owner=principal,
            base=base,
            operation="sample",
            begin=begin,
            not_begun=leave,
        )
        return Submitted(
            request_id=request_id,
            sample_sequence_ids=tuple(
                f"{submission.sampling_session_id}:{submission.seq_id}:{i}" for i in range(submission.num_samples)
            ),
        )

    # ------------------------------------------------------------------------------------------------ weights
    async def publish(self, model: ModelRecord, ref: SnapshotRef, sampling_session_id: str, kind: SamplerKind) -> None:
        """A fresh snapshot of ``model`` becomes a sampling session without a file, or changes nothing and raises: the
        id is another session's, the model's session is over, or its owner has as much of these as one may have. The
        snapshot is dropped either way."""
        publications, backend = self._publications[model.base], self._backends[model.base]
        record = SamplingSessionRecord(
            sampling_session_id=sampling_session_id,
            session_id=model.session_id,
            owner=model.owner,
            base=model.base,
            created_at=self._clock.now(),
            version=ref.version,
            kind=kind,
        )
        num_bytes = version_bytes(backend.facts, ref.trainable)
        try:
            to_go = self._ephemeral.room_for(model.owner, num_bytes)
            now = self._clock.monotonic()
            self._ephemeral.add(ref.version, base=model.base, owner=model.owner, num_bytes=num_bytes, now=now)
            self._ephemeral.begin(ref.version, now)
            await self._retire(to_go)
            await publications.publish(ref, sampling_session_id, kind)
            stands = await self._registry.add_sampling_session(record)
            if stands.version != ref.version or not stands.ephemeral:
                raise UserError(_taken(sampling_session_id))
            session = self._sessions.get(model.session_id)
            if session is None or session.over is not None:
                raise Gone(f"session {model.session_id!r} ended while these weights were published")
            session.samplers.add(sampling_session_id)
        except BaseException:
            await publications.release(ref.version, sampling_session_id)
            if not publications.holds(ref.version):
                self._ephemeral.remove(ref.version)
            raise
        finally:
            if (awaited := self._awaited.pop(ref.version, None)) is not None:  # an earlier server had begun with it
                awaited.done.set()
            self._ephemeral.end(ref.version, self._clock.monotonic())
            await drop(backend.trainer, ref)

    # ------------------------------------------------------------------------------------------------ after a death
    def in_use(self, model_id: str) -> Collection[int]:
        """The numbers of a model's unnamed versions that are held for sessions."""
        awaited = (version.number for version in self._awaited if version.model_id == model_id)
        return {*self._ephemeral.of_model(model_id), *awaited}

    def expect(self, sampler: SamplingSessionRecord, version: Version) -> None:
        """An ephemeral session of an earlier server: the recovery of its model publishes its weights again, or of an
        inflight one those that it follows by now."""
        self._samplers[sampler.sampling_session_id] = sampler
        if (session := self._sessions.get(sampler.session_id)) is not None:
            session.samplers.add(sampler.sampling_session_id)
        awaited = self._awaited.setdefault(version, _Awaited(base=sampler.base, samplers={}))
        awaited.samplers[sampler.sampling_session_id] = sampler.kind or self._settings.sampler_kind
        if sampler.kind == "inflight":
            self._publications[sampler.base].follow(sampler.sampling_session_id, version)

    def interrupt(self, base: str, version: Version) -> None:
        """Its engine died, and the recovery of its model publishes it again: requests for it wait."""
        publications = self._publications[base]
        users = publications.users(version)
        publications.interrupt(version)
        samplers = {user: publications.kind_of(user) for user in users}
        self._awaited.setdefault(version, _Awaited(base=base, samplers=samplers))

    def published(self, base: str) -> Collection[Version]:
        """What its engine holds."""
        return self._publications[base].versions

    def is_unnamed(self, version: Version) -> bool:
        return version in self._ephemeral

    def awaits(self, version: Version) -> bool:
        return version in self._awaited

    async def publish_again(self, model: ModelRecord, ref: SnapshotRef) -> None:
        """An awaited version is there again, or nobody needs it any more. The snapshot is dropped either way."""
        version, now = ref.version, self._clock.monotonic()
        publications, backend = self._publications[model.base], self._backends[model.base]
        awaited = self._awaited.get(version)
        try:
            if awaited is None:
                return
            num_bytes = version_bytes(backend.facts, ref.trainable)
            self._ephemeral.add(version, base=model.base, owner=model.owner, num_bytes=num_bytes, now=now)
            await publications.publish_again(ref, awaited.samplers)
            if self._awaited.pop(version, None) is None:  # its session ended, or it was released meanwhile
                await publications.retire(version)
            awaited.done.set()
        finally:
            await drop(backend.trainer, ref)

    def give_up(self, model_id: str, *, but: Collection[int] = ()) -> Collection[Version]:
        """Those of a model that are not published again, ``but`` for these numbers, whose save has no answer yet: they
        are lost. Who waits for them hears of it."""
        lost = [v for v in self._awaited if v.model_id == model_id and v.number not in but]
        for version in lost:
            awaited = self._awaited.pop(version)
            for publications in self._publications.values():
                publications.forget([version])
            self._ephemeral.remove(version)
            awaited.done.set()
        return lost

    async def release_outdated(self) -> None:
        """Weights saved without a name that are neither new nor were sampled lately."""
        await self._retire(self._ephemeral.outdated(self._clock.monotonic()))

    async def release_unnamed(self, session: Session, silent_s: float) -> None:
        """Releases all weights that it saved without a name: its client has been silent for so long."""
        timeout_s = self._settings.session_timeout_s
        why = (
            f"nothing was heard of your client for {silent_s:.0f} s, and weights saved without a name are kept for "
            f"{timeout_s / WEIGHTS_SHARE:g} s then (1/{WEIGHTS_SHARE} of service.session_timeout_s)"
        )
        await self._retire([(version, why) for version in self._ephemeral.of_session(session.record.session_id)])

    async def _retire(self, versions: Sequence[tuple[Version, str]]) -> None:
        """They are released, and requests for them fail with the reason. From the first moment on no request begins on
        them; those that run finish."""
        retiring = dict(versions)
        self._retiring |= retiring
        for version in retiring:
            self._ephemeral.remove(version)
        try:
            for version, why in versions:
                await self._release(version, why)
        finally:
            for version in retiring:
                self._retiring.pop(version, None)

    async def _release(self, version: Version, why: str) -> None:
        publications = next((p for p in self._publications.values() if p.holds(version)), None)
        if (awaited := self._awaited.pop(version, None)) is not None:  # it is not published again
            awaited.done.set()
            publications = self._publications[awaited.base]
        if publications is None:
            return  # it was lost meanwhile, or its session ended
        users = publications.users(version)
        session = self._sessions.get(session_id_of(version.model_id))
        for sampling_session_id in users:
            self._samplers.pop(sampling_session_id, None)
            if session is not None:
                session.samplers.discard(sampling_session_id)
        await self._registry.release_samplers(users, at=self._clock.now(), reason=why)
        await publications.retire(version)

    def num_unnamed(self, base: str) -> tuple[int, int]:
        """How many weights saved without a name are held, and their bytes."""
        return self._ephemeral.of_base(base)

    def forget(self, base: str, versions: Collection[Version] | None) -> None:
        """The base's engine holds these no more; None: it began anew and holds nothing."""
        self._publications[base].forget(versions)

    def end(self, session: Session) -> None:
        """The session is over, and what it sampled with leaves memory."""
        for sampling_session_id in session.samplers:
            self._samplers.pop(sampling_session_id, None)

    async def release(self, session: Session) -> None:
        """The last after ``end``: versions that only this session sampled are released."""
        for publications in self._publications.values():
            await publications.leave(session.samplers)

    # ================================================================================================ doing

    async def _sampler(self, principal: str, sampling_session_id: str) -> SamplingSessionRecord:
        sampler = self._samplers.get(sampling_session_id)
        if sampler is None:
            sampler = await self._registry.sampling_session(sampling_session_id)
        if sampler is None or sampler.owner != principal:
            raise NotFound(f"no sampling session {sampling_session_id!r}")
        return sampler

    async def _sample(
        self, request_id: str, sampler: SamplingSessionRecord, session: Session, submission: SampleSubmission
    ) -> SampleOutput:
        publications = self._publications[sampler.base]
        version = publications.version_for(sampler)
        if version is not None and version in self._awaited:
            await self._published_again(request_id, version)
        if sampler.ephemeral and (version in self._retiring or not publications.holds(version)):
            raise await self._not_held(sampler, version)
        if version is None:
            return await self._sample_held(request_id, sampler, session, submission)
        self._ephemeral.begin(version, self._clock.monotonic())
        try:
            return await self._sample_held(request_id, sampler, session, submission)
        finally:
            self._ephemeral.end(version, self._clock.monotonic())

    async def _not_held(self, sampler: SamplingSessionRecord, version: Version | None) -> DescantError:
        """Of an ephemeral session whose weights are not there."""
        stands = await self._registry.sampling_session(sampler.sampling_session_id) or sampler
        why = self._retiring.get(version) if version is not None else None
        why = why or (stands.status_reason if stands.status == "released" else None)
        if why is None:
            return await self._resume.sampler(sampler)
        return UserError(
            f"the weights of sampling session {sampler.sampling_session_id!r} were released: {why}; save with a name "
            "(save_weights_for_sampler) those that are to stay"
        )

    async def _sample_held(
        self, request_id: str, sampler: SamplingSessionRecord, session: Session, submission: SampleSubmission
    ) -> SampleOutput:
        publications = self._publications[sampler.base]
        self._samplers[sampler.sampling_session_id] = sampler
        session.samplers.add(sampler.sampling_session_id)
        request = submission.request(
            request_id,
            version=publications.version_for(sampler),
            inflight=publications.follows(sampler),
            owner=sampler.owner,
            prefix_scope="" if self._settings.share_prefixes else sampler.owner,
        )
        deadline = self._clock.monotonic() + self._settings.stall_timeout_s
        num_deaths = 0
        while True:
            version = publications.version_for(sampler)
            if version is not None and version in self._awaited:
                await self._published_again(request_id, version)
                continue
            if sampler.ephemeral and not publications.holds(version):
                raise await self._not_held(sampler, version)
            try:
                await publications.provide(sampler)
                request = replace(request, version=publications.version_for(sampler))
                if num_deaths < MAX_DEATHS - 1:
                    return await sample_whole(self._backends[sampler.base].engine, request)
                async with self._suspects[sampler.base]:
                    return await sample_whole(self._backends[sampler.base].engine, request)
            except Overloaded as error:  # the request was accepted here, so it waits here
                if self._clock.monotonic() >= deadline:
                    raise
                await self._clock.sleep(error.retry_after_s)
            except RankDied:  # nothing of it has been sent yet; but if they die again and again, it may be of this
                num_deaths += 1
                if num_deaths >= MAX_DEATHS:
                    raise
                await self._clock.sleep(DEATH_PAUSE_S)
            except NotFound:  # its version was replaced on the way, or its rank died a moment ago
                if self._still_samples(sampler, request.version):
                    await self._clock.sleep(DEATH_PAUSE_S)
                    if self._still_samples(sampler, request.version):
                        raise

    def _still_samples(self, sampler: SamplingSessionRecord, version: Version | None) -> bool:
        publications = self._publications[sampler.base]
        return version == publications.version_for(sampler) and publications.holds(version)

    async def _published_again(self, request_id: str, version: Version) -> None:
        """Waits until the recovery of the version's model has come so far; it ends by itself, one way or the other."""
        awaited = self._awaited[version]
        self.waiting[request_id] = version.model_id
        try:
            await awaited.done.wait()
        finally:
            self.waiting.pop(request_id, None)


def _taken(sampling_session_id: str) -> str:
    return f"{sampling_session_id!r} is a sampling session already, of other weights; take the next number"
