"""The unmodified SDK against the app on a socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types as sdk


@pytest.fixture
def sdk_service(running: Any):
    with tinker.ServiceClient(base_url=running.url, api_key="tml-a") as service:
        yield service


def datum(num_tokens: int = 3, **inputs: Any) -> sdk.Datum:
    inputs = inputs or {"weights": torch.ones(num_tokens)}
    tokens = list(range(1, num_tokens + 1))
    return sdk.Datum(
        model_input=sdk.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": torch.tensor(tokens), **inputs},
    )


def test_every_call_of_a_training_run(sdk_service: tinker.ServiceClient, service: Any, running: Any):
    capabilities = tinker.RestClient(base_url=running.url, api_key="tml-a").get_server_capabilities().result()
    assert [model.model_name for model in capabilities.supported_models] == ["org/tiny"]

    training = sdk_service.create_lora_training_client(base_model="org/tiny", rank=4, seed=0).result()
    assert training.model_id == "session-0:train:0"
    info = training.get_info()
    assert (info.model_data.model_name, info.lora_rank) == ("org/tiny", 4)
    assert service.models[training.model_id][1].seed == 0

    output = training.forward_backward([datum(3), datum(5)], "cross_entropy").result()
    assert [o["logprobs"].tolist() for o in output.loss_fn_outputs] == [[-1, -2, -3], [-1, -2, -3, -4, -5]]
    assert output.metrics["loss:sum"] == 2.0
    training.forward([datum(2)], "cross_entropy").result()
    step = training.optim_step(sdk.AdamParams(learning_rate=0.0, beta1=0.0)).result()
    assert step.metrics == {"grad_norm": 0.5}
    assert [command.seq_id for command in service.commands] == [1, 2, 3]
    assert [command.forward_only for command in service.commands[:2]] == [False, True]
    assert service.commands[2].adam_params.learning_rate == 0.0
    assert service.commands[2].adam_params.beta1 == 0.0

    path = training.save_state("s1").result().path
    assert path == "tinker://session-0:train:0/weights/s1"
    assert training.save_weights_for_sampler("s2").result().path == "tinker://session-0:train:0/sampler_weights/s2"
    sampling = training.save_weights_and_get_sampling_client().result()
    response = sampling.sample(
        sdk.ModelInput.from_ints([5, 6, 7]),
        num_samples=2,
        sampling_params=sdk.SamplingParams(max_tokens=4, temperature=0.0, seed=0, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=sdk.TensorData.from_torch(torch.tensor([[4], [-1]])),
        prompt_alt_tokens_k=0,
        prompt_logprobs_last_n=2,
    ).result()
    sent = service.commands[-1]
    assert (sent.topk_sample_logprobs, sent.prompt_alt_tokens_k, sent.prompt_logprobs_last_n) == (3, 0, 2)
    assert sent.target_prompt_logprobs.data.tolist() == [4, -1]
    assert [sequence.tokens for sequence in response.sequences] == [[0, 1, 2, 3]] * 2
    assert response.sequences[0].stop_reason == "length"
    assert response.prompt_logprobs == [None, -1.5, -1.5]
    assert response.topk_prompt_logprobs is not None
    params = service.commands[-1].sampling_params
    assert (params.temperature, params.seed, params.stop) == (0.0, 0, ())
    assert sampling.compute_logprobs(sdk.ModelInput.from_ints([5, 6])).result() == [None, -1.5]

    again = sdk_service.create_training_client_from_state(path).result()
    assert again.model_id == "session-0:train:1"
    named = sdk_service.create_sampling_client(model_path=path).result()
    assert named.get_base_model() == "org/tiny"


def test_two_dimensional_and_sparse_targets_arrive_dense_and_return_in_shape(
    sdk_service: tinker.ServiceClient, service: Any
):
    training = sdk_service.create_lora_training_client(base_model="org/tiny", rank=4).result()
    targets = torch.zeros(6, 20, dtype=torch.int64)
    targets[1, 3] = 7
    weights = torch.zeros(6, 20)
    weights[1, 3] = -0.5
    sparse = sdk.Datum(
        model_input=sdk.ModelInput.from_ints([1] * 6), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    output = training.forward_backward([sparse, datum(2)], "cross_entropy").result()
    first = service.commands[0].data[0].loss_fn_inputs
    np.testing.assert_array_equal(first["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(first["weights"], weights.numpy())
    assert [list(o["logprobs"].shape) for o in output.loss_fn_outputs] == [[6, 20], [2]]


def test_custom_loss(sdk_service: tinker.ServiceClient, service: Any):
    training = sdk_service.create_lora_training_client(base_model="org/tiny", rank=4).result()

    def loss(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((2 * row).sum() for row in logprobs), {"mine:sum": 1.0}

    output = training.forward_backward_custom([datum(3)], loss).result()
    assert output.metrics["loss:sum"] == -12.0
    forward, backward = service.commands
    assert (forward.forward_only, backward.forward_only) == (True, False)
    np.testing.assert_array_equal(backward.data[0].loss_fn_inputs["weights"], [-2.0, -2.0, -2.0])


def test_faults_reach_the_user_by_name(sdk_service: tinker.ServiceClient, service: Any):
    with pytest.raises(tinker.BadRequestError, match="base_model is 'gpt-17'"):
        sdk_service.create_lora_training_client(base_model="gpt-17", rank=4).result()
    training = sdk_service.create_lora_training_client(base_model="org/tiny", rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match=r"adam_params.learning_rate is null, as NaN .* finite"):
        training.optim_step(sdk.AdamParams(learning_rate=float("nan"))).result()
    assert service.refusals[0].seq_id == 1
    assert service.refusals[0].operation == "optim_step"

    image = sdk.ModelInput(chunks=[sdk.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    with pytest.raises(tinker.BadRequestError, match=r"data\[0\].model_input.chunks\[0\] is of type 'image'"):
        training.forward_backward(
            [sdk.Datum(model_input=image, loss_fn_inputs={"target_tokens": [1]})], "cross_entropy"
        ).result()
    assert service.refusals[1].seq_id == 2
    assert service.refusals[1].poisons_gradient
    training.forward_backward([datum()], "cross_entropy").result()
    assert service.commands[-1].seq_id == 3

    sampling = sdk_service.create_sampling_client(base_model="org/tiny").result()
    with pytest.raises(tinker.BadRequestError, match=r"sampling_params.top_p is 0"):
        sampling.sample(sdk.ModelInput.from_ints([1]), 1, sdk.SamplingParams(top_p=0.0)).result()
    with pytest.raises(tinker.BadRequestError, match=r"prompt.chunks\[0\].type is \"image\""):
        sampling.sample(image, 1, sdk.SamplingParams(max_tokens=1)).result()


def test_a_session_is_created_once_and_finished(running: Any, service: Any):
    with tinker.ServiceClient(base_url=running.url, api_key="tml-a", user_metadata={"who": "ann"}) as client:
        client.create_sampling_client(base_model="org/tiny").result()
    (request,) = service.session_requests
    assert request["user_metadata"] == {"who": "ann"}
    assert request["sdk_version"] == tinker.__version__
    assert request["idempotency_key"]
    assert service.finished == [("session-0", "success")]
