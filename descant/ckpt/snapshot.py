"""Models frozen for a save or for the sampler, and models brought back. Runs on the thread that owns the bank.

A snapshot is a copy of whole rows on the device, so that training goes on at once; it moves to host memory when
it is saved. An ephemeral one (``for_disk`` False) is a published compute copy and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from descant.adapters.store import AdapterStore
from descant.adapters.training import Adapter
from descant.ckpt.files import CheckpointTensors, write_checkpoint
from descant.ckpt.peft import ExportBase
from descant.errors import NotFound, UserError
from descant.types import Lora, Manifest, Snapshot, SnapshotRef, Version, describe, same_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Private copies, float32 [row]; never written."""

    ref: SnapshotRef
    lora: Lora
    weights: torch.Tensor
    moments: tuple[torch.Tensor, torch.Tensor] | None


class Snapshots:
    def __init__(self, bank: AdapterStore, *, base: ExportBase):
        self._bank = bank
        self._base = base
        self._held: dict[Version, _Held] = {}

    def take(self, command: Snapshot, *, has_pending_gradient: bool) -> SnapshotRef:
        """Raises ``NotFound`` for a model that is not there."""
        adapter = self._bank[command.model_id]
        ref = SnapshotRef(
            version=Version(model_id=command.model_id, number=command.seq_id),
            kind=command.kind,
            trainable=adapter.lora,
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
        weights = self._bank.weights(command.model_id).clone()
        self._held[ref.version] = _Held(ref=ref, lora=adapter.lora, weights=weights, moments=moments)
        return ref

    def save(self, ref: SnapshotRef, dest: str) -> Callable[[], Manifest]:
        """Copies to the host now; the callable writes, on any thread. Raises ``NotFound`` when nothing is held."""
        held = self._held.get(ref.version)
        if held is None:
            raise NotFound(f"there is no snapshot {ref.version.number} of model {ref.version.model_id} to save")
        # Ready to be written without touching the bank: the layout is fixed, the copies are its own.
        moments = None if held.moments is None else (held.moments[0].cpu(), held.moments[1].cpu())
        return partial(
            write_checkpoint,
            dest,
            held.ref,
            lora=held.lora,
            base=self._base,
            export=partial(self._bank.export, lora=held.lora),
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
            tensors = self._bank.export(held.weights, held.lora)
            self._bank.publish_tensors(ref.version, held.lora, tensors)
        elif loaded is not None:
            self._bank.publish_tensors(ref.version, loaded.lora, loaded.weights)
        else:
            raise NotFound(f"there is no snapshot {ref.version.number} of model {ref.version.model_id} to publish")


def create_from(bank: AdapterStore, model_id: str, loaded: CheckpointTensors) -> Adapter:
    """A new adapter with a checkpoint's shape and numbers. Nothing is left of it when this raises."""
    adapter = bank.create(model_id, loaded.lora, zero_init=True)
    try:
        load_into(bank, model_id, loaded)
    except Exception:
        bank.delete(model_id)
        raise
    return adapter


def load_into(bank: AdapterStore, model_id: str, loaded: CheckpointTensors) -> None:
    """Puts a checkpoint's numbers into an adapter of the same shape: weights, moments and step with ``moments``, else
    weights with a fresh optimiser; every copy of them; no gradient. Raises ``UserError`` and has changed nothing."""
    adapter, lora = bank[model_id], loaded.lora
    if not same_shape(adapter.lora, lora):
        raise UserError(f"the checkpoint's adapter has {describe(lora)}, this model's has {describe(adapter.lora)}")
    weights = torch.zeros_like(bank.weights(model_id))
    moments = (torch.zeros_like(weights), torch.zeros_like(weights))
    bank.import_row(loaded.weights, lora, weights)
    if loaded.moments is not None:
        for tensors, row in zip(loaded.moments, moments):
            bank.import_row(tensors, lora, row)
    bank.weights(model_id).copy_(weights)
    for own, row in zip(bank.moments(model_id), moments):
        own.copy_(row)
    bank.gradient(model_id).zero_()
    adapter.gradient_free = True
    adapter.step = loaded.manifest.step if loaded.moments is not None else 0
    bank.refresh_compute(model_id)
