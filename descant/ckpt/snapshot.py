"""Models frozen for a save or for the sampler, and models brought back. Runs on the thread that owns the bank, but for
what ``Snapshots.save`` returns.

A snapshot is a copy of whole rows on the device, so that training goes on at once; it moves from there to files when it
is saved. An ephemeral one (``for_disk`` False) is a published compute copy and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from descant.adapters.offload import CopyEvent
from descant.adapters.store import AdapterStore
from descant.adapters.training import Adapter
from descant.ckpt.files import CheckpointTensors, FileWriter, write_checkpoint
from descant.ckpt.peft import ExportBase
from descant.errors import NotFound, UserError
from descant.types import Lora, Manifest, Snapshot, SnapshotRef, Version, describe, same_shape


class SaveState(Enum):
    TAKEN = "copied on the device"
    STAGING = "on its way to who writes it"
    STAGED = "all given to who writes it"
    WRITTEN = "in files that the disk has"
    FAILED = "not saved"


LEGAL: Mapping[SaveState, frozenset[SaveState]] = {
    SaveState.TAKEN: frozenset({SaveState.STAGING}),
    SaveState.STAGING: frozenset({SaveState.STAGED, SaveState.FAILED}),
    SaveState.STAGED: frozenset({SaveState.WRITTEN, SaveState.FAILED}),
    SaveState.WRITTEN: frozenset({SaveState.STAGING}),  # saved again, elsewhere
    SaveState.FAILED: frozenset({SaveState.STAGING}),
}
"""What may come after each. A snapshot may be dropped in any."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """``rows``: float32 [row], private copies that are never written: weights and, for training, both moments.
    ``ready``: when they are there (None: they are)."""

    ref: SnapshotRef
    lora: Lora
    rows: Sequence[torch.Tensor]
    ready: CopyEvent | None
    save_state: SaveState = SaveState.TAKEN

    def becomes(self, save_state: SaveState) -> None:
        if save_state not in LEGAL[self.save_state]:
            raise AssertionError(f"a snapshot that is {self.save_state.value} cannot be {save_state.value} next")
        self.save_state = save_state


class Snapshots:
    def __init__(self, bank: AdapterStore, *, base: ExportBase, writer: FileWriter):
        self._bank = bank
        self._base = base
        self._writer = writer
        self._held: dict[Version, _Held] = {}
        self._num_written = self._num_failed = 0

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
        live = self._bank.state(command.model_id)
        # One by one: on the host the C library gives what is smaller than 32 MiB memory that is there already.
        rows = [row.clone() for row in (live if command.kind == "training" else live[:1])]
        ready = torch.cuda.current_stream(live.device).record_event() if live.is_cuda else None
        self._held[ref.version] = _Held(ref=ref, lora=adapter.lora, rows=rows, ready=ready)
        return ref

    def save(self, ref: SnapshotRef, dest: str) -> Callable[[], Manifest]:
        """Touches nothing on the device; the callable writes, on any thread that may wait. Raises ``NotFound`` when
        nothing is held."""
        held = self._held.get(ref.version)
        if held is None:
            raise NotFound(f"there is no snapshot {ref.version.number} of model {ref.version.model_id} to save")
        return partial(self._write, held, dest)

    def _write(self, held: _Held, dest: str) -> Manifest:
        held.becomes(SaveState.STAGING)
        try:
            # Nothing of the bank is read here but its layout, which never changes.
            weights, *moments = (self._bank.views(row, held.lora) for row in held.rows)
            manifest = write_checkpoint(
                self._writer,
                dest,
                held.ref,
                lora=held.lora,
                base=self._base,
                weights=weights,
                moments=(moments[0], moments[1]) if moments else None,
                ready=held.ready,
                staged=lambda: held.becomes(SaveState.STAGED),
            )
        except BaseException:
            held.becomes(SaveState.FAILED)
            self._num_failed += 1
            raise
        held.becomes(SaveState.WRITTEN)
        self._num_written += 1
        return manifest

    def drop(self, ref: SnapshotRef) -> None:
        """What is being written of it ends as it would."""
        self._held.pop(ref.version, None)

    def publish(self, ref: SnapshotRef, loaded: CheckpointTensors | None) -> None:
        """Makes the version known to the bank, from what is held, from what was read, or because it is there already.
        Raises ``NotFound``."""
        if self._bank.has_version(ref.version):
            return
        held = self._held.get(ref.version)
        if held is not None:
            self._bank.publish_tensors(ref.version, held.lora, self._bank.views(held.rows[0], held.lora))
        elif loaded is not None:
            self._bank.publish_tensors(ref.version, loaded.lora, loaded.weights)
        else:
            raise NotFound(f"there is no snapshot {ref.version.number} of model {ref.version.model_id} to publish")

    def stats(self) -> dict[str, float]:
        """Saves of ever, by outcome; what is held for one now."""
        return {
            "saves_written": self._num_written,
            "saves_failed": self._num_failed,
            "snapshots_held": len(self._held),
            "snapshots_held_bytes": sum(row.nbytes for held in self._held.values() for row in held.rows),
        }


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
