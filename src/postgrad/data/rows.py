"""Rows from a file, a hub dataset or memory, in one of the formats of `columns`, with the rejected ones counted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.data.columns import Columns, apply_columns, check_columns, detect
from postgrad.data.files import EXTENSIONS, Rejected, Row, read_file
from postgrad.data.hub import is_hub_id, read_hub
from postgrad.errors import DataError


@dataclass(frozen=True, slots=True)
class RowSet:
    """format: messages | prompt+completion | prompt. `rejected` rows could not be read; more than `max_bad` of them is an error."""

    source: str
    format: str
    rows: tuple[Row, ...]
    rejected: tuple[Rejected, ...] = ()
    max_bad: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows) + len(self.rejected)


def load_rows(source: str | Path, *, columns: Columns | None = None, max_bad: int = 0) -> RowSet:
    """Every row of a `.jsonl`, `.json`, `.parquet` or `.csv` file, or of a hub dataset (see `hub` for its name).

    Raises `DataError`: unreadable or empty file, more than `max_bad` rejected rows, unknown or mixed formats, missing columns;
    `RecipeError`: a `columns` map that means nothing.
    """
    check_columns(columns or {})
    path = Path(source)
    if path.is_file():
        return _collect(path.name, read_file(path), columns, max_bad)
    if not path.exists() and path.suffix.lower() not in EXTENSIONS and is_hub_id(str(source)):
        return _collect(str(source), read_hub(str(source)), columns, max_bad)
    if path.is_dir():
        files = sorted(item.name for item in path.iterdir() if item.suffix in EXTENSIONS)
        raise DataError("a folder, not a file", where=str(source), hint=f"name one of its files: {', '.join(files[:5]) or 'it holds none'}")
    raise DataError("no such file", where=str(source), hint=_near_files(path))


def rows_from(rows: Iterable[Mapping[str, Any]], *, columns: Columns | None = None, max_bad: int = 0, name: str = "rows") -> RowSet:
    """Rows from memory; the n-th is called `name:n`."""
    return _collect(name, (Row(f"{name}:{number}", row) for number, row in enumerate(rows, start=1)), columns, max_bad)


def check_rejected(rejected: Sequence[Rejected], max_bad: int) -> None:
    """Raises `DataError` naming the first rejected row when there are more than `max_bad`."""
    if len(rejected) > max_bad:
        first = rejected[0]
        count = "1 row" if len(rejected) == 1 else f"{len(rejected)} rows"
        others = ", ".join(row.name for row in rejected[1:4])
        also = f"; also {others}{', …' if len(rejected) > 4 else ''}" if others else ""
        raise DataError(
            f"{first.reason} ({count} rejected, data.max_bad is {max_bad}{also})",
            where=first.name,
            hint=f"mend the rows, or allow them with data.max_bad: {len(rejected)}",
        )


def _collect(source: str, items: Iterable[Row | Rejected], columns: Columns | None, max_bad: int) -> RowSet:
    rows: list[Row] = []
    rejected: list[Rejected] = []
    for item in items:
        if isinstance(item, Row):
            rows.append(item)
        else:
            rejected.append(item)
    check_rejected(rejected, max_bad)
    if not rows:
        what = f"all {len(rejected)} rows were rejected; the first: {rejected[0].reason}" if rejected else "the file holds no rows"
        raise DataError(what, where=rejected[0].name if rejected else source, hint="check that this is the right file")
    mapped = apply_columns(rows, columns or {})
    return RowSet(source, detect(mapped), mapped, tuple(rejected), max_bad)


def _near_files(path: Path) -> str:
    names = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / near[0]}?" if near else "check the path, or name a hub dataset as owner/name"
