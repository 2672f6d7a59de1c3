"""Conformance of ``PassRunner``: what every implementation must do, the fake included.

    class TestMine(PassRunnerSuite):
        @pytest.fixture
        def harness(self): ...            # a RunnerHarness: the runner, and what its worker does beside requests

Works on any base with at least 12 token ids and 16 positions. Runners that are ``lockstep`` raise what fails, and are
tested with their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import pytest

from descant.errors import NotFound, UserError
from descant.train.check import LOSS_FN_CONFIG
from descant.train.runner import Gradient, LaunchedPass, Part, PassFailure, PassItem, PassResult, PassRunner
from descant.types import AdamParams, Datum, EncodedText

ADAM = AdamParams(learning_rate=0.01)
BREAKS = {"logprobs": [-1e38] * 4, "advantages": [0.0, 0.0, 1.0, 1.0]}
"""exp(p - q) is infinite from position 2 on."""


class RunnerHarness(Protocol):
    """``create`` makes an adapter with B not zero, the same for the same id and runner."""

    runner: PassRunner

    def create(self, model_id: str) -> None: ...

    def delete(self, model_id: str) -> None: ...

    def failing(self, *, writes_gradients: bool) -> AbstractContextManager[None]:
        """Passes that are launched meanwhile run out of memory: in the backward, some gradients written, or before."""


def datum(*tokens: int, **inputs: Any) -> Datum:
    """Targets are the next tokens, and 5."""
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    targets = np.asarray([*tokens[1:], 5], np.int64)
    return Datum(
        model_input=(EncodedText(tokens=np.asarray(tokens, np.int32)),),
        loss_fn_inputs={"target_tokens": targets, **arrays},
    )


def item(
    model_id: str,
    index: int,
    data: Datum,
    gradient: Gradient | None = None,
    *,
    loss_fn: str = "cross_entropy",
    seq_id: int = 1,
) -> PassItem:
    return PassItem(
        part=Part(request=(model_id, seq_id), datum=index),
        datum=data,
        loss_fn=loss_fn,
        config=LOSS_FN_CONFIG[loss_fn],
        gradient=gradient,
    )


def run(runner: PassRunner, *items: PassItem, complete: Sequence[Gradient] = ()) -> PassResult:
    launched = runner.launch(items, complete=complete)
    assert not isinstance(launched, PassFailure), launched
    return launched.wait()


def own(model_id: str) -> Gradient:
    return Gradient(model_id=model_id)


def magnitude(runner: PassRunner, gradient: Gradient) -> float:
    [found] = runner.magnitudes([gradient])
    return found


FIRST, SECOND = datum(1, 2, 3), datum(4, 2, 6, 7, 8, weights=[0.0, 1.0, 1.0, 0.5, 1.0])


class PassRunnerSuite:
    def test_a_datum_has_its_loss_and_its_logprobs(self, harness: RunnerHarness) -> None:
        harness.create("a")
        wide = Datum(
            model_input=FIRST.model_input,
            loss_fn_inputs={"target_tokens": np.array([[1, 2], [3, 4], [5, 6]]), "weights": np.full((3, 2), 0.5)},
        )
        items = [item("a", 2, FIRST), item("a", 0, SECOND), item("a", 1, wide)]
        result = run(harness.runner, *items)
        datums = {found.part: found for found in result.datums}
        assert datums.keys() == {one.part for one in items}
        for one in items:
            found, inputs = datums[one.part], one.datum.loss_fn_inputs
            weights = inputs.get("weights", np.ones(len(inputs["target_tokens"])))
            assert (found.logprobs.dtype, found.logprobs.shape) == (np.float32, inputs["target_tokens"].shape)
            assert found.loss == pytest.approx(-float((found.logprobs * weights).sum()), rel=1e-4)
            assert found.not_finite_at is None
            total, count = found.entropy
            assert count == (np.asarray(weights).reshape(len(weights), -1) != 0).any(1).sum()
            assert 0 < total <= count * np.log(harness.runner.facts.vocab_size) * 1.0001
        assert [datums[one.part].tokens for one in items] == [3, 5, 3]
        assert (result.tokens, result.adapters) == (11, 1)
        assert result.seconds >= 0
        assert result.flops > 0

    def test_forward_only_touches_no_gradient(self, harness: RunnerHarness) -> None:
        harness.create("a")
        expected = run(harness.runner, item("a", 0, FIRST))
        launched = harness.runner.launch([item("a", 0, FIRST)], complete=[], backward=True)
        assert not isinstance(launched, PassFailure)
        assert launched.wait().datums[0].loss == pytest.approx(expected.datums[0].loss, rel=1e-5)
        assert magnitude(harness.runner, own("a")) == 0

    def test_passes_add_up_in_the_gradient_they_are_told(self, harness: RunnerHarness) -> None:
        harness.create("a")
        runner, scratch = harness.runner, harness.runner.allocate("a")
        assert magnitude(runner, scratch) == 0
        run(runner, item("a", 0, FIRST, scratch))
        once = magnitude(runner, scratch)
        assert once > 0
        assert magnitude(runner, own("a")) == 0
        run(runner, item("a", 1, FIRST, scratch))
        assert magnitude(runner, scratch) == pytest.approx(2 * once, rel=1e-4)
        runner.zero(scratch)
        assert magnitude(runner, scratch) == 0
        run(runner, item("a", 0, FIRST, scratch), item("a", 0, SECOND, own("a"), seq_id=2))
        assert magnitude(runner, scratch) == pytest.approx(once, rel=1e-4)
        together = magnitude(runner, own("a"))
        runner.zero(own("a"))
        run(runner, item("a", 0, SECOND, own("a")))
        assert magnitude(runner, own("a")) == pytest.approx(together, rel=1e-4)
        runner.free(scratch)

    def test_models_share_nothing_but_the_pass(self, harness: RunnerHarness) -> None:
        alone = {}
        for model_id, data in (("a", FIRST), ("b", SECOND)):
            harness.create(model_id)
            [found] = run(harness.runner, item(model_id, 0, data, own(model_id))).datums
            alone[model_id] = found.loss, magnitude(harness.runner, own(model_id))
            harness.runner.zero(own(model_id))
        shared = run(harness.runner, item("a", 0, FIRST, own("a")), item("b", 0, SECOND, own("b")))
        assert shared.adapters == 2
        for found in shared.datums:
            model_id = found.part.request[0]
            got = found.loss, magnitude(harness.runner, own(model_id))
            assert got == pytest.approx(alone[model_id], rel=1e-4)

    def test_complete_gradients_are_measured_with_the_pass(self, harness: RunnerHarness) -> None:
        harness.create("a")
        harness.create("b")
        runner, scratch = harness.runner, harness.runner.allocate("a")
        complete = [scratch, own("b"), own("a")]
        items = [
            item("a", 0, FIRST, own("a")),
            item("a", 0, SECOND, scratch, seq_id=2),
            item("b", 0, SECOND, own("b")),
        ]
        result = run(runner, *items, complete=complete)
        assert list(result.magnitudes) == runner.magnitudes(complete)
        assert min(result.magnitudes) > 0
        runner.free(scratch)

    def test_scratch_and_own(self, harness: RunnerHarness) -> None:
        harness.create("a")
        runner = harness.runner
        first, second = runner.allocate("a"), runner.allocate("a")
        run(runner, item("a", 0, FIRST, first))
        run(runner, item("a", 0, SECOND, own("a"), seq_id=2))
        in_first, in_own = runner.magnitudes([first, own("a")])
        assert in_first != in_own
        runner.swap_own(first)
        assert runner.magnitudes([first, own("a"), second]) == [in_own, in_first, 0]
        runner.add_own(second)
        assert runner.magnitudes([first, own("a"), second]) == [in_own, in_first, in_first]
        runner.move_to_own(first)
        assert runner.magnitudes([own("a"), second]) == [in_own, in_first]
        runner.free(second)
        runner.free(own("a"))
        again = runner.allocate("a")
        assert runner.magnitudes([own("a"), again]) == [0, 0]
        runner.free(again)

    def test_what_is_not_finite_adds_nothing_and_changes_no_neighbour(self, harness: RunnerHarness) -> None:
        harness.create("a")
        harness.create("b")
        outcomes = []
        for given in ({"logprobs": [-1.0] * 4, "advantages": [0.0] * 4}, BREAKS):
            harmful = datum(3, 1, 7, 9, **given)
            result = run(
                harness.runner,
                item("a", 0, FIRST, own("a")),
                item("b", 0, harmful, own("b"), loss_fn="importance_sampling"),
            )
            outcomes.append((result, magnitude(harness.runner, own("a"))))
            assert magnitude(harness.runner, own("b")) == 0
            harness.runner.zero(own("a"))
        (good, gradient), (bad, beside) = outcomes
        assert gradient == beside
        for harmless, broken in zip(good.datums, bad.datums, strict=True):
            if harmless.part.request[0] == "a":
                assert broken.loss == harmless.loss
                assert np.array_equal(broken.logprobs, harmless.logprobs)
            else:
                assert not np.isfinite(broken.loss)
                assert broken.not_finite_at == 2

    @pytest.mark.parametrize("writes_gradients", [False, True])
    def test_a_failure_is_returned_and_can_be_undone(self, harness: RunnerHarness, writes_gradients: bool) -> None:
        for model_id in ("a", "b"):
            harness.create(model_id)
        runner = harness.runner
        items = [item("a", 0, FIRST, own("a")), item("b", 0, SECOND, own("b"))]
        expected = run(runner, *items)
        magnitudes = runner.magnitudes([own("a"), own("b")])
        for model_id in ("a", "b"):
            runner.zero(own(model_id))
        with harness.failing(writes_gradients=writes_gradients):
            failure = runner.launch(items, complete=[])
        assert failure == PassFailure(why="ran out of memory", wrote_gradients=writes_gradients)
        runner.recover()
        if writes_gradients:
            for model_id in ("a", "b"):
                runner.zero(own(model_id))
        assert [found.loss for found in run(runner, *items).datums] == [found.loss for found in expected.datums]
        assert runner.magnitudes([own("a"), own("b")]) == magnitudes

    def test_passes_are_waited_for_one_after_another(self, harness: RunnerHarness) -> None:
        harness.create("a")
        launched: list[LaunchedPass] = []
        for index, data in enumerate((FIRST, SECOND)):
            one = harness.runner.launch([item("a", index, data, own("a"))], complete=[])
            assert not isinstance(one, PassFailure)
            launched.append(one)
        results = [one.wait() for one in launched]
        assert [[found.part.datum for found in result.datums] for result in results] == [[0], [1]]
        assert all(result.seconds >= 0 for result in results)

    def test_a_gradient_counts_from_keep_to_clear(self, harness: RunnerHarness) -> None:
        harness.create("a")
        runner = harness.runner
        run(runner, item("a", 0, FIRST, own("a")))
        assert (runner.state("a").step, runner.state("a").has_gradient) == (0, False)
        runner.keep_gradient("a")
        assert runner.state("a").has_gradient
        runner.clear(["a"])
        assert not runner.state("a").has_gradient
        assert magnitude(runner, own("a")) == 0
        runner.clear([])

    def test_a_model_that_is_not_there(self, harness: RunnerHarness) -> None:
        harness.create("a")
        scratch = harness.runner.allocate("a")
        harness.delete("a")
        harness.runner.free(own("a"))
        harness.runner.free(scratch)
        for use in (harness.runner.state, harness.runner.keep_gradient):
            with pytest.raises(NotFound):
                use("a")

    def test_each_model_takes_its_own_step(self, harness: RunnerHarness) -> None:
        runner = harness.runner
        before = {}
        for model_id in ("a", "b", "c"):
            harness.create(model_id)
            [found] = run(runner, item(model_id, 0, FIRST, own(model_id))).datums
            before[model_id] = found.loss
            runner.keep_gradient(model_id)
        wild = AdamParams(learning_rate=1e38, weight_decay=1e30)
        steps = [("b", ADAM), ("c", wild), ("a", AdamParams(learning_rate=0.0))]
        moved, refused, still = runner.step(steps)
        assert isinstance(refused, UserError)
        assert not isinstance(moved, Exception)
        assert not isinstance(still, Exception)
        assert (moved.step, still.step) == (1, 1)
        assert min(moved.grad_norm, still.grad_norm) > 0
        assert [runner.state(model_id).step for model_id in ("a", "b", "c")] == [1, 1, 0]
        runner.clear(["a", "b", "c"])
        after = {model_id: run(runner, item(model_id, 0, FIRST)).datums[0].loss for model_id in before}
        assert after["b"] < before["b"]
        for model_id in ("a", "c"):
            assert after[model_id] == pytest.approx(before[model_id], rel=1e-5)
