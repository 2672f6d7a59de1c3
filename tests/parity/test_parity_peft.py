"""Training here equals a plain PEFT loop in float32: alone, and packed with seven others of other ranks and losses.

The reference knows nothing of this project but the numbers it starts from: transformers' own attention, PEFT's layers,
one unpadded sequence at a time, losses as the documentation writes them, autograd, ``torch.optim.AdamW``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM

from descant.model.load import ModelSource, load_model, resolve_model
from descant.testing.learner import LearnerHarness, datum, rl_datum, some_commands
from descant.testing.tiny import tiny_model
from descant.train.check import dense_inputs, loss_fn_config
from descant.train.loss import loss_mask
from descant.types import (
    AdamParams,
    Datum,
    EncodedText,
    ForwardBackward,
    Lora,
    ModelInput,
    input_length,
    input_tokens,
)

PARAMS = AdamParams(learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.02, grad_clip_norm=5.0)
"""A first step is ±learning_rate for every gradient well above eps, rounding noise included: with eps 1e-10, two of
transformers' own attention functions end 1.0e-3 of the update apart on SmolLM2, with 1e-8 0.15e-3."""


class PeftLoop:
    def __init__(self, directory: Path, lora: Lora, tensors: dict[str, torch.Tensor]):
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        sites = [name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for name in tensors]
        sites = [name for name in sites if not name.endswith("lora_B.weight")]
        with warnings.catch_warnings(action="ignore"):  # that a tied head gets an adapter is wanted
            config = peft.LoraConfig(r=lora.rank, lora_alpha=32, target_modules=sites, lora_dropout=0.0)
            self.model = peft.get_peft_model(base, config).eval()
        self.parameters = {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        assert self.parameters.keys() == tensors.keys()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
        self.entropies: list[torch.Tensor] = []
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=PARAMS.learning_rate,
            betas=(PARAMS.beta1, PARAMS.beta2),
            eps=PARAMS.eps,
            weight_decay=PARAMS.weight_decay,
            fused=False,
            foreach=False,
        )

    def forward_backward(self, command: ForwardBackward) -> float:
        total, self.entropies = 0.0, []
        for item in command.data:
            loss = self._loss(command, item)
            loss.backward()
            total += loss.item()
        return total

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), PARAMS.grad_clip_norm)
        self.optimizer.step()
        return float(norm)

    def _loss(self, command: ForwardBackward, item: Datum) -> torch.Tensor:
        tokens = torch.from_numpy(input_tokens(item.model_input).astype(np.int64))
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0]
        arrays = {name: torch.from_numpy(array) for name, array in dense_inputs(item, command.loss_fn).items()}
        self.entropies.append(Categorical(logits=logits.detach().double()).entropy()[trains(command, item)])
        targets = arrays["target_tokens"]
        logprobs = logits.log_softmax(-1).gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)
        if command.loss_fn == "cross_entropy":
            return -(logprobs * arrays["weights"]).sum()
        config = loss_fn_config(command)
        advantages, drift = arrays["advantages"], logprobs - arrays["logprobs"]
        ratio = drift.exp()
        if "clip_low_threshold" in config:
            clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
        match command.loss_fn:
            case "importance_sampling":
                return -(ratio * advantages).sum()
            case "ppo":
                return -torch.minimum(ratio * advantages, clipped * advantages).sum()
            case "cispo":
                return -(clipped.detach() * logprobs * advantages).sum()
            case "gspo":
                mask = arrays["sequence_ratio_mask"] == 1
                ratio = drift[mask].mean().exp()
                clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
                return -torch.minimum(ratio * advantages[mask], clipped * advantages[mask]).sum()
            case "dro":
                return -(logprobs * advantages - 0.5 * config["beta"] * drift**2).sum()
        raise ValueError(command.loss_fn)


def trains(command: ForwardBackward, item: Datum) -> torch.Tensor:
    return torch.from_numpy(loss_mask(command.loss_fn, dense_inputs(item, command.loss_fn)))


def assert_parity(
    harness: LearnerHarness,
    directory: Path,
    model_id: str,
    turns: Sequence[Sequence[ForwardBackward]],
    *,
    gradients: float = 1e-4,
    updates: float = 1e-3,
) -> None:
    """``turns[i]``: the commands of one shared pass, ``model_id``'s among them; each ends with a step of everybody.
    ``gradients``: how far one may be off, of the largest of its tensor; ``updates``: how far all three steps may be, of
    their norm."""
    lora, bank = harness.bank[model_id].lora, harness.bank

    def weights() -> dict[str, torch.Tensor]:
        return bank.export(bank.weights(model_id), lora)

    start = weights()
    reference = PeftLoop(directory, lora, start)
    for number, commands in enumerate(turns):
        outputs = harness.run(*commands)
        own = next(index for index, command in enumerate(commands) if command.model_id == model_id)
        loss = reference.forward_backward(commands[own])
        if number == 0:
            assert outputs[own].metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
            entropy = float(torch.cat(reference.entropies).mean())
            assert outputs[own].metrics["entropy:mean"] == pytest.approx(entropy, rel=1e-4)
            for name, gradient in bank.export(bank.gradient(model_id), lora).items():
                expected = reference.parameters[name].grad
                assert expected is not None
                assert expected.abs().max() > 0, name
                assert (gradient - expected).abs().max() <= gradients * expected.abs().max(), name
        norm = reference.step()
        reference.optimizer.zero_grad()
        for command in commands:
            metrics = harness.step(command.model_id, PARAMS)
            if command.model_id == model_id and number == 0:
                assert metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-4)

    error = torch.cat([(got - reference.parameters[name].detach()).flatten() for name, got in weights().items()])
    update = torch.cat([(reference.parameters[name].detach() - old).flatten() for name, old in start.items()])
    assert update.norm() > 0
    assert error.norm() <= updates * update.norm()


def load(directory: Path) -> LearnerHarness:
    source = ModelSource(name="reference", directory=directory)
    return LearnerHarness(load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False))


@pytest.mark.parametrize("arch", ["llama", "llama_tied", "qwen3", "gemma2", "gpt_neox", "qwen3_moe"])
@pytest.mark.parametrize("batch", ["alone", "packed"])
@pytest.mark.parametrize(
    "number", range(6), ids=["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
)
def test_tiny(tmp_path: Path, arch: str, batch: str, number: int) -> None:
    harness = load(tiny_model(arch, tmp_path / arch))
    ranks = (8, 3, 16, 1, 32, 256, 8, 5)
    flags = ({}, {}, {"train_mlp": False}, {}, {"train_unembed": False}, {}, {"train_attn": False}, {})
    for other, (rank, chosen) in enumerate(zip(ranks, flags, strict=True)):
        harness.create(f"m{other}", rank, seed=other, **chosen)
    turns = []
    for _ in range(3):
        commands = some_commands(harness, [f"m{other}" for other in range(8)])
        turns.append(commands if batch == "packed" else [commands[number]])
    assert_parity(harness, harness.model.directory, f"m{number}", turns)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_neox", "qwen3_moe"])
def test_samples_of_one_prompt(tmp_path: Path, arch: str) -> None:
    """Shared in the pass (also beside another adapter's samples of the same prompt), each alone in the reference."""
    harness = load(tiny_model(arch, tmp_path / arch))
    for number, model_id in enumerate("ab"):
        harness.create(model_id, 8, seed=number)
    prompt = datum(40).model_input
    samples = [rl_datum(48 + number, number) for number in range(8)]
    samples = [replace(item, model_input=continued(prompt, item)) for item in samples]
    turns = [
        [harness.command(model_id, *samples, loss_fn="importance_sampling") for model_id in "ab"] for _ in range(3)
    ]
    [output, _] = harness.run(*turns[0])
    assert output.metrics["tokens_computed:sum"] == output.metrics["tokens:sum"] - 7 * 40
    for model_id in "ab":
        harness.bank.gradient(model_id).zero_()
        harness.bank[model_id].gradient_free = True
    assert_parity(harness, harness.model.directory, "a", turns)


def continued(prompt: ModelInput, item: Datum) -> ModelInput:
    """The prompt in place of as many of the datum's own tokens."""
    own = input_tokens(item.model_input)[input_length(prompt) :]
    return (EncodedText(tokens=np.concatenate([input_tokens(prompt), own])),)


@pytest.mark.smollm2
@pytest.mark.parametrize("batch", ["alone", "packed"])
def test_smollm2(batch: str) -> None:
    directory = resolve_model("smollm2").directory
    harness = load(directory)
    ranks = (8, 3, 16, 1, 8, 4, 2, 5)
    for other, rank in enumerate(ranks[: 1 if batch == "alone" else 8]):
        harness.create(f"m{other}", rank, seed=other, b_std=0.005)
    turns = []
    for _ in range(3):
        own = harness.command("m0", datum(21, 1), datum(9, 2, weights=np.linspace(-0.5, 1, 9)))
        others = some_commands(harness, [f"m{other}" for other in range(1, 8)])
        turns.append([own, *others] if batch == "packed" else [own])
    # Behind 30 layers rounding is 2e-5 with AVX-512 and 1.4e-4 with AVX2, whose products add up in another order; three
    # steps are 1.7e-3 apart there with two threads, and within 1e-3 with one.
    assert_parity(harness, directory, "m0", turns, gradients=5e-4, updates=5e-3)
