"""The coordinator's client in a rank. There is one primitive, the sync point (``Member.point``): an all-gather with a
name and a deadline. Everything else is made of it.

    with Member.join(rendezvous, rank) as member:
        with member.scope("step", 17):
            ...
            member.point("loaded")                                    # all ranks are here, or all raise why not
            exists = member.rank0_decides("resume", lambda: path.exists())
            with member.scope("save"):
                said = member.all_agree("written", write_my_shard)    # one exit path, whatever fails where

A sync point ends in one of three ways: with every member's data; with a recoverable ``DistributedFailure`` (all members
are there and some brought an error: all raise it, all may go on); or with the run's one final ``DistributedFailure``.

Leaving the ``with`` block by an exception fails all ranks at once. So does dying, being stopped, or coming late.

A member belongs to the thread that joined. A second thread sends heartbeats, receives the failure, and aborts the
process if its own thread has not raised it after ``watchdog_abort_s`` (blocked in a collective that cannot be aborted).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

from descant.distributed.coordinator.process import Rendezvous
from descant.distributed.coordinator.state import WORLD
from descant.distributed.coordinator.status import StatusPage
from descant.distributed.failure import COORDINATOR, DistributedFailure, RankRow, write_report
from descant.distributed.frames import Frames, pack, pack_text, quote, tune
from descant.distributed.process_table import node_id, process_status

HEARTBEAT_S = 0.25
SLICE_S = 0.1
"""Nothing waits longer than this without checking for a failure."""
GRACE_S = 0.4
"""The coordinator reports a missed deadline; a rank without an answer this long after it suspects the coordinator."""
SECONDARY_S = 0.5
"""An error in a collective is usually a peer's death; the coordinator has this long to report whose."""
WATCHDOG_EXIT_CODE = 75
DEFAULT_DEADLINE_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The outcome of an ``all_agree``, by group rank. ``values[i]`` is None where rank i failed.

    ``worst``: "ok", or "retry" when every failure was of a kind that may be retried. (A worse one is raised.)
    """

    worst: Literal["ok", "retry"]
    values: tuple[Any, ...]
    errors: Mapping[int, str] = field(default_factory=dict)


class Member:
    """Use ``join``. Names of points may repeat; put what tells them apart (a step's number) into the scope."""

    def __init__(self, rendezvous: Rendezvous, rank: int, *, watchdog_abort_s: float | None):
        self.rendezvous = rendezvous
        self.rank = rank
        self.world = rendezvous.world
        self.groups: dict[str, tuple[int, ...]] = {WORLD: tuple(range(rendezvous.world))}
        self.status_page = StatusPage()
        self.chains: dict[str, tuple[int, str]] = {}
        """Collective calls since the last point, by group: what the next one compares."""
        self._scopes: list[str] = []
        self._thread = threading.get_ident()
        self._failure: DistributedFailure | None = None
        self._failed = threading.Event()
        self._acknowledged = False
        self._closing = False
        self._watchdog_abort_s = watchdog_abort_s
        self._points = self._connect("points")
        self._points.settimeout(None)  # the kernel keeps the slices: one system call a wait instead of two
        self._points.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(SLICE_S * 1e6)))
        self._frames = Frames()
        self._heartbeat = self._connect("heartbeat")
        self._heartbeat_thread = threading.Thread(target=self._run_heartbeat, name="descant-heartbeat", daemon=True)
        self._heartbeat_thread.start()

    @classmethod
    def join(
        cls,
        rendezvous: Rendezvous,
        rank: int,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        watchdog_abort_s: float | None = 2.0,
    ) -> Member:
        """Returns when every rank has joined. Raises DistributedFailure when one does not, or without a coordinator."""
        member = cls(rendezvous, rank, watchdog_abort_s=watchdog_abort_s)
        try:
            member.point("join", deadline_s=deadline_s)
        except BaseException as error:
            member._end(error)
            raise
        return member

    # ---- the primitive

    def point(
        self,
        name: str,
        *,
        group: str = WORLD,
        data: Any = None,
        error: BaseException | str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        check: str | None = None,
    ) -> list[Any]:
        """Wait until every member of ``group`` is at this name; return what each brought, in the group's order.

        ``data`` is a JSON value. With an ``error`` all raise, recoverably. ``check`` must be the same on all. The wait
        ends ``deadline_s`` after the first arrival whose own deadline runs out, naming who was not there.
        """
        return self._sync(name, group, data=data, error=error, deadline_s=deadline_s, check=check)

    def barrier(self, name: str, *, group: str = WORLD, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._sync(name, group, deadline_s=deadline_s)

    def side_effect(
        self,
        name: str,
        run: Callable[[Callable[[str], None]], T],
        *,
        by: int = 0,
        group: str = WORLD,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> T:
        """The member of group rank ``by`` does something slow in the outside world, outside any collective.

        ``run(progress)`` is called there alone; ``progress("3 of 4 engines")`` is where it is, for all tables. Its
        value (a JSON value) is returned on every member, or its failure raised, recoverably.
        """
        root = self._members(group)[by]
        data, error = None, None
        if self.rank == root:
            self._check_usable()
            where = self.where(name)
            self.status_page.write("in", where)
            try:
                data = _json_value(run(lambda text: self.status_page.write("in", f"{where}: {text}")), where)
            except Exception as caught:
                error = caught
        value: T = self._sync(name, group, data=data, error=error, deadline_s=deadline_s)[by]
        return value

    def rank0_decides(
        self, name: str, decide: Callable[[], T], *, group: str = WORLD, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> T:
        """What the outside world says (a file, a clock, the environment, a random number) is read once, by the first
        member."""
        return self.side_effect(name, lambda progress: decide(), group=group, deadline_s=deadline_s)

    def all_agree(
        self,
        name: str,
        run: Callable[[], Any],
        *,
        retry_on: type[Exception] | tuple[type[Exception], ...] = (),
        group: str = WORLD,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Agreed:
        """Every member runs its part and arrives here, whatever its outcome; the worst one holds for all.

        All well: "ok". Failures of a kind in ``retry_on`` only: "retry", with the errors by rank. Any other failure:
        all members raise the same recoverable DistributedFailure.
        """
        self._check_usable()
        where = self.where(name)
        self.status_page.write("in", where)
        outcome: list[Any]
        error = None
        try:
            outcome = ["ok", _json_value(run(), where)]
        except retry_on as caught:
            outcome = ["retry", f"{type(caught).__name__}: {caught}"]
        except Exception as caught:
            outcome, error = [], caught
        said = self._sync(name, group, data=outcome, error=error, deadline_s=deadline_s)
        errors = {rank: text for rank, (kind, text) in enumerate(said) if kind == "retry"}
        return Agreed(
            worst="retry" if errors else "ok",
            values=tuple(value if kind == "ok" else None for kind, value in said),
            errors=errors,
        )

    def vote(
        self, name: str, yes: bool, *, group: str = WORLD, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> tuple[bool, ...]:
        """The members' votes, by group rank: for local readings of health, which must not raise on one rank alone."""
        return tuple(self._sync(name, group, data=bool(yes), deadline_s=deadline_s))

    @contextlib.contextmanager
    def scope(self, name: str, index: int | None = None) -> Iterator[None]:
        """Names nest: ``step[17]/save/write`` is where a rank is, in every table and message."""
        self._scopes.append(name if index is None else f"{name}[{index}]")
        self.status_page.write("in", "/".join(self._scopes))
        try:
            yield
        finally:
            self._scopes.pop()

    def declare(self, groups: Mapping[str, Sequence[int]], *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """All ranks declare the same table of groups, or all fail. A name is declared once."""
        table = {name: list(ranks) for name, ranks in groups.items()}
        for name, ranks in table.items():
            if name in self.groups:
                raise ValueError(f"group '{name}' is declared already")
            if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.world)):
                raise ValueError(f"group '{name}' has ranks {ranks}, expected distinct ones of 0 to {self.world - 1}")
        text = json.dumps(table)  # in order: the order of creation is part of the agreement
        self._sync("declare groups", WORLD, deadline_s=deadline_s, check=text, groups=table)
        self.groups.update({name: tuple(ranks) for name, ranks in table.items()})

    # ---- for groups of collectives

    @property
    def failure(self) -> DistributedFailure | None:
        """The run's failure, as soon as it is known here. Cheap; from any thread."""
        return self._failure

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            self._raise()

    def check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"rank {self.rank} joined in thread {self._thread} and is used in thread {threading.get_ident()}: "
                "the order of sync points and collectives would be undefined"
            )

    def collective_failed(self, where: str, error: BaseException) -> NoReturn:
        """An error inside a collective: raises the run's failure if one comes soon (a peer's death), else this
        rank's."""
        if self._failed.wait(SECONDARY_S):
            self._raise(error)
        self._report(
            DistributedFailure(failed_ranks=(self.rank,), where=where, cause=f"{type(error).__name__}: {error}")
        )
        self._raise(error)

    def collective_overdue(self, group: str, count: int, where: str, seconds: float) -> NoReturn:
        """The wait has timed out; the coordinator says which ranks were missing."""
        self._send(["overdue", group, count, where, seconds])
        if not self._failed.wait(GRACE_S + SLICE_S):
            self._suspect_coordinator(where, f"said nothing about {where}, overdue after {seconds:.1f} s")
        self._raise()

    # ---- the end

    def close(self) -> None:
        """Leave: from now on no rank may wait for this one."""
        self._end(None)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._closing:
            return
        if error is not None and self._failure is None:
            if isinstance(error, DistributedFailure):
                self._report(error)
            else:
                where = "/".join(self._scopes) or "outside any scope"
                text = f"rank {self.rank} raised {type(error).__name__}: {error}"
                self._report(DistributedFailure(failed_ranks=(self.rank,), where=self._last_where(where), cause=text))
        self._closing = True
        self._acknowledged = True
        if self._failure is None:
            self._send(["bye"])
        for sock in (self._points, self._heartbeat):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)  # what was sent arrives; the heartbeat thread wakes up
        self._heartbeat_thread.join(1.0)
        for sock in (self._points, self._heartbeat):
            sock.close()
        if not self._heartbeat_thread.is_alive():
            self.status_page.close()

    # ---- inside

    def _sync(
        self,
        name: str,
        group: str,
        *,
        data: Any = None,
        error: BaseException | str | None = None,
        deadline_s: float,
        check: str | None = None,
        groups: Mapping[str, Sequence[int]] | None = None,
    ) -> list[Any]:
        if threading.get_ident() != self._thread:
            self.check_thread()
        members = self.groups.get(group)
        if members is None or self.rank not in members:
            self._members(group)
        if self._failure is not None:
            self._raise()
        if not 0 < deadline_s < 1e8:
            raise ValueError(f"point '{name}' has deadline_s {deadline_s}, expected a finite number of seconds above 0")
        where = self.where(name)
        self.status_page.write("at", where)
        if data is None and error is None and check is None and not self.chains and groups is None:
            request = f'["point",{quote(group)},{quote(where)},{deadline_s}]'
        else:
            more: dict[str, Any] = {}
            if data is not None:
                more["data"] = _json_value(data, where)
            if error is not None:
                more["error"] = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            if check is not None:
                more["check"] = check
            if self.chains:
                more["chains"] = self.chains
            if groups is not None:
                more["groups"] = groups
            request = f'["point",{quote(group)},{quote(where)},{deadline_s},{json.dumps(more)}]'
        with contextlib.suppress(OSError):  # the next read raises
            self._points.sendall(pack_text(request))
        reply = self._receive_reply(where, deadline_s)
        if reply[0] == "ok":
            self.chains.clear()
            self.status_page.write("past", where)
            return reply[1] if len(reply) > 1 else [None] * len(self.groups[group])
        failure = DistributedFailure.from_json(reply[1])
        if failure.recoverable:
            self.chains.clear()
            self.status_page.write("past", where)
            raise failure
        self._set_failure(failure)
        self._raise()

    def _receive_reply(self, where: str, deadline_s: float) -> list[Any]:
        limit = 0.0
        while True:
            try:
                data = self._points.recv(65536)
            except BlockingIOError:
                if self._failure is not None:
                    self._raise()
                now = time.monotonic()
                limit = limit or now - SLICE_S + deadline_s + GRACE_S
                if now >= limit:
                    self._suspect_coordinator(where, f"did not answer within {deadline_s + GRACE_S:.1f} s")
                    self._raise()
                continue
            except OSError:
                data = b""
            if not data:
                if not self._failed.wait(SLICE_S):
                    self._suspect_coordinator(where, "died")
                self._raise()
            for message in self._frames.feed(data):
                return list(message)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the next read raises
            self._points.sendall(pack(message))

    def _members(self, group: str) -> tuple[int, ...]:
        members = self.groups.get(group)
        if members is None:
            raise ValueError(f"group '{group}' was never declared; there are {sorted(self.groups)}")
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is no member of group '{group}' {list(members)}")
        return members

    def where(self, name: str) -> str:
        """``name`` within the open scopes."""
        return "/".join([*self._scopes, name]) if self._scopes else name

    def _last_where(self, default: str) -> str:
        """The status page's: scopes have been left by the exception on its way here."""
        with contextlib.suppress(ValueError, IndexError):
            return str(json.loads(self.status_page.text)[1])
        return default

    def _check_usable(self) -> None:
        self.check_thread()
        self.raise_if_failed()

    def _report(self, failure: DistributedFailure) -> None:
        """This rank's failure becomes the run's, unless another came first. Without a coordinator it stays this
        rank's."""
        self._send(["fail", failure.to_json()])
        if not self._failed.wait(GRACE_S):
            self._set_failure(failure, report=True)

    def _set_failure(self, failure: DistributedFailure, *, report: bool = False) -> None:
        """The first one stays."""
        if self._failure is not None:
            return
        if report:
            with contextlib.suppress(OSError):
                path = os.path.join(self.rendezvous.directory, f"failure.rank{self.rank}.json")
                write_report(path, failure)
        self._failure = failure
        self._failed.set()

    def _suspect_coordinator(self, where: str, cause: str) -> None:
        with contextlib.suppress(ValueError, IndexError):
            _, where, since, calls = json.loads(self.status_page.text)
            row = RankRow(
                rank=self.rank,
                state="running",
                where=where,
                since_s=round(time.monotonic() - since, 3),
                last=tuple(f"call {call[0]}#{call[1]} {call[3]}" for call in calls),
            )
            failure = DistributedFailure(
                failed_ranks=(COORDINATOR,), where=where, cause=f"the coordinator {cause}", table=(row,)
            )
            self._set_failure(failure, report=True)

    def _raise(self, cause: BaseException | None = None) -> NoReturn:
        assert self._failure is not None
        self._acknowledged = True
        raise DistributedFailure.from_json(self._failure.to_json()) from cause

    def _connect(self, role: str) -> socket.socket:
        status = process_status(os.getpid())
        hello = {
            "token": self.rendezvous.token,
            "role": role,
            "rank": self.rank,
            "pid": os.getpid(),
            "started": status.started if status else 0,
            "node": node_id(),
            "status_page": self.status_page.descriptor,
        }
        try:
            sock = socket.create_connection((self.rendezvous.host, self.rendezvous.port), timeout=10.0)
            tune(sock)
            sock.sendall(pack(["hello", hello]))
            frames = Frames()
            replies: list[Any] = []
            while not replies:
                data = sock.recv(65536)
                if not data:
                    raise OSError("the coordinator closed the connection")
                replies.extend(frames.feed(data))
        except OSError as error:
            cause = f"rank {self.rank} could not join at {self.rendezvous.host}:{self.rendezvous.port}: {error}"
            raise DistributedFailure(failed_ranks=(COORDINATOR,), where="join", cause=cause) from error
        match replies[0]:
            case ["failed", dict(failure)]:
                raise DistributedFailure.from_json(failure)
            case ["refused", str(why)]:
                raise DistributedFailure(failed_ranks=(self.rank,), where="join", cause=why)
        return sock

    # ---- the heartbeat thread

    def _run_heartbeat(self) -> None:
        """Until the end. Never raises; what it finds is in ``_failure``."""
        sock, frames = self._heartbeat, Frames()
        watches = self.rendezvous.node != "" and self.rendezvous.node == node_id()
        stopped_since: float | None = None
        while not self._closing:
            try:
                sock.send(pack(["heartbeat", self.status_page.text, time.monotonic()]), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:
                break
            now = time.monotonic()
            status = process_status(self.rendezvous.pid) if watches else None
            if status is not None and status.stopped:
                stopped_since = stopped_since or now
                if now - stopped_since >= self.rendezvous.stop_limit_s:
                    self._suspect_coordinator("", f"has been stopped by a signal for {now - stopped_since:.1f} s")
                    break
            else:
                stopped_since = None
            try:
                ready, _, _ = select.select([sock], [], [], HEARTBEAT_S)
                while ready and not self._failed.is_set():
                    data = sock.recv(65536)
                    if not data:
                        if not self._closing and not self._failed.is_set():
                            self._suspect_coordinator("", "died")
                        break
                    for message in frames.feed(data):
                        if message[0] == "failed":
                            self._set_failure(DistributedFailure.from_json(message[1]))
                    if time.monotonic() - now >= HEARTBEAT_S:
                        break
                    ready, _, _ = select.select([sock], [], [], HEARTBEAT_S - (time.monotonic() - now))
            except (OSError, ValueError):
                break
            if self._failed.is_set():
                break
        if not self._closing and not self._failed.is_set():
            self._suspect_coordinator("", "died")
        self._watchdog_abort()

    def _watchdog_abort(self) -> None:
        if self._watchdog_abort_s is None or self._failure is None:
            return
        limit = time.monotonic() + self._watchdog_abort_s
        while time.monotonic() < limit:
            if self._acknowledged or self._closing:
                return
            time.sleep(0.05)
        with contextlib.suppress(OSError):
            path = os.path.join(self.rendezvous.directory, f"failure.rank{self.rank}.json")
            write_report(path, self._failure)
        print(f"descant rank {self.rank}: blocked, and has to end: {self._failure}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(WATCHDOG_EXIT_CODE)


def _json_value(value: Any, where: str) -> Any:
    """What every rank gets, the one that made it included. Raises TypeError for anything but a JSON value."""
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        same = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} got {type(value).__name__}, expected a JSON value: {error}") from None
    if same != value:
        raise TypeError(f"{where} got {value!r}, expected a JSON value; it would arrive as {same!r}")
    return same
