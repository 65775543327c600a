"""Tokenised files kept on disk: found again while the rows, the tokenizer, the template, the settings and this code are the same."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

import numpy as np

import postgrad.chat
import postgrad.data
from postgrad.cache import build_once, cache_folder
from postgrad.chat import ChatFormat
from postgrad.data.sources import RowSource
from postgrad.data.table import Table
from postgrad.data.tally import Tally

MIN_BYTES = 4 << 20
"""Smaller files are tokenised in seconds; they are never written to the cache."""
DAYS = 30
"""Entries that nobody used for this long are removed."""


@dataclass(frozen=True, slots=True)
class Cache:
    """`folder` None = `data` in the cache folder of postgrad."""

    folder: Path | None = None
    min_bytes: int = MIN_BYTES

    def takes(self, source: RowSource) -> bool:
        """Whether the source is large, and made of files whose content can be compared."""
        return source.size >= self.min_bytes and all(part.path is not None for part in source.parts)

    def fetch(self, source: RowSource, method: str, encoder: Any, build: Callable[[Path], tuple[Table, Tally]]) -> tuple[Table, Tally]:
        """The table and tally that `build` wrote for this key, now or at an earlier time."""
        root = self.folder or cache_folder() / "data"

        def make(folder: Path) -> None:
            _, tally = build(folder)
            (folder / "tally.json").write_text(json.dumps(tally.to_json(), ensure_ascii=False), encoding="utf-8")
            np.save(folder / "prints.npy", tally.table_of_prints(), allow_pickle=False)

        folder = build_once(root / _key(source, method, encoder), make, verify=True)
        with suppress(OSError):  # a shared cache that only others may write is never cleared by us
            (folder / "tally.json").touch()
        _forget_old(root, keep=folder)
        prints = np.load(folder / "prints.npy", allow_pickle=False)
        return Table.open(folder), Tally.from_json(json.loads((folder / "tally.json").read_text(encoding="utf-8")), prints)


def _key(source: RowSource, method: str, encoder: Any) -> str:
    digest = hashlib.sha256()
    for part in source.parts:
        assert part.path is not None
        digest.update(file_sha256(part.path).encode())
        if part.join is not None:
            digest.update(f"{part.join.by} {file_sha256(part.join.path)}".encode())
    described = [method, _code(), _described(encoder), source.split, source.max_bad]
    described += [(part.name, sorted(part.columns.items()), part.format) for part in source.parts]
    digest.update(repr(described).encode())
    return digest.hexdigest()[:32]


def _described(value: Any) -> Any:
    """A text that is equal for equal settings, in every process."""
    if isinstance(value, ChatFormat):
        return value.fingerprint
    if is_dataclass(value) and not isinstance(value, type):
        return [(item.name, _described(getattr(value, item.name))) for item in fields(value)]
    return repr(value)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@once
def _code() -> str:
    """sha256 of the code that makes the tokens: another version of it never reads what this one wrote."""
    digest = hashlib.sha256()
    for path in _sources([*postgrad.data.__path__, *postgrad.chat.__path__]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(folders: Iterable[str]) -> list[Path]:
    return sorted(path for folder in folders for path in Path(folder).rglob("*.py"))


def _forget_old(root: Path, *, keep: Path) -> None:
    for used in root.glob("*/tally.json"):
        if used.parent != keep and time.time() - used.stat().st_mtime > DAYS * 86400:
            shutil.rmtree(used.parent, ignore_errors=True)
