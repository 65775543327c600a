"""Rendered turns to token ids, each with its source.

Pieces are encoded apart: the context up to the first answer, each answer, each end token together with the context that follows it. So no
token spans the border of an answer, and every piece of context has the ids that inference gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from postgrad.chat.encoder import require_whole
from postgrad.chat.tokens import Guard, Tokens
from postgrad.chat.turns import Chat, Turn

TokenSource = Literal["context", "assistant", "glue"]


class Stretch(NamedTuple):
    """Neighbouring tokens of one kind.

    source:   "assistant" = the model must write them (content, calls, end token); "glue" = what the template puts around an assistant turn
              (its header, the newline after its end token); "context" = everything else.
    message:  index of the assistant message that they belong to; -1 for context.
    """

    length: int
    source: TokenSource
    message: int


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """One conversation as ids; `stretches` say in order what the ids are."""

    token_ids: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    @property
    def source(self) -> tuple[TokenSource, ...]:
        """One per token."""
        return tuple(source for length, source, _ in self.stretches for _ in range(length))

    @property
    def message(self) -> tuple[int, ...]:
        """One per token."""
        return tuple(message for length, _, message in self.stretches for _ in range(length))


@dataclass(frozen=True, slots=True)
class Printed:
    """A conversation as a chat template prints it: pieces of text that are encoded apart, and how their ids make the conversation."""

    pieces: Sequence[str]
    guard: Guard
    encoded: Callable[[list[list[int]]], EncodedConversation]

    def __post_init__(self) -> None:
        """What no tokenizer can encode is refused here, where it spoils nothing that is encoded together with it."""
        require_whole("".join(self.pieces))


def printed_turns(tokens: Tokens, chat: Chat, turns: Sequence[Turn], text: str, *, header: str) -> Printed:
    """`text` is the whole rendered conversation and `turns` lie in it; `header` is the template's assistant header."""
    following = [*turns[1:], None]
    pieces = [turns[0].prompt if turns else text, header]
    for turn, after in zip(turns, following, strict=True):
        written = text[len(turn.prompt) + len(turn.body) : len(after.prompt) if after else len(text)]
        pieces += [turn.body, written, turn.tail]

    def encoded(ids: list[list[int]]) -> EncodedConversation:
        first, header_ids, *coded = ids
        row = _Row(chat, header, header_ids)
        row.add_context(tokens.with_bos(first), turns[0] if turns else None)
        for turn, after, body, rest, tail in zip(turns, following, coded[::3], coded[1::3], coded[2::3], strict=True):
            message = chat.origin[turn.index]
            row.add(body, "assistant", message)
            row.add(rest[:1], "assistant", message)  # the end token
            border = 1 + len(tail) if rest[1 : 1 + len(tail)] == tail else 1
            row.add(rest[1:border], "glue", message)
            row.add_context(rest[border:], after)
        return row.encoded()

    return Printed(pieces, chat.guard, encoded)


def printed_raw(tokens: Tokens, prompt: str, completion: str, eos: Sequence[int]) -> Printed:
    """Two texts without a template, all of which stays text; `eos` ends the completion."""
    guard = Guard(tokens, prompt, completion)

    def encoded(ids: list[list[int]]) -> EncodedConversation:
        row = RowBuilder()
        row.add(tokens.with_bos(ids[0]), "context", -1)
        row.add([*ids[1], *eos], "assistant", 0)
        return row.encoded()

    return Printed(guard.apply([prompt, completion]), guard, encoded)


def printed_prompt(tokens: Tokens, chat: Chat, text: str) -> Printed:
    """A prompt: all of it is context."""

    def encoded(ids: list[list[int]]) -> EncodedConversation:
        row = RowBuilder()
        row.add(tokens.with_bos(ids[0]), "context", -1)
        return row.encoded()

    return Printed([text], chat.guard, encoded)


class RowBuilder:
    """Ids and what they are, growing together."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._stretches: list[Stretch] = []

    def add(self, ids: Sequence[int], source: TokenSource, message: int) -> None:
        if ids:
            self._ids += ids
            self._stretches.append(Stretch(len(ids), source, message))

    def encoded(self) -> EncodedConversation:
        return EncodedConversation(tuple(self._ids), tuple(self._stretches))


class _Row(RowBuilder):
    """A row that tells the assistant header, where it can be told apart at the end of context, from the context."""

    def __init__(self, chat: Chat, header: str, header_ids: list[int]) -> None:
        super().__init__()
        self._chat = chat
        self._header = header
        self._header_ids = header_ids

    def add_context(self, ids: list[int], turn: Turn | None) -> None:
        """Context; the header of `turn` at its end is glue."""
        border = len(ids) - (self._header_length(turn, ids) if turn else 0)
        self.add(ids[:border], "context", -1)
        self.add(ids[border:], "glue", self._chat.origin[turn.index] if turn else -1)

    def _header_length(self, turn: Turn, ids: list[int]) -> int:
        if not self._header or not turn.prompt.endswith(self._header):
            return 0
        return len(self._header_ids) if ids[-len(self._header_ids) :] == self._header_ids else 0
