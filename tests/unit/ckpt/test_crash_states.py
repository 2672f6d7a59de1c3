"""The store on a disk that is cut off after any operation: what was acknowledged is there, what is there is whole.

States that a power cut may leave, by the thousand (``SimulatedDisk``). A program saves, replaces, deletes and starts
again; each of its operations is a moment, each moment has states, and on each state a server starts.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from descant.ckpt.disk import PathLike
from descant.ckpt.manifest import MANIFEST, verify, write_durable
from descant.ckpt.store import CheckpointDirectory
from descant.errors import CannotStore, Damaged, DescantError, NotFound
from descant.testing.simulated_disk import Cut, Moment, SimulatedDisk
from descant.types import CheckpointName, Lora, Manifest

ROOT = Path("/data/checkpoints")
A = CheckpointName(model_id="s:train:0", type="weights", name="a")
B = CheckpointName(model_id="s:train:0", type="sampler_weights", name="b")
FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors")


@dataclass
class Event:
    """Something that a client asked for: from operation ``start`` on it may be there, from ``end`` on it must."""

    name: CheckpointName
    step: int | None
    """Of the checkpoint; None: it was deleted."""
    start: int
    end: int | None = None


@dataclass
class Client:
    """Does things to a store, and writes down what was acknowledged when."""

    disk: SimulatedDisk
    events: list[Event] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(operation, epoch) of each start that succeeded."""
    steps: Iterator[int] = field(default_factory=lambda: iter(range(1, 10**6)))

    def start(self) -> None:
        self.store = CheckpointDirectory(ROOT, disk=self.disk)
        assert self.store.epoch is not None
        self.starts.append((self.disk.operations, self.store.epoch))

    def save(self, name: CheckpointName) -> None:
        step = next(self.steps)
        event = Event(name, step, self.disk.operations)
        self.events.append(event)
        attempt, manifest = self.write(name, step)
        self.store.commit(name, attempt, manifest)
        event.end = self.disk.operations

    def write(self, name: CheckpointName, step: int) -> tuple[str, Manifest]:
        attempt = self.store.attempt(name)
        files = {
            file: write_durable(Path(attempt) / file, f"{file} of step {step}".encode(), disk=self.disk)
            for file in FILES
        }
        lora = Lora(rank=4, seed=0)
        manifest = Manifest(
            base="b", owner="o", trainable=lora, step=step, applied_seq_id=1, has_optimizer=True, files=files
        )
        return attempt, manifest

    def delete(self, name: CheckpointName) -> None:
        event = Event(name, None, self.disk.operations)
        self.events.append(event)
        self.store.delete(name)
        event.end = self.disk.operations

    def allowed(self, moment: int) -> dict[CheckpointName, set[int | None]]:
        """What may be there when the disk is cut off at this moment: what was acknowledged last, or what was asked for
        after it."""
        found: dict[CheckpointName, set[int | None]] = {A: {None}, B: {None}}
        for event in self.events:
            if event.end is not None and event.end <= moment:
                found[event.name] = {event.step}
            elif event.start <= moment:
                found[event.name].add(event.step)
        return found


def everything(client: Client) -> None:
    """First saves, a replacement, a deletion, an attempt that is given up, a second start, and all of it again."""
    client.start()
    client.save(A)
    client.save(A)
    client.save(B)
    client.delete(B)
    attempt, _ = client.write(A, 0)
    client.store.abandon(attempt)
    client.save(B)
    client.write(A, 0)  # and nobody commits it
    client.start()
    client.save(A)
    client.save(B)
    client.delete(A)
    client.save(A)


def recovered(state: SimulatedDisk, allowed: dict[CheckpointName, set[int | None]], *, epoch: int) -> None:
    """Starts a server on what a power cut has left. ``AssertionError`` for what must not be."""
    store = CheckpointDirectory(ROOT, disk=state)
    assert store.epoch is not None
    assert store.epoch > epoch, "an epoch that a server had has begun again"
    files = {ROOT / "epoch"}
    visible = {checkpoint.name: checkpoint for checkpoint in store.list()}
    for name, steps in allowed.items():
        listed = visible.pop(name, None)
        try:
            found = store.open(name)
            verify(found.directory, disk=state)
        except NotFound:
            assert listed is None
            assert None in steps, f"step {steps} of {name.uri} is lost"
            continue
        except Damaged as error:
            raise AssertionError(f"it is visible and not whole: {error}") from None
        assert listed == found
        assert found.manifest.step in steps, f"{name.uri} has step {found.manifest.step}, expected one of {steps}"
        files |= {Path(found.directory) / file for file in (*found.manifest.files, MANIFEST)}
    assert not visible
    assert state.tree() == files, "garbage is left"
    assert state.listdir(ROOT / "attempts") == []


def check(client: Client, moments: Sequence[Moment], *, limit: int, seed: int) -> int:
    """Every moment's states; how many."""
    count = 0
    rng = random.Random(seed)
    for moment in moments:
        allowed = client.allowed(moment.count)
        epoch = max((epoch for operation, epoch in client.starts if operation <= moment.count), default=0)
        for state in moment.crash_states(limit, rng):
            recovered(state, allowed, epoch=epoch)
            count += 1
    return count


@pytest.mark.parametrize(("can_exchange", "limit"), [(True, 340), (False, 100)], ids=["exchange", "two renames"])
def test_whatever_a_power_cut_leaves_what_was_acknowledged_is_there(can_exchange: bool, limit: int) -> None:
    client = Client(SimulatedDisk(record=True, can_exchange=can_exchange))
    everything(client)
    count = check(client, client.disk.moments, limit=limit, seed=0)
    assert count > 60 * limit, "most moments have few states: it is no test"
    print(f"{count} states of {len(client.disk.moments)} moments")


def test_a_power_cut_while_a_server_starts_after_a_power_cut() -> None:
    client = Client(SimulatedDisk(record=True))
    everything(client)
    count, rng = 0, random.Random(1)
    for moment in client.disk.moments:
        allowed = client.allowed(moment.count)
        for state in moment.crash_states(4, rng):
            state.record = True
            recovered(state, allowed, epoch=0)
            for again in state.moments:
                for left in again.crash_states(3, rng):
                    recovered(left, allowed, epoch=0)
                    count += 1
    print(f"{count} states")
    assert count > 5000


def killed_at(operation: int, disk: SimulatedDisk) -> Client | None:
    """A client whose server was killed before this operation; None: there are not so many."""
    client = Client(disk)

    def kill(_: str) -> None:
        if disk.operations == operation:
            raise Cut

    disk.fault = kill
    try:
        client.start()
        client.save(A)
        client.save(A)
        client.save(B)
        client.delete(B)
    except Cut:
        return client
    finally:
        disk.fault = lambda _: None
    return None


def kill_then_cut(make: Callable[[], SimulatedDisk], *, limit: int) -> int:
    """Kills a server at each of its operations: what it did is in the page cache. The next one starts on that, and is
    cut off. How many states."""
    count = 0
    for operation in range(10**6):
        client = killed_at(operation, make())
        if client is None:
            return count
        client.disk.record = True
        client.start()
        client.save(A)
        count += check(client, client.disk.moments, limit=limit, seed=operation)
    raise AssertionError("unreachable")


@pytest.mark.parametrize(("can_exchange", "limit"), [(True, 5), (False, 2)], ids=["exchange", "two renames"])
def test_a_kill_and_then_a_power_cut(can_exchange: bool, limit: int) -> None:
    count = kill_then_cut(lambda: SimulatedDisk(can_exchange=can_exchange), limit=limit)
    print(f"{count} states")
    assert count > 2000 * limit


def with_two() -> Client:
    client = Client(SimulatedDisk())
    client.start()
    client.save(A)
    client.save(B)
    return client


def change_both(client: Client) -> None:
    client.save(A)
    client.delete(B)


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_a_disk_that_fails_at_any_operation(for_good: bool) -> None:
    """What fails has changed nothing that is visible, if the disk works again; and the next save works."""
    healthy = with_two()
    before = healthy.disk.operations
    change_both(healthy)
    count = failed = 0
    for broken in range(before, healthy.disk.operations):
        client = with_two()
        disk = client.disk
        fails = iter(range(10**6 if for_good else 1))

        def fault(_: str, disk: SimulatedDisk = disk, broken: int = broken, fails: Iterator[int] = fails) -> None:
            if disk.operations >= broken and next(fails, None) is not None:
                raise OSError(errno.EIO, "Input/output error")

        disk.fault = fault
        disk.record = True
        try:
            change_both(client)
        except (OSError, CannotStore):
            failed += 1
        disk.fault = lambda _: None
        if not for_good:
            acknowledged = {name: [e.step for e in client.events if e.end and e.name == name][-1] for name in (A, B)}
            there = {checkpoint.name: checkpoint.manifest.step for checkpoint in client.store.list()}
            assert there == {name: step for name, step in acknowledged.items() if step is not None}
            assert all(client.store.open(name).manifest.step == step for name, step in there.items())
        for left in disk.listdir(ROOT / "attempts"):
            client.store.abandon(ROOT / "attempts" / left)
        client.save(A)
        count += check(client, disk.moments, limit=3, seed=broken)
    print(f"{failed} failures, {count} states")
    assert failed >= 15


# ------------------------------------------------------------------------------------------------ the test of the test


class WithoutDirectoryFsync(SimulatedDisk):
    def fsync_directory(self, path: PathLike) -> None:
        pass


class WithoutFileFsync(SimulatedDisk):
    def fsync(self, inode: int, path: PathLike) -> None:
        pass


class CleansAtOnce(SimulatedDisk):
    """As a server that removes what a killed one has left before the disk has that one's last renames."""

    def fsync_directory(self, path: PathLike) -> None:
        if not str(path).endswith("/attempts"):
            super().fsync_directory(path)


@pytest.mark.parametrize("broken", [WithoutDirectoryFsync, WithoutFileFsync])
def test_a_store_that_leaves_out_an_fsync_is_caught(broken: type[SimulatedDisk]) -> None:
    client = Client(broken(record=True))
    everything(client)
    with pytest.raises((AssertionError, DescantError)):
        check(client, client.disk.moments, limit=100, seed=0)


def test_a_server_that_cleans_before_it_fsyncs_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"not whole|is lost"):
        kill_then_cut(CleansAtOnce, limit=5)
