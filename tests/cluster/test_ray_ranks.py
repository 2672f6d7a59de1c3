"""Ranks on two Ray nodes: they keep the promises of any rank, die by name, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from descant.errors import RankDied
from descant.ranks.ray_cluster import RayCluster
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec
from descant.testing.engine import request, sampled
from descant.testing.ranks import SETTINGS
from descant.testing.trainer import Model, result

SECONDS = 5.0
"""A rank that died or is stopped is noticed within this."""

Join = Any


def spec(tiny: Path, **settings: Any) -> RankSpec:
    return RankSpec(
        model=str(tiny),
        settings=replace(SETTINGS, **settings),
        build="descant.testing.ranks:build_tiny",
    )


@asynccontextmanager
async def started(
    cluster: RayCluster, wanted: RankSpec, deaths: list[RankDied] | None = None
) -> AsyncIterator[Replica]:
    replica = await Replica.start(wanted, launch=cluster.launch(), on_death=None if deaths is None else deaths.append)
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


async def test_a_rank_serves_is_killed_and_restarted(join: Join, tiny: Path) -> None:
    deaths: list[RankDied] = []
    async with join() as cluster, started(cluster, spec(tiny), deaths) as replica:
        model = Model(replica)
        await result(model.create())
        await model.train(1)
        assert len((await sampled(replica, request())).tokens()) == 4
        [first] = replica.pids
        assert psutil.Process(first).parent().name().startswith("ray::RankHost")

        pending = [model.backward(), model.step()]
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            outcomes = await asyncio.gather(*pending, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == [str(deaths[0])] * 2
        assert f"(process {first} on {socket.gethostname()}) was killed by SIGKILL" in str(deaths[0])

        await replica.restart()
        again = Model(replica, "again")
        await result(again.create())
        await again.train(1)


async def test_a_stopped_rank_is_ended_and_says_what_it_printed(join: Join, tiny: Path, caplog: Any) -> None:
    deaths: list[RankDied] = []
    async with join() as cluster, started(cluster, spec(tiny), deaths) as replica:
        model = Model(replica)
        await result(model.create())
        [rank] = replica.pids
        os.kill(rank, signal.SIGSTOP)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(RankDied, match="stopped by a signal"):
                await model.forward()
        assert not psutil.pid_exists(rank)
        await replica.restart()


async def test_a_rank_goes_with_its_host(join: Join, tiny: Path) -> None:
    deaths: list[RankDied] = []
    async with join() as cluster, started(cluster, spec(tiny), deaths) as replica:
        rank = psutil.Process(replica.pids[0])
        model = Model(replica)
        await result(model.create())
        os.kill(rank.ppid(), signal.SIGKILL)
        await until(lambda: bool(deaths))
        assert "was lost with its host: ActorDiedError" in str(deaths[0])
        rank.wait(SECONDS)
        await replica.restart()
        await result(Model(replica, "again").create())


async def test_replicas_are_spread_and_a_lost_node_is_replaced(join: Join, two_nodes: Any, tiny: Path) -> None:
    node = two_nodes.add_node(num_cpus=2, resources={"third": 1}, object_store_memory=80 << 20)
    deaths: list[RankDied] = []
    async with join() as cluster:
        [wanted] = await cluster.specs([spec(tiny, replicas=3, num_threads=2)])
        launches = [cluster.launch() for _ in wanted]
        replicas = await asyncio.gather(
            *(Replica.start(each, launch=launch, on_death=deaths.append) for each, launch in zip(wanted, launches))
        )
        try:
            raylets = {psutil.Process(replica.pids[0]).parents()[1].pid for replica in replicas}
            assert len(raylets) == 3, "each on a node of its own"
            two_nodes.remove_node(node, allow_graceful=False)
            await until(lambda: bool(deaths))
            assert len(deaths) == 1
            assert "was lost with its host" in str(deaths[0])
        finally:
            await asyncio.gather(*(replica.close() for replica in replicas))


async def test_a_replica_of_two_ranks_on_two_nodes(join: Join, tiny: Path) -> None:
    deaths: list[RankDied] = []
    async with join() as cluster:
        [[wanted]] = await cluster.specs([spec(tiny, ranks_per_replica=2, num_threads=2)])
        async with started(cluster, wanted, deaths) as replica:
            first, second = replica.pids
            assert psutil.Process(first).parents()[1] != psutil.Process(second).parents()[1]
            model = Model(replica)
            await result(model.create())
            await model.train(2)
            assert len((await sampled(replica, request())).tokens()) == 4

            pending = model.backward()
            os.kill(second, signal.SIGKILL)
            async with asyncio.timeout(SECONDS):
                with pytest.raises(RankDied, match=rf"rank 1 of .* \(process {second} on .* was killed by SIGKILL"):
                    while True:
                        await pending
                        pending = model.forward()
            await replica.restart()
            again = Model(replica, "again")
            await result(again.create())
            await again.train(1)
