from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from descant.errors import Unauthorized
from descant.server.app import bind, create_app
from descant.server.auth import Keys
from descant.server.longpoll import Disconnected, LongPolls
from descant.server.routes import Routes
from descant.server.settings import HttpSettings
from descant.testing.server import sent
from descant.wire import tinker_pb2 as pb

PROTOBUF = {"content-type": "application/x-protobuf"}


async def make_model(client: httpx.AsyncClient) -> str:
    session = (await client.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0"})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    return (await client.post("/api/v1/create_model", json=body)).json()["model_id"]


def forward_backward(model_id: str, seq_id: int, **tensor: Any) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1], "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(**tensor))
    return message.SerializeToString()


def plain(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    assert int(response.headers["content-length"]) == len(response.content) > 0
    return response.json()


# ---------------------------------------------------------------------------------------------------------- direct ones


async def test_client_config_asks_for_order(client: httpx.AsyncClient):
    config = plain(await client.post("/api/v1/client/config", json={"sdk_version": "0.38.0"}), 200)
    assert config["parallel_fwdbwd_chunks"] is False
    assert config["pjwt_auth_enabled"] is False
    assert plain(await client.post("/api/v1/client/dynamic_config", json={}), 200)["sample_cancel_enabled"] is True


async def test_health_needs_no_key_and_readiness_has_a_reason(service: Any):
    reasons: list[str | None] = ["the model is being loaded", None, None]
    missing: list[str | None] = [None, "a replica is being started again"]
    auth = Keys({"tml-a": "ann"})
    app = create_app(service, auth=auth, ready=lambda: reasons.pop(0), missing=lambda: missing.pop(0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://descant") as client:
        assert plain(await client.get("/healthz"), 200) == {"status": "ok"}
        assert plain(await client.get("/api/v1/healthz"), 200) == {"status": "ok"}
        assert plain(await client.get("/readyz"), 503)["reason"] == "the model is being loaded"
        assert plain(await client.get("/readyz"), 200) == {"status": "ready"}
        assert plain(await client.get("/readyz"), 200)["missing"] == "a replica is being started again"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/training_runs?limit=1"),
        ("DELETE", "/api/v1/training_runs/s:train:0/checkpoints/weights/a"),
        ("PUT", "/api/v1/sessions/s/project"),
        ("POST", "/api/v1/auth/token"),
        ("GET", "/api/v1/create_model"),
        ("POST", "/api/v1/get_server_capabilities"),
    ],
)
async def test_the_rest_is_not_served_yet(client: httpx.AsyncClient, method: str, path: str):
    detail = plain(await client.request(method, path), 404)["detail"]
    assert detail == f"{method} {path.split('?')[0]} is not served yet"


async def test_outside_the_prefix(client: httpx.AsyncClient):
    assert "/nothing" in plain(await client.get("/nothing"), 404)["detail"]


async def test_weights_info_and_get_info(client: httpx.AsyncClient):
    info = plain(await client.post("/api/v1/weights_info", json={"tinker_path": "tinker://m/weights/a"}), 200)
    assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == ("org/tiny", 4, False)
    model_id = await make_model(client)
    info = plain(await client.post("/api/v1/get_info", json={"model_id": model_id}), 200)
    assert info["model_data"] == {"arch": "Tiny", "model_name": "org/tiny", "tokenizer_id": "org/tiny"}


async def test_session_life(client: httpx.AsyncClient, service: Any):
    await make_model(client)
    assert plain(await client.post("/api/v1/session_heartbeat", json={"session_id": "session-0"}), 200) is not None
    finish = {"reason": {"type": "success"}, "detail": "done"}
    plain(await client.post("/api/v1/sessions/session-0/finish", json=finish), 200)
    assert service.finished == [("session-0", "success")]
    service.over.add("session-0")
    assert (
        "is over"
        in plain(await client.post("/api/v1/session_heartbeat", json={"session_id": "session-0"}), 410)["detail"]
    )
    plain(await client.post("/api/v1/session_heartbeat", json={"session_id": "nobody"}), 404)


async def test_telemetry_is_dropped(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="descant")
    events = {"events": [{"event_data": {"request_headers": {"x-api-key": "tml-secret"}}}]}
    assert plain(await client.post("/api/v1/telemetry", json=events), 200) == {"status": "accepted"}
    assert "tml-secret" not in caplog.text


# ----------------------------------------------------------------------------------------------------------------- keys


def test_keys():
    anybody = Keys()
    assert anybody.principal({"x-api-key": "tml-a"}).startswith("key-")
    assert anybody.principal({"x-api-key": "tml-a"}) != anybody.principal({"x-api-key": "tml-b"})
    known = Keys({"tml-a": "ann", "tml-b": "ann"})
    assert known.principal({"x-api-key": "tml-a"}) == known.principal({"x-api-key": "tml-b"}) == "ann"
    for headers in ({}, {"x-api-key": ""}, {"x-api-key": "tml-c"}):
        with pytest.raises(Unauthorized) as caught:
            known.principal(headers)
        assert "tml-c" not in str(caught.value)


async def test_every_route_wants_a_key_and_none_shows_another_owners(client: httpx.AsyncClient, service: Any):
    model_id = await make_model(client)
    for method, path in ROUTES:
        response = await client.request(method, path, headers={"x-api-key": ""})
        assert "X-API-Key is missing" in plain(response, 401)["detail"]
    other = {"x-api-key": "tml-b"}
    plain(await client.post("/api/v1/get_info", json={"model_id": model_id}, headers=other), 404)
    plain(await client.post("/api/v1/retrieve_future", json={"request_id": "future-0"}, headers=other), 404)
    bad_step = {"model_id": model_id, "seq_id": 1}
    plain(await client.post("/api/v1/optim_step", json=bad_step, headers=other), 404)
    assert service.refusals == []


# -------------------------------------------------------------------------------------------------------------- futures


async def test_a_pending_future_is_tried_again_with_a_reason(client: httpx.AsyncClient, service: Any):
    service.hold = True
    await make_model(client)
    answer = plain(await client.post("/api/v1/retrieve_future", json={"request_id": "future-0"}), 408)
    assert answer == {
        "type": "try_again",
        "request_id": "future-0",
        "queue_state": "active",
        "queue_state_reason": "2 requests are ahead",
    }


async def test_a_failure_is_an_answer(client: httpx.AsyncClient, service: Any):
    model_id = await make_model(client)
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": -1}}
    submitted = plain(await client.post("/api/v1/optim_step", json=step), 200)
    answer = plain(await client.post("/api/v1/retrieve_future", json=submitted), 200)
    assert answer["category"] == "user"
    assert answer["error"].startswith("adam_params.learning_rate is -1")
    assert [(r.operation, r.seq_id, r.poisons_gradient) for r in service.refusals] == [("optim_step", 1, False)]


async def test_a_bad_tensor_fails_in_its_place(client: httpx.AsyncClient, service: Any):
    model_id = await make_model(client)
    body = forward_backward(model_id, 1, dense=b"abc", dtype=2)
    submitted = plain(await client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF), 200)
    answer = plain(await client.post("/api/v1/retrieve_future", json=submitted), 200)
    assert answer["error"] == "data[0].loss_fn_inputs['target_tokens'] has 3 bytes, expected a multiple of 8"
    assert [(r.operation, r.poisons_gradient) for r in service.refusals] == [("forward_backward", True)]


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
async def test_a_body_too_large_fails_in_its_place(client: httpx.AsyncClient, service: Any, declared: bool):
    model_id = await make_model(client)
    body = forward_backward(model_id, 1, dense=bytes(2 << 20), dtype=1)

    async def parts() -> Any:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    content = body if declared else parts()
    plain(await client.post("/api/v1/forward_backward", content=content, headers=PROTOBUF), 200)
    (refusal,) = service.refusals
    assert (refusal.seq_id, refusal.poisons_gradient) == (1, True)
    assert refusal.message == "the body is larger than 1048576 bytes"
    content = b" " * (2 << 20) if declared else parts()
    assert "larger than" in plain(await client.post("/api/v1/optim_step", content=content), 413)["detail"]


async def test_overload_says_when_to_come_back(client: httpx.AsyncClient, service: Any):
    service.overloaded = True
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    response = await client.post("/api/v1/asample", json={"sampling_session_id": "s", "seq_id": 0, "prompt": prompt})
    assert "too many samples" in plain(response, 429)["detail"]
    assert response.headers["retry-after"] == "1"
    assert response.headers["retry-after-ms"] == "10"


async def test_an_unknown_fault_shows_nothing(
    client: httpx.AsyncClient, service: Any, caplog: pytest.LogCaptureFixture
):
    service.broken = True
    detail = plain(await client.post("/api/v1/get_info", json={"model_id": "m"}), 500)["detail"]
    assert detail.startswith("internal error")
    assert "secret" not in detail
    assert "secret detail" in caplog.text


async def test_a_wait_ends_on_close_on_deadline_and_with_its_caller():
    ended: list[str] = []

    async def forever() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")
        return "never"

    async def soon() -> str:
        return "now"

    async def never() -> None:
        await asyncio.Event().wait()

    polls = LongPolls()
    assert await polls.wait(soon(), deadline_s=5, disconnected=never()) == "now"
    assert await polls.wait(forever(), deadline_s=0, disconnected=never()) is None
    caller = asyncio.create_task(polls.wait(forever(), deadline_s=60, disconnected=never()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    waiting = asyncio.create_task(polls.wait(forever(), deadline_s=60, disconnected=never()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    polls.close()
    assert await asyncio.wait_for(waiting, 5) is None
    assert await polls.wait(forever(), deadline_s=60, disconnected=never()) is None
    await asyncio.sleep(0)
    assert len(ended) == 3  # the last one never began


async def test_a_wait_that_is_disconnected_is_over_when_it_says_so():
    over = False

    async def forever() -> None:
        nonlocal over
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            over = True

    with pytest.raises(Disconnected):
        await LongPolls().wait(forever(), deadline_s=60, disconnected=asyncio.sleep(0))
    assert over


@pytest.mark.parametrize("answered", [True, False])
def test_a_connection_that_its_client_closes_ends_its_poll(running: Any, service: Any, answered: bool):
    """And one that is closed after its answer does not."""
    service.hold, service.hold_s = not answered, 3600
    with httpx.Client(base_url=running.url, headers={"x-api-key": "tml-a"}, timeout=30, trust_env=False) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        submitted = client.post("/api/v1/create_model", json=body).json()
        poll = {"request_id": submitted["request_id"]}
        with sent(running.url, "/api/v1/retrieve_future", poll, {"x-api-key": "tml-a"}) as connection:
            assert service.entered.wait(60)
            if answered:
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert answered or service.told.wait(60)
        plain(client.get("/api/v1/healthz"), 200)
    assert [polled for _, polled in service.disconnected_polls] == ([] if answered else [submitted["request_id"]])


@pytest.mark.parametrize("answered", [True, False])
def test_a_sampling_request_whose_client_closed_the_connection_first_is_told_of(
    running: Any, service: Any, answered: bool
):
    """Also one so long that reading it was paused. The header says whether its client polls for it at once."""
    service.goes_on.clear()
    with httpx.Client(base_url=running.url, headers={"x-api-key": "tml-a"}, timeout=30, trust_env=False) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = client.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 100_000}]}
        asked = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt": prompt,
                 "sampling_params": {"max_tokens": 1}}  # fmt: skip
        headers = {"x-api-key": "tml-a"} | ({"x-tinker-sampling-backpressure": "1"} if answered else {})
        with sent(running.url, "/api/v1/asample", asked, headers) as connection:
            assert service.entered.wait(60)
            if answered:
                service.goes_on.set()
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        deadline = time.monotonic() + 10
        while len(running.server.server_state.connections) > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        service.goes_on.set()
        assert answered or service.told.wait(60)
        plain(client.get("/api/v1/healthz"), 200)
    assert [request_id for _, request_id in service.disconnected_submissions] == ([] if answered else ["future-0"])
    assert [submission.polls_at_once for submission in service.commands] == [answered]


async def test_metrics_are_for_whoever_has_a_key(client: httpx.AsyncClient):
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.splitlines() == [
        "# TYPE descant_adapter_load_wait_seconds_total counter",
        'descant_adapter_load_wait_seconds_total{base="org/tiny"} 0.25',
        "# TYPE descant_sample_running gauge",
        'descant_sample_running{base="org/tiny"} 3',
        r'descant_sample_running{base="a \"quoted\" one"} 0',
        "# TYPE descant_sampling_gap_seconds histogram",
        'descant_sampling_gap_seconds_bucket{base="org/tiny",le="0.5"} 1',
        'descant_sampling_gap_seconds_bucket{base="org/tiny",le="10.0"} 2',
        'descant_sampling_gap_seconds_bucket{base="org/tiny",le="+Inf"} 2',
        'descant_sampling_gap_seconds_sum{base="org/tiny"} 2.5',
        'descant_sampling_gap_seconds_count{base="org/tiny"} 2',
    ]
    plain(await client.get("/metrics", headers={"x-api-key": ""}), 401)


async def test_cancel_future(client: httpx.AsyncClient, service: Any):
    session = plain(await client.post("/api/v1/create_session", json={}), 200)["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    request_id = plain(await client.post("/api/v1/create_model", json=body), 200)["request_id"]
    plain(await client.post("/api/v1/cancel_future", json={"request_id": request_id}), 200)
    plain(await client.post("/api/v1/cancel_future", json={"request_id": "nobodys"}), 404)
    assert service.cancelled == [request_id]


def test_a_stop_answers_open_long_polls(running: Any, service: Any):
    service.hold = True
    headers = {"x-api-key": "tml-a"}
    entered = threading.Event()
    retrieve = service.retrieve_future

    async def retrieve_future(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        kwargs["timeout_s"] = 3600
        return await retrieve(*args, **kwargs)

    service.retrieve_future = retrieve_future
    with httpx.Client(base_url=running.url, headers=headers, timeout=30, trust_env=False) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        submitted = client.post("/api/v1/create_model", json=body).json()
        answers: list[httpx.Response] = []
        poll = threading.Thread(
            target=lambda: answers.append(client.post("/api/v1/retrieve_future", json=submitted)), daemon=True
        )
        poll.start()
        assert entered.wait(60)
        running.stop()
        poll.join(60)
    assert plain(answers[0], 408)["queue_state_reason"] == "the server is stopping"


def test_too_large_over_a_socket_leaves_the_connection_usable(running: Any):
    headers = {"x-api-key": "tml-a"}
    with httpx.Client(base_url=running.url, headers=headers, timeout=30, trust_env=False) as client:
        response = client.post("/api/v1/optim_step", content=bytes(65 << 20))
        assert plain(response, 413)["detail"] == "the body is larger than 65536 bytes"
        assert plain(client.get("/api/v1/healthz"), 200) == {"status": "ok"}


def test_connections_send_at_once():
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# -------------------------------------------------------------------------------------------------------------- garbage

ROUTES = [
    (sorted(route.methods)[0], route.path.replace("{sampling_session_id}", "x").replace("{session_id}", "x"))
    for route in Routes(None, auth=Keys(), polls=LongPolls(), settings=HttpSettings()).table()
    if getattr(route, "methods", None) and "healthz" not in route.path
]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "model_id",
        "seq_id",
        "session_id",
        "model_seq_id",
        "base_model",
        "lora_config",
        "rank",
        "path",
        "optimizer",
        "adam_params",
        "prompt",
        "chunks",
        "tokens",
        "sampling_params",
        "sampling_session_id",
        "sampling_session_seq_id",
        "request_id",
        "tinker_path",
        "num_samples",
        "reason",
        "type",
    ]
)
VALUES = JSON | st.sampled_from(
    ["session-0", "session-0:train:0", "session-0:sample:0", "org/tiny", "tinker://a/weights/b"]
)
NESTED = st.recursive(VALUES, lambda inner: st.dictionaries(FIELDS, inner, max_size=6), max_leaves=12)
BODIES = st.binary(max_size=64) | st.dictionaries(FIELDS, NESTED, max_size=8).map(
    lambda fields: json.dumps(fields).encode()
)
GOOD = [
    {"session_id": "session-0", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 0}},
    {"model_id": "session-0:train:0", "seq_id": 1, "adam_params": {"learning_rate": 0.1}, "path": "a"},
    {"session_id": "session-0", "sampling_session_seq_id": 0, "base_model": "tiny", "request_id": "future-0"},
    {
        "sampling_session_id": "session-0:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "stop": [1], "seed": 1},
        "num_samples": 1,
        "topk_prompt_logprobs": 1,
        "topk_sample_logprobs": 1,
        "prompt_alt_tokens_k": 1,
        "prompt_logprobs_last_n": 1,
        "target_prompt_logprobs": {
            "data": [1],
            "dtype": "int64",
            "shape": [1, 2],
            "sparse_crow_indices": [0, 1],
            "sparse_col_indices": [1],
        },
    },
]


@st.composite
def almost_good(draw: Callable[[st.SearchStrategy], Any]) -> bytes:
    """A good body with one of its values replaced."""
    body = json.loads(json.dumps(draw(st.sampled_from(GOOD))))
    place = body
    while True:
        key = draw(st.sampled_from(sorted(place)))
        if isinstance(place[key], dict) and draw(st.booleans()):
            place = place[key]
        else:
            place[key] = draw(JSON)
            return json.dumps(body).encode()


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[path.removeprefix("/api/v1/") for _, path in ROUTES])
@given(body=BODIES | almost_good(), encoding=st.sampled_from([None, None, "zstd", "gzip"]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_never_a_server_error(service: Any, method: str, path: str, body: bytes, encoding: str | None):
    async def send() -> httpx.Response:
        app = create_app(service, auth=Keys(), ready=lambda: None, settings=HttpSettings(long_poll_s=0.0))
        headers = {"x-api-key": "tml-a"} | ({"content-encoding": encoding} if encoding else {})
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://descant", headers=headers) as client:
            await client.post("/api/v1/create_session", json={})
            await client.post("/api/v1/create_model", json=GOOD[0])
            await client.post("/api/v1/create_sampling_session", json=GOOD[2])
            return await client.request(method, path, content=body)

    response = asyncio.run(send())
    assert response.status_code in (200, 400, 404, 408, 410, 413), response.text
    assert int(response.headers["content-length"]) == len(response.content) > 0
    if response.status_code != 200:
        answer = response.json()
        assert answer.get("detail") or answer.get("type") == "try_again"
