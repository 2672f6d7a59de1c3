"""Published versions on their way down and up: who waits, what is served meanwhile, and what becomes of the files."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import Layout, LoraSite
from descant.adapters.offload import CopyEvent, CopyStream, SpillDirectory
from descant.adapters.slots import MAX_LEAVING, ComputeSlot, MappedRange, Reallocation
from descant.errors import CannotStore
from descant.testing import numbered_versions
from descant.testing.hanging_spill import HangingSpill
from descant.testing.mapped_memory import FakeDriver
from descant.testing.numbered_versions import is_whole
from descant.types import Version

CPU = torch.device("cpu")
SITES = (LoraSite(name="model.layers.0.mlp.up_proj", group="mlp", in_features=64, out_features=64),)
ROW_BYTES = 4 * Layout.of(SITES, 8).row


def make_bank(*, device: int, host: int, spill: SpillDirectory | Path | None = None, **options: object) -> AdapterBank:
    """Room for so many versions."""
    return AdapterBank(
        SITES,
        device=CPU,
        dtype=torch.float32,
        version_bytes=device * ROW_BYTES,
        host_bytes=host * ROW_BYTES,
        spill=SpillDirectory(spill) if isinstance(spill, Path) else spill,
        **options,  # type: ignore[arg-type]
    )


publish = partial(numbered_versions.publish, rank=8)


# ---- copies beside the computation


class Event:
    """Of a copy that passes when a test says so, or when the thread that writes files waits for it (unless ``held``).
    ``waited``: what is computed comes after it."""

    def __init__(self, held: bool) -> None:
        self.passed = threading.Event()
        self.waited = False
        self._held = held

    def query(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        self.waited = True

    def synchronize(self) -> None:
        assert threading.current_thread() is not threading.main_thread(), "the thread that computes waits for a copy"
        if not self._held:
            self.passed.set()
        assert self.passed.wait(30)


class Beside(CopyStream):
    """Copies are made when they are asked for, and known to be there later."""

    overlaps = True

    def __init__(self, *, held: bool = False) -> None:
        super().__init__(CPU)
        self.events: deque[Event] = deque()
        self._held = held

    def record(self) -> CopyEvent:
        self.events.append(Event(self._held))
        return self.events[-1]


def test_a_row_is_used_again_once_its_copy_is_there() -> None:
    copies = Beside()
    bank = make_bank(device=1, host=100, version_copies=copies)
    slots = []
    for number in range(4):
        version = publish(bank, number)
        slots.append(bank.pin_version(version).slot)
        bank.unpin_version(version)
    assert len(set(slots)) == 4, "none of the first three copies is there yet"
    for event in list(copies.events)[:2]:
        event.passed.set()
    again = []
    for number in (4, 5):
        version = publish(bank, number)
        again.append(bank.pin_version(version).slot)
        bank.unpin_version(version)
    assert again == sorted(slots[:2])
    assert not any(event.waited for event in copies.events)


def test_no_more_rows_are_leaving_than_the_device_has_room_for() -> None:
    """Then what is computed next comes after the oldest copy. The thread waits for none."""
    copies = Beside()
    bank = make_bank(device=1, host=100, version_copies=copies, memory=Reallocation())
    slots = []
    for number in range(6 * MAX_LEAVING):
        version = publish(bank, number)
        slots.append(bank.pin_version(version).slot)
        bank.unpin_version(version)
    assert len(bank.compute_slab(8)) <= 2 * MAX_LEAVING
    waited = [event.waited for event in copies.events]
    assert waited == sorted(waited, reverse=True), "the oldest first"
    assert sum(waited) == len(slots) - len(set(slots)) > 0


def test_a_version_comes_back_after_its_copy_has_come_down(tmp_path: Path) -> None:
    copies = Beside()
    bank = make_bank(device=1, host=100, spill=tmp_path, version_copies=copies)
    first = publish(bank, 0)
    publish(bank, 1)
    down = copies.events[0]
    assert not down.waited
    assert is_whole(bank, first)
    assert down.waited


def test_a_file_is_written_once_its_copy_is_there(tmp_path: Path) -> None:
    copies = Beside(held=True)
    bank = make_bank(device=1, host=0, spill=tmp_path, version_copies=copies)
    publish(bank, 0)
    publish(bank, 1)
    assert [item.label for item in bank.residency._writing] == ["version 0 of model m"]
    assert list(tmp_path.iterdir()) == []
    copies.events[0].passed.set()
    bank.residency.settle()
    assert bank.stats()["versions_disk"] == 1
    assert is_whole(bank, Version(model_id="m", number=0))


# ---- a file system that takes its time


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[HangingSpill]:
    directory = HangingSpill(tmp_path)
    yield directory
    directory.goes_on.set()


def test_nobody_waits_for_a_file(tmp_path: Path, spill: HangingSpill) -> None:
    """Room for 2 versions on the device and 8 on the host. Two are written at once, and one may be there beyond."""
    bank = make_bank(device=2, host=8, spill=spill)
    spill.goes_on.clear()
    versions = [publish(bank, number) for number in range(2 + 8 + 1)]
    assert spill.begun.wait(30)
    assert [item.label for item in bank.residency._writing] == ["version 0 of model m"]
    for version in [*versions, *reversed(versions)]:
        assert is_whole(bank, version), "from where it is, while it is being written"
    assert list(tmp_path.iterdir()) == [], "whole or not at all"
    assert bank.stats()["offload_writing_bytes"] == 2 * ROW_BYTES, "of two that came back meanwhile"
    bank.release(versions[3])
    assert not bank.has_version(versions[3])
    assert bank.residency.wait_seconds == 0
    spill.goes_on.set()
    bank.residency.settle()
    stats = bank.stats()
    assert stats["versions_host"] <= 8
    assert len(list(tmp_path.iterdir())) >= 2
    assert all(is_whole(bank, version) for version in versions if version is not versions[3])


def test_a_disk_that_does_not_answer_refuses_what_is_new_and_harms_nobody(spill: HangingSpill) -> None:
    bank = make_bank(device=1, host=0, spill=spill)
    bank.residency._patience_s = 0.01
    versions = [publish(bank, 0)]
    spill.goes_on.clear()
    versions += [publish(bank, number) for number in (1, 2)]
    assert bank.residency.wait_seconds == 0, "two may be on their way to files"
    versions.append(publish(bank, 3))
    with pytest.raises(CannotStore, match="its disk does not answer"):
        publish(bank, 4)
    waited = bank.residency.wait_seconds
    assert waited > 0
    with pytest.raises(CannotStore, match="its disk does not answer"):
        publish(bank, 99)
    assert all(is_whole(bank, version) for version in versions)
    assert bank.residency.wait_seconds == waited, "one of them has waited for all"
    bank.release(versions.pop(0))  # what hangs is nobody's any more
    spill.goes_on.set()
    spill.join()
    versions.append(publish(bank, 100))
    bank.residency.settle()
    assert all(is_whole(bank, version) for version in versions)


def test_what_hangs_and_is_nobodys_any_more_is_waited_for_like_the_rest(spill: HangingSpill) -> None:
    """Else versions that come and go would fill the host's memory."""
    bank = make_bank(device=1, host=0, spill=spill)
    bank.residency._patience_s = 0.01
    versions = [publish(bank, number) for number in range(2)]
    spill.goes_on.clear()
    versions += [publish(bank, number) for number in range(2, 4)]
    for version in versions[:3]:
        bank.release(version)
    publish(bank, 4)
    with pytest.raises(CannotStore, match="its disk does not answer"):
        publish(bank, 5)
    assert bank.stats()["versions_host"] == 1


def test_a_disk_that_fails_refuses_what_is_new_and_harms_nobody(spill: HangingSpill) -> None:
    """Though it says that it has room."""
    bank = make_bank(device=1, host=0, spill=spill)
    versions = [publish(bank, 0)]
    spill.fails = True
    versions.append(publish(bank, 1))
    bank.residency.settle()
    for number in (2, 3):
        with pytest.raises(CannotStore, match="its disk reports an error"):
            publish(bank, number)
    assert all(is_whole(bank, version) for version in versions)
    spill.fails = False
    versions.append(publish(bank, 100))
    bank.residency.settle()
    assert bank.stats()["versions_host"] == 0
    assert all(is_whole(bank, version) for version in versions)


def test_a_version_that_is_released_while_it_is_written_leaves_no_file(tmp_path: Path, spill: HangingSpill) -> None:
    """Nor does it take the file of one that has its name and comes after it."""
    bank = make_bank(device=1, host=0, spill=spill)
    bank.residency._patience_s = 0.01
    first = publish(bank, 0)
    name = next(published.file_name for published in bank._versions.all)
    spill.goes_on.clear()
    publish(bank, 1)
    assert spill.begun.wait(30)
    bank.release(first)
    bank.weights("m").fill_(0)
    bank.refresh_compute("m")
    bank.publish("m", first)
    publish(bank, 2)
    spill.goes_on.set()
    bank.residency.settle()
    assert (tmp_path / f"{name}.safetensors").exists()
    assert is_whole(bank, first)
    bank.release(first)
    bank.residency.settle()
    assert not list(tmp_path.glob(name + "*"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("memory", ["address range", "mapped range", "reallocation"])
def test_versions_are_what_they_were_wherever_they_have_been(tmp_path: Path, memory: str, seed: int) -> None:
    choose = random.Random(seed)
    options: dict[str, object] = {}
    if memory == "mapped range":
        options["memory"] = MappedRange(driver=FakeDriver(64 << 20))
    elif memory == "reallocation":
        options["memory"] = Reallocation()
    copies = Beside()
    bank = make_bank(device=3, host=4, spill=tmp_path, version_copies=copies, **options)
    live: list[Version] = []
    pinned: list[Version] = []
    for number in range(80):
        live.append(publish(bank, number))
        for _ in range(choose.randrange(3)):
            version = choose.choice(live)
            row = bank.pin_version(version)
            pinned.append(version)
            assert (bank.compute_slab(row.rank_bucket)[row.slot] == version.number).all()
        while len(pinned) > choose.randrange(4):
            bank.unpin_version(pinned.pop(choose.randrange(len(pinned))))
        if len(live) > 12:
            bank.release(live.pop(choose.randrange(len(live))))
        for _ in range(min(len(copies.events), choose.randrange(1, 4))):
            copies.events.popleft().passed.set()
    for event in copies.events:
        event.passed.set()
    while pinned:
        bank.unpin_version(pinned.pop())
    bank.residency.settle()
    stats = bank.stats()
    assert stats["versions_resident"] <= 3
    assert stats["versions_resident_bytes"] == stats["versions_resident"] * ROW_BYTES
    assert stats["versions_host"] <= 4
    assert stats["versions_host_bytes"] == stats["versions_host"] * ROW_BYTES
    assert stats["versions_disk"] > 0
    assert stats["version_offloads"] > 40
    assert stats["version_loads"] > 5
    assert stats["offload_written_bytes"] == stats["offload_writes"] * ROW_BYTES
    for version in live:
        assert is_whole(bank, version)
        for event in copies.events:
            event.passed.set()
        bank.release(version)
    bank.residency.settle()
    assert list(tmp_path.iterdir()) == []
    assert bank.residency._held_bytes == bank.residency._written_bytes == bank.residency._writing_bytes == 0
    assert bank.stats()["compute_rows"] == 1


# ---- a slab that stays where it is


def test_a_mapped_slab_grows_where_it_is() -> None:
    driver = FakeDriver(1 << 30)
    rows = MappedRange(driver=driver).slots(ComputeSlot, 1 << 20, torch.float32, CPU, fixed=True)
    assert driver.mapped_bytes == rows.committed_bytes == 0
    places = set()
    for slot in range(40):
        assert rows.allocate(zero=False) == slot
        rows.tensor[slot].fill_(slot)
        places.add((rows.tensor.data_ptr(), tuple(rows.tensor.shape)))
        assert (slot + 1) * rows.row_bytes <= driver.mapped_bytes == rows.committed_bytes
    assert len(places) == 1
    assert [int(rows.tensor[slot].max()) for slot in range(40)] == list(range(40))
    rows.free(ComputeSlot(3))
    assert rows.allocate(zero=True) == 3
    assert rows.tensor[3].count_nonzero() == 0
    rows.free(ComputeSlot(39))
    assert rows.trim() == 0, "as long as any slot is taken nothing is given back"
    for slot in range(39):
        rows.free(ComputeSlot(slot))
    assert rows.trim() > 0
    assert driver.mapped_bytes == 0
    assert rows.allocate(zero=False) == 0
    rows.tensor[0].fill_(1)
    assert (rows.tensor.data_ptr(), tuple(rows.tensor.shape)) in places


def test_a_mapped_slab_takes_all_that_there_is_and_says_when_there_is_no_more() -> None:
    row, driver = 5000, FakeDriver(10 << 20)
    rows = MappedRange(driver=driver).slots(ComputeSlot, row, torch.float32, CPU, fixed=True)
    count = (10 << 20) // (4 * row)
    for slot in range(count):
        assert rows.allocate(zero=False) == slot
        rows.tensor[slot].fill_(slot)
    with pytest.raises(MemoryError):
        rows.allocate(zero=False)
    full = MappedRange(driver=FakeDriver(1 << 30, room=100 << 20)).slots(
        ComputeSlot, 16 << 20, torch.float32, CPU, fixed=True
    )
    full.allocate(zero=False)
    with pytest.raises(torch.OutOfMemoryError):
        full.allocate(zero=False)
    full.free(ComputeSlot(0))
    assert full.allocate(zero=False) == 0
