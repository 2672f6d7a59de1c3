"""Training: the requests that have a place in a model's order, and the weights that they save and load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from descant.errors import CannotStore, QuotaExceeded, ServerError, UserError
from descant.service.backends import Backends
from descant.service.command_queue import Finish, poisons_gradient, result_of
from descant.service.futures import FutureService, Submitted
from descant.service.jobs import Job, Jobs
from descant.service.journal import Journal
from descant.service.models import LiveModel, Models
from descant.service.names import check_checkpoint_name, sampling_session_id_of
from descant.service.quotas import Quotas
from descant.service.registry import ModelRecord
from descant.service.resume import Resume
from descant.service.sampling import Sampling
from descant.service.saves import Saves, check_ttl, digest_of, source_of
from descant.service.settings import ServiceSettings
from descant.service.training_admission import REQUEST_BYTES, Admitted, TrainingAdmission, held_bytes
from descant.types import (
    AdamParams,
    Answer,
    CheckpointName,
    CheckpointType,
    Command,
    CommandRecord,
    ForwardBackward,
    ForwardBackwardOutput,
    FutureKey,
    Loaded,
    LoadState,
    ModelFacts,
    OptimStep,
    OptimStepOutput,
    Rejected,
    RequestBody,
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
        journal: Journal,
        quotas: Quotas,
        decode: Callable[[RequestBody], ForwardBackward],
        settings: ServiceSettings,
    ):
        """``sampling`` takes the weights that are saved for it without a file. ``decode``: a body that was decoded
        before."""
        self._backends = backends
        self._models = models
        self._futures = futures
        self._jobs = jobs
        self._saves = saves
        self._resume = resume
        self._sampling = sampling
        self._journal = journal
        self._quotas = quotas
        self._decode = decode
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

    async def forward_backward(self, principal: str, command: ForwardBackward, body: RequestBody) -> Submitted:
        """``body``: what ``command`` was decoded from. Raises ``Overloaded``, as whatever has a place in a model's
        order: its seq_id is not consumed."""
        record = CommandRecord(
            model_id=command.model_id,
            seq_id=command.seq_id,
            operation="forward" if command.forward_only else "forward_backward",
            body=body,
            num_bytes=len(body.data),
        )
        num_tokens = sum(input_length(datum.model_input) for datum in command.data)
        try:
            self._quotas.check_journal(self._journal.num_bytes(principal), record.num_bytes)
        except QuotaExceeded as error:
            return await self.refuse(
                principal,
                model_id=record.model_id,
                seq_id=record.seq_id,
                operation=record.operation,
                message=error.message,
                poisons_gradient=not command.forward_only,
            )
        return await self._train(principal, command, record, num_tokens=num_tokens, num_bytes=held_bytes(command))

    async def optim_step(self, principal: str, command: OptimStep) -> Submitted:
        record = CommandRecord(
            model_id=command.model_id,
            seq_id=command.seq_id,
            operation="optim_step",
            arguments=asdict(command.adam_params),
        )
        return await self._train(principal, command, record)

    async def refuse(
        self, principal: str, *, model_id: str, seq_id: int, operation: str, message: str, poisons_gradient: bool
    ) -> Submitted:
        """A request whose body is wrong but whose place is known: its future fails in order with ``message``."""
        command = Rejected(model_id=model_id, seq_id=seq_id, message=message, poisons_gradient=poisons_gradient)
        return await self._train(principal, command, rejection(command, operation))

    # ------------------------------------------------------------------------------------------------ weights
    async def save_weights(
        self, principal: str, *, model_id: str, seq_id: int, name: str, overwrite: bool, ttl_seconds: int | None
    ) -> Submitted:
        """Raises ``UserError`` for a malformed name or ttl, its seq_id consumed; a name that is taken without
        ``overwrite`` fails the future."""
        model = await self._models.find(principal, model_id)
        async with self._consuming(model, seq_id):
            check_checkpoint_name(name)
            check_ttl(ttl_seconds)
        record = CommandRecord(
            model_id=model_id,
            seq_id=seq_id,
            operation="save_weights",
            arguments={"name": name, "overwrite": overwrite, "ttl_seconds": ttl_seconds},
        )
        return await self._train(principal, Snapshot(model_id=model_id, seq_id=seq_id, kind="training"), record)

    async def load_weights_into(
        self, principal: str, *, model_id: str, seq_id: int, path: str, optimizer: bool
    ) -> Submitted:
        """Only as a model's first request (seq_id 1), else ``UserError`` (400), the id consumed."""
        model = await self._models.find(principal, model_id)
        record = model.record if isinstance(model, LiveModel) else model
        async with self._consuming(model, seq_id):
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
        if isinstance(model, LiveModel):
            model.loads = True
        arguments = {"path": path, "optimizer": optimizer, "digest": digest_of(checkpoint.manifest)}
        written = CommandRecord(model_id=model_id, seq_id=seq_id, operation="load_weights", arguments=arguments)
        return await self._train(principal, LoadState(model_id=model_id, seq_id=seq_id, source=source), written)

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
        arguments: dict[str, Any]
        async with self._consuming(model, seq_id):
            if name is not None:
                arguments = {"name": check_checkpoint_name(name), "ttl_seconds": check_ttl(ttl_seconds)}
            elif sampling_session_seq_id is None or sampling_session_seq_id < 0:
                raise UserError(
                    f"sampling_session_seq_id is {sampling_session_seq_id}, expected 0 or more where no path is given"
                )
            else:
                self._backends[record.base].check_samples(record.trainable, of=f"model {model_id!r}")
                kind = kind or self._settings.sampler_kind
                arguments = {"sampling_session_seq_id": sampling_session_seq_id, "kind": kind}
        written = CommandRecord(
            model_id=model_id, seq_id=seq_id, operation="save_weights_for_sampler", arguments=arguments
        )
        return await self._train(principal, self._sampler_snapshot(record, written), written)

    async def weights_info(self, principal: str, path: str) -> WeightsInfo:
        manifest = (await self._saves.open(principal, path)).manifest
        return WeightsInfo(base_model=manifest.base, trainable=manifest.trainable)

    # ------------------------------------------------------------------------------------------------ again
    async def command(self, model: ModelRecord, record: CommandRecord) -> Command:
        """What a record asked for, as it did the first time. Raises ``DescantError`` where it cannot be had any more:
        a checkpoint that is another by now."""
        place: dict[str, Any] = {"model_id": record.model_id, "seq_id": record.seq_id}
        arguments = record.arguments
        if is_rejection(record):
            return Rejected(**place, message=arguments["rejected"], poisons_gradient=arguments["poisons_gradient"])
        match record.operation:
            case "forward" | "forward_backward":
                assert record.body is not None
                return await asyncio.to_thread(self._decode, record.body)
            case "optim_step":
                return OptimStep(**place, adam_params=AdamParams(**arguments))
            case "save_weights":
                return Snapshot(**place, kind="training")
            case "save_weights_for_sampler":
                return self._sampler_snapshot(model, record)
            case "load_weights":
                checkpoint = await self._saves.same(arguments["path"], arguments["digest"])
                return LoadState(**place, source=source_of(checkpoint, arguments["optimizer"]))
        raise ServerError(f"the journal has the operation {record.operation!r}, which this version does not know")

    def finish(self, model: ModelRecord, record: CommandRecord) -> Finish:
        """From the trainer's result to the client's answer; also for one that an earlier server had taken."""
        arguments = record.arguments

        async def answered(outcome: asyncio.Future[Result]) -> Answer:
            if is_rejection(record):
                raise UserError(arguments["rejected"])
            match record.operation:
                case "forward" | "forward_backward":
                    return await result_of(outcome, ForwardBackwardOutput)
                case "optim_step":
                    return await result_of(outcome, OptimStepOutput)
                case "load_weights":
                    await result_of(outcome, Loaded)
                    return WeightsLoaded(path=arguments["path"], model_id=record.model_id)
            ref = await result_of(outcome, SnapshotRef)
            if "sampling_session_seq_id" in arguments:
                sampling_session_id = sampling_session_id_of(model.session_id, arguments["sampling_session_seq_id"])
                await self._sampling.publish(model, ref, sampling_session_id, arguments["kind"])
                return SamplerWeightsSaved(path=None, sampling_session_id=sampling_session_id)
            training = record.operation == "save_weights"
            type_: CheckpointType = "weights" if training else "sampler_weights"
            name = CheckpointName(model_id=record.model_id, type=type_, name=arguments["name"])
            await self._saves.save(
                ref,
                name,
                trainer=self._backends[model.base].trainer,
                owner=model.owner,
                base=model.base,
                overwrite=arguments.get("overwrite", False),
                ttl_seconds=arguments["ttl_seconds"],
            )
            if training:
                return WeightsSaved(path=name.uri, has_pending_gradient=ref.has_pending_gradient)
            return SamplerWeightsSaved(path=name.uri, sampling_session_id=None)

        return answered

    def job(
        self,
        model: ModelRecord,
        record: CommandRecord,
        request_id: str,
        *,
        num_tokens: int = 0,
        admitted: Admitted | None = None,
    ) -> Job:
        """A request that was taken. ``admitted`` None: an earlier server took it, and it counts from now on."""
        admission = self.admission[model.base]
        entry = admitted or admission.admit_known(model.owner, model.model_id, REQUEST_BYTES + record.num_bytes)
        return self._jobs.add(
            Job(
                request_id=request_id,
                operation=record.operation,
                base=model.base,
                owner=model.owner,
                model_id=model.model_id,
                seq_id=record.seq_id,
                num_tokens=num_tokens,
                on_submit=lambda: admission.submitted(entry),
                on_end=lambda: admission.release(entry),
            )
        )

    # ================================================================================================ doing

    async def _train(
        self,
        principal: str,
        command: Command,
        written: CommandRecord,
        *,
        num_tokens: int = 0,
        num_bytes: int = REQUEST_BYTES,
    ) -> Submitted:
        """Takes a request that has a place in its model's order. ``written``: what ``command`` is made from again."""
        model = await self._models.find(principal, command.model_id)
        record = model.record if isinstance(model, LiveModel) else model
        if command.seq_id < 1:
            raise UserError(f"seq_id is {command.seq_id}, expected 1 or more (0 is the model's creation)")
        admission = self.admission[record.base]
        admitted = self._admit(admission, model, command.seq_id, num_bytes)
        live = model if isinstance(model, LiveModel) and not model.lost else None
        is_kept = live is not None and not live.queue.knows(command.seq_id)

        def begin(request_id: str) -> None:
            job = self.job(record, written, request_id, num_tokens=num_tokens, admitted=admitted)
            if isinstance(model, LiveModel) and not model.lost:
                if is_kept:
                    self._journal.count(written, owner=record.owner, base=record.base)
                model.queue.submit(
                    command,
                    job=job,
                    finish=self.finish(record, replace(written, body=None)),
                    num_bytes=written.num_bytes,
                )
                self._models.waits(model)
            else:
                self._jobs.start(job, self._raise_lost(record.model_id))

        def not_begun() -> None:
            admission.release(admitted)
            if written.file is not None:
                self._jobs.spawn(self._journal.without_file(written))

        try:
            try:
                written = await self._journal.with_file(written) if is_kept else written
            except BaseException:
                not_begun()
                raise
            request_id = await self._futures.accept(
                key=FutureKey(kind="train", scope=record.model_id, seq_id=command.seq_id),
                owner=principal,
                base=record.base,
                operation=written.operation,
                begin=begin,
                not_begun=not_begun,
                command=written if is_kept else None,
            )
        except CannotStore as error:  # it gets the error, and does not come again: nothing must wait for its id
            if isinstance(model, LiveModel) and not model.lost:
                model.queue.consume(command.seq_id, error.message, poisons_gradient=poisons_gradient(command))
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

    def _sampler_snapshot(self, model: ModelRecord, record: CommandRecord) -> Snapshot:
        is_row = "name" not in record.arguments and self._backends[model.base].engine.capabilities.shares_rows
        return Snapshot(
            model_id=record.model_id, seq_id=record.seq_id, kind="sampler", for_disk=not is_row, to_publish=is_row
        )

    async def _raise_lost(self, model_id: str) -> Answer:
        raise await self._resume.model(model_id)

    @asynccontextmanager
    async def _consuming(self, model: LiveModel | ModelRecord, seq_id: int) -> AsyncIterator[None]:
        """A ``UserError`` raised in here refuses the request at once: its id is consumed, nothing waits for it."""
        try:
            yield
        except UserError as error:
            if isinstance(model, LiveModel) and not model.lost and seq_id >= 1 and model.queue.consumes(seq_id):
                command = Rejected(
                    model_id=model.record.model_id, seq_id=seq_id, message=error.message, poisons_gradient=False
                )
                with suppress(CannotStore):  # a later server would wait for it for a while
                    record = rejection(command, "consumed")
                    await self._journal.consume(record, owner=model.record.owner, base=model.record.base)
                model.queue.consume(seq_id, error.message)
            raise


def rejection(command: Rejected, operation: str, **arguments: Any) -> CommandRecord:
    """``operation``: what it would have been."""
    given = {"rejected": command.message, "poisons_gradient": command.poisons_gradient, **arguments}
    return CommandRecord(model_id=command.model_id, seq_id=command.seq_id, operation=operation, arguments=given)


def is_rejection(record: CommandRecord) -> bool:
    return "rejected" in record.arguments
