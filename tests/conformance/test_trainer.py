"""The trainers keep their promises, and the suite notices one that does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descant.ckpt.manifest import write_durable
from descant.ckpt.peft import OPTIMIZER
from descant.errors import DescantError, NotFound, UserError
from descant.pools.trainers import TrainerPool
from descant.ranks.replica import Replica
from descant.testing.fake_model import FakeAdapter
from descant.testing.fakes import FakeTrainer, FakeWorld
from descant.testing.pools import BOTH, SAMPLES, TRAINS, FakeReplica, Pools, tiny_pools
from descant.testing.ranks import tiny_ranks, tiny_replica
from descant.testing.trainer import TrainerSuite
from descant.types import (
    AdamParams,
    CheckpointSource,
    Command,
    CreateModel,
    DeleteModel,
    ForwardBackward,
    ForwardBackwardOutput,
    Full,
    Loaded,
    Lora,
    Manifest,
    ModelCreated,
    OptimStep,
    OptimStepOutput,
    Rejected,
    Result,
    Snapshot,
    SnapshotRef,
    Trainable,
    TrainableKind,
)


class TestFakeTrainer(TrainerSuite):
    @pytest.fixture(params=[("lora", "full"), ("lora",)], ids=["both kinds", "adapters"])
    async def trainer(self, request: pytest.FixtureRequest) -> FakeTrainer:
        return FakeTrainer(FakeWorld(trains=frozenset[TrainableKind](request.param)))


class TestReplica(TrainerSuite):
    @pytest.fixture
    async def trainer(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
        async with tiny_replica(tmp_path_factory) as replica:
            yield replica


@pytest.mark.crashes
class TestReplicaOfTwoRanks(TrainerSuite):
    @pytest.fixture
    async def trainer(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
        async with tiny_ranks(tmp_path_factory) as replica:
            yield replica


class TestPoolOfFakes(TrainerSuite):
    @pytest.fixture(params=[(BOTH,), (BOTH, BOTH), (TRAINS, TRAINS, SAMPLES)], ids=["one", "two", "apart"])
    async def trainer(self, request: pytest.FixtureRequest) -> TrainerPool:
        return Pools([FakeReplica() for _ in request.param], request.param).trainer


class TestPool(TrainerSuite):
    @pytest.fixture
    async def trainer(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TrainerPool]:
        async with tiny_pools(tmp_path_factory, (BOTH, BOTH)) as pools:
            yield pools.trainer


class TestPoolApart(TrainerSuite):
    """Beside an engine that shares nothing with it."""

    @pytest.fixture
    async def trainer(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TrainerPool]:
        async with tiny_pools(tmp_path_factory, (TRAINS, SAMPLES)) as pools:
            yield pools.trainer


# ---------------------------------------------------------------------------------- broken on purpose, once per clause


def lora_of(command: CreateModel) -> Lora:
    assert isinstance(command.trainable, Lora)
    return command.trainable


class TinyVocabulary(FakeTrainer):
    def __init__(self, world: FakeWorld):
        super().__init__(FakeWorld(vocab_size=4))


class Blocks(FakeTrainer):
    def submit(self, command: Command) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        future.set_result(self.execute(command))
        return future


class CreatesAtNeed(FakeTrainer):
    def execute(self, command: Command) -> Result:
        if command.model_id not in self.world.adapters and not isinstance(command, CreateModel):
            super().execute(CreateModel(model_id=command.model_id, trainable=Lora(rank=4)))
        return super().execute(command)


class StepsLast(FakeTrainer):
    """Runs what waits by kind: every step after every backward."""

    def submit(self, command: Command) -> asyncio.Future[Result]:
        future = super().submit(command)
        queue = self._queues[command.model_id]
        ordered = sorted(queue, key=lambda item: isinstance(item[0], OptimStep))
        queue.clear()
        queue.extend(ordered)
        return future


class OneGradientForAll(FakeTrainer):
    def _forward_backward(self, adapter: FakeAdapter, command: ForwardBackward) -> ForwardBackwardOutput:
        out = super()._forward_backward(adapter, command)
        for other in self.world.adapters.values():
            if len(other.weights.arrays[0]) == len(adapter.weights.arrays[0]) + 4 and not command.forward_only:
                adapter.gradient[1] += 10
        return out


class IgnoresSeed(FakeTrainer):
    def _create(self, command: CreateModel) -> ModelCreated:
        created = super()._create(replace(command, trainable=replace(lora_of(command), seed=0)))
        return replace(created, trainable=command.trainable)


class StartsOff(FakeTrainer):
    def _create(self, command: CreateModel) -> ModelCreated:
        created = super()._create(command)
        b = self.world.adapters[command.model_id].weights.arrays[1]
        b += np.random.default_rng(lora_of(command).seed or 0).normal(size=b.shape) * 0.1
        return created


class AnyRank(FakeTrainer):
    def _create(self, command: CreateModel) -> ModelCreated:
        lora = lora_of(command)
        return super()._create(replace(command, trainable=replace(lora, rank=min(max(lora.rank, 1), 256))))


class TakesAnyKind(FakeTrainer):
    def __init__(self, world: FakeWorld):
        super().__init__(FakeWorld(trains=frozenset(("lora",))))

    def _check_kind(self, trainable: Trainable, of: str) -> None:
        pass


class StartsFullModelsAtZero(FakeTrainer):
    def _create(self, command: CreateModel) -> ModelCreated:
        created = super()._create(command)
        if created.trainable == Full() and command.source is None:
            self.world.adapters[command.model_id].weights.arrays[0][:] = 0
        return created


class TrainsTheBaseItself(FakeTrainer):
    def _optim_step(self, adapter: FakeAdapter, command: OptimStep) -> OptimStepOutput:
        out = super()._optim_step(adapter, command)
        if adapter.weights.trainable == Full():
            self.world.base_table = adapter.weights.arrays[0]
        return out


class MakesAdaptersOfAll(FakeTrainer):
    def _create(self, command: CreateModel) -> ModelCreated:
        return super()._create(replace(command, trainable=Lora(rank=4)))


class DeletesNothing(FakeTrainer):
    def execute(self, command: Command) -> Result:
        if isinstance(command, DeleteModel):
            return super().execute(replace(command, model_id="another"))
        return super().execute(command)


class RevivesTheDeleted(FakeTrainer):
    last: FakeAdapter | None = None

    def execute(self, command: Command) -> Result:
        if isinstance(command, DeleteModel):
            self.last = self.world.adapters[command.model_id]
        result = super().execute(command)
        if isinstance(command, CreateModel) and self.last is not None:
            self.world.adapters[command.model_id].moments1 = self.last.moments1
        return result


class ShufflesOutputs(FakeTrainer):
    def _forward_backward(self, adapter: FakeAdapter, command: ForwardBackward) -> ForwardBackwardOutput:
        out = super()._forward_backward(adapter, command)
        return replace(out, loss_fn_outputs=out.loss_fn_outputs[::-1])


class Averages(FakeTrainer):
    def _forward_backward(self, adapter: FakeAdapter, command: ForwardBackward) -> ForwardBackwardOutput:
        out = super()._forward_backward(adapter, command)
        tokens = sum(o["logprobs"].size for o in out.loss_fn_outputs)
        return replace(out, metrics={"loss:sum": out.metrics["loss:sum"] / tokens})


class ForwardIsBackward(FakeTrainer):
    def _forward_backward(self, adapter: FakeAdapter, command: ForwardBackward) -> ForwardBackwardOutput:
        return super()._forward_backward(adapter, replace(command, forward_only=False))


class ForwardLosesGradient(FakeTrainer):
    def remember_failure(self, command: Command, error: Exception) -> None:
        if isinstance(command, ForwardBackward):
            command = replace(command, forward_only=False)
        super().remember_failure(command, error)


class OverwritesGradient(FakeTrainer):
    def _forward_backward(self, adapter: FakeAdapter, command: ForwardBackward) -> ForwardBackwardOutput:
        if not command.forward_only:
            adapter.clear_gradient()
        return super()._forward_backward(adapter, command)


class KeepsGradient(FakeTrainer):
    def _optim_step(self, adapter: FakeAdapter, command: OptimStep) -> OptimStepOutput:
        kept = [gradient.copy() for gradient in adapter.gradient]
        out = super()._optim_step(adapter, command)
        adapter.gradient = kept
        return out


class OneLearningRate(FakeTrainer):
    def _optim_step(self, adapter: FakeAdapter, command: OptimStep) -> OptimStepOutput:
        return super()._optim_step(adapter, replace(command, adam_params=AdamParams(learning_rate=0.03)))


class StepsOnNothing(FakeTrainer):
    """By its moments and decay."""

    def _optim_step(self, adapter: FakeAdapter, command: OptimStep) -> OptimStepOutput:
        adapter.pending_gradient = True
        return super()._optim_step(adapter, command)


class SkipsZeros(FakeTrainer):
    def _optim_step(self, adapter: FakeAdapter, command: OptimStep) -> OptimStepOutput:
        adapter.pending_gradient = any(gradient.any() for gradient in adapter.gradient)
        return super()._optim_step(adapter, command)


class SnapshotsTakeTheGradient(FakeTrainer):
    def _snapshot(self, adapter: FakeAdapter, command: Snapshot) -> SnapshotRef:
        ref = super()._snapshot(adapter, command)
        adapter.clear_gradient()
        return ref


class FailsTheNeighbours(FakeTrainer):
    def remember_failure(self, command: Command, error: Exception) -> None:
        for queue in self._queues.values():
            for _, future in queue:
                if not future.done():
                    future.set_exception(error)


class VagueErrors(FakeTrainer):
    def execute(self, command: Command) -> Result:
        try:
            return super().execute(command)
        except UserError:
            raise UserError("bad request") from None


class StepsAnyway(FakeTrainer):
    def remember_failure(self, command: Command, error: Exception) -> None:
        pass


class KeepsGradientOnFailure(FakeTrainer):
    def remember_failure(self, command: Command, error: Exception) -> None:
        adapter = self.world.adapters[command.model_id]
        if isinstance(command, OptimStep):
            adapter.lost_gradient = None
        else:
            super().remember_failure(command, error)


class NeverForgives(FakeTrainer):
    def remember_failure(self, command: Command, error: Exception) -> None:
        if not isinstance(command, OptimStep):
            super().remember_failure(command, error)


class RejectedIsAlwaysHarmful(FakeTrainer):
    def remember_failure(self, command: Command, error: Exception) -> None:
        if isinstance(command, Rejected):
            command = replace(command, poisons_gradient=True)
        super().remember_failure(command, error)


class RejectedIsHarmless(FakeTrainer):
    def remember_failure(self, command: Command, error: Exception) -> None:
        if not isinstance(command, Rejected):
            super().remember_failure(command, error)


class NumbersVersionsItself(FakeTrainer):
    def _snapshot(self, adapter: FakeAdapter, command: Snapshot) -> SnapshotRef:
        return super()._snapshot(adapter, replace(command, seq_id=1))


class ForgetsPendingGradient(FakeTrainer):
    def _snapshot(self, adapter: FakeAdapter, command: Snapshot) -> SnapshotRef:
        return replace(super()._snapshot(adapter, command), has_pending_gradient=False)


class NoOptimizerFile(FakeTrainer):
    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        manifest = await super().save(ref, dest)
        return replace(manifest, files={name: e for name, e in manifest.files.items() if name != OPTIMIZER})


class LivesOn(FakeTrainer):
    """The snapshot is the live tensors themselves."""

    def _snapshot(self, adapter: FakeAdapter, command: Snapshot) -> SnapshotRef:
        ref = super()._snapshot(adapter, command)
        self.world.snapshots[ref.version].weights = adapter.weights
        return ref


class LoadsFreshMoments(FakeTrainer):
    def _load(self, model_id: str, expected: Trainable | None, source: CheckpointSource) -> Loaded:
        loaded = super()._load(model_id, expected, source)
        for moment in self.world.adapters[model_id].moments1:
            moment[:] = 0
        return loaded


class LoadsAlways(FakeTrainer):
    def _load(self, model_id: str, expected: Trainable | None, source: CheckpointSource) -> Loaded:
        return super()._load(model_id, expected, replace(source, optimizer=True))


class LoadsAnyShape(FakeTrainer):
    def _load(self, model_id: str, expected: Trainable | None, source: CheckpointSource) -> Loaded:
        return super()._load(model_id, None, source)


class LeavesHalfAModel(FakeTrainer):
    def _create(self, command: CreateModel) -> ModelCreated:
        if command.source is not None:
            super()._create(replace(command, source=None))
            self._load(command.model_id, None, command.source)
        return super()._create(command)


class Unverified(FakeTrainer):
    def _load(self, model_id: str, expected: Trainable | None, source: CheckpointSource) -> Loaded:
        try:
            return super()._load(model_id, expected, source)
        except DescantError:
            self._create(CreateModel(model_id=model_id, trainable=Lora(rank=4)))
            return Loaded(model_id=model_id, uri=source.uri, step=0)


class SavesTheEphemeral(FakeTrainer):
    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        held = self.world.snapshots[ref.version]
        held.moments1 = held.moments1 or held.weights.arrays
        held.moments2 = held.moments2 or held.weights.arrays
        return await super().save(ref, dest)


class DropsNothing(FakeTrainer):
    async def drop(self, ref: SnapshotRef) -> None:
        pass


class DropsOnce(FakeTrainer):
    async def drop(self, ref: SnapshotRef) -> None:
        if ref.version not in self.world.snapshots:
            raise NotFound("gone")
        await super().drop(ref)


class Overfull(FakeTrainer):
    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        manifest = await super().save(ref, dest)
        write_durable(Path(dest) / "junk", b"")
        return manifest


@pytest.mark.parametrize(
    ("broken", "clause", "arguments"),
    [
        (TinyVocabulary, "test_is_a_trainer", ()),
        (Blocks, "test_submit_returns_at_once", ()),
        (CreatesAtNeed, "test_a_model_that_is_not_there", ()),
        (StepsLast, "test_commands_of_a_model_run_in_order", ()),
        (OneGradientForAll, "test_models_share_nothing_but_the_pass", ()),
        (IgnoresSeed, "test_a_fresh_adapter_is_the_base_model_and_its_seed_counts", ()),
        (StartsOff, "test_a_fresh_adapter_is_the_base_model_and_its_seed_counts", ()),
        (AnyRank, "test_what_cannot_be_done_is_refused_at_create", (0,)),
        (AnyRank, "test_what_cannot_be_done_is_refused_at_create", (257,)),
        (TakesAnyKind, "test_a_full_model_is_trained_or_refused_as_the_facts_say", ()),
        (TakesAnyKind, "test_a_checkpoint_of_another_kind_is_refused", ()),
        (StartsFullModelsAtZero, "test_a_full_model_is_trained_or_refused_as_the_facts_say", ()),
        (TrainsTheBaseItself, "test_a_full_model_is_trained_or_refused_as_the_facts_say", ()),
        (MakesAdaptersOfAll, "test_a_full_model_is_trained_or_refused_as_the_facts_say", ()),
        (LoadsAnyShape, "test_a_full_model_is_trained_or_refused_as_the_facts_say", ()),
        (LoadsAnyShape, "test_a_checkpoint_of_another_kind_is_refused", ()),
        (DeletesNothing, "test_a_deleted_model_leaves_nothing_behind", ()),
        (RevivesTheDeleted, "test_a_deleted_model_leaves_nothing_behind", ()),
        (ShufflesOutputs, "test_output_i_belongs_to_datum_i", ()),
        (Averages, "test_losses_are_weighted_sums", ()),
        (ForwardIsBackward, "test_forward_only_leaves_the_gradient_alone", ()),
        (ForwardLosesGradient, "test_forward_only_leaves_the_gradient_alone", ()),
        (OverwritesGradient, "test_gradients_add_up_until_the_step_and_not_beyond", ()),
        (KeepsGradient, "test_gradients_add_up_until_the_step_and_not_beyond", ()),
        (OneLearningRate, "test_a_step_does_what_its_parameters_say", ()),
        (StepsOnNothing, "test_a_step_without_a_backward_changes_nothing", ()),
        (SkipsZeros, "test_a_gradient_of_zeros_is_one", ()),
        (SnapshotsTakeTheGradient, "test_a_snapshot_leaves_the_gradient_to_the_model", ()),
        (FailsTheNeighbours, "test_a_failure_is_its_own", ()),
        (VagueErrors, "test_a_failure_is_its_own", ()),
        (VagueErrors, "test_a_loss_that_is_not_finite_fails_its_request_alone", ()),
        (StepsAnyway, "test_the_step_after_a_failed_backward_fails", ()),
        (KeepsGradientOnFailure, "test_the_step_after_a_failed_backward_fails", ()),
        (NeverForgives, "test_the_step_after_a_failed_backward_fails", ()),
        (RejectedIsHarmless, "test_rejected_takes_its_place", ()),
        (RejectedIsAlwaysHarmful, "test_rejected_takes_its_place", ()),
        (NumbersVersionsItself, "test_a_snapshot_says_what_it_is", ()),
        (ForgetsPendingGradient, "test_a_snapshot_says_what_it_is", ()),
        (NoOptimizerFile, "test_save_writes_what_the_manifest_says", ("training",)),
        (Overfull, "test_save_writes_what_the_manifest_says", ("sampler",)),
        (LivesOn, "test_a_snapshot_stays_as_it_was_taken_and_is_loaded_whole", ()),
        (LoadsFreshMoments, "test_a_snapshot_stays_as_it_was_taken_and_is_loaded_whole", ()),
        (LoadsAlways, "test_load_into_a_model", ()),
        (LoadsAnyShape, "test_load_into_a_model", ()),
        (LeavesHalfAModel, "test_load_of_what_is_not_there", ()),
        (Unverified, "test_a_damaged_checkpoint_is_refused", ()),
        (Unverified, "test_optimizer_state_that_was_never_saved", ()),
        (SavesTheEphemeral, "test_what_cannot_be_saved", ()),
        (DropsNothing, "test_what_cannot_be_saved", ()),
        (DropsOnce, "test_what_cannot_be_saved", ()),
    ],
)
async def test_the_suite_sees_a_broken_trainer(
    broken: type[FakeTrainer], clause: str, arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, OSError, DescantError)):
        await getattr(TrainerSuite(), clause)(broken(FakeWorld()), tmp_path, *arguments)
