"""What a request means: owners, sessions, order, futures, versions, checkpoints, restart.

The server decodes a request, calls one method here with the caller's ``principal``, and encodes what comes back.
Nothing here knows HTTP or torch. Every method that takes a ``principal`` sees only what that principal owns: another
owner's id raises the same ``NotFound`` as an id that never was.

Methods that return ``Submitted`` are the protocol's futures: what goes wrong after the request's place in order is
known goes through the future, never as an exception (a half-sent batch must not be stepped). What they raise is for
requests that have no place: unknown session or model, a malformed name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from descant.ports import CheckpointStore, Clock, Engine, FutureStore, Trainer
from descant.types import (
    Answer,
    Encoded,
    ForwardBackward,
    FutureState,
    LoraConfig,
    ModelFacts,
    ModelInput,
    OptimStep,
    SamplingParams,
)

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One served base model: who trains it and who samples it."""

    facts: ModelFacts
    trainer: Trainer
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The immediate answer to a request that ends in a future."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A future that has not ended: ``reason`` says in a sentence what runs now and how much is ahead."""

    request_id: str
    queue_state: QueueState
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    model_id: str
    facts: ModelFacts
    lora: LoraConfig
    user_metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    sampling_session_id: str
    base_model: str
    model_path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInfo:
    base_model: str
    lora: LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSubmission:
    """A decoded ``asample``: the request without what the service adds (its id and which version)."""

    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    num_samples: int
    sampling_params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    hole_timeout_s: float = 330.0
    """How long a command waits for a missing seq_id: longer than the SDK's retries."""
    session_timeout_s: float = 3600.0
    """A session without a heartbeat for this long is over; counted from its creation if it never beat."""
    keep_finished_s: float = 6 * 3600.0
    """Finished futures stay fetchable for this long."""


class Service:
    def __init__(
        self,
        *,
        backends: Sequence[Backend],
        futures: FutureStore,
        checkpoints: CheckpointStore,
        catalogue: Any,
        clock: Clock,
        encode: Callable[[Answer | Exception], Encoded],
        settings: ServiceSettings | None = None,
    ):
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ life
    async def start(self) -> None:
        """Recovers: models that were live become lost, futures that were pending fail naming where to resume."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def capabilities(self) -> Sequence[ModelFacts]:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ sessions
    async def create_session(
        self,
        principal: str,
        *,
        tags: Sequence[str],
        user_metadata: Mapping[str, Any] | None,
        sdk_version: str,
        project_id: str | None,
        display_name: str | None,
        idempotency_key: str | None,
    ) -> str:
        """A session id nobody can guess; the same one for a repeated ``idempotency_key``."""
        raise NotImplementedError

    async def heartbeat(self, principal: str, session_id: str) -> None:
        """Raises ``Gone`` for a session that is over, ``NotFound`` for one that never was."""
        raise NotImplementedError

    async def finish_session(self, principal: str, session_id: str, *, reason: str, detail: str | None) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ models
    async def create_model(
        self,
        principal: str,
        *,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: LoraConfig,
        optimizer: str,
        user_metadata: Mapping[str, str] | None,
    ) -> Submitted:
        """Model id ``{session_id}:train:{model_seq_id}``. ``UserError`` (400) for a base not served, naming those that
        are, and for a rank outside 1..256, no module chosen, or an optimiser other than adamw."""
        raise NotImplementedError

    async def get_info(self, principal: str, model_id: str) -> ModelInfo:
        raise NotImplementedError

    async def forward_backward(self, principal: str, command: ForwardBackward) -> Submitted:
        raise NotImplementedError

    async def optim_step(self, principal: str, command: OptimStep) -> Submitted:
        raise NotImplementedError

    async def refuse(
        self, principal: str, *, model_id: str, seq_id: int, operation: str, message: str, loses_gradient: bool
    ) -> Submitted:
        """A request whose body is wrong but whose place is known: its future fails in order with ``message``."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ weights
    async def save_weights(
        self, principal: str, *, model_id: str, seq_id: int, name: str, overwrite: bool, ttl_seconds: int | None
    ) -> Submitted:
        raise NotImplementedError

    async def load_weights_new(
        self,
        principal: str,
        *,
        session_id: str,
        model_seq_id: int,
        path: str,
        optimizer: bool,
        base_model: str | None,
        user_metadata: Mapping[str, str] | None,
    ) -> Submitted:
        raise NotImplementedError

    async def load_weights_into(
        self, principal: str, *, model_id: str, seq_id: int, path: str, optimizer: bool
    ) -> Submitted:
        """Only as a model's first request (seq_id 1), else ``UserError`` (400), the id consumed."""
        raise NotImplementedError

    async def save_weights_for_sampler(
        self,
        principal: str,
        *,
        model_id: str,
        seq_id: int,
        name: str | None,
        sampling_session_seq_id: int | None,
        ttl_seconds: int | None,
    ) -> Submitted:
        """``name`` given: a checkpoint. Else ephemeral: a sampling session on a published row, no file."""
        raise NotImplementedError

    async def weights_info(self, principal: str, path: str) -> WeightsInfo:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ sampling
    async def create_sampling_session(
        self,
        principal: str,
        *,
        session_id: str,
        sampling_session_seq_id: int,
        base_model: str | None,
        model_path: str | None,
    ) -> str:
        """Id ``{session_id}:sample:{seq}``."""
        raise NotImplementedError

    async def get_sampler(self, principal: str, sampling_session_id: str) -> SamplerInfo:
        raise NotImplementedError

    async def sample(self, principal: str, submission: SampleSubmission) -> Submitted:
        """``sample_sequence_ids``: one ``{sampling_session_id}:{seq_id}:{i}`` per sample. Raises ``Overloaded``."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ futures
    async def retrieve_future(self, principal: str, request_id: str, *, timeout_s: float) -> FutureState | Pending:
        """Waits up to ``timeout_s``. Raises ``NotFound`` for an id this principal does not own."""
        raise NotImplementedError
