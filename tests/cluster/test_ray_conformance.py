"""The suites of ``Trainer`` and ``Engine`` on ranks that a Ray cluster has placed, one and two a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec
from descant.service.backends import Backend
from descant.testing.cleanup import SharedReplica
from descant.testing.engine import EngineSuite
from descant.testing.ranks import SETTINGS, changed
from descant.testing.trainer import TrainerSuite

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[1, 2], ids=["one rank", "two ranks"])
async def replica(request: pytest.FixtureRequest, join: Any, tiny: Path) -> AsyncIterator[Replica]:
    settings = changed(SETTINGS, parallel={"data_parallel_size": request.param})
    wanted = RankSpec(model=str(tiny), settings=settings, build="descant.testing.ranks:build_tiny")
    async with join() as cluster:
        [[spec]] = await cluster.specs([wanted])
        replica = await Replica.start(spec, launch=cluster.start)
        try:
            yield replica
        finally:
            await replica.close()


@pytest_asyncio.fixture(loop_scope="module")
async def trainer(replica: Replica) -> AsyncIterator[SharedReplica]:
    shared = SharedReplica(replica)
    yield shared
    await shared.clean_up()


@pytest_asyncio.fixture(loop_scope="module")
async def backend(trainer: SharedReplica) -> Backend:
    return Backend(facts=trainer.facts, trainer=trainer, engine=trainer)


class TestTrainer(TrainerSuite):
    pass


class TestEngine(EngineSuite):
    pass
