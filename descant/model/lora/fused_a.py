"""LoRA A's fused into the base's product of a decode step on CUDA: one product computes the base's outputs and every
adapter's rank-wide intermediates.

    weight [W, in] = base [out, in]  ·  A's at the first site  ·  at the second …  (``MultiLoraLinear.join``)
    x weightᵀ      = y [N, out]      ·  x Aᵀ of every adapter that lies there, at each site: the fused columns

Of an adapter's kernels only the second is left (``lora.paged_kernels``). An adapter has the same columns at every site
of every product: as many as its rank bucket. What lies there is a copy, made for the first step with an adapter that is
not there yet. Columns that no adapter of a step uses are of zeros or of an earlier adapter's A: they are not read, and
no column of a product depends on another.

Legend: W out and fused columns, S sites of all products, G adapters of a rank bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from descant.adapters.bank import AdapterBank
from descant.adapters.slots import RowRef
from descant.model.forward_batch import to_device
from descant.model.lora.linear import MultiLoraLinear

FUSED_COLUMNS = 128
"""For each site: 8 adapters of rank 16. They take 8 % of the layers' memory at 0.6B, 2 % at 8B."""


class FusedLoraA:
    """Which adapter's A lies where behind a network's weights. The one writer there, on the stream that computes with
    them."""

    def __init__(self, network: nn.Module, bank: AdapterBank):
        self._bank = bank
        self._sites: list[tuple[int, int, int]] = []
        for layer in network.modules():
            if isinstance(layer, MultiLoraLinear) and layer.fused_WI is not None:
                num_fused = FUSED_COLUMNS * (len(layer.sites) - layer.sites.index(layer.site_index))
                rows_RI = layer.fused_WI[-num_fused:]
                self._sites.append((layer.site_index, rows_RI.data_ptr(), layer.site.in_features))
        self._targets: dict[int, torch.Tensor] = {}
        self._columns: dict[RowRef, int] = {}
        self._generations: dict[RowRef, int] = {}
        self._end = 0

    def columns_of(self, rows: Collection[RowRef]) -> Mapping[RowRef, int] | None:
        """The first fused column of each adapter at a site; valid until the next call. None if they do not fit. What is
        not there is copied, in the stream's order. The rows' weights must not change as long as their generation
        (``AdapterBank.row_generation``) stays, as those of a pinned version do not."""
        if not self._sites or sum(row.rank_bucket for row in rows) > FUSED_COLUMNS:
            return None
        generations = {row: self._bank.row_generation(row) for row in rows}
        missing = [row for row in sorted(rows) if self._generations.get(row) != generations[row]]
        if self._end + sum(row.rank_bucket for row in missing) > FUSED_COLUMNS:
            self._columns.clear()
            self._generations.clear()
            self._end, missing = 0, sorted(rows)
        for row in missing:
            self._generations.pop(row, None)  # until it is there
            self._columns[row], self._end = self._end, self._end + row.rank_bucket
        for rank_bucket in {row.rank_bucket for row in missing}:
            self._copy(rank_bucket, [row for row in missing if row.rank_bucket == rank_bucket])
        self._generations.update((row, generations[row]) for row in missing)
        return self._columns

    def _copy(self, rank_bucket: int, rows: Collection[RowRef]) -> None:
        from descant.model.lora import paged_kernels  # Triton: only where it is used

        slab_SP = self._bank.compute_slab(rank_bucket)
        if rank_bucket not in self._targets:
            begins = self._bank.layout(rank_bucket).a_offset
            targets = [(begins[site], address, num_in) for site, address, num_in in self._sites]
            self._targets[rank_bucket] = torch.tensor(targets).to(slab_SP.device)
        adapters_G2 = to_device(torch.tensor([(row.slot, self._columns[row]) for row in rows]), slab_SP.device)
        most_in = max(num_in for _, _, num_in in self._sites)
        paged_kernels.copy_a(slab_SP, rank_bucket, self._targets[rank_bucket], adapters_G2, most_in=most_in)
