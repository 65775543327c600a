"""Rows of a file, one by one, each with the line it starts on: `.jsonl`, `.json`, `.parquet`, `.csv`.

A row that cannot be read is a `Rejected` with its reason. A file that cannot be read raises `DataError`.
A UTF-8 byte order mark and CRLF line ends are accepted everywhere.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `name` is file:line (or file:number where a format has no lines)."""

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be used, and why."""

    name: str
    reason: str


def read_file(path: Path) -> Iterator[Row | Rejected]:
    """Rows in file order. Raises `DataError` when the file as a whole cannot be read."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"cannot read {path.suffix or 'a file without extension'}", where=str(path), hint=f"use {', '.join(_READERS)}")
    try:
        yield from reader(path)
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror or error}", where=str(path), hint="check the path") from error


def parse_json(text: str) -> Any:
    """A JSON value. Raises `ValueError`, also on NaN and Infinity (not JSON) and on lone surrogates (no text)."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _read_jsonl(path: Path) -> Iterator[Row | Rejected]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield _json_row(f"{path.name}:{number}", text)


def _json_row(name: str, line: bytes) -> Row | Rejected:
    try:
        value = parse_json(line.decode())
    except UnicodeDecodeError as error:
        return Rejected(name, f"not UTF-8 text (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        return Rejected(name, f"broken JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return Rejected(name, f"broken JSON: {error}")
    return _object(name, value)


def _object(name: str, value: Any) -> Row | Rejected:
    if isinstance(value, dict):
        return Row(name, value)
    return Rejected(name, f"a row is a JSON object, not {type(value).__name__}")


def _read_json(path: Path) -> Iterator[Row | Rejected]:
    """A JSON list of rows; each keeps the line it starts on. A file of JSON lines under this name is read as such."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text (byte {error.start})", where=str(path), hint="save the file as UTF-8") from error
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] == "{" and len(text[start:].strip().splitlines()) > 1 and _is_json(text[start:].splitlines()[0]):
        yield from _read_jsonl(path)
        return
    if text.strip() and text[start] != "[":
        raise DataError("expected a JSON list of rows", where=str(path), hint="wrap the rows in [...], or use .jsonl with one row per line")
    yield from _elements(path, text, start + 1)


def _elements(path: Path, text: str, position: int) -> Iterator[Row | Rejected]:
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    line, counted = 1, 0
    while (position := _skip(text, position, " \t\r\n")) < len(text) and text[position] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, end = decoder.raw_decode(text, position)
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            broken = error.lineno if isinstance(error, json.JSONDecodeError) else line
            message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(
                f"broken JSON: {message}", where=f"{path.name}:{broken}", hint="use .jsonl, where one bad row spoils only itself"
            ) from error
        yield _object(f"{path.name}:{line}", value)
        position = _skip(text, end, " \t\r\n")
        if text[position : position + 1] not in (",", "]"):
            where = f"{path.name}:{text.count(chr(10), 0, position) + 1}"
            raise DataError("broken JSON: expected , or ] after a row", where=where, hint="the file may be cut off")
        position += text[position] == ","


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _read_parquet(path: Path) -> Iterator[Row | Rejected]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for fields in batch.to_pylist():
                number += 1
                yield Row(f"{path.name}:{number}", fields)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"not a readable parquet file: {str(error).splitlines()[0]}", where=str(path), hint="the file may be cut off"
        ) from error


def _read_csv(path: Path) -> Iterator[Row | Rejected]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for fields in reader:
                name = f"{path.name}:{reader.line_num}"
                if None in fields or None in fields.values():
                    yield Rejected(name, f"the row has another number of cells than the header ({len(reader.fieldnames or ())})")
                else:
                    yield Row(name, fields)
        except csv.Error as error:
            raise DataError(f"broken CSV: {error}", where=f"{path.name}:{reader.line_num}", hint="check the quotes on this line") from error
        except UnicodeDecodeError as error:
            raise DataError("not UTF-8 text", where=f"{path.name}:{reader.line_num}", hint="save the file as UTF-8") from error


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}
EXTENSIONS = tuple(_READERS)
