"""The endpoints: decode, one call to the service, encode.

Every endpoint is a method of ``Routes`` that takes a ``Call`` and returns a ``Response``. What it raises is answered in
one place, ``Routes._answer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from descant import types
from descant.errors import UserError
from descant.server.auth import Keys
from descant.server.longpoll import BrokenOff, LongPolls
from descant.server.responses import error_response, json_response, submitted_response, try_again_response
from descant.service.promises import Pending
from descant.service.sampling import SampleSubmission
from descant.service.service import Service
from descant.wire import decode, requests

R = TypeVar("R", bound=requests.Request)

PREFIX = "/api/v1"

CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "create_model_via_load_weights": True,
}
"""What this server can do. Chunks come one after the other, so that a model's requests arrive in order."""

SDK_SAMPLES = "x-tinker-sampling-backpressure"
"""The SDK sends this header, as "1", with every sampling request; it waits for each as soon as it has its id."""

DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    long_poll_s: float = 25.0
    """How long ``retrieve_future`` is held open; the SDK gives up on it after 45 s."""
    max_body_bytes: int = decode.MAX_BODY_BYTES
    """Of a request's body, before and after decompression."""
    body_timeout_s: float = 60.0
    """How long a body may take to arrive; the SDK gives up on a request after 60 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One authenticated request."""

    principal: str
    request: Request
    settings: ServerSettings

    @property
    def content_encoding(self) -> str | None:
        return self.request.headers.get("content-encoding")

    async def body(self) -> bytes:
        """The body as it was sent. Raises ``BodyTooLarge``, and ``UserError`` for one that does not arrive whole."""
        limit = self.settings.max_body_bytes
        parts: list[bytes] = []
        num_bytes = 0
        declared = self.request.headers.get("content-length", "")
        too_large = declared.isdecimal() and len(declared) < 20 and int(declared) > limit
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                async for part in self.request.stream():
                    parts.append(part)
                    num_bytes += len(part)
                    if num_bytes > (decode.PREFIX_BYTES if too_large else limit):
                        raise BodyTooLarge(limit, b"".join(parts)[: decode.PREFIX_BYTES])
        except TimeoutError:
            raise UserError(f"the body did not arrive within {self.settings.body_timeout_s:g} s") from None
        except ClientDisconnect:
            raise UserError("the connection was closed before the body had arrived") from None
        return b"".join(parts)

    async def broken_off(self) -> None:
        """Ends when the client closes the connection before it has its answer. Only after the whole body was read."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def json(self, model: type[R]) -> R:
        """The body as ``model``. Raises what ``requests.parse`` and ``body`` raise."""
        body = await self.body()
        plain = decode.decompress(body, self.content_encoding, max_bytes=self.settings.max_body_bytes)
        return requests.parse(model, plain)


class BodyTooLarge(decode.TooLarge):
    """``prefix``: what had arrived first."""

    def __init__(self, limit: int, prefix: bytes):
        super().__init__(f"the body is larger than {limit} bytes")
        self.limit = limit
        self.prefix = prefix

    def __reduce__(self) -> tuple[type, tuple[int, bytes]]:
        return type(self), (self.limit, self.prefix)


Handler = Callable[[Call], Awaitable[Response]]


class Routes:
    def __init__(self, service: Service, *, auth: Keys, polls: LongPolls, settings: ServerSettings):
        self._service = service
        self._auth = auth
        self._polls = polls
        self._settings = settings

    def table(self) -> list[BaseRoute]:
        """All routes, the busiest first (they are tried in order), and one that answers for the rest."""
        endpoints: list[tuple[str, str, Handler]] = [
            ("POST", "/retrieve_future", self.retrieve_future),
            ("POST", "/asample", self.asample),
            ("POST", "/forward_backward", self.forward_backward),
            ("POST", "/optim_step", self.optim_step),
            ("POST", "/session_heartbeat", self.session_heartbeat),
            ("POST", "/save_weights_for_sampler", self.save_weights_for_sampler),
            ("POST", "/save_weights", self.save_weights),
            ("POST", "/load_weights", self.load_weights),
            ("POST", "/create_sampling_session", self.create_sampling_session),
            ("GET", "/samplers/{sampling_session_id}", self.get_sampler),
            ("POST", "/cancel_future", self.cancel_future),
            ("POST", "/create_model", self.create_model),
            ("POST", "/get_info", self.get_info),
            ("POST", "/create_session", self.create_session),
            ("POST", "/sessions/{session_id}/finish", self.finish_session),
            ("POST", "/weights_info", self.weights_info),
            ("POST", "/telemetry", self.telemetry),
            ("POST", "/client/config", self.client_config),
            ("POST", "/client/dynamic_config", self.client_dynamic_config),
            ("GET", "/get_server_capabilities", self.get_server_capabilities),
        ]
        served = [
            Route(PREFIX + path, self._endpoint(handler), methods=[method]) for method, path, handler in endpoints
        ]
        return [
            *served,
            Route("/metrics", self._endpoint(self.metrics), methods=["GET"]),
            Route(PREFIX + "/healthz", healthz, methods=["GET"]),
            Route("/healthz", healthz, methods=["GET"]),
            Route(PREFIX + "/{path:path}", NotServed()),
        ]

    def _endpoint(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await self._answer(request, handler)
            except Exception as error:
                return error_response(error)

        return endpoint

    async def _answer(self, request: Request, handler: Handler) -> Response:
        principal = self._auth.principal(request.headers)
        try:
            return await handler(Call(principal=principal, request=request, settings=self._settings))
        except requests.Malformed as error:
            submitted = await self._service.training.refuse(
                principal,
                model_id=error.model_id,
                seq_id=error.seq_id,
                operation=handler.__name__,
                message=error.message,
                loses_gradient=error.loses_gradient,
            )
            return error_response(error) if error.answer_at_once else submitted_response(submitted)

    # ------------------------------------------------------------------------------------------------ configuration
    async def client_config(self, call: Call) -> Response:
        await call.json(requests.ClientConfigRequest)
        return json_response(CLIENT_CONFIG)

    async def client_dynamic_config(self, call: Call) -> Response:
        await call.json(requests.ClientConfigRequest)
        return json_response(DYNAMIC_CONFIG)

    async def get_server_capabilities(self, call: Call) -> Response:
        models = [
            {
                "model_name": name,
                "max_context_length": facts.max_context_length,
                "trainable": True,
                "sampleable": True,
            }
            for facts in self._service.capabilities()
            for name in (facts.name, *facts.aliases)
        ]
        return json_response({"supported_models": models})

    async def telemetry(self, call: Call) -> Response:
        """Accepted and dropped: its events may hold request headers, the API key among them."""
        await call.body()
        return json_response({"status": "accepted"})

    async def metrics(self, call: Call) -> Response:
        """Numbers of the whole server, as Prometheus reads them. For whoever has a key."""
        lines = [
            f'descant_{name}{{base="{base}"}} {value:.15g}'
            for base, numbers in (await self._service.stats()).items()
            for name, value in sorted(numbers.items())
        ]
        return Response("".join(f"{line}\n" for line in lines), media_type="text/plain; version=0.0.4")

    # ------------------------------------------------------------------------------------------------ sessions
    async def create_session(self, call: Call) -> Response:
        request = await call.json(requests.CreateSessionRequest)
        session_id = await self._service.create_session(
            call.principal,
            tags=request.tags,
            user_metadata=request.user_metadata,
            sdk_version=request.sdk_version,
            project_id=request.project_id,
            display_name=request.display_name,
            idempotency_key=call.request.headers.get("x-idempotency-key"),
        )
        return json_response({"session_id": session_id, "type": "create_session"})

    async def session_heartbeat(self, call: Call) -> Response:
        request = await call.json(requests.SessionHeartbeatRequest)
        await self._service.heartbeat(call.principal, request.session_id)
        return json_response({"type": "session_heartbeat"})

    async def finish_session(self, call: Call) -> Response:
        request = await call.json(requests.FinishSessionRequest)
        await self._service.finish_session(
            call.principal, call.request.path_params["session_id"], reason=request.reason.type, detail=request.detail
        )
        return json_response({})

    # ------------------------------------------------------------------------------------------------ models
    async def create_model(self, call: Call) -> Response:
        request = await call.json(requests.CreateModelRequest)
        submitted = await self._service.training.create_model(
            call.principal,
            session_id=request.session_id,
            model_seq_id=request.model_seq_id,
            base_model=request.base_model,
            lora=request.lora,
            optimizer=(request.optimizer_config or requests.OptimizerConfig()).type,
            user_metadata=request.user_metadata,
        )
        return submitted_response(submitted)

    async def get_info(self, call: Call) -> Response:
        request = await call.json(requests.GetInfoRequest)
        info = await self._service.training.get_info(call.principal, request.model_id)
        return json_response(
            {
                "type": "get_info",
                "model_id": info.model_id,
                "model_data": {
                    "arch": info.facts.architecture,
                    "model_name": info.facts.name,
                    "tokenizer_id": info.facts.name,
                },
                "model_name": info.facts.name,
                "is_lora": True,
                "lora_rank": info.lora.rank,
                "optimizer_config": {"type": "adamw"},
            }
        )

    async def forward_backward(self, call: Call) -> Response:
        try:
            body = await call.body()
        except BodyTooLarge as error:
            raise decode.unread_forward_backward(error.prefix, call.content_encoding, error.message) from None
        command = decode.decode_forward_backward(body, call.content_encoding, max_bytes=self._settings.max_body_bytes)
        return submitted_response(await self._service.training.forward_backward(call.principal, command))

    async def optim_step(self, call: Call) -> Response:
        request = await call.json(requests.OptimStepRequest)
        return submitted_response(await self._service.training.optim_step(call.principal, request.to_command()))

    # ------------------------------------------------------------------------------------------------ weights
    async def save_weights(self, call: Call) -> Response:
        request = await call.json(requests.SaveWeightsRequest)
        submitted = await self._service.training.save_weights(
            call.principal,
            model_id=request.model_id,
            seq_id=request.seq_id,
            name=request.path,
            overwrite=request.overwrite,
            ttl_seconds=request.ttl_seconds,
        )
        return submitted_response(submitted)

    async def save_weights_for_sampler(self, call: Call) -> Response:
        request = await call.json(requests.SaveWeightsForSamplerRequest)
        submitted = await self._service.training.save_weights_for_sampler(
            call.principal,
            model_id=request.model_id,
            seq_id=request.seq_id,
            name=request.path,
            sampling_session_seq_id=request.sampling_session_seq_id,
            kind=request.kind,
            ttl_seconds=request.ttl_seconds,
        )
        return submitted_response(submitted)

    async def load_weights(self, call: Call) -> Response:
        match (await call.json(requests.LoadWeightsRequest)).to_form():
            case requests.LoadIntoNewModel() as new:
                submitted = await self._service.training.load_weights_new(
                    call.principal,
                    session_id=new.session_id,
                    model_seq_id=new.model_seq_id,
                    path=new.path,
                    optimizer=new.optimizer,
                    base_model=new.base_model,
                    user_metadata=new.user_metadata,
                )
            case requests.LoadIntoModel() as into:
                submitted = await self._service.training.load_weights_into(
                    call.principal,
                    model_id=into.model_id,
                    seq_id=into.seq_id,
                    path=into.path,
                    optimizer=into.optimizer,
                )
        return submitted_response(submitted)

    async def weights_info(self, call: Call) -> Response:
        request = await call.json(requests.WeightsInfoRequest)
        info = await self._service.training.weights_info(call.principal, request.tinker_path)
        return json_response(
            {
                "base_model": info.base_model,
                "is_lora": True,
                "lora_rank": info.lora.rank,
                "train_unembed": info.lora.train_unembed,
                "train_mlp": info.lora.train_mlp,
                "train_attn": info.lora.train_attn,
                "optimizer_config": {"type": "adamw"},
            }
        )

    # ------------------------------------------------------------------------------------------------ sampling
    async def create_sampling_session(self, call: Call) -> Response:
        request = await call.json(requests.CreateSamplingSessionRequest)
        sampling_session_id = await self._service.sampling.create_sampling_session(
            call.principal,
            session_id=request.session_id,
            sampling_session_seq_id=request.sampling_session_seq_id,
            base_model=request.base_model,
            model_path=request.model_path,
        )
        return json_response({"sampling_session_id": sampling_session_id, "type": "create_sampling_session"})

    async def get_sampler(self, call: Call) -> Response:
        info = await self._service.sampling.get_sampler(call.principal, call.request.path_params["sampling_session_id"])
        return json_response(
            {"sampler_id": info.sampling_session_id, "base_model": info.base_model, "model_path": info.model_path}
        )

    async def asample(self, call: Call) -> Response:
        request = await call.json(requests.SampleRequest)
        submission = SampleSubmission(
            sampling_session_id=request.sampling_session_id,
            seq_id=request.seq_id,
            prompt=request.prompt.to_model_input(),
            num_samples=request.num_samples,
            sampling_params=request.sampling_params.to_params(),
            prompt_logprobs=bool(request.prompt_logprobs),
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            target_prompt_logprobs=targets.to_tensor() if (targets := request.target_prompt_logprobs) else None,
            prompt_alt_tokens_k=request.prompt_alt_tokens_k or 0,
            topk_sample_logprobs=request.topk_sample_logprobs or 0,
            claimed_at_once=call.request.headers.get(SDK_SAMPLES) == "1",
        )
        broken_off = asyncio.ensure_future(call.broken_off())
        try:
            submitted = await self._service.sampling.sample(call.principal, submission)
        finally:
            broken_off.cancel()
        if broken_off.done():
            await self._service.promises.submission_broken_off(call.principal, submitted.request_id)
        return submitted_response(submitted)

    # ------------------------------------------------------------------------------------------------ futures
    async def retrieve_future(self, call: Call) -> Response:
        request = await call.json(requests.RetrieveFutureRequest)
        try:
            state = await self._polls.wait(
                self._service.promises.retrieve_future(
                    call.principal, request.request_id, timeout_s=self._settings.long_poll_s
                ),
                deadline_s=self._settings.long_poll_s + 5.0,
                broken_off=call.broken_off(),
            )
        except BrokenOff:
            await self._service.promises.poll_broken_off(call.principal, request.request_id)
            return Response(status_code=499)  # which nobody reads
        match state:
            case types.FutureState(encoded=types.Encoded() as encoded):
                return Response(encoded.body, media_type=encoded.content_type)
            case Pending():
                return try_again_response(state)
            case _:
                reason = "the server is stopping" if self._polls.closed else "the server did not say"
                return try_again_response(Pending(request_id=request.request_id, queue_state="active", reason=reason))

    async def cancel_future(self, call: Call) -> Response:
        request = await call.json(requests.CancelFutureRequest)
        await self._service.promises.cancel_future(call.principal, request.request_id)
        return json_response({"type": "cancel_future"})


async def healthz(request: Request) -> Response:
    """Liveness: the process answers."""
    return json_response({"status": "ok"})


class NotServed:
    """Whatever else lies under the prefix, by any method."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        response = json_response({"detail": f"{request.method} {request.url.path} is not served yet"}, status=404)
        await response(scope, receive, send)
