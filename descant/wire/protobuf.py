"""How many fields a protobuf body has, counted before the protobuf library makes an object of each.

Two million bytes are a million empty messages: seconds, and half a gigabyte. ``check_fields`` goes from field to field,
into the messages that the schema knows, and stops at ``max_fields``, so that the library's work and memory are
bounded by that number and the body's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from descant.errors import UserError

MAX_FIELDS = 48 * 1024
"""Of a body, at any depth: 48 for each of the 1,024 datums that the SDK puts into a request at most. Tokens and three
tensors (name, dtype, shape, numbers) are 22."""
MAX_NAME_BYTES = 2048
"""Of a text (an id, a name): 512 characters of four bytes."""
MAX_PACKED_BYTES = 64
"""Of packed numbers (the dims of a tensor): each byte may be one, and becomes eight."""

Schema = Sequence["Schema | int | None"]
"""By tag (field number and wire type, below 128): the schema of the message that the field holds, the largest number of
bytes it may have, or None for anything."""


class Broken(UserError):
    """The bytes are no such message."""


class TooManyFields(UserError):
    pass


def schema_of(message: Any, known: Mapping[str, Schema] | None = None) -> Schema:
    """Of a message's ``DESCRIPTOR`` (each backend of the library has a class of its own), none of whose fields has a
    number above 15."""
    known = dict(known or {})
    schema: list[Schema | int | None] = [None] * 128
    known[message.full_name] = schema
    for field in message.fields:
        tag = field.number << 3 | 2
        if field.message_type is not None:
            schema[tag] = known.get(field.message_type.full_name) or schema_of(field.message_type, known)
        elif field.type == FieldDescriptor.TYPE_STRING:
            schema[tag] = MAX_NAME_BYTES
        elif field.type != FieldDescriptor.TYPE_BYTES:
            schema[tag] = MAX_PACKED_BYTES
    return schema


def check_fields(data: bytes, schema: Schema, *, max_fields: int = MAX_FIELDS) -> None:
    """Raises ``TooManyFields``, ``UserError`` for a text that is too long, and ``Broken`` for what the library would
    not read either, and for groups, which no writer uses.

    A loop without calls: it passes over every field of every training request.
    """
    at, end, left = 0, len(data), max_fields
    outer: list[tuple[int, Schema]] = []
    try:
        while True:
            if at == end:
                if not outer:
                    return
                end, schema = outer.pop()
                continue
            left -= 1
            if left < 0:
                raise TooManyFields(f"the body has more than {max_fields} fields")
            tag = data[at]
            at += 1
            if tag > 0x7F:
                tag, at = varint(data, at - 1)
            kind = tag & 7
            if kind == 2:
                size = data[at]
                at += 1
                if size > 0x7F:
                    if data[at] < 0x80:
                        size += (data[at] - 1) << 7
                        at += 1
                    else:
                        size, at = varint(data, at - 1)
                inner = schema[tag] if tag < 128 else None
                if inner is None or size == 0:
                    at += size
                elif isinstance(inner, int):
                    if size > inner:
                        raise UserError(f"a text or a shape has {size} bytes, expected at most {inner}")
                    at += size
                else:
                    outer.append((end, schema))
                    if at + size > end:
                        break
                    end, schema = at + size, inner
            elif kind == 0:
                if data[at] < 0x80:
                    at += 1
                else:
                    _, at = varint(data, at)
            elif kind == 1:
                at += 8
            elif kind == 5:
                at += 4
            else:
                raise Broken(f"the body has a field of wire type {kind}, expected 0, 1, 2 or 5")
            if at > end:
                break
    except IndexError:
        pass
    raise Broken("a field goes on beyond the end of its message")


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at`` (seven bits a byte, lowest first) and the index behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise Broken("a number of more than ten bytes")
