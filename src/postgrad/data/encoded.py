"""One training row as tokens, and how it lies in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from postgrad.chat import EncodedConversation, TokenSource
from postgrad.data.table import Array, Record
from postgrad.types import TrainRow

SOURCES: tuple[TokenSource, ...] = ("context", "assistant", "glue")
_MARK = {source: number << 1 for number, source in enumerate(SOURCES)}
TRAINED = 1
TRAINED_ANSWER = _MARK["assistant"] | TRAINED
COLUMNS = {"name": "uint8", "ids": "int32", "marks": "uint8"}
"""marks: bit 0 = trained, the bits above = index into SOURCES."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRow:
    """One training row with where each token came from, as the columns of a table hold it."""

    name: str
    ids: Array
    marks: Array

    @classmethod
    def of(cls, name: str, ids: Sequence[int], stretches: Iterable[tuple[int, TokenSource, bool]]) -> EncodedRow:
        """`stretches` are (tokens, where they came from, whether they are trained), in order.

        Nothing precedes the first token, so nothing can predict it: it is never trained.
        """
        marks = bytearray().join(bytes((_MARK[source] | trained,)) * length for length, source, trained in stretches)
        if marks:
            marks[0] &= ~TRAINED
        return cls(name, np.array(ids, np.int32), np.frombuffer(marks, np.uint8))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.ids.tolist())

    @property
    def trained(self) -> tuple[bool, ...]:
        """One flag per token."""
        return tuple(self.flags.tolist())

    @property
    def source(self) -> tuple[TokenSource, ...]:
        """One per token."""
        return tuple(SOURCES[mark >> 1] for mark in self.marks.tolist())

    @property
    def flags(self) -> Array:
        """`trained` as an array."""
        return (self.marks & TRAINED).view(np.bool_)

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.marks & TRAINED))

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first trained one, of which there must be one."""
        return int(self.flags.argmax())

    @property
    def context_tokens(self) -> int:
        """Tokens before the first that an assistant wrote; 0 when none did."""
        return int((self.marks >> 1 == SOURCES.index("assistant")).argmax())

    def first(self, count: int) -> EncodedRow:
        return EncodedRow(self.name, self.ids[:count], self.marks[:count])

    def record(self) -> Record:
        return {"name": text_array(self.name), "ids": self.ids, "marks": self.marks}


def encoded_row(name: str, conversation: EncodedConversation, chosen: set[int]) -> EncodedRow:
    """Trains what the assistant wrote in the chosen messages."""
    stretches = ((length, source, source == "assistant" and message in chosen) for length, source, message in conversation.stretches)
    return EncodedRow.of(name, conversation.token_ids, stretches)


def all_but(name: str, conversation: EncodedConversation, skipped: set[int]) -> EncodedRow:
    """Trains every token but those of the skipped messages."""
    stretches = ((length, source, message not in skipped) for length, source, message in conversation.stretches)
    return EncodedRow.of(name, conversation.token_ids, stretches)


def read_row(record: Record) -> EncodedRow:
    return EncodedRow(read_name(record), record["ids"], record["marks"])


def train_row(record: Record) -> TrainRow:
    return TrainRow(tuple(record["ids"].tolist()), tuple((record["marks"] & TRAINED).astype(bool).tolist()))


def read_name(record: Record) -> str:
    return record["name"].tobytes().decode()


def read_source(record: Record) -> tuple[TokenSource, ...]:
    return tuple(SOURCES[mark >> 1] for mark in record["marks"].tolist())


def text_array(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(text.encode(), np.uint8)
