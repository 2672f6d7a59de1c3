"""The mesh and its collectives on gloo."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from descant.distributed.coordinator.client import WATCHDOG_EXIT_CODE
from descant.distributed.failure import DistributedFailure
from descant.distributed.mesh import Group
from descant.testing.gloo import Zygote
from tests.distributed.test_agreement import failures

pytestmark = pytest.mark.crashes

HERE = "tests.distributed.programs:"


def test_collectives_never_ask_for_the_default_group(gloo_ranks: Zygote):
    run = gloo_ranks.run(HERE + "sums", 4)
    assert [outcome.value for outcome in run.outcomes] == [
        {"total": [6.0] * 3, "most": 3, "sent": 1, "row": [0, 2]},
        {"total": [6.0] * 3, "most": 3, "sent": 1, "row": [1, 3]},
        {"total": [6.0] * 3, "most": 3, "sent": 3, "row": [0, 2]},
        {"total": [6.0] * 3, "most": 3, "sent": 3, "row": [1, 3]},
    ]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("swapped order", "differ from call 1 on"),
        ("wrong root", "rank 1 step[7]/weights broadcast [4] float32 root=1"),
        ("skipped collective", "rank 1 made 0"),
        ("other op", "rank 1 step[7]/x all_reduce [4] float32 max"),
        ("dies in a collective", "rank 1 was killed by SIGKILL"),
        ("stops in a collective", "rank 1 has been stopped by a signal"),
        ("raises beside a collective", "rank 1 raised ValueError: only here"),
        ("late for a collective", "rank 1 is running, in step[7]"),
    ],
)
def test_a_rank_that_goes_another_way_is_named(gloo_ranks: Zygote, how: str, names: str):
    run = gloo_ranks.run(HERE + "diverge", 3, how, 1)
    [failure, *_] = failures(run, *({1} if "dies" in how or "stops" in how or "raises" in how else ()))
    assert failure.failed_ranks == (1,)
    assert names in failure.cause
    assert "step[7]" in failure.where


def test_barrier_on_the_union_group(gloo_ranks: Zygote):
    """Rank 1 takes the group of all for the group of two; the third, who is in no barrier, would never come."""
    run = gloo_ranks.run(HERE + "diverge", 3, "union group", 1)
    [failure, *_] = failures(run)
    assert 1 in failure.failed_ranks
    assert "rank 1 made 1, rank 2 made 0" in failure.cause


def test_broadcast_with_a_local_rank_as_source(gloo_ranks: Zygote):
    """A root is a rank within the group; each member passing its own is found although the data seems to arrive."""
    run = gloo_ranks.run(HERE + "diverge", 2, "wrong root", 1)
    [failure, _] = failures(run)
    assert "broadcast [4] float32 root=0" in failure.cause
    assert "broadcast [4] float32 root=1" in failure.cause


def test_a_group_created_on_one_side_only(gloo_ranks: Zygote):
    run = gloo_ranks.run(HERE + "group_on_one_side", 3)
    [failure, *_] = failures(run)
    assert failure.failed_ranks == (0,)
    assert '"extra": [0, 1]' in failure.cause


def test_shapes_that_differ_are_found_before_the_call(gloo_ranks: Zygote):
    run = gloo_ranks.run(HERE + "mismatch_before", 3)
    [failure, *_] = failures(run)
    assert failure.failed_ranks == (0,)
    assert "rank 0 says 'gradients all_reduce [3] float32 sum'" in failure.cause


def test_a_wait_of_several_slices_ends_well(gloo_ranks: Zygote):
    assert [outcome.value for outcome in gloo_ranks.run(HERE + "slices", 2).outcomes] == [True, True]


def test_a_group_is_bound_to_its_thread(gloo_ranks: Zygote):
    for outcome in gloo_ranks.run(HERE + "two_threads", 2).outcomes:
        assert "the order of sync points and collectives would be undefined" in outcome.value


def test_bad_arguments_say_what_was_expected(gloo_ranks: Zygote):
    said, more = (outcome.value for outcome in gloo_ranks.run(HERE + "bad_arguments", 2).outcomes)
    assert said == [
        "broadcast 'x' has root 2, expected a rank within group 'all' of 2",
        "all_reduce on group 'all' has an empty tag",
        "group 'all' is declared already",
        "group 'new' has ranks [0, 0], expected distinct ones of 0 to 1",
        "group 'nowhere' was never declared; there are ['all', 'one', 'world']",
    ]
    assert more[-1] == "rank 1 is no member of group 'one' [0]"


def test_death_while_groups_are_made(gloo_ranks: Zygote):
    """Torch's own waits cannot be left: the ranks in them raise when torch lets them, or are ended."""
    run = gloo_ranks.run(HERE + "dies_in_creation", 3)
    assert run.report is not None
    assert (run.report.failed_ranks, run.report.where, run.leaked) == ((1,), "mesh/all", ())
    for rank in (0, 2):
        outcome = run.outcomes[rank]
        assert outcome.exit_code == WATCHDOG_EXIT_CODE or outcome.failure == run.report, outcome


def test_fsdp2_on_a_group_of_the_mesh(gloo_ranks: Zygote):
    run = gloo_ranks.run(HERE + "sharded", 2)
    assert [outcome.value for outcome in run.outcomes] == [0.0, 0.0], run


class _Call:
    """A collective that ends while nobody waits: after the first slice has ended, before anything else is asked."""

    def __init__(self, error: str | None):
        self.error, self.slices = error, 0

    def is_completed(self) -> bool:
        return self.slices > 0

    def wait(self, timeout: timedelta) -> None:
        self.slices += 1
        if self.slices == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)


def test_a_call_that_ends_just_behind_a_slice_has_ended_as_it_says():
    def failed(identity: str, error: Exception) -> NoReturn:
        raise DistributedFailure(failed_ranks=[0], where=identity, cause=str(error))

    member = SimpleNamespace(raise_if_failed=lambda: None, collective_failed=failed)
    group = cast(Group, SimpleNamespace(_member=member))
    Group._wait(group, cast(Any, _Call(None)), "turn broadcast", 1.0)
    with pytest.raises(DistributedFailure, match="closed by peer"):
        Group._wait(group, cast(Any, _Call("closed by peer")), "turn broadcast", 1.0)
