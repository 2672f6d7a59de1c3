"""The scheduler against a sampler that checks the pages it is given (``testing.paged_sampler``)."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.errors import Overloaded, ServerError, UserError
from descant.prefix import PAGE_TOKENS
from descant.sample.pages import PageAllocator
from descant.sample.plan import PageCopy, SampleLimits, SequenceOutput
from descant.sample.scheduler import Scheduler
from descant.sample.scores import PromptScorer
from descant.testing.paged_sampler import EOS, VOCAB_SIZE, Finished, PagedFake, decode_letters, request, run, scheduler
from descant.types import EncodedText, PromptScores, SampleRequest, TensorData, Version


def assert_nothing_left(s: Scheduler) -> None:
    stats = s.stats()
    assert stats["used_pages"] == stats["running"] == stats["waiting"] == 0
    assert not s.has_work()
    assert s.versions() == set()
    assert s.plan() is None


def alone(entry: SampleRequest, *, prefix_caching: bool = True, **limits: object) -> Finished:
    s = scheduler(prefix_caching=prefix_caching, **{"num_pages": 64, **limits})
    s.add(entry)
    return run(s, PagedFake(64))


# ---------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "prompt is empty, expected at least 1 token"),
        ({"prompt": (1, 100)}, r"prompt.chunks\[0\].tokens\[1\] is 100, expected 0 to 99"),
        ({"prompt": (-1,)}, r"prompt.chunks\[0\].tokens\[0\] is -1, expected 0 to 99"),
        ({"prompt": (1,) * 201}, r"prompt has 201 tokens, expected at most 200 \(the context length\)"),
        (
            {"prompt": (1,) * 200, "max_tokens": 2},
            "max_tokens is 2 after a prompt of 200 tokens, expected at most 1 .*context length is 200",
        ),
        ({"max_tokens": 0}, "sampling_params.max_tokens is 0, expected at least 1"),
        ({"max_tokens": -1}, "sampling_params.max_tokens is -1"),
        (
            {"max_tokens": 198},
            "max_tokens is 198 after a prompt of 3 tokens, expected at most 197 .*context length is 200",
        ),
        ({"num_samples": 0}, "num_samples is 0, expected 1 to 1024"),
        ({"num_samples": 1025}, "num_samples is 1025, expected 1 to 1024"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs is -1, expected 0 to 20"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs is 21, expected 0 to 20"),
        ({"temperature": -0.1}, "sampling_params.temperature is -0.1"),
        ({"temperature": math.nan}, "sampling_params.temperature is nan"),
        ({"temperature": math.inf}, "sampling_params.temperature is inf"),
        ({"top_k": 0}, r"sampling_params.top_k is 0, expected -1 \(off\) or at least 1"),
        ({"top_k": -2}, "sampling_params.top_k is -2"),
        ({"top_p": 0.0}, "sampling_params.top_p is 0.0, expected more than 0 and at most 1"),
        ({"top_p": 1.01}, "sampling_params.top_p is 1.01"),
        ({"top_p": math.nan}, "sampling_params.top_p is nan"),
        ({"stop": (1, 100)}, r"sampling_params.stop\[1\] is 100, expected 0 to 99"),
        ({"stop": ("a", "")}, r"sampling_params.stop\[1\] is an empty string"),
        ({"stop": ("a", 1)}, r"sampling_params.stop\[1\] is 1, expected all token ids or all strings"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refused(fields: dict, message: str) -> None:
    s = scheduler(max_context_length=200)
    with pytest.raises(UserError, match=message):
        s.add(request(**fields))
    assert_nothing_left(s)


def test_the_chunk_with_the_bad_token_is_named() -> None:
    good, bad = (EncodedText(tokens=np.array(t, np.int32)) for t in ([1, 2], [3, 500]))
    entry = request()
    entry = SampleRequest(
        request_id="r", version=None, prompt=(good, bad), num_samples=1, sampling_params=entry.sampling_params
    )
    with pytest.raises(UserError, match=r"prompt.chunks\[1\].tokens\[1\] is 500"):
        scheduler().add(entry)


def test_what_can_never_fit_the_pool_is_refused_and_the_last_token_needs_no_room() -> None:
    s = scheduler(num_pages=2)
    with pytest.raises(
        UserError, match=r"max_tokens is 127 after a prompt of 3 tokens, expected at most 126 .*128 tokens"
    ):
        s.add(request(max_tokens=127))
    with pytest.raises(UserError, match="prompt has 129 tokens, expected at most 128"):
        s.add(request(prompt=[1] * 129, max_tokens=1))
    s.add(request(max_tokens=126))
    assert len(run(s, PagedFake(2)).tokens["r", 0]) == 126
    s.add(request(prompt=[1] * 128, max_tokens=1))
    assert len(run(s, PagedFake(2)).tokens["r", 0]) == 1
    assert_nothing_left(s)


def test_a_full_queue_is_overloaded_and_running_requests_do_not_count() -> None:
    s = scheduler(max_queued_requests=2, max_num_seqs=1)
    s.add(request("a", max_tokens=5))
    plan = s.plan()
    s.add(request("b", max_tokens=5))
    s.add(request("c", max_tokens=5))
    with pytest.raises(Overloaded, match="2 sample requests are waiting, the limit is 2"):
        s.add(request("d", max_tokens=5))
    fake = PagedFake(64)
    s.apply(plan, fake.step(plan))
    assert {key[0] for key in run(s, fake).reasons} == {"a", "b", "c"}


def test_a_request_id_in_use_is_refused() -> None:
    s = scheduler()
    s.add(request("a", max_tokens=2))
    with pytest.raises(UserError, match="'a' is being sampled already"):
        s.add(request("a", max_tokens=2))


# ------------------------------------------------------------------------------------------------------------- stops
def scripted(tokens: list[int], **params: object) -> tuple[list[int], str]:
    s = scheduler()
    s.add(request(**{"max_tokens": len(tokens), **params}))
    finished = run(s, PagedFake(64, script={0: tokens}))
    assert len(finished.logprobs["r", 0]) == len(finished.tokens["r", 0])
    assert_nothing_left(s)
    return finished.tokens["r", 0], finished.reasons["r", 0]


@pytest.mark.parametrize(
    ("sampled", "stop", "kept", "reason"),
    [
        ([5, EOS, 6], None, 2, "stop"),
        ([5, 7, 6], None, 3, "length"),
        ([5, EOS, 6], (), 3, "length"),
        ([5, EOS, 7, 6], (7,), 3, "stop"),
        ([5, 7], (7,), 2, "stop"),
        ([7, 7], (7,), 1, "stop"),
        ([0, 1, 2, 3], ("bc",), 3, "stop"),
        ([0, 1, 2, 3], ("a",), 1, "stop"),
        ([0, 1, 2, 3], ("cb", "dx"), 4, "length"),
        ([0, 0, 1, 0, 0, 0, 1, 2, 5], ("aabc",), 8, "stop"),
        ([0, 1, EOS, 3], ("d",), 4, "stop"),
    ],
    ids=[
        "end token",
        "no stop: length",
        "empty: not even the end token",
        "own ids replace the end token",
        "stop and length at once is a stop",
        "first token",
        "string over two tokens",
        "string in the first token",
        "no string found",
        "string after a false start",
        "strings replace the end token",
    ],
)
def test_stop(sampled: list[int], stop: tuple | None, kept: int, reason: str) -> None:
    assert scripted(sampled, stop=stop) == (sampled[:kept], reason)


def test_max_tokens_none_goes_to_the_contexts_end() -> None:
    s = scheduler(max_context_length=40)
    s.add(request(max_tokens=None))
    finished = run(s, PagedFake(64))
    assert len(finished.tokens["r", 0]) == 37
    assert finished.reasons["r", 0] == "length"


@pytest.mark.parametrize("max_tokens", [1, None])
@pytest.mark.parametrize("length", [128, 130], ids=["whole pages", "a page begun"])
def test_a_prompt_as_long_as_the_context_is_scored_and_one_token_sampled(length: int, max_tokens: int | None) -> None:
    """That is what a client's ``compute_logprobs`` asks for. The sampled token takes no page and no position."""
    num_pages = -(-length // 64)
    s, fake = scheduler(max_context_length=length, num_pages=num_pages), PagedFake(num_pages)
    prompt = [i % 90 for i in range(length)]
    s.add(request(prompt=prompt, max_tokens=max_tokens, prompt_logprobs=True, stop=()))
    finished = run(s, fake)
    assert len(finished.tokens["r", 0]) == 1
    assert finished.reasons["r", 0] == "length"
    assert_nothing_left(s)


def test_max_tokens_none_with_a_small_pool_goes_to_the_pools_end() -> None:
    s = scheduler(num_pages=1)
    s.add(request(max_tokens=None))
    assert len(run(s, PagedFake(1)).tokens["r", 0]) == 62


# ---------------------------------------------------------------------------------------------------------- batching
def test_a_prompt_is_prefilled_in_chunks_beside_others_decoding() -> None:
    s, fake = scheduler(max_num_batched_tokens=50), PagedFake(64)
    s.add(request("short", max_tokens=10))
    plan = s.plan()
    assert plan is not None
    assert [(len(step.tokens), step.sample) for step in plan.sequences] == [(3, True)]
    s.apply(plan, fake.step(plan))
    s.add(request("long", prompt=range(90), max_tokens=2))
    seen = []
    for _ in range(3):
        plan = s.plan()
        assert plan is not None
        seen.append([(len(step.tokens), step.context, step.sample) for step in plan.sequences])
        s.apply(plan, fake.step(plan))
    assert seen == [[(1, 3, True), (50, 0, False)], [(1, 4, True), (40, 50, True)], [(1, 5, True), (1, 90, True)]]


def test_samples_share_their_prompts_full_pages() -> None:
    s, fake = scheduler(max_num_seqs=16), PagedFake(64)
    prompt = [i % 90 for i in range(150)]
    s.add(request(prompt=prompt, num_samples=16, max_tokens=2))
    first = s.plan()
    assert first is not None
    assert [len(step.tokens) for step in first.sequences] == [150]
    s.apply(first, fake.step(first))
    second = s.plan()
    assert second is not None
    assert [len(step.tokens) for step in second.sequences] == [1] + [22] * 11 + [14]  # 256 tokens a step
    assert len({step.pages[:2] for step in second.sequences}) == 1
    assert len({step.pages[2] for step in second.sequences}) == 13
    finished = Finished()
    finished.take(s.apply(second, fake.step(second)))
    run(s, fake, finished)
    assert s.stats()["prefilled_tokens"] == 150 + 15 * 22
    for sample in range(16):
        assert len(finished.tokens["r", sample]) == 2
    assert_nothing_left(s)


def test_samples_copy_the_end_of_their_prompt() -> None:
    s, fake = scheduler(max_num_seqs=16, copies_pages=True), PagedFake(64)
    prompt = [i % 90 for i in range(150)]
    s.add(request(prompt=prompt, num_samples=16, max_tokens=2))
    first = s.plan()
    assert first is not None
    assert [len(step.tokens) for step in first.sequences] == [150]
    s.apply(first, fake.step(first))
    second = s.plan()
    assert second is not None
    assert [(step.tokens, step.context) for step in second.sequences[1:]] == [((prompt[-1],), 149)] * 15
    source = second.sequences[0].pages[2]
    assert [step.copied for step in second.sequences] == [
        None,
        *(PageCopy(source=source, target=step.pages[2], num_tokens=21) for step in second.sequences[1:]),
    ]
    finished = Finished()
    finished.take(s.apply(second, fake.step(second)))
    run(s, fake, finished)
    assert s.stats()["prefilled_tokens"] == 150 + 15
    expected = alone(request(prompt=prompt, num_samples=16, max_tokens=2))
    assert finished.tokens == expected.tokens
    assert_nothing_left(s)


def test_what_is_left_of_a_prompt_that_is_copied_waits_for_its_first_sample_alone() -> None:
    s, fake = scheduler(copies_pages=True, max_num_batched_tokens=30), PagedFake(64)
    s.add(request("copies", prompt=[3] * 50, num_samples=2, max_tokens=3))
    s.add(request("other", prompt=[4] * 5, max_tokens=3))
    sizes = []
    finished = Finished()
    while (plan := s.plan()) is not None:
        sizes.append([len(step.tokens) for step in plan.sequences])
        finished.take(s.apply(plan, fake.step(plan)))
    assert sizes[:3] == [[30], [20, 5], [1, 1, 1]]
    expected = alone(request("copies", prompt=[3] * 50, num_samples=2, max_tokens=3))
    assert finished.tokens["copies", 1] == expected.tokens["copies", 1]


def test_without_a_source_the_end_of_a_prompt_is_computed_again() -> None:
    s, fake = scheduler(copies_pages=True, max_num_seqs=1), PagedFake(64)
    s.add(request(prompt=[1] * 140, num_samples=3, max_tokens=3))
    run(s, fake)
    assert s.stats()["prefilled_tokens"] == 140 + 2 * 12


@pytest.mark.parametrize("copies_pages", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 68, 128, 129])
def test_samples_draw_what_they_would_alone_at_page_edges(num_tokens: int, copies_pages: bool) -> None:
    prompt = [i % 90 for i in range(num_tokens)]
    s = scheduler(copies_pages=copies_pages)
    s.add(request(prompt=prompt, num_samples=3, max_tokens=70))
    finished = run(s, PagedFake(64))
    single = alone(request(prompt=prompt, num_samples=1, max_tokens=70))
    assert finished.tokens["r", 0] == single.tokens["r", 0]
    assert len({tuple(finished.tokens["r", i]) for i in range(3)}) == 3
    assert_nothing_left(s)


def test_a_shared_prompt_outlives_a_moment_without_running_samples() -> None:
    s, fake = scheduler(max_num_seqs=2), PagedFake(64)
    s.add(request(prompt=[1] * 130, num_samples=6, max_tokens=3))
    run(s, fake)
    assert s.stats()["prefilled_tokens"] == 130 + 5 * 2


# ----------------------------------------------------------------------------------------------------------- prefixes
V1, V2 = (Version(model_id="m", number=number) for number in (1, 2))
LONG = [i % 90 for i in range(200)]


def computed(s: Scheduler, fake: PagedFake, *entries: SampleRequest) -> int:
    """Prompt tokens computed for these requests, side by side; they end as they would alone."""
    before = s.stats()["prefilled_tokens"]
    for entry in entries:
        s.add(entry)
    finished = run(s, fake)
    for entry in entries:
        expected = alone(entry, prefix_caching=False)
        for key, tokens in expected.tokens.items():
            assert (finished.tokens[key], finished.logprobs[key]) == (tokens, expected.logprobs[key])
    return s.stats()["prefilled_tokens"] - before


def test_a_prefix_is_computed_once_a_version() -> None:
    s, fake = scheduler(), PagedFake(64)
    assert computed(s, fake, request("a", LONG, max_tokens=3)) == 200
    assert computed(s, fake, request("b", LONG, max_tokens=3)) == 200 - 3 * 64
    assert computed(s, fake, request("c", [*LONG[:130], 7, 8], max_tokens=3)) == 132 - 2 * 64
    assert computed(s, fake, request("d", [7, *LONG], max_tokens=3)) == 201
    assert computed(s, fake, request("e", LONG, max_tokens=3, version=V1)) == 200
    assert computed(s, fake, request("f", LONG, max_tokens=3, version=V2)) == 200
    assert computed(s, fake, request("g", LONG, max_tokens=3, version=V1)) == 200 - 3 * 64
    assert s.stats()["hit_tokens"] == (3 + 2 + 3) * 64
    assert_nothing_left(s)


def test_the_last_token_is_computed_though_its_page_is_there() -> None:
    s, fake = scheduler(), PagedFake(64)
    assert [computed(s, fake, request(name, LONG[:128], max_tokens=3)) for name in "ab"] == [128, 64]


def test_the_next_turn_of_a_conversation_goes_on_from_the_last() -> None:
    s, fake = scheduler(), PagedFake(64)
    first = request("first", LONG[:60], max_tokens=80)
    s.add(first)
    said = run(s, fake).tokens["first", 0]
    assert computed(s, fake, request("second", [*LONG[:60], *said, 5, 6], max_tokens=2)) == 142 - 2 * 64


def test_what_is_being_computed_is_waited_for() -> None:
    s, fake = scheduler(max_num_batched_tokens=70), PagedFake(64)
    entries = [request(name, LONG, max_tokens=3) for name in "abc"]
    assert computed(s, fake, *entries) == 200 + 2 * (200 - 3 * 64)


def test_a_request_that_ends_halfway_lets_others_compute_the_rest() -> None:
    s, fake = scheduler(max_num_batched_tokens=70), PagedFake(64)
    s.add(request("gone", LONG, max_tokens=3))
    s.add(request("other", LONG, max_tokens=3))
    plan = s.plan()
    assert plan is not None
    assert len(plan.sequences) == 1
    s.apply(plan, fake.step(plan))
    s.cancel("gone")
    assert run(s, fake).tokens["other", 0] == alone(request("other", LONG, max_tokens=3)).tokens["other", 0]
    assert s.stats()["prefilled_tokens"] == 70 + 200 - 64


def test_who_wants_scores_computes_the_prompt_anyway() -> None:
    s, fake = scheduler(), PagedFake(64)
    assert computed(s, fake, request("a", LONG, max_tokens=3)) == 200
    assert computed(s, fake, request("b", LONG, max_tokens=3, num_samples=2, prompt_logprobs=True)) == 200 + 8


def test_cached_pages_are_evicted_last_used_last_and_before_a_preemption() -> None:
    s, fake = scheduler(num_pages=8), PagedFake(8)
    old, young = LONG[:130], [7, *LONG[:130]]
    for name, prompt in (("old", old), ("young", young)):
        assert computed(s, fake, request(name, prompt, max_tokens=2)) == len(prompt)
    assert s.stats()["cached_pages"] == 4
    assert computed(s, fake, request("wide", [3] * 330, max_tokens=2)) == 330  # 6 pages: 4 blank, 2 of them kept
    assert s.stats()["preemptions"] == 0
    assert computed(s, fake, request("young again", young, max_tokens=2)) == 131 - 2 * 64
    assert computed(s, fake, request("old again", old, max_tokens=2)) == 130


def test_the_prefixes_of_a_version_go_with_it() -> None:
    s, fake = scheduler(), PagedFake(64)
    for version in (V1, V2):
        computed(s, fake, request("a", LONG, max_tokens=2, version=version))
    assert s.stats()["cached_pages"] == 6
    s.release(V1)
    assert s.stats()["cached_pages"] == 3
    s.add(request("b", [*LONG, 1], max_tokens=70, version=V2))
    fake.step(plan := s.plan())
    s.release(V2)  # while it runs
    assert s.stats()["cached_pages"] == 0
    s.apply(plan, fake.step(plan))
    run(s, fake)
    assert s.stats()["cached_pages"] == 0
    assert_nothing_left(s)


# ----------------------------------------------------------------------------------------------------------- versions
def begin(s: Scheduler, fake: PagedFake, num_steps: int, finished: Finished) -> None:
    for _ in range(num_steps):
        plan = s.plan()
        assert plan is not None
        finished.take(s.apply(plan, fake.step(plan)))


def test_a_request_says_what_of_its_prompt_was_cached() -> None:
    """On its first delta. What samples have from one another, or from themselves after a preemption, is not counted."""
    s, fake, finished = scheduler(), PagedFake(64), Finished()

    def hits(entry: SampleRequest) -> int:
        s.add(entry)
        return run(s, fake, finished).hit_tokens[entry.request_id]

    assert hits(request("a", LONG, num_samples=3, max_tokens=2)) == 0
    assert hits(request("b", LONG, num_samples=3, max_tokens=2, stream=True)) == 3 * 64
    assert hits(request("c", LONG[:128], max_tokens=2)) == 64, "the last token is always computed"
    assert hits(request("d", LONG, max_tokens=2, prompt_logprobs=True)) == 0, "scores are computed"
    tight, fake, finished = scheduler(num_pages=9), PagedFake(9), Finished()
    for name in ("e", "f"):
        tight.add(request(name, [int(name == "f"), *LONG], max_tokens=150))
    assert run(tight, fake, finished).hit_tokens == {"e": 0, "f": 0}
    assert tight.stats()["preemptions"] > 0
    assert tight.stats()["hit_tokens"] > 0


def test_it_knows_what_a_request_would_find() -> None:
    s, fake = scheduler(), PagedFake(64)
    wanted = request("b", LONG, version=V1)
    assert s.cached_tokens(wanted) == 0
    s.add(request("a", LONG, max_tokens=2, version=V1))
    plan = s.plan()
    assert plan is not None
    assert s.cached_tokens(wanted) == 192, "a request that came now would wait for these pages"
    s.apply(plan, fake.step(plan))
    run(s, fake)
    assert s.cached_tokens(wanted) == 192
    assert s.cached_tokens(request("c", [*LONG[:128], 7, *LONG[129:]], version=V1)) == 128
    assert s.cached_tokens(request("d", LONG[:128], version=V1)) == 64, "the last token is always computed"
    assert s.cached_tokens(request("e", [7, *LONG], version=V1)) == 0
    assert s.cached_tokens(request("f", LONG, version=V2)) == s.cached_tokens(request("g", LONG)) == 0
    assert s.cached_tokens(request("h", LONG, version=V1, prompt_logprobs=True)) == 0
    assert s.cached_tokens(request("i", (), version=V1)) == s.cached_tokens(request("j", [-1] * 99, version=V1)) == 0
    assert run_hits(s, fake, wanted) == 192, "as the first delta says"
    s.release(V1)
    assert s.cached_tokens(wanted) == 0
    assert scheduler(prefix_caching=False).cached_tokens(wanted) == 0


def run_hits(s: Scheduler, fake: PagedFake, entry: SampleRequest) -> int:
    s.add(entry)
    return run(s, fake).hit_tokens[entry.request_id]


def test_a_request_moves_between_two_steps_and_says_when() -> None:
    s, fake, finished = scheduler(), PagedFake(64), Finished()
    s.add(request("moves", LONG, num_samples=2, max_tokens=70, version=V1, inflight=True))
    s.add(request("stays", LONG, max_tokens=70, version=V1))
    begin(s, fake, 5, finished)
    assert s.followers(V1) == []
    assert s.followers(V2) == ["moves"]
    assert s.followers(Version(model_id="other", number=2)) == []
    s.move(["moves"], V2)
    assert s.followers(V2) == []
    assert s.versions() == {V1, V2}
    run(s, fake, finished)
    assert finished.versions["moves", 0] == [V1] * 5 + [V2] * 65
    assert finished.versions["stays", 0] == [V1] * 70
    assert s.stats()["mid_sequence_updates"] == 2
    before = s.stats()["hit_tokens"]
    s.add(request("new", [*LONG, 1], max_tokens=1, version=V2))
    run(s, fake)
    assert s.stats()["hit_tokens"] == before, "keys of both versions were taken for one's"
    assert_nothing_left(s)


def test_what_was_computed_ahead_of_a_move_counts_as_the_old_version() -> None:
    s, fake, finished = scheduler(), PagedFake(64, ahead=True), Finished()
    s.add(request("streams", [1] * 50, max_tokens=70, version=V1, inflight=True, stream=True))
    s.add(request("whole", [2] * 50, max_tokens=70, version=V1, inflight=True))
    begin(s, fake, 5, finished)
    s.move(s.followers(V2), V2)
    assert ("whole", 0) not in finished.tokens
    begin(s, fake, 1, finished)
    assert finished.versions["streams", 0] == [V1] * 6
    begin(s, fake, 1, finished)
    assert finished.versions["streams", 0] == [V1] * 6 + [V2]
    assert finished.versions["whole", 0] == [V1] * 6, "emitted when the first of the new ones came"
    run(s, fake, finished)
    for key in finished.tokens:
        assert finished.versions[key] == [V1] * 6 + [V2] * 64
    assert s.stats()["cached_pages"] == 0, "pages of both versions"
    assert_nothing_left(s)


@pytest.mark.parametrize("running", [True, False], ids=["moved, then preempted", "preempted, then moved"])
def test_what_a_preempted_request_computes_anew_is_of_one_version(running: bool) -> None:
    s, fake = scheduler(num_pages=4), PagedFake(4)
    old = request("old", [1] * 60, max_tokens=120, version=V1)
    late = request("late", [2] * 60, max_tokens=100, version=V1, inflight=True)
    for entry in (old, late):
        s.add(entry)
    finished = Finished()
    begin(s, fake, 5, finished)
    while not running and not s.stats()["preemptions"]:
        begin(s, fake, 1, finished)
    s.move(["late"], V2)
    assert s.stats()["mid_sequence_updates"] == running
    run(s, fake, finished)
    versions = finished.versions["late", 0]
    assert set(versions) == {V1, V2}
    assert s.stats()["cached_pages"] >= 2
    s.add(request("again", [*[2] * 60, *finished.tokens["late", 0]], max_tokens=1, version=V2))
    before = s.stats()["hit_tokens"]
    run(s, fake)
    assert s.stats()["hit_tokens"] == before + 128, "what was computed anew with one version was not kept"


def test_who_waits_for_a_prefix_does_not_wait_for_another_version_of_it() -> None:
    s, fake = scheduler(max_num_batched_tokens=70), PagedFake(64)
    s.add(request("moves", LONG, max_tokens=300, version=V1, inflight=True))
    s.add(request("waits", LONG, max_tokens=1, version=V1))
    finished = Finished()
    begin(s, fake, 1, finished)
    s.move(["moves"], V2)
    begin(s, fake, 6, finished)
    assert ("waits", 0) in finished.reasons
    assert finished.tokens["waits", 0] == alone(request("waits", LONG, max_tokens=1, version=V1)).tokens["waits", 0]


def test_preemption_takes_the_youngest_and_changes_no_token() -> None:
    s, fake = scheduler(num_pages=4), PagedFake(4)
    entries = [request(name, prompt=[i + 1] * 60, max_tokens=120, seed=i) for i, name in enumerate("abc")]
    for entry in entries:
        s.add(entry)
    finished = run(s, fake)
    assert s.stats()["preemptions"] >= 2
    assert next(iter(finished.reasons)) == ("a", 0)
    for entry in entries:
        key = (entry.request_id, 0)
        assert finished.tokens[key] == alone(entry).tokens[key]
        assert finished.logprobs[key] == alone(entry).logprobs[key]
    assert_nothing_left(s)


def test_a_shared_prompt_that_nobody_uses_gives_way() -> None:
    """All samples of ``b`` are preempted while the request still holds its prompt's pages: ``a`` needs them."""
    s, fake = scheduler(num_pages=5, max_num_batched_tokens=1000), PagedFake(5)
    entries = [
        request("a", prompt=[1] * 50, max_tokens=200),
        request("b", prompt=[2] * 130, num_samples=2, max_tokens=20, seed=3),
    ]
    for entry in entries:
        s.add(entry)
    finished = run(s, fake)
    assert finished.tokens["a", 0] == alone(entries[0]).tokens["a", 0]
    for sample in range(2):
        assert finished.tokens["b", sample] == alone(entries[1]).tokens["b", sample]
    assert_nothing_left(s)


def test_every_sample_has_its_own_stream_and_a_seed_repeats_it() -> None:
    first, second = (alone(request(num_samples=4, max_tokens=20, seed=s)).tokens for s in (0, 0))
    assert first == second
    assert len({tuple(tokens) for tokens in first.values()}) == 4
    assert alone(request(num_samples=4, max_tokens=20, seed=1)).tokens["r", 0] not in first.values()


def test_without_a_seed_a_fresh_one_is_asked_for() -> None:
    seeds = iter([7, 8])
    limits = SampleLimits(
        max_num_seqs=4,
        num_pages=8,
        max_num_batched_tokens=64,
        max_queued_requests=4,
        max_context_length=99,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
    )
    s = Scheduler(limits, decode_text=decode_letters, fresh_seed=lambda: next(seeds))
    s.add(request("a", max_tokens=20, seed=None))
    s.add(request("b", max_tokens=20, seed=None))
    finished = run(s, PagedFake(8))
    assert finished.tokens["a", 0] != finished.tokens["b", 0]
    assert finished.tokens["a", 0] == alone(request("a", max_tokens=20, seed=7)).tokens["a", 0]


# ------------------------------------------------------------------------------------------------------------ scores
def test_prompt_scores_come_once_with_the_first_delta() -> None:
    s, fake = scheduler(max_num_batched_tokens=30), PagedFake(64)
    prompt = [i % 90 for i in range(100)]
    s.add(request(prompt=prompt, num_samples=3, max_tokens=2, prompt_logprobs=True, topk_prompt_logprobs=2))
    finished = run(s, fake)
    scores = finished.prompts["r"]
    assert scores.logprobs.dtype == np.float32
    assert scores.logprobs.shape == (100,)
    assert np.isnan(scores.logprobs[0])
    assert np.isfinite(scores.logprobs[1:]).all()
    assert scores.topk is not None
    assert scores.topk.token_ids.shape == scores.topk.logprobs.shape == (100, 2)
    assert (scores.topk.token_ids[0] == 0).all()
    assert (scores.topk.logprobs[0] == np.float32(-99999.0)).all()
    assert (scores.topk.token_ids[1:] == [0, 1]).all()
    assert (scores.topk.logprobs[1:] == -1).all()


def test_a_prompt_of_one_token_has_one_nan() -> None:
    scores = alone(request(prompt=[4], max_tokens=1, prompt_logprobs=True)).prompts["r"]
    assert np.isnan(scores.logprobs).tolist() == [True]
    assert scores.topk is None


def test_scores_survive_preemption_and_are_asked_for_once() -> None:
    s, fake = scheduler(num_pages=3, max_num_batched_tokens=20), PagedFake(3)
    old = request("old", prompt=[1] * 60, max_tokens=120)
    scored = request("scored", prompt=[i % 90 for i in range(120)], max_tokens=5, num_samples=2, prompt_logprobs=True)
    s.add(old)
    s.add(scored)
    finished = run(s, fake)
    assert s.stats()["preemptions"] > 0
    np.testing.assert_array_equal(finished.prompts["scored"].logprobs, alone(scored).prompts["scored"].logprobs)


def test_scores_of_a_prompts_end_are_those_of_the_whole() -> None:
    prompt = [i % 90 for i in range(300)]
    whole = alone(request(prompt=prompt, max_tokens=2, prompt_logprobs=True)).prompts["r"].logprobs
    s, fake = scheduler(num_pages=12), PagedFake(12)
    s.add(request(prompt=prompt, max_tokens=70, num_samples=2, prompt_logprobs=True, prompt_logprobs_last_n=20))
    finished = run(s, fake)
    scores = finished.prompts["r"].logprobs
    assert scores is not None
    assert whole is not None
    assert np.isnan(scores[:280]).all()
    np.testing.assert_array_equal(scores[280:], whole[280:])


def test_nobody_who_did_not_ask_gets_scores() -> None:
    assert alone(request(prompt=[1] * 100, max_tokens=2)).prompts == {}


# ---------------------------------------------------------------------------------------------------- streams and ends
def test_a_stream_gets_every_token_and_others_one_delta_a_sample() -> None:
    s, fake = scheduler(), PagedFake(64)
    s.add(request("stream", max_tokens=4, stream=True))
    s.add(request("whole", max_tokens=4))
    deltas = []
    while (plan := s.plan()) is not None:
        deltas += s.apply(plan, fake.step(plan))
    shape = [(d.request_id, len(d.tokens), d.stop_reason) for d in deltas]
    assert shape == [("stream", 1, None)] * 3 + [("stream", 1, "length"), ("whole", 4, "length")]


def test_the_version_stands_on_every_delta() -> None:
    version = Version(model_id="m", number=3)
    s, fake = scheduler(), PagedFake(64)
    s.add(request(version=version, max_tokens=1))
    assert s.versions() == {version}
    plan = s.plan()
    assert plan is not None
    assert [d.version for d in s.apply(plan, fake.step(plan))] == [version]
    assert s.versions() == set()


@pytest.mark.parametrize("when", ["waiting", "planned", "between"])
def test_cancel_frees_at_once(when: str) -> None:
    s, fake = scheduler(), PagedFake(64)
    other = request("other", max_tokens=30)
    s.add(other)
    s.add(request("gone", prompt=[1] * 200, num_samples=5, max_tokens=50))
    finished = Finished()
    if when == "planned":
        plan = s.plan()
        outputs = fake.step(plan)
        s.cancel("gone")
        assert s.stats()["used_pages"] == 1
        finished.take(s.apply(plan, outputs))
    elif when == "between":
        for _ in range(3):
            plan = s.plan()
            finished.take(s.apply(plan, fake.step(plan)))
        s.cancel("gone")
        assert s.stats()["used_pages"] == 1
    else:
        s.cancel("gone")
        assert s.stats()["used_pages"] == 0
    s.cancel("gone")
    run(s, fake, finished)
    assert set(finished.reasons) == {("other", 0)}
    assert finished.tokens == alone(other).tokens
    assert_nothing_left(s)


def test_a_step_that_raised_ends_its_requests_and_no_other() -> None:
    s, fake = scheduler(max_num_seqs=3), PagedFake(64)
    s.add(request("a", max_tokens=5, num_samples=3))
    plan = s.plan()
    late = request("b", max_tokens=5)
    s.add(late)
    assert s.fail(plan) == ["a"]
    finished = run(s, fake)
    assert finished.tokens == alone(late).tokens
    assert_nothing_left(s)


@pytest.mark.parametrize(("version", "error"), [(None, ServerError), (Version(model_id="m", number=1), UserError)])
def test_one_sequences_error_fails_its_request_alone(version: Version | None, error: type) -> None:
    s, fake = scheduler(), PagedFake(64)
    s.add(request("bad", max_tokens=5, num_samples=2, version=version))
    good = request("good", max_tokens=5)
    s.add(good)
    plan = s.plan()
    outputs = fake.step(plan)
    [place] = [index for index, output in enumerate(outputs) if output.sequence == 1]
    outputs[place] = SequenceOutput(sequence=1, version=version, error="logits are not finite")
    finished = Finished()
    finished.take(s.apply(plan, outputs))
    [(request_id, failure)] = s.take_failures()
    assert request_id == "bad"
    assert type(failure) is error
    assert str(failure) == "sample 1 failed at token 0: logits are not finite"
    assert s.take_failures() == []
    run(s, fake, finished)
    assert finished.tokens == alone(good).tokens
    assert_nothing_left(s)


def test_one_plan_at_a_time() -> None:
    s = scheduler()
    s.add(request(max_tokens=5))
    s.plan()
    with pytest.raises(RuntimeError, match="before the last plan's apply"):
        s.plan()


# -------------------------------------------------------------------------------------------------------------- pages
def test_a_page_is_free_when_its_last_reference_is_freed() -> None:
    pages = PageAllocator(3)
    taken = pages.allocate(2, "")
    pages.share(taken, "")
    pages.free(taken)
    assert pages.num_free == 1
    pages.free(taken)
    assert pages.num_free == 3
    with pytest.raises(RuntimeError, match="is not in use"):
        pages.free(taken)
    with pytest.raises(RuntimeError, match="4 pages were asked for, 3 are free"):
        pages.allocate(4, "")


def test_a_page_is_a_block_of_the_attention() -> None:
    from descant.model import forward_batch

    assert PAGE_TOKENS == forward_batch.PAGE_TOKENS


# --------------------------------------------------------------------------------------------------------------- fuzz
entries = st.builds(
    lambda length, first, **fields: {"prompt": [(first + i) % 90 for i in range(length)], **fields},
    length=st.one_of(st.integers(1, 40), st.integers(100, 150)),
    first=st.integers(0, 89),
    num_samples=st.integers(1, 5),
    max_tokens=st.one_of(st.integers(1, 10), st.integers(50, 100)),
    seed=st.integers(0, 3),
    stop=st.sampled_from([None, (), (), (7,), ("ab", "qz")]),
    prompt_logprobs=st.booleans(),
    prompt_alt_tokens_k=st.integers(0, 2),
    topk_sample_logprobs=st.integers(0, 2),
    stream=st.booleans(),
    version=st.sampled_from([None, Version(model_id="m", number=1), Version(model_id="m", number=2)]),
)
events = st.one_of(
    st.tuples(st.just("add"), entries),
    st.tuples(st.just("add"), entries),
    st.tuples(st.just("add"), entries),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("steps"), st.integers(1, 30)),
    st.tuples(st.just("fail"), st.just(0)),
)


@settings(max_examples=200)
@given(
    script=st.lists(events, min_size=1, max_size=25),
    num_pages=st.integers(4, 7),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([5, 30, 70, 200]),
    copies_pages=st.booleans(),
)
def test_whatever_happens_every_request_ends_as_it_would_alone(
    script: list, num_pages: int, max_num_seqs: int, max_num_batched_tokens: int, copies_pages: bool
) -> None:
    s = scheduler(
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        copies_pages=copies_pages,
    )
    fake, finished = PagedFake(num_pages), Finished()
    added: dict[str, SampleRequest] = {}
    ended: set[str] = set()
    for kind, value in script:
        if kind == "add":
            entry = request(f"r{len(added)}", **value)
            s.add(entry)
            added[entry.request_id] = entry
        elif kind == "cancel":
            s.cancel(f"r{value}")
            ended.add(f"r{value}")
        elif kind == "fail":
            plan = s.plan()
            ended |= set() if plan is None else set(s.fail(plan))
        else:
            for _ in range(value):
                plan = s.plan()
                if plan is not None:
                    assert sum(len(t.tokens) for t in plan.sequences if len(t.tokens) > 1) <= max_num_batched_tokens
                    assert len(plan.sequences) <= max_num_seqs
                    finished.take(s.apply(plan, fake.step(plan)))
    run(s, fake, finished)
    assert_nothing_left(s)
    for request_id, entry in added.items():
        if request_id in ended:
            continue
        expected = alone(entry)
        for sample in range(entry.num_samples):
            key = (request_id, sample)
            assert finished.tokens[key] == expected.tokens[key]
            assert finished.logprobs[key] == expected.logprobs[key]
            assert finished.reasons[key] == expected.reasons[key]
        assert_same_scores(finished.prompts.get(request_id), expected.prompts.get(request_id))
        assert {key: topk for key, topk in finished.topk.items() if key[0] == request_id} == expected.topk


@pytest.mark.parametrize("seed", range(60))
def test_under_pressure_every_request_ends_as_it_would_alone(seed: int) -> None:
    """Few pages, small chunks, long prompts beside long decodes: leaders and scorers are preempted halfway, and shared
    prompts give way."""
    rng = random.Random(seed)
    num_pages = rng.randint(4, 5)
    s = scheduler(
        num_pages=num_pages,
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([4, 9, 70]),
        copies_pages=seed % 2 == 1,
    )
    fake, finished = PagedFake(num_pages), Finished()
    added: list[SampleRequest] = []
    while len(added) < 10 or s.has_work():
        if len(added) < 10 and rng.random() < 0.05:
            length = rng.choice([2, 50, 63, 64, 65, 129, 140])
            added.append(
                request(
                    f"r{len(added)}",
                    prompt=[rng.randrange(90) for _ in range(length)],
                    num_samples=rng.choice([1, 2, 3]),
                    max_tokens=rng.choice([2, 20, 70, 110]),
                    seed=seed,
                    **_random_scores(rng, length),
                )
            )
            s.add(added[-1])
        plan = s.plan()
        assert plan is not None or not s.has_work()
        if plan is not None:
            finished.take(s.apply(plan, fake.step(plan)))
    assert_nothing_left(s)
    assert set(finished.prompts) == {entry.request_id for entry in added if PromptScorer.asked_for(entry)}
    for entry in added:
        expected = alone(entry)
        for sample in range(entry.num_samples):
            key = (entry.request_id, sample)
            assert (finished.tokens[key], finished.logprobs[key]) == (expected.tokens[key], expected.logprobs[key])
        assert_same_scores(finished.prompts.get(entry.request_id), expected.prompts.get(entry.request_id))


def _random_scores(rng: random.Random, length: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"prompt_logprobs": rng.random() < 0.5}
    if fields["prompt_logprobs"] and rng.random() < 0.5:
        fields["prompt_logprobs_last_n"] = rng.randint(1, length - 1)
        fields["topk_prompt_logprobs"] = 2
    if rng.random() < 0.3:
        ids = np.full((length - 1, 2), -1, np.int64)
        ids[rng.randrange(length - 1), rng.randrange(2)] = rng.randrange(90)
        ids[-1] = rng.randrange(90)
        fields["target_prompt_logprobs"] = TensorData(data=ids.ravel(), shape=ids.shape)
    if rng.random() < 0.2:
        fields["prompt_alt_tokens_k"] = 2
    return fields


def assert_same_scores(one: PromptScores | None, other: PromptScores | None) -> None:
    def arrays(scores: PromptScores) -> list[np.ndarray | None]:
        topk, targets, alt = scores.topk, scores.target_logprobs, scores.alt_tokens
        return [
            scores.logprobs,
            *((topk.token_ids, topk.logprobs) if topk else (None, None)),
            targets.data if targets else None,
            *((alt.tokens, alt.logprobs) if alt else (None, None)),
        ]

    assert (one is None) == (other is None)
    if one is not None and other is not None:
        for mine, theirs in zip(arrays(one), arrays(other), strict=True):
            assert (mine is None) == (theirs is None)
            np.testing.assert_array_equal(mine, theirs)
