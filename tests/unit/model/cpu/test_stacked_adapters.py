"""Stacked adapters: the bits of their own products, no numbers at another's row, copies that are never stale."""

from __future__ import annotations

import pytest
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.adapters.slots import RowRef
from descant.model.cpu import prepacked
from descant.model.cpu.stacked_adapters import MAX_STACKS, STEPS_BEFORE_STACKING, Product, StackedAdapters
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
        return sum(len(stack.indices) for stack in self.stacked._stacks)


def test_of_any_number_rank_and_order(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows = sorted([shelf.row(8), shelf.row(16, train_mlp=False), shelf.row(16), shelf.row(4), shelf.row(64)])
    for mix in ([*rows, None, None, None], [rows[0]] * 9, [None, rows[1], rows[3], rows[4], None, None, None, None]):
        for _ in range(STEPS_BEFORE_STACKING + 1):
            shelf.check(mix)
    many = sorted(shelf.row(16) for _ in range(20))  # more than one stack
    for _ in range(STEPS_BEFORE_STACKING + 1):
        shelf.check(list(many))
    own = [stack for stack in shelf.stacked._stacks if stack.indices.keys() & set(many)]
    assert [len(stack.indices) for stack in own] == [16, 4]


def test_stacked_only_when_they_come_up_again(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows = [shelf.row() for _ in range(MIN_ROWS)]
    for number in range(1, STEPS_BEFORE_STACKING + 1):
        shelf.check(list(rows))
        assert shelf.num_stacked == (MIN_ROWS if number == STEPS_BEFORE_STACKING else 0)
    fewer = [rows[0], *rows[:4], *[None] * 3]
    shelf.check(fewer)
    assert shelf.num_stacked == MIN_ROWS, "half of them still use it"
    for _ in range(STEPS_BEFORE_STACKING):
        shelf.check([rows[5], *[None] * 7])
    assert shelf.num_stacked == 1


def test_a_row_that_is_given_to_another_is_not_served_from_a_copy(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows: list[RowRef | None] = [shelf.row(), shelf.row(), *[None] * 6]
    for _ in range(STEPS_BEFORE_STACKING):
        shelf.check(rows)
    shelf.drop(1)
    assert shelf.row() == rows[0], "the lowest free slot is taken again"
    assert shelf.num_stacked == 2
    for _ in range(STEPS_BEFORE_STACKING):
        shelf.check(rows)


def test_one_that_comes_leaves_the_others_stack_as_it_is(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows: list[RowRef | None] = [shelf.row(), shelf.row(), *[None] * 6]
    for _ in range(STEPS_BEFORE_STACKING):
        shelf.check(rows)
    [first] = shelf.stacked._stacks
    rows = sorted([*rows[:2], shelf.row(16), shelf.row()]) + [None] * 4  # type: ignore[type-var]
    for number in range(1, STEPS_BEFORE_STACKING + 1):
        shelf.check(rows)
        assert len(shelf.stacked._stacks) == (3 if number == STEPS_BEFORE_STACKING else 1)
    assert shelf.stacked._stacks[0] is first
    assert shelf.num_stacked == 4


def test_one_that_changes_leaves_the_others_stack_as_it_is(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows: list[RowRef | None] = [shelf.row(), shelf.row(), shelf.row(), *[None] * 5]
    for _ in range(STEPS_BEFORE_STACKING):
        shelf.check(rows)
    [first] = shelf.stacked._stacks
    shelf.drop(2)
    assert shelf.row() == rows[1]
    shelf.check(rows)
    assert list(first.indices) == [rows[0], rows[2]], "its place in the stack is nobody's"
    for _ in range(STEPS_BEFORE_STACKING):
        shelf.check(rows)
    assert [list(stack.indices) for stack in shelf.stacked._stacks] == [[rows[0], rows[2]], [rows[1]]]


def test_many_stacks_become_one(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows: list[RowRef] = []
    for _ in range(MAX_STACKS + 1):
        rows.append(shelf.row())
        for _ in range(STEPS_BEFORE_STACKING):
            shelf.check([*rows, *[None] * max(0, MIN_ROWS - len(rows))])
    assert len(shelf.stacked._stacks) == MAX_STACKS + 1
    for _ in range(STEPS_BEFORE_STACKING):
        shelf.check([rows[0], *rows])
    assert [list(stack.indices) for stack in shelf.stacked._stacks] == [rows]


def test_what_nobody_uses_is_dropped_in_the_end(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    for _ in range(4 * MAX_STACKS):
        row = shelf.row()
        for _ in range(STEPS_BEFORE_STACKING):
            shelf.check([row, *[None] * 7])
        assert len(shelf.stacked._stacks) <= 2 * MAX_STACKS
    assert len(shelf.stacked._generations) <= 2 * MAX_STACKS


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, 3e38])
def test_numbers_that_are_not_finite_stay_with_their_owner(fill: float, dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    good, bad, other = sorted([shelf.row(), shelf.row(fill=fill), shelf.row()])
    for _ in range(STEPS_BEFORE_STACKING + 1):
        shelf.check([good, bad, bad, other, *[None] * 4], ignored=(bad,))
    assert shelf.num_stacked == 2


def test_intermediates_that_overflow_stay_with_their_owner(dtype: torch.dtype) -> None:
    """Finite weights, but their products are not."""
    shelf = Shelf(dtype)
    good, loud, other = sorted([shelf.row(), shelf.row(fill=1e37), shelf.row()])
    for _ in range(STEPS_BEFORE_STACKING + 1):
        shelf.check([good, loud, loud, other, *[None] * 4], ignored=(loud,))
    assert shelf.num_stacked == 3


def test_a_scale_that_would_round_is_not_stacked(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows = sorted([shelf.row(12), shelf.row(16)])
    for _ in range(STEPS_BEFORE_STACKING + 1):
        shelf.check([*rows, *[None] * 6])
    assert shelf.num_stacked == 1


def test_other_bits_are_found_out(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    shelf = Shelf(dtype)
    rows: list[RowRef | None] = [shelf.row(), *[None] * 7]
    plain = prepacked.linear
    monkeypatch.setattr(prepacked, "linear", lambda x, w, bias: plain(x, w, bias) * 1.01)
    for _ in range(STEPS_BEFORE_STACKING + 1):
        shelf.check(rows)
    assert shelf.num_stacked == 0


def test_no_more_than_there_is_room_for(dtype: torch.dtype) -> None:
    shelf = Shelf(dtype, max_bytes=1000)
    row = shelf.row()
    for _ in range(STEPS_BEFORE_STACKING + 1):
        shelf.check([row, *[None] * 7])
    assert shelf.num_stacked == 0
