"""Qwen3-Coder, Qwen3.5 and later, Nemotron-3: each parameter stands in tags of its own.

    <tool_call>⏎<function=name>⏎<parameter=key>⏎value⏎</parameter>⏎</function>⏎</tool_call>

Text stands as it is, everything else as JSON, so what `5` is only the tool's schema can say: `parse` reads every value as text, and `typed`
gives the values their types. Source: the chat templates of Qwen3-Coder and Qwen3.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.chat.codecs.jsons import dumps, json_type, read_json
from postgrad.chat.codecs.style import Call, CallStyle, CannotWrite, Parsed, joined, outside
from postgrad.types import MalformedCall, ToolCall, ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_END = re.compile(rf"</function>\s*{_CLOSE}")
_FORM = f"{_OPEN}, <function=name>, <parameter=key>, its value, </parameter>, </function>, {_CLOSE}, a line each"


# ---- writing


def write(content: str, calls: Sequence[ToolCall]) -> str:
    return joined(content, "\n".join(map(_written, calls))) if calls else content


def _written(call: ToolCall) -> str:
    if not re.fullmatch(r"[^>\s]+", call.name):
        raise CannotWrite(f"the name {call.name!r} cannot stand in a tag")
    lines = [_OPEN, f"<function={call.name}>"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else dumps(value)
        if not re.fullmatch(r"[^>\s]+", key) or "</parameter>" in text:
            raise CannotWrite(f"the parameter {key!r} and its value cannot stand between tags")
        lines += [f"<parameter={key}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>", _CLOSE])


# ---- reading


def parse(text: str) -> Parsed:
    """Calls whose values are all text.

    >>> parse("<tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>")
    ('', (ToolCall(name='add', arguments={'a': '1'}, id='call_0'),))
    """
    parts: list[str] = []
    calls: list[Call] = []
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        parts.append(text[position:start])
        call, position = _one(text, start + len(_OPEN), index=len(calls))
        calls.append(call)
    parts.append(text[position:])
    return outside(parts, calls), tuple(calls)


def _one(text: str, start: int, *, index: int) -> tuple[Call, int]:
    """(call, position after it) for the call whose opening tag ends at `start`."""
    head = _FUNCTION.match(text, start)
    if head is None:
        return _malformed(text, start, f"a call is written {_FORM}")
    arguments: dict[str, Any] = {}
    position = head.end()
    while parameter := _PARAMETER.match(text, position):
        if parameter[1] in arguments:
            return _malformed(text, start, f"the parameter {parameter[1]!r} stands twice")
        arguments[parameter[1]] = parameter[2]
        position = parameter.end()
    end = _END.match(text, position)
    if end is None:
        return _malformed(text, start, f"something else than parameters in their tags; a call is written {_FORM}")
    return ToolCall(head[1].strip(), arguments, id=f"call_{index}"), end.end()


def _malformed(text: str, start: int, error: str) -> tuple[Call, int]:
    following = text.find(_OPEN, start)
    end = following if following >= 0 else len(text)
    close = text.find(_CLOSE, start, end)
    if close < 0:
        return MalformedCall(text[start:end].strip(), f"the call is not closed with {_CLOSE}"), end
    return MalformedCall(text[start:close].strip(), error), close + len(_CLOSE)


# ---- types


def typed(call: ToolCall, tools: Sequence[ToolSpec]) -> ToolCall:
    """The call with values of the types that its tool's schema allows; what fits none of them stays text, for the schema to refuse.

    Where no schema says anything, what is JSON is read as JSON.
    """
    parameters = next((tool.parameters for tool in tools if tool.name == call.name), {})
    schemas = parameters.get("properties")
    known = schemas if isinstance(schemas, Mapping) else {}
    values = {key: _typed(text, _kinds(known.get(key))) for key, text in call.arguments.items()}
    return ToolCall(call.name, values, id=call.id)


_ALL = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_KINDS = {"a boolean": "boolean", "a string": "string", "a list": "array", "an object": "object", "null": "null"}


def _typed(text: str, kinds: frozenset[str]) -> Any:
    value, length, error = read_json(text)
    if error or text[length:].strip() or isinstance(value, str):
        return text
    kind = _KINDS.get(json_type(value), "number")
    fits = kind in kinds or (kind == "number" and "integer" in kinds)
    return value if fits or "string" not in kinds else text


def _kinds(schema: Any) -> frozenset[str]:
    """The types that a schema allows, as far as it says so in plain words."""
    if not isinstance(schema, Mapping):
        return _ALL
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, (list, tuple)):
        return frozenset(map(str, named))
    if isinstance(schema.get("enum"), (list, tuple)):
        return frozenset(_KINDS.get(json_type(value), "number") for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), (list, tuple)):
            return frozenset().union(*map(_kinds, schema[key]))
    return _ALL


XML = CallStyle("xml", write, parse, (_OPEN, _CLOSE), typed)
