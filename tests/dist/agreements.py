"""What the ranks of the tests do that need no torch. Run in forks of a zygote; named ``tests.dist.agreements:NAME``."""

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

import descant.dist.point as point_module
from descant.dist.failure import DistributedFailure
from descant.dist.point import Member
from descant.dist.watcher import watch
from descant.testing.gloo import Seat


def values(seat: Seat) -> list[Any]:
    with seat.join() as member:
        member.declare({"even": range(0, seat.world, 2), "reversed": list(reversed(range(seat.world)))})
        said: list[Any] = [
            member.point("data", data={"rank": seat.rank}),
            member.point("reversed", group="reversed", data=seat.rank),
            member.rank0_decides("who", lambda: [seat.rank, None, "ä"]),
            member.side_effect("slow", lambda progress: seat.rank, by=1),
            list(member.vote("healthy", seat.rank != 1)),
            list(member.all_agree("all", lambda: seat.rank * 10).values),
        ]
        if seat.rank % 2 == 0:
            said.append(member.point("some", group="even", data=seat.rank))
        member.barrier("end")
        return said


def errors(seat: Seat) -> list[tuple[str, tuple[int, ...], bool]]:
    """Failures that everybody hears at a point, after each of which everybody goes on."""
    heard = []

    def decide() -> Any:
        raise OSError("input/output error")

    def fails_on(rank: int, error: Exception) -> Any:
        if seat.rank == rank:
            raise error
        return seat.rank

    def attempt(run: Any) -> None:
        try:
            run()
        except DistributedFailure as failure:
            heard.append((failure.cause, failure.culprits, failure.recoverable))

    with seat.join() as member, member.scope("save"):
        attempt(lambda: member.rank0_decides("exists", decide))
        attempt(lambda: member.side_effect("publish", lambda progress: fails_on(1, ValueError("no")), by=1))
        attempt(lambda: member.all_agree("write", lambda: fails_on(1, ValueError("fatal")), retry_on=OSError))
        agreed = member.all_agree("write", lambda: fails_on(1, OSError("disk full")), retry_on=OSError)
        heard.append((agreed.worst, tuple(agreed.errors), bool(agreed.values)))
        attempt(lambda: member.rank0_decides("set", lambda: {1, 2}))
        attempt(lambda: member.rank0_decides("tuple", lambda: (1, 2)))
        attempt(lambda: member.point("mine", error="rank 0 says so" if seat.rank == 0 else None))
        member.barrier("all here")
    return heard


def unheeded(seat: Seat) -> None:
    """An agreed failure that nobody handles ends all ranks with itself, not with who happened to report it."""
    with seat.join() as member:
        member.rank0_decides("decide", lambda: 1 // 0)


def missing(seat: Seat, deadline_s: float) -> None:
    if seat.rank == 1:
        return
    seat.mark("fault")
    seat.join(deadline_s=deadline_s)


def crossed(seat: Seat) -> None:
    """Two points of different groups that wait for each other."""
    with seat.join() as member:
        member.declare({"pair": [0, 1]})
        seat.mark("fault")
        if seat.rank == 1:
            member.barrier("in the pair", group="pair")
        else:
            member.barrier("in the world")


def seized(seat: Seat, seconds: float) -> str:
    """One call that holds the interpreter, while the others wait."""
    with seat.join() as member:
        if seat.rank == 1:
            began = time.perf_counter()
            sum(range(2_000_000))
            rate = 2_000_000 / (time.perf_counter() - began)
            sum(range(int(rate * seconds)))
        member.barrier("after")
    return "well"


def stopped_for_a_moment(seat: Seat) -> str:
    with seat.join() as member:
        if seat.rank == 1:
            own = os.getpid()
            if (child := os.fork()) == 0:
                time.sleep(0.3)
                os.kill(own, signal.SIGCONT)
                os._exit(0)
            os.kill(own, signal.SIGSTOP)
            os.waitpid(child, 0)
        member.barrier("after")
    return "well"


def held_open(seat: Seat) -> None:
    """The rank that dies has a child that keeps its sockets open: no end of the connection is seen."""
    with seat.join() as member:
        if seat.rank == 1:
            if os.fork() == 0:
                os.close(seat._pipe)
                time.sleep(1.5)
                os._exit(0)
            seat.mark("fault")
            os.kill(os.getpid(), signal.SIGKILL)
        member.barrier("after")


def blocked(seat: Seat) -> None:
    """Rank 0 is stuck where no verdict reaches it; its other thread ends it."""
    with seat.join(last_resort_s=0.3) as member:
        if seat.rank == 1:
            seat.mark("fault")
            raise ValueError("only here")
        with member.scope("stuck"):
            while True:
                time.sleep(60)


def intruder(seat: Seat) -> str:
    """Strangers on the referee's port change nothing."""
    with seat.join() as member:
        if seat.rank == 0:
            address = seat.invitation.host, seat.invitation.port
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
            wrong = dataclasses.replace(seat.invitation, token="guess")
            try:
                Member.join(wrong, 0)
            except DistributedFailure as failure:
                said = failure.cause
            try:
                Member.join(seat.invitation, 1)
            except DistributedFailure as failure:
                said += failure.cause
        member.barrier("unharmed")
    return said if seat.rank == 0 else ""


def elsewhere(seat: Seat) -> None:
    """The ranks are on a machine whose process table the referee cannot read; that machine's watcher does."""
    if seat.rank == 2:
        with seat.join() as member:
            member.barrier("after")
    point_module.node_id = lambda: "another machine"
    if seat.rank == 0 and os.fork() == 0:
        os.close(seat._pipe)
        watch(seat.invitation, node="another machine")
        os._exit(0)
    with seat.join() as member:
        with member.scope("far away"):
            time.sleep(0.6)  # two heartbeats: here they carry where a rank is
            if seat.rank == 1:
                seat.mark("fault")
                os.kill(os.getpid(), signal.SIGSTOP)
        member.barrier("after")


def different_roads(seat: Seat, directory: str) -> None:
    """Each rank asks the file system for itself."""
    if seat.rank == 0:
        Path(directory, "checkpoint").mkdir()
    with seat.join() as member:
        stale = seat.rank == 1  # a cached attribute of a network file system
        seat.mark("fault")
        if not stale and Path(directory, "checkpoint").exists():
            member.barrier("resume")
        else:
            member.barrier("start afresh")


def one_road(seat: Seat, directory: str) -> bool:
    if seat.rank == 0:
        Path(directory, "checkpoint").mkdir()
    with seat.join() as member:
        exists = member.rank0_decides("resume or not", lambda: Path(directory, "checkpoint").exists())
        member.barrier("resume" if exists else "start afresh")
        return exists


def fan_out(seat: Seat, slow_s: float, timeout_s: float) -> str:
    """Rank 0 tells four engines over HTTP; the fourth takes long or never answers. Nobody is in a collective."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)] if seat.rank == 0 else []

    def publish(progress: Any) -> str:
        for number, listener in enumerate(listeners):
            progress(f"engine {number} of 4")
            if (number < 3 or slow_s < timeout_s) and os.fork() == 0:
                os.close(seat._pipe)
                connection, _ = listener.accept()
                connection.recv(4096)
                time.sleep(slow_s if number == 3 else 0)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                os._exit(0)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/load_lora_adapter"
            urllib.request.urlopen(url, timeout=timeout_s).read()
        return "published"

    with seat.join() as member, member.scope("step", 3):
        seat.mark("fault")
        try:
            return member.side_effect("lora/publish", publish, deadline_s=10)
        except DistributedFailure as failure:
            member.barrier("still in step")
            return f"{failure.culprits} {failure.where} {failure.cause}"


def overtaken(seat: Seat) -> None:
    """The slow side effect outlasts the deadline: its last progress is in the error."""
    with seat.join() as member, member.scope("step", 3):
        seat.mark("fault")

        def publish(progress: Any) -> None:
            progress("engine 2 of 4")
            time.sleep(1.5)

        member.side_effect("lora/publish", publish, deadline_s=0.5)


def agreement_in_one_branch(seat: Seat) -> None:
    """The retry is agreed on only where the write failed."""
    with seat.join() as member, member.scope("save"):
        seat.mark("fault")
        try:
            if seat.rank == 1:
                raise OSError("dead writer")
        except OSError:
            member.vote("retry", True)
        member.barrier("published")
