"""What a client can do with connections before a key has come on one. Over real sockets, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from descant.errors import Overloaded
from descant.server.app import HttpServer, bind, create_app
from descant.server.auth import Keys
from descant.server.connections import MAX_HEADER_BYTES, MAX_HEADERS, MAX_WAITING_REQUESTS
from descant.server.settings import HttpSettings
from descant.server.uploads import Upload, Uploads

WAIT_S = 15
KEY = "x-api-key: tml-a\r\n"
HEALTHZ = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


class Running:
    def __init__(self, service: Any, *, uncounted: tuple[str, ...] = ("127.0.0.0/8",), **settings: Any):
        app = create_app(service, auth=Keys(), ready=lambda: None, settings=HttpSettings(**settings))
        self.listener = bind("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.server = HttpServer(app, uncounted=uncounted)
        self.connections = self.server._connections
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],), daemon=True)
        self.thread.start()

    def open(self, sent: bytes = b"", *, source: str = "127.0.0.1") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S, source_address=(source, 0))
        connection.sendall(sent)
        return connection

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


@pytest.fixture
def run(service: Any) -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def start(**settings: Any) -> Running:
            running = Running(service, **settings)
            stack.callback(running.stop)
            return running

        yield start


def answer(connection: socket.socket) -> bytes:
    """Up to the end of the stream, or of an answer."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            data += more
            head, _, body = data.partition(b"\r\n\r\n")
            length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            if length and len(body) >= int(length[0].split(b":")[1]):
                break
    return data


def is_closed(connection: socket.socket) -> bool:
    """Within ``WAIT_S``, without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def lets_in(running: Running) -> bool:
    with running.open(HEALTHZ) as connection:
        return answer(connection).startswith(b"HTTP/1.1 200")


# -------------------------------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    "headers",
    [
        b"a: b\r\n" * (MAX_HEADERS + 2),
        b"a: " + b"b" * MAX_HEADER_BYTES + b"\r\n",
        b"a: " + b"b" * (4 * MAX_HEADER_BYTES),
        b"b" * (4 * MAX_HEADER_BYTES),
        b"".join(b"a%d: %s\r\n" % (i, b"b" * 1000) for i in range(33)),
    ],
    ids=["count", "one", "an unfinished one", "an unfinished name", "together"],
)
def test_too_many_headers_are_refused(run: Callable[..., Running], headers: bytes):
    running = run()
    with running.open(b"GET /healthz HTTP/1.1\r\n" + headers) as connection:
        assert answer(connection).startswith(b"HTTP/1.1 431 ")
        assert is_closed(connection)
    with running.open(b"GET /" + b"a" * MAX_HEADER_BYTES) as connection:
        assert answer(connection).startswith(b"HTTP/1.1 431 ")
    assert lets_in(running)


def test_an_endless_header_takes_no_memory_and_is_answered(run: Callable[..., Running]):
    running = run()
    with running.open(b"GET /healthz HTTP/1.1\r\na: ") as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(512):  # 32 MiB
                connection.sendall(b"b" * (64 << 10))
        (of_server,) = running.connections._open or (None,)
        assert of_server is None or of_server._num_unparsed_bytes < MAX_HEADER_BYTES + (1 << 18)
    assert eventually(lambda: len(running.connections) == 0)


def test_the_headers_of_the_sdk_and_of_some_proxies_are_not_too_many(run: Callable[..., Running]):
    headers = b"".join(b"a%d: %s\r\n" % (i, b"b" * 300) for i in range(60))
    with run().open(b"GET /healthz HTTP/1.1\r\n" + headers + b"\r\n") as connection:
        for _ in range(3):
            assert answer(connection).startswith(b"HTTP/1.1 200")
            connection.sendall(b"GET /healthz HTTP/1.1\r\n" + headers + b"\r\n")


def test_what_is_no_http_is_answered_and_not_logged(run: Callable[..., Running], caplog: pytest.LogCaptureFixture):
    with run().open(b"\x16\x03\x01 hello\r\nworld\r\n\r\n") as connection:
        assert answer(connection).startswith(b"HTTP/1.1 400")
    assert not caplog.records


def test_requests_that_wait_on_one_connection_are_bounded(run: Callable[..., Running], service: Any):
    """Each would be half a dozen objects, all made in one callback of the event loop."""
    running = run()
    with running.open(HEALTHZ * 5000) as connection:
        data = b""
        with contextlib.suppress(ConnectionError):
            while more := connection.recv(1 << 16):
                data += more
    assert data.count(b"HTTP/1.1 200") <= MAX_WAITING_REQUESTS + 1
    assert lets_in(running)


# ----------------------------------------------------------------------------------------------------------------- time


def test_silent_and_trickling_connections_are_closed(run: Callable[..., Running]):
    running = run(header_timeout_s=0.4)
    post = f"POST /api/v1/telemetry HTTP/1.1\r\n{KEY}".encode()
    starts = (
        b"",
        b"\r\n",
        b"G",
        post,
        HEALTHZ,
        HEALTHZ + b"GET /h",
        b"POST /healthz HTTP/1.1\r\ncontent-length: 9\r\n\r\na",
    )
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(running.open(start)) for start in starts]
        over = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.1):
                    connections[3].sendall(b"a: b\r\n")

        trickling = threading.Thread(target=trickle, daemon=True)
        trickling.start()
        for connection in connections:
            while not is_closed(connection):
                pass
        over.set()
        trickling.join(WAIT_S)
    assert eventually(lambda: len(running.connections) == 0)


def test_a_connection_with_a_key_is_kept(run: Callable[..., Running]):
    running = run(header_timeout_s=0.2, idle_timeout_s=60)
    request = f"GET /api/v1/get_server_capabilities HTTP/1.1\r\n{KEY}\r\n".encode()
    with running.open(request) as connection, running.open() as stranger:
        assert answer(connection).startswith(b"HTTP/1.1 200")
        assert is_closed(stranger)
        connection.sendall(request)
        assert answer(connection).startswith(b"HTTP/1.1 200")


def test_a_long_poll_outlives_the_timeouts(run: Callable[..., Running], service: Any):
    service.hold = True
    running = run(header_timeout_s=0.2, idle_timeout_s=0.2, long_poll_s=3.0)
    with httpx.Client(base_url=f"http://127.0.0.1:{running.port}", headers={"x-api-key": "tml-a"}) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        submitted = client.post("/api/v1/create_model", json=body).json()
        assert client.post("/api/v1/retrieve_future", json=submitted).status_code == 408


def test_a_body_that_stalls_is_given_up(run: Callable[..., Running]):
    running = run(body_timeout_s=0.3)
    start = f"POST /api/v1/create_session HTTP/1.1\r\n{KEY}content-length: 100\r\n\r\n".encode()
    with running.open(start + b'{"tags"') as connection:
        told = answer(connection)
        assert told.startswith(b"HTTP/1.1 408 ")  # which the SDK sends again
        assert b"7 bytes of it came" in told
        assert is_closed(connection)


# --------------------------------------------------------------------------------------------------------------- number


def test_the_oldest_unauthenticated_connection_makes_way(run: Callable[..., Running]):
    running = run(max_connections=8)
    request = f"GET /api/v1/get_server_capabilities HTTP/1.1\r\n{KEY}\r\n".encode()
    with contextlib.ExitStack() as stack:
        known = stack.enter_context(running.open(request))
        assert answer(known).startswith(b"HTTP/1.1 200")
        strangers = [stack.enter_context(running.open()) for _ in range(30)]
        assert lets_in(running)
        assert is_closed(strangers[0])
        assert len(running.connections) <= 8
        known.sendall(request)
        assert answer(known).startswith(b"HTTP/1.1 200")


def test_one_owner_has_half_of_the_connections(run: Callable[..., Running]):
    running = run(max_connections=8)
    request = f"GET /api/v1/get_server_capabilities HTTP/1.1\r\n{KEY}\r\n".encode()
    with contextlib.ExitStack() as stack:
        answers = []
        for _ in range(6):
            connection = stack.enter_context(running.open(request))
            answers.append(answer(connection)[9:12])
        assert answers == [b"200"] * 4 + [b"429"] * 2
        other = stack.enter_context(running.open(request.replace(b"tml-a", b"tml-b")))
        assert answer(other).startswith(b"HTTP/1.1 200")


def test_unauthenticated_connections_of_one_address_are_bounded(run: Callable[..., Running]):
    running = run(max_unauthenticated_per_address=5, uncounted=("127.0.0.1",))
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(running.open(source="127.0.0.2")) for _ in range(12)]
        uncounted = [stack.enter_context(running.open()) for _ in range(12)]
        other = stack.enter_context(running.open(source="127.0.0.3"))
        for connection in flood[:7]:
            assert is_closed(connection)
        for connection in (*flood[7:], *uncounted, other):  # the newest of that address among them
            connection.sendall(HEALTHZ)
            assert answer(connection).startswith(b"HTTP/1.1 200")


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from descant.server.app import HttpServer, bind, create_app
from descant.server.auth import Keys
listener = bind("127.0.0.1", 0)
server = HttpServer(create_app(None, auth=Keys(), ready=lambda: None))
print(listener.getsockname()[1], resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
server.run([listener])
"""


@pytest.mark.parametrize(("soft", "hard", "num_idle"), [(256, 1024, 1100)])
def test_idle_connections_beyond_what_the_process_may_open_lock_nobody_out(soft: int, hard: int, num_idle: int):
    command = [sys.executable, "-c", FEW_FILES, str(soft), str(hard)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        port, limit = map(int, process.stdout.readline().split())
        assert limit == hard
        for _ in range(num_idle):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
                connection.sendall(HEALTHZ)
                assert answer(connection).startswith(b"HTTP/1.1 200")


# --------------------------------------------------------------------------------------------------------------- bodies


def test_no_key_no_body(run: Callable[..., Running]):
    """Answered at the end of the headers."""
    running = run()
    start = b"POST /api/v1/forward_backward HTTP/1.1\r\ncontent-length: 60000000\r\n\r\n"
    with running.open(start) as connection:
        assert answer(connection).startswith(b"HTTP/1.1 401 ")


def test_unfinished_bodies_are_bounded_together_and_by_owner(run: Callable[..., Running]):
    running = run(max_bodies_bytes=5 << 20, max_body_bytes=8 << 20)
    start = "POST /api/v1/forward_backward HTTP/1.1\r\nx-api-key: tml-{}\r\ncontent-length: 3000000\r\n\r\n"
    part = bytes(1_400_000)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running.open(start.format("a").encode() + part))
        second = stack.enter_context(running.open(start.format("a").encode() + part))
        told = answer(second)
        assert told.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after" in told
        assert b"allows one owner" in told
        other = stack.enter_context(running.open(start.format("b").encode() + part))
        for connection in (first, other):  # go on to their end, and fail for what they hold
            connection.sendall(bytes(3_000_000 - len(part)))
            assert answer(connection).startswith(b"HTTP/1.1 400 ")


async def test_who_has_most_makes_way():
    uploads = Uploads(max_bytes=100)

    async def parts(*sizes: int) -> Any:
        for size in sizes:
            yield bytes(size)
            await never if size == 50 else None

    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with uploads.begin("greedy", timeout_s=60) as held, uploads.begin("small", timeout_s=60) as small:
        greedy = asyncio.create_task(held.receive(parts(50), lambda part: None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert uploads.num_bytes == 50
        with uploads.begin("middle", timeout_s=60) as middle:
            await middle.receive(parts(30), lambda part: None)
            await small.receive(parts(10, 20), lambda part: None)
            with pytest.raises(Overloaded, match="100 allows"):
                await greedy
            assert uploads.num_bytes == 60
        assert uploads.num_bytes == 30


async def test_a_body_alone_may_always_arrive():
    uploads = Uploads(max_bytes=10)

    async def parts() -> Any:
        yield bytes(30)

    upload: Upload
    with uploads.begin("a", timeout_s=60) as upload:
        await upload.receive(parts(), lambda part: None)
        assert uploads.num_bytes == 30
    assert uploads.num_bytes == 0
