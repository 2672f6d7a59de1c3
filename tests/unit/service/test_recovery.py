"""Models made again after a death, of their process or of the server: nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from service_harness import BASE, Harness, forward_backward
from sqlalchemy import update

from descant.errors import Gone, Lost, RankDied, ServerError, UserError
from descant.service import journal as journals
from descant.service import schema
from descant.service.registry import Registry
from descant.service.settings import QuotaSettings, ServiceSettings
from descant.types import (
    CreateModel,
    ForwardBackward,
    OptimStep,
    RequestBody,
    SampleOutput,
    SampleRequest,
    Snapshot,
)

Death = Callable[[Harness], Awaitable[None]]


async def rank(harness: Harness) -> None:
    await harness.die()


async def server(harness: Harness) -> None:
    await harness.restart()


deaths = pytest.mark.parametrize("death", [rank, server])


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """Over a trainer and an engine that share rows: they die together."""
    harness = Harness(tmp_path)
    await harness.start()
    yield harness
    await harness.stop()


async def train(harness: Harness, model: str, first: int, last: int) -> None:
    """Odd ids are backwards, even ones steps."""
    for seq_id in range(first, last + 1):
        await harness.result(await (harness.fb(model, seq_id) if seq_id % 2 else harness.step(model, seq_id)))


async def undisturbed(path: Path, last: int) -> np.ndarray:
    os.mkdir(path)
    harness = Harness(path)
    await harness.start()
    model = await harness.model()
    await train(harness, model, 1, last)
    weights = harness.weights(model)
    await harness.stop()
    return weights


@deaths
async def test_training_goes_on_bit_for_bit(harness: Harness, tmp_path: Path, death: Death) -> None:
    expected = await undisturbed(tmp_path / "other", 12)
    model = await harness.model()
    await train(harness, model, 1, 7)
    await death(harness)
    await train(harness, model, 8, 9)
    await death(harness)
    await train(harness, model, 10, 12)
    np.testing.assert_array_equal(harness.weights(model), expected)
    assert not (await harness.service.stats())[BASE]["replayed_losses_differ"]


@deaths
@pytest.mark.parametrize("every", [1, 2, 3, 5])
async def test_training_goes_on_from_automatic_snapshots(
    harness: Harness, tmp_path: Path, death: Death, every: int
) -> None:
    expected = await undisturbed(tmp_path / "other", 20)
    harness.settings = ServiceSettings(snapshot_commands=every)
    await harness.restart()
    model = await harness.model()
    await train(harness, model, 1, 15)
    taken = harness.service._snapshots
    await harness.until(lambda: taken.num_taken[BASE] > 0 and not taken._taking)
    entries = await harness.service._journal.entries(model)
    live = harness.service._models.get(model)
    assert live is not None
    assert [entry.seq_id for entry in entries] == [0, *range(live.oldest + 1, 16)], "what lies before it is kept"
    assert len(await harness.snapshots.list(model)) == len(live.snapshots) <= 2
    await death(harness)
    await harness.recovered()
    assert harness.trainer.commands[-1] != CreateModel
    sources = [command.source for command in harness.trainer.commands if isinstance(command, CreateModel)]
    assert sources[-1] is not None
    await train(harness, model, 16, 20)
    np.testing.assert_array_equal(harness.weights(model), expected)


async def test_snapshots_are_nobodys_and_end_with_their_model(harness: Harness) -> None:
    harness.settings = ServiceSettings(snapshot_commands=1)
    await harness.restart()
    session = await harness.session()
    model = await harness.model(session)
    await train(harness, model, 1, 4)
    await harness.until(
        lambda: harness.service._snapshots.num_taken[BASE] > 0 and not harness.service._snapshots._taking
    )
    assert await harness.snapshots.list(model)
    assert not await harness.checkpoints.list(model)
    with pytest.raises(UserError):
        await harness.service.training.weights_info("alice", f"tinker://{model}/weights/4")
    await harness.finish(session)
    for _ in range(200):
        if not await harness.snapshots.list(model):
            break
        await asyncio.sleep(0.01)
    assert not await harness.snapshots.list(model)
    assert not await harness.service._journal.models()


@deaths
async def test_what_has_no_answer_gets_it(harness: Harness, tmp_path: Path, death: Death) -> None:
    """A backward that ran, what waited behind it in order, and what waits behind a gap."""
    expected = await undisturbed(tmp_path / "other", 6)
    model = await harness.model()
    await train(harness, model, 1, 2)
    blocked = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, ForwardBackward) and not blocked.is_set():
            blocked.set()
            await asyncio.Event().wait()

    harness.hook = hook
    sent = [await harness.fb(model, 3), await harness.step(model, 4), await harness.step(model, 6)]
    await blocked.wait()
    await death(harness)
    for submitted in sent[:2]:
        await harness.result(submitted)
    await harness.recovered()
    assert "seq_id 5" in await harness.pending(sent[2])
    await harness.result(await harness.fb(model, 5))
    await harness.result(sent[2])
    np.testing.assert_array_equal(harness.weights(model), expected)


async def test_the_reason_says_how_far_a_recovery_is(harness: Harness) -> None:
    model = await harness.model()
    await train(harness, model, 1, 4)
    blocked, release = asyncio.Event(), asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, ForwardBackward) and what.seq_id == 3:
            blocked.set()
            await release.wait()

    harness.hook = hook
    await harness.die()
    await blocked.wait()
    submitted = await harness.fb(model, 5)
    assert f"recovering model {model!r}" in await harness.pending(submitted)
    assert "of 4 commands replayed" in await harness.pending(submitted)
    assert (await harness.service.stats())[BASE]["models_recovering"] == 1
    release.set()
    await harness.result(submitted)
    await harness.recovered()
    assert (await harness.service.stats())[BASE]["models_recovered"] == 1


@deaths
async def test_what_failed_has_failed(harness: Harness, death: Death) -> None:
    """By a rank's fault that is not there any more, by its body, as an id that was consumed, and as a gap that was
    closed: each poisons the gradient, or does not, as it did."""
    harness.settings = ServiceSettings(seq_gap_timeout_s=5.0)
    await harness.restart()
    model = await harness.model()
    await train(harness, model, 1, 2)

    async def hook(what: object) -> None:
        if isinstance(what, ForwardBackward) and what.seq_id == 3:
            raise ServerError("out of memory")

    harness.hook = hook
    await harness.error(await harness.fb(model, 3))
    harness.hook = None
    await harness.result(await harness.fb(model, 4))
    refused = {"model_id": model, "operation": "optim_step", "message": "wrong", "poisons_gradient": False}
    await harness.error(await harness.service.training.refuse("alice", seq_id=5, **refused))
    with pytest.raises(UserError):
        await harness.save(model, 6, "no/name")
    await death(harness)
    await harness.recovered()
    assert "out of memory" not in (message := (await harness.error(await harness.step(model, 7))).message)
    assert "missing" in message
    behind = await harness.fb(model, 9)
    await harness.advance(6.0)
    assert "seq_id 8" in (await harness.error(behind)).message
    await death(harness)
    await harness.recovered()
    assert "missing" in (await harness.error(await harness.step(model, 10))).message
    before = harness.weights(model).copy()
    await train(harness, model, 11, 12)
    assert np.any(harness.weights(model) != before)
    assert not (await harness.service.stats())[BASE]["replayed_losses_differ"]


@deaths
async def test_saves_are_made_once(harness: Harness, tmp_path: Path, death: Death) -> None:
    """One that was answered, one that had a file and no answer, and one that had only begun."""
    model = await harness.model()
    await train(harness, model, 1, 2)
    answered = await harness.result(await harness.save(model, 3, "answered"))
    commit, committed = harness.checkpoints.commit, asyncio.Event()

    async def commit_and_stop(*arguments: object) -> object:
        await commit(*arguments)  # type: ignore[arg-type]
        committed.set()
        if death is rank:
            raise RankDied("the rank was killed")
        return await asyncio.Event().wait()

    harness.checkpoints.commit = commit_and_stop  # type: ignore[assignment, method-assign]
    written = await harness.save(model, 4, "written")
    await committed.wait()
    harness.checkpoints.commit = commit  # type: ignore[method-assign]
    begun = await harness.save(model, 5, "begun")
    await death(harness)
    assert (await harness.result(written)).path.endswith("weights/written")
    assert (await harness.result(begun)).path.endswith("weights/begun")
    again = await harness.error(await harness.save(model, 6, "answered"))
    assert answered.path in again.message
    found = {checkpoint.name.name: checkpoint.manifest for checkpoint in await harness.checkpoints.list(model)}
    assert {name: manifest.applied_seq_id for name, manifest in found.items()} == {
        "answered": 3, "written": 4, "begun": 5
    }  # fmt: skip


@deaths
async def test_models_from_checkpoints(harness: Harness, death: Death) -> None:
    session = await harness.session()
    model = await harness.model(session)
    await train(harness, model, 1, 2)
    saved = await harness.result(await harness.save(model, 3))
    children = []
    for number, optimizer in enumerate((True, False), start=1):
        submitted = await harness.service.creation.load_weights_new(
            "alice", session_id=session, model_seq_id=number, path=saved.path, optimizer=optimizer, base_model=None,
            user_metadata=None,
        )  # fmt: skip
        await harness.result(submitted)
        assert submitted.model_id is not None
        children.append(submitted.model_id)
    loaded = await harness.model(session, model_seq_id=3)
    await harness.result(
        await harness.service.training.load_weights_into(
            "alice", model_id=loaded, seq_id=1, path=saved.path, optimizer=True
        )
    )
    for child in children:
        await harness.result(await harness.fb(child, 1))
    await death(harness)
    for child in children:
        await harness.result(await harness.step(child, 2))
    await harness.result(await harness.fb(loaded, 2))
    await harness.result(await harness.step(loaded, 3))
    await harness.recovered()
    with_state, without = (harness.weights(child) for child in children)
    assert np.any(with_state != without)


@deaths
async def test_unnamed_versions_in_use_are_published_again(harness: Harness, death: Death) -> None:
    harness.settings = ServiceSettings(snapshot_commands=6)
    await harness.restart()
    model = await harness.model()
    samplers, before = [], []
    for number in range(3):
        first = 3 * number + 1
        await harness.result(await harness.fb(model, first))
        await harness.result(await harness.step(model, first + 1))
        saved = await harness.result(await harness.sampler(model, first + 2, number=number))
        samplers.append(saved.sampling_session_id)
        before.append(await harness.greedy(saved.sampling_session_id))
    await harness.until(lambda: not harness.service._snapshots._taking)
    await death(harness)
    for sampler, expected in zip(samplers, before):
        output = await harness.greedy(sampler, 1)
        np.testing.assert_array_equal(output.sequences[0].logprobs, expected.sequences[0].logprobs)
    await harness.result(await harness.sampler(model, 10, number=10))


async def test_a_sampler_whose_save_has_no_answer_that_is_written(harness: Harness) -> None:
    """Its client may have the answer, and samples while the recovery has not come so far."""
    model = await harness.model()
    await train(harness, model, 1, 2)

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    harness.futures.resolve = never  # type: ignore[method-assign]
    submitted = await harness.sampler(model, 3, number=0)
    sampler = f"{model.partition(':')[0]}:sample:0"
    for _ in range(1000):
        if await Registry(harness.database).sampling_session(sampler) is not None:
            break
        await asyncio.sleep(0.001)
    await harness.restart()
    sampled = await harness.sample(sampler)
    assert (await harness.result(submitted)).sampling_session_id == sampler
    assert isinstance(await harness.result(sampled), SampleOutput)
    assert isinstance(await harness.greedy(sampler, 1), SampleOutput)


async def test_a_session_that_ends_during_a_recovery(harness: Harness) -> None:
    """What it was asked before is done, whatever dies meanwhile, and then nothing is left of it."""
    session = await harness.session()
    model = await harness.model(session)
    await train(harness, model, 1, 2)
    blocked = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, Snapshot) and not blocked.is_set():
            blocked.set()
            await asyncio.Event().wait()

    harness.hook = hook
    saving = await harness.save(model, 3)
    await blocked.wait()
    await harness.finish(session)
    await harness.die()
    await harness.result(saving)
    await harness.until(lambda: not harness.service._models.ending and model not in harness.world.adapters)
    for _ in range(1000):
        if not await harness.service._journal.models():
            break
        await asyncio.sleep(0.001)
    assert not await harness.service._journal.models()


@deaths
async def test_an_inflight_sampler_follows_on(harness: Harness, death: Death) -> None:
    model = await harness.model()
    await train(harness, model, 1, 2)
    sampler = (await harness.result(await harness.sampler(model, 3, number=0, kind="inflight"))).sampling_session_id
    await harness.result(await harness.fb(model, 4))
    await harness.result(await harness.step(model, 5))
    newest = (await harness.result(await harness.sampler(model, 6, number=1))).sampling_session_id
    await death(harness)
    expected = await harness.greedy(newest)
    np.testing.assert_array_equal((await harness.greedy(sampler)).sequences[0].logprobs, expected.sequences[0].logprobs)
    await harness.result(await harness.fb(model, 7))
    await harness.result(await harness.step(model, 8))
    newer = (await harness.result(await harness.sampler(model, 9, number=2))).sampling_session_id
    expected = await harness.greedy(newer)
    np.testing.assert_array_equal(
        (await harness.greedy(sampler, 1)).sequences[0].logprobs, expected.sequences[0].logprobs
    )


async def test_a_version_from_before_what_is_kept_is_lost_alone(harness: Harness) -> None:
    harness.settings = ServiceSettings(snapshot_commands=2)
    await harness.restart()
    model = await harness.model()
    await train(harness, model, 1, 2)
    old = (await harness.result(await harness.sampler(model, 3, number=0))).sampling_session_id
    snapshots = harness.service._snapshots
    for step in range(4):
        await harness.result(await harness.fb(model, 4 + 2 * step))
        await harness.result(await harness.step(model, 5 + 2 * step))
        await harness.until(lambda: not snapshots._taking)
    new = (await harness.result(await harness.sampler(model, 12, number=1))).sampling_session_id
    for death in (rank, server):
        await death(harness)
        error = await harness.error(await harness.sample(old, 1 if death is rank else 2))
        assert isinstance(error, Lost)
        assert "is there: save its weights for sampling again" in error.message
        assert isinstance(await harness.greedy(new, 1 if death is rank else 2), SampleOutput)


async def test_sampling_at_the_servers_death_is_sent_again(harness: Harness) -> None:
    """Which the SDK does by itself when it gets HTTP 410; once more after another death."""
    session = await harness.session()
    base = await harness.service.sampling.create_sampling_session(
        "alice", session_id=session, sampling_session_seq_id=0, base_model=BASE, model_path=None
    )
    started = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SampleRequest):
            started.set()
            await asyncio.Event().wait()

    harness.hook = hook
    submitted = await harness.sample(base)
    await started.wait()
    harness.hook = None
    for _ in range(2):
        await harness.restart()
        with pytest.raises(Gone, match="send it again"):
            await harness.answer(submitted)
    await harness.result(await harness.sample(base, 1))
    await harness.clock.advance(harness.settings.keep_finished_s + harness.settings.prune_interval_s)
    await harness.restart()
    await harness.futures.prune(finished_before=harness.clock.now() - harness.settings.keep_finished_s)
    assert not await harness.futures.pending()


async def test_what_ranks_die_of_fails_and_nothing_else(harness: Harness) -> None:
    """A backward that kills its rank each time, beside another model and a sample that are in flight each time."""
    session = await harness.session()
    bad, good = [await harness.model(session, model_seq_id=number) for number in range(2)]
    for model in (bad, good):
        await train(harness, model, 1, 2)
    num_deaths = 0

    async def hook(what: object) -> None:
        nonlocal num_deaths
        if isinstance(what, ForwardBackward) and what.model_id == bad and what.seq_id == 3:
            num_deaths += 1
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(harness.die()))
            await asyncio.Event().wait()

    harness.hook = hook
    pill, innocent = await harness.fb(bad, 3), await harness.fb(good, 3)
    answer = asyncio.create_task(harness.error(pill))
    while not answer.done():
        await harness.clock.advance(0.1)
        await asyncio.sleep(0.001)
    assert "the last time alone" in answer.result().message
    assert num_deaths == 3
    await harness.result(innocent)
    assert "seq_id 3" in (await harness.error(await harness.step(bad, 4))).message
    await harness.result(await harness.fb(bad, 5))
    await harness.result(await harness.step(bad, 6))
    await harness.result(await harness.step(good, 4))


async def test_a_loss_that_comes_out_otherwise_is_counted(harness: Harness) -> None:
    model = await harness.model()
    await train(harness, model, 1, 4)
    await harness.database.write(
        lambda c: c.execute(update(schema.commands).where(schema.commands.c.seq_id == 3).values(loss=1e6))
    )
    await harness.die()
    await train(harness, model, 5, 6)
    assert (await harness.service.stats())[BASE]["replayed_losses_differ"] == 1


async def test_deaths_during_a_recovery(harness: Harness, tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path / "other", 10)
    model = await harness.model()
    await train(harness, model, 1, 8)
    kills = iter([OptimStep, CreateModel, ForwardBackward])
    kill = next(kills)
    seen: list[asyncio.Future[None]] = []

    async def hook(what: object) -> None:
        nonlocal kill
        if isinstance(what, kill):
            kill = next(kills, type(None))
            harness.trainer.die()
            harness.world.published.clear()
            seen.append(asyncio.ensure_future(harness.service.backend_restarted("fake")))
            await asyncio.Event().wait()

    harness.hook = hook
    await harness.die()
    sent = [await harness.fb(model, 9), await harness.step(model, 10)]
    done = asyncio.gather(*(harness.result(one) for one in sent))
    while not done.done():
        await harness.clock.advance(0.1)
        await asyncio.sleep(0.001)
    await done
    assert kill is type(None)
    np.testing.assert_array_equal(harness.weights(model), expected)


async def test_a_model_being_made_when_the_server_dies(harness: Harness) -> None:
    session = await harness.session()

    async def hook(what: object) -> None:
        if isinstance(what, CreateModel):
            await asyncio.Event().wait()

    harness.hook = hook
    creation = await harness.create(session)
    sent = await harness.fb(f"{session}:train:0", 1)
    harness.hook = None
    await harness.restart()
    assert (await harness.result(creation)).model_id == creation.model_id
    await harness.result(sent)


# --------------------------------------------------------------------------------------------------------------------
# The journal itself


@deaths
async def test_large_bodies_lie_in_files(harness: Harness, tmp_path: Path, death: Death) -> None:
    model = await harness.model()
    command = forward_backward(model, 1)
    datum = command.data[0]
    command = replace(command, data=(datum,) * (journals.MAX_INLINE_BYTES // 100))
    body = pickle.dumps(replace(command, loss_fn_config={})) + bytes(journals.MAX_INLINE_BYTES)
    await harness.result(await harness.service.training.forward_backward("alice", command, RequestBody(data=body)))
    [file] = (tmp_path / "journal").iterdir()
    assert file.stat().st_size == len(body) == harness.service._journal.num_bytes("alice")
    assert file.stat().st_mode & 0o777 == 0o600
    (tmp_path / "journal" / "orphan").write_bytes(b"x")
    await death(harness)
    await harness.result(await harness.step(model, 2))
    assert (tmp_path / "journal" / "orphan").exists() == (death is rank)
    await harness.finish(model.partition(":")[0])
    await harness.until(lambda: not file.exists())
    assert harness.service._journal.num_bytes("alice") == 0


async def test_an_owner_has_so_much_of_the_journal(harness: Harness) -> None:
    size = len(pickle.dumps(forward_backward("x", 1)))
    harness.quotas = QuotaSettings(journal_bytes=3 * size)
    harness.settings = ServiceSettings(snapshot_commands=2)
    await harness.restart()
    model = await harness.model()
    await harness.result(await harness.fb(model, 1))
    await harness.result(await harness.fb(model, 2))
    error = await harness.error(await harness.fb(model, 3))
    assert "quota.journal_bytes" in error.message
    assert error.category == "user"
    await harness.error(await harness.step(model, 4))
    await harness.until(lambda: harness.service._journal.num_bytes("alice") == 0)
    await train(harness, model, 5, 6)


async def test_a_newer_journal_is_refused(harness: Harness) -> None:
    await harness.model()
    await harness.database.write(lambda c: c.execute(update(schema.commands).values(format=journals.FORMAT + 1)))
    with pytest.raises(ServerError, match="newer version of Descant"):
        await journals.Journal.open(harness.database, harness.path / "journal")


async def test_a_repeated_submission_is_one_command(harness: Harness) -> None:
    model = await harness.model()
    sent = await asyncio.gather(*(harness.fb(model, 1) for _ in range(5)))
    assert len({submitted.request_id for submitted in sent}) == 1
    assert [entry.seq_id for entry in await harness.service._journal.entries(model)] == [0, 1]
    await harness.result(sent[0])
    await harness.futures.prune(finished_before=0, fetched=[sent[0].request_id])
    late = await harness.error(await harness.fb(model, 1))
    assert "was answered before" in late.message
    [_, entry] = await harness.service._journal.entries(model)
    assert entry.failed is False, "what came late is another request"
