"""Which rank runs where, which adapter lives on which replica, and where a prompt goes. Pure: no clock, no process, no
chance.

Replicas of one base are alike and know nothing of one another, so placing is a matter of load alone. A replica's load
is its share of all adapters' memory plus its share of the recent tokens. An adapter stays where it was placed; it is
moved only while nothing of it is under way, and only when that evens the load out noticeably.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from descant.errors import ServerError, UserError
from descant.ranks.settings import RankSpec
from descant.types import LoraConfig

QUIET_TOKENS = 10_000.0
"""Fewer recent tokens than this on all replicas together, and traffic counts for little: nothing is hot."""

NOTICEABLE = 0.25
"""A move must lower the difference of two replicas' loads by this fraction of the mean load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of one adapter, or of all on a replica.

    ``size``: memory, in any unit that is proportional to bytes and the same for all adapters of a base.
    ``recent_tokens``: tokens trained and sampled lately, older ones counting less.
    """

    size: float = 0.0
    recent_tokens: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(size=self.size + other.size, recent_tokens=self.recent_tokens + other.recent_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """``movable``: it exists, no command of it is open, and it has no gradient, whole or lost."""

    model_id: str
    replica: int
    load: Load
    movable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    model_id: str
    source: int
    target: int


def size_of(lora: LoraConfig) -> float:
    """An adapter's memory relative to others on the same base: rows are as long as their rank is large."""
    chosen = lora.train_attn + lora.train_mlp + lora.train_unembed
    return float(max(1, lora.rank) * max(1, chosen))


def place(loads: Mapping[int, Load]) -> int:
    """The replica for a new adapter: the least loaded. ``loads``: what each live replica carries. Raises
    ``ServerError`` if there is none."""
    if not loads:
        raise ServerError("no replica is running")
    return _extremes(_weights(loads))[0]


def rebalance(models: Sequence[PlacedModel], background: Mapping[int, Load]) -> tuple[Move, ...]:
    """Moves that even the load out, in the order to make them; none when it is even enough.

    ``background``: every live replica, with the load that belongs to no adapter (sampling the base). Models on other
    replicas are lost, not moved. No model moves twice.
    """
    on_live = [model for model in models if model.replica in background]
    total = _total([*background.values(), *(model.load for model in on_live)])
    weights = {replica: _share(load, total) for replica, load in background.items()}
    for model in on_live:
        weights[model.replica] += _share(model.load, total)
    candidates = {model.model_id: model for model in on_live if model.movable}
    moves: list[Move] = []
    while len(weights) > 1:
        idlest, busiest = _extremes(weights)
        gap, mean = weights[busiest] - weights[idlest], sum(weights.values()) / len(weights)
        shares = {m.model_id: _share(m.load, total) for m in candidates.values() if m.replica == busiest}
        if not shares:
            break
        best = min(shares, key=lambda model_id: (abs(gap - 2 * shares[model_id]), model_id))
        if gap - abs(gap - 2 * shares[best]) < max(NOTICEABLE * mean, 1e-9):
            break
        weights[busiest] -= shares[best]
        weights[idlest] += shares[best]
        del candidates[best]
        moves.append(Move(model_id=best, source=busiest, target=idlest))
    return tuple(moves)


def copy_target(in_flight: Mapping[int, int], holders: Collection[int], *, full: int) -> int | None:
    """The replica that a hot version should be copied to, or None.

    ``in_flight``: sequences being sampled on each live replica. ``holders``: where the version is already. It is hot
    when each of those has at least ``full``, and a replica with less than half of that is idle enough to help.
    """
    here = [in_flight[replica] for replica in holders if replica in in_flight]
    others = [replica for replica in in_flight if replica not in holders]
    if not here or not others or min(here) < full:
        return None
    idlest = min(others, key=lambda replica: (in_flight[replica], replica))
    return idlest if 2 * in_flight[idlest] < full else None


TOKENS_A_SEQUENCE = 256
"""So many of a prompt's tokens cost as much to compute again as it costs to be sampled beside one sequence more: a
prompt runs at some 100k tokens a second, and of a few hundred steps of 3 ms a sequence takes less than a hundredth."""


def is_worth_it(kept_tokens: int, sequences: int, fewest: int, *, max_running: int) -> bool:
    """Whether a place that has so many sequences is right for one more, of whose prompt it keeps so much, where others
    have the ``fewest``. It may be ahead, but not so that it cannot run all of them (``max_running``)."""
    ahead = sequences - fewest
    return ahead <= min(kept_tokens // TOKENS_A_SEQUENCE, max(0, max_running - sequences))


class Prefixes:
    """On which replica the beginnings of recent prompts were computed last. Prompts are named by the keys of their
    pages, in order, each of which stands for all before it (``sample.pages``); the least recently used go first."""

    def __init__(self, most: int = 1 << 16):
        self._most = most
        self._replicas: OrderedDict[bytes, int] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """(the replica that has most of it, how many pages); (0, 0) where none has any."""
        for index in range(len(keys), 0, -1):
            replica = self._replicas.get(keys[index - 1])
            if replica is not None:
                return replica, index
        return 0, 0

    def note(self, keys: Sequence[bytes], replica: int) -> None:
        for key in keys:
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)


def _extremes(weights: Mapping[int, float]) -> tuple[int, int]:
    """(least, most) loaded; of several the lowest number."""
    return (
        min(weights, key=lambda replica: (weights[replica], replica)),
        min(weights, key=lambda replica: (-weights[replica], replica)),
    )


def _weights(loads: Mapping[int, Load]) -> dict[int, float]:
    total = _total(loads.values())
    return {replica: _share(load, total) for replica, load in loads.items()}


def _total(loads: Collection[Load]) -> Load:
    return sum(loads, Load())


def _share(load: Load, total: Load) -> float:
    of_size = load.size / total.size if total.size > 0 else 0.0
    return of_size + load.recent_tokens / max(total.recent_tokens, QUIET_TOKENS)


# --------------------------------------------------------------------------------------------------------------------
# Ranks on devices


def share_gpus(bases: Sequence[RankSpec], *, gpus: Sequence[str]) -> tuple[Sequence[str], ...]:
    """Each base's GPUs, in the order of both: as many as its replicas need where ``rank.replicas`` says how many they
    are, else an equal share, the first ones the larger. Raises ``UserError`` for more bases than that makes room for.
    """
    if len(bases) == 1 or not gpus:
        return (gpus,) * len(bases)
    num_ranks = bases[0].settings.ranks_per_replica
    most = len(gpus) // num_ranks
    replicas = [
        base.settings.replicas or most // len(bases) + (index < most % len(bases)) for index, base in enumerate(bases)
    ]
    if sum(replicas) > most or 0 in replicas:
        wanted = bases[0].settings.replicas
        raise UserError(
            f"{len(bases)} models are to be served"
            + (f" with rank.replicas {wanted} each" if wanted else "")
            + f", and there are {len(gpus)} GPUs: each replica needs "
            + ("one of its own" if num_ranks == 1 else f"{num_ranks} of its own (rank.ranks_per_replica)")
        )
    shares = [count * num_ranks for count in replicas]
    ends = list(accumulate(shares))
    return tuple(gpus[end - share : end] for end, share in zip(ends, shares))


def rank_specs(spec: RankSpec, *, gpus: Sequence[str], num_cores: int) -> tuple[RankSpec, ...]:
    """One spec a replica, of the spec of any.

    ``gpus``: what each visible GPU is called in ``CUDA_VISIBLE_DEVICES``; empty on a CPU. A replica takes
    ``settings.ranks_per_replica`` GPUs. ``settings.replicas`` None: as many as there are GPUs for, one on a CPU. On a
    CPU all ranks divide the cores. Raises ``UserError`` naming the setting.
    """
    settings = spec.settings
    on_gpus = bool(gpus) and settings.device in ("auto", "cuda")
    num_ranks = settings.ranks_per_replica
    if on_gpus and num_ranks > len(gpus):
        raise UserError(
            f"rank.ranks_per_replica is {num_ranks}, expected at most {len(gpus)}: each needs a GPU of its own"
        )
    count = settings.replicas or (len(gpus) // num_ranks if on_gpus else 1)
    if on_gpus and count * num_ranks > len(gpus):
        raise UserError(
            f"rank.replicas is {count}, expected at most {len(gpus) // num_ranks}: each needs "
            + ("a GPU of its own" if num_ranks == 1 else f"{num_ranks} GPUs of its own")
        )
    if count * num_ranks > 1 and settings.device.startswith("cuda:"):
        name, number = ("replicas", count) if count > 1 else ("ranks_per_replica", num_ranks)
        raise UserError(
            f"rank.device is {settings.device!r}, which is one GPU, and rank.{name} is {number}; "
            "set rank.device to 'cuda' for a GPU each"
        )
    if count * num_ranks > 1 and not on_gpus and settings.num_threads is None:
        settings = replace(settings, num_threads=max(1, num_cores // (count * num_ranks)))
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
        )
        for index in range(count)
    )


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

    On CPUs, where ``settings.num_threads`` does not say it, a rank has as many as let all run at once, each on one
    node. Raises ``UserError`` naming the setting.
    """
    settings = bases[0].settings
    gpus = sum(node.gpus for node in nodes) if settings.device in ("auto", "cuda") else 0
    if settings.device == "cuda" and not gpus:
        raise UserError(f"rank.device is 'cuda', and none of the {len(nodes)} nodes of the Ray cluster has a GPU")
    if not gpus:
        # Or a node with a GPU that Ray was not told of would use it.
        device = "cpu" if settings.device == "auto" else settings.device
        num_ranks = len(bases) * (settings.replicas or 1) * settings.ranks_per_replica
        num_threads = settings.num_threads or _threads_for(num_ranks, [node.cpus for node in nodes])
        settings = replace(settings, device=device, num_threads=num_threads)
    bases = [replace(base, settings=settings) for base in bases]
    shares = share_gpus(bases, gpus=("",) * gpus)
    return tuple(
        [replace(spec, gpus=()) for spec in rank_specs(base, gpus=share, num_cores=1)]
        for base, share in zip(bases, shares)
    )


def ray_resources(spec: RankSpec) -> dict[str, int]:
    """What Ray is asked for one rank, of a spec that ``ray_specs`` made."""
    if spec.settings.device in ("auto", "cuda"):
        return {"CPU": 1, "GPU": 1}
    return {"CPU": spec.settings.num_threads or 1}


def _threads_for(count: int, cpus: Sequence[int]) -> int:
    """The most CPUs that each of ``count`` ranks can have on nodes with so many; at least 1."""
    return next((t for t in range(max(cpus, default=1), 1, -1) if sum(n // t for n in cpus) >= count), 1)
