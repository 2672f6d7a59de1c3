"""The formulas of the limit, by hand on a tiny model, and the metrics that tell the fraction of it."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from descant.model.limit import Arithmetic, matrix_rate, peak_bytes, squares
from descant.model.load import ModelSource, load_model
from descant.model.passes import Prefix
from descant.testing.studio import Studio, datum
from descant.testing.tiny import tiny_model
from descant.train.step import Learner
from descant.types import LoraConfig

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    directory: Path = tiny_model("llama", tmp_path_factory.mktemp("limit") / "llama")
    return Studio(
        load_model(ModelSource(name="tiny", directory=directory), device=CPU, dtype=torch.float32, check=False)
    )


def test_the_formulas(studio: Studio) -> None:
    model, config = studio.model, studio.model.network.config
    arithmetic = Arithmetic.of(model)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner
    assert arithmetic.linear_params == layers * layer + hidden * config.vocab_size
    assert arithmetic.attention == layers * queries
    without_head = sum(3 * (s.in_features + s.out_features) for s in model.bank.sites if s.group != "unembed")
    assert arithmetic.lora_params(LoraConfig(rank=3, train_unembed=False)) == without_head
    assert arithmetic.flops(10, 7, 50, backward=True) == (
        4 * 10 * arithmetic.linear_params + 6 * 7 + 6 * 50 * layers * queries
    )
    assert arithmetic.flops(10, 7, 50, backward=False) == (
        2 * 10 * arithmetic.linear_params + 2 * 7 + 2 * 50 * layers * queries
    )


def test_what_a_shared_prefix_saves() -> None:
    assert squares((5, 3), ()) == [25, 9]
    assert squares((5, 3), (None, Prefix(parent=0, length=4))) == [25, 49 - 16]


def test_metrics_tell_the_fraction(studio: Studio) -> None:
    studio.create("a", 4)
    studio.create("b", 8)
    studio.learner = Learner(studio.model, seconds=count(0.0, 2.0).__next__, matrix_rate=1e9)  # a pass takes 2 s
    first = studio.command("a", datum(6), datum(9, 1), forward_only=True)
    second = studio.command("b", datum(11, 2))
    outputs = studio.run(first, second)
    arithmetic = Arithmetic.of(studio.model)
    params = {rank: arithmetic.lora_params(LoraConfig(rank=rank)) for rank in (4, 8)}
    flops = arithmetic.flops(15, 15 * params[4], 36 + 81, backward=False)
    flops += arithmetic.flops(11, 11 * params[8], 121, backward=True)
    for output in outputs:
        assert output.metrics["tokens_per_s:mean"] == 26 / 2
        assert output.metrics["fraction_of_limit:mean"] == pytest.approx(flops / 2 / 1e9)
        assert 1 << 20 < output.metrics["memory_bytes:max"] <= peak_bytes(CPU)


def test_the_rate_is_products_over_time() -> None:
    rate = matrix_rate(CPU, torch.float32, rounds=1, seconds=count(0.0, 0.5).__next__)
    assert rate == 2 * 2 * 1024**3 / 0.5
