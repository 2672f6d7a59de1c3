"""Ranks on two Ray nodes: they keep the promises of any rank, die by name, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from descant.errors import RankDied, ServerError
from descant.ranks.ray_cluster import RayCluster
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec
from descant.testing.engine import request, sampled
from descant.testing.ranks import SETTINGS, changed
from descant.testing.server import START_S
from descant.testing.trainer import Model, result

SECONDS = 5.0
"""A rank that died or is stopped is noticed within this."""

Join = Any
STORE_BYTES = 80 << 20


def spec(tiny: Path, **settings: Any) -> RankSpec:
    return RankSpec(
        model=str(tiny),
        settings=changed(SETTINGS, **settings),
        build="descant.testing.ranks:build_tiny",
    )


@asynccontextmanager
async def started(
    cluster: RayCluster, wanted: RankSpec, deaths: list[RankDied] | None = None
) -> AsyncIterator[Replica]:
    replica = await Replica.start(wanted, launch=cluster.start, on_death=None if deaths is None else deaths.append)
    try:
        yield replica
    finally:
        pids = replica.pids
        await replica.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not true():  # noqa: ASYNC110 - other processes make it so
            await asyncio.sleep(0.02)


async def test_a_rank_is_killed_and_stopped_and_loses_its_host(join: Join, tiny: Path) -> None:
    deaths: list[RankDied] = []
    async with join() as cluster, started(cluster, spec(tiny), deaths) as replica:
        model = Model(replica, "first")
        await result(model.create())
        await model.train(1)
        assert len((await sampled(replica, request())).tokens()) == 4
        [pid] = replica.pids
        assert psutil.Process(pid).parent().name().startswith("ray::RankHost")
        pending = [model.backward(), model.step()]
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            outcomes = await asyncio.gather(*pending, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == [str(deaths[0])] * 2
        assert f"(process {pid} on {socket.gethostname()}) was killed by SIGKILL" in str(deaths[0])

        await replica.restart()
        model = Model(replica, "second")
        await result(model.create())
        await model.train(1)
        [pid] = replica.pids
        os.kill(pid, signal.SIGSTOP)
        stalled = model.forward()
        async with asyncio.timeout(SECONDS):
            with pytest.raises(RankDied, match="stopped by a signal"):
                await stalled
        assert not psutil.pid_exists(pid)

        await replica.restart()
        model = Model(replica, "third")
        await result(model.create())
        rank = psutil.Process(replica.pids[0])
        os.kill(rank.ppid(), signal.SIGKILL)
        await until(lambda: len(deaths) == 3)
        assert "was lost with its host: ActorDiedError" in str(deaths[2])
        rank.wait(SECONDS)


async def test_each_replica_has_a_gpu_until_its_node_is_lost(join: Join, two_nodes: Any, tiny: Path) -> None:
    """Ray takes our word for the GPUs; nobody computes with them."""
    node = two_nodes.add_node(num_cpus=2, num_gpus=2, object_store_memory=STORE_BYTES)
    deaths: list[RankDied] = []
    async with join(placement_timeout_s=15.0) as cluster:
        [wanted] = await cluster.specs([spec(tiny, rank={"device": "auto"})])
        async with asyncio.TaskGroup() as group:
            starting = [
                group.create_task(Replica.start(each, launch=cluster.start, on_death=deaths.append)) for each in wanted
            ]
        replicas = [task.result() for task in starting]
        try:
            visible = [psutil.Process(replica.pids[0]).environ()["CUDA_VISIBLE_DEVICES"] for replica in replicas]
            assert sorted(visible) == ["0", "1"]
            two_nodes.remove_node(node, allow_graceful=False)
            await until(lambda: len(deaths) == 2)
            assert all("was lost with its host" in str(death) for death in deaths)
            said = ""
            async with asyncio.timeout(START_S):
                while "asked for 1 CPU and 1 GPU on one node; it has 2 nodes" not in said:
                    # Until Ray itself has noticed, it takes the room for there.
                    with pytest.raises(ServerError) as caught:
                        await replicas[0].restart()
                    said = str(caught.value)
        finally:
            await asyncio.gather(*(replica.close() for replica in replicas))


async def test_a_replica_of_two_ranks_on_two_nodes(join: Join, tiny: Path) -> None:
    deaths: list[RankDied] = []
    async with join() as cluster:
        [[wanted]] = await cluster.specs([spec(tiny, parallel={"data_parallel_size": 2}, rank={"num_threads": 2})])
        async with started(cluster, wanted, deaths) as replica:
            first, second = replica.pids
            assert psutil.Process(first).parents()[1] != psutil.Process(second).parents()[1]
            model = Model(replica)
            await result(model.create())
            await model.train(2)
            assert len((await sampled(replica, request())).tokens()) == 4

            pending = model.backward()
            os.kill(second, signal.SIGKILL)
            await until(lambda: bool(deaths))
            await asyncio.wait([pending], timeout=SECONDS)  # it may have ended before
            assert pending.done()
            assert f"rank 1 of {tiny} (process {second} on" in str(deaths[0])
            assert "was killed by SIGKILL" in str(deaths[0])
            await replica.restart()
            again = Model(replica, "again")
            await result(again.create())
            await again.train(1)


# ------------------------------------------------------------------------------------------------------- refused


async def test_room_that_there_is_not_is_refused_in_time(join: Join, two_nodes: Any, tiny: Path) -> None:
    async with join(placement_timeout_s=1.0) as cluster:
        [wanted] = await cluster.specs([spec(tiny, rank={"num_threads": 3})])
        with pytest.raises(ServerError) as caught:
            await Replica.start(wanted[0], launch=cluster.start)
        assert f"had no room for {tiny} within 1 s: asked for 3 CPUs on one node; it has 2 nodes (" in str(caught.value)
        assert "with 4 CPUs and 0 GPUs free in all" in str(caught.value)
        assert placement_groups() == 0


async def test_a_directory_that_is_not_shared_is_refused(join: Join, tiny: Path, tmp_path: Path) -> None:
    async with join(data_dir=tmp_path) as cluster:
        (tmp_path / "ray-probe").write_text("another machine's")
        with pytest.raises(ServerError, match=f"does not see the server's data_dir {tmp_path} .* all nodes share"):
            await Replica.start(spec(tiny), launch=cluster.start)
    assert not (tmp_path / "ray-probe").exists()


async def test_a_rank_that_crashes_as_it_starts_says_what_it_printed(join: Join) -> None:
    wanted = RankSpec(model="x", settings=SETTINGS, build="descant.testing.faults:build_crashing")
    async with join() as cluster:
        with pytest.raises(ServerError) as caught:
            await Replica.start(wanted, launch=cluster.start)
    assert "was killed by SIGABRT while it ran: looking for trouble; its last lines:" in str(caught.value)
    assert "about to crash" in str(caught.value)


def placement_groups() -> int:
    import ray

    return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())


async def test_once_it_has_left_it_joins_nothing_by_itself(join: Join, tiny: Path) -> None:
    """Ray would join whatever cluster this machine has, or start one, for a call that comes late."""
    import ray

    async with join() as cluster:
        pass
    with pytest.raises(ServerError, match="the Ray cluster failed"):
        await Replica.start(spec(tiny), launch=cluster.start)
    assert not ray.is_initialized()


def test_nothing_is_left(two_nodes: Any) -> None:
    """After all of the above: no placement group, no host, no rank."""
    import ray

    ray.init(address=two_nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        assert placement_groups() == 0
    finally:
        ray.shutdown()
    left = [process.name() for process in psutil.Process().children(recursive=True)]
    assert not [name for name in left if "RankHost" in name or "rank_main" in name]
