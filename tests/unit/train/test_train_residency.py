"""More adapters than there are rows: what the learner makes of them equals what it makes with room for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.testing.studio import Studio, some_commands

RANKS = (4, 8, 3, 8, 1, 20)


@pytest.fixture
def studio_in(tiny_llama: Path, tmp_path: Path) -> Callable[[float | None, int], Studio]:
    def make(num_adapters: float | None, max_host_bytes: int) -> Studio:
        source = ModelSource(name="tiny", directory=tiny_llama)
        model = load_model(
            source,
            device=torch.device("cpu"),
            dtype=torch.float32,
            check=False,
            spill_dir=tmp_path / str(num_adapters),
            max_host_bytes=max_host_bytes,
        )
        studio = Studio(model)
        if num_adapters is not None:
            studio.create("probe")
            model.bank.max_adapter_bytes = int(num_adapters * model.bank.bytes_in_use("probe")[0])
            model.bank.delete("probe")
        return studio

    return make


def interleaved(studio: Studio) -> tuple[list[float], list[list[torch.Tensor]]]:
    """Each has its gradient pending, in two parts, while all the others are trained."""
    names = [studio.create(f"m{number}", rank, seed=number) for number, rank in enumerate(RANKS)]
    losses = []
    for _ in range(3):
        for _ in range(2):
            for command in some_commands(studio, names):
                (output,) = studio.run(command)
                losses.append(output.metrics["loss:sum"])
        for name in names[1:]:
            losses.append(studio.step(name)["grad_norm:mean"])
    return losses, [[*studio.state(name), studio.gradient(name)] for name in names]


@pytest.mark.parametrize("max_host_bytes", [4 << 30, 0], ids=["host", "disk"])
def test_interleaved_equals_undisturbed(studio_in: Callable[[float | None, int], Studio], max_host_bytes: int) -> None:
    losses, states = interleaved(studio_in(None, max_host_bytes))
    studio = studio_in(2, max_host_bytes)
    tight_losses, tight_states = interleaved(studio)
    assert losses == tight_losses
    for state, tight in zip(states, tight_states):
        assert all(torch.equal(a, b) for a, b in zip(state, tight))
    assert states[0][3].count_nonzero() > 0, "one of them has a gradient pending still"
    stats = studio.bank.stats()
    assert stats["evictions"] > 20
    assert stats["adapters_resident"] <= 2
    assert (stats["adapters_disk"] > 0) == (max_host_bytes == 0)
