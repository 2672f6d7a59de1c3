"""A fake of CUDA graphs for machines without a CUDA device: the real bookkeeping, computed by the model's modules.

What a kernel would read is read from the same buffers: a pass is taken apart into sequences and adapters by its tiles,
splits and page table alone. Tokens of no sequence are computed too, and then are NaN. A replay leaves nothing of other
graphs' results, which share its memory, and so does a capture of what the buffers held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from descant.adapters.layout import RANK_BUCKETS
from descant.adapters.slots import RowRef
from descant.model.forward_batch import ForwardBatch, PagedKV, Segment
from descant.model.lora.batch import LoraBatch
from descant.model.paged_batch import AdapterTiles, DecodeMetadata, PagedBatch, PrefillMetadata
from descant.sample.cuda_graphs import CudaGraphs, DecodeKey, LaunchedStep, PassTensors, PrefillKey, table_width
from descant.sample.plan import SequenceStep
from descant.sample.runner import CHUNK_TOKENS, PASS_CHUNKS, Sampler
from descant.sample.sampling import RowParams, sample_tokens
from descant.types import SCALE_NUMERATOR


class FakeCudaGraphs(CudaGraphs):
    """Of a sampler on CPU (``install``). ``steps`` and ``prefills``: what was launched; ``ahead``: how many of the
    steps were ahead; ``captured``: what was captured, in order."""

    def __init__(self, sampler: Sampler, *, max_rows: int = 8, max_tokens: int = 64, captures: bool = True):
        model, num_pages = sampler._model, len(sampler._pool.keys[0])
        super().__init__(
            model,
            model.make_kv_pool(num_pages + 1),
            dummy_page=num_pages,
            table_width=table_width(model, num_pages),
            max_rows=max_rows,
            max_tokens=PASS_CHUNKS * (sampler.chunk_tokens or CHUNK_TOKENS) if sampler._batch_invariant else max_tokens,
            batch_invariant=sampler._batch_invariant,
        )
        self._captures = captures
        self._captures_prefill = captures and not model.has_experts
        self._sampler = sampler
        self.steps: list[DecodeKey] = []
        self.prefills: list[PrefillKey] = []
        self.captured: list[DecodeKey | PrefillKey] = []
        self.ahead = 0

    @classmethod
    def install(cls, sampler: Sampler, **options: int) -> FakeCudaGraphs:
        graphs = cls(sampler, **options)  # type: ignore[arg-type]
        sampler._graphs = graphs
        return graphs

    def launch_ahead(
        self,
        launched: Sequence[LaunchedStep],
        kept: Sequence[tuple[int, SequenceStep]],
        rows: Sequence[RowRef | None],
    ) -> LaunchedStep | None:
        step = super().launch_ahead(launched, kept, rows)
        self.ahead += step is not None
        return step

    # ------------------------------------------------------------------------------------------------ graphs
    def _capture(self, key: DecodeKey | PrefillKey) -> PassTensors:
        self._dummies(key)
        computed = super()._compute_prefill(key) if isinstance(key, PrefillKey) else super()._compute_step(key)
        computed.graph = _Replay(self, key, computed)
        self.captured.append(key)
        return computed

    def _replay(self, key: DecodeKey | PrefillKey, computed: PassTensors) -> None:
        for other in self._graphs.values():
            other.tokens_N.fill_(-1)
            other.result_2N.fill_(torch.nan)
        found = self._compute(key)
        computed.tokens_N.copy_(found.tokens_N)
        computed.result_2N.copy_(found.result_2N)

    def _compute_step(self, key: DecodeKey) -> PassTensors:
        self.steps.append(key)
        return super()._compute_step(key)

    def _compute_prefill(self, key: PrefillKey) -> PassTensors:
        self.prefills.append(key)
        return super()._compute_prefill(key)

    # ------------------------------------------------------------------------------------------------ kernels
    def _hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        seen = _sequences(batch.attention, len(tokens_T))
        kv = PagedKV(
            pool=self._pool,
            page_table=torch.stack([self._pages(sequence.pages) for sequence in seen]),
            context_lens=tuple(sequence.context for sequence in seen),
        )
        segments = tuple(self._segments(batch.adapters))
        lengths = tuple(sequence.length for sequence in seen)
        hidden_TD, _ = self._model.decoder_forward(
            tokens_T, positions_T, ForwardBatch(seq_lens=lengths, segments=segments, kv=kv)
        )
        start = 0
        for sequence in seen:
            end = start + sequence.length
            if sequence.pages is None:
                hidden_TD[start:end] = torch.nan
            else:
                want = torch.arange(sequence.context, sequence.context + sequence.length)
                assert torch.equal(positions_T[start:end], want)
            start = end
        return hidden_TD

    def _pages(self, pages: torch.Tensor | None) -> torch.Tensor:
        width = self._prefill_layout.width
        return torch.full((width,), self._dummy_page) if pages is None else pages.long()

    def _segments(self, adapters: Sequence[AdapterTiles]) -> list[Segment]:
        """A tile each."""
        found: list[Segment] = []
        bank = self._model.bank
        slabs = {rank_bucket: bank.compute_slab(rank_bucket) for rank_bucket in RANK_BUCKETS}
        for entry in adapters:
            for start, end, at, rank_bucket, scale, _ in entry.tiles_C6.tolist():
                if start < end:
                    assert end - start <= entry.tile_rows
                    assert rank_bucket <= entry.max_rank
                    address, slab_SP = entry.origin.data_ptr() + at * entry.origin.itemsize, slabs[rank_bucket]
                    slot, rest = divmod(address - slab_SP.data_ptr(), slab_SP.stride(0) * slab_SP.itemsize)
                    assert rest == 0
                    row = RowRef(rank_bucket=rank_bucket, slot=slot)
                    want = torch.tensor(SCALE_NUMERATOR / bank.lora(row).rank, dtype=torch.float32)
                    assert int(want.view(torch.int32)) == scale
                    found.append(Segment(start=start, end=end, row=row))
        return sorted(found, key=lambda segment: segment.start)

    def _sample(
        self,
        hidden_ND: torch.Tensor,
        logits_NV: torch.Tensor,
        adapters: Sequence[AdapterTiles],
        temperature_N: torch.Tensor,
        uniform_N: torch.Tensor,
    ) -> PassTensors:
        """Adapters row by row: a row's bits do not depend on its neighbours."""
        head, num_rows = self._model.lm_head, len(hidden_ND)
        segments = tuple(
            Segment(start=row, end=row + 1, row=tile.row)
            for tile in self._segments(adapters)
            for row in range(tile.start, tile.end)
        )
        batch = ForwardBatch(seq_lens=(num_rows,), segments=segments)
        raw_NV, _ = head._raw_logits(hidden_ND, LoraBatch.of(batch, self._model.bank), 0)
        logits_NV.copy_(raw_NV)
        params = [  # the cuts are the host's
            RowParams(temperature=temperature, top_k=-1, top_p=1.0, uniform=uniform)
            for temperature, uniform in zip(temperature_N.tolist(), uniform_N.tolist(), strict=True)
        ]
        tokens_N, logprobs_N = sample_tokens(head.scaled(logits_NV), params)
        result_2N = torch.stack([tokens_N.double(), logprobs_N.double()])
        return PassTensors(graph=None, logits_NV=logits_NV, tokens_N=tokens_N, result_2N=result_2N)


@dataclass(frozen=True, slots=True)
class _Replay:
    graphs: FakeCudaGraphs
    key: DecodeKey | PrefillKey
    computed: PassTensors

    def replay(self) -> None:
        self.graphs._replay(self.key, self.computed)


@dataclass(slots=True)
class _Sequence:
    """``pages`` None: tokens that only fill a pass up."""

    length: int
    context: int
    pages: torch.Tensor | None


def _sequences(attention: DecodeMetadata | PrefillMetadata, num_tokens: int) -> list[_Sequence]:
    """In the order of the stream, of which they are all."""
    if isinstance(attention, DecodeMetadata):
        positions = dict.fromkeys(range(num_tokens), -1)
        for row, _, _, position, _ in attention.splits_C5[: attention.num_splits].tolist():
            assert row < num_tokens
            if row >= 0:
                positions[row] = position
        assert min(positions.values()) >= 0
        return [_Sequence(1, position, attention.table_NW[row]) for row, position in positions.items()]
    found: list[_Sequence] = []
    before, end = None, 0
    for row, start, length, position in sorted(attention.tiles_C4.tolist(), key=lambda tile: tile[1]):
        if length == 0:
            assert row == -1
            continue
        assert start == end
        assert length <= attention.tile_tokens
        if row == before and row >= 0:
            assert found[-1].context + found[-1].length == position
            found[-1].length += length
        else:
            own = None if row < 0 else attention.table_BW[row]
            found.append(_Sequence(length, 0 if own is None else position, own))
        before, end = row, start + length
    assert end == num_tokens
    return found
