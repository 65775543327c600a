"""Where rows come from: files, hub datasets, memory, or a mixture of them, read as a stream that can be read again."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from postgrad.data.columns import Columns, check_columns, check_present, mapped
from postgrad.data.files import EXTENSIONS, Chunk, Place, Rejected, Row, chunked, extension, read_chunks
from postgrad.data.formats import Format, detect, unknown
from postgrad.data.hub import is_hub_id, read_hub
from postgrad.data.join import Join
from postgrad.errors import DataError, RecipeError
from postgrad.suggest import did_you_mean_file


@dataclass(frozen=True, slots=True)
class Part:
    """One file, hub dataset or list of rows. `name` is what its rows are called, as in name:line.

    columns: the map that makes its rows fit; format: what they then are. join: another file whose columns they get before that.
    weight:  how often each row comes in one epoch; 0.5 takes half of the rows, 2 takes every row twice.
    size:    bytes on disk, 0 when not a file; content: what tells its content from another's (None = unknown, never cached).
    """

    name: str
    chunks: Callable[[], Iterator[Chunk]]
    columns: Columns
    format: Format
    weight: float = 1.0
    size: int = 0
    path: Path | None = None
    join: Join | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """A share of the rows, chosen by their content: equal rows always fall on the same side, so none is in both."""

    share: float
    seed: int
    held_out: bool

    def takes(self, row: Row) -> bool:
        text = json.dumps(row.fields, sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.blake2b(f"{self.seed}:{text}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") < self.share * 2**64) == self.held_out


@dataclass(frozen=True, slots=True)
class RowSource:
    """Rows to prepare. More than `max_bad` rejected rows are an error; `notes` are told to the user."""

    parts: tuple[Part, ...]
    max_bad: int = 0
    split: Split | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)

    @property
    def format(self) -> str:
        """The format of the rows; of a mixture, every one that occurs."""
        return ", ".join(dict.fromkeys(part.format for part in self.parts))

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(part.size for part in self.parts)

    def split_off(self, share: float, seed: int) -> tuple[RowSource, RowSource]:
        """(the rest, about `share` of the rows)."""
        if not 0 < share < 1:
            raise RecipeError(f"a split of {share:g} is not between 0 and 1", key="data.eval", hint="e.g. 0.05, or name a file")
        return tuple(replace(self, split=Split(share, seed, held_out)) for held_out in (False, True))  # type: ignore[return-value]

    def read(self) -> tuple[Row, ...]:
        """Every usable row. Raises `DataError`: rows in two formats, more than `max_bad` rejected rows, no row at all."""
        items = list(self._items())
        rejected = [item for item in items if isinstance(item, Rejected)]
        check_rejected(rejected, len(rejected), self.max_bad)
        rows = [item for item in items if isinstance(item, Row)]
        if not rows:
            raise _empty(self.name, rejected)
        return tuple(rows)

    def _items(self) -> Iterator[Row | Rejected]:
        for part in self.parts:
            other: list[tuple[str, Row]] = []
            count = 0
            for item in rows_of(part.chunks(), part, self.split):
                format = detect(item.fields) if isinstance(item, Row) else None
                if isinstance(item, Row) and format != part.format:
                    other.append((format or "unknown", item))
                    continue
                count += isinstance(item, Row)
                yield item
            if other:
                raise two_formats(part.format, count, Counter(name for name, _ in other), other[0][1].name)


def load_rows(
    source: str | Path, *, columns: Columns | None = None, max_bad: int = 0, weight: float = 1.0, join: Join | None = None
) -> RowSource:
    """The rows of a file (see `files` for its kinds) or of a hub dataset (see `hub` for its name). Reads the first rows.

    join: another file whose columns the rows get, before `columns` maps them.
    Raises `DataError`: unreadable or empty file, unknown format, missing columns; `RecipeError`: a `columns` map that means nothing.
    """
    check_columns(columns or {})
    path = Path(source)
    if path.is_file():
        return _source(path.name, lambda: read_chunks(path), columns, max_bad, weight, path, join)
    if not path.exists() and extension(path) not in EXTENSIONS and is_hub_id(str(source)):
        return _source(str(source), lambda: chunked(read_hub(str(source))), columns, max_bad, weight, None, join)
    if path.is_dir():
        files = sorted(item.name for item in path.iterdir() if extension(item) in EXTENSIONS)
        raise DataError("a folder, not a file", where=str(source), hint=f"name one of its files: {', '.join(files[:5]) or 'it holds none'}")
    hint = did_you_mean_file(path, "check the path, or name a hub dataset as owner/name")
    raise DataError("no such file", where=str(source), hint=hint)


def rows_from(rows: Iterable[Mapping[str, Any]], *, columns: Columns | None = None, max_bad: int = 0, name: str = "rows") -> RowSource:
    """Rows from memory; the n-th is called `name:n`."""
    check_columns(columns or {})
    held = tuple(Row(Place(name, number), row) for number, row in enumerate(rows, start=1))
    return _source(name, lambda: chunked(held), columns, max_bad, 1.0, None, None)


def mix(sources: Sequence[RowSource], *, max_bad: int = 0) -> RowSource:
    """Several sources as one. Files of one name in different folders are called by folder and name."""
    parts = [part for source in sources for part in source.parts]
    names = Counter(part.name for part in parts)
    parts = [replace(part, name=f"{part.path.parent.name}/{part.name}") if names[part.name] > 1 and part.path else part for part in parts]
    double = next((name for name, count in Counter(part.name for part in parts).items() if count > 1), None)
    if double is not None:
        raise RecipeError(f"{double} is named twice", key="data.train", hint="name it once, with a weight of 2")
    return RowSource(tuple(parts), max_bad, notes=tuple(note for source in sources for note in source.notes))


class Reads(Protocol):
    """How the rows of a part are read: a `Part`, or what a helper process knows of one."""

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> Columns: ...
    @property
    def join(self) -> Join | None: ...


def rows_of(chunks: Iterable[Chunk], part: Reads, split: Split | None) -> Iterator[Row | Rejected]:
    """The rows of some chunks under the part's name, with joined columns and after its map, without those of the other side of a split."""
    for chunk in chunks:
        for item in chunk.rows():
            if item.place.file != part.name:
                item = replace(item, place=replace(item.place, file=part.name))
            if isinstance(item, Rejected):
                if split is None or not split.held_out:  # a row that cannot be read is counted once, with the training rows
                    yield item
            elif split is None or split.takes(item):
                yield _read(item, part)


def _read(row: Row, part: Reads) -> Row | Rejected:
    joined = row if part.join is None else part.join.apply(row)
    return joined if isinstance(joined, Rejected) else mapped(joined, part.columns)


def check_rejected(rejected: Sequence[Rejected], count: int, max_bad: int, *, so_far: bool = False) -> None:
    """Raises `DataError` naming the first rejected row when there are more than `max_bad`. `so_far`: more rows follow these."""
    if count > max_bad:
        first = rejected[0]
        rows = "1 row" if count == 1 else f"{count} rows"
        others = ", ".join(row.name for row in rejected[1:4])
        also = f"; also {others}{', …' if count > 4 else ''}" if others else ""
        allow = "see them all with `postgrad data check`" if so_far else f"allow them with data.max_bad: {count}"
        raise DataError(
            f"{first.reason} ({rows} rejected{' so far' if so_far else ''}, data.max_bad is {max_bad}{also})",
            where=first.name,
            hint=f"mend the rows, or {allow}",
        )


def two_formats(format: str, count: int, others: Mapping[str, int], first: str) -> DataError:
    """`others` are the other formats and how many rows each has, `first` names the first of these rows."""
    counts = " and ".join(f"{name} ({rows} rows)" for name, rows in {format: count, **others}.items())
    number = "two" if len(others) == 1 else str(len(others) + 1)
    return DataError(f"{number} formats in one file: {counts}", where=first, hint="split the file")


def _source(
    name: str,
    chunks: Callable[[], Iterator[Chunk]],
    columns: Columns | None,
    max_bad: int,
    weight: float,
    path: Path | None,
    join: Join | None,
) -> RowSource:
    """Looks at the first rows, to find the format."""
    chosen = columns or {}
    rows, rejected = _first_rows(chunks(), max_bad, join)
    if not rows:
        raise _empty(name, rejected)
    check_present(chosen, {column for row in rows for column in row.fields}, where=name)
    first = mapped(rows[0], chosen)
    format = detect(first.fields)
    if format is None:
        raise unknown(first)
    part = Part(name, chunks, chosen, format, weight, path.stat().st_size if path else 0, path, join)
    return RowSource((part,), max_bad, notes=() if join is None else (join.note,))


def _first_rows(chunks: Iterable[Chunk], max_bad: int, join: Join | None) -> tuple[list[Row], list[Rejected]]:
    """Those of the first chunks, about a megabyte; of as many more as it takes to find a row or too many that are none."""
    rows: list[Row] = []
    rejected: list[Rejected] = []
    for number, chunk in enumerate(chunks, start=1):
        items = [item if join is None or isinstance(item, Rejected) else join.apply(item) for item in chunk.rows()]
        rows += [item for item in items if isinstance(item, Row)]
        rejected += [item for item in items if isinstance(item, Rejected)]
        if (rows and number >= _LOOKED_AT) or (not rows and len(rejected) > max_bad):
            break
    return rows, rejected


_LOOKED_AT = 16


def _empty(name: str, rejected: Sequence[Rejected]) -> DataError:
    hint = "check that this is the right file"
    if not rejected:
        return DataError("the file holds no rows", where=name, hint=hint)
    none = f" (and none of the first {len(rejected)} rows can be read)" if len(rejected) > 1 else ""
    return DataError(f"{rejected[0].reason}{none}", where=rejected[0].name, hint=hint)
