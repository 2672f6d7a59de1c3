"""Dispatches sample requests to the ranks' schedulers, pins the versions that they sample, and answers with deltas."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from descant.errors import DescantError, UserError
from descant.ranks.decide import SamplingRank, sampling_rank
from descant.ranks.executor import Executor, to_descant_error
from descant.ranks.ops import Pin, Publish, RankResponse, Release, SampleStep, Unpin
from descant.ranks.turn_trace import TurnTrace
from descant.sample.plan import SequenceOutput, StepPlan
from descant.sample.scheduler import Scheduler
from descant.types import SampleDelta, SampleRequest, SnapshotRef, Version

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _OpenRequest:
    """``id``: of the request that its deltas answer. ``model``: its owner and which. ``version``: what it pins.
    ``left``: samples that have not ended."""

    id: int
    model: tuple[str, str | None]
    version: Version | None
    scheduler: Scheduler
    left: set[int]


class SamplingDispatcher:
    """Used on the turn loop's thread."""

    def __init__(self, executor: Executor, respond: Callable[[RankResponse], None]):
        self._executor = executor
        self._respond = respond
        self._schedulers: list[Scheduler] = []
        if "sample" in executor.info.roles:
            self._schedulers = [executor.make_scheduler() for _ in range(executor.info.num_ranks)]
        self._open: dict[str, _OpenRequest] = {}
        self._models: Counter[tuple[str, str | None]] = Counter()
        """Open requests of each; an owner's of the base are one."""
        self._published: set[Version] = set()
        self._newest: dict[str, Version] = {}
        """Of each model the newest version that is published."""

    def __bool__(self) -> bool:
        """Whether anything is sampled."""
        return bool(self._open)

    @property
    def num_models(self) -> int:
        """Of which something is sampled."""
        return len(self._models)

    def has_work(self) -> bool:
        return any(scheduler.has_work() for scheduler in self._schedulers)

    def stats(self) -> Mapping[str, float]:
        total: Counter[str] = Counter()
        for scheduler in self._schedulers:
            total.update({f"sample_{name}": value for name, value in scheduler.stats().items()})
        return total

    # ------------------------------------------------------------------------------------------------ requests
    def start(self, id: int, request: SampleRequest) -> None:
        pinned = False
        if request.inflight and request.version is not None:
            newest = self._newest.get(request.version.model_id, request.version)
            if newest.number > request.version.number:
                request = replace(request, version=newest)
        try:
            if request.request_id in self._open:
                raise UserError(f"request {request.request_id!r} runs already")
            self._pin(request.version)
            pinned = True
            scheduler = self._scheduler_for(request)
            scheduler.add(request)
        except Exception as error:
            failure = to_descant_error(error)
            if pinned:
                self._unpin(request.version)
            self._respond(RankResponse(id=id, error=failure))
            return
        left = set(range(request.num_samples))
        model = request.owner, None if request.version is None else request.version.model_id
        self._models[model] += 1
        self._open[request.request_id] = _OpenRequest(
            id=id, model=model, version=request.version, scheduler=scheduler, left=left
        )

    def cancel(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        if (sampling := self._open.get(request_id)) is not None:
            sampling.scheduler.cancel(request_id)
            self._end(request_id, None)

    def _scheduler_for(self, request: SampleRequest) -> Scheduler:
        if len(self._schedulers) == 1:
            return self._schedulers[0]
        ranks = [
            SamplingRank(sequences=_num_sequences(scheduler), cached_tokens=scheduler.cached_tokens(request))
            for scheduler in self._schedulers
        ]
        return self._schedulers[sampling_rank(ranks, max_num_seqs=self._executor.info.capabilities.max_num_seqs)]

    def _end(self, request_id: str, error: DescantError | None) -> None:
        sampling = self._open.pop(request_id)
        self._models[sampling.model] -= 1
        if not self._models[sampling.model]:
            del self._models[sampling.model]
        self._unpin(sampling.version)
        self._respond(RankResponse(id=sampling.id, error=error))

    def _pin(self, version: Version | None, count: int = 1) -> None:
        """The base model is always there."""
        if version is not None:
            self._executor.execute(Pin(version=version, count=count))

    def _unpin(self, version: Version | None, count: int = 1) -> None:
        if version is not None:
            self._executor.execute(Unpin(version=version, count=count))

    # ------------------------------------------------------------------------------------------------ versions
    def is_published(self, version: Version) -> bool:
        return version in self._published

    def publish(self, ref: SnapshotRef, loaded: Any | None) -> None:
        """Publishes; then, between two steps, inflight requests of its model move to it."""
        version = ref.version
        if version not in self._published:
            self._executor.execute(Publish(ref=ref, loaded=loaded))
            self._published.add(version)
        newest = self._newest.get(version.model_id)
        if newest is None or newest.number < version.number:
            self._newest[version.model_id] = version
        followers = {scheduler: scheduler.followers(version) for scheduler in self._schedulers}
        if not (count := sum(map(len, followers.values()))):
            return
        try:
            self._pin(version, count)
        except Exception as error:  # they stay with their version
            log.warning("requests stay with their weights, newer ones could not be had: %s", to_descant_error(error))
            return
        before: Counter[Version | None] = Counter()
        for scheduler, request_ids in followers.items():
            scheduler.move(request_ids, version)
            for request_id in request_ids:
                sampling = self._open[request_id]
                before[sampling.version] += 1
                sampling.version = version
        for left, count in before.items():
            self._unpin(left, count)

    def release(self, version: Version) -> None:
        self._executor.execute(Release(version=version))
        self._published.discard(version)
        for scheduler in self._schedulers:
            scheduler.release(version)
        if self._newest.get(version.model_id) == version:
            del self._newest[version.model_id]

    # ------------------------------------------------------------------------------------------------ steps
    def step(self, describe: Callable[[str], None], trace: TurnTrace) -> None:
        """One step of every rank that has something to sample; ``describe`` is called with a sentence before it
        begins."""
        plans = tuple(scheduler.plan() for scheduler in self._schedulers)
        planned = [plan for plan in plans if plan is not None]
        if not planned:
            return
        num_sequences, num_tokens = sum(len(p.sequences) for p in planned), sum(p.num_tokens for p in planned)
        describe(f"a sampling step of {num_sequences} sequences, {num_tokens} tokens")
        trace.holds(num_sequences, num_tokens)
        trace.mark("plan")
        outputs: Sequence[Sequence[SequenceOutput] | DescantError | None]
        try:
            outputs = self._executor.execute(SampleStep(plans=plans))
        except Exception as error:
            outputs = [to_descant_error(error)] * len(plans)
        trace.mark("run")
        for scheduler, plan, output in zip(self._schedulers, plans, outputs, strict=True):
            if plan is not None and output is not None:
                self._apply(scheduler, plan, output)

    def _apply(self, scheduler: Scheduler, plan: StepPlan, outputs: Sequence[SequenceOutput] | DescantError) -> None:
        try:
            if isinstance(outputs, DescantError):
                raise outputs
            deltas = scheduler.apply(plan, outputs)
        except Exception as error:
            failure = to_descant_error(error)
            for request_id in scheduler.fail(plan):
                if request_id in self._open:
                    self._end(request_id, failure)
            return
        for delta in deltas:
            self._deliver(delta)
        for request_id, failed in scheduler.take_failures():
            if request_id in self._open:
                self._end(request_id, failed)

    def _deliver(self, delta: SampleDelta) -> None:
        sampling = self._open.get(delta.request_id)
        if sampling is None:
            return
        self._respond(RankResponse(id=sampling.id, result=delta, last=False))
        if delta.stop_reason is not None:
            sampling.left.discard(delta.sample)
            if not sampling.left:
                self._end(delta.request_id, None)


def _num_sequences(scheduler: Scheduler) -> int:
    stats = scheduler.stats()
    return stats["waiting"] + stats["running"]
