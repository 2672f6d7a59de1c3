from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from service_harness import BASE, CountingEngine, Harness, submission

from descant.errors import NotFound, Overloaded, RankDied, ServerError, UserError
from descant.service.sample_fold import SampleFold
from descant.service.sampling_admission import REQUEST_BYTES, SamplingLoad
from descant.testing.clock import settle
from descant.types import (
    CheckpointName,
    PromptScores,
    SampleDelta,
    SampleOutput,
    SampleRequest,
    SamplerKind,
    SnapshotRef,
    TopK,
    Version,
)


async def sampler(harness: Harness, session: str, number: int, path: str | None = None, *, owner: str = "alice") -> str:
    return await harness.service.sampling.create_sampling_session(
        owner,
        session_id=session,
        sampling_session_seq_id=number,
        base_model=BASE if path is None else None,
        model_path=path,
    )


async def test_the_base_model(harness: Harness) -> None:
    session = await harness.session()
    id_ = await sampler(harness, session, 0)
    assert id_ == f"{session}:sample:0"
    assert await sampler(harness, session, 0) == id_
    submitted = await harness.sample(id_, 10**18, n=3)
    assert submitted.sample_sequence_ids == tuple(f"{id_}:{10**18}:{i}" for i in range(3))
    output = await harness.result(submitted)
    assert len(output.sequences) == 3
    assert output.versions == ()


async def test_a_short_name_is_refused_where_a_client_would_look_for_a_tokenizer_by_it(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session, base="other")
    assert (await harness.service.training.get_info("alice", model)).facts.name == "fake/other"
    path = (await harness.result(await harness.sampler(model, 1, name="a"))).path
    for model_path in (None, path):
        with pytest.raises(UserError, match=r"base_model is 'other', a short name .* use 'fake/other'"):
            await harness.service.sampling.create_sampling_session(
                "alice", session_id=session, sampling_session_seq_id=0, base_model="other", model_path=model_path
            )


async def test_a_sampling_client_keeps_its_version(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    old = (await harness.result(await harness.sampler(model, 1, number=0))).sampling_session_id
    before = await harness.greedy(old, 0)
    for seq_id in range(2, 12, 2):
        await harness.result(await harness.fb(model, seq_id))
        await harness.result(await harness.step(model, seq_id + 1, lr=1.0))
    new = (await harness.result(await harness.sampler(model, 12, number=1))).sampling_session_id
    after, other = await harness.greedy(old, 1), await harness.greedy(new, 0)
    np.testing.assert_array_equal(before.sequences[0].logprobs, after.sequences[0].logprobs)
    assert list(before.sequences[0].tokens) != list(other.sequences[0].tokens)
    assert not await harness.checkpoints.list(), "an ephemeral save is no checkpoint"
    assert not harness.world.snapshots


async def test_an_inflight_client_follows_and_older_weights_stay_for_snapshots_only(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)

    async def saved(seq_id: int, number: int, kind: SamplerKind | None) -> str:
        await harness.result(await harness.fb(model, seq_id))
        await harness.result(await harness.step(model, seq_id + 1, lr=1.0))
        return (
            await harness.result(await harness.sampler(model, seq_id + 2, number=number, kind=kind))
        ).sampling_session_id

    def number(output: SampleOutput) -> int:
        return output.versions[0].number

    def held() -> set[int]:
        return {version.number for version in harness.world.published}

    follower = await saved(1, 0, "inflight")
    assert number(await harness.greedy(follower, 0)) == 3
    fixed = await saved(4, 1, "snapshot")
    assert number(await harness.greedy(follower, 1)) == 6, "it follows whatever is newer"
    assert held() == {6}, "nobody samples 3 any more"
    late = await saved(7, 2, "inflight")
    unsaid = await saved(10, 3, None)
    assert [number(await harness.greedy(s, 2)) for s in (follower, late, fixed, unsaid)] == [12, 12, 6, 12]
    assert held() == {6, 12}
    await harness.service.finish_session("alice", session, reason="success", detail=None)
    await harness.until(lambda: not harness.world.published)
    publications = harness.service.sampling._publications[BASE]
    assert publications._following == publications._newest == publications._users == {}


async def test_weights_that_others_published_stay_for_those_who_follow(harness: Harness) -> None:
    model = await harness.model()
    follower = (await harness.result(await harness.sampler(model, 1, number=0, kind="inflight"))).sampling_session_id
    saved = await harness.result(await harness.sampler(model, 2, name="s"))
    other = await harness.session()
    assert (await harness.greedy(await sampler(harness, other, 0, saved.path))).versions[0].number == 2
    await harness.service.finish_session("alice", other, reason="success", detail=None)
    await settle()
    assert (await harness.greedy(follower)).versions[0].number == 2


async def test_an_inflight_request_that_runs_moves(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    follower = (await harness.result(await harness.sampler(model, 1, number=0, kind="inflight"))).sampling_session_id
    begun, release = asyncio.Event(), asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SampleRequest):
            begun.set()
            await release.wait()

    harness.hook = hook
    running = await harness.sample(follower)
    await begun.wait()
    await harness.result(await harness.sampler(model, 2, number=1, kind="inflight"))
    release.set()
    assert [v.number for v in (await harness.result(running)).versions] == [1, 2]


@pytest.mark.parametrize("harness", [False], indirect=True, ids=["together"])  # a pool counts by itself
async def test_numbers_of_what_is_open(harness: Harness) -> None:
    session = await harness.session()
    await harness.model(session)
    release = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SampleRequest):
            await release.wait()

    harness.hook = hook
    submitted = await harness.sample(await sampler(harness, session, 0))
    mine = {**(await harness.service.stats())[BASE], "requests_in_flight": 1, "samples_in_flight": 1, "models": 1}
    assert await harness.service.stats() == {BASE: mine, "fake/other": dict.fromkeys(mine, 0)}
    release.set()
    await harness.result(submitted)


@pytest.mark.parametrize("harness", [False], indirect=True, ids=["together"])
async def test_numbers_of_an_engine_that_counts(harness: Harness) -> None:
    """One that is busy has told some before; one that is dead has none."""
    ours = (await harness.service.stats())[BASE]
    harness.engine_class, harness.stats_timeout_s = CountingEngine, 0.01
    await harness.restart()
    engine = harness.engine
    assert isinstance(engine, CountingEngine)
    engine.told = {"sample_running": 1.0}
    assert await harness.service.stats() == {
        BASE: {**ours, "sample_running": 1, "stats_age_seconds": 0},
        "fake/other": ours,
    }
    engine.told = None
    await harness.advance(3.0)
    assert (await harness.service.stats())[BASE] == {**ours, "sample_running": 1, "stats_age_seconds": 3.0}
    engine.told = RankDied("it is gone")
    assert (await harness.service.stats())[BASE] == ours


async def test_what_is_not_said_is_a_setting(harness: Harness) -> None:
    await harness.stop()
    harness.settings = replace(harness.settings, sampler_kind="inflight")
    await harness.start()
    model = await harness.model()
    unsaid, fixed = [
        (await harness.result(await harness.sampler(model, n + 1, number=n, kind=kind))).sampling_session_id
        for n, kind in enumerate((None, "snapshot"))
    ]
    await harness.result(await harness.sampler(model, 3, number=2))
    assert (await harness.greedy(unsaid)).versions[0].number == 3
    assert (await harness.greedy(fixed)).versions[0].number == 2


async def test_a_path_is_published_once_and_only_when_sampled(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    saved = await harness.result(await harness.sampler(model, 1, name="s"))
    published = []
    release = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SnapshotRef):
            published.append(what)
            await release.wait()

    harness.hook = hook
    ids = [await sampler(harness, session, number, saved.path) for number in range(3)]
    assert not published
    sent = [await harness.sample(id_) for id_ in ids]
    await harness.until(lambda: bool(published))
    release.set()
    for submitted in sent:
        await harness.result(submitted)
    assert [ref.version for ref in published] == [Version(model_id=model, number=1)]


async def test_a_version_is_released_when_its_last_session_ends(harness: Harness) -> None:
    sessions = [await harness.session(), await harness.session()]
    model = await harness.model(sessions[0])
    saved = await harness.result(await harness.sampler(model, 1, name="s"))
    ids = [await sampler(harness, session, 5, saved.path) for session in sessions]
    for id_ in ids:
        await harness.greedy(id_)
    await harness.service.finish_session("alice", sessions[0], reason="success", detail=None)
    await harness.until(lambda: not harness.world.adapters)
    await settle()
    assert len(harness.world.published) == 1
    await harness.greedy(ids[1], 1)
    await harness.service.finish_session("alice", sessions[1], reason="success", detail=None)
    await harness.until(lambda: not harness.world.published)


async def test_a_sampler_of_a_checkpoint_that_is_gone_or_replaced(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    saved = await harness.result(await harness.save(model, 1, "w"))
    id_ = await sampler(harness, session, 0, saved.path)
    await harness.result(await harness.save(model, 2, "w", overwrite=True))
    assert "was replaced" in (await harness.error(await harness.sample(id_))).message
    await harness.checkpoints.delete(CheckpointName(model_id=model, type="weights", name="w"))
    error = await harness.error(await harness.sample(id_, 1))
    assert error.category == "user"
    assert "does not exist any more" in error.message
    with pytest.raises(NotFound):
        await sampler(harness, session, 1, saved.path)


async def test_a_number_names_one_sampler(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    await sampler(harness, session, 0)
    error = await harness.error(await harness.sampler(model, 1, number=0))
    assert "sampling session already" in error.message
    assert not harness.world.published
    await harness.result(await harness.sampler(model, 2, number=1))
    with pytest.raises(UserError, match="sampling session already"):
        await sampler(harness, session, 1)
    with pytest.raises(UserError, match="neither"):
        await harness.service.sampling.create_sampling_session(
            "alice", session_id=session, sampling_session_seq_id=2, base_model=None, model_path=None
        )


async def test_a_publication_that_fails(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)

    async def hook(what: object) -> None:
        if isinstance(what, SnapshotRef):
            raise ServerError("no row is free")

    harness.hook = hook
    assert "no row" in (await harness.error(await harness.sampler(model, 1, number=0))).message
    harness.hook = None
    assert not harness.world.snapshots
    await harness.result(await harness.sampler(model, 2, number=0)), "the number was not taken"


async def test_so_many_samples_and_no_more(harness: Harness) -> None:
    harness.settings = replace(harness.settings, max_samples_in_flight=8)
    await harness.restart()
    session = await harness.session()
    id_ = await sampler(harness, session, 0)
    release = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SampleRequest):
            await release.wait()

    harness.hook = hook
    answers = await asyncio.gather(*(harness.sample(id_, n) for n in range(20)), return_exceptions=True)
    taken = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(taken) == 8
    assert all(isinstance(answer, Overloaded) for answer in answers if isinstance(answer, BaseException))
    release.set()
    for submitted in taken:
        await harness.result(submitted)
    seq_id = answers.index(taken[0])
    again = await asyncio.gather(*(harness.sample(id_, seq_id) for _ in range(8)))
    assert {submitted.request_id for submitted in again} == {taken[0].request_id}
    await harness.result(await harness.sample(id_, 100)), "neither an end nor a repetition keeps a place"


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        ({"max_samples_in_flight": 8}, "sampling requests"),
        ({"max_sequences_in_flight": 16}, "sequences"),
        ({"max_sampling_bytes": 8 * (REQUEST_BYTES + 8)}, "bytes of prompts"),
    ],
)
async def test_one_owner_fills_all_and_another_finds_room(harness: Harness, limit: dict, what: str) -> None:
    """By number, by samples and by size, each two of eight requests' worth for the first and the second newcomer."""
    harness.settings = replace(harness.settings, **limit)
    await harness.restart()
    release = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SampleRequest):
            await release.wait()

    harness.hook = hook
    taken = []
    for owner in ("alice", "bob", "carol"):
        id_ = await sampler(harness, await harness.session(owner), 0, owner=owner)
        answers = await asyncio.gather(
            *(harness.sample(id_, number, owner=owner, n=2) for number in range(20)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(answer, Overloaded) and what in answer.message for answer in refused)
        taken.append(20 - len(refused))
    assert taken == [8, 4, 2]
    release.set()
    await harness.until(lambda: harness.service.sampling.admission[BASE].held == SamplingLoad())
    assert harness.service.sampling.admission[BASE]._of_owner == {}


async def test_a_request_larger_than_all_room_is_taken_where_its_owner_has_none(harness: Harness) -> None:
    harness.settings = replace(harness.settings, max_sequences_in_flight=4)
    await harness.restart()
    id_ = await sampler(harness, await harness.session(), 0)
    assert len((await harness.result(await harness.sample(id_, 0, n=9))).sequences) == 9


@pytest.mark.parametrize("shared", [False, True])
async def test_an_engine_is_told_whose_a_request_is_and_who_may_share_its_prefix(
    harness: Harness, shared: bool
) -> None:
    harness.settings = replace(harness.settings, share_prefixes=shared)
    await harness.restart()
    hits = []
    for owner in ("alice", "bob", "alice"):
        id_ = await sampler(harness, await harness.session(owner), 0, owner=owner)
        output = await harness.result(await harness.sample(id_, owner=owner), owner=owner)
        hits.append(output.prompt_cache_hit_tokens)
    assert hits == ([0, 1, 1] if shared else [0, 0, 1])


async def test_who_finds_the_engine_full_of_anothers_requests_does_not_wait(harness: Harness) -> None:
    harness.max_num_seqs = 4
    await harness.restart()
    release = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, SampleRequest) and what.num_samples == 2:
            await release.wait()

    harness.hook = hook
    ids = {o: await sampler(harness, await harness.session(o), 0, owner=o) for o in ("alice", "bob")}
    flood = [await harness.sample(ids["alice"], number, n=2) for number in range(32)]
    await settle()
    assert len((await harness.result(await harness.sample(ids["bob"], owner="bob"), owner="bob")).sequences) == 1
    release.set()
    answers = asyncio.gather(*(harness.result(submitted) for submitted in flood))
    while not answers.done():
        await harness.clock.advance(1.0)
    assert len(await answers) == 32


async def test_an_engine_that_is_full_is_waited_for(harness: Harness) -> None:
    harness.max_num_seqs = 4
    await harness.restart()
    id_ = await sampler(harness, await harness.session(), 0)
    sent = await asyncio.gather(*(harness.sample(id_, n) for n in range(32)))
    answers = asyncio.gather(*(harness.result(submitted) for submitted in sent))
    while not answers.done():
        await harness.clock.advance(1.0)
    assert len(await answers) == 32


async def test_what_a_sample_refuses(harness: Harness) -> None:
    id_ = await sampler(harness, await harness.session(), 0)
    for wrong, match in (
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 1025}, "num_samples is 1025"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs is 21"),
        ({"topk_sample_logprobs": 21}, "topk_sample_logprobs is 21"),
        ({"prompt_alt_tokens_k": 21}, "prompt_alt_tokens_k is 21"),
        ({"seq_id": -1}, "seq_id is -1"),
    ):
        with pytest.raises(UserError, match=match):
            await harness.service.sampling.sample("alice", replace(submission(id_), **wrong))
    error = await harness.error(await harness.service.sampling.sample("alice", replace(submission(id_), prompt=())))
    assert "prompt" in error.message


def _delta(sample: int, tokens: list[int], end: bool, prompt: PromptScores | None = None) -> SampleDelta:
    column = np.asarray(tokens, np.int32)[:, None]
    return SampleDelta(
        topk_logprobs=TopK(token_ids=column, logprobs=-column.astype(np.float32)) if sample else None,
        request_id="r",
        sample=sample,
        tokens=np.asarray(tokens, np.int32),
        logprobs=-np.asarray(tokens, np.float32),
        stop_reason="length" if end else None,
        version=Version(model_id="m", number=0),
        prompt=prompt,
        prompt_cache_hit_tokens=64 if prompt else 0,
    )


def test_deltas_fold_in_any_order_among_samples() -> None:
    prompt = PromptScores(logprobs=np.asarray([np.nan, -1], np.float32))
    fold = SampleFold(2)
    for delta in (_delta(1, [4], False, prompt), _delta(0, [1, 2], True), _delta(1, [5], False), _delta(1, [], True)):
        fold.add(delta)
    output = fold.output()
    assert [list(sequence.tokens) for sequence in output.sequences] == [[1, 2], [4, 5]]
    assert list(output.sequences[1].logprobs) == [-4, -5]
    assert output.prompt is prompt
    assert output.prompt_cache_hit_tokens == 64
    assert output.sequences[0].topk_logprobs is None
    assert output.sequences[1].topk_logprobs is not None
    assert output.sequences[1].topk_logprobs.token_ids.tolist() == [[4], [5]]
    assert output.versions == (Version(model_id="m", number=0),)


def test_an_engine_that_breaks_its_word_is_an_error() -> None:
    fold = SampleFold(2)
    fold.add(_delta(0, [1], True))
    with pytest.raises(ServerError, match="without finishing sample 1 of 2"):
        fold.output()
    with pytest.raises(ServerError, match="after its end"):
        fold.add(_delta(0, [1], True))
    with pytest.raises(ServerError, match="sample 2 of 2"):
        fold.add(_delta(2, [1], True))
