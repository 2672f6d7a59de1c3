"""On a CUDA device: training equals the CPU's, the sampler the trainer, a shared pass one tenant's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.sample.plan import SampleLimits
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.testing.learner import LearnerHarness, datum, some_commands, tokens
from descant.testing.paged_sampler import run
from descant.testing.tiny import EOS_TOKEN_ID, MAX_CONTEXT_LENGTH, VOCAB_SIZE, tiny_model
from descant.types import AdamParams, Datum, EncodedText, SampleRequest, SamplingParams, Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ADAPTERS = {"a": 4, "b": 8, "c": 16, "d": 64, "e": 1, "f": 256}
NARROW = {"a": 4, "b": 8, "c": 16, "d": 64, "e": 1, "f": 20}
"""One run of our kernels; with a larger class there are several."""


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str, str, torch.dtype], BaseModel]:
    def make(arch: str, device: str, dtype: torch.dtype, *, compile: bool = False) -> BaseModel:
        directory = tiny_model(arch, tmp_path / arch)
        source = ModelSource(name=arch, directory=directory)
        return load_model(source, device=torch.device(device), dtype=dtype, compile=compile)

    return make


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.cpu() - want).norm() / want.norm())


def harness_of(model: BaseModel, ranks: Mapping[str, int] = ADAPTERS) -> LearnerHarness:
    harness = LearnerHarness(model)
    for number, (name, rank) in enumerate(ranks.items()):
        harness.create(name, rank, seed=number)
    return harness


def all_experts(model: BaseModel) -> BaseModel:
    for module in model.network.modules():
        if hasattr(module, "top_k"):
            module.top_k = module.num_experts
    return model


ARCHITECTURES = ["llama", "qwen3", "gemma2", "mistral", "gpt_neox", "qwen3_moe"]


def gradients(model: BaseModel, ranks: Mapping[str, int] = ADAPTERS) -> dict[str, torch.Tensor]:
    harness = harness_of(model, ranks)
    harness.run(*some_commands(harness, list(ranks)))
    return {name: harness.gradient(name).cpu() for name in ranks}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_shared_pass_on_the_gpu_equals_the_cpu(load: Callable[..., BaseModel], arch: str) -> None:
    want, got = (gradients(load(arch, device, torch.float32)) for device in ("cpu", "cuda"))
    for name in ADAPTERS:
        assert want[name].norm() > 0
        assert relative(got[name], want[name]) <= 2e-4, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bf16_on_the_gpu_is_as_near_to_fp32_as_on_the_cpu(load: Callable[..., BaseModel], arch: str) -> None:
    """The rounding of weights and activations is the same; only the order of sums differs. All experts take each token:
    of which two are chosen, a rounding decides where others are nearly as good, and then it is another function."""
    exact, cpu, cuda = (
        gradients(all_experts(load(arch, device, dtype)))
        for device, dtype in (("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16))
    )
    for name in ADAPTERS:
        assert relative(cuda[name], exact[name]) <= 2 * relative(cpu[name], exact[name]) + 0.02, name


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_compiled_layers_on_the_gpu_are_as_near_to_fp32(load: Callable[..., BaseModel], arch: str) -> None:
    exact = gradients(load(arch, "cpu", torch.float32))
    plain, compiled = (gradients(load(arch, "cuda", torch.bfloat16, compile=compile)) for compile in (False, True))
    for name in ADAPTERS:
        assert relative(compiled[name], exact[name]) <= 1.2 * relative(plain[name], exact[name]) + 0.003, name


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gpt_neox"])
def test_narrow_ranks_of_several_classes_in_one_run_are_as_near_to_fp32_as_in_a_loop(
    load: Callable[..., BaseModel], arch: str, compile: bool
) -> None:
    """The CPU's is the loop. With each adapter in a pass of its own, the same kernels see one class at a time."""
    exact, loop = (gradients(load(arch, "cpu", dtype), NARROW) for dtype in (torch.float32, torch.bfloat16))
    model = load(arch, "cuda", torch.bfloat16, compile=compile)
    mixed = gradients(model, NARROW)
    for name in NARROW:
        model.bank.delete(name)
    harness = harness_of(model, NARROW)
    for command in some_commands(harness, list(NARROW)):
        harness.run(command)
    for name in NARROW:
        assert relative(mixed[name], exact[name]) <= 2 * relative(loop[name], exact[name]) + 0.02, name
        assert relative(mixed[name], exact[name]) <= 1.2 * relative(harness.gradient(name), exact[name]) + 0.01, name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_sampled_logprobs_equal_the_trainers(
    load: Callable[..., BaseModel], dtype: torch.dtype, tolerance: float
) -> None:
    model = load("qwen3", "cuda", dtype)
    harness = harness_of(model)
    versions = [Version(model_id=name, number=1) for name in ADAPTERS]
    for version in versions:
        model.bank.publish(version.model_id, version)
    scheduler = Scheduler(
        SampleLimits(
            max_num_seqs=8,
            num_pages=64,
            max_num_batched_tokens=100,
            max_queued_requests=100,
            max_context_length=MAX_CONTEXT_LENGTH,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS_TOKEN_ID,),
        ),
        decode_text=lambda tokens: "",
        fresh_seed=lambda: 0,
    )
    sampler = Sampler(model, num_pages=64)
    prompts = {v: np.random.default_rng(i).integers(0, VOCAB_SIZE, 20 + 30 * i) for i, v in enumerate(versions)}
    for version, prompt in prompts.items():
        sampler.pin(version)
        scheduler.add(
            SampleRequest(
                request_id=version.model_id,
                version=version,
                prompt=(EncodedText(tokens=prompt.astype(np.int32)),),
                num_samples=1,
                sampling_params=SamplingParams(max_tokens=48, seed=7, stop=()),
            )
        )
    finished = run(scheduler, sampler)  # type: ignore[arg-type]
    differences = []
    for version, prompt in prompts.items():
        sampled = np.array(finished.logprobs[version.model_id, 0], np.float32)
        whole = np.concatenate([prompt, finished.tokens[version.model_id, 0]])
        scored = Datum(
            model_input=(EncodedText(tokens=whole[:-1].astype(np.int32)),),
            loss_fn_inputs={"target_tokens": whole[1:].astype(np.int64)},
        )
        [output] = harness.run(harness.command(version.model_id, scored, forward_only=True))
        differences.append(np.abs(output.loss_fn_outputs[0]["logprobs"][len(prompt) - 1 :] - sampled))
    assert np.concatenate(differences).mean() <= tolerance


@pytest.mark.parametrize("compile", [False, True])
def test_recomputed_layers_change_nothing(load: Callable[..., BaseModel], compile: bool) -> None:
    model = load("qwen3", "cuda", torch.bfloat16, compile=compile)
    assert model.activation_memory is not None
    assert model.activation_memory.layer > model.activation_memory.input > 0
    found = []
    for free in (float("inf"), 0.0):
        model.free_bytes = lambda free=free: free  # type: ignore[method-assign]
        for name in ADAPTERS:
            model.bank.delete(name)
        found.append(gradients(model))
    for name in ADAPTERS:
        assert relative(found[1][name], found[0][name]) <= 1e-2, name


def test_neighbours_change_nothing_of_weight(load: Callable[..., BaseModel]) -> None:
    alone, together = (harness_of(load("llama", "cuda", torch.float32)) for _ in range(2))
    alone.run(alone.command("c", datum(70, 3), datum(9, 4)))
    together.run(
        *some_commands(together, [name for name in ADAPTERS if name != "c"]),
        together.command("c", datum(70, 3), datum(9, 4)),
    )
    assert relative(together.gradient("c"), alone.gradient("c").cpu()) <= 1e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_what_datums_begin_with_in_common_is_computed_once(
    load: Callable[..., BaseModel], arch: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Samples of one prompt, turns of a conversation and a datum twice, in one pass and each in a pass of its own."""
    harness = LearnerHarness(load(arch, "cuda", dtype))
    harness.create("a")
    text = tokens(400, 0)
    ends = [np.concatenate([text[:200], tokens(20 + 7 * number, number + 1)]) for number in range(8)]
    streams = [*ends, text[:250], text[:300], text[:300], text[:399]]
    data = [
        Datum(
            model_input=(EncodedText(tokens=stream),),
            loss_fn_inputs={"target_tokens": np.roll(stream, -1).astype(np.int64), "weights": np.ones(len(stream))},
        )
        for stream in streams
    ]
    command = harness.command("a", *data)
    request = harness.learner.open(command)
    for part in harness.parts(request, command):
        harness.learner.run([part])
    want, gradient = harness.learner.close(request), harness.gradient("a")
    harness.step("a", AdamParams(learning_rate=0.0))
    [got] = harness.run(command)
    assert got.metrics["tokens_computed:sum"] == 399 + sum(20 + 7 * number for number in range(8))
    assert got.metrics["tokens:sum"] == want.metrics["tokens_computed:sum"]
    assert relative(harness.gradient("a"), gradient.cpu()) <= tolerance
    for mine, alone in zip(got.loss_fn_outputs, want.loss_fn_outputs, strict=True):
        assert np.abs(mine["logprobs"] - alone["logprobs"]).mean() <= tolerance
