"""Which tokens are in a step: the running sequences' next ones with their drafts, and prompts' chunks by share.

A step has room for so many prompt tokens. Of several owners each has an even share of them, so that one with long
prompts does not hold up another's short ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from descant.prefix import PAGE_TOKENS
from descant.sample.fairness import FairAdmission
from descant.sample.plan import SampleLimits, SequenceStep
from descant.sample.queues import SequenceQueues
from descant.sample.sequences import SequenceState
from descant.sample.speculative import DraftContext, Drafter

BESIDE_DECODING = 16
"""Where an owner has nothing but sequences that decode, others' prompts have one in so many of a step's tokens: each of
its own waits for all of them. On a CPU a prompt's token costs what a decoding sequence's does (SmolLM2: a step of one
sequence 0.3 s on one thread, of 64 0.9 s, and with 128 prompt tokens 3 s)."""


class StepBatcher:
    def __init__(self, limits: SampleLimits, queues: SequenceQueues, admission: FairAdmission, drafter: Drafter | None):
        self.prefilled_tokens = 0
        """Since the start, those computed again after a preemption included."""
        self._limits = limits
        self._queues = queues
        self._admission = admission
        self._drafter = drafter

    def steps(self, *, closed: bool) -> list[SequenceStep]:
        """All running sequences' next tokens first, then prompt chunks within ``max_num_batched_tokens``, also of
        sequences that begin with this step. ``closed``: see ``FairAdmission.admissions``."""
        decoding: list[SequenceState] = []
        prefilling: list[SequenceState] = []
        for sequence in self._queues.running:
            (decoding if sequence.decodes(self._limits.chunk_tokens) else prefilling).append(sequence)
        drafts = {} if self._drafter is None else self._drafts(self._drafter, decoding)
        steps = [
            self._step(sequence, sequence.computed, sequence.computed + 1, drafts.get(sequence.id, ()))
            for sequence in decoding
        ]
        return steps + self._prefill(prefilling, closed=closed)

    def _prefill(self, prefilling: Sequence[SequenceState], *, closed: bool) -> list[SequenceStep]:
        """Prompts' next chunks: of running sequences, oldest first, then of those that begin. Of several owners each
        has an even share of the step's tokens, and what some leave is there for all; beside one who only decodes there
        are fewer."""
        budget, least = self._limits.max_num_batched_tokens, self._limits.chunk_tokens or 1
        ends = {sequence: sequence.computed for sequence in prefilling}
        owners = dict.fromkeys(sequence.request.owner for sequence in prefilling)
        owners |= dict.fromkeys(owner for owner in self._queues.owners.values() if owner.waits)
        if owners and len(owners) < len(self._queues.owners):
            budget = max(budget // BESIDE_DECODING, least)
        for share in [budget] if len(owners) < 2 else [max(budget // len(owners), least), budget]:
            room = dict.fromkeys(owners, share)
            for sequence in chain(list(ends), self._admission.admissions(room, closed=closed)):
                owner = sequence.request.owner
                start = ends.get(sequence, sequence.computed)
                ends[sequence], cost = self._reach(sequence, start, min(budget, room[owner]))
                budget -= cost
                room[owner] -= cost
                if budget < least:
                    break
            if budget < least or min(room.values(), default=least) >= least:
                break  # no owner was held up by its share
        return [step for sequence, end in ends.items() for step in self._chunks(sequence, end)]

    def _reach(self, sequence: SequenceState, start: int, room: int) -> tuple[int, int]:
        """How far its next tokens from ``start`` on can be computed with so much room, and what of it that takes."""
        chunk = self._limits.chunk_tokens
        if chunk is None:
            end = min(sequence.length, start + room)
            return end, end - start
        cost, last = 0, max(sequence.computed + 1, len(sequence.request.prompt))  # the prompt's, or one output token
        while start < last and cost + chunk <= room:  # padded, the last costs what others do
            start, cost = min((start // chunk + 1) * chunk, last), cost + chunk
        return start, cost

    def _chunks(self, sequence: SequenceState, end: int) -> Iterator[SequenceStep]:
        """Its next tokens up to ``end``."""
        start, chunk = sequence.computed, self._limits.chunk_tokens
        while start < end:
            chunk_end = end if chunk is None else min((start // chunk + 1) * chunk, end)
            yield self._step(sequence, start, chunk_end)
            start = chunk_end

    def _drafts(self, drafter: Drafter, sequences: Sequence[SequenceState]) -> dict[int, tuple[int, ...]]:
        """By sequence, for those that have one."""
        contexts: dict[int, DraftContext] = {}
        for sequence in sequences:
            request = sequence.request
            limit = min(
                self._limits.num_speculative_tokens,
                request.max_tokens - len(sequence.output_tokens) - 1,  # one more is sampled in any case
                len(sequence.pages) * PAGE_TOKENS - sequence.length,
            )
            single = sequence.length - sequence.computed == 1
            if limit > 0 and single and request.unscored_by(sequence) is None:
                contexts[sequence.id] = DraftContext(
                    sequence=sequence.id, prompt=request.prompt, output_tokens=sequence.output_tokens, limit=limit
                )
        return dict(zip(contexts, drafter.propose(list(contexts.values())), strict=True))

    def _step(self, sequence: SequenceState, start: int, end: int, draft: tuple[int, ...] = ()) -> SequenceStep:
        request, count = sequence.request, end - start
        params, output_tokens, length = request.request.sampling_params, sequence.output_tokens, sequence.length
        scores = request.unscored_by(sequence)
        if count > 1 or not output_tokens:
            self.prefilled_tokens += count
        # Nearly all steps are of a single output token.
        tokens = (output_tokens[-1],) if output_tokens and end == length and count == 1 else sequence.tokens(start, end)
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
            rng_offset=len(output_tokens),
            topk=request.request.topk_sample_logprobs,
            prompt=None if scores is None else scores.chunk(start, end),
            draft=draft,
            is_output=start >= len(request.prompt),
            copied=sequence.copied,
        )
