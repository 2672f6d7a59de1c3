"""A model's layers as the CPU decoder runs them: records of what their arithmetic needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from descant.model.attention.rule import Rule
from descant.model.base import BaseModel
from descant.model.cpu import prepacked
from descant.model.cpu.stacked_adapters import Product, StackedStep
from descant.model.lora.linear import MultiLoraLinear

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ATTENTION_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
JOINED = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepackedLinear:
    """All of ``product``, one above the other, prepacked. ``widths`` of its outputs."""

    product: Product
    weight: torch.Tensor
    bias: torch.Tensor | None
    widths: tuple[int, ...]

    def __call__(self, x_NI: torch.Tensor, adapters: StackedStep | None) -> Sequence[torch.Tensor]:
        """[N, O] of each part, not contiguous where there are several."""
        y_NO = product_with_adapters(x_NI, self.weight, self.bias, self.product, adapters)
        return (y_NO,) if len(self.widths) == 1 else y_NO.split(self.widths, dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """``pages`` [P, 2, K, PAGE_TOKENS, D]."""

    before_attention: Norm
    queries_keys_values: PrepackedLinear
    query_norm: Norm | None
    key_norm: Norm | None
    output: PrepackedLinear
    before_mlp: Norm
    gate_up: PrepackedLinear
    act: nn.Module
    down: PrepackedLinear
    rule: Rule
    pages: torch.Tensor


def product_with_adapters(
    x_NI: torch.Tensor,
    weight: torch.Tensor,
    bias_O: torch.Tensor | None,
    product: Product | None,
    adapters: StackedStep | None,
) -> torch.Tensor:
    """Base and adapters, as ``lora.lora_linear`` adds them up. ``weight`` prepacked."""
    addition_NO = None if adapters is None or product is None else adapters.addition(x_NI, product)
    if addition_NO is None or adapters is None or product is None:
        return prepacked.linear(x_NI, weight, bias_O)
    y_NO = prepacked.linear_add(x_NI, weight, addition_NO)
    if bias_O is not None:
        y_NO.add_(bias_O)
        if (base_only_N1 := adapters.base_only(product)) is not None:
            y_NO = torch.where(base_only_N1, prepacked.linear(x_NI, weight, bias_O), y_NO)
    return y_NO


def given(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def layer_records(model: BaseModel) -> list[LayerRecord] | None:
    """By the names of their parts. Their rules and pages come later; None where there is more, or less, than
    expected, or a weight that could not be prepacked."""
    decoder: Any = model.decoder
    if _children(decoder) != _DECODER or type(decoder.embed_tokens) is not nn.Embedding:
        return None
    records: list[LayerRecord] = []
    for layer in decoder.layers:
        if _children(layer) != _LAYER or not _MLP - {"act_fn"} <= _children(layer.mlp) <= _MLP:
            return None
        attention, mlp = layer.self_attn, layer.mlp
        if _children(attention) not in (_ATTENTION, _ATTENTION | _ATTENTION_NORMS):
            return None
        has_norms = _children(attention) >= _ATTENTION_NORMS
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if has_norms else []
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        gate, up = mlp.gate_proj, mlp.up_proj
        queries_keys_values = _joined(qkv, (tuple(linear.site_index for linear in qkv),))
        output, down = _one(attention.o_proj), _one(mlp.down_proj)
        gate_up = _joined([gate, up], ((gate.site_index,), (up.site_index,)))
        if not all(hasattr(norm, "variance_epsilon") for norm in norms):
            return None
        if queries_keys_values is None or output is None or gate_up is None or down is None:
            return None
        records.append(
            LayerRecord(
                before_attention=norm_record(layer.input_layernorm),
                queries_keys_values=queries_keys_values,
                query_norm=norm_record(attention.q_norm) if has_norms else None,
                key_norm=norm_record(attention.k_norm) if has_norms else None,
                output=output,
                before_mlp=norm_record(layer.post_attention_layernorm),
                gate_up=gate_up,
                act=mlp.act_fn,
                down=down,
                rule=Rule(scaling=1.0, window=None, softcap=None),
                pages=torch.empty(0),
            )
        )
    return records


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def norm_record(module: Any) -> Norm:
    return Norm(weight=module.weight.detach(), eps=module.variance_epsilon)


def _one(linear: MultiLoraLinear) -> PrepackedLinear | None:
    if linear.prepacked is None:
        return None
    product = _product_of([linear], ((linear.site_index,),))
    return PrepackedLinear(product=product, weight=linear.prepacked, bias=linear.bias, widths=product.widths)


def _joined(linears: Sequence[MultiLoraLinear], outputs: tuple[tuple[int, ...], ...]) -> PrepackedLinear | None:
    """``outputs``: the sites of each."""
    biases = [linear.bias for linear in linears]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        return None
    bias_O = None if biases[0] is None else torch.cat([given(bias) for bias in biases])
    weight = prepacked.prepack(torch.cat([linear.weight_OI for linear in linears]), bias_O)
    if weight is None:
        return None
    width = {linear.site_index: linear.site.out_features for linear in linears}
    widths = tuple(sum(width[site] for site in sites) for sites in outputs)
    return PrepackedLinear(product=_product_of(linears, outputs), weight=weight, bias=bias_O, widths=widths)


def _product_of(linears: Sequence[MultiLoraLinear], outputs: tuple[tuple[int, ...], ...]) -> Product:
    return Product(
        in_features=linears[0].site.in_features,
        outputs=outputs,
        widths=tuple(linear.site.out_features for linear in linears),
    )
