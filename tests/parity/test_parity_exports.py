"""Every architecture's export, loaded by PEFT into transformers' own model, has the log-probabilities that were served.

Nothing missing, nothing unexpected, and no layer that PEFT put elsewhere.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from descant import checkpoints
from descant.ckpt.files import InlineWriter, write_tensors
from descant.ckpt.manifest import MANIFEST, encode_manifest
from descant.ckpt.peft import A_SUFFIX, ADAPTER, ADAPTER_CONFIG, B_SUFFIX, PREFIX, ExportBase
from descant.ckpt.snapshot import Snapshots
from descant.model.load import Outline, load_model, outline, resolve_model
from descant.testing.learner import LearnerHarness, datum
from descant.testing.tiny import EXPERTS, PACKABLE, SERVED, tiny_model
from descant.types import Lora, Snapshot, input_tokens

GROUPS = {
    "all": {},
    "no head": {"train_unembed": False},
    "mlp": {"train_attn": False, "train_unembed": False},
    "attn": {"train_mlp": False, "train_unembed": False},
}
WITHOUT_MLP = {"mixtral", "phimoe", "minimax_m2", "granitemoe", "olmoe", "flex_olmo", "qwen3_moe"}
"""All of theirs is experts."""


@pytest.mark.parametrize("arch", [*PACKABLE, *SERVED, *EXPERTS])
def test_peft_loads_what_was_served(arch: str, tmp_path: Path) -> None:
    source = resolve_model(str(tiny_model(arch, tmp_path / arch)))
    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
    harness, item = LearnerHarness(model), datum(40, 3)
    tied = model.network.config.get_text_config().tie_word_embeddings
    for name, flags in GROUPS.items():
        if name == "mlp" and arch in WITHOUT_MLP:
            continue
        harness.create(name, 5, seed=1, b_std=0.1, **flags)
        [output] = harness.run(harness.command(name, item))
        directory = export(harness, name, tmp_path / name)
        served, plain = np.asarray(output.loss_fn_outputs[0]["logprobs"]), base_logprobs(source.directory, item)
        assert np.abs(served - plain).max() > 0.01, "the adapter changes nothing: the test would pass without it"
        np.testing.assert_allclose(peft_logprobs(source.directory, directory, item), served, atol=1e-4)
        assert_merges(source.directory, directory, tied=tied and name == "all")
        assert str(tmp_path) not in (directory / ADAPTER_CONFIG).read_text()
        assert json.loads((directory / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == arch


def assert_merges(base: Path, directory: Path, *, tied: bool) -> None:
    """The merged weights are PEFT's own, where PEFT's are right; and compute what is served, anywhere."""
    merged = directory.parent / f"{directory.name} merged"
    verdict = checkpoints.export(
        str(directory), merged, data_dir=directory, base=None, merge=True, verify=True, tolerance=1e-4
    )
    assert verdict is not None
    assert verdict.holds, verdict
    ours = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    head_is_embedding = ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    if tied:
        assert not head_is_embedding
        assert ours.config.get_text_config().tie_word_embeddings is False
        return
    with warnings.catch_warnings(action="ignore"):
        network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(network, directory).merge_and_unload()
    got = dict(ours.named_parameters())
    for name, weight in theirs.named_parameters():
        assert (got[name] - weight).abs().max() <= 1e-5 * weight.abs().max(), name


def export(harness: LearnerHarness, model_id: str, directory: Path) -> Path:
    model = harness.model
    base = ExportBase(name=model.public_name, has_experts=model.has_experts)
    assert outline(resolve_model(str(model.directory))) == Outline(
        sites=harness.bank.sites, has_experts=model.has_experts
    )
    snapshots = Snapshots(harness.bank, base=base, writer=InlineWriter())
    ref = snapshots.take(Snapshot(model_id=model_id, seq_id=9, kind="sampler"), has_pending_gradient=False)
    directory.mkdir()
    manifest = replace(snapshots.save(ref, str(directory))(), base=model.facts.name, owner="alice")
    (directory / MANIFEST).write_bytes(encode_manifest(manifest))
    return directory


def base_logprobs(base: Path, item) -> np.ndarray:
    return logprobs(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval(), item)


def peft_logprobs(base: Path, directory: Path, item) -> np.ndarray:
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")
        warnings.filterwarnings("error", message=".*missing.*|.*did not match.*")
        adapted = PeftModel.from_pretrained(network, directory).eval()
    loaded = set_peft_model_state_dict(adapted, load_peft_weights(str(directory)))
    assert loaded.unexpected_keys == []
    assert [key for key in loaded.missing_keys if "lora_" in key] == []
    written = load_file(directory / ADAPTER)
    there = {name.replace(".default", ""): p for name, p in adapted.named_parameters() if "lora_" in name}
    assert there.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(there[name].detach(), tensor), name
    return logprobs(adapted, item)


@torch.no_grad()
def logprobs(network, item) -> np.ndarray:
    tokens = torch.from_numpy(input_tokens(item.model_input).astype(np.int64))
    scores = network(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
    targets = torch.as_tensor(item.loss_fn_inputs["target_tokens"])
    return scores.gather(1, targets[:, None])[:, 0].numpy()


@pytest.mark.smollm2
def test_smollm2_whose_head_is_tied(tmp_path: Path) -> None:
    """Merged in the files' own bfloat16, whose rounding of weights counts."""
    source = resolve_model("smollm2")
    shape, generator = outline(source), torch.Generator().manual_seed(0)
    tensors = {}
    for site in shape.sites:
        for suffix, size, std in (
            (A_SUFFIX, (8, site.in_features), site.in_features**-0.5),
            (B_SUFFIX, (site.out_features, 8), 0.01),
        ):
            tensors[f"{PREFIX}{site.name}{suffix}"] = torch.randn(size, generator=generator) * std
    directory = tmp_path / "a"
    directory.mkdir()
    manifest = write_tensors(str(directory), tensors, Lora(rank=8), base=ExportBase(name=source.public_name))
    (directory / MANIFEST).write_bytes(encode_manifest(replace(manifest, base=source.name)))
    verdict = checkpoints.export(
        str(directory), tmp_path / "merged", data_dir=tmp_path, base=None, merge=True, verify=True, tolerance=None
    )
    print(verdict)
    assert verdict is not None
    assert verdict.holds, verdict
    assert verdict.without > 2 * verdict.tolerance
