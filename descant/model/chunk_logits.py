"""What is computed of a chunk's logits: log-probabilities of targets, entropies, and gradients.

Legend: P target positions, V vocabulary, K targets a position, C tokens of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def target_cells(rows_P: torch.Tensor, targets_PK: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Where the targets lie in the chunk's logits, counted through, int64 [P, K]."""
    return targets_PK + rows_P[:, None] * vocab_size


def normaliser_and_entropy(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [C] both. ``logsumexp`` in its own steps and to its bits, since their exponentials give the entropy as
    well: for one more product and sum, without another exponential or buffer."""
    largest_C1 = logits_CV.amax(1, keepdim=True)
    largest_C1 = largest_C1.masked_fill(largest_C1.abs() == torch.inf, 0.0)
    exp_CV = (logits_CV - largest_C1).exp_()
    sum_C = exp_CV.sum(1)
    normaliser_C = sum_C.log() + largest_C1[:, 0]
    mean_logit_C = exp_CV.mul_(logits_CV).sum(1) / sum_C
    return normaliser_C, (normaliser_C - mean_logit_C).clamp(min=0.0)  # rounding may leave a sure one below


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPositions:
    """Several target positions a row, for kernels that know one target a row: they take each row's first, and what the
    others' targets get is moved there afterwards. ``slope_P`` and ``first_slope_P``: of the scaled and capped logit, at
    a position's target and at its row's first."""

    rows_P: torch.Tensor
    targets_P: torch.Tensor
    first_targets_C: torch.Tensor
    logits_P: torch.Tensor
    slope_P: torch.Tensor
    first_slope_P: torch.Tensor

    @staticmethod
    def of(
        rows_P: torch.Tensor, targets_P: torch.Tensor, logits_CV: torch.Tensor, scale: float, softcap: float | None
    ) -> TargetPositions:
        rows_C = torch.arange(len(logits_CV), device=rows_P.device)
        first_C = torch.searchsorted(rows_P, rows_C).clamp(max=len(rows_P) - 1)  # any, for a row without one
        first_targets_C = targets_P[first_C]

        def at(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = _scaled_logits(logits_CV[rows_P, targets], scale, softcap)
            slope = torch.ones_like(logits) if softcap is None else 1 - (logits / softcap).square()
            return logits, slope * scale

        logits_P, slope_P = at(targets_P)
        return TargetPositions(
            rows_P=rows_P,
            targets_P=targets_P,
            first_targets_C=first_targets_C,
            logits_P=logits_P,
            slope_P=slope_P,
            first_slope_P=at(first_targets_C[rows_P])[1],
        )

    def sum_by_row(self, dlogprobs_P: torch.Tensor) -> torch.Tensor:
        return dlogprobs_P.new_zeros(len(self.first_targets_C)).index_add_(0, self.rows_P, dlogprobs_P)

    def move_to_targets(self, dlogits_CV: torch.Tensor, dlogprobs_P: torch.Tensor) -> None:
        firsts_P = self.first_targets_C[self.rows_P]
        moved_P = torch.where(self.targets_P == firsts_P, 0.0, dlogprobs_P)
        for targets, given_P in ((self.targets_P, moved_P * self.slope_P), (firsts_P, -moved_P * self.first_slope_P)):
            given_P = torch.where(moved_P == 0, 0.0, given_P)  # 0·NaN must not come back
            cells_P = target_cells(self.rows_P, targets[:, None], dlogits_CV.shape[1])[:, 0]
            dlogits_CV.view(-1).index_add_(0, cells_P, given_P.to(dlogits_CV.dtype))


def of_any_length(*tensors: torch.Tensor) -> None:
    """One graph for every chunk."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _scaled_logits(logits_CV: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    logits_CV = logits_CV.float() * scale
    return logits_CV if softcap is None else softcap * torch.tanh(logits_CV / softcap)


@torch.compile(dynamic=False)
def target_logprobs(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 [C] log-probabilities, normalisers and entropies."""
    logits_CV = _scaled_logits(logits_CV, scale, softcap)
    normaliser_C, entropy_C = normaliser_and_entropy(logits_CV)
    return logits_CV.gather(1, targets_C[:, None])[:, 0] - normaliser_C, normaliser_C, entropy_C


@torch.compile(dynamic=False)
def dlogits_of(
    logits_CV: torch.Tensor,
    normaliser_C: torch.Tensor,
    targets_C: torch.Tensor,
    dlogprobs_C: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """In the logits' dtype. A token with dloss 0 gets 0, whatever its logits are."""
    scaled_CV = _scaled_logits(logits_CV, scale, softcap)
    hot_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    probs_CV = (scaled_CV - normaliser_C[:, None]).exp()
    dlogits_CV = dlogprobs_C[:, None] * (hot_CV.float() - probs_CV) * scale
    if softcap is not None:
        dlogits_CV = dlogits_CV * (1 - (scaled_CV / softcap).square())
    return torch.where(dlogprobs_C[:, None] == 0, 0.0, dlogits_CV).to(logits_CV.dtype)
