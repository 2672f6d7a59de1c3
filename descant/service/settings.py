"""The service's settings: times and limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from descant.types import SamplerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    seq_gap_timeout_s: float = 330.0
    """How long a command waits for a missing seq_id: longer than the SDK's retries."""
    session_timeout_s: float = 3600.0
    """A session is over when nothing was heard of its client for this long, no heartbeat (every 10 s) either. Weights
    that it saved without a name are released after a sixth of it, its sampling requests abandoned after a minute."""
    keep_finished_s: float = 6 * 3600.0
    """Finished futures stay fetchable for this long."""
    keep_fetched_s: float = 600.0
    """Those that were fetched, for this long from then: an answer that was lost on its way is fetched again."""
    keep_ended_s: float = 7 * 24 * 3600.0
    """What is remembered of a session that is over, and of its models and samplers, is forgotten after this long.
    Checkpoints stay: they say themselves whose they are."""
    keep_silent_s: float = 7 * 24 * 3600.0
    """What the models of a session that ended by silence have learnt is kept in a checkpoint each, for so long. 0: it
    is not."""
    keep_versions: int = 8
    """Of the weights that a model saves for sampling without a name the newest stay, so many."""
    keep_sampled_s: float = 900.0
    """So do those that were sampled in this time. Others are released, and what is asked of them fails."""
    stall_timeout_s: float = 2 * 3600.0
    """A base that has had work for this long and ended none of it is abandoned: its requests fail."""
    snapshot_work_s: float = 30.0
    """A model is snapshotted, for its recovery after a death, when what it did since the last snapshot took this long:
    about so long, and twice as long at most, it is done again."""
    snapshot_commands: int = 1000
    """Or when so many commands would be repeated."""
    snapshot_bytes: int = 256 << 20
    """Or when their bodies have so many bytes."""
    snapshot_age_s: float = 600.0
    """Or when the oldest of them is so old."""
    sampler_kind: SamplerKind = "snapshot"
    """What sampling clients without files are when they do not say (the SDK has said it since 0.38): a snapshot, or
    inflight, which follows the newest weights."""
    max_samples_in_flight: int = 4096
    """Sampling requests of one base that were accepted and have not ended. Beyond it, and the next two, an owner with
    less than an even share is let in, others get HTTP 429 (``sampling_admission``)."""
    max_sequences_in_flight: int = 65536
    """Likewise the samples of all of them."""
    max_sampling_bytes: int = 1 << 30
    """Likewise their prompts."""
    share_prefixes: bool = False
    """Whether what prompts to the base model begin with is computed once for all owners. Whoever asks can then learn
    what others have asked, page by page."""
    max_training_bytes: int = 2 << 30
    """Memory that one base's training requests may take from the time they are let in until they end. How it is shared,
    ``training_admission`` says; what goes beyond gets HTTP 429."""
    sweep_interval_s: float = 1.0
    """How often it is looked whether a gap in the seq_ids, a session or a base is over its time."""
    prune_interval_s: float = 60.0
    """How often finished futures and checkpoints are looked at whose time is over."""


MAX_METADATA_BYTES = 16 << 10
"""Of a session's or a model's ``user_metadata``, and of a session's tags together."""
MAX_LABEL_LENGTH = 512
"""Of a name, a reason or a key that a client gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSettings:
    """What one owner may have at a time. Against mistakes and malice: nobody who works meets these. None where it is
    said of the disk: ``of_disk``."""

    sessions: int = 1000
    """Open ones; and so many that are over are remembered."""
    samplers: int = 100_000
    """Sampling sessions in open sessions, those of weights saved without a name not counted."""
    models: int = 1000
    """Those that are live, on all bases."""
    model_bytes: int | None = None
    """Weights, moments and gradients of live models, wherever they lie. None: a quarter of the disk."""
    version_bytes: int | None = None
    """Weights saved for sampling without a name, wherever they lie. None: an eighth of the disk."""
    checkpoints: int = 100_000
    checkpoint_bytes: int | None = None
    """None: half of the disk."""
    journal_bytes: int | None = None
    """Bodies of commands that would be repeated after a death: since each live model's last snapshot, which waits for
    an optimiser step. None: an eighth of the disk."""
    result_bytes: int = 4 << 30
    """Results that have not been fetched. Beyond it the oldest are forgotten."""

    def of_disk(self, num_bytes: int) -> QuotaSettings:
        """With what is not said filled in, for a disk of this size."""
        return replace(
            self,
            model_bytes=num_bytes // 4 if self.model_bytes is None else self.model_bytes,
            version_bytes=num_bytes // 8 if self.version_bytes is None else self.version_bytes,
            journal_bytes=num_bytes // 8 if self.journal_bytes is None else self.journal_bytes,
            checkpoint_bytes=num_bytes // 2 if self.checkpoint_bytes is None else self.checkpoint_bytes,
        )
