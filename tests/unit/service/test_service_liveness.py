"""Clients that are there, and those that are not any more: whose sampling requests run on."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from service_harness import BASE, Harness

from descant.errors import Gone, NotFound, ServerError, UserError
from descant.service.futures import Pending, Submitted
from descant.service.liveness import (
    CLONE_IDS,
    DISCONNECT_GRACE_S,
    HEARTBEAT_S,
    MISSED_HEARTBEATS,
    ORPHAN_GRACE_S,
    RECONNECT_GRACE_S,
)
from descant.testing.clock import settle
from descant.types import SampleRequest

GRACE_S = DISCONNECT_GRACE_S
SILENCE_S = MISSED_HEARTBEATS * HEARTBEAT_S


class Sampling:
    """A session on the base whose requests all run until ``release``."""

    def __init__(self, harness: Harness, session: str, sampler: str):
        self.harness, self.session, self.sampler = harness, session, sampler
        self.begun = 0
        self.release = asyncio.Event()
        self.polls: dict[str, asyncio.Task[Any]] = {}

        async def hook(what: object) -> None:
            if isinstance(what, SampleRequest):
                self.begun += 1
                await self.release.wait()

        harness.hook = hook

    async def submit(self, *seq_ids: int, polls_at_once: bool = False) -> list[Submitted]:
        begun = self.begun + len(seq_ids)
        sent = [await self.harness.sample(self.sampler, seq_id, polls_at_once=polls_at_once) for seq_id in seq_ids]
        await self.harness.until(lambda: self.begun == begun)
        return sent

    async def poll(self, submitted: Submitted) -> None:
        wait = self.harness.service.futures.retrieve_future("alice", submitted.request_id, timeout_s=10**9)
        self.polls[submitted.request_id] = asyncio.create_task(wait)
        await settle()

    async def break_off(self, submitted: Submitted) -> None:
        """As the server does when the connection has closed."""
        poll = self.polls.pop(submitted.request_id)
        poll.cancel()
        await asyncio.wait([poll])
        await self.harness.service.futures.poll_disconnected("alice", submitted.request_id)
        await settle()

    def running(self) -> int:
        return self.harness.service.sampling.admission[BASE].held.requests

    async def gone(self, submitted: Submitted) -> None:
        with pytest.raises(Gone, match="send it again"):
            await self.harness.service.futures.retrieve_future("alice", submitted.request_id, timeout_s=0)

    async def there(self, submitted: Submitted) -> None:
        state = await self.harness.service.futures.retrieve_future("alice", submitted.request_id, timeout_s=0)
        assert isinstance(state, Pending)


@pytest.fixture
async def sampling(harness: Harness) -> Sampling:
    session = await harness.session()
    sampler = await harness.service.sampling.create_sampling_session(
        "alice", session_id=session, sampling_session_seq_id=0, base_model=BASE, model_path=None
    )
    return Sampling(harness, session, sampler)


async def test_a_client_that_closed_all_its_connections_is_abandoned(harness: Harness, sampling: Sampling) -> None:
    first, second, unpolled = await sampling.submit(0, 1, 2)
    await sampling.poll(first)
    await sampling.poll(second)
    await sampling.break_off(first)
    await harness.clock.advance(10 * GRACE_S)
    assert sampling.running() == 3, "it still waits for another"
    await sampling.break_off(second)
    await harness.clock.advance(GRACE_S * 0.9)
    assert sampling.running() == 3
    await harness.clock.advance(GRACE_S * 0.2)
    await harness.until(lambda: sampling.running() == 0)
    await harness.until(lambda: not harness.service._backends[BASE].engine._running)  # type: ignore[attr-defined]
    for submitted in (first, second, unpolled):
        await sampling.gone(submitted)
    [again] = await sampling.submit(3)
    sampling.release.set()
    assert len((await harness.result(again)).sequences) == 1


@pytest.mark.parametrize("sign", ["poll", "submit", "heartbeat"])
async def test_one_that_comes_back_keeps_its_requests(harness: Harness, sampling: Sampling, sign: str) -> None:
    [submitted] = await sampling.submit(0)
    await sampling.poll(submitted)
    await sampling.break_off(submitted)
    await harness.clock.advance(GRACE_S * 0.9)
    match sign:
        case "poll":
            await sampling.poll(submitted)
        case "submit":
            await sampling.submit(1)
        case "heartbeat":
            await harness.service.heartbeat("alice", sampling.session)
    await harness.clock.advance(10 * GRACE_S)
    await sampling.there(submitted)
    sampling.release.set()
    assert len((await harness.result(submitted)).sequences) == 1


async def test_a_client_whose_polls_are_cut_by_others_is_abandoned_once(harness: Harness, sampling: Sampling) -> None:
    first, second = await sampling.submit(0, 1)
    await sampling.poll(first)
    await sampling.break_off(first)
    await harness.clock.advance(GRACE_S * 1.1)
    await harness.until(lambda: sampling.running() == 0)
    for submitted in (first, second):
        await sampling.gone(submitted)
    [again] = await sampling.submit(2)
    for _ in range(5):
        await sampling.poll(again)
        await sampling.break_off(again)
        await harness.clock.advance(RECONNECT_GRACE_S * 0.9)
    await sampling.there(again)
    sampling.release.set()
    await harness.result(again)


async def test_training_goes_on_without_its_client(harness: Harness, sampling: Sampling) -> None:
    model = await harness.model(sampling.session)
    held = await harness.fb(model, 2)  # waits for seq_id 1
    [sample] = await sampling.submit(0)
    await sampling.poll(held)
    await sampling.break_off(held)
    await harness.clock.advance(2 * GRACE_S)
    await harness.until(lambda: sampling.running() == 0)
    await sampling.gone(sample)
    await harness.result(await harness.fb(model, 1))
    await harness.result(held)


async def test_a_copy_of_a_sampling_client_is_a_client_of_its_own(harness: Harness, sampling: Sampling) -> None:
    own, copied = await sampling.submit(0, 7 * CLONE_IDS + 1)
    await sampling.poll(own)
    await sampling.poll(copied)
    await sampling.break_off(copied)
    await harness.clock.advance(2 * GRACE_S)
    await harness.until(lambda: sampling.running() == 1)
    await sampling.gone(copied)
    await sampling.there(own)


async def test_silence_gives_up_too_but_not_while_somebody_waits(harness: Harness, sampling: Sampling) -> None:
    [submitted] = await sampling.submit(0)
    await sampling.poll(submitted)
    for _ in range(20):
        await harness.advance(10)
    assert sampling.running() == 1
    sampling.polls.popitem()[1].cancel()
    await settle()
    await harness.service.heartbeat("alice", sampling.session)
    await harness.advance(SILENCE_S * 0.9)
    assert sampling.running() == 1
    await harness.advance(SILENCE_S * 0.2)
    await harness.until(lambda: sampling.running() == 0)
    await sampling.gone(submitted)


async def test_what_its_client_says_it_polls_for_at_once_ends_orphaned(harness: Harness, sampling: Sampling) -> None:
    asked, orphaned = await sampling.submit(0, 1, polls_at_once=True)
    [slow] = await sampling.submit(2)
    await sampling.there(asked)
    await harness.advance(ORPHAN_GRACE_S * 0.9)
    assert sampling.running() == 3
    await harness.advance(ORPHAN_GRACE_S * 0.2)
    await harness.until(lambda: sampling.running() == 2)
    await sampling.gone(orphaned)
    await harness.service.heartbeat("alice", sampling.session)
    await harness.advance(SILENCE_S * 0.9)
    await sampling.there(asked)
    await sampling.there(slow)
    sampling.release.set()
    await harness.result(asked)
    await harness.result(slow)
    assert sampling.running() == 0


async def test_what_has_ended_orphaned_keeps_its_answer(harness: Harness, sampling: Sampling) -> None:
    [submitted] = await sampling.submit(0, polls_at_once=True)
    sampling.release.set()
    await harness.until(lambda: sampling.running() == 0)
    await harness.advance(ORPHAN_GRACE_S * 2)
    assert len((await harness.result(submitted)).sequences) == 1


async def test_a_submission_that_was_disconnected_ends_unless_it_was_polled(
    harness: Harness, sampling: Sampling
) -> None:
    asked, polled, orphaned, other = await sampling.submit(0, 1, 2, 3)
    futures = harness.service.futures
    await sampling.there(asked)
    await sampling.poll(polled)
    with pytest.raises(NotFound):
        await futures.submission_disconnected("bob", orphaned.request_id)
    for submitted in (asked, polled, orphaned, orphaned):
        await futures.submission_disconnected("alice", submitted.request_id)
    assert sampling.running() == 4, "the client may send it again, and come"
    await harness.advance(ORPHAN_GRACE_S * 0.9)
    assert (await harness.sample(sampling.sampler, 2)).request_id == orphaned.request_id
    await harness.advance(ORPHAN_GRACE_S * 0.9)
    assert sampling.running() == 4, "it was sent again"
    await harness.advance(ORPHAN_GRACE_S * 0.2)
    await harness.until(lambda: sampling.running() == 3)
    await sampling.gone(orphaned)
    assert (await harness.sample(sampling.sampler, 2)).request_id == orphaned.request_id
    assert sampling.running() == 3, "the same request again takes no room"
    for submitted in (asked, other):
        await sampling.there(submitted)
    sampling.release.set()
    for submitted in (asked, polled, other):
        await harness.result(submitted)
    assert sampling.running() == 0
    await futures.submission_disconnected("alice", other.request_id)
    await harness.result(other)


@pytest.mark.parametrize("waits", [False, True])
async def test_who_polls_at_once_and_disconnects_a_submission_has_vanished_unless_it_waits(
    harness: Harness, sampling: Sampling, waits: bool
) -> None:
    first, second = await sampling.submit(0, 1, polls_at_once=True)
    await sampling.there(first)
    if waits:
        await sampling.poll(first)
    await harness.service.futures.submission_disconnected("alice", second.request_id)
    await harness.advance(GRACE_S * 1.1)
    await settle()
    await harness.until(lambda: sampling.running() == (2 if waits else 0))
    if not waits:
        await sampling.gone(first)
        await sampling.gone(second)


async def test_training_goes_on_though_its_submission_was_disconnected(harness: Harness, sampling: Sampling) -> None:
    model = await harness.model(sampling.session)
    held = await harness.fb(model, 2)
    await harness.service.futures.submission_disconnected("alice", held.request_id)
    await harness.advance(ORPHAN_GRACE_S * 2)
    await harness.result(await harness.fb(model, 1))
    await harness.result(held)


async def test_what_was_given_up_stays_failed_after_a_restart(harness: Harness, sampling: Sampling) -> None:
    [submitted] = await sampling.submit(0)
    await harness.advance(SILENCE_S * 1.1)
    await harness.until(lambda: sampling.running() == 0)
    await harness.restart()
    error = await harness.error(submitted)
    assert isinstance(error, ServerError)
    assert "abandoned" in str(error)


async def test_cancel_ends_a_sampling_request_and_nothing_else(harness: Harness, sampling: Sampling) -> None:
    model = await harness.model(sampling.session)
    held = await harness.fb(model, 2)
    cancelled, other = await sampling.submit(0, 1)
    with pytest.raises(NotFound):
        await harness.service.futures.cancel_future("bob", cancelled.request_id)
    for submitted in (cancelled, cancelled, held):
        await harness.service.futures.cancel_future("alice", submitted.request_id)
    assert isinstance(error := await harness.error(cancelled), UserError)
    assert "cancelled" in str(error)
    await harness.until(lambda: sampling.running() == 1)
    sampling.release.set()
    await harness.result(other)
    await harness.result(await harness.fb(model, 1))
    await harness.result(held)
    await harness.service.futures.cancel_future("alice", other.request_id)


async def test_what_a_silent_clients_models_have_learnt_is_kept_for_a_while(harness: Harness) -> None:
    session = await harness.session()
    model, untouched = await harness.model(session), await harness.model(session, model_seq_id=1)
    await harness.result(await harness.fb(model, 1))
    await harness.result(await harness.step(model, 2))
    learnt = harness.weights(model).copy()
    await harness.advance(harness.settings.session_timeout_s + 1)
    await harness.until(lambda: not harness.service._models.ending)
    path = f"tinker://{model}/weights/when-silent"
    with pytest.raises(NotFound, match=path):
        await harness.fb(model, 3)
    with pytest.raises(NotFound, match="nothing was heard of it"):
        await harness.fb(untouched, 1)
    again = await harness.service.creation.load_weights_new(
        "alice", session_id=await harness.session(), model_seq_id=0, path=path, optimizer=True, base_model=None,
        user_metadata=None,
    )  # fmt: skip
    await harness.result(again)
    assert again.model_id is not None
    np.testing.assert_allclose(harness.weights(again.model_id), learnt, atol=1e-6)
    await harness.advance(harness.settings.keep_silent_s + 1)
    with pytest.raises(NotFound):
        await harness.service.training.weights_info("alice", path)


async def test_a_client_that_finishes_leaves_nothing(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    await harness.result(await harness.fb(model, 1))
    await harness.finish(session)
    await harness.until(lambda: not harness.service._models.ending)
    assert not await harness.checkpoints.list(model)
