"""Prepacked weights are used only where their product has the plain product's bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from descant.model import prepacked

NATIVE = torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.skipif(not NATIVE, reason="needs bf16 in hardware")
@pytest.mark.parametrize("shape", [(64, 32), (192, 576), (576, 1536), (1000, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_have_the_same_bits(shape: tuple[int, int], has_bias: bool) -> None:
    weight = torch.randn(shape).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None
    found = prepacked.prepack(weight, bias)
    assert found is not None
    for num_rows in range(prepacked.MIN_ROWS, prepacked.MAX_ROWS + 1, 5):
        x = torch.randn(1, num_rows, shape[1]).bfloat16()
        assert torch.equal(prepacked.linear(x, found, bias), F.linear(x, weight, bias))
        addition = torch.randn(num_rows, shape[0]).bfloat16() / 64
        addition[::3] = 0
        plain = prepacked.add_product(addition.clone(), x[0], weight, None)
        assert torch.equal(prepacked.linear_add(x[0], found, addition), plain)
        assert torch.equal(plain[::3], F.linear(x[0], weight)[::3]), "nothing added: the plain product's bits"


def test_only_few_rows_without_gradients_in_bf16() -> None:
    assert prepacked.prepack(torch.randn(8, 8), None) is None
    some = torch.zeros(1)
    with torch.no_grad():
        assert prepacked.serves(some, torch.zeros(1, 8, 4))
        assert not prepacked.serves(some, torch.zeros(1, 7, 4))
        assert not prepacked.serves(some, torch.zeros(1, 65, 4))
        assert not prepacked.serves(None, torch.zeros(1, 8, 4))
    assert not prepacked.serves(some, torch.zeros(1, 8, 4))
