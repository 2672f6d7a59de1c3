"""``descant serve`` as a process of its own, for tests that go through everything."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

START_S = 300
"""Longest wait for a server to be ready."""

END_S = 180
"""Longest wait for anything else."""


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    printed: list[str]


def sent(url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> socket.socket:
    """A connection on which this POST was sent whole, and nothing has been read."""
    address, text = urlsplit(url), json.dumps(body)
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(text)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall("\r\n".join([*lines, "", text]).encode())
    return connection


@contextmanager
def serve(model: Path | str, data_dir: Path, *settings: str, cwd: Path | None = None) -> Iterator[Server]:
    """Yields when requests are served; kills the server (and with it its rank) at the end. ``settings``: ``a.b=c``.
    Its log goes to ``server.log`` beside ``data_dir``. ``cwd``: where it is started, for a ``model`` that is named from
    there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "descant.cli", "serve", str(model)]
    for setting in (f"data_dir={data_dir}", "server.port=0", *settings):
        command += ["--set", setting]
    with (data_dir.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=cwd)
    try:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:  # ends with the process, which ends with its own deadlines
            printed.append(line.strip())
            if line.strip().startswith("export TINKER_API_KEY"):
                break
        urls = [line.partition("=")[2] for line in printed if line.startswith("export TINKER_BASE_URL=")]
        assert urls, (data_dir.parent / "server.log").read_text()
        yield Server(process, urls[0], printed)
    finally:
        process.kill()
        process.wait(END_S)
