"""Models frozen for a save or for the sampler, and models brought back. Runs on the thread that owns the bank.

A snapshot is a copy of whole rows on the device, so that training goes on at once; it moves to host memory when
somebody saves it. An ephemeral one (``for_disk`` False) is a published work row and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from descant.ckpt.files import CheckpointTensors, write_checkpoint
from descant.errors import NotFound, UserError
from descant.model.bank import Adapter, AdapterBank
from descant.types import LoraConfig, Manifest, Snapshot, SnapshotRef, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Private copies, float32 [row]; nobody writes them."""

    ref: SnapshotRef
    weights: torch.Tensor
    moments: tuple[torch.Tensor, torch.Tensor] | None


class Snapshots:
    def __init__(self, bank: AdapterBank, *, base: str):
        self._bank = bank
        self._base = base
        self._held: dict[Version, _Held] = {}

    def take(self, command: Snapshot, *, has_pending_gradient: bool) -> SnapshotRef:
        """Raises ``NotFound`` for a model that is not there."""
        adapter = self._bank[command.model_id]
        ref = SnapshotRef(
            version=Version(model_id=command.model_id, number=command.seq_id),
            kind=command.kind,
            lora=adapter.lora,
            step=adapter.step,
            applied_seq_id=command.seq_id,
            has_pending_gradient=has_pending_gradient,
        )
        if not command.for_disk:
            self._bank.publish(command.model_id, ref.version)
            return ref
        moments = None
        if command.kind == "training":
            first, second = self._bank.moments(command.model_id)
            moments = (first.clone(), second.clone())
        self._held[ref.version] = _Held(ref=ref, weights=self._bank.weights(command.model_id).clone(), moments=moments)
        return ref

    def save(self, ref: SnapshotRef, dest: str) -> Callable[[], Manifest]:
        """Copies to the host now; the callable writes, on any thread. Raises ``NotFound`` when nothing is held."""
        held = self._held.get(ref.version)
        if held is None:
            raise NotFound(f"there is no snapshot {ref.version.number} of model {ref.version.model_id} to save")
        # Ready to be written without touching the bank: the layout is fixed, the copies are nobody else's.
        moments = None if held.moments is None else (held.moments[0].cpu(), held.moments[1].cpu())
        return partial(
            write_checkpoint,
            dest,
            held.ref,
            base=self._base,
            export=partial(self._bank.export, lora=held.ref.lora),
            weights=held.weights.cpu(),
            moments=moments,
        )

    def drop(self, ref: SnapshotRef) -> None:
        self._held.pop(ref.version, None)

    def publish(self, ref: SnapshotRef, loaded: CheckpointTensors | None) -> None:
        """Makes the version known to the bank, from what is held, from what was read, or because it is there already.
        Raises ``NotFound``."""
        if self._bank.has_version(ref.version):
            return
        held = self._held.get(ref.version)
        if held is not None:
            tensors = self._bank.export(held.weights, held.ref.lora)
            self._bank.publish_tensors(ref.version, held.ref.lora, tensors)
        elif loaded is not None:
            self._bank.publish_tensors(ref.version, loaded.manifest.lora, loaded.weights)
        else:
            raise NotFound(f"there is no snapshot {ref.version.number} of model {ref.version.model_id} to publish")


def create_from(bank: AdapterBank, model_id: str, loaded: CheckpointTensors) -> Adapter:
    """A new adapter with a checkpoint's shape and numbers. Nothing is left of it when this raises."""
    adapter = bank.create(model_id, loaded.manifest.lora, blank=True)
    try:
        load_into(bank, model_id, loaded)
    except Exception:
        bank.delete(model_id)
        raise
    return adapter


def load_into(bank: AdapterBank, model_id: str, loaded: CheckpointTensors) -> None:
    """Puts a checkpoint's numbers into an adapter of the same shape: weights, moments and step with ``moments``, else
    weights with a fresh optimiser; every copy of them; no gradient. Raises ``UserError`` and has changed nothing."""
    adapter, manifest = bank[model_id], loaded.manifest
    if _shape(adapter.lora) != _shape(manifest.lora):
        raise UserError(f"the checkpoint's adapter has {_tell(manifest.lora)}, this model's has {_tell(adapter.lora)}")
    weights = torch.zeros_like(bank.weights(model_id))
    moments = (torch.zeros_like(weights), torch.zeros_like(weights))
    bank.import_row(loaded.weights, manifest.lora, weights)
    if loaded.moments is not None:
        for tensors, row in zip(loaded.moments, moments):
            bank.import_row(tensors, manifest.lora, row)
    bank.weights(model_id).copy_(weights)
    for own, row in zip(bank.moments(model_id), moments):
        own.copy_(row)
    bank.gradient(model_id).zero_()
    adapter.gradient_free = True
    adapter.step = manifest.step if loaded.moments is not None else 0
    bank.refresh_work(model_id)


def _shape(lora: LoraConfig) -> LoraConfig:
    return replace(lora, seed=None)


def _tell(lora: LoraConfig) -> str:
    groups = [name for name in ("attn", "mlp", "unembed") if getattr(lora, f"train_{name}")]
    return f"rank {lora.rank} on {', '.join(groups)}"
