"""Checkpoints in a directory: whole or absent, whatever dies when.

    root/models/{model}/{type}/{name}/manifest.json, …      what can be opened
    root/attempts/{incarnation}-{random}/                    what is being written; without a name yet

A commit fsyncs the files (their writer did), writes the manifest beside its final name, fsyncs and renames it, fsyncs
the attempt, renames the attempt to its final place and fsyncs the parent. Only then is an older checkpoint of the same
name removed. Each attempt has a name of its own, so a writer that outlived its process can never write into another's.
Plain Python: no torch is imported here.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from descant.ckpt.manifest import (
    MANIFEST,
    check_file,
    damaged,
    encode_manifest,
    fsync_directory,
    read_manifest,
    write_durable,
)
from descant.errors import Damaged, NotFound, ServerError, UserError
from descant.storage import PRIVATE, cannot_store
from descant.types import Checkpoint, CheckpointName, CheckpointType, Manifest

MODELS, ATTEMPTS, REPLACED = "models", "attempts", ".replaced"
_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
"""A path segment as it is. Anything else (a model id has colons) is written with %XX; the result never begins with a
dot and never holds a slash."""


class DirCheckpointStore:
    """``CheckpointStore`` under one directory, one process at a time."""

    def __init__(self, root: str | Path, *, beside: bool = False):
        """Removes the attempts of earlier processes: the process that wrote them is dead or has lost its directory.
        ``beside``: the directory may be another process's, whose attempts stay; what is committed must have a name of
        its own."""
        self.root = Path(root)
        self._lock = threading.Lock()
        self._incarnation = secrets.token_hex(4)
        self.root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        for directory in (self.root / MODELS, self.root / ATTEMPTS):
            directory.mkdir(parents=True, exist_ok=True)
            fsync_directory(directory.parent)
        if beside:
            return
        for left in (self.root / ATTEMPTS).iterdir():
            shutil.rmtree(left, ignore_errors=True)
        for aside in (self.root / MODELS).glob(f"*/*/.*{REPLACED}"):
            final = aside.with_name(aside.name[1:].removesuffix(REPLACED))
            if final.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:  # the process died between the two renames of ``_rename``
                os.rename(aside, final)

    async def attempt(self, name: CheckpointName) -> str:
        self._place(name)
        path = self.root / ATTEMPTS / f"{self._incarnation}-{secrets.token_hex(8)}"
        try:
            path.mkdir()
        except OSError as error:
            raise cannot_store(error) from None
        return str(path)

    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        return await asyncio.to_thread(self._commit, name, Path(attempt), manifest)

    async def abandon(self, attempt: str) -> None:
        path = Path(attempt)
        if path.parent == self.root / ATTEMPTS:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def open(self, name: CheckpointName) -> Checkpoint:
        return await asyncio.to_thread(self._open, name)

    async def list(self, model_id: str | None = None) -> Sequence[Checkpoint]:
        return await asyncio.to_thread(self._list, model_id)

    async def delete(self, name: CheckpointName) -> None:
        await asyncio.to_thread(self._delete, name)

    # ------------------------------------------------------------------------------------------------ inside
    def _place(self, name: CheckpointName) -> Path:
        """Raises ``UserError`` for a name that cannot be a path segment."""
        if name.type not in ("weights", "sampler_weights"):
            raise UserError(f"checkpoint type is {name.type!r}, expected 'weights' or 'sampler_weights'")
        return self.root / MODELS / _segment(name.model_id) / name.type / _segment(name.name)

    def _commit(self, name: CheckpointName, attempt: Path, manifest: Manifest) -> Checkpoint:
        final = self._place(name)
        try:
            for path, entry in manifest.files.items():
                check_file(attempt, path, entry)
        except Damaged as error:
            raise ServerError(f"{name.uri} was not written whole: {error}") from None
        try:
            partial = attempt / (MANIFEST + ".partial")
            partial.unlink(missing_ok=True)
            write_durable(partial, encode_manifest(manifest))
            os.rename(partial, attempt / MANIFEST)
            fsync_directory(attempt)
            with self._lock:
                self._make_parents(final.parent)
                replaced = self._rename(attempt, final)
                fsync_directory(final.parent)
            if replaced is not None:
                shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise cannot_store(error) from None
        return Checkpoint(name=name, directory=str(final), manifest=manifest)

    def _rename(self, attempt: Path, final: Path) -> Path | None:
        """The attempt takes the final place; returns where an older checkpoint of that name now lies."""
        if not final.exists():
            os.rename(attempt, final)
            return None
        if _exchange(attempt, final):
            return attempt
        # No exchange on this system: ``_open`` waits for the lock, and the next start undoes half of this.
        aside = final.with_name(f".{final.name}{REPLACED}")
        os.rename(final, aside)
        os.rename(attempt, final)
        return aside

    def _make_parents(self, parent: Path) -> None:
        missing = []
        while not parent.exists():
            missing.append(parent)
            parent = parent.parent
        for directory in reversed(missing):
            directory.mkdir()
            fsync_directory(directory.parent)

    def _open(self, name: CheckpointName) -> Checkpoint:
        directory = self._place(name)
        try:
            with self._lock:
                manifest = read_manifest(directory)
            for path, entry in manifest.files.items():
                check_file(directory, path, entry)
        except NotFound:
            raise NotFound(f"there is no checkpoint {name.uri}") from None
        except Damaged as error:
            raise damaged(name.uri, error) from None
        return Checkpoint(name=name, directory=str(directory), manifest=manifest)

    def _list(self, model_id: str | None) -> Sequence[Checkpoint]:
        models = self.root / MODELS
        pattern = "*" if model_id is None else _segment(model_id)
        found: list[tuple[int, Checkpoint]] = []
        for path in models.glob(f"{pattern}/*/*/{MANIFEST}"):
            try:
                changed = path.stat().st_mtime_ns
                manifest = read_manifest(path.parent)
            except (OSError, NotFound, Damaged):
                continue  # deleted meanwhile, or damaged: ``open`` says so when it is asked for
            model, kind, own = path.parent.relative_to(models).parts
            if kind in ("weights", "sampler_weights") and not own.startswith("."):
                name = CheckpointName(model_id=_unsegment(model), type=cast(CheckpointType, kind), name=_unsegment(own))
                found.append((changed, Checkpoint(name=name, directory=str(path.parent), manifest=manifest)))
        found.sort(key=lambda item: item[0], reverse=True)
        return [checkpoint for _, checkpoint in found]

    def _delete(self, name: CheckpointName) -> None:
        directory = self._place(name)
        gone = self.root / ATTEMPTS / f"{self._incarnation}-{secrets.token_hex(8)}"
        try:
            with self._lock:
                os.rename(directory, gone)
                fsync_directory(directory.parent)
        except FileNotFoundError:
            raise NotFound(f"there is no checkpoint {name.uri}") from None
        except OSError as error:
            raise cannot_store(error) from None
        shutil.rmtree(gone, ignore_errors=True)


def _segment(text: str) -> str:
    """A name as one path segment, reversibly. Raises ``UserError`` for what no client needs."""
    if not text or len(text) > 200 or "/" in text or "\0" in text:
        raise UserError(f"checkpoint name part {text[:40]!r} is refused, expected 1 to 200 characters without a slash")
    if _SAFE.fullmatch(text):
        return text
    escaped = "".join(
        c if re.fullmatch(r"[A-Za-z0-9._-]", c) else "".join(f"%{byte:02X}" for byte in c.encode()) for c in text
    )
    return "%2E" + escaped[1:] if escaped.startswith(".") else escaped


def _unsegment(segment: str) -> str:
    return re.sub(
        r"(?:%[0-9A-F]{2})+", lambda m: bytes.fromhex(m.group().replace("%", "")).decode(errors="replace"), segment
    )


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two directories in one step (Linux ``renameat2``). False where the system cannot."""
    if sys.platform != "linux":
        return False
    at_fdcwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))
