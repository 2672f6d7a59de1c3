"""What a replica is started with. Plain data: read in the server, obeyed in the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from descant.distributed.coordinator.process import Rendezvous
from descant.types import ROLES, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """A rank's process: what it computes on, and how long it may take."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the hardware computes in it, float32 elsewhere."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    num_threads: int | None = None
    """Torch's intra-op threads of a rank; None: torch's choice (all cores), divided among ranks on a CPU."""
    compile: bool | None = None
    """Whether layers go through ``torch.compile``. None: on a CUDA device in half precision, mixtures of experts and
    sharded bases aside. False starts half a minute sooner, and is slower from then on."""
    start_timeout_s: float = 900.0
    """From start to ready; the longest part is reading (once: converting) the model."""
    turn_timeout_s: float = 900.0
    """A turn that takes longer is a stall: the rank is ended and its work fails."""
    stopped_grace_s: float = 10.0
    """How long a rank may be stopped by a signal (SIGSTOP, Ctrl-Z) before it is ended. Without an open request there is
    no limit, but for ranks that have a replica in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """How many replicas a base has, and of how many ranks."""

    replicas: int | None = None
    """Whole copies of the base, each with some of the adapters, that train and sample them; None: one a visible GPU,
    one on a CPU."""
    train_replicas: int | None = None
    """Instead of ``replicas``: so many that only train, beside ``sample_replicas`` that only sample. Neither waits for
    the other's turns; new weights reach the samplers through files. Set both, or neither."""
    sample_replicas: int | None = None
    """Replicas that only sample, beside ``train_replicas``."""
    data_parallel_size: int = 1
    """Ranks of a replica, each on a GPU of its own: they share the datums of a pass and the sequences being sampled.
    More than 1 for a tenant whose batches are large, or a base that must be sharded; for many tenants more replicas
    are faster."""
    fsdp: bool | None = None
    """Whether the base's layers are sharded over the ranks of a replica (FSDP) and gathered one by one as they are
    computed; None: where the base alone takes more than 4/5 of a GPU."""
    rebalance_interval_s: float = 30.0
    """Interval at which adapters may move from a busy replica to an idle one."""

    @property
    def num_replicas(self) -> int | None:
        """Of a base, of whatever roles; None: as many as there is room for."""
        if self.train_replicas is None or self.sample_replicas is None:
            return self.replicas
        return self.train_replicas + self.sample_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Training turns."""

    microbatch_tokens: int | None = None
    """Tokens of one training turn. Larger ones are more efficient; a sampled token waits for one at most. None: 2048 on
    a CPU, and on a CUDA device up to 16384, as many as fit its memory without activation checkpointing."""
    max_pass_ms: float = 100.0
    """A training turn while sequences are sampled: no more tokens than were computed in that time before, but at least
    one datum, on a CPU what is one pass. Shorter ones are less efficient on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """The sampler's limits, and its share of the device beside training."""

    max_num_seqs: int | None = None
    """Sequences decoding at once. None: 64 on a CPU, 256 on a CUDA device (fewer where its pages are few)."""
    max_num_batched_tokens: int | None = None
    """Prompt tokens prefilled in one step, at most. None: 512 on a CPU, 4096 on a CUDA device."""
    max_queued_requests: int = 2048
    """Sample requests queued on a rank; the next one is ``Overloaded``, unless its owner has less than an even share of
    them."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache. None: on a CUDA device 2/5 of what the model, ``offload.adapter_bytes`` and
    ``offload.version_bytes`` leave of it (activations need the rest), 1 GiB elsewhere."""
    batch_invariant: bool = False
    """A request gives the same bits whatever else is in the batch. In bf16 on a CPU it does so anyway."""
    time_share: float = 1.0
    """Seconds of sampling for each second of training while both wait; fewer, in proportion, where more models wait to
    be trained than are sampled. At least 1, or tokens wait for several training turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings:
    """Speculative decoding: several tokens of a sequence a step; which tokens are sampled does not change."""

    method: Literal["none", "ngram"] = "none"
    """ngram: prompt lookup, what came after the same few tokens before. A gain for few sequences of repetitive text."""
    num_tokens: int = 4
    """Draft tokens of a sequence in one step, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """Adapter weights on the device; the least recently used beyond that go to host memory, then to disk, and are
    loaded again when they are asked for."""

    adapter_bytes: int | None = None
    """Device memory of training adapters: weights, moments, gradient, compute copy. None: half of the memory that is
    free when the model is loaded (on CPU: half of the machine's)."""
    version_bytes: int = 2 << 30
    """Device memory of published versions; on a CUDA device no more than a quarter of what the model and
    ``adapter_bytes`` leave of it."""
    host_bytes: int = 4 << 30
    """Host memory for what is offloaded of both kinds; beyond it the coldest go to disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """All that a replica is started with."""

    rank: RankSettings = field(default_factory=RankSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    speculative: SpeculativeSettings = field(default_factory=SpeculativeSettings)
    offload: OffloadSettings = field(default_factory=OffloadSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Ranks on the machines of a Ray cluster; needs the extra ``descant[ray]``."""

    address: str | None = None
    """The cluster's head, as host:port, or "auto" for the one that this machine belongs to. None: no Ray."""
    placement_timeout_s: float = 60.0
    """How long to wait for the cluster: to be reached, to have room for a rank, to start what starts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What a loss without a public definition is computed as, if the operator says so. None: it is refused."""

    stable_reinforce: Literal["importance_sampling", "ppo", "cispo", "dro"] | None = None
    """Requests for it are checked and computed as requests for this one."""

    def computed_as(self) -> Mapping[str, str]:
        """The loss asked for → the loss that is computed."""
        return {} if self.stable_reinforce is None else {"stable_reinforce": self.stable_reinforce}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One replica to start: which model, with which settings and losses. ``build``: ``module:function`` that makes a
    rank's ``Worker`` of this spec, a callable that is told each phase of the start, and the rank's ``Peers``."""

    model: str
    settings: ReplicaSettings
    losses: LossSettings = field(default_factory=LossSettings)
    cache_dir: str | None = None
    spill_dir: str | None = None
    label: str | None = None
    """What messages call the replica; None: the model."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set in the ranks' processes, over the server's environment."""
    gpus: tuple[str, ...] = ()
    """What each rank's GPU is called in ``CUDA_VISIBLE_DEVICES``; empty: the ranks see what the server sees."""
    build: str = "descant.ranks.worker:build"
    roles: frozenset[Role] = ROLES
    """What the replica is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """A rank's spec and its place among its replica's ranks, the first message to it. ``rendezvous`` None: it is alone.
    ``host``: the machine of rank 0, as the others reach it."""

    spec: RankSpec
    rank: int = 0
    rendezvous: Rendezvous | None = None
    host: str = "127.0.0.1"
