"""What server and rank say to each other. Plain data over one duplex channel, in order in each direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from descant.errors import DescantError
from descant.types import (
    Command,
    EngineCapabilities,
    Manifest,
    ModelFacts,
    Result,
    SampleDelta,
    SampleRequest,
    SnapshotRef,
    Version,
)

# --------------------------------------------------------------------------------------------------------------------
# To the rank. ``call`` is the server's number for what awaits the answer.


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    call: int
    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    call: int
    ref: SnapshotRef
    dest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    call: int
    ref: SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    call: int
    ref: SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    call: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    request: SampleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Asks for the rank's numbers."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    pass


ToRank = Submit | Save | Drop | Publish | Release | Sample | Cancel | Count | Stop

# --------------------------------------------------------------------------------------------------------------------
# From the rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    facts: ModelFacts
    capabilities: EngineCapabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    error: DescantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    call: int
    result: Result | Manifest | Mapping[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    call: int
    error: DescantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    delta: SampleDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEnded:
    """No more deltas of this request: all of its samples ended, it was cancelled, or it failed."""

    request_id: str
    error: DescantError | None = None


FromRank = Starting | Ready | StartFailed | Finished | Failed | Sampled | SampleEnded
