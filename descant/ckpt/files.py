"""A checkpoint's tensors, to and from files. Host tensors only; safe on any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from descant.ckpt.manifest import read_manifest, read_verified, write_durable
from descant.ckpt.peft import ADAPTER, ADAPTER_CONFIG, OPTIMIZER, adapter_config
from descant.errors import ServerError, UserError
from descant.types import CheckpointSource, Manifest, SnapshotRef

Export = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""A row [row] → tensors under PEFT's names (``AdapterBank.export`` for one adapter's shape)."""

MOMENTS = ("moment1.", "moment2.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensors:
    """What a checkpoint's files held, under PEFT's names. ``moments`` None: not asked for."""

    manifest: Manifest
    weights: Mapping[str, torch.Tensor]
    moments: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None


def write_checkpoint(
    dest: str,
    ref: SnapshotRef,
    *,
    base: str,
    export: Export,
    weights: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor] | None,
) -> Manifest:
    """Writes the files of a snapshot, each fsynced, into the empty directory ``dest``. Rows are float32 [row] on the
    host. Raises ``ServerError``."""
    tensors = export(weights)
    prefix, suffix = "base_model.model.", ".lora_A.weight"
    modules = [name.removeprefix(prefix).removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    try:
        files = {
            ADAPTER: write_durable(Path(dest) / ADAPTER, safetensors.torch.save(dict(tensors), {"format": "pt"})),
            ADAPTER_CONFIG: write_durable(
                Path(dest) / ADAPTER_CONFIG, adapter_config(ref.lora, base=base, target_modules=modules)
            ),
        }
        if moments is not None:
            named = {p + name: tensor for p, row in zip(MOMENTS, moments) for name, tensor in export(row).items()}
            files[OPTIMIZER] = write_durable(Path(dest) / OPTIMIZER, safetensors.torch.save(named, {"format": "pt"}))
    except OSError as error:
        raise ServerError(f"cannot write a checkpoint into {dest}: {error.strerror}") from None
    return Manifest(
        base="",
        owner="",
        lora=ref.lora,
        step=ref.step,
        applied_seq_id=ref.applied_seq_id,
        has_optimizer=moments is not None,
        files=files,
    )


def read_checkpoint(source: CheckpointSource) -> CheckpointTensors:
    """Reads and verifies (size, sha256) what ``source`` asks for. Raises ``NotFound``, ``UserError`` for optimiser
    state that the checkpoint never had, ``ServerError`` for a damaged one."""
    directory = source.directory
    manifest = read_manifest(directory)
    if source.optimizer and not manifest.has_optimizer:
        raise UserError(f"{source.uri} holds no optimizer state (it was saved for sampling); load it without optimizer")
    weights = _tensors(directory, ADAPTER, manifest)
    if not source.optimizer:
        return CheckpointTensors(manifest=manifest, weights=weights, moments=None)
    state = _tensors(directory, OPTIMIZER, manifest)
    first, second = (
        {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        for prefix in MOMENTS
    )
    return CheckpointTensors(manifest=manifest, weights=weights, moments=(first, second))


def _tensors(directory: str, name: str, manifest: Manifest) -> dict[str, torch.Tensor]:
    try:
        return dict(safetensors.torch.load(read_verified(directory, name, manifest)))
    except SafetensorError as error:
        raise ServerError(f"{directory}/{name} is not a safetensors file: {error}") from None
