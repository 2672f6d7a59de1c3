"""An ``Executor`` without torch: a ``FakeWorld`` that is trained, and a sampler that checks the pages it is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from descant.ckpt.manifest import read_manifest
from descant.errors import DescantError, NotFound, ServerError, UserError
from descant.ranks.ops import (
    Background,
    Drop,
    Fail,
    Idle,
    Microbatch,
    Operation,
    Outcome,
    Pin,
    Prefetch,
    Publish,
    Release,
    ReplicaInfo,
    Rows,
    SampleStep,
    Save,
    Stats,
    Stop,
    Unpin,
)
from descant.sample.plan import SequenceOutput
from descant.sample.scheduler import Scheduler
from descant.testing.fakes import FakeTrainer, FakeWorld
from descant.testing.paged_sampler import PagedFake, scheduler
from descant.train.runner import RequestKey
from descant.types import CheckpointSource, Command, EngineCapabilities, ForwardBackward, Manifest, Result, Version

R = TypeVar("R")

NUM_PAGES = 64


class FakeMemory:
    """Room for everything."""

    adapter_bytes = 1 << 40

    def bytes_in_use(self, model_id: str) -> tuple[int, int]:
        return 1, 1

    def is_resident(self, model_id: str) -> bool:
        return True


class FakeExecutor:
    """A request counts when it closes, whole."""

    def __init__(self, world: FakeWorld | None = None, *, microbatch_tokens: int = 16):
        self.world = world or FakeWorld()
        self.info = ReplicaInfo(
            facts=self.world.facts, capabilities=EngineCapabilities(), microbatch_tokens=microbatch_tokens
        )
        self.memory = FakeMemory()
        self._trainer = FakeTrainer(self.world)
        self._sampler = PagedFake(NUM_PAGES)
        self._open: dict[RequestKey, ForwardBackward] = {}
        self._published: set[Version] = set()
        self._pins: Counter[Version] = Counter()
        self._handlers: Mapping[type[Operation[Any]], Callable[[Any], Any]] = {
            Microbatch: self._microbatch,
            Rows: self._rows,
            Fail: self._fail,
            Save: self._save,
            Drop: lambda op: self.world.snapshots.pop(op.ref.version, None),
            SampleStep: self._step,
            Publish: self._publish,
            Release: lambda op: self._published.discard(op.version),
            Pin: self._pin,
            Unpin: lambda op: self._pins.subtract({op.version: op.count}),
            Prefetch: lambda op: None,
            Idle: lambda op: None,
            Stats: lambda op: {"versions_pinned": sum(count > 0 for count in self._pins.values())},
            Stop: lambda op: None,
        }

    def execute(self, op: Operation[R]) -> R:
        result: R = self._handlers[type(op)](op)
        return result

    def make_scheduler(self) -> Scheduler:
        return scheduler(num_pages=NUM_PAGES)

    def read(self, source: CheckpointSource) -> CheckpointSource:
        read_manifest(source.directory)
        return source

    # ------------------------------------------------------------------------------------------------ training
    def _run(self, command: Command) -> Outcome:
        result: Result | DescantError
        try:
            result = self._trainer.execute(command)
        except DescantError as error:
            self._trainer.remember_failure(command, error)
            result = error
        return Outcome(key=(command.model_id, command.seq_id), result=result)

    def _microbatch(self, op: Microbatch) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for command in op.opens:
            key = (command.model_id, command.seq_id)
            if command.model_id in self.world.adapters:
                self._open[key] = command
            else:
                outcomes.append(Outcome(key=key, result=NotFound(f"there is no model {command.model_id!r}")))
        return outcomes + [self._run(self._open.pop(key)) for key in op.closes if key in self._open]

    def _rows(self, op: Rows) -> list[Outcome]:
        outcomes = []
        for command in op.commands:
            key = (command.model_id, command.seq_id)
            failed = op.loaded.get(key)
            outcomes.append(Outcome(key=key, result=failed) if isinstance(failed, DescantError) else self._run(command))
        return outcomes

    def _fail(self, op: Fail) -> None:
        self._open.pop(op.key, None)
        self._trainer.remember_failure(op.command, ServerError(op.why))

    def _save(self, op: Save) -> Background[Manifest]:
        held = self.world.snapshots.get(op.ref.version)
        if held is None:
            raise NotFound(f"there is no snapshot of {op.ref.version} to save")

        def write() -> Manifest:  # what it holds may have been dropped by then
            kept = self.world.snapshots
            self.world.snapshots = {op.ref.version: held}
            try:
                return self._trainer.write(op.ref, op.dest)
            finally:
                self.world.snapshots = kept

        return Background(run=write)

    # ------------------------------------------------------------------------------------------------ sampling
    def _step(self, op: SampleStep) -> list[list[SequenceOutput]]:
        [plan] = op.plans
        assert plan is not None
        return [self._sampler.step(plan)]

    def _publish(self, op: Publish) -> None:
        if op.ref.version not in self.world.snapshots and op.loaded is None:
            raise NotFound(f"there is no snapshot of {op.ref.version} to publish")
        self._published.add(op.ref.version)

    def _pin(self, op: Pin) -> None:
        if op.version not in self._published:
            raise NotFound(f"{op.version} was never published, or was released")
        if op.count < 1:
            raise UserError(f"count is {op.count}, expected 1 or more")
        self._pins[op.version] += op.count
