"""An S3 server on loopback, in a process of its own, and a proxy before it that can be slow, or refuse.

with s3_server() as url, Proxy(url) as proxy:
    ...                               # AWS_ENDPOINT_URL=proxy.url
    proxy.answers(503)
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

BUCKET = "bucket"
PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until whoever started it is gone
server.stop()
"""
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@contextmanager
def s3_server() -> Iterator[str]:
    """Its URL; there is a bucket ``BUCKET`` in it. In memory."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        word, _, port = next((line for line in process.stdout if line.startswith(b"port ")), b"").partition(b" ")
        assert word == b"port", "the S3 server ended before it said its port"
        url = f"http://127.0.0.1:{int(port)}"
        make = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(make, timeout=30).close()
        yield url
    finally:
        process.communicate(timeout=30)


class Proxy:
    """Sends requests on, and answers of its own where it was told to. What it was asked is in ``requests``."""

    def __init__(self, target: str):
        self.requests: list[str] = []
        self._target = urlsplit(target).netloc
        self._status: int | None = None
        self._methods: tuple[str, ...] = ()
        self._stuck = False
        self._go_on = threading.Event()
        self._lost: tuple[str, str] | None = None
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._serve(self)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._server.shutdown()
        self._server.server_close()

    def answers(self, status: int, *methods: str) -> None:
        """To requests with these methods (all), instead of sending them on."""
        self._status, self._methods = status, methods

    def is_silent(self) -> None:
        """To everybody, until ``sends_on``."""
        self._go_on.clear()
        self._stuck = True

    def loses_answer(self, method: str, path: str) -> None:
        """Of the next request with this method to a path with this in it: it is sent on, and 503 is answered, to it and
        to its repetitions until ``sends_on``."""
        self._lost = (method, path)

    def sends_on(self) -> None:
        self._status, self._stuck, self._lost = None, False, None
        self._go_on.set()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.requests.append(f"{handler.command} {handler.path}")
        if self._stuck:
            self._go_on.wait(60)
            handler.close_connection = True
            return
        status, answer, headers = 0, b"", [("Content-Length", "0")]
        refused = self._status is not None and (not self._methods or handler.command in self._methods)
        if not refused:
            connection = http.client.HTTPConnection(self._target, timeout=30)
            connection.request(handler.command, handler.path, body, dict(handler.headers))
            response = connection.getresponse()
            status, answer = response.status, response.read()
            headers = [(k, v) for k, v in response.getheaders() if k.lower() not in ("transfer-encoding", "connection")]
            connection.close()
            if self._lost is not None and handler.command == self._lost[0] and self._lost[1] in handler.path:
                self._status, self._methods, refused = 503, (self._lost[0],), True
        if refused:
            status, answer, headers = self._status or 503, b"", [("Content-Length", "0")]
        handler.send_response(status)
        for name, value in headers:
            if name.lower() not in ("date", "server"):
                handler.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer)
