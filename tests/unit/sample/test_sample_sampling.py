"""Draws against exact probabilities: chi-squared on a tiny vocabulary, cuts against a plain reference."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from descant.sample.rng import stream_seed, uniform
from descant.sample.sampling import RowParams, alternatives, likeliest, normaliser, sample_tokens

NUM_SAMPLES = 20_000
LOGITS = torch.tensor([2.0, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0, -3.0, -6.0, -torch.inf])


def params(uniform: float = 0.5, **fields: float) -> RowParams:
    return RowParams(**{"temperature": 1.0, "top_k": -1, "top_p": 1.0, "uniform": uniform, **fields})  # type: ignore


def exact(logits: torch.Tensor, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> list[float]:
    """The distribution that is sampled from, in plain Python: the largest first, ties by the lowest id."""
    weights = [math.exp(x / temperature) for x in logits.double().tolist()]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k > 0:
        order = order[:top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += weights[i]
        if mass >= top_p * total:
            break
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(weights))]


def test_uniform_is_uniform_and_streams_differ() -> None:
    for seed in (0, 1, -1, 2**63):
        numbers = [uniform(stream_seed(seed, 0), offset) for offset in range(NUM_SAMPLES)]
        assert 0 <= min(numbers) <= max(numbers) < 1
        assert stats.kstest(numbers, "uniform").pvalue > 0.001
    heads = [[uniform(stream_seed(seed, sample), 0) for sample in range(200)] for seed in range(20)]
    assert len({x for row in heads for x in row}) == 20 * 200
    for numbers in [heads[0], [row[0] for row in heads], [x for row in heads for x in row]]:
        assert stats.kstest(numbers, "uniform").pvalue > 0.001
    assert uniform(stream_seed(5, 3), 7) == uniform(stream_seed(5, 3), 7)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.5, -1, 1.0), (2.0, -1, 1.0), (1.0, 4, 1.0), (1.0, 2, 1.0), (1.0, -1, 0.8), (1.3, 6, 0.9)],
)
@pytest.mark.parametrize("head_tokens", [3, 1024], ids=["sorts beyond its head", "head is all"])
def test_draws_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float, head_tokens: int) -> None:
    rows = [
        params(uniform(stream_seed(1, 2), offset), temperature=temperature, top_k=top_k, top_p=top_p)
        for offset in range(NUM_SAMPLES)
    ]
    tokens, logprobs = sample_tokens(LOGITS.expand(NUM_SAMPLES, -1), rows, head_tokens=head_tokens)
    counts = torch.bincount(tokens, minlength=len(LOGITS)).double()
    expected = torch.tensor(exact(LOGITS, temperature, top_k, top_p), dtype=torch.float64) * NUM_SAMPLES
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert stats.chisquare(counts[kept].numpy(), expected[kept].numpy()).pvalue > 0.001
    scaled = (LOGITS / temperature).log_softmax(0)
    torch.testing.assert_close(logprobs, scaled[tokens], atol=1e-6, rtol=0)


def test_every_uniform_hits_the_token_that_owns_it() -> None:
    """On a vocabulary of many blocks: exactly the inverse of the running sum."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    edges = logits.double().softmax(0).cumsum(0)
    uniforms = torch.rand(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, _ = sample_tokens(logits.expand(4000, -1), [params(u) for u in uniforms.tolist()])
    expected = torch.searchsorted(edges, uniforms, right=True)
    near = (edges[expected.clamp_max(999)] - uniforms).abs().minimum((edges[tokens] - uniforms).abs()) < 1e-6
    assert ((tokens == expected) | near).all()
    assert (tokens == expected).float().mean() > 0.99


@pytest.mark.parametrize("u", [0.0, 1 - 2**-52])
def test_the_ends_of_the_unit_interval_never_give_a_token_without_probability(u: float) -> None:
    for vocab_size in (3, 256, 257, 1000):
        logits = torch.full((1, vocab_size), -torch.inf)
        logits[0, vocab_size // 2] = 0.0
        tokens, logprobs = sample_tokens(logits, [params(u)])
        assert tokens.tolist() == [vocab_size // 2]
        assert logprobs.tolist() == [0.0]


def test_greedy_takes_the_first_largest_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    tokens, logprobs = sample_tokens(logits, [params(0.9, temperature=0.0, top_p=0.5)])
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(logits.log_softmax(1)[0, 1].item(), abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-300])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    tokens, logprobs = sample_tokens(torch.tensor([[0.0, 3.0, 2.5, 1.0]]), [params(0.999, temperature=temperature)])
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == [0.0]


@pytest.mark.parametrize("head_tokens", [1, 2, 1024])
def test_ties_at_a_cut_go_to_the_lowest_ids(head_tokens: int) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0])
    for fields, allowed in [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {0, 1, 4}),
        ({"top_k": 4}, {0, 1, 2, 4}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.6}, {0, 1, 4}),  # e/(2e² + 4e) = 0.106 each: 0.576 + 0.106
        ({"top_k": 99}, {0, 1, 2, 3, 4, 5}),
    ]:
        rows = [params(i / 1000, **fields) for i in range(1000)]
        tokens, _ = sample_tokens(logits.expand(1000, -1), rows, head_tokens=head_tokens)
        assert set(tokens.tolist()) == allowed, fields


def test_a_row_is_sampled_alike_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(40, 5000, generator=generator) * 3).bfloat16().float()  # with ties
    rows = [
        params(
            uniform(9, i),
            temperature=(0.0, 0.7, 1.0, 1.5)[i % 4],
            top_k=(-1, 1, 50, 2000)[i % 5 % 4],
            top_p=(1.0, 0.9, 0.9999)[i % 3],
        )
        for i in range(40)
    ]
    tokens, logprobs = sample_tokens(logits, rows)
    for i in range(40):
        token, logprob = sample_tokens(logits[i : i + 1], rows[i : i + 1])
        assert token.item() == tokens[i].item()
        assert logprob.item() == logprobs[i].item()


def test_a_long_rows_sum_has_the_same_bits_alone_and_among_others() -> None:
    logits = torch.randn(32, 200_000, generator=torch.Generator().manual_seed(6)) * 4
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = normaliser(logits)
        for i in range(32):
            assert torch.equal(normaliser(logits[i : i + 1]), together[i : i + 1])
    finally:
        torch.set_num_threads(threads)


def test_a_row_that_is_not_finite_says_so_and_harms_no_other() -> None:
    good = torch.randn(1, 300, generator=torch.Generator().manual_seed(4))
    bad = [torch.full((1, 300), torch.nan), torch.full((1, 300), torch.inf), good.clone()]
    bad[2][0, 7] = torch.inf
    for fields in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 200, "top_p": 0.99}):
        for row in bad:
            row_params = params(0.4, **fields)  # type: ignore[arg-type]
            tokens, logprobs = sample_tokens(torch.cat([row, good, row]), [row_params] * 3, head_tokens=100)
            assert logprobs.isfinite().tolist() == [False, True, False]
            alone = sample_tokens(good, [row_params], head_tokens=100)
            assert (tokens[1], logprobs[1]) == (alone[0][0], alone[1][0])
            assert ((tokens >= 0) & (tokens < 300)).all()


def test_the_likeliest_tokens() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(5))
    temperatures = [1.0, 0.5, 2.0, 0.0, 1.0]
    ids, logprobs = likeliest(logits, temperatures, 3)
    reference = (logits / torch.tensor([t or 1.0 for t in temperatures])[:, None]).log_softmax(1)
    torch.testing.assert_close(logprobs, reference.topk(3, dim=1).values, atol=1e-6, rtol=0)
    torch.testing.assert_close(reference.gather(1, ids), logprobs, atol=1e-6, rtol=0)
    assert likeliest(logits, temperatures, 99)[0].shape == (5, 30)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_alternatives_follow_the_scaled_distribution_and_tell_the_plain_one(temperature: float) -> None:
    numbers = torch.tensor([uniform(stream_seed(2, 0), i) for i in range(NUM_SAMPLES)], dtype=torch.float64)
    logits = LOGITS.expand(4, -1)
    ids, logprobs = alternatives(logits, temperature, numbers.view(4, -1))
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(0)[ids], atol=1e-6, rtol=0)
    if temperature == 0:
        assert (ids == 0).all()
        return
    counts = torch.bincount(ids.reshape(-1), minlength=len(LOGITS)).double()
    expected = torch.tensor(exact(LOGITS, temperature), dtype=torch.float64) * NUM_SAMPLES
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept].numpy(), expected[kept].numpy()).pvalue > 0.001
    one, _ = alternatives(logits[:1], temperature, numbers[:3][None])
    assert one[0].tolist() == ids[0, :3].tolist(), "a token is its uniform number's alone"
