"""A disk in memory that can be cut off: after any operation, every state that a power cut may leave is one of its.

What POSIX promises and nothing more. A file has what was written before its last ``fsync``; of the rest a power cut
leaves nothing, a part, all of it, or something else of the same length. A directory has the names it had at its last
``fsync_directory``; each later operation on it is there or not, in any combination, except that of two operations on
the same name the later one is not there without the earlier one. A rename and an exchange are wholly there or not.

    disk = SimulatedDisk(record=True)
    ...                                       # what is tested
    for moment in disk.moments:               # one after each operation
        for state in moment.crash_states(2000, random.Random(0)):
            recover(state)                    # a SimulatedDisk again
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from descant.ckpt.disk import DiskFile, PathLike, Stat

ROOT = 0
CONTENTS = 5
"""Of an unsynced file: what a power cut may leave of it (``_content``)."""

Name = tuple[int, str]
"""A directory's inode and a name in it."""


class SimulatedFile(NamedTuple):
    """``synced`` of ``body`` bytes are on the disk; all of them where it is the length."""

    body: bytes
    synced: int
    modified_ns: int


Effect = Mapping[Name, int | None]
"""What one operation does to names: the inode that each then has, or none."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The disk after ``operation``, of which there were ``count`` by then."""

    operation: str
    count: int
    names: Mapping[Name, int]
    """On the disk for sure."""
    pending: Sequence[Effect]
    """Not yet for sure, in the order in which they were done."""
    files: Mapping[int, SimulatedFile]
    directories: frozenset[int]

    def crash_states(self, limit: int, rng: random.Random) -> Iterator[SimulatedDisk]:
        """All states that a power cut may leave now; where they are more than ``limit``, so many of them: those with
        everything, with nothing, then in any order without one operation, with one alone, with the first few, then any
        others."""
        earlier = [
            [i for i, before in enumerate(self.pending[:n]) if before.keys() & effect.keys()]
            for n, effect in enumerate(self.pending)
        ]
        unsynced = [inode for inode, file in self.files.items() if file.synced < len(file.body)]
        seen: set[tuple[tuple[bool, ...], tuple[int, ...]]] = set()
        total = 2 ** len(self.pending) * CONTENTS ** len(unsynced)
        choices = self._all(len(unsynced)) if total <= limit else self._some(len(unsynced), rng, 4 * limit)
        for done, contents in choices:
            closed = list(done)
            for n, before in enumerate(earlier):  # what came later on a name is not there alone
                closed[n] = closed[n] and all(closed[i] for i in before)
            state = (tuple(closed), contents)
            if state not in seen:
                seen.add(state)
                yield self._state(closed, dict(zip(unsynced, contents)))
                if len(seen) == limit:
                    return

    def _all(self, num_files: int) -> Iterator[tuple[tuple[bool, ...], tuple[int, ...]]]:
        for done in itertools.product((True, False), repeat=len(self.pending)):
            for contents in itertools.product(range(CONTENTS), repeat=num_files):
                yield done, contents

    def _some(
        self, num_files: int, rng: random.Random, tries: int
    ) -> Iterator[tuple[tuple[bool, ...], tuple[int, ...]]]:
        count = len(self.pending)
        telling = [tuple(i < n for i in range(count)) for n in range(1, count)]
        telling += [tuple(i != n for i in range(count)) for n in range(count)]
        telling += [tuple(i == n for i in range(count)) for n in range(count)]
        rng.shuffle(telling)
        for done in [(True,) * count, (False,) * count, *telling]:
            yield done, tuple(rng.randrange(CONTENTS) for _ in range(num_files))
        for _ in range(tries):
            bits = rng.getrandbits(count) if rng.random() < 0.5 else rng.getrandbits(count) | rng.getrandbits(count)
            yield (
                tuple(bits >> i & 1 == 1 for i in range(count)),
                tuple(rng.randrange(CONTENTS) for _ in range(num_files)),
            )

    def _state(self, done: Sequence[bool], contents: Mapping[int, int]) -> SimulatedDisk:
        names: dict[Name, int | None] = dict(self.names)
        for effect, is_done in zip(self.pending, done):
            if is_done:
                names.update(effect)
        files = dict(self.files)
        for inode, choice in contents.items():
            body = _content(files[inode], choice)
            files[inode] = SimulatedFile(body, len(body), files[inode].modified_ns)
        there = {name: inode for name, inode in names.items() if inode is not None}
        return SimulatedDisk(names=there, files=files, directories=self.directories, operations=self.count)


def _content(file: SimulatedFile, choice: int) -> bytes:
    """What a power cut may leave of an unsynced file."""
    body, synced = file.body, file.synced
    half = (synced + len(body)) // 2
    return (
        body,
        body[:synced],
        body[:half],
        body[:half] + b"\xa5" * (len(body) - half),
        body[:synced] + bytes(len(body) - synced),
    )[choice]


class Cut(BaseException):
    """The process is dead: nothing that it does from now on is done."""


@dataclass
class SimulatedDisk:
    """``Disk``. ``fault``: called with each operation that changes something before it is done, and may raise
    ``OSError`` for a disk that fails, ``Cut`` for a process that is killed there."""

    names: dict[Name, int] = field(default_factory=dict)
    files: dict[int, SimulatedFile] = field(default_factory=dict)
    directories: frozenset[int] = frozenset([ROOT])
    operations: int = 0
    record: bool = False
    can_exchange: bool = True
    fault: Callable[[str], None] = field(default=lambda operation: None)
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pending: list[Effect] = []
        self._now: dict[Name, int] = dict(self.names)
        self._children: dict[int, dict[str, int]] = {inode: {} for inode in self.directories}
        for (directory, name), inode in self._now.items():
            self._children[directory][name] = inode
        self._next = max([*self.directories, *self.files]) + 1

    # ------------------------------------------------------------------------------------------------ the protocol
    def create(self, path: PathLike) -> DiskFile:
        name = self._name(path)
        self._begin(f"create {path}")
        if name in self._now:
            raise _error(errno.EEXIST, path)
        inode = self._new()
        self.files[inode] = SimulatedFile(b"", 0, self.operations)
        self._do({name: inode}, f"create {path}")
        return _OpenFile(self, inode, path)

    def open(self, path: PathLike) -> BinaryIO:
        return io.BytesIO(self.read(path))

    def read(self, path: PathLike) -> bytes:
        inode = self._inode(path)
        if inode in self.directories:
            raise _error(errno.EISDIR, path)
        return self.files[inode].body

    def stat(self, path: PathLike) -> Stat:
        inode = self._inode(path)
        file = self.files.get(inode)
        return Stat(0, 0, True) if file is None else Stat(len(file.body), file.modified_ns, False)

    def listdir(self, path: PathLike) -> list[str]:
        return list(self._children[self._directory(path)])

    def mkdir(self, path: PathLike) -> None:
        name = self._name(path)
        if name in self._now:
            raise _error(errno.EEXIST, path)
        self._begin(f"mkdir {path}")
        inode = self._new()
        self.directories |= {inode}
        self._children[inode] = {}
        self._do({name: inode}, f"mkdir {path}")

    def rename(self, source: PathLike, target: PathLike) -> None:
        old, new = self._name(source), self._name(target)
        inode = self._inode(source)
        replaced = self._now.get(new)
        if self._is_below(target, inode):
            raise _error(errno.EINVAL, target)
        if replaced is not None and self._is_below(source, replaced):
            raise _error(errno.ENOTEMPTY, target)
        if replaced is not None and (replaced in self.directories) != (inode in self.directories):
            raise _error(errno.ENOTDIR if inode in self.directories else errno.EISDIR, target)
        if old == new:
            return
        if replaced in self.directories and self._children[replaced or ROOT]:
            raise _error(errno.ENOTEMPTY, target)
        self._begin(f"rename {source} to {target}")
        self._do({old: None, new: inode}, f"rename {source} to {target}")

    def exchange(self, one: PathLike, other: PathLike) -> bool:
        names = self._name(one), self._name(other)
        first, second = self._inode(one), self._inode(other)
        if not self.can_exchange or self._is_below(one, second) or self._is_below(other, first):
            return False
        self._begin(f"exchange {one} and {other}")
        self._do({names[0]: second, names[1]: first}, f"exchange {one} and {other}")
        return True

    def unlink(self, path: PathLike) -> None:
        if self._inode(path) in self.directories:
            raise _error(errno.EISDIR, path)
        self._begin(f"unlink {path}")
        self._do({self._name(path): None}, f"unlink {path}")

    def rmdir(self, path: PathLike) -> None:
        if self._children[self._directory(path)]:
            raise _error(errno.ENOTEMPTY, path)
        self._begin(f"rmdir {path}")
        self._do({self._name(path): None}, f"rmdir {path}")

    def fsync_directory(self, path: PathLike) -> None:
        inode = self._directory(path)
        self._begin(f"fsync_directory {path}")
        self._settle(inode)
        self._end(f"fsync_directory {path}")

    # ------------------------------------------------------------------------------------------------ inside
    def write(self, inode: int, data: bytes, path: PathLike) -> None:
        self._begin(f"write {path}")
        file = self.files[inode]
        self.files[inode] = SimulatedFile(file.body + data, file.synced, self.operations)
        self._end(f"write {path}")

    def fsync(self, inode: int, path: PathLike) -> None:
        self._begin(f"fsync {path}")
        file = self.files[inode]
        self.files[inode] = SimulatedFile(file.body, len(file.body), file.modified_ns)
        self._end(f"fsync {path}")

    def _settle(self, directory: int) -> None:
        """What was done in ``directory``, and what was done before to the same names."""
        names: set[Name] = set()
        settled = []
        for n in range(len(self._pending) - 1, -1, -1):
            effect = self._pending[n]
            if any(name[0] == directory or name in names for name in effect):
                names |= effect.keys()
                settled.append(self._pending.pop(n))
        for effect in reversed(settled):
            for name, inode in effect.items():
                if inode is None:
                    self.names.pop(name, None)
                else:
                    self.names[name] = inode

    def _do(self, effect: Effect, operation: str) -> None:
        self._pending.append(effect)
        for name, inode in effect.items():
            if inode is None:
                del self._now[name]
                del self._children[name[0]][name[1]]
        for name, inode in effect.items():
            if inode is not None:
                self._now[name] = inode
                self._children[name[0]][name[1]] = inode
        self._end(operation)

    def _begin(self, operation: str) -> None:
        self.fault(operation)

    def _end(self, operation: str) -> None:
        self.operations += 1
        if self.record:
            self.moments.append(self.moment(operation))

    def moment(self, operation: str = "now") -> Moment:
        return Moment(
            operation, self.operations, dict(self.names), tuple(self._pending), dict(self.files), self.directories
        )

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _name(self, path: PathLike) -> Name:
        parent, name = os.path.split(os.fspath(path))
        return self._directory(parent), name

    def _directory(self, path: PathLike) -> int:
        inode = self._inode(path)
        if inode not in self.directories:
            raise _error(errno.ENOTDIR, path)
        return inode

    def _inode(self, path: PathLike) -> int:
        inode = ROOT
        for part in os.fspath(path).split("/"):
            if not part:
                continue
            children = self._children.get(inode)
            if children is None:
                raise _error(errno.ENOTDIR, path)
            found = children.get(part)
            if found is None:
                raise _error(errno.ENOENT, path)
            inode = found
        return inode

    def _is_below(self, path: PathLike, directory: int) -> bool:
        parent = os.path.dirname(os.fspath(path))
        while parent.strip("/"):
            if self._inode(parent) == directory:
                return True
            parent = os.path.dirname(parent)
        return False

    def tree(self) -> set[Path]:
        """Every file that can be reached."""

        def walk(directory: int, path: Path) -> Iterator[Path]:
            for name, inode in self._children[directory].items():
                if inode in self.directories:
                    yield from walk(inode, path / name)
                else:
                    yield path / name

        return set(walk(ROOT, Path("/")))


class _OpenFile:
    def __init__(self, disk: SimulatedDisk, inode: int, path: PathLike):
        self._disk = disk
        self._inode = inode
        self._path = path

    def write(self, data: memoryview | bytes) -> None:
        self._disk.write(self._inode, bytes(data), self._path)

    def fsync(self) -> None:
        self._disk.fsync(self._inode, self._path)

    def close(self) -> None:
        pass


def _error(number: int, path: PathLike) -> OSError:
    return OSError(number, os.strerror(number), os.fspath(path))
