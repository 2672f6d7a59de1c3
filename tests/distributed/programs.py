"""What the ranks of the tests do. Run in forks of a zygote; named ``tests.distributed.programs:NAME``."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from descant.distributed.mesh import Mesh
from descant.testing.gloo import RankContext


def sums(context: RankContext) -> dict[str, Any]:
    """Every collective on every group of a mesh, while the default group is poison."""
    table = {"replica:0": [0, 2], "replica:1": [1, 3], "shard:0": [0, 1], "shard:1": [2, 3], "all": [0, 1, 2, 3]}
    with context.join() as member, Mesh.create(member, table, deadline_s=10) as mesh:

        def poison(*args: object, **kwargs: object) -> None:
            raise AssertionError("the default group was asked for")

        real = c10d._get_default_group
        c10d._get_default_group = poison  # type: ignore[assignment]
        try:
            everyone = mesh.groups["all"]
            total = torch.full((3,), float(context.rank))
            everyone.all_reduce(total, tag="total")
            most = torch.tensor([context.rank])
            everyone.all_reduce(most, tag="most", op="max")
            sent = torch.tensor([context.rank])
            shard = mesh.groups[f"shard:{context.rank // 2}"]
            replica = mesh.groups[f"replica:{context.rank % 2}"]
            shard.broadcast(sent, root=shard.size - 1, tag="sent")
            row = [int(t) for t in replica.all_gather(torch.tensor([context.rank]), tag="row")]
            member.barrier("compared")
        finally:
            c10d._get_default_group = real
        return {"total": total.tolist(), "most": int(most), "sent": int(sent), "row": row}


def diverge(context: RankContext, how: str, odd_rank: int) -> None:
    """One rank calls otherwise. ``how`` names the mistake."""
    table = {"all": list(range(context.world)), "first": [0, 1]}
    odd = context.rank == odd_rank
    with context.join() as member, Mesh.create(member, table, deadline_s=3.0) as mesh, member.scope("step", 7):
        group = mesh.groups["all"]
        a, b = torch.ones(4), torch.ones(4)
        context.mark("fault")
        match how:
            case "swapped order":
                first, second = ("b", "a") if odd else ("a", "b")
                group.all_reduce(a, tag=first)
                group.all_reduce(b, tag=second)
            case "wrong root":  # the local rank, where the other ranks mean the first
                group.broadcast(a, root=group.rank if odd else 0, tag="weights")
            case "skipped collective":
                if not odd:
                    group.all_reduce(a, tag="gradients")
            case "other op":
                group.all_reduce(a, tag="x", op="max" if odd else "sum")
            case "union group":  # meant for the two of "first", called on all by one
                (group if odd else mesh.groups["first"]).all_reduce(a, tag="barrier") if context.rank < 2 else None
            case "dies in a collective":
                group.all_reduce(a, tag="before")
                if odd:
                    os.kill(os.getpid(), signal.SIGKILL)
                group.all_reduce(b, tag="after")
            case "stops in a collective":
                if odd:
                    os.kill(os.getpid(), signal.SIGSTOP)
                group.all_reduce(b, tag="after")
            case "raises beside a collective":
                if odd:
                    raise ValueError("only here")
                group.all_reduce(b, tag="after")
            case "late for a collective":
                if odd:
                    time.sleep(5)
                group.all_reduce(b, tag="after")
        member.barrier("end of step", deadline_s=5)


def group_on_one_side(context: RankContext) -> None:
    """Rank 0 declares a group that the others do not."""
    table = {"all": list(range(context.world))} | ({"extra": [0, 1]} if context.rank == 0 else {})
    with context.join() as member:
        context.mark("fault")
        Mesh.create(member, table, deadline_s=5)


def two_threads(context: RankContext) -> str:
    with context.join() as member, Mesh.create(member, {"all": list(range(context.world))}, deadline_s=5) as mesh:
        said: list[str] = []

        def other() -> None:
            try:
                mesh.groups["all"].all_reduce(torch.ones(1), tag="from a thread")
            except RuntimeError as error:
                said.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        member.barrier("unharmed")
        return said[0]


def mismatch_before(context: RankContext) -> None:
    """With ``check_every_call`` shapes that differ never reach gloo, which would end the process."""
    with (
        context.join() as member,
        Mesh.create(member, {"all": list(range(context.world))}, deadline_s=5, check_every_call=True) as mesh,
    ):
        context.mark("fault")
        mesh.groups["all"].all_reduce(torch.ones(2 if context.rank else 3), tag="gradients")


def slices(context: RankContext) -> bool:
    """A call that outlasts several slices still gives the right sum: a slice that ends does not end the call."""
    with context.join() as member, Mesh.create(member, {"all": list(range(context.world))}, deadline_s=10) as mesh:
        tensor = torch.ones(4)
        if context.rank == 0:
            time.sleep(0.5)
        mesh.groups["all"].all_reduce(tensor, tag="late")
        mesh.groups["all"].all_reduce(tensor, tag="again")
        return tensor.tolist() == [float(context.world**2)] * 4


def bad_arguments(context: RankContext) -> list[str]:
    said = []
    with (
        context.join() as member,
        Mesh.create(member, {"all": list(range(context.world)), "one": [0]}, deadline_s=5) as mesh,
    ):
        group = mesh.groups["all"]
        for call in (
            lambda: group.broadcast(torch.ones(1), root=context.world, tag="x"),
            lambda: group.all_reduce(torch.ones(1), tag=""),
            lambda: member.declare({"all": [0]}),
            lambda: member.declare({"new": [0, 0]}),
            lambda: member.barrier("x", group="nowhere"),
        ):
            try:
                call()
            except ValueError as error:
                said.append(str(error))
        if context.rank == 1:
            try:
                member.barrier("x", group="one")
            except ValueError as error:
                said.append(str(error))
        member.barrier("unharmed")
    return said


def dies_in_creation(context: RankContext) -> None:
    """The others are inside torch, in a wait for a store that nothing can abort."""
    with context.join(watchdog_abort_s=0.5) as member:
        if context.rank == 1:

            def die(*args: object, **kwargs: object) -> None:
                context.mark("fault")
                os.kill(os.getpid(), signal.SIGKILL)

            torch.distributed.new_group = die  # type: ignore[assignment]
        Mesh.create(member, {"all": list(range(context.world))}, deadline_s=10)


def sharded(context: RankContext) -> float:
    """FSDP2 on a group of the mesh, while the default group is poison; equal to the same layer unsharded."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    parted = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    parted.load_state_dict(whole.state_dict())
    data = torch.randn(3, 8)
    with context.join() as member, Mesh.create(member, {"shard": list(range(context.world))}, deadline_s=10) as mesh:

        def poison(*args: object, **kwargs: object) -> None:
            raise AssertionError("the default group was asked for")

        device_mesh = DeviceMesh.from_group(mesh.groups["shard"].process_group, "cpu")
        real = c10d._get_default_group
        c10d._get_default_group = poison  # type: ignore[assignment]
        try:
            for layer in parted:
                fully_shard(layer, mesh=device_mesh)
            fully_shard(parted, mesh=device_mesh)
            difference = (parted(data) - whole(data)).abs().max()
        finally:
            c10d._get_default_group = real
        member.barrier("compared")
        return float(difference)
