"""`postgrad replay`: the rollouts of a run, scored again by rewards that were changed since."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from postgrad.cli.console import stderr, stdout, table
from postgrad.errors import RecipeError, reason

if TYPE_CHECKING:
    from postgrad.train.replay import Replay, Values


def run_replay(path: Path, overrides: Sequence[str], *, out: Path | None, json_output: bool) -> None:
    from postgrad.train.replay import replay

    with nullcontext() if out is None else _written(out) as file:
        found = replay(path, overrides=overrides, out=file)
    if json_output:
        print(json.dumps(_plain(asdict(found)), ensure_ascii=False, indent=1))
        return
    _print(found)
    if out is not None:
        stderr.print(f"written to {out}; try: postgrad doctor {out}", markup=False)


@contextmanager
def _written(out: Path) -> Iterator[TextIO]:
    """A file to write into, which takes its place when the block has ended well. Raises `RecipeError` where it cannot be written."""
    unfinished = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        file = unfinished.open("w", encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"cannot be written: {reason(error)}", where=str(out), hint="choose another place with --out") from error
    try:
        with file:
            yield file
        if out.is_dir():
            raise RecipeError("cannot be written: it is a folder", where=str(out), hint="choose another place with --out")
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def _print(found: Replay) -> None:
    stdout.print(f"{found.rollouts} rollouts of steps {found.steps[0]}–{found.steps[-1]}, scored again", markup=False)
    rows = [_line(values) for values in (*found.rewards, found.total)]
    stdout.print(table("", ["reward", "mean then", "mean now", "other value %"], rows))
    if not math.isnan(found.flips):
        best = "–" if math.isnan(found.other_best) else f"{100 * found.other_best:.1f} %"
        stdout.print(
            f"advantages: {100 * found.flips:.1f} % change their sign, Kendall's τ within groups {found.tau:.2f}, "
            f"another best rollout in {best} of the groups with a signal",
            markup=False,
        )
    for failure in found.failures[:5]:
        stderr.print(str(failure), markup=False)
    if len(found.failures) > 5:
        stderr.print(f"… and {len(found.failures) - 5} more failures", markup=False)


def _line(values: Values) -> list[str]:
    shown = ["–" if math.isnan(value) else f"{value:.4g}" for value in (values.before, values.after)]
    return [values.name, *shown, f"{100 * values.changed:.1f}"]


def _plain(value: Any) -> Any:
    """NaN is null in JSON."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
