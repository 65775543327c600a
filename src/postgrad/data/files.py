"""Rows of a file, one by one, each with the line it starts on: `.jsonl`, `.json` (both also `.gz`), `.parquet`, `.csv`, `.arrow`.

A file is read in chunks that can be sent to another process and parsed there. A row that cannot be read is a
`Rejected` with its reason. A file that cannot be read raises `DataError`. A UTF-8 byte order mark and CRLF line ends are accepted.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from postgrad.errors import DataError, reason

CHUNK_BYTES = 1 << 16
CHUNK_ROWS = 100
"""A chunk's rows are read, printed and tokenised together; of this size, what that makes stays in a processor's cache."""
_BOM = b"\xef\xbb\xbf"
_BLANK = " \t\r\n"
_SURROGATE = "half a character (a lone surrogate)"


@dataclass(frozen=True, slots=True)
class Place:
    """`line` is the line a row starts on, or its number where a format has no lines; `item` tells rows of one line apart."""

    file: str
    line: int
    item: int = 0

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}" + (f"[{self.item}]" if self.item else "")


@dataclass(frozen=True, slots=True)
class Row:
    """One row as the file has it."""

    place: Place
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.place.name


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be used, and why."""

    place: Place
    reason: str

    @property
    def name(self) -> str:
        return self.place.name


class Chunk(Protocol):
    """Neighbouring rows of one file, not parsed yet. `done` is the share of the file that has been read with this chunk, 0 to 1."""

    @property
    def done(self) -> float: ...

    def rows(self) -> Iterator[Row | Rejected]: ...


@dataclass(frozen=True, slots=True)
class LineChunk:
    """Lines of JSON, the first of which is line `first` of the file."""

    file: str
    first: int
    lines: bytes
    done: float = 0.0

    def rows(self) -> Iterator[Row | Rejected]:
        for number, line in enumerate(self.lines.split(b"\n"), start=self.first):
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                yield _json_row(Place(self.file, number), text)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows that had to be parsed to be found."""

    parsed: tuple[Row | Rejected, ...]
    done: float = 0.0

    def rows(self) -> Iterator[Row | Rejected]:
        return iter(self.parsed)


def read_chunks(path: Path) -> Iterator[Chunk]:
    """The file's rows in order. Raises `DataError` when the file as a whole cannot be read."""
    reader = _READERS.get(extension(path))
    if reader is None:
        raise DataError(f"cannot read {path.suffix or 'a file without extension'}", where=str(path), hint=f"use {', '.join(_READERS)}")
    try:
        yield from reader(path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"not a readable gzip file: {error}", where=str(path), hint="the file may be cut off, or not compressed") from error
    except OSError as error:
        raise DataError(f"cannot read the file: {reason(error)}", where=str(path), hint="check the path") from error


def chunked(rows: Iterable[Row | Rejected]) -> Iterator[RowChunk]:
    stream = iter(rows)
    while part := tuple(islice(stream, CHUNK_ROWS)):
        yield RowChunk(part)


def extension(path: Path) -> str:
    """The part of the name that says the format: `.jsonl`, `.jsonl.gz`, …, in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])


def parse_json(text: str) -> Any:
    """A JSON value. Raises `ValueError`, also on NaN and Infinity (not JSON) and on lone surrogates (no text)."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not _is_text(value, text):
        raise ValueError(_SURROGATE)
    if "\\u0000" in text and _holds_nul(value):
        raise ValueError("a NUL character")
    return value


def _holds_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_nul(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return any(map(_holds_nul, value))
    return isinstance(value, str) and "\0" in value


def _is_text(value: Any, written: str) -> bool:
    """False when a string in it holds half a character (a lone surrogate), which only an escape can write."""
    if "\\u" not in written:
        return True
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)

# ---- JSON lines


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
    """The file's bytes, uncompressed, and a function that says which share of the file has been read."""
    size = max(path.stat().st_size, 1)
    with path.open("rb") as raw:
        if path.suffix.lower() != ".gz":
            yield raw, lambda: raw.tell() / size
            return
        with gzip.open(raw, "rb") as file:
            yield file, lambda: raw.tell() / size  # type: ignore[misc]


def _read_jsonl(path: Path) -> Iterator[Chunk]:
    with _opened(path) as (file, done):
        number = 1
        while block := file.read(CHUNK_BYTES):
            block += file.readline()
            yield LineChunk(path.name, number, block.removesuffix(b"\n"), done())
            number += block.count(b"\n")


def _json_row(place: Place, line: bytes) -> Row | Rejected:
    try:
        value = parse_json(line.decode())
    except UnicodeDecodeError as error:
        return Rejected(place, f"not UTF-8 text (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        return Rejected(place, f"broken JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return Rejected(place, f"broken JSON: {error}")
    return _object(place, value)


def _object(place: Place, value: Any) -> Row | Rejected:
    if isinstance(value, dict):
        return Row(place, value)
    return Rejected(place, f"a row is a JSON object, not {type(value).__name__}")


# ---- a JSON list


def _read_json(path: Path) -> Iterator[Chunk]:
    """A JSON list of rows; each keeps the line it starts on. A file of JSON lines under this name is read as such."""
    try:
        with _opened(path) as (file, _):
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text (byte {error.start})", where=str(path), hint="save the file as UTF-8") from error
    start = _skip(text, 0, _BLANK)
    first, _, rest = text[start:].partition("\n")
    if first.startswith("{") and rest.strip() and _is_json(first):
        yield from _read_jsonl(path)
        return
    if text.strip() and text[start] != "[":
        raise DataError("expected a JSON list of rows", where=str(path), hint="wrap the rows in [...], or use .jsonl with one row per line")
    yield from chunked(_elements(path, text, start + 1))


def _elements(path: Path, text: str, position: int) -> Iterator[Row | Rejected]:
    line, counted, item = 1, 0, -1
    while (position := _skip(text, position, _BLANK)) < len(text) and text[position] != "]":
        lines = text.count("\n", counted, position)
        line, counted, item = line + lines, position, 0 if lines else item + 1
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            broken = error.lineno if isinstance(error, json.JSONDecodeError) else line
            message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(
                f"broken JSON: {message}", where=f"{path.name}:{broken}", hint="use .jsonl, where one bad row spoils only itself"
            ) from error
        place = Place(path.name, line, item)
        yield _object(place, value) if _is_text(value, text[position:end]) else Rejected(place, f"broken JSON: {_SURROGATE}")
        position = _skip(text, end, _BLANK)
        if text[position : position + 1] not in (",", "]"):
            raise _broken_list(path, text, position, "expected , or ] after a row")
        position += text[position] == ","
    if text.strip() and position == len(text):
        raise _broken_list(path, text, position, "the list has no end")
    if (after := _skip(text, position + 1, _BLANK)) < len(text):
        raise _broken_list(path, text, after, "something follows the list, and would not be read")


def _broken_list(path: Path, text: str, position: int, what: str) -> DataError:
    where = f"{path.name}:{text.count(chr(10), 0, position) + 1}"
    return DataError(f"broken JSON: {what}", where=where, hint="the file may be cut off, or hold more than one list")


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


# ---- tables


def _read_parquet(path: Path) -> Iterator[Chunk]:
    import pyarrow.parquet

    with _arrow_errors(path, "parquet"):
        file = pyarrow.parquet.ParquetFile(path)
        yield from _batches(path, file.iter_batches(batch_size=CHUNK_ROWS), total=file.metadata.num_rows)


def _read_arrow(path: Path) -> Iterator[Chunk]:
    """An Arrow IPC file or, as `datasets` writes it, an IPC stream."""
    import pyarrow.ipc

    with _arrow_errors(path, "Arrow"), pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            yield from _batches(path, (file.get_batch(index) for index in range(file.num_record_batches)))
        else:
            source.seek(0)
            yield from _batches(path, pyarrow.ipc.open_stream(source))


def _batches(path: Path, batches: Iterable[Any], total: int = 0) -> Iterator[RowChunk]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            rows = batch.slice(start, CHUNK_ROWS).to_pylist()
            parsed = tuple(Row(Place(path.name, number + index), fields) for index, fields in enumerate(rows, start=1))
            number += len(rows)
            yield RowChunk(parsed, number / total if total else 0.0)


@contextmanager
def _arrow_errors(path: Path, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        what = f"not a readable {kind} file: {reason(error)}"
        raise DataError(what, where=str(path), hint="the file may be cut off") from error


def _read_csv(path: Path) -> Iterator[Chunk]:
    csv.field_size_limit(1 << 30)
    yield from chunked(_csv_rows(path))


def _csv_rows(path: Path) -> Iterator[Row | Rejected]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header: list[str] = []
            start = 1
            for cells in reader:
                place, start = Place(path.name, start), reader.line_num + 1
                if not header:
                    header = _csv_header(cells, place)
                elif cells and len(cells) != len(header):
                    yield Rejected(place, f"the row has {len(cells)} cells and the header {len(header)}")
                elif cells:
                    yield Row(place, dict(zip(header, cells, strict=True)))
        except csv.Error as error:
            raise DataError(f"broken CSV: {error}", where=f"{path.name}:{reader.line_num}", hint="check the quotes on this line") from error
        except UnicodeDecodeError as error:
            raise DataError("not UTF-8 text", where=f"{path.name}:{reader.line_num}", hint="save the file as UTF-8") from error


def _csv_header(cells: list[str], place: Place) -> list[str]:
    double = next((name for name in cells if cells.count(name) > 1), None)
    if double is not None:
        raise DataError(f"the header names the column {double!r} twice", where=place.name, hint="rename one of them")
    return cells


_READERS: dict[str, Callable[[Path], Iterator[Chunk]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".arrow": _read_arrow,
}
EXTENSIONS = tuple(_READERS)
