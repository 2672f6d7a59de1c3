from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from service_harness import BASE, Harness

from descant.errors import Gone, UserError
from descant.types import DeleteModel, Lora, ModelFacts, SnapshotRef


def facts(harness: Harness) -> list[ModelFacts]:
    return list(harness.service.capabilities())


async def test_a_session_that_never_beats_ends_with_its_models(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    sampler = (await harness.result(await harness.sampler(model, 1, number=0))).sampling_session_id
    await harness.advance(3599.0)
    assert model in harness.world.adapters
    await harness.advance(2.0)
    with pytest.raises(Gone, match="nothing was heard"):
        await harness.service.heartbeat("alice", session)
    await harness.until(lambda: not harness.world.adapters and not harness.world.published)
    with pytest.raises(Gone):
        await harness.sample(sampler)


async def test_a_session_that_beats_stays(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    for _ in range(4):
        await harness.advance(3000.0)
        await harness.service.heartbeat("alice", session)
    await harness.result(await harness.fb(model, 1))


async def test_finishing_waits_for_what_is_being_written(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    writing, release = asyncio.Event(), asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SnapshotRef):
            writing.set()
            await release.wait()

    harness.hook = hook
    save = await harness.save(model, 1)
    await writing.wait()
    await harness.service.finish_session("alice", session, reason="success", detail=None)
    await harness.service.finish_session("alice", session, reason="success", detail=None)
    assert not any(isinstance(command, DeleteModel) for command in harness.trainer.commands)
    release.set()
    saved = await harness.result(save)
    await harness.until(lambda: not harness.world.adapters)
    await harness.service.training.weights_info("alice", saved.path)
    with pytest.raises(Gone, match="success"):
        await harness.create(session, 1)


async def test_a_session_that_is_over_leaves_memory(harness: Harness) -> None:
    service = harness.service
    over, stays = await harness.session(), await harness.session()
    models = [await harness.model(session) for session in (over, stays)]
    for model in models:
        sampler = (await harness.result(await harness.sampler(model, 1, number=0))).sampling_session_id
        await harness.greedy(sampler)
    await service.finish_session("alice", over, reason="success", detail=None)
    assert [session.record.session_id for session in service._sessions] == [stays]
    assert [model.record.model_id for model in service._models.of_base(BASE)] == models[1:]
    assert {sampler.session_id for sampler in service.sampling._samplers.values()} == {stays}


async def test_the_idempotency_key(harness: Harness) -> None:
    ids = await asyncio.gather(*(harness.session(key="k") for _ in range(4)))
    assert len(set(ids)) == 1
    assert await harness.session("bob", key="k") not in ids
    assert await harness.session(key="l") not in ids
    assert len({await harness.session() for _ in range(3)}) == 3


async def test_what_create_model_refuses(harness: Harness) -> None:
    session = await harness.session()

    async def create(base: str = BASE, optimizer: str = "adamw", seq: int = 0, **lora: object) -> None:
        await harness.service.creation.create_model(
            "alice", session_id=session, model_seq_id=seq, base_model=base, trainable=replace(Lora(), **lora),
            optimizer=optimizer, user_metadata=None,
        )  # fmt: skip

    with pytest.raises(UserError, match=r"'gpt-5'.*served: 'fake/bigram', 'fake/other'"):
        await create("gpt-5")
    for rank in (0, -1, 257):
        with pytest.raises(UserError, match=f"rank is {rank}, expected 1 to 256"):
            await create(rank=rank)
    with pytest.raises(UserError, match="all false"):
        await create(train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(UserError, match="'dimuon', expected 'adamw'"):
        await create(optimizer="dimuon")
    with pytest.raises(UserError, match="model_seq_id is -1"):
        await create(seq=-1)
    assert not harness.trainer.commands
    await create("fake"), "an alias"
    assert [f.name for f in facts(harness)] == ["fake/bigram", "fake/other"]
