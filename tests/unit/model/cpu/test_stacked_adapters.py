"""Stacked adapters: the bits of their own products, no numbers at another's row, copies that are never stale."""

from __future__ import annotations

import pytest
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.adapters.slots import RowRef
from descant.model.cpu import prepacked
from descant.model.cpu.stacked_adapters import (
    KEPT_STEPS,
    STEPS_BEFORE_PREPACKING,
    WASTEFUL_STEPS,
    WIDTHS,
    Product,
    StackedAdapters,
)
from descant.model.forward_batch import MIN_ROWS, ForwardBatch, Segment
from descant.model.lora.batch import LoraBatch
from descant.model.lora.products import lora_forward
from descant.types import Lora, Version

BFLOAT16 = pytest.param(
    torch.bfloat16,
    id="bfloat16",
    marks=pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        reason="needs bf16 in hardware, without AMX (see test_prepacked)",
    ),
)


@pytest.fixture(params=[BFLOAT16, pytest.param(torch.float32, id="float32")])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


SIZES = {"q": (64, 96), "k": (64, 32), "gate": (64, 160), "up": (64, 160), "down": (2048, 64)}
"""A row alone has other sums from some 1,500 input features on."""
PRODUCTS = (
    Product(in_features=64, outputs=((0, 1),), widths=(96, 32)),
    Product(in_features=64, outputs=((2,), (3,)), widths=(160, 160)),
    Product(in_features=2048, outputs=((4,),), widths=(64,)),
)


class Shelf:
    def __init__(self, dtype: torch.dtype, **options: int) -> None:
        sites = [
            LoraSite(name=name, group="attn" if name in "qk" else "mlp", in_features=i, out_features=o)
            for name, (i, o) in SIZES.items()
        ]
        self.bank = AdapterBank(sites, device=torch.device("cpu"), dtype=dtype)
        self.stacked = StackedAdapters(self.bank, PRODUCTS, **options)
        self._numbers = 0

    def row(self, rank: int = 8, *, fill: float | None = None, **flags: bool) -> RowRef:
        self._numbers += 1
        name, version = f"m{self._numbers}", Version(model_id=f"m{self._numbers}", number=1)
        lora = Lora(rank=rank, seed=self._numbers, **flags)
        self.bank.create(name, lora)
        tensors = self.bank.export(self.bank.weights(name), lora)
        generator = torch.Generator().manual_seed(self._numbers)
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
            if fill is not None:
                tensor.fill_(fill)
        self.bank.import_row(tensors, lora, self.bank.weights(name))
        self.bank.refresh_compute(name)
        self.bank.publish(name, version)
        self.bank.delete(name)
        return self.bank.pin_version(version)

    def drop(self, number: int) -> None:
        version = Version(model_id=f"m{number}", number=1)
        self.bank.unpin_version(version)
        self.bank.release(version)

    def check(self, rows: list[RowRef | None], *, ignored: tuple[RowRef, ...] = ()) -> None:
        """One step, compared with each row's own products among 8 rows of its adapter."""
        step = self.stacked.step(rows)
        assert step is not None
        generator = torch.Generator().manual_seed(7)
        wanted = torch.tensor([row not in ignored for row in rows])
        for product in PRODUCTS:
            x = torch.randn(len(rows), product.in_features, generator=generator).to(self.bank.dtype)
            expected = torch.zeros(len(rows), sum(product.widths), dtype=self.bank.dtype)
            for index, row in enumerate(rows):
                if row is None:
                    continue
                many_x, many_y = x[index].repeat(MIN_ROWS, 1), torch.zeros_like(expected[:1]).repeat(MIN_ROWS, 1)
                lora = LoraBatch.of(
                    ForwardBatch(seq_lens=(MIN_ROWS,), segments=(Segment(start=0, end=MIN_ROWS, row=row),)), self.bank
                )
                assert lora is not None
                lora_forward(many_x, many_y.split(list(product.widths), dim=1), product.sites, lora)
                expected[index] = many_y[0]
            got = step.addition(x, product)
            if got is None:
                got = torch.zeros_like(expected)
            assert got[wanted].isfinite().all()
            base_only = step.base_only(product)
            assert torch.equal(
                torch.zeros(len(rows), 1) if base_only is None else base_only.float(),
                (expected == 0).all(1, keepdim=True).float(),
            )
            assert torch.equal(got[wanted], expected[wanted])

    @property
    def num_stacked(self) -> int:
        return sum(len(stack.columns) for stack in self.stacked._stacks)

    @property
    def widths(self) -> list[int]:
        return [stack.num_columns for stack in self.stacked._stacks]


def test_of_any_number_rank_and_order(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows = sorted([shelf.row(8), shelf.row(16, train_mlp=False), shelf.row(16), shelf.row(4), shelf.row(64)])
    for mix in ([*rows, None, None, None], [rows[0]] * 9, [None, rows[1], rows[3], rows[4], None, None, None, None]):
        for _ in range(STEPS_BEFORE_PREPACKING + 1):  # plain, then prepacked
            shelf.check(mix)
    assert (shelf.widths, shelf.num_stacked) == ([128], 5)
    many = [shelf.row(16) for _ in range(20)]
    mixed = [*many[10:], *many[:10]]  # rows of more than one stack, in any order
    for _ in range(STEPS_BEFORE_PREPACKING + 1):
        shelf.check(list(mixed))
    assert shelf.widths == [256, 192]


def test_one_of_another_rank_fills_a_gap(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows: list[RowRef] = []
    for rank in (8, 32, 16, 8):
        rows.append(shelf.row(rank))
        shelf.check([*rows, *[None] * 4])
    assert (shelf.widths, shelf.num_stacked) == ([64], 4)


def test_a_row_that_is_given_to_another_is_not_served_from_a_copy(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows: list[RowRef | None] = [shelf.row(), shelf.row(train_attn=False), *[None] * 6]
    for _ in range(STEPS_BEFORE_PREPACKING + 1):
        shelf.check(rows)
    for number, flags in enumerate(({"train_attn": False}, {"train_mlp": False}, {}), 2):
        shelf.drop(number)
        assert shelf.row(**flags) == rows[1], "the lowest free slot is taken again"
        shelf.check(rows)
    assert (shelf.widths, shelf.num_stacked) == ([16], 2)


def test_one_that_comes_leaves_the_others_where_they_are(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows: list[RowRef | None] = [shelf.row(), shelf.row(), *[None] * 6]
    shelf.check(rows)
    [before] = [dict(stack.columns) for stack in shelf.stacked._stacks]
    rows = sorted([*rows[:2], shelf.row(16), shelf.row()]) + [None] * 4  # type: ignore[type-var]
    shelf.check(rows)
    [after] = [stack.columns for stack in shelf.stacked._stacks]
    assert before.items() <= after.items()
    assert after.keys() == set(rows) - {None}


def test_columns_of_one_that_left_are_taken(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    first, second, third = (shelf.row() for _ in range(3))
    shelf.check([first, second, *[None] * 6])
    for _ in range(KEPT_STEPS):
        shelf.check([first, *[None] * 7])
    shelf.check([first, third, *[None] * 6])
    assert (shelf.widths, shelf.num_stacked) == ([16], 2)
    shelf.check([first, second, third, *[None] * 5])  # a step ago: the stack grows
    assert (shelf.widths, shelf.num_stacked) == ([32], 3)


def test_one_that_comes_to_a_prepacked_stack_is_in_it(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows = [shelf.row(), shelf.row(16)]
    for _ in range(STEPS_BEFORE_PREPACKING):
        shelf.check([*rows, *[None] * 6])
    assert shelf.stacked._stacks[0].prepacked is not None
    rows.append(shelf.row())
    shelf.check([*rows, *[None] * 5])
    assert (shelf.stacked._stacks[0].prepacked, shelf.num_stacked) == (None, 3)


def test_stacks_that_are_mostly_of_others_are_made_anew(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows = [shelf.row(64) for _ in range(8)]
    shelf.check([*rows])
    assert shelf.widths == [256, 256]
    few = [rows[0], rows[7]]
    for _ in range(WASTEFUL_STEPS):
        shelf.check([*few, *[None] * 6])
    assert (shelf.widths, shelf.num_stacked) == ([128], 2)


def test_what_nobody_uses_leaves_no_stack(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    for _ in range(8 * KEPT_STEPS):
        shelf.check([shelf.row(), *[None] * 7])
    assert len(shelf.stacked._stacks) == 1
    assert shelf.widths[0] <= WIDTHS[2]
    assert len(shelf.stacked._generations) <= shelf.widths[0] // 8


def test_some_rows_of_a_step(dtype: torch.dtype) -> None:
    """What the head computes."""
    shelf = Shelf(dtype)
    rows = [shelf.row(), shelf.row(16), shelf.row(12)]  # the last in no stack
    every = [row for row in rows for _ in range(6)]
    step = shelf.stacked.step(every)
    assert step is not None
    some = [0, 5, 6, 7, 11, 12, 13, 14, 17]
    part = shelf.stacked.among([every[n] for n in some])
    for product in PRODUCTS:
        x = torch.randn(len(every), product.in_features).to(dtype)
        whole, own = step.addition(x, product), part.addition(x[some], product)
        assert whole is not None
        assert own is not None
        assert torch.equal(whole[some], own)


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, 3e38])
def test_numbers_that_are_not_finite_stay_with_their_owner(fill: float, dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    good, bad, other = sorted([shelf.row(), shelf.row(fill=fill), shelf.row()])
    for _ in range(STEPS_BEFORE_PREPACKING + 1):
        shelf.check([good, bad, bad, other, *[None] * 4], ignored=(bad,))
    assert shelf.num_stacked == 2


def test_intermediates_that_overflow_stay_with_their_owner(dtype: torch.dtype) -> None:
    """Finite weights, but their products are not."""
    shelf = Shelf(dtype)
    good, loud, other = sorted([shelf.row(), shelf.row(fill=1e37), shelf.row()])
    for _ in range(STEPS_BEFORE_PREPACKING + 1):
        shelf.check([good, loud, loud, other, *[None] * 4], ignored=(loud,))
    assert shelf.num_stacked == 3


def test_a_scale_that_would_round_is_not_stacked(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows = sorted([shelf.row(12), shelf.row(16)])
    for _ in range(STEPS_BEFORE_PREPACKING + 1):
        shelf.check([*rows, *[None] * 6])
    assert shelf.num_stacked == 1


def test_other_bits_are_found_out(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows: list[RowRef | None] = [shelf.row(), *[None] * 7]
    plain = prepacked.linear
    monkeypatch.setattr(prepacked, "linear", lambda x, w, bias: plain(x, w, bias) * 1.01)
    for _ in range(STEPS_BEFORE_PREPACKING + 1):
        shelf.check(rows)
    assert shelf.num_stacked == 0


def test_no_more_than_there_is_room_for(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype, max_bytes=1000)
    row = shelf.row()
    for _ in range(STEPS_BEFORE_PREPACKING + 1):
        shelf.check([row, *[None] * 7])
    assert shelf.num_stacked == 0


def test_room_is_made_by_what_is_not_used(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    shelf.check([shelf.row(256), *[None] * 7])
    other = Shelf(dtype, max_bytes=shelf.stacked._num_bytes(256))
    first, second = other.row(256), other.row(256)
    for row, most in ((first, 1), (second, 0)):  # no second copy, and no room for another
        other.check([row, *[None] * 7])
        assert (row in other.stacked._stacks[0].columns) == bool(most)
    for _ in range(KEPT_STEPS):
        other.check([second, *[None] * 7])
    other.drop(2)
    assert other.row(256) == second
    other.check([second, *[None] * 7])
    assert list(other.stacked._stacks[0].columns) == [second]
