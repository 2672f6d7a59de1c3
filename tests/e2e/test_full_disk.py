"""A data directory on a small disk that fills up under a real server, and has room again. Needs to mount a tmpfs."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from descant.testing.server import END_S, serve
from descant.testing.tiny import tiny_model

pytestmark = pytest.mark.crashes

FULL = "the data directory is full"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        warnings.warn(f"NOT TESTED: a full disk under a real server ({mount.stderr.strip()})", stacklevel=1)
        pytest.skip(f"a tmpfs cannot be mounted here: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> None:
    """To the last byte."""
    file = os.open(disk / "fill", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while os.write(file, bytes(size)):
                    pass
            except OSError:
                continue
    finally:
        os.close(file)


def readiness(url: str) -> str:
    try:
        with urllib.request.urlopen(url + "/readyz", timeout=END_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        status = error.code
        reason = str(json.load(error)["reason"])
    assert status == 503
    return reason


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_full_disk_is_told_at_once_and_nothing_is_lost(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model = tiny_model("llama", tmp_path / "model")
    tokens = np.arange(10, 20)
    batch = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(tokens[1:].astype(np.int64))},
        )
    ]
    prompt, greedy = types.ModelInput.from_ints([10, 11, 12]), types.SamplingParams(max_tokens=3, temperature=0.0)

    def step(client: tinker.TrainingClient) -> None:
        client.forward_backward(batch, "cross_entropy").result(timeout=END_S)
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=END_S)

    def create(key: str) -> tinker.TrainingClient:
        service = tinker.ServiceClient(base_url=server.url, api_key=key)
        return service.create_lora_training_client(str(model), rank=4, seed=0).result(timeout=END_S)

    with serve(model, disk / "data") as server:
        client = create("tml-test-key-1")
        step(client)
        kept = client.save_state("kept").result(timeout=END_S).path
        sampler = client.save_weights_and_get_sampling_client().result(timeout=END_S)

        fill(disk)
        until(lambda: FULL in readiness(server.url))
        step(client)  # in the reserve
        assert len(sampler.sample(prompt, 1, greedy).result(timeout=END_S).sequences) == 1
        with pytest.raises(tinker.RequestFailedError, match=FULL):
            client.save_state("lost").result(timeout=END_S)
        with pytest.raises(tinker.BadRequestError, match=FULL):
            create("tml-test-key-2")

        until(lambda: bool(fill(disk)) or not (disk / "data" / "reserve").exists())
        refused = None
        for _ in range(10_000):  # until the database has used up what it had
            fill(disk)
            try:
                step(client)
            except (tinker.BadRequestError, tinker.RequestFailedError) as error:
                refused = error
                break
        assert FULL in str(refused)
        assert "cannot be written" not in readiness(server.url)
        assert FULL in readiness(server.url)

        (disk / "fill").unlink()
        until(lambda: "ready" in readiness(server.url) and FULL not in readiness(server.url))
        try:
            step(client)
        except tinker.RequestFailedError as error:  # what was refused had a gradient, and is named once
            assert FULL in str(error)  # noqa: PT017
            step(client)
        assert client.save_state("after").result(timeout=END_S).path != kept
        create("tml-test-key-2")
        assert (disk / "data" / "reserve").exists()
        assert (disk / "data").stat().st_mode & 0o777 == 0o700
    log = (disk / "server.log").read_text()
    assert "Traceback" not in log
