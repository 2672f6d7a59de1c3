"""Model FLOPs, by hand on a tiny model, and the metrics with MFU."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from descant.model.flops import FlopCounter, measure_peak_flops, peak_bytes, squares
from descant.model.forward_batch import Prefix
from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness, datum
from descant.testing.tiny import tiny_model
from descant.types import Lora

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> LearnerHarness:
    directory: Path = tiny_model("llama", tmp_path_factory.mktemp("flops") / "llama")
    return LearnerHarness(
        load_model(ModelSource(name="tiny", directory=directory), device=CPU, dtype=torch.float32, check=False)
    )


def test_the_formulas(harness: LearnerHarness) -> None:
    model, config = harness.model, harness.model.network.config
    flop_counter = FlopCounter.of(model)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner
    assert flop_counter.linear_params == layers * layer + hidden * config.vocab_size
    assert flop_counter.attention == layers * queries
    without_head = sum(3 * (s.in_features + s.out_features) for s in model.bank.sites if s.group != "unembed")
    assert flop_counter.lora_params(Lora(rank=3, train_unembed=False)) == without_head
    assert flop_counter.flops(10, 7, 50, backward=True) == (
        4 * 10 * flop_counter.linear_params + 6 * 7 + 6 * 50 * layers * queries
    )
    assert flop_counter.flops(10, 7, 50, backward=False) == (
        2 * 10 * flop_counter.linear_params + 2 * 7 + 2 * 50 * layers * queries
    )


def test_what_a_shared_prefix_saves() -> None:
    assert squares((5, 3), ()) == [25, 9]
    assert squares((5, 3), (None, Prefix(parent=0, length=4))) == [25, 49 - 16]


def test_metrics_have_mfu(harness: LearnerHarness) -> None:
    harness = LearnerHarness(harness.model, seconds=count(0.0, 2.0).__next__, peak_flops=1e9)  # a pass takes 2 s
    harness.create("a", 4)
    harness.create("b", 8)
    first = harness.command("a", datum(6), datum(9, 1), forward_only=True)
    second = harness.command("b", datum(11, 2))
    outputs = harness.run(first, second)
    flop_counter = FlopCounter.of(harness.model)
    params = {rank: flop_counter.lora_params(Lora(rank=rank)) for rank in (4, 8)}
    flops = flop_counter.flops(15, 15 * params[4], 36 + 81, backward=False)
    flops += flop_counter.flops(11, 11 * params[8], 121, backward=True)
    for output in outputs:
        assert output.metrics["tokens_per_s:mean"] == 26 / 2
        assert output.metrics["mfu:mean"] == pytest.approx(flops / 2 / 1e9)
        assert 1 << 20 < output.metrics["memory_bytes:max"] <= peak_bytes(CPU)


def test_the_rate_is_products_over_time() -> None:
    rate = measure_peak_flops(CPU, torch.float32, rounds=1, seconds=count(0.0, 0.5).__next__)
    assert rate == 2 * 2 * 1024**3 / 0.5
