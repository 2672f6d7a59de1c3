"""The protocol's JSON requests: what a client may send, checked field by field.

Unknown fields are accepted, zero is a value, and nothing is coerced (``"1"`` is no number). What a request means is the
service's business; here only what can be said of the body alone is refused: absent or mistyped fields, numbers that are
not finite or out of range, features not served yet.

A request with a place in its model's order raises ``Malformed``, which carries that place: the id is consumed, so that
the requests behind it do not wait for one that will never come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from descant import types
from descant.errors import UserError

MAX_SEQ_ID = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_NUM_SAMPLES = 1024
MAX_TOPK = 1024
"""Bounds on what one small body may make us allocate; an engine's own limits are lower."""
MAX_TARGET_CELLS = 1 << 20
"""Prompt tokens that one request may ask the log-probability of, beside its own."""

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
        self, message: str, model_id: str, seq_id: int, loses_gradient: bool = False, answer_at_once: bool = False
    ):
        super().__init__(message)
        self.model_id = model_id
        self.seq_id = seq_id
        self.loses_gradient = loses_gradient
        self.answer_at_once = answer_at_once

    def __reduce__(self) -> tuple[type, tuple[str, str, int, bool, bool]]:
        return type(self), (self.message, self.model_id, self.seq_id, self.loses_gradient, self.answer_at_once)


class Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


class Place(Request):
    """Where a request stands among its model's."""

    model_id: Id
    seq_id: SeqId


R = TypeVar("R", bound=Request)


def parse(model: type[R], body: bytes) -> R:
    """A JSON body as ``model``. Raises ``Malformed`` if it holds a ``Place``, else ``UserError``, naming the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        message = _sentence(error)
    if issubclass(model, OrderedRequest):
        try:
            place = Place.model_validate_json(body)
        except ValidationError:
            pass
        else:
            raise Malformed(message, place.model_id, place.seq_id)
    raise UserError(message)


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
            return f"{where} {fault['ctx']['error']}"
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


class ClientConfigRequest(Request):
    sdk_version: str | None = None


class CreateSessionRequest(Request):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeatRequest(Request):
    session_id: Id


class FinishReason(Request):
    type: str


class FinishSessionRequest(Request):
    reason: FinishReason
    detail: str | None = None


# --------------------------------------------------------------------------------------------------------------------
# Models


class OptimizerConfig(Request):
    type: Annotated[str, AfterValidator(_served("adamw"))] = "adamw"


class LoraConfig(Request):
    """Ranges are the service's to judge (they depend on the base model)."""

    rank: int = 32
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def to_lora(self) -> types.LoraConfig:
        return types.LoraConfig(
            rank=self.rank,
            seed=self.seed,
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
        )


class CreateModelRequest(Request):
    session_id: Id
    model_seq_id: SeqId
    base_model: str
    user_metadata: dict[str, str] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None

    @property
    def lora(self) -> types.LoraConfig:
        return (self.lora_config or LoraConfig()).to_lora()


class GetInfoRequest(Request):
    model_id: Id


class OrderedRequest(Request):
    """A request that takes a place in its model's order; ``parse`` keeps the place when the rest is wrong."""


class AdamParams(Request):
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


class WeightsInfoRequest(Request):
    tinker_path: str


# --------------------------------------------------------------------------------------------------------------------
# Sampling


class CreateSamplingSessionRequest(Request):
    session_id: Id
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Request):
    type: Annotated[str, AfterValidator(_served("encoded_text"))] = "encoded_text"
    tokens: list[TokenId] | None = None

    @model_validator(mode="after")
    def _has_tokens(self) -> Chunk:
        if self.tokens is None:
            raise ValueError("has no tokens")
        return self


class Prompt(Request):
    chunks: list[Chunk]

    @model_validator(mode="after")
    def _not_empty(self) -> Prompt:
        if not any(chunk.tokens for chunk in self.chunks):
            raise ValueError("has no tokens, expected at least one")
        return self

    def to_model_input(self) -> types.ModelInput:
        return tuple(types.EncodedText(tokens=np.array(chunk.tokens, dtype=np.int32)) for chunk in self.chunks)


def _stop(value: object) -> tuple[int, ...] | tuple[str, ...] | None:
    """The forms of ``stop``: absent (end tokens only), [] (nothing), a string, strings, or token ids."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
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
        raise ValueError(f"is {_shown(value)}, expected -1 (off) or at least 1")
    return value


class SamplingParams(Request):
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


Index = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class TargetTokens(Request):
    """A ``TensorData`` of token ids, int64 [N - 1, K], dense or CSR; -1: none."""

    data: Annotated[list[Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)]], Field(max_length=MAX_TARGET_CELLS)]
    dtype: Literal["int64"]
    shape: Annotated[list[Index], Field(min_length=2, max_length=2)]
    sparse_crow_indices: list[Index] | None = None
    sparse_col_indices: list[Index] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> TargetTokens:
        rows, cols = self.shape
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            if self.sparse_crow_indices is not None or self.sparse_col_indices is not None:
                raise ValueError("has one of sparse_crow_indices and sparse_col_indices, expected both or neither")
            if len(self.data) != rows * cols:
                raise ValueError(f"has {len(self.data)} elements, expected {rows * cols} by shape {self.shape}")
            return self
        crow, col = np.array(self.sparse_crow_indices), np.array(self.sparse_col_indices)
        if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != len(self.data) or (np.diff(crow) < 0).any():
            raise ValueError(
                f"has {len(crow)} sparse_crow_indices, expected {rows + 1} that rise from 0 to {len(self.data)}"
            )
        if len(col) != len(self.data) or (col >= cols).any():
            raise ValueError(f"has {len(col)} sparse_col_indices, expected {len(self.data)} from 0 to {cols - 1}")
        return self

    def to_tensor(self) -> types.TensorData:
        sparse = self.sparse_crow_indices is not None
        return types.TensorData(
            data=np.array(self.data, np.int64),
            shape=tuple(self.shape),
            sparse_crow_indices=np.array(self.sparse_crow_indices, np.int64) if sparse else None,
            sparse_col_indices=np.array(self.sparse_col_indices, np.int64) if sparse else None,
        )


class SampleRequest(Request):
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
    record_stability_info: Annotated[bool | None, AfterValidator(_served(False, None))] = None


# --------------------------------------------------------------------------------------------------------------------
# Futures


class CancelFutureRequest(Request):
    request_id: Id


class RetrieveFutureRequest(Request):
    request_id: Id
