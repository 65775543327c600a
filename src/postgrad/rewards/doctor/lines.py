"""JSON lines as they are found: gzipped or not, the last one perhaps cut by a crash."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from postgrad.errors import DataError, reason

Record = dict[str, Any]


def read_lines(path: Path) -> Iterator[tuple[str, Record]]:
    """(file:line, object). A last line that a crash cut is left out; anything else that is no JSON object raises `DataError`."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {reason(error)}", where=str(path), hint="the file is damaged or no text") from error
    ended = text.endswith("\n")
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not ended:
                return
            raise DataError(f"is no JSON: {error}", where=f"{path}:{number}", hint="one JSON object per line") from error
        if not isinstance(record, dict):
            raise DataError(f"is a JSON {type(record).__name__}, not an object", where=f"{path}:{number}", hint="one JSON object per line")
        yield where, record


class Tail:
    """What was appended to a file of JSON lines since the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0

    def new(self) -> list[Record]:
        """The complete lines since then; none while the file is absent. Starts again where the file has become shorter."""
        if not self.path.is_file():
            return []
        if self.path.stat().st_size < self._read:
            self._read = 0
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read += end
        return [json.loads(line) for line in data[:end].splitlines() if line.strip()]
