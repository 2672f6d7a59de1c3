"""Prepacked weights are used only where their product has the plain product's bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from descant.model.cpu import prepacked

NATIVE = torch.ops.mkldnn._is_mkldnn_bf16_supported() and not torch.cpu._is_amx_tile_supported()
"""AMX has other bits by the form of the weight: the CPU decoder finds that when it is made, and the modules stay."""


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            torch.bfloat16,
            id="bfloat16",
            marks=pytest.mark.skipif(not NATIVE, reason="needs bf16 in hardware, without AMX"),
        ),
        pytest.param(torch.float32, id="float32"),
    ],
)
@pytest.mark.parametrize("shape", [(64, 32), (192, 576), (576, 1536), (1000, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_have_the_same_bits(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    found = prepacked.prepack(weight, bias)
    assert found is not None
    for num_rows in range(prepacked.MIN_ROWS, prepacked.MAX_ROWS + 1, 5):
        x = torch.randn(1, num_rows, shape[1]).to(dtype)
        assert torch.equal(prepacked.linear(x, found, bias), prepacked.product(x, weight, bias, None))
        addition = torch.randn(num_rows, shape[0]).to(dtype) / 64
        addition[::3] = 0
        plain = prepacked.add_product(addition.clone(), x[0], weight, None)
        assert torch.equal(prepacked.linear_add(x[0], found, addition), plain)
        alone = prepacked.product(x[0], weight, None, None)
        assert torch.equal(plain[::3], alone[::3]), "nothing added: the plain product's bits"
        if dtype == torch.bfloat16:
            assert torch.equal(alone, F.linear(x[0], weight))


@pytest.mark.parametrize("shape", [(64, 32), (192, 576), (576, 1536), (1000, 72), (33, 65), (96, 8), (64, 2048)])
def test_a_row_in_float32_has_the_same_bits_beside_any_others(shape: tuple[int, int]) -> None:
    assert prepacked.has_float32()
    num_out, num_in = shape
    weight, bias = torch.randn(shape), torch.randn(num_out)
    x, addition = torch.randn(600, num_in), torch.randn(600, num_out)
    found, joined = prepacked.prepack(weight, bias), prepacked.prepack(torch.cat([torch.randn(shape), weight]), None)
    assert found is not None
    assert joined is not None
    transposed = weight.t().contiguous().t()  # as transformers' Conv1D has it
    expected = prepacked.product(x, weight, None, None)
    with torch.no_grad():
        for num_rows in (8, 9, 24, 64, 65, 129, 300, 513):
            own, first = x[:num_rows], expected[:num_rows]
            for form in (found, None):
                assert torch.equal(prepacked.product(own, weight, None, form), first)
                assert torch.equal(prepacked.product(own, weight, bias, form), first + bias)
                assert torch.equal(
                    prepacked.add_product(addition[:num_rows].clone(), own, weight, form), addition[:num_rows] + first
                )
            assert torch.equal(prepacked.product(own, transposed, None, None), first)
            assert torch.equal(prepacked.linear(own, joined, None)[:, num_out:], first)
    exact = F.linear(x.double(), weight.double())
    assert (expected - exact).abs().max() < 1e-6 * num_in


def test_a_product_in_float32_has_a_gradient() -> None:
    weight, bias, x = torch.randn(24, 40), torch.randn(24), torch.randn(1, 9, 40, requires_grad=True)
    y = prepacked.product(x, weight, bias, None)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad is not None
    assert torch.allclose(x.grad, dy @ weight, atol=1e-5)
    assert torch.allclose(y, F.linear(x, weight, bias), atol=1e-5)


def test_float64_and_autocast_are_torch_s_own() -> None:
    x, weight = torch.randn(9, 40), torch.randn(24, 40)
    assert prepacked.prepack(weight.double(), None) is None
    assert torch.equal(
        prepacked.product(x.double(), weight.double(), None, None), F.linear(x.double(), weight.double())
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert prepacked.product(x, weight, None, None).dtype == torch.bfloat16


def test_only_without_gradients_and_in_bf16_few_rows() -> None:
    some = torch.zeros(1)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            assert prepacked.serves(some, torch.zeros(1, 8, 4, dtype=dtype))
            assert not prepacked.serves(some, torch.zeros(1, 7, 4, dtype=dtype))
            assert prepacked.serves(some, torch.zeros(1, 65, 4, dtype=dtype)) is (dtype == torch.float32)
            assert not prepacked.serves(None, torch.zeros(1, 8, 4, dtype=dtype))
    assert not prepacked.serves(some, torch.zeros(1, 8, 4))
