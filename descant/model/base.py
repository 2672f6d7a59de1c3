"""The base model as trainer and sampler both see it: frozen weights, adapters from the bank, one forward call."""

from __future__ import annotations

import torch
from torch import nn

from descant.model.bank import AdapterBank
from descant.model.head import Head
from descant.model.lora import LoraChannel, LoraPass
from descant.model.passes import KVPool, Pass
from descant.types import ModelFacts


class BaseModel:
    """Made by ``descant.model.load.load_model``."""

    facts: ModelFacts
    network: nn.Module
    """The transformers causal LM, frozen, in eval mode, its linear layers replaced."""
    bank: AdapterBank
    head: Head
    channel: LoraChannel
    device: torch.device
    dtype: torch.dtype
    packable: bool
    """False: sequences must not share a pass (``facts.packable``); callers pass one sequence at a time."""

    def trunk(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, pass_: Pass
    ) -> tuple[torch.Tensor, LoraPass | None]:
        """Hidden states [T, D] after the final norm, in the base's dtype, and the resolved adapters for the head.

        ``tokens_T``, ``positions_T`` int64 [T] (positions restart in each sequence; with ``kv`` they go on from its
        context). Records a graph iff grad is enabled; the gradient of the adapters then goes into ``pass_``'s gradient
        rows when the caller runs backward from the hidden states, with the base's parameters untouched.
        """
        raise NotImplementedError

    def make_kv_pool(self, num_pages: int) -> KVPool:
        """Zeroed pages for every layer."""
        raise NotImplementedError

    def kv_bytes_per_token(self) -> int:
        raise NotImplementedError

    def tokenizer(self) -> object:
        """The model's ``PreTrainedTokenizerBase``, loaded at first use (the sampler's stop strings need it)."""
        raise NotImplementedError
