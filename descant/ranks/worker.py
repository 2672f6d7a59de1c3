"""A rank's worker: the base model and the roles that work on it. Executes operations, decides nothing.

Where a replica has several ranks, each executes the same operations. Everything runs on the turn loop's thread, except
``read`` and what goes on behind the turns (files, no computation).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import torch

from descant.ckpt.files import CheckpointTensors, read_checkpoint
from descant.ckpt.peft import ExportBase
from descant.ckpt.snapshot import Snapshots
from descant.ckpt.writer import CheckpointWriter
from descant.errors import ServerError
from descant.model.base import BaseModel
from descant.model.forward_batch import PAGE_TOKENS
from descant.model.load import load_model, resolve_model
from descant.ranks.executor import AdapterMemory
from descant.ranks.heap_trimmer import INTERVAL_S, HeapTrimmer
from descant.ranks.ops import Idle, Operation, ReplicaInfo, Stats, Stop
from descant.ranks.peers import Peers
from descant.ranks.roles import RankRole
from descant.ranks.roles.sample import SampleRole
from descant.ranks.roles.train import TrainRole
from descant.ranks.settings import LossSettings, RankSpec, ReplicaSettings
from descant.ranks.sizes import (
    is_sharded,
    max_concurrent_loads,
    microbatch_tokens,
    sampling_sizes,
    spill_directory,
    version_bytes,
)
from descant.sample.scheduler import Scheduler
from descant.types import ROLES, CheckpointSource, EngineCapabilities, Role

log = logging.getLogger(__name__)

R = TypeVar("R")


def build(
    spec: RankSpec,
    phase: Callable[[str], None],
    peers: Peers,
    *,
    load: Callable[..., BaseModel] = load_model,
    sample: type[SampleRole] = SampleRole,
) -> Worker:
    """Loads the base model; ``phase`` is called with each before it begins. Raises ``UserError`` for a model that
    cannot be served. ``load``: as ``load_model``. ``sample``: what the role is made with."""
    rank, offload = spec.settings.rank, spec.settings.offload
    spill_dir = None if spec.spill_dir is None else Path(spec.spill_dir)
    if spill_dir is not None and peers.num_ranks > 1:
        spill_dir /= f"rank-{peers.rank}"
    if rank.num_threads is not None:
        torch.set_num_threads(rank.num_threads)
    phase(f"finding the model {spec.model}")
    source = resolve_model(spec.model, cache_dir=None if spec.cache_dir is None else Path(spec.cache_dir))
    phase(f"loading {source.name} and checking it")
    shard = is_sharded(spec.settings.parallel, rank, source, peers)
    # A base that is sharded passes through the host's memory whole, once for each rank.
    at_once = (
        peers.all_reduce_min("ranks that load at once", max_concurrent_loads(source)) if shard else peers.num_ranks
    )
    with peers.staggered("loading", at_once=at_once):
        model = load(
            source,
            device=None if rank.device == "auto" else torch.device(rank.device),
            dtype={"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[rank.dtype],
            spill_dir=None if spill_dir is None else spill_directory(spill_dir, source.name),
            host_bytes=offload.host_bytes,
            compile=rank.compile,
            shard=peers.shard if shard else None,
        )
    phase("making the caches, capturing decode steps" if model.device.type == "cuda" else "making the caches")
    writer = CheckpointWriter(model.device)
    if "train" in spec.roles and peers.rank == 0:  # which alone saves
        phase("starting the process that writes checkpoints")
        writer.start(spill_dir)
    return Worker(model, spec.settings, spec.losses, peers, roles=spec.roles, sample=sample, writer=writer)


class Worker:
    """``Executor`` on a real model, for a rank that is alone; of several, rank 0's is an ``SpmdExecutor`` over it."""

    def __init__(
        self,
        model: BaseModel,
        settings: ReplicaSettings,
        losses: LossSettings | None = None,
        peers: Peers | None = None,
        *,
        roles: Collection[Role] = ROLES,
        train: type[TrainRole] = TrainRole,
        sample: type[SampleRole] = SampleRole,
        writer: CheckpointWriter | None = None,
    ):
        """``train``, ``sample``: what the roles are made with. ``writer``: of checkpoints; None: one whose process is
        started at the first save."""
        peers = peers or Peers()
        self.model = model
        self.memory: AdapterMemory = model.bank
        self.writer = CheckpointWriter(model.device) if writer is None else writer
        base = ExportBase(name=model.public_name, has_experts=model.has_experts)
        snapshots = Snapshots(model.bank, base=base, writer=self.writer)
        self.train: TrainRole | None = None
        if "train" in roles:
            self.train = train(model, snapshots, peers, losses=losses)
        if settings.offload.adapter_bytes is not None:
            model.bank.adapter_bytes = settings.offload.adapter_bytes
        # Alike on all ranks, so that they move the same adapters.
        model.bank.adapter_bytes = peers.all_reduce_min("adapter bytes", model.bank.adapter_bytes)
        model.bank.version_bytes = peers.all_reduce_min("version bytes", version_bytes(model, settings.offload))
        self.sample: SampleRole | None = None
        if "sample" in roles:
            sizes = sampling_sizes(model, settings.sample, peers)
            self.sample = sample(model, snapshots, peers, settings=settings, sizes=sizes)
        if self.train is not None:
            self.train.warm_up()
        pass_tokens = peers.all_reduce_min("tokens of a pass", microbatch_tokens(model, settings.train))
        # On a GPU passes take nothing of the host's memory that would count.
        self.heap_trimmer = HeapTrimmer() if model.device.type == "cpu" else None
        self.info = ReplicaInfo(
            facts=model.facts,
            capabilities=EngineCapabilities() if self.sample is None else self.sample.capabilities,
            roles=frozenset(roles),
            num_ranks=peers.num_ranks,
            overlaps=self.train is not None and self.train.learner.runner.asynchronous and not model.sharded,
            microbatch_tokens=pass_tokens,
            piece_tokens=None if model.device.type != "cpu" else pass_tokens if model.packable else 1,
            idle_s=None if self.heap_trimmer is None else INTERVAL_S[0],
        )
        self._handlers: dict[type[Operation[Any]], Callable[[Any], Any]] = {
            Idle: lambda op: peers.check(),
            Stats: lambda op: {**model.bank.stats(), **snapshots.stats(), **self.writer.stats()},
            Stop: lambda op: self.writer.close(),
        }
        made: tuple[RankRole | None, ...] = (self.train, self.sample)
        for role in made:
            if role is not None:
                self._handlers |= role.handlers()
        if self.train is not None:
            room = model.bank.room_for(32)
            log.info("training: room for %d adapters of rank 32 at once, passes of %d tokens", room, pass_tokens)
        if self.sample is not None:
            num_tokens = sizes.num_pages * PAGE_TOKENS
            log.info(
                "sampling: room for the keys and values of %d tokens, %d sequences", num_tokens, sizes.max_num_seqs
            )

    def execute(self, op: Operation[R]) -> R:
        handler = self._handlers.get(type(op))
        if handler is None:
            roles = " and ".join(sorted(self.info.roles))
            raise ServerError(f"{type(op).__name__} came to a rank whose part is to {roles}")
        result: R = handler(op)
        if self.heap_trimmer is not None:
            self.heap_trimmer.maybe_trim()
        return result

    def make_scheduler(self) -> Scheduler:
        assert self.sample is not None
        return self.sample.make_scheduler()

    def read(self, source: CheckpointSource) -> CheckpointTensors:
        return read_checkpoint(source)
