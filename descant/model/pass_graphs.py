"""Training and scoring passes of the decoder captured as CUDA graphs, forward and backward.

A pass of a small model takes the device 10 ms and the host 100 ms, which launches thousands of kernels. Replayed, it
takes the host one launch each way. A graph is made for a number of tokens, of sequences, of keys of the longest one,
and a widest rank bucket; the pass's own tokens, lengths and adapters lie in one buffer on the device that never moves.

What a pass has less than its graph is filled up: with tokens of sequences that are nobody's and have no adapter, with
sequences of no tokens, with tiles of no tokens. None of them is read or adds to a gradient.

Graphs share one memory pool, as if they were passes one after another, and so hold as much as the largest takes. A pass
is captured when the first of its like comes, which takes as long as two passes. All are made for the widest rank bucket
that has come so far, ``lora.kernels.MIN_RANK`` at least, so that the company of a pass makes no graphs of its own.
Larger passes, for which the launches do not matter, are never captured; nor is what waits for the device within a pass,
or goes to other kernels than those that find everything by address.

Legend: T tokens of the graph, B its sequences, C its tiles, N its spans, K its keys.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from descant.model.attention.packed import PackedLengths, captured_cache
from descant.model.base import BaseModel
from descant.model.forward_batch import ForwardBatch, context_lens, stream_rows
from descant.model.graph_recording import record
from descant.model.kernel_launch import compiling_kernels
from descant.model.lora.batch import LoraBatch
from descant.model.lora.linear import MultiLoraLinear
from descant.model.lora.products import has_kernels
from descant.pauses import paused

if TYPE_CHECKING:
    from descant.model.lora.kernels import TileSegment

logger = logging.getLogger(__name__)

MIN_TOKENS = 256

SEQUENCES = (128, 512, 2048)
"""Of a graph, and segments."""

LENGTHS = (1024, 4096, 16384)
"""Of the longest sequence of a graph, in tokens and keys."""

MEMORY_SHARE = 1 / 8
"""Of the device's memory that the activations of a captured pass may take."""

MAX_GRAPHS = 64

WARM_UP_TOKENS = 2048
"""Of the largest pass that is captured before any is needed."""

LATENCY_FLOPS = 1e12
"""Of a pass that takes the device little more than the latency of its kernels, a few milliseconds on an H100: what it
is filled up with costs nothing, and so its graphs need no sizes between powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """What a graph is made for. ``keys``: 0 where no sequence shares a prefix, and the keys are the tokens."""

    tokens: int
    sequences: int
    longest: int
    keys: int
    rank: int
    backward: bool

    @property
    def tiles(self) -> int:
        from descant.model.lora.kernels import TILE_TOKENS

        return -(-self.tokens // TILE_TOKENS) + 2 * (self.sequences + 1)  # a gap before and after each segment

    @property
    def spans(self) -> int:
        from descant.model.lora.kernels import SPAN_TOKENS

        return -(-self.tokens // SPAN_TOKENS) + self.sequences


def tokens_of_graph(num_tokens: int, *, finer_from: int = 2 * MIN_TOKENS) -> int:
    """The smallest size of a graph for so many: a power of two and, beyond ``finer_from``, itself one, three sizes
    between two of them."""
    size = MIN_TOKENS
    while size < num_tokens:
        size *= 2
    quarter = size // 8
    if size <= finer_from:
        return size
    return size // 2 + quarter * -(-(num_tokens - size // 2) // quarter)


def graph_key(
    seq_lens: Sequence[int],
    contexts: Sequence[int],
    num_segments: int,
    *,
    rank: int,
    backward: bool,
    finer_from: int = 2 * MIN_TOKENS,
) -> GraphKey | None:
    """None: too many sequences for any graph, or too long. ``contexts``: tokens of each sequence's prefix;
    ``finer_from``: see ``tokens_of_graph``."""
    num_tokens, shares = sum(seq_lens), any(contexts)
    # Keys that only fill up name the last token, which must be nobody's.
    tokens = tokens_of_graph(num_tokens + shares, finer_from=finer_from)
    longest = max(length + context for length, context in zip(seq_lens, contexts, strict=True))
    longest = next((size for size in LENGTHS if size >= longest), 0)
    if longest == 0:
        return None
    num_sequences = max(len(seq_lens) + -(-(tokens - num_tokens) // longest), num_segments)
    sequences = next((size for size in SEQUENCES if size >= num_sequences), 0)
    if sequences == 0:
        return None
    keys, wanted = 0, tokens + sum(contexts)
    if shares:
        keys = tokens
        while keys < wanted:
            keys *= 2
    return GraphKey(tokens=tokens, sequences=sequences, longest=longest, keys=keys, rank=rank, backward=backward)


def fill_lengths(
    key: GraphKey, seq_lens: Sequence[int], contexts: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where queries and keys of each sequence end, int32 [B + 1] both: the pass's own, then tokens that only fill up,
    then sequences of none."""
    missing = key.tokens - sum(seq_lens)
    padding = [key.longest] * (missing // key.longest)
    padding += [missing % key.longest] if missing % key.longest else []
    lengths = np.zeros(key.sequences + 1, np.int32)
    lengths[1 : len(seq_lens) + 1] = seq_lens
    lengths[len(seq_lens) + 1 : len(seq_lens) + 1 + len(padding)] = padding
    key_lengths = lengths.copy()
    key_lengths[1 : len(seq_lens) + 1] += np.asarray(contexts, np.int32)
    return lengths.cumsum(dtype=np.int32), key_lengths.cumsum(dtype=np.int32)


def fill_keys(key: GraphKey, batch: ForwardBatch) -> NDArray[np.int64]:
    """The token of the stream that each key is, int64 [K]."""
    rows = np.full(key.keys, key.tokens - 1, np.int64)
    own = np.concatenate(
        [*stream_rows(batch.seq_lens, batch.prefixes), np.arange(batch.num_tokens, key.tokens, dtype=np.int64)]
    )
    rows[: len(own)] = own
    return rows


def fill_tiles(key: GraphKey, segments: Sequence[TileSegment]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``Tiles.tiles_C4`` and ``spans_N4``; all that fills up has no tokens."""
    from descant.model.lora.kernels import tile_rows

    own, base_only, spans = tile_rows(segments, key.tokens)
    tiles_C4, spans_N4 = np.zeros((key.tiles, 4), np.int64), np.zeros((key.spans, 4), np.int64)
    found = own + base_only
    tiles_C4[: len(found)] = found
    if spans:
        spans_N4[: len(spans)] = spans
    return tiles_C4, spans_N4


class _PassInputs:
    """One buffer on the device, int64, and its fields. Lengths are int32: two in a number."""

    def __init__(self, key: GraphKey, device: torch.device):
        ends = key.sequences // 2 + 1
        sizes = (4 * key.tiles, 4 * key.spans, ends, ends, key.keys)
        self._buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        tiles, spans, query_ends, key_ends, key_rows = self._buffer.split(sizes)
        self.tiles_C4, self.spans_N4 = tiles.view(-1, 4), spans.view(-1, 4)
        self.query_ends, self.key_ends = (x.view(torch.int32)[: key.sequences + 1] for x in (query_ends, key_ends))
        self.key_rows = key_rows if key.keys else None
        self.tokens_T = torch.zeros(key.tokens, dtype=torch.int64, device=device)
        self.positions_T = torch.zeros_like(self.tokens_T)

    def fill(self, key: GraphKey, batch: ForwardBatch, segments: Sequence[TileSegment]) -> None:
        """In one copy, for which nothing waits."""
        contexts = context_lens(batch.seq_lens, batch.prefixes)
        ends = np.zeros((2, key.sequences + 2), np.int32)
        ends[:, :-1] = fill_lengths(key, batch.seq_lens, contexts)
        keys = [fill_keys(key, batch)] if key.keys else []
        parts = [*(x.ravel() for x in fill_tiles(key, segments)), *ends.view(np.int64), *keys]
        host = torch.from_numpy(np.concatenate(parts)).pin_memory()
        self._buffer.copy_(host, non_blocking=True)


@dataclass(slots=True, kw_only=True)
class _CapturedPass:
    """``hidden_TD``, ``dhidden_TD``: what the forward writes and the backward reads."""

    inputs: _PassInputs
    forward: Any
    hidden_TD: torch.Tensor
    backward: Any
    dhidden_TD: torch.Tensor | None


class PassGraphs:
    """``decoder_forward`` of one model. One thread; a pass's backward runs before the next pass's forward."""

    def __init__(self, model: BaseModel):
        self._model = model
        self._graphs: dict[GraphKey, _CapturedPass] = {}
        self._rank = 0
        """The widest that has come so far."""
        self._memory: Any = None
        self._stream: Any = None
        self._max_tokens = _max_tokens(model)
        self._finer_from = _finer_from(model)
        # The gradient of what is replayed goes to gradient rows: without an input that asks for one, no backward runs.
        self._grad_anchor = torch.zeros((), requires_grad=True)

    def decoder_forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, LoraBatch | None]:
        """As ``BaseModel.decoder_forward``. Hidden states of a replayed pass are overwritten by the next."""
        lora = LoraBatch.of(batch, self._model.bank)
        captured = None if lora is None else self._captured(batch, lora)
        if captured is None or lora is None:
            return self._model.hidden_states(tokens_T, positions_T, batch, lora), lora
        graph, inputs, num_tokens = captured.forward, captured.inputs, batch.num_tokens
        inputs.tokens_T[:num_tokens].copy_(tokens_T)
        inputs.positions_T[:num_tokens].copy_(positions_T)
        graph.replay()
        hidden_TD = captured.hidden_TD[:num_tokens]
        if captured.dhidden_TD is None:
            return hidden_TD, lora
        replayed: torch.Tensor = _Replayed.apply(self._grad_anchor, hidden_TD, captured, lora)
        return replayed, lora

    def warm_up(self) -> None:
        """Compiles the adapters' kernels, and captures small passes: no request waits for that."""
        if self._max_tokens == 0:
            return
        from descant.model.lora.kernels import MAX_RANK, MIN_RANK

        start = time.monotonic()
        with compiling_kernels():
            for rank in (MIN_RANK, MAX_RANK):
                self._trial_pass(rank)
        logger.info("kernels of training compiled in %.0f s", time.monotonic() - start)
        start = time.monotonic()
        for key in self._usual_keys(MIN_RANK):
            captured = self._try_to_capture(key) if key.tokens <= self._max_tokens else None
            if captured is not None:
                self._graphs[key] = captured
        logger.info("training passes captured in %.0f s", time.monotonic() - start)

    def _usual_keys(self, rank: int) -> Iterator[GraphKey]:
        """Of small passes of short sequences that share nothing, and of some that share a prompt."""
        scored = GraphKey(
            tokens=MIN_TOKENS, sequences=SEQUENCES[0], longest=LENGTHS[0], keys=0, rank=rank, backward=False
        )
        yield scored
        size = MIN_TOKENS
        while size <= WARM_UP_TOKENS:
            for keys in (0, 2 * size):
                yield replace(scored, tokens=size, keys=keys, backward=True)
            size = tokens_of_graph(size + 1, finer_from=self._finer_from)

    def _trial_pass(self, rank: int) -> None:
        """Of tokens without an adapter, as if they had one of ``rank``, the head included."""
        model = self._model
        key = graph_key([MIN_TOKENS], [0], 1, rank=rank, backward=True)
        assert key is not None
        inputs, batch, lora = self._inputs(key)
        with torch.enable_grad():
            hidden_TD = model.hidden_states(inputs.tokens_T, inputs.positions_T, batch, lora)
            head = model.lm_head.logprobs(
                hidden_TD, inputs.tokens_T[:, None], lora, loss=lambda _, logprobs_CK: -logprobs_CK
            )
            hidden_TD.backward(head.dhidden_TD)

    def clear(self, *, short_of_memory: bool = False) -> None:
        """Gives their memory back. ``short_of_memory``: from now on they take half of it."""
        if self._graphs:
            torch.cuda.synchronize()
            self._graphs.clear()
            self._memory = None
        if short_of_memory and self._max_tokens:
            self._max_tokens //= 2
            logger.warning("memory is short: passes of more than %d tokens are not captured", self._max_tokens)

    def _captured(self, batch: ForwardBatch, lora: LoraBatch) -> _CapturedPass | None:
        """Filled with the pass's own numbers; None if it is not to be replayed."""
        if not 0 < batch.num_tokens <= self._max_tokens:
            return None
        from descant.model.lora.kernels import MAX_RANK, MIN_RANK  # loads Triton, which not every machine has

        if lora.widest > MAX_RANK:
            return None
        self._rank = max(self._rank, lora.widest, MIN_RANK)
        key = graph_key(
            batch.seq_lens,
            context_lens(batch.seq_lens, batch.prefixes),
            len(lora.segments),
            rank=self._rank,
            backward=torch.is_grad_enabled(),
            finer_from=self._finer_from,
        )
        if key is None or key.tokens > self._max_tokens:
            return None
        captured = self._graphs.pop(key, None)
        if captured is None:
            captured = self._try_to_capture(key)
            if captured is None:
                return None
        self._graphs[key] = captured  # the last one used is the last to go
        captured.inputs.fill(key, batch, lora.tile_segments())
        return captured

    def _try_to_capture(self, key: GraphKey) -> _CapturedPass | None:
        if len(self._graphs) >= MAX_GRAPHS:
            torch.cuda.synchronize()
            del self._graphs[next(iter(self._graphs))]
        try:
            with paused("build"):
                return self._capture(key)
        except torch.OutOfMemoryError:
            logger.warning("no memory to capture passes of %d tokens, which makes them slower", key.tokens)
            self._max_tokens = key.tokens - 1
        except Exception as error:  # of the compiler, of a kernel that cannot be captured, of ours
            logger.warning("training passes are not captured, which makes small ones slower: %s", error)
            self._max_tokens = 0
        torch.cuda.synchronize()
        return None

    def _inputs(self, key: GraphKey) -> tuple[_PassInputs, ForwardBatch, LoraBatch]:
        """Of a pass without tokens of anybody's, and what reads them."""
        from descant.model.lora.kernels import Tiles

        inputs = _PassInputs(key, self._model.device)
        inputs.fill(key, ForwardBatch(seq_lens=()), ())
        lengths = PackedLengths(
            query_ends=inputs.query_ends,
            key_ends=inputs.key_ends,
            longest_query=key.longest,
            longest_key=key.longest,
            key_rows=inputs.key_rows,
        )
        batch = ForwardBatch(seq_lens=(key.tokens,), cache=captured_cache(lengths))
        tiles = Tiles(tiles_C4=inputs.tiles_C4, spans_N4=inputs.spans_N4, num_own=key.tiles, rank=key.rank)
        lora = LoraBatch.of_tiles(tiles, self._model.bank, key.tokens, requires_grad=key.backward)
        return inputs, batch, lora

    def _capture(self, key: GraphKey) -> _CapturedPass:
        start, model = time.monotonic(), self._model
        inputs, batch, lora = self._inputs(key)
        dhidden_TD = None
        if key.backward:
            hidden_size = model.lm_head.weight_VD.shape[1]
            dhidden_TD = torch.zeros(key.tokens, hidden_size, dtype=model.dtype, device=model.device)

        def forward() -> torch.Tensor:
            return model.hidden_states(inputs.tokens_T, inputs.positions_T, batch, lora)

        if self._memory is None:
            self._memory, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        with torch.set_grad_enabled(key.backward):
            hidden_TD = forward()  # a trial: compiles, chooses, allocates
            if dhidden_TD is not None:
                hidden_TD.backward(dhidden_TD)
            del hidden_TD
            with torch.cuda.stream(self._stream):
                graph, hidden_TD = record(forward, self._memory)
                backward = None
                if dhidden_TD is not None:
                    backward, _ = record(lambda: hidden_TD.backward(dhidden_TD), self._memory)
        logger.info("captured %s in %.0f ms", key, 1e3 * (time.monotonic() - start))
        return _CapturedPass(
            inputs=inputs, forward=graph, hidden_TD=hidden_TD.detach(), backward=backward, dhidden_TD=dhidden_TD
        )


class _Replayed(torch.autograd.Function):
    """The hidden states of a pass whose forward has been replayed; its backward is the other graph."""

    @staticmethod
    def forward(
        ctx: Any, grad_anchor: torch.Tensor, hidden_TD: torch.Tensor, captured: _CapturedPass, lora: LoraBatch
    ) -> torch.Tensor:
        ctx.captured, ctx.lora = captured, lora  # which holds the slabs that the gradients go to
        return hidden_TD.view_as(hidden_TD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, ...]:
        captured, (grad_TD,) = ctx.captured, grad_outputs
        captured.dhidden_TD[: len(grad_TD)].copy_(grad_TD)
        captured.dhidden_TD[len(grad_TD) :].zero_()
        captured.backward.replay()
        return None, None, None, None


def _finer_from(model: BaseModel) -> int:
    """See ``tokens_of_graph``."""
    params = sum(site.in_features * site.out_features for site in model.bank.sites if site.group != "unembed")
    size = 2 * MIN_TOKENS
    while 2 * size * 6 * params <= LATENCY_FLOPS:
        size *= 2
    return min(size, LENGTHS[-1])


def _max_tokens(model: BaseModel) -> int:
    """Of a pass that is captured; 0 for none."""
    if model.device.type != "cuda" or model.dtype is not torch.bfloat16 or not has_kernels(model.device):
        return 0
    if model.sharded or model.has_experts or not model.packable or model.activation_memory is None:
        return 0
    from descant.model.lora.kernels import MAX_SITES

    for linear in (module for module in model.network.modules() if isinstance(module, MultiLoraLinear)):
        if linear.site.in_features % 8 or linear.site.out_features % 8 or len(linear.sites) > MAX_SITES:
            return 0
    _, total_bytes = torch.cuda.mem_get_info(model.device)
    sizes, size = [0], MIN_TOKENS
    while size <= 1 << 17:
        sizes.append(size)
        size = tokens_of_graph(size + 1)
    return max(n for n in sizes if model.activation_memory.needed(n, 0) <= total_bytes * MEMORY_SHARE or n == 0)
