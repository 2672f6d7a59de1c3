"""Ranks of a replica as threads of one process: what they broadcast, gather and add up goes through shared lists."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import torch

from descant.ranks.peers import Peers

DEADLINE_S = 60.0


class ThreadPeers(Peers):
    """One of ``among(n)``. What is said is pickled, as between processes."""

    def __init__(self, rank: int, num_ranks: int, barrier: threading.Barrier, said: list[bytes]):
        self.rank, self.num_ranks = rank, num_ranks
        self._barrier, self._said = barrier, said

    @classmethod
    def among(cls, num_ranks: int) -> list[ThreadPeers]:
        barrier = threading.Barrier(num_ranks, timeout=DEADLINE_S)
        said = [b""] * num_ranks
        return [cls(rank, num_ranks, barrier, said) for rank in range(num_ranks)]

    def gather(self, what: str, mine: object) -> list[Any]:
        self._said[self.rank] = pickle.dumps(mine, protocol=5)
        self._barrier.wait()
        everything = [pickle.loads(body) for body in self._said]
        self._barrier.wait()
        return everything

    def ready(self) -> None:
        self.gather("ready", None)

    def all_reduce_min(self, what: str, number: int) -> int:
        return min(self.gather(what, number))

    def all_reduce_sum(self, row: torch.Tensor) -> None:
        row.copy_(sum(self.gather("row", row.clone())))

    def broadcast(self, what: object) -> None:
        self.gather("op", what)

    def receive(self) -> Any:
        return self.gather("op", None)[0]

    def check(self) -> None:
        self.gather("check", None)
