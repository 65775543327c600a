"""`postgrad train` and `postgrad resume`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from postgrad.cli.console import LiveReporter, PlainReporter, reporter, stderr, stdout
from postgrad.train.recipe_file import load_recipe


def run_train(path: Path, overrides: Sequence[str], *, dry_run: bool, overwrite: bool) -> None:
    loaded = load_recipe(path, overrides)  # everything wrong with the recipe is said before torch is imported
    if dry_run:
        from postgrad.cli.dry_run import run_dry

        run_dry(loaded)
        return
    from postgrad.train.run import run

    _reported(lambda watcher: run(loaded, watcher, overwrite=overwrite))


def run_resume(path: Path) -> None:
    from postgrad.train.run import resume

    _reported(lambda watcher: resume(path, watcher))


def _reported(train: Callable[[PlainReporter], Path]) -> None:
    watcher = reporter()
    try:
        folder = train(watcher)
    finally:
        if isinstance(watcher, LiveReporter):
            watcher.close()
    stdout.print(str(folder), markup=False)
    stderr.print(f"try it: postgrad {_next(folder)}", markup=False)


def _next(result: Path) -> str:
    from postgrad.models.scalar import is_reward_model

    if result.is_file():
        return f'data show "{result}"'
    return f'score "{result}" FILE' if is_reward_model(result) else f'chat "{result}"'
