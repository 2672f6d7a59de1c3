"""Does the text so far contain a stop string? Asked after every token, decoded a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"
"""What a tokenizer decodes the first bytes of an unfinished character to."""

_MAX_UNFINISHED_TOKENS = 8
"""A character has at most 4 bytes; what is still unfinished after this many tokens never will be a character."""


class StopText:
    """Watches one sequence. A stop may begin and end in the middle of a token and cross any number of them.

    Only the last few tokens are decoded anew, with the tokens before them as context (a tokenizer may drop the space
    in front of what it decodes first). Text that ends in an unfinished character is searched too, but decoded again
    with the next token.
    """

    def __init__(self, stops: Sequence[str], decode_text: Callable[[Sequence[int]], str]):
        self._stops = tuple(stops)
        self._decode_text = decode_text
        self._keep = max(len(stop) for stop in stops) - 1
        self._tail = ""  # the end of the finished text: as much as a stop that ends later can begin in
        self._context = 0  # tokens from here to _finished are decoded again, as context
        self._finished = 0

    def met(self, tokens: Sequence[int]) -> bool:
        """``tokens``: the sequence's output tokens, one more than at the last call. True once, at the end."""
        before = self._decode_text(tokens[self._context : self._finished])
        now = self._decode_text(tokens[self._context :])
        text = self._tail + now[len(before) :]
        if any(stop in text for stop in self._stops):
            return True
        if not now.endswith(_UNFINISHED) or len(tokens) - self._finished > _MAX_UNFINISHED_TOKENS:
            self._tail = text[max(0, len(text) - self._keep) :]
            self._context, self._finished = self._finished, len(tokens)
        return False
