"""On a CUDA device: the one attention function, by PyTorch's packed kernel and by blocks, against the CPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from descant.model.attention.dispatch import attention
from descant.model.forward_batch import PAGE_TOKENS, ForwardBatch, KVPool, PagedKV

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYER: Any = SimpleNamespace(layer_idx=0, is_causal=True)
LENGTHS = (37, 200, 1, 64, 129, 64, 5)
RULES = [
    pytest.param({}, id="plain"),
    pytest.param({"sliding_window": 50}, id="window"),
    pytest.param({"softcap": 3.0}, id="softcap"),
]


def qkv(dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, sum(LENGTHS), heads, 64, generator=generator).to(dtype).transpose(1, 2) for heads in (6, 2, 2)
    )


def call(inputs: Any, batch: ForwardBatch, rule: Any) -> torch.Tensor:
    out: torch.Tensor = attention(LAYER, *inputs, None, batch=batch, scaling=0.125, **rule)[0]
    assert out.is_contiguous()
    return out


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_training_equals_the_cpus(dtype: torch.dtype, tolerance: float, rule: Any) -> None:
    grad_out = torch.randn(1, sum(LENGTHS), 6, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device).requires_grad_() for x in qkv(dtype)]
        out = call(inputs, ForwardBatch(seq_lens=LENGTHS), rule)
        results.append(
            [x.cpu().float() for x in (out.detach(), *torch.autograd.grad(out, inputs, grad_out.to(device)))]
        )
    for want, got in zip(*results):
        assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("lengths", [(256, 256, 256), (320,), (0, 320, 320)])
def test_sequences_of_one_length_equal_the_cpus(lengths: tuple[int, ...], head_size: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        x = torch.randn(1, sum(lengths), heads, head_size, generator=generator)
        return x.to(torch.bfloat16).transpose(1, 2)

    given, grad_out = [random(heads) for heads in (6, 2, 2)], random(6).transpose(1, 2)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device).requires_grad_() for x in given]
        batch = ForwardBatch(seq_lens=lengths)
        out = call(inputs, batch, {})
        grads = torch.autograd.grad(out, inputs, grad_out.to(device))
        results.append([x.cpu().float() for x in (out.detach(), *grads)])
        if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
            assert batch.cache["one_length"] == max(lengths)
    for want, got in zip(*results):
        assert (got - want).abs().max() <= 2e-2 * want.abs().max()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@torch.no_grad()
def test_pages_equal_the_cpus_training_pass(dtype: torch.dtype, tolerance: float, rule: Any) -> None:
    want = call(qkv(dtype), ForwardBatch(seq_lens=LENGTHS), rule)
    inputs = [x.cuda() for x in qkv(dtype)]
    blocks = -(-max(LENGTHS) // PAGE_TOKENS)
    pages = torch.zeros(len(LENGTHS) * blocks, 2, PAGE_TOKENS, 64, dtype=dtype, device="cuda")
    pool = KVPool(keys=(pages,), values=(pages.clone(),))
    table = torch.arange(len(LENGTHS) * blocks).view(len(LENGTHS), blocks)
    ends = torch.tensor(LENGTHS).cumsum(0)
    for first in (True, False):  # all but the last token, then a decode step
        members = [i for i, length in enumerate(LENGTHS) if length > 1 or not first]
        lengths = tuple(LENGTHS[i] - 1 if first else 1 for i in members)
        contexts = tuple(0 if first else LENGTHS[i] - 1 for i in members)
        rows = torch.cat(
            [
                torch.arange(ends[i] - LENGTHS[i] + c, ends[i] - LENGTHS[i] + c + n)
                for i, c, n in zip(members, contexts, lengths)
            ]
        )
        kv = PagedKV(pool=pool, page_table=table[members], context_lens=contexts)
        got = call([x[:, :, rows.cuda()] for x in inputs], ForwardBatch(seq_lens=lengths, kv=kv), rule).cpu()
        assert (got.float() - want[:, rows].float()).abs().max() <= tolerance * want.float().abs().max()
