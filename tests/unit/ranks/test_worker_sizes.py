"""How much is sampled at once, where no setting says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from descant.model.base import BaseModel
from descant.ranks.peers import Peers
from descant.ranks.settings import OffloadSettings, SampleSettings
from descant.ranks.sizes import SamplingSizes, sampling_sizes, version_bytes


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
        pytest.param("cpu", SampleSettings(), (16384, 64, 512), id="cpu"),
        pytest.param(
            "cuda", SampleSettings(kv_cache_bytes=32 << 30), (163840, 256, 4096), id="all sequences at full length"
        ),
        pytest.param("cuda", SampleSettings(kv_cache_bytes=8 << 30), (131072, 256, 4096), id="what is paid for"),
        pytest.param("cuda", SampleSettings(kv_cache_bytes=32 << 20), (512, 64, 4096), id="fewer where pages are few"),
        pytest.param("cuda", SampleSettings(kv_cache_bytes=1), (2, 1, 4096), id="hardly any"),
        pytest.param(
            "cuda",
            SampleSettings(kv_cache_bytes=32 << 20, max_num_seqs=300, max_num_batched_tokens=7),
            (512, 300, 7),
            id="as told",
        ),
    ],
)
def test_sizes(device: str, settings: SampleSettings, expected: tuple[int, int, int]) -> None:
    num_pages, max_num_seqs, max_num_batched_tokens = expected
    sizes = SamplingSizes(num_pages=num_pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert sampling_sizes(cast(BaseModel, Model(torch.device(device))), settings, Peers()) == sizes


@pytest.mark.parametrize(
    ("device", "free", "expected"),
    [
        pytest.param("cpu", float("inf"), 2 << 30, id="a CPU: as the setting says"),
        pytest.param("cuda", 100 << 30, 2 << 30, id="there is room"),
        pytest.param("cuda", 6 << 30, 1 << 30, id="a quarter of what adapters leave"),
        pytest.param("cuda", 1 << 30, 0, id="adapters leave nothing"),
    ],
)
def test_versions_take_no_more_than_there_is_room_for(
    device: str, free: float, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = SimpleNamespace(
        device=torch.device(device), free_bytes=lambda: free, bank=SimpleNamespace(adapter_bytes=2 << 30)
    )
    assert version_bytes(cast(BaseModel, model), OffloadSettings(version_bytes=2 << 30)) == expected
    told = [record.getMessage() for record in caplog.records]
    assert ["offload.version_bytes is 2048 MiB" in message for message in told] == [True] * (expected < 2 << 30)
