"""What stands beside a rank on another machine: a Ray actor that starts the rank's process and watches it there.

    server ──────── channel: a rank's messages (``Seat``, ``ToRank``, ``FromRank``) ──────────── rank
       └──────────  host: beats with the board, output lines, how it ended ◂─▸ kill  ──────────── host ┘ (its child)

The rank is a child of the actor, with the same command line as on the server's own machine: so its exit status is
exact, a stopped rank is told from a busy one by the process table, its last lines are there after a crash, and the
beats go on while it holds the interpreter. The channel's socket is opened here and inherited by the rank; nothing is
relayed.

Both connections begin with a token of this start (``_connect``); the server unpickles nothing before it has seen it.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import descant
from descant.dist.frames import BadFrame, Frames, pack, tune
from descant.dist.process import node_id, process_status
from descant.dist.referee import Invitation
from descant.dist.watcher import watch
from descant.ranks.channel import Board
from descant.ranks.rank_main import rank_command, rank_environment

BEAT_S = 0.25
CONNECT_S = 10.0
LOST_MS = 10_000
"""A server that acknowledges nothing for so long is gone, and the rank with it."""
LAST_OUTPUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """What a host is told. ``address`` is the server's (host, port). ``proof``: a file of the server's and what it must
    hold, so that a directory that the machines do not share is found before a checkpoint is lost in it."""

    address: tuple[str, int]
    token: str
    proof: tuple[str, str]
    version: str
    env: Mapping[str, str] = field(default_factory=dict)


class RankHost:
    """The actor. Needs no Ray itself: the server makes an actor of the class."""

    def run(self, order: HostOrder) -> None:
        """Starts the rank and stays until it has ended, and ends it when the server is gone or says so. Whatever goes
        wrong is told over the host connection; raises only where there is none."""
        with _connect(order, "host") as server:
            try:
                _check(order)
                rank = _Rank.start(order)
            except (OSError, _CannotStart) as error:
                server.sendall(pack(["failed", str(error)]))
                return
            rank.watch(server)


class _CannotStart(Exception):
    """A sentence for whoever starts the server."""


def _connect(order: HostOrder, role: str) -> socket.socket:
    sock = socket.create_connection(order.address, timeout=CONNECT_S)
    sock.settimeout(None)
    tune(sock)
    sock.sendall(pack(["hello", {"token": order.token, "role": role}]))
    return sock


def _check(order: HostOrder) -> None:
    if order.version != descant.__version__:
        raise _CannotStart(f"it has Descant {descant.__version__}, the server has {order.version}")
    path, text = order.proof
    try:
        seen = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        seen = ""
        why = f": {error.strerror}"
    else:
        why = " there"
    if seen != text:
        raise _CannotStart(
            f"it does not see the server's data_dir {Path(path).parent} ({Path(path).name} is not the server's{why}); "
            "data_dir must be on a file system that all nodes share, under the same path"
        )


class _Rank:
    """A rank's process, a child of this one."""

    def __init__(self, process: subprocess.Popen[bytes], board: Board):
        self._process = process
        self._board = board
        self._sending = threading.Lock()

    @classmethod
    def start(cls, order: HostOrder) -> _Rank:
        board = Board()
        with _connect(order, "channel") as channel:
            fds = channel.fileno(), board.fd
            process = subprocess.Popen(
                rank_command(*fds),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=rank_environment(order.env),
            )
        return cls(process, board)

    def watch(self, server: socket.socket) -> None:
        server.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", 18), LOST_MS)
        output = threading.Thread(target=self._forward_output, args=(server,), daemon=True)
        output.start()
        frames = Frames()
        mine = [socket.gethostname(), node_id(), server.getsockname()[0]]
        self._send(server, ["started", self._process.pid, *mine])
        end = os.pidfd_open(self._process.pid)
        try:
            while self._process.poll() is None:
                ready, _, _ = select.select([server.fileno(), end], [], [], BEAT_S)
                data = server.recv(4096) if server.fileno() in ready else None
                if data == b"" or not all(self._obey(message) for message in frames.feed(data or b"")):
                    break
                status = process_status(self._process.pid)
                turn, text = self._board.read()
                if not self._send(server, ["beat", turn, text, status is not None and status.stopped]):
                    break
        except (OSError, BadFrame):
            pass  # the server is gone, or is none
        finally:
            self._process.kill()
            self._process.wait()
            os.close(end)
        output.join(LAST_OUTPUT_S)
        turn, text = self._board.read()
        self._send(server, ["beat", turn, text, False])
        self._send(server, ["ended", self._process.returncode])

    @staticmethod
    def _obey(message: object) -> bool:
        """Whether the rank may live."""
        match message:
            case ["watch", str(invitation)]:
                watcher = threading.Thread(target=watch, args=(Invitation.from_json(invitation),), daemon=True)
                watcher.start()
                return True
        return False

    def _forward_output(self, server: socket.socket) -> None:
        assert self._process.stdout is not None
        for line in iter(lambda: self._process.stdout.readline(1 << 14), b""):  # type: ignore[union-attr]
            self._send(server, ["line", line.decode(errors="replace").rstrip()])

    def _send(self, server: socket.socket, message: list[object]) -> bool:
        """Whether the server may still hear us."""
        try:
            with self._sending:
                server.sendall(pack(message))
        except OSError:
            return False
        return True
