"""The process table of a machine without the coordinator: ``watch(rendezvous)`` in that machine's launcher.

Reports to the coordinator which ranks there are stopped or dead. Blocks until the coordinator is gone; run it in a
thread of a process that is no rank.
"""

from __future__ import annotations

import select
import socket
import time

from descant.distributed.coordinator.process import TICK_S, Rendezvous
from descant.distributed.frames import Frames, pack, tune
from descant.distributed.process_table import node_id, process_status


def watch(rendezvous: Rendezvous, *, node: str | None = None, connect_s: float = 30.0) -> None:
    """Raises OSError if the coordinator cannot be reached within ``connect_s``."""
    ranks: dict[int, tuple[int, int]] = {}
    stopped: dict[int, float] = {}
    with socket.create_connection((rendezvous.host, rendezvous.port), timeout=connect_s) as sock:
        tune(sock)
        sock.sendall(pack(["hello", {"token": rendezvous.token, "role": "watcher", "node": node or node_id()}]))
        frames = Frames()
        while True:
            ready, _, _ = select.select([sock], [], [], TICK_S)
            try:
                if ready:
                    data = sock.recv(65536)
                    if not data:
                        return
                    for message in frames.feed(data):
                        _, rank, pid, started = message
                        ranks[rank] = pid, started
                now = time.monotonic()
                for rank, (pid, started) in list(ranks.items()):
                    status = process_status(pid)
                    if status is None or status.started != started:
                        sock.sendall(pack(["state", rank, "X", -1, 0.0]))
                        del ranks[rank]
                    elif status.dead:
                        sock.sendall(pack(["state", rank, status.state, status.exit_code, 0.0]))
                        del ranks[rank]
                    elif status.stopped:
                        since = stopped.setdefault(rank, now)
                        sock.sendall(pack(["state", rank, "T", 0, now - since]))
                    elif stopped.pop(rank, None) is not None:
                        sock.sendall(pack(["state", rank, status.state, 0, 0.0]))
            except OSError:
                return
