"""More adapters than there are rows: what the learner makes of them equals what it makes with room for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness, some_commands

RANKS = (4, 8, 3, 8, 1, 20)


@pytest.fixture
def harness_in(tiny_llama: Path, tmp_path: Path) -> Callable[[float | None, int], LearnerHarness]:
    def make(num_adapters: float | None, host_bytes: int) -> LearnerHarness:
        source = ModelSource(name="tiny", directory=tiny_llama)
        model = load_model(
            source,
            device=torch.device("cpu"),
            dtype=torch.float32,
            check=False,
            spill_dir=tmp_path / str(num_adapters),
            host_bytes=host_bytes,
        )
        harness = LearnerHarness(model)
        if num_adapters is not None:
            harness.create("probe")
            model.bank.adapter_bytes = int(num_adapters * model.bank.bytes_in_use("probe")[0])
            model.bank.delete("probe")
        return harness

    return make


def interleaved(harness: LearnerHarness) -> tuple[list[float], list[list[torch.Tensor]]]:
    """Each has its gradient pending, in two parts, while all the others are trained."""
    names = [harness.create(f"m{number}", rank, seed=number) for number, rank in enumerate(RANKS)]
    losses = []
    for _ in range(3):
        for _ in range(2):
            for command in some_commands(harness, names):
                (output,) = harness.run(command)
                losses.append(output.metrics["loss:sum"])
        for name in names[1:]:
            losses.append(harness.step(name)["grad_norm:mean"])
    return losses, [[*harness.state(name), harness.gradient(name)] for name in names]


@pytest.mark.parametrize("host_bytes", [4 << 30, 0], ids=["host", "disk"])
def test_interleaved_equals_undisturbed(
    harness_in: Callable[[float | None, int], LearnerHarness], host_bytes: int
) -> None:
    losses, states = interleaved(harness_in(None, host_bytes))
    harness = harness_in(2, host_bytes)
    tight_losses, tight_states = interleaved(harness)
    assert losses == tight_losses
    for state, tight in zip(states, tight_states):
        assert all(torch.equal(a, b) for a, b in zip(state, tight))
    assert states[0][3].count_nonzero() > 0, "one of them has a gradient pending still"
    stats = harness.bank.stats()
    assert stats["adapter_offloads"] > 20
    assert stats["adapters_resident"] <= 2
    assert (stats["adapters_disk"] > 0) == (host_bytes == 0)
