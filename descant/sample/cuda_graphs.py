"""Passes over the KV pages on CUDA, captured as CUDA graphs: decode steps, and prefill.

    sequences → one pinned buffer → one copy → replay (layers, head, sampling) → one copy back → tokens, logprobs

A decode step's graph is made for a number of rows, of KV splits, and of tiles of each class of adapters, whose A's are
fused (``model.lora.fused_a``) or are not. A prefill's is made for a number of tokens, of rows that are sampled, and of
adapters: prompts' chunks and drafts of many sequences, what is not there filled up with tokens of no sequence. Narrow
adapters have their tiles together, whatever their ranks, and a prefill has room for wide ones of every rank bucket that
has come so far, so that whose prompts come together makes no graph of its own.
A pass that keeps the device busy for longer than the host needs to launch it is not captured, nor is prefill of a
mixture of experts; layers are compiled then as well, mixtures excepted.

While the host takes in a step's tokens and plans the next, the device already computes that next step
(``launch_ahead``): it has the tokens, and all else is known before. What the plan then leaves out is thrown away. New
weights begin with the step after: what is ahead was computed with those of its launch, and is reported as theirs.

All inputs are views of a buffer on the device that never moves (``graph_inputs``). Graphs share one memory pool. Those
of the base alone and the usual ones of narrow adapters are captured at the start (``warm_up``), others when first
needed: kernels and layers have been compiled for all of them. Where an adapter's row lies is an input like any other.

Legend: N rows, T tokens of a prefill, V vocabulary, D hidden size, C tiles of adapters.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from descant.adapters.layout import RANK_BUCKETS
from descant.adapters.slots import RowRef
from descant.model import paged_batch
from descant.model.base import WARM_UP_TOKENS, BaseModel
from descant.model.forward_batch import PAGE_TOKENS, KVPool
from descant.model.graph_recording import record
from descant.model.kernel_launch import compiling_kernels
from descant.pauses import paused
from descant.sample.graph_inputs import (
    ROOM_GROWS,
    Columns,
    DecodeLayout,
    DecodeStage,
    Inputs,
    PrefillLayout,
    PrefillStage,
    decode_dummies,
    prefill_dummies,
    runs,
    segments,
)
from descant.sample.plan import SequenceStep
from descant.types import Version

logger = logging.getLogger(__name__)

BUCKETS = (8, 16, 32, 64, 128, 256)
"""Rows of a decode step's graph. Fewer than 8 rows cost as much as 8."""

PREFILL_ROWS = 32
"""Sequences, and sampled rows, of a prefill's smaller graphs. The head reads its weight whole for one row as for 32."""

MIN_PREFILL_TOKENS = 64

MAX_CAPTURED_FLOPS = 1.2e13
"""Of a prefill. More keep an H200 busy for 20 ms, about what the host takes to launch one that is not captured, and a
graph of more tokens keeps more memory."""

SPLIT_TOKENS = 512
"""Keys that one program of decode attention walks at most."""

SMALL_SPLIT_TOKENS = 128
"""The same where splits of that size would not fill the device, as (sequence, key head) pairs fewer than these:"""

ENOUGH_PROGRAMS = 512

MIN_TILES = 16

USUAL_PREFILL_TOKENS = 2048
"""Of the largest prefill with adapters that is captured before it is needed."""

LEAST_TOGETHER = 32
"""The ``max_rank`` of narrow adapters' tiles at least. Fewer columns of a tile save nothing, and each number would have
graphs of its own."""

MAX_PROGRAMS = 64
"""Compiled layers kept, one for each kind of layer; the compiler's own limit is 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """``tokens`` int64 [N], ``logprobs`` float32 [N] on the host."""

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeKey:
    """What a decode step's graph is made for. ``splits``: room for them, ``rows`` if every sequence is one split.
    ``tiles``: (max_rank, room for tiles) of each of its ``AdapterTiles``. ``lora_a_fused``: see ``PagedBatch``."""

    rows: int
    splits: int
    tiles: tuple[tuple[int, int], ...]
    lora_a_fused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillKey:
    """What a prefill's graph is made for. ``max_ranks``: of its ``AdapterTiles``; ``segments``: room for so many
    adapters in each."""

    tokens: int
    rows: int
    max_ranks: tuple[int, ...]
    segments: int


@dataclass(slots=True, kw_only=True)
class PassTensors:
    """``graph`` None: computed anew, not replayed. ``logits_NV``: the head's product, before its scaling. The others
    lie in the graphs' memory, where the next pass may write."""

    graph: Any
    logits_NV: torch.Tensor
    tokens_N: torch.Tensor
    result_2N: torch.Tensor


class LaunchedStep:
    """A decode step, or a prefill, that was launched on the device: the sequences of its rows, and where its result
    will be. ``tokens_N``: what its rows sample, on the device. ``logits_NV``: before their scaling, until the next
    launch. ``ahead``: it computes the token after the one that its sequences' last step sampled."""

    def __init__(
        self,
        sequences: Sequence[SequenceStep],
        columns: Columns,
        tokens_N: torch.Tensor,
        logits_NV: torch.Tensor,
        result: np.ndarray,
        done: Any,
        *,
        ahead: bool,
    ):
        self.sequences, self.columns, self.tokens_N, self.logits_NV = sequences, columns, tokens_N, logits_NV
        self._result, self._done, self._ahead = result, done, ahead
        self._index = {sequence.sequence: index for index, sequence in enumerate(sequences)}

    def index(self, sequence: SequenceStep) -> int | None:
        """Which of its rows, of a decode step, does this sequence's step, whatever its version; None if none does."""
        index = self._index.get(sequence.sequence)
        if index is None:
            return None
        own = self.sequences[index]
        if own.context + len(own.tokens) - 1 + self._ahead != sequence.context:
            return None
        if own.pages is not sequence.pages:  # preempted since, maybe: the token's key lies where it was written
            page = sequence.context // PAGE_TOKENS
            if own.pages[page] != sequence.pages[page]:
                return None
        return index

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


class CudaGraphs:
    """Decode steps of at most ``max_rows`` sequences with one new token each, and prefills of at most ``max_tokens``
    tokens, ``max_prefill_rows`` sequences and sampled rows. One thread; at most two launched steps at once, and two
    prefills."""

    def __init__(
        self,
        model: BaseModel,
        pool: KVPool,
        *,
        dummy_page: int,
        table_width: int,
        max_rows: int = BUCKETS[-1],
        max_tokens: int,
        compiled: bool = True,
        batch_invariant: bool = False,
    ):
        """``dummy_page``: a page of ``pool`` that no sequence gets. ``table_width``: pages of the longest sequence.
        ``compiled``: layers through ``torch.compile`` (fewer, fused kernels; some seconds, once). Off CUDA nothing is
        captured or compiled. ``batch_invariant``: a row's bits do not depend on what else is in the step, so every step
        is of the same number of rows, and every prefill of the same number of tokens, the largest."""
        self._model, self._pool, self._dummy_page = model, pool, dummy_page
        # A product of more columns may be another kernel: it must not depend on what adapters the others have.
        self._fused_lora_a = None if batch_invariant else model.fused_lora_a
        self._on_cuda = model.device.type == "cuda"
        self._compiled = compiled and self._on_cuda
        self._compiles_prefill = not model.has_experts  # whose every prefill would be another program
        self._captures = self._on_cuda
        self._captures_prefill = self._captures and not model.has_experts
        self.max_rows = min(max_rows, BUCKETS[-1])
        largest = bisect_left(BUCKETS, self.max_rows)
        self._buckets = BUCKETS[largest if batch_invariant else 0 : largest + 1]
        max_splits = max(size * -(-table_width * PAGE_TOKENS // self._split_tokens(size)) for size in self._buckets)
        layout = DecodeLayout(rows=self._buckets[-1], width=table_width, max_splits=max_splits)
        self._device = Inputs(layout.fields(), model.device)
        self._stages = [DecodeStage(layout, dummy_page, pinned=self._on_cuda) for _ in range(2)]

        self.max_tokens = max_tokens
        self._batch_invariant = batch_invariant
        self._token_buckets = (max_tokens,) if batch_invariant else token_buckets(max_tokens)
        self._row_buckets = (PREFILL_ROWS, *(self._buckets[-1:] if self._buckets[-1] > PREFILL_ROWS else ()))
        self.max_prefill_rows = self._row_buckets[-1]
        num_heads = model.network.config.get_text_config().num_attention_heads  # type: ignore[union-attr, operator]
        self._prefill_layout = PrefillLayout(
            tokens=max(self._token_buckets[-1], WARM_UP_TOKENS),
            rows=self.max_prefill_rows,
            width=table_width,
            tile_tokens=paged_batch.prefill_tile_tokens(
                num_heads // min(kv_heads for kv_heads, _, _ in model.kv_shapes)
            ),
            adapter_rows={max_rank: self._prefill_tile_rows(max_rank) for max_rank in RANK_BUCKETS},
        )
        self._prefill_device = Inputs(self._prefill_layout.fields(), model.device)
        self._prefill_stages = [PrefillStage(self._prefill_layout, pinned=self._on_cuda) for _ in range(2)]
        self._prefill_rank_buckets: frozenset[int] = frozenset()
        """Of the adapters that prompts have come with so far."""
        self._origin = torch.zeros(1, dtype=model.dtype, device=model.device)
        params = sum(site.in_features * site.out_features for site in model.bank.sites)
        self._max_captured_tokens = max(MAX_CAPTURED_FLOPS / (2 * max(params, 1)), MIN_PREFILL_TOKENS)

        head, num_rows = model.lm_head, max(self._buckets[-1], self.max_prefill_rows)
        # One of each for all graphs: at most one pass's are looked at after it.
        self._logits_NV = torch.empty(num_rows, head.vocab_size, dtype=model.dtype, device=model.device)
        self.hidden_TD = torch.empty(
            self._prefill_layout.tokens, head.weight_VD.shape[1], dtype=model.dtype, device=model.device
        )
        """The last prefill's hidden states, until the next."""
        self._graphs: dict[DecodeKey | PrefillKey, PassTensors] = {}
        self._memory: Any = None
        self._side: torch.cuda.Stream | None = None
        self._layers = model.layers
        self._calls: list[Any] | None = None
        products = paged_batch.products(model.network)
        if head.site_index is not None:
            products.add((head.site_index,))
        self._features = paged_batch.site_features(model.bank, products, model.device)
        paged_batch.bind(model.network, pool)

    def _split_tokens(self, num_rows: int) -> int:
        enough = num_rows * self._model.kv_shapes[0][0] >= ENOUGH_PROGRAMS
        return SPLIT_TOKENS if enough else SMALL_SPLIT_TOKENS

    def warm_up(self) -> None:
        """Compiles the layers and the adapters' kernels, and captures what the base alone needs and narrow adapters
        usually do, so that no request waits for any of it."""
        start = time.monotonic()
        key = PrefillKey(tokens=WARM_UP_TOKENS, rows=PREFILL_ROWS, max_ranks=(), segments=0)
        self._dummies(key)
        self._computed(key)
        if not self._captures_prefill and self._model.has_experts:
            logger.info("prefill of a mixture of experts is not captured")
        if self._on_cuda:
            self._compile_kernels()
        logger.info("kernels of sampling compiled in %.0f s", time.monotonic() - start)
        start = time.monotonic()
        for tokens in reversed(self._token_buckets):  # the largest first: the others take from its memory
            if self._is_captured(tokens):
                self._captured(PrefillKey(tokens=tokens, rows=PREFILL_ROWS, max_ranks=(), segments=0))
        for rows in self._buckets:
            if self._captures:
                self._captured(DecodeKey(rows=rows, splits=rows, tiles=(), lora_a_fused=False))
        if not self._batch_invariant:
            self._capture_usual()
        logger.info("%d graphs of sampling captured in %.0f s", len(self._graphs), time.monotonic() - start)

    def _compile_kernels(self) -> None:
        """Of adapters, narrow ones together, the widest by themselves. What varies besides makes no other programs."""
        with compiling_kernels(), self._model.eager():
            for max_rank in RANK_BUCKETS if self._batch_invariant else (LEAST_TOGETHER, paged_batch.NARROW_RANK):
                prefill = PrefillKey(
                    tokens=MIN_PREFILL_TOKENS, rows=PREFILL_ROWS, max_ranks=(max_rank,), segments=MIN_TILES
                )
                self._dummies(prefill)
                self._compute(prefill)
                for rows in self._buckets[:2]:  # 8, and multiples of 16
                    for lora_a_fused in (False, True) if self._fused_lora_a is not None else (False,):
                        tiles = ((max_rank, min(rows, MIN_TILES)),)
                        step = DecodeKey(rows=rows, splits=rows, tiles=tiles, lora_a_fused=lora_a_fused)
                        self._dummies(step)
                        self._compute(step)

    def _capture_usual(self) -> None:
        """Graphs for narrow adapters."""
        self._prefill_rank_buckets |= {LEAST_TOGETHER}
        for tokens in self._token_buckets:
            if self._is_captured(tokens) and tokens <= USUAL_PREFILL_TOKENS:
                self._captured(
                    PrefillKey(tokens=tokens, rows=PREFILL_ROWS, max_ranks=(LEAST_TOGETHER,), segments=MIN_TILES)
                )
        for rows in self._buckets if self._captures else ():
            for splits in (rows, min(rows * ROOM_GROWS, len(self._device.fields["splits"]))):
                for room in _tile_rooms(rows):
                    fused = self._fused_lora_a is not None and room <= MIN_TILES
                    for lora_a_fused in (False, True) if fused else (False,):
                        tiles = ((LEAST_TOGETHER, room),)
                        self._captured(DecodeKey(rows=rows, splits=splits, tiles=tiles, lora_a_fused=lora_a_fused))

    # ------------------------------------------------------------------------------------------------ prefill
    def launch_prefill(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[RowRef | None],
        starts: Sequence[int],
        sampled: Sequence[SequenceStep],
        sampled_rows: Sequence[RowRef | None],
        last: Sequence[int],
    ) -> LaunchedStep:
        """Tokens and drafts of ``sequences`` with the adapters ``rows``, each from ``starts`` on in the stream, and the
        tokens of ``sampled`` from the hidden states at ``last``. All keys are written before any is read, so chunks of
        one sequence may stand in one pass. Both sorted by adapter."""
        stage = self._prefill_stages[0]
        self._prefill_stages.reverse()
        stage.wait()
        sizes = [len(sequence.tokens) + len(sequence.draft) for sequence in sequences]
        given = segments(rows, sizes, starts)
        key = self._prefill_key(starts[-1] + sizes[-1], max(len(sequences), len(sampled)), given)
        columns = Columns.of(sampled)
        stage.fill(sequences, starts, sampled, columns, last, key.tokens, key.rows)
        self._fill_prefill_adapters(stage, key, given, runs(sampled_rows))
        captured = self._captured(key) if self._is_captured(key.tokens) else None
        self._prefill_device.copy(stage.inputs, len(sequences))
        if captured is not None:
            captured.graph.replay()
        else:
            captured = self._computed(key)
        return self._launched(sampled, columns, captured, stage, key.rows, ahead=False)

    def _prefill_key(self, num_tokens: int, num_rows: int, given: Sequence[tuple[int, int, RowRef]]) -> PrefillKey:
        rows = next(size for size in self._row_buckets if size >= num_rows)
        tokens = next(size for size in self._token_buckets if size >= num_tokens)
        rank_buckets = frozenset(row.rank_bucket for _, _, row in given)
        if not self._is_captured(tokens):
            tokens = tokens if self._batch_invariant else max(num_tokens, BUCKETS[0])
        elif rank_buckets:
            rank_buckets = self._prefill_rank_buckets = self._prefill_rank_buckets | rank_buckets
        max_ranks = self._max_ranks(rank_buckets)
        counts = Counter(max_ranks[row.rank_bucket] for _, _, row in given)
        room = MIN_TILES if counts else 0
        while room < max(counts.values(), default=0):
            room *= ROOM_GROWS
        together = tuple(sorted(set(max_ranks.values())))
        return PrefillKey(tokens=tokens, rows=rows, max_ranks=together, segments=min(room, rows))

    def _max_ranks(self, rank_buckets: Collection[int]) -> Mapping[int, int]:
        """The ``max_rank`` of the ``AdapterTiles`` of each. Narrow adapters have theirs together, but where a row's
        bits must not depend on whose they are."""
        narrow = [rank for rank in rank_buckets if rank <= paged_batch.NARROW_RANK and not self._batch_invariant]
        together = max([LEAST_TOGETHER, *narrow])
        return {rank: together if rank in narrow else rank for rank in rank_buckets}

    def _is_captured(self, num_tokens: int) -> bool:
        """A prefill of so many tokens."""
        return self._captures_prefill and num_tokens <= self._max_captured_tokens

    def _prefill_tile_rows(self, max_rank: int) -> int:
        """Exact float32 products of so many rows at once would not fit the registers, nor would those of large
        ranks."""
        widest = 0 if self._model.dtype is torch.float32 else paged_batch.NARROW_RANK
        return paged_batch.PREFILL_TILE_ROWS if max_rank <= widest else paged_batch.TILE_ROWS

    def _fill_prefill_adapters(
        self,
        stage: PrefillStage,
        key: PrefillKey,
        given: Sequence[tuple[int, int, RowRef]],
        sampled: Sequence[tuple[int, int, RowRef]],
    ) -> None:
        layout = self._prefill_layout
        for max_rank, own in self._together(given, key.max_ranks).items():
            tiles = self._tiles(own, layout.adapter_rows[max_rank])
            room = layout.adapter_tiles(max_rank, key.tokens, key.segments)
            stage.fill_tiles(f"adapters{max_rank}", tiles, room)
        for max_rank, own in self._together(sampled, key.max_ranks).items():
            tiles = self._tiles(own, paged_batch.TILE_ROWS)
            stage.fill_tiles(f"head{max_rank}", tiles, layout.head_tiles(key.rows, key.segments))

    def _together(
        self, given: Sequence[tuple[int, int, RowRef]], max_ranks: Sequence[int]
    ) -> Mapping[int, Sequence[tuple[int, int, RowRef]]]:
        """``given`` by the first of these rising ``max_ranks`` that takes its rank: those of a key that was made for
        them."""
        found: dict[int, list[tuple[int, int, RowRef]]] = {max_rank: [] for max_rank in max_ranks}
        for segment in given:
            found[next(rank for rank in max_ranks if segment[2].rank_bucket <= rank)].append(segment)
        return found

    def _tiles(
        self,
        given: Sequence[tuple[int, int, RowRef]],
        tile_rows: int,
        columns: Mapping[RowRef, int] | None = None,
    ) -> Sequence[paged_batch.Tile]:
        return paged_batch.tiles(given, self._model.bank, self._origin, tile_rows, columns)

    def _computed(self, key: PrefillKey) -> PassTensors:
        """Not replayed."""
        if self._compiled and self._compiles_prefill:
            try:
                with self._compiled_layers():
                    return self._compute_prefill(key)
            except RuntimeError as error:
                self._stop_compiling(error)
        with self._model.eager():
            return self._compute_prefill(key)

    @torch.no_grad()
    def _compute_prefill(self, key: PrefillKey) -> PassTensors:
        layout, fields, num_tokens, num_rows = self._prefill_layout, self._prefill_device.fields, key.tokens, key.rows

        step = paged_batch.PagedBatch(
            attention=paged_batch.PrefillMetadata(
                table_BW=fields["table"],
                tiles_C4=fields["tiles"][: layout.tiles(num_tokens, num_rows)],
                tile_tokens=layout.tile_tokens,
            ),
            adapters=tuple(
                self._adapter_tiles(
                    max_rank,
                    fields[f"adapters{max_rank}"][: layout.adapter_tiles(max_rank, num_tokens, key.segments)],
                    layout.adapter_rows[max_rank],
                )
                for max_rank in key.max_ranks
            ),
        )
        # A view of the buffer would be another program to the compiler.
        positions_T = fields["positions"][:num_tokens].clone()
        hidden_TD = self._hidden(fields["tokens"][:num_tokens], positions_T, step)
        self.hidden_TD[:num_tokens].copy_(hidden_TD)
        return self._sample(
            hidden_TD.index_select(0, fields["last"][:num_rows]),
            self._logits_NV[:num_rows],
            tuple(
                self._adapter_tiles(
                    max_rank,
                    fields[f"head{max_rank}"][: layout.head_tiles(num_rows, key.segments)],
                    paged_batch.TILE_ROWS,
                )
                for max_rank in key.max_ranks
            ),
            fields["temperature"][:num_rows],
            fields["uniform"][:num_rows],
        )

    def _adapter_tiles(self, max_rank: int, tiles_C6: torch.Tensor, tile_rows: int) -> paged_batch.AdapterTiles:
        return paged_batch.AdapterTiles(
            max_rank=max_rank, origin=self._origin, tiles_C6=tiles_C6, tile_rows=tile_rows, features=self._features
        )

    def _stop_compiling(self, error: RuntimeError) -> None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise error
        torch.cuda.synchronize()
        logger.warning("sampling is not compiled, which makes it slower: %s", error)
        self._compiled = False

    # ------------------------------------------------------------------------------------------------ decode steps
    def launch(self, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]) -> LaunchedStep:
        """``sequences`` sorted by ``rows`` (rank bucket, then slot; those without an adapter anywhere)."""
        return self._launch(sequences, rows, [], [])

    def launch_ahead(
        self,
        launched: Sequence[LaunchedStep],
        kept: Sequence[tuple[int, SequenceStep]],
        rows: Sequence[RowRef | None],
    ) -> LaunchedStep | None:
        """The step after ``launched``, whose tokens are not on the host yet: they stay on the device. ``kept``: rows of
        ``launched`` to go on with, counted through all of them, and their sequences' steps in it, sorted by ``rows``,
        the adapters of the step ahead. None if one of them needs a page that it has not.

        A sequence that turns out to have stopped has been computed in vain, into its own page, and does no harm:
        all that uses the page later is launched later."""
        chosen = [sequence for _, sequence in kept]
        if any([s.context + len(s.tokens) >= len(s.pages) * PAGE_TOKENS for s in chosen]):
            return None
        return self._launch(chosen, rows, launched, [index for index, _ in kept])

    def _launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[RowRef | None],
        before: Sequence[LaunchedStep],
        sources: Sequence[int],
    ) -> LaunchedStep:
        stage = self._stages[0]
        self._stages.reverse()
        stage.wait()
        bucket = next(size for size in self._buckets if size >= len(sequences))
        if before:
            columns = Columns.joined([launched.columns for launched in before]).ahead(sources)
            stage.fill_rows("sources", sources, bucket)
        else:
            columns = Columns.of(sequences)
            stage.fill_rows("tokens", [s.tokens[0] for s in sequences], bucket)
        stage.fill(columns, [s.pages for s in sequences], bucket)
        num_splits = stage.fill_splits(bucket, self._split_tokens(bucket))
        tiles, lora_a_fused = self._fill_adapters(stage, rows, bucket)
        key = DecodeKey(rows=bucket, splits=num_splits, tiles=tiles, lora_a_fused=lora_a_fused)
        captured = self._captured(key) if self._captures else None
        fields = self._device.fields
        self._device.copy(stage.inputs, num_splits)
        if before:
            tokens_N = before[0].tokens_N if len(before) == 1 else torch.cat([step.tokens_N for step in before])
            torch.index_select(tokens_N, 0, fields["sources"][:bucket], out=fields["tokens"][:bucket])
        if captured is not None:
            captured.graph.replay()
        else:
            with self._model.eager():
                captured = self._compute_step(key)
        return self._launched(sequences, columns, captured, stage, bucket, ahead=bool(before))

    def _launched(
        self,
        sequences: Sequence[SequenceStep],
        columns: Columns,
        computed: PassTensors,
        stage: DecodeStage | PrefillStage,
        room: int,
        *,
        ahead: bool,
    ) -> LaunchedStep:
        result = stage.result(room)
        result.copy_(computed.result_2N, non_blocking=True)
        tokens_N = computed.tokens_N[: len(sequences)].clone()  # the next pass may write over them
        stage.done = self._record_event()
        return LaunchedStep(sequences, columns, tokens_N, computed.logits_NV, result.numpy(), stage.done, ahead=ahead)

    def _record_event(self) -> Any:
        """An event after all that was launched so far; None where nothing runs ahead."""
        if not self._on_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _fill_adapters(
        self, stage: DecodeStage, rows: Sequence[RowRef | None], bucket: int
    ) -> tuple[tuple[tuple[int, int], ...], bool]:
        """``tiles`` and ``lora_a_fused`` of the key."""
        given = runs(rows)
        a_columns = None if self._fused_lora_a is None else self._fused_lora_a.columns_of({row for _, _, row in given})
        max_ranks = sorted(set(self._max_ranks({row.rank_bucket for _, _, row in given}).values()))
        sizes = []
        for max_rank, own in self._together(given, max_ranks).items():
            found = self._tiles(own, paged_batch.TILE_ROWS, a_columns)
            room = next(room for room in _tile_rooms(bucket) if room >= len(found))
            stage.fill_tiles(f"adapters{max_rank}", found, room)
            sizes.append((max_rank, room))
        return tuple(sizes), a_columns is not None and bool(given)

    # ------------------------------------------------------------------------------------------------ the computation
    def _captured(self, key: DecodeKey | PrefillKey) -> PassTensors | None:
        """None if this model cannot be captured: something in it waits for the device (experts in float32)."""
        short_of_memory = False
        while key not in self._graphs:
            try:
                with paused("build"):
                    self._graphs[key] = self._capture(key)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    if not short_of_memory:  # nothing that is only kept can be freed while a graph is captured
                        short_of_memory = True
                        torch.cuda.empty_cache()
                        continue
                    if isinstance(key, DecodeKey):
                        raise
                elif self._compiled:
                    self._stop_compiling(error)
                    continue
                self._synchronize()
                what = "prefill is" if isinstance(key, PrefillKey) else "decode steps are"
                logger.warning("%s not captured, which makes sampling slower: %s", what, error)
                if isinstance(key, PrefillKey):
                    self._captures_prefill = False
                else:
                    self._captures = False
                return None
        return self._graphs[key]

    def _synchronize(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()

    def _compute(self, key: DecodeKey | PrefillKey) -> PassTensors:
        return self._compute_prefill(key) if isinstance(key, PrefillKey) else self._compute_step(key)

    def _dummies(self, key: DecodeKey | PrefillKey) -> None:
        """Inputs of trial runs, which write to no sequence's page."""
        if isinstance(key, PrefillKey):
            prefill_dummies(self._prefill_device, key.tokens, self._prefill_layout.tile_tokens)
        else:
            decode_dummies(self._device, key.rows, self._dummy_page)

    def _capture(self, key: DecodeKey | PrefillKey) -> PassTensors:
        start = time.monotonic()
        torch.cuda.synchronize()  # a pass that was launched before reads inputs that the trial runs use too
        if self._side is None:
            self._side = torch.cuda.Stream()  # one for all: what trial runs allocate stays a stream's own
        with self._compiled_layers():
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._dummies(key)
                for _ in range(1 if self._graphs else 2):  # compiles, chooses, allocates workspaces
                    self._compute(key)
            torch.cuda.current_stream().wait_stream(self._side)
            torch.cuda.synchronize()
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self._side):
                graph, captured = record(lambda: self._compute(key), self._memory)
        captured.graph = graph
        logger.info("captured %s in %.0f ms", key, 1e3 * (time.monotonic() - start))
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

    @torch.no_grad()
    def _compute_step(self, key: DecodeKey) -> PassTensors:
        fields, num_rows = self._device.fields, key.rows
        adapters = tuple(
            self._adapter_tiles(max_rank, fields[f"adapters{max_rank}"][:room], paged_batch.TILE_ROWS)
            for max_rank, room in key.tiles
        )
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
        hidden_ND = self._hidden(fields["tokens"][:num_rows], positions_N, step)
        return self._sample(
            hidden_ND,
            self._logits_NV[:num_rows],
            adapters,
            fields["temperature"][:num_rows],
            fields["uniform"][:num_rows],
        )

    def _hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: paged_batch.PagedBatch) -> torch.Tensor:
        return self._model.paged_decoder_forward(tokens_T, positions_T, batch)

    def _sample(
        self,
        hidden_ND: torch.Tensor,
        logits_NV: torch.Tensor,
        adapters: Sequence[paged_batch.AdapterTiles],
        temperature_N: torch.Tensor,
        uniform_N: torch.Tensor,
    ) -> PassTensors:
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
        return PassTensors(graph=None, logits_NV=logits_NV, tokens_N=tokens_N, result_2N=result_2N)


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


def _tile_rooms(num_rows: int) -> Iterator[int]:
    """Room for tiles that a step of so many rows may have: it has no more of them than rows."""
    room = MIN_TILES
    while room < num_rows:
        yield room
        room *= ROOM_GROWS
    yield num_rows


def table_width(model: BaseModel, num_pages: int) -> int:
    return min(num_pages, -(-model.facts.max_context_length // PAGE_TOKENS))


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Tokens of a prefill's graphs: 64, 128, 256, 384, 512, 768, 1024, 1536, …, up to ``max_tokens`` a multiple of 64.
    Less than half of a pass of more than 64 is padding, of more than 256 less than a third."""
    last = -(-max_tokens // MIN_PREFILL_TOKENS) * MIN_PREFILL_TOKENS
    sizes, size = [], MIN_PREFILL_TOKENS
    while size < last:
        sizes.append(size)
        if size >= 256 and size * 3 // 2 < last:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, last)
