"""Tools are typed Python functions; an environment is a class whose methods are tools and whose instance belongs to one rollout.

1. `@tool(...)`     optional: marks a function or method as terminal, gives it a deadline or another name.
2. `load_tools`     `file.py:function` or `file.py:Class` strings of a recipe → `Toolbox`; every fault is a `RecipeError`.
3. `Toolbox`        what the model is told (`specs`), and `reset_arguments`/`Environment.start` for the classes.
4. `ToolSession`    the tools of one rollout, with their own environment instances.

A tool runs in this process, in a thread: it can be abandoned at its deadline but not killed, and one that holds the interpreter
lock (a catastrophic regular expression) stops everything. Code that a model wrote belongs in a sandboxed subprocess.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

from postgrad.errors import DataError, RecipeError
from postgrad.rollout.load import load_attribute
from postgrad.rollout.signature import Signature, read_signature
from postgrad.types import Prompt, ToolSpec

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__postgrad_tool__"
_LIFECYCLE = ("reset", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """What `@tool` sets. `deadline_s` None takes the recipe's `tool_deadline_s`; `name` None the function's own."""

    terminal: bool = False
    deadline_s: float | None = None
    name: str | None = None


def tool(*, terminal: bool = False, deadline_s: float | None = None, name: str | None = None) -> Callable[[_Function], _Function]:
    """Set options of a tool. A successful call of a `terminal` tool ends the rollout (a "final answer" tool)."""
    if deadline_s is not None and deadline_s <= 0:
        raise ValueError(f"deadline_s is a positive number of seconds, got {deadline_s}")

    def mark(function: _Function) -> _Function:
        setattr(function, _MARK, ToolOptions(terminal=terminal, deadline_s=deadline_s, name=name))
        return function

    return mark


class DeadlineError(Exception):
    """An async tool was cancelled at its deadline."""


def call(function: Callable[..., Any], arguments: Mapping[str, Any], *, deadline_s: float | None = None) -> Any:
    """Call a function, and run what it returns to its end when that is awaitable, in an event loop of its own.

    An awaitable is cancelled at the deadline (`DeadlineError`); nothing inside the thread can stop a function that is not async.
    """
    value = function(**arguments)
    return asyncio.run(_bounded(value, deadline_s)) if inspect.isawaitable(value) else value


async def _bounded(value: Awaitable[Any], deadline_s: float | None) -> Any:
    try:
        async with asyncio.timeout(deadline_s) as scope:
            return await value
    except TimeoutError as error:
        if scope.expired():
            raise DeadlineError from error
        raise  # the tool's own


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: what the model is told, the validator, and what runs.

    `function` is called with keyword arguments, or, when `environment` is set, is a method looked up on that environment's instance.
    """

    spec: ToolSpec
    signature: Signature
    function: Callable[..., Any]
    options: ToolOptions = ToolOptions()
    environment: int | None = None

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, slots=True)
class Environment:
    """A class with state for one rollout. Its public methods are tools, except

    `reset(self, **columns)`, called before the first turn with the dataset columns it names; the text it returns, if any, is
    appended to the last user message; and `close(self)`, called when the rollout has ended, however it ended.
    """

    factory: Callable[[], Any]
    name: str

    def reset_arguments(self, prompt: Prompt) -> dict[str, Any]:
        """The dataset columns that `reset` asks for. Raises `DataError` when the row lacks one."""
        reset = getattr(self.factory, "reset", None)
        if reset is None:
            return {}
        parameters = list(inspect.signature(reset).parameters.values())[1:]
        if any(item.kind is item.VAR_KEYWORD for item in parameters):
            return dict(prompt.columns)
        names = [item.name for item in parameters]
        needed = [item.name for item in parameters if item.default is item.empty]
        if missing := [name for name in needed if name not in prompt.columns]:
            what = f"{self.name}.reset asks for column {missing[0]!r}, which this row lacks (it has: {', '.join(prompt.columns) or 'none'})"
            raise DataError(what, where=prompt.row, hint="add the column to the data or give the parameter a default")
        return {name: prompt.columns[name] for name in names if name in prompt.columns}


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool of one rollout. `lock` is shared by the tools of one environment instance: only one of them runs at a time."""

    tool: Tool
    function: Callable[..., Any]
    lock: threading.Lock | None = None


@dataclass(frozen=True, slots=True)
class ToolSession:
    """The tools of one rollout, by name. `instances` are its environments, `observation` what their resets returned."""

    tools: Mapping[str, BoundTool]
    instances: tuple[Any, ...] = ()
    observation: str = ""

    def close(self) -> None:
        """Close every environment; the first error is raised after all have been closed."""
        errors: list[BaseException] = []
        for instance in self.instances:
            try:
                call(getattr(instance, "close", lambda: None), {})
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]


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
        """Make and reset one rollout's environments. Runs user code: call it where it can be abandoned.

        What was made is closed again when a later constructor or reset raises.
        """
        session = ToolSession({}, ())
        observations: list[str] = []
        try:
            for environment, arguments in zip(self.environments, reset_arguments, strict=True):
                instance = environment.factory()
                session = ToolSession({}, (*session.instances, instance))
                observed = call(instance.reset, arguments) if hasattr(instance, "reset") else None
                observations += [_observation(observed, environment.name)] if observed is not None else []
        except BaseException:
            session.close()
            raise
        return ToolSession(self.bind(session.instances), session.instances, "\n".join(observations))

    def bind(self, instances: tuple[Any, ...]) -> dict[str, BoundTool]:
        locks = [threading.Lock() for _ in instances]
        return {
            name: BoundTool(item, item.function)
            if item.environment is None
            else BoundTool(item, MethodType(item.function, instances[item.environment]), locks[item.environment])
            for name, item in self.by_name.items()
        }


def _observation(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}.reset returns the first observation as text, or None; it returned {type(value).__name__}")
    return value


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
            tools += _environment_tools(item, len(environments), where=where)
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
    return Tool(item.spec, item.signature, item.function, item.options, item.environment + offset)


def _function_tool(function: Callable[..., Any], *, where: str) -> Tool:
    options: ToolOptions = getattr(function, _MARK, ToolOptions())
    name = options.name or str(getattr(function, "__name__", type(function).__name__))
    if name == "<lambda>":
        raise RecipeError("a lambda has no name, types or docstring", where=where, hint="write a function")
    spec, signature = read_signature(function, name=name, where=where)
    return Tool(spec, signature, function, options)


def _environment_tools(factory: type, index: int, *, where: str) -> list[Tool]:
    needed = [
        item.name
        for item in inspect.signature(factory).parameters.values()
        if item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    ]
    if needed:
        hint = "an environment is made without arguments; take dataset columns in `reset`"
        raise RecipeError(f"{factory.__name__} needs the argument `{needed[0]}`", where=where, hint=hint)
    methods = [
        method
        for name, method in inspect.getmembers(factory, inspect.isfunction)
        if not name.startswith("_") and name not in _LIFECYCLE and not isinstance(inspect.getattr_static(factory, name), staticmethod)
    ]
    if not methods:
        raise RecipeError(f"{factory.__name__} has no public method", where=where, hint="each public method of an environment is a tool")
    tools = []
    for method in methods:
        options: ToolOptions = getattr(method, _MARK, ToolOptions())
        spec, signature = read_signature(method, name=options.name or method.__name__, where=where, bound=True)
        tools.append(Tool(spec, signature, method, options, index))
    return tools
