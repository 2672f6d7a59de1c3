"""The numbers of a new adapter, from its seed: as PEFT draws them, and the same on every device."""

from __future__ import annotations

import math

import torch

from descant.adapters.layout import Layouts
from descant.seeds import derive_seed
from descant.types import Lora


def initialise(row: torch.Tensor, layouts: Layouts, lora: Lora, model_id: str) -> None:
    """A uniform in ±1/√in (Kaiming with a=√5) into ``row``, which is zero, from ``lora.seed`` (None: from the model
    id); B stays zero. Every site draws from a generator of its own, so neither the flags nor the rank bucket of an
    adapter move another site's numbers."""
    who = {"model": model_id} if lora.seed is None else {}
    generator = torch.Generator()  # on the host: the same numbers on every device
    for site, offset, trains in zip(layouts.sites, layouts.of(lora).a_offset, layouts.trained(lora), strict=True):
        if not trains:
            continue
        generator.manual_seed(derive_seed(lora.seed or 0, "adapter", site=site.name, **who))
        bound = 1 / math.sqrt(site.in_features)
        a_RI = torch.empty(lora.rank, site.in_features).uniform_(-bound, bound, generator=generator)
        row[offset : offset + a_RI.numel()].copy_(a_RI.flatten())
