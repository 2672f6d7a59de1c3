"""The same faults under plain torch, its DETAIL mode, ``monitored_barrier``, and the mesh: who finds them, and when.

``python -m tests.distributed.side_by_side`` prints the table of ``docs/distributed.md``. Gloo, on this machine's CPU.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from descant.distributed.mesh import Mesh
from descant.testing.gloo import RankContext, run_ranks

METHODS = ("plain torch", "DETAIL", "monitored_barrier", "descant")
FAULTS = ("killed", "stopped", "raises", "skips a call", "swaps two calls", "other root")
TIMEOUT_S = 5.0
"""Of each method's own. Torch's default is 30 minutes on gloo and 10 on NCCL."""
FAILED_RANK = 1


class Tools:
    """One method's all_reduce, broadcast and barrier. ``monitored_barrier`` is given one before each collective."""

    def __init__(self, method: str, context: RankContext, path: str, mesh: Mesh | None):
        self.mesh, self.method = mesh, method
        if mesh is None:
            if method == "DETAIL":
                dist.set_debug_level(dist.DebugLevel.DETAIL)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{path}/store",
                rank=context.rank,
                world_size=context.world,
                timeout=timedelta(seconds=TIMEOUT_S),
            )

    def all_reduce(self, tensor: torch.Tensor, tag: str) -> None:
        if self.mesh is not None:
            self.mesh.groups["all"].all_reduce(tensor, tag=tag)
        else:
            self._before(tag)
            dist.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, tag: str) -> None:
        if self.mesh is not None:
            self.mesh.groups["all"].broadcast(tensor, root=root, tag=tag)
        else:
            self._before(tag)
            dist.broadcast(tensor, root)

    def _before(self, tag: str) -> None:
        if self.method == "monitored_barrier":
            self.barrier(tag)

    def barrier(self, name: str) -> None:
        if self.mesh is not None:
            self.mesh.member.barrier(name, deadline_s=TIMEOUT_S)
        elif self.method == "monitored_barrier":
            dist.monitored_barrier(timeout=timedelta(seconds=TIMEOUT_S), wait_all_ranks=True)
        else:
            dist.barrier()


def with_tools(context: RankContext, method: str, path: str, run: Callable[[Tools], Any]) -> Any:
    if method != "descant":
        return run(Tools(method, context, path, None))
    with context.join() as member:
        mesh = Mesh.create(member, {"all": range(context.world)}, deadline_s=TIMEOUT_S)
        with member.scope("step", 7):
            return run(Tools(method, context, path, mesh))


def faulty(context: RankContext, method: str, fault: str, path: str) -> Any:
    def run(tools: Tools) -> list[float]:
        odd = context.rank == FAILED_RANK
        a, b = torch.full((4,), 1.0), torch.full((4,), 2.0)
        tools.barrier("start")
        context.mark("fault")
        match fault:
            case "killed" if odd:
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped" if odd:
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raises" if odd:
                raise ValueError("only here")
            case "swaps two calls" if odd:
                tools.all_reduce(b, "b")
                tools.all_reduce(a, "a")
            case "other root":
                tools.broadcast(a, context.rank if odd else 0, "a")
            case "skips a call" if odd:
                pass
            case _:
                tools.all_reduce(a, "a")
                tools.all_reduce(b, "b")
        tools.barrier("end")
        return [float(a[0]), float(b[0])]

    return with_tools(context, method, path, run)


def healthy(context: RankContext, method: str, path: str) -> dict[str, float]:
    def run(tools: Tools) -> dict[str, float]:
        tensor = torch.zeros(4)

        def per_call(call: Callable[[], None]) -> float:
            batches = []
            for _ in range(15):
                began = time.perf_counter()
                for _ in range(40):
                    call()
                batches.append((time.perf_counter() - began) / 40 * 1e6)
            return min(batches)  # the machine is shared

        return {
            "barrier": per_call(lambda: tools.barrier("b")),
            "all_reduce": per_call(lambda: tools.all_reduce(tensor, "t")),
        }

    return with_tools(context, method, path, run)


def detection(method: str, fault: str) -> str:
    with tempfile.TemporaryDirectory() as path:
        run = run_ranks(faulty, 3, method, fault, path, limit_s=TIMEOUT_S + 8)
    gone = {FAILED_RANK} if fault in ("killed", "stopped", "raises") else set()
    ends = [(o.at, str(o.failure or o.error or "")) for rank, o in enumerate(run.outcomes) if rank not in gone]
    if any(at is None for at, _ in ends):
        return "**never**" if run.leaked else "process dies"
    unharmed = sum(not text for _, text in ends)
    took = max(at or 0.0 for at, text in ends if text or unharmed < len(ends)) if unharmed < len(ends) else 0.0
    if unharmed == len(ends):
        return "**silent**, wrong data"
    last_lines = [text.strip().splitlines()[-1] for _, text in ends if text]
    named = sum(bool(re.search(rf"(?i)ranks?\W{{0,3}}(\d, )*{FAILED_RANK}\b", line)) for line in last_lines)
    who = "named" if named == len(ends) else f"named on {named} of {len(ends)}" if named else "not named"
    quiet = f", {unharmed} of {len(ends)} go on" if unharmed else ""
    return f"{max(0.0, took - run.marks['fault']):.2f} s, {who}{quiet}"


def main() -> None:
    print("| rank 1 of 3 … | " + " | ".join(METHODS) + " |\n|---" + "|---" * len(METHODS) + "|")
    for fault in FAULTS:
        print(f"| {fault} | " + " | ".join(detection(method, fault) for method in METHODS) + " |", flush=True)
    for world in (2, 4):
        costs = {}
        for method in METHODS:
            with tempfile.TemporaryDirectory() as path:
                run = run_ranks(healthy, world, method, path, limit_s=60)
            costs[method] = run.outcomes[0].value or {"barrier": float("nan"), "all_reduce": float("nan")}
        for what in ("barrier", "all_reduce"):
            cells = " | ".join(f"{costs[method][what]:.0f} µs" for method in METHODS)
            print(f"| {what}, {world} ranks | {cells} |", flush=True)


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(main())
