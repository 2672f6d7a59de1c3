"""A small service in memory, and the app over it, in process and on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from descant.errors import Gone, NotFound, Overloaded, UserError
from descant.server.app import HttpServer, bind, create_app
from descant.server.auth import Keys
from descant.server.settings import HttpSettings
from descant.service.futures import Pending, Submitted
from descant.service.sample_submission import SampleSubmission
from descant.service.sampling import SamplerInfo
from descant.service.training import ModelInfo, WeightsInfo
from descant.types import (
    Encoded,
    ForwardBackward,
    ForwardBackwardOutput,
    FutureKey,
    FutureState,
    Lora,
    ModelCreated,
    ModelFacts,
    OptimStep,
    OptimStepOutput,
    PromptScores,
    RequestBody,
    SampledSequence,
    SampleOutput,
    SamplerWeightsSaved,
    TopK,
    Trainable,
    WeightsLoaded,
    WeightsSaved,
    input_length,
)
from descant.wire.encode import encode

FACTS = ModelFacts(
    name="org/tiny",
    aliases=("tiny",),
    architecture="Tiny",
    vocab_size=100,
    max_context_length=64,
    eos_token_ids=(0,),
    num_params=1,
    dtype="float32",
    device="cpu",
)


@dataclass
class Refusal:
    model_id: str
    seq_id: int
    operation: str
    message: str
    poisons_gradient: bool


class StubService:
    """Answers at once with numbers that follow from the request. ``commands`` and ``refusals`` record what came."""

    def __init__(self) -> None:
        self.sessions: dict[str, str] = {}
        self.models: dict[str, tuple[str, Trainable, Mapping[str, str]]] = {}
        self.samplers: dict[str, tuple[str, str | None]] = {}
        self.answers: dict[str, tuple[str, Encoded | None]] = {}
        self.commands: list[object] = []
        self.refusals: list[Refusal] = []
        self.session_requests: list[dict[str, Any]] = []
        self.finished: list[tuple[str, str]] = []
        self.disconnected_polls: list[tuple[str, str]] = []
        self.disconnected_submissions: list[tuple[str, str]] = []
        self.cancelled: list[str] = []
        self.over: set[str] = set()
        self.hold = False
        """Futures stay pending."""
        self.hold_s: float | None = None
        """How long a poll of one that stays pending is held at least, in seconds; None: as long as it says."""
        self.goes_on = threading.Event()
        """``sample`` waits for it."""
        self.goes_on.set()
        self.entered, self.told = threading.Event(), threading.Event()
        """``retrieve_future`` or ``sample`` was called; a disconnect was reported."""
        self.overloaded = False
        self.broken = False
        """``get_info`` raises what is not in the error tree."""
        self.resolved = asyncio.Event()
        self.creation = self.training = self.sampling = self.futures = self
        """All the parts of a service at once."""

    # -- helpers
    def _put(self, principal: str, answer: Any, **more: Any) -> Submitted:
        request_id = f"future-{len(self.answers)}"
        self.answers[request_id] = (principal, None if self.hold else encode(answer))
        return Submitted(request_id=request_id, **more)

    def _model(self, principal: str, model_id: str) -> tuple[str, Trainable, Mapping[str, str]]:
        if model_id not in self.models or self.models[model_id][0] != principal:
            raise NotFound(f"no model {model_id!r}")
        return self.models[model_id]

    def _session(self, principal: str, session_id: str) -> None:
        if self.sessions.get(session_id) != principal:
            raise NotFound(f"no session {session_id!r}")
        if session_id in self.over:
            raise Gone(f"session {session_id!r} is over")

    # -- the service's methods
    def capabilities(self) -> Sequence[ModelFacts]:
        return [FACTS]

    async def create_session(self, principal: str, **request: Any) -> str:
        session_id = f"session-{len(self.sessions)}"
        self.sessions[session_id] = principal
        self.session_requests.append(request)
        return session_id

    async def heartbeat(self, principal: str, session_id: str) -> None:
        self._session(principal, session_id)

    async def finish_session(self, principal: str, session_id: str, *, reason: str, detail: str | None) -> None:
        self._session(principal, session_id)
        self.finished.append((session_id, reason))

    async def create_model(
        self, principal: str, *, session_id: str, model_seq_id: int, base_model: str, trainable: Trainable, **rest: Any
    ) -> Submitted:
        self._session(principal, session_id)
        if base_model not in ("org/tiny", "tiny"):
            raise UserError(f"base_model is {base_model!r}, expected 'org/tiny'")
        model_id = f"{session_id}:train:{model_seq_id}"
        self.models[model_id] = (principal, trainable, rest["user_metadata"] or {})
        return self._put(principal, ModelCreated(model_id=model_id, trainable=trainable, step=0), model_id=model_id)

    async def get_info(self, principal: str, model_id: str) -> ModelInfo:
        if self.broken:
            raise RuntimeError("secret detail")
        _, trainable, metadata = self._model(principal, model_id)
        return ModelInfo(model_id=model_id, facts=FACTS, trainable=trainable, user_metadata=metadata)

    async def forward_backward(self, principal: str, command: ForwardBackward, body: RequestBody) -> Submitted:
        self._model(principal, command.model_id)
        self.commands.append(command)
        outputs = tuple(
            {"logprobs": -np.asarray(datum.loss_fn_inputs["target_tokens"]).astype(np.float32)}
            for datum in command.data
            if "target_tokens" in datum.loss_fn_inputs
        )
        metrics = {"loss:sum": float(len(command.data))}
        return self._put(principal, ForwardBackwardOutput(loss_fn_outputs=outputs, metrics=metrics))

    async def optim_step(self, principal: str, command: OptimStep) -> Submitted:
        self._model(principal, command.model_id)
        self.commands.append(command)
        return self._put(principal, OptimStepOutput(metrics={"grad_norm": 0.5}))

    async def refuse(self, principal: str, *, message: str, **rest: Any) -> Submitted:
        self._model(principal, rest["model_id"])
        self.refusals.append(Refusal(message=message, **rest))
        return self._put(principal, UserError(message))

    async def save_weights(self, principal: str, *, model_id: str, name: str, **rest: Any) -> Submitted:
        self._model(principal, model_id)
        return self._put(principal, WeightsSaved(path=f"tinker://{model_id}/weights/{name}"))

    async def load_weights_new(
        self, principal: str, *, session_id: str, model_seq_id: int, path: str, **rest: Any
    ) -> Submitted:
        self._session(principal, session_id)
        model_id = f"{session_id}:train:{model_seq_id}"
        self.models[model_id] = (principal, Lora(), {})
        return self._put(principal, WeightsLoaded(path=path, model_id=model_id), model_id=model_id)

    async def load_weights_into(self, principal: str, *, model_id: str, path: str, **rest: Any) -> Submitted:
        self._model(principal, model_id)
        return self._put(principal, WeightsLoaded(path=path, model_id=model_id))

    async def save_weights_for_sampler(
        self,
        principal: str,
        *,
        model_id: str,
        name: str | None,
        sampling_session_seq_id: int | None,
        **rest: Any,
    ) -> Submitted:
        self._model(principal, model_id)
        if name is not None:
            path = f"tinker://{model_id}/sampler_weights/{name}"
            return self._put(principal, SamplerWeightsSaved(path=path, sampling_session_id=None))
        sampler = f"{model_id.split(':')[0]}:sample:{sampling_session_seq_id}"
        self.samplers[sampler] = (principal, None)
        return self._put(principal, SamplerWeightsSaved(path=None, sampling_session_id=sampler))

    async def weights_info(self, principal: str, path: str) -> WeightsInfo:
        if not path.startswith("tinker://"):
            raise UserError(f"tinker_path is {path[:40]!r}, expected tinker://model/weights/name")
        return WeightsInfo(base_model=FACTS.name, trainable=Lora(rank=4, train_mlp=False))

    async def create_sampling_session(
        self, principal: str, *, session_id: str, sampling_session_seq_id: int, model_path: str | None, **rest: Any
    ) -> str:
        self._session(principal, session_id)
        sampler = f"{session_id}:sample:{sampling_session_seq_id}"
        self.samplers[sampler] = (principal, model_path)
        return sampler

    async def get_sampler(self, principal: str, sampling_session_id: str) -> SamplerInfo:
        owner, path = self.samplers.get(sampling_session_id, (None, None))
        if owner != principal:
            raise NotFound(f"no sampling session {sampling_session_id!r}")
        return SamplerInfo(sampling_session_id=sampling_session_id, base_model=FACTS.name, model_path=path)

    async def sample(self, principal: str, submission: SampleSubmission) -> Submitted:
        if self.overloaded:
            raise Overloaded("too many samples are waiting", retry_after_s=0.01)
        self.entered.set()
        if not self.goes_on.is_set():
            await asyncio.to_thread(self.goes_on.wait, 10)
        await self.get_sampler(principal, submission.sampling_session_id)
        self.commands.append(submission)
        num_tokens = submission.sampling_params.max_tokens or 3
        sequence = SampledSequence(
            tokens=np.arange(num_tokens, dtype=np.int32),
            logprobs=-np.arange(num_tokens, dtype=np.float32),
            stop_reason="length",
        )
        prompt = None
        if submission.prompt_logprobs or submission.topk_prompt_logprobs:
            n, k = input_length(submission.prompt), submission.topk_prompt_logprobs
            logprobs = np.full(n, -1.5, np.float32)
            logprobs[0] = np.nan
            topk = TopK(token_ids=np.ones((n, k), np.int32), logprobs=np.full((n, k), -2.0, np.float32)) if k else None
            prompt = PromptScores(logprobs=logprobs, topk=topk)
        output = SampleOutput(sequences=(sequence,) * submission.num_samples, prompt=prompt, versions=())
        place = f"{submission.sampling_session_id}:{submission.seq_id}"
        ids = tuple(f"{place}:{i}" for i in range(submission.num_samples))
        return self._put(principal, output, sample_sequence_ids=ids)

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        return {
            "org/tiny": {
                "sample_running": 3,
                "sampling_gap_seconds_bucket/0.5": 1,
                "sampling_gap_seconds_bucket/10.0": 2,
                "sampling_gap_seconds_bucket/+Inf": 2,
                "sampling_gap_seconds_sum": 2.5,
                "sampling_gap_seconds_count": 2,
                "adapter_load_wait_seconds": 0.25,
            },
            'a "quoted" one': {"sample_running": 0},
        }

    async def poll_disconnected(self, principal: str, request_id: str) -> None:
        self.disconnected_polls.append((principal, request_id))
        self.told.set()

    async def submission_disconnected(self, principal: str, request_id: str) -> None:
        self.disconnected_submissions.append((principal, request_id))
        self.told.set()

    async def cancel_future(self, principal: str, request_id: str) -> None:
        if self.answers.get(request_id, (None, None))[0] != principal:
            raise NotFound(f"no future {request_id!r}")
        self.cancelled.append(request_id)

    async def retrieve_future(self, principal: str, request_id: str, *, timeout_s: float) -> FutureState | Pending:
        self.entered.set()
        owner, encoded = self.answers.get(request_id, (None, None))
        if owner != principal:
            raise NotFound(f"no future {request_id!r}")
        if encoded is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.resolved.wait(), max(timeout_s, self.hold_s or 0.0))
            return Pending(request_id=request_id, queue_state="active", reason="2 requests are ahead")
        key = FutureKey(kind="train", scope="", seq_id=0)
        return FutureState(request_id=request_id, owner=owner, base="", key=key, operation="", encoded=encoded)


SETTINGS = HttpSettings(long_poll_s=0.05, max_body_bytes=1 << 20)


@pytest.fixture
def service() -> StubService:
    return StubService()


@pytest.fixture
async def client(service: StubService):
    app = create_app(service, auth=Keys(), ready=lambda: None, settings=SETTINGS)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    headers = {"x-api-key": "tml-a"}
    async with httpx.AsyncClient(transport=transport, base_url="http://descant", headers=headers) as client:
        yield client


class Running:
    """The app on a loopback socket, run by ``HttpServer`` on a thread of its own."""

    def __init__(self, service: object, settings: HttpSettings):
        self.app = create_app(service, auth=Keys(), ready=lambda: None, settings=settings)
        self.socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = HttpServer(self.app)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


@pytest.fixture
def running(service: StubService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    running = Running(service, HttpSettings(long_poll_s=5.0))
    yield running
    running.stop()
