"""Conformance of ``Trainer``: what every implementation must do, the fake included.

    class TestMine(TrainerSuite):
        @pytest.fixture
        async def trainer(self): ...

Works on any base with at least 12 token ids and 16 positions; losses are compared to 1e-4 relative.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file

from descant.ckpt.manifest import MANIFEST, encode_manifest, read_manifest
from descant.ckpt.peft import ADAPTER, ADAPTER_CONFIG, OPTIMIZER
from descant.errors import Damaged, DescantError, NotFound, ServerError, UserError
from descant.ports import Trainer
from descant.types import (
    AdamParams,
    CheckpointSource,
    Command,
    CreateModel,
    Datum,
    DeleteModel,
    EncodedText,
    ForwardBackward,
    ForwardBackwardOutput,
    Full,
    LoadState,
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
    Version,
)

DEADLINE_S = 120.0
LORA = Lora(rank=4, seed=1)
ADAM = AdamParams(learning_rate=0.03)


def text(*tokens: int) -> tuple[EncodedText, ...]:
    return (EncodedText(tokens=np.asarray(tokens, np.int32)),)


def datum(tokens: Sequence[int], targets: Sequence[int] | None = None, **inputs: Any) -> Datum:
    """A datum whose targets are by default the next tokens; ``inputs`` become arrays (floats float32)."""
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    arrays = {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in arrays.items()}
    wanted = np.asarray([*tokens[1:], 5] if targets is None else targets, np.int64)
    return Datum(model_input=text(*tokens), loss_fn_inputs={"target_tokens": wanted, **arrays})


DATA = (datum([1, 2, 3]), datum([4, 2, 6, 7, 8], weights=[0.0, 1.0, 1.0, 0.5, 1.0]))
OTHER_DATA = (datum([3, 1, 7, 9]),)
BAD_DATA = (datum([1, 2, 3], weights=[1.0, 1.0]),)


class Model:
    """One model of a trainer under test; numbers its commands."""

    def __init__(self, trainer: Trainer, model_id: str = "model"):
        self.trainer = trainer
        self.model_id = model_id
        self._seq = itertools.count(1)

    def send(self, command: type[Any], **fields: Any) -> asyncio.Future[Result]:
        return self.trainer.submit(cast(Command, command(model_id=self.model_id, seq_id=next(self._seq), **fields)))

    def create(self, trainable: Trainable = LORA, source: CheckpointSource | None = None) -> asyncio.Future[Result]:
        return self.trainer.submit(CreateModel(model_id=self.model_id, trainable=trainable, source=source))

    def backward(self, data: tuple[Datum, ...] = DATA, loss_fn: str = "cross_entropy") -> asyncio.Future[Result]:
        return self.send(ForwardBackward, data=data, loss_fn=loss_fn)

    def forward(self, data: tuple[Datum, ...] = DATA) -> asyncio.Future[Result]:
        return self.send(ForwardBackward, data=data, loss_fn="cross_entropy", forward_only=True)

    def step(self, adam_params: AdamParams = ADAM) -> asyncio.Future[Result]:
        return self.send(OptimStep, adam_params=adam_params)

    async def step_on_zeros(self, adam_params: AdamParams = ADAM) -> None:
        """On a gradient that is there and zero: what moves the weights are moments and decay."""
        await result(self.backward((datum([1, 2, 3], weights=[0.0, 0.0, 0.0]),)))
        await result(self.step(adam_params))

    def snapshot(self, kind: str = "training", *, for_disk: bool = True) -> asyncio.Future[Result]:
        return self.send(Snapshot, kind=kind, for_disk=for_disk)

    async def train(self, steps: int = 2, data: tuple[Datum, ...] = DATA) -> None:
        for _ in range(steps):
            await result(self.backward(data))
            await result(self.step())

    async def loss(self, data: tuple[Datum, ...] = DATA) -> float:
        return float((await output(self.forward(data))).metrics["loss:sum"])


async def result(future: asyncio.Future[Result]) -> Result:
    return await asyncio.wait_for(future, DEADLINE_S)


async def output(future: asyncio.Future[Result]) -> ForwardBackwardOutput:
    return cast(ForwardBackwardOutput, await result(future))


async def stepped(future: asyncio.Future[Result]) -> OptimStepOutput:
    return cast(OptimStepOutput, await result(future))


async def error(future: asyncio.Future[Result], kind: type[DescantError] = UserError) -> DescantError:
    with pytest.raises(kind) as caught:
        await result(future)
    assert str(caught.value), "an error must say something"
    return caught.value


async def saved(trainer: Trainer, ref: SnapshotRef, directory: Path, *, optimizer: bool = True) -> CheckpointSource:
    """Writes a snapshot with its manifest: a checkpoint to load from."""
    manifest = await asyncio.wait_for(trainer.save(ref, str(_empty(directory))), DEADLINE_S)
    (directory / MANIFEST).write_bytes(encode_manifest(manifest))
    return CheckpointSource(uri=f"tinker://x/weights/{directory.name}", directory=str(directory), optimizer=optimizer)


def without_files(trainable: Trainable, directory: Path) -> CheckpointSource:
    """A checkpoint of which there is the manifest alone: of a kind that nobody here trains, for instance."""
    manifest = Manifest(base="", owner="", trainable=trainable, step=1, applied_seq_id=1, has_optimizer=False, files={})
    (_empty(directory) / MANIFEST).write_bytes(encode_manifest(manifest))
    return CheckpointSource(uri=f"tinker://x/weights/{directory.name}", directory=str(directory), optimizer=False)


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)


class TrainerSuite:
    # ------------------------------------------------------------------------------------------------ submission
    async def test_is_a_trainer(self, trainer: Trainer, tmp_path: Path) -> None:
        assert isinstance(trainer, Trainer)
        assert trainer.facts.vocab_size >= 12
        assert trainer.facts.max_context_length >= 16

    async def test_submit_returns_at_once(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        futures = [model.create(), model.backward(), model.step()]
        assert not any(future.done() for future in futures)
        await asyncio.gather(*map(result, futures))

    async def test_a_model_that_is_not_there(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer, "absent")
        for future in (model.backward(), model.step(), model.snapshot()):
            await error(future, NotFound)

    # ------------------------------------------------------------------------------------------------ order
    async def test_commands_of_a_model_run_in_order(self, trainer: Trainer, tmp_path: Path) -> None:
        one, other = Model(trainer, "one"), Model(trainer, "other")
        await result(one.create())
        alone = []
        for _ in range(3):
            alone.append((await output(one.backward())).metrics["loss:sum"])
            await result(one.step())
        futures = [other.create()]
        for _ in range(3):
            futures += [other.backward(), other.step()]
        results = await asyncio.gather(*map(result, futures))
        together = [cast(ForwardBackwardOutput, r).metrics["loss:sum"] for r in results[1::2]]
        assert all(map(close, alone, together)), (alone, together)
        assert alone[2] < alone[0], "three steps made nothing better"

    async def test_models_share_nothing_but_the_pass(self, trainer: Trainer, tmp_path: Path) -> None:
        alone, together = Model(trainer, "alone"), Model(trainer, "together")
        await result(alone.create())
        await alone.train(3)
        neighbours = [Model(trainer, f"neighbour{i}") for i in range(3)]
        futures = [together.create(), *(n.create(Lora(rank=8 + i, seed=i)) for i, n in enumerate(neighbours))]
        for _ in range(3):
            for neighbour in neighbours:
                futures += [neighbour.backward(OTHER_DATA), neighbour.step(AdamParams(learning_rate=0.3))]
            futures += [together.backward(), together.step()]
        await asyncio.gather(*map(result, futures))
        assert close(await alone.loss(), await together.loss())

    # ------------------------------------------------------------------------------------------------ creation
    @staticmethod
    async def _fresh(trainer: Trainer, model_id: str, seed: int) -> Model:
        model = Model(trainer, model_id)
        created = await result(model.create(replace(LORA, seed=seed)))
        assert created == ModelCreated(model_id=model_id, trainable=replace(LORA, seed=seed), step=0)
        return model

    async def test_a_fresh_adapter_is_the_base_model_and_its_seed_counts(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        one, same, other = [await self._fresh(trainer, name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
        before = [await model.loss() for model in (one, same, other)]
        assert before[0] == before[1] == before[2]
        for model in (one, same, other):
            await model.train(2)
        assert close(await one.loss(), await same.loss())
        assert abs(await one.loss() - await other.loss()) > 1e-6

    @pytest.mark.parametrize("rank", [0, 257])
    async def test_what_cannot_be_done_is_refused_at_create(self, trainer: Trainer, tmp_path: Path, rank: int) -> None:
        model = Model(trainer)
        refused = await error(model.create(Lora(rank=rank)))
        assert str(rank) in str(refused)
        await error(model.backward(), NotFound)

    async def test_a_deleted_model_leaves_nothing_behind(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        fresh = await model.loss()
        await model.train(2)
        await result(model.backward())
        await result(model.send(DeleteModel))
        await error(model.backward(), NotFound)
        again = Model(trainer)
        await result(again.create())
        assert await again.loss() == fresh
        await again.step_on_zeros()
        assert close(await again.loss(), fresh), "a gradient or moments of the deleted model were used"

    async def test_a_full_model_is_trained_or_refused_as_the_facts_say(self, trainer: Trainer, tmp_path: Path) -> None:
        model, neighbour = Model(trainer), Model(trainer, "neighbour")
        await result(neighbour.create())
        base = await neighbour.loss()
        if Full.kind not in trainer.facts.trains:
            assert f"{Full.kind!r}, expected" in str(await error(model.create(Full())))
            await error(model.backward(), NotFound)
            await result(model.create())
            return
        created = await result(model.create(Full()))
        assert created == ModelCreated(model_id="model", trainable=Full(), step=0)
        assert close(await model.loss(), base), "it does not start as the base"
        await model.train(2)
        at_snapshot = await model.loss()
        assert at_snapshot < base
        assert await neighbour.loss() == base, "the base itself was trained"
        ref = cast(SnapshotRef, await result(model.snapshot()))
        assert (ref.trainable, ref.step) == (Full(), 2)
        source = await saved(trainer, ref, tmp_path / "full")
        assert read_manifest(source.directory).trainable == Full()
        await model.train(2)
        again, into = Model(trainer, "again"), Model(trainer, "into")
        created = await result(again.create(LORA, source))
        assert created == ModelCreated(model_id="again", trainable=Full(), step=2)
        await result(into.create(Full()))
        await result(into.send(LoadState, source=source))
        for loaded in (again, into):
            assert close(await loaded.loss(), at_snapshot)
            await loaded.train(2)
            assert close(await loaded.loss(), await model.loss()), "moments or step were not restored"
        before = await into.loss()
        adapter = await saved(trainer, cast(SnapshotRef, await result(neighbour.snapshot())), tmp_path / "lora")
        await error(into.send(LoadState, source=adapter))
        assert await into.loss() == before

    async def test_a_checkpoint_of_another_kind_is_refused(self, trainer: Trainer, tmp_path: Path) -> None:
        model, source = Model(trainer), without_files(Full(), tmp_path / "full")
        await result(model.create())
        await model.train(1)
        before = await model.loss()
        refused = str(await error(model.send(LoadState, source=source)))
        assert source.uri in refused
        assert repr(Full.kind) in refused
        assert await model.loss() == before
        if Full.kind not in trainer.facts.trains:
            new = Model(trainer, "new")
            assert repr(Full.kind) in str(await error(new.create(source=source)))
            await error(new.backward(), NotFound)

    # ------------------------------------------------------------------------------------------------ training
    async def test_output_i_belongs_to_datum_i(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        data = tuple(datum([(i * 7 + j) % 12 for j in range(1 + (i * 5) % 9)]) for i in range(17))
        whole = await output(model.forward(data))
        assert len(whole.loss_fn_outputs) == len(data)
        for item, got in zip(data, whole.loss_fn_outputs):
            alone = (await output(model.forward((item,)))).loss_fn_outputs[0]["logprobs"]
            assert got["logprobs"].dtype == np.float32
            assert got["logprobs"].shape == item.loss_fn_inputs["target_tokens"].shape
            np.testing.assert_allclose(got["logprobs"], alone, rtol=1e-4, atol=1e-5)
        assert all(key.count(":") == 1 for key in whole.metrics)

    async def test_losses_are_weighted_sums(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        for weights in ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [-2.0, 0.5, 3.0]):
            out = await output(model.backward((datum([1, 2, 3], weights=weights),)))
            expected = -float((out.loss_fn_outputs[0]["logprobs"] * np.asarray(weights)).sum())
            assert close(out.metrics["loss:sum"], expected)
        targets = np.asarray([[1, 2], [3, 4], [5, 6]])
        wide = datum([1, 2, 3], targets, weights=[[0.5, 0.5], [1.0, 0.0], [0.0, 2.0]])  # type: ignore[arg-type]
        out = await output(model.backward((wide,)))
        logprobs = out.loss_fn_outputs[0]["logprobs"]
        assert logprobs.shape == (3, 2)
        assert close(out.metrics["loss:sum"], -float((logprobs * wide.loss_fn_inputs["weights"]).sum()))

    async def test_forward_only_leaves_the_gradient_alone(self, trainer: Trainer, tmp_path: Path) -> None:
        one, other = Model(trainer, "one"), Model(trainer, "other")
        for model in (one, other):
            await result(model.create())
            await result(model.backward())
        await one.loss(OTHER_DATA)
        await error(one.forward(BAD_DATA))  # nor does it count as a lost gradient
        for model in (one, other):
            await result(model.step())
        assert close(await one.loss(), await other.loss())

    async def test_gradients_add_up_until_the_step_and_not_beyond(self, trainer: Trainer, tmp_path: Path) -> None:
        one, other = Model(trainer, "one"), Model(trainer, "other")
        for model in (one, other):
            await result(model.create())
        for _ in range(2):
            await result(one.backward(DATA + OTHER_DATA))
            await result(one.step())
            await asyncio.gather(result(other.backward()), result(other.backward(OTHER_DATA)))
            await result(other.step())
        assert close(await one.loss(), await other.loss())
        no_memory = AdamParams(learning_rate=0.03, beta1=0.0, beta2=0.0)
        used, unused = Model(trainer, "used"), Model(trainer, "unused")
        for model in (used, unused):
            await result(model.create())
        await result(used.backward(OTHER_DATA))
        await result(used.step(replace(no_memory, learning_rate=0.0)))
        for model in (used, unused):
            await result(model.backward())
            await result(model.step(no_memory))
        assert close(await used.loss(), await unused.loss()), "a gradient outlived its step"

    async def test_a_step_does_what_its_parameters_say(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        before = await model.loss()
        await result(model.backward())
        await result(model.step(AdamParams(learning_rate=0.0)))
        assert await model.loss() == before
        await result(model.backward())
        metrics = getattr(await result(model.step()), "metrics", {})
        assert await model.loss() < before
        assert all(math.isfinite(value) for value in metrics.values())
        after = await model.loss()
        await result(model.backward())
        await error(model.step(AdamParams(learning_rate=math.nan)))
        assert await model.loss() == after

    async def test_a_step_without_a_backward_changes_nothing(self, trainer: Trainer, tmp_path: Path) -> None:
        """Not by the moments of the steps before it, nor by weight decay; also of a model that is new or was loaded."""
        model, decay = Model(trainer), replace(ADAM, weight_decay=0.5)

        async def idle(model: Model, steps: int) -> None:
            before = await model.loss()
            await model.loss()  # a forward is no backward
            metrics = (await stepped(model.step(decay))).metrics
            assert metrics == {"grad_norm:mean": 0.0, "step:max": steps, "skipped:max": 1.0}
            assert await model.loss() == before

        await result(model.create())
        await idle(model, 0)
        await model.train(2)
        await idle(model, 2)
        source = await saved(trainer, cast(SnapshotRef, await result(model.snapshot())), tmp_path / "a")
        loaded = Model(trainer, "loaded")
        await result(loaded.create(LORA, source))
        await idle(loaded, 2)
        for each in (model, loaded):
            await result(each.backward())
            assert (await stepped(each.step())).metrics["step:max"] == 3, "a step that was skipped was counted"
        assert close(await model.loss(), await loaded.loss())

    async def test_a_gradient_of_zeros_is_one(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        await model.train(2)
        before = await model.loss()
        await result(model.backward((datum([1, 2, 3], weights=[0.0, 0.0, 0.0]),)))
        metrics = (await stepped(model.step())).metrics
        assert (metrics["grad_norm:mean"], metrics["step:max"]) == (0.0, 3.0)
        assert "skipped:max" not in metrics
        assert not close(await model.loss(), before), "the moments did not move the weights"

    async def test_a_snapshot_leaves_the_gradient_to_the_model(self, trainer: Trainer, tmp_path: Path) -> None:
        one, other = Model(trainer, "one"), Model(trainer, "other")
        for model in (one, other):
            await result(model.create())
            await result(model.backward())
        ref = cast(SnapshotRef, await result(one.snapshot()))
        assert ref.has_pending_gradient
        for model in (one, other):
            assert (await stepped(model.step())).metrics["grad_norm:mean"] > 0
        assert close(await one.loss(), await other.loss())

    # ------------------------------------------------------------------------------------------------ failures
    async def test_a_failure_is_its_own(self, trainer: Trainer, tmp_path: Path) -> None:
        model, neighbour = Model(trainer), Model(trainer, "neighbour")
        futures = [model.create(), neighbour.create()]
        good, bad, theirs = model.forward(), model.forward(BAD_DATA), neighbour.backward()
        late = model.forward()
        await asyncio.gather(*map(result, [*futures, good, theirs, late]))
        assert "data[0].loss_fn_inputs['weights']" in str(await error(bad))
        await result(neighbour.step())

    async def test_the_step_after_a_failed_backward_fails(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        before = await model.loss()
        good, bad, step = model.backward(), model.backward(BAD_DATA), model.step()
        await result(good)
        await error(bad)
        await error(step)
        assert await model.loss() == before
        await model.step_on_zeros()  # nothing else is left to step on
        assert close(await model.loss(), before), "the failed step kept a gradient"
        await result(model.backward())
        await result(model.step())
        assert await model.loss() < before

    async def test_a_loss_that_is_not_finite_fails_its_request_alone(self, trainer: Trainer, tmp_path: Path) -> None:
        model, neighbour = Model(trainer), Model(trainer, "neighbour")
        for each in (model, neighbour):
            await result(each.create())
        before = await neighbour.loss()
        good = datum([1, 2], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])
        wild = datum([1, 2], logprobs=[-1e38, -1.0], advantages=[1.0, 1.0])
        bad, theirs = model.backward((good, wild), "importance_sampling"), neighbour.backward()
        assert "data[1]" in str(await error(bad))
        await result(theirs)
        await error(model.step())
        await result(neighbour.step())
        assert await neighbour.loss() < before

    async def test_rejected_takes_its_place(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        refused = [
            model.send(Rejected, message="no such thing", poisons_gradient=False),
            model.send(Rejected, message="half a batch", poisons_gradient=True),
        ]
        step = model.step()
        assert [str(await error(future)) for future in refused] == ["no such thing", "half a batch"]
        await error(step)
        await result(model.backward())
        harmless = model.send(Rejected, message="no such thing", poisons_gradient=False)
        step = model.step()
        await error(harmless)
        await result(step)

    # ------------------------------------------------------------------------------------------------ snapshots
    async def test_a_snapshot_says_what_it_is(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        await model.train(2)  # seq_ids 1 to 4
        await result(model.backward())
        ref = await result(model.snapshot("sampler"))
        assert ref == SnapshotRef(
            version=Version(model_id="model", number=6),
            kind="sampler",
            trainable=LORA,
            step=2,
            applied_seq_id=6,
            has_pending_gradient=True,
        )

    @pytest.mark.parametrize("kind", ["training", "sampler"])
    async def test_save_writes_what_the_manifest_says(self, trainer: Trainer, tmp_path: Path, kind: str) -> None:
        model = Model(trainer)
        await result(model.create())
        await model.train(1)
        ref = cast(SnapshotRef, await result(model.snapshot(kind)))
        source = await saved(trainer, ref, tmp_path / kind)
        directory = Path(source.directory)
        manifest: Manifest = await trainer.save(ref, str(_empty(tmp_path / "again")))
        expected = {ADAPTER, ADAPTER_CONFIG} | ({OPTIMIZER} if kind == "training" else set())
        assert set(manifest.files) == expected == set(os.listdir(directory)) - {MANIFEST}
        assert all((directory / name).stat().st_size == entry.size_bytes for name, entry in manifest.files.items())
        assert (manifest.base, manifest.owner, manifest.step, manifest.trainable) == ("", "", 1, LORA)
        assert manifest.has_optimizer == (kind == "training")
        names = load_file(directory / ADAPTER).keys()
        assert all(name.startswith("base_model.model.") and ".lora_" in name for name in names), names

    async def test_a_snapshot_stays_as_it_was_taken_and_is_loaded_whole(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        await model.train(2)
        ref = cast(SnapshotRef, await result(model.snapshot()))
        at_snapshot = await model.loss()
        await model.train(2)
        goes_on = await model.loss()
        source = await saved(trainer, ref, tmp_path / "a")
        again = Model(trainer, "again")
        created = await result(again.create(Lora(rank=16), source))
        assert created == ModelCreated(model_id="again", trainable=LORA, step=2)
        assert close(await again.loss(), at_snapshot)
        await again.train(2)
        assert close(await again.loss(), goes_on), "moments or step were not restored"

    async def test_load_into_a_model(self, trainer: Trainer, tmp_path: Path) -> None:
        model, into = Model(trainer), Model(trainer, "into")
        await result(model.create())
        await model.train(3)
        source = await saved(trainer, cast(SnapshotRef, await result(model.snapshot())), tmp_path / "a")
        at_snapshot = await model.loss()
        await result(into.create())
        fresh = await into.loss()
        loaded = await result(into.send(LoadState, source=source))
        assert getattr(loaded, "step", None) == 3
        assert close(await into.loss(), at_snapshot)
        await into.step_on_zeros(AdamParams(learning_rate=0.0))
        assert close(await into.loss(), at_snapshot), "a copy of the weights was left stale"
        weights_only = Model(trainer, "weights only")
        await result(weights_only.create())
        await result(weights_only.send(LoadState, source=replace(source, optimizer=False)))
        await weights_only.step_on_zeros()
        assert close(await weights_only.loss(), at_snapshot), "moments were loaded that were not asked for"
        other = Model(trainer, "other")
        await result(other.create(Lora(rank=8)))
        await error(other.send(LoadState, source=source))
        assert close(await other.loss(), fresh)

    async def test_load_of_what_is_not_there(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        source = CheckpointSource(uri="tinker://x/weights/none", directory=str(tmp_path / "none"), optimizer=True)
        await error(model.create(source=source), NotFound)
        await error(model.backward(), NotFound)
        await result(model.create())
        await error(model.send(LoadState, source=source), NotFound)
        await result(model.backward())

    async def test_a_damaged_checkpoint_is_refused(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        source = await saved(trainer, cast(SnapshotRef, await result(model.snapshot())), tmp_path / "a")
        path = Path(source.directory) / ADAPTER
        body = bytearray(path.read_bytes())
        body[-5] ^= 1
        path.write_bytes(body)
        await error(Model(trainer, "again").create(source=source), Damaged)

    async def test_optimizer_state_that_was_never_saved(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        source = await saved(trainer, cast(SnapshotRef, await result(model.snapshot("sampler"))), tmp_path / "a")
        await error(Model(trainer, "again").create(source=source))
        await result(Model(trainer, "again").create(source=replace(source, optimizer=False)))

    async def test_what_cannot_be_saved(self, trainer: Trainer, tmp_path: Path) -> None:
        model = Model(trainer)
        await result(model.create())
        ephemeral = cast(SnapshotRef, await result(model.snapshot("sampler", for_disk=False)))
        with pytest.raises(NotFound):
            await trainer.save(ephemeral, str(_empty(tmp_path / "a")))
        ref = cast(SnapshotRef, await result(model.snapshot()))
        with pytest.raises(ServerError):
            await trainer.save(ref, str(tmp_path / "no" / "such" / "directory"))
        await trainer.save(ref, str(_empty(tmp_path / "b")))
        await trainer.drop(ref)
        await trainer.drop(ref)
        with pytest.raises(NotFound):
            await trainer.save(ref, str(_empty(tmp_path / "c")))


def _empty(path: Path) -> Path:
    path.mkdir()
    return path
