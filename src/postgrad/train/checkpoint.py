"""Checkpoints: a folder is absent or complete, and the newest that verifies is the one a run resumes from.

1. `save` writes into a temporary folder, fsyncs, writes MANIFEST.json (size and sha256 of every file) last, renames.
2. `verify` compares a folder with its manifest; files that the manifest does not name are never opened.
3. `newest` walks back from the newest folder, naming each one that does not verify.
4. `rotate` keeps the newest K and never removes the last one that verifies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from postgrad.errors import CheckpointError, RunError, reason
from postgrad.train.files import fault, publish_folder, remedy, sha256, sync_folder, write_json

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-\d+")


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def save(root: Path, step: int, write: Callable[[Path], None], *, keep: int) -> Path:
    """Save step `step`: `write(folder)` puts the files there. Returns the folder.

    Raises `RunError` naming the last good checkpoint when the disk refuses; nothing older is touched.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = folder_of(root, step)
    temporary = root / f".tmp-{os.getpid()}-{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        fault("save:after_weights")
        sync_folder(temporary)
        fault("save:before_manifest")
        write_json(temporary / MANIFEST, _manifest(temporary))
        sync_folder(temporary)
        fault("save:after_manifest")
        if final.exists():  # a run that was resumed from an older checkpoint reaches the same step again
            shutil.rmtree(final)
        publish_folder(temporary, final)
        fault("save:after_rename")
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk with an error of its own
        shutil.rmtree(temporary, ignore_errors=True)
        good = newest(root).folder
        raise RunError(
            f"the checkpoint of step {step} cannot be written: {reason(error)}",
            where=str(root),
            hint=f"{remedy(error)}, then resume; the last good checkpoint is {good.name if good else 'none'}",
        ) from error
    rotate(root, keep=keep)
    return final


def _manifest(folder: Path) -> dict[str, dict[str, object]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}


def verify(folder: Path) -> str | None:
    """None when every file is as the manifest says, else the first reason why not."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no MANIFEST.json (the save did not finish)"
    except (OSError, ValueError) as error:
        return f"MANIFEST.json cannot be read: {reason(error)}"
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
        if sha256(path) != expected["sha256"]:
            return f"{name} does not match its sha256"
    return None


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest checkpoint that verifies (None if there is none), and why each newer one was skipped."""

    folder: Path | None
    skipped: tuple[str, ...]

    @property
    def step(self) -> int:
        return int(self.folder.name.removeprefix("step-")) if self.folder else 0


def _folders(root: Path) -> list[Path]:
    """The newest first, by step. Folders of any other name (a copy that somebody keeps) are not ours."""
    found = [path for path in root.glob("step-*") if path.is_dir() and _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def oldest_step(root: Path) -> int:
    """How far back a run can go: the step of the oldest checkpoint, 0 without any."""
    folders = _folders(root)
    return int(folders[-1].name.removeprefix("step-")) if folders else 0


def newest(root: Path) -> Newest:
    skipped: list[str] = []
    for folder in _folders(root):
        reason = verify(folder)
        if reason is None:
            return Newest(folder, tuple(skipped))
        skipped.append(f"{folder.name}: {reason}")
    return Newest(None, tuple(skipped))


def require_newest(root: Path) -> Newest:
    """As `newest`, but a `CheckpointError` listing the reasons when folders exist and none verifies."""
    found = newest(root)
    if found.folder is None and found.skipped:
        raise CheckpointError(
            "no checkpoint verifies: " + "; ".join(found.skipped), where=str(root), hint="start the run again with --overwrite"
        )
    return found


def rotate(root: Path, *, keep: int) -> None:
    """Remove all but the newest `keep`, unless none of those verifies: then the newest verified one stays as well."""
    folders = _folders(root)
    kept, old = folders[:keep], folders[keep:]
    if old and all(verify(folder) is not None for folder in kept):
        safe = next((folder for folder in old if verify(folder) is None), None)
        old = [folder for folder in old if folder != safe]
    for folder in old:
        shutil.rmtree(folder)


def clean_temporary(root: Path) -> list[str]:
    """Remove what a killed save left behind; returns the names."""
    leftovers = sorted(root.glob(".tmp-*")) if root.is_dir() else []
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [path.name for path in leftovers]
