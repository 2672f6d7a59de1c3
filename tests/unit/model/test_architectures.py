"""Each architecture, packed and over KV pages, computes what transformers computes alone, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from descant.errors import UserError
from descant.model.base import BaseModel
from descant.model.forward_batch import PAGE_TOKENS, ForwardBatch, KVPool, PagedKV, Segment
from descant.model.load import load_model, resolve_model
from descant.testing.tiny import NOT_PACKABLE, PACKABLE, SERVED, tiny_model, tiny_tokenizer
from descant.types import Lora

LENGTHS = (37, 100, 9)
SIZES: Mapping[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "gpt_oss": ({**SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, "keyword 's_aux'"),
    "bloom": (
        {"vocab_size": 264, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_position_embeddings": 512},
        "0 of its 2 layers attend",
    ),
    "lfm2": ({**SIZES, "layer_types": ["conv", "full_attention"]}, "1 of its 2 layers attend"),
}


def save(model_type: str, fields: Mapping[str, Any], directory: Path) -> Path:
    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=0.12)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    network.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float32) -> BaseModel:
    return load_model(resolve_model(str(directory)), device=torch.device("cpu"), dtype=dtype)


def own(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 260, (length,), generator=generator) for length in lengths]


def decoder_forward(model: BaseModel, tokens: list[torch.Tensor], segments: tuple[Segment, ...] = ()) -> Any:
    batch = ForwardBatch(seq_lens=tuple(len(t) for t in tokens), segments=segments)
    return model.decoder_forward(torch.cat(tokens), torch.cat([torch.arange(len(t)) for t in tokens]), batch)


class Pages:
    """Sequences over pages: ``advance`` runs new tokens of all of them in one pass."""

    def __init__(self, model: BaseModel, num_sequences: int, max_length: int, row: Any = None):
        blocks = -(-max_length // PAGE_TOKENS)
        self.model, self.row = model, row
        self.pool: KVPool = model.make_kv_pool(num_sequences * blocks)
        self.table = torch.arange(num_sequences * blocks).view(num_sequences, blocks).flip(0)
        self.context = [0] * num_sequences

    @torch.no_grad()
    def advance(self, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
        """Logits of each sequence's new tokens."""
        members = [i for i, t in enumerate(tokens) if len(t)]
        kv = PagedKV(
            pool=self.pool, page_table=self.table[members], context_lens=tuple(self.context[i] for i in members)
        )
        lengths = tuple(len(tokens[i]) for i in members)
        segments = (Segment(start=0, end=sum(lengths), row=self.row),) if self.row else ()
        positions = torch.cat([torch.arange(self.context[i], self.context[i] + len(tokens[i])) for i in members])
        batch = ForwardBatch(seq_lens=lengths, segments=segments, kv=kv)
        hidden, lora = self.model.decoder_forward(torch.cat([tokens[i] for i in members]), positions, batch)
        parts = iter(self.model.lm_head.logits(hidden, lora).split(list(lengths)))
        for i in members:
            self.context[i] += len(tokens[i])
        return [next(parts) if i in members else torch.empty(0) for i in range(len(tokens))]


@pytest.fixture(scope="module", params=[*PACKABLE, *SERVED, "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def test_packed_logits_are_transformers_own(directory: Path) -> None:
    model, reference, tokens = load(directory), own(directory), sequences()
    assert model.packable
    with torch.no_grad():
        hidden, lora = decoder_forward(model, tokens)
        assert lora is None
        for got, alone in zip(model.lm_head.logits(hidden, None).split(list(LENGTHS)), tokens):
            want = reference(input_ids=alone.unsqueeze(0), use_cache=False).logits[0]
            assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_greedy_over_pages_is_generate(directory: Path) -> None:
    model, reference = load(directory), own(directory)
    prompts, new = sequences((30, 70, 9)), 12
    pages = Pages(model, len(prompts), 96)
    pages.advance([p[:5] for p in prompts])
    ids = [logits[-1:].argmax(-1) for logits in pages.advance([p[5:] for p in prompts])]
    answers = [list(first) for first in ids]
    for _ in range(new - 1):
        ids = [logits.argmax(-1) for logits in pages.advance(ids)]
        for answer, token in zip(answers, ids):
            answer.append(token[0])
    for prompt, answer in zip(prompts, answers):
        want = reference.generate(prompt.unsqueeze(0), max_new_tokens=new, do_sample=False, eos_token_id=None)
        assert torch.stack(answer).tolist() == want[0, len(prompt) :].tolist()


def test_experts_and_routers_have_no_site_and_the_unembedding_is_last(directory: Path) -> None:
    model = load(directory)
    names = [site.name for site in model.bank.sites]
    assert not [name for name in names if "experts" in name.split(".") or name.endswith(("gate", "router"))]
    assert [site.group for site in model.bank.sites].count("unembed") == 1
    assert model.bank.sites[-1].group == "unembed"
    assert {"attn", "unembed"} <= {site.group for site in model.bank.sites}
    assert not [name for name, parameter in model.network.named_parameters() if parameter.requires_grad]
    assert not model.network.training


def filled_adapter(model: BaseModel, rank: int = 4) -> Any:
    model.bank.create("a", Lora(rank=rank, seed=0))
    weights = model.bank.weights("a")
    tensors = model.bank.export(weights, Lora(rank=rank, seed=0))
    generator = torch.Generator().manual_seed(5)
    full = {name: torch.randn(tensor.shape, generator=generator) * 0.05 for name, tensor in tensors.items()}
    model.bank.import_row(full, Lora(rank=rank, seed=0), weights)
    model.bank.refresh_compute("a")
    return model.bank.row("a")


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "gpt_neox"])
def test_bf16_sampler_and_trainer_agree_bit_for_bit(arch: str, tmp_path: Path) -> None:
    model = load(tiny_model(arch, tmp_path), torch.bfloat16)
    row, tokens = filled_adapter(model), sequences((90, 130, 61))
    segment = Segment(start=0, end=sum(len(t) for t in tokens), row=row)
    hidden, lora = decoder_forward(model, tokens, (segment,))
    assert hidden.requires_grad
    trained = model.lm_head.logits(hidden.detach(), lora).split([len(t) for t in tokens])
    base = model.lm_head.logits(decoder_forward(model, tokens)[0].detach(), None).split([len(t) for t in tokens])
    assert not torch.equal(trained[0], base[0])
    pages = Pages(model, len(tokens), 130, row)
    parts = [pages.advance([t[:50] for t in tokens]), pages.advance([t[50:-9] for t in tokens])]
    parts += [pages.advance([t[len(t) - left : len(t) - left + 1] for t in tokens]) for left in range(9, 0, -1)]
    for i in range(len(tokens)):
        assert torch.equal(torch.cat([part[i] for part in parts]), trained[i])
    alone = Pages(model, 1, 130, row)  # one sequence, one token a pass: the smallest passes there are
    assert torch.equal(torch.cat([alone.advance([tokens[2][i : i + 1]])[0] for i in range(len(tokens[2]))]), trained[2])


def test_fused_query_key_value_of_gpt_neox_is_trained(tmp_path: Path) -> None:
    model = load(tiny_model("gpt_neox", tmp_path))
    row, tokens = filled_adapter(model), sequences((40,))
    hidden, _ = decoder_forward(
        model, tokens, (Segment(start=0, end=40, row=row, gradient=model.bank["a"].gradient_slot),)
    )
    hidden.square().sum().backward()
    gradient = model.bank.export(model.bank.gradient("a"), Lora(rank=4, seed=0))
    fused = [name for name in gradient if "query_key_value" in name]
    assert len(fused) == 4
    assert all(gradient[name].abs().max() > 0 for name in fused)


@pytest.mark.parametrize("arch", ["qwen3_next", "mamba"])
def test_tokens_that_meet_outside_attention_are_refused(arch: str, tmp_path: Path) -> None:
    name = {"qwen3_next": "Qwen3NextForCausalLM", "mamba": "MambaForCausalLM"}[arch]
    with pytest.raises(UserError, match=f"{name} cannot be served: .*layers attend through transformers' attention"):
        load(tiny_model(arch, tmp_path))


@pytest.mark.parametrize("arch", REFUSED)
def test_what_we_do_not_know_is_refused_by_name(arch: str, tmp_path: Path) -> None:
    fields, reason = REFUSED[arch]
    with pytest.raises(UserError, match=f"ForCausalLM cannot be served: .*{reason}"):
        load(save(arch, fields, tmp_path))


@pytest.mark.parametrize("arch", ["llama_longrope", "llama_dynamic"])
def test_rotary_scaling_by_the_longest_sequence_is_served_up_to_where_it_sets_in(arch: str, tmp_path: Path) -> None:
    assert arch in NOT_PACKABLE
    model = load(tiny_model(arch, tmp_path))
    assert model.facts.max_context_length == 64
    short, allowed, beyond = sequences((20, 64, 100))
    with torch.no_grad():
        alone = decoder_forward(model, [short])[0]
        assert (decoder_forward(model, [short, allowed])[0][:20] - alone).abs().max() <= 1e-4
        assert (decoder_forward(model, [short, beyond])[0][:20] - alone).abs().max() > 1e-4, "the limit is not needed"
