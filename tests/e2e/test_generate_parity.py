"""Greedy sampling equals ``transformers.generate`` token for token, for every architecture, with adapters mixed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from descant.model.load import ModelSource, load_model
from descant.sample.plan import SampleLimits
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.testing.learner import LearnerHarness
from descant.testing.paged_sampler import Finished
from descant.testing.tiny import EOS_TOKEN_ID, MAX_CONTEXT_LENGTH, PACKABLE, VOCAB_SIZE, tiny_model
from descant.types import EncodedText, SampleRequest, SamplingParams, Version

NUM_PAGES = 5
"""Of 64 tokens: too few for all that runs at once."""


@contextmanager
def adapted(network: nn.Module, tensors: Mapping[str, torch.Tensor], scale: float) -> Iterator[None]:
    """The reference's own LoRA: PEFT-named tensors, added by forward hooks to an untouched transformers model."""

    def hook(a: torch.Tensor, b: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda module, inputs, output: output + scale * (inputs[0] @ a.T) @ b.T

    handles = []
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            handles.append(network.get_submodule(module).register_forward_hook(hook(a, b)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


ADAPTERS: Sequence[tuple[int, Mapping[str, bool]]] = (
    (4, {}),
    (16, {"train_mlp": False}),
    (8, {"train_unembed": False}),
    (1, {}),
    (32, {"train_attn": False}),
    (64, {}),
    (20, {}),
    (3, {"train_unembed": False}),
)
"""Ranks, and what is not trained."""


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefixes kept", "none kept"])
@pytest.mark.parametrize("arch", PACKABLE)
def test_greedy_equals_generate(arch: str, prefix_caching: bool, tmp_path: Path) -> None:
    directory = tiny_model(arch, tmp_path / arch)
    model = load_model(
        ModelSource(name=arch, directory=directory), device=torch.device("cpu"), dtype=torch.float32, check=False
    )
    harness = LearnerHarness(model)
    versions: list[Version | None] = [None]
    for number, (rank, flags) in enumerate(ADAPTERS):
        harness.create(f"m{number}", rank, seed=number, b_std=0.2, **flags)
        versions.append(Version(model_id=f"m{number}", number=1))
        model.bank.publish(f"m{number}", versions[-1])
    limits = SampleLimits(
        max_num_seqs=5,
        num_pages=NUM_PAGES,
        max_num_batched_tokens=70,
        max_queued_requests=100,
        max_context_length=MAX_CONTEXT_LENGTH,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_TOKEN_ID,),
    )
    sampler = Sampler(model, num_pages=NUM_PAGES)

    # How requests meet is rng: until some were pushed out, and some found what others had left.
    for attempt in range(10):
        scheduler = Scheduler(
            limits, decode_text=lambda tokens: "", fresh_seed=lambda: 0, prefix_caching=prefix_caching
        )
        rng = random.Random(f"{arch} {attempt}")
        waiting: list[SampleRequest] = []
        prompts: list[np.ndarray] = []
        for number in range(2 * len(versions)):
            length = rng.choice([1, 3, 17, 63, 64, 65, 100, 150])
            prompt = np.array([rng.randrange(VOCAB_SIZE) for _ in range(length)], np.int32)
            if number >= len(versions):  # the second from these weights goes on where the first ended
                prompt = np.concatenate([prompts[number - len(versions)], prompt])[:150]
            prompts.append(prompt)
            waiting.append(
                SampleRequest(
                    request_id=f"r{number}",
                    version=versions[number % len(versions)],
                    prompt=(EncodedText(tokens=prompt),),
                    num_samples=rng.choice([1, 1, 2]),
                    sampling_params=SamplingParams(temperature=0.0, max_tokens=40, stop=rng.choice([(), None])),
                )
            )
        rng.shuffle(waiting)
        # One comes first, and once more when it has been computed.
        first = replace(waiting[0], request_id="first", prompt=(EncodedText(tokens=np.arange(3, 103, dtype=np.int32)),))
        waiting.append(replace(first, request_id="again"))
        waiting += [waiting.pop(0), waiting.pop(0), first]
        requests, finished = list(waiting), Finished()
        while waiting or scheduler.has_work():
            if waiting and rng.random() < 0.5:
                sampler.pin(waiting[-1].version)
                scheduler.add(waiting.pop())
            if (plan := scheduler.plan()) is not None:
                finished.take(scheduler.apply(plan, sampler.step(plan)))
        stats = scheduler.stats()
        if stats["preemptions"] > 0 and (stats["hit_tokens"] > 0 or not prefix_caching):
            break
    assert stats["preemptions"] > 0
    assert (stats["hit_tokens"] > 0) == prefix_caching

    # eager: sdpa of transformers 5.17 drops Gemma 2's soft cap
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    for request in requests:
        tensors, scale = {}, 0.0
        if request.version is not None:
            lora = model.bank[request.version.model_id].lora
            tensors, scale = model.bank.export(model.bank.weights(request.version.model_id), lora), 32 / lora.rank
        prompt = torch.tensor(request.prompt[0].tokens, dtype=torch.int64)[None]
        network.generation_config.eos_token_id = EOS_TOKEN_ID if request.sampling_params.stop is None else None
        with adapted(network, tensors, scale):
            output = network.generate(
                prompt, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(prompt)
            )
        expected = output[0, prompt.shape[1] :].tolist()
        for sample in range(request.num_samples):
            assert finished.tokens[request.request_id, sample] == expected, request
    assert len({tuple(tokens) for tokens in finished.tokens.values()}) > len(requests) // 2
