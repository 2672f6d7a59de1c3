"""Thousands of requests in any order: every one ends as it would alone, and nothing is left of any.

The scheduler is the real one; the sampler is ``PagedFake``, which computes each token from what the pages hold, and
what it should have been is computed here without pages. Versions are pinned as the turn loop pins them.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from descant.sample.rng import stream_seed
from descant.testing.paged_sampler import EOS, Finished, PagedFake, next_token, request, scheduler, score, weight
from descant.types import SampleRequest, Version, input_tokens

NUM_PAGES = 8
MODELS = ("a", "b")
OWNERS = ("alice", "bob", "carol")


class World:
    """A rank's share of sampling: versions published, pinned and released, requests running."""

    def __init__(self, rng: random.Random, *, prefix_caching: bool, ahead: bool, scoped: bool, copies_pages: bool):
        self.rng = rng
        self.scoped = scoped
        self.scheduler = scheduler(
            num_pages=NUM_PAGES,
            max_num_seqs=6,
            max_num_batched_tokens=50,
            max_queued_requests=40,
            prefix_caching=prefix_caching,
            copies_pages=copies_pages,
        )
        self.sampler = PagedFake(NUM_PAGES, ahead=ahead)
        self.finished = Finished()
        self.published: dict[str, list[Version]] = {model: [] for model in MODELS}
        self.number = Counter[str]()
        self.pins = Counter[Version]()
        self.versions: dict[str, Version | None] = {}
        """Of the requests that run: what they have pinned."""
        self.requests: dict[str, SampleRequest] = {}
        self.first_sequence: dict[str, int] = {}
        self.num_sequences = 0
        self.broken_off: set[str] = set()
        self.happened = Counter[str]()
        families = [[rng.randrange(90) for _ in range(200)] for _ in range(3)]
        self.prefixes = [family[:length] for family in families for length in (30, 64, 128, 129, 190)]
        for model in MODELS:
            self.publish(model)

    # ------------------------------------------------------------------------------------------------ what happens
    def publish(self, model: str) -> None:
        self.happened["publishes"] += 1
        self.number[model] += 1
        version = Version(model_id=model, number=self.number[model])
        self.published[model].append(version)
        followers = self.scheduler.followers(version)
        self.pins[version] += len(followers)
        self.scheduler.move(followers, version)
        for request_id in followers:
            self.unpin(self.versions[request_id])
            self.versions[request_id] = version

    def release(self) -> None:
        model = self.rng.choice(MODELS)
        if len(self.published[model]) > 1:
            self.happened["releases"] += 1
            version = self.published[model].pop(self.rng.randrange(len(self.published[model]) - 1))
            self.scheduler.release(version)

    def arrive(self) -> None:
        rng = self.rng
        version = rng.choice([None, *(v for versions in self.published.values() for v in versions)])
        inflight = rng.random() < 0.4
        if inflight and version is not None:
            version = self.published[version.model_id][-1]
        tail = [rng.randrange(90) for _ in range(rng.choice([0, 0, 0, 1, 30]))]
        entry = request(
            f"r{len(self.requests)}",
            prompt=[*rng.choice(self.prefixes), *tail],
            num_samples=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=rng.choice([1, 2, 5, 10, 20, 80]),
            seed=rng.randrange(1000),
            stop=rng.choice([None, (), (7, 8)]),
            prompt_logprobs=rng.random() < 0.1,
            stream=rng.random() < 0.2,
            version=version,
            inflight=inflight,
            owner=(owner := rng.choice(OWNERS)),
            prefix_scope=owner if self.scoped else "",
        )
        self.requests[entry.request_id] = entry
        self.scheduler.add(entry)
        self.first_sequence[entry.request_id] = self.num_sequences
        self.num_sequences += entry.num_samples
        self.versions[entry.request_id] = version
        if version is not None:
            self.pins[version] += 1

    def cancel(self) -> None:
        if self.versions:
            self.happened["cancels"] += 1
            request_id = self.rng.choice(list(self.versions))
            self.scheduler.cancel(request_id)
            self.ended(request_id)
            self.broken_off.add(request_id)

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            assert not self.scheduler.has_work()
            return
        for step in plan.sequences:
            assert step.version is None or self.pins[step.version] > 0, "computed with weights that nobody holds"
        if self.rng.random() < 0.002:
            self.happened["failed steps"] += 1
            for request_id in dict.fromkeys(self.scheduler.fail(plan)):
                self.ended(request_id)
                self.broken_off.add(request_id)
            return
        deltas = self.scheduler.apply(plan, self.sampler.step(plan))
        self.finished.take(deltas)
        for request_id in dict.fromkeys(delta.request_id for delta in deltas if delta.stop_reason):
            num_samples = self.requests[request_id].num_samples
            if all((request_id, sample) in self.finished.reasons for sample in range(num_samples)):
                self.ended(request_id)

    def ended(self, request_id: str) -> None:
        self.unpin(self.versions.pop(request_id))
        self.check_prefixes()

    def check_prefixes(self) -> None:
        """None is kept that nobody could come with any more."""
        of = self.scheduler.cached_versions()
        assert of <= {None, *self.versions.values(), *(v for versions in self.published.values() for v in versions)}

    def unpin(self, version: Version | None) -> None:
        if version is not None:
            assert self.pins[version] > 0
            self.pins[version] -= 1

    # ------------------------------------------------------------------------------------------------ what should
    def check(self, request_id: str) -> None:
        """Against a run without pages, batches or neighbours; where versions changed, against when they did."""
        entry = self.requests[request_id]
        prompt = [int(token) for token in input_tokens(entry.prompt)]
        params = entry.sampling_params
        stop = {EOS} if params.stop is None else set(params.stop)
        for sample in range(entry.num_samples):
            key = request_id, sample
            tokens, versions = self.finished.tokens[key], self.finished.versions[key]
            emitted = list(zip(versions, tokens, strict=True))
            assert emitted == self.sampler.output_tokens[self.first_sequence[request_id] + sample]
            assert tokens[-1] in stop or len(tokens) == params.max_tokens
            assert not stop.intersection(tokens[:-1])
            assert entry.inflight or set(versions) == {entry.version}
            assert [v.number for v in versions if v] == sorted(v.number for v in versions if v)
            history = list(prompt)
            for logprob, token in zip(self.finished.logprobs[key], tokens, strict=True):
                assert logprob == np.float32(score(history, token))
                history.append(token)
            if len(set(versions)) > 1 or (entry.version != versions[0]):
                self.happened["crossed"] += 1
                continue
            total = sum(weight(i, entry.version, token) for i, token in enumerate(prompt))
            for offset, token in enumerate(tokens):
                assert token == next_token(total, stream_seed(params.seed or 0, sample), offset)
                total += weight(len(prompt) + offset, entry.version, token)
        if entry.prompt_logprobs:
            scores = self.finished.prompts[request_id].logprobs
            expected = [score(prompt[: i + 1], target) for i, target in enumerate(prompt[1:])]
            np.testing.assert_array_equal(scores[1:], np.array(expected, np.float32))


@pytest.mark.parametrize(
    ("seed", "prefix_caching", "ahead", "scoped", "copies_pages"),
    [
        (0, True, False, False, False),
        (1, False, False, True, True),
        (2, True, True, False, False),
        (3, True, False, True, False),
        (4, True, False, True, True),
    ],
    ids=["prefixes kept", "none kept", "a step ahead", "prefixes kept by owner", "pages copied"],
)
def test_any_order_of_anything(seed: int, prefix_caching: bool, ahead: bool, scoped: bool, copies_pages: bool) -> None:
    rng = random.Random(seed)
    world = World(rng, prefix_caching=prefix_caching, ahead=ahead, scoped=scoped, copies_pages=copies_pages)
    num_requests = 2000 if prefix_caching else 300
    while len(world.requests) < num_requests or world.scheduler.has_work():
        dice = rng.random()
        if dice < 0.1 and len(world.requests) < num_requests and len(world.versions) < 35:
            world.arrive()
        elif dice < 0.105:
            world.cancel()
        elif dice < 0.115:
            world.publish(rng.choice(MODELS))
        elif dice < 0.13:
            world.release()
        world.step()

    s, stats = world.scheduler, world.scheduler.stats()
    assert stats["used_pages"] == stats["running"] == stats["waiting"] == 0
    assert stats["free_pages"] == NUM_PAGES
    assert s.versions() == set()
    assert s._queues.sequences == s._queues.requests == s._queues.owners == {}
    assert s._cache.num_computing == 0
    assert s._released == set()
    assert not +world.pins, "pins that nobody gave back"
    assert not world.versions
    for request_id in world.requests:
        if request_id not in world.broken_off:
            world.check(request_id)
    for event in ("publishes", "releases", "cancels", "crossed"):
        assert world.happened[event] > 10, (event, world.happened)
    assert stats["preemptions"] > 20
    assert (stats["hit_tokens"] > 10_000) == prefix_caching
    for versions in world.published.values():
        while versions:
            s.release(versions.pop())
            world.check_prefixes()
