"""Tools that a row of the data brings without code: function-calling data such as BFCL, where the call itself is the answer.

Nothing runs. The arguments are checked against the tool's schema, as those of any tool; a call that fits ends the rollout, like that of a
terminal tool, and one that does not is an error that the model reads. What the call is worth is for a reward to say (`tool_match`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from postgrad.errors import DataError, RecipeError
from postgrad.rollout.declare import BoundTool, Tool, ToolOptions
from postgrad.rollout.schema import SchemaArguments
from postgrad.types import ToolSpec

_OPTIONS = ToolOptions(terminal=True, idempotent=True)


def declared_tools(specs: Iterable[ToolSpec], *, known: Container[str], where: str) -> dict[str, BoundTool]:
    """By name, the tools of a row that are not `known`. Raises `DataError` for a schema that arguments cannot be checked against."""
    return {spec.name: _bound(spec, where) for spec in specs if spec.name not in known}


def _bound(spec: ToolSpec, where: str) -> BoundTool:
    schema = {"additionalProperties": False, **spec.parameters} if "properties" in spec.parameters else spec.parameters
    try:
        arguments = SchemaArguments(schema, tool=spec.name, where=where)
    except RecipeError as error:
        raise DataError(error.what, where=where, hint=error.hint) from error
    return BoundTool(Tool(spec, arguments, _nothing, _OPTIONS), _nothing)


def _nothing(**arguments: Any) -> str:
    return ""
