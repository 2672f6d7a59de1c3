"""What of CUDA graphs needs no CUDA device: their inputs, and which graph computes what; layers that call something
else for a while. Passes run through a fake of the graphs, which computes what lies in their buffers
(``testing.fake_graphs``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from descant.adapters.layout import RANK_BUCKETS
from descant.adapters.slots import RowRef
from descant.model.load import ModelSource, load_model
from descant.sample import cuda_graphs
from descant.sample.cuda_graphs import (
    BUCKETS,
    PREFILL_ROWS,
    DecodeKey,
    LaunchedStep,
    PassTensors,
    PrefillKey,
    _Calls,
    token_buckets,
)
from descant.sample.graph_inputs import Columns, DecodeLayout, DecodeStage, Inputs, segments
from descant.sample.plan import SampleLimits, SequenceStep
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.testing.fake_graphs import FakeCudaGraphs
from descant.testing.learner import LearnerHarness
from descant.testing.paged_sampler import Finished, run
from descant.testing.tiny import MAX_CONTEXT_LENGTH, VOCAB_SIZE, tiny_model
from descant.types import EncodedText, SampleRequest, SamplingParams, Version


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

    layout = DecodeLayout(rows=8, width=3, max_splits=8)
    ahead, plain = (DecodeStage(layout, 99, pinned=False) for _ in range(2))
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


def test_the_room_for_splits_is_one_of_few_and_what_is_left_of_it_does_nothing() -> None:
    layout = DecodeLayout(rows=8, width=10, max_splits=8 * 5)
    stage = DecodeStage(layout, 99, pinned=False)

    def fill(positions: list[int]) -> int:
        stage.numpy["positions"][:8] = positions
        return stage.fill_splits(8, 128)

    assert fill([0, 5, 128, 127, 1, 2, 3, 4]) == 8
    assert sorted(stage.numpy["splits"][:8, 0]) == list(range(8)), "rows without a sequence have their split, too"
    assert fill([0, 5, 129, 127, 1, 2, 3, 4]) == 32
    assert list(stage.numpy["splits"][9:32, 0]) == [-1] * 23
    assert list(stage.numpy["partials"][2]) == [0, 2]
    assert fill([639] * 8) == 40, "no more than the longest sequences need"
    inputs = Inputs(layout.fields(), torch.device("cpu"))
    assert inputs.used_bytes(40) == inputs.buffer.nbytes
    inputs.fields["splits"][15:] = 7
    assert int(inputs.buffer[: inputs.used_bytes(16)].sum()) == 5 * 7, "one of these splits is among the sixteen"


# --------------------------------------------------------------------------------------------------------- prefill
NUM_PAGES = 40
RANKS = {"a": 4, "b": 8, "c": 16, "d": 128}


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_a_pass_is_padded_by_a_bounded_part(max_tokens: int, num_tokens: int) -> None:
    buckets = token_buckets(max_tokens)
    assert buckets[-2:-1] < (max_tokens,) <= buckets[-1:]
    assert list(buckets) == sorted(set(buckets))
    assert all(size % 64 == 0 for size in buckets)
    num_tokens = min(num_tokens, max_tokens)
    size = next(size for size in buckets if size >= num_tokens)
    if num_tokens > 64:
        assert size < 2 * num_tokens
    if num_tokens > 256:
        assert size <= 1.5 * num_tokens


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(0, 1)), max_size=12))
def test_neighbours_of_one_adapter_are_one_segment(drawn: list[tuple[int, int, int]]) -> None:
    """Each has an adapter or none (0), a length, and a gap in front of it."""
    starts, end, stream = [], 0, {}
    for slot, length, gap in drawn:
        starts.append(end + gap)
        end = starts[-1] + length
        stream |= dict.fromkeys(range(starts[-1], end), slot)
    rows = [RowRef(rank_bucket=8, slot=slot) if slot else None for slot, _, _ in drawn]
    found = segments(rows, [length for _, length, _ in drawn], starts)
    covered = {n: row.slot for start, end, row in found for n in range(start, end)}
    assert covered == {n: slot for n, slot in stream.items() if slot}
    for (_, end, row), (start, _, other) in pairwise(found):
        assert end < start or row != other


class Desk:
    """The same requests through the modules and through graphs, with a pool and a scheduler of their own each."""

    def __init__(self, directory: Path, ranks: dict[str, int] = RANKS):
        self.model = load_model(
            ModelSource(name="tiny", directory=tiny_model("qwen3", directory)),
            device=torch.device("cpu"),
            dtype=torch.float32,
            check=False,
        )
        self.harness = LearnerHarness(self.model)
        self.versions: dict[str, Version | None] = {"": None}
        for number, (name, rank) in enumerate(ranks.items()):
            self.harness.create(name, rank, seed=number, b_std=0.2)
            self.publish(name)
        self.sampler = Sampler(self.model, num_pages=NUM_PAGES)

    def publish(self, name: str) -> None:
        version = Version(model_id=name, number=1)
        self.model.bank.publish(name, version)
        self.versions[name] = version

    def ask(self, number: int, name: str, length: int, **fields: Any) -> SampleRequest:
        params = {"seed": number, "stop": (), "max_tokens": 6, "temperature": float(number % 2)}
        prompt = np.random.default_rng(length).integers(3, VOCAB_SIZE, length).astype(np.int32)
        return SampleRequest(
            request_id=f"r{number}",
            version=self.versions[name],
            prompt=(EncodedText(tokens=prompt),),
            num_samples=1,
            sampling_params=SamplingParams(**{**params, **fields.pop("params", {})}),
            **fields,
        )

    def run(self, wanted: Sequence[SampleRequest], *, then: Sequence[SampleRequest] = ()) -> Finished:
        """``then``: when the others are done."""
        scheduler = Scheduler(
            SampleLimits(
                max_num_seqs=8,
                num_pages=NUM_PAGES,
                max_num_batched_tokens=100,
                max_queued_requests=100,
                max_context_length=MAX_CONTEXT_LENGTH,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(),
            ),
            decode_text=lambda tokens: "",
            fresh_seed=lambda: 0,
        )
        finished = Finished()
        for part in (wanted, then):
            for request in part:
                self.sampler.pin(request.version)
                scheduler.add(request)
            run(scheduler, self.sampler, finished)  # type: ignore[arg-type]
            for request in part:
                self.sampler.unpin(request.version)
        return finished

    def graphs(self, **options: Any) -> FakeCudaGraphs:
        return FakeCudaGraphs.install(self.sampler, max_tokens=100, **options)


def assert_equal(found: Finished, expected: Finished) -> None:
    assert found.tokens == expected.tokens
    for key, logprobs in expected.logprobs.items():
        np.testing.assert_allclose(found.logprobs[key], logprobs, atol=1e-4)
    assert found.prompts.keys() == expected.prompts.keys()
    for name, scores in expected.prompts.items():
        np.testing.assert_allclose(found.prompts[name].logprobs, scores.logprobs, atol=1e-4)
    assert found.hit_tokens == expected.hit_tokens


@pytest.mark.parametrize("captures", [False, True])
def test_prompts_of_graphs_equal_the_modules(tmp_path: Path, captures: bool) -> None:
    """Of several adapters in chunks, beside sequences that decode, cached or not, scored or not."""
    desk, names = Desk(tmp_path), ["", *RANKS]
    lengths = (1, 130, 64, 99, 7, 200, 33, 65, 12, 150)
    wanted = [desk.ask(n, names[n % 5], length, prompt_logprobs=n in (1, 5)) for n, length in enumerate(lengths)]
    again = [desk.ask(20 + n, names[n % 5], length) for n, length in enumerate(lengths)]
    expected = desk.run(wanted, then=again)
    graphs = desk.graphs(captures=captures)
    assert_equal(desk.run(wanted, then=again), expected)
    assert sum(expected.hit_tokens.values()) > 0
    assert graphs.ahead > 5
    captured = [key for key in graphs.captured if isinstance(key, PrefillKey)]
    assert all(key.tokens in (64, 128) for key in captured)
    assert bool(captured) == captures
    assert len(graphs.prefills) > 2 * len(captured)


def test_rank_classes_come_together_in_one_graph(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    graphs = desk.graphs()

    def captured(*names: str) -> list[tuple[int, ...]]:
        before = len(graphs.captured)
        desk.run([desk.ask(n, name, 20, params={"max_tokens": 1}) for n, name in enumerate(names)])
        return [key.max_ranks for key in graphs.captured[before:] if isinstance(key, PrefillKey)]

    assert captured("") == [()]
    assert captured("b", "c") == [(32,)]
    assert captured("c", "") == captured("b") == captured("", "") == []
    assert captured("d") == [(32, 128)]
    assert captured("b", "d") == captured("c") == []


def test_a_step_with_prompts_is_followed_by_one_ahead(tmp_path: Path) -> None:
    """Of the prompts' next tokens, too, unless they asked for scores; and of none where nothing decoded before."""
    desk = Desk(tmp_path)
    first = desk.ask(0, "a", 10, params={"max_tokens": 40})
    wanted = [first, *(desk.ask(n, "b", 150 + n, params={"max_tokens": 10}) for n in range(1, 4))]
    expected = desk.run(wanted)
    graphs, steps = desk.graphs(), []
    step = desk.sampler.step

    def noted(plan: Any) -> Any:
        before = graphs.ahead
        outputs = step(plan)
        prompts = sum(len(sequence.tokens) > 1 for sequence in plan.sequences)
        steps.append((prompts, len(plan.sequences), graphs.ahead - before))
        return outputs

    desk.sampler.step = noted  # type: ignore[method-assign]
    assert_equal(desk.run(wanted), expected)
    assert steps[0] == (2, 2, 0), "prompts alone"
    mixed = [ahead for prompts, sequences, ahead in steps[1:] if 0 < prompts < sequences]
    assert len(mixed) > 3
    assert all(mixed)


def test_graphs_stay_when_a_slab_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, {"a": 8})
    wanted = [desk.ask(0, "a", 20)]
    expected = desk.run(wanted)
    graphs = desk.graphs()
    assert_equal(desk.run(wanted), expected)
    first = graphs.captured.copy()
    assert_equal(desk.run(wanted), expected)
    assert graphs.captured == first
    bank = desk.model.bank  # on a CPU slabs never move
    moved = {rank_bucket: bank.compute_slab(rank_bucket).clone() for rank_bucket in RANK_BUCKETS}
    monkeypatch.setattr(bank, "compute_slab", moved.__getitem__)
    assert_equal(desk.run(wanted), expected)
    assert graphs.captured == first


def test_a_long_pass_is_not_captured_nor_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, {"a": 8})
    params = sum(site.in_features * site.out_features for site in desk.model.bank.sites)
    monkeypatch.setattr(cuda_graphs, "MAX_CAPTURED_FLOPS", 2.0 * 70 * params)
    wanted = [desk.ask(0, "a", 50), desk.ask(1, "a", 37)]
    expected = desk.run(wanted)
    graphs = desk.graphs()
    assert_equal(desk.run(wanted), expected)
    assert not any(isinstance(key, PrefillKey) for key in graphs.captured)
    assert [key.tokens for key in graphs.prefills] == [87]


def test_what_cannot_be_captured_is_computed_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Uncapturable(FakeCudaGraphs):
        def _capture(self, key: DecodeKey | PrefillKey) -> PassTensors:
            if isinstance(key, PrefillKey):
                raise RuntimeError("operation not permitted when stream is capturing")
            return super()._capture(key)

    desk = Desk(tmp_path, {"a": 8})
    wanted = [desk.ask(n, "a", 20 + n) for n in range(12)]
    expected = desk.run(wanted)
    graphs = Uncapturable.install(desk.sampler, max_tokens=100)
    with caplog.at_level(logging.WARNING):
        assert_equal(desk.run(wanted), expected)
    assert [record.message for record in caplog.records] == [
        "prefill is not captured, which makes sampling slower: operation not permitted when stream is capturing"
    ]
    assert any(isinstance(key, DecodeKey) for key in graphs.captured)


def test_a_capture_that_finds_no_memory_is_tried_again_and_then_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Short(FakeCudaGraphs):
        failures = 1

        def _capture(self, key: DecodeKey | PrefillKey) -> PassTensors:
            if isinstance(key, PrefillKey) and self.failures:
                self.failures -= 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super()._capture(key)

    desk = Desk(tmp_path, {"a": 8})
    wanted = [desk.ask(0, "a", 20)]
    expected = desk.run(wanted)
    for failures in (1, 2):
        graphs = Short.install(desk.sampler, max_tokens=100)
        graphs.failures = failures  # type: ignore[attr-defined]
        assert_equal(desk.run(wanted), expected)
        assert any(isinstance(key, PrefillKey) for key in graphs.captured) == (failures == 1)
        assert ("prefill is not captured" in caplog.text) == (failures == 2)


def test_a_step_ahead_serves_a_sequence_only_where_it_wrote_the_tokens_key() -> None:
    def step(context: int, *pages: int) -> SequenceStep:
        return SequenceStep(
            sequence=5,
            version=None,
            tokens=(1,),
            context=context,
            pages=pages,
            sample=True,
            temperature=0.0,
            top_k=-1,
            top_p=1.0,
            seed=0,
            rng_offset=0,
        )

    own, nothing = step(63, 7, 8), torch.empty(0)
    ahead = LaunchedStep([own], Columns.of([own]), nothing, nothing, np.zeros((2, 1)), None, ahead=True)
    assert ahead.index(step(64, 7, 8)) == 0
    assert ahead.index(step(64, 7, 8, 9)) == 0
    assert ahead.index(step(64, 7, 9)) is None, "preempted, and here again with the pages of its prefix"
    assert ahead.index(step(65, 7, 8)) is None


def test_more_prompts_than_a_graph_has_rows_for_are_several_passes(tmp_path: Path) -> None:
    desk = Desk(tmp_path, {"a": 8})
    wanted = [desk.ask(n, "a", 2, params={"max_tokens": 1}) for n in range(PREFILL_ROWS + 3)]
    sampler = desk.sampler
    graphs = desk.graphs()
    steps = [
        SequenceStep(
            sequence=n,
            version=request.version,
            tokens=tuple(request.prompt[0].tokens.tolist()),
            context=0,
            pages=(n,),
            sample=True,
            temperature=0.0,
            top_k=-1,
            top_p=1.0,
            seed=0,
            rng_offset=0,
        )
        for n, request in enumerate(wanted)
    ]
    assert graphs.max_prefill_rows == PREFILL_ROWS >= BUCKETS[0]
    passes = sampler._passes(graphs, steps)
    assert [len(part) for part in passes] == [PREFILL_ROWS, 3]
    assert [s.sequence for part in passes for s in part] == list(range(len(steps)))
