"""The rules of training requests over a runner without torch: which passes run, whose gradient counts, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from descant.errors import NotFound, ServerError, UserError
from descant.testing.fake_passes import FakePassRunner
from descant.testing.pass_runner import ADAM, BREAKS, datum
from descant.train.requests import Learner
from descant.train.runner import Gradient, Part, PassItem, RequestKey
from descant.types import AdamParams, Datum, ForwardBackward, OptimStepOutput

DATA = (datum(1, 2, 3), datum(4, 2, 6, 7, 8), datum(3, 1, 7, 9))
BROKEN = datum(3, 1, 7, 9, **BREAKS)
HARMLESS = datum(3, 1, 7, 9, logprobs=[-1.0] * 4, advantages=[1.0] * 4)


def command(
    model_id: str, seq_id: int, *data: Datum, loss_fn: str = "cross_entropy", forward_only: bool = False
) -> ForwardBackward:
    return ForwardBackward(
        model_id=model_id, seq_id=seq_id, data=data or DATA, loss_fn=loss_fn, forward_only=forward_only
    )


def parts(request: RequestKey, *datums: int) -> list[Part]:
    return [Part(request=request, datum=index) for index in datums]


def train(learner: Learner, one: ForwardBackward) -> Any:
    request = learner.open(one)
    learner.run(parts(request, *range(len(one.data))))
    return learner.close(request)


def launches(runner: FakePassRunner) -> list[str]:
    """The parts of each pass, those that failed in brackets."""
    found: list[str] = []
    for entry in runner.log:
        if entry.startswith("launch "):
            found.append(entry.removeprefix("launch "))
        elif entry == "failed":
            found[-1] = f"({found[-1]})"
    return found


def fails_with(*bad: tuple[str, int]) -> Callable[[Sequence[PassItem]], bool]:
    """With any of these datums, by model."""
    return lambda items: any((item.model_id, item.part.datum) in bad for item in items)


@pytest.fixture
def runner() -> FakePassRunner:
    runner = FakePassRunner()
    for model_id in "abc":
        runner.create(model_id)
    return runner


@pytest.fixture
def learner(runner: FakePassRunner) -> Learner:
    return Learner(runner)


# ------------------------------------------------------------------------------------------------------ when passes run
def test_an_asynchronous_pass_is_waited_for_when_the_next_is_launched_or_somebody_asks() -> None:
    runner = FakePassRunner(asynchronous=True)
    runner.create("a")
    learner = Learner(runner)
    request = learner.open(command("a", 1))
    for index in range(3):
        learner.run(parts(request, index))
    assert runner.log == ["launch a1.0", "launch a1.1", "wait a1.0", "launch a1.2", "wait a1.1"]
    assert learner.has_launched_pass
    learner.close(request)
    assert runner.log[5:] == ["wait a1.2"]
    learner.wait()
    assert runner.log[6:] == []


def test_a_pass_that_is_not_asynchronous_is_waited_for_at_once(runner: FakePassRunner, learner: Learner) -> None:
    request = learner.open(command("a", 1))
    learner.run(parts(request, 2, 0))
    assert runner.log == ["launch a1.2 a1.0", "wait a1.2 a1.0"]
    assert not learner.has_launched_pass


def test_one_sequence_a_pass_where_tokens_would_meet(runner: FakePassRunner, learner: Learner) -> None:
    apart = FakePassRunner(facts=replace(runner.facts, packable=False))
    outputs = []
    for on, rules in ((runner, learner), (apart, Learner(apart))):
        for model_id in "ab":
            on.create(model_id)
        requests = [rules.open(command("a", 1, *DATA[:2])), rules.open(command("b", 1, DATA[2]))]
        rules.run([*parts(requests[0], 0, 1), *parts(requests[1], 0)])
        outputs.append([rules.close(request) for request in requests])
    assert launches(runner) == ["a1.0 a1.1 b1.0"]
    assert launches(apart) == ["a1.0", "a1.1", "b1.0"]
    for model_id, want, got in zip("ab", *outputs):
        assert got.metrics["loss:sum"] == want.metrics["loss:sum"]
        assert apart.gradient(model_id) == pytest.approx(runner.gradient(model_id), rel=1e-12)


def test_ranks_in_lockstep_make_empty_passes_and_raise_what_fails() -> None:
    runner = FakePassRunner(lockstep=True)
    runner.create("a")
    learner = Learner(runner)
    request = learner.open(command("a", 1))
    learner.run([], backward=True)
    learner.run(parts(request, 0), backward=True)
    learner.abandon(request)
    learner.run(parts(request, 1), backward=True)
    assert runner.log == ["empty", "launch a1.0", "wait a1.0", "empty"]
    request = learner.open(command("a", 2))
    runner.fails = lambda items: True
    with pytest.raises(MemoryError):
        learner.run(parts(request, 0), backward=True)


class Measured(FakePassRunner):
    """Notes the gradients that each pass is told are complete, and those that somebody asks for besides."""

    def launch(self, items: Sequence[PassItem], *, complete: Sequence[Gradient], backward: bool = False) -> Any:
        launched = super().launch(items, complete=complete, backward=backward)
        self.log.append(f"complete {''.join(gradient.model_id for gradient in complete)}")
        return launched

    def magnitudes(self, gradients: Sequence[Gradient]) -> list[float]:
        self.log.append(f"measure {''.join(gradient.model_id for gradient in gradients)}")
        return super().magnitudes(gradients)


def test_a_gradient_is_measured_once_with_the_pass_that_completes_it() -> None:
    runner = Measured()
    learner = Learner(runner)
    requests = []
    for model_id in "abc":
        runner.create(model_id)
        requests.append(learner.open(command(model_id, 1, forward_only=model_id == "c")))
    for datums in ((0, 1), (2,)):
        learner.run([part for request in requests for part in parts(request, *datums)])
    learner.run(parts(requests[0], 0))
    measured = [entry for entry in runner.log if not entry.startswith(("launch", "wait"))]
    assert measured == ["measure ", "complete ", "measure ab", "complete ab", "measure a", "complete a"]
    learner.contributions(requests[:2])
    assert len(runner.log) == 12
    shared = learner.open(command("b", 2))  # of which another rank computes the rest
    learner.run(parts(shared, 0))
    runner.log.clear()
    learner.contributions([shared])
    assert runner.log == ["measure b"]


# ------------------------------------------------------------------------------------------------------- whose fault
def test_what_fails_alone_fails_its_request_and_the_others_are_whole(runner: FakePassRunner, learner: Learner) -> None:
    undisturbed = FakePassRunner()
    for model_id in "abc":
        undisturbed.create(model_id)
    for model_id in "ac":
        train(Learner(undisturbed), command(model_id, 1))

    requests = {model_id: learner.open(command(model_id, 1)) for model_id in "abc"}
    learner.run([part for request in requests.values() for part in parts(request, 0)])
    runner.fails = fails_with(("b", 1))
    runner.log.clear()
    learner.run([part for request in requests.values() for part in parts(request, 1, 2)])
    assert launches(runner) == [
        "(a1.1 a1.2 b1.1 b1.2 c1.1 c1.2)",
        "a1.0",  # what was in its gradient before, which the failed pass wrote into
        "a1.1 a1.2",
        "b1.0",
        "(b1.1 b1.2)",
        "b1.0",
        "(b1.1)",
        "c1.0",
        "c1.1 c1.2",
    ]
    assert runner.log.count("recover") == 3
    for model_id in "ac":
        learner.close(requests[model_id])
        assert runner.gradient(model_id) == pytest.approx(undisturbed.gradient(model_id), rel=1e-12)
    with pytest.raises(ServerError, match=r"^data\[1\], alone in its pass, ran out of memory$"):
        learner.close(requests["b"])
    assert not runner.gradient("b").any()
    with pytest.raises(UserError, match=r"missing: forward_backward with seq_id 1 failed: .* ran out of memory$"):
        learner.optim_step("b", ADAM)


def test_what_wrote_no_gradient_yet_leaves_the_passes_before_it(runner: FakePassRunner, learner: Learner) -> None:
    request = learner.open(command("a", 1))
    learner.run(parts(request, 0))
    runner.wrote_gradients = False
    runner.fails = lambda items: len(items) > 1
    learner.run(parts(request, 1, 2))
    assert launches(runner) == ["a1.0", "(a1.1 a1.2)", "(a1.1 a1.2)", "a1.1", "a1.2"]
    assert learner.close(request).metrics["microbatches:sum"] == 3


def test_a_failure_waits_for_the_pass_under_way_before_anything_is_undone() -> None:
    runner = FakePassRunner(asynchronous=True)
    runner.create("a")
    learner = Learner(runner)
    request = learner.open(command("a", 1))
    learner.run(parts(request, 0))
    once = iter([True])
    runner.fails = lambda items: next(once, False)
    runner.log.clear()
    learner.run(parts(request, 1, 2))
    assert runner.log == [
        "launch a1.1 a1.2",
        "failed",
        "wait a1.0",
        "recover",
        "launch a1.0",
        "launch a1.1 a1.2",
        "wait a1.0",
    ]
    learner.close(request)
    undisturbed = FakePassRunner()
    undisturbed.create("a")
    train(Learner(undisturbed), command("a", 1))
    assert runner.gradient("a") == pytest.approx(undisturbed.gradient("a"), rel=1e-12)


def test_a_loss_that_is_not_finite_is_told_with_what_it_was_made_of(runner: FakePassRunner, learner: Learner) -> None:
    with pytest.raises(
        UserError,
        match=r"^data\[1\] has a loss that is not finite at position 2: loss_fn 'importance_sampling' of "
        r"log-probability -\d\.\d+, logprobs -1e\+38, advantages 1$",
    ):
        train(learner, command("a", 1, HARMLESS, BROKEN, loss_fn="importance_sampling"))
    assert not runner.gradient("a").any()
    learner.open(failed := command("a", 2, BROKEN, HARMLESS, loss_fn="importance_sampling"))
    learner.run(parts(("a", 2), 0))
    learner.run(parts(("a", 2), 1))
    assert launches(runner)[1:] == ["a2.0"], "a request that has failed is not computed any more"
    learner.abandon((failed.model_id, failed.seq_id))


def test_a_model_that_went_while_its_request_was_open(runner: FakePassRunner, learner: Learner) -> None:
    requests = [learner.open(command(model_id, 1)) for model_id in "ab"]
    runner.delete("a")
    learner.run([*parts(requests[0], 0, 1, 2), *parts(requests[1], 0, 1, 2)])
    assert launches(runner) == ["b1.0 b1.1 b1.2"]
    with pytest.raises(NotFound):
        learner.close(requests[0])
    learner.close(requests[1])


# ------------------------------------------------------------------------------------------------------- what counts
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
@pytest.mark.parametrize("closing", list(permutations(range(3))), ids=str)
def test_requests_of_one_model_count_each_as_a_whole(
    runner: FakePassRunner, learner: Learner, closing: tuple[int, ...], failing: int | None
) -> None:
    """Whoever has the model's own gradient, and in whatever order they close."""
    data = [
        BROKEN if number == failing else datum(number + 1, 5, 7, 9, logprobs=[-1.0] * 4, advantages=[1.0] * 4)
        for number in range(3)
    ]
    expected = np.zeros_like(runner.gradient("a"))
    for number, one in enumerate(data):
        if number != failing:
            alone = FakePassRunner()
            alone.create("a")
            train(Learner(alone), command("a", 1, one, loss_fn="importance_sampling"))
            expected += alone.gradient("a")

    requests = [
        learner.open(command("a", 1 + number, one, loss_fn="importance_sampling")) for number, one in enumerate(data)
    ]
    assert len(runner.scratch) == 2
    learner.run([Part(request=request, datum=0) for request in requests])
    for number in closing:
        if number == failing:
            with pytest.raises(UserError):
                learner.close(requests[number])
        else:
            learner.close(requests[number])
    assert runner.gradient("a") == pytest.approx(expected, rel=1e-9)
    assert runner.scratch == {}
    assert learner.has_pending_gradient("a")


def test_the_worst_outcome_over_ranks_is_everybodys() -> None:
    """Two ranks share three requests: one fails on the second rank alone, one is computed by both, one by the first."""
    runners = [FakePassRunner(), FakePassRunner()]
    learners = [Learner(runner) for runner in runners]
    shared, fails, lone = command("a", 1), command("b", 1), command("c", 1, DATA[0])
    shares = [[(shared, (0, 2)), (fails, (0,)), (lone, (0,))], [(shared, (1,)), (fails, (1, 2))]]
    runners[1].fails = fails_with(("b", 2))
    for runner, learner, share in zip(runners, learners, shares):
        for one in (shared, fails, lone):
            runner.create(one.model_id)
            learner.open(one)
        learner.run([part for one, datums in share for part in parts((one.model_id, 1), *datums)])
    keys = [("a", 1), ("b", 1), ("c", 1)]
    reports = [learner.contributions(keys) for learner in learners]
    outputs = []
    for runner, learner in zip(runners, learners):
        outputs.append([learner.close(key, [report[key] for report in reports]) for key in (("a", 1), ("c", 1))])
        with pytest.raises(ServerError, match=r"^data\[2\], alone in its pass, ran out of memory$"):
            learner.close(("b", 1), [report["b", 1] for report in reports])
        assert not runner.gradient("b").any()
        with pytest.raises(UserError, match="missing"):
            learner.optim_step("b", ADAM)
    assert outputs[0][0].metrics == outputs[1][0].metrics
    alone = FakePassRunner()
    alone.create("a")
    whole = train(Learner(alone), shared)
    assert outputs[0][0].metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-12)
    for got, want in zip(outputs[0][0].loss_fn_outputs, whole.loss_fn_outputs):
        assert np.array_equal(got["logprobs"], want["logprobs"])
    assert runners[0].gradient("a") + runners[1].gradient("a") == pytest.approx(alone.gradient("a"), rel=1e-9)


def test_what_another_rank_could_not_open_is_refused_here(runner: FakePassRunner, learner: Learner) -> None:
    one = command("a", 1)
    learner.open(one)
    learner.refuse(one, ServerError("no room there"))
    with pytest.raises(UserError, match=r"missing: forward_backward with seq_id 1 failed: no room there$"):
        learner.optim_step("a", ADAM)
    learner.refuse(command("a", 2, forward_only=True), ServerError("no room there"))
    assert learner.optim_step("a", ADAM).metrics["skipped:max"] == 1


def test_a_request_is_closed_when_all_of_it_ran(runner: FakePassRunner, learner: Learner) -> None:
    request = learner.open(command("a", 1))
    learner.run(parts(request, 0, 2))
    with pytest.raises(ServerError, match=r"^forward_backward with seq_id 1 was closed after 2 of its 3 datums$"):
        learner.close(request)
    assert not runner.gradient("a").any()


def test_gradients_beyond_float32_do_not_count(runner: FakePassRunner, learner: Learner) -> None:
    huge = datum(1, 2, 3, weights=[3e38] * 3)
    train(learner, command("a", 1, datum(1, 2, 3)))
    before = np.abs(runner.gradient("a")).max()
    learner.optim_step("a", AdamParams(learning_rate=0.0))
    with pytest.raises(UserError, match=r"^the gradient is not finite, expected finite numbers"):
        train(learner, command("a", 2, *[huge] * 40))
    with pytest.raises(UserError, match="missing"):
        learner.optim_step("a", ADAM)

    edge = datum(1, 2, 3, weights=[0.6 * float(np.finfo(np.float32).max) / max(before, 1.0)] * 3)
    most = math.ceil(max(before, 1.0) / before)
    train(learner, command("a", 3, *[edge] * most))
    pending = runner.gradient("a")
    with pytest.raises(UserError, match=r"^the sum of this gradient and those before it is not finite"):
        train(learner, command("a", 4, *[edge] * most))
    assert np.array_equal(runner.gradient("a"), pending)
    assert runner.scratch == {}


def test_without_memory_for_a_scratch_the_gradient_is_poisoned(runner: FakePassRunner, learner: Learner) -> None:
    runner.max_scratch = 0
    first = learner.open(command("a", 1))
    with pytest.raises(ServerError, match="no room"):
        learner.open(command("a", 2))
    learner.open(command("a", 3, forward_only=True))
    learner.run(parts(first, 0, 1, 2))
    learner.close(first)
    with pytest.raises(UserError, match=r"missing: forward_backward with seq_id 2 failed: no room"):
        learner.optim_step("a", ADAM)
    assert not learner.has_pending_gradient("a")


# ------------------------------------------------------------------------------------------------------- who may step
def test_who_may_step(runner: FakePassRunner, learner: Learner) -> None:
    """Who has a gradient that is whole. What one is refused for is its own; a refused one's gradient is cleared."""
    runner.create("d")
    runner.create("e")
    for model_id in "abd":
        train(learner, command(model_id, 1))
    learner.poison("b", "the first reason")
    learner.poison("b", "the second")
    learner.open(command("d", 2))
    steps = [("a", ADAM), ("b", ADAM), ("c", ADAM), ("d", ADAM), ("e", AdamParams(beta1=2.0)), ("gone", ADAM)]
    outcomes = learner.optim_steps(steps)
    assert [type(outcome) for outcome in outcomes] == [
        OptimStepOutput,
        UserError,
        OptimStepOutput,
        ServerError,
        UserError,
        NotFound,
    ]
    taken, poisoned, skipped, still_open, out_of_range, _ = outcomes
    assert isinstance(taken, OptimStepOutput)
    assert taken.metrics.keys() == {"grad_norm:mean", "step:max"}
    assert str(poisoned).endswith("since a part of it is missing: the first reason")
    assert isinstance(skipped, OptimStepOutput)
    assert skipped.metrics == {"grad_norm:mean": 0.0, "step:max": 0.0, "skipped:max": 1.0}
    assert str(still_open) == "optim_step came while forward_backward with seq_id 2 was open"
    assert str(out_of_range).startswith("adam_params.beta1 is 2.0")
    assert [runner.gradient(model_id).any() for model_id in "abd"] == [False, False, True]
    assert [runner.state(model_id).step for model_id in "abcde"] == [1, 0, 0, 0, 0]
    train(learner, command("b", 2))
    assert learner.optim_step("b", ADAM).metrics["step:max"] == 1


def test_a_forward_only_request_neither_counts_nor_poisons(runner: FakePassRunner, learner: Learner) -> None:
    train(learner, command("a", 1))
    gradient = runner.gradient("a")
    train(learner, command("a", 2, forward_only=True))
    with pytest.raises(UserError):
        learner.open(command("a", 3, datum(1, 2, weights=[1.0]), forward_only=True))
    with pytest.raises(UserError):
        train(learner, command("a", 4, BROKEN, loss_fn="importance_sampling", forward_only=True))
    assert np.array_equal(runner.gradient("a"), gradient)
    assert learner.optim_step("a", ADAM).metrics["step:max"] == 1


def test_what_is_forgotten_leaves_nothing(runner: FakePassRunner, learner: Learner) -> None:
    first, second = learner.open(command("a", 1)), learner.open(command("a", 2))
    learner.run([*parts(first, 0, 1), *parts(second, 0)])
    learner.poison("a", "a reason")
    learner.forget("a")
    learner.forget("a")
    assert runner.scratch == {}
    assert not runner.gradient("a").any()
    learner.run(parts(first, 2))
    assert launches(runner) == ["a1.0 a1.1 a2.0"]
    assert learner.optim_step("a", ADAM).metrics["skipped:max"] == 1


def test_metrics_of_passes_that_were_shared(runner: FakePassRunner) -> None:
    learner = Learner(runner, computed_as={"stable_reinforce": "importance_sampling"}, peak_flops=1e6)
    requests = [
        learner.open(command("a", 1)),
        learner.open(command("b", 1, HARMLESS, loss_fn="stable_reinforce")),
    ]
    learner.run([*parts(requests[0], 0, 1), *parts(requests[1], 0)])
    learner.run(parts(requests[0], 2))
    mine, other = [learner.close(request).metrics for request in requests]
    assert mine["tokens:sum"] == mine["tokens_computed:sum"] == 3 + 5 + 4
    assert (mine["microbatches:sum"], mine["compute_ms:sum"], mine["adapters_in_pass:max"]) == (2, 2000, 2)
    assert mine["tokens_per_s:mean"] == (3 + 5 + 4 + 4) / 2
    assert mine["mfu:mean"] == pytest.approx(16 * 2 * runner.facts.num_params / 2 / 1e6)
    assert (other["microbatches:sum"], other["compute_ms:sum"]) == (1, 1000)
    assert other["computed_as_importance_sampling:mean"] == 1
    assert "computed_as_importance_sampling:mean" not in mine
