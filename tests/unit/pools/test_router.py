"""Where a request goes, and which versions are copied."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from descant.pools.router import Prefixes, copy_target
from descant.prefix import TOKENS_A_SEQUENCE, is_worth_it


@pytest.mark.parametrize(
    ("in_flight", "holders", "expected"),
    [
        pytest.param({0: 8, 1: 0}, {0}, 1, id="one is full, the other idle"),
        pytest.param({0: 7, 1: 0}, {0}, None, id="not full"),
        pytest.param({0: 8, 1: 4}, {0}, None, id="the other has work of its own"),
        pytest.param({0: 80, 1: 0}, {0, 1}, None, id="it is everywhere"),
        pytest.param({0: 8, 1: 3, 2: 1}, {0}, 2, id="the idlest"),
        pytest.param({0: 8, 1: 0, 2: 0}, {0, 1}, None, id="one of the copies has room"),
        pytest.param({0: 8, 1: 9, 2: 0}, {0, 1}, 2, id="both copies are full"),
        pytest.param({1: 0}, {0}, None, id="its replica is dead"),
    ],
)
def test_a_hot_version_is_copied(in_flight: Mapping[int, int], holders: set[int], expected: int | None) -> None:
    assert copy_target(in_flight, holders, full=8) == expected


def test_a_place_may_be_busier_for_what_it_keeps_but_not_beyond_what_it_can_run() -> None:
    assert is_worth_it(0, 3, 3, max_num_seqs=8)
    assert not is_worth_it(TOKENS_A_SEQUENCE - 1, 4, 3, max_num_seqs=8)
    assert is_worth_it(TOKENS_A_SEQUENCE, 4, 3, max_num_seqs=8)
    assert is_worth_it(100 * TOKENS_A_SEQUENCE, 4, 0, max_num_seqs=8)
    assert not is_worth_it(100 * TOKENS_A_SEQUENCE, 5, 0, max_num_seqs=8), "4 more would wait there, not here"


def test_a_prompt_is_where_its_longest_beginning_was_last() -> None:
    prefixes = Prefixes(most=4)
    assert prefixes.find([b"a", b"b"]) == (0, 0)
    prefixes.note([b"a", b"b"], 1)
    assert prefixes.find([b"a", b"b", b"c"]) == (1, 2)
    prefixes.note([b"a", b"x"], 0)
    assert prefixes.find([b"a", b"b", b"c"]) == (1, 2), "what follows the common page decides"
    assert prefixes.find([b"a", b"y"]) == (0, 1)
    assert prefixes.find([b"y"]) == (0, 0)
    prefixes.note([b"1", b"2", b"3"], 0)
    assert prefixes.find([b"a", b"b"]) == (0, 0), "the least recently used are forgotten"
    assert prefixes.find([b"a", b"x"]) == (0, 2)
