"""The run directory: what a run writes, and the lock that keeps a second process out.

recipe.yaml       the file as the user wrote it            resolved.json   every key with its value, and the recipe's folder
environment.json  versions, processor, threads             metrics.jsonl   one line per step
events.jsonl      everything else worth knowing, with time inputs.json     sha256 of data, rewards, tools, weights
rollouts/         step-000010.jsonl.gz, one line per group summary.json    written last: marks the run finished
journal/          what tools answered, until a checkpoint has the step
checkpoints/      see `checkpoint`                         model/          the result; of `pairs`: pairs.jsonl, heldout.jsonl
"""

from __future__ import annotations

import fcntl
import gzip
import json
import math
import os
import platform
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from postgrad.errors import RecipeError, RunError, reason
from postgrad.rollout.journal import FileJournal
from postgrad.train.checkpoint import clean_temporary
from postgrad.train.datasets import HELDOUT, PAIRS
from postgrad.train.files import remedy, write_bytes, write_json, write_text
from postgrad.train.recipe import Base, Pipeline

PACKAGES = ("postgrad", "torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy", "pydantic", "peft", "gguf")


class RunDirectory:
    """One run's folder. Open it with `open_run`, which holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = False

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def result(self) -> Path:
        """What a finished run is there for: its model, or its file of preference pairs."""
        return self.path / PAIRS if (self.path / PAIRS).is_file() else self.model

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    def event(self, event: str, /, **details: Any) -> None:
        """Append to events.jsonl: things that happened, for people and for the doctor."""
        self._append("events.jsonl", {"time": time.time(), "event": event, **details})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step to metrics.jsonl. A non-finite number is written as a string, so it is seen and stays valid JSON."""
        shown = {name: value if math.isfinite(value) else repr(float(value)) for name, value in metrics.items()}
        self._append("metrics.jsonl", {"step": step, **shown})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        except OSError as error:
            hint = f"{remedy(error)}, then resume"
            raise RunError(f"{name} cannot be written: {reason(error)}", where=str(self.path), hint=hint) from error

    def metrics(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "metrics.jsonl")

    def forget_after(self, step: int) -> None:
        """Drop metrics and rollouts of later steps: the resumed run writes them again."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            kept = [record for record in read_jsonl(path) if record["step"] <= step]
            write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
        for file in (self.path / "rollouts").glob("step-*.jsonl.gz"):
            if int(file.name.split(".")[0].removeprefix("step-")) > step:
                file.unlink()

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        folder = self.path / "rollouts"
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_bytes(folder / f"step-{step:06d}.jsonl.gz", gzip.compress(text.encode("utf-8"), compresslevel=5, mtime=0))

    def journal(self, step: int) -> FileJournal:
        """What tools answered in this step; for an evaluation after `n` steps the step is −1 − n, as it is for the sampler's noise."""
        name = f"step-{step:06d}" if step >= 0 else f"evaluation-{-1 - step:06d}"
        return FileJournal(self.path / "journal" / f"{name}.jsonl")

    def forget_journals(self, *, until: int) -> None:
        """Drop the journals of steps that are never done again: those up to the oldest checkpoint."""
        for file in (self.path / "journal").glob("*.jsonl"):
            if int(file.stem.rsplit("-", 1)[1]) <= until:
                file.unlink()

    def read_rollouts(self, step: int) -> list[dict[str, Any]]:
        """What `write_rollouts` wrote. Raises `RunError` when the file is not there any more, or not what was written."""
        file = self.path / "rollouts" / f"step-{step:06d}.jsonl.gz"
        try:
            text = gzip.decompress(file.read_bytes()).decode("utf-8")
            return [json.loads(line) for line in text.splitlines()]
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise RunError(f"the rollouts of step {step} cannot be read: {reason(error)}", where=str(file), hint="run it again") from error

    def check_inputs(self, kind: str, hashes: Mapping[str, str]) -> None:
        """Record what the run's numbers depend on, or refuse to continue with something that has changed since it started.

        `kind`: "files" (data, rewards, tools), or "loaded" (weights and chat format, known once they are loaded).
        """
        path = self.path / "inputs.json"
        recorded: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        before = recorded.get(kind)
        if before is None:
            write_json(path, recorded | {kind: dict(hashes)})
            return
        changed = sorted(name for name in before | dict(hashes) if before.get(name) != hashes.get(name))
        if changed:
            raise RecipeError(
                f"changed since this run started: {', '.join(changed)}",
                where=str(self.path),
                hint="restore what it was, choose another run_dir, or start again with --overwrite",
            )

    def begin(self) -> None:
        """Everything is loaded and the first step can come: the run stays, and the one it replaces goes."""
        self.began = True
        shutil.rmtree(self.path / REPLACED, ignore_errors=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)
        shutil.rmtree(self.path / "journal", ignore_errors=True)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Records of a .jsonl file; a last line that was cut by a crash is left out."""
    if not path.exists():
        return []
    records = []
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise
    return records


def resolved(recipe: Base | Pipeline, base: Path) -> dict[str, Any]:
    """Every key of the recipe with its value, and the folder its relative paths start from."""
    return {"base": str(base.resolve()), "recipe": recipe.model_dump(mode="json")}


@contextmanager
def open_run(recipe: Base, base: Path, *, source_text: str, overwrite: bool = False) -> Iterator[RunDirectory]:
    """Create the run's folder, or open it again when it holds the same recipe. Holds the lock until the block ends.

    Raises `RecipeError` when it holds another recipe (naming the keys that differ) or another process is running in it.
    """
    with _open(recipe, base, source_text=source_text, overwrite=overwrite) as run:
        clean_temporary(run.checkpoints)
        if not (run.path / "environment.json").exists():
            write_json(run.path / "environment.json", environment())
        yield run


@contextmanager
def open_pipeline(pipeline: Pipeline, base: Path, *, source_text: str, overwrite: bool = False) -> Iterator[RunDirectory]:
    """The folder above the stages' own: the recipe as a whole, and a lock."""
    with _open(pipeline, base, source_text=source_text, overwrite=overwrite) as run:
        yield run


@contextmanager
def _open(recipe: Base | Pipeline, base: Path, *, source_text: str, overwrite: bool) -> Iterator[RunDirectory]:
    path = Path(recipe.run_dir)
    _refuse_place(path, base)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            f"run_dir cannot be created: {reason(error)}", where=str(path), hint="set run_dir to a folder you may write to"
        ) from error
    with lock(path):
        run, new = RunDirectory(path), resolved(recipe, base)
        _restore(path)  # of a start that was killed
        if overwrite:
            _set_aside(path)
        _refuse_other_recipe(run, new)
        clean_temporary(path)
        for left in path.glob(".model.tmp-*"):  # of an export that was killed
            shutil.rmtree(left, ignore_errors=True)
        fresh = not (path / "resolved.json").exists()
        try:
            if fresh:
                write_text(path / "recipe.yaml", source_text)
                write_json(path / "resolved.json", new)
            yield run
        except BaseException:
            if fresh and not run.began:  # refused before its first step: what would be in the way of the mended recipe goes
                _remove_all(path)
            _restore(path)
            raise


REPLACED = ".replaced"
"""Where an old run waits until the new one is built: a recipe that cannot start costs nothing."""
_OURS = frozenset({
    "recipe.yaml", "resolved.json", "environment.json", "inputs.json", "metrics.jsonl", "events.jsonl", "summary.json", "rollouts",
    "journal", "checkpoints", "model", "ablation", PAIRS, HELDOUT, "report.html", "doctor.json", "plots",
})  # fmt: skip


def _refuse_place(path: Path, base: Path) -> None:
    """A run directory is a folder of its own."""
    here = path.resolve()
    if here == Path.cwd().resolve() or base.resolve().is_relative_to(here):
        what = "run_dir is the working directory or holds the recipe; it must be a folder of its own"
        raise RecipeError(what, where=str(path), key="run_dir", hint="e.g. run_dir: runs/NAME")


def _set_aside(path: Path) -> None:
    """Move what a run wrote out of the way. Refuses a folder with anything else in it, or one that is no run."""
    entries = [child for child in path.iterdir() if child.name != ".lock"]
    if not entries:
        return
    stages: set[str] = set()
    try:
        record = json.loads((path / "resolved.json").read_text(encoding="utf-8"))["recipe"]
        stages = set(record.get("stages") or {})
    except (OSError, ValueError, KeyError, AttributeError):
        raise RecipeError("--overwrite replaces runs, and this folder is none", where=str(path), hint="choose another run_dir") from None
    foreign = sorted(child.name for child in entries if child.name not in _OURS | stages and not child.name.startswith("."))
    if foreign:
        what = f"--overwrite would delete files that no run wrote: {', '.join(foreign[:5])}"
        raise RecipeError(what, where=str(path), hint="move them away, or choose another run_dir")
    (path / REPLACED).mkdir()
    for child in entries:
        child.rename(path / REPLACED / child.name)


def _remove_all(path: Path) -> None:
    """Everything in a folder that is ours alone."""
    for child in path.iterdir():
        if child.name not in (".lock", REPLACED):
            shutil.rmtree(child) if child.is_dir() else child.unlink()


def _restore(path: Path) -> None:
    """Put a run that was set aside back in its place."""
    aside = path / REPLACED
    if not aside.is_dir():
        return
    _remove_all(path)
    for child in aside.iterdir():
        child.rename(path / child.name)
    aside.rmdir()


def _refuse_other_recipe(run: RunDirectory, new: dict[str, Any]) -> None:
    path = run.path / "resolved.json"
    if not path.exists():
        return
    old = json.loads(path.read_text(encoding="utf-8"))
    before, after = _settings(old["recipe"]), _settings(new["recipe"])
    changed = [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in sorted(before | after) if before.get(key) != after.get(key)]
    if changed:
        shown = "; ".join(changed[:6]) + (f"; and {len(changed) - 6} more" if len(changed) > 6 else "")
        raise RecipeError(
            f"run_dir holds a run with another recipe ({shown})",
            where=str(run.path),
            hint=f"choose another run_dir, continue the old run with `postgrad resume {run.path}`, or replace it with --overwrite",
        )


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """What decides the numbers: every key but the folder's own name, and other stages by their place beside it: a run may be moved."""
    beside = f"{Path(recipe.get('run_dir', '')).parent}/"
    settings = {key: value for key, value in _flat(recipe).items() if key.split(".")[-1] != "run_dir"}
    return {key: value.removeprefix(beside) if isinstance(value, str) else value for key, value in settings.items()}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, list) and value:
        value = dict(enumerate(value))
    if isinstance(value, dict):
        items = ((f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items())
        return {key: leaf for name, item in items for key, leaf in _flat(item, name).items()}
    return {prefix: value}


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder. Raises `RecipeError` when one is in it.

    The kernel drops the lock when the process dies, so a killed run never leaves a stale one.
    """
    try:
        opened = (path / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"run_dir cannot be written: {reason(error)}", where=str(path), hint="set run_dir to a folder you may write to"
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise RecipeError(f"this run is in use by {owner}", where=str(path), hint="wait for it, or choose another run_dir") from error
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def environment() -> dict[str, Any]:
    """Versions and machine facts that a result depends on. No environment variables: they may hold secrets."""
    import torch

    from postgrad.models.products import onednn_is_faster

    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": sys.version.split()[0], "platform": platform.platform(), "processor": platform.machine(), "versions": versions,
        "threads": torch.get_num_threads(), "cuda": torch.cuda.is_available(),
        "cpu_fp32_products": "onednn" if onednn_is_faster() else "pytorch",
    }  # fmt: skip
