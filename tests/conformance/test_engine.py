"""The engines keep their promises, and the suite notices one that does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descant.errors import DescantError, Overloaded, UserError
from descant.service.backends import Backend
from descant.testing.engine import EngineSuite
from descant.testing.fake_model import Weights
from descant.testing.fakes import FakeEngine, FakeTrainer, FakeWorld
from descant.testing.pools import BOTH, SAMPLES, TRAINS, FakeReplica, Pools, tiny_pools
from descant.testing.ranks import tiny_ranks, tiny_replica
from descant.types import (
    EngineCapabilities,
    Lora,
    PromptScores,
    SampleDelta,
    SampleRequest,
    SnapshotRef,
    StopReason,
    TrainableKind,
    Version,
    input_length,
)


class TestFakeEngine(EngineSuite):
    @pytest.fixture(params=[("lora", "full"), ("lora",)], ids=["both kinds", "adapters"])
    async def backend(self, request: pytest.FixtureRequest) -> Backend:
        world = FakeWorld(trains=frozenset[TrainableKind](request.param))
        return Backend(facts=world.facts, trainer=FakeTrainer(world), engine=FakeEngine(world, max_num_seqs=8))


class TestReplica(EngineSuite):
    @pytest.fixture
    async def backend(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Backend]:
        async with tiny_replica(tmp_path_factory) as replica:
            yield Backend(facts=replica.facts, trainer=replica, engine=replica)


@pytest.mark.crashes
class TestReplicaOfTwoRanks(EngineSuite):
    @pytest.fixture
    async def backend(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Backend]:
        async with tiny_ranks(tmp_path_factory) as replica:
            yield Backend(facts=replica.facts, trainer=replica, engine=replica)


class TestPoolOfFakes(EngineSuite):
    @pytest.fixture(params=[(BOTH,), (BOTH, BOTH)], ids=["one", "two"])
    async def backend(self, request: pytest.FixtureRequest) -> Backend:
        return Pools([FakeReplica(max_num_seqs=8 // len(request.param)) for _ in request.param], request.param).backend


class TestPoolOfFakesApart(EngineSuite):
    """Two worlds, or three, that share nothing: what is sampled came through files."""

    @pytest.fixture(params=[(TRAINS, SAMPLES), (TRAINS, TRAINS, SAMPLES, SAMPLES)], ids=["one of each", "two of each"])
    async def backend(self, request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
        # Steps take long enough for files to come while a request runs.
        replicas = [FakeReplica(max_num_seqs=16 // len(request.param), step_s=0.02) for _ in request.param]
        yield Pools(replicas, request.param).backend
        for roles, replica in zip(request.param, replicas):
            assert not replica.world.adapters or "train" in roles
            assert not replica.world.published or "sample" in roles
            assert all(ref.directory is not None for ref in replica.published)


class TestPool(EngineSuite):
    @pytest.fixture
    async def backend(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Backend]:
        async with tiny_pools(tmp_path_factory, (BOTH, BOTH)) as pools:
            yield pools.backend


class TestPoolApart(EngineSuite):
    """A replica that only trains and one that only samples."""

    @pytest.fixture
    async def backend(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Backend]:
        async with tiny_pools(tmp_path_factory, (TRAINS, SAMPLES)) as pools:
            yield pools.backend


# ---------------------------------------------------------------------------------- broken on purpose, once per clause

Drawn = tuple[list[int], list[float], StopReason]


class NothingFits(FakeEngine):
    def __init__(self, world: FakeWorld, **options: Any):
        super().__init__(world, **options)
        self.capabilities = replace(self.capabilities, max_num_samples=0)


class Altered(FakeEngine):
    """Each delta, altered."""

    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        raise NotImplementedError

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        async for delta in super().sample(request):
            for altered in self.alter(delta):
                yield altered


class NeverEnds(Altered):
    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        return [replace(delta, stop_reason=None)]


class EndsTwice(Altered):
    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        return [delta, replace(delta, tokens=delta.tokens[:0], logprobs=delta.logprobs[:0])]


class OneSample(Altered):
    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        return [delta] if delta.sample == 0 else []


class NoVersion(Altered):
    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        return [replace(delta, version=None)]


class PromptEveryTime(Altered):
    last: PromptScores | None = None

    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        self.last = delta.prompt or self.last
        return [replace(delta, prompt=self.last)]


class SaysHitsEveryTime(Altered):
    last = 0

    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        self.last = delta.prompt_cache_hit_tokens or self.last
        return [replace(delta, prompt_cache_hit_tokens=self.last)]


class SaysNoHits(Altered):
    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        return [replace(delta, prompt_cache_hit_tokens=0)]


class CountsSamplesAsHits(Altered):
    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        return [replace(delta, prompt_cache_hit_tokens=7)] if delta.sample else [delta]


class KeepsAcrossVersions(FakeEngine):
    def _keep(self, request: SampleRequest) -> int:
        return super()._keep(replace(request, version=None))


class KeepsForAll(FakeEngine):
    def _keep(self, request: SampleRequest) -> int:
        return super()._keep(replace(request, prefix_scope=""))


class FirstScoreIsZero(Altered):
    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        if delta.prompt is None or delta.prompt.logprobs is None:
            return [delta]
        return [replace(delta, prompt=replace(delta.prompt, logprobs=np.nan_to_num(delta.prompt.logprobs)))]


class Requested(FakeEngine):
    """Each request, altered."""

    def wanted(self, request: SampleRequest) -> SampleRequest:
        raise NotImplementedError

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        async for delta in super().sample(self.wanted(request)):
            yield delta


class FirstComeFirstServed(Requested):
    def wanted(self, request: SampleRequest) -> SampleRequest:
        return replace(request, owner="")


class StreamsNothing(Requested):
    def wanted(self, request: SampleRequest) -> SampleRequest:
        return replace(request, stream=False)


class StreamsAlways(Requested):
    def wanted(self, request: SampleRequest) -> SampleRequest:
        return replace(request, stream=True)


class Params(Requested):
    """Sampling parameters, altered."""

    change: dict[str, Any]

    def wanted(self, request: SampleRequest) -> SampleRequest:
        return replace(request, sampling_params=replace(request.sampling_params, **self.change))


class IgnoresSeed(Params):
    change = {"seed": None}  # noqa: RUF012


class OneSeed(Params):
    change = {"seed": 3}  # noqa: RUF012


class IgnoresTemperature(Params):
    change = {"temperature": 1.0}  # noqa: RUF012


class IgnoresStop(Params):
    change = {"stop": ()}  # noqa: RUF012


class ShortByDefault(Requested):
    def wanted(self, request: SampleRequest) -> SampleRequest:
        params = request.sampling_params
        return replace(request, sampling_params=replace(params, max_tokens=params.max_tokens or 3))


class KeepsAPlace(FakeEngine):
    """In the context, for the token that is sampled."""

    def _check(self, request: SampleRequest) -> None:
        if input_length(request.prompt) == self.world.facts.max_context_length:
            raise UserError("prompt fills the context")
        super()._check(request)


class OneTemperatureScores(FakeEngine):
    """Log-probabilities at temperature 1, whatever it was."""

    def _draw(self, request: SampleRequest, weights: Weights | None, index: int) -> Drawn:
        tokens, logprobs, reason = super()._draw(request, weights, index)
        return tokens, [logprob * 0.5 for logprob in logprobs], reason


class SameSamples(FakeEngine):
    def _draw(self, request: SampleRequest, weights: Weights | None, index: int) -> Drawn:
        return super()._draw(request, weights, 0)


class CutsTheStop(FakeEngine):
    def _draw(self, request: SampleRequest, weights: Weights | None, index: int) -> Drawn:
        tokens, logprobs, reason = super()._draw(request, weights, index)
        return (tokens[:-1], logprobs[:-1], reason) if reason == "stop" else (tokens, logprobs, reason)


class ScoresAll(Requested):
    def wanted(self, request: SampleRequest) -> SampleRequest:
        return replace(request, prompt_logprobs_last_n=None)


class AsksOneRowLater(Requested):
    def wanted(self, request: SampleRequest) -> SampleRequest:
        if (wanted := request.target_prompt_logprobs) is None:
            return request
        return replace(request, target_prompt_logprobs=replace(wanted, data=np.roll(wanted.data, 1)))


class DrawsAtOne(Requested):
    """Tokens at the prompt's positions, at temperature 1 whatever it was."""

    def wanted(self, request: SampleRequest) -> SampleRequest:
        if not request.prompt_alt_tokens_k:
            return request
        return replace(request, sampling_params=replace(request.sampling_params, temperature=1.0))


class NeverTheLikeliest(Altered):
    def alter(self, delta: SampleDelta) -> list[SampleDelta]:
        if delta.topk_logprobs is None:
            return [delta]
        topk = delta.topk_logprobs
        return [replace(delta, topk_logprobs=replace(topk, logprobs=topk.logprobs * 2))]


class ScoresTheBase(FakeEngine):
    def _prompt_scores(self, request: SampleRequest, weights: Weights | None) -> PromptScores | None:
        return super()._prompt_scores(request, None)


class ServesTheUnpublished(FakeEngine):
    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        if request.version in self.world.snapshots:
            self.world.published[request.version] = self.world.snapshots[request.version].weights
        async for delta in super().sample(request):
            yield delta


class ServesTheReleased(FakeEngine):
    async def release(self, version: Version) -> None:
        pass


class ReleasesOnce(FakeEngine):
    async def release(self, version: Version) -> None:
        del self.world.published[version]


class ReleasesTheRunning(FakeEngine):
    async def release(self, version: Version) -> None:
        for running in self._running.values():
            running.set()
        await super().release(version)


class PublishesAnything(FakeEngine):
    async def publish(self, ref: SnapshotRef) -> None:
        if ref.version not in self.world.snapshots and ref.directory is None:
            ref = next(iter(self.world.snapshots.values())).ref
        await super().publish(ref)


class TakesAnyKind(FakeEngine):
    def __init__(self, world: FakeWorld, **options: Any):
        super().__init__(world, capabilities=EngineCapabilities(), **options)

    async def publish(self, ref: SnapshotRef) -> None:
        await super().publish(replace(ref, trainable=Lora()))


class PublishesTheLive(FakeEngine):
    async def publish(self, ref: SnapshotRef) -> None:
        await super().publish(ref)
        if (adapter := self.world.adapters.get(ref.version.model_id)) is not None:
            self.world.published[ref.version] = adapter.weights


class ForgetsWithTheModel(FakeEngine):
    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        if request.version is not None and request.version.model_id not in self.world.adapters:
            self.world.published.pop(request.version, None)
        async for delta in super().sample(request):
            yield delta


class ReadsBadly(FakeEngine):
    async def publish(self, ref: SnapshotRef) -> None:
        await super().publish(ref)
        if ref.directory is not None:
            self.world.published[ref.version].arrays[1] *= 0.5


class NeverMoves(Requested):
    def wanted(self, request: SampleRequest) -> SampleRequest:
        return replace(request, inflight=False)


class MovesEverybody(Requested):
    def wanted(self, request: SampleRequest) -> SampleRequest:
        return replace(request, inflight=True)


class SaysTheOldVersion(FakeEngine):
    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        async for delta in super().sample(request):
            yield replace(delta, version=request.version)


class MovesInNameOnly(FakeEngine):
    async def publish(self, ref: SnapshotRef) -> None:
        await super().publish(ref)
        older = [v for v in self.world.published if v.model_id == ref.version.model_id and v < ref.version]
        if older:
            self.world.published[ref.version] = self.world.published[max(older)]


class CancelsAll(FakeEngine):
    async def cancel(self, request_id: str) -> None:
        for running in self._running.values():
            running.set()


class CancelsNothing(FakeEngine):
    async def cancel(self, request_id: str) -> None:
        pass


class Leaks(FakeEngine):
    """A request that was closed keeps its place."""

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        held = getattr(self, "held", 0)
        if held >= self.max_num_seqs:
            raise Overloaded("full")
        self.held = held + 1
        async for delta in super().sample(request):
            yield delta
        self.held -= 1


class Unbounded(FakeEngine):
    def __init__(self, world: FakeWorld, **options: Any):
        super().__init__(world)


class ChecksNothing(FakeEngine):
    def _check(self, request: SampleRequest) -> None:
        pass


class ChecksVaguely(FakeEngine):
    def _check(self, request: SampleRequest) -> None:
        try:
            super()._check(request)
        except DescantError as error:
            raise type(error)("bad request") from None


@pytest.mark.parametrize(
    ("broken", "clause", "arguments"),
    [
        (NothingFits, "test_is_an_engine", ()),
        (NeverEnds, "test_every_sample_ends_once", ()),
        (EndsTwice, "test_every_sample_ends_once", ()),
        (OneSample, "test_every_sample_ends_once", ()),
        (StreamsAlways, "test_every_sample_ends_once", ()),
        (StreamsNothing, "test_streaming_is_the_same_in_pieces", ()),
        (IgnoresSeed, "test_a_seed_fixes_the_samples_and_zero_is_one", ()),
        (OneSeed, "test_a_seed_fixes_the_samples_and_zero_is_one", ()),
        (SameSamples, "test_a_seed_fixes_the_samples_and_zero_is_one", ()),
        (IgnoresTemperature, "test_temperature_zero_is_greedy", ()),
        (IgnoresStop, "test_stop_in_all_its_forms", ()),
        (CutsTheStop, "test_stop_in_all_its_forms", ()),
        (ShortByDefault, "test_max_tokens_none_fills_the_context", ()),
        (KeepsAPlace, "test_a_prompt_may_fill_the_context", ()),
        (OneTemperatureScores, "test_logprobs_are_of_the_scaled_distribution", ()),
        (SaysHitsEveryTime, "test_a_prompt_that_comes_again_is_not_computed_again", ()),
        (SaysNoHits, "test_a_prompt_that_comes_again_is_not_computed_again", ()),
        (CountsSamplesAsHits, "test_a_prompt_that_comes_again_is_not_computed_again", ()),
        (KeepsAcrossVersions, "test_a_prompt_that_comes_again_is_not_computed_again", ()),
        (KeepsForAll, "test_a_prompt_is_kept_for_its_own_scope_alone", ()),
        (PromptEveryTime, "test_prompt_scores_come_once", ()),
        (FirstScoreIsZero, "test_prompt_scores_come_once", ()),
        (ScoresAll, "test_only_the_last_of_a_prompt", ()),
        (AsksOneRowLater, "test_chosen_tokens_at_a_prompts_positions", (False,)),
        (AsksOneRowLater, "test_chosen_tokens_at_a_prompts_positions", (True,)),
        (DrawsAtOne, "test_tokens_drawn_at_a_prompts_positions", ()),
        (NeverTheLikeliest, "test_the_likeliest_at_each_sampled_token", ()),
        (ScoresTheBase, "test_the_sampler_scores_as_the_trainer_does", ()),
        (NoVersion, "test_a_version_is_served_from_publish_to_release", (True,)),
        (ServesTheUnpublished, "test_a_version_is_served_from_publish_to_release", (True,)),
        (ServesTheReleased, "test_a_version_is_served_from_publish_to_release", (True,)),
        (ReleasesOnce, "test_a_version_is_served_from_publish_to_release", (False,)),
        (PublishesAnything, "test_a_version_that_nobody_took", ()),
        (PublishesTheLive, "test_a_version_does_not_change_while_training_goes_on", ()),
        (ForgetsWithTheModel, "test_a_version_outlives_its_model", ()),
        (TakesAnyKind, "test_a_full_model_is_sampled_or_refused_as_the_capabilities_say", ()),
        (ScoresTheBase, "test_a_full_model_is_sampled_or_refused_as_the_capabilities_say", ()),
        (ReadsBadly, "test_a_version_from_a_checkpoint_is_the_one_that_was_saved", ()),
        (ReleasesTheRunning, "test_a_release_leaves_running_requests_alone", ()),
        (NeverMoves, "test_inflight_goes_on_with_newer_weights", ()),
        (MovesEverybody, "test_inflight_goes_on_with_newer_weights", ()),
        (MovesInNameOnly, "test_inflight_goes_on_with_newer_weights", ()),
        (SaysTheOldVersion, "test_inflight_in_one_piece_has_a_delta_for_each_weights", ()),
        (StreamsAlways, "test_inflight_in_one_piece_has_a_delta_for_each_weights", ()),
        (NeverMoves, "test_inflight_begins_with_the_newest", ()),
        (MovesEverybody, "test_inflight_begins_with_the_newest", ()),
        (CancelsNothing, "test_cancel_ends_a_request_alone", ()),
        (CancelsAll, "test_cancel_ends_a_request_alone", ()),
        (Leaks, "test_closing_the_iterator_cancels", ()),
        (Unbounded, "test_a_full_queue_says_so_and_the_others_end", ()),
        (FirstComeFirstServed, "test_a_queue_that_one_owner_has_filled_has_room_for_another", ()),
        (Unbounded, "test_a_queue_that_one_owner_has_filled_has_room_for_another", ()),
        (ChecksNothing, "test_bad_input_is_refused_by_name", ({"max_tokens": 0}, "max_tokens")),
        (ChecksVaguely, "test_bad_input_is_refused_by_name", ({"top_p": 0.0}, "top_p")),
    ],
)
async def test_the_suite_sees_a_broken_engine(
    broken: type[FakeEngine], clause: str, arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    world = FakeWorld()
    backend = Backend(facts=world.facts, trainer=FakeTrainer(world), engine=broken(world, max_num_seqs=8))
    with pytest.raises((AssertionError, pytest.fail.Exception, DescantError, KeyError)):
        await getattr(EngineSuite(), clause)(backend, tmp_path, *arguments)
