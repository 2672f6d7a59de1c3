"""What of decode graphs needs no CUDA device: layers call something else for a while, compiled for training or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from descant.sample.decode import _Calls


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_call_what_is_theirs_for_a_while(compiled: bool) -> None:
    calls: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        calls.append("graph")
        return graph.forward

    layers, x = [Double(), Double()], torch.ones(3)
    if compiled:
        for layer in layers:
            layer.compile(backend=backend)
        layers[0](x)
        assert calls == ["graph"]
    with _Calls(layers, [lambda x: 3 * x, lambda x: 5 * x], max_programs=9):
        assert torch.equal(layers[0](x), 3 * x)
        assert torch.equal(layers[1](x), 5 * x)
        assert torch._dynamo.config.recompile_limit == 9
    for layer in layers:
        assert torch.equal(layer(x), 2 * x)
        assert (layer._compiled_call_impl is not None) == compiled
        assert "forward" not in layer.__dict__
    assert calls == (["graph"] if compiled else []), "training's graph serves both layers and stays"
