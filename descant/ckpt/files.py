"""A checkpoint's tensors, to and from files. Safe on any thread."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from descant.adapters.offload import CopyEvent
from descant.ckpt.disk import REAL
from descant.ckpt.manifest import check_size, damaged, read_manifest, reading
from descant.ckpt.peft import ADAPTER, ADAPTER_CONFIG, OPTIMIZER, ExportBase, adapter_config, modules_of
from descant.ckpt.staging import Content, num_bytes_of
from descant.ckpt.tensor_file import contents_of, read_tensors
from descant.ckpt.writer_main import OpenFile
from descant.errors import Damaged, NotFound, UserError
from descant.types import CheckpointSource, FileEntry, Lora, Manifest, SnapshotRef

READ_BYTES = 8 << 20
"""At a time, and hashed at once."""

MOMENTS = ("moment1.", "moment2.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensors:
    """What an adapter's checkpoint held, under PEFT's names. ``moments`` None: not asked for."""

    manifest: Manifest
    lora: Lora
    weights: Mapping[str, torch.Tensor]
    moments: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None


class FileWriter(Protocol):
    """What writes files: ``InlineWriter``, and ``ckpt.writer.CheckpointWriter``, which has a process do it."""

    def write(
        self,
        directory: str,
        files: Mapping[str, Sequence[Content]],
        *,
        ready: CopyEvent | None = None,
        staged: Callable[[], None] = ...,
    ) -> dict[str, FileEntry]:
        """New files, each the bytes and tensors of its name, one behind the other. Fsynced; the directory is not.

        Tensors may be of any strides, and must not change until ``staged`` is called. ``ready``: when they are there
        (None: they are). Raises ``CannotStore`` for what the disk says; what is in the directory then is nobody's."""
        ...


class InlineWriter:
    """Writes in the caller's thread, which waits for the disk. Tensors on the host."""

    def write(
        self,
        directory: str,
        files: Mapping[str, Sequence[Content]],
        *,
        ready: CopyEvent | None = None,
        staged: Callable[[], None] = lambda: None,
    ) -> dict[str, FileEntry]:
        entries = {}
        for name, contents in files.items():
            file = OpenFile(REAL, directory, name, num_bytes_of(contents))
            try:
                for content in contents:
                    file.write(content if isinstance(content, bytes) else _bytes_of(content))
                size_bytes, sha256 = file.finish()
            finally:
                file.close()
            entries[name] = FileEntry(size_bytes=size_bytes, sha256=sha256)
        staged()
        return entries


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_checkpoint(
    writer: FileWriter,
    dest: str,
    ref: SnapshotRef,
    *,
    lora: Lora,
    base: ExportBase,
    weights: Mapping[str, torch.Tensor],
    moments: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None,
    ready: CopyEvent | None = None,
    staged: Callable[[], None] = lambda: None,
) -> Manifest:
    """Writes the files of a snapshot, each fsynced, into the empty directory ``dest``. Tensors under PEFT's names.
    ``ready``, ``staged``, and what it raises: see ``FileWriter``."""
    files = _adapter_files(weights, lora, base)
    if moments is not None:
        files[OPTIMIZER] = contents_of(
            {prefix + name: tensor for prefix, of in zip(MOMENTS, moments) for name, tensor in of.items()}
        )
    return Manifest(
        base="",
        owner="",
        trainable=lora,
        step=ref.step,
        applied_seq_id=ref.applied_seq_id,
        has_optimizer=moments is not None,
        files=writer.write(dest, files, ready=ready, staged=staged),
    )


def write_tensors(dest: str, tensors: Mapping[str, torch.Tensor], lora: Lora, *, base: ExportBase) -> Manifest:
    """An adapter that no optimiser has stepped, under PEFT's names, as ``write_checkpoint`` writes one."""
    files = InlineWriter().write(dest, _adapter_files(tensors, lora, base))
    return Manifest(base="", owner="", trainable=lora, step=0, applied_seq_id=0, has_optimizer=False, files=files)


def _adapter_files(tensors: Mapping[str, torch.Tensor], lora: Lora, base: ExportBase) -> dict[str, Sequence[Content]]:
    config = adapter_config(lora, base=base, modules=modules_of(tensors))
    return {ADAPTER: contents_of(tensors), ADAPTER_CONFIG: [config]}


def read_checkpoint(source: CheckpointSource) -> CheckpointTensors:
    """Reads and verifies (size, sha256) what ``source`` asks for. Raises ``NotFound``, ``UserError`` for another kind
    than LoRA and for optimiser state that the checkpoint never had, ``Damaged``."""
    try:
        return _read(source)
    except Damaged as error:
        raise damaged(source.uri, error) from None
    except NotFound:
        raise NotFound(f"there is no checkpoint {source.uri}") from None


def _read(source: CheckpointSource) -> CheckpointTensors:
    directory = source.directory
    manifest = read_manifest(directory)
    if not isinstance(manifest.trainable, Lora):
        raise UserError(f"{source.uri} is of kind {manifest.trainable.kind!r}, expected {Lora.kind!r}")
    if source.optimizer and not manifest.has_optimizer:
        raise UserError(f"{source.uri} holds no optimizer state (it was saved for sampling); load it without optimizer")
    with reading(directory, manifest):
        weights = _tensors(directory, ADAPTER, manifest)
        state = _tensors(directory, OPTIMIZER, manifest) if source.optimizer else None
    if state is None:
        return CheckpointTensors(manifest=manifest, lora=manifest.trainable, weights=weights, moments=None)
    first, second = (
        {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        for prefix in MOMENTS
    )
    return CheckpointTensors(manifest=manifest, lora=manifest.trainable, weights=weights, moments=(first, second))


def _tensors(directory: str, name: str, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Read once, hashed as it comes. Raises ``Damaged`` when a file is not what was written."""
    entry = manifest.files.get(name)
    if entry is None:
        raise Damaged(f"its manifest names no {name}")
    sha256, num_read = hashlib.sha256(), 0

    def read_into(buffer: memoryview) -> None:
        nonlocal num_read
        while buffer:
            num_bytes = file.readinto(buffer[:READ_BYTES])
            if not num_bytes:
                raise Damaged(f"it ends after {num_read} bytes")
            sha256.update(buffer[:num_bytes])
            num_read += num_bytes
            buffer = buffer[num_bytes:]

    tensors: dict[str, torch.Tensor] = {}
    wrong: Damaged | None = None
    try:
        with open(Path(directory) / name, "rb", buffering=0) as file:
            check_size(name, os.fstat(file.fileno()).st_size, entry)
            try:
                tensors = read_tensors(entry.size_bytes, read_into)
            except Damaged as error:
                wrong = error
                read_into(memoryview(bytearray(entry.size_bytes - num_read)))  # is it as it was written?
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None
    if sha256.hexdigest() != entry.sha256:
        raise Damaged(f"{name} has another sha256 than its manifest says")
    if wrong is not None:
        raise Damaged(f"{name} is not a safetensors file: {wrong}")
    return tensors
