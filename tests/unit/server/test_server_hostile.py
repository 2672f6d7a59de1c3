"""What a client can do before or while its bytes are read, over a real socket: nobody else notices."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from descant.testing.hostile import Hostile, hostile

MODEL = "session-0:train:0"
BODIES = hostile(MODEL)

CPU_BAR_S = 0.05
MARGIN = 5
"""Machines that run tests are busy; what these bodies cost before was 20 to 200 times the bar."""
MEMORY_BAR = 3
FREE_MEMORY = 8 << 20
"""Threads, sockets, and what the allocator takes at a time."""

HEADERS = {"x-api-key": "tml-a"}
TYPES = {"forward_backward": "application/x-protobuf"}


@pytest.fixture
def client(running: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, headers=HEADERS, timeout=60, trust_env=False) as client:
        client.post("/api/v1/create_session", json={})
        model = {"session_id": "session-0", "model_seq_id": 0, "base_model": "tiny"}
        assert client.post("/api/v1/create_model", json=model).json()["model_id"] == MODEL
        yield client


def post(client: httpx.Client, body: Hostile, sent: bytes) -> httpx.Response:
    headers = {"content-type": TYPES.get(body.path, "application/json")}
    headers |= {"content-encoding": "zstd"} if body.zstd else {}
    return client.post(f"/api/v1/{body.path}", content=sent, headers=headers)


def server_cpu_s(running: Any) -> float:
    """Of the event loop's thread and of those that decode."""
    decoding = [thread for thread in threading.enumerate() if thread.name.startswith("decode")]
    idents = [thread.ident for thread in (running.thread, *decoding) if thread.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


def memory(which: str) -> int:
    return int(re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


@pytest.mark.parametrize("name", BODIES)
def test_a_refusal_costs_next_to_nothing(
    running: Any, service: Any, client: httpx.Client, request: pytest.FixtureRequest, name: str
):
    body = BODIES[name]
    sent = body.sent
    client.get("/healthz")
    gc.collect()
    gc.freeze()  # a collection that falls into a request would walk what all the other tests have imported
    request.addfinalizer(gc.unfreeze)
    with contextlib.suppress(OSError):  # a kernel that does not let the peak be forgotten
        Path("/proc/self/clear_refs").write_text("5")
    before, memory_before = server_cpu_s(running), memory("VmRSS")
    answer = post(client, body, sent)
    cpu_s, grown = server_cpu_s(running) - before, memory("VmHWM") - memory_before
    if answer.status_code == 200:  # through the future, in its place
        answer = client.post("/api/v1/retrieve_future", json=answer.json())
        assert answer.json()["category"] == "user"
        assert [(refusal.model_id, refusal.seq_id) for refusal in service.refusals] == [(MODEL, 1)]
    else:
        assert answer.status_code in (400, 413)
    assert body.sentence in answer.text.replace('\\"', '"')
    assert not service.commands
    assert cpu_s < CPU_BAR_S * MARGIN
    assert grown < MEMORY_BAR * len(body.plain) + FREE_MEMORY


def test_what_has_a_place_consumes_it():
    """Of training requests all but those whose id cannot be read; of others those that say it first."""
    for name in ("empty datums", "chunks", "zeros", "nested groups", "a name", "a large step"):
        assert MODEL.encode() in BODIES[name].plain[:100]


def test_heartbeats_go_through_beside_a_flood(running: Any, client: httpx.Client):
    """Four clients send nothing else for as long as another beats 40 times."""
    bodies = [(body, body.sent) for body in BODIES.values()]
    over, errors = threading.Event(), []
    num_sent = 0

    def flood(start: int) -> None:
        nonlocal num_sent
        with httpx.Client(base_url=running.url, headers={"x-api-key": "tml-b"}, timeout=60, trust_env=False) as other:
            for i in range(start, 10**6):
                if over.is_set():
                    return
                answer = post(other, *bodies[i % len(bodies)])
                num_sent += 1
                if answer.status_code not in (400, 404, 413, 429):
                    errors.append(answer.text)

    floods = [threading.Thread(target=flood, args=(17 * i,), daemon=True) for i in range(4)]
    for thread in floods:
        thread.start()
    worst_cpu_s = 0.0
    try:
        while num_sent < 8:
            time.sleep(0.01)
        for _ in range(40):
            before, sent_before = server_cpu_s(running), num_sent
            assert client.post("/api/v1/session_heartbeat", json={"session_id": "session-0"}).status_code == 200
            between = num_sent - sent_before + len(floods)
            worst_cpu_s = max(worst_cpu_s, (server_cpu_s(running) - before) / between)
    finally:
        over.set()
        for thread in floods:
            thread.join(60)
    assert not errors
    assert worst_cpu_s < CPU_BAR_S * MARGIN
