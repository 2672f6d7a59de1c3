"""The fault tool, and that it can tell a failure."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from descant.distributed.failure import COORDINATOR, DistributedFailure
from descant.testing.faults import POINTS, Case, all_cases, check_run, short_cases
from descant.testing.gloo import RankOutcome, Run

pytestmark = pytest.mark.crashes

ROOT = Path(__file__).parents[2]
CASE = Case(kind="kill", where="step[0]/load", rank=1, world=3)
FAILURE = DistributedFailure(failed_ranks=(1,), where="step[0]/load", cause="rank 1 was killed by SIGKILL")
HEARD = RankOutcome(failure=FAILURE, exit_code=1, at=10.1)
GOOD = Run(outcomes=(HEARD, RankOutcome(exit_code=-9), HEARD), marks={"fault": 10.0}, report=FAILURE, ended=10.5)


def test_the_matrix_is_whole():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases) >= 500
    assert len(POINTS) == 25
    assert len(short_cases()) >= 60
    assert {case.kind for case in short_cases()} == {case.kind for case in cases}


def test_a_good_run_passes():
    assert check_run(CASE, GOOD)[:2] == ([], 0)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        pytest.param({"marks": {}}, "never injected", id="no fault"),
        pytest.param({"outcomes": (RankOutcome(exit_code=-9), *GOOD.outcomes[1:])}, "never raised", id="hung"),
        pytest.param({"outcomes": (HEARD, HEARD, HEARD)}, "went on after", id="survived"),
        pytest.param({"marks": {"fault": 8.9}}, "the limit is 1.0 s", id="late"),
        pytest.param({"outcomes": (RankOutcome(value=1, at=10.1), *GOOD.outcomes[1:])}, "did not fail", id="unharmed"),
        pytest.param({"report": None}, "failure.json", id="no report"),
        pytest.param({"ended": 15.5}, "after the fault", id="slow end"),
    ],
)
def test_a_bad_run_does_not(run: dict[str, object], says: str):
    wrong, _, _ = check_run(CASE, dataclasses.replace(GOOD, **run))  # type: ignore[arg-type]
    assert any(says in text for text in wrong)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"failed_ranks": (0,)}, "expected [1]", id="wrong rank"),
        pytest.param({"failed_ranks": (0, 1)}, "expected [1]", id="one too many"),
        pytest.param({"failed_ranks": (COORDINATOR,)}, "expected [1]", id="the coordinator"),
        pytest.param({"where": "step[1]/load", "cause": "x"}, "is not named", id="wrong place"),
    ],
)
def test_a_wrong_failure_does_not_pass(change: dict[str, object], says: str):
    failure = DistributedFailure.from_json({**FAILURE.to_json(), **change})
    outcome = dataclasses.replace(HEARD, failure=failure)
    run = dataclasses.replace(GOOD, outcomes=(outcome, GOOD.outcomes[1], outcome), report=failure)
    assert any(says in text for text in check_run(CASE, run)[0])


def test_what_is_late_is_so_for_the_impatient():
    late = dataclasses.replace(GOOD, marks={"fault": 8.9})
    assert check_run(CASE, late, patience=2.0)[:2] == ([], 0)


@pytest.mark.parametrize("only", ["rank 0 of 2", "killed coordinator"])
def test_the_tool(only: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "descant.testing.faults", "--short", "--only", only, "--patience", "15"],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    number = sum(only in case.name for case in short_cases())
    last = done.stdout.strip().splitlines()[-1]
    assert last == f"{number} cases, {number} passed, 0 hung, 0 leaked", done.stdout
    assert done.returncode == 0


def test_no_alarm_without_a_fault():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "descant.testing.faults", "--healthy", "6"],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stdout
    assert "0 alarms" in done.stdout
