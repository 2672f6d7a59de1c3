"""Who holds which KV page. A page with several holders (a shared prompt) is free when the last lets go."""

from __future__ import annotations

from collections.abc import Sequence

PAGE_TOKENS = 64
"""Equal to ``descant.model.passes.PAGE_TOKENS``, which importing would bring torch along (a test compares them)."""


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


class PageAllocator:
    """Deterministic: the same calls give the same page ids."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` ≤ ``num_free`` pages, held once each."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages were taken, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each."""
        for page in pages:
            if self._holders[page] == 0:
                raise RuntimeError(f"page {page} was shared, but nobody holds it")
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """One holder less for each."""
        for page in pages:
            if self._holders[page] == 0:
                raise RuntimeError(f"page {page} was dropped, but nobody holds it")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def holders(self, page: int) -> int:
        return self._holders[page]
