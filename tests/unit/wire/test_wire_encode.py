from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from descant.errors import Lost, NotFound, Overloaded, RankDied, UserError
from descant.types import (
    ForwardBackwardOutput,
    Lora,
    ModelCreated,
    OptimStepOutput,
    PromptAltTokens,
    PromptScores,
    SampledSequence,
    SampleOutput,
    SamplerWeightsSaved,
    TensorData,
    TopK,
    WeightsLoaded,
    WeightsSaved,
)
from descant.wire.encode import JSON, PROTOBUF, encode


def forward_backward(*outputs: dict[str, np.ndarray], **metrics: float) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(
        loss_fn_outputs=outputs, metrics={name.replace("__", ":"): value for name, value in metrics.items()}
    )


def read(output: ForwardBackwardOutput) -> sdk.ForwardBackwardOutput:
    encoded = encode(output)
    assert encoded.content_type == PROTOBUF
    return deserialize_forward_backward_output(encoded.body)


shapes = st.tuples(st.integers(0, 5)) | st.tuples(st.integers(0, 5), st.integers(1, 3))


@given(st.lists(shapes, max_size=8), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_output_i_belongs_to_datum_i_whatever_the_shapes(shapes: list[tuple[int, ...]], seed: int):
    rng = np.random.default_rng(seed)
    outputs = [
        {"logprobs": rng.normal(size=shape).astype(np.float32), "ids": rng.integers(0, 9, size=shape)}
        for shape in shapes
    ]
    decoded = read(forward_backward(*outputs, loss__sum=1.5)).loss_fn_outputs
    assert len(decoded) == len(outputs)
    for theirs, ours in zip(decoded, outputs, strict=True):
        assert set(theirs) == {"logprobs", "ids"}
        for name, array in ours.items():
            assert theirs[name].shape == list(array.shape)
            np.testing.assert_array_equal(theirs[name].to_numpy().reshape(array.shape), array)


def test_arrays_without_order_in_memory():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    decoded = read(forward_backward({"logprobs": array})).loss_fn_outputs[0]["logprobs"]
    np.testing.assert_array_equal(decoded.to_numpy().reshape(3, 2), array)


def test_metrics():
    output = read(
        forward_backward({"logprobs": np.zeros(1, np.float32)}, loss__sum=float("nan"), e__mean=np.float32(2))
    )
    assert np.isnan(output.metrics["loss:sum"])
    assert output.metrics["e:mean"] == 2.0
    assert output.loss_fn_output_type == "TensorData"


def test_a_metric_the_sdk_would_choke_on_is_left_out_and_logged(caplog: pytest.LogCaptureFixture):
    output = read(ForwardBackwardOutput(loss_fn_outputs=(), metrics={"loss:sum": 1.0, "grad_norm": 2.0, "a:b:c": 3.0}))
    assert output.metrics == {"loss:sum": 1.0}
    assert "grad_norm" in caplog.text


def test_sample():
    sequences = (
        SampledSequence(
            tokens=np.array([4, 5], np.int32), logprobs=np.array([-0.5, -1.0], np.float32), stop_reason="stop"
        ),
        SampledSequence(tokens=np.array([6], np.int32), logprobs=np.array([-2.0], np.float32), stop_reason="length"),
    )
    topk = TopK(
        token_ids=np.array([[0, 0], [7, 8], [9, 0]], np.int32),
        logprobs=np.array([[-99999, -99999], [-0.1, -0.2], [-0.3, -99999]], np.float32),
    )
    prompt = PromptScores(logprobs=np.array([np.nan, -1.5, -2.5], np.float32), topk=topk)
    output = SampleOutput(sequences=sequences, prompt=prompt, versions=(), prompt_cache_hit_tokens=128)
    encoded = encode(output)
    assert encoded.content_type == PROTOBUF
    response = deserialize_sample_response(encoded.body)
    assert [sequence.tokens for sequence in response.sequences] == [[4, 5], [6]]
    assert [sequence.logprobs for sequence in response.sequences] == [[-0.5, -1.0], [-2.0]]
    assert [sequence.stop_reason for sequence in response.sequences] == ["stop", "length"]
    assert response.prompt_cache_hit_tokens == 128
    assert response.prompt_logprobs == [None, -1.5, -2.5]
    assert response.topk_prompt_logprobs is not None
    assert response.topk_prompt_logprobs[0] is None
    assert [[token for token, _ in row] for row in response.topk_prompt_logprobs[1:]] == [[7, 8], [9]]


def test_all_scores_of_a_sample():
    topk = TopK(
        token_ids=np.array([[4, 2], [5, 0]], np.int32), logprobs=np.array([[-0.5, -1], [-1, -99999]], np.float32)
    )
    sequence = SampledSequence(
        tokens=np.array([4, 5], np.int32),
        logprobs=np.array([-0.5, -1.0], np.float32),
        stop_reason="stop",
        topk_logprobs=topk,
    )
    sparse = TensorData(
        data=np.array([-0.5, -1.5], np.float32),
        shape=(2, 3),
        sparse_crow_indices=np.array([0, 1, 2], np.int64),
        sparse_col_indices=np.array([2, 0], np.int64),
    )
    alternatives = PromptAltTokens(
        tokens=np.array([[1, 2], [3, 4]], np.int64), logprobs=np.array([[-1, -2], [-3, -4]], np.float32)
    )
    prompt = PromptScores(target_logprobs=sparse, alt_tokens=alternatives)
    response = deserialize_sample_response(encode(SampleOutput(sequences=(sequence,), prompt=prompt, versions=())).body)
    assert response.sequences[0].topk_logprobs == [[(4, -0.5), (2, -1.0)], [(5, -1.0)]]
    assert response.prompt_logprobs is None
    assert response.target_prompt_logprobs is not None
    assert response.target_prompt_logprobs.sparse_crow_indices == [0, 1, 2]
    assert response.target_prompt_logprobs.to_torch().tolist() == [[0, 0, -0.5], [-1.5, 0, 0]]
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.to_torch().tolist() == [[1, 2], [3, 4]]
    assert response.prompt_alt_tokens.logprobs.to_torch().tolist() == [[-1, -2], [-3, -4]]


@pytest.mark.parametrize("rows", [0, 2])
def test_dense_scores_of_a_sample(rows: int):
    data = np.arange(rows * 2, dtype=np.float32)
    dense = TensorData(data=data, shape=(rows, 2))
    alternatives = PromptAltTokens(tokens=np.zeros((rows, 2), np.int64), logprobs=data.reshape(rows, 2))
    output = SampleOutput(
        sequences=(), prompt=PromptScores(target_logprobs=dense, alt_tokens=alternatives), versions=()
    )
    response = deserialize_sample_response(encode(output).body)
    assert response.target_prompt_logprobs is not None
    assert response.target_prompt_logprobs.to_torch().tolist() == data.reshape(rows, 2).tolist()
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.to_torch().shape == (rows, 2)


def test_a_sample_without_scores():
    sequence = SampledSequence(tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), stop_reason="length")
    response = deserialize_sample_response(encode(SampleOutput(sequences=(sequence,), prompt=None, versions=())).body)
    assert response.prompt_logprobs is None
    assert response.topk_prompt_logprobs is None
    assert response.prompt_cache_hit_tokens == 0
    assert response.sequences[0].tokens == []


@pytest.mark.parametrize(
    ("answer", "model", "fields"),
    [
        (ModelCreated(model_id="m", trainable=Lora(), step=0), sdk.CreateModelResponse, {"model_id": "m"}),
        (OptimStepOutput(metrics={"grad_norm": 0.5}), sdk.OptimStepResponse, {"metrics": {"grad_norm": 0.5}}),
        (WeightsSaved(path="p"), sdk.SaveWeightsResponse, {"path": "p"}),
        (SamplerWeightsSaved(path="p", sampling_session_id=None), sdk.SaveWeightsForSamplerResponse, {"path": "p"}),
        (WeightsLoaded(path="p", model_id="m"), sdk.LoadWeightsResponse, {"path": "p", "model_id": "m"}),
    ],
    ids=["create", "step", "save", "sampler", "load"],
)
def test_json_answers_are_the_sdks(answer: object, model: type, fields: dict[str, object]):
    encoded = encode(answer)
    assert encoded.content_type == JSON
    response = model.model_validate(json.loads(encoded.body))
    assert {name: getattr(response, name) for name in fields} == fields


def test_an_ephemeral_save():
    payload = json.loads(encode(SamplerWeightsSaved(path=None, sampling_session_id="s:sample:0")).body)
    assert payload["sampling_session_id"] == "s:sample:0"
    assert payload["path"] is None


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (UserError("no"), "user"),
        (NotFound("no"), "user"),
        (Overloaded("no"), "server"),
        (RankDied("no"), "server"),
        (Lost("no"), "server"),
    ],
)
def test_failures(error: Exception, category: str):
    assert json.loads(encode(error).body) == {"error": "no", "category": category}


def test_nothing_outside_the_tree_leaks(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        payload = json.loads(encode(RuntimeError("secret detail")).body)
    assert payload["category"] == "server"
    assert "secret" not in payload["error"]
    reference = payload["error"].split()[2].rstrip(";")
    assert reference in caplog.text
    assert "secret detail" in caplog.text


def test_an_answer_that_cannot_be_encoded_is_an_internal_error():
    encoded = encode(forward_backward({"logprobs": np.zeros(2, np.complex64)}, loss__sum=0.0))
    assert json.loads(encoded.body)["error"].startswith("internal error")
