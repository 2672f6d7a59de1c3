"""Several ranks as one replica: the same numbers as one rank gives, whatever is shared out, and one end for all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from descant.errors import RankDied, ServerError, UserError
from descant.ranks.launch import start_processes
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec, ReplicaSettings
from descant.testing.engine import frozen, request, sampled
from descant.testing.ranks import SETTINGS, changed, tiny_ranks, tiny_replica, written
from descant.testing.scenario import Observations, assert_alike, data, run_scenario, stream
from descant.testing.trainer import Model, datum, error, output, result, text
from descant.types import Version

pytestmark = pytest.mark.crashes

NOTICED_S = 5.0
"""A rank that is dead or stopped is told of within this."""

SETTINGS_32 = changed(SETTINGS, train={"microbatch_tokens": 32})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Observations:
    async def tell() -> Observations:
        async with tiny_replica(tmp_path_factory, settings=SETTINGS_32) as replica:
            return await run_scenario(replica, tmp_path_factory.mktemp("alone"))

    return asyncio.run(tell())


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        pytest.param(2, SETTINGS_32, id="two ranks"),
        pytest.param(3, SETTINGS_32, id="three ranks"),
        pytest.param(2, changed(SETTINGS_32, parallel={"fsdp": True}), id="two ranks, a sharded base"),
        pytest.param(2, changed(SETTINGS_32, offload={"adapter_bytes": 1}), id="two ranks, room for one adapter"),
    ],
)
async def test_several_ranks_give_the_numbers_of_one(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    alone: Observations,
    num_ranks: int,
    settings: ReplicaSettings,
) -> None:
    async with tiny_ranks(tmp_path_factory, num_ranks, settings=settings) as replica:
        assert_alike(await run_scenario(replica, tmp_path), alone)


# ---------------------------------------------------------------------------------------------- one of them goes wrong


@pytest.fixture
async def odd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
    async with tiny_ranks(tmp_path_factory, build="build_odd") as replica:
        yield replica


async def test_what_one_rank_cannot_open_none_has_opened(odd: Replica) -> None:
    model, other = Model(odd, "has no room"), Model(odd, "other")
    await asyncio.gather(result(model.create()), result(other.create()))
    beside = other.backward()
    refused, step = model.backward(data(5, 4, 3)), model.step()
    assert "there is no room here" in str(await error(refused, ServerError))
    assert "there is no room here" in str(await error(step, UserError)), "the step says what is missing"
    assert (await output(beside)).metrics["loss:sum"] > 0
    await result(model.step())  # of nothing: the gradient is cleared on every rank
    await other.train(2)


async def test_a_pass_that_breaks_on_one_rank_breaks_on_all(odd: Replica) -> None:
    model, other = Model(odd, "breaks"), Model(odd, "other")
    await asyncio.gather(result(model.create()), result(other.create()))
    before = await other.loss()
    broken, step = model.backward(data(5, 4, 3)), model.step()
    failure = await error(broken, ServerError)
    assert "RuntimeError" in str(failure)
    assert "secret" not in str(failure)
    assert "seq_id 1" in str(await error(step, UserError))
    assert await other.loss() == before
    await other.train(2)


async def test_a_version_is_pinned_on_all_ranks_or_on_none(odd: Replica) -> None:
    model = Model(odd, "is not pinned")
    await result(model.create())
    ref = await frozen(model, for_disk=False)
    await odd.publish(ref)
    for _ in range(2):
        with pytest.raises(ServerError, match="cannot be read here"):
            await sampled(odd, request(ref.version))
    await odd.release(ref.version)
    await sampled(odd, request())


async def test_requests_move_to_newer_weights_on_all_ranks_or_on_none(odd: Replica) -> None:
    model = Model(odd)
    await result(model.create())
    old = await frozen(model, for_disk=False)
    await odd.publish(old)
    await model.train(1)
    new = await frozen(model, for_disk=False)
    begun, published = 0, asyncio.Event()

    async def watch() -> set[Version | None]:
        nonlocal begun
        versions = set()
        async for delta in odd.sample(request(old.version, max_tokens=100, stream=True, inflight=True)):
            begun += not versions
            versions.add(delta.version)
            if begun == 2 and not published.is_set():
                published.set()
                await odd.publish(new)
        return versions

    assert await asyncio.gather(watch(), watch()) == [{old.version}] * 2, "rank 1 could not have the newer ones"
    assert published.is_set()
    assert (await odd.stats())["versions_pinned"] == 0


async def test_a_rank_that_cannot_sample_fails_its_own_sequences(odd: Replica) -> None:
    """Requests go to the rank with the fewest sequences: the second to rank 1."""
    wanted = [request(prompt=datum(stream(i, 13)).model_input, max_tokens=30) for i in range(2)]
    outcomes = await asyncio.gather(*(sampled(odd, one) for one in wanted), return_exceptions=True)
    assert [isinstance(outcome, ServerError) for outcome in outcomes] == [False, True]
    assert "13 tokens" in str(outcomes[1])
    assert len((await sampled(odd, request())).tokens()) == 4


async def test_a_conversation_stays_on_the_rank_that_has_its_pages(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Though the other one is idle."""
    before = stream(0, 330)
    async with tiny_ranks(tmp_path_factory) as replica:

        async def hits(max_tokens: int, *more: int) -> int:
            got = await sampled(replica, request(prompt=text(*before, *more), max_tokens=max_tokens))
            return got.deltas[0].prompt_cache_hit_tokens

        assert await hits(2) == 0
        beside = asyncio.ensure_future(hits(150, 1))
        assert await hits(2, 2) == 320
        assert not beside.done()
        assert await beside == 320


async def test_ranks_that_are_not_the_same_any_more_end_together(tmp_path_factory: pytest.TempPathFactory) -> None:
    deaths: list[RankDied] = []
    async with tiny_ranks(tmp_path_factory, build="build_odd", on_death=deaths.append) as replica:
        with pytest.raises(RankDied, match=r"rank 1 .*CreateModel of model is alone.*there is no disk here"):
            await result(Model(replica, "is alone").create())
        assert len(deaths) == 1
        await replica.restart()
        await result(Model(replica).create())


async def test_a_step_that_one_rank_cannot_make_leaves_none_waiting(odd: Replica) -> None:
    """The others are where gradients are added up."""
    model = Model(odd, "cannot come back")
    await result(model.create())
    await error(model.backward(), ServerError)  # it could not be opened: nobody has
    with pytest.raises(RankDied, match=r"rank 1 .*OptimStep of model cannot come back failed there alone: its file"):
        async with asyncio.timeout(2 * NOTICED_S):
            await result(model.step())


@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_a_rank_that_cannot_start_says_why(tmp_path_factory: pytest.TempPathFactory, num_ranks: int) -> None:
    with pytest.raises(UserError, match="cannot be served here"):
        async with tiny_ranks(tmp_path_factory, num_ranks, build="build_odd_from_the_start"):
            pass
    assert ranks_and_coordinators() == []


# --------------------------------------------------------------------------------------------------- one of them dies


def ranks_and_coordinators() -> list[int]:
    """Processes that serve replicas of this process, wherever in the tree they are."""
    found = []
    for child in psutil.Process().children(recursive=True):
        words = " ".join(child.cmdline()) if child.status() != psutil.STATUS_ZOMBIE else ""
        if "-m descant.distributed.coordinator.process" in words or "-m descant.ranks.rank_main" in words:
            found.append(child.pid)
    return found


async def test_a_rank_that_stays_away_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = changed(SETTINGS, rank={"turn_timeout_s": 1.0})
    async with tiny_ranks(tmp_path_factory, settings=settings, build="build_odd") as replica:
        model = Model(replica, "sleeps")
        await result(model.create())
        with pytest.raises(RankDied, match=r"rank 1 .*while it ran: a training pass.*did not end within 1\.\d s"):
            await result(model.backward())
    assert ranks_and_coordinators() == []


@pytest.mark.parametrize("when", ["in a turn", "idle"])
@pytest.mark.parametrize("rank", [0, 1], ids=["the leader", "a follower"])
@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "stopped by a signal")],
    ids=["killed", "stopped"],
)
async def test_the_death_of_a_rank_fails_all_and_names_it(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals, says: str, rank: int, when: str
) -> None:
    deaths: list[RankDied] = []
    died = asyncio.Event()

    def on_death(error: RankDied) -> None:
        deaths.append(error)
        died.set()

    async with tiny_ranks(tmp_path_factory, build="build_odd", on_death=on_death) as replica:
        pids = replica.pids
        model = Model(replica, "sleeps")
        await result(model.create())
        pending = []
        if when == "in a turn":  # rank 1 computes for ever, and rank 0 waits for it
            pending.append(model.backward())
            while "a training pass" not in replica.running():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)
        os.kill(pids[rank], number)
        async with asyncio.timeout(NOTICED_S + 5.0):  # a busy machine gets the benefit of the doubt
            await died.wait()
        assert f"rank {rank} " in str(deaths[0])
        assert says in str(deaths[0])
        for future in pending:
            with pytest.raises(RankDied, match=says):
                await future
        assert not any(map(psutil.pid_exists, pids))
        await replica.restart()
        again = Model(replica, "again")
        await result(again.create())
        await again.train(1)
    assert ranks_and_coordinators() == []


async def forever(model: Model) -> None:
    while True:
        await result(model.forward())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_without_a_coordinator_there_is_no_replica(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    async with tiny_ranks(tmp_path_factory) as replica:
        model = Model(replica)
        await result(model.create())
        (coordinator,) = ranks_and_coordinators()
        os.kill(coordinator, number)
        with pytest.raises(RankDied, match="the coordinator"):
            await asyncio.wait_for(forever(model), 2 * NOTICED_S)
        await replica.restart()
        await result(model.create())
    assert ranks_and_coordinators() == []


async def test_ranks_in_processes_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As a server starts them: what a rank printed before it died is in the message of a start that failed."""
    spec = RankSpec(
        model=str(written(tmp_path_factory)),
        settings=changed(SETTINGS, parallel={"data_parallel_size": 2}),
        build="descant.testing.ranks:build_tiny",
    )
    replica = await Replica.start(spec, launch=start_processes)
    await result(Model(replica).create())
    assert len(replica.pids) == 2
    await replica.close()
    with pytest.raises(ServerError, match=r"(?s)rank [01] .*looking for trouble.*about to crash"):
        await Replica.start(replace(spec, build="descant.testing.faults:build_crashing"))
    assert ranks_and_coordinators() == []
