"""What one forward pass computes: many tenants' tokens, their adapters, and where keys and values live.

A ``ForwardBatch`` is a flat stream of T tokens: sequences one after another, sorted by adapter so that every adapter's
tokens are one run. It is built once per pass on the host; layers only read it.

Sequences that begin alike may share those tokens: they are in the stream once, in the first sequence that has them, and
the others name it as their prefix. Only attention knows: everything else is computed token by token.

Legend: T tokens of the pass, B sequences, P pages of the KV pool, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from descant.adapters.slots import GradientSlot, RowRef

Held = TypeVar("Held")

PAGE_TOKENS = 64
"""Tokens in a KV page, and keys in one block of the attention: one number, so that a page is a block."""

MIN_ROWS = 8
"""Products of fewer rows are filled up to this many: few rows take other kernels (a vector product, a sum in another
order), whose last bits differ."""


def filled_up(x: torch.Tensor) -> torch.Tensor:
    """[..., T, I] with at least ``MIN_ROWS`` rows, of zeros behind those there are."""
    missing = MIN_ROWS - x.shape[-2]
    return x if missing <= 0 else F.pad(x, (0, 0, 0, missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens ``start:end`` compute with the compute copy ``row``. ``gradient`` None: forward only.

    ``gradient`` is a slot of the gradient slab of the same rank bucket: the adapter's own or a scratch row.
    Two requests of one adapter in one pass are two segments with one ``row`` and two gradients.
    Tokens outside every segment use the base model alone.
    """

    start: int
    end: int
    row: RowRef
    gradient: GradientSlot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPool:
    """``keys[layer]`` and ``values[layer]``: [P, Hkv, PAGE_TOKENS, D] in the base's dtype. ``joined[layer]``
    [P, 2, Hkv, PAGE_TOKENS, D]: what both are views of, where they are (on CPU, when their sizes are the same)."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    joined: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """The sequences' pages, as a block table.

    ``page_table`` int64 [B, max pages of the pass], unused cells 0; ``context_lens``: tokens of each sequence that are
    in its pages already. The attention function writes this pass's keys and values behind them, then attends over all.
    """

    pool: KVPool
    page_table: torch.Tensor
    context_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A sequence's first ``length`` tokens are those of sequence ``parent``, an earlier one (with a prefix itself,
    maybe): it reads that one's keys and values there, and has only what follows in the stream."""

    parent: int
    length: int


class Handles(Generic[Held]):
    """Numbers for what a compiled layer must not see.

    A graph is made once and serves every pass: what differs from pass to pass (lengths, adapters, rows) would make
    another. So it travels as a number in an int64 tensor [] on the host, which the graph's operators look up here.
    Objects are held weakly: the caller that runs the pass keeps them until its backward is done.
    """

    def __init__(self) -> None:
        self._objects: WeakValueDictionary[int, Held] = WeakValueDictionary()
        self._numbers = count()

    def take(self, held: Held) -> torch.Tensor:
        number = next(self._numbers)
        self._objects[number] = held
        return torch.tensor(number)

    def __getitem__(self, handle: torch.Tensor) -> Held:
        return self._objects[int(handle)]


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class ForwardBatch:
    """``seq_lens`` (query tokens of each sequence, in stream order) sum to T. ``segments`` are disjoint and rising.

    ``kv`` None: keys are the pass's own tokens (training, scoring), causal within each sequence and its prefix.
    ``prefixes``: one for each sequence, or () when nothing is shared; never together with ``kv``.
    ``cache`` belongs to the attention function: index tensors it derives once per pass.
    """

    seq_lens: tuple[int, ...]
    prefixes: tuple[Prefix | None, ...] = ()
    segments: tuple[Segment, ...] = ()
    kv: PagedKV | None = None
    cache: dict[str, object] = field(default_factory=dict)
    handle: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.handle = FORWARD_BATCHES.take(self)

    @property
    def num_tokens(self) -> int:
        return sum(self.seq_lens)


def context_lens(seq_lens: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[int]:
    """How many tokens of its prefix are before each sequence's own. ``prefixes`` () where nothing is shared."""
    return [0 if prefix is None else prefix.length for prefix in prefixes] or [0] * len(seq_lens)


def stream_rows(seq_lens: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[NDArray[np.int64]]:
    """For each sequence, prefix included, the tokens of the stream that it is made of."""
    rows: list[NDArray[np.int64]] = []
    start = 0
    for length, prefix in zip(seq_lens, prefixes, strict=True):
        own = np.arange(start, start + length)
        rows.append(own if prefix is None else np.concatenate([rows[prefix.parent][: prefix.length], own]))
        start += length
    return rows


FORWARD_BATCHES: Handles[ForwardBatch] = Handles()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without waiting for the device (a copy from memory that is not pinned waits for all work before it)."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
