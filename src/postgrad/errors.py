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

import os
from collections.abc import Iterator
from contextlib import contextmanager


class PostgradError(Exception):
    """`what` happened, `where` (file:line, row, option), the `key` of the recipe that asks for it, and one `hint` that says what to do.

    `line` is where that key stands (`recipe.yaml:12`); `LoadedRecipe.placing` fills it in.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, key: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.key = key
        self.line: str | None = None
        self.hint = hint

    @property
    def place(self) -> str:
        """From the recipe to the cause."""
        return ": ".join(part for part in (self.line, self.key, self.where) if part)

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" if self.place else self.what


def reason(error: Exception) -> str:
    """What an error of a library or the system says, in one line, without the number and the path that Python adds to it."""
    if isinstance(error, OSError) and error.errno:  # not its `strerror`: libraries put whole sentences there
        return os.strerror(error.errno).lower()
    return next(iter(str(error).strip().splitlines()), repr(error))


@contextmanager
def about(key: str) -> Iterator[None]:
    """Errors in the block are about this key of the recipe, or about the key below it that they name."""
    try:
        yield
    except PostgradError as error:
        error.key = f"{key}.{error.key}" if error.key else key
        raise


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
