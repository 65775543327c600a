"""What is counted while rows become tokens. Tallies of chunks add up, so the counts do not depend on how a file was divided."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from postgrad.data.files import Place, Rejected
from postgrad.data.table import Array

EXAMPLES = 5
"""Rows named per finding."""
REJECTED_KEPT = 200
"""Rejected rows that keep their reason; all are counted."""


@dataclass
class Mark:
    """Something seen in some rows: how many rows, the first of them, and a detail of the first."""

    count: int = 0
    rows: list[str] = field(default_factory=list)
    detail: str = ""

    def add(self, other: Mark) -> None:
        self.detail = self.detail or other.detail
        self.count += other.count
        self.rows += other.rows[: EXAMPLES - len(self.rows)]


@dataclass
class Tally:
    """rows = kept + sum of `dropped` + rejected_count.

    made:            training rows (a conversation that a template rewrites gives several)
    lengths:         tokens per training row before any limit -> how many; `kept_lengths` the same of the kept ones
    answers, ends:   finished assistant turns that are trained, and trained end tokens in them
    counts:          everything else that is only counted
    formats:         rows of a format that is not the file's; first_other: the first of them
    parts:           what was kept of each part of the source
    prints:          per kept row: fingerprint of all its tokens, of its prompt, and its place (file, line, item)
    """

    rows: int = 0
    kept: int = 0
    made: int = 0
    cut: int = 0
    tokens: int = 0
    trained: int = 0
    answers: int = 0
    ends: int = 0
    needed: int | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    kept_lengths: Counter[int] = field(default_factory=Counter)
    marks: dict[str, Mark] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    rejected_count: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    first_other: str = ""
    columns: set[str] = field(default_factory=set)
    prints: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    _prints: list[Array] = field(default_factory=list)

    def mark(self, name: str, row: str, detail: str = "") -> None:
        self.marks.setdefault(name, Mark()).add(Mark(1, [row], detail))

    def reject(self, place: Place, reason: str) -> None:
        self.rejected_count += 1
        if len(self.rejected) < REJECTED_KEPT:
            self.rejected.append(Rejected(place, reason))

    def need(self, tokens: int) -> None:
        """Remember the smallest limit under which one more row would have been kept."""
        self.needed = tokens if self.needed is None else min(self.needed, tokens)

    def see(self, place: Place, whole: Array | Sequence[int], prompt: Array | Sequence[int]) -> None:
        """Remember a kept row's tokens by their fingerprint."""
        if place.file not in self.files:
            self.files.append(place.file)
        self.prints.append((_print(whole), _print(prompt), self.files.index(place.file), place.line, place.item))

    def add(self, other: Tally) -> None:
        """Add the tally of later rows."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        for mark, seen in other.marks.items():
            self.marks.setdefault(mark, Mark()).add(seen)
        if other.needed is not None:
            self.need(other.needed)
        self.rejected += other.rejected[: REJECTED_KEPT - len(self.rejected)]
        self.first_other = self.first_other or other.first_other
        self.columns |= other.columns
        self.files += [file for file in other.files if file not in self.files]
        moved = [self.files.index(file) for file in other.files]
        self._prints.append(other.table_of_prints(moved))

    def table_of_prints(self, files: list[int] | None = None) -> Array:
        """[kept rows, 5] int64: row print, prompt print, file, line, item. `files` renumbers the files."""
        own = np.asarray(self.prints, np.int64).reshape(-1, 5)
        if files and len(own):
            own[:, 2] = np.asarray(files)[own[:, 2]]
        return np.concatenate([*self._prints, own])

    def place_of(self, line: Array) -> str:
        """The name of a row of `table_of_prints`."""
        return Place(self.files[int(line[2])], int(line[3]), int(line[4])).name

    # ---- to disk and back

    def to_json(self) -> dict[str, Any]:
        """Everything but the prints, which are an array, and rows of other formats, with which nothing is ever stored."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        counters = {name: list(getattr(self, name).items()) for name in _COUNTERS}
        marks = {name: [mark.count, mark.rows, mark.detail] for name, mark in self.marks.items()}
        rejected = [[item.place.file, item.place.line, item.place.item, item.reason] for item in self.rejected]
        lists = {"columns": sorted(self.columns), "files": self.files, "parts": self.parts}
        return {**numbers, **counters, **lists, "marks": marks, "rejected": rejected, "needed": self.needed}

    @classmethod
    def from_json(cls, data: dict[str, Any], prints: Array) -> Tally:
        tally = cls(**{name: data[name] for name in (*_NUMBERS, "needed", "files", "parts")}, columns=set(data["columns"]))
        for name in _COUNTERS:
            getattr(tally, name).update(dict(map(tuple, data[name])))
        tally.marks = {name: Mark(*values) for name, values in data["marks"].items()}
        tally.rejected = [Rejected(Place(file, line, item), reason) for file, line, item, reason in data["rejected"]]
        tally._prints.append(prints)
        return tally


_NUMBERS = ("rows", "kept", "made", "cut", "tokens", "trained", "answers", "ends", "rejected_count")
_COUNTERS = ("dropped", "counts", "lengths", "kept_lengths", "formats")


def _print(ids: Array | Sequence[int]) -> int:
    """64 bits that are equal for equal ids, in every process."""
    digest = hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
