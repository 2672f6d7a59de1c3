"""What a step over the KV pages is told, made on the host: pieces of keys, tiles of adapters."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from descant.model import decode
from descant.model.bank import AdapterBank, LoraSite
from descant.model.passes import RowRef
from descant.types import SCALE_NUMERATOR, LoraConfig

POSITIONS = st.lists(st.integers(0, 700) | st.sampled_from([0, 1, 63, 64, 65, 128, 512, 513]), min_size=1, max_size=9)


@given(POSITIONS, st.sampled_from([64, 128, 512]))
def test_pieces_cover_every_key_once(positions: list[int], piece_tokens: int) -> None:
    pieces, ranges = decode.pieces(np.array(positions), piece_tokens)
    lengths = pieces[:, 2] - pieces[:, 1]
    assert list(lengths) == sorted(lengths, reverse=True), "the longest begin first"
    parts: list[int] = []
    for row, position in enumerate(positions):
        own = pieces[pieces[:, 0] == row]
        own = own[np.argsort(own[:, 1])]
        keys = [key for _, begin, end, _, _ in own for key in range(begin, end)]
        assert keys == list(range(position))
        assert [end == position for end in own[:, 2]] == [False] * (len(own) - 1) + [True], "only the last sees the end"
        assert set(own[:, 3]) == {position}
        assert all(begin % piece_tokens == 0 for begin in own[:, 1])
        first, count = ranges[row]
        assert count == (len(own) if len(own) > 1 else 0)
        assert list(own[:, 4]) == (list(range(first, first + count)) if count else [-1])
        parts += range(first, first + count)
    assert parts == list(range(len(parts))), "the parts lie close together"


@given(POSITIONS, st.integers(0, 700))
def test_a_sequence_is_cut_alike_whoever_is_beside_it(positions: list[int], position: int) -> None:
    alone, _ = decode.pieces(np.array([position]), 128)
    among, _ = decode.pieces(np.array([*positions, position]), 128)
    own = among[among[:, 0] == len(positions)]
    assert [list(piece) for piece in own[:, 1:4]] == [list(piece) for piece in alone[:, 1:4]]


def test_tiles_cut_each_adapters_rows() -> None:
    sites = (LoraSite(name="a", in_features=16, out_features=16, group="attn"),)
    bank = AdapterBank(sites, dtype=torch.float32, device=torch.device("cpu"))
    rows: dict[str, RowRef] = {}
    for name, rank in (("a", 4), ("b", 8), ("c", 16)):
        bank.create(name, LoraConfig(rank=rank, seed=0))
        rows[name] = RowRef(rank_class=bank[name].rank_class, slot=bank[name].work)
    segments = [(0, 20, rows["a"]), (20, 36, rows["b"]), (40, 41, rows["c"])]

    def scale(rank: int) -> int:
        return int(np.float32(SCALE_NUMERATOR / rank).view(np.int32))

    a, b, c = (rows[name].slot for name in "abc")
    for places in (None, {rows["a"]: 0, rows["b"]: 16, rows["c"]: 32}):
        at_b, at_c = (16, 32) if places else (0, 0)
        assert decode.tiles(segments, bank, 16, places) == {
            8: [(0, 16, a, scale(4), 0), (16, 20, a, scale(4), 0), (20, 36, b, scale(8), at_b)],
            16: [(40, 41, c, scale(16), at_c)],
        }
