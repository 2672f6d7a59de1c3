"""A real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
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


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Any]:
    """Two nodes of two CPUs each."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'descant[ray]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=node)
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
