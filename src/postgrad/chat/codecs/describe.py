"""What tells a model its tools where the chat template does not: a text for the system message, as short as it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.chat.codecs.hermes import HERMES
from postgrad.chat.codecs.jsons import dumps
from postgrad.chat.codecs.style import CallStyle
from postgrad.types import ToolCall, ToolSpec


def describe_tools(tools: Sequence[ToolSpec], style: CallStyle = HERMES) -> str:
    """The system text: it is in every prompt.

    >>> spec = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    >>> print(describe_tools([spec]))
    Tools:
    add(a: integer): Adds.
    To call one, write <tool_call>{"name": "add", "arguments": {"a": ...}}</tool_call>
    """
    lines = [f"{tool.name}({_signature(tool.parameters)}): {tool.description.strip()}".rstrip(": ") for tool in tools]
    return "\n".join(["Tools:", *lines, f"To call one, write {_example(tools[0], style)}"])


def _example(tool: ToolSpec, style: CallStyle) -> str:
    """A call with dots in the place of its values."""
    names = list(_properties(tool.parameters))
    required = [name for name in names if name in (tool.parameters.get("required") or ())]
    blank = "pgValue"
    written = style.write("", [ToolCall(tool.name, dict.fromkeys(required or names[:1], blank))])
    return written.replace(dumps(blank), "...").replace(blank, "...")


def _signature(parameters: Mapping[str, Any]) -> str:
    required = set(parameters.get("required") or ())
    return ", ".join(_parameter(name, schema, name in required) for name, schema in _properties(parameters).items())


def _properties(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _parameter(name: str, schema: Any, required: bool) -> str:
    text = f"{name}{'' if required else '?'}: {_type(schema)}"
    description = str(schema.get("description") or "").strip() if isinstance(schema, Mapping) else ""
    return f"{text} ({description})" if description else text


_PLAIN_KEYS = frozenset({"type", "description", "title"})


def _type(schema: Any) -> str:
    """A type as short as it can be without losing anything the schema says."""
    if not isinstance(schema, Mapping):
        return "any"
    if set(schema) == {"enum"} or (set(schema) <= {"enum", *_PLAIN_KEYS} and "enum" in schema):
        return " | ".join(dumps(value) for value in schema["enum"])
    if set(schema) <= _PLAIN_KEYS and isinstance(schema.get("type"), str):
        return str(schema["type"])
    if set(schema) <= {"items", *_PLAIN_KEYS} and schema.get("type") == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    return dumps({key: value for key, value in schema.items() if key not in ("description", "title")})
