"""Operations: what a server asks of a replica, and what every rank of the replica executes. One record for both.

    server ── RankRequest(id, op) ──► rank 0 ── op ──► every rank
    server ◄── RankResponse(id, result | error) ── rank 0

``op`` is a ``Command`` or an ``Operation``; nothing renames it on its way. Commands and sample requests wait in
queues on rank 0, and become ``Microbatch``, ``Rows`` and ``SampleStep``; any other operation is executed as it came,
between two turns.

To add one: a record here, with its result and ``runs``; a handler in the role that does it (``ranks.roles``); a call
where the service needs it (``Replica.call``). ``CONTRIBUTING.md`` walks through a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from descant.errors import DescantError
from descant.ranks.health import TurnReport
from descant.types import (
    ROLES,
    CheckpointSource,
    Command,
    EngineCapabilities,
    ForwardBackward,
    Manifest,
    ModelFacts,
    Result,
    Role,
    SampleDelta,
    SampleRequest,
    SnapshotRef,
    Version,
)

if TYPE_CHECKING:  # the server reads this module, and loads no torch
    from descant.sample.plan import StepPlan
    from descant.train.runner import Part, RequestKey

R_co = TypeVar("R_co", covariant=True)

Runs = Literal["on every rank", "on every rank, later", "on rank 0"]
"""Where an operation is executed.

on every rank: together; all get its outcome, and the worst one holds for all.
on every rank, later: on rank 0 at once, on the others before the next that runs together. It cannot fail: an error is
the end of the replica.
on rank 0: there alone, since it changes nothing that the others have.
"""


class Operation(Generic[R_co]):
    """``R_co``: what ``Executor.execute`` returns."""

    __slots__ = ()
    runs: ClassVar[Runs] = "on every rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Background(Generic[R_co]):
    """The result of an operation that goes on behind the turns: ``run`` is called on a file thread, and what it returns
    is the answer."""

    run: Callable[[], R_co]


# --------------------------------------------------------------------------------------------------------------------
# What a server asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Operation[Background[Manifest]]):
    """``Trainer.save``."""

    runs: ClassVar[Runs] = "on rank 0"
    ref: SnapshotRef
    dest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Operation[None]):
    """``Trainer.drop``: what a snapshot holds for a save is freed."""

    runs: ClassVar[Runs] = "on every rank, later"
    ref: SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Operation[None]):
    """``Engine.publish``. ``loaded``: the weights that rank 0 has read (opaque tensors), where ``ref`` names a
    directory."""

    ref: SnapshotRef
    loaded: Any | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Operation[None]):
    """``Engine.release``."""

    runs: ClassVar[Runs] = "on every rank, later"
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Operation[SampleDelta]):
    """``Engine.sample``: a response for each delta; the last has none."""

    request: SampleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Operation[None]):
    """``Engine.cancel``: the request's last response comes at once."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Operation[Mapping[str, float]]):
    runs: ClassVar[Runs] = "on rank 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns(Operation[TurnReport]):
    """What the last turns took. The turn loop answers it: it is nothing that an executor knows."""

    runs: ClassVar[Runs] = "on rank 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Operation[None]):
    """No more operations. What is not done is not answered."""


# --------------------------------------------------------------------------------------------------------------------
# What rank 0 makes of what waits. The rank that computes a datum is in the operation as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended: with a result, or with an error."""

    key: RequestKey
    result: Result | DescantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch(Operation[list[Outcome]]):
    """Datums that are computed together. ``opens``: requests whose first datum is in it; ``closes``: whose last is, or
    was in one before. The outcomes of all ``closes``, and of requests that were refused when opened.

    ``shares[rank]``: its passes, as many for each rank, some of them empty (``partition.balanced_shares``,
    ``partition.piece_shares``). ``backward``: whether any of its requests is more than evaluated. ``sampling``:
    sequences are being sampled meanwhile: the device has done it when the turn ends, so that they wait for this
    alone."""

    opens: tuple[ForwardBackward, ...]
    shares: tuple[tuple[tuple[Part, ...], ...], ...]
    closes: tuple[RequestKey, ...]
    backward: bool = True
    sampling: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for passes in self.shares for parts in passes for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Operation[list[Outcome]]):
    """Commands that move or change whole rows (create, optimiser step, snapshot, load, delete, refused), in order; one
    outcome each. ``loaded``: what was read for those that have a source (opaque tensors), or the error."""

    commands: tuple[Command, ...]
    loaded: Mapping[RequestKey, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStep(Operation[list[Any]]):
    """``plans[rank]``: None where that rank has nothing to sample. By rank: what its plan gave (``SequenceOutput``s),
    or how it failed (a ``DescantError``); None where there was no plan."""

    plans: tuple[StepPlan | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Operation[None]):
    """Before a turn about ``keep``: these models are asked for next, in this order. Never raises."""

    runs: ClassVar[Runs] = "on every rank, later"
    model_ids: tuple[str, ...]
    keep: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail(Operation[None]):
    """The turn that this command was in broke: forget what is open, and remember a lost gradient."""

    runs: ClassVar[Runs] = "on every rank, later"
    key: RequestKey
    command: Command
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin(Operation[None]):
    """As many requests as ``count`` begin to sample this version, or move to it; all of them or none. ``NotFound``, or
    ``ServerError`` where its weights cannot be had."""

    version: Version
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin(Operation[None]):
    """They have ended, or moved to another."""

    runs: ClassVar[Runs] = "on every rank, later"
    version: Version
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle(Operation[None]):
    """Nothing waits: memory may be returned, and the ranks check each other."""


# --------------------------------------------------------------------------------------------------------------------
# Between server and rank: plain data over one duplex channel, in order in each direction


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """``id``: the server's number for what awaits the responses; 0 where nothing does."""

    id: int
    op: Command | Operation[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResponse:
    """``id`` 0 is the start's: a phase (a few words) with ``last`` False, ``ReplicaInfo`` once the replica serves, or
    why it cannot."""

    id: int
    result: Any = None
    error: DescantError | None = None
    last: bool = True


START = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a replica is, once it serves.

    ``overlaps``: its devices compute a training pass while its hosts do other things. ``microbatch_tokens``: of one
    rank's part of a training turn. ``piece_tokens``: each pass is one piece of one
    request, of so many tokens at most; None: a pass carries whatever fits a turn. ``idle_s``: how often ``Idle`` is
    executed while there is nothing to do; None: never."""

    facts: ModelFacts
    capabilities: EngineCapabilities
    roles: frozenset[Role] = ROLES
    num_ranks: int = 1
    overlaps: bool = False
    microbatch_tokens: int
    piece_tokens: int | None = None
    idle_s: float | None = None


def source_of(op: Command | Operation[Any]) -> CheckpointSource | None:
    """The checkpoint that is read before it can run, on a file thread."""
    match op:
        case Publish(ref=SnapshotRef(version=version, directory=str(directory))):
            uri = f"of version {version.number} of model {version.model_id}"
            return CheckpointSource(uri=uri, directory=directory, optimizer=False)
        case _:
            return getattr(op, "source", None)
