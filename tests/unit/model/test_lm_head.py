"""The head against ``F.log_softmax`` and autograd in float64."""

from __future__ import annotations

import pytest
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import LoraSite
from descant.model.forward_batch import ForwardBatch, Segment
from descant.model.lm_head import LmHead
from descant.model.lora.batch import LoraBatch
from descant.types import Lora

torch.set_num_threads(1)

D, V, TOKENS = 24, 80, 50
SITE = LoraSite(name="lm_head", group="unembed", in_features=D, out_features=V)
BOUNDS = ((3, 20), (20, 21), (26, 48))
RANKS = (3, 8, 32)


def make_bank(dtype: torch.dtype = torch.float32) -> AdapterBank:
    bank = AdapterBank([SITE], device=torch.device("cpu"), dtype=dtype)
    for index, rank in enumerate(RANKS):
        lora = Lora(rank=rank, seed=index)
        bank.create(f"m{index}", lora)
        weights = bank.weights(f"m{index}")
        parts = {name: torch.randn_like(part) * 0.2 for name, part in bank.export(weights, lora).items()}
        bank.import_row(parts, lora, weights)
        bank.refresh_compute(f"m{index}")
    return bank


def make_lora(bank: AdapterBank) -> LoraBatch:
    segments = tuple(
        Segment(start=lo, end=hi, row=bank.row(f"m{i}"), gradient=bank[f"m{i}"].gradient_slot)
        for i, (lo, hi) in enumerate(BOUNDS)
    )
    lora = LoraBatch.of(ForwardBatch(seq_lens=(TOKENS,), segments=segments), bank)
    assert lora is not None
    return lora


def make_head(dtype: torch.dtype = torch.float32, *, bias: bool = False, **options: float | None) -> LmHead:
    weight = (torch.randn(V, D) * 0.3).to(dtype)
    return LmHead(weight, torch.randn(V).to(dtype) if bias else None, site_index=0, **options)  # type: ignore[arg-type]


def reference(head: LmHead, bank: AdapterBank, hidden: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """float64 logits with a graph, and its leaves: A and B of each adapter, in turn."""
    logits = hidden @ head.weight_VD.double().T + (0 if head.bias_V is None else head.bias_V.double())
    pieces, leaves, end = [], [], 0
    for index, (lo, hi) in enumerate(BOUNDS):
        lora = bank[f"m{index}"].lora
        a, b = (p.double().requires_grad_() for p in bank.export(bank.weights(f"m{index}"), lora).values())
        leaves += [a, b]
        pieces += [logits[end:lo], logits[lo:hi] + 32 / lora.rank * (hidden[lo:hi] @ a.T @ b.T)]
        end = hi
    logits = torch.cat([*pieces, logits[end:]]) * head.logit_scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap), leaves


def entropy(logits: torch.Tensor) -> torch.Tensor:
    probs = logits.detach().exp() / logits.detach().exp().sum(1, keepdim=True)
    return -(probs * probs.log()).sum(1)


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    difference = (got.double() - want.double()).abs().max().item()
    assert difference <= tolerance * max(want.abs().max().item(), 1e-6), difference


VARIANTS = [
    pytest.param({}, id="plain"),
    pytest.param({"bias": True}, id="bias"),
    pytest.param({"softcap": 3.0}, id="softcap"),
    pytest.param({"logit_scale": 0.25}, id="scale"),
    pytest.param({"bias": True, "softcap": 5.0, "logit_scale": 1.5}, id="all"),
]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 20, 1024])
@pytest.mark.parametrize("num_targets", [1, 3])
def test_logprobs_and_gradients_equal_autograd(options: dict[str, float], chunk_tokens: int, num_targets: int) -> None:
    torch.manual_seed(0)
    bank, head = make_bank(), make_head(**options)  # type: ignore[arg-type]
    hidden, targets = torch.randn(TOKENS, D), torch.randint(0, V, (TOKENS, num_targets))
    targets[5] = targets[5, 0]  # one token named K times
    dlogprobs = torch.randn(TOKENS, num_targets)
    dlogprobs[10:15] = 0.0  # tokens without a loss, in the middle of a segment
    dlogprobs[20:21] = 0.0  # a whole segment
    seen: list[slice] = []

    def loss(tokens: slice, logprobs_CK: torch.Tensor) -> torch.Tensor:
        assert len(logprobs_CK) == tokens.stop - tokens.start
        seen.append(tokens)
        return dlogprobs[tokens]

    out = head.logprobs(hidden, targets, make_lora(bank), loss, chunk_tokens)

    hidden64 = hidden.double().requires_grad_()
    logits, leaves = reference(head, bank, hidden64)
    want = torch.log_softmax(logits, dim=1).gather(1, targets)
    want.backward(dlogprobs.double())
    assert_close(out.logprobs_PK, want.detach())
    assert_close(out.entropy_P, entropy(logits))
    assert torch.equal(head.logprobs(hidden, targets, make_lora(bank), None, chunk_tokens).entropy_P, out.entropy_P)
    assert out.dhidden_TD is not None
    assert hidden64.grad is not None
    assert_close(out.dhidden_TD, hidden64.grad)
    for index in range(len(RANKS)):
        got = bank.export(bank.gradient(f"m{index}"), bank[f"m{index}"].lora).values()
        for part, leaf in zip(got, leaves[2 * index : 2 * index + 2], strict=True):
            assert leaf.grad is not None
            assert_close(part, leaf.grad, 2e-5)
    assert bank.gradient("m1").count_nonzero() == 0
    assert [s.start for s in seen] == list(range(0, TOKENS, chunk_tokens))


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize(
    ("chunk_tokens", "num_targets", "compiled"),
    [(1, 2, False), (7, 2, False), (20, 1, False), (1024, 2, False), (20, 1, True), (1024, 1, True)],
)
def test_a_token_with_several_target_positions(
    options: dict[str, float], chunk_tokens: int, num_targets: int, compiled: bool
) -> None:
    """Some tokens have none, some one, some six, with targets that differ, agree, or pull against each other."""
    torch.manual_seed(0)
    bank, head = make_bank(), make_head(**options)  # type: ignore[arg-type]
    head.compiled = compiled
    tokens = torch.repeat_interleave(torch.arange(TOKENS), torch.tensor([1, 1, 0, 6, 2] * (TOKENS // 5)))
    hidden, targets = torch.randn(TOKENS, D), torch.randint(0, V, (len(tokens), num_targets))
    dlogprobs = torch.randn(len(tokens), num_targets)
    six = (tokens == 8).nonzero().flatten()
    targets[six[:3]] = targets[six[0]].clone()
    dlogprobs[six[1]] = -dlogprobs[six[0]]
    dlogprobs[tokens == 13] = 0.0
    dlogprobs[six[4]] = 0.0
    seen = []

    def loss(positions: slice, logprobs: torch.Tensor) -> torch.Tensor:
        seen.extend(range(positions.start, positions.stop))
        assert len(logprobs) == positions.stop - positions.start
        return dlogprobs[positions]

    out = head.logprobs(hidden, targets, make_lora(bank), loss, chunk_tokens, tokens_P=tokens)
    hidden64 = hidden.double().requires_grad_()
    logits, leaves = reference(head, bank, hidden64)
    want = torch.log_softmax(logits, dim=1)[tokens].gather(1, targets)
    want.backward(dlogprobs.double())
    assert seen == list(range(len(tokens)))
    assert_close(out.logprobs_PK, want.detach())
    assert_close(out.entropy_P, entropy(logits)[tokens])
    assert out.dhidden_TD is not None
    assert hidden64.grad is not None
    assert_close(out.dhidden_TD, hidden64.grad)
    got = [p for i in range(len(RANKS)) for p in bank.export(bank.gradient(f"m{i}"), bank[f"m{i}"].lora).values()]
    for part, leaf in zip(got, leaves, strict=True):
        assert leaf.grad is not None
        assert_close(part, leaf.grad, 2e-5)


def test_logits_and_selected_logits() -> None:
    bank, head = make_bank(), make_head()
    hidden, lora = torch.randn(TOKENS, D), make_lora(bank)
    want, _ = reference(head, bank, hidden.double())
    assert_close(head.logits(hidden, lora), want.detach())
    assert_close(head.logits(hidden[18:30], lora, start=18), want[18:30].detach())
    indices = torch.tensor([0, 4, 20, 25, 26, 47, 49])
    assert_close(head.logits_at(hidden, lora, indices), want[indices].detach())
    assert head.logits_at(hidden, lora, indices[:0]).shape == (0, V)
    assert_close(head.logits_at(hidden, None, indices), (hidden @ head.weight_VD.T)[indices])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_row_does_not_depend_on_how_many_are_asked_for(dtype: torch.dtype) -> None:
    """Exactly in bf16 and without an adapter; in fp32 an adapter's product over fewer than 4 rows rounds otherwise."""
    bank, head = make_bank(dtype), make_head(dtype)
    hidden, lora = torch.randn(TOKENS, D).to(dtype), make_lora(bank)
    whole = head.logits(hidden, lora)
    targets = torch.randint(0, V, (TOKENS, 1))
    logprobs = head.logprobs(hidden, targets, lora).logprobs_PK
    for token in (0, 3, 20, 30, 49):
        alone = head.logits_at(hidden, lora, torch.tensor([token]))[0]
        logprob = torch.log_softmax(alone, 0)[targets[token, 0]]
        if dtype == torch.bfloat16 or token in (0, 49):
            assert torch.equal(alone, whole[token])
        assert (alone - whole[token]).abs().max() <= 1e-5
        assert (logprob - logprobs[token, 0]).abs() <= 1e-5
    for chunk_tokens in (1, 3, 16):
        again = head.logprobs(hidden, targets, lora, chunk_tokens=chunk_tokens).logprobs_PK
        exact = slice(None) if dtype == torch.bfloat16 else slice(0, 3)
        assert torch.equal(again[exact], logprobs[exact])
        assert (again - logprobs).abs().max() <= 1e-5


def test_bf16_gradients_are_near_autograd_in_float64() -> None:
    torch.manual_seed(0)
    bank, head = make_bank(torch.bfloat16), make_head(torch.bfloat16)
    hidden, targets = torch.randn(TOKENS, D).bfloat16(), torch.randint(0, V, (TOKENS, 1))
    out = head.logprobs(hidden, targets, make_lora(bank), lambda _, logprobs: -torch.ones_like(logprobs))
    hidden64 = hidden.double().requires_grad_()
    logits, leaves = reference(head, bank, hidden64)
    torch.log_softmax(logits, dim=1).gather(1, targets).sum().neg().backward()
    assert out.dhidden_TD is not None
    assert hidden64.grad is not None
    assert (out.dhidden_TD - hidden64.grad).norm() <= 0.03 * hidden64.grad.norm()
    got = [p for i in range(3) for p in bank.export(bank.gradient(f"m{i}"), bank[f"m{i}"].lora).values()]
    for part, leaf in zip(got, leaves, strict=True):
        assert leaf.grad is not None
        assert (part - leaf.grad).norm() <= 0.03 * leaf.grad.norm()


def test_nan_of_one_token_with_zero_dloss_comes_back_as_zero() -> None:
    bank, head = make_bank(), make_head()
    hidden, targets = torch.randn(TOKENS, D), torch.randint(0, V, (TOKENS, 1))

    def loss(_: slice, logprobs_CK: torch.Tensor) -> torch.Tensor:
        return torch.where(logprobs_CK.isfinite(), -1.0, 0.0)

    clean = head.logprobs(hidden, targets, make_lora(bank), loss).dhidden_TD
    gradients = [bank.gradient(f"m{i}").clone() for i in range(3)]
    for index in range(3):
        bank.gradient(f"m{index}").zero_()
    bad = hidden.clone()
    bad[30] = float("nan")
    out = head.logprobs(bad, targets, make_lora(bank), loss)
    assert clean is not None
    assert out.dhidden_TD is not None
    assert out.logprobs_PK[30].isnan().all()
    assert out.dhidden_TD[30].count_nonzero() == 0
    others = torch.arange(TOKENS) != 30
    assert torch.equal(out.dhidden_TD[others], clean[others])
    assert torch.equal(bank.gradient("m0"), gradients[0])
    assert bank.gradient("m2").isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_entropy_of_a_token_whose_logits_are_not_finite_is_nan(compiled: bool, softcap: float | None) -> None:
    """And no other's changes. A soft cap leaves an infinite logit finite."""
    head, hidden = make_head(bias=True, softcap=softcap), torch.randn(TOKENS, D)
    head.compiled = compiled
    targets = torch.randint(0, V, (TOKENS, 1))
    clean = head.logprobs(hidden, targets, None).entropy_P
    for bad in (torch.nan, torch.inf):
        spoilt = hidden.clone()
        spoilt[30, 0] = bad
        got = head.logprobs(spoilt, targets, None).entropy_P
        assert got[30].isnan() == (softcap is None or bad != bad)
        others = torch.arange(TOKENS) != 30
        assert torch.equal(got[others], clean[others])
    assert head.bias_V is not None
    head.bias_V[7] = -torch.inf  # 0·inf
    never = head.logprobs(hidden, targets, None).entropy_P
    assert never.isnan().all() if softcap is None else never.isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sure_token_has_no_entropy_and_an_even_one_all(compiled: bool) -> None:
    weight = torch.zeros(V, D)
    weight[3] = 40.0
    head = LmHead(weight, site_index=None)
    head.compiled = compiled
    hidden = torch.cat([torch.zeros(8, D), torch.rand(8, D) + 0.5])
    got = head.logprobs(hidden, torch.zeros(16, 1, dtype=torch.int64), None).entropy_P
    assert_close(got[:8], torch.full((8,), float(V)).log())
    assert got[8:].tolist() == [0.0] * 8


def test_chunks_without_a_loss_have_no_backward() -> None:
    bank, head = make_bank(), make_head()
    hidden, targets = torch.randn(TOKENS, D), torch.randint(0, V, (TOKENS, 1))

    def loss(tokens: slice, logprobs_CK: torch.Tensor) -> torch.Tensor | None:
        return None if tokens.start < 30 else torch.zeros_like(logprobs_CK)

    out = head.logprobs(hidden, targets, make_lora(bank), loss, chunk_tokens=10)
    assert out.dhidden_TD is not None
    assert out.dhidden_TD.count_nonzero() == 0
    assert all(bank.gradient(f"m{i}").count_nonzero() == 0 for i in range(3))
    assert head.logprobs(hidden, targets, make_lora(bank)).dhidden_TD is None


def test_a_head_that_adapters_cannot_change() -> None:
    bank, weight = make_bank(), torch.randn(V, D)
    hidden, targets = torch.randn(TOKENS, D), torch.randint(0, V, (TOKENS, 1))
    head = LmHead(weight, site_index=None)
    out = head.logprobs(hidden, targets, make_lora(bank), lambda _, logprobs: torch.ones_like(logprobs))
    assert_close(out.logprobs_PK, torch.log_softmax(hidden @ weight.T, 1).gather(1, targets))
    assert all(bank.gradient(f"m{i}").count_nonzero() == 0 for i in range(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_equals_cpu() -> None:
    """float32 on both; on CUDA no token is left out, and one with NaN logits and no dloss comes back as zero."""
    hidden, targets, weight = torch.randn(TOKENS, D), torch.randint(0, V, (TOKENS, 2)), torch.randn(V, D) * 0.3
    hidden[30], outcomes = float("nan"), []
    for device in ("cpu", "cuda"):
        bank = AdapterBank([SITE], device=torch.device(device), dtype=torch.float32)
        for index, rank in enumerate(RANKS):
            lora = Lora(rank=rank, seed=index)
            bank.create(f"m{index}", lora)
            parts = bank.export(bank.weights(f"m{index}"), lora)
            filled = {name: torch.sin(torch.arange(p.numel()).reshape(p.shape) * 0.7) for name, p in parts.items()}
            bank.import_row(filled, lora, bank.weights(f"m{index}"))
            bank.refresh_compute(f"m{index}")

        def loss(tokens: slice, logprobs_CK: torch.Tensor) -> torch.Tensor:
            position = torch.arange(tokens.start, tokens.stop, device=logprobs_CK.device)[:, None]
            return torch.where(logprobs_CK.isfinite() & (position % 3 != 0), -1.0, 0.0)

        head = LmHead(weight.to(device), site_index=0, softcap=9.0)
        out = head.logprobs(hidden.to(device), targets.to(device), make_lora(bank), loss, chunk_tokens=16)
        assert out.dhidden_TD is not None
        good = [i for i in range(3) if BOUNDS[i][0] > 30 or BOUNDS[i][1] <= 30]
        gradients = [bank.gradient(f"m{i}").cpu() for i in good]
        outcomes.append([out.logprobs_PK.cpu().nan_to_num(), out.dhidden_TD.cpu(), *gradients])
    for want, got in zip(*outcomes, strict=True):
        assert_close(got, want, 1e-4)
