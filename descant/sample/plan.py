"""What travels between the scheduler and the sampler: a step's plan and its outputs, and the limits both keep.

    SampleLimits → Scheduler.plan → StepPlan of SequenceStep → the sampler → SequenceOutput → Scheduler.apply

Plain numbers and numpy; no torch, so that a process which carries plans need not load it.
"""

from __future__ import annotations

from dataclasses import dataclass

from descant.sample.scores import PromptChunk, PromptRows
from descant.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimits:
    max_num_seqs: int
    """Sequences decoding at once."""
    num_pages: int
    max_num_batched_tokens: int
    """Prompt tokens prefilled in one step at most, so that a step stays short."""
    max_queued_requests: int
    """Requests queued; one more is ``Overloaded``, unless its owner has less than an even share of them."""
    max_context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_samples: int = 1024
    max_topk: int = 20
    """Alternatives a position, at most."""
    num_speculative_tokens: int = 4
    """Draft tokens of a sequence in one step, at most, where there is a drafter."""
    chunk_tokens: int | None = None
    """Prompts are prefilled in steps up to multiples of this, several in one plan, each of which counts as so many
    tokens; and output tokens are always computed one by one, also after a preemption: what is computed together does
    not depend on what else runs. At most ``max_num_batched_tokens``. None: as it comes."""
    copies_pages: bool = False
    """The sampler copies keys from page to page (``SequenceStep.copied``): samples of a prompt compute the end of it,
    which fills no page, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """The keys of page ``source``'s first ``num_tokens`` tokens, also for ``target``, whose others are 0."""

    source: int
    target: int
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class SequenceStep:
    """One sequence's part of a step. Never changed, but not frozen: that takes three times as long to make, and there
    are hundreds in a step.

    ``tokens``: its next input tokens (a prompt's chunk, or the token sampled last), whose first has position
    ``context``; ``pages``: its page ids, at least enough for ``context + len(tokens)``. ``sample``: sample the next
    token from the last position's logits. ``draft``: draft tokens behind it; the accepted ones are output of this step,
    and one token more. Only behind a single token, and with pages for them.
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
    rng_offset: int
    """How many tokens this sequence has sampled before: with ``seed`` it fixes the random number, whatever the
    batch."""
    topk: int = 0
    """How many of the likeliest tokens are wanted beside a sampled one."""
    prompt: PromptChunk | None = None
    """What is asked of the prompt's tokens among ``tokens``."""
    draft: tuple[int, ...] = ()
    is_output: bool = False
    """``tokens`` are output tokens, none is the prompt's."""
    copied: PageCopy | None = None
    """Before anything is computed in this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A sequence is there once, or with several chunks of its prompt, in order (see ``SampleLimits.chunk_tokens``)."""

    sequences: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum([len(s.tokens) + len(s.draft) for s in self.sequences])


@dataclass(slots=True, kw_only=True)  # as above
class SequenceOutput:
    """``tokens`` sampled, with their ``logprobs`` and, where asked for, the likeliest tokens at each, (ids, logprobs)
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
