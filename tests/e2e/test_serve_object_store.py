"""``descant serve`` with its checkpoints on S3: another server, on another machine's disk, goes on from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from descant.testing.s3_server import BUCKET, ENVIRONMENT, Proxy, s3_server
from descant.testing.server import END_S, serve
from descant.testing.tiny import tiny_model


def batch() -> list[types.Datum]:
    tokens = np.arange(10, 20)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(tokens[1:].astype(np.int64)),
                "weights": types.TensorData.from_numpy(np.ones(9, np.float32)),
            },
        )
    ]


def step(client: tinker.TrainingClient) -> float:
    """The loss before it."""
    backward = client.forward_backward(batch(), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=END_S)
    return backward.result(timeout=END_S).metrics["loss:sum"]


def tokens(client: tinker.ServiceClient, path: str) -> list[int]:
    sampler = client.create_sampling_client(model_path=path).result(timeout=END_S)
    greedy = types.SamplingParams(max_tokens=5, temperature=0.0)
    prompt = types.ModelInput.from_ints([10, 11, 12])
    return sampler.sample(prompt, num_samples=1, sampling_params=greedy).result(timeout=END_S).sequences[0].tokens


def test_another_server_goes_on_from_what_one_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model = tiny_model("llama", tmp_path / "llama")
    with s3_server() as url, Proxy(url) as proxy:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(name, value)
        setting = f"checkpoints.url=s3://{BUCKET}/checkpoints"
        with serve(model, tmp_path / "one", setting) as server:
            service = tinker.ServiceClient(base_url=server.url, api_key="tml-test-key-1")
            client = service.create_lora_training_client(str(model), rank=4, seed=0).result()
            for _ in range(3):
                step(client)
            saved = client.save_state("state").result(timeout=END_S).path
            sampled = client.save_weights_for_sampler("sampler").result(timeout=END_S).path
            expected = tokens(service, sampled)

            proxy.answers(503, "PUT")
            with pytest.raises(tinker.RequestFailedError) as raised:
                client.save_state("refused").result(timeout=END_S)
            assert f"the object store s3://{BUCKET}/checkpoints answered HTTP 503" in str(raised.value)
            assert not any(value in str(raised.value) for value in ENVIRONMENT.values() if value != "true")
            proxy.sends_on()
            client.save_state("taken").result(timeout=END_S)
            losses = [step(client) for _ in range(2)]
        with serve(model, tmp_path / "two", setting) as server:
            service = tinker.ServiceClient(base_url=server.url, api_key="tml-test-key-1")
            resumed = service.create_training_client_from_state_with_optimizer(saved).result(timeout=END_S)
            assert [step(resumed) for _ in range(2)] == losses
            assert tokens(service, sampled) == expected
