"""Several owners in one scheduler: what a flood of one's costs the others, counted in steps."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from descant.errors import Overloaded
from descant.prefix import PAGE_TOKENS, page_keys
from descant.sample.pages import PageAllocator
from descant.sample.plan import StepPlan
from descant.sample.scheduler import Scheduler
from descant.testing.paged_sampler import Finished, PagedFake, request, run, scheduler
from descant.types import SampleRequest, Version

FLOOD = 4096


class Rank:
    """A scheduler with its sampler, step by step; ``plans`` so far, and who has which sequence."""

    def __init__(self, *, num_pages: int = 2000, **limits: object):
        self.scheduler = scheduler(
            **{"num_pages": num_pages, "max_num_seqs": 64, "max_queued_requests": 2 * FLOOD, **limits}
        )
        self.sampler = PagedFake(num_pages)
        self.finished = Finished()
        self.plans: list[StepPlan] = []
        self.owners: list[str] = []
        self.entries: list[SampleRequest] = []

    def add(self, *entries: SampleRequest) -> None:
        for entry in entries:
            self.scheduler.add(entry)
            self.owners += [entry.owner] * entry.num_samples
            self.entries.append(entry)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            plan = self.scheduler.plan()
            assert plan is not None
            self.plans.append(plan)
            self.finished.take(self.scheduler.apply(plan, self.sampler.step(plan)))

    def steps_until(self, request_id: str, num_samples: int = 1) -> int:
        """How many until all its samples have ended."""
        start = len(self.plans)
        while not all((request_id, sample) in self.finished.reasons for sample in range(num_samples)):
            self.step()
        return len(self.plans) - start

    def running(self, plan: StepPlan) -> Counter[str]:
        """By owner, sequences of a plan."""
        return Counter(self.owners[step.sequence] for step in plan.sequences)

    def prompt_tokens(self, plan: StepPlan) -> Counter[str]:
        """By owner, where more than one at a time."""
        tokens = Counter[str]()
        for step in plan.sequences:
            if len(step.tokens) > 1:
                tokens[self.owners[step.sequence]] += len(step.tokens)
        return tokens


def flood(count: int = FLOOD, *, owner: str = "heavy", length: int = 3, num_samples: int = 8, **fields: object) -> list:
    return [
        request(
            f"{owner} {number}",
            [number % 89, *[number // 89 % 89] * (length - 1)],
            owner=owner,
            num_samples=num_samples,
            **{"max_tokens": 500, **fields},
        )
        for number in range(count)
    ]


def same_as_alone(rank: Rank) -> None:
    """Everybody has what he would have had by himself."""
    for entry in rank.entries:
        alone = scheduler(prefix_caching=False)
        alone.add(entry)
        expected = run(alone, PagedFake(64))
        for key, tokens in expected.tokens.items():
            assert (rank.finished.tokens[key], rank.finished.logprobs[key]) == (tokens, expected.logprobs[key])


# ---------------------------------------------------------------------------------------------------- under a flood
@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        pytest.param({}, {}, id="all of max_num_seqs"),
        pytest.param({"num_pages": 40, "max_num_seqs": 64}, {}, id="all pages"),
        pytest.param({"max_num_batched_tokens": 64}, {"length": 400}, id="all prompt tokens"),
        pytest.param({"num_pages": 40, "max_num_batched_tokens": 64}, {"length": 400}, id="all of them"),
        pytest.param(
            {"chunk_tokens": 16, "max_num_batched_tokens": 64}, {"length": 400}, id="all chunks of prompt tokens"
        ),
    ],
)
def test_four_tokens_beside_a_flood_take_one_step_more_than_alone(limits: dict, fields: dict) -> None:
    rank = Rank(**limits)
    rank.add(*flood(**fields))
    rank.step(30)
    before = rank.scheduler.stats()
    all_taken = before["running"] == 64 or before["free_pages"] < 8
    assert all_taken or rank.prompt_tokens(rank.plans[-1])["heavy"] > 60
    for number in range(3):
        rank.add(request(f"light {number}", [7, 8, 9], owner="light", max_tokens=4))
        assert rank.steps_until(f"light {number}") <= 4 + 1
        rank.step(number)


def test_an_owner_has_its_even_share_of_sequences_at_once_and_no_more() -> None:
    rank = Rank(max_num_seqs=8)
    rank.add(*flood())
    rank.step(20)
    rank.add(request("light", [7, 8, 9], owner="light", num_samples=8, max_tokens=20))
    rank.step()
    assert rank.running(rank.plans[-1]) == {"heavy": 4, "light": 4}
    assert rank.steps_until("light", 8) <= 2 * 20
    rank.step()
    assert rank.running(rank.plans[-1]) == {"heavy": 8}, "what nobody else wants"


def test_what_was_pushed_out_goes_on_as_if_it_had_not_been() -> None:
    """And the oldest half of the flood never was."""
    rank = Rank(max_num_seqs=4, num_pages=24)
    rank.add(*flood(6, num_samples=1, length=70, max_tokens=150))
    rank.step(10)
    for number in range(40):
        rank.add(request(f"light {number}", [number, 8, 9], owner="light", num_samples=2, max_tokens=2))
        rank.step(3)
    assert rank.scheduler.stats()["preemptions"] > 20
    while rank.scheduler.has_work():
        rank.step()
    assert [[s.sequence for s in plan.sequences][:2] == [0, 1] for plan in rank.plans[10:130]] == [True] * 120
    same_as_alone(rank)


def test_a_share_is_of_those_that_have_work() -> None:
    rank = Rank(max_num_seqs=12)
    rank.add(*flood())
    rank.step(3)
    seen = []
    for owner in ("b", "c"):
        rank.add(*flood(100, owner=owner))
        rank.step(3)
        seen.append(rank.running(rank.plans[-1]))
    assert seen == [{"heavy": 6, "b": 6}, {"heavy": 4, "b": 4, "c": 4}]
    for entry in flood(100, owner="b"):
        rank.scheduler.cancel(entry.request_id)
    rank.step()
    assert rank.running(rank.plans[-1]) == {"heavy": 6, "c": 6}


def test_more_owners_than_sequences_take_turns() -> None:
    rank = Rank(max_num_seqs=2)
    for number in range(50):
        rank.add(*[request(f"{o} {number}", [3, 4], owner=o, max_tokens=5 if o < "e" else 25) for o in "abcde"])
    rank.step(500)
    tokens = Counter[str]()
    for plan in rank.plans:
        tokens += rank.running(plan)
    assert min(tokens.values()) > 0.8 * max(tokens.values()), tokens


def test_an_owners_models_take_turns() -> None:
    """A flood for one of its own models is before what it asks of another, as far as running sequences go, and no
    further."""
    rank = Rank(max_num_seqs=8)
    rank.add(*flood(max_tokens=10, version=Version(model_id="a", number=1)))
    rank.step(25)
    other = Version(model_id="b", number=1)
    rank.add(*[request(f"b {n}", [7], owner="heavy", max_tokens=10, version=other) for n in range(40)])
    rank.step(12)
    assert Counter(step.version.model_id for step in rank.plans[-1].sequences if step.version) == {"a": 4, "b": 4}


# ------------------------------------------------------------------------------------------------------- prompt tokens
def test_prompt_tokens_of_a_step_are_shared_and_none_is_left() -> None:
    rank = Rank(max_num_batched_tokens=100)
    rank.add(*flood(20, length=400, num_samples=1))
    rank.step(2)
    assert rank.prompt_tokens(rank.plans[-1]) == {"heavy": 100}
    rank.add(request("short", [5] * 30, owner="light", max_tokens=2))
    rank.step()
    assert rank.prompt_tokens(rank.plans[-1]) == {"heavy": 70, "light": 30}
    rank.add(request("long", [6] * 200, owner="light", max_tokens=2))
    rank.step()
    assert rank.prompt_tokens(rank.plans[-1]) == {"heavy": 50, "light": 50}


def test_who_only_decodes_waits_for_a_small_part_of_a_steps_prompt_tokens() -> None:
    rank = Rank(max_num_batched_tokens=100)
    rank.add(*flood(40, length=400, num_samples=1))
    rank.step(2)
    rank.add(request("light", [5] * 30, owner="light", max_tokens=10))
    rank.step()
    rank.step(9)
    assert [rank.prompt_tokens(plan) for plan in rank.plans[-9:]] == [{"heavy": 100 // 16}] * 9
    assert ("light", 0) in rank.finished.reasons
    rank.step()
    assert rank.prompt_tokens(rank.plans[-1]) == {"heavy": 100}


# -------------------------------------------------------------------------------------------------------------- pages
def test_a_prompt_larger_than_an_even_share_is_let_in_and_those_within_theirs_beside_it() -> None:
    """30 of 40 pages, beside a flood that had all of them; and then a third owner's few tokens."""
    rank = Rank(num_pages=40, max_num_seqs=16, max_num_batched_tokens=512, max_context_length=2000)
    rank.add(*flood(length=200, num_samples=1))
    rank.step(20)
    rank.add(*[request(f"giant {n}", [n, *[5] * 1900], owner="giants", max_tokens=10) for n in range(3)])
    rank.step(3)
    assert rank.running(rank.plans[-1])["giants"] == 1
    rank.add(request("light", [7, 8], owner="light", max_tokens=4))
    assert rank.steps_until("light") <= 5
    assert rank.steps_until("giant 0") < 20
    steps = rank.steps_until("giant 2")
    between = [plan for plan in rank.plans[-steps:] if not rank.running(plan)["giants"]]
    assert between, "those whose pages it took had their time before the next"
    assert rank.running(rank.plans[-1])["heavy"] >= 1


def test_everybody_ends_though_each_needs_nearly_all_pages() -> None:
    rank = Rank(num_pages=10, max_num_seqs=4, max_num_batched_tokens=100)
    for owner in "abc":
        rank.add(*[request(f"{owner} {n}", [ord(owner), *[n] * 500], owner=owner, max_tokens=100) for n in range(4)])
    while rank.scheduler.has_work():
        rank.step()
        assert len(rank.plans) < 5000
    same_as_alone(rank)


def test_pages_count_for_whoever_took_them() -> None:
    pages = PageAllocator(4)
    taken = pages.allocate(2, "a")
    pages.share(taken, "b")
    assert (pages.num_in_use("a"), pages.num_in_use("b")) == (2, 0)
    pages.free(taken)
    assert pages.num_in_use("a") == 2
    [key] = page_keys(None, "", [1] * PAGE_TOKENS)
    pages.cache(taken[0], None, key)
    pages.free(taken)
    assert pages.num_in_use("a") == 0
    pages.share(pages.find([key]), "b")
    assert (pages.num_in_use("a"), pages.num_in_use("b")) == (0, 1)


# ----------------------------------------------------------------------------------------------------------- the queue
def test_a_full_queue_has_room_for_whoever_has_less_than_an_even_share() -> None:
    s = scheduler(max_queued_requests=10, max_num_seqs=1)

    def add(owner: str, count: int) -> int:
        """How many of so many are taken."""
        taken = 0
        for entry in flood(count, owner=owner, num_samples=1):
            try:
                s.add(entry)
            except Overloaded:
                break
            taken += 1
        return taken

    assert [add("a", 30), add("b", 30), add("c", 30)] == [10, 5, 3]
    with pytest.raises(Overloaded, match="18 sample requests are waiting, the limit is 10"):
        s.add(request("one more", owner="a"))
    for number in range(9):
        s.cancel(f"a {number}")
    assert add("d", 30) == 2, "ten wait again"


# ----------------------------------------------------------------------------------------------------------- prefixes
LONG = [i % 90 for i in range(200)]


def hits(rank: Rank, entry: SampleRequest) -> int:
    rank.add(entry)
    rank.steps_until(entry.request_id)
    return rank.finished.hit_tokens[entry.request_id]


@pytest.mark.parametrize("version", [None, Version(model_id="m", number=1)])
def test_a_prefix_is_found_by_its_own_scope_alone(version: Version | None) -> None:
    rank = Rank()

    def wanted(name: str, scope: str) -> SampleRequest:
        return request(name, LONG, max_tokens=2, version=version, owner=scope, prefix_scope=scope)

    assert hits(rank, wanted("a", "alice")) == 0
    assert rank.scheduler.cached_tokens(wanted("?", "bob")) == 0
    assert rank.scheduler.cached_tokens(wanted("?", "alice")) == 192
    assert hits(rank, wanted("b", "bob")) == 0
    assert [hits(rank, wanted(f"again {scope}", scope)) for scope in ("alice", "bob")] == [192, 192]


def test_nobody_waits_for_anothers_prefix() -> None:
    """How long it would have to wait would tell that it is being computed."""
    rank = Rank()
    rank.add(*[request(o, LONG, max_tokens=2, owner=o, prefix_scope=o) for o in ("alice", "bob")])
    rank.step()
    assert rank.prompt_tokens(rank.plans[-1]) == {"alice": 128, "bob": 128}


# -------------------------------------------------------------------------------------------------------------- always
@pytest.mark.parametrize("seed", range(40))
def test_whoever_asks_for_whatever_all_end_as_alone(seed: int) -> None:
    """Owners that come and go, few pages: no owner's sequence or page is lost."""
    rng = random.Random(seed)
    num_pages, max_num_seqs = rng.choice([5, 9, 20]), rng.choice([2, 3, 8])
    rank = Rank(num_pages=num_pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=rng.choice([5, 40, 200]))
    shared = rng.random() < 0.3
    prefixes = [[rng.randrange(90) for _ in range(130)] for _ in range(2)]
    cancelled = set()
    while len(rank.entries) < 40 or rank.scheduler.has_work():
        if len(rank.entries) < 40 and rng.random() < 0.2:
            owner = rng.choice("abcd"[: 1 + len(rank.entries) // 8])
            rank.add(
                request(
                    f"r{len(rank.entries)}",
                    [*rng.choice(prefixes)[: rng.choice([1, 64, 130])], rng.randrange(90)],
                    owner=owner,
                    prefix_scope="" if shared else owner,
                    num_samples=rng.choice([1, 1, 2, 4]),
                    max_tokens=rng.choice([1, 3, 20, 60, 150]),
                    seed=rng.randrange(100),
                    prompt_logprobs=rng.random() < 0.2,
                    version=rng.choice([None, Version(model_id=owner, number=1)]),
                )
            )
        if rng.random() < 0.01 and rank.entries:
            cancelled.add(request_id := rng.choice(rank.entries).request_id)
            rank.scheduler.cancel(request_id)
        if rank.scheduler.has_work():
            rank.step()
            assert len(rank.plans[-1].sequences) <= max_num_seqs
            check_counts(rank.scheduler, shared=shared)
    assert rank.scheduler.stats()["used_pages"] == 0
    assert rank.scheduler._queues.owners == {}
    rank.entries = [entry for entry in rank.entries if entry.request_id not in cancelled]
    same_as_alone(rank)


def check_counts(s: Scheduler, *, shared: bool) -> None:
    """What owners' queues say of themselves is so. A shared page may count for an owner that has left."""
    queues = s._queues
    assert sum(len(owner.running) for owner in queues.owners.values()) == len(queues.running)
    in_use = sum(s._cache.num_in_use(name) for name in queues.owners)
    assert in_use == s.stats()["used_pages"] or (shared and in_use < s.stats()["used_pages"])
    for owner in queues.owners.values():
        entries = [entry for entry in queues.requests.values() if entry.owner is owner]
        assert owner.running == [q for q in queues.running if q.request.owner is owner]
        assert owner.num_sequences == len(owner.running) + sum(len(entry.waiting) for entry in entries)
        assert (owner.num_requests, owner.num_begun) == (len(entries), sum(entry.started for entry in entries))
        for model in owner.models.values():
            mine = [entry for entry in entries if entry.model is model]
            assert model.num_requests == len(mine)
            assert model.waiting == [entry for entry in mine if entry.waiting]
            assert model.num_running == sum(q.request.model is model for q in owner.running)
