"""Executors for tests: the suite that each must pass, and one around another, whose operations are seen."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest

from descant.ckpt.manifest import MANIFEST, encode_manifest, write_durable
from descant.errors import NotFound, ServerError, UserError
from descant.ranks.executor import Executor
from descant.ranks.ops import (
    Drop,
    Fail,
    Idle,
    Microbatch,
    Operation,
    Pin,
    Prefetch,
    Publish,
    Release,
    Rows,
    SampleStep,
    Save,
    Stats,
    Unpin,
)
from descant.sample.scheduler import Scheduler
from descant.testing.trainer import datum
from descant.train.runner import Part, RequestKey
from descant.types import (
    AdamParams,
    CheckpointSource,
    Command,
    CreateModel,
    Deleted,
    DeleteModel,
    EncodedText,
    ForwardBackward,
    ForwardBackwardOutput,
    Lora,
    ModelCreated,
    OptimStep,
    OptimStepOutput,
    Rejected,
    SampleRequest,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    Version,
)

R = TypeVar("R")


class Around:
    """An ``Executor`` that does what ``inner`` does; subclasses see or change it."""

    def __init__(self, inner: Executor):
        self.inner = inner
        self.info, self.memory = inner.info, inner.memory

    def execute(self, op: Operation[R]) -> R:
        return self.inner.execute(op)

    def make_scheduler(self) -> Scheduler:
        return self.inner.make_scheduler()

    def read(self, source: CheckpointSource) -> Any:
        return self.inner.read(source)


# --------------------------------------------------------------------------------------------------------------------
# The suite

PARAMS = AdamParams(learning_rate=1e-2)
DATA = tuple(datum(tokens) for tokens in ([1, 2, 3, 4], [5, 6, 7]))


class ExecutorSuite:
    """What the turn loop relies on. Give it a fixture ``executor`` that serves a base model with at least 16 tokens:

    class TestMine(ExecutorSuite):
        @pytest.fixture
        def executor(self) -> Executor: ...
    """

    def test_info_is_plain_data(self, executor: Executor) -> None:
        info = pickle.loads(pickle.dumps(executor.info))
        assert info == executor.info
        assert info.num_ranks >= 1
        assert info.microbatch_tokens > 0
        assert executor.memory.adapter_bytes > 0

    def test_a_request_may_take_several_microbatches(self, executor: Executor) -> None:
        create(executor, "a")
        backward = forward_backward("a", 1)
        assert executor.execute(microbatch(executor, [backward], datums=[0], closes=False)) == []
        [outcome] = executor.execute(microbatch(executor, [backward], datums=[1], opens=False))
        assert outcome.key == ("a", 1)
        assert isinstance(outcome.result, ForwardBackwardOutput)
        assert len(outcome.result.loss_fn_outputs) == len(DATA)
        create(executor, "b")
        [whole] = executor.execute(microbatch(executor, [forward_backward("b", 1)]))
        assert isinstance(whole.result, ForwardBackwardOutput)
        loss = whole.result.metrics["loss:sum"]
        assert outcome.result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        steps = rows(executor, step("a", 2), step("b", 2))
        norms = [cast(OptimStepOutput, steps[key]).metrics["grad_norm:mean"] for key in (("a", 2), ("b", 2))]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        assert norms[0] > 0

    def test_what_cannot_be_opened_is_an_outcome_of_its_own(self, executor: Executor) -> None:
        create(executor, "here")
        here, gone = forward_backward("here", 1), forward_backward("gone", 1)
        outcomes = executor.execute(microbatch(executor, [gone, here]))
        results = {outcome.key: outcome.result for outcome in outcomes}
        assert isinstance(results["gone", 1], NotFound)
        assert isinstance(results["here", 1], ForwardBackwardOutput)
        assert len(outcomes) == 2

    def test_each_row_command_has_one_outcome(self, executor: Executor) -> None:
        create(executor, "a")
        refused = Rejected(model_id="a", seq_id=1, message="expected another", poisons_gradient=True)
        results = rows(executor, refused, step("a", 2), step("a", 3), DeleteModel(model_id="a", seq_id=4), step("a", 5))
        assert str(results["a", 1]) == "expected another"
        assert isinstance(results["a", 2], UserError), "its gradient was lost"
        assert isinstance(results["a", 3], OptimStepOutput)
        assert isinstance(results["a", 4], Deleted)
        assert isinstance(results["a", 5], NotFound)

    def test_a_request_that_failed_has_lost_its_gradient(self, executor: Executor) -> None:
        create(executor, "a")
        backward = forward_backward("a", 1)
        executor.execute(microbatch(executor, [backward], datums=[0], closes=False))
        executor.execute(Fail(key=("a", 1), command=backward, why="its turn broke"))
        results = rows(executor, step("a", 2))
        assert isinstance(results["a", 2], UserError)
        assert "1" in str(results["a", 2]), "it names the request"
        executor.execute(Fail(key=("gone", 1), command=forward_backward("gone", 1), why="no rank has it"))

    def test_a_snapshot_is_saved_read_and_dropped(self, executor: Executor, tmp_path: Path) -> None:
        create(executor, "a")
        executor.execute(microbatch(executor, [forward_backward("a", 1)]))
        results = rows(executor, step("a", 2), Snapshot(model_id="a", seq_id=3, kind="training"))
        ref = cast(SnapshotRef, results["a", 3])
        writing = executor.execute(Save(ref=ref, dest=str(tmp_path)))
        executor.execute(Drop(ref=ref))
        executor.execute(Drop(ref=ref))
        manifest = writing.run()
        write_durable(tmp_path / MANIFEST, encode_manifest(manifest))
        with pytest.raises(NotFound):
            executor.execute(Save(ref=ref, dest=str(tmp_path)))
        source = CheckpointSource(uri="tinker://a/weights/s", directory=str(tmp_path), optimizer=True)
        command = CreateModel(model_id="again", trainable=ref.trainable, source=source)
        op = Rows(commands=(command,), loaded={("again", 0): executor.read(source)})
        [created] = executor.execute(op)
        assert isinstance(created.result, ModelCreated)
        assert created.result.step == 1
        failed = Rows(
            commands=(replace(command, model_id="never"),), loaded={("never", 0): ServerError("it could not be read")}
        )
        [outcome] = executor.execute(failed)
        assert "could not be read" in str(outcome.result)

    def test_a_version_is_pinned_from_publish_to_release(self, executor: Executor) -> None:
        create(executor, "a")
        snapshot = Snapshot(model_id="a", seq_id=1, kind="sampler", for_disk=False)
        ref = cast(SnapshotRef, rows(executor, snapshot)["a", 1])
        with pytest.raises(NotFound):
            executor.execute(Pin(version=ref.version))
        executor.execute(Publish(ref=ref))
        executor.execute(Pin(version=ref.version, count=2))
        scheduler = executor.make_scheduler()
        scheduler.add(sampling(ref.version))
        tokens = list[int]()
        while (plan := scheduler.plan()) is not None:
            [output, *others] = executor.execute(SampleStep(plans=(plan, *(None,) * (executor.info.num_ranks - 1))))
            assert others == [None] * (executor.info.num_ranks - 1)
            for delta in scheduler.apply(plan, output):
                tokens += delta.tokens.tolist()
        assert len(tokens) == 4
        executor.execute(Release(version=ref.version))
        executor.execute(Unpin(version=ref.version, count=2))
        with pytest.raises(NotFound):
            executor.execute(Pin(version=ref.version))
        unknown = replace(ref, version=Version(model_id="a", number=99))
        with pytest.raises(NotFound):
            executor.execute(Publish(ref=unknown))

    def test_what_has_no_outcome_never_fails(self, executor: Executor) -> None:
        create(executor, "a")
        executor.execute(Prefetch(model_ids=("a", "gone"), keep=("gone",)))
        executor.execute(Release(version=Version(model_id="gone", number=1)))
        executor.execute(Idle())
        assert all(isinstance(value, int | float) for value in executor.execute(Stats()).values())


def create(executor: Executor, model_id: str) -> None:
    command = CreateModel(model_id=model_id, trainable=Lora(rank=4, seed=0))
    assert isinstance(rows(executor, command)[model_id, 0], ModelCreated)


def rows(executor: Executor, *commands: Command) -> Mapping[RequestKey, object]:
    outcomes = executor.execute(Rows(commands=commands))
    assert [outcome.key for outcome in outcomes] == [(command.model_id, command.seq_id) for command in commands]
    return {outcome.key: outcome.result for outcome in outcomes}


def step(model_id: str, seq_id: int) -> OptimStep:
    return OptimStep(model_id=model_id, seq_id=seq_id, adam_params=PARAMS)


def forward_backward(model_id: str, seq_id: int) -> ForwardBackward:
    return ForwardBackward(model_id=model_id, seq_id=seq_id, data=DATA, loss_fn="cross_entropy")


def sampling(version: Version) -> SampleRequest:
    return SampleRequest(
        request_id="r",
        version=version,
        prompt=(EncodedText(tokens=np.array([1, 2, 3], np.int32)),),
        num_samples=1,
        sampling_params=SamplingParams(max_tokens=4, seed=1, stop=()),
    )


def microbatch(
    executor: Executor,
    commands: Sequence[ForwardBackward],
    *,
    datums: Sequence[int] = range(len(DATA)),
    opens: bool = True,
    closes: bool = True,
) -> Microbatch:
    """These datums of each, one pass a request; every rank has its turn."""
    keys = [(command.model_id, command.seq_id) for command in commands]
    passes: list[list[tuple[Part, ...]]] = [[] for _ in range(executor.info.num_ranks)]
    for number, key in enumerate(keys):
        for rank, of_rank in enumerate(passes):
            parts = tuple(Part(request=key, datum=datum) for datum in datums)
            of_rank.append(parts if number % len(passes) == rank else ())
    return Microbatch(
        opens=tuple(commands) if opens else (),
        shares=tuple(map(tuple, passes)),
        closes=tuple(keys) if closes else (),
    )
