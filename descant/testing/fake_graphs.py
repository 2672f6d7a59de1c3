"""A fake of the decode graphs for machines without a CUDA device: the same calls, computed by the model's modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from descant.adapters.slots import RowRef
from descant.model.forward_batch import ForwardBatch, Segment
from descant.model.lora import LoraBatch
from descant.prefix import PAGE_TOKENS
from descant.sample.cuda_graphs import Columns, LaunchedStep
from descant.sample.plan import SequenceStep
from descant.sample.rng import uniform
from descant.sample.runner import Sampler
from descant.sample.sampling import RowParams, sample_tokens


@dataclass(slots=True)
class _Step:
    logits_NV: torch.Tensor
    tokens_N: torch.Tensor


class FakeDecodeGraphs:
    """Runs ahead where graphs would. ``rows``: of each step that was launched; ``ahead``: how many of them were ahead;
    ``prefills``: rows of each prefill. ``num_captures``: of graphs, one for a number of rows and the rank buckets among
    them, and all anew once a slab lies elsewhere."""

    def __init__(self, sampler: Sampler, max_rows: int = 8):
        self._sampler, self.max_rows = sampler, max_rows
        self.rows: list[int] = []
        self.prefills: list[int] = []
        self.ahead = 0
        self.num_captures = 0
        self._captured: set[tuple[int, frozenset[int]]] = set()
        self._slabs: dict[int, int] = {}

    def launch(self, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]) -> LaunchedStep:
        return self._launched_step(sequences, sequences, rows, ahead=False)

    def launch_ahead(
        self, launched: LaunchedStep, kept: Sequence[tuple[int, SequenceStep]], rows: Sequence[RowRef | None]
    ) -> LaunchedStep | None:
        if any((s.context + 1) // PAGE_TOKENS >= len(s.pages) for _, s in kept):
            return None
        sampled = launched.step.tokens_N.tolist()
        further = [
            replace(s, tokens=(sampled[n],), context=s.context + 1, rng_offset=s.rng_offset + 1) for n, s in kept
        ]
        return self._launched_step([s for _, s in kept], further, rows, ahead=True)

    def _launched_step(
        self,
        planned: Sequence[SequenceStep],
        sequences: Sequence[SequenceStep],
        rows: Sequence[RowRef | None],
        *,
        ahead: bool,
    ) -> LaunchedStep:
        assert len(sequences) == len(rows) <= self.max_rows
        assert list(rows) == [self._sampler._row(s) for s in sequences]
        keys = [(row.rank_bucket, row.slot) if row else (0, 0) for row in rows]
        assert keys == sorted(keys)
        self.ahead += ahead
        if self._sampler._batch_invariant:
            num_missing = self.max_rows - len(sequences)
            sequences = [*sequences, *[self._sampler._padding(None, 1)] * num_missing]
        self.rows.append(len(sequences))
        model = self._sampler._model
        self._capture(len(sequences), frozenset(row.rank_bucket for row in rows if row is not None))
        hidden_ND, lora = model.decoder_forward(
            torch.tensor([s.tokens[0] for s in sequences]),
            torch.tensor([s.context for s in sequences]),
            self._sampler._pass(sequences),
        )
        step, result_2N = self._sampled(hidden_ND, lora, sequences)
        return LaunchedStep(planned, Columns.of(sequences), step, result_2N, None, ahead=ahead)  # type: ignore[arg-type]

    def _capture(self, num_rows: int, rank_buckets: frozenset[int]) -> None:
        bank = self._sampler._model.bank
        slabs = {rank_bucket: bank.compute_slab(rank_bucket).data_ptr() for rank_bucket in rank_buckets}
        if any(self._slabs.get(rank_bucket, at) != at for rank_bucket, at in slabs.items()):
            self._captured.clear()
            self._slabs.clear()
        self._slabs.update(slabs)
        if (num_rows, rank_buckets) not in self._captured:
            self._captured.add((num_rows, rank_buckets))
            self.num_captures += 1

    def _sampled(
        self, hidden_ND: torch.Tensor, lora: LoraBatch | None, sequences: Sequence[SequenceStep]
    ) -> tuple[_Step, np.ndarray]:
        head = self._sampler._model.lm_head
        logits_NV, _ = head._raw_logits(hidden_ND, lora, 0)
        params = [  # the cuts are the host's
            RowParams(temperature=s.temperature, top_k=-1, top_p=1.0, uniform=uniform(s.seed, s.rng_offset))
            for s in sequences
        ]
        tokens_N, logprobs_N = sample_tokens(head.scaled(logits_NV), params)
        result_2N = np.stack([tokens_N.numpy(), logprobs_N.numpy()]).astype(np.float64)
        return _Step(logits_NV, tokens_N), result_2N

    def prefill(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, LoraBatch | None]:
        self.prefills.append(len(tokens_T))
        return self._sampler._model.decoder_forward(tokens_T, positions_T, batch)

    def sample(
        self, hidden_ND: torch.Tensor, sequences: Sequence[SequenceStep], rows: Sequence[RowRef | None]
    ) -> LaunchedStep:
        assert len(hidden_ND) == len(sequences) == len(rows)
        segments = tuple(Segment(start=n, end=n + 1, row=row) for n, row in enumerate(rows) if row is not None)
        batch = ForwardBatch(seq_lens=(1,) * len(rows), segments=segments)
        lora = LoraBatch.of(batch, self._sampler._model.bank)
        step, result_2N = self._sampled(hidden_ND, lora, sequences)
        return LaunchedStep(sequences, Columns.of(sequences), step, result_2N, None, ahead=False)  # type: ignore[arg-type]
