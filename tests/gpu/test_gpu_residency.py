"""Rows moved on a side stream while the device computes: bit for bit what was there, whatever runs beside."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.adapters.offload import SpillDirectory
from descant.types import Lora, Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SITES = tuple(
    LoraSite(name=f"model.layers.{layer}.mlp.up_proj", group="mlp", in_features=1024, out_features=3072)
    for layer in range(8)
)
RANKS = (8, 3, 16, 8, 9, 16, 8)


def busy() -> None:
    """A few ms that the device is behind the host."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        a = (a @ a).clamp(-1, 1)


@pytest.mark.parametrize("host_bytes", [4 << 30, 0], ids=["host", "disk"])
@pytest.mark.parametrize("seed", range(3))
def test_what_comes_back_is_what_was_there(host_bytes: int, seed: int, tmp_path: Path) -> None:
    device = torch.device("cuda")
    bank = AdapterBank(
        SITES, device=device, dtype=torch.bfloat16, host_bytes=host_bytes, spill=SpillDirectory(tmp_path)
    )
    names = {f"m{index}": Lora(rank=rank, seed=index) for index, rank in enumerate(RANKS)}
    for name, lora in names.items():
        bank.create(name, lora)
    size = bank.bytes_in_use("m2")[0]
    bank.adapter_bytes = 3 * size
    choose, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    expected: dict[str, list[torch.Tensor]] = {}
    for _ in range(120):
        if choose.random() < 0.2:  # slabs grow and shrink beside the moves
            bank.adapter_bytes = choose.choice((3, 3, 5)) * size
        name, *others = choose.sample(list(names), 4)
        adapter = bank[name]
        bank.prefetch(others, keep={name})
        with bank.pinned_adapter(name):
            busy()
            rows = [bank.weights(name), *bank.moments(name), bank.gradient(name)]
            if name in expected:
                for row, numbers in zip(rows, expected[name]):
                    assert torch.equal(row, numbers)
                work = bank.compute_slab(adapter.rank_bucket)[adapter.compute_slot]
                assert torch.equal(work, expected[name][0].bfloat16())
            for row in rows:
                parts = bank.export(row, adapter.lora)
                for part in parts.values():
                    part.normal_(generator=generator)
                bank.import_row(parts, adapter.lora, row)
            adapter.gradient_free = False
            adapter.step += 1
            bank.refresh_compute(name)
            expected[name] = [row.clone() for row in rows]
        if choose.random() < 0.2:  # others take and free rows on the computation's own stream
            scratch = bank.allocate_scratch(adapter.rank_bucket)
            assert bank.gradient_row(adapter.rank_bucket, scratch).count_nonzero() == 0
            bank.gradient_row(adapter.rank_bucket, scratch).fill_(float("nan"))
            bank.free_scratch(adapter.rank_bucket, scratch)
            version = Version(model_id=name, number=adapter.step)
            bank.publish(name, version)
            row = bank.pin_version(version)
            assert torch.equal(bank.compute_slab(row.rank_bucket)[row.slot], expected[name][0].bfloat16())
            bank.unpin_version(version)
            bank.release(version)
    stats = bank.stats()
    assert stats["adapter_offloads"] > 20
    assert stats["adapters_resident_bytes"] <= bank.adapter_bytes
    if host_bytes:
        assert stats["adapter_prefetches"] > 0
