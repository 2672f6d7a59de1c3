"""A snapshot is what was true when it was taken, whatever happens to the rows; and where it is on its way to a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.ckpt.peft import ADAPTER, OPTIMIZER, ExportBase
from descant.ckpt.snapshot import LEGAL, SaveState, Snapshots
from descant.ckpt.writer import CheckpointWriter
from descant.errors import CannotStore, NotFound
from descant.types import Lora, Snapshot, SnapshotRef, Version

SITES = tuple(
    LoraSite(name=f"model.layers.{i}.{name}", group=group, in_features=12, out_features=20 + i)
    for i in range(3)
    for name, group in (("q_proj", "attn"), ("up_proj", "mlp"))
)
CPU = torch.device("cpu")
LORAS = [Lora(rank=8), Lora(rank=5), Lora(rank=16, train_attn=False)]


class Desk:
    def __init__(self) -> None:
        self.bank = AdapterBank(SITES, device=CPU, dtype=torch.float32)
        self.writer = CheckpointWriter(CPU)
        self.snapshots = Snapshots(self.bank, base=ExportBase(name="a/base"), writer=self.writer)
        self._numbers = itertools.count(1)

    def train(self, model_id: str, seed: int) -> None:
        """Other numbers in all that a save holds."""
        generator = torch.Generator().manual_seed(seed)
        lora, state = self.bank[model_id].lora, self.bank.state(model_id)
        for row in state:
            parts = self.bank.export(row, lora)
            self.bank.import_row({n: torch.randn(p.shape, generator=generator) for n, p in parts.items()}, lora, row)

    def take(self, model_id: str, kind: str = "training") -> SnapshotRef:
        command = Snapshot(model_id=model_id, seq_id=next(self._numbers), kind=kind)
        return self.snapshots.take(command, has_pending_gradient=False)

    def expected(self, model_id: str) -> Mapping[str, bytes]:
        """The files' bytes, made by the library, at once and in memory."""
        lora = self.bank[model_id].lora
        weights, *moments = (self.bank.export(row, lora) for row in self.bank.state(model_id))
        named = {f"moment{i}.{name}": tensor for i, row in enumerate(moments, 1) for name, tensor in row.items()}
        files = {ADAPTER: weights, OPTIMIZER: named}
        return {name: safetensors.torch.save(tensors, {"format": "pt"}) for name, tensors in files.items()}


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.writer.close()


@pytest.mark.parametrize("lora", LORAS, ids=lambda lora: f"rank {lora.rank}")
def test_the_files_are_the_rows_as_they_were(desk: Desk, tmp_path: Path, lora: Lora) -> None:
    """Rows are overwritten as soon as the snapshot is taken, and again as it is staged."""
    desk.bank.create("m", lora)
    desk.train("m", 1)
    expected = desk.expected("m")
    ref = desk.take("m")
    desk.bank.state("m").fill_(7.0)
    desk.bank.refresh_compute("m")
    write = desk.snapshots.save(ref, str(tmp_path))
    desk.train("m", 2)
    manifest = write()
    assert {name: (tmp_path / name).read_bytes() for name in expected} == expected
    assert manifest.has_optimizer
    assert manifest.trainable == lora
    assert all(manifest.files[name].size_bytes == len(body) for name, body in expected.items())


def test_a_snapshot_shares_no_memory_with_what_lives(desk: Desk) -> None:
    desk.bank.create("m", Lora(rank=8))
    desk.train("m", 1)
    ref = desk.take("m")
    held = desk.snapshots._held[ref.version].rows
    live = [desk.bank.state("m"), desk.bank.gradient("m"), desk.bank.compute_slab(8), desk.bank.gradient_slab(8)]
    assert len(held) == 3
    for row in held:
        assert row.untyped_storage().data_ptr() not in {tensor.untyped_storage().data_ptr() for tensor in live}
        assert row.untyped_storage().nbytes() == row.nbytes


def test_for_sampling_only_the_weights_are_held(desk: Desk, tmp_path: Path) -> None:
    desk.bank.create("m", Lora(rank=8))
    desk.train("m", 1)
    ref = desk.take("m", "sampler")
    assert desk.snapshots.stats()["snapshots_held_bytes"] == desk.bank.weights("m").nbytes
    manifest = desk.snapshots.save(ref, str(tmp_path))()
    assert not manifest.has_optimizer
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(manifest.files)
    assert OPTIMIZER not in manifest.files


def test_what_is_dropped_while_it_is_saved_is_saved(desk: Desk, tmp_path: Path) -> None:
    desk.bank.create("m", Lora(rank=8))
    expected = desk.expected("m")
    ref = desk.take("m")
    write = desk.snapshots.save(ref, str(tmp_path))
    desk.snapshots.drop(ref)
    assert desk.snapshots.stats()["snapshots_held"] == 0
    write()
    assert (tmp_path / ADAPTER).read_bytes() == expected[ADAPTER]
    with pytest.raises(NotFound):
        desk.snapshots.save(ref, str(tmp_path))


def test_a_held_snapshot_is_published(desk: Desk) -> None:
    desk.bank.create("m", Lora(rank=5))
    desk.train("m", 1)
    expected = desk.bank.weights("m").clone()
    ref = desk.take("m", "sampler")
    desk.train("m", 2)
    desk.snapshots.publish(ref, None)
    row = desk.bank.pin_version(Version(model_id="m", number=ref.version.number))
    assert torch.equal(desk.bank.compute_slab(row.rank_bucket)[row.slot], expected)


# ------------------------------------------------------------------------------------------------ states


def state_of(desk: Desk, ref: SnapshotRef) -> SaveState:
    return desk.snapshots._held[ref.version].save_state


def test_a_save_goes_from_state_to_state(desk: Desk, tmp_path: Path) -> None:
    desk.bank.create("m", Lora(rank=8))
    ref = desk.take("m")
    assert state_of(desk, ref) == SaveState.TAKEN
    with pytest.raises(CannotStore):
        desk.snapshots.save(ref, str(tmp_path / "no"))()
    assert state_of(desk, ref) == SaveState.FAILED
    desk.snapshots.save(ref, str(tmp_path))()
    assert state_of(desk, ref) == SaveState.WRITTEN
    (tmp_path / "again").mkdir()
    desk.snapshots.save(ref, str(tmp_path / "again"))()
    assert (tmp_path / "again" / ADAPTER).read_bytes() == (tmp_path / ADAPTER).read_bytes()
    stats = desk.snapshots.stats()
    assert (stats["saves_written"], stats["saves_failed"], stats["snapshots_held"]) == (2, 1, 1)


@pytest.mark.parametrize("before", SaveState)
@pytest.mark.parametrize("after", SaveState)
def test_no_other_state_may_come_next(desk: Desk, before: SaveState, after: SaveState) -> None:
    desk.bank.create("m", Lora(rank=8))
    held = desk.snapshots._held[desk.take("m").version]
    held.save_state = before
    if after in LEGAL[before]:
        held.becomes(after)
        assert held.save_state == after
    else:
        with pytest.raises(AssertionError, match="cannot be"):
            held.becomes(after)
        assert held.save_state == before


def test_every_way_begins_taken_and_ends_written_or_failed() -> None:
    def ways(state: SaveState, so_far: tuple[SaveState, ...]) -> Iterator[tuple[SaveState, ...]]:
        if state in (SaveState.WRITTEN, SaveState.FAILED):
            yield (*so_far, state)
            return
        for after in LEGAL[state]:
            yield from ways(after, (*so_far, state))

    s = SaveState
    assert set(ways(s.TAKEN, ())) == {
        (s.TAKEN, s.STAGING, s.FAILED),
        (s.TAKEN, s.STAGING, s.STAGED, s.FAILED),
        (s.TAKEN, s.STAGING, s.STAGED, s.WRITTEN),
    }
