"""A rank that dies is started again: when, and what its owner is told before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from descant import app
from descant.config import Settings, load_settings
from descant.errors import ServerError, UserError
from descant.ranks.placement import rank_specs
from descant.testing.clock import FakeClock, settle


class Rank:
    """Told to die, it is lost and comes back after as many failed starts as it is told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.died = asyncio.Event()
        self.failures = 0
        self.alive = True
        self.told: list[tuple[str, float]] = []
        self._began = self.clock.now()

    async def lose(self) -> None:
        self.told.append(("lost", self.clock.now() - self._began))
        if self.failures < 0:
            raise RuntimeError("the database is gone")

    async def restart(self) -> None:
        self.told.append(("start", self.clock.now() - self._began))
        if self.failures > 0:
            self.failures -= 1
            raise ServerError("it did not come up")
        self.alive = True

    async def kill(self, *, failures: int = 0) -> None:
        assert self.alive
        self.alive, self.failures, self.told, self._began = False, failures, [], self.clock.now()
        self.died.set()
        await settle()


@pytest.fixture
async def rank() -> AsyncIterator[Rank]:
    rank = Rank()
    keeper = asyncio.create_task(
        app.keep_alive(rank.died, lose=rank.lose, restart=rank.restart, name="the rank", clock=rank.clock)
    )
    await settle()
    yield rank
    keeper.cancel()
    await asyncio.wait([keeper])


async def test_after_a_long_life_it_is_started_at_once(rank: Rank) -> None:
    await rank.clock.advance(61)
    await rank.kill()
    assert rank.told == [("lost", 0), ("start", 0)]


@pytest.mark.parametrize(
    ("failures", "starts"),
    [
        pytest.param(0, [0], id="no failure"),
        pytest.param(3, [0, 1, 3, 7], id="three failures"),
        pytest.param(9, [0, 1, 3, 7, 15, 31, 63, 123, 183, 243], id="never more than a minute"),
    ],
)
async def test_pauses_grow_from_one_failed_start_to_the_next(rank: Rank, failures: int, starts: Sequence[int]) -> None:
    await rank.clock.advance(61)
    await rank.kill(failures=failures)
    await rank.clock.advance(1000)
    assert rank.told == [("lost", 0), *(("start", at) for at in starts)]
    assert rank.alive


async def test_pauses_grow_from_one_early_death_to_the_next_and_are_forgotten(rank: Rank) -> None:
    for pause in (1, 2, 4):
        await rank.kill()
        assert rank.told == [("lost", 0)]
        await rank.clock.advance(5)
        assert rank.told == [("lost", 0), ("start", pause)]
    await rank.clock.advance(61)
    await rank.kill()
    assert rank.told == [("lost", 0), ("start", 0)]


async def test_it_is_started_even_if_nobody_could_be_told(rank: Rank) -> None:
    await rank.clock.advance(61)
    await rank.kill(failures=-1)
    assert rank.alive


# --------------------------------------------------------------------------------------------------------------------


def keeper(settings: Settings) -> app.Keeper:
    settings = replace(settings, rank=replace(settings.rank, replicas=2))
    specs = rank_specs(app.base_spec("m", settings), gpus=(), num_cores=1)
    return app.Keeper(specs, launch=app.ThisMachine(()).start, clock=FakeClock(), data_dir=settings.data_dir)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    keeping = keeper(load_settings(base=Settings(data_dir=tmp_path)))
    assert not keeping.serving
    assert keeping.missing == "the rank of replica 0 of m and the rank of replica 1 of m are being started again"


async def test_more_replicas_than_gpus_are_refused(tmp_path: Path) -> None:
    settings = load_settings(None, ["rank.replicas=2"], base=Settings(data_dir=tmp_path))
    with pytest.raises(UserError, match=r"rank\.replicas is 2"):
        await app.ThisMachine(("0",)).specs([app.base_spec("m", settings)])


async def test_bases_divide_the_gpus(tmp_path: Path) -> None:
    settings = load_settings(base=Settings(data_dir=tmp_path))
    specs = await app.ThisMachine(("0", "1", "2")).specs([app.base_spec(name, settings) for name in ("m", "n")])
    visible = [[spec.gpus for spec in of_base] for of_base in specs]
    assert visible == [[("0",), ("1",)], [("2",)]]


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "mps"])
def test_gpus_are_not_asked_for_where_none_is_wanted(device: str) -> None:
    assert app.visible_gpus(device) == ()
