"""One tool: its options, what the model is told of it, and how it is called."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from postgrad.rollout.deadline import DeadlineError
from postgrad.rollout.signature import Arguments
from postgrad.types import ToolSpec

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__postgrad_tool__"
_NAME = r"[^\s<>{}\[\]()|｜\"'`,;]+"
"""Of a tool: what every way of writing calls can write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """What `@tool` sets, or the recipe in its place. None leaves it to the recipe's `rollout`; `name` None is the function's own.

    terminal:          a successful call ends the rollout (a "final answer" tool).
    deadline_s:        seconds one call may take.
    max_output_tokens: tokens of one result.
    max_calls:         calls of this tool that one rollout may make.
    idempotent:        calling it twice with the same arguments does what calling it once does.
    retry:             how often a failed call is made again, within its deadline; only where `idempotent`.
    """

    terminal: bool = False
    deadline_s: float | None = None
    name: str | None = None
    max_output_tokens: int | None = None
    max_calls: int | None = None
    idempotent: bool = False
    retry: int = 0

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not (_is(self.deadline_s, int, float) and 0 < self.deadline_s < math.inf):
            raise ValueError(f"deadline_s is a positive number of seconds, got {self.deadline_s!r}")
        for name in ("max_output_tokens", "max_calls"):
            value = getattr(self, name)
            if value is not None and not (_is(value, int) and value >= 1):
                raise ValueError(f"{name} is a positive number, got {value!r}")
        if not (_is(self.retry, int) and self.retry >= 0):
            raise ValueError(f"retry is how often a failed call is made again, got {self.retry!r}")
        if self.name is not None and not (_is(self.name, str) and re.fullmatch(_NAME, self.name)):
            raise ValueError(f"name is a word without spaces, quotes and brackets, got {self.name!r}")
        if self.retry and not self.idempotent:
            raise ValueError("retry needs idempotent=True: a call that failed may still have had its effect")


def _is(value: Any, *kinds: type) -> bool:
    """`True` is no number here."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def tool(
    *,
    terminal: bool = False,
    deadline_s: float | None = None,
    name: str | None = None,
    max_output_tokens: int | None = None,
    max_calls: int | None = None,
    idempotent: bool = False,
    retry: int = 0,
) -> Callable[[_Function], _Function]:
    """Set options of a tool; `ToolOptions` says what they mean."""
    options = ToolOptions(
        terminal=terminal, deadline_s=deadline_s, name=name, max_output_tokens=max_output_tokens, max_calls=max_calls,
        idempotent=idempotent, retry=retry,
    )  # fmt: skip

    def mark(function: _Function) -> _Function:
        setattr(function, _MARK, options)
        return function

    return mark


def options_of(function: Callable[..., Any]) -> ToolOptions:
    """What `@tool` set on a function or method."""
    options: ToolOptions = getattr(function, _MARK, ToolOptions())
    return options


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
    `gate`, when there is one, lets so many calls through at a time; the function then keeps to its deadline by itself, and it counts
    from when the gate opens.
    """

    spec: ToolSpec
    signature: Arguments
    function: Callable[..., Any]
    options: ToolOptions = ToolOptions()
    environment: int | None = None
    gate: threading.Semaphore | None = None

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool of one rollout. `lock` is shared by the tools of one environment `instance`: only one of them runs at a time."""

    tool: Tool
    function: Callable[..., Any]
    lock: threading.Lock | None = None
    instance: Any = None
