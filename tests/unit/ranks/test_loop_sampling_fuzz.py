"""Sampling through the turn loop on a tiny real model, in any order, while versions come and go and a model trains."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from descant.errors import NotFound, Overloaded
from descant.model.load import ModelSource, load_model
from descant.ranks.ops import Stats
from descant.ranks.replica import Replica
from descant.ranks.worker import Worker
from descant.service.backends import Backend
from descant.testing.engine import Sampled, frozen, request, sampled, trained
from descant.testing.ranks import SETTINGS, changed
from descant.testing.tiny import tiny_model
from descant.testing.trainer import Model
from descant.types import EncodedText, SampleRequest, Version

NUM_REQUESTS = 150


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    directory = tiny_model("llama", tmp_path_factory.mktemp("tiny"))
    torch.set_num_threads(1)
    source = ModelSource(name="tiny", directory=Path(directory))
    model = load_model(source, device=torch.device("cpu"), dtype=torch.bfloat16, check=False)
    limits = {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 50,
        "max_queued_requests": 50,
        "kv_cache_bytes": 6 * 64 * model.kv_bytes_per_token(),
    }
    return Worker(model, changed(SETTINGS, sample=limits))


async def test_any_order_of_anything_on_a_real_model(worker: Worker) -> None:
    rng = random.Random(5)
    replica = await Replica.in_process(lambda phase: worker)
    backend = Backend(facts=replica.facts, trainer=replica, engine=replica)
    models = [await trained(backend, name, steps=1) for name in ("a", "b")]
    published: dict[str, list[Version]] = {model.model_id: [] for model in models}
    families = [[rng.randrange(4, 200) for _ in range(140)] for _ in range(3)]

    async def publish(model: Model) -> None:
        ref = await frozen(model, for_disk=False)
        await replica.publish(ref)
        published[model.model_id].append(ref.version)

    for model in models:
        await publish(model)

    def wanted(number: int) -> SampleRequest:
        versions = [v for of_model in published.values() for v in of_model]
        version, inflight = rng.choice([None, *versions]), rng.random() < 0.4
        if inflight and version is not None:
            version = published[version.model_id][-1]
        prompt = [*rng.choice(families)[: rng.choice([40, 50, 64, 120])], rng.randrange(4, 200)]
        return request(
            version,
            prompt=(EncodedText(tokens=np.array(prompt, np.int32)),),
            request_id=f"fuzz-{number}",
            num_samples=rng.choice([1, 1, 2]),
            max_tokens=rng.choice([1, 5, 30, 40]),
            seed=number,
            temperature=1.0,
            stream=rng.random() < 0.3,
            inflight=inflight,
            owner=rng.choice(["alice", "bob", "carol"]),
        )

    requests: dict[str, SampleRequest] = {}
    running: dict[str, asyncio.Task[Sampled]] = {}
    cancelled: set[str] = set()
    while len(requests) < NUM_REQUESTS:
        for _ in range(rng.randrange(8)):
            entry = wanted(len(requests))
            requests[entry.request_id] = entry
            running[entry.request_id] = asyncio.create_task(sampled(replica, entry))
        await asyncio.sleep(0)
        match rng.randrange(6):
            case 0 | 1:
                model = rng.choice(models)
                await model.train(rng.randrange(2))
                await publish(model)
            case 2:
                of_model = published[rng.choice(models).model_id]
                if len(of_model) > 2:
                    await replica.release(of_model.pop(0))
            case 3:
                request_id = rng.choice(list(requests))
                cancelled.add(request_id)
                if rng.random() < 0.5:
                    running[request_id].cancel()
                else:
                    await replica.cancel(request_id)
            case _:
                await sampled(replica, request(max_tokens=rng.randrange(1, 6)))
    outcomes = dict(zip(running, await asyncio.gather(*running.values(), return_exceptions=True), strict=True))

    compared = []
    for request_id, outcome in outcomes.items():
        entry = requests[request_id]
        still = entry.version is None or entry.version in published[entry.version.model_id]
        if isinstance(outcome, Sampled) and request_id not in cancelled and still and not entry.inflight:
            compared.append((outcome, await sampled(replica, replace(entry, request_id=f"again {request_id}"))))
        if len(compared) == 15:
            break

    loop: Any = replica._link._turn_loop  # type: ignore[union-attr]
    stats, bank = loop._sampling._schedulers[0].stats(), worker.execute(Stats())
    assert stats["used_pages"] == stats["running"] == stats["waiting"] == 0
    assert loop._sampling._open == replica._pending == {}
    assert worker.sample is not None
    assert worker.sample.sampler._pins == {}
    assert bank["versions_pinned"] == bank["scratch_rows"] == bank["adapters_pinned"] == 0
    assert stats["hit_tokens"] > 100, "how many were taken is the machine's"
    assert stats["mid_sequence_updates"] > 0
    assert stats["preemptions"] > 0
    for versions in published.values():
        for version in versions:
            await replica.release(version)
    assert worker.execute(Stats())["versions_resident"] == 0
    assert loop._sampling._newest == {}
    assert loop._sampling._schedulers[0].cached_versions() <= {None}, "prefixes of versions that are gone"
    # A version may be gone, or the queue full, when a request comes.
    refused = {r for r, outcome in outcomes.items() if isinstance(outcome, (NotFound, Overloaded))}
    assert len(refused) < 5 * NUM_REQUESTS / 6, "on a machine that is busy many come to a full queue"
    broken = {r: o for r, o in outcomes.items() if isinstance(o, BaseException) and r not in cancelled | refused}
    assert not broken
    for outcome, again in compared:
        assert outcome.tokens() == again.tokens()
        assert outcome.logprobs() == again.logprobs()
    await replica.close()
