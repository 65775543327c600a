"""The table of shipped rewards in docs/rewards.md (`python -m postgrad.rewards.library.page`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from postgrad.rewards.base import call_form, declaration_of
from postgrad.rewards.library import LIBRARY


def table() -> str:
    """One line per reward, as the functions declare themselves."""
    lines = ["| `use:` | role | looks at | range | a higher value means | takes |", "|---|---|---|---|---|---|"]
    lines += [_line(name, function) for name, function in LIBRARY.items()]
    return "\n".join(lines) + "\n"


def _line(name: str, function: Callable[..., Any]) -> str:
    declared = declaration_of(function)
    assert declared is not None
    ends = "any" if declared.range is None else f"{declared.range[0]:g} … {declared.range[1]:g}"
    group = " (all rollouts of a prompt)" if declared.group else ""
    cells = [f"`{name}`", declared.role, f"{declared.scope}{group}", ends, declared.claim or "", _takes(function)]
    return f"| {' | '.join(cells)} |"


def _takes(function: Callable[..., Any]) -> str:
    """Columns and arguments by name, those with a default with it."""
    form, parameters = call_form(function), inspect.signature(function).parameters
    named = [parameters[name] for name in parameters if name in (*form.required, *form.optional)]
    return ", ".join(f"`{p.name}`" if p.default is p.empty else f"`{p.name}={p.default!r}`" for p in named)


if __name__ == "__main__":
    print(table(), end="")
