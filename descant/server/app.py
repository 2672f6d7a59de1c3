"""The HTTP application, and the server that runs it.

``create_app`` is what tests call in process; ``HttpServer`` is what a process runs: it ends open long polls before it
waits for them, so that a stop takes no longer than the requests that really work.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from descant.errors import Unauthorized
from descant.server.auth import Keys
from descant.server.longpoll import LongPolls
from descant.server.responses import error_response, json_response
from descant.server.routes import PREFIX, Routes, ServerSettings
from descant.service.service import Service


def create_app(
    service: Service,
    *,
    auth: Keys,
    ready: Callable[[], str | None],
    missing: Callable[[], str | None] = lambda: None,
    report: Callable[[], Mapping[str, Any]] = dict,
    settings: ServerSettings | None = None,
) -> Starlette:
    """The Tinker protocol under ``/api/v1`` over ``service``, with ``/healthz`` and ``/readyz``.

    ``ready``: None when requests can be served, else what is awaited, in a sentence. ``missing``: what is missing
    though they can. ``report``: what ``/api/v1/admin/report`` answers, to anybody with a key.
    ``app.state.long_polls.close()`` answers every open long poll at once, and every later one.
    """
    polls = LongPolls()
    routes = Routes(service, auth=auth, polls=polls, settings=settings or ServerSettings())

    async def readyz(request: Request) -> Response:
        reason = ready()
        if reason is None:
            lacking = missing()
            return json_response({"status": "ready"} if lacking is None else {"status": "ready", "missing": lacking})
        return json_response({"status": "not ready", "reason": reason}, status=503)

    async def admin_report(request: Request) -> Response:
        try:
            auth.principal(request.headers)
        except Unauthorized as error:
            return error_response(error)
        return json_response(report())

    own = [
        Route("/readyz", readyz, methods=["GET"]),
        Route(f"{PREFIX}/admin/report", admin_report, methods=["GET"]),
    ]
    app = Starlette(routes=[*own, *routes.table()], exception_handlers={HTTPException: _http_error})
    app.state.long_polls = polls
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"detail": f"{request.method} {request.url.path}: {error.detail}"}, status=error.status_code)


class HttpServer(uvicorn.Server):
    """Serves an app of ``create_app`` on sockets that are bound already (``bind``): nobody else can take the port."""

    def __init__(self, app: Starlette, *, graceful_stop_s: int = 10, log_level: str = "warning"):
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                access_log=False,
                log_level=log_level,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=graceful_stop_s,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._polls: LongPolls = app.state.long_polls

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._polls.close()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises ``OSError``.

    Its connections send at once: an answer leaves in two writes, headers and body, and by Nagle's rule the second would
    wait for the client's delayed acknowledgement, 44 ms a request (uvloop sets this by itself, asyncio does not here).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
