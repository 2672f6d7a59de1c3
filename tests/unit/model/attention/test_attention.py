"""The one attention function against the formula in float64, and against itself cut up in every way."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from descant.errors import UserError
from descant.model.attention import tiles
from descant.model.attention.dispatch import attention
from descant.model.forward_batch import PAGE_TOKENS, ForwardBatch, KVPool, PagedKV, Prefix, stream_rows

LAYER: Any = SimpleNamespace(layer_idx=0, is_causal=True)
LENGTHS = (37, 200, 1, 64, 129, 64, 5)
RULES = (
    pytest.param({}, id="plain"),
    pytest.param({"sliding_window": 50}, id="window"),
    pytest.param({"softcap": 3.0}, id="softcap"),
    pytest.param({"sliding_window": 50, "softcap": 3.0}, id="window and softcap"),
)


def qkv(tokens: int, dtype: torch.dtype, heads: int = 6, key_heads: int = 2, size: int = 16, seed: int = 0) -> Any:
    """As the families hand them over: [1, heads, T, D], not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(1, tokens, h, size, generator=generator).mul(1.5).to(dtype).transpose(1, 2)
        for h in (heads, key_heads, key_heads)
    )


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One sequence in the dtype given: [1, H, L, D] → [1, L, H, D]."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = (behind >= 0) & (behind < (sliding_window or 10**9))
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)
    return out.transpose(1, 2)


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, **rule: Any) -> torch.Tensor:
    out, weights = attention(LAYER, q, k, v, None, batch=batch, scaling=q.shape[-1] ** -0.5, **rule)
    assert weights is None
    assert out.is_contiguous()
    return out


class Pages:
    """A pool whose pages are full of NaN, and sequences that take pages of it in a scattered order."""

    def __init__(self, lengths: tuple[int, ...], key_heads: int, size: int, dtype: torch.dtype):
        blocks = [-(-length // PAGE_TOKENS) for length in lengths]
        shape = (sum(blocks) + 3, key_heads, PAGE_TOKENS, size)
        self.pool = KVPool(
            keys=(torch.full(shape, torch.nan, dtype=dtype),), values=(torch.full(shape, torch.nan, dtype=dtype),)
        )
        order = (torch.randperm(shape[0] - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.pages = [[order.pop() for _ in range(n)] for n in blocks]

    def batch(self, sequences: list[int], contexts: list[int], lengths: list[int]) -> ForwardBatch:
        table = torch.zeros(len(sequences), max(len(p) for p in self.pages), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            table[row, : len(self.pages[sequence])] = torch.tensor(self.pages[sequence])
        kv = PagedKV(pool=self.pool, page_table=table, context_lens=tuple(contexts))
        return ForwardBatch(seq_lens=tuple(lengths), kv=kv)


def paged(lengths: tuple[int, ...], q: Any, k: Any, v: Any, cuts: list[list[int]], **rule: Any) -> torch.Tensor:
    """The same tokens over pages: ``cuts[pass][sequence]`` new tokens, all sequences of a pass batched."""
    pages = Pages(lengths, k.shape[1], k.shape[3], k.dtype)
    starts = list(itertools.accumulate(lengths, initial=0))
    done = [0] * len(lengths)
    out = torch.full((1, q.shape[2], q.shape[1], v.shape[3]), torch.nan, dtype=q.dtype)
    for cut in cuts:
        members = [s for s, n in enumerate(cut) if n]
        tokens = torch.cat([torch.arange(starts[s] + done[s], starts[s] + done[s] + cut[s]) for s in members])
        batch = pages.batch(members, [done[s] for s in members], [cut[s] for s in members])
        with torch.no_grad():
            out[:, tokens] = call(q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], batch, **rule)
        for s in members:
            done[s] += cut[s]
    assert tuple(done) == lengths
    return out


def schedule(lengths: tuple[int, ...], prefill: tuple[int, ...], chunk: int, step: int = 1) -> list[list[int]]:
    """Prefill of ``prefill[s]`` tokens in chunks, each sequence at its own pace, then ``step`` tokens a pass."""
    cuts, done = [], [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths)):
        cut = []
        for s, length in enumerate(lengths):
            wanted = min(chunk, prefill[s] - done[s]) if done[s] < prefill[s] else min(step, length - done[s])
            cut.append(wanted)
            done[s] += wanted
        cuts.append(cut)
    return cuts


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)], ids=["grouped", "one to one", "one key head"])
def test_packed_equals_the_formula(rule: dict[str, Any], heads: tuple[int, int]) -> None:
    q, k, v = qkv(sum(LENGTHS), torch.float32, *heads)
    out = call(q, k, v, ForwardBatch(seq_lens=LENGTHS), **rule)
    start = 0
    for length in LENGTHS:
        alone = formula(*(x[:, :, start : start + length].double() for x in (q, k, v)), **rule)
        torch.testing.assert_close(out[:, start : start + length].double(), alone, atol=1e-5, rtol=0)
        start += length


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("values", [16, 24], ids=["equal sizes", "wider values"])
def test_gradients_equal_the_formulas(rule: dict[str, Any], values: int) -> None:
    q, k, _ = (x.requires_grad_() for x in qkv(sum(LENGTHS), torch.float32))
    v = qkv(sum(LENGTHS), torch.float32, size=values, seed=1)[2].requires_grad_()
    grad_out = torch.randn(1, sum(LENGTHS), 6, values, generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad(call(q, k, v, ForwardBatch(seq_lens=LENGTHS), **rule), (q, k, v), grad_out)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    outs, start = [], 0
    for length in LENGTHS:
        outs.append(formula(*(x[:, :, start : start + length] for x in doubles), **rule))
        start += length
    for name, mine, want in zip("qkv", got, torch.autograd.grad(torch.cat(outs, 1), doubles, grad_out.double())):
        assert (mine.double() - want).abs().max() <= 1e-5 * want.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("chunk", "step"), [(48, 1), (7, 3), (1000, 1)])
def test_prefill_and_decode_over_pages_equal_one_training_pass_bit_for_bit(
    dtype: torch.dtype, rule: dict[str, Any], chunk: int, step: int
) -> None:
    lengths = (150, 90, 201, 70, 9, 66)
    q, k, v = qkv(sum(lengths), dtype)
    once = call(q, k, v, ForwardBatch(seq_lens=lengths), **rule)
    cut = paged(lengths, q, k, v, schedule(lengths, (100, 60, 130, 3, 1, 64), chunk, step), **rule)
    assert torch.equal(cut, once)


def test_smollm2_shape_in_bf16_is_bit_equal() -> None:
    lengths = (384,) * 4
    q, k, v = qkv(sum(lengths), torch.bfloat16, 9, 3, 64)
    once = call(q, k, v, ForwardBatch(seq_lens=lengths))
    assert torch.equal(paged(lengths, q, k, v, schedule(lengths, (300, 355, 320, 370), 128)), once)


def test_many_blocks_are_added_in_one_order() -> None:
    """20 blocks: a sum over them in any other order than the sequence's shows by now."""
    q, k, v = qkv(1250, torch.float32)
    once = call(q, k, v, ForwardBatch(seq_lens=(1250,)))
    assert torch.equal(paged((1250,), q, k, v, schedule((1250,), (1240,), 300)), once)
    alone = [call(*(x[:, :, :n] for x in (q, k, v)), ForwardBatch(seq_lens=(n,)))[:, -1] for n in (600, 1025, 1249)]
    assert all(torch.equal(row, once[:, n - 1]) for row, n in zip(alone, (600, 1025, 1249)))


def test_a_token_does_not_depend_on_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(sum(LENGTHS), torch.bfloat16)
    once = call(q, k, v, ForwardBatch(seq_lens=LENGTHS))
    start = 0
    for length in LENGTHS:
        alone = call(*(x[:, :, start : start + length] for x in (q, k, v)), ForwardBatch(seq_lens=(length,)))
        assert torch.equal(alone, once[:, start : start + length])
        start += length
    monkeypatch.setattr(tiles, "TILE_SCORES", 1)
    assert torch.equal(call(q, k, v, ForwardBatch(seq_lens=LENGTHS)), once)


# ------------------------------------------------------------------------------------------------------ shared prefixes
OWN_LENGTHS = (100, 30, 5, 0, 20, 130, 30, 1)
PREFIXES = tuple(
    None if prefix is None else Prefix(parent=prefix[0], length=prefix[1])
    for prefix in (None, (0, 64), (1, 80), (0, 100), None, (2, 85), (0, 64), (5, 215))
)
ROWS = [torch.from_numpy(rows) for rows in stream_rows(OWN_LENGTHS, PREFIXES)]


def test_a_sequence_is_its_prefix_and_its_own_tokens() -> None:
    assert [len(rows) for rows in ROWS] == [100, 94, 85, 100, 20, 215, 94, 216]
    assert ROWS[2].tolist() == [*range(64), *range(100, 116), *range(130, 135)]
    assert ROWS[3].tolist() == [*range(100)]
    assert ROWS[7].tolist() == [*ROWS[2].tolist(), *range(155, 285), 315]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tile_scores", [1, tiles.TILE_SCORES])
def test_behind_a_shared_prefix_tokens_are_bit_equal(
    dtype: torch.dtype, rule: dict[str, Any], tile_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv(sum(OWN_LENGTHS), dtype)
    whole = call(*(x[:, :, torch.cat(ROWS)] for x in (q, k, v)), ForwardBatch(seq_lens=tuple(map(len, ROWS))), **rule)
    monkeypatch.setattr(tiles, "TILE_SCORES", tile_scores)
    shared = call(q, k, v, ForwardBatch(seq_lens=OWN_LENGTHS, prefixes=PREFIXES), **rule)
    assert torch.equal(shared[:, torch.cat(ROWS)], whole)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("values", [16, 24], ids=["equal sizes", "wider values"])
def test_gradients_of_shared_prefixes_equal_the_formulas(rule: dict[str, Any], values: int) -> None:
    num_tokens = sum(OWN_LENGTHS)
    q, k, _ = (x.requires_grad_() for x in qkv(num_tokens, torch.float32))
    v = qkv(num_tokens, torch.float32, size=values, seed=1)[2].requires_grad_()
    grad_out = torch.randn(1, num_tokens, 6, values, generator=torch.Generator().manual_seed(2))
    out = call(q, k, v, ForwardBatch(seq_lens=OWN_LENGTHS, prefixes=PREFIXES), **rule)
    got = torch.autograd.grad(out, (q, k, v), grad_out)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    own = [formula(*(x[:, :, rows] for x in doubles), **rule)[:, len(rows) - n :] for rows, n in zip(ROWS, OWN_LENGTHS)]
    for name, mine, want in zip("qkv", got, torch.autograd.grad(torch.cat(own, 1), doubles, grad_out.double())):
        assert (mine.double() - want).abs().max() <= 1e-5 * want.abs().max(), name


@pytest.mark.parametrize("stranger", [0, 1, 2])
def test_one_sequences_nan_stays_its_own(stranger: int) -> None:
    lengths = (70, 70, 70)
    q, k, v = qkv(sum(lengths), torch.float32)
    clean = call(q, k, v, ForwardBatch(seq_lens=lengths)).clone()
    for x in (q, k, v):
        x[:, :, stranger * 70 : stranger * 70 + 70] = torch.nan
    packed = call(q, k, v, ForwardBatch(seq_lens=lengths))
    over_pages = paged(lengths, q, k, v, schedule(lengths, (60, 64, 1), 32))
    for s in range(3):
        own = slice(s * 70, s * 70 + 70)
        if s != stranger:
            assert torch.equal(packed[:, own], clean[:, own])
            assert torch.equal(over_pages[:, own], clean[:, own])


def test_layers_share_the_passs_tables() -> None:
    q, k, v = qkv(sum(LENGTHS), torch.float32)
    batch = ForwardBatch(seq_lens=LENGTHS)
    call(q, k, v, batch)
    made = dict(batch.cache)
    call(q, k, v, batch)
    assert all(batch.cache[key] is value for key, value in made.items())


@pytest.mark.parametrize(
    ("module", "mask", "keywords", "message"),
    [
        (LAYER, None, {"s_aux": torch.zeros(6)}, "attention keyword 's_aux' is not supported"),
        (LAYER, torch.zeros(1), {}, "attention masks of the model's own are not supported"),
        (LAYER, None, {"dropout": 0.1}, "attention dropout is not supported: the model must be in eval mode"),
        (
            SimpleNamespace(layer_idx=0, is_causal=False),
            None,
            {},
            "attention that is not causal is not supported",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(module: Any, mask: Any, keywords: dict[str, Any], message: str) -> None:
    q, k, v = qkv(5, torch.float32)
    with pytest.raises(UserError, match=message):
        attention(module, q, k, v, mask, batch=ForwardBatch(seq_lens=(5,)), scaling=0.25, **keywords)
