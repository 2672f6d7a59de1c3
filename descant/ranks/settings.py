"""What a replica is told when it starts. Plain data: it is read in the server and obeyed in the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from descant.dist.referee import Invitation


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the hardware computes in it, float32 elsewhere."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    replicas: int | None = None
    """Ranks that each hold the whole base model and some of the adapters; None: one a visible GPU, one on a CPU."""
    ranks_per_replica: int = 1
    """Ranks that execute every turn of a replica together, each on a GPU of its own: they share the datums of a pass,
    and the sequences being sampled. More than 1 for a tenant whose batches are large, or a base that must be sharded;
    for many tenants more replicas are faster."""
    compile: bool | None = None
    """Whether layers go through ``torch.compile``. None: on a CUDA device in half precision, mixtures of experts and
    sharded bases aside. False starts half a minute sooner, and is slower from then on."""
    shard_base: bool | None = None
    """Whether the base's layers are spread over the ranks of a replica and gathered one by one as they are computed;
    None: where the base alone takes more than 4/5 of a GPU."""
    rebalance_interval_s: float = 30.0
    """How often it is looked whether adapters should move from a busy replica to an idle one."""
    num_threads: int | None = None
    """Threads of torch's own, in each replica; None: torch's choice (all cores), divided among replicas on a CPU."""
    microbatch_tokens: int | None = None
    """Tokens of one training pass. Larger passes are more efficient; a sampled token waits for one at most. None: 2048
    on a CPU, and on a CUDA device up to 16384, as many as fit its memory with nothing computed twice."""
    steps_per_microbatch: float = 4.0
    """Decode steps between two microbatches while both wait. At least 1, or tokens wait for several microbatches."""
    kv_bytes: int | None = None
    """Memory for the keys and values of sequences being sampled. None: on a CUDA device 2/5 of what the model
    and ``max_adapter_bytes`` leave of it (training's activations need the rest), 1 GiB elsewhere."""
    max_running: int | None = None
    """Sequences decoding at once. None: 64 on a CPU, 256 on a CUDA device (fewer where its pages are few)."""
    max_waiting: int = 2048
    """Sample requests queued; one more is told to try again."""
    step_tokens: int | None = None
    """Prompt tokens prefilled in one step at most. None: 512 on a CPU, 4096 on a CUDA device."""
    drafter: Literal["none", "ngram"] = "none"
    """Guesses what sequences will draw, so that a step may draw several tokens; which tokens are drawn does not change.
    ngram: what came after the same few tokens before. A gain for few sequences of repetitive text."""
    deterministic: bool = False
    """Sampling: a request gives the same bits whatever else is in the batch. In bf16 on a CPU it does so anyway."""
    draft_tokens: int = 4
    """Tokens that a drafter guesses for a sequence in one step, at most."""
    max_adapter_bytes: int | None = None
    """What adapters being trained take on the device: weights, moments, gradient, working copy. Those that no request
    is about move to host memory, then to disk, and come back by themselves. None: half of the memory that is free when
    the model is loaded (on CPU: half of the machine's)."""
    max_version_bytes: int = 2 << 30
    """Published versions kept as rows; colder ones move to host memory, then to disk."""
    max_host_bytes: int = 4 << 30
    """Host memory for both; beyond it the coldest go to disk."""
    start_timeout_s: float = 900.0
    """From start to ready; the longest part is reading (once: converting) the model."""
    turn_timeout_s: float = 900.0
    """A turn that takes longer is a stall: the rank is ended and its work fails."""


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
    settings: RankSettings
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one rank of a replica is told first. ``invitation`` None: it is alone. ``host``: the machine of rank 0, as
    the others reach it."""

    spec: RankSpec
    rank: int = 0
    invitation: Invitation | None = None
    host: str = "127.0.0.1"
