"""A rank in a process of its own: what happens when it dies, stalls, cannot start, or loses its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import uvloop

from descant.errors import NotFound, Overloaded, RankDied, ServerError, UserError
from descant.ports import Progress
from descant.ranks.channel import ServerChannel
from descant.ranks.ops import RankRequest, Stop
from descant.ranks.rank_main import rank_environment
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec
from descant.testing.engine import request, sampled
from descant.testing.ranks import SETTINGS, changed
from descant.testing.tiny import tiny_model
from descant.testing.trainer import Model, result
from descant.types import Lora, SnapshotRef, Version

pytestmark = pytest.mark.crashes

SECONDS = 10.0
"""Failures must be told well within this; a busy machine gets the benefit of the doubt."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def spec(tiny: Path, build: str = "build_tiny") -> RankSpec:
    return RankSpec(model=str(tiny), settings=SETTINGS, build=f"descant.testing.ranks:{build}")


def test_a_rank_finds_what_its_caller_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Itself first, then what it is told, then what the caller's environment says."""
    monkeypatch.setenv("PYTHONPATH", "/callers")
    own, told, callers = rank_environment({"PYTHONPATH": "/told"})["PYTHONPATH"].split(os.pathsep)
    assert (told, callers) == ("/told", "/callers")
    assert (Path(own) / "descant").is_dir()
    monkeypatch.delenv("PYTHONPATH")
    assert rank_environment({})["PYTHONPATH"] == own


def faulty(build: str, **rank: float) -> RankSpec:
    return RankSpec(
        model="x",
        settings=changed(SETTINGS, rank=rank),
        build=f"descant.testing.faults:{build}",
    )


async def running(replica: Replica, text: str) -> None:
    """Until the rank's turn status says so."""
    while text not in replica.running():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)


async def gone(pid: int) -> None:
    """Until a process that may be nobody's child has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.Process(pid).wait, SECONDS)


@contextlib.asynccontextmanager
async def started(wanted: RankSpec, deaths: list[RankDied] | None = None) -> AsyncIterator[Replica]:
    replica = await Replica.start(wanted, on_death=None if deaths is None else deaths.append)
    try:
        yield replica
    finally:
        pids = replica.pids
        await replica.close()
        assert not any(map(psutil.pid_exists, pids))


REF = SnapshotRef(
    version=Version(model_id="model", number=1),
    kind="sampler",
    trainable=Lora(),
    step=0,
    applied_seq_id=1,
    has_pending_gradient=False,
)


async def test_a_rank_serves_dies_and_is_restarted(tiny: Path) -> None:
    deaths: list[RankDied] = []
    async with started(spec(tiny), deaths) as replica:
        model = Model(replica)
        (first,) = replica.pids
        for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server: it decides when the rank ends
            os.kill(first, number)
        await result(model.create())
        await model.train(1)
        assert len((await sampled(replica, request())).tokens()) == 4
        with pytest.raises(ServerError, match="nothing to restart"):
            await replica.restart()

        pending = [model.backward(), model.step()]
        streams = [asyncio.ensure_future(sampled(replica, request(max_tokens=400))) for _ in range(2)]
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            outcomes = await asyncio.gather(*pending, *streams, return_exceptions=True)
        died = [outcome for outcome in outcomes if isinstance(outcome, RankDied)]
        assert died
        assert all("SIGKILL" in str(error) and str(first) in str(error) for error in died)
        assert [str(death) for death in deaths] == [str(died[0])]
        assert not replica.alive

        with pytest.raises(RankDied):  # at once, for it is lost
            await model.forward()
        with pytest.raises(Overloaded):  # who has its weights in a file publishes them first
            await sampled(replica, request(version=REF.version))
        with pytest.raises(RankDied):
            await replica.publish(REF)
        await replica.release(REF.version)
        await replica.drop(REF)

        # What needs nothing of the rank that died waits for the next.
        again = Model(replica, "again")
        created, trained = again.create(), again.backward()
        waiting = asyncio.ensure_future(sampled(replica, request()))
        await asyncio.sleep(0)
        assert "waiting to be started" in replica.running()
        assert not created.done()
        assert replica.num_served > 0, "of the rank that died"
        await replica.restart()
        await asyncio.gather(created, trained)
        assert len((await waiting).tokens()) == 4
        with pytest.raises(NotFound):
            await result(model.forward())
        await result(again.step())
        await again.train(1)

        os.kill(replica.pids[0], signal.SIGSTOP)
        await asyncio.sleep(3 * SETTINGS.rank.stopped_grace_s)
        assert replica.health.state == "stopped"
        os.kill(replica.pids[0], signal.SIGCONT)
        await again.train(1)  # nobody waited meanwhile, so nothing was lost
        assert len(deaths) == 1

        os.kill(replica.pids[0], signal.SIGSTOP)
        stalled = again.forward()
        async with asyncio.timeout(SECONDS):
            with pytest.raises(RankDied, match="stopped by a signal"):
                await stalled
        assert len(deaths) == 2


async def test_what_waits_for_a_rank_does_so_over_failed_starts_and_not_for_ever(tiny: Path) -> None:
    deaths: list[RankDied] = []
    wait_s = 3 * SECONDS  # a start takes as long where cores are busy
    settings = changed(SETTINGS, rank={"start_timeout_s": wait_s})
    async with started(replace(spec(tiny), settings=settings), deaths) as replica:
        (pid,) = replica.pids
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        while not deaths:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waits = Model(replica, "waits").create()
        restarting = asyncio.ensure_future(replica.restart())
        while not replica.pids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(replica.pids[0], signal.SIGKILL)
        with pytest.raises(ServerError):
            await restarting
        assert not waits.done()
        with pytest.raises(RankDied, match=f"waited for for {wait_s:g} s"):
            await waits
        late = Model(replica, "late").create()
        await replica.close()
        with pytest.raises(RankDied, match="the server stops"):
            await late


async def test_a_turn_that_takes_too_long_is_ended_and_named(tiny: Path) -> None:
    slow = spec(tiny, "build_slow")
    async with started(replace(slow, settings=changed(slow.settings, rank={"turn_timeout_s": 1.0})), []) as replica:
        model = Model(replica)
        await result(model.create())
        pending = model.backward()
        async with asyncio.timeout(SECONDS):
            await running(replica, "a training pass of 2 datums, 8 tokens, for 1 models")
            assert isinstance(replica, Progress)
            with pytest.raises(RankDied, match=r"silent for 1 s while it ran: a training pass of 2 datums"):
                await pending


async def test_close_ends_what_is_pending_and_is_no_death(tiny: Path) -> None:
    deaths: list[RankDied] = []
    async with started(spec(tiny, "build_slow"), deaths) as replica:
        model = Model(replica)
        await result(model.create())
        pending = model.backward()
        async with asyncio.timeout(SECONDS):
            await running(replica, "a training pass")
            await replica.close()
            with pytest.raises(RankDied):
                await pending
            with pytest.raises(RankDied):
                await model.forward()
        assert deaths == []


@pytest.mark.parametrize(
    ("wanted", "kind", "told"),
    [
        (faulty("build_crashing"), ServerError, r"(?s)SIGABRT while it ran: looking for trouble.*about to crash"),
        (faulty("build_refusing"), UserError, r"^x cannot be served$"),
        (faulty("build_raising"), ServerError, r"ZeroDivisionError while dividing"),
        (faulty("build_hanging", start_timeout_s=15.0), ServerError, r"not ready after 15 s: it was waiting for ever"),
        (faulty("build_missing"), ServerError, r"AttributeError while importing"),
    ],
)
async def test_a_start_that_fails_says_in_which_phase(wanted: RankSpec, kind: type[Exception], told: str) -> None:
    deaths: list[RankDied] = []
    with pytest.raises(kind, match=told):
        await Replica.start(wanted, on_death=deaths.append)
    assert deaths == []


PARENT = """
import asyncio, sys
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec, ReplicaSettings

async def main():
    spec = RankSpec(model=sys.argv[1], settings=ReplicaSettings(), build=sys.argv[2])
    await Replica.start(spec, on_phase=lambda phase: print(phase, flush=True))
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("number", "build", "phase"),
    [
        pytest.param(signal.SIGTERM, "descant.testing.ranks:build_tiny", "ready", id="ready, terminated"),
        pytest.param(signal.SIGKILL, "descant.testing.faults:build_hanging", "waiting for ever", id="starting, killed"),
    ],
)
async def test_a_rank_never_outlives_its_server(tiny: Path, number: signal.Signals, build: str, phase: str) -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tiny), build, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    async with asyncio.timeout(120):
        while (await server.stdout.readline()).decode().strip() != phase:
            pass
    (rank,) = psutil.Process(server.pid).children()
    server.send_signal(number)
    await server.wait()
    await gone(rank.pid)


async def test_the_servers_side_loads_no_torch() -> None:
    code = (
        "import sys, descant.ranks.replica as _; print(sorted({'torch', 'transformers', 'peft'} & sys.modules.keys()))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    stdout, _ = await process.communicate()
    assert stdout.decode().strip() == "[]"


def test_what_is_sent_to_a_rank_that_has_just_ended_waits_for_the_news_of_it() -> None:
    """On the server's own event loop, whose transports raise when they are closed."""

    async def send() -> None:
        here, there = socket.socketpair()
        channel = await ServerChannel.open(here, lambda _: None)
        there.close()
        await channel.closed
        for _ in range(3):
            channel.send(RankRequest(id=1, op=Stop()))
            await asyncio.sleep(0.01)
        channel.close()
        channel.send(RankRequest(id=1, op=Stop()))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(send())
