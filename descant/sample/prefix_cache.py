"""Which pages each sequence has: cached ones of its prefix and its own, of which the full ones are cached in turn.

**Prefixes are computed once.** A full page stays under a key (``pages``) when its sequence ends or is preempted, and
is shared by those that begin with the same tokens and the same version: the samples of a prompt, the next turn of a
conversation, the same sequence after a preemption. A sequence whose next page is being computed by another waits.
Samples of one request copy the keys of its last page, which the prompt does not fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from descant.prefix import PAGE_TOKENS, page_keys
from descant.sample.pages import PageAllocator, pages_for
from descant.sample.plan import PageCopy
from descant.sample.scores import PromptScorer
from descant.sample.sequences import SequenceState
from descant.types import SampleRequest, Version, input_tokens

MIN_COPIED_TOKENS = 4
"""Fewer are computed in less time than another waits for them."""


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """What a sequence that can begin has cached: ``prefix``, behind which ``missing`` pages are to be allocated; it
    takes ``needed`` of the free ones in all. Of the first of these, ``num_copied`` tokens' keys are copied from page
    ``source``. Valid until pages are next allocated or freed."""

    sequence: SequenceState
    prefix: Sequence[int]
    missing: int
    needed: int
    scores: PromptScorer | None
    keys: Sequence[bytes]
    num_copied: int
    source: int


class PrefixCache:
    """The pages of one pool. Changes of a sequence what is about pages (``pages``, ``computed``, ``keys``,
    ``num_cached``, ``pending_keys``, ``single_version``), and nothing else."""

    def __init__(self, num_pages: int, *, prefix_caching: bool, chunk_tokens: int | None, copies_pages: bool):
        """``prefix_caching`` False: every sequence computes all its tokens. ``chunk_tokens`` as in ``SampleLimits``:
        pages with output tokens are not cached then. ``copies_pages``: likewise."""
        self.hit_tokens = 0
        """Since the start, found in cached pages, or copied."""
        self._prefix_caching = prefix_caching
        self._copies_pages = copies_pages and prefix_caching
        self._chunk_tokens = chunk_tokens
        self._pages = PageAllocator(num_pages)
        self._computing: dict[bytes, SequenceState] = {}

    @property
    def num_free(self) -> int:
        """Cached ones included."""
        return self._pages.num_free

    @property
    def num_cached(self) -> int:
        return self._pages.num_cached

    @property
    def num_computing(self) -> int:
        """Pages that running sequences are about to compute for others too."""
        return len(self._computing)

    def num_in_use(self, owner: str) -> int:
        return self._pages.num_in_use(owner)

    def num_unshared(self, sequence: SequenceState) -> int:
        """Pages that would be free if it had none."""
        return sum(self._pages.ref_count(page) == 1 for page in sequence.pages)

    def cached_versions(self) -> set[Version | None]:
        """Of the cached pages."""
        return self._pages.cached_versions()

    def cached_tokens(self, request: SampleRequest) -> int:
        """See ``Scheduler.cached_tokens``."""
        if not self._prefix_caching or PromptScorer.asked_for(request):
            return 0
        prompt, found = input_tokens(request.prompt), 0
        for key in page_keys(request.version, request.prefix_scope, prompt[:-1]):  # the last token is always computed
            if key not in self._computing and not self._pages.find([key]):
                break
            found += PAGE_TOKENS
        return found

    def evict(self, version: Version) -> None:
        """No request will name this version again."""
        self._pages.evict(version)

    # ------------------------------------------------------------------------------------------------ a sequence's
    def lookup(self, sequence: SequenceState) -> PrefixLookup | None:
        """None: it waits for a prefix that is being computed."""
        request = sequence.request
        scores = request.unscored if request.scorer is None else None
        # The last token is always computed: the next one is sampled from its logits.
        keys = sequence.page_keys((sequence.length - 1) // PAGE_TOKENS) if self._prefix_caching else []
        # What scores are asked of is computed too, and so are all tokens behind it.
        usable = keys if scores is None else keys[: (scores.first_position - 1) // PAGE_TOKENS]
        if self._chunk_tokens is not None:  # its output tokens, others would compute otherwise
            usable = usable[: len(request.prompt) // PAGE_TOKENS]
        prefix = self._pages.find(usable)
        if len(prefix) < len(usable) and usable[len(prefix)] in self._computing:
            return None
        num_copied, source = 0, request.source
        if self._copies_pages and scores is None and source is not None and source.single_version:
            num_copied = len(request.prompt) - 1 - len(prefix) * PAGE_TOKENS
            if not MIN_COPIED_TOKENS <= num_copied < PAGE_TOKENS:
                num_copied = 0
            elif source.computed < len(request.prompt) - 1:
                return None
        missing = pages_for(sequence.length) - len(prefix)
        needed = missing + sum(self._pages.ref_count(page) == 0 for page in prefix)
        source_page = source.pages[len(prefix)] if source is not None and num_copied else -1
        return PrefixLookup(sequence, prefix, missing, needed, scores, keys, num_copied, source_page)

    def allocate(self, lookup: PrefixLookup) -> None:
        """Gives it the pages for all its tokens; ``lookup.needed`` ≤ ``num_free``."""
        sequence, prefix, owner = lookup.sequence, lookup.prefix, lookup.sequence.request.owner.name
        self._pages.share(prefix, owner)
        sequence.pages = (*prefix, *self._pages.allocate(lookup.missing, owner))
        sequence.num_cached = len(prefix)
        sequence.computed = len(prefix) * PAGE_TOKENS + lookup.num_copied
        self.hit_tokens += sequence.computed
        if lookup.num_copied:  # its first step may come later, so the page is held until then
            self._pages.share([lookup.source], owner)
            target = sequence.pages[len(prefix)]
            sequence.copied = PageCopy(source=lookup.source, target=target, num_tokens=lookup.num_copied)
        sequence.pending_keys = [key for key in lookup.keys[len(prefix) :] if key not in self._computing]
        self._computing |= dict.fromkeys(sequence.pending_keys, sequence)

    def copied(self, sequence: SequenceState) -> None:
        """What was to be copied is, or need not be."""
        if sequence.copied is not None:
            self._pages.free([sequence.copied.source])
            sequence.copied = None

    def extend(self, sequence: SequenceState, count: int) -> None:
        """``count`` ≤ ``num_free`` pages more."""
        sequence.pages += tuple(self._pages.allocate(count, sequence.request.owner.name))

    def cache_full_pages(self, sequence: SequenceState) -> None:
        """Caches its pages that have become full, where they are of one version."""
        full = sequence.computed // PAGE_TOKENS
        if self._chunk_tokens is not None:
            full = min(full, len(sequence.request.prompt) // PAGE_TOKENS)
        if self._prefix_caching and sequence.single_version:
            keys = sequence.page_keys(full)
            for index in range(sequence.num_cached, full):
                self._pages.cache(sequence.pages[index], sequence.request.version, keys[index])
            done = set(keys[sequence.num_cached : full])
            for key in done.intersection(sequence.pending_keys):
                del self._computing[key]
            sequence.pending_keys = [key for key in sequence.pending_keys if key not in done]
        sequence.num_cached = full

    def free(self, sequence: SequenceState) -> None:
        """Frees all its pages."""
        self.copied(sequence)
        self._pages.free(sequence.pages)
        sequence.pages, sequence.computed, sequence.num_cached = (), 0, 0
        sequence.single_version = True
        self._clear_pending_keys(sequence)

    def change_version(self, sequence: SequenceState) -> None:
        """Its request moves to a newer version: what it computes from here on is not cached, nor waited for."""
        self._clear_pending_keys(sequence)
        sequence.keys = []
        if sequence.computed:
            sequence.single_version = False

    def _clear_pending_keys(self, sequence: SequenceState) -> None:
        for key in sequence.pending_keys:
            del self._computing[key]
        sequence.pending_keys = []
