"""Runs a ``StepPlan`` on the base model: one forward pass, then one sampled token a sequence. Torch, one thread.

    plan (sequences) → sorted by adapter row → ForwardBatch(segments, pages) → decoder → wanted logits → sample

Legend: T tokens of the pass, B sequences, N sequences that sample a token, S scored tokens, V vocabulary, D hidden
size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from descant.adapters.slots import RowRef
from descant.adapters.store import AdapterStore
from descant.errors import ServerError
from descant.model.base import BaseModel
from descant.model.cpu.decoder import MAX_ROWS, CpuDecoder
from descant.model.forward_batch import MIN_ROWS, ForwardBatch, PagedKV, Segment, to_device
from descant.model.lora.batch import LoraBatch
from descant.sample.cuda_graphs import BUCKETS, CudaGraphs, LaunchedStep, table_width
from descant.sample.graph_inputs import segments
from descant.sample.pages import pages_for
from descant.sample.plan import PageCopy, SequenceOutput, SequenceStep, StepPlan
from descant.sample.rng import uniform
from descant.sample.sampling import LikeliestRow, RowParams, likeliest_rows, sample_tokens, score_rows
from descant.sample.scores import PromptChunk, PromptRows
from descant.types import Version

SCORE_ROWS = 256
"""Rows of [V] float32 logits held at once while a prompt is scored."""

ROW_TOKENS = 48
"""Prompt tokens of a step that are rows of the CPU decoder beside sequences that decode, at most. Through the modules a
pass of a few takes as long as some 30 rows (SmolLM2, one thread), one of more takes less for each than a row does,"""

ROW_PAGES = 96
"""and no more than so many pages are read for them: each row reads all that lies before it."""

CHUNK_TOKENS = 256
"""Tokens of a prompt that are computed together on CUDA when it must be the same every time,"""

PASS_CHUNKS = 8
"""and how many such chunks a pass has: of a small model, the host takes as long to launch one as the device for all."""

NOT_FINITE = "the logits are not finite: the weights overflow the model's number format"


MAX_NUM_BATCHED_TOKENS = 8192


@dataclass(slots=True, kw_only=True)
class _Pin:
    row: RowRef
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """What was launched on the device and is to be taken in. ``rows``: which of its rows are wanted, and their
    sequences' steps; ``goes_on``: of these, the ones whose next step is known. ``prefill``: the whole sequences of a
    prefill and where each begins in its stream."""

    launched: LaunchedStep
    rows: Sequence[tuple[int, SequenceStep]]
    goes_on: Sequence[tuple[int, SequenceStep]]
    prefill: Sequence[tuple[int, SequenceStep]] | None = None


class Sampler:
    """``step`` only runs sequences of versions that are pinned (``pin`` to ``unpin``).

    Gradients are off, but never by ``inference_mode``: a row made under it could not be trained any more.
    """

    def __init__(
        self,
        model: BaseModel,
        *,
        num_pages: int,
        max_rows: int = BUCKETS[-1],
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        compile_decode: bool = True,
        batch_invariant: bool = False,
    ):
        """Allocates the KV pool. ``max_rows``: sequences that decode at once, usually. ``max_num_batched_tokens``: the
        scheduler's, or more. ``compile_decode``: see ``CudaGraphs``.

        ``batch_invariant``: a sequence's bits do not depend on what else is in its steps. Products then have a number
        of rows that picks the same kernel every time, padded: multiples of ``MIN_ROWS`` for
        each adapter in float32 on CPU, where elementwise loops have no scalar tails then (bf16 needs nothing, nor do
        sizes that are multiples of 32); on CUDA a prefill is always of ``PASS_CHUNKS`` chunks of
        ``CHUNK_TOKENS`` (where the model is not packable of one), and decode steps have all their rows. The scheduler's
        ``chunk_tokens`` must be ``chunk_tokens`` of here."""
        self._model = model
        self._adapters: AdapterStore = model.bank
        self._batch_invariant = batch_invariant
        on_cuda = model.device.type == "cuda"
        self.chunk_tokens = CHUNK_TOKENS if batch_invariant and on_cuda else None
        self._multiple = 1
        """Of an adapter's tokens in a pass."""
        if batch_invariant and (on_cuda or model.dtype == torch.float32):
            self._multiple = CHUNK_TOKENS if on_cuda else MIN_ROWS
        self.copies_pages = not on_cuda and self._multiple == 1
        """``SampleLimits.copies_pages``."""
        num_padding_pages = pages_for(self._multiple) if self._multiple > 1 else 0
        self._padding_pages = tuple(range(num_pages, num_pages + num_padding_pages))
        self._pins: dict[Version, _Pin] = {}
        self._graphs: CudaGraphs | None = None
        self._cpu_decoder: CpuDecoder | None = None
        self._ahead: LaunchedStep | None = None
        if on_cuda and model.packable and not model.sharded:
            self._pool = model.make_kv_pool(num_pages + 1)
            self._graphs = CudaGraphs(
                model,
                self._pool,
                dummy_page=num_pages,
                table_width=table_width(model, num_pages),
                max_rows=max_rows,
                max_tokens=PASS_CHUNKS * CHUNK_TOKENS if batch_invariant else max_num_batched_tokens,
                compiled=compile_decode,
                batch_invariant=batch_invariant,
            )
        else:
            self._pool = model.make_kv_pool(num_pages + num_padding_pages)
            model.prepack_weights()
            if model.packable and not model.sharded:  # its ranks make one pass a step, each layer whole for a moment
                self._cpu_decoder = CpuDecoder.of(model, self._pool, row_multiple=self._multiple)

    def warm_up(self) -> None:
        """What the first requests would wait for otherwise: compiling and capturing, on CUDA."""
        if self._graphs is not None:
            self._graphs.warm_up()

    def pin(self, version: Version | None, count: int = 1) -> None:
        """Pins a version's row for so many requests, before ``Scheduler.add``; ``NotFound`` if it was never published.
        ``unpin`` for each when it has ended (last delta, failure, cancel), was refused, or is with another version.
        None, the base model, needs no row: both do nothing."""
        if version is None:
            return
        if version in self._pins:
            self._pins[version].count += count
        else:
            self._pins[version] = _Pin(row=self._adapters.pin_version(version), count=count)

    def unpin(self, version: Version | None, count: int = 1) -> None:
        if version is None:
            return
        pin = self._pins[version]
        pin.count -= count
        if pin.count == 0:
            del self._pins[version]
            self._adapters.unpin_version(version)

    @torch.no_grad()
    def step(self, plan: StepPlan) -> list[SequenceOutput]:
        """Sorts the sequences by adapter, prefills and decodes in one pass (one a pass where the model is not
        packable; decoding sequences apart where there is a faster way for them), computes wanted logits only, samples,
        and returns in the plan's order. Draft tokens are computed as if they had been sampled. Of a sequence that comes
        several times, with chunk after chunk of its prompt, each finds the keys of those before it."""
        if self.copies_pages:
            for sequence in plan.sequences:
                if sequence.copied is not None:
                    self._copy(sequence.copied)
        if self._graphs is not None:
            outputs = self._run_graphs(self._graphs, plan.sequences)
        elif self._cpu_decoder is not None:
            outputs = self._run_cpu_decoder(self._cpu_decoder, plan.sequences)
        elif self._model.packable:
            outputs = self._run(sorted(plan.sequences, key=self._order))
        else:
            outputs = [output for sequence in plan.sequences for output in self._run([sequence])]
        by_sequence: dict[int, list[SequenceOutput]] = defaultdict(list)
        for output in reversed(outputs):  # nothing changes the order of a sequence's own
            by_sequence[output.sequence].append(output)
        return [by_sequence[sequence.sequence].pop() for sequence in plan.sequences]

    def _copy(self, copied: PageCopy) -> None:
        for pages in self._pool.joined or (*self._pool.keys, *self._pool.values):
            page = pages[copied.target].zero_()
            page[..., : copied.num_tokens, :] = pages[copied.source, ..., : copied.num_tokens, :]

    def _order(self, sequence: SequenceStep) -> tuple[int, int]:
        return _row_order(self._row(sequence))

    def _row(self, sequence: SequenceStep) -> RowRef | None:
        if sequence.version is None:
            return None
        pin = self._pins.get(sequence.version)
        if pin is None:
            raise ServerError(f"a step names {sequence.version}, which no request has pinned")
        return pin.row

    def _rows_of(self, sequences: Sequence[SequenceStep]) -> list[RowRef | None]:
        """Their versions are looked up once, where one comes after the other."""
        rows: list[RowRef | None] = []
        version, row = None, None
        for sequence in sequences:
            if sequence.version is not version:
                version, row = sequence.version, self._row(sequence)
            rows.append(row)
        return rows

    # ------------------------------------------------------------------------------------------------ on CUDA
    def _run_graphs(self, graphs: CudaGraphs, sequences: Sequence[SequenceStep]) -> list[SequenceOutput]:
        """What the device did ahead is taken where it serves; the rest is computed now. Before the result of anything
        is waited for, the next step of all that decode from here on is launched, ahead.

        What was ahead when a request moved is of the version before, and is reported as that: the device has read those
        weights, or reads them before anything that takes their row. The step after is the new version's."""
        launched, self._ahead = self._ahead, None
        goes_on, drafted = True, False
        decodes = _is_output if self._batch_invariant else _decodes
        prefilled: list[SequenceStep] = []
        served: list[tuple[tuple[int, int], int, SequenceStep]] = []
        fresh: list[SequenceStep] = []
        version, order = None, _row_order(None)
        for sequence in sequences:
            # Top-k and top-p are sampled on the host, so the device does not know the next token; and the pass after
            # would write over the logits that alternatives are taken from.
            if sequence.topk or _is_cut(sequence):
                goes_on = False
            if not decodes(sequence):
                prefilled.append(sequence)
                continue
            if not sequence.sample:  # nor does it where it was sampled before
                goes_on = False
            index = None if launched is None else launched.index(sequence)
            if index is None:
                drafted = drafted or bool(sequence.draft)
                fresh.append(sequence)
                continue
            if sequence.draft:  # its next token is there already; the step after tries again
                goes_on = False
            if sequence.version is not version:  # most often it is the one of the sequence before
                version, order = sequence.version, self._order(sequence)
            served.append((order, index, sequence))
        if drafted:  # all of them in one pass
            prefilled, fresh, goes_on = prefilled + fresh, [], False

        pending: list[_Launch] = []
        outputs: list[SequenceOutput] = []
        if launched is not None and served:
            served.sort()  # no two have the same index
            rows = [(index, sequence) for _, index, sequence in served]
            pending.append(_Launch(launched=launched, rows=rows, goes_on=rows))
        fresh.sort(key=self._order)
        parts = [fresh[first : first + graphs.max_rows] for first in range(0, len(fresh), graphs.max_rows)]
        passes = self._passes(graphs, sorted(prefilled, key=self._order))
        # Logits and hidden states stay until the next launch of their kind.
        together = goes_on and len(parts) <= 1 and len(passes) <= 1
        for part in parts:
            if not together:
                outputs += self._take(graphs, pending)
            rows = list(enumerate(part))
            launched = graphs.launch(part, self._rows_of(part))
            pending.append(_Launch(launched=launched, rows=rows, goes_on=rows))
        for part in passes:
            if not together:
                outputs += self._take(graphs, pending)
            pending.append(self._launch_prefill(graphs, part))
        if together and (served or fresh) and not (served and fresh):  # two decode steps would take longer than a wait
            self._ahead = self._launch_ahead(graphs, pending)
        return outputs + self._take(graphs, pending)

    def _launch_ahead(self, graphs: CudaGraphs, pending: Sequence[_Launch]) -> LaunchedStep | None:
        kept: list[tuple[int, SequenceStep]] = []
        end = 0
        for entry in pending:
            kept += [(end + index, sequence) for index, sequence in entry.goes_on]
            end += len(entry.launched.sequences)
        if len(pending) > 1:
            kept.sort(key=lambda pair: self._order(pair[1]))
        if len(kept) > graphs.max_rows:
            return None
        rows = self._rows_of([sequence for _, sequence in kept])
        return graphs.launch_ahead([entry.launched for entry in pending], kept, rows)

    def _passes(self, graphs: CudaGraphs, sequences: Sequence[SequenceStep]) -> list[list[SequenceStep]]:
        """Cut into prefills, in order."""
        if self._batch_invariant:
            return [list(sequences[first : first + PASS_CHUNKS]) for first in range(0, len(sequences), PASS_CHUNKS)]
        passes: list[list[SequenceStep]] = []
        num_tokens = num_rows = 0
        for sequence in sequences:
            if len(sequence.draft) >= graphs.max_prefill_rows:
                sequence = replace(sequence, draft=sequence.draft[: graphs.max_prefill_rows - 1])
            size, own_rows = _num_inputs(sequence), 1 + len(sequence.draft)
            num_tokens, num_rows = num_tokens + size, num_rows + own_rows
            if not passes or num_tokens > graphs.max_tokens or num_rows > graphs.max_prefill_rows:
                passes.append([])
                num_tokens, num_rows = size, own_rows
            passes[-1].append(sequence)
        return passes

    def _launch_prefill(self, graphs: CudaGraphs, sequences: Sequence[SequenceStep]) -> _Launch:
        """Sequences sorted by adapter. A batch-invariant pass always has room for ``PASS_CHUNKS`` of them, and each
        begins at a multiple of their length. So the base's products have one shape, an adapter's tiles are cut alike
        wherever a chunk lies, and attention is each sequence's own."""
        starts: list[int] = []
        end = 0
        for sequence in sequences:
            starts.append(end)
            end += self.chunk_tokens or _num_inputs(sequence)
        sampled: list[SequenceStep] = []
        last: list[int] = []
        goes_on: list[tuple[int, SequenceStep]] = []
        for start, sequence in zip(starts, sequences, strict=True):
            if sequence.sample:
                if sequence.prompt is None:  # who asks for scores seldom asks for more than a token
                    goes_on.append((len(sampled), sequence))
                last += range(start + len(sequence.tokens) - 1, start + _num_inputs(sequence))
                sampled += _rows(sequence)
        rows, sampled_rows = self._rows_of(sequences), self._rows_of(sampled)
        launched = graphs.launch_prefill(sequences, rows, starts, sampled, sampled_rows, last)
        return _Launch(
            launched=launched,
            rows=list(enumerate(sampled)),
            goes_on=goes_on,
            prefill=list(zip(starts, sequences, strict=True)),
        )

    def _take(self, graphs: CudaGraphs, pending: list[_Launch]) -> list[SequenceOutput]:
        """The outputs of all of them, in order; they are pending no longer."""
        outputs: list[SequenceOutput] = []
        for entry in pending:
            found = self._collect(entry.launched, entry.rows)
            outputs += found if entry.prefill is None else self._prefilled(graphs, entry.prefill, found)
        pending.clear()
        return outputs

    def _prefilled(
        self, graphs: CudaGraphs, prefill: Sequence[tuple[int, SequenceStep]], sampled: Sequence[SequenceOutput]
    ) -> list[SequenceOutput]:
        starts, sequences = [start for start, _ in prefill], [sequence for _, sequence in prefill]
        verified = iter(_verified([sequence for sequence in sequences if sequence.sample], sampled))
        outputs = [next(verified) if sequence.sample else _output(sequence, None) for sequence in sequences]
        if all(sequence.prompt is None for sequence in sequences):
            return outputs
        sizes = [_num_inputs(sequence) for sequence in sequences]
        given = segments(self._rows_of(sequences), sizes, starts)
        batch = ForwardBatch(
            seq_lens=(starts[-1] + sizes[-1],),
            segments=tuple(Segment(start=start, end=end, row=row) for start, end, row in given),
        )
        lora = LoraBatch.of(batch, self._model.bank)
        return self._scored(sequences, starts, outputs, graphs.hidden_TD, lora)

    def _collect(self, launched: LaunchedStep, rows: Sequence[tuple[int, SequenceStep]]) -> list[SequenceOutput]:
        """What its rows sampled. Those with top-k or top-p are sampled here."""
        decoded = launched.wait()
        chosen, sequences = [index for index, _ in rows], [sequence for _, sequence in rows]
        tokens, logprobs = decoded.tokens[chosen].tolist(), decoded.logprobs[chosen].tolist()

        def logits(wanted: Sequence[int]) -> torch.Tensor:
            return self._model.lm_head.scaled(launched.logits_NV[[chosen[n] for n in wanted]])

        cut = [n for n, sequence in enumerate(sequences) if sequence.sample and _is_cut(sequence)]
        for part in _parts(cut, singly=self._batch_invariant):
            tokens_M, logprobs_M = sample_tokens(logits(part), [_params(sequences[n]) for n in part])
            for n, token, logprob in zip(part, tokens_M.tolist(), logprobs_M.tolist(), strict=True):
                tokens[n], logprobs[n] = token, logprob
        return _outputs(sequences, launched.versions(chosen), tokens, logprobs, logits, singly=self._batch_invariant)

    def _run_cpu_decoder(self, cpu_decoder: CpuDecoder, sequences: Sequence[SequenceStep]) -> list[SequenceOutput]:
        """Draft tokens and a short prompt's tokens are rows like sequences, each with one key more: a step writes all
        keys before it reads any, and a row reads those up to its own."""
        in_rows, others = self._in_rows(sequences)
        in_rows.sort(key=self._order)
        rows = [row for sequence in in_rows for row in _inputs(sequence)]
        sampled: list[SequenceOutput] = []
        for first in range(0, len(rows), MAX_ROWS):
            part = rows[first : first + MAX_ROWS]
            wanted = [index for index, row in enumerate(part) if row.sample]
            logits_NV = cpu_decoder.logits(
                [s.tokens[0] for s in part],
                [s.context for s in part],
                [s.pages for s in part],
                [self._row(s) for s in part],
                wanted or [0],
            )
            if wanted:
                sampled += _sampled([part[index] for index in wanted], logits_NV)
        verified = iter(_verified([sequence for sequence in in_rows if sequence.sample], sampled))
        outputs = [next(verified) if sequence.sample else _output(sequence, None) for sequence in in_rows]
        return outputs + (self._run(sorted(others, key=self._order)) if others else [])

    def _in_rows(self, sequences: Sequence[SequenceStep]) -> tuple[list[SequenceStep], list[SequenceStep]]:
        """Those that are rows of the CPU decoder, and the others."""
        in_rows = [sequence for sequence in sequences if _decodes(sequence)]
        others = [sequence for sequence in sequences if not _decodes(sequence)]
        num_tokens = sum(len(sequence.tokens) for sequence in others)
        num_pages = sum(len(s.tokens) * pages_for(s.context + len(s.tokens)) for s in others)
        if self._multiple > 1 or num_tokens > ROW_TOKENS or num_pages > ROW_PAGES:
            return in_rows, others
        in_rows += [sequence for sequence in others if sequence.prompt is None]
        return in_rows, [sequence for sequence in others if sequence.prompt is not None]

    def _padding(self, version: Version | None, num_tokens: int) -> SequenceStep:
        """Tokens that belong to no sequence."""
        return SequenceStep(
            sequence=-1,
            version=version,
            tokens=(0,) * num_tokens,
            context=0,
            pages=self._padding_pages[: pages_for(num_tokens)],
            sample=False,
            temperature=0.0,
            top_k=-1,
            top_p=1.0,
            seed=0,
            rng_offset=0,
        )

    def _padded(self, sequences: Sequence[SequenceStep]) -> list[SequenceStep]:
        """With every adapter's tokens padded to a multiple."""
        padded: list[SequenceStep] = []
        for _, group in groupby(sequences, key=self._row):
            members = list(group)
            padded += members
            if missing := -sum(map(_num_inputs, members)) % self._multiple:
                padded.append(self._padding(members[0].version, missing))
        return padded

    def _run(self, sequences: Sequence[SequenceStep]) -> list[SequenceOutput]:
        """Padding has outputs too."""
        if self._multiple > 1:
            sequences = self._padded(sequences)
        starts, hidden_TD, lora = self._hidden(sequences)
        outputs = self._sample(sequences, starts, hidden_TD, lora)
        return self._scored(sequences, starts, outputs, hidden_TD, lora)

    def _hidden(self, sequences: Sequence[SequenceStep]) -> tuple[list[int], torch.Tensor, LoraBatch | None]:
        """Where each begins in the stream, the stream's hidden states [T, D], and its adapters for the head."""
        device = self._model.device
        starts: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        for sequence in sequences:
            starts.append(len(tokens))
            tokens += (*sequence.tokens, *sequence.draft)
            positions += range(sequence.context, sequence.context + _num_inputs(sequence))
        tokens_T, positions_T = (to_device(torch.tensor(x), device) for x in (tokens, positions))
        hidden_TD, lora = self._model.decoder_forward(tokens_T, positions_T, self._pass(sequences))
        return starts, hidden_TD, lora

    def _pass(self, sequences: Sequence[SequenceStep]) -> ForwardBatch:
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
        return ForwardBatch(
            seq_lens=tuple(_num_inputs(s) for s in sequences),
            segments=tuple(segments),
            kv=PagedKV(
                pool=self._pool,
                page_table=to_device(page_table, self._model.device),
                context_lens=tuple(s.context for s in sequences),
            ),
        )

    def _sample(
        self, sequences: Sequence[SequenceStep], starts: Sequence[int], hidden_TD: torch.Tensor, lora: LoraBatch | None
    ) -> list[SequenceOutput]:
        """One output a sequence, with a token where one is wanted."""
        outputs = [_output(s, None) for s in sequences]
        sampling = [index for index, sequence in enumerate(sequences) if sequence.sample]
        if not sampling:
            return outputs
        wanted: list[int] = []
        own: list[int] = []
        for _, group in groupby(sampling, key=lambda index: self._row(sequences[index])):
            first = len(wanted)
            for index in group:
                last = starts[index] + len(sequences[index].tokens) - 1
                wanted += range(last, last + 1 + len(sequences[index].draft))
            own += range(first, len(wanted))
            if self._multiple > 1:
                wanted += wanted[-1:] * (-(len(wanted) - first) % MIN_ROWS)
        logits_NV = self._model.lm_head.logits_at(hidden_TD, lora, torch.tensor(wanted))
        if len(own) < len(wanted):
            logits_NV = logits_NV[own]
        chosen = [sequences[index] for index in sampling]
        sampled = _sampled([row for sequence in chosen for row in _rows(sequence)], logits_NV)
        for index, output in zip(sampling, _verified(chosen, sampled), strict=True):
            outputs[index] = output
        return outputs

    def _scored(
        self,
        sequences: Sequence[SequenceStep],
        starts: Sequence[int],
        outputs: Sequence[SequenceOutput],
        hidden_TD: torch.Tensor,
        lora: LoraBatch | None,
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
        self, chunk: PromptChunk, start: int, hidden_TD: torch.Tensor, lora: LoraBatch | None
    ) -> PromptRows | None:
        """Row r of the chunk is the stream's token ``start + r``. None: not finite."""
        parts: list[PromptRows] = []
        for first in range(0, chunk.num_rows, SCORE_ROWS):
            last = min(first + SCORE_ROWS, chunk.num_rows)
            rows_S = torch.arange(start + first, start + last)
            if missing := -len(rows_S) % self._multiple:
                rows_S = torch.cat([rows_S, rows_S[-1:].expand(missing)])
            logits_SV = self._model.lm_head.logits_at(hidden_TD, lora, rows_S)[: last - first]
            part = score_rows(chunk, first, last, logits_SV)
            if not np.isfinite(part.logprobs).all():
                return None
            parts.append(part)
        return PromptRows.joined(parts)


def _sampled(sequences: Sequence[SequenceStep], logits_NV: torch.Tensor) -> list[SequenceOutput]:
    """Row n is sequence n's."""
    tokens_N, logprobs_N = sample_tokens(logits_NV, [_params(sequence) for sequence in sequences])
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
    """What was sampled by ``versions``, where that is wanted, with the likeliest tokens where they are. ``logits``
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
    """The step as steps without drafts: its last token, and each draft token behind it."""
    if not sequence.draft:
        return [sequence]
    return [
        replace(
            sequence,
            tokens=(token,),
            context=sequence.context + index,
            rng_offset=sequence.rng_offset + index,
            draft=(),
        )
        for index, token in enumerate((*sequence.tokens, *sequence.draft))
    ]


def _inputs(sequence: SequenceStep) -> list[SequenceStep]:
    """The step as steps of one token each; those sample that ``_rows`` has."""
    ahead = len(sequence.tokens) - 1
    if not ahead:
        return _rows(sequence)
    single = [
        replace(sequence, tokens=(token,), context=sequence.context + index, sample=False, draft=())
        for index, token in enumerate(sequence.tokens[:-1])
    ]
    last = replace(sequence, tokens=sequence.tokens[-1:], context=sequence.context + ahead)
    return [*single, *_rows(last)]


def _verified(sequences: Sequence[SequenceStep], sampled: Sequence[SequenceOutput]) -> list[SequenceOutput]:
    """``sampled`` from each of the sequences' ``_rows``, in their order: accepted as long as a row's input token is
    what the row before it sampled."""
    outputs: list[SequenceOutput] = []
    end = 0
    for sequence in sequences:
        start, end = end, end + 1 + len(sequence.draft)
        rows = [sampled[start]]
        for token, row in zip(sequence.draft, sampled[start + 1 : end], strict=True):
            if rows[-1].tokens != (token,):
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
    """One token in, one token out, its draft aside."""
    return len(sequence.tokens) == 1 and sequence.sample and sequence.prompt is None


def _is_output(sequence: SequenceStep) -> bool:
    """One token in, which was sampled: of batch-invariant steps that decode, a prompt's token never."""
    return len(sequence.tokens) == 1 and sequence.is_output


def _is_cut(sequence: SequenceStep) -> bool:
    return sequence.temperature > 0 and (sequence.top_k > 0 or sequence.top_p < 1)


def _row_order(row: RowRef | None) -> tuple[int, int]:
    return (0, 0) if row is None else (row.rank_bucket, row.slot)


def _params(sequence: SequenceStep) -> RowParams:
    return RowParams(
        temperature=sequence.temperature,
        top_k=sequence.top_k,
        top_p=sequence.top_p,
        uniform=uniform(sequence.seed, sequence.rng_offset),
    )
