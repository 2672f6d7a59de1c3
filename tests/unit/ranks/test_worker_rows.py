"""Row commands of one turn on a real worker: optimiser steps are made together, and nobody's order is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import descant.ranks.worker as worker_module
from descant.app import base_spec
from descant.config import load_settings
from descant.errors import DescantError, NotFound, UserError
from descant.model.load import ModelSource, load_model
from descant.ranks.peers import Peers
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSettings, RankSpec
from descant.ranks.turns import Rows
from descant.ranks.worker import Worker
from descant.testing.tiny import tiny_model
from descant.testing.trainer import Model, datum, error, result
from descant.types import (
    AdamParams,
    Command,
    CreateModel,
    DeleteModel,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStep,
    OptimStepOutput,
    Snapshot,
)

PARAMS = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def worker(tiny_llama: Path) -> Worker:
    source = ModelSource(name="tiny", directory=tiny_llama)
    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
    return Worker(model, RankSettings(device="cpu", kv_bytes=1 << 20, max_running=2))


@pytest.fixture
def measured(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The models of each time that the device is waited for."""
    calls: list[list[str]] = []
    real = worker._learner.optim_steps

    def optim_steps(steps: Sequence[tuple[str, AdamParams]], **options: Any) -> list[OptimStepOutput | Exception]:
        calls.append([model_id for model_id, _ in steps])
        return real(steps, **options)

    monkeypatch.setattr(worker._learner, "optim_steps", optim_steps)
    return calls


def step(model_id: str, seq_id: int, params: AdamParams = PARAMS) -> OptimStep:
    return OptimStep(model_id=model_id, seq_id=seq_id, adam_params=params)


def create(worker: Worker, *model_ids: str) -> None:
    commands = tuple(CreateModel(model_id=m, seq_id=0, lora=LoraConfig(rank=4, seed=0)) for m in model_ids)
    outcomes = worker.rows(Rows(commands=commands))
    assert not any(isinstance(outcome.result, DescantError) for outcome in outcomes)
    for model_id in model_ids:
        worker._model.bank.bring(worker._model.bank[model_id])


def run(worker: Worker, *commands: Command) -> dict[tuple[str, int], object]:
    outcomes = worker.rows(Rows(commands=commands))
    assert len(outcomes) == len(commands)
    return {outcome.key: outcome.result for outcome in outcomes}


def test_steps_of_all_models_are_made_together_and_each_models_own_one_by_one(
    worker: Worker, measured: list[list[str]]
) -> None:
    create(worker, "a", "b", "c")
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
    assert steps == {("a", 1): 1, ("a", 2): 2, ("c", 1): 1}
    assert isinstance(results["b", 2], NotFound)


def test_what_one_is_refused_for_is_not_the_others(worker: Worker, measured: list[list[str]]) -> None:
    create(worker, "a", "b", "c")
    results = run(worker, step("a", 1), step("b", 1, AdamParams(eps=0.0)), step("c", 1))
    assert measured == [["a", "b", "c"]]
    assert [type(result) for result in results.values()] == [OptimStepOutput, UserError, OptimStepOutput]
    assert all(worker._model.bank[m].holds == 0 for m in "abc")


def test_rows_that_do_not_fit_together_are_brought_one_by_one(worker: Worker, measured: list[list[str]]) -> None:
    create(worker, "a", "b", "c")
    bank = worker._model.bank
    bank.max_adapter_bytes = 2 * bank.bytes_in_use("a")[0]
    with bank.held("c"):  # the longest unused one moves out
        pass
    here = [m for m in "abc" if bank.is_resident(m)]
    assert len(here) == 2
    results = run(worker, *(step(m, 1) for m in "abc"))
    assert measured == [here, [m for m in "abc" if m not in here]]
    assert all(isinstance(result, OptimStepOutput) for result in results.values())
    assert not all(bank.is_resident(m) for m in "abc")


def test_whose_rows_are_out_are_brought_once_a_turn(worker: Worker) -> None:
    create(worker, "a", "b", "c")
    bank = worker._model.bank
    bank.max_adapter_bytes = bank.bytes_in_use("a")[0]
    with bank.held("a"):
        pass
    before = bank.stats()["loads"]
    commands: list[Command] = [step(m, 1) for m in "abc"]
    commands += [Snapshot(model_id=m, seq_id=2, kind="sampler", for_disk=False) for m in "abc"]
    results = run(worker, *commands)
    assert list(results) == [(m, seq_id) for m in "abc" for seq_id in (1, 2)]
    assert bank.stats()["loads"] - before == 2


@pytest.mark.parametrize("compile", [None, False, True])
def test_whether_layers_are_compiled_is_its_settings_to_say(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, compile: bool | None
) -> None:
    """The compiler itself has tests of its own, and takes its time."""
    told: list[tuple[str, bool | None]] = []
    load, sampler = worker_module.load_model, worker_module.Sampler

    def load_model(*args: Any, **options: Any) -> Any:
        told.append(("model", options.pop("compile")))
        return load(*args, **options)

    def make_sampler(*args: Any, **options: Any) -> Any:
        told.append(("sampler", options["compile_decode"]))
        return sampler(*args, **options)

    monkeypatch.setattr(worker_module, "load_model", load_model)
    monkeypatch.setattr(worker_module, "Sampler", make_sampler)
    settings = RankSettings(device="cpu", kv_bytes=1 << 20, max_running=2, compile=compile)
    worker_module.build(RankSpec(model=str(tiny_llama), settings=settings), lambda phase: None, Peers())
    assert told == [("model", compile), ("sampler", compile is not False)]


@pytest.mark.parametrize("mapped", [False, True])
async def test_a_loss_without_a_definition_is_what_the_settings_say(tiny_llama: Path, mapped: bool) -> None:
    """From the settings to the pass, as a server goes."""
    overrides = ["rank.device=cpu", "rank.dtype=float32", "rank.kv_bytes=1048576", "rank.max_running=2"]
    settings = load_settings(overrides=[*overrides, *["losses.stable_reinforce=cispo"] * mapped])
    spec = base_spec(str(tiny_llama), settings)
    replica = await Replica.in_process(lambda phase: worker_module.build(spec, phase, Peers()), settings.rank)
    model, ones = Model(replica), [1.0, 0.5, -1.0]
    await result(model.create())
    data = (datum([1, 2, 3], logprobs=[-2.0, -1.0, -3.0], advantages=ones),)
    want = cast(ForwardBackwardOutput, await result(model.backward(data, "cispo")))
    if mapped:
        got = cast(ForwardBackwardOutput, await result(model.backward(data, "stable_reinforce")))
        assert got.metrics["loss:sum"] == want.metrics["loss:sum"] != 0.0
    else:
        await error(model.backward(data, "stable_reinforce"), UserError)
    await replica.close()
