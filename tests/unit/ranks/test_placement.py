"""Which rank runs on which device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from descant.errors import UserError
from descant.ranks.placement import RayNode, rank_specs, ray_resources, ray_specs, share_gpus
from descant.ranks.settings import ParallelSettings, RankSettings, RankSpec, ReplicaSettings

# ---------------------------------------------------------------------------------------------------- ranks on devices


def settings_of(*, device: str = "auto", num_threads: int | None = None, **parallel: Any) -> ReplicaSettings:
    rank = RankSettings(device=device, num_threads=num_threads)
    return ReplicaSettings(rank=rank, parallel=ParallelSettings(**parallel))


def specs(gpus: Sequence[str] = (), num_cores: int = 8, **settings: Any) -> tuple[RankSpec, ...]:
    wanted = RankSpec(model="m", settings=settings_of(**settings), spill_dir="/spill")
    return rank_specs(wanted, gpus=gpus, num_cores=num_cores)


def test_a_cpu_has_one_replica_and_is_told_nothing() -> None:
    assert specs() == (RankSpec(model="m", settings=ReplicaSettings(), spill_dir="/spill"),)


def test_replicas_on_a_cpu_divide_the_cores_and_share_no_directory() -> None:
    some = specs(replicas=3)
    assert [spec.settings.rank.num_threads for spec in some] == [2, 2, 2]
    assert [spec.spill_dir for spec in some] == ["/spill/replica-0", "/spill/replica-1", "/spill/replica-2"]
    assert [spec.label for spec in some] == ["replica 0 of m", "replica 1 of m", "replica 2 of m"]
    assert [spec.settings.rank.num_threads for spec in specs(replicas=4, num_cores=2)] == [1] * 4
    assert [spec.settings.rank.num_threads for spec in specs(replicas=2, num_threads=7)] == [7, 7]


def test_there_is_a_replica_for_each_gpu() -> None:
    some = specs(["4", "GPU-abc"])
    assert [spec.gpus for spec in some] == [("4",), ("GPU-abc",)]
    assert [spec.settings.rank.num_threads for spec in some] == [None, None]
    assert [spec.gpus for spec in specs(["4", "5"], replicas=1)] == [("4",)]
    assert [spec.gpus for spec in specs(["4", "5"], device="cpu")] == [()]
    assert [spec.gpus for spec in specs(["4", "5"], device="cuda:1")] == [()]


def test_replicas_may_do_one_thing_each() -> None:
    train, sample = frozenset(["train"]), frozenset(["sample"])
    assert [spec.roles for spec in specs([], replicas=2)] == [train | sample] * 2
    apart = specs(["0", "1", "2"], train_replicas=1, sample_replicas=2)
    assert [(spec.roles, spec.gpus) for spec in apart] == [(train, ("0",)), (sample, ("1",)), (sample, ("2",))]
    assert [spec.label for spec in apart] == ["replica 0 of m", "replica 1 of m", "replica 2 of m"]


def test_a_replica_of_several_ranks_has_a_gpu_for_each() -> None:
    assert [spec.gpus for spec in specs(list("01234"), data_parallel_size=2)] == [("0", "1"), ("2", "3")]
    assert [spec.gpus for spec in specs(list("0123"), data_parallel_size=4)] == [("0", "1", "2", "3")]
    assert [spec.settings.rank.num_threads for spec in specs(data_parallel_size=2, replicas=2)] == [2, 2]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param({"replicas": 3}, "parallel.replicas is 3, expected at most 2", id="more than GPUs"),
        pytest.param({"replicas": 2, "device": "cuda:1"}, "rank.device is 'cuda:1', which is one GPU", id="one GPU"),
        pytest.param(
            {"train_replicas": 2, "sample_replicas": 1},
            r"parallel.train_replicas \+ parallel.sample_replicas is 3, expected at most 2",
            id="more than GPUs, of two kinds",
        ),
        pytest.param(
            {"data_parallel_size": 3}, "parallel.data_parallel_size is 3, expected at most 2", id="more ranks"
        ),
        pytest.param(
            {"data_parallel_size": 2, "replicas": 2},
            "parallel.replicas is 2, expected at most 1: each needs 2 GPUs",
            id="more ranks in all",
        ),
    ],
)
def test_replicas_that_cannot_be_are_named(settings: Mapping[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        specs(["0", "1"], **settings)


def bases(count: int, **settings: Any) -> list[RankSpec]:
    return [RankSpec(model=f"m{index}", settings=settings_of(**settings)) for index in range(count)]


@pytest.mark.parametrize(
    ("count", "settings", "gpus", "expected"),
    [
        pytest.param(1, {}, "01", ["01"], id="one base takes all"),
        pytest.param(2, {}, "01", ["0", "1"], id="one each"),
        pytest.param(2, {}, "01234", ["012", "34"], id="the first has the larger share"),
        pytest.param(2, {"replicas": 1}, "0123", ["0", "1"], id="no more than asked for"),
        pytest.param(2, {"replicas": 2}, "01234", ["01", "23"], id="as many as asked for"),
        pytest.param(2, {"train_replicas": 1, "sample_replicas": 1}, "01234", ["01", "23"], id="one of each"),
        pytest.param(3, {}, "", ["", "", ""], id="no GPUs"),
    ],
)
def test_bases_share_the_gpus(count: int, settings: Mapping[str, Any], gpus: str, expected: list[str]) -> None:
    assert ["".join(share) for share in share_gpus(bases(count, **settings), gpus=tuple(gpus))] == expected


@pytest.mark.parametrize(
    ("count", "settings", "says"),
    [
        pytest.param(3, {}, "3 models are to be served, and there are 2 GPUs: each", id="more bases than GPUs"),
        pytest.param(
            2,
            {"replicas": 2},
            "2 models are to be served with parallel.replicas 2 each, and there are 2",
            id="replicas",
        ),
    ],
)
def test_bases_that_find_no_gpu_are_refused(count: int, settings: Mapping[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        share_gpus(bases(count, **settings), gpus=("0", "1"))


# ------------------------------------------------------------------------------------------------- nodes of a cluster


def on_nodes(count: int, *nodes: tuple[int, int], **settings: Any) -> list[list[dict[str, int]]]:
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
    assert spec.settings.rank.device == "cpu"
