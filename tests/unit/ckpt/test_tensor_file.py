"""Our safetensors files are the library's, byte for byte, and are read once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

from descant.ckpt.files import InlineWriter, _tensors
from descant.ckpt.tensor_file import DTYPES, contents_of, read_tensors
from descant.errors import Damaged
from descant.types import FileEntry, Lora, Manifest


def body_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return b"".join(
        part if isinstance(part, bytes) else part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for part in contents_of(tensors)
    )


def some() -> dict[str, torch.Tensor]:
    return {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(1.5), "none": torch.zeros(0, 3)}


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({}, id="none"),
        pytest.param(some(), id="a scalar, an empty one"),
        pytest.param(
            {f"{name}.{i}": torch.arange(5).to(dtype) for i in (1, 0) for name, dtype in DTYPES.items()},
            id="every dtype, the widest first",
        ),
        pytest.param({'é"\n\u2028': torch.zeros(1)}, id="a name that JSON escapes"),
        pytest.param({"t": torch.arange(12.0).view(3, 4).t(), "s": torch.arange(12.0).view(3, 4)[:, 1:3]}, id="views"),
    ],
)
def test_the_bytes_are_those_of_safetensors(tensors: dict[str, torch.Tensor]) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert body_of(tensors) == safetensors.torch.save(whole, {"format": "pt"})


def written(directory: Path, body: bytes) -> Manifest:
    """As if a checkpoint had been written so."""
    (directory / "a").write_bytes(body)
    entry = FileEntry(size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
    return Manifest(
        base="", owner="", trainable=Lora(rank=8), step=0, applied_seq_id=0, has_optimizer=False, files={"a": entry}
    )


def test_a_file_is_read_back_into_tensors_of_their_own(tmp_path: Path) -> None:
    tensors = some()
    manifest = written(tmp_path, body_of(tensors))
    read = _tensors(str(tmp_path), "a", manifest)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in read.values())


def test_every_byte_is_read_once() -> None:
    body, num_read = body_of(some()), 0

    def read_into(buffer: memoryview) -> None:
        nonlocal num_read
        buffer[:] = body[num_read : num_read + len(buffer)]
        num_read += len(buffer)

    read_tensors(len(body), read_into)
    assert num_read == len(body)


def with_header(fields: object, data: bytes = b"") -> bytes:
    header = json.dumps(fields).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"\0" * 8, "header has 0 bytes, the file 8", id="no header"),
        pytest.param((1 << 40).to_bytes(8, "little") + b"{}", "header has 1099511627776 bytes", id="a long header"),
        pytest.param((2).to_bytes(8, "little") + b"[]", "cannot be read", id="no object"),
        pytest.param((2).to_bytes(8, "little") + b"{}" + b"rest", "have 0 bytes, expected 4", id="bytes of nobody"),
        pytest.param(
            with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4),
            "a has shape \\(2,\\) and lies at bytes 0 to 4",
            id="a shape that is not its bytes'",
        ),
        pytest.param(
            with_header({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
            "cannot be read: KeyError: 'F3'",
            id="a dtype that is none",
        ),
        pytest.param(
            with_header({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"\0" * 4),
            "a has shape",
            id="a negative size",
        ),
        pytest.param(b"\0" * 5, "it ends after 5 bytes", id="nothing"),
    ],
)
def test_what_is_no_safetensors_file_is_damaged(tmp_path: Path, body: bytes, says: str) -> None:
    with pytest.raises(Damaged, match=f"a is not a safetensors file: .*({says})"):
        _tensors(str(tmp_path), "a", written(tmp_path, body))


@pytest.mark.parametrize("at", [0, 7, 8, 20, -1])
def test_a_byte_that_changed_is_found_wherever_it_is(tmp_path: Path, at: int) -> None:
    body = bytearray(body_of(some()))
    manifest = written(tmp_path, bytes(body))
    body[at] ^= 1
    (tmp_path / "a").write_bytes(body)
    with pytest.raises(Damaged, match="a has another sha256 than its manifest says"):
        _tensors(str(tmp_path), "a", manifest)


@pytest.mark.parametrize("grows", [False, True])
def test_another_size_is_found_before_anything_is_read(tmp_path: Path, grows: bool) -> None:
    body = body_of(some())
    manifest = written(tmp_path, body)
    (tmp_path / "a").write_bytes(body + b"\0" if grows else body[:-1])
    with pytest.raises(Damaged, match=f"a has {len(body) + (1 if grows else -1)} bytes, its manifest says {len(body)}"):
        _tensors(str(tmp_path), "a", manifest)


def test_who_waits_for_the_disk_itself_writes_the_same(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(12.0).view(3, 4).t(), **some()}
    entries = InlineWriter().write(str(tmp_path), {"a": contents_of(tensors)})
    body = (tmp_path / "a").read_bytes()
    assert body == body_of(tensors)
    assert entries == {"a": FileEntry(size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())}
