"""The A's of a decode step's adapters behind the base's weights, on CUDA: one product computes the base's outputs and
every adapter's rank-wide intermediates.

    weight [W, in] = base [out, in]  ·  spare rows of the first site  ·  of the second …  (``MultiLoraLinear.join``)
    x weightᵀ      = y [N, out]      ·  x Aᵀ of every adapter that lies there, at each site

Of an adapter's kernels only the second is left (``decode_lora``). An adapter has the same place at every site of every
product: as many rows as its rank class. What lies there is a copy, made when a step is about an adapter that is not
there yet. Rows that no adapter of a step uses hold zeros or an earlier adapter's A: columns that nobody reads, and no
column of a product depends on another.

Legend: W out and spare rows, S sites of all products, G adapters of a rank class.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from descant.model.bank import AdapterBank
from descant.model.lora import MultiLoraLinear
from descant.model.passes import RowRef, to_device

SPARE_ROWS = 128
"""For each site: 8 adapters of rank 16. They take 8 % of the layers' memory at 0.6B, 2 % at 8B."""


class SpareRows:
    """Who lies where in the spare rows of a network's weights, of which it is the one writer. Whoever computes with
    them does so on the stream that it writes on."""

    def __init__(self, network: nn.Module, bank: AdapterBank):
        self._bank = bank
        self._sites: list[tuple[int, int, int]] = []
        for layer in network.modules():
            if isinstance(layer, MultiLoraLinear) and layer.wide_WI is not None:
                num_spare = SPARE_ROWS * (len(layer.sites) - layer.sites.index(layer.site_index))
                rows_RI = layer.wide_WI[-num_spare:]
                self._sites.append((layer.site_index, rows_RI.data_ptr(), layer.site.in_features))
        self._targets: dict[int, torch.Tensor] = {}
        self._places: dict[RowRef, int] = {}
        self._stamps: dict[RowRef, int] = {}
        self._end = 0

    def place(self, rows: Collection[RowRef]) -> Mapping[RowRef, int] | None:
        """Which spare row of a site is the first of each adapter's; valid until the next call. None if they do not
        fit. What is not there is copied, after all that the stream was told before. The rows' weights must not change
        as long as their stamp (``AdapterBank.stamp``) stays, as those of a pinned version do not."""
        if not self._sites or sum(row.rank_class for row in rows) > SPARE_ROWS:
            return None
        stamps = {row: self._bank.stamp(row) for row in rows}
        missing = [row for row in sorted(rows) if self._stamps.get(row) != stamps[row]]
        if self._end + sum(row.rank_class for row in missing) > SPARE_ROWS:
            self._places.clear()
            self._stamps.clear()
            self._end, missing = 0, sorted(rows)
        for row in missing:
            self._stamps.pop(row, None)  # until it is there
            self._places[row], self._end = self._end, self._end + row.rank_class
        for rank_class in {row.rank_class for row in missing}:
            self._copy(rank_class, [row for row in missing if row.rank_class == rank_class])
        self._stamps.update((row, stamps[row]) for row in missing)
        return self._places

    def _copy(self, rank_class: int, rows: Collection[RowRef]) -> None:
        from descant.model import decode_lora  # Triton: only where it is used

        slab_SP = self._bank.work_slab(rank_class)
        if rank_class not in self._targets:
            begins = self._bank.layout(rank_class).a_offset
            targets = [(begins[site], address, num_in) for site, address, num_in in self._sites]
            self._targets[rank_class] = torch.tensor(targets).to(slab_SP.device)
        adapters_G2 = to_device(torch.tensor([(row.slot, self._places[row]) for row in rows]), slab_SP.device)
        most_in = max(num_in for _, _, num_in in self._sites)
        decode_lora.copy_a(slab_SP, rank_class, self._targets[rank_class], adapters_G2, most_in=most_in)
