"""What stands for decode graphs where there is no CUDA device: the same calls, computed by the model's modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from descant.model.lora import LoraPass
from descant.model.passes import Pass, RowRef
from descant.sample.chance import uniform
from descant.sample.decode import Decoded
from descant.sample.draw import RowParams, draw
from descant.sample.scheduler import SequenceStep
from descant.sample.step import Sampler


@dataclass(slots=True)
class _Step:
    logits_NV: torch.Tensor


class StandInFlight:
    def __init__(self, sequences: Sequence[SequenceStep], logits_NV: torch.Tensor, decoded: Decoded):
        self.sequences, self.step, self._decoded = sequences, _Step(logits_NV), decoded

    def index(self, sequence: SequenceStep, row: RowRef | None) -> int | None:
        return None

    def wait(self) -> Decoded:
        return self._decoded


class StandInGraphs:
    """Never ahead. ``rows``: of each step that was launched."""

    def __init__(self, sampler: Sampler, max_rows: int = 8):
        self._sampler, self.max_rows = sampler, max_rows
        self.rows: list[int] = []

    def launch(self, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]) -> StandInFlight:
        assert len(sequences) == len(rows) <= self.max_rows
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
        decoded = Decoded(tokens=tokens_N.numpy(), logprobs=logprobs_N.numpy().astype(np.float32))
        return StandInFlight(sequences, logits_NV, decoded)

    def prefill(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, pass_: Pass
    ) -> tuple[torch.Tensor, LoraPass | None]:
        return self._sampler._model.trunk(tokens_T, positions_T, pass_)

    def launch_ahead(self, flight: object, kept: object) -> None:
        return None
