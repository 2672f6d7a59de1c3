"""What the referee decides, without sockets, processes or a clock: who has arrived where, and what is wrong.

``now`` is an argument everywhere (monotonic seconds), so that the same code runs under a virtual clock. What it wants
sent is in ``outbox``; what it finds wrong is ``verdict``, once and for good.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from descant.dist.board import Call, Place
from descant.dist.failure import DistributedFailure, RankRow, RankState, name_ranks

WORLD = "world"
SETTLE_S = 0.25
"""How long a mismatch waits for the other members, so that the odd one out is named and not just two that differ."""
STUCK_S = 0.3
"""A member in a collective is compared with those that wait at a point for it after this long."""
LAST_OPERATIONS = 8

Look = Callable[[int], Place | None]


@dataclass(slots=True, kw_only=True)
class Point:
    """A rank's arrival. ``check`` must be the same on all members. ``chains`` holds the groups whose collectives were
    called since the last point: ``group → (count, digest)``. ``groups`` declares groups once the round is complete."""

    group: str
    name: str
    deadline_s: float
    data: Any = None
    error: str | None = None
    check: str | None = None
    chains: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """What is known of a rank besides its board."""

    rank: int
    state: RankState = "absent"
    place: Place | None = None
    last: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=LAST_OPERATIONS))
    chains: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(slots=True)
class Round:
    group: str
    members: tuple[int, ...]
    opened: float
    expires: float
    arrivals: dict[int, Point] = field(default_factory=dict)
    split: bool = False
    settles: float | None = None

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.arrivals]


class Court:
    """One run of ``world`` ranks. ``look(rank)`` reads a rank's board, None if there is none to read."""

    def __init__(self, world: int, look: Look = lambda rank: None):
        self.world = world
        self.groups: dict[str, tuple[int, ...]] = {WORLD: tuple(range(world))}
        self.records = [Record(rank) for rank in range(world)]
        self.rounds: dict[str, Round] = {}
        self.verdict: DistributedFailure | None = None
        self.outbox: list[tuple[Iterable[int], Any]] = []
        """(ranks, reply): ``["ok", data by member or None]`` or ``["failed", failure]``."""
        self._look = look
        self._unchecked: set[str] = set()

    # ---- what happens to a rank

    def joined(self, rank: int, now: float) -> None:
        self.records[rank].state = "running"
        self.records[rank].place = Place("past", "joining", now)

    def arrive(self, rank: int, now: float, point: Point) -> None:
        if self.verdict is not None:
            self.outbox.append(((rank,), ["failed", self.verdict.to_json()]))
            return
        record = self.records[rank]
        record.place = Place("at", point.name, now)
        round_ = self.rounds.get(point.group)
        if round_ is None:
            members = self.groups.get(point.group)
            if members is None or rank not in members:
                has = "does not exist" if members is None else f"has ranks {list(members)}"
                self.accuse([rank], point.name, f"rank {rank} is at a point of group '{point.group}', which {has}", now)
                return
            round_ = Round(point.group, members, now, now + point.deadline_s)
            self.rounds[point.group] = round_
            first = point
        else:
            if rank not in round_.members:
                cause = f"rank {rank} is no member of group '{point.group}' {list(round_.members)}"
                self.accuse([rank], point.name, cause, now)
                return
            first = next(iter(round_.arrivals.values()))
            round_.expires = min(round_.expires, now + point.deadline_s)
        round_.arrivals[rank] = point
        if point.chains:
            for group, (count, digest) in point.chains.items():
                record.chains[group] = (count, digest)
                self._unchecked.add(group)
        if point.name != first.name or point.check != first.check:
            round_.split = True
            if round_.settles is None:
                round_.settles = now + SETTLE_S
        if len(round_.arrivals) == len(round_.members):
            self._complete(round_, now)
        elif round_.split and self._majority(round_) is not None:
            self._judge_split(round_, now)
        else:
            gone = [other for other in round_.missing() if self.records[other].state == "left"]
            if gone:
                self._judge_left(round_, gone, now)
            elif len(self.rounds) > 1:
                self._judge_cycle(round_, now)

    def left(self, rank: int, now: float) -> None:
        """It said goodbye: not a failure, unless somebody waits for it or will."""
        self.records[rank].state = "left"
        for round_ in list(self.rounds.values()):
            if rank in round_.members and rank not in round_.arrivals and self.verdict is None:
                self._judge_left(round_, [rank], now)

    def died(self, rank: int, how: str, now: float) -> None:
        """``how`` completes "rank 1 …"."""
        record = self.records[rank]
        if record.state in ("left", "dead"):
            return
        record.state = "dead"
        place = self._place(rank)
        self.accuse([rank], place.where if place else "joining", f"rank {rank} {how}, {place or 'before joining'}", now)

    def stopped(self, rank: int, since: float, limit_s: float, now: float) -> None:
        """The process table says so, without interruption since ``since``."""
        self.records[rank].state = "stopped"
        if now - since >= limit_s:
            place = self._place(rank)
            where = place.where if place else "joining"
            cause = f"rank {rank} has been stopped by a signal for {now - since:.1f} s, {place or 'before joining'}"
            self.accuse([rank], where, cause, now)

    def resumed(self, rank: int) -> None:
        if self.records[rank].state == "stopped":
            self.records[rank].state = "running"

    def beat(self, rank: int, place: Place) -> None:
        """A heartbeat. That one is missing means nothing by itself."""
        self.records[rank].place = place

    def reported(self, rank: int, failure: DistributedFailure, now: float) -> None:
        """A rank gives up. What it says is the verdict; the table is ours."""
        self.accuse(failure.culprits, failure.where, failure.cause, now)

    def overdue(self, rank: int, group: str, count: int, where: str, seconds: float, now: float) -> None:
        """``rank`` waited in vain in collective ``count`` of ``group``; whoever is not in it is to blame."""
        elsewhere = []
        for other in self.groups.get(group, ()):
            place = self._place(other)
            last = place.calls[-1] if place and place.kind == "call" and place.calls else None
            if last is None or last.group != group or last.count != count:
                elsewhere.append(other)
        says = "; ".join(f"rank {other} is {self._describe(other, now)}" for other in elsewhere)
        cause = f"{where} did not end within {seconds:.1f} s; " + (says or "all of its ranks are in it")
        self.accuse(elsewhere or self.groups.get(group, (rank,)), where, cause, now)

    def tick(self, now: float) -> None:
        """To be called every 100 ms or so; deadlines are as exact as this."""
        for round_ in list(self.rounds.values()):
            if self.verdict is not None:
                return
            if round_.settles is not None and now >= round_.settles:
                self._judge_split(round_, now)
            elif now >= round_.expires:
                self._judge_expired(round_, now)
            elif now - round_.opened >= STUCK_S:
                self._judge_stuck(round_, now)
        if self.verdict is None:
            self._judge_calls(now)

    def next_due(self) -> float | None:
        """When the earliest round expires or settles."""
        times = [min(r.expires, r.settles or r.expires) for r in self.rounds.values()]
        return min(times) if times else None

    # ---- verdicts

    def accuse(self, culprits: Iterable[int], where: str, cause: str, now: float) -> None:
        """The first accusation is the verdict; it goes to everybody."""
        if self.verdict is not None:
            return
        self.verdict = DistributedFailure(
            culprits=sorted(set(culprits)), where=where, cause=cause, table=self.table(now)
        )
        self.rounds.clear()
        self.outbox.append((range(self.world), ["failed", self.verdict.to_json()]))

    def table(self, now: float) -> list[RankRow]:
        rows = []
        for record in self.records:
            place = self._place(record.rank)
            operations = [(at, f"past {name}") for at, name in record.last]
            if place is not None and place.kind != "past":
                operations.append((place.since, str(place)))
            last = [f"{text}, {now - at:.3f} s ago" for at, text in operations]
            if place is not None:
                last += [f"call {call.group}#{call.count} {call.identity}" for call in place.calls]
            rows.append(
                RankRow(
                    rank=record.rank,
                    state=record.state,
                    where=str(place) if place else "",
                    since_s=round(max(0.0, now - place.since), 3) if place else 0.0,
                    last=tuple(last),
                )
            )
        return rows

    def _complete(self, round_: Round, now: float) -> None:
        if round_.split:
            self._judge_split(round_, now)
            return
        for group in list(self._unchecked):
            if set(self.groups.get(group, ())) <= set(round_.members):
                if self._judge_chains(group, round_, now):
                    return
                self._unchecked.discard(group)
        first = next(iter(round_.arrivals.values()))
        del self.rounds[round_.group]
        has_data = False
        errors: dict[int, str] = {}
        for rank, point in round_.arrivals.items():
            record = self.records[rank]
            record.last.append((now, point.name))
            record.place = Place("past", point.name, now)
            if point.error is not None:
                errors[rank] = point.error
            elif point.data is not None:
                has_data = True
        for name, members in first.groups.items():
            self.groups[name] = tuple(members)
        if errors:
            cause = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items()))
            failure = DistributedFailure(
                culprits=sorted(errors), where=first.name, cause=cause, table=self.table(now), recoverable=True
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

    def _judge_split(self, round_: Round, now: float) -> None:
        """Ranks at different points, or at one with different words. A tie blames all that take part in it."""
        majority = self._majority(round_)
        places = {rank: (point.name, point.check) for rank, point in round_.arrivals.items()}
        odd = [rank for rank, place in places.items() if place != majority]
        names = list(dict.fromkeys(name for name, _ in places.values()))
        where = majority[0] if majority else " or ".join(sorted(names))
        if len(names) > 1:
            says = [f"rank {rank} at {name}" for rank, (name, _) in sorted(places.items())]
            cause = f"ranks are at different points of group '{round_.group}': {', '.join(says)}"
        else:
            says = [f"rank {rank} says {check!r}" for rank, (_, check) in sorted(places.items())]
            cause = f"ranks do not agree: {', '.join(says)}"
        missing = round_.missing()
        if missing:
            cause += "; not there yet: " + ", ".join(f"rank {rank} {self._describe(rank, now)}" for rank in missing)
        self.accuse(odd, where, cause, now)

    def _judge_left(self, round_: Round, gone: list[int], now: float) -> None:
        """Some left too early, or some came once too often: the fewer are the odd ones, and a tie blames both."""
        name = next(iter(round_.arrivals.values())).name
        waiting = sorted(round_.arrivals)
        culprits = gone if len(gone) < len(waiting) else waiting if len(waiting) < len(gone) else [*gone, *waiting]
        cause = f"{name_ranks(gone)} left for good, and at {name} {name_ranks(waiting)} would wait for ever"
        self.accuse(culprits, name, cause, now)

    def _judge_expired(self, round_: Round, now: float) -> None:
        name = next(iter(round_.arrivals.values())).name
        culprits = self._blame(round_)
        says = ", ".join(f"rank {rank} is {self._describe(rank, now)}" for rank in culprits)
        waiting = name_ranks(sorted(round_.arrivals))
        self.accuse(culprits, name, f"{waiting} waited at {name} for {now - round_.opened:.1f} s: {says}", now)

    def _blame(self, round_: Round) -> list[int]:
        """The missing; those of them that wait elsewhere pass the blame to whom they wait for."""
        seen: set[int] = set()
        todo, culprits = round_.missing(), []
        while todo:
            rank = todo.pop()
            if rank in seen:
                continue
            seen.add(rank)
            other = self._round_of(rank)
            if other is None:
                culprits.append(rank)
            else:
                todo += other.missing()
        return sorted(culprits) or round_.missing()

    def _judge_cycle(self, round_: Round, now: float) -> None:
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
                    self._accuse_cycle([round_, current, *seen.values()], now)
                    return
                if other.group not in seen:
                    seen[other.group] = other
                    todo.append(other)

    def _accuse_cycle(self, rounds: Sequence[Round], now: float) -> None:
        """Only who is at one of the points and missed at another is a witness; of two points the fewer are odd."""
        at = {rank: point.name for each in rounds for rank, point in each.arrivals.items()}
        missed = {rank for each in rounds for rank in each.missing()}
        witnesses = {rank: name for rank, name in at.items() if rank in missed}
        counts = Counter(witnesses.values()).most_common()
        top = counts[0][0] if len(counts) == 2 and counts[0][1] > counts[1][1] else None
        says = ", ".join(f"rank {rank} at {name}" for rank, name in sorted(at.items()))
        where = top or " or ".join(sorted(set(witnesses.values())))
        culprits = [rank for rank, name in witnesses.items() if name != top]
        self.accuse(culprits, where, f"ranks wait for each other at different points: {says}", now)

    def _judge_chains(self, group: str, round_: Round, now: float) -> bool:
        """All members of ``group`` are at this point: each must have made the same calls."""
        ends = {rank: self.records[rank].chains.get(group, (0, "")) for rank in self.groups.get(group, ())}
        if len(set(ends.values())) <= 1:
            return False
        self._accuse_chains(group, ends, f"by {next(iter(round_.arrivals.values())).name}", now)
        return True

    def _accuse_chains(self, group: str, ends: Mapping[int, tuple[int, str]], by: str, now: float) -> None:
        counts = Counter(ends.values()).most_common()
        tie = len(counts) > 1 and counts[0][1] == counts[1][1]
        odd = [rank for rank, end in ends.items() if tie or end != counts[0][0]]
        calls: dict[int, dict[int, Call]] = {}
        for rank in ends:
            place = self._place(rank)
            calls[rank] = {call.count: call for call in place.calls if call.group == group} if place else {}
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
        self.accuse(odd, by.removeprefix("by ").removeprefix("until "), cause, now)

    def _judge_stuck(self, round_: Round, now: float) -> None:
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
                    self._accuse_chains(call.group, ends, f"until {call.identity}", now)
                    return

    def _judge_calls(self, now: float) -> None:
        """Two ranks in the same call of a group, but it is not the same call."""
        calls = {record.rank: call for record in self.records if (call := self._stuck_call(record.rank, now))}
        for group in {call.group for call in calls.values()}:
            ends = {rank: (call.count, call.digest) for rank, call in calls.items() if call.group == group}
            by_count: dict[int, set[str]] = {}
            for count, digest in ends.values():
                by_count.setdefault(count, set()).add(digest)
            if any(len(digests) > 1 for digests in by_count.values()):
                identity = next(call.identity for call in calls.values() if call.group == group)
                self._accuse_chains(group, ends, f"until {identity}", now)
                return

    # ---- facts

    def _stuck_call(self, rank: int, now: float) -> Call | None:
        place = self._place(rank)
        if place is None or place.kind != "call" or now - place.since < STUCK_S or not place.calls:
            return None
        return place.calls[-1]

    def _round_of(self, rank: int) -> Round | None:
        return next((round_ for round_ in self.rounds.values() if rank in round_.arrivals), None)

    def _place(self, rank: int) -> Place | None:
        return self._look(rank) or self.records[rank].place

    def _describe(self, rank: int, now: float) -> str:
        record, place = self.records[rank], self._place(rank)
        if record.state == "absent":
            return "absent: it never joined"
        since = f" since {now - place.since:.1f} s" if place else ""
        return f"{record.state}, {place or 'nowhere yet'}{since}"
