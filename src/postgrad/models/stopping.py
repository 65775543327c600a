"""When a turn ends: any of the model's end ids, any stop string, or the token limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from postgrad.protocols import Finish, SamplingParams

Decode = Callable[[Sequence[int]], str]

_MARGIN = 8
"""Tokens decoded in front of the longest possible match: their text absorbs what a decoder does at the start of a text."""


class StopRule:
    """Decides after each sampled token whether its turn is over.

    Stop strings are looked for in the decoded text of the turn. A match can only be completed by the newest token, so only a
    tail is decoded, and only when that token's own text can hold the last character of a stop string.
    """

    def __init__(self, params: SamplingParams, decode: Decode) -> None:
        self._ids = params.stop_ids
        self._strings = params.stop_strings
        self._decode = decode
        self._pieces: dict[int, str] = {}
        self._last_characters = frozenset(text[-1] for text in self._strings)
        self._tail = max((len(text.encode()) for text in self._strings), default=0) + _MARGIN
        self._length = max((len(text) for text in self._strings), default=0)

    def finish(self, sampled: Sequence[int], max_tokens: int) -> Finish | None:
        """Why the turn ends with the newest of its sampled tokens; None = it goes on. An end id outranks a string and the limit."""
        if sampled[-1] in self._ids:
            return Finish.STOP_ID
        if self._strings and self._may_complete(sampled[-1]) and self._matches(sampled):
            return Finish.STOP_STRING
        return Finish.LENGTH if len(sampled) >= max_tokens else None

    def _may_complete(self, token: int) -> bool:
        """False only if no stop string can end inside this token. A decoder may strip spaces, and shows part of a character as U+FFFD."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        return "\ufffd" in piece or any(last.isspace() or last in piece for last in self._last_characters)

    def _matches(self, sampled: Sequence[int]) -> bool:
        tail = self._tail
        text = self._decode(sampled[-tail:])
        while len(text) < self._length + _MARGIN and tail < len(sampled):  # tokens without text (special tokens) fill the tail
            tail *= 2
            text = self._decode(sampled[-tail:])
        return any(stop in text for stop in self._strings)
