"""The coordinator, a small process beside the ranks that knows where each is:

    python -m descant.distributed.coordinator.process

The launcher starts it before the ranks (``CoordinatorProcess``) and passes each rank the ``Rendezvous``. It is none of
the ranks, so it outlives any of them, and it needs no torch, so it answers while a collective is stuck.

It ends when its standard input closes, that is, with the launcher. A failure is on disk (``failure.json``, fsynced)
before any rank receives it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from descant.distributed.coordinator.state import FailureDetector, SyncPoint
from descant.distributed.coordinator.status import Position, StatusPageReader, parse_position
from descant.distributed.failure import DistributedFailure, write_report
from descant.distributed.frames import BadFrame, Frames, pack, tune
from descant.distributed.process_table import ProcessStatus, describe_exit, node_id, process_status

TICK_S = 0.1
STOP_LIMIT_S = 1.0
"""A rank stopped for less has not failed: Ctrl-Z and fg, a snapshot of the machine."""
HELLO_LIMIT_S = 5.0
MAX_HELLO_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """What a rank needs to join. Plain and JSON-able; ``token`` is a secret of this run.

    ``directory`` is where reports go, on each machine its own or a shared one. ``pid`` and ``node``: the coordinator's.
    """

    host: str
    port: int
    token: str
    world: int
    directory: str
    pid: int
    node: str
    stop_limit_s: float = STOP_LIMIT_S

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rendezvous:
        return cls(**json.loads(text))


class CoordinatorProcess:
    """The launcher's handle. Use as a context manager, or ``close``; either ends the process."""

    def __init__(self, process: subprocess.Popen[bytes], rendezvous: Rendezvous):
        self.process = process
        self.rendezvous = rendezvous

    @classmethod
    def start(
        cls, world: int, directory: str, *, host: str = "127.0.0.1", stop_limit_s: float = STOP_LIMIT_S
    ) -> CoordinatorProcess:
        """Returns when it listens, on a port the system chose. Raises OSError if it does not within 30 s."""
        config = {
            "world": world,
            "directory": directory,
            "host": host,
            "token": secrets.token_hex(16),
            "stop_limit_s": stop_limit_s,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "descant.distributed.coordinator.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(config).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], 30)
            line = process.stdout.readline() if ready else b""
            if not line:
                raise OSError(f"the coordinator did not start (exit code {process.poll()})")
        except BaseException:
            process.kill()
            process.wait()
            raise
        process.stdout.close()
        return cls(process, Rendezvous.from_json(line.decode()))

    def close_in_child(self) -> None:
        """In a forked rank: closes the pipe that keeps the coordinator alive."""
        assert self.process.stdin is not None
        os.close(self.process.stdin.fileno())

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        status = process_status(self.process.pid)
        if status is not None and status.stopped:
            self.process.kill()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Peer:
    """A connection. ``rank`` is set by a valid hello; a rank has two: "points" and "heartbeat". A watcher has one."""

    __slots__ = ("connected", "frames", "out", "rank", "role", "sock")

    def __init__(self, sock: socket.socket, now: float):
        self.sock = sock
        self.frames = Frames(limit=MAX_HELLO_BYTES)
        self.out = b""
        self.rank: int | None = None
        self.role = ""
        self.connected = now


@dataclass(slots=True)
class _LocalRank:
    """A rank in a process table that this coordinator reads, or the watcher of its machine."""

    pid: int
    started: int
    status_page: StatusPageReader | None
    stopped_since: float | None = None


class _Coordinator:
    def __init__(self, listener: socket.socket, rendezvous: Rendezvous):
        self.listener = listener
        self.rendezvous = rendezvous
        self.detector = FailureDetector(rendezvous.world, self._read_status)
        self.epoll = select.epoll()
        self.peers: dict[int, _Peer] = {}
        self.points: dict[int, _Peer] = {}
        self.heartbeats: dict[int, _Peer] = {}
        self.watchers: dict[str, _Peer] = {}
        self.nodes: dict[int, tuple[str, int, int, int]] = {}
        self.local: dict[int, _LocalRank] = {}
        self.reported = False

    def run(self, stdin: int) -> None:
        self.epoll.register(self.listener, select.EPOLLIN)
        self.epoll.register(stdin, select.EPOLLIN)
        listening = self.listener.fileno()
        clock = time.monotonic
        ticked = clock()
        while True:
            due = self.detector.next_due()
            wake = ticked + TICK_S if due is None else min(ticked + TICK_S, due)
            events = self.epoll.poll(max(0.0, wake - clock()))
            now = clock()
            for descriptor, event in events:
                peer = self.peers.get(descriptor)
                if peer is not None:
                    if event & select.EPOLLOUT:
                        self._flush(peer)
                    if event & ~select.EPOLLOUT:
                        self._read(peer, now)
                elif descriptor == listening:
                    self._accept(now)
                elif descriptor == stdin and not os.read(stdin, 4096):
                    return
            if now >= wake:
                if now - ticked >= TICK_S:
                    ticked = now
                    self._watch(now)
                self.detector.tick(now)
                self._deliver()

    # ---- connections

    def _accept(self, now: float) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.listener.accept()
            sock.setblocking(False)
            tune(sock)
            self.peers[sock.fileno()] = _Peer(sock, now)
            self.epoll.register(sock, select.EPOLLIN)

    def _read(self, peer: _Peer, now: float) -> None:
        try:
            data = peer.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(peer, now)
            return
        try:
            for message in peer.frames.feed(data):
                self._handle(peer, message, now)
        except (BadFrame, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            print(f"descant coordinator: a connection was closed: {error!r}", file=sys.stderr, flush=True)
            self._lost(peer, now, f"sent the coordinator a bad message ({error})")
        if self.detector.outbox:
            self._deliver()

    def _lost(self, peer: _Peer, now: float, how: str = "") -> None:
        descriptor = peer.sock.fileno()
        if self.peers.pop(descriptor, None) is None:
            return
        self.epoll.unregister(descriptor)
        peer.sock.close()
        rank = peer.rank
        if peer.role == "watcher":
            self.watchers = {node: other for node, other in self.watchers.items() if other is not peer}
        elif rank is not None and peer.role == "heartbeat":
            self.heartbeats.pop(rank, None)
        elif rank is not None:
            self.points.pop(rank, None)
            if self.detector.records[rank].state != "left":
                self.detector.died(rank, how or self._how_it_ended(rank), now)
                self._deliver()

    def _how_it_ended(self, rank: int) -> str:
        """The process table has it until the process is reaped: the exit code is there before the sockets close."""
        local = self.local.get(rank)
        if local is None:
            return "ended or lost its connection"
        status = process_status(local.pid)
        if status is None or status.started != local.started:
            return "ended"
        if status.exit_code or status.dead:
            return describe_exit(status.exit_code)
        for _ in range(20):  # exiting: the sockets of a process close a moment before it is a zombie
            time.sleep(0.0002)
            status = process_status(local.pid)
            if status is None or status.dead:
                return describe_exit(status.exit_code) if status else "ended"
        return "closed its connection to the coordinator without a goodbye"

    # ---- messages

    def _handle(self, peer: _Peer, message: Any, now: float) -> None:
        match message:
            case ["point", str(group), str(name), int() | float() as deadline_s] if peer.rank is not None:
                self.detector.arrive(peer.rank, now, SyncPoint(group=group, name=name, deadline_s=deadline_s))
            case ["point", str(group), str(name), int() | float() as deadline_s, dict(more)] if peer.rank is not None:
                self.detector.arrive(peer.rank, now, SyncPoint(group=group, name=name, deadline_s=deadline_s, **more))
            case ["heartbeat", str(text), int() | float() as sent] if peer.rank is not None:
                position = parse_position(text, now - sent)
                if position is not None and peer.rank not in self.local:
                    self.detector.heartbeat(peer.rank, position)
                self._send(peer, ["ack"])
            case ["fail", dict(failure)] if peer.rank is not None:
                self.detector.reported(peer.rank, DistributedFailure.from_json(failure), now)
            case ["overdue", str(group), int(count), str(where), float(seconds)] if peer.rank is not None:
                self.detector.overdue(peer.rank, group, count, where, seconds, now)
            case ["bye"] if peer.rank is not None:
                self.detector.left(peer.rank, now)
            case ["state", int(rank), str(state), int(exit_code), int() | float() as stopped_s] if (
                peer.role == "watcher"
            ):
                self._check_state(rank, ProcessStatus(state, 0, exit_code), now - stopped_s, now)
            case ["hello", dict(hello)] if not peer.role:
                self._handshake(peer, hello, now)
            case _:
                raise BadFrame(f"a message was not understood: {str(message)[:80]}")

    def _handshake(self, peer: _Peer, hello: dict[str, Any], now: float) -> None:
        if not hmac.compare_digest(str(hello.get("token", "")), self.rendezvous.token):
            raise BadFrame("a wrong token")
        role, node = hello["role"], str(hello["node"])
        if role == "watcher":
            peer.role = role
            self.watchers[node] = peer
            for rank, (of_node, pid, started, _) in self.nodes.items():
                if of_node == node:
                    self._send(peer, ["watch", rank, pid, started])
            return
        rank = int(hello["rank"])
        roles = self.points if role == "points" else self.heartbeats
        if not 0 <= rank < self.rendezvous.world or rank in roles or role not in ("points", "heartbeat"):
            self._send(peer, ["refused", f"rank {rank} of {self.rendezvous.world} as '{role}' is taken or impossible"])
            raise BadFrame(f"rank {rank} cannot join as '{role}'")
        peer.role, peer.rank = role, rank
        peer.frames.limit = Frames().limit
        roles[rank] = peer
        if role == "points":
            pid, started = int(hello["pid"]), int(hello["started"])
            self.nodes[rank] = (node, pid, started, int(hello["status_page"]))
            if node and node == self.rendezvous.node:
                view = None
                with contextlib.suppress(OSError, ValueError):
                    view = StatusPageReader(pid, int(hello["status_page"]))
                self.local[rank] = _LocalRank(pid, started, view)
            elif node in self.watchers:
                self._send(self.watchers[node], ["watch", rank, pid, started])
            self.detector.joined(rank, now)
        if self.detector.failure is not None:
            self._send(peer, ["failed", self.detector.failure.to_json()])
        else:
            self._send(peer, ["welcome"])

    def _deliver(self) -> None:
        outbox, self.detector.outbox = self.detector.outbox, []
        for ranks, reply in outbox:
            final = reply[0] == "failed" and not reply[1]["recoverable"]
            if final and not self.reported:
                self.reported = True
                self._write_report()
            data = pack(reply)
            for rank in ranks:
                peer = self.points.get(rank)
                if peer is not None:
                    self._send_bytes(peer, data)
                if final and (heartbeat := self.heartbeats.get(rank)) is not None:
                    self._send_bytes(heartbeat, data)

    def _write_report(self) -> None:
        assert self.detector.failure is not None
        try:
            write_report(os.path.join(self.rendezvous.directory, "failure.json"), self.detector.failure)
        except OSError as error:
            print(f"descant coordinator: failure.json could not be written: {error}", file=sys.stderr, flush=True)
        print(f"descant coordinator: {self.detector.failure}", file=sys.stderr, flush=True)

    def _send(self, peer: _Peer, message: Any) -> None:
        self._send_bytes(peer, pack(message))

    def _send_bytes(self, peer: _Peer, data: bytes) -> None:
        if not peer.out:
            try:
                sent = peer.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # its end is read as such
            if sent == len(data):
                return
            data = data[sent:]
            self.epoll.modify(peer.sock, select.EPOLLIN | select.EPOLLOUT)
        peer.out += data

    def _flush(self, peer: _Peer) -> None:
        try:
            peer.out = peer.out[peer.sock.send(peer.out) :]
        except BlockingIOError:
            return
        except OSError:
            peer.out = b""
        if not peer.out:
            self.epoll.modify(peer.sock, select.EPOLLIN)

    # ---- the process table

    def _read_status(self, rank: int) -> Position | None:
        local = self.local.get(rank)
        return local.status_page.read() if local is not None and local.status_page is not None else None

    def _watch(self, now: float) -> None:
        for rank, local in self.local.items():
            if self.detector.records[rank].state in ("left", "dead"):
                continue
            status = process_status(local.pid)
            if status is None or status.started != local.started:
                status = ProcessStatus("X", local.started, -1)
            if status.stopped:
                local.stopped_since = local.stopped_since or now
            else:
                local.stopped_since = None
            self._check_state(rank, status, local.stopped_since or now, now)
        for peer in list(self.peers.values()):
            if not peer.role and now - peer.connected > HELLO_LIMIT_S:
                self._lost(peer, now)

    def _check_state(self, rank: int, status: ProcessStatus, stopped_since: float, now: float) -> None:
        if status.dead:  # also where a child of the rank has kept its sockets open
            self.detector.died(rank, "ended" if status.exit_code < 0 else describe_exit(status.exit_code), now)
        elif status.stopped:
            self.detector.stopped(rank, stopped_since, self.rendezvous.stop_limit_s, now)
        else:
            self.detector.resumed(rank)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # these reach the whole group; it ends with the launcher
        signal.signal(number, signal.SIG_IGN)
    stdin = os.dup(sys.stdin.fileno())
    with os.fdopen(os.dup(stdin), "rb", buffering=0) as first_line:
        config = json.loads(first_line.readline())
    listener = socket.create_server((config["host"], 0), backlog=256)
    rendezvous = Rendezvous(
        host=config["host"],
        port=listener.getsockname()[1],
        token=config["token"],
        world=config["world"],
        directory=config["directory"],
        pid=os.getpid(),
        node=node_id(),
        stop_limit_s=config["stop_limit_s"],
    )
    os.makedirs(rendezvous.directory, exist_ok=True)
    print(rendezvous.to_json(), flush=True)
    _Coordinator(listener, rendezvous).run(stdin)


if __name__ == "__main__":
    main()
