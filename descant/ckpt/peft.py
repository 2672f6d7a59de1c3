"""A checkpoint's files as PEFT reads them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from descant.types import SCALE_NUMERATOR, Lora

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"

PREFIX, A_SUFFIX, B_SUFFIX = "base_model.model.", ".lora_A.weight", ".lora_B.weight"

EXPERT_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"})
"""What linear layers of experts were called before they were fused (PEFT's ``_MOE_TARGET_MODULE_MAPPING``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportBase:
    """What an export says of its base. ``name``: as others know it, never a path of this machine. ``has_experts``: some
    of its linear layers are fused into parameters of experts."""

    name: str
    has_experts: bool = False


def adapter_config(lora: Lora, *, base: ExportBase, modules: Sequence[str]) -> bytes:
    """``adapter_config.json``: the adapter's own rank, alpha such that PEFT's ``alpha / r`` is our scale, and the full
    names of the changed modules (PEFT takes a name that equals or ends with one of them).

    PEFT from 0.19 on takes any target that is called like an expert's layer of old for the parameter into which
    transformers has fused these since, also that of a dense layer or of a shared expert beside them: it would change
    the experts and drop what was trained. Such layers are listed for it as parameters, which it leaves as they are.
    """
    parameters = {name for name in modules if base.has_experts and name.rpartition(".")[2] in EXPERT_LAYERS}
    config = {
        "base_model_name_or_path": base.name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(SCALE_NUMERATOR),
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(set(modules) - parameters),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    if parameters:
        config["target_parameters"] = sorted(f"{name}.weight" for name in parameters)
    return json.dumps(config, indent=1).encode() + b"\n"


def modules_of(tensors: Collection[str]) -> list[str]:
    """The layers that tensors of these names change."""
    return [name.removeprefix(PREFIX).removesuffix(A_SUFFIX) for name in tensors if name.endswith(A_SUFFIX)]
