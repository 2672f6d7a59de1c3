"""From a name to a base model that is proven packable, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from descant.model.base import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """``directory`` holds config, safetensors and tokenizer; ``name`` is what the SDK can load a tokenizer from."""

    name: str
    directory: Path
    aliases: tuple[str, ...] = ()


def resolve_model(name: str, *, cache_dir: Path | None = None) -> ModelSource:
    """``smollm2``: the packaged SmolLM2-135M-Instruct, converted once to safetensors under the user's cache directory
    (atomically: two processes may try at once). A directory: itself. Anything else: a hub name, through transformers'
    own cache. Raises ``UserError`` naming what was tried."""
    raise NotImplementedError


def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware has it (a GPU, or avx512_bf16), float32 elsewhere (emulated it is 20 to 50 × slower)."""
    raise NotImplementedError


def load_model(
    source: ModelSource,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    spill_dir: Path | None = None,
    max_version_bytes: int = 2 << 30,
    max_host_bytes: int = 4 << 30,
    check: bool = True,
) -> BaseModel:
    """Loads, freezes, replaces attention and linear layers, and ends with the self-check: random sequences packed and
    alone, with and without KV pages, agree to 1e-4 of the largest logit in float32, and the head equals the model's own logits.
    Raises ``UserError`` naming the architecture and the reason (meets outside attention, rotary scaling follows the
    longest sequence, unknown attention keyword); a model that only fails packed is served one sequence a pass
    (``packable`` False)."""
    raise NotImplementedError
