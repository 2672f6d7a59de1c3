"""Adapters come in beside a running server and leave from it: docs/adapters.md's example, with the real SDK."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import peft
import tinker
import torch
from click.testing import CliRunner
from tinker import types
from transformers import AutoModelForCausalLM

from descant.cli import main
from descant.testing.server import END_S, serve
from descant.testing.tiny import tiny_model

KEY = "tml-alice"
TOKENS = list(range(5, 45))


def test_an_adapter_comes_is_trained_on_and_leaves(tmp_path: Path) -> None:
    base = tiny_model("llama_tied", tmp_path / "base" / "tied")
    data_dir = tmp_path / "data"
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with warnings.catch_warnings(action="ignore"):
        theirs = peft.get_peft_model(network, config).eval()
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        theirs.save_pretrained(tmp_path / "theirs")
    computed = scores(theirs)

    with serve(base, data_dir, "rank.device=cpu", "rank.dtype=float32") as server:
        uri = descant("import", tmp_path / "theirs", "--base", base, "--data-dir", data_dir, key=KEY).strip()
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
            sampling = service.create_sampling_client(model_path=uri).result(END_S)
            sampled = sampling.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(END_S)
            np.testing.assert_allclose(sampled[1:], computed, atol=1e-4)
            training = service.create_training_client_from_state(uri).result(END_S)
            np.testing.assert_allclose(logprobs(training), computed, atol=1e-4)

            training.forward_backward([datum()], "cross_entropy").result(END_S)
            training.optim_step(types.AdamParams(learning_rate=0.02)).result(END_S)
            trained = logprobs(training)
            assert np.abs(trained - computed).max() > 0.01
            path = training.save_state("trained").result(END_S).path
        for command, where in (("export", "adapter"), ("merge", "merged")):
            said = descant(command, path, tmp_path / where, "--verify", "--data-dir", data_dir, key=KEY)
            assert "differ by at most" in said
        assert uri in descant("ls", "--data-dir", data_dir, key=KEY)

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    np.testing.assert_allclose(scores(merged), trained, atol=1e-4)
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings(action="ignore"):
        again = peft.PeftModel.from_pretrained(network, tmp_path / "adapter").eval()
    np.testing.assert_allclose(scores(again), trained, atol=1e-4)
    untouched = [p for name, p in again.named_parameters() if "k_proj.lora_" in name]
    assert untouched, "of a kind of layers that is trained, all are there"
    assert all(not p.any() for p in untouched), "those that the adapter left out were not trained"


def descant(*arguments: object, key: str) -> str:
    done = CliRunner().invoke(main, ["checkpoints", *map(str, arguments)], env={"TINKER_API_KEY": key})
    assert done.exit_code == 0, done.output
    return done.stdout


def datum() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array(TOKENS[1:]))},
    )


def logprobs(training: tinker.TrainingClient) -> np.ndarray:
    return training.forward([datum()], "cross_entropy").result(END_S).loss_fn_outputs[0]["logprobs"].to_numpy()


@torch.no_grad()
def scores(network: torch.nn.Module) -> np.ndarray:
    tokens = torch.tensor(TOKENS)
    logits = network(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
