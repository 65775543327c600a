"""A row's value to `Message`s and `ToolSpec`s: OpenAI style, sharegpt style, typed content parts, per-message weights.

Accepted, with the same result: arguments as object or JSON string; `tools` as list or JSON string; content as text or as parts of text,
thinking and calls; `role`/`content` or `from`/`value`; Python's type names in a schema; nulls that Arrow puts where other rows have a key.
Everything else is a `BadRow` with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from postgrad.data.files import parse_json
from postgrad.types import Message, Role, ToolCall, ToolSpec


class BadRow(ValueError):
    """Why one row cannot be used; the row is rejected with this reason, and counted."""


_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "function_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip


def read_messages(value: Any) -> tuple[Message, ...]:
    """The messages of one conversation, checked for order. Raises `BadRow`."""
    value = _from_json(value, "messages")
    if not isinstance(value, (list, tuple)) or not value:
        raise BadRow("messages must be a list that is not empty")
    messages = tuple(_message(item, index) for index, item in enumerate(value))
    _check_order(messages)
    return messages


def without_nulls(value: Any) -> Any:
    """A copy without the null-valued keys that Arrow adds to objects (every row gets the union of all rows' keys).

    >>> without_nulls({"city": "Oslo", "unit": None, "day": {"n": 1, "m": None}})
    {'city': 'Oslo', 'day': {'n': 1}}
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value


def read_tools(value: Any) -> tuple[ToolSpec, ...]:
    """Tools of a row: a list or JSON string of OpenAI-style tools, with or without the `function` wrapper. Raises `BadRow`."""
    if value is None or value in ("", [], ()):
        return ()
    return _read_tools(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


@lru_cache(maxsize=256)
def _read_tools(text: str) -> tuple[ToolSpec, ...]:
    value = without_nulls(_from_json(text, "tools"))
    if not isinstance(value, list):
        raise BadRow(f"tools must be a list, not {type(value).__name__}")
    return tuple(_tool(item, f"/tools/{index}") for index, item in enumerate(value))


def _tool(item: Any, pointer: str) -> ToolSpec:
    import jsonschema

    if isinstance(item, dict) and "function" in item:
        item, pointer = item["function"], f"{pointer}/function"
    if not isinstance(item, dict):
        raise BadRow(f"{pointer}: a tool is an object, not {type(item).__name__}")
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise BadRow(f"{pointer}/name: a tool needs a name")
    parameters = item.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise BadRow(f"{pointer}/parameters: must be a JSON Schema, not {type(parameters).__name__}")
    parameters = _json_types(parameters)
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        path = "".join(f"/{part}" for part in error.absolute_path)
        raise BadRow(f"{pointer}/parameters{path}: not a JSON Schema: {error.message}") from None
    return ToolSpec(name, str(item.get("description") or ""), parameters)


_PYTHON_TYPES = {
    "dict": "object", "list": "array", "tuple": "array", "set": "array", "str": "string", "int": "integer", "float": "number",
    "bool": "boolean", "NoneType": "null",
}  # fmt: skip
_ANY = "any"
_DATA_KEYS = ("enum", "default", "const", "examples")


def python_types(value: Any) -> tuple[str, ...]:
    """Python's type names in the schemas of a row's tools, which `read_tools` turns into JSON's; sorted."""
    try:
        read = _from_json(value, "tools")
    except BadRow:
        return ()
    return tuple(sorted(_named_types(read) & {*_PYTHON_TYPES, _ANY}))


def _named_types(node: Any) -> set[str]:
    if isinstance(node, (list, tuple)):
        return set().union(*map(_named_types, node)) if node else set()
    if not isinstance(node, Mapping):
        return set()
    found = set().union(*(_named_types(item) for key, item in node.items() if key not in _DATA_KEYS or isinstance(item, Mapping)))
    kinds = node.get("type")
    return found | {kind for kind in (kinds if isinstance(kinds, (list, tuple)) else [kinds]) if isinstance(kind, str)}


def _json_types(schema: Any) -> Any:
    """The schema with Python's type names as JSON's (`dict` → `object`; `any` = no type at all), as benchmarks write them."""
    if isinstance(schema, list):
        return [_json_types(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {key: _json_part(key, value) for key, value in schema.items()}
    kinds = schema.get("type")
    if isinstance(kinds, list) and _ANY not in kinds:
        result["type"] = [_PYTHON_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    elif isinstance(kinds, str) and kinds in _PYTHON_TYPES:
        result["type"] = _PYTHON_TYPES[kinds]
    elif kinds == _ANY or isinstance(kinds, list):
        del result["type"]
    return result


def _json_part(key: str, value: Any) -> Any:
    if key == "properties" and isinstance(value, Mapping):  # its keys are names of parameters, not of the schema language
        return {name: _json_types(item) for name, item in value.items()}
    return value if key in _DATA_KEYS else _json_types(value)


def has_null_arguments(messages: Any) -> bool:
    """Whether a call in a row's messages has a null-valued argument, as Arrow adds them."""
    if not isinstance(messages, (list, tuple)):
        return False
    calls = [call for item in messages if isinstance(item, Mapping) for call in (item.get("tool_calls") or ()) if isinstance(call, Mapping)]
    functions = [call["function"] if isinstance(call.get("function"), Mapping) else call for call in calls]
    found = [function.get("arguments") for function in functions]
    return any(without_nulls(value) != value for value in found if isinstance(value, Mapping))


def _message(item: Any, index: int) -> Message:
    if not isinstance(item, Mapping):
        raise BadRow(f"message {index} is {type(item).__name__}, not an object")
    written = _first(item, "role", "from")
    role = _ROLES.get(str(written))
    if role is None:
        raise BadRow(f"message {index} has the unknown role {written!r} (known: {', '.join(_ROLES)})")
    parts = _Parts(index).read(_first(item, "content", "value"))
    calls, content = (*parts.calls, *_calls(item.get("tool_calls"), index)), parts.content
    if written == "function_call":
        calls, content = _function_call(parts.content, index), ""
    if content is None and not calls:
        raise BadRow(f"message {index} ({role}) has no content")
    if calls and role != "assistant":
        raise BadRow(f"message {index} ({role}) calls tools; only an assistant can")
    reasoning = _text(item.get("reasoning_content") or item.get("reasoning") or item.get("thinking")) or parts.reasoning
    return Message(
        role, content or "", calls, tool_call_id=_text(item.get("tool_call_id")), name=_text(item.get("name")),
        reasoning=reasoning, train=_train(item, role, index),
    )  # fmt: skip


class _Parts:
    """Content as text, or as a list of typed parts: text, thinking, calls. `content` is None where there is none."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.content: str | None = None
        self.reasoning = ""
        self.calls: tuple[ToolCall, ...] = ()

    def read(self, value: Any) -> _Parts:
        if value is None or isinstance(value, str):
            self.content = value
        elif isinstance(value, Mapping):
            self._part(value)
        elif isinstance(value, (list, tuple)):
            for part in value:
                self._part(part)
            self.content = (self.content or "") if not self.calls else self.content
        else:
            raise BadRow(f"message {self.index} has content of type {type(value).__name__}; expected text or a list of typed parts")
        return self

    def _part(self, part: Any) -> None:
        if isinstance(part, str):
            self.content = (self.content or "") + part
            return
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind == "text":
            self.content = (self.content or "") + self._text_of(part, "text", "value")
        elif kind in ("thinking", "reasoning"):
            self.reasoning += self._text_of(part, "thinking", "reasoning", "text", "value")
        elif kind in ("tool_call", "tool_calls", "tool_use"):
            self.calls += self._calls_of(part)
        else:
            raise BadRow(f"message {self.index} has a content part of type {kind!r}; only text, thinking and tool calls are supported")

    def _text_of(self, part: Mapping[str, Any], *keys: str) -> str:
        text = _first(part, *keys)
        if not isinstance(text, str):
            raise BadRow(f"message {self.index} has a {part.get('type', 'text')} part without text")
        return text

    def _calls_of(self, part: Mapping[str, Any]) -> tuple[ToolCall, ...]:
        where = f"message {self.index}: {part['type']} part"
        if part["type"] == "tool_use":
            return _calls([{"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")}], self.index)
        value = _first(part, "tool_call", "tool_calls", "value")
        value = _from_json(value, where)
        return _calls(value if isinstance(value, list) else [value], self.index)


def _calls(value: Any, index: int) -> tuple[ToolCall, ...]:
    value = _from_json(value, f"message {index}: tool_calls") if isinstance(value, str) and value else value
    if not value:
        return ()
    if not isinstance(value, (list, tuple)):
        raise BadRow(f"message {index}: tool_calls must be a list")
    return tuple(_call(item, f"message {index}: tool call {number}") for number, item in enumerate(value))


def _function_call(content: str | None, index: int) -> tuple[ToolCall, ...]:
    value = _from_json(content, f"message {index}: function_call")
    return _calls(value if isinstance(value, list) else [value], index)


def _call(item: Any, where: str) -> ToolCall:
    function = item.get("function") if isinstance(item, Mapping) and isinstance(item.get("function"), Mapping) else item
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(f"{where} has no name")
    arguments = function.get("arguments", function.get("parameters"))
    arguments = _from_json(arguments, f"{where}: arguments") if isinstance(arguments, str) and arguments.strip() else arguments or {}
    if not isinstance(arguments, Mapping):
        raise BadRow(f"{where}: arguments must be an object, not {type(arguments).__name__}")
    return ToolCall(function["name"], without_nulls(arguments), id=_text(item.get("id")))


def _train(item: Mapping[str, Any], role: Role, index: int) -> bool | None:
    """`train: true|false`; `weight` or `loss_weight` 0 = false, 1 = as the recipe says. Other weights are refused, not rounded."""
    train = item.get("train")
    if train is not None and not isinstance(train, bool):
        raise BadRow(f"message {index}: train must be true or false, not {train!r}")
    for key in ("weight", "loss_weight"):
        weight = item.get(key)
        if weight is None:
            continue
        if isinstance(weight, bool) or weight not in (0, 1):
            raise BadRow(f"message {index}: {key} must be 0 or 1, not {weight!r}")
        train = False if weight == 0 else train
    if train and role != "assistant":
        raise BadRow(f"message {index} ({role}) is marked train: true; only assistant turns have a span that can be trained")
    return train


def _check_order(messages: Sequence[Message]) -> None:
    """Tool results must answer calls of the assistant turn before them, at most one each."""
    open_calls: list[ToolCall] | None = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            in_text = not message.tool_calls and ("<tool_call>" in message.content or "[TOOL_CALLS]" in message.content)
            open_calls = None if in_text else list(message.tool_calls)
        elif message.role != "tool":
            open_calls = []
        elif open_calls is not None:
            open_calls.remove(_answered(message, open_calls, index))


def _answered(message: Message, open_calls: Sequence[ToolCall], index: int) -> ToolCall:
    if not open_calls:
        raise BadRow(f"message {index} is a tool result, but no call before it waits for one")
    call = next((call for call in open_calls if call.id == message.tool_call_id), None)
    if call is None and message.tool_call_id and any(call.id for call in open_calls):
        raise BadRow(f"message {index} answers the call {message.tool_call_id!r}, which is not among {[call.id for call in open_calls]}")
    return call or open_calls[0]


def _from_json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise BadRow(f"{what} is text but not JSON: {error}") from None


def _first(item: Mapping[str, Any], *names: str) -> Any:
    """The first of these keys that says something: Arrow puts a null where other rows have a key."""
    for name in names:
        if (value := item.get(name)) is not None:
            return value
    return None


def _text(value: Any) -> str:
    return "" if value is None else str(value)
