"""The scheduler's state as records: owners, each with models, each with requests, each with sequences.

    OwnerQueue → ModelQueue → RequestState → SequenceState

They hold and answer for themselves; who moves which from waiting to running and on is in ``queues``, who comes next in
``fairness``, which pages a sequence has in ``prefix_cache``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from descant.prefix import PAGE_TOKENS, page_key, page_keys, root_key
from descant.sample.plan import PageCopy
from descant.sample.scores import PromptScorer
from descant.sample.stops import StopText
from descant.types import SampleRequest, Version


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """One sample of a request. ``length``: its tokens, prompt and output; ``computed``: those whose keys lie
    in its pages. Pages only ever come behind the others while it runs.

    ``version``: what sampled the tokens that are not yet emitted; ``num_emitted`` of ``output_tokens`` are.

    ``keys``: of its full pages, as far as they were asked for. ``num_cached``: its full pages that the allocator knows
    of. ``pending_keys``: keys of pages that it is about to compute and others wait for. ``single_version``: all it has
    computed is of one version. ``charged``: its first tokens, which its owner was charged for, or another had computed:
    what is computed again after a preemption does not count. ``copied``: what is to be copied with its next step.
    """

    id: int
    request: RequestState
    sample: int
    seed: int
    stop_text: StopText | None
    version: Version | None
    length: int
    output_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    num_emitted: int = 0
    pages: tuple[int, ...] = ()
    computed: int = 0
    running: bool = False
    keys: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    pending_keys: list[bytes] = field(default_factory=list)
    single_version: bool = True
    charged: int = 0
    copied: PageCopy | None = None

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older."""
        return (self.request.number, self.sample)

    def decodes(self, chunk_tokens: int | None) -> bool:
        """Its next step is of one token. With chunks that is so of output tokens, also again, and of no other."""
        if chunk_tokens is None:
            return self.length - self.computed == 1
        return self.computed >= len(self.request.prompt)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        num_prompt = len(self.request.prompt)
        output = self.output_tokens[max(0, start - num_prompt) : max(0, end - num_prompt)]
        return (*self.request.prompt[start:end], *output)

    def page_keys(self, count: int) -> list[bytes]:
        """The keys of its first ``count`` pages, which its tokens fill."""
        if len(self.keys) < count:
            shared = self.request.prompt_keys()
            self.keys += shared[len(self.keys) : count]
        while len(self.keys) < count:
            start = len(self.keys) * PAGE_TOKENS
            request = self.request
            before = self.keys[-1] if self.keys else root_key(request.version, request.request.prefix_scope)
            self.keys.append(page_key(before, self.tokens(start, start + PAGE_TOKENS)))
        return self.keys[:count]


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """``version``: which it is with now; ``inflight`` ones change it. ``open``: samples that have not ended.

    ``source`` is a running sequence that computes, or has computed, the prompt's keys, for others to copy.
    ``scorer`` is the sequence that computes the prompt for ``scores``, whatever pages of that part are there already.
    ``hit_tokens``: of its prompt, found when its first sequence began; 0 once they are emitted.
    """

    number: int
    request: SampleRequest
    owner: OwnerQueue
    model: ModelQueue
    version: Version | None
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    waiting: list[SequenceState] = field(default_factory=list)
    open: int = 0
    started: bool = False
    hit_tokens: int = 0
    source: SequenceState | None = None
    scorer: SequenceState | None = None
    scores: PromptScorer | None = None
    scores_emitted: bool = False
    keys: list[bytes] = field(default_factory=list)

    def prompt_keys(self) -> list[bytes]:
        """The keys of the prompt's full pages, with the version of now."""
        if not self.keys:
            self.keys = list(page_keys(self.version, self.request.prefix_scope, self.prompt))
        return self.keys

    @property
    def unscored(self) -> PromptScorer | None:
        """What is still to be computed of the prompt's scores."""
        return None if self.scores is None or self.scores.done else self.scores

    def unscored_by(self, sequence: SequenceState) -> PromptScorer | None:
        """What ``sequence`` is to compute of them."""
        return self.unscored if self.scorer is sequence else None


@dataclass(slots=True, kw_only=True, eq=False)
class ModelQueue:
    """An owner's requests of one model, or of the base: ``waiting`` those of which samples wait, oldest first.
    ``virtual_runtime``: tokens computed for it, counted when sequences stop running."""

    name: str | None
    virtual_runtime: int
    waiting: list[RequestState] = field(default_factory=list)
    num_requests: int = 0
    num_running: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class OwnerQueue:
    """An owner's requests, from the first to the last that it has at a time. ``virtual_runtime`` as a model's."""

    name: str
    virtual_runtime: int
    models: dict[str | None, ModelQueue] = field(default_factory=dict)
    running: list[SequenceState] = field(default_factory=list)  # oldest first
    num_sequences: int = 0
    num_begun: int = 0
    """Requests that have begun, of ``num_requests``."""
    num_requests: int = 0

    @property
    def waits(self) -> bool:
        return self.num_sequences > len(self.running)

    @property
    def num_waiting_requests(self) -> int:
        """That have not begun."""
        return self.num_requests - self.num_begun

    @property
    def oldest_waiting(self) -> int:
        """The number of a request; there is one."""
        return min(model.waiting[0].number for model in self.models.values() if model.waiting)

    @property
    def runtime_with_running(self) -> int:
        """``virtual_runtime``, with what its running sequences have computed so far."""
        return self.virtual_runtime + sum([max(0, s.computed - s.charged) for s in self.running])
