"""The safetensors format, piece by piece, so that no file need be in memory whole.

    u64, little endian: how long the header is · the header, JSON, filled up with spaces to a multiple of 8 · the data

Tensors lie one behind the other without gaps, those with the widest numbers first, then by name, as safetensors itself
writes them: the same tensors are the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch

from descant.ckpt.staging import Content
from descant.errors import Damaged

DTYPES: Mapping[str, torch.dtype] = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""In the order in which they lie in a file."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000


def contents_of(tensors: Mapping[str, torch.Tensor]) -> list[Content]:
    """A file of these tensors, which may be views of any strides: its header, and they themselves in its order."""
    header, names = _header(tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()))
    return [header, *(tensors[name] for name in names)]


@lru_cache(maxsize=64)
def _header(tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> tuple[bytes, list[str]]:
    """A file's beginning, and the names in its order: the same at each save of adapters of one shape, and made once,
    since the thread that computes waits while another runs Python."""
    order = list(_NAMES)
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (order.index(tensor[1]), tensor[0])):
        begin, end = end, end + prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, [name for name in fields if name != "__metadata__"]


def read_tensors(num_bytes: int, read_into: Callable[[memoryview], None]) -> dict[str, torch.Tensor]:
    """The tensors of a file of ``num_bytes``, each in memory of its own. ``read_into`` fills a buffer with what comes
    next; it is asked for every byte once. Raises ``Damaged``, and what ``read_into`` raises."""
    head = bytearray(8)
    read_into(memoryview(head))
    length = int.from_bytes(head, "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, num_bytes - 8):
        raise Damaged(f"its header has {length} bytes, the file {num_bytes}")
    header = bytearray(length)
    read_into(memoryview(header))
    try:
        places = _places(json.loads(header), num_bytes - 8 - length)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"its header cannot be read: {type(error).__name__}: {error}") from None
    tensors = {}
    for name, (dtype, shape) in places.items():
        tensors[name] = torch.empty(shape, dtype=dtype)
        if tensors[name].numel():
            read_into(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return tensors


def _places(fields: dict[str, Any], num_bytes: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """By name, in their order."""
    fields.pop("__metadata__", None)
    places, end = {}, 0
    for name in sorted(fields, key=lambda name: tuple(fields[name]["data_offsets"])):
        dtype, shape = DTYPES[fields[name]["dtype"]], tuple(fields[name]["shape"])
        begin, last = fields[name]["data_offsets"]
        if begin != end or last - begin != prod(shape) * dtype.itemsize or any(size < 0 for size in shape):
            raise Damaged(f"{name} has shape {shape} and lies at bytes {begin} to {last}, expected to begin at {end}")
        places[name], end = (dtype, shape), last
    if end != num_bytes:
        raise Damaged(f"its tensors have {end} bytes, expected {num_bytes}")
    return places
