"""Two keys on one server: one's flood, and what the other asks for meanwhile. Over HTTP, on a tiny model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from descant.testing.server import END_S, Server, serve
from descant.testing.tiny import tiny_model
from descant.wire.tinker_pb2 import SampleResponse

NUM_FLOOD = 40
SETTINGS = (
    "rank.device=cpu",
    "rank.dtype=float32",
    "sample.max_num_seqs=8",
    f"sample.max_queued_requests={NUM_FLOOD // 2}",
    f"service.max_samples_in_flight={NUM_FLOOD}",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(Path(model), tmp_path_factory.mktemp("server") / "data", *SETTINGS) as running:
        yield running


class Client:
    """Samples the base with a key of its own."""

    def __init__(self, server: Server, model: str, key: str):
        self._url = server.url
        self._http = httpx.Client(
            base_url=f"{server.url}/api/v1/", headers={"x-api-key": key}, trust_env=False, timeout=END_S
        )
        self.session = self.post("create_session", {}).json()["session_id"]
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": model}
        self._sampler = self.post("create_sampling_session", body).json()["sampling_session_id"]
        self._num_sent = 0

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(path, json=body)

    def ask(self, prompt: list[int], *, num_samples: int = 1, max_tokens: int = 4) -> httpx.Response:
        self._num_sent += 1
        return self.post(
            "asample",
            {
                "sampling_session_id": self._sampler,
                "seq_id": self._num_sent,
                "num_samples": num_samples,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
                "sampling_params": {"max_tokens": max_tokens, "stop": []},
            },
        )

    def sampled(self, prompt: list[int], **fields: Any) -> SampleResponse:
        submitted = self.ask(prompt, **fields)
        assert submitted.status_code == 200, submitted.text
        answer = self.post("retrieve_future", {"request_id": submitted.json()["request_id"]})
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text
        return SampleResponse.FromString(answer.content)

    def numbers(self) -> dict[str, float]:
        text = self._http.get(f"{self._url}/metrics").text
        pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.partition("{")[0].removeprefix("descant_"): float(value) for name, value in pairs}


def test_a_few_tokens_beside_anothers_flood(server: Server, model: str) -> None:
    """All places, the rank's queue and the server's are the flood's. None of its requests has ended when the other's
    has: 8 samples of 400 tokens each, 8 at a time."""
    heavy, light = Client(server, model, "tml-heavy"), Client(server, model, "tml-light")
    alone = best(light)
    answers = [heavy.ask([5, 6, 7], num_samples=8, max_tokens=400).status_code for _ in range(NUM_FLOOD + 3)]
    assert answers == [200] * NUM_FLOOD + [429] * 3
    while light.numbers()["sample_running"] < 8:
        time.sleep(0.01)
    begun = light.numbers()
    beside = best(light)
    now = light.numbers()
    assert now["samples_in_flight"] == NUM_FLOOD, "the flood was over before"
    assert now["sample_preemptions_total"] > begun["sample_preemptions_total"], "nobody made way"
    print(f"\n4 tokens: {1000 * alone:.1f} ms alone, {1000 * beside:.1f} ms beside the flood ({beside / alone:.1f} x)")
    heavy.post(f"sessions/{heavy.session}/finish", {"reason": {"type": "success"}})


def best(client: Client) -> float:
    """Seconds for 4 tokens, of five times the median."""
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        assert len(client.sampled([7, 8, 9]).sequences[0].tokens) == 4 * 4, "int32"
        seconds.append(time.monotonic() - start)
    return sorted(seconds)[2]


def test_nobody_can_tell_what_another_has_asked(server: Server, model: str) -> None:
    alice, bob = Client(server, model, "tml-alice"), Client(server, model, "tml-bob")
    prompt = [4 + i % 200 for i in range(150)]
    hits = [client.sampled(prompt).prompt_cache_hit_tokens for client in (alice, bob, alice, bob)]
    assert hits == [0, 0, 128, 128]
