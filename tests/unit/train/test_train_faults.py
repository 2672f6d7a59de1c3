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
from descant.model.load import ModelSource, load_model
from descant.testing.studio import Studio, datum, rl_datum
from descant.train.step import Part
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


@contextmanager
def failing(studio: Studio, place: str, when: Callable[[torch.Tensor], bool]) -> Iterator[list[int]]:
    """Passes with tokens for which ``when`` holds run out of memory there: at the end of the trunk's forward; in the
    head, once its first chunk's gradients are written; in the backward, between two layers. Their sizes are told."""
    model, trunk, logprobs = studio.model, studio.model.trunk, studio.model.head.logprobs
    failed: list[int] = []

    def fails_in_trunk(tokens_T: torch.Tensor, *rest: Any) -> Any:
        bad = when(tokens_T)
        if bad:
            failed.append(len(tokens_T))
        hook = None
        if bad and place == "backward":
            hook = model.layers[0].register_forward_hook(
                lambda layer, inputs, output: (
                    (output[0] if isinstance(output, tuple) else output).register_hook(exhaust) and None
                )
            )
        try:
            result = trunk(tokens_T, *rest)
        finally:
            if hook is not None:
                hook.remove()
        if bad and place == "forward":
            exhaust()
        model.head.logprobs = fails_in_head if bad and place == "head" else logprobs  # type: ignore[method-assign]
        return result

    def fails_in_head(*arguments: Any, loss: Any = None, **options: Any) -> Any:
        def chunk_loss(places: slice, logprobs_CK: torch.Tensor) -> torch.Tensor | None:
            return exhaust() if places.start > 0 else loss(places, logprobs_CK)

        return logprobs(*arguments, loss=loss and chunk_loss, **options)

    model.trunk = fails_in_trunk  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        model.trunk, model.head.logprobs = trunk, logprobs  # type: ignore[method-assign]


def requests_of(studio: Studio, *, poison: bool) -> dict[str, ForwardBackward]:
    """a and c are well; b's datum 1 is not (or is left out with all of b)."""
    commands = {
        "a": studio.command("a", *(pure(datum(60 + i, i)) for i in range(3))),
        "c": studio.command("c", *(pure(rl_datum(50 + i, 10 + i)) for i in range(3)), loss_fn="ppo"),
        "c2": studio.command("c", *(pure(datum(20 + i, 20 + i)) for i in range(3))),
        "evaluated": studio.command("a", *(pure(datum(30, 30 + i)) for i in range(3)), forward_only=True),
    }
    if poison:
        data = [pure(datum(70, 40)), poisoned(pure(datum(140, 41))), pure(datum(70, 42))]
        commands["b"] = studio.command("b", *data)
    return commands


def train(studio: Studio, commands: dict[str, ForwardBackward], alone: Collection[int] = ()) -> dict[str, Any]:
    """Three microbatches, datum i of every request in the i-th (of b two in the second); those of ``alone`` are passes
    of each request by itself, which they become after a failure: sums in another order have other last bits."""
    opened = {name: studio.learner.open(command) for name, command in commands.items()}
    for turn in range(3):
        parts = [Part(request=request, datum=turn) for name, request in opened.items() if name != "b"]
        if "b" in opened:
            parts += [Part(request=opened["b"], datum=i) for i in ([0], [1, 2], [])[turn]]
        for together in [[part] for part in parts] if turn in alone else [parts]:
            studio.learner.run(together)
    return {name: studio.close(request) for name, request in opened.items()}


def gradients(studio: Studio) -> dict[str, torch.Tensor]:
    return {model_id: studio.gradient(model_id) for model_id in "ac"}


@pytest.fixture(params=[(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)], ids=str)
def any_studio(request: pytest.FixtureRequest, tiny_llama: Path) -> Studio:
    """Also with passes that are looked at late, as on CUDA."""
    dtype, flies = request.param
    source = ModelSource(name="tiny", directory=tiny_llama)
    studio = Studio(load_model(source, device=torch.device("cpu"), dtype=dtype, check=False))
    studio.learner._flies = flies
    for model_id, rank in (("a", 8), ("b", 16), ("c", 3)):
        studio.create(model_id, rank, seed=rank)
    return studio


@pytest.mark.parametrize("place", PLACES)
def test_others_end_as_if_the_faulty_request_had_not_been(any_studio: Studio, place: str) -> None:
    studio = any_studio
    # What failed in the forward has written no gradient yet; otherwise the first pass is run again as well.
    want = train(studio, requests_of(studio, poison=False), alone=[1] if place == "forward" else [0, 1])
    undisturbed = gradients(studio)
    for model_id in "ac":
        studio.step(model_id, AdamParams(learning_rate=0.0))

    with failing(studio, place, lambda tokens_T: bool((tokens_T == POISON).any())) as failed:
        got = train(studio, requests_of(studio, poison=True))
    assert len(failed) == 3  # with all, b's two, its datum 1
    assert isinstance(got["b"], ServerError)
    assert got["b"].message == "data[1], alone in its pass, ran out of memory"
    assert studio.gradient("b").count_nonzero() == 0
    with pytest.raises(UserError, match="ran out of memory"):
        studio.step("b")
    for model_id, gradient in gradients(studio).items():
        assert gradient.count_nonzero() > 0
        assert torch.equal(gradient, undisturbed[model_id])
    for name, output in want.items():
        assert isinstance(got[name], ForwardBackwardOutput)
        assert got[name].metrics["loss:sum"] == output.metrics["loss:sum"]
        for ours, alone in zip(got[name].loss_fn_outputs, output.loss_fn_outputs, strict=True):
            assert np.array_equal(ours["logprobs"], alone["logprobs"])


@pytest.mark.parametrize("place", PLACES)
def test_a_pass_that_is_too_large_is_run_in_parts(studio: Studio, place: str) -> None:
    for model_id in "abc":
        studio.create(model_id, seed=ord(model_id))
    commands = requests_of(studio, poison=False)
    train(studio, commands)
    whole = gradients(studio)
    for model_id in "ac":
        studio.step(model_id, AdamParams(learning_rate=0.0))

    # In the head a pass fails from its second chunk on.
    most = {"head": 128}.get(place, 100)
    with failing(studio, place, lambda tokens_T: len(tokens_T) > most) as failed:
        requests = [studio.learner.open(command) for command in commands.values()]
        studio.learner.run([Part(request=request, datum=i) for request in requests for i in range(3)])
        outputs = [studio.close(request) for request in requests]
    assert len(failed) == 3  # all of them, and the two of more than that by themselves
    assert all(isinstance(output, ForwardBackwardOutput) for output in outputs)
    for model_id, gradient in gradients(studio).items():
        assert (gradient - whole[model_id]).abs().max() <= 1e-5 * whole[model_id].abs().max()
