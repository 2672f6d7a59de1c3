"""The referee's decisions under a virtual clock: random programs, random schedules, one random fault each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from descant.dist.board import Call, Place
from descant.dist.court import WORLD, Court, Point

DEADLINE_S = 30.0
Step = tuple[str, str]  # (group, name)


@dataclass(slots=True)
class SimulatedRank:
    rank: int
    program: list[Step]
    position: int = 0
    waiting: bool = False
    failed: bool = False
    heard: list[object] = field(default_factory=list)


class Simulation:
    """Ranks that run their programs in random order on one court. No sockets, no processes, no time."""

    def __init__(self, programs: list[list[Step]], groups: dict[str, list[int]], seed: int):
        self.court = Court(len(programs))
        self.court.groups.update({name: tuple(ranks) for name, ranks in groups.items()})
        self.ranks = [SimulatedRank(rank, program) for rank, program in enumerate(programs)]
        self.random = random.Random(seed)
        self.now = 0.0
        for rank in self.ranks:
            self.court.joined(rank.rank, self.now)

    def run(self, fault: tuple[int, int, str] | None = None) -> None:
        """``fault``: at this rank's n-th point, "dies" or "hangs"."""
        hung: set[int] = set()
        for _ in range(100_000):
            able = [r for r in self.ranks if not r.waiting and not r.failed and r.rank not in hung]
            able = [r for r in able if r.position <= len(r.program)]
            if not able:
                if all(r.failed or r.position > len(r.program) for r in self.ranks if r.rank not in hung):
                    return
                self.now += 0.1
                self.court.tick(self.now)
            else:
                self.now += self.random.random() * 1e-3
                self._step(self.random.choice(able), fault, hung)
            self._deliver()
        raise AssertionError("the simulated ranks never ended")

    def _step(self, rank: SimulatedRank, fault: tuple[int, int, str] | None, hung: set[int]) -> None:
        if fault is not None and fault[:2] == (rank.rank, rank.position):
            hung.add(rank.rank)
            if fault[2] == "dies":
                self.court.died(rank.rank, "died", self.now)
        elif rank.position == len(rank.program):
            rank.position += 1
            self.court.left(rank.rank, self.now)
        else:
            group, name = rank.program[rank.position]
            rank.waiting = True
            point = Point(group=group, name=name, deadline_s=DEADLINE_S, data=rank.rank)
            self.court.arrive(rank.rank, self.now, point)

    def _deliver(self) -> None:
        outbox, self.court.outbox = self.court.outbox, []
        for ranks, reply in outbox:
            for number in ranks:
                rank = self.ranks[number]
                if reply[0] == "failed":
                    rank.failed = True
                    rank.heard.append(reply[1])
                elif rank.waiting:
                    rank.waiting = False
                    rank.position += 1
                    rank.heard.append(reply[1])


def random_program(seed: int, world: int, points: int) -> tuple[list[list[Step]], dict[str, list[int]]]:
    """One global order of points on random groups: what correct ranks run."""
    chance = random.Random(seed)
    groups = {f"g{i}": sorted(chance.sample(range(world), chance.randint(1, world))) for i in range(4)}
    everyone = {**groups, WORLD: list(range(world))}
    programs: list[list[Step]] = [[] for _ in range(world)]
    for number in range(points):
        group = chance.choice(list(everyone))
        for rank in everyone[group]:
            programs[rank].append((group, f"{group}/{number}"))
    for program in programs:
        program.append((WORLD, "end"))
    return programs, groups


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_of_correct_ranks_fails(seed: int):
    programs, groups = random_program(seed, world=2 + seed % 5, points=60)
    simulation = Simulation(programs, groups, seed)
    simulation.run()
    assert simulation.court.verdict is None
    for rank in simulation.ranks:
        members = [{**groups, WORLD: list(range(len(programs)))}[group] for group, _ in rank.program]
        assert rank.heard == members


@pytest.mark.parametrize("seed", range(120))
def test_every_fault_is_found_and_the_culprit_is_among_the_named(seed: int):
    world = 2 + seed % 5
    programs, groups = random_program(seed, world, points=40)
    chance = random.Random(f"fault {seed}")
    culprit = chance.randrange(world)
    program = programs[culprit]
    at = chance.randrange(len(program))
    kind = ("dies", "hangs", "skips", "renames", "repeats")[seed % 5]
    alone = len({**groups, WORLD: range(world)}[program[at][0]]) == 1
    if kind in ("skips", "renames", "repeats") and alone:
        return  # a point of one rank: nobody could notice, and nobody waits
    fault = None
    if kind in ("dies", "hangs"):
        fault = (culprit, at, kind)
    elif kind == "skips":
        del program[at]
    elif kind == "renames":
        program[at] = (program[at][0], "elsewhere")
    else:
        program.insert(at, program[at])
    simulation = Simulation(programs, groups, seed)
    simulation.run(fault)
    verdict = simulation.court.verdict
    assert verdict is not None, f"'{kind}' was not found"
    assert culprit in verdict.culprits, verdict.report()
    if kind in ("dies", "hangs"):
        assert verdict.culprits == (culprit,), verdict.report()


def arrive(court: Court, rank: int, now: float, name: str = "x", **fields: object) -> None:
    court.arrive(rank, now, Point(group=WORLD, name=name, deadline_s=5.0, **fields))  # type: ignore[arg-type]


def court_of(world: int, places: dict[int, Place] | None = None) -> Court:
    court = Court(world, lambda rank: (places or {}).get(rank))
    for rank in range(world):
        court.joined(rank, 0.0)
    return court


def test_a_mismatch_waits_a_moment_for_the_rank_that_tips_it():
    court = court_of(3)
    arrive(court, 1, 1.0, "b")
    arrive(court, 0, 1.0, "a")
    court.tick(1.1)
    assert court.verdict is None
    arrive(court, 2, 1.2, "a")
    assert court.verdict is not None
    assert (court.verdict.culprits, court.verdict.where) == ((1,), "a")


def test_a_mismatch_does_not_wait_for_ever():
    court = court_of(3)
    arrive(court, 1, 1.0, "b")
    arrive(court, 0, 1.0, "a")
    court.tick(1.3)
    assert court.verdict is not None
    assert court.verdict.culprits == (0, 1)
    assert "not there yet: rank 2 running" in court.verdict.cause


def test_the_blame_for_a_deadline_goes_to_whom_the_missing_wait_for():
    court = court_of(3)
    court.groups["pair"] = (1, 2)
    arrive(court, 0, 1.0)
    court.arrive(1, 1.0, Point(group="pair", name="y", deadline_s=60.0))
    court.tick(6.1)
    assert court.verdict is not None
    assert court.verdict.culprits == (2,)


def test_the_earliest_deadline_of_a_round_counts():
    court = court_of(3)
    court.arrive(0, 1.0, Point(group=WORLD, name="x", deadline_s=60.0))
    court.arrive(1, 2.0, Point(group=WORLD, name="x", deadline_s=1.0))
    assert court.next_due() == 3.0
    court.tick(3.0)
    assert court.verdict is not None
    assert court.verdict.culprits == (2,)


def test_a_stop_is_forgiven_until_its_limit():
    court = court_of(2)
    court.stopped(1, 1.0, 1.0, 1.9)
    assert court.verdict is None
    assert court.table(1.9)[1].state == "stopped"
    court.resumed(1)
    assert court.table(1.9)[1].state == "running"
    court.stopped(1, 3.0, 1.0, 4.0)
    assert court.verdict is not None
    assert court.verdict.culprits == (1,)


def test_chains_of_a_subgroup_are_compared_at_the_next_point_of_a_group_that_holds_it():
    court = court_of(3)
    court.groups["pair"] = (0, 1)
    court.groups["other"] = (0, 2)
    court.arrive(0, 1.0, Point(group="other", name="o", deadline_s=5.0, chains={"pair": (1, "aa")}))
    court.arrive(2, 1.0, Point(group="other", name="o", deadline_s=5.0))
    assert court.verdict is None  # the point of "other" says nothing about "pair"
    arrive(court, 0, 2.0)
    arrive(court, 1, 2.0)
    arrive(court, 2, 2.0)
    assert court.verdict is not None
    assert court.verdict.culprits == (0, 1)


def test_a_slow_collective_is_no_divergence():
    """Rank 0 has finished the call that rank 1 is still in, and waits at a point: same call, so no failure."""
    call = Call("world", 3, "dd", "grads all_reduce")
    court = court_of(2, {1: Place("call", "grads", 0.5, (call,))})
    arrive(court, 0, 1.0, chains={"world": (3, "dd")})
    court.tick(4.0)
    assert court.verdict is None
    court.tick(6.1)  # but the point's deadline holds
    assert court.verdict is not None
    assert court.verdict.culprits == (1,)


@pytest.mark.parametrize("end", [(2, "cc"), (3, "ee")])
def test_a_collective_that_those_at_the_point_did_not_call_never_ends(end: tuple[int, str]):
    call = Call("world", 3, "dd", "grads all_reduce")
    place = Place("call", "grads", 0.5, (call,))
    court = court_of(3, {1: place, 2: place})
    arrive(court, 0, 1.0, chains={"world": end})
    court.tick(1.4)
    assert court.verdict is not None
    assert court.verdict.culprits == (0,)


def test_the_first_verdict_stays_and_late_comers_hear_it():
    court = court_of(3)
    court.died(1, "was killed by SIGKILL", 1.0)
    court.died(2, "died too", 1.1)
    court.outbox.clear()
    arrive(court, 0, 2.0)
    assert court.verdict is not None
    assert court.verdict.culprits == (1,)
    assert court.outbox == [((0,), ["failed", court.verdict.to_json()])]


def test_a_point_of_a_group_that_one_is_not_in():
    court = court_of(3)
    court.groups["pair"] = (0, 1)
    court.arrive(2, 1.0, Point(group="pair", name="x", deadline_s=5.0))
    assert court.verdict is not None
    assert court.verdict.culprits == (2,)
    assert "has ranks [0, 1]" in court.verdict.cause
