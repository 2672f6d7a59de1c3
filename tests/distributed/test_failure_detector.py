"""The coordinator's decisions under a virtual clock: random programs, random schedules, one random fault each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from descant.distributed.coordinator.state import WORLD, FailureDetector, SyncPoint
from descant.distributed.coordinator.status import Call, Position

DEADLINE_S = 30.0
Step = tuple[str, str]  # (group, name)


@dataclass(slots=True)
class SimulatedRank:
    rank: int
    program: list[Step]
    position: int = 0
    waiting: bool = False
    failed: bool = False
    replies: list[object] = field(default_factory=list)


class Simulation:
    """Ranks that run their programs in random order on one detector. No sockets, no processes, no time."""

    def __init__(self, programs: list[list[Step]], groups: dict[str, list[int]], seed: int):
        self.detector = FailureDetector(len(programs))
        self.detector.groups.update({name: tuple(ranks) for name, ranks in groups.items()})
        self.ranks = [SimulatedRank(rank, program) for rank, program in enumerate(programs)]
        self.random = random.Random(seed)
        self.now = 0.0
        for rank in self.ranks:
            self.detector.joined(rank.rank, self.now)

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
                self.detector.tick(self.now)
            else:
                self.now += self.random.random() * 1e-3
                self._step(self.random.choice(able), fault, hung)
            self._deliver()
        raise AssertionError("the simulated ranks never ended")

    def _step(self, rank: SimulatedRank, fault: tuple[int, int, str] | None, hung: set[int]) -> None:
        if fault is not None and fault[:2] == (rank.rank, rank.position):
            hung.add(rank.rank)
            if fault[2] == "dies":
                self.detector.died(rank.rank, "died", self.now)
        elif rank.position == len(rank.program):
            rank.position += 1
            self.detector.left(rank.rank, self.now)
        else:
            group, name = rank.program[rank.position]
            rank.waiting = True
            point = SyncPoint(group=group, name=name, deadline_s=DEADLINE_S, data=rank.rank)
            self.detector.arrive(rank.rank, self.now, point)

    def _deliver(self) -> None:
        outbox, self.detector.outbox = self.detector.outbox, []
        for ranks, reply in outbox:
            for number in ranks:
                rank = self.ranks[number]
                if reply[0] == "failed":
                    rank.failed = True
                    rank.replies.append(reply[1])
                elif rank.waiting:
                    rank.waiting = False
                    rank.position += 1
                    rank.replies.append(reply[1])


def random_program(seed: int, world: int, points: int) -> tuple[list[list[Step]], dict[str, list[int]]]:
    """One global order of points on random groups: what correct ranks run."""
    rng = random.Random(seed)
    groups = {f"g{i}": sorted(rng.sample(range(world), rng.randint(1, world))) for i in range(4)}
    everyone = {**groups, WORLD: list(range(world))}
    programs: list[list[Step]] = [[] for _ in range(world)]
    for number in range(points):
        group = rng.choice(list(everyone))
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
    assert simulation.detector.failure is None
    for rank in simulation.ranks:
        members = [{**groups, WORLD: list(range(len(programs)))}[group] for group, _ in rank.program]
        assert rank.replies == members


@pytest.mark.parametrize("seed", range(120))
def test_every_fault_is_found_and_the_failed_rank_is_among_the_named(seed: int):
    world = 2 + seed % 5
    programs, groups = random_program(seed, world, points=40)
    rng = random.Random(f"fault {seed}")
    failed_rank = rng.randrange(world)
    program = programs[failed_rank]
    at = rng.randrange(len(program))
    kind = ("dies", "hangs", "skips", "renames", "repeats")[seed % 5]
    alone = len({**groups, WORLD: range(world)}[program[at][0]]) == 1
    if kind in ("skips", "renames", "repeats") and alone:
        return  # a point of one rank: nobody could notice, and nobody waits
    fault = None
    if kind in ("dies", "hangs"):
        fault = (failed_rank, at, kind)
    elif kind == "skips":
        del program[at]
    elif kind == "renames":
        program[at] = (program[at][0], "elsewhere")
    else:
        program.insert(at, program[at])
    simulation = Simulation(programs, groups, seed)
    simulation.run(fault)
    failure = simulation.detector.failure
    assert failure is not None, f"'{kind}' was not found"
    assert failed_rank in failure.failed_ranks, failure.report()
    if kind in ("dies", "hangs"):
        assert failure.failed_ranks == (failed_rank,), failure.report()


def arrive(detector: FailureDetector, rank: int, now: float, name: str = "x", **fields: object) -> None:
    detector.arrive(rank, now, SyncPoint(group=WORLD, name=name, deadline_s=5.0, **fields))  # type: ignore[arg-type]


def detector_of(world: int, positions: dict[int, Position] | None = None) -> FailureDetector:
    detector = FailureDetector(world, lambda rank: (positions or {}).get(rank))
    for rank in range(world):
        detector.joined(rank, 0.0)
    return detector


def test_a_mismatch_waits_a_moment_for_the_rank_that_tips_it():
    detector = detector_of(3)
    arrive(detector, 1, 1.0, "b")
    arrive(detector, 0, 1.0, "a")
    detector.tick(1.1)
    assert detector.failure is None
    arrive(detector, 2, 1.2, "a")
    assert detector.failure is not None
    assert (detector.failure.failed_ranks, detector.failure.where) == ((1,), "a")


def test_a_mismatch_does_not_wait_for_ever():
    detector = detector_of(3)
    arrive(detector, 1, 1.0, "b")
    arrive(detector, 0, 1.0, "a")
    detector.tick(1.3)
    assert detector.failure is not None
    assert detector.failure.failed_ranks == (0, 1)
    assert "not there yet: rank 2 running" in detector.failure.cause


def test_a_missed_deadline_names_the_ranks_that_the_missing_wait_for():
    detector = detector_of(3)
    detector.groups["pair"] = (1, 2)
    arrive(detector, 0, 1.0)
    detector.arrive(1, 1.0, SyncPoint(group="pair", name="y", deadline_s=60.0))
    detector.tick(6.1)
    assert detector.failure is not None
    assert detector.failure.failed_ranks == (2,)


def test_the_earliest_deadline_of_a_round_counts():
    detector = detector_of(3)
    detector.arrive(0, 1.0, SyncPoint(group=WORLD, name="x", deadline_s=60.0))
    detector.arrive(1, 2.0, SyncPoint(group=WORLD, name="x", deadline_s=1.0))
    assert detector.next_due() == 3.0
    detector.tick(3.0)
    assert detector.failure is not None
    assert detector.failure.failed_ranks == (2,)


def test_a_stop_is_no_failure_until_its_limit():
    detector = detector_of(2)
    detector.stopped(1, 1.0, 1.0, 1.9)
    assert detector.failure is None
    assert detector.table(1.9)[1].state == "stopped"
    detector.resumed(1)
    assert detector.table(1.9)[1].state == "running"
    detector.stopped(1, 3.0, 1.0, 4.0)
    assert detector.failure is not None
    assert detector.failure.failed_ranks == (1,)


def test_chains_of_a_subgroup_are_compared_at_the_next_point_of_a_group_that_holds_it():
    detector = detector_of(3)
    detector.groups["pair"] = (0, 1)
    detector.groups["other"] = (0, 2)
    detector.arrive(0, 1.0, SyncPoint(group="other", name="o", deadline_s=5.0, chains={"pair": (1, "aa")}))
    detector.arrive(2, 1.0, SyncPoint(group="other", name="o", deadline_s=5.0))
    assert detector.failure is None  # the point of "other" says nothing about "pair"
    arrive(detector, 0, 2.0)
    arrive(detector, 1, 2.0)
    arrive(detector, 2, 2.0)
    assert detector.failure is not None
    assert detector.failure.failed_ranks == (0, 1)


def test_a_slow_collective_is_no_divergence():
    """Rank 0 has finished the call that rank 1 is still in, and waits at a point: same call, so no failure."""
    call = Call("world", 3, "dd", "grads all_reduce")
    detector = detector_of(2, {1: Position("call", "grads", 0.5, (call,))})
    arrive(detector, 0, 1.0, chains={"world": (3, "dd")})
    detector.tick(4.0)
    assert detector.failure is None
    detector.tick(6.1)  # but the point's deadline holds
    assert detector.failure is not None
    assert detector.failure.failed_ranks == (1,)


@pytest.mark.parametrize("end", [(2, "cc"), (3, "ee")])
def test_a_collective_that_those_at_the_point_did_not_call_never_ends(end: tuple[int, str]):
    call = Call("world", 3, "dd", "grads all_reduce")
    position = Position("call", "grads", 0.5, (call,))
    detector = detector_of(3, {1: position, 2: position})
    arrive(detector, 0, 1.0, chains={"world": end})
    detector.tick(1.4)
    assert detector.failure is not None
    assert detector.failure.failed_ranks == (0,)


def test_the_first_failure_stays_and_late_arrivals_get_it():
    detector = detector_of(3)
    detector.died(1, "was killed by SIGKILL", 1.0)
    detector.died(2, "died too", 1.1)
    detector.outbox.clear()
    arrive(detector, 0, 2.0)
    assert detector.failure is not None
    assert detector.failure.failed_ranks == (1,)
    assert detector.outbox == [((0,), ["failed", detector.failure.to_json()])]


def test_a_point_of_a_group_that_one_is_not_in():
    detector = detector_of(3)
    detector.groups["pair"] = (0, 1)
    detector.arrive(2, 1.0, SyncPoint(group="pair", name="x", deadline_s=5.0))
    assert detector.failure is not None
    assert detector.failure.failed_ranks == (2,)
    assert "has ranks [0, 1]" in detector.failure.cause
