"""What a decode step or a prefill reads, in one buffer of host memory that is copied over at once. Launches nothing.

The buffer on the device has the same fields at the same places and never moves, so a captured CUDA graph finds a pass's
inputs where it found those of the pass that it was captured with. What a graph has room for and a pass does not have is
filled with what does nothing: rows on a page of no sequence, tiles without rows, tokens of no sequence.

Legend: N rows of a decode step, or rows of a prefill whose next token is sampled; T tokens of a prefill, B its
sequences; W width of the page table; C tiles of adapters or of attention, or KV splits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from descant.adapters.layout import RANK_BUCKETS
from descant.adapters.slots import RowRef
from descant.model import paged_batch
from descant.sample.plan import SequenceStep
from descant.sample.rng import uniforms

ROOM_GROWS = 4
"""By so much a graph's room for tiles, adapters and KV splits is larger than the next smaller one's. What is empty is a
program that ends at once; each size is a graph of its own, whose capture holds everybody up."""

Fields = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

ALIGN_BYTES = 16
"""Triton makes other programs for tensors that do not begin at a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What rows are sampled from, logits aside. ``positions_N``: of their last input token."""

    positions_N: NDArray[np.int64]
    temperature_N: NDArray[np.float32]
    seeds_N: NDArray[np.uint64]
    offsets_N: NDArray[np.uint64]

    @classmethod
    def of(cls, sequences: Sequence[SequenceStep]) -> Columns:
        return cls(
            positions_N=np.array([s.context + len(s.tokens) - 1 for s in sequences], np.int64),
            temperature_N=np.array([s.temperature for s in sequences], np.float32),
            seeds_N=np.array([s.seed for s in sequences], np.uint64),
            offsets_N=np.array([s.rng_offset for s in sequences], np.uint64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        if len(parts) == 1:
            return parts[0]
        return cls(
            positions_N=np.concatenate([part.positions_N for part in parts]),
            temperature_N=np.concatenate([part.temperature_N for part in parts]),
            seeds_N=np.concatenate([part.seeds_N for part in parts]),
            offsets_N=np.concatenate([part.offsets_N for part in parts]),
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


class Inputs:
    """One buffer and its fields; the same layout on host and device. The last field may be used in part."""

    def __init__(self, fields: Fields, device: torch.device, *, pinned: bool = False):
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, shape) in fields.items():
            start = end + -end % ALIGN_BYTES
            end = start + dtype.itemsize * int(np.prod(shape))
            places[name] = start, end
        self.buffer = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.fields = {
            name: self.buffer[slice(*places[name])].view(dtype).view(shape) for name, (dtype, shape) in fields.items()
        }
        self._last = next(reversed(self.fields.values()))

    def used_bytes(self, num_rows: int) -> int:
        """Of the buffer, with so many rows of the last field."""
        return self.buffer.nbytes - (len(self._last) - num_rows) * self._last.stride(0) * self._last.itemsize

    def copy(self, source: Inputs, num_rows: int) -> None:
        """From host memory, which must not be filled again before the device has read it."""
        used = self.used_bytes(num_rows)
        self.buffer[:used].copy_(source.buffer[:used], non_blocking=True)


class _Stage:
    """A pass's inputs, and its result, in host memory. Not to be filled again before the device has read and written
    them."""

    def __init__(self, fields: Fields, num_rows: int, *, pinned: bool):
        self.inputs = Inputs(fields, torch.device("cpu"), pinned=pinned)
        self.numpy = {name: x.numpy() for name, x in self.inputs.fields.items()}
        self._result = torch.empty(2 * num_rows, dtype=torch.float64, pin_memory=pinned)
        self.done: Any = None
        """An event; None: nothing runs behind the host's back."""

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def result(self, room: int) -> torch.Tensor:
        """float64 [2, N] for so many rows. In one piece: a copy to anything else waits for the device."""
        return self._result[: 2 * room].view(2, room)

    def fill_rows(self, name: str, values: Sequence[float] | NDArray[Any], room: int) -> None:
        """0 behind them."""
        field = self.numpy[name]
        field[: len(values)] = values
        field[len(values) : room] = 0

    def fill_sampling(self, columns: Columns, room: int) -> None:
        self.fill_rows("temperature", columns.temperature_N, room)
        self.fill_rows("uniform", uniforms(columns.seeds_N, columns.offsets_N), room)

    def fill_tiles(self, name: str, tiles: Sequence[paged_batch.Tile], room: int) -> None:
        field = self.numpy[name]
        field[: len(tiles)] = tiles or 0
        field[len(tiles) : room] = 0


# ---------------------------------------------------------------------------------------------------- decode steps
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    rows: int
    width: int
    max_splits: int

    def fields(self) -> Fields:
        return {
            "tokens": (torch.int64, (self.rows,)),
            "positions": (torch.int64, (self.rows,)),
            "sources": (torch.int64, (self.rows,)),
            "uniform": (torch.float64, (self.rows,)),
            "partials": (torch.int32, (self.rows, 2)),
            **{f"adapters{max_rank}": (torch.int64, (self.rows, 6)) for max_rank in RANK_BUCKETS},
            "temperature": (torch.float32, (self.rows,)),
            "table": (torch.int32, (self.rows, self.width)),
            "splits": (torch.int32, (self.max_splits, 5)),
        }


class DecodeStage(_Stage):
    def __init__(self, layout: DecodeLayout, dummy_page: int, *, pinned: bool):
        super().__init__(layout.fields(), layout.rows, pinned=pinned)
        self.numpy["table"][:] = dummy_page
        self._dummy_page = dummy_page
        self._pages: list[tuple[int, ...]] = [()] * layout.rows

    def fill(self, columns: Columns, pages: Sequence[tuple[int, ...]], bucket: int) -> None:
        """Everything but tokens or their sources, splits and adapters."""
        self.fill_rows("positions", columns.positions_N, bucket)
        self.fill_sampling(columns, bucket)
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
        """Of the positions filled in before; the room for them: the bucket, or so many times ``ROOM_GROWS``."""
        found, partials = paged_batch.kv_splits(self.numpy["positions"][:bucket], split_tokens)
        room, field = bucket, self.numpy["splits"]
        while room < len(found):
            room *= ROOM_GROWS
        room = min(room, len(field))
        field[: len(found)] = found
        field[len(found) : room, 0] = -1
        self.numpy["partials"][:bucket] = partials
        return room


def decode_dummies(inputs: Inputs, num_rows: int, page: int) -> None:
    """So many rows, without adapters; no split is of any other."""
    inputs.buffer.zero_()
    inputs.fields["table"].fill_(page)
    splits = inputs.fields["splits"]
    splits[:num_rows, 0] = torch.arange(num_rows, dtype=torch.int32, device=splits.device)
    splits[:num_rows, 4] = -1
    splits[num_rows:, 0] = -1


# --------------------------------------------------------------------------------------------------------- prefill
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLayout:
    """``rows``: sequences of a pass at most, and rows that are sampled; ``adapter_rows``: rows of an adapter's tile, by
    the ``max_rank`` of its ``AdapterTiles``."""

    tokens: int
    rows: int
    width: int
    tile_tokens: int
    adapter_rows: Mapping[int, int]

    def fields(self) -> Fields:
        return {
            "tokens": (torch.int64, (self.tokens,)),
            "positions": (torch.int64, (self.tokens,)),
            "last": (torch.int64, (self.rows,)),
            "uniform": (torch.float64, (self.rows,)),
            "temperature": (torch.float32, (self.rows,)),
            "tiles": (torch.int32, (self.tiles(self.tokens, self.rows), 4)),
            **{
                f"adapters{max_rank}": (torch.int64, (self.adapter_tiles(max_rank, self.tokens, self.rows), 6))
                for max_rank in RANK_BUCKETS
            },
            **{
                f"head{max_rank}": (torch.int64, (self.head_tiles(self.rows, self.rows), 6))
                for max_rank in RANK_BUCKETS
            },
            "table": (torch.int32, (self.rows, self.width)),
        }

    def tiles(self, num_tokens: int, num_rows: int) -> int:
        """Of attention: each sequence, and what fills the pass up, ends with one that is not full."""
        return num_tokens // self.tile_tokens + 2 * num_rows + 1

    def adapter_tiles(self, max_rank: int, num_tokens: int, num_segments: int) -> int:
        return num_tokens // self.adapter_rows[max_rank] + num_segments

    def head_tiles(self, num_rows: int, num_segments: int) -> int:
        return num_rows // paged_batch.TILE_ROWS + num_segments


class PrefillStage(_Stage):
    def __init__(self, layout: PrefillLayout, *, pinned: bool):
        super().__init__(layout.fields(), layout.rows, pinned=pinned)
        self._layout = layout

    def fill(
        self,
        sequences: Sequence[SequenceStep],
        starts: Sequence[int],
        sampled: Sequence[SequenceStep],
        columns: Columns,
        last: Sequence[int],
        num_tokens: int,
        num_rows: int,
    ) -> None:
        """Everything but adapters. ``starts``: each sequence's first token in the stream; ``last``: the tokens behind
        which ``sampled`` is, with its ``columns``."""
        tokens, positions, table = (self.numpy[name] for name in ("tokens", "positions", "table"))
        tokens[:num_tokens] = 0
        positions[:num_tokens] = 0
        lengths = []
        for index, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            given = (*sequence.tokens, *sequence.draft) if sequence.draft else sequence.tokens
            end, context = start + len(given), sequence.context
            tokens[start:end] = given
            positions[start:end] = np.arange(context, context + len(given))
            table[index, : len(sequence.pages)] = sequence.pages
            lengths.append(len(given))
        self.fill_rows("last", last, num_rows)
        self.fill_sampling(columns, num_rows)
        contexts, tile_tokens = [sequence.context for sequence in sequences], self._layout.tile_tokens
        tiles = paged_batch.prefill_tiles(starts, lengths, contexts, num_tokens, tile_tokens)
        room, field = self._layout.tiles(num_tokens, num_rows), self.numpy["tiles"]
        field[: len(tiles)] = tiles
        field[len(tiles) : room] = (-1, 0, 0, 0)


def prefill_dummies(inputs: Inputs, num_tokens: int, tile_tokens: int) -> None:
    """So many tokens of no sequence, without adapters."""
    inputs.buffer.zero_()
    tiles = torch.from_numpy(paged_batch.prefill_tiles([], [], [], num_tokens, tile_tokens))
    inputs.fields["tiles"][: len(tiles)] = tiles.to(inputs.buffer.device, torch.int32)
    inputs.fields["tiles"][len(tiles) :, 0] = -1


def segments(
    rows: Sequence[RowRef | None], sizes: Sequence[int], starts: Sequence[int]
) -> list[tuple[int, int, RowRef]]:
    """Tokens ``start:end`` of the stream that have an adapter, of neighbours that have the same taken together."""
    found: list[tuple[int, int, RowRef]] = []
    for row, size, start in zip(rows, sizes, starts, strict=True):
        if row is None:
            continue
        begin = start
        if found and found[-1][1] == start and found[-1][2] == row:
            begin = found.pop()[0]
        found.append((begin, start + size, row))
    return found


def runs(rows: Sequence[RowRef | None]) -> list[tuple[int, int, RowRef]]:
    """The same of rows that lie one after another, one token each."""
    found: list[tuple[int, int, RowRef]] = []
    start = 0
    for row, run in groupby(rows):
        end = start + len(list(run))
        if row is not None:
            found.append((start, end, row))
        start = end
    return found
