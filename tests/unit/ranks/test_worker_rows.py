"""Row commands of one turn on a real worker: optimiser steps are made together, and each model's order is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from descant.app import base_spec
from descant.config import load_settings
from descant.errors import DescantError, NotFound, UserError
from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.ranks.decide import row_order
from descant.ranks.ops import Rows
from descant.ranks.peers import Peers
from descant.ranks.replica import Replica
from descant.ranks.roles.sample import SampleRole
from descant.ranks.roles.train import TrainRole
from descant.ranks.settings import RankSettings, RankSpec, ReplicaSettings, SampleSettings
from descant.ranks.worker import Worker, build
from descant.sample.runner import Sampler
from descant.testing.ranks import changed
from descant.testing.tiny import tiny_model
from descant.testing.trainer import Model, datum, error, result
from descant.train.requests import Learner
from descant.types import (
    AdamParams,
    Command,
    CreateModel,
    DeleteModel,
    ForwardBackwardOutput,
    Lora,
    OptimStep,
    OptimStepOutput,
    Snapshot,
)

PARAMS = AdamParams(learning_rate=1e-2)
SMALL = ReplicaSettings(rank=RankSettings(device="cpu"), sample=SampleSettings(max_num_seqs=2, kv_cache_bytes=1 << 20))


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


class WatchedLearner(Learner):
    def __init__(self, *rest: Any, **options: Any):
        super().__init__(*rest, **options)
        self.measured: list[list[str]] = []

    def optim_steps(self, steps: Sequence[tuple[str, AdamParams]], **options: Any) -> list[OptimStepOutput | Exception]:
        self.measured.append([model_id for model_id, _ in steps])
        return super().optim_steps(steps, **options)


class WatchedTrainRole(TrainRole):
    def __init__(self, *rest: Any, **options: Any):
        super().__init__(*rest, learner=WatchedLearner, **options)


@pytest.fixture
def worker(tiny_llama: Path) -> Worker:
    source = ModelSource(name="tiny", directory=tiny_llama)
    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
    return Worker(model, SMALL, train=WatchedTrainRole)


@pytest.fixture
def measured(worker: Worker) -> list[list[str]]:
    """The models of each time that the device is waited for."""
    assert worker.train is not None
    learner = worker.train.learner
    assert isinstance(learner, WatchedLearner)
    return learner.measured


def step(model_id: str, seq_id: int, params: AdamParams = PARAMS) -> OptimStep:
    return OptimStep(model_id=model_id, seq_id=seq_id, adam_params=params)


def create(worker: Worker, *model_ids: str) -> None:
    commands = tuple(CreateModel(model_id=m, seq_id=0, trainable=Lora(rank=4, seed=0)) for m in model_ids)
    outcomes = worker.execute(Rows(commands=commands))
    assert not any(isinstance(outcome.result, DescantError) for outcome in outcomes)
    for model_id in model_ids:
        worker.model.bank.load(model_id)


def run(worker: Worker, *commands: Command) -> dict[tuple[str, int], object]:
    outcomes = worker.execute(Rows(commands=row_order(commands, worker.memory.is_resident)))
    assert len(outcomes) == len(commands)
    return {outcome.key: outcome.result for outcome in outcomes}


def test_steps_of_all_models_are_made_together_and_each_models_own_one_by_one(
    worker: Worker, measured: list[list[str]]
) -> None:
    create(worker, "a", "b", "c")
    for model_id in "ac":
        worker.model.bank[model_id].gradient_free = False  # one of zeros, for the first step
    commands: list[Command] = [
        step("a", 1),
        step("a", 2),
        DeleteModel(model_id="b", seq_id=1),
        step("b", 2),
        step("c", 1),
    ]
    results = run(worker, *commands)
    assert measured == [["a", "c"], ["a"]]
    steps = {key: result.metrics["step:max"] for key, result in results.items() if isinstance(result, OptimStepOutput)}
    assert steps == {("a", 1): 1, ("a", 2): 1, ("c", 1): 1}
    assert isinstance(results["b", 2], NotFound)


def test_what_one_is_refused_for_is_not_the_others(worker: Worker, measured: list[list[str]]) -> None:
    create(worker, "a", "b", "c")
    results = run(worker, step("a", 1), step("b", 1, AdamParams(eps=0.0)), step("c", 1))
    assert measured == [["a", "b", "c"]]
    assert [type(result) for result in results.values()] == [OptimStepOutput, UserError, OptimStepOutput]
    assert all(worker.model.bank[m].pins == 0 for m in "abc")


def test_rows_that_do_not_fit_together_are_loaded_one_by_one(worker: Worker, measured: list[list[str]]) -> None:
    create(worker, "a", "b", "c")
    bank = worker.model.bank
    bank.adapter_bytes = 2 * bank.bytes_in_use("a")[0]
    with bank.pinned_adapter("c"):  # the longest unused one moves out
        pass
    here = [m for m in "abc" if bank.is_resident(m)]
    assert len(here) == 2
    results = run(worker, *(step(m, 1) for m in "abc"))
    assert measured == [here, [m for m in "abc" if m not in here]]
    assert all(isinstance(result, OptimStepOutput) for result in results.values())
    assert not all(bank.is_resident(m) for m in "abc")


def test_offloaded_rows_are_loaded_once_a_turn(worker: Worker) -> None:
    create(worker, "a", "b", "c")
    bank = worker.model.bank
    bank.adapter_bytes = bank.bytes_in_use("a")[0]
    with bank.pinned_adapter("a"):
        pass
    before = bank.stats()["adapter_loads"]
    commands: list[Command] = [step(m, 1) for m in "abc"]
    commands += [Snapshot(model_id=m, seq_id=2, kind="sampler", for_disk=False) for m in "abc"]
    results = run(worker, *commands)
    assert list(results) == [(m, seq_id) for m in "abc" for seq_id in (1, 2)]
    assert bank.stats()["adapter_loads"] - before == 2


@pytest.mark.parametrize("compile", [None, False, True])
def test_whether_layers_are_compiled_is_its_settings_to_say(tiny_llama: Path, compile: bool | None) -> None:
    """The compiler itself has tests of its own, and takes its time."""
    told: list[tuple[str, bool | None]] = []

    def load(*args: Any, **options: Any) -> BaseModel:
        told.append(("model", options.pop("compile")))
        return load_model(*args, **options)

    class ToldSampler(Sampler):
        def __init__(self, *args: Any, **options: Any):
            told.append(("sampler", options["compile_decode"]))
            super().__init__(*args, **options)

    class ToldSampleRole(SampleRole):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, sampler=ToldSampler, **options)

    spec = RankSpec(model=str(tiny_llama), settings=changed(SMALL, rank={"compile": compile}))
    build(spec, lambda phase: None, Peers(), load=load, sample=ToldSampleRole)
    assert told == [("model", compile), ("sampler", compile is not False)]


@pytest.mark.parametrize("mapped", [False, True])
async def test_a_loss_without_a_definition_is_what_the_settings_say(tiny_llama: Path, mapped: bool) -> None:
    """From the settings to the pass, as a server goes."""
    overrides = ["rank.device=cpu", "rank.dtype=float32", "sample.kv_cache_bytes=1048576", "sample.max_num_seqs=2"]
    settings = load_settings(overrides=[*overrides, *["losses.stable_reinforce=cispo"] * mapped])
    spec = base_spec(str(tiny_llama), settings)
    replica = await Replica.in_process(lambda phase: build(spec, phase, Peers()), settings.replica)
    model, ones = Model(replica), [1.0, 0.5, -1.0]
    await result(model.create())
    data = (datum([1, 2, 3], logprobs=[-2.0, -1.0, -3.0], advantages=ones),)
    want = cast(ForwardBackwardOutput, await result(model.backward(data, "cispo")))
    if mapped:
        got = cast(ForwardBackwardOutput, await result(model.backward(data, "stable_reinforce")))
        assert got.metrics["loss:sum"] == want.metrics["loss:sum"] != 0.0
        assert got.metrics["computed_as_cispo:mean"] == 1.0
        assert "computed_as_cispo:mean" not in want.metrics
    else:
        refused = await error(model.backward(data, "stable_reinforce"), UserError)
        assert "--set losses.stable_reinforce=importance_sampling" in str(refused)
    await replica.close()
