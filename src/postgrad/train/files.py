"""Files that are absent or complete: temporary name, fsync, atomic rename. And the points where tests inject a crash."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any


def fault(point: str) -> None:
    """Kill this process with SIGKILL when the environment names this point (`POSTGRAD_FAULT=save:after_weights`); for tests."""
    if os.environ.get("POSTGRAD_FAULT") == point:
        os.kill(os.getpid(), signal.SIGKILL)


def write_text(path: Path, text: str) -> None:
    """Write a whole file atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN is refused, so what is written can be read by any JSON reader."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n")


def sync_folder(folder: Path) -> None:
    """fsync every file of a folder, then the folder itself, so that a later rename publishes complete files."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(folder)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_folder(temporary: Path, final: Path) -> None:
    """Give a finished, synced folder its name. `final` must not exist."""
    temporary.rename(final)
    _sync_directory(final.parent)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remedy(error: BaseException) -> str:
    """What to do about a file of a run that cannot be written; goes before "then resume"."""
    if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
        return "see that the run's folder is still there and may be written to"
    return "free some disk space"
