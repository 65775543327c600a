"""Columns from another file: benchmarks keep their answers apart, in rows that share a column with the questions (`id`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from postgrad.data.files import Rejected, Row, read_chunks
from postgrad.errors import DataError
from postgrad.suggest import did_you_mean, did_you_mean_file

Table = Mapping[str | int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Join:
    """To each row the columns of the row of `path` that has the same value in the column `by`."""

    path: Path
    by: str

    @property
    def note(self) -> str:
        return f"each row has the columns of the row of {self.path.name} with the same {self.by}"

    def apply(self, row: Row) -> Row | Rejected:
        """The row with its new columns, or why it has none."""
        key = _key(row, self.by)
        if key is None:
            return Rejected(row.place, f"the row has no {self.by!r} to find its columns in {self.path.name} by")
        found = self.table().get(key)
        if found is None:
            return Rejected(row.place, f"{self.path.name} has no row with {self.by} = {key!r}")
        differs = next((name for name, value in found.items() if name in row.fields and row.fields[name] != value), None)
        if differs is not None:
            return Rejected(row.place, f"the column {differs!r} has another value in {self.path.name}")
        return Row(row.place, {**row.fields, **found})

    def table(self) -> Table:
        """The rows of the file by their value of `by`. Read once per process.

        Raises `DataError`: no such file, a row that cannot be read or has no value there, or two rows with one value.
        """
        try:
            changed = self.path.stat().st_mtime_ns
        except OSError as error:
            hint = did_you_mean_file(self.path, "check data.join.file")
            raise DataError("no such file", where=str(self.path), hint=hint) from error
        return _table(self.path, self.by, changed)


@lru_cache(maxsize=4)
def _table(path: Path, by: str, changed: int) -> Table:
    table: dict[str | int, Mapping[str, Any]] = {}
    for chunk in read_chunks(path):
        for item in chunk.rows():
            if isinstance(item, Rejected):
                raise DataError(item.reason, where=item.name, hint="mend the row: without it, a question has no answer")
            key = _key(item, by)
            if key is None:
                hint = did_you_mean(by, item.fields, "check data.join.by")
                raise DataError(f"the row has no {by!r}, a text or whole number", where=item.name, hint=hint)
            if key in table:
                raise DataError(f"a second row has {by} = {key!r}", where=item.name, hint="keep one of them")
            table[key] = item.fields
    return table


def _key(row: Row, by: str) -> str | int | None:
    value = row.fields.get(by)
    return value if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None
