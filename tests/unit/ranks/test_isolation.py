"""A tenant's numbers on a CPU are its own, in every bit, whoever its neighbours are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.ranks.settings import ReplicaSettings
from descant.ranks.worker import Worker
from descant.testing.isolation import STEPS, alone_and_beside
from descant.testing.ranks import SETTINGS, changed
from descant.testing.tiny import tiny_model

SMALL = changed(SETTINGS, train={"microbatch_tokens": 160})
"""A tenant's request is cut into pieces, and several tenants' are in a turn."""

WIDE = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 1000}
"""Large enough for products to be spread over threads, and no multiple of a register's width."""


def build(directory: Path, dtype: torch.dtype, settings: ReplicaSettings) -> Worker:
    source = ModelSource(name="tiny", directory=directory)
    return Worker(load_model(source, device=torch.device("cpu"), dtype=dtype, check=False), settings)


async def differing(worker: Worker, num_threads: int) -> list[str]:
    """Beside which neighbours a tenant's numbers are not those that it has alone."""
    seen = await alone_and_beside(worker, SMALL, num_threads=num_threads)
    alone = seen.pop("alone")
    assert len(alone.norms) == STEPS
    assert all(norm > 0 for norm in alone.norms)
    return [name for name, among in seen.items() if not among.equals(alone)]


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("llama", torch.float32),
        ("gemma2", torch.float32),
        ("gpt_neox", torch.float32),
        ("qwen3_moe", torch.float32),
        ("llama", torch.bfloat16),
    ],
    ids=str,
)
async def test_the_same_bits_beside_any_neighbours(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    overrides = {**WIDE, **({"head_dim": 24} if arch == "gemma2" else {})}
    worker = build(tiny_model(arch, tmp_path, **overrides), dtype, SMALL)
    for num_threads in (1, 2, 3):
        assert await differing(worker, num_threads) == []
