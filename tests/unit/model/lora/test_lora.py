"""The packed products against plain autograd over dense float64 weights, one adapter at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.errors import ServerError
from descant.model import paged_batch
from descant.model.forward_batch import ForwardBatch, Segment
from descant.model.lora.batch import LoraBatch
from descant.model.lora.linear import ForwardContext, MultiLoraLinear
from descant.model.lora.products import choose, lora_add, lora_forward
from descant.types import Lora

torch.set_num_threads(1)

IN, OUT, TOKENS = 24, 40, 60
SITES = (
    LoraSite(name="layers.0.q_proj", group="attn", in_features=IN, out_features=OUT),
    LoraSite(name="layers.0.down_proj", group="mlp", in_features=OUT, out_features=IN),
)
RANKS = (1, 4, 8, 16, 32, 64, 256)


def make_bank(dtype: torch.dtype = torch.float32, ranks: Sequence[int] = RANKS, **flags: bool) -> AdapterBank:
    """One adapter a rank, ``m0``, ``m1`` …, with weights that are zero nowhere but in the tail."""
    bank = AdapterBank(SITES, device=torch.device("cpu"), dtype=dtype)
    for index, rank in enumerate(ranks):
        bank.create(f"m{index}", Lora(rank=rank, seed=index, **flags))
        randomise(bank, f"m{index}", seed=index)
    return bank


def randomise(bank: AdapterBank, model_id: str, seed: int) -> None:
    lora = bank[model_id].lora
    generator = torch.Generator().manual_seed(seed)
    parts = bank.export(bank.weights(model_id), lora)
    random = {name: torch.randn(part.shape, generator=generator) * 0.3 for name, part in parts.items()}
    bank.import_row(random, lora, bank.weights(model_id))
    bank.refresh_compute(model_id)


def make_layers(dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, ForwardContext]:
    torch.manual_seed(1)
    forward_context = ForwardContext()
    bases = [nn.Linear(IN, OUT), nn.Linear(OUT, IN, bias=False)]
    layers = [
        MultiLoraLinear(base.to(dtype).requires_grad_(False), index, site, forward_context)
        for index, (base, site) in enumerate(zip(bases, SITES, strict=True))
    ]
    return nn.Sequential(layers[0], nn.SiLU(), layers[1]), forward_context


def segment(bank: AdapterBank, model_id: str, start: int, end: int, gradient: int | None = -1) -> Segment:
    """``gradient`` -1: the adapter's own row."""
    own = bank[model_id].gradient_slot
    return Segment(start=start, end=end, row=bank.row(model_id), gradient=own if gradient == -1 else gradient)


def mixed_batch(bank: AdapterBank) -> ForwardBatch:
    """All ranks, tokens without an adapter before, between and after, and segments of one token."""
    bounds = [(2, 10), (12, 13), (13, 20), (25, 33), (33, 40), (40, 47), (47, 56)]
    return ForwardBatch(
        seq_lens=(TOKENS,), segments=tuple(segment(bank, f"m{i}", lo, hi) for i, (lo, hi) in enumerate(bounds))
    )


class Dense:
    """The reference: every segment by itself, float64, ordinary modules and autograd."""

    def __init__(self, bank: AdapterBank, layers: nn.Sequential, batch: ForwardBatch, owners: Sequence[str]):
        self.layers, self.batch, self.owners = layers, batch, owners
        self.parts = [
            {name: part.double().requires_grad_() for name, part in bank.export(bank.weights(m), bank[m].lora).items()}
            for m in owners
        ]
        self.scales = [32 / bank[m].lora.rank for m in owners]

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = x_TI
        for layer in self.layers:
            if not isinstance(layer, MultiLoraLinear):
                y_TO = layer(y_TO)
                continue
            bias = None if layer.bias is None else layer.bias.double()
            pieces, end = [], 0
            base_TO = F.linear(y_TO, layer.weight_OI.double(), bias)
            for part, scale, seg in zip(self.parts, self.scales, self.batch.segments, strict=True):
                pieces.append(base_TO[end : seg.start])
                end = seg.end
                a = part.get(f"base_model.model.{layer.site.name}.lora_A.weight")
                b = part.get(f"base_model.model.{layer.site.name}.lora_B.weight")
                piece = base_TO[seg.start : seg.end]
                pieces.append(piece if a is None else piece + scale * (y_TO[seg.start : seg.end] @ a.T @ b.T))
            y_TO = torch.cat([*pieces, base_TO[end:]])
        return y_TO


def run(
    layers: nn.Sequential, forward_context: ForwardContext, lora: LoraBatch | None, x_TI: torch.Tensor
) -> torch.Tensor:
    forward_context.current = lora
    try:
        return layers(x_TI[None])[0]
    finally:
        forward_context.current = None


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str = "") -> None:
    difference = (got.double() - want.double()).abs().max().item()
    assert difference <= tolerance * max(want.abs().max().item(), 1e-6), f"{what}: {difference}"


@pytest.mark.parametrize("products", ["loop", "grouped"])
@pytest.mark.parametrize("wants_dx", [True, False])
def test_outputs_and_gradients_equal_autograd(products: str, wants_dx: bool) -> None:
    bank, (layers, forward_context) = make_bank(), make_layers()
    batch, owners = mixed_batch(bank), [f"m{i}" for i in range(len(RANKS))]
    x = torch.randn(TOKENS, IN).requires_grad_(wants_dx)
    dy = torch.randn(TOKENS, IN)

    y = run(layers, forward_context, LoraBatch.of(batch, bank, products=products), x)  # type: ignore[arg-type]
    y.backward(dy)

    dense, x64 = Dense(bank, layers, batch, owners), x.detach().double().requires_grad_()
    want = dense(x64)
    want.backward(dy.double())
    assert_close(y.detach(), want.detach(), 1e-5, "y")
    if wants_dx:
        assert_close(x.grad, x64.grad, 1e-5, "dX")
    for owner, part in zip(owners, dense.parts, strict=True):
        got = bank.export(bank.gradient(owner), bank[owner].lora)
        for name, leaf in part.items():
            assert_close(got[name], leaf.grad, 2e-5, f"{owner} {name}")


@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_bf16_gradients_are_near_autograd_in_float64(products: str) -> None:
    bank, (layers, forward_context) = make_bank(torch.bfloat16), make_layers(torch.bfloat16)
    batch, owners = mixed_batch(bank), [f"m{i}" for i in range(len(RANKS))]
    x, dy = torch.randn(TOKENS, IN).bfloat16(), torch.randn(TOKENS, IN).bfloat16()
    run(layers, forward_context, LoraBatch.of(batch, bank, products=products), x).backward(dy)  # type: ignore[arg-type]
    dense = Dense(bank, layers, batch, owners)
    dense(x.double()).backward(dy.double())
    for owner, part in zip(owners, dense.parts, strict=True):
        got = bank.export(bank.gradient(owner), bank[owner].lora)
        for name, leaf in part.items():
            assert (got[name] - leaf.grad).norm() <= 0.03 * leaf.grad.norm(), f"{owner} {name}"


@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_padding_of_rank_bucketes_stays_exactly_zero(products: str) -> None:
    bank, (layers, forward_context) = make_bank(ranks=(1, 4, 5, 9, 33)), make_layers()
    bounds = [(0, 9), (9, 17), (17, 30), (30, 44), (44, 60)]
    segments = tuple(segment(bank, f"m{i}", lo, hi) for i, (lo, hi) in enumerate(bounds))
    lora = LoraBatch.of(ForwardBatch(seq_lens=(TOKENS,), segments=segments), bank, products=products)  # type: ignore[arg-type]
    run(layers, forward_context, lora, torch.randn(TOKENS, IN)).backward(torch.randn(TOKENS, IN))
    for index in range(5):
        gradient, config = bank.gradient(f"m{index}"), bank[f"m{index}"].lora
        assert gradient.count_nonzero() > 0
        back = torch.full_like(gradient, 7.0)
        bank.import_row(bank.export(gradient, config), config, back)
        assert torch.equal(gradient, back), "something lies outside the adapter's true rank"


@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_without_a_gradient_slot_a_segment_only_passes_gradient_on(products: str) -> None:
    bank, (layers, forward_context) = make_bank(ranks=(8, 8, 8)), make_layers()
    bounds, dy = [(0, 20), (20, 40), (40, 60)], torch.randn(TOKENS, IN)

    def backward(silent: int | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        for i in range(3):
            bank.gradient(f"m{i}").zero_()
        segments = tuple(
            segment(bank, f"m{i}", lo, hi, None if i == silent else -1) for i, (lo, hi) in enumerate(bounds)
        )
        lora = LoraBatch.of(ForwardBatch(seq_lens=(TOKENS,), segments=segments), bank, products=products)  # type: ignore[arg-type]
        x_TI = torch.ones(TOKENS, IN, requires_grad=True)
        run(layers, forward_context, lora, x_TI).backward(dy)
        assert x_TI.grad is not None
        return x_TI.grad, [bank.gradient(f"m{i}").clone() for i in range(3)]

    dx, all_three = backward(None)
    dx_silent, two = backward(1)
    assert torch.equal(dx, dx_silent)
    assert torch.equal(all_three[0], two[0])
    assert torch.equal(all_three[2], two[2])
    assert all_three[1].count_nonzero() > 0
    assert two[1].count_nonzero() == 0


@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_one_adapter_with_two_gradients(products: str) -> None:
    bank, (layers, forward_context) = make_bank(ranks=(4, 8)), make_layers()
    scratch = bank.allocate_scratch(8)
    x, dy = torch.randn(TOKENS, IN), torch.randn(TOKENS, IN)
    two = (segment(bank, "m0", 0, 25), segment(bank, "m0", 25, 40, scratch), segment(bank, "m1", 40, 60))
    lora = LoraBatch.of(ForwardBatch(seq_lens=(TOKENS,), segments=two), bank, products=products)  # type: ignore[arg-type]
    run(layers, forward_context, lora, x).backward(dy)
    own, other = bank.gradient("m0").clone(), bank.gradient_row(8, scratch).clone()

    for want, (lo, hi) in ((own, (0, 25)), (other, (25, 40))):
        bank.gradient("m0").zero_()
        alone = ForwardBatch(seq_lens=(hi - lo,), segments=(segment(bank, "m0", 0, hi - lo),))
        run(layers, forward_context, LoraBatch.of(alone, bank), x[lo:hi]).backward(dy[lo:hi])
        assert_close(bank.gradient("m0"), want, 1e-5)


def test_the_shared_pass_equals_one_segment_at_a_time() -> None:
    bank, (layers, forward_context) = make_bank(), make_layers()
    batch, x, dy = mixed_batch(bank), torch.randn(TOKENS, IN), torch.randn(TOKENS, IN)
    packed = run(layers, forward_context, LoraBatch.of(batch, bank), x)
    packed.backward(dy)
    gradients = {f"m{i}": bank.gradient(f"m{i}").clone() for i in range(len(RANKS))}
    for index, seg in enumerate(batch.segments):
        name, tokens = f"m{index}", slice(seg.start, seg.end)
        bank.gradient(name).zero_()
        length = seg.end - seg.start
        alone = ForwardBatch(seq_lens=(length,), segments=(segment(bank, name, 0, length),))
        y = run(layers, forward_context, LoraBatch.of(alone, bank), x[tokens])
        y.backward(dy[tokens])
        assert_close(y.detach(), packed[tokens].detach(), 1e-5)
        assert_close(bank.gradient(name), gradients[name], 1e-5, name)
    without = run(layers, forward_context, None, x)
    base_only = torch.tensor([all(not s.start <= t < s.end for s in batch.segments) for t in range(TOKENS)])
    assert torch.equal(without[base_only], packed.detach()[base_only])


@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_nan_in_one_adapter_stays_with_its_owner(products: str) -> None:
    bank, (layers, forward_context) = make_bank(ranks=(8, 8, 8)), make_layers()
    bounds, x, dy = [(0, 20), (20, 40), (40, 55)], torch.randn(TOKENS, IN), torch.randn(TOKENS, IN)
    segments = tuple(segment(bank, f"m{i}", lo, hi) for i, (lo, hi) in enumerate(bounds))

    def outcome() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        for i in range(3):
            bank.gradient(f"m{i}").zero_()
        x_TI = x.clone().requires_grad_()
        lora = LoraBatch.of(ForwardBatch(seq_lens=(TOKENS,), segments=segments), bank, products=products)  # type: ignore[arg-type]
        y = run(layers, forward_context, lora, x_TI)
        y.backward(dy)
        assert x_TI.grad is not None
        return y.detach(), x_TI.grad, {f"m{i}": bank.gradient(f"m{i}").clone() for i in range(3)}

    clean_y, clean_dx, clean = outcome()
    bank.weights("m1").fill_(float("nan"))
    bank.refresh_compute("m1")
    y, dx, gradients = outcome()
    assert y[20:40].isnan().all()
    for tokens in (slice(0, 20), slice(40, 60)):
        assert torch.equal(y[tokens], clean_y[tokens])
        assert torch.equal(dx[tokens], clean_dx[tokens])
    for name in ("m0", "m2"):
        assert torch.equal(gradients[name], clean[name])


def test_other_rows_may_be_written_between_forward_and_backward() -> None:
    bank, (layers, forward_context) = make_bank(ranks=(8, 8)), make_layers()
    batch = ForwardBatch(seq_lens=(TOKENS,), segments=(segment(bank, "m0", 0, TOKENS),))
    x, dy = torch.randn(TOKENS, IN), torch.randn(TOKENS, IN)
    run(layers, forward_context, LoraBatch.of(batch, bank), x).backward(dy)
    want = bank.gradient("m0").clone()

    bank.gradient("m0").zero_()
    y = run(layers, forward_context, LoraBatch.of(batch, bank), x)
    randomise(bank, "m1", seed=9)
    bank.gradient("m1").fill_(3.0)
    bank.delete("m1")
    y.backward(dy)
    assert torch.equal(bank.gradient("m0"), want)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 2, 2, 2)], ids=str)
def test_grouped_products_take_rows_in_any_order(order: tuple[int, ...]) -> None:
    bank, (layers, forward_context) = make_bank(ranks=(8, 4, 6, 8)), make_layers()
    bounds, x, dy = [(0, 9), (9, 10), (10, 31), (31, 60)], torch.randn(TOKENS, IN), torch.randn(TOKENS, IN)
    segments = tuple(segment(bank, f"m{i}", lo, hi) for i, (lo, hi) in zip(order, bounds, strict=True))
    outcomes = []
    for products in ("loop", "grouped"):
        bank.gradient_slab(8).zero_()
        lora = LoraBatch.of(ForwardBatch(seq_lens=(TOKENS,), segments=segments), bank, products=products)  # type: ignore[arg-type]
        y = run(layers, forward_context, lora, x)
        y.backward(dy)
        outcomes.append((y.detach(), bank.gradient_slab(8).clone()))
    for want, got in zip(*outcomes, strict=True):
        assert_close(got, want, 1e-5)


def test_rows_made_and_used_under_inference_mode_can_train() -> None:
    layers, forward_context = make_layers()
    with torch.inference_mode():
        bank = make_bank(ranks=(8,))
        lora = LoraBatch.of(ForwardBatch(seq_lens=(5,), segments=(segment(bank, "m0", 0, 5),)), bank)
        run(layers, forward_context, lora, torch.randn(5, IN))
    batch = ForwardBatch(seq_lens=(TOKENS,), segments=(segment(bank, "m0", 0, TOKENS),))
    run(layers, forward_context, LoraBatch.of(batch, bank), torch.randn(TOKENS, IN)).sum().backward()
    assert bank.gradient("m0").count_nonzero() > 0


@pytest.mark.parametrize("flags", [{"train_attn": False}, {"train_mlp": False}], ids=["mlp only", "attn only"])
@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_sites_that_an_adapter_does_not_train(products: str, flags: dict[str, bool]) -> None:
    bank, (layers, forward_context) = make_bank(ranks=(8, 4), **flags), make_layers()
    bank.create("all", Lora(rank=8))
    randomise(bank, "all", seed=5)
    segments = (segment(bank, "m0", 0, 20), segment(bank, "all", 20, 30), segment(bank, "m1", 30, 60))
    batch, x, dy = ForwardBatch(seq_lens=(TOKENS,), segments=segments), torch.randn(TOKENS, IN), torch.randn(TOKENS, IN)
    y = run(layers, forward_context, LoraBatch.of(batch, bank, products=products), x)  # type: ignore[arg-type]
    y.backward(dy)
    owners = ["m0", "all", "m1"]
    dense = Dense(bank, layers, batch, owners)
    want = dense(x.double())
    want.backward(dy.double())
    assert_close(y.detach(), want.detach(), 1e-5)
    for owner, part in zip(owners, dense.parts, strict=True):
        row = torch.zeros_like(bank.gradient(owner))
        bank.import_row({name: leaf.grad for name, leaf in part.items()}, bank[owner].lora, row)  # type: ignore[misc]
        assert_close(bank.gradient(owner), row, 1e-5, owner)


def test_transposed_base() -> None:
    bank = make_bank(ranks=(8,))
    base = Conv1D(OUT, IN).requires_grad_(False)
    nn.init.normal_(base.bias)
    straight = nn.Linear(IN, OUT).requires_grad_(False)
    straight.weight.copy_(base.weight.t())
    straight.bias.copy_(base.bias)
    x, dy, seen = torch.randn(9, IN), torch.randn(9, OUT), []
    for module in (base, straight):
        bank.gradient("m0").zero_()
        forward_context = ForwardContext()
        layer = MultiLoraLinear(module, 0, SITES[0], forward_context)
        forward_context.current = LoraBatch.of(ForwardBatch(seq_lens=(9,), segments=(segment(bank, "m0", 2, 9),)), bank)
        x_TI = x.clone().requires_grad_()
        y = layer(x_TI)
        y.backward(dy)
        seen.append((y.detach(), x_TI.grad, bank.gradient("m0").clone()))
    for got, want in zip(*seen, strict=True):
        assert_close(got, want, 1e-6)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 31])
def test_bf16_rows_do_not_depend_on_their_neighbours(num_rows: int) -> None:
    bank, (layers, forward_context) = make_bank(torch.bfloat16, ranks=(3,)), make_layers(torch.bfloat16)
    x = torch.randn(TOKENS, IN).bfloat16()
    with torch.no_grad():
        batch = ForwardBatch(seq_lens=(TOKENS,), segments=(segment(bank, "m0", 0, TOKENS),))
        whole = run(layers, forward_context, LoraBatch.of(batch, bank), x)
        batch = ForwardBatch(seq_lens=(num_rows,), segments=(segment(bank, "m0", 0, num_rows),))
        part = run(layers, forward_context, LoraBatch.of(batch, bank), x[7 : 7 + num_rows])
    assert torch.equal(whole[7 : 7 + num_rows], part)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_few_tokens_have_the_bits_that_they_have_among_many(length: int) -> None:
    """A single row's product takes another path, whose sums differ where there are many input features."""
    site = LoraSite(name="layers.0.down_proj", group="mlp", in_features=4096, out_features=256)
    bank = AdapterBank((site,), device=torch.device("cpu"), dtype=torch.bfloat16)
    bank.create("m", Lora(rank=32, seed=0))
    randomise(bank, "m", seed=0)
    generator = torch.Generator().manual_seed(0)
    x_TI, y_TO = (torch.randn(480, size, generator=generator).bfloat16() for size in (4096, 256))

    def outputs(x_TI: torch.Tensor, y_TO: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        segments = tuple(segment(bank, "m", end - n, end, None) for end, n in zip(ends, lengths))
        lora = LoraBatch.of(ForwardBatch(seq_lens=tuple(lengths), segments=segments), bank)
        assert lora is not None
        y_TO = y_TO.clone()
        added_TO = y_TO.clone()
        lora_forward(x_TI, [y_TO], (0,), lora)
        lora_add(x_TI, [added_TO], (0,), lora)
        assert torch.equal(added_TO, y_TO)
        return y_TO

    many_TO = outputs(x_TI, y_TO, [480])
    assert torch.equal(outputs(x_TI, y_TO, [length] * (480 // length)), many_TO)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_grouped_products_are_chosen_and_equal_the_loop() -> None:
    """bf16, 40 adapters of 4 classes with gaps between some; the next call on the context still works."""
    device, ranks = torch.device("cuda"), [8] * 16 + [3, 16, 9, 16] * 4 + [64] * 8
    bank = AdapterBank(SITES, device=device, dtype=torch.bfloat16)
    for index, rank in enumerate(ranks):
        bank.create(f"m{index}", Lora(rank=rank, seed=index))
        row = bank.weights(f"m{index}")
        parts = bank.export(row, bank[f"m{index}"].lora)
        bank.import_row(
            {name: torch.randn_like(part) * 0.3 for name, part in parts.items()}, bank[f"m{index}"].lora, row
        )
        bank.refresh_compute(f"m{index}")
    layers, forward_context = make_layers(torch.bfloat16)
    layers.to(device)
    segments, end = [], 3
    for index in sorted(range(len(ranks)), key=lambda i: bank.row(f"m{i}")):
        start, end = end, end + 1 + index * 7 % 50
        segments.append(segment(bank, f"m{index}", start, end, None if index == 5 else -1))
        end += 4 if index % 9 == 0 else 0
    batch = ForwardBatch(seq_lens=(end + 5,), segments=tuple(segments))
    x = torch.randn(end + 5, IN, device=device).bfloat16()
    dy = torch.randn(end + 5, IN, device=device).bfloat16()
    outcomes = []
    for products in ("loop", "auto"):
        lora = LoraBatch.of(batch, bank, products=products)  # type: ignore[arg-type]
        assert lora is not None
        for index in range(len(ranks)):
            bank.gradient(f"m{index}").zero_()
        x_TI = x.clone().requires_grad_()
        y = run(layers, forward_context, lora, x_TI)
        y.backward(dy)
        torch.cuda.synchronize()
        assert x_TI.grad is not None
        gradients = [bank.gradient(f"m{i}").clone() for i in range(len(ranks)) if i != 5]
        outcomes.append([y.detach(), x_TI.grad, *gradients])
        assert bank.gradient("m5").count_nonzero() == 0
    for want, got in zip(*outcomes, strict=True):
        assert (got.float() - want.float()).norm() <= 0.02 * want.float().norm()
    chosen = choose(x, [OUT], lora)
    assert chosen != "loop"
    runs = lora.runs(0, len(x), chosen)
    assert max(len(run_.segments) for run_ in runs) >= 4
    if chosen == "kernels":
        [whole] = runs
        assert (whole.start, whole.end) == (0, len(x))


def test_no_adapter_no_pass_and_nothing_recorded() -> None:
    bank, (layers, forward_context) = make_bank(ranks=(8,)), make_layers()
    assert LoraBatch.of(ForwardBatch(seq_lens=(5,)), bank) is None
    assert LoraBatch.of(ForwardBatch(seq_lens=(5,), segments=(segment(bank, "m0", 2, 2),)), bank) is None
    assert not run(layers, forward_context, None, torch.randn(5, IN)).requires_grad
    lora = LoraBatch.of(ForwardBatch(seq_lens=(5,), segments=(segment(bank, "m0", 0, 5),)), bank)
    with torch.no_grad():
        assert not run(layers, forward_context, lora, torch.randn(5, IN)).requires_grad
    assert run(layers, forward_context, lora, torch.randn(5, IN)).requires_grad


def test_segments_that_overlap_or_name_a_free_row_are_refused() -> None:
    bank = make_bank(ranks=(8, 8))
    overlapping = (segment(bank, "m0", 0, 4), segment(bank, "m1", 3, 5))
    with pytest.raises(ServerError, match=r"segments\[1\] is 3:5 after 4"):
        LoraBatch.of(ForwardBatch(seq_lens=(5,), segments=overlapping), bank)
    beyond = segment(bank, "m0", 0, 6)
    with pytest.raises(ServerError, match="in a pass of 5"):
        LoraBatch.of(ForwardBatch(seq_lens=(5,), segments=(beyond,)), bank)
    bank.delete("m0")
    with pytest.raises(ServerError, match="holds no adapter"):
        LoraBatch.of(ForwardBatch(seq_lens=(6,), segments=(beyond,)), bank)


def test_a_selection_keeps_each_token_with_its_adapter() -> None:
    bank = make_bank(ranks=(8, 4))
    segments = (segment(bank, "m0", 2, 6), segment(bank, "m1", 6, 9))
    lora = LoraBatch.of(ForwardBatch(seq_lens=(12,), segments=segments), bank)
    assert lora is not None
    chosen = lora.select([0, 2, 5, 8, 10])
    assert chosen is not None
    assert [(s.start, s.end, s.compute) for s in chosen.segments] == [
        (1, 3, bank["m0"].compute_slot),
        (3, 4, bank["m1"].compute_slot),
    ]
    assert lora.select([0, 1, 10]) is None


JOINT_SITES = tuple(
    LoraSite(name=f"layers.0.self_attn.{name}", group="attn", in_features=IN, out_features=width)
    for name, width in (("q_proj", 40), ("k_proj", 16), ("v_proj", 24))
)


@pytest.mark.parametrize("products", ["loop", "grouped"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "bounds",
    [[(0, 60)], [(0, 20), (20, 45), (45, 60)], [(3, 20), (20, 45), (50, 58)]],
    ids=["one adapter", "three", "three with gaps"],
)
def test_layers_joined_on_one_input_equal_the_same_apart(
    products: str, bias: bool, bounds: list[tuple[int, int]]
) -> None:
    x, dys, results = torch.randn(1, TOKENS, IN), [torch.randn(1, TOKENS, s.out_features) for s in JOINT_SITES], []
    for joined in (False, True):
        torch.manual_seed(4)
        bank, forward_context = (
            AdapterBank(JOINT_SITES, device=torch.device("cpu"), dtype=torch.float32),
            ForwardContext(),
        )
        for index in range(len(bounds)):
            bank.create(f"m{index}", Lora(rank=5 + index, seed=index))
            randomise(bank, f"m{index}", seed=index)
        layers = [
            MultiLoraLinear(
                nn.Linear(IN, site.out_features, bias=bias).requires_grad_(False), index, site, forward_context
            )
            for index, site in enumerate(JOINT_SITES)
        ]
        if joined:
            MultiLoraLinear.join(layers)
        segments = tuple(segment(bank, f"m{i}", lo, hi) for i, (lo, hi) in enumerate(bounds))
        batch = ForwardBatch(seq_lens=(TOKENS,), segments=segments)
        forward_context.current = LoraBatch.of(batch, bank, products=products)  # type: ignore[arg-type]
        leaf = x.clone().requires_grad_()
        ys = [layer(leaf) for layer in layers]
        assert forward_context.joined_outputs is None
        torch.autograd.backward(ys, dys)
        with torch.no_grad():
            scored = [layer(leaf) for layer in layers]
        rows = [bank.gradient(f"m{index}").clone() for index in range(len(bounds))]
        results.append([*[y.detach() for y in ys], *scored, leaf.grad, *rows])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 2e-6)


def test_joined_layers_on_other_inputs_compute_for_themselves() -> None:
    bank, forward_context = AdapterBank(JOINT_SITES, device=torch.device("cpu"), dtype=torch.float32), ForwardContext()
    bank.create("m0", Lora(rank=8, seed=0))
    randomise(bank, "m0", seed=0)
    layers = [
        MultiLoraLinear(nn.Linear(IN, site.out_features).requires_grad_(False), index, site, forward_context)
        for index, site in enumerate(JOINT_SITES)
    ]
    x, other = torch.randn(TOKENS, IN), torch.randn(TOKENS, IN)
    batch = ForwardBatch(seq_lens=(TOKENS,), segments=(segment(bank, "m0", 0, TOKENS),))
    forward_context.current = LoraBatch.of(batch, bank)
    want = layers[1](other).detach()
    MultiLoraLinear.join(layers)
    layers[0](x)
    assert_close(layers[1](other).detach(), want, 1e-6)


@pytest.mark.parametrize("joined", [False, True])
def test_a_decode_step_without_adapters_is_the_base(joined: bool) -> None:
    """With adapters it takes a device's kernels; what is joined and handed on is the same."""
    bank, forward_context = AdapterBank(JOINT_SITES, device=torch.device("cpu"), dtype=torch.float32), ForwardContext()
    layers = [
        MultiLoraLinear(nn.Linear(IN, site.out_features).requires_grad_(False), index, site, forward_context)
        for index, site in enumerate(JOINT_SITES)
    ]
    network, x = nn.ModuleList(layers), torch.randn(1, TOKENS, IN)
    want = [layer.base(x) for layer in layers]
    if joined:
        MultiLoraLinear.join(layers)
    products = paged_batch.products(network)
    assert products == ({(0, 1, 2)} if joined else {(0,), (1,), (2,)})
    for sites, features in paged_batch.site_features(bank, products, torch.device("cpu")).items():
        for rank_bucket in (8, 16):
            layout = bank.layout(rank_bucket)
            offsets = [[layout.a_offset[site], layout.b_offset[site]] for site in sites]
            assert (rank_bucket * features).tolist() == offsets
    step = paged_batch.PagedBatch(attention=ForwardBatch(seq_lens=(TOKENS,)), adapters=())
    forward_context.current = step
    with torch.no_grad():
        got = [layer(x) for layer in layers]
    assert forward_context.joined_outputs is None
    for y, expected in zip(got, want, strict=True):
        assert_close(y, expected, 1e-6)


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("gap", [1, 2])
def test_batched_decode_rows_have_the_loops_bits(length: int, gap: int) -> None:
    """Slots next to one another, and with gaps; a step of even segments of one scale is batched, and only that."""
    bank, (layers, forward_context) = make_bank(torch.bfloat16), make_layers(torch.bfloat16)
    names = [f"even{number}" for number in range(6)]
    for number, name in enumerate(names):
        bank.create(name, Lora(rank=16, seed=number))
        bank.weights(name).normal_(std=0.1)
        bank.refresh_compute(name)
    segments = tuple(
        segment(bank, name, i * length, (i + 1) * length, gradient=None) for i, name in enumerate(names[::gap])
    )
    batch = ForwardBatch(seq_lens=(len(segments) * length,), segments=segments)
    x = torch.randn(batch.num_tokens, IN, dtype=torch.bfloat16)
    [batched] = LoraBatch.of(batch, bank).runs(0, batch.num_tokens, "loop")  # type: ignore[union-attr]
    assert batched.is_even
    with torch.no_grad():
        auto, loop = (
            run(layers, forward_context, LoraBatch.of(batch, bank, products=products), x)  # type: ignore[arg-type]
            for products in ("auto", "loop")
        )
    assert torch.equal(auto, loop)
    mixed = LoraBatch.of(mixed_batch(bank), bank)
    assert mixed is not None
    assert not any(part.is_even for part in mixed.runs(0, TOKENS, "loop"))


WIDE_IN, WIDE_OUT = 512, 128


def small_layer(*, bias: float | None) -> tuple[AdapterBank, MultiLoraLinear, ForwardContext]:
    """In bf16. Adapter ``small`` adds a small part of a step of bf16 to what the base says, ``other`` much more, and
    ``untrained`` nothing: it does not train this site. ``bias``: of every output."""
    site = LoraSite(name="layers.0.q_proj", group="attn", in_features=WIDE_IN, out_features=WIDE_OUT)
    bank = AdapterBank((site, SITES[1]), device=torch.device("cpu"), dtype=torch.bfloat16)
    for number, (name, scale) in enumerate({"small": 5e-5, "other": 0.3, "untrained": 0.3}.items()):
        bank.create(name, Lora(rank=8, seed=number, train_attn=name != "untrained"))
        randomise(bank, name, seed=number)
        bank.weights(name).mul_(scale**0.5)
        bank.refresh_compute(name)
    torch.manual_seed(2)
    base = nn.Linear(WIDE_IN, WIDE_OUT, bias=bias is not None).bfloat16().requires_grad_(False)
    nn.init.normal_(base.weight, std=WIDE_IN**-0.5)
    if bias is not None:
        nn.init.constant_(base.bias, bias)
    forward_context = ForwardContext()
    return bank, MultiLoraLinear(base, 0, site, forward_context), forward_context


@pytest.mark.parametrize("bias", [None, 0.5, 100.0])
@pytest.mark.parametrize("products", ["loop", "grouped"])
@pytest.mark.parametrize("recorded", [True, False], ids=["training", "sampling"])
def test_what_is_far_below_a_step_of_bf16_survives_in_the_mean(
    bias: float | None, products: str, recorded: bool
) -> None:
    bank, layer, forward_context = small_layer(bias=bias)
    num_tokens = 2048
    x = torch.randn(num_tokens, WIDE_IN, generator=torch.Generator().manual_seed(3)).bfloat16()
    batch = ForwardBatch(seq_lens=(num_tokens,), segments=(segment(bank, "small", 0, num_tokens),))
    parts = bank.export(bank.weights("small"), bank["small"].lora)
    a, b = (part.bfloat16().double() for name, part in parts.items() if "q_proj" in name)
    exact = 4 * x.double() @ a.T @ b.T
    forward_context.current = LoraBatch.of(batch, bank, products=products)  # type: ignore[arg-type]
    with torch.set_grad_enabled(recorded):
        y = layer(x).detach().double()
    added = y - layer.base(x).double()
    step = torch.finfo(torch.bfloat16).eps * (y.abs().median() if bias is None else max(bias, y.abs().median()))
    assert exact.abs().median() < 0.15 * step
    survived = (added * exact).sum() / exact.square().sum()
    assert abs(survived - 1) < 0.25, "of what the adapter adds"


@pytest.mark.parametrize("bias", [None, 0.5])
@pytest.mark.parametrize("bounds", [[(0, 20), (28, 41), (41, 60)], [(1, 20), (20, 25), (25, 58)]], ids=str)
def test_tokens_that_no_adapter_changes_keep_the_bases_bits_in_bf16(
    bias: float | None, bounds: list[tuple[int, int]]
) -> None:
    """Also those whose adapter does not train the layer."""
    bank, layer, forward_context = small_layer(bias=bias)
    x = torch.randn(TOKENS, WIDE_IN, generator=torch.Generator().manual_seed(3)).bfloat16()
    names = ["other", "untrained", "small"]
    segments = tuple(segment(bank, name, lo, hi) for name, (lo, hi) in zip(names, bounds, strict=True))
    base_only = torch.ones(TOKENS, dtype=torch.bool)
    for name, (lo, hi) in zip(names, bounds, strict=True):
        base_only[lo:hi] = name == "untrained"
    base = layer.base(x)
    for recorded in (True, False):
        forward_context.current = LoraBatch.of(ForwardBatch(seq_lens=(TOKENS,), segments=segments), bank)
        with torch.set_grad_enabled(recorded):
            y = layer(x).detach()
        assert torch.equal(y[base_only], base[base_only])
        for name, (lo, hi) in zip(names, bounds, strict=True):
            forward_context.current = LoraBatch.of(
                ForwardBatch(seq_lens=(hi - lo,), segments=(segment(bank, name, 0, hi - lo),)), bank
            )
            with torch.no_grad():
                alone = layer(x[lo:hi])
            assert torch.equal(y[lo:hi], alone), f"{name} in a batch and alone"
