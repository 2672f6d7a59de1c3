"""The KV pages: reference counts, and the index of cached ones. A page whose count is 0 is free.

A full page that was computed with one version throughout is *cached* under a key that names all it depends on: the
version, and every token from the sequence's first to the page's last; and the scope of those who may find it, since a
hit shows that another request has had the same tokens. A cached page that is free is allocated last, the least recently
used first; until then a sequence that begins with the same tokens shares it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from descant.prefix import PAGE_TOKENS
from descant.types import Version


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


class PageAllocator:
    """Deterministic: the same calls give the same page ids. A page in use is charged to the owner that first had it."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._empty = list(range(num_pages - 1, -1, -1))
        self._ref_counts = [0] * num_pages
        self._owners = [""] * num_pages
        """Of pages in use."""
        self._in_use: dict[str, int] = {}
        self._cached: dict[bytes, int] = {}
        self._names: dict[int, tuple[Version | None, bytes]] = {}
        """Cached pages: under which key, of which version."""
        self._of_version: dict[Version | None, set[int]] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Cached pages that are free, the least recently used first."""

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Free or in use."""
        return len(self._cached)

    def num_in_use(self, owner: str) -> int:
        return self._in_use.get(owner, 0)

    def cached_versions(self) -> set[Version | None]:
        """Of the cached pages."""
        return set(self._of_version)

    def allocate(self, count: int, owner: str) -> list[int]:
        """``count`` ≤ ``num_free`` pages, with one reference each; what was cached in them is evicted."""
        if count > self.num_free:
            raise RuntimeError(f"{count} pages were asked for, {self.num_free} are free")
        pages = []
        for _ in range(count):
            page = self._empty.pop() if self._empty else next(iter(self._evictable))
            self._evict(page)
            self._use(page, owner)
            pages.append(page)
        return pages

    def _use(self, page: int, owner: str) -> None:
        self._ref_counts[page] = 1
        self._owners[page] = owner
        self._in_use[owner] = self._in_use.get(owner, 0) + 1

    def share(self, pages: Sequence[int], owner: str) -> None:
        """One more reference to each: pages that are in use, or cached."""
        for page in pages:
            if self._ref_counts[page] == 0:
                if page not in self._evictable:
                    raise RuntimeError(f"page {page} was shared, but it is neither in use nor cached")
                del self._evictable[page]
                self._use(page, owner)
            else:
                self._ref_counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """One reference less to each. ``pages`` in a sequence's order: its last is of use to the fewest, so it is
        evicted first."""
        for page in reversed(pages):
            if self._ref_counts[page] == 0:
                raise RuntimeError(f"page {page} was freed, but it is not in use")
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                owner = self._owners[page]
                self._in_use[owner] -= 1
                if not self._in_use[owner]:
                    del self._in_use[owner]
                if page in self._names:
                    self._evictable[page] = None
                else:
                    self._empty.append(page)

    def ref_count(self, page: int) -> int:
        return self._ref_counts[page]

    # ------------------------------------------------------------------------------------------------ what is cached
    def cache(self, page: int, version: Version | None, key: bytes) -> None:
        """A page in use is full now. If another page is cached under the same key, that one stays the one to be
        found."""
        if key not in self._cached and page not in self._names:
            self._cached[key] = page
            self._names[page] = version, key
            self._of_version.setdefault(version, set()).add(page)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of ``keys`` from the first on that are all cached."""
        pages = []
        for key in keys:
            page = self._cached.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def evict(self, version: Version) -> None:
        """No request will name this version again: its pages are cached no longer."""
        for page in sorted(self._of_version.get(version, ())):
            free = page in self._evictable
            self._evict(page)
            if free:
                self._empty.append(page)

    def _evict(self, page: int) -> None:
        name = self._names.pop(page, None)
        if name is None:
            return
        version, key = name
        self._evictable.pop(page, None)
        del self._cached[key]
        pages = self._of_version[version]
        pages.discard(page)
        if not pages:
            del self._of_version[version]
