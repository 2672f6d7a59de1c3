"""What a client's loop leaves behind: the unmodified SDK, a real rank, and the files that lie in the data directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from descant.testing.server import END_S, Server, serve
from descant.testing.tiny import tiny_model

pytestmark = pytest.mark.crashes

KEY = "tml-alice"
CYCLES = 60

SETTINGS = (
    "rank.device=cpu",
    "rank.dtype=float32",
    "offload.version_bytes=100000",
    "offload.host_bytes=100000",
    "service.keep_versions=4",
    "service.keep_sampled_s=2",
    "service.session_timeout_s=30",
    "service.sweep_interval_s=0.2",
    "quota.checkpoints=2",
    "quota.models=3",
)
"""Room for two published versions in the bank and about two more in host memory; the others go to files at once."""

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = types.SamplingParams(max_tokens=2, seed=1, stop=[])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "data"


@pytest.fixture(scope="module")
def server(model: str, data_dir: Path) -> Iterator[Server]:
    left = data_dir / "spill" / "of-another-base"
    left.mkdir(parents=True)
    (left / "0-1.version.safetensors").write_bytes(b"an earlier process left it")
    with serve(Path(model), data_dir, *SETTINGS) as running:
        assert not left.exists()
        yield running


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def number(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"x-api-key": KEY}, timeout=END_S, trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"descant_{name}{{"))


def spilled(data_dir: Path) -> int:
    return len(list((data_dir / "spill").glob("**/*.version.safetensors")))


def until(fact: Callable[[], bool], what: str) -> None:
    start = time.monotonic()
    while not fact():
        assert time.monotonic() - start < END_S, f"{what}: not after {END_S} s"
        time.sleep(0.05)


def sampled(client: tinker.SamplingClient) -> types.SampleResponse:
    return client.sample(PROMPT, num_samples=1, sampling_params=PARAMS).result(END_S)


def test_a_loop_that_saves_and_samples_leaves_a_handful(server: Server, model: str, data_dir: Path) -> None:
    most_files = most_held = 0.0
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        training = service.create_lora_training_client(model, rank=8, seed=0).result(END_S)
        first = training.save_weights_and_get_sampling_client().result(END_S)
        for _ in range(CYCLES):
            sampled(training.save_weights_and_get_sampling_client().result(END_S))
            most_files = max(most_files, spilled(data_dir))
            most_held = max(most_held, number(server, "unnamed_versions"))
        until(lambda: number(server, "unnamed_versions") == 4, "the newest alone")
        print(f"\n{CYCLES} saves: at most {most_files:.0f} files and {most_held:.0f} versions at a time")
        assert spilled(data_dir) <= 4
        with pytest.raises(tinker.RequestFailedError, match=r"were released.*service.keep_versions.*save with a name"):
            sampled(first)
        last = training.save_weights_and_get_sampling_client().result(END_S)
        assert len(sampled(last).sequences[0].tokens) == 2
    until(lambda: number(server, "unnamed_versions") == 0 and spilled(data_dir) == 0, "its client has closed")
    assert number(server, "models") == 0


def test_a_client_that_ends_without_a_word_frees_its_weights(server: Server, model: str, data_dir: Path) -> None:
    """Its heartbeats stop, and nothing else tells."""
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers={"x-api-key": KEY}, trust_env=False) as client:

        def post(path: str, **body: object) -> dict[str, str]:
            answer = client.post(path, json=body, timeout=END_S)
            assert answer.status_code == 200, answer.text
            return answer.json()  # type: ignore[no-any-return]

        session = post("create_session")["session_id"]
        model_id = post("create_model", session_id=session, model_seq_id=0, base_model=model, lora_config={"rank": 8})[
            "model_id"
        ]
        for seq_id in range(1, 7):
            saved = post("save_weights_for_sampler", model_id=model_id, seq_id=seq_id, sampling_session_seq_id=seq_id)
            post("retrieve_future", request_id=saved["request_id"])
        assert number(server, "unnamed_versions") >= 4
        until(lambda: number(server, "unnamed_versions") == 0 and spilled(data_dir) == 0, "nothing was heard")
        post("sessions/" + session + "/finish", reason={"type": "success"})


def test_quotas_are_told_at_once(server: Server, model: str) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        clients = [service.create_lora_training_client(model, rank=8).result(END_S) for _ in range(3)]
        start = time.monotonic()
        with pytest.raises(tinker.PermissionDeniedError, match="3 models, expected at most 3"):
            service.create_lora_training_client(model, rank=8).result(END_S)
        for name in ("a", "b"):
            clients[0].save_state(name).result(END_S)
        with pytest.raises(tinker.RequestFailedError, match="you have 2 checkpoints, expected at most 2"):
            clients[0].save_state("c").result(END_S)
        assert time.monotonic() - start < 45, "nothing of it was tried again for long"
