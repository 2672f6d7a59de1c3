"""The base model as trainer and sampler both see it: frozen weights, adapters from the bank, one forward call."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from descant.adapters.bank import AdapterBank
from descant.model import paged_batch
from descant.model.activation_checkpointing import ActivationMemory
from descant.model.cpu import prepacked
from descant.model.forward_batch import MIN_ROWS, PAGE_TOKENS, ForwardBatch, KVPool
from descant.model.lm_head import LmHead
from descant.model.lora.batch import LoraBatch
from descant.model.lora.fused_a import FusedLoraA
from descant.model.lora.linear import ForwardContext, MultiLoraLinear
from descant.pauses import watch_compiler
from descant.types import ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 269
"""No size of any model equals it: a graph made with T equal to another size would serve such passes alone."""


class BaseModel:
    """Made by ``descant.model.load.load_model``."""

    def __init__(
        self,
        *,
        facts: ModelFacts,
        directory: Path,
        public_name: str,
        network: nn.Module,
        decoder: nn.Module,
        bank: AdapterBank,
        lm_head: LmHead,
        forward_context: ForwardContext,
        kv_shapes: Mapping[int, tuple[int, int, int]],
        device: torch.device,
        dtype: torch.dtype,
        sharded: bool = False,
    ):
        """``public_name``: what others know the base by, no path. ``decoder``: the network without its LM head.
        ``kv_shapes``: layer → (key heads, size of a key, of a value). ``sharded``: the layers are spread over several
        ranks, which have to make every pass alike (``empty_pass``)."""
        self.facts = facts
        self.directory = directory
        self.public_name = public_name
        self.network = network
        """The transformers causal LM, frozen, in eval mode, its linear layers replaced."""
        self.bank = bank
        self.lm_head = lm_head
        self.forward_context = forward_context
        self.device = device
        self.dtype = dtype
        self.kv_shapes = tuple(kv_shapes[layer] for layer in sorted(kv_shapes))
        self.sharded = sharded
        self.compiled = False
        """Passes without KV pages, with adapters, take the layers' graphs (see ``compile_layers``)."""
        self.fused_lora_a: FusedLoraA | None = None
        """Room for the A's of adapters behind the weights, on CUDA."""
        self.activation_memory: ActivationMemory | None = None
        """What passes keep for their backward, as the warm-up found; None: unknown, nothing is recomputed."""
        self._has_graphs = False
        self.decoder = decoder
        """The network without its LM head."""
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def packable(self) -> bool:
        """False: sequences must not share a pass; callers pass one sequence at a time."""
        return self.facts.packable

    def decoder_forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, LoraBatch | None]:
        """Hidden states [T, D] after the final norm, in the base's dtype, and the resolved adapters for the head.

        ``tokens_T``, ``positions_T`` int64 [T] (positions restart in each sequence; with ``kv`` they go on from its
        context). Records a graph iff grad is enabled; the gradient of the adapters then goes into ``batch``'s gradient
        rows when the caller runs backward from the hidden states, with the base's parameters untouched.
        """
        lora = LoraBatch.of(batch, self.bank)
        return self.hidden_states(tokens_T, positions_T, batch, lora), lora

    def hidden_states(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: ForwardBatch, lora: LoraBatch | None
    ) -> torch.Tensor:
        """``decoder_forward`` with adapters that are resolved already."""
        compiled = self.compiled and batch.kv is None and lora is not None
        self.forward_context.current = lora
        self.forward_context.num_recomputed = (
            self._recomputed_layers(batch.num_tokens) if torch.is_grad_enabled() else 0
        )
        try:
            with nullcontext() if compiled else self.eager():
                hidden_TD = forward(self.decoder, tokens_T, positions_T, batch)
        finally:
            self.forward_context.current = self.forward_context.joined_outputs = None
        if compiled and hidden_TD.requires_grad:
            held: torch.Tensor = _KeepAlive.apply(hidden_TD, batch, lora)
            return held
        return hidden_TD

    def _recomputed_layers(self, num_tokens: int) -> int:
        if self.activation_memory is None or self.sharded:  # ranks would not agree on the number
            return 0
        return self.activation_memory.recomputed_layers(num_tokens, self.free_bytes())

    def free_bytes(self) -> float:
        """Of the device's memory, for tensors of this process; infinite where it is not counted (CPU)."""
        if self.device.type != "cuda":
            return math.inf
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    @property
    def has_experts(self) -> bool:
        """Which tokens meet which weights is decided inside the pass."""
        return has_experts(self.network)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers; none where the network does not keep them in one list."""
        return decoder_layers(self.network, len(self.kv_shapes))

    def compile_layers(self, layers: Sequence[nn.Module]) -> None:
        """Compiles the LM head's elementwise work and each of ``layers``, and makes the graphs of a pass with and
        without a backward. They serve every pass, whatever its tokens, lengths and adapters: T alone varies in them.
        What cannot be compiled runs as it is, and the log says so."""
        start = time.monotonic()
        watch_compiler()
        for layer in layers:
            layer.compile(dynamic=True)
        embedding: nn.Module = self.network.get_input_embeddings()  # type: ignore[operator]
        hook = embedding.register_forward_hook(make_inputs_require_grad)
        self.lm_head.compiled, self.compiled, self._has_graphs = True, len(layers) > 0, len(layers) > 0
        try:
            for grad in (True, False):
                with torch.set_grad_enabled(grad), torch._inductor.config.patch(size_asserts=False):
                    self._warm_up_pass()
        except Exception:  # of the compiler: from Dynamo's own to a C compiler that is missing
            logger.warning("%s runs without torch.compile, which failed", self.facts.name, exc_info=True)
            self.compiled = self.lm_head.compiled = False
        else:
            logger.info("%s compiled in %.0f s", self.facts.name, time.monotonic() - start)
        self._measure_activations()
        if not layers:  # only compiled ones need it in every pass: theirs are the two graphs that were just made
            hook.remove()

    def _warm_up_decoder(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [T], hidden states [T, D])"""
        batch, lora = ForwardBatch(seq_lens=(WARM_UP_TOKENS,)), LoraBatch(segments=())
        positions_T = torch.arange(WARM_UP_TOKENS, device=self.device)
        tokens_T = positions_T % self.facts.vocab_size
        return tokens_T, self.hidden_states(tokens_T, positions_T, batch, lora)

    def _warm_up_pass(self) -> None:
        tokens_T, hidden_TD = self._warm_up_decoder()
        output = self.lm_head.logprobs(hidden_TD, tokens_T[:, None], None, loss=lambda _, logprobs_CK: -logprobs_CK)
        if hidden_TD.requires_grad:
            hidden_TD.backward(output.dhidden_TD)

    def _measure_activations(self) -> None:
        """By what a pass keeps when everything has been compiled. It has no adapters, for which plain layers keep the
        inputs of their products besides (compiled ones always do)."""
        if self.device.type != "cuda":
            return
        gc.collect()  # what is freed meanwhile would count against what is kept
        before = torch.cuda.memory_allocated(self.device)
        with torch.enable_grad(), torch._inductor.config.patch(size_asserts=False):
            kept = self._warm_up_decoder()
        num_bytes = torch.cuda.memory_allocated(self.device) - before
        del kept
        num_layers, hidden_size = len(self.layers), self.lm_head.weight_VD.shape[1]
        if not self.compiled:
            linears = [m for m in self.network.modules() if isinstance(m, MultiLoraLinear)]
            inputs = sum(m.site.in_features for m in linears if m.sites[0] == m.site_index)
            num_bytes += inputs * WARM_UP_TOKENS * self.dtype.itemsize
        if num_layers:
            self.activation_memory = ActivationMemory(
                num_layers=num_layers,
                layer=num_bytes / num_layers / WARM_UP_TOKENS,
                input=hidden_size * self.dtype.itemsize,
                fixed=self.lm_head.chunk_bytes(),
            )

    def empty_pass(self, *, backward: bool) -> None:
        """For a rank without items while others have some, where the layers are sharded."""
        positions_T = torch.arange(MIN_ROWS, device=self.device)
        with torch.set_grad_enabled(backward):
            hidden_TD, _ = self.decoder_forward(
                positions_T % self.facts.vocab_size, positions_T, ForwardBatch(seq_lens=(MIN_ROWS,))
            )
            if backward:
                hidden_TD.backward(torch.zeros_like(hidden_TD))

    def paged_decoder_forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: paged_batch.PagedBatch
    ) -> torch.Tensor:
        """Hidden states [T, D] of a step over the KV pages on CUDA; T at least 8 in a decode step, which reads nothing
        back from the device. Within ``eager``, or with the layers' calls replaced by others: their graphs are for
        passes without pages."""
        self.forward_context.current = batch
        try:
            return forward(self.decoder, tokens_T, positions_T, batch)
        finally:
            self.forward_context.current = self.forward_context.joined_outputs = None

    def eager(self) -> AbstractContextManager[object]:
        """While it lasts, layers that have graphs run without them."""
        return torch.compiler.set_stance("force_eager") if self._has_graphs else nullcontext()

    def prepack_weights(self) -> None:
        """For faster decode steps on CPU, at the cost of a second copy of the linear layers (see ``prepacked``). Joined
        layers, which are there to be compiled, stay as they are, and so do sharded ones."""
        if self.sharded:
            return
        linears = [m for m in self.network.modules() if isinstance(m, MultiLoraLinear) and len(m.sites) == 1]
        num_bytes = sum(linear.weight.nbytes for linear in linears) + self.lm_head.weight_VD.nbytes
        if num_bytes > prepacked.MAX_BYTES or self.lm_head.prepacked is not None:
            return
        for linear in linears:
            linear.prepacked = prepacked.prepack(linear.weight_OI, linear.bias)
        self.lm_head.prepacked = prepacked.prepack(self.lm_head.weight_VD, self.lm_head.bias_V)

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


class _KeepAlive(torch.autograd.Function):
    """Keeps what compiled layers know by number only alive as long as the autograd graph."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: torch.Tensor, *held: object) -> torch.Tensor:
        ctx.held = held
        return hidden_TD.view_as(hidden_TD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad_outputs[0], None, None


def make_inputs_require_grad(embedding: nn.Module, inputs: object, output: torch.Tensor) -> None:
    """A forward hook: with it the first layer is like all others (frozen embeddings need no gradient), and one graph
    serves them all."""
    if torch.is_grad_enabled() and output.is_leaf:
        output.requires_grad_()


def has_experts(network: nn.Module) -> bool:
    return any("experts" in name.split(".") for name, _ in network.named_modules())


def decoder_layers(network: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """None where the network does not keep them in one list."""
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return ()


def forward(
    decoder: nn.Module, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: ForwardBatch | paged_batch.PagedBatch
) -> torch.Tensor:
    """Hidden states [T, D] of a decoder whose attention is ours. No transformers cache, whatever its name."""
    num_tokens = len(tokens_T)
    if num_tokens < MIN_ROWS:
        tokens_T, positions_T = (F.pad(x, (0, MIN_ROWS - num_tokens)) for x in (tokens_T, positions_T))
    options: dict[str, Any] = {"use_cache": False, "batch": batch}
    output = decoder(input_ids=tokens_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), **options)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[0, :num_tokens]


def make_kv_pool(
    kv_shapes: Sequence[tuple[int, int, int]], num_pages: int, *, dtype: torch.dtype, device: torch.device
) -> KVPool:
    def pages(*shape: int) -> torch.Tensor:
        return torch.zeros(num_pages, *shape, dtype=dtype, device=device)

    if device.type == "cpu" and all(key == value for _, key, value in kv_shapes):
        joined = tuple(pages(2, heads, PAGE_TOKENS, size) for heads, size, _ in kv_shapes)
        return KVPool(keys=tuple(x[:, 0] for x in joined), values=tuple(x[:, 1] for x in joined), joined=joined)
    return KVPool(
        keys=tuple(pages(heads, PAGE_TOKENS, key) for heads, key, _ in kv_shapes),
        values=tuple(pages(heads, PAGE_TOKENS, value) for heads, _, value in kv_shapes),
    )
