"""What of transformers' networks is read and replaced: linear layers, attention, LM head; and spread over ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from descant.adapters.layout import LoraSite
from descant.errors import UserError
from descant.model import base
from descant.model.attention import dispatch as attention
from descant.model.lm_head import LmHead
from descant.model.lora.linear import ForwardContext, MultiLoraLinear

Shard = Callable[[nn.Module, Sequence[nn.Module]], None]
"""(the decoder, its layers): leaves this rank its part of every layer's parameters, on its device."""

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Tokens that end an answer though a model's configuration may name another end only."""

_GROUPS: Mapping[str, Literal["attn", "mlp"]] = {
    **dict.fromkeys(("self_attn", "self_attention", "attention", "attn"), "attn"),
    **dict.fromkeys(
        ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "shared_expert", "shared_experts"), "mlp"
    ),
}
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that families call one after another on the same tensor."""

_FROZEN = frozenset({"experts", "gate", "router", "shared_expert_gate"})
"""Experts see tokens in an order of their own, and routers decide; both stay as they are."""


def split(network: PreTrainedModel) -> tuple[nn.Module, LoraSite | None]:
    """The decoder without its LM head, and the head as a site."""
    decoder = network.get_decoder()
    if decoder is None or decoder is network:
        decoder = network.base_model
    embedding = network.get_output_embeddings()
    if decoder is network or not isinstance(embedding, nn.Linear):
        raise UserError("it has no decoder and linear unembedding that can be told apart")
    name = next(name for name, module in network.named_modules() if module is embedding)
    site = LoraSite(name=name, group="unembed", in_features=embedding.in_features, out_features=embedding.out_features)
    return decoder, site


def replace_linears(network: nn.Module, decoder: nn.Module, forward_context: ForwardContext) -> list[LoraSite]:
    inside = {id(module) for module in decoder.modules()}
    sites: list[LoraSite] = []
    for name, module in list(network.named_modules()):
        group = _group(name)
        if group is None or id(module) not in inside or not isinstance(module, nn.Linear | Conv1D):
            continue
        in_features, out_features = (
            module.weight.shape if isinstance(module, Conv1D) else (module.in_features, module.out_features)
        )
        site = LoraSite(name=name, group=group, in_features=in_features, out_features=out_features)
        network.set_submodule(name, MultiLoraLinear(module, len(sites), site, forward_context))
        sites.append(site)
    return sites


def join_linears(network: nn.Module, *, fused_columns: int = 0) -> None:
    """``fused_columns``: behind the weight of each layer, joined or alone."""
    for module in network.modules():
        for names in _TOGETHER:
            layers = [layer for name in names if isinstance(layer := getattr(module, name, None), MultiLoraLinear)]
            if len(layers) > 1 and len({layer.site.in_features for layer in layers}) == 1:
                MultiLoraLinear.join(layers, fused_columns=fused_columns)
    if fused_columns:
        for module in network.modules():
            if isinstance(module, MultiLoraLinear) and len(module.sites) == 1:
                MultiLoraLinear.join([module], fused_columns=fused_columns)


def _group(name: str) -> Literal["attn", "mlp"] | None:
    """Which linear layers of a decoder layer adapters may change: ``model.layers.0.mlp.up_proj`` → ``mlp``."""
    match = re.search(r"\.\d+\.(.+)$", name)
    if match is None:
        return None
    parts = match[1].split(".")
    if _FROZEN.intersection(parts):
        return None
    return next((_GROUPS[part] for part in parts if part in _GROUPS), None)


def replace_attention(network: PreTrainedModel) -> None:
    attention.register()
    try:
        network.set_attn_implementation(attention.NAME)
    except (ValueError, KeyError, ImportError) as error:
        raise UserError(f"its attention cannot be replaced ({error})") from error


def make_lm_head(network: PreTrainedModel, site_index: int | None) -> LmHead:
    """The scalings that families put between the last hidden state and the logits, by the names they have in their
    configurations. The self-check compares the result with the model's own logits, so another one is found out."""
    config = network.config.get_text_config()
    embedding = network.get_output_embeddings()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return LmHead(
        embedding.weight,
        getattr(embedding, "bias", None),
        site_index=site_index,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=float(scale),
    )


def eos_token_ids(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    ids: list[Any] = []
    for given in (
        getattr(network.generation_config, "eos_token_id", None),
        getattr(network.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        ids += given if isinstance(given, list | tuple) else [given]
    vocabulary = tokenizer.get_vocab()
    ids += [vocabulary[token] for token in END_OF_TURN if token in vocabulary]
    return tuple(dict.fromkeys(token for token in ids if isinstance(token, int)))


def max_context_length(config: PreTrainedConfig) -> int:
    """Where a rotary scaling looks at the longest sequence of the pass, up to where it begins to."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise UserError(f"its configuration has max_position_embeddings {length}, expected a positive number")
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type", "default")
        if "dynamic" in kind or kind == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            length = min(length, int(original or length))
    return length


def _ropes(parameters: object) -> Iterator[Mapping[str, Any]]:
    """One set of parameters, or one for each kind of layer."""
    if isinstance(parameters, Mapping):
        if "rope_type" in parameters:
            yield parameters
        for inner in parameters.values():
            yield from _ropes(inner)


def shard_layers(
    network: PreTrainedModel,
    decoder: nn.Module,
    device: torch.device,
    shard: Shard,
    *,
    packable: bool,
    num_layers: int,
) -> None:
    """Everything but the layers goes to the device as it is: the head reads its weight, which may be the embedding's,
    outside of any module's call."""
    layers = base.decoder_layers(network, num_layers)
    if not layers or not packable:
        raise UserError("its layers cannot be sharded: they " + ("share no pass" if layers else "are not in one list"))
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for parameter in network.parameters():
        if id(parameter) not in inside:
            parameter.data = parameter.data.to(device)
    for module in network.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    shard(decoder, layers)
    embedding = cast(nn.Module, network.get_input_embeddings())
    # Every layer's backward runs in every pass that has one.
    embedding.register_forward_hook(base.make_inputs_require_grad)
