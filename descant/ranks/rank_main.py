"""A rank (``run``), however it was started; and its process on this machine:

    python -m descant.ranks.rank_main CHANNEL_FD STATUS_FD PARENT_PID

The first message on the channel is the ``RankAssignment``. A rank ends on ``Stop``, when its channel
closes, when its replica has failed, or with its parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from descant.distributed.coordinator.process import Rendezvous
from descant.distributed.failure import DistributedFailure
from descant.errors import DescantError, ServerError, UserError
from descant.ranks.channel import RankChannel, TurnStatus
from descant.ranks.ops import START, RankRequest, RankResponse
from descant.ranks.settings import RankAssignment, RankSpec

if TYPE_CHECKING:
    from descant.ranks.peers import Peers
    from descant.ranks.worker import Worker


def rank_command(channel_fd: int, status_fd: int) -> list[str]:
    """What the caller starts a rank of its own with; both descriptors must be inherited."""
    return [sys.executable, "-m", "descant.ranks.rank_main", *map(str, (channel_fd, status_fd, os.getpid()))]


def rank_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment and ``extra``, as a rank's process needs them."""
    env = {**os.environ, **extra}
    # What the caller finds its packages by, ranks need as well.
    paths = (str(Path(__file__).parents[2]), extra.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env["PYTHONUNBUFFERED"] = "1"
    if "OMP_WAIT_POLICY" not in env:
        # Torch's OpenMP threads spin for milliseconds at each barrier, and on a machine shared with clients they
        # spin while the thread they wait for has no core. A pass of 256 tokens (135 M parameters, 2 busy cores):
        # 11 s as it comes, 7 s at 20000 spins, 1.4 s at 1000 and at none.
        env.setdefault("GOMP_SPINCOUNT", "1000")
    return env


def main(channel_fd: int, status_fd: int, parent_pid: int) -> int:
    _die_with_parent(parent_pid)
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group; the server decides when we end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    os.set_inheritable(channel_fd, False)
    channel, turn_status = RankChannel(socket.socket(fileno=channel_fd)), TurnStatus(status_fd)
    assignment = channel.receive()
    if not isinstance(assignment, RankAssignment):
        return 0
    return run(
        assignment.spec,
        channel,
        turn_status,
        rank=assignment.rank,
        rendezvous=assignment.rendezvous,
        host=assignment.host,
    )


def run(
    spec: RankSpec,
    channel: RankChannel,
    turn_status: TurnStatus,
    *,
    rank: int = 0,
    rendezvous: Rendezvous | None = None,
    host: str = "127.0.0.1",
) -> int:
    """What a rank does from its start to its end; its exit code. The process is to end when this returns: file threads
    may hang in a dead file system.

    ``rendezvous``: with the coordinator of a replica of several ranks; ``host``: the machine of rank 0, as the others
    reach it. ``channel`` leads to the server: rank 0 receives and answers there, the others report their start's phases
    and notice the server's end. The launcher of a replica's ranks ends all of them once one has ended."""
    try:
        _send_phase(channel.send, "importing")
        from descant.ranks.peers import join_peers  # loads torch

        with join_peers(spec.settings.rank, rank=rank, rendezvous=rendezvous, host=host) as peers:
            worker = _build_worker(spec, peers, channel.send)
            if rank == 0:
                _lead(worker, peers, spec, channel, turn_status)
            else:
                _follow(worker, peers, channel, turn_status)
    except DistributedFailure as failure:
        print(failure.report(), file=sys.stderr, flush=True)
        return 1
    except UserError as error:  # a model that cannot be served: where that was found is of no interest
        print(error.message, file=sys.stderr, flush=True)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _send_phase(send: Callable[[RankResponse], None], phase: str) -> None:
    send(RankResponse(id=START, result=phase, last=False))


def _build_worker(spec: RankSpec, peers: Peers, send: Callable[[RankResponse], None]) -> Worker:
    """The rank's worker, once every rank has its own. An error is sent to the server before the other ranks fail."""
    last_phase = "importing"

    def phase(text: str) -> None:
        nonlocal last_phase
        last_phase = text
        _send_phase(send, text)

    try:
        module, _, function = spec.build.partition(":")
        worker: Worker = getattr(importlib.import_module(module), function)(spec, phase, peers)
        if peers.num_ranks > 1:
            phase("waiting for the other ranks")
        peers.ready()
    except DistributedFailure:
        raise
    except DescantError as error:
        send(RankResponse(id=START, error=error))
        raise
    except Exception as error:
        send(RankResponse(id=START, error=ServerError(f"{type(error).__name__} while {last_phase}: {error}")))
        raise
    # What has been loaded stays: half a million objects, which Python would look through now and then otherwise, while
    # every tenant waits (some 0.3 s).
    gc.collect()
    gc.freeze()
    return worker


def _lead(worker: Worker, peers: Peers, spec: RankSpec, channel: RankChannel, turn_status: TurnStatus) -> None:
    from descant.ranks.loop import TurnLoop
    from descant.ranks.spmd import SpmdExecutor

    loop = TurnLoop(
        SpmdExecutor(worker, peers) if peers.num_ranks > 1 else worker,
        respond=channel.send,
        turn_status=turn_status,
        time_share=spec.settings.sample.time_share,
        max_pass_s=spec.settings.train.max_pass_ms / 1000,
    )
    _listen(channel, loop.post)
    channel.send(RankResponse(id=START, result=worker.info))
    loop.run()


def _follow(worker: Worker, peers: Peers, channel: RankChannel, turn_status: TurnStatus) -> None:
    from descant.ranks.spmd import run_follower

    _listen(channel, lambda request: None)
    run_follower(worker, peers, turn_status)


def _listen(channel: RankChannel, post: Callable[[RankRequest], None]) -> None:
    """In a thread of its own; ends the process with the channel."""

    def listen() -> None:
        while True:
            try:
                request = channel.receive()
            except OSError:
                request = None
            if not isinstance(request, RankRequest):
                # The server is gone: the end of what runs could not be answered.
                os._exit(0)
            post(request)

    threading.Thread(target=listen, name="descant-listen", daemon=True).start()


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end us with the parent (Linux); elsewhere the closed channel does."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(0)


if __name__ == "__main__":
    code = main(*map(int, sys.argv[1:4]))
    sys.stdout.flush()
    sys.stderr.flush()
    # File threads may hang in a dead file system, and torch's teardown has nothing to save.
    os._exit(code)
