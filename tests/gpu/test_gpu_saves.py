"""A snapshot on a device goes to files beside the computation, and is what was true when it was taken."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.ckpt.peft import ADAPTER, OPTIMIZER, ExportBase
from descant.ckpt.snapshot import Snapshots
from descant.ckpt.staging import Arena
from descant.ckpt.writer import CheckpointWriter
from descant.types import Lora, Snapshot, SnapshotRef

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CYCLES = 4_000_000_000
"""That a stream is busy with something else: about two seconds."""
SITES = tuple(
    LoraSite(name=f"model.layers.{i}.{name}", group="mlp", in_features=in_features, out_features=out_features)
    for i in range(2)
    for name, in_features, out_features in (("up_proj", 1024, 12288), ("down_proj", 12288, 1024))
)
"""At rank 256 matrices are longer than a slot of the arena; at rank 200 those of B are no whole rows of theirs."""


class Desk:
    def __init__(self) -> None:
        self.bank = AdapterBank(SITES, device=torch.device("cuda"), dtype=torch.bfloat16, adapter_bytes=4 << 30)
        self.writer = CheckpointWriter(self.bank.device)
        self.writer.start()
        self.snapshots = Snapshots(self.bank, base=ExportBase(name="a/base"), writer=self.writer)

    def fill(self, model_id: str) -> dict[str, bytes]:
        """Random rows; the bytes of their files."""
        lora, state = self.bank[model_id].lora, self.bank.state(model_id)
        for row in state:
            parts = {name: torch.randn_like(part) for name, part in self.bank.export(row, lora).items()}
            self.bank.import_row(parts, lora, row)
        weights, *moments = ({n: t.cpu() for n, t in self.bank.export(row, lora).items()} for row in state)
        named = {f"moment{i}.{name}": tensor for i, row in enumerate(moments, 1) for name, tensor in row.items()}
        files = {ADAPTER: weights, OPTIMIZER: named}
        return {name: safetensors.torch.save(tensors, {"format": "pt"}) for name, tensors in files.items()}

    def take(self, model_id: str, seq_id: int = 1) -> SnapshotRef:
        command = Snapshot(model_id=model_id, seq_id=seq_id, kind="training")
        return self.snapshots.take(command, has_pending_gradient=False)


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.writer.close()


def test_the_device_can_write_the_arena_by_itself() -> None:
    assert Arena(torch.device("cuda")).slots.is_pinned()


@pytest.mark.parametrize("rank", [8, 200, 256])
def test_the_files_are_the_rows_as_they_were(desk: Desk, tmp_path: Path, rank: int) -> None:
    """The device is behind when the snapshot is taken, and the rows are overwritten at once."""
    name = f"rank {rank}"
    desk.bank.create(name, Lora(rank=rank))
    expected = desk.fill(name)
    torch.cuda._sleep(CYCLES // 10)
    ref = desk.take(name)
    desk.bank.state(name).fill_(7.0)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(desk.snapshots.save(ref, str(tmp_path))).result()
    assert {file: (tmp_path / file).read_bytes() for file in expected} == expected


def test_what_is_dropped_as_it_is_staged_keeps_its_memory(desk: Desk, tmp_path: Path) -> None:
    """Its memory is asked for again at once, by computation that fills it."""
    desk.bank.create("dropped", Lora(rank=256))
    expected = desk.fill("dropped")
    with ThreadPoolExecutor(1) as thread:
        for number in range(5):
            directory = tmp_path / str(number)
            directory.mkdir()
            ref = desk.take("dropped", number)
            saving = thread.submit(desk.snapshots.save(ref, str(directory)))
            desk.snapshots.drop(ref)
            while not saving.done():
                desk.bank.state("dropped").clone().fill_(7.0)
            saving.result()
            assert {file: (directory / file).read_bytes() for file in expected} == expected


def test_a_save_does_not_wait_for_what_the_device_is_told_after_it(desk: Desk, tmp_path: Path) -> None:
    desk.bank.create("beside", Lora(rank=8))
    expected = desk.fill("beside")
    torch.cuda.synchronize()
    ref = desk.take("beside")
    torch.cuda._sleep(CYCLES)
    busy = torch.cuda.current_stream().record_event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(desk.snapshots.save(ref, str(tmp_path))).result()
    assert not busy.query()
    torch.cuda.synchronize()
    assert (tmp_path / ADAPTER).read_bytes() == expected[ADAPTER]
