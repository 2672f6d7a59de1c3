"""A rank's host on another machine: a Ray actor that starts the rank's process and watches it there.

    server ──────── channel: a rank's messages (``RankAssignment``, ``RankRequest``, ``RankResponse``) ──────────── rank
       └──────────  host: heartbeats with the turn status, output lines, exit ◂─▸ kill  ─────────── host ┘ (its child)

The rank is a child of the actor, with the same command line as on the server's own machine: so its exit status is
exact, a stopped rank is distinguished from a busy one by the process table, its last lines are there after a crash, and
the heartbeats go on while it holds the interpreter. The channel's socket is opened here and inherited by the rank;
nothing is relayed.

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
from descant.distributed.coordinator.process import Rendezvous
from descant.distributed.frames import BadFrame, Frames, pack, tune
from descant.distributed.process_table import node_id, process_status
from descant.distributed.watcher import watch
from descant.ranks.channel import TurnStatus
from descant.ranks.rank_main import rank_command, rank_environment

HEARTBEAT_S = 0.25
CONNECT_S = 10.0
LOST_MS = 10_000
"""A server that acknowledges nothing for so long is gone, and the rank with it."""
LAST_OUTPUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """A host's configuration. ``address`` is the server's (host, port). ``probe``: a file of the server's and what it
    must hold, so that a directory that the machines do not share is found before a checkpoint is lost in it."""

    address: tuple[str, int]
    token: str
    probe: tuple[str, str]
    version: str
    env: Mapping[str, str] = field(default_factory=dict)


class RankHost:
    """The actor. Needs no Ray itself: the server makes an actor of the class."""

    def run(self, config: HostConfig) -> None:
        """Starts the rank and stays until it has ended, and ends it when the server is gone or kills it. Errors are
        sent over the host connection; raises only where there is none."""
        with _connect(config, "host") as server:
            try:
                _check(config)
                rank = _Rank.start(config)
            except (OSError, _CannotStart) as error:
                server.sendall(pack(["failed", str(error)]))
                return
            rank.watch(server)


class _CannotStart(Exception):
    """A sentence for the operator."""


def _connect(config: HostConfig, role: str) -> socket.socket:
    sock = socket.create_connection(config.address, timeout=CONNECT_S)
    sock.settimeout(None)
    tune(sock)
    sock.sendall(pack(["hello", {"token": config.token, "role": role}]))
    return sock


def _check(config: HostConfig) -> None:
    if config.version != descant.__version__:
        raise _CannotStart(f"it has Descant {descant.__version__}, the server has {config.version}")
    path, text = config.probe
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

    def __init__(self, process: subprocess.Popen[bytes], turn_status: TurnStatus):
        self._process = process
        self._turn_status = turn_status
        self._sending = threading.Lock()

    @classmethod
    def start(cls, config: HostConfig) -> _Rank:
        turn_status = TurnStatus()
        with _connect(config, "channel") as channel:
            fds = channel.fileno(), turn_status.fd
            process = subprocess.Popen(
                rank_command(*fds),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=rank_environment(config.env),
            )
        return cls(process, turn_status)

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
                ready, _, _ = select.select([server.fileno(), end], [], [], HEARTBEAT_S)
                data = server.recv(4096) if server.fileno() in ready else None
                if data == b"" or not all(self._handle(message) for message in frames.feed(data or b"")):
                    break
                status = process_status(self._process.pid)
                turn, text = self._turn_status.read()
                if not self._send(server, ["heartbeat", turn, text, status is not None and status.stopped]):
                    break
        except (OSError, BadFrame):
            pass  # the server is gone, or is none
        finally:
            self._process.kill()
            self._process.wait()
            os.close(end)
        output.join(LAST_OUTPUT_S)
        turn, text = self._turn_status.read()
        self._send(server, ["heartbeat", turn, text, False])
        self._send(server, ["ended", self._process.returncode])

    @staticmethod
    def _handle(message: object) -> bool:
        """False: the rank is to be killed."""
        match message:
            case ["watch", str(rendezvous)]:
                watcher = threading.Thread(target=watch, args=(Rendezvous.from_json(rendezvous),), daemon=True)
                watcher.start()
                return True
        return False

    def _forward_output(self, server: socket.socket) -> None:
        assert self._process.stdout is not None
        for line in iter(lambda: self._process.stdout.readline(1 << 14), b""):  # type: ignore[union-attr]
            self._send(server, ["line", line.decode(errors="replace").rstrip()])

    def _send(self, server: socket.socket, message: list[object]) -> bool:
        """False: the server is gone."""
        try:
            with self._sending:
                server.sendall(pack(message))
        except OSError:
            return False
        return True
