"""How much is sampled at once, where no setting says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest
import torch

from descant.model.base import BaseModel
from descant.ranks.settings import RankSettings
from descant.ranks.worker import sampling_sizes


@dataclass
class Facts:
    max_context_length: int = 40960


@dataclass
class Model:
    """What of a base model the sizes are made of: a page of 64 tokens takes 64 KiB here."""

    device: torch.device
    facts: Facts = field(default_factory=Facts)

    def kv_bytes_per_token(self) -> int:
        return 1024


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        pytest.param("cpu", RankSettings(), (16384, 64, 512), id="cpu"),
        pytest.param("cuda", RankSettings(kv_bytes=32 << 30), (163840, 256, 4096), id="all sequences at full length"),
        pytest.param("cuda", RankSettings(kv_bytes=8 << 30), (131072, 256, 4096), id="what is paid for"),
        pytest.param("cuda", RankSettings(kv_bytes=32 << 20), (512, 64, 4096), id="fewer where pages are few"),
        pytest.param("cuda", RankSettings(kv_bytes=1), (2, 1, 4096), id="hardly any"),
        pytest.param(
            "cuda", RankSettings(kv_bytes=32 << 20, max_running=300, step_tokens=7), (512, 300, 7), id="as told"
        ),
    ],
)
def test_sizes(device: str, settings: RankSettings, expected: tuple[int, int, int]) -> None:
    assert sampling_sizes(cast(BaseModel, Model(torch.device(device))), settings) == expected
