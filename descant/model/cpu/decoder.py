"""The CPU decoder: a decode step in few plain calls, one token a sequence, no module called inside a layer.

At 8 rows the products of a layer take some 330 µs, and running it as transformers writes it (modules, keywords, views,
temporaries, keys laid out anew for every head) nearly as much again. Here a layer is a record of what its arithmetic
needs, and a step a loop over such records: products of one input are one (a call takes 11 µs), a page's keys and values
are written and read in one go, softmax runs over the rows that are meant and not over those that fill up.

**The bits are those of the modules**, and so the trainer's. ``CpuDecoder.of`` knows one kind of layer (two norms, a
gated MLP, rotary over whole heads, maybe norms of queries and keys), which it takes by the names of its parts, and
then runs a decode step both ways. A model that comes out different in one bit, or has other parts, goes on through
its modules. Why sums have the order they have in ``_attend`` stands in ``attention.blocked``.

Legend: N rows (sequences, and what fills up to 8), S sequences of a reading, B blocks (pages), K key heads, G query
heads of each, M rows of a product, D head size, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from descant.adapters.slots import RowRef
from descant.model.attention.rule import RULES, Rule
from descant.model.attention.tiles import TILE_KEYS
from descant.model.base import BaseModel, make_kv_pool
from descant.model.cpu import prepacked
from descant.model.cpu.layer_records import (
    JOINED,
    LayerRecord,
    Norm,
    given,
    layer_records,
    norm_record,
    product_with_adapters,
)
from descant.model.cpu.stacked_adapters import Product, StackedAdapters, StackedStep
from descant.model.forward_batch import MIN_ROWS, PAGE_TOKENS, ForwardBatch, KVPool, PagedKV
from descant.model.lora.linear import MultiLoraLinear

logger = logging.getLogger(__name__)

MAX_ROWS = prepacked.MAX_ROWS
"""Sequences of a step, at most."""

TRIAL_CONTEXTS = (2, PAGE_TOKENS - 1, PAGE_TOKENS + 5, 9)
"""Of the step that is run both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """S sequences that read the same number of pages. ``rows`` int64 [S], None: all sequences of the step, in order.
    ``pages`` int64 [S · B]; beyond its end a sequence names its own last page, never another's (whose NaN times 0
    is NaN). ``bias`` float32 [S, 1, 1, B · PAGE_TOKENS - masked_from], None where every key is seen.

    Two buffers for all layers: ``queries_SKMD`` float32, whose rows beyond G are 0 and stay so, and
    ``gathered`` float32 [2, S, K, B, PAGE_TOKENS, D].
    """

    rows: torch.Tensor | None
    num_sequences: int
    num_blocks: int
    pages: torch.Tensor
    bias: torch.Tensor | None
    masked_from: int
    queries_SKMD: torch.Tensor
    gathered: torch.Tensor


class CpuDecoder:
    """Made by ``of``. One thread."""

    def __init__(self, model: BaseModel, layers: Sequence[LayerRecord], row_multiple: int):
        self._row_multiple = row_multiple
        decoder: Any = model.decoder
        self._embedding: nn.Module = decoder.embed_tokens
        self._rotary: nn.Module = decoder.rotary_emb
        self._norm = norm_record(decoder.norm)
        self._lm_head = model.lm_head
        self._layers = layers
        self._num_key_heads, self._head_size, _ = model.kv_shapes[0]
        q_width = layers[0].queries_keys_values.product.widths[0]
        self._group = q_width // self._head_size // self._num_key_heads
        products = [p.product for x in layers for p in (x.queries_keys_values, x.output, x.gate_up, x.down)]
        self._lm_head_product: Product | None = None
        if self._lm_head.site_index is not None:
            hidden = self._lm_head.weight_VD.shape[1]
            self._lm_head_product = Product(
                in_features=hidden, outputs=((self._lm_head.site_index,),), widths=(self._lm_head.vocab_size,)
            )
            products.append(self._lm_head_product)
        self._adapters = StackedAdapters(model.bank, products)

    @staticmethod
    @torch.no_grad()
    def of(model: BaseModel, pool: KVPool, *, row_multiple: int = 1) -> CpuDecoder | None:
        """``pool``: whose pages the steps read and write. None where they must go through the modules. Needs prepacked
        weights (``BaseModel.prepack_weights``). ``row_multiple``: a step's rows are filled up to a multiple of it."""
        if not pool.joined or model.lm_head.prepacked is None or len({*model.kv_shapes}) > 1:
            return None
        layers = layer_records(model)
        if layers is None:
            return None
        contexts = [min(context, model.facts.max_context_length - 1) for context in TRIAL_CONTEXTS]
        trial = _Trial(model, contexts)
        rules = trial.expected()
        cpu_decoder = CpuDecoder(
            model,
            [replace(layer, rule=rules[index], pages=trial.pool.joined[index]) for index, layer in enumerate(layers)],
            row_multiple,
        )
        if not trial.equals(cpu_decoder):
            logger.warning("%s decodes through its modules: the CPU decoder's step has other bits", model.facts.name)
            return None
        cpu_decoder._layers = [
            replace(layer, pages=pages) for layer, pages in zip(cpu_decoder._layers, pool.joined, strict=True)
        ]
        for module in model.decoder.modules():
            if isinstance(module, MultiLoraLinear) and module.site.name.rpartition(".")[2] in JOINED:
                module.prepacked = None  # a second time it is not needed
        return cpu_decoder

    @torch.no_grad()
    def logits(
        self,
        tokens: Sequence[int],
        contexts: Sequence[int],
        pages: Sequence[Sequence[int]],
        rows: Sequence[RowRef | None],
        wanted: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """float32 [N, V] after one more token of each of at most ``MAX_ROWS``. ``contexts``: tokens that are in its
        ``pages`` already, or come in rows of this step. ``rows`` sorted (rank bucket, then slot; None anywhere).
        ``wanted``: only of these, at least one; None: of all."""
        padding = self._num_rows(len(tokens)) - len(tokens)
        rows = (*rows, *[None] * padding)
        adapters = self._adapters.step(rows)
        hidden_NH = self._hidden(tokens, contexts, pages, adapters)
        num_wanted = len(tokens)
        if wanted is not None and self._num_rows(len(wanted)) < len(rows):
            num_wanted = len(wanted)
            chosen = (*wanted, *[wanted[-1]] * (self._num_rows(num_wanted) - num_wanted))
            hidden_NH = hidden_NH[list(chosen)]
            adapters = None if adapters is None else self._adapters.among([rows[index] for index in chosen])
            wanted = None
        logits_NV = product_with_adapters(
            hidden_NH, given(self._lm_head.prepacked), self._lm_head.bias_V, self._lm_head_product, adapters
        )
        return self._lm_head.scaled(logits_NV[:num_wanted] if wanted is None else logits_NV[list(wanted)])

    def _num_rows(self, num_sequences: int) -> int:
        return max(MIN_ROWS, -(-num_sequences // self._row_multiple) * self._row_multiple)

    def _hidden(
        self,
        tokens: Sequence[int],
        contexts: Sequence[int],
        pages: Sequence[Sequence[int]],
        adapters: StackedStep | None,
    ) -> torch.Tensor:
        """[N, H] after the final norm, at least 8 rows."""
        num_sequences, K, D = len(tokens), self._num_key_heads, self._head_size
        num_rows, num_queries, half = self._num_rows(num_sequences), K * self._group, D // 2
        padding = [0] * (num_rows - num_sequences)
        positions = np.array([*contexts, *padding], np.int64)
        hidden_NH: torch.Tensor = self._embedding(torch.tensor([*tokens, *padding]))
        cos, sin = (x[0].unsqueeze(1) for x in self._rotary(hidden_NH[None], torch.from_numpy(positions)[None]))
        sin_before, sin_behind = -sin[..., :half], sin[..., half:]
        turned = hidden_NH.new_empty(num_rows, num_queries + K, D)
        turned_before, turned_behind = turned[..., :half], turned[..., half:]
        attended = hidden_NH.new_zeros(num_rows, num_queries * D)
        table = _table(pages)
        cells, begun = self._cells(table, positions[:num_sequences])
        readings: dict[int | None, list[_Reading]] = {}

        for layer in self._layers:
            x_NH = _normed(hidden_NH, layer.before_attention)
            (joined,) = layer.queries_keys_values(x_NH, adapters)
            heads = joined.view(num_rows, -1, D)
            if layer.query_norm is not None and layer.key_norm is not None:
                heads[:, :num_queries] = _normed(heads[:, :num_queries], layer.query_norm)
                heads[:, num_queries:-K] = _normed(heads[:, num_queries:-K], layer.key_norm)
            rotated = heads[:, :-K]
            torch.mul(rotated[..., half:], sin_before, out=turned_before)
            torch.mul(rotated[..., :half], sin_behind, out=turned_behind)
            rotated.mul_(cos).add_(turned)

            if begun is not None:
                layer.pages.index_fill_(0, begun, 0)
            layer.pages.view(-1, D)[cells] = heads[:num_sequences, num_queries:]
            window = layer.rule.window
            if window not in readings:
                readings[window] = list(self._readings(table, positions[:num_sequences], window))
            for reading in readings[window]:
                self._attend(reading, layer, heads, attended)

            (output,) = layer.output(attended, adapters)
            hidden_NH.add_(output)
            x_NH = _normed(hidden_NH, layer.before_mlp)
            gate, up = layer.gate_up(x_NH, adapters)
            # Of rows apart, each would end in a loop's scalar tail, which has other bits in float32.
            (output,) = layer.down(layer.act(gate.contiguous()).mul_(up), adapters)
            hidden_NH.add_(output)
        return _normed(hidden_NH, self._norm)

    def _cells(
        self, table: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where this step's keys and values go, int64 [N, 2 · K] of the pages' vectors counted through; the pages that
        are begun with them (and zeroed first: what an earlier owner left in a page's tail is multiplied by 0)."""
        blocks, cells = np.divmod(positions, PAGE_TOKENS)
        page = table[np.arange(len(positions)), blocks]
        num_heads = 2 * self._num_key_heads
        places = (page[:, None] * num_heads + np.arange(num_heads)) * PAGE_TOKENS + cells[:, None]
        begun = page[cells == 0]
        return torch.from_numpy(places), torch.from_numpy(begun) if len(begun) else None

    def _readings(
        self, table: NDArray[np.int64], positions: NDArray[np.int64], window: int | None
    ) -> Iterator[_Reading]:
        """Sequences of less than twice the blocks of the shortest together, while their keys fit."""
        K, D, M = self._num_key_heads, self._head_size, max(MIN_ROWS, self._group)
        last = positions // PAGE_TOKENS
        first = np.zeros_like(last) if window is None else np.maximum(positions - window + 1, 0) // PAGE_TOKENS
        waiting = np.argsort(first - last, kind="stable")
        while len(waiting):
            num_blocks = (last - first + 1)[waiting]
            together = max(1, TILE_KEYS // (int(num_blocks[0]) * PAGE_TOKENS * K * D))
            size = int((num_blocks[:together] * 2 > num_blocks[0]).sum())
            chosen, waiting = np.sort(waiting[:size]), waiting[size:]
            blocks = np.arange(first[chosen].min(), last[chosen].max() + 1)
            own = np.minimum(blocks, last[chosen, None])
            keys = np.arange(blocks[0] * PAGE_TOKENS, (blocks[-1] + 1) * PAGE_TOKENS)
            seen = keys <= positions[chosen, None]
            if window is not None:
                seen &= keys > positions[chosen, None] - window
            unseen = np.flatnonzero(~seen.all(axis=0))
            masked_from = int(unseen[0]) // PAGE_TOKENS * PAGE_TOKENS if len(unseen) else len(keys)
            bias = np.where(seen[:, masked_from:], np.float32(0), np.float32(-np.inf))
            yield _Reading(
                rows=None if len(chosen) == len(positions) else torch.from_numpy(chosen),
                num_sequences=len(chosen),
                num_blocks=len(blocks),
                pages=torch.from_numpy(table[chosen[:, None], own].reshape(-1)),
                bias=torch.from_numpy(bias)[:, None, None] if len(unseen) else None,
                masked_from=masked_from,
                queries_SKMD=torch.zeros(len(chosen), K, M, D),
                gathered=torch.empty(2, len(chosen), K, len(blocks), PAGE_TOKENS, D),
            )

    def _attend(self, reading: _Reading, layer: LayerRecord, heads: torch.Tensor, attended: torch.Tensor) -> None:
        """``heads`` [N, G · K + 2 K, D]: a row's queries first. Into ``attended`` [N, G · K · D]."""
        S, B, K, G, D = reading.num_sequences, reading.num_blocks, self._num_key_heads, self._group, self._head_size
        own = heads[:S] if reading.rows is None else heads.index_select(0, reading.rows)
        reading.queries_SKMD[:, :, :G].copy_(own[:, : K * G].unflatten(1, (K, G)))
        blocks = layer.pages.index_select(0, reading.pages).view(S, B, 2, K, PAGE_TOKENS, D)
        reading.gathered.copy_(blocks.permute(2, 0, 3, 1, 4, 5))
        keys, values = reading.gathered.view(2, S * K, B * PAGE_TOKENS, D)

        scores = torch.bmm(reading.queries_SKMD.view(S * K, -1, D), keys.transpose(1, 2))
        weights = scores.view(S, K, -1, B * PAGE_TOKENS)[:, :, :G]
        weights.mul_(layer.rule.scaling)
        if (softcap := layer.rule.softcap) is not None:
            weights.div_(softcap).tanh_().mul_(softcap)
        if reading.bias is not None:
            weights[..., reading.masked_from :].add_(reading.bias)
        weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        total = weights.unflatten(-1, (B, PAGE_TOKENS)).sum(-1)
        if B > 1:
            total = total.cumsum(-1)[..., -1:]
        out = torch.bmm(scores[..., :PAGE_TOKENS], values[:, :PAGE_TOKENS])
        for start in range(PAGE_TOKENS, B * PAGE_TOKENS, PAGE_TOKENS):
            block = slice(start, start + PAGE_TOKENS)
            out.baddbmm_(scores[..., block], values[:, block])
        found = out.view(S, K, -1, D)[:, :, :G].div_(total)
        if reading.rows is None:
            attended[:S].view(S, K, G, D).copy_(found)
        else:
            attended[reading.rows] = found.reshape(S, -1).to(attended.dtype)


def _table(pages: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    table = np.zeros((len(pages), max(len(own) for own in pages)), np.int64)
    for index, own in enumerate(pages):
        table[index, : len(own)] = own
    return table


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """[..., H], rounded where transformers rounds."""
    wide = x.float()
    variance = torch.mul(wide, wide).mean(-1, keepdim=True)
    return torch.mul(wide, variance.add_(norm.eps).rsqrt_()).to(x.dtype).mul_(norm.weight)


class _Trial:
    """One decode step of a few sequences, over pages of their own."""

    def __init__(self, model: BaseModel, contexts: Sequence[int]):
        self._model, self._contexts = model, contexts
        self._pages = [(2 * index, 2 * index + 1) for index in range(len(contexts))]
        generator = torch.Generator().manual_seed(0)
        size = model.facts.vocab_size
        self._prompts = [torch.randint(size, (context + 1,), generator=generator) for context in contexts]
        self.pool = make_kv_pool(model.kv_shapes, 2 * len(contexts), dtype=model.dtype, device=model.device)
        self._expected_pool = make_kv_pool(model.kv_shapes, 2 * len(contexts), dtype=model.dtype, device=model.device)
        self._expected_NV: torch.Tensor | None = None

    def expected(self) -> Mapping[int, Rule]:
        """Through the modules; how each layer's attention wants to be computed."""
        self._through_modules([prompt[:-1] for prompt in self._prompts], [0] * len(self._prompts))
        for mine, theirs in zip(self.pool.joined, self._expected_pool.joined, strict=True):
            mine.copy_(theirs)
        self._expected_NV, rules = self._through_modules([prompt[-1:] for prompt in self._prompts], self._contexts)
        return rules

    def equals(self, cpu_decoder: CpuDecoder) -> bool:
        last = [int(prompt[-1]) for prompt in self._prompts]
        logits_NV = cpu_decoder.logits(last, self._contexts, self._pages, [None] * len(last))
        return torch.equal(logits_NV, given(self._expected_NV)) and all(
            torch.equal(mine, theirs) for mine, theirs in zip(self.pool.joined, self._expected_pool.joined, strict=True)
        )

    def _through_modules(
        self, tokens: Sequence[torch.Tensor], contexts: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, Rule]]:
        kv = PagedKV(pool=self._expected_pool, page_table=torch.tensor(self._pages), context_lens=tuple(contexts))
        batch = ForwardBatch(seq_lens=tuple(len(x) for x in tokens), kv=kv)
        rules: dict[int, Rule] = {}
        batch.cache[RULES] = rules
        positions_T = torch.cat([torch.arange(start, start + len(x)) for start, x in zip(contexts, tokens)])
        hidden_TD, _ = self._model.decoder_forward(torch.cat(list(tokens)), positions_T, batch)
        return self._model.lm_head.logits(hidden_TD, None), rules
