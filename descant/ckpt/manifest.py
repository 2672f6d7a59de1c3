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

from descant.errors import NotFound, ServerError
from descant.types import FileEntry, LoraConfig, Manifest

MANIFEST = "manifest.json"
FORMAT = 1


def encode_manifest(manifest: Manifest) -> bytes:
    return json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True).encode() + b"\n"


def decode_manifest(body: bytes, *, where: str) -> Manifest:
    """Raises ``ServerError`` naming ``where`` for anything but a manifest of a known format."""
    try:
        fields: dict[str, Any] = json.loads(body)
        if fields["format"] != FORMAT:
            raise ServerError(f"{where} has manifest format {fields['format']!r}, this version reads {FORMAT}")
        return Manifest(
            base=str(fields["base"]),
            owner=str(fields["owner"]),
            lora=LoraConfig(**fields["lora"]),
            step=int(fields["step"]),
            applied_seq_id=int(fields["applied_seq_id"]),
            has_optimizer=bool(fields["has_optimizer"]),
            files={str(path): FileEntry(**entry) for path, entry in fields["files"].items()},
            format=FORMAT,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ServerError(f"{where} is not a checkpoint manifest: {type(error).__name__}: {error}") from None


def read_manifest(directory: str | Path) -> Manifest:
    """Raises ``NotFound`` where there is none."""
    path = Path(directory) / MANIFEST
    try:
        return decode_manifest(path.read_bytes(), where=str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no checkpoint in {directory}") from None
    except OSError as error:
        raise ServerError(f"cannot read {path}: {error.strerror}") from None


def read_verified(directory: str | Path, name: str, manifest: Manifest) -> bytes:
    """The bytes of one of the manifest's files. Raises ``ServerError`` when they are not what was written."""
    entry = manifest.files.get(name)
    if entry is None:
        raise NotFound(f"the checkpoint in {directory} has no {name}")
    try:
        body = (Path(directory) / name).read_bytes()
    except OSError as error:
        raise ServerError(f"cannot read {name} of the checkpoint in {directory}: {error.strerror}") from None
    if len(body) != entry.size_bytes:
        raise ServerError(f"{directory}/{name} has {len(body)} bytes, its manifest says {entry.size_bytes}")
    if hashlib.sha256(body).hexdigest() != entry.sha256:
        raise ServerError(f"{directory}/{name} has another sha256 than its manifest says: the file is damaged")
    return body


def write_durable(path: str | Path, body: bytes) -> FileEntry:
    """Writes a new file and waits until the disk has it. (Its directory is fsynced by whoever publishes it.)"""
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
