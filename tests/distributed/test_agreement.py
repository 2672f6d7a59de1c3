"""Points and what is made of them, on real processes with a real coordinator."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from descant.distributed.coordinator.client import WATCHDOG_EXIT_CODE
from descant.distributed.failure import DistributedFailure, RankRow
from descant.errors import ServerError
from descant.testing.gloo import Run, Zygote

pytestmark = pytest.mark.crashes

HERE = "tests.distributed.agreements:"


def failures(run: Run, *without: int) -> list[DistributedFailure]:
    """Those of all ranks but ``without``; that they are equal, and in the report, is checked here."""
    assert run.leaked == ()
    heard = [outcome.failure for rank, outcome in enumerate(run.outcomes) if rank not in without]
    assert None not in heard, run
    assert all(failure == heard[0] for failure in heard)
    assert run.report == heard[0]
    return heard  # type: ignore[return-value]


def test_values_reach_every_rank(ranks: Zygote):
    run = ranks.run(HERE + "values", 3)
    common = [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [2, 1, 0], [0, None, "ä"], 1, [True, False, True], [0, 10, 20]]
    assert [outcome.value for outcome in run.outcomes] == [[*common, [0, 2]], common, [*common, [0, 2]]]
    assert run.report is None


def test_agreed_failures_are_the_same_everywhere_and_all_go_on(ranks: Zygote):
    run = ranks.run(HERE + "errors", 3)
    assert [outcome.value for outcome in run.outcomes] == [
        [
            ("rank 0: OSError: input/output error", (0,), True),
            ("rank 1: ValueError: no", (1,), True),
            ("rank 1: ValueError: fatal", (1,), True),
            ("retry", (1,), True),
            (
                "rank 0: TypeError: save/set got set, expected a JSON value: Object of type set is not JSON "
                "serializable",
                (0,),
                True,
            ),
            (
                "rank 0: TypeError: save/tuple got (1, 2), expected a JSON value; it would arrive as [1, 2]",
                (0,),
                True,
            ),
            ("rank 0: rank 0 says so", (0,), True),
        ]
    ] * 3
    assert run.report is None


def test_an_agreed_failure_that_is_not_handled_is_the_run_s(ranks: Zygote):
    run = ranks.run(HERE + "unheeded", 3)
    assert [outcome.failure.cause for outcome in run.outcomes if outcome.failure] == [
        "rank 0: ZeroDivisionError: integer division or modulo by zero"
    ] * 3
    assert run.report is not None
    assert run.report.failed_ranks == (0,)


def test_a_rank_that_never_joins_is_named(ranks: Zygote):
    run = ranks.run(HERE + "missing", 3, 0.5)
    [failure, _] = failures(run, 1)
    assert (failure.failed_ranks, failure.where) == ((1,), "join")
    assert "absent: it never joined" in failure.cause


def test_points_of_different_groups_that_wait_for_each_other(ranks: Zygote):
    run = ranks.run(HERE + "crossed", 3)
    [failure, *_] = failures(run)
    assert failure.failed_ranks == (0, 1)  # rank 2 is not in the pair: it is no witness
    assert "rank 1 at in the pair" in failure.cause


def test_a_call_that_holds_the_interpreter_is_no_failure(ranks: Zygote):
    assert [o.value for o in ranks.run(HERE + "seized", 2, 2.0).outcomes] == ["well", "well"]


def test_a_rank_stopped_for_a_moment_is_no_failure(ranks: Zygote):
    assert [o.value for o in ranks.run(HERE + "stopped_for_a_moment", 2).outcomes] == ["well", "well"]


def test_death_is_seen_where_a_child_keeps_the_sockets_open(ranks: Zygote):
    run = ranks.run(HERE + "held_open", 2)
    [failure] = failures(run, 1)
    assert failure.failed_ranks == (1,)
    assert "was killed by SIGKILL" in failure.cause


def test_a_blocked_rank_is_ended_by_the_watchdog(ranks: Zygote):
    run = ranks.run(HERE + "blocked", 2)
    assert run.outcomes[0].exit_code == WATCHDOG_EXIT_CODE
    assert run.report is not None
    assert (run.report.failed_ranks, run.leaked) == ((1,), ())
    assert run.report.table[0].where == "in stuck"


def test_strangers_on_the_port_change_nothing(ranks: Zygote):
    run = ranks.run(HERE + "intruder", 2)
    assert run.report is None
    assert "closed the connection" in run.outcomes[0].value
    assert "rank 1 of 2 as 'points' is taken" in run.outcomes[0].value


def test_a_stop_on_another_machine_is_reported_by_its_watcher(ranks: Zygote):
    run = ranks.run(HERE + "elsewhere", 3)
    [failure, _] = failures(run, 1)
    assert failure.failed_ranks == (1,)
    assert "stopped by a signal" in failure.cause
    assert failure.where == "far away"


def test_the_failure_pickles_and_is_a_server_error():
    row = RankRow(rank=1, state="dead", where="in x", since_s=1.5, last=("a", "b"))
    failure = DistributedFailure(failed_ranks=(1, -1), where="x", cause="because", table=(row,), recoverable=True)
    copy = pickle.loads(pickle.dumps(failure))
    assert isinstance(copy, ServerError)
    assert copy == failure
    assert copy.table == (row,)
    assert str(copy) == "rank 1 and the coordinator failed at x: because"
    assert "rank 1: dead, in x, since 1.5 s\n      a\n      b" in copy.report()


# ---- the field's own mistakes, as far as they need no tensor


def test_slow_http_fan_out_others_wait_and_all_go_on(ranks: Zygote):
    run = ranks.run(HERE + "fan_out", 3, 0.5, 5.0)
    assert [outcome.value for outcome in run.outcomes] == ["published"] * 3


def test_http_fan_out_that_fails_on_one_rank_fails_on_all(ranks: Zygote):
    run = ranks.run(HERE + "fan_out", 3, 9.0, 0.3)
    [said] = {outcome.value for outcome in run.outcomes}
    assert said.startswith("(0,) step[3]/lora/publish rank 0: ")
    assert "timed out" in said


def test_http_fan_out_under_a_deadline_names_the_engine_it_waits_for(ranks: Zygote):
    run = ranks.run(HERE + "overtaken", 3)
    [failure, *_] = failures(run)
    assert failure.failed_ranks == (0,)
    assert "in step[3]/lora/publish: engine 2 of 4" in failure.cause


def test_divergent_exists_is_found_at_once(ranks: Zygote, tmp_path: Path):
    run = ranks.run(HERE + "different_roads", 3, str(tmp_path))
    [failure, *_] = failures(run)
    assert (failure.failed_ranks, failure.where) == ((1,), "resume")
    assert "rank 1 at start afresh" in failure.cause


def test_divergent_exists_cannot_happen_when_one_rank_decides(ranks: Zygote, tmp_path: Path):
    run = ranks.run(HERE + "one_road", 3, str(tmp_path))
    assert [outcome.value for outcome in run.outcomes] == [True] * 3


@pytest.mark.parametrize("world", [2, 4])
def test_agreement_only_where_it_failed(ranks: Zygote, world: int):
    run = ranks.run(HERE + "agreement_in_one_branch", world)
    [failure, *_] = failures(run)
    assert failure.failed_ranks == ((0, 1) if world == 2 else (1,))
    assert "rank 1 at save/retry" in failure.cause
