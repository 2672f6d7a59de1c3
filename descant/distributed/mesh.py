"""Groups of ranks and the collectives on them. The only file that calls ``torch.distributed``.

A ``Mesh`` is made of one declared table, ``name → ranks``; after all ranks have agreed on the table, one loop creates
its groups in table order on every rank. There is no default group here: a collective is a method of its group.

Every collective has a tag and enters the group's hash chain of call identities, which is compared at the next sync
point: calls that are swapped, skipped or differ are found there, at the latest, with the first one that differs. Every
wait is cut into slices of 100 ms, and leaves with the failure when there is one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from descant.distributed.coordinator.client import SLICE_S, Member
from descant.distributed.coordinator.status import Call

_SLICE = timedelta(seconds=SLICE_S)
ReduceOp = Literal["sum", "max", "min"]
Backend = Literal["gloo", "nccl"]
_REDUCE: Mapping[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Group:
    """One row of the table, as this rank sees it. Roots and indices are ranks within the group.

    Bound to the thread that joined. ``ranks[i]`` is the world rank of its member i; ``rank`` is this process's i.
    """

    def __init__(
        self, name: str, member: Member, process_group: dist.ProcessGroup, mesh: Mesh, *, stream_ordered: bool
    ):
        self.name = name
        self.stream_ordered = stream_ordered
        """Its collectives run in order with the device's other work (NCCL): the call does not wait for them."""
        self.ranks = member.groups[name]
        self.rank = self.ranks.index(member.rank)
        self.process_group = process_group
        """For ``DeviceMesh.from_group`` and the like: calls that go around this class are in no chain."""
        self._member = member
        self._mesh = mesh
        self._count = 0
        self._digest = b""
        self._newest: dist.Work | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(
        self, tensor: torch.Tensor, *, tag: str, op: ReduceOp = "sum", deadline_s: float | None = None
    ) -> None:
        """In place; the same shape and dtype everywhere."""
        identity = self._enter("all_reduce", tensor, op, tag)
        self._run(
            lambda: dist.all_reduce(tensor, op=_REDUCE[op], group=self.process_group, async_op=True),
            identity,
            deadline_s,
        )

    def broadcast(self, tensor: torch.Tensor, *, root: int, tag: str, deadline_s: float | None = None) -> None:
        """In place, from the member of group rank ``root``."""
        if not 0 <= root < self.size:
            raise ValueError(
                f"broadcast '{tag}' has root {root}, expected a rank within group '{self.name}' of {self.size}"
            )
        identity = self._enter("broadcast", tensor, f"root={root}", tag)
        self._run(
            lambda: dist.broadcast(tensor, group_src=root, group=self.process_group, async_op=True),
            identity,
            deadline_s,
        )

    def all_gather(self, tensor: torch.Tensor, *, tag: str, deadline_s: float | None = None) -> list[torch.Tensor]:
        """The members' tensors, by group rank; the same shape and dtype everywhere."""
        gathered = [torch.empty_like(tensor) for _ in self.ranks]
        identity = self._enter("all_gather", tensor, "", tag)
        self._run(
            lambda: dist.all_gather(gathered, tensor, group=self.process_group, async_op=True), identity, deadline_s
        )
        return gathered

    def settle(self, *, deadline_s: float | None = None) -> None:
        """Wait, in slices, until the device has done this group's collectives (NCCL runs them after the call).

        Before a blocking read from the device: that cannot raise the failure; only the watchdog ends it.
        """
        work = self._newest
        if work is None:
            return
        began = time.monotonic()
        limit = deadline_s or self._mesh.deadline_s
        while not work.is_completed():
            self._member.raise_if_failed()
            waited = time.monotonic() - began
            if waited > limit:
                self._member.collective_overdue(self.name, self._count, "settling the device's collectives", waited)
            time.sleep(0.0005)
        self._newest = None

    def _enter(self, op: str, tensor: torch.Tensor, detail: str, tag: str) -> str:
        """The call's identity, chained and on the status page, before anything can block."""
        member = self._member
        member.check_thread()
        member.raise_if_failed()
        if not tag:
            raise ValueError(f"{op} on group '{self.name}' has an empty tag")
        dtype = str(tensor.dtype).removeprefix("torch.")
        identity = f"{member.where(tag)} {op} {list(tensor.shape)} {dtype} {detail}".rstrip()
        if self._mesh.check_every_call:
            member.point(f"{tag} of {self.name}", group=self.name, check=identity, deadline_s=self._mesh.deadline_s)
        self._count += 1
        self._digest = hashlib.blake2b(self._digest + identity.encode(), digest_size=8).digest()
        digest = self._digest.hex()
        member.chains[self.name] = (self._count, digest)
        member.status_page.call(Call(self.name, self._count, digest, identity))
        return identity

    def _run(self, issue: Any, identity: str, deadline_s: float | None) -> None:
        try:
            work = issue()
        except Exception as error:
            self._member.collective_failed(identity, error)
        if self.stream_ordered:
            work.wait()  # the stream waits, not this thread
            self._newest = work
        else:
            self._wait(work, identity, deadline_s or self._mesh.deadline_s)
        self._member.status_page.write("past", identity)

    def _wait(self, work: dist.Work, identity: str, limit: float) -> None:
        began = time.monotonic()
        while True:
            # Asked before: a call may end well between the end of a slice and the question.
            completed = work.is_completed()
            try:
                work.wait(_SLICE)
                return
            except Exception as error:
                if completed:  # it failed; otherwise only the slice has ended, or the next one tells
                    self._member.collective_failed(identity, error)
            self._member.raise_if_failed()
            waited = time.monotonic() - began
            if waited >= limit:
                self._member.collective_overdue(self.name, self._count, identity, waited)


class Mesh:
    """All groups of a run, on one rank. A context manager: leaving it well takes the groups down."""

    def __init__(self, member: Member, deadline_s: float, *, check_every_call: bool):
        self.member = member
        self.deadline_s = deadline_s
        self.check_every_call = check_every_call
        self.groups: dict[str, Group] = {}
        """Those that this rank is in."""
        self._store: dist.Store | None = None

    @classmethod
    def create(
        cls,
        member: Member,
        table: Mapping[str, Sequence[int]],
        *,
        backends: Mapping[str, Backend] | None = None,
        host: str = "127.0.0.1",
        deadline_s: float = 60.0,
        check_every_call: bool = False,
    ) -> Mesh:
        """On every rank with the same ``table``. ``backends``: of groups that are not gloo's, by name. ``host`` is rank
        0's address as the others reach it.

        ``deadline_s`` bounds the creation and each collective. ``check_every_call`` compares every call before it is
        made, for a round trip to the coordinator each. With "nccl" the current device is this rank's. Raises
        DistributedFailure, the same everywhere; where the creation itself is stuck the process ends
        (``watchdog_abort_s`` of the member).
        """
        with member.scope("mesh"):
            member.declare(table, deadline_s=deadline_s)
            timeout = timedelta(seconds=deadline_s + 30)  # torch's own; ours come first
            server = None

            def listen() -> int:
                nonlocal server
                server = dist.TCPStore(host, 0, None, is_master=True, wait_for_workers=False, timeout=timeout)
                return server.port

            port = member.rank0_decides("store", listen, deadline_s=deadline_s)
            mesh = cls(member, deadline_s, check_every_call=check_every_call)
            try:
                mesh._store = server or dist.TCPStore(host, port, None, is_master=False, timeout=timeout)
                mesh._make_groups(table, backends or {}, timeout)
            except Exception as error:  # a peer's death, as torch puts it
                member.collective_failed(member.where("creation of groups"), error)
            member.barrier("created", deadline_s=deadline_s)
        return mesh

    def _make_groups(
        self, table: Mapping[str, Sequence[int]], backends: Mapping[str, Backend], timeout: timedelta
    ) -> None:
        # Torch makes groups out of a default group only. It is never handed out, and never computed with.
        dist.init_process_group(
            "gloo", store=self._store, rank=self.member.rank, world_size=self.member.world, timeout=timeout
        )
        for name, ranks in table.items():
            with self.member.scope(name):
                backend = backends.get(name, "gloo")
                made = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)
                if self.member.rank in ranks:
                    self.groups[name] = Group(name, self.member, made, self, stream_ordered=backend == "nccl")

    def close(self) -> None:
        """Together on all ranks, when all is well. After a failure groups are left to the end of the process."""
        self.groups.clear()
        dist.destroy_process_group()
        self._store = None

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
