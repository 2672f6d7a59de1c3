"""Which sequence gets which tokens next. Pure Python over plain numbers: every rank of a replica decides alike.

Owns requests, sequences and the page allocator; knows no tensor. ``plan`` makes a ``StepPlan`` for the sampler to run;
``apply`` takes what it sampled.

    waiting → running (prefill in chunks, then one token a step) → ended          preempted → waiting (recompute)

**Prefixes are computed once.** A full page stays under a key (``pages``) when its sequence ends or is preempted, and
is taken up by whoever begins with the same tokens and the same version: the samples of a prompt, the next turn of a
conversation, the same sequence after a preemption. A sequence whose next page is being computed by another waits.

**Versions.** A request stays with its version to the end, or, ``inflight``, moves to newer ones between two steps with
its keys and values kept (``move``). What such a sequence computes then depends on both versions, and is not kept. A
token is told as the version's that the sampler computed it with, which may lag a step behind a move.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from descant.errors import DescantError, Overloaded, ServerError, UserError
from descant.sample.chance import stream_seed
from descant.sample.check import check_request
from descant.sample.drafter import DraftContext, Drafter
from descant.sample.pages import PAGE_TOKENS, PageAllocator, page_key, page_keys, pages_for, root_key
from descant.sample.scores import PromptChunk, PromptRows, PromptScorer, empty_topk, fill_topk
from descant.sample.stops import StopText
from descant.types import SampleDelta, SampleRequest, StopReason, TopK, Version, input_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimits:
    max_running: int
    """Sequences decoding at once."""
    num_pages: int
    step_tokens: int
    """Prompt tokens prefilled in one step at most, so that a step stays short."""
    max_waiting: int
    """Requests queued; one more is ``Overloaded``."""
    max_context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_samples: int = 1024
    max_topk: int = 20
    """Alternatives a position, at most."""
    draft_tokens: int = 4
    """Tokens guessed ahead for a sequence, at most, where there is a drafter."""
    chunk_tokens: int | None = None
    """Prompts are prefilled in steps up to multiples of this, several in one plan, each of which counts as so many
    tokens; and drawn tokens are always computed one by one, also after a preemption: what is computed together does not
    depend on what else runs. At most ``step_tokens``. None: as it comes."""


@dataclass(slots=True, kw_only=True)
class SequenceStep:
    """One sequence's part of a step. Never changed, but not frozen: that takes three times as long to make, and there
    are hundreds in a step.

    ``tokens``: its next input tokens (a prompt's chunk, or the token sampled last), whose first has position
    ``context``; ``pages``: its page ids, at least enough for ``context + len(tokens)``. ``sample``: draw the next token
    from the last position's logits. ``draft``: guesses of what is drawn then; as many as come true are drawn in this
    step, and one token more. Only behind a single token, and with pages for them.
    """

    sequence: int
    version: Version | None
    tokens: tuple[int, ...]
    context: int
    pages: tuple[int, ...]
    sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    draw: int
    """How many tokens this sequence has drawn before: with ``seed`` it fixes this draw, whatever the batch."""
    topk: int = 0
    """How many of the likeliest tokens are wanted beside a drawn one."""
    prompt: PromptChunk | None = None
    """What is asked of the prompt's tokens among ``tokens``."""
    draft: tuple[int, ...] = ()
    drawn: bool = False
    """``tokens`` were drawn by the sequence, none is its prompt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A sequence is there once, or with several chunks of its prompt, in order (see ``SampleLimits.chunk_tokens``)."""

    sequences: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum([len(s.tokens) + len(s.draft) for s in self.sequences])


@dataclass(slots=True, kw_only=True)  # as above
class SequenceOutput:
    """``tokens`` drawn, with their ``logprobs`` and, where asked for, the likeliest tokens at each, (ids, logprobs)
    falling. ``prompt`` answers the step's.

    ``version``: the weights that computed it. The step's, or those of the sequence's step before if the sampler was a
    step ahead when its request moved.

    ``error``: what went wrong with this sequence alone (logits that are not finite); its request fails, no other.
    """

    sequence: int
    version: Version | None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    topk: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()
    prompt: PromptRows | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """One sample of a request. ``length``: its tokens, the prompt's and those drawn; ``computed``: those whose keys lie
    in its pages. Pages only ever come behind the others while it runs.

    ``version``: what drew the tokens that nobody has been told.

    ``keys``: of its full pages, as far as they were asked for. ``kept``: its full pages that were told to the
    allocator. ``claims``: keys of pages that it is about to compute and others wait for. ``pure``: all it has computed
    is of one version.
    """

    id: int
    request: _Request
    sample: int
    seed: int
    stop_text: StopText | None
    version: Version | None
    length: int
    drawn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    told: int = 0
    pages: tuple[int, ...] = ()
    computed: int = 0
    running: bool = False
    keys: list[bytes] = field(default_factory=list)
    kept: int = 0
    claims: list[bytes] = field(default_factory=list)
    pure: bool = True

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older."""
        return (self.request.number, self.sample)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        num_prompt = len(self.request.prompt)
        drawn = self.drawn[max(0, start - num_prompt) : max(0, end - num_prompt)]
        return (*self.request.prompt[start:end], *drawn)

    def page_keys(self, count: int) -> list[bytes]:
        """The keys of its first ``count`` pages, which its tokens fill."""
        if len(self.keys) < count:
            shared = self.request.prompt_keys()
            self.keys += shared[len(self.keys) : count]
        while len(self.keys) < count:
            start = len(self.keys) * PAGE_TOKENS
            before = self.keys[-1] if self.keys else root_key(self.request.version)
            self.keys.append(page_key(before, self.tokens(start, start + PAGE_TOKENS)))
        return self.keys[:count]


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """``version``: which it is with now; ``inflight`` ones change it.

    ``scorer`` is the sequence that computes the prompt for ``scores``, whatever pages of that part are there already.
    ``hit_tokens``: of its prompt, found when its first sequence began; 0 once they are told.
    """

    number: int
    request: SampleRequest
    version: Version | None
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    waiting: list[_Sequence] = field(default_factory=list)
    open: int = 0
    started: bool = False
    hit_tokens: int = 0
    scorer: _Sequence | None = None
    scores: PromptScorer | None = None
    scores_told: bool = False
    keys: list[bytes] = field(default_factory=list)

    def prompt_keys(self) -> list[bytes]:
        """The keys of the prompt's full pages, with the version of now."""
        if not self.keys:
            self.keys = list(page_keys(self.version, self.prompt))
        return self.keys

    @property
    def unscored(self) -> PromptScorer | None:
        """What is still to be computed of the prompt's scores."""
        return None if self.scores is None or self.scores.done else self.scores


class Scheduler:
    """One plan at a time: the next only after ``apply`` or ``fail`` of the last. ``add`` and ``cancel`` may come
    between (pages freed then are not given out before the next plan).

    The order is age: of the request, then of the sample. The oldest running sequence always gets the pages it needs,
    and ``add`` refuses what does not fit the pool alone, so every accepted request ends.
    """

    def __init__(
        self,
        limits: SampleLimits,
        *,
        decode_text: Callable[[Sequence[int]], str],
        fresh_seed: Callable[[], int],
        keeps_prefixes: bool = True,
        drafter: Drafter | None = None,
    ):
        """``decode_text`` (the tokenizer's, special tokens spelled out) serves stop strings; ``fresh_seed`` requests
        without a seed. ``keeps_prefixes`` False: every sequence computes all its tokens, as a reference."""
        self._limits = limits
        self._decode_text = decode_text
        self._fresh_seed = fresh_seed
        self._keeps_prefixes = keeps_prefixes
        self._drafter = drafter
        self._computing: dict[bytes, _Sequence] = {}
        self._released: set[Version] = set()  # while requests still run with them
        self._pages = PageAllocator(limits.num_pages)
        self._requests: dict[str, _Request] = {}  # in order of arrival
        self._sequences: dict[int, _Sequence] = {}
        self._running: list[_Sequence] = []  # oldest first
        self._in_flight: StepPlan | None = None
        self._failures: list[tuple[str, DescantError]] = []
        self._next_request = 0
        self._next_sequence = 0
        self._preemptions = 0
        self._prefilled_tokens = 0
        self._hit_tokens = 0
        self._drafted_steps = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0
        self._crossings = 0

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
        if request.request_id in self._requests:
            raise UserError(f"request_id {request.request_id!r} is being sampled already")
        num_waiting = self._num_waiting_requests()
        if num_waiting >= limits.max_waiting:
            raise Overloaded(f"{num_waiting} sample requests are waiting, the limit is {limits.max_waiting}")

        params = request.sampling_params
        stop = limits.eos_token_ids if params.stop is None else params.stop
        stop_strings = tuple(item for item in stop if isinstance(item, str))
        prompt = tuple(int(token) for token in input_tokens(request.prompt))
        entry = _Request(
            number=self._next_request,
            request=request,
            version=request.version,
            prompt=prompt,
            max_tokens=max_tokens,
            stop_ids=frozenset(item for item in stop if not isinstance(item, str)),
            open=request.num_samples,
        )
        self._next_request += 1
        seed = self._fresh_seed() if params.seed is None else params.seed
        if PromptScorer.asked_for(request):
            entry.scores = PromptScorer(request, prompt, seed)
        for sample in range(request.num_samples):
            sequence = _Sequence(
                id=self._next_sequence,
                request=entry,
                sample=sample,
                seed=stream_seed(seed, sample),
                stop_text=StopText(stop_strings, self._decode_text) if stop_strings else None,
                version=entry.version,
                length=len(prompt),
            )
            self._next_sequence += 1
            self._sequences[sequence.id] = sequence
            entry.waiting.append(sequence)
        self._requests[request.request_id] = entry
        if request.version is not None:
            self._released.discard(request.version)

    def cancel(self, request_id: str) -> None:
        """Ends a request and frees what it held, at once. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end_request(request)

    def kept_tokens(self, request: SampleRequest) -> int:
        """How many of the prompt's first tokens ``request`` would find computed, or being computed, if it came now (0
        where its scores would have them computed anew). Costs a digest a page that is found, and one more; refuses
        nothing."""
        if not self._keeps_prefixes or PromptScorer.asked_for(request):
            return 0
        prompt, found = input_tokens(request.prompt), 0
        for key in page_keys(request.version, prompt[:-1]):  # the last token is always computed
            if key not in self._computing and not self._pages.find([key]):
                break
            found += PAGE_TOKENS
        return found

    def release(self, version: Version) -> None:
        """Requests that have this version finish with it; prefixes computed with it are not kept beyond them."""
        self._pages.forget(version)
        if version in self.versions():
            self._released.add(version)

    def followers(self, version: Version) -> list[str]:
        """The ``inflight`` requests that are with an older version of its model."""
        return [
            request_id
            for request_id, entry in self._requests.items()
            if entry.request.inflight
            and entry.version is not None
            and entry.version.model_id == version.model_id
            and entry.version.number < version.number
        ]

    def move(self, request_ids: Iterable[str], version: Version) -> None:
        """Between two steps: from the next on these requests are computed with ``version``, from the one after where
        the sampler has computed the next already. What running sequences have computed stays."""
        if self._in_flight is not None:
            raise RuntimeError("move() was called between a plan and its apply() or fail()")
        requests = dict.fromkeys([self._requests[request_id] for request_id in request_ids])
        for sequence in self._running:
            if sequence.request in requests:
                self._let_go_of_claims(sequence)
                sequence.keys = []
                if sequence.computed:
                    sequence.pure = False
                    self._crossings += 1
        before = dict.fromkeys([request.version for request in requests])
        for request in requests:
            for sequence in request.waiting:
                sequence.keys = []
            request.version, request.keys = version, []
        self._released.discard(version)
        for left in before:
            self._forget_if_released(left)

    def has_work(self) -> bool:
        return bool(self._requests)

    def versions(self) -> set[Version]:
        """Versions that waiting or running requests use."""
        return {request.version for request in self._requests.values() if request.version is not None}

    def stats(self) -> dict[str, int]:
        """``waiting`` (sequences, preempted ones included), ``waiting_requests`` (that have not begun), ``running``,
        ``free_pages`` (those with kept prefixes included), ``used_pages``, ``kept_pages``; since the start
        ``preemptions``, ``prefilled_tokens``, ``hit_tokens`` (not computed, since their pages were there),
        ``crossings`` (of running sequences to a newer version), ``drafted_steps`` (of one sequence each),
        ``drafted_tokens`` and ``accepted_tokens``."""
        return {
            "waiting": len(self._sequences) - len(self._running),
            "waiting_requests": self._num_waiting_requests(),
            "running": len(self._running),
            "free_pages": self._pages.num_free,
            "used_pages": self._limits.num_pages - self._pages.num_free,
            "kept_pages": self._pages.num_kept,
            "preemptions": self._preemptions,
            "prefilled_tokens": self._prefilled_tokens,
            "hit_tokens": self._hit_tokens,
            "crossings": self._crossings,
            "drafted_steps": self._drafted_steps,
            "drafted_tokens": self._drafted_tokens,
            "accepted_tokens": self._accepted_tokens,
        }

    def _num_waiting_requests(self) -> int:
        return sum(not request.started for request in self._requests.values())

    # ------------------------------------------------------------------------------------------------ plan
    def plan(self) -> StepPlan | None:
        """The next step: all running sequences' next tokens first, then prompt chunks within ``step_tokens``.
        Full pages: the youngest sequence is preempted and recomputed later; never an error."""
        if self._in_flight is not None:
            raise RuntimeError("plan() was called before the last plan's apply() or fail()")
        preemptions = self._preemptions
        for sequence in list(self._running):
            if not sequence.running:  # an older one has preempted it just now
                continue
            room = len(sequence.pages) * PAGE_TOKENS
            if room > sequence.length:
                continue
            if room < sequence.length:
                self._grow(sequence)
                continue
            num_free, ends = self._pages.num_free, len(sequence.drawn) + 1 >= sequence.request.max_tokens
            if num_free > len(self._running) and not ends:
                # One token of room beforehand, while pages abound, lets the sampler compute ahead.
                sequence.pages += tuple(self._pages.take(1))

        decoding: list[_Sequence] = []
        prefilling: list[_Sequence] = []
        for sequence in self._running:
            (decoding if self._decodes(sequence) else prefilling).append(sequence)
        drafts = {} if self._drafter is None else self._drafts(self._drafter, decoding)
        steps = [
            self._step(sequence, sequence.computed, sequence.computed + 1, drafts.get(sequence.id, ()))
            for sequence in decoding
        ]
        budget = self._limits.step_tokens
        for sequence in prefilling:
            chunks, budget = self._chunks(sequence, budget)
            steps += chunks
        if self._preemptions == preemptions:
            admissions = self._admissions()
            while budget and (admitted := next(admissions, None)) is not None:
                chunks, budget = self._chunks(admitted, budget)
                if not chunks:
                    break  # it has its pages, and goes on in the next step
                steps += chunks
        if not steps:
            return None
        self._in_flight = StepPlan(sequences=tuple(steps))
        return self._in_flight

    def _decodes(self, sequence: _Sequence) -> bool:
        """Its next step is of one token. With chunks that is so of drawn tokens, also again, and of no other."""
        if self._limits.chunk_tokens is None:
            return sequence.length - sequence.computed == 1
        return sequence.computed >= len(sequence.request.prompt)

    def _chunks(self, sequence: _Sequence, budget: int) -> tuple[list[SequenceStep], int]:
        """What of its next tokens ``budget`` allows, and what is left of that."""
        start, chunk = sequence.computed, self._limits.chunk_tokens
        if chunk is None:
            end = min(sequence.length, start + budget)
            return [self._step(sequence, start, end)] if end > start else [], budget - (end - start)
        steps: list[SequenceStep] = []
        end = max(start + 1, len(sequence.request.prompt))  # only the prompt's, or one that was drawn
        while start < end and chunk <= budget:  # filled up, the last costs what others do
            chunk_end = min((start // chunk + 1) * chunk, end)
            steps.append(self._step(sequence, start, chunk_end))
            start, budget = chunk_end, budget - chunk
        return steps, budget

    def _drafts(self, drafter: Drafter, sequences: Sequence[_Sequence]) -> dict[int, tuple[int, ...]]:
        """By sequence, for those that have one."""
        contexts: dict[int, DraftContext] = {}
        for sequence in sequences:
            request = sequence.request
            limit = min(
                self._limits.draft_tokens,
                request.max_tokens - len(sequence.drawn) - 1,  # one more is drawn in any case
                len(sequence.pages) * PAGE_TOKENS - sequence.length,
            )
            single = sequence.length - sequence.computed == 1
            if limit > 0 and single and (request.scorer is not sequence or request.unscored is None):
                contexts[sequence.id] = DraftContext(
                    sequence=sequence.id, prompt=request.prompt, drawn=sequence.drawn, limit=limit
                )
        return dict(zip(contexts, drafter.propose(list(contexts.values())), strict=True))

    def _step(self, sequence: _Sequence, start: int, end: int, draft: tuple[int, ...] = ()) -> SequenceStep:
        request, count = sequence.request, end - start
        params, drawn, length = request.request.sampling_params, sequence.drawn, sequence.length
        scores = request.unscored if request.scorer is sequence else None
        if count > 1 or not drawn:
            self._prefilled_tokens += count
        # Nearly all steps are a single drawn token's.
        tokens = (drawn[-1],) if drawn and end == length and count == 1 else sequence.tokens(start, end)
        return SequenceStep(
            sequence=sequence.id,
            version=request.version,
            tokens=tokens,
            context=start,
            pages=sequence.pages,
            sample=end == length,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=sequence.seed,
            draw=len(drawn),
            topk=request.request.topk_sample_logprobs,
            prompt=None if scores is None else scores.chunk(start, end),
            draft=draft,
            drawn=start >= len(request.prompt),
        )

    def _grow(self, sequence: _Sequence) -> None:
        """Pages for all its tokens, if need be from the youngest (which may be itself)."""
        missing = pages_for(sequence.length) - len(sequence.pages)
        while missing > self._pages.num_free:
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return
        sequence.pages += tuple(self._pages.take(missing))

    def _preempt(self, sequence: _Sequence) -> None:
        self._preemptions += 1
        self._stop_running(sequence)
        insort(sequence.request.waiting, sequence, key=lambda s: s.sample)

    def _admissions(self) -> Iterator[_Sequence]:
        """The waiting sequences that can begin, oldest first, each made running with pages for all its tokens. When
        one has to wait for pages, so do all behind it; those that wait for a prefix that is being computed are passed
        over."""
        for request in list(self._requests.values()):
            while request.waiting:
                if len(self._running) >= self._limits.max_running:
                    return
                sequence = request.waiting[0]
                scores = request.unscored if request.scorer is None else None
                # The last token is always computed: its logits are what is drawn from.
                keys = sequence.page_keys((sequence.length - 1) // PAGE_TOKENS) if self._keeps_prefixes else []
                # What scores are asked of is computed too, and so are all tokens behind it.
                usable = keys if scores is None else keys[: (scores.first_position - 1) // PAGE_TOKENS]
                if self._limits.chunk_tokens is not None:  # what it has drawn itself, others computed otherwise
                    usable = usable[: len(request.prompt) // PAGE_TOKENS]
                prefix = self._pages.find(usable)
                if len(prefix) < len(usable) and usable[len(prefix)] in self._computing:
                    break
                missing = pages_for(sequence.length) - len(prefix)
                if missing + sum(self._pages.holders(page) == 0 for page in prefix) > self._pages.num_free:
                    return
                del request.waiting[0]
                self._pages.share(prefix)
                sequence.pages = (*prefix, *self._pages.take(missing))
                sequence.kept = len(prefix)
                sequence.computed = len(prefix) * PAGE_TOKENS
                self._hit_tokens += sequence.computed
                if not request.started:
                    request.hit_tokens = sequence.computed
                sequence.running = request.started = True
                if scores is not None:
                    request.scorer = sequence
                sequence.claims = [key for key in keys[len(prefix) :] if key not in self._computing]
                self._computing |= dict.fromkeys(sequence.claims, sequence)
                insort(self._running, sequence, key=lambda s: s.age)
                yield sequence

    def _let_go_of_claims(self, sequence: _Sequence) -> None:
        for key in sequence.claims:
            del self._computing[key]
        sequence.claims = []

    # ------------------------------------------------------------------------------------------------ apply
    def apply(self, plan: StepPlan, outputs: Sequence[SequenceOutput]) -> list[SampleDelta]:
        """Takes a step's outcome (in the plan's order): appends, detects stops, frees ended sequences, makes the deltas
        that are due. What was cancelled meanwhile is passed over."""
        self._in_flight = None
        deltas: list[SampleDelta] = []
        for step, output in zip(plan.sequences, outputs, strict=True):
            sequence = self._sequences.get(step.sequence)
            if sequence is None:
                continue
            request = sequence.request
            if output.error is not None:
                self._fail_request(sequence, output.error)
                continue
            sequence.computed += len(step.tokens)
            if output.prompt is not None and request.scores is not None:
                request.scores.take(output.prompt)
            tokens, stop_reason = output.tokens, None
            if tokens:
                version = output.version
                if version is not sequence.version and version != sequence.version:
                    if len(sequence.drawn) > sequence.told:  # a delta is of one version
                        deltas.append(self._delta(sequence, None))
                    sequence.version = version
                stop_reason = self._append(sequence, tokens, output)
            if step.draft:
                self._take_guesses(sequence, step, output)
            if sequence.computed // PAGE_TOKENS > sequence.kept:
                self._keep_pages(sequence)
            if stop_reason is not None or (tokens and request.request.stream):
                deltas.append(self._delta(sequence, stop_reason))
            if stop_reason is not None:
                self._end(sequence)
                request.open -= 1
                if request.open == 0:
                    self._end_request(request)
        return deltas

    def _take_guesses(self, sequence: _Sequence, step: SequenceStep, output: SequenceOutput) -> None:
        """Those that came true are computed already."""
        accepted = len(output.tokens) - 1
        sequence.computed = min(sequence.computed + accepted, sequence.length)  # a stop may have come before
        self._drafted_steps += 1
        self._drafted_tokens += len(step.draft)
        self._accepted_tokens += accepted
        if self._drafter is not None:
            self._drafter.accepted(sequence.id, len(step.draft), accepted)

    def _keep_pages(self, sequence: _Sequence) -> None:
        """Tells the allocator of the pages that have become full."""
        full = sequence.computed // PAGE_TOKENS
        if self._limits.chunk_tokens is not None:
            full = min(full, len(sequence.request.prompt) // PAGE_TOKENS)
        if self._keeps_prefixes and sequence.pure:
            keys = sequence.page_keys(full)
            for index in range(sequence.kept, full):
                self._pages.keep(sequence.pages[index], sequence.request.version, keys[index])
            done = set(keys[sequence.kept : full])
            for key in done.intersection(sequence.claims):
                del self._computing[key]
            sequence.claims = [key for key in sequence.claims if key not in done]
        sequence.kept = full

    def _append(self, sequence: _Sequence, tokens: Sequence[int], output: SequenceOutput) -> StopReason | None:
        """What was drawn, up to the first token that ends the sequence."""
        request, logprobs, topk = sequence.request, output.logprobs, output.topk
        for index, token in enumerate(tokens):
            sequence.drawn.append(token)
            sequence.logprobs.append(logprobs[index])
            sequence.length += 1
            if topk:
                sequence.topk.append(topk[index])
            if token in request.stop_ids or (sequence.stop_text is not None and sequence.stop_text.met(sequence.drawn)):
                return "stop"
            if len(sequence.drawn) >= request.max_tokens:
                return "length"
        return None

    def _delta(self, sequence: _Sequence, stop_reason: StopReason | None) -> SampleDelta:
        """What it has drawn and nobody has been told."""
        request = sequence.request
        scores = None
        if request.scores is not None and request.scores.done and not request.scores_told:
            request.scores_told = True
            scores = request.scores.result()
        num_alternatives = request.request.topk_sample_logprobs
        delta = SampleDelta(
            request_id=request.request.request_id,
            sample=sequence.sample,
            tokens=np.array(sequence.drawn[sequence.told :], np.int32),
            logprobs=np.array(sequence.logprobs[sequence.told :], np.float32),
            stop_reason=stop_reason,
            version=sequence.version,
            prompt=scores,
            prompt_cache_hit_tokens=request.hit_tokens,
            topk_logprobs=_topk(sequence.topk[sequence.told :], num_alternatives) if num_alternatives else None,
        )
        sequence.told, request.hit_tokens = len(sequence.drawn), 0
        return delta

    def fail(self, plan: StepPlan) -> list[str]:
        """A step raised: ends its requests, frees what they held; the request ids."""
        self._in_flight = None
        failed: list[str] = []
        for step in plan.sequences:
            sequence = self._sequences.get(step.sequence)
            if sequence is not None:
                failed.append(sequence.request.request.request_id)
                self._end_request(sequence.request)
        return failed

    def take_failures(self) -> list[tuple[str, DescantError]]:
        """Requests (by id) that ``apply`` ended because their own computation failed, each told once. The loop calls
        it after every ``apply``: such a request gets no further delta."""
        failures, self._failures = self._failures, []
        return failures

    def _fail_request(self, sequence: _Sequence, error: str) -> None:
        version = sequence.request.version
        where = f"sample {sequence.sample} failed at token {len(sequence.drawn)}: {error}"
        # A base model that overflows is ours; an adapter that does is its owner's.
        failure = ServerError(where) if version is None else UserError(where)
        self._failures.append((sequence.request.request.request_id, failure))
        self._end_request(sequence.request)

    # ------------------------------------------------------------------------------------------------ ends
    def _stop_running(self, sequence: _Sequence) -> None:
        """Gives its pages back, and what it computed for its request."""
        request = sequence.request
        self._running.remove(sequence)
        self._pages.drop(sequence.pages)
        sequence.pages, sequence.computed, sequence.kept = (), 0, 0
        sequence.running, sequence.pure = False, True
        self._let_go_of_claims(sequence)
        if request.scorer is sequence and (scores := request.unscored) is not None:
            request.scorer = None
            scores.reset()

    def _end(self, sequence: _Sequence) -> None:
        if sequence.running:
            self._stop_running(sequence)
        del self._sequences[sequence.id]
        if self._drafter is not None:
            self._drafter.ended(sequence.id)

    def _end_request(self, request: _Request) -> None:
        members = [s for s in self._running if s.request is request] + request.waiting
        for sequence in members:
            self._end(sequence)
        request.waiting = []
        del self._requests[request.request.request_id]
        self._forget_if_released(request.version)

    def _forget_if_released(self, version: Version | None) -> None:
        if version in self._released and version not in self.versions():
            self._released.discard(version)
            self._pages.forget(version)


def _topk(rows: Sequence[tuple[tuple[int, ...], tuple[float, ...]]], k: int) -> TopK:
    topk = empty_topk(len(rows), k)
    for index, (ids, logprobs) in enumerate(rows):
        fill_topk(topk, index, np.array([ids], np.int32), np.array([logprobs], np.float32))
    return topk
