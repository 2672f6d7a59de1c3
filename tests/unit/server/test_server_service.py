"""The unmodified SDK against the app over the real service, with fakes for the ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker import types as sdk

from descant.model.load import ModelSource, resolve_model
from descant.server.app import HttpServer, bind, create_app
from descant.server.auth import Keys
from descant.server.settings import HttpSettings
from descant.service.backends import Backend
from descant.service.clock import SystemClock
from descant.service.database import Database
from descant.service.future_store import SqlFutureStore
from descant.service.journal import Journal
from descant.service.registry import Registry
from descant.service.service import Service
from descant.testing.fakes import FAKE_BASE, FakeCheckpointStore, FakeEngine, FakeTrainer, FakeWorld
from descant.testing.tiny import tiny_tokenizer
from descant.types import Full, FutureState, Lora, ModelFacts
from descant.wire import tinker_pb2 as pb
from descant.wire.decode import decode_forward_backward
from descant.wire.encode import encode


@asynccontextmanager
async def service_over_fakes(path: Path, world: FakeWorld, facts: ModelFacts) -> AsyncIterator[Service]:
    database = await Database.open(path / "descant.db")
    clock = SystemClock()
    service = Service(
        backends=[Backend(facts=facts, trainer=FakeTrainer(world), engine=FakeEngine(world))],
        futures=SqlFutureStore(database, clock),
        checkpoints=FakeCheckpointStore(path / "checkpoints"),
        registry=Registry(database),
        journal=await Journal.open(database, path / "journal"),
        snapshots=FakeCheckpointStore(path / "snapshots"),
        clock=clock,
        encode=encode,
        decode=lambda body: decode_forward_backward(body.data, body.encoding),
    )
    await service.start()
    try:
        yield service
    finally:
        await service.close()
        await database.close()


async def as_user(path: Path, work: Callable[[str], None], source: ModelSource | None = None) -> None:
    """``work(url)`` on a thread, while the app answers on a socket. ``source``: what the base is called."""
    world = FakeWorld() if source is None else FakeWorld(name=source.name)
    facts = world.facts
    if source is not None:
        facts = replace(facts, aliases=source.aliases, short_names=source.short_names)
    async with service_over_fakes(path, world, facts) as service:
        listener = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(service, auth=Keys(), ready=lambda: None, settings=HttpSettings(long_poll_s=5.0))
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


async def test_every_name_that_is_listed_loads_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever else the base may be called, a client that has a tokenizer has the base's."""
    tiny_tokenizer().save_pretrained(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path / "models")
    source = resolve_model("tiny")
    monkeypatch.chdir(tmp_path)  # a client is anywhere

    def work(url: str) -> None:
        account = {"base_url": url, "api_key": "tml-a"}
        listed = tinker.RestClient(**account).get_server_capabilities().result().supported_models
        assert [model.model_name for model in listed] == [source.name]
        with tinker.ServiceClient(**account) as service:
            for name in (source.name, "tiny"):
                training = service.create_lora_training_client(base_model=name, rank=4).result()
                assert training.get_tokenizer().encode("a") == tiny_tokenizer().encode("a")
                sampling = training.save_weights_and_get_sampling_client().result()
                assert sampling.get_base_model() == source.name
                assert sampling.get_tokenizer().encode("a") == tiny_tokenizer().encode("a")
            sampling = service.create_sampling_client(base_model=source.name).result()
            assert sampling.get_tokenizer().encode("a") == tiny_tokenizer().encode("a")
            with pytest.raises(tinker.BadRequestError, match=f"'tiny', a short name .* use '{source.name}'"):
                service.create_sampling_client(base_model="tiny").result()

    await as_user(tmp_path, work, source)


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


async def test_a_full_model_is_told_as_none_of_lora(tmp_path: Path) -> None:
    world, key = FakeWorld(), "tml-a"
    who = Keys().principal({"x-api-key": key})
    async with service_over_fakes(tmp_path, world, world.facts) as service:
        session = await service.create_session(
            who, tags=(), user_metadata=None, sdk_version="", project_id=None, display_name=None, idempotency_key=None
        )
        paths = {}
        for number, trainable in enumerate((Full(), Lora(rank=4, train_mlp=False))):
            created = await service.creation.create_model(
                who, session_id=session, model_seq_id=number, base_model="fake", trainable=trainable,
                optimizer="adamw", user_metadata=None,
            )  # fmt: skip
            model_id = f"{session}:train:{number}"
            saved = await service.training.save_weights(
                who, model_id=model_id, seq_id=1, name="a", overwrite=False, ttl_seconds=None
            )
            for submitted in (created, saved):
                state = await service.futures.retrieve_future(who, submitted.request_id, timeout_s=10)
                assert isinstance(state, FutureState)
                assert not state.failed, state
            paths[model_id] = f"tinker://{model_id}/weights/a"
        app = create_app(service, auth=Keys(), ready=lambda: None, settings=HttpSettings())
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers={"x-api-key": key}) as client:
            told = [
                (
                    (await client.post("/api/v1/get_info", json={"model_id": model_id})).json(),
                    (await client.post("/api/v1/weights_info", json={"tinker_path": path})).json(),
                )
                for model_id, path in paths.items()
            ]
    for info, _ in told:
        assert sdk.GetInfoResponse.model_validate(info).is_lora == info["is_lora"]
    adam = {"optimizer_config": {"type": "adamw"}}
    assert [weights for _, weights in told] == [
        {"base_model": FAKE_BASE, "is_lora": False, **adam},
        {"base_model": FAKE_BASE, "is_lora": True, "lora_rank": 4, "train_attn": True, "train_mlp": False,
         "train_unembed": True, **adam},
    ]  # fmt: skip
    assert [(info["is_lora"], info.get("lora_rank")) for info, _ in told] == [(False, None), (True, 4)]
    assert "lora_rank" not in told[0][0]


async def test_a_training_run(tmp_path: Path):
    await as_user(tmp_path, train_sample_save_resume)


def steps_without_a_gradient(url: str) -> None:
    params, data = sdk.AdamParams(learning_rate=0.1, weight_decay=0.1), [datum(1, 2, 3)]
    with tinker.ServiceClient(base_url=url, api_key="tml-a") as service:
        training = service.create_lora_training_client(base_model="fake", rank=4, seed=0).result()

        def loss(client: tinker.TrainingClient) -> float:
            return client.forward(data, "cross_entropy").result().metrics["loss:sum"]

        def step(client: tinker.TrainingClient) -> dict[str, float]:
            metrics = client.optim_step(params).result().metrics
            assert metrics is not None
            return metrics

        skipped = {"grad_norm:mean": 0.0, "step:max": 0.0, "skipped:max": 1.0}
        assert step(training) == skipped, "right after it was made"
        training.forward_backward(data, "cross_entropy").result()
        assert step(training)["step:max"] == 1
        trained = loss(training)
        assert step(training) == {**skipped, "step:max": 1.0}
        assert loss(training) == trained

        training.forward_backward(data, "cross_entropy").result()
        path = training.save_state("between").result().path
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert step(resumed) == {**skipped, "step:max": 1.0}, "the checkpoint does not hold the gradient"
        assert loss(resumed) == pytest.approx(trained)
        assert step(training)["grad_norm:mean"] > 0, "the model kept it"
        resumed.forward_backward(data, "cross_entropy").result()
        step(resumed)
        assert loss(resumed) == pytest.approx(loss(training))

        zeros = sdk.Datum(
            model_input=sdk.ModelInput.from_ints([1, 2]),
            loss_fn_inputs={"target_tokens": np.array([2, 3]), "weights": np.zeros(2, np.float32)},
        )
        before = loss(training)
        training.forward_backward([zeros], "cross_entropy").result()
        assert step(training) == {"grad_norm:mean": 0.0, "step:max": 3.0}
        assert loss(training) != before


async def test_steps_without_a_gradient(tmp_path: Path):
    await as_user(tmp_path, steps_without_a_gradient)


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


def step_of(**fields: Any) -> dict[str, Any]:
    return {"adam_params": {"learning_rate": 0.1}, **fields}


REFUSED = [
    pytest.param("optim_step", step_of(adam_params={"learning_rate": -1}), id="a step that is out of range"),
    pytest.param("optim_step", step_of(adam_params={"eps": 0.0}), id="a step that the trainer refuses"),
    pytest.param("optim_step", {}, id="a step without parameters"),
    pytest.param("optim_step", {"optimizer_params": {"type": "dimuon"}}, id="another optimiser"),
    pytest.param("optim_step", step_of(pad="x" * (2 << 20)), id="a step that is too large"),
    pytest.param("optim_step", b', "adam_params": {', id="a step that breaks off"),
    pytest.param("save_weights", {}, id="a save without a name"),
    pytest.param("save_weights", {"path": "a/b"}, id="a name with a slash"),
    pytest.param("save_weights", {"path": "taken"}, id="a name that is taken"),
    pytest.param("save_weights", {"path": "a", "ttl_seconds": 1}, id="a ttl too short"),
    pytest.param("save_weights", {"path": "a", "user_metadata": {"a": "x" * (2 << 20)}}, id="a save that is too large"),
    pytest.param("save_weights_for_sampler", {}, id="a sampler's save without an address"),
    pytest.param("save_weights_for_sampler", {"path": "a/b"}, id="a sampler's name with a slash"),
    pytest.param("save_weights_for_sampler", {"path": "a", "ttl_seconds": 1}, id="a sampler's ttl too short"),
    pytest.param("save_weights_for_sampler", {"sampling_session_seq_id": 0, "kind": "new"}, id="another kind"),
    pytest.param("save_weights_for_sampler", {"sampling_session_seq_id": 0}, id="a sampling session that is taken"),
    pytest.param("load_weights", {}, id="a load without a path"),
    pytest.param("load_weights", {"path": "tinker://a/weights/b", "optimizer": True}, id="a late load"),
    pytest.param(
        "load_weights",
        {"path": "tinker://a/weights/b", "optimizer": True, "weights_access_token": "t"},
        id="a load with a token",
    ),
    pytest.param("save_weights_external", {"path": "a"}, id="an external save"),
    pytest.param("forward", {"forward_input": {"data": []}}, id="a forward of an old SDK"),
    pytest.param("forward_backward", {"forward_backward_input": {"data": []}}, id="a backward of an old SDK"),
    pytest.param("forward_backward", pb.ForwardBackwardRequest(loss_fn="cross_entropy"), id="no data"),
    pytest.param("forward_backward", pb.ForwardBackwardRequest(loss_fn="stable_reinforce"), id="a loss not served"),
    pytest.param(
        "forward_backward",
        pb.ForwardBackwardRequest(data=[pb.Datum(model_input=[pb.Chunk(image=pb.ImageChunk(data=b"x"))])]),
        id="an image",
    ),
    pytest.param(
        "forward_backward",
        pb.ForwardBackwardRequest(
            data=[pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(2 << 20)))])]
        ),
        id="a batch that is too large",
    ),
    pytest.param("forward_backward", b"\xff\xff", id="a batch that breaks off"),
]


@pytest.mark.parametrize(("path", "asked"), REFUSED)
async def test_what_is_refused_consumes_its_seq_id(tmp_path: Path, path: str, asked: Any):
    """Else what the SDK sends next would wait for it, 330 s by default."""
    async with service_over_fakes(tmp_path, world := FakeWorld(), world.facts) as service:
        app = create_app(
            service, auth=Keys(), ready=lambda: None, settings=HttpSettings(max_body_bytes=1 << 20, long_poll_s=5.0)
        )
        transport, headers = httpx.ASGITransport(app=app), {"x-api-key": "tml-a"}
        async with httpx.AsyncClient(transport=transport, base_url="http://descant/api/v1", headers=headers) as client:

            async def post(route: str, /, **body: Any) -> Any:
                answer = await client.post(route, json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            async def ended(submitted: Any) -> Any:
                answer = await client.post("/retrieve_future", json={"request_id": submitted["request_id"]})
                assert answer.status_code == 200, answer.text
                return answer.json()

            session_id = (await post("/create_session"))["session_id"]
            created = await post("/create_model", session_id=session_id, model_seq_id=0, base_model="fake")
            model_id = (await ended(created))["model_id"]
            await ended(await post("/save_weights", model_id=model_id, seq_id=1, path="taken"))
            sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "fake"}
            await post("/create_sampling_session", **sampler)

            content: bytes
            match asked:
                case pb.ForwardBackwardRequest():
                    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=2)
                    message.MergeFrom(asked)
                    content = message.SerializeToString()
                case bytes() if path == "forward_backward":
                    content = pb.ForwardBackwardRequest(model_id=model_id, seq_id=2).SerializeToString() + asked
                case bytes():
                    content = json.dumps({"model_id": model_id, "seq_id": 2}).encode()[:-1] + asked
                case _:
                    content = json.dumps({"model_id": model_id, "seq_id": 2, **asked}).encode()
            refused = await client.post(f"/{path}", content=content)
            assert refused.status_code in {200, 400}, refused.text
            if refused.status_code == 200:
                assert (await ended(refused.json()))["category"] == "user"
            next_one = await post("/save_weights", model_id=model_id, seq_id=3, path="next")
            assert (await ended(next_one))["path"].endswith("/next")


IDS = st.sampled_from(["0", "1", "a/b", "", "x" * 600, "\x00", "tinker://a/weights/b", "sampler"])
NUMBERS = st.sampled_from([0, 1, 2, -1, 10**6, 2**31, 2**63 - 1])


@given(st.lists(st.tuples(st.integers(0, 7), IDS, NUMBERS, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_values_make_a_server_error(tmp_path_factory: Any, steps: list[tuple[int, str, int, bool]]):
    """Well-formed requests with bad values, in any order, against live ids."""

    async def send() -> None:
        async with service_over_fakes(tmp_path_factory.mktemp("db"), world := FakeWorld(), world.facts) as service:
            app = create_app(service, auth=Keys(), ready=lambda: None, settings=HttpSettings(long_poll_s=0.0))
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
