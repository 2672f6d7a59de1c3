"""Training: models, the requests that have a place in a model's order, and the weights they save and load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from descant.errors import Lost, NotFound, Overloaded, ServerError, UserError
from descant.ports import Clock
from descant.service.backends import Backend, Backends
from descant.service.catalogue import Catalogue, ModelRecord
from descant.service.jobs import Job, Jobs
from descant.service.names import check_checkpoint_name, model_id_of, sampling_session_id_of
from descant.service.promises import Promises, Submitted
from descant.service.queue import Finish, ModelQueue
from descant.service.resume import Resume
from descant.service.sampling import Sampling
from descant.service.saves import Saves, check_ttl
from descant.service.sessions import Session, Sessions
from descant.service.settings import ServiceSettings
from descant.types import (
    MAX_RANK,
    Answer,
    Checkpoint,
    CheckpointName,
    CheckpointSource,
    Command,
    CreateModel,
    ForwardBackward,
    ForwardBackwardOutput,
    FutureKey,
    Loaded,
    LoadState,
    LoraConfig,
    ModelCreated,
    ModelFacts,
    OptimStep,
    OptimStepOutput,
    Refused,
    Result,
    SamplerKind,
    SamplerWeightsSaved,
    Snapshot,
    SnapshotRef,
    WeightsLoaded,
    WeightsSaved,
    input_length,
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    model_id: str
    facts: ModelFacts
    lora: LoraConfig
    user_metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInfo:
    base_model: str
    lora: LoraConfig


@dataclass(slots=True, eq=False)
class Model:
    """A model that a trainer has, in memory. ``lost``: it had."""

    record: ModelRecord
    backend: Backend
    queue: ModelQueue
    lost: bool = False


class Training:
    """Owns the models that trainers have, each with its queue, and how much data waits for them. Models are made
    here; when one ends with its session or its process, the service says so."""

    def __init__(
        self,
        *,
        backends: Backends,
        sessions: Sessions,
        promises: Promises,
        jobs: Jobs,
        saves: Saves,
        resume: Resume,
        sampling: Sampling,
        catalogue: Catalogue,
        clock: Clock,
        settings: ServiceSettings,
    ):
        """``sampling`` takes the weights that are saved for it without a file."""
        self._backends = backends
        self._sessions = sessions
        self._promises = promises
        self._jobs = jobs
        self._saves = saves
        self._resume = resume
        self._sampling = sampling
        self._catalogue = catalogue
        self._clock = clock
        self._settings = settings
        self._models: dict[str, Model] = {}
        self._training_bytes = dict.fromkeys(backends, 0)

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
        session = await self._sessions.find(principal, session_id)
        base = self._backends.served(base_model)
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
        record = model.record if isinstance(model, Model) else model
        base = self._backends.served(record.base)
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
        session = await self._sessions.find(principal, session_id)
        checkpoint = await self._saves.open(principal, path)
        base = self._backends.served(checkpoint.manifest.base, of=path)
        if base_model is not None and self._backends.served(base_model) != base:
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
        record = model.record if isinstance(model, Model) else model
        with _consuming(model, seq_id):
            if seq_id != 1:
                raise UserError(
                    f"load_weights is seq_id {seq_id} of the model, expected 1: weights are loaded into a model only "
                    "before anything else is done with it; make a new model from the checkpoint"
                )
        try:
            checkpoint = await self._saves.open(principal, path)
            base = self._backends.served(checkpoint.manifest.base, of=path)
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
        record = model.record if isinstance(model, Model) else model
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
            await self._sampling.publish(record, ref, sampling_session_id, kind or self._settings.sampler_kind)
            return SamplerWeightsSaved(path=None, sampling_session_id=sampling_session_id)

        command = Snapshot(model_id=model_id, seq_id=seq_id, kind="sampler", for_disk=False, to_publish=True)
        return await self._train(principal, command, "save_weights_for_sampler", finish_ephemeral)

    async def weights_info(self, principal: str, path: str) -> WeightsInfo:
        manifest = (await self._saves.open(principal, path)).manifest
        return WeightsInfo(base_model=manifest.base, lora=manifest.lora)

    # ------------------------------------------------------------------------------------------------ all models
    def get(self, model_id: str) -> Model | None:
        """One that a trainer has, whoever owns it."""
        return self._models.get(model_id)

    def models(self) -> Sequence[Model]:
        """All that trainers have."""
        return list(self._models.values())

    def remove(self, model: Model) -> None:
        """It is over or lost, and found in the catalogue alone from now on. Its queue is the caller's to end."""
        self._models.pop(model.record.model_id, None)

    def expire(self) -> None:
        """Closes the holes in models' orders whose time is over."""
        for model in self.models():
            model.queue.expire()

    # ================================================================================================ doing

    async def _model(self, principal: str, model_id: str) -> Model | ModelRecord:
        """A live model, or the record of a lost one."""
        model = self._models.get(model_id)
        record = model.record if model is not None else await self._catalogue.model(model_id)
        if record is None or record.owner != principal:
            raise NotFound(f"no model {model_id!r}")
        if model is None and record.status != "lost":
            raise NotFound(f"model {model_id!r} is not there: {record.status_reason or 'it is being created'}")
        return model or record

    async def _create(
        self,
        session: Session,
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
            model = self._models[model_id] = Model(record=stands, backend=backend, queue=queue)
            command = CreateModel(model_id=model_id, lora=lora, source=source)
            self._jobs.start(job, self._created(model, queue.create(command), operation))

        request_id = await self._promises.accept(
            key=FutureKey(kind="create", scope=session_id, seq_id=model_seq_id),
            owner=owner,
            base=base,
            operation=operation,
            begin=begin,
        )
        return Submitted(request_id=request_id, model_id=model_id)

    async def _created(self, model: Model, outcome: asyncio.Future[Result], operation: str) -> Answer:
        model_id = model.record.model_id
        try:
            created = await _result(outcome, ModelCreated)
        except Exception as error:
            self.remove(model)
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
        record = model.record if isinstance(model, Model) else model
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
            if isinstance(model, Model) and not model.lost:
                model.queue.submit(command, job=job, finish=finish)
            else:
                self._jobs.start(job, self._raise_lost(record.model_id))

        request_id = await self._promises.accept(
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

    async def _save(
        self,
        model: Model | ModelRecord,
        ref: SnapshotRef,
        name: CheckpointName,
        overwrite: bool,
        ttl_seconds: int | None,
    ) -> None:
        assert isinstance(model, Model), "a lost model takes no snapshot"
        await self._saves.save(
            ref,
            name,
            trainer=model.backend.trainer,
            owner=model.record.owner,
            base=model.record.base,
            overwrite=overwrite,
            ttl_seconds=ttl_seconds,
        )

    async def _raise_lost(self, model_id: str) -> Answer:
        raise await self._resume.model(model_id)


async def _result(outcome: asyncio.Future[Result], expected: type[R]) -> R:
    """The trainer's answer. Whoever stops waiting for it does not take it from the trainer."""
    result = await asyncio.shield(outcome)
    if not isinstance(result, expected):
        raise ServerError(f"the trainer answered with {type(result).__name__}, expected {expected.__name__}")
    return result


@contextmanager
def _consuming(model: Model | ModelRecord, seq_id: int) -> Iterator[None]:
    """A ``UserError`` raised in here refuses the request at once: its id is consumed, nothing waits for it."""
    try:
        yield
    except UserError as error:
        if isinstance(model, Model) and not model.lost:
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
