"""The cache folder, and how something is built in it: complete or not at all, once, even when two processes want it at the same time.

`$POSTGRAD_CACHE`, else the platform's cache folder (`~/.cache/postgrad`, `~/Library/Caches/postgrad`, `%LOCALAPPDATA%/postgrad`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from postgrad.errors import ModelError

_MANIFEST = "MANIFEST.json"


def cache_folder() -> Path:
    """Where converted models and tokenised data live. The folder may not exist yet."""
    if chosen := os.environ.get("POSTGRAD_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "postgrad"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "postgrad"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "postgrad"


def build_once(folder: Path, build: Callable[[Path], None], *, verify: bool = False) -> Path:
    """Return `folder`, made by `build(temporary folder)` if it is missing; with `verify` also if a file is not what was written.

    The temporary folder is renamed when `build` returns, so a folder of this name is always complete. A lock keeps a second
    process from doing the same work; where locks do not exist the first rename wins.
    """
    if _whole(folder, verify=verify):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(folder.name + ".lock")):
            if not _whole(folder, verify=verify):
                shutil.rmtree(folder, ignore_errors=True)
                _build(folder, build)
    except (OSError, SafetensorError) as error:
        where = f"cannot write the cache {folder.parent}: {error}"
        raise ModelError(where, hint="free some space there, or set POSTGRAD_CACHE to a folder that can be written") from error
    return folder


def _whole(folder: Path, *, verify: bool) -> bool:
    """Whether the folder is there, and with `verify` as its manifest says."""
    if not verify or not folder.is_dir():
        return folder.is_dir()
    try:
        manifest: dict[str, str] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all(_sha256(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def temporary_beside(folder: Path) -> Path:
    """A new empty folder on the same disk, so that renaming it to `folder` is atomic. Its permissions are those of any new folder."""
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    return temporary


def make_readable(folder: Path) -> None:
    """safetensors makes its files private to the user; give each file the permissions that the folder has."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    for stale in folder.parent.glob(f".{folder.name}.tmp-*"):  # left by a process that was killed; the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    temporary = temporary_beside(folder)
    try:
        build(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        (temporary / _MANIFEST).write_text(json.dumps({str(path.relative_to(temporary)): _sha256(path) for path in files}))
        make_readable(temporary)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # not merely a lost race
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """An exclusive lock between processes. It is released by the operating system when the holder dies."""
    try:
        import fcntl
    except ImportError:  # Windows: the rename still decides
        yield
        return
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
