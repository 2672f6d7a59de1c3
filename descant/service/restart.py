"""The server's start over what an earlier one had: models, unnamed versions and requests without an answer go on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from descant.errors import DescantError
from descant.ports import Clock
from descant.service.automatic_snapshots import AutomaticSnapshots, snapshot_name
from descant.service.backends import Backends
from descant.service.jobs import Jobs
from descant.service.journal import Journal
from descant.service.models import LiveModel, Models, live_model
from descant.service.recovery import Recovery
from descant.service.registry import ModelRecord, Registry, SamplingSessionRecord
from descant.service.sampling import Sampling
from descant.service.sessions import Sessions
from descant.service.settings import ServiceSettings
from descant.types import Version

log = logging.getLogger(__name__)


class Restart:
    def __init__(
        self,
        *,
        backends: Backends,
        sessions: Sessions,
        models: Models,
        registry: Registry,
        journal: Journal,
        snapshots: AutomaticSnapshots,
        recovery: Recovery,
        sampling: Sampling,
        jobs: Jobs,
        clock: Clock,
        settings: ServiceSettings,
    ):
        self._backends = backends
        self._sessions = sessions
        self._models = models
        self._registry = registry
        self._journal = journal
        self._snapshots = snapshots
        self._recovery = recovery
        self._sampling = sampling
        self._jobs = jobs
        self._clock = clock
        self._settings = settings

    async def run(self, pending: Collection[str]) -> set[str]:
        """Has all models that were live made again, in the background; returns which ``pending`` requests go on."""
        taken, known = await self._journal.snapshots(), await self._journal.models()
        going_on: set[str] = set()
        restored: list[LiveModel] = []
        for record in await self._registry.live_models():
            if record.model_id not in known:
                continue  # its creation was never acknowledged; it comes again, or its session ends
            try:
                model, found = await self._restore(record, taken.get(record.model_id, ()), pending)
            except DescantError as error:
                log.error("a model of an earlier server cannot be had again: %s", error)
                await self._registry.lose(models=[record.model_id], versions=(), reason=f"at a restart: {error}")
                continue
            restored.append(model)
            going_on |= found
        await self._journal.forget(set(known) - {model.record.model_id for model in restored})
        await self._snapshots.remove_orphans(
            {snapshot_name(model.record.model_id, seq_id) for model in restored for seq_id in model.snapshots}
        )
        await self._expect_versions()
        for model in restored:
            self._recovery.interrupted(model)
        if restored:
            log.info("%d models of the last server are made again", len(restored))
        return going_on

    async def _restore(
        self, record: ModelRecord, snapshots: Sequence[int], pending: Collection[str]
    ) -> tuple[LiveModel, set[str]]:
        """Raises ``DescantError``: its base is not served or trained any more, or what was asked of it cannot be
        read."""
        backend = self._backends[self._backends.served(record.base)]
        backend.check_trains(record.trainable, of=f"model {record.model_id!r}")
        entries = await self._journal.entries(record.model_id)
        first = min((entry.seq_id for entry in entries if entry.seq_id > 0), default=1)
        newest = max(snapshots, default=0)
        model = live_model(
            record,
            backend,
            jobs=self._jobs,
            clock=self._clock,
            gap_timeout_s=self._settings.seq_gap_timeout_s,
            watcher=self._recovery,
            next_seq_id=self._recovery.next_seq_id(entries, after=newest),
        )
        model.snapshots = list(snapshots)
        if snapshots and (first > 1 or record.source_uri is not None):
            model.oldest = min(snapshots)
        model.queue.hold()
        self._models.add(model)
        try:
            return model, await self._recovery.restore(model, entries, pending)
        except DescantError:
            self._models.remove(model)
            raise

    async def _expect_versions(self) -> None:
        """Unnamed versions that a recovery comes by are published again, others are lost."""
        lost: set[Version] = set()
        of_model: dict[str, list[SamplingSessionRecord]] = {}
        for sampler in await self._registry.live_ephemeral():
            assert sampler.version is not None
            of_model.setdefault(sampler.version.model_id, []).append(sampler)
        for model_id, samplers in of_model.items():
            versions = {sampler.version for sampler in samplers if sampler.version is not None}
            there = self._repeatable(model_id, versions)
            for sampler in samplers:
                assert sampler.version is not None
                if sampler.version in there:
                    self._sampling.expect(sampler, sampler.version)
                elif sampler.kind == "inflight" and there:
                    self._sampling.expect(sampler, max(there))
                else:
                    lost.add(sampler.version)
        await self._registry.lose(models=(), versions=lost, reason="")

    def _repeatable(self, model_id: str, versions: Collection[Version]) -> set[Version]:
        model = self._models.get(model_id)
        if model is None:
            return set()
        return {version for version in versions if self._snapshots.can_repeat(model, version.number)}
