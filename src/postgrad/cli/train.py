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
    from postgrad.models.scalar import is_reward_model

    watcher = reporter()
    try:
        folder = train(watcher)
    finally:
        if isinstance(watcher, LiveReporter):
            watcher.close()
    stdout.print(str(folder), markup=False)
    command = "score" if is_reward_model(folder) else "chat"
    stderr.print(f'try it: postgrad {command} "{folder}"{" FILE" if command == "score" else ""}', markup=False)
