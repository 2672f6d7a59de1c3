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
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from descant.testing.server import END_S, Server, sent, serve
from descant.testing.tiny import tiny_model

KEY = "tml-alice"
SETTINGS = (
    "rank.device=cpu",
    "rank.dtype=float32",
    "sample.max_num_seqs=4",
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
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.partition("{")[0].removeprefix("descant_"): float(value) for name, value in pairs}


def nothing_runs(server: Server) -> bool:
    return numbers(server)["samples_in_flight"] == numbers(server)["sample_running"] == 0


def post(server: Server, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    url, headers = f"{server.url}/api/v1/{path}", {"x-api-key": KEY, **(headers or {})}
    return httpx.post(url, json=body, headers=headers, timeout=END_S, trust_env=False)


def sampling_session(server: Server, model: str) -> str:
    session = post(server, "create_session", {}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": model}
    return post(server, "create_sampling_session", body).json()["sampling_session_id"]


def asked(sampler: str, seq_id: int = 0, *, num_samples: int = 1, max_tokens: int = 450) -> dict[str, Any]:
    """The body of an ``asample``."""
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": num_samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": max_tokens, "stop": []},
    }


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
    """Its process is gone with its connections, so the server can know at once: its requests are abandoned half a
    second later. Another client does not notice, and what was full has room."""
    command = [sys.executable, "-c", MANY, server.url, model, "40"]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "sent\n"
        until(lambda: numbers(server)["samples_in_flight"] == 40 and numbers(server)["sample_running"] == 4, "running")
        refused = post(server, "asample", asked(sampling_session(server, model), max_tokens=1))
        assert refused.status_code == 429
        assert 0 < float(refused.headers["retry-after"]) <= 60
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait(END_S)
    seconds = until(lambda: nothing_runs(server), "abandoned")
    print(f"\nrooms were free {1000 * seconds:.0f} ms after the client had been killed")
    after = numbers(server)
    assert after["sample_waiting"] == after["sample_used_pages"] == after["versions_pinned"] == 0
    assert len(sampled(server.url, model, 1)[0].sequences[0].tokens) == 8


def test_a_sampling_future_that_is_cancelled_ends(server: Server, model: str) -> None:
    """While the SDK waits for it. A cancel that comes as an answer arrives can be lost in the transport of the SDK;
    then it waits on for a result that nobody wants, and no server can know."""
    params = types.SamplingParams(max_tokens=450, seed=1, stop=[])
    prompt = types.ModelInput.from_ints([5, 6, 7])
    with wired(server, model) as (wire, client):

        async def cancelled() -> None:
            async def ask() -> None:
                await client.sample(prompt, num_samples=64, sampling_params=params)

            tasks = [asyncio.create_task(ask()) for _ in range(4)]
            await asyncio.to_thread(until, lambda: wire.polls == 4, "waiting")
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

        asyncio.run(asyncio.wait_for(cancelled(), END_S))
        until(lambda: nothing_runs(server), "cancelled")


class Wire:
    """A line to the server that can be cut: connections break, and new ones are refused until it is mended. And it can
    hold answers back. ``polls``: how many waits for a result have passed."""

    def __init__(self, server: Server):
        address = httpx.URL(server.url)
        self._target = address.host, address.port
        self._connections: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self.polls = 0
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)
        self._thread.start()
        assert self._listening.wait(END_S)

    async def _listen(self) -> None:
        self._loop, self._over, self._answers = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._answers.set()
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
        copies = {asyncio.create_task(self._ask(reader, back)), asyncio.create_task(self._answer(there, writer))}
        self._connections |= copies
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        self._connections -= copies
        for copy in copies:
            copy.cancel()
        for end in (writer, back):
            end.transport.abort()

    async def _ask(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await client.read(1 << 16):
                server.write(data)
                await server.drain()
                self.polls += data.count(b"POST /api/v1/retrieve_future ")

    async def _answer(self, server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await server.read(1 << 16):
                await self._answers.wait()
                client.write(data)
                await client.drain()

    async def _break(self) -> None:
        for copy in self._connections:
            copy.cancel()

    def cut(self) -> None:
        self._is_cut = True
        asyncio.run_coroutine_threadsafe(self._break(), self._loop).result(END_S)

    def mend(self) -> None:
        self._is_cut = False

    def hold(self) -> None:
        self._loop.call_soon_threadsafe(self._answers.clear)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._answers.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(END_S)


@contextlib.contextmanager
def wired(server: Server, model: str) -> Iterator[tuple[Wire, tinker.SamplingClient]]:
    """A client of the base model behind a line of its own."""
    wire = Wire(server)
    try:
        with tinker.ServiceClient(base_url=wire.url, api_key=KEY) as service:
            yield wire, service.create_sampling_client(base_model=model).result(END_S)
    finally:
        wire.close()


def test_a_submission_whose_client_has_closed_the_connection_ends(server: Server, model: str) -> None:
    """It never hears the request's id, so it can neither wait for it nor cancel it."""
    body = asked(sampling_session(server, model), num_samples=64)
    sent(server.url, "/api/v1/asample", body, {"x-api-key": KEY}).close()
    again = post(server, "asample", body).json()  # the same request, whichever comes first
    seconds = until(lambda: nothing_runs(server), "abandoned")
    print(f"\na submission ended {1000 * seconds:.0f} ms after its connection")
    assert post(server, "retrieve_future", {"request_id": again["request_id"]}).status_code == 410


def test_a_submission_that_is_cancelled_before_its_answer_arrives_ends(server: Server, model: str) -> None:
    """The server has answered, the SDK does not know it and forgets the request."""
    params = types.SamplingParams(max_tokens=450, seed=1, stop=[])
    with wired(server, model) as (wire, client):
        wire.hold()
        try:
            futures = [client.sample(types.ModelInput.from_ints([5, 6, 7]), 64, params) for _ in range(4)]
            until(lambda: numbers(server)["samples_in_flight"] == numbers(server)["sample_running"] == 4, "running")
            assert all(future.future().cancel() for future in futures)
            seconds = until(lambda: numbers(server)["samples_in_flight"] == 0, "abandoned")
        finally:
            wire.release()
        print(f"\nsubmissions ended {seconds:.1f} s after the SDK had forgotten them")
    until(lambda: numbers(server)["sample_running"] == 0, "abandoned")


def test_what_the_sdk_asked_for_and_does_not_come_for_ends(server: Server, model: str) -> None:
    """As if it had been cancelled between the answer of its submission and its first wait. Clients that do not say that
    they come at once may take their time."""
    sampler = sampling_session(server, model)
    at_once = {"x-tinker-sampling-backpressure": "1"}
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers={"x-api-key": KEY}, trust_env=False) as client:
        bodies = [asked(sampler, seq_id, num_samples=64) for seq_id in range(2)]
        left, kept = [
            client.post("asample", json=body, headers=headers, timeout=END_S).json()["request_id"]
            for body, headers in zip(bodies, (at_once, {}), strict=True)
        ]
        seconds = until(lambda: numbers(server)["samples_in_flight"] == 1, "abandoned")
        print(f"\na request for which nobody came ended after {seconds:.1f} s")
        assert post(server, "retrieve_future", {"request_id": left}).status_code == 410
        assert numbers(server)["samples_in_flight"] == 1
        assert post(server, "cancel_future", {"request_id": kept}).status_code == 200
    until(lambda: nothing_runs(server), "cancelled")


def test_a_client_whose_line_was_cut_sends_again_what_was_given_up(server: Server, model: str) -> None:
    params = types.SamplingParams(max_tokens=100, seed=1, stop=[])
    with wired(server, model) as (wire, client):
        future = client.sample(types.ModelInput.from_ints([5, 6, 7]), num_samples=40, sampling_params=params)
        until(lambda: numbers(server)["sample_running"] == 4, "running")
        wire.cut()
        until(lambda: numbers(server)["samples_in_flight"] == 0, "abandoned")
        wire.mend()
        answer = future.result(END_S)
    assert [len(sequence.tokens) for sequence in answer.sequences] == [100] * 40
