"""What a request means: owners, sessions, order, futures, versions, checkpoints, restart.

The server decodes a request, calls one method here with the caller's ``principal``, and encodes what comes back.
Nothing here knows HTTP or torch. Every method that takes a ``principal`` sees only what that principal owns: another
owner's id raises the same ``NotFound`` as an id that never was.

Methods that return ``Submitted`` are the protocol's futures: what goes wrong after the request's place in order is
known goes through the future, never as an exception (a half-sent batch must not be stepped). What they raise is for
requests that have no place: unknown session or model, a malformed name.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from descant.errors import DescantError, Gone, Lost, NotFound, Overloaded, ServerError, UserError
from descant.ports import CheckpointStore, Clock, Engine, FutureStore, Measured, Progress, Trainer
from descant.service import samplers
from descant.service.catalogue import Catalogue, ModelRecord, SamplingSessionRecord, SessionRecord
from descant.service.jobs import Job, Jobs
from descant.service.names import check_checkpoint_name, model_id_of, parse_path, sampling_session_id_of
from descant.service.presence import Client, Presence, client_of
from descant.service.queue import Finish, ModelQueue
from descant.service.resume import Resume
from descant.service.samplers import Publications
from descant.service.saves import Saves, check_ttl, drop
from descant.types import (
    MAX_RANK,
    Answer,
    Checkpoint,
    CheckpointName,
    CheckpointSource,
    Command,
    CreateModel,
    Encoded,
    ForwardBackward,
    ForwardBackwardOutput,
    FutureKey,
    FutureState,
    Loaded,
    LoadState,
    LoraConfig,
    ModelCreated,
    ModelFacts,
    ModelInput,
    OptimStep,
    OptimStepOutput,
    Refused,
    Result,
    SampleOutput,
    SampleRequest,
    SamplerKind,
    SamplerWeightsSaved,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    TensorData,
    Version,
    WeightsLoaded,
    WeightsSaved,
    input_length,
)

log = logging.getLogger(__name__)

R = TypeVar("R")

STATS_TIMEOUT_S = 5.0
"""A rank answers between two turns; one in a long turn is left out."""

MAX_GIVEN_UP = 1 << 16
"""Sampling requests given up of which it is remembered that they were."""

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One served base model: who trains it and who samples it."""

    facts: ModelFacts
    trainer: Trainer
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The immediate answer to a request that ends in a future."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A future that has not ended: ``reason`` says in a sentence what runs now and how much is ahead."""

    request_id: str
    queue_state: QueueState
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    model_id: str
    facts: ModelFacts
    lora: LoraConfig
    user_metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    sampling_session_id: str
    base_model: str
    model_path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInfo:
    base_model: str
    lora: LoraConfig


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    hole_timeout_s: float = 330.0
    """How long a command waits for a missing seq_id: longer than the SDK's retries."""
    session_timeout_s: float = 3600.0
    """A session without a heartbeat for this long is over; counted from its creation if it never beat."""
    keep_finished_s: float = 6 * 3600.0
    """Finished futures stay fetchable for this long."""
    stall_timeout_s: float = 2 * 3600.0
    """A base that has had work for this long and ended none of it is given up: its requests fail."""
    sampler_kind: SamplerKind = "snapshot"
    """What sampling clients without files are when they do not say (the SDK has said it since 0.38): a snapshot, or
    inflight, which follows the newest weights."""
    max_samples_in_flight: int = 4096
    """Sampling requests of one base that were accepted and have not ended; one more is told to come again."""
    vanish_grace_s: float = 0.5
    """A client that broke off every wait of its own and did not wait again for this long has vanished: its sampling
    requests are given up. The SDK sends them again should it be there after all."""
    vanish_timeout_s: float = 60.0
    """So has one that waits for nothing and sent nothing, not even a heartbeat (every 10 s), for this long."""
    max_training_bytes: int = 2 << 30
    """Of the data of one base's training requests that were accepted and have not ended; one that goes beyond is told
    to come again, unless nothing of its model is being trained: so a model always has one, and nobody starves."""
    sweep_interval_s: float = 1.0
    """How often it is looked whether a hole, a session or a base is over its time."""
    prune_interval_s: float = 60.0
    """How often finished futures and checkpoints are looked at whose time is over."""


@dataclass(slots=True, eq=False)
class _Session:
    """A session that is open, in memory. ``over``: why it is not any more; it leaves memory once that is written."""

    record: SessionRecord
    last_seen: float
    samplers: set[str] = field(default_factory=set)
    over: str | None = None


@dataclass(slots=True, eq=False)
class _Model:
    """A model that a trainer has, in memory. ``lost``: it had."""

    record: ModelRecord
    backend: Backend
    queue: ModelQueue
    lost: bool = False


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
        self._backends = {backend.facts.name: backend for backend in backends}
        self._bases = {name: b.facts.name for b in backends for name in (b.facts.name, *b.facts.aliases)}
        self._futures = futures
        self._checkpoints = checkpoints
        self._catalogue = catalogue
        self._clock = clock
        self._settings = settings or ServiceSettings()
        self._jobs = Jobs(futures=futures, clock=clock, encode=encode)
        self._resume = Resume(catalogue=catalogue, checkpoints=checkpoints)
        self._saves = Saves(checkpoints=checkpoints, catalogue=catalogue, clock=clock)
        self._publications = {
            name: Publications(engine=backend.engine, checkpoints=checkpoints)
            for name, backend in self._backends.items()
        }
        self._sessions: dict[str, _Session] = {}
        self._models: dict[str, _Model] = {}
        self._samplers: dict[str, SamplingSessionRecord] = {}
        """Those sampled since the start, of open sessions."""
        self._samples_in_flight = dict.fromkeys(self._backends, 0)
        self._presence = Presence(
            clock=clock,
            grace_s=self._settings.vanish_grace_s,
            spawn=self._jobs.spawn,
            vanished=lambda client: self._give_up(
                client.session_id, "its client closed all its connections", client=client
            ),
        )
        self._given_up: dict[str, None] = {}
        """The latest sampling requests whose clients vanished."""
        self._training_bytes = dict.fromkeys(self._backends, 0)
        self._sweeper: asyncio.Task[None] | None = None
        self._last_prune = clock.monotonic()

    # ------------------------------------------------------------------------------------------------ life
    async def start(self) -> None:
        """Recovers: models that were live become lost, futures that were pending fail naming where to resume."""
        now = self._clock.monotonic()
        for record in await self._catalogue.open_sessions():
            # While the server was down nobody could beat: the time counts anew.
            self._sessions[record.session_id] = _Session(record=record, last_seen=now)
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
        await self._lose(self._bases[base], reason, models=models, versions=versions)

    def capabilities(self) -> Sequence[ModelFacts]:
        return [backend.facts for backend in self._backends.values()]

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """By base: what is open and in flight, and what its engine counts."""
        numbers: dict[str, dict[str, float]] = {}
        for base, backend in self._backends.items():
            numbers[base] = {
                "requests_in_flight": sum(job.base == base for job in self._jobs),
                "samples_in_flight": self._samples_in_flight[base],
                "models": sum(model.record.base == base for model in self._models.values()),
            }
            if isinstance(backend.engine, Measured):
                try:
                    numbers[base] |= await asyncio.wait_for(backend.engine.stats(), STATS_TIMEOUT_S)
                except (TimeoutError, DescantError) as error:
                    log.info("%s does not tell its numbers: %s", base, error or "it is busy")
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
        stands = await self._catalogue.add_session(record, idempotency_key=idempotency_key)
        if stands.ended_at is None:
            self._sessions.setdefault(stands.session_id, _Session(record=stands, last_seen=self._clock.monotonic()))
        return stands.session_id

    async def heartbeat(self, principal: str, session_id: str) -> None:
        """Raises ``Gone`` for a session that is over, ``NotFound`` for one that never was."""
        await self._session(principal, session_id)
        self._presence.sign(Client(session_id))

    async def finish_session(self, principal: str, session_id: str, *, reason: str, detail: str | None) -> None:
        """Its models are deleted, its ephemeral weights released. Finishing twice is finishing once."""
        try:
            await self._session(principal, session_id)
        except Gone:
            return
        await self._end_session(session_id, f"its client finished ({reason})")

    # ------------------------------------------------------------------------------------------------ models
    async def create_model(
        self,
        principal: str,
        *,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: LoraConfig,
        optimizer: str,
        user_metadata: Mapping[str, str] | None,
    ) -> Submitted:
        """Model id ``{session_id}:train:{model_seq_id}``. ``UserError`` (400) for a base not served, naming those that
        are, and for a rank outside 1..256, no module chosen, or an optimiser other than adamw."""
        session = await self._session(principal, session_id)
        base = self._served(base_model)
        if not 1 <= lora.rank <= MAX_RANK:
            raise UserError(f"lora_config.rank is {lora.rank}, expected 1 to {MAX_RANK}")
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise UserError(
                "lora_config.train_attn, train_mlp and train_unembed are all false, expected at least one true"
            )
        if optimizer != "adamw":
            raise UserError(f"optimizer_config.type is {optimizer!r}, expected 'adamw'")
        return await self._create(session, model_seq_id, base, lora, None, user_metadata, "create_model")

    async def get_info(self, principal: str, model_id: str) -> ModelInfo:
        """Also of a model that is lost."""
        model = await self._model(principal, model_id)
        record = model.record if isinstance(model, _Model) else model
        base = self._served(record.base)
        return ModelInfo(
            model_id=model_id,
            facts=self._backends[base].facts,
            lora=record.lora,
            user_metadata=record.user_metadata or {},
        )

    async def forward_backward(self, principal: str, command: ForwardBackward) -> Submitted:
        """Raises ``Overloaded``, its seq_id not consumed."""

        async def finish(outcome: asyncio.Future[Result]) -> Answer:
            return await _result(outcome, ForwardBackwardOutput)

        num_tokens = sum(input_length(datum.model_input) for datum in command.data)
        operation = "forward" if command.forward_only else "forward_backward"
        num_bytes = _num_bytes(command)
        return await self._train(principal, command, operation, finish, num_tokens=num_tokens, num_bytes=num_bytes)

    async def optim_step(self, principal: str, command: OptimStep) -> Submitted:
        async def finish(outcome: asyncio.Future[Result]) -> Answer:
            return await _result(outcome, OptimStepOutput)

        return await self._train(principal, command, "optim_step", finish)

    async def refuse(
        self, principal: str, *, model_id: str, seq_id: int, operation: str, message: str, loses_gradient: bool
    ) -> Submitted:
        """A request whose body is wrong but whose place is known: its future fails in order with ``message``."""
        command = Refused(model_id=model_id, seq_id=seq_id, message=message, loses_gradient=loses_gradient)

        async def finish(_outcome: asyncio.Future[Result]) -> Answer:
            raise UserError(message)

        return await self._train(principal, command, operation, finish)

    # ------------------------------------------------------------------------------------------------ weights
    async def save_weights(
        self, principal: str, *, model_id: str, seq_id: int, name: str, overwrite: bool, ttl_seconds: int | None
    ) -> Submitted:
        """Raises ``UserError`` for a malformed name or ttl, its seq_id consumed; a name that is taken without
        ``overwrite`` fails the future."""
        model = await self._model(principal, model_id)
        with _consuming(model, seq_id):
            checkpoint = CheckpointName(model_id=model_id, type="weights", name=check_checkpoint_name(name))
            check_ttl(ttl_seconds)

        async def finish(outcome: asyncio.Future[Result]) -> Answer:
            ref = await _result(outcome, SnapshotRef)
            await self._save(model, ref, checkpoint, overwrite, ttl_seconds)
            return WeightsSaved(path=checkpoint.uri)

        command = Snapshot(model_id=model_id, seq_id=seq_id, kind="training")
        return await self._train(principal, command, "save_weights", finish)

    async def load_weights_new(
        self,
        principal: str,
        *,
        session_id: str,
        model_seq_id: int,
        path: str,
        optimizer: bool,
        base_model: str | None,
        user_metadata: Mapping[str, str] | None,
    ) -> Submitted:
        """A new model from a checkpoint, on the checkpoint's base with its LoRA configuration. Raises ``NotFound`` for
        a path that is not there, ``UserError`` for one on another base than ``base_model`` or than any served."""
        session = await self._session(principal, session_id)
        checkpoint = await self._open(principal, path)
        base = self._served(checkpoint.manifest.base, of=path)
        if base_model is not None and self._served(base_model) != base:
            raise UserError(f"{path} was trained on {base}, so it cannot be loaded into a model on {base_model}")
        source = _source(checkpoint, optimizer)
        return await self._create(
            session, model_seq_id, base, checkpoint.manifest.lora, source, user_metadata, "load_weights"
        )

    async def load_weights_into(
        self, principal: str, *, model_id: str, seq_id: int, path: str, optimizer: bool
    ) -> Submitted:
        """Only as a model's first request (seq_id 1), else ``UserError`` (400), the id consumed."""
        model = await self._model(principal, model_id)
        record = model.record if isinstance(model, _Model) else model
        with _consuming(model, seq_id):
            if seq_id != 1:
                raise UserError(
                    f"load_weights is seq_id {seq_id} of the model, expected 1: weights are loaded into a model only "
                    "before anything else is done with it; make a new model from the checkpoint"
                )
        try:
            checkpoint = await self._open(principal, path)
            base = self._served(checkpoint.manifest.base, of=path)
            if base != record.base:
                raise UserError(f"{path} was trained on {base}, so it cannot be loaded into a model on {record.base}")
            if _layout(checkpoint.manifest.lora) != _layout(record.lora):
                raise UserError(
                    f"{path} has {_describe(checkpoint.manifest.lora)}, the model has {_describe(record.lora)}"
                )
            source = _source(checkpoint, optimizer)
        except UserError as error:
            return await self.refuse(
                principal,
                model_id=model_id,
                seq_id=seq_id,
                operation="load_weights",
                message=error.message,
                loses_gradient=False,
            )

        async def finish(outcome: asyncio.Future[Result]) -> Answer:
            await _result(outcome, Loaded)
            return WeightsLoaded(path=path, model_id=model_id)

        command = LoadState(model_id=model_id, seq_id=seq_id, source=source)
        return await self._train(principal, command, "load_weights", finish)

    async def save_weights_for_sampler(
        self,
        principal: str,
        *,
        model_id: str,
        seq_id: int,
        name: str | None,
        sampling_session_seq_id: int | None,
        kind: SamplerKind | None,
        ttl_seconds: int | None,
    ) -> Submitted:
        """``name`` given: a checkpoint. Else ephemeral: a sampling session on a published row, no file; of an
        ``inflight`` one the requests, running ones too, go on with whatever of the model is published later."""
        model = await self._model(principal, model_id)
        record = model.record if isinstance(model, _Model) else model
        if name is not None:
            with _consuming(model, seq_id):
                checkpoint = CheckpointName(model_id=model_id, type="sampler_weights", name=check_checkpoint_name(name))
                check_ttl(ttl_seconds)

            async def finish_named(outcome: asyncio.Future[Result]) -> Answer:
                ref = await _result(outcome, SnapshotRef)
                await self._save(model, ref, checkpoint, False, ttl_seconds)
                return SamplerWeightsSaved(path=checkpoint.uri, sampling_session_id=None)

            command = Snapshot(model_id=model_id, seq_id=seq_id, kind="sampler")
            return await self._train(principal, command, "save_weights_for_sampler", finish_named)

        with _consuming(model, seq_id):
            if sampling_session_seq_id is None or sampling_session_seq_id < 0:
                raise UserError(
                    f"sampling_session_seq_id is {sampling_session_seq_id}, expected 0 or more where no path is given"
                )
        sampling_session_id = sampling_session_id_of(record.session_id, sampling_session_seq_id)

        async def finish_ephemeral(outcome: asyncio.Future[Result]) -> Answer:
            ref = await _result(outcome, SnapshotRef)
            await self._publish(record, ref, sampling_session_id, kind or self._settings.sampler_kind)
            return SamplerWeightsSaved(path=None, sampling_session_id=sampling_session_id)

        command = Snapshot(model_id=model_id, seq_id=seq_id, kind="sampler", for_disk=False)
        return await self._train(principal, command, "save_weights_for_sampler", finish_ephemeral)

    async def weights_info(self, principal: str, path: str) -> WeightsInfo:
        manifest = (await self._open(principal, path)).manifest
        return WeightsInfo(base_model=manifest.base, lora=manifest.lora)

    # ------------------------------------------------------------------------------------------------ sampling
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
        session = await self._session(principal, session_id)
        if sampling_session_seq_id < 0:
            raise UserError(f"sampling_session_seq_id is {sampling_session_seq_id}, expected 0 or more")
        version = None
        if model_path is not None:
            checkpoint = await self._open(principal, model_path)
            base = self._served(checkpoint.manifest.base, of=model_path)
            if base_model is not None and self._served(base_model) != base:
                raise UserError(f"{model_path} was trained on {base}, so it cannot be sampled on {base_model}")
            version = samplers.version_of(checkpoint)
        elif base_model is not None:
            base = self._served(base_model)
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
        session = await self._session(principal, sampler.session_id)
        base = self._served(sampler.base)
        self._check_sample(base, submission)
        key = FutureKey(kind="sample", scope=submission.sampling_session_id, seq_id=submission.seq_id)
        client = client_of(key)
        limit = self._settings.max_samples_in_flight
        if self._samples_in_flight[base] >= limit:
            raise Overloaded(f"{limit} sampling requests are in flight on {base}, which is as many as are taken")
        self._samples_in_flight[base] += 1

        def leave() -> None:
            self._samples_in_flight[base] -= 1

        def begin(request_id: str) -> None:
            job = Job(
                request_id=request_id,
                operation="sample",
                base=base,
                seq_id=submission.seq_id,
                client=client,
                on_end=leave,
            )
            self._jobs.start(self._jobs.add(job), self._sample(request_id, sampler, session, submission))

        request_id = await self._accept(
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

    # ------------------------------------------------------------------------------------------------ futures
    async def retrieve_future(self, principal: str, request_id: str, *, timeout_s: float) -> FutureState | Pending:
        """Waits up to ``timeout_s``. Raises ``NotFound`` for an id this principal does not own, ``Gone`` for a sampling
        request that was given up because nobody waited for it: who still wants it sends it again."""
        state = await self._future(principal, request_id)
        client = client_of(state.key)
        with self._presence.polling(client):
            session = self._sessions.get(client.session_id)
            if session is not None:
                session.last_seen = self._clock.monotonic()
            if state.encoded is None and timeout_s > 0:
                state = await self._futures.get(request_id, timeout_s=timeout_s)
        if request_id in self._given_up:
            raise Gone(f"request {request_id!r} was given up, since its client had gone; send it again")
        if state.encoded is not None:
            return state
        return Pending(request_id=request_id, queue_state="active", reason=self._reason(state))

    async def poll_broken_off(self, principal: str, request_id: str) -> None:
        """The client's side closed the connection on which it waited for this request; that wait is over."""
        state = await self._future(principal, request_id)
        self._presence.broken_off(client_of(state.key))

    async def cancel_future(self, principal: str, request_id: str) -> None:
        """Ends a sampling request, whose future fails; others run on, for what they do counts. Raises ``NotFound``."""
        await self._future(principal, request_id)
        job = self._jobs.get(request_id)
        if job is not None and job.client is not None:
            self._jobs.fail(job, UserError("the request was cancelled by its client"))

    async def _future(self, principal: str, request_id: str) -> FutureState:
        state = await self._futures.get(request_id)
        if state.owner != principal:  # before any waiting, whose length would tell that the id exists
            raise NotFound(f"no request {request_id!r}: it never was, or its answer is no longer kept")
        return state

    def _give_up(self, session_id: str, why: str, *, client: Client | None = None) -> None:
        """Ends a session's sampling requests, or those of one client of it, whose client is not there any more."""
        jobs = [
            job
            for job in self._jobs.where(lambda job: job.client is not None and job.client.session_id == session_id)
            if not job.ended and client in (None, job.client)
        ]
        for job in jobs:
            self._given_up[job.request_id] = None
            self._jobs.fail(job, ServerError(f"the request was given up: {why}"))
        while len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        if jobs:
            log.info("%d sampling requests were given up: %s", len(jobs), why)

    # ================================================================================================ looking up

    def _served(self, base_model: str, *, of: str | None = None) -> str:
        """The base's own name, for it or an alias. ``of``: the checkpoint whose base it is, for the message."""
        if base_model in self._bases:
            return self._bases[base_model]
        served = ", ".join(repr(name) for name in self._backends)
        if of is not None:
            raise UserError(f"{of} was trained on {base_model!r}, which is not served here; served: {served}")
        raise UserError(f"base_model is {base_model!r}, which is not served here; served: {served}")

    async def _session(self, principal: str, session_id: str) -> _Session:
        """An open session of this principal, which has hereby been heard of."""
        session = self._sessions.get(session_id)
        record = session.record if session is not None else await self._catalogue.session(session_id)
        if record is None or record.owner != principal:
            raise NotFound(f"no session {session_id!r}")
        if session is None or session.over is not None:
            raise Gone(f"session {session_id!r} is over: {record.end_reason or (session and session.over)}")
        session.last_seen = self._clock.monotonic()
        return session

    async def _model(self, principal: str, model_id: str) -> _Model | ModelRecord:
        """A live model, or the record of a lost one."""
        model = self._models.get(model_id)
        record = model.record if model is not None else await self._catalogue.model(model_id)
        if record is None or record.owner != principal:
            raise NotFound(f"no model {model_id!r}")
        if model is None and record.status != "lost":
            raise NotFound(f"model {model_id!r} is not there: {record.status_reason or 'it is being created'}")
        return model or record

    async def _sampler(self, principal: str, sampling_session_id: str) -> SamplingSessionRecord:
        sampler = self._samplers.get(sampling_session_id)
        if sampler is None:
            sampler = await self._catalogue.sampling_session(sampling_session_id)
        if sampler is None or sampler.owner != principal:
            raise NotFound(f"no sampling session {sampling_session_id!r}")
        return sampler

    async def _open(self, principal: str, path: str) -> Checkpoint:
        name = parse_path(path)
        missing = NotFound(f"no checkpoint {path}")
        try:
            checkpoint = await self._checkpoints.open(name)
        except NotFound:
            raise missing from None
        if checkpoint.manifest.owner != principal:
            raise missing
        return checkpoint

    # ================================================================================================ accepting

    async def _accept(
        self,
        *,
        key: FutureKey,
        owner: str,
        base: str,
        operation: str,
        begin: Callable[[str], None],
        not_begun: Callable[[], None] | None = None,
    ) -> str:
        """The future of a submission. ``begin`` is called with its id if it is new, and only then: of the same request
        sent twice, one begins. Client gone or not, what was promised is begun."""

        self._presence.sign(client_of(key))

        async def promise() -> str:
            new = False
            try:
                request_id, new = await self._futures.put(key=key, owner=owner, base=base, operation=operation)
            finally:
                if not new and not_begun is not None:
                    not_begun()
            if new:
                begin(request_id)
            return request_id

        return await asyncio.shield(self._jobs.spawn(promise()))

    async def _create(
        self,
        session: _Session,
        model_seq_id: int,
        base: str,
        lora: LoraConfig,
        source: CheckpointSource | None,
        user_metadata: Mapping[str, str] | None,
        operation: str,
    ) -> Submitted:
        if model_seq_id < 0:
            raise UserError(f"model_seq_id is {model_seq_id}, expected 0 or more")
        owner, session_id = session.record.owner, session.record.session_id
        model_id = model_id_of(session_id, model_seq_id)
        record = ModelRecord(
            model_id=model_id,
            session_id=session_id,
            owner=owner,
            base=base,
            created_at=self._clock.now(),
            lora=lora,
            source_uri=source.uri if source else None,
            user_metadata=user_metadata,
        )
        stands = await self._catalogue.add_model(record)

        def begin(request_id: str) -> None:
            job = self._jobs.add(Job(request_id=request_id, operation=operation, base=base, model_id=model_id))
            if stands.status != "live" or session.over is not None:
                reason = stands.status_reason or f"its session is over: {session.over}"
                self._jobs.fail(job, Lost(f"model {model_id!r} is not there any more: {reason}; create another"))
                return
            backend = self._backends[base]
            queue = ModelQueue(
                model_id=model_id,
                trainer=backend.trainer,
                jobs=self._jobs,
                clock=self._clock,
                hole_timeout_s=self._settings.hole_timeout_s,
            )
            model = self._models[model_id] = _Model(record=stands, backend=backend, queue=queue)
            command = CreateModel(model_id=model_id, lora=lora, source=source)
            self._jobs.start(job, self._created(model, queue.create(command), operation))

        request_id = await self._accept(
            key=FutureKey(kind="create", scope=session_id, seq_id=model_seq_id),
            owner=owner,
            base=base,
            operation=operation,
            begin=begin,
        )
        return Submitted(request_id=request_id, model_id=model_id)

    async def _created(self, model: _Model, outcome: asyncio.Future[Result], operation: str) -> Answer:
        model_id = model.record.model_id
        try:
            created = await _result(outcome, ModelCreated)
        except Exception as error:
            self._models.pop(model_id, None)
            model.queue.end("the model could not be created")
            await self._catalogue.set_model_status(model_id, "failed", reason=f"it could not be created: {error}")
            raise
        if operation == "load_weights":
            assert model.record.source_uri is not None
            return WeightsLoaded(path=model.record.source_uri, model_id=model_id)
        return created

    async def _train(
        self,
        principal: str,
        command: Command,
        operation: str,
        finish: Finish,
        *,
        num_tokens: int = 0,
        num_bytes: int = 0,
    ) -> Submitted:
        """Takes a request that has a place in its model's order."""
        model = await self._model(principal, command.model_id)
        record = model.record if isinstance(model, _Model) else model
        if command.seq_id < 1:
            raise UserError(f"seq_id is {command.seq_id}, expected 1 or more (0 is the model's creation)")
        if num_bytes:
            self._check_room(record, num_bytes)
        self._training_bytes[record.base] += num_bytes

        def leave() -> None:
            self._training_bytes[record.base] -= num_bytes

        def begin(request_id: str) -> None:
            job = Job(
                request_id=request_id,
                operation=operation,
                base=record.base,
                model_id=record.model_id,
                seq_id=command.seq_id,
                num_tokens=num_tokens,
                on_end=leave,
            )
            self._jobs.add(job)
            if isinstance(model, _Model) and not model.lost:
                model.queue.submit(command, job=job, finish=finish)
            else:
                self._jobs.start(job, self._raise_lost(record.model_id))

        request_id = await self._accept(
            key=FutureKey(kind="train", scope=record.model_id, seq_id=command.seq_id),
            owner=principal,
            base=record.base,
            operation=operation,
            begin=begin,
            not_begun=leave,
        )
        return Submitted(request_id=request_id, model_id=record.model_id)

    def _check_room(self, record: ModelRecord, num_bytes: int) -> None:
        """A request is turned away only while the trainer has one of its model: that one ends by itself. It would
        never be let in if those in its way waited for its seq_id."""
        queued, limit = self._training_bytes[record.base], self._settings.max_training_bytes
        if queued + num_bytes <= limit:
            return
        if self._jobs.where(lambda job: job.model_id == record.model_id and job.submitted):
            raise Overloaded(
                f"{num_bytes} bytes of training data beside the {queued} that {record.base} has are more than the "
                f"{limit} that it takes at a time"
            )

    # ================================================================================================ doing

    async def _save(
        self,
        model: _Model | ModelRecord,
        ref: SnapshotRef,
        name: CheckpointName,
        overwrite: bool,
        ttl_seconds: int | None,
    ) -> None:
        assert isinstance(model, _Model), "a lost model takes no snapshot"
        await self._saves.save(
            ref,
            name,
            trainer=model.backend.trainer,
            owner=model.record.owner,
            base=model.record.base,
            overwrite=overwrite,
            ttl_seconds=ttl_seconds,
        )

    async def _publish(self, model: ModelRecord, ref: SnapshotRef, sampling_session_id: str, kind: SamplerKind) -> None:
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
        self, request_id: str, sampler: SamplingSessionRecord, session: _Session, submission: SampleSubmission
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

    # ================================================================================================ losing

    async def _raise_lost(self, model_id: str) -> Answer:
        raise await self._resume.model(model_id)

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
            for model in self._models.values()
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
        self._publications[base].forget(None if models is None else versions)
        await self._catalogue.lose(base=base, reason=reason, models=models, versions=versions)
        errors = {model.record.model_id: await self._resume.model(model.record.model_id) for model in lost}
        for job in jobs:
            self._jobs.fail(job, error or errors.get(job.model_id or "") or Lost(reason))
        for model in lost:
            self._models.pop(model.record.model_id, None)
            model.queue.end(reason)
            if error is not None:  # the trainer is still there, and may yet come to itself
                model.queue.delete()

    # ================================================================================================ in time

    async def _end_session(self, session_id: str, reason: str) -> None:
        session = self._sessions[session_id]
        if session.over is not None:
            return
        session.over = reason
        models = [model for model in self._models.values() if model.record.session_id == session_id]
        for model in models:
            model.queue.end(f"its session ended: {reason}")
        try:
            await self._catalogue.end_session(session_id, ended_at=self._clock.now(), reason=reason)
        finally:
            del self._sessions[session_id]
            for model in models:
                self._models.pop(model.record.model_id, None)
            for sampling_session_id in session.samplers:
                self._samplers.pop(sampling_session_id, None)
            self._jobs.spawn(self._clean_up(session, models))

    async def _clean_up(self, session: _Session, models: Sequence[_Model]) -> None:
        """When what they were asked before has ended (a save is still being written), models and versions go."""
        ids = {model.record.model_id for model in models}
        tasks = [job.task for job in self._jobs.where(lambda job: job.model_id in ids) if job.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        for model in models:
            if not model.lost:
                model.queue.delete()
        for publications in self._publications.values():
            await publications.leave(session.samplers)

    async def _sweep_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self._settings.sweep_interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Ends whatever is over its time. Called by itself all the time; one part's failure stops no other."""
        now = self._clock.monotonic()
        for model in list(self._models.values()):
            model.queue.expire()
        for session_id, session in list(self._sessions.items()):
            if self._presence.polls(session_id):
                session.last_seen = now
            idle_s = now - session.last_seen
            if idle_s > self._settings.vanish_timeout_s:
                self._give_up(session_id, f"nothing was heard of its client for {idle_s:.0f} s")
            if idle_s > self._settings.session_timeout_s:
                await _logged(self._end_session(session_id, f"nothing was heard of it for {idle_s:.0f} s"))
        for base in self._backends:
            idle_s = self._jobs.idle_s(base)
            if idle_s > self._settings.stall_timeout_s:
                why = f"{base} has ended no request in {idle_s:.0f} s and was given up"
                await _logged(self._lose(base, why, ServerError(why)))
        if now - self._last_prune >= self._settings.prune_interval_s:
            self._last_prune = now
            await _logged(self._futures.prune(finished_before=self._clock.now() - self._settings.keep_finished_s))
            await _logged(self._saves.delete_expired())

    def _reason(self, state: FutureState) -> str:
        job = self._jobs.get(state.request_id)
        if job is None:
            return f"{state.operation} is about to end"
        model = self._models.get(job.model_id) if job.model_id is not None else None
        waits_for_id = model.queue.reason(job) if model is not None else None
        if waits_for_id is not None:
            return waits_for_id
        backend = self._backends.get(job.base)
        running = backend.trainer.running() if backend is not None and isinstance(backend.trainer, Progress) else ""
        return self._jobs.reason(job) + (f"; now runs {running}" if running else "")


# --------------------------------------------------------------------------------------------------------------------


async def _result(outcome: asyncio.Future[Result], expected: type[R]) -> R:
    """The trainer's answer. Whoever stops waiting for it does not take it from the trainer."""
    result = await asyncio.shield(outcome)
    if not isinstance(result, expected):
        raise ServerError(f"the trainer answered with {type(result).__name__}, expected {expected.__name__}")
    return result


async def _logged(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:
        log.exception("a part of the service's sweep failed")


@contextmanager
def _consuming(model: _Model | ModelRecord, seq_id: int) -> Iterator[None]:
    """A ``UserError`` raised in here refuses the request at once: its id is consumed, nothing waits for it."""
    try:
        yield
    except UserError as error:
        if isinstance(model, _Model) and not model.lost:
            model.queue.consume(seq_id, error.message)
        raise


def _source(checkpoint: Checkpoint, optimizer: bool) -> CheckpointSource:
    if optimizer and not checkpoint.manifest.has_optimizer:
        raise UserError(f"{checkpoint.name.uri} holds no optimiser state; load it with optimizer false")
    return CheckpointSource(uri=checkpoint.name.uri, directory=checkpoint.directory, optimizer=optimizer)


def _layout(lora: LoraConfig) -> LoraConfig:
    return replace(lora, seed=None)


def _num_bytes(command: ForwardBackward) -> int:
    """Of its arrays."""
    return sum(
        sum(chunk.tokens.nbytes for chunk in datum.model_input)
        + sum(array.nbytes for array in datum.loss_fn_inputs.values())
        for datum in command.data
    )


def _describe(lora: LoraConfig) -> str:
    chosen = [name for name in ("train_attn", "train_mlp", "train_unembed") if getattr(lora, name)]
    return f"rank {lora.rank} with {', '.join(chosen)}"


def _taken(sampling_session_id: str) -> str:
    return f"{sampling_session_id!r} is a sampling session already, of other weights; take the next number"
