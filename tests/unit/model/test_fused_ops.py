"""What is taken for a norm that PyTorch has a kernel for, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from descant.model.fused_ops import fuse
from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness, some_commands
from descant.testing.tiny import tiny_model

torch.set_num_threads(1)


@pytest.mark.parametrize(("arch", "fused"), [("llama", True), ("qwen3", True), ("gemma2", False), ("gpt_neox", False)])
def test_gradients_are_the_same(tmp_path: Path, arch: str, fused: bool) -> None:
    """Gemma's norms multiply by 1 + weight, GPT-NeoX's subtract the mean."""
    source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
    found = []
    for fusing in (False, True):
        model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
        before = {name: type(module) for name, module in model.network.named_modules()}
        if fusing:
            fuse(model.network)
            changed = {name for name, module in model.network.named_modules() if type(module) is not before[name]}
            norms = {name for name in before if "norm" in name.rpartition(".")[2]}
            assert norms
            assert changed == (norms if fused else set())
        harness = LearnerHarness(model)
        for number, name in enumerate("abc"):
            harness.create(name, 8, seed=number)
        harness.run(*some_commands(harness, list("abc")))
        found.append([harness.gradient(name) for name in "abc"])
    for plain, again in zip(*found):
        assert plain.norm() > 0
        assert (again - plain).norm() <= 1e-5 * plain.norm()
