"""Batched products, for a decode step's few tokens of each adapter on CPU: one a side instead of two calls a segment.

8 adapters, 576 → 1536, rank 16: 155 against 347 µs. In bf16 the bits are the loop's (tried over 2,240 shapes, 1 and 2
threads), in fp32 not always, so there the loop stays. Most models'
decode steps take ``cpu.stacked_adapters`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from descant.model.forward_batch import filled_up
from descant.model.lora.batch import LoraBatch
from descant.model.lora.grouped import stacked
from descant.model.lora.segments import SegmentRun


def takes(lora: LoraBatch, run: SegmentRun, x_TI: torch.Tensor, sites: Sequence[int]) -> bool:
    """The run's products may be batched, with the bits of the loop."""
    return (
        run.is_even
        and not x_TI.is_cuda
        and x_TI.dtype == torch.bfloat16
        and lora.products == "auto"
        and all(segment.trained[site] for segment in run.segments for site in sites)
    )


def add(x_TI: torch.Tensor, ys: Sequence[torch.Tensor], sites: Sequence[int], run: SegmentRun) -> None:
    """Adds the adapters' part to the run's tokens of each ``y`` [T, out] in place."""
    layout, tokens, num_groups = run.slabs.layout, slice(run.start, run.end), len(run.segments)
    for site, y_TO in zip(sites, ys):
        a_GRI = stacked(run, layout.a_offset[site], layout.rank_bucket, x_TI.shape[1])
        b_GOR = stacked(run, layout.b_offset[site], y_TO.shape[1], layout.rank_bucket)
        x_GLI = x_TI[tokens].view(num_groups, -1, x_TI.shape[1])
        y_GLO = y_TO[tokens].view(num_groups, -1, y_TO.shape[1])
        h_GLR = torch.bmm(filled_up(x_GLI), a_GRI.transpose(1, 2))[:, : x_GLI.shape[1]]
        few_GLO = torch.baddbmm(filled_up(y_GLO), filled_up(h_GLR), b_GOR.transpose(1, 2), alpha=run.segments[0].scale)
        y_GLO.copy_(few_GLO[:, : x_GLI.shape[1]])
