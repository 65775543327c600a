"""What the chapters of `postgrad demo` share: its folder, its recipe, a reporter that is closed in the end, and how intervals are shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import resources
from pathlib import Path

from postgrad.cli.console import LiveReporter, PlainReporter, reporter
from postgrad.errors import RecipeError
from postgrad.train.recipe_file import LoadedRecipe, load_recipe
from postgrad.train.run_directory import lock
from postgrad.train.statistics import Interval

_OURS = ("task", "run", "evaluations")
"""What a chapter writes into its folder."""


def folder_of(name: str, run_dir: Path | None, *, quick: bool, overwrite: bool) -> Path:
    """Where the chapter writes; emptied when `overwrite` asks for it."""
    folder = run_dir or Path("runs") / (name + ("-quick" if quick else ""))
    if overwrite and folder.exists():
        _empty(folder)
    return folder


def _empty(folder: Path) -> None:
    """Raises `RecipeError`, removing nothing, for a folder with anything that no chapter wrote, or with a run that goes on."""
    if not folder.is_dir():
        raise RecipeError("--overwrite replaces a folder, and this is a file", where=str(folder), hint="choose another --run-dir")
    foreign = sorted(child.name for child in folder.iterdir() if child.name not in _OURS)
    if foreign:
        what = f"--overwrite would delete what no demo wrote: {', '.join(foreign[:5])}"
        raise RecipeError(what, where=str(folder), hint="move it away, or choose another --run-dir")
    run = folder / "run"
    with lock(run) if run.is_dir() else nullcontext():
        for child in folder.iterdir():
            shutil.rmtree(child)


def prepared(folder: Path, recipe: str, write: Callable[[Path], object], *, seed: int, overrides: Sequence[str]) -> LoadedRecipe:
    """The chapter's recipe, a file of the package postgrad.demo, in FOLDER/task. `write` puts the task's files beside it, once."""
    base = folder / "task"
    if not (base / "recipe.yaml").exists():
        write(base)
        shutil.copyfile(str(resources.files("postgrad.demo") / recipe), base / "recipe.yaml")
    return load_recipe(base / "recipe.yaml", [f"run_dir={json.dumps(str(folder / 'run'))}", f"seed={seed}", *overrides])


@contextmanager
def watching() -> Iterator[PlainReporter]:
    """The reporter for this terminal; closed whatever happens, or its live bar would stand in the way of what is printed next."""
    watcher = reporter()
    try:
        yield watcher
    finally:
        if isinstance(watcher, LiveReporter):
            watcher.close()


def percent(value: Interval) -> str:
    """A share with its 95 % interval: `34.2 [28.4, 40.5]`."""
    return f"{100 * value.mean:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def plain(value: Interval) -> str:
    return f"{value.mean:.2f} [{value.low:.2f}, {value.high:.2f}]"
