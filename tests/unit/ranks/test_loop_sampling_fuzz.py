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
from descant.ranks.replica import Replica
from descant.ranks.worker import Worker
from descant.service.backends import Backend
from descant.testing.engine import Sampled, frozen, request, sampled, trained
from descant.testing.ranks import SETTINGS
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
    kv_bytes = 6 * 64 * model.kv_bytes_per_token()
    return Worker(model, replace(SETTINGS, kv_bytes=kv_bytes, max_running=5, max_waiting=50, step_tokens=50))


async def test_any_order_of_anything_on_a_real_model(worker: Worker) -> None:
    chance = random.Random(5)
    replica = await Replica.in_process(lambda phase: worker)
    backend = Backend(facts=replica.facts, trainer=replica, engine=replica)
    models = [await trained(backend, name, steps=1) for name in ("a", "b")]
    published: dict[str, list[Version]] = {model.model_id: [] for model in models}
    families = [[chance.randrange(4, 200) for _ in range(140)] for _ in range(3)]

    async def publish(model: Model) -> None:
        ref = await frozen(model, for_disk=False)
        await replica.publish(ref)
        published[model.model_id].append(ref.version)

    for model in models:
        await publish(model)

    def wanted(number: int) -> SampleRequest:
        versions = [v for of_model in published.values() for v in of_model]
        version, inflight = chance.choice([None, *versions]), chance.random() < 0.4
        if inflight and version is not None:
            version = published[version.model_id][-1]
        prompt = [*chance.choice(families)[: chance.choice([40, 50, 64, 120])], chance.randrange(4, 200)]
        return request(
            version,
            prompt=(EncodedText(tokens=np.array(prompt, np.int32)),),
            request_id=f"fuzz-{number}",
            num_samples=chance.choice([1, 1, 2]),
            max_tokens=chance.choice([1, 5, 30, 40]),
            seed=number,
            temperature=1.0,
            stream=chance.random() < 0.3,
            inflight=inflight,
        )

    requests: dict[str, SampleRequest] = {}
    running: dict[str, asyncio.Task[Sampled]] = {}
    cancelled: set[str] = set()
    while len(requests) < NUM_REQUESTS:
        for _ in range(chance.randrange(8)):
            entry = wanted(len(requests))
            requests[entry.request_id] = entry
            running[entry.request_id] = asyncio.create_task(sampled(replica, entry))
        await asyncio.sleep(0)
        match chance.randrange(6):
            case 0 | 1:
                model = chance.choice(models)
                await model.train(chance.randrange(2))
                await publish(model)
            case 2:
                of_model = published[chance.choice(models).model_id]
                if len(of_model) > 2:
                    await replica.release(of_model.pop(0))
            case 3:
                request_id = chance.choice(list(requests))
                cancelled.add(request_id)
                if chance.random() < 0.5:
                    running[request_id].cancel()
                else:
                    await replica.cancel(request_id)
            case _:
                await sampled(replica, request(max_tokens=chance.randrange(1, 6)))
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
    stats, bank = loop._schedulers[0].stats(), worker.stats()
    assert stats["used_pages"] == stats["running"] == stats["waiting"] == 0
    assert loop._samples == replica._samples == {}
    assert worker._sampler._pins == {}
    assert bank["versions_pinned"] == bank["scratch_rows"] == bank["adapters_held"] == 0
    assert stats["hit_tokens"] > 1000
    assert stats["crossings"] > 0
    assert stats["preemptions"] > 0
    for versions in published.values():
        for version in versions:
            await replica.release(version)
    assert worker.stats()["versions_resident"] == 0
    assert loop._newest == {}
    assert set(loop._schedulers[0]._pages._of_version) <= {None}, "prefixes of versions that are gone"
    # A version may be gone, or the queue full, when a request comes.
    refused = {r for r, outcome in outcomes.items() if isinstance(outcome, (NotFound, Overloaded))}
    assert len(refused) < NUM_REQUESTS / 3
    broken = {r: o for r, o in outcomes.items() if isinstance(o, BaseException) and r not in cancelled | refused}
    assert not broken
    for outcome, again in compared:
        assert outcome.tokens() == again.tokens()
        assert outcome.logprobs() == again.logprobs()
    await replica.close()
