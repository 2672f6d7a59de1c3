"""The learner on a tiny model: whose gradient counts, when, and that nobody feels a neighbour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from descant.errors import NotFound, ServerError, UserError
from descant.testing.studio import STEP, Studio, datum, rl_datum, some_commands
from descant.train.step import Part
from descant.types import AdamParams, OptimStepOutput

NewStudio = Callable[[], Studio]

OVERFLOW = {"logprobs": np.full(5, -1e38), "advantages": np.ones(5)}
"""exp(p - q) is infinite."""


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


# ------------------------------------------------------------------------------------------------------------- outputs
def test_output_i_belongs_to_datum_i(studio: Studio) -> None:
    studio.create("a")
    command = studio.command("a", *(datum(1 + index, seed=index) for index in range(128)))
    request = studio.learner.open(command)
    parts = studio.parts(request, command)
    order = np.random.default_rng(0).permutation(128)
    for turn in np.array_split(order, 9):
        studio.learner.run([parts[index] for index in turn])
    output = studio.learner.close(request)
    assert [len(outputs["logprobs"]) for outputs in output.loss_fn_outputs] == list(range(1, 129))
    expected_loss = -sum(float(outputs["logprobs"].sum()) for outputs in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(expected_loss, rel=1e-6)
    for index in (0, 1, 64, 127):
        [alone] = studio.run(studio.command("a", command.data[index], forward_only=True))
        assert alone.loss_fn_outputs[0]["logprobs"] == pytest.approx(
            output.loss_fn_outputs[index]["logprobs"], abs=1e-5
        )


def test_logprobs_have_the_shape_of_their_targets(studio: Studio) -> None:
    studio.create("a")
    rng = np.random.default_rng(0)
    wide = datum(4, target_tokens=rng.integers(0, 200, (4, 3)), weights=rng.random((4, 3)))
    column = datum(4, target_tokens=rng.integers(0, 200, (4, 1)))
    [output] = studio.run(studio.command("a", wide, datum(4), column))
    logprobs = [outputs["logprobs"] for outputs in output.loss_fn_outputs]
    assert [(array.shape, array.dtype) for array in logprobs] == [((4, 3), "f4"), ((4,), "f4"), ((4, 1), "f4")]
    expected = -(logprobs[0] * wide.loss_fn_inputs["weights"]).sum() - logprobs[1].sum() - logprobs[2].sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_forward_only_evaluates_and_touches_nothing(studio: Studio) -> None:
    studio.create("a")
    data = [datum(6), datum(3, seed=1, weights=[0, 1, 2])]
    evaluate, train = studio.command("a", *data, forward_only=True), studio.command("a", *data)
    [evaluated] = studio.run(evaluate)
    assert not studio.learner.has_pending_gradient("a")
    assert studio.gradient("a").count_nonzero() == 0
    mixed, trained = studio.run(evaluate, train)
    gradient = studio.gradient("a")
    for output in (mixed, trained):
        assert output.metrics["loss:sum"] == pytest.approx(evaluated.metrics["loss:sum"], rel=1e-6)
    studio.step("a", AdamParams(learning_rate=0.0))
    studio.run(train)
    assert distance(studio.gradient("a"), gradient) <= 1e-6  # of the one that trained alone


# ----------------------------------------------------------------------------------------------------------- gradients
def test_gradient_is_linear_in_calls_and_weights(studio: Studio) -> None:
    studio.create("a")
    norms = {}
    for calls, weight in ((1, 1.0), (2, 1.0), (3, 1.0), (1, 2.0), (1, -1.0), (2, 2.5)):
        for _ in range(calls):
            studio.run(studio.command("a", datum(8, weights=np.full(8, weight)), datum(5, 1, weights=[weight] * 5)))
        norms[calls, weight] = studio.step("a", AdamParams(learning_rate=0.0))["grad_norm:mean"]
    one = norms[1, 1.0]
    assert norms == {(calls, weight): pytest.approx(one * calls * abs(weight), rel=1e-5) for calls, weight in norms}


def test_cut_into_microbatches_equals_whole(studio: Studio) -> None:
    studio.create("a")
    command = studio.command("a", *(datum(3 + index, index) for index in range(7)))
    studio.run(command)
    whole = studio.gradient("a")
    studio.step("a", AdamParams(learning_rate=0.0))
    request = studio.learner.open(command)
    for part in studio.parts(request, command):
        studio.learner.run([part])
    studio.learner.close(request)
    assert distance(studio.gradient("a"), whole) <= 1e-5


def test_a_pass_is_looked_at_when_the_next_is_launched_or_somebody_asks(studio: Studio) -> None:
    studio.create("a")
    studio.create("b")
    commands = [studio.command(name, *(datum(3 + index, index) for index in range(4))) for name in "ab"]
    want = [studio.run(command)[0] for command in commands]
    gradients = [studio.gradient(name) for name in "ab"]
    for name in "ab":
        studio.step(name, AdamParams(learning_rate=0.0))

    studio.learner._flies = True
    requests = [studio.learner.open(command) for command in commands]
    known = []
    for index in range(4):
        studio.learner.run([Part(request=request, datum=index) for request in requests])
        known.append([len(studio.learner._open[request].losses) for request in requests])
    assert known == [[0, 0], [1, 1], [2, 2], [3, 3]]
    got = [studio.learner.close(request) for request in requests]
    for output, whole in zip(got, want, strict=True):
        assert output.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-6)
        assert output.metrics["microbatches:sum"] == 4
        for ours, theirs in zip(output.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=0, atol=1e-5)
    for name, gradient in zip("ab", gradients, strict=True):
        assert distance(studio.gradient(name), gradient) <= 1e-5


def test_a_request_that_is_abandoned_with_its_pass_under_way_leaves_nothing(studio: Studio) -> None:
    studio.create("a")
    studio.learner._flies = True
    command = studio.command("a", datum(5, 0), datum(6, 1))
    request = studio.learner.open(command)
    studio.learner.run([Part(request=request, datum=0)])
    studio.learner.abandon(request)
    with pytest.raises(UserError, match="was abandoned"):
        studio.step("a")
    [output] = studio.run(command)
    assert output.metrics["microbatches:sum"] == 1
    assert studio.gradient("a").count_nonzero() > 0


def test_shared_pass_equals_one_adapter_at_a_time(studio: Studio) -> None:
    models = [
        studio.create(f"m{number}", rank, seed=number, **flags)
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
    commands = some_commands(studio, models)
    alone = {}
    for command in commands:
        [output] = studio.run(command)
        alone[command.model_id] = (output, studio.gradient(command.model_id))
        studio.step(command.model_id, AdamParams(learning_rate=0.0))
    for command, output in zip(commands, studio.run(*commands), strict=True):
        expected, gradient = alone[command.model_id]
        assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
        for got, want in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-5)
        assert gradient.count_nonzero() > 0
        assert distance(studio.gradient(command.model_id), gradient) <= 1e-5


@pytest.mark.parametrize("shared", [False, True])
def test_interleaved_equals_alone(new_studio: NewStudio, shared: bool) -> None:
    def data(model_id: str, turn: int) -> Any:
        return [rl_datum(6 + turn, turn * 7 + ord(model_id)), rl_datum(4, turn)]

    def train(studio: Studio, *models: str, turns: int = 12) -> dict[str, list[torch.Tensor]]:
        for turn in range(turns):
            commands = [studio.command(m, *data(m, turn), loss_fn="importance_sampling") for m in models]
            for group in [commands] if shared else [[command] for command in commands]:
                studio.run(*group)
            for model_id in models:
                studio.step(model_id, AdamParams(learning_rate=1e-2 if model_id == "a" else 3e-3, eps=1e-8))
        return {model_id: studio.state(model_id) for model_id in models}

    def fresh() -> Studio:
        studio = new_studio()
        studio.create("a", 8, seed=1)
        studio.create("b", 4, seed=2)
        return studio

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
def test_requests_of_one_adapter_in_one_pass(studio: Studio, closing: tuple[int, ...], failing: int | None) -> None:
    studio.create("a")
    good = [rl_datum(5 + number, number) for number in range(3)]
    expected = torch.zeros_like(studio.gradient("a"))
    for number, item in enumerate(good):
        if number != failing:
            studio.run(studio.command("a", item, loss_fn="importance_sampling"))
    if failing is not None:
        good[failing] = rl_datum(5, 9, **OVERFLOW)
    expected = studio.gradient("a")
    studio.step("a", AdamParams(learning_rate=0.0))

    commands = [studio.command("a", item, loss_fn="importance_sampling") for item in good]
    requests = [studio.learner.open(command) for command in commands]
    studio.learner.run([Part(request=request, datum=0) for request in requests])
    for number in closing:
        assert isinstance(studio.close(requests[number]), UserError) == (number == failing)
    assert distance(studio.gradient("a"), expected) <= 1e-5
    assert studio.learner.has_pending_gradient("a")
    if failing is not None:
        with pytest.raises(UserError, match=f"seq_id {commands[failing].seq_id} failed"):
            studio.step("a")
    assert_no_scratch_left(studio)


def assert_no_scratch_left(studio: Studio) -> None:
    scratch = {name: count for name, count in studio.bank.stats().items() if "scratch" in name}
    assert scratch
    assert set(scratch.values()) == {0}


# ------------------------------------------------------------------------------------------------------------ failures
def test_not_finite_fails_alone_and_its_neighbours_keep_every_bit(studio: Studio) -> None:
    for number, rank in enumerate((8, 8, 4)):
        studio.create(f"m{number}", rank, seed=number)

    def commands(bad: dict[str, object]) -> list[Any]:
        return [
            studio.command("m0", rl_datum(6, 0), loss_fn="ppo"),
            studio.command("m1", datum(4, 3), loss_fn="cross_entropy"),
            studio.command("m1", rl_datum(7, 1), rl_datum(5, 2, **bad), loss_fn="importance_sampling"),
            studio.command("m2", datum(9, 2)),
            studio.command("m1", datum(8, 5), forward_only=True),
        ]

    harmless = {"logprobs": np.zeros(5), "advantages": np.zeros(5)}
    kept = {"m0": 0, "m2": 3}
    good = studio.try_run(*commands(harmless))
    expected = {model_id: studio.gradient(model_id) for model_id in kept}
    for model_id in ("m0", "m1", "m2"):
        studio.step(model_id, AdamParams(learning_rate=0.0))
    studio.run(studio.command("m1", datum(4, 3)))
    m1_first = studio.gradient("m1")
    studio.step("m1", AdamParams(learning_rate=0.0))

    outputs = studio.try_run(*commands(OVERFLOW))
    assert isinstance(outputs[2], UserError)
    assert str(outputs[2]).startswith(
        "data[1] has a loss that is not finite at position 0: loss_fn 'importance_sampling'"
    )
    assert "logprobs -1e+38, advantages 1" in str(outputs[2])
    for model_id, index in kept.items():
        now, before = ({**output.metrics, "memory_bytes:max": 0.0} for output in (outputs[index], good[index]))
        assert now == before  # the process's memory is not the request's
        assert torch.equal(studio.gradient(model_id), expected[model_id])
        studio.step(model_id)
    # the same adapter's other request counts, and only that one; then the step says whose gradient is missing
    assert distance(studio.gradient("m1"), m1_first) <= 1e-5
    assert outputs[4].metrics == good[4].metrics
    with pytest.raises(UserError, match=r"missing: forward_backward with seq_id \d+ failed: data\[1\] has a loss"):
        studio.step("m1")


def test_the_head_is_handed_finite_numbers_and_zeros_where_nothing_is_trained(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model_id in "ab":
        studio.create(model_id)
    handed: list[torch.Tensor] = []
    logprobs = studio.model.head.logprobs

    def watched(hidden: Any, targets: Any, lora: Any, loss: Any, tokens_P: Any) -> Any:
        return logprobs(
            hidden, targets, lora, tokens_P=tokens_P, loss=lambda *chunk: handed.append(loss(*chunk)) or handed[-1]
        )

    monkeypatch.setattr(studio.model.head, "logprobs", watched)
    studio.try_run(
        studio.command("a", rl_datum(5, **OVERFLOW), loss_fn="importance_sampling"),
        studio.command("a", datum(4), forward_only=True),
        studio.command("b", datum(3)),
    )
    [dlogprobs] = handed
    assert dlogprobs[:9].count_nonzero() == 0
    assert dlogprobs[9:].tolist() == [[-1.0]] * 3


def test_a_gradient_beyond_float32_fails_though_every_loss_is_finite(studio: Studio) -> None:
    studio.create("a")
    with pytest.raises(UserError, match=r"^the gradient is not finite, expected finite numbers"):
        studio.run(studio.command("a", datum(40, weights=np.full(40, 2e37))))
    assert studio.gradient("a").count_nonzero() == 0
    with pytest.raises(UserError):
        studio.step("a")

    # a pending gradient at the edge of float32 stays as it is when another would push it over
    studio.run(studio.command("a", datum(40)))
    weight = 0.3 * torch.finfo(torch.float32).max / float(studio.gradient("a").abs().max())
    studio.step("a", AdamParams(learning_rate=0.0))
    for _ in range(3):
        studio.run(studio.command("a", datum(40, weights=np.full(40, weight))))
    pending = studio.gradient("a")
    with pytest.raises(UserError, match=r"^the sum of this gradient and those before it is not finite"):
        studio.run(studio.command("a", datum(40, weights=np.full(40, weight))))
    assert torch.equal(studio.gradient("a"), pending)
    assert pending.isfinite().all()
    assert_no_scratch_left(studio)


def fail_in_check(studio: Studio) -> None:
    with pytest.raises(UserError, match=r"^data\[1\]\.loss_fn_inputs\['weights'\] has shape \(3,\), expected \(2,\)$"):
        studio.learner.open(studio.command("a", datum(2), datum(2, weights=[1, 1, 1])))


def fail_in_pass(studio: Studio) -> None:
    with pytest.raises(UserError, match=r"^data\[0\] has a loss that is not finite"):
        studio.run(studio.command("a", rl_datum(5, **OVERFLOW), rl_datum(5), loss_fn="importance_sampling"))


def fail_before(studio: Studio) -> None:
    studio.learner.lose_gradient("a", "forward_backward with seq_id 7 was refused")


def abandoned(studio: Studio) -> None:
    command = studio.command("a", datum(4))
    request = studio.learner.open(command)
    studio.learner.run(studio.parts(request, command))
    studio.learner.abandon(request)
    studio.learner.abandon(request)


def closed_early(studio: Studio) -> None:
    command = studio.command("a", datum(4), datum(4))
    request = studio.learner.open(command)
    studio.learner.run(studio.parts(request, command)[:1])
    with pytest.raises(ServerError, match="was closed after 1 of its 2 datums"):
        studio.learner.close(request)


@pytest.mark.parametrize("fail", [fail_in_check, fail_in_pass, fail_before, abandoned, closed_early])
@pytest.mark.parametrize("others", ["", "before", "after", "both"])
def test_a_step_is_all_or_nothing(studio: Studio, fail: Callable[[Studio], None], others: str) -> None:
    studio.create("a")
    before = studio.state("a")
    if others in ("before", "both"):
        studio.run(studio.command("a", datum(3)))
    gradient = studio.gradient("a")
    fail(studio)
    assert torch.equal(studio.gradient("a"), gradient)
    if others in ("after", "both"):
        studio.run(studio.command("a", datum(3)))
    with pytest.raises(UserError, match=r"^optim_step changed nothing .*: forward_backward with seq_id \d+ "):
        studio.step("a")
    for tensor, saved in zip(studio.state("a"), before, strict=True):
        assert torch.equal(tensor, saved)
    assert studio.gradient("a").count_nonzero() == 0
    assert not studio.learner.has_pending_gradient("a")
    assert studio.bank["a"].step == 0
    assert_no_scratch_left(studio)

    studio.run(studio.command("a", datum(3)))
    assert studio.step("a")["step:max"] == 1
    assert not torch.equal(studio.bank.weights("a"), before[0])


def test_steps_together_are_each_ones_own(new_studio: NewStudio) -> None:
    """Those that cannot step change nothing of theirs and of nobody's; the others have the bits of a step alone."""
    together, alone = new_studio(), new_studio()
    for studio in (together, alone):
        for number, model_id in enumerate(["a", "b", "c", "d", "e"]):
            studio.create(model_id, 3 + 5 * number, seed=number)
            studio.run(studio.command(model_id, datum(20, number)))
        studio.learner.lose_gradient("b", "it was refused")
        studio.learner.open(studio.command("d", datum(3)))
    clipped = AdamParams(learning_rate=1e-2, grad_clip_norm=0.1)
    steps = [("a", STEP), ("b", STEP), ("c", AdamParams(beta1=2.0)), ("d", STEP), ("gone", STEP), ("e", clipped)]
    before, pending = {m: together.state(m) for m in "bcd"}, together.gradient("d")
    outcomes = together.learner.optim_steps(steps)
    for (model_id, params), outcome in zip(steps, outcomes, strict=True):
        if isinstance(outcome, OptimStepOutput):
            assert outcome == alone.learner.optim_step(model_id, params)
            for ours, its in zip(together.state(model_id), alone.state(model_id)):
                assert torch.equal(ours, its)
            work = together.bank.work_slab(together.bank[model_id].rank_class)[together.bank[model_id].work]
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


def test_failed_forward_only_does_not_stop_a_step(studio: Studio) -> None:
    studio.create("a")
    studio.run(studio.command("a", datum(3)))
    with pytest.raises(UserError):
        studio.learner.open(studio.command("a", datum(2, weights=[1, 1, 1]), forward_only=True))
    with pytest.raises(UserError):
        studio.run(studio.command("a", rl_datum(5, **OVERFLOW), loss_fn="importance_sampling", forward_only=True))
    studio.step("a")


def test_an_exception_fails_the_requests_of_its_pass_and_no_others(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model_id in "abc":
        studio.create(model_id)
    commands = {model_id: studio.command(model_id, datum(4), datum(5)) for model_id in "abc"}
    requests = {model_id: studio.learner.open(command) for model_id, command in commands.items()}
    parts = {model_id: studio.parts(requests[model_id], commands[model_id]) for model_id in "abc"}
    studio.learner.run([*parts["a"], parts["b"][0]])
    trunk = studio.model.trunk

    def exhausted(*arguments: Any) -> Any:
        hidden, lora = trunk(*arguments)
        hidden.register_hook(lambda gradient: (_ for _ in ()).throw(torch.OutOfMemoryError("secret/path")))
        return hidden, lora

    with monkeypatch.context() as patched:
        patched.setattr(studio.model, "trunk", exhausted)
        studio.learner.run([parts["b"][1], *parts["c"]])
    assert studio.learner.close(requests["a"]).metrics["loss:sum"] > 0
    for model_id in "bc":
        with pytest.raises(ServerError, match=r"^data\[[01]\], alone in its pass, ran out of memory$"):
            studio.learner.close(requests[model_id])
        assert studio.gradient(model_id).count_nonzero() == 0
        with pytest.raises(UserError, match="ran out of memory"):
            studio.step(model_id)
    studio.step("a")
    studio.run(*commands.values())
    for model_id in "abc":
        studio.step(model_id)


def test_unknown_models_and_open_requests(studio: Studio) -> None:
    studio.create("a")
    with pytest.raises(NotFound):
        studio.learner.open(studio.command("gone", datum(3)))
    with pytest.raises(NotFound):
        studio.step("gone")
    command = studio.command("a", datum(3))
    request = studio.learner.open(command)
    with pytest.raises(ServerError, match="came while forward_backward with seq_id 1 was open"):
        studio.step("a")
    studio.learner.run(studio.parts(request, command))
    studio.learner.close(request)
    studio.step("a")


def test_deleted_and_forgotten_while_open(studio: Studio) -> None:
    for model_id in "ab":
        studio.create(model_id)
    commands = [studio.command(model_id, datum(3)) for model_id in "aab"]
    requests = [studio.learner.open(command) for command in commands]
    studio.bank.delete("a")
    studio.learner.forget("a")
    studio.learner.forget("a")
    studio.learner.run([Part(request=request, datum=0) for request in requests])
    studio.learner.close(requests[2])
    studio.create("a")
    assert studio.gradient("a").count_nonzero() == 0
    studio.step("a")
    studio.step("b")
    assert_no_scratch_left(studio)


def test_all_masked_datum_is_exactly_nothing(studio: Studio) -> None:
    studio.create("a")
    masked = datum(6, weights=np.zeros(6))
    [output] = studio.run(studio.command("a", masked))
    assert output.metrics["loss:sum"] == 0.0
    assert studio.gradient("a").count_nonzero() == 0
    assert np.isfinite(output.loss_fn_outputs[0]["logprobs"]).all()
    [output] = studio.run(
        studio.command("a", rl_datum(5, logprobs=OVERFLOW["logprobs"], advantages=[0] * 5), loss_fn="ppo")
    )
    assert output.metrics["loss:sum"] == 0.0
    studio.run(studio.command("a", masked, datum(6, weights=[0, 0, 1, 0, 0, 0])))
    assert studio.step("a")["grad_norm:mean"] > 0


def test_stable_reinforce_is_what_its_operator_says_or_nothing(studio: Studio) -> None:
    studio.create("a")
    data = [rl_datum(6, 0), rl_datum(5, 1)]
    [want] = studio.run(studio.command("a", *data, loss_fn="cispo"))
    with pytest.raises(UserError, match="loss_fn 'stable_reinforce' has no public definition, expected one of"):
        studio.run(studio.command("a", *data, loss_fn="stable_reinforce"))
    mapped = Studio(studio.model, computed_as={"stable_reinforce": "cispo"})
    [got] = mapped.run(mapped.command("a", *data, loss_fn="stable_reinforce"))
    assert got.metrics == want.metrics
    with pytest.raises(UserError, match="loss_fn_config has unexpected 'kl_coeff'; loss_fn 'cispo' takes"):
        mapped.run(mapped.command("a", *data, loss_fn="stable_reinforce", loss_fn_config={"kl_coeff": 0.1}))


# --------------------------------------------------------------------------------------------------------------- steps
def test_a_huge_learning_rate_poisons_nobody(studio: Studio) -> None:
    studio.create("wild", seed=1)
    studio.create("mild", seed=2)
    mild = studio.command("mild", datum(6, 1), datum(5, 2))
    wild = studio.command("wild", datum(6, 3))
    studio.run(wild, mild)
    expected = studio.gradient("mild")
    studio.step("mild", AdamParams(learning_rate=0.0))
    studio.step("wild", AdamParams(learning_rate=1e30))  # 1e30 is a float32: its owner asked for it
    assert studio.bank.weights("wild").abs().max() > 1e29

    for _ in range(2):
        wild_output, _ = studio.try_run(wild, mild)
        assert isinstance(wild_output, UserError)
        assert "data[0] has a loss that is not finite" in str(wild_output)
        assert torch.equal(studio.gradient("mild"), expected)
        assert studio.step("mild", AdamParams(learning_rate=0.0))["grad_norm:mean"] > 0
        with pytest.raises(UserError):
            studio.step("wild", AdamParams(learning_rate=1e30))
    with pytest.raises(UserError, match=r"data\[0\] has a loss that is not finite .* of log-probability nan"):
        studio.run(studio.command("wild", datum(6, 3, weights=np.zeros(6)), forward_only=True))
    with pytest.raises(UserError, match="would make a weight or a moment not finite"):
        studio.step("wild", AdamParams(learning_rate=1e38, weight_decay=1e30))
    assert studio.bank.weights("wild").isfinite().all()


def test_zero_is_a_value(studio: Studio) -> None:
    studio.create("a")
    command = studio.command("a", datum(6))
    [before] = studio.run(command)
    work = studio.bank.work_slab(8)[studio.bank["a"].work].clone()
    studio.step("a", AdamParams(learning_rate=0.0, weight_decay=0.3))
    assert torch.equal(studio.bank.work_slab(8)[studio.bank["a"].work], work)
    [after] = studio.run(command)
    assert (after.loss_fn_outputs[0]["logprobs"] == before.loss_fn_outputs[0]["logprobs"]).all()
    gradient = studio.gradient("a")
    studio.step("a", AdamParams(learning_rate=1e-3, beta1=0.0))
    moment1, _ = studio.bank.moments("a")
    assert distance(moment1, gradient) <= 1e-6


def test_a_step_trains_and_the_pass_sees_it(studio: Studio) -> None:
    studio.create("a")
    command = studio.command("a", datum(12))
    losses = []
    for step in range(5):
        losses.append(studio.run(command)[0].metrics["loss:sum"])
        metrics = studio.step("a")
        assert set(metrics) == {"grad_norm:mean", "step:max"}
        assert metrics["step:max"] == step + 1
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1


def test_a_step_without_gradient_is_a_step_on_zeros(studio: Studio) -> None:
    studio.create("a")
    start = studio.bank.weights("a").clone()
    metrics = studio.step("a", AdamParams(learning_rate=0.5, weight_decay=0.1))
    assert metrics == {"grad_norm:mean": 0.0, "step:max": 1.0}
    assert torch.allclose(studio.bank.weights("a"), start * 0.95)


def test_a_refused_step_clears_the_gradient(studio: Studio) -> None:
    studio.create("a")
    before = studio.state("a")
    studio.run(studio.command("a", datum(4)))
    with pytest.raises(UserError, match=r"^adam_params\.learning_rate is nan"):
        studio.step("a", AdamParams(learning_rate=float("nan")))
    for tensor, saved in zip(studio.state("a"), before, strict=True):
        assert torch.equal(tensor, saved)
    assert studio.gradient("a").count_nonzero() == 0
    assert studio.step("a")["step:max"] == 1


@pytest.mark.parametrize("flags", [flags for flags in np.ndindex(2, 2, 2) if any(flags)])
def test_flags_train_exactly_their_sites(studio: Studio, flags: tuple[int, int, int]) -> None:
    attn, mlp, unembed = map(bool, flags)
    studio.create("a", 4, train_attn=attn, train_mlp=mlp, train_unembed=unembed)
    before = studio.bank.weights("a").clone()
    studio.run(studio.command("a", datum(12)))
    studio.step("a")
    after = studio.bank.weights("a")
    layout = studio.bank.layout(8)
    wanted = {"attn": attn, "mlp": mlp, "unembed": unembed}
    assert {site.group for site in studio.bank.sites} == set(wanted)
    for index, site in enumerate(studio.bank.sites):
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


def test_one_sequence_a_pass_where_tokens_would_meet(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    for model_id in "ab":
        studio.create(model_id)
    commands = [studio.command("a", datum(4), datum(3, 1)), studio.command("b", datum(5))]
    packed = studio.run(*commands)
    gradients = [studio.gradient(model_id) for model_id in "ab"]
    for model_id in "ab":
        studio.step(model_id, AdamParams(learning_rate=0.0))
    seq_lens = []
    trunk = studio.model.trunk

    def watched(tokens_T: torch.Tensor, positions_T: torch.Tensor, pass_: Any) -> Any:
        seq_lens.append(pass_.seq_lens)
        return trunk(tokens_T, positions_T, pass_)

    monkeypatch.setattr(studio.model, "trunk", watched)
    monkeypatch.setattr(studio.model, "facts", replace(studio.model.facts, packable=False))
    outputs = studio.run(*commands)
    assert seq_lens == [(4,), (3,), (5,)]
    for output, want, model_id, gradient in zip(outputs, packed, "ab", gradients, strict=True):
        assert output.metrics["loss:sum"] == pytest.approx(want.metrics["loss:sum"], rel=1e-6)
        assert distance(studio.gradient(model_id), gradient) <= 1e-5
