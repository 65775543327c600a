"""Tools are typed Python functions; an environment is a class whose methods are tools and whose instance belongs to one rollout.

1. `declare`        `@tool(...)`, optional: marks a function or method as terminal, gives it a deadline or another name.
2. `environments`   classes with state for one rollout, and `ToolSession`, the tools of one rollout.
3. `load_tools`     `file.py:function` or `file.py:Class` strings of a recipe → `Toolbox`; every fault is a `RecipeError`.
4. `Toolbox`        what the model is told (`specs`), and `open`, which begins the session of one rollout.

A tool runs in this process, in a thread: it can be abandoned at its deadline but not killed, and one that holds the interpreter
lock (a catastrophic regular expression) stops everything. Code that a model wrote belongs in a sandboxed subprocess.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any

from postgrad.errors import RecipeError
from postgrad.rollout.declare import BoundTool, DeadlineError, Tool, ToolOptions, call, options_of, tool
from postgrad.rollout.environments import Environment, ToolSession, environment_tools, open_instances
from postgrad.rollout.load import load_attribute
from postgrad.rollout.signature import read_signature
from postgrad.types import ToolSpec

__all__ = [
    "BoundTool",
    "DeadlineError",
    "Environment",
    "Tool",
    "ToolOptions",
    "ToolSession",
    "Toolbox",
    "call",
    "load_tools",
    "make_toolbox",
    "tool",
]


@dataclass(frozen=True)
class Toolbox:
    """All tools of a run. An empty toolbox is plain GRPO: one turn of sampling."""

    tools: tuple[Tool, ...] = ()
    environments: tuple[Environment, ...] = ()
    by_name: Mapping[str, Tool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_name = {item.name: item for item in self.tools}
        if len(by_name) < len(self.tools):
            names = [item.name for item in self.tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise RecipeError(f"two tools are called `{twice}`", where="tools", hint="rename one with @tool(name=...)")
        object.__setattr__(self, "by_name", by_name)

    def __len__(self) -> int:
        return len(self.tools)

    @cached_property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(item.spec for item in self.tools)

    @cached_property
    def terminal(self) -> frozenset[str]:
        """Names of the tools whose success ends a rollout."""
        return frozenset(item.name for item in self.tools if item.options.terminal)

    def open(self, reset_arguments: Sequence[Mapping[str, Any]]) -> ToolSession:
        """Make and reset one rollout's environments. Runs user code: call it where it can be abandoned."""
        session = open_instances(self.environments, reset_arguments)
        return replace(session, tools=self.bind(session.instances))

    def bind(self, instances: tuple[Any, ...]) -> dict[str, BoundTool]:
        locks = [threading.Lock() for _ in instances]
        return {
            name: BoundTool(item, item.function)
            if item.environment is None
            else BoundTool(item, MethodType(item.function, instances[item.environment]), locks[item.environment])
            for name, item in self.by_name.items()
        }


def make_toolbox(items: Iterable[Any], *, where: str = "tools") -> Toolbox:
    """A toolbox from Python functions, callable objects and environment classes.

    >>> def double(x: int) -> int:
    ...     "Twice a number."
    ...     return 2 * x
    >>> make_toolbox([double]).specs[0].parameters["properties"]
    {'x': {'type': 'integer'}}
    """
    tools: list[Tool] = []
    environments: list[Environment] = []
    for item in items:
        if inspect.isclass(item):
            tools += environment_tools(item, len(environments), where=where)
            environments.append(Environment(item, item.__name__))
        elif callable(item):
            tools.append(_function_tool(item, where=where))
        else:
            raise RecipeError(f"a tool is a function or a class, not {type(item).__name__}", where=where)
    return Toolbox(tuple(tools), tuple(environments))


def load_tools(specs: Sequence[str], base: Path) -> Toolbox:
    """The tools of a recipe: `file.py:name` (relative to `base`) or `package.module:name`, functions or environment classes.

    Raises `RecipeError`, before any model loads, for a missing file, a file that cannot be imported (with the last frame of its own
    traceback), a name that is not there or not callable, and a function that lacks types or a docstring.
    """
    loaded = [(spec, load_attribute(spec, base)) for spec in specs]
    boxes = [make_toolbox([_callable(item, spec)], where=spec) for spec, item in loaded]
    tools: list[Tool] = []
    environments: list[Environment] = []
    for box in boxes:
        offset = len(environments)
        tools += [_moved(item, offset) for item in box.tools]
        environments += box.environments
    return Toolbox(tuple(tools), tuple(environments))


def _callable(item: Any, spec: str) -> Any:
    if callable(item):
        return item
    raise RecipeError(f"{spec} is not callable: it is {type(item).__name__}", where=spec, hint="name a function or an environment class")


def _moved(item: Tool, offset: int) -> Tool:
    if item.environment is None:
        return item
    return replace(item, environment=item.environment + offset)


def _function_tool(function: Callable[..., Any], *, where: str) -> Tool:
    options = options_of(function)
    name = options.name or str(getattr(function, "__name__", type(function).__name__))
    if name == "<lambda>":
        raise RecipeError("a lambda has no name, types or docstring", where=where, hint="write a function")
    spec, signature = read_signature(function, name=name, where=where)
    return Tool(spec, signature, function, options)
