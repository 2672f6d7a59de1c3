"""What stands for decode graphs where there is no CUDA device: the same calls, computed by the model's modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from descant.model.lora import LoraPass
from descant.model.passes import Pass, RowRef, Segment
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
    """Ahead where graphs would be. ``rows``: of each step that was launched; ``ahead``: how many of them were ahead;
    ``prefills``: rows of each prefill."""

    def __init__(self, sampler: Sampler, max_rows: int = 8):
        self._sampler, self.max_rows = sampler, max_rows
        self.rows: list[int] = []
        self.prefills: list[int] = []
        self.ahead = 0

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
        assert keys == sorted(keys)
        self.ahead += ahead
        if self._sampler._deterministic:
            num_missing = self.max_rows - len(sequences)
            sequences = [*sequences, *[self._sampler._filler(None, 1)] * num_missing]
        self.rows.append(len(sequences))
        model = self._sampler._model
        hidden_ND, lora = model.trunk(
            torch.tensor([s.tokens[0] for s in sequences]),
            torch.tensor([s.context for s in sequences]),
            self._sampler._pass(sequences),
        )
        step, result_2N = self._drawn(hidden_ND, lora, sequences)
        return Flight(planned, Columns.of(sequences), step, result_2N, None, ahead=ahead)  # type: ignore[arg-type]

    def _drawn(
        self, hidden_ND: torch.Tensor, lora: LoraPass | None, sequences: Sequence[SequenceStep]
    ) -> tuple[_Step, np.ndarray]:
        head = self._sampler._model.head
        logits_NV, _ = head._raw_logits(hidden_ND, lora, 0)
        params = [  # the cuts are the host's
            RowParams(temperature=s.temperature, top_k=-1, top_p=1.0, uniform=uniform(s.seed, s.draw))
            for s in sequences
        ]
        tokens_N, logprobs_N = draw(head.scaled(logits_NV), params)
        result_2N = np.stack([tokens_N.numpy(), logprobs_N.numpy()]).astype(np.float64)
        return _Step(logits_NV, tokens_N), result_2N

    def prefill(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, pass_: Pass
    ) -> tuple[torch.Tensor, LoraPass | None]:
        self.prefills.append(len(tokens_T))
        return self._sampler._model.trunk(tokens_T, positions_T, pass_)

    def draw(self, hidden_ND: torch.Tensor, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]) -> Flight:
        assert len(hidden_ND) == len(sequences) == len(rows)
        segments = tuple(Segment(start=n, end=n + 1, row=row) for n, row in enumerate(rows) if row is not None)
        pass_ = Pass(seq_lens=(1,) * len(rows), segments=segments)
        lora = LoraPass.of(pass_, self._sampler._model.bank)
        step, result_2N = self._drawn(hidden_ND, lora, sequences)
        return Flight(sequences, Columns.of(sequences), step, result_2N, None, ahead=False)  # type: ignore[arg-type]
