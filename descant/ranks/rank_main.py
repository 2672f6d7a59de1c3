"""A rank's process: ``python -m descant.ranks.rank_main CHANNEL_FD BOARD_FD PARENT_PID``.

The first message on the channel is the ``RankSpec``. It ends when told to, when the channel closes, or with its parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from descant.errors import DescantError, ServerError
from descant.ranks.channel import Board, RankChannel
from descant.ranks.messages import Ready, StartFailed, Starting, ToRank
from descant.ranks.settings import RankSpec

if TYPE_CHECKING:
    from descant.ranks.loop import Executor


def rank_command(channel_fd: int, board_fd: int) -> list[str]:
    """What the caller starts a rank of its own with; both descriptors must be inherited."""
    return [sys.executable, "-m", "descant.ranks.rank_main", *map(str, (channel_fd, board_fd, os.getpid()))]


def rank_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment and ``extra``, as a rank's process needs them."""
    env = {**os.environ, **extra}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), env.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    if "OMP_WAIT_POLICY" not in env:
        # Torch's OpenMP threads spin for milliseconds at each barrier, and on a machine shared with clients they
        # spin while the thread they wait for has no core. A pass of 256 tokens (135 M parameters, 2 busy cores):
        # 11 s as it comes, 7 s at 20000 spins, 1.4 s at 1000 and at none.
        env.setdefault("GOMP_SPINCOUNT", "1000")
    return env


def main(channel_fd: int, board_fd: int, parent_pid: int) -> int:
    _die_with(parent_pid)
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group; the server decides when we end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    os.set_inheritable(channel_fd, False)
    channel, board = RankChannel(socket.socket(fileno=channel_fd)), Board(board_fd)
    spec = channel.receive()
    if not isinstance(spec, RankSpec):
        return 0
    last_phase = "importing"

    def phase(text: str) -> None:
        nonlocal last_phase
        last_phase = text
        channel.send(Starting(phase=text))

    try:
        phase(last_phase)
        module, _, function = spec.build.partition(":")
        executor: Executor = getattr(importlib.import_module(module), function)(spec, phase)
        from descant.ranks.loop import TurnLoop  # loads torch, as most of what ``build`` names has done

        loop = TurnLoop(
            executor,
            emit=channel.send,
            board=board,
            microbatch_tokens=spec.settings.microbatch_tokens,
            steps_per_microbatch=spec.settings.steps_per_microbatch,
        )
    except DescantError as error:
        channel.send(StartFailed(error=error))
        return 1
    except Exception as error:
        traceback.print_exc()
        channel.send(StartFailed(error=ServerError(f"{type(error).__name__} while {last_phase}: {error}")))
        return 1
    threading.Thread(target=_listen, args=(channel, loop.post), name="descant-listen", daemon=True).start()
    channel.send(Ready(facts=executor.facts, capabilities=executor.capabilities))
    loop.run()
    return 0


def _listen(channel: RankChannel, post: object) -> None:
    assert callable(post)
    while True:
        try:
            message: ToRank | object | None = channel.receive()
        except OSError:
            message = None
        if message is None:
            # The server is gone: nobody can hear the end of what runs.
            os._exit(0)
        post(message)


def _die_with(parent_pid: int) -> None:
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
