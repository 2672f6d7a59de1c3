"""Checkpoints that were fetched: whole ones in directories, until others need the room."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from descant.ckpt.disk import REAL, remove_tree
from descant.ckpt.manifest import MANIFEST, check_file, encode_manifest, write_durable
from descant.errors import Damaged
from descant.storage import check_room
from descant.types import FileEntry, Manifest

READ_WITHIN_S = 600.0
"""A local copy that was opened so recently stays, whatever the bound: somebody may be about to read it."""


class LocalCopies:
    """Directories of whole checkpoints, one an attempt, that take ``max_bytes`` together. Any thread."""

    def __init__(self, root: Path, max_bytes: int, monotonic: Callable[[], float]):
        self._root = root
        self._max_bytes = max_bytes
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._there: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """By attempt, least recently opened first: bytes, and when it was."""

    def place(self, attempt: str) -> Path:
        return self._root / attempt

    def find(self, attempt: str, manifest: Manifest) -> Path | None:
        """A copy as it was written, as far as sizes tell; another kind is removed."""
        with self._lock:
            if attempt not in self._there:
                return None
            try:
                check_files(self.place(attempt), manifest)
                check_file(self.place(attempt), MANIFEST, _entry(manifest))
            except Damaged:
                self._remove(attempt)
                return None
            self._touch(attempt, manifest)
            return self.place(attempt)

    def take(self, directory: Path, attempt: str, manifest: Manifest) -> Path:
        """Moves a directory with the manifest's files here. Raises ``OSError``."""
        remove_tree(REAL, directory / MANIFEST)
        write_durable(directory / MANIFEST, encode_manifest(manifest))
        with self._lock:
            remove_tree(REAL, self.place(attempt))
            REAL.rename(directory, self.place(attempt))
            self._touch(attempt, manifest)
            self._evict(0)
        return self.place(attempt)

    def make_room(self, num_bytes: int) -> None:
        """Raises ``CannotStore`` where the disk has none."""
        with self._lock:
            self._evict(num_bytes)
        check_room(self._root, num_bytes)

    def remove(self, attempt: str) -> None:
        with self._lock:
            self._remove(attempt)

    def _touch(self, attempt: str, manifest: Manifest) -> None:
        self._there[attempt] = (manifest.size_bytes, self._monotonic())
        self._there.move_to_end(attempt)

    def _evict(self, num_bytes: int) -> None:
        """Until so many more have room."""
        total = num_bytes + sum(size for size, _ in self._there.values())
        for attempt, (size, opened) in list(self._there.items()):
            if total <= self._max_bytes or self._monotonic() - opened < READ_WITHIN_S:
                return
            self._remove(attempt)
            total -= size

    def _remove(self, attempt: str) -> None:
        self._there.pop(attempt, None)
        remove_tree(REAL, self.place(attempt))


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raises ``Damaged`` for one that is not there, or not of its size."""
    for file, entry in manifest.files.items():
        check_file(directory, file, entry)


def _entry(manifest: Manifest) -> FileEntry:
    body = encode_manifest(manifest)
    return FileEntry(size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
