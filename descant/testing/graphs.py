"""What stands for decode graphs where there is no CUDA device: the same calls, computed by the model's modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from descant.model.lora import LoraPass
from descant.model.passes import Pass, RowRef
from descant.sample.chance import uniform
from descant.sample.decode import Columns, Flight
from descant.sample.draw import RowParams, draw
from descant.sample.pages import PAGE_TOKENS
from descant.sample.scheduler import SequenceStep
from descant.sample.step import Sampler


@dataclass(slots=True)
class _Step:
    logits_NV: torch.Tensor
    tokens_N: torch.Tensor


class StandInGraphs:
    """Ahead where graphs would be. ``rows``: of each step that was launched."""

    def __init__(self, sampler: Sampler, max_rows: int = 8):
        self._sampler, self.max_rows = sampler, max_rows
        self.rows: list[int] = []

    def launch(self, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]) -> Flight:
        return self._flight(sequences, sequences, rows, ahead=False)

    def launch_ahead(
        self, flight: Flight, kept: Sequence[tuple[int, SequenceStep]], rows: Sequence[RowRef | None]
    ) -> Flight | None:
        if any((s.context + 1) // PAGE_TOKENS >= len(s.pages) for _, s in kept):
            return None
        drawn = flight.step.tokens_N.tolist()
        further = [replace(s, tokens=(drawn[n],), context=s.context + 1, draw=s.draw + 1) for n, s in kept]
        return self._flight([s for _, s in kept], further, rows, ahead=True)

    def _flight(
        self,
        planned: Sequence[SequenceStep],
        sequences: Sequence[SequenceStep],
        rows: Sequence[RowRef | None],
        *,
        ahead: bool,
    ) -> Flight:
        assert len(sequences) == len(rows) <= self.max_rows
        assert list(rows) == [self._sampler._row(s) for s in sequences]
        keys = [(row.rank_class, row.slot) if row else (0, 0) for row in rows]
        assert self._sampler._deterministic or keys == sorted(keys)
        self.rows.append(len(sequences))
        model = self._sampler._model
        hidden_ND, lora = model.trunk(
            torch.tensor([s.tokens[0] for s in sequences]),
            torch.tensor([s.context for s in sequences]),
            self._sampler._pass(sequences),
        )
        logits_NV, _ = model.head._raw_logits(hidden_ND, lora, 0)
        params = [  # the cuts are the host's
            RowParams(temperature=s.temperature, top_k=-1, top_p=1.0, uniform=uniform(s.seed, s.draw))
            for s in sequences
        ]
        tokens_N, logprobs_N = draw(model.head.scaled(logits_NV), params)
        result_2N = np.stack([tokens_N.numpy(), logprobs_N.numpy()]).astype(np.float64)
        columns = Columns.of(sequences)
        return Flight(planned, columns, _Step(logits_NV, tokens_N), result_2N, None, ahead=ahead)  # type: ignore[arg-type]

    def prefill(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, pass_: Pass
    ) -> tuple[torch.Tensor, LoraPass | None]:
        return self._sampler._model.trunk(tokens_T, positions_T, pass_)
