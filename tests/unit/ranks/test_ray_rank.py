"""A rank on another machine without Ray: its host in a thread of this process, and connections that are nobody's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import descant
from descant.distributed.coordinator.process import Rendezvous
from descant.distributed.frames import pack
from descant.errors import ServerError, UserError
from descant.ranks.channel import encode
from descant.ranks.ray_cluster import RayCluster
from descant.ranks.ray_host import HostConfig, RankHost
from descant.ranks.ray_rank import RayRank
from descant.ranks.settings import RaySettings
from descant.testing.server import START_S

SECONDS = 5.0


@pytest.fixture
async def rank() -> AsyncIterator[RayRank]:
    rank = RayRank(name="the rank of m")
    yield rank
    rank.close()


async def hosted(rank: RayRank, tmp_path: Path, **changes: Any) -> asyncio.Future[None]:
    """Starts a host in a thread; the end of its work."""
    (tmp_path / "probe").write_text("this")
    order = HostConfig(
        **{
            "address": await rank.listen("127.0.0.1"),
            "token": rank.token,
            "probe": (str(tmp_path / "probe"), "this"),
            "version": descant.__version__,
            **changes,
        }
    )
    run = asyncio.ensure_future(asyncio.to_thread(RankHost().run, order))
    rank.set_host(run, end=lambda: asyncio.ensure_future(asyncio.sleep(0)))
    return run


async def until(true: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not true():  # noqa: ASYNC110 - another process makes it so
            await asyncio.sleep(0.02)


async def test_a_host_tells_how_its_rank_is_and_how_it_ended(rank: RayRank, tmp_path: Path) -> None:
    run = await hosted(rank, tmp_path)
    await rank.connected(timeout_s=START_S)
    process = psutil.Process(rank.pid)
    assert process.ppid() == os.getpid()
    assert (rank.node, rank.address) == (socket.gethostname(), "127.0.0.1")
    rank.begin("no assignment", lambda message: None)  # type: ignore[arg-type]  # it waits for one, and ends
    assert await rank.exited() == f"(process {process.pid} on {rank.node}) exited with code 0"
    await asyncio.wait_for(run, SECONDS)
    assert not process.is_running()


async def test_a_rank_that_is_stopped_and_then_ended(rank: RayRank, tmp_path: Path) -> None:
    run = await hosted(rank, tmp_path)
    await rank.connected(timeout_s=START_S)
    assert not rank.is_stopped()
    os.kill(rank.pid, signal.SIGSTOP)
    await until(rank.is_stopped)
    os.kill(rank.pid, signal.SIGCONT)
    await until(lambda: not rank.is_stopped())
    os.kill(rank.pid, signal.SIGSTOP)
    rank.begin("no assignment", lambda message: None)  # type: ignore[arg-type]
    rank.kill()
    assert await rank.exited() == f"(process {rank.pid} on {rank.node}) was killed by SIGKILL"
    await asyncio.wait_for(run, SECONDS)


async def test_a_rank_ends_with_its_server(rank: RayRank, tmp_path: Path) -> None:
    run = await hosted(rank, tmp_path)
    await rank.connected(timeout_s=START_S)
    process = psutil.Process(rank.pid)
    rank.close()
    await asyncio.wait_for(run, SECONDS)
    assert not process.is_running()


async def test_a_host_watches_its_machine_for_the_coordinator(rank: RayRank, tmp_path: Path) -> None:
    await hosted(rank, tmp_path)
    await rank.connected(timeout_s=START_S)
    heard: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def coordinator(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = int.from_bytes(await reader.readexactly(4), "big")
        heard.set_result(json.loads(await reader.readexactly(length)))
        writer.close()

    async with await asyncio.start_server(coordinator, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        rank.watch(
            Rendezvous(host=host, port=port, token="secret", world=2, directory="/", pid=1, node="another machine")
        )
        hello = await asyncio.wait_for(heard, SECONDS)
    assert hello[0] == "hello"
    assert (hello[1]["role"], hello[1]["token"]) == ("watcher", "secret")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"version": "0"}, "it has Descant .*, the server has 0", id="another version"),
        pytest.param({"probe": ("/nowhere/x", "this")}, "does not see the server's data_dir /nowhere", id="no file"),
        pytest.param(
            {"probe": ("/proc/self/comm", "x")}, "does not see the server's data_dir /proc", id="another file"
        ),
    ],
)
async def test_a_host_that_cannot_start_says_why(
    rank: RayRank, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    run = await hosted(rank, tmp_path, **changes)
    with pytest.raises(ServerError, match=f"the rank of m could not be started on the Ray cluster: .*{says}"):
        await rank.connected(timeout_s=START_S)
    await asyncio.wait_for(run, SECONDS)


async def test_a_host_that_never_comes(rank: RayRank) -> None:
    await rank.listen("127.0.0.1")
    never = asyncio.get_running_loop().create_future()
    rank.set_host(never, end=lambda: never)
    with pytest.raises(ServerError, match=r"could not be started .* its host did not connect within 0\.01 s"):
        await rank.connected(timeout_s=0.01)


# ------------------------------------------------------------------------------------------------------------ refused


class Exploding:
    def __reduce__(self) -> Any:
        return os.abort, ()


async def test_who_does_not_show_the_token_is_not_listened_to(rank: RayRank) -> None:
    """Nothing of it is unpickled."""
    host, port = await rank.listen("127.0.0.1")
    for first in (
        pack(["hello", {"token": "0" * 32, "role": "channel"}]),
        pack(["hello", {"token": rank.token, "role": "somebody"}]),
        pack(["hello", rank.token]),
        pack(["hello", {"token": "0" * 32, "role": "channel"}]) + encode(Exploding()),
        encode(Exploding()),
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(first)
        assert await asyncio.wait_for(_rest(reader), SECONDS) == b"", "it is closed"
        writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:  # closed with something unread
        return b""


async def test_a_second_connection_is_refused(rank: RayRank, tmp_path: Path) -> None:
    await hosted(rank, tmp_path)
    assert rank._listener is not None
    host, port = rank._listener.sockets[0].getsockname()
    await until(lambda: "host" in rank._writers)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(pack(["hello", {"token": rank.token, "role": "host"}]))
    assert await asyncio.wait_for(_rest(reader), SECONDS) == b""
    writer.close()
    await rank.connected(timeout_s=START_S)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:9", "no Ray cluster at ray.address '127.0.0.1:9'"),
        ("ray://127.0.0.1:10001", "expected host:port"),
        ("somewhere", "expected host:port"),
    ],
)
async def test_a_cluster_that_is_not_there_is_refused(address: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        await RayCluster.connect(RaySettings(address=address), data_dir=tmp_path)


async def test_without_ray_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'descant\[ray\]'"):
        await RayCluster.connect(RaySettings(address="auto"), data_dir=tmp_path)
