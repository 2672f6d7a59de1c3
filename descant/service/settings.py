"""What a service may be told about its times and limits."""

from __future__ import annotations

from dataclasses import dataclass

from descant.types import SamplerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    hole_timeout_s: float = 330.0
    """How long a command waits for a missing seq_id: longer than the SDK's retries."""
    session_timeout_s: float = 3600.0
    """A session without a heartbeat for this long is over; counted from its creation if it never beat."""
    keep_finished_s: float = 6 * 3600.0
    """Finished futures stay fetchable for this long."""
    stall_timeout_s: float = 2 * 3600.0
    """A base that has had work for this long and ended none of it is given up: its requests fail."""
    sampler_kind: SamplerKind = "snapshot"
    """What sampling clients without files are when they do not say (the SDK has said it since 0.38): a snapshot, or
    inflight, which follows the newest weights."""
    max_samples_in_flight: int = 4096
    """Sampling requests of one base that were accepted and have not ended; one more is told to come again."""
    vanish_grace_s: float = 0.5
    """A client that broke off every wait of its own and did not wait again for this long has vanished: its sampling
    requests are given up. The SDK sends them again should it be there after all."""
    vanish_timeout_s: float = 60.0
    """So has one that waits for nothing and sent nothing, not even a heartbeat (every 10 s), for this long."""
    unclaimed_timeout_s: float = 5.0
    """A sampling request for which nobody has come for this long, though its client said that it comes for the answer
    at once, as the SDK does, or closed the connection before it had the id, was cancelled on the way, and is given up.
    Not shorter: a client that is far and opens a connection for its first wait, or whose event loop is busy, takes a
    second."""
    max_training_bytes: int = 2 << 30
    """Of the data of one base's training requests that were accepted and have not ended; one that goes beyond is told
    to come again, unless nothing of its model is being trained: so a model always has one, and nobody starves."""
    sweep_interval_s: float = 1.0
    """How often it is looked whether a hole, a session or a base is over its time."""
    prune_interval_s: float = 60.0
    """How often finished futures and checkpoints are looked at whose time is over."""
