"""Datums that begin alike share what they have in common; nobody can tell but by the tokens that were computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.adapters.slots import RowRef
from descant.errors import UserError
from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness
from descant.testing.tiny import VOCAB_SIZE
from descant.train.pack import MIN_SHARED_TOKENS, Item, pack, unpack
from descant.train.runner import Part
from descant.types import AdamParams, Datum, EncodedText, ForwardBackward, ForwardBackwardOutput

PROMPT = 40


def text(*seeds_and_lengths: tuple[int, int]) -> np.ndarray:
    """Random tokens in pieces: the same seed gives the same piece."""
    pieces = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, length) for seed, length in seeds_and_lengths]
    return np.concatenate(pieces).astype(np.int32)


def ce(tokens: np.ndarray, *, width: int | None = None, seed: int = 0) -> Datum:
    """The next token as target (random after the last), other weights everywhere; or [N, K]."""
    random = np.random.default_rng([seed, len(tokens)])
    targets = np.append(tokens[1:], random.integers(VOCAB_SIZE)).astype(np.int64)
    if width is not None:
        targets = random.integers(0, VOCAB_SIZE, (len(tokens), width))
    weights = random.normal(size=targets.shape).astype(np.float32)
    return Datum(
        model_input=(EncodedText(tokens=tokens),), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )


def rl(tokens: np.ndarray, *, sampled_from: int, seed: int = 0, masked: bool = False) -> Datum:
    random = np.random.default_rng([seed, len(tokens)])
    mask = (np.arange(len(tokens)) >= sampled_from).astype(np.float32)
    arrays = {
        "target_tokens": np.append(tokens[1:], 7).astype(np.int64),
        "logprobs": mask * random.normal(-6, 0.5, len(tokens)).astype(np.float32),
        "advantages": mask * np.float32(random.normal()),
    }
    if masked:
        arrays["sequence_ratio_mask"] = mask
    return Datum(model_input=(EncodedText(tokens=tokens),), loss_fn_inputs=arrays)


SAMPLES = [text((1, PROMPT), (10 + i, 5 + i)) for i in range(8)]
TURNS = [text(*((20 + turn, 18) for turn in range(turns))) for turns in (1, 3, 2, 4)]
TREE = [text((1, 30), (2, 20), (i, 9)) for i in (3, 4)] + [text((1, 30), (5, 20), (i, 70)) for i in (6, 7)]

CASES: dict[str, tuple[list[Datum], str, int]] = {
    "samples of one prompt": ([ce(t, seed=i) for i, t in enumerate(SAMPLES)], "cross_entropy", 40 + sum(range(5, 13))),
    "turns of a conversation": ([ce(t) for t in TURNS], "cross_entropy", 4 * 18),
    "the last turn first": ([ce(t) for t in TURNS[::-1]], "cross_entropy", 4 * 18),
    "a tree": ([ce(t) for t in TREE], "cross_entropy", 30 + 2 * 20 + 2 * 9 + 2 * 70),
    "identical": ([ce(SAMPLES[0], seed=i) for i in range(3)], "cross_entropy", len(SAMPLES[0])),
    "just enough": ([ce(text((1, 16), (i, 9))) for i in (2, 3)], "cross_entropy", 16 + 2 * 9),
    "too little": ([ce(text((1, 15), (i, 9))) for i in (2, 3)], "cross_entropy", 2 * (15 + 9)),
    "wide targets": (
        [ce(t, width=width, seed=i) for i, (t, width) in enumerate(zip(SAMPLES, (3, None, 1, 4)))],
        "cross_entropy",
        40 + 5 + 6 + 7 + 8,
    ),
    "two prompts": (
        [ce(text((p, PROMPT), (10 + i, 6))) for i in range(3) for p in (1, 2)],
        "cross_entropy",
        2 * (40 + 3 * 6),
    ),
    **{
        loss_fn: (
            [rl(t, sampled_from=PROMPT - 1, seed=i, masked=loss_fn == "gspo") for i, t in enumerate(SAMPLES)],
            loss_fn,
            40 + sum(range(5, 13)),
        )
        for loss_fn in ("importance_sampling", "ppo", "cispo", "dro", "gspo")
    },
}


@pytest.fixture(scope="module")
def bf16(tiny_llama: Path) -> LearnerHarness:
    source = ModelSource(name="tiny", directory=tiny_llama)
    harness = LearnerHarness(load_model(source, device=torch.device("cpu"), dtype=torch.bfloat16, check=False))
    harness.create("a", 8, seed=1)
    return harness


def apart(harness: LearnerHarness, command: ForwardBackward) -> ForwardBackwardOutput:
    """Each datum in a pass of its own: nothing to share."""
    request = harness.learner.open(command)
    for part in harness.parts(request, command):
        harness.learner.run([part])
    return harness.learner.close(request)


def gradient(harness: LearnerHarness, model_id: str) -> torch.Tensor:
    """The gradient, which is then forgotten."""
    taken = harness.gradient(model_id)
    harness.step(model_id, AdamParams(learning_rate=0.0))
    return taken


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert want.abs().max() > 0
    assert (got - want).abs().max() <= tolerance * want.abs().max()


def assert_same(got: ForwardBackwardOutput, want: ForwardBackwardOutput) -> None:
    assert got.metrics["loss:sum"] == pytest.approx(want.metrics["loss:sum"], rel=1e-5)
    for mine, alone in zip(got.loss_fn_outputs, want.loss_fn_outputs, strict=True):
        assert mine["logprobs"].shape == alone["logprobs"].shape
        np.testing.assert_allclose(mine["logprobs"], alone["logprobs"], atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_shared_equals_apart(harness: LearnerHarness, case: str) -> None:
    data, loss_fn, computed = CASES[case]
    harness.create("a", 8, seed=1)
    command = harness.command("a", *data, loss_fn=loss_fn)
    want, want_gradient = apart(harness, command), gradient(harness, "a")
    [got] = harness.run(command)
    assert_same(got, want)
    assert_near(gradient(harness, "a"), want_gradient)
    given = sum(len(datum.model_input[0].tokens) for datum in data)
    assert got.metrics["tokens:sum"] == want.metrics["tokens:sum"] == want.metrics["tokens_computed:sum"] == given
    assert got.metrics["tokens_computed:sum"] == computed
    assert (got.metrics["microbatches:sum"], want.metrics["microbatches:sum"]) == (1, len(data))
    assert (got.metrics["compute_ms:sum"], want.metrics["compute_ms:sum"]) == (1000, 1000 * len(data))


@pytest.mark.parametrize("case", CASES)
def test_in_bf16_logprobs_are_bit_equal(bf16: LearnerHarness, case: str) -> None:
    data, loss_fn, _ = CASES[case]
    command = bf16.command("a", *data, loss_fn=loss_fn, forward_only=True)
    [got] = bf16.run(command)
    for mine, alone in zip(got.loss_fn_outputs, apart(bf16, command).loss_fn_outputs, strict=True):
        assert np.array_equal(mine["logprobs"], alone["logprobs"])


def test_only_one_adapter_one_gradient_and_one_loss_share(harness: LearnerHarness) -> None:
    for number, model_id in enumerate("ab"):
        harness.create(model_id, 8, seed=number)
    one, other = [ce(t, seed=i) for i, t in enumerate(SAMPLES[:2])], [ce(t) for t in SAMPLES[2:4]]
    sampled = [rl(t, sampled_from=PROMPT) for t in SAMPLES[:2]]
    commands = [
        harness.command("a", *one),
        harness.command("a", *other),
        harness.command("a", *one, forward_only=True),
        harness.command("a", *sampled, forward_only=True, loss_fn="ppo"),
        harness.command("b", *one),
    ]
    wants, gradients = [], {}
    for model_id in "ab":
        wants += [apart(harness, command) for command in commands if command.model_id == model_id]
        gradients[model_id] = gradient(harness, model_id)
    for got, want in zip(harness.run(*commands), wants, strict=True):
        assert_same(got, want)
        assert got.metrics["tokens_computed:sum"] == want.metrics["tokens:sum"] - PROMPT
        assert got.metrics["adapters_in_pass:max"] == 2
    for model_id in "ab":
        assert_near(gradient(harness, model_id), gradients[model_id])


def test_evaluations_of_one_adapter_share_across_requests(harness: LearnerHarness) -> None:
    harness.create("a")
    commands = [harness.command("a", ce(t), forward_only=True) for t in SAMPLES[:2]]
    wants = [apart(harness, command) for command in commands]
    first, second = harness.run(*commands)
    assert_same(first, wants[0])
    assert_same(second, wants[1])
    assert second.metrics["tokens_computed:sum"] == len(SAMPLES[1]) - PROMPT


def test_a_failing_datum_takes_its_request_and_no_more(harness: LearnerHarness) -> None:
    for number, model_id in enumerate("ab"):
        harness.create(model_id, 8, seed=number)
    bad = rl(SAMPLES[2], sampled_from=PROMPT)
    arrays = {**bad.loss_fn_inputs, "logprobs": np.full(len(SAMPLES[2]), -1e38, np.float32)}
    arrays["advantages"] = np.ones(len(SAMPLES[2]), np.float32)
    bad = Datum(model_input=bad.model_input, loss_fn_inputs=arrays)
    good = [rl(t, sampled_from=PROMPT, seed=i) for i, t in enumerate(SAMPLES[:2])]
    innocent = [
        harness.command("a", *good, loss_fn="ppo"),
        harness.command("b", *good, loss_fn="ppo"),
        harness.command("a", good[0], loss_fn="importance_sampling", forward_only=True),
    ]
    failing = [
        harness.command("a", good[1], bad, loss_fn="importance_sampling", forward_only=True),
        harness.command("a", good[0], bad, loss_fn="importance_sampling"),
    ]
    wants = [apart(harness, command) for command in innocent]
    gradients = {model_id: gradient(harness, model_id) for model_id in "ab"}
    outputs = harness.try_run(*innocent, *failing)
    for got, want in zip(outputs, wants):
        assert_same(got, want)
    for error in outputs[3:]:
        assert isinstance(error, UserError)
        assert str(error).startswith("data[1] has a loss that is not finite at position 0")
    for model_id in "ab":
        assert_near(harness.gradient(model_id), gradients[model_id])


@st.composite
def families(draw: st.DrawFn) -> list[Item]:
    """Datums over two letters, so that they have much in common, of several groups."""
    drawn = []
    for index in range(draw(st.integers(1, 12))):
        row = RowRef(rank_bucket=8, slot=draw(st.integers(0, 1)))
        gradient = draw(st.sampled_from([None, 5]))
        stem = [0] * draw(st.sampled_from([3, 20, 40])) + [1] * draw(st.sampled_from([0, 20]))
        tokens = np.array(stem + draw(st.lists(st.integers(0, 1), max_size=4)), np.int32)
        targets = index * 1000 + np.arange(len(tokens))
        inputs = {"target_tokens": targets, "weights": targets % 3}
        datum = Datum(model_input=(EncodedText(tokens=tokens),), loss_fn_inputs=inputs)
        request = (f"m{row.slot}", 0 if gradient is None else gradient)
        drawn.append(
            Item(
                part=Part(request=request, datum=index),
                datum=datum,
                loss_fn="cross_entropy",
                config={},
                row=row,
                gradient=gradient,
            )
        )
    return drawn


def group(item: Item) -> tuple[RowRef, int | None]:
    return item.row, item.gradient


@settings(max_examples=150)
@given(families())
def test_every_datum_reads_its_own_tokens(drawn: list[Item]) -> None:
    packed = pack(drawn, torch.device("cpu"))
    num_positions = len(packed.targets_PK)
    tokens_P = np.arange(num_positions) if packed.token_index_P is None else packed.token_index_P.numpy()
    assert (np.diff(tokens_P) >= 0).all()
    seen = []
    for item, positions in zip(packed.items, packed.target_positions, strict=True):
        mine = tokens_P[positions]
        tokens = item.datum.model_input[0].tokens
        assert np.array_equal(packed.tokens_T[mine], tokens)
        assert packed.positions_T[mine].tolist() == list(range(len(tokens)))
        assert np.array_equal(packed.targets_PK[positions, 0], item.datum.loss_fn_inputs["target_tokens"])
        assert np.array_equal(packed.loss_mask_P[positions], item.datum.loss_fn_inputs["weights"] != 0)
        [segment] = [s for s in packed.segments if s.start <= mine[0] < s.end]
        assert (segment.row, segment.gradient) == group(item)
        assert segment.start <= mine.min() <= mine.max() < segment.end
        seen.extend(np.arange(num_positions)[positions].tolist())
    assert sorted(seen) == list(range(num_positions))
    outputs = unpack(packed, packed.targets_PK.numpy().astype(np.float32))
    for item, output in zip(packed.items, outputs, strict=True):
        assert np.array_equal(output, item.datum.loss_fn_inputs["target_tokens"])
    # each takes all that any earlier one of its group has of it, if it is enough to be worth it
    for index, (item, prefix) in enumerate(zip(packed.items, packed.prefixes or [None] * len(packed.items))):
        earlier = [other for other in packed.items[:index] if group(other) == group(item)]
        most = max((common(item, other) for other in earlier), default=0)
        assert (0 if prefix is None else prefix.length) == (most if most >= MIN_SHARED_TOKENS else 0)
        if prefix is not None:
            parent = packed.items[prefix.parent]
            assert prefix.parent < index
            assert group(parent) == group(item)
            assert common(item, parent) == prefix.length


def common(a: Item, b: Item) -> int:
    tokens = [item.datum.model_input[0].tokens.tolist() for item in (a, b)]
    return next((i for i, (x, y) in enumerate(zip(*tokens)) if x != y), min(map(len, tokens)))
