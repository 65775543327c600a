"""Tool calls as text: how a call is written in an assistant turn, and how sampled text becomes calls again.

1. The *text protocol*, for templates without tool support: tools are described in the system message, a call is
   `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several per turn.
2. The styles of templates that have their own tool support: `hermes` (also Qwen), `llama3`, `mistral`. `recognise` finds the style in what
   the template prints for a probe call.

Reading never raises. Text between call markers that is no call becomes a `MalformedCall`, with an error that a model can act on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.types import MalformedCall, ToolCall, ToolSpec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
_MISTRAL = "[TOOL_CALLS]"

Call = ToolCall | MalformedCall
Parsed = tuple[str, tuple[Call, ...]]
"""(content outside the calls, calls in order)"""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """`parse` splits the text of a turn; `markers` are special-token strings it needs to see (others are dropped before)."""

    name: str
    parse: Callable[[str], Parsed]
    markers: tuple[str, ...]


# ---- the text protocol


def describe_tools(tools: Sequence[ToolSpec]) -> str:
    """The system text that tells a model its tools, as short as it can be: it is in every prompt.

    >>> spec = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    >>> print(describe_tools([spec]))
    Tools:
    add(a: integer): Adds.
    To call one, write <tool_call>{"name": "add", "arguments": {"a": ...}}</tool_call>
    """
    lines = [f"{tool.name}({_signature(tool.parameters)}): {tool.description.strip()}".rstrip(": ") for tool in tools]
    example = "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: ..." for name in _example_parameters(tools[0])) + "}"
    call = f'{OPEN}{{"name": {json.dumps(tools[0].name, ensure_ascii=False)}, "arguments": {example}}}{CLOSE}'
    return "\n".join(["Tools:", *lines, f"To call one, write {call}"])


def write_calls(content: str, calls: Sequence[ToolCall]) -> str:
    """`content` followed by the calls in the text protocol, one per line."""
    written = [OPEN + json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False) + CLOSE for call in calls]
    return "\n".join([content, *written] if content else written)


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
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if set(schema) <= _PLAIN_KEYS and isinstance(schema.get("type"), str):
        return str(schema["type"])
    if set(schema) <= {"items", *_PLAIN_KEYS} and schema.get("type") == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    return json.dumps({key: value for key, value in schema.items() if key not in ("description", "title")}, ensure_ascii=False)


def _example_parameters(tool: ToolSpec) -> list[str]:
    names = list(_properties(tool.parameters))
    required = [name for name in names if name in (tool.parameters.get("required") or ())]
    return required or names[:1]


# ---- reading calls


def parse_tagged(text: str) -> Parsed:
    """Calls between `<tool_call>` and `</tool_call>`.

    >>> parse_tagged('Hm.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Hm.', (ToolCall(name='add', arguments={'a': 1}, id='call_0'),))
    """
    outside: list[str] = []
    calls: list[Call] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        outside.append(text[position:start])
        call, position = _tagged_call(text, start + len(OPEN), index=len(calls))
        calls.append(call)
    outside.append(text[position:])
    return _content(outside, calls), tuple(calls)


def parse_llama3(text: str) -> Parsed:
    """A turn that is nothing but JSON objects with `name` and `parameters`, separated by `;` or white space. Other text is content."""
    rest = text.strip().removeprefix("<|python_tag|>").lstrip()
    if not _looks_like_call(rest):
        return text, ()
    calls: list[Call] = []
    while rest:
        value, end, error = _read_json(rest)
        if error:
            calls.append(MalformedCall(rest, error))
            break
        calls.append(_to_call(value, rest[:end], index=len(calls), keys=("parameters", "arguments")))
        rest = rest[end:].lstrip(" \n\t\r;")
    return "", tuple(calls)


def parse_mistral(text: str) -> Parsed:
    """A JSON list of calls after `[TOOL_CALLS]`."""
    content, marker, written = text.partition(_MISTRAL)
    if not marker:
        return text, ()
    value, end, error = _read_json(written)
    if error:
        return content.strip(), (MalformedCall(written.strip(), error),)
    if written[end:].strip():
        return content.strip(), (MalformedCall(written.strip(), "text follows the list of calls"),)
    items = value if isinstance(value, list) else [value]
    if not items:
        return content.strip(), (MalformedCall(written.strip(), "the list of calls is empty"),)
    calls = [_to_call(item, json.dumps(item, ensure_ascii=False), index=index) for index, item in enumerate(items)]
    return content.strip(), tuple(calls)


TEXT = CallStyle("text", parse_tagged, (OPEN, CLOSE))
HERMES = CallStyle("hermes", parse_tagged, (OPEN, CLOSE))
LLAMA3 = CallStyle("llama3", parse_llama3, ())
MISTRAL = CallStyle("mistral", parse_mistral, (_MISTRAL,))


def recognise(rendered: str, probe: ToolCall) -> CallStyle | None:
    """The style in which a template printed the assistant turn that holds `probe`; None when no style reads it back."""
    for style in (HERMES, MISTRAL, LLAMA3):
        _, calls = style.parse(rendered)
        if [(call.name, call.arguments) for call in calls if isinstance(call, ToolCall)] == [(probe.name, probe.arguments)]:
            return style
    return None


def _tagged_call(text: str, start: int, *, index: int) -> tuple[Call, int]:
    """(call, position after its closing marker) for the call whose opening marker ends at `start`.

    The JSON is read first, so `</tool_call>` inside a string does not end the call.
    """
    value, length, error = _read_json(text[start:])
    if not error:
        after = start + length
        gap = len(text[after:]) - len(text[after:].lstrip())
        if text.startswith(CLOSE, after + gap):
            return _to_call(value, text[start:after].strip(), index=index), after + gap + len(CLOSE)
        error = f"text follows the JSON object before {CLOSE}"
    close = text.find(CLOSE, start)
    following = text.find(OPEN, start)
    if close < 0 or 0 <= following < close:
        end = following if following >= 0 else len(text)
        return MalformedCall(text[start:end].strip(), f"the call is not closed with {CLOSE}"), end
    return MalformedCall(text[start:close].strip(), error), close + len(CLOSE)


def _to_call(value: Any, text: str, *, index: int, keys: tuple[str, ...] = ("arguments",)) -> Call:
    if not isinstance(value, dict):
        return MalformedCall(text, f"a call is a JSON object, not {_json_type(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'the call has no "name"' if name is None or name == "" else '"name" must be a string')
    key = next((key for key in keys if key in value), None)
    if key is None:
        return MalformedCall(text, f'the call has no "{keys[0]}" object')
    if not isinstance(value[key], dict):
        return MalformedCall(text, f'"{key}" must be a JSON object, not {_json_type(value[key])}')
    return ToolCall(name, value[key], id=f"call_{index}")


def _read_json(text: str) -> tuple[Any, int, str]:
    """(value, characters read, "") or (None, 0, why the text is not JSON)."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate (\ud800) is valid JSON but no text
    except json.JSONDecodeError as error:
        return None, 0, f"invalid JSON: {error.msg} at character {error.pos - start}"
    except RecursionError:
        return None, 0, "invalid JSON: nested too deeply"
    except ValueError as error:
        return None, 0, f"invalid JSON: {error}"
    return value, end, ""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]


def _content(outside: Sequence[str], calls: Sequence[Call]) -> str:
    """Text outside the calls: exactly as written when there are none, else its parts without the white space around them."""
    if not calls:
        return "".join(outside)
    return "\n".join(part for part in (part.strip() for part in outside) if part)


def _looks_like_call(text: str) -> bool:
    """True when the text opens a JSON object whose first keys are those of a call."""
    value, _, error = _read_json(text)
    if not error:
        return isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)
    head = "".join(text[:40].split())
    return head.startswith('{"name":')
