"""The coordinator's failure detector, without sockets, processes or a clock: which rank is where, and what is wrong.

``now`` is an argument everywhere (monotonic seconds), so that the same code runs under a virtual clock. What it wants
sent is in ``outbox``; the first failure found is ``failure``, once and for good.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from descant.distributed.coordinator.status import Call, Position
from descant.distributed.failure import DistributedFailure, RankRow, RankState, name_ranks

WORLD = "world"
SETTLE_S = 0.25
"""How long a mismatch waits for the other members, so that the odd one out is named and not just two that differ."""
STUCK_S = 0.3
"""A member in a collective is compared with those that wait for it at a sync point after this long."""
LAST_OPERATIONS = 8

ReadStatus = Callable[[int], Position | None]


@dataclass(slots=True, kw_only=True)
class SyncPoint:
    """A rank's arrival at a sync point. ``check`` must be the same on all members. ``chains`` holds the groups whose
    collectives were called since the last one: ``group → (count, digest)``. ``groups`` declares groups once the round
    is complete."""

    group: str
    name: str
    deadline_s: float
    data: Any = None
    error: str | None = None
    check: str | None = None
    chains: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(slots=True)
class RankRecord:
    """What is known of a rank besides its status page."""

    rank: int
    state: RankState = "absent"
    position: Position | None = None
    last: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=LAST_OPERATIONS))
    chains: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(slots=True)
class Round:
    """One sync point of a group, from its first arrival on."""

    group: str
    members: tuple[int, ...]
    opened: float
    expires: float
    arrivals: dict[int, SyncPoint] = field(default_factory=dict)
    mismatched: bool = False
    settles: float | None = None

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.arrivals]


class FailureDetector:
    """One run of ``world`` ranks. ``read_status(rank)``: a rank's position by its status page, None if there is
    none to read."""

    def __init__(self, world: int, read_status: ReadStatus = lambda rank: None):
        self.world = world
        self.groups: dict[str, tuple[int, ...]] = {WORLD: tuple(range(world))}
        self.records = [RankRecord(rank) for rank in range(world)]
        self.rounds: dict[str, Round] = {}
        self.failure: DistributedFailure | None = None
        self.outbox: list[tuple[Iterable[int], Any]] = []
        """(ranks, reply): ``["ok", data by member or None]`` or ``["failed", failure]``."""
        self._read_status = read_status
        self._unchecked: set[str] = set()

    # ---- what happens to a rank

    def joined(self, rank: int, now: float) -> None:
        self.records[rank].state = "running"
        self.records[rank].position = Position("past", "joining", now)

    def arrive(self, rank: int, now: float, point: SyncPoint) -> None:
        if self.failure is not None:
            self.outbox.append(((rank,), ["failed", self.failure.to_json()]))
            return
        record = self.records[rank]
        record.position = Position("at", point.name, now)
        round_ = self.rounds.get(point.group)
        if round_ is None:
            members = self.groups.get(point.group)
            if members is None or rank not in members:
                has = "does not exist" if members is None else f"has ranks {list(members)}"
                self.report_failure(
                    [rank], point.name, f"rank {rank} is at a point of group '{point.group}', which {has}", now
                )
                return
            round_ = Round(point.group, members, now, now + point.deadline_s)
            self.rounds[point.group] = round_
            first = point
        else:
            if rank not in round_.members:
                cause = f"rank {rank} is no member of group '{point.group}' {list(round_.members)}"
                self.report_failure([rank], point.name, cause, now)
                return
            first = next(iter(round_.arrivals.values()))
            round_.expires = min(round_.expires, now + point.deadline_s)
        round_.arrivals[rank] = point
        if point.chains:
            for group, (count, digest) in point.chains.items():
                record.chains[group] = (count, digest)
                self._unchecked.add(group)
        if point.name != first.name or point.check != first.check:
            round_.mismatched = True
            if round_.settles is None:
                round_.settles = now + SETTLE_S
        if len(round_.arrivals) == len(round_.members):
            self._complete(round_, now)
        elif round_.mismatched and self._majority(round_) is not None:
            self._report_mismatch(round_, now)
        else:
            gone = [other for other in round_.missing() if self.records[other].state == "left"]
            if gone:
                self._report_left(round_, gone, now)
            elif len(self.rounds) > 1:
                self._check_cycle(round_, now)

    def left(self, rank: int, now: float) -> None:
        """It said goodbye: a failure only if another rank waits for it, now or later."""
        self.records[rank].state = "left"
        for round_ in list(self.rounds.values()):
            if rank in round_.members and rank not in round_.arrivals and self.failure is None:
                self._report_left(round_, [rank], now)

    def died(self, rank: int, how: str, now: float) -> None:
        """``how`` completes "rank 1 …"."""
        record = self.records[rank]
        if record.state in ("left", "dead"):
            return
        record.state = "dead"
        position = self._position(rank)
        self.report_failure(
            [rank], position.where if position else "joining", f"rank {rank} {how}, {position or 'before joining'}", now
        )

    def stopped(self, rank: int, since: float, limit_s: float, now: float) -> None:
        """The process table says so, without interruption since ``since``."""
        self.records[rank].state = "stopped"
        if now - since >= limit_s:
            position = self._position(rank)
            where = position.where if position else "joining"
            cause = f"rank {rank} has been stopped by a signal for {now - since:.1f} s, {position or 'before joining'}"
            self.report_failure([rank], where, cause, now)

    def resumed(self, rank: int) -> None:
        if self.records[rank].state == "stopped":
            self.records[rank].state = "running"

    def heartbeat(self, rank: int, position: Position) -> None:
        """A heartbeat. That one is missing means nothing by itself."""
        self.records[rank].position = position

    def reported(self, rank: int, failure: DistributedFailure, now: float) -> None:
        """A rank reports a failure: where and why are its own, the table is made here."""
        self.report_failure(failure.failed_ranks, failure.where, failure.cause, now)

    def overdue(self, rank: int, group: str, count: int, where: str, seconds: float, now: float) -> None:
        """``rank`` timed out in collective ``count`` of ``group``: the members that are not in it have failed."""
        elsewhere = []
        for other in self.groups.get(group, ()):
            position = self._position(other)
            last = position.calls[-1] if position and position.kind == "call" and position.calls else None
            if last is None or last.group != group or last.count != count:
                elsewhere.append(other)
        says = "; ".join(f"rank {other} is {self._describe(other, now)}" for other in elsewhere)
        cause = f"{where} did not end within {seconds:.1f} s; " + (says or "all of its ranks are in it")
        self.report_failure(elsewhere or self.groups.get(group, (rank,)), where, cause, now)

    def tick(self, now: float) -> None:
        """To be called every 100 ms or so; deadlines are as exact as this."""
        for round_ in list(self.rounds.values()):
            if self.failure is not None:
                return
            if round_.settles is not None and now >= round_.settles:
                self._report_mismatch(round_, now)
            elif now >= round_.expires:
                self._report_expired(round_, now)
            elif now - round_.opened >= STUCK_S:
                self._check_stuck(round_, now)
        if self.failure is None:
            self._check_calls(now)

    def next_due(self) -> float | None:
        """When the earliest round expires or settles."""
        times = [min(r.expires, r.settles or r.expires) for r in self.rounds.values()]
        return min(times) if times else None

    # ---- failures

    def report_failure(self, failed_ranks: Iterable[int], where: str, cause: str, now: float) -> None:
        """The first report is the run's failure, and is sent to all ranks."""
        if self.failure is not None:
            return
        self.failure = DistributedFailure(
            failed_ranks=sorted(set(failed_ranks)), where=where, cause=cause, table=self.table(now)
        )
        self.rounds.clear()
        self.outbox.append((range(self.world), ["failed", self.failure.to_json()]))

    def table(self, now: float) -> list[RankRow]:
        rows = []
        for record in self.records:
            position = self._position(record.rank)
            operations = [(at, f"past {name}") for at, name in record.last]
            if position is not None and position.kind != "past":
                operations.append((position.since, str(position)))
            last = [f"{text}, {now - at:.3f} s ago" for at, text in operations]
            if position is not None:
                last += [f"call {call.group}#{call.count} {call.identity}" for call in position.calls]
            rows.append(
                RankRow(
                    rank=record.rank,
                    state=record.state,
                    where=str(position) if position else "",
                    since_s=round(max(0.0, now - position.since), 3) if position else 0.0,
                    last=tuple(last),
                )
            )
        return rows

    def _complete(self, round_: Round, now: float) -> None:
        if round_.mismatched:
            self._report_mismatch(round_, now)
            return
        for group in list(self._unchecked):
            if set(self.groups.get(group, ())) <= set(round_.members):
                if self._check_chains(group, round_, now):
                    return
                self._unchecked.discard(group)
        first = next(iter(round_.arrivals.values()))
        del self.rounds[round_.group]
        has_data = False
        errors: dict[int, str] = {}
        for rank, point in round_.arrivals.items():
            record = self.records[rank]
            record.last.append((now, point.name))
            record.position = Position("past", point.name, now)
            if point.error is not None:
                errors[rank] = point.error
            elif point.data is not None:
                has_data = True
        for name, members in first.groups.items():
            self.groups[name] = tuple(members)
        if errors:
            cause = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items()))
            failure = DistributedFailure(
                failed_ranks=sorted(errors), where=first.name, cause=cause, table=self.table(now), recoverable=True
            )
            self.outbox.append((round_.members, ["failed", failure.to_json()]))
        elif has_data:
            data = [round_.arrivals[rank].data for rank in round_.members]
            self.outbox.append((round_.members, ["ok", data]))
        else:
            self.outbox.append((round_.members, ["ok"]))

    def _majority(self, round_: Round) -> tuple[str, str | None] | None:
        """The name (and check) at which more than half of the members are."""
        counts = Counter((point.name, point.check) for point in round_.arrivals.values())
        key, count = counts.most_common(1)[0]
        return key if 2 * count > len(round_.members) else None

    def _report_mismatch(self, round_: Round, now: float) -> None:
        """Ranks at different points, or at one with different checks. In a tie all of them have failed."""
        majority = self._majority(round_)
        positions = {rank: (point.name, point.check) for rank, point in round_.arrivals.items()}
        odd = [rank for rank, position in positions.items() if position != majority]
        names = list(dict.fromkeys(name for name, _ in positions.values()))
        where = majority[0] if majority else " or ".join(sorted(names))
        if len(names) > 1:
            says = [f"rank {rank} at {name}" for rank, (name, _) in sorted(positions.items())]
            cause = f"ranks are at different points of group '{round_.group}': {', '.join(says)}"
        else:
            says = [f"rank {rank} says {check!r}" for rank, (_, check) in sorted(positions.items())]
            cause = f"ranks do not agree: {', '.join(says)}"
        missing = round_.missing()
        if missing:
            cause += "; not there yet: " + ", ".join(f"rank {rank} {self._describe(rank, now)}" for rank in missing)
        self.report_failure(odd, where, cause, now)

    def _report_left(self, round_: Round, gone: list[int], now: float) -> None:
        """Some left too early, or some came once too often: the fewer have failed, in a tie both."""
        name = next(iter(round_.arrivals.values())).name
        waiting = sorted(round_.arrivals)
        failed_ranks = gone if len(gone) < len(waiting) else waiting if len(waiting) < len(gone) else [*gone, *waiting]
        cause = f"{name_ranks(gone)} left for good, and at {name} {name_ranks(waiting)} would wait for ever"
        self.report_failure(failed_ranks, name, cause, now)

    def _report_expired(self, round_: Round, now: float) -> None:
        name = next(iter(round_.arrivals.values())).name
        failed_ranks = self._root_causes(round_)
        says = ", ".join(f"rank {rank} is {self._describe(rank, now)}" for rank in failed_ranks)
        waiting = name_ranks(sorted(round_.arrivals))
        self.report_failure(
            failed_ranks, name, f"{waiting} waited at {name} for {now - round_.opened:.1f} s: {says}", now
        )

    def _root_causes(self, round_: Round) -> list[int]:
        """The missing ranks; for those that wait elsewhere, the ranks that they wait for."""
        seen: set[int] = set()
        todo, failed_ranks = round_.missing(), []
        while todo:
            rank = todo.pop()
            if rank in seen:
                continue
            seen.add(rank)
            other = self._round_of(rank)
            if other is None:
                failed_ranks.append(rank)
            else:
                todo += other.missing()
        return sorted(failed_ranks) or round_.missing()

    def _check_cycle(self, round_: Round, now: float) -> None:
        """Ranks that wait for each other at points of different groups never meet."""
        seen: dict[str, Round] = {}
        todo = [round_]
        while todo:
            current = todo.pop()
            for rank in current.missing():
                other = self._round_of(rank)
                if other is None:
                    continue
                if other is round_:
                    self._report_cycle([round_, current, *seen.values()], now)
                    return
                if other.group not in seen:
                    seen[other.group] = other
                    todo.append(other)

    def _report_cycle(self, rounds: Sequence[Round], now: float) -> None:
        """Only ranks that are at one of the points and missing at another count; of two points the fewer have
        failed."""
        at = {rank: point.name for each in rounds for rank, point in each.arrivals.items()}
        missed = {rank for each in rounds for rank in each.missing()}
        witnesses = {rank: name for rank, name in at.items() if rank in missed}
        counts = Counter(witnesses.values()).most_common()
        top = counts[0][0] if len(counts) == 2 and counts[0][1] > counts[1][1] else None
        says = ", ".join(f"rank {rank} at {name}" for rank, name in sorted(at.items()))
        where = top or " or ".join(sorted(set(witnesses.values())))
        failed_ranks = [rank for rank, name in witnesses.items() if name != top]
        self.report_failure(failed_ranks, where, f"ranks wait for each other at different points: {says}", now)

    def _check_chains(self, group: str, round_: Round, now: float) -> bool:
        """All members of ``group`` are at this point: each must have made the same calls."""
        ends = {rank: self.records[rank].chains.get(group, (0, "")) for rank in self.groups.get(group, ())}
        if len(set(ends.values())) <= 1:
            return False
        self._report_chains(group, ends, f"by {next(iter(round_.arrivals.values())).name}", now)
        return True

    def _report_chains(self, group: str, ends: Mapping[int, tuple[int, str]], by: str, now: float) -> None:
        counts = Counter(ends.values()).most_common()
        tie = len(counts) > 1 and counts[0][1] == counts[1][1]
        odd = [rank for rank, end in ends.items() if tie or end != counts[0][0]]
        calls: dict[int, dict[int, Call]] = {}
        for rank in ends:
            position = self._position(rank)
            calls[rank] = {call.count: call for call in position.calls if call.group == group} if position else {}
        says = ""
        for number in sorted({count for of_rank in calls.values() for count in of_rank}):
            at = {rank: of_rank.get(number) for rank, of_rank in calls.items() if of_rank}
            if len({call.digest if call else "" for call in at.values()}) > 1:
                says = f" differ from call {number} on: " + ", ".join(
                    f"rank {rank} {call.identity if call else 'made none'}" for rank, call in sorted(at.items())
                )
                break
        totals = ", ".join(f"rank {rank} made {count}" for rank, (count, _) in sorted(ends.items()))
        cause = f"the collectives of group '{group}'{says or ' differ'} ({totals} {by})"
        self.report_failure(odd, by.removeprefix("by ").removeprefix("until "), cause, now)

    def _check_stuck(self, round_: Round, now: float) -> None:
        """A missing member waits in a collective that those at this point did not call, or called otherwise."""
        for rank in round_.missing():
            call = self._stuck_call(rank, now)
            if call is None:
                continue
            for other in round_.arrivals:
                count, digest = self.records[other].chains.get(call.group, (0, ""))
                if other not in self.groups.get(call.group, ()):
                    continue
                if count < call.count or (count == call.count and digest != call.digest):
                    ends = {r: self.records[r].chains.get(call.group, (0, "")) for r in self.groups[call.group]}
                    for r in round_.missing():
                        theirs = self._stuck_call(r, now)
                        if r in ends and theirs is not None and theirs.group == call.group:
                            ends[r] = (theirs.count, theirs.digest)
                        elif r in ends:
                            del ends[r]  # not stuck: no witness
                    self._report_chains(call.group, ends, f"until {call.identity}", now)
                    return

    def _check_calls(self, now: float) -> None:
        """Two ranks in the same call of a group, but it is not the same call."""
        calls = {record.rank: call for record in self.records if (call := self._stuck_call(record.rank, now))}
        for group in {call.group for call in calls.values()}:
            ends = {rank: (call.count, call.digest) for rank, call in calls.items() if call.group == group}
            by_count: dict[int, set[str]] = {}
            for count, digest in ends.values():
                by_count.setdefault(count, set()).add(digest)
            if any(len(digests) > 1 for digests in by_count.values()):
                identity = next(call.identity for call in calls.values() if call.group == group)
                self._report_chains(group, ends, f"until {identity}", now)
                return

    # ---- facts

    def _stuck_call(self, rank: int, now: float) -> Call | None:
        position = self._position(rank)
        if position is None or position.kind != "call" or now - position.since < STUCK_S or not position.calls:
            return None
        return position.calls[-1]

    def _round_of(self, rank: int) -> Round | None:
        return next((round_ for round_ in self.rounds.values() if rank in round_.arrivals), None)

    def _position(self, rank: int) -> Position | None:
        return self._read_status(rank) or self.records[rank].position

    def _describe(self, rank: int, now: float) -> str:
        record, position = self.records[rank], self._position(rank)
        if record.state == "absent":
            return "absent: it never joined"
        since = f" since {now - position.since:.1f} s" if position else ""
        return f"{record.state}, {position or 'nowhere yet'}{since}"
