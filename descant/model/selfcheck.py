"""Is this model one whose sequences meet only inside the attention function? Asked of every model that is loaded.

Tokens of several tenants share a pass. A model that lets neighbours meet elsewhere (linear attention, convolution,
state space) or that reads something off the whole pass would mix them without an error, so random sequences go through
the network as transformers wrote it, and through ours alone, packed, beside other neighbours, and over KV pages.

Small models are checked in float32, to ``TOLERANCE`` or what transformers' own two attentions are apart; one of more
than ``FLOAT32_PARAMETERS`` in its own dtype, where rounding hides what is below ``HALF_TOLERANCE``: what a neighbour
leaks is then seen by changing the neighbour only. In all a dozen short passes.

Legend: L tokens of a sequence, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from descant.errors import UserError
from descant.model.attention.rule import KV_SHAPES
from descant.model.base import forward, make_kv_pool
from descant.model.forward_batch import PAGE_TOKENS, ForwardBatch, PagedKV
from descant.model.lm_head import LmHead

TOLERANCE = 1e-4
"""Of the largest logit (or hidden state), in float32."""

HALF_TOLERANCE = 5e-2
"""The same in bfloat16 or float16."""

MAX_NOISE = 5e-4
"""More than this between transformers' own two attentions is no rounding: sdpa of 5.17 drops Gemma 2's soft cap."""

FLOAT32_PARAMETERS = 1_000_000_000

LENGTHS = (5, PAGE_TOKENS + 6, 12)
"""Sequences of the check: shorter and longer than a page."""

KVShapes = dict[int, tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckResult:
    """``packable`` False: right alone, wrong beside others."""

    packable: bool
    kv_shapes: KVShapes


def random_sequences(vocab_size: int, max_length: int, device: torch.device) -> list[torch.Tensor]:
    """int64 [L] each, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, max_length) for length in LENGTHS]
    return [torch.randint(vocab_size, (length,), generator=generator).to(device) for length in lengths]


NOT_THROUGH_THE_INTERFACE = (
    "its layers do not attend through transformers' attention interface, or do not hand on to it all that they are "
    "called with"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """``logits`` of each sequence by transformers' eager attention, float32 [L, V]. ``noise``: how far its two
    implementations are apart, relative to the largest logit. Random tokens drive deep models to points where one
    rounding decides (2e-4 in SmolLM2, one token in a hundred): no tolerance can be tighter than that."""

    logits: list[torch.Tensor]
    noise: float


@torch.no_grad()
def reference(network: PreTrainedModel, sequences: Sequence[torch.Tensor]) -> Reference:
    """By the network as transformers made it, one sequence at a time."""

    def run(tokens_L: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = network(input_ids=tokens_L.unsqueeze(0), use_cache=False).logits
        return logits[0].float()

    longest = max(range(len(sequences)), key=lambda i: len(sequences[i]))
    as_loaded = run(sequences[longest])
    try:
        network.set_attn_implementation("eager")
    except (ValueError, KeyError, ImportError):  # its attention cannot be chosen
        return Reference(logits=[run(tokens_L) for tokens_L in sequences], noise=0.0)
    logits = [run(tokens_L) for tokens_L in sequences]
    return Reference(logits=logits, noise=min(_difference(as_loaded, logits[longest]), MAX_NOISE))


@contextmanager
def in_float32(network: nn.Module) -> Iterator[None]:
    """Parameters as float32, and afterwards the very tensors that were there. Buffers stay as they are."""
    kept = [(parameter, parameter.data) for parameter in network.parameters()]
    try:
        for parameter, data in kept:
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


@torch.no_grad()
def selfcheck(
    decoder: nn.Module,
    lm_head: LmHead,
    sequences: Sequence[torch.Tensor],
    reference: Reference | None,
    *,
    num_layers: int,
    tolerance: float,
) -> SelfCheckResult:
    """Raises ``UserError`` with the reason alone; the caller names the architecture. ``reference`` None: only what can
    be seen without comparing."""
    batch = ForwardBatch(seq_lens=tuple(len(tokens) for tokens in sequences[:1]))
    kv_shapes: KVShapes = {}
    batch.cache[KV_SHAPES] = kv_shapes
    try:
        forward(decoder, sequences[0], _positions(sequences[0]), batch)
    except (TypeError, ValueError, NotImplementedError) as error:
        if not kv_shapes:
            raise UserError(NOT_THROUGH_THE_INTERFACE) from error
        raise
    if sorted(kv_shapes) != list(range(num_layers)):
        raise UserError(
            f"{len(kv_shapes)} of its {num_layers} layers attend through transformers' attention interface; in the "
            "others tokens meet elsewhere (linear attention, convolution or state space)"
        )

    if reference is None:
        return SelfCheckResult(packable=True, kv_shapes=kv_shapes)
    tolerance = max(tolerance, 4 * reference.noise)
    alone = [_run(decoder, [tokens])[0] for tokens in sequences]
    for tokens, hidden, want in zip(sequences, alone, reference.logits):
        wrong = _difference(lm_head.logits(hidden, None), want)
        if not wrong <= tolerance:
            raise UserError(
                f"its logits for {len(tokens)} tokens differ from transformers' own by {wrong:.1e} of the largest, "
                f"expected {tolerance:.0e}"
            )
    shapes = tuple(kv_shapes[layer] for layer in range(num_layers))
    if _is_packable(decoder, sequences, alone, shapes, tolerance):
        return SelfCheckResult(packable=True, kv_shapes=kv_shapes)
    for tokens, want in zip(sequences, alone):
        wrong = _difference(_run_paged(decoder, [tokens], shapes)[0], want)
        if not wrong <= tolerance:
            raise UserError(
                f"its hidden states over KV pages differ from those of one pass by {wrong:.1e} of the largest, "
                f"expected {tolerance:.0e}"
            )
    return SelfCheckResult(packable=False, kv_shapes=kv_shapes)


def _is_packable(
    decoder: nn.Module,
    sequences: Sequence[torch.Tensor],
    alone: Sequence[torch.Tensor],
    kv_shapes: Sequence[tuple[int, int, int]],
    tolerance: float,
) -> bool:
    packed = _run(decoder, sequences)
    paged = _run_paged(decoder, sequences, kv_shapes)
    if any(not _difference(got, want) <= tolerance for run in (packed, paged) for got, want in zip(run, alone)):
        return False
    # The same shapes with other tokens in every second sequence: only a leak can change the rest; or, by a rounding, an
    # expert that got another number of tokens.
    beside_others = _run(decoder, [tokens.flip(0) if i % 2 else tokens for i, tokens in enumerate(sequences)])
    if not any("experts" in name.split(".") for name, _ in decoder.named_parameters()):
        tolerance = TOLERANCE
    return all(_difference(beside_others[i], packed[i]) <= tolerance for i in range(0, len(sequences), 2))


def _positions(tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + len(tokens), device=tokens.device)


def _run(decoder: nn.Module, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    batch = ForwardBatch(seq_lens=tuple(len(tokens) for tokens in sequences))
    positions = torch.cat([_positions(tokens) for tokens in sequences])
    return list(forward(decoder, torch.cat(list(sequences)), positions, batch).split(list(batch.seq_lens)))


def _run_paged(
    decoder: nn.Module, sequences: Sequence[torch.Tensor], kv_shapes: Sequence[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """Each sequence in three passes: most of it, all but one token, and a decode step."""
    lengths = [len(tokens) for tokens in sequences]
    num_pages = max(-(-length // PAGE_TOKENS) for length in lengths)
    example = next(decoder.parameters())
    pool = make_kv_pool(kv_shapes, num_pages * len(sequences), dtype=example.dtype, device=example.device)
    table = torch.arange(num_pages * len(sequences)).view(len(sequences), num_pages)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for cut in (
        [(0, length * 2 // 3) for length in lengths],
        [(length * 2 // 3, length - 1) for length in lengths],
        [(length - 1, length) for length in lengths],
    ):
        members = [i for i, (start, end) in enumerate(cut) if start < end]
        if not members:
            continue
        kv = PagedKV(pool=pool, page_table=table[members], context_lens=tuple(cut[i][0] for i in members))
        chunks = [sequences[i][slice(*cut[i])] for i in members]
        batch = ForwardBatch(seq_lens=tuple(len(chunk) for chunk in chunks), kv=kv)
        positions = torch.cat([_positions(chunk, cut[i][0]) for i, chunk in zip(members, chunks)])
        hidden = forward(decoder, torch.cat(chunks), positions, batch)
        for i, part in zip(members, hidden.split(list(batch.seq_lens))):
            parts[i].append(part)
    return [torch.cat(part) for part in parts]


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest, relative to the largest; NaN counts as infinite."""
    difference: Any = (got.float() - want.float()).abs().max() / want.float().abs().max()
    return float(torch.nan_to_num(difference, nan=float("inf")))
