"""``descant doctor`` on a real server whose replica of two ranks loses one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from descant.doctor import ServerReport
from descant.testing.server import END_S, START_S, Server, serve
from descant.testing.tiny import tiny_model

pytestmark = pytest.mark.crashes

KEY = "tml-a-key-of-alice"


def doctor(*args: str, key: str = KEY) -> tuple[int, str]:
    command = [sys.executable, "-m", "descant.cli", "doctor", *args]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=END_S, env={**os.environ, "TINKER_API_KEY": key}
    )
    return done.returncode, done.stdout + done.stderr


def report(server: Server) -> ServerReport:
    request = urllib.request.Request(f"{server.url}/api/v1/admin/report", headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request, timeout=END_S) as answer:
        return ServerReport.from_json(json.load(answer))


def test_a_rank_is_lost(tmp_path: Path) -> None:
    model, data = tiny_model("llama", tmp_path / "model"), tmp_path / "data"
    with serve(model, data, "parallel.data_parallel_size=2", f"auth.keys.alice={KEY}") as server:
        code, text = doctor("--url", server.url)
        assert code == 0, text
        assert f"{model}: serving on cpu\n" in text
        assert text.endswith("nothing is wrong\n")
        pids = report(server).replicas[0].health.pids
        assert all(f"rank {rank}: process {pid}\n" in text for rank, pid in enumerate(pids))
        assert doctor("--url", server.url, key="tml-somebody-else")[0] == 2
        assert doctor("--data-dir", str(data)) == (0, f"no failure is recorded in {data}\n")

        os.kill(pids[1], signal.SIGKILL)
        deadline = time.monotonic() + START_S
        while not (wrong := report(server).wrong()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert wrong[0] in (f"{model} is down", f"{model} is starting")
        while report(server).wrong():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        code, text = doctor("--url", server.url)
        assert code == 0, text
        assert f"rank 1 of {model} (process {pids[1]}) was killed by SIGKILL" in text
        assert "rank 1: dead, " in text, "the coordinator's table"
        assert "its last lines" not in text, "anybody with a key may ask"

    code, text = doctor("--data-dir", str(data))
    assert code == 1
    assert f"rank 1 of {model} (process {pids[1]}) was killed by SIGKILL" in text
    assert "rank 1: dead, " in text
    assert "its last lines" in text
    code, text = doctor("--url", server.url)
    assert code == 1
    assert "no server answers at" in text
