"""Protobuf request bodies → types.

Arrays are views into the request's bytes: read-only, in the dtype that was sent (BFLOAT16, which numpy lacks, becomes
float32). Sparse tensors become dense, with 0 where nothing was sent. What arrays a loss needs and how long they must be
is ``train``'s to check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from descant.errors import UserError
from descant.types import Datum, EncodedText, ForwardBackward
from descant.wire import requests
from descant.wire import tinker_pb2 as pb
from descant.wire.protobuf import Broken, TooManyFields, check_fields, schema_of, varint
from descant.wire.requests import Malformed

MAX_BODY_BYTES = 64 * 2**20
MAX_DATUMS = 4096
"""Of one request; the SDK sends at most 1,024."""
MAX_CONFIG_ENTRIES = 64
"""Of ``loss_fn_config``; the losses have three."""
MAX_DENSE_BYTES = 256 * 2**20
"""What all sparse tensors of a request may become together: a few sent bytes can claim any number of columns."""

FREE_BYTES = 8 * 2**20
MAX_RATIO = 100
"""A compressed body may grow to ``FREE_BYTES`` (the SDK sends 5 MB), beyond that this many times: real tokens and
numbers of that size shrink to a half or a tenth, zeros to a thirty-thousandth."""

PREFIX_BYTES = 256 * 2**10
"""Enough of a body to read its first fields, compressed or not (a zstd block holds at most 128 KiB)."""

_DTYPES: Mapping[int, np.dtype] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),  # as bits
}
_INT64 = np.dtype("<i8")
_SCHEMA = schema_of(pb.ForwardBackwardRequest.DESCRIPTOR)
_MAX_NUM_DIMS = 3
_MAX_DIM = 2**24


class TooLarge(UserError):
    http_status = 413


def decompress(body: bytes, content_encoding: str | None, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body without its ``Content-Encoding`` (zstd or none), never more than ``max_bytes`` or ``MAX_RATIO`` allow.
    Raises ``UserError``."""
    match (content_encoding or "identity").strip().lower():
        case "identity":
            return body
        case "zstd":
            max_bytes = min(max_bytes, max(FREE_BYTES, MAX_RATIO * len(body)))
            try:
                size = zstandard.frame_content_size(body)
                if size <= max_bytes:  # -1: not said, and then max_output_size holds
                    return zstandard.ZstdDecompressor().decompress(
                        body, max_output_size=max_bytes, allow_extra_data=False
                    )
            except zstandard.ZstdError as error:
                raise UserError(f"the body is not one whole zstd frame of at most {max_bytes} bytes: {error}") from None
            raise TooLarge(f"the body has {size} bytes after decompression, expected at most {max_bytes}")
        case other:
            raise UserError(f"Content-Encoding is {other[:40]!r}, expected zstd or none")


def decode_forward_backward(
    body: bytes,
    content_encoding: str | None = None,
    *,
    max_bytes: int = MAX_BODY_BYTES,
    max_dense_bytes: int = MAX_DENSE_BYTES,
) -> ForwardBackward:
    """A ``ForwardBackwardRequest``. ``max_dense_bytes``: of its sparse tensors together, when they are dense.

    Raises ``Malformed`` (naming the field) when its place is known, also of bytes that are no such message but begin
    like one, with ``answer_at_once`` for chunks that are not served yet; ``UserError`` for what has no place.
    """
    message = pb.ForwardBackwardRequest()
    try:
        plain = decompress(body, content_encoding, max_bytes=max_bytes)
    except UserError as error:
        raise unread_forward_backward(body[:PREFIX_BYTES], content_encoding, error.message) from None
    try:
        check_fields(plain, _SCHEMA)
        message.ParseFromString(plain)
    except (Broken, DecodeError):
        sentence = "the body is not a protobuf ForwardBackwardRequest"
        if plain.startswith(b"{"):
            sentence = f"the body is JSON, expected protobuf, as the SDK sends it since {requests.oldest_sdk()}"
        raise unread_forward_backward(plain[:PREFIX_BYTES], None, sentence) from None
    except UserError as error:
        raise unread_forward_backward(plain[:PREFIX_BYTES], None, error.message) from None
    if not 1 <= len(message.model_id) <= 512:
        raise UserError(f"model_id has {len(message.model_id)} characters, expected 1 to 512")
    if message.seq_id < 1:
        raise UserError(f"seq_id is {message.seq_id}, expected 1 to {2**31 - 1}")
    try:
        if len(message.data) > MAX_DATUMS:
            raise TooManyFields(f"data has {len(message.data)} datums, expected at most {MAX_DATUMS}")
        budget = _DenseBudget(max_dense_bytes)
        return ForwardBackward(
            model_id=message.model_id,
            seq_id=message.seq_id,
            data=tuple(_datum(datum, f"data[{i}]", budget) for i, datum in enumerate(message.data)),
            loss_fn=message.loss_fn,
            loss_fn_config=_loss_fn_config(message),
            forward_only=message.forward_only,
        )
    except UserError as error:
        raise Malformed(
            error.message,
            message.model_id,
            message.seq_id,
            poisons_gradient=not message.forward_only,
            answer_at_once=isinstance(error, _NotServed),
        ) from None


class _NotServed(UserError):
    pass


class _DenseBudget:
    def __init__(self, max_bytes: int):
        self._max_bytes = self._left = max_bytes

    def take(self, num_bytes: int, where: str) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise UserError(
                f"{where} has {num_bytes} bytes when dense, expected at most {self._max_bytes} in the request's sparse "
                "tensors together"
            )


def _datum(message: pb.Datum, where: str, budget: _DenseBudget) -> Datum:
    return Datum(
        model_input=tuple(
            _chunk(chunk, f"{where}.model_input.chunks[{i}]") for i, chunk in enumerate(message.model_input)
        ),
        loss_fn_inputs={
            name: _tensor(tensor, f"{where}.loss_fn_inputs[{name[:64]!r}]", budget)
            for name, tensor in message.loss_fn_inputs.items()
        },
    )


def _chunk(message: pb.Chunk, where: str) -> EncodedText:
    match message.WhichOneof("chunk"):
        case "encoded_text":
            return EncodedText(tokens=_array(message.encoded_text.tokens, _DTYPES[pb.DTYPE_INT32], f"{where}.tokens"))
        case None:
            raise UserError(f"{where} holds nothing known, expected encoded_text")
        case kind:
            raise _NotServed(f"{where} is of type '{kind}', which is not served yet; expected 'encoded_text'")


def _array(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise UserError(f"{where} has {len(data)} bytes, expected a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _tensor(message: pb.Tensor, where: str, budget: _DenseBudget) -> np.ndarray:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise UserError(f"{where} has dtype {message.dtype}, expected FLOAT32, INT64, INT32 or BFLOAT16 (1 to 4)")
    shape = tuple(message.shape)
    if len(shape) > _MAX_NUM_DIMS or any(not 0 <= dim <= _MAX_DIM for dim in shape):
        raise UserError(f"{where} has shape {shape[:9]}, expected at most {_MAX_NUM_DIMS} dims from 0 to {_MAX_DIM}")
    match message.WhichOneof("encoding"):
        case "dense":
            array = _array(message.dense, dtype, where)
            if shape:  # without one it is a vector
                if math.prod(shape) != array.size:
                    raise UserError(f"{where} has {array.size} elements, expected {math.prod(shape)} by shape {shape}")
                array = array.reshape(shape)
        case "sparse_csr":
            array = _densify(message.sparse_csr, dtype, shape, where, budget)
        case _:
            raise UserError(f"{where} has no elements, expected dense or sparse_csr")
    if message.dtype == pb.DTYPE_BFLOAT16:
        array = (array.astype("<u4") << 16).view("<f4")
    return array


def _densify(
    message: pb.SparseCsr, dtype: np.dtype, shape: tuple[int, ...], where: str, budget: _DenseBudget
) -> np.ndarray:
    """CSR: row r holds ``values[crow[r]:crow[r + 1]]`` in the columns ``col_indices`` of the same range."""
    if len(shape) != 2:
        raise UserError(f"{where} is sparse with shape {shape}, expected two dims")
    rows, cols = shape
    values = _array(message.values, dtype, f"{where}.values")
    crow = _array(message.crow_indices, _INT64, f"{where}.crow_indices")
    col = _array(message.col_indices, _INT64, f"{where}.col_indices")
    if crow.size != rows + 1:
        raise UserError(f"{where}.crow_indices has {crow.size} elements, expected {rows + 1} by shape {shape}")
    if col.size != values.size:
        raise UserError(f"{where}.col_indices has {col.size} elements, expected {values.size} as values has")
    if crow[0] != 0 or crow[-1] != values.size or np.any(crow[1:] < crow[:-1]):
        raise UserError(f"{where}.crow_indices is expected to rise from 0 to {values.size}")
    if np.any((col < 0) | (col >= cols)):
        raise UserError(f"{where}.col_indices has an element outside 0..{cols - 1}")
    row = np.repeat(np.arange(rows), np.diff(crow))
    if np.any((row[1:] == row[:-1]) & (col[1:] <= col[:-1])):
        raise UserError(f"{where}.col_indices is expected to rise within each row")
    budget.take(rows * cols * max(dtype.itemsize, 4), where)
    dense = np.zeros(shape, dtype)
    dense[row, col] = values
    return dense


def _loss_fn_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """The numbers of the older map, overridden by the newer one, which may hold text as well."""
    if (count := max(len(message.loss_fn_config), len(message.loss_fn_config_v2))) > MAX_CONFIG_ENTRIES:
        raise TooManyFields(f"loss_fn_config has {count} entries, expected at most {MAX_CONFIG_ENTRIES}")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        match value.WhichOneof("value"):
            case "number":
                config[name] = value.number
            case "text":
                config[name] = value.text
            case _:
                raise UserError(f"loss_fn_config[{name[:64]!r}] has no value, expected a number or a text")
    for name, number in config.items():
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"loss_fn_config[{name[:64]!r}] is {number}, expected a finite number")
    return config


def unread_forward_backward(prefix: bytes, content_encoding: str | None, message: str) -> UserError:
    """The refusal of a ForwardBackwardRequest that is too large or too broken to read: with its place, if its
    ``PREFIX_BYTES`` hold it, so that what was sent after it does not wait for it.

    ``model_id`` and ``seq_id`` are the first two fields, and writers write fields in order. Whether it was a backward
    stands further on, so the gradient counts as poisoned. An old SDK's is JSON, and rejected at once: what it would
    make of the failed future is not known.
    """
    if prefix.startswith(b"{"):
        match requests.unread(requests.NotServedRequest, prefix, UserError(message)):
            case Malformed() as placed:
                return Malformed(message, placed.model_id, placed.seq_id, poisons_gradient=True, answer_at_once=True)
            case error:
                return error
    try:
        if (content_encoding or "").strip().lower() == "zstd":
            prefix = zstandard.ZstdDecompressor().stream_reader(prefix).read(1024)
        length, start = varint(prefix, _after_tag(prefix, 0, field=1, wire_type=2))
        model_id = prefix[start : start + length].decode()
        seq_id, _ = varint(prefix, _after_tag(prefix, start + length, field=2, wire_type=0))
    except (Broken, IndexError, ValueError, zstandard.ZstdError):
        return UserError(message)
    if not 1 <= len(model_id) <= 512 or not 1 <= seq_id < 2**31:
        return UserError(message)
    return Malformed(message, model_id, seq_id, poisons_gradient=True)


def _after_tag(data: bytes, at: int, *, field: int, wire_type: int) -> int:
    if data[at] != field << 3 | wire_type:
        raise ValueError("another field")
    return at + 1
