"""What a captured pass is filled up with: nobody's tokens, which nothing of anybody meets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descant.model.forward_batch import ForwardBatch, Prefix, stream_rows
from descant.model.pass_graphs import LENGTHS, SEQUENCES, fill_keys, fill_lengths, graph_key, tokens_of_graph


@given(st.integers(1, 1 << 17))
def test_a_graph_is_not_much_larger_than_its_pass(num_tokens: int) -> None:
    size = tokens_of_graph(num_tokens)
    assert size >= num_tokens
    assert size % 64 == 0
    assert size == tokens_of_graph(size)
    assert size <= (512 if num_tokens <= 512 else 1.25 * num_tokens)


@given(st.integers(1, 1 << 14))
def test_small_passes_have_fewer_sizes(num_tokens: int) -> None:
    """Those that filling up costs nothing."""
    size = tokens_of_graph(num_tokens, finer_from=2048)
    assert size == (tokens_of_graph(num_tokens) if num_tokens > 2048 else max(256, 1 << (num_tokens - 1).bit_length()))


def test_there_are_few_sizes() -> None:
    sizes = {tokens_of_graph(num_tokens) for num_tokens in range(1, 16385)}
    assert sorted(sizes)[:8] == [256, 512, 640, 768, 896, 1024, 1280, 1536]
    assert len(sizes) == 2 + 4 * 5


@st.composite
def batches(draw: st.DrawFn) -> ForwardBatch:
    """Sequences, some of which begin as an earlier one does."""
    lengths = draw(st.lists(st.integers(1, 700), min_size=1, max_size=12))
    prefixes: list[Prefix | None] = []
    wholes: list[int] = []
    for number, length in enumerate(lengths):
        prefix = None
        if number and draw(st.booleans()):
            parent = draw(st.integers(0, number - 1))
            prefix = Prefix(parent=parent, length=draw(st.integers(1, wholes[parent])))
        prefixes.append(prefix)
        wholes.append(length + (prefix.length if prefix else 0))
    shared = tuple(prefixes) if any(prefixes) else ()
    return ForwardBatch(seq_lens=tuple(lengths), prefixes=shared)


@given(batches())
def test_every_token_is_a_sequences_and_the_passs_own_come_first(batch: ForwardBatch) -> None:
    contexts = [prefix.length if prefix else 0 for prefix in batch.prefixes] or [0] * len(batch.seq_lens)
    key = graph_key(batch.seq_lens, contexts, 3, rank=8, backward=True)
    assert key is not None
    query_ends, key_ends = fill_lengths(key, batch.seq_lens, contexts)
    lengths, key_lengths = np.diff(query_ends), np.diff(key_ends)
    own = len(batch.seq_lens)
    assert tuple(lengths[:own]) == batch.seq_lens
    assert list(key_lengths[:own]) == [n + c for n, c in zip(batch.seq_lens, contexts)]
    assert list(lengths[own:]) == list(key_lengths[own:])
    assert query_ends[-1] == key.tokens
    assert len(lengths) == key.sequences
    assert max(key_lengths) <= key.longest
    if not batch.prefixes:
        assert key.keys == 0
        return
    rows, found = fill_keys(key, batch), stream_rows(batch.seq_lens, batch.prefixes)
    assert len(rows) == key.keys
    for end, keys in zip(key_ends[1:], found):
        assert list(rows[end - len(keys) : end]) == list(keys)
    assert set(rows[key_ends[own] :]) == set(range(batch.num_tokens, key.tokens))  # nobody's, and at least one


@pytest.mark.parametrize(
    ("seq_lens", "num_segments"), [([1] * (SEQUENCES[-1] + 1), 1), ([LENGTHS[-1] + 1], 1), ([100], SEQUENCES[-1] + 1)]
)
def test_what_is_too_much_has_no_graph(seq_lens: list[int], num_segments: int) -> None:
    assert graph_key(seq_lens, [0] * len(seq_lens), num_segments, rank=8, backward=True) is None
    assert graph_key([100], [0], 1, rank=8, backward=True) is not None
