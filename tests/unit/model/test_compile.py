"""Compiled layers against plain ones, and one graph for whatever comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from descant.model.base import BaseModel
from descant.model.forward_batch import ForwardBatch, PagedKV, Segment
from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness, datum, some_commands
from descant.testing.tiny import tiny_model

torch.set_num_threads(1)

RANKS = {"a": 4, "b": 8, "c": 16, "d": 64}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BaseModel]:
    directory = tiny_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3")
    models: dict[tuple[torch.dtype, bool], BaseModel] = {}

    def make(dtype: torch.dtype, *, compile: bool) -> BaseModel:
        if (dtype, compile) not in models:
            source = ModelSource(name="qwen3", directory=directory)
            models[dtype, compile] = load_model(source, device=torch.device("cpu"), dtype=dtype, compile=compile)
            assert models[dtype, compile].compiled is compile
        return models[dtype, compile]

    return make


@pytest.fixture
def gradients(load: Callable[..., BaseModel]) -> Callable[..., dict[str, torch.Tensor]]:
    def of(dtype: torch.dtype, *, compile: bool) -> dict[str, torch.Tensor]:
        harness = fresh(load(dtype, compile=compile))
        harness.run(*some_commands(harness, list(RANKS)))
        return {name: harness.gradient(name) for name in RANKS}

    return of


def fresh(model: BaseModel) -> LearnerHarness:
    harness = LearnerHarness(model)
    for number, (name, rank) in enumerate(RANKS.items()):
        model.bank.delete(name)
        harness.create(name, rank, seed=number)
    return harness


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_gradients_equal_those_of_plain_layers(gradients: Callable[..., dict[str, torch.Tensor]]) -> None:
    plain, compiled = (gradients(torch.float32, compile=compile) for compile in (False, True))
    for name in RANKS:
        assert relative(compiled[name], plain[name]) <= 1e-5, name


def test_what_datums_begin_with_in_common_is_computed_once(load: Callable[..., BaseModel]) -> None:
    found = {}
    for compile in (False, True):
        harness = fresh(load(torch.float32, compile=compile))
        stems = [datum(40 + 7 * number, 0) for number in range(4)]  # each continues the one before
        other = [datum(30, 1), datum(30, 1, weights=[0.1 * number for number in range(30)])]
        [output] = harness.run(harness.command("a", *stems, *other))
        assert output.metrics["tokens_computed:sum"] == 40 + 7 * 3 + 30
        found[compile] = harness.gradient("a")
    assert relative(found[True], found[False]) <= 1e-5


def test_bf16_is_as_near_to_fp32_as_plain_layers_are(gradients: Callable[..., dict[str, torch.Tensor]]) -> None:
    """Fused operations round less often: they need not agree with plain ones, but be no worse."""
    exact = gradients(torch.float32, compile=False)
    plain, compiled = (gradients(torch.bfloat16, compile=compile) for compile in (False, True))
    for name in RANKS:
        assert relative(compiled[name], exact[name]) <= 1.1 * relative(plain[name], exact[name]) + 3e-3, name


def test_logprobs_of_a_pass_without_backward_equal_those_with(load: Callable[..., BaseModel]) -> None:
    harness = fresh(load(torch.float32, compile=True))
    (trained,) = harness.run(harness.command("b", datum(40, 1)))
    (scored,) = harness.run(harness.command("b", datum(40, 1), forward_only=True))
    (plain,) = fresh(load(torch.float32, compile=False)).run(harness.command("b", datum(40, 1)))
    want = torch.from_numpy(plain.loss_fn_outputs[0]["logprobs"])
    for output in (trained, scored):
        assert (torch.from_numpy(output.loss_fn_outputs[0]["logprobs"]) - want).abs().max() <= 1e-5


def test_recomputed_layers_have_the_same_graphs(load: Callable[..., BaseModel]) -> None:
    model = load(torch.float32, compile=True)
    found = []
    before = counters["stats"]["unique_graphs"]
    for layers in (0, 1, 2):
        harness = fresh(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "_recomputed_layers", lambda num_tokens, layers=layers: layers)
            harness.run(*some_commands(harness, list(RANKS)))
        found.append({name: harness.gradient(name) for name in RANKS})
    assert counters["stats"]["unique_graphs"] == before
    for name in RANKS:
        assert found[0][name].norm() > 0
        for again in found[1:]:
            assert relative(again[name], found[0][name]) <= 1e-6, name


def test_no_pass_makes_another_graph(load: Callable[..., BaseModel]) -> None:
    harness = fresh(load(torch.float32, compile=True))
    before = counters["stats"]["unique_graphs"]
    harness.run(harness.command("a", datum(33, 1)))
    harness.run(harness.command("b", datum(200, 1), datum(3, 2)), harness.command("c", datum(64, 3)))
    harness.run(harness.command("a", datum(1, 1)))
    harness.run(*(harness.command(name, *(datum(length, length) for length in (5, 8, 90))) for name in RANKS))
    harness.run(harness.command("d", datum(100, 1), forward_only=True))
    harness.bank.delete("b")
    harness.create("e", 8, seed=9)
    harness.run(harness.command("e", datum(17, 1)), harness.command("c", datum(16, 1)))
    harness.bank.delete("e")
    run_over_pages(harness.model)
    assert counters["stats"]["unique_graphs"] == before
    assert not counters["recompile_limit"]


def run_over_pages(model: BaseModel) -> None:
    """As the sampler does, with an adapter and without."""
    positions = torch.arange(20)
    segment = Segment(start=0, end=20, row=model.bank.row("c"))
    for segments in ((), (segment,)):
        kv = PagedKV(pool=model.make_kv_pool(1), page_table=torch.tensor([[0]]), context_lens=(0,))
        with torch.no_grad():
            model.decoder_forward(positions + 3, positions, ForwardBatch(seq_lens=(20,), segments=segments, kv=kv))
            model.decoder_forward(positions + 3, positions, ForwardBatch(seq_lens=(20,)))


def test_what_a_pass_needs_lives_as_long_as_its_graph(load: Callable[..., BaseModel]) -> None:
    """The layers know the pass by a number only: the caller may drop it before the backward."""
    model = load(torch.float32, compile=True)
    harness = fresh(model)
    adapter = model.bank["b"]
    segment = Segment(start=0, end=20, row=model.bank.row("b"), gradient=adapter.gradient_slot)
    positions = torch.arange(20)
    hidden = model.decoder_forward(positions + 3, positions, ForwardBatch(seq_lens=(20,), segments=(segment,)))[0]
    hidden.backward(torch.ones_like(hidden))
    assert harness.gradient("b").norm() > 0


def test_without_a_compiler_it_runs_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = ModelSource(name="llama", directory=tiny_model("llama", tmp_path / "llama"))
    torch._dynamo.reset()
    no_compiler = {"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}
    with torch._inductor.config.patch(no_compiler), caplog.at_level("WARNING", logger="descant.model.base"):
        model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, compile=True)
        assert "llama runs without torch.compile" in caplog.text
        assert not model.compiled
        harness = fresh(model)
        harness.run(*some_commands(harness, ["a", "b"]))
    plain = fresh(load_model(source, device=torch.device("cpu"), dtype=torch.float32))
    plain.run(*some_commands(plain, ["a", "b"]))
    for name in ("a", "b"):
        assert relative(harness.gradient(name), plain.gradient(name)) <= 1e-6
