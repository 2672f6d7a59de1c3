"""Which rank runs on which device. Pure: no process is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from descant.errors import UserError
from descant.ranks.settings import ParallelSettings, RankSpec
from descant.types import Role

# --------------------------------------------------------------------------------------------------------------------
# Ranks on devices


def share_gpus(bases: Sequence[RankSpec], *, gpus: Sequence[str]) -> tuple[Sequence[str], ...]:
    """Each base's GPUs, in the order of both: as many as its replicas need where the settings say how many they
    are, else an equal share, the first ones the larger. Raises ``UserError`` for more bases than that makes room for.
    """
    if len(bases) == 1 or not gpus:
        return (gpus,) * len(bases)
    parallel = bases[0].settings.parallel
    num_ranks = parallel.data_parallel_size
    most = len(gpus) // num_ranks
    replicas = [
        base.settings.parallel.num_replicas or most // len(bases) + (index < most % len(bases))
        for index, base in enumerate(bases)
    ]
    if sum(replicas) > most or 0 in replicas:
        raise UserError(
            f"{len(bases)} models are to be served"
            + (f" with {_setting(parallel)} {parallel.num_replicas} each" if parallel.num_replicas else "")
            + f", and there are {len(gpus)} GPUs: each replica needs "
            + ("one of its own" if num_ranks == 1 else f"{num_ranks} of its own (parallel.data_parallel_size)")
        )
    shares = [count * num_ranks for count in replicas]
    ends = list(accumulate(shares))
    return tuple(gpus[end - share : end] for end, share in zip(ends, shares))


def rank_specs(spec: RankSpec, *, gpus: Sequence[str], num_cores: int) -> tuple[RankSpec, ...]:
    """One spec a replica, of the spec of any; those that only train come first.

    ``gpus``: what each visible GPU is called in ``CUDA_VISIBLE_DEVICES``; empty on a CPU. A replica takes
    ``parallel.data_parallel_size`` GPUs. ``parallel.num_replicas`` None: as many as there are GPUs for, one on a CPU.
    On a CPU all ranks divide the cores. Raises ``UserError`` naming the setting.
    """
    settings, parallel = spec.settings, spec.settings.parallel
    device, num_ranks = settings.rank.device, parallel.data_parallel_size
    on_gpus = bool(gpus) and device in ("auto", "cuda")
    if on_gpus and num_ranks > len(gpus):
        raise UserError(
            f"parallel.data_parallel_size is {num_ranks}, expected at most {len(gpus)}: each needs a GPU of its own"
        )
    count = parallel.num_replicas or (len(gpus) // num_ranks if on_gpus else 1)
    if on_gpus and count * num_ranks > len(gpus):
        raise UserError(
            f"{_setting(parallel)} is {count}, expected at most {len(gpus) // num_ranks}: each needs "
            + ("a GPU of its own" if num_ranks == 1 else f"{num_ranks} GPUs of its own")
        )
    if count * num_ranks > 1 and device.startswith("cuda:"):
        name, number = (_setting(parallel), count) if count > 1 else ("parallel.data_parallel_size", num_ranks)
        raise UserError(
            f"rank.device is {device!r}, which is one GPU, and {name} is {number}; "
            "set rank.device to 'cuda' for a GPU each"
        )
    if count * num_ranks > 1 and not on_gpus and settings.rank.num_threads is None:
        num_threads = max(1, num_cores // (count * num_ranks))
        settings = replace(settings, rank=replace(settings.rank, num_threads=num_threads))
    return tuple(
        replace(
            spec,
            settings=settings,
            label=f"replica {index} of {spec.model}" if count > 1 else None,
            gpus=tuple(gpus[index * num_ranks : (index + 1) * num_ranks]) if on_gpus else (),
            # What a rank finds in its directory it takes for its own earlier life's and removes.
            spill_dir=str(Path(spec.spill_dir) / f"replica-{index}")
            if spec.spill_dir and count > 1
            else spec.spill_dir,
            roles=_roles(parallel, index),
        )
        for index in range(count)
    )


def _roles(parallel: ParallelSettings, index: int) -> frozenset[Role]:
    if parallel.train_replicas is None or parallel.sample_replicas is None:
        return frozenset(("train", "sample"))
    return frozenset(("train",)) if index < parallel.train_replicas else frozenset(("sample",))


def _setting(parallel: ParallelSettings) -> str:
    """What says how many there are."""
    if parallel.train_replicas is None:
        return "parallel.replicas"
    return "parallel.train_replicas + parallel.sample_replicas"


# --------------------------------------------------------------------------------------------------------------------
# Ranks on the machines of a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A machine of a Ray cluster, with all that it has, free or not."""

    name: str
    cpus: int
    gpus: int


def ray_specs(bases: Sequence[RankSpec], *, nodes: Sequence[RayNode]) -> tuple[Sequence[RankSpec], ...]:
    """``rank_specs`` for each base on a cluster: where its nodes have GPUs a rank has one, and Ray says which.

    On CPUs, where ``rank.num_threads`` does not say it, a rank has as many as let all run at once, each on one
    node. Raises ``UserError`` naming the setting.
    """
    settings = bases[0].settings
    rank, parallel = settings.rank, settings.parallel
    gpus = sum(node.gpus for node in nodes) if rank.device in ("auto", "cuda") else 0
    if rank.device == "cuda" and not gpus:
        raise UserError(f"rank.device is 'cuda', and none of the {len(nodes)} nodes of the Ray cluster has a GPU")
    if not gpus:
        # Or a node with a GPU that Ray does not know would use it.
        device = "cpu" if rank.device == "auto" else rank.device
        num_ranks = len(bases) * (parallel.num_replicas or 1) * parallel.data_parallel_size
        num_threads = rank.num_threads or _threads_for(num_ranks, [node.cpus for node in nodes])
        settings = replace(settings, rank=replace(rank, device=device, num_threads=num_threads))
    bases = [replace(base, settings=settings) for base in bases]
    shares = share_gpus(bases, gpus=("",) * gpus)
    return tuple(
        [replace(spec, gpus=()) for spec in rank_specs(base, gpus=share, num_cores=1)]
        for base, share in zip(bases, shares)
    )


def ray_resources(spec: RankSpec) -> dict[str, int]:
    """What Ray is asked for one rank, of a spec that ``ray_specs`` made."""
    if spec.settings.rank.device in ("auto", "cuda"):
        return {"CPU": 1, "GPU": 1}
    return {"CPU": spec.settings.rank.num_threads or 1}


def _threads_for(count: int, cpus: Sequence[int]) -> int:
    """The most CPUs that each of ``count`` ranks can have on nodes with so many; at least 1."""
    return next((t for t in range(max(cpus, default=1), 1, -1) if sum(n // t for n in cpus) >= count), 1)
