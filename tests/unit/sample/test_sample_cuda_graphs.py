"""What of decode graphs needs no CUDA device: layers call something else for a while, compiled for training or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from descant.sample.cuda_graphs import Columns, _Calls, _Inputs, _Layout, _Stage
from descant.sample.plan import SequenceStep


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


def test_a_step_ahead_has_the_columns_that_its_sequences_would_give() -> None:
    def step(number: int, further: int) -> SequenceStep:
        return SequenceStep(
            sequence=number,
            version=None,
            tokens=(number,),
            context=20 * number + further,
            pages=tuple(range(3 * number, 3 * number + 1 + number % 3)),
            sample=True,
            temperature=0.5 * number,
            top_k=-1,
            top_p=1.0,
            seed=2**64 - 1 - number,
            rng_offset=number + further,
        )

    layout = _Layout(rows=8, width=3, max_splits=8)
    ahead, plain = (_Stage(layout, 99, pinned=False) for _ in range(2))
    ahead.fill(Columns.of([step(n, 7) for n in range(8)]), [step(n, 7).pages for n in range(8)], 8)
    kept = [6, 1, 5]
    columns = Columns.of([step(n, 0) for n in range(8)]).ahead(kept).ahead([0, 1, 2])
    ahead.fill(columns, [step(n, 0).pages for n in kept], 8)
    sequences = [step(n, 2) for n in kept]
    plain.fill(Columns.of(sequences), [s.pages for s in sequences], 8)
    for name in ("positions", "temperature", "uniform"):
        assert (ahead.numpy[name] == plain.numpy[name]).all(), name
    for row, sequence in enumerate(sequences):
        assert tuple(ahead.numpy["table"][row, : len(sequence.pages)]) == sequence.pages
    assert (ahead.numpy["table"][3:, 0] == 99).all(), "what is left of another step writes to nobody's page"


def test_the_room_for_splits_doubles_and_what_is_left_of_it_does_nothing() -> None:
    layout = _Layout(rows=8, width=10, max_splits=8 * 5)
    stage = _Stage(layout, 99, pinned=False)

    def fill(positions: list[int]) -> int:
        stage.numpy["positions"][:8] = positions
        return stage.fill_splits(8, 128)

    assert fill([0, 5, 128, 127, 1, 2, 3, 4]) == 8
    assert sorted(stage.numpy["splits"][:8, 0]) == list(range(8)), "rows without a sequence have their split, too"
    assert fill([0, 5, 129, 127, 1, 2, 3, 4]) == 16
    assert list(stage.numpy["splits"][9:16, 0]) == [-1] * 7
    assert list(stage.numpy["partials"][2]) == [0, 2]
    assert fill([639] * 8) == 40, "no more than the longest sequences need"
    inputs = _Inputs(layout, torch.device("cpu"))
    assert inputs.used_bytes(40) == inputs.buffer.nbytes
    inputs.fields["splits"][15:] = 7
    assert int(inputs.buffer[: inputs.used_bytes(16)].sum()) == 5 * 7, "one of these splits is among the sixteen"
