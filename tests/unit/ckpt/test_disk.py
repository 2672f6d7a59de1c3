"""The simulated disk does what the real one does, errors included; and what a power cut may leave of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from descant.ckpt.disk import Disk, RealDisk, exists, make_directory, remove_tree
from descant.ckpt.manifest import write_durable
from descant.testing.simulated_disk import SimulatedDisk

NAMES = ["a", "b", "a/x", "a/y", "b/x", "a/x/z"]
OPERATIONS: list[Callable[[Disk, Path, Path], object]] = [
    lambda disk, one, other: write_durable(one, str(other.name).encode(), disk=disk).size_bytes,
    lambda disk, one, other: disk.mkdir(one),
    lambda disk, one, other: disk.mkdir(one),
    lambda disk, one, other: disk.rename(one, other),
    lambda disk, one, other: disk.exchange(one, other),
    lambda disk, one, other: disk.unlink(one),
    lambda disk, one, other: disk.rmdir(one),
    lambda disk, one, other: disk.read(one),
    lambda disk, one, other: disk.open(one).read(),
    lambda disk, one, other: sorted(disk.listdir(one)),
    lambda disk, one, other: disk.stat(one).is_directory or disk.stat(one).size_bytes,
    lambda disk, one, other: disk.fsync_directory(one),
    lambda disk, one, other: exists(disk, one),
    lambda disk, one, other: make_directory(disk, one),
]


def outcome(disk: Disk, root: Path, operation: int, one: str, other: str) -> object:
    try:
        return OPERATIONS[operation](disk, root / one, root / other)
    except OSError as error:
        return f"errno {error.errno}"


def tree(disk: Disk, path: Path) -> dict[str, object]:
    return {
        name: tree(disk, path / name) if disk.stat(path / name).is_directory else disk.read(path / name)
        for name in disk.listdir(path)
    }


def test_simulated_and_real_do_the_same(tmp_path: Path) -> None:
    real = RealDisk()
    for seed in range(200):
        rng, simulated, root = random.Random(seed), SimulatedDisk(), tmp_path / str(seed)
        real.mkdir(root)
        simulated.mkdir("/root")
        done = []
        for _ in range(60):
            step = (rng.randrange(len(OPERATIONS)), rng.choice(NAMES), rng.choice(NAMES))
            done.append(step)
            assert outcome(real, root, *step) == outcome(simulated, Path("/root"), *step), done
        assert tree(real, root) == tree(simulated, Path("/root"))
        remove_tree(real, root / "a")
        remove_tree(simulated, Path("/root/a"))
        assert tree(real, root) == tree(simulated, Path("/root"))


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    RealDisk().mkdir(tmp_path / "directory")
    write_durable(tmp_path / "file", b"x")
    assert [os.stat(tmp_path / name).st_mode & 0o777 for name in ("directory", "file")] == [0o700, 0o600]


def test_a_large_write_is_whole(tmp_path: Path) -> None:
    body = bytes(range(256)) * 4096
    file = RealDisk().create(tmp_path / "file")
    file.write(memoryview(body)[:100])
    file.write(memoryview(body)[100:].cast("H"))
    file.fsync()
    file.close()
    file.close()
    assert (tmp_path / "file").read_bytes() == body


def states(disk: SimulatedDisk) -> set[str]:
    return {str(tree(state, Path("/"))) for state in disk.moment().crash_states(1000, random.Random(0))}


def test_what_a_power_cut_may_leave_of_a_file() -> None:
    disk = SimulatedDisk()
    file = disk.create("/f")
    assert states(disk) == {"{}", str({"f": b""})}
    disk.fsync_directory("/")
    file.write(b"12")
    file.fsync()
    file.write(b"3456")
    left = [b"12", b"1234", b"123456", b"1234\xa5\xa5", b"12\0\0\0\0"]
    assert states(disk) == {str({"f": body}) for body in left}
    file.fsync()
    assert states(disk) == {str({"f": b"123456"})}


def test_what_a_power_cut_may_leave_of_names() -> None:
    disk = SimulatedDisk()
    disk.mkdir("/a")
    disk.mkdir("/b")
    disk.fsync_directory("/")
    disk.mkdir("/a/x")
    disk.rename("/a/x", "/b/y")
    nothing, first, both = {"a": {}, "b": {}}, {"a": {"x": {}}, "b": {}}, {"a": {}, "b": {"y": {}}}
    assert states(disk) == {str(tree) for tree in (nothing, first, both)}
    disk.fsync_directory("/b")
    assert states(disk) == {str(both)}
    disk.mkdir("/a/z")
    disk.exchange("/a/z", "/b/y")
    disk.rmdir("/a/z")
    assert str({"a": {"z": {}}, "b": {"y": {}}}) in states(disk), "one of two operations on a name, the earlier"
    disk.fsync_directory("/a")
    assert states(disk) == {str(both)}
