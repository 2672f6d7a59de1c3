"""A sampler that keeps what it is given in pages, as the real one keeps keys, and checks them at every step.

Its next token is a pure function of the sequence's whole history as the *pages* have it (which token each key was
computed from, with which version), of the seed and the offset: a page lost, shared wrongly, or allocated twice changes
tokens or raises. A sequence finds its own keys again, and only others' that are of its version throughout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from descant.prefix import PAGE_TOKENS
from descant.sample.pages import pages_for
from descant.sample.plan import SampleLimits, SequenceOutput, SequenceStep, StepPlan
from descant.sample.rng import uniform
from descant.sample.scheduler import Scheduler
from descant.sample.scores import MAX_ALTERNATIVES, PromptChunk, PromptRows
from descant.sample.speculative import Drafter
from descant.types import EncodedText, PromptScores, SampleDelta, SampleRequest, SamplingParams, TensorData, Version

VOCAB_SIZE = 100
EOS = 99


def limits(**changes: object) -> SampleLimits:
    fields: dict = {
        "max_num_seqs": 8,
        "num_pages": 64,
        "max_num_batched_tokens": 256,
        "max_queued_requests": 100,
        "max_context_length": 1024,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
    }
    return SampleLimits(**{**fields, **changes})


def decode_letters(tokens: Iterable[int]) -> str:
    """Token t is one letter, a to z and round again."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def scheduler(*, prefix_caching: bool = True, drafter: Drafter | None = None, **changes: object) -> Scheduler:
    return Scheduler(
        limits(**changes),
        decode_text=decode_letters,
        fresh_seed=lambda: 12345,
        prefix_caching=prefix_caching,
        drafter=drafter,
    )


def request(
    request_id: str = "r",
    prompt: Iterable[int] = (1, 2, 3),
    *,
    num_samples: int = 1,
    version: Version | None = None,
    prompt_logprobs: bool = False,
    stream: bool = False,
    topk_prompt_logprobs: int = 0,
    topk_sample_logprobs: int = 0,
    prompt_logprobs_last_n: int | None = None,
    target_prompt_logprobs: TensorData | None = None,
    prompt_alt_tokens_k: int = 0,
    inflight: bool = False,
    owner: str = "",
    prefix_scope: str = "",
    **params: object,
) -> SampleRequest:
    return SampleRequest(
        request_id=request_id,
        version=version,
        prompt=(EncodedText(tokens=np.array(list(prompt), np.int32)),),
        num_samples=num_samples,
        sampling_params=SamplingParams(**{"seed": 0, "stop": (), **params}),  # type: ignore[arg-type]
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk_prompt_logprobs,
        topk_sample_logprobs=topk_sample_logprobs,
        prompt_logprobs_last_n=prompt_logprobs_last_n,
        target_prompt_logprobs=target_prompt_logprobs,
        prompt_alt_tokens_k=prompt_alt_tokens_k,
        stream=stream,
        inflight=inflight,
        owner=owner,
        prefix_scope=prefix_scope,
    )


Cell = tuple[Version | None, int, int]
"""A key: the version and the token that it was computed from, and a number that stands for the keys before it."""


def cell_after(before: Cell | None, version: Version | None, token: int) -> Cell:
    return version, token, hash((before and before[2], version and version.number, token))


class PagedFake:
    def __init__(self, num_pages: int, script: dict[int, list[int]] | None = None, *, ahead: bool = False):
        """``script``: sequence id → the tokens it will sample, instead of the pseudo-random ones. ``ahead``: what a
        sequence samples next was computed with the weights of its step before, as where a device goes ahead."""
        self.pages: list[list[Cell | None]] = [[None] * PAGE_TOKENS for _ in range(num_pages)]
        self.script = script or {}
        self.num_tokens = 0
        self.output_tokens: dict[int, list[tuple[Version | None, int]]] = {}
        """By sequence: its tokens, and with which version each was sampled."""
        self._ahead = ahead
        self._last: dict[int, SequenceStep] = {}
        self._own: dict[int, list[Cell]] = {}
        """By sequence: what must lie in its pages."""

    def step(self, plan: StepPlan) -> list[SequenceOutput]:
        written: set[tuple[int, int]] = set()
        for step in plan.sequences:
            if (copied := step.copied) is not None:
                cells = self.pages[copied.source][: copied.num_tokens]
                self.pages[copied.target] = [*cells, *[None] * (PAGE_TOKENS - copied.num_tokens)]
        steps = [self._launched(step) for step in plan.sequences]
        self._last = {step.sequence: step for step in plan.sequences} if self._ahead else {}
        for step in steps:
            assert step.tokens, "nothing to compute, so no logits to sample from"
            self._meet(step)
            own = self._own[step.sequence]
            for token in step.draft:
                own = [*own, cell_after(own[-1], step.version, token)]
            for position in range(step.context, len(own)):
                place = step.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                assert place not in written, "two sequences write one cell in one step"
                written.add(place)
                self.pages[place[0]][place[1]] = own[position]
            self.num_tokens += len(step.tokens)
        return [self._verified(step) for step in steps]

    def _launched(self, step: SequenceStep) -> SequenceStep:
        last = self._last.get(step.sequence)
        if last is None or not last.sample or len(step.tokens) > 1 or step.draft:
            return step
        return replace(step, version=last.version)

    def _verified(self, step: SequenceStep) -> SequenceOutput:
        """Samples as long as draft tokens are accepted, each from the history as the pages have it."""
        outputs = [self._output(step)]
        for index, token in enumerate(step.draft, start=1):
            if outputs[-1].tokens != (token,):
                break
            own = self._own[step.sequence]
            own.append(cell_after(own[-1], step.version, token))
            row = replace(
                step, tokens=(token,), context=step.context + index, rng_offset=step.rng_offset + index, draft=()
            )
            outputs.append(self._output(row))
        if not step.draft:
            return outputs[0]
        return SequenceOutput(
            sequence=step.sequence,
            version=step.version,
            tokens=tuple(token for output in outputs for token in output.tokens),
            logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
            topk=tuple(likely for output in outputs for likely in output.topk),
        )

    def _meet(self, step: SequenceStep) -> None:
        """What its pages hold before it computes is what it computed, or is as if it had now."""
        own = self._own.setdefault(step.sequence, [])
        found = self._cells(step, step.context)
        if found != own:
            both = min(len(found), len(own))
            assert [cell and cell[1] for cell in found[:both]] == [cell[1] for cell in own[:both]], "another's tokens"
            own = []
            for cell in found:
                assert cell is not None, "keys that were never computed"
                own.append(cell_after(own[-1] if own else None, step.version, cell[1]))
            assert own == found, "keys of another version"
        own = self._own[step.sequence] = own.copy()
        for token in step.tokens:
            own.append(cell_after(own[-1] if own else None, step.version, token))

    def _cells(self, step: SequenceStep, length: int) -> list[Cell | None]:
        cells: list[Cell | None] = []
        for page in step.pages[: pages_for(length)]:
            cells += self.pages[page]
        return cells[:length]

    def _output(self, step: SequenceStep) -> SequenceOutput:
        end = step.context + len(step.tokens)
        cells = self._own[step.sequence][:end]  # a chunk behind this one may have been computed as well
        assert self._cells(step, end) == cells, "keys were overwritten in this step"
        history = [token for _, token, _ in cells]
        prompt = None if step.prompt is None else self._score(step.prompt, step.context + step.prompt.skip, history)
        if not step.sample:
            return SequenceOutput(sequence=step.sequence, version=step.version, prompt=prompt)
        token = self._sample(step, cells)
        self.output_tokens.setdefault(step.sequence, []).append((step.version, token))
        return SequenceOutput(
            sequence=step.sequence,
            version=step.version,
            tokens=(token,),
            logprobs=(score(history, token),),
            topk=((tuple(range(step.topk)), (-1.0,) * step.topk),) if step.topk else (),
            prompt=prompt,
        )

    @staticmethod
    def _score(chunk: PromptChunk, first_row: int, history: list[int]) -> PromptRows:
        assert chunk.first_row == first_row
        rows = [history[: first_row + i + 1] for i in range(chunk.num_rows)]
        logprobs = np.array([score(row, t) for row, t in zip(rows, chunk.targets.tolist(), strict=True)], np.float32)
        topk_ids = topk_logprobs = cells = alternatives = None
        if chunk.topk:
            topk_ids = np.tile(np.arange(chunk.topk, dtype=np.int32), (len(rows), 1))
            topk_logprobs = np.full(topk_ids.shape, -1.0, np.float32)
        if chunk.row_starts is not None and chunk.token_ids is not None:
            owners = np.repeat(np.arange(len(rows)), np.diff(chunk.row_starts))
            pairs = zip(owners.tolist(), chunk.token_ids.tolist(), strict=True)
            cells = np.array([score(rows[owner], token) for owner, token in pairs], np.float32)
        if k := chunk.num_alternatives:
            offsets = [[(first_row + i) * MAX_ALTERNATIVES + j for j in range(k)] for i in range(len(rows))]
            alternatives = np.array(
                [[int(uniform(chunk.seed, d) * VOCAB_SIZE) for d in row] for row in offsets], np.int64
            )
        return PromptRows(
            logprobs=logprobs,
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            cells=cells,
            alternative_ids=alternatives,
            alternative_logprobs=None if alternatives is None else -alternatives.astype(np.float32),
        )

    def _sample(self, step: SequenceStep, cells: list[Cell]) -> int:
        if step.sequence in self.script:
            return self.script[step.sequence][step.rng_offset]
        total = sum(weight(position, version, token) for position, (version, token, _) in enumerate(cells))
        return next_token(total, step.seed, step.rng_offset)


def weight(position: int, version: Version | None, token: int) -> int:
    """What a key adds to the number that the next token is sampled by."""
    return (position + 1) * (token + (7 * version.number if version else 0))


def next_token(history: int, seed: int, offset: int) -> int:
    return int(uniform(seed + history, offset) * VOCAB_SIZE)


def score(history: list[int], target: int) -> float:
    """A log-probability that depends on the whole history."""
    return -float(sum((i + 1) * t for i, t in enumerate(history)) % 97 + target) / 256


class Finished:
    """Requests folded from their deltas, with the rules of deltas checked."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[float]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.prompts: dict[str, PromptScores] = {}
        self.topk: dict[tuple[str, int], tuple[list[list[int]], list[list[float]]]] = {}
        self.hit_tokens: dict[str, int] = {}
        self.versions: dict[tuple[str, int], list[Version | None]] = {}
        """Of each token."""

    def take(self, deltas: Iterable[SampleDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.sample)
            assert key not in self.reasons, "a delta after the last"
            hits = delta.prompt_cache_hit_tokens
            assert not hits or delta.request_id not in self.hit_tokens, "hits were reported after the first delta"
            self.hit_tokens.setdefault(delta.request_id, hits)
            self.tokens.setdefault(key, []).extend(delta.tokens.tolist())
            self.logprobs.setdefault(key, []).extend(delta.logprobs.tolist())
            if (topk := delta.topk_logprobs) is not None:
                ids, values = self.topk.setdefault(key, ([], []))
                ids += topk.token_ids.tolist()
                values += topk.logprobs.tolist()
            self.versions.setdefault(key, []).extend([delta.version] * len(delta.tokens))
            if delta.stop_reason is not None:
                self.reasons[key] = delta.stop_reason
            if delta.prompt is not None:
                assert delta.request_id not in self.prompts, "prompt scores came twice"
                self.prompts[delta.request_id] = delta.prompt


def run(s: Scheduler, fake: PagedFake, finished: Finished | None = None, max_steps: int = 10_000) -> Finished:
    """Until nothing is left."""
    finished = finished or Finished()
    for _ in range(max_steps):
        plan = s.plan()
        if plan is None:
            assert not s.has_work(), "work, but no plan"
            return finished
        finished.take(s.apply(plan, fake.step(plan)))
    raise AssertionError(f"not done after {max_steps} steps")
