"""Gradient of tenant A surviving a swap to tenant B: there is no swap here, each adapter owns its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness, rl_datum
from descant.testing.tiny import tiny_model
from descant.types import AdamParams

pytestmark = pytest.mark.crashes


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("swap") / "llama")


def trained(directory: Path, order: str) -> torch.Tensor:
    """B's weights after its own backward and step, with A's backward and step where ``order`` has them."""
    source = ModelSource(name="tiny", directory=directory)
    harness = LearnerHarness(load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False))
    harness.create("a", 8, seed=1)
    harness.create("b", 8, seed=2)
    for action in order.split():
        if action in ("a", "b"):
            data = rl_datum(9, 5) if action == "a" else rl_datum(7, 3)
            harness.run(harness.command(action, data, loss_fn="importance_sampling"))
        else:
            harness.step(action[-1], AdamParams(learning_rate=1e-2, eps=1e-8))
    return torch.cat([tensor.flatten() for tensor in harness.state("b")])


@pytest.mark.parametrize(
    "order", ["a b step:b", "b a step:b", "a b step:a step:b", "b a step:a step:b", "a a b step:b a"]
)
def test_gradient_of_tenant_a_surviving_a_swap_to_tenant_b(directory: Path, order: str):
    alone = trained(directory, "b step:b")
    assert torch.equal(trained(directory, order), alone)


def test_the_comparison_can_fail(directory: Path):
    assert not torch.equal(trained(directory, "b b step:b"), trained(directory, "b step:b"))
