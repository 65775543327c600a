"""Tools are typed Python functions; an environment is a class whose methods are tools and whose instance belongs to one rollout.

1. `declare`        `@tool(...)`, optional: what one tool may do.
2. `functions`      Python functions and classes as tools; `environments` for those with state; `isolated` for those in processes.
3. `mcp_tools`      the tools of an MCP server; `openapi` the operations of an HTTP API.
4. `load_tools`     the recipe's `tools:` → `Toolbox`; every fault is a `RecipeError`.
5. `Toolbox`        what the model is told (`specs`), and `open`, which begins the session of one rollout.

A function runs in this process, in a thread: it can be abandoned at its deadline but not killed, and one that holds the interpreter
lock (a catastrophic regular expression) stops everything, unless it is declared with `isolate: process`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MethodType, TracebackType
from typing import Any

from postgrad.errors import RecipeError, about
from postgrad.rollout.declare import BoundTool, Tool, ToolOptions, tool
from postgrad.rollout.environments import Environment, ToolSession, open_instances
from postgrad.rollout.functions import Made, from_object, renumbered
from postgrad.rollout.items import ToolItem
from postgrad.rollout.sources import make, read_items
from postgrad.types import ToolSpec

__all__ = ["BoundTool", "Environment", "Tool", "ToolOptions", "ToolSession", "Toolbox", "load_tools", "make_toolbox", "tool"]


@dataclass(frozen=True)
class Toolbox:
    """All tools of a run. An empty toolbox is plain GRPO: one turn of sampling.

    It may hold connections and processes: close it, or use it in a `with` block.
    """

    tools: tuple[Tool, ...] = ()
    environments: tuple[Environment, ...] = ()
    closers: tuple[Callable[[], None], ...] = field(default=(), repr=False)
    by_name: Mapping[str, Tool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_name = {item.name: item for item in self.tools}
        if len(by_name) < len(self.tools):
            names = [item.name for item in self.tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise RecipeError(f"two tools are called `{twice}`", key="tools", hint=_RENAME)
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

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over what the model is told of the tools."""
        told = [[item.name, item.description, item.parameters] for item in self.specs]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def open(self, reset_arguments: Sequence[Mapping[str, Any]]) -> ToolSession:
        """Make and reset one rollout's environments. Runs user code: call it where it can be abandoned."""
        session = open_instances(self.environments, reset_arguments)
        return replace(session, tools=self.bind(session.instances))

    def bind(self, instances: tuple[Any, ...]) -> dict[str, BoundTool]:
        locks = [threading.Lock() for _ in instances]

        def bound(item: Tool) -> BoundTool:
            if item.environment is None:
                return BoundTool(item, item.function)
            instance = instances[item.environment]
            return BoundTool(item, MethodType(item.function, instance), locks[item.environment], instance)

        return {name: bound(item) for name, item in self.by_name.items()}

    def close(self) -> None:
        """Let go of every connection and process, once; the first error is raised after all have been closed."""
        with ExitStack() as stack:
            for closer in self.closers:
                stack.callback(closer)

    def __enter__(self) -> Toolbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_RENAME = "rename one with @tool(name=...), or with mcp.prefix or openapi.prefix"


def make_toolbox(items: Iterable[Any], *, where: str = "tools") -> Toolbox:
    """A toolbox from Python functions, callable objects and environment classes.

    >>> def double(x: int) -> int:
    ...     "Twice a number."
    ...     return 2 * x
    >>> make_toolbox([double]).specs[0].parameters["properties"]
    {'x': {'type': 'integer'}}
    """
    return _together([from_object(item, where=where) for item in items])


def load_tools(
    items: Sequence[str | Mapping[str, Any] | ToolItem], base: Path, *, allow_unsafe_exec: bool = False, to_run: bool = True
) -> Toolbox:
    """The tools of a recipe. An item is a shipped tool's name, `file.py:name` (relative to `base`), `package.module:name`, or an entry with
    the keys of `ToolItem`.

    allow_unsafe_exec: whether code that the model writes may run where there is no sandbox.
    to_run:            False where only what the model is told of them is wanted: no sandbox is needed for that.

    Raises `RecipeError` before any model loads: for a file, function, document or environment variable that is not there or not fit, and
    for a server that does not answer, and for `python` where there is no sandbox. What was opened by then is closed again.
    """
    with ExitStack() as stack:
        made = []
        for index, item in enumerate(read_items(items)):
            with about(f"tools[{index}]"):
                made.append(make(item, base, allow_unsafe_exec=allow_unsafe_exec, to_run=to_run))
            stack.callback(made[-1].close)
        toolbox = _together(made)
        stack.pop_all()
    return toolbox


def _together(made: Sequence[Made]) -> Toolbox:
    tools: list[Tool] = []
    environments: list[Environment] = []
    for part in made:
        tools += renumbered(part, len(environments))
        environments += part.environments
    return Toolbox(tuple(tools), tuple(environments), tuple(part.close for part in made))
