"""Ephemeral versions, weights saved for sampling without a name: which stay, and which are released. Pure: time is an
argument.

A training loop makes one each step and drops it without a word. Of a model the newest stay, and those that were sampled
lately; of one owner all together have so many bytes at most, and where that is not enough the longest unused go first.
A model's newest, and one that a request runs on, are never released.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from descant.errors import QuotaExceeded
from descant.service.names import session_id_of
from descant.types import Version


@dataclass(slots=True, eq=False)
class _Ephemeral:
    version: Version
    base: str
    owner: str
    num_bytes: int
    used_at: float
    num_running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    keep: int
    """Of a model's newest."""
    keep_sampled_s: float
    max_owner_bytes: int | None


class EphemeralVersions:
    """Of all bases: an owner's bytes are counted together."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._entries: dict[Version, _Ephemeral] = {}
        self._numbers: dict[str, list[int]] = {}
        """By model, rising."""
        self._of_model: dict[str, dict[Version, _Ephemeral]] = {}
        self._of_owner: dict[str, dict[Version, _Ephemeral]] = {}
        """Both: the longest unused first."""
        self._of_session: dict[str, dict[Version, _Ephemeral]] = {}
        self._bytes_of_owner: dict[str, int] = {}
        self._many: dict[str, None] = {}
        """Models with more than are kept for being new."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, version: Version) -> bool:
        return version in self._entries

    def num_bytes(self, owner: str) -> int:
        return self._bytes_of_owner.get(owner, 0)

    def of_model(self, model_id: str) -> list[int]:
        """Their numbers, rising."""
        return list(self._numbers.get(model_id, ()))

    def of_session(self, session_id: str) -> list[Version]:
        return list(self._of_session.get(session_id, {}))

    def of_base(self, base: str) -> tuple[int, int]:
        """How many, and their bytes."""
        sizes = [entry.num_bytes for entry in self._entries.values() if entry.base == base]
        return len(sizes), sum(sizes)

    # ------------------------------------------------------------------------------------------------ what happens
    def add(self, version: Version, *, base: str, owner: str, num_bytes: int, now: float) -> None:
        """It has been published, and counts as used. One that is there already stays."""
        if version in self._entries:
            return
        entry = self._entries[version] = _Ephemeral(
            version=version, base=base, owner=owner, num_bytes=num_bytes, used_at=now
        )
        self._of_session.setdefault(session_id_of(version.model_id), {})[version] = entry
        numbers = self._numbers.setdefault(version.model_id, [])
        bisect.insort(numbers, version.number)
        self._bytes_of_owner[owner] = self.num_bytes(owner) + num_bytes
        self._use(entry, now)
        if len(numbers) > self._limits.keep:
            self._many[version.model_id] = None

    def begin(self, version: Version, now: float) -> None:
        """A request runs on it. Unknown ones are ignored, also by ``end`` and ``remove``: weights with a name are no
        affair of ours."""
        entry = self._entries.get(version)
        if entry is not None:
            entry.num_running += 1
            self._use(entry, now)

    def end(self, version: Version, now: float) -> None:
        entry = self._entries.get(version)
        if entry is not None:
            entry.num_running = max(0, entry.num_running - 1)
            self._use(entry, now)

    def remove(self, version: Version) -> None:
        entry = self._entries.pop(version, None)
        if entry is None:
            return
        owner, model_id = entry.owner, version.model_id
        numbers = self._numbers[model_id]
        del numbers[bisect.bisect_left(numbers, version.number)]
        indices = (
            (self._of_model, model_id),
            (self._of_owner, owner),
            (self._of_session, session_id_of(version.model_id)),
        )
        for index, key in indices:
            del index[key][version]
            if not index[key]:
                del index[key]
        self._bytes_of_owner[owner] -= entry.num_bytes
        if owner not in self._of_owner:
            del self._bytes_of_owner[owner]
        if not numbers:
            del self._numbers[model_id]
        if len(numbers) <= self._limits.keep:
            self._many.pop(model_id, None)

    # ------------------------------------------------------------------------------------------------ what is to go
    def outdated(self, now: float) -> list[tuple[Version, str]]:
        """Those that are neither new nor were sampled lately, and why each may go. Costs what is found, and the models
        that have more than are kept for being new."""
        limits, found = self._limits, []
        for model_id in self._many:
            oldest_kept = self._numbers[model_id][-limits.keep]
            for entry in self._of_model[model_id].values():
                if now - entry.used_at <= limits.keep_sampled_s:
                    break
                if entry.version.number < oldest_kept and not entry.num_running:
                    found.append((entry.version, self._why_outdated(now - entry.used_at)))
        return found

    def room_for(self, owner: str, num_bytes: int) -> list[tuple[Version, str]]:
        """Those that must go so that ``num_bytes`` more of this owner's have room, and why. Raises ``QuotaExceeded`` if
        there would be none."""
        most = self._limits.max_owner_bytes
        if most is None:
            return []
        excess, found = self.num_bytes(owner) + num_bytes - most, []
        for entry in self._of_owner.get(owner, {}).values():
            if excess <= 0:
                break
            if not entry.num_running and entry.version.number < self._numbers[entry.version.model_id][-1]:
                why = f"your weights saved without a name take {most} bytes at most (quota.version_bytes)"
                found.append((entry.version, why))
                excess -= entry.num_bytes
        if excess > 0:
            raise QuotaExceeded(
                f"these weights take {num_bytes} bytes beside the {self.num_bytes(owner)} of yours that are kept for "
                f"sampling without a name, expected at most {most} together (quota.version_bytes); each model's newest "
                "are among them, and those that are being sampled: close sessions that you do not use, or save with a "
                "name"
            )
        return found

    # ----------------------------------------------------------------------------------------------------------------

    def _use(self, entry: _Ephemeral, now: float) -> None:
        version, entry.used_at = entry.version, now
        for index, key in ((self._of_model, version.model_id), (self._of_owner, entry.owner)):
            entries = index.setdefault(key, {})
            entries.pop(version, None)
            entries[version] = entry

    def _why_outdated(self, unused_s: float) -> str:
        limits = self._limits
        return (
            f"of a model's weights saved without a name the newest {limits.keep} are kept (service.keep_versions), and "
            f"those sampled in the last {limits.keep_sampled_s:g} s (service.keep_sampled_s); these were not sampled "
            f"for {unused_s:.0f} s"
        )
