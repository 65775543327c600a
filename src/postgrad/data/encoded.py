"""One training row as tokens, and how it lies in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from postgrad.chat import EncodedConversation, TokenSource
from postgrad.data.table import Array, Record
from postgrad.types import TrainRow

SOURCES: tuple[TokenSource, ...] = ("context", "assistant", "glue")
COLUMNS = {"name": "uint8", "ids": "int32", "marks": "uint8"}
"""marks: bit 0 = trained, the bits above = index into SOURCES."""


def _mark(source: TokenSource, trained: bool) -> bytes:
    return bytes((SOURCES.index(source) << 1 | trained,))


_MARKS = {(source, trained): _mark(source, trained) for source in SOURCES for trained in (False, True)}
_TRAINED = [mark for (_, trained), mark in _MARKS.items() if trained]
_NOT_TRAINED = b"".join(mark for (_, trained), mark in _MARKS.items() if not trained)
_NOT_ASSISTANT = b"".join(mark for (source, _), mark in _MARKS.items() if source != "assistant")
TRAINED_ANSWER = _MARKS["assistant", True]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRow:
    """One training row as the columns of a table hold it: `marks` has a byte per token."""

    name: str
    ids: Array
    marks: bytes

    @classmethod
    def of(cls, name: str, ids: Sequence[int], stretches: Iterable[tuple[int, TokenSource, bool]]) -> EncodedRow:
        """`stretches` are (tokens, where they came from, whether they are trained), in order.

        Nothing precedes the first token, so nothing can predict it: it is never trained.
        """
        marks = b"".join([_MARKS[source, trained] * length for length, source, trained in stretches])
        if marks[:1] in _TRAINED:
            marks = bytes((marks[0] & ~1,)) + marks[1:]
        return cls(name, np.fromiter(ids, np.int32, len(ids)), marks)

    def __len__(self) -> int:
        return len(self.marks)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.ids.tolist())

    @property
    def trained(self) -> tuple[bool, ...]:
        """One flag per token."""
        return tuple(bool(mark & 1) for mark in self.marks)

    @property
    def source(self) -> tuple[TokenSource, ...]:
        """One per token."""
        return tuple(SOURCES[mark >> 1] for mark in self.marks)

    @property
    def trained_tokens(self) -> int:
        return sum(map(self.marks.count, _TRAINED))

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first trained one."""
        return len(self) - len(self.marks.lstrip(_NOT_TRAINED))

    @property
    def context_tokens(self) -> int:
        """Tokens before the first that an assistant wrote."""
        return len(self) - len(self.marks.lstrip(_NOT_ASSISTANT))

    def first(self, count: int) -> EncodedRow:
        return EncodedRow(self.name, self.ids[:count], self.marks[:count])

    def until_trained(self) -> EncodedRow:
        """Up to the last trained token."""
        return self.first(len(self.marks.rstrip(_NOT_TRAINED)))

    def record(self) -> Record:
        return {"name": text_array(self.name), "ids": self.ids, "marks": np.frombuffer(self.marks, np.uint8)}


def encoded_row(name: str, conversation: EncodedConversation, chosen: set[int]) -> EncodedRow:
    """Trains what the assistant wrote in the chosen messages."""
    stretches = [(length, source, source == "assistant" and message in chosen) for length, source, message in conversation.stretches]
    return EncodedRow.of(name, conversation.token_ids, stretches)


def all_but(name: str, conversation: EncodedConversation, skipped: set[int]) -> EncodedRow:
    """Trains every token but those of the skipped messages."""
    stretches = [(length, source, message not in skipped) for length, source, message in conversation.stretches]
    return EncodedRow.of(name, conversation.token_ids, stretches)


def read_row(record: Record) -> EncodedRow:
    return EncodedRow(read_name(record), record["ids"], record["marks"].tobytes())


def train_row(record: Record) -> TrainRow:
    return TrainRow(tuple(record["ids"].tolist()), tuple((record["marks"] & 1).astype(bool).tolist()))


def read_name(record: Record) -> str:
    return record["name"].tobytes().decode()


def read_source(record: Record) -> tuple[TokenSource, ...]:
    return tuple(SOURCES[mark >> 1] for mark in record["marks"].tolist())


def text_array(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(text.encode(), np.uint8)
