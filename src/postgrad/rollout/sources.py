"""Makes tools of the entries of `tools:`: reads them, hands each to the module for its kind, and puts the entry's options on its tools."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from postgrad.errors import RecipeError, about
from postgrad.rollout.declare import Tool, ToolOptions
from postgrad.rollout.functions import Made, from_name
from postgrad.rollout.isolated import Confinement, IsolatedTool
from postgrad.rollout.items import Isolation, ToolItem
from postgrad.rollout.shipped import SHIPPED, from_shipped
from postgrad.suggest import did_you_mean

_T = TypeVar("_T")
ISOLATED_WORKERS = 4
"""Processes of one isolated function, unless the recipe says otherwise."""
_OPTIONS = ("terminal", "deadline_s", "max_output_tokens", "max_calls", "idempotent", "retry")


def read_items(items: Sequence[str | Mapping[str, Any] | ToolItem]) -> list[ToolItem]:
    """Raises `RecipeError` for an entry that means nothing. (One of a recipe file has been checked by then, with its lines.)"""
    try:
        return TypeAdapter(list[ToolItem]).validate_python(list(items))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        index, *keys = detail["loc"]
        below = "".join(f".{key}" for key in keys)
        raise RecipeError(f"{detail['msg']} (got {detail['input']!r})", key=f"tools[{index}]{below}", hint="see docs/agents.md") from error


def make(item: ToolItem, base: Path, *, allow_unsafe_exec: bool = False, to_run: bool = True) -> Made:
    """The tools of one entry, with its options on them. Paths are relative to `base`."""
    shipped = item.use in SHIPPED
    made = from_shipped(item, allow_unsafe_exec=allow_unsafe_exec, to_run=to_run) if shipped else _made(item, base)
    try:
        tools = tuple(replace(one, options=_options(one, item)) for one in made.tools)
    except RecipeError:
        made.close()
        raise
    return replace(made, tools=_gated(tools, item))


def chosen(found: Mapping[str, _T], *, include: Sequence[str] | None, exclude: Sequence[str]) -> dict[str, _T]:
    """What `include` or `exclude` leave, in the order found. Raises `RecipeError` for a name that is not there."""
    for key, names in (("include", include or ()), ("exclude", exclude)):
        for name in (name for name in names if name not in found):
            hint = did_you_mean(name, found, f"it has: {', '.join(found) or 'none'}")
            raise RecipeError(f"there is no tool {name!r}", key=key, hint=hint)
    return {name: value for name, value in found.items() if (include is None or name in include) and name not in exclude}


def _made(item: ToolItem, base: Path) -> Made:
    if item.mcp is not None:
        try:
            from postgrad.rollout import mcp_tools
        except ModuleNotFoundError as error:
            raise RecipeError("an MCP server needs the package mcp", key="mcp", hint="pip install 'postgrad[mcp]'") from error
        with about("mcp"):
            return mcp_tools.from_server(item.mcp, base)
    if item.openapi is not None:
        from postgrad.rollout import openapi

        with about("openapi"):
            return openapi.from_document(item.openapi, base)
    assert item.use is not None
    if ":" not in item.use and not item.use.endswith(".py"):
        hint = did_you_mean(item.use, SHIPPED, f"shipped tools: {', '.join(SHIPPED)}; your own: tools.py:function")
        raise RecipeError(f"there is no shipped tool {item.use!r}", key="use", hint=hint)
    if item.isolate is None:
        with about("use"):
            return from_name(item.use, base)
    workers = item.concurrency or ISOLATED_WORKERS
    isolated = IsolatedTool(item.use, base, _confinement(item.isolate), workers=workers)
    return Made((replace(isolated.tool(), gate=threading.Semaphore(workers)),), close=isolated.close)


def _confinement(limits: Isolation) -> Confinement:
    return Confinement(memory_bytes=int(limits.memory_gb * 2**30), processes=limits.processes, environment=tuple(limits.env))


def _options(one: Tool, item: ToolItem) -> ToolOptions:
    said = {name: value for name in _OPTIONS if (value := getattr(item, name)) is not None}
    idempotent, retry = said.get("idempotent", one.options.idempotent), said.get("retry", one.options.retry)
    if retry and not idempotent:
        hint = "write idempotent: true if calling it twice does what calling it once does, or leave retry out"
        raise RecipeError(f"`{one.name}` is not known to be idempotent, so it is never called again", key="retry", hint=hint)
    return replace(one.options, **said)


def _gated(tools: tuple[Tool, ...], item: ToolItem) -> tuple[Tool, ...]:
    """One gate for all tools of a server."""
    if item.concurrency is None or item.use is not None:
        return tools
    gate = threading.Semaphore(item.concurrency)
    return tuple(replace(one, gate=gate) for one in tools)
