"""The entropy where a request trains, and chunks that train nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from descant.model.forward_batch import ForwardBatch, Segment
from descant.model.lm_head import LmHead, LmHeadOutput
from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness, datum, gspo_datum, rl_datum
from descant.testing.tiny import VOCAB_SIZE, tiny_model
from descant.train.passes import TorchPass
from descant.train.runner import Gradient, Part, PassItem
from descant.types import Datum, EncodedText, ForwardBackward

NewHarness = Callable[[], LearnerHarness]


def entropies(harness: LearnerHarness, model_id: str, item: Datum) -> np.ndarray:
    """float64 [L], of the logits of this datum alone."""
    tokens = torch.from_numpy(item.model_input[0].tokens.astype(np.int64))
    segment = Segment(start=0, end=len(tokens), row=harness.bank.row(model_id))
    with torch.no_grad():
        batch = ForwardBatch(seq_lens=(len(tokens),), segments=(segment,))
        hidden_TD, lora = harness.model.decoder_forward(tokens, torch.arange(len(tokens)), batch)
        logits = harness.model.lm_head.logits(hidden_TD, lora).double()
    probs = logits.exp() / logits.exp().sum(1, keepdim=True)
    return -(probs * probs.log()).sum(1).numpy()


def mean_entropy(harness: LearnerHarness, model_id: str, *positions: tuple[Datum, slice | Sequence[int]]) -> float:
    """Over these positions of these datums."""
    return float(np.concatenate([entropies(harness, model_id, item)[where] for item, where in positions]).mean())


@pytest.mark.parametrize("arch", ["llama", "gemma2"])  # the second has a soft cap
@pytest.mark.parametrize("train_unembed", [False, True])
def test_it_is_the_mean_over_the_positions_that_can_train(tmp_path: Path, arch: str, train_unembed: bool) -> None:
    source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
    harness = LearnerHarness(load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False))
    harness.create("a", 8, seed=1, train_unembed=train_unembed)
    harness.create("b", 16, seed=2)
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
        harness.command("a", *alike, wide),
        *(harness.command("b", sampled, loss_fn=loss_fn) for loss_fn in ("importance_sampling", "ppo", "cispo", "dro")),
        harness.command("b", gspo, loss_fn="gspo"),
        harness.command("a", *alike, wide, forward_only=True),
    ]
    outputs = harness.run(*commands)
    assert outputs[0].metrics["tokens_computed:sum"] == 30 + 9 + 5 + 6
    of_weights = mean_entropy(harness, "a", *((item, slice(29, None)) for item in alike), (wide, [1, 2, 3, 5]))
    of_advantages = mean_entropy(harness, "b", (sampled, [2, 4, 7]))
    expected = [
        of_weights,
        *([of_advantages] * 3),
        mean_entropy(harness, "b", (sampled, slice(None))),
        mean_entropy(harness, "b", (gspo, [5, 6])),
        of_weights,
    ]
    assert [output.metrics["entropy:mean"] for output in outputs] == pytest.approx(expected, rel=1e-5)
    assert all(key.count(":") == 1 for output in outputs for key in output.metrics)


def halves(harness: LearnerHarness) -> tuple[ForwardBackward, list[Datum]]:
    """Datums of which few positions train, many, and none."""
    data = [datum(9, 1, weights=[0] * 8 + [1]), datum(20, 2), datum(5, 3, weights=[0] * 5), datum(12, 4)]
    return harness.command("a", *data), data


def test_passes_are_added_up(harness: LearnerHarness) -> None:
    harness.create("a")
    command, data = halves(harness)
    request = harness.learner.open(command)
    for numbers in ((3, 0), (2,), (1,)):
        harness.learner.run([Part(request=request, datum=number) for number in numbers])
    everywhere = [(data[0], slice(8, 9)), (data[1], slice(None)), (data[3], slice(None))]
    got = harness.learner.close(request).metrics["entropy:mean"]
    assert got == pytest.approx(mean_entropy(harness, "a", *everywhere), rel=1e-5)


def test_ranks_are_added_up(new_harness: NewHarness) -> None:
    harnesses = new_harness(), new_harness()
    opened = []
    for harness, numbers in zip(harnesses, ((0, 2), (1, 3))):
        harness.create("a")
        command, data = halves(harness)
        request = harness.learner.open(command)
        harness.learner.run([Part(request=request, datum=number) for number in numbers])
        opened.append((harness.learner, request))
    contributions = [learner.contributions([request])[request] for learner, request in opened]
    everywhere = [(data[0], slice(8, 9)), (data[1], slice(None)), (data[3], slice(None))]
    expected = pytest.approx(mean_entropy(harnesses[0], "a", *everywhere), rel=1e-5)
    for learner, request in opened:
        assert learner.close(request, contributions).metrics["entropy:mean"] == expected


@pytest.mark.parametrize("forward_only", [False, True])
def test_without_a_position_that_can_train_there_is_none(harness: LearnerHarness, forward_only: bool) -> None:
    harness.create("a")
    nothing, advantages = datum(5, weights=[0] * 5), np.zeros(5, np.float32)
    commands = [
        harness.command("a", nothing, forward_only=forward_only),
        harness.command("a", rl_datum(5, advantages=advantages), loss_fn="ppo", forward_only=forward_only),
        harness.command("a", rl_datum(5, advantages=advantages), loss_fn="dro", forward_only=forward_only),
    ]
    assert ["entropy:mean" in output.metrics for output in harness.run(*commands)] == [False, False, True]


class CountingLmHead(LmHead):
    """In chunks of so many tokens; ``pushed``: those of each that goes through the backward half, fused or not."""

    def __init__(self, head: LmHead, *, chunk_tokens: int, fused: bool = False):
        super().__init__(
            head.weight_VD, head.bias_V, site_index=head.site_index, softcap=head.softcap, logit_scale=head.logit_scale
        )
        self.compiled = fused
        self.pushed: list[int] = []
        self._chunk_tokens = chunk_tokens

    def logprobs(self, *arguments: Any, **options: Any) -> LmHeadOutput:
        return super().logprobs(*arguments, chunk_tokens=self._chunk_tokens, **options)

    def _backward(self, hidden_CD: torch.Tensor, *rest: Any) -> None:
        self.pushed.append(len(hidden_CD))
        super()._backward(hidden_CD, *rest)

    def _fused_backward(self, hidden_CD: torch.Tensor, *rest: Any) -> None:
        self.pushed.append(len(hidden_CD))
        super()._fused_backward(hidden_CD, *rest)


@pytest.mark.parametrize("fused", [False, True])
def test_chunks_that_train_nothing_have_no_backward(new_harness: NewHarness, fused: bool) -> None:
    """Nor do they change a gradient, an entropy or a neighbour; ``CountingLmHead`` counts in both ways of the head."""
    prompt = datum(64, 1, weights=[0.0] * 50 + [1.0] * 14)  # 6 chunks of nothing, then 2
    sampled = rl_datum(32, 2, advantages=[0.0] * 24 + [1.0] * 8)
    evaluated = datum(16, 3)
    found = []
    for chunk_tokens in (8, 1024):
        model = new_harness().model
        head = CountingLmHead(model.lm_head, chunk_tokens=chunk_tokens, fused=fused)
        harness = LearnerHarness(model, logprobs=head.logprobs)
        harness.create("a")
        commands = [
            harness.command("a", prompt),
            harness.command("a", sampled, loss_fn="ppo"),
            harness.command("a", evaluated, forward_only=True),
        ]
        outputs = harness.run(*commands)
        assert head.pushed == ([8, 8, 8] if chunk_tokens == 8 else [112])
        found.append((harness.gradient("a"), outputs))
    (gradient, outputs), (whole_gradient, whole) = found
    assert whole_gradient.abs().max() > 0
    assert (gradient - whole_gradient).abs().max() <= 1e-5 * whole_gradient.abs().max()
    for got, want in zip(outputs, whole, strict=True):
        assert got.metrics["loss:sum"] == pytest.approx(want.metrics["loss:sum"], rel=1e-5)
        assert got.metrics["entropy:mean"] == pytest.approx(want.metrics["entropy:mean"], rel=1e-5)


def test_a_chunk_of_several_losses_has_a_backward_for_those_that_train(harness: LearnerHarness) -> None:
    head = CountingLmHead(harness.model.lm_head, chunk_tokens=8)
    harness = LearnerHarness(harness.model, logprobs=head.logprobs)
    harness.create("a")
    harness.create("b", seed=1)
    alone = datum(4, 3)
    harness.run(harness.command("b", alone))
    expected = harness.gradient("b")
    harness.bank.gradient("b").zero_()
    harness.bank["b"].gradient_free = True
    nothing = rl_datum(4, 1, advantages=np.zeros(4, np.float32))
    head.pushed.clear()
    harness.run(harness.command("a", nothing, loss_fn="ppo"), harness.command("a", datum(4, 2), forward_only=True))
    assert head.pushed == []
    harness.run(harness.command("a", nothing, loss_fn="ppo"), harness.command("b", alone))
    assert head.pushed == [8]
    assert harness.gradient("a").count_nonzero() == 0
    assert (harness.gradient("b") - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_it_comes_back_in_the_one_copy_of_a_pass(harness: LearnerHarness) -> None:
    harness.create("a")
    gradient = Gradient(model_id="a")
    item = PassItem(
        part=Part(request=("a", 1), datum=0), datum=datum(5), loss_fn="cross_entropy", config={}, gradient=gradient
    )
    launched = harness.runner.launch([item], complete=[gradient])
    assert isinstance(launched, TorchPass)
    assert launched.results.shape == (5 + 5 + 5 + 1,)
