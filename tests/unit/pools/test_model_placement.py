"""Where models are placed, and which of them move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descant.errors import ServerError
from descant.pools.placement import Load, Move, PlacedModel, place, rebalance, size_of
from descant.testing.fakes import FakeWorld
from descant.types import Full, Lora


def load(size: float = 0.0, tokens: float = 0.0) -> Load:
    return Load(size=size, recent_tokens=tokens)


def model(name: str, replica: int, size: float = 1.0, tokens: float = 0.0, *, movable: bool = True) -> PlacedModel:
    return PlacedModel(model_id=name, replica=replica, load=load(size, tokens), movable=movable)


# ---------------------------------------------------------------------------------------------------- a new adapter


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        pytest.param({0: load(), 1: load()}, 0, id="nobody has anything: the first"),
        pytest.param({0: load(8), 1: load()}, 1, id="the one with fewer bytes"),
        pytest.param({0: load(), 1: load(8)}, 0, id="the same the other way round"),
        pytest.param({0: load(8, 1e6), 1: load(8, 2e6)}, 0, id="alike in bytes: the less busy one"),
        pytest.param({0: load(10), 1: load(1, 1e6)}, 0, id="ten idle ones weigh less than one busy and one idle"),
        pytest.param({0: load(10), 1: load(9, 30.0)}, 1, id="a few tokens are not busy"),
        pytest.param({3: load(1), 7: load(1)}, 3, id="replicas that are not there are no choice"),
    ],
)
def test_a_new_adapter_goes_to_the_least_loaded(loads: Mapping[int, Load], expected: int) -> None:
    assert place(loads) == expected


def test_without_a_live_replica_there_is_no_place() -> None:
    with pytest.raises(ServerError, match="no replica is running"):
        place({})


def test_a_larger_adapter_counts_for_more() -> None:
    facts = FakeWorld(vocab_size=48).facts
    assert size_of(Lora(rank=32), facts) == 4 * size_of(Lora(rank=8), facts)
    assert size_of(Lora(rank=8, train_mlp=False), facts) < size_of(Lora(rank=8), facts)


def test_a_full_model_is_as_large_as_an_adapter_of_as_many_numbers() -> None:
    facts = FakeWorld(vocab_size=48).facts
    rank = facts.num_params // facts.adapter_numbers_per_rank
    assert rank * facts.adapter_numbers_per_rank == facts.num_params
    assert size_of(Full(), facts) == size_of(Lora(rank=rank), facts)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=64), st.integers(2, 8))
def test_sixty_four_at_once_are_spread(ranks: Sequence[int], num_replicas: int) -> None:
    loads = {index: load() for index in range(num_replicas)}
    for rank in ranks:
        loads[place(loads)] += load(rank)
    sizes = [one.size for one in loads.values()]
    assert max(sizes) - min(sizes) <= max(ranks)


# ---------------------------------------------------------------------------------------------------- moving


@pytest.mark.parametrize(
    ("models", "background", "expected"),
    [
        pytest.param([], {0: load(), 1: load()}, [], id="nothing to move"),
        pytest.param([model("a", 0)], {0: load(), 1: load()}, [], id="a lone adapter is no better off elsewhere"),
        pytest.param([model("a", 0), model("b", 0)], {0: load()}, [], id="nowhere to go"),
        pytest.param([model("a", 0), model("b", 0)], {0: load(), 1: load()}, ["a to 1"], id="one of two"),
        pytest.param(
            [model("a", 0, movable=False), model("b", 0)], {0: load(), 1: load()}, ["b to 1"], id="what is busy stays"
        ),
        pytest.param([model(x, 0, movable=False) for x in "ab"], {0: load(), 1: load()}, [], id="all are busy"),
        pytest.param([model("a", 0), model("b", 0), model("c", 1)], {0: load(), 1: load()}, [], id="even enough"),
        pytest.param(
            [model("hot", 0, 1, 9e5), model("warm", 0, 1, 5e5), model("cold", 1), model("cool", 1)],
            {0: load(), 1: load()},
            ["warm to 1"],
            id="the one that evens out most, not the hottest",
        ),
        pytest.param(
            [model("a", 0), model("b", 1)], {0: load(tokens=1e6), 1: load()}, ["a to 1"], id="away from the sampling"
        ),
        pytest.param([model("a", 5), model("b", 5)], {0: load(), 1: load()}, [], id="what is lost does not move"),
        pytest.param(
            [model(x, 0) for x in "abcdef"], {0: load(), 1: load(), 2: load()}, 4, id="a replica that came back empty"
        ),
    ],
)
def test_moves(models: Sequence[PlacedModel], background: Mapping[int, Load], expected: Sequence[str] | int) -> None:
    moves = rebalance(models, background)
    told = [f"{move.model_id} to {move.target}" for move in moves]
    assert len(told) == expected if isinstance(expected, int) else told == expected


def applied(models: Sequence[PlacedModel], moves: Sequence[Move]) -> list[PlacedModel]:
    targets = {move.model_id: move.target for move in moves}
    return [replace(m, replica=targets.get(m.model_id, m.replica)) for m in models]


def largest(models: Sequence[PlacedModel], background: Mapping[int, Load]) -> float:
    """The load of the most loaded, as its shares of bytes and of tokens."""
    sums = dict(background)
    for m in models:
        if m.replica in sums:
            sums[m.replica] += m.load
    sizes, tokens = sum(s.size for s in sums.values()), sum(s.recent_tokens for s in sums.values())
    return max(s.size / (sizes or 1) + s.recent_tokens / max(tokens, 10_000) for s in sums.values())


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[PlacedModel], dict[int, Load]]:
    live = draw(st.sets(st.integers(0, 5), min_size=1))
    tokens = st.floats(0, 1e7)
    models = [
        model(
            f"m{number}", draw(st.integers(0, 5)), draw(st.integers(1, 256)), draw(tokens), movable=draw(st.booleans())
        )
        for number in range(draw(st.integers(0, 24)))
    ]
    return models, {index: load(tokens=draw(tokens)) for index in live}


@given(situations())
def test_a_move_is_of_a_movable_one_between_live_replicas_and_helps(
    situation: tuple[list[PlacedModel], dict[int, Load]],
) -> None:
    models, background = situation
    by_name = {m.model_id: m for m in models}
    moves = rebalance(models, background)
    assert len({move.model_id for move in moves}) == len(moves)
    for move in moves:
        assert by_name[move.model_id].movable
        assert by_name[move.model_id].replica == move.source
        assert move.source in background
        assert move.target in background
        assert move.source != move.target
    assert largest(applied(models, moves), background) <= largest(models, background) + 1e-9


@given(situations())
def test_moving_comes_to_rest(situation: tuple[list[PlacedModel], dict[int, Load]]) -> None:
    models, background = situation
    for _ in range(30):
        moves = rebalance(models, background)
        if not moves:
            return
        models = applied(models, moves)
    pytest.fail("adapters are moved round and round")
