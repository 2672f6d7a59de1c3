"""What the server adds to a training step: HTTP, order, durable futures, the way to the rank and back.

    python bench/overhead.py [--steps 200] [--sequences 4] [--length 512] [--profile FILE] [--json FILE]

A step is ``forward_backward`` and ``optim_step`` submitted together, through the SDK, to servers in processes of their
own whose trainer computes nothing; steps alternate between them. A step waits for one synchronised write at least (what
is acknowledged is on disk), so that its time is printed beside:

    floor    speaks the protocol and answers at once: the SDK's own time
    service  the whole server over a trainer in its process that answers at once
    rank     the same over a rank's process, with its turn loop      bar: ≤ 8 ms more than the floor (3 ms beside a GPU)

``added`` is the median of the rounds' differences to the floor, and their 95th percentile. ``--profile`` writes what
the server of ``rank`` spends its time on.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import uvicorn
import uvloop
from tinker import types as sdk

from descant.app import serving, url
from descant.config import Settings
from descant.ranks.ops import Microbatch, Operation, Outcome, Rows
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSettings, RankSpec, ReplicaSettings, SampleSettings
from descant.server.app import bind
from descant.service.backends import Backend
from descant.testing.fakes import FakeEngine, FakeTrainer, FakeWorld
from descant.types import Command, ForwardBackward, ForwardBackwardOutput, OptimStep, OptimStepOutput, Result
from descant.wire.encode import encode

KINDS = ("floor", "service", "rank")


def output_of(command: ForwardBackward) -> ForwardBackwardOutput:
    """Of the size of a real one."""
    outputs = [
        {"logprobs": np.zeros(datum.loss_fn_inputs["target_tokens"].shape, np.float32)} for datum in command.data
    ]
    metrics = {"loss:sum": 1.0, "tokens:sum": 1.0, "microbatches:sum": 1.0, "compute_ms:sum": 1.0}
    return ForwardBackwardOutput(loss_fn_outputs=tuple(outputs), metrics=metrics)


# --------------------------------------------------------------------------------------------------------------------
# The servers


def floor_app(sequences: int, length: int) -> Callable[..., Awaitable[None]]:
    step = encode(OptimStepOutput(metrics={"grad_norm:mean": 1.0}))
    logprobs = tuple({"logprobs": np.zeros(length, np.float32)} for _ in range(sequences))
    backward = encode(ForwardBackwardOutput(loss_fn_outputs=logprobs, metrics={"loss:sum": 1.0}))
    answers: dict[str, dict[str, Any]] = {
        "client/config": {"create_model_via_load_weights": True},
        "client/dynamic_config": {"refresh_interval_sec": 300},
        "get_server_capabilities": {"supported_models": [{"model_name": "base"}]},
        "create_session": {"session_id": "s", "type": "create_session"},
        "create_model": {"request_id": "create", "model_id": "s:train:0"},
        "get_info": {
            "type": "get_info",
            "model_id": "s:train:0",
            "model_data": {"arch": "", "model_name": "base", "tokenizer_id": "base"},
            "model_name": "base",
            "is_lora": True,
            "lora_rank": 8,
        },
        "forward_backward": {"request_id": "backward", "model_id": "s:train:0"},
        "optim_step": {"request_id": "step", "model_id": "s:train:0"},
    }
    bodies = {path: json.dumps(answer).encode() for path, answer in answers.items()}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"].removeprefix("/api/v1/")
        content_type, answer = "application/json", bodies.get(path, b"{}")
        if path == "retrieve_future":
            match json.loads(body)["request_id"]:
                case "backward":
                    content_type, answer = backward.content_type, backward.body
                case "step":
                    answer = step.body
                case _:
                    answer = b'{"model_id": "s:train:0", "type": "create_model"}'
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


class AtOnce(FakeTrainer):
    def submit(self, command: Command) -> asyncio.Future[Result]:
        match command:
            case ForwardBackward():
                result: Result = output_of(command)
            case OptimStep():
                result = OptimStepOutput(metrics={"grad_norm:mean": 1.0})
            case _:
                return super().submit(command)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        future.set_result(result)
        return future


def build(spec: RankSpec, *rest: Any) -> Any:
    """A rank on a tiny model whose passes and steps compute nothing."""
    from descant.testing.executor import Around
    from descant.testing.ranks import build_tiny

    class Hollow(Around):
        opened: dict[tuple[str, int], ForwardBackward] = {}  # noqa: RUF012

        def execute(self, op: Operation[Any]) -> Any:
            match op:
                case Microbatch():
                    self.opened.update({(command.model_id, command.seq_id): command for command in op.opens})
                    return [Outcome(key=key, result=output_of(self.opened.pop(key))) for key in op.closes]
                case Rows(commands=commands) if all(isinstance(command, OptimStep) for command in commands):
                    result = OptimStepOutput(metrics={"grad_norm:mean": 1.0})
                    return [Outcome(key=(command.model_id, command.seq_id), result=result) for command in commands]
                case _:
                    return super().execute(op)

    return Hollow(build_tiny(spec, *rest))


async def serve(kind: str, directory: Path, options: argparse.Namespace) -> None:
    listener = bind("127.0.0.1", 0)
    if kind == "floor":
        config = uvicorn.Config(
            floor_app(options.sequences, options.length), http="httptools", access_log=False, log_level="warning"
        )
        print(url(listener), flush=True)
        await uvicorn.Server(config).serve([listener])
        return
    settings = Settings(data_dir=directory / kind)
    world = FakeWorld()
    if kind == "service":
        backend = Backend(facts=world.facts, trainer=AtOnce(world), engine=FakeEngine(world))
    else:
        from descant.testing.tiny import tiny_model

        replica_settings = ReplicaSettings(
            rank=RankSettings(device="cpu", dtype="float32", num_threads=1),
            sample=SampleSettings(max_num_seqs=1, kv_cache_bytes=1 << 20),
        )
        spec = RankSpec(
            model=str(tiny_model("llama", directory / "tiny")),
            settings=replica_settings,
            build="overhead:build",
            env={"PYTHONPATH": str(Path(__file__).parent)},
        )
        replica = await Replica.start(spec)
        backend = Backend(facts=replica.facts, trainer=replica, engine=replica)
    profiler = cProfile.Profile() if options.profile is not None and kind == "rank" else None
    async with serving(settings, [backend], listener):
        print(url(listener), flush=True)
        if profiler is not None:
            profiler.enable()
        # Until the script that started us closes our input.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        if profiler is not None:
            profiler.disable()
            with options.profile.open("w") as file:
                pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(60)


# --------------------------------------------------------------------------------------------------------------------
# The client


class Client:
    def __init__(self, address: str, options: argparse.Namespace):
        service = tinker.ServiceClient(base_url=address, api_key="tml-bench")
        base = service.get_server_capabilities().supported_models[0].model_name
        assert base is not None
        self.training = service.create_lora_training_client(base, rank=8).result()
        random = np.random.default_rng(0)
        self.data = []
        for _ in range(options.sequences):
            stream = random.integers(0, 200, options.length + 1)
            arrays = {"target_tokens": stream[1:].astype(np.int64), "weights": np.ones(options.length, np.float32)}
            self.data.append(
                sdk.Datum(
                    model_input=sdk.ModelInput.from_ints(stream[:-1].tolist()),
                    loss_fn_inputs={name: sdk.TensorData.from_numpy(array) for name, array in arrays.items()},
                )
            )

    def step(self) -> float:
        """Milliseconds."""
        began = time.perf_counter()
        backward = self.training.forward_backward(self.data, "cross_entropy")
        update = self.training.optim_step(sdk.AdamParams(learning_rate=1e-4))
        backward.result()
        update.result()
        return 1000 * (time.perf_counter() - began)


def sync_ms(directory: Path) -> float:
    taken = []
    with (directory / "synchronised").open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--directory", type=Path, help="for the servers' data; on tmpfs a commit costs no disk's time")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "DIRECTORY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options.serve[0], Path(options.serve[1]), options))
        return
    os.environ["TINKER_TELEMETRY"] = "0"
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, ExitStack() as stack:
        clients = {}
        for kind in KINDS:
            command = [sys.executable, __file__, *sys.argv[1:], "--serve", kind, directory]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate if kind == "floor" else process.stdin.close)  # type: ignore[union-attr]
            assert process.stdout is not None
            clients[kind] = Client(process.stdout.readline().strip(), options)
        for _ in range(10):
            for client in clients.values():
                client.step()
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.steps):
            for kind, client in clients.items():
                taken[kind].append(client.step())
        print(f"a synchronised write takes {sync_ms(Path(directory)):.2f} ms there", flush=True)
    rows = []
    for kind in KINDS:
        added = [one - floor for one, floor in zip(taken[kind], taken["floor"])]
        row = {
            "id": f"overhead {kind}",
            "step_ms": statistics.median(taken[kind]),
            "p95": float(np.percentile(taken[kind], 95)),
        }
        rows.append({**row, "added_ms": statistics.median(added), "added_p95": float(np.percentile(added, 95))})
        print(
            json.dumps({name: round(v, 2) if isinstance(v, float) else v for name, v in rows[-1].items()}), flush=True
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
