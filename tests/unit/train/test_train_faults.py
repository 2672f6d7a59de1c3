"""A shared pass that fails, at any place, is the fault of what fails alone: the others end as if that had not been."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from descant.errors import ServerError, UserError
from descant.model.base import BaseModel
from descant.model.forward_batch import ForwardBatch
from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness, datum, rl_datum
from descant.train.runner import Part
from descant.types import AdamParams, Datum, EncodedText, ForwardBackward, ForwardBackwardOutput

PLACES = ("forward", "head", "backward")
POISON = 7
"""A token: no other datum has it."""


def pure(made: Datum) -> Datum:
    tokens = made.model_input[0].tokens
    clean = EncodedText(tokens=np.where(tokens == POISON, POISON + 1, tokens).astype(np.int32))
    return Datum(model_input=(clean,), loss_fn_inputs=made.loss_fn_inputs)


def poisoned(made: Datum) -> Datum:
    tokens = made.model_input[0].tokens.copy()
    tokens[3] = POISON
    return Datum(model_input=(EncodedText(tokens=tokens),), loss_fn_inputs=made.loss_fn_inputs)


def exhaust(*_: object) -> None:
    raise torch.OutOfMemoryError("secret/path")


class FaultyHarness(LearnerHarness):
    """Of which chosen passes run out of memory at a chosen place."""

    def __init__(self, model: BaseModel, **options: Any):
        super().__init__(model, decoder_forward=self._decoder_forward, logprobs=self._logprobs, **options)
        self._place = ""
        self._when: Callable[[torch.Tensor], bool] = lambda tokens_T: False
        self._failed: list[int] = []
        self._fails_in_head = False

    @contextmanager
    def failing(self, place: str, when: Callable[[torch.Tensor], bool]) -> Iterator[list[int]]:
        """Passes with tokens for which ``when`` holds run out of memory there: at the end of the decoder's forward; in
        the LM head, once its first chunk's gradients are written; in the backward, between two layers. Their sizes are
        told."""
        before, self._place, self._when, self._failed = self._when, place, when, []
        try:
            yield self._failed
        finally:
            self._when, self._fails_in_head = before, False

    def _decoder_forward(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: ForwardBatch) -> Any:
        bad = self._when(tokens_T)
        if bad:
            self._failed.append(len(tokens_T))
        hook = None
        if bad and self._place == "backward":
            hook = self.model.layers[0].register_forward_hook(
                lambda layer, inputs, output: (
                    (output[0] if isinstance(output, tuple) else output).register_hook(exhaust) and None
                )
            )
        try:
            result = self.model.decoder_forward(tokens_T, positions_T, batch)
        finally:
            if hook is not None:
                hook.remove()
        if bad and self._place == "forward":
            exhaust()
        self._fails_in_head = bad and self._place == "head"
        return result

    def _logprobs(self, *arguments: Any, loss: Any = None, **options: Any) -> Any:
        def chunk_loss(positions: slice, logprobs_CK: torch.Tensor) -> torch.Tensor | None:
            return exhaust() if positions.start > 0 else loss(positions, logprobs_CK)

        given = chunk_loss if loss is not None and self._fails_in_head else loss
        return self.model.lm_head.logprobs(*arguments, loss=given, **options)


def requests_of(harness: LearnerHarness, *, poison: bool) -> dict[str, ForwardBackward]:
    """a and c are well; b's datum 1 is not (or is left out with all of b)."""
    commands = {
        "a": harness.command("a", *(pure(datum(60 + i, i)) for i in range(3))),
        "c": harness.command("c", *(pure(rl_datum(50 + i, 10 + i)) for i in range(3)), loss_fn="ppo"),
        "c2": harness.command("c", *(pure(datum(20 + i, 20 + i)) for i in range(3))),
        "evaluated": harness.command("a", *(pure(datum(30, 30 + i)) for i in range(3)), forward_only=True),
    }
    if poison:
        data = [pure(datum(70, 40)), poisoned(pure(datum(140, 41))), pure(datum(70, 42))]
        commands["b"] = harness.command("b", *data)
    return commands


def train(harness: LearnerHarness, commands: dict[str, ForwardBackward], alone: Collection[int] = ()) -> dict[str, Any]:
    """Three microbatches, datum i of every request in the i-th (of b two in the second); those of ``alone`` are passes
    of each request by itself, which they become after a failure: sums in another order have other last bits."""
    opened = {name: harness.learner.open(command) for name, command in commands.items()}
    for turn in range(3):
        parts = [Part(request=request, datum=turn) for name, request in opened.items() if name != "b"]
        if "b" in opened:
            parts += [Part(request=opened["b"], datum=i) for i in ([0], [1, 2], [])[turn]]
        for together in [[part] for part in parts] if turn in alone else [parts]:
            harness.learner.run(together)
    return {name: harness.close(request) for name, request in opened.items()}


def gradients(harness: LearnerHarness) -> dict[str, torch.Tensor]:
    return {model_id: harness.gradient(model_id) for model_id in "ac"}


@pytest.fixture(params=[(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)], ids=str)
def any_harness(request: pytest.FixtureRequest, tiny_llama: Path) -> FaultyHarness:
    """Also with passes that are looked at late, as on CUDA."""
    dtype, asynchronous = request.param
    source = ModelSource(name="tiny", directory=tiny_llama)
    model = load_model(source, device=torch.device("cpu"), dtype=dtype, check=False)
    harness = FaultyHarness(model, asynchronous=asynchronous)
    for model_id, rank in (("a", 8), ("b", 16), ("c", 3)):
        harness.create(model_id, rank, seed=rank)
    return harness


@pytest.mark.parametrize("place", PLACES)
def test_others_end_as_if_the_faulty_request_had_not_been(any_harness: FaultyHarness, place: str) -> None:
    harness = any_harness
    # What failed in the forward has written no gradient yet; otherwise the first pass is run again as well.
    want = train(harness, requests_of(harness, poison=False), alone=[1] if place == "forward" else [0, 1])
    undisturbed = gradients(harness)
    for model_id in "ac":
        harness.step(model_id, AdamParams(learning_rate=0.0))

    with harness.failing(place, lambda tokens_T: bool((tokens_T == POISON).any())) as failed:
        got = train(harness, requests_of(harness, poison=True))
    assert len(failed) == 3  # with all, b's two, its datum 1
    assert isinstance(got["b"], ServerError)
    assert got["b"].message == "data[1], alone in its pass, ran out of memory"
    assert harness.gradient("b").count_nonzero() == 0
    with pytest.raises(UserError, match="ran out of memory"):
        harness.step("b")
    for model_id, gradient in gradients(harness).items():
        assert gradient.count_nonzero() > 0
        assert torch.equal(gradient, undisturbed[model_id])
    for name, output in want.items():
        assert isinstance(got[name], ForwardBackwardOutput)
        assert got[name].metrics["loss:sum"] == output.metrics["loss:sum"]
        for ours, alone in zip(got[name].loss_fn_outputs, output.loss_fn_outputs, strict=True):
            assert np.array_equal(ours["logprobs"], alone["logprobs"])


@pytest.mark.parametrize("place", PLACES)
def test_a_pass_that_is_too_large_is_run_in_parts(new_harness: Callable[[], LearnerHarness], place: str) -> None:
    harness = FaultyHarness(new_harness().model)
    for model_id in "abc":
        harness.create(model_id, seed=ord(model_id))
    commands = requests_of(harness, poison=False)
    train(harness, commands)
    whole = gradients(harness)
    for model_id in "ac":
        harness.step(model_id, AdamParams(learning_rate=0.0))

    # In the head a pass fails from its second chunk on.
    most = {"head": 128}.get(place, 100)
    with harness.failing(place, lambda tokens_T: len(tokens_T) > most) as failed:
        requests = [harness.learner.open(command) for command in commands.values()]
        harness.learner.run([Part(request=request, datum=i) for request in requests for i in range(3)])
        outputs = [harness.close(request) for request in requests]
    assert len(failed) == 3  # all of them, and the two of more than that by themselves
    assert all(isinstance(output, ForwardBackwardOutput) for output in outputs)
    for model_id, gradient in gradients(harness).items():
        assert (gradient - whole[model_id]).abs().max() <= 1e-5 * whole[model_id].abs().max()


@pytest.mark.parametrize("place", PLACES)
def test_what_fails_once_is_run_again_whole_and_has_the_same_bits(any_harness: FaultyHarness, place: str) -> None:
    """Whatever took the memory has gone; the pass before it in the same gradient row is as it was, too."""
    harness = any_harness
    data = [pure(datum(60 + i, i)) for i in range(5)]

    def train_a(fails: int) -> torch.Tensor:
        """``fails``: how often the second pass does."""
        left = [0]
        request = harness.learner.open(harness.command("a", *data))
        with harness.failing(place, lambda _: left.append(left.pop() - 1) or left[0] >= 0):  # type: ignore[func-returns-value]
            harness.learner.run([Part(request=request, datum=i) for i in (0, 1)])
            left[0] = fails
            harness.learner.run([Part(request=request, datum=i) for i in (2, 3, 4)])
        harness.learner.close(request)
        gradient = harness.gradient("a")
        harness.step("a", AdamParams(learning_rate=0.0))
        return gradient

    undisturbed = train_a(0)
    assert torch.equal(train_a(1), undisturbed)
