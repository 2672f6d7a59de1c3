"""A real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from descant.ranks.ray_cluster import RayCluster
from descant.ranks.settings import RaySettings
from descant.testing.tiny import tiny_model

STORE_BYTES = 80 << 20
"""The least that Ray takes for its object store, which nothing here uses."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)


PART_S = 240
"""No test takes longer, nor does its setup or teardown. Ray has waits without an end, in asyncio and outside of it."""


@contextmanager
def deadline() -> Iterator[None]:
    """In the main thread. Prints where everybody waits, and fails."""

    def over(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:  # no event loop runs
            tasks = set()
        for task in tasks:
            task.print_stack(file=sys.__stderr__)
        pytest.fail(f"not done after {PART_S} s; what waits is in the captured output")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(PART_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with deadline():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with deadline():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    with deadline():
        return (yield)


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Any]:
    """Two nodes of two CPUs each."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}  # both are read on import
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'descant[ray]'")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": STORE_BYTES}
    # A second cluster on this machine could not have the dashboard's and its agent's fixed ports.
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**node, "include_dashboard": False, "dashboard_agent_listen_port": None},
    )
    try:
        cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


Join = Callable[..., AbstractAsyncContextManager[RayCluster]]


@pytest.fixture(scope="session")
def join(two_nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Join:
    """``async with join() as cluster``: as a server joins it."""

    @asynccontextmanager
    async def joined(*, data_dir: Path | None = None, placement_timeout_s: float = 60.0) -> AsyncIterator[RayCluster]:
        settings = RaySettings(address=two_nodes.address, placement_timeout_s=placement_timeout_s)
        cluster = await RayCluster.connect(settings, data_dir=data_dir or tmp_path_factory.mktemp("data"))
        try:
            yield cluster
        finally:
            await cluster.close()

    return joined
