"""Where ranks run, where adapters are placed, and which of them move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descant.errors import ServerError, UserError
from descant.ranks.placement import (
    TOKENS_A_SEQUENCE,
    Load,
    Move,
    PlacedModel,
    Prefixes,
    RayNode,
    copy_target,
    is_worth_it,
    place,
    rank_specs,
    ray_resources,
    ray_specs,
    rebalance,
    share_gpus,
    size_of,
)
from descant.ranks.settings import RankSettings, RankSpec
from descant.types import LoraConfig


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
    assert size_of(LoraConfig(rank=32)) == 4 * size_of(LoraConfig(rank=8))
    assert size_of(LoraConfig(rank=8, train_mlp=False)) < size_of(LoraConfig(rank=8))


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


# ---------------------------------------------------------------------------------------------------- ranks on devices


def specs(gpus: Sequence[str] = (), num_cores: int = 8, **settings: object) -> tuple[RankSpec, ...]:
    wanted = RankSpec(model="m", settings=RankSettings(**settings), spill_dir="/spill")  # type: ignore[arg-type]
    return rank_specs(wanted, gpus=gpus, num_cores=num_cores)


def test_a_cpu_has_one_replica_and_is_told_nothing() -> None:
    assert specs() == (RankSpec(model="m", settings=RankSettings(), spill_dir="/spill"),)


def test_replicas_on_a_cpu_divide_the_cores_and_share_no_directory() -> None:
    some = specs(replicas=3)
    assert [spec.settings.num_threads for spec in some] == [2, 2, 2]
    assert [spec.spill_dir for spec in some] == ["/spill/replica-0", "/spill/replica-1", "/spill/replica-2"]
    assert [spec.label for spec in some] == ["replica 0 of m", "replica 1 of m", "replica 2 of m"]
    assert [spec.settings.num_threads for spec in specs(replicas=4, num_cores=2)] == [1] * 4
    assert [spec.settings.num_threads for spec in specs(replicas=2, num_threads=7)] == [7, 7]


def test_there_is_a_replica_for_each_gpu() -> None:
    some = specs(["4", "GPU-abc"])
    assert [spec.gpus for spec in some] == [("4",), ("GPU-abc",)]
    assert [spec.settings.num_threads for spec in some] == [None, None]
    assert [spec.gpus for spec in specs(["4", "5"], replicas=1)] == [("4",)]
    assert [spec.gpus for spec in specs(["4", "5"], device="cpu")] == [()]
    assert [spec.gpus for spec in specs(["4", "5"], device="cuda:1")] == [()]


def test_a_replica_of_several_ranks_has_a_gpu_for_each() -> None:
    assert [spec.gpus for spec in specs(list("01234"), ranks_per_replica=2)] == [("0", "1"), ("2", "3")]
    assert [spec.gpus for spec in specs(list("0123"), ranks_per_replica=4)] == [("0", "1", "2", "3")]
    assert [spec.settings.num_threads for spec in specs(ranks_per_replica=2, replicas=2)] == [2, 2]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param({"replicas": 3}, "rank.replicas is 3, expected at most 2", id="more than GPUs"),
        pytest.param({"replicas": 2, "device": "cuda:1"}, "rank.device is 'cuda:1', which is one GPU", id="one GPU"),
        pytest.param({"ranks_per_replica": 3}, "rank.ranks_per_replica is 3, expected at most 2", id="more ranks"),
        pytest.param(
            {"ranks_per_replica": 2, "replicas": 2},
            "rank.replicas is 2, expected at most 1: each needs 2 GPUs",
            id="more ranks in all",
        ),
    ],
)
def test_replicas_that_cannot_be_are_named(settings: Mapping[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        specs(["0", "1"], **settings)


def bases(count: int, **settings: object) -> list[RankSpec]:
    return [RankSpec(model=f"m{index}", settings=RankSettings(**settings)) for index in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "settings", "gpus", "expected"),
    [
        pytest.param(1, {}, "01", ["01"], id="one base takes all"),
        pytest.param(2, {}, "01", ["0", "1"], id="one each"),
        pytest.param(2, {}, "01234", ["012", "34"], id="the first has the larger share"),
        pytest.param(2, {"replicas": 1}, "0123", ["0", "1"], id="no more than asked for"),
        pytest.param(2, {"replicas": 2}, "01234", ["01", "23"], id="as many as asked for"),
        pytest.param(3, {}, "", ["", "", ""], id="no GPUs"),
    ],
)
def test_bases_share_the_gpus(count: int, settings: Mapping[str, object], gpus: str, expected: list[str]) -> None:
    assert ["".join(share) for share in share_gpus(bases(count, **settings), gpus=tuple(gpus))] == expected


@pytest.mark.parametrize(
    ("count", "settings", "says"),
    [
        pytest.param(3, {}, "3 models are to be served, and there are 2 GPUs: each", id="more bases than GPUs"),
        pytest.param(
            2, {"replicas": 2}, "2 models are to be served with rank.replicas 2 each, and there are 2", id="replicas"
        ),
    ],
)
def test_bases_that_find_no_gpu_are_refused(count: int, settings: Mapping[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        share_gpus(bases(count, **settings), gpus=("0", "1"))


# ------------------------------------------------------------------------------------------------- nodes of a cluster


def on_nodes(count: int, *nodes: tuple[int, int], **settings: object) -> list[list[dict[str, int]]]:
    """What Ray is asked for, for nodes of (CPUs, GPUs)."""
    cluster = [RayNode(name=f"node {index}", cpus=cpus, gpus=gpus) for index, (cpus, gpus) in enumerate(nodes)]
    return [[ray_resources(spec) for spec in specs] for specs in ray_specs(bases(count, **settings), nodes=cluster)]


def test_ranks_on_a_cluster_take_its_gpus() -> None:
    gpu = {"CPU": 1, "GPU": 1}
    assert on_nodes(1, (8, 2), (8, 1)) == [[gpu, gpu, gpu]]
    assert on_nodes(2, (8, 2), (8, 1)) == [[gpu, gpu], [gpu]]
    assert on_nodes(1, (8, 2), replicas=1) == [[gpu]]
    assert on_nodes(1, (8, 2), device="cpu") == [[{"CPU": 8}]]


def test_ranks_on_a_cluster_without_gpus_take_the_cpus_that_all_can_have() -> None:
    assert on_nodes(1, (8, 0), (4, 0)) == [[{"CPU": 8}]]
    assert on_nodes(1, (8, 0), (4, 0), replicas=2) == [[{"CPU": 4}, {"CPU": 4}]]
    assert on_nodes(2, (8, 0), (4, 0)) == [[{"CPU": 4}], [{"CPU": 4}]]
    assert on_nodes(1, (8, 0), (4, 0), replicas=4) == [[{"CPU": 2}] * 4]
    assert on_nodes(1, (1, 0), replicas=3) == [[{"CPU": 1}] * 3]
    assert on_nodes(1, (8, 0), num_threads=3) == [[{"CPU": 3}]]


def test_a_gpu_that_no_node_has_is_named() -> None:
    with pytest.raises(UserError, match=r"rank\.device is 'cuda', and none of the 2 nodes"):
        on_nodes(1, (8, 0), (4, 0), device="cuda")


def test_on_a_cluster_the_device_is_said() -> None:
    """Ray hides GPUs from who asked for none only in some versions."""
    [[spec]] = ray_specs(bases(1), nodes=[RayNode(name="node", cpus=2, gpus=0)])
    assert spec.settings.device == "cpu"


def test_a_place_may_be_busier_for_what_it_keeps_but_not_beyond_what_it_can_run() -> None:
    assert is_worth_it(0, 3, 3, max_running=8)
    assert not is_worth_it(TOKENS_A_SEQUENCE - 1, 4, 3, max_running=8)
    assert is_worth_it(TOKENS_A_SEQUENCE, 4, 3, max_running=8)
    assert is_worth_it(100 * TOKENS_A_SEQUENCE, 4, 0, max_running=8)
    assert not is_worth_it(100 * TOKENS_A_SEQUENCE, 5, 0, max_running=8), "4 more would wait there, not here"


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
