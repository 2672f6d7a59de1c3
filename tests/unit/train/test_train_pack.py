"""Packing: who owns which tokens, and that everything finds its way back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.adapters.slots import RowRef
from descant.model.forward_batch import Segment
from descant.train.pack import Item, PositionLoss, pack, unpack
from descant.train.runner import Part
from descant.types import LOSS_FN_INPUTS, Datum, EncodedText

CPU = torch.device("cpu")
NO_CONFIG: Mapping[str, float] = {}


def item(
    request: tuple[str, int],
    index: int,
    tokens: list[int],
    row: RowRef,
    gradient: int | None,
    loss_fn: str = "cross_entropy",
    config: Mapping[str, float] = NO_CONFIG,
    **arrays: object,
) -> Item:
    datum = Datum(
        model_input=(EncodedText(tokens=np.array(tokens, np.int32)),),
        loss_fn_inputs={name: np.asarray(array) for name, array in arrays.items()},
    )
    return Item(
        part=Part(request=request, datum=index), datum=datum, loss_fn=loss_fn, config=config, row=row, gradient=gradient
    )


def test_sorted_by_adapter_then_request() -> None:
    small, large = RowRef(rank_bucket=8, slot=1), RowRef(rank_bucket=32, slot=0)
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    rl = {"logprobs": [-0.5, -0.25], "advantages": [0, 1]}
    packed = pack(
        [
            item(("b", 1), 0, [1, 2], large, 0, "ppo", clip, target_tokens=[2, 3], **rl),
            item(("a", 2), 0, [4], small, None, target_tokens=[5]),
            item(("a", 1), 1, [6, 7, 8], small, 3, target_tokens=[[1, 2], [3, 4], [5, 6]], weights=[[1, 0]] * 3),
            item(("a", 1), 0, [9], small, 3, target_tokens=[1], weights=[0.5]),
        ],
        CPU,
    )
    assert [it.part for it in packed.items] == [
        Part(request=("a", 1), datum=1),
        Part(request=("a", 1), datum=0),
        Part(request=("a", 2), datum=0),
        Part(request=("b", 1), datum=0),
    ]
    assert packed.seq_lens == (3, 1, 1, 2)
    assert packed.segments == (
        Segment(start=0, end=4, row=small, gradient=3),
        Segment(start=4, end=5, row=small, gradient=None),
        Segment(start=5, end=7, row=large, gradient=0),
    )
    assert packed.losses == (
        PositionLoss(backward=True, loss_fn="cross_entropy", config={}),
        PositionLoss(backward=False, loss_fn="cross_entropy", config={}),
        PositionLoss(backward=True, loss_fn="ppo", config=clip),
    )
    assert packed.losses_P.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert packed.device_losses_P is not None
    assert packed.device_losses_P.tolist() == packed.losses_P.tolist()
    assert packed.loss_mask_P.tolist() == [True] * 5 + [False, True]
    assert packed.tokens_T.tolist() == [6, 7, 8, 9, 4, 1, 2]
    assert packed.positions_T.tolist() == [0, 1, 2, 0, 0, 0, 1]
    assert packed.targets_PK.tolist() == [[1, 2], [3, 4], [5, 6], [1, 0], [5, 0], [2, 0], [3, 0]]
    assert packed.weights_PK.tolist() == [[1, 0], [1, 0], [1, 0], [0.5, 0], [1, 0], [0, 0], [0, 0]]
    assert packed.logprobs_P.tolist() == [0, 0, 0, 0, 0, -0.5, -0.25]
    assert packed.advantages_P.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert packed.tokens_T.dtype == packed.positions_T.dtype == packed.targets_PK.dtype == torch.int64
    assert packed.weights_PK.dtype == packed.logprobs_P.dtype == packed.advantages_P.dtype == torch.float32


def test_one_loss_with_two_configs_is_two_losses() -> None:
    rows = [RowRef(rank_bucket=8, slot=slot) for slot in range(4)]
    betas = [0.05, 0.05, 0.1, 0.05]
    packed = pack(
        [
            item(
                (f"m{i}", 1), 0, [1], row, i, "dro", {"beta": beta}, target_tokens=[1], logprobs=[0.0], advantages=[1.0]
            )
            for i, (row, beta) in enumerate(zip(rows, betas))
        ],
        CPU,
    )
    assert [loss.config["beta"] for loss in packed.losses] == [0.05, 0.1]
    assert packed.losses_P.tolist() == [0, 0, 1, 0]


@st.composite
def items(draw: st.DrawFn) -> list[Item]:
    drawn = []
    for model in range(draw(st.integers(1, 4))):
        row = RowRef(rank_bucket=draw(st.sampled_from([8, 16])), slot=model)
        for seq_id in range(draw(st.integers(1, 2))):
            loss_fn = draw(st.sampled_from(["cross_entropy", "importance_sampling"]))
            gradient = draw(st.sampled_from([None, 10 * model + seq_id]))
            for index in range(draw(st.integers(1, 3))):
                length = draw(st.integers(1, 5))
                width = draw(st.sampled_from([None, 1, 2, 3])) if loss_fn == "cross_entropy" else None
                shape = (length,) if width is None else (length, width)
                arrays = {name: np.full(shape, len(drawn)) for name in LOSS_FN_INPUTS[loss_fn]}
                tokens = [len(drawn)] * length
                drawn.append(item((f"m{model}", seq_id), index, tokens, row, gradient, loss_fn, {}, **arrays))
    return draw(st.permutations(drawn))


@settings(max_examples=100)
@given(items())
def test_everything_finds_its_way_back(given_items: list[Item]) -> None:
    packed = pack(given_items, CPU)
    assert sum(packed.seq_lens) == len(packed.tokens_T)
    # stream values that say where they come from: datum's own number, and K in the fraction
    width = packed.targets_PK.shape[1]
    logprobs_PK = packed.tokens_T.numpy()[:, None] + np.arange(width) / 8
    for it, logprobs in zip(packed.items, unpack(packed, logprobs_PK.astype(np.float32)), strict=True):
        targets = it.datum.loss_fn_inputs["target_tokens"]
        assert logprobs.shape == targets.shape
        assert logprobs.dtype == np.float32
        assert not np.shares_memory(logprobs, logprobs_PK)
        number = it.datum.model_input[0].tokens[0]
        assert (logprobs == (number if targets.ndim == 1 else number + np.arange(targets.shape[1]) / 8)).all()
    # segments cover the stream, rising, each with one row and one gradient; requests of one row never share a gradient
    assert [segment.start for segment in packed.segments] == [0, *[segment.end for segment in packed.segments[:-1]]]
    assert packed.segments[-1].end == len(packed.tokens_T)
    assert [segment.row for segment in packed.segments] == sorted(segment.row for segment in packed.segments)
    owners = np.repeat(np.arange(len(packed.items)), packed.seq_lens)
    for segment in packed.segments:
        for owner in set(owners[segment.start : segment.end]):
            assert packed.items[owner].row == segment.row
            assert packed.items[owner].gradient == segment.gradient
    losses = [(packed.losses[number].loss_fn, packed.losses[number].backward) for number in packed.losses_P]
    assert losses == [(packed.items[owner].loss_fn, packed.items[owner].gradient is not None) for owner in owners]
