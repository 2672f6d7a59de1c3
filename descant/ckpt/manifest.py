"""The manifest: the file that makes a directory a checkpoint, and the files it vouches for.

JSON, so that a person can read it and an older Descant can say what it does not know. It is written last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from descant.ckpt.disk import REAL, Disk
from descant.errors import Damaged, NotFound, UserError
from descant.types import FileEntry, Manifest, trainable_from_json, trainable_to_json

MANIFEST = "manifest.json"
FORMAT = 3
WITHOUT_DIGEST = 2
"""The format before, which is read as well."""
DIGEST = "sha256"
CHUNK_BYTES = 1 << 20


def encode_manifest(manifest: Manifest) -> bytes:
    fields = dataclasses.asdict(manifest) | {"trainable": trainable_to_json(manifest.trainable), "format": FORMAT}
    return seal(fields)


def seal(fields: Mapping[str, Any]) -> bytes:
    """JSON whose last line is a digest of all before it, so that a changed bit is seen."""
    head = json.dumps(fields, indent=1, sort_keys=True).encode().removesuffix(b"\n}")
    return head + _tail(head)


def unseal(body: bytes, *, where: str) -> dict[str, Any]:
    """Raises ``Damaged`` for what is not as it was written, ``ValueError`` for what never was."""
    fields: dict[str, Any] = json.loads(body)
    head = body[: -len(_tail(b""))]
    if body != head + _tail(head):
        raise Damaged(f"{where} is not as it was written: it has another {DIGEST} than it says")
    return {name: value for name, value in fields.items() if name != DIGEST}


def _tail(head: bytes) -> bytes:
    return b',\n "%s": "%s"\n}\n' % (DIGEST.encode(), hashlib.sha256(head).hexdigest().encode())


def decode_manifest(body: bytes, *, where: str) -> Manifest:
    """Raises ``Damaged`` naming ``where`` for anything but a manifest of a known format."""
    try:
        fields: dict[str, Any] = json.loads(body)
        if fields["format"] not in (WITHOUT_DIGEST, FORMAT):
            raise Damaged(f"{where} has manifest format {fields['format']!r}, this version reads {FORMAT}")
        if fields["format"] == FORMAT or DIGEST in fields:
            fields = unseal(body, where=where)
        return Manifest(
            base=str(fields["base"]),
            owner=str(fields["owner"]),
            trainable=trainable_from_json(fields["trainable"]),
            step=int(fields["step"]),
            applied_seq_id=int(fields["applied_seq_id"]),
            has_optimizer=bool(fields["has_optimizer"]),
            files={str(path): FileEntry(**entry) for path, entry in fields["files"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{where} is not a checkpoint manifest: {type(error).__name__}: {error}") from None


def read_manifest(directory: str | Path, *, disk: Disk = REAL) -> Manifest:
    """Raises ``NotFound`` where there is none, ``Damaged`` for one that cannot be read. Like all that clients may read,
    messages here are without the server's paths: who knows the checkpoint's name says it."""
    try:
        return decode_manifest(disk.read(os.path.join(directory, MANIFEST)), where=MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound("there is no checkpoint") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror}") from None


def read_verified(directory: str | Path, name: str, manifest: Manifest) -> bytes:
    """The bytes of one of the manifest's files. Raises ``Damaged`` when they are not what was written, and what
    ``reading`` does."""
    with reading(directory, manifest):
        entry = manifest.files.get(name)
        if entry is None:
            raise Damaged(f"its manifest names no {name}")
        try:
            body = REAL.read(os.path.join(directory, name))
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None
        check_size(name, len(body), entry)
        _check_digest(name, hashlib.sha256(body).hexdigest(), entry)
        return body


@contextmanager
def reading(directory: str | Path, manifest: Manifest) -> Iterator[None]:
    """What is ``Damaged`` in here may be another checkpoint's. Raises ``NotFound`` and ``UserError`` when this one was
    deleted or replaced since its manifest was read."""
    try:
        yield
    except Damaged as error:
        try:
            now = read_manifest(directory)
        except Damaged:
            raise error from None
        if now != manifest:
            raise UserError("the checkpoint was replaced while it was read; load it again") from None
        raise


def check_file(directory: str | Path, name: str, entry: FileEntry, *, disk: Disk = REAL) -> None:
    """Raises ``Damaged`` for a file that is not there, or not of its size."""
    check_name(name)
    try:
        size = disk.stat(os.path.join(directory, name)).size_bytes
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None
    check_size(name, size, entry)


def verify(directory: str | Path, *, disk: Disk = REAL) -> Manifest:
    """Reads all of a checkpoint. Raises ``NotFound`` where there is none, ``Damaged`` naming a file that is not what
    was written."""
    manifest = read_manifest(directory, disk=disk)
    for name, entry in manifest.files.items():
        check_digest(directory, name, entry, disk=disk)
    return manifest


def check_digest(directory: str | Path, name: str, entry: FileEntry, *, disk: Disk = REAL) -> None:
    """Reads all of a file. Raises ``Damaged`` for one that is not there, or is not what was written."""
    check_file(directory, name, entry, disk=disk)
    digest = hashlib.sha256()
    try:
        with disk.open(os.path.join(directory, name)) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None
    _check_digest(name, digest.hexdigest(), entry)


def _check_digest(name: str, sha256: str, entry: FileEntry) -> None:
    if sha256 != entry.sha256:
        raise Damaged(f"{name} has another sha256 than its manifest says")


def check_name(name: str) -> None:
    """Raises ``Damaged`` for what would lie outside of the checkpoint's directory."""
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise Damaged(f"{name!r} of the manifest is not a plain file name")


def check_size(name: str, size: int, entry: FileEntry) -> None:
    if size != entry.size_bytes:
        raise Damaged(f"{name} has {size} bytes, its manifest says {entry.size_bytes}")


def damaged(uri: str, why: Damaged) -> Damaged:
    """Of which checkpoint."""
    return Damaged(f"checkpoint {uri} is damaged: {why}; load another")


def write_durable(path: str | Path, body: bytes, *, disk: Disk = REAL) -> FileEntry:
    """Writes a new file and waits until the disk has it. (Its directory is fsynced when it is published.)"""
    file = disk.create(path)
    try:
        file.write(body)
        file.fsync()
    finally:
        file.close()
    return FileEntry(size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
