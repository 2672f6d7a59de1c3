"""Passes over the KV pages on CUDA: prefill through compiled layers, and decode steps captured as CUDA graphs.

    rows → one pinned buffer → one copy → replay (layers, head, sampling) → one copy back → tokens, log-probabilities

A graph is made for a number of rows, of KV splits, and of tiles of each class of adapters,
whose A's are fused (``model.fused_lora_a``) or are not.
While the host takes in a step's tokens and plans the next, the device already computes that next step
(``launch_ahead``): it has the tokens, and all else is known before. What the plan then leaves out is thrown away. New
weights begin with the step after: what is ahead was computed with those of its launch, and is reported as theirs.

All inputs are views of one buffer on the device that never moves; a step fills the same buffer in host memory and
copies it over. Rows beyond the step's own are dummies whose keys go to a page of no sequence. Graphs share one memory
pool. Those of the base alone are captured at the start (``warm_up``), others when first needed, which takes a fraction
of a second: the layers are compiled once for all of them. They are dropped when a slab of the bank has moved, which it
does only where the driver cannot map memory to addresses (``slots.MappedRange``).

Legend: N rows, V vocabulary, D hidden size, W width of the page table, C tiles of adapters or KV splits.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from descant.adapters.layout import RANK_BUCKETS
from descant.adapters.slots import RowRef
from descant.model import paged_batch
from descant.model.base import WARM_UP_TOKENS, BaseModel
from descant.model.forward_batch import PAGE_TOKENS, ForwardBatch, KVPool, PagedKV, to_device
from descant.model.lora import LoraBatch
from descant.sample.plan import SequenceStep
from descant.sample.rng import uniforms
from descant.types import Version

logger = logging.getLogger(__name__)

BUCKETS = (8, 16, 32, 64, 128, 256)
"""Rows of a graph. Fewer than 8 rows cost as much as 8."""

SPLIT_TOKENS = 512
"""Keys that one program of decode attention walks at most."""

SMALL_SPLIT_TOKENS = 128
"""The same where splits of that size would not fill the device, as (sequence, key head) pairs fewer than these:"""

ENOUGH_PROGRAMS = 512

MIN_TILES = 8

MAX_PROGRAMS = 64
"""Compiled layers kept, one for each kind of layer; the compiler's own limit is 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """``tokens`` int64 [N], ``logprobs`` float32 [N] on the host."""

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """What a graph is made for. ``splits``: room for them, ``rows`` if every sequence is one split. ``tiles``: (rank
    class, room for tiles) of each class that has rows. ``lora_a_fused``: see ``PagedBatch``."""

    rows: int
    splits: int
    tiles: tuple[tuple[int, int], ...]
    lora_a_fused: bool


@dataclass(slots=True, kw_only=True)
class _Captured:
    """``graph`` None: computed anew, not replayed. ``logits_NV``: the head's product, before its scaling."""

    graph: Any
    logits_NV: torch.Tensor
    tokens_N: torch.Tensor
    result_2N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What a step's rows are computed from, tokens, pages and adapters aside."""

    positions_N: NDArray[np.int64]
    temperature_N: NDArray[np.float32]
    seeds_N: NDArray[np.uint64]
    offsets_N: NDArray[np.uint64]

    @classmethod
    def of(cls, sequences: Sequence[SequenceStep]) -> Columns:
        return cls(
            positions_N=np.array([s.context for s in sequences], np.int64),
            temperature_N=np.array([s.temperature for s in sequences], np.float32),
            seeds_N=np.array([s.seed for s in sequences], np.uint64),
            offsets_N=np.array([s.rng_offset for s in sequences], np.uint64),
        )

    def ahead(self, sources: Sequence[int]) -> Columns:
        """One token further, for these of the rows."""
        chosen = np.array(sources, np.int64)
        return Columns(
            positions_N=self.positions_N[chosen] + 1,
            temperature_N=self.temperature_N[chosen],
            seeds_N=self.seeds_N[chosen],
            offsets_N=self.offsets_N[chosen] + np.uint64(1),
        )


class LaunchedStep:
    """A step that was launched on the device: its sequences, and where its result will be. ``ahead``: it computes the
    token after the one that its sequences' last step sampled."""

    def __init__(
        self,
        sequences: Sequence[SequenceStep],
        columns: Columns,
        step: _Captured,
        result: np.ndarray,
        done: Any,
        *,
        ahead: bool,
    ):
        self.sequences, self.columns, self.step = sequences, columns, step
        self._result, self._done, self._ahead = result, done, ahead
        self._index = {sequence.sequence: index for index, sequence in enumerate(sequences)}

    def index(self, sequence: SequenceStep) -> int | None:
        """Which of its rows does this sequence's step, whatever its version; None if none does."""
        index = self._index.get(sequence.sequence)
        if index is None:
            return None
        return index if self.sequences[index].context + self._ahead == sequence.context else None

    def versions(self, indices: Sequence[int]) -> list[Version | None]:
        """What computes these of its rows, whatever they are with by now."""
        return [self.sequences[index].version for index in indices]

    def wait(self) -> Decoded:
        if self._done is not None:
            self._done.synchronize()
        num_rows = len(self.sequences)
        return Decoded(
            tokens=self._result[0, :num_rows].astype(np.int64), logprobs=self._result[1, :num_rows].astype(np.float32)
        )


class DecodeGraphs:
    """Steps of at most ``max_rows`` sequences with one new token each, and prefill. One thread; at most two launched
    steps at once."""

    def __init__(
        self,
        model: BaseModel,
        pool: KVPool,
        *,
        dummy_page: int,
        table_width: int,
        max_rows: int = BUCKETS[-1],
        compiled: bool = True,
        batch_invariant: bool = False,
    ):
        """``dummy_page``: a page of ``pool`` that no sequence gets. ``table_width``: pages of the longest sequence.
        ``compiled``: layers through ``torch.compile`` (fewer, fused kernels; some seconds, once). Off CUDA nothing is
        captured or compiled. ``batch_invariant``: a row's bits do not depend on what else is in the step, so every step
        is of the same number of rows, the largest."""
        self._model, self._pool, self._dummy_page = model, pool, dummy_page
        # A product of more columns may be another kernel: it must not depend on what adapters the others have.
        self._fused_lora_a = None if batch_invariant else model.fused_lora_a
        self._on_cuda = model.device.type == "cuda"
        self._captures = self._on_cuda
        self._compiled = compiled and self._on_cuda
        self.max_rows = min(max_rows, BUCKETS[-1])
        largest = bisect_left(BUCKETS, self.max_rows)
        self._buckets = BUCKETS[largest if batch_invariant else 0 : largest + 1]
        max_splits = max(size * -(-table_width * PAGE_TOKENS // self._split_tokens(size)) for size in self._buckets)
        layout = _Layout(rows=self._buckets[-1], width=table_width, max_splits=max_splits)
        self._device = _Inputs(layout, model.device)
        self._stages = [_Stage(layout, dummy_page, pinned=self._on_cuda) for _ in range(2)]
        self._logits_NV = torch.empty(
            self._buckets[-1], model.lm_head.vocab_size, dtype=model.dtype, device=model.device
        )  # one for all graphs: at most one step's are looked at after it
        self._graphs: dict[_Key, _Captured] = {}
        self._slabs: dict[int, int] = {}
        self._memory: Any = None
        self._layers = model.layers
        self._compiles_prefill = not model.has_experts  # whose every prefill would be another program
        self._calls: list[Any] | None = None
        self._offsets: dict[int, dict[tuple[int, ...], torch.Tensor]] = {}
        paged_batch.bind(model.network, pool)

    def _split_tokens(self, num_rows: int) -> int:
        enough = num_rows * self._model.kv_shapes[0][0] >= ENOUGH_PROGRAMS
        return SPLIT_TOKENS if enough else SMALL_SPLIT_TOKENS

    def warm_up(self) -> None:
        """Compiles the layers and captures the steps of the base alone, so that no request waits for either."""
        start = time.monotonic()
        length = min(WARM_UP_TOKENS, self._device.fields["table"].shape[1] * PAGE_TOKENS)
        pages_1W = torch.full((1, -(-length // PAGE_TOKENS)), self._dummy_page, device=self._model.device)
        kv = PagedKV(pool=self._pool, page_table=pages_1W, context_lens=(0,))
        positions_T = torch.arange(length, device=self._model.device)
        self.prefill(positions_T % self._model.facts.vocab_size, positions_T, ForwardBatch(seq_lens=(length,), kv=kv))
        for rows in self._buckets:
            if self._captures:
                self._captured(_Key(rows=rows, splits=rows, tiles=(), lora_a_fused=False))
        logger.info("decode steps captured in %.0f s", time.monotonic() - start)

    # ------------------------------------------------------------------------------------------------ prefill
    @torch.no_grad()
    def prefill(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, LoraBatch | None]:
        """``BaseModel.decoder_forward`` of a pass with KV pages and without a backward, through the compiled layers."""
        lora = LoraBatch.of(batch, self._model.bank)
        step = paged_batch.PagedBatch(attention=batch, adapters=self._prefill_adapters(batch))
        if self._compiled and self._compiles_prefill:
            with self._compiled_layers():
                try:
                    return self._model.paged_decoder_forward(tokens_T, positions_T, step), lora
                except RuntimeError as error:
                    self._stop_compiling(error)
        with self._model.eager():
            return self._model.paged_decoder_forward(tokens_T, positions_T, step), lora

    def _prefill_adapters(self, batch: ForwardBatch) -> tuple[paged_batch.BucketTiles, ...]:
        segments: dict[int, list[tuple[int, int, RowRef]]] = {}
        for segment in batch.segments:
            segments.setdefault(segment.row.rank_bucket, []).append((segment.start, segment.end, segment.row))
        # Exact float32 products of so many rows at once would not fit the registers, nor would those of large ranks.
        # Each class has its own, so that a row's bits do not depend on the adapters of others.
        widest = 0 if self._model.dtype is torch.float32 else 64
        classes: list[paged_batch.BucketTiles] = []
        for rank_bucket, own in segments.items():
            classes += self._tiled(
                own, paged_batch.PREFILL_TILE_ROWS if rank_bucket <= widest else paged_batch.TILE_ROWS
            )
        return tuple(classes)

    def _tiled(self, segments: Iterable[tuple[int, int, RowRef]], tile_rows: int) -> Iterator[paged_batch.BucketTiles]:
        for rank_bucket, found in paged_batch.tiles(segments, self._model.bank, tile_rows).items():
            tiles_C5 = to_device(torch.tensor(found, dtype=torch.int32), self._model.device)
            yield self._tile_class(rank_bucket, tiles_C5, tile_rows)

    @torch.no_grad()
    def sample(
        self, hidden_ND: torch.Tensor, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]
    ) -> LaunchedStep:
        """The tokens after hidden states of a prefill: head and sampling as in a decode step, not captured. Nor do a
        row's bits depend on the others, where there are always as many."""
        segments = [(n, n + 1, row) for n, row in enumerate(rows) if row is not None]
        columns = Columns.of(sequences)
        uniform_N = uniforms(columns.seeds_N, columns.offsets_N)
        logits_NV = hidden_ND.new_empty(len(hidden_ND), self._model.lm_head.vocab_size)
        step = self._sample(
            hidden_ND,
            logits_NV,
            tuple(self._tiled(segments, paged_batch.TILE_ROWS)),
            *(to_device(torch.from_numpy(x), self._model.device) for x in (columns.temperature_N, uniform_N)),
        )
        result = torch.empty(step.result_2N.shape, dtype=torch.float64, pin_memory=self._on_cuda)
        result.copy_(step.result_2N, non_blocking=True)
        return LaunchedStep(sequences, columns, step, result.numpy(), self._record_event(), ahead=False)

    def _tile_class(self, rank_bucket: int, tiles_C5: torch.Tensor, tile_rows: int) -> paged_batch.BucketTiles:
        return paged_batch.BucketTiles(
            rank_bucket=rank_bucket,
            slab=self._model.bank.compute_slab(rank_bucket).view(-1),
            row=self._model.bank.layout(rank_bucket).row,
            tiles_C5=tiles_C5,
            tile_rows=tile_rows,
            offsets=self._site_offsets(rank_bucket),
        )

    def _stop_compiling(self, error: RuntimeError) -> None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise error
        torch.cuda.synchronize()
        logger.warning("sampling is not compiled, which makes it slower: %s", error)
        self._compiled = False

    # ------------------------------------------------------------------------------------------------ a step
    def launch(self, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]) -> LaunchedStep:
        """``sequences`` sorted by ``rows`` (rank bucket, then slot; those without an adapter anywhere)."""
        return self._launch(sequences, rows, None, [])

    def launch_ahead(
        self, launched: LaunchedStep, kept: Sequence[tuple[int, SequenceStep]], rows: Sequence[RowRef | None]
    ) -> LaunchedStep | None:
        """The step after ``launched``, whose tokens are not on the host yet: they stay on the device. ``kept``: rows of
        ``launched`` to go on with, and their sequences' steps in it, sorted by ``rows``, the adapters of the step
        ahead. None if one of them needs a page that it has not.

        A sequence that turns out to have stopped has been computed in vain, into its own page, and does no harm:
        all that uses the page later is launched later."""
        chosen = [sequence for _, sequence in kept]
        if any([sequence.context + 1 >= len(sequence.pages) * PAGE_TOKENS for sequence in chosen]):
            return None
        return self._launch(chosen, rows, launched, [index for index, _ in kept])

    def _launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[RowRef | None],
        before: LaunchedStep | None,
        sources: Sequence[int],
    ) -> LaunchedStep:
        stage = self._stages[0]
        self._stages.reverse()
        stage.wait()
        bucket = next(size for size in self._buckets if size >= len(sequences))
        if before is None:
            columns = Columns.of(sequences)
            stage.fill_rows("tokens", [s.tokens[0] for s in sequences], bucket)
        else:
            columns = before.columns.ahead(sources)
            stage.fill_rows("sources", sources, bucket)
        stage.fill(columns, [s.pages for s in sequences], bucket)
        num_splits = stage.fill_splits(bucket, self._split_tokens(bucket))
        tiles, lora_a_fused = self._fill_adapters(stage, rows)
        key = _Key(rows=bucket, splits=num_splits, tiles=tiles, lora_a_fused=lora_a_fused)
        captured = self._captured(key) if self._captures else None
        fields = self._device.fields
        used = self._device.used_bytes(num_splits)
        self._device.buffer[:used].copy_(stage.inputs.buffer[:used], non_blocking=True)
        if before is not None:
            torch.index_select(before.step.tokens_N, 0, fields["sources"][:bucket], out=fields["tokens"][:bucket])
        if captured is not None:
            captured.graph.replay()
        else:
            with self._model.eager():
                captured = self._compute(key)
        stage.result[:, :bucket].copy_(captured.result_2N, non_blocking=True)
        stage.done = self._record_event()
        return LaunchedStep(sequences, columns, captured, stage.result.numpy(), stage.done, ahead=before is not None)

    def _record_event(self) -> Any:
        """An event after all that was launched so far; None where nothing runs ahead."""
        if not self._on_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _fill_adapters(self, stage: _Stage, rows: Sequence[RowRef | None]) -> tuple[tuple[tuple[int, int], ...], bool]:
        """``tiles`` and ``lora_a_fused`` of the key."""
        segments: list[tuple[int, int, RowRef]] = []
        start = 0
        for row, run in groupby(rows):
            end = start + len(list(run))
            if row is not None:
                segments.append((start, end, row))
            start = end
        a_columns = (
            None if self._fused_lora_a is None else self._fused_lora_a.columns_of({row for _, _, row in segments})
        )
        sizes = []
        for rank_bucket, found in sorted(
            paged_batch.tiles(segments, self._model.bank, paged_batch.TILE_ROWS, a_columns).items()
        ):
            room = MIN_TILES
            while room < len(found):
                room *= 2
            field = stage.numpy[f"adapters{rank_bucket}"]
            field[: len(found)] = found
            field[len(found) : room] = 0
            sizes.append((rank_bucket, room))
        return tuple(sizes), a_columns is not None and bool(segments)

    # ------------------------------------------------------------------------------------------------ the computation
    def _captured(self, key: _Key) -> _Captured | None:
        """None if this model cannot be captured: something in it waits for the device (experts in float32)."""
        slabs = {rank_bucket: self._model.bank.compute_slab(rank_bucket).data_ptr() for rank_bucket, _ in key.tiles}
        if any(self._slabs.get(rank_bucket, at) != at for rank_bucket, at in slabs.items()):
            torch.cuda.synchronize()
            self._graphs.clear()  # a slab has grown and lies elsewhere
            self._slabs.clear()
            self._memory = None
        self._slabs.update(slabs)
        while key not in self._graphs:
            try:
                self._graphs[key] = self._capture(key)
            except RuntimeError as error:
                if self._compiled:
                    self._stop_compiling(error)
                else:
                    torch.cuda.synchronize()
                    logger.warning("decode steps are not captured, which makes them slower: %s", error)
                    self._captures = False
                    return None
        return self._graphs[key]

    def _capture(self, key: _Key) -> _Captured:
        torch.cuda.synchronize()  # a step that was launched before reads inputs that the trial runs use too
        with self._compiled_layers():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._device.dummies(self._dummy_page)  # trial runs write to no sequence's page
                for _ in range(2):  # compiles, chooses, allocates workspaces
                    self._compute(key)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may go on allocating: they are no part of the graph.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                captured = self._compute(key)
        captured.graph = graph
        return captured

    def _compiled_layers(self) -> AbstractContextManager[object]:
        """While a step is captured, decoder layers call what is compiled for it; training's own graphs stay as they
        are."""
        if not self._compiled:
            return self._model.eager()
        if self._calls is None:
            for x in (*self._pool.keys, *self._pool.values):
                torch._dynamo.mark_static(x)
            self._calls = [torch.compile(layer.forward, dynamic=self._compiles_prefill) for layer in self._layers]
        return _Calls(self._layers, self._calls, max_programs=MAX_PROGRAMS)

    def _classes(self, key: _Key) -> tuple[paged_batch.BucketTiles, ...]:
        return tuple(
            self._tile_class(rank_bucket, self._device.fields[f"adapters{rank_bucket}"][:room], paged_batch.TILE_ROWS)
            for rank_bucket, room in key.tiles
        )

    def _site_offsets(self, rank_bucket: int) -> dict[tuple[int, ...], torch.Tensor]:
        """Kept, since captured steps read them."""
        if rank_bucket not in self._offsets:
            model = self._model
            products = paged_batch.products(model.network)
            if model.lm_head.site_index is not None:
                products.add((model.lm_head.site_index,))
            self._offsets[rank_bucket] = paged_batch.site_offsets(model.bank, rank_bucket, products, model.device)
        return self._offsets[rank_bucket]

    @torch.no_grad()
    def _compute(self, key: _Key) -> _Captured:
        model, fields, num_rows = self._model, self._device.fields, key.rows
        adapters = self._classes(key)
        step = paged_batch.PagedBatch(
            attention=paged_batch.DecodeMetadata(
                table_NW=fields["table"][:num_rows],
                splits_C5=fields["splits"],
                partials_N2=fields["partials"][:num_rows],
                num_splits=key.splits,
                num_partials=key.splits if key.splits > num_rows else 0,
            ),
            adapters=adapters,
            lora_a_fused=key.lora_a_fused,
        )
        # A view of the buffer would be another program to the compiler than prefill's positions.
        positions_N = fields["positions"][:num_rows].clone()
        hidden_ND = model.paged_decoder_forward(fields["tokens"][:num_rows], positions_N, step)
        return self._sample(
            hidden_ND,
            self._logits_NV[:num_rows],
            adapters,
            fields["temperature"][:num_rows],
            fields["uniform"][:num_rows],
        )

    def _sample(
        self,
        hidden_ND: torch.Tensor,
        logits_NV: torch.Tensor,
        adapters: Sequence[paged_batch.BucketTiles],
        temperature_N: torch.Tensor,
        uniform_N: torch.Tensor,
    ) -> _Captured:
        """``logits_NV`` is filled here."""
        from descant.sample.sampling_kernel import sample_rows  # Triton: only where it is used

        head = self._model.lm_head
        if head.bias_V is None:
            torch.mm(hidden_ND, head.weight_VD.t(), out=logits_NV)
        else:
            torch.addmm(head.bias_V, hidden_ND, head.weight_VD.t(), out=logits_NV)
        if head.site_index is not None:
            paged_batch.add_adapters(hidden_ND, logits_NV, (head.site_index,), [head.vocab_size], adapters)
        tokens_N, result_2N = sample_rows(
            logits_NV, temperature_N, uniform_N, logit_scale=head.logit_scale, softcap=head.softcap
        )
        return _Captured(graph=None, logits_NV=logits_NV, tokens_N=tokens_N, result_2N=result_2N)


class _Stage:
    """A step's inputs and result in host memory. Not to be filled again before the device has read them."""

    def __init__(self, layout: _Layout, dummy_page: int, *, pinned: bool):
        self.inputs = _Inputs(layout, torch.device("cpu"), pinned=pinned)
        self.numpy = {name: x.numpy() for name, x in self.inputs.fields.items()}
        self.numpy["table"][:] = dummy_page
        self.result = torch.empty(2, layout.rows, dtype=torch.float64, pin_memory=pinned)
        self.done: Any = None
        self._dummy_page = dummy_page
        self._pages: list[tuple[int, ...]] = [()] * layout.rows

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def fill_rows(self, name: str, values: Sequence[float] | np.ndarray, bucket: int) -> None:
        field = self.numpy[name]
        field[: len(values)] = values
        field[len(values) : bucket] = 0

    def fill(self, columns: Columns, pages: Sequence[tuple[int, ...]], bucket: int) -> None:
        """Everything but tokens or their sources, splits and adapters."""
        self.fill_rows("positions", columns.positions_N, bucket)
        self.fill_rows("temperature", columns.temperature_N, bucket)
        self.fill_rows("uniform", uniforms(columns.seeds_N, columns.offsets_N), bucket)
        table, known = self.numpy["table"], self._pages
        for index, held in enumerate(pages):
            if known[index] is not held and known[index] != held:
                table[index, : len(held)] = held
                known[index] = held
        for index in range(len(pages), bucket):
            if known[index] != ():
                table[index, 0] = self._dummy_page
                known[index] = ()

    def fill_splits(self, bucket: int, split_tokens: int) -> int:
        """Of the positions filled in before; the room for them: the bucket, or so many times two."""
        found, partials = paged_batch.kv_splits(self.numpy["positions"][:bucket], split_tokens)
        room, field = bucket, self.numpy["splits"]
        while room < len(found):
            room *= 2
        room = min(room, len(field))
        field[: len(found)] = found
        field[len(found) : room, 0] = -1
        self.numpy["partials"][:bucket] = partials
        return room


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    rows: int
    width: int
    max_splits: int

    def fields(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            "tokens": (torch.int64, (self.rows,)),
            "positions": (torch.int64, (self.rows,)),
            "sources": (torch.int64, (self.rows,)),
            "uniform": (torch.float64, (self.rows,)),
            "partials": (torch.int32, (self.rows, 2)),
            **{f"adapters{rank_bucket}": (torch.int32, (self.rows, 5)) for rank_bucket in RANK_BUCKETS},
            "temperature": (torch.float32, (self.rows,)),
            "table": (torch.int32, (self.rows, self.width)),
            "splits": (torch.int32, (self.max_splits, 5)),
        }


class _Inputs:
    """One buffer and its fields; the same layout on host and device."""

    def __init__(self, layout: _Layout, device: torch.device, *, pinned: bool = False):
        fields = layout.fields()
        sizes = {name: dtype.itemsize * int(np.prod(shape)) for name, (dtype, shape) in fields.items()}
        self.buffer = torch.zeros(sum(sizes.values()), dtype=torch.uint8, device=device, pin_memory=pinned)
        self.fields: dict[str, torch.Tensor] = {}
        at = 0
        for name, (dtype, shape) in fields.items():
            self.fields[name] = self.buffer[at : at + sizes[name]].view(dtype).view(shape)
            at += sizes[name]

    def used_bytes(self, num_splits: int) -> int:
        """Of the buffer, with so many splits."""
        splits = self.fields["splits"]
        return self.buffer.nbytes - (len(splits) - num_splits) * splits.stride(0) * splits.itemsize

    def dummies(self, page: int) -> None:
        """All rows dummies, without adapters."""
        self.buffer.zero_()
        self.fields["table"].fill_(page)
        splits, num_rows = self.fields["splits"], len(self.fields["tokens"])
        splits[:num_rows, 0] = torch.arange(num_rows, dtype=torch.int32, device=splits.device)
        splits[:num_rows, 4] = -1
        splits[num_rows:, 0] = -1


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
