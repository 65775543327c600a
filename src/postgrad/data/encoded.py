"""One training row as tokens, and how it lies in a table."""

from __future__ import annotations

from dataclasses import dataclass
from operator import and_

import numpy as np

from postgrad.chat import EncodedConversation, TokenSource
from postgrad.data.table import Record
from postgrad.types import TrainRow

SOURCES: tuple[TokenSource, ...] = ("context", "assistant", "glue")
_NUMBER = {source: number for number, source in enumerate(SOURCES)}
COLUMNS = {"name": "uint8", "ids": "int32", "marks": "uint8"}
"""marks: bit 0 = trained, the bits above = index into SOURCES."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One training row with where each token came from. Four values of one length (`name` apart)."""

    name: str
    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    source: tuple[TokenSource, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first trained one."""
        return self.trained.index(True)

    def first(self, count: int) -> EncodedRow:
        return EncodedRow(self.name, self.token_ids[:count], self.trained[:count], self.source[:count])

    def all_trained(self) -> EncodedRow:
        """Every token but the first, which nothing precedes."""
        return EncodedRow(self.name, self.token_ids, (False, *(True,) * (len(self.token_ids) - 1)), self.source)

    def record(self) -> Record:
        source = np.frombuffer(bytes(map(_NUMBER.__getitem__, self.source)), np.uint8)
        marks = np.frombuffer(bytes(self.trained), np.uint8) | (source << 1)
        return {"name": text_array(self.name), "ids": np.asarray(self.token_ids, np.int32), "marks": marks}


def encoded_row(name: str, conversation: EncodedConversation, chosen: set[int]) -> EncodedRow:
    """Trains what the assistant wrote in the chosen messages. Nothing precedes the first token, so nothing can predict it."""
    flags = list(map(and_, map("assistant".__eq__, conversation.source), map(chosen.__contains__, conversation.message)))
    flags[0] = False
    return EncodedRow(name, conversation.token_ids, tuple(flags), conversation.source)


def read_row(record: Record) -> EncodedRow:
    marks = record["marks"].tolist()
    source = tuple(SOURCES[mark >> 1] for mark in marks)
    return EncodedRow(read_name(record), tuple(record["ids"].tolist()), tuple(bool(mark & 1) for mark in marks), source)


def train_row(record: Record) -> TrainRow:
    return TrainRow(tuple(record["ids"].tolist()), tuple((record["marks"] & 1).astype(bool).tolist()))


def read_name(record: Record) -> str:
    return record["name"].tobytes().decode()


def read_source(record: Record) -> tuple[TokenSource, ...]:
    return tuple(SOURCES[mark >> 1] for mark in record["marks"].tolist())


def text_array(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(text.encode(), np.uint8)
