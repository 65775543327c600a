"""One tool: its options, what the model is told of it, and how it is called."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from postgrad.rollout.signature import Signature
from postgrad.types import ToolSpec

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__postgrad_tool__"


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


def options_of(function: Callable[..., Any]) -> ToolOptions:
    """What `@tool` set on a function or method."""
    options: ToolOptions = getattr(function, _MARK, ToolOptions())
    return options


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
class BoundTool:
    """A tool of one rollout. `lock` is shared by the tools of one environment instance: only one of them runs at a time."""

    tool: Tool
    function: Callable[..., Any]
    lock: threading.Lock | None = None
