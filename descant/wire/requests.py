"""The protocol's JSON requests: what a client may send, checked field by field.

Unknown fields are accepted, zero is a value, and nothing is coerced (``"1"`` is no number). What a request means is the
service's business; here only what can be said of the body alone is refused: absent or mistyped fields, numbers that are
not finite or out of range, features not served yet.

A request with a place in its model's order raises ``Malformed``, which carries that place: the id is consumed, so that
the requests behind it do not wait for one that will never come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from descant import types
from descant.errors import UserError
from descant.wire.integers import Int64, Integers, take_integers

MAX_SEQ_ID = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_NUM_SAMPLES = 1024
MAX_TOPK = 1024
"""Bounds on what one small body may make us allocate; an engine's own limits are lower."""

MAX_JSON_BYTES = 64 * 2**10
"""Of a body that holds no tokens. The largest that the SDK sends say with what a run was begun."""
MAX_SAMPLE_BYTES = 12 * 2**20
MAX_SAMPLE_ELEMENTS = 1 << 19
"""A sampling request's tokens and target cells together. Reading so many takes some 30 ms."""
MAX_SAMPLE_TEXT_BYTES = 2**20
"""What a sampling request has beside its arrays of integers: chunks, and texts to stop at."""
MAX_SAMPLE_FIELDS = 32 * 1024
"""And how many fields and values that may be: four a chunk."""
MAX_CHUNKS = 4096
MAX_STOPS = 1024

Id = Annotated[str, Field(min_length=1, max_length=512)]
SeqId = Annotated[int, Field(ge=0, le=MAX_SEQ_ID)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Malformed(UserError):
    """A body that is wrong though its place in the model's order is known.

    ``answer_at_once``: besides consuming the id, tell the client by HTTP 400 (what it asks for is not served yet).
    """

    def __init__(
        self, message: str, model_id: str, seq_id: int, poisons_gradient: bool = False, answer_at_once: bool = False
    ):
        super().__init__(message)
        self.model_id = model_id
        self.seq_id = seq_id
        self.poisons_gradient = poisons_gradient
        self.answer_at_once = answer_at_once

    def __reduce__(self) -> tuple[type, tuple[str, str, int, bool, bool]]:
        return type(self), (self.message, self.model_id, self.seq_id, self.poisons_gradient, self.answer_at_once)


class WireModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


class Place(WireModel):
    """Where a request stands among its model's."""

    model_id: Id
    seq_id: SeqId


R = TypeVar("R", bound=WireModel)


def parse(model: type[R], body: bytes, *, integers: Integers | None = None) -> R:
    """A JSON body as ``model``. Raises ``Malformed`` if it holds a ``Place``, else ``UserError``, naming the field.

    ``integers``: what ``take_integers`` took out of it. The caller has bounded the body.
    """
    try:
        return model.model_validate_json(body, context=integers)
    except ValidationError as error:
        message = _sentence(error)
    raise unread(model, body, UserError(message)) from None


def unread(model: type[WireModel], body: bytes, error: UserError) -> UserError:
    """``error``, of a JSON body that is wrong, too large (then ``body`` is its beginning) or no JSON at all; as
    ``Malformed`` if it is an ``OrderedRequest`` and names its place."""
    place = _place(body) if issubclass(model, OrderedRequest) else None
    return error if place is None else Malformed(error.message, place.model_id, place.seq_id)


def _place(body: bytes) -> Place | None:
    try:
        return Place.model_validate_json(body)
    except ValidationError:
        pass
    if (model_id := _MODEL_ID.search(body)) is None or (seq_id := _SEQ_ID.search(body)) is None:
        return None
    try:
        return Place(model_id=model_id[1].decode(), seq_id=int(seq_id[1]))
    except ValueError:  # no text, or out of range
        return None


_MODEL_ID = re.compile(rb'(?<!\\)"model_id"\s*:\s*"([^"\\]{1,512})"')
_SEQ_ID = re.compile(rb'(?<!\\)"seq_id"\s*:\s*(\d{1,19})(?=[\s,}])')
"""In a body that cannot be parsed. A quote behind a backslash is one within a text, and begins no key."""


def parse_sample(body: bytes, *, max_elements: int = MAX_SAMPLE_ELEMENTS) -> SampleRequest:
    """Raises ``UserError``; for what is too much of anything, before anything is made of it."""
    num_elements = body.count(b",")
    if num_elements > max_elements:
        raise UserError(f"the body has {num_elements} elements, expected at most {max_elements}")
    num_text_bytes = len(body) - 24 * num_elements  # no token id, with its comma and spaces, is longer
    if num_text_bytes <= MAX_SAMPLE_TEXT_BYTES:
        for mark in (b"{", b"["):
            if body.count(mark) > MAX_CHUNKS + 32:
                raise UserError(f"the body has more than {MAX_CHUNKS} chunks")
        body, integers = take_integers(body)
        num_text_bytes = len(body)
    if num_text_bytes > MAX_SAMPLE_TEXT_BYTES:
        raise UserError(
            f"the body has {num_text_bytes} bytes beside token ids, expected at most {MAX_SAMPLE_TEXT_BYTES}"
        )
    num_fields = body.count(b",") + body.count(b":")
    if num_fields > MAX_SAMPLE_FIELDS:
        raise UserError(f"the body has {num_fields} fields and other values, expected at most {MAX_SAMPLE_FIELDS}")
    return parse(SampleRequest, body, integers=integers)


def _sentence(error: ValidationError) -> str:
    """The first fault as one sentence: ``sampling_params.top_p is 0.0, expected greater than 0``."""
    fault = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).removeprefix(".")
    where = path or "the body"
    message = fault["msg"]
    match fault["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {fault['ctx']['error']}"
        case "missing":
            return f"{where} is missing"
        case "value_error":
            reason = str(fault["ctx"]["error"])
            return f"{where}{reason}" if reason.startswith("[") else f"{where} {reason}"
    if fault["type"] == "float_type" and fault["input"] is None:
        return f"{where} is null, as NaN and infinity are sent in JSON; expected a finite number"
    if message.startswith("Input should be "):
        return f"{where} is {_shown(fault['input'])}, expected {message.removeprefix('Input should be ')}"
    return f"{where} is {_shown(fault['input'])}: {message[0].lower()}{message[1:]}"


def _shown(value: object, limit: int = 60) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, default=repr)
    return text if len(text) <= limit else text[:limit] + "…"


def _served(*values: object) -> Callable[[object], object]:
    """Refuses every value but ``values`` (absent ones never come here)."""

    def check(value: object) -> object:
        if value not in values:
            expected = " or ".join(_shown(known) for known in values)
            raise ValueError(f"is {_shown(value)}, which is not served yet; expected {expected}")
        return value

    return check


# --------------------------------------------------------------------------------------------------------------------
# Configuration, sessions


class ClientConfigRequest(WireModel):
    sdk_version: str | None = None


OLDEST_SDK = (0, 25)
"""Older ones send training data as JSON, which is not served: their first ``forward_backward`` would fail, and whatever
they send after it would wait for a seq_id that never comes."""


def oldest_sdk() -> str:
    return ".".join(map(str, OLDEST_SDK))


def _known_sdk(version: str) -> str:
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version)  # what does not look like a version is another client's
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST_SDK:
        raise ValueError(
            f"is {_shown(version)}, expected {oldest_sdk()} or newer: what that SDK sends to train is not served; "
            f"pip install 'tinker>={oldest_sdk()}'"
        )
    return version


class CreateSessionRequest(WireModel):
    tags: Annotated[list[str], FailFast()] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: Annotated[str, AfterValidator(_known_sdk)] = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeatRequest(WireModel):
    session_id: Id


class FinishReason(WireModel):
    type: str


class FinishSessionRequest(WireModel):
    reason: FinishReason
    detail: str | None = None


# --------------------------------------------------------------------------------------------------------------------
# Models


class OptimizerConfig(WireModel):
    type: Annotated[str, AfterValidator(_served("adamw"))] = "adamw"


class LoraConfig(WireModel):
    """Ranges are the service's to judge (they depend on the base model)."""

    rank: int = 32
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def to_lora(self) -> types.Lora:
        return types.Lora(
            rank=self.rank,
            seed=self.seed,
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
        )


class CreateModelRequest(WireModel):
    session_id: Id
    model_seq_id: SeqId
    base_model: str
    user_metadata: dict[str, str] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None

    @property
    def lora(self) -> types.Lora:
        return (self.lora_config or LoraConfig()).to_lora()


class GetInfoRequest(WireModel):
    model_id: Id


class OrderedRequest(WireModel):
    """A request that takes a place in its model's order; ``parse`` keeps the place when the rest is wrong."""


class AdamParams(WireModel):
    learning_rate: NonNegative = 1e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: NonNegative = 1e-12
    weight_decay: NonNegative = 0.0
    grad_clip_norm: NonNegative = 0.0


class OtherOptimizerParams(AdamParams):
    """The field for every other optimiser family; of these only AdamW under its own name is served."""

    type: Annotated[str, AfterValidator(_served("adamw"))]


class OptimStepRequest(OrderedRequest):
    model_id: Id
    seq_id: SeqId
    adam_params: AdamParams | None = None
    optimizer_params: OtherOptimizerParams | None = None

    @model_validator(mode="after")
    def _one_set_of_params(self) -> OptimStepRequest:
        if (self.adam_params is None) == (self.optimizer_params is None):
            found = "neither adam_params nor" if self.adam_params is None else "both adam_params and"
            raise ValueError(f"has {found} optimizer_params, expected adam_params")
        return self

    def to_command(self) -> types.OptimStep:
        params = self.adam_params or self.optimizer_params
        assert params is not None  # by the validator above
        return types.OptimStep(
            model_id=self.model_id,
            seq_id=self.seq_id,
            adam_params=types.AdamParams(
                learning_rate=params.learning_rate,
                beta1=params.beta1,
                beta2=params.beta2,
                eps=params.eps,
                weight_decay=params.weight_decay,
                grad_clip_norm=params.grad_clip_norm,
            ),
        )


# --------------------------------------------------------------------------------------------------------------------
# Weights


class SaveWeightsRequest(OrderedRequest):
    model_id: Id
    seq_id: SeqId
    path: str
    """A name, not a tinker:// path."""
    overwrite: bool = False
    ttl_seconds: int | None = None


class SaveWeightsForSamplerRequest(OrderedRequest):
    model_id: Id
    seq_id: SeqId
    path: str | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] | None = None
    """Of the ephemeral form. None: clients older than the word."""
    ttl_seconds: int | None = None

    @model_validator(mode="after")
    def _named_or_ephemeral(self) -> SaveWeightsForSamplerRequest:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            found = "neither path nor" if self.path is None else "both path and"
            raise ValueError(f"has {found} sampling_session_seq_id, expected one of them")
        return self


def _no_token(token: str | None) -> None:
    if token is not None:  # never shown: it is a secret
        raise ValueError("is set, which is not served yet; expected none")


class LoadWeightsRequest(OrderedRequest):
    """Into a new model (``session_id``, ``model_seq_id``) or into an existing one (``model_id``, ``seq_id``)."""

    session_id: Id | None = None
    model_seq_id: SeqId | None = None
    model_id: Id | None = None
    seq_id: SeqId | None = None
    path: str
    optimizer: bool
    base_model: str | None = None
    user_metadata: dict[str, str] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Annotated[str | None, AfterValidator(_no_token)] = None

    @model_validator(mode="after")
    def _one_form(self) -> LoadWeightsRequest:
        new = self.session_id is not None and self.model_seq_id is not None
        into = self.model_id is not None and self.seq_id is not None
        if new == into:
            found = "both forms" if new else "neither form"
            raise ValueError(f"has {found} of address, expected session_id and model_seq_id, or model_id and seq_id")
        return self

    def to_form(self) -> LoadIntoNewModel | LoadIntoModel:
        if self.session_id is not None and self.model_seq_id is not None:
            return LoadIntoNewModel(
                session_id=self.session_id,
                model_seq_id=self.model_seq_id,
                path=self.path,
                optimizer=self.optimizer,
                base_model=self.base_model,
                user_metadata=self.user_metadata,
            )
        assert self.model_id is not None  # by the validator above
        assert self.seq_id is not None
        return LoadIntoModel(model_id=self.model_id, seq_id=self.seq_id, path=self.path, optimizer=self.optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadIntoNewModel:
    session_id: str
    model_seq_id: int
    path: str
    optimizer: bool
    base_model: str | None
    user_metadata: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadIntoModel:
    model_id: str
    seq_id: int
    path: str
    optimizer: bool


class WeightsInfoRequest(WireModel):
    tinker_path: str


class NotServedRequest(OrderedRequest):
    """Any that the protocol has and this server has not, with a place in its model's order."""

    model_id: Id
    seq_id: SeqId


# --------------------------------------------------------------------------------------------------------------------
# Sampling


class CreateSamplingSessionRequest(WireModel):
    session_id: Id
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None


_NO_INTEGERS: Int64 = np.zeros(0, np.int64)


def _integers(*, ge: int) -> Callable[[object, ValidationInfo], Int64 | None]:
    """An array of integers from ``ge`` to ``MAX_TOKEN_ID`` that was taken out of the body, or null."""

    def check(value: object, info: ValidationInfo) -> Int64 | None:
        if value is None:
            return None
        taken: Integers = info.context or Integers()
        array = taken.arrays.get(value) if isinstance(value, str) else None
        if array is not None and ge <= taken.lowest and taken.highest <= MAX_TOKEN_ID:
            return array
        if array is None:
            if not isinstance(value, list):
                raise ValueError(f"is {_shown(value)}, expected a list of integers")
            if not value:
                return _NO_INTEGERS
            for i, item in enumerate(value):
                if not isinstance(item, int) or isinstance(item, bool):
                    null = ", as NaN and infinity are sent in JSON" if item is None else ""
                    raise ValueError(f"[{i}] is {_shown(item)}{null}, expected an integer")
                if not ge <= item <= MAX_TOKEN_ID:
                    raise ValueError(f"[{i}] is {_shown(item)}, expected {ge} to {MAX_TOKEN_ID}")
            return np.array(value, np.int64)
        outside = (array < ge) | (array > MAX_TOKEN_ID)
        if outside.any():
            i = int(outside.argmax())
            raise ValueError(f"[{i}] is {array[i]}, expected {ge} to {MAX_TOKEN_ID}")
        return array

    return check


class Chunk(WireModel):
    type: Annotated[str, AfterValidator(_served("encoded_text"))] = "encoded_text"
    tokens: Annotated[Int64 | None, PlainValidator(_integers(ge=0))] = None

    @model_validator(mode="after")
    def _has_tokens(self) -> Chunk:
        if self.tokens is None:
            raise ValueError("has no tokens")
        return self


class Prompt(WireModel):
    chunks: Annotated[list[Chunk], FailFast()]

    @model_validator(mode="after")
    def _not_empty(self) -> Prompt:
        if not any(chunk.tokens is not None and chunk.tokens.size for chunk in self.chunks):
            raise ValueError("has no tokens, expected at least one")
        return self

    def to_model_input(self) -> types.ModelInput:
        return tuple(
            types.EncodedText(tokens=chunk.tokens.astype(np.int32))
            for chunk in self.chunks
            if chunk.tokens is not None  # never, by the validator above
        )


def _stop(value: object) -> tuple[int, ...] | tuple[str, ...] | None:
    """The forms of ``stop``: absent (end tokens only), [] (nothing), a string, strings, or token ids."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        if len(value) > MAX_STOPS:
            raise ValueError(f"has {len(value)} elements, expected at most {MAX_STOPS}")
        if all(isinstance(item, str) for item in value):
            if "" in value:
                raise ValueError("holds an empty string, expected at least one character")
            return tuple(value)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            outside = [item for item in value if not 0 <= item <= MAX_TOKEN_ID]
            if outside:
                raise ValueError(f"holds the token id {_shown(outside[0])}, expected ids from 0 to {MAX_TOKEN_ID}")
            return tuple(value)
    raise ValueError(f"is {_shown(value)}, expected a string, a list of strings or a list of token ids")


def _top_k(value: int) -> int:
    if value != -1 and not 1 <= value <= MAX_TOKEN_ID:
        raise ValueError(f"is {_shown(value)}, expected -1 (off) or 1 to {MAX_TOKEN_ID}")
    return value


class SamplingParams(WireModel):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[tuple[int, ...] | tuple[str, ...] | None, PlainValidator(_stop)] = None
    temperature: NonNegative = 1.0
    top_k: Annotated[int, AfterValidator(_top_k)] = -1
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0

    def to_params(self) -> types.SamplingParams:
        return types.SamplingParams(
            max_tokens=self.max_tokens,
            seed=self.seed,
            stop=self.stop,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


Dim = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Indices = Annotated[Int64 | None, PlainValidator(_integers(ge=0))]


def _cells(value: object, info: ValidationInfo) -> Int64:
    cells = _integers(ge=-1)(value, info)
    if cells is None:
        raise ValueError("is null, expected a list of integers")
    return cells


class TargetTokens(WireModel):
    """A ``TensorData`` of token ids, int64 [N - 1, K], dense or CSR; -1: none."""

    data: Annotated[Int64, PlainValidator(_cells)]
    dtype: Literal["int64"]
    shape: Annotated[list[Dim], Field(min_length=2, max_length=2), FailFast()]
    sparse_crow_indices: Indices = None
    sparse_col_indices: Indices = None

    @model_validator(mode="after")
    def _consistent(self) -> TargetTokens:
        rows, cols = self.shape
        crow, col = self.sparse_crow_indices, self.sparse_col_indices
        if crow is None or col is None:
            if crow is not None or col is not None:
                raise ValueError("has one of sparse_crow_indices and sparse_col_indices, expected both or neither")
            if len(self.data) != rows * cols:
                raise ValueError(f"has {len(self.data)} elements, expected {rows * cols} by shape {self.shape}")
            return self
        if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != len(self.data) or (np.diff(crow) < 0).any():
            raise ValueError(
                f"has {len(crow)} sparse_crow_indices, expected {rows + 1} that rise from 0 to {len(self.data)}"
            )
        if len(col) != len(self.data) or (col >= cols).any():
            raise ValueError(f"has {len(col)} sparse_col_indices, expected {len(self.data)} from 0 to {cols - 1}")
        return self

    def to_tensor(self) -> types.TensorData:
        return types.TensorData(
            data=self.data,
            shape=tuple(self.shape),
            sparse_crow_indices=self.sparse_crow_indices,
            sparse_col_indices=self.sparse_col_indices,
        )


class SampleRequest(WireModel):
    sampling_session_id: Id
    seq_id: SeqId
    num_samples: Annotated[int, Field(ge=1, le=MAX_NUM_SAMPLES)] = 1
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] | None = 0
    target_prompt_logprobs: TargetTokens | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MAX_TOPK)] | None = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    record_stability_info: bool | None = None
    """Taken, and nothing is recorded: it is for ``stable_reinforce`` alone, and no loss that is computed in its place
    reads more than the log-probabilities, which every sample has."""


# --------------------------------------------------------------------------------------------------------------------
# Futures


class CancelFutureRequest(WireModel):
    request_id: Id


class RetrieveFutureRequest(WireModel):
    request_id: Id
