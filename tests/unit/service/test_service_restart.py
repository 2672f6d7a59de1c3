"""What is there after the server, or the process under a base, has ended and come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from service_harness import BASE, Harness, forward_backward

from descant.errors import Damaged, Gone, Lost, NotFound, RankDied, ServerError
from descant.service.future_store import SqlFutureStore
from descant.service.futures import Submitted
from descant.service.names import parse_path
from descant.types import (
    CreateModel,
    ForwardBackward,
    FutureKey,
    ModelCreated,
    SampleOutput,
    SampleRequest,
    Version,
    WeightsLoaded,
)


async def test_sessions_finished_futures_and_checkpoints_survive(harness: Harness) -> None:
    session = await harness.session(key="k")
    model = await harness.model(session)
    saved = await harness.save(model, 1, "kept")
    answer = await harness.result(saved)
    await harness.restart()
    await harness.service.heartbeat("alice", session)
    assert await harness.session(key="k") == session
    assert await harness.result(saved) == answer
    assert (await harness.save(model, 1, "kept")).request_id == saved.request_id
    assert (await harness.service.training.weights_info("alice", answer.path)).trainable.rank == 2
    assert (await harness.service.training.get_info("alice", model)).trainable.rank == 2


async def cannot_be_made(what: object) -> None:
    """A hook: models cannot be made again, so they are lost."""
    if isinstance(what, CreateModel):
        raise ServerError("the rank cannot make it")


async def lose(harness: Harness) -> None:
    """All models, at a restart of the server."""
    await harness.stop()
    harness.hook = cannot_be_made
    await harness.start()
    await harness.until(lambda: not harness.service.recovery._tasks)
    assert not harness.service._models.of_base(BASE)
    harness.hook = None


async def test_a_call_on_a_lost_model_fails_naming_the_newest_checkpoint(harness: Harness) -> None:
    model = await harness.model()
    await harness.result(await harness.save(model, 1, "old"))
    await harness.result(await harness.save(model, 2, "new"))
    await harness.result(await harness.sampler(model, 3, name="newer"))
    await lose(harness)
    num_commands = len(harness.trainer.commands)
    for submitted in [
        await harness.fb(model, 4),
        await harness.step(model, 9),
        await harness.save(model, 5),
        await harness.sampler(model, 6, number=0),
        await harness.sampler(model, 7, name="x"),
        await harness.service.training.refuse(
            "alice", model_id=model, seq_id=8, operation="optim_step", message="no", poisons_gradient=False
        ),
    ]:
        error = await harness.error(submitted)
        assert isinstance(error, Lost)
        assert error.category == "server"
        assert "the rank cannot make it" in error.message
        assert f"tinker://{model}/weights/new" in error.message
    assert len(harness.trainer.commands) == num_commands


async def test_a_lost_model_without_a_checkpoint_says_so(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    saved = await harness.result(await harness.save(model, 1))
    child = await harness.service.creation.load_weights_new(
        "alice", session_id=session, model_seq_id=1, path=saved.path, optimizer=True, base_model=None,
        user_metadata=None,
    )  # fmt: skip
    await harness.result(child)
    fresh = await harness.model(session, model_seq_id=2)
    sampled = await harness.model(session, model_seq_id=3)
    await harness.result(await harness.sampler(sampled, 1, name="s"))
    await lose(harness)
    assert "no checkpoint to resume from" in (await harness.error(await harness.fb(fresh, 1))).message
    assert child.model_id is not None
    assert f"made from {saved.path}" in (await harness.error(await harness.fb(child.model_id, 1))).message
    assert f"{sampled}/sampler_weights/s" in (await harness.error(await harness.fb(sampled, 2))).message


async def test_pending_futures_of_a_lost_model_fail(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    saved = await harness.result(await harness.save(model, 1))
    started = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, ForwardBackward):
            started.set()
            await asyncio.Event().wait()

    harness.hook = hook
    running = await harness.fb(model, 2)
    behind = await harness.fb(model, 4)
    await started.wait()
    await lose(harness)
    for submitted in (running, behind):
        error = await harness.error(submitted)
        assert error.category == "server"
        assert saved.path in error.message
    await harness.until(lambda: not len(harness.service._jobs))
    assert not await harness.futures.pending()


async def test_requests_that_an_earlier_server_has_not_journalled_fail(harness: Harness) -> None:
    """One of a version before the journal."""
    model = await harness.model()
    saved = await harness.result(await harness.save(model, 1))
    key = FutureKey(kind="train", scope=model, seq_id=2)
    request_id, _ = await harness.futures.put(key=key, owner="alice", base=BASE, operation="optim_step")
    await harness.restart()
    assert saved.path in (await harness.error(request_id)).message


async def test_training_goes_on_from_the_checkpoint(harness: Harness) -> None:
    session = await harness.session()
    model, undisturbed = await harness.model(session), await harness.model(session, model_seq_id=1)
    for one in (model, undisturbed):
        await harness.result(await harness.fb(one, 1))
        await harness.result(await harness.step(one, 2))
    saved = await harness.result(await harness.save(model, 3))
    next_pass = forward_backward(undisturbed, 3)
    await harness.result(await harness.train(next_pass))
    await harness.result(await harness.step(undisturbed, 4))
    expected = harness.weights(undisturbed).copy()
    await harness.restart()
    again = await harness.service.creation.load_weights_new(
        "alice", session_id=session, model_seq_id=2, path=saved.path, optimizer=True, base_model=BASE,
        user_metadata=None,
    )  # fmt: skip
    assert again.model_id is not None
    assert isinstance(await harness.result(again), WeightsLoaded)
    resumed = replace(next_pass, model_id=again.model_id, seq_id=1)
    await harness.result(await harness.train(resumed))
    await harness.result(await harness.step(again.model_id, 2))
    np.testing.assert_allclose(harness.weights(again.model_id), expected, atol=1e-6)


async def test_samplers_go_on(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    await harness.result(await harness.fb(model, 1))
    await harness.result(await harness.step(model, 2))
    named = await harness.result(await harness.sampler(model, 3, name="s"))
    ephemeral = (await harness.result(await harness.sampler(model, 4, number=0))).sampling_session_id
    path_sampler = await harness.service.sampling.create_sampling_session(
        "alice", session_id=session, sampling_session_seq_id=1, base_model=None, model_path=named.path
    )
    before = await harness.greedy(path_sampler)
    await harness.restart()
    for sampler in (path_sampler, ephemeral):
        after = await harness.greedy(sampler, 1)
        np.testing.assert_array_equal(after.sequences[0].logprobs, before.sequences[0].logprobs)
    info = await harness.service.sampling.get_sampler("alice", path_sampler)
    assert (info.base_model, info.model_path) == (BASE, named.path)


async def test_an_ephemeral_sampler_of_a_lost_model_is_lost(harness: Harness) -> None:
    model = await harness.model()
    await harness.result(await harness.sampler(model, 1, name="s"))
    ephemeral = (await harness.result(await harness.sampler(model, 2, number=0))).sampling_session_id
    await lose(harness)
    error = await harness.error(await harness.sample(ephemeral))
    assert isinstance(error, Lost)
    assert f"tinker://{model}/sampler_weights/s" in error.message


async def test_a_restarted_backend_disturbs_no_other(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    elsewhere = await harness.model(session, model_seq_id=1, base="fake/other")
    named = await harness.result(await harness.sampler(model, 1, name="s"))
    ephemeral = (await harness.result(await harness.sampler(model, 2, number=0))).sampling_session_id
    path_sampler = await harness.service.sampling.create_sampling_session(
        "alice", session_id=session, sampling_session_seq_id=1, base_model=None, model_path=named.path
    )
    before = await harness.greedy(path_sampler)
    started = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, ForwardBackward) and what.model_id == model and not started.is_set():
            started.set()
            await asyncio.Event().wait()

    harness.hook = hook
    running, behind = await harness.fb(model, 3), await harness.step(model, 5)
    await started.wait()
    await harness.die()
    for submitted in (running, await harness.fb(model, 4), behind):
        await harness.result(submitted)
    for sampler in (path_sampler, ephemeral):
        after = await harness.greedy(sampler, 1)
        np.testing.assert_array_equal(after.sequences[0].logprobs, before.sequences[0].logprobs)
    await harness.result(await harness.fb(elsewhere, 1))
    await harness.model(session, model_seq_id=2)


@pytest.mark.parametrize("harness", [False], ids=["together"], indirect=True)
async def test_one_of_several_processes_of_a_base_is_made_good_for_and_nothing_else(harness: Harness) -> None:
    """One model goes with its sampler and another's sampler, and weights from a file; a third model stays alone."""
    session = await harness.session()
    gone, stays, apart = [await harness.model(session, model_seq_id=number) for number in range(3)]
    samplers = [
        (await harness.result(await harness.sampler(model, 2, number=number))).sampling_session_id
        for number, model in enumerate((gone, stays, apart))
        if await harness.result(await harness.fb(model, 1))
    ]
    named = await harness.result(await harness.sampler(stays, 3, name="s"))
    path_sampler = await harness.service.sampling.create_sampling_session(
        "alice", session_id=session, sampling_session_seq_id=9, base_model=None, model_path=named.path
    )
    before = [await harness.greedy(sampler) for sampler in (*samplers, path_sampler)]
    release, started = asyncio.Event(), asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, ForwardBackward) and what.model_id == stays:
            started.set()
            await release.wait()

    harness.hook = hook
    going_on = await harness.fb(stays, 4)
    await started.wait()
    harness.world.adapters.pop(gone)
    versions = [Version(model_id=gone, number=2), Version(model_id=apart, number=2), Version(model_id=stays, number=3)]
    for version in versions:
        del harness.world.published[version]
    num_commands = len(harness.trainer.commands)
    await harness.service.backend_restarted("fake", models={gone, "unheard of"}, versions=versions)
    await harness.result(await harness.fb(gone, 3))
    await harness.pending(going_on)
    release.set()
    await harness.result(going_on)
    for sampler, expected in zip((*samplers, path_sampler), before):
        after = await harness.greedy(sampler, 1)
        np.testing.assert_array_equal(after.sequences[0].logprobs, expected.sequences[0].logprobs)
    assert {command.model_id for command in harness.trainer.commands[num_commands:]} == {gone, apart}


async def test_what_comes_while_a_death_is_seen_to_is_done_after_it(harness: Harness) -> None:
    model = await harness.model()
    harness.trainer.die()
    _, *sent = await asyncio.gather(
        harness.service.backend_restarted("fake"), *(harness.fb(model, seq_id) for seq_id in range(1, 6))
    )
    for submitted in sent:
        await harness.result(submitted)


async def test_sampling_in_flight_at_a_death_is_done_by_the_next_rank(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    named = await harness.result(await harness.sampler(model, 1, name="s"))
    path_sampler, base_sampler = [
        await harness.service.sampling.create_sampling_session(
            "alice", session_id=session, sampling_session_seq_id=number, base_model=base, model_path=path
        )
        for number, (base, path) in enumerate([(None, named.path), (BASE, None)])
    ]
    ephemeral = (await harness.result(await harness.sampler(model, 2, number=9))).sampling_session_id
    deaths = asked = 0

    async def hook(what: object) -> None:
        nonlocal deaths, asked
        if isinstance(what, SampleRequest):
            asked += 1
            if deaths > 0:
                deaths -= 1
                await harness.die()
                raise RankDied("the rank was killed")

    harness.hook = hook
    for sampler in (path_sampler, base_sampler, ephemeral):
        deaths, asked = 2, 0
        submitted = await harness.sample(sampler)
        assert isinstance(await as_time_passes(harness, submitted), SampleOutput)
        assert asked == 3
    deaths, asked = 5, 0
    submitted = await harness.sample(base_sampler, 1)
    died = await as_time_passes(harness, submitted)
    assert isinstance(died, RankDied), "it may be this request that ranks die of"
    assert asked == 3
    deaths = 0
    assert isinstance(await as_time_passes(harness, await harness.sample(ephemeral, 1)), SampleOutput)


async def as_time_passes(harness: Harness, submitted: Submitted) -> object:
    answer = asyncio.create_task(harness.answer(submitted))
    while not answer.done():
        await harness.clock.advance(0.1)
        await asyncio.sleep(0.001)
    return answer.result()


async def test_a_model_being_made_at_a_death_is_made_on_the_next_rank(harness: Harness) -> None:
    session = await harness.session()
    deaths = 1

    async def hook(what: object) -> None:
        nonlocal deaths
        if isinstance(what, CreateModel) and deaths > 0:
            deaths -= 1
            raise RankDied("the rank was killed")

    harness.hook = hook
    created = await as_time_passes(harness, await harness.create(session, 0))
    assert isinstance(created, ModelCreated)
    await harness.result(await harness.fb(created.model_id, 1))
    deaths = 2
    assert isinstance(await as_time_passes(harness, await harness.create(session, 1)), ModelCreated)
    deaths = 10
    error = await as_time_passes(harness, await harness.create(session, 2))
    assert isinstance(error, ServerError)
    assert "died 3 times" in error.message


async def test_nobody_is_sent_to_a_damaged_checkpoint(harness: Harness) -> None:
    model = await harness.model()
    older = await harness.result(await harness.save(model, 1, "older"))
    newer = await harness.result(await harness.save(model, 2, "newer"))
    checkpoint = await harness.checkpoints.open(parse_path(newer.path))
    (Path(checkpoint.directory) / "adapter_model.safetensors").unlink()
    await lose(harness)
    message = (await harness.error(await harness.fb(model, 3))).message
    assert older.path in message
    assert newer.path not in message
    with pytest.raises(Damaged, match=newer.path) as raised:
        await harness.service.training.weights_info("alice", newer.path)
    assert raised.value.http_status == 400
    assert str(harness.path) not in str(raised.value)


async def test_a_base_that_ends_nothing_is_given_up(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    block = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, ForwardBackward):
            await block.wait()

    harness.hook = hook
    stuck = await harness.fb(model, 1)
    for _ in range(7200 // 60 - 1):
        harness.clock._now += 60
        await harness.service.heartbeat("alice", session)
    await harness.service.sweep()
    await harness.pending(stuck)
    await harness.advance(62.0)
    error = await harness.error(stuck)
    assert isinstance(error, ServerError)
    assert "has ended no request" in error.message
    assert isinstance(await harness.error(await harness.fb(model, 2)), Lost)
    block.set()


async def test_an_accepted_request_ends_though_the_store_fails_a_write(harness: Harness) -> None:
    class FailsOnce(SqlFutureStore):
        failures = 1

        async def _save(self, answer, loss=None) -> None:  # type: ignore[no-untyped-def]
            if FailsOnce.failures:
                FailsOnce.failures -= 1
                raise OSError("disk full")
            await super()._save(answer, loss)

    harness.futures_class = FailsOnce
    await harness.restart()
    model = await harness.model()
    FailsOnce.failures = 1
    submitted = await harness.fb(model, 1)
    answer = await harness.result(submitted)
    await harness.result(await harness.step(model, 2))
    await harness.restart()
    assert repr(await harness.result(submitted)) == repr(answer), "and it was written later"


async def test_an_over_session_stays_over(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    await harness.service.finish_session("alice", session, reason="success", detail=None)
    await harness.restart()
    with pytest.raises(Gone):
        await harness.service.heartbeat("alice", session)
    with pytest.raises(NotFound):
        await harness.fb(model, 1)
