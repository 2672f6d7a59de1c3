"""What the service counts for an adapter is what a bank keeps for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from descant.adapters.layout import RANK_BUCKETS, Layout
from descant.model.load import load_model, resolve_model
from descant.service.quotas import model_bytes, version_bytes
from descant.testing.tiny import tiny_model
from descant.types import MAX_RANK, Lora


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_as_long_as_the_facts_say(dtype: torch.dtype, tmp_path: Path):
    model = load_model(
        resolve_model(str(tiny_model("llama", tmp_path))), device=torch.device("cpu"), dtype=dtype, check=False
    )
    for rank in (1, 8, 9, 32, 33, MAX_RANK):
        lora = Lora(rank=rank, train_unembed=False)
        row = Layout.of(model.bank.sites, next(size for size in RANK_BUCKETS if rank <= size)).row
        assert version_bytes(model.facts, lora) == row * dtype.itemsize
        assert model_bytes(model.facts, lora) == row * 16
    model.bank.create("m", Lora(rank=8))
    in_use, _ = model.bank.bytes_in_use("m")
    assert in_use == pytest.approx(model_bytes(model.facts, Lora(rank=8)), rel=0.3), "and a working copy"
