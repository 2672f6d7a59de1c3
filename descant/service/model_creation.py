"""Models are made: new, or from a checkpoint; once for each ``model_seq_id`` of a session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from descant.errors import CannotStore, Lost, RankDied, UserError
from descant.ports import Clock
from descant.service.backends import Backends
from descant.service.command_queue import Finish, QueueWatcher, result_of
from descant.service.futures import FutureService, Submitted
from descant.service.jobs import Job, Jobs
from descant.service.journal import Journal
from descant.service.models import LiveModel, Models, live_model
from descant.service.names import model_id_of
from descant.service.quotas import check_metadata
from descant.service.registry import ModelRecord, Registry
from descant.service.saves import Saves, digest_of, source_of
from descant.service.sessions import Session, Sessions
from descant.service.settings import ServiceSettings
from descant.types import (
    MAX_RANK,
    Answer,
    CheckpointSource,
    CommandRecord,
    CreateModel,
    FutureKey,
    Lora,
    ModelCreated,
    Result,
    Trainable,
    WeightsLoaded,
)

log = logging.getLogger(__name__)


class ModelCreation:
    """The requests that end in a new model."""

    def __init__(
        self,
        *,
        backends: Backends,
        sessions: Sessions,
        models: Models,
        futures: FutureService,
        jobs: Jobs,
        saves: Saves,
        registry: Registry,
        journal: Journal,
        watcher: QueueWatcher,
        clock: Clock,
        settings: ServiceSettings,
    ):
        self._backends = backends
        self._sessions = sessions
        self._models = models
        self._futures = futures
        self._jobs = jobs
        self._saves = saves
        self._registry = registry
        self._journal = journal
        self._watcher = watcher
        self._clock = clock
        self._settings = settings

    async def create_model(
        self,
        principal: str,
        *,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        trainable: Trainable,
        optimizer: str,
        user_metadata: Mapping[str, str] | None,
    ) -> Submitted:
        """Model id ``{session_id}:train:{model_seq_id}``. ``UserError`` (400) for a base not served, naming those that
        are, for what it does not train, and for a rank outside 1..256, no module chosen, or an optimiser other than
        adamw."""
        session = await self._sessions.find(principal, session_id)
        base = self._backends.served(base_model)
        self._backends[base].check_trains(trainable, of="the model to create")
        if isinstance(trainable, Lora):
            _check_lora(trainable)
        if optimizer != "adamw":
            raise UserError(f"optimizer_config.type is {optimizer!r}, expected 'adamw'")
        return await self._create(session, model_seq_id, base, trainable, None, None, user_metadata, "create_model")

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
        """A new model from a checkpoint, on the checkpoint's base, with of it trained what was. Raises ``NotFound`` for
        a path that is not there, ``UserError`` for one on another base than ``base_model`` or than any served, or of a
        kind that the base does not train."""
        session = await self._sessions.find(principal, session_id)
        checkpoint = await self._saves.open(principal, path)
        base = self._backends.served(checkpoint.manifest.base, of=path)
        if base_model is not None and self._backends.served(base_model) != base:
            raise UserError(f"{path} was trained on {base}, so it cannot be loaded into a model on {base_model}")
        trainable = checkpoint.manifest.trainable
        self._backends[base].check_trains(trainable, of=path)
        source = source_of(checkpoint, optimizer)
        digest = digest_of(checkpoint.manifest)
        return await self._create(session, model_seq_id, base, trainable, source, digest, user_metadata, "load_weights")

    # ----------------------------------------------------------------------------------------------------------------

    async def _create(
        self,
        session: Session,
        model_seq_id: int,
        base: str,
        trainable: Trainable,
        source: CheckpointSource | None,
        digest: str | None,
        user_metadata: Mapping[str, str] | None,
        operation: str,
    ) -> Submitted:
        if model_seq_id < 0:
            raise UserError(f"model_seq_id is {model_seq_id}, expected 0 or more")
        self._saves.check_room()
        owner, session_id = session.record.owner, session.record.session_id
        model_id = model_id_of(session_id, model_seq_id)
        record = ModelRecord(
            model_id=model_id,
            session_id=session_id,
            owner=owner,
            base=base,
            created_at=self._clock.now(),
            trainable=trainable,
            source_uri=source.uri if source else None,
            user_metadata=user_metadata,
        )
        check_metadata(user_metadata=user_metadata)
        is_new = self._models.get(model_id) is None and await self._registry.model(model_id) is None
        if is_new:
            await self._models.reserve(record)
        try:
            key = FutureKey(kind="create", scope=session_id, seq_id=model_seq_id)
            return await self._begin(key, session, record, source, digest, operation)
        finally:
            if is_new and self._models.get(model_id) is None:
                self._models.unreserve(record)

    async def _begin(
        self,
        key: FutureKey,
        session: Session,
        record: ModelRecord,
        source: CheckpointSource | None,
        digest: str | None,
        operation: str,
    ) -> Submitted:
        model_id, base, owner = record.model_id, record.base, record.owner
        stands = await self._registry.add_model(record)
        arguments = {} if source is None else {"optimizer": source.optimizer, "digest": digest}
        written = CommandRecord(model_id=model_id, seq_id=0, operation=operation, arguments=arguments)

        def begin(request_id: str) -> None:
            job = self._jobs.add(
                Job(request_id=request_id, operation=operation, base=base, owner=owner, model_id=model_id)
            )
            if stands.status != "live" or session.over is not None:
                reason = stands.status_reason or f"its session is over: {session.over}"
                self._jobs.fail(job, Lost(f"model {model_id!r} is not there any more: {reason}; create another"))
                return
            model = live_model(
                stands,
                self._backends[base],
                jobs=self._jobs,
                clock=self._clock,
                gap_timeout_s=self._settings.seq_gap_timeout_s,
                watcher=self._watcher,
            )
            self._models.add(model)
            command = CreateModel(model_id=model_id, trainable=record.trainable, source=source)
            model.queue.create(command, job=job, finish=self.finish(model, operation))

        request_id = await self._futures.accept(
            key=key,
            owner=owner,
            base=base,
            operation=operation,
            begin=begin,
            command=written,
        )
        return Submitted(request_id=request_id, model_id=model_id)

    # ------------------------------------------------------------------------------------------------ again
    def finish(self, model: LiveModel, operation: str) -> Finish:
        """What is done once its trainer has the model: the first time, and again after a death on the way."""

        async def created(outcome: asyncio.Future[Result]) -> Answer:
            model_id = model.record.model_id
            try:
                created = await result_of(outcome, ModelCreated)
            except RankDied:
                raise
            except Exception as error:
                self._models.remove(model)
                model.lost = True
                model.queue.end("the model could not be created")
                with suppress(CannotStore):  # the registry goes on to say that it is being created
                    await self._registry.set_model_status(
                        model_id, "failed", reason=f"it could not be created: {error}"
                    )
                    await self._journal.forget([model_id])
                raise
            if operation == "load_weights":
                assert model.record.source_uri is not None
                return WeightsLoaded(path=model.record.source_uri, model_id=model_id)
            return created

        return created

    async def command(self, model: ModelRecord, record: CommandRecord) -> CreateModel:
        """As it was asked for. Raises ``DescantError`` where the checkpoint that it was made from is not there, or is
        another."""
        source = None
        if model.source_uri is not None:
            checkpoint = await self._saves.same(model.source_uri, record.arguments["digest"])
            source = source_of(checkpoint, record.arguments["optimizer"])
        return CreateModel(model_id=model.model_id, trainable=model.trainable, source=source)


def _check_lora(lora: Lora) -> None:
    if not 1 <= lora.rank <= MAX_RANK:
        raise UserError(f"lora_config.rank is {lora.rank}, expected 1 to {MAX_RANK}")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise UserError("lora_config.train_attn, train_mlp and train_unembed are all false, expected at least one true")
