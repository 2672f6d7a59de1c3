"""Decode steps on CUDA: one token a sequence, captured as CUDA graphs, one per number of rows and adapters' classes.

    rows → one pinned buffer → one copy → replay (layers, head, draw) → one copy back → tokens, log-probabilities

All inputs are views of one buffer on the device that never moves; a step fills the same buffer in host memory and
copies it over. Rows beyond the step's own are dummies whose keys go to a page of nobody's. Graphs share one memory
pool; they are captured when first needed and dropped when a slab of the bank has moved.

Legend: N rows, V vocabulary, W width of the page table, C tiles of adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from descant.model import decode
from descant.model.bank import RANK_CLASSES
from descant.model.base import BaseModel
from descant.model.lora import MultiLoraLinear
from descant.model.passes import PAGE_TOKENS, KVPool, RowRef
from descant.sample.chance import uniforms
from descant.sample.draw import draw_plain
from descant.sample.scheduler import SequenceStep
from descant.types import SCALE_NUMERATOR

logger = logging.getLogger(__name__)

BUCKETS = (8, 16, 32, 64, 128, 256)
"""Rows of a graph. Fewer than 8 rows cost as much as 8."""

ENOUGH_PROGRAMS = 264
"""Two for each multiprocessor of a large card: fewer (sequence, key head) pairs have their keys split."""

MAX_SPLITS = 16

MAX_PROGRAMS = 256
"""Compiled layers kept, one for each kind of step; the compiler's own limit is 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """``tokens`` int64 [N], ``logprobs`` float32 [N] on the host; ``logits_NV`` on the device until the next step."""

    tokens: np.ndarray
    logprobs: np.ndarray
    logits_NV: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """What a graph is made for. ``tiles``: (rank class, room for tiles) of each class that has rows."""

    rows: int
    tiles: tuple[tuple[int, int], ...]


@dataclass(slots=True, kw_only=True)
class _Captured:
    graph: Any
    logits_NV: torch.Tensor
    result_2N: torch.Tensor


class DecodeGraphs:
    """``step`` for at most ``max_rows`` sequences with one new token each. One thread."""

    def __init__(
        self,
        model: BaseModel,
        pool: KVPool,
        *,
        dummy_page: int,
        table_width: int,
        max_rows: int = BUCKETS[-1],
        compiled: bool = True,
    ):
        """``dummy_page``: a page of ``pool`` that no sequence gets. ``table_width``: pages of the longest sequence.
        ``compiled``: layers through ``torch.compile`` (fewer, fused kernels; some seconds at the first step of each
        kind). Off CUDA nothing is captured or compiled."""
        self._model, self._pool, self._dummy_page = model, pool, dummy_page
        self._on_cuda = model.device.type == "cuda"
        self._captures = self._on_cuda
        self._compiled = compiled and self._on_cuda
        self.max_rows = max_rows
        self._host = _Inputs(max_rows, table_width, torch.device("cpu"), pinned=self._on_cuda)
        self._device = _Inputs(max_rows, table_width, model.device)
        self._numpy = {name: x.numpy() for name, x in self._host.fields.items()}
        self._numpy["table"][:] = dummy_page
        self._pages: list[tuple[int, ...]] = [()] * max_rows
        self._result = torch.empty(2, max_rows, dtype=torch.float64, pin_memory=self._on_cuda)
        self._graphs: dict[_Key, _Captured] = {}
        self._slabs: dict[int, int] = {}
        self._memory: Any = torch.cuda.graph_pool_handle() if self._on_cuda else None
        self._layers = [m for m in model.network.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._calls: list[Any] | None = None

    # ------------------------------------------------------------------------------------------------ a step
    def step(self, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]) -> Decoded:
        """``sequences`` sorted by ``rows`` (rank class, then slot; those without an adapter anywhere)."""
        key = self._fill(sequences, rows)
        num_rows = len(sequences)
        self._device.buffer.copy_(self._host.buffer, non_blocking=True)
        captured = self._captured(key) if self._captures else None
        if captured is not None:
            captured.graph.replay()
            logits_NV, result_2N = captured.logits_NV, captured.result_2N
        else:
            self._bind(key)
            logits_NV, result_2N = self._compute(key)
        self._result[:, : key.rows].copy_(result_2N, non_blocking=True)
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()
        result = self._result.numpy()[:, :num_rows]
        return Decoded(
            tokens=result[0].astype(np.int64),
            logprobs=result[1].astype(np.float32),
            logits_NV=logits_NV[:num_rows],
        )

    def _fill(self, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]) -> _Key:
        num_rows = len(sequences)
        bucket = next(size for size in BUCKETS if size >= num_rows)
        host = self._numpy
        host["tokens"][:num_rows] = [s.tokens[0] for s in sequences]
        host["tokens"][num_rows:bucket] = 0
        host["positions"][:num_rows] = [s.context for s in sequences]
        host["positions"][num_rows:bucket] = 0
        host["tiles"][:bucket, 3] = host["positions"][:bucket]
        host["temperature"][:num_rows] = [s.temperature for s in sequences]
        host["temperature"][num_rows:bucket] = 0
        seeds = np.array([s.seed for s in sequences], np.uint64)
        host["uniform"][:num_rows] = uniforms(seeds, np.array([s.draw for s in sequences], np.uint64))
        table, known = host["table"], self._pages
        for index, sequence in enumerate(sequences):
            if known[index] != sequence.pages:
                table[index, : len(sequence.pages)] = sequence.pages
                known[index] = sequence.pages
        for index in range(num_rows, bucket):
            if known[index] != ():
                table[index, 0] = self._dummy_page
                known[index] = ()
        return _Key(rows=bucket, tiles=self._fill_adapters(bucket, rows))

    def _fill_adapters(self, bucket: int, rows: Sequence[RowRef | None]) -> tuple[tuple[int, int], ...]:
        tiles: dict[int, list[tuple[int, int, int, int]]] = {}
        start = 0
        while start < len(rows):
            row, end = rows[start], start + 1
            while end < len(rows) and rows[end] == row and end - start < decode.TILE_ROWS:
                end += 1
            if row is not None:
                scale = SCALE_NUMERATOR / self._model.bank.lora(row).rank
                bits = int(np.float32(scale).view(np.int32))
                tiles.setdefault(row.rank_class, []).append((start, end, row.slot, bits))
            start = end
        sizes = []
        for rank_class in sorted(tiles):
            found = tiles[rank_class]
            room = next(room for room in (bucket // 8, bucket // 2, bucket) if room >= len(found))
            field = self._numpy[f"adapters{rank_class}"]
            field[: len(found)] = found
            field[len(found) : room] = 0
            sizes.append((rank_class, room))
        return tuple(sizes)

    # ------------------------------------------------------------------------------------------------ the computation
    def _captured(self, key: _Key) -> _Captured | None:
        """None if this model cannot be captured: something in it waits for the device (experts in float32)."""
        slabs = {rank_class: self._model.bank.work_slab(rank_class).data_ptr() for rank_class, _ in key.tiles}
        if any(self._slabs.get(rank_class, at) != at for rank_class, at in slabs.items()):
            self._graphs.clear()  # a slab has grown and lies elsewhere
            self._slabs.clear()
        self._slabs.update(slabs)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(key)
            except RuntimeError as error:
                torch.cuda.synchronize()
                logger.warning("decode steps are not captured, which makes them slower: %s", error)
                self._captures = False
                return None
        return self._graphs[key]

    def _capture(self, key: _Key) -> _Captured:
        self._bind(key)
        with self._compiled_layers():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # compiles, chooses, allocates workspaces; writes the same keys as the replay will
                    self._compute(key)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                logits_NV, result_2N = self._compute(key)
        return _Captured(graph=graph, logits_NV=logits_NV, result_2N=result_2N)

    def _compiled_layers(self) -> AbstractContextManager[object]:
        """While a step is captured, decoder layers call their compiled selves; training's own way stays as it is."""
        if not self._compiled:
            return nullcontext()
        if self._calls is None:
            self._calls = [torch.compile(layer.forward, dynamic=False) for layer in self._layers]
        return _Calls(self._layers, self._calls, max_programs=MAX_PROGRAMS)

    def _bind(self, key: _Key) -> None:
        decode.bind(self._model.network, self._pool)
        classes = self._classes(key)
        for module in self._model.network.modules():
            if isinstance(module, MultiLoraLinear):
                module.decode_views = decode.slab_views(self._model.bank, classes, module.site_index)

    def _classes(self, key: _Key) -> tuple[decode.DecodeClass, ...]:
        return tuple(
            decode.DecodeClass(
                rank_class=rank_class,
                row=self._model.bank.layout(rank_class).row,
                tiles_C4=self._device.fields[f"adapters{rank_class}"][:room],
            )
            for rank_class, room in key.tiles
        )

    @torch.no_grad()
    def _compute(self, key: _Key) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits float32 [N, V]; tokens and their log-probabilities float64 [2, N]."""
        model, fields, num_rows = self._model, self._device.fields, key.rows
        adapters = decode.DecodeAdapters(classes=self._classes(key)) if key.tiles else None
        pass_ = decode.DecodePass(
            table_NW=fields["table"][:num_rows],
            tiles_N4=fields["tiles"][:num_rows],
            splits=self._splits(num_rows),
        )
        hidden_ND = model.decode_trunk(fields["tokens"][:num_rows], fields["positions"][:num_rows], pass_, adapters)
        head = model.head
        if adapters is not None and head.site_index is not None:
            views = decode.slab_views(model.bank, adapters.classes, head.site_index)
            logits_NV = decode.linear(hidden_ND, head.weight_VD, head.bias_V, views, adapters)
        else:
            logits_NV = nn.functional.linear(hidden_ND, head.weight_VD, head.bias_V)
        logits_NV = head.scaled(logits_NV)
        tokens_N, logprobs_N = draw_plain(logits_NV, fields["temperature"][:num_rows], fields["uniform"][:num_rows])
        return logits_NV, torch.stack((tokens_N.double(), logprobs_N.double()))

    def _splits(self, num_rows: int) -> int:
        heads = self._model.kv_shapes[0][0]
        splits = 1
        while splits < MAX_SPLITS and num_rows * heads * splits < ENOUGH_PROGRAMS:
            splits *= 2
        return splits


class _Inputs:
    """One buffer and its fields; the same layout on host and device."""

    def __init__(self, rows: int, width: int, device: torch.device, *, pinned: bool = False):
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "tokens": (torch.int64, (rows,)),
            "positions": (torch.int64, (rows,)),
            "uniform": (torch.float64, (rows,)),
            "tiles": (torch.int32, (rows, 4)),
            **{f"adapters{rank_class}": (torch.int32, (rows, 4)) for rank_class in RANK_CLASSES},
            "temperature": (torch.float32, (rows,)),
            "table": (torch.int32, (rows, width)),
        }
        sizes = {name: dtype.itemsize * int(np.prod(shape)) for name, (dtype, shape) in layout.items()}
        self.buffer = torch.zeros(sum(sizes.values()), dtype=torch.uint8, device=device, pin_memory=pinned)
        self.fields: dict[str, torch.Tensor] = {}
        at = 0
        for name, (dtype, shape) in layout.items():
            self.fields[name] = self.buffer[at : at + sizes[name]].view(dtype).view(shape)
            at += sizes[name]
        index = torch.arange(rows, dtype=torch.int32, device=device)
        self.fields["tiles"][:, 0] = index
        self.fields["tiles"][:, 1] = index
        self.fields["tiles"][:, 2] = 1


class _Calls:
    """Modules that call something else instead of their forward, for a while."""

    def __init__(self, modules: Sequence[nn.Module], calls: Sequence[Any], *, max_programs: int):
        self._modules, self._calls = modules, calls
        self._limit = torch._dynamo.config.patch(recompile_limit=max_programs)

    def __enter__(self) -> None:
        self._limit.__enter__()
        for module, call in zip(self._modules, self._calls, strict=True):
            module.forward = call  # type: ignore[method-assign]

    def __exit__(self, *exception: object) -> None:
        self._limit.__exit__(None, None, None)
        for module in self._modules:
            del module.forward


def table_width(model: BaseModel, num_pages: int) -> int:
    return min(num_pages, -(-model.facts.max_context_length // PAGE_TOKENS))
