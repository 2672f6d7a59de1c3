"""``python -m descant.testing.crash``: a server is killed again and again under clients that train, save and sample.

    python -m descant.testing.crash [--kills N | --minutes M] [--seed S] [--clients C] [--directory DIR]

Starts ``descant serve`` on a tiny model, and clients of the ``tinker`` SDK that do not know what happens. Ranks and the
server itself are ended with SIGKILL at random times; the server is started again on the same port and directory. At
the end every client's weights and optimiser state are compared, bit for bit, with those of a client that did the same
undisturbed, every checkpoint is loaded, and no client may have seen an error. The last line says

    kills=12 acknowledged=340 lost=0 errors=0

and the exit status is 1 where something was lost or went wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tinker
from tinker import types

from descant.ckpt.store import CheckpointDirectory
from descant.service.names import parse_path
from descant.testing.tiny import VOCAB_SIZE, tiny_model

READY_S = 240.0
END_S = 300.0
"""Longest wait for one answer: two restarts and two recoveries, on a busy machine."""

KEY = "tml-crash-test"
RANK = 8

SETTINGS = (
    "service.snapshot_commands=30",  # so that recoveries begin at the start, at a first and at later snapshots
    "service.snapshot_work_s=3",
    "server.graceful_stop_s=1",
)


class CrashingServer:
    """``descant serve`` in a process, on one port and one directory through all its lives."""

    def __init__(self, model: Path, directory: Path, *settings: str, snapshots: bool = True):
        """``snapshots``: automatic ones are taken often."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_dir = directory / "data"
        self._log = directory / "server.log"
        self._command = [sys.executable, "-m", "descant.cli", "serve", str(model)]
        for setting in (
            f"data_dir={self.data_dir}",
            f"server.port={self.port}",
            *(SETTINGS if snapshots else ()),
            *settings,
        ):
            self._command += ["--set", setting]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._is_ready():
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the server ended by itself, see {self._log}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server was not ready in {READY_S:g} s, see {self._log}")
            time.sleep(0.1)

    def wait_until_recovered(self) -> None:
        """Until every model is there again: who kills faster than that keeps everybody waiting."""
        deadline = time.monotonic() + READY_S
        while self.metrics().get("descant_models_recovering", 0.0) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/readyz", timeout=5.0) as answer:
                return b'"ready"' in answer.read() and bool(self.ranks())
        except (OSError, urllib.error.URLError):
            return False

    def ranks(self) -> list[int]:
        if self._process is None:
            return []
        try:
            children = psutil.Process(self._process.pid).children()
            return sorted(child.pid for child in children if any("rank_main" in word for word in child.cmdline()))
        except psutil.Error:
            return []

    def metrics(self) -> Mapping[str, float]:
        """Those about recoveries, over all bases."""
        request = urllib.request.Request(f"{self.url}/metrics", headers={"X-API-Key": KEY})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        found: dict[str, float] = {}
        with opener.open(request, timeout=30.0) as answer:
            for line in answer.read().decode().splitlines():
                name, _, value = line.partition("{")
                if name.startswith("descant_") and value:
                    found[name] = found.get(name, 0.0) + float(value.rpartition(" ")[2])
        return found

    def kill_rank(self, chance: random.Random) -> bool:
        ranks = self.ranks()
        if not ranks:
            return False
        try:
            os.kill(chance.choice(ranks), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """The server, whose ranks end with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30.0)


@dataclass
class Diary:
    """What one client did and saw."""

    number: int
    acknowledged: int = 0
    """Optimiser steps."""
    losses: list[float] = field(default_factory=list)
    sampled: list[tuple[int, ...]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    final: str = ""
    errors: list[str] = field(default_factory=list)


def client(url: str, model: str, diary: Diary, seed: int, goes_on: Callable[[Diary], bool]) -> None:
    """Trains with a batch that is its own at every step, and saves and samples now and then, until it is told to end.
    The same ``number`` and ``seed`` do the same."""
    try:
        with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
            training = service.create_lora_training_client(model, rank=RANK, seed=diary.number).result(timeout=END_S)
            step = 0
            while goes_on(diary):
                take_step(training, diary, np.random.default_rng([seed, diary.number, step]), step)
                step += 1
            diary.final = training.save_state("final").result(timeout=END_S).path
    except Exception:
        diary.errors.append(traceback.format_exc())


def take_step(training: tinker.TrainingClient, diary: Diary, chance: np.random.Generator, step: int) -> None:
    """Step 0 neither samples nor saves."""
    sent = [training.forward_backward(batch(chance), "cross_entropy") for _ in range(1 + step % 2)]
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-3 * (1 + step % 3)))
    diary.losses += [one.result(timeout=END_S).metrics["loss:sum"] for one in sent]
    stepped.result(timeout=END_S)
    diary.acknowledged += 1
    if step % 3 == 1:
        sampler = training.save_weights_and_get_sampling_client().result(timeout=END_S)
        prompt = types.ModelInput.from_ints(chance.integers(5, VOCAB_SIZE, 4).tolist())
        greedy = types.SamplingParams(max_tokens=12, temperature=0.0)
        for sequence in sampler.sample(prompt, 2, greedy).result(timeout=END_S).sequences:
            diary.sampled.append(tuple(sequence.tokens))
    if step % 7 == 3:
        diary.paths.append(training.save_state(f"step-{step}").result(timeout=END_S).path)


def batch(chance: np.random.Generator) -> list[types.Datum]:
    data = []
    for length in chance.integers(4, 40, int(chance.integers(1, 4))).tolist():
        tokens = chance.integers(5, VOCAB_SIZE, length + 1)
        inputs = {
            "target_tokens": types.TensorData.from_numpy(tokens[1:].astype(np.int64)),
            "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return data


@dataclass(frozen=True, kw_only=True)
class CrashOutcome:
    kills: int
    acknowledged: int
    lost: int
    errors: int

    def __str__(self) -> str:
        return f"kills={self.kills} acknowledged={self.acknowledged} lost={self.lost} errors={self.errors}"


def run(
    directory: Path, *, kills: int | None, minutes: float | None, seed: int, num_clients: int, settings: tuple[str, ...]
) -> CrashOutcome:
    """``kills`` or ``minutes``: how long. Prints what happens."""
    os.environ["TINKER_TELEMETRY"] = "0"
    model = tiny_model("llama", directory / "llama")
    server = CrashingServer(model, directory, *settings)
    diaries = [Diary(number) for number in range(num_clients)]
    over = threading.Event()
    try:
        server.start()
        server.wait_until_ready()
        threads = [
            threading.Thread(
                target=client, args=(server.url, str(model), diary, seed, lambda _: not over.is_set()), daemon=True
            )
            for diary in diaries
        ]
        for thread in threads:
            thread.start()
        num_kills = _kill(server, threads, kills=kills, minutes=minutes, chance=random.Random(seed))
        over.set()
        _join(threads, diaries)
        replayed = {name: value for name, value in server.metrics().items() if "repl" in name or "recover" in name}
        print("since the last start of the server:", replayed, flush=True)
        lost = sum(_check(server, str(model), diary, seed) for diary in diaries)
    finally:
        over.set()
        server.kill()
    for diary in diaries:
        for error in diary.errors:
            print(f"client {diary.number}: {error}", flush=True)
    return CrashOutcome(
        kills=num_kills,
        acknowledged=sum(diary.acknowledged for diary in diaries),
        lost=lost,
        errors=sum(len(diary.errors) for diary in diaries),
    )


def _kill(
    server: CrashingServer,
    threads: list[threading.Thread],
    *,
    kills: int | None,
    minutes: float | None,
    chance: random.Random,
) -> int:
    """Until it was often or long enough, or a client has ended, which no client should; how often."""
    began, num_kills = time.monotonic(), 0

    def goes_on() -> bool:
        if not all(thread.is_alive() for thread in threads):
            return False
        return num_kills < kills if kills is not None else time.monotonic() - began < 60.0 * (minutes or 1.0)

    while goes_on():
        if chance.random() < 0.6:  # else a recovery may be hit
            server.wait_until_recovered()
        time.sleep(chance.uniform(0.3, 4.0))
        if chance.random() < 0.5:
            if not server.kill_rank(chance):
                continue
            what = "a rank"
            time.sleep(1.0)  # until it is noticed
        else:
            server.kill()
            server.start()
            what = "the server"
        num_kills += 1
        server.wait_until_ready()
        print(f"{time.monotonic() - began:.0f} s: kill {num_kills}, {what}; it serves again", flush=True)
    return num_kills


def _join(threads: list[threading.Thread], diaries: list[Diary]) -> None:
    deadline = time.monotonic() + END_S
    for thread, diary in zip(threads, diaries):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            diary.errors.append(f"it did not come to its end within {END_S:g} s")


def _check(server: CrashingServer, model: str, diary: Diary, seed: int) -> int:
    """How many acknowledged steps are not in the client's weights; errors go to its diary."""
    if not diary.final:  # it ended with an error, and there is nothing to compare
        return 0
    same = Diary(diary.number)
    client(server.url, model, same, seed, lambda same: same.acknowledged < diary.acknowledged)
    diary.errors += [f"undisturbed: {error}" for error in same.errors]
    if same.losses != diary.losses:
        diary.errors.append("its losses are not those of a client that was not disturbed")
    if same.sampled != diary.sampled:
        diary.errors.append("what it sampled is not what a client sampled that was not disturbed")
    lost = diary.acknowledged
    if same.final:
        files = [_files(server, path) for path in (diary.final, same.final)]
        if files[0][1:] == files[1][1:]:
            lost = max(0, diary.acknowledged - files[0][0])
    diary.errors += _load(server, [*diary.paths, diary.final])
    steps = f"{diary.acknowledged} steps, {len(diary.paths) + 1} checkpoints, {len(diary.sampled)} samples"
    print(f"client {diary.number}: {steps}, {lost} steps lost, {len(diary.errors)} errors", flush=True)
    return lost


def _files(server: CrashingServer, path: str) -> tuple[Any, ...]:
    """The step, and the contents of a checkpoint's files."""
    checkpoint = CheckpointDirectory(server.data_dir / "checkpoints", beside=True).open(parse_path(path))
    manifest, place = checkpoint.manifest, Path(checkpoint.directory)
    return manifest.step, *((name, (place / name).read_bytes()) for name in sorted(manifest.files))


def _load(server: CrashingServer, paths: list[str]) -> list[str]:
    errors = []
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        for path in paths:
            try:
                service.create_training_client_from_state_with_optimizer(path).result(timeout=END_S)
            except Exception:
                errors.append(f"{path} does not load: {traceback.format_exc()}")
    return errors


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m descant.testing.crash", description=__doc__.splitlines()[0])
    long = parser.add_mutually_exclusive_group()
    long.add_argument("--kills", type=int, help="so many (10)")
    long.add_argument("--minutes", type=float, help="or for so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where all is kept; a temporary one is removed")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="a setting of the server")
    given = parser.parse_args(arguments)
    kills = given.kills if given.kills is not None or given.minutes is not None else 10
    with tempfile.TemporaryDirectory(prefix="descant-crash-") as temporary:
        outcome = run(
            given.directory or Path(temporary),
            kills=kills,
            minutes=given.minutes,
            seed=given.seed,
            num_clients=given.clients,
            settings=tuple(given.set),
        )
    print(outcome)
    return 1 if outcome.lost or outcome.errors else 0


if __name__ == "__main__":
    sys.exit(main())
