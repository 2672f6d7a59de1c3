"""The composition over fakes: the real SDK, HTTP, service, SQLite and checkpoints on disk; only the rank is small."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from descant import app
from descant.config import Settings, load_settings
from descant.doctor import FAILURE_FILE, LastFailure
from descant.errors import UserError
from descant.ranks.health import Death
from descant.service.backends import Backend
from descant.testing.clock import FakeClock
from descant.testing.fakes import FakeEngine, FakeTrainer, FakeWorld
from descant.testing.pools import FakeReplica
from descant.types import ForwardBackward


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's telemetry would wait at exit for a server that is gone."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@asynccontextmanager
async def served(data_dir: Path, hook: Callable[[object], Awaitable[None]] | None = None) -> AsyncIterator[str]:
    world = FakeWorld() if hook is None else FakeWorld(hook=hook)
    backend = Backend(facts=world.facts, trainer=FakeTrainer(world), engine=FakeEngine(world))
    settings = load_settings(None, [], base=Settings(data_dir=data_dir))
    with app.only_server_of(data_dir), app.listen("127.0.0.1", 0) as listener:
        async with app.serving(settings, [backend], listener):
            yield app.url(listener)


def batch() -> list[types.Datum]:
    tokens = np.array([1, 2, 3, 4], np.int64)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(tokens[1:]),
                "weights": types.TensorData.from_numpy(np.ones(3, np.float32)),
            },
        )
    ]


def client(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key="tml-test-key-1")


def train(url: str) -> tuple[str, float, float]:
    training_client = client(url).create_lora_training_client("fake/bigram", rank=2, seed=0).result()
    first = training_client.forward_backward(batch(), "cross_entropy").result().metrics["loss:sum"]
    training_client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    return training_client.save_state("one").result().path, first, evaluate(training_client)


def evaluate(training_client: tinker.TrainingClient) -> float:
    return training_client.forward(batch(), "cross_entropy").result().metrics["loss:sum"]


def resume(url: str, path: str) -> float:
    return evaluate(client(url).create_training_client_from_state_with_optimizer(path).result())


async def test_a_checkpoint_made_through_the_sdk_goes_on_after_a_restart(tmp_path: Path):
    async with asyncio.timeout(60):
        async with served(tmp_path) as url:
            path, first, trained = await asyncio.to_thread(train, url)
        async with served(tmp_path) as url:
            resumed = await asyncio.to_thread(resume, url, path)
    assert trained < first
    assert resumed == trained


async def test_a_stop_does_not_wait_for_work_that_clients_wait_for(tmp_path: Path):
    """The command is never let go; the client's long poll must not keep the server from ending."""
    entered, never = asyncio.Event(), asyncio.Event()

    async def hook(thing: object) -> None:
        if isinstance(thing, ForwardBackward):
            entered.set()
            await never.wait()

    def submit(url: str) -> None:
        training_client = client(url).create_lora_training_client("fake/bigram", rank=2, seed=0).result()
        training_client.forward_backward(batch(), "cross_entropy")

    async with asyncio.timeout(20):
        async with served(tmp_path, hook) as url:
            await asyncio.to_thread(submit, url)
            await entered.wait()


def test_one_directory_has_one_server(tmp_path: Path):
    with app.only_server_of(tmp_path), pytest.raises(UserError, match="another server uses"):  # noqa: SIM117
        with app.only_server_of(tmp_path):
            pass
    with app.only_server_of(tmp_path):
        pass


def test_a_port_in_use_is_a_sentence():
    with app.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"), app.listen("127.0.0.1", port):
            pass


def test_a_data_directory_that_cannot_be_is_a_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="as data_dir"), app.only_server_of(tmp_path / "file"):
        pass


# --------------------------------------------------------------------------------------------------------------------


async def test_more_replicas_than_gpus_are_refused(tmp_path: Path) -> None:
    settings = load_settings(None, ["parallel.replicas=2"], base=Settings(data_dir=tmp_path))
    with pytest.raises(UserError, match=r"parallel.replicas is 2"):
        await app.ThisMachine(("0",)).specs([app.base_spec("m", settings)])


async def test_bases_divide_the_gpus(tmp_path: Path) -> None:
    settings = load_settings(base=Settings(data_dir=tmp_path))
    specs = await app.ThisMachine(("0", "1", "2")).specs([app.base_spec(name, settings) for name in ("m", "n")])
    visible = [[spec.gpus for spec in of_base] for of_base in specs]
    assert visible == [[("0",), ("1",)], [("2",)]]


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "mps"])
def test_gpus_are_not_asked_for_where_none_is_wanted(device: str) -> None:
    assert app.visible_gpus(device) == ()


async def test_the_last_failure_is_kept_on_disk_and_what_ranks_printed_is_not_reported(tmp_path: Path) -> None:
    failures = app.Failures(tmp_path, FakeClock())
    health = FakeReplica().health
    assert failures.report("replica 0 of m", health, None).last_failure is None
    await failures.record("replica 0 of m", Death(message="it was killed", last_lines="a secret"))
    reported = failures.report("replica 0 of m", health, None).last_failure
    assert reported is not None
    assert (reported.death.message, reported.death.last_lines) == ("it was killed", "")
    assert failures.report("replica 1 of m", health, None).last_failure is None
    written = LastFailure.from_json(json.loads((tmp_path / FAILURE_FILE).read_text()))
    assert (written.who, written.death.last_lines) == ("replica 0 of m", "a secret")
    await app.Failures(tmp_path / "missing", FakeClock()).record("m", Death(message="it was killed"))  # raises nothing
