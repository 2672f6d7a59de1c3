"""Fair admission: which sequence begins next and which is preempted, so that owners have even shares of the running
sequences and of the pages.

Of several owners that wait, the one with the smallest part of both begins next, of these the one with the smallest
virtual runtime; within an owner likewise the model, and then the oldest. An owner below its even share of both begins
also where nothing is free: the youngest sequences of the owner that has most are preempted for it, down to that owner's
even share, and never its last. So with a flood of one owner's in the queue another's request begins with the next step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping

from descant.errors import Overloaded
from descant.prefix import PAGE_TOKENS
from descant.sample.pages import pages_for
from descant.sample.plan import SampleLimits
from descant.sample.prefix_cache import PrefixLookup
from descant.sample.queues import SequenceQueues
from descant.sample.sequences import ModelQueue, OwnerQueue, SequenceState

STARVATION_PLANS = 64
"""Plans in which the oldest of all sequences waits for pages while other owners' run and begin."""


class FairAdmission:
    """Decides for ``queues``, and has it begin and preempt. In a plan ``make_room`` is called first, then
    ``admissions``."""

    def __init__(self, limits: SampleLimits, queues: SequenceQueues):
        self._limits = limits
        self._queues = queues
        self._cache = queues.cache
        self._skipped_plans = 0
        """In how many plans the oldest of all sequences has waited for pages that another owner had."""

    # ------------------------------------------------------------------------------------------------ shares
    def check_room(self, owner: str) -> None:
        """Raises ``Overloaded``. A full queue still takes requests of owners that have less than an even share of
        it."""
        limit = self._limits.max_queued_requests
        waiting = {other.name: other.num_waiting_requests for other in self._queues.owners.values()}
        if (num_waiting := sum(waiting.values())) < limit:
            return
        own = waiting.pop(owner, 0)
        if own >= limit // (1 + sum(count > 0 for count in waiting.values())):
            raise Overloaded(f"{num_waiting} sample requests are waiting, the limit is {limit}")

    @property
    def _even_seqs(self) -> int:
        return max(1, self._limits.max_num_seqs // len(self._queues.owners))

    @property
    def _even_pages(self) -> int:
        return self._limits.num_pages // len(self._queues.owners)

    def _num_pages(self, owner: OwnerQueue) -> int:
        return self._cache.num_in_use(owner.name)

    def _part(self, owner: OwnerQueue) -> int:
        """What an owner has, of running sequences or of pages, whichever is the larger part."""
        limits = self._limits
        return max(len(owner.running) * limits.num_pages, self._num_pages(owner) * limits.max_num_seqs)

    def _within_even_share(self, owner: OwnerQueue, lookup: PrefixLookup) -> bool:
        """Whether it has no more than that with it."""
        return len(owner.running) < self._even_seqs and self._num_pages(owner) + lookup.needed <= self._even_pages

    def _priority(self, owner: OwnerQueue, *, beyond: bool = False) -> tuple[bool, int, int, int, OwnerQueue]:
        """Smaller is sooner: the smallest part, or, ``beyond`` its even share, the smallest virtual runtime. No two are
        alike before the last."""
        part, runtime = self._part(owner), owner.runtime_with_running
        first, second = (runtime, part) if beyond else (part, runtime)
        return beyond, first, second, owner.oldest_waiting, owner

    # ------------------------------------------------------------------------------------------------ preemption
    def make_room(self) -> None:
        """Pages for what running sequences compute next, and preemption for owners below their even share."""
        for sequence in list(self._queues.running):
            if not sequence.running:  # another has preempted it just now
                continue
            room = len(sequence.pages) * PAGE_TOKENS
            if room > sequence.length:
                continue
            if room < sequence.length:
                self._grow(sequence)
                continue
            ends = len(sequence.output_tokens) + 1 >= sequence.request.max_tokens
            if self._cache.num_free > len(self._queues.running) and not ends:
                # One token of room beforehand, while pages abound, lets the sampler compute ahead.
                self._cache.extend(sequence, 1)
        if len(self._queues.owners) > 1:
            self._preempt_for_shares()

    def _grow(self, sequence: SequenceState) -> None:
        """Pages for all its tokens, if need be from the youngest of the owner that has most (which may be itself)."""
        missing = pages_for(sequence.length) - len(sequence.pages)
        while missing > self._cache.num_free:
            youngest = self._youngest(self._num_pages, spare=self._queues.running[0])
            self._queues.preempt(youngest)
            if youngest is sequence:
                return
        self._cache.extend(sequence, missing)

    def _youngest(self, size: Callable[[OwnerQueue], int], *, spare: SequenceState | None) -> SequenceState:
        """The youngest running sequence of the owner that has most (of several the one with the youngest); not
        ``spare``."""
        if len(self._queues.owners) == 1:
            return self._queues.running[-1]
        last = [owner.running[-1] for owner in self._queues.owners.values() if owner.running]
        return max((s for s in last if s is not spare), key=lambda s: (size(s.request.owner), s.age))

    def _preempt_for_shares(self) -> None:
        """The oldest of all begins, then those of owners that have less than an even share, for each as many as its
        part of this step's prompt tokens lets begin."""
        self._begin_starved()
        owners, running = self._queues.owners, self._queues.running
        even, full = self._even_seqs, len(running) >= self._limits.max_num_seqs
        most = max(len(owner.running) for owner in owners.values())
        if most < 2 or (full and most <= even):
            return  # no owner has a sequence to spare
        short = [owner for owner in owners.values() if owner.waits and len(owner.running) < even]
        for *_, owner in sorted(map(self._priority, short)):
            tokens = self._limits.max_num_batched_tokens // len(owners)
            tokens -= sum(s.length - s.computed for s in owner.running if not s.decodes(self._limits.chunk_tokens))
            candidates = self._candidates(owner)
            while tokens > 0 and len(owner.running) < even and (lookup := next(candidates, None)) is not None:
                victims = self._victims(owner, lookup)
                if not victims:  # none is needed, or not enough there
                    break
                sequence = lookup.sequence
                for victim in victims:
                    self._queues.preempt(victim)
                again = self._cache.lookup(sequence)  # they may have had pages of its prefix
                if again is None or again.needed > self._cache.num_free:
                    break
                self._queues.begin(again)
                tokens -= sequence.length - sequence.computed

    def _victims(self, owner: OwnerQueue, lookup: PrefixLookup) -> list[SequenceState]:
        """The sequences to preempt for one of ``owner`` to begin: the youngest of the owners that have most, never an
        owner's last. An owner keeps its even share; only for another's first sequence, which may need more pages than
        that, do owners go below it whose virtual runtime is no smaller. Empty: none is needed, or not enough there."""
        others = [other for other in self._queues.owners.values() if other is not owner and len(other.running) > 1]
        num_seqs = {other: len(other.running) for other in others}
        pages = {other: self._num_pages(other) for other in others}
        victims: list[SequenceState] = []
        num_free = self._cache.num_free

        def most(sizes: dict[OwnerQueue, int], wanted: Callable[[OwnerQueue], bool]) -> OwnerQueue | None:
            eligible = [other for other in others if num_seqs[other] > 1 and wanted(other)]
            return max(eligible, key=lambda o: (sizes[o], o.running[num_seqs[o] - 1].age), default=None)

        def may_give(other: OwnerQueue) -> bool:
            first = not owner.running and owner.virtual_runtime <= other.runtime_with_running
            return pages[other] > self._even_pages or first

        if owner.running and self._num_pages(owner) + lookup.needed > self._even_pages:
            return []
        while True:
            if len(self._queues.running) - len(victims) >= self._limits.max_num_seqs:
                other = most(num_seqs, lambda o: num_seqs[o] > self._even_seqs)
            elif lookup.needed > num_free:
                other = most(pages, may_give)
            else:
                return victims
            if other is None:
                return []
            victim = other.running[num_seqs[other] - 1]
            victims.append(victim)
            freed = self._cache.num_unshared(victim)
            num_seqs[other] -= 1
            pages[other] -= freed
            num_free += freed

    def _begin_starved(self) -> None:
        """Where it has waited for pages for too long while another owner's sequences ran."""
        request, running = next(iter(self._queues.requests.values())), self._queues.running
        if not request.waiting or (running and running[0].age < request.waiting[0].age):
            self._skipped_plans = 0
            return
        if len(running) in (self._limits.max_num_seqs, len(request.owner.running)):
            return
        self._skipped_plans += 1
        while self._skipped_plans > STARVATION_PLANS:
            if (lookup := self._cache.lookup(request.waiting[0])) is None:
                return
            if lookup.needed <= self._cache.num_free:
                self._skipped_plans = 0
                self._queues.begin(lookup)
                return
            self._queues.preempt(self._youngest(self._num_pages, spare=None))

    # ------------------------------------------------------------------------------------------------ who begins
    def admissions(self, room: Mapping[OwnerQueue, int], *, closed: bool) -> Iterator[SequenceState]:
        """The waiting sequences that can begin, in order, each made running with pages for all its tokens; of owners
        that have ``room`` for prompt tokens, looked up anew each time. Those within their owner's even share come
        first. When one has to wait for pages, so do all behind it, other owners' within their even share excepted;
        ``closed``: one does already. Those that wait for a prefix that is being computed are skipped."""
        queues, owners = self._queues, self._queues.owners
        if len(queues.running) >= self._limits.max_num_seqs or (closed and len(owners) == 1):
            return
        least, several = self._limits.chunk_tokens or 1, len(owners) > 1
        queue = [self._priority(owner) for owner in owners.values() if owner.waits]
        heapq.heapify(queue)
        candidates: dict[OwnerQueue, Iterator[PrefixLookup]] = {}
        deferred: dict[OwnerQueue, SequenceState] = {}
        while queue and len(queues.running) < self._limits.max_num_seqs:
            beyond, *_, owner = queue[0]
            if room[owner] < least:
                lookup = None
            elif beyond:
                lookup = self._cache.lookup(deferred.pop(owner))
            else:
                if owner not in candidates:
                    candidates[owner] = self._candidates(owner)
                lookup = next(candidates[owner], None)
                if lookup is not None and several and not self._within_even_share(owner, lookup):
                    deferred[owner] = lookup.sequence
                    heapq.heapreplace(queue, self._priority(owner, beyond=True))
                    continue
            if lookup is not None and not (closed and (beyond or not several)):
                if lookup.needed <= self._cache.num_free:
                    queues.begin(lookup)
                    yield lookup.sequence
                    if owner.waits:
                        heapq.heapreplace(queue, self._priority(owner))
                        continue
                else:
                    closed = True
            heapq.heappop(queue)

    def _candidates(self, owner: OwnerQueue) -> Iterator[PrefixLookup]:
        """An owner's next sequences, each asked for when the one before has begun: of the model that has the fewest
        running, of these the smallest virtual runtime, then the oldest. Without those that wait for a prefix."""
        models = [model for model in owner.models.values() if model.waiting]
        if len(models) == 1:
            yield from self._candidates_of(models[0])
            return
        queue = [(m.num_running, m.virtual_runtime, m.waiting[0].number, m, self._candidates_of(m)) for m in models]
        heapq.heapify(queue)
        while queue:
            *_, model, candidates = queue[0]
            if (lookup := next(candidates, None)) is None:
                heapq.heappop(queue)
            else:
                yield lookup
                number = lookup.sequence.request.number
                heapq.heapreplace(queue, (model.num_running, model.virtual_runtime, number, model, candidates))

    def _candidates_of(self, model: ModelQueue) -> Iterator[PrefixLookup]:
        for request in list(model.waiting):
            while request.waiting and (lookup := self._cache.lookup(request.waiting[0])) is not None:
                yield lookup
