"""On a CUDA device: attention over the pages of a decode step against the plain formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from descant.model import paged_batch
from descant.model.forward_batch import PAGE_TOKENS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
POSITIONS = [0, 1, 63, 64, 65, 511, 512, 513, 1300]
SCALING = 0.3


class Pages:
    """Sequences whose pages lie anywhere; what is in no sequence is NaN."""

    def __init__(self, heads: int, group: int, size: int, value_size: int, dtype: torch.dtype):
        random = torch.Generator().manual_seed(0)
        width = max(POSITIONS) // PAGE_TOKENS + 1
        num_pages = len(POSITIONS) * width

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(DEVICE, dtype)

        self.table_NW = torch.randperm(num_pages, generator=random).view(-1, width).int().to(DEVICE)
        self.keys = normal(num_pages, heads, PAGE_TOKENS, size)
        self.values = normal(num_pages, heads, PAGE_TOKENS, value_size)
        for row, position in enumerate(POSITIONS):
            for pages in (self.keys, self.values):
                last = self.table_NW[row, position // PAGE_TOKENS].long()
                pages[last, :, position % PAGE_TOKENS :] = torch.nan
                pages[self.table_NW[row, position // PAGE_TOKENS + 1 :].long()] = torch.nan
        self.query = normal(len(POSITIONS), heads * group, size)
        self.key = normal(len(POSITIONS), heads, size)
        self.value = normal(len(POSITIONS), heads, value_size)

    def attend(self, rows: list[int], split_tokens: int, window: int, softcap: float) -> torch.Tensor:
        from descant.model.attention.decode_kernels import decode_attention

        splits, partials = paged_batch.kv_splits(np.array(POSITIONS)[rows], split_tokens)
        room = np.full((2 * len(splits), 5), -1)
        room[: len(splits)] = splits
        batch = paged_batch.DecodeMetadata(
            table_NW=self.table_NW[rows],
            splits_C5=torch.tensor(room, dtype=torch.int32, device=DEVICE),
            partials_N2=torch.tensor(partials, dtype=torch.int32, device=DEVICE),
            num_splits=len(room),
            num_partials=len(room) if partials.any() else 0,
        )
        return decode_attention(
            self.query[rows],
            self.key[rows],
            self.value[rows],
            self.keys,
            self.values,
            batch,
            scaling=SCALING,
            window=window,
            softcap=softcap,
        )

    def expected(self, window: int, softcap: float) -> torch.Tensor:
        outs = []
        for row, position in enumerate(POSITIONS):
            pages = self.table_NW[row].long()
            keys, values = (
                torch.cat([x[pages].transpose(1, 2).flatten(0, 1)[:position], own[row][None]]).double()
                for x, own in ((self.keys, self.key), (self.values, self.value))
            )
            group = self.query.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("hd,nhd->hn", self.query[row].double(), keys) * SCALING
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if window:
                scores[:, : max(0, position + 1 - window)] = -torch.inf
            outs.append(torch.einsum("hn,nhd->hd", scores.softmax(1), values))
        return torch.stack(outs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("heads", "group", "size", "value_size", "window", "softcap"),
    [(2, 2, 128, 128, 0, 0.0), (1, 3, 24, 16, 50, 0.0), (2, 1, 16, 32, 0, 20.0), (1, 8, 64, 64, 600, 5.0)],
)
def test_splits_add_up(
    heads: int,
    group: int,
    size: int,
    value_size: int,
    window: int,
    softcap: float,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    pages = Pages(heads, group, size, value_size, dtype)
    want = pages.expected(window, softcap)
    everyone = list(range(len(POSITIONS)))
    for split_tokens in (128, 512):
        got = pages.attend(everyone, split_tokens, window, softcap)
        assert (got - want).norm() / want.norm() <= tolerance
        for row, position in enumerate(POSITIONS):  # its own are in its page now, where the next step finds them
            page = pages.table_NW[row, position // PAGE_TOKENS]
            assert torch.equal(pages.keys[page, :, position % PAGE_TOKENS], pages.key[row])
            assert torch.equal(pages.values[page, :, position % PAGE_TOKENS], pages.value[row])
        for row in everyone:
            assert torch.equal(pages.attend([row], split_tokens, window, softcap)[0], got[row]), "alone as among others"
