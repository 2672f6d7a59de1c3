"""LoRA A's of decode steps fused into the base's products, by Triton's interpreter (TRITON_INTERPRET=1) or on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("triton")

from descant.adapters.slots import RowRef
from descant.model import paged_batch
from descant.model.base import BaseModel
from descant.model.forward_batch import ForwardBatch
from descant.model.load import ModelSource, load_model
from descant.model.lora.fused_a import FUSED_COLUMNS, FusedLoraA
from descant.model.lora.linear import MultiLoraLinear
from descant.model.network import join_linears
from descant.testing.learner import LearnerHarness
from descant.testing.tiny import tiny_model
from descant.types import SCALE_NUMERATOR, Version

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, or a GPU"
)

DTYPES = [torch.float32] if DEVICE.type == "cpu" else [torch.float32, torch.bfloat16]
"""The interpreter multiplies bfloat16's bits."""

RANKS = {"a": 4, "b": 8, "c": 16, "d": 64}
WHO = ("a",) * 18 + (None,) * 3 + ("b",) * 5 + ("c",) * 16 + ("d",) * 2
"""Whose row each row of a step is: more than a tile of a, tiles that are not full."""

Load = Callable[..., BaseModel]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A base with fused LoRA-A columns on any device; adapters with numbers in B."""

    def make(dtype: torch.dtype = torch.float32, *, arch: str = "qwen3", ranks: dict[str, int] = RANKS) -> BaseModel:
        source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
        model = load_model(source, device=DEVICE, dtype=dtype, check=False, compile=False)
        if model.fused_lora_a is None:
            join_linears(model.network, fused_columns=FUSED_COLUMNS)
            model.fused_lora_a = FusedLoraA(model.network, model.bank)
        harness = LearnerHarness(model)
        for number, (name, rank) in enumerate(ranks.items()):
            harness.create(name, rank, seed=number, b_std=0.3)
            model.bank.publish(name, Version(model_id=name, number=1))
        return model

    return make


def fused_lora_a(model: BaseModel) -> FusedLoraA:
    assert model.fused_lora_a is not None
    return model.fused_lora_a


def pin(model: BaseModel, name: str, number: int = 1) -> RowRef:
    return model.bank.pin_version(Version(model_id=name, number=number))


def layers(model: BaseModel) -> list[tuple[MultiLoraLinear, ...]]:
    """Of the first decoder layer, those that are one product together."""
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    return [
        (attention.q_proj, attention.k_proj, attention.v_proj),  # type: ignore[union-attr]
        (attention.o_proj,),  # type: ignore[union-attr]
        (mlp.gate_proj, mlp.up_proj),  # type: ignore[union-attr]
        (mlp.down_proj,),  # type: ignore[union-attr]
    ]


def make_step(
    model: BaseModel, who: Sequence[RowRef | None], *, lora_a_fused: bool, apart: bool = False
) -> paged_batch.PagedBatch:
    """``apart``: each rank bucket's adapters in a launch of their own."""
    bank, products = model.bank, paged_batch.products(model.network)
    segments = []
    start = 0
    while start < len(who):
        end = next((n for n in range(start, len(who)) if who[n] != who[start]), len(who))
        if (row := who[start]) is not None:
            segments.append((start, end, row))
        start = end
    columns = fused_lora_a(model).columns_of({row for row in who if row is not None}) if lora_a_fused else None
    assert (columns is not None) == lora_a_fused
    origin = torch.zeros(1, dtype=model.dtype, device=DEVICE)
    adapters = []
    for max_rank in {row.rank_bucket for _, _, row in segments} if apart else (64,):
        own = [segment for segment in segments if not apart or segment[2].rank_bucket == max_rank]
        found = paged_batch.tiles(own, bank, origin, paged_batch.TILE_ROWS, columns)
        adapters.append(
            paged_batch.AdapterTiles(
                max_rank=max_rank,
                origin=origin,
                tiles_C6=torch.tensor([*found, (0,) * 6], dtype=torch.int64, device=DEVICE),
                tile_rows=paged_batch.TILE_ROWS,
                features=paged_batch.site_features(bank, products, DEVICE),
            )
        )
    return paged_batch.PagedBatch(
        attention=ForwardBatch(seq_lens=(len(who),)), adapters=tuple(adapters), lora_a_fused=lora_a_fused
    )


@torch.no_grad()
def outputs(
    model: BaseModel, together: Sequence[MultiLoraLinear], x: torch.Tensor, step: paged_batch.PagedBatch
) -> torch.Tensor:
    model.forward_context.current = step
    try:
        return torch.cat([layer(x) for layer in together], dim=1)
    finally:
        model.forward_context.current = model.forward_context.joined_outputs = None


def expected(model: BaseModel, layer: MultiLoraLinear, x: torch.Tensor, who: Sequence[RowRef | None]) -> torch.Tensor:
    """In float64, from the weights themselves; the intermediate is rounded as the trainer rounds it."""
    y = x.double() @ layer.weight.double().t()
    bank, site = model.bank, layer.site_index
    for n, row in enumerate(who):
        if row is None:
            continue
        layout, numbers = bank.layout(row.rank_bucket), bank.compute_slab(row.rank_bucket)[row.slot].double()
        a_at, b_at = layout.a_offset[site], layout.b_offset[site]
        a = numbers[a_at : a_at + row.rank_bucket * layer.site.in_features].view(row.rank_bucket, -1)
        b = numbers[b_at : b_at + layer.site.out_features * row.rank_bucket].view(-1, row.rank_bucket)
        h = (x[n].double() @ a.t()).to(x.dtype).double()
        y[n] += SCALE_NUMERATOR / bank.lora(row).rank * (h @ b.t())
    return y


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
    return bool((got.double() - want).norm() <= tolerance * want.norm())


def random(model: BaseModel, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(DEVICE, model.dtype)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("lora_a_fused", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_product_is_the_bases_and_each_rows_adapters(
    load: Load, dtype: torch.dtype, lora_a_fused: bool, apart: bool
) -> None:
    model = load(dtype)
    pins = {name: pin(model, name) for name in RANKS}
    who = [None if name is None else pins[name] for name in WHO]
    for together in layers(model):
        assert together[0].fused_WI is not None
        x = random(model, len(who), together[0].site.in_features)
        got = outputs(model, together, x, make_step(model, who, lora_a_fused=lora_a_fused, apart=apart))
        want = torch.cat([expected(model, layer, x, who) for layer in together], dim=1)
        base = torch.cat([x.double() @ layer.weight.double().t() for layer in together], dim=1)
        for name in {*WHO}:
            own = [n for n, other in enumerate(WHO) if other == name]
            assert near(got[own], want[own]), name
            assert name is None or not near(got[own], base[own]), name


def test_a_copy_is_what_is_computed_with(load: Load) -> None:
    """And not the row: it is made once, as long as the row is the same version's."""
    model = load()
    bank, row = model.bank, pin(model, "b")
    [q, k, v] = layers(model)[0]
    x, who = random(model, 8, q.site.in_features), [row] * 8
    before = outputs(model, (q, k, v), x, make_step(model, who, lora_a_fused=True))
    layout, numbers = bank.layout(row.rank_bucket), bank.compute_slab(row.rank_bucket)[row.slot]
    numbers[layout.a_offset[k.site_index]] += 100
    assert torch.equal(before, outputs(model, (q, k, v), x, make_step(model, who, lora_a_fused=True)))
    bank.unpin_version(Version(model_id="b", number=1))
    bank.release(Version(model_id="b", number=1))
    bank.publish("c", Version(model_id="c", number=2))
    bank.publish("b", Version(model_id="b", number=2))
    again = pin(model, "b", 2)
    assert again == row, "the slot has been given to somebody else"
    numbers = bank.compute_slab(row.rank_bucket)[row.slot]
    numbers[layout.a_offset[k.site_index]] += 100
    after = outputs(model, (q, k, v), x, make_step(model, who, lora_a_fused=True))
    want = torch.cat([expected(model, layer, x, who) for layer in (q, k, v)], dim=1)
    assert near(after, want)
    assert not near(after, before.double())


def test_columns_are_kept_until_there_is_no_room(load: Load) -> None:
    ranks = {**{f"n{number}": 16 for number in range(9)}, "wide": 64, "widest": 256, "small": 1}
    model = load(ranks=ranks)
    rows = {name: pin(model, name) for name in ranks}
    room = fused_lora_a(model)

    def columns(*names: str) -> list[int] | None:
        found = room.columns_of({rows[name] for name in names})
        return None if found is None else [found[rows[name]] for name in names]

    assert columns("n0", "n1") == [0, 16]
    assert columns("n2", "n1") == [32, 16], "what is there stays"
    assert columns("small") == [48]
    assert columns() == []
    assert columns("widest") is None
    assert columns(*(f"n{number}" for number in range(9))) is None
    assert columns("n0", "small") == [0, 48], "what does not fit changes nothing"
    assert columns("wide", "n0") == [56, 0]
    assert columns("n3") == [0], "no room is left: a new beginning"
    assert columns(*(f"n{number}" for number in range(8))) is not None


def test_steps_whose_adapters_change(load: Load) -> None:
    """Every set of them through the same few rows, in turn."""
    names = [f"n{number}" for number in range(12)]
    model = load(ranks=dict.fromkeys(names, 32))
    rows = [pin(model, name) for name in names]
    [o] = layers(model)[1]
    x = random(model, 8, o.site.in_features)
    for first in (0, 3, 1, 6, 8, 0):
        who = [row for row in rows[first : first + 4] for _ in range(2)]
        got = outputs(model, (o,), x, make_step(model, who, lora_a_fused=True))
        assert near(got, expected(model, o, x, who)), first


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_adapters_nan_reaches_no_other(load: Load, dtype: torch.dtype) -> None:
    """Neither in a step beside it, nor when it has left its numbers behind."""
    model = load(dtype)
    pins = {name: pin(model, name) for name in RANKS}
    who = [None if name is None else pins[name] for name in WHO]
    step = make_step(model, who, lora_a_fused=True)
    before = [outputs(model, t, random(model, len(who), t[0].site.in_features), step) for t in layers(model)]
    model.bank.compute_slab(16)[model.bank["c"].compute_slot].fill_(torch.nan)
    model.bank.publish("c", Version(model_id="c", number=2))
    who = [pin(model, "c", 2) if name == "c" else row for name, row in zip(WHO, who, strict=True)]
    sane = [n for n, name in enumerate(WHO) if name != "c"]
    for together, want in zip(layers(model), before, strict=True):
        x = random(model, len(who), together[0].site.in_features)
        got = outputs(model, together, x, make_step(model, who, lora_a_fused=True))
        assert torch.equal(got[sane], want[sane])
        assert got[[n for n, name in enumerate(WHO) if name == "c"]].isnan().all()
        alone = outputs(model, together, x, make_step(model, [pins["a"]] * len(who), lora_a_fused=True))
        assert alone.isfinite().all()


@pytest.mark.parametrize("arch", ["qwen3", "gpt_neox"])
def test_the_weights_stay_as_they_are(load: Load, tmp_path: Path, arch: str) -> None:
    """For whoever reads them; layers with a bias get no fused columns."""
    model = load(arch=arch)
    spared = load_model(
        ModelSource(name=arch, directory=tmp_path / arch), device=DEVICE, dtype=torch.float32, check=False
    )
    plain = dict(spared.network.named_parameters())
    for name, parameter in model.network.named_parameters():
        assert torch.equal(parameter, plain[name])
    linears = [m for m in model.network.modules() if isinstance(m, MultiLoraLinear)]
    assert {linear.fused_WI is None for linear in linears} == {arch == "gpt_neox"}
    rows = {pin(model, name) for name in RANKS}
    assert (fused_lora_a(model).columns_of(rows) is None) == (arch == "gpt_neox")
    for linear in linears:
        assert linear.weight_OI.is_contiguous()


def test_one_program_serves_all_steps(load: Load) -> None:
    """Compiled layers know how far apart the outcome's rows are, which is always as far."""
    model = load()
    pins = {name: pin(model, name) for name in RANKS}
    [o] = layers(model)[1]
    steps = [make_step(model, [None] * 9, lora_a_fused=False)]
    steps += [
        make_step(model, [pins["a"]] * 5 + [pins["c"]] * 6, lora_a_fused=lora_a_fused) for lora_a_fused in (False, True)
    ]

    def layer(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = o(x) + 1
        return y

    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    before = counters["stats"]["unique_graphs"]
    for step, rows in zip(steps, (9, 11, 11), strict=True):
        x = random(model, rows, o.site.in_features)
        model.forward_context.current = step
        with torch.no_grad():
            plain = o(x)
            assert plain.stride() == (o.site.out_features + FUSED_COLUMNS, 1)
            assert torch.equal(compiled(x), plain + 1)
    assert counters["stats"]["unique_graphs"] == before + 1
