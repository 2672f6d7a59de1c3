"""Checkpoints in a directory: whole or absent, whatever dies when.

    root/models/{model}/{type}/{name}/manifest.json, …      what can be opened
    root/attempts/{epoch}-{random}/                          what is being written; without a name yet
    root/epoch                                               how often a server has started on this directory

A commit fsyncs the files (their writer did), writes the manifest beside its final name, fsyncs and renames it, fsyncs
the attempt, renames the attempt to its final place and fsyncs the parent. Only then is an older checkpoint of the same
name removed. Each attempt has a name of its own, with the epoch of the server that gave it out: a writer that outlived
its server can never write into another's, and what it wrote is never committed. Plain Python: no torch is imported
here, and the disk is an argument.

Assumed of the disk: a rename is done or not done after a power cut, never half (ext4, XFS, btrfs).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from descant.ckpt.disk import REAL, Disk, exists, make_directory, remove_tree
from descant.ckpt.manifest import MANIFEST, check_file, damaged, encode_manifest, read_manifest, write_durable
from descant.errors import Damaged, NotFound, ServerError, UserError
from descant.storage import cannot_store
from descant.types import Checkpoint, CheckpointName, CheckpointType, Manifest

MODELS, ATTEMPTS, EPOCH, REPLACED = "models", "attempts", "epoch", ".replaced"
BESIDE = "beside"
TYPES = ("weights", "sampler_weights")
DAY_NS = 24 * 3600 * 10**9
_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
"""A path segment as it is. Anything else (a model id has colons) is written with %XX; the result never begins with a
dot and never holds a slash."""


class DirCheckpointStore:
    """``CheckpointStore`` under one directory, one server at a time."""

    def __init__(self, root: str | Path, *, beside: bool = False, disk: Disk = REAL):
        """As ``CheckpointDirectory``."""
        self.directory = CheckpointDirectory(root, beside=beside, disk=disk)

    async def attempt(self, name: CheckpointName) -> str:
        return await asyncio.to_thread(self.directory.attempt, name)

    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        return await asyncio.to_thread(self.directory.commit, name, attempt, manifest)

    async def abandon(self, attempt: str) -> None:
        await asyncio.to_thread(self.directory.abandon, attempt)

    async def open(self, name: CheckpointName) -> Checkpoint:
        return await asyncio.to_thread(self.directory.open, name)

    async def list(self, model_id: str | None = None) -> Sequence[Checkpoint]:
        return await asyncio.to_thread(self.directory.list, model_id)

    async def delete(self, name: CheckpointName) -> None:
        await asyncio.to_thread(self.directory.delete, name)


class CheckpointDirectory:
    """What ``CheckpointStore`` promises, on the caller's thread; any thread."""

    def __init__(self, root: str | Path, *, beside: bool = False, disk: Disk = REAL):
        """Begins a new epoch and removes the attempts of earlier ones: who wrote them is dead or has lost its
        directory. Its caller has the server's lock. ``beside``: the directory may be a running server's, whose
        attempts stay; what is committed must have a name of its own. Raises ``OSError``, and ``ServerError`` for an
        epoch that cannot be read."""
        self.root = Path(root)
        self._disk = disk
        self._lock = threading.Lock()
        self._on_disk: set[Path] = set()
        """Directories that a power cut leaves where they are."""
        self._unsettled: set[Path] = set()
        """Attempts of which nobody knows whether the disk has their rename: nothing of them is removed before the next
        start, which fsyncs first."""
        for above in reversed(self.root.parents):
            if not exists(disk, above):
                make_directory(disk, above)
                continue
            with suppress(OSError):  # who made it may have died before the disk had it; it may be nobody's of ours
                disk.fsync_directory(above.parent)
        for directory in (self.root / MODELS, self.root / ATTEMPTS):
            self._make_directories(directory, above=self.root.parent)
        self.epoch = None if beside else self._begin_epoch()
        if not beside:
            self._clean()

    def attempt(self, name: CheckpointName) -> str:
        self.place(name)
        path = self._fresh()
        try:
            self._disk.mkdir(path)
        except OSError as error:
            raise cannot_store(error) from None
        return str(path)

    def commit(self, name: CheckpointName, attempt: str | Path, manifest: Manifest) -> Checkpoint:
        attempt, final = Path(attempt), self.place(name)
        try:
            self._check_epoch(name, attempt)
            for path, entry in manifest.files.items():
                check_file(attempt, path, entry, disk=self._disk)
            partial = attempt / (MANIFEST + ".partial")
            remove_tree(self._disk, partial)
            write_durable(partial, encode_manifest(manifest), disk=self._disk)
            self._disk.rename(partial, attempt / MANIFEST)
            self._disk.fsync_directory(attempt)
            with self._lock:
                self._make_directories(final.parent, above=self.root)
                replaced = self._publish(attempt, final)
        except Damaged as error:
            raise ServerError(f"{name.uri} was not written whole: {error}") from None
        except OSError as error:
            raise cannot_store(error) from None
        if replaced is not None:
            remove_tree(self._disk, replaced)
        return Checkpoint(name=name, directory=str(final), manifest=manifest)

    def abandon(self, attempt: str | Path) -> None:
        path = Path(attempt)
        if path.parent == self.root / ATTEMPTS and path not in self._unsettled:
            remove_tree(self._disk, path)

    def open(self, name: CheckpointName) -> Checkpoint:
        directory = self.place(name)
        try:
            with self._lock:  # of one checkpoint, and not of it and the one that replaces it
                manifest = read_manifest(directory, disk=self._disk)
                for path, entry in manifest.files.items():
                    check_file(directory, path, entry, disk=self._disk)
        except NotFound:
            raise NotFound(f"there is no checkpoint {name.uri}") from None
        except Damaged as error:
            raise damaged(name.uri, error) from None
        return Checkpoint(name=name, directory=str(directory), manifest=manifest)

    def list(self, model_id: str | None = None) -> Sequence[Checkpoint]:
        found: list[tuple[int, Checkpoint]] = []
        for path in self._committed(None if model_id is None else segment(model_id)):
            if path.name.startswith("."):
                continue
            try:
                changed = self._disk.stat(path / MANIFEST).modified_ns
                manifest = read_manifest(path, disk=self._disk)
            except (OSError, NotFound, Damaged):
                continue  # deleted meanwhile, or damaged: ``open`` says so when it is asked for
            found.append((changed, Checkpoint(name=self._name(path), directory=str(path), manifest=manifest)))
        found.sort(key=lambda item: item[0], reverse=True)
        return [checkpoint for _, checkpoint in found]

    def names(self) -> Iterator[CheckpointName]:
        """Of all that is there, damaged ones too."""
        for path in self._committed():
            if not path.name.startswith("."):
                yield self._name(path)

    def delete(self, name: CheckpointName) -> None:
        directory, gone = self.place(name), self._fresh()
        try:
            with self._lock:
                self._disk.rename(directory, gone)
                self._settle(directory.parent, gone, undo=lambda: self._disk.rename(gone, directory))
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"there is no checkpoint {name.uri}") from None
        except OSError as error:
            raise cannot_store(error) from None
        remove_tree(self._disk, gone)

    # ------------------------------------------------------------------------------------------------ start
    def _begin_epoch(self) -> int:
        """One more than the last, durable before it is used."""
        file, partial = self.root / EPOCH, self.root / f"{EPOCH}.partial"
        epoch = self._read_epoch() + 1
        remove_tree(self._disk, partial)
        write_durable(partial, b"%d\n" % epoch, disk=self._disk)
        self._disk.rename(partial, file)
        self._disk.fsync_directory(self.root)
        return epoch

    def _read_epoch(self) -> int:
        try:
            body = self._disk.read(self.root / EPOCH)
        except FileNotFoundError:
            return 0
        try:
            return int(body)
        except ValueError:
            raise ServerError(
                f"{self.root / EPOCH} holds {body[:20]!r}, expected a number: how often a server has started here. "
                "Write one into it that is larger than any that attempts/ begins a name with"
            ) from None

    def _clean(self) -> None:
        """What a process may have left whose last renames the disk did not have yet: they come first, lest an older
        checkpoint lose its files to what is removed and its replacement to the next power cut."""
        attempts = self.root / ATTEMPTS
        self._disk.fsync_directory(attempts)
        now = self._disk.stat(self.root / EPOCH).modified_ns
        for left in (attempts / name for name in self._disk.listdir(attempts)):
            if not left.name.startswith(BESIDE):
                remove_tree(self._disk, left)
                continue
            with suppress(FileNotFoundError):  # its process works on, and has committed it meanwhile
                if now - self._disk.stat(left).modified_ns > DAY_NS:
                    remove_tree(self._disk, left)
        for aside in self._committed():
            if not (aside.name.startswith(".") and aside.name.endswith(REPLACED)):
                continue
            final = aside.with_name(aside.name[1:].removesuffix(REPLACED))
            if exists(self._disk, final):
                remove_tree(self._disk, self._put_away(aside))
            else:  # the process died between the two renames of ``_publish``
                self._disk.rename(aside, final)

    # ------------------------------------------------------------------------------------------------ inside
    def _fresh(self) -> Path:
        return self.root / ATTEMPTS / f"{BESIDE if self.epoch is None else self.epoch}-{secrets.token_hex(8)}"

    def place(self, name: CheckpointName) -> Path:
        """Where it lies, if there is one. Raises ``UserError`` for a name that cannot be a path segment."""
        return self.root / MODELS / Path(*segments(name))

    def _name(self, place: Path) -> CheckpointName:
        model, kind, own = place.relative_to(self.root / MODELS).parts
        return CheckpointName(model_id=unsegment(model), type=cast(CheckpointType, kind), name=unsegment(own))

    def _check_epoch(self, name: CheckpointName, attempt: Path) -> None:
        """Raises ``ServerError`` for an attempt that is not this server's, and where this is the server no more."""
        own = BESIDE if self.epoch is None else str(self.epoch)
        epoch = attempt.name.partition("-")[0]
        if attempt.parent != self.root / ATTEMPTS or epoch != own:
            raise ServerError(
                f"{name.uri} was written under epoch {epoch} of the data directory, expected {own}: it is not kept"
            )
        if self.epoch is not None and (now := self._read_epoch()) != self.epoch:
            raise ServerError(
                f"{name.uri} is not kept: another server has begun epoch {now} of the data directory, "
                f"and this one's was {self.epoch}"
            )

    def _publish(self, attempt: Path, final: Path) -> Path | None:
        """The attempt takes the final place, on the disk too; returns where an older checkpoint of that name now lies.
        Raises ``OSError`` and has undone it."""
        disk = self._disk
        if not exists(disk, final):
            disk.rename(attempt, final)
            self._settle(final.parent, attempt, undo=lambda: disk.rename(final, attempt))
            return None
        if disk.exchange(attempt, final):
            self._settle(final.parent, attempt, undo=lambda: disk.exchange(attempt, final))
            return attempt
        # No exchange on this system: ``open`` waits for the lock, and the next start undoes half of this.
        aside = final.with_name(f".{final.name}{REPLACED}")

        def undo() -> None:
            if exists(disk, final):
                disk.rename(final, attempt)
            disk.rename(aside, final)

        disk.rename(final, aside)
        try:
            disk.rename(attempt, final)
        except OSError:
            undo()
            raise
        self._settle(final.parent, attempt, undo=undo)
        return self._put_away(aside)

    def _put_away(self, aside: Path) -> Path:
        """A replaced checkpoint where nothing brings it back, also when its replacement is deleted and the disk then
        cut off; returns where it lies."""
        gone = self._fresh()
        with suppress(OSError):  # what has replaced it is safe
            self._disk.rename(aside, gone)
            self._disk.fsync_directory(aside.parent)
        return gone

    def _settle(self, parent: Path, attempt: Path, *, undo: Callable[[], object]) -> None:
        """The disk has what was renamed in ``parent``. Where it does not take it, it is renamed back. Then nobody knows
        what a power cut would leave, so the files stay until the next start (``_clean``)."""
        try:
            self._disk.fsync_directory(parent)
        except OSError:
            self._unsettled.add(attempt)
            undo()
            raise

    def _make_directories(self, path: Path, *, above: Path) -> None:
        """``path`` and what is missing on the way to it, each of which a power cut leaves where it is. What is there
        may have been made by a process that died before the disk had it."""
        if path in self._on_disk or path == above:
            return
        self._make_directories(path.parent, above=above)
        make_directory(self._disk, path)
        self._on_disk.add(path)

    def _committed(self, model: str | None = None) -> Iterator[Path]:
        """Directories where a checkpoint of a model (all) is or was, those that begin with a dot among them."""
        models = self.root / MODELS
        for parent in (models / m / t for m in ([model] if model else self._names(models)) for t in TYPES):
            yield from (parent / own for own in self._names(parent))

    def _names(self, directory: Path) -> Sequence[str]:
        try:
            return self._disk.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            return ()


def segments(name: CheckpointName) -> tuple[str, str, str]:
    """Raises ``UserError`` for a name that cannot be path segments."""
    if name.type not in TYPES:
        raise UserError(f"checkpoint type is {name.type!r}, expected 'weights' or 'sampler_weights'")
    return segment(name.model_id), name.type, segment(name.name)


def segment(text: str) -> str:
    """A name as one path segment, reversibly. Raises ``UserError`` for what no client needs."""
    if not text or len(text) > 200 or "/" in text or "\0" in text:
        raise UserError(f"checkpoint name part {text[:40]!r} is refused, expected 1 to 200 characters without a slash")
    if _SAFE.fullmatch(text):
        return text
    escaped = "".join(
        c if re.fullmatch(r"[A-Za-z0-9._-]", c) else "".join(f"%{byte:02X}" for byte in c.encode()) for c in text
    )
    return "%2E" + escaped[1:] if escaped.startswith(".") else escaped


def unsegment(text: str) -> str:
    return re.sub(
        r"(?:%[0-9A-F]{2})+", lambda m: bytes.fromhex(m.group().replace("%", "")).decode(errors="replace"), text
    )
