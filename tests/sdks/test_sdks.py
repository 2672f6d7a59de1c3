"""Versions of the SDK from the oldest that is served to the newest that there is, and one that is too old."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from descant.testing.server import END_S, Server, serve
from descant.testing.tiny import tiny_model
from descant.wire.requests import OLDEST_SDK

pytestmark = pytest.mark.sdks

ROOT = Path(__file__).parents[2]
SDKS = ROOT / ".venv-sdks"
VERSIONS = [*re.search(r"^SDK_VERSIONS := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split(), "newest"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("server") / "data"
    with serve(model, data_dir, "rank.device=cpu", "rank.dtype=float32") as running:
        yield running


def run(version: str, server: Server, model: str) -> dict[str, Any]:
    """What ``one_client.py`` printed with that version."""
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment |= {"PYTHONPATH": str(SDKS / "tinker" / version), "TINKER_TELEMETRY": "0", "NO_PROXY": "127.0.0.1"}
    python = SDKS / "bin" / "python"
    command = [str(python), str(Path(__file__).with_name("one_client.py")), server.url, model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * END_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    if not (SDKS / "tinker" / request.param / ".installed").exists():
        pytest.skip(f"SDK {request.param} IS NOT INSTALLED: it is not tried; `make test-sdks` installs it and tries it")
    return request.param


def test_an_sdk_trains_saves_and_samples_or_is_refused_at_once(version: str, server: Server, model: str) -> None:
    told = run(version, server, model)
    assert version in {told["version"], "newest"}
    if tuple(int(number) for number in told["version"].split(".")[:2]) < OLDEST_SDK:
        assert f'sdk_version is "{version}", expected 0.25 or newer' in told["refused"]
        assert "pip install" in told["refused"]
        return
    assert told["losses"][1] < told["losses"][0]
    assert told["path"].endswith("/weights/state")
    assert told["sampled"] == [3, 3]


def test_both_sides_of_the_oldest_version_are_tried() -> None:
    tried = {tuple(int(number) for number in version.split(".")[:2]) for version in VERSIONS if version != "newest"}
    assert OLDEST_SDK in tried
    assert (OLDEST_SDK[0], OLDEST_SDK[1] - 1) in tried
