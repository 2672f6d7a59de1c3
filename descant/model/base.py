"""The base model as trainer and sampler both see it: frozen weights, adapters from the bank, one forward call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from descant.model import decode, packed
from descant.model.bank import AdapterBank
from descant.model.head import Head
from descant.model.lora import LoraChannel, LoraPass, MultiLoraLinear
from descant.model.passes import PAGE_TOKENS, KVPool, Pass
from descant.types import ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_ROWS = 8
"""Fewer tokens than this are filled up: matrix products of a few rows take other kernels, whose last bits differ."""


class BaseModel:
    """Made by ``descant.model.load.load_model``."""

    def __init__(
        self,
        *,
        facts: ModelFacts,
        directory: Path,
        network: nn.Module,
        decoder: nn.Module,
        bank: AdapterBank,
        head: Head,
        channel: LoraChannel,
        kv_shapes: Mapping[int, tuple[int, int, int]],
        device: torch.device,
        dtype: torch.dtype,
    ):
        """``decoder``: the network without its head. ``kv_shapes``: layer → (key heads, size of a key, of a value)."""
        self.facts = facts
        self.directory = directory
        self.network = network
        """The transformers causal LM, frozen, in eval mode, its linear layers replaced."""
        self.bank = bank
        self.head = head
        self.channel = channel
        self.device = device
        self.dtype = dtype
        self.kv_shapes = tuple(kv_shapes[layer] for layer in sorted(kv_shapes))
        self._decoder = decoder
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def packable(self) -> bool:
        """False: sequences must not share a pass; callers pass one sequence at a time."""
        return self.facts.packable

    def trunk(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, pass_: Pass
    ) -> tuple[torch.Tensor, LoraPass | None]:
        """Hidden states [T, D] after the final norm, in the base's dtype, and the resolved adapters for the head.

        ``tokens_T``, ``positions_T`` int64 [T] (positions restart in each sequence; with ``kv`` they go on from its
        context). Records a graph iff grad is enabled; the gradient of the adapters then goes into ``pass_``'s gradient
        rows when the caller runs backward from the hidden states, with the base's parameters untouched.
        """
        lora = LoraPass.of(pass_, self.bank)
        self.channel.current = lora
        try:
            return forward(self._decoder, tokens_T, positions_T, pass_), lora
        finally:
            self.channel.current = None

    def decode_trunk(
        self,
        tokens_N: torch.Tensor,
        positions_N: torch.Tensor,
        pass_: decode.DecodePass,
        adapters: decode.DecodeAdapters,
    ) -> torch.Tensor:
        """Hidden states [N, D] of one new token a sequence; N at least 8. Reads nothing back from the device."""
        self.channel.current = adapters
        try:
            return forward(self._decoder, tokens_N, positions_N, pass_)
        finally:
            self.channel.current = None

    def pack_weights(self) -> None:
        """For faster decode steps on CPU, at the cost of a second copy of the linear layers (see ``packed``)."""
        linears = [m for m in self.network.modules() if isinstance(m, MultiLoraLinear)]
        num_bytes = sum(linear.weight.nbytes for linear in linears) + self.head.weight_VD.nbytes
        if num_bytes > packed.MAX_BYTES or self.head.packed is not None:
            return
        for linear in linears:
            linear.packed = packed.pack(linear.weight_OI, linear.bias)
        self.head.packed = packed.pack(self.head.weight_VD, self.head.bias_V)

    def make_kv_pool(self, num_pages: int) -> KVPool:
        """Zeroed pages for every layer."""
        return make_kv_pool(self.kv_shapes, num_pages, dtype=self.dtype, device=self.device)

    def kv_bytes_per_token(self) -> int:
        return sum(heads * (key + value) for heads, key, value in self.kv_shapes) * self.dtype.itemsize

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded at first use (the sampler's stop strings need it)."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.directory)
        return self._tokenizer


def forward(
    decoder: nn.Module, tokens_T: torch.Tensor, positions_T: torch.Tensor, pass_: Pass | decode.DecodePass
) -> torch.Tensor:
    """Hidden states [T, D] of a decoder whose attention is ours. No transformers cache, whatever its name."""
    num_tokens = len(tokens_T)
    if num_tokens < MIN_ROWS:
        tokens_T, positions_T = (F.pad(x, (0, MIN_ROWS - num_tokens)) for x in (tokens_T, positions_T))
    options: dict[str, Any] = {"use_cache": False, "plan": pass_}
    output = decoder(input_ids=tokens_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), **options)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[0, :num_tokens]


def make_kv_pool(
    kv_shapes: Sequence[tuple[int, int, int]], num_pages: int, *, dtype: torch.dtype, device: torch.device
) -> KVPool:
    def pages(heads: int, size: int) -> torch.Tensor:
        return torch.zeros(num_pages, heads, PAGE_TOKENS, size, dtype=dtype, device=device)

    return KVPool(
        keys=tuple(pages(heads, key) for heads, key, _ in kv_shapes),
        values=tuple(pages(heads, value) for heads, _, value in kv_shapes),
    )
