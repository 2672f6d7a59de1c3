"""Admission of training requests: how much of their data waits and runs, and whether there is room for more.

    admission = TrainingAdmission(base, max_bytes=…)
    admitted = admission.admit(owner, model_id, num_bytes, is_next=…)    # raises ``Overloaded``
    admission.submitted(admitted)                                        # the trainer has it
    admission.release(admitted)                                          # it has ended

Bytes are counted from the moment a request is let in, wherever it then waits. No owner can take all the room: an owner
may hold as much as stays free, and one model as much as stays free of that. So one owner with one model has a third at
the most, and the next owner finds room.

Two things are let in whatever is held, so that no request waits for what cannot come. An owner that holds nothing may
always begin. And the request that is next in its model's order is let in while the trainer has nothing of its owner's:
those in its way would otherwise wait for it, and it for them. While the trainer has something, that ends by itself, and
the request may come again. What lies beyond the limit is so at most two requests of each owner.

What waits for an earlier request to arrive cannot end by itself. Of one model it is at most a quarter of the limit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from descant.errors import Overloaded
from descant.types import ForwardBackward

REQUEST_BYTES = 4096
"""What any waiting request takes of memory: its entries in our tables, its tasks."""
DATUM_BYTES = 512
"""A datum's objects, beside its arrays."""
ARRAY_BYTES = 256

BEHIND_SHARE = 4
"""One part in so many may be of one model and wait for an earlier request. A client that sends the first chunk of a
batch last has all others here."""


@dataclass(slots=True, eq=False)
class Admitted:
    """One request's bytes. ``waits``: the trainer does not have it yet."""

    owner: str
    model_id: str
    num_bytes: int
    waits: bool = True


class TrainingAdmission:
    """Of one base."""

    def __init__(self, base: str, *, max_bytes: int):
        self._base = base
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._of_owner: Counter[str] = Counter()
        self._of_model: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        """Bytes by model that its trainer does not have yet."""
        self._at_trainer: Counter[str] = Counter()
        """Requests by owner."""

    @property
    def waiting_bytes(self) -> int:
        """What of it trainers do not have yet."""
        return self._waiting.total()

    def admit(self, owner: str, model_id: str, num_bytes: int, *, is_next: bool) -> Admitted:
        """``is_next``: no earlier request of its model is missing. Raises ``Overloaded``, and holds nothing then."""
        if self._of_owner[owner] and not (is_next and not self._at_trainer[owner]):
            self._check(owner, model_id, num_bytes, is_next)
        return self.admit_known(owner, model_id, num_bytes)

    def admit_known(self, owner: str, model_id: str, num_bytes: int) -> Admitted:
        """Without asking: it was let in before, or ends at once."""
        self.num_bytes += num_bytes
        self._of_owner[owner] += num_bytes
        self._of_model[model_id] += num_bytes
        self._waiting[model_id] += num_bytes
        return Admitted(owner=owner, model_id=model_id, num_bytes=num_bytes)

    def _check(self, owner: str, model_id: str, num_bytes: int, is_next: bool) -> None:
        most_behind = self._max_bytes // BEHIND_SHARE
        behind = self._waiting[model_id] + num_bytes
        if not is_next and behind > most_behind:
            raise Overloaded(
                f"{behind} bytes of this model's requests would wait for an earlier one that has not arrived, "
                f"expected at most {most_behind}; send that one, or this one later"
            )
        of_owner, of_model = self._of_owner[owner] + num_bytes, self._of_model[model_id] + num_bytes
        free = self._max_bytes - self.num_bytes - num_bytes
        if of_owner > free or of_model > free - of_owner:
            raise Overloaded(
                f"{num_bytes} bytes of training data beside the {of_owner - num_bytes} that you have on {self._base} "
                f"(of this model {of_model - num_bytes}) are more than your share of the {self._max_bytes} that it "
                "takes at a time; send it again when some of yours has ended"
            )

    def submitted(self, admitted: Admitted) -> None:
        if admitted.waits:
            admitted.waits = False
            _take(self._waiting, admitted.model_id, admitted.num_bytes)
            self._at_trainer[admitted.owner] += 1

    def release(self, admitted: Admitted) -> None:
        """Once, whether or not it was handed over."""
        self.num_bytes -= admitted.num_bytes
        _take(self._of_owner, admitted.owner, admitted.num_bytes)
        _take(self._of_model, admitted.model_id, admitted.num_bytes)
        if admitted.waits:
            _take(self._waiting, admitted.model_id, admitted.num_bytes)
        else:
            _take(self._at_trainer, admitted.owner, 1)


def _take(counts: Counter[str], key: str, count: int) -> None:
    counts[key] -= count
    if counts[key] <= 0:
        del counts[key]


def held_bytes(command: ForwardBackward) -> int:
    """What a decoded request keeps alive: the buffers that its arrays look into, whole, and its objects."""
    buffers: dict[int, int] = {}
    num_arrays = 0
    for datum in command.data:
        for array in (*(chunk.tokens for chunk in datum.model_input), *datum.loss_fn_inputs.values()):
            num_arrays += 1
            buffer, num_bytes = _buffer(array)
            buffers[buffer] = num_bytes
    return (
        REQUEST_BYTES
        + sum(buffers.values())
        + ARRAY_BYTES * (num_arrays + len(command.loss_fn_config))
        + DATUM_BYTES * len(command.data)
    )


def _buffer(array: np.ndarray) -> tuple[int, int]:
    """Which memory it looks into, and how much that is."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if isinstance(owner.base, bytes | bytearray):
        return id(owner.base), len(owner.base)
    return id(owner), owner.nbytes
