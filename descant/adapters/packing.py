"""A row without its zeros: the numbers of the true rank, trained groups only, one after another.

What is offloaded is packed, unless the true rank fills the row nearly: then the row is kept whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from descant.adapters.layout import Layouts
from descant.adapters.offload import CopyStream
from descant.types import Lora

DENSE = 0.9
"""A row that the true rank fills to this share is kept whole: one copy instead of hundreds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StridedSpan:
    """``lines`` of ``size`` elements, ``stride`` apart, from ``start`` of a row."""

    start: int
    lines: int
    size: int
    stride: int

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """[lines, size], a view."""
        return row.as_strided((self.lines, self.size), (self.stride, 1), row.storage_offset() + self.start)


class Packing:
    def __init__(self, layouts: Layouts, copies: CopyStream):
        self._layouts = layouts
        self._copies = copies
        self._spans: dict[Lora, tuple[_StridedSpan, ...]] = {}

    def num_elements(self, lora: Lora) -> int:
        """Of a packed row."""
        row = self._layouts.of(lora).row
        numbers = sum(span.lines * span.size for span in self._spans_of(lora))
        return row if numbers >= DENSE * row else numbers

    def is_dense(self, lora: Lora) -> bool:
        """Whether a packed row is the row itself."""
        return self.num_elements(lora) == self._layouts.of(lora).row

    def pack(self, rows: Sequence[torch.Tensor], lora: Lora) -> torch.Tensor:
        """On the host, float32 [len(rows), n]. There when the copy stream has come to here (``CopyStream.record``)."""
        host = self._copies.host(len(rows), self.num_elements(lora))
        for line, row in zip(host, rows):
            packed = row if self.is_dense(lora) else torch.cat([s.of(row).flatten() for s in self._spans_of(lora)])
            line.copy_(packed, non_blocking=self._copies.overlaps)
        return host

    def unpack(self, numbers: torch.Tensor, lora: Lora, row: torch.Tensor) -> None:
        """The reverse: [n] into all of ``row``."""
        if self.is_dense(lora):
            row.copy_(numbers, non_blocking=self._copies.overlaps)
            return
        row.zero_()
        packed, end = numbers.to(row.device, non_blocking=self._copies.overlaps), 0
        for span in self._spans_of(lora):
            start, end = end, end + span.lines * span.size
            span.of(row).copy_(packed[start:end].view(span.lines, span.size))

    def _spans_of(self, lora: Lora) -> tuple[_StridedSpan, ...]:
        """Where the numbers of the true rank lie in a row, trained groups only."""
        if lora not in self._spans:
            layout, trained = self._layouts.of(lora), self._layouts.trained(lora)
            spans = []
            for site, a, b, trains in zip(self._layouts.sites, layout.a_offset, layout.b_offset, trained, strict=True):
                if trains:
                    size = lora.rank * site.in_features
                    spans += [
                        _StridedSpan(start=a, lines=1, size=size, stride=size),
                        _StridedSpan(start=b, lines=site.out_features, size=lora.rank, stride=layout.rank_bucket),
                    ]
            self._spans[lora] = tuple(spans)
        return self._spans[lora]
