"""The entropy where a request trains, and chunks that train nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from descant.model import head as head_module
from descant.model.head import Head
from descant.model.load import ModelSource, load_model
from descant.model.passes import Pass, Segment
from descant.testing.studio import Studio, datum, gspo_datum, rl_datum
from descant.testing.tiny import VOCAB_SIZE, tiny_model
from descant.train.step import Part
from descant.types import Datum, EncodedText, ForwardBackward

NewStudio = Callable[[], Studio]


def entropies(studio: Studio, model_id: str, item: Datum) -> np.ndarray:
    """float64 [L], of the logits of this datum alone."""
    tokens = torch.from_numpy(item.model_input[0].tokens.astype(np.int64))
    segment = Segment(start=0, end=len(tokens), row=studio.bank.row(model_id))
    with torch.no_grad():
        pass_ = Pass(seq_lens=(len(tokens),), segments=(segment,))
        hidden_TD, lora = studio.model.trunk(tokens, torch.arange(len(tokens)), pass_)
        logits = studio.model.head.logits(hidden_TD, lora).double()
    probs = logits.exp() / logits.exp().sum(1, keepdim=True)
    return -(probs * probs.log()).sum(1).numpy()


def mean_entropy(studio: Studio, model_id: str, *places: tuple[Datum, slice | Sequence[int]]) -> float:
    """Over these positions of these datums."""
    return float(np.concatenate([entropies(studio, model_id, item)[where] for item, where in places]).mean())


@pytest.mark.parametrize("arch", ["llama", "gemma2"])  # the second has a soft cap
@pytest.mark.parametrize("train_unembed", [False, True])
def test_it_is_the_mean_over_the_positions_that_can_train(tmp_path: Path, arch: str, train_unembed: bool) -> None:
    source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
    studio = Studio(load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False))
    studio.create("a", 8, seed=1, train_unembed=train_unembed)
    studio.create("b", 16, seed=2)
    prompt = datum(30).model_input[0].tokens
    alike = []
    for number, sampled in enumerate((9, 5)):
        own = datum(30 + sampled, number + 1, weights=[0.0] * 29 + [1.0] * (sampled + 1))
        tokens = np.concatenate([prompt, own.model_input[0].tokens[30:]])
        alike.append(Datum(model_input=(EncodedText(tokens=tokens),), loss_fn_inputs=own.loss_fn_inputs))
    targets = np.random.default_rng(0).integers(0, VOCAB_SIZE, (6, 3))
    wide = datum(
        6, 5, target_tokens=targets, weights=[[0, 0, 0], [0, 0, 2], [1, 1, 1], [0, -1, 0], [0, 0, 0], [1, 0, 0]]
    )
    advantages = np.array([0, 0, 1, 0, -1, 0, 0, 2], np.float32)
    sampled = rl_datum(8, 6, advantages=advantages)
    gspo = gspo_datum(8, 7, advantages=np.array([1, 1, 1, 1, 0, 1, 1, 0], np.float32))
    commands = [
        studio.command("a", *alike, wide),
        *(studio.command("b", sampled, loss_fn=loss_fn) for loss_fn in ("importance_sampling", "ppo", "cispo", "dro")),
        studio.command("b", gspo, loss_fn="gspo"),
        studio.command("a", *alike, wide, forward_only=True),
    ]
    outputs = studio.run(*commands)
    assert outputs[0].metrics["tokens_computed:sum"] == 30 + 9 + 5 + 6
    of_weights = mean_entropy(studio, "a", *((item, slice(29, None)) for item in alike), (wide, [1, 2, 3, 5]))
    of_advantages = mean_entropy(studio, "b", (sampled, [2, 4, 7]))
    expected = [
        of_weights,
        *([of_advantages] * 3),
        mean_entropy(studio, "b", (sampled, slice(None))),
        mean_entropy(studio, "b", (gspo, [5, 6])),
        of_weights,
    ]
    assert [output.metrics["entropy:mean"] for output in outputs] == pytest.approx(expected, rel=1e-5)
    assert all(key.count(":") == 1 for output in outputs for key in output.metrics)


def halves(studio: Studio) -> tuple[ForwardBackward, list[Datum]]:
    """Datums of which few positions train, many, and none."""
    data = [datum(9, 1, weights=[0] * 8 + [1]), datum(20, 2), datum(5, 3, weights=[0] * 5), datum(12, 4)]
    return studio.command("a", *data), data


def test_passes_are_added_up(studio: Studio) -> None:
    studio.create("a")
    command, data = halves(studio)
    request = studio.learner.open(command)
    for numbers in ((3, 0), (2,), (1,)):
        studio.learner.run([Part(request=request, datum=number) for number in numbers])
    everywhere = [(data[0], slice(8, 9)), (data[1], slice(None)), (data[3], slice(None))]
    got = studio.learner.close(request).metrics["entropy:mean"]
    assert got == pytest.approx(mean_entropy(studio, "a", *everywhere), rel=1e-5)


def test_ranks_are_added_up(new_studio: NewStudio) -> None:
    studios = new_studio(), new_studio()
    opened = []
    for studio, numbers in zip(studios, ((0, 2), (1, 3))):
        studio.create("a")
        command, data = halves(studio)
        request = studio.learner.open(command)
        studio.learner.run([Part(request=request, datum=number) for number in numbers])
        opened.append((studio.learner, request))
    contributions = [learner.contributions([request])[request] for learner, request in opened]
    everywhere = [(data[0], slice(8, 9)), (data[1], slice(None)), (data[3], slice(None))]
    expected = pytest.approx(mean_entropy(studios[0], "a", *everywhere), rel=1e-5)
    for learner, request in opened:
        assert learner.close(request, contributions).metrics["entropy:mean"] == expected


@pytest.mark.parametrize("forward_only", [False, True])
def test_without_a_position_that_can_train_there_is_none(studio: Studio, forward_only: bool) -> None:
    studio.create("a")
    nothing, advantages = datum(5, weights=[0] * 5), np.zeros(5, np.float32)
    commands = [
        studio.command("a", nothing, forward_only=forward_only),
        studio.command("a", rl_datum(5, advantages=advantages), loss_fn="ppo", forward_only=forward_only),
        studio.command("a", rl_datum(5, advantages=advantages), loss_fn="dro", forward_only=forward_only),
    ]
    assert ["entropy:mean" in output.metrics for output in studio.run(*commands)] == [False, False, True]


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each chunk of eight that goes through the head's backward half, fused or not."""
    sizes: list[int] = []
    plain, fused = Head._backward, head_module._dlogits

    def backward(self: Head, hidden_CD: torch.Tensor, *rest: object) -> None:
        sizes.append(len(hidden_CD))
        plain(self, hidden_CD, *rest)  # type: ignore[arg-type]

    def dlogits(logits_CV: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(len(logits_CV))
        return fused(logits_CV, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Head, "_backward", backward)
    monkeypatch.setattr(head_module, "_dlogits", dlogits)
    monkeypatch.setitem(head_module.CHUNK_TOKENS, "cpu", 8)
    return sizes


@pytest.mark.parametrize("fused", [False, True])
def test_chunks_that_train_nothing_are_not_pushed_back(new_studio: NewStudio, pushed: list[int], fused: bool) -> None:
    """Nor do they change a gradient, an entropy or a neighbour; ``pushed`` counts in both ways of the head."""
    prompt = datum(64, 1, weights=[0.0] * 50 + [1.0] * 14)  # 6 chunks of nothing, then 2
    sampled = rl_datum(32, 2, advantages=[0.0] * 24 + [1.0] * 8)
    evaluated = datum(16, 3)
    found = []
    for chunk_tokens in (8, 1024):
        head_module.CHUNK_TOKENS["cpu"] = chunk_tokens
        studio = new_studio()
        studio.model.head.compiled = fused
        studio.create("a")
        commands = [
            studio.command("a", prompt),
            studio.command("a", sampled, loss_fn="ppo"),
            studio.command("a", evaluated, forward_only=True),
        ]
        pushed.clear()
        outputs = studio.run(*commands)
        assert pushed == ([8, 8, 8] if chunk_tokens == 8 else [112])
        found.append((studio.gradient("a"), outputs))
    (gradient, outputs), (whole_gradient, whole) = found
    assert whole_gradient.abs().max() > 0
    assert (gradient - whole_gradient).abs().max() <= 1e-5 * whole_gradient.abs().max()
    for got, want in zip(outputs, whole, strict=True):
        assert got.metrics["loss:sum"] == pytest.approx(want.metrics["loss:sum"], rel=1e-5)
        assert got.metrics["entropy:mean"] == pytest.approx(want.metrics["entropy:mean"], rel=1e-5)


def test_a_chunk_of_several_losses_is_pushed_back_for_those_that_train(studio: Studio, pushed: list[int]) -> None:
    studio.create("a")
    studio.create("b", seed=1)
    alone = datum(4, 3)
    studio.run(studio.command("b", alone))
    expected = studio.gradient("b")
    studio.bank.gradient("b").zero_()
    studio.bank["b"].gradient_free = True
    nothing = rl_datum(4, 1, advantages=np.zeros(4, np.float32))
    pushed.clear()
    studio.run(studio.command("a", nothing, loss_fn="ppo"), studio.command("a", datum(4, 2), forward_only=True))
    assert pushed == []
    studio.run(studio.command("a", nothing, loss_fn="ppo"), studio.command("b", alone))
    assert pushed == [8]
    assert studio.gradient("a").count_nonzero() == 0
    assert (studio.gradient("b") - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_it_comes_back_in_the_one_copy_of_a_pass(studio: Studio) -> None:
    studio.create("a")
    learner = studio.learner
    learner._flies = True
    request = learner.open(studio.command("a", datum(5)))
    learner.run([Part(request=request, datum=0)])
    flight = learner._flight
    assert flight is not None
    assert flight.results.shape == (5 + 5 + 5 + 1,)
    learner.close(request)
