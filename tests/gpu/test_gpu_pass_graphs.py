"""Captured passes give what passes through the layers give, whatever they were captured with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from descant.errors import UserError
from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.model.pass_graphs import PassGraphs
from descant.testing.learner import LearnerHarness, datum, some_commands, tokens
from descant.testing.tiny import tiny_model
from descant.types import AdamParams, Datum, EncodedText, ForwardBackward, ForwardBackwardOutput

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RANKS = {"a": 4, "b": 8, "c": 16, "d": 64, "e": 1, "f": 20}
Load = Callable[..., BaseModel]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def make(arch: str, *, compile: bool = False) -> BaseModel:
        source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
        return load_model(source, device=torch.device("cuda"), dtype=torch.bfloat16, compile=compile)

    return make


class Both:
    """One model, its passes with graphs and without."""

    def __init__(self, model: BaseModel, ranks: dict[str, int]):
        self.graphs = PassGraphs(model)
        self.replayed = LearnerHarness(model, decoder_forward=self.graphs.decoder_forward)
        self.plain = LearnerHarness(model, decoder_forward=model.decoder_forward)
        for number, (name, rank) in enumerate(ranks.items()):
            self.replayed.create(name, rank, seed=number, train_attn=name != "b", train_mlp=name != "c")
        self.names = list(ranks)

    def compare(self, make: Callable[[LearnerHarness], Sequence[ForwardBackward]], *, replays: bool = True) -> None:
        before = dict.fromkeys(self.graphs._graphs)
        wanted = self._outcome(self.plain, make)
        for _ in range(2):  # captured, replayed
            outputs, gradients = self._outcome(self.replayed, make)
        assert (len(self.graphs._graphs) > 0) == replays or before
        for name in gradients:
            assert relative(gradients[name], wanted[1][name]) <= 3e-2, name
        for got, want in zip(outputs, wanted[0], strict=True):
            for mine, other in zip(got.loss_fn_outputs, want.loss_fn_outputs, strict=True):
                assert np.abs(mine["logprobs"] - other["logprobs"]).mean() <= 1e-2

    def _outcome(
        self, harness: LearnerHarness, make: Callable[[LearnerHarness], Sequence[ForwardBackward]]
    ) -> tuple[list[ForwardBackwardOutput], dict[str, torch.Tensor]]:
        commands = make(harness)
        outputs = harness.run(*commands)
        trained = [command.model_id for command in commands if not command.forward_only]
        gradients = {name: harness.gradient(name) for name in trained}
        for name in trained:
            assert gradients[name].norm() > 0
            harness.step(name, AdamParams(learning_rate=0.0))
        return outputs, gradients


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen2", "mistral", "gpt_neox"])
def test_replayed_passes_equal_plain_ones(load: Load, arch: str, compile: bool) -> None:
    """Of several shapes, one after another and again: each leaves the others' buffers as they were."""
    both = Both(load(arch, compile=compile), RANKS)
    for names in (both.names, both.names[:2], ["d"], both.names):
        both.compare(lambda harness, names=names: some_commands(harness, names))  # type: ignore[misc]
    assert 2 <= len(both.graphs._graphs) <= 4


def test_other_lengths_and_adapters_replay_the_same_graph(load: Load) -> None:
    both = Both(load("llama"), {"a": 8, "b": 8, "c": 8})
    for number, lengths in enumerate([(50, 60), (100, 7), (1, 90, 3, 100), (256,), (1,)]):
        for name in both.names:
            both.compare(
                lambda harness, name=name, lengths=lengths, number=number: [  # type: ignore[misc]
                    harness.command(name, *(datum(length, number + length) for length in lengths))
                ]
            )
    assert len(both.graphs._graphs) == 1


def test_scoring_beside_training_and_alone(load: Load) -> None:
    both = Both(load("llama", compile=True), {"a": 8, "b": 16})
    both.compare(
        lambda harness: [
            harness.command("a", datum(40, 1), datum(90, 2)),
            harness.command("b", datum(70, 3), forward_only=True),
        ]
    )
    both.compare(lambda harness: [harness.command("b", datum(70, 3), datum(30, 4), forward_only=True)])
    assert {key.backward for key in both.graphs._graphs} == {True, False}


def test_what_datums_begin_with_in_common(load: Load) -> None:
    both = Both(load("qwen3"), {"a": 8})
    text = tokens(400, 0)
    ends = [np.concatenate([text[:200], tokens(20 + 7 * number, number + 1)]) for number in range(8)]

    def make(harness: LearnerHarness) -> list[ForwardBackward]:
        data = [
            Datum(
                model_input=(EncodedText(tokens=stream),),
                loss_fn_inputs={"target_tokens": np.roll(stream, -1).astype(np.int64), "weights": np.ones(len(stream))},
            )
            for stream in (*ends, text[:250], text[:300], text[:300], text[:399])
        ]
        return [harness.command("a", *data)]

    both.compare(make)
    [key] = both.graphs._graphs
    assert key.keys > key.tokens


def test_a_tenants_nan_stays_its_own(load: Load) -> None:
    both = Both(load("llama"), {"a": 8, "b": 8})
    make = lambda harness: some_commands(harness, ["a", "b"])  # noqa: E731
    both.compare(make)
    harness = both.replayed
    harness.bank.compute_slab(8)[harness.bank["a"].compute_slot].fill_(torch.nan)
    outputs = harness.try_run(*make(harness))
    assert isinstance(outputs[0], Exception)
    assert not isinstance(outputs[1], Exception)
    assert torch.isfinite(harness.gradient("b")).all()
    harness.bank.refresh_compute("a")
    harness.step("b", AdamParams(learning_rate=0.0))
    with pytest.raises(UserError, match="cleared the gradient"):
        harness.step("a")
    both.compare(make)


def test_wide_adapters_and_soft_caps_go_through_the_layers(load: Load) -> None:
    both = Both(load("llama"), {"a": 8, "f": 256})
    both.compare(lambda harness: some_commands(harness, ["a", "f"]), replays=False)
    assert not both.graphs._graphs
    capped = Both(load("gemma2"), {"a": 8})
    capped.compare(lambda harness: some_commands(harness, ["a"]), replays=False)
    assert not capped.graphs._graphs


def test_memory_comes_back(load: Load) -> None:
    both = Both(load("llama"), {"a": 8})
    make = lambda harness: [harness.command("a", datum(90, 2))]  # noqa: E731
    both.compare(make)
    both.graphs.clear()
    torch.cuda.empty_cache()
    both.compare(make)
    assert len(both.graphs._graphs) == 1
