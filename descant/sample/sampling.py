"""From logits to tokens: temperature, top-k, top-p, then inverse-CDF sampling. Everything is per row.

A row's outcome is a function of that row alone (its logits, its parameters, its uniform number): ties at a cut go to
the lowest token ids instead of to whatever order a sort leaves, and sums run in an order that the number of rows does
not change. Rows without top-k and top-p never sort; rows with them first look at their largest ``HEAD_TOKENS`` logits,
and sort the whole vocabulary only where these do not reach the cut.

Legend: N rows, M rows of a subset, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from descant.sample.rng import uniforms
from descant.sample.scores import MAX_ALTERNATIVES, PromptChunk, PromptRows

HEAD_TOKENS = 1024
BLOCK_TOKENS = 256
_MIN_TEMPERATURE = 1e-30
"""Below it float32 knows no difference: the largest logit has all the mass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """How one row is sampled. ``uniform`` in [0, 1) (``rng.uniform``). ``temperature`` 0: the largest logit."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float


def normaliser(logits_NV: torch.Tensor) -> torch.Tensor:
    """logsumexp [N, 1]. A single row is doubled: reduced alone, a long one is shared among threads and its last bits
    differ from what it gives among others."""
    if len(logits_NV) == 1:
        return logits_NV.repeat(2, 1).logsumexp(dim=1, keepdim=True)[:1]
    return logits_NV.logsumexp(dim=1, keepdim=True)


def likeliest(logits_NV: torch.Tensor, temperatures: Sequence[float], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``min(k, V)`` most likely tokens a row: ids int64 [N, K] and log-probabilities float32 [N, K], falling, of
    the distribution that ``sample_tokens`` gives log-probabilities of."""
    scaled_NV = _scaled(logits_NV, temperatures)
    top = scaled_NV.topk(min(k, scaled_NV.shape[1]), dim=1)
    return top.indices, top.values - normaliser(scaled_NV)


def alternatives(
    logits_NV: torch.Tensor, temperature: float, uniform_NK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several independent samples a row without cuts, one for each of ``uniform_NK`` (float64): ids int64 [N, K] and
    their log-probabilities at temperature 1, float32 [N, K]."""
    if temperature == 0:
        ids_NK = logits_NV.argmax(dim=1, keepdim=True).expand(uniform_NK.shape)
    else:
        scaled_NV = _scaled(logits_NV, [temperature] * len(logits_NV))
        ids_NK = _inverse_cdf(scaled_NV - normaliser(scaled_NV), uniform_NK)
    return ids_NK, logits_NV.gather(1, ids_NK) - normaliser(logits_NV)


LikeliestRow = tuple[tuple[int, ...], tuple[float, ...]]
"""Ids and log-probabilities, falling."""


def likeliest_rows(logits_NV: torch.Tensor, asked: Sequence[tuple[float, int]]) -> list[LikeliestRow]:
    """``likeliest`` on the host, of (temperature, k) a row."""
    ids_NK, logprobs_NK = likeliest(logits_NV, [t for t, _ in asked], max(k for _, k in asked))
    return [
        (tuple(ids[:k]), tuple(logprobs[:k]))
        for ids, logprobs, (_, k) in zip(ids_NK.tolist(), logprobs_NK.tolist(), asked, strict=True)
    ]


def _scaled(logits_NV: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """At temperature 0 the logits as they are."""
    divisors = [max(t, _MIN_TEMPERATURE) if t else 1.0 for t in temperatures]
    if all(t == 1.0 for t in divisors):
        return logits_NV
    return logits_NV / torch.tensor(divisors, dtype=torch.float32, device=logits_NV.device)[:, None]


def sample_tokens(
    logits_NV: torch.Tensor, rows: Sequence[RowParams], *, head_tokens: int = HEAD_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row: ids int64 [N] and their log-probabilities float32 [N], of the temperature-scaled distribution
    before the cuts (at temperature 0 of the distribution at 1). A row that is not finite has a log-probability that is
    not finite, and harms no other."""
    device = logits_NV.device
    scaled_NV = _scaled(logits_NV, [row.temperature for row in rows])
    normaliser_N1 = normaliser(scaled_NV)
    tokens_N = torch.empty(len(rows), dtype=torch.int64, device=device)

    for greedy in (True, False):
        chosen = [i for i, row in enumerate(rows) if (row.temperature == 0) == greedy]
        if not chosen:
            continue
        whole = len(chosen) == len(rows)
        index_M = torch.tensor(chosen, device=device)
        scaled_MV = scaled_NV if whole else scaled_NV[index_M]
        if greedy:
            tokens_N[index_M] = scaled_MV.argmax(dim=1)
            continue
        logprobs_MV = scaled_MV - (normaliser_N1 if whole else normaliser_N1[index_M])
        params = [rows[i] for i in chosen]
        _cut(logprobs_MV, params, head_tokens)
        uniform_M = torch.tensor([row.uniform for row in params], dtype=torch.float64, device=device)
        tokens_N[index_M] = _inverse_cdf(logprobs_MV, uniform_M[:, None])[:, 0]

    logprobs_N1 = scaled_NV.gather(1, tokens_N[:, None]) - normaliser_N1
    return tokens_N, logprobs_N1.squeeze(1)


def _cut(logprobs_MV: torch.Tensor, rows: Sequence[RowParams], head_tokens: int) -> None:
    """Sets to -inf, in place, what top-k and then top-p (of the mass that top-k left) exclude."""
    vocab_size = logprobs_MV.shape[1]
    cuts = [i for i, row in enumerate(rows) if 0 < row.top_k < vocab_size or row.top_p < 1]
    if not cuts:
        return
    head_tokens = min(head_tokens, vocab_size)
    deep: list[int] = []
    keep: dict[int, tuple[float, int]] = {}  # row → smallest log-probability kept, how many are kept
    part_CV = logprobs_MV[cuts]
    values_CH = part_CV.topk(head_tokens, dim=1).values
    for index, found in zip(cuts, _bounds(values_CH, [rows[i] for i in cuts], vocab_size), strict=True):
        if found is None:
            deep.append(index)
        else:
            keep[index] = found
    if deep:
        values_DV = logprobs_MV[deep].sort(dim=1, descending=True).values
        for index, found in zip(deep, _bounds(values_DV, [rows[i] for i in deep], vocab_size), strict=True):
            if found is not None:  # never None: all values are there
                keep[index] = found

    index_C = torch.tensor(cuts, device=logprobs_MV.device)
    least_C1 = torch.tensor([keep[i][0] for i in cuts], dtype=torch.float32, device=logprobs_MV.device)[:, None]
    count_C1 = torch.tensor([keep[i][1] for i in cuts], device=logprobs_MV.device)[:, None]
    part_CV.masked_fill_(part_CV < least_C1, -torch.inf)
    excess_C1 = (part_CV >= least_C1).sum(dim=1, keepdim=True) - count_C1
    for row in (excess_C1 > 0).nonzero()[:, 0].tolist():  # ties at the cut, more than it keeps: the last ids go
        tied = (part_CV[row] == least_C1[row]).nonzero().squeeze(1)
        part_CV[row, tied[len(tied) - int(excess_C1[row]) :]] = -torch.inf
    logprobs_MV[index_C] = part_CV


def _bounds(values_CH: torch.Tensor, rows: Sequence[RowParams], vocab_size: int) -> list[tuple[float, int] | None]:
    """For each row, from its largest log-probabilities (falling): the smallest one kept and how many are kept. None
    where the answer lies beyond these values."""
    num_values = values_CH.shape[1]
    mass_CH = values_CH.double().exp().cumsum(dim=1)
    k = [row.top_k if 0 < row.top_k < vocab_size else vocab_size for row in rows]
    last_C1 = torch.tensor([min(n, num_values) - 1 for n in k], device=values_CH.device)[:, None]
    # Of a whole row the mass is 1 but for rounding; the sum itself makes sure that the bound is reached.
    total_C1 = mass_CH.gather(1, last_C1)
    beyond_C1 = torch.tensor([n > num_values for n in k], device=values_CH.device)[:, None]
    total_C1 = torch.where(beyond_C1, torch.ones_like(total_C1), total_C1)
    top_p_C1 = torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=values_CH.device)[:, None]
    position_C1 = torch.searchsorted(mass_CH, top_p_C1 * total_C1)
    missing_C1 = beyond_C1 & (position_C1 >= num_values)
    position_C1 = torch.where(top_p_C1 < 1, torch.minimum(position_C1, last_C1), last_C1)
    least_C1 = values_CH.gather(1, position_C1)
    columns = torch.cat([least_C1.double(), position_C1.double(), missing_C1.double()], dim=1).tolist()
    return [
        None if missing or (row.top_p == 1 and n > num_values) else (least, int(position) + 1)
        for (least, position, missing), row, n in zip(columns, rows, k, strict=True)
    ]


def _inverse_cdf(logprobs_MV: torch.Tensor, uniform_MK: torch.Tensor) -> torch.Tensor:
    """The tokens at which the running sum of probabilities passes ``uniform`` of their total; int64 [M, K].

    Sums are float64, over blocks first and then inside one block: a running sum over the whole vocabulary in float64
    costs twenty times as much. A token without probability is never sampled.
    """
    num_rows, vocab_size = logprobs_MV.shape
    padding = -vocab_size % BLOCK_TOKENS
    probs_MBT = F.pad(logprobs_MV, (0, padding), value=-torch.inf).exp_().view(num_rows, -1, BLOCK_TOKENS)
    blocks_MB = probs_MBT.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target_MK = uniform_MK * blocks_MB[:, -1:]
    block_MK = torch.searchsorted(blocks_MB, target_MK, right=True).clamp_max_(blocks_MB.shape[1] - 1)
    before_MK = F.pad(blocks_MB, (1, 0)).gather(1, block_MK)
    inside_MKT = probs_MBT[torch.arange(num_rows, device=block_MK.device)[:, None], block_MK].double().cumsum(dim=2)
    place_MK = torch.searchsorted(inside_MKT, (target_MK - before_MK)[..., None], right=True)[..., 0]
    # The two ways to sum a block may differ in the last bit: then its last token with probability is meant.
    last_MK = (inside_MKT >= inside_MKT[..., -1:]).to(torch.uint8).argmax(dim=2)
    return (block_MK * BLOCK_TOKENS + torch.minimum(place_MK, last_MK)).clamp_max_(vocab_size - 1)


def score_rows(chunk: PromptChunk, first: int, last: int, logits_SV: torch.Tensor) -> PromptRows:
    """What is asked about rows ``first:last`` of the chunk."""
    device = logits_SV.device
    normaliser_S1 = normaliser(logits_SV)
    targets_S1 = torch.from_numpy(chunk.targets[first:last]).to(device)[:, None]
    logprobs_S = (logits_SV.gather(1, targets_S1) - normaliser_S1)[:, 0].cpu().numpy()
    topk_ids = topk_logprobs = cells = alternative_ids = alternative_logprobs = None
    if chunk.topk:
        ids_SK, logprobs_SK = likeliest(logits_SV, [1.0] * (last - first), chunk.topk)
        topk_ids, topk_logprobs = ids_SK.int().cpu().numpy(), logprobs_SK.cpu().numpy()
    if chunk.row_starts is not None and chunk.token_ids is not None:
        starts = chunk.row_starts[first : last + 1]
        rows_C = torch.from_numpy(np.repeat(np.arange(last - first), np.diff(starts))).to(device)
        ids_C = torch.from_numpy(chunk.token_ids[starts[0] : starts[-1]].clip(min=0)).to(device)
        cells = (logits_SV[rows_C, ids_C] - normaliser_S1[rows_C, 0]).cpu().numpy()
    if chunk.num_alternatives:
        rows_S1 = np.arange(chunk.first_row + first, chunk.first_row + last, dtype=np.uint64)[:, None]
        offsets_SK = rows_S1 * np.uint64(MAX_ALTERNATIVES) + np.arange(chunk.num_alternatives, dtype=np.uint64)
        uniform_SK = torch.from_numpy(uniforms(np.full(offsets_SK.shape, chunk.seed, np.uint64), offsets_SK)).to(device)
        ids_SK, logprobs_SK = alternatives(logits_SV, chunk.temperature, uniform_SK)
        alternative_ids, alternative_logprobs = ids_SK.cpu().numpy(), logprobs_SK.cpu().numpy()
    return PromptRows(
        logprobs=logprobs_S,
        topk_ids=topk_ids,
        topk_logprobs=topk_logprobs,
        cells=cells,
        alternative_ids=alternative_ids,
        alternative_logprobs=alternative_logprobs,
    )
