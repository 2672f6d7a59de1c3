"""What a batch over the KV pages is made of on the host: KV splits, tiles of adapters."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.adapters.slots import RowRef
from descant.model import paged_batch
from descant.types import SCALE_NUMERATOR, Lora

POSITIONS = st.lists(st.integers(0, 700) | st.sampled_from([0, 1, 63, 64, 65, 128, 512, 513]), min_size=1, max_size=9)


@given(POSITIONS, st.sampled_from([64, 128, 512]))
def test_splits_cover_every_key_once(positions: list[int], split_tokens: int) -> None:
    splits, ranges = paged_batch.kv_splits(np.array(positions), split_tokens)
    lengths = splits[:, 2] - splits[:, 1]
    assert list(lengths) == sorted(lengths, reverse=True), "the longest begin first"
    partials: list[int] = []
    for row, position in enumerate(positions):
        own = splits[splits[:, 0] == row]
        own = own[np.argsort(own[:, 1])]
        keys = [key for _, begin, end, _, _ in own for key in range(begin, end)]
        assert keys == list(range(position))
        assert [end == position for end in own[:, 2]] == [False] * (len(own) - 1) + [True], "only the last sees the end"
        assert set(own[:, 3]) == {position}
        assert all(begin % split_tokens == 0 for begin in own[:, 1])
        first, count = ranges[row]
        assert count == (len(own) if len(own) > 1 else 0)
        assert list(own[:, 4]) == (list(range(first, first + count)) if count else [-1])
        partials += range(first, first + count)
    assert partials == list(range(len(partials))), "the partial outputs lie close together"


@given(POSITIONS, st.integers(0, 700))
def test_a_sequence_is_cut_alike_whoever_is_beside_it(positions: list[int], position: int) -> None:
    alone, _ = paged_batch.kv_splits(np.array([position]), 128)
    among, _ = paged_batch.kv_splits(np.array([*positions, position]), 128)
    own = among[among[:, 0] == len(positions)]
    assert [list(split) for split in own[:, 1:4]] == [list(split) for split in alone[:, 1:4]]


SEQUENCES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 70), st.integers(0, 200)), max_size=6)
"""A gap in front, tokens, tokens in the pages before them."""


@given(SEQUENCES, st.integers(0, 40), st.sampled_from([1, 21, 32, 64]))
def test_prefill_tiles_have_every_token_once(drawn: list[tuple[int, int, int]], rest: int, tile_tokens: int) -> None:
    starts, stream, end = [], [], 0
    for row, (gap, length, context) in enumerate(drawn):
        stream += [(-1, None)] * gap + [(row, context + n) for n in range(length)]
        starts.append(end + gap)
        end = len(stream)
    stream += [(-1, None)] * rest
    lengths, contexts = [length for _, length, _ in drawn], [context for _, _, context in drawn]
    tiles = paged_batch.prefill_tiles(starts, lengths, contexts, len(stream), tile_tokens)
    found: dict[int, tuple[int, int | None]] = {}
    for row, start, length, position in tiles.tolist():
        assert 0 < length <= tile_tokens
        for n in range(length):
            assert start + n not in found
            found[start + n] = (row, None if row < 0 else position + n)
    assert [found[n] for n in range(len(stream))] == stream
    assert len(tiles) <= len(stream) // tile_tokens + 2 * len(drawn) + 1, "what graphs have room for"


def test_tiles_cut_each_adapters_rows() -> None:
    sites = (LoraSite(name="a", in_features=16, out_features=16, group="attn"),)
    bank = AdapterBank(sites, dtype=torch.float32, device=torch.device("cpu"))
    rows: dict[str, RowRef] = {}
    for name, rank in (("a", 4), ("b", 8), ("c", 16)):
        bank.create(name, Lora(rank=rank, seed=0))
        rows[name] = RowRef(rank_bucket=bank[name].rank_bucket, slot=bank[name].compute_slot)
    segments = [(0, 20, rows["a"]), (20, 36, rows["b"]), (40, 41, rows["c"])]

    def scale(rank: int) -> int:
        return int(np.float32(SCALE_NUMERATOR / rank).view(np.int32))

    origin = torch.zeros(1)
    starts = {name: bank.compute_slab(row.rank_bucket)[row.slot].data_ptr() for name, row in rows.items()}
    a, b, c = ((starts[name] - origin.data_ptr()) // origin.itemsize for name in "abc")
    for columns in (None, {rows["a"]: 0, rows["b"]: 16, rows["c"]: 32}):
        at_b, at_c = (16, 32) if columns else (0, 0)
        assert paged_batch.tiles(segments, bank, origin, 16, columns) == [
            (0, 16, a, 8, scale(4), 0),
            (16, 20, a, 8, scale(4), 0),
            (20, 36, b, 8, scale(8), at_b),
            (40, 41, c, 16, scale(16), at_c),
        ]
