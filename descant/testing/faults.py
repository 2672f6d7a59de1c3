"""Faults on purpose. ``python -m descant.testing.faults [--short]`` injects each kind at each point of a small training
and saving loop, and checks that every other rank fails in time, with the right rank and position, and that nothing is
left behind. Its last line is ``N cases, N passed, 0 hung, 0 leaked``; it exits with 1 unless all passed.

    --short           a sample of about 70 cases
    --healthy S       no fault for S seconds: overloaded cores, a call that holds the interpreter for 3 s; 0 alarms
    --only TEXT       cases whose name contains it, to run one again
    --jobs N          side by side (cases mostly wait)

At the end of the file: ranks of the service that go wrong as they start, to be named in ``RankSpec.build``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from descant.distributed.coordinator.client import Member
from descant.distributed.failure import COORDINATOR
from descant.errors import UserError
from descant.ranks.settings import RankSpec
from descant.testing.gloo import RankContext, Run, run_ranks

if TYPE_CHECKING:
    from descant.ranks.peers import Peers

Kind = Literal[
    "raise",
    "kill",
    "stop",
    "exit",
    "delay",
    "wrong name",
    "skipped call",
    "second call",
    "frozen coordinator",
    "killed coordinator",
]
MISMATCHES = {"wrong name", "skipped call", "second call"}
DEADLINE_S = 10.0
"""Of the loop's points, except where a delay has to be found by its deadline."""
DELAY_DEADLINE_S = 0.6
DELAY_S = 1.5
STEP = ("load", "forward", "backward", "reduce", "clip", "update", "health")
POINTS: tuple[tuple[str, str], ...] = (
    *((f"step[0]/{name}", name) for name in STEP),
    *((f"step[1]/{name}", name) for name in STEP),
    ("save/attempt", "rank0_decides"),
    ("save/stage", "all_agree"),
    ("save/write", "all_agree"),
    ("save/manifest", "side_effect"),
    ("save/publish", "rank0_decides"),
    ("save/prune", "side_effect"),
    ("sync/pause", "barrier"),
    ("sync/push", "side_effect"),
    ("sync/resume", "vote"),
    ("end/evaluate", "all_agree"),
    ("end/goodbye", "barrier"),
)
"""Where the loop can be hurt, in its order: (scope, what is done there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``gloo``: the loop's reductions are real collectives, and the fault hits one of them."""

    kind: Kind
    where: str
    rank: int
    world: int
    gloo: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} at {self.where} on rank {self.rank} of {self.world}{' gloo' if self.gloo else ''}"

    @property
    def limit_s(self) -> float:
        """From the fault until every other rank has raised."""
        match self.kind:
            case "stop" | "frozen coordinator":
                return 2.5
            case "delay":
                return DELAY_DEADLINE_S + 0.5
            case _:
                return 1.0


def all_cases() -> list[Case]:
    kinds: tuple[Kind, ...] = get_args(Kind)
    cases = []
    for i, (where, what) in enumerate(POINTS):
        world = (2, 4)[i % 2]
        for kind in kinds:
            if kind == "second call" and where == POINTS[-1][0]:
                continue  # no rank is left to raise
            for rank in (0, world - 1):
                cases.append(Case(kind=kind, where=where, rank=rank, world=world))
                if what == "reduce":
                    cases.append(Case(kind=kind, where=where, rank=rank, world=world, gloo=True))
    return cases


def short_cases() -> list[Case]:
    """Each kind on rank 0 and the last one, at points spread over the loop; each kind once in a collective."""
    kinds: tuple[Kind, ...] = get_args(Kind)
    cases = []
    for k, kind in enumerate(kinds):
        for i in range(6):
            where, _ = POINTS[(k + 4 * i) % (len(POINTS) - 1)]
            world = (2, 4)[i % 2]
            cases.append(Case(kind=kind, where=where, rank=(0, world - 1)[(i // 2) % 2], world=world))
        cases.append(Case(kind=kind, where="step[1]/reduce", rank=1, world=3, gloo=True))
    return cases


# --------------------------------------------------------------------------------------------------------------------
# The loop


def loop(context: RankContext, case: Case | None, gloo: bool) -> list[Any]:
    """Two steps, a save and a weight sync, as its points. What it returns is the same on every rank."""
    deadline_s = DELAY_DEADLINE_S if case is not None and case.kind == "delay" else DEADLINE_S
    with context.join() as member:
        reduce = _reducer(member, deadline_s) if gloo else None
        said = []
        for where, what in POINTS:
            scope, _, name = where.partition("/")
            with member.scope(scope), member.scope(name):
                times = 1
                if case is not None and case.where == where and case.rank == context.rank:
                    context.mark("fault")
                    match case.kind:
                        case "skipped call":
                            times = 0
                        case "second call":
                            times = 2
                        case "wrong name":
                            name = "elsewhere"
                        case _:
                            _inject(case.kind, context)
                for _ in range(times):
                    said.append(_do(member, what, name, deadline_s, reduce))
        return said


def _do(member: Member, what: str, name: str, deadline_s: float, reduce: Callable[[str], float] | None) -> Any:
    match what:
        case "rank0_decides":
            return member.rank0_decides(name, lambda: f"decided by {member.rank}", deadline_s=deadline_s)
        case "all_agree":
            return list(member.all_agree(name, lambda: member.rank, deadline_s=deadline_s).values)
        case "side_effect":
            return member.side_effect(name, lambda progress: _half(progress, member), deadline_s=deadline_s)
        case "vote" | "health":
            return list(member.vote(name, True, deadline_s=deadline_s))
        case "reduce" if reduce is not None:
            return reduce(name)
        case _:
            member.barrier(name, deadline_s=deadline_s)
            return None


def _half(progress: Callable[[str], None], member: Member) -> int:
    progress("half")
    return member.rank


def _inject(kind: Kind, context: RankContext) -> None:
    match kind:
        case "raise":
            raise ZeroDivisionError("one by zero")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(3)
        case "delay":
            time.sleep(DELAY_S)
        case "frozen coordinator":
            os.kill(context.pids["coordinator"], signal.SIGSTOP)
        case "killed coordinator":
            os.kill(context.pids["coordinator"], signal.SIGKILL)


def _reducer(member: Member, deadline_s: float) -> Callable[[str], float]:
    import torch  # only the cases that need it pay for it

    from descant.distributed.mesh import Mesh

    mesh = Mesh.create(member, {"all": range(member.world)}, deadline_s=deadline_s)

    def reduce(name: str) -> float:
        tensor = torch.ones(2)
        mesh.groups["all"].all_reduce(tensor, tag=name)
        return float(tensor[0])

    return reduce


# --------------------------------------------------------------------------------------------------------------------
# Checking a case


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    case: str
    wrong: tuple[str, ...]
    hung: int
    leaked: int
    reaction_s: float


def run_case(case: Case, patience: float) -> CaseResult:
    """Run the case, and a healthy run after it in the same directory. ``patience``: as for ``check_run``."""
    with tempfile.TemporaryDirectory(prefix="descant-faults-") as directory:
        run = run_ranks(loop, case.world, case, case.gloo, directory=directory)
        wrong, hung, reaction_s = check_run(case, run, patience)
        after = run_ranks(loop, case.world, None, case.gloo, directory=directory)
        values = [outcome.value for outcome in after.outcomes]
        if values[0] is None or any(value != values[0] for value in values) or after.report is not None:
            wrong.append(f"the next run was not clean: {after.outcomes}")
    leaked = len(run.leaked) + len(after.leaked) + len(_children())
    return CaseResult(case=case.name, wrong=tuple(wrong), hung=hung, leaked=leaked, reaction_s=reaction_s)


def check_run(case: Case, run: Run, patience: float = 1.0) -> tuple[list[str], int, float]:
    """What is wrong, how many ranks hung, and the slowest reaction. ``patience``: times as late as the limits say is
    not too late, on a machine that others use."""
    wrong = []
    fault = run.marks.get("fault")
    if fault is None:
        return ["the fault was never injected"], 0, 0.0
    coordinator_at_fault = case.kind in ("frozen coordinator", "killed coordinator")
    gone = {case.rank} if case.kind in ("kill", "stop", "exit") else set()
    has_left = case.kind == "skipped call" and case.where == POINTS[-1][0]  # before the failure could reach it
    hung, slowest = 0, 0.0
    heard = []
    for rank, outcome in enumerate(run.outcomes):
        if rank in gone:
            if outcome.at is not None:
                wrong.append(f"rank {rank} went on after '{case.kind}'")
            continue
        if outcome.at is None:
            hung += 1
            wrong.append(f"rank {rank} never raised (exit code {outcome.exit_code})")
            continue
        if rank == case.rank and case.kind == "raise":
            if "ZeroDivisionError" not in (outcome.error or ""):
                wrong.append(f"rank {rank} did not raise its own error: {outcome}")
            continue
        if rank == case.rank and has_left:
            continue
        took = outcome.at - fault
        late = patience * (DELAY_S + 0.5 if rank == case.rank and case.kind == "delay" else case.limit_s)
        if took > late:
            wrong.append(f"rank {rank} raised after {took:.2f} s, the limit is {late} s")
        if rank != case.rank or case.kind != "delay":
            slowest = max(slowest, took)
        if outcome.failure is None:
            wrong.append(f"rank {rank} did not fail: {outcome}")
            continue
        heard.append(outcome.failure)
    for failure in heard:
        failed_ranks = set(failure.failed_ranks)
        expected = {COORDINATOR} if coordinator_at_fault else {case.rank}
        tie = case.kind in MISMATCHES and case.world == 2  # of two that differ, either may be right
        if failed_ranks != expected and not (tie and failed_ranks == {0, 1}):
            wrong.append(f"failed_ranks are {sorted(failed_ranks)}, expected {sorted(expected)}: {failure}")
        if case.where not in f"{failure.where} {failure.cause}" and not coordinator_at_fault:
            wrong.append(f"'{case.where}' is not named: {failure}")
        if not coordinator_at_fault and failure != heard[0]:
            wrong.append(f"ranks raised different failures: {failure} / {heard[0]}")
    if not coordinator_at_fault and run.report != (heard[0] if heard else None):
        wrong.append(f"failure.json is {run.report}")
    if run.ended - fault > patience * (5.0 + (DELAY_S if case.kind == "delay" else 0.0)):
        wrong.append(f"everything had ended only {run.ended - fault:.1f} s after the fault")
    return wrong, hung, slowest


def _children() -> list[int]:
    with open(f"/proc/self/task/{threading.get_native_id()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


# --------------------------------------------------------------------------------------------------------------------
# No fault, no alarm


def healthy_loop(context: RankContext, seconds: float, seizure_s: float) -> int:
    """The loop again and again; the last rank now and then makes a call that holds the interpreter. Returns turns."""
    until = time.monotonic() + seconds
    turns = 0
    with context.join() as member:
        rate = _sums_per_second()
        going = True
        while going:
            with member.scope("turn", turns):
                for where, what in POINTS:
                    _do(member, what, where, 60.0, None)
                if context.rank == context.world - 1 and turns % 200 == 100:
                    sum(range(int(rate * seizure_s)))  # one call into C: no other thread of this rank runs meanwhile
                going = member.rank0_decides("go on", lambda: time.monotonic() < until)
            turns += 1
    return turns


def _sums_per_second() -> float:
    began = time.perf_counter()
    sum(range(2_000_000))
    return 2_000_000 / (time.perf_counter() - began)


def run_healthy(seconds: float, world: int = 4, seizure_s: float = 3.0) -> int:
    """The number of alarms."""
    burners = []
    try:
        for _ in range(4 * (os.cpu_count() or 1) - world):
            pid = os.fork()
            if pid == 0:
                while os.getppid() != 1:
                    sum(range(1_000_000))
                os._exit(0)
            burners.append(pid)
        run = run_ranks(healthy_loop, world, seconds, seizure_s, limit_s=seconds + 60)
    finally:
        for pid in burners:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    alarms = [str(outcome.failure or outcome.error) for outcome in run.outcomes if outcome.value is None]
    for alarm in alarms:
        print(alarm)
    turns = run.outcomes[0].value or 0
    print(f"{seconds:.0f} s healthy, {turns} turns of {len(POINTS) + 1} points on {world} ranks, {len(alarms)} alarms")
    return len(alarms)


# --------------------------------------------------------------------------------------------------------------------
# The command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m descant.testing.faults", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--healthy", type=float, metavar="S")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--patience", type=float, default=1.0, metavar="TIMES", help="for machines that others use")
    options = parser.parse_args(arguments)
    if options.healthy is not None:
        return 1 if run_healthy(options.healthy) else 0
    cases = [case for case in (short_cases() if options.short else all_cases()) if options.only in case.name]
    if any(case.gloo for case in cases):
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch  # noqa: F401  # once, here: the ranks are forks
    began = time.monotonic()
    results = _run_side_by_side(cases, options.jobs, options.patience)
    passed = sum(not result.wrong and not result.hung and not result.leaked for result in results)
    lost = len(cases) - len(results)
    for kind in get_args(Kind):
        took = sorted(v.reaction_s for v in results if v.case.startswith(f"{kind} at"))
        if took:
            print(
                f"{kind:15} {len(took):4} cases, slowest rank raised after {took[len(took) // 2]:.3f} s"
                f" (median), {took[-1]:.3f} s (worst)"
            )
    print(f"{time.monotonic() - began:.0f} s")
    hung = lost + sum(result.hung > 0 for result in results)
    leaked = sum(result.leaked > 0 for result in results)
    print(f"{len(cases)} cases, {passed} passed, {hung} hung, {leaked} leaked")
    return 0 if passed == len(cases) else 1


def _run_side_by_side(cases: Sequence[Case], jobs: int, patience: float) -> list[CaseResult]:
    """Each job is a fork of this process, which has one thread; its results come as lines."""
    sys.stdout.flush()
    workers = []
    for job in range(jobs):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)  # the failures that coordinators print
            with open(write_end, "w", buffering=1, encoding="utf-8") as lines:
                for case in cases[job::jobs]:
                    result = run_case(case, patience)
                    print(
                        json.dumps([result.case, result.wrong, result.hung, result.leaked, result.reaction_s]),
                        file=lines,
                    )
            os._exit(0)
        os.close(write_end)
        workers.append((pid, read_end))
    results = []
    for pid, read_end in workers:
        with open(read_end, encoding="utf-8") as lines:
            for line in lines:
                name, wrong, hung, leaked, reaction_s = json.loads(line)
                result = CaseResult(case=name, wrong=tuple(wrong), hung=hung, leaked=leaked, reaction_s=reaction_s)
                for text in result.wrong:
                    print(f"FAILED {name}: {text}", flush=True)
                results.append(result)
        os.waitpid(pid, 0)
    return results


# --------------------------------------------------------------------------------------------------------------------
# Ranks of the service that go wrong as they start


def build_crashing(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> NoReturn:
    phase("looking for trouble")
    print("about to crash", flush=True)
    os.abort()


def build_refusing(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> NoReturn:
    raise UserError(f"{spec.model} cannot be served")


def build_raising(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> NoReturn:
    phase("dividing")
    raise ZeroDivisionError("one by zero")


def build_hanging(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> NoReturn:
    phase("waiting for ever")
    threading.Event().wait()
    raise AssertionError("the event is never set")


if __name__ == "__main__":
    sys.exit(main())
