"""The unmodified SDK against a real server with a real rank: every call, two clients at once, and other people's bugs.

The model is a tiny random Llama in float32, so that equal means equal.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from descant.pools.transfer import TRANSFER
from descant.testing.server import END_S, Server, serve
from descant.testing.tiny import MAX_CONTEXT_LENGTH, VOCAB_SIZE, tiny_model

KEY = "tml-alice"

SETTINGS = (
    "rank.device=cpu",
    "rank.dtype=float32",
    "offload.version_bytes=100000",
    "offload.host_bytes=100000",
    "service.max_training_bytes=100000",
)
"""Room for two published versions in the bank, and for about two more in host memory; and for the data of some 5000
tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("llama", tmp_path_factory.mktemp("llama")))


APART = ("parallel.train_replicas=1", "parallel.sample_replicas=1")


@pytest.fixture(scope="module", params=[(), APART], ids=["together", "apart"])
def server(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With one replica that trains and samples, and with one for each."""
    data_dir = tmp_path_factory.mktemp("server") / "data"
    with serve(Path(model), data_dir, *SETTINGS, *request.param) as running:
        yield running
        left = [path.name for path in data_dir.iterdir() if path.name.startswith(TRANSFER)]
        assert left == []


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient, model: str) -> tinker.TrainingClient:
    return service.create_lora_training_client(model, rank=8, seed=0).result(END_S)


def datum(length: int = 9, seed: int = 0, **inputs: Any) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE, length + 1)
    arrays = {"target_tokens": tokens[1:].astype(np.int64), **inputs}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={name: types.TensorData.from_numpy(np.asarray(array)) for name, array in arrays.items()},
    )


def rl_datum(length: int = 9, seed: int = 0) -> types.Datum:
    random = np.random.default_rng(seed + 100)
    logprobs, advantages = random.normal(-5.5, 0.3, length), random.normal(0, 1, length)
    return datum(length, seed, logprobs=logprobs.astype(np.float32), advantages=advantages.astype(np.float32))


def prompt(length: int = 6, seed: int = 0) -> types.ModelInput:
    return types.ModelInput.from_ints(np.random.default_rng(seed).integers(4, VOCAB_SIZE, length).tolist())


def step(client: tinker.TrainingClient, data: list[types.Datum], lr: float = 1e-2, loss_fn: Any = "cross_entropy"):
    backward = client.forward_backward(data, loss_fn)
    update = client.optim_step(types.AdamParams(learning_rate=lr))
    return backward.result(END_S), update.result(END_S)


def logprobs(client: tinker.TrainingClient, data: list[types.Datum]) -> np.ndarray:
    outputs = client.forward(data, "cross_entropy").result(END_S).loss_fn_outputs
    return np.concatenate([output["logprobs"].to_numpy().ravel() for output in outputs])


# --------------------------------------------------------------------------------------------------------------------
# Every call


def test_capabilities_info_and_tokenizer(server: Server, training: tinker.TrainingClient, model: str):
    capabilities = tinker.RestClient(base_url=server.url, api_key=KEY).get_server_capabilities().result(END_S)
    assert model in [entry.model_name for entry in capabilities.supported_models]
    assert capabilities.supported_models[0].max_context_length == MAX_CONTEXT_LENGTH
    info = training.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (model, 8, True)
    tokenizer = training.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro"])
def test_reinforcement_losses(training: tinker.TrainingClient, loss_fn: Any):
    data = [rl_datum(5, 1), rl_datum(70, 2)]
    backward, update = step(training, data, loss_fn=loss_fn)
    assert [output["logprobs"].shape for output in backward.loss_fn_outputs] == [[5], [70]]
    assert np.isfinite(backward.metrics["loss:sum"])
    assert 0 < backward.metrics["entropy:mean"] < np.log(VOCAB_SIZE)
    assert update.metrics is not None
    assert update.metrics["grad_norm:mean"] > 0


def test_supervised_training_lowers_the_loss_and_weights_count(training: tinker.TrainingClient):
    half = np.array([1, 0, 1, 0, 1, 0, 1, 0, 0.5], np.float32)
    data = [datum(9, 1), datum(9, 2, weights=half)]
    first, _ = step(training, data)
    rows = [output["logprobs"].to_numpy() for output in first.loss_fn_outputs]
    assert first.metrics["loss:sum"] == pytest.approx(-rows[0].sum() - (rows[1] * half).sum(), rel=1e-5)
    for _ in range(8):
        last, _ = step(training, data)
    assert last.metrics["loss:sum"] < first.metrics["loss:sum"] - 1


def test_many_targets_a_position(training: tinker.TrainingClient):
    targets = np.random.default_rng(0).integers(0, VOCAB_SIZE, (9, 3))
    weights = np.full((9, 3), 0.25, np.float32)
    output, _ = step(training, [datum(9, 0, target_tokens=targets, weights=weights), datum(4)])
    assert [o["logprobs"].shape for o in output.loss_fn_outputs] == [[9, 3], [4]]


def test_a_custom_loss_is_its_built_in_twin(service: tinker.ServiceClient, model: str):
    def negative_sum(data: Any, rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(row.sum() for row in rows), {}

    custom, built_in = (service.create_lora_training_client(model, rank=4, seed=5).result(END_S) for _ in range(2))
    output = custom.forward_backward_custom([datum(7)], negative_sum).result(END_S)
    custom.optim_step(types.AdamParams(learning_rate=1e-2)).result(END_S)
    expected, _ = step(built_in, [datum(7)])
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    np.testing.assert_allclose(logprobs(custom, [datum(7)]), logprobs(built_in, [datum(7)]), atol=1e-5)


def test_checkpoints(service: tinker.ServiceClient, server: Server, training: tinker.TrainingClient, model: str):
    data = [datum(20, 3)]
    step(training, data)
    path = training.save_state("same-name").result(END_S).path
    sampler_path = training.save_weights_for_sampler("same-name").result(END_S).path
    assert (path.split("/")[-2], sampler_path.split("/")[-2]) == ("weights", "sampler_weights")
    saved = logprobs(training, data)
    step(training, data)
    went_on = logprobs(training, data)

    resumed = service.create_training_client_from_state_with_optimizer(path).result(END_S)
    np.testing.assert_array_equal(logprobs(resumed, data), saved)
    step(resumed, data)
    np.testing.assert_array_equal(logprobs(resumed, data), went_on)

    fresh_moments = service.create_training_client_from_state(path).result(END_S)
    step(fresh_moments, data, lr=0.0)
    np.testing.assert_array_equal(logprobs(fresh_moments, data), saved)

    into = service.create_lora_training_client(model, rank=8, seed=9).result(END_S)
    into.load_state(path).result(END_S)
    np.testing.assert_array_equal(logprobs(into, data), saved)
    with pytest.raises(tinker.BadRequestError, match="expected 1: weights are loaded into a model only before"):
        into.load_state(path).result(END_S)

    info = tinker.RestClient(base_url=server.url, api_key=KEY).get_weights_info_by_tinker_path(path).result(END_S)
    assert (info.base_model, info.lora_rank, info.train_mlp) == (model, 8, True)

    sampler = service.create_sampling_client(model_path=sampler_path).result(END_S)
    assert sampler.get_base_model() == model
    tokens = data[0].model_input.to_ints()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result(END_S)
    np.testing.assert_allclose(scores[1:], saved[:-1], atol=1e-4)


def test_sampling(training: tinker.TrainingClient, service: tinker.ServiceClient, model: str):
    step(training, [datum(9, 1)])
    sampler = training.save_weights_and_get_sampling_client().result(END_S)
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop=[])
    response = sampler.sample(prompt(70), 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result(END_S)
    assert [len(sequence.tokens) for sequence in response.sequences] == [12] * 3
    assert len({tuple(sequence.tokens) for sequence in response.sequences}) == 3
    assert {sequence.stop_reason for sequence in response.sequences} == {"length"}
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    assert response.topk_prompt_logprobs is not None
    for sequence in response.sequences:
        whole = [*prompt(70).to_ints(), *sequence.tokens]
        scored = types.Datum(
            model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": np.array(whole[1:])}
        )
        trained = logprobs(training, [scored])
        assert sequence.logprobs is not None
        np.testing.assert_allclose(sequence.logprobs, trained[69:], atol=1e-4)
        np.testing.assert_allclose(response.prompt_logprobs[1:], trained[:69], atol=1e-4)

    again = sampler.sample(prompt(70), 3, params).result(END_S)
    assert (response.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, 64), "full pages are kept"
    assert [s.tokens for s in again.sequences] == [s.tokens for s in response.sequences], "a seed fixes the tokens"
    stop = response.sequences[0].tokens[4]
    stopped = (
        sampler.sample(prompt(70), 1, types.SamplingParams(max_tokens=12, seed=3, stop=[stop]))
        .result(END_S)
        .sequences[0]
    )
    first = response.sequences[0].tokens.index(stop)
    assert (stopped.tokens, stopped.stop_reason) == (response.sequences[0].tokens[: first + 1], "stop")

    greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    before = sampler.sample(prompt(), 1, greedy).result(END_S)
    for _ in range(5):
        step(training, [datum(9, 1)], lr=0.1)
    assert sampler.sample(prompt(), 1, greedy).result(END_S).sequences[0].tokens == before.sequences[0].tokens
    newer = training.save_weights_and_get_sampling_client().result(END_S)
    assert newer.sample(prompt(), 1, greedy).result(END_S).sequences[0].tokens != before.sequences[0].tokens
    base = service.create_sampling_client(base_model=model).result(END_S)
    assert base.sample(prompt(), 1, greedy).result(END_S).sequences[0].tokens != before.sequences[0].tokens


def test_scores_of_prompts_and_samples(training: tinker.TrainingClient):
    step(training, [datum(9, 1)])
    sampler = training.save_weights_and_get_sampling_client().result(END_S)
    full = [3 + i % 40 for i in range(MAX_CONTEXT_LENGTH)]
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(full)).result(END_S)
    assert len(scores) == MAX_CONTEXT_LENGTH, "a prompt may fill the context"
    fewer = sampler.compute_logprobs(types.ModelInput.from_ints(full[:-1])).result(END_S)
    np.testing.assert_allclose(scores[1:-1], fewer[1:], atol=1e-4)
    asked = prompt(30)
    tokens = asked.to_ints()
    whole = sampler.compute_logprobs(asked).result(END_S)
    end = sampler.compute_logprobs(asked, prompt_logprobs_last_n=4).result(END_S)
    assert end[:26] == [None] * 26
    np.testing.assert_allclose(end[26:], whole[26:], atol=1e-4)

    ids = torch.full((29, 3), -1)
    ids[:, 1] = torch.tensor(tokens[1:])
    ids[28, 2] = 5
    for target in (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)):
        response = sampler.sample(asked, 1, types.SamplingParams(max_tokens=1), target_prompt_logprobs=target).result(
            END_S
        )
        assert response.prompt_logprobs is None
        assert response.target_prompt_logprobs is not None
        got = response.target_prompt_logprobs.to_torch()
        assert got.shape == (29, 3)
        assert (got[ids < 0] == 0).all()
        np.testing.assert_allclose(got[:, 1], whole[1:], atol=1e-4)
        other = sampler.compute_logprobs(types.ModelInput.from_ints([*tokens[:29], 5])).result(END_S)
        assert float(got[28, 2]) == pytest.approx(other[-1], abs=1e-4)

    params = types.SamplingParams(max_tokens=6, temperature=0.5, seed=1, stop=[])
    response = sampler.sample(asked, 2, params, topk_sample_logprobs=4, prompt_alt_tokens_k=3).result(END_S)
    assert response.prompt_alt_tokens is not None
    alternatives, alternative_logprobs = (
        response.prompt_alt_tokens.tokens.to_torch(),
        response.prompt_alt_tokens.logprobs.to_torch(),
    )
    assert alternatives.shape == alternative_logprobs.shape == (29, 3)
    scored = sampler.sample(
        asked, 1, types.SamplingParams(max_tokens=1), target_prompt_logprobs=types.TensorData.from_torch(alternatives)
    ).result(END_S)
    assert scored.target_prompt_logprobs is not None
    np.testing.assert_allclose(alternative_logprobs, scored.target_prompt_logprobs.to_torch(), atol=1e-4)
    for sequence in response.sequences:
        assert sequence.topk_logprobs is not None
        assert sequence.logprobs is not None
        assert len(sequence.topk_logprobs) == 6
        for token, logprob, likely in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert likely is not None
            assert len(likely) == 4
            assert dict(likely).get(token, logprob) == pytest.approx(logprob, abs=1e-5)

    with pytest.raises(tinker.BadRequestError, match="topk_sample_logprobs is 21, expected 0 to 20"):
        sampler.sample(asked, 1, params, topk_sample_logprobs=21).result(END_S)
    with pytest.raises(tinker.RequestFailedError, match="prompt_logprobs_last_n is 30, expected 1 to 29"):
        sampler.compute_logprobs(asked, prompt_logprobs_last_n=30).result(END_S)


# --------------------------------------------------------------------------------------------------------------------
# Several people


def test_two_clients_at_once_equal_each_alone(server: Server, model: str):
    def train(seed: int, ready: threading.Barrier) -> np.ndarray:
        with tinker.ServiceClient(base_url=server.url, api_key=f"tml-client-{seed}") as client:
            training = client.create_lora_training_client(model, rank=4 + 8 * seed, seed=seed).result(END_S)
            data = [datum(9 + 30 * seed, seed), datum(17, seed + 10)]
            ready.wait(END_S)
            for _ in range(4):
                step(training, data)
                training.save_weights_and_get_sampling_client().result(END_S).sample(
                    prompt(9), 2, types.SamplingParams(max_tokens=5)
                ).result(END_S)
            return logprobs(training, data)

    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(train, seed, together) for seed in (0, 1)]
        together = [run.result(4 * END_S) for run in runs]
    for seed in (0, 1):
        # Not bit for bit: in float32 a product of few rows takes another kernel than one of many.
        np.testing.assert_allclose(together[seed], train(seed, threading.Barrier(1)), atol=2e-3)


def test_nobody_sees_another_owners_model(server: Server, training: tinker.TrainingClient):
    def info(key: str) -> httpx.Response:
        return httpx.post(
            f"{server.url}/api/v1/get_info", json={"model_id": training.model_id}, headers={"X-API-Key": key}
        )

    assert info(KEY).status_code == 200
    assert info("tml-mallory").status_code == 404


def test_a_tenant_that_overflows_poisons_nobody(service: tinker.ServiceClient, model: str):
    wild, calm = (service.create_lora_training_client(model, rank=8, seed=s).result(END_S) for s in (1, 2))
    expected = logprobs(calm, [datum(9, 4)])
    wild.forward_backward([datum(9, 1)], "cross_entropy").result(END_S)
    wild.optim_step(types.AdamParams(learning_rate=1e30)).result(END_S)  # 1e30 is a float32 yet
    with pytest.raises(tinker.RequestFailedError, match="finite"):
        wild.forward_backward([datum(9, 1)], "cross_entropy").result(END_S)
    together = [wild.forward([datum(9, 1)], "cross_entropy"), calm.forward([datum(9, 4)], "cross_entropy")]
    np.testing.assert_allclose(together[1].result(END_S).loss_fn_outputs[0]["logprobs"].to_numpy(), expected, atol=1e-4)


# --------------------------------------------------------------------------------------------------------------------
# Bad input: a sentence that names the field, and nothing changed


@pytest.mark.parametrize(
    ("data", "loss_fn", "said"),
    [
        ([datum(9), datum(2, weights=np.ones(3, np.float32))], "cross_entropy",
         r"data\[1\].loss_fn_inputs\['weights'\] has shape \(3,\), expected \(2,\)"),
        ([datum(3, target_tokens=np.array([1, 2, VOCAB_SIZE]))], "cross_entropy", r"data\[0\].*target_tokens.*264"),
        ([datum(3, weights=np.array([1, np.nan, 1], np.float32))], "cross_entropy", r"data\[0\].*weights.*finite"),
        ([datum(MAX_CONTEXT_LENGTH + 1)], "cross_entropy", rf"data\[0\].*{MAX_CONTEXT_LENGTH}"),
        ([datum(3)], "ppo", r"data\[0\].*logprobs"),
        ([datum(3)], "no_such_loss", "no_such_loss.*cross_entropy"),
        ([datum(3)], "stable_reinforce", "stable_reinforce.*cross_entropy"),
    ],
    ids=["lengths", "target", "nan", "too long", "missing", "unknown loss", "not served"],
)  # fmt: skip
def test_a_bad_batch_is_refused_and_not_stepped(
    training: tinker.TrainingClient, data: list[types.Datum], loss_fn: Any, said: str
):
    good = [datum(9, 4)]
    before = logprobs(training, good)
    futures = [training.forward_backward(good, "cross_entropy"), training.forward_backward(data, loss_fn)]
    update = training.optim_step(types.AdamParams(learning_rate=0.1))
    futures[0].result(END_S)
    with pytest.raises(tinker.RequestFailedError, match=said):
        futures[1].result(END_S)
    with pytest.raises(tinker.RequestFailedError, match="seq_id"):
        update.result(END_S)
    np.testing.assert_array_equal(logprobs(training, good), before)
    step(training, good)
    assert (logprobs(training, good) != before).any()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"beta1": 1.0}, "beta1"),
        ({"weight_decay": float("inf")}, "weight_decay"),
    ],
)
def test_bad_adam_params(training: tinker.TrainingClient, params: dict[str, float], said: str):
    with pytest.raises(tinker.RequestFailedError, match=said):
        training.optim_step(types.AdamParams(**params)).result(END_S)


@pytest.mark.parametrize("rank", [0, 257])
def test_bad_ranks(service: tinker.ServiceClient, model: str, rank: int):
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match=f"rank is {rank}"):
        service.create_lora_training_client(model, rank=rank).result(END_S)


@pytest.mark.parametrize(
    ("given", "params", "said"),
    [
        (prompt(MAX_CONTEXT_LENGTH + 1), {"max_tokens": 1}, str(MAX_CONTEXT_LENGTH)),
        (prompt(), {"max_tokens": MAX_CONTEXT_LENGTH}, str(MAX_CONTEXT_LENGTH)),
        (prompt(), {"max_tokens": 0}, "max_tokens"),
        (prompt(), {"max_tokens": 4, "top_p": 0.0}, "top_p"),
        (prompt(), {"max_tokens": 4, "temperature": -1.0}, "temperature"),
        (prompt(), {"max_tokens": 4, "top_k": 0}, "top_k"),
        (types.ModelInput.from_ints([]), {"max_tokens": 4}, "prompt"),
        (types.ModelInput.from_ints([1, VOCAB_SIZE]), {"max_tokens": 4}, str(VOCAB_SIZE)),
        (types.ModelInput.from_ints([1, -1]), {"max_tokens": 4}, "-1"),
    ],
)
def test_bad_samples(
    service: tinker.ServiceClient, model: str, given: types.ModelInput, params: dict[str, Any], said: str
):
    sampler = service.create_sampling_client(base_model=model).result(END_S)
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match=said):
        sampler.sample(given, 1, types.SamplingParams(**params)).result(END_S)
    assert sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=1)).result(END_S).sequences


# --------------------------------------------------------------------------------------------------------------------
# What bit others


def test_a_request_sent_twice_counts_once(server: Server, training: tinker.TrainingClient, model: str):
    """Also at the same time, as a retry after a broken connection is."""
    training.forward_backward([datum(12, 1)], "cross_entropy").result(END_S)
    body = {
        "model_id": training.model_id,
        "seq_id": 2,
        "adam_params": {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12},
    }

    def post(_: int) -> str:
        answer = httpx.post(f"{server.url}/api/v1/optim_step", json=body, headers={"X-API-Key": KEY}, timeout=END_S)
        assert answer.status_code == 200
        return str(answer.json()["request_id"])

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(post, range(16)))
    assert len(ids) == 1
    result = httpx.post(
        f"{server.url}/api/v1/retrieve_future",
        json={"request_id": ids.pop()},
        headers={"X-API-Key": KEY},
        timeout=END_S,
    ).json()
    assert result["metrics"]["step:max"] == 1


def test_pipelined_steps_keep_their_order(service: tinker.ServiceClient, model: str):
    eager, patient = (service.create_lora_training_client(model, rank=8, seed=3).result(END_S) for _ in range(2))
    data = [datum(12, 1)]
    sent = []
    for _ in range(4):
        sent.append(eager.forward_backward(data, "cross_entropy"))
        sent.append(eager.optim_step(types.AdamParams(learning_rate=1e-2)))
    for future in sent:
        future.result(END_S)
    for _ in range(4):
        step(patient, data)
    np.testing.assert_array_equal(logprobs(eager, data), logprobs(patient, data))


def test_more_data_than_are_taken_at_a_time_all_arrive(
    service: tinker.ServiceClient, model: str, caplog: pytest.LogCaptureFixture
):
    client = service.create_lora_training_client(model, rank=8, seed=0).result(END_S)
    caplog.set_level(logging.INFO, "httpx")  # it logs every answer
    length = min(250, MAX_CONTEXT_LENGTH)
    batches = [[datum(length, 10 * number + seed) for seed in range(4000 // length)] for number in range(3)]
    sent = [client.forward_backward(batch, "cross_entropy") for batch in batches]
    update = client.optim_step(types.AdamParams(learning_rate=1e-2))
    outputs = [future.result(END_S) for future in sent]
    assert [len(output.loss_fn_outputs) for output in outputs] == [len(batch) for batch in batches]
    assert update.result(END_S).metrics
    assert any(" 429 " in answer for answer in caplog.messages)


def test_a_gradient_is_a_sum_however_it_is_sent(service: tinker.ServiceClient, model: str):
    norms = []
    for chunks in ([[datum(9, s) for s in range(6)]], [[datum(9, s)] for s in range(6)]):
        client = service.create_lora_training_client(model, rank=8, seed=3).result(END_S)
        for future in [client.forward_backward(chunk, "cross_entropy") for chunk in chunks]:
            future.result(END_S)
        norms.append(client.optim_step(types.AdamParams(learning_rate=0.0)).result(END_S).metrics["grad_norm:mean"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_outputs_belong_to_their_datums(training: tinker.TrainingClient):
    data = [datum(1 + (7 * i) % 60, i) for i in range(64)]
    outputs = training.forward(data, "cross_entropy").result(END_S).loss_fn_outputs
    assert [output["logprobs"].shape for output in outputs] == [[1 + (7 * i) % 60] for i in range(64)]
    for i in (0, 13, 63):
        np.testing.assert_allclose(outputs[i]["logprobs"].to_numpy(), logprobs(training, [data[i]]), atol=1e-4)


def test_two_samplers_of_one_model_both_begin_at_zero(training: tinker.TrainingClient):
    first, second = (training.save_weights_and_get_sampling_client().result(END_S) for _ in range(2))
    params = types.SamplingParams(max_tokens=3, seed=0, temperature=0.0, stop=[])
    answers = [sampler.sample(prompt(), 1, params) for sampler in (first, second)]
    assert len({tuple(answer.result(END_S).sequences[0].tokens) for answer in answers}) == 1


def test_a_sampling_client_keeps_its_version_however_many_there_are(training: tinker.TrainingClient, server: Server):
    """The SDK never closes them; most of these have gone to disk when they are asked again."""
    samplers, expected = [], []
    for _ in range(12):
        step(training, [datum(9, 1)], lr=0.02)
        samplers.append(training.save_weights_and_get_sampling_client().result(END_S))
        expected.append(logprobs(training, [datum(12, 7)]))
    data_dir = Path(next(line for line in server.printed if line.startswith("data in ")).removeprefix("data in "))
    assert list((data_dir / "spill").rglob("*.safetensors"))
    scored = types.ModelInput.from_ints(datum(12, 7).model_input.to_ints())
    for index in [*range(12), 0, 5]:
        scores = samplers[index].compute_logprobs(scored).result(END_S)
        np.testing.assert_allclose(scores[1:], expected[index][:-1], atol=1e-4)
    assert np.abs(expected[0] - expected[-1]).max() > 0.1


def test_a_new_adapter_inherits_nothing(server: Server, service: tinker.ServiceClient, model: str):
    base = service.create_sampling_client(base_model=model).result(END_S)
    expected = base.compute_logprobs(prompt(20)).result(END_S)
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as passing:
        client = passing.create_lora_training_client(model, rank=8).result(END_S)
        step(client, [datum(9)], lr=0.1)
    successor = service.create_lora_training_client(model, rank=8).result(END_S)
    sampler = successor.save_weights_and_get_sampling_client().result(END_S)
    np.testing.assert_allclose(sampler.compute_logprobs(prompt(20)).result(END_S)[1:], expected[1:], atol=1e-5)


def test_more_samples_than_can_run_at_once_all_end(training: tinker.TrainingClient):
    sampler = training.save_weights_and_get_sampling_client().result(END_S)
    params = types.SamplingParams(max_tokens=3, stop=[])
    futures = [sampler.sample(prompt(5, seed=i), 2, params) for i in range(200)]
    assert all(len(future.result(4 * END_S).sequences) == 2 for future in futures)


def test_what_is_not_served_says_so(server: Server):
    answer = httpx.get(f"{server.url}/api/v1/training_runs", headers={"X-API-Key": KEY})
    assert answer.status_code == 404
    assert "not served" in answer.json()["detail"]


def test_the_readmes_example_runs_as_it_stands(server: Server):
    """In a process of its own: the SDK keeps what it has once connected to."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert example is not None
    env = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    # The SDK's native threads abort the interpreter now and then as it ends (SIGABRT), when all has been done.
    program = example[1] + "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=END_S, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.splitlines()[:5]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
