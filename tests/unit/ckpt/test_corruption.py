"""A checkpoint that is not as it was written is never loaded, whatever has happened to its files; the file is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from descant.ckpt import files
from descant.ckpt.files import read_checkpoint, write_tensors
from descant.ckpt.manifest import MANIFEST, verify, write_durable
from descant.ckpt.peft import ADAPTER, ADAPTER_CONFIG, OPTIMIZER, ExportBase
from descant.ckpt.store import CheckpointDirectory
from descant.errors import Damaged, NotFound, UserError
from descant.types import Checkpoint, CheckpointName, CheckpointSource, Lora

NAME = CheckpointName(model_id="s:train:0", type="weights", name="a")
FILES = (ADAPTER, ADAPTER_CONFIG, OPTIMIZER, MANIFEST)
MUTATIONS = 2000


def saved(root: Path, seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{prefix}.lora_A.weight": (4, 64), f"{prefix}.lora_B.weight": (64, 4)}
    weights = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    lora = Lora(rank=4, seed=0)
    store = CheckpointDirectory(root)
    attempt = store.attempt(NAME)
    manifest = write_tensors(attempt, weights, lora, base=ExportBase(name="base"))
    moments = {
        f"{moment}.{name}": tensor.abs() * n
        for n, moment in enumerate(("moment1", "moment2"), 1)
        for name, tensor in weights.items()
    }
    optimizer = write_durable(Path(attempt) / OPTIMIZER, safetensors.torch.save(moments, {"format": "pt"}))
    manifest = replace(
        manifest, owner="o", base="b", step=seed, has_optimizer=True, files={**manifest.files, OPTIMIZER: optimizer}
    )
    return store.commit(NAME, attempt, manifest)


Mutation = Callable[[random.Random, Path, Path], tuple[str, ...]]
"""(rng, directory, directory of an older checkpoint) → the files that are not what they were."""


def flip(rng: random.Random, directory: Path, old: Path) -> tuple[str, ...]:
    name = rng.choice(FILES)
    body = bytearray((directory / name).read_bytes())
    body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    (directory / name).write_bytes(body)
    return (name,)


def truncate(rng: random.Random, directory: Path, old: Path) -> tuple[str, ...]:
    name = rng.choice(FILES)
    body = (directory / name).read_bytes()
    (directory / name).write_bytes(body[: rng.randrange(len(body))])
    return (name,)


def grow(rng: random.Random, directory: Path, old: Path) -> tuple[str, ...]:
    name = rng.choice(FILES)
    more = rng.choice([b"\n", b" ", b"\0", rng.randbytes(rng.randrange(1, 64))])
    (directory / name).write_bytes((directory / name).read_bytes() + more)
    return (name,)


def swap(rng: random.Random, directory: Path, old: Path) -> tuple[str, ...]:
    one, other = rng.sample(FILES, 2)
    bodies = (directory / one).read_bytes(), (directory / other).read_bytes()
    (directory / one).write_bytes(bodies[1])
    (directory / other).write_bytes(bodies[0])
    return (one, other)


def remove(rng: random.Random, directory: Path, old: Path) -> tuple[str, ...]:
    name = rng.choice(FILES)
    (directory / name).unlink()
    return (name,)


def older(rng: random.Random, directory: Path, old: Path) -> tuple[str, ...]:
    """One file of what was there before. (An adapter's configuration has no numbers in it: it is the same.)"""
    name = rng.choice((ADAPTER, OPTIMIZER, MANIFEST))
    (directory / name).write_bytes((old / name).read_bytes())
    return (ADAPTER, OPTIMIZER) if name == MANIFEST else (name,)


KINDS: Mapping[str, Mutation] = {m.__name__: m for m in (flip, truncate, grow, swap, remove, older)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_mutation_is_detected_and_named(tmp_path: Path, kind: str) -> None:
    old, new = saved(tmp_path / "old", 1), saved(tmp_path / "new", 2)
    directory = Path(new.directory)
    source = CheckpointSource(uri=NAME.uri, directory=new.directory, optimizer=True)
    bodies = {name: (directory / name).read_bytes() for name in FILES}
    read_checkpoint(source)
    rng = random.Random(f"{kind} 0")
    for number in range(-(-MUTATIONS // len(KINDS))):
        changed = KINDS[kind](rng, directory, Path(old.directory))
        with pytest.raises((Damaged, NotFound)) as raised:
            verify(directory)
        assert _names(raised.value, changed), f"mutation {number} of {changed}: {raised.value}"
        if set(changed) != {ADAPTER_CONFIG}:  # which PEFT reads, and a load does not
            with pytest.raises((Damaged, NotFound), match=NAME.uri) as raised:
                read_checkpoint(source)
            assert _names(raised.value, changed), f"mutation {number} of {changed}: {raised.value}"
            assert str(tmp_path) not in str(raised.value)
        for name in changed if kind != "older" else FILES:
            (directory / name).write_bytes(bodies[name])
    read_checkpoint(source)


def _names(error: Damaged | NotFound, changed: tuple[str, ...]) -> bool:
    """Where the manifest is missing there is no checkpoint, and that is what is said."""
    if isinstance(error, NotFound):
        return MANIFEST in changed
    return any(name in str(error) for name in changed)


@pytest.mark.parametrize("optimizer", [False, True])
def test_what_is_replaced_while_it_is_loaded_is_not_damaged(
    tmp_path: Path, optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read between the old manifest and the new files."""
    before, now = saved(tmp_path, 1), saved(tmp_path, 2)
    assert before.directory == now.directory
    source = CheckpointSource(uri=NAME.uri, directory=now.directory, optimizer=optimizer)
    monkeypatch.setattr(files, "read_manifest", lambda directory: before.manifest)
    with pytest.raises(UserError, match="was replaced while it was read; load it again"):
        read_checkpoint(source)
    CheckpointDirectory(tmp_path).delete(NAME)
    with pytest.raises(NotFound, match=f"there is no checkpoint {NAME.uri}"):
        read_checkpoint(source)
