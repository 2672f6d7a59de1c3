"""Who holds which KV page, and what full pages hold. A page is free when its last holder lets go.

A full page that was computed with one version throughout is *kept* under a key that names all it depends on: the
version, and every token from the sequence's first to the page's last. A kept page that nobody holds is free like any
other, but it is given out last, the least recently used first; until then whoever comes with the same tokens takes it
up again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from descant.types import Int32, Version

PAGE_TOKENS = 64
"""Equal to ``descant.model.passes.PAGE_TOKENS``, which importing would bring torch along (a test compares them)."""


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


def root_key(version: Version | None) -> bytes:
    """The key before a sequence's first page. Tokens of one version never meet keys of another."""
    name = "" if version is None else f"{version.number}:{version.model_id}"
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def page_key(before: bytes, tokens: Sequence[int] | Int32) -> bytes:
    """The key of the page that holds ``tokens`` (a full page of them) after the page, or root, with key ``before``. A
    digest nobody can find a second input to: a collision would show one tenant another's keys and values."""
    return hashlib.blake2b(before + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


def page_keys(version: Version | None, tokens: Sequence[int] | Int32) -> Iterator[bytes]:
    """The keys of the full pages of a sequence that begins with ``tokens``, computed as they are asked for."""
    key = root_key(version)
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        key = page_key(key, tokens[end - PAGE_TOKENS : end])
        yield key


class PageAllocator:
    """Deterministic: the same calls give the same page ids."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._kept: dict[bytes, int] = {}
        self._names: dict[int, tuple[Version | None, bytes]] = {}
        """Kept pages: under which key, of which version."""
        self._of_version: dict[Version | None, set[int]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Kept pages that nobody holds, the least recently used first."""

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def num_kept(self) -> int:
        """Held or not."""
        return len(self._kept)

    def take(self, count: int) -> list[int]:
        """``count`` ≤ ``num_free`` pages, held once each; what they held is forgotten."""
        if count > self.num_free:
            raise RuntimeError(f"{count} pages were taken, {self.num_free} are free")
        pages = []
        for _ in range(count):
            page = self._blank.pop() if self._blank else next(iter(self._idle))
            self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each: pages that are held, or kept."""
        for page in pages:
            if self._holders[page] == 0:
                if page not in self._idle:
                    raise RuntimeError(f"page {page} was shared, but nobody holds it")
                del self._idle[page]
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """One holder less for each. ``pages`` in a sequence's order: its last is of use to the fewest, goes first."""
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise RuntimeError(f"page {page} was dropped, but nobody holds it")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._names:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def holders(self, page: int) -> int:
        return self._holders[page]

    # ------------------------------------------------------------------------------------------------ what they hold
    def keep(self, page: int, version: Version | None, key: bytes) -> None:
        """A held page is full now. If another page holds the same, that one stays the one to be found."""
        if key not in self._kept and page not in self._names:
            self._kept[key] = page
            self._names[page] = version, key
            self._of_version.setdefault(version, set()).add(page)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of ``keys`` from the first on that are all kept."""
        pages = []
        for key in keys:
            page = self._kept.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def forget(self, version: Version) -> None:
        """Nobody will come with this version again: its pages are like any others, those held when they are free."""
        for page in sorted(self._of_version.get(version, ())):
            idle = page in self._idle
            self._forget(page)
            if idle:
                self._blank.append(page)

    def _forget(self, page: int) -> None:
        name = self._names.pop(page, None)
        if name is None:
            return
        version, key = name
        self._idle.pop(page, None)
        del self._kept[key]
        pages = self._of_version[version]
        pages.discard(page)
        if not pages:
            del self._of_version[version]
