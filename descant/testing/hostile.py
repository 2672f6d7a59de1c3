"""Bodies that are small as sent, or were small as compressed, and were costly: what they hold a million of."""

from __future__ import annotations

import json
from dataclasses import dataclass

import zstandard

MILLION = 1_000_000


@dataclass(frozen=True)
class Hostile:
    path: str
    plain: bytes
    sentence: str
    """Of the refusal, a part."""
    zstd: bool = False

    @property
    def sent(self) -> bytes:
        return zstandard.compress(self.plain) if self.zstd else self.plain


def held(number: int, content: bytes) -> bytes:
    """A field of protobuf that holds bytes."""
    length, size = bytearray(), len(content)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def _training(model_id: str) -> dict[str, tuple[bytes, str]]:
    begin = held(1, model_id.encode()) + b"\x10\x01"
    fields, dims = "the body has more than 49152 fields", "a text or a shape has"

    def tensor(content: bytes) -> bytes:
        return held(3, held(2, held(1, b"weights") + held(2, content)))

    bodies = {
        "empty datums": (b"\x1a\x00" * MILLION, fields),
        "datums": (b"\x1a\x00" * 5000, "data has 5000 datums, expected at most 4096"),
        "empty chunks": (held(3, b"\x0a\x00" * MILLION), fields),
        "chunks": (held(3, b"\x0a\x02\x0a\x00" * MILLION), fields),
        "chunks of many datums": (held(3, b"\x0a\x02\x0a\x00" * 1000) * 1000, fields),
        "texts of one chunk": (held(3, held(1, b"\x0a\x00" * MILLION)), fields),
        "tokens of one text": (held(3, held(1, held(1, b"\x0a\x00" * MILLION))), fields),
        "inputs": (held(3, b"".join(held(2, held(1, b"%x" % i)) for i in range(200_000))), fields),
        "dims": (tensor(b"\x20\x01" * MILLION), fields),
        "packed dims": (tensor(held(4, b"\x01" * MILLION)), dims),
        "sparse": (tensor(held(2, b"\x0a\x00" * MILLION)), fields),
        "spans": (held(3, b"\x1a\x00" * MILLION), fields),
        "other spans": (held(3, b"\x22\x02\x0a\x00" * MILLION), fields),
        "config": (b"".join(held(5, held(1, b"%x" % i)) for i in range(200_000)), fields),
        "config of 1000": (b"".join(held(5, held(1, b"%x" % i)) for i in range(1000)), "has 1000 entries, expected at"),
        "newer config": (b"".join(held(7, held(1, b"%x" % i)) for i in range(200_000)), fields),
        "unknown": (b"\x40\x01" * MILLION, fields),
        "unknown groups": (b"\x43\x44" * MILLION, "not a protobuf ForwardBackwardRequest"),
        "nested groups": (b"\x43" * MILLION, "not a protobuf ForwardBackwardRequest"),
        "one number": (b"\x40" + b"\xff" * MILLION, "not a protobuf ForwardBackwardRequest"),
        "loss_fn": (held(4, b"x" * MILLION), dims),
        "ids": (held(1, b"x" * 2000) * 500, "model_id has 2000 characters"),
        "name of an input": (held(3, held(2, held(1, b"x" * MILLION))), dims),
        "text of the config": (held(7, held(1, b"a") + held(2, held(2, b"x" * MILLION))), dims),
        "zeros": (tensor(held(1, bytes(32 << 20))), "bytes after decompression, expected at most 8388608"),
    }
    return {name: (begin + body, sentence) for name, (body, sentence) in bodies.items()}


def _sampling() -> dict[str, tuple[bytes, str]]:
    def body(chunks: bytes, more: bytes = b"") -> bytes:
        begin = b'{"sampling_session_id":"s","seq_id":0,"prompt":{"chunks":['
        return begin + chunks + b"]}" + more + b"}"

    def many(value: bytes, count: int = MILLION) -> bytes:
        return b",".join([value] * count)

    def params(field: bytes) -> bytes:
        return body(b'{"tokens":[1]}', b',"sampling_params":{' + field + b"}")

    elements, chunks, text = "elements, expected at most 524288", "more than 4096 chunks", "bytes beside token ids"
    return {
        "chunks of JSON": (body(many(b'{"tokens":[1]}', 700_000)), elements),
        "few chunks of JSON": (body(many(b'{"tokens":[1]}', 5000)), chunks),
        "chunks that are none": (body(many(b"{}", 400_000)), chunks),
        "chunks of other kinds": (body(many(b'{"type":"image"}', 20_000)), chunks),
        "tokens": (body(b'{"tokens":[' + many(b"1") + b"]}"), elements),
        "tokens that are text": (body(b'{"tokens":[' + many(b'"1"', 500_000) + b"]}"), text),
        "tokens that are fractions": (body(b'{"tokens":[' + many(b"1.5", 500_000) + b"]}"), text),
        "tokens below zero": (body(b'{"tokens":[' + many(b"-1", 500_000) + b"]}"), "tokens[0] is -1"),
        "one token": (body(b'{"tokens":[' + b"1" * (8 << 20) + b"]}"), text),
        "targets": (body(b'{"tokens":[1]}', b',"target_prompt_logprobs":{"data":[' + many(b"1") + b"]}"), elements),
        "stops": (params(b'"stop":[' + many(b"1", 30_000) + b"]"), "stop has 30000 elements, expected at most 1024"),
        "many stops": (params(b'"stop":[' + many(b"1", 500_000) + b"]"), "fields and other values"),
        "stops that are text": (params(b'"stop":[' + many(b'"a"', 30_000) + b"]"), "stop has 30000 elements"),
        "a seed": (params(b'"seed":' + b"9" * (1 << 19)), "not valid JSON"),
        "unknown fields": (body(b'{"tokens":[1]}', b"," + many(b'"a":1', 400_000)), text),
        "fewer unknown fields": (body(b'{"tokens":[1]}', b"," + many(b'"a":1', 20_000)), "fields and other values"),
        "unknown text": (body(b'{"tokens":[1]}', b',"a":"' + b"a" * (8 << 20) + b'"'), text),
        "unknown depth": (body(b'{"tokens":[1]}', b',"a":' + b"[" * 4000), "recursion limit"),
        "great unknown depth": (body(b'{"tokens":[1]}', b',"a":' + b"[" * MILLION), chunks),
    }


def _others(model_id: str) -> dict[str, tuple[str, bytes, str]]:
    def filled(field: str, value: bytes) -> bytes:
        return (
            b'{"model_id":' + json.dumps(model_id).encode() + b',"seq_id":1,"' + field.encode() + b'":' + value + b"}"
        )

    too_large = "the body "
    tags = b"[" + b",".join([b'""'] * 21_000) + b"]"
    metadata = b"{" + b",".join(b'"%x":0' % i for i in range(6000)) + b"}"
    new = b'{"session_id":"s","model_seq_id":0,"base_model":"b","user_metadata":' + metadata + b"}"
    return {
        "list items": ("create_session", b'{"tags":[' + b",".join([b"0"] * 4 * MILLION) + b"]}", too_large),
        "tags": ("create_session", b'{"tags":[' + b",".join([b"0"] * 31_000) + b"]}", "tags[0] is 0"),
        "depth": ("create_session", b'{"user_metadata":' + b'{"a":' * 12_000, "recursion limit"),
        "metadata of a model": ("create_model", new, "user_metadata.0 is 0"),
        "a step": ("optim_step", filled("adam_params", tags), "adam_params is a list of 21000"),
        "a name": ("save_weights", filled("path", b'"' + b"a" * MILLION + b'"'), "the body is larger than 65536 bytes"),
        "a large step": ("optim_step", filled("adam_params", tags * 20), "the body is larger than 65536 bytes"),
        "a poll": ("retrieve_future", b'{"request_id":"' + b"a" * 60_000 + b'"}', "request_id is"),
        "a reason": ("sessions/x/finish", b'{"reason":' + b"[" * 60_000, "recursion limit"),
    }


def hostile(model_id: str) -> dict[str, Hostile]:
    """By what there is too much of. ``model_id``: of a model of the sender's."""
    table: dict[str, Hostile] = {}
    for name, (body, sentence) in _training(model_id).items():
        table[name] = Hostile("forward_backward", body, sentence, zstd=True)
        if name != "zeros":
            table[f"{name}, not compressed"] = Hostile("forward_backward", body, sentence)
    for name, (body, sentence) in _sampling().items():
        table[name] = Hostile("asample", body, sentence)
    for name, (path, body, sentence) in _others(model_id).items():
        table[name] = Hostile(path, body, sentence)
    compressed = table["list items"]
    sentence = "bytes after decompression, expected at most 65536"
    table["list items, compressed"] = Hostile(compressed.path, compressed.plain, sentence, zstd=True)
    return table
