"""How many layers are recomputed, and that it changes nothing but memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from descant.model.activation_checkpointing import MARGIN, ActivationMemory
from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness, some_commands
from descant.testing.tiny import tiny_model

torch.set_num_threads(1)

MEASURED = ActivationMemory(num_layers=28, layer=38_000.0, input=2_048.0, fixed=1.2e9)
"""About Qwen3-0.6B's."""


@pytest.mark.parametrize("num_tokens", [1, 1000, 16384, 200_000])
@pytest.mark.parametrize("free", [0.0, 1e9, 5e9, 12e9, 20e9, 80e9, float("inf")])
def test_no_more_layers_are_recomputed_than_must_be(num_tokens: int, free: float) -> None:
    layers = MEASURED.recomputed_layers(num_tokens, free)
    assert 0 <= layers <= 28
    if layers < 28:
        assert MEASURED.needed(num_tokens, layers) <= free * MARGIN
    if layers == 1:
        assert MEASURED.needed(num_tokens, 0) > free * MARGIN
    if layers > 1:
        assert MEASURED.needed(num_tokens, layers - 1) > free * MARGIN


def test_the_size_of_a_pass_is_what_fits_with_nothing_recomputed() -> None:
    choices = (2048, 4096, 8192, 16384)
    for free, tokens in ((80e9, 16384), (15e9, 8192), (1e9, 2048)):
        assert MEASURED.tokens_that_fit(free, choices) == tokens
        assert tokens == 2048 or MEASURED.recomputed_layers(tokens, free) == 0
        assert tokens == 16384 or MEASURED.recomputed_layers(2 * tokens, free) > 0


@pytest.mark.parametrize("arch", ["llama_tied", "qwen3", "gemma2", "gpt_neox", "mistral", "qwen3_moe"])
@pytest.mark.parametrize("recomputed", [1, 2])
def test_gradients_are_the_same(tmp_path: Path, arch: str, recomputed: int) -> None:
    source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
    found = {}
    for layers in (0, recomputed):
        model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
        recompute(model, layers)
        harness = LearnerHarness(model)
        runs = count_runs(model)
        for number, (name, rank) in enumerate({"a": 4, "b": 16, "c": 8}.items()):
            harness.create(name, rank, seed=number)
        outputs = harness.run(*some_commands(harness, ["a", "b", "c"]))
        assert [count[0] for count in runs] == [2 if index < layers else 1 for index in range(len(runs))]
        found[layers] = [harness.gradient(name) for name in "abc"], [output.metrics["loss:sum"] for output in outputs]
    assert found[0][1] == found[recomputed][1]
    for plain, again in zip(found[0][0], found[recomputed][0]):
        assert plain.norm() > 0
        assert (again - plain).norm() <= 1e-6 * plain.norm()


def recompute(model: BaseModel, layers: int) -> None:
    """A measure of activations and an amount of memory that make it so, for passes of any size."""
    activations = ActivationMemory(num_layers=len(model.layers), layer=100.0, input=1.0, fixed=0.0)
    model.activation_memory = activations
    free = 0.0 if layers == len(model.layers) else 1.0 + activations.needed(256, layers) / MARGIN
    model.free_bytes = lambda: free  # type: ignore[method-assign]
    model._recomputed_layers = lambda num_tokens: activations.recomputed_layers(256, model.free_bytes())  # type: ignore[method-assign]


def count_runs(model: BaseModel) -> list[list[int]]:
    counts = []
    for layer in model.layers:
        count = [0]
        layer.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        counts.append(count)
    return counts
