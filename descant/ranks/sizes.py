"""How large things are on this machine's memory: whether a base is sharded, pages, sequences and tokens of a pass."""

from __future__ import annotations

import hashlib
import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from descant.errors import UserError
from descant.model.base import BaseModel
from descant.model.forward_batch import PAGE_TOKENS
from descant.model.load import ModelSource, base_bytes
from descant.ranks.peers import Peers
from descant.ranks.settings import OffloadSettings, ParallelSettings, RankSettings, SampleSettings, TrainSettings

log = logging.getLogger(__name__)

SHARD_ABOVE = 0.8
"""Of a device's memory: a base that takes more leaves no room for caches and activations."""


def is_sharded(parallel: ParallelSettings, rank: RankSettings, source: ModelSource, peers: Peers) -> bool:
    """As the setting says; without one, whether the base fits any rank's device with room for what it works on. Raises
    ``UserError`` when it is to be sharded over one rank."""
    if parallel.fsdp is not None:
        if parallel.fsdp and peers.num_ranks == 1:
            raise UserError("parallel.fsdp is true and parallel.data_parallel_size is 1, expected several ranks")
        return parallel.fsdp
    if peers.num_ranks == 1:
        return False
    fits = True
    if rank.device != "cpu" and torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        fits = base_bytes(source) <= SHARD_ABOVE * total
    return peers.all_reduce_min("whether the base fits", int(fits)) == 0


LOAD_OVERHEAD = 1.3
"""Of the base's files: what one that is loaded and checked takes of the host's memory."""


def max_concurrent_loads(source: ModelSource) -> int:
    """How many ranks of this machine may have the whole base in the host's memory; one at least."""
    return max(1, int(min(free_host_bytes() / (LOAD_OVERHEAD * max(1, base_bytes(source))), 1 << 16)))


def free_host_bytes() -> float:
    """What is free of the host's memory, and of what this process's group may have of it; infinite where Linux does not
    say."""
    free = math.inf
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        free = min(free, int((group / "memory.max").read_text()) - used)  # "max": no limit
    return free


def spill_directory(parent: Path, name: str) -> Path:
    """A base's own: what a bank finds in its directory it takes for an earlier life's and removes."""
    return parent / hashlib.sha256(name.encode()).hexdigest()[:16]


MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}
MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
RUNNING_TOKENS = 512
"""Room in the pages for each sequence that decodes on a CUDA device, at least: with less, they would push one another
out more than they decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSizes:
    """``num_pages``: what ``kv_cache_bytes`` pays for, no more than all running sequences could fill. ``max_num_seqs``:
    sequences decoding at once. ``max_num_batched_tokens``: prompt tokens of a step."""

    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int


def sampling_sizes(model: BaseModel, settings: SampleSettings, peers: Peers) -> SamplingSizes:
    """Pages and sequences are alike on all ranks, so that one plan serves any of them."""
    kind = "cuda" if model.device.type == "cuda" else "cpu"
    paid = kv_cache_bytes(model, settings) // (model.kv_bytes_per_token() * PAGE_TOKENS)
    max_num_seqs = settings.max_num_seqs
    if max_num_seqs is None:
        max_num_seqs = MAX_NUM_SEQS[kind]
        if kind == "cuda":
            max_num_seqs = max(1, min(max_num_seqs, paid * PAGE_TOKENS // RUNNING_TOKENS))
    longest = -(-model.facts.max_context_length // PAGE_TOKENS)
    max_num_batched_tokens = settings.max_num_batched_tokens
    if max_num_batched_tokens is None:
        max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS[kind]
    num_pages = max(2, min(paid, longest * max_num_seqs))
    return SamplingSizes(
        num_pages=peers.all_reduce_min("pages", num_pages),
        max_num_seqs=peers.all_reduce_min("running sequences", max_num_seqs),
        max_num_batched_tokens=max_num_batched_tokens,
    )


PASS_TOKENS = (2048, 4096, 8192, 16384)
"""Larger ones gain little, and a sampled token waits for one."""

CPU_PASS_TOKENS = 1024
"""Milliseconds of processor time a token, SmolLM2-135M in bf16: 2.86 with one thread, 3.47 with two. With passes of
twice as many tokens 2.85 and 3.31, of half as many 3.01 and 3.93, of 256 3.30 and 4.95."""


VERSION_SHARE = 4
"""One part in so many of what a CUDA device has free beside the model and its adapters, at most, for published
versions: keys and values, and activations, need the rest."""


def version_bytes(model: BaseModel, settings: OffloadSettings) -> int:
    """What the setting says, or what there is room for."""
    if model.device.type != "cuda":
        return settings.version_bytes
    room = max(0, int(model.free_bytes()) - model.bank.adapter_bytes) // VERSION_SHARE
    if room < settings.version_bytes:
        log.warning(
            "offload.version_bytes is %d MiB, and the device has room for %d MiB of published versions: beyond these "
            "they go to host memory",
            settings.version_bytes >> 20,
            room >> 20,
        )
    return min(settings.version_bytes, room)


def microbatch_tokens(model: BaseModel, settings: TrainSettings) -> int:
    """Once the pages are taken: what adapters and versions may take beside them is not there for activations."""
    if settings.microbatch_tokens is not None:
        return settings.microbatch_tokens
    if model.device.type != "cuda":
        return CPU_PASS_TOKENS
    if model.activation_memory is None:
        return PASS_TOKENS[0]
    free = model.free_bytes() - model.bank.adapter_bytes - model.bank.version_bytes
    return model.activation_memory.tokens_that_fit(free, PASS_TOKENS)


def kv_cache_bytes(model: BaseModel, settings: SampleSettings) -> int:
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes
    if model.device.type != "cuda":
        return 1 << 30
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(0, free - model.bank.adapter_bytes - model.bank.version_bytes) * 2 // 5
