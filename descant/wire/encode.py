"""Answers and errors → the bytes that a client's future resolves with.

Training and sampling results are protobuf, the rest JSON. A failure is an answer too: ``{error, category}``.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, assert_never

import numpy as np

from descant.errors import DescantError
from descant.types import (
    Answer,
    Encoded,
    ForwardBackwardOutput,
    ModelCreated,
    OptimStepOutput,
    PromptScores,
    SampledSequence,
    SampleOutput,
    SamplerWeightsSaved,
    TensorData,
    TopK,
    WeightsLoaded,
    WeightsSaved,
)
from descant.wire import tinker_pb2 as pb

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

log = logging.getLogger(__name__)

_DTYPES: Mapping[np.dtype, pb.DType] = {
    np.dtype("<f4"): pb.DTYPE_FLOAT32,
    np.dtype("<i8"): pb.DTYPE_INT64,
    np.dtype("<i4"): pb.DTYPE_INT32,
}
_STOP_REASONS: Mapping[str, pb.StopReason] = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def encode(answer: Answer | Exception) -> Encoded:
    """Never raises: an answer that cannot be encoded becomes an internal error, so that no future stays open."""
    if not isinstance(answer, Exception):
        try:
            return _encode_answer(answer)
        except Exception as error:
            answer = error
    message, category = describe_error(answer)
    return _json({"error": message, "category": category})


def describe_error(error: Exception) -> tuple[str, str]:
    """What a client may read of an error, and its category. Anything outside our tree is logged and named by an id."""
    if isinstance(error, DescantError):
        return error.message, error.category
    reference = secrets.token_hex(6)
    log.error("internal error %s", reference, exc_info=error)
    return f"internal error {reference}; the server's log says more", "server"


def _encode_answer(answer: Answer) -> Encoded:
    match answer:
        case ModelCreated():
            return _json({"model_id": answer.model_id, "type": "create_model"})
        case ForwardBackwardOutput():
            return _protobuf(_forward_backward_output(answer))
        case OptimStepOutput():
            return _json({"metrics": dict(answer.metrics), "type": "optim_step"})
        case WeightsSaved():
            pending = answer.has_pending_gradient
            return _json({"path": answer.path, "has_pending_gradient": pending, "type": "save_weights"})
        case SamplerWeightsSaved():
            return _json(
                {
                    "path": answer.path,
                    "sampling_session_id": answer.sampling_session_id,
                    "type": "save_weights_for_sampler",
                }
            )
        case WeightsLoaded():
            return _json({"path": answer.path, "model_id": answer.model_id, "type": "load_weights"})
        case SampleOutput():
            return _protobuf(_sample_response(answer))
        case _:
            assert_never(answer)


def _json(payload: Mapping[str, Any]) -> Encoded:
    return Encoded(content_type=JSON, body=json.dumps(payload).encode())


def _protobuf(message: pb.ForwardBackwardOutput | pb.SampleResponse) -> Encoded:
    return Encoded(content_type=PROTOBUF, body=message.SerializeToString())


# --------------------------------------------------------------------------------------------------------------------
# forward_backward


def _forward_backward_output(output: ForwardBackwardOutput) -> pb.ForwardBackwardOutput:
    return pb.ForwardBackwardOutput(
        loss_fn_output_type=output.loss_fn_output_type,
        loss_fn_outputs=list(_array_records(output.loss_fn_outputs)),
        metrics=_well_named(output.metrics),
    )


def _well_named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without the keys that are not ``name:reduction``: for one of those the SDK throws the whole result away."""
    bad = [key for key in metrics if key.count(":") != 1]
    if bad:
        log.error("metrics %s are not of the form name:reduction and were left out", bad)
    return {key: float(value) for key, value in metrics.items() if key not in bad}


def _array_records(outputs: Sequence[Mapping[str, np.ndarray]]) -> Iterator[pb.ArrayRecord]:
    """One record per run of datums whose fields agree in dtype and in all dims but the first."""

    def signature(output: Mapping[str, np.ndarray]) -> tuple[tuple[str, np.dtype, tuple[int, ...]], ...]:
        return tuple((name, array.dtype, array.shape[1:]) for name, array in sorted(output.items()))

    for fields, run in groupby(outputs, key=signature):
        datums = list(run)
        record = pb.ArrayRecord(num_datums=len(datums))
        for name, dtype, trailing_shape in fields:
            arrays = [datum[name] for datum in datums]
            offsets = np.zeros(len(arrays) + 1, "<i8")
            np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
            field = record.fields[name]
            field.data = b"".join([array.tobytes() for array in arrays])
            field.offsets = offsets.tobytes()
            field.dtype = _DTYPES[dtype]
            field.trailing_shape.extend(trailing_shape)
        yield record


# --------------------------------------------------------------------------------------------------------------------
# sample


def _sample_response(output: SampleOutput) -> pb.SampleResponse:
    response = pb.SampleResponse(
        sequences=[_sequence(sequence) for sequence in output.sequences],
        prompt_cache_hit_tokens=output.prompt_cache_hit_tokens,
    )
    if output.prompt is not None:
        _write_prompt(response, output.prompt)
    return response


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    message = pb.SampledSequence(
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=sequence.tokens.astype("<i4", copy=False).tobytes(),
        logprobs=sequence.logprobs.astype("<f4", copy=False).tobytes(),
    )
    if sequence.topk_logprobs is not None:
        message.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk_logprobs))
    return message


def _write_prompt(response: pb.SampleResponse, prompt: PromptScores) -> None:
    if prompt.logprobs is not None:
        response.prompt_logprobs = prompt.logprobs.astype("<f4", copy=False).tobytes()
    if prompt.topk is not None:
        response.topk_prompt_logprobs.CopyFrom(_topk(prompt.topk))
    if prompt.target_logprobs is not None:
        response.target_prompt_logprobs.CopyFrom(_tensor(prompt.target_logprobs))
    if (alt := prompt.alt_tokens) is not None:
        response.prompt_alt_tokens.tokens.CopyFrom(_tensor(TensorData(data=alt.tokens, shape=alt.tokens.shape)))
        response.prompt_alt_tokens.logprobs.CopyFrom(_tensor(TensorData(data=alt.logprobs, shape=alt.logprobs.shape)))


def _tensor(tensor: TensorData) -> pb.Tensor:
    message = pb.Tensor(dtype=_DTYPES[tensor.data.dtype], shape=tensor.shape)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        message.dense = tensor.data.tobytes()
    else:
        message.sparse_csr.values = tensor.data.tobytes()
        message.sparse_csr.crow_indices = tensor.sparse_crow_indices.astype("<i8", copy=False).tobytes()
        message.sparse_csr.col_indices = tensor.sparse_col_indices.astype("<i8", copy=False).tobytes()
    return message


def _topk(topk: TopK) -> pb.TopkLogprobs:
    length, k = topk.token_ids.shape
    return pb.TopkLogprobs(
        token_ids=topk.token_ids.astype("<i4", copy=False).tobytes(),
        logprobs=topk.logprobs.astype("<f4", copy=False).tobytes(),
        k=k,
        length=length,
    )
