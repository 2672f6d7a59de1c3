"""A pass's segments, resolved against the bank once, for all layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from descant.adapters.bank import AdapterBank
from descant.errors import ServerError
from descant.model.forward_batch import ForwardBatch, Handles
from descant.model.lora.segments import (
    LoraSegment,
    Products,
    SegmentRun,
    Slabs,
    TiledRun,
    adjacent_runs,
    runs_by_width,
    tile_segments,
)
from descant.types import SCALE_NUMERATOR

if TYPE_CHECKING:
    from descant.model.lora.kernels import Tiles, TileSegment


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class LoraBatch:
    """A pass's segments, resolved against the bank once, for all layers.

    It holds the slabs of that moment: rows may be written between its forward and its backward (each row is its own
    business), but the bank must not grow.
    """

    segments: tuple[LoraSegment, ...]
    products: Literal["auto", "loop", "grouped"] = "auto"
    handle: torch.Tensor = field(init=False, repr=False, compare=False)
    _tiled: TiledRun | None = None
    """Instead of segments (``of_tiles``)."""
    _ranges: dict[tuple[int, int, Products], tuple[SegmentRun, ...]] = field(default_factory=dict)
    _saved: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.handle = LORA_BATCHES.take(self)

    @staticmethod
    def of(
        batch: ForwardBatch, bank: AdapterBank, *, products: Literal["auto", "loop", "grouped"] = "auto"
    ) -> LoraBatch | None:
        """None when no token of the pass has an adapter. ``products`` other than auto is for comparing the two."""
        segments: list[LoraSegment] = []
        slabs: dict[int, Slabs] = {}
        end = 0
        for index, segment in enumerate(batch.segments):
            if not end <= segment.start <= segment.end <= batch.num_tokens:
                raise ServerError(
                    f"segments[{index}] is {segment.start}:{segment.end} after {end}, in a pass of {batch.num_tokens}"
                )
            end = segment.end
            if segment.start == segment.end:
                continue
            lora, rank_bucket = bank.lora(segment.row), segment.row.rank_bucket
            if rank_bucket not in slabs:
                slabs[rank_bucket] = Slabs.of(bank, rank_bucket)
            segments.append(
                LoraSegment(
                    start=segment.start,
                    end=segment.end,
                    slabs=slabs[rank_bucket],
                    compute=segment.row.slot,
                    gradient=segment.gradient,
                    scale=SCALE_NUMERATOR / lora.rank,
                    trained=bank.trained(lora),
                )
            )
        return LoraBatch(segments=tuple(segments), products=products) if segments else None

    @staticmethod
    def of_tiles(tiles: Tiles, bank: AdapterBank, num_tokens: int, *, requires_grad: bool) -> LoraBatch:
        """Of a pass that is captured once and computed with other adapters each time (``model.pass_graphs``): what
        ``tiles`` hold by then."""
        lora = LoraBatch(segments=())
        lora._tiled = TiledRun(tiles, Slabs.of(bank, tiles.rank), num_tokens, requires_grad=requires_grad)
        return lora

    def tile_segments(self) -> list[TileSegment]:
        return tile_segments(self.segments)

    @property
    def widest(self) -> int:
        """The largest rank bucket among its segments."""
        return max(segment.rank_bucket for segment in self.segments)

    def runs(self, start: int, num_tokens: int, products: Products) -> tuple[SegmentRun, ...]:
        """The segments cut to the stream's tokens ``start:start+num_tokens`` and counted from ``start``. Where our
        kernels take all of them, one run is all of these tokens."""
        if self._tiled is not None:
            if (start, num_tokens, products) != (0, self._tiled.end, "kernels"):
                raise ServerError(f"captured adapters: {products} over {num_tokens} tokens from {start}")
            return (self._tiled,)
        runs = self._ranges.get((start, num_tokens, products))
        if runs is None:
            cut = [
                replace(segment, start=max(segment.start - start, 0), end=min(segment.end - start, num_tokens))
                for segment in self.segments
                if segment.end > start and segment.start < start + num_tokens
            ]
            runs = tuple(runs_by_width(cut, num_tokens) if products == "kernels" else adjacent_runs(cut, products))
            self._ranges[(start, num_tokens, products)] = runs
        return runs

    def select(self, indices: Sequence[int]) -> LoraBatch | None:
        """For a stream made of this one's tokens ``indices`` (rising): each keeps its adapter and its gradient."""
        segments = []
        for segment in self.segments:
            start, end = bisect_left(indices, segment.start), bisect_left(indices, segment.end)
            if start < end:
                segments.append(replace(segment, start=start, end=end))
        return LoraBatch(segments=tuple(segments), products=self.products) if segments else None

    def trained(self, site_index: int) -> bool:
        return self._tiled is not None or any(segment.trained[site_index] for segment in self.segments)

    def base_only(self, start: int, num_tokens: int, sites: Sequence[int]) -> list[tuple[int, int]]:
        """Of the stream's tokens ``start:start+num_tokens``, counted from ``start``: those that no adapter changes at
        ``sites``."""
        if self._tiled is not None:  # not known: what adapters add there is 0, and is rounded with the base's part
            return []
        found, end = [], 0
        for segment in self.segments:
            first, last = max(segment.start - start, 0), min(segment.end - start, num_tokens)
            if first < last and any(segment.trained[site] for site in sites):
                found.append((end, first))
                end = last
        return [(first, last) for first, last in [*found, (end, num_tokens)] if first < last]

    def save_for_backward(self, sites: list[int], saved: list[torch.Tensor]) -> None:
        """Of a compiled layer. One that runs twice is popped in reverse."""
        self._saved.setdefault(sites[0], []).append(saved)

    def pop_saved(self, sites: list[int]) -> list[torch.Tensor]:
        return self._saved[sites[0]].pop()


LORA_BATCHES: Handles[LoraBatch] = Handles()
