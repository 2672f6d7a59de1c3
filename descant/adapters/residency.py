"""What is in rows of the device, in host memory or in a file: one policy for whatever can be offloaded.

    rows  ── offload: the least needed, unpinned ones ──▶  host memory  ── the coldest, once it is full ──▶  a file
    rows  ◀───────────────────────── load, when a row is asked for ──────────────────────────────────────────┘

Training adapters and published versions share host memory and files; each kind has a limit of its own on the device.
What is pinned stays, whatever the limits. They differ in one thing only, whether their numbers change:

                            mutable: a training adapter             immutable: a published version
    loaded from the host    gives its place there up first          once its rows are filled
    loaded from a file      the file is removed                     the file stays: leaving again costs nothing
    the host is full        others go to files before it            it goes by its age, as all others
    ahead of need           loaded, read and written ahead          written ahead

Another thread writes the files. What is being written stays on the host, and is loaded from there, until the file is
whole. So the host's limit is passed by what is under way: one file and the next, and where the disk is slower than
that, an eighth of the limit. Beyond it the caller waits for the disk, and not at all for one that does not answer.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

from descant.adapters.offload import CopyStream, HostCopy, SpillDirectory
from descant.errors import CannotStore, ServerError

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_AHEAD = 2

WRITE_AHEAD = 8
"""One part in so many of the host's limit is kept free, or written already and free at once; and by as much the limit
may be passed before anybody waits for the disk."""

WRITES_AT_ONCE = 2
"""Files asked of the writing thread: the one that it writes and the next."""

PATIENCE_S = 10.0
"""A disk that ends no write for so long is not waited for until it does."""


@dataclass(slots=True, kw_only=True, eq=False)
class Offloadable(ABC):
    """Numbers in rows of the device, or in host memory, or in a file, or (new) nowhere.

    ``pins``: how many need it in rows. ``used``: when it was last, by ``Residency.touch``. ``host`` and ``file``: set
    by ``Residency`` alone; both, where it was written ahead. ``reading``: its file is being read ahead.
    """

    mutable: ClassVar[bool]

    expected_as: str | None = None
    """What ``Residency.expect`` calls it. None: it is never prefetched."""
    host: HostCopy | None = field(default=None, repr=False)
    file: Path | None = None
    reading: Future[dict[str, torch.Tensor]] | None = field(default=None, repr=False)
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
        """What is in its rows. Returns before it is there (``HostCopy.ready``)."""

    @abstractmethod
    def free_rows(self) -> None:
        """After ``copy_out``, which may still read them; ``host`` and ``file`` say what became of that."""

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
        *,
        host_bytes: int,
        spill: SpillDirectory | None,
        copies: CopyStream,
        patience_s: float = PATIENCE_S,
    ):
        """Beyond ``host_bytes`` the coldest go to files; without ``spill`` they stay. ``copies``: of what is mutable.
        ``patience_s``: how long a disk that ends no write is waited for."""
        self.host_bytes = host_bytes
        self.wait_seconds = 0.0
        """That callers have waited for the disk."""
        self._spill, self._copies, self._patience_s = spill, copies, patience_s
        self._on_host: dict[Offloadable, None] = {}
        self._held_bytes = 0
        """Of these; and of those among them that are in a file as well, or are being written:"""
        self._written_bytes = self._writing_bytes = 0
        self._writing: dict[Offloadable, Future[Path]] = {}
        self._failure: str | None = None
        """Of the last write, as clients read it. The next one that succeeds ends it."""
        self._stuck_at: int | None = None
        """How many writes had ended when the disk was waited for in vain."""
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
        self.trim_host(ahead=True)

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
        gives_place = item.mutable and item not in self._writing  # what it displaces may take its place on the host
        if gives_place:
            self._set_host(item, None)
        try:
            make_room()
            fill(copy)
        except Exception:
            if gives_place:
                self._set_host(item, on_host)
            raise
        self.loaded(item)

    def loaded(self, item: Offloadable) -> None:
        """Its rows are what it is."""
        if item.mutable:
            self.forget(item)
        elif item not in self._writing:  # else the memory is held anyway
            self._set_host(item, None)

    def offload(self, item: Offloadable, *, fits_host: bool = False) -> None:
        """From rows to the host, unless it is in its file; and what does not fit there, to files. Where the disk has
        no room either it stays on the host: adapters that exist go on, and ``check_disk`` rejects new ones.
        ``fits_host``: the caller knows that there is room."""
        if item.file is None and item.host is None:
            self._set_host(item, item.copy_out())
        item.free_rows()
        if item.mutable and not fits_host:
            self.trim_host(last=item)

    # ---- the host and the disk
    def fetch(self, item: Offloadable) -> HostCopy | None:
        """From host memory or its file. None for a new one. Raises ``ServerError``."""
        if item.host is not None or item.file is None or self._spill is None:
            return item.host
        reading, item.reading = item.reading, None
        tensors = self._spill.read(item.file, item.label) if reading is None else reading.result()
        if wrong := item.mismatch(tensors):
            raise ServerError(f"{item.label} cannot be read back from its file: {wrong}")
        return HostCopy(tensors=tensors)

    def read_ahead(self, item: Offloadable) -> None:
        if item.file is not None and item.host is None and item.reading is None and self._spill is not None:
            item.reading = self._spill.read_ahead(item.file, item.label)

    def forget(self, item: Offloadable) -> None:
        """What is on the host and in a file of it: before its numbers change, and for good."""
        if self._spill is not None and (item.file is not None or item in self._writing):
            self._spill.remove(item.file_name)  # once it is written, if it is just being written
        self._set_host(item, None)
        item.file = item.reading = None

    def host_excess(self, extra_bytes: int = 0) -> int:
        """Beyond the host's limit, with ``extra_bytes`` more to come."""
        return self._held_bytes + extra_bytes - self.host_bytes

    def check_disk(self, extra_bytes: int) -> None:
        """Raises ``CannotStore`` where host memory is full with so much more, and the disk too."""
        self._take_written()
        excess = self.host_excess(extra_bytes) - self._written_bytes
        if self._spill is None or excess <= 0:
            return
        self._spill.check(excess)
        if excess - self._writing_bytes <= self.host_bytes // WRITE_AHEAD:
            return
        if self._failure is not None:  # there may be room now
            self._failure = None
            self._begin_writes(self._spill, None, False)
            if not self._is_stuck and not self._wait_for_disk(self._spill):
                self._take_written()
        if self._is_stuck:
            raise CannotStore("the data directory cannot be written: its disk does not answer")
        if self._failure is not None:
            raise CannotStore(self._failure)

    def trim_host(self, *, last: Offloadable | None = None, ahead: bool = False) -> None:
        """Has the coldest on the host written to files until the limit holds, ``last`` after all others, and of what
        was written forgets on the host what it must. ``ahead``: so that a part of the limit is free or in files, but
        for those that are expected. What cannot be written stays where it is."""
        if self._spill is None:
            return
        failed = self._take_written()
        while not failed:
            self._begin_writes(self._spill, last, ahead)
            over = self.host_excess() - self._written_bytes - self._writing_bytes
            if over <= self.host_bytes // WRITE_AHEAD or not self._spill.unwritten or self._is_stuck:
                return
            failed = self._wait_for_disk(self._spill) or self._take_written()

    def settle(self) -> None:
        """``trim_host``, and waits until all that it wants written is, and all files are gone that nobody needs."""
        self.trim_host()
        if self._spill is not None:
            while self._writing or self._spill.unwritten:
                self._spill.join()
                self.trim_host()
            self._spill.join()

    def stats(self) -> dict[str, float]:
        """Of both kinds together: bytes being written, and of ever files written, their bytes, the seconds that the
        writing thread took for them, and those that callers waited for it."""
        spill = self._spill
        return {
            "offload_writing_bytes": self._writing_bytes,
            "offload_writes": 0 if spill is None else spill.num_writes,
            "offload_written_bytes": 0 if spill is None else spill.written_bytes,
            "offload_write_seconds": 0.0 if spill is None else spill.write_seconds,
            "offload_wait_seconds": self.wait_seconds,
        }

    def _begin_writes(self, spill: SpillDirectory, last: Offloadable | None, ahead: bool) -> None:
        limit = self.host_bytes - (self.host_bytes // WRITE_AHEAD if ahead else 0)
        while self._held_bytes - self._written_bytes - self._writing_bytes > limit:
            if len(spill.unwritten) >= WRITES_AT_ONCE:
                return
            kept = [item for item in self._on_host if item.file is None and item not in self._writing]
            if ahead:
                kept = [item for item in kept if not self.is_expected(item)]
            coldest = min(kept, key=lambda item: (item is last, item.used), default=None)
            if coldest is None:
                return
            assert coldest.host is not None
            self._writing[coldest] = spill.begin_write(coldest.file_name, coldest.host)
            self._writing_bytes += coldest.host.num_bytes

    def _take_written(self) -> bool:
        """What the writing thread has done since. Whether any of it failed."""
        failed = False
        for item, writing in list(self._writing.items()):
            if not writing.done():
                continue
            host, error = item.host, writing.exception()
            self._set_host(item, None)
            if error is None:
                item.file, self._failure = writing.result(), None
            else:
                self._note_failure(error)
                failed = True
            if not item.is_resident:
                self._set_host(item, host)
        while self.host_excess() > 0 and self._written_bytes > 0:
            in_files = (item for item in self._on_host if item.file is not None)
            self._set_host(min(in_files, key=lambda item: item.used), None)
        return failed

    def _note_failure(self, error: BaseException) -> None:
        failure = error.message if isinstance(error, CannotStore) else "the data directory cannot be written"
        if self._failure != failure:
            why = error.__cause__ or error
            logger.warning("host memory for adapters and versions is beyond its limit: %s (%s)", failure, why)
        self._failure = failure

    def _wait_for_disk(self, spill: SpillDirectory) -> bool:
        """For one write to end, if any is under way. Whether the disk is stuck."""
        writes, start = spill.unwritten, time.perf_counter()
        done, _ = wait(writes, timeout=self._patience_s, return_when=FIRST_COMPLETED)
        self.wait_seconds += time.perf_counter() - start
        if done or not writes:
            return False
        self._stuck_at = spill.num_writes
        logger.warning("host memory for adapters and versions is beyond its limit: the disk does not answer")
        return True

    @property
    def _is_stuck(self) -> bool:
        """The disk has ended no write while it was waited for, nor since."""
        return self._spill is not None and self._stuck_at == self._spill.num_writes

    def _set_host(self, item: Offloadable, copy: HostCopy | None) -> None:
        """And counts it. What becomes of a file that is just being written is the caller's."""
        if item.host is not None:
            del self._on_host[item]
            self._held_bytes -= item.host.num_bytes
            if self._writing.pop(item, None) is not None:
                self._writing_bytes -= item.host.num_bytes
            if item.file is not None:
                self._written_bytes -= item.host.num_bytes
        item.host = copy
        if copy is not None:
            self._on_host[item] = None
            self._held_bytes += copy.num_bytes
            if item.file is not None:
                self._written_bytes += copy.num_bytes
