from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types as sdk

from descant import types
from descant.errors import UserError
from descant.wire import requests
from descant.wire.requests import Malformed, parse, parse_sample


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def sample(**fields: Any) -> requests.SampleRequest:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}, {"type": "encoded_text", "tokens": [7]}]}
    return parse_sample(body(**{"sampling_session_id": "s", "seq_id": 0, "prompt": prompt, **fields}))


def targets(
    data: list[Any],
    *,
    shape: tuple[int, ...] | list[int] = (2, 1),
    dtype: str = "int64",
    crow: Any = None,
    col: Any = None,
) -> dict[str, Any]:
    indices = {"sparse_crow_indices": crow, "sparse_col_indices": col}
    return {"target_prompt_logprobs": {"data": data, "shape": list(shape), "dtype": dtype, **indices}}


def optim_step(**fields: Any) -> types.OptimStep:
    return parse(requests.OptimStepRequest, body(**{"model_id": "m", "seq_id": 2, **fields})).to_command()


# ------------------------------------------------------------------------------------------------------------ sampling


def test_the_sdks_sample_request_comes_back():
    request = sdk.SampleRequest(
        num_samples=3,
        prompt=sdk.ModelInput.from_ints([5, 6]),
        sampling_params=sdk.SamplingParams(max_tokens=3, stop=[13, 14], temperature=0.0, seed=0),
        sampling_session_id="s",
        seq_id=0,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
    )
    decoded = parse(requests.SampleRequest, request.model_dump_json(exclude_none=True).encode())
    assert decoded.sampling_params.to_params() == types.SamplingParams(
        max_tokens=3, stop=(13, 14), temperature=0.0, seed=0, top_k=-1, top_p=1.0
    )
    tokens = types.input_tokens(decoded.prompt.to_model_input())
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, [5, 6])
    assert (decoded.num_samples, decoded.prompt_logprobs, decoded.topk_prompt_logprobs) == (3, True, 2)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_sdks_target_tokens_come_back(sparse: bool):
    ids = torch.full((5, 4), -1)
    ids[2, 1], ids[4, 0] = 7, 0
    tensor = sdk.TensorData.from_torch_sparse(ids, pad_value=-1) if sparse else sdk.TensorData.from_torch(ids)
    sent = sample(**targets(**_fields(tensor))).target_prompt_logprobs
    assert sent is not None
    got = sent.to_tensor()
    assert got.shape == (5, 4)
    dense = np.full((5, 4), -1)
    for row, (start, end) in enumerate(pairwise(got.row_starts())):
        columns = got.sparse_col_indices[start:end] if got.sparse_col_indices is not None else np.arange(4)
        dense[row, columns] = got.data[start:end]
    np.testing.assert_array_equal(dense, ids.numpy())
    assert (got.sparse_crow_indices is not None) == sparse


def _fields(tensor: sdk.TensorData) -> dict[str, Any]:
    return {
        "data": list(tensor.data),
        "shape": tensor.shape,
        "crow": tensor.sparse_crow_indices,
        "col": tensor.sparse_col_indices,
    }


def test_chunks_stay_chunks():
    model_input = sample().prompt.to_model_input()
    assert [chunk.tokens.tolist() for chunk in model_input] == [[5, 6], [7]]


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({}, None),
        ({"stop": None}, None),
        ({"stop": []}, ()),
        ({"stop": "ab"}, ("ab",)),
        ({"stop": ["ab", "c"]}, ("ab", "c")),
        ({"stop": [0, 3]}, (0, 3)),
    ],
    ids=["absent", "null", "none", "string", "strings", "tokens"],
)
def test_forms_of_stop(sent: dict[str, Any], meant: tuple[Any, ...] | None):
    assert sample(sampling_params=sent).sampling_params.to_params().stop == meant


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"max_tokens": 0}, "sampling_params.max_tokens is 0, expected greater than or equal to 1"),
        ({"max_tokens": 2**40}, "sampling_params.max_tokens is 1099511627776, expected less than or equal to"),
        ({"max_tokens": "3"}, 'sampling_params.max_tokens is "3", expected a valid integer'),
        ({"max_tokens": True}, "sampling_params.max_tokens is true, expected a valid integer"),
        ({"temperature": -1}, "sampling_params.temperature is -1, expected greater than or equal to 0"),
        ({"temperature": None}, "sampling_params.temperature is null, as NaN"),
        ({"temperature": float("inf")}, "sampling_params.temperature is Infinity, expected a finite number"),
        ({"top_p": 0}, "sampling_params.top_p is 0, expected greater than 0"),
        ({"top_p": 1.5}, "sampling_params.top_p is 1.5, expected less than or equal to 1"),
        ({"top_p": float("nan")}, "sampling_params.top_p is NaN, expected a finite number"),
        ({"top_k": 0}, "sampling_params.top_k is 0, expected -1 (off) or 1 to 2147483647"),
        ({"top_k": -2}, "sampling_params.top_k is -2, expected -1 (off) or 1 to 2147483647"),
        ({"top_k": 2**40}, "sampling_params.top_k is 1099511627776, expected -1 (off) or 1 to 2147483647"),
        ({"top_k": 2**70}, "sampling_params.top_k is 1180591620717411303424, expected -1 (off) or 1 to 2147483647"),
        ({"seed": 2**70}, "sampling_params.seed is 1180591620717411303424, expected less than or equal to 92233"),
        ({"max_tokens": 2**70}, "sampling_params.max_tokens is 1180591620717411303424, expected less than or equal"),
        ({"seed": -1}, "sampling_params.seed is -1, expected greater than or equal to 0"),
        ({"stop": [1, "a"]}, "sampling_params.stop is a list of 2, expected a string, a list of strings or"),
        ({"stop": [True]}, "sampling_params.stop is a list of 1, expected"),
        ({"stop": 5}, "sampling_params.stop is 5, expected"),
        ({"stop": ""}, "sampling_params.stop holds an empty string"),
        ({"stop": [-1]}, "sampling_params.stop holds the token id -1"),
        ([], "sampling_params is a list of 0, expected"),
    ],
)
def test_bad_sampling_params(params: Any, sentence: str):
    with pytest.raises(UserError) as caught:
        sample(sampling_params=params)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1, expected greater than or equal to 0"),
        ({"prompt_alt_tokens_k": 2**20}, "prompt_alt_tokens_k is 1048576, expected less than or equal to 1024"),
        ({"prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n is 0, expected greater than or equal to 1"),
        ({"target_prompt_logprobs": [[4]]}, "target_prompt_logprobs is a list of 1, expected"),
        (targets([4.5]), "target_prompt_logprobs.data[0] is 4.5"),
        (targets([-2, 1]), "target_prompt_logprobs.data[0] is -2, expected -1 to 2147483647"),
        (targets([1, 2], dtype="float32"), "target_prompt_logprobs.dtype is \"float32\", expected 'int64'"),
        (targets([1, 2], shape=[2]), "target_prompt_logprobs.shape"),
        (targets([1, 2, 3]), "target_prompt_logprobs has 3 elements, expected 2 by shape [2, 1]"),
        (targets([1], crow=[0, 1, 1]), "target_prompt_logprobs has one of sparse_crow_indices and sparse_col_indices"),
        (targets([1], crow=[0, 1], col=[0]), "target_prompt_logprobs has 2 sparse_crow_indices, expected 3 that rise"),
        (targets([1], crow=[0, 2, 1], col=[0]), "target_prompt_logprobs has 3 sparse_crow_indices, expected 3 that"),
        (targets([1], crow=[0, 0, 1], col=[1]), "target_prompt_logprobs has 1 sparse_col_indices, expected 1 from 0"),
        (targets([1], crow=[0, 0, 1], col=[-1]), "target_prompt_logprobs.sparse_col_indices[0] is -1"),
        ({"num_samples": 0}, "num_samples is 0, expected greater than or equal to 1"),
        ({"num_samples": 10**9}, "num_samples is 1000000000, expected less than or equal to 1024"),
        ({"prompt": {"chunks": []}}, "prompt has no tokens, expected at least one"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": []}]}}, "prompt has no tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text"}]}}, "prompt.chunks[0] has no tokens"),
        ({"prompt": {"chunks": [{"tokens": [1, -1]}]}}, "prompt.chunks[0].tokens[1] is -1"),
        ({"prompt": {"chunks": [{"tokens": [2**31]}]}}, "prompt.chunks[0].tokens[0] is 2147483648"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, 'prompt.chunks[0].type is "image", which is not'),
        ({"prompt": {"chunks": [{"type": "dmel"}]}}, 'prompt.chunks[0].type is "dmel", which is not served yet'),
        ({"sampling_session_id": ""}, 'sampling_session_id is ""'),
        ({"sampling_session_id": None}, "sampling_session_id is null"),
        ({"seq_id": 2**63}, "seq_id is 9223372036854775808, expected less than"),
    ],
)
def test_bad_samples(field: dict[str, Any], sentence: str):
    with pytest.raises(UserError) as caught:
        sample(**field)
    assert str(caught.value).startswith(sentence)


def test_large_ids_of_clones_are_accepted():
    assert sample(seq_id=10**18).seq_id == 10**18


def test_what_is_off_may_be_said_and_unknown_fields_too():
    off = {"topk_sample_logprobs": 0, "prompt_alt_tokens_k": 0, "record_stability_info": False, "new_field": {"a": 1}}
    assert sample(**off).topk_prompt_logprobs == 0


def test_recording_for_stable_reinforce_may_be_asked_for():
    """The cookbook's RL recipes do so unless another loss is chosen."""
    assert sample(record_stability_info=True).sampling_params == sample().sampling_params


# ------------------------------------------------------------------------------------------------------------ training


def test_zero_is_a_value():
    zeros = {
        "learning_rate": 0,
        "beta1": 0.0,
        "beta2": 0.0,
        "eps": 0.0,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    command = optim_step(adam_params=zeros, seq_id=0)
    assert command.adam_params == types.AdamParams(**zeros)
    assert command.seq_id == 0
    lora = parse(requests.LoraConfig, body(rank=1, seed=0, train_attn=False)).to_lora()
    assert lora == types.Lora(rank=1, seed=0, train_attn=False)


def test_adam_under_its_own_name():
    assert optim_step(optimizer_params={"type": "adamw", "learning_rate": 1.0}).adam_params.learning_rate == 1.0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "the body has neither adam_params nor optimizer_params, expected adam_params"),
        ({"adam_params": {"learning_rate": float("nan")}}, "adam_params.learning_rate is NaN"),
        ({"adam_params": {"learning_rate": None}}, "adam_params.learning_rate is null, as NaN and infinity"),
        ({"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate is -1"),
        ({"adam_params": {"learning_rate": "1"}}, 'adam_params.learning_rate is "1", expected a valid number'),
        ({"adam_params": {"beta1": 1.0}}, "adam_params.beta1 is 1.0, expected less than 1"),
        ({"adam_params": {"beta2": -0.1}}, "adam_params.beta2 is -0.1"),
        ({"adam_params": {"eps": float("-inf")}}, "adam_params.eps is -Infinity"),
        ({"adam_params": {"weight_decay": -1}}, "adam_params.weight_decay is -1"),
        ({"adam_params": {"grad_clip_norm": -1}}, "adam_params.grad_clip_norm is -1"),
        ({"optimizer_params": {"type": "dimuon"}}, 'optimizer_params.type is "dimuon", which is not served yet'),
    ],
)
def test_a_bad_step_keeps_its_place(fields: dict[str, Any], sentence: str):
    with pytest.raises(Malformed) as caught:
        optim_step(**fields)
    assert str(caught.value).startswith(sentence)
    assert (caught.value.model_id, caught.value.seq_id, caught.value.poisons_gradient) == ("m", 2, False)


@pytest.mark.parametrize(
    ("model", "fields", "sentence"),
    [
        (requests.SaveWeightsRequest, {}, "path is missing"),
        (requests.SaveWeightsRequest, {"path": "a", "overwrite": "yes"}, 'overwrite is "yes", expected'),
        (requests.SaveWeightsForSamplerRequest, {}, "the body has neither path nor sampling_session_seq_id"),
        (
            requests.SaveWeightsForSamplerRequest,
            {"path": "a", "sampling_session_seq_id": 0},
            "the body has both path and sampling_session_seq_id",
        ),
        (requests.SaveWeightsForSamplerRequest, {"path": "a", "kind": "new"}, 'kind is "new", expected'),
        (requests.LoadWeightsRequest, {"path": "p"}, "optimizer is missing"),
        (
            requests.LoadWeightsRequest,
            {"path": "p", "optimizer": True, "session_id": "s", "model_seq_id": 1},
            "the body has both forms of address",
        ),
    ],
)
def test_other_ordered_requests_keep_their_place_too(model: Any, fields: dict[str, Any], sentence: str):
    with pytest.raises(Malformed) as caught:
        parse(model, body(model_id="m", seq_id=2, **fields))
    assert str(caught.value).startswith(sentence)
    assert caught.value.seq_id == 2


def test_a_token_is_never_shown():
    with pytest.raises(Malformed) as caught:
        parse(
            requests.LoadWeightsRequest,
            body(model_id="m", seq_id=1, path="p", optimizer=True, weights_access_token="secret"),
        )
    assert "secret" not in str(caught.value)


def test_both_forms_of_loading():
    new = parse(requests.LoadWeightsRequest, body(session_id="s", model_seq_id=0, path="p", optimizer=False)).to_form()
    assert new == requests.LoadIntoNewModel(
        session_id="s", model_seq_id=0, path="p", optimizer=False, base_model=None, user_metadata=None
    )
    into = parse(requests.LoadWeightsRequest, body(model_id="m", seq_id=1, path="p", optimizer=True)).to_form()
    assert into == requests.LoadIntoModel(model_id="m", seq_id=1, path="p", optimizer=True)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, 'optimizer_config.type is "dimuon", which is not'),
        ({"lora_config": {"rank": 1.5}}, "lora_config.rank is 1.5, expected"),
        ({"user_metadata": {"a": 1}}, "user_metadata.a is 1, expected a valid string"),
        ({"model_seq_id": -1}, "model_seq_id is -1"),
    ],
)
def test_bad_models(fields: dict[str, Any], sentence: str):
    with pytest.raises(UserError) as caught:
        parse(requests.CreateModelRequest, body(**{"session_id": "s", "model_seq_id": 0, "base_model": "b", **fields}))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("version", ["0.25.0", "0.38.0", "0.100.0rc1", "1.0", "", "0", "unknown", "v0.1", "9" * 999])
def test_sdks_that_are_served(version: str):
    assert parse(requests.CreateSessionRequest, body(sdk_version=version)).sdk_version == version


@pytest.mark.parametrize("version", ["0.24.1", "0.24.0", "0.3.0", "0.0.1", "0.24"])
def test_sdks_that_are_not_served(version: str):
    with pytest.raises(UserError) as caught:
        parse(requests.CreateSessionRequest, body(sdk_version=version))
    assert str(caught.value) == (
        f'sdk_version is "{version}", expected 0.25 or newer: what that SDK sends to train is not served; '
        "pip install 'tinker>=0.25'"
    )


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model_id": "m", "seq_id": 4, "path": "a", "user_metadata": {"seq_id": "5", "x',
        b'{"path": "\\"seq_id\\": 5, ", "seq_id" : 4 , "model_id" : "m"',
    ],
)
def test_a_body_that_breaks_off_keeps_the_place_that_it_tells(raw: bytes):
    with pytest.raises(Malformed, match="the body is not valid JSON") as caught:
        parse(requests.SaveWeightsRequest, raw)
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 4)


@pytest.mark.parametrize(
    "raw", [b'{"model_id": "m", "seq_id": 12', b'{"seq_id": 1,', b'{"model_id": "\xff", "seq_id": 1,']
)
def test_a_body_that_breaks_off_before_it_tells_its_place(raw: bytes):
    with pytest.raises(UserError, match="the body is not valid JSON") as caught:
        parse(requests.SaveWeightsRequest, raw)
    assert not isinstance(caught.value, Malformed)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "the body is not valid JSON"),
        (b"{", "the body is not valid JSON"),
        (b"\xff", "the body is not valid JSON"),
        (b"[" * 100_000, "the body is not valid JSON: recursion limit exceeded"),
        (b'{"request_id": "\\ud800"}', "the body is not valid JSON"),
        (b"null", "the body is null, expected an object"),
        (b"[]", "the body is a list of 0, expected an object"),
        (b"{}", "request_id is missing"),
        (b'{"request_id": 1}', "request_id is 1, expected a valid string"),
    ],
    ids=["empty", "open", "bytes", "deep", "surrogate", "null", "list", "missing", "number"],
)
def test_bodies_that_are_none(raw: bytes, sentence: str):
    with pytest.raises(UserError) as caught:
        parse(requests.RetrieveFutureRequest, raw)
    assert str(caught.value).startswith(sentence)


def test_long_values_are_cut():
    with pytest.raises(UserError) as caught:
        parse(requests.RetrieveFutureRequest, body(request_id="x" * 10_000))
    assert len(str(caught.value)) < 200
