"""What the turn loop drives: ``Executor``. One rank is one (``worker``); several are one as well (``spmd``)."""

from __future__ import annotations

import logging
from typing import Any, Protocol, TypeVar

from descant.distributed.failure import DistributedFailure
from descant.errors import DescantError, ServerError
from descant.ranks.ops import Operation, ReplicaInfo
from descant.sample.scheduler import Scheduler
from descant.types import CheckpointSource

log = logging.getLogger(__name__)

R = TypeVar("R")


class AdapterMemory(Protocol):
    """What the decision reads of the adapters' residency (``AdapterBank``)."""

    adapter_bytes: int
    """The limit for the models of one microbatch and those with open requests, together."""

    def bytes_in_use(self, model_id: str) -> tuple[int, int]:
        """What a model takes on the device with one request open, and with each one more. Zeros if it is not here.
        Changes only as a command of the model ends."""
        ...

    def is_resident(self, model_id: str) -> bool:
        """Whether its rows are on the device."""
        ...


class Executor(Protocol):
    """What a replica can do, on its rank 0. Everything but ``read`` and ``Background.run`` is called on one thread.

    Its suite is ``descant.testing.executor``. Tensors are opaque to the caller: what ``read`` made goes into
    ``Rows.loaded`` and ``Publish.loaded``.
    """

    info: ReplicaInfo
    memory: AdapterMemory

    def execute(self, op: Operation[R]) -> R:
        """Raises a ``DescantError`` that is the operation's outcome, or any other exception where it broke: then
        nothing of it counts. A ``DistributedFailure`` is no outcome: it is the end of the replica."""
        ...

    def make_scheduler(self) -> Scheduler:
        """Called once for each rank; the same limits hold for all."""
        ...

    def read(self, source: CheckpointSource) -> Any:
        """A checkpoint's tensors on the host. Any thread."""
        ...


def to_descant_error(error: BaseException) -> DescantError:
    """The error as clients get it. Anything outside the tree is our fault: its kind goes to the client, the rest to the
    rank's log. Raises a ``DistributedFailure``: the replica is at its end, and its launcher fails what is pending."""
    if isinstance(error, DistributedFailure):
        raise error
    if isinstance(error, DescantError):
        return error
    log.error("failed in the rank", exc_info=error)
    return ServerError(f"failed with {type(error).__name__} in the rank (its log says more)")
