"""What is exported, PEFT loads, and what is saved continues to the bit."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from descant.ckpt.peft import ADAPTER, ADAPTER_CONFIG
from descant.ranks.replica import Replica
from descant.testing.ranks import tiny_replica
from descant.testing.trainer import Model, datum, output, result, saved
from descant.types import AdamParams, CreateModel, Lora, SnapshotRef

DATA = tuple(datum([(3 * i + j * j) % 200 for j in range(5 + i)]) for i in range(4))


async def trained(replica: Replica, lora: Lora, steps: int = 3) -> Model:
    model = Model(replica, f"rank{lora.rank}")
    await result(model.create(lora))
    for _ in range(steps):
        await result(model.backward(DATA))
        await result(model.step(AdamParams(learning_rate=0.02)))
    return model


async def logprobs(model: Model) -> list[np.ndarray]:
    return [np.asarray(o["logprobs"]) for o in (await output(model.forward(DATA))).loss_fn_outputs]


@pytest.mark.parametrize(
    ("arch", "lora"),
    [
        ("llama", Lora(rank=5, seed=1)),
        ("llama", Lora(rank=16, seed=1, train_unembed=False)),
        ("llama_tied", Lora(rank=8, seed=1)),
        ("gpt_neox", Lora(rank=3, seed=1, train_mlp=False)),
        ("qwen3_moe", Lora(rank=4, seed=1)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"rank {value.rank}",
)
async def test_peft_loads_the_export_with_nothing_missing_and_scores_alike(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, arch: str, lora: Lora
) -> None:
    async with tiny_replica(tmp_path_factory, arch=arch) as replica:
        model = await trained(replica, lora)
        ref = cast(SnapshotRef, await result(model.snapshot("sampler")))
        directory = Path((await saved(replica, ref, tmp_path / "export")).directory)
        ours = await logprobs(model)

    config = json.loads((directory / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (lora.rank, 32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path_factory.getbasetemp() / f"tiny-{arch}", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")
        warnings.filterwarnings("error", message=".*missing.*")
        peft = PeftModel.from_pretrained(base, directory).eval()
    written = load_file(directory / ADAPTER)
    there = {name.replace(".default", ""): p for name, p in peft.named_parameters() if "lora_" in name}
    assert there.keys() == written.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(there[name].detach().numpy(), tensor)
    for item, expected in zip(DATA, ours):
        tokens = torch.as_tensor(item.model_input[0].tokens)[None].long()
        with torch.no_grad():
            theirs = peft(input_ids=tokens).logits[0].log_softmax(-1)
        targets = torch.as_tensor(item.loss_fn_inputs["target_tokens"])
        np.testing.assert_allclose(theirs.gather(1, targets[:, None])[:, 0].numpy(), expected, atol=2e-4)


async def test_what_is_loaded_continues_to_the_bit(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    async with tiny_replica(tmp_path_factory) as replica:
        model = await trained(replica, Lora(rank=5, seed=1))
        ref = cast(SnapshotRef, await result(model.snapshot()))
        source = await saved(replica, ref, tmp_path / "a")
    async with tiny_replica(tmp_path_factory) as another:  # another process's life, as far as the adapter can tell
        again = Model(another, "again")
        await result(another.submit(CreateModel(model_id="again", trainable=Lora(), source=source)))
        once_more = Model(another, "once more")
        await result(
            another.submit(CreateModel(model_id="once more", trainable=Lora(), source=replace(source, optimizer=False)))
        )
        async with tiny_replica(tmp_path_factory) as undisturbed:
            goes_on = await trained(undisturbed, Lora(rank=5, seed=1))
            for mine, theirs in zip(await logprobs(again), await logprobs(goes_on)):
                np.testing.assert_array_equal(mine, theirs)
            for each in (again, goes_on, once_more):
                for _ in range(3):
                    await result(each.backward(DATA))
                    await result(each.step(AdamParams(learning_rate=0.02)))
            for mine, theirs in zip(await logprobs(again), await logprobs(goes_on)):
                np.testing.assert_array_equal(mine, theirs)
            assert not all(np.array_equal(a, b) for a, b in zip(await logprobs(once_more), await logprobs(goes_on)))
