"""Runs a ``StepPlan`` on the base model: one forward pass, then one draw a sequence. Torch, one thread.

    plan (sequences) → sorted by adapter row → Pass(segments, pages) → trunk → logits of wanted tokens only → draw

Legend: T tokens of the pass, B sequences, N sequences that draw, S scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from descant.errors import ServerError
from descant.model.base import BaseModel
from descant.model.flat import MAX_ROWS, FlatDecoder
from descant.model.lora import LoraPass
from descant.model.passes import MIN_ROWS, KVPass, Pass, RowRef, Segment, to_device
from descant.sample.chance import uniform
from descant.sample.decode import BUCKETS, DecodeGraphs, Flight, table_width
from descant.sample.draw import LikeliestRow, RowParams, draw, likeliest_rows, score_rows
from descant.sample.pages import pages_for
from descant.sample.scheduler import SequenceOutput, SequenceStep, StepPlan
from descant.sample.scores import PromptChunk, PromptRows
from descant.types import Version

SCORE_ROWS = 256
"""Rows of [V] float32 logits held at once while a prompt is scored."""

CHUNK_TOKENS = 256
"""Tokens of a prompt that are computed together on CUDA when it must be the same every time,"""

PASS_CHUNKS = 8
"""and how many such chunks a pass has: of a small model, the host takes as long to launch one as the device for all."""

NOT_FINITE = "the logits are not finite: the weights overflow the model's number format"


@dataclass(slots=True, kw_only=True)
class _Pin:
    row: RowRef
    count: int


class Sampler:
    """Versions are pinned from ``acquire`` to ``release``; ``step`` only runs sequences of acquired versions.

    Gradients are off, but never by ``inference_mode``: a row made under it could not be trained any more.
    """

    def __init__(
        self,
        model: BaseModel,
        *,
        num_pages: int,
        max_rows: int = BUCKETS[-1],
        compile_decode: bool = True,
        deterministic: bool = False,
    ):
        """Allocates the KV pool. ``max_rows``: sequences that decode at once, usually. ``compile_decode``: see
        ``DecodeGraphs``.

        ``deterministic``: a sequence's bits do not depend on what else is in its steps. Products then have a number of
        rows that picks the same kernel every time, filled up with rows of nobody's: multiples of ``MIN_ROWS`` for each
        adapter in float32 on CPU (bf16 needs nothing); on CUDA a prefill is always of ``PASS_CHUNKS`` chunks of
        ``CHUNK_TOKENS`` (where the model is not packable of one), and decode steps have all their rows. The scheduler's
        ``chunk_tokens`` must be ``chunk_tokens`` of here."""
        self._model = model
        self._deterministic = deterministic
        on_cuda = model.device.type == "cuda"
        self.chunk_tokens = CHUNK_TOKENS if deterministic and on_cuda else None
        self._multiple = 1
        if deterministic and (on_cuda or model.dtype == torch.float32):
            self._multiple = CHUNK_TOKENS if on_cuda else MIN_ROWS
        num_filler_pages = pages_for(self._multiple) if self._multiple > 1 else 0
        self._filler_pages = tuple(range(num_pages, num_pages + num_filler_pages))
        self._pins: dict[Version, _Pin] = {}
        self._decode: DecodeGraphs | None = None
        self._flat: FlatDecoder | None = None
        self._ahead: Flight | None = None
        if model.device.type == "cuda" and model.packable and not model.sharded:
            self._pool = model.make_kv_pool(num_pages + max(1, num_filler_pages))
            self._decode = DecodeGraphs(
                model,
                self._pool,
                dummy_page=num_pages,
                table_width=table_width(model, num_pages),
                max_rows=max_rows,
                compiled=compile_decode,
                deterministic=deterministic,
            )
        else:
            self._pool = model.make_kv_pool(num_pages + num_filler_pages)
            model.pack_weights()
            if model.packable and not model.sharded:  # its ranks make one pass a step, each layer whole for a moment
                self._flat = FlatDecoder.of(model, self._pool)

    def warm_up(self) -> None:
        """What the first requests would wait for otherwise: compiling and capturing, on CUDA."""
        if self._decode is not None:
            self._decode.warm_up()

    def acquire(self, version: Version | None, count: int = 1) -> None:
        """Pins a version's row for so many requests, before ``Scheduler.add``; ``NotFound`` if it was never published.
        ``release`` for each when it has ended (last delta, failure, cancel), was refused, or is with another version.
        None, the base model, needs no row: both do nothing."""
        if version is None:
            return
        if version in self._pins:
            self._pins[version].count += count
        else:
            self._pins[version] = _Pin(row=self._model.bank.pin(version), count=count)

    def release(self, version: Version | None, count: int = 1) -> None:
        if version is None:
            return
        pin = self._pins[version]
        pin.count -= count
        if pin.count == 0:
            del self._pins[version]
            self._model.bank.unpin(version)

    @torch.no_grad()
    def step(self, plan: StepPlan) -> list[SequenceOutput]:
        """Sorts the sequences by adapter, prefills and decodes in one pass (one a pass where the model is not
        packable; decoding sequences apart where there is a faster way for them), computes wanted logits only, samples,
        and returns in the plan's order. Guessed tokens are computed as if they had been drawn. Of a sequence that comes
        several times, with chunk after chunk of its prompt, each finds the keys of those before it."""
        if self._decode is not None:
            outputs = self._run_graphs(self._decode, plan.sequences)
        elif self._flat is not None:
            outputs = self._run_flat(self._flat, plan.sequences)
        elif self._model.packable:
            outputs = self._run(sorted(plan.sequences, key=self._order))
        else:
            outputs = [output for sequence in plan.sequences for output in self._run([sequence])]
        by_sequence: dict[int, list[SequenceOutput]] = defaultdict(list)
        for output in reversed(outputs):  # nothing changes the order of a sequence's own
            by_sequence[output.sequence].append(output)
        return [by_sequence[sequence.sequence].pop() for sequence in plan.sequences]

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
        only is followed by the next, ahead, before its own result is waited for.

        What was ahead when a request moved is of the version before, and is told as that: the device has read those
        weights, or reads them before anything that takes their row. The step after is the new version's."""
        flight, self._ahead = self._ahead, None
        goes_on = True
        others: list[SequenceStep] = []
        served: list[tuple[tuple[int, int], int, RowRef | None, SequenceStep]] = []
        fresh: list[tuple[RowRef | None, SequenceStep]] = []
        version, row, order = None, None, _row_order(None)
        for sequence in sequences:
            if not self._is_graphs(sequence):
                others.append(sequence)
                continue
            # Top-k and top-p are drawn on the host, so the device does not know the next token (nor where it was drawn
            # before); and the step after would write over the logits that alternatives are taken from.
            if sequence.topk or _is_cut(sequence) or not sequence.sample:
                goes_on = False
            if sequence.version is not version:  # most often it is the one of the sequence before
                version, row = sequence.version, self._row(sequence)
                order = _row_order(row)
            index = None if flight is None else flight.index(sequence)
            if index is None:
                fresh.append((row, sequence))
            else:
                served.append((order, index, row, sequence))
        goes_on = goes_on and not others

        outputs: list[SequenceOutput] = []
        if flight is not None and served:
            served.sort()  # no two have the same index
            kept = [(index, sequence) for _, index, _, sequence in served]
            if goes_on and not fresh:
                self._ahead = graphs.launch_ahead(flight, kept, [row for _, _, row, _ in served])
            outputs += self._land(flight, kept)
        fresh.sort(key=lambda pair: _row_order(pair[0]))
        for first in range(0, len(fresh), graphs.max_rows):
            part = fresh[first : first + graphs.max_rows]
            rows, launched = [row for row, _ in part], [sequence for _, sequence in part]
            kept = list(enumerate(launched))
            flight = graphs.launch(launched, rows)
            if goes_on and len(part) == len(sequences):
                self._ahead = graphs.launch_ahead(flight, kept, rows)
            outputs += self._land(flight, kept)
        others.sort(key=self._order)
        if self._deterministic:
            for first in range(0, len(others), PASS_CHUNKS):
                outputs += self._run_chunks(graphs, others[first : first + PASS_CHUNKS])
            return outputs
        return outputs + (self._run(others) if others else [])

    def _is_graphs(self, sequence: SequenceStep) -> bool:
        """A graph computes its step."""
        if self._deterministic:  # drawn tokens always, prompts never
            return sequence.drawn and len(sequence.tokens) == 1
        return not sequence.draft and _decodes(sequence)

    def _land(self, flight: Flight, rows: Sequence[tuple[int, SequenceStep]]) -> list[SequenceOutput]:
        """What its rows drew. Those with top-k or top-p are drawn here."""
        decoded = flight.wait()
        chosen, sequences = [index for index, _ in rows], [sequence for _, sequence in rows]
        tokens, logprobs = decoded.tokens[chosen].tolist(), decoded.logprobs[chosen].tolist()

        def logits(wanted: Sequence[int]) -> torch.Tensor:
            return self._model.head.scaled(flight.step.logits_NV[[chosen[n] for n in wanted]])

        cut = [n for n, sequence in enumerate(sequences) if sequence.sample and _is_cut(sequence)]
        for part in _parts(cut, singly=self._deterministic):
            tokens_M, logprobs_M = draw(logits(part), [_params(sequences[n]) for n in part])
            for n, token, logprob in zip(part, tokens_M.tolist(), logprobs_M.tolist(), strict=True):
                tokens[n], logprobs[n] = token, logprob
        return _outputs(sequences, flight.versions(chosen), tokens, logprobs, logits, singly=self._deterministic)

    def _run_flat(self, flat: FlatDecoder, sequences: Sequence[SequenceStep]) -> list[SequenceOutput]:
        """Guesses are rows like sequences, each with one key more: a step writes all keys before it reads any, and a
        row reads those up to its own."""
        drawn: list[SequenceOutput] = []
        decoding = sorted((s for s in sequences if _decodes(s)), key=self._order)
        rows = [row for sequence in decoding for row in _rows(sequence)]
        for first in range(0, len(rows), MAX_ROWS):
            part = rows[first : first + MAX_ROWS]
            logits_NV = flat.logits(
                [s.tokens[0] for s in part],
                [s.context for s in part],
                [s.pages for s in part],
                [self._row(s) for s in part],
            )
            drawn += _drawn(part, logits_NV)
        others = sorted((s for s in sequences if not _decodes(s)), key=self._order)
        return _verified(decoding, drawn) + (self._run(others) if others else [])

    def _filler(self, version: Version | None, num_tokens: int) -> SequenceStep:
        """A sequence of nobody's."""
        return SequenceStep(
            sequence=-1,
            version=version,
            tokens=(0,) * num_tokens,
            context=0,
            pages=self._filler_pages[: pages_for(num_tokens)],
            sample=False,
            temperature=0.0,
            top_k=-1,
            top_p=1.0,
            seed=0,
            draw=0,
        )

    def _filled(self, sequences: Sequence[SequenceStep]) -> list[SequenceStep]:
        """With every adapter's tokens filled up to a multiple."""
        filled: list[SequenceStep] = []
        for _, group in groupby(sequences, key=self._row):
            members = list(group)
            filled += members
            if missing := -sum(map(_num_inputs, members)) % self._multiple:
                filled.append(self._filler(members[0].version, missing))
        return filled

    def _run(self, sequences: Sequence[SequenceStep]) -> list[SequenceOutput]:
        """Also an output for each that fills up, where there are such."""
        if self._multiple > 1:
            sequences = self._filled(sequences)
        starts, hidden_TD, lora = self._hidden(sequences)
        outputs = self._draw(sequences, starts, hidden_TD, lora)
        return self._scored(sequences, starts, outputs, hidden_TD, lora)

    def _run_chunks(self, graphs: DecodeGraphs, chunks: Sequence[SequenceStep]) -> list[SequenceOutput]:
        """One pass of at most ``PASS_CHUNKS`` prompts' chunks, sorted by adapter. It always has room for as many: each
        chunk begins at a multiple of its length and is filled up behind, then come chunks of nobody's. So the base's
        products have one shape, an adapter's tiles are cut alike wherever the chunk lies, and attention is each
        sequence's own. Likewise a token is drawn after each chunk, and kept where one is wanted."""
        room = self.chunk_tokens
        assert room is not None
        strangers = [self._filler(None, room)] * (PASS_CHUNKS - len(chunks))
        sequences = [*chunks, *strangers]
        filled: list[SequenceStep] = []
        for sequence in sequences:
            filled.append(sequence)
            if missing := room - len(sequence.tokens):
                filled.append(self._filler(sequence.version, missing))
        _, hidden_TD, lora = self._hidden(filled)
        starts = range(0, PASS_CHUNKS * room, room)
        outputs = [_output(chunk, None) for chunk in chunks]
        if drawing := [(place, chunk) for place, chunk in enumerate(chunks) if chunk.sample]:
            last_N = torch.tensor([start + len(s.tokens) - 1 for start, s in zip(starts, sequences, strict=True)])
            hidden_ND = hidden_TD.index_select(0, to_device(last_N, self._model.device))
            flight = graphs.draw(hidden_ND, sequences, [self._row(sequence) for sequence in sequences])
            for (place, _), output in zip(drawing, self._land(flight, drawing), strict=True):
                outputs[place] = output
        return self._scored(chunks, starts[: len(chunks)], outputs, hidden_TD, lora)

    def _hidden(self, sequences: Sequence[SequenceStep]) -> tuple[list[int], torch.Tensor, LoraPass | None]:
        """Where each begins in the stream, the stream's hidden states [T, D], and its adapters for the head."""
        device = self._model.device
        starts: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        for sequence in sequences:
            starts.append(len(tokens))
            tokens += (*sequence.tokens, *sequence.draft)
            positions += range(sequence.context, sequence.context + _num_inputs(sequence))
        trunk = self._model.trunk if self._decode is None else self._decode.prefill
        tokens_T, positions_T = (to_device(torch.tensor(x), device) for x in (tokens, positions))
        hidden_TD, lora = trunk(tokens_T, positions_T, self._pass(sequences))
        return starts, hidden_TD, lora

    def _pass(self, sequences: Sequence[SequenceStep]) -> Pass:
        segments: list[Segment] = []
        end = 0
        for sequence in sequences:
            start, end = end, end + _num_inputs(sequence)
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
            seq_lens=tuple(_num_inputs(s) for s in sequences),
            segments=tuple(segments),
            kv=KVPass(
                pool=self._pool,
                page_table=to_device(page_table, self._model.device),
                context_lens=tuple(s.context for s in sequences),
            ),
        )

    def _draw(
        self, sequences: Sequence[SequenceStep], starts: Sequence[int], hidden_TD: torch.Tensor, lora: LoraPass | None
    ) -> list[SequenceOutput]:
        """One output a sequence, with a token where one is wanted."""
        outputs = [_output(s, None) for s in sequences]
        drawing = [index for index, sequence in enumerate(sequences) if sequence.sample]
        if not drawing:
            return outputs
        wanted: list[int] = []
        own: list[int] = []
        for _, group in groupby(drawing, key=lambda index: self._row(sequences[index])):
            first = len(wanted)
            for index in group:
                last = starts[index] + len(sequences[index].tokens) - 1
                wanted += range(last, last + 1 + len(sequences[index].draft))
            own += range(first, len(wanted))
            if self._multiple > 1:
                wanted += wanted[-1:] * (-(len(wanted) - first) % MIN_ROWS)
        logits_NV = self._model.head.logits_at(hidden_TD, lora, torch.tensor(wanted))
        if len(own) < len(wanted):
            logits_NV = logits_NV[own]
        chosen = [sequences[index] for index in drawing]
        drawn = _drawn([row for sequence in chosen for row in _rows(sequence)], logits_NV)
        for index, output in zip(drawing, _verified(chosen, drawn), strict=True):
            outputs[index] = output
        return outputs

    def _scored(
        self,
        sequences: Sequence[SequenceStep],
        starts: Sequence[int],
        outputs: Sequence[SequenceOutput],
        hidden_TD: torch.Tensor,
        lora: LoraPass | None,
    ) -> list[SequenceOutput]:
        """The outputs, with what is asked of prompts."""
        scored: list[SequenceOutput] = []
        for sequence, start, output in zip(sequences, starts, outputs, strict=True):
            if sequence.prompt is not None:
                rows = self._score(sequence.prompt, start + sequence.prompt.skip, hidden_TD, lora)
                output = _output(sequence, NOT_FINITE) if rows is None else replace(output, prompt=rows)
            scored.append(output)
        return scored

    def _score(
        self, chunk: PromptChunk, start: int, hidden_TD: torch.Tensor, lora: LoraPass | None
    ) -> PromptRows | None:
        """Row r of the chunk is the stream's token ``start + r``. None: not finite."""
        parts: list[PromptRows] = []
        for first in range(0, chunk.num_rows, SCORE_ROWS):
            last = min(first + SCORE_ROWS, chunk.num_rows)
            rows_S = torch.arange(start + first, start + last)
            if missing := -len(rows_S) % self._multiple:
                rows_S = torch.cat([rows_S, rows_S[-1:].expand(missing)])
            logits_SV = self._model.head.logits_at(hidden_TD, lora, rows_S)[: last - first]
            part = score_rows(chunk, first, last, logits_SV)
            if not np.isfinite(part.logprobs).all():
                return None
            parts.append(part)
        return PromptRows.joined(parts)


def _drawn(sequences: Sequence[SequenceStep], logits_NV: torch.Tensor) -> list[SequenceOutput]:
    """Row n is sequence n's."""
    tokens_N, logprobs_N = draw(logits_NV, [_params(sequence) for sequence in sequences])
    versions = [sequence.version for sequence in sequences]
    return _outputs(sequences, versions, tokens_N.tolist(), logprobs_N.tolist(), lambda wanted: logits_NV[wanted])


def _outputs(
    sequences: Sequence[SequenceStep],
    versions: Sequence[Version | None],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    logits: Callable[[list[int]], torch.Tensor],
    *,
    singly: bool = False,
) -> list[SequenceOutput]:
    """What was drawn by ``versions``, where that is wanted, with the likeliest tokens where they are. ``logits``
    float32 of the rows asked for."""
    finite = [math.isfinite(logprob) for logprob in logprobs]
    topk: dict[int, LikeliestRow] = {}
    wanted = [n for n, sequence in enumerate(sequences) if sequence.topk and sequence.sample and finite[n]]
    for part in _parts(wanted, singly=singly):
        asked = [(sequences[n].temperature, sequences[n].topk) for n in part]
        topk |= zip(part, likeliest_rows(logits(part), asked), strict=True)
    return [
        SequenceOutput(
            sequence=sequence.sequence,
            version=version,
            tokens=(tokens[n],),
            logprobs=(logprobs[n],),
            topk=(topk[n],) if sequence.topk else (),
        )
        if finite[n] and sequence.sample
        else SequenceOutput(sequence=sequence.sequence, version=version, error=None if finite[n] else NOT_FINITE)
        for n, (sequence, version) in enumerate(zip(sequences, versions, strict=True))
    ]


def _parts(rows: list[int], *, singly: bool) -> list[list[int]]:
    """What torch computes at once of these rows, in which the bits of each may depend on how many there are."""
    if singly:
        return [[row] for row in rows]
    return [rows] if rows else []


def _output(sequence: SequenceStep, error: str | None) -> SequenceOutput:
    """Without a token."""
    return SequenceOutput(sequence=sequence.sequence, version=sequence.version, error=error)


def _num_inputs(sequence: SequenceStep) -> int:
    return len(sequence.tokens) + len(sequence.draft)


def _rows(sequence: SequenceStep) -> list[SequenceStep]:
    """The step as steps without drafts: its last token, and each guess behind it."""
    if not sequence.draft:
        return [sequence]
    return [
        replace(
            sequence,
            tokens=(token,),
            context=sequence.context + place,
            draw=sequence.draw + place,
            draft=(),
        )
        for place, token in enumerate((*sequence.tokens, *sequence.draft))
    ]


def _verified(sequences: Sequence[SequenceStep], drawn: Sequence[SequenceOutput]) -> list[SequenceOutput]:
    """``drawn`` from each of the sequences' ``_rows``, in their order: kept as far as a row is about what was drawn
    before it."""
    outputs: list[SequenceOutput] = []
    end = 0
    for sequence in sequences:
        start, end = end, end + 1 + len(sequence.draft)
        rows = [drawn[start]]
        for guess, row in zip(sequence.draft, drawn[start + 1 : end], strict=True):
            if rows[-1].tokens != (guess,):
                break
            rows.append(row)
        if len(rows) == 1 or rows[-1].error is not None:
            outputs.append(rows[-1])
            continue
        outputs.append(
            SequenceOutput(
                sequence=sequence.sequence,
                version=sequence.version,
                tokens=tuple(token for row in rows for token in row.tokens),
                logprobs=tuple(logprob for row in rows for logprob in row.logprobs),
                topk=tuple(likely for row in rows for likely in row.topk),
            )
        )
    return outputs


def _decodes(sequence: SequenceStep) -> bool:
    """One token in, one token out."""
    return len(sequence.tokens) == 1 and sequence.sample and sequence.prompt is None


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
