"""Adapters that leave and come: a checkpoint as a PEFT directory or merged into its base, and the way back.

No server need run, and none is disturbed that does: checkpoints never change, and what comes in has a name of its own.
All arithmetic is in float32; what is written is in the dtype that its files had.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from descant.adapters.layout import LoraSite
from descant.ckpt.files import CheckpointTensors, read_checkpoint, write_tensors
from descant.ckpt.manifest import verify as verify_files
from descant.ckpt.peft import (
    A_SUFFIX,
    ADAPTER,
    ADAPTER_CONFIG,
    B_SUFFIX,
    PREFIX,
    ExportBase,
    adapter_config,
    modules_of,
)
from descant.ckpt.store import ATTEMPTS, CheckpointDirectory, DirCheckpointStore
from descant.errors import DescantError, NotFound, UserError
from descant.model.forward_batch import ForwardBatch, Segment
from descant.model.load import ModelSource, load_model, outline, resolve_model
from descant.service.names import check_checkpoint_name, parse_path
from descant.types import (
    MAX_RANK,
    SCALE_NUMERATOR,
    Checkpoint,
    CheckpointName,
    CheckpointSource,
    Lora,
    Manifest,
    Version,
)

TEXT = (
    "A descant is an independent melody sung above a shared tune. Here the tune is one frozen base model, and each "
    "descant is somebody's adapter.\n\n1 + 2 = 3, 3.14159 and 2026-11-28; `def f(x): return x[::-1]`; Grüße aus Köln."
)
VERIFIED_TOKENS = 128

TOLERANCE = 1e-3
"""Nats; of files in half precision, whose merged weights have been rounded, ``HALF_TOLERANCE``."""
HALF_TOLERANCE = 0.25

_REFUSED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "arrow_config",
    "alora_invocation_tokens",
    "lora_bias",
    "layer_replication",
    "ensure_weight_tying",
)
"""Fields of a PEFT configuration that mean another arithmetic; what means other tensors is found by these."""
_INITIALISATIONS = ("gaussian", "eva", "orthogonal")
"""Those after which the base is what it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCheck:
    """Of the log-probabilities of ``num_tokens`` tokens of a fixed text, the largest differences from those served:
    ``difference`` of the export, ``without`` of the base alone. Nats."""

    num_tokens: int
    difference: float
    without: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance


# --------------------------------------------------------------------------------------------------------------------
# Out


def export(
    what: str, dest: Path, *, data_dir: Path, base: str | None, merge: bool, verify: bool, tolerance: float | None
) -> ExportCheck | None:
    """``what``: a tinker:// path of ``data_dir``, or a checkpoint's directory. ``base``: where its base lies, if not
    where the checkpoint says. ``dest`` is whole or not there. Raises ``UserError``, also where PEFT is missing that
    ``verify`` needs to read a PEFT directory."""
    if dest.exists():
        raise UserError(f"{dest} exists already; choose another place")
    if verify and not merge and importlib.util.find_spec("peft") is None:
        raise UserError("--verify reads the export with PEFT, which is not installed: pip install 'descant[export]'")
    loaded = _read(what, data_dir)
    source = resolve_model(base or loaded.manifest.base)
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        attempt = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    except OSError as error:
        raise UserError(f"cannot write to {dest.parent}: {error.strerror}") from None
    try:
        if merge:
            _write_merged(attempt, loaded, source)
        else:
            _write_adapter(attempt, loaded, source)
        verdict = _verify(attempt, loaded, source, merged=merge, tolerance=tolerance) if verify else None
        attempt.chmod(0o755)  # mkdtemp's are for their owner alone
        attempt.rename(dest)
    finally:
        shutil.rmtree(attempt, ignore_errors=True)
    return verdict


def _read(what: str, data_dir: Path) -> CheckpointTensors:
    if what.startswith("tinker://"):
        store = _store(data_dir)
        directory = asyncio.run(store.open(parse_path(what))).directory
    else:
        directory = what
    return read_checkpoint(CheckpointSource(uri=what, directory=directory, optimizer=False))


def _store(data_dir: Path) -> DirCheckpointStore:
    root = data_dir / "checkpoints"
    if not root.is_dir():
        raise NotFound(f"{data_dir} holds no checkpoints; name a server's data_dir with --data-dir")
    return DirCheckpointStore(root, beside=True)


def _write_adapter(dest: Path, loaded: CheckpointTensors, source: ModelSource) -> None:
    """Its configuration is written anew: an older version's may have said less."""
    safetensors.torch.save_file(dict(loaded.weights), dest / ADAPTER, {"format": "pt"})
    base = ExportBase(name=source.public_name, has_experts=outline(source).has_experts)
    config = adapter_config(loaded.lora, base=base, modules=modules_of(loaded.weights))
    (dest / ADAPTER_CONFIG).write_bytes(config)


def _write_merged(dest: Path, loaded: CheckpointTensors, source: ModelSource) -> None:
    network = _network(source.directory, dtype="auto")
    merge_into(network, loaded.weights, rank=loaded.lora.rank)
    network.save_pretrained(dest)
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(source.directory))
    tokenizer.save_pretrained(dest)


@torch.no_grad()
def merge_into(network: PreTrainedModel, tensors: Mapping[str, torch.Tensor], *, rank: int) -> None:
    """Adds an adapter to the weights, each sum rounded once. A head that shares its weight with the embedding gets one
    of its own first: what is added to it is not meant for the embedding. Raises ``UserError`` for another base's."""
    head = cast(nn.Module, network.get_output_embeddings())
    embedding = cast(nn.Module, network.get_input_embeddings())
    for name in modules_of(tensors):
        try:
            module = network.get_submodule(name)
        except AttributeError:
            raise UserError(f"the base model has no {name}, which the adapter changes") from None
        if module is head and module.weight is embedding.weight:
            module.weight = nn.Parameter(cast(torch.Tensor, embedding.weight).clone(), requires_grad=False)
            whole = cast(PreTrainedConfig, network.config)
            whole.tie_word_embeddings = whole.get_text_config().tie_word_embeddings = False
        a_RI, b_OR = tensors[f"{PREFIX}{name}{A_SUFFIX}"], tensors[f"{PREFIX}{name}{B_SUFFIX}"]
        addition_OI = (SCALE_NUMERATOR / rank) * (b_OR @ a_RI)
        weight = cast(nn.Parameter, module.weight)
        addition = addition_OI.T if isinstance(module, Conv1D) else addition_OI
        if addition.shape != weight.shape:
            raise UserError(f"the base model's {name} is {tuple(weight.shape)}, the adapter's {tuple(addition.shape)}")
        weight.copy_(weight.float() + addition)


def _network(directory: Path, *, dtype: torch.dtype | str) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return cast(PreTrainedModel, network.eval().requires_grad_(False))


def _verify(
    directory: Path, loaded: CheckpointTensors, source: ModelSource, *, merged: bool, tolerance: float | None
) -> ExportCheck:
    """What is in ``directory``, read afresh by transformers or PEFT, beside what a server computes. In float32."""
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(source.directory))
    tokens = torch.tensor(tokenizer.encode(TEXT)[:VERIFIED_TOKENS])
    served, without = _served(loaded, source, tokens)
    is_half = False
    if merged:
        is_half = AutoConfig.from_pretrained(directory).dtype is not torch.float32
        network: Any = _network(directory, dtype=torch.float32)
    else:
        from peft import PeftModel

        network = PeftModel.from_pretrained(_network(source.directory, dtype=torch.float32), directory).eval()
    with torch.no_grad():
        logits = network(input_ids=tokens[None], use_cache=False).logits[0]
    return ExportCheck(
        num_tokens=len(tokens),
        difference=_largest(_logprobs(logits, tokens), served),
        without=_largest(without, served),
        tolerance=tolerance if tolerance is not None else HALF_TOLERANCE if is_half else TOLERANCE,
    )


@torch.no_grad()
def _served(loaded: CheckpointTensors, source: ModelSource, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities by what serves this checkpoint: published, and with it the base alone."""
    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False)
    version = Version(model_id="verified", number=0)
    model.bank.publish_tensors(version, loaded.lora, loaded.weights)
    segment = Segment(start=0, end=len(tokens), row=model.bank.pin_version(version))
    found = []
    for segments in ((segment,), ()):
        hidden_TD, lora = model.decoder_forward(
            tokens, torch.arange(len(tokens)), ForwardBatch(seq_lens=(len(tokens),), segments=segments)
        )
        found.append(_logprobs(model.lm_head.logits(hidden_TD, lora), tokens))
    return found[0], found[1]


def _logprobs(logits_TV: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
    """Of each token after the first."""
    return logits_TV[:-1].log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    difference = (one - other).abs()
    return float(difference.max()) if difference.isfinite().all() else math.inf


# --------------------------------------------------------------------------------------------------------------------
# In


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """``notes``: what of the PEFT directory counts for nothing here."""

    checkpoint: Checkpoint
    notes: tuple[str, ...]


def import_peft(directory: Path, *, data_dir: Path, base: str, owner: str, name: str) -> Imported:
    """A PEFT directory as a checkpoint of ``owner``'s, to train on from and to sample. Raises ``UserError`` naming what
    is not served."""
    check_checkpoint_name(name)
    source = resolve_model(base)
    shape = outline(source)
    config, found = _config(directory), _tensors(directory)
    tensors, lora, notes = convert(directory, config, _without_copies(found, source), shape.sites)
    public = ExportBase(name=source.public_name, has_experts=shape.has_experts)

    def write(attempt: str) -> Manifest:
        return replace(write_tensors(attempt, tensors, lora, base=public), owner=owner, base=source.name)

    return Imported(checkpoint=asyncio.run(_commit(name, write, data_dir)), notes=notes)


async def _commit(name: str, write: Callable[[str], Manifest], data_dir: Path) -> Checkpoint:
    try:
        store = DirCheckpointStore(data_dir / "checkpoints", beside=True)
    except OSError as error:
        raise UserError(f"cannot use {data_dir} as data_dir: {error.strerror}") from None
    # A model of its own, which never was: a version of it is these weights and no others.
    place = CheckpointName(model_id=f"imported-{secrets.token_hex(16)}:train:0", type="weights", name=name)
    attempt = await store.attempt(place)
    try:
        return await store.commit(place, attempt, write(attempt))
    except BaseException:
        await store.abandon(attempt)
        raise


def convert(
    directory: Path, config: Mapping[str, Any], found: Mapping[str, torch.Tensor], sites: Sequence[LoraSite]
) -> tuple[dict[str, torch.Tensor], Lora, tuple[str, ...]]:
    """A PEFT directory's tensors as ours: one rank, our scale (what PEFT multiplies with is put into B). Where a kind
    of layers is trained at all, those that the adapter leaves out have A = B = 0: they add nothing, and since either
    gradient is a product with the other they never will."""
    by_name = {site.name: site for site in sites}
    names = modules_of(found)
    expected = {f"{PREFIX}{name}{suffix}" for name in names for suffix in (A_SUFFIX, B_SUFFIX)}
    if other := sorted(found.keys() ^ expected):
        raise UserError(f"{directory} has {_some(other)}, expected a lora_A and a lora_B of each changed layer")
    if unknown := sorted(set(names) - by_name.keys()):
        raise UserError(
            f"{directory} changes {_some(unknown)}, which adapters of this base cannot; "
            f"they change layers like {_some(sorted(by_name)[-3:])}"
        )
    if not names:
        raise UserError(f"{directory} changes no layer")
    ranks = {name: len(found[f"{PREFIX}{name}{A_SUFFIX}"]) for name in names}
    rank = max(ranks.values())
    if rank > MAX_RANK:
        raise UserError(f"{directory} has rank {rank}, expected at most {MAX_RANK}")
    groups = {by_name[name].group for name in names}
    tensors: dict[str, torch.Tensor] = {}
    for site in sites:
        if site.group not in groups:
            continue
        a_RI, b_OR = torch.zeros(rank, site.in_features), torch.zeros(site.out_features, rank)
        if site.name in ranks:
            a, b = (found[f"{PREFIX}{site.name}{suffix}"].float() for suffix in (A_SUFFIX, B_SUFFIX))
            own = ranks[site.name]
            if a.shape != (own, site.in_features) or b.shape != (site.out_features, own):
                raise UserError(
                    f"{site.name} of {directory} has A {tuple(a.shape)} and B {tuple(b.shape)}, this base's takes "
                    f"{site.in_features} features and gives {site.out_features}"
                )
            a_RI[:own] = a
            b_OR[:, :own] = b * (_scale(config, site.name, own) * rank / SCALE_NUMERATOR)
        if not (a_RI.isfinite().all() and b_OR.isfinite().all()):
            raise UserError(f"{site.name} of {directory} holds numbers that are not finite")
        tensors[f"{PREFIX}{site.name}{A_SUFFIX}"], tensors[f"{PREFIX}{site.name}{B_SUFFIX}"] = a_RI, b_OR
    left_out = sum(site.group in groups and site.name not in ranks for site in sites)
    notes = [f"{left_out} layers that the adapter leaves out stay as the base has them"] if left_out else []
    if config.get("lora_dropout"):
        notes.append(f"lora_dropout {config['lora_dropout']} is not applied in further training")
    lora = Lora(rank=rank, train_attn="attn" in groups, train_mlp="mlp" in groups, train_unembed="unembed" in groups)
    return tensors, lora, tuple(notes)


def _config(directory: Path) -> Mapping[str, Any]:
    """``adapter_config.json``, if it means what is computed here."""
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{directory} has no {ADAPTER_CONFIG} that can be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UserError(f"{directory}/{ADAPTER_CONFIG} is not of a LoRA adapter")
    for field in _REFUSED:
        if config.get(field):
            raise UserError(f"{directory} was trained with {field}, which is not served")
    if config.get("bias", "none") != "none":
        raise UserError(f"{directory} was trained with bias {config['bias']!r}; biases are not served")
    if config.get("modules_to_save"):
        raise UserError(f"{directory} has modules_to_save {config['modules_to_save']}; only LoRA is served")
    initial = config.get("init_lora_weights", True)
    if isinstance(initial, str) and initial not in _INITIALISATIONS:
        raise UserError(
            f"{directory} was made with init_lora_weights {initial!r}, which changes the base; save it as a plain "
            "LoRA adapter first (PEFT's path_initial_model_for_weight_conversion)"
        )
    return config


def _tensors(directory: Path) -> Mapping[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(directory / ADAPTER)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory} has no {ADAPTER} that can be read: {error}") from None


def _without_copies(found: Mapping[str, torch.Tensor], source: ModelSource) -> Mapping[str, torch.Tensor]:
    """Of an adapter of the head PEFT saves the base's own weight, too. What equals the base's says nothing."""
    others = [name for name in found if ".lora_" not in name]
    if not others:
        return found
    own = dict(_network(source.directory, dtype="auto").named_parameters(remove_duplicate=False))
    copies = set()
    for name in others:
        weight = own.get(name.removeprefix(PREFIX).replace(".base_layer.", "."))
        if weight is not None and torch.equal(weight.to(found[name].dtype), found[name]):
            copies.add(name)
    return {name: tensor for name, tensor in found.items() if name not in copies}


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """What PEFT multiplies a layer's B·A with."""
    alpha = float(config.get("lora_alpha", 8))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --------------------------------------------------------------------------------------------------------------------
# What is there


def checkpoints(data_dir: Path) -> Sequence[Checkpoint]:
    """The newest first."""
    return asyncio.run(_store(data_dir).list())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of a checkpoint of which all was read. ``error``: what is wrong with it; None: it is as it was written."""

    what: str
    error: str | None


def verify(what: Sequence[str], *, data_dir: Path) -> Iterator[Verdict]:
    """Reads all of each, one after the other: ``tinker://`` paths of ``data_dir``, or directories; none: all that
    ``data_dir`` holds, damaged ones too."""
    for one in what or [name.uri for name in _store(data_dir).directory.names()]:
        try:
            directory = _store(data_dir).directory.place(parse_path(one)) if one.startswith("tinker://") else one
            verify_files(directory)
        except DescantError as error:
            yield Verdict(what=one, error=error.message)
        else:
            yield Verdict(what=one, error=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What writers have left that did not come to their end."""

    count: int
    num_bytes: int


def remove_leftovers(roots: Sequence[Path]) -> Removed:
    """As a server does when it starts. ``roots``: of stores that nobody else uses meanwhile; those that are not there
    hold nothing."""
    count = num_bytes = 0
    for root in roots:
        if not root.is_dir():
            continue
        before = _sizes(root / ATTEMPTS)
        CheckpointDirectory(root)
        gone = before.keys() - _sizes(root / ATTEMPTS).keys()
        count += len(gone)
        num_bytes += sum(before[path] for path in gone)
    return Removed(count=count, num_bytes=num_bytes)


def _sizes(directory: Path) -> dict[Path, int]:
    """Bytes of each entry, with all that is in it."""
    return {
        entry: sum(path.stat().st_size for path in (entry, *entry.rglob("*")) if path.is_file())
        for entry in (directory.iterdir() if directory.is_dir() else ())
    }
