"""What bounds a body before anything is made of it."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.errors import UserError
from descant.testing.hostile import held
from descant.wire import integers
from descant.wire import tinker_pb2 as pb
from descant.wire.integers import take_integers
from descant.wire.protobuf import MAX_FIELDS, Broken, TooManyFields, check_fields, schema_of
from descant.wire.requests import parse_sample

SCHEMA = schema_of(pb.ForwardBackwardRequest.DESCRIPTOR)


def sdk_like(num_datums: int, num_tokens: int) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=300, loss_fn="ppo", loss_fn_config={"beta": 0.5})
    message.loss_fn_config_v2["beta"].number = 0.5
    for _ in range(num_datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(4 * num_tokens)
        for name in ("target_tokens", "logprobs", "advantages"):
            datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=bytes(8 * num_tokens), dtype=2, shape=[num_tokens]))
    return message


@pytest.mark.parametrize("num_tokens", [0, 1, 20, 300, 5000])
def test_the_largest_request_of_the_sdk_is_less_than_half_the_limit(num_tokens: int):
    body = sdk_like(64, num_tokens).SerializeToString()
    check_fields(body, SCHEMA, max_fields=MAX_FIELDS // 16 // 2 + 100)


def test_every_field_counts_at_any_depth():
    message = sdk_like(2, 3)
    message.data[0].model_input_spans.add().prompt_tokens.sequence_id = "s"
    message.data[0].loss_fn_inputs["more"].sparse_csr.values = b"abcd"
    # 3 of the request, its two configs (2 + 1 + 1 more), each datum 22, a span 3, a sparse tensor 5
    count = 3 + (1 + 2) + (1 + 2 + 1) + 2 * 22 + 3 + 5
    body = message.SerializeToString()
    check_fields(body, SCHEMA, max_fields=count)
    with pytest.raises(TooManyFields):
        check_fields(body, SCHEMA, max_fields=count - 1)


@given(st.data())
@settings(max_examples=400)
def test_what_the_library_reads_is_counted_and_nothing_else_breaks(data: st.DataObject):
    body = bytearray(sdk_like(2, 3).SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    try:
        check_fields(bytes(body), SCHEMA)
    except Broken as error:
        if "wire type" not in error.message:  # groups, which the library skips
            with pytest.raises(DecodeError):
                pb.ForwardBackwardRequest.FromString(bytes(body))
    except UserError:  # a text that is too long
        pass


@given(st.binary(max_size=60))
def test_any_bytes_are_counted_or_refused(body: bytes):
    for data in (body, held(3, body), held(3, held(2, body)), held(3, held(2, held(2, body)))):
        with contextlib.suppress(UserError):
            check_fields(data, SCHEMA)


# ------------------------------------------------------------------------------------------------------ arrays in JSON

SPACE = st.sampled_from(["", " ", "\n\t", "  "])
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)


@given(st.lists(NUMBERS, max_size=5), SPACE, SPACE)
def test_arrays_come_back_as_they_were(arrays: list[list[int]], before: str, behind: str):
    texts = [f"[{before}" + f"{before},{behind}".join(map(str, array)) + f"{behind}]" for array in arrays]
    body = (
        "{" + ",".join(f'"k{i}":{{"tokens"{before}:{behind}{text}}}' for i, text in enumerate(texts)) + "}"
    ).encode()
    rest, taken = take_integers(body)
    for array, entry in zip(arrays, json.loads(rest).values()):
        got = taken.arrays[entry["tokens"]].tolist() if array else entry["tokens"]
        assert got == array
    if numbers := [number for array in arrays for number in array]:
        assert (taken.lowest, taken.highest) == (min(numbers), max(numbers))


@pytest.mark.parametrize(
    "body",
    [
        b'{"tokens":["1"]}',
        b'{"tokens":[1.5]}',
        b'{"tokens":[[1]]}',
        b'{"tokens":[1e3]}',
        b'{"other":[1]}',
        b'{"a":"\\"tokens\\":[1]"}',
        b'{"tokens":[1',
        b"",
    ],
)
def test_what_is_no_array_of_integers_stays(body: bytes):
    assert take_integers(body)[0] == body


@pytest.mark.parametrize("array", [b"1,,2", b"1 2", b",1", b"1,", b"-", b"1,-", b"- 1", b"1-2", b"--1"])
def test_what_only_looks_like_one_is_refused(array: bytes):
    with pytest.raises(UserError, match="not valid JSON"):
        take_integers(b'{"tokens":[' + array + b"]}")


def test_nobody_can_name_what_was_taken_out():
    body = b'{"sampling_session_id":"s","seq_id":0,"prompt":{"chunks":[{"tokens":[7]},{"tokens":"%s"}]}}'
    for name in (b"0", b":0", b"0:0"):
        with pytest.raises(UserError, match=r"chunks\[1\].tokens is \"[:0]+\", expected a list of integers"):
            parse_sample(body % name)
    assert len(integers._NONCE) >= 16


def test_a_long_prompt_makes_no_object_a_token():
    ids = np.random.default_rng(0).integers(0, 200_000, 131_072)
    body = json.dumps({"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": [{"tokens": ids.tolist()}]}})
    (chunk,) = parse_sample(body.encode()).prompt.to_model_input()
    np.testing.assert_array_equal(chunk.tokens, ids)
    assert chunk.tokens.dtype == np.int32
