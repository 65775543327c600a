"""Hints: what a name that is not known, or a file that is not there, was most likely meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was most likely meant to be; None where none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The nearest known name, or `otherwise` where none is like it."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else otherwise


def did_you_mean_file(path: Path, otherwise: str) -> str:
    """The nearest file beside one that is not there. Names are compared without what follows their first dot: two that share no more than
    `.jsonl` are not alike. Of those that are alike one of the same kind is preferred."""
    try:
        there = [] if path.exists() else [item.name for item in sorted(path.parent.iterdir()) if item.is_file()]
    except OSError:
        return otherwise
    stems = {_stem(name): name for name in (*there, *(name for name in there if Path(name).suffix == path.suffix))}
    near = nearest(_stem(path.name), stems)
    return f"did you mean {path.parent / stems[near]}?" if near else otherwise


def _stem(name: str) -> str:
    return name[: name.find(".", 1)] if "." in name[1:] else name
