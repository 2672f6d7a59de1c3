"""Decode steps on CUDA: one token a sequence, captured as CUDA graphs, one per number of rows and adapters' classes.

    rows → one pinned buffer → one copy → replay (layers, head, draw) → one copy back → tokens, log-probabilities

While the host takes in a step's tokens and plans the next, the device already computes that next step
(``launch_ahead``): it has the tokens, and all else is known before. What the plan then leaves out is thrown away.

All inputs are views of one buffer on the device that never moves; a step fills the same buffer in host memory and
copies it over. Rows beyond the step's own are dummies whose keys go to a page of nobody's. Graphs share one memory
pool; they are captured when first needed and dropped when a slab of the bank has moved.

Legend: N rows, V vocabulary, W width of the page table, C tiles of adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from descant.model import decode
from descant.model.bank import RANK_CLASSES
from descant.model.base import BaseModel
from descant.model.passes import PAGE_TOKENS, KVPool, RowRef
from descant.sample.chance import uniforms
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
    """``tokens`` int64 [N], ``logprobs`` float32 [N] on the host."""

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """What a graph is made for. ``tiles``: (rank class, room for tiles) of each class that has rows."""

    rows: int
    tiles: tuple[tuple[int, int], ...]


@dataclass(slots=True, kw_only=True)
class _Captured:
    """``graph`` None: computed anew, not replayed. ``logits_NV``: the head's product, before its scaling."""

    graph: Any
    logits_NV: torch.Tensor
    tokens_N: torch.Tensor
    result_2N: torch.Tensor


class Flight:
    """A step that the device was told to do: whose, and where its result will be. ``ahead``: it computes the token
    after the one that its sequences' last step drew."""

    def __init__(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[RowRef | None],
        step: _Captured,
        result: np.ndarray,
        done: Any,
        *,
        ahead: bool,
    ):
        self.sequences, self.rows, self.step = sequences, rows, step
        self._result, self._done, self._ahead = result, done, ahead
        self._index = {sequence.sequence: index for index, sequence in enumerate(sequences)}

    def index(self, sequence: SequenceStep, row: RowRef | None) -> int | None:
        """Which of its rows does this sequence's step, None if none does."""
        index = self._index.get(sequence.sequence)
        if index is None or self.rows[index] != row:
            return None
        return index if self.sequences[index].context + self._ahead == sequence.context else None

    def wait(self) -> Decoded:
        if self._done is not None:
            self._done.synchronize()
        num_rows = len(self.sequences)
        return Decoded(
            tokens=self._result[0, :num_rows].astype(np.int64), logprobs=self._result[1, :num_rows].astype(np.float32)
        )


class DecodeGraphs:
    """Steps of at most ``max_rows`` sequences with one new token each. One thread; at most two flights at once."""

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
        self._device = _Inputs(max_rows, table_width, model.device)
        self._stages = [_Stage(max_rows, table_width, dummy_page, pinned=self._on_cuda) for _ in range(2)]
        self._graphs: dict[_Key, _Captured] = {}
        self._slabs: dict[int, int] = {}
        self._memory: Any = None
        self._layers = model.layers
        self._calls: list[Any] | None = None
        self._known_offsets: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}

    # ------------------------------------------------------------------------------------------------ a step
    def launch(self, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]) -> Flight:
        """``sequences`` sorted by ``rows`` (rank class, then slot; those without an adapter anywhere)."""
        return self._launch(sequences, rows, None, [])

    def launch_ahead(self, flight: Flight, kept: Sequence[tuple[int, SequenceStep]]) -> Flight | None:
        """The step after ``flight``, whose tokens nobody has seen yet: they stay on the device. ``kept``: rows of
        ``flight`` to go on with, and their sequences' steps in it. None if one of them needs a page that it has not.

        A sequence that turns out to have stopped has been computed in vain, into its own page, and harms nobody: all
        that uses the page later is told to the device later."""
        chosen = [sequence for _, sequence in kept]
        if any((sequence.context + 1) // PAGE_TOKENS >= len(sequence.pages) for sequence in chosen):
            return None
        return self._launch(chosen, [flight.rows[index] for index, _ in kept], flight, [index for index, _ in kept])

    def _launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[RowRef | None],
        before: Flight | None,
        sources: Sequence[int],
    ) -> Flight:
        stage = self._stages[0]
        self._stages.reverse()
        stage.wait()
        bucket = next(size for size in BUCKETS if size >= len(sequences))
        stage.fill(sequences, bucket, ahead=before is not None, sources=sources)
        key = _Key(rows=bucket, tiles=self._fill_adapters(stage, bucket, rows))
        captured = self._captured(key) if self._captures else None
        fields = self._device.fields
        self._device.buffer.copy_(stage.inputs.buffer, non_blocking=True)
        if before is not None:
            torch.index_select(before.step.tokens_N, 0, fields["sources"][:bucket], out=fields["tokens"][:bucket])
        if captured is not None:
            captured.graph.replay()
        else:
            self._bind(key)
            with self._model.eager():
                captured = self._compute(key)
        stage.result[:, :bucket].copy_(captured.result_2N, non_blocking=True)
        if self._on_cuda:
            stage.done = torch.cuda.Event()
            stage.done.record()
        return Flight(sequences, rows, captured, stage.result.numpy(), stage.done, ahead=before is not None)

    def _fill_adapters(self, stage: _Stage, bucket: int, rows: Sequence[RowRef | None]) -> tuple[tuple[int, int], ...]:
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
            field = stage.numpy[f"adapters{rank_class}"]
            field[: len(found)] = found
            field[len(found) : room] = 0
            sizes.append((rank_class, room))
        return tuple(sizes)

    # ------------------------------------------------------------------------------------------------ the computation
    def _captured(self, key: _Key) -> _Captured | None:
        """None if this model cannot be captured: something in it waits for the device (experts in float32)."""
        slabs = {rank_class: self._model.bank.work_slab(rank_class).data_ptr() for rank_class, _ in key.tiles}
        if any(self._slabs.get(rank_class, at) != at for rank_class, at in slabs.items()):
            torch.cuda.synchronize()
            self._graphs.clear()  # a slab has grown and lies elsewhere
            self._slabs.clear()
            self._memory = None
        self._slabs.update(slabs)
        while key not in self._graphs:
            try:
                self._graphs[key] = self._capture(key)
            except RuntimeError as error:
                torch.cuda.synchronize()
                if self._compiled:
                    logger.warning("decode steps are not compiled, which makes them slower: %s", error)
                    self._compiled = False
                else:
                    logger.warning("decode steps are not captured, which makes them slower: %s", error)
                    self._captures = False
                    return None
        return self._graphs[key]

    def _capture(self, key: _Key) -> _Captured:
        torch.cuda.synchronize()  # a flight before this one reads inputs that the trial runs use too
        self._bind(key)
        with self._compiled_layers():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._device.dummies(self._dummy_page)  # trial runs write to nobody's page
                for _ in range(2):  # compiles, chooses, allocates workspaces
                    self._compute(key)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                captured = self._compute(key)
        captured.graph = graph
        return captured

    def _compiled_layers(self) -> AbstractContextManager[object]:
        """While a step is captured, decoder layers call what is compiled for it; training's own graphs stay as they
        are."""
        if not self._compiled:
            return self._model.eager()
        if self._calls is None:
            self._calls = [torch.compile(layer.forward, dynamic=False) for layer in self._layers]
        return _Calls(self._layers, self._calls, max_programs=MAX_PROGRAMS)

    def _bind(self, key: _Key) -> None:
        decode.bind(self._model.network, self._pool, self._offsets(key))

    def _offsets(self, key: _Key) -> dict[tuple[int, ...], torch.Tensor]:
        """By the sites of a product; kept, since captured steps read them."""
        rank_classes = tuple(rank_class for rank_class, _ in key.tiles)
        if rank_classes not in self._known_offsets:
            products = {layer.sites for layer in decode.linears(self._model.network)}
            if self._model.head.site_index is not None:
                products.add((self._model.head.site_index,))
            self._known_offsets[rank_classes] = {
                sites: decode.site_offsets(self._model.bank, rank_classes, sites, self._model.device)
                for sites in products
            }
        return self._known_offsets[rank_classes]

    def _classes(self, key: _Key) -> tuple[decode.DecodeClass, ...]:
        return tuple(
            decode.DecodeClass(
                rank_class=rank_class,
                slab=self._model.bank.work_slab(rank_class).view(-1),
                row=self._model.bank.layout(rank_class).row,
                tiles_C4=self._device.fields[f"adapters{rank_class}"][:room],
            )
            for rank_class, room in key.tiles
        )

    @torch.no_grad()
    def _compute(self, key: _Key) -> _Captured:
        from descant.sample.draw_kernel import draw_rows  # Triton: only where it is used

        model, fields, num_rows = self._model, self._device.fields, key.rows
        adapters = decode.DecodeAdapters(classes=self._classes(key))
        pass_ = decode.DecodePass(
            table_NW=fields["table"][:num_rows],
            tiles_N4=fields["tiles"][:num_rows],
            splits=self._splits(num_rows),
        )
        hidden_ND = model.decode_trunk(fields["tokens"][:num_rows], fields["positions"][:num_rows], pass_, adapters)
        head = model.head
        if adapters.classes and head.site_index is not None:
            offsets_KS2 = self._offsets(key)[(head.site_index,)]
            logits_NV = decode.linear(hidden_ND, head.weight_VD, head.bias_V, [head.vocab_size], offsets_KS2, adapters)
        else:
            logits_NV = nn.functional.linear(hidden_ND, head.weight_VD, head.bias_V)
        tokens_N, result_2N = draw_rows(
            logits_NV,
            fields["temperature"][:num_rows],
            fields["uniform"][:num_rows],
            logit_scale=head.logit_scale,
            softcap=head.softcap,
        )
        return _Captured(graph=None, logits_NV=logits_NV, tokens_N=tokens_N, result_2N=result_2N)

    def _splits(self, num_rows: int) -> int:
        heads = self._model.kv_shapes[0][0]
        splits = 1
        while splits < MAX_SPLITS and num_rows * heads * splits < ENOUGH_PROGRAMS:
            splits *= 2
        return splits


class _Stage:
    """A step's inputs and result in host memory. Not to be filled again before the device has read them."""

    def __init__(self, rows: int, width: int, dummy_page: int, *, pinned: bool):
        self.inputs = _Inputs(rows, width, torch.device("cpu"), pinned=pinned)
        self.numpy = {name: x.numpy() for name, x in self.inputs.fields.items()}
        self.numpy["table"][:] = dummy_page
        self.result = torch.empty(2, rows, dtype=torch.float64, pin_memory=pinned)
        self.done: Any = None
        self._dummy_page = dummy_page
        self._pages: list[tuple[int, ...]] = [()] * rows

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def fill(self, sequences: Sequence[SequenceStep], bucket: int, *, ahead: bool, sources: Sequence[int]) -> None:
        """Everything but the adapters. ``ahead``: one token further than the sequences say."""
        num_rows, host = len(sequences), self.numpy
        for name, values in (
            ("tokens", [s.tokens[0] for s in sequences]),
            ("positions", [s.context + ahead for s in sequences]),
            ("temperature", [s.temperature for s in sequences]),
            ("sources", sources),
        ):
            host[name][: len(values)] = values
            host[name][len(values) : bucket] = 0
        host["tiles"][:bucket, 3] = host["positions"][:bucket]
        seeds = np.array([s.seed for s in sequences], np.uint64)
        host["uniform"][:num_rows] = uniforms(seeds, np.array([s.draw + ahead for s in sequences], np.uint64))
        table, known = host["table"], self._pages
        for index, sequence in enumerate(sequences):
            if known[index] != sequence.pages:
                table[index, : len(sequence.pages)] = sequence.pages
                known[index] = sequence.pages
        for index in range(num_rows, bucket):
            if known[index] != ():
                table[index, 0] = self._dummy_page
                known[index] = ()


class _Inputs:
    """One buffer and its fields; the same layout on host and device."""

    def __init__(self, rows: int, width: int, device: torch.device, *, pinned: bool = False):
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "tokens": (torch.int64, (rows,)),
            "positions": (torch.int64, (rows,)),
            "sources": (torch.int64, (rows,)),
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

    def dummies(self, page: int) -> None:
        """All rows dummies, without adapters."""
        for name, x in self.fields.items():
            if name != "tiles":
                x.zero_()
        self.fields["tiles"][:, 3] = 0
        self.fields["table"].fill_(page)


class _Calls:
    """Modules that call something else instead of their forward, for a while. A module that was compiled
    (``Module.compile``) would never ask for its forward, so that is set aside."""

    def __init__(self, modules: Sequence[nn.Module], calls: Sequence[Any], *, max_programs: int):
        self._modules, self._calls = modules, calls
        self._set_aside = [module._compiled_call_impl for module in modules]
        self._limit = torch._dynamo.config.patch(recompile_limit=max_programs)

    def __enter__(self) -> None:
        self._limit.__enter__()
        for module, call in zip(self._modules, self._calls, strict=True):
            module.forward, module._compiled_call_impl = call, None  # type: ignore[method-assign]

    def __exit__(self, *exception: object) -> None:
        self._limit.__exit__(None, None, None)
        for module, compiled in zip(self._modules, self._set_aside, strict=True):
            del module.forward
            module._compiled_call_impl = compiled


def table_width(model: BaseModel, num_pages: int) -> int:
    return min(num_pages, -(-model.facts.max_context_length // PAGE_TOKENS))
