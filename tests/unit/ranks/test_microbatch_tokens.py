"""How large training passes are where nobody has said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from descant.model.activation_checkpointing import ActivationMemory
from descant.ranks.settings import TrainSettings
from descant.ranks.sizes import PASS_TOKENS, microbatch_tokens

ACTIVATION_MEMORY = ActivationMemory(num_layers=36, layer=70_000.0, input=5_120.0, fixed=1.2e9)
"""About Qwen3-4B's."""


def model(device: str, free: float, activation_memory: ActivationMemory | None = ACTIVATION_MEMORY) -> Any:
    return SimpleNamespace(
        device=torch.device(device),
        activation_memory=activation_memory,
        free_bytes=lambda: free,
        bank=SimpleNamespace(adapter_bytes=30 << 30, version_bytes=2 << 30),
    )


@pytest.mark.parametrize(
    ("device", "free", "tokens"),
    [("cuda", 130e9, 16384), ("cuda", 60e9, 8192), ("cuda", 10e9, 2048), ("cpu", float("inf"), 1024)],
)
def test_as_many_as_fit_beside_the_adapters(device: str, free: float, tokens: int) -> None:
    assert microbatch_tokens(model(device, free), TrainSettings()) == tokens


def test_the_least_where_activations_are_not_known() -> None:
    assert microbatch_tokens(model("cuda", 130e9, None), TrainSettings()) == PASS_TOKENS[0]


def test_what_was_said_holds() -> None:
    assert microbatch_tokens(model("cuda", 130e9), TrainSettings(microbatch_tokens=100)) == 100
