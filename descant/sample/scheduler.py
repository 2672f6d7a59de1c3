"""Which sequence gets which tokens next. Pure Python over plain numbers: every rank of a replica decides alike.

Owns requests, sequences and the page allocator; knows no tensor. ``plan`` makes a ``StepPlan`` for the sampler to run;
``apply`` takes what it sampled.

    waiting → running (prefill in chunks, then one token a step) → ended          preempted → waiting (recompute)

How: the states are in ``sequences``, their moves in ``queues``, their pages in ``prefix_cache``, who begins and who is
preempted in ``fairness``, what is in a step in ``batching``, what is answered in ``deltas``.

**Versions.** A request stays with its version to the end, or, ``inflight``, moves to newer ones between two steps with
its keys and values kept (``move``). What such a sequence computes then depends on both versions, and is not cached. A
token counts as the version's that the sampler computed it with, which may lag a step behind a move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from descant.errors import DescantError, ServerError, UserError
from descant.prefix import PAGE_TOKENS
from descant.sample.batching import StepBatcher
from descant.sample.check import check_request
from descant.sample.deltas import append_output, next_delta
from descant.sample.fairness import FairAdmission
from descant.sample.plan import SampleLimits, SequenceOutput, SequenceStep, StepPlan
from descant.sample.prefix_cache import PrefixCache
from descant.sample.queues import SequenceQueues
from descant.sample.rng import stream_seed
from descant.sample.scores import PromptScorer
from descant.sample.sequences import RequestState, SequenceState
from descant.sample.speculative import Drafter
from descant.sample.stops import StopText
from descant.types import SampleDelta, SampleRequest, Version, input_tokens


class Scheduler:
    """One plan at a time: the next only after ``apply`` or ``fail`` of the last. ``add`` and ``cancel`` may come
    between (pages freed then are not given out before the next plan).

    Every accepted request ends. Of all sequences there are, the oldest (age: of the request, then of the sample) is
    never preempted once it runs, has tokens in every step, and always gets the pages it needs; ``add`` refuses what
    does not fit the pool alone. While it waits to run, others end, and its owner and its model have their turns.
    When its turn has come and pages are missing, none of its owner's begin before it; and where other owners' do, it
    takes the pages of the youngest after ``STARVATION_PLANS`` plans.
    """

    def __init__(
        self,
        limits: SampleLimits,
        *,
        decode_text: Callable[[Sequence[int]], str],
        fresh_seed: Callable[[], int],
        prefix_caching: bool = True,
        drafter: Drafter | None = None,
    ):
        """``decode_text`` (the tokenizer's, special tokens spelled out) serves stop strings; ``fresh_seed`` requests
        without a seed. ``prefix_caching`` False: every sequence computes all its tokens, as a reference."""
        self._limits = limits
        self._decode_text = decode_text
        self._fresh_seed = fresh_seed
        self._drafter = drafter
        self._cache = PrefixCache(
            limits.num_pages,
            prefix_caching=prefix_caching,
            chunk_tokens=limits.chunk_tokens,
            copies_pages=limits.copies_pages,
        )
        self._queues = SequenceQueues(self._cache)
        self._admission = FairAdmission(limits, self._queues)
        self._batcher = StepBatcher(limits, self._queues, self._admission, drafter)
        self._released: set[Version] = set()  # while requests still run with them
        self._in_flight: StepPlan | None = None
        self._failures: list[tuple[str, DescantError]] = []
        self._next_request = 0
        self._next_sequence = 0
        self._drafted_steps = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0
        self._mid_sequence_updates = 0

    # ------------------------------------------------------------------------------------------------ requests
    def add(self, request: SampleRequest) -> None:
        """Raises ``UserError`` naming the field (prompt empty, token out of range, prompt or prompt + max_tokens over
        the context, …) or ``Overloaded``."""
        limits = self._limits
        max_tokens = check_request(
            request,
            vocab_size=limits.vocab_size,
            max_context_length=limits.max_context_length,
            num_pages=limits.num_pages,
            max_num_samples=limits.max_num_samples,
            max_topk=limits.max_topk,
        )
        if request.request_id in self._queues.requests:
            raise UserError(f"request_id {request.request_id!r} is being sampled already")
        self._admission.check_room(request.owner)

        params = request.sampling_params
        stop = limits.eos_token_ids if params.stop is None else params.stop
        stop_strings = tuple(item for item in stop if isinstance(item, str))
        prompt = tuple(int(token) for token in input_tokens(request.prompt))
        owner, model = self._queues.owner_and_model(request)
        state = RequestState(
            number=self._next_request,
            request=request,
            owner=owner,
            model=model,
            version=request.version,
            prompt=prompt,
            max_tokens=max_tokens,
            stop_ids=frozenset(item for item in stop if not isinstance(item, str)),
            open=request.num_samples,
        )
        self._next_request += 1
        seed = self._fresh_seed() if params.seed is None else params.seed
        if PromptScorer.asked_for(request):
            state.scores = PromptScorer(request, prompt, seed)
        for sample in range(request.num_samples):
            sequence = SequenceState(
                id=self._next_sequence,
                request=state,
                sample=sample,
                seed=stream_seed(seed, sample),
                stop_text=StopText(stop_strings, self._decode_text) if stop_strings else None,
                version=state.version,
                length=len(prompt),
            )
            self._next_sequence += 1
            state.waiting.append(sequence)
        self._queues.add(state)
        if request.version is not None:
            self._released.discard(request.version)

    def cancel(self, request_id: str) -> None:
        """Ends a request and frees its pages, at once. Unknown ids are ignored."""
        request = self._queues.requests.get(request_id)
        if request is not None:
            self._end_request(request)

    def cached_tokens(self, request: SampleRequest) -> int:
        """How many of the prompt's first tokens ``request`` would find cached, or being computed, if it came now (0
        where its scores would have them computed anew). Costs a digest a page that is found, and one more; rejects
        nothing."""
        return self._cache.cached_tokens(request)

    def has_work(self) -> bool:
        return bool(self._queues.requests)

    # ------------------------------------------------------------------------------------------------ versions
    def versions(self) -> set[Version]:
        """Versions that waiting or running requests use."""
        return self._queues.versions()

    def cached_versions(self) -> set[Version | None]:
        """Of the cached pages."""
        return self._cache.cached_versions()

    def release(self, version: Version) -> None:
        """Requests that have this version finish with it; prefixes computed with it are not cached beyond them."""
        self._cache.evict(version)
        if version in self.versions():
            self._released.add(version)

    def followers(self, version: Version) -> list[str]:
        """The ``inflight`` requests that are with an older version of its model."""
        return [
            request_id
            for request_id, state in self._queues.requests.items()
            if state.request.inflight
            and state.version is not None
            and state.version.model_id == version.model_id
            and state.version.number < version.number
        ]

    def move(self, request_ids: Iterable[str], version: Version) -> None:
        """Between two steps: from the next on these requests are computed with ``version``, from the one after where
        the sampler has computed the next already. What running sequences have computed stays."""
        if self._in_flight is not None:
            raise RuntimeError("move() was called between a plan and its apply() or fail()")
        requests = dict.fromkeys([self._queues.requests[request_id] for request_id in request_ids])
        for sequence in self._queues.running:
            if sequence.request in requests:
                self._mid_sequence_updates += sequence.computed > 0
                self._cache.change_version(sequence)
        before = dict.fromkeys([request.version for request in requests])
        for request in requests:
            for sequence in request.waiting:
                self._cache.change_version(sequence)
            request.version, request.keys = version, []
        self._released.discard(version)
        for left in before:
            self._evict_if_released(left)

    def _evict_if_released(self, version: Version | None) -> None:
        if version in self._released and version not in self.versions():
            self._released.discard(version)
            self._cache.evict(version)

    # ------------------------------------------------------------------------------------------------ figures
    def stats(self) -> dict[str, int]:
        """``waiting`` (sequences, preempted ones included), ``waiting_requests`` (that have not begun), ``running``,
        ``free_pages`` (cached ones included), ``used_pages``, ``cached_pages``; since the start ``preemptions``,
        ``prefilled_tokens``, ``hit_tokens`` (found in cached pages, or copied), ``mid_sequence_updates`` (a running
        sequence moved to a newer version), ``drafted_steps`` (of one sequence each), ``drafted_tokens`` and
        ``accepted_tokens``."""
        queues, cache = self._queues, self._cache
        return {
            "waiting": len(queues.sequences) - len(queues.running),
            "waiting_requests": sum(owner.num_waiting_requests for owner in queues.owners.values()),
            "running": len(queues.running),
            "free_pages": cache.num_free,
            "used_pages": self._limits.num_pages - cache.num_free,
            "cached_pages": cache.num_cached,
            "preemptions": queues.preemptions,
            "prefilled_tokens": self._batcher.prefilled_tokens,
            "hit_tokens": cache.hit_tokens,
            "mid_sequence_updates": self._mid_sequence_updates,
            "drafted_steps": self._drafted_steps,
            "drafted_tokens": self._drafted_tokens,
            "accepted_tokens": self._accepted_tokens,
        }

    # ------------------------------------------------------------------------------------------------ plan
    def plan(self) -> StepPlan | None:
        """The next step: all running sequences' next tokens, then prompt chunks within ``max_num_batched_tokens``.
        Full pages: the youngest sequence is preempted and recomputed later; never an error."""
        if self._in_flight is not None:
            raise RuntimeError("plan() was called before the last plan's apply() or fail()")
        preemptions = self._queues.preemptions
        self._admission.make_room()
        steps = self._batcher.steps(closed=self._queues.preemptions > preemptions)
        if not steps:
            return None
        self._in_flight = StepPlan(sequences=tuple(steps))
        return self._in_flight

    # ------------------------------------------------------------------------------------------------ apply
    def apply(self, plan: StepPlan, outputs: Sequence[SequenceOutput]) -> list[SampleDelta]:
        """Takes a step's outcome (in the plan's order): appends, detects stops, frees ended sequences, makes the deltas
        that are due. What was cancelled meanwhile is skipped."""
        self._in_flight = None
        deltas: list[SampleDelta] = []
        for step, output in zip(plan.sequences, outputs, strict=True):
            sequence = self._queues.sequences.get(step.sequence)
            if sequence is None:
                continue
            request = sequence.request
            if output.error is not None:
                self._fail_request(sequence, output.error)
                continue
            sequence.computed += len(step.tokens)
            if step.copied is not None:
                self._cache.copied(sequence)
            if output.prompt is not None and request.scores is not None:
                request.scores.take(output.prompt)
            tokens, stop_reason = output.tokens, None
            if tokens:
                version = output.version
                if version is not sequence.version and version != sequence.version:
                    if len(sequence.output_tokens) > sequence.num_emitted:  # a delta is of one version
                        deltas.append(next_delta(sequence, None))
                    sequence.version = version
                stop_reason = append_output(sequence, output)
            if step.draft:
                self._accept_drafted(sequence, step, output)
            if sequence.computed // PAGE_TOKENS > sequence.num_cached:
                self._cache.cache_full_pages(sequence)
            if stop_reason is not None or (tokens and request.request.stream):
                deltas.append(next_delta(sequence, stop_reason))
            if stop_reason is not None:
                self._end(sequence)
                request.open -= 1
                if request.open == 0:
                    self._end_request(request)
        return deltas

    def _accept_drafted(self, sequence: SequenceState, step: SequenceStep, output: SequenceOutput) -> None:
        """Accepted draft tokens are computed already."""
        accepted = len(output.tokens) - 1
        sequence.computed = min(sequence.computed + accepted, sequence.length)  # a stop may have come before
        self._drafted_steps += 1
        self._drafted_tokens += len(step.draft)
        self._accepted_tokens += accepted
        if self._drafter is not None:
            self._drafter.accepted(sequence.id, len(step.draft), accepted)

    # ------------------------------------------------------------------------------------------------ failures
    def fail(self, plan: StepPlan) -> list[str]:
        """A step raised: ends its requests, frees their pages; the request ids."""
        self._in_flight = None
        failed: list[str] = []
        for step in plan.sequences:
            sequence = self._queues.sequences.get(step.sequence)
            if sequence is not None:
                failed.append(sequence.request.request.request_id)
                self._end_request(sequence.request)
        return failed

    def take_failures(self) -> list[tuple[str, DescantError]]:
        """Requests (by id) that ``apply`` ended because their own computation failed, each returned once. The loop
        calls it after every ``apply``: such a request gets no further delta."""
        failures, self._failures = self._failures, []
        return failures

    def _fail_request(self, sequence: SequenceState, error: str) -> None:
        version = sequence.request.version
        where = f"sample {sequence.sample} failed at token {len(sequence.output_tokens)}: {error}"
        # A base model that overflows is ours; an adapter that does is its owner's.
        failure = ServerError(where) if version is None else UserError(where)
        self._failures.append((sequence.request.request.request_id, failure))
        self._end_request(sequence.request)

    # ------------------------------------------------------------------------------------------------ ends
    def _end(self, sequence: SequenceState) -> None:
        self._queues.end(sequence)
        if self._drafter is not None:
            self._drafter.ended(sequence.id)

    def _end_request(self, request: RequestState) -> None:
        for sequence in self._queues.sequences_of(request):
            self._end(sequence)
        self._queues.remove(request)
        self._evict_if_released(request.version)
