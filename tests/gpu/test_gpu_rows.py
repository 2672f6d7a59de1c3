"""An optimiser step waits for what its rows wait for, and for nothing that the device was told afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.ranks.ops import Prefetch, Rows
from descant.ranks.settings import ReplicaSettings, SampleSettings
from descant.ranks.worker import Worker
from descant.testing.tiny import tiny_model
from descant.types import AdamParams, CreateModel, Lora, OptimStep, OptimStepOutput, Snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PARAMS = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
CYCLES = 2_000_000_000
"""That a stream is busy with something else: about a second."""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    source = ModelSource(name="tiny", directory=tiny_model("llama", tmp_path_factory.mktemp("tiny") / "tiny"))
    model = load_model(source, device=torch.device("cuda"), dtype=torch.float32, check=False, compile=False)
    return Worker(model, ReplicaSettings(sample=SampleSettings(max_num_seqs=2, kv_cache_bytes=1 << 20)))


def prepare(worker: Worker, model_id: str) -> None:
    """A model of the same numbers whatever its name, with a gradient, at rest."""
    worker.execute(Rows(commands=(CreateModel(model_id=model_id, trainable=Lora(rank=8, seed=1)),)))
    bank = worker.model.bank
    gradient = bank.gradient(model_id)
    gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda"))
    bank[model_id].gradient_free = False
    worker.train._record_rows_ready()


def numbers(worker: Worker, model_id: str) -> list[torch.Tensor]:
    bank = worker.model.bank
    return [
        bank.state(model_id).clone(),
        bank.gradient(model_id).clone(),
        bank.compute_slab(8)[bank[model_id].compute_slot].clone(),
    ]


def stepped(worker: Worker, model_id: str, before: Callable[[], None]) -> tuple[bool, float]:
    """Whether the step waited for what the stream was told last, and the norm that it found."""
    torch.cuda.synchronize()
    before()
    torch.cuda._sleep(CYCLES)
    busy = torch.cuda.current_stream().record_event()
    step = OptimStep(model_id=model_id, seq_id=1, adam_params=PARAMS)
    snapshot = Snapshot(model_id=model_id, seq_id=2, kind="sampler", for_disk=False)
    outcome, _ = worker.execute(Rows(commands=(step, snapshot)))
    waited = busy.query()
    assert isinstance(outcome.result, OptimStepOutput)
    return waited, outcome.result.metrics["grad_norm:mean"]


def test_what_came_after_its_gradient_is_not_waited_for(worker: Worker) -> None:
    prepare(worker, "first")
    worker.train._rows_ready = None
    waited, norm = stepped(worker, "first", lambda: None)
    assert waited, "without a time at which the rows were at rest it must wait"
    prepare(worker, "second")
    waited, again = stepped(worker, "second", lambda: None)
    assert not waited
    assert again == norm
    for one, other in zip(numbers(worker, "first"), numbers(worker, "second"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("moves", ["out and back", "back beside"])
def test_what_moved_its_rows_is_waited_for(worker: Worker, moves: str) -> None:
    bank, stays, moved = worker.model.bank, f"stays, {moves}", f"moved, {moves}"
    prepare(worker, stays)
    _, norm = stepped(worker, stays, lambda: None)
    prepare(worker, moved)

    def move() -> None:
        bank.residency.offload(bank[moved])
        if moves == "back beside":
            worker.execute(Prefetch(model_ids=(moved,), keep=()))

    if moves == "back beside":  # it was at rest before it came back, not before it was looked at
        move()
        worker.train._record_rows_ready()
        waited, again = stepped(worker, moved, lambda: None)
    else:
        waited, again = stepped(worker, moved, move)
    assert waited
    assert again == norm
    for one, other in zip(numbers(worker, stays), numbers(worker, moved), strict=True):
        assert torch.equal(one, other)


def test_many_steps_behind_busy_streams_are_those_of_quiet_ones(worker: Worker) -> None:
    """A step a turn, each read beside what the turn before it has left on the stream."""
    found = []
    for model_id, busy in (("quiet", False), ("busy", True)):
        prepare(worker, model_id)
        norms = []
        for seq_id in range(1, 20):
            gradient = worker.model.bank.gradient(model_id)
            noise = torch.randn(gradient.shape, generator=torch.Generator("cuda").manual_seed(seq_id), device="cuda")
            if busy:
                torch.cuda._sleep(3_000_000)
            gradient.copy_(noise)
            worker.model.bank[model_id].gradient_free = False
            worker.train._record_rows_ready()
            if busy:
                torch.cuda._sleep(3_000_000)
            step = OptimStep(model_id=model_id, seq_id=seq_id, adam_params=PARAMS)
            [outcome] = worker.execute(Rows(commands=(step,)))
            assert isinstance(outcome.result, OptimStepOutput)
            norms.append(outcome.result.metrics["grad_norm:mean"])
        found.append((norms, numbers(worker, model_id)))
    (quiet, rows), (same, others) = found
    assert quiet == same
    assert all(torch.equal(one, other) for one, other in zip(rows, others, strict=True))
