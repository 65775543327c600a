"""Tools from Python: typed functions, callable objects and classes with state, given or named as `file.py:name`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from postgrad.errors import RecipeError
from postgrad.rollout.declare import Tool, options_of
from postgrad.rollout.environments import Environment, environment_tools
from postgrad.rollout.load import load_attribute
from postgrad.rollout.signature import read_signature


@dataclass(frozen=True, slots=True)
class Made:
    """Tools from one source, and the environments they belong to (numbered within `environments`).

    `close` lets go of what the source holds for the whole run: connections, processes.
    """

    tools: tuple[Tool, ...]
    environments: tuple[Environment, ...] = ()
    close: Callable[[], None] = lambda: None


def from_object(item: Any, *, where: str) -> Made:
    """The tools of a function, a callable object or an environment class. Raises `RecipeError` for anything else."""
    if inspect.isclass(item):
        return Made(tuple(environment_tools(item, 0, where=where)), (Environment(item, item.__name__),))
    if callable(item):
        return Made((function_tool(item, where=where),))
    raise RecipeError(f"a tool is a function or a class, not {type(item).__name__}", where=where)


def from_name(spec: str, base: Path) -> Made:
    """The tools of `file.py:name` (relative to `base`) or `package.module:name`.

    Raises `RecipeError` for a missing file, a file that cannot be imported (with the last frame of its own traceback), a name that is
    not there or not callable, and a function that lacks types or a docstring.
    """
    return from_object(_callable(load_attribute(spec, base), spec), where=spec)


def function_from_name(spec: str, base: Path) -> Tool:
    """The one tool of `file.py:name`, which is a function. Raises `RecipeError` as `from_name` does, and for a class."""
    item = _callable(load_attribute(spec, base), spec)
    if inspect.isclass(item):
        raise RecipeError(f"isolate is for functions, and {item.__name__} is a class", where=spec, hint="leave isolate out")
    return function_tool(item, where=spec)


def function_tool(function: Callable[..., Any], *, where: str) -> Tool:
    """A function or callable object as a tool. Raises `RecipeError` when it lacks a name, types or a docstring."""
    options = options_of(function)
    name = options.name or str(getattr(function, "__name__", type(function).__name__))
    if name == "<lambda>":
        raise RecipeError("a lambda has no name, types or docstring", where=where, hint="write a function")
    spec, signature = read_signature(function, name=name, where=where)
    return Tool(spec, signature, function, options)


def renumbered(made: Made, offset: int) -> tuple[Tool, ...]:
    """The tools, with their environments counted from `offset`."""
    return tuple(item if item.environment is None else replace(item, environment=item.environment + offset) for item in made.tools)


def _callable(item: Any, spec: str) -> Any:
    if callable(item):
        return item
    raise RecipeError(f"{spec} is not callable: it is {type(item).__name__}", where=spec, hint="name a function or an environment class")
