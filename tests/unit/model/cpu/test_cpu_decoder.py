"""A decode step without modules has the bits of the one with them, or is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from descant.adapters.slots import RowRef
from descant.model.base import BaseModel
from descant.model.cpu.decoder import CpuDecoder
from descant.model.forward_batch import PAGE_TOKENS, ForwardBatch, KVPool, PagedKV, Segment
from descant.model.load import ModelSource, load_model
from descant.model.lora.linear import MultiLoraLinear
from descant.testing.learner import LearnerHarness
from descant.testing.tiny import VOCAB_SIZE, tiny_model
from descant.types import Version

BFLOAT16 = pytest.param(
    torch.bfloat16,
    id="bfloat16",
    marks=pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        reason="needs bf16 in hardware, without AMX (see test_prepacked)",
    ),
)
FLOAT32 = pytest.param(torch.float32, id="float32")

SUPPORTED = ["llama", "llama_tied", "qwen2", "qwen3", "mistral"]
"""Mistral's window is 16 tokens here."""
UNSUPPORTED = ["gemma", "gemma2", "gpt_neox", "qwen3_moe"]

CONTEXTS = (0, 1, 15, 16, 62, 63, 64, 100, 127, 128, 200, 300)
NUM_BLOCKS = 1 + max(CONTEXTS) // PAGE_TOKENS


def load(arch: str, directory: Path, dtype: torch.dtype = torch.float32) -> BaseModel:
    source = ModelSource(name=arch, directory=tiny_model(arch, directory / arch))
    model = load_model(source, device=torch.device("cpu"), dtype=dtype, check=False)
    model.prepack_weights()
    return model


def linears(model: BaseModel) -> list[MultiLoraLinear]:
    return [module for module in model.network.modules() if isinstance(module, MultiLoraLinear)]


class Desk:
    """Sequences with their contexts in pages, each its own; one step through the modules and one without."""

    def __init__(self, model: BaseModel, contexts: tuple[int, ...] = CONTEXTS):
        self.model, self.contexts = model, contexts
        generator = torch.Generator().manual_seed(1)
        self.tokens = [torch.randint(VOCAB_SIZE, (context + 1,), generator=generator) for context in contexts]
        order = torch.randperm(len(contexts) * NUM_BLOCKS, generator=generator)
        self.table = order.view(len(contexts), NUM_BLOCKS)
        self.pool = self.make_pool()
        for index, context in enumerate(contexts):
            if context:
                self.run(self.pool, [index], 0, context, [])

    def make_pool(self) -> KVPool:
        pool = self.model.make_kv_pool(len(self.contexts) * NUM_BLOCKS)
        for pages in pool.joined:
            pages.fill_(torch.nan)  # what others left there
        return pool

    def run(self, pool: KVPool, chosen: list[int], start: int, length: int, rows: list[RowRef | None]) -> torch.Tensor:
        """Logits of the last tokens; ``start`` -1: one token behind each context."""
        starts = [self.contexts[index] if start < 0 else start for index in chosen]
        kv = PagedKV(pool=pool, page_table=self.table[chosen], context_lens=tuple(starts))
        segments = tuple(Segment(start=i, end=i + 1, row=row) for i, row in enumerate(rows) if row is not None)
        stream = torch.cat([self.tokens[index][at : at + length] for index, at in zip(chosen, starts)])
        positions = torch.cat([torch.arange(at, at + length) for at in starts])
        with torch.no_grad():
            batch = ForwardBatch(seq_lens=(length,) * len(chosen), kv=kv, segments=segments)
            hidden, lora = self.model.decoder_forward(stream, positions, batch)
            return self.model.lm_head.logits_at(hidden, lora, torch.arange(length - 1, len(stream), length))

    def both(
        self, cpu_decoder: CpuDecoder, pool: KVPool, chosen: list[int], rows: list[RowRef | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``pool``: of ``cpu_decoder``, made equal to the one with the contexts first."""
        for mine, theirs in zip(pool.joined, self.pool.joined, strict=True):
            mine.copy_(theirs)
        got = cpu_decoder.logits(
            [int(self.tokens[i][-1]) for i in chosen],
            [self.contexts[i] for i in chosen],
            [tuple(self.table[i].tolist()[: 1 + self.contexts[i] // PAGE_TOKENS]) for i in chosen],
            rows,
        )
        expected_pool = self.make_pool()
        for mine, theirs in zip(expected_pool.joined, self.pool.joined, strict=True):
            mine.copy_(theirs)
        expected = self.run(expected_pool, chosen, -1, 1, rows)
        for mine, theirs in zip(pool.joined, expected_pool.joined, strict=True):
            assert torch.equal(mine.nan_to_num(9.0), theirs.nan_to_num(9.0))
        return got, expected


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("arch", SUPPORTED)
def test_the_bits_of_the_modules(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    desk = Desk(load(arch, tmp_path, dtype))
    pool = desk.make_pool()
    cpu_decoder = CpuDecoder.of(desk.model, pool)
    assert cpu_decoder is not None
    for chosen in (list(range(len(CONTEXTS))), [10], [3, 0, 11], [1, 2]):
        got, expected = desk.both(cpu_decoder, pool, chosen, [None] * len(chosen))
        assert got.isfinite().all()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("arch", ["llama_tied", "qwen2"])
def test_adapters_have_the_bits_of_their_own_products(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of two classes, some that train not all sites, one whose scale is no power of two, before and after they are
    stacked; rows that no adapter changes beside them, also where there are biases (qwen2)."""
    model = load(arch, tmp_path, dtype)
    if arch == "qwen2":
        assert any(layer.bias is not None and layer.bias.abs().max() > 0 for layer in linears(model))
    harness, rows = LearnerHarness(model), []
    for number, (rank, flags) in enumerate(
        [(8, {}), (4, {"train_mlp": False}), (16, {}), (12, {}), (16, {"train_unembed": False, "train_attn": False})]
    ):
        harness.create(f"m{number}", rank, seed=number, b_std=0.2, **flags)
        version = Version(model_id=f"m{number}", number=1)
        model.bank.publish(f"m{number}", version)
        rows.append(model.bank.pin_version(version))
    desk = Desk(model)
    pool = desk.make_pool()
    cpu_decoder = CpuDecoder.of(model, pool)
    assert cpu_decoder is not None
    by_sequence = [None, rows[0], rows[0], rows[1], None, rows[1], rows[2], rows[3], rows[4], rows[4], None, rows[4]]
    order = sorted(
        range(len(CONTEXTS)), key=lambda i: (0, 0) if (r := by_sequence[i]) is None else (r.rank_bucket, r.slot)
    )
    for number in range(5):
        chosen = order if number < 4 else order[3:7]
        got, expected = desk.both(cpu_decoder, pool, chosen, [by_sequence[i] for i in chosen])
        assert torch.equal(got, expected)
        base, _ = desk.both(cpu_decoder, pool, chosen, [None] * len(chosen))
        assert not torch.equal(got, base)
        base_only = [number for number, i in enumerate(chosen) if by_sequence[i] is None]
        assert torch.equal(got[base_only], base[base_only])


@pytest.mark.parametrize("arch", UNSUPPORTED)
def test_other_layers_go_through_their_modules(arch: str, tmp_path: Path) -> None:
    model = load(arch, tmp_path)
    assert CpuDecoder.of(model, model.make_kv_pool(4)) is None


def test_float64_goes_through_the_modules(tmp_path: Path) -> None:
    model = load("llama", tmp_path, torch.float64)
    assert CpuDecoder.of(model, model.make_kv_pool(4)) is None


def test_a_layer_that_only_looks_alike_is_found_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load("llama", tmp_path)

    class Louder(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.weight, self.variance_epsilon = inner.weight, inner.variance_epsilon
            self._inner = [inner]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._inner[0](x) * 1.01

    layer = model.decoder.layers[1]  # type: ignore[union-attr, index]
    layer.input_layernorm = Louder(layer.input_layernorm)
    assert CpuDecoder.of(model, model.make_kv_pool(4)) is None
    assert "decodes through its modules" in caplog.text
    assert layer.self_attn.q_proj.prepacked is not None
