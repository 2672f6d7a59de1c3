"""Memory that one long pass took goes back to the system, and passes that need it again are not made to wait often."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, repeat
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.ranks.heap_trimmer import INTERVAL_S, HeapTrimmer, resident_bytes
from descant.ranks.ops import Idle, Microbatch
from descant.ranks.settings import RankSettings, ReplicaSettings, SampleSettings
from descant.ranks.worker import Worker
from descant.testing.learner import datum
from descant.testing.tiny import tiny_model
from descant.train.runner import Part
from descant.types import ForwardBackward, Lora

MIB = 1 << 20


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def looks(resident: Iterator[int], *, until: float) -> list[float]:
    """When memory was trimmed, of a check each second. ``resident``: as each check finds it; after a trim, 100 MiB."""
    times: list[float] = []
    time, low = Time(), False

    def now_resident() -> int:
        nonlocal low
        if low:
            low = False
            return 100 * MIB
        return next(resident)

    def trim() -> None:
        nonlocal low
        times.append(time.now)
        low = True

    heap_trimmer = HeapTrimmer(margin_bytes=50 * MIB, seconds=time, resident=now_resident, trim=trim)
    while time.now < until:
        time.now += 1.0
        heap_trimmer.maybe_trim()
    return times


def test_what_came_once_goes_once() -> None:
    assert looks(chain([100 * MIB], repeat(140 * MIB)), until=100) == []
    assert looks(chain([100 * MIB, 900 * MIB], repeat(120 * MIB)), until=500) == [INTERVAL_S[0]]


def test_what_is_needed_again_goes_less_and_less_often() -> None:
    times = looks(chain([100 * MIB], repeat(900 * MIB)), until=1000)
    assert times == [5, 15, 35, 75, 155, 315, 475, 635, 795, 955]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep nothing")
def test_a_rank_returns_what_a_long_datum_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: this one's heap has room from other tests. Its C library keeps as much as it ever may;
    left to itself it keeps that or nothing, by what happens to lie on top of the heap."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(32 * MIB))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1024 * MIB))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        kept, left = process.submit(kept_and_left, tmp_path).result(timeout=120)
    assert kept > 48 * MIB, "otherwise there is nothing to see here"
    assert left < kept * 2 / 3


def kept_and_left(tmp_path: Path) -> tuple[int, int]:
    """Real memory, wide margins: of some 130 MiB that are kept here, a third must go."""
    directory = tiny_model("llama", tmp_path / "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=12,
                           max_position_embeddings=2048)  # fmt: skip
    source = ModelSource(name="llama", directory=directory)
    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
    settings = ReplicaSettings(rank=RankSettings(device="cpu"), sample=SampleSettings(kv_cache_bytes=16 * MIB))
    worker = Worker(model, settings)
    assert worker.info.idle_s is not None
    time = Time()
    worker.heap_trimmer = HeapTrimmer(margin_bytes=16 * MIB, seconds=time)
    model.bank.create("m", Lora(rank=8, seed=0))

    def train(seq_id: int, length: int) -> None:
        command = ForwardBackward(model_id="m", seq_id=seq_id, data=(datum(length, seq_id),), loss_fn="cross_entropy")
        part = Part(request=("m", seq_id), datum=0)
        [outcome] = worker.execute(
            Microbatch(opens=(command,), shares=(((part,),),), closes=(("m", seq_id),), backward=True, sampling=False)
        )
        assert not isinstance(outcome.result, Exception)

    train(1, 20)
    before = resident_bytes()
    train(2, 1900)
    train(3, 20)
    kept = resident_bytes() - before
    time.now += 2 * INTERVAL_S[0]
    worker.execute(Idle())
    return kept, resident_bytes() - before
