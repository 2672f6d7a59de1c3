"""What the ranks of the tests do that need no torch, in forks of a zygote: ``tests.distributed.agreements:NAME``."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import descant.distributed.coordinator.client as client_module
from descant.distributed.coordinator.client import Member
from descant.distributed.failure import DistributedFailure
from descant.distributed.watcher import watch
from descant.testing.gloo import RankContext


def values(context: RankContext) -> list[Any]:
    with context.join() as member:
        member.declare({"even": range(0, context.world, 2), "reversed": list(reversed(range(context.world)))})
        said: list[Any] = [
            member.point("data", data={"rank": context.rank}),
            member.point("reversed", group="reversed", data=context.rank),
            member.rank0_decides("who", lambda: [context.rank, None, "ä"]),
            member.side_effect("slow", lambda progress: context.rank, by=1),
            list(member.vote("healthy", context.rank != 1)),
            list(member.all_agree("all", lambda: context.rank * 10).values),
        ]
        if context.rank % 2 == 0:
            said.append(member.point("some", group="even", data=context.rank))
        member.barrier("end")
        return said


def errors(context: RankContext) -> list[tuple[str, tuple[int, ...], bool]]:
    """Failures that all ranks raise at a sync point, after each of which all go on."""
    heard = []

    def decide() -> Any:
        raise OSError("input/output error")

    def fails_on(rank: int, error: Exception) -> Any:
        if context.rank == rank:
            raise error
        return context.rank

    def attempt(run: Any) -> None:
        try:
            run()
        except DistributedFailure as failure:
            heard.append((failure.cause, failure.failed_ranks, failure.recoverable))

    with context.join() as member, member.scope("save"):
        attempt(lambda: member.rank0_decides("exists", decide))
        attempt(lambda: member.side_effect("publish", lambda progress: fails_on(1, ValueError("no")), by=1))
        attempt(lambda: member.all_agree("write", lambda: fails_on(1, ValueError("fatal")), retry_on=OSError))
        agreed = member.all_agree("write", lambda: fails_on(1, OSError("disk full")), retry_on=OSError)
        heard.append((agreed.worst, tuple(agreed.errors), bool(agreed.values)))
        attempt(lambda: member.rank0_decides("set", lambda: {1, 2}))
        attempt(lambda: member.rank0_decides("tuple", lambda: (1, 2)))
        attempt(lambda: member.point("mine", error="rank 0 says so" if context.rank == 0 else None))
        member.barrier("all here")
    return heard


def unheeded(context: RankContext) -> None:
    """An agreed failure that is not handled ends all ranks with itself, not with the rank that happened to report
    it."""
    with context.join() as member:
        member.rank0_decides("decide", lambda: 1 // 0)


def missing(context: RankContext, deadline_s: float) -> None:
    if context.rank == 1:
        return
    context.mark("fault")
    context.join(deadline_s=deadline_s)


def crossed(context: RankContext) -> None:
    """Two points of different groups that wait for each other."""
    with context.join() as member:
        member.declare({"pair": [0, 1]})
        context.mark("fault")
        if context.rank == 1:
            member.barrier("in the pair", group="pair")
        else:
            member.barrier("in the world")


def seized(context: RankContext, seconds: float) -> str:
    """One call that holds the interpreter, while the others wait."""
    with context.join() as member:
        if context.rank == 1:
            began = time.perf_counter()
            sum(range(2_000_000))
            rate = 2_000_000 / (time.perf_counter() - began)
            sum(range(int(rate * seconds)))
        member.barrier("after")
    return "well"


def stopped_for_a_moment(context: RankContext) -> str:
    with context.join() as member:
        if context.rank == 1:
            own = os.getpid()
            if (child := os.fork()) == 0:
                time.sleep(0.3)
                os.kill(own, signal.SIGCONT)
                os._exit(0)
            os.kill(own, signal.SIGSTOP)
            os.waitpid(child, 0)
        member.barrier("after")
    return "well"


def held_open(context: RankContext) -> None:
    """The rank that dies has a child that keeps its sockets open: no end of the connection is seen."""
    with context.join() as member:
        if context.rank == 1:
            if os.fork() == 0:
                os.close(context._pipe)
                time.sleep(1.5)
                os._exit(0)
            context.mark("fault")
            os.kill(os.getpid(), signal.SIGKILL)
        member.barrier("after")


def blocked(context: RankContext) -> None:
    """Rank 0 is stuck where no failure reaches it; its watchdog ends it."""
    with context.join(watchdog_abort_s=0.3) as member:
        if context.rank == 1:
            time.sleep(0.5)  # rank 0 has left the point where they met, and is in its loop
            context.mark("fault")
            raise ValueError("only here")
        with member.scope("stuck"):
            while True:
                time.sleep(60)


def intruder(context: RankContext) -> str:
    """Strangers on the coordinator's port change nothing."""
    with context.join() as member:
        if context.rank == 0:
            address = context.rendezvous.host, context.rendezvous.port
            for data in (
                b"GET / HTTP/1.0\r\n\r\n",
                b"\xff\xff\xff\xff",
                b"\0\0\0\2[]",
                b'\0\0\0\7["bye"]',
                b'\0\0\0\x2c["hello",{"token":"guess","role":"points"}]  ',
            ):
                with socket.create_connection(address, timeout=5) as sock:
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(100):
                        pass
            wrong = dataclasses.replace(context.rendezvous, token="guess")
            try:
                Member.join(wrong, 0)
            except DistributedFailure as failure:
                said = failure.cause
            try:
                Member.join(context.rendezvous, 1)
            except DistributedFailure as failure:
                said += failure.cause
        member.barrier("unharmed")
    return said if context.rank == 0 else ""


def elsewhere(context: RankContext) -> None:
    """The ranks are on a machine whose process table the coordinator cannot read; that machine's watcher does."""
    if context.rank == 2:
        with context.join() as member:
            member.barrier("after")
    client_module.node_id = lambda: "another machine"
    if context.rank == 0 and os.fork() == 0:
        os.close(context._pipe)
        watch(context.rendezvous, node="another machine")
        os._exit(0)
    with context.join() as member:
        with member.scope("far away"):
            time.sleep(0.6)  # two heartbeats: here they carry where a rank is
            if context.rank == 1:
                context.mark("fault")
                os.kill(os.getpid(), signal.SIGSTOP)
        member.barrier("after")


def different_roads(context: RankContext, directory: str) -> None:
    """Each rank asks the file system for itself."""
    if context.rank == 0:
        Path(directory, "checkpoint").mkdir()
    with context.join() as member:
        stale = context.rank == 1  # a cached attribute of a network file system
        context.mark("fault")
        if not stale and Path(directory, "checkpoint").exists():
            member.barrier("resume")
        else:
            member.barrier("start afresh")


def one_road(context: RankContext, directory: str) -> bool:
    if context.rank == 0:
        Path(directory, "checkpoint").mkdir()
    with context.join() as member:
        exists = member.rank0_decides("resume or not", lambda: Path(directory, "checkpoint").exists())
        member.barrier("resume" if exists else "start afresh")
        return exists


def fan_out(context: RankContext, slow_s: float, timeout_s: float) -> str:
    """Rank 0 calls four engines over HTTP; the fourth takes long or never answers. No rank is in a collective."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)] if context.rank == 0 else []

    def publish(progress: Any) -> str:
        for number, listener in enumerate(listeners):
            progress(f"engine {number} of 4")
            if (number < 3 or slow_s < timeout_s) and os.fork() == 0:
                os.close(context._pipe)
                connection, _ = listener.accept()
                connection.recv(4096)
                time.sleep(slow_s if number == 3 else 0)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                os._exit(0)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/load_lora_adapter"
            urllib.request.urlopen(url, timeout=timeout_s).read()
        return "published"

    with context.join() as member, member.scope("step", 3):
        context.mark("fault")
        try:
            return member.side_effect("lora/publish", publish, deadline_s=10)
        except DistributedFailure as failure:
            member.barrier("still in step")
            return f"{failure.failed_ranks} {failure.where} {failure.cause}"


def overtaken(context: RankContext) -> None:
    """The slow side effect outlasts the deadline: its last progress is in the error."""
    with context.join() as member, member.scope("step", 3):
        context.mark("fault")

        def publish(progress: Any) -> None:
            progress("engine 2 of 4")
            time.sleep(1.5)

        member.side_effect("lora/publish", publish, deadline_s=0.5)


def agreement_in_one_branch(context: RankContext) -> None:
    """The retry is agreed on only where the write failed."""
    with context.join() as member, member.scope("save"):
        context.mark("fault")
        try:
            if context.rank == 1:
                raise OSError("dead writer")
        except OSError:
            member.vote("retry", True)
        member.barrier("published")
