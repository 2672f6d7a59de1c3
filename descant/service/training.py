"""Training: the requests that have a place in a model's order, and the weights that they save and load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from descant.errors import CannotStore, RankDied, UserError
from descant.service.backends import Backends
from descant.service.command_queue import Finish, result_of
from descant.service.futures import FutureService, Submitted
from descant.service.jobs import Job, Jobs
from descant.service.models import LiveModel, Models
from descant.service.names import check_checkpoint_name, sampling_session_id_of
from descant.service.registry import ModelRecord
from descant.service.resume import Resume
from descant.service.sampling import Sampling
from descant.service.saves import Saves, check_ttl, source_of
from descant.service.settings import ServiceSettings
from descant.service.training_admission import REQUEST_BYTES, Admitted, TrainingAdmission, held_bytes
from descant.types import (
    Answer,
    CheckpointName,
    Command,
    ForwardBackward,
    ForwardBackwardOutput,
    FutureKey,
    Loaded,
    LoadState,
    ModelFacts,
    OptimStep,
    OptimStepOutput,
    Rejected,
    Result,
    SamplerKind,
    SamplerWeightsSaved,
    Snapshot,
    SnapshotRef,
    Trainable,
    WeightsLoaded,
    WeightsSaved,
    describe,
    input_length,
    same_shape,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    model_id: str
    facts: ModelFacts
    trainable: Trainable
    user_metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInfo:
    base_model: str
    trainable: Trainable


class Training:
    """Takes requests that have a place in a model's order, and owns how much data waits for trainers."""

    def __init__(
        self,
        *,
        backends: Backends,
        models: Models,
        futures: FutureService,
        jobs: Jobs,
        saves: Saves,
        resume: Resume,
        sampling: Sampling,
        settings: ServiceSettings,
    ):
        """``sampling`` takes the weights that are saved for it without a file."""
        self._backends = backends
        self._models = models
        self._futures = futures
        self._jobs = jobs
        self._saves = saves
        self._resume = resume
        self._sampling = sampling
        self._settings = settings
        self.admission = {base: TrainingAdmission(base, max_bytes=settings.max_training_bytes) for base in backends}

    # ------------------------------------------------------------------------------------------------ models
    async def get_info(self, principal: str, model_id: str) -> ModelInfo:
        """Also of a model that is lost."""
        model = await self._models.find(principal, model_id)
        record = model.record if isinstance(model, LiveModel) else model
        base = self._backends.served(record.base)
        return ModelInfo(
            model_id=model_id,
            facts=self._backends[base].facts,
            trainable=record.trainable,
            user_metadata=record.user_metadata or {},
        )

    async def forward_backward(self, principal: str, command: ForwardBackward) -> Submitted:
        """Raises ``Overloaded``, as whatever has a place in a model's order: its seq_id is not consumed."""

        async def finish(outcome: asyncio.Future[Result]) -> Answer:
            return await result_of(outcome, ForwardBackwardOutput)

        num_tokens = sum(input_length(datum.model_input) for datum in command.data)
        operation = "forward" if command.forward_only else "forward_backward"
        return await self._train(
            principal, command, operation, finish, num_tokens=num_tokens, num_bytes=held_bytes(command)
        )

    async def optim_step(self, principal: str, command: OptimStep) -> Submitted:
        async def finish(outcome: asyncio.Future[Result]) -> Answer:
            return await result_of(outcome, OptimStepOutput)

        return await self._train(principal, command, "optim_step", finish)

    async def refuse(
        self, principal: str, *, model_id: str, seq_id: int, operation: str, message: str, poisons_gradient: bool
    ) -> Submitted:
        """A request whose body is wrong but whose place is known: its future fails in order with ``message``."""
        command = Rejected(model_id=model_id, seq_id=seq_id, message=message, poisons_gradient=poisons_gradient)

        async def finish(_outcome: asyncio.Future[Result]) -> Answer:
            raise UserError(message)

        return await self._train(principal, command, operation, finish)

    # ------------------------------------------------------------------------------------------------ weights
    async def save_weights(
        self, principal: str, *, model_id: str, seq_id: int, name: str, overwrite: bool, ttl_seconds: int | None
    ) -> Submitted:
        """Raises ``UserError`` for a malformed name or ttl, its seq_id consumed; a name that is taken without
        ``overwrite`` fails the future."""
        model = await self._models.find(principal, model_id)
        with _consuming(model, seq_id):
            checkpoint = CheckpointName(model_id=model_id, type="weights", name=check_checkpoint_name(name))
            check_ttl(ttl_seconds)

        async def finish(outcome: asyncio.Future[Result]) -> Answer:
            ref = await result_of(outcome, SnapshotRef)
            await self._save(model, ref, checkpoint, overwrite, ttl_seconds)
            return WeightsSaved(path=checkpoint.uri, has_pending_gradient=ref.has_pending_gradient)

        command = Snapshot(model_id=model_id, seq_id=seq_id, kind="training")
        return await self._train(principal, command, "save_weights", finish)

    async def load_weights_into(
        self, principal: str, *, model_id: str, seq_id: int, path: str, optimizer: bool
    ) -> Submitted:
        """Only as a model's first request (seq_id 1), else ``UserError`` (400), the id consumed."""
        model = await self._models.find(principal, model_id)
        record = model.record if isinstance(model, LiveModel) else model
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
            trainable = checkpoint.manifest.trainable
            if not same_shape(trainable, record.trainable):
                raise UserError(f"{path} has {describe(trainable)}, the model has {describe(record.trainable)}")
            source = source_of(checkpoint, optimizer)
        except UserError as error:
            return await self.refuse(
                principal,
                model_id=model_id,
                seq_id=seq_id,
                operation="load_weights",
                message=error.message,
                poisons_gradient=False,
            )

        async def finish(outcome: asyncio.Future[Result]) -> Answer:
            await result_of(outcome, Loaded)
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
        """``name`` given: a checkpoint. Else ephemeral: a sampling session on a published version that no file is kept
        of; of an ``inflight`` one the requests, running ones too, go on with whatever of the model is published later.
        """
        model = await self._models.find(principal, model_id)
        record = model.record if isinstance(model, LiveModel) else model
        if name is not None:
            with _consuming(model, seq_id):
                checkpoint = CheckpointName(model_id=model_id, type="sampler_weights", name=check_checkpoint_name(name))
                check_ttl(ttl_seconds)

            async def finish_named(outcome: asyncio.Future[Result]) -> Answer:
                ref = await result_of(outcome, SnapshotRef)
                await self._save(model, ref, checkpoint, False, ttl_seconds)
                return SamplerWeightsSaved(path=checkpoint.uri, sampling_session_id=None)

            command = Snapshot(model_id=model_id, seq_id=seq_id, kind="sampler")
            return await self._train(principal, command, "save_weights_for_sampler", finish_named)

        with _consuming(model, seq_id):
            if sampling_session_seq_id is None or sampling_session_seq_id < 0:
                raise UserError(
                    f"sampling_session_seq_id is {sampling_session_seq_id}, expected 0 or more where no path is given"
                )
            self._backends[record.base].check_samples(record.trainable, of=f"model {model_id!r}")
        sampling_session_id = sampling_session_id_of(record.session_id, sampling_session_seq_id)

        async def finish_ephemeral(outcome: asyncio.Future[Result]) -> Answer:
            ref = await result_of(outcome, SnapshotRef)
            await self._sampling.publish(record, ref, sampling_session_id, kind or self._settings.sampler_kind)
            return SamplerWeightsSaved(path=None, sampling_session_id=sampling_session_id)

        is_row = self._backends[record.base].engine.capabilities.shares_rows
        command = Snapshot(model_id=model_id, seq_id=seq_id, kind="sampler", for_disk=not is_row, to_publish=is_row)
        return await self._train(principal, command, "save_weights_for_sampler", finish_ephemeral)

    async def weights_info(self, principal: str, path: str) -> WeightsInfo:
        manifest = (await self._saves.open(principal, path)).manifest
        return WeightsInfo(base_model=manifest.base, trainable=manifest.trainable)

    # ================================================================================================ doing

    async def _train(
        self,
        principal: str,
        command: Command,
        operation: str,
        finish: Finish,
        *,
        num_tokens: int = 0,
        num_bytes: int = REQUEST_BYTES,
    ) -> Submitted:
        """Takes a request that has a place in its model's order."""
        model = await self._models.find(principal, command.model_id)
        record = model.record if isinstance(model, LiveModel) else model
        if command.seq_id < 1:
            raise UserError(f"seq_id is {command.seq_id}, expected 1 or more (0 is the model's creation)")
        admission = self.admission[record.base]
        admitted = self._admit(admission, model, command.seq_id, num_bytes)

        async def named(outcome: asyncio.Future[Result]) -> Answer:
            try:
                return await finish(outcome)
            except RankDied as died:  # with everything that it held
                raise await self._resume.model(record.model_id, died) from None

        def begin(request_id: str) -> None:
            job = Job(
                request_id=request_id,
                operation=operation,
                base=record.base,
                owner=record.owner,
                model_id=record.model_id,
                seq_id=command.seq_id,
                num_tokens=num_tokens,
                on_submit=lambda: admission.submitted(admitted),
                on_end=lambda: admission.release(admitted),
            )
            self._jobs.add(job)
            if isinstance(model, LiveModel) and not model.lost:
                model.queue.submit(command, job=job, finish=named)
                self._models.waits(model)
            else:
                self._jobs.start(job, self._raise_lost(record.model_id))

        try:
            request_id = await self._futures.accept(
                key=FutureKey(kind="train", scope=record.model_id, seq_id=command.seq_id),
                owner=principal,
                base=record.base,
                operation=operation,
                begin=begin,
                not_begun=lambda: admission.release(admitted),
            )
        except CannotStore as error:  # it gets the error, and does not come again: nothing must wait for its id
            if isinstance(model, LiveModel) and not model.lost:
                poisons = isinstance(command, ForwardBackward) and not command.forward_only
                poisons = poisons or (isinstance(command, Rejected) and command.poisons_gradient)
                model.queue.consume(command.seq_id, error.message, poisons_gradient=poisons)
            raise
        return Submitted(request_id=request_id, model_id=record.model_id)

    def _admit(
        self, admission: TrainingAdmission, model: LiveModel | ModelRecord, seq_id: int, num_bytes: int
    ) -> Admitted:
        """Raises ``Overloaded`` for a request for which there is no room now."""
        record = model.record if isinstance(model, LiveModel) else model
        if not isinstance(model, LiveModel) or model.lost or model.queue.knows(seq_id):
            return admission.admit_known(record.owner, record.model_id, num_bytes)
        return admission.admit(record.owner, record.model_id, num_bytes, is_next=seq_id == model.queue.next_seq_id)

    async def _save(
        self,
        model: LiveModel | ModelRecord,
        ref: SnapshotRef,
        name: CheckpointName,
        overwrite: bool,
        ttl_seconds: int | None,
    ) -> None:
        assert isinstance(model, LiveModel), "a lost model takes no snapshot"
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


@contextmanager
def _consuming(model: LiveModel | ModelRecord, seq_id: int) -> Iterator[None]:
    """A ``UserError`` raised in here refuses the request at once: its id is consumed, nothing waits for it."""
    try:
        yield
    except UserError as error:
        if isinstance(model, LiveModel) and not model.lost:
            model.queue.consume(seq_id, error.message)
        raise
