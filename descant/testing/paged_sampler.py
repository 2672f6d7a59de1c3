"""A sampler that keeps what it is given in pages, as the real one keeps keys, and checks them at every step.

Its next token is a pure function of the sequence's whole history as the *pages* tell it (which token each key was
computed from, with which version), of the seed and the draw: a page lost, shared wrongly, or given out twice changes
tokens or raises. A sequence finds its own keys again, and only others' that are of its version throughout.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from descant.sample.chance import uniform
from descant.sample.pages import PAGE_TOKENS, pages_for
from descant.sample.scheduler import SampleLimits, Scheduler, SequenceOutput, SequenceStep, StepPlan
from descant.types import EncodedText, PromptScores, SampleDelta, SampleRequest, SamplingParams, Version

VOCAB_SIZE = 100
EOS = 99


def limits(**changes: object) -> SampleLimits:
    fields: dict = {
        "max_running": 8,
        "num_pages": 64,
        "step_tokens": 256,
        "max_waiting": 100,
        "max_context_length": 1024,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
    }
    return SampleLimits(**{**fields, **changes})


def decode_letters(tokens: Iterable[int]) -> str:
    """Token t is one letter, a to z and round again."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def scheduler(*, keeps_prefixes: bool = True, **changes: object) -> Scheduler:
    return Scheduler(
        limits(**changes), decode_text=decode_letters, fresh_seed=lambda: 12345, keeps_prefixes=keeps_prefixes
    )


def request(
    request_id: str = "r",
    prompt: Iterable[int] = (1, 2, 3),
    *,
    num_samples: int = 1,
    version: Version | None = None,
    prompt_logprobs: bool = False,
    topk_prompt_logprobs: int = 0,
    stream: bool = False,
    inflight: bool = False,
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
        stream=stream,
        inflight=inflight,
    )


Cell = tuple[Version | None, int, int]
"""A key: the version and the token that it was computed from, and a number that stands for the keys before it."""


def cell_after(before: Cell | None, version: Version | None, token: int) -> Cell:
    return version, token, hash((before and before[2], version and version.number, token))


class PagedFake:
    def __init__(self, num_pages: int, script: dict[int, list[int]] | None = None):
        """``script``: sequence id → the tokens it will draw, instead of the pseudo-random ones."""
        self.pages: list[list[Cell | None]] = [[None] * PAGE_TOKENS for _ in range(num_pages)]
        self.script = script or {}
        self.num_tokens = 0
        self.drawn: dict[int, list[tuple[Version | None, int]]] = {}
        """By sequence: its tokens, and with which version each was drawn."""
        self._own: dict[int, list[Cell]] = {}
        """By sequence: what must lie in its pages."""

    def step(self, plan: StepPlan) -> list[SequenceOutput]:
        written: set[tuple[int, int]] = set()
        for step in plan.sequences:
            assert step.tokens, "nothing to compute, so no logits to draw from"
            self._meet(step)
            own = self._own[step.sequence]
            for position in range(step.context, len(own)):
                place = step.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                assert place not in written, "two sequences write one cell in one step"
                written.add(place)
                self.pages[place[0]][place[1]] = own[position]
            self.num_tokens += len(step.tokens)
        return [self._output(step) for step in plan.sequences]

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
        cells = self._own[step.sequence]
        assert self._cells(step, step.context + len(step.tokens)) == cells, "keys were overwritten in this step"
        history = [token for _, token, _ in cells]
        scores: list[float] = []
        topk: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        if step.score_targets is not None:
            scores = [score(history[: step.context + i + 1], t) for i, t in enumerate(step.score_targets)]
            topk = [(tuple(range(step.topk)), (-1.0,) * step.topk)] * (len(scores) if step.topk else 0)
        token, logprob = None, 0.0
        if step.sample:
            token = self._draw(step, cells)
            logprob = score(history, token)
            self.drawn.setdefault(step.sequence, []).append((step.version, token))
        return SequenceOutput(
            sequence=step.sequence, token=token, logprob=logprob, scores=tuple(scores), topk=tuple(topk)
        )

    def _draw(self, step: SequenceStep, cells: list[Cell]) -> int:
        if step.sequence in self.script:
            return self.script[step.sequence][step.draw]
        total = sum(weight(position, version, token) for position, (version, token, _) in enumerate(cells))
        return next_token(total, step.seed, step.draw)


def weight(position: int, version: Version | None, token: int) -> int:
    """What a key adds to the number that the next token is drawn by."""
    return (position + 1) * (token + (7 * version.number if version else 0))


def next_token(history: int, seed: int, draw: int) -> int:
    return int(uniform(seed + history, draw) * VOCAB_SIZE)


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
        self.versions: dict[tuple[str, int], list[Version | None]] = {}
        """Of each token."""

    def take(self, deltas: Iterable[SampleDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.sample)
            assert key not in self.reasons, "a delta after the last"
            self.tokens.setdefault(key, []).extend(delta.tokens.tolist())
            self.logprobs.setdefault(key, []).extend(delta.logprobs.tolist())
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
