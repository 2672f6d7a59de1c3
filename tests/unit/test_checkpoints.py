"""Adapters that PEFT has made come in as what PEFT computes with them, or are refused by name."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from descant import checkpoints
from descant.app import only_server_of
from descant.ckpt.peft import ADAPTER, ADAPTER_CONFIG
from descant.ckpt.store import DirCheckpointStore
from descant.cli import main
from descant.errors import UserError
from descant.service.names import parse_path
from descant.testing.tiny import tiny_model
from descant.types import CheckpointName

TOKENS = torch.arange(5, 45)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama_tied", tmp_path_factory.mktemp("base") / "tied")


def made_by_peft(base: Path, directory: Path, **fields: Any) -> torch.Tensor:
    """Writes an adapter that changes something; the log-probabilities [T, V] that PEFT computes with it."""
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **fields}
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings(action="ignore"):
        adapted = peft.get_peft_model(network, peft.LoraConfig(**options)).eval()
        torch.manual_seed(0)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(directory)
    return logprobs(adapted)


@torch.no_grad()
def logprobs(network: Any) -> torch.Tensor:
    return network(input_ids=TOKENS, use_cache=False).logits[0].log_softmax(-1)


def bring(directory: Path, data_dir: Path, base: Path) -> checkpoints.Imported:
    return checkpoints.import_peft(directory, data_dir=data_dir, base=str(base), owner="alice", name="theirs")


@pytest.mark.parametrize(
    ("fields", "rank", "notes"),
    [
        pytest.param({"lora_alpha": 32}, 4, (), id="our scale"),
        pytest.param({"lora_alpha": 7}, 4, (), id="another alpha"),
        pytest.param({"lora_alpha": 7, "use_rslora": True}, 4, (), id="rank-stabilised"),
        pytest.param({"target_modules": ["lm_head", "o_proj"]}, 4, ("2 of",), id="the head of a tied base"),
        pytest.param(
            {"rank_pattern": {"down_proj": 6}, "alpha_pattern": {r"layers.1.self_attn.q_proj": 3}}, 6, (), id="patterns"
        ),
        pytest.param({"layers_to_transform": [1]}, 4, (), id="one layer"),
        pytest.param({"lora_dropout": 0.1}, 4, ("lora_dropout 0.1 is not applied in further training",), id="dropout"),
        pytest.param({"target_modules": "all-linear", "init_lora_weights": "gaussian"}, 4, (), id="all linear layers"),
    ],
)
def test_an_adapter_of_pefts_is_what_peft_computes(
    base: Path, tmp_path: Path, fields: Mapping[str, Any], rank: int, notes: tuple[str, ...]
) -> None:
    theirs = made_by_peft(base, tmp_path / "theirs", **fields)
    imported = bring(tmp_path / "theirs", tmp_path / "data", base)
    assert imported.checkpoint.manifest.trainable.rank == rank
    assert imported.checkpoint.manifest.owner == "alice"
    left_out = [note for note in imported.notes if "layers that the adapter leaves out" in note]
    assert bool(left_out) == (fields.get("target_modules") != "all-linear")
    if "dropout" in str(notes):
        assert set(notes) < set(imported.notes)

    uri, dest = imported.checkpoint.name.uri, tmp_path / "ours"
    verdict = checkpoints.export(
        uri, dest, data_dir=tmp_path / "data", base=None, merge=False, verify=True, tolerance=1e-4
    )
    assert verdict is not None
    assert verdict.holds
    assert verdict.without > 0.01, "the adapter changes nothing: the test would pass without it"
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings(action="ignore"):
        again = logprobs(peft.PeftModel.from_pretrained(network, dest).eval())
    np.testing.assert_allclose(again.numpy(), theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        pytest.param({"use_dora": True}, "trained with use_dora, which is not served", id="DoRA"),
        pytest.param({"bias": "all"}, "bias 'all'; biases are not served", id="biases"),
        pytest.param({"lora_bias": True}, "trained with lora_bias, which is not served", id="bias of B"),
        pytest.param({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]", id="whole modules"),
        pytest.param({"target_modules": ["embed_tokens"]}, r"embed_tokens.lora_embedding_A", id="the embedding"),
        pytest.param({"r": 257}, "has rank 257, expected at most 256", id="rank"),
        pytest.param({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa', which changes the base", id="PiSSA"),
    ],
)
def test_what_is_not_served_is_refused_by_name(base: Path, tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    made_by_peft(base, tmp_path / "theirs", **fields)
    with pytest.raises(UserError, match=says):
        bring(tmp_path / "theirs", tmp_path / "data", base)
    assert not (tmp_path / "data").exists()


def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    made_by_peft(base, tmp_path / "theirs")
    wider = tiny_model("llama_tied", tmp_path / "wider", hidden_size=48)
    with pytest.raises(UserError, match=r"q_proj of .* has A \(4, 32\) and B \(32, 4\), this base's takes 48 features"):
        bring(tmp_path / "theirs", tmp_path / "data", wider)
    other = tiny_model("gpt_neox", tmp_path / "other")
    with pytest.raises(UserError, match=r"changes model.layers.0.mlp.down_proj, .* and 3 more, which adapters of this"):
        bring(tmp_path / "theirs", tmp_path / "data", other)


def test_a_head_of_its_own_is_not_taken_for_the_bases(base: Path, tmp_path: Path) -> None:
    made_by_peft(base, tmp_path / "theirs", target_modules=["lm_head"])
    other = tiny_model("llama_tied", tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=r"theirs has .*lm_head.base_layer.weight"):
        bring(tmp_path / "theirs", tmp_path / "data", other)


def test_files_that_are_damaged_are_refused(base: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    made_by_peft(base, theirs)
    whole = load_file(theirs / ADAPTER)
    first = next(iter(whole))
    save_file({**whole, first: torch.full_like(whole[first], torch.nan)}, theirs / ADAPTER)
    with pytest.raises(UserError, match="holds numbers that are not finite"):
        bring(theirs, tmp_path / "data", base)
    save_file({name: tensor for name, tensor in whole.items() if name != first}, theirs / ADAPTER)
    with pytest.raises(UserError, match="expected a lora_A and a lora_B of each changed layer"):
        bring(theirs, tmp_path / "data", base)
    (theirs / ADAPTER).write_bytes(b"no")
    with pytest.raises(UserError, match=f"has no {ADAPTER} that can be read"):
        bring(theirs, tmp_path / "data", base)
    (theirs / ADAPTER_CONFIG).write_text("[]")
    with pytest.raises(UserError, match="is not of a LoRA adapter"):
        bring(theirs, tmp_path / "data", base)


def test_a_running_server_is_not_disturbed(tmp_path: Path) -> None:
    server = DirCheckpointStore(tmp_path)
    attempt = asyncio.run(server.attempt(CheckpointName(model_id="m", type="weights", name="a")))
    DirCheckpointStore(tmp_path, beside=True)
    assert Path(attempt).is_dir()
    DirCheckpointStore(tmp_path)
    assert not Path(attempt).exists()


def test_the_commands(base: Path, tmp_path: Path) -> None:
    made_by_peft(base, tmp_path / "theirs")

    def run(*arguments: object) -> Any:
        environment = {"TINKER_API_KEY": "tml-key"}
        return CliRunner().invoke(main, ["checkpoints", *map(str, arguments)], env=environment)

    where = ("--data-dir", tmp_path / "data")
    assert "holds no checkpoints" in run("ls", *where).stderr
    imported = run("import", tmp_path / "theirs", "--base", base, *where)
    assert imported.exit_code == 0, imported.output
    uri = imported.stdout.strip()
    assert "layers that the adapter leaves out stay as the base has them" in imported.stderr
    assert uri in run("ls", *where).stdout

    exported = run("merge", uri, tmp_path / "merged", "--verify", *where)
    assert exported.exit_code == 0, exported.output
    assert "differ by at most" in exported.stdout
    assert "exists already" in run("export", uri, tmp_path / "merged", *where).stderr
    failed = run("merge", uri, tmp_path / "b", "--verify", "--tolerance", 1e-12, *where)
    assert failed.exit_code == 1
    assert "does not compute what was served" in failed.stderr
    assert (tmp_path / "b").is_dir(), "it stays for a look"
    text = (tmp_path / "merged" / "config.json").read_text()
    assert json.loads(text)["tie_word_embeddings"] is True, "the head is as it was"
    assert str(tmp_path) not in text
    assert run("export", "tinker://m/weights/none", tmp_path / "c", *where).exit_code == 2
    assert "there is no checkpoint" in run("export", base, tmp_path / "c", *where).stderr
    assert "cannot write to" in run("export", uri, base / "config.json" / "c", *where).stderr
    nowhere = run("import", tmp_path / "theirs", "--base", base, "--data-dir", base / "config.json")
    assert "as data_dir: Not a directory" in nowhere.stderr
    assert not (tmp_path / "c").exists()


def test_what_is_there_is_told_verified_and_cleaned_up(base: Path, tmp_path: Path) -> None:
    made_by_peft(base, tmp_path / "theirs")
    data_dir = tmp_path / "data"

    def run(*arguments: object) -> tuple[int, Any]:
        environment = {"TINKER_API_KEY": "tml-key"}
        command = ["checkpoints", *map(str, arguments), "--data-dir", str(data_dir), "--json"]
        done = CliRunner().invoke(main, command, env=environment)
        return done.exit_code, json.loads(done.stdout) if done.stdout else done.stderr

    uris = [run("import", tmp_path / "theirs", "--base", base, "--name", name)[1]["path"] for name in ("one", "two")]
    code, listed = run("ls")
    assert (code, {entry["path"] for entry in listed}) == (0, set(uris))
    assert all(entry["trainable"]["rank"] == 4 and entry["size_bytes"] > 0 for entry in listed)
    code, verdicts = run("verify")
    assert (code, {verdict["what"]: verdict["error"] for verdict in verdicts}) == (0, dict.fromkeys(uris))

    store = DirCheckpointStore(data_dir / "checkpoints", beside=True)
    damaged = Path(asyncio.run(store.open(parse_path(uris[0]))).directory)
    body = bytearray((damaged / ADAPTER).read_bytes())
    body[-1] ^= 1
    (damaged / ADAPTER).write_bytes(body)
    code, verdicts = run("verify")
    assert code == 1
    found = {verdict["what"]: verdict["error"] for verdict in verdicts}
    assert found == {uris[0]: f"{ADAPTER} has another sha256 than its manifest says", uris[1]: None}
    (damaged / "manifest.json").write_bytes(b"{")
    assert "is not a checkpoint manifest" in dict(map(dict.values, run("verify")[1]))[uris[0]]
    assert run("verify", uris[1]) == (0, [{"what": uris[1], "error": None}])
    assert run("verify", damaged)[0] == 1

    left = data_dir / "checkpoints" / "attempts" / "1-0123456789abcdef"
    left.mkdir()
    (left / "part").write_bytes(b"x" * 100)
    with only_server_of(data_dir):
        code, said = run("gc")
        assert code == 2
        assert "another server uses" in said
    assert run("gc") == (0, {"count": 1, "num_bytes": 100})
    assert not left.exists()
    assert run("gc") == (0, {"count": 0, "num_bytes": 0})
    assert {entry["path"] for entry in run("ls")[1]} == {uris[1]}
