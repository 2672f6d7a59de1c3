"""The executors keep their promises: a fake, one rank, and several (here as threads) behind one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from descant.ranks.channel import TurnStatus
from descant.ranks.executor import Executor
from descant.ranks.ops import Stop
from descant.ranks.peers import Peers
from descant.ranks.settings import RankSpec
from descant.ranks.spmd import SpmdExecutor, run_follower
from descant.testing.executor import ExecutorSuite
from descant.testing.fake_executor import FakeExecutor
from descant.testing.peers import DEADLINE_S, ThreadPeers
from descant.testing.ranks import SETTINGS, build_tiny, written


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RankSpec:
    return RankSpec(model=str(written(tmp_path_factory)), settings=SETTINGS)


class TestFakeExecutor(ExecutorSuite):
    @pytest.fixture
    def executor(self) -> Executor:
        return FakeExecutor()


class TestWorker(ExecutorSuite):
    @pytest.fixture
    def executor(self, spec: RankSpec) -> Executor:
        return build_tiny(spec, lambda phase: None, Peers())


class TestSpmd(ExecutorSuite):
    @pytest.fixture(params=[2, 3], ids=["two ranks", "three ranks"])
    def executor(self, request: pytest.FixtureRequest, spec: RankSpec) -> Iterator[Executor]:
        leader, *others = ThreadPeers.among(request.param)
        failures: list[BaseException] = []

        def run(peers: ThreadPeers) -> None:
            try:
                run_follower(build_tiny(spec, lambda phase: None, peers), peers, TurnStatus())
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=run, args=(peers,), daemon=True) for peers in others]
        for thread in threads:
            thread.start()
        executor = SpmdExecutor(build_tiny(spec, lambda phase: None, leader), leader)
        yield executor
        executor.execute(Stop())
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)
