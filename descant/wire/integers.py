"""Arrays of integers in a JSON body, taken out of it as bytes before it is parsed.

A JSON parser makes an object of every number, and nothing else of the process runs meanwhile.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from descant.errors import UserError

Int64 = NDArray[np.int64]

_KEY = re.compile(rb'(?<!\\)"(?:tokens|data|sparse_crow_indices|sparse_col_indices)"[ \t\r\n]*:[ \t\r\n]*\Z')
"""A key of the SDK's, up to its value. In a text its quotes would have a backslash before them."""
_KEY_BYTES = 48
_LONE_MINUS = re.compile(rb"-(?!\d)")
_NONCE = secrets.token_hex(8)
"""So that no body can name what was taken out of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """By the texts that lie in their places. ``lowest``, ``highest``: of all together."""

    arrays: Mapping[str, Int64] = field(default_factory=dict)
    lowest: int = 0
    highest: int = 0


def take_integers(body: bytes) -> tuple[bytes, Integers]:
    """The body with a text in the place of each array of integers under one of the SDK's keys, and the arrays.

    An array that holds anything else stays. A number beyond 64 bits becomes the largest or the smallest of these.
    Raises ``UserError`` for what is no array in JSON. Takes some microseconds a ``[``, so the caller has counted them.
    """
    parts: list[bytes] = []
    texts: list[bytes] = []
    names: list[str] = []
    kept, at = 0, body.find(b"[")
    while at >= 0 and (end := body.find(b"]", at)) >= 0:
        if _KEY.search(body, max(0, at - _KEY_BYTES), at):
            text = body[at + 1 : end]
            if not text.translate(None, b"0123456789,- \t\r\n") and text.strip():
                names.append(f"{_NONCE}:{len(names)}")
                texts.append(text)
                parts += (body[kept:at], b'"', names[-1].encode(), b'"')
                kept = end + 1
                at = end
        at = body.find(b"[", at + 1)
    if not texts:
        return body, Integers()
    numbers = _parsed(b",".join(texts))
    arrays: dict[str, Int64] = {}
    start = 0
    for name, text in zip(names, texts):
        stop = start + text.count(b",") + 1
        arrays[name] = numbers[start:stop]
        start = stop
    parts.append(body[kept:])
    return b"".join(parts), Integers(arrays=arrays, lowest=int(numbers.min()), highest=int(numbers.max()))


def _parsed(text: bytes) -> Int64:
    """Comma-separated integers."""
    numbers = None
    if not (b"-" in text and _LONE_MINUS.search(text)):
        with suppress(ValueError, DeprecationWarning):  # the latter, and the numbers up to there, from older numpy
            numbers = np.fromstring(text.decode(), np.int64, sep=" , ")
    if numbers is None or numbers.size != text.count(b",") + 1:
        raise UserError("the body is not valid JSON: in an array of integers two commas have no integer between them")
    numbers.setflags(write=False)
    return numbers
