"""A frozen linear layer with many adapters, as a module that stands where the base's layer stood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from descant.adapters.layout import LoraSite
from descant.errors import ServerError
from descant.model import paged_batch
from descant.model.cpu import prepacked
from descant.model.lora.batch import LoraBatch
from descant.model.lora.operators import LoraLinearFunction
from descant.model.lora.products import lora_linear


@dataclass(slots=True)
class ForwardContext:
    """How a forward batch's adapters reach the layers (transformers hands keywords to attention only). A plain
    attribute, read in forward and kept in the autograd context: on CUDA, backward runs in another thread, where no
    context variable is seen. One per base model; ``BaseModel.decoder_forward`` sets it for the length of the call.

    ``num_recomputed``: of the first decoder layers, which keep no activations (``model.activation_checkpointing``).
    ``joined_outputs``: an input that several layers share, and their outputs (see ``MultiLoraLinear``).
    """

    current: LoraBatch | paged_batch.PagedBatch | None = None
    num_recomputed: int = 0
    joined_outputs: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None


class MultiLoraLinear(nn.Module):
    """Stands where ``base`` (``nn.Linear``, or transformers' transposed ``Conv1D``) stood.

    Layers that are called one after another on the same tensor (q, k, v; gate and up) can be joined: their weights then
    lie one above the other and are one product, and so are the adapters' on the narrow side. The first to be called
    computes for all, the others find their outputs in the forward_context.
    """

    def __init__(self, base: nn.Module, site_index: int, site: LoraSite, forward_context: ForwardContext):
        super().__init__()
        if not isinstance(base, nn.Linear | Conv1D):
            raise ServerError(f"{site.name} is a {type(base).__name__}, expected Linear or Conv1D")
        self.base = base
        self.site_index = site_index
        self.site = site
        self.forward_context = forward_context
        self.sites: tuple[int, ...] = (site_index,)
        """Of all layers that are joined with this one, in order."""
        self.prepacked: torch.Tensor | None = None
        """None of a layer that is joined."""
        self.fused_WI: torch.Tensor | None = None
        """The joint weight with rows for LoRA A's behind it, which decode steps take (``model.lora.fused_a``)."""
        # The first layer's input needs no gradient and gradient rows are no autograd leaves: without an input that
        # asks for a gradient, autograd would record no backward at all.
        self._grad_anchor = torch.zeros((), requires_grad=True)
        self._position = 0
        self._widths: list[int] = [site.out_features]
        self._joint: tuple[torch.Tensor, torch.Tensor | None] | None = None
        # A number that differs from layer to layer would make a graph for each: the sites are a tensor's contents.
        self._sites = torch.tensor([site_index])
        if self.weight_OI.shape != (site.out_features, site.in_features):
            raise ServerError(
                f"{site.name} has a weight of shape {tuple(self.weight_OI.shape)}, "
                f"expected ({site.out_features}, {site.in_features})"
            )

    @staticmethod
    def join(layers: Sequence[MultiLoraLinear], *, fused_columns: int = 0) -> None:
        """They are called on one tensor, in this order. Their weights become parts of one tensor; nothing is joined
        where biases, kinds or dtypes differ.

        Behind them lie ``fused_columns`` of zeros for each layer, also for one that is alone. Not where there are
        biases: a product with one that leaves room in its rows is two kernels."""
        bases = [layer.base for layer in layers]
        if len({(type(base), base.weight.dtype, base.bias is None) for base in bases}) > 1 or not isinstance(
            bases[0], nn.Linear
        ):
            return
        bias_O = None if bases[0].bias is None else torch.cat([base.bias.data for base in bases])
        num_out = sum(layer.site.out_features for layer in layers)
        num_fused = fused_columns * len(layers) if bias_O is None else 0
        if len(layers) == 1 and num_fused == 0:
            return
        weight_WI = bases[0].weight.data.new_zeros(num_out + num_fused, layers[0].site.in_features)
        weight_OI = torch.cat([base.weight.data for base in bases], out=weight_WI[:num_out])
        for layer in layers:
            layer.fused_WI = weight_WI if num_fused else None
        if len(layers) == 1:
            bases[0].weight.data = weight_OI
            return
        start = 0
        for position, layer in enumerate(layers):
            end = start + layer.site.out_features
            layer.base.weight.data = weight_OI[start:end]
            if bias_O is not None:
                layer.base.bias.data = bias_O[start:end]
            layer._position, start = position, end
            layer._widths = [each.site.out_features for each in layers]
            layer.sites = tuple(each.site_index for each in layers)
            layer._sites = torch.tensor(layer.sites)
            layer._joint, layer.prepacked = (weight_OI, bias_O), None

    @property
    def weight(self) -> torch.Tensor:
        """The base's, as it lies there (some transformers code asks a layer for its weight's dtype)."""
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    @property
    def weight_OI(self) -> torch.Tensor:
        return self.base.weight.t() if isinstance(self.base, Conv1D) else self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out] in the base's dtype, leading dims flattened to the pass's T."""
        lora = self.forward_context.current
        if not isinstance(lora, paged_batch.PagedBatch) and (
            lora is None or not (torch.compiler.is_compiling() or lora.trained(self.site_index))
        ):
            return self._base_alone(x)
        if self._joint is None:
            y_TO = self._output(x, self.weight_OI, self.bias, lora)
        else:
            given = self.forward_context.joined_outputs
            if self._position > 0 and given is not None and given[0] is x:
                outputs = given[1]
            else:
                outputs = self._output(x, *self._joint, lora).split(self._widths, dim=1)
            self.forward_context.joined_outputs = (x, outputs) if self._position < len(self._widths) - 1 else None
            y_TO = outputs[self._position]
        return y_TO.view(*x.shape[:-1], self.site.out_features)

    def joined(self, x: torch.Tensor) -> torch.Tensor | None:
        """[T, sum of widths]: what this layer and those joined with it make of ``x``, uncut. None where they are not
        computed at once: nothing is joined behind this one, or the pass is none of training's."""
        lora = self.forward_context.current
        if self._joint is None or self._position > 0 or lora is None or isinstance(lora, paged_batch.PagedBatch):
            return None
        if not (torch.compiler.is_compiling() or any(lora.trained(site) for site in self.sites)):
            return None
        return self._output(x, *self._joint, lora)

    def _base_alone(self, x: torch.Tensor) -> torch.Tensor:
        if self.prepacked is not None and prepacked.serves(self.prepacked, x):
            return prepacked.linear(x, self.prepacked, self.bias)
        if prepacked.is_onednn(x):
            return prepacked.product(x, self.weight_OI, self.bias, None)
        y: torch.Tensor = self.base(x)
        return y

    def _output(
        self,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        lora: LoraBatch | paged_batch.PagedBatch,
    ) -> torch.Tensor:
        """Of all layers that are joined: [T, sum of widths]."""
        x_TI = x.reshape(-1, self.site.in_features)
        if isinstance(lora, paged_batch.PagedBatch):
            weight_WI = weight_OI if self.fused_WI is None else self.fused_WI
            paged: torch.Tensor = torch.ops.descant.paged_linear(
                x_TI, weight_WI, bias_O, lora.handle, self._sites, self._widths
            )
            return paged
        if torch.is_grad_enabled():
            recorded: torch.Tensor = LoraLinearFunction.apply(
                x_TI, self._grad_anchor, weight_OI, bias_O, lora.handle, self._sites, self._widths
            )
            return recorded
        if torch.compiler.is_compiling():
            scored: torch.Tensor = torch.ops.descant.lora_linear(
                x_TI, weight_OI, bias_O, lora.handle, self._sites, self._widths, False
            )
            return scored
        y_TO, _ = lora_linear(
            x_TI, weight_OI, bias_O, self.sites, self._widths, lora, prepacked_weight=self.prepacked, want_saved=False
        )
        return y_TO
