"""Rendered turns to token ids, each with its source.

Pieces are encoded apart: the context up to the first answer, each answer, each end token together with the context that follows it. So no
token spans the border of an answer, and every piece of context has the ids that inference gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from postgrad.chat.tokens import Tokens
from postgrad.chat.turns import Chat, Turn

TokenSource = Literal["context", "assistant", "glue"]


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """One conversation as ids. Three tuples of one length.

    source:   "assistant" = the model must write it (content, calls, end token); "glue" = what the template puts around an assistant turn
              (its header, the newline after its end token); "context" = everything else.
    message:  index of the assistant message that a token belongs to; -1 for context.
    """

    token_ids: tuple[int, ...]
    source: tuple[TokenSource, ...]
    message: tuple[int, ...]


def encode_turns(tokens: Tokens, chat: Chat, turns: Sequence[Turn], text: str, *, header: str) -> EncodedConversation:
    """`text` is the whole rendered conversation and `turns` lie in it; `header` is the template's assistant header."""
    pieces = [turns[0].prompt if turns else text]
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        pieces += [turn.body, text[len(turn.prompt) + len(turn.body) : len(following.prompt) if following else len(text)]]
    coded = iter(tokens.rendered_pieces(pieces, guard=chat.guard))
    glue = _Glue(tokens, chat, header)
    row = RowBuilder()
    glue.add_context(row, tokens.with_bos(next(coded)), turns[0] if turns else None)
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        message = chat.origin[turn.index]
        row.add(next(coded), "assistant", message)
        end, *after = next(coded)
        row.add([end], "assistant", message)
        tail = glue.tail_length(turn, after)
        row.add(after[:tail], "glue", message)
        glue.add_context(row, after[tail:], following)
    return row.encoded()


class RowBuilder:
    """Ids, sources and message indices that grow together."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._source: list[TokenSource] = []
        self._message: list[int] = []

    def add(self, ids: Sequence[int], source: TokenSource, message: int) -> None:
        self._ids += ids
        self._source += [source] * len(ids)
        self._message += [message] * len(ids)

    def encoded(self) -> EncodedConversation:
        return EncodedConversation(tuple(self._ids), tuple(self._source), tuple(self._message))


class _Glue:
    """Finds what the template puts around an assistant turn among the ids of context."""

    def __init__(self, tokens: Tokens, chat: Chat, header: str) -> None:
        self._tokens = tokens
        self._chat = chat
        self._header = header

    def _ids(self, text: str) -> list[int]:
        return self._tokens.rendered(text, guard=self._chat.guard, continues=True)

    def add_context(self, row: RowBuilder, ids: Sequence[int], turn: Turn | None) -> None:
        """Context; the header of `turn`, where it can be told apart at the end of `ids`, is glue."""
        border = len(ids) - (self._header_length(turn, ids) if turn else 0)
        row.add(ids[:border], "context", -1)
        row.add(ids[border:], "glue", self._chat.origin[turn.index] if turn else -1)

    def tail_length(self, turn: Turn, ids: Sequence[int]) -> int:
        tail = self._ids(turn.tail)
        return len(tail) if list(ids[: len(tail)]) == tail else 0

    def _header_length(self, turn: Turn, ids: Sequence[int]) -> int:
        if not self._header or not turn.prompt.endswith(self._header):
            return 0
        header = self._ids(self._header)
        return len(header) if list(ids[-len(header) :]) == header else 0
