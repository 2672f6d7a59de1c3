"""Training adapters that are not in rows: what is offloaded comes back bit for bit, and the limits hold."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from descant import storage
from descant.adapters.bank import AdapterBank
from descant.adapters.layout import Layout, LoraSite
from descant.adapters.offload import CopyStream, SpillDirectory
from descant.adapters.residency import Offloadable
from descant.adapters.slots import (
    AddressRange,
    AddressRangeSlots,
    GradientSlot,
    ReallocatedSlots,
    Reallocation,
    RowMemory,
    Slot,
    Slots,
)
from descant.adapters.training import Adapter
from descant.adapters.versions import Published
from descant.errors import CannotStore, NotFound, ServerError
from descant.types import Lora, Version

CPU = torch.device("cpu")
SITES = (
    LoraSite(name="model.layers.0.self_attn.q_proj", group="attn", in_features=64, out_features=24),
    LoraSite(name="model.layers.0.mlp.up_proj", group="mlp", in_features=64, out_features=40),
    LoraSite(name="lm_head", group="unembed", in_features=64, out_features=56),
)
LORAS = (
    Lora(rank=8, seed=1),
    Lora(rank=3, seed=2),
    Lora(rank=8, seed=3, train_mlp=False),
    Lora(rank=16, seed=4),
    Lora(rank=9, seed=5, train_attn=False),
    Lora(rank=8, seed=6),
)


def row_elements(rank_bucket: int = 8) -> int:
    return Layout.of(SITES, rank_bucket).row


def in_use(rank_bucket: int = 8) -> int:
    """Bytes of one adapter in rows: state, gradient and a float32 compute copy."""
    return row_elements(rank_bucket) * (12 + 4 + 4)


def make_bank(
    num_adapters: float, *, rank_bucket: int = 8, spill: SpillDirectory | Path | None = None, **options: object
) -> AdapterBank:
    return AdapterBank(
        SITES,
        device=CPU,
        dtype=torch.float32,
        adapter_bytes=int(num_adapters * in_use(rank_bucket)),
        spill=SpillDirectory(spill) if isinstance(spill, Path) else spill,
        **options,  # type: ignore[arg-type]
    )


def write(bank: AdapterBank, model_id: str, generator: torch.Generator, *, pending: bool) -> list[torch.Tensor]:
    """Random numbers wherever the adapter has any; what was written, with None's place taken by zeros."""
    adapter = bank[model_id]
    rows = [bank.weights(model_id), *bank.moments(model_id)]
    if pending:
        rows.append(bank.gradient(model_id))
        adapter.gradient_free = False
    for row in rows:
        parts = bank.export(row, adapter.lora)
        for part in parts.values():
            part.copy_(torch.randn(part.shape, generator=generator))
        bank.import_row(parts, adapter.lora, row)
    adapter.step += 1
    bank.refresh_compute(model_id)
    return [row.clone() for row in state(bank, model_id)]


def state(bank: AdapterBank, model_id: str) -> list[torch.Tensor]:
    adapter = bank[model_id]
    slot = adapter.compute_slot  # brings it back, which may replace the slab
    work = bank.compute_slab(adapter.rank_bucket)[slot]
    return [bank.weights(model_id), *bank.moments(model_id), bank.gradient(model_id), work]


def adapters(bank: AdapterBank) -> list[Adapter]:
    return list(bank._training.all)


def published(bank: AdapterBank, version: Version) -> Published:
    return next(found for found in bank._versions.all if found.version == version)


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Overlapping(CopyStream):
    """As on CUDA, rows are copied to the host and loaded ahead of need; the copies are done when they are asked for."""

    overlaps = True


def make_bank_as_on_cuda(num_adapters: float, **options: object) -> AdapterBank:
    """Rows are reallocated, and copied beside the computation."""
    return make_bank(num_adapters, **{"memory": Reallocation(), "copies": Overlapping(CPU), **options})


TIERS = {"host": {}, "disk": {"host_bytes": 0}, "both": {"host_bytes": 40_000}}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cuda", [False, True], ids=["as on CPU", "as on CUDA"])
def test_what_comes_back_is_what_was_there(cuda: bool, tier: str, seed: int, tmp_path: Path) -> None:
    """Ranks that fill their bucket and such that do not, gradients pending and not, in any order."""
    bank = (make_bank_as_on_cuda if cuda else make_bank)(3, spill=tmp_path, **TIERS[tier])
    names = {f"m{index}": lora for index, lora in enumerate(LORAS)}
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    fresh = make_bank(100)
    expected = {}
    for name, lora in names.items():
        bank.create(name, lora)
        fresh.create(name, lora)
        expected[name] = [row.clone() for row in state(fresh, name)]
    pending = dict.fromkeys(names, False)
    for turn in range(60):
        name = choose.choice(list(names))
        if choose.random() < 0.3:
            bank.prefetch(choose.sample(list(names), 3), keep={name})
        assert equal(state(bank, name), expected[name]), (turn, name)
        assert bank[name].gradient_free is not pending[name]
        if choose.random() < 0.6:
            pending[name] = choose.random() < 0.5 or pending[name]
            expected[name] = write(bank, name, generator, pending=pending[name])
        elif pending[name]:  # as an optimiser step leaves it
            bank.gradient(name).zero_()
            bank[name].gradient_free, pending[name] = True, False
            expected[name][3].zero_()
        assert bank.stats()["adapters_resident_bytes"] <= bank.adapter_bytes
        if choose.random() < 0.3:
            bank.residency.settle()
            assert bank.stats()["adapters_host_bytes"] <= TIERS[tier].get("host_bytes", 4 << 30)
    bank.residency.settle()
    stats = bank.stats()
    assert stats["adapter_offloads"] > 10
    assert stats["adapter_loads"] > 5
    assert (stats["adapters_disk"] > 0) == (tier != "host")
    assert sum(adapter.file is not None for adapter in adapters(bank)) == len(list(tmp_path.iterdir()))
    for name in names:
        bank.delete(name)
    bank.residency.settle()
    stats = bank.stats()
    assert list(tmp_path.iterdir()) == []
    assert stats["compute_rows"] == stats["scratch_rows"] == stats["adapters_host_bytes"] == 0


def test_a_new_adapter_takes_nothing_until_somebody_asks_for_a_row() -> None:
    bank = make_bank(2)
    for index in range(1000):
        bank.create(f"m{index}", Lora(rank=8, seed=index))
    stats = bank.stats()
    assert (stats["adapters"], stats["adapters_new"], stats["adapters_resident_bytes"]) == (1000, 1000, 0)
    assert bank.weights("m999").count_nonzero() > 0
    assert bank.stats()["adapters_resident"] == 1


def test_a_packed_row_is_of_its_true_rank() -> None:
    bank = make_bank(1)
    bank.create("small", Lora(rank=1))
    write(bank, "small", torch.Generator(), pending=True)
    bank.create("other", Lora(rank=8))
    bank.weights("other")
    numbers = sum(site.in_features + site.out_features for site in SITES)
    assert bank.stats()["adapters_host_bytes"] == 4 * 4 * numbers
    assert 4 * 4 * numbers < in_use() / 5


def test_the_longest_unused_goes_first_and_who_is_waited_for_last() -> None:
    bank = make_bank(3)
    for name in ("a", "b", "c", "d", "e"):
        bank.create(name, Lora(rank=8))
    for name in ("a", "b", "c", "a"):
        bank.weights(name)
    bank.weights("d")
    assert [bank.is_resident(name) for name in "abcd"] == [True, False, True, True]
    bank.prefetch(["c"], keep={"e"})
    bank.weights("e")
    assert [bank.is_resident(name) for name in "abcde"] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("asked_for", "keep", "leaves"),
    [
        pytest.param([], (), "a", id="the longest unused"),
        pytest.param(["a"], (), "b", id="of those that nobody waits for"),
        pytest.param(["a", "b", "c"], (), "c", id="who is asked for last"),
        pytest.param(["c", "b", "a"], (), "a", id="whoever was used last"),
        pytest.param(["b", "c"], ("a", "d"), "c", id="sooner than whose turn it is"),
        pytest.param([], ("a", "b", "d"), "c", id="or who is in this turn"),
        pytest.param([], ("a", "b", "c", "d"), "a", id="all are in this turn"),
    ],
)
def test_the_one_that_is_needed_last_goes(asked_for: list[str], keep: tuple[str, ...], leaves: str) -> None:
    bank = make_bank(3)
    for name in ("a", "b", "c", "d"):
        bank.create(name, Lora(rank=8))
    for name in ("a", "b", "c"):
        bank.weights(name)
    bank.prefetch(asked_for, keep=keep)
    bank.weights("d")
    assert [name for name in "abc" if not bank.is_resident(name)] == [leaves]


def test_whose_part_of_a_turn_is_done_goes_before_who_waits() -> None:
    bank = make_bank(3)
    for name in ("a", "b", "c", "d", "e"):
        bank.create(name, Lora(rank=8))
    for name in ("a", "b", "c"):
        bank.weights(name)
    bank.prefetch(["a"], keep=("b", "c", "d", "e"))
    for name in ("b", "c", "d", "e"):
        bank.weights(name)
    assert [name for name in "abcde" if bank.is_resident(name)] == ["a", "d", "e"]


def test_opening_a_pass_moves_nobody_out_who_is_in_it() -> None:
    """Two come back in a turn of four, for which there is room: no more than two leave."""
    bank = make_bank(4)
    names = ["a", "b", "c", "d", "e", "f"]
    for name in names:
        bank.create(name, Lora(rank=8))
        bank.weights(name)
    before = bank.stats()["adapter_offloads"]
    bank.prefetch([], keep=names[:4])
    for name in names[:4]:
        bank.pin_adapter(name)
    assert bank.stats()["adapter_offloads"] - before == 2
    assert all(bank.is_resident(name) for name in names[:4])


def test_what_is_pinned_stays_beyond_the_limit_and_goes_when_unpinned() -> None:
    bank = make_bank(2)
    places = {}
    for name in ("a", "b", "c"):
        bank.create(name, Lora(rank=8))
        adapter = bank.pin_adapter(name)
        bank.gradient(name).fill_(ord(name))
        places[name] = (adapter.compute_slot, adapter.gradient_slot)
    bank.create("d", Lora(rank=8))
    bank.weights("d")
    for name, (work, slot) in places.items():
        assert (bank[name].compute_slot, bank[name].gradient_slot) == (work, slot)
        assert (bank.gradient_row(8, slot) == ord(name)).all()
    for name in places:
        bank.gradient(name).zero_()
        bank.unpin_adapter(name)
    assert bank.stats()["adapters_resident"] == 2
    assert bank.stats()["adapters_resident_bytes"] <= bank.adapter_bytes
    with pytest.raises(ServerError, match="was not pinned"):
        bank.unpin_adapter("a")


def test_scratch_rows_count() -> None:
    bank = make_bank(2)
    for name in ("a", "b"):
        bank.create(name, Lora(rank=8))
        bank.weights(name)
    bank.pin_adapter("b")
    scratch = bank.allocate_scratch(8)
    assert not bank.is_resident("a")
    assert bank.stats()["scratch_rows"] == 1
    bank.free_scratch(8, scratch)
    bank.weights("a")
    assert bank.stats()["adapters_resident"] == 2


@pytest.mark.parametrize("rank", [8, 3], ids=["whole rows", "true rank"])
def test_a_rank_bucket_takes_the_room_that_another_left(rank: int) -> None:
    bank = make_bank(4, rank_bucket=16)
    for index in range(4):
        bank.create(f"large{index}", Lora(rank=16))
        bank.weights(f"large{index}")
    for index in range(4):
        bank.create(f"small{index}", Lora(rank=rank))
        bank.weights(f"small{index}")
        assert bank.stats()["adapters_resident_bytes"] <= bank.adapter_bytes
    assert all(bank.is_resident(f"small{index}") for index in range(4))
    assert bank.is_resident("large3")
    assert bank.stats()["adapters_resident"] >= 5


def test_memory_that_was_used_is_used_again() -> None:
    bank = make_bank(100)
    bank.create("a", Lora(rank=8))
    first = bank.weights("a").data_ptr()
    write(bank, "a", torch.Generator(), pending=True)
    before = bank.stats()["adapters_resident_bytes"]
    bank.delete("a")
    assert bank.stats()["adapters_resident_bytes"] == before - 4 * row_elements(), "all but the compute copy is kept"
    bank.create("b", Lora(rank=8, seed=9))
    assert bank.weights("b").data_ptr() == first
    assert bank.stats()["adapters_resident_bytes"] == before
    fresh = make_bank(100)
    fresh.create("b", Lora(rank=8, seed=9))
    assert equal(state(bank, "b"), state(fresh, "b"))


def test_on_a_full_disk_who_is_here_goes_on_and_who_would_come_is_turned_away(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    bank = make_bank(1, host_bytes=0, spill=spill)
    generator = torch.Generator()
    for name in ("a", "b"):
        bank.create(name, Lora(rank=8))
    expected = write(bank, "a", generator, pending=True)
    spill.rmdir()
    for _ in range(3):
        with pytest.raises(CannotStore, match="the data directory cannot be written") as raised:
            bank.create("c", Lora(rank=8))
        assert str(tmp_path) not in str(raised.value)
        bank.weights("b")
        bank.residency.settle()
        stats = bank.stats()
        assert (stats["adapters"], stats["adapters_resident"], stats["adapters_host"]) == (2, 1, 1)
        assert equal(state(bank, "a"), expected)
    spill.mkdir()
    bank.create("c", Lora(rank=8))
    bank.weights("c")
    bank.residency.settle()
    assert bank.stats()["adapters_disk"] == 2
    assert equal(state(bank, "a"), expected)


def test_spilling_leaves_the_reserve_free(tmp_path: Path) -> None:
    """As the disk says how much is free: whoever is told that there is no room writes nothing."""
    free = storage.reserve_bytes(tmp_path) + 100
    bank = make_bank(1, host_bytes=0, spill=SpillDirectory(tmp_path, free=lambda _: free))
    bank.create("a", Lora(rank=8))
    expected = write(bank, "a", torch.Generator(), pending=True)
    with pytest.raises(CannotStore, match="the data directory is full"):
        bank.create("b", Lora(rank=8))
    assert list(tmp_path.iterdir()) == []
    free += 1 << 30
    bank.create("b", Lora(rank=8))
    bank.weights("b")
    bank.residency.settle()
    assert len(list(tmp_path.iterdir())) == 1
    assert equal(state(bank, "a"), expected)


def test_a_full_disk_does_not_stop_what_host_memory_can_swap(tmp_path: Path) -> None:
    """The one that comes back leaves its place on the host to the one that goes."""
    spill = tmp_path / "spill"
    bank = make_bank(1, host_bytes=16 * row_elements(), spill=spill)
    for name in ("a", "b"):
        bank.create(name, Lora(rank=8))
    expected = {name: write(bank, name, torch.Generator(), pending=True) for name in ("a", "b")}
    spill.rmdir()
    for name in ("a", "b", "a", "b"):
        assert equal(state(bank, name), expected[name])


def test_what_is_displaced_on_a_full_disk_stays_in_host_memory(tmp_path: Path) -> None:
    """Though it does not fit the place that the one which comes leaves."""
    spill = tmp_path / "spill"
    bank = make_bank(1, host_bytes=4 * row_elements(), spill=spill)
    bank.create("small", Lora(rank=1))
    expected = write(bank, "small", torch.Generator(), pending=True)
    bank.create("large", Lora(rank=8))
    large = write(bank, "large", torch.Generator(), pending=True)
    spill.rmdir()
    assert equal(state(bank, "small"), expected)
    assert bank.stats()["adapters_host"] == 1
    spill.mkdir()
    assert equal(state(bank, "large"), large)
    assert equal(state(bank, "small"), expected)
    bank.residency.settle()
    assert bank.stats()["adapters_host"] == 0


def test_a_file_that_is_gone_or_broken_is_named(tmp_path: Path) -> None:
    bank = make_bank(1, host_bytes=0, spill=tmp_path)
    for name in ("a", "b", "c"):
        bank.create(name, Lora(rank=8))
        write(bank, name, torch.Generator(), pending=False)
    bank.residency.settle()
    first, second = (bank[name].file for name in ("a", "b"))
    assert first is not None
    assert second is not None
    first.write_bytes(b"rubbish")
    second.unlink()
    bank.prefetch(["b"], keep=())
    for name in ("a", "b"):
        with pytest.raises(
            ServerError, match=f"the adapter of model {name} cannot be read back from its file"
        ) as raised:
            bank.weights(name)
        assert str(tmp_path) not in str(raised.value)
        assert bank.is_resident("c")
        bank.delete(name)
        with pytest.raises(NotFound):
            bank.weights(name)
    bank.residency.settle()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    bank = make_bank(1, host_bytes=0, spill=tmp_path)
    for name, rank in (("a", 8), ("b", 3)):
        bank.create(name, Lora(rank=rank))
        write(bank, name, torch.Generator(), pending=False)
    bank.create("c", Lora(rank=8))
    bank.weights("c")
    bank.residency.settle()
    a, b = bank["a"].file, bank["b"].file
    assert a is not None
    assert b is not None
    a.write_bytes(b.read_bytes())
    with pytest.raises(ServerError, match="it holds"):
        bank.weights("a")


def test_deleted_while_its_file_is_read(tmp_path: Path) -> None:
    bank = make_bank(1, host_bytes=0, spill=tmp_path)
    for name in ("a", "b"):
        bank.create(name, Lora(rank=8))
        write(bank, name, torch.Generator(), pending=True)
    bank.residency.settle()
    bank.prefetch(["a"], keep={"b"})
    assert bank["a"].reading is not None
    bank.delete("a")
    bank.residency.settle()
    assert list(tmp_path.iterdir()) == []
    bank.create("a", Lora(rank=8, seed=3))
    fresh = make_bank(1)
    fresh.create("a", Lora(rank=8, seed=3))
    assert equal(state(bank, "a"), state(fresh, "a"))


def test_files_are_read_ahead(tmp_path: Path) -> None:
    bank = make_bank(1, host_bytes=0, spill=tmp_path)
    expected = {}
    for name in ("a", "b", "c", "d", "e"):
        bank.create(name, Lora(rank=8))
        expected[name] = write(bank, name, torch.Generator(), pending=True)
    bank.residency.settle()
    bank.prefetch(["a", "b", "c"], keep={"e"})
    ahead = [name for name in "abcde" if bank[name].reading is not None]
    assert ahead == ["a", "b"]
    for name in ahead:
        file, reading = bank[name].file, bank[name].reading
        assert file is not None
        assert reading is not None
        reading.result(30)
        file.unlink()  # what was read is what comes back
        assert equal(state(bank, name), expected[name])


def test_rows_are_loaded_ahead_of_need_within_the_limit() -> None:
    bank = make_bank(2, copies=Overlapping(CPU))
    expected = {}
    for name in ("a", "b", "c"):
        bank.create(name, Lora(rank=8))
        expected[name] = write(bank, name, torch.Generator(), pending=True)
    bank.prefetch(["a", "b"], keep={"c"})
    stats = bank.stats()
    assert (stats["adapter_prefetches"], stats["adapter_offloads"]) == (0, 1), "b and c are wanted or in use"
    bank.prefetch(["a"], keep={"c"})
    stats = bank.stats()
    assert (stats["adapter_prefetches"], stats["adapter_offloads"]) == (1, 2)
    assert [bank.is_resident(name) for name in "abc"] == [True, False, True]
    assert stats["adapters_resident_bytes"] <= bank.adapter_bytes
    for name in expected:
        assert equal(state(bank, name), expected[name])
    assert bank.stats()["adapter_loads"] - bank.stats()["adapter_prefetches"] <= 2


def test_what_is_pinned_is_not_displaced_ahead_of_need() -> None:
    bank = make_bank(1, copies=Overlapping(CPU))
    for name in ("a", "b"):
        bank.create(name, Lora(rank=8))
        write(bank, name, torch.Generator(), pending=True)
    bank.pin_adapter("b")
    bank.prefetch(["a"], keep=())
    assert bank.is_resident("b")
    assert not bank.is_resident("a")


def test_files_of_an_earlier_process_are_removed(tmp_path: Path) -> None:
    bank = make_bank(1, host_bytes=0, spill=tmp_path)
    for name in ("a", "b"):
        bank.create(name, Lora(rank=8))
        bank.weights(name)
    bank.residency.settle()
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "half.adapter.partial").write_bytes(b"x")
    (tmp_path / ".tmpAb12Cd").write_bytes(b"x")
    (tmp_path / "mine.txt").write_text("x")
    make_bank(1, spill=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("cuda", [False, True], ids=["as on CPU", "as on CUDA"])
def test_an_offloaded_adapter_is_published_as_it_is(cuda: bool, tmp_path: Path) -> None:
    memory = Reallocation() if cuda else AddressRange()
    bank = make_bank(1, host_bytes=0, spill=tmp_path, version_bytes=1 << 20, memory=memory)
    bank.create("a", Lora(rank=8))
    expected = write(bank, "a", torch.Generator(), pending=True)
    bank.create("b", Lora(rank=8))
    bank.weights("b")
    version = Version(model_id="a", number=4)
    bank.publish("a", version)
    bank.weights("b")
    row = bank.pin_version(version)
    assert torch.equal(bank.compute_slab(8)[row.slot], expected[0])
    fresh = make_bank(1)
    for name in ("c", "d", "e"):  # more than the slab has rows for
        for one in (bank, fresh):
            one.create(name, Lora(rank=8, seed=ord(name)))
        bank.publish(name, Version(model_id=name, number=1))
        row = bank.pin_version(Version(model_id=name, number=1))
        assert torch.equal(bank.compute_slab(8)[row.slot], fresh.weights(name))


def test_a_zero_adapter_is_zero_even_on_used_memory() -> None:
    bank = make_bank(100)
    bank.create("a", Lora(rank=8))
    write(bank, "a", torch.Generator(), pending=True)
    bank.delete("a")
    bank.create("b", Lora(rank=8), zero_init=True)
    assert all(row.count_nonzero() == 0 for row in state(bank, "b"))


class Noting(SpillDirectory):
    """Which threads wrote files."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.threads: list[str] = []

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Path:
        self.threads.append(threading.current_thread().name)
        return super().write(name, tensors)

    def keep_busy(self, until: threading.Event) -> None:
        """Its own thread: what is to be written has not begun then."""
        self._writing_thread().submit(until.wait, 10)


def written_ahead(directory: Path) -> tuple[AdapterBank, dict[str, list[torch.Tensor]], Noting]:
    """One adapter in rows, three on the host, which has room for no more; and what writes its files."""
    spill = Noting(directory)
    bank = make_bank(1, host_bytes=3 * 12 * row_elements(), spill=spill)
    expected = {}
    for name in "abcd":
        bank.create(name, Lora(rank=8))
        expected[name] = write(bank, name, torch.Generator(), pending=False)
    assert bank.stats()["adapters_host"] == 3
    return bank, expected, spill


def test_what_the_host_must_give_up_is_written_ahead(tmp_path: Path) -> None:
    bank, expected, spill = written_ahead(tmp_path)
    for _ in range(3):  # one is enough for now, and it is written once
        bank.prefetch([], keep=["d"])
        bank.residency.settle()
    assert [file.name.startswith(bank["a"].file_name) for file in tmp_path.iterdir()] == [True]
    assert bank.stats()["adapters_disk"] == 0, "nobody needed the room yet"
    bank.create("e", Lora(rank=8))
    bank.weights("e")
    assert [name for name in "abcd" if bank[name].host is None] == ["a"], "its room is free at once"
    assert [name.startswith("descant-spill") for name in spill.threads] == [True]
    assert bank.stats()["adapters_disk"] == len(list(tmp_path.iterdir())) == 1
    for name, rows in expected.items():
        assert equal(state(bank, name), rows)


@pytest.mark.parametrize("begun", [True, False])
def test_what_was_written_ahead_is_forgotten_when_it_comes_back(tmp_path: Path, begun: bool) -> None:
    """Also while it is still being written: nobody waits for that."""
    bank, expected, spill = written_ahead(tmp_path)
    release = threading.Event()
    if not begun:
        spill.keep_busy(release)
    bank.prefetch([], keep=["d"])
    if begun:
        bank.residency.settle()
    assert equal(state(bank, "a"), expected["a"])
    expected["a"] = write(bank, "a", torch.Generator().manual_seed(1), pending=True)
    assert release.is_set() is False
    release.set()
    bank.residency.settle()
    assert bank["a"].file is None
    assert not list(tmp_path.glob(bank["a"].file_name + "*"))
    for name, rows in expected.items():
        assert equal(state(bank, name), rows)


def test_what_could_not_be_written_ahead_is_written_when_there_is_room(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    bank, expected, noting = written_ahead(spill)
    spill.rmdir()
    bank.prefetch([], keep=["d"])
    bank.residency.settle()
    assert len(noting.threads) == 1
    assert bank["a"].file is None
    spill.mkdir()
    bank.prefetch([], keep=["d"])
    bank.residency.settle()
    assert bank["a"].file is not None
    for name, rows in expected.items():
        assert equal(state(bank, name), rows)


# ---- as many as the limit holds


@pytest.fixture(params=[False, True], ids=["as on CPU", "as on CUDA"])
def cuda(request: pytest.FixtureRequest) -> bool:
    """Rows that take memory when they are written, or when the slab is made."""
    return bool(request.param)


def bank_of(cuda: bool, limit: int, **options: object) -> AdapterBank:
    bank = (make_bank_as_on_cuda if cuda else make_bank)(0, **options)
    bank.adapter_bytes = limit
    return bank


def create(bank: AdapterBank, count: int, *, rank: int = 8, prefix: str = "m") -> list[str]:
    names = [f"{prefix}{index}" for index in range(count)]
    for index, name in enumerate(names):
        bank.create(name, Lora(rank=rank, seed=index))
    return names


@pytest.mark.parametrize("rank", [8, 3, 16, 64])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_limit_of_so_many_holds_so_many(cuda: bool, rank: int, count: int) -> None:
    rank_bucket = max(8, rank)
    bank = bank_of(cuda, count * in_use(rank_bucket))
    assert bank.room_for(rank) == count
    names = create(bank, count + 3, rank=rank)
    for name in [*names, *names[:count]]:
        bank.weights(name)
    assert [name for name in names if bank.is_resident(name)] == names[:count]
    assert bank.stats()["adapters_resident_bytes"] == bank.adapter_bytes


@pytest.mark.parametrize("rank", [8, 3, 16])
@pytest.mark.parametrize("count", [3, 10])
@pytest.mark.parametrize("order", [1, -1])
def test_a_larger_limit_before_leaves_nothing_behind(cuda: bool, rank: int, count: int, order: int) -> None:
    """Whoever stays, those in the first rows or those in the last."""
    bank = bank_of(cuda, 100 * in_use(16))
    names, generator = create(bank, 3 * count, rank=rank), torch.Generator().manual_seed(0)
    expected = {name: write(bank, name, generator, pending=index % 2 == 0) for index, name in enumerate(names)}
    bank.adapter_bytes = count * in_use(max(8, rank))
    for name in names[::order]:
        assert equal(state(bank, name), expected[name])
    bank.create("new", Lora(rank=rank))
    bank.weights("new")
    assert [name for name in names[::order] if bank.is_resident(name)] == names[::order][1 - count :]
    assert bank.stats()["adapters_resident"] == count
    assert bank.stats()["adapters_resident_bytes"] == bank.adapter_bytes
    for name in names:
        assert equal(state(bank, name), expected[name])


def test_unpinning_after_a_larger_limit(cuda: bool) -> None:
    """On CUDA what is in the last rows is held until the end, and cannot move; then it can."""
    bank = bank_of(cuda, 100 * in_use())
    names = create(bank, 12)
    for name in names:
        bank.pin_adapter(name)
        bank.gradient(name).fill_(ord(name[-1]))
        bank[name].gradient_free = False
    bank.adapter_bytes = 3 * in_use()
    for name in names:
        bank.unpin_adapter(name)
        assert all((bank.gradient(name) == ord(name[-1])).all() for name in names if bank.is_resident(name))
    assert bank.stats()["adapters_resident_bytes"] <= bank.adapter_bytes
    for name in names[-3:]:
        bank.weights(name)
    assert [name for name in names if bank.is_resident(name)] == names[-3:]
    assert bank.stats()["adapters_resident_bytes"] == bank.adapter_bytes
    for name in names:
        assert (bank.gradient(name) == ord(name[-1])).all()


@pytest.mark.parametrize("seed", range(4))
def test_two_rank_bucketes_share_the_limit_exactly(cuda: bool, seed: int) -> None:
    bank = bank_of(cuda, 3 * in_use(8) + 2 * in_use(16))
    names = [*create(bank, 3), *create(bank, 2, rank=16, prefix="large")]
    random.Random(seed).shuffle(names)
    others = [*create(bank, 4, prefix="other"), *create(bank, 4, rank=9, prefix="another")]
    for name in [*others, *names]:
        bank.weights(name)
    for name in names:
        bank.weights(name)
    assert all(bank.is_resident(name) for name in names)
    assert bank.stats()["adapters_resident_bytes"] == bank.adapter_bytes


def test_scratch_rows_leave_the_room_that_they_took(cuda: bool) -> None:
    bank = bank_of(cuda, 10 * in_use())
    names = create(bank, 10)
    bank.pin_adapter(names[0])
    scratch = [bank.allocate_scratch(8) for _ in range(7)]
    for slot in scratch:
        bank.free_scratch(8, slot)
    bank.unpin_adapter(names[0])
    for name in names:
        bank.weights(name)
    assert all(bank.is_resident(name) for name in names)
    assert bank.stats()["adapter_offloads"] == 0


class NotedTrims(Slots[Slot]):
    given_back: list[int]

    def trim(self, keep: int = 0) -> int:
        freed = super().trim(keep)
        self.given_back.extend([freed] if freed else [])
        return freed


class NotedRange(NotedTrims[Slot], AddressRangeSlots[Slot]):
    pass


class NotedReallocation(NotedTrims[Slot], ReallocatedSlots[Slot]):
    pass


class Counted:
    """Memory as on CPU, or as on CUDA; the bytes that slabs gave back, and how many states were made."""

    def __init__(self, memory: RowMemory):
        self._memory = memory
        self.relocates = memory.relocates
        self.given_back: list[int] = []
        self.num_states = 0

    def slots(
        self, name: Callable[[int], Slot], row: int, dtype: torch.dtype, device: torch.device, *, fixed: bool
    ) -> Slots[Slot]:
        slots = NotedReallocation(name, row, dtype, device) if self.relocates else NotedRange(name, row, dtype)
        slots.given_back = self.given_back
        return slots

    def zeros(self, rows: int, row: int, device: torch.device) -> torch.Tensor:
        self.num_states += 1
        return self._memory.zeros(rows, row, device)


def test_nothing_is_given_back_only_to_be_taken_again(cuda: bool) -> None:
    """12 active and room for 10, step after step: once the tight limit holds, rows and states stay where they are."""
    memory = Counted(Reallocation() if cuda else AddressRange())
    bank = bank_of(cuda, 100 * in_use(), memory=memory)
    names = create(bank, 12)

    def step() -> None:
        for group in (names[:5], names[5:10], names[10:]):
            bank.prefetch(names, keep=group)
            for name in group:
                bank.pin_adapter(name)
            for name in group:
                bank[name].gradient_free = False
                bank.unpin_adapter(name)
        for name in names:
            with bank.pinned_adapter(name):
                bank.gradient(name).zero_()
                bank[name].gradient_free = True

    step()
    assert (memory.given_back, memory.num_states) == ([], 12)
    bank.adapter_bytes = 10 * in_use()
    step()
    assert memory.given_back
    memory.given_back.clear()
    memory.num_states = 0
    address, loads = bank.gradient_slab(8).data_ptr(), bank.stats()["adapter_loads"]
    for _ in range(3):
        step()
    assert (memory.given_back, memory.num_states) == ([], 0)
    assert bank.gradient_slab(8).data_ptr() == address
    assert bank.stats()["adapter_loads"] > loads
    assert bank.stats()["adapters_resident"] == 10


def test_rows_given_back_are_zero_when_they_are_taken_again(cuda: bool) -> None:
    rows = (Reallocation() if cuda else AddressRange()).slots(GradientSlot, 2048, torch.float32, CPU, fixed=False)
    for slot in range(8):
        assert rows.allocate(zero=True) == slot
        rows.tensor[slot].fill_(slot + 1)
    for slot in (1, 4, 6, 7):
        rows.free(slot)
    assert rows.trim(keep=3) == rows.row_bytes, "the lowest three are kept"
    assert rows.trim(keep=3) == 0
    assert rows.growth_bytes() == 0
    assert rows.trim() == (1 if cuda else 3) * rows.row_bytes, "on CUDA those below the last one taken stay"
    assert [int(rows.tensor[slot].max()) for slot in (0, 2, 3, 5)] == [1, 3, 4, 6]
    for slot in (1, 4, 6, 7, 8):
        assert rows.allocate(zero=True) == slot
        assert rows.tensor[slot].count_nonzero() == 0
    for slot in range(9):
        rows.free(slot)
    rows.trim()
    assert rows.committed_bytes == 0


def test_rows_that_may_move_make_room_at_the_end() -> None:
    rows = Reallocation().slots(GradientSlot, 2048, torch.float32, CPU, fixed=False)
    for slot in range(8):
        rows.allocate(zero=True)
        rows.tensor[slot].fill_(slot + 1)
    for slot in (0, 1, 3):
        rows.free(slot)
    assert rows.pack([2, 4, 6, 7], keep=1) == {6: 0, 7: 1}, "5 stays, and one is free below it"
    assert rows.trim(keep=1) == 2 * rows.row_bytes
    assert [int(rows.tensor[slot].max()) for slot in (0, 1, 2, 4, 5)] == [7, 8, 3, 5, 6]
    assert rows.pack([0, 1, 2, 4], keep=1) == {}
    assert rows.allocate(zero=True) == 3
    assert rows.tensor[3].count_nonzero() == 0


class Scarce:
    """``torch.zeros`` on a device that is ``full`` for a while."""

    full = False

    def __call__(self, size: Sequence[int], /, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.full:
            raise torch.OutOfMemoryError
        return torch.zeros(size, dtype=dtype, device=device)

    @contextmanager
    def being_full(self) -> Iterator[None]:
        self.full = True
        yield
        self.full = False


def test_no_memory_to_shrink_in_is_no_error() -> None:
    device = Scarce()
    bank = bank_of(False, 100 * in_use(), memory=Reallocation(new_zeros=device))
    names, generator = create(bank, 8), torch.Generator().manual_seed(0)
    expected = {name: write(bank, name, generator, pending=True) for name in names}
    bank.adapter_bytes = 6 * in_use()

    with device.being_full():
        with bank.pinned_adapter(names[0]):
            pass
        assert bank.stats()["adapters_resident_bytes"] <= bank.adapter_bytes
        assert 1 <= bank.stats()["adapters_resident"] < 6
    for name in names:
        assert equal(state(bank, name), expected[name])
    assert bank.stats()["adapters_resident"] == 6


@pytest.mark.parametrize("what", ["a gradient row", "published weights", "weights that come back", "another's rows"])
@pytest.mark.parametrize("held", [False, True])
def test_who_finds_no_memory_has_that_of_adapters_that_can_leave(what: str, held: bool) -> None:
    """Within the limits, which others have used up meanwhile. Where nobody can leave it is an error that says so, and
    nothing is lost."""
    device = Scarce()
    bank = bank_of(False, 100 * in_use(), memory=Reallocation(new_zeros=device))
    version = Version(model_id="m0", number=1)
    names, generator = create(bank, 5), torch.Generator().manual_seed(0)
    expected = {name: write(bank, name, generator, pending=True) for name in names}
    if what == "weights that come back":
        bank.publish("m0", version)
        bank.residency.offload(published(bank, version))
    if what == "another's rows":
        bank.residency.offload(bank[names[4]])
    holds = [bank.pin_adapter(name) for name in names[:4]] if held else [bank.pin_adapter("m0")]
    if what != "another's rows":
        holds += [bank.pin_adapter(names[4])] if held else []
    for bucket in bank._pool.buckets:  # as if no row were free and no memory left
        bucket.trim([], states=0)
        while not bucket.compute.growth_bytes():
            bucket.compute.allocate(zero=False)
        while not bucket.gradient.growth_bytes():
            bucket.gradient.allocate(zero=False)

    def ask() -> None:
        match what:
            case "a gradient row":
                bank.allocate_scratch(bank["m0"].rank_bucket)
            case "published weights":
                bank.publish("m0", version)
            case "weights that come back":
                bank.pin_version(version)
            case _:
                bank.load(names[4])

    with device.being_full():
        if held:
            with pytest.raises(ServerError, match="no memory for"):
                ask()
        else:
            ask()
            assert bank.stats()["adapters_resident"] == 4
    for adapter in holds:
        bank.unpin_adapter(adapter.model_id)
    for name in names:
        assert equal(state(bank, name), expected[name])
    if what in ("published weights", "weights that come back") and not held:
        row = bank.pin_version(version)
        assert torch.equal(
            bank.compute_slab(row.rank_bucket)[row.slot], bank.compute_slab(row.rank_bucket)[bank["m0"].compute_slot]
        )


def unused(bank: AdapterBank, cuda: bool) -> list[tuple[int, int]]:
    """Of every rank bucket that has any, the gradient rows and the states that could be given back."""
    found = []
    for bucket in bank._pool.buckets:
        rows = bucket.gradient
        if cuda:
            idle = {a.rows.gradient for a in adapters(bank) if a.bucket is bucket and a.rows is not None and not a.pins}
            fixed = max(rows.taken - idle, default=-1) + 1
            free = len(rows.tensor) - max(fixed, len(rows.taken))
        else:
            free = rows.committed_bytes // rows.row_bytes - len(rows.taken)
        found.append((free, bucket.num_free_states))
    return [pair for pair in found if pair != (0, 0)]


@pytest.mark.parametrize("seed", range(12))
def test_nobody_leaves_for_rows_that_nobody_uses(cuda: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is created, used, held, deleted, and whatever the limit becomes: it is passed by what is held alone (and
    one that came when nothing else could leave), who leaves does so when nothing else is left to give back but what the
    next one takes, and no number is lost."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    bank = bank_of(cuda, 6 * in_use(16))
    expected: dict[str, list[torch.Tensor]] = {}
    held: dict[str, list[int]] = {}
    scratch: dict[tuple[int, int], float] = {}
    offloaded = 0
    offload = bank.residency.offload

    def spy(item: Offloadable, *, fits_host: bool = False) -> None:
        nonlocal offloaded
        if not fits_host:
            offloaded += 1
            left = unused(bank, cuda)
            assert len(left) <= 1
            assert all(rows <= 1 and states <= 1 for rows, states in left)
        offload(item, fits_host=fits_host)

    monkeypatch.setattr(bank.residency, "offload", spy)

    def new() -> str:
        name = f"m{len(expected)}-{choose.randrange(10**9)}"
        bank.create(name, Lora(rank=choose.choice([8, 8, 3, 16, 9]), seed=choose.randrange(100)))
        expected[name] = write(bank, name, generator, pending=choose.random() < 0.5)
        return name

    def pick(names: Sequence[str]) -> str:
        return choose.choice(sorted(names))

    for _ in range(300):
        what = choose.random()
        if what < 0.15 or len(expected) < 3:
            new()
        elif what < 0.45:
            name = pick([*expected])
            assert equal(state(bank, name), expected[name])
        elif what < 0.55:
            name = pick([*expected])
            held.setdefault(name, []).append(bank.pin_adapter(name).gradient_slot)
        elif what < 0.7 and held:
            name = pick([*held])
            bank.unpin_adapter(name)
            held[name].pop()
            if not held[name]:
                del held[name]
        elif what < 0.76 and len(scratch) < 6:
            rank_bucket = choose.choice([8, 16])
            slot = bank.allocate_scratch(rank_bucket)
            row = bank.gradient_row(rank_bucket, slot)
            assert row.count_nonzero() == 0
            scratch[rank_bucket, slot] = value = choose.random()
            row.fill_(value)
        elif what < 0.82 and scratch:
            rank_bucket, slot = choose.choice(sorted(scratch))
            bank.free_scratch(rank_bucket, slot)
            del scratch[rank_bucket, slot]
        elif what < 0.88 and len(expected) > len(held):
            name = pick([name for name in expected if name not in held])
            bank.delete(name)
            del expected[name]
        elif what < 0.94:
            bank.prefetch(choose.sample(sorted(expected), 3), keep=choose.sample(sorted(expected), 1))
        else:
            bank.adapter_bytes = choose.choice([2, 3, 4, 6, 9]) * in_use(16)
            name = new()  # limits are looked at by who comes and goes
            with bank.pinned_adapter(name):
                pass
        placed = [adapter for adapter in adapters(bank) if adapter.is_resident]
        if bank.stats()["adapters_resident_bytes"] > bank.adapter_bytes:
            assert sum(adapter.pins == 0 for adapter in placed) <= 1
        for name, slots in held.items():
            assert {bank[name].gradient_slot} == set(slots)
            assert torch.equal(bank.gradient(name), expected[name][3])
        for (rank_bucket, slot), value in scratch.items():
            assert (bank.gradient_row(rank_bucket, slot) == torch.tensor(value)).all()
    assert offloaded > 20
    for name in expected:
        assert equal(state(bank, name), expected[name])
