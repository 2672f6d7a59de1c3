"""Sampling sessions and sampling requests: which weights, whether there is room, and the engine's whole answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from descant.errors import Gone, NotFound, Overloaded, UserError
from descant.ports import CheckpointStore, Clock
from descant.service import samplers
from descant.service.backends import Backends
from descant.service.catalogue import Catalogue, ModelRecord, SamplingSessionRecord
from descant.service.jobs import Job, Jobs
from descant.service.names import sampling_session_id_of
from descant.service.presence import client_of
from descant.service.promises import Promises, Submitted
from descant.service.resume import Resume
from descant.service.samplers import Publications
from descant.service.saves import Saves, drop
from descant.service.sessions import Session, Sessions
from descant.service.settings import ServiceSettings
from descant.types import (
    FutureKey,
    ModelInput,
    SampleOutput,
    SampleRequest,
    SamplerKind,
    SamplingParams,
    SnapshotRef,
    TensorData,
    Version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    sampling_session_id: str
    base_model: str
    model_path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSubmission:
    """A decoded ``asample``: the request without what the service adds (its id and which version)."""

    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    num_samples: int
    sampling_params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    topk_sample_logprobs: int = 0
    claimed_at_once: bool = False
    """Its client comes for the answer as soon as it has the id: if it does not, nobody will."""


class Sampling:
    """Owns what of the sampling sessions is in memory, the weights that engines hold for them, and how many requests
    are in flight."""

    def __init__(
        self,
        *,
        backends: Backends,
        sessions: Sessions,
        promises: Promises,
        jobs: Jobs,
        saves: Saves,
        resume: Resume,
        checkpoints: CheckpointStore,
        catalogue: Catalogue,
        clock: Clock,
        settings: ServiceSettings,
    ):
        self._backends = backends
        self._sessions = sessions
        self._promises = promises
        self._jobs = jobs
        self._saves = saves
        self._resume = resume
        self._catalogue = catalogue
        self._clock = clock
        self._settings = settings
        self._publications = {
            base: Publications(engine=backends[base].engine, checkpoints=checkpoints) for base in backends
        }
        self._samplers: dict[str, SamplingSessionRecord] = {}
        """Those sampled since the start, of open sessions."""
        self.in_flight = dict.fromkeys(backends, 0)
        """By base."""

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
        if sampling_session_seq_id < 0:
            raise UserError(f"sampling_session_seq_id is {sampling_session_seq_id}, expected 0 or more")
        version = None
        if model_path is not None:
            checkpoint = await self._saves.open(principal, model_path)
            base = self._backends.served(checkpoint.manifest.base, of=model_path)
            if base_model is not None and self._backends.served(base_model) != base:
                raise UserError(f"{model_path} was trained on {base}, so it cannot be sampled on {base_model}")
            version = samplers.version_of(checkpoint)
        elif base_model is not None:
            base = self._backends.served(base_model)
        else:
            raise UserError("neither base_model nor model_path is given, expected one of them")
        record = SamplingSessionRecord(
            sampling_session_id=sampling_session_id_of(session_id, sampling_session_seq_id),
            session_id=session_id,
            owner=principal,
            base=base,
            created_at=self._clock.now(),
            model_path=model_path,
            version=version,
        )
        stands = await self._catalogue.add_sampling_session(record)
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
        self._check_sample(base, submission)
        key = FutureKey(kind="sample", scope=submission.sampling_session_id, seq_id=submission.seq_id)
        client = client_of(key)
        limit = self._settings.max_samples_in_flight
        if self.in_flight[base] >= limit:
            raise Overloaded(f"{limit} sampling requests are in flight on {base}, which is as many as are taken")
        self.in_flight[base] += 1

        def leave() -> None:
            self.in_flight[base] -= 1

        def begin(request_id: str) -> None:
            job = Job(
                request_id=request_id,
                operation="sample",
                base=base,
                seq_id=submission.seq_id,
                client=client,
                claimed_at_once=submission.claimed_at_once,
                on_end=leave,
            )
            self._jobs.start(self._jobs.add(job), self._sample(request_id, sampler, session, submission))

        request_id = await self._promises.accept(
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
        id is another session's, or the model's session is over. The snapshot is dropped either way."""
        publications, trainer = self._publications[model.base], self._backends[model.base].trainer
        record = SamplingSessionRecord(
            sampling_session_id=sampling_session_id,
            session_id=model.session_id,
            owner=model.owner,
            base=model.base,
            created_at=self._clock.now(),
            version=ref.version,
        )
        stands = None
        try:
            await publications.publish(ref, sampling_session_id, kind)
            stands = await self._catalogue.add_sampling_session(record)
            if stands.version != ref.version or not stands.ephemeral:
                raise UserError(_taken(sampling_session_id))
            session = self._sessions.get(model.session_id)
            if session is None or session.over is not None:
                raise Gone(f"session {model.session_id!r} ended while these weights were published")
            session.samplers.add(sampling_session_id)
        except BaseException:
            await publications.release(ref.version, sampling_session_id)
            raise
        finally:
            await drop(trainer, ref)

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
            sampler = await self._catalogue.sampling_session(sampling_session_id)
        if sampler is None or sampler.owner != principal:
            raise NotFound(f"no sampling session {sampling_session_id!r}")
        return sampler

    def _check_sample(self, base: str, submission: SampleSubmission) -> None:
        capabilities = self._backends[base].engine.capabilities
        if submission.seq_id < 0:
            raise UserError(f"seq_id is {submission.seq_id}, expected 0 or more")
        if not 1 <= submission.num_samples <= capabilities.max_num_samples:
            raise UserError(f"num_samples is {submission.num_samples}, expected 1 to {capabilities.max_num_samples}")
        if submission.prompt_logprobs and not capabilities.prompt_logprobs:
            raise UserError(f"prompt_logprobs is true, which the engine of {base} cannot do")
        if submission.target_prompt_logprobs is not None and not capabilities.target_prompt_logprobs:
            raise UserError(f"target_prompt_logprobs is set, which the engine of {base} cannot do")
        for name, k, most in (
            ("topk_prompt_logprobs", submission.topk_prompt_logprobs, capabilities.max_topk_prompt_logprobs),
            ("topk_sample_logprobs", submission.topk_sample_logprobs, capabilities.max_topk_sample_logprobs),
            ("prompt_alt_tokens_k", submission.prompt_alt_tokens_k, capabilities.max_prompt_alt_tokens_k),
        ):
            if not 0 <= k <= most:
                raise UserError(f"{name} is {k}, expected 0 to {most}")

    async def _sample(
        self, request_id: str, sampler: SamplingSessionRecord, session: Session, submission: SampleSubmission
    ) -> SampleOutput:
        publications = self._publications[sampler.base]
        if sampler.ephemeral and not publications.holds(publications.version_for(sampler)):
            raise await self._resume.sampler(sampler)
        self._samplers[sampler.sampling_session_id] = sampler
        session.samplers.add(sampler.sampling_session_id)
        await publications.provide(sampler)
        request = SampleRequest(
            request_id=request_id,
            version=publications.version_for(sampler),
            inflight=publications.follows(sampler),
            prompt=submission.prompt,
            num_samples=submission.num_samples,
            sampling_params=submission.sampling_params,
            prompt_logprobs=submission.prompt_logprobs,
            topk_prompt_logprobs=submission.topk_prompt_logprobs,
            prompt_logprobs_last_n=submission.prompt_logprobs_last_n,
            target_prompt_logprobs=submission.target_prompt_logprobs,
            prompt_alt_tokens_k=submission.prompt_alt_tokens_k,
            topk_sample_logprobs=submission.topk_sample_logprobs,
        )
        deadline = self._clock.monotonic() + self._settings.stall_timeout_s
        while True:
            try:
                return await samplers.sample(self._backends[sampler.base].engine, request)
            except Overloaded as error:  # the request was accepted here, so it waits here
                if self._clock.monotonic() >= deadline:
                    raise
                await self._clock.sleep(error.retry_after_s)
            except NotFound:  # its version was replaced on the way
                if request.version == publications.version_for(sampler):
                    raise
            request = replace(request, version=publications.version_for(sampler))


def _taken(sampling_session_id: str) -> str:
    return f"{sampling_session_id!r} is a sampling session already, of other weights; take the next number"
