"""The models that trainers have: found, counted against quotas, and looked at for gaps that are too old."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from descant.errors import NotFound
from descant.ports import Clock
from descant.service.backends import Backend, Backends
from descant.service.command_queue import CommandQueue, QueueWatcher
from descant.service.jobs import Jobs
from descant.service.quotas import Quotas, model_bytes
from descant.service.registry import ModelRecord, Registry


@dataclass(slots=True, eq=False)
class RecoveryProgress:
    """Of a recovery: commands that are done again, of how many."""

    done: int = 0
    total: int = 0


@dataclass(slots=True, eq=False)
class LiveModel:
    """A model that a trainer has, in memory. ``lost``: it had.

    ``recovering``: its trainer has it not yet again. ``snapshots``: the last commands in those of its automatic
    snapshots that are kept, rising; ``oldest``: where a recovery may begin at the earliest, 0: at its creation.
    ``loads``: it was made from a checkpoint, which may be replaced or end. ``deaths``: how often its rank died while
    it ran a command, by seq_id.
    """

    record: ModelRecord
    backend: Backend
    queue: CommandQueue
    lost: bool = False
    recovering: RecoveryProgress | None = None
    snapshots: list[int] = field(default_factory=list)
    oldest: int = 0
    loads: bool = False
    deaths: Counter[int] = field(default_factory=Counter)


def live_model(
    record: ModelRecord,
    backend: Backend,
    *,
    jobs: Jobs,
    clock: Clock,
    gap_timeout_s: float,
    watcher: QueueWatcher,
    next_seq_id: int = 1,
) -> LiveModel:
    """One that its trainer is to have. ``next_seq_id``: as of ``CommandQueue``."""
    queue = CommandQueue(
        model_id=record.model_id,
        trainer=backend.trainer,
        jobs=jobs,
        clock=clock,
        gap_timeout_s=gap_timeout_s,
        watcher=watcher,
        next_seq_id=next_seq_id,
    )
    return LiveModel(record=record, backend=backend, queue=queue, loads=record.source_uri is not None)


class Models:
    """Owns them in memory; the registry has all. When one ends with its session or its process, the service says so."""

    def __init__(self, *, backends: Backends, registry: Registry, quotas: Quotas):
        self._backends = backends
        self._registry = registry
        self._quotas = quotas
        self._models: dict[str, LiveModel] = {}
        self._of_session: dict[str, dict[str, LiveModel]] = {}
        self._of_base: dict[str, dict[str, LiveModel]] = {base: {} for base in backends}
        self._of_owner: dict[str, dict[str, int]] = {}
        """The bytes of each owner's models, by id; those that are being created count as well."""
        self.ending: dict[str, LiveModel] = {}
        """Models whose session is over and that still do what they were asked before."""
        self._behind: dict[str, LiveModel] = {}
        """Those that have requests waiting for earlier ones, and some that had."""

    async def find(self, principal: str, model_id: str) -> LiveModel | ModelRecord:
        """A live model, or the record of a lost one. Raises ``NotFound`` for any other, and for another owner's."""
        model = self._models.get(model_id)
        record = model.record if model is not None else await self._registry.model(model_id)
        if record is None or record.owner != principal:
            raise NotFound(f"no model {model_id!r}")
        if model is None and record.status != "lost":
            raise NotFound(f"model {model_id!r} is not there: {record.status_reason or 'it is being created'}")
        return model or record

    def get(self, model_id: str) -> LiveModel | None:
        """One that a trainer has, of any owner."""
        return self._models.get(model_id)

    def find_ending(self, model_id: str) -> LiveModel | None:
        """Also one whose session is over, while what it was asked before has not ended."""
        return self._models.get(model_id) or self.ending.get(model_id)

    def of_base(self, base: str) -> Sequence[LiveModel]:
        """All that its trainer has."""
        return list(self._of_base[base].values())

    def num_of_base(self, base: str) -> int:
        return len(self._of_base[base])

    def of_session(self, session_id: str) -> Sequence[LiveModel]:
        """All that trainers have of it."""
        return list(self._of_session.get(session_id, {}).values())

    # ------------------------------------------------------------------------------------------------ come and go
    async def reserve(self, record: ModelRecord) -> None:
        """Whether its owner may have one more; then it counts, until ``unreserve`` or ``remove``. Raises
        ``QuotaExceeded``."""
        self._quotas.check_model_records(await self._registry.num_models(record.owner))
        theirs = self._of_owner.get(record.owner, {})
        self._quotas.check_models(len(theirs), sum(theirs.values()), self._num_bytes(record))
        self._count(record)

    def unreserve(self, record: ModelRecord) -> None:
        """It did not come about."""
        theirs = self._of_owner.get(record.owner, {})
        theirs.pop(record.model_id, None)
        if not theirs:
            self._of_owner.pop(record.owner, None)

    def add(self, model: LiveModel) -> None:
        """A trainer has it from now on."""
        record = model.record
        self._count(record)
        self._models[record.model_id] = model
        self._of_base[record.base][record.model_id] = model
        self._of_session.setdefault(record.session_id, {})[record.model_id] = model

    def remove(self, model: LiveModel) -> None:
        """It is over or lost, and found in the registry alone from now on. Its queue is the caller's to end."""
        model_id, session_id = model.record.model_id, model.record.session_id
        if self._models.pop(model_id, None) is None:
            return
        self._behind.pop(model_id, None)
        self.unreserve(model.record)
        del self._of_base[model.record.base][model_id]
        del self._of_session[session_id][model_id]
        if not self._of_session[session_id]:
            del self._of_session[session_id]

    # ------------------------------------------------------------------------------------------------ in time
    def waits(self, model: LiveModel) -> None:
        """It has requests that wait for earlier ones, perhaps: ``expire`` looks at it."""
        if model.queue.num_waiting:
            self._behind[model.record.model_id] = model

    def expire(self) -> None:
        """Closes the gaps in models' orders whose time is over."""
        for model_id, model in list(self._behind.items()):
            model.queue.expire()
            if not model.queue.num_waiting:
                del self._behind[model_id]

    # ----------------------------------------------------------------------------------------------------------------

    def _count(self, record: ModelRecord) -> None:
        self._of_owner.setdefault(record.owner, {})[record.model_id] = self._num_bytes(record)

    def _num_bytes(self, record: ModelRecord) -> int:
        return model_bytes(self._backends[record.base].facts, record.trainable)
