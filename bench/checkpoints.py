"""What a save costs the training beside it: the thread that computes, the steps, and how long until the disk has it.

    python bench/checkpoints.py [--device cuda] [--shape qwen3-0.6b] [--rank 32] [--adapters 64] [--tokens 16384]
        [--layers N] [--steps 10] [--rounds 5] [--directory DIR] [--json FILE]

All ways save the same tensors of the same adapters, weights and both moments under PEFT's names, in one process, in
rounds that alternate. What a way does on the thread that computes is its stall.

    ours          a copy on the device; a thread stages it to the process that writes
    before        a copy on the device, one to pageable host memory; a thread makes whole files and writes them
    dcp           torch.distributed.checkpoint.save
    dcp thread    … async_save, in a thread
    dcp process   … async_save, in a process

    blocking   one save while nothing else runs: the stall, and until it is durable (DCP does not fsync directories)
    beside     training steps of all adapters, with a save of one after each, or as soon as the one before is durable;
               against steps without                                                                        bar: ≤ 5 %
    burst      every adapter saved at once, as far as there is room for snapshots: steps until all are durable
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from workload import Tenants, device_name, load_shape

from descant.adapters.bank import AdapterBank
from descant.ckpt.peft import ExportBase
from descant.ckpt.snapshot import Snapshots
from descant.ckpt.writer import CheckpointWriter
from descant.ranks.snapshot_room import SHARE
from descant.testing.shapes import SHAPES
from descant.types import Snapshot

Wait = Callable[[], object]


class Way(Protocol):
    """``save`` is called on the thread that computes; what it returns waits until the save is durable."""

    def save(self, model_id: str, directory: Path) -> Wait: ...


class Ours:
    def __init__(self, bank: AdapterBank):
        self.writer = CheckpointWriter(bank.device)
        self.writer.start()
        self._snapshots = Snapshots(bank, base=ExportBase(name="a/base"), writer=self.writer)
        self._thread = ThreadPoolExecutor(1)
        self._num_saves = 0

    def save(self, model_id: str, directory: Path) -> Wait:
        self._num_saves += 1
        command = Snapshot(model_id=model_id, seq_id=self._num_saves, kind="training")
        ref = self._snapshots.take(command, has_pending_gradient=False)
        writing = self._thread.submit(self._snapshots.save(ref, str(directory)))
        return lambda: (writing.result(), self._snapshots.drop(ref))


class Before:
    def __init__(self, bank: AdapterBank):
        self._bank = bank
        self._thread = ThreadPoolExecutor(1)

    def save(self, model_id: str, directory: Path) -> Wait:
        held = [row.clone() for row in self._bank.state(model_id)]
        rows = [row.cpu() for row in held]
        return self._thread.submit(self._write, rows, model_id, directory).result

    def _write(self, rows: list[torch.Tensor], model_id: str, directory: Path) -> None:
        lora = self._bank[model_id].lora
        weights, *moments = (self._bank.export(row, lora) for row in rows)
        named = {f"moment{i}.{name}": tensor for i, row in enumerate(moments, 1) for name, tensor in row.items()}
        for name, tensors in (("weights", weights), ("moments", named)):
            body = safetensors.torch.save(tensors, {"format": "pt"})
            with open(directory / name, "xb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            hashlib.sha256(body).hexdigest()


class Dcp:
    def __init__(self, bank: AdapterBank, kind: AsyncCheckpointerType | None):
        self._bank, self._kind = bank, kind

    def save(self, model_id: str, directory: Path) -> Wait:
        lora = self._bank[model_id].lora
        state: dict[str, Any] = {
            f"{i}.{name}": tensor
            for i, row in enumerate(self._bank.state(model_id))
            for name, tensor in self._bank.views(row, lora).items()
        }
        if self._kind is None:
            dcp.save(state, checkpoint_id=directory)
            return lambda: None
        saving = dcp.async_save(state, checkpoint_id=directory, async_checkpointer_type=self._kind)
        assert isinstance(saving, Future)
        return saving.result


class Bench:
    def __init__(self, options: argparse.Namespace, directory: Path):
        self.options, self.directory = options, directory
        self.device = torch.device(options.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = load_shape(options.shape, self.device, dtype=dtype, layers=options.layers)
        share = options.tokens // options.adapters
        self.tenants = Tenants(self.model, [[share]] * options.adapters, ranks=[options.rank], train_unembed=False)
        self.names = [command.model_id for command in self.tenants.commands]
        bank = self.model.bank
        self.save_bytes = bank.state(self.names[0]).nbytes
        self.room = max(1, bank.adapter_bytes // SHARE // self.save_bytes)
        ours = Ours(bank)
        self.ways: Mapping[str, Way] = {
            "ours": ours,
            "before": Before(bank),
            "dcp": Dcp(bank, None),
            "dcp thread": Dcp(bank, AsyncCheckpointerType.THREAD),
            "dcp process": Dcp(bank, AsyncCheckpointerType.PROCESS),
        }
        self.close = ours.writer.close
        self._num_saves = 0

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self) -> None:
        self.tenants.packed()
        self.tenants.step()
        self.synchronize()

    def begin(self, way: Way, number: int) -> tuple[float, Callable[[], float]]:
        """Begins a save: milliseconds of the thread that computes, and of the device; what waits until it is durable
        and says how long that took since."""
        self._num_saves += 1
        directory = self.directory / str(self._num_saves)
        directory.mkdir()
        start = time.perf_counter()
        wait = way.save(self.names[number % len(self.names)], directory)
        self.synchronize()
        stall_ms = 1000 * (time.perf_counter() - start)

        def durable() -> float:
            wait()
            taken = 1000 * (time.perf_counter() - start)
            shutil.rmtree(directory)
            return taken

        return stall_ms, durable

    # ------------------------------------------------------------------------------------------------ what is measured
    def blocking(self) -> list[dict[str, object]]:
        stalls: dict[str, list[float]] = {name: [] for name in self.ways}
        durables: dict[str, list[float]] = {name: [] for name in self.ways}
        for number in range(self.options.rounds + 2):
            for name, way in self.ways.items():
                stall_ms, durable = self.begin(way, number)
                durable_ms = durable()
                if number >= 2:
                    stalls[name].append(stall_ms)
                    durables[name].append(durable_ms)
        return [
            {
                "what": "blocking",
                "way": name,
                "stall_ms": round(statistics.median(stalls[name]), 3),
                "stall_ms_max": round(max(stalls[name]), 3),
                "durable_ms": round(statistics.median(durables[name]), 1),
                "stall_of_before": round(_ratio(stalls[name], stalls["before"]), 4),
            }
            for name in self.ways
        ]

    def beside(self) -> list[dict[str, object]]:
        taken: dict[str, list[float]] = {"none": [], **{name: [] for name in self.ways}}
        stalls: dict[str, list[float]] = {name: [] for name in taken}
        for round_number in range(self.options.rounds + 1):
            for name in taken if round_number % 2 else reversed(taken):
                way, steps, waiting = self.ways.get(name), [], deque[Future[float]]()
                with ThreadPoolExecutor(1) as thread:
                    for number in range(self.options.steps):
                        start = time.perf_counter()
                        self.step()
                        if way is not None and not (waiting and not waiting[-1].done()):
                            stall_ms, durable = self.begin(way, number)
                            waiting.append(thread.submit(durable))
                            if round_number:
                                stalls[name].append(stall_ms)
                        steps.append(1000 * (time.perf_counter() - start))
                for durable_ms in waiting:
                    durable_ms.result()
                if round_number:
                    taken[name].append(statistics.fmean(steps))
        return [
            {
                "what": "beside",
                "way": name,
                "step_ms": round(statistics.median(taken[name]), 2),
                "of_none": round(_ratio(taken[name], taken["none"]), 4),
                "saves_per_step": round(len(stalls[name]) / self.options.rounds / self.options.steps, 2),
                "stall_ms": round(statistics.median(stalls[name]), 2) if stalls[name] else 0.0,
            }
            for name in taken
        ]

    def burst(self) -> list[dict[str, object]]:
        rows = []
        for name in ("ours", "before"):
            alone = []
            for _ in range(self.options.steps):
                start = time.perf_counter()
                self.step()
                alone.append(1000 * (time.perf_counter() - start))
            left, waiting, steps, began = list(range(len(self.names))), list[Future[float]](), [], time.perf_counter()
            with ThreadPoolExecutor(self.room) as threads:
                while left or waiting:
                    start = time.perf_counter()
                    waiting = [durable for durable in waiting if not durable.done()]
                    while left and len(waiting) < self.room:
                        waiting.append(threads.submit(self.begin(self.ways[name], left.pop())[1]))
                    self.step()
                    steps.append(1000 * (time.perf_counter() - start))
            rows.append(
                {
                    "what": f"burst of {len(self.names)}",
                    "way": name,
                    "steps": len(steps),
                    "step_ms": round(statistics.fmean(steps), 2),
                    "of_none": round(statistics.fmean(steps) / statistics.median(alone), 4),
                    "extra_ms": round(sum(steps) - len(steps) * statistics.median(alone), 1),
                    "durable_ms": round(1000 * (time.perf_counter() - began), 1),
                }
            )
        return rows


def _ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def _join_alone() -> None:
    """A process group of one, which DCP asks for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DCP_USE_PREFIX_STORE": "1"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a descriptor a tensor


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b" if on_gpu else "smollm2-135m")
    parser.add_argument("--layers", type=int, default=None if on_gpu else 4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=64 if on_gpu else 2)
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else 256, help="of a step, of all adapters")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to write to")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    _join_alone()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        bench = Bench(options, Path(directory))
        for _ in range(3):
            bench.step()
        rows = []
        head = {"device": device_name(bench.device), "shape": options.shape, "save_mib": bench.save_bytes >> 20}
        print(json.dumps(head), flush=True)
        for measure in (bench.blocking, bench.beside, bench.burst):
            for row in measure():
                rows.append({**head, "rank": options.rank, "adapters": options.adapters, **row})
                print(json.dumps(row), flush=True)
        if options.json is not None:
            options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
        bench.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
