"""The manifest: the file that makes a directory a checkpoint, and the files it vouches for.

JSON, so that a person can read it and an older Descant can say what it does not know. It is written last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from descant.errors import Damaged, NotFound
from descant.types import FileEntry, Manifest, trainable_from_json, trainable_to_json

MANIFEST = "manifest.json"
FORMAT = 2


def encode_manifest(manifest: Manifest) -> bytes:
    fields = dataclasses.asdict(manifest) | {"trainable": trainable_to_json(manifest.trainable), "format": FORMAT}
    return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"


def decode_manifest(body: bytes, *, where: str) -> Manifest:
    """Raises ``Damaged`` naming ``where`` for anything but a manifest of a known format."""
    try:
        fields: dict[str, Any] = json.loads(body)
        if fields["format"] != FORMAT:
            raise Damaged(f"{where} has manifest format {fields['format']!r}, this version reads {FORMAT}")
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


def read_manifest(directory: str | Path) -> Manifest:
    """Raises ``NotFound`` where there is none, ``Damaged`` for one that cannot be read. Like all that clients may read,
    messages here are without the server's paths: who knows the checkpoint's name says it."""
    try:
        return decode_manifest((Path(directory) / MANIFEST).read_bytes(), where=MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound("there is no checkpoint") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror}") from None


def read_verified(directory: str | Path, name: str, manifest: Manifest) -> bytes:
    """The bytes of one of the manifest's files. Raises ``Damaged`` when they are not what was written."""
    entry = manifest.files.get(name)
    if entry is None:
        raise Damaged(f"its manifest names no {name}")
    try:
        body = (Path(directory) / name).read_bytes()
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None
    check_size(name, len(body), entry)
    if hashlib.sha256(body).hexdigest() != entry.sha256:
        raise Damaged(f"{name} has another sha256 than its manifest says")
    return body


def check_file(directory: str | Path, name: str, entry: FileEntry) -> None:
    """Raises ``Damaged`` for a file that is not there, or not of its size."""
    if Path(name).name != name:
        raise Damaged(f"{name!r} of the manifest is not a plain file name")
    try:
        size = (Path(directory) / name).stat().st_size
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None
    check_size(name, size, entry)


def check_size(name: str, size: int, entry: FileEntry) -> None:
    if size != entry.size_bytes:
        raise Damaged(f"{name} has {size} bytes, its manifest says {entry.size_bytes}")


def damaged(uri: str, why: Damaged) -> Damaged:
    """Of which checkpoint."""
    return Damaged(f"checkpoint {uri} is damaged: {why}; load another")


def write_durable(path: str | Path, body: bytes) -> FileEntry:
    """Writes a new file and waits until the disk has it. (Its directory is fsynced when it is published.)"""
    with open(path, "xb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())


def fsync_directory(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
