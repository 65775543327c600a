"""Every error a user can cause, and the exit code each ends with.

    PostgradError                     what, where, why, and a hint
    ├── RunError          exit 1      a fault inside a run (non-finite loss, a reward that must stop the run, disk full)
    ├── RecipeError       exit 2      usage: recipe key, command-line argument, tool or reward file
    ├── DataError         exit 3      a data file or its rows
    ├── CheckFailed       exit 4      a check found something critical
    ├── ModelError        exit 5      a model that cannot be read
    │   └── CheckpointError           a checkpoint that cannot be read or does not verify
    └── Interrupted       exit 130/143 stopped by SIGINT or SIGTERM after a clean save

Anything else that escapes is a bug in postgrad and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class PostgradError(Exception):
    """`what` happened, `where` (file:line, row, recipe key), and one `hint` that says what to do."""

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class RunError(PostgradError):
    exit_code = 1


class RecipeError(PostgradError):
    exit_code = 2


class DataError(PostgradError):
    exit_code = 3


class CheckFailed(PostgradError):
    exit_code = 4


class ModelError(PostgradError):
    exit_code = 5


class CheckpointError(ModelError):
    pass


class Interrupted(PostgradError):
    """Raised after the run was saved; `exit_code` is 128 + the signal number."""

    def __init__(self, what: str, *, signal: int, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.exit_code = 128 + signal


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was most likely meant to be; None where none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint: the nearest known name, or `otherwise` where none is like it."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else otherwise


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """In words, without the number and the path that Python puts there."""
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


def did_you_mean_file(path: Path, otherwise: str) -> str:
    """The same for a file that is not there. Its stem is compared: two names that share no more than `.jsonl` are not alike."""
    there = {item.stem: item for item in path.parent.iterdir()} if path.parent.is_dir() else {}
    near = nearest(path.stem, there)
    return f"did you mean {there[near]}?" if near else otherwise
