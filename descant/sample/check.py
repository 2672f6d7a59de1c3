"""What a sample request may be. Every refusal names the field, what it expected and what it got."""

from __future__ import annotations

import math

import numpy as np

from descant.errors import UserError
from descant.prefix import PAGE_TOKENS
from descant.sample.pages import pages_for
from descant.types import ModelInput, SampleRequest, SamplingParams, input_length


def check_request(
    request: SampleRequest,
    *,
    vocab_size: int,
    max_context_length: int,
    num_pages: int,
    max_num_samples: int,
    max_topk: int,
) -> int:
    """The request's ``max_tokens``, resolved: None is as many as the context (and the KV memory) has room for.
    Raises ``UserError``."""
    params = request.sampling_params
    if not 1 <= request.num_samples <= max_num_samples:
        raise UserError(f"num_samples is {request.num_samples}, expected 1 to {max_num_samples}")
    _check_prompt(request.prompt, vocab_size)
    check_scores(request, vocab_size=vocab_size, max_topk=max_topk)
    _check_sampling(params)
    _check_stop(params.stop, vocab_size)

    prompt_tokens = input_length(request.prompt)
    # The token sampled last is never fed back: its key needs no room, and after a prompt as long as the context, whose
    # scores are asked for with one token, it needs no position.
    memory_tokens = num_pages * PAGE_TOKENS + 1
    if prompt_tokens > max_context_length:
        raise UserError(
            f"prompt has {prompt_tokens} tokens, expected at most {max_context_length} (the context length)"
        )
    room = max(1, max_context_length - prompt_tokens)
    if prompt_tokens >= memory_tokens:
        raise UserError(f"prompt has {prompt_tokens} tokens, expected at most {memory_tokens - 1} (the KV memory)")
    if params.max_tokens is None:
        return min(room, memory_tokens - prompt_tokens)
    if params.max_tokens < 1:
        raise UserError(f"sampling_params.max_tokens is {params.max_tokens}, expected at least 1")
    if params.max_tokens > room:
        raise UserError(
            f"sampling_params.max_tokens is {params.max_tokens} after a prompt of {prompt_tokens} tokens, "
            f"expected at most {room} (the context length is {max_context_length})"
        )
    if pages_for(prompt_tokens + params.max_tokens - 1) > num_pages:
        raise UserError(
            f"sampling_params.max_tokens is {params.max_tokens} after a prompt of {prompt_tokens} tokens, "
            f"expected at most {memory_tokens - prompt_tokens} (the KV memory holds {num_pages * PAGE_TOKENS} tokens)"
        )
    return params.max_tokens


def check_scores(request: SampleRequest, *, vocab_size: int, max_topk: int) -> None:
    """What the request asks to know besides its samples. Raises ``UserError``."""
    for name, k in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs),
        ("topk_sample_logprobs", request.topk_sample_logprobs),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k),
    ):
        if not 0 <= k <= max_topk:
            raise UserError(f"{name} is {k}, expected 0 to {max_topk}")
    num_rows = input_length(request.prompt) - 1
    if (last_n := request.prompt_logprobs_last_n) is not None:
        if not request.prompt_logprobs:
            raise UserError(
                f"prompt_logprobs_last_n is {last_n} and prompt_logprobs is not asked for, expected both "
                "(include_prompt_logprobs=True)"
            )
        if not 1 <= last_n <= num_rows:
            raise UserError(
                f"prompt_logprobs_last_n is {last_n}, expected 1 to {num_rows} (the prompt has {num_rows + 1} tokens)"
            )
    if (targets := request.target_prompt_logprobs) is None:
        return
    if len(targets.shape) != 2 or targets.shape[0] != num_rows:
        raise UserError(
            f"target_prompt_logprobs has shape {targets.shape}, expected ({num_rows}, K): "
            "a row for each prompt token after the first"
        )
    wrong = np.flatnonzero((targets.data < -1) | (targets.data >= vocab_size))
    if len(wrong):
        raise UserError(
            f"target_prompt_logprobs.data[{wrong[0]}] is {targets.data[wrong[0]]}, "
            f"expected -1 (none) or 0 to {vocab_size - 1}"
        )
    if not (targets.data >= 0).any():
        raise UserError("target_prompt_logprobs names no token, expected at least one")


def _check_prompt(prompt: ModelInput, vocab_size: int) -> None:
    if input_length(prompt) == 0:
        raise UserError("prompt is empty, expected at least 1 token")
    for index, chunk in enumerate(prompt):
        wrong = np.flatnonzero((chunk.tokens < 0) | (chunk.tokens >= vocab_size))
        if len(wrong):
            raise UserError(
                f"prompt.chunks[{index}].tokens[{wrong[0]}] is {chunk.tokens[wrong[0]]}, expected 0 to {vocab_size - 1}"
            )


def _check_sampling(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise UserError(f"sampling_params.temperature is {params.temperature}, expected a finite number of at least 0")
    if params.top_k != -1 and params.top_k < 1:
        raise UserError(f"sampling_params.top_k is {params.top_k}, expected -1 (off) or at least 1")
    if not 0 < params.top_p <= 1:
        raise UserError(f"sampling_params.top_p is {params.top_p}, expected more than 0 and at most 1")


def _check_stop(stop: tuple[int, ...] | tuple[str, ...] | None, vocab_size: int) -> None:
    items: tuple[int | str, ...] = stop or ()
    for index, item in enumerate(items):
        if isinstance(item, str) != isinstance(items[0], str):
            raise UserError(f"sampling_params.stop[{index}] is {item!r}, expected all token ids or all strings")
        if isinstance(item, str):
            if not item:
                raise UserError(f"sampling_params.stop[{index}] is an empty string, expected at least one character")
        elif not 0 <= item < vocab_size:
            raise UserError(f"sampling_params.stop[{index}] is {item}, expected 0 to {vocab_size - 1}")
