"""A checkpoint's files as PEFT reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from descant.types import SCALE_NUMERATOR, LoraConfig

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"


def adapter_config(lora: LoraConfig, *, base: str, target_modules: Sequence[str]) -> bytes:
    """``adapter_config.json``: the adapter's own rank, alpha such that PEFT's ``alpha / r`` is our scale, and the full
    names of the changed modules (PEFT takes a name that equals or ends with one of them)."""
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(SCALE_NUMERATOR),
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return json.dumps(config, indent=1).encode() + b"\n"
