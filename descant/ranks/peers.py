"""A rank's part among the ranks of its replica: what all of them hear, tell, add up and agree on.

A replica of one rank has nobody to agree with: ``Peers`` itself is that rank's, and does nothing. With more there are
a referee and a mesh: a control group on the CPU, for turns and their outcomes, and two on the ranks' devices, for
gradient rows and for the base's layers, if they are sharded.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from descant.dist.failure import DistributedFailure
from descant.dist.mesh import Mesh
from descant.dist.point import Member
from descant.dist.referee import Invitation
from descant.dist.shard import shard_layers
from descant.errors import ServerError
from descant.ranks.settings import RankSettings

HEAD_BYTES = 1 << 14
"""What is said in one collective; the rest of something longer is a second one."""
LENGTH_BYTES = 8


class Peers:
    """Of a rank that is alone."""

    rank = 0
    num_ranks = 1
    sharded = False
    """Whether the ranks hold the base's layers in parts: then all must make every pass together."""

    def ready(self) -> None:
        """Returns when every rank has got here."""

    def least(self, what: str, number: int) -> int:
        """The smallest of the ranks' numbers: what each of them finds on its own machine differs."""
        return number

    def add_up(self, row: torch.Tensor) -> None:
        """``row`` becomes the sum of all ranks' rows, the same bits on each."""

    def shard(self, root: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Leaves each rank its part of every layer's parameters. ``root`` calls them."""
        raise ServerError("a base is sharded over several ranks, and there is one")

    def in_turns(self, what: str, *, at_once: int) -> AbstractContextManager[None]:
        """A block that at most ``at_once`` ranks are in (the same number on all of them)."""
        return nullcontext()

    def tell(self, what: object) -> None:
        """Rank 0's, to the others: what they ``hear``."""

    def hear(self) -> Any:
        """What rank 0 tells."""
        raise ServerError("there is nobody to hear")

    def gather(self, what: str, mine: object) -> list[Any]:
        """What each rank brings, by rank."""
        return [mine]

    def check(self) -> None:
        """Compares the collectives that the ranks have made since the last time."""

    def turn(self, kind: str, number: int) -> AbstractContextManager[None]:
        """Where the ranks are, in every message about them."""
        return nullcontext()

    def over(self, what: str, error: Exception) -> DistributedFailure:
        """To be raised for what went wrong here and maybe nowhere else, and cannot be undone."""
        cause = f"{what} failed there alone: {error or type(error).__name__}"
        return DistributedFailure(culprits=[self.rank], where=what, cause=cause)


class _MeshPeers(Peers):
    def __init__(self, member: Member, mesh: Mesh, settings: RankSettings):
        self.rank, self.num_ranks = member.rank, member.world
        self._member = member
        self._control, self._rows, self._shard = (mesh.groups[name] for name in ("control", "rows", "shard"))
        self._start_timeout_s, self._turn_timeout_s = settings.start_timeout_s, settings.turn_timeout_s

    def ready(self) -> None:
        self._member.barrier("ready", deadline_s=self._start_timeout_s)

    def least(self, what: str, number: int) -> int:
        return min(self._member.point(what, data=int(number), deadline_s=self._start_timeout_s))

    def add_up(self, row: torch.Tensor) -> None:
        self._rows.all_reduce(row, tag="row")
        self._rows.settle()

    def shard(self, root: nn.Module, layers: Sequence[nn.Module]) -> None:
        shard_layers(root, layers, self._shard)
        self.sharded = True

    @contextmanager
    def in_turns(self, what: str, *, at_once: int) -> Iterator[None]:
        num_turns, own = -(-self.num_ranks // at_once), self.rank // at_once
        for turn in range(num_turns):
            if turn == own:
                yield
            self._member.barrier(f"{what}, turn {turn + 1} of {num_turns}", deadline_s=self._start_timeout_s)

    def tell(self, what: object) -> None:
        body = pickle.dumps(what, protocol=5)
        self._control.broadcast(_head(body), root=0, tag="turn")
        if len(body) > HEAD_BYTES - LENGTH_BYTES:
            self._control.broadcast(_rest(body, len(body)), root=0, tag="the turn's rest")

    def hear(self) -> Any:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        self._control.broadcast(head, root=0, tag="turn")
        body, length = _opened(head)
        if length > len(body):
            rest = torch.empty(length - len(body), dtype=torch.uint8)
            self._control.broadcast(rest, root=0, tag="the turn's rest")
            body += rest.numpy().tobytes()
        return pickle.loads(body)

    def gather(self, what: str, mine: object) -> list[Any]:
        body = pickle.dumps(mine, protocol=5)
        heads = [_opened(head) for head in self._control.all_gather(_head(body), tag=what)]
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


def _opened(head: torch.Tensor) -> tuple[bytes, int]:
    """(what is in it, the length of all)"""
    raw = head.numpy().tobytes()
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    return raw[LENGTH_BYTES : LENGTH_BYTES + length], length


@contextmanager
def joined(settings: RankSettings, *, rank: int, invitation: Invitation | None, host: str) -> Iterator[Peers]:
    """For as long as the block lasts. Leaving it by an exception tells the others who failed. ``host``: rank 0's
    machine. Raises ``DistributedFailure``."""
    if invitation is None:
        yield Peers()
        return
    everybody = list(range(invitation.world))
    on_cuda = settings.device != "cpu" and torch.cuda.is_available()
    backend: Literal["gloo", "nccl"] = "nccl" if on_cuda else "gloo"
    with (
        Member.join(invitation, rank, deadline_s=settings.start_timeout_s) as member,
        Mesh.create(
            member,
            {"control": everybody, "rows": everybody, "shard": everybody},
            backends={"rows": backend, "shard": backend},
            host=host,
            deadline_s=settings.turn_timeout_s,
        ) as mesh,
    ):
        yield _MeshPeers(member, mesh, settings)
