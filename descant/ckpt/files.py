"""A checkpoint's tensors, to and from files. Host tensors only; safe on any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from descant.ckpt.manifest import damaged, read_manifest, read_verified, write_durable
from descant.ckpt.peft import ADAPTER, ADAPTER_CONFIG, OPTIMIZER, ExportBase, adapter_config, modules_of
from descant.errors import Damaged, NotFound, UserError
from descant.storage import cannot_store, check_room
from descant.types import CheckpointSource, FileEntry, Lora, Manifest, SnapshotRef

Export = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""A row [row] → tensors under PEFT's names (``AdapterBank.export`` for one adapter's shape)."""

MOMENTS = ("moment1.", "moment2.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensors:
    """What an adapter's checkpoint held, under PEFT's names. ``moments`` None: not asked for."""

    manifest: Manifest
    lora: Lora
    weights: Mapping[str, torch.Tensor]
    moments: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None


def write_checkpoint(
    dest: str,
    ref: SnapshotRef,
    *,
    lora: Lora,
    base: ExportBase,
    export: Export,
    weights: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor] | None,
) -> Manifest:
    """Writes the files of a snapshot, each fsynced, into the empty directory ``dest``. Rows are float32 [row] on the
    host. Raises ``CannotStore``, also where a file would leave less than the reserve free."""
    manifest = write_tensors(dest, export(weights), lora, base=base)
    files = dict(manifest.files)
    if moments is not None:
        named = {p + name: tensor for p, row in zip(MOMENTS, moments) for name, tensor in export(row).items()}
        files[OPTIMIZER] = _write(Path(dest) / OPTIMIZER, safetensors.torch.save(named, {"format": "pt"}))
    return replace(
        manifest, step=ref.step, applied_seq_id=ref.applied_seq_id, has_optimizer=moments is not None, files=files
    )


def write_tensors(dest: str, tensors: Mapping[str, torch.Tensor], lora: Lora, *, base: ExportBase) -> Manifest:
    """An adapter that no optimiser has stepped, under PEFT's names, as ``write_checkpoint`` writes one."""
    weights = safetensors.torch.save(dict(tensors), {"format": "pt"})
    files = {
        ADAPTER: _write(Path(dest) / ADAPTER, weights),
        ADAPTER_CONFIG: _write(
            Path(dest) / ADAPTER_CONFIG, adapter_config(lora, base=base, modules=modules_of(tensors))
        ),
    }
    return Manifest(base="", owner="", trainable=lora, step=0, applied_seq_id=0, has_optimizer=False, files=files)


def _write(path: Path, body: bytes) -> FileEntry:
    try:
        check_room(path.parent, len(body))
        return write_durable(path, body)
    except OSError as error:
        raise cannot_store(error) from None


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
    weights = _tensors(directory, ADAPTER, manifest)
    if not source.optimizer:
        return CheckpointTensors(manifest=manifest, lora=manifest.trainable, weights=weights, moments=None)
    state = _tensors(directory, OPTIMIZER, manifest)
    first, second = (
        {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        for prefix in MOMENTS
    )
    return CheckpointTensors(manifest=manifest, lora=manifest.trainable, weights=weights, moments=(first, second))


def _tensors(directory: str, name: str, manifest: Manifest) -> dict[str, torch.Tensor]:
    try:
        return dict(safetensors.torch.load(read_verified(directory, name, manifest)))
    except SafetensorError as error:
        raise Damaged(f"{name} is not a safetensors file: {error}") from None
