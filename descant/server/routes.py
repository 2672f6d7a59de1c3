"""The endpoints: decode, one call to the service, encode.

Every endpoint is a method of ``Routes`` that takes an ``ApiCall`` and returns a ``Response``. What it raises is
answered in one place, ``Routes._answer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from descant import types
from descant.server.auth import Keys
from descant.server.call import ApiCall, BodyTooLarge, Decoding
from descant.server.connections import CONNECTION
from descant.server.longpoll import Disconnected, LongPolls
from descant.server.metrics import exposition
from descant.server.responses import error_response, json_response, submitted_response, try_again_response
from descant.server.settings import HttpSettings
from descant.server.uploads import Uploads
from descant.service.futures import Pending
from descant.service.sample_submission import SampleSubmission
from descant.service.service import Service
from descant.wire import decode, requests

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
"""The SDK sends this header, as "1", with every sampling request; it polls for each as soon as it has its id."""

DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


MAX_TELEMETRY_BYTES = 4 * 2**20
"""A hundred events with tracebacks. They are not kept."""


def _decode_forward_backward(body: bytes, content_encoding: str | None, max_bytes: int) -> types.ForwardBackward:
    return decode.decode_forward_backward(body, content_encoding, max_bytes=max_bytes)


def _decode_sample(
    body: bytes, content_encoding: str | None, max_elements: int, polls_at_once: bool
) -> SampleSubmission:
    plain = decode.decompress(body, content_encoding, max_bytes=requests.MAX_SAMPLE_BYTES)
    request = requests.parse_sample(plain, max_elements=max_elements)
    return SampleSubmission(
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
        polls_at_once=polls_at_once,
    )


Handler = Callable[[ApiCall], Awaitable[Response]]


class Routes:
    def __init__(self, service: Service, *, auth: Keys, polls: LongPolls, settings: HttpSettings):
        self._service = service
        self._auth = auth
        self._polls = polls
        self._settings = settings
        self._uploads = Uploads(max_bytes=settings.max_bodies_bytes)
        self._decoding = Decoding()

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
            ("POST", "/save_weights_external", self.not_served_in_order),
            ("POST", "/forward", self.not_served_in_order),
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
        if (connection := request.scope.get(CONNECTION)) is not None:
            connection.authenticated(principal)
        call = ApiCall(
            principal=principal,
            request=request,
            settings=self._settings,
            uploads=self._uploads,
            decoding=self._decoding,
        )
        try:
            return await handler(call)
        except requests.Malformed as error:
            submitted = await self._service.training.refuse(
                principal,
                model_id=error.model_id,
                seq_id=error.seq_id,
                operation=handler.__name__,
                message=error.message,
                poisons_gradient=error.poisons_gradient,
            )
            return error_response(error) if error.answer_at_once else submitted_response(submitted)

    # ------------------------------------------------------------------------------------------------ configuration
    async def client_config(self, call: ApiCall) -> Response:
        await call.json(requests.ClientConfigRequest)
        return json_response(CLIENT_CONFIG)

    async def client_dynamic_config(self, call: ApiCall) -> Response:
        await call.json(requests.ClientConfigRequest)
        return json_response(DYNAMIC_CONFIG)

    async def get_server_capabilities(self, call: ApiCall) -> Response:
        models = [
            {
                "model_name": facts.name,
                "max_context_length": facts.max_context_length,
                "trainable": True,
                "sampleable": True,
            }
            for facts in self._service.capabilities()
        ]
        return json_response({"supported_models": models})

    async def telemetry(self, call: ApiCall) -> Response:
        """Accepted and dropped: its events may hold request headers, the API key among them."""
        await call.drop_body(MAX_TELEMETRY_BYTES)
        return json_response({"status": "accepted"})

    async def metrics(self, call: ApiCall) -> Response:
        """Numbers of the whole server. Any key will do."""
        return Response(exposition(await self._service.stats()), media_type="text/plain; version=0.0.4")

    # ------------------------------------------------------------------------------------------------ sessions
    async def create_session(self, call: ApiCall) -> Response:
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

    async def session_heartbeat(self, call: ApiCall) -> Response:
        request = await call.json(requests.SessionHeartbeatRequest)
        await self._service.heartbeat(call.principal, request.session_id)
        return json_response({"type": "session_heartbeat"})

    async def finish_session(self, call: ApiCall) -> Response:
        request = await call.json(requests.FinishSessionRequest)
        await self._service.finish_session(
            call.principal, call.request.path_params["session_id"], reason=request.reason.type, detail=request.detail
        )
        return json_response({})

    # ------------------------------------------------------------------------------------------------ models
    async def create_model(self, call: ApiCall) -> Response:
        request = await call.json(requests.CreateModelRequest)
        submitted = await self._service.creation.create_model(
            call.principal,
            session_id=request.session_id,
            model_seq_id=request.model_seq_id,
            base_model=request.base_model,
            trainable=request.lora,
            optimizer=(request.optimizer_config or requests.OptimizerConfig()).type,
            user_metadata=request.user_metadata,
        )
        return submitted_response(submitted)

    async def get_info(self, call: ApiCall) -> Response:
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
                **_lora_fields(info.trainable),
                "optimizer_config": {"type": "adamw"},
            }
        )

    async def forward_backward(self, call: ApiCall) -> Response:
        limit = self._settings.max_body_bytes
        try:
            command, body = await call.decoded_and_kept(limit, _decode_forward_backward, call.content_encoding, limit)
        except BodyTooLarge as error:
            raise decode.unread_forward_backward(error.prefix, call.content_encoding, error.message) from None
        return submitted_response(await self._service.training.forward_backward(call.principal, command, body))

    async def optim_step(self, call: ApiCall) -> Response:
        request = await call.json(requests.OptimStepRequest)
        return submitted_response(await self._service.training.optim_step(call.principal, request.to_command()))

    # ------------------------------------------------------------------------------------------------ weights
    async def save_weights(self, call: ApiCall) -> Response:
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

    async def save_weights_for_sampler(self, call: ApiCall) -> Response:
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

    async def load_weights(self, call: ApiCall) -> Response:
        match (await call.json(requests.LoadWeightsRequest)).to_form():
            case requests.LoadIntoNewModel() as new:
                submitted = await self._service.creation.load_weights_new(
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

    async def not_served_in_order(self, call: ApiCall) -> Response:
        """Rejected at once, and its seq_id consumed: the SDK counts it, and goes on with the next."""
        request = await call.json(requests.NotServedRequest)
        message = f"POST {call.request.url.path} is not served yet"
        raise requests.Malformed(message, request.model_id, request.seq_id, answer_at_once=True)

    async def weights_info(self, call: ApiCall) -> Response:
        request = await call.json(requests.WeightsInfoRequest)
        info = await self._service.training.weights_info(call.principal, request.tinker_path)
        return json_response(
            {
                "base_model": info.base_model,
                **_lora_fields(info.trainable, layers=True),
                "optimizer_config": {"type": "adamw"},
            }
        )

    # ------------------------------------------------------------------------------------------------ sampling
    async def create_sampling_session(self, call: ApiCall) -> Response:
        request = await call.json(requests.CreateSamplingSessionRequest)
        sampling_session_id = await self._service.sampling.create_sampling_session(
            call.principal,
            session_id=request.session_id,
            sampling_session_seq_id=request.sampling_session_seq_id,
            base_model=request.base_model,
            model_path=request.model_path,
        )
        return json_response({"sampling_session_id": sampling_session_id, "type": "create_sampling_session"})

    async def get_sampler(self, call: ApiCall) -> Response:
        info = await self._service.sampling.get_sampler(call.principal, call.request.path_params["sampling_session_id"])
        return json_response(
            {"sampler_id": info.sampling_session_id, "base_model": info.base_model, "model_path": info.model_path}
        )

    async def asample(self, call: ApiCall) -> Response:
        submission = await call.decoded(
            min(requests.MAX_SAMPLE_BYTES, self._settings.max_body_bytes),
            _decode_sample,
            call.content_encoding,
            self._settings.max_sample_elements,
            call.request.headers.get(SDK_SAMPLES) == "1",
        )
        disconnected = asyncio.ensure_future(call.disconnected())
        try:
            submitted = await self._service.sampling.sample(call.principal, submission)
        finally:
            disconnected.cancel()
        if disconnected.done():
            await self._service.futures.submission_disconnected(call.principal, submitted.request_id)
        return submitted_response(submitted)

    # ------------------------------------------------------------------------------------------------ futures
    async def retrieve_future(self, call: ApiCall) -> Response:
        request = await call.json(requests.RetrieveFutureRequest)
        try:
            state = await self._polls.wait(
                self._service.futures.retrieve_future(
                    call.principal, request.request_id, timeout_s=self._settings.long_poll_s
                ),
                deadline_s=self._settings.long_poll_s + 5.0,
                disconnected=call.disconnected(),
            )
        except Disconnected:
            await self._service.futures.poll_disconnected(call.principal, request.request_id)
            return Response(status_code=499)  # which is not read
        match state:
            case types.FutureState(encoded=types.Encoded() as encoded):
                return Response(encoded.body, media_type=encoded.content_type)
            case Pending():
                return try_again_response(state)
            case _:
                reason = "the server is stopping" if self._polls.closed else "the server did not say"
                return try_again_response(Pending(request_id=request.request_id, queue_state="active", reason=reason))

    async def cancel_future(self, call: ApiCall) -> Response:
        request = await call.json(requests.CancelFutureRequest)
        await self._service.futures.cancel_future(call.principal, request.request_id)
        return json_response({"type": "cancel_future"})


def _lora_fields(trainable: types.Trainable, *, layers: bool = False) -> dict[str, Any]:
    """What the SDK has fields for; ``layers``: also for the kinds of layers that an adapter has."""
    if not isinstance(trainable, types.Lora):
        return {"is_lora": False}
    fields = {"is_lora": True, "lora_rank": trainable.rank}
    if layers:
        fields |= {name: getattr(trainable, name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return fields


async def healthz(request: Request) -> Response:
    """Liveness: the process answers."""
    return json_response({"status": "ok"})


class NotServed:
    """Whatever else lies under the prefix, by any method."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        response = json_response({"detail": f"{request.method} {request.url.path} is not served yet"}, status=404)
        await response(scope, receive, send)
