"""Stop strings over a byte tokenizer: in the middle of tokens, across them, and around unfinished characters."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from descant.sample.stops import StopText
from descant.testing.tiny import EOS_TOKEN_ID, TURN_END, tiny_model


def decode_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def first_stop(text: str, stops: list[str]) -> int | None:
    """After how many bytes of ``text`` the stop is seen."""
    watch = StopText(stops, decode_bytes)
    data = list(text.encode())
    for count in range(1, len(data) + 1):
        if watch.met(data[:count]):
            return count
    return None


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello world", ["o w"], 7),
        ("hello", ["h"], 1),
        ("hello", ["hello"], 5),
        ("hello", ["hello "], None),
        ("aaab", ["aab"], 4),
        ("abababc", ["ababc"], 7),
        ("x👍y", ["👍"], 5),
        ("x👍👍y", ["👍y"], 10),
        ("日本語", ["本"], 6),
        ("one\n\ntwo", ["\n\n", "tw"], 5),
    ],
)
def test_a_stop_is_seen_with_the_byte_that_ends_it(text: str, stops: list[str], expected: int | None) -> None:
    assert first_stop(text, stops) == expected


def test_a_stop_before_an_unfinished_character_in_one_token() -> None:
    watch = StopText(["END"], lambda tokens: decode_bytes([b for token in tokens for b in token]))
    assert not watch.met([b"EN"])
    assert watch.met([b"EN", b"D\xf0\x9f"])


def test_bytes_that_never_become_a_character_do_not_hide_a_stop_or_grow_the_window() -> None:
    decoded: list[int] = []

    def decode(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return decode_bytes(tokens)

    watch = StopText(["stop"], decode)
    output: list[int] = []
    for _ in range(200):
        output.append(0xFF)
        assert not watch.met(output)
    assert max(decoded) < 30
    for byte in b"sto":
        output.append(byte)
        assert not watch.met(output)
    output.append(ord("p"))
    assert watch.met(output)


def test_context_keeps_the_space_that_a_tokenizer_drops_in_front() -> None:
    words = ["▁the", "▁end", "ing"]
    watch = StopText([" end"], lambda tokens: "".join(words[t] for t in tokens).replace("▁", " ").removeprefix(" "))
    assert not watch.met([0])
    assert watch.met([0, 1])


def test_the_end_tokens_text_is_a_stop_like_any_other(tmp_path: Path) -> None:
    """A stop that is given takes the end token's place; this is how to keep both."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama", tmp_path))
    watch = StopText(["</tool>", TURN_END], tokenizer.decode)
    tokens = [*tokenizer.encode("so "), EOS_TOKEN_ID]
    assert [watch.met(tokens[:count]) for count in range(1, len(tokens) + 1)] == [False, False, False, True]
