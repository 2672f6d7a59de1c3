"""What is in rows of the device, in host memory or in a file: one policy for whatever can be offloaded.

    rows  ── offload: the least needed, unpinned ones ──▶  host memory  ── the coldest, once it is full ──▶  a file
    rows  ◀───────────────────────── load, when a row is asked for ──────────────────────────────────────────┘

Training adapters and published versions share host memory and files; each kind has a limit of its own on the device.
What is pinned stays, whatever the limits. They differ in one thing only, whether their numbers change:

                            mutable: a training adapter             immutable: a published version
    loaded from the host    gives its place there up first          once its rows are filled
    loaded from a file      the file is removed                     the file stays: leaving again costs nothing
    the host is full        others go to files before it            it goes by its age, as all others
    ahead of need           loaded, read and written ahead          nothing is
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

from descant.adapters.offload import CopyStream, HostCopy, SpillDirectory
from descant.errors import ServerError

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_AHEAD = 2

WRITE_AHEAD = 8
"""One part in so many of the host's limit is kept free, or written already and free at once."""


@dataclass(slots=True, kw_only=True, eq=False)
class Offloadable(ABC):
    """Numbers in rows of the device, or in host memory, or in a file, or (new) nowhere.

    ``pins``: how many need it in rows. ``used``: when it was last, by ``Residency.touch``. ``reading``: its file is
    being read ahead. ``writing``: what is in host memory is being written, or was, to a file that counts once the
    memory is needed.
    """

    mutable: ClassVar[bool]

    expected_as: str | None = None
    """What ``Residency.expect`` calls it. None: it is never prefetched."""
    host: HostCopy | None = field(default=None, repr=False)
    file: Path | None = None
    reading: Future[dict[str, torch.Tensor]] | None = field(default=None, repr=False)
    writing: Future[Path] | None = field(default=None, repr=False)
    pins: int = 0
    used: int = 0

    @property
    @abstractmethod
    def label(self) -> str:
        """As errors name it."""

    @property
    @abstractmethod
    def file_name(self) -> str:
        """Ends in one of ``offload``'s suffixes; no other's."""

    @property
    @abstractmethod
    def is_resident(self) -> bool:
        """In rows."""

    @abstractmethod
    def copy_out(self) -> HostCopy:
        """What is in its rows; done when the copy stream is."""

    @abstractmethod
    def free_rows(self) -> None:
        """After ``copy_out``; ``host`` and ``file`` say what became of that."""

    @abstractmethod
    def mismatch(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """What is wrong with these, which were in its file."""


@dataclass(slots=True, kw_only=True)
class DeviceBudget:
    """What one kind may take of the device, and the items of that kind."""

    max_bytes: int
    used_bytes: Callable[[], int]
    items: Callable[[], Iterable[Offloadable]]


class Residency:
    def __init__(
        self,
        items: Callable[[], Iterable[Offloadable]],
        *,
        host_bytes: int,
        spill: SpillDirectory | None,
        copies: CopyStream,
    ):
        """``items``: all there are, of every kind. Beyond ``host_bytes`` the coldest go to files; without ``spill``
        they stay."""
        self.host_bytes = host_bytes
        self._items, self._spill, self._copies = items, spill, copies
        self._clock = 0
        self._expected: dict[str, int] = {}
        """What will be needed after the turn that runs, and when: 0 is first."""
        self._keep: frozenset[str] = frozenset()
        self._turn_began = 0
        """By ``_clock``."""

    # ---- use
    def touch(self, item: Offloadable) -> None:
        """It is the most recently used."""
        self._clock += 1
        item.used = self._clock

    def expect(self, expected: Sequence[str], *, keep: Collection[str]) -> None:
        """``expected`` will be needed, in this order, once the turn about ``keep`` has run. Until the next call,
        those needed last by it leave first. The coldest on the host are written ahead."""
        self._expected = {name: order for order, name in enumerate(expected)}
        self._keep, self._turn_began = frozenset(keep), self._clock
        self._write_ahead()

    def is_expected(self, item: Offloadable) -> bool:
        return item.expected_as in self._expected

    def victim(self, items: Iterable[Offloadable], where: Callable[[Offloadable], bool]) -> Offloadable | None:
        """Of the unpinned ones in rows, the one that is needed last."""
        idle = (item for item in items if item.is_resident and item.pins == 0 and where(item))
        return min(idle, key=self._need, default=None)

    def _need(self, item: Offloadable) -> tuple[int, int]:
        """Sorts by how soon they will be needed, the last first: the least recently used of those that are not
        expected, then the expected last, then those whose part of this turn is still to come."""
        name = item.expected_as
        if name is None:
            return (0, item.used)
        if name in self._keep and item.used <= self._turn_began:
            return (2, item.used)
        order = self._expected.get(name)
        return (0, item.used) if order is None else (1, -order)

    # ---- the device
    def make_room(
        self,
        budget: DeviceBudget,
        needed: Callable[[], int],
        *,
        reclaim: Callable[[], bool] = lambda: False,
        newcomer: Offloadable | None = None,
    ) -> None:
        """Until ``needed()`` more bytes fit the budget: first what is free goes (``reclaim``: whether any did),
        then one after another is offloaded. What is pinned stays: then the limit is passed."""
        while budget.used_bytes() + needed() > budget.max_bytes:
            if reclaim():
                continue
            victim = self.victim(budget.items(), lambda item: item is not newcomer)
            if victim is None:
                return
            self.offload(victim)

    def allocate(
        self,
        take: Callable[[], T],
        what: str,
        *,
        budget: DeviceBudget,
        reclaim: Callable[[], object],
        newcomer: Offloadable | None = None,
    ) -> T:
        """``take``s rows. Where there is no memory, since other processes took what the limits allow, unpinned ones of
        ``budget`` are offloaded until there is. Raises ``ServerError``."""
        while True:
            self._copies.join()
            try:
                return take()
            except (MemoryError, torch.OutOfMemoryError):
                victim = self.victim(budget.items(), lambda item: item is not newcomer)
                if victim is None:
                    raise ServerError(f"no memory for {what}") from None
                self.offload(victim)
                reclaim()

    def load(
        self, item: Offloadable, *, make_room: Callable[[], None], fill: Callable[[HostCopy | None], object]
    ) -> None:
        """Into rows, which ``fill`` allocates (None: it is new). Raises ``ServerError`` where it cannot be read back or
        there is no memory; nothing is lost then."""
        copy, on_host = self.fetch(item), item.host
        if item.mutable:
            item.host = None  # what it displaces may take its place on the host
        try:
            make_room()
            fill(copy)
        except Exception:
            if item.mutable:
                item.host = on_host
            raise
        self.loaded(item)

    def loaded(self, item: Offloadable) -> None:
        """Its rows are what it is."""
        item.host = None
        if item.mutable:
            self.drop_file(item)

    def offload(self, item: Offloadable, *, fits_host: bool = False) -> None:
        """From rows to the host, unless it is in its file; and what does not fit there, to files. Where the disk has
        no room either it stays on the host: adapters that exist go on, and ``check_disk`` rejects new ones.
        ``fits_host``: the caller knows that there is room."""
        if item.file is None:
            item.host = item.copy_out()
            if item.mutable and not fits_host:
                self.trim_host(last=item)
        item.free_rows()

    # ---- the host and the disk
    def fetch(self, item: Offloadable) -> HostCopy | None:
        """From host memory or its file. None for a new one. Raises ``ServerError``."""
        if item.file is None or self._spill is None:
            return item.host
        reading, item.reading = item.reading, None
        tensors = self._spill.read(item.file, item.label) if reading is None else reading.result()
        if wrong := item.mismatch(tensors):
            raise ServerError(f"{item.label} cannot be read back from its file: {wrong}")
        return HostCopy(tensors=tensors)

    def read_ahead(self, item: Offloadable) -> None:
        if item.file is not None and item.reading is None and self._spill is not None:
            item.reading = self._spill.read_ahead(item.file, item.label)

    def drop_file(self, item: Offloadable) -> None:
        """Before its numbers change, and for good."""
        item.reading = None
        writing, item.writing = item.writing, None
        if writing is not None and not writing.cancel():
            with suppress(ServerError):
                item.file = writing.result()
        if item.file is not None and self._spill is not None:
            self._spill.remove(item.file)
        item.file = None

    def host_excess(self, extra_bytes: int = 0) -> int:
        """Beyond the host's limit, with ``extra_bytes`` more to come."""
        held = sum(item.host.num_bytes for item in self._items() if item.host is not None)
        return held + extra_bytes - self.host_bytes

    def check_disk(self, extra_bytes: int) -> None:
        """Raises ``CannotStore`` where host memory is full with so much more, and the disk too."""
        excess = self.host_excess(extra_bytes)
        if self._spill is not None and excess > 0:
            self._spill.check(excess)

    def trim_host(self, *, last: Offloadable | None = None) -> None:
        """Writes the coldest on the host to files until the limit holds, ``last`` after all others. What cannot be
        written stays where it is."""
        if self._spill is None or (excess := self.host_excess()) <= 0:
            return
        on_host = [item for item in self._items() if item.host is not None]
        self._copies.synchronize()
        try:
            for item in sorted(on_host, key=lambda item: (item is last, item.used)):
                if excess <= 0:
                    return
                assert item.host is not None
                file, freed = self._write(item, item.host, self._spill), item.host.num_bytes
                item.file, item.host = file, None
                excess -= freed
        except ServerError as error:
            logger.warning("host memory for adapters and versions is beyond its limit: %s", error)

    def _write(self, item: Offloadable, copy: HostCopy, spill: SpillDirectory) -> Path:
        writing, item.writing = item.writing, None
        if writing is not None and not writing.cancel():
            with suppress(ServerError):  # there may be room now
                return writing.result()
        return spill.write(item.file_name, copy.tensors)

    def _write_ahead(self) -> None:
        """Of the coldest on the host, one at a time, so that no load waits for the disk when the memory is needed."""
        headroom = self.host_bytes // WRITE_AHEAD
        if self._spill is None or self.host_excess(headroom) <= 0:
            return
        on_host = [i for i in self._items() if i.mutable and i.host is not None and not self.is_expected(i)]
        begun = [item for item in on_host if item.writing is not None]
        written = sum(item.host.num_bytes for item in begun if item.host is not None)
        if written >= headroom or not all(item.writing is None or item.writing.done() for item in begun):
            return
        coldest = min((item for item in on_host if item.writing is None), key=lambda item: item.used, default=None)
        if coldest is not None and coldest.host is not None:
            self._copies.synchronize()
            coldest.writing = self._spill.write_ahead(coldest.file_name, coldest.host.tensors)
