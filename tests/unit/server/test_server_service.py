"""The unmodified SDK against the app over the real service, with fakes for the ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker import types as sdk

from descant.server.app import HttpServer, bind, create_app
from descant.server.auth import Keys
from descant.server.routes import ServerSettings
from descant.service.backends import Backend
from descant.service.catalogue import Catalogue
from descant.service.clock import SystemClock
from descant.service.database import Database
from descant.service.futures import SqlFutureStore
from descant.service.service import Service
from descant.testing.fakes import FakeCheckpointStore, FakeEngine, FakeTrainer, FakeWorld
from descant.wire.encode import encode


@asynccontextmanager
async def service_over_fakes(path: Path) -> AsyncIterator[Service]:
    database = await Database.open(path / "descant.db")
    clock = SystemClock()
    world = FakeWorld()
    service = Service(
        backends=[Backend(facts=world.facts, trainer=FakeTrainer(world), engine=FakeEngine(world))],
        futures=SqlFutureStore(database, clock),
        checkpoints=FakeCheckpointStore(path / "checkpoints"),
        catalogue=Catalogue(database),
        clock=clock,
        encode=encode,
    )
    await service.start()
    try:
        yield service
    finally:
        await service.close()
        await database.close()


async def as_user(path: Path, work: Callable[[str], None]) -> None:
    """``work(url)`` on a thread, while the app answers on a socket."""
    async with service_over_fakes(path) as service:
        listener = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(service, auth=Keys(), ready=lambda: None, settings=ServerSettings(long_poll_s=5.0))
        server = HttpServer(app)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            await asyncio.wait_for(asyncio.to_thread(work, url), 60)
        finally:
            server.should_exit = True
            await serving


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def datum(*tokens: int, targets: tuple[int, ...] | None = None) -> sdk.Datum:
    return sdk.Datum(
        model_input=sdk.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={
            "target_tokens": np.array(targets or tokens, np.int64),
            "weights": np.ones(len(targets or tokens), np.float32),
        },
    )


def train_sample_save_resume(url: str) -> None:
    with tinker.ServiceClient(base_url=url, api_key="tml-a") as service:
        training = service.create_lora_training_client(base_model="fake", rank=4, seed=0).result()
        data = [datum(1, 2, 3), datum(4, 5)]
        first = training.forward_backward(data, "cross_entropy").result()
        assert [o["logprobs"].shape for o in first.loss_fn_outputs] == [[3], [2]]
        training.optim_step(sdk.AdamParams(learning_rate=0.1)).result()
        second = training.forward(data, "cross_entropy").result()
        assert second.metrics["loss:sum"] < first.metrics["loss:sum"]

        sampling = training.save_weights_and_get_sampling_client().result()
        prompt = sdk.ModelInput.from_ints([1, 2, 3])
        response = sampling.sample(
            prompt, 2, sdk.SamplingParams(max_tokens=4, temperature=0.0, seed=0, stop=[]), include_prompt_logprobs=True
        ).result()
        assert [len(sequence.tokens) for sequence in response.sequences] == [4, 4]
        assert response.prompt_logprobs is not None
        assert response.prompt_logprobs[0] is None

        path = training.save_state("here").result().path
        again = service.create_training_client_from_state_with_optimizer(path).result()
        assert again.get_info().lora_rank == 4
        resumed = again.forward(data, "cross_entropy").result()
        assert resumed.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], rel=1e-5)


async def test_a_training_run(tmp_path: Path):
    await as_user(tmp_path, train_sample_save_resume)


def half_a_batch_is_not_stepped(url: str) -> None:
    with tinker.ServiceClient(base_url=url, api_key="tml-a") as service:
        training = service.create_lora_training_client(base_model="fake", rank=4, seed=0).result()
        bad = training.forward_backward([datum(1, 2), datum(1, 2, targets=(1, 2, 3))], "cross_entropy")
        step = training.optim_step(sdk.AdamParams(learning_rate=float("nan")))
        with pytest.raises(tinker.RequestFailedError, match=r"data\[1\]"):
            bad.result()
        with pytest.raises(tinker.RequestFailedError, match=r"adam_params.learning_rate is null"):
            step.result()
        image = sdk.Datum(
            model_input=sdk.ModelInput(chunks=[sdk.ImageChunk(data=b"x", format="png", expected_tokens=1)]),
            loss_fn_inputs={"target_tokens": [1]},
        )
        with pytest.raises(tinker.BadRequestError, match="type 'image', which is not served yet"):
            training.forward_backward([image], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match="not served yet"):
            training.optim_step(sdk.AdamParams()).result()  # the refused request's gradient is missing
        training.forward_backward([datum(1, 2)], "cross_entropy").result()
        training.optim_step(sdk.AdamParams()).result()


async def test_half_a_batch_is_not_stepped(tmp_path: Path):
    await as_user(tmp_path, half_a_batch_is_not_stepped)


IDS = st.sampled_from(["0", "1", "a/b", "", "x" * 600, "\x00", "tinker://a/weights/b", "sampler"])
NUMBERS = st.sampled_from([0, 1, 2, -1, 10**6, 2**31, 2**63 - 1])


@given(st.lists(st.tuples(st.integers(0, 7), IDS, NUMBERS, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_values_make_a_server_error(tmp_path_factory: Any, steps: list[tuple[int, str, int, bool]]):
    """Well-formed requests with bad values, in any order, against live ids."""

    async def send() -> None:
        async with service_over_fakes(tmp_path_factory.mktemp("db")) as service:
            app = create_app(service, auth=Keys(), ready=lambda: None, settings=ServerSettings(long_poll_s=0.0))
            transport = httpx.ASGITransport(app=app)
            headers = {"x-api-key": "tml-a"}
            async with httpx.AsyncClient(transport=transport, base_url="http://descant", headers=headers) as client:

                async def post(path: str, body: dict[str, Any]) -> Any:
                    response = await client.post(f"/api/v1/{path}", content=json.dumps(body).encode())
                    assert response.status_code in (200, 400, 404, 408, 410, 429), (path, body, response.text)
                    if response.status_code == 200 and "request_id" in response.json():
                        await post("retrieve_future", {"request_id": response.json()["request_id"]})
                    return response.json()

                session = (await post("create_session", {}))["session_id"]
                base = {"base_model": "fake", "lora_config": {"rank": 2, "seed": 0}}
                model = (await post("create_model", {"session_id": session, "model_seq_id": 0, **base}))["model_id"]
                for kind, text, number, flag in steps:
                    in_session = {"session_id": session if flag else text}
                    in_order = {"model_id": model if flag else text, "seq_id": number}
                    path, body = [
                        (
                            "create_model",
                            {**in_session, "model_seq_id": number, **base, "lora_config": {"rank": number}},
                        ),
                        ("optim_step", {**in_order, "adam_params": {"learning_rate": number}}),
                        ("save_weights", {**in_order, "path": text, "ttl_seconds": number, "overwrite": flag}),
                        ("save_weights_for_sampler", {**in_order, "sampling_session_seq_id": number}),
                        ("load_weights", {**in_order, "path": text, "optimizer": flag}),
                        ("load_weights", {**in_session, "model_seq_id": number, "path": text, "optimizer": flag}),
                        (
                            "create_sampling_session",
                            {**in_session, "sampling_session_seq_id": number, "model_path": text},
                        ),
                        ("weights_info", {"tinker_path": text}),
                    ][kind]
                    await post(path, body)

    asyncio.run(send())
