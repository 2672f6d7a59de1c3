"""The HTTP application, and the server that runs it.

``create_app`` is what tests call in process; ``HttpServer`` is what a process runs: it ends open long polls before it
waits for them, so that a stop takes no longer than the requests that really work.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from descant.errors import Unauthorized
from descant.server.auth import Keys
from descant.server.connections import (
    LOOPBACK,
    RESERVED_FILES,
    Connection,
    ConnectionLimits,
    Connections,
    raise_open_files,
)
from descant.server.longpoll import LongPolls
from descant.server.responses import error_response, json_response
from descant.server.routes import PREFIX, Routes
from descant.server.settings import HttpSettings
from descant.service.service import Service

Report = Callable[[], Awaitable[Mapping[str, Any]]]


async def nothing_to_report() -> Mapping[str, Any]:
    return {}


def create_app(
    service: Service,
    *,
    auth: Keys,
    ready: Callable[[], str | None],
    missing: Callable[[], str | None] = lambda: None,
    report: Report = nothing_to_report,
    settings: HttpSettings | None = None,
) -> Starlette:
    """The Tinker protocol under ``/api/v1`` over ``service``, with ``/healthz`` and ``/readyz``.

    ``ready``: None when requests can be served, else what is awaited, in a sentence. ``missing``: what is missing
    though they can. ``report``: what ``/api/v1/admin/report`` answers, with any key.
    ``app.state.long_polls.close()`` answers every open long poll at once, and every later one.
    """
    polls = LongPolls()
    settings = settings or HttpSettings()
    routes = Routes(service, auth=auth, polls=polls, settings=settings)

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
        return json_response(await report())

    own = [
        Route("/readyz", readyz, methods=["GET"]),
        Route(f"{PREFIX}/admin/report", admin_report, methods=["GET"]),
    ]
    app = Starlette(routes=[*own, *routes.table()], exception_handlers={HTTPException: _http_error})
    app.state.long_polls = polls
    app.state.settings = settings
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"detail": f"{request.method} {request.url.path}: {error.detail}"}, status=error.status_code)


BACKLOG = 2048
"""Connections that may wait to be accepted; all of them may be at once, before any is looked at."""


class HttpServer(uvicorn.Server):
    """Serves an app of ``create_app`` on sockets that are bound already (``bind``): no other process can take the
    port."""

    def __init__(
        self,
        app: Starlette,
        *,
        graceful_stop_s: int = 10,
        log_level: str = "warning",
        uncounted: Sequence[str] = LOOPBACK,
    ):
        """``uncounted``: addresses and networks of which there may be any number of connections without a key, beside
        ``http.trusted_proxies``."""
        self._polls: LongPolls = app.state.long_polls
        settings: HttpSettings = app.state.settings
        open_files = raise_open_files()
        backlog = min(BACKLOG, open_files // 4)
        self._connections = Connections(
            ConnectionLimits(
                header_timeout_s=settings.header_timeout_s,
                idle_timeout_s=settings.idle_timeout_s,
                max_connections=min(settings.max_connections, max(16, open_files - backlog - RESERVED_FILES)),
                max_unauthenticated_per_address=settings.max_unauthenticated_per_address,
                uncounted=(*uncounted, *settings.trusted_proxies),
            )
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, self._connections),  # type: ignore[arg-type]  # called as the class would be
                ws="none",
                access_log=False,
                log_config=None,  # its loggers pass on to ours
                log_level=log_level,
                backlog=backlog,
                timeout_keep_alive=math.ceil(settings.idle_timeout_s),
                timeout_graceful_shutdown=graceful_stop_s,
                server_header=False,
                proxy_headers=False,
            )
        )

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 5:  # a tick is a tenth of a second
            self._connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._polls.close()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises ``OSError``.

    Its connections send at once: an answer leaves in two writes, headers and body, and by Nagle's rule the second would
    wait for the client's delayed acknowledgement, 44 ms a request (uvloop sets this by itself, asyncio does not here).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
