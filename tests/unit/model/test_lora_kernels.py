"""The kernels for narrow ranks against plain products, by Triton's interpreter (TRITON_INTERPRET=1) or on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from descant.model import lora, lora_kernels
from descant.model.fused import _swiglu, fuse
from descant.model.load import ModelSource, _join_linears, load_model
from descant.testing.studio import Studio, some_commands
from descant.testing.tiny import tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, or a GPU"
)

SEGMENTS = [  # first token, end, work slot, scale, gradient slot
    (0, 70, 2, 4.0, 1),
    (70, 75, 0, 2.0, None),
    (75, 203, 3, 0.5, 0),
]
NUM_TOKENS = 203


@pytest.mark.parametrize("max_features", [None, 64])
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize(("num_in", "widths"), [(136, (40,)), (72, (136, 24, 32)), (64, (128, 128))])
def test_they_equal_plain_products(
    rank: int, num_in: int, widths: tuple[int, ...], max_features: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if max_features is not None:  # wider outputs are then taken in parts
        monkeypatch.setattr(lora_kernels, "MAX_FEATURES", max_features)
        monkeypatch.setattr(lora_kernels, "PART_FEATURES", max_features)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    sizes = [*[rank * num_in] * len(widths), *[rank * width for width in widths]]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64)
    work_SP = random(4, starts[-1])
    gradient_SP = torch.randn(2, starts[-1], generator=generator).to(DEVICE)
    sites = lora_kernels.Sites(
        a_offsets=tuple(starts[: len(widths)]), b_offsets=tuple(starts[len(widths) : -1]), widths=widths, rank=rank
    )
    tiles = lora_kernels.make_tiles(SEGMENTS, DEVICE)
    x, dy = random(NUM_TOKENS, num_in), random(NUM_TOKENS, sum(widths))

    h = lora_kernels.shrink(x, work_SP, tiles, sites)
    y = lora_kernels.expand(h, work_SP, tiles, sites)
    dh = lora_kernels.pull(dy, work_SP, tiles, sites)
    dx = lora_kernels.push(dh, num_in, work_SP, tiles, sites)
    gradients = gradient_SP.clone()
    lora_kernels.add_gradients(x, dy, h, dh, gradients, tiles, sites)

    want = gradient_SP.double()
    for start, end, slot, scale, gradient in SEGMENTS:
        own = slice(start, end)
        want_dx = torch.zeros(end - start, num_in, dtype=torch.float64, device=DEVICE)
        first = 0
        for index, width in enumerate(widths):
            at, bt = sites.a_offsets[index], sites.b_offsets[index]
            out, cells = slice(first, first + width), slice(index * rank, (index + 1) * rank)
            a = work_SP[slot, at : at + rank * num_in].view(rank, num_in).double()
            b = work_SP[slot, bt : bt + rank * width].view(width, rank).double()
            h_own, dh_own = h[own, cells].double(), dh[own, cells].double()
            near(h_own, scale * x[own].double() @ a.t())
            near(y[own, out], h_own @ b.t())
            near(dh_own, scale * dy[own, out].double() @ b)
            want_dx += dh_own @ a
            if gradient is not None:
                want[gradient, at : at + rank * num_in] += (dh_own.t() @ x[own].double()).flatten()
                want[gradient, bt : bt + rank * width] += (dy[own, out].double().t() @ h_own).flatten()
            first += width
        near(dx[own], want_dx)
    near(gradients, want, 1e-5)


def test_nothing_of_one_adapter_reaches_another() -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    sites = lora_kernels.Sites(a_offsets=(0,), b_offsets=(512,), widths=(64,), rank=8)
    work_SP, gradient_SP = torch.ones(4, 1024, device=DEVICE, dtype=dtype), torch.zeros(2, 1024, device=DEVICE)
    work_SP[2] = torch.nan
    x, dy = (torch.ones(NUM_TOKENS, 64, device=DEVICE, dtype=dtype) for _ in range(2))
    x[:70] = dy[:70] = torch.inf
    tiles = lora_kernels.make_tiles(SEGMENTS, DEVICE)
    h, dh = lora_kernels.shrink(x, work_SP, tiles, sites), lora_kernels.pull(dy, work_SP, tiles, sites)
    y, dx = (
        lora_kernels.expand(h, work_SP, tiles, sites),
        lora_kernels.push(dh, 64, work_SP, tiles, sites),
    )
    lora_kernels.add_gradients(x, dy, h, dh, gradient_SP, tiles, sites)
    for result in (h, dh, y, dx):
        assert result[70:].isfinite().all()
    assert gradient_SP[0].isfinite().all()
    assert not gradient_SP[1].isfinite().all()


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    tolerance = tolerance or (1e-2 if got.dtype == torch.bfloat16 or DEVICE.type == "cuda" else 1e-5)
    assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU, tests/gpu compares whole passes")
def test_a_pass_through_them_equals_one_through_plain_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rank classes, one beyond the kernels; shared layers, and SwiGLU over the joined output."""
    source = ModelSource(name="qwen3", directory=tiny_model("qwen3", tmp_path / "qwen3"))
    ranks = {"a": 4, "b": 16, "c": 16, "d": 64, "e": 128}
    found = []
    for through_kernels in (False, True):
        model = load_model(source, device=DEVICE, dtype=torch.float32, check=False)
        if through_kernels:
            _join_linears(model.network)
            fuse(model.network)
            assert any(type(module).forward is _swiglu for module in model.network.modules())
            monkeypatch.setattr(lora, "_has_kernels", lambda device: True)
            monkeypatch.setattr(lora, "_is_grouped", lambda *_: True)
        studio = Studio(model)
        for number, (name, rank) in enumerate(ranks.items()):
            studio.create(name, rank, seed=number)
        outputs = studio.run(*some_commands(studio, list(ranks)))
        losses = [output.metrics["loss:sum"] for output in outputs]
        found.append((losses, {name: studio.gradient(name) for name in ranks}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name in ranks:
        assert found[0][1][name].norm() > 0
        near(found[1][1][name], found[0][1][name], 1e-4)
