"""The deltas of a sampling request become one answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from descant.errors import ServerError
from descant.ports import Engine
from descant.types import (
    Float32,
    Int32,
    PromptScores,
    SampleDelta,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    TopK,
    Version,
)


class SampleFold:
    """The deltas of one request, in any order among its samples, into one answer."""

    def __init__(self, num_samples: int):
        self._tokens: list[list[Int32]] = [[] for _ in range(num_samples)]
        self._logprobs: list[list[Float32]] = [[] for _ in range(num_samples)]
        self._topk: list[list[TopK]] = [[] for _ in range(num_samples)]
        self._ends: list[SampleDelta | None] = [None] * num_samples
        self._prompt: PromptScores | None = None
        self._versions: dict[Version, None] = {}
        self._hit_tokens = 0

    def add(self, delta: SampleDelta) -> None:
        if not 0 <= delta.sample < len(self._ends):
            raise ServerError(f"the engine answered for sample {delta.sample} of {len(self._ends)}")
        if self._ends[delta.sample] is not None:
            raise ServerError(f"the engine went on with sample {delta.sample} after its end")
        self._tokens[delta.sample].append(delta.tokens)
        self._logprobs[delta.sample].append(delta.logprobs)
        if delta.topk_logprobs is not None:
            self._topk[delta.sample].append(delta.topk_logprobs)
        if delta.stop_reason is not None:
            self._ends[delta.sample] = delta
        if delta.prompt is not None:
            self._prompt = delta.prompt
        if delta.version is not None:
            self._versions[delta.version] = None
        self._hit_tokens += delta.prompt_cache_hit_tokens

    def output(self) -> SampleOutput:
        """Raises ``ServerError`` if a sample has no end: the engine broke off."""
        sequences = []
        for sample, end in enumerate(self._ends):
            if end is None or end.stop_reason is None:
                raise ServerError(f"the engine ended without finishing sample {sample} of {len(self._ends)}")
            sequences.append(
                SampledSequence(
                    tokens=np.concatenate(self._tokens[sample]).astype(np.int32, copy=False),
                    logprobs=np.concatenate(self._logprobs[sample]).astype(np.float32, copy=False),
                    stop_reason=end.stop_reason,
                    topk_logprobs=_joined(self._topk[sample]),
                )
            )
        return SampleOutput(
            sequences=tuple(sequences),
            prompt=self._prompt,
            versions=tuple(self._versions),
            prompt_cache_hit_tokens=self._hit_tokens,
        )


def _joined(parts: Sequence[TopK]) -> TopK | None:
    if not parts:
        return None
    return TopK(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
    )


async def sample_whole(engine: Engine, request: SampleRequest) -> SampleOutput:
    """The whole of a request. If it is broken off, the engine cancels it."""
    fold = SampleFold(request.num_samples)
    finished = False
    try:
        async for delta in engine.sample(request):
            fold.add(delta)
        finished = True
    finally:
        if not finished:
            await engine.cancel(request.request_id)
    return fold.output()
