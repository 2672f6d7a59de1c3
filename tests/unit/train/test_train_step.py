"""The learner on a tiny model: whose gradient counts, when, and that nobody feels a neighbour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from descant.errors import NotFound, ServerError, UserError
from descant.testing.learner import STEP, LearnerHarness, datum, rl_datum, some_commands
from descant.train.runner import Part
from descant.types import AdamParams, OptimStepOutput

NewHarness = Callable[..., LearnerHarness]

OVERFLOW = {"logprobs": np.full(5, -1e38), "advantages": np.ones(5)}
"""exp(p - q) is infinite."""


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


# ------------------------------------------------------------------------------------------------------------- outputs
def test_output_i_belongs_to_datum_i(harness: LearnerHarness) -> None:
    harness.create("a")
    command = harness.command("a", *(datum(1 + index, seed=index) for index in range(128)))
    request = harness.learner.open(command)
    parts = harness.parts(request, command)
    order = np.random.default_rng(0).permutation(128)
    for turn in np.array_split(order, 9):
        harness.learner.run([parts[index] for index in turn])
    output = harness.learner.close(request)
    assert [len(outputs["logprobs"]) for outputs in output.loss_fn_outputs] == list(range(1, 129))
    expected_loss = -sum(float(outputs["logprobs"].sum()) for outputs in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(expected_loss, rel=1e-6)
    for index in (0, 1, 64, 127):
        [alone] = harness.run(harness.command("a", command.data[index], forward_only=True))
        assert alone.loss_fn_outputs[0]["logprobs"] == pytest.approx(
            output.loss_fn_outputs[index]["logprobs"], abs=1e-5
        )


def test_logprobs_have_the_shape_of_their_targets(harness: LearnerHarness) -> None:
    harness.create("a")
    rng = np.random.default_rng(0)
    wide = datum(4, target_tokens=rng.integers(0, 200, (4, 3)), weights=rng.random((4, 3)))
    column = datum(4, target_tokens=rng.integers(0, 200, (4, 1)))
    [output] = harness.run(harness.command("a", wide, datum(4), column))
    logprobs = [outputs["logprobs"] for outputs in output.loss_fn_outputs]
    assert [(array.shape, array.dtype) for array in logprobs] == [((4, 3), "f4"), ((4,), "f4"), ((4, 1), "f4")]
    expected = -(logprobs[0] * wide.loss_fn_inputs["weights"]).sum() - logprobs[1].sum() - logprobs[2].sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_forward_only_evaluates_and_touches_nothing(harness: LearnerHarness) -> None:
    harness.create("a")
    data = [datum(6), datum(3, seed=1, weights=[0, 1, 2])]
    evaluate, train = harness.command("a", *data, forward_only=True), harness.command("a", *data)
    [evaluated] = harness.run(evaluate)
    assert not harness.learner.has_pending_gradient("a")
    assert harness.gradient("a").count_nonzero() == 0
    mixed, trained = harness.run(evaluate, train)
    gradient = harness.gradient("a")
    for output in (mixed, trained):
        assert output.metrics["loss:sum"] == pytest.approx(evaluated.metrics["loss:sum"], rel=1e-6)
    harness.step("a", AdamParams(learning_rate=0.0))
    harness.run(train)
    assert distance(harness.gradient("a"), gradient) <= 1e-6  # of the one that trained alone


# ----------------------------------------------------------------------------------------------------------- gradients
def test_gradient_is_linear_in_calls_and_weights(harness: LearnerHarness) -> None:
    harness.create("a")
    norms = {}
    for calls, weight in ((1, 1.0), (2, 1.0), (3, 1.0), (1, 2.0), (1, -1.0), (2, 2.5)):
        for _ in range(calls):
            harness.run(harness.command("a", datum(8, weights=np.full(8, weight)), datum(5, 1, weights=[weight] * 5)))
        norms[calls, weight] = harness.step("a", AdamParams(learning_rate=0.0))["grad_norm:mean"]
    one = norms[1, 1.0]
    assert norms == {(calls, weight): pytest.approx(one * calls * abs(weight), rel=1e-5) for calls, weight in norms}


def test_cut_into_microbatches_equals_whole(harness: LearnerHarness) -> None:
    harness.create("a")
    command = harness.command("a", *(datum(3 + index, index) for index in range(7)))
    harness.run(command)
    whole = harness.gradient("a")
    harness.step("a", AdamParams(learning_rate=0.0))
    request = harness.learner.open(command)
    for part in harness.parts(request, command):
        harness.learner.run([part])
    harness.learner.close(request)
    assert distance(harness.gradient("a"), whole) <= 1e-5


def test_asynchronous_passes_give_what_passes_one_by_one_give(new_harness: NewHarness) -> None:
    harness = new_harness(asynchronous=True)
    harness.create("a")
    harness.create("b")
    commands = [harness.command(name, *(datum(3 + index, index) for index in range(4))) for name in "ab"]
    want = [harness.run(command)[0] for command in commands]
    gradients = [harness.gradient(name) for name in "ab"]
    for name in "ab":
        harness.step(name, AdamParams(learning_rate=0.0))

    requests = [harness.learner.open(command) for command in commands]
    for index in range(4):
        harness.learner.run([Part(request=request, datum=index) for request in requests])
        assert harness.learner.has_launched_pass
    got = [harness.learner.close(request) for request in requests]
    for output, whole in zip(got, want, strict=True):
        assert output.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-6)
        assert output.metrics["microbatches:sum"] == 4
        for ours, theirs in zip(output.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=0, atol=1e-5)
    for name, gradient in zip("ab", gradients, strict=True):
        assert distance(harness.gradient(name), gradient) <= 1e-5


def test_a_request_that_is_abandoned_with_its_pass_under_way_leaves_nothing(new_harness: NewHarness) -> None:
    harness = new_harness(asynchronous=True)
    harness.create("a")
    command = harness.command("a", datum(5, 0), datum(6, 1))
    request = harness.learner.open(command)
    harness.learner.run([Part(request=request, datum=0)])
    harness.learner.abandon(request)
    with pytest.raises(UserError, match="was abandoned"):
        harness.step("a")
    [output] = harness.run(command)
    assert output.metrics["microbatches:sum"] == 1
    assert harness.gradient("a").count_nonzero() > 0


def test_shared_pass_equals_one_adapter_at_a_time(harness: LearnerHarness) -> None:
    models = [
        harness.create(f"m{number}", rank, seed=number, **flags)
        for number, (rank, flags) in enumerate(
            [
                (8, {}),
                (1, {}),
                (16, {"train_mlp": False}),
                (3, {"train_unembed": False}),
                (32, {}),
                (8, {}),
                (5, {}),
                (64, {}),
            ]
        )
    ]
    commands = some_commands(harness, models)
    alone = {}
    for command in commands:
        [output] = harness.run(command)
        alone[command.model_id] = (output, harness.gradient(command.model_id))
        harness.step(command.model_id, AdamParams(learning_rate=0.0))
    for command, output in zip(commands, harness.run(*commands), strict=True):
        expected, gradient = alone[command.model_id]
        assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
        for got, want in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-5)
        assert gradient.count_nonzero() > 0
        assert distance(harness.gradient(command.model_id), gradient) <= 1e-5


@pytest.mark.parametrize("shared", [False, True])
def test_interleaved_equals_alone(new_harness: NewHarness, shared: bool) -> None:
    def data(model_id: str, turn: int) -> Any:
        return [rl_datum(6 + turn, turn * 7 + ord(model_id)), rl_datum(4, turn)]

    def train(harness: LearnerHarness, *models: str, turns: int = 12) -> dict[str, list[torch.Tensor]]:
        for turn in range(turns):
            commands = [harness.command(m, *data(m, turn), loss_fn="importance_sampling") for m in models]
            for group in [commands] if shared else [[command] for command in commands]:
                harness.run(*group)
            for model_id in models:
                harness.step(model_id, AdamParams(learning_rate=1e-2 if model_id == "a" else 3e-3, eps=1e-8))
        return {model_id: harness.state(model_id) for model_id in models}

    def fresh() -> LearnerHarness:
        harness = new_harness()
        harness.create("a", 8, seed=1)
        harness.create("b", 4, seed=2)
        return harness

    untrained = fresh()
    start = {model_id: untrained.state(model_id) for model_id in ("a", "b")}
    together = train(fresh(), "a", "b")
    for model_id in ("a", "b"):
        alone = train(fresh(), model_id)[model_id]
        for got, want, origin in zip(together[model_id], alone, start[model_id], strict=True):
            if shared:  # other matrix shapes round differently, and Adam makes ±lr of what is rounding noise
                assert (got - want).norm() <= 1e-3 * (want - origin).norm()
            else:
                assert torch.equal(got, want)


@pytest.mark.parametrize("closing", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_requests_of_one_adapter_in_one_pass(
    harness: LearnerHarness, closing: tuple[int, ...], failing: int | None
) -> None:
    harness.create("a")
    good = [rl_datum(5 + number, number) for number in range(3)]
    expected = torch.zeros_like(harness.gradient("a"))
    for number, item in enumerate(good):
        if number != failing:
            harness.run(harness.command("a", item, loss_fn="importance_sampling"))
    if failing is not None:
        good[failing] = rl_datum(5, 9, **OVERFLOW)
    expected = harness.gradient("a")
    harness.step("a", AdamParams(learning_rate=0.0))

    commands = [harness.command("a", item, loss_fn="importance_sampling") for item in good]
    requests = [harness.learner.open(command) for command in commands]
    harness.learner.run([Part(request=request, datum=0) for request in requests])
    for number in closing:
        assert isinstance(harness.close(requests[number]), UserError) == (number == failing)
    assert distance(harness.gradient("a"), expected) <= 1e-5
    assert harness.learner.has_pending_gradient("a")
    if failing is not None:
        with pytest.raises(UserError, match=f"seq_id {commands[failing].seq_id} failed"):
            harness.step("a")
    assert_no_scratch_left(harness)


def assert_no_scratch_left(harness: LearnerHarness) -> None:
    scratch = {name: count for name, count in harness.bank.stats().items() if "scratch" in name}
    assert scratch
    assert set(scratch.values()) == {0}


# ------------------------------------------------------------------------------------------------------------ failures
def test_not_finite_fails_alone_and_its_neighbours_keep_every_bit(harness: LearnerHarness) -> None:
    for number, rank in enumerate((8, 8, 4)):
        harness.create(f"m{number}", rank, seed=number)

    def commands(bad: dict[str, object]) -> list[Any]:
        return [
            harness.command("m0", rl_datum(6, 0), loss_fn="ppo"),
            harness.command("m1", datum(4, 3), loss_fn="cross_entropy"),
            harness.command("m1", rl_datum(7, 1), rl_datum(5, 2, **bad), loss_fn="importance_sampling"),
            harness.command("m2", datum(9, 2)),
            harness.command("m1", datum(8, 5), forward_only=True),
        ]

    harmless = {"logprobs": np.zeros(5), "advantages": np.zeros(5)}
    kept = {"m0": 0, "m2": 3}
    good = harness.try_run(*commands(harmless))
    expected = {model_id: harness.gradient(model_id) for model_id in kept}
    for model_id in ("m0", "m1", "m2"):
        harness.step(model_id, AdamParams(learning_rate=0.0))
    harness.run(harness.command("m1", datum(4, 3)))
    m1_first = harness.gradient("m1")
    harness.step("m1", AdamParams(learning_rate=0.0))

    outputs = harness.try_run(*commands(OVERFLOW))
    assert isinstance(outputs[2], UserError)
    assert str(outputs[2]).startswith(
        "data[1] has a loss that is not finite at position 0: loss_fn 'importance_sampling'"
    )
    assert "logprobs -1e+38, advantages 1" in str(outputs[2])
    for model_id, index in kept.items():
        now, before = ({**output.metrics, "memory_bytes:max": 0.0} for output in (outputs[index], good[index]))
        assert now == before  # the process's memory is not the request's
        assert torch.equal(harness.gradient(model_id), expected[model_id])
        harness.step(model_id)
    # the same adapter's other request counts, and only that one; then the step says whose gradient is missing
    assert distance(harness.gradient("m1"), m1_first) <= 1e-5
    assert outputs[4].metrics == good[4].metrics
    with pytest.raises(UserError, match=r"missing: forward_backward with seq_id \d+ failed: data\[1\] has a loss"):
        harness.step("m1")


def test_the_head_is_handed_finite_numbers_and_zeros_where_nothing_is_trained(harness: LearnerHarness) -> None:
    handed: list[torch.Tensor] = []

    def watched(hidden: Any, targets: Any, lora: Any, loss: Any, tokens_P: Any) -> Any:
        return harness.model.lm_head.logprobs(
            hidden, targets, lora, tokens_P=tokens_P, loss=lambda *chunk: handed.append(loss(*chunk)) or handed[-1]
        )

    harness = LearnerHarness(harness.model, logprobs=watched)
    for model_id in "ab":
        harness.create(model_id)
    harness.try_run(
        harness.command("a", rl_datum(5, **OVERFLOW), loss_fn="importance_sampling"),
        harness.command("a", datum(4), forward_only=True),
        harness.command("b", datum(3)),
    )
    [dlogprobs] = handed
    assert dlogprobs[:9].count_nonzero() == 0
    assert dlogprobs[9:].tolist() == [[-1.0]] * 3


def test_a_gradient_beyond_float32_fails_though_every_loss_is_finite(harness: LearnerHarness) -> None:
    harness.create("a")
    with pytest.raises(UserError, match=r"^the gradient is not finite, expected finite numbers"):
        harness.run(harness.command("a", datum(40, weights=np.full(40, 2e37))))
    assert harness.gradient("a").count_nonzero() == 0
    with pytest.raises(UserError):
        harness.step("a")

    # a pending gradient at the edge of float32 stays as it is when another would push it over
    harness.run(harness.command("a", datum(40)))
    weight = 0.3 * torch.finfo(torch.float32).max / float(harness.gradient("a").abs().max())
    harness.step("a", AdamParams(learning_rate=0.0))
    for _ in range(3):
        harness.run(harness.command("a", datum(40, weights=np.full(40, weight))))
    pending = harness.gradient("a")
    with pytest.raises(UserError, match=r"^the sum of this gradient and those before it is not finite"):
        harness.run(harness.command("a", datum(40, weights=np.full(40, weight))))
    assert torch.equal(harness.gradient("a"), pending)
    assert pending.isfinite().all()
    assert_no_scratch_left(harness)


def fail_in_check(harness: LearnerHarness) -> None:
    with pytest.raises(UserError, match=r"^data\[1\]\.loss_fn_inputs\['weights'\] has shape \(3,\), expected \(2,\)$"):
        harness.learner.open(harness.command("a", datum(2), datum(2, weights=[1, 1, 1])))


def fail_in_pass(harness: LearnerHarness) -> None:
    with pytest.raises(UserError, match=r"^data\[0\] has a loss that is not finite"):
        harness.run(harness.command("a", rl_datum(5, **OVERFLOW), rl_datum(5), loss_fn="importance_sampling"))


def fail_before(harness: LearnerHarness) -> None:
    harness.learner.poison("a", "forward_backward with seq_id 7 was refused")


def abandoned(harness: LearnerHarness) -> None:
    command = harness.command("a", datum(4))
    request = harness.learner.open(command)
    harness.learner.run(harness.parts(request, command))
    harness.learner.abandon(request)
    harness.learner.abandon(request)


def closed_early(harness: LearnerHarness) -> None:
    command = harness.command("a", datum(4), datum(4))
    request = harness.learner.open(command)
    harness.learner.run(harness.parts(request, command)[:1])
    with pytest.raises(ServerError, match="was closed after 1 of its 2 datums"):
        harness.learner.close(request)


@pytest.mark.parametrize("fail", [fail_in_check, fail_in_pass, fail_before, abandoned, closed_early])
@pytest.mark.parametrize("others", ["", "before", "after", "both"])
def test_a_step_is_all_or_nothing(harness: LearnerHarness, fail: Callable[[LearnerHarness], None], others: str) -> None:
    harness.create("a")
    before = harness.state("a")
    if others in ("before", "both"):
        harness.run(harness.command("a", datum(3)))
    gradient = harness.gradient("a")
    fail(harness)
    assert torch.equal(harness.gradient("a"), gradient)
    if others in ("after", "both"):
        harness.run(harness.command("a", datum(3)))
    with pytest.raises(UserError, match=r"^optim_step changed nothing .*: forward_backward with seq_id \d+ "):
        harness.step("a")
    for tensor, saved in zip(harness.state("a"), before, strict=True):
        assert torch.equal(tensor, saved)
    assert harness.gradient("a").count_nonzero() == 0
    assert not harness.learner.has_pending_gradient("a")
    assert harness.bank["a"].step == 0
    assert_no_scratch_left(harness)

    harness.run(harness.command("a", datum(3)))
    assert harness.step("a")["step:max"] == 1
    assert not torch.equal(harness.bank.weights("a"), before[0])


def test_steps_together_are_each_ones_own(new_harness: NewHarness) -> None:
    """Those that cannot step change nothing of theirs and of nobody's; the others have the bits of a step alone."""
    together, alone = new_harness(), new_harness()
    for harness in (together, alone):
        for number, model_id in enumerate(["a", "b", "c", "d", "e"]):
            harness.create(model_id, 3 + 5 * number, seed=number)
            harness.run(harness.command(model_id, datum(20, number)))
        harness.learner.poison("b", "it was refused")
        harness.learner.open(harness.command("d", datum(3)))
    clipped = AdamParams(learning_rate=1e-2, grad_clip_norm=0.1)
    steps = [("a", STEP), ("b", STEP), ("c", AdamParams(beta1=2.0)), ("d", STEP), ("gone", STEP), ("e", clipped)]
    before, pending = {m: together.state(m) for m in "bcd"}, together.gradient("d")
    outcomes = together.learner.optim_steps(steps)
    for (model_id, params), outcome in zip(steps, outcomes, strict=True):
        if isinstance(outcome, OptimStepOutput):
            assert outcome == alone.learner.optim_step(model_id, params)
            for ours, its in zip(together.state(model_id), alone.state(model_id)):
                assert torch.equal(ours, its)
            work = together.bank.compute_slab(together.bank[model_id].rank_bucket)[together.bank[model_id].compute_slot]
            assert torch.equal(work, together.bank.weights(model_id))
    assert [str(outcome) for outcome in outcomes if isinstance(outcome, Exception)] == [
        "optim_step changed nothing and cleared the gradient, since a part of it is missing: it was refused",
        "adam_params.beta1 is 2.0, expected at least 0 and below 1",
        "optim_step came while forward_backward with seq_id 2 was open",
        "model gone is not here",
    ]
    for model_id, state in before.items():
        for tensor, saved in zip(together.state(model_id), state):
            assert torch.equal(tensor, saved)
    assert [together.gradient(m).count_nonzero() > 0 for m in "abcde"] == [False, False, False, True, False]
    assert torch.equal(together.gradient("d"), pending)
    assert [together.bank[m].step for m in "abcde"] == [1, 0, 0, 0, 1]


def test_failed_forward_only_does_not_stop_a_step(harness: LearnerHarness) -> None:
    harness.create("a")
    harness.run(harness.command("a", datum(3)))
    with pytest.raises(UserError):
        harness.learner.open(harness.command("a", datum(2, weights=[1, 1, 1]), forward_only=True))
    with pytest.raises(UserError):
        harness.run(harness.command("a", rl_datum(5, **OVERFLOW), loss_fn="importance_sampling", forward_only=True))
    harness.step("a")


def test_an_exception_fails_the_requests_of_its_pass_and_no_others(harness: LearnerHarness) -> None:
    for model_id in "abc":
        harness.create(model_id)
    commands = {model_id: harness.command(model_id, datum(4), datum(5)) for model_id in "abc"}
    requests = {model_id: harness.learner.open(command) for model_id, command in commands.items()}
    parts = {model_id: harness.parts(requests[model_id], commands[model_id]) for model_id in "abc"}
    harness.learner.run([*parts["a"], parts["b"][0]])
    with harness.out_of_memory(writes_gradients=True):
        harness.learner.run([parts["b"][1], *parts["c"]])
    assert harness.learner.close(requests["a"]).metrics["loss:sum"] > 0
    for model_id in "bc":
        with pytest.raises(ServerError, match=r"^data\[[01]\], alone in its pass, ran out of memory$"):
            harness.learner.close(requests[model_id])
        assert harness.gradient(model_id).count_nonzero() == 0
        with pytest.raises(UserError, match="ran out of memory"):
            harness.step(model_id)
    harness.step("a")
    harness.run(*commands.values())
    for model_id in "abc":
        harness.step(model_id)


def test_unknown_models_and_open_requests(harness: LearnerHarness) -> None:
    harness.create("a")
    with pytest.raises(NotFound):
        harness.learner.open(harness.command("gone", datum(3)))
    with pytest.raises(NotFound):
        harness.step("gone")
    command = harness.command("a", datum(3))
    request = harness.learner.open(command)
    with pytest.raises(ServerError, match="came while forward_backward with seq_id 1 was open"):
        harness.step("a")
    harness.learner.run(harness.parts(request, command))
    harness.learner.close(request)
    harness.step("a")


def test_deleted_and_forgotten_while_open(harness: LearnerHarness) -> None:
    for model_id in "ab":
        harness.create(model_id)
    commands = [harness.command(model_id, datum(3)) for model_id in "aab"]
    requests = [harness.learner.open(command) for command in commands]
    harness.bank.delete("a")
    harness.learner.forget("a")
    harness.learner.forget("a")
    harness.learner.run([Part(request=request, datum=0) for request in requests])
    harness.learner.close(requests[2])
    harness.create("a")
    assert harness.gradient("a").count_nonzero() == 0
    harness.step("a")
    harness.step("b")
    assert_no_scratch_left(harness)


def test_all_masked_datum_is_exactly_nothing(harness: LearnerHarness) -> None:
    harness.create("a")
    masked = datum(6, weights=np.zeros(6))
    [output] = harness.run(harness.command("a", masked))
    assert output.metrics["loss:sum"] == 0.0
    assert harness.gradient("a").count_nonzero() == 0
    assert np.isfinite(output.loss_fn_outputs[0]["logprobs"]).all()
    [output] = harness.run(
        harness.command("a", rl_datum(5, logprobs=OVERFLOW["logprobs"], advantages=[0] * 5), loss_fn="ppo")
    )
    assert output.metrics["loss:sum"] == 0.0
    harness.run(harness.command("a", masked, datum(6, weights=[0, 0, 1, 0, 0, 0])))
    assert harness.step("a")["grad_norm:mean"] > 0


def test_stable_reinforce_is_what_its_operator_says_or_nothing(harness: LearnerHarness) -> None:
    harness.create("a")
    data = [rl_datum(6, 0), rl_datum(5, 1)]
    [want] = harness.run(harness.command("a", *data, loss_fn="cispo"))
    with pytest.raises(UserError, match="loss_fn 'stable_reinforce' has no public definition, expected one of"):
        harness.run(harness.command("a", *data, loss_fn="stable_reinforce"))
    mapped = LearnerHarness(harness.model, computed_as={"stable_reinforce": "cispo"})
    [got] = mapped.run(mapped.command("a", *data, loss_fn="stable_reinforce"))
    memory = {"memory_bytes:max": got.metrics["memory_bytes:max"]}  # the most that this process ever had
    assert got.metrics == {**want.metrics, **memory, "computed_as_cispo:mean": 1.0}
    with pytest.raises(UserError, match=r"unexpected 'kl_coeff'; loss_fn 'cispo' takes .*computes the loss_fn of the"):
        mapped.run(mapped.command("a", *data, loss_fn="stable_reinforce", loss_fn_config={"kl_coeff": 0.1}))


# --------------------------------------------------------------------------------------------------------------- steps
def test_a_huge_learning_rate_poisons_nobody(harness: LearnerHarness) -> None:
    harness.create("wild", seed=1)
    harness.create("mild", seed=2)
    mild = harness.command("mild", datum(6, 1), datum(5, 2))
    wild = harness.command("wild", datum(6, 3))
    harness.run(wild, mild)
    expected = harness.gradient("mild")
    harness.step("mild", AdamParams(learning_rate=0.0))
    harness.step("wild", AdamParams(learning_rate=1e30))  # 1e30 is a float32: its owner asked for it
    assert harness.bank.weights("wild").abs().max() > 1e29

    for _ in range(2):
        wild_output, _ = harness.try_run(wild, mild)
        assert isinstance(wild_output, UserError)
        assert "data[0] has a loss that is not finite" in str(wild_output)
        # Only passes of one's own are bit for bit alike (``tests/unit/ranks/test_isolation.py``); this one is shared.
        torch.testing.assert_close(harness.gradient("mild"), expected, rtol=1e-5, atol=1e-6)
        assert harness.step("mild", AdamParams(learning_rate=0.0))["grad_norm:mean"] > 0
        with pytest.raises(UserError):
            harness.step("wild", AdamParams(learning_rate=1e30))
    with pytest.raises(UserError, match=r"data\[0\] has a loss that is not finite .* of log-probability nan"):
        harness.run(harness.command("wild", datum(6, 3, weights=np.zeros(6)), forward_only=True))
    assert harness.bank.weights("wild").isfinite().all()
    harness.create("wilder", seed=3)
    harness.run(harness.command("wilder", datum(6, 3)))
    with pytest.raises(UserError, match="would make a weight or a moment not finite"):
        harness.step("wilder", AdamParams(learning_rate=1e38, weight_decay=1e30))
    assert harness.bank.weights("wilder").isfinite().all()


def test_zero_is_a_value(harness: LearnerHarness) -> None:
    harness.create("a")
    command = harness.command("a", datum(6))
    [before] = harness.run(command)
    work = harness.bank.compute_slab(8)[harness.bank["a"].compute_slot].clone()
    harness.step("a", AdamParams(learning_rate=0.0, weight_decay=0.3))
    assert torch.equal(harness.bank.compute_slab(8)[harness.bank["a"].compute_slot], work)
    [after] = harness.run(command)
    assert (after.loss_fn_outputs[0]["logprobs"] == before.loss_fn_outputs[0]["logprobs"]).all()
    gradient = harness.gradient("a")
    harness.step("a", AdamParams(learning_rate=1e-3, beta1=0.0))
    moment1, _ = harness.bank.moments("a")
    assert distance(moment1, gradient) <= 1e-6


def test_a_step_trains_and_the_pass_sees_it(harness: LearnerHarness) -> None:
    harness.create("a")
    command = harness.command("a", datum(12))
    losses = []
    for step in range(5):
        losses.append(harness.run(command)[0].metrics["loss:sum"])
        metrics = harness.step("a")
        assert set(metrics) == {"grad_norm:mean", "step:max"}
        assert metrics["step:max"] == step + 1
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1


def test_a_step_without_a_backward_does_what_torch_does_without_a_gradient(harness: LearnerHarness) -> None:
    """Nothing; and one on a gradient of zeros moves by the moments and the decay."""
    params = AdamParams(learning_rate=0.1, weight_decay=0.1)
    harness.create("a")
    ours = harness.bank.weights("a")
    theirs = torch.nn.Parameter(ours.clone())
    twin = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for expected_step, grad in ((0, None), (1, "backward"), (1, None), (1, None), (2, "zeros"), (2, None)):
        if grad is not None:
            weights = np.full(12, grad == "backward", np.float32)
            harness.run(harness.command("a", datum(12, weights=weights)))
            theirs.grad = harness.gradient("a").clone()
            assert (theirs.grad.count_nonzero() == 0) == (grad == "zeros")
        before = harness.state("a")
        metrics = harness.step("a", params)
        twin.step()
        twin.zero_grad(set_to_none=True)
        assert metrics["step:max"] == expected_step
        assert ("skipped:max" in metrics) == (grad is None)
        unchanged = all(torch.equal(now, then) for now, then in zip(harness.state("a"), before, strict=True))
        assert unchanged == (grad is None)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)


def test_a_refused_step_clears_the_gradient(harness: LearnerHarness) -> None:
    harness.create("a")
    before = harness.state("a")
    harness.run(harness.command("a", datum(4)))
    with pytest.raises(UserError, match=r"^adam_params\.learning_rate is nan"):
        harness.step("a", AdamParams(learning_rate=float("nan")))
    for tensor, saved in zip(harness.state("a"), before, strict=True):
        assert torch.equal(tensor, saved)
    assert harness.gradient("a").count_nonzero() == 0
    assert harness.step("a")["skipped:max"] == 1


@pytest.mark.parametrize("flags", [flags for flags in np.ndindex(2, 2, 2) if any(flags)])
def test_flags_train_exactly_their_sites(harness: LearnerHarness, flags: tuple[int, int, int]) -> None:
    attn, mlp, unembed = map(bool, flags)
    harness.create("a", 4, train_attn=attn, train_mlp=mlp, train_unembed=unembed)
    before = harness.bank.weights("a").clone()
    harness.run(harness.command("a", datum(12)))
    harness.step("a")
    after = harness.bank.weights("a")
    layout = harness.bank.layout(8)
    wanted = {"attn": attn, "mlp": mlp, "unembed": unembed}
    assert {site.group for site in harness.bank.sites} == set(wanted)
    for index, site in enumerate(harness.bank.sites):
        start = layout.a_offset[index]
        for offset, rank_axis, size in (
            (start, 0, (8, site.in_features)),
            (layout.b_offset[index], 1, (site.out_features, 8)),
        ):
            region = slice(offset, offset + size[0] * size[1])
            moved = (after[region] != before[region]).view(size)
            if wanted[site.group]:
                assert moved.any(), site.name
                assert not moved.narrow(rank_axis, 4, 4).any(), "beyond the true rank"
            else:
                assert after[region].count_nonzero() == 0, site.name
