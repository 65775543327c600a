"""Tokenised rows in flat arrays: in memory, or in files that are read as they are needed.

A column is the concatenated values of all rows and where each row ends, so a million rows cost a few arrays and no Python objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]
Record = Mapping[str, Array]
"""One row: a 1-D array per column."""


class Table(Sequence[Record]):
    """Rows of named ragged columns. `columns[name]` is (values, ends): row i is values[ends[i - 1] : ends[i]]."""

    def __init__(self, columns: Mapping[str, tuple[Array, Array]]) -> None:
        self.columns = columns
        self._size = len(next(iter(columns.values()))[1])

    @classmethod
    def open(cls, folder: Path) -> Table:
        """A table that `TableWriter` wrote to a folder; values stay in the files until they are read."""
        names = json.loads((folder / "columns.json").read_text(encoding="utf-8"))
        return cls(
            {name: (_mapped(folder / f"{name}.bin", dtype), _mapped(folder / f"{name}.ends", "int64")) for name, dtype in names.items()}
        )

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        place = range(self._size)[index]
        return {name: values[ends[place - 1] if place else 0 : ends[place]] for name, (values, ends) in self.columns.items()}

    def lengths(self, name: str) -> Array:
        """Values per row in one column, [rows]."""
        return np.diff(self.columns[name][1], prepend=0)


class TableWriter:
    """Appends rows; `table` ends that. With a folder the values go to files there, so memory does not grow with the rows."""

    def __init__(self, columns: Mapping[str, str], folder: Path | None = None) -> None:
        self._dtypes = {name: np.dtype(dtype) for name, dtype in columns.items()}
        self._folder = folder
        self._values: dict[str, list[Array]] = {name: [] for name in columns}
        self._ends: dict[str, list[int]] = {name: [] for name in columns}
        self._total = dict.fromkeys(columns, 0)
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in columns} if folder else {}

    def extend(self, records: Sequence[Record]) -> None:
        for name, dtype in self._dtypes.items():
            arrays = [np.asarray(record[name], dtype=dtype) for record in records]
            for array in arrays:
                self._total[name] += len(array)
                self._ends[name].append(self._total[name])
            if name in self._files:
                self._files[name].write(b"".join(array.tobytes() for array in arrays))
            else:
                self._values[name] += arrays

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def table(self) -> Table:
        if self._folder is None:
            return Table(
                {name: (_joined(self._values[name], dtype), np.asarray(self._ends[name], np.int64)) for name, dtype in self._dtypes.items()}
            )
        for name, file in self._files.items():
            file.close()
            (self._folder / f"{name}.ends").write_bytes(np.asarray(self._ends[name], np.int64).tobytes())
        (self._folder / "columns.json").write_text(json.dumps({name: dtype.name for name, dtype in self._dtypes.items()}), encoding="utf-8")
        return Table.open(self._folder)


def _joined(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _mapped(path: Path, dtype: str) -> Array:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


class View(Sequence[T], Generic[T]):
    """The rows of a table as the objects that `read` makes of them, one at a time. Equal to any sequence of equal objects."""

    def __init__(self, table: Sequence[Record], read: Callable[[Record], T]) -> None:
        self._table, self._read = table, read

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return View(self._table[index], self._read)
        return self._read(self._table[index])

    def __iter__(self) -> Iterator[T]:
        return (self._read(record) for record in self._table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
