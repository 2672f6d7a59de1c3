"""What prompts begin with: the keys of their pages, and when a place that has computed some is worth queueing at. Pure,
and the same for the pages of a sampler, the ranks of a replica and the replicas of a base."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from descant.types import Int32, Version

PAGE_TOKENS = 64
"""Equal to ``descant.model.forward_batch.PAGE_TOKENS``, whose import would load torch (a test compares them)."""

TOKENS_A_SEQUENCE = 256
"""So many of a prompt's tokens cost as much to compute again as it costs to be sampled beside one sequence more: a
prompt runs at some 100k tokens a second, and of a few hundred steps of 3 ms a sequence takes less than a hundredth."""


def root_key(version: Version | None, scope: str) -> bytes:
    """The key before a sequence's first page. Tokens of one version never meet keys of another, nor those of one
    scope (``SampleRequest.prefix_scope``) another's."""
    name = "" if version is None else f"{version.number}:{version.model_id}"
    return hashlib.blake2b(name.encode(), digest_size=16, key=hashlib.blake2b(scope.encode()).digest()).digest()


def page_key(before: bytes, tokens: Sequence[int] | Int32) -> bytes:
    """The key of the page that holds ``tokens`` (a full page of them) after the page, or root, with key ``before``. A
    digest nobody can find a second input to: a collision would show one tenant another's keys and values."""
    return hashlib.blake2b(before + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


def page_keys(version: Version | None, scope: str, tokens: Sequence[int] | Int32) -> Iterator[bytes]:
    """The keys of the full pages of a sequence that begins with ``tokens``, computed as they are asked for."""
    key = root_key(version, scope)
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        key = page_key(key, tokens[end - PAGE_TOKENS : end])
        yield key


def is_worth_it(cached_tokens: int, sequences: int, fewest: int, *, max_num_seqs: int) -> bool:
    """Whether a place that has so many sequences is right for one more, of whose prompt it keeps so much, where others
    have the ``fewest``. It may be ahead, but not so that it cannot run all of them (``max_num_seqs``)."""
    ahead = sequences - fewest
    return ahead <= min(cached_tokens // TOKENS_A_SEQUENCE, max(0, max_num_seqs - sequences))
