"""Which sequences wait, run and end: every move of one from one state to the next is made here, with its pages.

    add: waiting → begin: running → end          preempt: running → waiting          remove: a request whose all have

Decides nothing: who begins and who is preempted is in ``fairness``.
"""

from __future__ import annotations

from bisect import insort

from descant.sample.prefix_cache import PrefixCache, PrefixLookup
from descant.sample.sequences import ModelQueue, OwnerQueue, RequestState, SequenceState
from descant.types import SampleRequest, Version


class SequenceQueues:
    """What it shows is for others to read; it alone changes it."""

    def __init__(self, cache: PrefixCache):
        self.cache = cache
        self.requests: dict[str, RequestState] = {}  # in order of arrival
        self.sequences: dict[int, SequenceState] = {}
        self.owners: dict[str, OwnerQueue] = {}  # that have requests, in order of arrival
        self.running: list[SequenceState] = []  # oldest first
        self.preemptions = 0
        """Since the start."""

    def versions(self) -> set[Version]:
        """Versions that waiting or running requests use."""
        return {request.version for request in self.requests.values() if request.version is not None}

    def owner_and_model(self, request: SampleRequest) -> tuple[OwnerQueue, ModelQueue]:
        """The queues that a request goes to, made where there are none; ``add`` follows. A new one has the smallest
        virtual runtime of those beside it."""
        owner = self.owners.get(request.owner)
        if owner is None:
            runtime = min((other.virtual_runtime for other in self.owners.values()), default=0)
            owner = self.owners[request.owner] = OwnerQueue(name=request.owner, virtual_runtime=runtime)
        name = None if request.version is None else request.version.model_id
        model = owner.models.get(name)
        if model is None:
            runtime = min((other.virtual_runtime for other in owner.models.values()), default=0)
            model = owner.models[name] = ModelQueue(name=name, virtual_runtime=runtime)
        return owner, model

    def add(self, request: RequestState) -> None:
        """A new request, all of whose sequences wait."""
        self.requests[request.request.request_id] = request
        self.sequences |= {sequence.id: sequence for sequence in request.waiting}
        request.model.waiting.append(request)
        request.model.num_requests += 1
        request.owner.num_requests += 1
        request.owner.num_sequences += len(request.waiting)

    def begin(self, lookup: PrefixLookup) -> None:
        """waiting → running."""
        sequence = lookup.sequence
        request, owner, model = sequence.request, sequence.request.owner, sequence.request.model
        request.waiting.remove(sequence)
        if not request.waiting:
            model.waiting.remove(request)
        self.cache.allocate(lookup)
        sequence.charged = max(sequence.charged, sequence.computed)
        if not request.started:
            request.hit_tokens = sequence.computed
            owner.num_begun += 1
        sequence.running = request.started = True
        if request.source is None or not request.source.single_version:
            request.source = sequence
        if lookup.scores is not None:
            request.scorer = sequence
        model.num_running += 1
        insort(owner.running, sequence, key=lambda s: s.age)
        insort(self.running, sequence, key=lambda s: s.age)

    def preempt(self, sequence: SequenceState) -> None:
        """running → waiting."""
        self.preemptions += 1
        self._stop(sequence)
        request = sequence.request
        if not request.waiting:
            insort(request.model.waiting, request, key=lambda r: r.number)
        insort(request.waiting, sequence, key=lambda s: s.sample)

    def end(self, sequence: SequenceState) -> None:
        """A waiting one stays in its request's list: ``remove`` follows."""
        if sequence.running:
            self._stop(sequence)
        del self.sequences[sequence.id]
        sequence.request.owner.num_sequences -= 1

    def sequences_of(self, request: RequestState) -> list[SequenceState]:
        """That have not ended."""
        return [s for s in request.owner.running if s.request is request] + request.waiting

    def remove(self, request: RequestState) -> None:
        """A request all of whose sequences have ended."""
        owner, model = request.owner, request.model
        if request.waiting:
            model.waiting.remove(request)
            request.waiting = []
        del self.requests[request.request.request_id]
        owner.num_begun -= request.started
        owner.num_requests -= 1
        model.num_requests -= 1
        if not model.num_requests:
            del owner.models[model.name]
        if not owner.num_requests:
            del self.owners[owner.name]

    def _stop(self, sequence: SequenceState) -> None:
        """Charges its owner, frees its pages, and drops what it computed for its request."""
        request = sequence.request
        self.running.remove(sequence)
        request.owner.running.remove(sequence)
        request.model.num_running -= 1
        if (new := sequence.computed - sequence.charged) > 0:
            request.owner.virtual_runtime += new
            request.model.virtual_runtime += new
            sequence.charged = sequence.computed
        self.cache.free(sequence)
        sequence.running = False
        if request.source is sequence:
            others = [s for s in request.owner.running if s.request is request] if request.waiting else []
            request.source = max(others, key=lambda s: s.computed, default=None)
        if request.scorer is sequence and (scores := request.unscored) is not None:
            request.scorer = None
            scores.reset()
