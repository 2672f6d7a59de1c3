"""What runs next: ``decide``, a pure function from what waits to one ``Turn``. The only place that chooses.

Every rank of a replica executes the same turns in the same order; one process is a replica of one rank. Turns are
plain records. No rank, thread or stream chooses for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from descant.sample.scheduler import StepPlan
from descant.train.step import Part
from descant.types import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One shared forward/backward pass."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStep:
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Commands that move or change whole rows: create, optimiser step, snapshot, load, delete, refused."""

    commands: tuple[Command, ...]


Turn = Microbatch | SampleStep | Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingDatum:
    part: Part
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingModel:
    """One model's queue as ``decide`` sees it: the head and what may join it.

    ``head``: "rows" (the next command is a row command), "data" (the next are datums of forward_backwards that may
    run now), or "none" (nothing, or the head waits for datums in flight). ``data`` in order. ``served``: tokens this
    model has had since it last had nothing waiting (fairness counts these).
    """

    model_id: str
    head: Literal["rows", "data", "none"]
    command: Command | None = None
    data: tuple[WaitingDatum, ...] = ()
    served: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    models: tuple[WaitingModel, ...]
    sampling: bool
    """The sampler has a step to run."""
    last: Literal["microbatch", "sample", "rows", "none"]
    sample_credit: float
    """Steps the sampler is owed: grows by the share setting with each microbatch, shrinks with each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``kind`` "idle": nothing waits. ``parts`` for a microbatch, ``commands`` for rows."""

    kind: Literal["microbatch", "sample", "rows", "idle"]
    parts: tuple[Part, ...] = ()
    commands: tuple[Command, ...] = ()


def decide(waiting: Waiting, *, microbatch_tokens: int, packable: bool = True) -> Choice:
    """Row commands first (they are short and let the most people go on), all that wait at once; then training and
    sampling by share: a waiting token waits for one microbatch at most, and training is never shut out. A microbatch is
    filled datum by datum from the model least served, so that a small tenant is never behind a large one's queue; a
    datum larger than the budget runs alone."""
    raise NotImplementedError
