"""The packaged model itself: conversion, and the sampler's log-probabilities equal to the trainer's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from descant.model.base import BaseModel
from descant.model.forward_batch import PAGE_TOKENS, ForwardBatch, PagedKV
from descant.model.load import load_model, native_dtype, resolve_model

pytestmark = pytest.mark.smollm2

CPU = torch.device("cpu")
NUM_SEQUENCES, LENGTH, PROMPT = 8, 384, 376


@pytest.fixture(scope="module")
def model() -> BaseModel:
    return load_model(resolve_model("smollm2"), device=CPU)


def texts(model: BaseModel) -> list[torch.Tensor]:
    """One text from eight places on. (Random tokens drive the model to where one rounding decides.)"""
    tokenizer: Any = AutoTokenizer.from_pretrained(model.facts.name)
    text = " ".join(
        f"Line {i}: {i} sheep and {i + 1} goats cross the river, then {2 * i + 1} rest." for i in range(200)
    )
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    return [tokens[i * 97 : i * 97 + LENGTH] for i in range(NUM_SEQUENCES)]


def logprobs(model: BaseModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return model.lm_head.logprobs(hidden, targets.unsqueeze(1), None).logprobs_PK.squeeze(1)


def test_facts_and_a_sane_answer(model: BaseModel) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model.facts.name)
    assert model.facts.packable
    assert model.facts.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert (model.facts.architecture, model.facts.max_context_length) == ("LlamaForCausalLM", 8192)
    assert len(model.bank.sites) == 211
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    with torch.no_grad():
        for _ in range(4):
            hidden, _ = model.decoder_forward(
                torch.tensor(ids), torch.arange(len(ids)), ForwardBatch(seq_lens=(len(ids),))
            )
            ids.append(int(model.lm_head.logits(hidden[-1:], None).argmax()))
    assert tokenizer.decode(ids[-4:]) == "The capital of France"


@torch.no_grad()
def test_prefill_in_chunks_and_decode_equal_one_training_pass_bit_for_bit(model: BaseModel) -> None:
    """8 sequences of 384 tokens, batched: prefill in chunks of 96, the last 8 tokens decoded one a pass."""
    tokens = torch.stack(texts(model))
    positions = torch.arange(LENGTH).repeat(NUM_SEQUENCES)
    hidden, _ = model.decoder_forward(tokens.flatten(), positions, ForwardBatch(seq_lens=(LENGTH,) * NUM_SEQUENCES))
    targets = tokens.roll(-1, 1)
    once = logprobs(model, hidden, targets.flatten()).view(NUM_SEQUENCES, LENGTH)

    num_pages = -(-LENGTH // PAGE_TOKENS)
    pool = model.make_kv_pool(NUM_SEQUENCES * num_pages)
    table = torch.arange(NUM_SEQUENCES * num_pages).view(NUM_SEQUENCES, num_pages)
    edges = [*range(0, PROMPT, 96), *range(PROMPT, LENGTH + 1)]
    parts = []
    for start, end in itertools.pairwise(edges):
        kv = PagedKV(pool=pool, page_table=table, context_lens=(start,) * NUM_SEQUENCES)
        batch = ForwardBatch(seq_lens=(end - start,) * NUM_SEQUENCES, kv=kv)
        hidden, _ = model.decoder_forward(
            tokens[:, start:end].flatten(), positions.view(tokens.shape)[:, start:end].flatten(), batch
        )
        parts.append(logprobs(model, hidden, targets[:, start:end].flatten()).view(NUM_SEQUENCES, -1))
    difference = (torch.cat(parts, 1) - once).abs().max()
    assert difference <= (0 if native_dtype(CPU) is torch.bfloat16 else 1e-4)
