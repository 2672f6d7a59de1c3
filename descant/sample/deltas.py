"""A sequence's output tokens, up to where it stops, and what of them is emitted to its client.

SequenceOutput → append_output (tokens, stop reason) → next_delta (what was not yet emitted)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from descant.sample.plan import SequenceOutput
from descant.sample.scores import empty_topk, fill_topk
from descant.sample.sequences import SequenceState
from descant.types import SampleDelta, StopReason, TopK


def append_output(sequence: SequenceState, output: SequenceOutput) -> StopReason | None:
    """The sampled tokens, up to the first that ends the sequence."""
    request, logprobs, topk = sequence.request, output.logprobs, output.topk
    for index, token in enumerate(output.tokens):
        sequence.output_tokens.append(token)
        sequence.logprobs.append(logprobs[index])
        sequence.length += 1
        if topk:
            sequence.topk.append(topk[index])
        if token in request.stop_ids:
            return "stop"
        if sequence.stop_text is not None and sequence.stop_text.met(sequence.output_tokens):
            return "stop"
        if len(sequence.output_tokens) >= request.max_tokens:
            return "length"
    return None


def next_delta(sequence: SequenceState, stop_reason: StopReason | None) -> SampleDelta:
    """Its output that is not emitted yet, all of one version. With the first that comes once they are done, the
    prompt's scores."""
    request, first = sequence.request, sequence.num_emitted
    scores = None
    if request.scores is not None and request.scores.done and not request.scores_emitted:
        request.scores_emitted = True
        scores = request.scores.result()
    num_alternatives = request.request.topk_sample_logprobs
    delta = SampleDelta(
        request_id=request.request.request_id,
        sample=sequence.sample,
        tokens=np.array(sequence.output_tokens[first:], np.int32),
        logprobs=np.array(sequence.logprobs[first:], np.float32),
        stop_reason=stop_reason,
        version=sequence.version,
        prompt=scores,
        prompt_cache_hit_tokens=request.hit_tokens,
        topk_logprobs=_topk(sequence.topk[first:], num_alternatives) if num_alternatives else None,
    )
    sequence.num_emitted, request.hit_tokens = len(sequence.output_tokens), 0
    return delta


def _topk(rows: Sequence[tuple[tuple[int, ...], tuple[float, ...]]], k: int) -> TopK:
    topk = empty_topk(len(rows), k)
    for index, (ids, logprobs) in enumerate(rows):
        fill_topk(topk, index, np.array([ids], np.int32), np.array([logprobs], np.float32))
    return topk
