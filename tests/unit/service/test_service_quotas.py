"""What one owner may have: each quota met, the sentence, and what makes room again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from service_harness import BASE, Harness
from sqlalchemy import func, select, update

from descant.errors import NotFound, QuotaExceeded, UserError
from descant.service import schema
from descant.service.jobs import Job
from descant.service.liveness import client_of
from descant.service.quotas import model_bytes, version_bytes
from descant.testing.clock import settle
from descant.types import FutureKey, Lora, SampleRequest, SnapshotRef, Version

RANK_8 = 32 * 8
"""Numbers of an adapter of the fake base up to rank 8: 16 tokens, A and B."""


async def started(harness: Harness, *, quotas: dict[str, Any] | None = None, **settings: Any) -> None:
    harness.settings = replace(harness.settings, **settings)
    harness.quotas = replace(harness.quotas, **(quotas or {}))
    await harness.restart()


async def later(harness: Harness, seconds: float, *sessions: str) -> None:
    """Time passes; of these sessions something is heard before."""
    for session in sessions:
        await harness.service.heartbeat("alice", session)
    await harness.advance(seconds)


async def count(harness: Harness, table: Any) -> int:
    ((number,),) = await harness.database.read(select(func.count()).select_from(table))
    return int(number)


# --------------------------------------------------------------------------------------------------------------------
# Sessions, models, samplers


async def test_sessions(harness: Harness) -> None:
    await started(harness, quotas={"sessions": 3})
    first, *_ = [await harness.session(key=str(n)) for n in range(3)]
    with pytest.raises(QuotaExceeded, match=r"3 open sessions, expected at most 3 \(quota.sessions\)") as error:
        await harness.session()
    assert error.value.http_status == 403
    assert await harness.session(key="0") == first, "what was made is found"
    await harness.session("bob")
    await harness.restart()
    with pytest.raises(QuotaExceeded):
        await harness.session()
    await harness.finish(first)
    answers = await asyncio.gather(*(harness.session() for _ in range(4)), return_exceptions=True)
    assert [isinstance(answer, QuotaExceeded) for answer in answers].count(False) == 1


async def test_models_by_number_and_by_bytes(harness: Harness) -> None:
    size = 16 * RANK_8
    await started(harness, quotas={"models": 3, "model_bytes": 4 * size})
    session, other = await harness.session(), await harness.session()
    await harness.model(session, model_seq_id=0)
    with pytest.raises(QuotaExceeded, match=rf"take {4 * size} bytes beside the {size} .* at most {4 * size} together"):
        await harness.create(session, 1, rank=32)
    for number in (1, 1, 2):
        await harness.model(other, model_seq_id=number)
    with pytest.raises(QuotaExceeded, match=r"3 models, expected at most 3 \(quota.models\)"):
        await harness.create(session, 3)
    await harness.result(await harness.create(session, 0)), "one that is there is found"
    await harness.model(owner="bob")
    await harness.finish(other)
    answers = await asyncio.gather(*(harness.create(session, n) for n in range(4, 9)), return_exceptions=True)
    assert [isinstance(answer, QuotaExceeded) for answer in answers].count(False) == 2, "at once, too"
    await harness.finish(session)
    assert set(harness.service._models._of_owner) == {"bob"}


async def test_a_model_that_cannot_be_created_does_not_count(harness: Harness) -> None:
    await started(harness, quotas={"models": 1})
    session = await harness.session()

    async def hook(what: object) -> None:
        raise UserError("not today")

    harness.hook = hook
    for number in range(3):
        assert "not today" in (await harness.error(await harness.create(session, number))).message
    harness.hook = None
    await harness.model(session, model_seq_id=9)


async def test_samplers(harness: Harness) -> None:
    await started(harness, quotas={"samplers": 2})
    session = await harness.session()
    model = await harness.model(session)

    async def sampler(number: int) -> str:
        return await harness.service.sampling.create_sampling_session(
            "alice", session_id=session, sampling_session_seq_id=number, base_model=BASE, model_path=None
        )

    await harness.result(await harness.sampler(model, 1, number=9))
    ids = [await sampler(number) for number in (0, 1)]
    with pytest.raises(QuotaExceeded, match=r"2 sampling sessions, expected at most 2 \(quota.samplers\)"):
        await sampler(2)
    assert await sampler(1) == ids[1]


async def test_what_is_told_of_a_session_or_a_model_is_short(harness: Harness) -> None:
    for fields, match in (
        ({"tags": ["x" * 17_000]}, "tags has 17004 bytes as JSON, expected at most 16384"),
        ({"user_metadata": {"a": "\u00e9" * 3000}}, "user_metadata has 18"),
        ({"display_name": "x" * 513}, "display_name has 513 characters, expected at most 512"),
        ({"project_id": "x" * 513}, "project_id"),
        ({"sdk_version": "x" * 513}, "sdk_version"),
        ({"key": "x" * 513}, "idempotency_key"),
    ):
        with pytest.raises(UserError, match=match):
            await harness.session(**fields)
    session = await harness.session(user_metadata={"a": "b" * 16_000}, tags=["x" * 16_000])
    with pytest.raises(UserError, match="user_metadata has"):
        await harness.service.creation.create_model(
            "alice", session_id=session, model_seq_id=0, base_model=BASE, trainable=Lora(rank=2), optimizer="adamw",
            user_metadata={"a": "b" * 17_000},
        )  # fmt: skip
    with pytest.raises(UserError, match="detail has"):
        await harness.service.finish_session("alice", session, reason="success", detail="x" * 10_000)
    assert await count(harness, schema.models) == 0


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints


async def test_checkpoints_by_number(harness: Harness) -> None:
    await started(harness, quotas={"checkpoints": 2})
    model = await harness.model()
    for seq_id, name in enumerate(("a", "b"), start=1):
        await harness.result(await harness.save(model, seq_id, name, ttl=3600 if name == "a" else None))
    error = await harness.error(await harness.save(model, 3, "c"))
    assert "you have 2 checkpoints, expected at most 2 (quota.checkpoints); save with ttl_seconds" in error.message
    assert error.category == "user"
    await harness.result(await harness.save(model, 4, "b", overwrite=True)), "instead of another"
    await harness.result(await harness.save(await harness.model(owner="bob"), 1, owner="bob"), owner="bob")
    await harness.advance(3700)
    await harness.result(await harness.save(await harness.model(), 1, "c"))
    assert not list(harness.checkpoints.directory.glob("attempt-*/x"))


async def test_checkpoints_by_bytes(harness: Harness) -> None:
    model = await harness.model()
    saved = await harness.result(await harness.save(model, 1, "a"))
    [checkpoint] = await harness.checkpoints.list()
    size = checkpoint.manifest.size_bytes
    harness.quotas = replace(harness.quotas, checkpoint_bytes=3 * size)
    await harness.restart()
    model = await harness.model()
    sent = [await harness.save(model, n, f"{n}") for n in range(1, 6)]
    answers = [await harness.answer(submitted) for submitted in sent]
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(refused) == 3, "those that were there before, and those that are written at once, count"
    assert f"{size} more are more than the {3 * size} that they may take (quota.checkpoint_bytes)" in str(refused[0])
    assert len(await harness.checkpoints.list()) == 3
    assert len(list(harness.checkpoints.directory.iterdir())) == 3, "what was refused is removed"
    assert not harness.world.snapshots
    assert saved.path


async def test_the_list_of_checkpoints_is_made_what_there_is(harness: Harness) -> None:
    """One was removed while the server was down, one was committed as it ended, one was listed by an older version."""
    model = await harness.model()
    for seq_id, name in enumerate("abc", start=1):
        await harness.result(await harness.save(model, seq_id, name))
    uris = {checkpoint.name.name: checkpoint.name.uri for checkpoint in await harness.checkpoints.list()}
    sizes = await harness.service._registry.checkpoints()
    await harness.checkpoints.delete(next(c.name for c in await harness.checkpoints.list() if c.name.name == "a"))
    table = schema.checkpoints
    await harness.database.write(lambda c: c.execute(table.delete().where(table.c.uri == uris["b"])) and None)
    await harness.database.write(lambda c: c.execute(update(table).values(num_bytes=0)) and None)
    await harness.restart()
    del sizes[uris["a"]]
    assert await harness.service._registry.checkpoints() == sizes
    usage = await harness.service._registry.checkpoint_usage("alice", without="")
    assert (usage.count, usage.num_bytes) == (2, sum(sizes.values()))


# --------------------------------------------------------------------------------------------------------------------
# Weights without a name


def held(harness: Harness) -> set[int]:
    return {version.number for version in harness.world.published}


async def unnamed(harness: Harness, model: str, *seq_ids: int, kind: Any = None) -> list[str]:
    """A save without a name each; the sampling sessions."""
    ids = []
    for seq_id in seq_ids:
        saved = await harness.result(await harness.sampler(model, seq_id, number=seq_id, kind=kind))
        ids.append(saved.sampling_session_id)
    return ids


async def test_a_loop_of_saves_keeps_the_newest_and_what_is_sampled(harness: Harness) -> None:
    await started(harness, keep_versions=4, keep_sampled_s=60.0)
    session = await harness.session()
    model = await harness.model(session)
    reference, *_ = await unnamed(harness, model, 1)
    most = 0
    for seq_id in range(2, 62):
        (sampler,) = await unnamed(harness, model, seq_id)
        await harness.greedy(sampler)
        if seq_id % 5 == 0:
            await harness.greedy(reference, seq_id)
        await later(harness, 10.0, session)
        most = max(most, len(held(harness)))
    assert most <= 9, "the newest, those sampled in a minute, and the one that is sampled again and again"
    assert {1, 58, 59, 60, 61} <= held(harness)
    numbers = (await harness.service.stats())[BASE]
    size = version_bytes(harness.world.facts, Lora(rank=2))
    assert numbers["unnamed_versions"] == len(held(harness)) == numbers["unnamed_version_bytes"] / size
    error = await harness.error(await harness.sample(f"{session}:sample:20", 1))
    assert error.category == "user"
    assert "were released: of a model's weights saved without a name the newest 4 are kept" in error.message
    assert "(service.keep_versions)" in error.message
    assert "save with a name (save_weights_for_sampler) those that are to stay" in error.message
    record = await harness.service._registry.sampling_session(f"{session}:sample:20")
    assert record is not None
    assert record.status == "released"
    open_session = harness.service._sessions.get(session)
    assert open_session is not None
    assert len(open_session.samplers) == len(held(harness))
    assert len(harness.service.sampling._samplers) <= len(held(harness))
    for _ in range(4):
        await later(harness, 500.0, session)
    assert held(harness) == {58, 59, 60, 61}
    await harness.finish(session)
    await harness.until(lambda: not harness.world.published)
    assert len(harness.service.sampling._ephemeral) == 0


async def test_bytes_of_an_owner(harness: Harness) -> None:
    size = version_bytes(harness.world.facts, Lora(rank=2))
    assert size == RANK_8 * 8
    await started(harness, quotas={"version_bytes": 4 * size})
    session = await harness.session()
    one, two = [await harness.model(session, model_seq_id=number) for number in range(2)]
    first, second, third = await unnamed(harness, one, 1, 2, 3)
    await harness.greedy(first)
    await harness.result(await harness.sampler(two, 1, number=11))
    assert len(harness.world.published) == 4
    await harness.result(await harness.sampler(two, 2, number=12))
    message = (await harness.error(await harness.sample(second))).message
    assert f"your weights saved without a name take {4 * size} bytes at most (quota.version_bytes)" in message
    await harness.greedy(first, 1)
    await harness.greedy(third)
    bobs = await harness.model(owner="bob")
    await harness.result(await harness.sampler(bobs, 1, number=0, owner="bob"), owner="bob")
    for number in range(2, 4):
        await harness.model(session, model_seq_id=number)
        await harness.result(await harness.sampler(f"{session}:train:{number}", 1, number=20 + number))
    await harness.model(session, model_seq_id=4)
    error = await harness.error(await harness.sampler(f"{session}:train:4", 1, number=30))
    assert error.category == "user"
    assert "each model's newest are among them" in error.message
    assert not harness.world.snapshots
    assert harness.service.sampling._ephemeral.num_bytes("alice") == 4 * size


async def test_what_runs_is_not_released_and_what_comes_meanwhile_is_told(harness: Harness) -> None:
    await started(harness, keep_versions=1, keep_sampled_s=10.0)
    session = await harness.session()
    model = await harness.model(session)
    old, other = await unnamed(harness, model, 1, 2)
    begun, release = asyncio.Event(), asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SampleRequest) and what.version == Version(model_id=model, number=1):
            begun.set()
            await release.wait()

    harness.hook = hook
    running = await harness.sample(old)
    await begun.wait()
    await unnamed(harness, model, 3)
    await harness.advance(50.0)
    assert held(harness) == {1, 3}
    assert "were released" in (await harness.error(await harness.sample(other))).message
    release.set()
    await harness.result(running)
    await harness.advance(9.0)
    assert held(harness) == {1, 3}
    await harness.advance(2.0)
    assert held(harness) == {3}


async def test_inflight_clients_follow_and_cost_one_version(harness: Harness) -> None:
    await started(harness, keep_versions=1, keep_sampled_s=10.0)
    session = await harness.session()
    model = await harness.model(session)
    follower, *_ = await unnamed(harness, model, *range(1, 10), kind="inflight")
    assert held(harness) == {9}
    for _ in range(4):
        await later(harness, 500.0, session)
    assert (await harness.greedy(follower)).versions == (Version(model_id=model, number=9),)
    assert harness.service.sampling._ephemeral.of_base(BASE)[0] == 1


async def test_a_client_that_is_not_heard_of_frees_its_weights(harness: Harness) -> None:
    session, other = await harness.session(), await harness.session()
    models = [await harness.model(which) for which in (session, other)]
    named = await harness.result(await harness.sampler(models[0], 1, name="kept"))
    file = await harness.service.sampling.create_sampling_session(
        "alice", session_id=session, sampling_session_seq_id=9, base_model=None, model_path=named.path
    )
    await harness.greedy(file)
    snapshot, *_ = await unnamed(harness, models[0], 2, 3)
    await unnamed(harness, models[0], 4, kind="inflight")
    await unnamed(harness, models[1], 1)
    await later(harness, 599.0)
    assert len(harness.world.published) == 5
    await later(harness, 2.0, other)
    assert harness.world.published.keys() == {
        Version(model_id=models[0], number=1),
        Version(model_id=models[1], number=1),
    }
    for sampling_session_id in (snapshot, f"{session}:sample:4"):
        message = (await harness.error(await harness.sample(sampling_session_id, 7))).message
        assert "nothing was heard of your client for 601 s" in message
        assert "kept for 600 s then (1/6 of service.session_timeout_s)" in message
    await harness.greedy(file, 1)
    (again,) = await unnamed(harness, models[0], 5)
    await harness.greedy(again), "who comes back goes on"


async def test_a_save_that_fails_counts_for_nothing(harness: Harness) -> None:
    model = await harness.model()

    async def hook(what: object) -> None:
        if isinstance(what, SnapshotRef):
            raise UserError("no row is free")

    harness.hook = hook
    assert "no row" in (await harness.error(await harness.sampler(model, 1, number=0))).message
    assert len(harness.service.sampling._ephemeral) == 0
    harness.hook = None
    await unnamed(harness, model, 2)
    await harness.service.sampling._retire([(Version(model_id=model, number=2), "enough")])
    assert len(harness.service.sampling._ephemeral) == 0


# --------------------------------------------------------------------------------------------------------------------
# What is remembered


async def test_results_are_forgotten_when_they_were_fetched_and_when_they_are_too_many(harness: Harness) -> None:
    await started(harness, quotas={"result_bytes": 20_000})
    model = await harness.model()
    fetched = await harness.fb(model, 1)
    await harness.result(fetched)
    await harness.advance(500.0)
    await harness.result(fetched), "an answer that was lost on its way is fetched again"
    await harness.advance(200.0)
    with pytest.raises(NotFound):
        await harness.result(fetched)
    sent = [await harness.fb(model, seq_id) for seq_id in range(2, 202)]
    await harness.until(lambda: not len(harness.service._jobs))
    await harness.advance(70.0)
    with pytest.raises(NotFound, match="no longer kept"):
        await harness.result(sent[0])
    await harness.result(sent[-1])
    rows = await harness.database.read(select(func.sum(func.length(schema.futures.c.body))))
    assert 10_000 < rows[0][0] <= 20_000


async def test_what_is_over_is_forgotten_and_the_file_becomes_smaller(harness: Harness) -> None:
    await started(harness, quotas={"sessions": 50}, keep_ended_s=1000.0)

    def size() -> int:
        return (harness.path / "descant.sqlite").stat().st_size

    kept = await harness.session()
    model = await harness.model(kept)
    saved = await harness.result(await harness.save(model, 1))
    early = await harness.session()
    await harness.model(early)
    await harness.finish(early)
    for _ in range(4):
        sessions = [await harness.session(user_metadata={"a": "b" * 16_000}) for _ in range(49)]
        for session in sessions:
            await harness.finish(session)
    assert await count(harness, schema.sessions) == 198
    await harness.service.heartbeat("alice", kept)
    await harness.advance(70.0)
    assert await count(harness, schema.sessions) == 51, "so many that are over as may be open, the latest"
    assert await count(harness, schema.models) == 1
    large = size()
    assert large > 50 * 16_000
    for _ in range(5):
        await later(harness, 300.0, kept)
    assert await count(harness, schema.sessions) == 1
    await harness.stop()
    assert size() < large / 4
    await harness.start()
    await harness.service.training.weights_info("alice", saved.path)


async def test_samplers_whose_weights_were_released_are_forgotten(harness: Harness) -> None:
    await started(harness, keep_versions=1, keep_sampled_s=1.0, keep_finished_s=100.0)
    session = await harness.session()
    model = await harness.model(session)
    await unnamed(harness, model, *range(1, 6))
    await harness.advance(5.0)
    assert await count(harness, schema.sampling_sessions) == 5
    await harness.service.heartbeat("alice", session)
    await harness.advance(200.0)
    assert await count(harness, schema.sampling_sessions) == 1
    with pytest.raises(NotFound):
        await harness.sample(f"{session}:sample:1")


# --------------------------------------------------------------------------------------------------------------------
# What a sweep costs


async def test_a_sweep_costs_what_is_due(harness: Harness) -> None:
    """30,000 silent sessions and 1,000 requests that wait: 1,000 sweeps, within the CPU time that one took when each
    looked at all sessions and for each of them at all requests (1.8 s)."""
    await started(harness, quotas={"sessions": 1 << 20})
    service = harness.service
    columns = ("owner", "sdk_version", "created_at")
    rows = [
        {"session_id": f"{n:032}", "tags": [], **dict.fromkeys(columns[:2], "alice"), "created_at": 0.0}
        for n in range(30_000)
    ]
    await harness.database.write(lambda c: c.execute(schema.sessions.insert(), rows) and None)
    await service._sessions.recover()
    for n in range(1000):
        key = FutureKey(kind="sample", scope=f"{n:032}:sample:0", seq_id=0)
        request_id, _ = await harness.futures.put(key=key, owner="alice", base=BASE, operation="sample")
        ended = partial(service._liveness.ended, request_id)
        job = Job(request_id=request_id, operation="sample", base=BASE, owner="alice", on_end=ended)
        service._liveness.began(request_id, client_of(key), polls_at_once=False)
        service._jobs.start(service._jobs.add(job), asyncio.Event().wait())  # type: ignore[arg-type]
    assert len(service._sessions) == 30_000
    assert len(service._jobs) == 1000
    await harness.clock.advance(1.0)
    before = time.process_time()
    for _ in range(1000):
        await service.sweep()
    assert time.process_time() - before < 1.8
    # And when all of them are due at once, each is looked at once.
    await harness.clock.advance(61.0)
    before = time.process_time()
    await service.sweep()
    print(f"\n30,000 sessions fell silent in {time.process_time() - before:.2f} s of CPU")
    await settle()
    await harness.until(lambda: not len(service._jobs))
    assert all(session.num_lapsed == 1 for session in service._liveness._sessions.values())


async def test_polls_keep_a_session_and_their_end_begins_its_silence(harness: Harness) -> None:
    await started(harness, seq_gap_timeout_s=1e6)
    session = await harness.session()
    model = await harness.model(session)
    behind = await harness.fb(model, 2)
    wait = harness.service.futures.retrieve_future("alice", behind.request_id, timeout_s=10**9)
    poll = asyncio.create_task(wait)
    await settle()
    for _ in range(50):
        await harness.advance(100.0)
        await settle()
    assert harness.service._sessions.get(session) is not None
    assert len(harness.service._liveness._timers) < 10
    poll.cancel()
    await settle()
    await harness.advance(3599.0)
    assert harness.service._sessions.get(session) is not None
    await harness.advance(2.0)
    assert harness.service._sessions.get(session) is None


def test_sizes_grow_with_the_rank(harness: Harness) -> None:
    facts = harness.world.facts
    for rank, row in ((1, 8), (8, 8), (9, 16), (32, 32), (33, 64), (256, 256)):
        assert version_bytes(facts, Lora(rank=rank)) == 32 * row * 8
        assert model_bytes(facts, Lora(rank=rank)) == 32 * row * 16
    assert np.dtype(facts.dtype).itemsize == 8


async def test_a_refusal_is_short_however_long_what_it_shows(harness: Harness) -> None:
    session = await harness.session()
    with pytest.raises(UserError) as error:
        await harness.create(session, base="x" * 10**6)
    assert len(error.value.message) < 1000
    with pytest.raises(UserError) as error:
        await harness.service.training.weights_info("alice", "tinker:/" + "x" * 10**6)
    assert len(error.value.message) < 1000
