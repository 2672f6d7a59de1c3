"""Runs a ``StepPlan`` on the base model: one forward pass, then one draw a sequence. Torch, one thread.

    plan (sequences) → sorted by adapter row → Pass(segments, pages) → trunk → logits of wanted tokens only → draw

Legend: T tokens of the pass, B sequences, N sequences that draw, S scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from descant.errors import ServerError
from descant.model.base import BaseModel
from descant.model.lora import LoraPass
from descant.model.passes import KVPass, Pass, RowRef, Segment
from descant.sample.chance import uniform
from descant.sample.decode import DecodeGraphs, Flight, table_width
from descant.sample.draw import RowParams, draw, score
from descant.sample.scheduler import SequenceOutput, SequenceStep, StepPlan
from descant.types import Version

SCORE_ROWS = 256
"""Rows of [V] float32 logits held at once while a prompt is scored."""

NOT_FINITE = "the logits are not finite: the weights overflow the model's number format"


@dataclass(slots=True, kw_only=True)
class _Pin:
    row: RowRef
    count: int


class Sampler:
    """Versions are pinned from ``acquire`` to ``release``; ``step`` only runs sequences of acquired versions.

    Gradients are off, but never by ``inference_mode``: a row made under it could not be trained any more.
    """

    def __init__(self, model: BaseModel, *, num_pages: int, compile_decode: bool = True):
        """Allocates the KV pool. ``compile_decode``: see ``DecodeGraphs``."""
        self._model = model
        self._pins: dict[Version, _Pin] = {}
        self._decode: DecodeGraphs | None = None
        self._ahead: Flight | None = None
        if model.device.type == "cuda" and model.packable and not model.sharded:
            self._pool = model.make_kv_pool(num_pages + 1)
            self._decode = DecodeGraphs(
                model,
                self._pool,
                dummy_page=num_pages,
                table_width=table_width(model, num_pages),
                compiled=compile_decode,
            )
        else:
            self._pool = model.make_kv_pool(num_pages)
            model.pack_weights()

    def acquire(self, version: Version | None) -> None:
        """Pins a version's row for one request, before ``Scheduler.add``; ``NotFound`` if it was never published.
        Once per request, and ``release`` once when the request has ended (last delta, failure, cancel) or was refused.
        None, the base model, needs no row: both do nothing."""
        if version is None:
            return
        if version in self._pins:
            self._pins[version].count += 1
        else:
            self._pins[version] = _Pin(row=self._model.bank.pin(version), count=1)

    def release(self, version: Version | None) -> None:
        """Undoes one ``acquire``."""
        if version is None:
            return
        pin = self._pins[version]
        pin.count -= 1
        if pin.count == 0:
            del self._pins[version]
            self._model.bank.unpin(version)

    @torch.no_grad()
    def step(self, plan: StepPlan) -> list[SequenceOutput]:
        """Sorts the sequences by adapter, prefills and decodes in one pass (one a pass where the model is not
        packable), computes wanted logits only, samples, and returns in the plan's order."""
        if self._decode is not None:
            outputs = self._run_graphs(self._decode, plan.sequences)
        elif self._model.packable:
            outputs = self._run(sorted(plan.sequences, key=self._order))
        else:
            outputs = [output for sequence in plan.sequences for output in self._run([sequence])]
        by_sequence = {output.sequence: output for output in outputs}
        return [by_sequence[sequence.sequence] for sequence in plan.sequences]

    def _order(self, sequence: SequenceStep) -> tuple[int, int]:
        return _row_order(self._row(sequence))

    def _row(self, sequence: SequenceStep) -> RowRef | None:
        if sequence.version is None:
            return None
        pin = self._pins.get(sequence.version)
        if pin is None:
            raise ServerError(f"a step names {sequence.version}, which no request has acquired")
        return pin.row

    def _run_graphs(self, graphs: DecodeGraphs, sequences: Sequence[SequenceStep]) -> list[SequenceOutput]:
        """What the device did ahead is taken where it serves; the rest is computed now. A step of decoding sequences
        only is followed by the next, ahead, before its own result is waited for."""
        flight, self._ahead = self._ahead, None
        others = [s for s in sequences if not _decodes(s)]
        served: list[tuple[int, SequenceStep]] = []
        fresh: list[tuple[RowRef | None, SequenceStep]] = []
        for sequence in sequences:
            if _decodes(sequence):
                row = self._row(sequence)
                index = None if flight is None else flight.index(sequence, row)
                if index is None:
                    fresh.append((row, sequence))
                else:
                    served.append((index, sequence))
        # Top-k and top-p are drawn on the host, so the device does not know the next token.
        goes_on = not others and not any(_is_cut(s) for s in sequences)

        outputs: list[SequenceOutput] = []
        if flight is not None and served:
            served.sort(key=lambda pair: pair[0])
            if goes_on and not fresh:
                self._ahead = graphs.launch_ahead(flight, served)
            outputs += self._land(flight, served)
        fresh.sort(key=lambda pair: _row_order(pair[0]))
        for first in range(0, len(fresh), graphs.max_rows):
            part = fresh[first : first + graphs.max_rows]
            launched = [sequence for _, sequence in part]
            flight = graphs.launch(launched, [row for row, _ in part])
            rows = list(enumerate(launched))
            if goes_on and len(part) == len(sequences):
                self._ahead = graphs.launch_ahead(flight, rows)
            outputs += self._land(flight, rows)
        return outputs + (self._run(sorted(others, key=self._order)) if others else [])

    def _land(self, flight: Flight, rows: Sequence[tuple[int, SequenceStep]]) -> list[SequenceOutput]:
        decoded = flight.wait()
        tokens, logprobs = decoded.tokens.tolist(), decoded.logprobs.tolist()
        finite = np.isfinite(decoded.logprobs).tolist()
        if cut := [(index, sequence) for index, sequence in rows if _is_cut(sequence)]:
            logits_MV = self._model.head.scaled(flight.step.logits_NV[[index for index, _ in cut]])
            tokens_M, logprobs_M = draw(logits_MV, [_params(sequence) for _, sequence in cut])
            for (index, _), token, logprob in zip(cut, tokens_M.tolist(), logprobs_M.tolist(), strict=True):
                tokens[index], logprobs[index] = token, logprob
        return [
            SequenceOutput(sequence=sequence.sequence, token=tokens[index], logprob=logprobs[index])
            if finite[index]
            else SequenceOutput(sequence=sequence.sequence, token=None, logprob=0.0, error=NOT_FINITE)
            for index, sequence in rows
        ]

    def _run(self, sequences: Sequence[SequenceStep]) -> list[SequenceOutput]:
        device = self._model.device
        starts: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        for sequence in sequences:
            starts.append(len(tokens))
            tokens += sequence.tokens
            positions += range(sequence.context, sequence.context + len(sequence.tokens))
        hidden_TD, lora = self._model.trunk(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), self._pass(sequences)
        )
        outputs = self._draw(sequences, starts, hidden_TD, lora)
        for index, sequence in enumerate(sequences):
            if sequence.score_targets:
                outputs[index] = self._score(sequence, starts[index], hidden_TD, lora, outputs[index])
        return outputs

    def _pass(self, sequences: Sequence[SequenceStep]) -> Pass:
        segments: list[Segment] = []
        end = 0
        for sequence in sequences:
            start, end = end, end + len(sequence.tokens)
            row = self._row(sequence)
            if row is None:
                continue
            if segments and segments[-1].row == row:
                start = segments.pop().start
            segments.append(Segment(start=start, end=end, row=row))
        page_table = torch.zeros(len(sequences), max(len(s.pages) for s in sequences), dtype=torch.int64)
        for index, sequence in enumerate(sequences):
            page_table[index, : len(sequence.pages)] = torch.tensor(sequence.pages)
        return Pass(
            seq_lens=tuple(len(s.tokens) for s in sequences),
            segments=tuple(segments),
            kv=KVPass(
                pool=self._pool,
                page_table=page_table.to(self._model.device),
                context_lens=tuple(s.context for s in sequences),
            ),
        )

    def _draw(
        self, sequences: Sequence[SequenceStep], starts: Sequence[int], hidden_TD: torch.Tensor, lora: LoraPass | None
    ) -> list[SequenceOutput]:
        """One output a sequence, with a token where one is wanted."""
        outputs = [SequenceOutput(sequence=s.sequence, token=None, logprob=0.0) for s in sequences]
        drawing = [index for index, sequence in enumerate(sequences) if sequence.sample]
        if not drawing:
            return outputs
        last = [starts[index] + len(sequences[index].tokens) - 1 for index in drawing]
        logits_NV = self._model.head.logits_at(hidden_TD, lora, torch.tensor(last))
        tokens_N, logprobs_N = draw(logits_NV, [_params(sequences[index]) for index in drawing])
        finite_N = logprobs_N.isfinite()
        for index, token, logprob, finite in zip(
            drawing, tokens_N.tolist(), logprobs_N.tolist(), finite_N.tolist(), strict=True
        ):
            changes = {"token": token, "logprob": logprob} if finite else {"error": NOT_FINITE}
            outputs[index] = replace(outputs[index], **changes)
        return outputs

    def _score(
        self,
        sequence: SequenceStep,
        start: int,
        hidden_TD: torch.Tensor,
        lora: LoraPass | None,
        output: SequenceOutput,
    ) -> SequenceOutput:
        """Adds the log-probabilities of ``score_targets``: token i's target is scored at the stream's ``start + i``."""
        scores: list[float] = []
        topk: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        targets_S = torch.tensor(sequence.score_targets, device=hidden_TD.device)
        for first in range(0, len(targets_S), SCORE_ROWS):
            chunk_S = targets_S[first : first + SCORE_ROWS]
            rows_S = torch.arange(start + first, start + first + len(chunk_S))
            logits_SV = self._model.head.logits_at(hidden_TD, lora, rows_S)
            logprobs_S, ids_SK, top_SK = score(logits_SV, chunk_S, sequence.topk)
            if not bool(logprobs_S.isfinite().all()):
                return replace(output, token=None, error=NOT_FINITE)
            scores += logprobs_S.tolist()
            if ids_SK is not None and top_SK is not None:
                topk += [(tuple(i), tuple(p)) for i, p in zip(ids_SK.tolist(), top_SK.tolist(), strict=True)]
        return replace(output, scores=tuple(scores), topk=tuple(topk))


def _decodes(sequence: SequenceStep) -> bool:
    """One token in, one token out."""
    return len(sequence.tokens) == 1 and sequence.sample and sequence.score_targets is None


def _is_cut(sequence: SequenceStep) -> bool:
    return sequence.temperature > 0 and (sequence.top_k > 0 or sequence.top_p < 1)


def _row_order(row: RowRef | None) -> tuple[int, int]:
    return (0, 0) if row is None else (row.rank_class, row.slot)


def _params(sequence: SequenceStep) -> RowParams:
    return RowParams(
        temperature=sequence.temperature,
        top_k=sequence.top_k,
        top_p=sequence.top_p,
        uniform=uniform(sequence.seed, sequence.draw),
    )
