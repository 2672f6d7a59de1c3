"""The kernels for narrow ranks against plain products, by Triton's interpreter (TRITON_INTERPRET=1) or on a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.model.forward_batch import ForwardBatch, Segment
from descant.model.fused_ops import _swiglu, fuse
from descant.model.load import ModelSource, load_model
from descant.model.lora import kernels
from descant.model.lora import products as lora_products
from descant.model.lora.batch import LoraBatch
from descant.model.lora.kernels import Sites, Tiles, TileSegment
from descant.model.lora.products import lora_linear, lora_linear_backward
from descant.model.network import join_linears
from descant.testing.learner import LearnerHarness, some_commands
from descant.testing.tiny import tiny_model
from descant.types import Lora

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, or a GPU"
)

IN = 72
SITES = tuple(
    LoraSite(name=f"layers.0.self_attn.{name}", group=group, in_features=num_in, out_features=width)
    for name, group, num_in, width in (
        ("odd", "mlp", 30, 13),  # so that nothing begins where it would by rng
        ("q_proj", "attn", IN, 136),
        ("k_proj", "attn", IN, 24),
        ("v_proj", "attn", IN, 32),
    )
)
JOINT, WIDTHS = (1, 2, 3), (136, 24, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Tokens of an adapter in ``slot`` of its class."""

    start: int
    end: int
    rank: int
    slot: int
    scale: float
    gradient: int | None


ONE_CLASS = [(0, 70, 0, 2, 4.0, 1), (70, 75, 0, 0, 2.0, None), (75, 203, 0, 3, 0.5, 0)]
WITH_GAPS = [
    (3, 73, 3, 2, 4.0, 1),
    (73, 78, 0, 0, 2.0, None),
    (80, 150, 1, 3, 0.5, 0),
    (150, 151, 2, 1, 1.5, 1),
    (151, 190, 0, 3, 0.25, 0),
]
NUM_TOKENS = 203


def ranges_of(ranks: tuple[int, ...]) -> list[TokenRange]:
    """Of one class without a gap, of several with gaps before, between and after."""
    return [
        TokenRange(start=start, end=end, rank=ranks[index], slot=slot, scale=scale, gradient=gradient)
        for start, end, index, slot, scale, gradient in (ONE_CLASS if len(ranks) == 1 else WITH_GAPS)
    ]


def tiles_of(ranges: list[TokenRange], work: dict[int, torch.Tensor], gradients: dict[int, torch.Tensor]) -> Tiles:
    segments = [
        TileSegment(
            start=own_range.start,
            end=own_range.end,
            rank=own_range.rank,
            scale=own_range.scale,
            compute=work[own_range.rank][own_range.slot].data_ptr(),
            gradient=None if own_range.gradient is None else gradients[own_range.rank][own_range.gradient].data_ptr(),
        )
        for own_range in ranges
    ]
    return kernels.make_tiles(segments, NUM_TOKENS, DEVICE)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("max_features", [None, 64])
@pytest.mark.parametrize("ranks", [(8,), (16,), (64,), (8, 16, 32, 64), (8, 16, 16, 32)], ids=str)
@pytest.mark.parametrize(("num_in", "widths"), [(136, (40,)), (72, (136, 24, 32)), (64, (128, 128))])
def test_they_equal_plain_products(
    ranks: tuple[int, ...],
    num_in: int,
    widths: tuple[int, ...],
    max_features: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if max_features is not None:  # wider outputs are then taken in parts
        monkeypatch.setattr(kernels, "MAX_FEATURES", max_features)
        monkeypatch.setattr(kernels, "SPLIT_FEATURES", max_features)
    begins = [0, *accumulate([num_in] * len(widths) + list(widths))]
    work = {rank: random(4, rank * begins[-1], seed=rank) for rank in ranks}
    before = {rank: random(2, rank * begins[-1], seed=rank + 1, dtype=torch.float32) for rank in ranks}
    gradients = {rank: slab.clone() for rank, slab in before.items()}
    sites = Sites(a_begins=tuple(begins[: len(widths)]), b_begins=tuple(begins[len(widths) : -1]), widths=widths)
    ranges = ranges_of(ranks)
    tiles = tiles_of(ranges, work, gradients)
    x, dy = random(NUM_TOKENS, num_in, seed=100), random(NUM_TOKENS, sum(widths), seed=101)

    beyond = torch.ones(NUM_TOKENS, len(widths), tiles.rank, dtype=torch.bool, device=DEVICE)
    for own_range in ranges:
        beyond[own_range.start : own_range.end, :, : own_range.rank] = False

    assert tiles.rank == max(kernels.MIN_RANK, *ranks)
    h, dh = kernels.shrink(x, tiles, sites), kernels.expand_backward(dy, tiles, sites)
    for intermediate in (h, dh):  # what lies beyond a tile's rank is never read
        intermediate.view(beyond.shape)[beyond] = torch.nan
    y, dx = kernels.expand(h, tiles, sites), kernels.shrink_backward(dh, num_in, tiles, sites)
    kernels.add_gradients(x, dy, h, dh, tiles, sites)
    want = {rank: slab.double() for rank, slab in before.items()}
    base_only = torch.ones(NUM_TOKENS, dtype=torch.bool, device=DEVICE)
    for own_range in ranges:
        own, rank, row = (
            slice(own_range.start, own_range.end),
            own_range.rank,
            work[own_range.rank][own_range.slot].double(),
        )
        base_only[own] = False
        want_dx = torch.zeros(own_range.end - own_range.start, num_in, dtype=torch.float64, device=DEVICE)
        first = 0
        for index, width in enumerate(widths):
            at, bt = rank * sites.a_begins[index], rank * sites.b_begins[index]
            out, cells = slice(first, first + width), slice(index * tiles.rank, index * tiles.rank + rank)
            a, b = row[at : at + rank * num_in].view(rank, num_in), row[bt : bt + rank * width].view(width, rank)
            h_own, dh_own = h[own, cells].double(), dh[own, cells].double()
            near(h_own, own_range.scale * x[own].double() @ a.t())
            near(y[own, out], h_own @ b.t())
            near(dh_own, own_range.scale * dy[own, out].double() @ b)
            want_dx += dh_own @ a
            if own_range.gradient is not None:
                gradient = want[rank][own_range.gradient]
                gradient[at : at + rank * num_in] += (dh_own.t() @ x[own].double()).flatten()
                gradient[bt : bt + rank * width] += (dy[own, out].double().t() @ h_own).flatten()
            first += width
        near(dx[own], want_dx)
    assert y[base_only].count_nonzero() == dx[base_only].count_nonzero() == 0
    for rank in ranks:
        near(gradients[rank], want[rank], 1e-5)


def test_tables_begin_where_the_launcher_wants_them() -> None:
    """At a multiple of 16 bytes, also spans behind an odd number of tiles."""
    rows = {8: torch.zeros(4, 64, device=DEVICE)}
    for end in (64, 65):
        own_range = TokenRange(start=0, end=end, rank=8, slot=0, scale=1.0, gradient=0)
        tiles = tiles_of([own_range], rows, rows)
        assert tiles.spans_N4.data_ptr() % 16 == 0
        assert tiles.num_own == -(-end // 64)
        assert len(tiles.tiles_C4) == tiles.num_own + -(-(NUM_TOKENS - end) // 64)


@pytest.mark.parametrize("ranks", [(8,), (8, 16, 32, 64)], ids=str)
def test_nothing_of_one_adapter_reaches_another(ranks: tuple[int, ...]) -> None:
    """All others keep their bits, whichever is full of NaN; so do tokens that have none, whatever theirs are."""
    sites, ranges = Sites(a_begins=(0,), b_begins=(64,), widths=(64,)), ranges_of(ranks)
    clean = {rank: random(4, 128 * rank, seed=rank) for rank in ranks}

    def outcome(sick: TokenRange | None) -> tuple[list[torch.Tensor], dict[TokenRange, torch.Tensor]]:
        work = {rank: slab.clone() for rank, slab in clean.items()}
        gradients = {rank: torch.zeros(2, 128 * rank, device=DEVICE) for rank in ranks}
        x, dy = random(NUM_TOKENS, 64, seed=100), random(NUM_TOKENS, 64, seed=101)
        if sick is not None:
            work[sick.rank][sick.slot] = torch.nan
            x[sick.start : sick.end] = dy[sick.start : sick.end] = torch.inf
            x[base_only] = dy[base_only] = torch.nan
        tiles = tiles_of(ranges, work, gradients)
        h, dh = kernels.shrink(x, tiles, sites), kernels.expand_backward(dy, tiles, sites)
        y, dx = kernels.expand(h, tiles, sites), kernels.shrink_backward(dh, 64, tiles, sites)
        kernels.add_gradients(x, dy, h, dh, tiles, sites)
        return [y, dx], {p: gradients[p.rank][p.gradient] for p in ranges if p.gradient is not None}

    base_only = torch.ones(NUM_TOKENS, dtype=torch.bool, device=DEVICE)
    for own_range in ranges:
        base_only[own_range.start : own_range.end] = False
    wide, rows = outcome(None)
    for sick in ranges:
        got, got_rows = outcome(sick)
        others = torch.ones_like(base_only)
        others[sick.start : sick.end] = False
        for tensor, want in zip(got, wide, strict=True):
            assert torch.equal(tensor[others], want[others])
            assert tensor[~others].isnan().all()
        for own_range, row in got_rows.items():
            assert row.isnan().all() if own_range == sick else torch.equal(row, rows[own_range])


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    tolerance = tolerance or (1e-2 if got.dtype == torch.bfloat16 or DEVICE.type == "cuda" else 1e-5)
    assert (got.double() - want).norm() <= tolerance * want.norm()


def through_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU and in float32."""
    monkeypatch.setattr(
        lora_products, "choose", lambda x_TI, widths, lora: "kernels" if lora.products == "auto" else "loop"
    )


RANKS = {"a": 4, "b": 16, "c": 16, "d": 64, "e": 20, "f": 128}


def make_bank() -> AdapterBank:
    """Adapters with weights that are zero nowhere but in the tail; ``c`` trains none of the joint sites."""
    bank = AdapterBank(SITES, device=DEVICE, dtype=DTYPE)
    for seed, (name, rank) in enumerate(RANKS.items()):
        config = Lora(rank=rank, seed=seed, train_attn=name != "c")
        bank.create(name, config)
        generator = torch.Generator().manual_seed(seed)
        parts = bank.export(bank.weights(name), config)
        parts = {key: torch.randn(part.shape, generator=generator) * 0.3 for key, part in parts.items()}
        bank.import_row(parts, config, bank.weights(name))
        bank.refresh_compute(name)
    return bank


@pytest.mark.parametrize(
    ("bounds", "chunks"),
    [
        ({"a": (0, 20), "b": (20, 50), "d": (50, 130)}, [(0, 130)]),
        ({"a": (3, 20), "b": (20, 50), "c": (50, 70), "e": (75, 90), "d": (90, 120)}, [(0, 130)]),
        ({"a": (3, 20), "b": (20, 50), "c": (50, 70), "e": (75, 90), "d": (90, 120)}, [(0, 40), (40, 95), (95, 130)]),
        ({"c": (0, 60), "b": (60, 100)}, [(0, 30), (30, 60), (60, 100)]),
        ({"a": (3, 20), "b": (25, 40), "f": (50, 90), "d": (92, 120)}, [(0, 130)]),
    ],
    ids=["classes", "gaps", "chunks", "untrained", "a class beyond"],
)
@pytest.mark.parametrize("silent", ["", "b"], ids=["all learn", "one does not"])
def test_base_and_adapters_together_equal_the_loop(
    bounds: dict[str, tuple[int, int]], chunks: list[tuple[int, int]], silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every class up to 64 in one run of all tokens, whatever lies between; the head's chunks find their adapters."""
    through_kernels(monkeypatch)
    bank, num_tokens = make_bank(), chunks[-1][1]
    segments = tuple(
        Segment(start=start, end=end, row=bank.row(name), gradient=None if name == silent else bank[name].gradient_slot)
        for name, (start, end) in bounds.items()
    )
    batch = ForwardBatch(seq_lens=(num_tokens,), segments=segments)
    weight, bias = random(sum(WIDTHS), IN, seed=1), random(sum(WIDTHS), seed=2)
    x, dy = random(num_tokens, IN, seed=3), random(num_tokens, sum(WIDTHS), seed=4)
    found = []
    for products in ("loop", "auto"):
        lora_batch = LoraBatch.of(batch, bank, products=products)  # type: ignore[arg-type]
        assert lora_batch is not None
        for name in RANKS:
            bank.gradient(name).zero_()
        ys, dxs = [], []
        for start, end in chunks:
            own = slice(start, end)
            y, saved = lora_linear(x[own], weight, bias, JOINT, WIDTHS, lora_batch, start=start)
            dx = lora_linear_backward(
                x[own], dy[own], weight, saved, JOINT, WIDTHS, lora_batch, start=start, want_dx=True
            )
            assert dx is not None
            ys.append(y)
            dxs.append(dx)
            runs = lora_batch.runs(start, end - start, "kernels")
            if "f" in bounds:
                assert [run.products for run in runs] == ["kernels", "grouped", "kernels"]
            else:
                assert [(run.start, run.end) for run in runs] == [(0, end - start)]
        found.append([torch.cat(ys), torch.cat(dxs), *(bank.gradient(name).clone() for name in RANKS)])
    for got, want in zip(found[1], found[0], strict=True):
        near(got, want.double())
    for name, gradient in zip(RANKS, found[1][2:]):
        assert bool(gradient.count_nonzero()) == (name in bounds and name not in (silent, "c")), name


BEYOND = {"a": 4, "b": 16, "c": 16, "d": 64, "e": 128}
NARROW = {"a": 4, "b": 16, "c": 32, "d": 64, "e": 1}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU, tests/gpu compares whole passes")
@pytest.mark.parametrize("ranks", [NARROW, BEYOND], ids=["narrow classes", "one beyond"])
def test_a_pass_through_them_equals_one_through_plain_products(
    ranks: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared layers, and SwiGLU over the joined output."""
    source = ModelSource(name="qwen3", directory=tiny_model("qwen3", tmp_path / "qwen3"))
    found = []
    for by_kernels in (False, True):
        model = load_model(source, device=DEVICE, dtype=torch.float32, check=False)
        if by_kernels:
            join_linears(model.network)
            fuse(model.network)
            assert any(type(module).forward is _swiglu for module in model.network.modules())
            through_kernels(monkeypatch)
        harness = LearnerHarness(model)
        for number, (name, rank) in enumerate(ranks.items()):
            harness.create(name, rank, seed=number)
        outputs = harness.run(*some_commands(harness, list(ranks)))
        losses = [output.metrics["loss:sum"] for output in outputs]
        found.append((losses, {name: harness.gradient(name) for name in ranks}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name in ranks:
        assert found[0][1][name].norm() > 0
        near(found[1][1][name], found[0][1][name], 1e-4)
