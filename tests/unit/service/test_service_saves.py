from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from service_harness import BASE, Harness

from descant.errors import NotFound, ServerError, UserError
from descant.testing.clock import settle
from descant.types import CheckpointName, SnapshotRef, WeightsSaved


async def test_training_goes_on_while_a_save_is_written(harness: Harness) -> None:
    model = await harness.model()
    await harness.result(await harness.fb(model, 1))
    writing, release = asyncio.Event(), asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SnapshotRef):
            writing.set()
            await release.wait()

    harness.hook = hook
    save = await harness.save(model, 2)
    await writing.wait()
    await harness.result(await harness.step(model, 3))
    await harness.pending(save)
    release.set()
    saved = await harness.result(save)
    harness.hook = None
    loaded = await harness.service.creation.load_weights_new(
        "alice", session_id=await harness.session(), model_seq_id=0, path=saved.path, optimizer=True, base_model=None,
        user_metadata=None,
    )  # fmt: skip
    await harness.result(loaded)
    assert loaded.model_id is not None
    assert not harness.weights(loaded.model_id).any(), "as it was at the save's place in the order"
    assert harness.weights(model).any()
    assert not harness.world.snapshots, "the snapshot is dropped"


@pytest.mark.parametrize("name", ["", "a/b", "/", "..", ".hidden", "-rf", "a b", "ä", "a" * 129, "a\n"])
async def test_malformed_names(harness: Harness, name: str) -> None:
    model = await harness.model()
    with pytest.raises(UserError, match="name"):
        await harness.save(model, 1, name)
    with pytest.raises(UserError, match="name"):
        await harness.sampler(model, 2, name=name)
    await harness.result(await harness.save(model, 3, "a" * 128))


async def test_a_name_that_is_taken(harness: Harness) -> None:
    model = await harness.model()
    first = await harness.result(await harness.save(model, 1, "a"))
    error = await harness.error(await harness.save(model, 2, "a"))
    assert error.category == "user"
    assert error.message.endswith("exists already; choose another name or pass overwrite=True")
    assert (await harness.checkpoints.open(CheckpointName(model_id=model, type="weights", name="a"))).manifest.applied_seq_id == 1  # fmt: skip  # noqa: E501
    assert await harness.result(await harness.save(model, 3, "a", overwrite=True)) == first
    assert (await harness.checkpoints.open(CheckpointName(model_id=model, type="weights", name="a"))).manifest.applied_seq_id == 3  # fmt: skip  # noqa: E501
    assert not harness.world.snapshots


async def test_a_samplers_name_that_is_taken(harness: Harness) -> None:
    """What the SDK saves it with has no overwrite."""
    model = await harness.model()
    await harness.result(await harness.sampler(model, 1, name="a"))
    error = await harness.error(await harness.sampler(model, 2, name="a"))
    assert error.message.endswith("exists already; choose another name")


async def test_two_saves_of_one_name_at_once(harness: Harness) -> None:
    model = await harness.model()
    both = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SnapshotRef):
            await both.wait()

    harness.hook = hook
    sent = [await harness.save(model, 1, "a"), await harness.save(model, 2, "a")]
    await harness.until(lambda: len(harness.world.snapshots) == 2)
    await settle()
    both.set()
    answers = [await harness.answer(submitted) for submitted in sent]
    assert isinstance(answers[0], WeightsSaved)
    assert isinstance(answers[1], UserError)


async def test_the_kind_is_part_of_a_names_identity(harness: Harness) -> None:
    model = await harness.model()
    training = await harness.result(await harness.save(model, 1, "a"))
    sampler = await harness.result(await harness.sampler(model, 2, name="a"))
    assert training.path != sampler.path
    assert len(await harness.checkpoints.list(model)) == 2
    manifests = {c.name.type: c.manifest for c in await harness.checkpoints.list(model)}
    assert manifests["weights"].has_optimizer
    assert not manifests["sampler_weights"].has_optimizer
    assert {(m.owner, m.base) for m in manifests.values()} == {("alice", BASE)}


@pytest.mark.parametrize("where", ["save", "commit"])
async def test_a_save_that_fails_ends_its_future_and_leaves_nothing(harness: Harness, where: str) -> None:
    model = await harness.model()
    await harness.result(await harness.save(model, 1, "good"))
    if where == "save":

        async def hook(what: object) -> None:
            if isinstance(what, SnapshotRef):
                raise OSError("disk full")

        harness.hook = hook
    else:
        commit = harness.checkpoints.commit

        async def fails(name: CheckpointName, attempt: str, manifest: object) -> object:
            (Path(attempt) / "adapter_model.safetensors").unlink()
            return await commit(name, attempt, manifest)  # type: ignore[arg-type]

        harness.checkpoints.commit = fails  # type: ignore[method-assign,assignment]
    for seq_id, overwrite in ((2, False), (3, True)):
        answer = await harness.answer(
            await harness.save(model, seq_id, "good" if overwrite else "bad", overwrite=overwrite)
        )
        assert isinstance(answer, Exception)
        assert not isinstance(answer, UserError)
    assert [c.manifest.applied_seq_id for c in await harness.checkpoints.list(model)] == [1]
    assert len(list(harness.checkpoints.directory.iterdir())) == 1, "attempts are removed"
    assert not harness.world.snapshots
    harness.hook = None
    await harness.result(await harness.fb(model, 4))


async def test_a_checkpoint_ends_at_its_time(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    short = await harness.result(await harness.save(model, 1, "short", ttl=3600))
    renewed = await harness.result(await harness.save(model, 2, "renewed", ttl=3600))
    await harness.result(await harness.save(model, 3, "renewed", overwrite=True))
    await harness.advance(3500.0)
    await harness.service.heartbeat("alice", session)
    await harness.service.training.weights_info("alice", short.path)
    await harness.advance(200.0)
    with pytest.raises(NotFound):
        await harness.service.training.weights_info("alice", short.path)
    await harness.service.training.weights_info("alice", renewed.path)


async def test_load_into_a_model(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    await harness.result(await harness.fb(model, 1))
    await harness.result(await harness.step(model, 2))
    saved = await harness.result(await harness.save(model, 3))
    other = await harness.model(session, model_seq_id=1)
    sent = await harness.service.training.load_weights_into(
        "alice", model_id=other, seq_id=1, path=saved.path, optimizer=True
    )
    assert (await harness.result(sent)).path == saved.path
    np.testing.assert_allclose(harness.weights(other), harness.weights(model), atol=1e-6)


async def _load_error(harness: Harness, model: str, path: str, optimizer: bool = False) -> str:
    sent = await harness.service.training.load_weights_into(
        "alice", model_id=model, seq_id=1, path=path, optimizer=optimizer
    )
    error = await harness.error(sent)
    assert error.category == "user"
    return error.message


async def test_what_cannot_be_loaded_is_refused_with_a_sentence(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    saved = await harness.result(await harness.save(model, 1))
    sampler = await harness.result(await harness.sampler(model, 2, name="s"))
    number = iter(range(1, 100))

    async def fresh(**kwargs: object) -> str:
        return await harness.model(session, model_seq_id=next(number), **kwargs)

    elsewhere = await fresh(base="fake/other")
    assert f"trained on {BASE}" in await _load_error(harness, elsewhere, saved.path)
    assert "rank 2" in await _load_error(harness, await fresh(rank=4), saved.path)
    assert "no optimiser state" in await _load_error(harness, await fresh(), sampler.path, optimizer=True)
    assert "expected tinker://" in await _load_error(harness, await fresh(), "/etc/passwd")
    unknown = await fresh()
    assert "no checkpoint" in await _load_error(harness, unknown, saved.path + "x")
    await harness.result(await harness.fb(unknown, 2)), "the id is consumed, the model usable"

    async def load_new(path: str, base_model: str | None = None, optimizer: bool = False) -> None:
        await harness.service.creation.load_weights_new(
            "alice", session_id=session, model_seq_id=99, path=path, optimizer=optimizer, base_model=base_model,
            user_metadata=None,
        )  # fmt: skip

    with pytest.raises(UserError, match="cannot be loaded into a model on fake/other"):
        await load_new(saved.path, "fake/other")
    with pytest.raises(UserError, match="no optimiser state"):
        await load_new(sampler.path, optimizer=True)
    with pytest.raises(NotFound):
        await load_new(saved.path + "x")
    for path in ("", "tinker://", "tinker://a/b/c", f"tinker://{model}/weights/../x", "tinker://../weights/x"):
        with pytest.raises(UserError, match="expected tinker://"):
            await load_new(path)


async def test_a_model_that_cannot_be_created(harness: Harness) -> None:
    session = await harness.session()

    async def hook(what: object) -> None:
        raise ServerError("no room for another adapter")

    harness.hook = hook
    error = await harness.error(await harness.create(session))
    harness.hook = None
    assert "no room" in error.message
    with pytest.raises(NotFound, match="no room"):
        await harness.fb(f"{session}:train:0", 1)
    await harness.model(session, model_seq_id=1)
