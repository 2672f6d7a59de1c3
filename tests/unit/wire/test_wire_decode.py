from __future__ import annotations

import contextlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto

from descant.errors import UserError
from descant.types import input_tokens
from descant.wire import tinker_pb2 as pb
from descant.wire.decode import PREFIX_BYTES, decode_forward_backward, decompress, unread_forward_backward
from descant.wire.requests import Malformed


def sdk_body(data: list[sdk.Datum], loss_fn: str = "cross_entropy", seq_id: int = 1, **config: Any) -> bytes:
    request = sdk.ForwardBackwardRequest(
        forward_backward_input=sdk.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config or None),
        model_id="m",
        seq_id=seq_id,
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def sdk_datum(**loss_fn_inputs: Any) -> sdk.Datum:
    return sdk.Datum(model_input=sdk.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=loss_fn_inputs)


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def i64(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def request(**tensor: Any) -> pb.ForwardBackwardRequest:
    """A request whose fourth datum holds ``tensor`` as its weights."""
    good = pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=i32(1, 2)))])
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="cross_entropy", data=[good] * 4)
    message.data[3].loss_fn_inputs["weights"].CopyFrom(pb.Tensor(**tensor))
    return message


def weights(**tensor: Any) -> np.ndarray:
    return decode_forward_backward(request(**tensor).SerializeToString()).data[3].loss_fn_inputs["weights"]


# -------------------------------------------------------------------------------------------------- what the SDK sends


def test_the_sdks_request_comes_back():
    data = [
        sdk.Datum(
            model_input=sdk.ModelInput(chunks=[sdk.EncodedTextChunk(tokens=[5]), sdk.EncodedTextChunk(tokens=[6, 7])]),
            loss_fn_inputs={"target_tokens": torch.tensor([6, 7, 8]), "advantages": torch.tensor([0, 1, 2])},
        )
    ]
    command = decode_forward_backward(sdk_body(data, "ppo", clip_low_threshold=0.0, clip_high_threshold=1.5))
    assert (command.model_id, command.seq_id, command.loss_fn, command.forward_only) == ("m", 1, "ppo", False)
    assert command.loss_fn_config == {"clip_low_threshold": 0.0, "clip_high_threshold": 1.5}
    assert [chunk.length for chunk in command.data[0].model_input] == [1, 2]
    np.testing.assert_array_equal(input_tokens(command.data[0].model_input), [5, 6, 7])
    inputs = command.data[0].loss_fn_inputs
    assert inputs["target_tokens"].dtype == np.int64
    np.testing.assert_array_equal(inputs["target_tokens"], [6, 7, 8])
    assert inputs["advantages"].dtype == np.int64  # as sent; the trainer casts
    np.testing.assert_array_equal(inputs["advantages"], [0, 1, 2])


def test_text_in_the_loss_config_stays_text():
    body = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="custom", loss_fn_config={"beta": 0.1, "c": 1.0})
    body.loss_fn_config_v2["beta"].number = 0.2
    body.loss_fn_config_v2["loss_id"].text = "0.5"
    config = decode_forward_backward(body.SerializeToString()).loss_fn_config
    assert config == {"beta": 0.2, "c": 1.0, "loss_id": "0.5"}


@given(st.integers(0, 5), st.integers(1, 40), st.floats(0, 1), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_any_matrix_survives_the_sdks_sparsification(rows: int, cols: int, density: float, seed: int):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows, cols)).astype(np.float32) * (rng.random((rows, cols)) < density)
    body = sdk_body([sdk_datum(weights=torch.from_numpy(matrix))])
    decoded = decode_forward_backward(body).data[0].loss_fn_inputs["weights"]
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, matrix)


def test_sparse_is_really_sent():
    matrix = torch.zeros(4, 50)
    matrix[2, 49] = 3.0
    body = sdk_body([sdk_datum(weights=matrix)])
    assert pb.ForwardBackwardRequest.FromString(body).data[0].loss_fn_inputs["weights"].HasField("sparse_csr")
    np.testing.assert_array_equal(decode_forward_backward(body).data[0].loss_fn_inputs["weights"], matrix)


# ----------------------------------------------------------------------------------------------------- tensor layouts


@pytest.mark.parametrize(
    ("dtype", "data", "expected"),
    [
        (pb.DTYPE_FLOAT32, f32(1.5, -2.0), np.array([1.5, -2.0], np.float32)),
        (pb.DTYPE_INT64, i64(2**40, -1), np.array([2**40, -1], np.int64)),
        (pb.DTYPE_INT32, i32(3, -1), np.array([3, -1], np.int32)),
        (pb.DTYPE_BFLOAT16, b"\x80\x3f\x00\xc0", np.array([1.0, -2.0], np.float32)),
    ],
    ids=["float32", "int64", "int32", "bfloat16"],
)
def test_dtypes(dtype: int, data: bytes, expected: np.ndarray):
    array = weights(dense=data, dtype=dtype, shape=[2])
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(weights(dense=data, dtype=dtype), expected)  # without a shape: a vector
    np.testing.assert_array_equal(weights(dense=data, dtype=dtype, shape=[1, 2]), expected[None])


def csr(values: bytes, crow: bytes, col: bytes) -> pb.SparseCsr:
    return pb.SparseCsr(values=values, crow_indices=crow, col_indices=col)


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        ({"dense": f32(1, 2), "shape": [3], "dtype": 1}, "has 2 elements, expected 3 by shape (3,)"),
        ({"dense": f32(1, 2), "shape": [-1], "dtype": 1}, "has shape (-1,)"),
        ({"dense": f32(1, 2), "shape": [2**62, 4], "dtype": 1}, "has shape"),
        ({"dense": b"", "shape": [0, 2**62], "dtype": 1}, "has shape"),
        ({"dense": b"abc", "dtype": 1}, "has 3 bytes, expected a multiple of 4"),
        ({"dense": f32(1, 2)}, "has dtype 0, expected FLOAT32"),
        ({"dense": f32(1, 2), "dtype": 77}, "has dtype 77, expected FLOAT32"),
        ({"dtype": 1, "shape": [2]}, "has no elements, expected dense or sparse_csr"),
        ({"sparse_csr": csr(f32(1), i64(0, 1), i64(0)), "dtype": 1, "shape": [1]}, "is sparse with shape (1,)"),
        ({"sparse_csr": csr(f32(1), i64(0, 1), i64(0)), "dtype": 1, "shape": [2, 2]}, "crow_indices has 2 elements"),
        ({"sparse_csr": csr(f32(1), i64(0, 1), i64()), "dtype": 1, "shape": [1, 2]}, "col_indices has 0 elements"),
        ({"sparse_csr": csr(f32(1), i64(0, 2), i64(0)), "dtype": 1, "shape": [1, 2]}, "to rise from 0 to 1"),
        ({"sparse_csr": csr(f32(1), i64(1, 1), i64(0)), "dtype": 1, "shape": [1, 2]}, "to rise from 0 to 1"),
        ({"sparse_csr": csr(f32(1), i64(0, 5, 1), i64(0)), "dtype": 1, "shape": [2, 2]}, "to rise from 0 to 1"),
        ({"sparse_csr": csr(f32(1), i64(0, -9, 1), i64(0)), "dtype": 1, "shape": [2, 2]}, "to rise from 0 to 1"),
        ({"sparse_csr": csr(f32(1), i64(0, 1), i64(2)), "dtype": 1, "shape": [1, 2]}, "an element outside 0..1"),
        ({"sparse_csr": csr(f32(1), i64(0, 1), i64(-1)), "dtype": 1, "shape": [1, 2]}, "an element outside 0..1"),
        ({"sparse_csr": csr(f32(1, 2), i64(0, 2), i64(1, 1)), "dtype": 1, "shape": [1, 2]}, "rise within each row"),
    ],
)
def test_a_bad_tensor_keeps_its_place_and_is_named(tensor: dict[str, Any], sentence: str):
    with pytest.raises(Malformed) as caught:
        weights(**tensor)
    assert str(caught.value).startswith("data[3].loss_fn_inputs['weights']")
    assert sentence in str(caught.value)
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 7)
    assert caught.value.poisons_gradient
    assert not caught.value.answer_at_once


def test_a_forward_loses_no_gradient():
    message = request(dense=f32(1), dtype=1, shape=[2])
    message.forward_only = True
    with pytest.raises(Malformed) as caught:
        decode_forward_backward(message.SerializeToString())
    assert not caught.value.poisons_gradient


def test_few_bytes_do_not_become_many():
    """Each of these is small and allowed, all together are not; nothing is allocated for the one that is too much."""
    max_dense_bytes = 10 * 4 * 1000
    sparse = {"sparse_csr": csr(f32(1), i64(0, 1), i64(0)), "dtype": 1, "shape": [1, 1000]}
    message = request(**sparse)
    for i in range(9):
        message.data[0].loss_fn_inputs[f"more{i}"].CopyFrom(pb.Tensor(**sparse))
    decode_forward_backward(message.SerializeToString(), max_dense_bytes=max_dense_bytes)
    message.data[0].loss_fn_inputs["too_much"].CopyFrom(pb.Tensor(**sparse))
    with pytest.raises(Malformed, match="expected at most 40000 in the request's sparse tensors together"):
        decode_forward_backward(message.SerializeToString(), max_dense_bytes=max_dense_bytes)
    with pytest.raises(Malformed, match=r"data\[3\].loss_fn_inputs\['weights'\] has \d+ bytes when dense"):
        weights(sparse_csr=csr(b"", i64(*[0] * 1025), b""), dtype=2, shape=[1024, 2**20])


# ----------------------------------------------------------------------------------------------------- other bad input


@pytest.mark.parametrize(
    ("chunk", "sentence", "at_once"),
    [
        (pb.Chunk(image=pb.ImageChunk(data=b"x")), "is of type 'image', which is not served yet", True),
        (pb.Chunk(dmel=pb.DmelChunk(dmel=b"x")), "is of type 'dmel', which is not served yet", True),
        (pb.Chunk(), "holds nothing known, expected encoded_text", False),
        (pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"abc")), "has 3 bytes, expected a multiple of 4", False),
    ],
    ids=["image", "dmel", "nothing", "torn"],
)
def test_bad_chunks(chunk: pb.Chunk, sentence: str, at_once: bool):
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=7, data=[pb.Datum(), pb.Datum(model_input=[chunk])])
    with pytest.raises(Malformed) as caught:
        decode_forward_backward(message.SerializeToString())
    assert str(caught.value).startswith("data[1].model_input.chunks[0]")
    assert sentence in str(caught.value)
    assert caught.value.answer_at_once is at_once


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_loss_config_must_be_finite(value: float):
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn_config={"beta": value})
    with pytest.raises(Malformed, match=r"loss_fn_config\['beta'\] is (nan|inf), expected a finite number"):
        decode_forward_backward(message.SerializeToString())


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"\xff\xff", "the body is not a protobuf ForwardBackwardRequest"),
        (b'{"model_id": "m"}', "the body is JSON, expected protobuf, as the SDK sends it since 0.25"),
        (b"", "model_id has 0 characters"),
        (pb.ForwardBackwardRequest(model_id="m").SerializeToString(), "seq_id is 0, expected 1 to 2147483647"),
        (pb.ForwardBackwardRequest(model_id="m", seq_id=-1).SerializeToString(), "seq_id is -1"),
        (pb.ForwardBackwardRequest(model_id="m" * 600, seq_id=1).SerializeToString(), "model_id has 600 characters"),
    ],
    ids=["bytes", "json", "empty", "no-seq", "negative-seq", "long-id"],
)
def test_without_a_place(body: bytes, sentence: str):
    with pytest.raises(UserError, match=sentence) as caught:
        decode_forward_backward(body)
    assert not isinstance(caught.value, Malformed)


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_a_user_error_or_a_command(body: bytes):
    for encoding in (None, "zstd"):
        with contextlib.suppress(UserError):
            decode_forward_backward(body, encoding)


@given(st.data())
@settings(max_examples=200)
def test_a_damaged_request_is_a_user_error_or_a_command(data: st.DataObject):
    sparse = {"sparse_csr": csr(f32(1, 2), i64(0, 1, 2), i64(0, 1)), "dtype": 1, "shape": [2, 3]}
    body = bytearray(request(**sparse).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UserError):
        decode_forward_backward(bytes(body))


# ---------------------------------------------------------------------------------------------------------- compression


def test_zstd():
    body = sdk_body([sdk_datum(weights=torch.ones(3))])
    assert decode_forward_backward(zstandard.compress(body), "zstd").data[0].model_input[0].length == 3
    assert decompress(zstandard.compress(body), "zstd") == body
    without_size = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    assert decompress(without_size, " ZSTD ") == body


@pytest.mark.parametrize("write_content_size", [True, False])
def test_a_bomb_is_refused(write_content_size: bool):
    bomb = zstandard.ZstdCompressor(write_content_size=write_content_size).compress(bytes(10_000_000))
    with pytest.raises(UserError, match="at most 1000000"):
        decompress(bomb, "zstd", max_bytes=1_000_000)


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b + b"x", lambda b: b"", lambda b: b[1:]])
def test_a_torn_frame_is_refused(damage: Any):
    body = zstandard.compress(bytes(range(256)) * 100)
    with pytest.raises(UserError, match="not one whole zstd frame"):
        decompress(damage(body), "zstd")


def test_another_encoding_is_refused():
    with pytest.raises(UserError, match="Content-Encoding is 'gzip', expected zstd or none"):
        decompress(b"", "gzip")


@pytest.mark.parametrize("encoding", [None, "zstd"])
def test_what_is_too_large_still_keeps_its_place(encoding: str | None):
    body = sdk_body([sdk_datum(weights=torch.rand(3)) for _ in range(4000)], seq_id=300)
    sent = zstandard.compress(body) if encoding else body
    error = unread_forward_backward(sent[:PREFIX_BYTES], encoding, "too large")
    assert isinstance(error, Malformed)
    assert (error.model_id, error.seq_id, error.poisons_gradient, str(error)) == ("m", 300, True, "too large")
    if encoding:
        with pytest.raises(Malformed, match=f"has {len(body)} bytes after decompression"):
            decode_forward_backward(sent, encoding, max_bytes=len(body) - 1)


@pytest.mark.parametrize("encoding", [None, "zstd"])
@pytest.mark.parametrize("damage", [lambda b: b[:-7], lambda b: b[: len(b) // 2] + b"\xff" * 40])
def test_what_is_broken_further_on_still_keeps_its_place(damage: Any, encoding: str | None):
    body = damage(sdk_body([sdk_datum(weights=torch.rand(3)) for _ in range(40)], seq_id=300))
    with pytest.raises(Malformed, match="the body is not a protobuf ForwardBackwardRequest") as caught:
        decode_forward_backward(zstandard.compress(body) if encoding else body, encoding)
    assert (caught.value.model_id, caught.value.seq_id, caught.value.poisons_gradient) == ("m", 300, True)
    if encoding:
        torn = zstandard.ZstdCompressor(level=0).compress(bytes(body) * 2000)
        with pytest.raises(Malformed, match="not one whole zstd frame") as caught:
            decode_forward_backward(torn[:-9], encoding)
        assert caught.value.seq_id == 300


@given(st.binary(max_size=40), st.sampled_from([None, "zstd"]))
def test_any_prefix_is_read(prefix: bytes, encoding: str | None):
    assert str(unread_forward_backward(prefix, encoding, "too large")) == "too large"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model_id": "m", "seq_id": 3, "forward_backward_input": {"data": []}}',
        b'{"forward_backward_input": {"loss_fn_config": {"a": "\\"seq_id\\": 9"}}, "seq_id":3, "model_id":"m", "x": [',
    ],
    ids=["whole", "cut"],
)
def test_the_json_of_an_old_sdk_is_refused_at_once_in_its_place(body: bytes):
    with pytest.raises(Malformed, match="the body is JSON, expected protobuf") as caught:
        decode_forward_backward(body)
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 3)
    assert caught.value.poisons_gradient
    assert caught.value.answer_at_once


def test_malformed_pickles():
    error = pickle.loads(pickle.dumps(Malformed("no", "m", 3, poisons_gradient=True, answer_at_once=True)))
    assert (str(error), error.model_id, error.seq_id) == ("no", "m", 3)
    assert error.poisons_gradient
    assert error.answer_at_once
