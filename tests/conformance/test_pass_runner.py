"""The pass runners keep their promises, and the suite notices one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from descant.errors import DescantError
from descant.model.load import ModelSource, load_model
from descant.testing.fake_passes import FakePass, FakePassRunner
from descant.testing.learner import LearnerHarness
from descant.testing.pass_runner import PassRunnerSuite
from descant.testing.tiny import tiny_model
from descant.train.runner import Gradient, ModelState, PassFailure, PassItem, StepTaken
from descant.types import AdamParams


class FakeHarness:
    def __init__(self, runner: FakePassRunner):
        self.runner = runner

    def create(self, model_id: str) -> None:
        self.runner.create(model_id)

    def delete(self, model_id: str) -> None:
        self.runner.delete(model_id)

    @contextmanager
    def failing(self, *, writes_gradients: bool) -> Iterator[None]:
        self.runner.wrote_gradients = writes_gradients
        self.runner.fails = lambda items: True
        yield
        self.runner.fails = lambda items: False


class TorchHarness:
    def __init__(self, harness: LearnerHarness):
        self._harness = harness
        self.runner = harness.runner

    def create(self, model_id: str) -> None:
        self._harness.create(model_id, seed=ord(model_id))

    def delete(self, model_id: str) -> None:
        self._harness.bank.delete(model_id)

    def failing(self, *, writes_gradients: bool) -> AbstractContextManager[None]:
        return self._harness.out_of_memory(writes_gradients=writes_gradients)


class TestFakePassRunner(PassRunnerSuite):
    @pytest.fixture
    def harness(self) -> FakeHarness:
        return FakeHarness(FakePassRunner())


class TestTorchPassRunner(PassRunnerSuite):
    @pytest.fixture(params=[False, True], ids=["at once", "asynchronous"])
    def harness(self, request: pytest.FixtureRequest, tiny_llama: Path) -> TorchHarness:
        source = ModelSource(name="tiny", directory=tiny_llama)
        model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
        return TorchHarness(LearnerHarness(model, asynchronous=request.param))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


# ---------------------------------------------------------------------------------- broken on purpose, once per clause


class MixesUpDatums(FakePassRunner):
    def launch(self, items: Sequence[PassItem], **options: Any) -> FakePass | PassFailure:
        launched = super().launch(items, **options)
        if isinstance(launched, PassFailure):
            return launched
        datums = launched.result.datums
        mixed = [replace(datum, part=datums[-1 - number].part) for number, datum in enumerate(datums)]
        return replace(launched, result=replace(launched.result, datums=mixed))


class ForwardIsBackward(FakePassRunner):
    def launch(self, items: Sequence[PassItem], **options: Any) -> FakePass | PassFailure:
        items = [replace(item, gradient=item.gradient or Gradient(model_id=item.model_id)) for item in items]
        return super().launch(items, **options)


class OwnOnly(FakePassRunner):
    def launch(self, items: Sequence[PassItem], **options: Any) -> FakePass | PassFailure:
        items = [
            replace(item, gradient=Gradient(model_id=item.model_id)) if item.gradient is not None else item
            for item in items
        ]
        return super().launch(items, **options)


class OneGradientForAll(FakePassRunner):
    def launch(self, items: Sequence[PassItem], **options: Any) -> FakePass | PassFailure:
        gradient = next((item.gradient for item in items if item.gradient is not None), None)
        items = [replace(item, gradient=gradient) if item.gradient is not None else item for item in items]
        return super().launch(items, **options)


class MeasuresInAnyOrder(FakePassRunner):
    def launch(self, items: Sequence[PassItem], *, complete: Sequence[Gradient], **options: Any) -> Any:
        return super().launch(items, complete=sorted(complete, key=str), **options)


class CopiesForSwap(FakePassRunner):
    def swap_own(self, scratch: Gradient) -> None:
        self._adapter(scratch.model_id).gradient = [part.copy() for part in self.scratch[scratch]]


class LeavesScratchDirty(FakePassRunner):
    def allocate(self, model_id: str) -> Gradient:
        gradient = super().allocate(model_id)
        self.scratch[gradient][0][:] = 1.0
        return gradient


class NotANumber(FakePassRunner):
    """What is not finite is, in the gradient."""

    def launch(self, items: Sequence[PassItem], **options: Any) -> FakePass | PassFailure:
        launched = super().launch(items, **options)
        if not isinstance(launched, PassFailure):
            for item, datum in zip(items, launched.result.datums):
                if datum.not_finite_at is not None and item.gradient is not None:
                    self._arrays(item.gradient)[0][:] = np.nan
        return launched


class RaisesFailures(FakePassRunner):
    def launch(self, items: Sequence[PassItem], **options: Any) -> FakePass | PassFailure:
        launched = super().launch(items, **options)
        if isinstance(launched, PassFailure):
            raise AssertionError(launched.why)
        return launched


class DeniesItWrote(FakePassRunner):
    def launch(self, items: Sequence[PassItem], **options: Any) -> FakePass | PassFailure:
        launched = super().launch(items, **options)
        return replace(launched, wrote_gradients=False) if isinstance(launched, PassFailure) else launched


class KeepsTheFirst(FakePassRunner):
    first: Any = None

    def launch(self, items: Sequence[PassItem], **options: Any) -> FakePass | PassFailure:
        launched = super().launch(items, **options)
        self.first = self.first or launched
        return self.first


class CountsAtOnce(FakePassRunner):
    def launch(self, items: Sequence[PassItem], **options: Any) -> FakePass | PassFailure:
        for item in items:
            self.keep_gradient(item.model_id)
        return super().launch(items, **options)


class ClearsTheFlagOnly(FakePassRunner):
    def clear(self, model_ids: Sequence[str]) -> None:
        for model_id in model_ids:
            self._adapter(model_id).pending_gradient = False


class KnowsEverybody(FakePassRunner):
    def state(self, model_id: str) -> ModelState:
        return super().state(model_id) if model_id in self._adapters else ModelState(step=0, has_gradient=False)


class StepsNobody(FakePassRunner):
    """When one of them cannot."""

    def step(self, steps: Sequence[tuple[str, AdamParams]], **options: Any) -> list[StepTaken | Exception]:
        outcomes = super().step(steps, **options)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        return [errors[0] for _ in steps] if errors else outcomes


@pytest.mark.parametrize(
    ("broken", "clause", "arguments"),
    [
        (MixesUpDatums, "test_a_datum_has_its_loss_and_its_logprobs", {}),
        (ForwardIsBackward, "test_forward_only_touches_no_gradient", {}),
        (OwnOnly, "test_passes_add_up_in_the_gradient_they_are_told", {}),
        (LeavesScratchDirty, "test_passes_add_up_in_the_gradient_they_are_told", {}),
        (OneGradientForAll, "test_models_share_nothing_but_the_pass", {}),
        (MeasuresInAnyOrder, "test_complete_gradients_are_measured_with_the_pass", {}),
        (CopiesForSwap, "test_scratch_and_own", {}),
        (NotANumber, "test_what_is_not_finite_adds_nothing_and_changes_no_neighbour", {}),
        (RaisesFailures, "test_a_failure_is_returned_and_can_be_undone", {"writes_gradients": False}),
        (DeniesItWrote, "test_a_failure_is_returned_and_can_be_undone", {"writes_gradients": True}),
        (KeepsTheFirst, "test_passes_are_waited_for_one_after_another", {}),
        (CountsAtOnce, "test_a_gradient_counts_from_keep_to_clear", {}),
        (ClearsTheFlagOnly, "test_a_gradient_counts_from_keep_to_clear", {}),
        (KnowsEverybody, "test_a_model_that_is_not_there", {}),
        (StepsNobody, "test_each_model_takes_its_own_step", {}),
    ],
)
def test_the_suite_sees_a_broken_runner(broken: type[FakePassRunner], clause: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, DescantError)):
        getattr(PassRunnerSuite(), clause)(FakeHarness(broken()), **arguments)
