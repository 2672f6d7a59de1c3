"""Versions that come and go on CUDA: nobody waits for their copies, their slab stays where it is, and so do graphs."""

from __future__ import annotations

import gc
import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from descant.adapters import cuda_memory
from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.adapters.offload import SpillDirectory
from descant.adapters.slots import ComputeSlot, MappedRange, MappedSlots, memory_of
from descant.model.load import ModelSource, load_model
from descant.sample.cuda_graphs import CudaGraphs, DecodeKey
from descant.sample.plan import SampleLimits
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.testing import numbered_versions
from descant.testing.learner import LearnerHarness, tokens
from descant.testing.numbered_versions import is_whole
from descant.testing.paged_sampler import run
from descant.testing.tiny import EOS_TOKEN_ID, MAX_CONTEXT_LENGTH, VOCAB_SIZE, tiny_model
from descant.types import EncodedText, SampleRequest, SamplingParams, Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SITES = tuple(
    LoraSite(name=f"model.layers.{layer}.mlp.up_proj", group="mlp", in_features=1024, out_features=3072)
    for layer in range(8)
)
CYCLES = 2_000_000_000
"""That a stream is busy with something else: about a second."""


def bank_of(directory: Path, *, device: int, host: int) -> AdapterBank:
    """Room for so many versions of rank 16."""
    cuda = torch.device("cuda")
    row_bytes = 2 * AdapterBank(SITES, device=cuda, dtype=torch.bfloat16).layout(16).row
    return AdapterBank(
        SITES,
        device=cuda,
        dtype=torch.bfloat16,
        version_bytes=device * row_bytes,
        host_bytes=host * row_bytes,
        spill=SpillDirectory(directory),
    )


publish = partial(numbered_versions.publish, rank=16)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="compares the card's free memory: run it alone")
def test_memory_is_mapped_to_addresses_that_stay() -> None:
    driver = cuda_memory.Driver(torch.device("cuda"))
    first = torch.empty(64, dtype=torch.bfloat16, device="cuda").fill_(3)  # programs take memory when they first run
    assert bool((first == 3).all())
    del first
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before, total = torch.cuda.mem_get_info()
    num_bytes = total // driver.granularity * driver.granularity
    range = driver.reserve(num_bytes)
    part = 64 << 20
    assert torch.cuda.mem_get_info()[0] > before - part
    range.map(0, part)
    numbers = range.tensor
    address = numbers.data_ptr()
    assert numbers.device == driver.device
    assert len(numbers) == num_bytes
    rows = numbers[: 2 * part].view(torch.bfloat16).view(-1, 1 << 10)
    half = part // 2 // (1 << 10)
    rows[:half].fill_(3)
    range.map(part, 2 * part)
    rows[half:].fill_(5)
    assert range.tensor.data_ptr() == address
    assert bool((rows[:half] == 3).all())
    assert bool((rows[half:] == 5).all())
    on_host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    on_host.copy_(rows, non_blocking=True)
    torch.cuda.synchronize()
    assert on_host[0, 0] == 3
    assert on_host[-1, -1] == 5
    range.unmap(part, 2 * part)
    range.map(part, 3 * part)
    rows[half:].fill_(7)
    assert bool((rows[:half] == 3).all())
    assert torch.cuda.mem_get_info()[0] < before - 2 * part
    del rows, numbers, range
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > before - part, "given back with the last tensor"


def test_no_more_than_there_is() -> None:
    driver = cuda_memory.Driver(torch.device("cuda"))
    num_bytes = driver.device_bytes // driver.granularity * driver.granularity
    range = driver.reserve(2 * num_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        range.map(0, 2 * num_bytes)
    range.map(0, driver.granularity)
    range.tensor[: driver.granularity].fill_(1)
    torch.cuda.synchronize()


def test_what_torch_keeps_is_given_back_for_it() -> None:
    driver = cuda_memory.Driver(torch.device("cuda"))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    most = int(0.8 * free) // driver.granularity * driver.granularity
    kept = torch.empty(most, dtype=torch.uint8, device="cuda")
    del kept
    range = driver.reserve(most)
    range.map(0, most)
    range.tensor[-1].fill_(1)
    torch.cuda.synchronize()


def test_a_bank_on_cuda_has_slabs_that_stay() -> None:
    memory = memory_of(torch.device("cuda"))
    assert isinstance(memory, MappedRange)
    slots = memory.slots(ComputeSlot, 1 << 20, torch.bfloat16, torch.device("cuda"), fixed=True)
    assert isinstance(slots, MappedSlots)
    places = set()
    for slot in range(200):
        assert slots.allocate(zero=False) == slot
        slots.tensor[slot].fill_(slot)
        places.add((slots.tensor.data_ptr(), tuple(slots.tensor.shape)))
    assert len(places) == 1
    assert [int(slots.tensor[slot].float().mean()) for slot in range(200)] == list(range(200))


def test_nobody_waits_for_versions_that_leave_and_come_back(tmp_path: Path) -> None:
    """While the device is behind by a second. What is on the host by then is there bit for bit."""
    bank = bank_of(tmp_path, device=4, host=100)
    versions = [publish(bank, number) for number in range(12)]
    assert all(is_whole(bank, version) for version in versions)
    pinner = bank._versions._copies._pinner
    assert pinner is not None
    pinner.submit(lambda: None).result()  # what is spare is there
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    busy = torch.cuda.current_stream().record_event()
    for number in range(12, 14):
        versions.append(publish(bank, number))
    for version in versions[:2]:
        bank.pin_version(version)
        bank.unpin_version(version)
    assert not busy.query(), "the thread has waited for the device"
    assert all(is_whole(bank, version) for version in versions)
    stats = bank.stats()
    assert stats["versions_resident"] == 4
    assert stats["versions_host"] == len(versions) - 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host", [0, 5])
def test_versions_are_what_they_were_wherever_they_have_been(host: int, seed: int, tmp_path: Path) -> None:
    choose, bank = random.Random(seed), bank_of(tmp_path, device=4, host=host)
    live: list[Version] = []
    pinned: list[Version] = []
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for number in range(200):
        live.append(publish(bank, number))
        if choose.random() < 0.5:  # the device is behind
            noise = (noise @ noise).clamp(-1, 1)
        for _ in range(choose.randrange(4)):
            version = choose.choice(live)
            row = bank.pin_version(version)
            pinned.append(version)
            wrong += (bank.compute_slab(row.rank_bucket)[row.slot] != version.number).sum()
        while len(pinned) > choose.randrange(6):
            bank.unpin_version(pinned.pop(choose.randrange(len(pinned))))
        if len(live) > 25:
            bank.release(live.pop(choose.randrange(len(live))))
    assert wrong.item() == 0
    while pinned:
        bank.unpin_version(pinned.pop())
    bank.residency.settle()
    stats = bank.stats()
    assert stats["versions_resident"] <= 4
    assert stats["versions_host"] <= host
    assert stats["versions_disk"] > 0
    assert all(is_whole(bank, version) for version in live)


def test_graphs_stay_while_versions_come_and_go(tmp_path: Path) -> None:
    source = ModelSource(name="tiny", directory=tiny_model("llama", tmp_path / "tiny"))
    model = load_model(
        source,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        check=False,
        compile=False,
        spill_dir=tmp_path / "spill",
    )
    model.bank.version_bytes = 2 * 3 * model.bank.layout(8).row
    harness, sampler = LearnerHarness(model), Sampler(model, num_pages=20, max_rows=8, compile_decode=False)
    graphs = sampler._graphs
    assert isinstance(graphs, CudaGraphs)
    sampler.warm_up()
    harness.create("m", 8, seed=1, b_std=0.2)

    def sampled(version: Version) -> list[int]:
        scheduler = Scheduler(
            SampleLimits(
                num_pages=20,
                max_context_length=MAX_CONTEXT_LENGTH,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(EOS_TOKEN_ID,),
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_queued_requests=8,
            ),
            decode_text=lambda ids: "",
            fresh_seed=lambda: 0,
        )
        request = SampleRequest(
            request_id="r",
            version=version,
            prompt=(EncodedText(tokens=tokens(20, 1)),),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=12, temperature=0.0, seed=1, stop=()),
        )
        sampler.pin(version)
        scheduler.add(request)
        finished = run(scheduler, sampler)  # type: ignore[arg-type]
        sampler.unpin(version)
        return list(finished.tokens["r", 0])

    first = Version(model_id="m", number=0)
    model.bank.publish("m", first)
    expected = sampled(first)
    captured = dict(graphs._graphs)
    assert any(key.tiles for key in captured if isinstance(key, DecodeKey))
    for number in range(1, 100):
        version = Version(model_id="m", number=number)
        model.bank.publish("m", version)
        assert sampled(version) == expected
        if number % 10 == 0:
            harness.create(f"m{number}", 8, seed=number)
            assert sampled(first) == expected
    assert model.bank.stats()["version_loads"] >= 9
    assert all(graphs._graphs.get(key) is graph for key, graph in captured.items())
