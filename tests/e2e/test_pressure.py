"""More than there is room for, and clients that go: the unmodified SDK over real sockets, in processes that die."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from descant.testing.server import END_S, Server, serve
from descant.testing.tiny import tiny_model

KEY = "tml-alice"
SETTINGS = (
    "rank.device=cpu",
    "rank.dtype=float32",
    "rank.max_running=4",
    "service.max_samples_in_flight=40",
)

MANY = """
import sys, tinker
from tinker import types
url, model, count = sys.argv[1:]
client = tinker.ServiceClient(base_url=url, api_key="tml-alice").create_sampling_client(base_model=model).result()
params = types.SamplingParams(max_tokens=450, seed=1, stop=[])
prompt = types.ModelInput.from_ints([5, 6, 7])
futures = [client.sample(prompt, num_samples=8, sampling_params=params) for _ in range(int(count))]
print("sent", flush=True)
[future.result() for future in futures]
"""
"""Minutes of work for four sequences at once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(Path(model), tmp_path_factory.mktemp("server") / "data", *SETTINGS) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def numbers(server: Server) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", headers={"x-api-key": KEY}, timeout=END_S, trust_env=False).text
    pairs = [line.rsplit(" ", 1) for line in text.splitlines()]
    return {name.partition("{")[0].removeprefix("descant_"): float(value) for name, value in pairs}


def until(fact: Callable[[], bool], what: str) -> float:
    """Seconds until it held."""
    start = time.monotonic()
    while not fact():
        assert time.monotonic() - start < END_S, f"{what}: not after {END_S} s"
        time.sleep(0.01)
    return time.monotonic() - start


def sampled(url: str, model: str, count: int, max_tokens: int = 8) -> list[types.SampleResponse]:
    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_sampling_client(base_model=model).result(END_S)
        params = types.SamplingParams(max_tokens=max_tokens, seed=1, stop=[])
        prompt = types.ModelInput.from_ints([5, 6, 7])
        futures = [client.sample(prompt, num_samples=1, sampling_params=params) for _ in range(count)]
        return [future.result(END_S) for future in futures]


def test_the_sdk_comes_back_when_the_server_is_full(server: Server, model: str) -> None:
    answers = sampled(server.url, model, 120)
    assert [len(answer.sequences[0].tokens) for answer in answers] == [8] * 120
    assert numbers(server)["samples_in_flight"] == 0


def test_a_client_that_is_killed_holds_nothing(server: Server, model: str) -> None:
    """Its process is gone with its connections, so the server can know at once: its requests are given up half a second
    later. Another client does not notice, and what was full has room."""
    command = [sys.executable, "-c", MANY, server.url, model, "40"]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "sent\n"
        until(lambda: numbers(server)["samples_in_flight"] == 40 and numbers(server)["sample_running"] == 4, "running")
        full = httpx.post(
            f"{server.url}/api/v1/create_session", json={}, headers={"x-api-key": KEY}, timeout=END_S, trust_env=False
        )
        other = full.json()["session_id"]
        sampler = httpx.post(
            f"{server.url}/api/v1/create_sampling_session",
            json={"session_id": other, "sampling_session_seq_id": 0, "base_model": model},
            headers={"x-api-key": KEY},
            timeout=END_S,
            trust_env=False,
        ).json()["sampling_session_id"]
        body = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 1},
        }
        refused = httpx.post(
            f"{server.url}/api/v1/asample", json=body, headers={"x-api-key": KEY}, timeout=END_S, trust_env=False
        )
        assert refused.status_code == 429
        assert 0 < float(refused.headers["retry-after"]) <= 60
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait(END_S)
    seconds = until(lambda: numbers(server)["samples_in_flight"] == numbers(server)["sample_running"] == 0, "given up")
    print(f"\nrooms were free {1000 * seconds:.0f} ms after the client had been killed")
    after = numbers(server)
    assert after["sample_waiting"] == after["sample_used_pages"] == after["versions_pinned"] == 0
    assert len(sampled(server.url, model, 1)[0].sequences[0].tokens) == 8


def test_a_sampling_future_that_is_cancelled_ends(server: Server, model: str) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        client = service.create_sampling_client(base_model=model).result(END_S)
        params = types.SamplingParams(max_tokens=450, seed=1, stop=[])

        prompt = types.ModelInput.from_ints([5, 6, 7])

        async def cancelled() -> None:
            async def ask() -> None:
                await client.sample(prompt, num_samples=64, sampling_params=params)

            tasks = [asyncio.create_task(ask()) for _ in range(4)]
            await asyncio.to_thread(until, lambda: numbers(server)["samples_in_flight"] == 4, "running")
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

        asyncio.run(asyncio.wait_for(cancelled(), END_S))
        until(lambda: numbers(server)["samples_in_flight"] == numbers(server)["sample_running"] == 0, "cancelled")


class Wire:
    """A line to the server that can be cut: connections break, and new ones are refused until it is mended."""

    def __init__(self, server: Server):
        address = httpx.URL(server.url)
        self._target = address.host, address.port
        self._connections: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)
        self._thread.start()
        assert self._listening.wait(END_S)

    async def _listen(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        listener = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        self._listening.set()
        await self._over.wait()
        listener.close()
        await self._break()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._target)
        copies = {asyncio.create_task(_copy(reader, back)), asyncio.create_task(_copy(there, writer))}
        self._connections |= copies
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        self._connections -= copies
        for copy in copies:
            copy.cancel()
        for end in (writer, back):
            end.transport.abort()

    async def _break(self) -> None:
        for copy in self._connections:
            copy.cancel()

    def cut(self) -> None:
        self._is_cut = True
        asyncio.run_coroutine_threadsafe(self._break(), self._loop).result(END_S)

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(END_S)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


def test_a_client_whose_line_was_cut_sends_again_what_was_given_up(server: Server, model: str) -> None:
    wire = Wire(server)
    try:
        with tinker.ServiceClient(base_url=wire.url, api_key=KEY) as service:
            client = service.create_sampling_client(base_model=model).result(END_S)
            params = types.SamplingParams(max_tokens=100, seed=1, stop=[])
            future = client.sample(types.ModelInput.from_ints([5, 6, 7]), num_samples=40, sampling_params=params)
            until(lambda: numbers(server)["sample_running"] == 4, "running")
            wire.cut()
            until(lambda: numbers(server)["samples_in_flight"] == 0, "given up")
            wire.mend()
            answer = future.result(END_S)
    finally:
        wire.close()
    assert [len(sequence.tokens) for sequence in answer.sequences] == [100] * 40
