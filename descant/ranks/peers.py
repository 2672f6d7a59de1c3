"""A rank's collectives with the other ranks of its replica.

For a replica of one rank ``Peers`` itself is used, and does nothing. With more there are a coordinator and a mesh: a
control group on the CPU, for turns and their outcomes, and two on the ranks' devices, for gradient rows and for the
base's layers, if they are sharded.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from descant.distributed.coordinator.client import Member
from descant.distributed.coordinator.process import Rendezvous
from descant.distributed.failure import DistributedFailure
from descant.distributed.fsdp import shard_layers
from descant.distributed.mesh import Mesh
from descant.errors import ServerError
from descant.ranks.settings import RankSettings

HEAD_BYTES = 1 << 14
"""What is said in one collective; the rest of something longer is a second one."""
LENGTH_BYTES = 8


class Peers:
    """Of a replica of one rank."""

    rank = 0
    num_ranks = 1
    sharded = False
    """Whether the ranks hold the base's layers in parts: then all must make every pass together."""

    def ready(self) -> None:
        """Returns when every rank has got here."""

    def all_reduce_min(self, what: str, number: int) -> int:
        """The smallest of the ranks' numbers, which differ by what each finds on its own machine."""
        return number

    def all_reduce_sum(self, row: torch.Tensor) -> None:
        """``row`` becomes the sum of all ranks' rows, the same bits on each."""

    def shard(self, root: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Leaves each rank its part of every layer's parameters. ``root`` calls them."""
        raise ServerError("a base is sharded over several ranks, and there is one")

    def staggered(self, what: str, *, at_once: int) -> AbstractContextManager[None]:
        """A block that at most ``at_once`` ranks are in (the same number on all of them)."""
        return nullcontext()

    def broadcast(self, what: object) -> None:
        """Rank 0's, to the others: what they ``receive``."""

    def receive(self) -> Any:
        """What rank 0 has broadcast."""
        raise ServerError("there is no other rank to receive from")

    def gather(self, what: str, mine: object) -> list[Any]:
        """An all-gather: each rank's object, by rank."""
        return [mine]

    def check(self) -> None:
        """Compares the collectives that the ranks have made since the last time."""

    def turn(self, kind: str, number: int) -> AbstractContextManager[None]:
        """The scope of the ranks' positions, in every failure."""
        return nullcontext()

    def failed_here(self, what: str, error: Exception) -> Exception:
        """The error to raise for what failed here, maybe on no other rank, and cannot be undone: the end of a replica
        of several ranks, ``error`` itself for one rank."""
        if self.num_ranks == 1:
            return error
        cause = f"{what} failed there alone: {error or type(error).__name__}"
        return DistributedFailure(failed_ranks=[self.rank], where=what, cause=cause)


class _MeshPeers(Peers):
    def __init__(self, member: Member, mesh: Mesh, settings: RankSettings):
        self.rank, self.num_ranks = member.rank, member.world
        self._member = member
        self._control, self._rows, self._shard = (mesh.groups[name] for name in ("control", "rows", "shard"))
        self._start_timeout_s, self._turn_timeout_s = settings.start_timeout_s, settings.turn_timeout_s

    def ready(self) -> None:
        self._member.barrier("ready", deadline_s=self._start_timeout_s)

    def all_reduce_min(self, what: str, number: int) -> int:
        return min(self._member.point(what, data=int(number), deadline_s=self._start_timeout_s))

    def all_reduce_sum(self, row: torch.Tensor) -> None:
        self._rows.all_reduce(row, tag="row")
        self._rows.settle()

    def shard(self, root: nn.Module, layers: Sequence[nn.Module]) -> None:
        shard_layers(root, layers, self._shard)
        self.sharded = True

    @contextmanager
    def staggered(self, what: str, *, at_once: int) -> Iterator[None]:
        num_turns, own = -(-self.num_ranks // at_once), self.rank // at_once
        for turn in range(num_turns):
            if turn == own:
                yield
            self._member.barrier(f"{what}, turn {turn + 1} of {num_turns}", deadline_s=self._start_timeout_s)

    def broadcast(self, what: object) -> None:
        body = pickle.dumps(what, protocol=5)
        self._control.broadcast(_head(body), root=0, tag="turn")
        if len(body) > HEAD_BYTES - LENGTH_BYTES:
            self._control.broadcast(_rest(body, len(body)), root=0, tag="the turn's rest")

    def receive(self) -> Any:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        self._control.broadcast(head, root=0, tag="turn")
        body, length = _unpack_head(head)
        if length > len(body):
            rest = torch.empty(length - len(body), dtype=torch.uint8)
            self._control.broadcast(rest, root=0, tag="the turn's rest")
            body += rest.numpy().tobytes()
        return pickle.loads(body)

    def gather(self, what: str, mine: object) -> list[Any]:
        body = pickle.dumps(mine, protocol=5)
        heads = [_unpack_head(head) for head in self._control.all_gather(_head(body), tag=what)]
        bodies, longest = [head for head, _ in heads], max(length for _, length in heads)
        if longest > HEAD_BYTES - LENGTH_BYTES:
            rests = self._control.all_gather(_rest(body, longest), tag=f"the rest of {what}")
            bodies = [
                head + rest.numpy().tobytes()[: length - len(head)]
                for (head, length), rest in zip(heads, rests, strict=True)
            ]
        return [pickle.loads(body) for body in bodies]

    def check(self) -> None:
        self._member.barrier("turn's end", deadline_s=self._turn_timeout_s)

    def turn(self, kind: str, number: int) -> AbstractContextManager[None]:
        return self._member.scope(kind, number)


def _head(body: bytes) -> torch.Tensor:
    """uint8 [HEAD_BYTES]: the length of all, and as much of it as there is room for."""
    head = bytearray(HEAD_BYTES)
    head[:LENGTH_BYTES] = len(body).to_bytes(LENGTH_BYTES, "little")
    first = body[: HEAD_BYTES - LENGTH_BYTES]
    head[LENGTH_BYTES : LENGTH_BYTES + len(first)] = first
    return torch.frombuffer(head, dtype=torch.uint8)


def _rest(body: bytes, longest: int) -> torch.Tensor:
    """What the head has no room for, filled up to what the longest needs."""
    rest = bytearray(body[HEAD_BYTES - LENGTH_BYTES :])
    rest.extend(bytes(longest - (HEAD_BYTES - LENGTH_BYTES) - len(rest)))
    return torch.frombuffer(rest, dtype=torch.uint8)


def _unpack_head(head: torch.Tensor) -> tuple[bytes, int]:
    """(what is in it, the length of all)"""
    raw = head.numpy().tobytes()
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    return raw[LENGTH_BYTES : LENGTH_BYTES + length], length


@contextmanager
def join_peers(settings: RankSettings, *, rank: int, rendezvous: Rendezvous | None, host: str) -> Iterator[Peers]:
    """For as long as the block lasts. Leaving it by an exception fails all ranks. ``host``: rank 0's machine. Raises
    ``DistributedFailure``."""
    if rendezvous is None:
        yield Peers()
        return
    all_ranks = list(range(rendezvous.world))
    on_cuda = settings.device != "cpu" and torch.cuda.is_available()
    backend: Literal["gloo", "nccl"] = "nccl" if on_cuda else "gloo"
    with (
        Member.join(rendezvous, rank, deadline_s=settings.start_timeout_s) as member,
        Mesh.create(
            member,
            {"control": all_ranks, "rows": all_ranks, "shard": all_ranks},
            backends={"rows": backend, "shard": backend},
            host=host,
            deadline_s=settings.turn_timeout_s,
        ) as mesh,
    ):
        yield _MeshPeers(member, mesh, settings)
