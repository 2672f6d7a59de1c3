"""A whole service over the fakes and a real database, with virtual time."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from descant.errors import DescantError, RankDied
from descant.pools.engines import EnginePool
from descant.pools.trainers import TrainerPool
from descant.service.backends import Backend
from descant.service.database import Database
from descant.service.future_store import SqlFutureStore
from descant.service.futures import Pending, Submitted
from descant.service.journal import Journal
from descant.service.registry import Registry
from descant.service.sample_submission import SampleSubmission
from descant.service.service import Service
from descant.service.settings import QuotaSettings, ServiceSettings
from descant.testing.clock import FakeClock
from descant.testing.fakes import FakeCheckpointStore, FakeEngine, FakeTrainer, FakeWorld
from descant.types import (
    AdamParams,
    Answer,
    Command,
    Datum,
    Encoded,
    EncodedText,
    EngineCapabilities,
    ForwardBackward,
    Lora,
    OptimStep,
    RequestBody,
    Result,
    SampleOutput,
    SamplerKind,
    SamplingParams,
    TrainableKind,
)

PATIENCE_S = 20.0
"""Real seconds after which something that should end by itself is called a hang."""

BASE = "fake/bigram"


def encode(answer: Answer | Exception) -> Encoded:
    """So that a test can look at the answer itself."""
    return Encoded(content_type="pickle", body=pickle.dumps(answer))


class RecordingTrainer(FakeTrainer):
    """The fake trainer, which also remembers what it was given."""

    alive = serving = True

    def __init__(self, world: FakeWorld):
        super().__init__(world)
        self.commands: list[Command] = []
        self._futures: list[asyncio.Future[Result]] = []

    def submit(self, command: Command) -> asyncio.Future[Result]:
        self.commands.append(command)
        future = super().submit(command)
        self._futures = [*(one for one in self._futures if not one.done()), future]
        return future

    def die(self) -> None:
        """With all that it had, as a rank does; it is there again at once, with nothing."""
        for task in self._tasks:
            task.cancel()
        self._queues.clear()
        for future in self._futures:
            if not future.done():
                future.set_exception(RankDied("the rank was killed"))
        self.world.adapters.clear()
        self.world.snapshots.clear()


class CountingEngine(FakeEngine):
    """The fake engine, which also tells numbers: ``told``, or an error. None: it is busy and does not answer."""

    told: Mapping[str, float] | DescantError | None

    async def stats(self) -> Mapping[str, float]:
        if self.told is None:
            await asyncio.Event().wait()
        if isinstance(self.told, DescantError):
            raise self.told
        assert self.told is not None
        return self.told


class ServingEngine(FakeEngine):
    alive = serving = True


class Harness:
    """``start`` and ``stop`` are a server's; ``stop`` followed by ``start`` is a restart over the same files."""

    service: Service
    database: Database
    trainer: RecordingTrainer
    world: FakeWorld

    def __init__(self, path: Path, *, apart: bool = False):
        """``apart``: trainer and engine share nothing, and weights go from one to the other as files."""
        self.path = path
        self.apart = apart
        self.clock = FakeClock()
        self.checkpoints = FakeCheckpointStore(path / "checkpoints")
        self.snapshots = FakeCheckpointStore(path / "snapshots")
        self.settings = ServiceSettings()
        self.quotas = QuotaSettings()
        self.max_num_seqs = 1024
        self.engine_class = FakeEngine
        self.stats_timeout_s = PATIENCE_S
        self.hook: Callable[[object], Any] | None = None
        self.futures_class = SqlFutureStore
        self.trouble: str | None = None
        self.trains: frozenset[TrainableKind] = frozenset(("lora", "full"))
        self.samples: frozenset[TrainableKind] | None = None
        """The kinds of models that the engine takes; None: those that the trainer does."""

    async def start(self) -> None:
        async def hook(what: object) -> None:
            if self.hook is not None:
                await self.hook(what)

        self.world = FakeWorld(hook=hook, trains=self.trains)
        self.other = FakeWorld(name="fake/other", seed=1, hook=hook)
        self.trainer = RecordingTrainer(self.world)
        self.database = await Database.open(self.path / "descant.sqlite")
        self.futures = self.futures_class(self.database, self.clock)
        self.service = Service(
            backends=[
                self._backend(hook),
                Backend(
                    facts=replace(self.other.facts, aliases=(), short_names=("other",)),
                    trainer=FakeTrainer(self.other),
                    engine=FakeEngine(self.other),
                ),
            ],
            futures=self.futures,
            checkpoints=self.checkpoints,
            registry=Registry(self.database),
            journal=await Journal.open(self.database, self.path / "journal"),
            snapshots=self.snapshots,
            clock=self.clock,
            encode=encode,
            decode=lambda body: pickle.loads(body.data),
            settings=self.settings,
            quotas=self.quotas,
            trouble=lambda: self.trouble,
            stats_timeout_s=self.stats_timeout_s,
        )
        await self.service.start()

    def _backend(self, hook: Callable[[object], Any]) -> Backend:
        facts, capabilities = self.world.facts, EngineCapabilities(samples=self.samples or self.trains)
        self.pool: TrainerPool | None = None
        if not self.apart:
            self.engine = self.engine_class(self.world, max_num_seqs=self.max_num_seqs, capabilities=capabilities)
            return Backend(facts=facts, trainer=self.trainer, engine=self.engine)
        # What is published is looked at where everything else is; no trainer does.
        sampled = FakeWorld(hook=hook)
        sampled.published = self.world.published
        trainer = self.pool = TrainerPool({0: self.trainer}, scratch=self.path)
        engines = {1: ServingEngine(sampled, max_num_seqs=self.max_num_seqs, capabilities=capabilities)}
        return Backend(facts=facts, trainer=trainer, engine=EnginePool(engines, source=trainer))

    async def stop(self) -> None:
        await self.service.close()
        await self.database.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def die(self) -> None:
        """The process under ``BASE`` that trains; another takes its place. Published versions go with it, unless they
        are ``apart``."""
        self.trainer.die()
        if self.pool is not None:
            await self.service.backend_restarted("fake", models=self.pool.on_replica_death(0), versions=())
        else:
            self.world.published.clear()
            await self.service.backend_restarted("fake")

    async def recovered(self) -> None:
        """No model is being made again."""
        models = self.service._models
        await self.until(lambda: all(model.recovering is None for model in models.of_base(BASE)))

    # ------------------------------------------------------------------------------------------------ as a client
    async def session(self, owner: str = "alice", key: str | None = None, **fields: Any) -> str:
        given: dict[str, Any] = {
            "tags": (),
            "user_metadata": None,
            "sdk_version": "0.38.0",
            "project_id": None,
            "display_name": None,
            "idempotency_key": key,
        }
        return await self.service.create_session(owner, **given | fields)

    async def finish(self, session_id: str, owner: str = "alice") -> None:
        await self.service.finish_session(owner, session_id, reason="success", detail=None)

    async def create(
        self, session_id: str, model_seq_id: int = 0, *, owner: str = "alice", base: str = BASE, rank: int = 2
    ) -> Submitted:
        return await self.service.creation.create_model(
            owner,
            session_id=session_id,
            model_seq_id=model_seq_id,
            base_model=base,
            trainable=Lora(rank=rank, seed=7),
            optimizer="adamw",
            user_metadata={"who": owner},
        )

    async def model(self, session_id: str | None = None, owner: str = "alice", **kwargs: Any) -> str:
        """A fresh model that is there."""
        submitted = await self.create(session_id or await self.session(owner), owner=owner, **kwargs)
        await self.result(submitted, owner=owner)
        assert submitted.model_id is not None
        return submitted.model_id

    async def fb(self, model_id: str, seq_id: int, *, owner: str = "alice", forward_only: bool = False) -> Submitted:
        return await self.train(forward_backward(model_id, seq_id, forward_only=forward_only), owner=owner)

    async def train(self, command: ForwardBackward, *, owner: str = "alice") -> Submitted:
        return await self.service.training.forward_backward(owner, command, RequestBody(data=pickle.dumps(command)))

    async def step(self, model_id: str, seq_id: int, *, owner: str = "alice", lr: float = 0.1) -> Submitted:
        command = OptimStep(model_id=model_id, seq_id=seq_id, adam_params=AdamParams(learning_rate=lr))
        return await self.service.training.optim_step(owner, command)

    async def save(
        self, model_id: str, seq_id: int, name: str = "a", *, owner: str = "alice", overwrite: bool = False,
        ttl: int | None = None,
    ) -> Submitted:  # fmt: skip
        return await self.service.training.save_weights(
            owner, model_id=model_id, seq_id=seq_id, name=name, overwrite=overwrite, ttl_seconds=ttl
        )

    async def sampler(
        self, model_id: str, seq_id: int, *, name: str | None = None, number: int | None = None, owner: str = "alice",
        kind: SamplerKind | None = None,
    ) -> Submitted:  # fmt: skip
        return await self.service.training.save_weights_for_sampler(
            owner,
            model_id=model_id,
            seq_id=seq_id,
            name=name,
            sampling_session_seq_id=number,
            kind=kind,
            ttl_seconds=None,
        )

    async def sample(
        self, sampling_session_id: str, seq_id: int = 0, *, owner: str = "alice", n: int = 1,
        polls_at_once: bool = False,
    ) -> Submitted:  # fmt: skip
        asked = replace(submission(sampling_session_id, seq_id, n=n), polls_at_once=polls_at_once)
        return await self.service.sampling.sample(owner, asked)

    async def answer(self, submitted: Submitted | str, *, owner: str = "alice") -> Any:
        """The answer or the error that a client's future ends with."""
        request_id = submitted if isinstance(submitted, str) else submitted.request_id
        state = await asyncio.wait_for(
            self.service.futures.retrieve_future(owner, request_id, timeout_s=10**9), PATIENCE_S
        )
        assert not isinstance(state, Pending), state.reason
        assert state.encoded is not None
        answer = pickle.loads(state.encoded.body)
        assert state.failed == isinstance(answer, Exception)
        return answer

    async def result(self, submitted: Submitted | str, *, owner: str = "alice") -> Any:
        answer = await self.answer(submitted, owner=owner)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def error(self, submitted: Submitted | str, *, owner: str = "alice") -> DescantError:
        answer = await self.answer(submitted, owner=owner)
        assert isinstance(answer, DescantError), answer
        return answer

    async def pending(self, submitted: Submitted, *, owner: str = "alice") -> str:
        """The reason why it has not ended."""
        state = await self.service.futures.retrieve_future(owner, submitted.request_id, timeout_s=0)
        assert isinstance(state, Pending)
        assert state.queue_state == "active"
        return state.reason

    async def greedy(self, sampling_session_id: str, seq_id: int = 0) -> SampleOutput:
        return await self.result(await self.sample(sampling_session_id, seq_id))

    async def advance(self, seconds: float) -> None:
        """Time passes and the sweep has looked."""
        await self.clock.advance(seconds)
        await self.service.sweep()

    async def until(self, fact: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not fact():  # noqa: ASYNC110  (any fact, not only one that somebody announces)
                await asyncio.sleep(0.001)

        await asyncio.wait_for(wait(), PATIENCE_S)

    def weights(self, model_id: str) -> np.ndarray:
        """What they add to the base's."""
        base_table = self.world.base_table
        return self.world.adapters[model_id].weights.table(base_table) - base_table


def forward_backward(model_id: str, seq_id: int, *, forward_only: bool = False) -> ForwardBackward:
    tokens = np.asarray([1 + seq_id % 5, 2, 3], np.int32)
    datum = Datum(
        model_input=(EncodedText(tokens=tokens),),
        loss_fn_inputs={"target_tokens": np.asarray([2, 3, 4 + seq_id % 7], np.int64)},
    )
    return ForwardBackward(
        model_id=model_id, seq_id=seq_id, data=(datum,), loss_fn="cross_entropy", forward_only=forward_only
    )


def submission(sampling_session_id: str, seq_id: int = 0, *, n: int = 1) -> SampleSubmission:
    return SampleSubmission(
        sampling_session_id=sampling_session_id,
        seq_id=seq_id,
        prompt=(EncodedText(tokens=np.asarray([1, 2], np.int32)),),
        num_samples=n,
        sampling_params=SamplingParams(max_tokens=8, temperature=0.0, stop=()),
    )
