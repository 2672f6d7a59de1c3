"""What snapshots that are held for a save take on the device: the next one waits, in its model's queue, rather than
grow it. On rank 0, which decides for all ranks."""

from __future__ import annotations

import math
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field

from descant.errors import ServerError
from descant.ranks.executor import AdapterMemory
from descant.train.runner import RequestKey
from descant.types import Snapshot

SHARE = 8
"""Snapshots may take one part in so many of what adapters may take; one of them may always be held."""
WAIT_S = 600.0
"""How long one waits. Each is dropped when its save ends, and no save waits for ever."""


@dataclass(slots=True)
class _Waiting:
    num_bytes: int
    until_s: float
    granted: Future[None] = field(default_factory=Future)


class SnapshotRoom:
    """From ``ask`` to ``free``, by (model_id, seq_id). In the order of asking."""

    def __init__(self, memory: AdapterMemory, *, wait_s: float = WAIT_S):
        self._memory, self._wait_s = memory, wait_s
        self._held: dict[RequestKey, int] = {}
        """Bytes, of each that is held or may be taken now."""
        self._waiting: OrderedDict[RequestKey, _Waiting] = OrderedDict()

    def ask(self, command: Snapshot, now_s: float) -> Future[None] | None:
        """None: it may be taken now. Else when it may, or the ``ServerError`` that there was no room in time."""
        key = command.model_id, command.seq_id
        num_bytes, _ = self._memory.bytes_in_use(command.model_id)
        if not command.for_disk:
            return None
        if not self._waiting and self._has_room(num_bytes):
            self._held[key] = num_bytes
            return None
        self._waiting[key] = waiting = _Waiting(num_bytes, now_s + self._wait_s)
        return waiting.granted

    def free(self, key: RequestKey) -> list[RequestKey]:
        """It is held no more. Those that waited and may be taken now."""
        if self._held.pop(key, None) is None:
            return []
        granted = []
        while self._waiting:
            key, first = next(iter(self._waiting.items()))
            if not self._has_room(first.num_bytes):
                break
            del self._waiting[key]
            self._held[key] = first.num_bytes
            first.granted.set_result(None)
            granted.append(key)
        return granted

    def expire(self, now_s: float) -> list[RequestKey]:
        """Those that have waited for too long: their futures have an error."""
        expired = [key for key, waiting in self._waiting.items() if waiting.until_s <= now_s]
        for key in expired:
            self._waiting.pop(key).granted.set_exception(
                ServerError(
                    f"there was no room for one more snapshot in {self._wait_s:.0f} s: {len(self._held)} are held for "
                    f"saves that have not ended, {sum(self._held.values()) >> 20} MiB of "
                    f"{self._memory.adapter_bytes // SHARE >> 20}; save again"
                )
            )
        return expired

    @property
    def expires_s(self) -> float:
        """When the first has waited for too long; infinite while none waits."""
        return next((waiting.until_s for waiting in self._waiting.values()), math.inf)

    def _has_room(self, num_bytes: int) -> bool:
        return not self._held or sum(self._held.values()) + num_bytes <= self._memory.adapter_bytes // SHARE
